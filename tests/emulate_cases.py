"""Programs and operands that the tests of `jc.emulate` share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

import jchop as jc

KEY = jax.random.key(3)


def foreign(name: str) -> Primitive:
    """A primitive of somebody else: its own numbers once more, by NumPy, so that it cannot be taken apart."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)
    primitive.def_impl(lambda x, **_: jnp.asarray(np.asarray(x) * np.float32(1.1)))
    return primitive


FOREIGN = foreign("foreign")
X = jnp.array([0.3, -1.7, 2.2, 5.1], jnp.float32)
Y = jnp.array([1.1, 0.2, -0.9, 3.3], jnp.float32)


def straight(x: jax.Array, y: jax.Array) -> jax.Array:
    z = x * y + 0.1
    return jnp.sqrt(z * z + x / y) - jax.jit(lambda v: v * 1.3)(y)


def loops(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    a = lax.fori_loop(0, 4, lambda i, c: c * y + x, x)
    b = lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 1.2 + 0.7, jnp.abs(x))
    return a, b, lax.cond(x[0] > 0, lambda v: v / y, lambda v: v - y, a)


def sums(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(x * y) + jnp.sum(y)


def low(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jc.round_to_format(jax.random.normal(jax.random.key(seed), shape), "e5m3")


def straight_scalar(x: jax.Array, y: jax.Array) -> jax.Array:
    return straight(x, y)
