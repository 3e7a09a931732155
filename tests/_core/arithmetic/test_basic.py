"""Operations against exact rational arithmetic: `jchop._core.arithmetic.basic` and what it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import ANY

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_arithmetic
import pytest
from further import Further
from jax import lax

import jchop as jc
from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._core.arithmetic import basic, double_word
from jchop._core.arithmetic.double_word import square_root
from jchop._core.arithmetic.exact import (
    ValueRange,
    carrier_range,
    product_range,
    range_of,
    require_operation,
    sum_range,
)
from jchop._core.arithmetic.hardware import round_by_adding
from jchop._core.rounding.elements import round_to_spec

further = Further()

MODES = (*oracle.DETERMINISTIC, *oracle.STOCHASTIC)

#: Result formats by their text, with the sets that they must be.
RESULTS: dict[str, oracle.Set] = {
    "e5m10": oracle.ieee(5, 10),
    "bfloat16": oracle.ieee(8, 7),
    "float8_e4m3fn": oracle.fn(4, 3),
    "float8_e5m2": oracle.ieee(5, 2),
    "e8m3": oracle.ieee(8, 3),
    "tf32": oracle.ieee(8, 10),
    "binary32": oracle.ieee(8, 23),
    "e6m9": oracle.ieee(6, 9),
    "fixed8.8": oracle.fixed(8, 8),
    "integer8": oracle.integer(8),
    "e4m3(subnormals=false)": oracle.ieee(4, 3, subnormals=False),
    "binary8p4ue": oracle.p3109(8, 4, signed=False),
    "float8_e8m0fnu": cases.E8M0,
    "e8m3(bias=130,infinities=false,nans=none)": oracle.FloatSet(8, 3, 130, inf=False, nan="none"),
}
IN_FLOAT64 = ("e5m10", "binary32", "e9m40", "e11m20(bias=1030,infinities=false,nans=none)", "binary64")
#: Specs that `require_operation` lets pass, some of which leave just two bits.
ACCEPTED = {
    "float32": ("e5m10", "e8m21", "e7m21:down", "binary32", "binary32:up", "binary32:nearest_away:saturate",
                "fixed8.14", "integer23", "uinteger22:stochastic", "integer8:wrap", "e5m23(subnormals=false)",
                "float8_e8m0fnu"),
    "float64": ("binary32:odd", "e8m21", "e10m50:stochastic", "binary64", "binary64:stochastic", "fixed8.14",
                "integer52"),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("x64", "neighbours_kept")


def words(n: int, carrier: oracle.Carrier, rng: np.random.Generator) -> np.ndarray:
    """Random words, some all zeros, some all ones."""
    drawn = rng.integers(0, 2**carrier.bits, n, dtype=np.uint64).astype(carrier.words)
    drawn[::8], drawn[1::8] = 0, 2**carrier.bits - 1
    return drawn


def expected(
    exact: list[oracle.Value], spec: jc.Spec, fmt: oracle.Set, word: np.ndarray, carrier: oracle.Carrier
) -> np.ndarray:
    """The bit patterns of exact results rounded under a spec."""
    mode, overflow = spec.rounding.value, spec.overflow.value
    n = spec.random_bits or carrier.bits - (mode in ("stochastic_b", "stochastic_c"))
    rounded = [
        oracle.round_exact(fmt, v, mode, overflow, flush=spec.flush, n=n, r=int(r) >> carrier.bits - n)
        for v, r in zip(exact, word, strict=True)
    ]
    return np.array([oracle.to_bits(v, carrier) for v in rounded], carrier.words)


def assert_equal(got: Any, want: np.ndarray, operands: list[np.ndarray], word: np.ndarray, what: str) -> None:
    got = np.asarray(got)
    where = cases.differences(got, want, oracle.CARRIERS[got.dtype.name])
    if len(where):
        shown = [
            f"  {[v[i].item().hex() for v in operands]} word {word[i]:#x} gave {got[i].item().hex()}, "
            f"expected {want[i : i + 1].view(got.dtype)[0].item().hex()}"
            for i in where[:5]
        ]
        raise AssertionError(f"{what}: {len(where)} of {len(want)} differ\n" + "\n".join(shown))


def specs(text: str, carrier: str) -> Iterator[jc.Spec]:
    """Every mode of a format, and every overflow rule in the modes in turn."""
    rules = itertools.cycle(("ieee", "saturate", "propagate"))
    for mode in MODES:
        yield jc.Spec(text, rounding=mode, overflow=next(rules))
    for rule in cases.FLOAT_OVERFLOWS:
        yield jc.Spec(text, overflow=rule)
    if text == "e5m10":
        yield from (jc.Spec(text, rounding=mode, random_bits=n) for mode in oracle.PROPORTIONAL for n in (1, 5, 13, 20))
        yield from (jc.Spec(text, rounding=mode, flush=True) for mode in ("nearest_even", "up", "stochastic"))


def check(
    operation: str,
    operands: list[np.ndarray],
    ranges: list[ValueRange],
    specs: Iterable[jc.Spec],
    fmt: oracle.Set,
    rng: np.random.Generator,
    compiled: bool = False,
) -> None:
    """An operation on operands within their ranges, against the exact results."""
    carrier = operands[0].dtype.name
    kind, word = oracle.CARRIERS[carrier], words(len(operands[0]), oracle.CARRIERS[carrier], rng)
    exact = {down: oracle_arithmetic.exact_results(operation, operands, kind, down) for down in (False, True)}
    for spec in specs:
        require_operation(spec, CARRIERS[carrier], "spec")
        run = partial(apply, operation, spec=spec, carrier=CARRIERS[carrier], ranges=tuple(ranges))
        got = (jax.jit(run) if compiled else run)(jnp.asarray(word), *map(jnp.asarray, operands))
        want = expected(exact[spec.rounding.value == "down"], spec, fmt, word, kind)
        assert_equal(got, want, operands, word, f"{operation} to {spec} in {carrier} of {ranges}")


#: The functions under test by the names of `oracle_arithmetic`: rounded once, and exact.
ROUNDED = {
    "add": basic.add_and_round,
    "multiply": basic.multiply_and_round,
    "multiply_add": basic.multiply_add_and_round,
    "divide": basic.divide_and_round,
}
EXACT = {
    "add": double_word.add_exactly,
    "multiply": double_word.multiply_exactly,
    "multiply_add": double_word.multiply_add_exactly,
}


def apply(
    operation: str, word: Any, *operands: Any, spec: jc.Spec | None, carrier: Carrier, ranges: tuple[ValueRange, ...]
) -> jax.Array:
    return ROUNDED[operation](*operands, spec, carrier, word, *ranges)


# --- any operands: integer arithmetic ---------------------------------------------------------------------------------


#: Result formats, carriers, and how many operands: the carriers in turn, and what only float64 has room for.
ANY_OPERANDS = [
    pytest.param(text, carrier, 300, marks=pytest.mark.slow)
    for text, carrier in [
        *zip(RESULTS, itertools.cycle(["float32", "float64"])),
        *((t, "float64") for t in IN_FLOAT64[2:]),
    ]
]


@further
@pytest.mark.parametrize(("text", "carrier", "count"), [("float8_e5m2", "float32", 25), *ANY_OPERANDS])
def any_operands(text: str, carrier: str, count: int, rng: np.random.Generator) -> None:
    """Uncompiled: every primitive is compiled once for all formats and modes, and integers are integers."""
    fmt = (RESULTS | cases.DOUBLE)[text]
    modes = list(specs(text, carrier))
    modes = modes if count > 25 else modes[7:8]
    for operation, arity in oracle_arithmetic.OPERANDS.items():
        operands = oracle_arithmetic.pairs(operation, fmt, oracle.CARRIERS[carrier], count, rng)
        check(operation, operands, [carrier_range(CARRIERS[carrier])] * arity, modes, fmt, rng)


@further
@pytest.mark.parametrize(("carrier", "count"), [("float32", 200), pytest.param("float64", 800, marks=pytest.mark.slow)])
def exact_form_too(carrier: str, count: int, rng: np.random.Generator) -> None:
    """What integer arithmetic hands to a rounding, bit for bit: t, the W bits after it, and whether more follow."""
    kind, width = oracle.CARRIERS[carrier], CARRIERS[carrier].work_width
    for operation in oracle_arithmetic.OPERATIONS:
        operands = oracle_arithmetic.pairs(operation, oracle.ieee(5, 10), kind, count, rng)
        run = partial(double_word.divide_exactly, bits=width) if operation == "divide" else EXACT[operation]
        form = jax.jit(lambda *args, run=run: vars(run(*args, CARRIERS[carrier])) | {"quantum": 0})(*operands)
        columns = (np.asarray(form[name]).tolist() for name in ("magnitude", "rest", "sticky", "inexact", "beyond"))
        exact = oracle_arithmetic.exact_results(operation, operands, kind, down=False)
        for row, v, got in zip(zip(*operands, strict=True), exact, zip(*columns, strict=True), strict=True):
            assert got == exact_form(v, kind, width), (operation, [x.item().hex() for x in row], got)


def exact_form(v: oracle.Value, carrier: oracle.Carrier, width: int) -> tuple[int, int, bool, bool, bool]:
    if isinstance(v, oracle.Special):
        return oracle.to_bits(v, carrier) & (carrier.sign - 1), 0, False, False, False
    if abs(v) >= 2 ** (carrier.bias + 1):
        return carrier.infinity - 1, 2**width - 1, ANY, True, True
    low, nu = oracle.neighbours(oracle.ieee(carrier.e, carrier.m), abs(v))
    rest, more = divmod(nu * 2**width, 1)
    return low, int(rest), more > 0, nu > 0, False


@further
@pytest.mark.parametrize(
    "texts", [("e8m21",), pytest.param(ACCEPTED["float32"][2:], marks=pytest.mark.slow)], ids=["some", "all"]
)
def accepted_at_the_edge(texts: tuple[str, ...], rng: np.random.Generator) -> None:
    """Formats that leave just two bits, or none but the carrier's own, against the exact results."""
    for text in texts:
        spec = jc.Spec(text)
        if spec.overflow.value == "wrap":
            continue
        fmt = oracle.describe(spec.format)
        for operation in ("multiply", "add"):
            operands = oracle_arithmetic.pairs(operation, fmt, oracle.CARRIERS["float32"], 60, rng)
            check(operation, operands, [carrier_range(CARRIERS["float32"])] * 2, [spec], fmt, rng)


