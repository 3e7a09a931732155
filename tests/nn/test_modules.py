"""Modules that several paths lead to: rules, the report and folding see all of these."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_references import each

import jchop as jc

INT8, INT4 = ({"weight": text} for text in ("int8(group=all)", "int4(group=all)"))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dense(x))


class Shared(nnx.Module):
    """One block as encoder and as decoder, one of its layers as head, and a way back up."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.encoder = Block(rngs=rngs)
        self.decoder = self.encoder
        self.head = self.encoder.dense
        self.itself = self

    def __call__(self, x: Any) -> Any:
        return self.head(self.decoder(self.encoder(x)))


X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "float32")


def model() -> Shared:
    return Shared(rngs=nnx.Rngs(0))


def test_a_rule_for_any_path_of_a_module_counts() -> None:
    plain = model()
    kernel = jc.round_to_format(plain.head.kernel[...], "int8(channel=1)")
    for path in ("encoder/dense", "decoder", "head"):
        rounded = jc.nn.quantize(plain, [jc.Rule("norm"), jc.Rule(path, **INT8)])  # type: ignore[arg-type]
        assert rounded.head is rounded.encoder.dense and rounded.decoder is rounded.encoder
        np.testing.assert_array_equal(rounded.head(X), X @ kernel)
    same = [jc.Rule("norm"), jc.Rule("head", **INT8), jc.Rule("encoder", **INT8)]  # type: ignore[arg-type]
    np.testing.assert_array_equal(jc.nn.quantize(plain, same).head(X), X @ kernel)


@each("other", [INT4, {}, {**INT8, "activation": "e5m2"}])
def test_rules_that_disagree_about_one_module_are_an_error(other: dict[str, Any]) -> None:
    rules = [jc.Rule("head", **INT8), jc.Rule("encoder/dense", **other)]  # type: ignore[arg-type]
    for call in (jc.nn.quantize, jc.nn.report):
        with pytest.raises(
            ValueError, match=r"disagree .* 'encoder/dense' by Rule.*'head' by Rule\('head', weight=int8"
        ):
            call(model(), rules)


def test_the_report_has_every_path_and_counts_once() -> None:
    report = jc.nn.report(model())
    row = next(row for row in report.rows if row.layer == "Linear")
    assert (row.path, row.also) == ("decoder/dense", ("encoder/dense", "head"))
    assert report.bytes_before == 4 * (16 + 4 + 4)
    assert "decoder/dense, encoder/dense, head" in str(report)


def test_norms_fold_into_layers_by_any_path_but_into_shared_ones_not() -> None:
    plain = model()
    with pytest.raises(ValueError, match=r"'decoder/dense', a layer that is reached as .*'head'"):
        jc.nn.fold_batch_norms(plain, {"decoder/dense": "decoder/norm"})
    plain.head = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    plain.encoder.norm.mean[...] = jnp.array([1.0, -1.0, 2.0, 0.0])
    folded = jc.nn.fold_batch_norms(plain, {"encoder/dense": "encoder/norm"})
    assert type(folded.decoder.norm).__name__ == "Folded"
    np.testing.assert_allclose(folded(X), plain(X), atol=1e-5)
    with pytest.raises(ValueError, match="once"):
        jc.nn.fold_batch_norms(plain, {"encoder/dense": "encoder/norm", "decoder/dense": "decoder/norm"})
    with pytest.raises(TypeError, match=r"pairs=\['a'\]"):
        jc.nn.fold_batch_norms(plain, ["a"])  # type: ignore[arg-type]
