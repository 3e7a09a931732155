"""Blocks of elements that share a scale: the arithmetic of one tile, for every backend.

In a tile, one axis runs through a block. The scales of blocks are chosen by a rule. The numbers are divided by the
scales and rounded, then multiplied back or encoded, under a `ScaledPlan`. Kernels run this on their tiles. It is
integer arithmetic on bits: the exponents of scales come from exponent bits, and quotients are exact. So subnormal
numbers that a device reads as zero, and divisions that a compiler replaces by multiplications, do not change a
result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, enable_x64, lax

from jchop._common import bit_ops
from jchop._common.bit_ops import CARRIERS, FLOAT32, Carrier, join_sign, lax_clip, lax_where, split_sign, with_constant
from jchop._common.checks import check
from jchop._core.arithmetic import double_word, float64
from jchop._core.arithmetic.basic import multiply_and_round
from jchop._core.arithmetic.double_word import (
    Divisor,
    divisor_bits,
    divisor_of,
    divisor_of_product,
    exact_quotient,
    is_short_divisor,
    odd_quotient,
    quotient_by_constant,
    significand_of_extended,
)
from jchop._core.arithmetic.exact import (
    exact_overflow_mask,
    has_spare_bits,
    range_of,
    require_levels,
    require_operation,
    round_exact,
    round_to_levels,
)
from jchop._core.rounding.codes import (
    bits_to_float,
    decode_elements,
    decode_magnitude,
    encode_elements,
    extend_exponent,
)
from jchop._core.rounding.elements import overflow_mask, round_to_spec
from jchop._core.rounding.grid import CARRIER_SPECS, require_carrier
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._core.xla.sizes import if_static
from jchop._spec.spec import Gradient, Spec
from jchop.formats import CodebookFormat, ElementFormat, FloatFormat, ScaledFormat
from jchop.formats._catalogue import binary16, binary32
from jchop.formats.rounding import Overflow, Rounding
from jchop.formats.scaled.scale_rules import ScaleRule

# == scales ============================================================================================================
# The scales of blocks: chosen by a rule, stored, and read back.


Encoding = Literal["integers", "floats", "thresholds", "codebooks", "exact"]
Decoding = Literal["integers", "floats", "codebooks", "level_products", "exact"]

#: Scale formats whose scales are stored as numbers of a dtype; others are stored as codes.
_SCALE_NUMBER_DTYPES: dict[ElementFormat, str] = {spec.format: name for name, spec in CARRIER_SPECS.items()}
#: The format of the scale of a whole tensor.
TENSOR_SCALE = binary32
#: The safe range of scales: from 2^-SAFE_EXPONENT to 2^SAFE_EXPONENT.
SAFE_EXPONENT = 48
#: The most numbers without a branch: compiling both ways would take as long as a thousand calls save.
MOST_WITHOUT_BRANCH = 1 << 19
#: The most rows for which XLA's CPU backend also compares integers fast.
_MANY_ROWS = 32


@dataclass(frozen=True)
class ScaledPlan:
    """The static data of a scaled format in arrays of `carrier`.

    Args:
        fmt: the groups, and the rule and format of their scales.
        element: the format of the elements, and their rounding.
        carrier: the carrier of the numbers.
        of_scales: the plan of the scales if they are quantized again.
        corrected: the rounding of corrected scales, under the rule "eden"; None for another rule.
        backend: the kind of the program.
        encoding: the fastest exact way to the elements of a group; "exact" is the way of tiles (`elements`).
        decoding: the fastest exact way to the numbers of codes.
        float64: whether the program computes in float64 where it can.
        float64_elements: whether it finds the elements in float64.
        float64_numbers: whether it finds the rounded numbers and the scales in float64, too.
        in_safe_range: whether all scales are known to be in the safe range, and none is NaN. Then subnormal
            intermediate results have no effect.
    """

    fmt: ScaledFormat
    element: Spec
    carrier: Carrier
    of_scales: ScaledPlan | None = None
    corrected: Spec | None = None
    backend: Backend = PORTABLE
    encoding: Encoding = "exact"
    decoding: Decoding = "exact"
    float64: bool = False
    float64_elements: bool = False
    float64_numbers: bool = False
    in_safe_range: bool = False

    @cached_property
    def compute(self) -> Carrier:
        """The carrier of the arithmetic: float32 also for 16-bit data."""
        return CARRIERS["float64" if self.carrier.width == 64 else "float32"]

    @cached_property
    def narrow_spec(self) -> Spec | None:
        """The rounding of float32 results to a 16-bit carrier; None for another carrier."""
        return CARRIER_SPECS[self.carrier.name] if self.carrier.width == 16 else None

    @cached_property
    def rule(self) -> ScaleRule:
        """The rule that chooses the scales."""
        return self.fmt.scale_rule

    @cached_property
    def scale(self) -> FloatFormat:
        """The format to which the rule rounds scales."""
        return self.fmt.scale_format

    @cached_property
    def divisors(self) -> tuple[Fraction, ...]:
        """The divisors of the rule."""
        return self.rule.divisors(self.element.format)

    @cached_property
    def second(self) -> ScaledPlan | None:
        """The plan of groups with the rule's other levels."""
        if self.rule.second is None:
            return None
        element = replace(self.element, format=self.rule.second(self.element.format), flush=False)
        return replace(self, element=element, encoding="exact", decoding="exact")

    @cached_property
    def is_power(self) -> bool:
        """Whether every scale is a power of two."""
        return not self.rule.tensor_scale and (self.rule.gives_powers or not self.scale.frac_bits)

    @cached_property
    def largest_bits(self) -> int:
        """Magnitude bits of the largest element."""
        bits = self.compute.magnitude_bits(Fraction(self.element.format.max))
        assert bits is not None
        return bits

    @cached_property
    def scale_bits(self) -> tuple[int, int, int]:
        """Magnitude bits of the smallest scale, of the scale of a block of zeros, and of the largest scale."""
        fmt = self.scale
        smallest, largest = Fraction(fmt.smallest), Fraction(fmt.max)
        ends = (smallest, max(Fraction(1), smallest), largest)
        return tuple(self.compute.toward_zero(end)[0] for end in ends)  # type: ignore[return-value]

    @cached_property
    def exponents(self) -> tuple[int, int, int]:
        """Exponents of power-of-two scales: the least one, the one for a block of zeros, and the largest one."""
        fmt = self.scale
        least = fmt.emin - (fmt.frac_bits if fmt.subnormals and fmt.zero else 0)
        least = max(least, self.compute.tiny_exponent)
        return least, max(least, 0), min(fmt.emax, self.compute.bias)

    @cached_property
    def stores_exponents(self) -> bool:
        """Whether the code of a scale is its biased exponent."""
        fmt = self.scale
        return self.is_power and not fmt.frac_bits and not fmt.zero


