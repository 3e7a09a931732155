"""How long lowered programs are: lines of StableHLO, which tracing, lowering and compiling all pay for.

`benchmarks/compile_cost.py` measures the times too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from further import Further

import jchop as jc

further = Further()


def lines_of(function: Any, *args: Any) -> int:
    return jax.jit(function).lower(*args).as_text().count("\n")


class Layers(nnx.Module):
    """Six equal layers and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(6)])
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def lines_of_training(rule: jc.Rule | None) -> int:
    """Of a gradient of the layers."""
    model = Layers(nnx.Rngs(0))
    graph, state = nnx.split(model if rule is None else jc.nn.quantize(model, rule, rngs=nnx.Rngs(rounding=1)))
    loss = lambda state, x: (nnx.merge(graph, state)(x) ** 2).mean()  # noqa: E731
    return lines_of(jax.grad(loss, allow_int=True), state, jnp.ones((48, 32)))


INT8 = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", gradient="int8(group=all)")


def lines_of_optimizer(tx: Any) -> int:
    """Of an update of equal and unequal leaves."""
    params = {str(i): jnp.ones((32, 256)) for i in range(6)} | {"head": jnp.ones((16, 512)), "bias": jnp.ones(16)}
    return lines_of(tx.update, params, jax.eval_shape(tx.init, params), params)


@further.first
@pytest.mark.parametrize(
    ("lines", "own", "plain", "most"),
    [
        (lines_of_optimizer, jc.optim.adamw8bit(1e-3), optax.adamw(1e-3), 1_150),
        pytest.param(lines_of_training, INT8, None, 3_300, marks=pytest.mark.slow),
        pytest.param(lines_of_training, jc.nn.recipe("nvfp4"), None, 7_200, marks=pytest.mark.slow),
    ],
    ids=["optimizer", "int8", "nvfp4"],
)
def a_training_step(lines: Callable[[Any], int], own: Any, plain: Any, most: int) -> None:
    assert lines(own) - lines(plain) <= most


@further
@pytest.mark.parametrize(
    ("spec", "most"),
    [("dynamic8", 100), ("nf4(group=16)", 110), ("int8(group=16,scale=bfloat16)", 125), ("e4m3fn(group=16)", 185)],
)
def stored_numbers(spec: str, most: int) -> None:
    """Scales are prepared in few operations, and products of few numbers are rounded by one conversion."""
    q = jax.eval_shape(lambda: jc.quantize(jnp.ones((4, 256)), spec))
    assert lines_of(jc.dequantize, q) <= most


@further
def a_leaf_of_a_packed_optimizer() -> None:
    """Optimized lines of each leaf more: those of the plain optimizer, and unpacking and packing of two moments."""

    def optimized(count: int) -> int:
        params = {str(i): jax.ShapeDtypeStruct((16, 256), jnp.float32) for i in range(count)}
        tx = jc.optim.adamw8bit(1e-3)
        compiled = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
        return (compiled.as_text() or "").count("\n")

    assert optimized(3) - optimized(1) <= 2 * 1_400


WRAPPERS = [jc.optim.skip_nonfinite, partial(jc.optim.quantize_state, spec="bfloat16", min_size=1)]


@further
@pytest.mark.parametrize("wrap", WRAPPERS, ids=["skip_nonfinite", "quantize_state"])
@pytest.mark.in_turn(2)
def leaves_cost_as_much_as_each(wrap: Any) -> None:
    """Whether all leaves are finite is computed once. XLA fuses a test of n leaves with the n arrays it selects."""

    def optimized(count: int) -> int:
        params = {str(i): jnp.ones(8) for i in range(count)}
        tx = wrap(optax.trace(0.9))
        compiled = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
        return (compiled.as_text() or "").count("\n")

    few, more, many = map(optimized, (4, 12, 36))
    assert many - more <= 1.2 * 3 * (more - few)


def scanned(params: Any, x: Any) -> Any:
    """Layers that are computed again in the backward pass."""

    @jax.checkpoint
    def layer(x: Any, own: Any) -> Any:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    return jax.lax.scan(layer, x, params)[0]


@pytest.mark.parametrize("rule", ["nvfp4", INT8], ids=["nvfp4", "int8"])
def test_sixty_layers_of_a_scan_cost_one(rule: Any) -> None:
    """In a training step, and with packed parameters."""
    low, x = jc.quantize_fn(scanned, rule), jnp.ones((8, 64))
    found = []
    for count in (1, 60):
        params = {"up": jnp.ones((count, 64, 128)), "down": jnp.ones((count, 128, 64))}
        step = lines_of(jax.grad(lambda p, x: low(p, x).sum()), params, x)
        found.append((step, lines_of(low, low.pack(jax.eval_shape(lambda p=params: p), x), x)))
    assert all(many <= 1.05 * one for one, many in zip(*found, strict=True)), found


def chain(x: Any, y: Any) -> Any:
    """A hundred equations."""
    for i in range(100):
        x = (x + y, x * y, x / y, x - y)[i % 4]
    return x


@pytest.mark.in_turn(20)
@pytest.mark.parametrize(("spec", "most"), [("e4m3", 4), ("bfloat16", 8), ("bfloat16:stochastic", 17)])
def test_an_emulated_chain(spec: str, most: int) -> None:
    """The functions of four operations are most of it; another hundred equations are a call each, or two that draw."""
    x, low = jnp.ones((8, 8)), jc.emulate(chain, spec, key=jax.random.key(0))
    once, plain = lines_of(low, x, x), lines_of(chain, x, x)
    assert once <= most * plain
    twice = jc.emulate(lambda x, y: chain(chain(x, y), y), spec, key=jax.random.key(0))
    assert lines_of(twice, x, x) - once <= 3.3 * plain


@further
def a_shared_operation_has_its_derivatives() -> None:
    x, y = jnp.linspace(0.5, 1, 7), jnp.linspace(1, 2, 7)
    low = jc.emulate(lambda x, y: jnp.sum(x * y + x * y), "bfloat16")
    np.testing.assert_array_equal(jax.jit(jax.grad(low))(x, y), jax.grad(low)(x, y))
    many = jax.vmap(jax.grad(low), in_axes=(None, 0))(x, jnp.stack([y, 2 * y]))
    np.testing.assert_array_equal(many[0], jax.grad(low)(x, y))
    assert math.isfinite(float(many.sum()))


test_further = further.test()
