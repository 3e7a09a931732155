"""Derivatives of round_to_format: straight-through, clipped, with the cotangent rounded; forward, reverse, both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from _round.test_round_transforms import KEY, OTHER, numbers, rounded, same
from further import Further
from jax import lax

import jchop as jc

further = Further()


def pulled(x: jax.Array, cotangent: jax.Array, spec: Any, key: jax.Array = KEY, **more: Any) -> jax.Array:
    """The cotangent of x, in one compiled program."""

    @jax.jit
    def run(x: jax.Array, cotangent: jax.Array, key: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: rounded(x, spec, key, **more), x)[1](cotangent)[0]

    return run(x, cotangent, key)


# --- straight-through ---------------------------------------------------------------------------------------------


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("dtype", "spec"), [
    (np.float32, "e4m3"), (np.float32, "integer8:wrap"), (np.float16, "e5m2:stochastic"),
    (cases.DTYPES["bfloat16"], "codebook(-1,0,1):up"), (np.complex64, "e5m2:odd"),
])  # fmt: skip
def test_straight_through_is_the_identity(dtype, spec):
    x = numbers(dtype, (4, 5)) * np.asarray(1e3).astype(dtype)
    x.flat[:4] = [np.inf, -np.inf, np.nan, 0]
    x, direction = jnp.asarray(x), jnp.asarray(numbers(dtype, (4, 5), seed=1))
    same(pulled(x, direction, spec), direction)
    value, tangent = jax.jit(lambda x, t: jax.jvp(lambda x: rounded(x, spec), (x,), (t,)))(x, direction)
    same(tangent, direction)
    same(value, rounded(x, spec))


@pytest.mark.smoke
def test_every_way_to_differentiate():
    x = jnp.asarray(numbers(np.float32, (5,)))
    f, one = (lambda x: rounded(x, "e4m3:stochastic")), jnp.ones(5)
    value, linear = jax.linearize(f, x)
    same(value, f(x))
    same(linear(x), x)
    same(jax.linear_transpose(linear, x)(x)[0], x)
    same(jax.grad(lambda x: f(x).sum())(x), one)
    same(jax.value_and_grad(lambda x: f(x).sum())(x)[1], one)
    same(jax.jit(jax.jacfwd(f))(x), jnp.eye(5))
    same(jax.jit(jax.jacrev(f))(x), jnp.eye(5))
    same(jax.vmap(jax.grad(f))(x), one)
    same(jax.jvp(f, (x,), (jnp.zeros(5),))[1], jnp.zeros(5))


def test_numbers_and_empty_arrays():
    assert jax.grad(lambda x: rounded(x, "e5m2:gradient=clipped"))(1.3) == 1
    assert jax.grad(lambda x: rounded(x, "e5m2:gradient=clipped"))(1e9) == 0
    assert jax.grad(lambda x: rounded(x, "e5m2:gradient=[e4m3]").sum())(jnp.zeros((0, 3))).shape == (0, 3)


def test_offsets_and_keys_have_no_derivative():
    x = jnp.ones(3)
    nothing = np.zeros((), jax.dtypes.float0)

    def f(x: jax.Array, offset: jax.Array) -> jax.Array:
        return rounded(x, "e5m2:stochastic:gradient=clipped+[e4m3:stochastic]", offset=offset)

    same(jax.jit(lambda x, o: jax.jvp(f, (x, o), (x, nothing)))(x, 5)[1], x)
    assert jax.vjp(f, x, jnp.int32(5))[1](x)[1].dtype == jax.dtypes.float0


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("spec", ["e4m3", "e4m3:gradient=clipped", "integer8:stochastic:gradient=clipped"])
def test_forward_and_reverse_agree(spec):
    """<c, J t> = <J' c, t>, both maps being linear where the cotangent is not rounded."""
    x, t, c = (jnp.asarray(numbers(np.float32, (40,), seed) * 40) for seed in range(3))
    pushed = jax.jit(lambda x, t: jax.jvp(lambda x: rounded(x, spec), (x,), (t,))[1])(x, t)
    np.testing.assert_array_equal(pushed * c, pulled(x, c, spec) * t)
    assert ("clipped" in spec) == bool((pushed != t).any())


