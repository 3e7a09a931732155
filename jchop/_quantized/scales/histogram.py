"""Histograms of magnitudes, and the threshold whose rounding loses the least information: pure functions of NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HISTOGRAM_BINS", "MagnitudeHistogram", "add_to_histogram", "entropy_threshold", "kl_divergence"]

#: As TensorRT has them.
HISTOGRAM_BINS = 2048


@dataclass(frozen=True, eq=False)
class MagnitudeHistogram:
    """How many magnitudes lie in each of `HISTOGRAM_BINS` bins of one width, from zero on.

    Args:
        counts: int64, shape (HISTOGRAM_BINS,).
        width: of a bin; 0 as long as nothing but zeros was seen.
    """

    counts: np.ndarray
    width: float = 0.0

    @staticmethod
    def empty() -> MagnitudeHistogram:
        """Of nothing."""
        return MagnitudeHistogram(np.zeros(HISTOGRAM_BINS, np.int64))


def add_to_histogram(histogram: MagnitudeHistogram, x: Any) -> MagnitudeHistogram:
    """A histogram with the finite numbers of an array counted, too.

    The first array that is not all zeros sets the width; for larger numbers it is doubled, two bins becoming one, as
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

    It is the Kullback-Leibler divergence of P, the kept bins with all that lies beyond added to the last, from Q, in
    which the occupied bins of each level share evenly what the level holds.

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

    The first bin counts as much as the second one: what lies next to zero, and is often zero, becomes zero whatever the
    end, and as many as a ReLU makes would outweigh all others.

    Args:
        counts: of each bin.
        levels: of the magnitudes: 128 for int8.

    Source: S. Migacz, "8-bit inference with TensorRT", GTC 2017; the first bin as NVIDIA's pytorch-quantization has it.
    """
    counts = np.concatenate([counts[1:2], counts[1:]])
    candidates = range(min(levels, len(counts)), len(counts) + 1)
    losses = [kl_divergence(counts, bin_count, levels) for bin_count in candidates]
    return candidates[int(np.argmin(losses))] + 0.5
