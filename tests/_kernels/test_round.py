"""The rounding kernels, interpreted: bit for bit what the portable body gives, for one table of cases.

The body's values are proven against exact rationals by tests/_round/test_round_values.py. The table of specifications
and shapes is that of compile_round.py, where the same kernels are compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from _kernels.compile_round import GPU_DTYPES, KINDS, MODES, OPTIONS, SHAPE, SHAPES, TPU_DTYPES, narrow
from _kernels.quickly import compiled
from further import Further
from jax.experimental.pallas import tpu as pltpu

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import StreamOffset, seed_words, words_like
from jchop._kernels import round_gpu, round_tpu
from jchop._kernels.round_tile import RoundGpuTiling, RoundTpuTiling

further = Further()

Array = jax.Array
Run = Callable[..., Array]

KERNELS: dict[str, tuple[Run, tuple[str, ...]]] = {
    "tpu": (round_tpu.tpu_round_elements, TPU_DTYPES),
    "gpu": (round_gpu.gpu_round_elements, GPU_DTYPES),
}
SEEDS = np.asarray(jax.device_get(seed_words(jax.random.key(7))))


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bit patterns at random, and numbers about the range of the narrow formats, specials among them.

    An array of one shape begins as that of any other does.
    """
    rng = np.random.default_rng(20240229)
    most, size = 5120, math.prod(shape)
    assert size <= most
    width = np.dtype(cases.DTYPES[dtype]).itemsize * 8
    anything = rng.integers(0, 2**width, most, dtype=np.uint64).astype(f"uint{width}").view(cases.DTYPES[dtype])
    near = (rng.standard_normal(most) * 2.0 ** rng.integers(-20, 12, most)).astype(cases.DTYPES[dtype])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, -0.5])[rng.integers(0, 8, most)]
    kind = rng.integers(0, 8, most)
    every = np.where(kind < 2, anything, np.where(kind < 7, near, special.astype(near.dtype)))
    return every[:size].reshape(shape)


