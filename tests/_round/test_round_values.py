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
from each_case import each
from further import Further
from oracle import CARRIERS, DETERMINISTIC

import jchop as jc
from jchop._common import bit_ops
from jchop._core.rounding.elements import round_to_spec

further = Further()

DATA = pathlib.Path(__file__).parents[1] / "data"

#: Formats of at most 16 bits. e5m10, e8m7 and e4m3 are left out here because they are named formats
#: (test_formats_are_the_documented_sets).
SMALL = cases.NAMED | {t: f for t, f in cases.CUSTOM.items() if t not in ("e5m10", "e8m7", "e4m3")}
SUBNORMALS = ("kept", "absent", "flushed")
#: Each format with each way to treat subnormals; without a zero there is nothing to flush to, and no subnormals.
TREATED = [(t, s) for t, f in SMALL.items() for s in SUBNORMALS if f.zero or s == "kept"]


def build(fmt: oracle.Set) -> Any:
    """The package's format with the oracle's parameters."""
    if isinstance(fmt, oracle.FloatSet):
        return jc.formats.FloatFormat(
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
    return jc.formats.FixedFormat(fmt.bits - fmt.f, fmt.f, fmt.signed, fmt.symmetric)


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


SIZES = (2048, 1 << 16)  # of what JAX compiles its operations for


def by_itself(x: np.ndarray, spec: jc.Spec, word: np.ndarray | None = None) -> np.ndarray:
    """The body of every implementation, operation by operation: no program is compiled for a spec, and few in all."""
    carrier, size = bit_ops.CARRIERS[x.dtype.name], next(size for size in SIZES if size >= len(x))
    with bit_ops.enable_x64_for(carrier.name):
        words = None if word is None else jnp.asarray(np.resize(word, size))
        return np.asarray(round_to_spec(jnp.asarray(np.resize(x, size)), spec, carrier, words))[: len(x)]


def check(
    x: np.ndarray,
    fmt: oracle.FloatSet | oracle.FixedSet,
    settings: list[tuple[str, str]],
    *,
    flush: bool = False,
    kind: str = "",
) -> None:
    """Compares the package with the oracle for each (mode, overflow rule).

    By default the body alone; as a `kind` "numpy" or "jax", one program for all settings, or one call for each.
    """
    exact, theirs = cases.batch(x), build(fmt)
    specs = [jc.Spec(theirs, rounding=mode, overflow=overflow, flush=flush) for mode, overflow in settings]
    if kind == "jax":
        results = jax.jit(lambda x: [jc.round_to_format(x, spec) for spec in specs])(x)
    elif kind == "numpy":
        results = [round_as(kind, x, spec) for spec in specs]
    else:
        results = [by_itself(x, spec) for spec in specs]
    for (mode, overflow), got in zip(settings, results, strict=True):
        what = f"{fmt} {mode} {overflow} flush={flush} on {x.dtype.name}"
        cases.assert_bits(x, np.asarray(got), exact.round(fmt, mode, overflow, flush), what)


def every(overflows: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(itertools.product(DETERMINISTIC, overflows))


def once(overflows: tuple[str, ...], seed: str, turn: int = 0) -> list[tuple[str, str]]:
    """Every mode once, the overflow rules taking turns, from a start that depends on the case."""
    start = sum(map(ord, seed)) + turn
    return [(mode, overflows[(start + k) % len(overflows)]) for k, mode in enumerate(DETERMINISTIC)]


DOCUMENTED = cases.NAMED | cases.CUSTOM | cases.P3109 | cases.WIDE | cases.DOUBLE | cases.FIXED


@each("text", DOCUMENTED)
def test_formats_are_the_documented_sets(text):
    fmt = jc.Spec(text).format
    assert oracle.describe(fmt) == DOCUMENTED[text]
    if fmt.bits <= 8:  # of wider ones tests/formats/test_float.py compares the values
        assert [Fraction(v) for v in fmt.values().tolist()] == oracle.values(DOCUMENTED[text])


@further.first
def texts_of_named_formats_are_the_names():
    for text, name in (("e5m10", "binary16"), ("e8m7", "bfloat16"), ("e4m3", "float8_e4m3")):
        assert jc.formats.parse_format(text) == jc.formats.parse_format(name) == jc.formats.CATALOGUE[name]


# --- every pattern of the 16-bit carriers -------------------------------------------------------------------------

#: Each way to treat subnormals on each carrier; by default with an odd step between the patterns.
PATTERNS = [("float16", "kept", 37), *((*pair, 1) for pair in itertools.product(["float16", "bfloat16"], SUBNORMALS))]


@further
@pytest.mark.parametrize(
    ("carrier", "subnormals", "step"),
    [pytest.param(*row, marks=pytest.mark.slow if row[2] == 1 else ()) for row in PATTERNS],
)
def every_pattern_and_overflow(carrier, subnormals, step):
    for text in [t for t, s in TREATED if s == subnormals]:
        fmt, flush = variant(SMALL[text], subnormals)
        x = carried(cases.all_patterns(carrier), fmt)[::step]
        check(x, fmt, every(FLOAT_OVERFLOWS) if step == 1 else once(FLOAT_OVERFLOWS, text), flush=flush)


def test_every_pattern_of_p3109():
    for text, fmt in cases.P3109.items():
        check(carried(cases.all_patterns("bfloat16"), fmt)[::37], fmt, once(FLOAT_OVERFLOWS, text))


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


@each(("text", "smallest", "has_nan"), UNSIGNED)
def test_unsigned_formats_below_zero(text, smallest, has_nan):
    """A mode that points to a value takes it; NaN is what the others give under IEEE, and no other rule does."""
    x = np.array([-INF, -3.0e38, -1.0], np.float32)
    for mode, overflow in itertools.product((*DETERMINISTIC, "stochastic_equal"), FLOAT_OVERFLOWS):
        none = has_nan and overflow == "ieee" and mode not in ("up", "toward_zero", "odd")
        word = np.full(3, 1 << 31, np.uint32) if mode.startswith("stochastic") else None
        got = by_itself(x, jc.Spec(text, rounding=mode, overflow=overflow), word)
        np.testing.assert_array_equal(got, [NAN if none else smallest] * 3, f"{text}:{mode}:{overflow}")
        assert not np.signbit(got[~np.isnan(got)]).any()


@each("text", ["e4m3(signed=false)", "binary8p3uf"])
def test_what_rounds_to_zero_from_below_is_zero_in_an_unsigned_format(text):
    x = np.array([-1e-30, -0.0], np.float32)
    for mode in ("nearest_even", "nearest_away", "nearest_zero", "up", "toward_zero", "odd"):
        np.testing.assert_array_equal(by_itself(x, jc.Spec(f"{text}:{mode}")), [0, 0], mode)
    np.testing.assert_array_equal(by_itself(x, jc.Spec(f"{text}:down")), [NAN, 0])


@each(
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
    assert isinstance(fmt, jc.formats.FloatFormat)
    values = {"largest": float(fmt.max), "inf": INF, "nan": NAN}
    x = np.array([3.0e38, INF, -3.0e38, -INF] if fmt.signed else [3.0e38, INF], np.float32)
    for mode in DETERMINISTIC:
        inward = mode == "toward_zero" or (mode == "odd" and not text.startswith("binary"))
        signs = [(1, mode == "down")] + [(-1, mode == "up")] * fmt.signed
        expected = []
        for sign, directed in signs:
            expected += [sign * values["largest" if inward or directed else beyond], sign * values[infinite]]
        got = by_itself(x, jc.Spec(text, rounding=mode, overflow=overflow))
        np.testing.assert_array_equal(got, expected, f"{text}:{mode}:{overflow}")


def test_p3109_is_said_by_a_field_and_not_by_a_name():
    fmt = jc.formats.p3109(8, 3, extended=False)
    assert fmt != jc.formats.float8_e5m2fnuz and dataclasses.replace(fmt, p3109=False) == jc.formats.float8_e5m2fnuz
    assert jc.formats.parse_format(fmt.text) == fmt
    x = np.array([1e9, -np.inf])
    np.testing.assert_array_equal(jc.round_to_format(x, fmt.text), [49152.0 * 7 / 6, -49152.0 * 7 / 6])
    assert np.isnan(jc.round_to_format(x, "float8_e5m2fnuz")).all()
    with pytest.raises(ValueError, match="p3109=True needs nans='negative_zero'"):
        jc.formats.FloatFormat(4, 3, p3109=True)


def test_ties_of_one_bit_of_precision_take_the_even_code():
    """Between 2^k and 2^(k + 1) lies 1.5 2^k; the exponent's parity is not that of the code, which counts the bias."""
    for text in ("float8_e8m0fnu", "binary8p1ue", "binary8p1se"):
        fmt = jc.formats.parse_format(text)
        assert isinstance(fmt, jc.formats.FloatFormat)
        low = 2.0 ** np.arange(-6, 6)
        got = np.asarray(jc.round_to_format(1.5 * low, fmt))
        assert (fmt.encode(got) % 2 == 0).all()
        assert set(got / low) == {1.0, 2.0}


@pytest.mark.smoke
def test_zero_in_a_format_without_one_is_its_smallest_value():
    for mode in DETERMINISTIC:
        got = by_itself(np.array([0.0, -0.0], np.float32), jc.Spec(f"float8_e8m0fnu:{mode}"))
        np.testing.assert_array_equal(got, [2.0**-127] * 2, mode)


def fixed_overflows(fmt: oracle.FixedSet) -> tuple[str, ...]:
    """A symmetric format drops one code of the two's complement ring, so what wraps is not defined."""
    return FLOAT_OVERFLOWS if fmt.symmetric else FIXED_OVERFLOWS


@pytest.mark.parametrize(
    ("carrier", "step"),
    [("bfloat16", 37), *(pytest.param(carrier, 1, marks=pytest.mark.slow) for carrier in ("float16", "bfloat16"))],
)
def test_every_pattern_of_fixed(carrier, step):
    for text, fmt in cases.FIXED.items():
        x, rules = carried(cases.all_patterns(carrier), fmt)[::step], fixed_overflows(fmt)
        check(x, fmt, every(rules) if step == 1 else once(rules, text))


@each("carrier", ["float16", "bfloat16"])
def test_carriers_that_cannot_hold_a_format_are_refused(carrier):
    x = jax.ShapeDtypeStruct((8,), cases.DTYPES[carrier])
    for text, fmt in SMALL.items():
        spec = jc.Spec(build(fmt), overflow="saturate")
        if oracle.held(fmt, CARRIERS[carrier]):
            assert jax.eval_shape(lambda x, spec=spec: jc.round_to_format(x, spec), x).dtype == x.dtype, text
        else:
            with pytest.raises(ValueError, match="float32"):
                jax.eval_shape(lambda x, spec=spec: jc.round_to_format(x, spec), x)


# --- adversarial values of the wide carriers ----------------------------------------------------------------------

FLOAT32 = SMALL | {t: f for t, f in cases.WIDE.items() if oracle.held(f, CARRIERS["float32"])}
FLOAT64 = SMALL | cases.WIDE | cases.DOUBLE


def hard_values(fmt: Any, carrier: str, text: str, n: int) -> np.ndarray:
    return cases.adversarial(fmt, carrier, n, np.random.default_rng(sum(map(ord, carrier + text))))


@pytest.mark.parametrize(
    ("carrier", "subnormals", "n"),
    [
        ("float32", "kept", 1_000),
        *(
            pytest.param(*pair, 40_000, marks=pytest.mark.slow)
            for pair in itertools.product(["float32", "float64"], SUBNORMALS)
        ),
    ],
)
def test_adversarial_values(carrier, subnormals, n):
    for text, plain in (FLOAT32 if carrier == "float32" else FLOAT64).items():
        if plain.zero or subnormals == "kept":
            fmt, flush = variant(plain, subnormals)
            settings = every(FLOAT_OVERFLOWS) if n > 1_000 else once(FLOAT_OVERFLOWS, text)
            check(hard_values(fmt, carrier, text, n), fmt, settings, flush=flush)


@pytest.mark.parametrize(
    ("carrier", "n"),
    [
        ("float32", 1_000),
        *(pytest.param(carrier, 40_000, marks=pytest.mark.slow) for carrier in ("float32", "float64")),
    ],
)
def test_adversarial_values_of_fixed(carrier, n):
    for text, fmt in cases.FIXED.items():
        settings = every(fixed_overflows(fmt)) if n > 1_000 else once(fixed_overflows(fmt), text)
        check(hard_values(fmt, carrier, text, n), fmt, settings)


# --- as compiled programs -----------------------------------------------------------------------------------------

#: A format for each kind of grid that a program is made of.
KINDS = {
    "float8_e4m3fn": ("kept", "flushed"),
    "float8_e5m2": ("kept",),
    "float8_e4m3": ("absent",),
    "float8_e8m0fnu": ("kept",),
    "bfloat16": ("kept", "flushed"),
    "binary16": ("kept",),
    "float4_e2m1fn": ("kept",),
    "binary8p1ue": ("kept",),
    "binary8p3se": ("kept",),
    "float8_e5m2fnuz": ("kept",),
    "binary32": ("kept",),
    "binary64": ("kept",),
    "fixed4.4": ("kept",),
    "uinteger4": ("kept",),
}
PROGRAMS = [
    (carrier, text, subnormals)
    for text, treated in KINDS.items()
    for subnormals in treated
    for carrier in CARRIERS
    if oracle.held(DOCUMENTED[text], CARRIERS[carrier])
]


@further
@pytest.mark.in_turn(60)
@pytest.mark.parametrize(("carrier", "text", "subnormals"), PROGRAMS)
def programs(carrier, text, subnormals):
    """Every mode in one program of JAX, and some as NumPy's calls; the overflow rules take turns."""
    fmt, flush, overflows = DOCUMENTED[text], False, FIXED_OVERFLOWS
    if isinstance(fmt, oracle.FloatSet):
        (fmt, flush), overflows = variant(fmt, subnormals), FLOAT_OVERFLOWS
    x, settings = hard_values(fmt, carrier, text, 20_000), once(overflows, carrier + text)
    with jax.enable_x64(carrier == "float64"):
        check(x, fmt, settings, flush=flush, kind="jax")
    check(x, fmt, settings[len(text) % 5 :][:1], flush=flush, kind="numpy")


# --- codebooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        pytest.param(
            name, carrier, marks=() if name in ("uneven", "signs") and carrier == "float32" else pytest.mark.slow
        )
        for name, carrier in itertools.product(cases.CODEBOOKS, CARRIERS)
    ],
)
def test_codebooks(name, carrier):
    levels = cases.CODEBOOKS[name]
    fmt, c = oracle.codebook(levels), CARRIERS[carrier]
    if not oracle.held(fmt, c):
        with pytest.raises(ValueError, match="float32"):
            jc.round_to_format(np.zeros(3, cases.DTYPES[carrier]), jc.Spec(jc.formats.CodebookFormat(levels)))
        return
    x = cases.adversarial(fmt, carrier, 200, np.random.default_rng(len(levels)))
    exact = [oracle.from_bits(int(p), c) for p in cases.bits(x)]
    specs = [jc.Spec(jc.formats.CodebookFormat(levels), rounding=mode) for mode in DETERMINISTIC]
    with jax.enable_x64(carrier == "float64"):
        results = jax.jit(lambda x: [jc.round_to_format(x, spec) for spec in specs])(x)
    for mode, got in zip(DETERMINISTIC, results, strict=True):
        expected = np.array([oracle.to_bits(oracle.round_exact(fmt, v, mode), c) for v in exact], c.words)
        cases.assert_bits(x, np.asarray(got), expected, f"{name} {mode}")