# --- clipped ------------------------------------------------------------------------------------------------------

#: Formats, modes and overflow rules; the last are of no account to what overflowed.
CLIPPED: dict[str, tuple[Any, str, str, int]] = {
    "e4m3fn": (cases.NAMED["float8_e4m3fn"], "nearest_even", "ieee", 0),
    "e4m3fn saturating": (cases.NAMED["float8_e4m3fn"], "nearest_even", "saturate", 0),
    "e5m2 up": (cases.NAMED["float8_e5m2"], "up", "ieee", 0),
    "e5m2 toward zero": (cases.NAMED["float8_e5m2"], "toward_zero", "propagate", 0),
    "fnuz stochastic": (cases.NAMED["float8_e4m3fnuz"], "stochastic", "ieee", 4),
    "e4m3 by halves": (cases.NAMED["float8_e4m3"], "stochastic_equal", "saturate", 1),
    "fp4": (cases.NAMED["float4_e2m1fn"], "nearest_away", "ieee", 0),
    "e8m0": (cases.E8M0, "nearest_even", "ieee", 0),
    "unsigned p3109": (cases.P3109["binary8p3uf"], "down", "saturate", 0),
    "binary32 on float32": (cases.WIDE["binary32"], "up", "ieee", 0),
    "fixed wrapping": (cases.FIXED["fixed4.4"], "nearest_even", "wrap", 0),
    "fixed symmetric": (cases.FIXED["fixed4.4(symmetric=true)"], "nearest_zero", "ieee", 0),
    "integer8": (cases.FIXED["integer8"], "odd", "ieee", 0),
    "uinteger4": (cases.FIXED["uinteger4"], "nearest_even", "saturate", 0),
    "uint4 stochastic": (cases.FIXED["uinteger4"], "stochastic_b", "ieee", 3),
    "codebook": (oracle.codebook(cases.CODEBOOKS["uneven"]), "nearest_even", "ieee", 0),
    "codebook of positives": (oracle.codebook(cases.CODEBOOKS["positive"]), "stochastic", "ieee", 3),
}


def package_format(fmt: oracle.Set) -> Any:
    if isinstance(fmt, oracle.Levels):
        return jc.formats.CodebookFormat(tuple(map(float, fmt.levels)))
    if isinstance(fmt, oracle.FixedSet):
        return jc.formats.FixedFormat(fmt.bits - fmt.f, fmt.f, fmt.signed, fmt.symmetric)
    assert isinstance(fmt, oracle.FloatSet)
    fields = {"infinities": fmt.inf, "nans": fmt.nan, "signed": fmt.signed, "zero": fmt.zero}
    return jc.formats.FloatFormat(fmt.e, fmt.m, bias=fmt.bias, **fields)


def is_beyond(fmt: oracle.Set, x: oracle.Value, mode: str, n: int, r: int) -> bool:
    """Whether x rounds, on the grid without end, to a value beyond the ends of the format."""
    if x is oracle.Special.NAN:
        return False
    if x in (oracle.Special.INF, oracle.Special.NEG_INF):
        return True
    x = oracle.ZERO if x is oracle.Special.NEG_ZERO else x
    if isinstance(fmt, oracle.Levels):
        return not fmt.levels[0] <= x <= fmt.levels[-1]
    low, nu = oracle.neighbours(fmt, abs(x))
    return low + oracle.moves_away(mode, nu, fmt.odd(low), x < 0, n, r) > fmt.top(x < 0)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("case", CLIPPED)
