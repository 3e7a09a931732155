"""A format's values as bit patterns of a carrier: the static data for rounding to an evenly spaced grid.

Within a binade of the carrier the values of a floating-point or fixed-point format are evenly spaced, so rounding drops
the low d bits of the magnitude. With E the carrier's biased exponent,

    d = max(D, K - E),

where D = M - m belongs to the format's full precision and K to its smallest spacing (subnormals, or the quantum of
fixed point). Below the smallest positive value T the neighbours are 0 and T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import jax

from jchop._common.bit_ops import CARRIERS, Carrier
from jchop._spec.spec import Spec
from jchop.formats import (
    CodebookFormat,
    ElementFormat,
    FloatFormat,
    HiFloat8Format,
    LogTakumFormat,
    StringFormat,
    TaperedFormat,
    UniformFormat,
)
from jchop.formats.rounding import Overflow, Rounding


@dataclass(frozen=True)
class Grid:
    """The static numbers of one format on one carrier; all `*_bits` are magnitude bits."""

    fmt: ElementFormat
    carrier: Carrier
    drop: int  # D: bits dropped at full precision
    tiny_exponent: int  # T = 2^tiny_exponent
    tiny_bits: int  # T; 0 if no value of the carrier lies between 0 and T
    top_bits: int  # the largest value
    bottom_bits: int  # the smallest (most negative) value
    spacing: int | None = None  # K; None if d = D everywhere above T
    deep: bool = False  # whether the carrier's subnormals are normal values of the format; then d is smaller
    deep_least: int = 0  # the least d there, from the format's own subnormals
    parity: int = 0  # added to the magnitude before its bit d is read as the last bit of the format's significand
    deep_parity: int = 0  # the same for a precision of one bit in the carrier's subnormals: there the exponent is read
    normal_bits: int = 0  # the smallest normal value; 0 if there is none
    taper: StringFormat | None = None  # a format whose numbers are cut as strings, not on an even grid
    narrows: tuple[int, ...] = ()  # exponents k: from k and -k on, one bit more is dropped

    @property
    def zero(self) -> bool:
        """Whether the format has a zero."""
        return _format_has_zero(self.fmt)


@lru_cache(maxsize=1024)
def make_grid(fmt: ElementFormat, carrier: Carrier) -> Grid:
    """The Grid of `fmt`, not a codebook, on `carrier`, which must hold its results (see `require_carrier`)."""
    if isinstance(fmt, TaperedFormat):
        return _tapered_grid(fmt, carrier)
    assert isinstance(fmt, FloatFormat | UniformFormat)
    tiny = _tiny_exponent(fmt)
    spacing = tiny + carrier.bias + carrier.fraction
    if isinstance(fmt, FloatFormat):
        drop = max(carrier.fraction - fmt.frac_bits, 0)
        has_subnormals = fmt.subnormals and fmt.zero and fmt.frac_bits > 0
        deep = drop > 0 and fmt.emin < 1 - carrier.bias
        normal = _bits_or_end(Fraction(2) ** fmt.emin, carrier)
        # With one bit of precision a code's last bit is the last bit of its exponent.
        lag = None if fmt.frac_bits else fmt.bias - carrier.bias
    else:
        drop, has_subnormals, deep, normal, lag = 0, True, False, 0, None
    odd = (tiny + carrier.bias + 1 if lag is None else lag) % 2
    return Grid(
        fmt=fmt,
        carrier=carrier,
        drop=drop,
        spacing=spacing if has_subnormals and spacing - 1 > drop else None,
        deep=deep,
        deep_least=max(tiny - carrier.tiny_exponent, 0) if has_subnormals else 0,
        tiny_exponent=tiny,
        tiny_bits=_bits_or_end(Fraction(2) ** tiny, carrier)
        if tiny > carrier.tiny_exponent or not _format_has_zero(fmt)
        else 0,
        parity=odd << carrier.fraction,
        deep_parity=(lag or 0) + 1 - carrier.fraction,
        normal_bits=normal,
        top_bits=_bits_or_end(Fraction(fmt.max), carrier),
        bottom_bits=_bits_or_end(Fraction(fmt.min), carrier) if fmt.signed else 0,
    )


def _tapered_grid(fmt: TaperedFormat, carrier: Carrier) -> Grid:
    """The ends of a tapered format; the fields of an even grid are those of the most fraction bits, or of strings."""
    of_strings = isinstance(fmt, StringFormat)
    top = _bits_or_end(Fraction(fmt.max), carrier)
    return Grid(
        fmt=fmt,
        carrier=carrier,
        drop=0 if of_strings else carrier.fraction - fmt.most_fraction_bits,
        tiny_exponent=fmt.last_place,
        tiny_bits=_bits_or_end(Fraction(fmt.smallest or 0), carrier),
        top_bits=top,
        bottom_bits=top,
        taper=fmt if of_strings else None,
        narrows=fmt.narrows if isinstance(fmt, HiFloat8Format) else (),
    )


def _format_has_zero(fmt: ElementFormat) -> bool:
    return not isinstance(fmt, FloatFormat) or fmt.zero


def _tiny_exponent(fmt: FloatFormat | UniformFormat) -> int:
    if isinstance(fmt, UniformFormat):
        return -fmt.frac_bits
    return fmt.emin - (fmt.frac_bits if fmt.subnormals and fmt.zero else 0)


def _bits_or_end(value: Fraction, carrier: Carrier) -> int:
    """Magnitude bits; for numbers beyond the carrier's range, its end, which no input exceeds.

    Only wrapping allows an end that the carrier does not hold; then only infinities become this end, rounded toward
    zero.
    """
    return min(carrier.toward_zero(value)[0], carrier.inf - 1)


def most_random_bits(spec: Spec, carrier: Carrier) -> int:
    """The largest `random_bits` of a stochastic mode: a word, minus one bit for variants B and C."""
    return carrier.work_width - (spec.rounding in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C))


def carrier_holds(spec: Spec, carrier: Carrier) -> bool:
    """Whether every result of rounding values of `carrier` under `spec` is a value of `carrier`."""
    fmt = spec.format
    if isinstance(fmt, CodebookFormat):
        return carrier.holds_all(fmt.levels)
    if isinstance(fmt, TaperedFormat):
        ends = (Fraction(fmt.smallest or 0), Fraction(fmt.max))
        return ends[0] >= Fraction(2) ** (1 - carrier.bias) and ends[1] <= carrier.max
    tiny = _tiny_exponent(fmt)  # type: ignore[arg-type]
    if Fraction(2) ** tiny > carrier.max or (not _format_has_zero(fmt) and tiny < carrier.tiny_exponent):
        return False
    if spec.overflow is Overflow.WRAP and fmt.signed:
        return True  # wrapped values have no more bits than the values before
    ends = [Fraction(end) for end in (fmt.max, fmt.min)]
    if all(carrier.magnitude_bits(end) is not None for end in ends):
        return True
    # A format that is finer and wider than the carrier changes no finite value. Infinities must not saturate.
    finer = isinstance(fmt, FloatFormat) and fmt.frac_bits >= carrier.fraction and fmt.max > carrier.max
    return finer and spec.overflow is not Overflow.SATURATE and not fmt.saturates


def x64_remedy(able: Sequence[str]) -> str:
    """What an error says after a cast to one of these carriers, if that is float64 and JAX has no float64 now."""
    missing = able[0] == "float64" and not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return "; JAX arrays are float64 only with jax_enable_x64, which is off" * missing


@lru_cache(maxsize=1024)
def require_carrier(spec: Spec, carrier: Carrier) -> None:
    """Refuses a carrier that cannot hold the results of `spec`; the error names one that can."""
    if spec.random_bits is not None and spec.random_bits > (most := most_random_bits(spec, carrier)):
        raise ValueError(
            f"random_bits={spec.random_bits} of spec={str(spec)!r} is more than the {most} that there are for "
            f"an element of x, of dtype {carrier.name}"
        )
    if isinstance(spec.format, LogTakumFormat) and spec.rounding.stochastic:
        raise ValueError(
            f"rounding={spec.rounding.value!r} compares the bits that are cut off, and those of {spec.format} are the "
            "bits of a logarithm, which are not computed; a deterministic mode is needed"
        )
    if carrier_holds(spec, carrier):
        return
    able = [
        name for name, other in CARRIERS.items() if other.width > carrier.width and carrier_holds(spec, other)
    ]  # exact casts
    remedy = f"cast x to {' or '.join(able)} first{x64_remedy(able)}" if able else "no carrier up to float64 can"
    raise ValueError(f"x has dtype {carrier.name}, which cannot hold every result of spec={str(spec)!r}; {remedy}")
