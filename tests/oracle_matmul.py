"""What a sum of products must be, from the written rules alone: exact fractions, one operation at a time.

Every product and every sum is formed exactly and then rounded once, as `oracle.round_exact` does it. The orders follow
their definitions word for word; nothing here knows how an array program arranges the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import oracle
import oracle_arithmetic
from oracle import ZERO, Carrier, Value

#: The random word of an operation: words("product" or "accumulate", step).
Words = Callable[[str, int], int]


@dataclass(frozen=True)
class How:
    """One rounding: the values, the mode, what happens at the ends, and how many random bits are read."""

    fmt: oracle.Set
    mode: str = "nearest_even"
    overflow: str = "ieee"
    flush: bool = False
    random_bits: int | None = None


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of products and of sums (None: the carrier's own, to nearest even), and the order."""

    product: How | None
    accumulate: How | None
    carrier: Carrier
    order: str = "sequential"
    block: int = 0
    fused: bool = False


# -- one rounding ------------------------------------------------------------------------------------------------------


def rounded(x: Value, how: How | None, carrier: Carrier, word: int) -> Value:
    """`x` rounded once; of a word of the carrier's width the top bits are read."""
    if how is None:
        return _round(x, How(oracle.ieee(carrier.e, carrier.m)), 1, 0)
    width = 64 if carrier.bits == 64 else 32
    # Variants B and C look one bit further than they draw, so they have one bit less.
    n = how.random_bits or width - (how.mode in ("stochastic_b", "stochastic_c"))
    return _round(x, how, n, word >> (width - n))


def _round(x: Value, how: How, n: int, r: int) -> Value:
    """`oracle.round_exact`, and where nothing special can happen its rule without its search for the neighbours."""
    fmt = how.fmt
    grid = isinstance(fmt, oracle.FloatSet | oracle.FixedSet)
    if grid and fmt.signed and isinstance(x, Fraction) and x != 0 and not how.flush:
        low, negative = _index_below(fmt, abs(x)), x < 0
        below, above = fmt.value(low), fmt.value(low + 1)
        assert below <= abs(x) < above
        nu = (abs(x) - below) / (above - below)
        index = low + oracle.moves_away(how.mode, nu, fmt.odd(low), negative, n, r)
        if 0 < index <= fmt.top(negative):
            return -fmt.value(index) if negative else fmt.value(index)
    return oracle.round_exact(fmt, x, how.mode, how.overflow, flush=how.flush, n=n, r=r)


def _index_below(fmt: oracle.FloatSet | oracle.FixedSet, magnitude: Fraction) -> int:
    """The number of the largest magnitude of the grid that is not above; the caller checks it."""
    if isinstance(fmt, oracle.FixedSet):
        return int(magnitude / fmt.value(1))
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    e -= magnitude < oracle.pow2(e)
    if e < fmt.normal_exponent:
        return int(magnitude / oracle.pow2(fmt.normal_exponent - fmt.m)) if fmt.subnormals and fmt.zero else 0
    code = (e + fmt.bias - 1) * 2**fmt.m + int(magnitude / oracle.pow2(e - fmt.m))
    return code if fmt.subnormals or not fmt.zero else code - 2**fmt.m + 1


# -- one output element ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """The sum of a_k b_k in a given arithmetic."""

    a: Sequence[Value]
    b: Sequence[Value]
    arithmetic: Arithmetic
    words: Words

    def result(self) -> Value:
        if not self.a:
            return ZERO
        return {
            "sequential": lambda: self.sequential(0, len(self.a)),
            "blocked": self.blocked,
            "pairwise": self.pairwise,
            "matrix_unit": self.matrix_unit,
        }[self.arithmetic.order]()

    def exact(self, k: int) -> Value:
        return oracle_arithmetic.multiply(self.a[k], self.b[k])

    def product(self, k: int) -> Value:
        """P(a_k b_k), drawn at step k."""
        arithmetic = self.arithmetic
        return rounded(self.exact(k), arithmetic.product, arithmetic.carrier, self.words("product", k))

    def add(self, x: Value, y: Value, step: int) -> Value:
        """A(x + y), drawn at `step`."""
        how = self.arithmetic.accumulate
        total = oracle_arithmetic.add(x, y, down=how is not None and how.mode == "down")
        return rounded(total, how, self.arithmetic.carrier, self.words("accumulate", step))

    def sequential(self, start: int, stop: int) -> Value:
        c: Value = ZERO
        for k in range(start, stop):
            c = self.add(c, self.exact(k) if self.arithmetic.fused else self.product(k), k)
        return c

    def blocks(self) -> list[tuple[int, int]]:
        length, count = self.arithmetic.block, len(self.a)
        return [(start, min(start + length, count)) for start in range(0, count, length)]

    def blocked(self) -> Value:
        c: Value = ZERO
        for j, (start, stop) in enumerate(self.blocks()):
            c = self.add(c, self.sequential(start, stop), len(self.a) + j)
        return c

    def pairwise(self) -> Value:
        if len(self.a) > 1:
            return self.part(0, len(self.a))
        how = self.arithmetic.accumulate
        return rounded(self.product(0), how, self.arithmetic.carrier, self.words("accumulate", 0))

    def part(self, start: int, stop: int) -> Value:
        if stop - start == 1:
            return self.product(start)
        half = 1
        while 2 * half < stop - start:
            half *= 2
        return self.add(self.part(start, start + half), self.part(start + half, stop), start + half)

    def matrix_unit(self) -> Value:
        """Defined by the carrier's dot, hence only where the sum of a block, in any order, is exact in the carrier."""
        c: Value = ZERO
        for j, (start, stop) in enumerate(self.blocks()):
            d: Value = ZERO
            for k in range(start, stop):
                d = oracle_arithmetic.add(d, self.exact(k))
            oracle.to_bits(d, self.arithmetic.carrier)  # ValueError where the carrier does not hold it
            c = self.add(c, d, j)
        return c
