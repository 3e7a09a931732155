"""Dispatch: the choice of an operation's implementation for a device. No other file queries the device.

Each operation is one JAX primitive. Its default lowering is the portable body, which XLA compiles for any device and
partitions over any mesh. If a program is lowered for TPU or CUDA, a Pallas kernel replaces it under three conditions.
There is one device, or every mesh axis is manual (inside `shard_map`), because the compiler cannot partition a kernel.
The device supports kernels. The kernel supports these shapes, dtypes and static arguments. Only the lowering decides
this, so an exported program has a choice for each platform. A trace only asks whether there are several devices.

In a program for one CPU a body may be compiled apart. Otherwise XLA fuses it with the operations around it. If these
move axes, the whole body becomes scalar code, which runs again for each use of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.core
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.extend.mlir import ir, passmanager
from jax.interpreters import batching, mlir

from jchop._common.bit_ops import reshard_like
from jchop._common.checks import check_choice
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit, jax_default_settings
from jchop._core.xla.backend import ONE_CPU, PORTABLE
from jchop._core.xla.sizes import are_static
from jchop._kernels.remat import Coder, save_codes_of

Impl = Literal["auto", "xla", "pallas"]
#: The values of `impl=`: the choice of this file, the portable body, or the kernel, with an error if it cannot run.
IMPLEMENTATIONS = ("auto", "xla", "pallas")

_StaticItems = tuple[tuple[str, Hashable], ...]
_VmapAxes = tuple[tuple[int | None, ...], ...]
_OpShapes = tuple[tuple[int, ...], ...]
_OpReshapes = tuple[_OpShapes, _OpShapes]
#: The shapes of arrays, and static keywords.
CanonicalForm = tuple[_OpShapes, dict[str, Hashable]]

#: The least compute capability: older GPUs fail too late for another choice.
_MIN_KERNEL_CAPABILITY = 8.0


@dataclass(frozen=True)
class Kernel:
    """A Pallas implementation of an operation for one platform.

    Args:
        run: a function of the operation's arrays and static keywords, with the results of the body, also under vmap.
        refuse: returns the reason against given shapes and dtypes (`jax.ShapeDtypeStruct`, without the axes of
            enclosing vmaps) and static keywords, or None.
        profitable: whether ``impl="auto"`` should prefer it to the body, from the same arguments.
        capability: the least compute capability of a GPU for it, from the same arguments.
        below: all GPUs that run it have a smaller compute capability.
    """

    run: Callable[..., Any]
    refuse: Callable[..., str | None] = lambda *_, **__: None
    profitable: Callable[..., bool] = lambda *_, **__: True
    capability: Callable[..., float] = lambda *_, **__: _MIN_KERNEL_CAPABILITY
    below: float = math.inf


@dataclass(frozen=True)
class _OpDefinition:
    """The arguments of `make_op`; `kernels` by the platform of a lowering."""

    name: str
    body: Callable[..., Any]
    kernels: tuple[tuple[str, tuple[Kernel, ...]], ...]
    single: bool
    like_first: bool
    results: Callable[..., Sequence[Any]] | None
    by_backend: bool
    no_inline: bool
    canonical: Callable[..., CanonicalForm | None] | None


class OpPrimitive(Primitive):
    """The primitive of an operation of jchop. All primitives from `make_op`, and no others, have this class.

    Args:
        name: the name of the primitive.
        stores: whether its results are codes and scales, which no other arithmetic rounds.
    """

    multiple_results = True

    def __init__(self, name: str, stores: bool) -> None:
        super().__init__(name)
        self.stores = stores


def make_op(
    name: str,
    body: Callable[..., Any],
    *,
    tpu: Kernel | None = None,
    gpu: Kernel | Sequence[Kernel] | None = None,
    single: bool = True,
    like_first: bool = False,
    results: Callable[..., Sequence[Any]] | None = None,
    by_backend: bool = False,
    no_inline: bool = False,
    canonical: Callable[..., CanonicalForm | None] | None = None,
    stores: bool = False,
    coder_of: Callable[..., Coder | None] | None = None,
) -> Callable[..., Any]:
    """An operation with several implementations, as one JAX primitive.

    It traces, lowers, batches (as the vmap of the implementation that runs) and shards like the body. It has no
    derivative.

    Args:
        name: the name of the primitive.
        body: pure jnp; takes the arrays, then static keywords; defines the operation.
        tpu: a kernel for TPUs.
        gpu: a kernel for NVIDIA GPUs of compute capability 8.0 and more; or several, the preferred one first.
        single: the result is one array; else a tuple of arrays.
        like_first: the result has the shape and the dtype of the first array, so its type needs no trace of the body.
        results: gives the types of the results from the types of the arrays and the static keywords, without a trace.
        by_backend: the body has a keyword `backend`. It is `ONE_CPU` in programs for one CPU, except under vmap, and
            absent in others.
        no_inline: in programs for one CPU, the body is not fused with the operations around it. This is for bodies that
            read an array more than once, or whose results are read more than once.
        canonical: from the shapes of the arrays and the static keywords, other shapes and keywords for the same
            numbers in the same order, or None. A program for one CPU then has one body for all that share them.
        stores: the results are codes and scales, which `emulate` does not round.
        coder_of: gives the two halves of a rounding, for `save_codes`.

    Returns:
        ``op(*arrays, impl="auto", **static)``, the static arguments hashable.

    Raises:
        ValueError: by the op, for an `impl` that is not one of `IMPLEMENTATIONS`.
        NotImplementedError: by the op, while it is lowered, if ``impl="pallas"`` and no kernel can run.

    Example:
        >>> import jax.numpy as jnp
        >>> double = make_op("double", lambda x, *, times: x * times)
        >>> int(double(jnp.int32(4), times=2))
        8
    """
    kernels = tuple(
        (platform, (kernel,) if isinstance(kernel, Kernel) else tuple(kernel))
        for platform, kernel in (("tpu", tpu), ("cuda", gpu))
        if kernel is not None
    )
    op = _OpDefinition(name, body, kernels, single, like_first, results, by_backend, no_inline, canonical)
    primitive = OpPrimitive(name, stores)
    primitive.def_impl(partial(_evaluate_op, op, primitive))
    primitive.def_abstract_eval(partial(_result_avals, op))
    mlir.register_lowering(primitive, partial(_lower_portable, op))
    if no_inline or by_backend or canonical is not None:
        mlir.register_lowering(primitive, partial(_lower_single_cpu, op), platform="cpu")
    for platform, several in kernels:
        mlir.register_lowering(primitive, partial(_lower_kernel, op, platform, several), platform=platform)
    batching.primitive_batchers[primitive] = partial(_batch_op, primitive)
    if stores or coder_of is not None:
        save_codes_of(primitive, partial(_make_coder, coder_of))

    def run(*args: Any, impl: str = "auto", **static: Hashable) -> Any:
        check_choice("impl", impl, IMPLEMENTATIONS)
        wide = any(np.dtype(arg.dtype).itemsize == 8 for arg in args)
        out = primitive.bind(*args, impl=impl, wide=wide, vmaps=(), static=tuple(sorted(static.items())))
        return out[0] if single else tuple(out)

    run.__name__ = run.__qualname__ = name
    return run


# -- the rules of the primitive ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _results_under_vmaps(
    op: _OpDefinition, fun: Callable[..., Any], wide: bool, vmaps: _VmapAxes, static: _StaticItems
) -> Callable[..., list]:
    """`fun` under the vmaps, its results as a list. One object for equal arguments, so that JAX's caches find it."""
    function = partial(fun, **dict(static))
    for axes in vmaps:
        function = jax.vmap(function, in_axes=axes)

    def flat(*args: Any) -> list:
        # A lowering may come after the context in which 64-bit data was traced.
        with jax_default_settings(), jax.enable_x64(wide or jax.config.jax_enable_x64):  # type: ignore[attr-defined]
            out = function(*args)
        if op.like_first and out.shape == args[0].shape:
            out = reshard_like(out, args[0])
        return [out] if op.single else list(out)

    flat.__name__ = flat.__qualname__ = op.name
    return flat


