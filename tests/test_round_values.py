"""round_to_format against the exact oracle, bit for bit, on every carrier."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from fractions import Fraction
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import FIXED_OVERFLOWS, FLOAT_OVERFLOWS
from oracle import CARRIERS, DETERMINISTIC

import jchop as jc

DATA = pathlib.Path(__file__).parent / "data"

#: Formats of at most 16 bits. e5m10, e8m7 and e4m3 are left out here because they are named formats
#: (test_formats_are_the_documented_sets).
SMALL = cases.NAMED | {t: f for t, f in cases.CUSTOM.items() if t not in ("e5m10", "e8m7", "e4m3")}
SUBNORMALS = ("kept", "absent", "flushed")
#: Each format with each way to treat subnormals; without a zero there is nothing to flush to, and no subnormals.
TREATED = [(t, s) for t, f in SMALL.items() for s in SUBNORMALS if f.zero or s == "kept"]


def build(fmt: oracle.Set) -> Any:
    """The package's format with the oracle's parameters."""
    if isinstance(fmt, oracle.FloatSet):
        return jc.FloatFormat(
            fmt.e,
            fmt.m,
            bias=fmt.bias,
            subnormals=fmt.subnormals,
            infinities=fmt.inf,
            nans=fmt.nan,
            signed=fmt.signed,
            zero=fmt.zero,
            max_exponent=fmt.emax,
            p3109=fmt.p3109,
        )
    assert isinstance(fmt, oracle.FixedSet)
    return jc.FixedFormat(fmt.bits - fmt.f, fmt.f, fmt.signed, fmt.symmetric)


def variant(fmt: oracle.FloatSet, subnormals: str) -> tuple[oracle.FloatSet, bool]:
    """A format and the flush option for one way to treat subnormals."""
    return dataclasses.replace(fmt, subnormals=subnormals != "absent"), subnormals == "flushed"


def carried(x: np.ndarray, fmt: oracle.Set) -> np.ndarray:
    """x in its own carrier, or in float32 where that carrier does not hold the format (and is refused)."""
    return x if oracle.held(fmt, CARRIERS[x.dtype.name]) else x.astype(np.float32)


def round_as(kind: str, x: np.ndarray, spec: jc.Spec) -> np.ndarray:
    """The result through NumPy or through JAX, as NumPy."""
    if kind == "numpy":
        out = jc.round_to_format(x, spec)
        assert type(out) is np.ndarray
        return out
    out = jc.round_to_format(jnp.asarray(x), spec)
    assert isinstance(out, jax.Array)
    return np.asarray(out)


def check(
    x: np.ndarray,
    fmt: oracle.FloatSet | oracle.FixedSet,
    settings: list[tuple[str, str]],
    *,
    flush: bool = False,
    kind: str = "jax",
) -> None:
    """Compares the package with the oracle for each (mode, overflow rule)."""
    exact, theirs = cases.batch(x), build(fmt)
    for mode, overflow in settings:
        got = round_as(kind, x, jc.Spec(theirs, rounding=mode, overflow=overflow, flush=flush))
        cases.assert_bits(x, got, exact.round(fmt, mode, overflow, flush), f"{fmt} {mode} {overflow} flush={flush}")


def every(overflows: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(itertools.product(DETERMINISTIC, overflows))


def once(overflows: tuple[str, ...], seed: str, turn: int = 0) -> list[tuple[str, str]]:
    """Every mode once, the overflow rules taking turns, from a start that depends on the case."""
    start = sum(map(ord, seed)) + turn
    return [(mode, overflows[(start + k) % len(overflows)]) for k, mode in enumerate(DETERMINISTIC)]


DOCUMENTED = cases.NAMED | cases.CUSTOM | cases.P3109 | cases.WIDE | cases.DOUBLE | cases.FIXED


@pytest.mark.in_turn(77)
@pytest.mark.parametrize(
    "text",
    [pytest.param(t, marks=pytest.mark.slow if 12 < jc.parse(t).format.bits <= 16 else ()) for t in DOCUMENTED],
)
def test_formats_are_the_documented_sets(text):
    fmt = jc.parse(text).format
    assert oracle.describe(fmt) == DOCUMENTED[text]
    if fmt.bits <= 16:
        assert [Fraction(v) for v in fmt.values().tolist()] == oracle.values(DOCUMENTED[text])


@pytest.mark.parametrize(("text", "name"), [("e5m10", "binary16"), ("e8m7", "bfloat16"), ("e4m3", "float8_e4m3")])
def test_texts_of_named_formats_are_the_names(text, name):
    assert jc.formats.parse_format(text) == jc.formats.parse_format(name) == jc.formats.CATALOGUE[name]


# --- every pattern of the 16-bit carriers -------------------------------------------------------------------------


@pytest.mark.in_turn(24)
@pytest.mark.parametrize(
    ("carrier", "text", "subnormals"),  # every one on both carriers: below, in the slow run
    [(carrier, *treated) for carrier, treated in zip(itertools.cycle(["float16", "bfloat16"]), TREATED, strict=False)],
)
def test_every_pattern(carrier, text, subnormals):
    fmt, flush = variant(SMALL[text], subnormals)
    x = carried(cases.all_patterns(carrier), fmt)
    check(x, fmt, once(FLOAT_OVERFLOWS, carrier + text + subnormals), flush=flush)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "subnormals"), TREATED)
@pytest.mark.parametrize("carrier", ["float16", "bfloat16"])
def test_every_pattern_and_overflow(carrier, text, subnormals):
    fmt, flush = variant(SMALL[text], subnormals)
    x = carried(cases.all_patterns(carrier), fmt)
    check(x, fmt, every(FLOAT_OVERFLOWS), flush=flush, kind="numpy" if subnormals == "flushed" else "jax")


@pytest.mark.slow
@pytest.mark.parametrize("text", cases.P3109)
def test_every_pattern_of_p3109(text):
    fmt = cases.P3109[text]
    x = carried(cases.all_patterns("bfloat16"), fmt)
    check(x, fmt, once(FLOAT_OVERFLOWS, text), kind="numpy")


NAN, INF = float("nan"), float("inf")


UNSIGNED = [
    ("float8_e8m0fnu", 2.0**-127, True),
    ("e4m3(signed=false)", 0.0, True),
    ("binary8p3ue", 0.0, True),
    ("binary8p3uf", 0.0, True),
    ("binary8p1uf", 0.0, True),
    ("e4m3(signed=false,infinities=false,nans=none)", 0.0, False),
    ("ufixed8.0", 0.0, False),
]


@pytest.mark.parametrize(
    ("text", "smallest", "has_nan", "kind"),
    [(*row, kind) for kind in ("numpy", "jax") for row in UNSIGNED],
)
@pytest.mark.slow
def test_unsigned_formats_below_zero(text, smallest, has_nan, kind):
    """A mode that points to a value takes it; NaN is what the others give under IEEE, and no other rule does."""
    x = np.array([-INF, -3.0e38, -1.0], np.float32)
    for mode, overflow in itertools.product((*DETERMINISTIC, "stochastic_equal"), FLOAT_OVERFLOWS):
        none = has_nan and overflow == "ieee" and mode not in ("up", "toward_zero", "odd")
        key = jax.random.key(1) if mode.startswith("stochastic") else None
        given = x if kind == "numpy" else jax.numpy.asarray(x)
        got = np.asarray(jc.round_to_format(given, jc.Spec(text, rounding=mode, overflow=overflow), key))
        np.testing.assert_array_equal(got, [NAN if none else smallest] * 3, f"{text}:{mode}:{overflow}")
        assert not np.signbit(got[~np.isnan(got)]).any()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["e4m3(signed=false)", "binary8p3uf"])
def test_what_rounds_to_zero_from_below_is_zero_in_an_unsigned_format(text):
    x = np.array([-1e-30, -0.0], np.float32)
    for mode in ("nearest_even", "nearest_away", "nearest_zero", "up", "toward_zero", "odd"):
        np.testing.assert_array_equal(jc.round_to_format(x, f"{text}:{mode}"), [0, 0], mode)
    np.testing.assert_array_equal(jc.round_to_format(x, f"{text}:down"), [NAN, 0])


@pytest.mark.in_turn(15)
@pytest.mark.parametrize(
    ("text", "overflow", "beyond", "infinite"),
    [
        ("binary8p3sf", "ieee", "largest", "largest"),
        ("binary8p3sf", "propagate", "largest", "largest"),
        ("binary8p3sf", "saturate", "largest", "largest"),
        ("binary8p3se", "ieee", "inf", "inf"),
        ("binary8p3se", "propagate", "largest", "inf"),
        ("binary8p3se", "saturate", "largest", "largest"),
        ("binary8p4uf", "ieee", "largest", "largest"),
        ("binary8p4uf", "propagate", "largest", "largest"),
        ("binary8p4ue", "ieee", "inf", "inf"),
        ("binary8p4ue", "propagate", "largest", "inf"),
        ("float8_e4m3fn", "ieee", "nan", "nan"),  # OCP's, for comparison
        ("float8_e4m3fn", "propagate", "largest", "nan"),
    ],
)
def test_overflow_of_p3109(text, overflow, beyond, infinite):
    fmt = jc.formats.parse_format(text)
    assert isinstance(fmt, jc.FloatFormat)
    values = {"largest": float(fmt.max), "inf": INF, "nan": NAN}
    x = np.array([3.0e38, INF, -3.0e38, -INF] if fmt.signed else [3.0e38, INF], np.float32)
    for mode in DETERMINISTIC:
        inward = mode == "toward_zero" or (mode == "odd" and not text.startswith("binary"))
        signs = [(1, mode == "down")] + [(-1, mode == "up")] * fmt.signed
        expected = []
        for sign, directed in signs:
            expected += [sign * values["largest" if inward or directed else beyond], sign * values[infinite]]
        got = jc.round_to_format(x, jc.Spec(text, rounding=mode, overflow=overflow))
        np.testing.assert_array_equal(got, expected, f"{text}:{mode}:{overflow}")


def test_p3109_is_said_by_a_field_and_not_by_a_name():
    fmt = jc.p3109(8, 3, extended=False)
    assert fmt != jc.float8_e5m2fnuz and dataclasses.replace(fmt, p3109=False) == jc.float8_e5m2fnuz
    assert jc.formats.parse_format(fmt.text) == fmt
    x = np.array([1e9, -np.inf])
    np.testing.assert_array_equal(jc.round_to_format(x, fmt.text), [49152.0 * 7 / 6, -49152.0 * 7 / 6])
    assert np.isnan(jc.round_to_format(x, "float8_e5m2fnuz")).all()
    with pytest.raises(ValueError, match="p3109=True needs nans='negative_zero'"):
        jc.FloatFormat(4, 3, p3109=True)


def test_ties_of_one_bit_of_precision_take_the_even_code():
    """Between 2^k and 2^(k + 1) lies 1.5 2^k; the exponent's parity is not that of the code, which counts the bias."""
    for text in ("float8_e8m0fnu", "binary8p1ue", "binary8p1se"):
        fmt = jc.formats.parse_format(text)
        assert isinstance(fmt, jc.FloatFormat)
        low = 2.0 ** np.arange(-6, 6)
        got = np.asarray(jc.round_to_format(1.5 * low, fmt))
        assert (fmt.encode(got) % 2 == 0).all()
        assert set(got / low) == {1.0, 2.0}