@pytest.mark.parametrize(
    ("carrier", "text", "factor"), [("float32", "binary32", "bfloat16"), ("float64", "binary64", "e11m20")]
)
def test_normal_operands_whose_subnormal_results_become_zero(
    carrier: str, text: str, factor: str, rng: np.random.Generator
) -> None:
    """The carrier's own rounding: sums of normal numbers, products of shorter ones."""
    kind, spec = oracle.CARRIERS[carrier], jc.Spec(text, flush=True)
    for operation, known in (("add", text), ("multiply", factor)):
        fmt, held = oracle.describe(jc.Spec(known).format), range_of(jc.Spec(known, flush=True), CARRIERS[carrier])
        operands = oracle_arithmetic.pairs(operation, fmt, kind, 120, rng)
        normal = float(np.finfo(carrier).smallest_normal)
        operands = [np.where(abs(v) < normal, np.copysign(v.dtype.type(0), v), v) for v in operands]
        if operation == "add":  # sums that cancel, all of them subnormal
            close = (rng.integers(1 << 3, 1 << 4, (2, 60)) * (normal / 8)).astype(carrier)
            operands = [np.append(v, c * sign) for v, c, sign in zip(operands, close, (1, -1), strict=True)]
        check(operation, operands, [held] * 2, [spec], oracle.describe(spec.format), rng, compiled=True)