@lru_cache(maxsize=1024)
def make_scaled_plan(spec: Spec, carrier: Carrier) -> ScaledPlan:
    """The Plan of a scaled format, if exact results are possible.

    Raises:
        ValueError: for an element or scale format that is too wide for the arithmetic's carrier, and for `sparse`.
    """
    assert spec.scaled is not None
    if spec.scaled.sparse is not None:
        raise ValueError(f"spec={str(spec)!r} drops numbers, which this operation cannot; leave sparse out")
    again = spec.scaled.scale
    of_scales = make_scaled_plan(Spec(again), FLOAT32) if isinstance(again, ScaledFormat) else None
    plan = ScaledPlan(spec.scaled, replace(spec, format=spec.element, gradient=Gradient()), carrier, of_scales)
    if plan.rule.fit == "eden":
        corrected = replace(plan.element, format=plan.scale, overflow=Overflow.SATURATE, flush=False)
        nearest = replace(plan.element, rounding=Rounding.NEAREST_EVEN, random_bits=None)
        plan = replace(plan, element=nearest, corrected=corrected)
    compute, element, scale = plan.compute, plan.element, Spec(plan.scale, overflow=Overflow.SATURATE)
    require_carrier(element, compute)
    if not _is_within_reach(element.format, compute):
        reach = 3 * compute.bias // 4
        raise ValueError(
            f"element={element} has values beyond 2^-{reach} ... 2^{reach}, which is all that scaled elements may have "
            f"in {compute.name}"
        )
    if plan.is_power:
        require_carrier(scale, compute)
    else:
        if not isinstance(element.format, CodebookFormat):
            require_operation(element, compute, "element")
        elif not element.rounding.stochastic:
            require_levels(element.format, element.rounding, compute)
        require_operation(scale, compute, "scale")
    for divisor in plan.divisors:
        if compute.magnitude_bits(divisor) is None:
            raise ValueError(f"element={element} gives the divisor {divisor}, which {compute.name} does not hold")
    if plan.rule.tensor_scale:
        _require_divisor_room(plan)
    return plan


