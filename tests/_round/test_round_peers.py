"""Agreement with gfloat and ml_dtypes, where they and the written rules define the same thing."""

from __future__ import annotations

import cases
import gfloat
import gfloat.formats as gf
import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from _round.test_round_values import SIZES, by_itself
from further import Further
from gfloat.types import Domain, Signedness
from oracle import CARRIERS

import jchop as jc

further = Further()

MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
    "toward_zero": gfloat.RoundMode.TowardZero,
}
DRAWN = {
    "stochastic": gfloat.RoundMode.StochasticFastest,
    "stochastic_b": gfloat.RoundMode.StochasticFast,
    "stochastic_c": gfloat.RoundMode.Stochastic,
}

#: gfloat's own formats of up to 16 bits, and ours.
NAMED = {
    "binary16": gf.format_info_binary16,
    "bfloat16": gf.format_info_bfloat16,
    "float8_e5m2": gf.format_info_ocp_e5m2,
    "float8_e4m3fn": gf.format_info_ocp_e4m3,
    "float6_e2m3fn": gf.format_info_ocp_e2m3,
    "float6_e3m2fn": gf.format_info_ocp_e3m2,
    "float4_e2m1fn": gf.format_info_ocp_e2m1,
    "float8_e8m0fnu": gf.format_info_ocp_e8m0,
    "fixed2.6": gf.format_info_ocp_int8,
}


def p3109(k: int, p: int, signed: bool, extended: bool) -> tuple[str, gfloat.FormatInfo]:
    signedness = Signedness.Signed if signed else Signedness.Unsigned
    info = gf.format_info_p3109(k, p, signedness, Domain.Extended if extended else Domain.Finite)
    return f"binary{k}p{p}{'s' if signed else 'u'}{'e' if extended else 'f'}", info


#: Every P3109 format of 3 to 16 bits that float64 holds: at most 11 exponent bits, and unsigned 11 reach 2^1024.
P3109 = dict(
    p3109(k, p, signed, extended)
    for k in range(3, 17)
    for signed in (True, False)
    for p in range(1, k + (not signed))
    for extended in (True, False)
    if k - p + (not signed) <= 10
)
SAMPLED = NAMED | {
    name: info for name, info in P3109.items() if info.k in (3, 8) or name in ("binary16p11se", "binary16p8uf")
}


def comparable(x: np.ndarray, info: gfloat.FormatInfo) -> np.ndarray:
    """The inputs for which gfloat defines a result.

    It raises on NaN for a format without NaN, does not say what a negative number becomes in an unsigned format, and
    goes on below the smallest value of a format without zero.
    """
    keep = np.ones(len(x), bool)
    if info.num_nans == 0:
        keep &= ~np.isnan(x)
    if not info.is_signed:
        keep &= ~np.signbit(x)
    if not info.has_zero:
        keep &= ~(x < info.smallest)
    return x[keep]


def inputs(name: str, info: gfloat.FormatInfo, n: int) -> np.ndarray:
    """Hard values of the format, from float32 where that holds the format, else from float64."""
    fmt = oracle.describe(jc.formats.parse_format(name))
    carrier = "float32" if oracle.held(fmt, CARRIERS["float32"]) else "float64"
    x = cases.adversarial(fmt, carrier, n, np.random.default_rng(n + sum(map(ord, name))))
    x = comparable(x, info)
    return np.resize(x, n)  # one shape for all, so that each spec is compiled once


def with_gfloat(info: gfloat.FormatInfo, x: np.ndarray, mode: gfloat.RoundMode, saturate: bool, **draw) -> np.ndarray:
    with np.errstate(all="ignore"):
        out = gfloat.round_ndarray(info, x.astype(np.float64), mode, saturate, **draw)
        return out.astype(x.dtype)


EVERY = [(mode, overflow) for mode in MODES for overflow in ("ieee", "saturate")]


def check_with_gfloat(name: str, info: gfloat.FormatInfo, settings: list[tuple[str, str]], n: int) -> None:
    x = inputs(name, info, n)
    for mode, overflow in settings:
        # gfloat raises without NaN; a finite format of P3109 overflows to its largest value, which gfloat has not yet.
        finite = info.domain == Domain.Finite and (info.num_nans == 0 or name in P3109)
        saturate = overflow == "saturate" or finite
        got = by_itself(x, jc.Spec(name, rounding=mode, overflow=overflow))
        expected = with_gfloat(info, x, MODES[mode], saturate)
        cases.assert_bits(x, got, cases.bits(expected), f"{name} {mode} {overflow}")


def some(name: str) -> list[tuple[str, str]]:
    """Three of the ten settings, others for other formats."""
    start = sum(map(ord, name))
    return [EVERY[(start + step) % len(EVERY)] for step in (0, 3, 6)]


