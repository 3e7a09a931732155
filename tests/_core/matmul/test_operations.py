"""Operations by name against exact rational arithmetic, and sums and running sums in their orders."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from math import isqrt

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_arithmetic
import oracle_matmul
import pytest
from further import Further
from oracle import Special, Value

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic import basic, double_word, hardware
from jchop._core.arithmetic.exact import ValueRange, carrier_range, range_of, round_exact
from jchop._core.matmul import operations
from jchop._core.matmul.operations import (
    OPERAND_COUNTS,
    check_matmul,
    check_operation,
    cumulative_along,
    fold_seeds,
    operation_words,
    product_along,
    round_operation,
    sum_along,
)
from jchop._core.rounding.random_bits import seed_words

further = Further()

MODES = (*oracle.DETERMINISTIC, *oracle.STOCHASTIC)
FORMATS: dict[str, oracle.Set] = {
    "e5m10": oracle.ieee(5, 10),
    "bfloat16": oracle.ieee(8, 7),
    "tf32": oracle.ieee(8, 10),
    "float8_e4m3fn": oracle.fn(4, 3),
    "e5m2": oracle.ieee(5, 2),
    "fixed8.8": oracle.fixed(8, 8),
}
ORACLES = {"add": "add", "mul": "multiply", "div": "divide", "fma": "multiply_add"}
COUNT = 150


pytestmark = pytest.mark.usefixtures("x64", "neighbours_kept")


def members(fmt: oracle.Set, carrier: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Values of a format, its ends and small ones often, and the specials that the format has."""
    assert isinstance(fmt, oracle.FloatSet | oracle.FixedSet)
    top = fmt.top(False)
    kind = rng.integers(0, 4, n)
    index = np.choose(
        kind, [rng.integers(0, top + 1, n), rng.integers(0, 9, n), top - rng.integers(0, 5, n), np.full(n, top // 2)]
    )
    index = np.clip(index + rng.integers(-20, 20, n) * (kind == 3), 0, top)
    finite = np.array([float(fmt.value(int(i))) for i in index]) * rng.choice([-1.0, 1.0], n)
    if isinstance(fmt, oracle.FloatSet):
        specials = [0.0, -0.0, np.nan] + [np.inf, -np.inf] * fmt.inf
        finite[: 4 * len(specials)] = np.tile(specials, 4)
        rng.shuffle(finite)
    return (finite + 0.0 if isinstance(fmt, oracle.FixedSet) else finite).astype(carrier)


def drawn(n: int, carrier: oracle.Carrier, rng: np.random.Generator) -> np.ndarray:
    word = rng.integers(0, 2**carrier.bits, n, dtype=np.uint64).astype(carrier.words)
    word[::8], word[1::8] = 0, 2**carrier.bits - 1
    return word


def spec_of(text: str, mode: str) -> jc.Spec:
    return jc.Spec(text, rounding=mode)


def rounded(v: Value, fmt: oracle.Set, mode: str, carrier: oracle.Carrier, word: int) -> int:
    how = oracle_matmul.How(fmt, mode)
    return oracle.to_bits(oracle_matmul.rounded(v, how, carrier, word), carrier)


# -- +, -, x, /, fma ---------------------------------------------------------------------------------------------------


#: Operations and formats; quotients and fused operations take as long as the rest together, and have fewer ways.
EACH = [("add", "e5m10"), *(("add", text) for text in FORMATS if text != "e5m10"), *(("mul", text) for text in FORMATS)]
EACH += [("div", text) for text in ("e5m10", "bfloat16", "float8_e4m3fn", "fixed8.8")]
EACH += [("fma", text) for text in ("e5m10", "bfloat16", "float8_e4m3fn", "fixed8.8")]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("name", "text"), EACH)
def test_operations_of_values_of_the_format(name: str, text: str, rng: np.random.Generator) -> None:
    """The ranges that are taken for granted are those of the format, so the cheap ways are what is tested here."""
    carrier = oracle.CARRIERS["float32"]
    fmt = FORMATS[text]
    args = [members(fmt, "float32", COUNT, rng) for _ in range(OPERAND_COUNTS[name])]
    word = drawn(COUNT, carrier, rng)
    specs = [spec_of(text, mode) for mode in MODES]
    got = jax.jit(lambda args, word: [round_operation(name, args, spec, word) for spec in specs])(args, word)
    for mode, result in zip(MODES, got, strict=True):
        exact = oracle_arithmetic.exact_results(ORACLES[name], args, carrier, mode == "down")
        want = np.array([rounded(v, fmt, mode, carrier, int(r)) for v, r in zip(exact, word, strict=True)], np.uint32)
        where = cases.differences(np.asarray(result), want, carrier)
        shown = [([a[i].item() for a in args], np.asarray(result)[i], want.view("f4")[i]) for i in where[:5]]
        assert not len(where), (name, text, mode, len(where), shown)


def whole_range(n: int, rng: np.random.Generator) -> np.ndarray:
    """Pairs of float32 numbers: any, nearly opposite, with products next to the subnormals, with sums that overflow."""
    words = rng.integers(0, 2**32, (2, n), dtype=np.uint32)
    part = n // 8
    words[1, : 3 * part] = words[0, : 3 * part] + rng.integers(-40, 41, 3 * part) * 2**22 & 0xFFFFFFFF
    words[1, : 3 * part] ^= rng.integers(0, 2, 3 * part).astype(np.uint32) << 31
    words[0, :part] &= 0xBFFFFFFF
    exponents = rng.integers(0, 255, part)
    other = np.clip(128 - exponents + rng.integers(-40, 4, part), 0, 254)
    at = slice(3 * part, 4 * part)
    words[:, at] = words[:, at] & 0x807FFFFF | (np.stack([exponents, other]) << 23).astype(np.uint32)
    words[:, 4 * part : 5 * part] |= 0x7C000000
    words[:, -part:] &= 0x81FFFFFF
    pairs = words.view(np.float32)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126], np.float32)
    pairs[:, -100:] = np.repeat(specials, 10), np.tile(specials, 10)
    return pairs


