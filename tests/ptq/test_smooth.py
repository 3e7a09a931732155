"""SmoothQuant: the factors against NumPy, gains on fresh data, all faces of one network, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from further import Further
from jax import lax

import jchop as jc
from jchop._quantized.quantize_fn import quantize_fn
from jchop.ptq._data.passes import BatchData
from jchop.ptq._equalize.mapping import map_parameters
from tests.ptq.test_fold import ATTENTION, attention, heads, rms
from tests.ptq.test_quantize import decibels, outliers

further = Further()

RULE = jc.Rule(weight="int8(group=all)")


def mapped(fun: Any, params: Any, batches: Any, *steps: Any, rule: Any = RULE) -> tuple[Any, Any]:
    data = BatchData(quantize_fn(fun, rule), params, batches)
    found = map_parameters(data, steps)
    return data.params, found


def arrays(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def norms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def test_factors_of_attention() -> None:
    """Queries, keys and values share the factors of their input; heads of one group those of the values."""
    fun, params = attention(False), arrays(ATTENTION)
    x = arrays({"x": (3, 4, 8)}, 1)["x"]
    found, _ = mapped(fun, params, [x[:2], x[2:]], jc.ptq.smooth(0.75))
    wide = {name: np.asarray(v, np.float64) for name, v in params.items()}
    y = norms(np.asarray(x, np.float64), wide["norm"])
    largest = np.max([np.abs(wide[name]).max(1) for name in "qkv"], 0)
    s = np.abs(y).max((0, 1)) ** 0.75 / largest**0.25
    np.testing.assert_allclose(found["norm"], wide["norm"] / s, rtol=1e-5)
    for name in "qk":
        np.testing.assert_allclose(found[name], wide[name] * s[:, None], rtol=1e-5)

    def inputs(p: Any, x: Any) -> Any:  # of the last product
        y = rms(x, p["norm"])
        q, k, v = (heads(y, p[name], n) for name, n in (("q", 4), ("k", 2), ("v", 2)))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    o = np.abs(np.asarray(inputs(params, x), np.float64)).max((0, 1)).reshape(2, 2, 2).max(1)
    rows = np.abs(wide["o"]).reshape(2, 2, 2, 8).max((1, 3))
    t = o**0.75 / rows**0.25
    np.testing.assert_allclose(found["v"], wide["v"] * s[:, None] / t.reshape(-1), rtol=1e-5)
    expected = wide["o"].reshape(2, 2, 2, 8) * t[:, None, :, None]
    np.testing.assert_allclose(found["o"], expected.reshape(8, 8), rtol=1e-5)
    before = np.asarray(fun(params, x), np.float64)
    np.testing.assert_allclose(fun(found, x), before, rtol=0, atol=4e-7 * np.abs(before).max())


@further
def each_turn_has_factors_of_its_own() -> None:
    def layer(h: Any, w: Any) -> Any:
        return h + jax.nn.relu(rms(h, w["scale"]) @ w["a"]) @ w["b"], None

    params = arrays({"scale": (2, 6), "a": (2, 6, 4), "b": (2, 4, 6)})
    x = arrays({"x": (9, 6)}, 1)["x"].at[:, 2].multiply(20)
    found, notes = mapped(lambda p, x: lax.scan(layer, x, p)[0], params, [x], jc.ptq.smooth())
    h = np.asarray(x, np.float64)
    for turn in range(2):
        own = {name: np.asarray(v[turn], np.float64) for name, v in params.items()}
        y = norms(h, own["scale"])
        z = np.maximum(y @ own["a"], 0)
        s, t = (np.sqrt(np.abs(v).max(0) / np.abs(w).max(1)) for v, w in ((y, own["a"]), (z, own["b"])))
        np.testing.assert_allclose(found["scale"][turn], own["scale"] / s, rtol=1e-5)
        np.testing.assert_allclose(found["a"][turn], own["a"] * s[:, None] / t, rtol=1e-5)
        np.testing.assert_allclose(found["b"][turn], own["b"] * t[:, None], rtol=1e-5)
        h = h + z @ own["b"]
    assert sorted(notes.methods.values()) == [["smooth"], ["smooth"]]


@further
def channels_without_inputs_or_weights() -> None:
    def fun(p: Any, x: Any) -> Any:
        return (x * p["scale"]) @ p["w"]

    params = {"scale": jnp.ones(4, jnp.bfloat16), "w": jnp.ones((4, 3), jnp.bfloat16).at[1].set(0)}
    x = jnp.array([[4.0, 9.0, 0.0, 1.0]], jnp.bfloat16)
    found, _ = mapped(fun, params, [x], jc.ptq.smooth())
    assert found["scale"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["scale"], jnp.array([0.5, 1 / 3, 1, 1], jnp.bfloat16))
    np.testing.assert_array_equal(found["w"][:, 0], jnp.array([2, 0, 1, 1], jnp.bfloat16))


def scaled(p: Any, x: Any) -> Any:
    return (x * p["scale"]) @ p["w"]


@further
@pytest.mark.parametrize(
    "text, least, gain",
    [("int8(group=all)", 39.2, 6), pytest.param("int4(group=all)", 11.9, 3.3, marks=pytest.mark.slow)],
)
def gains_on_fresh_data(text: str, least: float, gain: float) -> None:
    params, x, fresh = outliers()
    params |= {"scale": jnp.ones(256)}
    rule = jc.Rule(weight=text, activation=text)
    y, low, found = scaled(params, fresh), jc.quantize_fn(scaled, rule), []
    for steps in ([], [jc.ptq.smooth()]):
        packed = jc.quantize_fn(scaled, rule).pack(params, batches=[x], steps=steps)
        found.append(decibels(y, low(packed, fresh) - y))
    assert found[1] > max(least, found[0] + gain)


# -- the face of each library ------------------------------------------------------------------------------------------


class Module(nnx.Module):
    def __init__(self, p: Any) -> None:
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.first, self.second = (nnx.Linear(*n, rngs=nnx.Rngs(0)) for n in ((8, 12), (12, 4)))
        nnx.update(self, nnx.State(jax.tree.map(nnx.Param, p)))

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(self.norm(x))))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm(name="norm")(x)
        return linen.Dense(4, name="second")(linen.relu(linen.Dense(12, name="first")(x)))


def test_all_faces_give_the_same_numbers() -> None:
    shapes = {"norm": {"scale": (8,), "bias": (8,)}, "first": {"kernel": (8, 12), "bias": (12,)}}
    shapes |= {"second": {"kernel": (12, 4), "bias": (4,)}}
    params = {name: arrays(some, i) for i, (name, some) in enumerate(shapes.items())}
    x = arrays({"x": (20, 8)}, 9)["x"].at[:, 3].multiply(20)
    rule, steps = jc.Rule(weight="int4(group=4)"), [jc.ptq.smooth()]

    def plain(p: Any, x: Any) -> Any:
        return Linen().apply({"params": p}, x)

    own = jc.quantize_fn(plain, rule).pack(params, batches=[x], steps=steps)
    assert np.abs(own["norm"]["scale"] / params["norm"]["scale"] - 1).max() > 0.1
    y = jc.quantize_fn(plain, rule)(own, x)
    model, report = jc.nn.quantize(Module(params), rule, "ptq", batches=[x], steps=steps, return_report=True)
    np.testing.assert_allclose(model.norm.scale.get_value(), own["norm"]["scale"], rtol=1e-6)
    np.testing.assert_allclose(model(x), y, rtol=1e-3, atol=1e-3)
    assert [row.method for row in report.weights] == ["smooth", "smooth"]
    program = jc.nn.quantize(Linen(), rule)
    variables = program.pack({"params": params}, batches=[x], steps=steps)
    np.testing.assert_array_equal(variables["params"]["norm"]["scale"], own["norm"]["scale"])
    np.testing.assert_array_equal(program.apply(variables, x), y)


@pytest.mark.parametrize("step", [jc.ptq.smooth(), pytest.param(jc.ptq.awq(), marks=pytest.mark.slow)], ids=str)
def test_layers_by_a_constant_index_share_factors(step: Any) -> None:
    """Those of the inputs of all layers together, as of a product that takes all layers at once."""
    params, x = arrays({"scale": (6,), "w": (2, 6, 4)}), arrays({"x": (2, 9, 6)}, 1)["x"].at[:, :, 2].multiply(20)
    one = lambda p, x: [(x[i] * p["scale"]) @ p["w"][i] for i in range(2)]  # noqa: E731
    both = lambda p, x: (x * p["scale"]).reshape(18, 6) @ p["w"].swapaxes(0, 1).reshape(6, 8)  # noqa: E731
    found, _ = mapped(one, params, [x], step)
    np.testing.assert_allclose(found["scale"] * found["w"][0, :, 0], params["scale"] * params["w"][0, :, 0], rtol=1e-5)
    if isinstance(step, type(jc.ptq.smooth())):
        np.testing.assert_allclose(found["scale"], mapped(both, params, [x], step)[0]["scale"], rtol=1e-5)
    assert np.abs(found["scale"] / params["scale"] - 1).max() > 0.1


# -- reports and errors ------------------------------------------------------------------------------------------------


@further
def what_is_left_alone_is_in_the_report() -> None:
    def fun(p: Any, x: Any) -> Any:
        h = jax.nn.relu((x * p["scale"]) @ p["a"])
        return jax.nn.softmax(h @ p["b"]) @ p["c"]

    params = arrays({"scale": (8,), "a": (8, 8), "b": (8, 8), "c": (8, 4)})
    x = arrays({"x": (20, 8)}, 1)["x"].at[:, 3].multiply(20)
    packed, report = jc.quantize_fn(fun, RULE).pack(
        params, batches=[x], steps=[jc.ptq.smooth(), jc.ptq.gptq()], return_report=True
    )
    rows = {row.path: row for row in report.weights}
    assert {path: row.method for path, row in rows.items()} == {"a": "smooth, gptq", "b": "smooth, gptq", "c": "gptq"}
    assert rows["a"].note == "smooth folded into scale" and rows["b"].note == "smooth folded into a"
    assert "no factors by smooth: reduce_sum" in rows["c"].note and rows["c"].note in " ".join(str(report).split())
    assert report.passes == 2 and packed["scale"].shape == (8,)
    y = fun(params, x)
    nearest = jc.quantize_fn(scaled, RULE)({"scale": params["scale"], "w": params["a"]}, x)
    exact = scaled({"scale": params["scale"], "w": params["a"]}, x)
    np.testing.assert_allclose(rows["a"].before, decibels(exact, nearest - exact), atol=0.02)
    assert decibels(y, jc.quantize_fn(fun, RULE)(packed, x) - y) > 20


@pytest.mark.parametrize(
    "constant",
    [lambda: jnp.eye(4), lambda: jnp.cos(jnp.arange(4.0)), lambda: np.eye(4, dtype=np.float32)],
    ids=["converted", "computed", "closed over"],
)
def test_the_equation_that_takes_a_constant_is_named(constant: Any) -> None:
    params = arrays({"t": (4, 4), "o": (4, 3)})
    _, notes = mapped(lambda p, x: (x @ p["t"] + constant()) @ p["o"], params, [jnp.eye(4)], jc.ptq.smooth())
    assert notes.note(0, ()).startswith("no factors by smooth: add at ") and notes.note(0, ()).endswith(
        "a constant; online=True keeps them"
    )


@further
@pytest.mark.parametrize(
    "between", [[], pytest.param([jc.ptq.correct_error(), jc.ptq.gptq()], marks=pytest.mark.slow)], ids=len
)
def all_steps_together_and_after_a_kill(between: Any, tmp_path: Path) -> None:
    def fun(p: Any, x: Any) -> Any:
        return jax.nn.relu((x * p["scale"]) @ p["a"] + p["bias"]) @ p["b"]

    params = arrays({"scale": (16,), "a": (16, 12), "bias": (12,), "b": (12, 4)})
    x = arrays({"x": (80, 16)}, 1)["x"].at[:, 3].multiply(20)
    batches, rule = [x[:40], x[40:]], jc.Rule(weight="int4(group=all)", activation="int8(group=all)")
    steps = [jc.ptq.smooth(), *between, jc.ptq.correct_biases()]
    whole, report = jc.quantize_fn(fun, rule).pack(params, batches=batches, steps=steps, return_report=True)
    assert [row.method for row in report.weights] == ["smooth, correct_error, gptq" if between else "smooth"] * 2
    assert [row.bias for row in report.weights] == ["bias", ""]
    low, y = jc.quantize_fn(fun, rule), fun(params, x)
    assert decibels(y, low(whole, x) - y) > decibels(y, low(params, x) - y) + (6 if between else 2)

    def tell(count: int) -> None:
        seen.append(count)
        if len(seen) == (6 if between else 4):  # the second batch of the last stage, after those of the mapping
            raise KeyboardInterrupt

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        jc.quantize_fn(fun, rule).pack(
            params, batches=batches, steps=steps, resume=tmp_path / "run", progress=tell, return_report=True
        )
    again, told = jc.quantize_fn(fun, rule).pack(
        params, batches=batches, steps=steps, resume=tmp_path / "run", return_report=True
    )
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    assert str(told) == str(report)


@pytest.mark.parametrize("weight", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_batches_of_other_programs(weight: bool) -> None:
    """A factor must be folded alike in the program of every batch, also of one without the weight."""

    def fun(p: Any, x: Any) -> Any:
        h = x @ p["a"]
        if x.shape[0] == 4:
            return jax.nn.relu(h) @ p["b"]
        return jnp.tanh(h) @ p["b"] if weight else h

    params = arrays({"a": (8, 8), "b": (8, 4)})
    x = arrays({"x": (9, 8)}, 1)["x"]
    found, notes = mapped(fun, params, [x[4:], x[:4]], jc.ptq.smooth())
    assert found["a"] is params["a"] and found["b"] is params["b"]
    reason = "tanh" if weight else "other batches have a program"
    assert any(reason in text for text in notes.notes[1, ()])


@further.first
def bad_arguments() -> None:
    params, x = {"scale": jnp.ones(4), "w": jnp.ones((4, 3))}, jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"alpha=1\.5 must be a finite number >= 0 and <= 1"):
        jc.ptq.smooth(1.5)
    with pytest.raises(TypeError, match="alpha='a' must be"):
        jc.ptq.smooth("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="may have sequential, then smooth, awq and rotate, then"):
        jc.quantize_fn(scaled, RULE).pack(
            params, batches=[x], steps=[jc.ptq.gptq(), jc.ptq.smooth()], return_report=True
        )
    with pytest.raises(TypeError, match="can be run through once"):
        jc.quantize_fn(scaled, RULE).pack(params, batches=iter([x]), steps=jc.ptq.smooth(), return_report=True)


def test_parameters_that_overflow() -> None:
    small = {"scale": jnp.full(4, 6e4, jnp.float16), "w": jnp.full((4, 3), 10, jnp.float16)}
    with pytest.raises(ValueError, match="params: 'scale' of dtype float16 overflows under the factors of smooth"):
        mapped(scaled, small, [jnp.full((2, 4), 1e-5, jnp.float16)], jc.ptq.smooth())


test_further = further.test()