def _is_within_reach(fmt: ElementFormat, carrier: Carrier) -> bool:
    """Whether all values are far from both ends of a carrier."""
    reach = Fraction(2) ** (3 * carrier.bias // 4)
    return 1 / reach <= Fraction(fmt.smallest or 1) <= Fraction(fmt.max) <= reach


def _require_divisor_room(plan: ScaledPlan) -> None:
    """Checks that a scale, and a divisor, times a float32 number fit into a divisor's significand."""
    room = divisor_bits(plan.compute) - (TENSOR_SCALE.frac_bits + 1)
    for name, bits in (
        (f"scale={plan.scale}", plan.scale.frac_bits + 1),
        (f"the largest value of element={plan.element}", divisor_parts(plan.divisors[0])[0].bit_length()),
    ):
        if bits > room:
            raise ValueError(
                f"rule={plan.rule.name!r}: {name} has {bits} significant bits, and {plan.compute.name} has room for "
                f"{room}"
            )


def divisor_parts(divisor: Fraction) -> tuple[int, int]:
    """A dyadic number as an odd integer times a power of two: (integer, exponent).

    Raises:
        ValueError: for a number that is not dyadic; binary formats have no such numbers.
    """
    shift = divisor.denominator.bit_length() - 1
    check(divisor.denominator == 1 << shift, f"{divisor} is no integer times a power of two")
    low = (divisor.numerator & -divisor.numerator).bit_length() - 1
    return divisor.numerator >> low, low - shift


def number_of_magnitude(magnitude: Array, carrier: Carrier) -> Array:
    """Magnitude bits as numbers."""
    return join_sign(jnp.zeros_like(magnitude), magnitude, carrier)


# -- choosing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockScales:
    """The scales of the blocks of a tile, with length 1 along the axes of a block.

    Args:
        value: the exponents if all scales are powers of two, else the magnitude bits of finite positive numbers. The
            numbers themselves, if they were found in float64.
        nan: whether each scale is NaN instead; None: none is.
        tensor: magnitude bits of the tensor's scale, if the rule has one; then the scales are the products of both.
        pair: float64 divisors of the elements, stacked with their inverses, computed once for each group, if any.
        second: whether each group has the rule's other levels; None: none has.
        quanta: what multiplies the elements (`product_quanta`), computed once for each group, if it is known.
    """

    value: Array
    nan: Array | None = None
    tensor: Array | None = None
    pair: Array | None = None
    second: Array | None = None
    quanta: Any = None


def are_in_safe_range(scales: BlockScales, plan: ScaledPlan) -> Array:
    """Whether each scale, and the tensor's scale if there is one, is in the safe range, and none is NaN."""
    low, high, compute = -SAFE_EXPONENT, SAFE_EXPONENT, plan.compute
    if not plan.is_power:
        low, high = ((exponent + compute.bias) << compute.fraction for exponent in (low, high))
    inside = (scales.value >= low) & (scales.value <= high)
    if scales.tensor is not None:
        inside &= (scales.tensor >= low) & (scales.tensor <= high)
    return inside if scales.nan is None else inside & (scales.nan ^ True)


def choose_scales(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, tensor: Array | None = None, stores: bool = False
) -> BlockScales:
    """The scales of blocks; numbers of float64 if the plan has `float64_numbers`.

    Args:
        x: a tile of numbers of the arithmetic's carrier; a block may be padded with zeros.
        axis: the axis, or several, of the blocks.
        plan: the plan with the rule.
        tensor: for a rule with a scale of the tensor, its bits, int32.
        stores: whether the results are codes, for which no new pages as large as `x` are written. Default False.
    """
    compute = plan.compute
    sign, magnitude = split_sign(x, compute)
    largest = _largest_magnitude(x, axis, plan, stores)
    tensor = None if tensor is None else tensor_scale_bits(tensor, largest.shape, plan)
    if plan.rule.carry is not None:
        value, beyond = choose_exponents(largest, plan)
        value = value if plan.is_power else _bits_of_exponents(value, plan)
    else:
        if len(plan.divisors) == 2:
            ends = (
                largest_finite_magnitude(lax_where(side, magnitude, 0), axis, plan) for side in (sign == 0, sign != 0)
            )
        else:
            ends = (largest,)
        ends, numbers = tuple(ends), plan.float64_numbers and not plan.is_power
        if numbers and all(_divides_in_float64(divisor, plan.scale, plan, tensor) for divisor in plan.divisors):
            value, beyond = _round_scales_in_float64(ends, tensor, plan)
        else:
            value, beyond = round_scales(ends, tensor, plan)
    if not plan.fmt.nan_block:
        return BlockScales(value, None, tensor)
    return BlockScales(
        value, beyond | (plan.backend.maximum(magnitude, axis=axis, keepdims=True) >= compute.inf), tensor
    )


def _largest_magnitude(x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, stores: bool) -> Array:
    """The largest finite magnitudes, found by a maximum of numbers if it is a normal number in each block.

    For many rows, XLA's CPU backend writes integers to memory before it finds the largest, on new pages if no result of
    that size exists. It does not write numbers, but their maximum may lose the numbers before a NaN. The sum of all
    numbers shows whether there is a NaN or an infinity.
    """
    axes, carrier, branch = (axis,) if isinstance(axis, int) else axis, plan.compute, plan.backend.branch

    def exactly() -> Array:  # from the numbers: operands of a branch are written to memory
        return largest_finite_magnitude(split_sign(x, carrier)[1], axis, plan)

    long = if_static(lambda: x.size > MOST_WITHOUT_BRANCH and math.prod(x.shape[i] for i in axes) > _MANY_ROWS)
    if branch is None or not (stores and long) or carrier.name != "float32" or x.ndim - 1 in axes:
        return exactly()
    by_numbers = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=axes, keepdims=True), carrier.work)
    normal = (by_numbers >= 1 << carrier.fraction) & (by_numbers < carrier.inf)
    return branch(jnp.all(normal) & jnp.isfinite(jnp.sum(x)), lambda: by_numbers, exactly)


