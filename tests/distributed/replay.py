"""The quantized collectives in NumPy, from the definition in docs/distributed.md: one process plays every rank.

Codes are int8 in blocks of GROUP under bfloat16 scales (absmax / 127). Numbers are float32, and so are sums. Random
words are those of `jchop.random_bits`, which tests/_core/rounding/test_random_bits.py checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jchop as jc

GROUP = 8
NEAREST = f"int8(group={GROUP},scale=bfloat16)"
STOCHASTIC = NEAREST + ":stochastic"
SEND, SUM, GATHER, BACKWARD = range(4)
Key = Any
Add = Callable[[np.ndarray, np.ndarray], np.ndarray]


def fold(key: Key, *numbers: int) -> Key:
    for number in numbers:
        key = None if key is None else jax.random.fold_in(key, number)
    return key


def sent(message: np.ndarray, key: Key = None, place: int = 0) -> np.ndarray:
    """The numbers that a receiver decodes."""
    flat = message.reshape(-1, message.shape[-1]) if message.ndim else message.reshape(1, 1)
    words = np.zeros(flat.shape, np.uint32)
    if key is not None:
        words = np.asarray(jc.random_bits(key, (flat.size,), offset=place * flat.size)).reshape(flat.shape)
    result = np.zeros_like(flat)
    for start in range(0, flat.shape[1], GROUP):
        block, word = flat[:, start : start + GROUP].astype(np.float64), words[:, start : start + GROUP]
        scale = (np.abs(block).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16).astype(np.float64)
        code = np.divide(block, scale, out=np.zeros_like(block), where=scale > 0)
        if key is None:
            code = np.rint(code)
        else:
            low = np.floor(np.abs(code))
            away = np.floor((np.abs(code) - low) * 2.0**32) + word >= 2.0**32
            code = np.copysign(low + away, code)
        result[:, start : start + GROUP] = (np.clip(code, -128, 127) + 0.0) * scale  # integers have no -0
    return result.reshape(message.shape)


def add(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    return c + x


def cut(x: np.ndarray, ranks: int) -> np.ndarray:
    """The vector of an array in `ranks` pieces, of whole groups if of more than one."""
    flat = x.reshape(-1)
    length = -(-flat.size // ranks)
    if length > GROUP:
        length = -(-length // GROUP) * GROUP
    return np.pad(flat, (0, length * ranks - flat.size), mode="edge").reshape(ranks, length)


def exchange(pieces: np.ndarray, key: Key, add: Add = add) -> np.ndarray:
    """(ranks, piece): the sums that the owners have. `pieces` is (sender, owner, piece)."""
    totals = []
    for owner in range(len(pieces)):
        total: Any = None
        for rank in range(len(pieces)):
            arrived = sent(pieces[rank, owner], fold(key, SEND, 0, rank), owner)
            total = arrived if total is None else add(total, arrived)
        totals.append(total)
    return np.stack(totals)


def ring(
    pieces: np.ndarray, key: Key, add: Callable[..., np.ndarray] = lambda total, own, key, owner: total + own
) -> np.ndarray:
    ranks, totals = len(pieces), []
    for owner in range(ranks):
        rank = (owner + 1) % ranks
        total = pieces[rank, owner]
        for turn in range(ranks - 1):
            total = sent(total, fold(key, SEND, turn, rank), owner)
            rank = (rank + 1) % ranks
            total = add(total, pieces[rank, owner], fold(key, SUM, turn, rank), owner)
        totals.append(total)
    return np.stack(totals)


def two_stages(pieces: np.ndarray, key: Key, outer: int, inner: int) -> np.ndarray:
    """Rank (o, i) is number o inner + i."""
    totals = []
    for owner in range(outer * inner):
        at, partial = owner % inner, []  # the partial sums are formed on the ranks (o, at)
        for o in range(outer):
            ranks = [o * inner + i for i in range(inner)]
            arrived = [sent(pieces[rank, owner], fold(key, SEND, 0, rank), owner) for rank in ranks]
            total = arrived[0]
            for each in arrived[1:]:
                total = total + each
            partial.append(sent(total, fold(key, SEND, 1, o * inner + at), owner))
        total = partial[0]
        for each in partial[1:]:
            total = total + each
        totals.append(total)
    return np.stack(totals)


def gather(totals: np.ndarray, key: Key) -> np.ndarray:
    return np.stack([sent(total, fold(key, GATHER), owner) for owner, total in enumerate(totals)])


def psum(
    xs: Sequence[np.ndarray], key: Key = None, how: Callable[..., np.ndarray] = exchange, *more: Any
) -> np.ndarray:
    """The result of `psum` on every rank; `xs` are the arrays of the ranks."""
    own = fold(key, 0)
    pieces = np.stack([cut(x, len(xs)) for x in xs])
    return gather(how(pieces, own, *more), own).reshape(-1)[: xs[0].size].reshape(xs[0].shape)
