"""The case tables that the value tests share: formats by their text, and inputs that are hard to round.

The parameters stand here a second time, read off the documents that define the formats, so that a wrong constant in
the package shows as a difference.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
from oracle import CARRIERS, Carrier, FixedSet, FloatSet, Levels

E8M0 = FloatSet(8, 0, 127, inf=False, nan="top", signed=False, zero=False)

#: Every named format of at most 16 bits.
NAMED: dict[str, FloatSet] = {
    "binary16": oracle.ieee(5, 10),
    "bfloat16": oracle.ieee(8, 7),
    "float8_e5m2": oracle.ieee(5, 2),
    "float8_e4m3": oracle.ieee(4, 3),
    "float8_e4m3fn": oracle.fn(4, 3),
    "float8_e5m2fnuz": oracle.fnuz(5, 2, bias=16),
    "float8_e4m3fnuz": oracle.fnuz(4, 3, bias=8),
    "float8_e4m3b11fnuz": oracle.fnuz(4, 3, bias=11),
    "float8_e3m4": oracle.ieee(3, 4),
    "float8_e8m0fnu": E8M0,
    "float6_e3m2fn": oracle.fn(3, 2, nan="none"),
    "float6_e2m3fn": oracle.fn(2, 3, nan="none"),
    "float4_e2m1fn": oracle.fn(2, 1, nan="none"),
}
#: Texts of other IEEE-like formats; e5m10, e8m7 and e4m3 have a name too and must be the same set.
CUSTOM: dict[str, FloatSet] = {
    f"e{e}m{m}": oracle.ieee(e, m) for e, m in ((5, 10), (8, 7), (4, 3), (5, 5), (5, 7), (8, 4), (3, 2), (6, 9))
}
P3109: dict[str, FloatSet] = {
    f"binary{k}p{p}{'s' if signed else 'u'}{'e' if extended else 'f'}": oracle.p3109(k, p, signed, extended)
    for k, p, signed, extended in (
        (8, 1, True, True),
        (8, 1, False, True),
        (8, 3, True, True),
        (8, 3, False, False),
        (8, 4, True, False),
        (8, 4, False, True),
        (8, 7, True, False),
        (8, 8, False, False),
        (4, 2, True, False),
        (6, 3, True, True),
        (3, 1, False, False),
    )
}
#: Formats that need a wider carrier, or that exercise a field nothing above has.
WIDE: dict[str, FloatSet] = {
    "tf32": oracle.ieee(8, 10),
    "binary32": oracle.ieee(8, 23),
    "e7m16": oracle.ieee(7, 16),
    "e5m10(nans=none,infinities=false)": oracle.fn(5, 10, nan="none"),
    "e8m3(bias=120,infinities=false,nans=top)": FloatSet(8, 3, 120, inf=False, nan="top"),
    "e8m3(bias=130,infinities=false,nans=none)": FloatSet(8, 3, 130, inf=False, nan="none"),
    "e2m20": oracle.ieee(2, 20),
    "e5m3(bias=10,max_exponent=10)": FloatSet(5, 3, 10, emax=10),
}
DOUBLE: dict[str, FloatSet] = {
    "binary64": oracle.ieee(11, 52),
    "e11m20": oracle.ieee(11, 20),
    "e10m51": oracle.ieee(10, 51),
    "e9m40": oracle.ieee(9, 40),
    "e11m20(bias=1030,infinities=false,nans=none)": FloatSet(11, 20, 1030, inf=False, nan="none"),
}
FIXED: dict[str, FixedSet] = {
    "fixed4.4": oracle.fixed(4, 4),
    "fixed8.0": oracle.fixed(8, 0),
    "fixed1.7": oracle.fixed(1, 7),
    "fixed3.12": oracle.fixed(3, 12),
    "ufixed4.4": oracle.fixed(4, 4, signed=False),
    "ufixed0.8": oracle.fixed(0, 8, signed=False),
    "fixed4.4(symmetric=true)": oracle.fixed(4, 4, symmetric=True),
    "integer8": oracle.integer(8),
    "integer4(narrow=true)": oracle.integer(4, narrow=True),
    "integer2": oracle.integer(2),
    "uinteger4": oracle.integer(4, signed=False),
    "uinteger8": oracle.integer(8, signed=False),
}
#: Tables of increasing levels: regular, irregular, one level, and NF4 (float32 numbers).
CODEBOOKS: dict[str, tuple[float, ...]] = {
    "signs": (-1.0, 1.0),
    "ternary": (-1.0, 0.0, 1.0),
    "uneven": (-3.0, -1.0, -0.25, 0.0, 0.5, 0.75, 8.0),
    "positive": (0.125, 0.5, 0.625, 2.0),
    "single": (0.5,),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip

FLOAT_OVERFLOWS = ("ieee", "saturate", "propagate")
FIXED_OVERFLOWS = (*FLOAT_OVERFLOWS, "wrap")

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def all_patterns(carrier: str) -> np.ndarray:
    """Every value of a 16-bit carrier, in the order of its bit patterns."""
    return np.arange(2**16, dtype=np.uint16).view(DTYPES[carrier])


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}")


def batch(x: np.ndarray) -> oracle.Batch:
    return oracle.Batch(bits(x), CARRIERS[x.dtype.name])


def differences(got: np.ndarray, expected_bits: np.ndarray, carrier: Carrier) -> np.ndarray:
    """The positions where the bits differ, every NaN being equal to every other."""
    got_bits = bits(got)
    magnitude = carrier.words.type(carrier.sign - 1)
    both_nan = ((got_bits & magnitude) > carrier.infinity) & ((expected_bits & magnitude) > carrier.infinity)
    return np.flatnonzero((got_bits != expected_bits) & ~both_nan)


def assert_bits(x: np.ndarray, got: np.ndarray, expected_bits: np.ndarray, what: str = "") -> None:
    """Fails with the first few inputs that came out differently, all as exact bit patterns."""
    assert got.dtype == x.dtype and got.shape == x.shape, f"{what}: {got.dtype}{got.shape} from {x.dtype}{x.shape}"
    where = differences(got, expected_bits, CARRIERS[x.dtype.name])
    if len(where):
        expected = expected_bits.view(x.dtype)
        lines = [
            f"  x={x[i]!s} ({bits(x)[i]:#x}) gave {got[i]!s} ({bits(got)[i]:#x}), "
            f"expected {expected[i]!s} ({expected_bits[i]:#x})"
            for i in where[:8]
        ]
        raise AssertionError(f"{what}: {len(where)} of {len(x)} differ\n" + "\n".join(lines))


def _grid_points(fmt: FloatSet | FixedSet | Levels, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n magnitudes on the grid and the gaps above them, as float64, spread over binades, edges and the overflow."""
    if isinstance(fmt, Levels):
        levels = np.array([float(level) for level in fmt.levels] + [2 * float(fmt.levels[-1]) + 1])
        i = rng.integers(0, len(fmt.levels), n)
        return levels[i], levels[i + 1] - levels[i]
    top = fmt.top(False)
    near_top = np.maximum(top - rng.integers(-2, 4, n), 0)
    near_zero = np.minimum(rng.integers(0, 6, n), top)
    if isinstance(fmt, FixedSet):
        anywhere = rng.integers(0, top + 1, n)
        power = np.minimum(1 << rng.integers(0, fmt.bits, n), top)
    else:
        anywhere = rng.integers(0, top + 1, n)
        low_binade = rng.integers(0, min(2 ** (fmt.m + 1), top) + 1, n)  # target subnormals and the first normals
        near_zero = np.where(rng.random(n) < 0.7, low_binade, near_zero)
        binades = max(top >> fmt.m, 1)
        power = np.clip((rng.integers(0, binades + 1, n) << fmt.m) + rng.integers(-1, 2, n), 0, top)
    kind = rng.integers(0, 4, n)
    index = np.choose(kind, [anywhere, near_zero, near_top, power]).astype(np.int64)
    if isinstance(fmt, FixedSet):
        return np.ldexp(index.astype(np.float64), -fmt.f), np.full(n, 2.0**-fmt.f)
    points = []
    for i in (index, index + 1):
        code = fmt.code(i)
        field, fraction = code >> fmt.m, code & (2**fmt.m - 1)
        normal = (field > 0) | (not fmt.zero)
        exponent = np.maximum(field, 1 if fmt.zero else 0) - fmt.bias - fmt.m
        significand = (fraction + (normal.astype(np.int64) << fmt.m)).astype(np.float64)
        points.append(np.ldexp(significand, exponent))
    return points[0], points[1] - points[0]


