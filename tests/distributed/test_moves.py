"""Derivatives of the collectives in both modes, inside and outside of `jax.vmap`, and ranks of several vmaps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc

further = Further()

d = jc.distributed
EXACT = "bfloat16"  # holds the numbers here and their sums
CODES = "e4m3fn:gradient=[int8(group=4)]"
TURN = [(0, 1), (1, 2), (2, 3), (3, 0)]

#: Collectives of arrays (4, 8) over four ranks: ours with a spec, and JAX's own.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "psum": (d.psum, jax.lax.psum),
    "ring": (partial(d.psum, algorithm="ring"), jax.lax.psum),
    "psum_scatter": (partial(d.psum_scatter, scatter_dimension=1, tiled=True), partial(
        jax.lax.psum_scatter, scatter_dimension=1, tiled=True)),
    "all_gather": (partial(d.all_gather, axis=1), partial(jax.lax.all_gather, axis=1)),
    "all_to_all": (partial(d.all_to_all, concat_axis=1), partial(jax.lax.all_to_all, split_axis=0, concat_axis=1)),
    "ppermute": (partial(d.ppermute, perm=TURN), partial(jax.lax.ppermute, perm=TURN)),
}  # fmt: skip


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(np.float32)


def check_derivatives(names: list[str], rng: np.random.Generator) -> None:
    """Outside of the vmap: reverse mode, forward mode, and forward over reverse mode, are those of `jax.lax`."""
    x, t = integers(rng, 4, 4, 8), integers(rng, 4, 4, 8)

    def moved(fun: Callable[..., Any]) -> Any:
        mapped = jax.vmap(fun, axis_name="d")
        y, tangent = jax.jvp(mapped, (x,), (t,))
        inside = jax.vmap(lambda x, t: jax.jvp(fun, (x,), (t,))[1], axis_name="d")(x, t)
        weights = (jnp.arange(y.size) % 7).reshape(y.shape)
        gradient = jax.grad(lambda x: (mapped(x) ** 2 * weights).sum())
        return y, tangent, inside, *jax.jvp(gradient, (x,), (t,))

    pairs = [PAIRS[name] for name in names]
    ours, theirs = jax.jit(lambda: (
        [moved(lambda x, f=f: f(x, "d", EXACT)) for f, _ in pairs],
        [moved(lambda x, f=f: f(x, "d")) for _, f in pairs],
    ))()  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def check_codes(names: list[str], rng: np.random.Generator) -> None:
    """Outside of the vmap, cotangents move in the codes in which they move inside; tangents move as floats."""
    x, t = rng.standard_normal((2, 4, 4, 8)).astype(np.float32)

    def pulled(fun: Callable[..., Any]) -> Any:
        mapped = jax.vmap(fun, axis_name="d")
        y, tangent = jax.jvp(mapped, (x,), (t,))
        g = jnp.sin(jnp.arange(float(y.size))).reshape(y.shape)
        inside = jax.vmap(lambda x, g: jax.vjp(fun, x)[1](g)[0], axis_name="d")(x, g)
        return jax.vjp(mapped, x)[1](g)[0], inside, tangent

    found = jax.jit(lambda: [pulled(lambda x, f=PAIRS[name][0]: f(x, "d", CODES)) for name in names])()
    exact = jax.jit(lambda: [jax.vmap(lambda x, f=PAIRS[name][1]: f(x, "d"), axis_name="d")(t) for name in names])()
    for name, (outside, inside, tangent), floats in zip(names, found, exact, strict=True):
        assert outside.any() and (np.asarray(outside) == inside).all(), name
        np.testing.assert_allclose(tangent, floats, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (check_derivatives, ["psum", "all_gather"]),
        *(pytest.param(check_derivatives, [name], marks=pytest.mark.slow) for name in PAIRS),
        (check_codes, ["psum_scatter", "ppermute"]),
        *(pytest.param(check_codes, [name], marks=pytest.mark.slow) for name in PAIRS),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value),
)
def test_derivatives_in_both_modes(check: Any, names: list[str], rng: np.random.Generator) -> None:
    check(names, rng)


def check_two_axes(names: list[str], rng: np.random.Generator) -> None:
    """Ranks along two named axes, of two vmaps, are those along one; also their cotangents."""
    x = rng.standard_normal((4, 4, 8)).astype(np.float32)

    def both(fun: Callable[..., Any]) -> Any:
        one = jax.vmap(lambda x: fun(x, "d", "e4m3fn"), axis_name="d")
        two = jax.vmap(jax.vmap(lambda x: fun(x, ("a", "b"), "e4m3fn"), axis_name="b"), axis_name="a")
        wanted, pull = jax.vjp(one, x)
        found, pull_two = jax.vjp(lambda x: two(x.reshape(2, 2, 4, 8)).reshape(wanted.shape), x)
        g = (jnp.arange(wanted.size) % 5.0).reshape(wanted.shape)
        return (found, pull_two(g)), (wanted, pull(g))

    for found, wanted in jax.jit(lambda: [both(PAIRS[name][0]) for name in names])():
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    "names", [["psum", "all_gather"], *(pytest.param([name], marks=pytest.mark.slow) for name in PAIRS)], ids=",".join
)
def test_several_vmaps_are_several_axes(names: list[str], rng: np.random.Generator) -> None:
    check_two_axes(names, rng)


@further.first
def a_vmap_of_another_axis_sees_equal_numbers_on_all_ranks() -> None:
    """An array that does not differ along the axis of a vmap is summed over its ranks, with its derivative."""

    def summed(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda _: d.psum(x, "d", EXACT), axis_name="d")(jnp.zeros(3))[0]

    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(lambda x: summed(x).sum())))(jnp.ones((2, 4)))
    assert value.tolist() == [12.0] * 2 and gradient.tolist() == [[3.0] * 4] * 2


@further
def ranks_without_a_source_get_zeros_in_vmap() -> None:
    shift = partial(d.ppermute, axis_name="d", spec="e4m3fn", perm=[(0, 2), (3, 1)])
    x = jnp.arange(1.0, 5.0)
    assert jax.jit(jax.vmap(shift, axis_name="d"))(x).tolist() == [0, 4, 1, 0]
    assert jax.jit(jax.grad(lambda x: (jax.vmap(shift, axis_name="d")(x) * x).sum()))(x).tolist() == [3, 4, 1, 2]


@further
def codes_are_gathered_over_two_vmaps(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((4, 2, 8)), "float32")

    def whole(name: Any, x: jax.Array) -> Any:
        return d.unshard(d.quantize_parts(x, name, "int8(group=tensor)"), name)

    one = jax.jit(jax.vmap(partial(whole, "d"), axis_name="d"))(x)
    two = jax.vmap(jax.vmap(partial(whole, ("a", "b")), axis_name="b"), axis_name="a")
    two = jax.jit(two)(x.reshape(2, 2, 2, 8))
    np.testing.assert_array_equal(jc.dequantize(two).reshape(4, 8, 8), jc.dequantize(one))


test_further = further.test()
