"""The choice between the portable body and a kernel: which one every kind of program gets, on every platform.

Programs for TPUs and GPUs are lowered here on the CPU. A toy operation shows which implementation was taken; test_round
and its neighbours see to the real ones, and test_partitioned compiles for four chips.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._kernels import primitive
from jchop._kernels.primitive import Kernel, make_op

X = np.arange(16, dtype=np.float32).reshape(8, 2)
SCALE = np.float32(3)


def body(x: jax.Array, scale: jax.Array, *, shift: int) -> jax.Array:
    return x * scale + shift


class Taken:
    """Kernels that give what the body gives, and remember the shapes that they were called with."""

    def __init__(self, **limits: Any) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        tpu, gpu = (Kernel(functools.partial(self.run, platform), **limits) for platform in ("tpu", "gpu"))
        self.op = make_op("toy", body, tpu=tpu, gpu=gpu)

    def run(self, platform: str, x: jax.Array, scale: jax.Array, *, shift: int) -> jax.Array:
        self.calls.append((platform, x.shape))
        return body(x, scale, shift=shift)


def times(op: Any, impl: str = "auto") -> Callable[..., jax.Array]:
    return lambda x, scale=SCALE: op(jnp.asarray(x), jnp.asarray(scale), shift=1, impl=impl)


def lowered_for(platform: str, fun: Callable[..., Any], *args: Any) -> str:
    return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that kernels run on, as far as the dispatch can see."""
    monkeypatch.setattr(primitive, "compute_capability", lambda: 9.0)


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def mapped(fun: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return jax.shard_map(fun, mesh=mesh(), in_specs=P("a"), out_specs=P("a"), **more)


#: Programs with the operation within, and the shape that its innermost function sees.
PROGRAMS: dict[str, tuple[Callable[[Any], Callable[..., Any]], tuple[int, ...]]] = {
    "jit": (times, (8, 2)),
    "vmap": (lambda op: jax.vmap(times(op)), (2,)),
    "vmap, last axis": (lambda op: jax.vmap(times(op), in_axes=1, out_axes=1), (8,)),
    "nested vmap": (lambda op: jax.vmap(jax.vmap(times(op))), ()),
    "checkpoint": (lambda op: jax.checkpoint(times(op)), (8, 2)),
    "scan": (lambda op: lambda x: lax.scan(lambda c, row: (c, times(op)(row)), 0.0, x)[1], (2,)),
    "while": (lambda op: lambda x: lax.fori_loop(0, 1, lambda _, y: times(op)(y), x), (8, 2)),
    "cond": (lambda op: lambda x: lax.cond(x[0, 0] < 1, times(op), lambda x: x, x), (8, 2)),
    "shard_map": (lambda op: mapped(times(op)), (1, 2)),
    "shard_map, unchecked": (lambda op: mapped(times(op), check_vma=False), (1, 2)),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_the_cpu_run_the_body(name, taken):
    program, _ = PROGRAMS[name]
    np.testing.assert_array_equal(jax.jit(program(taken.op))(X), X * 3 + 1)
    np.testing.assert_array_equal(program(taken.op)(X), X * 3 + 1)
    assert taken.calls == []


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.usefixtures("capable")
def test_programs_for_one_chip_or_manual_meshes_take_the_kernel(platform):
    for name, (program, inner) in PROGRAMS.items():
        taken = Taken()
        lowered_for(platform, program(taken.op), X)
        assert set(taken.calls) == {({"cuda": "gpu"}.get(platform, platform), inner)}, name


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.usefixtures("capable")
def test_partitioned_programs_take_the_body(kind, platform, taken):
    x = jax.device_put(X, NamedSharding(mesh(kind), P("a")))
    with jax.set_mesh(mesh(kind)):
        assert "sdy.mesh" in lowered_for(platform, times(taken.op), x)
    assert taken.calls == []


@pytest.mark.usefixtures("capable")
def test_a_mesh_that_is_partly_manual_takes_the_body(taken):
    square = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    partly = jax.shard_map(times(taken.op), mesh=square, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    lowered_for("tpu", partly, X)
    assert taken.calls == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharding_passes_through(kind, taken):
    sharding = NamedSharding(mesh(kind), P("a"))
    x = jax.device_put(X, sharding)
    with jax.set_mesh(mesh(kind)):
        run = jax.jit(times(taken.op))
        assert run(x).sharding.is_equivalent_to(sharding, 2)
        assert "all-gather" not in str(run.lower(x).compile().as_text())
        if kind is AxisType.Explicit:
            assert jax.typeof(times(taken.op)(x)).sharding.spec == P("a", None)


def test_results_vary_over_the_manual_axes_that_their_arguments_vary_over(taken):
    def check(x: jax.Array) -> jax.Array:
        y, constant = times(taken.op)(x, x[0, 0]), times(taken.op)(np.ones(2, np.float32))
        assert jax.typeof(y).manual_axis_type == jax.typeof(x).manual_axis_type
        assert jax.typeof(constant).manual_axis_type == jax.typeof(jnp.ones(2)).manual_axis_type
        assert jax.typeof(constant).manual_axis_type != jax.typeof(x).manual_axis_type
        return y

    np.testing.assert_array_equal(jax.jit(mapped(check))(X), X * X[:, :1] + 1)


def test_an_unmapped_argument_stays_so(taken):
    many = jax.vmap(times(taken.op), in_axes=(None, 0))(X, np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(many, np.stack([X * s + 1 for s in range(3)]))
    lowered_for("tpu", jax.vmap(times(taken.op), in_axes=(None, 0)), X, np.arange(3, dtype=np.float32))
    assert taken.calls == [("tpu", (8, 2))]


def test_one_export_holds_a_choice_for_each_platform(taken):
    exported = export.export(jax.jit(times(taken.op)), platforms=("cpu", "tpu"))(X)
    assert taken.calls == [("tpu", (8, 2))]
    np.testing.assert_array_equal(exported.call(X), X * 3 + 1)


# -- impl --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("capable")
def test_xla_never_takes_the_kernel(taken):
    lowered_for("tpu", times(taken.op, "xla"), X)
    lowered_for("cuda", times(taken.op, "xla"), X)
    assert taken.calls == []


@pytest.mark.usefixtures("capable")
def test_profit_is_asked_only_of_auto():
    taken = Taken(profitable=lambda x, scale, *, shift: x.size > 100)
    lowered_for("tpu", times(taken.op), X)
    assert taken.calls == []
    lowered_for("tpu", times(taken.op, "pallas"), X)
    lowered_for("tpu", times(taken.op), np.ones((8, 16), np.float32))
    assert taken.calls == [("tpu", (8, 2)), ("tpu", (8, 16))]


def refuse(x: Any, scale: Any, *, shift: int) -> str | None:
    return f"x has {x.dtype} and shift is {shift}" if x.dtype != np.float32 else None


def test_auto_falls_back_where_the_kernel_refuses():
    taken = Taken(refuse=refuse)
    lowered_for("tpu", times(taken.op), X.astype(np.float16))
    assert taken.calls == []


@pytest.mark.parametrize(("capability", "name"), [(8.0, "old"), (9.0, "new"), (10.0, "old")])
def test_the_first_of_several_kernels_that_can_runs(capability, name, monkeypatch):
    monkeypatch.setattr(primitive, "compute_capability", lambda: capability)
    calls = []

    def kernel(name: str, **limits: Any) -> Kernel:
        return Kernel(lambda x, scale, shift: calls.append(name) or body(x, scale, shift=shift), **limits)

    op = make_op("toy", body, gpu=(kernel("new", capability=lambda *_, **__: 9.0, below=10.0), kernel("old")))
    for impl in ("auto", "pallas"):
        lowered_for("cuda", times(op, impl), X)
    assert set(calls) == {name}


def run_sharded(op: Any) -> Callable[..., Any]:
    return lambda x: times(op, "pallas")(lax.with_sharding_constraint(x, NamedSharding(mesh(), P("a"))))


#: What stands in the way of impl="pallas", and what the error then says.
OBSTACLES: dict[str, tuple[str, Callable[[Any], Any], Any, float | None, str]] = {
    "platform": ("cpu", lambda op: times(op, "pallas"), X, 9.0, "a kernel for TPU and NVIDIA GPU.*lowered for cpu"),
    "argument": ("tpu", lambda op: times(op, "pallas"), X.astype(np.float16), 9.0, "x has float16 and shift is 1"),
    "several devices": ("tpu", run_sharded, X, 9.0, "several devices.*jax.shard_map"),
    "an old GPU": ("cuda", lambda op: times(op, "pallas"), X, 7.5, "compute capability 7.5, less than 8.0"),
    "an unknown GPU": ("cuda", lambda op: times(op, "pallas"), X, None, "not known.*jax.default_device"),
}


def test_pallas_says_why_it_cannot_and_auto_does_not_try(monkeypatch):
    for name, (platform, program, x, capability, words) in OBSTACLES.items():
        monkeypatch.setattr(primitive, "compute_capability", lambda capability=capability: capability)
        taken = Taken(refuse=refuse)
        said = f"(?s)impl='pallas' cannot be had for toy: .*{words}.*impl='auto'"
        with pytest.raises(NotImplementedError, match=said):
            lowered_for(platform, program(taken.op), x)
        auto = functools.partial(taken.op, shift=1)
        if name != "several devices":
            lowered_for(platform, lambda x, auto=auto: auto(x, jnp.float32(3)), x)
        assert taken.calls == [], name


def test_other_impls_are_refused(taken):
    wrongs: tuple[Any, ...] = ("cuda", "PALLAS", None, 1)
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"impl=.* must be one of 'auto', 'xla', 'pallas'"):
            times(taken.op, wrong)(X)


def test_the_device_of_the_cpu_has_no_compute_capability():
    assert primitive.compute_capability() is None
    with jax.default_device(jax.devices("cpu")[1]):
        assert primitive.compute_capability() is None


# -- precision of what is lowered later --------------------------------------------------------------------------------


def test_64_bit_bodies_stay_so_when_lowered_without_x64():
    """jit lowers after the context in which it traced has ended."""
    op = make_op("toy_wide", lambda x, *, shift: (lax.bitcast_convert_type(x, jnp.int64) + shift).astype(jnp.float64))
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float64)
        traced = jax.jit(lambda x: op(x, shift=1)).trace(x)
    text = traced.lower().as_text()
    assert "i64" in text and "i32" not in text.split("func")[1]


def test_several_results_come_as_a_tuple():
    op = make_op("toy_pair", lambda x, *, by: (x * by, x + by), single=False)
    out = jax.vmap(lambda x: op(x, by=2))(X)
    assert isinstance(out, tuple)
    np.testing.assert_array_equal(out[0], X * 2)
    np.testing.assert_array_equal(jax.jit(lambda x: op(x, by=2))(X)[1], X + 2)


# -- bodies that are compiled apart ------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_body_apart_is_a_call_in_the_program_of_one_cpu():
    op = make_op("toy_apart", body, no_inline=True)
    for program, _ in PROGRAMS.values():
        np.testing.assert_array_equal(jax.jit(program(op))(X), X * 3 + 1)
    run = jax.jit(lambda x: times(op)(x * 2).T)
    assert 'inlineable="false"' in str(run.lower(X).compile().as_text())
    np.testing.assert_array_equal(run(X), (X * 6 + 1).T)
    assert "inlineable" not in lowered_for("cuda", times(op), X)
    with pytest.raises(NotImplementedError, match="it has no kernel"):
        jax.jit(times(op, impl="pallas"))(X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_partitioned_body_is_not_apart(kind):
    op = make_op("toy_apart", body, no_inline=True)
    sharding = NamedSharding(mesh(kind), P("a"))
    x = jax.device_put(X, sharding)
    with jax.set_mesh(mesh(kind)):
        run = jax.jit(times(op))
        assert run(x).sharding.is_equivalent_to(sharding, 2)
        assert "inlineable" not in run.lower(x).as_text()


def test_a_body_that_branches_runs_in_the_program_of_one_cpu_alone():
    def branches(x: jax.Array, scale: jax.Array, *, shift: int, backend: Backend = PORTABLE) -> jax.Array:
        if backend.branch is None:
            return body(x, scale, shift=shift)
        return backend.branch(scale > 0, lambda: body(x, scale, shift=shift), lambda: jnp.zeros_like(x))

    op = make_op("toy_branches", branches, by_backend=True)
    run, x = times(op), jax.device_put(X, NamedSharding(mesh(), P("a")))
    np.testing.assert_array_equal(run(X), X * 3 + 1)
    assert "stablehlo.case" in lowered_for("cpu", run, X)
    assert "stablehlo.case" not in lowered_for("cpu", jax.vmap(run), X)
    assert "stablehlo.case" not in lowered_for("cuda", run, X)
    assert "stablehlo.case" not in jax.jit(run).lower(x).as_text()


def test_a_64_bit_body_apart_stays_so_when_lowered_without_x64():

    def wide(x: jax.Array, *, by: int) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int64) + by

    op = make_op("toy_wide_apart", wide, no_inline=True)
    with jax.enable_x64(True):
        traced = jax.jit(lambda x: op(x, by=2)).trace(jnp.ones(3, jnp.float64))
    text = traced.lower().as_text()
    assert "i64" in text and "i32" not in text.split("func")[1]


# -- the public door ---------------------------------------------------------------------------------------------------


def test_round_to_format_passes_impl_on():
    x = jnp.asarray(X)
    np.testing.assert_array_equal(jc.round_to_format(x, "e4m3", impl="xla"), jc.round_to_format(x, "e4m3"))
    with pytest.raises(NotImplementedError, match=r"impl='pallas' cannot be had for jchop_round: it has no kernel"):
        jc.round_to_format(x, "e4m3", impl="pallas")
    with pytest.raises(NotImplementedError, match="impl='pallas' cannot be had for jchop_round"):
        spec = jc.Spec("e4m3", gradient="e5m2")
        jax.grad(lambda x: jc.round_to_format(x, spec, impl="pallas").sum())(x)
    with pytest.raises(ValueError, match="impl='cuda' must be one of"):
        jc.round_to_format(x, "e4m3", impl="cuda")  # type: ignore[arg-type]


#: Arguments beside generator="hardware" that it cannot have, and what the error says.
NOT_HARDWARE: dict[str, tuple[dict[str, Any], str]] = {
    "deterministic": ({"spec": "e4m3"}, "has no effect under rounding='nearest_even'"),
    "clipped": ({"spec": "e4m3:stochastic:gradient=clipped"}, "gradient='clipped'"),
    "xla": ({"impl": "xla"}, "impl='xla'"),
    "offset": ({"offset": 8}, "offset=8"),
}


def test_hardware_bits_are_refused_where_they_say_nothing():
    for arguments, words in NOT_HARDWARE.values():
        with pytest.raises(ValueError, match=f"generator='hardware' .*{words}"):
            jc.round_to_format(
                X, **{"spec": "e4m3:stochastic", "key": jax.random.key(0), **arguments}, generator="hardware"
            )


def test_hardware_bits_are_the_tpus():
    with pytest.raises(NotImplementedError, match="has a kernel for TPU, and this is lowered for cpu"):
        jc.round_to_format(X, "e4m3:stochastic", jax.random.key(0), generator="hardware")
    with pytest.raises(ValueError, match="generator='threefry' must be one of 'counter', 'hardware'"):
        jc.round_to_format(X, "e4m3:stochastic", jax.random.key(0), generator="threefry")  # type: ignore[arg-type]


# -- one function for each shape ---------------------------------------------------------------------------------------


def counting_body() -> tuple[Callable[..., jax.Array], list[Any]]:
    """A body, and the shapes that it was traced for."""
    traced: list[Any] = []

    def run(x: jax.Array, scale: jax.Array, *, shift: int) -> jax.Array:
        traced.append(x.shape)
        return body(x, scale, shift=shift)

    return run, traced


@pytest.mark.parametrize(
    ("platform", "more"), [("cpu", {}), ("cpu", {"no_inline": True}), ("tpu", {"no_inline": True})]
)
def test_a_program_has_a_body_once_for_each_shape(platform, more):
    op = make_op("toy_often", lambda x, scale, *, shift: jnp.sin(x) * scale + shift, **more)

    def often(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = times(op)(x)
        return x + times(op)(x[:4]).sum()

    text = lowered_for(platform, often, X)
    assert text.count("stablehlo.sine") == 2
    assert len(re.findall(r"func\.func private @toy_often", text)) == 2
    assert len(re.findall(r"call @toy_often", text)) == 6


def flattened(*shapes: tuple[int, ...], shift: int) -> Any:
    x, *others = shapes
    return ((math.prod(x),), *others), {"shift": shift}


def test_shapes_with_one_plain_shape_share_a_body_in_the_program_of_one_cpu():
    op = make_op("toy_plain", lambda x, scale, *, shift: jnp.sin(x) * scale + shift, canonical=flattened)

    def often(x: jax.Array) -> jax.Array:
        return times(op)(x) + times(op)(x.reshape(2, 8)).reshape(8, 2) + times(op)(x.reshape(16)).reshape(8, 2)

    text = lowered_for("cpu", often, X)
    assert len(re.findall(r"func\.func private @toy_plain", text)) == 1
    np.testing.assert_array_equal(jax.jit(often)(X), 3 * times(op)(X))
    assert len(re.findall(r"func\.func private @toy_plain", lowered_for("cuda", often, X))) == 3
    twice = jax.jit(jax.vmap(times(op)))(jnp.stack([X, 2 * X]))
    np.testing.assert_array_equal(twice[1], jax.jit(times(op))(2 * X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_partitioned_body_keeps_its_shape(kind):
    op = make_op("toy_plain", body, canonical=flattened)
    sharding = NamedSharding(mesh(kind), P("a"))
    x = jax.device_put(X, sharding)
    with jax.set_mesh(mesh(kind)):
        run = jax.jit(times(op))
        assert run(x).sharding.is_equivalent_to(sharding, 2)
        assert "reshape" not in run.lower(x).as_text()


def test_a_body_is_lowered_with_each_constant_once():
    op = make_op("toy_constants", lambda x: (x * 3.5 + 1) * 3.5 - x * 3.5)
    text = lowered_for("cpu", lambda x: op(x), X)
    assert text.count("3.5") == 1 and "broadcast" not in text


def test_the_type_of_a_result_like_the_first_array_needs_no_trace():
    run, traced = counting_body()
    op = make_op("toy_like", run, like_first=True)
    assert jax.eval_shape(times(op), X).shape == (8, 2)
    assert jax.eval_shape(jax.vmap(times(op), in_axes=(0, None)), X, SCALE).shape == (8, 2)
    assert traced == []
    assert jax.eval_shape(jax.vmap(times(op), in_axes=(None, 0)), X, np.ones(3, np.float32)).shape == (3, 8, 2)
    assert traced
    np.testing.assert_array_equal(jax.jit(times(op))(X), X * 3 + 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_result_like_the_first_array_keeps_its_sharding(kind):
    op = make_op("toy_like", body, like_first=True)
    sharding = NamedSharding(mesh(kind), P("a"))
    with jax.set_mesh(mesh(kind)):
        run = jax.jit(times(op))
        assert run(jax.device_put(X, sharding)).sharding.is_equivalent_to(sharding, 2)
    varying = jax.jit(mapped(lambda x: times(op)(x, x[0, 0])))(X)
    np.testing.assert_array_equal(varying, X * X[:, :1] + 1)


@pytest.mark.parametrize(
    ("name", "function"),
    [("mxfp8_e4m3", jc.quantize), ("int8(channel=0)", jc.round_to_format),
     ("int8(channel=0,zero_point=integer)", jc.quantize), ("mxfp8_e4m3", jc.round_to_format)],
)  # fmt: skip
@pytest.mark.in_turn(6)
def test_a_branch_is_given_the_numbers_and_nothing_as_large(function, name):
    """XLA writes the operands of a branch to memory: each side computes the bits of the numbers itself."""
    x = jnp.ones((2048, 512))
    text = str(jax.jit(lambda x: function(x, name)).lower(x).compile().as_text())
    branches = re.findall(r"conditional\(%[\w.-]+, ([^)]*)\)", text)
    assert branches
    for operand in {name for names in branches for name in names.split(", ")}:
        given = re.search(rf"^\s*{re.escape(operand)} = \((.*?)\) tuple\(", text, re.MULTILINE)
        assert given is not None, operand
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", given[1])]
        assert sizes.count(x.size) <= 1 and max(sizes) == x.size, given[1]
