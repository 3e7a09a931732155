"""Training the 256-1024-256 network of 525,568 parameters for 100 steps: how far packed optimizers stray from AdamW.

And a small one by default.
"""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further

import jchop as jc
from jchop import optim

further = Further()

KEY = jax.random.key(1)
WIDE = 256


@lru_cache(maxsize=2)
def network(wide: int = WIDE) -> tuple[Any, Any]:
    """(parameters, weights of the teacher): matrices of (outputs, inputs), so that groups lie within an output."""
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> dict[str, jax.Array]:
        bound = inputs**-0.5
        w, b = rng.uniform(-bound, bound, (outputs, inputs)), rng.uniform(-bound, bound, outputs)
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)}

    with jax.ensure_compile_time_eval():  # the first call may be within a traced function
        params = {"l1": layer(wide, 4 * wide), "l2": layer(4 * wide, wide)}
        scales = wide**-0.5, (wide / 2) ** -0.5
        teacher = [jnp.asarray(rng.standard_normal((wide, wide)) * s, jnp.float32) for s in scales]
    return params, teacher


def loss_of(params: Any, key: jax.Array) -> jax.Array:
    """The mean squared error on a fresh batch."""
    wide = params["l2"]["b"].size
    x = jax.random.normal(key, (wide, wide))
    first, second = network(wide)[1]
    wanted = jax.nn.relu(x @ first) @ second
    p = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    hidden = jax.nn.relu(x @ p["l1"]["w"].T + p["l1"]["b"])
    return ((hidden @ p["l2"]["w"].T + p["l2"]["b"] - wanted) ** 2).mean()


def losses(
    tx: Any, params: Any, *, apply: Callable[..., Any] | None = None, read: Callable[[Any], Any] = lambda p: p
) -> np.ndarray:
    """The loss before each of 100 steps; `read` gives the plain numbers of parameters, and `apply` moves them."""
    apply = apply or (lambda p, u, key: optax.apply_updates(p, u))

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(read(params), key)
        updates, state = tx.update(grads, state, read(params))
        return (apply(params, updates, key), state), loss

    keys = jax.random.split(KEY, 100)
    run = jax.jit(lambda params, state: jax.lax.scan(step, (params, state), keys)[1])
    return np.asarray(run(params, jax.jit(lambda p: tx.init(read(p)))(params)), np.float64)


def deviation(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got / wanted - 1).max())


@lru_cache(maxsize=3)
def plain(learning_rate: float, wide: int = WIDE) -> np.ndarray:
    return losses(optax.adamw(learning_rate, weight_decay=1e-2), network(wide)[0])


def packed_follows(make: str, most: float) -> None:
    assert deviation(losses(getattr(optim, make)(1e-3), network()[0]), plain(1e-3)) <= most


def in_float32(tx: Any) -> Any:
    """`tx` on parameters of 16 bits, computing in float32."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.update(wide(updates), state, wide(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(wide(params)), update)


def stochastic_moves_where_nearest_stalls(wide: int, rate: float, most: float) -> None:
    half = jax.tree.map(lambda p: p.astype("bfloat16"), network(wide)[0])
    base = in_float32(optax.adamw(rate, weight_decay=1e-2))
    nearest = losses(optax.chain(base, optim.round_params("bfloat16")), half)
    stochastic = losses(optax.chain(base, optim.round_params("bfloat16:stochastic", KEY)), half)
    wanted = plain(rate, wide)
    if wide == WIDE:
        assert nearest[-1] > 0.9 * nearest[0] and wanted[-1] < 0.87 * wanted[0]
    else:  # the losses of small batches differ: both are compared on the last one
        assert nearest[-1] > 1.1 * wanted[-1]
    assert abs(stochastic[-1] / wanted[-1] - 1) <= most


def int8_parameters_without_a_copy() -> None:
    """Rows of int8, written back stochastically; rounded to nearest they would stay far behind."""
    tx = optax.adamw(1e-3, weight_decay=1e-2)
    far = {}
    for mode in ("stochastic", "nearest_even"):
        spec = jc.Spec(f"int8(channel=0):{mode}")

        def stored(path: Any, p: jax.Array, spec: jc.Spec = spec) -> Any:
            return jc.quantize(p, spec, KEY) if p.ndim == 2 else p

        params = jax.tree_util.tree_map_with_path(stored, network()[0])
        got = losses(tx, params, apply=optim.apply_updates, read=jc.dequantize)
        far[mode] = deviation(got, plain(1e-3))
    assert far["stochastic"] <= 0.012
    assert far["nearest_even"] > 5 * far["stochastic"]


CASES = {
    "bfloat16, small": (stochastic_moves_where_nearest_stalls, 32, 1e-4, 1e-2),
    "bfloat16": (stochastic_moves_where_nearest_stalls, WIDE, 1e-5, 1e-3),
    "adamw8bit": (packed_follows, "adamw8bit", 1e-3),
    "adamw_fp8": (packed_follows, "adamw_fp8", 5e-3),
    "adamw4bit": (packed_follows, "adamw4bit", 5e-2),
    "int8 parameters": (int8_parameters_without_a_copy,),
}


@further.first
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", CASES)
def training_follows_that_in_float32(name: str) -> None:
    check, *given = CASES[name]
    check(*given)


test_further = further.test()
