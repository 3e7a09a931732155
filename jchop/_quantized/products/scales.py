"""Kept scales: ranges that move, histories, the rounding of an array under them, and the observers of `calibrate`."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jchop._common.checks import check, check_choice
from jchop._common.settings import always_jit
from jchop._core.scaled.groups import Groups
from jchop._program.bind import straight_through
from jchop._quantized.products.codes import CodedArray, expand_codes
from jchop._quantized.products.operand_layout import OperandLayout, keep_nan
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage, ScaleFrom
from jchop._spec.spec import Gradient, Spec
from jchop._storage import QArray, dequantize, fit_scale, quantize
from jchop.formats import UniformFormat
from jchop.formats.rounding import Rounding

# -- formulas ----------------------------------------------------------------------------------------------------------


#: The kinds of state.
RANGE, HISTORY, SCALE = "range", "history", "scale"
STATE_KINDS: Mapping[type, str] = {MovingAverage: RANGE, DelayedScaling: HISTORY, LSQ: SCALE}


def state_shape(source: ScaleFrom | None) -> tuple[int, ...]:
    """The shape of the state of an activation; without a source it is a range."""
    if isinstance(source, LSQ):
        return ()
    return (source.length,) if isinstance(source, DelayedScaling) else (2,)


def round_under_state(
    source: ScaleFrom | None, state: Array, x: Array, spec: Spec, key: Array | None, fixed: bool, layout: Any = None
) -> tuple[Array, Array]:
    """`x` rounded under kept scales, and their state after it.

    Args:
        source: of the scales; None for a range that stays.
        state: a range, a history, or a learned scale.
        x: the operand.
        spec: its rounding.
        key: for a stochastic one.
        fixed: whether a moving range stays.
        layout: the `OperandLayout` of a kernel under learned scales; None of an activation, which has one scale.
    """
    if isinstance(source, LSQ):
        return _round_lsq_operand(source, layout, x, spec, state, key), state
    span = after = state
    if isinstance(source, MovingAverage):
        own_range = finite_range(x)
        moved = state if fixed else source.decay * state + (1 - source.decay) * own_range
        span = after = jnp.where(jnp.isnan(state), own_range, moved)  # the range of `x` if there is none
    elif isinstance(source, DelayedScaling):
        span, after = update_history(source, state, x)
    return round_in_range(x, spec, span, key), after


def update_history(source: DelayedScaling, history: Array, x: Array) -> tuple[Array, Array]:
    """The range that `x` is rounded under, and the history with it."""
    own_magnitude = jnp.max(jnp.abs(_finite_numbers(x)))
    past_magnitude = history[0] if source.take == "last" else history.max()
    magnitude = jnp.where(past_magnitude > 0, past_magnitude, own_magnitude)
    return jnp.stack([-magnitude, magnitude]), jnp.concatenate([own_magnitude[None], history[:-1]])


def _round_lsq_operand(
    source: LSQ, layout: OperandLayout | None, x: Array, spec: Spec, scale: Array, key: Array | None
) -> Array:
    """`x` rounded under a learned scale: of a kernel in its layout, or (None) of an activation, which has one scale."""
    if layout is None:
        numbers, scale = x, scale.reshape((1,) * x.ndim)
        sharing = x.size // x.shape[0] if x.ndim > 1 else x.size
    else:
        numbers = layout.lay(x)
        sharing = numbers.size // scale.size
    y = round_lsq(numbers, spec, scale, key, sharing=sharing if source.factor else None)
    return keep_nan(x, y if layout is None else layout.back(y, x.shape), spec)


def initial_scale(span: Array, spec: Spec) -> Array:
    """The scale that an activation of this range starts with."""
    return fit_scale(span.astype(jnp.float32), spec)[0].reshape(())


def finite_range(x: Array) -> Array:
    """The least and the largest number of an array."""
    numbers = _finite_numbers(x)
    return jnp.stack([numbers.min(), numbers.max()])


def _finite_numbers(x: Array) -> Array:
    """The finite numbers of an array, which alone count for a scale."""
    x = lax.stop_gradient(x).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), x, 0)


def round_in_range(x: Array, spec: Spec, span: Array, key: Array | None = None) -> Array:
    """`x` rounded under the scale that an array of the range `span` has; gradients pass straight through."""
    if spec.gradient != Gradient():
        raise ValueError(f"activation={str(spec)!r} has a gradient; under a fixed scale it passes straight through")
    y = lax.stop_gradient(dequantize(_quantize_in_range(spec, *lax.stop_gradient((x, span)), key)))
    return keep_nan(x, straight_through(lambda _, y: y, lambda x: x, [x], y), spec)


def round_in_range_with_codes(x: Array, spec: Spec, span: Array, key: Array | None = None) -> tuple[Array, CodedArray]:
    """The result of `round_in_range`, and the codes of its numbers."""
    numbers = lax.stop_gradient(x)
    return round_in_range(x, spec, span, key), expand_codes(_quantize_in_range(spec, numbers, span, key), numbers)


def _quantize_in_range(spec: Spec, x: Array, span: Array, key: Array | None) -> QArray:
    # The scale of an array has as many axes as the array.
    ends = span.astype(x.dtype).reshape(*(1,) * (x.ndim - 1), 2) if x.ndim else jnp.max(jnp.abs(span)).astype(x.dtype)
    scale, zero_point = fit_scale(ends, spec)
    return quantize(x, spec, key, scale=scale, zero_point=zero_point)


# -- learned scales --------------------------------------------------------------------------------------------------


def round_lsq(x: Array, spec: Spec, scale: Array, key: Array | None = None, *, sharing: int | None = None) -> Array:
    """`x` rounded under given scales, with LSQ's gradients for both.

    Args:
        x: a carrier.
        spec: of a scaled format without zero points.
        scale: as `fit_scale` returns it for `x`.
        key: a typed key where the spec is stochastic.
        sharing: how many numbers share a scale, n in the factor 1/sqrt(n M) of its gradient. Default None: no factor.

    Source: Esser et al., "Learned step size quantization", ICLR 2020, equations 1 to 3 and section 2.2.
    """
    largest = float(spec.element.max)
    return _round_lsq(spec, 1.0 if sharing is None else 1 / math.sqrt(sharing * largest), x, scale, key)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _round_lsq(spec: Spec, factor: float, x: Array, scale: Array, key: Array | None) -> Array:
    return dequantize(quantize(x, spec, key, scale=scale))


def _round_lsq_fwd(spec: Spec, factor: float, x: Array, scale: Array, key: Array | None) -> tuple[Any, tuple]:
    y = _round_lsq(spec, factor, x, scale, key)
    return y, (x, y, scale)


def _round_lsq_bwd(spec: Spec, factor: float, residuals: tuple, g: Array) -> tuple[Any, Array, None]:
    """The cotangents of the numbers, straight through inside the range, and of the scales, summed over each group."""
    x, y, scale = residuals
    fmt = spec.scaled
    assert fmt is not None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    groups = Groups(x.shape, fmt.group_shape(x.shape))
    numbers, rounded_numbers, slope = (groups.view(v.astype(wide)) for v in (x, y, g))
    s = groups.expand(scale.astype(wide))
    inside = (numbers > float(spec.element.min) * s) & (numbers < float(spec.element.max) * s)
    # e - v/s inside, e beyond; both with s e = y
    by_scale = slope * (rounded_numbers - jnp.where(inside, numbers, 0)) / s
    total = factor * jnp.sum(by_scale, axis=groups.axes, keepdims=True)
    of_x = groups.back(jnp.where(inside, slope, 0)).astype(x.dtype)
    return of_x, groups.squeeze(total).astype(scale.dtype), None


_round_lsq.defvjp(_round_lsq_fwd, _round_lsq_bwd)


# -- observers ---------------------------------------------------------------------------------------------------------


_PERCENTILE_METHOD = re.compile(r"percentile\(([0-9]{1,3}(?:\.[0-9]{1,99})?)\)")
#: So many ranges are tried, each a share of the data's range; as torchao does.
_RANGE_SHARES = 100


def check_calibration_data(x: Array, place: str) -> None:
    """Refuses data of which no number is finite, and warns of numbers that do not count; a tracer is let through.

    Args:
        x: the input of a layer or product in one batch.
        place: the layer or product, for the message.
    """
    finite = jnp.isfinite(x).sum()  # in a trace a tracer, though x may be an array
    if isinstance(finite, Tracer) or int(finite) == x.size > 0:
        return
    check(finite, f"batches give the {place} an input of shape {x.shape} without a finite number")
    missing = x.size - int(finite)
    text = f"batches give the {place} {missing} NaN or infinities among {x.size} numbers; its range leaves them out"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class _BatchRangeObserver:
    """A range for each batch, and of those the widest or the mean; of numbers that are not finite each counts as 0."""

    def __init__(self, find: Callable[[Array], Array], combine: str) -> None:
        self.find, self.combine = find, combine
        self.ranges: list[Array] = []

    def see(self, x: Array) -> None:
        self.ranges.append(self.find(jnp.where(jnp.isfinite(x), x, 0)))

    def range(self) -> Array | None:
        """The range (2,) of all batches: the widest, or the mean; None without data."""
        if not self.ranges:
            return None
        ranges = jnp.stack(self.ranges)
        return ranges.mean(0) if self.combine == "mean" else jnp.stack([ranges[:, 0].min(), ranges[:, 1].max()])


class _EntropyObserver:
    """One histogram of all batches, cut at the bin that loses the least information."""

    def __init__(self, spec: Spec) -> None:
        element = spec.element
        if not isinstance(element, UniformFormat):
            raise ValueError(f"method='entropy' counts even levels, and {str(spec)!r} has none; use 'mse'")
        shifts = spec.scaled is not None and bool(spec.scaled.zero_point)
        codes = element.max_code - element.min_code + 1
        # Of magnitudes, for numbers of both signs and for numbers of one sign.
        self.levels = (codes // 2, codes) if shifts else (element.max_code + 1,) * 2
        self.histogram, self.least, self.most = MagnitudeHistogram(), 0.0, 0.0

    def see(self, x: Array) -> None:
        values = _data_in_float64(x, "entropy")
        self.histogram = add_to_histogram(self.histogram, values)
        finite = values[np.isfinite(values)]
        self.least = min(self.least, float(finite.min(initial=0.0)))
        self.most = max(self.most, float(finite.max(initial=0.0)))

    def range(self) -> Array | None:
        """The range (2,) at which a histogram loses the least entropy; None without data."""
        if not self.histogram.counts.any():
            return None
        levels = self.levels[not self.least < 0 < self.most]
        end = entropy_threshold(self.histogram.counts, levels) * self.histogram.width
        return jnp.asarray(np.clip([self.least, self.most], -end, end), jnp.float32)


#: Sees the inputs of one layer, batch by batch, and gives the range of all of them; None if there are none.
RangeObserver = _BatchRangeObserver | _EntropyObserver


def range_observer_for(method: str, combine: str) -> Callable[[Spec], RangeObserver]:
    """The constructor of an observer for a layer, from the spec of its activation.

    Raises:
        TypeError, ValueError: for another method or combination.
    """
    check_choice("combine", combine, ("widest", "mean"))
    if method == "entropy":
        if combine != "widest":
            raise ValueError(f"combine={combine!r} is of the ranges of batches; method='entropy' has one of them all")
        return _EntropyObserver
    if method == "minmax":
        return lambda spec: _BatchRangeObserver(_min_max_range, combine)
    if method == "mse":
        return lambda spec: _BatchRangeObserver(partial(_least_error_range, spec=spec), combine)
    match = _PERCENTILE_METHOD.fullmatch(method) if isinstance(method, str) else None
    if match is None or not 0 < float(match[1]) <= 100:
        raise ValueError(f"method={method!r} must be 'minmax', 'mse', 'entropy', or 'percentile(q)' with 0 < q <= 100")
    return lambda spec: _BatchRangeObserver(partial(_percentile_range, share=float(match[1])), combine)


def _min_max_range(x: Array) -> Array:
    return jnp.stack([x.min(), x.max()])


def _percentile_range(x: Array, share: float) -> Array:
    # In float32, places among thousands of numbers are off: NumPy's places are in float64.
    most = float(np.percentile(np.abs(_data_in_float64(x, f"percentile({share:g})")), share))
    return jnp.clip(_min_max_range(x), -most, most)


def _data_in_float64(x: Array, method: str) -> np.ndarray:
    if isinstance(x, Tracer):
        raise ValueError(
            f"method={method!r} needs numbers, and calibrate is part of a traced function, as under jax.jit or "
            "nnx.eval_shape; method='minmax' gives a model of the same shapes there"
        )
    return np.asarray(x, np.float64)


@partial(always_jit, static_argnames="spec")
def _least_error_range(x: Any, spec: Spec) -> Array:
    """The range (least, most) of `x` times the share that leaves the least square error, rounded to nearest: (2,)."""
    nearest = replace(spec, rounding=Rounding.NEAREST_EVEN) if spec.rounding.stochastic else spec
    span = _min_max_range(x).astype(jnp.float32)

    def error(share: Array) -> Array:
        y = round_in_range(x, nearest, share * span)
        return jnp.sum(jnp.square(y.astype(jnp.float32) - x.astype(jnp.float32)))

    shares = jnp.arange(1, _RANGE_SHARES + 1, dtype=jnp.float32) / _RANGE_SHARES
    return shares[jnp.argmin(jax.lax.map(error, shares))] * span


# -- histograms of magnitudes ----------------------------------------------------------------------------------------


#: As TensorRT has them.
HISTOGRAM_BINS = 2048


@dataclass(frozen=True, eq=False)
class MagnitudeHistogram:
    """How many magnitudes lie in each of `HISTOGRAM_BINS` bins of one width, from zero on.

    Args:
        counts: int64, shape (HISTOGRAM_BINS,).
        width: of a bin; 0 as long as nothing but zeros was seen.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(HISTOGRAM_BINS, np.int64))
    width: float = 0.0


