"""The interface of element formats: properties, values and codes; and the facts of a format."""

from __future__ import annotations

import abc
import copy
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np

from jchop._common.checks import FieldsRepr, as_numpy
from jchop._common.text import html

# == facts =============================================================================================================


def format_facts(fmt: Any) -> list[tuple[str, str]]:
    """Names and values of the properties of an element format or a scaled format.

    Example:
        >>> import jchop as jc
        >>> format_facts(jc.formats.float4_e2m1fn)[:2]
        [('bits', '4'), ('values', 'from -6 to 6')]
    """
    if hasattr(fmt, "element"):
        return _scaled_format_facts(fmt)
    facts = [("bits", str(fmt.bits)), ("values", f"from {short_number(fmt.min)} to {short_number(fmt.max)}")]
    for name, value in {
        "significand bits": fmt.precision,
        "smallest normal": fmt.smallest_normal,
        "smallest": fmt.smallest,
        "unit roundoff": fmt.unit_roundoff,
    }.items():
        facts += [] if value is None else [(name, short_number(value))]
    special = [
        name
        for name, has in {"infinities": fmt.has_inf, "NaN": fmt.has_nan, "-0": fmt.has_negative_zero}.items()
        if has
    ]
    return [*facts, ("also has", ", ".join(special) or "no infinities, no NaN, no -0")]


def _scaled_format_facts(fmt: Any) -> list[tuple[str, str]]:
    if fmt.channel is not None:
        groups = f"one scale for each index of axis {fmt.channel}"
    elif fmt.group is None:
        groups = "one scale for the tensor"
    else:
        groups = f"{fmt.group} elements along axis {fmt.axis} share a scale"
    facts = [("bits per element", f"{fmt.bits_per_element():.4g}"), ("groups", groups)]
    facts += [("element", f"{fmt.element}, from {short_number(fmt.element.min)} to {short_number(fmt.element.max)}")]
    facts += [("scale", f"{fmt.scale}, rule {fmt.rule}")]
    if fmt.sparse is not None:
        facts += [("sparse", f"{fmt.sparse[0]} of every {fmt.sparse[1]} numbers along axis {fmt.axis_of_sparse}")]
    return facts + ([("zero point", fmt.zero_point)] if fmt.zero_point else [])


def short_number(value: Any) -> str:
    """At most six digits; a power of two or another exact number that no float holds as c · 2^k."""
    if not isinstance(value, Fraction):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return f"{float(value / Fraction(2) ** exponent):.4g} · 2^{exponent}"


def format_html(fmt: Any) -> str:
    """A format as a fragment of HTML: its text, and its facts below."""
    return html.box(str(fmt), format_facts(fmt))


#: A value of a format: a float if binary64 holds it exactly, else a Fraction.
Number = float | Fraction

_MAX_TABLE_BITS = 16


class Dyadic(Fraction):
    """A fraction c 2^k other than 0, with c odd, that prints in this form: its decimal digits may be thousands."""

    __slots__ = ()

    def __str__(self) -> str:
        odd, exponent = self._parts
        if exponent == 0:
            return str(odd)
        return f"{'-' * (odd < 0)}2^{exponent}" if abs(odd) == 1 else f"{odd} * 2^{exponent}"

    def __repr__(self) -> str:
        odd, exponent = self._parts
        power = f" {'*' if exponent > 0 else '/'} 2**{abs(exponent)}" if exponent else ""
        return f"Fraction({odd}){power}"

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else str(self)

    @property
    def _parts(self) -> tuple[int, int]:
        zeros = (self.numerator & -self.numerator).bit_length() - 1
        return self.numerator >> zeros, zeros - (self.denominator.bit_length() - 1)


def exact_number(value: Fraction) -> Number:
    """`value` as a float if that is exact, else as a fraction."""
    try:
        result = float(value)
    except OverflowError:
        return Dyadic(value)
    return result if Fraction(result) == value else Dyadic(value)