def test_clipped_is_zero_exactly_where_the_value_overflowed(case):
    """Values above the largest one that still round to it keep their cotangent; NaN keeps it, infinities do not."""
    fmt, mode, overflow, n = CLIPPED[case]
    x = cases.adversarial(fmt, "float32", 400, np.random.default_rng(3))
    proportional = mode in oracle.PROPORTIONAL
    spec = jc.Spec(package_format(fmt), mode, overflow, n if proportional else None, gradient="clipped")
    words = np.asarray(jc.random_bits(KEY, x.shape)).tolist()
    exact = [oracle.from_bits(int(p), oracle.CARRIERS["float32"]) for p in cases.bits(x)]
    beyond = np.array([is_beyond(fmt, v, mode, n, w >> 32 - n) for v, w in zip(exact, words, strict=True)])
    assert beyond.any() and not beyond.all()
    cotangent = jnp.asarray(numbers(np.float32, x.shape, seed=4))
    got = np.asarray(pulled(jnp.asarray(x), cotangent, spec))
    expected = np.where(beyond, np.float32(0), np.asarray(cotangent))
    wrong = [f"{x[i]} ({cases.bits(x)[i]:#x})" for i in np.flatnonzero(got != expected)]
    assert not wrong, f"zero or not in the wrong place for {wrong[:8]}"