@partial(always_jit, static_argnums=(0, 1), static_argnames=("impl", "wide", "vmaps", "static"))
def _evaluate_op(op: _OpDefinition, primitive: Primitive, *args: Any, impl: str, **params: Any) -> list:
    if any(isinstance(arg, jax.core.Tracer) for arg in args):
        return primitive.bind(*args, impl=impl, **params)
    # Under jax_debug_nans JAX calls this function again, to find the origin of a NaN; the primitive would come back
    # here.
    return _results_under_vmaps(op, op.body, **params)(*args)


def _result_avals(op: _OpDefinition, *avals: Any, impl: str, wide: bool, vmaps: _VmapAxes, static: _StaticItems) -> Any:
    """The shapes and dtypes of an operation's results, from its declaration if it has one, else by tracing the body."""
    x, shaped = avals[0], jax.core.ShapedArray
    # Only shapes and dtypes, without shardings or varying axes.
    plain = all(aval == shaped(aval.shape, aval.dtype, aval.weak_type) for aval in avals)
    if plain and all(axes[0] is not None for axes in vmaps):
        if op.like_first:
            return [shaped(x.shape, x.dtype)]
        if op.results is not None:
            own = op.results(*_innermost_avals(avals, vmaps), **dict(static))
            return [shaped((*x.shape[: len(vmaps)], *result.shape), result.dtype) for result in own]
    # From a trace of the body, so that the results have its shardings and varying axes.
    return jax.make_jaxpr(_results_under_vmaps(op, op.body, wide, vmaps, static))(*avals).out_avals