@pytest.mark.slow
@pytest.mark.smoke
def test_zero_in_a_format_without_one_is_its_smallest_value():
    for mode in DETERMINISTIC:
        got = jc.round_to_format(np.array([0.0, -0.0], np.float32), f"float8_e8m0fnu:{mode}")
        np.testing.assert_array_equal(got, [2.0**-127] * 2, mode)


def fixed_overflows(fmt: oracle.FixedSet) -> tuple[str, ...]:
    """A symmetric format drops one code of the two's complement ring, so what wraps is not defined."""
    return FLOAT_OVERFLOWS if fmt.symmetric else FIXED_OVERFLOWS


@pytest.mark.slow
@pytest.mark.parametrize(("text", "carrier"), list(itertools.product(cases.FIXED, ["float16", "bfloat16"])))
def test_every_pattern_of_fixed(carrier, text):
    fmt = cases.FIXED[text]
    x = carried(cases.all_patterns(carrier), fmt)
    check(x, fmt, once(fixed_overflows(fmt), carrier + text), kind="numpy" if carrier == "float16" else "jax")


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("text", SMALL)
@pytest.mark.parametrize("carrier", ["float16", "bfloat16"])
def test_carriers_that_cannot_hold_a_format_are_refused(carrier, text):
    fmt, x = SMALL[text], cases.all_patterns(carrier)[:8]
    if oracle.held(fmt, CARRIERS[carrier]):
        assert round_as("numpy", x, jc.Spec(build(fmt))).dtype == x.dtype
    else:
        with pytest.raises(ValueError, match="float32"):
            jc.round_to_format(x, jc.Spec(build(fmt), overflow="saturate"))


