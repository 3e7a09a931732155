"""The factors of channels, by the formulas of SmoothQuant and AWQ, from statistics and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import enable_x64_for
from jchop._common.settings import always_jit
from jchop._quantized.program.lazy_params import unpack_param
from jchop._quantized.program.matrix_layout import MatrixLayout
from jchop._quantized.program.weight_layout import WeightLayout
from jchop.ptq._data.columns import element_scales, qarray_of
from jchop.ptq._data.input_sums import InputSums
from jchop.ptq._data.statistics import mean_statistics
from jchop.ptq._steps.steps import Awq, Smooth

Array = jax.Array

__all__ = ["ChannelWeight", "awq_factors", "smooth_factors"]

#: Factors are kept within these, so that parameters neither vanish nor overflow.
_LEAST_FACTOR, _MOST_FACTOR = 1e-5, 1e5


@dataclass(frozen=True, eq=False)
class ChannelWeight:
    """A weight whose inputs have the channels.

    Args:
        weight: with the axes of a stack.
        stack: how many of these there are.
        turns: how many of these are turns of loops.
        placement: how the weight is rounded.
        layout: the weight as matrices.
        sums: the sums over its inputs.
        channels: the channel of each input of each of its matrices, (turns, batch, summed) in one.
    """

    weight: Any
    stack: int
    turns: int
    placement: WeightLayout
    layout: MatrixLayout
    sums: InputSums
    channels: np.ndarray

    @property
    def layers(self) -> list[tuple[int, ...]]:
        """The indexes of its layers."""
        return list(np.ndindex(*self.weight.shape[: self.stack]))

    def turn(self, layer: tuple[int, ...]) -> int:
        """The index of the loop iteration, and so of the statistics, of a layer."""
        shape = self.weight.shape[: self.turns]
        return int(np.ravel_multi_index(layer[: self.turns], shape)) if shape else 0

    def by_turn(self, values: np.ndarray) -> np.ndarray:
        """Numbers of channels as (turns, batch, summed)."""
        return values[self.channels].reshape(-1, *self.layout.matrices[:2])


def smooth_factors(step: Smooth, members: Sequence[ChannelWeight], count: int) -> np.ndarray:
    """The factor max|x|^alpha / max|w|^(1 - alpha) of each channel."""
    inputs, weights = np.zeros(count), np.zeros(count)
    for member in members:
        np.maximum.at(inputs, member.channels, np.asarray(member.sums.largest, np.float64).reshape(-1))
        for layer in member.layers:
            rows = np.asarray(jnp.abs(member.layout.lay(jnp.asarray(member.weight)[layer])).max(2), np.float64)
            np.maximum.at(weights, member.by_turn(np.arange(count))[member.turn(layer)].reshape(-1), rows.reshape(-1))
    bounds = np.where(inputs > 0, inputs, 1.0), np.where(weights > 0, weights, 1.0)
    factors = bounds[0] ** step.alpha / bounds[1] ** (1 - step.alpha)
    return np.where(inputs > 0, factors.clip(_LEAST_FACTOR, _MOST_FACTOR), 1.0)


def awq_factors(step: Awq, members: Sequence[ChannelWeight], count: int, units: int) -> tuple[np.ndarray, list[str]]:
    """The factors of least error at the outputs, and what was chosen in each unit.

    Args:
        step: the grid.
        members: the weights.
        count: how many channels there are.
        units: how many parts of the channels, one after the other, have an exponent of their own.
    """
    is_used = np.zeros(count, bool)
    for member in members:
        is_used[member.channels] = True
    inputs = _channel_means(
        ((m.channels, np.asarray(mean_statistics(m.sums).mean_abs, np.float64).reshape(-1)) for m in members), count
    )
    weights = (
        _channel_means((_channel_magnitudes(m, place) for m in members for place in m.layers), count)
        if step.duo
        else None
    )
    ratios = [i / step.points for i in range(step.points)]
    candidates = np.stack([np.ones(count), *(_candidate_factors(inputs, weights, is_used, r, units) for r in ratios)])
    losses = np.zeros((len(candidates), units))
    for member in members:
        shape = (len(candidates), -1, *member.layout.matrices[:2])
        factors = np.stack([member.by_turn(s) for s in candidates]).reshape(shape)
        for layer in member.layers:
            turn = member.turn(layer)
            sums = jax.tree.map(lambda v, turn=turn, m=member: v.reshape(-1, *v.shape[m.turns :])[turn], member.sums)
            moments = mean_statistics(sums)
            weight = jnp.asarray(member.weight)[layer]
            with enable_x64_for(weight.dtype):
                member_losses = _factor_losses(
                    weight, moments.gram, moments.count, jnp.asarray(factors[:, turn], moments.gram.dtype),
                    placement=member.placement, layout=member.layout,
                )  # fmt: skip
            losses[:, turn if units > 1 else 0] += np.asarray(member_losses, np.float64)
    best = np.where(np.isfinite(losses), losses, np.inf).argmin(0)
    factors = np.concatenate([candidates[b].reshape(units, -1)[unit] for unit, b in enumerate(best)])
    return factors, [f"r={ratios[b - 1]:g}" if b else "no factors were better" for b in best]


def _candidate_factors(
    inputs: np.ndarray, weights: np.ndarray | None, is_used: np.ndarray, ratio: float, units: int
) -> np.ndarray:
    """The factors of one exponent; those of a unit have 1 in the middle of their range."""
    factors = inputs**ratio if weights is None else inputs**ratio / (weights ** (1 - ratio) + 1e-4)
    factors = np.where(np.isfinite(factors), factors, 1.0).clip(1e-4)
    unit_factors = np.where(is_used, factors, np.nan).reshape(units, -1)
    middle = np.sqrt(np.nanmax(unit_factors, 1, keepdims=True) * np.nanmin(unit_factors, 1, keepdims=True))
    return np.where(is_used, (unit_factors / middle).reshape(-1), 1.0).clip(_LEAST_FACTOR, _MOST_FACTOR)


def _channel_means(channel_values: Any, channel_count: int) -> np.ndarray:
    """The mean of the numbers of each channel."""
    totals, counts = np.zeros(channel_count), np.zeros(channel_count)
    for channels, values in channel_values:
        np.add.at(totals, channels, values)
        np.add.at(counts, channels, 1)
    return totals / np.maximum(counts, 1)


def _channel_magnitudes(member: ChannelWeight, layer: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The channels of a matrix, and the mean of abs(w) over the largest of its group."""
    weight = jnp.asarray(member.weight)[layer]
    with enable_x64_for(weight.dtype):
        magnitudes = _mean_in_scale_units(weight, placement=member.placement, layout=member.layout)
    channels = member.channels.reshape(-1, *member.layout.matrices[:2])[member.turn(layer)]
    return channels.reshape(-1), np.asarray(magnitudes, np.float64).reshape(-1)


