"""`dot_product_attention`: attention to a packed cache, against attention in float64, and its memory."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from layer_references import checked, each
from programs.program import equations

import jchop as jc

further = Further()

HEADS, GROUP, SIZE = 2, 3, 8
LENGTHS = np.asarray([11, 4, 7])


def normal(seed: int, tokens: int, heads: int = HEADS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, tokens, heads, SIZE)), "float32")


update = jax.jit(lambda cache, *tokens: cache.update(*tokens))
attend = jax.jit(jc.dot_product_attention)


def filled(kind: str, spec: Any = None, *, window: int = 5) -> jc.KVCache:
    """A cache of sequences of `LENGTHS`, the last token of each apart."""
    specs: dict[str, Any] = {"keys": spec, "values": spec}
    if kind == "rolling":
        cache = jc.KVCache.rolling((3, window, HEADS, SIZE), chunk=10, **specs)
    elif kind == "paged":
        cache = jc.KVCache.paged((3, 12, HEADS, SIZE), pages=8, page_size=4, **specs)
    else:
        cache = jc.KVCache.full((3, 13, HEADS, SIZE), **specs)
    positions = np.where(np.arange(10) < LENGTHS[:, None] - 1, np.arange(10), -1)
    return update(update(cache, normal(1, 10), normal(2, 10), positions), normal(3, 1), normal(4, 1))


def in_float64(q: Any, cache: jc.KVCache, where: Any, is_causal: bool, window: int | None, scale: float) -> np.ndarray:
    """Attention to the numbers of the cache, query by query."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, cache.keys, cache.values))
    y = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        here, stored = int(where[b, t]), np.asarray(cache.positions)[b]
        seen = (stored >= 0) & (here >= 0)
        if is_causal:
            seen &= stored <= here
        if window is not None:
            seen &= stored > here - window
        if seen.any():
            scores = keys[b, seen, h // GROUP] @ q[b, t, h] * scale
            weights = np.exp(scores - scores.max())
            y[b, t, h] = weights @ values[b, seen, h // GROUP] / weights.sum()
    return y


#: Each sum of at most 13 products, an exponential and a quotient, in float32, of numbers below 6.
TOLERANCE = 32 * 6 * 2.0**-24


KINDS = ["full", "rolling", "paged"]
SPECS = ["int8(group=all)", None, "float8_e4m3fn", "int4(group=4)"]
CASES: list[dict[str, Any]] = [
    {"block_size": 3, "scale": 0.5},
    {},
    {"window": 3, "block_size": 4},
    {"is_causal": False, "block_size": 4},
]


#: Each kind with each case; how a block is unpacked is the same in all of them.
EACH = [(k, c) for k in KINDS for c in CASES if k != "rolling" or "is_causal" not in c]


@further
@pytest.mark.in_turn(60)
@pytest.mark.parametrize(("kind", "spec", "case"), [(k, SPECS[i % 4], c) for i, (k, c) in enumerate(EACH)])
def values_are_those_of_float64(kind: str, spec: Any, case: dict[str, Any]) -> None:
    cache, q = filled(kind, spec), normal(5, 5, HEADS * GROUP)
    last = LENGTHS[:, None] - 5 + np.arange(5)  # -1 for the first query of the second sequence: padding
    y = jax.jit(lambda q, cache: jc.dot_product_attention(q, cache, **case))(q, cache)
    window = case.get("window", cache.window)
    expected = in_float64(q, cache, last, case.get("is_causal", True), window, case.get("scale", SIZE**-0.5))
    np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE)
    assert not np.asarray(y)[1, 0].any() and np.asarray(y)[1, 1].any()


@pytest.mark.in_turn(9)
@pytest.mark.parametrize("kind", ["full", "rolling", "paged"])
def test_it_is_the_attention_that_takes_arrays(kind: str) -> None:
    cache, q = filled(kind, "int8(group=all)"), normal(5, 2, HEADS * GROUP)
    by_hand = jax.jit(lambda q, c: jax.nn.dot_product_attention(q, c.keys, c.values, mask=c.mask(tokens=2)))
    np.testing.assert_allclose(attend(q, cache), by_hand(q, cache), rtol=0, atol=TOLERANCE)


def test_a_window_of_a_paged_cache_in_blocks_of_whole_pages() -> None:
    """Slots 0 to 3 are in no window, and the query at 10 attends to nothing in slots 4 to 7; scores are up to 200.

    Then a window begins before the first slot, and another lies in two blocks.
    """
    cache, q = filled("paged", "float8_e4m3fn"), normal(5, 2, HEADS * GROUP)
    options = {"window": 3, "block_size": 5, "scale": 20.0}
    run = jax.jit(lambda q, cache, where: jc.dot_product_attention(q, cache, positions=where, **options))
    for where in np.asarray([[[9, 10], [-1, -1], [6, -1]], [[5, 1], [-1, -1], [4, 6]]]):
        y, expected = run(q, cache, jnp.asarray(where)), in_float64(q, cache, where, True, 3, 20.0)
        assert np.abs(expected[0]).min() > 0 < np.abs(expected[2, 0]).min()
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)