def largest_finite_magnitude(magnitude: Array, axis: int | tuple[int, ...], plan: ScaledPlan) -> Array:
    """The largest finite magnitude of each block."""
    # One addition makes infinities and NaN negative, and keeps the order of the others.
    step = 1 << plan.compute.fraction
    largest = plan.backend.maximum(with_constant(lax.add, magnitude, step), axis=axis, keepdims=True)
    return with_constant(lax.sub, with_constant(lax.max, largest, step), step)


def choose_exponents(largest: Array, plan: ScaledPlan) -> tuple[Array, Array]:
    """The exponents of the rule, clamped to the scales' range; and whether they were above it."""
    compute, (low, zero, high) = plan.compute, plan.exponents
    exponent = ((extend_exponent(largest, compute) + exponent_carry(plan)) >> compute.fraction) - exponent_lag(plan)
    result = lax_where(largest == 0, zero, lax_clip(exponent, low, high))
    return result.astype(largest.dtype), exponent > high


def exponent_carry(plan: ScaledPlan) -> int:
    """The addend of the largest magnitude's bits, which carries into the exponent if the rule takes the next one."""
    fraction, carry = plan.compute.fraction, plan.rule.carry
    assert carry is not None
    return carry(plan.element.format, fraction, plan.largest_bits & (1 << fraction) - 1)


def exponent_lag(plan: ScaledPlan) -> int:
    """The number to subtract from the biased exponent."""
    return plan.largest_bits >> plan.compute.fraction


def round_scales(
    ends: tuple[Array, ...], tensor: Array | None, plan: ScaledPlan, divisors: tuple[Fraction, ...] | None = None
) -> tuple[Array, Array]:
    """The larger of the ends' magnitudes over their divisors, in the scale format; and whether it overflowed.

    Args:
        ends: magnitude bits, one array for each divisor.
        tensor: magnitude bits of the tensor's scale, if the rule has one; then there is one divisor.
        plan: the plan.
        divisors: Default None: the divisors of the rule.
    """
    pairs = zip(ends, plan.divisors if divisors is None else divisors, strict=True)
    if tensor is None:
        quotients = [_divide_by_constant(end, divisor, scale_rounding(plan), plan) for end, divisor in pairs]
    else:
        quotients = [_divide_by_tensor_scale(end, tensor, divisor, plan) for end, divisor in pairs]
    bits = quotients[0] if len(quotients) == 1 else jnp.maximum(*quotients)
    empty = (ends[0] == 0) if len(ends) == 1 else (ends[0] | ends[1]) == 0
    return clamp_scale(bits, empty, plan)