@further
def of_64_bit_mode_changes_nothing(rng: np.random.Generator) -> None:
    kind, spec, whole = oracle.CARRIERS["float32"], jc.Spec("e5m10:stochastic"), carrier_range(CARRIERS["float32"])
    operands = oracle_arithmetic.pairs("multiply_add", oracle.ieee(5, 10), kind, 2000, rng)
    word = words(len(operands[0]), kind, rng)

    def run(word: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return [
            apply(name, word, *operands[:n], spec=spec, carrier=CARRIERS["float32"], ranges=(whole,) * n)
            for name, n in oracle_arithmetic.OPERANDS.items()
        ]

    with jax.enable_x64(False):
        narrow = jax.jit(run)(word, *operands)
    for one, other in zip(narrow, jax.jit(run)(word, *operands), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        assert np.array_equal(cases.bits(np.asarray(one)), cases.bits(np.asarray(other)))


# --- operands of known ranges: the hardware's operations --------------------------------------------------------------

#: (operation, formats of the operands, result): each takes way 1 or 2. A pair of formats stands for the exact products
#: of their values.
FAST: list[tuple[str, tuple[str | tuple[str, str], ...], str]] = [
    ("add", ("e5m10", "e5m10"), "e5m10"),
    ("add", ("e5m10", "e5m10"), "float8_e4m3fn"),  # which has no numbers as small
    ("add", ("e5m10", ("e5m10", "e5m10")), "e5m10"),
    ("add", ("e5m10(subnormals=false)", "e5m10(subnormals=false)"), "e5m10(subnormals=false)"),
    ("add", ("float8_e4m3fn", ("float8_e4m3fn", "float8_e4m3fn")), "float8_e4m3fn"),
    ("add", ("e5m10", ("float8_e4m3fn", "float8_e5m2")), "e5m10"),
    ("add", ("e6m9", "e6m9"), "e6m9"),
    ("add", ("fixed8.8", "fixed8.8"), "fixed8.8"),
    ("add", ("fixed8.8", "e5m10"), "fixed8.8"),
    ("add", ("e5m10", "e5m10"), "binary8p4ue"),
    ("add", ("e5m0", "e5m0"), "e5m0"),
    ("add", ("e5m10", "e5m10"), "e8m3(bias=130,infinities=false,nans=none)"),
    ("multiply", ("e5m10", "e5m10"), "e5m10"),
    ("multiply", ("float8_e4m3fn", "float8_e5m2"), "float8_e4m3fn"),
    ("multiply", ("integer8", "fixed8.8"), "fixed8.8"),
    ("multiply_add", ("e5m10", "e5m10", "e5m10"), "e5m10"),
    ("multiply_add", ("float8_e4m3fn", "float8_e4m3fn", "e5m10"), "e5m10"),
]
ROUNDINGS_OF_FAST = ("nearest_even", "nearest_away", "down", "odd", "stochastic", "stochastic_c")
SETS = RESULTS | {"e5m10(subnormals=false)": oracle.ieee(5, 10, subnormals=False), "e5m0": oracle.ieee(5, 0)}


def values_of(text: str, n: int, carrier: str, rng: np.random.Generator) -> np.ndarray:
    """Values of a format: its smallest, its largest, those around 1, and any; a few zeros, infinities and NaN."""
    fmt = jc.Spec(text, overflow="saturate")
    r = range_of(fmt, CARRIERS[carrier])
    exponent = np.choose(
        rng.integers(0, 3, n),
        [rng.integers(r.quantum - 1, r.top + 1, n), rng.integers(-9, 9, n), rng.integers(r.top - 4, r.top + 1, n)],
    )
    x = np.ldexp(rng.random(n) + 1, exponent) * rng.choice([-1.0, 1.0], n)
    x[:16] = np.repeat([0.0, -0.0, np.inf, -np.inf], 4)
    x[16:18] = np.nan
    return np.asarray(jc.round_to_format(rng.permutation(x).astype(carrier), fmt))


def known(
    operand: str | tuple[str, str], n: int, carrier: str, rng: np.random.Generator
) -> tuple[np.ndarray, ValueRange]:
    """Values of a format or exact products of two, with their range."""
    texts = (operand,) if isinstance(operand, str) else operand
    values = [values_of(text, n, carrier, rng) for text in texts]
    ranges = [range_of(jc.Spec(text), CARRIERS[carrier]) for text in texts]
    if len(texts) == 1:
        return values[0], ranges[0]
    with np.errstate(invalid="ignore"):
        return values[0] * values[1], product_range(*ranges)


def fast_cases(
    rows: list, mode: str, carrier: str, n: int, rng: np.random.Generator
) -> Iterator[tuple[str, list, list, jc.Spec]]:
    """The operands of rows of FAST: half of them at random, half hard sums, products and so on."""
    for operation, texts, result in rows:
        operands, ranges = (list(part) for part in zip(*(known(text, n, carrier, rng) for text in texts), strict=True))
        hard = oracle_arithmetic.pairs(operation, SETS[result], oracle.CARRIERS[carrier], n, rng)
        for i, text in enumerate(texts):
            if isinstance(text, str):
                rounded = jc.round_to_format(hard[i], jc.Spec(text, overflow="saturate"))
                operands[i] = np.where(np.arange(n) % 2, operands[i], np.asarray(rounded)[:n])
        yield operation, operands, ranges, jc.Spec(result, rounding=mode)


#: Each row of FAST in some of the modes.
KNOWN = {mode: FAST[i % 3 :: 3] for i, mode in enumerate(ROUNDINGS_OF_FAST)} | {"nearest_even": FAST}


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("nearest_even", FAST[:1]), *(pytest.param(mode, rows, marks=pytest.mark.slow) for mode, rows in KNOWN.items())],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_known_ranges(mode: str, rows: list, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, so that a compiler that contracts or reorders would show; against the exact results."""
    for function in (double_word.add_exactly, double_word.multiply_exactly, double_word.multiply_add_exactly):
        monkeypatch.setattr(double_word, function.__name__, _not_taken)
    for operation, operands, ranges, spec in fast_cases(rows, mode, "float32", 250, rng):
        check(operation, operands, ranges, [spec], SETS[str(spec.format)], rng, compiled=True)


def _not_taken(*_: Any) -> Any:
    raise AssertionError("integer arithmetic where the hardware's would do")


#: Carriers in turn with the modes, and a fourth of the rows of FAST with each.
AGREE = [
    pytest.param(carrier, mode, FAST[i % 4 :: 4], 100_000, id=f"{carrier}-{mode}", marks=pytest.mark.slow)
    for i, (mode, carrier) in enumerate(zip(MODES, itertools.cycle(["float32", "float64"])))
]


@pytest.mark.parametrize(("carrier", "mode", "rows", "count"), [("float32", "stochastic", FAST[2:3], 5_000), *AGREE])
def test_ways_agree(carrier: str, mode: str, rows: list, count: int, rng: np.random.Generator) -> None:
    """The hardware's operations and integer arithmetic, compiled, on many operands."""
    for operation, operands, ranges, spec in fast_cases(rows, mode, carrier, count, rng):
        word = words(len(operands[0]), oracle.CARRIERS[carrier], rng)
        known, any_ = (
            jax.jit(partial(apply, operation, spec=spec, carrier=CARRIERS[carrier], ranges=given))(word, *operands)
            for given in (tuple(ranges), (carrier_range(CARRIERS[carrier]),) * len(ranges))
        )
        assert_equal(known, cases.bits(np.asarray(any_)), operands, word, f"{operation} to {spec} in {carrier}")


# --- the carrier's own format, and which way is taken -----------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_no_spec_is_ieee(carrier: str, rng: np.random.Generator) -> None:
    """The hardware's own results, as NumPy gives them: subnormals included, which XLA on a CPU reads as zero."""
    kind = oracle.CARRIERS[carrier]
    whole = (carrier_range(CARRIERS[carrier]),) * 2
    for operation, by_numpy in {"add": np.add, "multiply": np.multiply, "divide": np.divide}.items():
        x, y = oracle_arithmetic.pairs(operation, oracle.ieee(kind.e, kind.m), kind, 20_000, rng)
        run = partial(apply, operation, None, spec=None, carrier=CARRIERS[carrier], ranges=whole)
        with np.errstate(all="ignore"):
            want = by_numpy(x, y).view(kind.words)
        assert_equal(jax.jit(run)(x, y), want, [x, y], np.zeros(len(x), kind.words), operation)


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(
    ("operands", "accumulate"),
    [("e5m10", None), ("e5m10", "e5m10"), ("e5m10", "e5m10:stochastic"), ("e6m14", None),
     ("e6m14", "e5m10:down")],
)  # fmt: skip
def test_contraction(operands: str, accumulate: str | None, rng: np.random.Generator) -> None:
    """Products that feed sums: were a b + c contracted to one operation, the product's rounding would be lost."""
    carrier, kind, n = CARRIERS["float32"], oracle.CARRIERS["float32"], 400
    (a, r), (b, _) = (known(operands, n, "float32", rng) for _ in range(2))
    with np.errstate(invalid="ignore", over="ignore"):
        product = a * b
        c = np.where(np.arange(n) % 3, -product, values_of("e5m10", n, "float32", rng))
    word = words(n, kind, rng)
    spec = None if accumulate is None else jc.Spec(accumulate)
    whole = carrier_range(carrier)

    @jax.jit
    def run(word: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        p = basic.multiply_and_round(a, b, None, carrier, None, r, r)
        return basic.add_and_round(
            p, c, spec, carrier, word, product_range(r, r) if operands == "e5m10" else whole, whole
        )

    exact = oracle_arithmetic.exact_results("add", [product, c], kind, accumulate == "e5m10:down")
    shown = jc.Spec("binary32") if spec is None else spec
    want = expected(exact, shown, oracle.describe(shown.format), word, kind)
    assert_equal(run(word, a, b, c), want, [a, b, c], word, f"{operands}, {accumulate}")


def jaxpr(function: Any, count: int) -> str:
    return str(jax.make_jaxpr(function)(*[jnp.zeros(4, "float32")] * count))


def test_nearest_is_the_hardwares() -> None:
    """Nothing but the operation and the rounding, where that is enough."""
    for rounding in oracle.NEAREST:
        check_nearest(rounding)


def check_nearest(rounding: str) -> None:
    carrier, spec = CARRIERS["float32"], jc.Spec("e5m10", rounding=rounding)
    r = range_of(spec, carrier)
    round_ = round_by_adding if rounding == "nearest_even" else round_to_spec
    for name, plain in {"add": jnp.add, "multiply": jnp.multiply}.items():
        operation = ROUNDED[name]
        assert jaxpr(lambda x, y, op=operation: op(x, y, spec, carrier, None, r, r), 2) == jaxpr(
            lambda x, y, op=plain: round_(op(x, y), spec, carrier), 2
        )


#: Results, ranges of two terms, and whether their sum takes integer arithmetic.
E5M10, BFLOAT16 = ValueRange(-24, 11, 16), ValueRange(-133, 8, 128)
FLUSHED = ValueRange(-149, 24, 128, least=-126)
WAYS = [
    ("e5m10", E5M10, E5M10, False),
    ("e5m10:up", E5M10, E5M10, False),
    ("e5m10:stochastic", E5M10, ValueRange(-48, 22, 32), False),
    ("e5m10", E5M10, ValueRange(-126, 11, 16), False),  # small terms hide ties among the subnormals: TwoSum
    ("e5m10", E5M10, ValueRange(-127, 11, 16), True),  # terms of the carrier's subnormals
    ("bfloat16", BFLOAT16, BFLOAT16, False),  # scaled
    ("bfloat16:stochastic", BFLOAT16, ValueRange(-149, 24, 128), False),
    ("bfloat16:stochastic_c", BFLOAT16, BFLOAT16, True),
    ("binary32", BFLOAT16, BFLOAT16, False),
    ("e5m10:up", E5M10, ValueRange(100, 11, 126), False),
    ("e5m10:up", E5M10, ValueRange(100, 11, 127), True),  # the sum may be 2^127 or more, and be rounded up
    ("e5m10", E5M10, ValueRange(100, 11, 128), False),  # infinite in the carrier or not, it overflows
    ("e5m10:propagate", E5M10, ValueRange(100, 11, 128), True),  # but here an infinity is told from a finite value
    ("binary32", E5M10, ValueRange(-126, 24, 126), False),
    ("binary32:nearest_away", E5M10, ValueRange(-126, 24, 126), True),
    ("integer8:wrap", ValueRange(0, 7, 8), ValueRange(0, 7, 8), False),
    ("binary32:flush", FLUSHED, FLUSHED, False),
    ("binary32:flush", FLUSHED, BFLOAT16, True),
    ("binary32:nearest_away:flush", FLUSHED, FLUSHED, True),
]


def test_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, plain = [], double_word.add_exactly
    monkeypatch.setattr(double_word, plain.__name__, lambda *args: taken.append(args) or plain(*args))
    word = jnp.zeros(4, jnp.uint32)
    for text, xr, yr, integers in WAYS:
        taken.clear()
        add = partial(basic.add_and_round, spec=jc.Spec(text), carrier=CARRIERS["float32"], word=word, xr=xr, yr=yr)
        jaxpr(add, 2)
        assert bool(taken) == integers, (text, xr, yr)


def test_product_that_may_overflow() -> None:
    """Rounded to the carrier itself, a product that may overflow must not meet a sum as the hardware's product."""
    carrier, large = CARRIERS["float32"], ValueRange(60, 11, 100)

    @jax.jit
    def run(x: jax.Array, z: jax.Array) -> jax.Array:
        p = basic.multiply_and_round(x, x, None, carrier, None, large, large)
        return basic.add_and_round(p, z, None, carrier, None, carrier_range(carrier), carrier_range(carrier))

    with np.errstate(over="ignore"):
        x, z = np.float32(2) ** np.array([64, 63.5, 64], np.float32), np.array([-3e38, -3e38, 0], np.float32)
        assert np.array_equal(run(x, z), x * x + z)
    ranges = (large, large, carrier_range(carrier))
    fused = partial(apply, "multiply_add", None, spec=None, carrier=carrier, ranges=ranges)
    assert float(jax.jit(fused)(x, x, z)[0]) == float(2**128 - Fraction(float(np.float32(3e38))))


def test_division_by_a_poor_divider(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Quotients are right where the hardware's reciprocal is off by up to 16 units in the last place."""
    carrier, kind, plain = CARRIERS["float32"], oracle.CARRIERS["float32"], double_word._reciprocal

    def poor(divisor: jax.Array, carrier: Carrier) -> jax.Array:
        off = jnp.arange(divisor.size, dtype=jnp.int32) % 33 - 16
        return lax.bitcast_convert_type(lax.bitcast_convert_type(plain(divisor, carrier), jnp.int32) + off, jnp.float32)

    monkeypatch.setattr(double_word, "_reciprocal", poor)
    x, y = oracle_arithmetic.pairs("divide", oracle.ieee(8, 23), kind, 20_000, rng)
    run = partial(apply, "divide", None, spec=None, carrier=carrier, ranges=(carrier_range(carrier),) * 2)
    with np.errstate(all="ignore"):
        assert_equal(jax.jit(run)(x, y), (x / y).view(kind.words), [x, y], np.zeros(len(x), kind.words), "divide")


# --- ranges and refusals ----------------------------------------------------------------------------------------------


@further
def range_of_too(rng: np.random.Generator) -> None:
    """Every value lies within its format's range, and no tighter one holds."""
    for text in (*RESULTS, "ufixed4.4", "integer4(narrow=true)", "codebook(-3.0,-1.0,0.375,5.0)"):
        fmt, carrier = jc.Spec(text).format, CARRIERS["float64"]
        r = range_of(jc.Spec(fmt), carrier)
        drawn = fmt.decode(rng.integers(0, 2**fmt.bits, 20))
        values = [Fraction(v) for v in (fmt.max, fmt.min, fmt.smallest, *drawn[np.isfinite(drawn)]) if v]
        multiples = [v / Fraction(2) ** r.quantum for v in values]
        assert all(m.denominator == 1 for m in multiples) and any(m.numerator % 2 for m in multiples), text
        assert Fraction(2) ** (r.top - 1) <= max(map(abs, values)) < Fraction(2) ** r.top, text
        lengths = [n.bit_length() - (n & -n).bit_length() + 1 for n in (abs(m.numerator) for m in multiples)]
        assert max(lengths) == r.precision, text


def test_ranges_of_carriers_and_results() -> None:
    carrier = CARRIERS["float32"]
    assert range_of(None, carrier) == carrier_range(carrier) == ValueRange(-149, 24, 128)
    assert range_of(jc.Spec("binary64"), carrier) == ValueRange(-149, 24, 128)
    assert product_range(ValueRange(-24, 11, 16), ValueRange(-9, 4, 9)) == ValueRange(-33, 15, 25)
    assert sum_range(ValueRange(-24, 11, 16), ValueRange(-9, 4, 9)) == ValueRange(-24, 41, 17)
    assert ValueRange(-2, 11, 4).bits == 6
    assert range_of(jc.Spec("codebook(-3.0,-1.0,0.375,5.0)"), carrier) == ValueRange(-3, 3, 3)


REFUSED = {
    "float32": {
        "e8m22": "two bits.*cast the operands to float64",  # one bit to spare
        "e8m21(bias=128)": "to float64",  # one bit to spare among the subnormals
        "e5m23": "to float64",  # of the carrier's precision, but not of its subnormals
        "integer24": "to float64",
        "uinteger23": "to float64",
        "binary64": "two bits.*to float64",
        "e8m3(bias=120)": "cannot hold every result.*to float64",
        "codebook(0.0,1.0)": "codebook",
    },
    "float64": {"e11m51": "no carrier", "codebook(0.0,1.0)": "codebook"},
    "bfloat16": {"e5m2": "must be float32 or float64 ones.*to float32"},
}


@pytest.mark.parametrize("carrier", [*ACCEPTED, "bfloat16"])
def test_require_operation(carrier: str) -> None:
    require_operation(None, CARRIERS[carrier], "accumulate")
    for text in ACCEPTED.get(carrier, ()):
        require_operation(jc.Spec(text), CARRIERS[carrier], "accumulate")
    for text, message in REFUSED[carrier].items():
        with pytest.raises(ValueError, match=f"^accumulate=.*{message}"):
            require_operation(jc.Spec(text), CARRIERS[carrier], "accumulate")


@further.first
def a_cast_to_float64_needs_x64() -> None:
    said = r"cast the operands to float64; JAX arrays are float64 only with jax_enable_x64, which is off$"
    with jax.enable_x64(False), pytest.raises(ValueError, match=said):
        require_operation(jc.Spec("e8m22"), CARRIERS["float32"], "accumulate")
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"cast the operands to float64$"):
        require_operation(jc.Spec("e8m22"), CARRIERS["float32"], "accumulate")
    with pytest.raises(ValueError, match=r"cast the operands to float32$"):
        require_operation(jc.Spec("e5m2"), CARRIERS["bfloat16"], "accumulate")


@further
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("text", ["integer8:wrap", "fixed4.4:wrap:stochastic", "ufixed4.4:wrap:down"])
def wrap(text: str, rng: np.random.Generator) -> None:
    spec = jc.Spec(text)
    fmt = oracle.describe(spec.format)
    r = range_of(spec, CARRIERS["float32"])
    for operation in ("add", "multiply", "multiply_add"):
        count = oracle_arithmetic.OPERANDS[operation]
        operands = [values_of(str(spec.format), 160, "float32", rng) for _ in range(count)]
        check(operation, operands, [r] * count, [spec], fmt, rng, compiled=True)


def test_wrap_refused() -> None:
    carrier, spec = CARRIERS["float32"], jc.Spec("fixed8.8:wrap")
    x, r = jnp.ones(4, jnp.float32), range_of(spec, carrier)
    jax.eval_shape(lambda: basic.add_and_round(x, x, spec, carrier, None, r, r))
    with pytest.raises(ValueError, match=r"wraps an exact result.*up to 30 bits from 2\^-16"):
        basic.multiply_and_round(x, x, spec, carrier, None, r, r)
    with pytest.raises(ValueError, match="wraps an exact result"):
        basic.multiply_add_and_round(x, x, x, spec, carrier, None, r, r, r)
    with pytest.raises(ValueError, match="wraps an exact result"):
        basic.add_and_round(x, x, spec, carrier, None, r, carrier_range(carrier))
    with pytest.raises(ValueError, match="cannot wrap"):
        basic.divide_and_round(x, x, spec, carrier, None, r, r)


# --- single cases, each of which a wrong expression of the core would change ------------------------------------------


def test_below_the_smallest_value_of_a_format_with_all_bits_of_the_carrier() -> None:
    """Products that differ from half the smallest value by less than the carrier's last place are no ties."""
    least, carrier = 2.0**-14, CARRIERS["float32"]
    below = (2**23 + 1) * 2.0**-30, (2**24 - 2) * 2.0**-32  # 2^-15 (1 - 2^-46)
    above = 8392705 * 2.0**-30, 8384513 * 2.0**-31  # 2^-15 (1 + 2^-46)
    x, y = np.array([below, above], np.float32).T
    for rounding in ("nearest_even", "nearest_away", "nearest_zero"):
        spec, whole = jc.Spec(f"e5m23(subnormals=false):{rounding}"), (carrier_range(carrier),) * 2
        run = jax.jit(partial(apply, "multiply", None, spec=spec, carrier=carrier, ranges=whole))
        assert run(x, y).tolist() == [0, least], rounding


def test_ties_of_one_bit_of_precision_take_the_even_code() -> None:
    """Of operands of the format, whose sums an addition would round otherwise."""
    spec, carrier = jc.Spec("e5m0"), CARRIERS["float32"]
    ranges = (range_of(spec, carrier),) * 2
    out = basic.add_and_round(
        jnp.array([1, 2], "float32"), jnp.array([0.5, 1], "float32"), spec, carrier, None, *ranges
    )
    assert out.tolist() == [2.0, 2.0]  # codes 15, 16 and 17 of 1, 2 and 4


@further
def the_root_of_zero_has_no_further_bits() -> None:
    """Which a draw would round away from zero."""
    found = square_root(jnp.array([0.0, -0.0], "float32"), CARRIERS["float32"], all_bits=True)
    for name in ("magnitude", "rest", "sticky", "inexact"):
        assert not np.asarray(getattr(found, name)).any(), name


test_further = further.test()
