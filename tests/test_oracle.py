"""The oracle against facts written by hand, against gfloat, and its two implementations against each other."""

from __future__ import annotations

import itertools
from fractions import Fraction

import cases
import gfloat
import gfloat.formats as gf
import numpy as np
import oracle
import pytest
from each_case import each
from oracle import CARRIERS, Special, pow2, round_exact

# The table of facts, from the documents that define the formats:
# largest finite, smallest normal, smallest subnormal (None: there is none), infinity, NaN, -0, number of finite values
FACTS = {
    "binary16": (65504, -14, -24, True, True, True, 63487),
    "bfloat16": (2**127 * Fraction(2**8 - 1, 2**7), -126, -133, True, True, True, 65279),
    "float8_e5m2": (57344, -14, -16, True, True, True, 247),
    "float8_e4m3": (240, -6, -9, True, True, True, 239),
    "float8_e4m3fn": (448, -6, -9, False, True, True, 253),
    "float8_e5m2fnuz": (57344, -15, -17, False, True, False, 255),
    "float8_e4m3fnuz": (240, -7, -10, False, True, False, 255),
    "float8_e4m3b11fnuz": (30, -10, -13, False, True, False, 255),
    "float8_e3m4": (Fraction(31, 2), -2, -6, True, True, True, 223),
    "float8_e8m0fnu": (2**127, -127, None, False, True, False, 255),
    "float6_e3m2fn": (28, -2, -4, False, False, True, 63),
    "float6_e2m3fn": (Fraction(15, 2), 0, -3, False, False, True, 63),
    "float4_e2m1fn": (6, 0, -1, False, False, True, 15),
    # P3109 bias 2^(K-P-1) signed, 2^(K-P) unsigned; one NaN; one infinity a sign when extended
    "binary8p3se": (49152, -15, -17, True, True, False, 253),
    "binary8p4sf": (240, -7, -10, False, True, False, 255),
    "binary8p1se": (2**62, -63, None, True, True, False, 253),
    "binary8p1ue": (2**125, -127, None, True, True, False, 254),
    "binary8p4ue": (Fraction(13, 8) * 2**15, -15, -18, True, True, False, 254),
}


@each("name", FACTS)
def test_format_facts(name):
    fmt = {**cases.NAMED, **cases.P3109}[name]
    largest, normal, subnormal, inf, nan, negative_zero, count = FACTS[name]
    assert oracle.largest(fmt) == largest
    assert fmt.normal_exponent == normal
    smallest = fmt.value(1) if fmt.value(0) == 0 else fmt.value(0)
    assert smallest == pow2(normal if subnormal is None else subnormal)
    assert (fmt.inf, fmt.has_nan, fmt.negative_zero) == (inf, nan, negative_zero)
    if not name.endswith("16"):
        assert len(oracle.values(fmt)) == count


@each(
    ("fmt", "low", "high", "step"),
    [
        (oracle.fixed(4, 4), -8, Fraction(127, 16), Fraction(1, 16)),
        (oracle.fixed(4, 4, symmetric=True), Fraction(-127, 16), Fraction(127, 16), Fraction(1, 16)),
        (oracle.fixed(4, 4, signed=False), 0, Fraction(255, 16), Fraction(1, 16)),
        (oracle.integer(8), -128, 127, 1),
        (oracle.integer(8, narrow=True), -127, 127, 1),
        (oracle.integer(4, signed=False), 0, 15, 1),
    ],
)
def test_fixed_facts(fmt, low, high, step):
    values = oracle.values(fmt)
    assert (values[0], values[-1]) == (low, high)
    assert {b - a for a, b in itertools.pairwise(values)} == {step}


E4M3FN = cases.NAMED["float8_e4m3fn"]
E5M2 = cases.NAMED["float8_e5m2"]
E2M1 = cases.NAMED["float4_e2m1fn"]
E4M3_NO_SUBNORMALS = oracle.ieee(4, 3, subnormals=False)
INF, NEG_INF, NAN, NEG_ZERO = Special.INF, Special.NEG_INF, Special.NAN, Special.NEG_ZERO
F = Fraction

