"""`KVCache`: which tokens it holds, in which bits, whatever the order in which they came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import export
from layer_references import checked, each

import jchop as jc

further = Further()

HEADS, SIZE = 2, 8
SPECS = [
    None, "int8(group=all)", "int4(group=4)", "uint4(group=8,zero_point=integer)", "float8_e4m3fn", "mxfp8_e4m3",
    "nf4(group=8,scale=bfloat16)", "float8_e5m2:toward_zero", "bfp5(group=4)",
]  # fmt: skip
EIGHT: dict[str, Any] = {"keys": "int8(group=all)", "values": "float8_e4m3fn"}
update = jax.jit(lambda cache, *tokens: cache.update(*tokens))
attend = jax.jit(jc.dot_product_attention)


def normal(seed: int, tokens: int, batch: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, tokens, HEADS, SIZE)), "float32")


def of_kind(kind: str, length: int, batch: int = 3, **specs: Any) -> jc.KVCache:
    shape = (batch, length, HEADS, SIZE)
    if kind == "paged":
        return jc.KVCache.paged(shape, pages=batch * -(-length // 4), page_size=4, **specs)
    return getattr(jc.KVCache, kind)(shape, **specs)


def held(cache: jc.KVCache) -> list[dict[int, tuple[np.ndarray, np.ndarray]]]:
    """The keys and values of each sequence by position."""
    keys, values = np.asarray(cache.keys), np.asarray(cache.values)
    rows = [
        {int(p): (keys[b, s], values[b, s]) for s, p in enumerate(row) if p >= 0}
        for b, row in enumerate(np.asarray(cache.positions))
    ]
    assert sum(map(len, rows)) == (np.asarray(cache.positions) >= 0).sum()  # no position twice
    return rows


@pytest.mark.parametrize("kind", ["full", "paged", "rolling"])
def test_rotated_keys_in_three_bits_beside_recent_tokens(kind: str) -> None:
    """Beside NumPy in float64: also after tokens are dropped, when the older ones are read in three bits again."""
    recent, rotation = 3, jc.Hadamard(4)
    specs = {"keys": "normal3", "values": "normal3", "rotation": rotation, "recent": recent}
    k, v, q = (normal(i, 12).at[..., 2].multiply(5.0) for i in range(3))
    cache = of_kind(kind, 12, **specs, **({"chunk": 7} if kind == "rolling" else {}))
    cache = update(update(cache, k[:, :7], v[:, :7]), k[:, 7:8], v[:, 7:8]).truncate(6)
    for t in range(6, 12):
        cache = update(cache, k[:, t : t + 1], v[:, t : t + 1])

    def stored(x: jax.Array) -> np.ndarray:
        turn = np.kron(np.eye(SIZE // 4), rotation.matrix)
        turned = np.asarray(x, np.float64) @ turn.T
        scale = np.sqrt((turned**2).mean(-1, keepdims=True)).astype(jnp.bfloat16).astype(np.float64)
        levels = np.array(jc.formats.normal3.element.levels)  # type: ignore[attr-defined]
        packed = levels[np.abs(turned[..., None] / scale[..., None] - levels).argmin(-1)] * scale @ turn
        return np.where(np.arange(12)[:, None, None] >= 12 - recent, x, packed)

    keys, values = stored(k), stored(v)
    order = np.argsort(np.asarray(cache.positions), axis=1)[:, -12:, None, None]
    np.testing.assert_allclose(np.take_along_axis(np.asarray(cache.keys), order, 1), keys, atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(np.asarray(cache.values), order, 1), values, atol=2e-5)
    weights = np.exp(np.einsum("bhd,bshd->bhs", np.asarray(q[:, -1], np.float64), keys) / SIZE**0.5)
    expected = np.einsum("bhs,bshd->bhd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(attend(q[:, -1:], cache)[:, 0], expected, atol=2e-5)
    copies = cache.take([2, 0])
    np.testing.assert_allclose(attend(q[jnp.array([2, 0]), -1:], copies)[:, 0], expected[[2, 0]], atol=2e-5)
    fresh = cache.release(jnp.array([True, False, False]))
    assert (fresh.positions[0] == -1).all() and not np.asarray(fresh.keys[0]).any()


def by_channel(x: np.ndarray) -> np.ndarray:
    """Groups of four tokens of each head and channel in two bits with a zero point, in NumPy; the rest as it came."""
    groups = x[: len(x) // 4 * 4].reshape(-1, 4, HEADS, SIZE).astype(np.float64)
    low, high = groups.min(1, initial=0.0, keepdims=True), groups.max(1, initial=0.0, keepdims=True)
    scale = ((high - low) / 3).astype(np.float32).astype(np.float64)
    zero = np.clip(-np.rint(low / scale), 0, 3)
    numbers = (np.clip(np.rint(groups / scale + zero), 0, 3) - zero) * scale
    return np.concatenate([numbers.reshape(-1, HEADS, SIZE).astype(np.float32), x[len(x) // 4 * 4 :]])


@pytest.mark.parametrize("kind", ["full", "paged"])
def test_keys_with_a_scale_for_groups_of_tokens_of_a_channel(kind: str) -> None:
    """As in KIVI: prompts of several lengths, tokens, drafts that are dropped, and copies of a sequence."""
    recent, length = 6, 24
    specs = {"keys": "uint2(group=4,axis=1,zero_point=integer)", "values": "int4(group=all)", "recent": recent}
    cache = of_kind(kind, length, **specs)
    k, v = np.asarray(normal(1, length)), np.asarray(normal(2, length))
    stored = np.asarray(jc.round_to_format(v, "int4(group=all)"))
    lengths = np.zeros(3, int)

    def append(cache: jc.KVCache, counts: Any, tokens: int) -> jc.KVCache:
        place = np.where(np.arange(tokens) < np.c_[counts], lengths[:, None] + np.arange(tokens), -1)
        lengths[:] += counts
        return update(cache, *(np.take_along_axis(x, np.maximum(place, 0)[..., None, None], 1) for x in (k, v)), place)

    def check(cache: jc.KVCache) -> None:
        for b, row in enumerate(held(cache)):
            assert sorted(row) == [*range(lengths[b])]
            keys, old = by_channel(k[b, : lengths[b]]), np.arange(lengths[b]) < lengths[b] - recent
            for p in row:
                np.testing.assert_array_equal(row[p][0], keys[p] if old[p] else k[b, p])
                np.testing.assert_array_equal(row[p][1], stored[b, p] if old[p] else v[b, p])

    for counts, tokens in (([9, 3, 0], 9), ([1, 1, 1], 1), ([2, 6, 7], 9), ([1, 1, 0], 1)):
        cache = append(cache, counts, tokens)
        check(cache)
    lengths -= 2  # the tokens of the last group are still there
    cache = jax.jit(jc.KVCache.truncate)(cache, jnp.asarray(lengths))
    cache = append(append(cache, [3, 2, 3], 3), [1, 0, 1], 1)
    check(cache)
    q = normal(5, 1, 3)[:, :, [0, 0, 1, 1]]
    expected = jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=cache.mask())
    np.testing.assert_allclose(jc.dot_product_attention(q, cache, block_size=6), expected, rtol=1e-5, atol=1e-6)
    copies = jax.jit(jc.KVCache.take)(cache, jnp.asarray([1, 1, 2]))
    k, v, stored, lengths = (x[[1, 1, 2]] for x in (k, v, stored, lengths))
    check(append(copies, [4, 4, 4], 4))


def test_a_group_of_tokens_needs_their_numbers() -> None:
    shape, keys = (1, 8, HEADS, SIZE), "int4(group=4,axis=1)"
    with pytest.raises(ValueError, match=r"groups of 4 tokens in keys need recent=4 or more, .* it is 3"):
        jc.KVCache.full(shape, keys=keys, recent=3)
    with pytest.raises(ValueError, match=r"in values need a length, or page_size, that is a multiple; it is 6"):
        jc.KVCache.paged(shape, pages=2, page_size=6, values=keys, recent=4)
    with pytest.raises(ValueError, match=r"need KVCache.full or KVCache.paged, not a rolling cache"):
        jc.KVCache.rolling(shape, keys=keys, recent=4)
    cache, x = jc.KVCache.full(shape, keys=keys, recent=4), normal(0, 3, 1)
    with pytest.raises(ValueError, match=r"positions span 8 tokens; with groups of tokens they must be within 3"):
        cache.update(x, x, np.asarray([0, 7, -1]))
    apart = update(cache, x, x, jnp.asarray([0, 7, -1]))
    assert apart.overflowed.all() and sorted(held(apart)[0]) == [0]


def test_a_rotation_that_does_not_divide_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size that divides head_dim=8"):
        jc.KVCache.full((1, 4, 2, 8), rotation=jc.Hadamard(16))
    with pytest.raises(TypeError, match=r"rotation=4 must be a jchop.Hadamard"):
        jc.KVCache.full((1, 4, 2, 8), rotation=4)  # type: ignore[arg-type]


class Model:
    """The same in Python: a dict of tokens for each sequence."""

    def __init__(self, cache: jc.KVCache, specs: dict[str, Any]) -> None:
        self.cache, self.specs = cache, specs
        self.tokens: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in cache.lengths]
        self.lengths = [0] * len(self.tokens)

    def update(self, k: jax.Array, v: jax.Array, positions: Any = None) -> None:
        given = np.broadcast_to(
            np.asarray(self.lengths)[:, None] + np.arange(k.shape[1]) if positions is None else positions, k.shape[:2]
        )
        self.cache = update(self.cache, k, v, *([] if positions is None else [jnp.asarray(positions)]))
        rounded = [
            np.asarray(x if spec is None else jc.round_to_format(x, spec))
            for x, spec in zip((k, v), (self.specs.get("keys"), self.specs.get("values")), strict=True)
        ]
        slots = self.cache.slot_positions.shape[1]
        for b, row in enumerate(given):
            self.tokens[b] |= {int(p): (rounded[0][b, t], rounded[1][b, t]) for t, p in enumerate(row) if p >= 0}
            self.lengths[b] = max(self.lengths[b], int(row.max(initial=-1)) + 1)
            if self.cache.window is not None:
                self.tokens[b] = {p: t for p, t in self.tokens[b].items() if p >= self.lengths[b] - slots}

    def check(self) -> None:
        assert self.cache.lengths.tolist() == self.lengths and not self.cache.overflowed.any()
        found = held(self.cache)
        assert [sorted(row) for row in found] == [sorted(row) for row in self.tokens]
        for row, expected in zip(found, self.tokens, strict=True):
            for p, (key, value) in expected.items():
                np.testing.assert_array_equal(row[p][0], key)
                np.testing.assert_array_equal(row[p][1], value)


def test_tokens_of_two_pages() -> None:
    model = Model(of_kind("paged", 8, batch=1, **EIGHT), EIGHT)
    model.update(normal(0, 6, 1), normal(1, 6, 1))
    model.check()


def test_copies_of_a_sequence_have_its_tokens_on_pages_of_their_own() -> None:
    """The four pages are full before: the copy takes that of the sequence that ends."""
    x = normal(0, 6, 2)
    program = jax.jit(lambda cache: cache.update(x, -x).truncate(np.asarray([5, 3])).take(np.asarray([0, 0])))
    copies = program(of_kind("paged", 8, batch=2))
    assert sorted(np.ravel(copies.table)) == [0, 1, 2, 3]
    assert copies.lengths.tolist() == [5, 5] and not copies.overflowed.any()
    for row in held(copies):
        assert sorted(row) == [*range(5)]
        for p, (key, value) in row.items():
            np.testing.assert_array_equal(key, x[0, p])
            np.testing.assert_array_equal(value, -x[0, p])


def test_truncation_of_a_rolling_cache_marks_tokens_that_were_written_over() -> None:
    """Of five slots; the token at p, written over, is -2 - p."""
    cache = replace(
        jc.KVCache.rolling((2, 4, 1, 2), chunk=2),
        slot_positions=jnp.asarray([[5, 6, 2, 3, 4], [0, 1, 2, -1, -1]]),
        lengths=jnp.asarray([7, 3]),
    )
    cut = jax.jit(jc.KVCache.truncate)(cache, np.asarray([6, 1]))
    assert cut.slot_positions.tolist() == [[5, -3, 2, 3, 4], [0, -1, -1, -1, -1]]
    assert cut.lengths.tolist() == [6, 1]


@further
@pytest.mark.in_turn(9)
@pytest.mark.parametrize("kind", ["full", "rolling", "paged"])
def tokens_are_where_they_belong(kind: str) -> None:
    model = Model(of_kind(kind, 20 if kind != "rolling" else 6, **EIGHT), EIGHT)
    draw = np.random.default_rng(1)
    for turn in range(4):
        prompt = np.where(
            np.arange(4) < draw.integers(0, 5, (3, 1)), np.asarray(model.lengths)[:, None] + np.arange(4), -1
        )
        model.update(normal(turn, 4), normal(10 + turn, 4), prompt)  # prompts of several lengths
        model.update(normal(20 + turn, 1), normal(30 + turn, 1))  # each sequence has one more
        model.check()
    # Anew, if a rolling cache still has them.
    model.update(normal(40, 2), normal(41, 2), np.asarray([1, 3]))
    model.check()


def rows(*positions: list[int]) -> jax.Array:
    """Positions of nine tokens for each of three sequences, the rest padding: all of these tests compile one update."""
    return jnp.asarray([[*row, *[-1] * (9 - len(row))] for row in positions])


def five_pages() -> jc.KVCache:
    return jc.KVCache.paged((3, 16, HEADS, SIZE), pages=5, page_size=4, **EIGHT)


def pages_are_given_and_returned() -> None:
    release = jax.jit(jc.KVCache.release)
    cache = update(five_pages(), normal(1, 9), normal(2, 9), rows([*range(9)], [0, 1, 2], []))
    assert cache.table.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [-1] * 4] and cache.lengths.tolist() == [9, 3, 0]
    poison = jnp.full((3, 9, HEADS, SIZE), jnp.nan)
    cache = update(cache, poison, poison, rows([9], [], []))
    cache = release(cache, jnp.asarray([True, False, False]))
    assert cache.table[0].tolist() == [-1] * 4 and cache.lengths.tolist() == [0, 3, 0]
    # The third sequence takes pages of the first, and sees none of its tokens.
    cache = update(cache, normal(3, 9), normal(4, 9), rows([], [3, 4], [0, 1, 2, 8, 9]))
    assert cache.table.tolist() == [[-1] * 4, [3, 0, -1, -1], [1, -1, 2, -1]]
    assert [sorted(row) for row in held(cache)] == [[], [0, 1, 2, 3, 4], [0, 1, 2, 8, 9]]
    # One page is left. The first sequence takes it; the second and third grow on their own pages.
    cache = update(cache, normal(5, 9), normal(6, 9), rows([0, 1], [5, 6], [10, 11]))
    assert cache.table.tolist() == [[4, -1, -1, -1], [3, 0, -1, -1], [1, -1, 2, -1]] and not cache.overflowed.any()
    after = update(cache, normal(7, 9), normal(8, 9), rows([2, 3], [7, 8], [12, 13]))
    assert after.overflowed.tolist() == [False, True, True]  # the tokens at 8 and at 12 find no page
    assert np.isnan(after.values[1:]).all() and not np.isnan(after.values[0]).any()
    assert not release(after, jnp.asarray([False, True, True])).overflowed.any()


def stacks_batches_and_donation() -> None:
    layers = [update(of_kind("full", 6, **EIGHT), normal(i, 2), normal(i + 5, 2)) for i in range(2)]
    stack: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    k, q = normal(7, 1), normal(8, 1)

    def step(q: Any, cache: jc.KVCache) -> tuple[Any, jc.KVCache]:
        cache = cache.update(k, k)
        return jc.dot_product_attention(q, cache), cache

    expected = q
    for i, cache in enumerate(layers):
        expected, layers[i] = jax.jit(step)(expected, cache)
    y, after = jax.jit(lambda q, stack: jax.lax.scan(step, q, stack))(q, stack)
    np.testing.assert_array_equal(y, expected)
    for i, cache in enumerate(layers):
        jax.tree.map(lambda whole, one, i=i: np.testing.assert_array_equal(whole[i], one), after, cache)
    batched, again = jax.jit(jax.vmap(step, (None, 0)))(q, stack)
    for i in range(2):
        one, cache = jax.jit(step)(q, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
        np.testing.assert_allclose(batched[i], one, rtol=1e-5)
        jax.tree.map(lambda whole, one, i=i: np.testing.assert_array_equal(whole[i], one), again, cache)


@further
@pytest.mark.parametrize("kind", ["full", "rolling", "paged"])
@pytest.mark.in_turn(3)
def truncation_passes_through_scan_and_vmap(kind: str) -> None:
    cache = of_kind(kind, 6, **EIGHT)
    x, kept = normal(1, 3), jnp.asarray([[2, 3, 0], [3, 4, 9]])
    expected, one_step = cache, jax.jit(lambda cache, lengths: cache.update(x, x).truncate(lengths))
    for lengths in kept:
        expected = one_step(expected, lengths)
    assert expected.lengths.tolist() == [3, 4, 3]

    def step(cache: jc.KVCache, lengths: Any) -> tuple[jc.KVCache, None]:
        return cache.update(x, x).truncate(lengths), None

    scanned, _ = jax.jit(lambda cache: jax.lax.scan(step, cache, kept))(cache)
    jax.tree.map(np.testing.assert_array_equal, scanned, expected)
    several: Any = jax.vmap(expected.truncate)(kept)
    for i, lengths in enumerate(kept):
        one = expected.truncate(lengths)
        jax.tree.map(lambda whole, one, i=i: np.testing.assert_array_equal(whole[i], one), several, one)


@pytest.mark.smoke
@pytest.mark.in_turn(12)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [("full", "int8(group=all)"), ("rolling", None), ("paged", "float8_e4m3fn"), ("paged", "int4(group=8)"),
     ("paged", "int4(group=4,axis=1)")],
)  # fmt: skip
def test_a_donated_cache_is_written_where_it_lies(kind: str, spec: Any) -> None:
    recent = 4 if "axis" in str(spec) else 0
    cache = of_kind(kind, 256, keys=spec, values=spec, dtype="bfloat16", recent=recent)
    donating = jax.jit(lambda cache, k: cache.update(k, k), donate_argnums=0)
    memory = donating.lower(cache, normal(0, 1)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == cache.nbytes and memory.temp_size_in_bytes < cache.nbytes / 2


def pages_of_sequences_that_are_taken() -> None:
    cache = jc.KVCache.paged((3, 8, HEADS, SIZE), pages=4, page_size=4)
    cache = update(cache, normal(1, 6), normal(2, 6), jnp.asarray([[0, 1, 2, 3, 4, 5], [0] + [-1] * 5, [0] + [-1] * 5]))
    assert (np.asarray(cache.table) >= 0).sum() == 4
    take = jax.jit(jc.KVCache.take)
    full = take(cache, jnp.asarray([0, 0, 1]))  # five pages for four
    assert full.overflowed.tolist() == [False, True, False]
    assert sorted(held(full)[0]) == [0, 1, 2, 3, 4, 5]
    two = take(cache, jnp.asarray([0, 0]))
    assert not two.overflowed.any() and sorted(np.asarray(two.table).ravel()[[0, 1, 2, 3]]) == [0, 1, 2, 3]
    one = take(cache, jnp.asarray([2]))
    assert (np.asarray(one.slot_positions) >= 0).sum() == 1  # pages of the others are free, without tokens


def pages_without_tokens_that_are_left_are_free() -> None:
    cache = update(five_pages(), normal(1, 9), normal(2, 9), rows([*range(8)], [*range(8)], []))
    cache = jax.jit(jc.KVCache.truncate)(cache, jnp.asarray([3, 5, 0]))
    assert np.asarray(cache.table).tolist() == [[0, -1, -1, -1], [2, 3, -1, -1], [-1] * 4]
    cache = update(cache, normal(3, 9), normal(4, 9), rows([3, 4], [5, 6], []))
    assert np.asarray(cache.table).tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [-1] * 4]
    assert not cache.overflowed.any()
    assert cache.positions.tolist()[:2] == [[0, 1, 2, 3, 4, *[-1] * 11], [0, 1, 2, 3, 4, 5, 6, *[-1] * 9]]


def sequences_and_heads_are_sharded() -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four (forced host) devices")
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    cache, q = of_kind("full", 6, batch=2, **EIGHT), normal(3, 2, batch=2)

    def place(leaf: Any) -> Any:
        axes = ("data", None, "model")[: leaf.ndim]
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))

    step = jax.jit(lambda cache, q: (after := cache.update(q, q), jc.dot_product_attention(q, after)))
    (after, y), (expected, z) = step(jax.tree.map(place, cache), place(q)), step(cache, q)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)


@each(("spec", "dtype"), [(spec, ("bfloat16", "float32")[i % 2]) for i, spec in enumerate(SPECS)])
def the_numbers_are_those_of_round_to_format(spec: Any, dtype: str) -> None:
    cache = of_kind("paged", 8, keys=spec, values=spec, dtype=dtype)
    k, v = normal(1, 5).astype(dtype), normal(2, 5).astype(dtype)
    cache = update(cache, k, v)
    for stored, x in ((cache.keys, k), (cache.values, v)):
        expected = x if spec is None else jc.round_to_format(x, spec)
        assert stored.dtype == dtype
        np.testing.assert_array_equal(stored[:, :5], expected)
        assert not stored[:, 5:].any()


@each("kind", ["full", "paged"])
def what_does_not_fit_is_an_error_or_marks_its_sequence(kind: str) -> None:
    cache = of_kind(kind, 8, **EIGHT)
    with pytest.raises(ValueError, match="9 tokens, and the cache 8 slots"):
        jax.eval_shape(lambda cache: cache.update(normal(0, 9), normal(1, 9)), cache)
    with pytest.raises(ValueError, match=r"positions hold 8; .* 0 to 7"):
        jax.eval_shape(lambda cache: cache.update(normal(0, 1), normal(1, 1), np.asarray([8])), cache)
    with pytest.raises(ValueError, match="positions hold -2"):
        cache.update(normal(0, 1), normal(1, 1), jnp.asarray([-2]))
    cache = update(cache, normal(0, 6), normal(1, 6), jnp.asarray([[*range(6)], [0, 1, 2, 3, -1, -1], [-1] * 6]))
    with pytest.raises(ValueError, match="positions hold 8"):
        cache.update(normal(0, 3), normal(1, 3))
    after = update(cache, normal(2, 3), normal(3, 3))
    assert after.overflowed.tolist() == [True, False, False] and after.lengths.tolist() == [9, 7, 3]
    assert [len(row) for row in held(after)] == [8, 7, 3]
    np.testing.assert_array_equal(after.keys[0, :6], cache.keys[0, :6])  # nothing is overwritten
    y = attend(normal(4, 3), after)
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


@each("kind", ["full", "rolling", "paged"])
def sequences_that_are_taken_have_their_tokens(kind: str) -> None:
    """As in a cache that was filled in the new order; later tokens of copies are their own."""
    lengths, order = np.asarray([5, 3, 6]), np.asarray([2, 0, 2])
    prompt, (k, v) = np.where(np.arange(6) < lengths[:, None], np.arange(6), -1), (normal(1, 6), normal(2, 6))
    more = normal(3, 2), normal(4, 2)

    def filled(order: Any, given: tuple[jax.Array, jax.Array], prompt: Any) -> jc.KVCache:
        cache = of_kind(kind, 8 if kind != "rolling" else 4, **EIGHT)
        for t in range(6):
            cache = update(cache, *(x[order, t : t + 1] for x in given), jnp.asarray(prompt[order, t : t + 1]))
        return cache

    taken, again = filled(np.arange(3), (k, v), prompt), filled(order, (k, v), prompt)
    for given in (order, jnp.asarray(order)):
        got, want = jax.jit(lambda cache, order: cache.take(order))(taken, given), again
        for _ in range(2):
            assert got.lengths.tolist() == want.lengths.tolist() and not got.overflowed.any()
            for a, b in zip(held(got), held(want), strict=True):
                assert sorted(a) == sorted(b)
                for p in a:
                    np.testing.assert_array_equal(a[p], b[p])
            query = normal(7, 1)
            np.testing.assert_array_equal(attend(query, got), attend(query, want))
            got, want = update(got, *more), update(want, *more)
    fewer = taken.take([1])
    assert fewer.shape[0] == 1 and fewer.lengths.tolist() == [3] and sorted(held(fewer)[0])[-1] == 2
    with pytest.raises(ValueError, match="sequences hold 3; the cache has sequences 0 to 2"):
        taken.take([0, 3])
    with pytest.raises(ValueError, match=r"sequences have the shape \(1, 1\)"):
        taken.take([[0]])
    with pytest.raises(TypeError, match="sequences have the dtype float32"):
        taken.take(jnp.ones(2))


@further
@pytest.mark.parametrize(
    "check",
    [
        pages_are_given_and_returned,
        pytest.param(sequences_that_are_taken_have_their_tokens, marks=pytest.mark.slow),
        pytest.param(what_does_not_fit_is_an_error_or_marks_its_sequence, marks=pytest.mark.slow),
        pytest.param(the_numbers_are_those_of_round_to_format, marks=pytest.mark.slow),
        pytest.param(stacks_batches_and_donation, marks=pytest.mark.slow),
        pytest.param(sequences_and_heads_are_sharded, marks=pytest.mark.slow),
        pytest.param(pages_without_tokens_that_are_left_are_free, marks=pytest.mark.slow),
        pytest.param(pages_of_sequences_that_are_taken, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def pages_stacks_and_shards(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@further.first
def arguments_are_checked() -> None:
    full = jc.KVCache.full
    for spec in (
        "int8",
        "int8(group=2,axis=-2)",
        "int8(channel=0)",
        "nvfp4",
        "e4m3:stochastic",
        "int8(group=(2,2),axis=(-2,-1))",
    ):
        with pytest.raises(ValueError, match=r"values=.* must round each token and head by itself"):
            full((1, 2, HEADS, SIZE), values=spec)
    for arguments, words in (
        (((1, 2, HEADS),), r"shape=\(1, 2, 2\) must be \(batch, length, kv_heads, head_dim\)"),
        (((1, 0, HEADS, SIZE),), "shape=0"),
    ):
        with pytest.raises(ValueError, match=words):
            full(*arguments)
    with pytest.raises(TypeError, match="dtype=int32 must be one of"):
        full((1, 2, HEADS, SIZE), dtype="int32")
    cache = full((2, 4, HEADS, SIZE))
    x = normal(0, 2, batch=2)
    for arguments, words in (
        ((x[:1], x), r"k has the shape \(1, 2, 2, 8\); it must be \(2, tokens, 2, 8\)"),
        ((x, x[:, :, :1]), "v has the shape"),
        ((x, x[:, :1]), "they must be the same"),
        ((x, x, np.arange(3)), r"positions have the shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.update(*arguments)
    with pytest.raises(TypeError, match="must be integers"):
        cache.update(x, x, np.ones(2))
    with pytest.raises(ValueError, match=r"ended is int32\[2\]"):
        cache.release(jnp.arange(2))
    for lengths, words in (
        ([-1, 2], "lengths hold -1; they must be 0 or more"),
        ([1], r"lengths have the shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.truncate(lengths)
    with pytest.raises(TypeError, match="lengths have the dtype float"):
        cache.truncate(1.5)
    assert "paged" in repr(of_kind("paged", 4)) and "window=4" in repr(of_kind("rolling", 4, keys="int8(group=all)"))


@pytest.mark.parametrize(
    ("kind", "specs"),
    [
        ("full", EIGHT | {"rotation": jc.Hadamard(4), "recent": 2}),
        pytest.param("rolling", {"keys": "nf4(group=8,scale=bfloat16)", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("paged", {"values": "int4(group=4)", "dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_exported_programs_take_and_return_a_cache(kind: str, specs: dict[str, Any]) -> None:
    pytest.importorskip("flatbuffers")
    cache, k, v = of_kind(kind, 8, **specs), normal(0, 3), normal(1, 3)
    again = export.deserialize(export.export(update)(cache, k, v).serialize())
    got: Any = again.call(again.call(cache, k, v), v, k)
    wanted = update(update(cache, k, v), v, k)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    np.testing.assert_array_equal(got.keys, wanted.keys)


test_further = further.test()