def _lower_portable(op: _OpDefinition, ctx: Any, *args: Any, impl: str, **params: Any) -> Any:
    if impl == "pallas":
        able = " and ".join(_PLATFORM_NAMES[platform] for platform, _ in op.kernels)
        target = ", ".join(ctx.platforms or ctx.module_context.platforms)
        why = f"it has a kernel for {able}, and this is lowered for {target}" if able else "it has no kernel"
        raise NotImplementedError(_no_kernel_message(op, why))
    return _lower_call(ctx, op, op.body, args, **params)


def _lower_single_cpu(op: _OpDefinition, ctx: Any, *args: Any, impl: str, **params: Any) -> Any:
    """The lowering for one CPU: the body with the backend of one CPU, in the operation's canonical shapes."""
    if impl == "pallas" or not _is_for_one_device(ctx.module_context.axis_context):
        return _lower_portable(op, ctx, *args, impl=impl, **params)
    if params["vmaps"]:  # both sides of a branch would be computed
        return _lower_call(ctx, op, op.body, args, op.no_inline, **params)
    shapes, static, reshapes = tuple(aval.shape for aval in ctx.avals_in), dict(params["static"]), None
    if form := op.canonical and op.canonical(*shapes, **static):
        shapes, static = form
        reshapes = shapes, tuple(aval.shape for aval in ctx.avals_out)
    if op.by_backend:
        static["backend"] = ONE_CPU
    params["static"] = tuple(sorted(static.items()))
    return _lower_call(ctx, op, op.body, args, op.no_inline, reshapes, **params)


def _lower_kernel(
    op: _OpDefinition, platform: str, kernels: Sequence[Kernel], ctx: Any, *args: Any, impl: str, **params: Any
) -> Any:
    """The lowering for an accelerator: the first kernel that takes the arguments and pays, else the body."""
    avals, static = _innermost_avals(ctx.avals_in, params["vmaps"]), dict(params["static"])
    fun, why = op.body, ""
    for kernel in () if impl == "xla" else kernels:
        min_capability = kernel.capability(*avals, **static)
        reason = _kernel_obstacle(ctx, platform, min_capability, kernel.below) or kernel.refuse(*avals, **static)
        if reason is None and (impl == "pallas" or kernel.profitable(*avals, **static)):
            fun = kernel.run
            break
        why = reason or why
    if impl == "pallas" and fun is op.body:
        raise NotImplementedError(_no_kernel_message(op, why))
    return _lower_call(ctx, op, fun, args, **params)


def _lower_call(
    ctx: Any,
    op: _OpDefinition,
    fun: Callable[..., Any],
    args: tuple,
    no_inline: bool = False,
    reshapes: _OpReshapes | None = None,
    **params: Any,
) -> Any:
    """The call of a function in the program that is lowered; a new callee is simplified."""
    module = ctx.module_context
    cache_size = len(module.cached_primitive_lowerings)
    out = mlir.lower_fun(_op_call(op, fun, no_inline, reshapes, **params), multiple_results=True)(ctx, *args)
    is_new_lowering = len(module.cached_primitive_lowerings) > cache_size
    call = out[0].owner
    if call.name == "stablehlo.reshape":
        call = call.operands[0].owner
    if is_new_lowering:
        simplify_callees(call, module)
    return out


@lru_cache(maxsize=4096)
def _compile_op(
    op: _OpDefinition, fun: Callable[..., Any], wide: bool, vmaps: _VmapAxes, static: _StaticItems
) -> Callable[..., Any]:
    """`_results_under_vmaps`, compiled. One object for equal arguments: JAX lowers it once for each shape."""
    return always_jit(_results_under_vmaps(op, fun, wide, vmaps, static))


