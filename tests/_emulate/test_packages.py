"""Primitives of other packages under `jc.emulate`: rules for batches and derivatives, and what they are lowered to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jchop as jc

X = np.linspace(0.5, 3.0, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def halved() -> Iterator[Callable[..., Any]]:
    """A linear function of foreign code, which JAX cannot take apart, with rules of its own."""
    primitive = Primitive("halved")

    def impl(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x / 2, np.float32), shape, x)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=False))
    batching.primitive_batchers[primitive] = lambda xs, axes: (primitive.bind(xs[0]), axes[0])
    ad.deflinear(primitive, lambda cotangent: [primitive.bind(cotangent)])
    yield primitive.bind


#: Transformations around a function of one array of two axes, and of rows of it.
AROUND = {
    "vmap": jax.vmap,
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
}


@each("around", AROUND)
def test_rules_of_a_primitive_hold_around_the_emulated_function(halved: Callable[..., Any], around: str) -> None:
    """Foreign code has no other rule for batches, and no other derivative."""
    transform: Any = AROUND[around]
    got = transform(jc.emulate(lambda x: halved(x) * 2, "bfloat16"))(X)
    np.testing.assert_array_equal(got, np.ones_like(X) if "grad" in around else jc.round_to_format(X, "bfloat16"))


def test_rules_of_a_primitive_hold_within_loops(halved: Callable[..., Any]) -> None:
    """Under vmap around all."""
    rows = lambda x: jax.lax.scan(lambda c, v: (c, halved(v)), 0.0, x)[1]  # noqa: E731
    got = jax.vmap(jc.emulate(rows, "bfloat16"))(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(got, np.full((2, 3), 0.5))


def test_blame_takes_the_derivative_of_a_primitive_as_a_whole(halved: Callable[..., Any]) -> None:
    """Its foreign code has none."""
    found = jc.emulate(lambda x: halved(x * 0.1).sum(), "bfloat16").blame(X)
    rows = {row.primitive: row.contribution for row in found.rows}
    assert {"mul", "halved", "reduce_sum"} <= set(rows)
    assert abs(found.unexplained) < 1e-6 < abs(found.error)


def lowered(name: str, function: Callable[..., Any], several: bool = False, platform: str | None = None) -> Primitive:
    """A primitive whose only code is what it is lowered to."""
    primitive = Primitive(name)
    primitive.multiple_results = several
    primitive.def_abstract_eval(lambda x, **params: [x] * params["n"] if several else x)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=several), platform=platform)
    return primitive


#: The results of emulated primitives, and the same computation without them.
LOWERED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "one result": lambda: (lowered("one", lambda x: jnp.sin(x) * x).bind, lambda x: jnp.sin(x) * x),
    "several": lambda: (lambda x: lowered("several", lambda x, *, n: [jnp.exp(x)] * n, True).bind(x, n=2)[1], jnp.exp),
    "of one platform": lambda: (lowered("cpu", lambda x: x / 3, platform="cpu").bind, lambda x: x / 3),
}


@each("name", LOWERED)
def test_primitives_are_opened_by_what_they_are_lowered_to(name: str) -> None:
    """Where it is a function of JAX; every operation is then rounded."""
    primitive, plain = LOWERED[name]()
    got = jc.emulate(primitive, "e5m2")(X)
    np.testing.assert_array_equal(got, jc.emulate(plain, "e5m2")(X))


def test_a_primitive_that_is_lowered_by_hand_is_refused() -> None:
    """The error names what may be done with it."""
    primitive = Primitive("by_hand")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    with pytest.raises(NotImplementedError, match=r"'by_hand'.*unknown='carrier'.*unknown='round_output'"):
        jc.emulate(primitive.bind, "e5m2")(X)
    np.testing.assert_array_equal(
        jax.jit(jc.emulate(primitive.bind, "e5m2", unknown="round_output"))(X), jc.round_to_format(X, "e5m2")
    )
