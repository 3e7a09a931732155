"""What rounding must give, from the written rules alone: Python integers and fractions, nothing of the package.

Two implementations stand here. `round_exact` is the truth: one number at a time, a format being a function from an
index to an exact fraction, and the neighbours found by bisection. `Batch` says the same for many carrier bit patterns
at once in integer arithmetic; test_oracle.py proves it against `round_exact`.

A value is a `Fraction`, or a `Special`. Modes and overflow rules are their texts ("nearest_even", "saturate").
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np


class Special(enum.Enum):
    NEG_ZERO = "-0"
    INF = "inf"
    NEG_INF = "-inf"
    NAN = "nan"


Value = Fraction | Special
ZERO = Fraction(0)

NEAREST = ("nearest_even", "nearest_away", "nearest_zero")
DETERMINISTIC = (*NEAREST, "up", "down", "toward_zero", "odd")
PROPORTIONAL = ("stochastic", "stochastic_b", "stochastic_c")
STOCHASTIC = (*PROPORTIONAL, "stochastic_equal")


def pow2(k: int) -> Fraction:
    return Fraction(1 << k) if k >= 0 else Fraction(1, 1 << -k)


def rne(x: Fraction) -> int:
    return round(x)  # Python rounds a Fraction half to even, exactly


# --- the sets of values -------------------------------------------------------------------------------------------
# The magnitudes of a format, numbered 0, 1, 2, ... upward without end; `top` is the number of the largest finite one.


@dataclass(frozen=True)
class FloatSet:
    """Magnitude codes: exponent field, then m fraction bits, the field going on above the largest finite value."""

    e: int
    m: int
    bias: int
    subnormals: bool = True
    inf: bool = True
    nan: str = "ieee"  # "ieee", "top", "negative_zero", "none"
    signed: bool = True
    zero: bool = True
    emax: int | None = None  # of the largest finite value, where it is not the field that ends it
    p3109: bool = False  # overflows as IEEE P3109 says

    def code(self, index: Any) -> Any:
        if self.subnormals or not self.zero:
            return index
        return (index + 2**self.m - 1) * (index > 0)  # without subnormals the smallest normal follows zero

    def value(self, index: int) -> Fraction:
        field, fraction = divmod(self.code(index), 2**self.m)
        if field == 0 and self.zero:
            return fraction * pow2(1 - self.bias - self.m)
        return (2**self.m + fraction) * pow2(field - self.bias - self.m)

    def odd(self, index: Any) -> Any:
        return self.code(index) % 2 == 1

    def top(self, negative: bool) -> int:
        if negative and not self.signed:
            return 0 if self.zero else -1
        if self.emax is not None:
            code = (self.emax + self.bias + 1) * 2**self.m - 1
        elif self.nan == "ieee":
            code = (2**self.e - 1) * 2**self.m - 1
        else:
            code = 2 ** (self.e + self.m) - 1 - (self.nan == "top") - self.inf
        return code if self.subnormals or not self.zero else code - 2**self.m + 1

    @property
    def normal_exponent(self) -> int:
        """The smallest normal number is 2 to this power."""
        return 1 - self.bias if self.zero else -self.bias

    @property
    def has_nan(self) -> bool:
        return self.nan != "none"

    @property
    def negative_zero(self) -> bool:
        return self.signed and self.zero and self.nan != "negative_zero"


@dataclass(frozen=True)
class FixedSet:
    """The multiples n * 2^-f for low <= n <= high, of which there are at most 2^bits codes."""

    bits: int
    f: int
    signed: bool = True
    symmetric: bool = False

    def value(self, index: int) -> Fraction:
        return index * pow2(-self.f)

    def odd(self, index: Any) -> Any:
        return index % 2 == 1

    def top(self, negative: bool) -> int:
        if not self.signed:
            return 0 if negative else 2**self.bits - 1
        return 2 ** (self.bits - 1) - (0 if negative and not self.symmetric else 1)

    def wrap(self, n: Any) -> Any:
        low = -(2 ** (self.bits - 1)) if self.signed else 0
        return (n - low) % 2**self.bits + low


@dataclass(frozen=True)
class Levels:
    """A table of increasing numbers."""

    levels: tuple[Fraction, ...]


@dataclass(frozen=True)
class Strings:
    """Posits (Standard for Posit Arithmetic, 2022) or linear takums (arXiv 2404.18603): codes 1, 2, ... upward.

    An exponent e has a lead, which depends on e, and then a tail: the low bits of e and the fraction, in [0, 1).
    """

    kind: str  # "posit", "takum"
    n: int

    def place(self, magnitude: Fraction) -> Fraction:
        """The infinite string of a positive number, read as a code with a fraction."""
        e = 0
        while magnitude >= 2:
            magnitude, e = magnitude / 2, e + 1
        while magnitude < 1:
            magnitude, e = magnitude * 2, e - 1
        if self.kind == "posit":
            k, bits = divmod(e, 4)
            lead, tail = "1" * (k + 1) + "0" if k >= 0 else "0" * -k + "1", (bits + magnitude - 1) / 4
        else:
            r = next(r for r in range(12) if (e if e >= 0 else -e - 1) < 2 ** (r + 1) - 1)
            if r > 7:
                return pow2(self.n) if e > 0 else ZERO  # beyond every code
            bits = e - (2**r - 1) if e >= 0 else e - (1 - 2 ** (r + 1))
            lead, tail = f"{8 + r if e >= 0 else 7 - r:04b}", (bits + magnitude - 1) / 2**r
        return (int(lead, 2) + tail) * pow2(self.n - 1 - len(lead))

    def value(self, index: int) -> Fraction:
        """The value of a code, from the fields of its string: the number whose place is the code."""
        return string_value(self.kind, self.n, index)

    def odd(self, index: Any) -> Any:
        return index % 2 == 1

    def top(self, negative: bool) -> int:
        return 2 ** (self.n - 1) - 1


@dataclass(frozen=True)
class HiFloat8Set:
    """HiF8 (arXiv 2409.16626, table 1): magnitudes in order, the binades going on above the largest finite value."""

    inf: bool = True
    has_nan: bool = True
    signed: bool = True
    p3109: bool = False

    @functools.cache  # noqa: B019
    def value(self, index: int) -> Fraction:
        """Subnormals 2^(M - 23), then 2, 4, 8, 4 and 2 values of each binade from -15 on."""
        if index < 8:
            return pow2(index - 23) if index else ZERO
        index, e = index - 8, -15
        while index >= (count := 8 if abs(e) <= 3 else 4 if abs(e) <= 7 else 2):
            index, e = index - count, e + 1
        return (1 + Fraction(index, count)) * pow2(e)

    def odd(self, index: Any) -> Any:
        return index % 2 == 1

    def top(self, negative: bool) -> int:
        return 8 + 2 * 16 + 4 * 8 + 8 * 7 - 2  # without 2^15 * 1.5, the code of the infinity


def hif8_value(code: int) -> Value:
    """The value of a code of HiF8, by its fields."""
    bits = f"{code:08b}"
    if bits[1:] == "0000000":
        return Special.NAN if bits[0] == "1" else ZERO
    if bits[1:] == "1101111":
        return Special.NEG_INF if bits[0] == "1" else Special.INF
    sign = -1 if bits[0] == "1" else 1
    dots = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0, "0000": None}
    dot, width = next((dot, width) for dot, width in dots.items() if bits[1:].startswith(dot))
    rest = bits[1 + len(dot) :]
    if width is None:
        return sign * pow2(int(rest, 2) - 23)
    exponent, fraction = rest[:width], rest[width:]
    e = int("1" + exponent[1:], 2) * (-1 if exponent[0] == "1" else 1) if width else 0
    return sign * (1 + Fraction(int(fraction, 2), 2 ** len(fraction))) * pow2(e)


def string_value(kind: str, n: int, code: int) -> Fraction:
    """The value of any code but 10...0, by the formulas with a sign s.

    Posits, section 3.3: ((1 - 3s) + f) 2^((1 - 2s)(4r + e + s)). Linear takums: ((1 - 3s) + f) 2^((1 - 2s)(c + s)).
    """
    if code == 0:
        return ZERO
    string = f"{code:0{n}b}" + "0" * 40  # bits beyond the string are 0
    s, rest = int(string[0]), string[1:]
    if kind == "posit":
        run = 0
        while run < n - 1 and rest[run] == rest[0]:
            run += 1
        r = -run if rest[0] == "0" else run - 1
        rest = rest[run + 1 :]
        count, fraction = 4 * r + int(rest[:2], 2), rest[2:]
    else:
        d, field = int(rest[0]), int(rest[1:4], 2)
        r = field if d else 7 - field
        c = int("0" + rest[4 : 4 + r], 2)
        count, fraction = (2**r - 1 + c if d else -(2 ** (r + 1)) + 1 + c), rest[4 + r :]
    f = Fraction(int("0" + fraction, 2), 2 ** len(fraction))
    return ((1 - 3 * s) + f) * pow2((1 - 2 * s) * (count + s))


Grid = FloatSet | FixedSet | HiFloat8Set
Set = Grid | Levels


def ieee(e: int, m: int, **changes: Any) -> FloatSet:
    return FloatSet(e, m, **({"bias": 2 ** (e - 1) - 1} | changes))


def fn(e: int, m: int, nan: str = "top") -> FloatSet:
    return FloatSet(e, m, 2 ** (e - 1) - 1, inf=False, nan=nan)


def fnuz(e: int, m: int, bias: int) -> FloatSet:
    return FloatSet(e, m, bias, inf=False, nan="negative_zero")


def p3109(bits: int, precision: int, signed: bool = True, extended: bool = True) -> FloatSet:
    e = bits - precision + (not signed)
    nan = "negative_zero" if signed else "top"
    return FloatSet(e, precision - 1, 2 ** (e - 1), inf=extended, nan=nan, signed=signed, p3109=True)


def fixed(i: int, f: int, signed: bool = True, symmetric: bool = False) -> FixedSet:
    return FixedSet(i + f, f, signed, symmetric)


def integer(bits: int, signed: bool = True, narrow: bool = False) -> FixedSet:
    return FixedSet(bits, 0, signed, narrow)


def codebook(levels: Sequence[float]) -> Levels:
    return Levels(tuple(Fraction(level) for level in levels))


def describe(fmt: Any) -> Any:
    """The parameters of a format object, read from its public fields."""
    if hasattr(fmt, "exp_bits"):
        names = ("exp_bits", "frac_bits", "bias", "subnormals", "infinities", "nans", "signed", "zero", "max_exponent")
        return FloatSet(*(getattr(fmt, name) for name in names), p3109=getattr(fmt, "p3109", False))
    if hasattr(fmt, "int_bits"):
        return fixed(fmt.int_bits, fmt.frac_bits, fmt.signed, fmt.symmetric)
    if hasattr(fmt, "levels"):
        return codebook(fmt.levels)
    if hasattr(fmt, "narrows"):
        return HiFloat8Set()
    if hasattr(fmt, "parts"):
        return Strings("posit" if "exponent" in fmt.parts else "takum", fmt.bits)
    return integer(fmt.bits, fmt.signed, fmt.narrow)


def largest(fmt: Grid, negative: bool = False) -> Fraction:
    return fmt.value(fmt.top(negative))


def values(fmt: Set) -> list[Fraction]:
    """All finite values, increasing."""
    if isinstance(fmt, Levels):
        return list(fmt.levels)
    positive = [fmt.value(i) for i in range(fmt.top(False) + 1)]
    negative = [-fmt.value(i) for i in range(fmt.top(True) + 1)]
    return sorted(set(positive + negative))


# --- the truth, one number at a time ------------------------------------------------------------------------------


def neighbours(fmt: Grid, magnitude: Fraction) -> tuple[int, Fraction]:
    """The index of the largest grid point <= magnitude, and the discarded fraction of the gap above it."""
    if magnitude <= fmt.value(0):
        return 0, ZERO  # below the smallest value of a format without zero: that value
    low, high = 0, 1
    while fmt.value(high) <= magnitude:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fmt.value(middle) <= magnitude else (low, middle)
    return low, (magnitude - fmt.value(low)) / (fmt.value(low + 1) - fmt.value(low))


def probability_away(mode: str, nu: Fraction, n: int) -> Fraction:
    """The exact probability that a value with discarded fraction nu moves away from zero, under n random bits."""
    if mode == "stochastic_equal":
        return Fraction(nu > 0, 2)
    accepted = {
        "stochastic": nu * 2**n // 1,
        "stochastic_b": (nu * 2 ** (n + 1) // 1 + 1) // 2,
        "stochastic_c": rne(nu * 2**n),
    }[mode]
    return Fraction(accepted, 2**n)


def draws_away(mode: str, nu: Fraction, n: int, r: int) -> bool:
    """The decision of a stochastic mode given the n-bit integer r (for "stochastic_equal": its top bit)."""
    if mode == "stochastic_equal":
        return nu > 0 and r >> (n - 1) == 1
    if mode == "stochastic":
        return nu * 2**n // 1 + r >= 2**n
    if mode == "stochastic_b":
        return nu * 2 ** (n + 1) // 1 + 2 * r + 1 >= 2 ** (n + 1)
    assert mode == "stochastic_c"
    return rne(nu * 2**n) + r >= 2**n


def moves_away(mode: str, nu: Fraction, low_is_odd: bool, negative: bool, n: int, r: int) -> bool:
    if mode in STOCHASTIC:
        return draws_away(mode, nu, n, r)
    half = Fraction(1, 2)
    return {
        "nearest_even": nu > half or (nu == half and low_is_odd),
        "nearest_away": nu >= half,
        "nearest_zero": nu > half,
        "up": nu > 0 and not negative,
        "down": nu > 0 and negative,
        "toward_zero": False,
        "odd": nu > 0 and not low_is_odd,
    }[mode]


def overflowed(fmt: Grid, negative: bool, mode: str, overflow: str, infinite: bool) -> Value:
    """What takes the place of a magnitude above the largest finite one; `infinite`: the input was an infinity."""
    sign = -1 if negative else 1
    if isinstance(fmt, FixedSet):
        return sign * largest(fmt, negative)
    outward = infinite or mode in (*NEAREST, *STOCHASTIC) or mode == ("down" if negative else "up")
    if negative and not fmt.signed:
        if mode in ("up", "toward_zero", "odd"):  # the smallest value is the neighbour that they point to
            return fmt.value(0)
        return Special.NAN if overflow == "ieee" and fmt.has_nan else fmt.value(0)
    if fmt.p3109:
        # SatNone: what is finite becomes infinite under "odd" too; a finite format has its largest value instead.
        outward = fmt.inf and (outward or mode == "odd")
        infinite = fmt.inf and infinite
    if {"ieee": outward, "propagate": infinite, "saturate": False}[overflow]:
        if fmt.inf:
            return Special.NEG_INF if negative else Special.INF
        if fmt.has_nan:
            return Special.NAN
    return sign * largest(fmt)


def round_exact(
    fmt: Set, x: Value, mode: str, overflow: str = "ieee", *, flush: bool = False, n: int = 1, r: int = 0
) -> Value:
    """The value that x becomes; stochastic modes are given the n-bit integer r."""
    if x is Special.NAN:
        return x
    if isinstance(fmt, Levels):
        return _round_to_level(fmt, x, mode, n, r)
    if isinstance(fmt, Strings):
        return _round_string(fmt, x, mode, overflow, n, r)
    if x in (Special.INF, Special.NEG_INF):
        return overflowed(fmt, x is Special.NEG_INF, mode, overflow, infinite=True)
    negative = x is Special.NEG_ZERO or x < 0
    magnitude = ZERO if x is Special.NEG_ZERO else abs(x)
    if flush and isinstance(fmt, FloatSet) and magnitude < pow2(fmt.normal_exponent):
        magnitude = ZERO
    if magnitude == 0 and not (isinstance(fmt, FloatSet) and fmt.signed):
        negative = False
    low, nu = neighbours(fmt, magnitude)
    index = low + moves_away(mode, nu, fmt.odd(low), negative, n, r)
    if isinstance(fmt, FixedSet) and overflow == "wrap":
        return fmt.wrap(-index if negative else index) * pow2(-fmt.f)
    if index > fmt.top(negative):
        return overflowed(fmt, negative, mode, overflow, infinite=False)
    result = fmt.value(index)
    if result == 0:
        return Special.NEG_ZERO if negative and isinstance(fmt, FloatSet) and fmt.negative_zero else result
    return -result if negative else result


def _round_string(fmt: Strings, x: Value, mode: str, overflow: str, n: int, r: int) -> Value:
    """The string cut to n bits; never to 0, nor beyond the largest value. An infinity is no real number."""
    top = fmt.top(False)
    if x in (Special.INF, Special.NEG_INF):
        return (fmt.value(top) * (1 if x is Special.INF else -1)) if overflow == "saturate" else Special.NAN
    if x is Special.NEG_ZERO or x == 0:
        return ZERO
    assert isinstance(x, Fraction)
    place = fmt.place(abs(x))
    low = place // 1
    index = low + moves_away(mode, place - low, low % 2 == 1, x < 0, n, r)
    return fmt.value(min(max(index, 1), top)) * (1 if x > 0 else -1)


def _round_to_level(fmt: Levels, x: Value, mode: str, n: int, r: int) -> Fraction:
    levels = fmt.levels
    if x is Special.NEG_INF:
        return levels[0]
    if x is Special.INF:
        return levels[-1]
    x = ZERO if isinstance(x, Special) else x
    j = bisect.bisect_right(levels, x) - 1
    if j < 0 or j == len(levels) - 1 or levels[j] == x:
        return levels[max(j, 0)]
    below, above = levels[j], levels[j + 1]
    # Lo and hi in magnitude. Levels of opposite sign stand in the order of the smaller magnitude.
    lo, hi = (below, above) if abs(below) < abs(above) else (above, below)
    nu = (x - lo) / (hi - lo)
    half = Fraction(1, 2)
    if mode in STOCHASTIC:
        return hi if draws_away(mode, nu, n, r) else lo
    return {
        "nearest_even": lo if nu < half else hi if nu > half else above,
        "nearest_away": hi if nu >= half else lo,
        "nearest_zero": hi if nu > half else lo,
        "up": above,
        "down": below,
        "toward_zero": lo,
        "odd": above if j % 2 == 0 else below,
    }[mode]


# --- carriers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carrier:
    name: str
    e: int
    m: int

    @property
    def bits(self) -> int:
        return 1 + self.e + self.m

    @property
    def bias(self) -> int:
        return 2 ** (self.e - 1) - 1

    @property
    def words(self) -> np.dtype:
        return np.dtype(f"uint{self.bits}")

    @property
    def infinity(self) -> int:
        """The bit pattern of +inf; the patterns above it (without the sign) are NaN."""
        return (2**self.e - 1) << self.m

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)


CARRIERS = {c.name: c for c in (
    Carrier("float16", 5, 10), Carrier("bfloat16", 8, 7), Carrier("float32", 8, 23), Carrier("float64", 11, 52)
)}  # fmt: skip


def from_bits(pattern: int, carrier: Carrier) -> Value:
    """The exact value of a bit pattern."""
    negative, magnitude = divmod(int(pattern), carrier.sign)
    if magnitude > carrier.infinity:
        return Special.NAN
    if magnitude == carrier.infinity:
        return Special.NEG_INF if negative else Special.INF
    field, fraction = divmod(magnitude, 2**carrier.m)
    significand = fraction + (2**carrier.m if field else 0)
    x = Fraction(significand) * pow2(max(field, 1) - carrier.bias - carrier.m)
    if x == 0 and negative:
        return Special.NEG_ZERO
    return -x if negative else x


def to_bits(x: Value, carrier: Carrier) -> int:
    """The bit pattern of x (NaN: the quiet one), ValueError where the carrier does not hold x."""
    if isinstance(x, Special):
        quiet = carrier.infinity | 1 << (carrier.m - 1)
        return {
            Special.NEG_ZERO: carrier.sign,
            Special.INF: carrier.infinity,
            Special.NEG_INF: carrier.sign | carrier.infinity,
            Special.NAN: quiet,
        }[x]
    grid = ieee(carrier.e, carrier.m)
    index, nu = neighbours(grid, abs(x))
    if nu or index > grid.top(False):
        raise ValueError(f"{carrier.name} does not hold {x}")
    return index | (carrier.sign if x < 0 else 0)


def held(fmt: Set, carrier: Carrier) -> bool:
    """Whether the carrier holds every finite value of the format: its extremes and its finest step tell."""
    probes: list[Fraction]
    if isinstance(fmt, Levels):
        probes = list(fmt.levels)
    else:
        smallest = 1 if fmt.value(0) == 0 else 0
        top = fmt.top(False)
        probes = [fmt.value(min(i, top)) for i in (smallest, smallest + 1, max(top - 1, 0), top)]
        probes.append(fmt.value(fmt.top(fmt.top(True) > 0)))
    try:
        for probe in probes:
            to_bits(probe, carrier)
    except ValueError:
        return False
    return True


# --- many patterns at once ----------------------------------------------------------------------------------------


@dataclass
class Split:
    """Where magnitudes stand on a grid: the index below, and nu = rest / 2^shift."""

    low: np.ndarray
    rest: np.ndarray
    shift: np.ndarray

    def compared_with_half(self) -> np.ndarray:
        """-1, 0 or 1 for nu <, =, > 1/2; rest < 2^53, so no shift above 55 changes the answer."""
        return np.sign(2 * self.rest - (np.int64(1) << np.minimum(self.shift, 60)))


def _bit_length(n: np.ndarray) -> np.ndarray:
    return np.frexp(n.astype(np.float64))[1].astype(np.int64)  # exact: n < 2^53


class Batch:
    """Carrier bit patterns, decoded once, rounded by exact integer arithmetic to many formats."""

    def __init__(self, patterns: np.ndarray, carrier: Carrier) -> None:
        assert patterns.dtype == carrier.words and patterns.ndim == 1
        self.carrier = carrier
        self.patterns = patterns
        magnitude = (patterns & carrier.words.type(carrier.sign - 1)).astype(np.int64)
        self.negative = patterns >= carrier.words.type(carrier.sign)
        self.nan = magnitude > carrier.infinity
        self.inf = magnitude == carrier.infinity
        field = magnitude >> carrier.m
        significand = (magnitude & (2**carrier.m - 1)) | ((field > 0).astype(np.int64) << carrier.m)
        self.significand = np.where(self.nan | self.inf, 0, significand)
        self.exponent = np.maximum(field, 1) - carrier.bias - carrier.m  # |x| = significand * 2^exponent
        self._splits: dict[tuple[FloatSet | FixedSet, bool], Split] = {}

    def split(self, fmt: FloatSet | FixedSet, flush: bool = False) -> Split:
        if (fmt, flush) not in self._splits:
            make = self._split_float if isinstance(fmt, FloatSet) else self._split_fixed
            self._splits[fmt, flush] = make(fmt, flush)  # type: ignore[arg-type]
        return self._splits[fmt, flush]

    def _split_float(self, fmt: FloatSet, flush: bool) -> Split:
        assert fmt.e + fmt.m <= 63 and fmt.m <= 52
        top_bit = self.exponent + _bit_length(self.significand) - 1
        small = (self.significand == 0) | (top_bit < fmt.normal_exponent)
        binade = np.where(small, fmt.normal_exponent, top_bit)
        shift = binade - fmt.m - self.exponent  # > 0: that many bits of the significand are discarded
        gradual = fmt.subnormals and fmt.zero and not flush
        if not gradual:
            shift = np.where(small, fmt.normal_exponent - self.exponent, shift)  # neighbours 0 and the smallest normal
        right = np.clip(shift, 0, 60)
        kept = np.where(shift >= 0, self.significand >> right, self.significand << np.clip(-shift, 0, 60))
        rest = self.significand & ((np.int64(1) << right) - 1)
        code = (binade - fmt.normal_exponent) * 2**fmt.m + kept
        if not gradual:
            code = np.where(small, 0, code)
            rest = np.where(small & (flush or not fmt.zero), 0, rest)
        if not fmt.zero:
            code = np.where(small, 0, code - 2**fmt.m)
        elif not fmt.subnormals:
            code = np.where(code > 0, code - 2**fmt.m + 1, 0)
        return Split(code, rest, np.maximum(shift, 0))

    def _split_fixed(self, fmt: FixedSet, flush: bool) -> Split:
        assert fmt.bits <= 53
        # Python integers: the index of a large number has many digits, and wrapping needs them all.
        shift = -fmt.f - self.exponent
        right, left = np.maximum(shift, 0).astype(object), np.maximum(-shift, 0).astype(object)
        significand = self.significand.astype(object)
        kept = (significand >> right) << left
        rest = (significand - ((significand >> right) << right)).astype(np.int64)
        return Split(kept, rest, np.maximum(shift, 0))

    def round(self, fmt: FloatSet | FixedSet, mode: str, overflow: str = "ieee", flush: bool = False) -> np.ndarray:
        """The bit patterns that a deterministic mode gives."""
        split = self.split(fmt, flush)
        half = split.compared_with_half()
        odd = fmt.odd(split.low).astype(bool)
        inexact = split.rest > 0
        away = {
            "nearest_even": (half > 0) | ((half == 0) & odd),
            "nearest_away": half >= 0,
            "nearest_zero": half > 0,
            "up": inexact & ~self.negative,
            "down": inexact & self.negative,
            "toward_zero": np.zeros_like(inexact),
            "odd": inexact & ~odd,
        }[mode]
        return self._finish(fmt, split.low + (away & inexact), mode, overflow, flush)

    def round_drawn(
        self, fmt: FloatSet | FixedSet, mode: str, n: int, r: np.ndarray, overflow: str = "ieee", flush: bool = False
    ) -> np.ndarray:
        """The bit patterns that a stochastic mode gives, each element with its own n-bit integer r."""
        split = self.split(fmt, flush)
        rest, shift, r = split.rest.astype(object), split.shift.astype(object), r.astype(object)
        one = 1 << n
        if mode == "stochastic_equal":
            away = (split.rest > 0) & ((r >> (n - 1)) == 1).astype(bool)
        elif mode == "stochastic":
            away = ((rest << n) >> shift) + r >= one
        elif mode == "stochastic_b":
            away = ((rest << (n + 1)) >> shift) + 2 * r + 1 >= 2 * one
        else:
            assert mode == "stochastic_c"
            whole = (rest << n) >> shift
            left = 2 * ((rest << n) - (whole << shift)) - (np.full(len(rest), 1, object) << shift)
            away = whole + ((left > 0) | ((left == 0) & (whole % 2 == 1))) + r >= one
        return self._finish(fmt, split.low + away.astype(bool), mode, overflow, flush)

    def _finish(self, fmt: FloatSet | FixedSet, index: np.ndarray, mode: str, overflow: str, flush: bool) -> np.ndarray:
        negative = self.negative
        if not (isinstance(fmt, FloatSet) and fmt.signed):  # no sign without a magnitude
            zero = self.significand == 0
            if flush and isinstance(fmt, FloatSet):
                zero |= self.exponent + _bit_length(self.significand) - 1 < fmt.normal_exponent
            negative = negative & ~(zero & ~self.inf)
        if isinstance(fmt, FixedSet) and overflow == "wrap":
            wrapped = fmt.wrap(np.where(negative, -index, index))
            out = self._pack(np.ldexp(np.abs(wrapped).astype(np.float64), -fmt.f), wrapped < 0)
            beyond = np.zeros(len(index), bool)
        else:
            top = np.where(negative, fmt.top(True), fmt.top(False))
            beyond = (index > top).astype(bool)
            out = self._pack(*self._number(fmt, np.where(beyond, 0, index), negative))
        for sign in (False, True):
            for cause, infinite in ((beyond & ~self.inf, False), (self.inf, True)):
                where = cause & (negative == sign)
                if where.any():
                    out[where] = to_bits(overflowed(fmt, sign, mode, overflow, infinite), self.carrier)
        return np.where(self.nan, self.patterns, out)

    def _number(
        self, fmt: FloatSet | FixedSet, index: np.ndarray, negative: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(fmt, FixedSet):
            return np.ldexp(index.astype(np.float64), -fmt.f), negative & (index != 0)
        code = fmt.code(index)
        field, fraction = code >> fmt.m, code & (2**fmt.m - 1)
        normal = (field > 0) | (not fmt.zero)
        significand = fraction + (normal.astype(np.int64) << fmt.m)
        exponent = np.maximum(field, 1 if fmt.zero else 0) - fmt.bias - fmt.m
        magnitude = np.ldexp(significand.astype(np.float64), exponent)
        return magnitude, negative & ((significand != 0) | fmt.negative_zero)

    def _pack(self, magnitude: np.ndarray, negative: np.ndarray) -> np.ndarray:
        """The patterns of signed magnitudes; every conversion must be exact, or the carrier is too small."""
        narrow = {"float16": np.float16, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}
        with np.errstate(over="ignore", under="ignore"):
            held = magnitude.astype(narrow[self.carrier.name])
        words = held.view(f"uint{8 * held.itemsize}")
        if self.carrier.name == "bfloat16":
            lost = words & np.uint32(0xFFFF)
            words = (words >> 16).astype(np.uint16)
        else:
            lost = held.astype(np.float64) != magnitude
        inexact = (held.astype(np.float64) != magnitude) | (lost != 0)
        if inexact.any():
            raise ValueError(f"{self.carrier.name} does not hold {magnitude[inexact][0]}")
        return words | np.where(negative, self.carrier.words.type(self.carrier.sign), self.carrier.words.type(0))