def test_both_products_have_the_precision_that_is_given() -> None:
    cache, q = jc.KVCache.full((1, 4, HEADS, SIZE)), jnp.ones((1, 1, HEADS, SIZE))
    for precision in (jax.lax.Precision.HIGHEST, None):
        program = jax.make_jaxpr(lambda q, p=precision: jc.dot_product_attention(q, cache, precision=p))(q)
        found = [e.params["precision"] for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
        assert found == [precision and (precision, precision)] * 2


def bytes_of(compiled: Any) -> int:
    """Bytes of temporary memory."""
    return compiled.memory_analysis().temp_size_in_bytes


def a_rolling_cache_is_a_sliding_window_of_any_length() -> None:
    window, chunk, tokens = 4, 2, 14
    rolling = jc.KVCache.rolling((3, window, HEADS, SIZE), chunk=chunk)
    full = jc.KVCache.full((3, tokens, HEADS, SIZE))

    @jax.jit
    def step(caches: Any, k: Any, q: Any) -> Any:
        caches = [cache.update(k, k) for cache in caches]
        return caches, [jc.dot_product_attention(q, cache, window=window) for cache in caches]

    caches: Any = (rolling, full)
    for turn in range(tokens // chunk):
        caches, (y, expected) = step(caches, normal(turn, chunk), normal(50 + turn, chunk, HEADS * GROUP))
        np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE)
    assert caches[0].shape[1] == window + chunk - 1 == 5
    # A query of which the window is no longer stored, and one of which a shorter window is.
    q = normal(9, 1, HEADS * GROUP)
    assert np.isnan(jc.dot_product_attention(q, caches[0], positions=[11])).all()
    short = [jc.dot_product_attention(q, cache, positions=[11], window=3) for cache in caches]
    np.testing.assert_allclose(short[0], short[1], rtol=0, atol=TOLERANCE)


def other_sequences_do_not_show() -> None:
    """NaN and infinities of another sequence, whose page was given back, or is read for want of one."""
    cache = filled("paged", "float8_e4m3fn")
    poison = jnp.full((3, 1, HEADS, SIZE), jnp.nan)
    poisoned = update(cache, poison, poison, np.asarray([[0], [-1], [-1]]))
    q = normal(5, 1, HEADS * GROUP)
    y = attend(q, poisoned)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1:], attend(q, cache)[1:])
    fresh = update(poisoned.release(jnp.asarray([True, False, False])), normal(7, 1), normal(8, 1))
    assert np.isfinite(attend(q, fresh)).all()


def derivatives_forward() -> None:
    cache, q = filled("full", "int8(group=all)"), normal(5, 1, HEADS * GROUP)
    _, tangent = jax.jvp(lambda q: jc.dot_product_attention(q, cache), (q,), (jnp.ones_like(q),))
    _, expected = jax.jvp(
        lambda q: jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=cache.mask()),
        (q,),
        (jnp.ones_like(q),),
    )
    np.testing.assert_allclose(tangent, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda q: jc.dot_product_attention(q, cache).sum())(q)


def emulate_rounds_the_result_once() -> None:
    cache, q = filled("full", "int8(group=all)"), normal(5, 1, HEADS * GROUP)
    y = jc.emulate(lambda q: jc.dot_product_attention(q, cache), "e4m3")(q)
    expected = jc.dot_product_attention(jc.round_to_format(q, "e4m3"), cache)
    np.testing.assert_array_equal(y, jc.round_to_format(expected, "e4m3"))


@each(("kind", "spec"), [("rolling", SPECS[0]), ("paged", SPECS[3]), ("full", None)])
def positions_that_are_given(kind: str, spec: Any) -> None:
    cache, q = filled(kind, spec), normal(5, 5, HEADS * GROUP)
    shuffled = np.asarray([[3, 0, -1], [1, 3, 2], [-1, -1, 6]])
    y = jax.jit(lambda q, cache, p: jc.dot_product_attention(q, cache, positions=p))(q[:, :3], cache, shuffled)
    expected = in_float64(q[:, :3], cache, shuffled, True, cache.window, SIZE**-0.5)
    np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE)