# --- adversarial values of the wide carriers ----------------------------------------------------------------------

FLOAT32 = SMALL | {t: f for t, f in cases.WIDE.items() if oracle.held(f, CARRIERS["float32"])}
FLOAT64 = SMALL | cases.WIDE | cases.DOUBLE
WIDE_CASES = [("float32", t) for t in FLOAT32] + [("float64", t) for t in FLOAT64]


def hard_values(fmt: Any, carrier: str, text: str, n: int) -> np.ndarray:
    return cases.adversarial(fmt, carrier, n, np.random.default_rng(sum(map(ord, carrier + text))))


@pytest.mark.in_turn(27)
@pytest.mark.parametrize(("carrier", "text"), WIDE_CASES[::4])  # all of them below, in the slow run
def test_adversarial_values(carrier, text):
    subnormals = SUBNORMALS[sum(map(ord, text)) % 3] if FLOAT64[text].zero else "kept"
    fmt, flush = variant(FLOAT64[text], subnormals)
    x = hard_values(fmt, carrier, text, 40_000)
    kind = "jax" if carrier == "float32" else "numpy"
    check(x, fmt, once(FLOAT_OVERFLOWS, carrier + text), flush=flush, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("carrier", "text", "subnormals"),
    [(c, t, s) for c, t in WIDE_CASES for s in SUBNORMALS if FLOAT64[t].zero or s == "kept"],
)
def test_many_adversarial_values(carrier, text, subnormals):
    fmt, flush = variant(FLOAT64[text], subnormals)
    x = hard_values(fmt, carrier, text, 200_000)
    # Over the three treatments of subnormals each mode meets each overflow rule.
    settings = once(FLOAT_OVERFLOWS, text, SUBNORMALS.index(subnormals)) if fmt.zero else every(FLOAT_OVERFLOWS)
    check(x, fmt, settings, flush=flush, kind="jax" if carrier == "float32" else "numpy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("carrier", "text"), list(zip(itertools.cycle(["float32", "float64"]), cases.FIXED, strict=False))
)
def test_adversarial_values_of_fixed(carrier, text):
    fmt = cases.FIXED[text]
    x = hard_values(fmt, carrier, text, 20_000)
    check(x, fmt, once(fixed_overflows(fmt), carrier + text), kind="jax" if carrier == "float32" else "numpy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("carrier", "text"), list(zip(itertools.cycle(["float64", "float32"]), cases.FIXED, strict=False))
)
def test_many_adversarial_values_of_fixed(carrier, text):
    fmt = cases.FIXED[text]
    check(hard_values(fmt, carrier, text, 200_000), fmt, every(fixed_overflows(fmt)), kind="numpy")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["float8_e4m3fn", "bfloat16", "binary32", "binary64"])
