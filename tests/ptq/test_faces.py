"""One network as a function of parameters, a module of NNX and one of Linen: the same codes from the same data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from further import Further
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jchop as jc

further = Further()

RULE = jc.Rule(weight="int4(group=16)", activation="int8(group=all)")
STEPS = [jc.ptq.correct_error(), jc.ptq.gptq()]


class Module(nnx.Module):
    def __init__(self, w: Any, b: Any) -> None:
        self.first, self.second = nnx.Linear(32, 24, rngs=nnx.Rngs(0)), nnx.Linear(24, 8, rngs=nnx.Rngs(0))
        for layer, kernel, bias in zip((self.first, self.second), w, b, strict=True):
            layer.kernel, layer.bias = nnx.Param(kernel), nnx.Param(bias)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(x)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8, name="second")(linen.relu(linen.Dense(24, name="first")(x)))


def plain(p: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ p["first"]["kernel"] + p["first"]["bias"])
    return h @ p["second"]["kernel"] + p["second"]["bias"]


@further
@pytest.mark.parametrize(
    "steps, rotation",
    [
        (STEPS[1:], None),
        pytest.param(STEPS, None, marks=pytest.mark.slow),
        pytest.param(STEPS, jc.Hadamard("all", products="forward"), marks=pytest.mark.slow),
    ],
    ids=["inputs in full precision", "layer after layer", "rotated"],
)
def all_faces_give_the_same_numbers(steps: Any, rotation: jc.Hadamard | None) -> None:
    rule = replace(RULE, rotation=rotation)
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.normal(size=shape) / 5, jnp.float32) for shape in ((32, 24), (24, 8))]
    b = [jnp.asarray(rng.normal(size=n), jnp.float32) for n in (24, 8)]
    x = jnp.asarray(rng.normal(size=(300, 32)) @ rng.normal(size=(32, 32)) / 5, jnp.float32)
    params = {name: {"kernel": w[i], "bias": b[i]} for i, name in enumerate(("first", "second"))}
    own, report = jc.quantize_fn(plain, rule).pack(params, batches=[x[:100], x[100:]], steps=steps, return_report=True)
    assert all(row.after > row.before + 0.5 for row in report.weights)

    program = jc.nn.quantize(Linen(), rule)
    variables, of_linen = program.pack({"params": params}, batches=[x[:100], x[100:]], steps=steps, return_report=True)
    model, of_nnx = jc.nn.quantize(
        Module(w, b), rule, "ptq", batches=[x[:100], x[100:]], steps=steps, return_report=True
    )
    for name in ("first", "second"):
        expected = jax.tree.leaves(own[name]["kernel"])
        for found in (variables["params"][name]["kernel"], getattr(model, name).kernel.get_value()):
            for one, other in zip(expected, jax.tree.leaves(found), strict=True):
                np.testing.assert_array_equal(one, other)
    y = jc.quantize_fn(plain, rule)(own, x)
    np.testing.assert_array_equal(model(x), y)
    np.testing.assert_array_equal(program.apply(variables, x), y)
    for other in (of_linen, of_nnx):
        assert [row.path for row in other.weights] == [row.path for row in report.weights]
        np.testing.assert_allclose([r.after for r in other.weights], [r.after for r in report.weights], atol=1e-3)


@further.first
def a_quantized_model_is_refused() -> None:
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 24), (24, 8))]
    model, x = Module(w, [jnp.zeros(24), jnp.zeros(8)]), jnp.ones((4, 32))
    packed = jc.nn.quantize(model, RULE, "ptq", inputs=(x,))
    with pytest.raises(ValueError, match="model is packed already"):
        jc.nn.quantize(packed, RULE, "ptq", batches=[x], return_report=True)
    layer: Any = nnx.Sequential(nnx.Linear(32, 24, rngs=nnx.Rngs(0)), nnx.RMSNorm(24, rngs=nnx.Rngs(1)))
    for mode in ("qat", "ptq"):
        low = jc.nn.quantize(layer, [jc.Rule(layer="RMSNorm", weight="e4m3"), RULE], mode)
        for again in (partial(jc.nn.quantize, low, RULE, "ptq", batches=[x]),
                      partial(jc.nn.quantize, low, RULE, "ptq", inputs=(x,))):  # fmt: skip
            does = "rounds its kernel" if mode == "qat" else "has its kernel packed"
            with pytest.raises(ValueError, match=f"Linear at 'layers/0' {does} already; give the model that"):
                again()
    low = jc.nn.quantize(layer, jc.Rule(layer="RMSNorm", weight="e4m3"), "ptq")
    with pytest.raises(ValueError, match="RMSNorm at 'layers/1' has its scale packed already; give the model that"):
        jc.nn.quantize(low, RULE, "ptq", batches=[x], return_report=True)
    norms = jc.nn.quantize(layer, [jc.Rule("1", weight="e4m3"), jc.Rule(activation="int8(group=all)")])
    rounded, report = jc.nn.quantize(
        norms, RULE, "ptq", batches=[x], return_report=True
    )  # its weights are not rounded yet
    assert [row.path for row in report.weights] == ["layers/0/kernel"] and rounded(x).shape == (4, 24)
    with pytest.raises(TypeError, match="must be a module of Flax NNX"):
        jc.nn.quantize(plain, RULE, "ptq", batches=[x], return_report=True)  # type: ignore[type-var]


@further
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
@pytest.mark.parametrize("layers", [0, pytest.param(3, marks=pytest.mark.slow)])
def data_on_eight_devices_give_the_same_codes(layers: int) -> None:
    """Sums of rows have another order, so the last bits of statistics may differ, and no code does."""

    def network(p: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ p["first"])
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])[0] if layers else h

    rng = np.random.default_rng(0)
    shapes = {"first": (32, 24), "stack": (layers, 24, 24)}
    shapes = {name: shape for name, shape in shapes.items() if all(shape)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 5, jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(512, 32)) @ rng.normal(size=(32, 32)) / 5, jnp.float32)
    over = NamedSharding(Mesh(np.array(jax.devices()[:8]), "rows"), PartitionSpec("rows"))
    made = []
    for batches in ([x[:256], x[256:]], [jax.device_put(v, over) for v in (x[:256], x[256:])]):
        assert len(batches[0].sharding.device_set) == (8 if made else 1)
        made.append(jc.quantize_fn(network, RULE).pack(params, batches=batches))
    nearest = jc.quantize_fn(network, RULE).pack(params, x)
    for name in params:
        np.testing.assert_array_equal(made[0][name].qvalue, made[1][name].qvalue)
        np.testing.assert_array_equal(made[0][name].scale, made[1][name].scale)
        assert (made[0][name].qvalue != nearest[name].qvalue).any()


test_further = further.test()
