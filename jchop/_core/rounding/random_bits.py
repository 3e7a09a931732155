"""The random words of stochastic rounding: a counter-based generator written out in uint32 operations.

A word is a pure function of a key and of the 64-bit index of an element. So a result depends neither on tiling nor on
the device, the number of devices, the backend or 64-bit mode. **The stream is a stable interface**: the same key and
index give the same word in every release. All arithmetic below is modulo 2**32, ``>>`` shifts in zeros, ``^`` is xor.

*Seeds.* Let ``d[0] ... d[n-1]`` be the uint32 words of ``jax.random.key_data(key)``; an odd number of words gets a 0 at
its end. Let ``threefry(key, counter)`` be Threefry-2x32 with 20 rounds (Salmon et al., SC'11, as in their Random123)::

    h = (d[0], d[1]);  then for each further pair:  h = threefry(h, (d[2i], d[2i+1]))
    (s[2b], s[2b+1]) = threefry(h, (0x6A63686F + n, b))  for b = 0, 1, 2

The constant separates the seeds from the results of ``jax.random.split``, ``fold_in`` and ``bits`` with the same key.
``n`` separates keys of different lengths, because ``h`` of an rbg key can be the data of a folded threefry key.

*Word* of lane L (0 or 1) at the index ``hi * 2**32 + lo``, with ``t = hi * 0x9E3779B9``::

    x = lo ^ s[3L] ^ t
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) ^ s[3L+1];      y = x
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) ^ s[3L+2] ^ t
    x = (x ^ (x >> 15)) * 0x31848BAB
    word = (x ^ (x >> 14)) + y

A 64-bit word is lane 0 as its high half and lane 1 as its low half. The index counts elements in C order. The shifts
and multipliers come from ``triple32`` (C. Wellons, hash-prospector, released into the public domain).

*Test vectors* (key words: lane 0 at indexes 0, 1, 2**32, 2**40 + 5; lane 1 at index 0), hexadecimal::

    0, 0:                                            70D60F23 4D32F93F CC5BD811 712F26D7; 6455A6BE
    13198A2E, 03707344:                              E8280D1D 4A0DD393 8B9D4995 4068D874; D6C1053C
    243F6A88, 85A308D3, 13198A2E, 03707344:          778D8745 CCEDA2CE 7495630E AE87E656; 18BDC71B

*Reason.* Among the measured hashes with which a whole stochastic rounding takes less time than three copies of the
array, this is the strongest. It has three multiplications, with a seed before each, so that two keys do not give
shifted or permuted copies of one sequence. With ``y`` added, words repeat as often as random words do; in a permutation
of the counter they would never repeat. Rounding float32 to bfloat16 takes 2.0 and to e4m3 2.9 times as long as an
in-place copy. Threefry-20, also written out, takes 11 times, ``jax.random.bits`` over 100 times. Over 20 keys of
2**24 words no statistic of the tests exceeds 3.4 standard deviations. docs/randomness.md has the limits, and
docs/measurements/randomness.md the figures. It is not a cryptographic generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from jchop._common.settings import always_jit
from jchop._core.xla.backend import PORTABLE
from jchop._core.xla.sizes import are_static

_WORD_MASK = 0xFFFF_FFFF
_SEED_DOMAIN = 0x6A63_686F
_GOLDEN_RATIO_WORD = 0x9E37_79B9
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_WordPair = tuple[Any, Any]  # the low and the high word of a 64-bit number
_STATIC_INTEGERS = (int, np.integer, np.ndarray)


def _uint32(value: int) -> np.uint32:
    """A uint32 constant: typed, so that neither weak types nor 64-bit mode change a result."""
    return np.uint32(value & _WORD_MASK)


def _threefry(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, on two key words and two counter words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _uint32(0x1BD1_1BDA))
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            a = a + b
            b = ((b << _uint32(r)) | (b >> _uint32(32 - r))) ^ a
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + _uint32(group + 1)
    return a, b


@always_jit
def _seeds_of_key_data(data: Array) -> tuple[Array, ...]:
    d = [data[i] for i in range(data.shape[0])] + [jnp.zeros((), jnp.uint32)] * (data.shape[0] % 2)
    h = (d[0], d[1])
    for i in range(2, len(d), 2):
        h = _threefry(h, (d[i], d[i + 1]))
    a, b = _threefry(h, (jnp.full(3, _SEED_DOMAIN + len(d), jnp.uint32), jnp.arange(3, dtype=jnp.uint32)))
    return PORTABLE.once((a[0], b[0], a[1], b[1], a[2], b[2]))


#: The number of words of `seed_words`.
SEEDS = 6


def seed_words(key: Array) -> tuple[Array, ...]:
    """The six seeds of `key`: three for each lane of `random_words`.

    Args:
        key: a scalar typed key (`jax.random.key`) of any implementation; batches go through `jax.vmap`.

    Returns:
        Six uint32 scalars, as defined in the docstring of this module.

    Example:
        >>> [hex(int(s)) for s in seed_words(jax.random.key(0))[:2]]
        ['0x58fa5ee8', '0xbcbb1cc0']
    """
    return _seeds_of_key_data(jax.random.key_data(key))


def random_words(seeds: Sequence[Array], lo: Array, hi: Array | int = 0, lane: int = 0) -> Array:
    """The words at the indexes ``hi * 2**32 + lo``: elementwise uint32 operations only, which also suit a kernel body.

    Args:
        seeds: the result of `seed_words`.
        lo: low words of the indexes, uint32.
        hi: high words: uint32, an array like `lo` or a scalar; or an int. An int costs nothing.
        lane: 0, or 1 for a second, independent stream.

    Returns:
        One uint32 word for each index.

    Example:
        >>> [hex(int(w)) for w in random_words(seed_words(jax.random.key(0)), jnp.arange(2, dtype=jnp.uint32))]
        ['0x70d60f23', '0x4d32f93f']
    """
    k0, k1, k2 = seeds[3 * lane : 3 * lane + 3]
    t = _uint32(hi * _GOLDEN_RATIO_WORD) if isinstance(hi, int) else hi * _uint32(_GOLDEN_RATIO_WORD)
    x = lo ^ (k0 ^ t)
    x = ((x ^ (x >> _uint32(17))) * _uint32(0xED5A_D4BB)) ^ k1
    y = x
    x = ((x ^ (x >> _uint32(11))) * _uint32(0xAC4C_1B51)) ^ (k2 ^ t)
    x = (x ^ (x >> _uint32(15))) * _uint32(0x3184_8BAB)
    return (x ^ (x >> _uint32(14))) + y


def random_words_of_width(seeds: Sequence[Array], lo: Array, hi: Array | int, width: int) -> Array:
    """`random_words` of 32 bits; of 64 bits with lane 0 as their high half, and lane 1 as their low one."""
    word = random_words(seeds, lo, hi)
    if width == 32:
        return word
    return (word.astype(jnp.uint64) << 32) | random_words(seeds, lo, hi, lane=1).astype(jnp.uint64)


def flat_index(shape: Sequence[int], offset: Any = 0, base: int = 0) -> tuple[Array, Array | int]:
    """The 64-bit flat indexes of the elements of a part of an array, as low and high words.

    Args:
        shape: shape of the part; no axis longer than 2**32.
        offset: the position of the part, not negative. For a contiguous chunk it is the flat index of its first element
            (an int or a traced integer scalar). Else ``(starts, whole)``: one start for each axis, ints or traced, and
            the shape of the whole array. Default 0.
        base: a known index added to all. Default 0.

    Returns:
        ``(lo, hi)``: uint32 arrays of `shape`; `hi` is an int if it is one known number (nearly always 0).

    Raises:
        NotImplementedError: for symbolic lengths.
        ValueError: if an axis is longer than 2**32.

    Example:
        >>> flat_index((2, 2), ((1, 1), (4, 5)))[0].tolist()
        [[6, 7], [11, 12]]
    """
    if not are_static(shape):
        raise NotImplementedError(
            f"shape={tuple(shape)}: the words of a random stream are numbered, so a symbolic length cannot be drawn "
            "for; export the program for known lengths, or use a format that draws nothing"
        )
    if max(shape, default=0) > 1 << 32:
        raise ValueError(f"shape={tuple(shape)}: an axis may be at most 2**32 long; reshape, or use chunks with offset")
    tile = isinstance(offset, tuple)
    starts, whole = offset if tile else ((offset,), shape)
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(shape))]
    terms = list(zip(starts, strides if tile else [1], strict=True))
    first = base + sum(int(start) * stride for start, stride in terms if isinstance(start, _STATIC_INTEGERS))
    traced_starts = [(start, stride) for start, stride in terms if not isinstance(start, _STATIC_INTEGERS)]
    steps = [
        (lax.broadcasted_iota(jnp.uint32, tuple(shape), axis), stride)
        for axis, stride in enumerate(strides)
        if shape[axis] > 1
    ]
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n > 0)
    # The largest possible index decides whether a high word can differ from the high word of the known part.
    last = (
        base + math.prod(whole) - 1
        if tile
        else first + reach + sum(int(jnp.iinfo(i.dtype).max) for i, _ in traced_starts)
    )
    if last <= _WORD_MASK or (not traced_starts and first >> 32 == (first + reach) >> 32):
        low = _low_sum([(start.astype(jnp.uint32), stride) for start, stride in traced_starts] + steps, first)
        return jnp.broadcast_to(low, shape), 0 if last <= _WORD_MASK else first >> 32
    total = (_uint32(first), _uint32(first >> 32))
    for start, stride in traced_starts:
        total = add_word_pairs(total, _multiply_word_pair(split_index(start), stride))
    if reach <= _WORD_MASK:
        total = add_word_pairs(total, (_low_sum(steps, 0), _uint32(0)))
    else:
        for step, stride in steps:
            total = add_word_pairs(total, _multiply_word_pair((step, _uint32(0)), stride))
    return jnp.broadcast_to(total[0], shape), jnp.broadcast_to(total[1], shape)


def stream_words(seeds: Sequence[Array], shape: Sequence[int], offset: Any = 0, width: int = 32, base: int = 0) -> Any:
    """The words of an array of `shape` at `offset` in the stream.

    Args:
        seeds: the result of `seed_words`.
        shape: shape of the result.
        offset: as in `flat_index`. Default 0.
        width: 32, or 64 for pairs. Default 32.
        base: as in `flat_index`. Default 0.

    Returns:
        A uint32 array; for 64 bits two arrays, the high words (equal to the 32-bit words) and the low words.

    Example:
        >>> stream_words(seed_words(jax.random.key(0)), (2,), offset=2**40).shape
        (2,)
    """
    lo, hi = flat_index(shape, offset, base)
    high = random_words(seeds, lo, hi)
    return high if width == 32 else (high, random_words(seeds, lo, hi, lane=1))


def _low_sum(terms: Sequence[tuple[Any, int]], constant: int) -> Any:
    """The low word of the sum of every ``term * stride`` and a constant."""
    total: Any = _uint32(constant) if constant & _WORD_MASK else None
    for term, stride in terms:
        product = term if stride == 1 else term * _uint32(stride)
        total = product if total is None else total + product
    return jnp.zeros((), jnp.uint32) if total is None else total


def split_index(value: Array) -> _WordPair:
    """The words of a nonnegative traced integer."""
    high = (value >> 32).astype(jnp.uint32) if value.dtype.itemsize == 8 else _uint32(0)
    return value.astype(jnp.uint32), high


def add_word_pairs(a: _WordPair, b: _WordPair) -> _WordPair:
    """The sum modulo 2**64; the carry is written without a comparison, for kernels."""
    low = a[0] + b[0]
    carry = ((a[0] & b[0]) | ((a[0] | b[0]) & ~low)) >> _uint32(31)
    return low, a[1] + b[1] + carry


def _multiply_word_pair(a: _WordPair, stride: int) -> _WordPair:
    """The product modulo 2**64 with a known integer, from products of 16-bit halves."""
    mask, half = _uint32(0xFFFF), _uint32(16)
    a0, a1, b0, b1 = a[0] & mask, a[0] >> half, _uint32(stride & 0xFFFF), _uint32((stride & _WORD_MASK) >> 16)
    cross0, cross1 = a0 * b1, a1 * b0
    middle = ((a0 * b0) >> half) + (cross0 & mask) + (cross1 & mask)
    high = a1 * b1 + (cross0 >> half) + (cross1 >> half) + (middle >> half)
    return a[0] * _uint32(stride), high + a[0] * _uint32(stride >> 32) + a[1] * _uint32(stride)


# == the position of an array in the random stream, and the words of its elements ======================================


@dataclass(frozen=True)
class StreamOffset:
    """The static part of an offset, with None for each traced start."""

    static_starts: tuple[int | None, ...] = (0,)
    whole: tuple[int, ...] | None = None  # the shape of the whole array; None for a contiguous chunk
    base: int = 0  # a known index added to all
    shape: tuple[int, ...] | None = None  # the shape in which the words are drawn; None for the array's shape

    def offset(self, starts: Sequence[Array]) -> Any:
        """The argument `offset` of `stream_words`, with the traced starts filled in."""
        rest = iter(starts)
        each = tuple(next(rest) if start is None else start for start in self.static_starts)
        return each[0] if self.whole is None else (each, self.whole)


STREAM_START = StreamOffset()


def draw_words(
    seeds: Sequence[Array], shape: tuple[int, ...], place: StreamOffset, starts: Sequence[Array], width: int
) -> Array:
    """A word of `width` bits, 32 or 64, for each element of an array of `shape`."""
    index = flat_index(place.shape or shape, place.offset(starts), place.base)
    return random_words_of_width(seeds, *index, width).reshape(shape)


def words_like(x: Array, seeds_and_starts: Sequence[Array], place: StreamOffset) -> Array:
    """A word for each element of `x`, of 64 bits for float64.

    Args:
        x: the array to round.
        seeds_and_starts: the words of `seed_words`, then the traced starts of `place`; or the word of each element.
        place: the position of `x` in the random stream.
    """
    if len(seeds_and_starts) == 1:
        return seeds_and_starts[0]
    word = draw_words(
        seeds_and_starts[:SEEDS], x.shape, place, seeds_and_starts[SEEDS:], 64 if x.dtype.itemsize == 8 else 32
    )
    # ORed with zeros like x, the words have the sharding of x in their type, which explicit meshes need.
    return word | jnp.zeros_like(x, word.dtype)