def test_jax_float64(text):
    fmt = FLOAT64[text]
    x = hard_values(fmt, "float64", text, 20_000)
    with jax.enable_x64(True):
        check(x, fmt, once(FLOAT_OVERFLOWS, text), kind="jax")


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["float16", "bfloat16", "float32"])
def test_numpy_equals_jax(carrier):
    fmt = cases.NAMED["float8_e5m2fnuz"]
    x = hard_values(fmt, carrier, "", 5_000)
    for mode in DETERMINISTIC:
        spec = jc.Spec(build(fmt), rounding=mode)
        cases.assert_bits(x, round_as("numpy", x, spec), cases.bits(round_as("jax", x, spec)), mode)


# --- codebooks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "carrier"), list(itertools.product(cases.CODEBOOKS, CARRIERS)))
def test_codebooks(name, carrier):
    levels = cases.CODEBOOKS[name]
    fmt, c = oracle.codebook(levels), CARRIERS[carrier]
    if not oracle.held(fmt, c):
        with pytest.raises(ValueError, match="float32"):
            jc.round_to_format(np.zeros(3, cases.DTYPES[carrier]), jc.Spec(jc.CodebookFormat(levels)))
        return
    x = cases.adversarial(fmt, carrier, 200, np.random.default_rng(len(levels)))
    exact = [oracle.from_bits(int(p), c) for p in cases.bits(x)]
    for mode in DETERMINISTIC:
        expected = np.array([oracle.to_bits(oracle.round_exact(fmt, v, mode), c) for v in exact], c.words)
        got = round_as("numpy", x, jc.Spec(jc.CodebookFormat(levels), rounding=mode))
        cases.assert_bits(x, got, expected, f"{name} {mode}")


