"""`compare`: the errors of an array in several formats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.core
import numpy as np

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import as_iterable, call_hint, check, check_choice
from jchop._common.text import RowReport, TableOrLine, decibels_of_arrays
from jchop._core.rounding.grid import carrier_holds
from jchop._round.arguments import as_array
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop._storage._codes import clip_mask
from jchop._storage._quantize import quantize
from jchop.formats import ElementFormat, ScaledFormat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jchop._emulate.emulate import EmulatedFunction
    from jchop._insight.reports.lines import LinesComparison

_UNSCALED_FORMATS = ("bfloat16", "binary16", "float8_e4m3fn:saturate", "float8_e5m2:saturate", "int8")
_CHANNEL_FORMATS = ("int8(channel=0)", "float8_e4m3fn(channel=0)")
_GROUP_FORMATS = (
    *("int8(group=128)", "int4(group=128)", "int4(group=32)", "nf4(group=64)"), "mxfp8_e4m3", "mxfp4", "nvfp4",
)  # fmt: skip

COMPARISON_SCALES = ("none", "fit")


def default_formats(ndim: int) -> tuple[str, ...]:
    """The formats that `compare` takes for an array of `ndim` axes: formats with channels need two.

    Example:
        >>> len(default_formats(2)) - len(default_formats(1))
        2
    """
    return _UNSCALED_FORMATS + (_CHANNEL_FORMATS if ndim > 1 else ()) + _GROUP_FORMATS


@dataclass(frozen=True)
class ComparisonRow:
    """An array in one format. Only its finite numbers count; y is the rounded x.

    Args:
        format: the spec as text.
        bits: bits for each number, its share of the scales included.
        snr: signal-to-noise ratio 10 log10(Σ x² / Σ (x - y)²) in dB; infinite if y = x, -infinite if a y is not finite.
        worst_absolute: the largest magnitude of x - y; infinite if a y is not finite.
        worst_relative: the largest magnitude of (x - y) / x, of numbers other than zero; 1 if a number became zero and
            none was further off.
        overflow: share of numbers that became infinite or NaN.
        clipped: share of numbers that became the largest or the lowest value of the format (times their scale). They
            were beyond it by more than half its distance to the next value. NaN if the share is not known: for elements
            of more than 16 bits under scales.
        underflow: share of numbers other than zero that became zero.
        largest: the largest finite value; NaN for a scaled format, whose values depend on the data.
        exponent: the power of two that multiplied the array before the rounding, and divided it after; 0 for none.
    """

    format: str
    bits: float
    snr: float
    worst_absolute: float
    worst_relative: float
    overflow: float
    clipped: float
    underflow: float
    largest: float
    exponent: int = 0

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        name = self.format + (f" · 2^{-self.exponent}" if self.exponent else "")
        ratio = "exact" if self.snr == math.inf else f"{self.snr:.1f}"
        shares = map(_comparison_share_text, (self.overflow, self.clipped, self.underflow))
        largest = "-" if math.isnan(self.largest) else f"{self.largest:.4g}"
        return (
            name,
            f"{self.bits:.4g}",
            ratio,
            f"{self.worst_absolute:.3g}",
            f"{self.worst_relative:.3g}",
            *shares,
            largest,
        )


@dataclass(frozen=True)
class Comparison(RowReport):
    """The result of `jchop.compare`; its ``str`` is a table, and it shows itself in a notebook.

    Args:
        rows: a `ComparisonRow` for each format, in the order given.
        shape: shape of the array.
        dtype: its dtype.
        lost: the number of infinite or NaN elements, which do not count.
        scale: as given to `compare`.

    Example:
        >>> import jchop as jc
        >>> seen = jc.compare([[1.0, 2.0, 300.0]], ["integer8", "bfloat16"])
        >>> [(row.format, row.worst_absolute, row.clipped > 0) for row in seen.rows]
        [('integer8', 173.0, True), ('bfloat16', 0.0, False)]
    """

    rows: tuple[ComparisonRow, ...]
    shape: tuple[int, ...]
    dtype: str
    lost: int = 0
    scale: str = "none"

    def plot(self, *, title: str = "Bits against signal-to-noise ratio") -> Figure:
        """Draws bits and ratios with `jchop.plot.pareto`; needs matplotlib."""
        from jchop.plot import pareto

        names, bits, ratios = (self.columns()[name] for name in ("format", "bits", "snr"))
        ylabel = "signal-to-noise ratio (dB): more is better"
        return pareto(names, bits, ratios, ylabel=ylabel, title=title, higher_is_better=True)

    _align, _infinities_as_text, _optional = "<" + ">" * 8, True, ("largest", "worst abs.")

    def _parts(self) -> list[TableOrLine]:
        head = ("format", "bits", "SNR dB", "worst abs.", "worst rel.", "overflow", "clipped", "to zero", "largest")
        body = [row._cells() for row in self.rows]
        notes = [f"{self.lost} numbers are infinite or NaN, and do not count"] if self.lost else []
        return [f"{'×'.join(map(str, self.shape)) or 'scalar'} {self.dtype}", [head, *body], *notes]


def _comparison_share_text(value: float) -> str:
    """Per cent; a share that is not zero never looks like zero."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{100 * value:.1f} %" if value >= 5e-4 else f"{value:.0e}"


