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

from jchop._bits import types_for
from jchop._products.matrices import MatrixLayout
from jchop._products.placement import Placement
from jchop._products.weights import numbers_of
from jchop._settings import compiled
from jchop.ptq._columns import element_scales, stored_of
from jchop.ptq._maps.steps import Awq, Smooth
from jchop.ptq._statistics import means
from jchop.ptq._sums import Sums

Array = jax.Array

__all__ = ["Member", "awq_factors", "smooth_factors"]

#: Factors are kept within these, so that parameters neither vanish nor overflow.
_LEAST, _MOST = 1e-5, 1e5


@dataclass(frozen=True, eq=False)
class Member:
    """A weight whose inputs have the channels.

    Args:
        weight: with the axes of a stack.
        stack: how many of these there are.
        turns: how many of these are turns of loops.
        placement: its rounding.
        layout: it as matrices.
        sums: of its inputs.
        channels: the channel of each input of each of its matrices, (turns, batch, summed) in one.
    """

    weight: Any
    stack: int
    turns: int
    placement: Placement
    layout: MatrixLayout
    sums: Sums
    channels: np.ndarray

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The indexes of its layers."""
        return list(np.ndindex(*self.weight.shape[: self.stack]))

    def turn(self, place: tuple[int, ...]) -> int:
        """The number of the statistics of a layer."""
        shape = self.weight.shape[: self.turns]
        return int(np.ravel_multi_index(place[: self.turns], shape)) if shape else 0

    def by_turn(self, values: np.ndarray) -> np.ndarray:
        """Numbers of channels as (turns, batch, summed)."""
        return values[self.channels].reshape(-1, *self.layout.matrices[:2])


def smooth_factors(step: Smooth, members: Sequence[Member], count: int) -> np.ndarray:
    """The factor max|x|^alpha / max|w|^(1 - alpha) of each channel."""
    inputs, weights = np.zeros(count), np.zeros(count)
    for member in members:
        np.maximum.at(inputs, member.channels, np.asarray(member.sums.largest, np.float64).reshape(-1))
        for place in member.places:
            rows = np.asarray(jnp.abs(member.layout.lay(jnp.asarray(member.weight)[place])).max(2), np.float64)
            np.maximum.at(weights, member.by_turn(np.arange(count))[member.turn(place)].reshape(-1), rows.reshape(-1))
    bases = np.where(inputs > 0, inputs, 1.0), np.where(weights > 0, weights, 1.0)
    factors = bases[0] ** step.alpha / bases[1] ** (1 - step.alpha)
    return np.where(inputs > 0, factors.clip(_LEAST, _MOST), 1.0)


def awq_factors(step: Awq, members: Sequence[Member], count: int, units: int) -> tuple[np.ndarray, list[str]]:
    """The factors of least error at the outputs, and what was chosen in each unit.

    Args:
        step: the grid.
        members: the weights.
        count: how many channels there are.
        units: how many parts of the channels, one after the other, have an exponent of their own.
    """
    used = np.zeros(count, bool)
    for member in members:
        used[member.channels] = True
    inputs = _mean(((m.channels, np.asarray(means(m.sums).mean_abs, np.float64).reshape(-1)) for m in members), count)
    weights = _mean((_magnitudes(m, place) for m in members for place in m.places), count) if step.duo else None
    ratios = [i / step.points for i in range(step.points)]
    candidates = np.stack([np.ones(count), *(_candidate(inputs, weights, used, r, units) for r in ratios)])
    losses = np.zeros((len(candidates), units))
    for member in members:
        shape = (len(candidates), -1, *member.layout.matrices[:2])
        factors = np.stack([member.by_turn(s) for s in candidates]).reshape(shape)
        for place in member.places:
            turn = member.turn(place)
            sums = jax.tree.map(lambda v, turn=turn, m=member: v.reshape(-1, *v.shape[m.turns :])[turn], member.sums)
            moments = means(sums)
            weight = jnp.asarray(member.weight)[place]
            with types_for(weight.dtype):
                own = _losses(
                    weight, moments.gram, moments.count, jnp.asarray(factors[:, turn], moments.gram.dtype),
                    placement=member.placement, layout=member.layout,
                )  # fmt: skip
            losses[:, turn if units > 1 else 0] += np.asarray(own, np.float64)
    best = np.where(np.isfinite(losses), losses, np.inf).argmin(0)
    factors = np.concatenate([candidates[b].reshape(units, -1)[unit] for unit, b in enumerate(best)])
    return factors, [f"r={ratios[b - 1]:g}" if b else "no factors were better" for b in best]


def _candidate(
    inputs: np.ndarray, weights: np.ndarray | None, used: np.ndarray, ratio: float, units: int
) -> np.ndarray:
    """The factors of one exponent; those of a unit have 1 in the middle of their range."""
    factors = inputs**ratio if weights is None else inputs**ratio / (weights ** (1 - ratio) + 1e-4)
    factors = np.where(np.isfinite(factors), factors, 1.0).clip(1e-4)
    parts = np.where(used, factors, np.nan).reshape(units, -1)
    middle = np.sqrt(np.nanmax(parts, 1, keepdims=True) * np.nanmin(parts, 1, keepdims=True))
    return np.where(used, (parts / middle).reshape(-1), 1.0).clip(_LEAST, _MOST)


def _mean(some: Any, count: int) -> np.ndarray:
    """The mean of the numbers of each channel."""
    total, number = np.zeros(count), np.zeros(count)
    for channels, values in some:
        np.add.at(total, channels, values)
        np.add.at(number, channels, 1)
    return total / np.maximum(number, 1)


def _magnitudes(member: Member, place: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The channels of a matrix, and the mean of abs(w) over the largest of its group."""
    weight = jnp.asarray(member.weight)[place]
    with types_for(weight.dtype):
        magnitudes = _in_units(weight, placement=member.placement, layout=member.layout)
    channels = member.channels.reshape(-1, *member.layout.matrices[:2])[member.turn(place)]
    return channels.reshape(-1), np.asarray(magnitudes, np.float64).reshape(-1)


@partial(compiled, static_argnames=("placement", "layout"))
def _in_units(weight: Array, *, placement: Placement, layout: MatrixLayout) -> Array:
    """The mean over the outputs of abs(w) in units of its group's scale, the largest being 1."""
    q = stored_of(placement.pack(weight, None))
    sizes = jnp.abs(weight).reshape(q.shape)
    for scale in element_scales(q).scale:
        sizes = sizes / scale.astype(sizes.dtype)
    sizes = jnp.where(jnp.isfinite(sizes), sizes, 0)
    return layout.lay(sizes / jnp.maximum(sizes.max(), jnp.finfo(sizes.dtype).tiny)).mean(2)


@partial(compiled, static_argnames=("placement", "layout"))
def _losses(
    weight: Array, gram: Array, rows: Array, factors: Array, *, placement: Placement, layout: MatrixLayout
) -> Array:
    """For each s, the squared error of the outputs of a weight that is multiplied by s, rounded, and divided by s."""
    wide = layout.lay(weight).astype(gram.dtype)

    def loss(s: Array) -> Array:
        scaled_weight = layout.back(wide * s[:, :, None]).astype(weight.dtype)
        low = layout.lay(numbers_of(placement.pack(scaled_weight, None))).astype(gram.dtype) / s[:, :, None]
        error = wide - low
        outputs = jnp.einsum("bkl,bln->bkn", gram, error, precision=lax.Precision.HIGHEST)
        return ((error * outputs).sum((1, 2)) * rows).sum()

    return lax.map(loss, factors)