@each(
    ("kind", "spec", "dtype"),
    [
        ("full", "int8(group=all)", "bfloat16"),
        ("paged", "int4(group=8,scale=bfloat16)", "bfloat16"),
        ("paged", "mxfp8_e4m3", "float32"),
        ("full", "nf4(group=8)", "bfloat16"),
    ],
)
def packed_and_rounded_numbers_give_the_same_bits(kind: str, spec: str, dtype: str) -> None:
    def cache_of(spec: Any) -> jc.KVCache:
        shape = (2, 150, HEADS, 16)
        if kind == "paged":
            return jc.KVCache.paged(shape, pages=24, page_size=16, keys=spec, values=spec, dtype=dtype)
        return jc.KVCache.full(shape, keys=spec, values=spec, dtype=dtype)

    draw = np.random.default_rng(6)
    k, v = (jnp.asarray(draw.normal(size=(2, 140, HEADS, 16)), dtype) for _ in range(2))
    q = jnp.asarray(draw.normal(size=(2, 4, HEADS * GROUP, 16)), dtype)
    packed = update(cache_of(spec), k, v)
    rounded = update(cache_of(None), jc.round_to_format(k, spec), jc.round_to_format(v, spec))
    in_blocks = jax.jit(lambda q, cache: jc.dot_product_attention(q, cache, block_size=64))
    for tokens in (1, 4):
        y = in_blocks(q[:, :tokens], packed)
        assert y.dtype == dtype and np.asarray(y, "float32").any()
        np.testing.assert_array_equal(y, in_blocks(q[:, :tokens], rounded))


