"""Placement: a parameter is rounded as its operand would be, laid out for the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

RNG = np.random.default_rng(7)


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape) * np.exp2(RNG.integers(-3, 3, shape)), jnp.float32)


def rows_of(x: Any, spec: str) -> np.ndarray:
    """A matrix (rows, summed) rounded along its last axis."""
    return np.asarray(jc.round_to_format(jnp.asarray(x), spec))


# A parameter, data, the product, and the parameter laid out as (kept, summed): the definition of the groups.
Function = Callable[..., Any]
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Function, Function, Function]] = {
    "matrix": ((64, 6), (2, 64), lambda w, x: x @ w, lambda w: w.T, lambda r: r.T),
    "transposed": ((6, 64), (2, 64), lambda w, x: x @ w.T, lambda w: w, lambda r: r),
    "from the left": ((6, 64), (64, 2), lambda w, x: w @ x, lambda w: w, lambda r: r),
    "heads": (
        (64, 3, 4), (2, 64), lambda w, x: jnp.einsum("bd,dhk->bhk", x, w),
        lambda w: w.transpose(1, 2, 0).reshape(12, 64), lambda r: r.reshape(3, 4, 64).transpose(2, 0, 1),
    ),
    "heads joined": (
        (4, 16, 6), (2, 4, 16), lambda w, x: jnp.einsum("bhk,hkd->bd", x, w),
        lambda w: w.reshape(64, 6).T, lambda r: r.T.reshape(4, 16, 6),
    ),
    "reshaped": (
        (64, 6), (2, 4, 16), lambda w, x: jnp.einsum("bhk,hkd->bd", x, w.reshape(4, 16, 6)),
        lambda w: w.T, lambda r: r.T,
    ),
    "convolution": (
        (3, 3, 8, 5), (1, 6, 6, 8),
        lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        lambda w: w.reshape(72, 5).T, lambda r: r.T.reshape(3, 3, 8, 5),
    ),
    "three channels": (
        (4, 4, 3, 5), (1, 8, 8, 3),
        lambda w, x: jax.lax.conv_general_dilated(x, w, (4, 4), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        lambda w: w.reshape(48, 5).T, lambda r: r.T.reshape(4, 4, 3, 5),
    ),
    "rows": ((7, 64), (), lambda w, x: w[jnp.array([1, 5, 1])], lambda w: w, lambda r: r),
}  # fmt: skip
BLOCKS = ["int4(group=16)", "nvfp4", "uint4(group=16,zero_point=integer)", "mxfp8_e4m3", "nf4(group=32)"]
PLAIN = ["int8", "e4m3", "bfloat16"]


@further
@pytest.mark.parametrize(
    "name", ["heads joined", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "heads joined")]
)
def groups_lie_along_the_sum(name: str) -> None:
    """A scale for each row, for each block of one, and for all or none."""
    shape, data, product, lay, back = CASES[name]
    w, x = numbers(*shape), numbers(*data)
    turn = list(CASES).index(name)
    for spec in ("int8(group=all)", BLOCKS[turn % len(BLOCKS)], PLAIN[turn % len(PLAIN)]):
        expected = product(jnp.asarray(back(rows_of(lay(w), spec))), x)
        low = jc.quantize_fn(product, jc.Rule(weight=spec))
        packed = low.pack(w, x)
        assert packed.shape == w.shape, spec
        np.testing.assert_array_equal(low(w, x), expected, spec)
        np.testing.assert_array_equal(low(packed, x), expected, spec)


@further
@pytest.mark.in_turn(9)
@pytest.mark.parametrize(("taken", "spec"), [("scan", "int8"), ("index", "int4(group=16)"), ("scan", "nvfp4")])
def each_of_a_stack_is_rounded_by_itself(taken: str, spec: str) -> None:
    w, x = numbers(3, 32, 32) * jnp.array([1.0, 100.0, 0.01])[:, None, None], numbers(2, 32)

    def scanned(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, v: (jnp.tanh(x @ v), None), x, w)[0]

    def indexed(w: Any, x: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(x @ w[i])
        return x

    run = scanned if taken == "scan" else indexed
    each = jnp.stack([jnp.asarray(rows_of(v.T, spec)).T for v in w])
    low = jc.quantize_fn(run, jc.Rule(weight=spec))
    packed = low.pack(w, x)
    np.testing.assert_array_equal(low(w, x), run(each, x))
    np.testing.assert_array_equal(jax.jit(low)(packed, x), jax.jit(low)(w, x))


@further
def a_stack_of_float8_is_not_converted_whole() -> None:
    """The quirk `stack_of_short_floats_converted`: as much memory as codes of integers, forwards and backwards."""
    w, x = numbers(4, 64, 64), numbers(2, 64)

    def both(w: Any, x: Any) -> Any:
        for reverse in (False, True):
            x = jax.lax.scan(lambda x, v: (jnp.tanh(x @ v), None), x, w, reverse=reverse)[0]
        return x

    memory = []
    for spec in ("int8(channel=-1)", "e4m3fn(channel=-1)"):
        low = jc.quantize_fn(both, jc.Rule(weight=spec))
        packed = low.pack(w, x)
        program = jax.jit(low).lower(packed, x).compile()
        np.testing.assert_array_equal(program(packed, x), jax.jit(low)(w, x))
        used = program.memory_analysis()
        assert used is not None
        memory.append(used.temp_size_in_bytes)
    assert memory[1] < memory[0] + w.size / 4


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("int8(group=all)", "int8(group=12)"),  # 12 numbers of each head
        ("int4(group=4)", "int4(group=4)"),
        ("int4(group=32)", "int4(group=12)"),  # no group runs over two heads
    ],
)
def test_groups_keep_to_the_part_of_an_axis_that_is_summed_over(spec: str, found: str) -> None:
    w, x = numbers(8, 36), numbers(2, 3, 12)
    low = jc.quantize_fn(lambda w, x: jnp.einsum("bhk,rhk->bhr", x, w.reshape(8, 3, 12)), jc.Rule(weight=spec))
    assert low.report(w, x).parameters[0].spec == found
    np.testing.assert_array_equal(low(low.pack(w, x), x), low(w, x))


NUMBERS: dict[str, tuple[Function, Function, Function]] = {  # with the table laid out as (rows, groups)
    "both indexes": (lambda t, i: t[i, i], lambda t: t.reshape(-1, 8), lambda r: r),
    "one token": (lambda t, i: t[i[0], i[1], i[0]], lambda t: t.reshape(-1, 8), lambda r: r),
    "of a flat table": (lambda t, i: t.reshape(-1)[i], lambda t: t.reshape(-1, 8), lambda r: r),
    "of the transpose": (
        lambda t, i: t.T[i, i, i], lambda t: t.T.reshape(-1, t.shape[0]), lambda r: r.reshape(8, -1, r.shape[1]).T
    ),
    "along an axis": (
        lambda t, i: jnp.take_along_axis(t, jnp.broadcast_to(i[:1], (t.shape[0], 1, 8)), 1),
        lambda t: t.reshape(-1, 8), lambda r: r,
    ),
}  # fmt: skip


@further
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", NUMBERS)
def a_table_of_single_numbers_has_groups_along_its_last_axis(name: str) -> None:
    """Of 4 numbers, and of all or 32, of which a row has fewer."""
    look_up, lay, back = NUMBERS[name]
    table, i = numbers(4, 16, 8), jnp.array([3, 1])
    if name == "both indexes":
        table = table.reshape(64, 8)
    for spec in ("int4(group=4)", f"int4(group={'all' if 'one' in name else 32})"):
        rounded = back(rows_of(lay(table), spec)).reshape(table.shape)
        low = jc.quantize_fn(look_up, jc.Rule(weight=spec))
        packed = low.pack(table, i)
        assert low.report(table, i).parameters[0].use == "rows"
        assert packed.nbytes <= table.size / 2 + 4 * table.size / 4  # one scale for 4 numbers at least
        np.testing.assert_array_equal(jc.dequantize(packed), rounded, spec)
        np.testing.assert_array_equal(low(table, i), look_up(jnp.asarray(rounded), i), spec)
        np.testing.assert_array_equal(low(packed, i), low(table, i), spec)


def test_a_vector_of_single_numbers_has_groups_along_itself() -> None:
    vector, i = numbers(64), jnp.array([3, 1])
    low = jc.quantize_fn(lambda v, i: v[i], jc.Rule(weight="int4(group=16)"))
    packed = low.pack(vector, i)
    assert packed.nbytes == 64 // 2 + 4 * 4
    np.testing.assert_array_equal(jc.dequantize(packed), rows_of(vector, "int4(group=16)"))
    np.testing.assert_array_equal(low(packed, i), low(vector, i))


@further.first
def an_axis_that_the_operand_has_not_is_an_error_in_every_mode() -> None:
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="int8(channel=5)"))
    for call in (low, low.pack, low.report):
        with pytest.raises(ValueError, match=r"weight='int8\(channel=5\)' of the parameter.*axis 5.*2 axes"):
            call(numbers(4, 4), numbers(2, 4))
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(gradient="int8(channel=5)", input_gradient="e5m2"))
    with pytest.raises(ValueError, match=r"^gradient='int8\(channel=5\)' of the dot_general.*2 dimensions"):
        low.report(numbers(4, 4), numbers(2, 4))


GATHERED: dict[str, Function] = {
    "tiled": lambda w: jax.lax.all_gather(w, "d", axis=0, tiled=True),
    "as a stack": lambda w: jax.lax.all_gather(w, "d").reshape(64, 8),
    "in a ring": lambda w: jnp.concatenate([w, jax.lax.ppermute(w, "d", [(0, 1), (1, 0)])]),
    "by a sum": lambda w: jax.lax.psum(
        jax.lax.dynamic_update_slice(jnp.zeros((64, 8)), w, (32 * jax.lax.axis_index("d"), 0)), "d"
    ),
}


@further
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "tiled" else pytest.mark.slow) for n in GATHERED])
def a_weight_that_devices_gather_is_rounded_as_a_whole(name: str) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    w, x = numbers(64, 8), numbers(4, 64)

    def parts(w: Any, x: Any) -> Any:
        return x @ GATHERED[name](w)

    fun = jax.shard_map(parts, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    low = jc.quantize_fn(fun, jc.Rule(weight="int4(group=64)", activation="int8(group=all)"))
    packed = low.pack(w, x)
    report = low.report(w, x)
    assert report.rounded_share == 1 and report.products[0].parameters == ("",)
    np.testing.assert_array_equal(jc.dequantize(packed), rows_of(w.T, "int4(group=64)").T)
    np.testing.assert_array_equal(low(packed, x), low(w, x))
    np.testing.assert_array_equal(low(w, x), fun(jc.dequantize(packed), rows_of(x, "int8(group=all)")))
    low = jc.quantize_fn(fun, jc.Rule(weight="int4(group=64)"))
    got, wanted = (
        jax.grad(lambda w, f=f: jnp.sum(f(w, x) ** 2))(v) for f, v in ((low, w), (fun, jc.dequantize(packed)))
    )
    np.testing.assert_array_equal(got, wanted)


def test_a_weight_behind_a_barrier_with_data_is_rounded_and_keeps_its_adapter() -> None:
    w, x = numbers(64, 8), numbers(4, 64)
    rule = jc.Rule(weight="int4(group=16)")
    low = jc.quantize_fn(lambda w, x: jnp.matmul(*jax.lax.optimization_barrier((x, w))), rule)
    packed = low.pack(w, x)
    np.testing.assert_array_equal(low(w, x), low(packed, x))
    np.testing.assert_array_equal(low(w, x), x @ rows_of(w.T, "int4(group=16)").T)
    plain = jc.quantize_fn(lambda w, x: x @ w, rule)
    lora, key = jc.nn.LoraRule("*", rank=2, init="loftq"), jax.random.key(0)
    adapted = jc.nn.add_lora(packed, lora, fun=low, inputs=(x,), key=key, original=w)
    np.testing.assert_array_equal(low(adapted, x), plain(adapted, x))
    assert bool((low(adapted, x) != low(packed, x)).any())


test_further = further.test()