# In the order of oracle.DETERMINISTIC: even, away, zero, up, down, toward zero, odd.
BY_MODE = [
    # 9/8 lies in the middle of [1, 5/4] in e5m2; 1 has an even significand
    (E5M2, F(9, 8), "ieee", [1, F(5, 4), 1, F(5, 4), 1, 1, F(5, 4)]),
    (E5M2, F(-9, 8), "ieee", [-1, F(-5, 4), -1, -1, F(-5, 4), -1, F(-5, 4)]),
    (E5M2, F(11, 8), "ieee", [F(3, 2), F(3, 2), F(5, 4), F(3, 2), F(5, 4), F(5, 4), F(5, 4)]),
    (E5M2, F(2), "ieee", [2] * 7),
    # just beside the tie
    (E5M2, F(9, 8) + pow2(-40), "ieee", [F(5, 4), F(5, 4), F(5, 4), F(5, 4), 1, 1, F(5, 4)]),
    # below the smallest subnormal of e5m2, 2^-16
    (E5M2, pow2(-17), "ieee", [0, pow2(-16), 0, pow2(-16), 0, 0, pow2(-16)]),
    (E5M2, -pow2(-17), "ieee", [NEG_ZERO, -pow2(-16), NEG_ZERO, NEG_ZERO, -pow2(-16), NEG_ZERO, -pow2(-16)]),
    # without subnormals the neighbours of 2^-7 are 0 and 2^-6
    (E4M3_NO_SUBNORMALS, pow2(-7), "ieee", [0, pow2(-6), 0, pow2(-6), 0, 0, pow2(-6)]),
    (E4M3_NO_SUBNORMALS, F(3, 4) * pow2(-6), "ieee", [pow2(-6)] * 4 + [0, 0, pow2(-6)]),
    # overflow in e5m2: the largest is 57344, the next grid point 65536, the middle 61440
    (E5M2, F(61440), "ieee", [INF, INF, 57344, INF, 57344, 57344, 57344]),
    (E5M2, F(-61440), "ieee", [NEG_INF, NEG_INF, -57344, -57344, NEG_INF, -57344, -57344]),
    (E5M2, F(61439), "ieee", [57344, 57344, 57344, INF, 57344, 57344, 57344]),
    (E5M2, F(61440), "saturate", [57344] * 7),
    (E5M2, F(10**9), "propagate", [57344] * 7),
    (E5M2, INF, "ieee", [INF] * 7),
    (E5M2, INF, "propagate", [INF] * 7),
    (E5M2, NEG_INF, "saturate", [-57344] * 7),
    # no infinity: NaN in its place; 464 is the middle of 448 (even) and 480
    (E4M3FN, F(464), "ieee", [448, NAN, 448, NAN, 448, 448, 448]),
    (E4M3FN, F(465), "ieee", [NAN, NAN, NAN, NAN, 448, 448, 448]),
    (E4M3FN, INF, "ieee", [NAN] * 7),
    (E4M3FN, NEG_INF, "saturate", [-448] * 7),
    # neither: saturates
    (E2M1, F(100), "ieee", [6] * 7),
    (E2M1, NEG_INF, "ieee", [-6] * 7),
    (E2M1, F(5), "ieee", [4, 6, 4, 6, 4, 4, 6]),
    # no -0
    (cases.NAMED["float8_e4m3fnuz"], -pow2(-20), "ieee", [0, 0, 0, 0, -pow2(-10), 0, -pow2(-10)]),
    (cases.NAMED["float8_e4m3fnuz"], NEG_ZERO, "ieee", [0] * 7),
    (E5M2, NEG_ZERO, "ieee", [NEG_ZERO] * 7),
    (E5M2, NAN, "saturate", [NAN] * 7),
    # one significand bit: 3 lies between 2 (code 128, even) and 4 (code 129)
    (cases.E8M0, F(3), "ieee", [2, 4, 2, 4, 2, 2, 4]),
    (cases.E8M0, F(6), "ieee", [8, 8, 4, 8, 4, 4, 4]),
    (cases.E8M0, F(0), "ieee", [pow2(-127)] * 7),
    (cases.E8M0, pow2(-149), "ieee", [pow2(-127)] * 7),
    # unsigned: the modes that point to the smallest value take it
    (cases.E8M0, F(-1), "ieee", [NAN, NAN, NAN, pow2(-127), NAN, pow2(-127), pow2(-127)]),
    (cases.E8M0, NEG_INF, "ieee", [NAN, NAN, NAN, pow2(-127), NAN, pow2(-127), pow2(-127)]),
    (cases.E8M0, F(-1), "saturate", [pow2(-127)] * 7),
    (cases.E8M0, F(-1), "propagate", [pow2(-127)] * 7),
    (oracle.p3109(8, 3, signed=False), F(-1), "ieee", [NAN, NAN, NAN, 0, NAN, 0, 0]),
    (oracle.p3109(8, 3, signed=False), NEG_INF, "propagate", [0] * 7),
    # P3109: a finite format has its largest value in place of infinity, an extended one infinity under odd too
    (oracle.p3109(8, 4, extended=False), F(10**9), "ieee", [240] * 7),
    (oracle.p3109(8, 4, extended=False), NEG_INF, "ieee", [-240] * 7),
    (oracle.p3109(8, 4, extended=False), INF, "propagate", [240] * 7),
    (oracle.p3109(8, 3), F(10**9), "ieee", [INF, INF, INF, INF, 49152, 49152, INF]),
    (oracle.p3109(8, 3), F(-(10**9)), "ieee", [NEG_INF, NEG_INF, NEG_INF, -49152, NEG_INF, -49152, NEG_INF]),
    (oracle.p3109(8, 3), F(10**9), "propagate", [49152] * 7),
    (oracle.p3109(8, 3), NEG_INF, "propagate", [NEG_INF] * 7),
    (oracle.fixed(4, 4), F(3, 32), "ieee", [F(1, 8), F(1, 8), F(1, 16), F(1, 8), F(1, 16), F(1, 16), F(1, 16)]),
    (oracle.fixed(4, 4), F(-1, 32), "ieee", [0, F(-1, 16), 0, 0, F(-1, 16), 0, F(-1, 16)]),
    (oracle.fixed(4, 4), F(-100), "ieee", [-8] * 7),
    (oracle.fixed(4, 4), F(100), "wrap", [4] * 7),
    (oracle.fixed(4, 4), F(8), "wrap", [-8] * 7),
    (oracle.integer(8, signed=False), F(-1), "wrap", [255] * 7),
    (oracle.integer(8, signed=False), F(-1), "ieee", [0] * 7),
    (oracle.codebook([-1, 0, 1]), F(1, 2), "ieee", [1, 1, 0, 1, 0, 0, 0]),
    (oracle.codebook([-1, 0, 1]), F(-1, 2), "ieee", [0, -1, 0, 0, -1, 0, 0]),
    (oracle.codebook([-1, 0, 3]), F(2), "ieee", [3, 3, 3, 3, 0, 0, 0]),
    (oracle.codebook([-1, 0, 3]), INF, "ieee", [3] * 7),
]