def _round_scales_in_float64(ends: tuple[Array, ...], tensor: Array | None, plan: ScaledPlan) -> tuple[Array, Array]:
    """`round_scales` in float64: numbers that are in the range of the scales."""
    with enable_x64(True):
        pairs = zip(ends, plan.divisors, strict=True)
        number = reduce(lax.max, (float64.quotient_in_float64(end, over, plan.scale, tensor) for end, over in pairs))
        low, zero, high = np.array(plan.scale_bits, np.uint32).view(np.float32).astype(np.float64)
        empty = with_constant(lax.eq, reduce(lax.bitwise_or, ends), 0)
        beyond = with_constant(lax.gt, number, high)
        if min(plan.divisors) < 1 or plan.scale != binary32 or tensor is not None:  # else no quotient is above
            number = with_constant(lax.min, number, high)
        return lax_where(empty, zero, with_constant(lax.max, number, low)), beyond


def clamp_scale(bits: Array, empty: Array, plan: ScaledPlan) -> tuple[Array, Array]:
    """The value of `BlockScales` for rounded quotients, or for zeros of an empty block; and whether they overflowed."""
    low, zero, high = plan.scale_bits
    scale = lax_where(empty, zero, lax_clip(bits, low, high)).astype(bits.dtype)
    return (_exponents_of_bits(scale, plan.compute) if plan.is_power else scale), bits > high


def _exponents_of_bits(power: Array, carrier: Carrier) -> Array:
    """The exponents of powers of two, from their magnitude bits."""
    return (extend_exponent(power, carrier) >> carrier.fraction) - carrier.bias


def scale_rounding(plan: ScaledPlan) -> Spec:
    """The rounding of a quotient to the scale format; it keeps overflow visible if overflow makes a NaN block."""
    return Spec(plan.scale, overflow=Overflow.IEEE if plan.fmt.nan_block else Overflow.SATURATE)


def _divide_by_constant(largest: Array, divisor: Fraction, spec: Spec, plan: ScaledPlan) -> Array:
    """Finite magnitudes over a divisor, rounded to nearest even under a spec.

    Quotients may be beyond the range of the format, where the caller clips them.
    """
    (count, exponent), carrier = divisor_parts(divisor), plan.compute
    fmt = spec.format
    if isinstance(fmt, FloatFormat) and _divides_in_float64(divisor, fmt, plan):
        return float64.quotient_bits(largest, divisor, fmt)
    own = spec.format == CARRIER_SPECS[carrier.name].format
    if not (is_short_divisor(count, carrier) and (own or has_spare_bits(spec.format, carrier))):
        x = number_of_magnitude(largest, carrier)  # the carrier may not hold the divisor
        exact = double_word.divide_exactly(x, jnp.full_like(x, float(count)), carrier, 2, -exponent)
        return split_sign(round_exact(exact, spec, carrier, None), carrier)[1]
    bits = quotient_by_constant(largest, count, exponent, carrier, odd=not own)
    if not own:
        return split_sign(round_to_spec(number_of_magnitude(bits, carrier), spec, carrier), carrier)[1]
    return bits


def _divides_in_float64(divisor: Fraction, fmt: FloatFormat, plan: ScaledPlan, tensor: Array | None = None) -> bool:
    """Whether `float64.quotient_bits` gives the quotients by a divisor, and by a tensor's scale if there is one."""
    bits = divisor_parts(divisor)[0].bit_length() + (0 if tensor is None else TENSOR_SCALE.frac_bits + 1)
    return plan.float64 and plan.compute.width == 32 and float64.can_divide_in_float64(bits, fmt)


def _divide_by_tensor_scale(largest: Array, tensor: Array, divisor: Fraction, plan: ScaledPlan) -> Array:
    """Magnitudes divided by the divisor and the tensor's scale, rounded once."""
    compute, (count, exponent) = plan.compute, divisor_parts(divisor)
    if _divides_in_float64(divisor, plan.scale, plan, tensor):
        return float64.quotient_bits(largest, divisor, plan.scale, tensor)
    whole = jnp.full_like(largest, count)
    product = divisor_of_product(whole, count.bit_length(), exponent, tensor, TENSOR_SCALE.frac_bits, compute)
    ends = not _is_within_reach(plan.scale, compute)
    odd = lax_where(largest == 0, 0, odd_quotient(largest, product, compute, ends))
    return split_sign(round_to_spec(number_of_magnitude(odd, compute), scale_rounding(plan), compute), compute)[1]