def same_bits(got: Any, expected: Any, what: str) -> None:
    """Equal bits; XLA's CPU backend makes signalling NaNs of 16 bits quiet as it goes, so NaNs are all one."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    wrong = cases.differences(got.ravel(), cases.bits(expected.ravel()), oracle.CARRIERS[got.dtype.name])
    assert not len(wrong), f"{what}: {len(wrong)} of {got.size} differ, first at {wrong[:5]}"


def body(x: Array, start: int, spec: jc.Spec) -> Array:
    """The portable body, its words from `start` on."""
    drawn = tuple(jnp.asarray(SEEDS)) if spec.rounding.stochastic else ()
    word = words_like(x, drawn, StreamOffset(static_starts=(start,))) if drawn else None
    return round_to_spec(x, spec, CARRIERS[x.dtype.name], word)


def by_kernel(run: Run, x: Array, start: int, spec: jc.Spec, **more: Any) -> Array:
    """A kernel, its words from `start` on; 0 is left unsaid."""
    drawn = [SEEDS, np.array([start % 2**32, start >> 32], np.uint32)] if spec.rounding.stochastic else []
    return run(x, *map(jnp.asarray, drawn if start else drawn[:1]), spec=spec, **more)


def check(
    kernel: str,
    texts: Sequence[str],
    dtype: str,
    shapes: Sequence[tuple[int, ...]],
    start: int = 0,
    tilings: Sequence[Any] = (None,),
) -> None:
    """Several specifications on arrays of several shapes: one compiled function for each, one for the body of all.

    The body is that of the largest array, with which the others begin: what it gives depends on the flat index alone.
    """
    specs = [jc.parse(text) for text in texts if narrow(text, dtype)]
    run = functools.partial(KERNELS[kernel][0], interpret=True)
    with jax.enable_x64(dtype == "float64"):
        largest = jnp.asarray(numbers((max(map(math.prod, shapes)),), dtype))
        expected = jax.jit(lambda x: [body(x, start, spec) for spec in specs])(largest)
        for shape in shapes:
            x = jnp.asarray(numbers(shape, dtype))
            got = compiled(lambda x: [[by_kernel(run, x, start, s, tiling=t) for s in specs] for t in tilings])(x)
            for tiling, each in zip(tilings, got, strict=True):
                for spec, one, other in zip(specs, each, expected, strict=True):
                    what = f"{kernel} {spec} {dtype}{list(shape)} from {start}, tiling {tiling}"
                    same_bits(one, other[: x.size].reshape(shape), what)


# -- the table ---------------------------------------------------------------------------------------------------------


def tame(kernel: str, dtype: str) -> list[Any]:
    """The heuristic's tiling, but one program for bfloat16 on GPUs, which can have subnormal results.

    On the CPU, JAX 0.12 turns them into zeros where it interprets several programs, whatever these do.
    """
    return [RoundGpuTiling(4096)] if (kernel, dtype) == ("gpu", "bfloat16") else [None]


both = pytest.mark.parametrize("kernel", KERNELS)
#: Kernels and the dtypes that each has.
PAIRS = [(kernel, dtype) for kernel, (_, dtypes) in KERNELS.items() for dtype in dtypes]


def check_kind(kernel: str, kind: str) -> None:
    """Modes, dtypes and shapes in turn: a fourth of the modes with each kind of format on each kernel."""
    number, dtypes = KINDS.index(kind), KERNELS[kernel][1]
    turn = 2 * number + (kernel == "gpu")
    texts, dtype = [f"{kind}:{mode}" for mode in MODES[turn % 4 :: 4]], dtypes[number % len(dtypes)]
    dtype = dtype if all(narrow(text, dtype) for text in texts) else "float32"
    shapes = [SHAPE, SHAPES[number % len(SHAPES)]]
    check(kernel, texts, dtype, shapes, start=2**33 - 100 if number % 2 else 0, tilings=tame(kernel, dtype))


def check_modes(kernel: str, dtype: str, modes: tuple[str, ...] = MODES) -> None:
    check(kernel, [f"e4m3fn:{mode}" for mode in modes], dtype, [(1025,)], start=2**32 - 7)


def check_options(kernel: str) -> None:
    check(kernel, OPTIONS, "float32", [(129,)])


def check_shapes(kernel: str, dtype: str) -> None:
    check(kernel, ["e4m3fn:stochastic"], dtype, SHAPES, start=2**40 - 3)
    check(kernel, ["e4m3fn:up"], dtype, SHAPES[::3])


#: What is compared, and its arguments; by default two modes on one kernel.
ROWS: list[tuple[Callable[..., None], tuple]] = [(check_modes, ("gpu", "float32", ("stochastic", "up")))]
ROWS += [(check_kind, pair) for pair in itertools.product(KERNELS, KINDS)]
ROWS += [(run, pair) for run in (check_modes, check_shapes) for pair in PAIRS]
ROWS += [(check_options, (kernel,)) for kernel in KERNELS]


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    ("run", "row"), ROWS, ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else v.__name__
)
def test_equals_the_body(run: Callable[..., None], row: tuple) -> None:
    run(*row)


def test_the_operation_has_the_kernel_of_a_tpu_if_it_is_asked_for() -> None:
    impls: tuple[tuple[Any, bool], ...] = (("pallas", True), ("auto", False))
    for impl, asked in impls:
        run = jax.jit(functools.partial(jc.round_to_format, spec="e4m3fn", impl=impl))
        text = run.trace(jnp.ones((8, 130))).lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in text) is asked


@both
def test_an_empty_array_stays_so(kernel: str) -> None:
    for text, shape in itertools.product(("e4m3fn", "e4m3fn:stochastic"), ((0,), (3, 0, 5))):
        x = jnp.zeros(shape, jnp.bfloat16)
        same_bits(by_kernel(KERNELS[kernel][0], x, 0, jc.parse(text)), x, text)


# -- tilings -----------------------------------------------------------------------------------------------------------

#: Shapes, and tilings other than the heuristic's: blocks smaller and larger than the array, several chunks a block.
TILINGS: dict[tuple[str, tuple[int, ...]], list[Any]] = {
    ("gpu", (5003,)): [RoundGpuTiling(128, 1), RoundGpuTiling(1024, 8), RoundGpuTiling(8192)],
    ("tpu", (3, 5, 257)): [
        RoundTpuTiling(1, 16, 128, 16),
        RoundTpuTiling(2, 32, 128, 16),
        RoundTpuTiling(3, 16, 384, 16),
    ],
    ("tpu", (20, 250)): [RoundTpuTiling(1, 16, 256, 16), RoundTpuTiling(1, 64, 128, 32)],
    ("tpu", (5000,)): [RoundTpuTiling(1, 16, 128, 16), RoundTpuTiling(1, 32, 128, 16), RoundTpuTiling(1, 64, 128, 64)],
}


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("kernel", "shape"), TILINGS, ids=str)
def the_tiling_does_not_matter(kernel: str, shape: tuple[int, ...]) -> None:
    dtype = TPU_DTYPES[len(shape) % 2]
    check(kernel, ["e4m3fn:stochastic"], dtype, [shape], start=2**32 - 1000, tilings=TILINGS[kernel, shape])


WRONG_TILINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "no rows": (lambda: RoundTpuTiling(1, 0, 128, 8), "rows=0"),
    "part of a chunk": (lambda: RoundTpuTiling(1, 24, 128, 16), "rows=24 must be a multiple of 16"),
    "columns": (lambda: RoundTpuTiling(1, 8, 100, 8), "columns=100 must be a multiple of 128"),
    "chunk": (lambda: RoundTpuTiling(1, 12, 128, 12), "chunk=12 must be a multiple of 8"),
    "block": (lambda: RoundGpuTiling(1000), "block=1000 must be a power of two"),
    "short": (lambda: RoundGpuTiling(64), "block=64"),
    "warps": (lambda: RoundGpuTiling(1024, 3), "num_warps=3 must be a power of two"),
}


@further.first
def wrong_tilings_are_refused() -> None:
    for make, message in WRONG_TILINGS.values():
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.smoke
def test_tilings_that_do_not_suit_the_array_are_refused() -> None:
    spec = jc.parse("e4m3fn")
    with pytest.raises(ValueError, match="chunk=8 must be a multiple of 16 for 16-bit x"):
        round_tpu.tpu_round_elements(jnp.zeros((8, 128), jnp.bfloat16), spec=spec, tiling=RoundTpuTiling(1, 8, 128, 8))
    with pytest.raises(ValueError, match="one axis has one slab of 128 columns"):
        round_tpu.tpu_round_elements(jnp.zeros(8), spec=spec, tiling=RoundTpuTiling(1, 8, 256, 8))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_heuristic_stays_within_the_memory_of_a_tpu(itemsize: int) -> None:
    sizes = (1, 5, 8, 127, 128, 1000, 4096, 100_000)
    for shape in itertools.product(sizes[:5], sizes, sizes):
        tiling = RoundTpuTiling.for_shape(shape, itemsize)
        block = tiling.slabs * tiling.rows * tiling.columns * itemsize
        assert block <= 1 << 20 and tiling.chunk * tiling.columns <= 8192, (shape, tiling)
        assert tiling.chunk % (32 // itemsize) == 0 and tiling.slabs <= shape[0], (shape, tiling)


# -- under other programs ----------------------------------------------------------------------------------------------

MAPPED: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "vectors": ((3, 129), (0, None)),
    "vectors, seeds": ((3, 129), (0, 0)),
    "numbers": ((5,), (0, 0)),
    "matrices, seeds": ((2, 5, 130), (0, 0)),
    "seeds alone": ((130,), (None, 0)),
}


@pytest.mark.in_turn(16)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [*zip(itertools.cycle(KERNELS), MAPPED, strict=False), ("gpu", "vectors"), ("tpu", "vectors, seeds")],
)
def test_vmap_is_one_call_for_each(kernel: str, name: str) -> None:
    shape, axes = MAPPED[name]
    run = functools.partial(KERNELS[kernel][0], spec=jc.parse("e4m3fn:stochastic"), interpret=True)
    x, number = jnp.asarray(numbers(shape, "float32")), 3 if axes[0] is None else shape[0]
    seeds = jnp.asarray(SEEDS) + (jnp.arange(number, dtype=jnp.uint32)[:, None] if axes[1] == 0 else jnp.uint32(0))
    got = jax.jit(jax.vmap(run, in_axes=axes))(x, seeds)
    each = [
        run(*(a if axis is None else a[i] for a, axis in zip((x, seeds), axes, strict=True))) for i in range(number)
    ]
    same_bits(got, np.stack(each), name)


@further
@pytest.mark.parametrize("kernel", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def vmap_of_what_draws_nothing_is_one_kernel(kernel: str) -> None:
    run = functools.partial(KERNELS[kernel][0], spec=jc.parse("e4m3fn"), interpret=True)
    x = jnp.asarray(numbers((3, 2, 130), "float32"))
    for mapped in (jax.vmap(run), jax.vmap(jax.vmap(run)), jax.vmap(run, in_axes=2, out_axes=2)):
        same_bits(jax.jit(mapped)(x), run(x), kernel)
    grids = [str(jax.make_jaxpr(fun)(x)).split("grid=")[1].split(")")[0] for fun in (run, jax.vmap(jax.vmap(run)))]
    assert grids[0] == grids[1]


@pytest.mark.parametrize("kernel", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_64_bit_mode_changes_nothing(kernel: str) -> None:
    x, spec = numbers((3, 130), "float32"), jc.parse("integer8:stochastic_c")
    run = functools.partial(KERNELS[kernel][0], interpret=True)
    expected = by_kernel(run, jnp.asarray(x), 2**32 - 9, spec)
    with jax.enable_x64(True):
        same_bits(jax.jit(lambda x: by_kernel(run, x, 2**32 - 9, spec))(x), expected, kernel)


# -- other generators, other forms -------------------------------------------------------------------------------------


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("dtype", "shape"), [("float32", ()), ("bfloat16", (1025,)), ("float32", (3, 5, 257))])
def test_hardware_bits_decide(shape: tuple[int, ...], dtype: str) -> None:
    """The interpreter's generator gives zeros, so every proportional draw goes to the neighbour nearer to zero."""
    spec = jc.parse("e4m3fn:stochastic")
    x = jnp.asarray(numbers(shape, dtype))
    run = functools.partial(round_tpu.tpu_round_with_hardware_bits, spec=spec, interpret=pltpu.InterpretParams())
    expected = round_to_spec(x, spec, CARRIERS[dtype], jnp.zeros(shape, jnp.uint32))
    same_bits(run(x, jnp.asarray(SEEDS)), expected, dtype)
    toward_zero = round_to_spec(x, jc.parse("e4m3fn:toward_zero"), CARRIERS[dtype])
    inside = np.abs(np.asarray(x, np.float32)) <= 448
    same_bits(np.asarray(expected)[inside], np.asarray(toward_zero)[inside], dtype)


def test_each_block_is_seeded_with_a_number_of_its_own() -> None:
    """Blocks in C order, of which there are two along each axis."""
    now: list[Array] = []

    def numbered(tile: Array, drawn: list[Any], first: Array, local: Array) -> Array:
        return jnp.full_like(tile, now[-1].astype(jnp.float32))

    tiling = RoundTpuTiling(2, 8, 128, 8)
    run = round_tpu._ElementwiseKernel(numbered, lambda drawn, number: now.append(number), "numbered", tiling, True)
    number = np.arange(8).reshape(2, 2, 2).repeat(2, 0).repeat(8, 1).repeat(128, 2)
    np.testing.assert_array_equal(compiled(run)(jnp.ones((3, 9, 130))), number[:3, :9, :130])


test_further = further.test()