def test_clipped_parts_of_complex_numbers():
    x = jnp.array([1 + 1e9j, 1e9 + 1j, 2 - 3j], jnp.complex64)
    got = pulled(x, jnp.full(3, 2 + 5j, jnp.complex64), "e5m2:gradient=clipped")
    same(got, jnp.array([2 + 0j, 5j, 2 + 5j], jnp.complex64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clipped_on_narrow_carriers(dtype):
    x = jnp.asarray([448, 464, 465.0, 480, -500, jnp.nan, jnp.inf], dtype)
    got = pulled(x, jnp.ones_like(x), "e4m3fn:gradient=clipped")
    expected = [1, 1, 0, 0, 0, 1, 0] if dtype == "float16" else [1, 1, 1, 0, 0, 1, 0]  # 465 is 464 in bfloat16
    assert got.dtype == x.dtype and got.tolist() == expected


# --- the cotangent rounded ----------------------------------------------------------------------------------------


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("to", ["e4m3:up", "fixed4.4:wrap", "codebook(-1,0,1)"])
def test_cotangents_are_rounded(dtype, to):
    x, cotangent = (jnp.asarray(numbers(dtype, (3, 7), seed)) for seed in (0, 1))
    same(pulled(x, cotangent, jc.Spec("e5m2", gradient=to)), jc.round_to_format(cotangent, to))
    tangent = jax.jit(lambda x, t: jax.jvp(lambda x: rounded(x, jc.Spec("e5m2", gradient=to)), (x,), (t,))[1])
    same(tangent(x, cotangent), cotangent)


@further
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("forward", ["e5m2", "e5m2:stochastic"])
def cotangents_are_rounded_stochastically_with_a_key_of_their_own(forward):
    x, cotangent = (jnp.asarray(numbers(np.float32, (3, 257), seed)) for seed in (0, 1))
    spec = f"{forward}:gradient=[e4m3:stochastic]"
    expected = jc.round_to_format(cotangent, "e4m3:stochastic", OTHER)
    same(pulled(x, cotangent, spec), expected)
    same(jax.vjp(lambda x: rounded(x, spec), x)[1](cotangent)[0], expected)
    same(pulled(x, cotangent, spec, key=OTHER), expected)
    assert (np.asarray(expected) != np.asarray(jc.round_to_format(cotangent, "e4m3:stochastic", KEY))).any()
    part = pulled(x[1:], cotangent[1:], spec, offset=257)
    same(part, expected[1:])
    tile = pulled(x[1:, 5:9], cotangent[1:, 5:9], spec, offset=((1, 5), (3, 257)))
    same(tile, expected[1:, 5:9])


def test_clipped_and_rounded():
    x, cotangent = jnp.array([1.0, 1e9, 3.0, jnp.nan]), jnp.array([0.3, 0.3, 1e9, -0.7])
    got = pulled(x, cotangent, "e5m2:gradient=clipped+[e4m3fn:saturate]")
    same(got, jnp.array([0.3125, 0.0, 448.0, -0.6875]))


def vmap_of_rounded_cotangents():
    """Over split gradient keys, one shared key, rows of x only, and rows of the cotangent only: always the loop."""
    x, cotangent = (jnp.asarray(numbers(np.float32, (3, 17), seed)) for seed in (0, 1))
    keys = jax.random.split(KEY, 3)
    spec = "e4m3:gradient=clipped+[e5m2:stochastic]"

    @jax.jit
    def pull(x: jax.Array, cotangent: jax.Array, key: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: jc.round_to_format(x, spec, gradient_key=key), x)[1](cotangent)[0]

    rows = [[pull(a, b, key) for key in keys] for a, b in zip(x, cotangent, strict=True)]
    same(jax.vmap(pull)(x, cotangent, keys), jnp.stack([rows[i][i] for i in range(3)]))
    same(jax.vmap(pull, (0, 0, None))(x, cotangent, keys[1]), jnp.stack([rows[i][1] for i in range(3)]))
    same(jax.vmap(pull, (None, None, 0))(x[2], cotangent[2], keys), jnp.stack(rows[2]))
    same(jax.vmap(pull, (None, 0, None))(x[0], x, keys[1]), jnp.stack([pull(x[0], c, keys[1]) for c in x]))
    assert len({np.asarray(row).tobytes() for row in rows[2]}) == 3

    @jax.jit
    def inside(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda x, key: jc.round_to_format(x, spec, gradient_key=key))
        return jax.vjp(lambda x: rows(x, keys), x)[1](cotangent)[0]

    same(inside(x, cotangent), jnp.stack([rows[i][i] for i in range(3)]))


def scan_of_rounded_cotangents():
    """Backward through a scan, each step's cotangent is rounded with its own key, as in the unrolled loop."""
    x, keys, others = jnp.asarray(numbers(np.float32, (17,))), jax.random.split(KEY, 3), jax.random.split(OTHER, 3)
    spec = "e5m2:stochastic:gradient=clipped+[e4m3:stochastic]"

    def step(c: jax.Array, pair: Any) -> tuple[jax.Array, None]:
        return jc.round_to_format(c, spec, pair[0], gradient_key=pair[1]) * 3, None

    def loop(x: jax.Array) -> jax.Array:
        for k in range(3):
            x = step(x, (keys[k], others[k]))[0]
        return x

    scanned = jax.jit(lambda x: jax.vjp(lambda x: lax.scan(step, x, (keys, others))[0], x)[1](x)[0])(x)
    same(scanned, jax.jit(lambda x: jax.vjp(loop, x)[1](x)[0])(x))
    pushed = jax.jit(lambda x: jax.jvp(lambda x: lax.fori_loop(0, 3, lambda i, c: rounded(c, spec), x), (x,), (x,))[1])
    same(pushed(x), x)


@further
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "check", [scan_of_rounded_cotangents, vmap_of_rounded_cotangents], ids=lambda check: check.__name__
)
def cotangents_within_transforms(check: Callable[[], None]) -> None:
    check()


@further.first
def the_carrier_of_the_cotangent_is_checked_forward():
    """A cotangent has the dtype of x, so a format it cannot hold is refused when the function is traced."""
    x = jnp.ones(3, jnp.float16)
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        rounded(x, "e4m3:gradient=[bfloat16:saturate]")


# --- second derivatives -------------------------------------------------------------------------------------------

NESTED = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("spec", ["e5m2", "e5m2:stochastic:gradient=clipped+[e4m3:stochastic]"])
def test_second_derivatives(nesting, spec):
    """Zero through the estimator; of its square, 2 where the value did not overflow."""
    x = jnp.array([0.3, -1.7, 1e6])

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        plain = NESTED[nesting](lambda x: rounded(x, spec).sum())(x)
        return plain, NESTED[nesting](lambda x: (rounded(x, spec) ** 2).sum())(x)

    plain, squared = both(x)
    same(plain, jnp.zeros((3, 3)))
    same(squared, jnp.diag(jnp.array([2.0, 2.0, 0.0 if "clipped" in spec else 2.0])))


test_further = further.test()