#: Formats with the exponents of float32, and whether operands are values of the format or any.
FULL = [("binary32", False), ("bfloat16", True), ("bfloat16", False), ("tf32", True), ("e8m1", True), ("e8m15", False)]
FULL_MODES = tuple(mode for mode in MODES if mode != "stochastic_c")


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("text", "own"), FULL)
def test_full_range_is_what_integers_give(text: str, own: bool, rng: np.random.Generator) -> None:
    """Over the whole range, every pair of exponents met, and next to the bounds that the cheap way has."""
    n, carrier, fmt = 40_000, CARRIERS["float32"], jc.Spec(text).format
    specs = [jc.Spec(fmt, rounding=mode) for mode in FULL_MODES]
    specs += [
        jc.Spec(fmt, overflow=how, rounding=m) for how in ("saturate", "propagate") for m in ("nearest_even", "up")
    ]
    specs += [jc.Spec(fmt, rounding="stochastic", random_bits=5)]
    specs = [None] if text == "binary32" else specs
    r = range_of(specs[0], carrier) if own else carrier_range(carrier)
    x, y = whole_range(n, rng)
    if own:
        x, y = np.asarray(jc.round_to_format(np.stack([x, y]), fmt))
    word = drawn(n, oracle.CARRIERS["float32"], rng)

    @jax.jit
    def both(x: jax.Array, y: jax.Array, word: jax.Array) -> list:
        out = []
        for spec in specs:
            zero = carrier.sign_bit if spec is not None and spec.rounding.value == "down" else 0
            assert hardware.supports_scaling_sum(spec, carrier)
            got, exact = (hardware.add_by_scaling(x, y, spec, word, r, r), double_word.add_exactly(x, y, carrier, zero))
            out.append((f"add, {spec}", got, round_exact(exact, spec, carrier, word)))
            if hardware.supports_scaling_product(spec, carrier, r, r):
                got, exact = (
                    hardware.multiply_by_scaling(x, y, spec, word),
                    double_word.multiply_exactly(x, y, carrier),
                )
                out.append((f"multiply, {spec}", got, round_exact(exact, spec, carrier, word)))
        names.extend(name for name, _, _ in out)
        return [values for _, *values in out]

    names: list[str] = []
    results = both(x, y, word)
    assert len(names) == len(specs) * (2 if own else 1)
    for name, (got, want) in zip(names, results, strict=True):
        where = cases.differences(np.asarray(got), np.asarray(want).view(np.uint32), oracle.CARRIERS["float32"])
        assert not len(where), (name, [(x[i].item().hex(), y[i].item().hex(), got[i], want[i]) for i in where[:5]])


