"""The elementwise functions of `jchop.math` against their real functions rounded once, under every transformation."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_arithmetic
import oracle_math
import pytest
import scipy.special
from further import Further
from math_draws import result_words, rounded_operand
from oracle_matmul import How, rounded
from refusals import assert_refused

import jchop as jc

further = Further()

KEY = jax.random.key(11)
F32 = oracle.CARRIERS["float32"]
untyped: Any = jc.math


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.dtype.name in oracle.CARRIERS:
        cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))
    else:
        np.testing.assert_array_equal(got, expected)


def same_of(name: str, got: Any, expected: Any) -> None:
    """`same`, of one function of a table."""
    try:
        same(got, expected)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


# -- exact functions ---------------------------------------------------------------------------------------------------

HOWS: dict[str, How] = {
    "bfloat16": How(oracle.ieee(8, 7)),
    "e5m2:up": How(oracle.ieee(5, 2), "up"),
    "e4m3:down:saturate": How(oracle.ieee(4, 3), "down", "saturate"),
    "e5m10:odd": How(oracle.ieee(5, 10), "odd"),
    "fixed4.4:nearest_away": How(oracle.fixed(4, 4), "nearest_away"),
    "e5m5:stochastic": How(oracle.ieee(5, 5), "stochastic"),
}


def operand_count(name: str) -> int:
    return list(inspect.signature(getattr(jc.math, name)).parameters).index("spec")


@cache
def operands(text: str, count: int) -> list[np.ndarray]:
    """Hard numbers of a format, and its specials."""
    rng = np.random.default_rng(5)
    some = [oracle_arithmetic.interesting(HOWS[text].fmt, F32, 300, rng) for _ in range(count)]
    ends = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3], np.float32)
    grid = np.meshgrid(*[ends] * count)
    columns = [np.concatenate([x, g.ravel()[:64]]) for x, g in zip(some, grid, strict=True)]
    how = HOWS[text]
    return [np.asarray(jc.round_to_format(x, f"{text.split(':')[0]}:{how.overflow}")) for x in columns]


@further.first
@pytest.mark.parametrize("text", HOWS)
def the_exact_result_is_rounded_once(text: str) -> None:
    """Each function in three of the arithmetics; those that are one operation of `_core` meet all six together."""
    for name in list(oracle_math.EXACT)[list(HOWS).index(text) % 2 :: 2]:
        count = operand_count(name)
        given = operands(text, count)
        words = result_words(KEY, given[0].shape, count)
        got, want = getattr(jc.math, name)(*given, text, KEY), oracle_math.applied(name, given, HOWS[text], words)
        same_of(name, got, want)


@further
def operands_are_rounded_first_each_with_its_own_draw() -> None:
    x, y = (np.random.default_rng(i).normal(size=50).astype(np.float32) for i in range(2))
    text = "e4m3:stochastic"
    a, b = (rounded_operand(v, text, KEY, i) for i, v in enumerate((x, y)))
    words = result_words(KEY, (50,), 2)
    how = How(oracle.ieee(4, 3), "stochastic")
    same(jc.math.multiply(x, y, text, KEY), oracle_math.applied("multiply", [a, b], how, words))


def test_float64_numbers_stay_exact_without_the_flag() -> None:
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    x, y = np.float64(1) + 2.0**-30, np.float64(2.0**-60)
    assert jc.math.add(np.float64(1), y, "binary32:up") == 1 + 2.0**-23
    assert jc.math.add(x, y, "e8m35:up") == 1 + 2.0**-30 + 2.0**-35
    assert jc.math.sqrt(np.float64(2), "binary32") == np.sqrt(np.float32(2))


@further
def ldexp_is_exact() -> None:
    how = How(oracle.ieee(8, 7), "up")
    (x,) = operands("bfloat16", 1)
    for n in (-300, -151, -140, -3, 0, 5, 130, 260):
        scale = oracle.pow2(n)
        want = [rounded(oracle_arithmetic.multiply(v, scale), how, F32, 0) for v in oracle_math.values(x)]
        same_of(f"n={n}", jc.math.ldexp(x, n, "bfloat16:up"), oracle_math.array(want))


def test_two_results_are_those_of_numpy() -> None:
    (x,) = operands("bfloat16", 1)
    for name in ("frexp", "modf"):
        for mine, theirs in zip(getattr(jc.math, name)(x, "bfloat16"), getattr(np, name)(x), strict=True):
            same_of(name, mine, theirs)


@further
def both_parts_of_modf_are_rounded() -> None:
    fraction, whole = jc.math.modf(np.float32(2.8125), jc.Spec("e4m6", rounding="up"))
    assert (fraction, whole) == (0.8125, 2)
    a, b = jc.math.modf(np.full(400, 2.5, np.float32), "fixed4.0:stochastic", KEY)
    assert set(a) == {0.0} and set(b) == {2.0, 3.0}


def test_differences_are_rounded_one_by_one() -> None:
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float16).astype(np.float32)
    for n, axis in ((0, 0), (1, -1), (2, 0), (2, -1)):
        want = np.diff(x.astype(np.float16), n=n, axis=axis).astype(np.float32)
        same_of(f"n={n}, axis={axis}", jc.math.diff(x, "binary16", n=n, axis=axis), want)


# -- what the carrier holds, and integers ------------------------------------------------------------------------------

HELD = ("floor", "ceil", "round", "trunc", "sign", "abs", "fabs", "negative", "real", "imag", "conj")


def test_what_needs_no_rounding_is_that_of_numpy() -> None:
    """Subnormal numbers too, which a device may read as zero."""
    (x,) = operands("bfloat16", 1)
    for name in HELD:
        with np.errstate(invalid="ignore"):
            want = getattr(np, name)(x)
        got = getattr(jc.math, name)(x, "bfloat16")
        same_of(name, np.abs(got) if name == "sign" else got, np.abs(want) if name == "sign" else want)
        assert name != "sign" or np.array_equal(got, want, equal_nan=True)


def test_the_larger_and_the_smaller() -> None:
    x, y = operands("bfloat16", 2)
    for name in ("maximum", "minimum"):
        got, want = getattr(jc.math, name)(x, y, "bfloat16"), getattr(np, name)(x, y)
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_clip() -> None:
    (x,) = operands("bfloat16", 1)
    same(jc.math.clip(x, -1.5, 2.0, "bfloat16"), np.clip(x, np.float32(-1.5), np.float32(2)))


def test_a_result_that_is_no_value_of_the_format_is_rounded() -> None:
    assert jc.math.negative(np.float32(-8), "integer4") == 7
    assert jc.math.floor(np.float32(0.5), "float8_e8m0fnu") == 2.0**-127
    assert np.isnan(jc.math.negative(np.float32(2), "float8_e8m0fnu"))


@further
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def bits_of_integers(dtype: Any) -> None:
    word = np.int32 if dtype == np.float32 else np.int64
    rng = np.random.default_rng(2)
    top = np.iinfo(word).bits - 1
    x, y = (np.ldexp(rng.integers(-512, 512, 200), rng.integers(0, top - 9, 200)).astype(dtype) for _ in range(2))
    how, carrier = How(oracle.ieee(8, 9), "up"), oracle.CARRIERS[np.dtype(dtype).name]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        exact = getattr(np, name)(x.astype(word), y.astype(word))
        want = [rounded(oracle.Fraction(int(v)), how, carrier, 0) for v in exact]
        same_of(name, getattr(jc.math, name)(x, y, "e8m9:up"), oracle_math.array(want, carrier))


def test_what_is_no_integer_has_no_bits() -> None:
    x = np.array([0.5, np.inf, -np.inf, np.nan, 2.0**31, -(2.0**31) - 256], np.float32)
    assert np.isnan(jc.math.bitwise_and(x, np.float32(3), "binary32")).all()
    assert jc.math.bitwise_and(np.float32(-(2.0**31)), np.float32(-1), "binary32") == -(2.0**31)


# -- elementary functions ----------------------------------------------------------------------------------------------


def gelu(x: Any) -> Any:
    return x * scipy.special.ndtr(x)


#: NumPy's or SciPy's function in float64, and where its arguments come from.
ELEMENTARY: dict[str, tuple[Callable[..., Any], tuple[tuple[float, float], ...]]] = {
    "sin": (np.sin, ((-9, 9),)),
    "cos": (np.cos, ((-9, 9),)),
    "tan": (np.tan, ((-1.5, 1.5),)),
    "arcsin": (np.arcsin, ((-1, 1),)),
    "arccos": (np.arccos, ((-1, 1),)),
    "arctan": (np.arctan, ((-9, 9),)),
    "arctan2": (np.arctan2, ((-9, 9), (-9, 9))),
    "sinh": (np.sinh, ((-9, 9),)),
    "cosh": (np.cosh, ((-9, 9),)),
    "tanh": (np.tanh, ((-4, 4),)),
    "arcsinh": (np.arcsinh, ((-9, 9),)),
    "arccosh": (np.arccosh, ((1.1, 90),)),
    "arctanh": (np.arctanh, ((-0.95, 0.95),)),
    "exp": (np.exp, ((-9, 9),)),
    "exp2": (np.exp2, ((-9, 9),)),
    "expm1": (np.expm1, ((-3, 3),)),
    "log": (np.log, ((0.01, 0.9),)),
    "log2": (np.log2, ((1.1, 90),)),
    "log10": (np.log10, ((1.1, 90),)),
    "log1p": (np.log1p, ((-0.5, 9),)),
    "logaddexp": (np.logaddexp, ((1, 9), (-9, 9))),
    "cbrt": (np.cbrt, ((-90, 90),)),
    "power": (np.power, ((0.1, 5), (-4, 4))),
    "hypot": (np.hypot, ((-9, 9), (-9, 9))),
    "degrees": (np.degrees, ((-9, 9),)),
    "radians": (np.radians, ((-900, 900),)),
    "erf": (scipy.special.erf, ((-3, 3),)),
    "erfc": (scipy.special.erfc, ((-2, 2),)),
    "gamma": (scipy.special.gamma, ((0.5, 9),)),
    "gammaln": (lambda x: scipy.special.gammaln(np.where(x == -np.inf, np.inf, x)), ((3, 9),)),  # as in C
    "digamma": (lambda x: scipy.special.digamma(np.where(x == 0, np.nan, x)), ((2, 9),)),  # a pole of two sides
    "sigmoid": (scipy.special.expit, ((-9, 9),)),
    "gelu": (gelu, ((-2, 4),)),
    "angle": (np.angle, ((-9, 9),)),
}
#: The carrier may be off by this share.
SLACK = 2.0**-19
#: At which NumPy says what is in the domain.
EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5], np.float32)
B16 = oracle.ieee(8, 7)


def arguments(name: str, n: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name))
    return [
        np.asarray(jc.round_to_format(rng.uniform(*span, n).astype(np.float32), "bfloat16"))
        for span in ELEMENTARY[name][1]
    ]


@further
@pytest.mark.parametrize("part", [slice(0, None, 12), *(slice(i, None, 4) for i in range(1, 5))])
def elementary_functions_are_rounded_to_the_neighbour_of_the_true_value(part: slice) -> None:
    """Rounding is monotone: the result lies between those of the ends of an interval around the true value, and where
    these are one it is that, as it is nearly everywhere. At the edges of the domain it is near NumPy's, or NaN.
    """
    for name in list(ELEMENTARY)[part]:
        near_the_true_value(name)


def near_the_true_value(name: str) -> None:
    given = arguments(name)
    edges = len(given) == 1
    if edges:
        given = [np.concatenate([given[0], EDGES])]
    with np.errstate(all="ignore"):
        exact = ELEMENTARY[name][0](*(x.astype(float) for x in given))
    stochastic = name in ("sin", "power")
    text, how = ("e8m7:stochastic", How(B16, "stochastic")) if stochastic else ("bfloat16", How(B16))
    words = result_words(KEY, exact.shape, len(given))
    got = getattr(jc.math, name)(*given, text, KEY)
    if edges:
        ends = slice(-len(EDGES), None)
        want = np.asarray(jc.round_to_format(exact[ends].astype(np.float32), "bfloat16"))
        np.testing.assert_array_equal(np.isnan(got[ends]), np.isnan(want), err_msg=name)
        np.testing.assert_allclose(got[ends], want, rtol=2.0**-7, atol=2.0**-20, err_msg=name)
    got, exact = got[: len(words) - len(EDGES) * edges], exact[: len(words) - len(EDGES) * edges]
    low, high = (
        oracle_math.array([rounded(v, how, F32, int(w)) for v, w in zip(oracle_math.values(end), words, strict=False)])
        for end in (exact * (1 - SLACK), exact * (1 + SLACK))
    )
    low, high = np.minimum(low, high), np.maximum(low, high)
    assert np.all((low <= got) & (got <= high)), name
    assert np.mean(low == high) > 0.9, name


@further
def nan_outside_the_domain() -> None:
    for value in (
        jc.math.log(-1.0, "bfloat16"),
        jc.math.sqrt(-1.0, "e5m2"),
        jc.math.arcsin(1.5, "e5m2"),
        jc.math.power(-2.0, 0.5, "bfloat16"),
        jc.math.divide(0.0, 0.0, "e4m3"),
    ):
        assert math.isnan(value)
    assert jc.math.log(0.0, "bfloat16") == -math.inf
    assert jc.math.divide(1.0, -0.0, "float8_e5m2") == -math.inf
    assert math.isnan(jc.math.divide(1.0, 0.0, "float8_e4m3fn"))


# -- every function: transforms, dtypes, derivatives -------------------------------------------------------------------

#: Functions of float arrays alone, with arguments at which all are defined and smooth.
ARGUMENTS = dict.fromkeys(("arcsin", "arccos", "arctanh"), 0.6) | {"arccosh": 1.75}
FUNCTIONS = [
    name
    for name in jc.math.__all__
    if name != "linalg"
    and set(inspect.signature(getattr(jc.math, name)).parameters)
    <= {"x", "y", "z", "min", "max", "spec", "key", "decimals"}
]
NAMES = [name for name in FUNCTIONS if name not in ("frexp", "modf")]
DRAWN = "e5m5:stochastic"  # the operations of this one are cheap to compile


def example(name: str) -> list[jax.Array]:
    count = operand_count(name)
    rng = np.random.default_rng(3)
    first = ARGUMENTS.get(name, 1.625)
    return [jnp.asarray(first + rng.uniform(0.0, 0.3, 6) + i, jnp.float32) for i in range(count)]


def test_the_table_is_whole() -> None:
    """Tables 4 and 5 of arXiv 2504.07835."""
    peers = """
    sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp expm1 log log10 log2 log1p sqrt cbrt sum
    prod mean std var dot matmul erf erfc gamma fabs logaddexp cumsum cumprod degrees radians floor ceil round sign clip
    abs reciprocal square frexp hypot diff power modf ldexp angle real imag conj maximum minimum multiply mod divide add
    subtract floor_divide bitwise_and bitwise_or bitwise_xor
    """
    names = [*peers.split(), "axpy", "norm", "einsum", "conv"]
    assert len(names) == 69 and set(names) <= set(jc.math.__all__)
    assert len(NAMES) == 61 and set(oracle_math.EXACT) | set(HELD) | set(ELEMENTARY) <= set(NAMES)


#: One function of each way to a result.
WAYS = {
    "operation": ("add",),
    "several operations": ("clip", "bitwise_xor", "maximum"),
    "own algorithms": ("mod", "floor_divide"),
    "a number of one operand": ("reciprocal",),
    "three operands": ("fma",),
    "elementary": ("sin", "power"),
    "the carrier's": ("gelu", "angle"),
    "held": ("floor", "conj"),
}


@further
@pytest.mark.parametrize("way", WAYS)
def jit_and_vmap_give_the_same_bits(way: str) -> None:
    def of(name: str, key: jax.Array) -> tuple[Any, Any]:
        function, given = getattr(jc.math, name), example(name)
        each = jax.vmap(lambda key, *x: function(*x, DRAWN, key))(jax.random.split(key, 6), *given)
        return function(*given, DRAWN, key), each

    program = jax.jit(lambda key: {name: of(name, key) for name in WAYS[way]}).lower(KEY)
    results = program.compile(compiler_options={"xla_backend_optimization_level": "0"})(KEY)  # less time to compile
    for name, (whole, each) in results.items():
        function, given, keys = getattr(jc.math, name), example(name), jax.random.split(KEY, 6)
        same_of(name, whole, function(*given, DRAWN, KEY))
        same_of(name, each[2], function(*(x[2] for x in given), DRAWN, keys[2]))


def test_a_quotient_of_any_size_is_rounded_down_once() -> None:
    x, y = np.array([[7, -7, 2.0**80, -(2.0**80), 257, -257], [2, 2, 1, 1, 1, 1]], np.float32)
    for mode, last in (("up", 258), ("down", 256)):
        got = jc.math.floor_divide(x, y, f"bfloat16:{mode}")
        np.testing.assert_array_equal(got, [3, -4, 2.0**80, -(2.0**80), last, last - 514])


def test_quotients_rounded_down_of_infinities_are_those_of_numpy() -> None:
    """NaN for infinities unless they are divided by zero, and -1 below zero, in formats that hold these."""
    numbers = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -1.5, 1e-40, -1e-40], np.float32)
    x, y = (a.ravel() for a in np.meshgrid(numbers, numbers))
    with np.errstate(all="ignore"):
        want = np.floor_divide(x, y)
    got = jc.math.floor_divide(x, y, "bfloat16")
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def test_the_derivatives_of_a_fused_sum() -> None:
    slopes = jax.grad(lambda x, y, z: jc.math.fma(x, y, z, "e5m7"), (0, 1, 2))(*map(jnp.float32, (2, 3, 5)))
    assert list(map(float, slopes)) == [3, 2, 1]


FLAT = {"floor", "ceil", "round", "trunc", "sign", "imag", "angle", "floor_divide", "bitwise_and", "bitwise_or",
        "bitwise_xor"}  # fmt: skip


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("part", range(8))
def test_derivatives_are_those_of_the_function_at_the_rounded_operands(part: int) -> None:
    """Against differences in float64: the derivatives of the operands are added up, in both modes."""

    def of(name: str) -> tuple[Any, Any]:
        function, given = getattr(jc.math, name), example(name)

        def plain(*x: Any) -> Any:
            return function(*x, "e5m5")

        push = jax.jvp(plain, tuple(given), tuple(jnp.ones_like(x) for x in given))[1]
        out, pull = jax.vjp(plain, *given)
        return push, sum(pull(jnp.ones_like(out)))

    program = jax.jit(lambda: {name: of(name) for name in NAMES[part::8]}).lower()
    results = program.compile(compiler_options={"xla_backend_optimization_level": "0"})()  # less time to compile
    for name, (push, pulled) in results.items():
        given = [np.asarray(jc.round_to_format(x, "e5m5")).astype(float) for x in example(name)]
        np.testing.assert_allclose(push, pulled, rtol=1e-4, atol=1e-6, err_msg=name)
        if name in FLAT:
            assert not np.any(push), name
            continue
        special = "erf", "erfc", "gamma", "gammaln", "digamma", "sigmoid", "gelu"
        real: Any = ELEMENTARY[name][0] if name in special else getattr(np, name, lambda x, y, z: x * y + z)
        step = 1e-6
        slope = (real(*(x + step for x in given)) - real(*(x - step for x in given))) / (2 * step)
        np.testing.assert_allclose(push, np.real(slope), rtol=1e-3, atol=1e-5, err_msg=name)


@further
@pytest.mark.parametrize("name", ["frexp", "modf", "ldexp", "diff"])
def transforms_of_the_others(name: str) -> None:
    x = jnp.asarray(np.random.default_rng(1).uniform(1.1, 5, (4, 3)), jnp.float32)
    more = (3,) if name == "ldexp" else ()
    function = getattr(jc.math, name)

    def drawn(x: jax.Array, key: jax.Array) -> Any:
        return function(x, *more, DRAWN, key)

    keys = jax.random.split(KEY, 4)
    each = jax.jit(jax.vmap(drawn))(x, keys)
    for got, want in zip(jax.tree.leaves(each), jax.tree.leaves(drawn(x[1], keys[1])), strict=True):
        same(got[1], want)
    grad = jax.grad(lambda x: jax.tree.leaves(function(x, *more, "bfloat16"))[0][0])(x[0])
    first = {"frexp": 2.0 ** -np.frexp(np.asarray(x[0, 0]))[1], "modf": 1.0, "ldexp": 8.0, "diff": -1.0}[name]
    np.testing.assert_allclose(grad, [first, 1.0 if name == "diff" else 0.0, 0.0])


@further
def check_16_bit_operands_go_through_float32() -> None:
    for name, dtype in (("add", np.float16), ("sin", ml_dtypes.bfloat16), ("floor", ml_dtypes.bfloat16)):
        function = getattr(jc.math, name)
        given = [np.asarray(x).astype(dtype) for x in example(name)]
        got = function(*given, "e4m4:up")
        assert got.dtype == dtype, name
        same_of(name, got, function(*(x.astype(np.float32) for x in given), "e4m4:up").astype(dtype))


#: Operands, and whether the result is a JAX array.
PROMOTED: dict[str, tuple[Callable[[], tuple[Any, ...]], bool]] = {
    "two floats": (lambda: (jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float32)), True),
    "two 16-bit floats": (lambda: (jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16)), True),
    "integers and a float": (lambda: (jnp.arange(2), jnp.ones(2, jnp.float16)), True),
    "booleans and a float": (lambda: (jnp.arange(2) > 0, jnp.ones(2, jnp.bfloat16)), True),
    "integers and a number": (lambda: (jnp.arange(2, dtype=jnp.int8), 0.5), True),
    "a float and a boolean": (lambda: (jnp.ones(2, jnp.float16), True), True),
    "a JAX and a NumPy array": (lambda: (jnp.ones(2, jnp.float16), np.ones(2)), True),
    "NumPy arrays": (lambda: (np.ones(2, np.float16), np.ones(2, np.int64)), False),
}


def test_operands_are_promoted_as_in_jax_numpy() -> None:
    for name, (make, in_jax) in PROMOTED.items():
        given = make()
        got, want = untyped.add(*given, "e4m3"), jnp.add(*given)
        assert isinstance(got, jax.Array) is in_jax, name
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(got, want, err_msg=name)


@further
def what_is_no_float_becomes_one() -> None:
    for x in (np.arange(4), np.arange(4) > 1, 3, True, [1, 2, 3], jnp.arange(4), jnp.int8(3)):
        want = jc.math.sqrt(np.asarray(x, np.float32), "e5m2:up")
        np.testing.assert_array_equal(jc.math.sqrt(x, "e5m2:up"), want)
    dtypes = [jc.math.sin(x, "e5m2").dtype for x in (np.arange(4), np.arange(4, dtype=np.int32), True, jnp.arange(4))]
    assert dtypes == [np.float64, np.float32, np.float64, np.float32]
    assert jc.math.add(np.ones(2), np.ones(2, np.float32), "e5m2").dtype == np.float64


@further
def weak_numbers_take_the_dtype_of_others() -> None:
    @jax.jit
    def program(x: jax.Array, weak: Any, count: Any) -> tuple[jax.Array, ...]:
        return jc.math.add(x, weak, "e4m3"), jc.math.multiply(count, x, "e4m3"), jc.math.sin(count, "e4m3")

    got = program(jnp.ones(2, jnp.float16), 0.5, 3)
    assert [x.dtype for x in got] == [np.float16, np.float16, np.float32]
    with jax.numpy_dtype_promotion("strict"):
        assert jc.math.add(jnp.arange(2), jnp.ones(2, jnp.float16), "e4m3").dtype == np.float16
    with jax.enable_x64(True):
        assert jc.math.add(jnp.ones(2, jnp.float32), np.ones(2), "e4m3").dtype == np.float64
        assert jc.math.add(jnp.ones(2, jnp.float32), 0.5, "e4m3").dtype == np.float32


def test_the_spec_of_a_gradient_holds() -> None:
    text = "float8_e4m3fn:saturate:gradient=clipped"
    grad = jax.grad(lambda x: jc.math.multiply(x, 3.0, text).sum())
    np.testing.assert_array_equal(grad(jnp.array([200.0, 2.0, 1000.0])), [0, 3, 0])
    rounds = jax.grad(lambda x: jc.math.sqrt(x, "bfloat16:gradient=e5m2"))
    assert rounds(jnp.float32(7)) == jc.round_to_format(np.float32(0.5 / np.sqrt(7)), "e5m2")


def test_complex_numbers_by_parts() -> None:
    z = np.array([1.03 + 2.07j, -3.1 - 4.2j], np.complex64)
    r = jc.round_to_format(z, "e5m2")
    for name in ("real", "imag", "conj"):
        same(getattr(jc.math, name)(z, "e5m2"), getattr(np, name)(r))
    for name in ("abs", "angle"):
        np.testing.assert_array_equal(
            getattr(jc.math, name)(z, "e5m2"), jc.round_to_format(getattr(np, name)(r), "e5m2")
        )


@pytest.mark.smoke
def test_the_kind_of_array_is_kept() -> None:
    assert isinstance(jc.math.sin([1.0, 2.0], "e5m2"), np.ndarray)
    assert isinstance(jc.math.sin(1.0, "e5m2"), np.float64)
    assert isinstance(jc.math.add(np.ones(2, np.float32), jnp.ones(2), "e5m2"), jax.Array)
    assert jc.math.add(np.ones(2, np.float32), 1, "e5m2").dtype == np.float32

    def traced(x: jax.Array) -> jax.Array:
        inner = jc.math.add(np.float32(1), np.float32(2), "e5m2")
        assert type(inner) is np.float32
        return x + inner

    assert jax.jit(traced)(jnp.float32(1)) == 4


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "text": (lambda: untyped.sin(np.array(["a"]), "e5m2"), TypeError, "x has dtype <U1, which is not a carrier"),
    "complex": (lambda: untyped.exp(np.ones(2, np.complex64), "e5m2"), TypeError, "x has dtype complex64"),
    "a range": (lambda: untyped.add(np.float16(1), 1e6, "e5m2"), ValueError, "y=1000000.0 is beyond the range of"),
    "decimals": (
        lambda: untyped.round(1.0, "e5m2", decimals=23),
        ValueError,
        "decimals=23 must be an integer from -22",
    ),
    "no key": (lambda: untyped.sin(1.0, DRAWN), ValueError, "key=None, but spec='e5m5:stochastic' rounds"),
    "raw key": (lambda: untyped.sin(1.0, DRAWN, jax.random.PRNGKey(0)), TypeError, "must be a typed key"),
    "no spec": (lambda: untyped.sin(1.0, 3), TypeError, "spec=3 must be a Spec"),
    "narrow carrier": (lambda: untyped.sin(np.float16(1), "bfloat16"), ValueError, "float16"),
    "close to the carrier": (lambda: untyped.add(np.float32(1), 1, "e8m22:up"), ValueError, "spec='e8m22:up'.*float64"),
    **{
        f"finer than the carrier: {name}": (
            partial(getattr(jc.math, name), x, spec),
            ValueError,
            f"'{spec}' has values",
        )
        for name, x, spec in [
            ("sin", np.float32(1), "e8m30:up"),
            ("gamma", np.float32(1), "e9m23"),
            ("angle", np.complex64(1), "posit32"),
            ("exp", jnp.bfloat16(1), "tf32"),
        ]
    },
    "cotangents": (
        lambda: untyped.sin(1.0, "bfloat16:gradient=[e5m2:stochastic]"),
        ValueError,
        "rounds cotangents stochastically",
    ),
    "ldexp": (lambda: untyped.ldexp(1.0, 0.5, "e5m2"), TypeError, "n has dtype float64; allowed: integers"),
    "diff": (lambda: untyped.diff(1.0, "e5m2"), ValueError, "axis=-1, but x is a scalar"),
    "axis": (lambda: untyped.diff([1.0], "e5m2", axis=1), ValueError, "axis=1 must be"),
}


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


def test_formats_that_the_carrier_holds_are_not_refused() -> None:
    """Nor are finer ones if the carrier has the exact result."""
    x = np.float32(1.5)
    assert jc.math.sin(x, "binary32:up") == np.sin(x) and jc.math.sin(x, "tf32") == np.float32(0.99755859375)
    assert jc.math.floor(x, "e8m30") == 1 and jc.math.max(x, "e8m30") == x
    assert jc.math.sin(np.float64(1.5), "e8m30") == jc.round_to_format(np.sin(1.5), "e8m30")


@further
@pytest.mark.parametrize("part", [slice(0, 6), slice(6, 45), slice(45, None)])
def every_function_is_documented_and_its_example_runs(part: slice) -> None:
    """All are documented; the examples of one part run."""
    names = sorted(set(jc.math.__all__) - {"linalg"})
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for name in names:
        function = getattr(jc.math, name)
        assert function.__name__ == name and function.__module__.startswith("jchop.math")
        text = inspect.getdoc(function) or ""
        for section in ("Args:", "Returns:", "Raises:", "Example:", ">>> import"):
            assert section in text, f"{name}: {section}"
        assert all(f"{parameter}" in text for parameter in inspect.signature(function).parameters), name
        for test in finder.find(function, name, globs={}) if name in names[part] else ():
            runner.run(test, out=report.append)
    assert runner.tries and runner.summarize(verbose=False).failed == 0, "".join(report)


test_further = further.test()
