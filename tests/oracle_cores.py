"""What a tensor core must give, from the written definition alone: Python integers, one dot at a time.

Definition: microsoft/MMA-Sim and arXiv 2511.10909. A term is (n, q, e): n 2^q with the exponent e by which terms are
aligned. Nothing here knows of limbs, floats or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

INF, NAN = math.inf, math.nan
#: An exponent below every other.
NOTHING = -(10**6)

Term = tuple[int, int, int]


@dataclass(frozen=True)
class Target:
    """The accumulator's format: fraction bits, least exponent, and whether it is rounded to nearest or cut."""

    bits: int
    emin: int
    emax: int
    nearest: bool = False


BINARY32 = Target(23, -126, 127)
NEAREST32 = Target(23, -126, 127, nearest=True)
E8M13 = Target(13, -126, 127)
HALF = Target(10, -14, 15, nearest=True)


def parts(x: float, emin: int) -> Term:
    """A finite number as (n, q, e), with e at least `emin`; zero has no exponent."""
    n, d = x.as_integer_ratio()
    if n == 0:
        return 0, 0, NOTHING
    q = 1 - d.bit_length()
    return n, q, max(n.bit_length() - 1 + q if n > 0 else (-n).bit_length() - 1 + q, emin)


def product(factors: Sequence[Term]) -> Term:
    return math.prod(n for n, _, _ in factors), sum(q for _, q, _ in factors), sum(e for _, _, e in factors)


def cut(term: Term, unit: int) -> int:
    """n 2^q in whole units 2^unit, toward zero."""
    n, q, _ = term
    up = q - unit
    if up >= 0:
        return n << up
    return -(-n >> -up) if n < 0 else n >> -up


def floor(n: int, q: int, unit: int) -> int:
    return n << q - unit if q >= unit else n >> unit - q


def rounded(n: int, q: int, to: Target) -> float:
    """n 2^q rounded once; 2^(emax + 1) and more is infinite. Zero is +0."""
    if n == 0:
        return 0.0
    magnitude = abs(n)
    e = max(magnitude.bit_length() - 1 + q, to.emin)
    down = e - to.bits - q
    if down > 0:
        kept, rest = magnitude >> down, magnitude & ((1 << down) - 1)
        half = 1 << down - 1
        kept += to.nearest and (rest > half or (rest == half and kept & 1))
        exponent = q + down
    else:
        kept, exponent = magnitude, q
    if kept.bit_length() + exponent > to.emax + 1:
        return math.copysign(INF, n)
    return math.copysign(math.ldexp(kept, exponent), n)


def special(c: float, products: Sequence[Sequence[float]]) -> float | None:
    """The sum if a term is infinite or NaN, else None."""
    total, finite = 0.0, True
    for factors in ((c,), *products):
        if all(map(math.isfinite, factors)):
            continue
        finite = False
        if any(math.isnan(x) or x == 0 for x in factors):
            return NAN
        total += math.prod(math.copysign(1, x) for x in factors) * INF  # inf - inf is NaN
    return None if finite else total