@partial(always_jit, static_argnames=("placement", "layout"))
def _mean_in_scale_units(weight: Array, *, placement: WeightLayout, layout: MatrixLayout) -> Array:
    """The mean over the outputs of abs(w) in units of its group's scale, the largest being 1."""
    q = qarray_of(placement.pack(weight, None))
    magnitudes = jnp.abs(weight).reshape(q.shape)
    for scale in element_scales(q).scale:
        magnitudes = magnitudes / scale.astype(magnitudes.dtype)
    magnitudes = jnp.where(jnp.isfinite(magnitudes), magnitudes, 0)
    return layout.lay(magnitudes / jnp.maximum(magnitudes.max(), jnp.finfo(magnitudes.dtype).tiny)).mean(2)


@partial(always_jit, static_argnames=("placement", "layout"))
def _factor_losses(
    weight: Array, gram: Array, rows: Array, factors: Array, *, placement: WeightLayout, layout: MatrixLayout
) -> Array:
    """For each s, the squared error of the outputs of a weight that is multiplied by s, rounded, and divided by s."""
    matrices = layout.lay(weight).astype(gram.dtype)

    def loss(s: Array) -> Array:
        scaled_weight = layout.back(matrices * s[:, :, None]).astype(weight.dtype)
        rounded_w = layout.lay(unpack_param(placement.pack(scaled_weight, None))).astype(gram.dtype) / s[:, :, None]
        error = matrices - rounded_w
        outputs = jnp.einsum("bkl,bln->bkn", gram, error, precision=lax.Precision.HIGHEST)
        return ((error * outputs).sum((1, 2)) * rows).sum()

    return lax.map(loss, factors)