@each(("fmt", "x", "overflow", "expected"), BY_MODE)
def test_hand_computed(fmt, x, overflow, expected):
    assert [round_exact(fmt, x, mode, overflow) for mode in oracle.DETERMINISTIC] == expected


def test_flush_takes_every_subnormal():
    below, normal = pow2(-14) - pow2(-30), pow2(-14)
    for mode in oracle.DETERMINISTIC:
        assert round_exact(E5M2, below, mode, flush=True) == 0
        assert round_exact(E5M2, -below, mode, flush=True) is NEG_ZERO
        assert round_exact(E5M2, normal, mode, flush=True) == normal
    assert round_exact(E5M2, below, "nearest_even") == normal


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", ["float6_e3m2fn", "float8_e4m3fn", "float8_e5m2fnuz", "binary8p3sf", "binary8p1se"])
@each("mode", oracle.DETERMINISTIC)
def test_values_stay_and_order_is_kept(name, mode):
    fmt = oracle.p3109(8, int(name[8]), extended=name[-1] == "e") if "p" in name else cases.NAMED[name]
    values = oracle.values(fmt)
    for x in values:
        assert round_exact(fmt, x, mode) == x
    between = sorted(a + k * (b - a) / 4 for a, b in itertools.pairwise(values) for k in range(4))
    rounded = [round_exact(fmt, x, mode) for x in between]
    plain = [F(0) if isinstance(x, Special) else x for x in rounded]  # -0; nothing here overflows
    assert plain == sorted(plain)