# -- roots -------------------------------------------------------------------------------------------------------------


def exact_root(v: Value, carrier: oracle.Carrier) -> tuple[Value, bool]:
    """The root cut to 200 bits, and whether that is all of it; a few more digits stand for the rest."""
    if v is Special.NEG_ZERO or v == 0 or v in (Special.INF, Special.NAN):
        return v, True
    if v is Special.NEG_INF or oracle_arithmetic.is_negative(v):
        return Special.NAN, True
    assert isinstance(v, Fraction)
    scale = 2 ** (2 * 400)
    scaled = v * scale
    assert scaled.denominator == 1
    whole = isqrt(scaled.numerator)
    exact = whole * whole == scaled.numerator
    return Fraction(2 * whole + (not exact), 2 ** (400 + 1)), exact


#: By default some modes of fixed point.
ROOTS = [("fixed8.8", ("nearest_even", "stochastic_b"))]
ROOTS += [pytest.param(text, MODES, marks=pytest.mark.slow) for text in ("e5m10", "bfloat16", "fixed8.8")]


@pytest.mark.parametrize(
    ("text", "modes"), ROOTS, ids=lambda value: value if isinstance(value, str) else str(len(value))
)
def test_roots_in_every_mode(text: str, modes: tuple[str, ...], rng: np.random.Generator) -> None:
    name = "float32"
    carrier, fmt = oracle.CARRIERS[name], FORMATS[text]
    x = np.concatenate([np.abs(members(fmt, name, COUNT, rng)), members(fmt, name, 50, rng)])
    with np.errstate(all="ignore"):
        squares = np.square(x[:100])
    x = np.concatenate([x, squares[np.isfinite(squares)]]).astype(name)
    word = drawn(len(x), carrier, rng)
    specs = [spec_of(text, mode) for mode in modes]
    got = jax.jit(lambda x, word: [round_operation("sqrt", [x], spec, word) for spec in specs])(x, word)
    exact = [exact_root(oracle.from_bits(int(b), carrier), carrier)[0] for b in x.view(carrier.words)]
    for mode, result in zip(modes, got, strict=True):
        want = np.array([rounded(v, fmt, mode, carrier, int(r)) for v, r in zip(exact, word, strict=True)], np.uint32)
        where = cases.differences(np.asarray(result), want, carrier)
        assert not len(where), (text, mode, [(x[i], np.asarray(result)[i], want.view(name)[i]) for i in where[:5]])


def beside_squares(name: str) -> np.ndarray:
    """Twice each: numbers just below the square of one that is j units in the last place above 1, or below 2."""
    unit, j = np.finfo(name).eps, np.arange(1, 40).repeat(2)
    return np.concatenate([1 + 2 * j * unit, 4 - 4 * j * unit]).astype(name)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_roots_to_the_carrier_itself(name: str, rng: np.random.Generator) -> None:
    """IEEE asks processors for this one, so NumPy has it right; subnormal operands are there too."""
    carrier = oracle.CARRIERS[name]
    x = rng.integers(0, 2 ** (carrier.bits - 1), 20000, dtype=np.uint64).astype(carrier.words)
    x[:2000] = np.arange(2000)
    hard = np.array(cases.near_middles_of_roots(carrier.m + 1), name)
    x = np.concatenate([x.view(name), np.array([0, -0.0, np.inf, -np.inf, -1, 4], name), beside_squares(name), hard])
    text = {"float32": "binary32", "float64": "binary64"}[name]
    got = np.asarray(jax.jit(partial(round_operation, "sqrt", spec=jc.Spec(text)))([x]))
    with np.errstate(invalid="ignore"):
        assert not len(cases.differences(got, np.sqrt(x).view(carrier.words), carrier))


