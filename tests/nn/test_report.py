"""What `report` says of parameters that stay in full precision, and the advice that errors give about them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jchop as jc

WEIGHT = jc.Rule(weight="e4m3")


class Patches(nnx.Module):
    """A module with parameters of its own above layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.position = nnx.Param(jnp.ones((2, 4)))
        self.kept = nnx.data([nnx.Param(jnp.ones(3))])
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.words = nnx.Embed(5, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dense(x + self.position[...]))


class Tokens(linen.Module):
    """Its twin of Linen."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + self.param("position", linen.initializers.ones, (2, 4))
        return linen.LayerNorm(name="norm")(linen.Dense(4, name="dense")(x))


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), "float32")


def test_parameters_of_its_own_are_no_weights_of_a_module_of_linen() -> None:
    variables = Tokens().init(jax.random.key(0), X)
    params = variables["params"]
    kernel = jc.round_to_format(params["dense"]["kernel"], "e4m3")
    wide = linen.LayerNorm().apply({"params": params["norm"]}, (X + 1) @ kernel)
    for rules in (WEIGHT, [jc.Rule("/"), jc.Rule("dense", weight="e4m3")]):
        np.testing.assert_array_equal(jc.nn.quantize(Tokens(), rules).apply(variables, X), wide)


@pytest.mark.smoke
def test_the_report_names_every_parameter_that_stays_wide() -> None:
    rules = [jc.Rule("/"), jc.Rule("norm"), jc.Rule("dense", weight="e4m3")]
    report = jc.nn.report(Patches(rngs=nnx.Rngs(0)), rules)
    assert set(report.wide) == {
        ("position", (2, 4), "Rule('/') rounds nothing"),
        ("kept/0", (3,), "Rule('/') rounds nothing"),
        ("norm/scale", (4,), "Rule('norm') rounds nothing"),
        ("norm/bias", (4,), "Rule('norm') rounds nothing"),
        ("dense/bias", (4,), "Rule('dense', weight=float8_e4m3) has no bias"),
        ("words/embedding", (5, 4), "no rule matches"),
    }
    assert "stays wide: words/embedding (5, 4): no rule matches" in str(report).splitlines()
    all_of_it = jc.nn.report(Patches(rngs=nnx.Rngs(0)), jc.Rule(weight="e4m3", bias="e4m3"))
    assert [
        path for path, _, why in all_of_it.wide if why == "Patches cannot be quantized as a layer, only in its program"
    ] == ["kept/0", "position"]
    assert [path for path, _, why in all_of_it.wide if why.endswith("decides other layers, too")] == ["norm/scale"]
    assert len(all_of_it.wide) == 3 and not jc.nn.report(Patches(rngs=nnx.Rngs(0))).wide


def test_the_report_of_linen_names_the_same() -> None:
    variables = Tokens().init(jax.random.key(0), X)
    rules = [jc.Rule("/"), jc.Rule("dense", weight="int8(group=all)")]
    low = jc.nn.quantize(Tokens(), rules)
    report = low.report(variables, X)
    assert {(row.path, row.shape, row.rule) for row in report.parameters if not row.spec} == {
        ("position", (2, 4), "Rule('/')"),
        ("norm/scale", (4,), ""),
        ("norm/bias", (4,), ""),
        ("dense/bias", (4,), "Rule('dense', weight=int8(group=all))"),
    }
    packed = jax.eval_shape(low.pack, variables, X)["params"]["dense"]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed)) == 16 + 16 + 16


def test_the_report_of_a_packed_model_names_the_formats_that_it_holds() -> None:
    rules = jc.Rule("dense", weight="nf4(group=2)")
    report = jc.nn.report(jc.nn.quantize(Patches(rngs=nnx.Rngs(0)), [jc.Rule("/"), rules], mode="weight_only"))
    assert {row.path: row.stored for row in report.rows if row.stored} == {
        "dense": (("kernel", "nf4(group=2,axis=-2)"),)
    }
    assert "kernel is nf4(group=2,axis=-2)" in str(report) and report.bytes_before == report.bytes_after
    assert report.columns()["path"] == [row["path"] for row in report.as_dict()["rows"]]
    assert report.to_csv().startswith("path,layer,rule,specs,")


def test_ratios_of_layers_are_those_of_the_definition() -> None:
    """Against NumPy: the layers by hand, each on the inputs that the model without rules gives it."""
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    rules = [jc.Rule("layers/0", weight="e4m3"), jc.Rule("layers/2", weight="e5m2", activation="e4m3")]
    found = jc.nn.report(model, rules, batches=[X, X + 1])
    given = np.concatenate([X, X + 1]).astype(np.float64)
    for row, layer, rounded in ((found.rows[0], 0, False), (found.rows[-1], 2, True)):
        first, own = (np.asarray(model.layers[i].kernel[...], np.float64) for i in (0, layer))
        x = np.tanh(given @ first) if rounded else given
        low = np.asarray(jc.round_to_format(model.layers[layer].kernel[...], rules[layer // 2].weight), np.float64)  # type: ignore[arg-type]
        z = np.asarray(jc.round_to_format(jnp.asarray(x, jnp.float32), "e4m3"), np.float64) if rounded else x

        def ratio(y: Any, error: Any) -> Any:
            return pytest.approx(10 * np.log10(np.sum(y**2) / np.sum(error**2)), abs=1e-3)

        assert row.weight_snr == ratio(own, low - own) and row.output_snr == ratio(x @ own, z @ low - x @ own)
        assert row.activation_snr == (ratio(x @ own, (z - x) @ own) if rounded else np.inf)
    assert str(found).splitlines()[0].split()[-2:] == ["results", "dB"] and "exact" in str(found)
    for changes, text in ({"batches": []}, "at least one"), ({"rules": None}, "no rules"), ({"inputs": (X,)}, "inputs"):
        with pytest.raises(ValueError, match=text):
            jc.nn.report(**{"model": model, "rules": rules, "batches": [X], **changes})
    with pytest.raises(ValueError, match="stochastically"):
        jc.nn.report(model, jc.Rule(weight="e4m3:stochastic"), batches=[X])


def test_ratios_of_both_products_of_an_embedding_and_of_none_within_a_scan() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(7, 6, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.embed.attend(x)

    model, x = Tied(nnx.Rngs(0)), np.eye(6, dtype=np.float32)
    row = jc.nn.report(model, jc.Rule(weight="e4m3"), batches=[x]).rows[0]
    assert row.weight_snr is not None and 20 < row.weight_snr < 60
    assert row.output_snr == pytest.approx(row.weight_snr, abs=1e-3)
    rnn = nnx.RNN(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0)))
    rows = jc.nn.report(rnn, jc.Rule(weight="e4m3"), batches=[np.ones((2, 3, 3), np.float32)]).rows
    assert [row.path for row in rows] == ["cell/dense_h", "cell/dense_i"]
    assert all(np.isnan(row.output_snr) and np.isnan(row.activation_snr) and row.weight_snr > 20 for row in rows)