@each(("spec", "kind"), [("int8(group=all)", "full"), ("float8_e4m3fn", "paged"), ("int8(group=all)", "rolling")])
def the_whole_cache_is_never_unpacked(kind: str, spec: str) -> None:
    shape = (2, 4096, 2, 64)
    more: dict[str, Any] = {"keys": spec, "values": spec}
    if kind == "paged":
        cache = jc.KVCache.paged(shape, pages=128, page_size=64, **more)
    else:
        cache = getattr(jc.KVCache, kind)(shape, **more)
    q = jnp.ones((2, 1, 8, 64))
    compiled = jax.jit(jc.dot_product_attention).lower(q, cache).compile()
    dense = 4 * 2 * np.prod(shape)
    assert cache.nbytes < 0.3 * dense
    # Two blocks of 128 tokens, packed, and one of each in float32: 1/32 of the dense arrays, and room for the sums.
    assert bytes_of(compiled) < 0.08 * dense
    unpacked = jax.jit(lambda q, cache: jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=cache.mask()))
    assert bytes_of(unpacked.lower(q, cache).compile()) > 0.9 * dense  # what it would be
    numbers = [
        np.prod([int(n) for n in found.split(",")])
        for found in re.findall(r"f(?:16|32)\[([\d,]+)\]", compiled.as_text() or "")
    ]
    assert max(numbers) <= max(2 * 128 * 2 * 64, np.prod(shape) // 64)  # a block, or the scales of all tokens


@pytest.mark.parametrize(
    "check",
    [
        other_sequences_do_not_show,
        pytest.param(the_whole_cache_is_never_unpacked, marks=pytest.mark.slow),
        pytest.param(packed_and_rounded_numbers_give_the_same_bits, marks=pytest.mark.slow),
        pytest.param(positions_that_are_given, marks=pytest.mark.slow),
        pytest.param(a_rolling_cache_is_a_sliding_window_of_any_length, marks=pytest.mark.slow),
        pytest.param(derivatives_forward, marks=pytest.mark.slow),
        pytest.param(emulate_rounds_the_result_once, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_special_queries(check: Any, request: Any) -> None:
    """Other sequences, windows, derivatives, emulation; the first of these checks runs by default."""
    checked(check, request)


@further.first
def arguments_are_checked() -> None:
    cache, q = filled("full"), normal(5, 1, HEADS * GROUP)
    rolling = filled("rolling")
    with pytest.raises(TypeError, match=r"cache is a tuple; it must be a jchop\.KVCache"):
        jc.dot_product_attention(q, (cache, cache))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query has dtype int32"):
        jc.dot_product_attention(q.astype(int), cache)
    cases: tuple[tuple[Any, Any, dict[str, Any], str], ...] = (
        (q[:, :, :5], cache, {}, r"query has the shape \(3, 1, 5, 8\).* a multiple of 2"),
        (q[:1], cache, {}, "query has the shape"),
        (q, cache, {"positions": np.arange(2)}, r"positions have the shape \(2,\)"),
        (q, cache, {"window": 2, "is_causal": False}, "window=2 needs is_causal=True"),
        (q, cache, {"window": 0}, "window=0"),
        (q, cache, {"block_size": 0}, "block_size=0"),
        (q, rolling, {"window": 6}, "window=6: the cache is rolling and holds 5 tokens"),
        (q, rolling, {"is_causal": False}, "the cache is rolling"),
        (jnp.ones((3, 15, 6, SIZE)), rolling, {}, "query has 15 tokens, and the rolling cache 14 slots"),
    )
    for query, stored, more, words in cases:
        with pytest.raises(ValueError, match=words):
            jc.dot_product_attention(query, stored, **more)


@further
@pytest.mark.parametrize(
    ("kind", "spec"),
    [("full", None), ("paged", "int8(group=all)"), ("rolling", "int4(group=4)"), ("full", "float8_e4m3fn")],
)
@pytest.mark.in_turn(20)
def dropped_tokens_do_not_show(kind: str, spec: Any) -> None:
    """A dict of the tokens of each sequence says what is held, and NumPy attends to it."""
    window, slots = (4, 6) if kind == "rolling" else (None, 16)
    specs = {"keys": spec, "values": spec}
    if kind == "rolling":
        cache = jc.KVCache.rolling((3, 4, HEADS, SIZE), chunk=3, **specs)
    elif kind == "paged":
        cache = jc.KVCache.paged((3, 16, HEADS, SIZE), pages=12, page_size=4, **specs)
    else:
        cache = jc.KVCache.full((3, 16, HEADS, SIZE), **specs)
    draw = np.random.default_rng(3)
    lengths = [0] * 3
    tokens: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{}, {}, {}]
    truncate = jax.jit(jc.KVCache.truncate)
    attend = jax.jit(jc.dot_product_attention)
    nans = 0
    for turn in range(24):
        new = min(3, 16 - max(lengths)) if kind != "rolling" else 3
        k, v = normal(100 + turn, new), normal(200 + turn, new)
        cache = update(cache, k, v, np.asarray(lengths)[:, None] + np.arange(new))
        rounded = [np.asarray(x if spec is None else jc.round_to_format(x, spec), np.float64) for x in (k, v)]
        for b, row in enumerate(tokens):
            for t in range(new):
                row[lengths[b] + t] = rounded[0][b, t], rounded[1][b, t]
                row.pop(lengths[b] + t - slots, None)  # written over
            lengths[b] += new
        kept = np.maximum(np.asarray(lengths) - draw.integers(0, (5, 9)[turn % 4 == 3], 3), 0)
        if kind != "rolling":
            kept = np.minimum(kept, 13)
        if turn == 11:
            kept[1] = 0
        cache = truncate(cache, kept)
        lengths = kept.tolist()
        tokens = [{p: kv for p, kv in row.items() if p < n} for row, n in zip(tokens, lengths, strict=True)]
        assert cache.lengths.tolist() == lengths and not cache.overflowed.any()
        assert [sorted(p for p in row if p >= 0) for row in cache.positions.tolist()] == [sorted(row) for row in tokens]
        if cache.table is not None:
            assert [sum(page >= 0 for page in row) for row in cache.table.tolist()] == [-(-n // 4) for n in lengths]
        q = normal(300 + turn, 2, HEADS * GROUP)
        y = np.asarray(attend(q, cache))
        for b, t, h in np.ndindex(*y.shape[:3]):
            here = lengths[b] - 2 + t
            wanted = range(max(here - (window or 99) + 1, 0), here + 1)
            if not all(p in tokens[b] for p in wanted):
                assert np.isnan(y[b, t, h]).all()
                nans += 1
            elif wanted:
                keys, values = (np.stack([tokens[b][p][i][h // GROUP] for p in wanted]) for i in range(2))
                scores = keys @ np.asarray(q[b, t, h], np.float64) / np.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                np.testing.assert_allclose(y[b, t, h], weights @ values / weights.sum(), atol=TOLERANCE, rtol=0)
            else:
                assert not y[b, t, h].any()
    assert (nans > 0) is (kind == "rolling")


test_further = further.test()