def adversarial(fmt: FloatSet | FixedSet | Levels, carrier: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """n numbers of a carrier that are hard to round to a format.

    Half are grid points of the format and fractions 1/4, 1/2, 3/4 of the gap above them (ties, subnormals, the
    overflow threshold), moved by -2 to 2 units in the last place of the carrier; then powers of two moved in the same
    way, subnormals of the carrier, patterns at random, and the specials: zeros, infinities, NaN payloads.
    """
    c = CARRIERS[carrier]
    word, signed_word = c.words, np.dtype(f"int{c.bits}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        point, gap = _grid_points(fmt, n - n // 2, rng)
        x = point + gap * rng.choice([0.0, 0.25, 0.5, 0.5, 0.75], len(point))
        near = bits(x.astype(DTYPES[carrier])).view(signed_word)
        power = bits(np.ldexp(1.0, rng.integers(1 - c.bias - c.m, c.bias + 1, n // 6)).astype(DTYPES[carrier]))
        near = np.concatenate([near, power.view(signed_word)])
        near = near + rng.integers(-2, 3, len(near)).astype(signed_word) * (rng.random(len(near)) < 0.7)
    near = np.clip(near & (c.sign - 1), 0, c.infinity).astype(word)
    tiny = rng.integers(0, 2 ** rng.integers(1, c.m + 1, n // 12), dtype=np.int64).astype(word)
    payload = rng.integers(1, 2**c.m, n // 60, dtype=np.int64).astype(word) | word.type(c.infinity)
    special = np.concatenate([payload, np.array([0, c.infinity, c.infinity + 1, c.sign - 1] * 2, word)])
    some = np.concatenate([near, tiny, special])
    anything = rng.integers(0, 2 ** (c.bits - 1), n - len(some), dtype=np.uint64).astype(word)
    magnitude = np.concatenate([some, anything])
    sign = np.where(rng.random(n) < 0.5, word.type(c.sign), word.type(0))
    sign[len(near) + len(tiny) + len(payload) :][:8] = np.repeat(np.array([0, c.sign], word), 4)
    return (magnitude | sign).view(DTYPES[carrier])


def near_middles_of_roots(bits: int) -> list[int]:
    """Numbers of at most so many bits, times a power of two, whose roots lie next to t + 1/2 for a t of as many bits.

    They are t^2 + t + r for small r, so that the root is below the middle for r = 0 and less, and above it for others.
    """
    found = []
    for r in range(-60, 62, 2):
        for odd in (0, 1):  # t^2 + t + r = 0 has an even and an odd solution modulo each power of two
            t = odd
            for place in range(1, bits):
                t |= (t * t + t + r >> place & 1) << place
            t |= 1 << bits - 1
            square = t * t + t + r
            if (square // (square & -square)).bit_length() <= bits:
                found.append(square)
    return found