def test_a_root_of_64_bits_draws_from_all_of_them(rng: np.random.Generator) -> None:
    carrier = oracle.CARRIERS["float64"]
    x = rng.random(30) * 4
    word = rng.integers(0, 2**64, 30, dtype=np.uint64)
    run = jax.jit(lambda x, word: round_operation("sqrt", [x], jc.Spec("e9m40:stochastic"), word))
    got = np.asarray(run(x, word))
    exact = [exact_root(oracle.from_bits(int(b), carrier), carrier)[0] for b in x.view(np.uint64)]
    how = oracle_matmul.How(oracle.ieee(9, 40), "stochastic")
    want = [
        oracle.to_bits(oracle_matmul.rounded(v, how, carrier, int(r)), carrier)
        for v, r in zip(exact, word, strict=True)
    ]
    np.testing.assert_array_equal(got.view(np.uint64), np.array(want, np.uint64))


def assert_every_bit(x: np.ndarray) -> None:
    """The leading bits of roots, the word after them and whether more follow."""
    carrier, kind = CARRIERS[x.dtype.name], oracle.CARRIERS[x.dtype.name]
    width, one = carrier.work_width, 1 << carrier.fraction
    v = jax.jit(lambda x: vars(double_word.square_root(x, carrier, True)) | {"quantum": 0})(x)
    columns = (np.asarray(v[part]).tolist() for part in ("magnitude", "rest", "sticky", "inexact"))
    for bits, *got in zip(x.view(kind.words).tolist(), *columns, strict=True):
        square = oracle.from_bits(bits, kind)
        assert isinstance(square, Fraction)
        top = square.numerator.bit_length() - square.denominator.bit_length()
        exponent = top - (square < oracle.pow2(top)) >> 1
        count = square * oracle.pow2(2 * (carrier.fraction + width - exponent))
        digits = isqrt(int(count))
        low, rest = divmod(digits, 1 << width)
        expected = [(exponent + carrier.bias << carrier.fraction) + low - one, rest, digits * digits != count]
        assert got == [*expected, bool(rest) or expected[2]], bits