def add_to_histogram(histogram: MagnitudeHistogram, x: Any) -> MagnitudeHistogram:
    """A histogram with the finite numbers of an array counted, too.

    The first array that is not all zeros sets the width. For larger numbers it is doubled, two bins becoming one, as
    often as they need.
    """
    magnitudes = np.abs(np.asarray(x, np.float64)).ravel()
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    counts, width, most = histogram.counts, histogram.width, float(magnitudes.max(initial=0.0))
    if width == 0.0:
        counts, width = np.where(np.arange(HISTOGRAM_BINS) == 0, counts.sum(), 0), most / HISTOGRAM_BINS
    while most > HISTOGRAM_BINS * width:
        counts = np.concatenate([counts.reshape(-1, 2).sum(1), np.zeros(HISTOGRAM_BINS // 2, np.int64)])
        width *= 2
    end = HISTOGRAM_BINS * width if width else 1.0
    return MagnitudeHistogram(counts + np.histogram(magnitudes, HISTOGRAM_BINS, (0.0, end))[0], width)


def kl_divergence(counts: np.ndarray, bin_count: int, levels: int) -> float:
    """The information lost, in nats, if the first bins of a histogram are kept and merged to a few levels.

    It is the Kullback-Leibler divergence of P from Q. P are the kept bins, with all beyond them added to the last. In
    Q the occupied bins of each level share its count evenly.

    Args:
        counts: of each bin.
        bin_count: how many bins, from zero.
        levels: how many levels.
    """
    inside = counts[:bin_count].astype(np.float64)
    p = inside.copy()
    p[-1] += counts[bin_count:].sum()
    level = np.arange(bin_count) * levels // bin_count
    nonzero_bins = np.bincount(level, inside > 0, levels)
    shares = np.bincount(level, inside, levels) / np.maximum(nonzero_bins, 1)
    q = np.where(inside > 0, shares[level], 0.0)
    there = p > 0
    if (q[there] == 0).any():
        return math.inf
    p, q = p[there] / p.sum(), q[there] / q.sum()
    return float(np.sum(p * np.log(p / q)))


def entropy_threshold(counts: np.ndarray, levels: int) -> float:
    """The end, in bins, of the range that loses the least when it is rounded to a few levels.

    The first bin counts as much as the second one. Numbers next to zero, and often zero, become zero whatever the
    end. The many zeros of a ReLU would outweigh all other numbers.

    Args:
        counts: of each bin.
        levels: of the magnitudes: 128 for int8.

    Source: S. Migacz, "8-bit inference with TensorRT", GTC 2017; the first bin as NVIDIA's pytorch-quantization has it.
    """
    counts = np.concatenate([counts[1:2], counts[1:]])
    candidates = range(min(levels, len(counts)), len(counts) + 1)
    losses = [kl_divergence(counts, bin_count, levels) for bin_count in candidates]
    return candidates[int(np.argmin(losses))] + 0.5
