"""Published codebooks: tables of levels, each from the document or library that defines it."""

from __future__ import annotations

import numpy as np

from jchop.formats._codebook import CodebookFormat


def nf4_levels() -> CodebookFormat:
    """NormalFloat: quantiles of N(0, 1), scaled to [-1, 1] (Dettmers et al., arXiv 2305.14314, appendix E)."""
    negative = (
        1.0, 0.6961928009986877, 0.5250730514526367, 0.39491748809814453, 0.28444138169288635,
        0.18477343022823334, 0.09105003625154495,
    )  # fmt: skip
    positive = (
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434,
        0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip
    return CodebookFormat((*(-level for level in negative), 0.0, *positive))


def dynamic_levels(bits: int, signed: bool = True, zero: bool = True) -> CodebookFormat:
    """The dynamic map: decimal exponents from 10^-(bits - 2) up; the other bits are the fraction.

    As bitsandbytes builds it in binary32 (``create_dynamic_map``; Dettmers, arXiv 1511.04561): decade i of bits - 1
    holds the means of neighbours among 2^i + 1 equally spaced numbers from 0.1 to 1, times 10^(i - bits + 2); an
    unsigned map has twice as many intervals. The levels 0 and 1 are added.

    Args:
        bits: width of a code.
        signed: whether to add the negative of each mean. Default True.
        zero: whether 0 is a level. If not, the decade below the lowest has one level in its place, for an unsigned map
            (DE-0 of Li et al., arXiv 2309.01507, section 4.1, has no level there). Default True.
    """
    magnitudes: list[float] = []
    for i in range(0 if zero else -1, bits - 1):
        bounds = _float32_linspace(2 ** (i + (not signed)) + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        magnitudes += (np.float32(10.0 ** (i - bits + 2)) * means).tolist()
    negative = [-magnitude for magnitude in magnitudes] if signed else []
    return CodebookFormat(tuple(sorted([*([0.0] if zero else []), 1.0, *magnitudes, *negative])))


def _float32_linspace(count: int) -> np.ndarray:
    """Equally spaced binary32 numbers from 0.1 to 1, computed from both ends to the middle, as in PyTorch.

    Each is a product and a sum, rounded once: the published tables come from processors with fused multiply-add.
    binary64 holds both exactly.
    """
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    low, high = first + step * index, last - step * (count - 1 - index)
    return np.where(index < count // 2, low, high).astype(np.float32)