# -- the scale of a tensor ---------------------------------------------------------------------------------------------


def tensor_scale(x: Array, plan: ScaledPlan) -> Array:
    """The float32 scale of a whole tensor under which its blocks' scales have their whole range.

    The rule's constant, if it has one. Else the largest finite magnitude over a product, rounded to nearest, ties to
    even. The product is of the rule's top scale, as a rule the largest one, and the largest element. The result is 1 if
    no finite value other than zero is there.

    Args:
        x: numbers of the arithmetic's carrier.
        plan: a plan whose rule has a scale of the tensor.
    """
    compute = plan.compute
    if plan.rule.constant is not None:
        return jnp.float32(plan.rule.constant(plan.element.format))
    if not x.size:
        return jnp.ones((), jnp.float32)
    magnitude = split_sign(x, compute)[1]
    largest = largest_finite_magnitude(magnitude, tuple(range(x.ndim)), plan).reshape(())
    divisor = plan.rule.top(plan.scale) * Fraction(plan.element.format.max)
    bits = _divide_by_constant(largest, divisor, Spec(TENSOR_SCALE, overflow=Overflow.SATURATE), plan)
    quotient = number_of_magnitude(jnp.minimum(bits, compute.inf - 1), compute)
    codes = encode_elements(quotient, TENSOR_SCALE, compute).astype(jnp.int32)
    result = bits_to_float(jnp.maximum(codes, 1))
    return lax_where(largest == 0, jnp.float32(1), result)


def tensor_scale_bits(tensor: Array, shape: tuple[int, ...], plan: ScaledPlan) -> Array:
    """The tensor's scale, given as float32 bits, as bits of the arithmetic's carrier, in a shape."""
    bits = jnp.broadcast_to(tensor, shape)
    if plan.compute.width == 32:
        return bits
    return decode_magnitude(bits, TENSOR_SCALE, plan.compute)


# -- storing -----------------------------------------------------------------------------------------------------------


def scale_dtype(fmt: FloatFormat) -> jnp.dtype:
    """The dtype of stored scales of a format: the dtype with this format if there is one, else the dtype of codes."""
    return jnp.dtype(_SCALE_NUMBER_DTYPES.get(fmt, fmt.code_dtype))


def store_scales(scales: BlockScales, plan: ScaledPlan) -> Array:
    """The scales in their stored form, in `scale_dtype`."""
    compute, fmt = plan.compute, plan.scale
    if plan.stores_exponents:
        codes = scales.value + fmt.bias
        nan = fmt.code_of(float("nan"))
        if scales.nan is not None and nan is not None:
            codes = lax_where(scales.nan, nan, codes)
        return codes.astype(fmt.code_dtype)
    bits = scale_magnitude(scales, plan)
    bits = bits if scales.nan is None else lax_where(scales.nan, compute.nan, bits)
    numbers = number_of_magnitude(bits, compute)
    codes = encode_elements(
        numbers if scales.second is None else lax_where(scales.second, -numbers, numbers), fmt, compute
    )
    return lax.bitcast_convert_type(codes, scale_dtype(plan.scale)) if fmt in _SCALE_NUMBER_DTYPES else codes


def load_scales(array: Array, plan: ScaledPlan, tensor: Array | None = None) -> BlockScales:
    """The inverse of `store_scales`; `tensor` as for `choose_scales`."""
    compute, fmt = plan.compute, plan.scale
    codes = lax.bitcast_convert_type(array, fmt.code_dtype) if fmt in _SCALE_NUMBER_DTYPES else array
    second = None
    if plan.second is not None:
        sign = 1 << (fmt.bits - 1)
        second, codes = codes >= sign, codes & (sign - 1)
    bits = decode_magnitude(codes, fmt, compute)
    if tensor is not None:  # one number stays one, which would else be in memory for every block
        tensor = tensor_scale_bits(tensor, bits.shape if tensor.ndim else (1,) * bits.ndim, plan)
    nan = bits >= compute.inf if fmt.has_nan or fmt.has_inf else None
    bits = bits if nan is None else lax_where(nan, plan.scale_bits[1], bits)
    return BlockScales(_exponents_of_bits(bits, compute) if plan.is_power else bits, nan, tensor, None, second)


