"""The stream against a second implementation in Python integers, its indexes against tiling, and its statistics.

Every statistic is turned into a z-score; a generator passes if no single one exceeds 5 in magnitude and no average over
the keys, times the square root of their number, exceeds 4.5. Keys are fixed, so the outcome is the same in every run.
Poor generators are put through the same statistics and must be rejected.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from further import Further
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jchop._core.rounding.random_bits import _threefry, flat_index, random_words, seed_words, stream_words

further = Further()

WORD = 0xFFFFFFFF
SINGLE, COMBINED = 5.0, 4.5
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
# Known answers of Threefry-2x32 with 20 rounds, from the file kat_vectors of Random123: key, counter, result.
KNOWN = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((WORD, WORD), (WORD, WORD), (0x1CB996FC, 0xBB002BE7)),
    (PI[2:], PI[:2], (0xC4923A9C, 0x483DF7A0)),
)
# The vectors of the module docstring: key words, lane 0 at 0, 1, 2**32 and 2**40 + 5, lane 1 at 0.
VECTORS = (
    ((0, 0), (0x70D60F23, 0x4D32F93F, 0xCC5BD811, 0x712F26D7, 0x6455A6BE)),
    (PI[2:], (0xE8280D1D, 0x4A0DD393, 0x8B9D4995, 0x4068D874, 0xD6C1053C)),
    (PI, (0x778D8745, 0xCCEDA2CE, 0x7495630E, 0xAE87E656, 0x18BDC71B)),
)
OFFSETS = (0, 1, 2**31, 2**32 - 5, 2**32 - 1, 2**32, 2**33 - 7, 2**40 - 3, 2**40 + 5, 2**63 - 1, 2**64 - 24)


# --- a second implementation, from the text of the module docstring --------------------------------------------------


def threefry(key: tuple[int, ...], counter: tuple[int, ...]) -> tuple[int, int]:
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (counter[0] + key[0]) & WORD, (counter[1] + key[1]) & WORD
    for turn in range(20):
        x0 = (x0 + x1) & WORD
        shift = (13, 15, 26, 6, 17, 29, 16, 24)[turn % 8]
        x1 = (x1 << shift & WORD | x1 >> 32 - shift) ^ x0
        if turn % 4 == 3:
            n = turn // 4 + 1
            x0, x1 = (x0 + schedule[n % 3]) & WORD, (x1 + schedule[(n + 1) % 3] + n) & WORD
    return x0, x1


def expected_seeds(data: tuple[int, ...]) -> list[int]:
    data = data + (0,) * (len(data) % 2)
    h = data[:2]
    for i in range(2, len(data), 2):
        h = threefry(h, data[i : i + 2])
    return [word for block in range(3) for word in threefry(h, (0x6A63686F + len(data), block))]


def expected_word(seeds: list[int], index: int, lane: int = 0) -> int:
    a, b, c = seeds[3 * lane : 3 * lane + 3]
    t = (index >> 32) * 0x9E3779B9
    x = (index ^ a ^ t) & WORD
    y = x = (x ^ x >> 17) * 0xED5AD4BB & WORD ^ b
    x = ((x ^ x >> 11) * 0xAC4C1B51 ^ c ^ t) & WORD
    x = (x ^ x >> 15) * 0x31848BAB & WORD
    return ((x ^ x >> 14) + y) & WORD


def make_key(data: tuple[int, ...]) -> jax.Array:
    implementation = {2: "threefry2x32", 4: "rbg"}[len(data)]
    return jax.random.wrap_key_data(jnp.array(data, jnp.uint32), impl=implementation)


def integers(words: jax.Array) -> list[int]:
    return np.asarray(words).ravel().tolist()


def seeds_of(number: int = 0) -> tuple[jax.Array, ...]:
    return seed_words(jax.random.key(number))


def test_threefry_known_answers() -> None:
    for key, counter, result in KNOWN:
        assert threefry(key, counter) == result
        words = [[jnp.uint32(word) for word in pair] for pair in (key, counter)]
        assert tuple(int(word) for word in _threefry(*words)) == result, key


def test_documented_vectors() -> None:
    places = ((0, 0), (1, 0), (2**32, 0), (2**40 + 5, 0), (0, 1))
    for data, words in VECTORS:
        seeds = seed_words(make_key(data))
        assert [int(seed) for seed in seeds] == expected_seeds(data)
        assert tuple(expected_word(expected_seeds(data), *place) for place in places) == words
        got = [random_words(seeds, jnp.uint32(index & WORD), jnp.uint32(index >> 32), lane) for index, lane in places]
        assert tuple(int(word) for word in got) == words, data


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("data", "x64"), [((7, 1), False), ((WORD, 5), True), ((0, 9, 0, 9), False), (PI, True), ((0, 0), True)]
)
def test_words_equal_the_second_implementation(data: tuple[int, ...], x64: bool) -> None:
    with jax.enable_x64(x64):
        seeds, wanted = seed_words(make_key(data)), expected_seeds(data)
        for offset in (0, 2**32 - 5, 2**40 + 5):
            high, low = jax.jit(lambda s, offset=offset: stream_words(s, (4, 6), offset, 64))(seeds)
            assert high.dtype == low.dtype == jnp.uint32
            assert integers(high) == [expected_word(wanted, offset + i) for i in range(24)]
            assert integers(low) == [expected_word(wanted, offset + i, 1) for i in range(24)]


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_flags_do_not_matter(implementation: str) -> None:
    key = jax.random.key(11, impl=implementation)
    for partitionable in (False, True):
        with jax.threefry_partitionable(partitionable):
            seeds = jax.jit(seed_words)(key)
        assert [int(seed) for seed in seeds] == expected_seeds(tuple(integers(jax.random.key_data(key))))


# --- indexes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 1, 12), (), (3, 0)])
def test_flat_index_of_a_chunk(shape: tuple[int, ...]) -> None:
    for offset in OFFSETS:
        lo, hi = flat_index(shape, offset)
        assert lo.shape == shape and lo.dtype == jnp.uint32
        got = np.asarray(lo).astype(object) + np.broadcast_to(np.asarray(hi), shape).astype(object) * 2**32
        assert np.ravel(got).tolist() == list(range(offset, offset + math.prod(shape))), offset


def test_high_word_is_a_known_number_where_it_can_be() -> None:
    assert flat_index((1 << 20,), 5)[1] == 0
    assert flat_index((8,), 2**40)[1] == 2**8
    assert isinstance(flat_index((8,), np.int64(2**40))[1], int)
    jax.jit(lambda i: [None for hi in [flat_index((8,), i)[1]] if hi != 0])(np.int32(3))
    assert not isinstance(flat_index((8,), 2**32 - 4)[1], int)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    ("kind", "x64"),  # there are 64-bit integers only with x64
    [(np.int32, False), (np.uint8, True), (np.int16, False), (np.uint32, True), (np.int64, True), (np.uint64, True)],
)
def test_traced_offsets(kind: type[np.integer], x64: bool) -> None:
    largest = int(np.iinfo(kind).max)
    with jax.enable_x64(x64):
        seeds = seeds_of(2)
        traced = jax.jit(lambda start: stream_words(seeds, (3, 5), start))
        for offset in {0, 7, largest - 15, *(o for o in OFFSETS if o + 15 <= largest)}:
            assert integers(traced(kind(offset))) == integers(stream_words(seeds, (3, 5), offset))


@pytest.mark.in_turn(12)
@pytest.mark.parametrize(
    ("whole", "x64"),
    [((13, 9, 8), False), ((5, 2**20, 2**12), True), ((2**33, 4, 2**20), False), ((9, 2**31, 2**31), True),
     ((9, 2**31, 2**31), False)],
)  # fmt: skip
def test_tiles_of_an_array(whole: tuple[int, ...], x64: bool) -> None:
    rng = np.random.default_rng(0)
    tile, wanted = (3, 2, 4), expected_seeds((0, 1))
    with jax.enable_x64(x64):
        seeds = seeds_of(1)
        traced = jax.jit(lambda starts: stream_words(seeds, tile, (starts, whole)))
        mixed = jax.jit(lambda start: stream_words(seeds, tile, ((1, start, 4), whole)))
        for _ in range(8):
            limit = [min(n - t, 2**31 - 1) for n, t in zip(whole, tile, strict=True)]
            starts = tuple(int(rng.integers(0, n + 1)) for n in limit)
            for begin, bits in (
                (starts, stream_words(seeds, tile, (starts, whole))),
                (starts, traced(tuple(np.int32(s) for s in starts))),
                ((1, starts[1], 4), mixed(np.int32(starts[1]))),
            ):
                places = itertools.product(*(range(s, s + n) for s, n in zip(begin, tile, strict=True)))
                flat = [(i * whole[1] + j) * whole[2] + k for i, j, k in places]
                assert integers(bits) == [expected_word(wanted, index) for index in flat]


def test_tiles_cover_the_whole() -> None:
    seeds, shape = seeds_of(3), (12, 10)
    whole = np.asarray(stream_words(seeds, shape))
    for i, j in itertools.product((0, 4, 8), (0, 5)):
        np.testing.assert_array_equal(stream_words(seeds, (4, 5), ((i, j), shape)), whole[i : i + 4, j : j + 5])
    for start in (0, 17, 60):
        np.testing.assert_array_equal(stream_words(seeds, (60,), start), whole.ravel()[start : start + 60])


@further.first
def an_axis_beyond_the_counter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 2\*\*32 long"):
        flat_index((2**32 + 1,))
    index = jax.eval_shape(lambda: flat_index((3, 2**32)))
    assert index[1].shape == (3, 2**32)


@further
def jit_vmap_and_scan_equal_the_plain_call() -> None:
    keys = jax.random.split(jax.random.key(5), 6)

    def bits(key: jax.Array) -> jax.Array:
        return stream_words(seed_words(key), (33,), 2**32 - 10)

    rows = np.stack([np.asarray(bits(key)) for key in keys])
    np.testing.assert_array_equal(jax.jit(bits)(keys[0]), rows[0])
    np.testing.assert_array_equal(jax.vmap(bits)(keys), rows)
    np.testing.assert_array_equal(jax.jit(jax.vmap(bits))(keys), rows)
    np.testing.assert_array_equal(jax.lax.map(bits, keys), rows)
    assert len(np.unique(rows)) == rows.size


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
def test_shards_equal_the_whole() -> None:
    n, size = jax.device_count(), 64 * jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def chunk(key: jax.Array) -> jax.Array:
        return stream_words(seed_words(key), (size // n,), jax.lax.axis_index("d") * (size // n))

    parts = jax.shard_map(chunk, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("d"))
    key = jax.random.key(8)
    np.testing.assert_array_equal(jax.jit(parts)(key), stream_words(seed_words(key), (size,)))
    with contextlib.suppress(AttributeError):
        assert len({shard.device for shard in jax.jit(parts)(key).addressable_shards}) == n


# --- statistics -------------------------------------------------------------------------------------------------------

Generator = Callable[[tuple[jax.Array, ...], jax.Array, int], jax.Array]  # seeds, low words of the index, high word
Words = Callable[..., np.ndarray]


def multiply_counter(seeds: tuple[jax.Array, ...], lo: jax.Array, hi: int) -> jax.Array:
    return (lo + np.uint32(hi)) * np.uint32(0x9E3779B9) ^ seeds[0]


def lowbias_counter(seeds: tuple[jax.Array, ...], lo: jax.Array, hi: int) -> jax.Array:
    """A good two-multiplication hash (C. Wellons) of a raw counter, with a key only added to the counter."""
    x = lo + seeds[0] + np.uint32(hi)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def fmix32_weyl(seeds: tuple[jax.Array, ...], lo: jax.Array, hi: int) -> jax.Array:
    """The last steps of MurmurHash3 on a Weyl sequence, with two keys: it fails only in the large avalanche test."""
    x = lo * np.uint32(0x9E3779B9) + seeds[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B) ^ seeds[1] ^ np.uint32(hi)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def permutation(seeds: tuple[jax.Array, ...], lo: jax.Array, hi: int) -> jax.Array:
    """The stream without the last addition: it never repeats a word."""
    x = (lo ^ (lo >> np.uint32(17)) ^ seeds[0]) * np.uint32(0xED5AD4BB)
    x = (x ^ seeds[1] ^ ((x ^ seeds[1]) >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _generate(generator: Generator, seeds: tuple[jax.Array, ...], lo: jax.Array, hi: int) -> jax.Array:
    return generator(seeds, lo, hi)


def words_of(generator: Generator, seeds: tuple[jax.Array, ...]) -> Words:
    return lambda lo, hi=0: np.asarray(_generate(generator, seeds, lo, hi))


def chi_squared(counts: np.ndarray) -> float:
    """z of a table of counts that should all be equal."""
    mean, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - mean) ** 2).sum() / mean - freedom) / math.sqrt(2 * freedom))


def normals(scores: np.ndarray) -> float:
    """z of the sum of squares of values that should be standard normal, or their largest if that stands out more."""
    total = ((scores**2).sum() - scores.size) / math.sqrt(2 * scores.size)
    largest = float(np.abs(scores).max()) - math.sqrt(2 * math.log(scores.size))
    return float(max(total, largest, key=abs))


def signs(words: np.ndarray) -> np.ndarray:
    """The bits of each word as a row of 32 values of -1 and 1."""
    return np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1).astype(np.float32) * 2 - 1


def flips(difference: np.ndarray) -> np.ndarray:
    """z of each of the 32 bits of words that should be uniform; in pieces that stay in the cache."""
    pieces = np.split(difference, max(difference.size >> 14, 1))
    return np.sum([signs(piece).sum(0) for piece in pieces], 0) / math.sqrt(difference.size)


def repeats(words: np.ndarray) -> float:
    """z of the number of repeated words (the birthday problem)."""
    ordered = np.sort(words)
    expected = words.size + 2.0**32 * math.expm1(words.size * math.log1p(-(2.0**-32)))
    return float(((ordered[1:] == ordered[:-1]).sum() - expected) / math.sqrt(expected))


def word_statistics(words: Words, size: int) -> Iterator[tuple[str, float]]:
    """The statistics of one key: (name, z)."""
    w = words(np.arange(size, dtype=np.uint32))
    octets = w.view(np.uint8).reshape(-1, 4)
    for lane in range(4):
        yield f"byte {lane}", chi_squared(np.bincount(octets[:, lane], minlength=256))
        pairs = octets[::2, lane].astype(np.uint16) << 8 | octets[1::2, lane]
        yield f"pairs of byte {lane}", chi_squared(np.bincount(pairs, minlength=1 << 16))
    yield (
        "bytes 0 and 3",
        chi_squared(np.bincount(octets[:, 0].astype(np.uint16) << 8 | octets[:, 3], minlength=1 << 16)),
    )
    for part, half in (("high", w >> np.uint32(16)), ("low", w & np.uint32(0xFFFF))):
        centred = half.astype(np.float32) - np.float32(32767.5)
        for lag in (1, 2, 64, 4096):
            products = np.multiply(centred[lag:], centred[:-lag], dtype=np.float64).sum()
            yield f"lag {lag}, {part} half", float(products / ((2.0**32 - 1) / 12) / math.sqrt(size - lag))
    yield "repeated words", repeats(w)
    sums, inside, across = np.zeros(32), np.zeros((32, 32)), np.zeros((32, 32))
    for chunk in np.split(w, size >> 14):  # pieces that stay in the cache
        s = signs(chunk)
        sums, inside, across = sums + s.sum(0), inside + s.T @ s, across + s[:-1].T @ s[1:]
    yield "balance of bits", normals(sums / math.sqrt(size))
    yield "pairs of bits in a word", normals(inside[np.triu_indices(32, 1)] / math.sqrt(size))
    yield "pairs of bits in adjacent words", normals(across / math.sqrt(size))
    yield "index avalanche", normals(np.stack(list(index_flips(words, 1 << 16))))


def low_flips(words: Words, bit: int, size: int, start: int = 0) -> np.ndarray:
    """How far each output bit is from flipping in half of the cases if this bit of the low word flips, as z."""
    j = np.arange(start, start + size, dtype=np.uint32)
    low = j & np.uint32((1 << bit) - 1)
    base = low | (j ^ low) << np.uint32(1)  # every index with that bit clear, each pair counted once
    return flips(words(base) ^ words(base | np.uint32(1 << bit)))


def index_flips(words: Words, size: int) -> Iterator[np.ndarray]:
    """The same for each of the 64 bits of the index."""
    yield from (low_flips(words, bit, size) for bit in range(32))
    j = np.arange(size, dtype=np.uint32)
    yield from (flips(words(j) ^ words(j, 1 << bit)) for bit in range(32))


def scores(generator: Generator, keys: int, size: int) -> dict[str, np.ndarray]:
    """The z-scores of each statistic over the keys."""
    rows = [dict(word_statistics(words_of(generator, seeds_of(k)), size)) for k in range(keys)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def failures(results: dict[str, np.ndarray]) -> list[str]:
    found = []
    for name, z in results.items():
        single, combined = float(max(z, key=abs)), float(z.mean() * math.sqrt(z.size))
        if not (abs(single) < SINGLE and abs(combined) < COMBINED):
            found.append(f"{name}: single {single:.1f}, combined {combined:.1f}")
    return found


def report(results: dict[str, np.ndarray]) -> None:
    for name, z in results.items():
        print(f"{name:34s} largest {max(z, key=abs):6.2f}  combined {z.mean() * math.sqrt(z.size):6.2f}")


FULL = pytest.mark.slow
SIZES = [pytest.param(1, 1 << 17, id="reduced"), pytest.param(20, 1 << 22, id="full", marks=FULL)]


@further
@pytest.mark.parametrize(("keys", "size"), SIZES)
def words_look_random(keys: int, size: int) -> None:
    results = scores(random_words, keys, size)
    report(results)
    assert not failures(results)


@further
def statistics_reject_a_poor_generator() -> None:
    found = {text.split(":")[0] for text in failures(scores(multiply_counter, 1, 1 << 17))}
    assert {"byte 0", "pairs of byte 1", "lag 1, high half", "pairs of bits in a word", "index avalanche"} <= found


@pytest.mark.parametrize("generator", [lowbias_counter, permutation])
def test_words_that_never_repeat_are_rejected(generator: Generator) -> None:
    words = words_of(generator, seeds_of())(np.arange(1 << 20, dtype=np.uint32))
    assert failures({"repeated words": np.array([repeats(words)])})


def large_avalanche(generator: Generator, keys: int, size: int) -> dict[str, np.ndarray]:
    """The avalanche of the low index word, with so many cases for each bit, in pieces that stay in the cache."""
    rows, starts = [], range(0, size, 1 << 14)
    for number in range(keys):
        words = words_of(generator, seeds_of(number))
        parts = [[low_flips(words, bit, 1 << 14, start) for bit in range(32)] for start in starts]
        rows.append(normals(np.sum(parts, 0) / math.sqrt(len(starts))))
    return {"index bits": np.array(rows)}


@pytest.mark.parametrize(("keys", "size"), [(1, 1 << 16), pytest.param(2, 1 << 22, id="full", marks=FULL)])
def test_every_index_bit_changes_half_of_the_bits(keys: int, size: int) -> None:
    results = large_avalanche(random_words, keys, size)
    report(results)
    assert not failures(results)
    assert size < 1 << 22 or failures(large_avalanche(fmix32_weyl, 1, size))


def related_streams(generator: Generator, count: int, size: int) -> list[np.ndarray]:
    """Streams of keys made from one another, and of the other lane and other high words of one key."""
    root, lo = jax.random.key(0), np.arange(size, dtype=np.uint32)
    keys = [jax.random.key(i) for i in range(count)] + [jax.random.fold_in(root, i) for i in range(count)]
    keys += [*jax.random.split(keys[1], count), jax.random.key(0, impl="rbg")]
    streams = [words_of(generator, seed_words(key))(lo) for key in keys]
    base = seed_words(root)
    streams += [words_of(generator, base)(lo, hi) for hi in (1, 2, 256)]
    return [*streams, words_of(generator, base[3:] + base[:3])(lo)]


def stream_statistics(streams: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Between streams: correlation of every pair; bits of the xor and of the difference, and common words, of some."""
    size = streams[0].size
    found = {"correlation": [], "xor": [], "difference": [], "common words": [], "equal words": []}
    matrix = np.stack([(s.astype(np.float64) - WORD / 2).astype(np.float32) for s in streams])
    products = (matrix @ matrix.T).astype(np.float64) / ((2.0**64 - 1) / 12) / math.sqrt(size)
    found["correlation"] = [normals(products[np.triu_indices(len(streams), 1)])]
    for a, b in zip(streams, streams[1:] + streams[:1], strict=True):
        found["xor"].append(normals(flips(a ^ b)))
        found["difference"].append(normals(flips(a - b)))
        found["common words"].append(repeats(np.concatenate([a, b])))
        found["equal words"].append(float((a == b).sum()))  # 2**-12 expected at 2**20 words
    return {name: np.array(z) for name, z in found.items()}