# --- the conformance file -----------------------------------------------------------------------------------------

CONFORMANCE = json.loads((DATA / "exact_cases.json").read_text())
#: Cases of scaled formats ("mx") are those of tests/test_round_scaled_peers.py.
PLAIN = [case for case in CONFORMANCE if "mx" not in case["spec"]]
ROUNDED = [case for case in PLAIN if "round" in case["spec"]]
SETS = [case for case in PLAIN if "property" in case["spec"]]


def float32_of(words: list[str]) -> np.ndarray:
    return np.array([int(w, 16) for w in words], np.uint32).view(np.float32)


def spec_of(case: dict[str, Any]) -> jc.Spec:
    """The spec a case of the file asks for."""
    given = case["spec"]
    if "fixed" in given:
        word, fraction = given["fixed"]
        fmt = jc.FixedFormat(word - fraction, fraction, symmetric=given.get("symmetric", False))
        return jc.Spec(fmt, rounding=given["round"], overflow="saturate" if given["clamp"] else "wrap")
    overflow = {"inf": "ieee", "sat": "saturate"}[given["overflow"]]
    return jc.Spec(given["fmt"], rounding=given["round"], overflow=overflow)


def test_the_conformance_file_is_covered():
    assert len(ROUNDED) + len(SETS) == len(PLAIN) == 40
    assert {case["spec"]["round"] for case in ROUNDED} == {"rne", "rna"}


@pytest.mark.in_turn(16)
@pytest.mark.parametrize("kind", ["jax", "numpy"])
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case["id"])
def test_conformance(case, kind):
    x, spec = float32_of(case["input"]), spec_of(case)
    expected = float32_of(case["expected"])
    cases.assert_bits(x, round_as(kind, x, spec), cases.bits(expected), case["id"])


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("case", SETS, ids=lambda case: case["id"])
def test_conformance_value_sets(case):
    name, bias = case["spec"]["fmt"].split()[0], int(case["spec"]["fmt"].split()[-1])
    fmt = jc.FloatFormat(int(name[1]), int(name[3]), bias=bias, infinities=False, nans="none")
    expected = np.unique(float32_of(case["expected"]))
    np.testing.assert_array_equal(fmt.values(), expected)
    x = np.arange(-30, 30, 0.01, dtype=np.float32)
    np.testing.assert_array_equal(np.unique(np.asarray(jc.round_to_format(x, fmt))), expected)