@pytest.mark.parametrize("name", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_every_bit_of_a_root(name: str, rng: np.random.Generator) -> None:
    carrier = CARRIERS[name]
    whole = rng.integers(1, 1 << carrier.fraction // 2, 200).astype(name)
    some = rng.integers(1, carrier.inf, 400).astype(oracle.CARRIERS[name].words).view(name)
    assert_every_bit(np.concatenate([whole * whole, some, beside_squares(name)]))


@pytest.mark.parametrize("name", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_a_root_corrects_a_bad_guess(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A device's root may be off by many units in the last place."""
    x = np.concatenate([(rng.random(200) * 100).astype(name), beside_squares(name)])
    own, miss = double_word._float_root, np.where(np.arange(len(x)) % 2, -40, 3).astype(CARRIERS[name].work)
    monkeypatch.setattr(double_word, "_float_root", lambda *args: own(*args) + miss)
    assert_every_bit(x)


def test_a_narrow_quotient_corrects_a_bad_one() -> None:
    """The quotient of the hardware is moved by up to six units in the last place: the result stays."""
    values = jc.Spec("e5m2").format.values().astype(np.float32)  # type: ignore[union-attr]
    x, y = (jnp.asarray(v.ravel()) for v in np.meshgrid(values, values))
    carrier, spec = CARRIERS["float32"], jc.Spec("e5m10:odd")
    r = range_of(jc.Spec("e5m2"), carrier)
    assert basic.divides_narrow(spec, carrier, r, r)
    want = jax.jit(lambda x, y: round_operation("div", [x, y], spec, ranges=(carrier_range(carrier),) * 2))(x, y)

    for miss in (-6, 6):

        def quotient(a: jax.Array, b: jax.Array, miss: int = miss) -> jax.Array:
            q = (a / b).view(jnp.int32)
            return jnp.where((q > 0) & (q < carrier.inf), q + miss, q).view(jnp.float32)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(basic, basic._hardware_quotient.__name__, quotient)
            divide = jax.jit(lambda x, y: basic.divide_narrow(x, y, spec, carrier, r, r))
            np.testing.assert_array_equal(divide(x, y), want)


@further
def narrow_quotients_to_nearest() -> None:
    """A half is seen: the bits that are kept are one more than those of the format."""
    x, y = (jnp.asarray(v.ravel(), jnp.float32) for v in np.meshgrid(np.arange(8, 16), np.arange(8, 16)))
    carrier, spec = CARRIERS["float32"], jc.Spec("e4m3")
    r = range_of(spec, carrier)
    assert basic.divides_narrow(spec, carrier, r, r)
    want = [
        oracle.round_exact(oracle.ieee(4, 3), Fraction(int(a)) / int(b), "nearest_even")
        for a, b in zip(x, y, strict=True)
    ]
    found = jax.jit(lambda x, y: basic.divide_narrow(x, y, spec, carrier, r, r))(x, y)
    np.testing.assert_array_equal(found, np.array(want, np.float32))


def test_bits_of_narrow_quotients() -> None:
    """The cut quotient times the divisor has to be exact: 12 bits times 12 in float32, not 13."""
    carrier, spec = CARRIERS["float32"], jc.Spec("e5m10")
    allowed = [
        basic.divides_narrow(spec, carrier, ValueRange(-9, 12, 3), ValueRange(-9, bits, bits - 9))
        for bits in (11, 12, 13)
    ]
    assert allowed == [True, True, False]


def test_terms_with_few_bits_of_many() -> None:
    """The sum of 1 and 2^-13 + 2^-25 is above the tie of 13 bits, and rounded to 24 bits it would be the tie."""
    x = np.array([1.0, -1.0], np.float32)
    add = jax.jit(lambda x, y: round_operation("add", [x, y], jc.Spec("e8m12")))
    np.testing.assert_array_equal(add(x, x * np.float32(2.0**-13 + 2.0**-25)), [1 + 2.0**-12, -1 - 2.0**-12])


def test_the_carriers_own_operations() -> None:
    for name, want in {"fma": 7.0, "sub": -1.0, "div": 2 / 3, "max": 3.0, "min": 2.0}.items():
        args = [jnp.float32(v) for v in (2.0, 3.0, 1.0)][: OPERAND_COUNTS[name]]
        assert round_operation(name, args, None) == np.float32(want), name


@further
def odd_leaves_exact_sums() -> None:
    """To the carrier itself: exact sums stay, even ones too; others end in a one."""
    x, y = jnp.float32([2.0, 1.0, 1.0, -1.0]), jnp.float32([2.0, 2.0**-23, 2.0**-30, -(2.0**-30)])
    ranges = (carrier_range(CARRIERS["float32"]),) * 2
    got = round_operation("add", [x, y], jc.Spec("binary32:odd"), ranges=ranges)
    np.testing.assert_array_equal(got, np.array([4.0, 1 + 2.0**-23, 1 + 2.0**-23, -1 - 2.0**-23]))


# -- the smaller ones --------------------------------------------------------------------------------------------------


def test_the_other_operations(rng: np.random.Generator) -> None:
    for name in ("max", "min", "neg", "abs", "square", "sub"):
        check_other(name, rng)


def check_other(name: str, rng: np.random.Generator) -> None:
    fmt, carrier = FORMATS["bfloat16"], oracle.CARRIERS["float32"]
    args = [members(fmt, "float32", COUNT, rng) for _ in range(OPERAND_COUNTS[name])]
    got = np.asarray(jax.jit(lambda args: round_operation(name, args, jc.Spec("bfloat16")))(args))
    if name in ("square", "sub"):
        second = args[0] if name == "square" else -args[1]
        exact = oracle_arithmetic.exact_results({"square": "multiply", "sub": "add"}[name], [args[0], second], carrier,
                                                False)  # fmt: skip
        want = np.array([rounded(v, fmt, "nearest_even", carrier, 0) for v in exact], np.uint32)
        assert not len(cases.differences(got, want, carrier)), name
        return
    plain = {"max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs}[name]
    assert not np.any((got != plain(*args)) & ~(np.isnan(got) & np.isnan(plain(*args)))), name


def test_signs_of_formats_that_are_not_symmetric() -> None:
    """Two's complement has no 128, float8_e4m3fnuz no -0, and unsigned numbers no negative ones."""
    rows = [("abs", "integer8", [-128.0, 5, 0], [127, 5, 0]), ("neg", "integer8", [-128.0, 5, 0], [127, -5, 0]),
            ("neg", "float8_e4m3fnuz", [0.0, 1], [0, -1]), ("neg", "uinteger8", [3.0], [0]),
            ("neg", "bfloat16", [0.0], [-0.0])]  # fmt: skip
    run = jax.jit(
        lambda args: [round_operation(row[0], [x], jc.Spec(row[1])) for row, x in zip(rows, args, strict=True)]
    )
    found = run([jnp.array(row[2], jnp.float32) for row in rows])
    for (name, text, _, want), got in zip(rows, found, strict=True):
        np.testing.assert_array_equal(got, want, f"{name} {text}")
        zeros = np.asarray(want) == 0
        assert (np.signbit(got)[zeros] == np.signbit(want)[zeros]).all(), (name, text)


@further
def a_quotient_beyond_the_carriers_range_is_no_infinity() -> None:
    """Where overflow becomes the largest value, but infinities stay."""
    largest = np.finfo(np.float32).max
    x, y = jnp.array([largest, np.inf, largest], jnp.float32), jnp.array([1 - 2.0**-24, 1, 1], jnp.float32)
    got = round_operation("div", [x, y], jc.Spec("binary32", overflow="propagate"))
    assert got.tolist() == [largest, np.inf, largest]
    assert round_operation("div", [x, y], jc.Spec("binary32")).tolist() == [np.inf, np.inf, largest]


@pytest.mark.smoke
def test_operands_broadcast_and_16_bit_ones_stay_so() -> None:
    x = jnp.arange(6, dtype=jnp.float16).reshape(2, 3)
    got = round_operation("mul", [x, jnp.asarray(1.25, jnp.float16)], jc.Spec("e5m2:up"))
    assert got.dtype == jnp.float16
    assert got.tolist() == [[0.0, 1.25, 2.5], [4.0, 5.0, 7.0]]
    assert round_operation("add", [x, x], None).tolist() == (2 * x).tolist()


@further.first
def a_narrow_carrier_is_refused() -> None:
    rows = (
        ("e8m22", "float32", "float64"),
        ("bfloat16", "float16", "float32"),
        ("codebook(0,1)", "float32", "codebook"),
    )
    for text, dtype, message in rows:
        with pytest.raises(ValueError, match=message):
            check_operation(jc.Spec(text), jnp.dtype(dtype))


def test_operands_that_the_carrier_cannot_hold() -> None:
    check_matmul(jc.MatmulSpec("e5m10", "binary32", "binary32"), jnp.float32)
    with pytest.raises(ValueError, match="e9m22"):
        check_matmul(jc.MatmulSpec("e9m22", "binary32", "binary32"), jnp.float32)


def test_wrapping_is_refused_where_there_is_no_last_bit() -> None:
    for name in ("div", "sqrt"):
        with pytest.raises(ValueError, match="wrap"):
            round_operation(name, [jnp.ones(3)] * OPERAND_COUNTS[name], jc.Spec("integer8:wrap"))


# -- random words ------------------------------------------------------------------------------------------------------


def test_words_are_the_streams() -> None:
    key = jax.random.key(7)
    like = jnp.zeros((3, 4), jnp.float32)
    for number in (0, 5):
        want = jc.random_bits(key, (3, 4), offset=number * 2**32)
        np.testing.assert_array_equal(operation_words(seed_words(key), like, number), want)


def test_every_turn_of_every_loop_has_its_own_seeds() -> None:
    seeds = seed_words(jax.random.key(7))
    found = [tuple(map(int, fold_seeds(seeds, n, step))) for n, step in itertools.product(range(3), range(4))]
    assert len(set(found)) == 12
    assert found[5] == tuple(map(int, jax.jit(lambda step: fold_seeds(seeds, 1, step))(1)))


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("order", "want"), [("pairwise", 96), ("sequential", 8), ("blocked(10)", 64)])
def test_a_hundred_ones(order: str, want: int) -> None:
    run = jax.jit(lambda x: sum_along(x, 1, jc.MatmulSpec(accumulate="e5m2", order=order)))
    assert run(jnp.ones((2, 100), jnp.float32)).tolist() == [want] * 2


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("order", ["blocked(4)", "pairwise"])
def sums_follow_the_orders_of_products(order: str, rng: np.random.Generator) -> None:
    """Over two axes, in C order."""
    x = members(FORMATS["e5m2"], "float32", 60, rng)
    x = np.where(np.isfinite(x), np.clip(x, -64, 64), 1).reshape(3, 4, 5).astype(np.float32)
    spec = jc.MatmulSpec(accumulate="e5m2:up", order=order)
    rows = np.transpose(x, (1, 0, 2)).reshape(4, 15)

    @jax.jit
    def both(x: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = sum_along(x, (2, 0), spec, value_spec=jc.Spec("e5m2"))
        return total, jc.math.matmul(rows, jnp.ones(15, jnp.float32), spec)

    got, want = both(x, rows)
    np.testing.assert_array_equal(got, want)


def test_sums_of_all_of_16_bit_numbers_and_of_nothing() -> None:
    spec = jc.MatmulSpec(accumulate="e5m2")
    half = jax.eval_shape(lambda x: sum_along(x, (0, 1, 2), spec), jax.ShapeDtypeStruct((3, 4, 5), jnp.bfloat16))
    assert half.dtype == jnp.bfloat16 and half.shape == ()
    assert float(jax.jit(lambda x: sum_along(x, 0, spec))(jnp.zeros((0,), jnp.float32))) == 0


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    ("kind", "mode"), [("sum", "stochastic"), *zip(itertools.cycle(["prod", "sum"]), MODES, strict=False)]
)
def test_running_sums_and_products(kind: str, mode: str, rng: np.random.Generator) -> None:
    carrier, fmt = oracle.CARRIERS["float32"], FORMATS["e5m2"]
    x = rng.choice([0.5, 0.625, 1.0, 1.25, 1.75, -1.5, 3.0], (2, 9)).astype(np.float32)
    seeds = seed_words(jax.random.key(1))
    got = cumulative_along(kind, jnp.asarray(x), 1, spec_of("e5m2", mode), seeds, reverse=True)
    want = np.zeros_like(x)
    like = jnp.zeros(2, jnp.float32)
    for row in range(2):
        c: Value = Fraction(kind == "prod")
        for turn, k in enumerate(reversed(range(9))):
            word = int(operation_words(fold_seeds(seeds, 0, turn), like)[row]) if mode in oracle.STOCHASTIC else 0
            v = oracle.from_bits(int(x[row, k].view(np.uint32)), carrier)
            exact = (
                oracle_arithmetic.add(c, v, down=mode == "down") if kind == "sum" else oracle_arithmetic.multiply(c, v)
            )
            c = oracle_matmul.rounded(exact, oracle_matmul.How(fmt, mode), carrier, word)
            want[row, k] = np.array(oracle.to_bits(c, carrier), np.uint32).view(np.float32)
    np.testing.assert_array_equal(got, want)
    if kind == "prod":
        last = product_along(jnp.asarray(x[:, ::-1]), 1, spec_of("e5m2", mode), seeds)
        np.testing.assert_array_equal(last, want[:, 0])


def test_the_table_says_how_many_operands() -> None:
    assert set(OPERAND_COUNTS) == set(operations._EXACT_OPERATIONS) == set(operations._CARRIER_OPERATIONS)


test_further = further.test()