@overload
def compare(
    x: EmulatedFunction, formats: EmulatedFunction, *args: Any, key: jax.Array | None = None
) -> LinesComparison: ...
@overload
def compare(
    x: Any,
    formats: Iterable[SpecLike] | Spec | ElementFormat | ScaledFormat | None = None,
    *,
    key: jax.Array | None = None,
    scale: Literal["none", "fit"] = "none",
) -> Comparison: ...
@call_hint("jchop.compare(x, ['float8_e4m3fn', 'int8'])")
def compare(
    x: Any, formats: Any = None, *args: Any, key: jax.Array | None = None, scale: Literal["none", "fit"] = "none"
) -> Comparison | LinesComparison:
    """Compares the errors of an array in several formats: signal-to-noise ratio, worst errors, losses, bits.

    ``compare(low_a, low_b, *args)`` compares two functions from `jchop.emulate` of the same arguments, by line of
    source: errors of the operations, deviations from the carrier, and lost results side by side.

    Each row measures ``round_to_format(x, format)`` exactly. The specs decide overflow: ``"float8_e4m3fn"`` overflows
    to NaN beyond 448, and ``"float8_e4m3fn:saturate"`` clips. The formats of the default list clip, as hardware does;
    binary16 alone does not. To compare formats by precision, not range, pass ``scale="fit"``.

    Args:
        x: numbers of any shape but empty: an array of JAX or NumPy, or a list. Elements of float16 and bfloat16 are
            rounded as float32, which is exact; integers and booleans as float64. Formats with values that float32 lacks
            round float32 numbers as float64.
        formats: specs, formats, or texts, or one of them. Default: 16-bit and 8-bit floats, nf4, MX formats and nvfp4,
            and int8 and int4 with one scale for the tensor, each row or each group.
        *args: the arguments of two emulated functions.
        key: a typed key, needed by the stochastic modes; each format draws the same bits.
        scale: ``"none"`` (default), or ``"fit"``. With ``"fit"`` a format without scales gets x times a power of two,
            and the result is divided by it. It is the largest power under which no number is beyond the format's
            largest value. The product is computed in float64. Scaled formats choose their own scales and are not
            changed.

    Returns:
        A `Comparison`. Its `str` is a table, `rows` are the numbers, `to_json` and `plot` show them. For two functions
        a `LinesComparison`, with `rows` by line.

    Raises:
        TypeError: for complex numbers or objects, or a traced array.
        ValueError: for an empty array, one without a finite number, no format, or a format that does not fit `x`.

    Example:
        >>> import numpy as np, jchop as jc
        >>> x = np.linspace(-300, 300, 601, dtype=np.float32).reshape(1, -1)
        >>> print(jc.compare(x, ["float8_e4m3fn", "int8", "fixed4.4"]))
        1×601 float32
        format          bits  SNR dB  worst abs.  worst rel.  overflow  clipped  to zero  largest
        float8_e4m3fn      8    31.4          16      0.0588         0        0        0      448
        int8           8.053    48.1        1.18           1         0        0    0.3 %        -
        fixed4.4           8     0.4         292       0.974         0   97.3 %        0    7.938
    """
    if callable(x):
        from jchop._insight.reports.lines import compare_lines

        return compare_lines(x, formats, args, key)
    if args:
        raise TypeError(
            f"compare takes *args for two emulated functions, not for an array; key={args[0]!r} is a keyword"
        )
    check_choice("scale", scale, COMPARISON_SCALES)
    array = _comparison_array(x)
    names = default_formats(array.ndim) if formats is None else as_iterable(formats)
    specs = [as_spec(name, "formats", scaled=True) for name in names]
    check(specs, "formats must name at least one format")
    finite = np.isfinite(array)
    check(finite.any(), f"x of shape {array.shape} has no finite number")
    rows = tuple(_comparison_row(array, finite, spec, key, scale == "fit") for spec in specs)
    return Comparison(rows, np.shape(x), np.dtype(getattr(x, "dtype", array.dtype)).name, int((~finite).sum()), scale)