@lru_cache(maxsize=4096)
def _op_call(
    op: _OpDefinition,
    fun: Callable[..., Any],
    no_inline: bool,
    reshapes: _OpReshapes | None,
    wide: bool,
    vmaps: _VmapAxes,
    static: _StaticItems,
) -> Any:
    """`fun` as a call of a function that a program has once for each shape; with `no_inline`, XLA does not inline it.

    If there is `reshapes`, the arrays have these shapes in the function, and the results these shapes after it.
    """
    function = _compile_op(op, fun, wide, vmaps, static)

    def call(*args: Any) -> Any:
        # A lowering may come after the context in which 64-bit data was traced.
        with jax.enable_x64(wide or jax.config.jax_enable_x64):  # type: ignore[attr-defined]
            out: Any = function(*(args if reshapes is None else _reshape_to(args, reshapes[0])))
            out = set_xla_metadata(out, inlineable="false") if no_inline else out
            return out if reshapes is None else _reshape_to(out, reshapes[1])

    return call


def _reshape_to(arrays: Iterable[Any], shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    return [jax.lax.reshape(x, shape) if x.shape != shape else x for x, shape in zip(arrays, shapes, strict=True)]


def _batch_op(primitive: Primitive, args: Any, dims: Any, *, vmaps: _VmapAxes, **params: Any) -> tuple:
    args = [arg if dim is None else jax.numpy.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True)]
    axes = tuple(None if dim is None else 0 for dim in dims)
    out = primitive.bind(*args, vmaps=(*vmaps, axes), **params)
    return out, [0] * len(out)


def _innermost_avals(avals: Any, vmaps: _VmapAxes) -> list[jax.ShapeDtypeStruct]:
    """The arguments of the innermost function, without the axes of vmaps."""
    vmap_counts = [sum(axes[i] is not None for axes in vmaps) for i in range(len(avals))]
    return [jax.ShapeDtypeStruct(aval.shape[n:], aval.dtype) for aval, n in zip(avals, vmap_counts, strict=True)]


def _make_coder(coder_of: Any, avals: Any, *, impl: str, vmaps: _VmapAxes, static: _StaticItems, wide: bool) -> Any:
    """The two halves of an operation under vmaps; None if it has none."""
    coder = coder_of and coder_of(*_innermost_avals(avals, vmaps), impl=impl, **dict(static))
    for axes in vmaps if coder else ():
        coder = jax.vmap(coder[0], in_axes=axes), jax.vmap(coder[1]), coder[2]
    return coder


# -- obstacles to a kernel ---------------------------------------------------------------------------------------------

_PLATFORM_NAMES = {"tpu": "TPU", "cuda": "NVIDIA GPU"}


def _no_kernel_message(op: _OpDefinition, why: str) -> str:
    return f"impl='pallas' cannot be had for {op.name}: {why}. Use impl='auto' or impl='xla'"


def _kernel_obstacle(ctx: Any, platform: str, min_capability: float, capability_limit: float) -> str | None:
    """The reason why no kernel can be lowered in this context, or None.

    A GPU has a compute capability of at least `min_capability`, and below `capability_limit`.
    """
    if not all(are_static(aval.shape) for aval in ctx.avals_in):
        return "its shapes are symbolic, and a kernel is compiled for known ones"
    if not _is_for_one_device(ctx.module_context.axis_context):
        return (
            "the program is partitioned over several devices, and a kernel cannot be; call it inside jax.shard_map "
            "with every mesh axis manual"
        )
    if platform == "cuda":
        capability = compute_capability()
        if capability is None:
            return "the GPU that it is lowered for is not known; name it with jax.default_device"
        if capability < min_capability:
            return f"the GPU has compute capability {capability}, less than {min_capability}"
        if capability >= capability_limit:
            return f"the GPU has compute capability {capability}, not below {capability_limit}"
    return None


def _is_for_one_device(axis_context: Any) -> bool:
    """Whether the program is for one device, or every axis of its mesh is manual.

    JAX has no public names for the three kinds of context; their attributes tell them apart.
    """
    if hasattr(axis_context, "num_devices"):
        return axis_context.num_devices == 1
    if hasattr(axis_context, "manual_axes"):
        mesh = axis_context.mesh
        return set(axis_context.manual_axes) | set(getattr(mesh, "manual_axes", ())) >= set(mesh.axis_names)
    return False


def one_device_at_hand(platform: str | None = None) -> bool:
    """Whether JAX has one device, of `platform` if given, so that a traced program will hardly be partitioned.

    For choices that would slow a partitioned program down, and change only the order of sums.
    """
    return jax.device_count() == 1 and platform in (None, jax.default_backend())


