"""The quirks of XLA's CPU backend: each in a small program that shows whether it is still there."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further
from jax import lax

from jchop._core.xla import cpu
from jchop._core.xla.cpu import (
    compute_after,
    dot_with_one_float_row,
    dot_with_one_row,
    hide_constant,
    integer_maximum,
    loop_entry,
    materialize_per_group,
    prevent_fma,
)
from jchop._kernels.primitive import make_op

further = Further()

VERSION = ".".join(importlib.metadata.version("jaxlib").split(".")[:2])
#: Whether the symptom of a quirk is there, by its name; and the versions of jaxlib, as major and minor number, without.
GUARDS: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {}


def guard(*versions_without: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Makes a function, named as a quirk, its guard; the quirk is there in all tested versions but these."""

    def add(symptom: Callable[[], bool]) -> Callable[[], bool]:
        GUARDS[symptom.__name__] = symptom, versions_without
        return symptom

    return add


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def number_of(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def optimized(fun: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fun).lower(*args).compile()


def text(fun: Callable[..., Any], *args: Any) -> str:
    return optimized(fun, *args).as_text()


def entry(fun: Callable[..., Any], *args: Any) -> str:
    """The main computation of the optimized program."""
    program = text(fun, *args)
    return program[program.index("ENTRY") :]


def computed(fun: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(jax.jit(fun)(*args))


def scale_of_rows(x: jax.Array) -> jax.Array:
    return number_of(bits_of(x[:, :1]) & 0x7F800000 | 5) * 3


# -- bits --------------------------------------------------------------------------------------------------------------


@guard()
def subnormals_read_as_zero() -> bool:
    tiny = np.float32(1e-40)
    return computed(lambda x: x * 2.0**20, tiny) == 0 and not computed(lambda x: x > 0, tiny)


@guard()
def product_contracted_with_sum() -> bool:
    x, y, scale = normal(64, 64), normal(64, 64, seed=1), np.float32(1.1)
    return bool(np.any(computed(lambda x, s, y: x * s + y, x, scale, y) != x * scale + y))


@guard()
def conversion_pair_deleted() -> bool:
    x, y = (normal(1000, seed=seed).astype(ml_dtypes.bfloat16) for seed in (0, 1))
    return bool(
        np.any(computed(lambda x, y: (x * y).astype(jnp.float32), x, y) != np.multiply(x, y).astype(np.float32))
    )


@guard("0.12")
def constants_of_sums_combined() -> bool:
    whole = 1.5 * 2.0**23
    return bool(computed(lambda x: (x + whole) - whole, np.float32(0.3)) != 0)


@guard()
def zero_plus_minus_zero() -> bool:
    return bool(np.signbit(computed(lambda x: jnp.zeros_like(x) + x, np.full(3, -0.0, np.float32))).all())


@guard()
def quotient_by_one_number_is_product() -> bool:
    x, b = normal(1024), np.float32(0.0975)
    used_twice = jax.jit(lambda x, b: (x / b, b))(x, b)[0]
    np.testing.assert_array_equal(used_twice, x / b)
    return bool((computed(lambda x, b: x / b, x, b) != x / b).any())


@guard()
def maximum_loses_nan() -> bool:
    x = normal(128, 256)
    x[63, 200] = np.nan
    return not np.isnan(computed(jnp.max, x))


@guard()
def selected_float8_changes_nan() -> bool:
    codes = np.array([0xFF, 0x81, 0x7D], np.uint8)
    x = codes.view(ml_dtypes.float8_e5m2)
    kept = computed(lambda taken, x, y: jnp.where(taken, x, y), np.ones(3, bool), x, x[::-1])
    return bool(np.any(kept.view(np.uint8) != codes))


@guard("0.12")
def signalling_nan_becomes_quiet() -> bool:
    bits = np.array([0x7F81], np.uint16)
    x = bits.view(ml_dtypes.bfloat16)
    return bool(np.any(computed(lambda taken, x: jnp.where(taken, x, -x), True, x).view(np.uint16) != bits))


@guard()
def order_of_sums_by_orientation() -> bool:
    """In one of some shapes: the processor and its vectors decide which."""

    def differs(rows: int, depth: int) -> bool:
        x, w = normal(rows, depth), normal(depth, 32, seed=1)
        turned = computed(jnp.matmul, np.ascontiguousarray(w.T), np.ascontiguousarray(x.T)).T
        return bool(np.any(computed(jnp.matmul, x, w) != turned))

    return any(differs(rows, depth) for rows, depth in ((64, 512), (1, 512), (64, 2048)))


@guard()
def sums_ordered_by_fusion() -> bool:
    codes, scale = np.rint(normal(32, 64) * 40).astype(np.int8), np.abs(normal(1, 64, seed=1)) + 1

    def numbers(codes: jax.Array, scale: jax.Array) -> jax.Array:
        return prevent_fma(codes.astype(jnp.float32) * scale, scale)

    def energy(x: jax.Array) -> jax.Array:
        return (x * x).sum(0)

    fused = computed(lambda codes, scale: energy(numbers(codes, scale)), codes, scale)
    return bool(np.any(fused != computed(energy, computed(numbers, codes, scale))))


# -- time --------------------------------------------------------------------------------------------------------------


@guard("0.12")
def barriers_removed_before_fusion() -> bool:
    return entry(lambda x: x * lax.optimization_barrier(scale_of_rows(x)), normal(64, 64)).count(" fusion(") == 1


def layers_in_memory(tie: Callable[[Any, Any], Any]) -> float:
    """Temporaries of six products with weights that are unpacked, in units of one weight."""

    def run(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = x @ jnp.tanh(tie(w, x).astype(jnp.float32))
        return x

    weights, x = 6 * [jax.ShapeDtypeStruct((256, 256), np.uint8)], jax.ShapeDtypeStruct((8, 256), np.float32)
    return optimized(run, weights, x).memory_analysis().temp_size_in_bytes / (4 * 256**2)


@guard("0.12")
def independent_results_come_first() -> bool:
    return layers_in_memory(lambda w, x: lax.optimization_barrier((w, x))[0]) > 5


def test_computed_after() -> None:
    """One weight is in memory at a time; the bits and the derivatives are those of the values, NaN and -0 too."""
    assert layers_in_memory(compute_after) < 1.2
    special = np.array([np.nan, -np.nan, -0.0, np.inf, 1e-40, -3.5], np.float32)
    values = [special.astype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)]
    values += [np.arange(-3, 3, dtype=np.int8), np.array([True, False]), np.arange(6, dtype=np.uint32)]
    for known in (
        special,
        -special,
        special.astype(ml_dtypes.bfloat16),
        np.array([-1, 1 << 30], np.int32),
        special[:0],
    ):
        found = jax.jit(compute_after)(values, known)
        for x, y in zip(values, found, strict=True):
            assert np.asarray(y).tobytes() == x.tobytes()
    slopes = jax.jit(jax.grad(lambda x, known: (compute_after(x, known) ** 2).sum(), (0, 1)))
    slope = slopes(np.arange(3, dtype=np.float32), np.ones(2, np.float32))
    assert slope[0].tolist() == [0.0, 2.0, 4.0] and slope[1].tolist() == [0.0, 0.0]


def rounded(x: jax.Array) -> jax.Array:
    """To twelve bits less: one shift to the right."""
    bits = bits_of(x)
    return number_of(bits + 0x7FF + ((bits >> 12) & 1) & ~0xFFF)


def shifts(fun: Callable[..., Any]) -> int:
    return len(re.findall(r" shift-right-\w+\(", text(fun, normal(64, 64))))


@guard()
def computed_once_for_each_use() -> bool:
    def twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = rounded(x)
        return y, y.T + 1

    return shifts(rounded) == 1 and shifts(twice) == 2


@guard()
def constants_enter_calls() -> bool:
    double = make_op(
        "double", lambda x, number: jnp.sin(x * number.astype(jnp.float32)), like_first=True, no_inline=True
    )

    def numbers_read(make: Callable[[int], jax.Array]) -> int:
        """How many operands the fusions of the two calls have together."""
        lines = text(lambda x: double(double(x, make(3)), make(5)), normal(32)).splitlines()
        return sum(line.count("%Arg_") for line in lines if "ROOT" in line and " fusion(" in line)

    return numbers_read(jnp.uint32) == 2 and numbers_read(hide_constant) == 4


def taken_in_windows(program: Any, array: str) -> bool:
    """Whether a program reduces an array of this type in windows, one after the other: that loop is scalar code."""
    return re.search(rf"reduce-window\S* \(\S+ {re.escape(array)},", program.as_text()) is not None


@guard()
def maximum_along_rows_is_scalar() -> bool:
    x = jnp.zeros((256, 4096), jnp.int32)
    plain, steps = optimized(lambda x: jnp.max(x, axis=-1), x), optimized(lambda x: integer_maximum(x, 1), x)
    return taken_in_windows(plain, "s32[256,4096]") and not taken_in_windows(steps, "s32[256,4096]")


@guard()
def maxima_merged() -> bool:
    x = np.zeros((4, 64), np.int32)
    return text(lambda x: jnp.max(jnp.max(x.reshape(4, 8, 8), -2), -1), x).count(" reduce(") == 1


@guard()
def integers_written_before_maximum() -> bool:
    x = jnp.zeros((1024, 1024), jnp.float32)

    def written(magnitude: Callable[[jax.Array], jax.Array]) -> int:
        program = optimized(lambda x: jnp.max(magnitude(x), axis=0), x)
        return program.memory_analysis().temp_size_in_bytes

    return written(lambda x: bits_of(x) & 0x7FFFFFFF) >= x.nbytes > written(jnp.abs)


@guard()
def write_into_part_has_one_thread() -> bool:
    def long(x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.sin(x)
        return x

    def written(whole: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(whole, long(x), i, 0)

    x = jnp.zeros((1024, 1024))
    if "outer_dimension_partitions" not in text(long, x):
        pytest.skip("programs here have one thread")
    return "outer_dimension_partitions" not in text(written, jnp.zeros((4096, 1024)), x, jnp.int32(0))


@guard()
def short_floats_converted_whole() -> bool:
    def pieces(x: jax.Array) -> jax.Array:
        def turn(i: jax.Array, whole: jax.Array) -> jax.Array:
            part = lax.dynamic_slice_in_dim(x, i * 8, 8, 0) * 2
            return lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), i * 8, 0)

        return lax.fori_loop(0, 8, turn, jnp.zeros(x.shape, jnp.float8_e4m3fn))

    return re.search(r"= \w+\[64,128\]\S* convert\(", text(pieces, normal(64, 128))) is not None


def stack_in_a_loop(take: Callable[[jax.Array, jax.Array], jax.Array]) -> str:
    def last(stack: jax.Array) -> jax.Array:
        def turn(_: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return lax.bitcast_convert_type(take(stack, i), jnp.uint8), None

        return lax.scan(turn, jnp.zeros(stack.shape[1:], jnp.uint8), jnp.arange(stack.shape[0]))[0]

    return text(last, jnp.zeros((8, 64, 128), jnp.float8_e4m3fn))


#: An array as large as the stack of `stack_in_a_loop`, of floats or bits, that is computed before the loop.
WHOLE_STACK = re.compile(r"^ +%\S+ = (f16|u8)\[8,64,128\]\S* (fusion|convert|bitcast-convert|copy)\(", re.MULTILINE)


@guard()
def stack_of_short_floats_converted() -> bool:
    program = stack_in_a_loop(lambda stack, i: lax.dynamic_index_in_dim(stack, i, 0, False))
    return WHOLE_STACK.search(program[program.index("ENTRY") :]) is not None


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "int8"])
def test_entries_of_a_stack(dtype: str) -> None:
    """Every code, in a loop, with the derivative of an index."""
    word = f"u{np.dtype(dtype).itemsize}"
    stack = (np.arange(4 * 256).reshape(4, 256) * 7).astype(word).view(dtype)
    found = jax.jit(
        lambda stack: lax.map(lambda i: lax.bitcast_convert_type(loop_entry(stack, i), word), jnp.arange(4))
    )
    np.testing.assert_array_equal(found(stack), stack.view(word))
    if dtype != "int8":
        x = jnp.asarray(normal(4, 8), dtype)
        own, wanted = (
            jax.jit(jax.grad(lambda x, take=take: jnp.sum(take(x, jnp.int32(2)).astype(float) ** 2)))(x)
            for take in (loop_entry, lambda x, i: x[i])
        )
        np.testing.assert_array_equal(own.astype(np.float32), wanted.astype(np.float32))


def test_a_stack_is_not_converted() -> None:
    program = stack_in_a_loop(loop_entry)
    assert WHOLE_STACK.search(program[program.index("ENTRY") :]) is None


@guard()
def rows_of_two_axes_moved() -> bool:
    def for_weight(x: jax.Array, g: jax.Array) -> jax.Array:
        def product(w: jax.Array) -> jax.Array:
            return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

        return jax.vjp(product, jnp.zeros((256, 128)))[1](g)[0]

    def moves(*rows: int) -> bool:
        program = entry(for_weight, normal(*rows, 256), normal(*rows, 128))
        return re.search(r"^ *(ROOT )?%(copy|transpose)", program, re.MULTILINE) is not None

    return moves(8, 64) and not moves(512)


@guard()
def slice_fused_into_loop() -> bool:
    def sums(x: jax.Array, y: jax.Array) -> jax.Array:
        def turn(i: jax.Array, total: jax.Array) -> jax.Array:
            a, b = (lax.dynamic_index_in_dim(v, i, 0, keepdims=False) for v in (x, y))
            return number_of(bits_of(total + a[:, None] * b[None, :]) & ~0xFFF)

        return lax.fori_loop(0, 64, turn, jnp.zeros((32, 32)))

    bodies = text(sums, normal(64, 32), normal(64, 32)).split("\n\n")
    return any("dynamic-slice(" in body and " multiply(" in body for body in bodies if "fused" in body[:60])


@guard()
def one_row_of_integers_is_widened() -> bool:
    def widened(rows: int) -> bool:
        x, w = np.ones((1, rows, 512), np.int8), np.ones((1, 256, 512), np.int8)
        dims = (((2,), (2,)), ((0,), (0,)))
        program = optimized(lambda x, w: lax.dot_general(x, w, dims, preferred_element_type=jnp.int32), x, w)
        return program.memory_analysis().temp_size_in_bytes >= 4 * w.size

    return widened(1) and not widened(2)


@guard()
def long_sums_of_integers_are_scalar() -> bool:
    rng = np.random.default_rng(0)
    row, matrix = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((1, 1, 2048), (2048, 1024)))

    def plain(row: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.sum(row[0, 0, :, None].astype(jnp.int32) * matrix.astype(jnp.int32), 0)

    long, short = optimized(plain, row, matrix), optimized(lambda x, w: dot_with_one_row(x, w.T[None]), row, matrix)
    written = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    return taken_in_windows(long, "s32[2048,1024]") and written[0] < matrix.size < written[1]


@guard()
def matrix_of_one_row_is_written() -> bool:
    row, matrix = normal(1, 128), np.ones((128, 1024), np.int8)

    def in_eights(row: jax.Array, matrix: jax.Array) -> jax.Array:
        halves = zip(jnp.split(row, 2, 1), jnp.split(matrix.astype(jnp.float32), 2), strict=True)
        return dot_with_one_float_row(*((x, [w]) for x, w in halves))[0]

    plain, summed = (optimized(f, row, matrix) for f in (lambda x, w: x @ w.astype(jnp.float32), in_eights))
    np.testing.assert_allclose(summed(row, matrix)[0], np.full(1024, row.sum()), rtol=1e-5)
    written = [program.memory_analysis().temp_size_in_bytes for program in (summed, plain)]
    return written[0] < matrix.size < 4 * matrix.size <= written[1]


@guard()
def known_results_computed_by_compiler() -> bool:
    table = normal(100)

    def taken(hide: Callable[[jax.Array], jax.Array]) -> str:
        return text(lambda: jnp.sort(hide(jnp.asarray(table))))

    return " sort(" not in taken(lambda x: x) and " sort(" in taken(lax.optimization_barrier)


# -- the list ----------------------------------------------------------------------------------------------------------


@further.first
def every_quirk_has_a_guard_or_a_benchmark() -> None:
    tree = ast.parse((Path(__file__).parents[3] / "benchmarks" / "quirks.py").read_text("utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    timed = functions[functions.index("seconds") + 1 :]
    assert sorted([*GUARDS, *timed]) == sorted(re.findall(r"^\* `(\w+)`: ", str(cpu.__doc__), re.MULTILINE))


@further
@pytest.mark.parametrize("name", GUARDS)
def the_quirk_is_there(name: str, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--unoptimized"):
        pytest.skip("quirks of optimized code")
    symptom, versions_without = GUARDS[name]
    if VERSION in versions_without:
        assert not symptom(), f"the quirk {name} is back on jaxlib {VERSION}: say so at its guard"
    else:
        assert symptom(), f"the quirk {name} is gone on jaxlib {VERSION}: its workaround may go (`_core/xla/cpu.py`)"


# -- the workarounds ---------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("shape", [(1, 24, 384), (1, 7, 800), (2, 33, 1000), (1, 5, 4001)])
def test_one_row_of_integers_is_multiplied_exactly(shape: tuple[int, int, int], pytestconfig: pytest.Config) -> None:
    batch, n, k = shape
    rng = np.random.default_rng(k)
    row, matrix = (rng.integers(-128, 128, s).astype(np.int8) for s in ((batch, 1, k), (batch, k, n)))
    row[..., : k // 2], matrix[..., 0] = -128, -128  # the largest products
    program = optimized(lambda x, w: dot_with_one_row(x, w.swapaxes(1, 2)), row, matrix)
    np.testing.assert_array_equal(program(row, matrix), row.astype(int) @ matrix.astype(int))
    if not pytestconfig.getoption("--unoptimized"):
        assert program.memory_analysis().temp_size_in_bytes >= 4 * batch * n * 48, "the sums were merged"


def test_short_rows_are_left_to_products() -> None:
    assert dot_with_one_row(jnp.zeros((1, 1, 383), jnp.int8), jnp.zeros((1, 4, 383), jnp.int8)) is None


def test_groups_are_computed_once() -> None:
    program = entry(lambda x: x * materialize_per_group(scale_of_rows(x)), normal(64, 64))
    assert program.count(" fusion(") >= 2


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_other_devices_do_without_workarounds(platform: str) -> None:
    """They keep the barrier of scales, and merge the steps of maxima along rows."""

    def run(x: jax.Array) -> Any:
        return materialize_per_group(x + 1), integer_maximum(x, 1)

    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((64, 1024), jnp.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("divide" in text, text.count("optimization_barrier")) == ((True, 3) if platform == "cpu" else (False, 1))


def test_materialize_per_group_keeps_every_bit() -> None:
    bits = np.array([0, 1, -1, 1 << 31, 0x7F800001, 0xFFC00001], np.int64).astype(np.uint32)
    given = {"int": bits.view(np.int32), "float": bits.view(np.float32), "bool": bits > 5, "none": None}
    kept = jax.jit(materialize_per_group)(given)
    assert kept["none"] is None
    for name in ("int", "float", "bool"):
        assert np.asarray(kept[name]).tobytes() == given[name].tobytes()


@pytest.mark.parametrize("size", [1 << 15, 1 << 16])
def test_only_small_arrays_are_divided_together(size: int) -> None:
    """A large array is not copied beside others: one place of a program less where memory counts."""

    def run(x: jax.Array, y: jax.Array) -> Any:
        return materialize_per_group((x + 1, y * 2))

    text = jax.jit(run).lower(*(jax.ShapeDtypeStruct((size,), jnp.float32),) * 2).as_text()
    assert ("stablehlo.concatenate" in text) == (size < 1 << 16)
    assert text.count("stablehlo.divide") == (1 if size < 1 << 16 else 2)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", [(3, 1024), (2, 5, 64), (7,), (4096,), (12288,), (2, 50)])
def test_maximum_in_steps(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).integers(0, 1 << 30, shape).astype(np.int32)
    for axes in ((len(shape) - 1,), tuple(range(len(shape)))):
        np.testing.assert_array_equal(integer_maximum(jnp.asarray(x), axes), x.max(axes, keepdims=True))


def test_prevent_fma() -> None:
    x, y, scale = normal(64, 64), normal(64, 64, seed=1), np.float32(1.1)
    np.testing.assert_array_equal(computed(lambda x, s, y: prevent_fma(x * s, s) + y, x, scale, y), x * scale + y)


test_further = further.test()