def _comparison_array(x: Any) -> np.ndarray:
    """The array in the dtype in which it is rounded, with at least one axis."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError("x is traced: compare looks at numbers; call it outside of jax.jit")
    array = np.atleast_1d(np.asarray(as_array("x", x)))
    name = array.dtype.name
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    elif name not in CARRIERS:
        raise TypeError(f"x has dtype {array.dtype}; allowed are {', '.join(CARRIERS)}, integers and booleans")
    elif CARRIERS[name].width < 32:
        array = array.astype(np.float32)
    check(array.size, f"x of shape {array.shape} is empty")
    return array


def _comparison_row(array: np.ndarray, finite: np.ndarray, spec: Spec, key: Any, fit: bool) -> ComparisonRow:
    """The row of one spec: errors of an array rounded to it, and the shares of clipped and zero numbers."""
    fmt = spec.scaled
    if fmt is None and not carrier_holds(spec, CARRIERS[array.dtype.name]):
        array = array.astype(np.float64)
    exponent = _fit_exponent(float(np.abs(array[finite]).max()), spec.format) if fit and fmt is None else 0
    scaled_array = array if not exponent else np.ldexp(array.astype(np.float64), exponent)
    rounded_array = round_to_format(scaled_array, replace(spec, gradient=Gradient()), key)
    is_clipped = _clip_mask(scaled_array, rounded_array, spec, key)
    x, y = scaled_array[finite].astype(np.float64), rounded_array[finite].astype(np.float64)
    nonfinite, nonzero = ~np.isfinite(y), x != 0
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(nonfinite, np.inf, np.abs(x - y))
        relative = float((error[nonzero] / np.abs(x[nonzero])).max(initial=0.0))
        worst = float(np.ldexp(error.max(), -exponent))
    bits = float(fmt.bits_per_element(array.shape) if fmt is not None else spec.format.bits)
    clipped = math.nan if is_clipped is None else float(is_clipped[finite].mean())
    shares = float(nonfinite.mean()), clipped, float((nonzero & (y == 0)).mean())
    largest = math.nan if fmt is not None else _float_or_infinity(spec.format.max)
    return ComparisonRow(str(spec), bits, decibels_of_arrays(x, error), worst, relative, *shares, largest, exponent)


def _fit_exponent(largest: float, fmt: ElementFormat) -> int:
    """The largest k with largest · 2^k within the format; 0 for a number that is zero."""
    limit = _float_or_infinity(fmt.max)
    if largest == 0 or not 0 < limit < math.inf:
        return 0
    exponent = math.frexp(limit)[1] - math.frexp(largest)[1]
    # Numbers times 2^k, and their rounded values, have to stay in float64.
    exponent = min(exponent, 1000 - math.frexp(largest)[1])
    return exponent - (math.ldexp(largest, exponent) > limit)


def _float_or_infinity(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _clip_mask(x: np.ndarray, y: np.ndarray, spec: Spec, key: Any) -> np.ndarray | None:
    """Whether each number was clipped: it lies beyond an end by more than half the distance to the value next to it."""
    if spec.scaled is not None:
        try:
            q = quantize(x, spec, key)
        except ValueError:  # codes that cannot be stored
            return None
        return clip_mask(q, x.astype(np.float64))
    fmt = spec.format
    values = np.zeros(2) if fmt.bits > 16 else fmt.values()  # which cannot be listed: the distances count as 0
    result = np.zeros(x.shape, bool)
    for sign, end, pair in ((1, fmt.max, values[-2:]), (-1, fmt.min, values[:2])):
        limit, half_step = _float_or_infinity(end), float(pair[-1] - pair[0]) / 2
        with np.errstate(invalid="ignore", over="ignore"):
            result |= (y == limit) & np.isfinite(x) & (sign * (x.astype(np.float64) - limit) > half_step)
    return result