@each("mode", oracle.STOCHASTIC)
@each("n", [1, 2, 3, 5])
def test_probability_counts_the_draws(mode, n):
    for k in range(97):
        nu = F(k, 97)
        away = sum(oracle.draws_away(mode, nu, n, r) for r in range(2**n))
        assert F(away, 2**n) == oracle.probability_away(mode, nu, n)


def test_probability_by_hand():
    third = F(1, 3)  # 0.010101..., so floor(nu 4) = 1, floor(nu 8) = 2, rne(nu 4) = 1
    assert oracle.probability_away("stochastic", third, 2) == F(1, 4)
    assert oracle.probability_away("stochastic_b", third, 2) == F(1, 4)
    assert oracle.probability_away("stochastic_c", third, 2) == F(1, 4)
    assert oracle.probability_away("stochastic", F(7, 8), 2) == F(3, 4)
    assert oracle.probability_away("stochastic_b", F(7, 8), 2) == 1
    assert oracle.probability_away("stochastic_c", F(7, 8), 2) == 1
    assert oracle.probability_away("stochastic_c", F(5, 8), 2) == F(1, 2)
    assert oracle.probability_away("stochastic_equal", F(1, 100), 1) == F(1, 2)
    for mode in oracle.STOCHASTIC:
        assert oracle.probability_away(mode, F(0), 3) == 0


@each("carrier", CARRIERS.values())
def test_bit_patterns_go_and_return(carrier, rng):
    patterns = cases.bits(cases.adversarial(oracle.ieee(carrier.e, carrier.m), carrier.name, 600, rng))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = patterns.view(cases.DTYPES[carrier.name]).astype(np.float64)
    for pattern, number in zip(patterns.tolist(), numbers.tolist(), strict=True):
        x = oracle.from_bits(pattern, carrier)
        if x is NAN:
            assert number != number
            continue
        assert oracle.to_bits(x, carrier) == pattern
        if isinstance(x, Fraction):
            assert x == F(number)
    with pytest.raises(ValueError, match="does not hold"):
        oracle.to_bits(1 + pow2(-carrier.m - 1), carrier)
    with pytest.raises(ValueError, match="does not hold"):
        oracle.to_bits(pow2(carrier.bias + 1), carrier)


@each(
    ("text", "carriers"),
    [
        ("binary16", "float16 float32 float64"),
        ("bfloat16", "bfloat16 float32 float64"),
        ("float8_e4m3fn", "float16 bfloat16 float32 float64"),
        ("float8_e8m0fnu", "bfloat16 float32 float64"),
        ("tf32", "float32 float64"),
        ("binary64", "float64"),
        ("e8m3(bias=120,infinities=false,nans=top)", "float64"),  # reaches 2^135
        ("fixed3.12", "float32 float64"),
        ("integer8", "float16 bfloat16 float32 float64"),
    ],
)
def test_which_carriers_hold_a_format(text, carriers):
    fmt = {**cases.NAMED, **cases.WIDE, **cases.DOUBLE, **cases.FIXED}[text]
    assert " ".join(name for name, c in CARRIERS.items() if oracle.held(fmt, c)) == carriers


