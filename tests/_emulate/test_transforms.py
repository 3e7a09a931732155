"""`jc.emulate` and transformations: derivatives, loops, vmap, shards; and where random bits come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulate_cases import KEY, X, Y, straight, straight_scalar
from further import Further
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._core.rounding.random_bits import seed_words
from jchop._program.seeds import Seeds

further = Further()

# -- derivatives and transformations -----------------------------------------------------------------------------------


def the_derivative_of_an_emulation_is_the_carriers() -> None:
    fun = lambda x: jnp.sum(jnp.tanh(x) * x**3)  # noqa: E731
    outside = jax.grad(jc.emulate(fun, "e5m2"))(X)
    inside = jc.emulate(jax.grad(fun), "e5m2")(X)
    np.testing.assert_array_equal(inside, jc.round_to_format(inside, "e5m2"))
    assert not np.array_equal(outside, jc.round_to_format(outside, "e5m2"))
    # tanh' at the rounded argument, and the product with rounded factors: by hand, straight-through.
    r = lambda v: v + lax.stop_gradient(jc.round_to_format(v, "e5m2") - v)  # noqa: E731

    def by_hand(x: jax.Array) -> jax.Array:
        x = r(x)
        cube = x**3 + lax.stop_gradient(r(x * r(x * x)) - x**3)  # a power is one primitive, with its derivative
        return r(jnp.sum(r(r(jnp.tanh(x)) * cube)))

    np.testing.assert_allclose(outside, jax.grad(by_hand)(X), rtol=2e-5)


def derivatives_of_loops_and_of_higher_order() -> None:
    fun = lambda x: lax.fori_loop(0, 3, lambda i, c: c * x, x).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(jc.emulate(fun, "e8m20"))(X), jax.grad(fun)(X), rtol=1e-4)
    np.testing.assert_allclose(jax.hessian(jc.emulate(lambda x: (x**3).sum(), "e8m20"))(X), jnp.diag(6 * X), rtol=1e-4)
    _, tangent = jax.jvp(jc.emulate(lambda x: x * x, "e5m2"), (X,), (jnp.ones(4),))
    np.testing.assert_array_equal(tangent, 2 * jc.round_to_format(X, "e5m2"))
    assert float(jax.grad(jc.emulate(lambda x: jnp.power(x, 3.0), "e5m2"))(-2.0)) == 12  # no log of a negative number


@pytest.mark.smoke
def test_custom_derivatives_keep_their_rules() -> None:
    @jax.custom_jvp
    def first(x: jax.Array) -> jax.Array:
        return x * 1.1

    first.defjvp(lambda x, t: (first(x[0]), 7 * t[0]))

    @jax.custom_vjp
    def second(x: jax.Array) -> jax.Array:
        return x * 1.1

    second.defvjp(lambda x: (second(x), x), lambda x, g: (g * 5,))
    want = jc.emulate(lambda x: x * 1.1, "e5m3")(X)
    for fun, slope in ((first, 7), (second, 5)):
        np.testing.assert_array_equal(jc.emulate(fun, "e5m3")(X), want)
        assert jax.grad(lambda x, fun=fun: jc.emulate(fun, "e5m3")(x).sum())(X).tolist() == [slope] * 4
        assert jc.emulate(jax.grad(lambda x, fun=fun: fun(x).sum()), "e5m3")(X).tolist() == [slope] * 4


def vmap_inside_and_outside_and_remat() -> None:
    want = jc.emulate(straight, "e5m3")(X, Y)
    np.testing.assert_array_equal(jax.vmap(jc.emulate(straight_scalar, "e5m3"))(X, Y), want)
    np.testing.assert_array_equal(jc.emulate(jax.vmap(straight_scalar), "e5m3")(X, Y), want)
    again = jax.checkpoint(straight)
    np.testing.assert_array_equal(jc.emulate(again, "e5m3")(X, Y), want)
    np.testing.assert_array_equal(jc.emulate(lambda x, y: lax.map(lambda v: straight_scalar(*v), (x, y)), "e5m3")(X, Y),
                                  want)  # fmt: skip
    slope = lambda fun: jax.grad(lambda x: jc.emulate(fun, "e5m3")(x, Y).sum())(jnp.abs(X))  # noqa: E731
    np.testing.assert_array_equal(slope(again), slope(straight))


def test_scans_map_and_carry() -> None:
    fun = lambda x: lax.scan(lambda c, v: (c * 1.1 + v, c - v), 0.5, x, reverse=True)  # noqa: E731
    carry, ys = jc.emulate(fun, "e5m3")(X)
    c, want = 0.5, []
    step = jc.emulate(lambda c, v: (c * 1.1 + v, c - v), "e5m3")
    for v in X[::-1]:
        c, y = step(c, v)
        want.append(float(y))
    assert float(carry) == float(c) and ys.tolist() == want[::-1]


@jax.custom_batching.custom_vmap
def by_rule(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * y, y


@by_rule.def_vmap
def _(
    size: int, batched: list[bool], x: jax.Array, y: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[bool, bool]]:
    return (x * y / size + 0.1, y), (True, batched[1])  # unlike the function


def in_scan(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda c, z: (by_rule(c, z)[0], by_rule(z, y)[0]), x, jnp.array([0.7, 1.3]))


@further
@pytest.mark.in_turn(100)
@pytest.mark.parametrize("fun", [by_rule, in_scan])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def rules_of_batches_are_kept(fun: Callable[..., Any], axes: tuple[int | None, int | None]) -> None:
    """The numbers are those of the emulated batch, in which JAX itself has called the rule."""
    args = [x if axis is not None else x[0] for x, axis in zip((X, Y), axes, strict=True)]
    low = jc.emulate(fun, "bfloat16")
    wanted = jc.emulate(jax.vmap(fun, axes), "bfloat16")(*args)
    for batch in (jax.vmap(low, axes), jax.jit(jax.vmap(jax.jit(low), axes))):
        jax.tree.map(np.testing.assert_array_equal, batch(*args), wanted)
    if fun is by_rule:
        r = lambda v: np.asarray(v, jnp.bfloat16).astype(np.float32)  # noqa: E731
        np.testing.assert_array_equal(wanted[0], r(r(r(r(args[0]) * r(args[1])) / 4) + r(np.float32(0.1))))
        pair = jax.vmap(jax.vmap(low, axes), (0, None))
        both = jax.vmap(jax.vmap(fun, axes), (0, None))
        args[0] = jnp.stack([args[0], 3 * args[0]])
        jax.tree.map(np.testing.assert_array_equal, pair(*args), jc.emulate(both, "bfloat16")(*args))


def derivatives_of_rules_of_batches() -> None:
    """They are those of JAX, at the rounded arguments."""
    low = jc.emulate(by_rule, "bfloat16")
    value = lambda fun: lambda x: jax.vmap(fun)(x, Y)[0].sum()  # noqa: E731
    wanted = jax.grad(lambda x: jax.vmap(by_rule)(x, jc.round_to_format(Y, "bfloat16"))[0].sum())(X)
    np.testing.assert_array_equal(jax.grad(value(low))(X), wanted)
    np.testing.assert_array_equal(jax.jit(jax.grad(value(jax.jit(low))))(X), wanted)

    def forward(fun: Callable[..., Any]) -> Any:
        return jax.vmap(lambda x: jax.jvp(lambda x: fun(x, 1.5)[0], (x,), (1.0,))[1])(X)

    drawn = jc.emulate(by_rule, "bfloat16:stochastic", key=KEY)
    np.testing.assert_array_equal(forward(low), forward(by_rule))
    np.testing.assert_array_equal(forward(drawn), forward(by_rule))


def test_a_rule_of_batches_draws_for_the_whole_batch() -> None:
    low = jc.emulate(lambda x: by_rule(x, x)[0], "e5m2:stochastic")
    rows = jax.vmap(lambda x: low(x, key=KEY))(jnp.full(64, 0.3))
    assert len(set(rows.tolist())) > 1
    np.testing.assert_array_equal(rows, jax.vmap(lambda x: low(x, key=KEY))(jnp.full(64, 0.3)))
    keys = jax.random.split(KEY, 64)
    assert len(set(jax.vmap(lambda key: low(1.1, key=key))(keys).tolist())) > 1  # no batch, so the function itself


@further.first
def a_sequential_function_is_called_row_by_row() -> None:
    shapes = []

    @jax.custom_batching.sequential_vmap
    def called(x: jax.Array) -> jax.Array:
        def host(x: np.ndarray) -> np.ndarray:
            shapes.append(x.shape)
            return x

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) / 3

    np.testing.assert_array_equal(jax.vmap(jc.emulate(called, "e5m2"))(X), jc.emulate(lambda x: x / 3, "e5m2")(X))
    assert shapes == [()] * 4


@further
@pytest.mark.parametrize("text", ["e5m3", "e5m3:stochastic"])
def shards(text: str) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    fun = lambda v: v * 1.3 + lax.psum(v, "x")  # noqa: E731
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = jnp.full(64, 0.7)
    got = jax.jit(jc.emulate(mapped, text, key=KEY))(x)
    np.testing.assert_array_equal(got, jc.round_to_format(got, "e5m3"))
    if text == "e5m3":
        want = jc.emulate(lambda v: v * 1.3 + jnp.sum(v.reshape(4, 16), 0).repeat(4).reshape(16, 4).T.ravel(), text)(x)
        np.testing.assert_array_equal(got, want)
    else:
        parts = np.asarray(got).reshape(4, 16)
        assert any(not np.array_equal(parts[0], part) for part in parts[1:])


def test_shards_draw_by_the_axes_that_a_value_varies_over() -> None:
    """Shards of unlike values draw unlike words; what is the same on several shards stays so."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def fun(one: jax.Array, row: jax.Array, each: jax.Array) -> tuple[jax.Array, ...]:
        return one / 3, row / 3, each / 3

    specs = P(), P("x"), P(("x", "y"))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=specs)
    given = [jnp.ones(64 * n) for n in (1, 2, 4)]
    results = jax.jit(jc.emulate(mapped, "e5m2:stochastic", key=KEY))(*given)
    for result, count in zip(results, (1, 2, 4), strict=True):
        parts = {str(shard.index): set[bytes]() for shard in result.addressable_shards}
        for shard in result.addressable_shards:
            parts[str(shard.index)].add(np.asarray(shard.data).tobytes())
        assert len(parts) == count and all(len(found) == 1 for found in parts.values())
        assert len(set.union(*parts.values())) == count