def devices_at_hand() -> dict[tuple[str, str, bool], int]:
    """The number of devices by kind, platform, and whether a kernel may run there.

    Raises:
        RuntimeError: if a backend does not start.
    """
    counts: dict[tuple[str, str, bool], int] = {}
    for device in jax.devices():
        capable = device.platform == "gpu" and (_capability_of(device) or 0) >= _MIN_KERNEL_CAPABILITY
        key = device.device_kind, device.platform, device.platform == "tpu" or capable
        counts[key] = counts.get(key, 0) + 1
    return counts


def host_device() -> Any:
    """The CPU of JAX, for arrays that no other device need hold whole; None if JAX was told to have none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def by_platform(otherwise: Callable[..., Any], *arrays: Any, **on: Callable[..., Any]) -> Any:
    """One function in programs for a platform (``cpu=``, ``tpu=``), another for other platforms; the lowering chooses.

    For two ways to the same result, of which each is cheap on its devices.
    """
    return jax.lax.platform_dependent(*arrays, default=otherwise, **on)


def compute_capability() -> float | None:
    """The compute capability of the default device, or None if it is not a GPU."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return _capability_of(device)


def _capability_of(device: Any) -> float | None:
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else None


# == passes over MLIR ==================================================================================================


def simplify_callees(call: Any, module: Any) -> None:
    """Writes each constant once in the function of a call, and in the functions that it calls.

    Args:
        call: an operation ``func.call``; others, such as the sharding constraint after a call, are left unchanged.
        module: JAX's context of the module.
    """
    remove = passmanager.PassManager.parse("func.func(cse)", module.context)
    names = [ir.FlatSymbolRefAttr(call.attributes["callee"]).value] if "callee" in call.attributes else []
    for name in names:  # which grow
        function = module.symbol_table[name].operation
        callees, broadcasts = _calls_and_broadcasts(function)
        for broadcast in broadcasts:
            _write_as_constant(broadcast)
        remove.run(function)
        names += [callee for callee in dict.fromkeys(callees) if callee not in names]


def _calls_and_broadcasts(function: Any) -> tuple[list[str], list[Any]]:
    """The names of the functions that a function calls, and its broadcasts of constants."""
    callees: list[str] = []
    broadcasts: list[Any] = []

    def look(operation: Any) -> Any:
        if operation.name == "func.call":
            callees.append(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)
        elif operation.name == "stablehlo.broadcast_in_dim":
            maker = operation.operands[0].owner
            if getattr(maker, "name", None) == "stablehlo.constant":  # and no argument of a block
                broadcasts.append(operation)
        return ir.WalkResult.ADVANCE

    function.walk(look)
    return callees, broadcasts


def _write_as_constant(broadcast: Any) -> None:
    """Replaces a broadcast constant by a constant array, which is one operation and not two."""
    value, (kind,) = ir.DenseElementsAttr(broadcast.operands[0].owner.attributes["value"]), broadcast.results.types
    if value.is_splat:
        constant = ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.DenseElementsAttr.get_splat(kind, value.get_splat_value())},
            loc=broadcast.location,
            ip=ir.InsertionPoint(broadcast),
        )
        broadcast.results[0].replace_all_uses_with(constant.results[0])
        broadcast.erase()


# == an array as an operation of its own ===============================================================================


_materialize_op = make_op("jchop_settled", jax.lax.optimization_barrier, like_first=True, no_inline=True)
_materialize_on_cpu_op = make_op(
    "jchop_settled_on_cpu",
    lambda x, backend=PORTABLE: x if backend is PORTABLE else jax.lax.optimization_barrier(x),
    like_first=True,
    by_backend=True,
    no_inline=True,
)


@CustomJvp
def materialize(x: Array) -> Array:
    """`x`, which XLA's CPU backend writes to memory and does not fuse with the operations that read it.

    Quirk `sums_ordered_by_fusion` of `_core/xla/cpu.py`. On other platforms, and in programs for several CPUs, a
    barrier alone is there. The derivative is the identity.
    """
    return _materialize_op(x)


materialize.defjvp(lambda primals, tangents: (materialize(*primals), tangents[0]))


@CustomJvp
def materialize_on_cpu(x: Array) -> Array:
    """`materialize` in programs for one CPU, `x` in others: a GPU may decode a matrix in the loop of its product."""
    return _materialize_on_cpu_op(x)


materialize_on_cpu.defjvp(lambda primals, tangents: (materialize_on_cpu(*primals), tangents[0]))