# --- the conformance file -----------------------------------------------------------------------------------------

CONFORMANCE = json.loads((DATA / "exact_cases.json").read_text())
#: Cases of scaled formats ("mx") are those of tests/_round/test_round_scaled_peers.py.
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
        fmt = jc.formats.FixedFormat(word - fraction, fraction, symmetric=given.get("symmetric", False))
        return jc.Spec(fmt, rounding=given["round"], overflow="saturate" if given["clamp"] else "wrap")
    overflow = {"inf": "ieee", "sat": "saturate"}[given["overflow"]]
    return jc.Spec(given["fmt"], rounding=given["round"], overflow=overflow)


def test_the_conformance_file_is_covered():
    assert len(ROUNDED) + len(SETS) == len(PLAIN) == 40
    assert {case["spec"]["round"] for case in ROUNDED} == {"rne", "rna"}


def test_conformance():
    for case in ROUNDED:
        x, expected = float32_of(case["input"]), float32_of(case["expected"])
        cases.assert_bits(x, by_itself(x, spec_of(case)), cases.bits(expected), case["id"])


def test_conformance_value_sets():
    x = np.arange(-30, 30, 0.01, dtype=np.float32)
    for case in SETS:
        name, bias = case["spec"]["fmt"].split()[0], int(case["spec"]["fmt"].split()[-1])
        fmt = jc.formats.FloatFormat(int(name[1]), int(name[3]), bias=bias, infinities=False, nans="none")
        expected = np.unique(float32_of(case["expected"]))
        np.testing.assert_array_equal(fmt.values(), expected, case["id"])
        np.testing.assert_array_equal(np.unique(by_itself(x, jc.Spec(fmt))), expected, case["id"])


test_further = further.test()