def test_seeds_of_shards_are_not_those_of_turns() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    seeds = Seeds(tuple(seed_words(KEY)), ("x",))
    own = jax.shard_map(
        lambda x: x + jnp.stack(seeds.of(x))[:, None], mesh=mesh, in_specs=P("x"), out_specs=P(None, "x")
    )
    found = {tuple(column) for column in np.asarray(jax.jit(own)(jnp.zeros(2, jnp.uint32))).T.tolist()}
    turns = jax.vmap(jax.vmap(lambda number, turn: jnp.stack(seeds.turn(number, turn).six), (None, 0)), (0, None))
    others = np.asarray(turns(jnp.arange(64, dtype=jnp.uint32), jnp.arange(2, dtype=jnp.uint32))).reshape(-1, 6)
    assert len(found) == 2 and not found & {tuple(six) for six in others.tolist()}


# -- random bits -------------------------------------------------------------------------------------------------------


def test_draws_are_fresh_at_every_operation_and_turn() -> None:
    sr = "e5m2:stochastic"
    ones = jnp.full(2000, 1.0)
    a, b = jc.emulate(lambda x: (x / 3, x / 3), sr, key=KEY)(ones)
    assert not np.array_equal(a, b)
    turns = jc.emulate(lambda x: lax.map(lambda _: x / 3, jnp.arange(5)), sr, key=KEY)(ones)
    assert len({turn.tobytes() for turn in np.asarray(turns)}) == 5
    inner = jc.emulate(lambda x: lax.fori_loop(0, 50, lambda i, c: c + 0.01, x), sr, key=KEY)(ones)
    assert abs(float(jnp.mean(inner)) - 1.5) < 0.02  # rounding to nearest would stay at 1
    assert float(jc.emulate(lambda x: lax.fori_loop(0, 50, lambda i, c: c + 0.01, x), "e5m2")(1.0)) == 1


@further
def the_same_key_draws_the_same_again() -> None:
    f = jc.emulate(straight, "e5m2:stochastic")
    one = f(X, Y, key=KEY)
    np.testing.assert_array_equal(one, jax.jit(f)(X, Y, key=KEY))
    np.testing.assert_array_equal(one, jc.emulate(straight, "e5m2:stochastic", key=KEY)(X, Y))
    other = jc.emulate(straight, "e5m2:stochastic", key=KEY)(jnp.tile(X, 50), jnp.tile(Y, 50), key=jax.random.key(4))
    assert len(np.unique(np.asarray(other))) > 4


@further
@pytest.mark.parametrize(
    "check",
    [
        the_derivative_of_an_emulation_is_the_carriers,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (
                derivatives_of_loops_and_of_higher_order,
                derivatives_of_rules_of_batches,
                vmap_inside_and_outside_and_remat,
            )
        ),
    ],
)
def derivatives_and_batches(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
