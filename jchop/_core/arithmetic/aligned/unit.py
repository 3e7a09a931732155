"""The static data of a tensor core, and the specs that it can have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jchop._bits import CARRIERS, Carrier
from jchop._core.arithmetic.ranges import carrier_range, range_of, supports
from jchop.accumulation import MatmulSpec
from jchop.formats import FloatFormat
from jchop.rounding import Overflow
from jchop.spec import Spec

__all__ = ["LEAST_PRODUCT", "MORE", "Unit", "is_own", "require_aligned"]

_CARRIER = CARRIERS["float32"]
_FRACTION, _BIAS = _CARRIER.fraction, _CARRIER.bias
#: What the sum of products keeps beyond the bits of c in ``aligned_apart``.
MORE = 7
#: The exponent by which products that are all zero are aligned without c; below that of every other product.
LEAST_PRODUCT = 4 * (1 - _BIAS)


@dataclass(frozen=True)
class Unit:
    """The static data of a tensor core that adds `length` products at a time."""

    spec: MatmulSpec
    length: int

    @property
    def bits(self) -> int:
        """F, the fraction bits of the grid."""
        assert self.spec.order.bits is not None
        return self.spec.order.bits

    @property
    def apart(self) -> bool:
        """Whether the products are aligned without c."""
        return self.spec.order.kind == "aligned_apart"

    @cached_property
    def operand_emin(self) -> int:
        """The least exponent of an operand."""
        return _least_exponent(self.spec.operands)

    @cached_property
    def sum_emin(self) -> int:
        """The least exponent of an accumulator that is not zero."""
        return _least_exponent(self.spec.accumulate)

    @cached_property
    def exact_floats(self) -> bool:
        """Whether the product of two significands is exact in float32."""
        return 2 * range_of(self.spec.operands, _CARRIER).bits <= _FRACTION + 1

    @cached_property
    def one_word(self) -> bool:
        """Whether the sum of all terms, and every term, has less than 31 bits."""
        return self.exact_floats and not self.apart and self.most_units < 1 << 30

    @property
    def most_units(self) -> int:
        """More than the sum of the magnitudes of all terms, in units of the grid of the sum."""
        return (4 * self.length + 2) << self.bits + MORE * self.apart

    @property
    def group(self) -> int:
        """The number of terms whose sum is below 2^30."""
        return 1 << max(28 - self.bits, 0)


def _least_exponent(spec: Spec | None) -> int:
    least = 1 - _BIAS
    fmt = None if spec is None else spec.format
    return max(fmt.emin, least) if isinstance(fmt, FloatFormat) else least


def require_aligned(spec: MatmulSpec, carrier: Carrier) -> None:
    """Refuses the arithmetic if its operands are not float32 numbers, or its sums cannot be rounded once in float32.

    Raises:
        ValueError: names the field.
    """
    own, held = range_of(spec.operands, carrier), carrier_range(_CARRIER)
    if own.precision > held.precision or own.quantum < held.quantum or own.top > held.top:
        raise ValueError(
            f"operands={None if spec.operands is None else str(spec.operands)!r} of {carrier.name} may not be numbers "
            f"of float32, in which order={str(spec.order)!r} is computed; cast the operands to float32"
        )
    total = spec.accumulate
    if total is None or (total.overflow is not Overflow.WRAP and (is_own(total) or supports(total, _CARRIER))):
        return
    raise ValueError(
        f"accumulate={str(total)!r}: order={str(spec.order)!r} rounds to binary32, or to formats that have two bits "
        "less than float32 everywhere, and does not wrap"
    )


def is_own(spec: Spec) -> bool:
    """Whether the format is float32's own grid."""
    fmt = spec.format
    return (
        isinstance(fmt, FloatFormat)
        and (fmt.frac_bits, fmt.emin, fmt.exact_max) == (_FRACTION, 1 - _BIAS, _CARRIER.max)
        and fmt.subnormals
        and fmt.zero
        and fmt.has_inf
        and not spec.flush
    )