@pytest.mark.parametrize(("count", "size"), [(4, 1 << 17), pytest.param(8, 1 << 20, id="full", marks=FULL)])
def test_streams_of_related_keys_are_unrelated(count: int, size: int) -> None:
    results = stream_statistics(related_streams(random_words, count, size))
    report(results)
    assert not failures(results)


def test_shifted_streams_are_seen() -> None:
    lo = np.arange(1 << 18, dtype=np.uint32)
    streams = [words_of(lowbias_counter, (jnp.uint32(seed),))(lo) for seed in (0, 1000, 2000, 3000)]
    assert any("common words" in text for text in failures(stream_statistics(streams)))


@pytest.mark.parametrize(("keys", "size"), [(1, 1 << 14), pytest.param(8, 1 << 18, id="full", marks=FULL)])
def test_every_key_bit_changes_half_of_the_bits(keys: int, size: int) -> None:
    lo = np.arange(size, dtype=np.uint32)
    results = []
    for number in range(keys):
        data = (0, number)
        base = words_of(random_words, seed_words(make_key(data)))(lo)
        rows = []
        for bit in range(64):
            other = (data[0] ^ 1 << bit >> 32, data[1] ^ 1 << bit & WORD)
            changed = base ^ words_of(random_words, seed_words(make_key(other)))(lo)
            rows.append(flips(changed))
        results.append(normals(np.stack(rows)))
    report({"key avalanche": np.array(results)})
    assert not failures({"key avalanche": np.array(results)})