def scale_magnitude(scales: BlockScales, plan: ScaledPlan) -> Array:
    """The magnitude bits of scales, without the tensor's scale."""
    if not plan.is_power:
        return float64.narrow_to_bits(scales.value) if scales.value.dtype == jnp.float64 else scales.value
    return _bits_of_exponents(scales.value, plan)


def _bits_of_exponents(exponent: Array, plan: ScaledPlan) -> Array:
    """The magnitude bits of powers of two, from their exponents."""
    compute = plan.compute
    normal = (exponent + compute.bias) << compute.fraction
    if plan.exponents[0] > -compute.bias:
        return normal
    subnormal = lax.shift_left(jnp.ones_like(exponent), jnp.maximum(exponent - compute.tiny_exponent, 0))
    return lax_where(exponent > -compute.bias, normal, subnormal)


# == elements ==========================================================================================================


# -- dtypes ------------------------------------------------------------------------------------------------------------


def widen_16_bit(x: Array, carrier: Carrier) -> Array:
    """16-bit numbers in float32, by their bits; others unchanged."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return bits_to_float(bits)
    return decode_elements(lax.bitcast_convert_type(x, jnp.uint16), binary16, FLOAT32)


def narrow_16_bit(x: Array, carrier: Carrier) -> Array:
    """Numbers that `carrier` holds, in its dtype; the inverse of `widen_16_bit`."""
    if carrier.width > 16:
        return x
    if carrier.name == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(encode_elements(x, binary16, FLOAT32), jnp.float16)


# -- division ----------------------------------------------------------------------------------------------------------


def round_block_quotients(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """The quotients x / s rounded once to the element format, as numbers of the arithmetic's carrier."""
    compute, element = plan.compute, plan.element
    sign, magnitude = split_sign(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    levels = isinstance(element.format, CodebookFormat)
    if not plan.is_power and levels != element.rounding.stochastic:
        exact = exact_quotient(sign, magnitude, plain, _scale_divisor(scales, plan), compute)
        if isinstance(element.format, CodebookFormat):
            return _canonical_nan(round_to_levels(exact, element.format, element.rounding, compute), plan)
        return _canonical_nan(round_exact(exact, element, compute, word), plan)
    if plan.is_power:
        quotient = _divide_by_power(magnitude, scales.value, compute)
    else:
        quotient = odd_quotient(magnitude, _scale_divisor(scales, plan), compute)
    x = join_sign(sign, lax_where(plain, quotient, magnitude), compute)
    return _canonical_nan(round_to_spec(x, element, compute, word), plan)


def _canonical_nan(elements: Array, plan: ScaledPlan) -> Array:
    """Elements with every NaN replaced by the NaN of its code, or by the largest value if the format has no NaN."""
    compute, fmt = plan.compute, plan.element.format
    sign, magnitude = split_sign(elements, compute)
    nan = magnitude > compute.inf
    instead = compute.nan if fmt.has_nan else compute.toward_zero(Fraction(fmt.max))[0]
    return join_sign(lax_where(nan, 0, sign), lax_where(nan, instead, magnitude), compute)


def quotient_overflow_mask(x: Array, scales: BlockScales, plan: ScaledPlan, word: Array | None) -> Array:
    """Whether the rounded quotients x / s are beyond the ends of the element format; NaN counts as inside."""
    compute, element = plan.compute, plan.element
    sign, magnitude = split_sign(x, compute)
    plain = (magnitude != 0) & (magnitude < compute.inf)
    if plan.is_power:
        quotient = lax_where(plain, _divide_by_power(magnitude, scales.value, compute), magnitude)
        return overflow_mask(join_sign(sign, quotient, compute), element, compute, word)
    return exact_overflow_mask(
        exact_quotient(sign, magnitude, plain, _scale_divisor(scales, plan), compute), element, compute, word
    )


def _divide_by_power(magnitude: Array, exponent: Array, carrier: Carrier) -> Array:
    """Bits of magnitudes divided by 2^exponent, clamped to the normal range, which is wider than all formats."""
    bits = extend_exponent(magnitude, carrier)
    exponent = jnp.maximum(exponent, (bits >> carrier.fraction) - 2 * carrier.bias)
    return jnp.maximum(bits - (exponent << carrier.fraction), 1 << carrier.fraction)


def _scale_divisor(scales: BlockScales, plan: ScaledPlan) -> Divisor:
    compute = plan.compute
    if scales.tensor is None:
        return divisor_of(scales.value, compute)
    bits, width = extend_exponent(scales.value, compute), plan.scale.frac_bits + 1
    count = significand_of_extended(bits, compute) >> (compute.fraction + 1 - width)
    exponent = (bits >> compute.fraction) - compute.bias - (width - 1)
    return divisor_of_product(count, width, exponent, scales.tensor, TENSOR_SCALE.frac_bits, compute)


# -- multiplication ----------------------------------------------------------------------------------------------------


def multiply_by_scales(elements: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """The products s e rounded once to nearest, ties to even, as numbers of the plan's carrier."""
    compute = plan.compute
    if plan.is_power:
        result = multiply_by_power(elements, scales.value, compute)
        result = result if plan.narrow_spec is None else round_to_spec(result, plan.narrow_spec, compute)
    else:
        result = _multiply_by_any_scales(elements, scales, plan)
    return narrow_16_bit(put_nan(result, scales.nan, compute), plan.carrier)


def put_nan(x: Array, where: Array | None, carrier: Carrier) -> Array:
    """`x`, with NaN at the marked elements."""
    if where is None:
        return x
    sign, magnitude = split_sign(x, carrier)
    return join_sign(lax_where(where, 0, sign), lax_where(where, carrier.nan, magnitude), carrier)


def _multiply_by_any_scales(elements: Array, scales: BlockScales, plan: ScaledPlan) -> Array:
    """Elements times scales and tensor scale, rounded once to the carrier."""
    compute, spec = plan.compute, plan.narrow_spec
    if scales.tensor is not None:
        # The product of the two scales may be beyond either end of the carrier's range.
        whole = _scale_divisor(scales, plan)
        up = compute.work_width - 1 - divisor_bits(compute)
        v = double_word.multiply_by_wide_exactly(elements, whole.significand << up, whole.field - compute.bias, compute)
        return round_exact(v, spec, compute, None)
    scale = jnp.broadcast_to(number_of_magnitude(scale_magnitude(scales, plan), compute), elements.shape)
    ranges = range_of(plan.element, compute), range_of(Spec(plan.scale), compute)
    return multiply_and_round(elements, scale, spec, compute, None, *ranges)


def multiply_by_power(x: Array, exponent: Array, carrier: Carrier) -> Array:
    """x 2^exponent for zero, normal, infinite or NaN x; to nearest even in the subnormal range."""  # noqa: D403
    fraction, top = carrier.fraction, 2 * carrier.bias + 1
    sign, magnitude = split_sign(x, carrier)
    field = (magnitude >> fraction) + exponent
    right = lax_clip(1 - field, 0, fraction + 2)
    significand = significand_of_extended(magnitude, carrier)
    last = significand >> right & 1
    half = lax.shift_left(jnp.ones_like(right), right) >> 1
    small = (significand + jnp.maximum(half - 1 + last, 0)) >> right
    bits = lax_where(field > 0, (jnp.minimum(field, top) << fraction) | magnitude & bit_ops.low_mask(fraction), small)
    bits = lax_where(field >= top, carrier.inf, bits)
    return join_sign(sign, lax_where((magnitude == 0) | (magnitude >= carrier.inf), magnitude, bits), carrier)


# -- tiles -------------------------------------------------------------------------------------------------------------


def round_block_tile(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> Array:
    """A tile after quantization and dequantization.

    Args:
        x: numbers from `widen_16_bit`; a block may be padded with zeros.
        axis: the axis of the blocks.
        plan: the plan.
        word: for a stochastic element, a word for each number.
        tensor: for a rule with a scale of the tensor, its bits, int32.

    Returns:
        Numbers of the plan's carrier.
    """
    scales = choose_scales(x, axis, plan, tensor)
    return multiply_by_scales(round_block_quotients(x, scales, plan, word), scales, plan)


def quantize_block_tile(
    x: Array, axis: int | tuple[int, ...], plan: ScaledPlan, word: Array | None = None, tensor: Array | None = None
) -> tuple[Array, Array]:
    """The codes of a tile's elements, not packed, and its stored scales with length 1 along `axis`."""
    scales = choose_scales(x, axis, plan, tensor)
    elements = round_block_quotients(x, scales, plan, word)
    return encode_elements(elements, plan.element.format, plan.compute), store_scales(scales, plan)
