"""Rounding with hardware bits, interpreted; and the answer to a request for a kernel of plain rounding.

The body's values are proven against exact rationals by tests/_round/test_round_values.py. The table of specifications
and shapes is that of compile_round.py, where the kernel is compiled.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from _kernels.compile_round import DRAWING, DTYPES, KINDS, LARGE, OPTIONS, SHAPE, SHAPES
from _kernels.quickly import compiled
from further import Further
from jax.experimental.pallas import tpu as pltpu

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import random_words, seed_words
from jchop._kernels import round_tpu

further = Further()

Array = jax.Array
SEEDS = tuple(jnp.asarray(word) for word in seed_words(jax.random.key(7)))


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bit patterns at random, and numbers about the range of the narrow formats, specials among them."""
    rng = np.random.default_rng(20240229)
    size = math.prod(shape)
    width = np.dtype(cases.DTYPES[dtype]).itemsize * 8
    anything = rng.integers(0, 2**width, size, dtype=np.uint64).astype(f"uint{width}").view(cases.DTYPES[dtype])
    near = (rng.standard_normal(size) * 2.0 ** rng.integers(-20, 12, size)).astype(cases.DTYPES[dtype])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, -0.5])[rng.integers(0, 8, size)]
    kind = rng.integers(0, 8, size)
    return np.where(kind < 2, anything, np.where(kind < 7, near, special.astype(near.dtype))).reshape(shape)


def same_bits(got: Any, expected: Any, what: str) -> None:
    """Equal bits; XLA's CPU backend makes signalling NaNs of 16 bits quiet as it goes, so NaNs are all one."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    wrong = cases.differences(got.ravel(), cases.bits(expected.ravel()), oracle.CARRIERS[got.dtype.name])
    assert not len(wrong), f"{what}: {len(wrong)} of {got.size} differ, first at {wrong[:5]}"


def check(text: str, dtype: str, shape: tuple[int, ...]) -> None:
    """The interpreter's generator gives zeros, so every proportional draw goes to the neighbour nearer to zero."""
    spec, x = jc.Spec(text), jnp.asarray(numbers(shape, dtype))
    run = functools.partial(round_tpu.tpu_round_with_hardware_bits, spec=spec, interpret=pltpu.InterpretParams())
    expected = jax.jit(lambda x: round_to_spec(x, spec, CARRIERS[dtype], jnp.zeros(shape, jnp.uint32)))(x)
    same_bits(jax.jit(run)(x, *SEEDS), expected, f"{text} {dtype}{list(shape)}")


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(("dtype", "shape"), [("float32", ()), ("bfloat16", (1025,)), ("float32", (3, 5, 257))])
def test_hardware_bits_decide(shape: tuple[int, ...], dtype: str) -> None:
    check("e4m3fn:stochastic", dtype, shape)


@further
@pytest.mark.in_turn(16)
@pytest.mark.parametrize("number", range(len(KINDS)))
def every_kind_mode_option_and_shape(number: int) -> None:
    texts = [f"{KINDS[number]}:{DRAWING[number % len(DRAWING)]}", *OPTIONS[number : number + 1]]
    for text, shape in zip(texts, (SHAPES[number % len(SHAPES)], SHAPE), strict=False):
        check(text, DTYPES[number % 2], shape)


def test_an_empty_array_stays_so() -> None:
    for shape in ((0,), (3, 0, 5)):
        x = jnp.zeros(shape, jnp.bfloat16)
        got = round_tpu.tpu_round_with_hardware_bits(x, *SEEDS, spec=jc.Spec("e4m3fn:stochastic"))
        same_bits(got, x, str(shape))


def test_each_block_is_seeded_with_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in C order, several along each axis; here a block's bits are the word that it is seeded with."""
    now: list[Array] = []
    monkeypatch.setattr(round_tpu.pltpu, "prng_seed", lambda *words: now.append(words[0]))
    monkeypatch.setattr(round_tpu.pltpu, "prng_random_bits", lambda shape: jnp.full(shape, now[-1]))
    shape, spec = (130, 2100), jc.Spec("e4m3fn:stochastic")
    x = jnp.asarray(numbers(shape, "float32"))
    tall, wide, _ = round_tpu._block_sides(shape, 4)
    run = functools.partial(round_tpu.tpu_round_with_hardware_bits, spec=spec, interpret=True)
    down, across = -(-shape[0] // tall), -(-shape[1] // wide)
    assert down > 1 and across > 1
    block = np.arange(down * across, dtype=np.uint32).reshape(down, across).repeat(tall, 0).repeat(wide, 1)
    words = random_words(SEEDS, jnp.asarray(block[: shape[0], : shape[1]]))
    same_bits(compiled(run)(x, *SEEDS), round_to_spec(x, spec, CARRIERS["float32"], words), str(shape))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_blocks_stay_within_the_memory_of_a_tpu(itemsize: int) -> None:
    sizes = (1, 5, 8, 127, 128, 1000, 4096, 100_000)
    for shape in ((rows, columns) for rows in sizes for columns in sizes):
        tall, wide, chunk = round_tpu._block_sides(shape, itemsize)
        assert tall * wide * itemsize <= 1 << 20 and chunk * wide <= 8192, shape
        assert chunk % (32 // itemsize) == tall % chunk == wide % 128 == 0 < tall, shape


def test_64_bit_mode_changes_nothing() -> None:
    with jax.enable_x64(True):
        check("integer8:stochastic_c", "float32", (3, 130))


# -- the operation -----------------------------------------------------------------------------------------------------


def lowered(platform: str, x: Array, **arguments: Any) -> str:
    run = jax.jit(functools.partial(jc.round_to_format, **arguments))
    return run.trace(x, key=jax.random.key(0)).lower(lowering_platforms=(platform,)).as_text()


def test_hardware_bits_are_of_the_kernel() -> None:
    for shape in (SHAPE, LARGE[0]):
        assert "tpu_custom_call" in lowered("tpu", jnp.ones(shape), spec="e4m3fn:stochastic", generator="hardware")
    with pytest.raises(NotImplementedError, match="it has a kernel for TPU, and this is lowered for cuda"):
        lowered("cuda", jnp.ones(3), spec="e4m3fn:stochastic", generator="hardware")
    for x, spec, reason in (
        (jnp.ones(3, jnp.float16), "e4m3fn:stochastic", "x has dtype float16"),
        (jnp.ones(3, jnp.complex64), "e4m3fn:stochastic", "complex x"),
        (jnp.ones(3), f"codebook({','.join(map(str, range(33)))}):stochastic", "more than 32 levels"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            lowered("tpu", x, spec=spec, generator="hardware")


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_plain_rounding_has_no_kernel(platform: str) -> None:
    for spec in ("e4m3fn", "e4m3fn:stochastic"):
        assert "custom_call @tpu" not in lowered(platform, jnp.ones(8), spec=spec)
        with pytest.raises(NotImplementedError, match=r"jchop_round: it has no kernel\. Use impl='auto' or"):
            lowered(platform, jnp.ones(8), spec=spec, impl="pallas")


test_further = further.test()