@functools.partial(jax.jit, static_argnums=(0, 3))
def rounded_up(
    generator: Generator, seeds: tuple[jax.Array, ...], low: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """How many elements with these low 16 bits round up to bfloat16, and how many neighbours do so together."""
    values = jnp.full(size, 0x3F800000, jnp.uint32) | low
    bits = values + (generator(seeds, flat_index((size,))[0], 0) >> np.uint32(16))
    rounded = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)
    up = (rounded > 1).astype(jnp.uint32)
    return up.sum(), (up[1:] & up[:-1]).sum()


def rounding_scores(generator: Generator, keys: int, size: int) -> dict[str, np.ndarray]:
    places = (1, 3, 64, 0x0FFF, 0x4000, 0x5555, 0x8000, 0xAAAA, 0xC001, 0xFF00, 0xFFFF)
    mean, together = [], []
    for number, low in itertools.product(range(keys), places):
        up, both = (int(n) for n in rounded_up(generator, seeds_of(number), np.uint32(low), size))
        p = low / 65536
        mean.append((up - size * p) / math.sqrt(size * p * (1 - p)))
        # The covariance of neighbours about the exact mean: edges aside, sum (u - p)(u' - p) = both - 2 p up + n p p.
        together.append((both - 2 * p * up + size * p * p) / (math.sqrt(size) * p * (1 - p)))
    usual = np.tile([64 <= low <= 0xFF00 for low in places], keys)  # the others are too rare for a normal law
    return {"rounded mean": np.array(mean), "rounded neighbours": np.array(together)[usual]}


@pytest.mark.parametrize(("keys", "size"), SIZES)
def test_mean_of_stochastic_rounding_is_unbiased(keys: int, size: int) -> None:
    results = rounding_scores(random_words, keys, size)
    report(results)
    assert not failures(results)


def test_rounding_statistics_reject_a_poor_generator() -> None:
    assert failures(rounding_scores(multiply_counter, 2, 1 << 20))


test_further = further.test()