BATCH_FORMATS = {
    **cases.NAMED,
    **{name: cases.P3109[name] for name in ("binary8p1se", "binary8p1ue", "binary8p3uf", "binary3p1uf")},
    "no subnormals": E4M3_NO_SUBNORMALS,
    "binary64": cases.DOUBLE["binary64"],
    "e11m20": cases.DOUBLE["e11m20"],
    "tf32": cases.WIDE["tf32"],
    "fixed4.4": cases.FIXED["fixed4.4"],
    "ufixed4.4": cases.FIXED["ufixed4.4"],
    "integer4": cases.FIXED["integer4(narrow=true)"],
}


@pytest.mark.in_turn(90)
@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        pytest.param(name, carrier, marks=pytest.mark.slow if carrier == "float64" else ())
        for name, fmt in BATCH_FORMATS.items()
        for carrier in CARRIERS
        if oracle.held(fmt, CARRIERS[carrier])
    ],
)
def test_batch_is_the_truth(name, carrier, rng):
    fmt = BATCH_FORMATS[name]
    x = cases.adversarial(fmt, carrier, 64, rng)
    many, exact = cases.batch(x), [oracle.from_bits(int(p), CARRIERS[carrier]) for p in cases.bits(x)]
    overflows = cases.FIXED_OVERFLOWS if isinstance(fmt, oracle.FixedSet) else cases.FLOAT_OVERFLOWS
    settings = [(overflow, flush) for overflow in overflows for flush in (False, True)]
    for k, mode in enumerate((*oracle.DETERMINISTIC, *oracle.STOCHASTIC)):
        overflow, flush = settings[k % len(settings)]
        n = 1 + k
        r = rng.integers(0, 2**n, len(x), dtype=np.uint64)
        if mode in oracle.DETERMINISTIC:
            got = many.round(fmt, mode, overflow, flush)
        else:
            got = many.round_drawn(fmt, mode, n, r, overflow, flush)
        truth = [
            round_exact(fmt, v, mode, overflow, flush=flush, n=n, r=int(word)) for v, word in zip(exact, r, strict=True)
        ]
        expected = np.array([oracle.to_bits(v, CARRIERS[carrier]) for v in truth], got.dtype)
        cases.assert_bits(x, got.view(x.dtype), expected, f"{name} {mode} {overflow} flush={flush}")


GFLOAT_FORMATS = {
    "ocp_e4m3": (gf.format_info_ocp_e4m3, "float8_e4m3fn"),
    "ocp_e5m2": (gf.format_info_ocp_e5m2, "float8_e5m2"),
    "ocp_e2m3": (gf.format_info_ocp_e2m3, "float6_e2m3fn"),
    "p3109 8p3": (gf.format_info_p3109(8, 3), "binary8p3se"),
    "p3109 8p1": (gf.format_info_p3109(8, 1), "binary8p1se"),
}
GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
    "toward_zero": gfloat.RoundMode.TowardZero,
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", GFLOAT_FORMATS)
@each("mode", GFLOAT_MODES)
def test_oracle_agrees_with_gfloat(name, mode, rng):
    info, ours = GFLOAT_FORMATS[name]
    fmt = {**cases.NAMED, **cases.P3109}[ours]
    carrier = CARRIERS["float64"]
    # Not float64 inputs: gfloat adds 1/2 in float64, so 1/2 - 2^-54 counts as a tie.
    x = cases.adversarial(fmt, "float32", 100, rng)
    x = x[~np.isnan(x)].astype(np.float64)
    for overflow, saturate in (("ieee", False), ("saturate", True)):
        if not saturate and not (fmt.inf or fmt.has_nan):
            continue  # gfloat raises
        got = [
            oracle.to_bits(round_exact(fmt, oracle.from_bits(int(p), carrier), mode, overflow), carrier)
            for p in cases.bits(x)
        ]
        theirs = np.array([gfloat.round_float(info, float(v), GFLOAT_MODES[mode], saturate) for v in x])
        cases.assert_bits(x, np.array(got, np.uint64).view(np.float64), cases.bits(theirs), f"{name} {mode} {overflow}")
