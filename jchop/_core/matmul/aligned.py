"""The static data of a tensor core, and the specs that it can have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jchop._common.bit_ops import FLOAT32, Carrier
from jchop._core.arithmetic.ranges import ValueRange, carrier_range, range_of, supports_operation
from jchop._spec.accumulation import MERGED, MatmulSpec
from jchop._spec.spec import Spec
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat
from jchop.formats.rounding import Overflow

__all__ = [
    "EXTRA_SUM_BITS",
    "LEAST_PRODUCT_EXPONENT",
    "MOST_WORD_BITS",
    "TensorCoreUnit",
    "is_float32_grid",
    "require_aligned_order",
]

#: The most fraction bits for which a product is cut to one word.
MOST_WORD_BITS = 28
#: What the sum of products keeps beyond the bits of c in ``aligned_apart``.
EXTRA_SUM_BITS = 7
#: The exponent by which products that are all zero are aligned without c; below that of every other product.
LEAST_PRODUCT_EXPONENT = 4 * (1 - FLOAT32.bias)


@dataclass(frozen=True)
class TensorCoreUnit:
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
        return self.spec.order.kind in ("aligned_apart", "aligned_halves")

    @property
    def halves(self) -> int:
        """Into how many parts, each aligned by itself, products go in turn."""
        return 2 if self.spec.order.kind == "aligned_halves" else 1

    @property
    def overflows(self) -> bool:
        """Whether a finite product may be 2^128 or more, and is then infinite."""
        return (
            self.spec.order.kind == "aligned_apart" and 2 * range_of(self.spec.operands, FLOAT32).top > FLOAT32.bias + 1
        )

    @property
    def merge_count(self) -> int:
        """How many products are summed before they are aligned, by their scales alone."""
        return MERGED if self.spec.order.kind == "aligned_sums" else 1

    @cached_property
    def operand_emin(self) -> int:
        """The least exponent of an operand."""
        return 1 - FLOAT32.bias if self.spec.operands is None else _least_format_exponent(self.spec.operands.element)

    @property
    def scale_emin(self) -> int:
        """The least exponent of a scale."""
        assert self.spec.operands is not None and self.spec.operands.scaled is not None
        return self.spec.operands.scaled.scale_format.emin

    @cached_property
    def sum_emin(self) -> int:
        """The least exponent of an accumulator that is not zero."""
        return 1 - FLOAT32.bias if self.spec.accumulate is None else _least_format_exponent(self.spec.accumulate.format)

    @cached_property
    def exact_floats(self) -> bool:
        """Whether the product of two significands is exact in float32."""
        operands = self.spec.operands
        return (operands is not None and operands.scaled is not None) or (
            2 * range_of(operands, FLOAT32).bits <= FLOAT32.fraction + 1
        )

    @cached_property
    def one_word(self) -> bool:
        """Whether the sum of all terms, and every term, has less than 31 bits."""
        return self.exact_floats and not self.apart and self.most_units < 1 << 30

    @property
    def most_units(self) -> int:
        """More than the sum of the magnitudes of all terms, in units of the grid of the sum."""
        largest = 4 if self.merge_count == 1 else 4 << 2 * self._element.top
        return (largest * self.length + 2) << (self.bits + EXTRA_SUM_BITS * self.apart)

    @property
    def _element(self) -> ValueRange:
        assert self.spec.operands is not None
        return range_of(Spec(self.spec.operands.element), FLOAT32)

    @property
    def group(self) -> int:
        """The number of terms whose sum is below 2^30."""
        return 1 << max(MOST_WORD_BITS - self.bits, 0)


def _least_format_exponent(fmt: ElementFormat | ScaledFormat) -> int:
    return max(fmt.emin, 1 - FLOAT32.bias) if isinstance(fmt, FloatFormat) else 1 - FLOAT32.bias


def require_aligned_order(spec: MatmulSpec, carrier: Carrier) -> None:
    """Refuses the arithmetic if its operands are not float32 numbers, or its sums cannot be rounded once in float32.

    Raises:
        ValueError: names the field.
    """
    has_scales = spec.operands is not None and spec.operands.scaled is not None
    own, whole = (
        carrier_range(carrier) if has_scales else range_of(spec.operands, carrier),
        carrier_range(FLOAT32),
    )
    if own.precision > whole.precision or own.quantum < whole.quantum or own.top > whole.top:
        raise ValueError(
            f"operands={None if spec.operands is None else str(spec.operands)!r} of {carrier.name} may not be numbers "
            f"of float32, in which order={str(spec.order)!r} is computed; cast the operands to float32"
        )
    total = spec.accumulate
    if total is None or (
        total.overflow is not Overflow.WRAP and (is_float32_grid(total) or supports_operation(total, FLOAT32))
    ):
        return
    raise ValueError(
        f"accumulate={str(total)!r}: order={str(spec.order)!r} rounds to binary32, or to formats that have two bits "
        "less than float32 everywhere, and does not wrap"
    )


def is_float32_grid(spec: Spec) -> bool:
    """Whether the format is float32's own grid."""
    fmt = spec.format
    return (
        isinstance(fmt, FloatFormat)
        and (fmt.frac_bits, fmt.emin, fmt.exact_max) == (FLOAT32.fraction, 1 - FLOAT32.bias, FLOAT32.max)
        and fmt.subnormals
        and fmt.zero
        and fmt.has_inf
        and not spec.flush
    )
