"""Soft errors: bits of stored codes that flip at random."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.bit_ops import CARRIERS, enable_x64_for, split_sign
from jchop._common.checks import check, check_choice, check_float
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit
from jchop._core.arithmetic.exact import holds_format
from jchop._core.rounding.codes import decode_elements, encode_elements
from jchop._core.rounding.random_bits import seed_words, stream_words
from jchop._core.scaled.elements import narrow_16_bit, widen_16_bit
from jchop._round.arguments import JCHOP_SCOPE, carrier_of_dtype, check_key, mark_results, run_numpy
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import SpecLike, as_spec
from jchop.formats import ElementFormat, FloatFormat, UniformFormat

#: Numbers folded into the key for the words of the flips; the key itself is for the rounding.
_FLIP_STREAM, _BIT_STREAM = 1, 2
_FLIP_CHOICES = ("significand", "code")
#: The widest codes of a format that is not a float.
_WIDEST_FLIP_CODE = 16


def flip_bits(
    x: Any, spec: SpecLike, p: float, key: Array, *, where: Literal["significand", "code"] = "significand"
) -> Any:
    """`x` rounded to a format; then, with probability `p`, one random bit of the code of each element is flipped.

    This simulates soft errors in stored numbers, like the options ``flip`` and ``p`` of MATLAB's *chop* (Higham and
    Pranesh, *Simulating low precision floating-point arithmetic*, 2019). Elements are independent, and all bits that
    may flip are equally likely.

    *Bits.* Let ``W`` be the 64-bit word of an element (`jchop.random_bits`) under ``jax.random.fold_in(key, 1)``, and
    ``w`` its 32-bit word under ``fold_in(key, 2)``. The element is flipped if ``W < p 2^64``. Of the n bits that may
    flip, counted from the lowest, bit ``floor((w >> 8) n / 2^24)`` is flipped. A stochastic spec rounds with `key`
    itself.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; NumPy gives NumPy, JAX gives JAX.
        spec: the rounding of `x`: a `Spec`, an element format, or text.
        p: the probability, a Python number from 0 to 1.
        key: a typed key (`jax.random.key`).
        where: ``"significand"`` (default): the fraction bits of a float, and all but the sign of fixed point and
            integers, in two's complement. Infinities, NaN, and the zeros of a float format without subnormals stay.
            ``"code"``: any bit of the code, including sign and exponent; values without a code in the format stay.

    Returns:
        An array of the shape and dtype of `x`. A flipped code that is unused in the format becomes NaN. The derivative
        is the derivative of the rounding: the flip passes tangents through.

    Raises:
        TypeError: for a complex or integer `x`, a key that is not a typed key, or a `p` that is not a number.
        ValueError: for a `p` outside of [0, 1], a scaled format, or a format without bits to flip. Also for a format
            other than a float with codes of more than 16 bits. For a dtype that lacks values of the format, as float16
            lacks values of binary32.

    Example:
        >>> import jax, numpy as np, jchop as jc
        >>> jc.flip_bits(np.ones(6, np.float32), "e5m2", 0.5, jax.random.key(0)).tolist()
        [1.0, 1.5, 1.0, 1.0, 1.5, 1.0]
    """
    spec = as_spec(spec)
    check_choice("where", where, _FLIP_CHOICES)
    count = _count_flip_bits(spec.format, where)
    last = _last_flip_word(p)
    check(key is not None, "key=None, but bits flip at random: pass a typed key, for example key=jax.random.key(0)")
    check_key("key", key)
    rounded_x = round_to_format(x, spec, key)
    # Refuse a carrier that lacks values of `fmt`, because a flip may return any of them.
    carrier = carrier_of_dtype(rounded_x.dtype, complex_too=False)
    if not holds_format(spec.format, carrier):
        raise ValueError(
            f"x has dtype {carrier.name}, which lacks values of {spec.format} that a flipped bit may give; cast it"
        )
    if last is None:
        return rounded_x
    ends = np.array([last >> 32, last & 0xFFFF_FFFF], np.uint32)
    flip = partial(_flip_random_bits, fmt=spec.format, where=where, count=count)
    with enable_x64_for(rounded_x.dtype), jax.named_scope(JCHOP_SCOPE):
        if isinstance(rounded_x, Array):
            return mark_results(flip(rounded_x, key, ends))
        result = run_numpy(lambda: flip(np.asarray(rounded_x), key, ends))
    return result if isinstance(x, np.ndarray) else result[()]


def _count_flip_bits(fmt: ElementFormat, where: str) -> int:
    """The number of low bits of a code that may flip."""
    if not isinstance(fmt, FloatFormat) and fmt.bits > _WIDEST_FLIP_CODE:
        raise ValueError(
            f"spec={str(fmt)!r} has codes of {fmt.bits} bits; bits flip in codes of at most {_WIDEST_FLIP_CODE}"
        )
    if where == "code":
        return fmt.bits
    if isinstance(fmt, FloatFormat):
        count = fmt.frac_bits
    else:
        count = fmt.bits - fmt.signed if isinstance(fmt, UniformFormat) else 0
    if count == 0:
        raise ValueError(f"spec={str(fmt)!r} has no significand bits; where='code' flips bits of its codes")
    return count


def _last_flip_word(p: float) -> int | None:
    """The largest 64-bit word for which an element is flipped; None if there is none."""
    p = check_float("p", p, 0, 1)
    return math.ceil(Fraction(p) * 2**64) - 1 if p else None


@partial(always_jit, static_argnames=("fmt", "where", "count"))
def _flip_random_bits(x: Array, key: Array, ends: Array, *, fmt: ElementFormat, where: str, count: int) -> Array:
    whether, which = (seed_words(jax.random.fold_in(key, number)) for number in (_FLIP_STREAM, _BIT_STREAM))
    high, low = stream_words(whether, x.shape, width=64)
    hit = (high < ends[0]) | ((high == ends[0]) & (low <= ends[1]))
    word = stream_words(which, x.shape)
    bit = ((word >> np.uint32(8)) * np.uint32(count)) >> np.uint32(24)
    return _flip_with_tangents(x, hit, bit, fmt, where)


@partial(CustomJvp, nondiff_argnums=(3, 4))
def _flip_with_tangents(x: Array, hit: Array, bit: Array, fmt: ElementFormat, where: str) -> Array:
    carrier = CARRIERS[x.dtype.name]
    compute = CARRIERS["float64" if carrier.width == 64 else "float32"]
    codes = encode_elements(widen_16_bit(x, carrier), fmt, compute)
    one = jnp.ones_like(codes)
    new_values = narrow_16_bit(decode_elements(codes ^ (one << bit.astype(codes.dtype)), fmt, compute), carrier)
    hit = hit & _may_flip(x, fmt, where)
    return jnp.where(hit, new_values, x)


@_flip_with_tangents.defjvp
def _flip_jvp(fmt: ElementFormat, where: str, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _flip_with_tangents(*primals, fmt, where), tangents[0]


def _may_flip(x: Array, fmt: ElementFormat, where: str) -> Array:
    """Which elements of `x` have a code with bits that may flip; tested on bits, as subnormals may be read as zero."""
    carrier = CARRIERS[x.dtype.name]
    _, magnitude = split_sign(x, carrier)
    may = magnitude < carrier.inf
    if where == "code":
        return may | ((magnitude == carrier.inf) & fmt.has_inf) | ((magnitude > carrier.inf) & fmt.has_nan)
    return may & (magnitude != 0) if isinstance(fmt, FloatFormat) and not fmt.subnormals else may