#: gfloat's own formats, and P3109's by width; by default those of 3 bits, and of gfloat's those of 4 and 6.
GROUPS = {
    "few bits": [
        *(name for name in NAMED if name[:6] in ("float4", "float6")),
        *(n for n, i in P3109.items() if i.k == 3),
    ],
    "named": list(NAMED),
} | {f"{k} bits": [name for name, info in P3109.items() if info.k == k] for k in range(4, 17)}


@further
@pytest.mark.parametrize(
    "group", [next(iter(GROUPS)), *(pytest.param(g, marks=pytest.mark.slow) for g in list(GROUPS)[1:])]
)
def gfloat_too(group):
    for name in GROUPS[group]:
        settings, n = (EVERY, 20_000) if name in NAMED else (some(name), 8_000)
        check_with_gfloat(name, (NAMED | P3109)[name], settings, 1_500 if group == "few bits" else n)


def check_draws_with_gfloat(name: str, info: gfloat.FormatInfo, n: int, size: int) -> None:
    x, key = inputs(name, info, size), jax.random.key(n)
    words = np.asarray(jc.random_bits(key, x.shape, width=32))
    r = (words >> np.uint32(32 - n)).astype(np.int64)
    for mode, theirs in DRAWN.items():
        spec = jc.Spec(name, rounding=mode, overflow="saturate", random_bits=n)
        got = by_itself(x, spec, words)
        expected = with_gfloat(info, x, theirs, True, srbits=r, srnumbits=n)
        cases.assert_bits(x, got, cases.bits(expected), f"{name} {mode} {n} bits")


DRAWS = [("float8_e4m3fn", (1, 3, 8)), ("float8_e5m2", (2,)), ("binary8p3se", (4,)), ("binary8p1se", (5,)),
         ("fixed2.6", (3,)), ("bfloat16", (7,))]  # fmt: skip
#: float64: gfloat's sum rounds.
ALL_DRAWS = [(name, (1, 5) if len(name) % 2 else (2, 10)) for name in SAMPLED if name != "binary16p8uf"]


@pytest.mark.parametrize(
    ("rows", "size"),
    [(DRAWS, 1_500), *(pytest.param(ALL_DRAWS[k::4], 20_000, marks=pytest.mark.slow) for k in range(4))],
    ids=["few", *(f"part {k}" for k in range(4))],
)
def test_gfloat_given_the_draws(rows, size):
    for name, numbers in rows:
        for n in numbers:
            check_draws_with_gfloat(name, (NAMED | P3109)[name], n, size)


ML_DTYPES = [
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float6_e3m2fn",
    "float6_e2m3fn",
    "float4_e2m1fn",
]


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ml_dtypes(wide):
    for name in (*ML_DTYPES, "binary16"):
        if (jc.formats.CATALOGUE[name].bits > 8) == wide:
            check_with_ml_dtypes(name)


def check_with_ml_dtypes(name: str) -> None:
    """Every value, every middle between neighbours, their float32 neighbours, and hard values, to nearest even."""
    theirs = np.dtype(np.float16 if name == "binary16" else getattr(ml_dtypes, name))
    codes = np.arange(2 ** min(8 * theirs.itemsize, jc.formats.CATALOGUE[name].bits))
    with np.errstate(all="ignore"):
        values = codes.astype(f"uint{8 * theirs.itemsize}").view(theirs).astype(np.float32)
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    assert len(values) == len(oracle.values(cases.NAMED[name]))
    exact = np.concatenate([values, (values[:-1] + values[1:]) / 2, [-0.0, 2 * values[-1], np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore"):
        middle = exact.astype(np.float32)
    assert (middle == exact)[np.isfinite(exact) & (np.abs(exact) < 2.0**128)].all()
    x = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    x = np.concatenate([x, cases.adversarial(cases.NAMED[name], "float32", 2_000, np.random.default_rng(1))])
    if name in ("float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn"):
        x = x[~np.isnan(x)]  # no NaN in the format: ours stays in the carrier, theirs is a number
    if name == "float8_e8m0fnu":
        # Theirs: zero becomes NaN, ties go up, and so does every float32 subnormal above the smallest value. Ours:
        # zero becomes the smallest value, ties take the even code, and subnormals are rounded like other numbers.
        x = x[(x == 2.0**-127) | (x >= 2.0**-126)]
        x = x[cases.batch(x).split(cases.E8M0).compared_with_half() != 0]
    with np.errstate(all="ignore"):
        expected = x.astype(theirs).astype(np.float32)
    parts = range(0, len(x), SIZES[-1])
    got = np.concatenate([by_itself(x[k : k + SIZES[-1]], jc.Spec(name)) for k in parts])
    cases.assert_bits(x, got, cases.bits(expected), name)


@further.first
def every_ml_dtypes_float_is_compared():
    """A new float of ml_dtypes with a name of ours is not forgotten."""
    named = [name for name in jc.formats.CATALOGUE if hasattr(ml_dtypes, name)]
    assert sorted(named) == sorted(ML_DTYPES)
    assert CARRIERS.keys() == cases.DTYPES.keys()


test_further = further.test()