@dataclass(frozen=True)
class Core:
    """A unit: k, the fraction bits of the grid, the least exponent of operands, and the accumulator."""

    k: int
    bits: int
    emin: int
    target: Target
    apart: bool = False
    halves: bool = False
    scale_emin: int | None = None  # if elements have scales
    merged: int = 0  # products that are summed first, under one scale

    def step(self, c: float, a: Sequence[float], b: Sequence[float], *scales: Sequence[float]) -> float:
        """c plus the products of a block; `scales` of each element of a, and of b."""
        products = list(zip(a, b, *scales, strict=True))
        if self.apart:  # a product beyond float32 is infinite
            products = [(math.copysign(INF, x * y), 1.0) if abs(x * y) >= 2.0**128 else (x, y) for x, y in products]
        odd = special(c, products)
        if odd is not None:
            return odd
        if self.merged:
            return self.step_together(c, self.sums(a, b, *scales))
        factors = [[parts(x, self.emin) for x in v] for v in (a, b)]
        factors += [[parts(x, self.scale_emin or 0) for x in v] for v in scales]
        terms = [product(each) for each in zip(*factors, strict=True)]
        if self.halves:
            return self.step_halves(c, terms[::2], terms[1::2])
        terms = [term for term in terms if term[0]]
        return (self.step_apart if self.apart else self.step_together)(c, terms)

    def sums(self, a: Sequence[float], b: Sequence[float], *scales: Sequence[float]) -> list[Term]:
        """Exact sums of some products, times their scales, whose exponents alone count."""
        terms = []
        for i in range(0, len(a), self.merged):
            pairs = zip(a[i : i + self.merged], b[i : i + self.merged], strict=True)
            total = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
            n, q, e = product([parts(v[i], self.scale_emin or 0) for v in scales])
            if total and n:
                terms.append((n * total.numerator, q + 1 - total.denominator.bit_length(), e))
        return terms

    def step_halves(self, c: float, *halves: list[Term]) -> float:
        """The products of even and odd index are cut apart, then both sums are moved to one grid, downward."""
        cuts = []
        for half in halves:
            half = [term for term in half if term[0]]
            largest = max((e for _, _, e in half), default=NOTHING)
            cuts.append((sum(cut(term, largest - self.bits) for term in half), largest))
        largest = max(e for _, e in cuts)
        total = sum(floor(n, e - self.bits, largest - self.bits) for n, e in cuts if n)
        n, q, e = parts(c, self.target.emin) if c else (0, 0, -126)
        both = max(largest, e)
        unit = both - self.bits - 7
        first = floor(total, largest - self.bits, unit) if total else 0
        second = 0 if e < both - self.bits - 1 else floor(n, q, both - self.bits) << 7
        return rounded(first + second, unit, self.target)

    def step_together(self, c: float, terms: list[Term]) -> float:
        own = parts(c, self.target.emin) if c else (0, 0, -126)
        terms = [own, *terms]
        unit = max(e for _, _, e in terms) - self.bits
        return rounded(sum(cut(term, unit) for term in terms), unit, self.target)

    def step_apart(self, c: float, terms: list[Term]) -> float:
        n, q, e = parts(c, self.target.emin) if c else (0, 0, -126)
        largest = max((e for _, _, e in terms), default=NOTHING)
        total = sum(cut(term, largest - self.bits) for term in terms)
        both = max(largest, e)
        unit = both - self.bits - 7
        first = floor(total, largest - self.bits, unit) if total else 0
        second = floor(n, q, both - self.bits) << 7
        return rounded(first + second, unit, self.target)

    def dot(self, a: Sequence[float], b: Sequence[float], promote: int | None = None) -> float:
        """All products, block after block; `promote` of them at a time are added to a float32 total."""
        total = 0.0
        for start in range(0, len(a), promote or len(a)):
            stop = min(start + (promote or len(a)), len(a))
            c = 0.0
            for i in range(start, stop, self.k):
                j = min(i + self.k, stop)
                c = self.step(c, a[i:j], b[i:j])
            total = c if promote is None else nearest_sum(total, c)
        return total


def nearest_sum(x: float, y: float, flush: bool = False) -> float:
    """The float32 sum, to nearest even; x and y are float32 numbers, whose sum a Python float may round first."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    (n, d), (m, f) = x.as_integer_ratio(), y.as_integer_ratio()
    bits = max(d.bit_length(), f.bit_length())
    total = n * (1 << bits - d.bit_length()) + m * (1 << bits - f.bit_length())
    if total == 0:
        return x + y  # the sign of zero is that of IEEE 754
    out = rounded(total, 1 - bits, NEAREST32)
    return math.copysign(0.0, out) if flush and abs(out) < 2.0**-126 else out


def nearest_product(x: float, y: float, flush: bool = False) -> float:
    if not (math.isfinite(x) and math.isfinite(y)) or (x * y == 0 and (x == 0 or y == 0)):
        return x * y
    (n, d), (m, f) = x.as_integer_ratio(), y.as_integer_ratio()
    out = rounded(n * m, 2 - d.bit_length() - f.bit_length(), NEAREST32)
    sign = math.copysign(1, x) * math.copysign(1, y)
    return math.copysign(0.0, sign) if flush and abs(out) < 2.0**-126 else math.copysign(out, sign)


def flushed(x: float, emin: int) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**emin else x


def pairs_dot(a: Sequence[float], b: Sequence[float], block: int, flush: bool, emin: int) -> float:
    """CDNA1 and 2: c plus the pairwise sum of each block; with `flush` subnormal numbers become zero."""
    if flush:
        a, b = ([flushed(x, emin) for x in v] for v in (a, b))
    products = [nearest_product(x, y, flush) for x, y in zip(a, b, strict=True)]
    add: Callable[[float, float], float] = lambda x, y: nearest_sum(x, y, flush)  # noqa: E731

    def tree(v: list[float]) -> float:
        half = 1 << (len(v) - 1).bit_length() - 1 if len(v) > 1 else 0
        return v[0] if len(v) == 1 else add(tree(v[:half]), tree(v[half:]))

    c = 0.0
    for i in range(0, len(products), block):
        c = add(c, tree(products[i : i + block]))
    return c
