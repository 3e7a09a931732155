"""Functions that JAX composes of several operations, and that `emulate` takes for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy import special

import jchop as jc
from jchop._emulate.rules.functions import FUNCTIONS

X = jnp.array([0.3, 1.7, -2.9, 4.0, 1e-40, 0.0], jnp.float32)
CALLS: dict[str, Callable[[Any], Any]] = {
    "degrees": jnp.degrees,
    "radians": jnp.radians,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "logaddexp": lambda x: jnp.logaddexp(x, x + 1),
    "hypot": lambda x: jnp.hypot(x, 2.0),
    "gamma": special.gamma,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "floor_divide": lambda x: x // 3,
    "remainder": lambda x: x % 2.5,
    "ldexp": lambda x: jnp.ldexp(x, 3),
    "trunc": jnp.trunc,
    "frexp": lambda x: jnp.frexp(x)[0],
    "modf": lambda x: jnp.modf(x)[0],
}


def names_of(fun: Callable[..., Any], *args: Any) -> list[str]:
    plan = jc.emulate(fun, "bfloat16").programs.of(args, {}).plan
    return [step.name for step in plan.walk()]


def test_each_function_is_one_operation() -> None:
    assert set(CALLS) == {function.name for function in FUNCTIONS}
    for name, fun in CALLS.items():
        assert name in names_of(fun, X), name
        if name != "ldexp":
            assert name in names_of(lambda x, fun=fun: jax.jit(jax.vmap(fun))(x) + 1, X[:, None]), name


def test_values_are_those_of_math() -> None:
    for name in ("degrees", "log2", "log10", "gamma", "gelu", "trunc"):
        for text in ("bfloat16", "e5m2:up", "binary32"):
            got = jax.jit(jc.emulate(CALLS[name], text))(X)
            np.testing.assert_array_equal(got, getattr(jc.math, name)(X, text), err_msg=f"{name} {text}")
    got = jc.emulate(jnp.hypot, "e5m2:down")(X, 2.0)
    np.testing.assert_array_equal(got, jc.math.hypot(X, 2.0, "e5m2:down"))


@pytest.mark.parametrize("fun", [jnp.logaddexp, jnp.hypot, jnp.floor_divide], ids=lambda fun: fun.__name__)
def test_batches_of_one_operand_are_the_same_operation(fun: Callable[..., Any]) -> None:
    """Also if the program is traced under another setting of JAX than the example."""
    x, y = jnp.linspace(-3, 3, 16), jnp.linspace(4, -5, 16)
    whole = jc.emulate(lambda x, y: fun(x[:, None], jnp.broadcast_to(y, (16, 16))), "bfloat16")(x, y)
    programs = {
        "scalars": lambda x, y: jax.vmap(lambda p: fun(p, y))(x),
        "rows of one": lambda x, y: jax.vmap(lambda p: fun(p, y))(x[:, None]),
        "the other operand": lambda x, y: jax.vmap(lambda p: fun(x, p), out_axes=1)(y),
        "both": lambda x, y: jax.vmap(lambda p: jax.vmap(lambda q: fun(p, q))(y))(x),
        "scalars beside a batch": lambda x, y: jax.vmap(fun)(x, jnp.broadcast_to(y, (16, 16))),
    }
    for name, program in programs.items():
        np.testing.assert_array_equal(jc.emulate(program, "bfloat16")(x, y), whole, err_msg=name)
        with jax.threefry_partitionable(False):
            np.testing.assert_array_equal(jc.emulate(program, "bfloat16")(x, y), whole, err_msg=name)


def test_the_same_operations_of_a_user_stay_apart() -> None:
    assert names_of(lambda x: x * 57.29578, X) == ["mul"]
    assert "log2" not in names_of(lambda x: (jnp.log(x), jnp.log(x) / jnp.log(jnp.float32(2))), X) or hasattr(
        jax.lax, "log2_p"
    )
    assert "gelu" not in names_of(jax.nn.gelu, X)


def test_a_rule_names_the_function() -> None:
    low = jc.emulate(lambda x: jnp.hypot(x, x) + x, "e5m2", rules={"hypot": None})
    want = jnp.hypot(*[jc.round_to_format(X, "e5m2")] * 2)
    np.testing.assert_array_equal(low(X), jc.math.add(jc.round_to_format(want, "e5m2"), X, "e5m2"))


def test_derivatives_are_those_of_the_carrier() -> None:
    for name in ("log2", "hypot", "degrees"):
        got = jax.grad(lambda x, name=name: jc.emulate(CALLS[name], "e8m15")(x))(jnp.float32(1.5))
        want = jax.grad(CALLS[name])(jnp.float32(1.5))
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_subnormal_numbers_and_nan_are_not_lost(dtype: Any) -> None:
    least = np.finfo(dtype).smallest_subnormal
    spec = "binary32" if dtype == np.float32 else "binary16"
    x = np.array([[-least, -0.0, least], [-1, np.nan, 2]], dtype)
    for fun in (jnp.max, jnp.min):
        got = jc.emulate(lambda x, fun=fun: fun(x, axis=1), spec)(jnp.asarray(x))
        np.testing.assert_array_equal(got, getattr(np, fun.__name__)(x, axis=1))
    assert jc.emulate(lambda x: jnp.argmax(x, axis=1), spec)(jnp.asarray(x)).tolist() == [2, 1]
    assert jc.emulate(lambda x: jnp.argmin(x, axis=1), spec)(jnp.asarray(x)).tolist() == [0, 1]
    np.testing.assert_array_equal(jc.emulate(jnp.floor, spec)(jnp.asarray(x[0])), [-1, -0.0, 0])
    np.testing.assert_array_equal(jc.emulate(jnp.ceil, spec)(jnp.asarray(x[0])), [-0.0, -0.0, 1])