def floor_log2(value: Fraction) -> int:
    """floor(log2 value) of a positive fraction."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


class ElementFormat(FieldsRepr, abc.ABC):
    """A finite set of real values, possibly with -0, infinities and NaN, and a bit pattern for each.

    A format is frozen and hashable, so it can be a static argument of `jax.jit`; equal formats share one trace.

    Example:
        >>> import jchop as jc
        >>> formats = jc.formats.bfloat16, jc.formats.int4.element, jc.formats.mxfp4
        >>> [isinstance(fmt, jc.formats.ElementFormat) for fmt in formats]
        [True, True, False]
    """

    #: Width of a code in bits.
    bits: int
    #: Whether F has negative values.
    signed: bool
    #: The name of a named format, which `str` prints; it is ignored by equality and dropped by `dataclasses.replace`.
    name: str | None = None

    # -- properties that each kind of format defines ------------------------------------------------------------------
    @property
    @abc.abstractmethod
    def max(self) -> Number:
        """Largest finite value."""

    @property
    @abc.abstractmethod
    def min(self) -> Number:
        """Smallest (most negative) finite value."""

    @property
    @abc.abstractmethod
    def smallest(self) -> Number | None:
        """Smallest positive value."""

    @abc.abstractmethod
    def value_of(self, code: int) -> Number | None:
        """The exact value of one code (-0.0, inf and nan as floats); None for an unused code."""

    @abc.abstractmethod
    def code_of(self, value: Number) -> int | None:
        """The code of one exact value; None if it is not in F."""

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The format in the text grammar, without its name."""

    def __str__(self) -> str:
        return self.name or self.text

    def _repr_html_(self) -> str:
        return format_html(self)

    def named(self, name: str) -> Self:
        """A copy that prints as `name`, which must be a name of the text grammar."""
        result = copy.copy(self)
        object.__setattr__(result, "name", name)
        return result

    # -- facts that most kinds share ------------------------------------------------------------------------------
    #: Whether F has infinities.
    has_inf: bool = False
    #: Whether F has a NaN code.
    has_nan: bool = False
    #: Whether F has no result for overflow, so that numbers beyond its largest value become that value.
    saturates: bool = True
    #: Whether F distinguishes -0 from +0.
    has_negative_zero: bool = False
    #: Significand bits p, including the leading one; None if values have no fixed precision.
    precision: int | None = None
    #: Exponent of the smallest normal value; None if F has no exponent.
    emin: int | None = None
    #: Exponent of the largest finite value; None if F has no exponent.
    emax: int | None = None
    #: Smallest positive value of full precision, 2^emin; None if F has no exponent.
    smallest_normal: Number | None = None
    #: Smallest positive subnormal value; None if F has none.
    smallest_subnormal: Number | None = None
    #: Distance from 1 to the next value, 2^(1-p); None if F has no fixed precision.
    eps: Number | None = None

    @property
    def unit_roundoff(self) -> Number | None:
        """Largest relative error of rounding to nearest, eps / 2; None if F has no fixed precision."""
        return None if self.eps is None else self.eps / 2

    # -- all values, and codes -----------------------------------------------------------------------------------------
    @property
    def code_dtype(self) -> np.dtype:
        """The unsigned integer dtype that holds a code."""
        return np.dtype(next(f"uint{width}" for width in (8, 16, 32, 64) if self.bits <= width))

    def values(self) -> np.ndarray:
        """All finite values of F, ascending, as float64 (-0 and +0 are one).

        If binary64 cannot hold the values (some wide P3109 formats), the result is an object array of exact fractions.

        Raises:
            ValueError: for a format of more than 16 bits.

        Example:
            >>> import jchop as jc
            >>> jc.formats.float4_e2m1fn.values()[7:].tolist()
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        if self.bits > _MAX_TABLE_BITS:
            raise ValueError(f"{self} has {self.bits} bits; values() lists formats of at most {_MAX_TABLE_BITS}")
        table = _decode_table(self)
        if table.dtype == object:
            return _exact_array(sorted({v for v in table if isinstance(v, Fraction) or abs(v) < np.inf}))
        return np.unique(table[np.isfinite(table)]) + 0.0

    def decode(self, codes: object) -> np.ndarray:
        """The values of bit patterns: float64, or exact fractions in an object array if binary64 is too narrow.

        Args:
            codes: integers in [0, 2^bits), any shape. An unused code decodes to NaN.

        Raises:
            TypeError, ValueError: for codes that are not integers, or out of range.

        Example:
            >>> import jchop as jc
            >>> jc.formats.float8_e4m3fn.decode([0x38, 0x7E, 0x7F]).tolist()
            [1.0, 448.0, nan]
        """
        array = as_numpy("codes", codes)
        if array.dtype.kind not in "ui" and array.size:
            raise TypeError(f"codes={codes!r} must be integers")
        if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << self.bits):
            raise ValueError(f"codes must lie in [0, 2^{self.bits}) for {self}; got {array.min()} to {array.max()}")
        if self.bits <= _MAX_TABLE_BITS:
            return np.asarray(_decode_table(self)[array.astype(np.int64)])
        return _exact_array([_value_or_nan(self.value_of(int(code))) for code in array.ravel()]).reshape(array.shape)

    def encode(self, values: object) -> np.ndarray:
        """The bit patterns of values of F, as unsigned integers of the smallest sufficient width.

        Args:
            values: numbers of F, any shape; round other numbers first. A NaN becomes the (positive) quiet NaN code.

        Raises:
            ValueError: for a value that is not in F; the message names it.

        Example:
            >>> import jchop as jc
            >>> jc.formats.float8_e4m3fn.encode([1.0, 448.0]).tolist()
            [56, 126]
        """
        array = as_numpy("values", values)
        if array.dtype.kind in "bcSUmM":
            raise TypeError(f"values of dtype {array.dtype} must be real numbers")
        exact = array.astype(np.float64) if array.dtype.kind not in "iuO" else array
        codes = np.empty(array.shape, self.code_dtype)
        out = codes.reshape(-1)
        for index, value in enumerate(exact.ravel().tolist()):
            code = self.code_of(value)
            if code is None:
                raise ValueError(
                    f"values[{index}]={value} is not a value of {self}; round it first (jchop.round_to_format)"
                )
            out[index] = code
        return codes


def _value_or_nan(value: Number | None) -> Number:
    return float("nan") if value is None else value


def _exact_array(values: list[Number]) -> np.ndarray:
    """float64, or an object array if float64 would round."""
    wide = any(isinstance(value, Fraction) for value in values)
    result = np.empty(len(values), object if wide else np.float64)
    result[:] = values
    return result


@lru_cache(maxsize=64)
def _decode_table(fmt: ElementFormat) -> np.ndarray:
    table = _exact_array([_value_or_nan(fmt.value_of(code)) for code in range(1 << fmt.bits)])
    table.setflags(write=False)
    return table
