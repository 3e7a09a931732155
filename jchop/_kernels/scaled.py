"""Rounding as operations: of elements; to scaled formats, with kernels for blocks along one axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.errors import InconclusiveDimensionOperation

from jchop._common.bit_ops import CARRIERS, axes_cut_by_sharding, fit_sharding, gather_axes, has_sharding, reshard_like
from jchop._common.checks import check
from jchop._core.rounding.codebooks import refuse_table
from jchop._core.rounding.codes import decode_elements, encode_elements, packed_size
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import STREAM_START, StreamOffset, words_like
from jchop._core.scaled import tiles
from jchop._core.scaled.elements import ScaledPlan, make_scaled_plan, scale_dtype, tensor_scale, widen_16_bit
from jchop._core.scaled.groups import drop_outside_mask, sparse_mask
from jchop._core.scaled_bodies import (
    ScaleArrays,
    dequantize_body,
    flatten_scales,
    nan_of,
    overflow_body,
    quantize_body,
    round_body,
    unflatten_scales,
)
from jchop._core.xla.backend import DECODE_ON_GPU
from jchop._core.xla.sizes import are_static
from jchop._kernels.primitive import Kernel, make_op
from jchop._kernels.remat import Coder
from jchop._kernels.scaled_tile import CODE_SUBLANES, ScaledBlocksProblem, ScaledGpuTiling, kernel_words
from jchop._kernels.tiles import (
    kernel_function,
    mosaic_gpu_capability,
    refuse_large,
    refuse_mosaic_gpu,
    refuse_tpu_dtype,
)
from jchop._spec.spec import Spec
from jchop.formats import ScaledFormat

# == elements: XLA's code moves no more bytes than a kernel would, and fuses with others ===============================


def _round_elements(x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START) -> Array:
    """`x` rounded under `spec`.

    Args:
        x: values of a carrier, any shape.
        seeds_and_starts: for the stochastic modes, the words of `seed_words`, then the traced starts of `place`.
        spec: a specification that the carrier holds.
        place: the position of `x` in the random stream.
    """
    return round_to_spec(
        x, spec, CARRIERS[x.dtype.name], words_like(x, seeds_and_starts, place) if seeds_and_starts else None
    )


def _refuse_hardware_bits(x: Any, *seeds_and_starts: Any, spec: Spec, place: StreamOffset = STREAM_START) -> str | None:
    if place.whole is not None:
        return "complex x has two random words for each element"
    return refuse_tpu_dtype("x", x.dtype) or refuse_table(spec.format)


def _element_coder(x: Any, *_: Any, impl: str, spec: Spec, **static: Any) -> Coder | None:
    fmt, carrier = spec.element, CARRIERS[x.dtype.name]
    if not fmt.has_nan or fmt.bits > 16 or fmt.bits >= carrier.width:
        return None

    def encode(x: Array, *seeds_and_starts: Array) -> tuple[Array]:
        return (encode_elements(_round_elements(x, *seeds_and_starts, spec=spec, **static), fmt, carrier),)

    return encode, partial(decode_elements, fmt=fmt, carrier=carrier), 0


round_op = make_op("jchop_round", _round_elements, like_first=True, coder_of=_element_coder)
#: Rounding with bits of the TPU's own generator; the body only defines the type of the result.
round_with_hardware_bits_op = make_op(
    "jchop_round_with_hardware_bits",
    _round_elements,
    tpu=Kernel(kernel_function("round_tpu", "tpu_round_with_hardware_bits"), _refuse_hardware_bits),
)


# -- kernels -----------------------------------------------------------------------------------------------------------


#: The longest blocks: a tile of the TPU holds at least eight.
_LONGEST_TPU_BLOCK = 1024


def _kernel_on(platform: str, *, quantizes: bool, profitable: Callable[..., bool] = lambda *_, **__: True) -> Kernel:
    """The kernel for blocks within one axis whose ends decide the scales; on GPUs also for whole rows."""
    run = kernel_function(f"scaled_{platform}", f"{platform}_{'quantize' if quantizes else 'round'}_blocks")

    def run_on_blocks(
        x: Array,
        *seeds_and_starts: Array,
        plan: ScaledPlan,
        given: int = 0,
        place: StreamOffset = STREAM_START,
        as_dtype: Any = "uint8",
        keep_nan: bool = False,
    ) -> Any:
        """The results of `round_body` or `quantize_body`; the kernel fits the scales."""
        tensor = tensor_scale(widen_16_bit(x, plan.carrier), plan) if plan.rule.tensor_scale else None
        out = run(x, kernel_words(tensor, seeds_and_starts, place), plan=plan)
        if not quantizes:
            return nan_of(x, out) if keep_nan else out
        codes, scales = out
        return lax.bitcast_convert_type(codes, as_dtype), scales, *(() if tensor is None else (tensor,))

    def refuse(x: Any, *arrays: Any, plan: ScaledPlan, **static: Any) -> str | None:
        reason = refuse_grouping(x, plan, rows=platform == "gpu")
        return reason or refuse_blocks(x, plan, platform, quantizes=quantizes, **static)

    return Kernel(run_on_blocks, refuse, profitable, mosaic_gpu_capability)


def refuse_grouping(x: Any, plan: ScaledPlan, rows: bool) -> str | None:
    """The reason why no kernel takes the groups of a format, or None; `rows` are groups of whole rows."""
    group, axis, shape = plan.fmt.group, plan.fmt.axis, tuple(x.shape)
    blocks = isinstance(group, int) and isinstance(axis, int) and 1 < group < shape[axis]
    whole = rows and len(shape) > 0 and plan.fmt.group_shape(shape) == (*(1,) * (len(shape) - 1), shape[-1])
    if not (blocks or whole):
        return f"{plan.fmt} has no blocks within one axis of shape {shape}"
    if plan.of_scales is not None or not plan.rule.by_ends:
        return f"{plan.fmt} has scales that are quantized again, or depend on more than the ends of a block"
    return None


def refuse_blocks(
    x: Any,
    plan: ScaledPlan,
    platform: str,
    *,
    quantizes: bool,
    given: int = 0,
    place: StreamOffset = STREAM_START,
    as_dtype: Any = "uint8",
    **_: Any,
) -> str | None:
    """The reason why the kernel of a platform, "tpu" or "gpu", does not take blocks of these arguments, or None."""
    problem = ScaledBlocksProblem.of(x, plan)
    block, bits = problem.block, problem.bits
    if place.whole is not None:
        return "the random words of a tile of a larger array (offset of starts and shape) have no kernel"
    if reason := refuse_table(plan.element.format) or refuse_large(x=math.prod(x.shape)):
        return reason
    if platform == "tpu":
        dtypes = {"x": x.dtype} | ({f"scale={plan.scale}": problem.scale_dtype} if quantizes else {})
        if reason := next(filter(None, starmap(refuse_tpu_dtype, dtypes.items())), None):
            return reason
        if block % 8 or (block % CODE_SUBLANES and CODE_SUBLANES % block) or block > _LONGEST_TPU_BLOCK:
            return f"group={block} is not 8, 16 or a multiple of 32 up to {_LONGEST_TPU_BLOCK}"
    elif reason := refuse_mosaic_gpu(x=x.dtype):
        return reason
    elif ScaledGpuTiling.for_shape(problem, quantizes) is None:
        return f"no tile of a warpgroup has whole groups of {min(block, problem.size)} numbers of shape {x.shape}"
    if not quantizes:  # of other tiles the exact quotients of GPUs take longer than XLA's
        short = platform == "tpu" or plan.is_power or tiles.supports_plain_tiles(plan)
        return None if short else f"{plan.fmt} has scales that are no powers of two, and is not rounded to nearest"
    if given or as_dtype is None:
        return "kernels fit scales and make codes, both"
    if bits > 8:
        return f"element={plan.element} has codes of {bits} bits, and they are stored in bytes"
    return problem.packs_in_view()


#: The most numbers whose rows become one row of blocks.
_MAX_ROW_OF_BLOCKS = 1 << 16


def _collapse_axes(plan: ScaledPlan, shape: Sequence[int]) -> tuple[tuple[int, ...], ScaledPlan] | None:
    """The shape and the plan with neighbouring axes joined that all lie within groups, or all between them.

    The numbers keep their places in C order, on which random words depend. None if nothing changes, or if a rule adds
    the numbers of a group, since sums depend on its shape. Rows of whole blocks of a given length become one row, if
    they have few numbers, for which a program compiles longer than it runs. Blocks of larger arrays stay parts of their
    axis: rows as short as a block take up to a quarter longer.
    """
    if plan.of_scales is not None or not plan.rule.by_ends or not are_static(shape):
        return None
    axes: list[tuple[int, int]] = []  # the length of each, and the length of a group along it
    for length, size in zip(shape, plan.fmt.group_shape(shape), strict=True):
        before, within = axes[-1] if axes else (0, 0)
        if axes and (size, within) in ((1, 1), (length, before)):
            axes[-1] = before * length, within * size
        elif length > 1:
            axes.append((length, size))
    rows = isinstance(plan.fmt.group, int) and len(axes) == 2 and axes[0][1] == 1
    if rows and axes[1][0] % axes[1][1] == 0 and math.prod(shape) <= _MAX_ROW_OF_BLOCKS:
        axes = [(axes[0][0] * axes[1][0], axes[1][1])]
    group_axes = tuple(axis for axis, (_, size) in enumerate(axes) if size > 1)
    if not group_axes:
        return None
    groups = tuple("all" if axes[axis][0] == axes[axis][1] else axes[axis][1] for axis in group_axes)
    fmt = replace(plan.fmt, group=groups, axis=group_axes, channel=None)
    return tuple(length for length, _ in axes), replace(plan, fmt=fmt)


def _fill_bytes(bits: int, *lengths: int) -> bool:
    """Whether rows of codes of these lengths fill whole bytes."""
    return all(length * bits % 8 == 0 for length in lengths)


def _collapse_numbers(shape: tuple[int, ...], *arrays: tuple[int, ...], plan: ScaledPlan, **static: Any) -> Any:
    """The arguments of `round_body`, or of `quantize_body` if it fits scales, with joined axes."""
    in_tile = static.get("place", STREAM_START).whole is not None
    form = None if in_tile or static.get("given") else _collapse_axes(plan, shape)
    if form is None or ("as_dtype" in static and not _fill_bytes(plan.fmt.bits, form[0][-1], shape[-1])):
        return None
    if len(arrays) == 1:  # words of the caller
        arrays = (form[0],)
    return (form[0], *arrays), {"plan": form[1], **static}


def _collapse_codes(
    codes: tuple[int, ...], *scale_shapes: tuple[int, ...], plan: ScaledPlan, shape: tuple[int, ...]
) -> Any:
    """The arguments of `dequantize_body` with joined axes."""
    form, bits = _collapse_axes(plan, shape), plan.fmt.bits
    if form is None or not _fill_bytes(bits, form[0][-1], shape[-1]):
        return None
    new_shape, new_plan = form
    counts = new_plan.fmt.scale_shape(new_shape)
    scales = tuple(counts if part == plan.fmt.scale_shape(shape) else part for part in scale_shapes)
    return ((*new_shape[:-1], new_shape[-1] * bits // 8), *scales), {"plan": new_plan, "shape": new_shape}


# -- operations --------------------------------------------------------------------------------------------------------


def _types_of_quantized(
    x: Any, *arrays: Any, plan: ScaledPlan, given: int = 0, as_dtype: Any = "uint8", **_: Any
) -> tuple[Any, ...]:
    """The types of the results of `quantize_body`."""
    codes, *scales = code_and_scale_shapes(Spec(plan.fmt), x.shape)
    own = arrays[:given] or flatten_scales(*scales)
    return (*(() if as_dtype is None else (jax.ShapeDtypeStruct(codes.shape, as_dtype),)), *own)


def _scaled_coder(x: Any, *_: Any, impl: str, plan: ScaledPlan, keep_nan: bool = False, **static: Any) -> Coder | None:
    if plan.fmt.bits > 8:
        return None
    encode = partial(quantize_scaled_op, impl="xla" if impl == "xla" else "auto", plan=plan, **static)
    decode = partial(dequantize_scaled_op, plan=plan, shape=x.shape)
    return (encode, lambda x, *codes: nan_of(x, decode(*codes)), 1) if keep_nan else (encode, decode, 0)


round_scaled_op = make_op(
    "jchop_round_scaled",
    round_body,
    tpu=_kernel_on("tpu", quantizes=False),
    gpu=_kernel_on("gpu", quantizes=False),
    like_first=True,
    by_backend=True,
    no_inline=True,
    canonical=_collapse_numbers,
    coder_of=_scaled_coder,
)
#: Codes, scales and zero points; without codes, only fits.
quantize_scaled_op = make_op(
    "jchop_quantize_scaled",
    quantize_body,
    tpu=_kernel_on("tpu", quantizes=True),
    gpu=_kernel_on(
        "gpu", quantizes=True, profitable=lambda *_, plan, **__: plan.is_power or tiles.supports_plain_tiles(plan)
    ),
    single=False,
    results=_types_of_quantized,
    by_backend=True,
    canonical=_collapse_numbers,
    stores=True,
)
#: No kernel of Pallas is needed: XLA fuses this with uses of the result.
dequantize_scaled_op = make_op(
    "jchop_dequantize_scaled",
    dequantize_body,
    gpu=Kernel(partial(dequantize_body, backend=DECODE_ON_GPU)),
    results=lambda *_, plan, shape: (jax.ShapeDtypeStruct(shape, plan.carrier.name),),
    by_backend=True,
    canonical=_collapse_codes,
)


# -- static data -------------------------------------------------------------------------------------------------------


def require_scaled_plan(spec: Spec, shape: Sequence[int], dtype: str) -> ScaledPlan:
    """The plan of a scaled format in an array of a carrier's dtype.

    Raises:
        ValueError: for an array without the axes of the format, or a carrier that is too narrow for it.
    """
    fmt = _require_scaled_format(spec)
    try:
        fmt.group_shape(shape)
    except InconclusiveDimensionOperation:
        raise NotImplementedError(
            f"shape={tuple(shape)}: {fmt} cuts an axis into groups, and its length must be known, not symbolic; export "
            "the program for known lengths, or use a format without groups along this axis"
        ) from None
    if isinstance(fmt.scale, ScaledFormat):
        fmt.scale.group_shape(shape)
    return make_scaled_plan(replace(spec, format=fmt.dense), CARRIERS[dtype])


def dense_of(spec: Spec, x: Array) -> tuple[Spec, Array, Array | None]:
    """The spec without `sparse`, `x` without the numbers that it drops, and which are kept; None for all."""
    fmt = _require_scaled_format(spec)
    if fmt.sparse is None or 0 in x.shape:
        return spec if fmt.sparse is None else replace(spec, format=fmt.dense), x, None
    mask = sparse_mask(x, fmt)
    return replace(spec, format=fmt.dense), drop_outside_mask(x, mask, fmt), mask


def code_and_scale_shapes(spec: Spec, shape: Sequence[int]) -> tuple[Any, ScaleArrays, Any]:
    """The results of `quantize_scaled` for an array of `shape`, as `jax.ShapeDtypeStruct`.

    The codes are for all numbers. A format with `sparse` has the same scales and zero points.
    """
    fmt, bits = _require_byte_codes(spec), _require_scaled_format(spec).bits
    row = (*shape[:-1], packed_size(shape[-1] if shape else 1, bits))
    codes = jax.ShapeDtypeStruct(row, jnp.uint8)
    counts = fmt.scale_shape(shape)
    own = scale_dtype(fmt.scale_format)
    zero_point = jax.ShapeDtypeStruct(counts, own if fmt.zero_point == "float" else jnp.int32)
    if isinstance(fmt.scale, ScaledFormat):
        codes_of_scales, *rest = code_and_scale_shapes(Spec(fmt.scale), counts)
        scale: ScaleArrays = (codes_of_scales, *jax.tree.leaves(rest))
    else:
        scale = jax.ShapeDtypeStruct(counts, own)
        if fmt.scale_rule.tensor_scale:
            scale = (scale, jax.ShapeDtypeStruct((), jnp.float32))
    return codes, scale, zero_point if fmt.zero_point else None


def _require_scaled_format(spec: Spec) -> ScaledFormat:
    if spec.scaled is None:
        raise ValueError(f"spec={str(spec)!r} is not scaled; a scaled format is needed, such as 'int8(group=128)'")
    return spec.scaled


def _require_byte_codes(spec: Spec) -> ScaledFormat:
    fmt = _require_scaled_format(spec)
    if fmt.bits > 8:
        raise ValueError(f"spec={str(spec)!r} has codes of {fmt.bits} bits; at most 8 are stored")
    return fmt


def _zeros_of_shapes(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


# -- functions ---------------------------------------------------------------------------------------------------------


def round_scaled(
    x: Array,
    *seeds_and_starts: Array,
    spec: Spec,
    place: StreamOffset = STREAM_START,
    impl: str = "auto",
    keep_nan: bool = False,
) -> Array:
    """`x` rounded to a scaled format: `dequantize_scaled` of `quantize_scaled`, bit for bit.

    Args:
        x: a carrier.
        seeds_and_starts: for a stochastic spec, the words of `seed_words`, then the traced starts of `place`.
        spec: a spec of a scaled format that `require_scaled_plan` accepts.
        place: the position of `x` in the random stream.
        impl: "auto", "xla" or "pallas".
        keep_nan: whether NaN stays NaN where elements have no code for it.
    """
    if 0 in x.shape:
        return x
    keeps = {"keep_nan": True} if keep_nan and not spec.element.has_nan else {}
    result, mask = _run_on_dense(partial(round_scaled_op, impl=impl, **keeps), x, seeds_and_starts, spec, place)
    if mask is None:
        return result
    result = reshard_like(jnp.where(mask, result, 0), x)
    return nan_of(x, result) if keeps else result


def scaled_overflow(x: Array, *seeds_and_starts: Array, spec: Spec, place: StreamOffset = STREAM_START) -> Array:
    """Whether the rounded x / s + z is beyond the ends of the element format; arguments as for `round_scaled`."""
    if 0 in x.shape:
        return jnp.zeros_like(x, bool)
    overflow, mask = _run_on_dense(overflow_body, x, seeds_and_starts, spec, place)
    return overflow if mask is None else mask & overflow


def _run_on_dense(
    run: Callable[..., Array], x: Array, seeds_and_starts: tuple[Array, ...], spec: Spec, place: StreamOffset
) -> tuple[Array, Array | None]:
    """An operation on the numbers that a sparse format keeps, and which these are; None for all."""
    dense, numbers, mask = dense_of(spec, x)
    plan = make_scaled_plan(dense, CARRIERS[x.dtype.name])
    run = partial(run, plan=plan, place=place)
    return _across_parts(run, plan.fmt, lambda: x, numbers, *seeds_and_starts), mask


def quantize_scaled(
    x: Array,
    *seeds_and_starts: Array,
    spec: Spec,
    place: StreamOffset = STREAM_START,
    scale: ScaleArrays = None,
    zero_point: Array | None = None,
    impl: str = "auto",
    as_dtype: Any = "uint8",
) -> tuple[Array, ScaleArrays, Array | None]:
    """`x` as codes, scales and zero points.

    Args:
        x: a carrier.
        seeds_and_starts: as for `round_scaled`.
        spec: a spec of a scaled format with elements of at most 8 bits, and without `sparse` (`dense_of`).
        place: as for `round_scaled`.
        scale: the scales, in the form of `fit_scaled`. Default: fitted to `x`.
        zero_point: the zero points, needed with `scale` by a format that has them.
        impl: "auto", "xla" or "pallas".
        as_dtype: dtype of the codes, of 8 bits.

    Returns:
        ``(codes, scale, zero_point)``. The codes have `as_dtype`, and are packed along the last axis (a 0-d array as a
        row of one). The scales have the shape ``fmt.scale_shape(x.shape)``, and the dtype of their format if it is
        float16, bfloat16, float32 or float64; otherwise they are codes (uint8, uint16). Under a rule with a scale of
        the tensor, `scale` is a pair of these scales and the float32 scale of the tensor. If scales are quantized
        again, `scale` has their packed codes, and their scales (and zero points). Zero points have the same shape, and
        are int32, or have the dtype of the scales if they are numbers; None for a format without zero points.

    Raises:
        ValueError: for an array, a scale or a zero point that does not fit the format.
    """
    fmt = _require_byte_codes(spec)
    plan = require_scaled_plan(spec, x.shape, x.dtype.name)
    fixed_scales = check_scales(spec, x.shape, scale, zero_point)
    if 0 in x.shape:
        codes, *rest = _zeros_of_shapes(code_and_scale_shapes(spec, x.shape))
        return codes.astype(as_dtype), *rest
    codes, *rest = _bind_quantize(x, fixed_scales, seeds_and_starts, impl, plan=plan, place=place, as_dtype=as_dtype)
    return codes, *unflatten_scales(rest, fmt)


def dequantize_scaled(
    qvalue: Array, scale: ScaleArrays, zero_point: Array | None = None, *, spec: Spec, shape: Sequence[int], dtype: str
) -> Array:
    """The numbers of the results of `quantize_scaled`.

    Args:
        qvalue: packed codes.
        scale: as stored.
        zero_point: as stored.
        spec: the spec of `quantize_scaled`.
        shape: the shape of the array.
        dtype: dtype of the result, a carrier. With the array's dtype, the result equals `round_scaled`.

    Raises:
        ValueError: for codes, scales or zero points of another shape or dtype.
    """
    shape = tuple(shape)
    plan = require_scaled_plan(spec, shape, dtype)
    codes = code_and_scale_shapes(spec, shape)[0]
    if qvalue.shape != codes.shape or qvalue.dtype != codes.dtype:
        raise ValueError(f"qvalue is {qvalue.dtype}{qvalue.shape}; for {spec} and {shape} it is uint8{codes.shape}")
    all_scales = check_scales(spec, shape, scale, zero_point)
    if not all_scales:
        raise ValueError(f"scale=None: {spec} needs the scales that the array was quantized under")
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    like = partial(jax.ShapeDtypeStruct, shape, dtype)
    run = partial(dequantize_scaled_op, plan=plan, shape=shape)
    return _across_parts(run, plan.fmt, like, qvalue, *all_scales, bits=plan.fmt.bits)


def fit_scaled(x: Array, *, spec: Spec) -> tuple[ScaleArrays, Array | None]:
    """The scales and zero points of `quantize_scaled` for `x`, in their stored form."""
    plan = require_scaled_plan(spec, x.shape, x.dtype.name)
    _, x, _ = dense_of(spec, x)
    if 0 in x.shape:
        _, scale, zero_point = _zeros_of_shapes(code_and_scale_shapes(spec, x.shape))
        return scale, zero_point
    return unflatten_scales(_bind_quantize(x, (), (), "auto", plan=plan, as_dtype=None), plan.fmt)


def _bind_quantize(x: Array, fixed_scales: tuple, seeds_and_starts: tuple, impl: str, **static: Any) -> tuple:
    arrays, given = (*fixed_scales, *seeds_and_starts), len(fixed_scales)
    like = partial(_types_of_quantized, x, *arrays, given=given, **static)
    return _across_parts(
        partial(quantize_scaled_op, impl=impl, given=given, **static), static["plan"].fmt, like, x, *arrays
    )


def check_scales(spec: Spec, shape: Sequence[int], scale: ScaleArrays, zero_point: Any) -> tuple[Array, ...]:
    """Scales and zero points of the form of `fit_scaled`, as a tuple of arrays; empty if they will be fitted."""
    if scale is None:
        check(zero_point is None, "zero_point without scale; pass both, as returned by fit_scale")
        return ()
    _, *structs = code_and_scale_shapes(spec, shape)
    for name, value, struct in zip(("scale", "zero_point"), (scale, zero_point), structs, strict=True):
        if _leaf_text(value) != _leaf_text(struct):
            raise ValueError(
                f"{name} is {_leaf_text(value)}; for x of shape {tuple(shape)} and spec={str(spec)!r} it must be "
                f"{_leaf_text(struct)}"
            )
    return flatten_scales(scale, zero_point)


def _leaf_text(parts: Any) -> str:
    """The dtypes and shapes of parts."""
    if isinstance(parts, tuple):
        return " and ".join(map(_leaf_text, parts))
    if not hasattr(parts, "dtype") or not hasattr(parts, "shape"):
        return repr(parts)
    return f"{jnp.dtype(parts.dtype).name}{list(parts.shape)}"


# -- explicit shardings ------------------------------------------------------------------------------------------------


def _across_parts(
    run: Callable[..., Any], fmt: ScaledFormat, like: Callable[[], Any], x: Array, *arrays: Array, bits: int = 8
) -> Any:
    """``run(x, *arrays)``; as in an automatic mesh, if an explicit sharding of `x` cuts groups.

    The types of arrays in such parts would refuse their views. Where a rule adds the numbers of a group, these are
    gathered first, so that sums have the order of one device.

    Args:
        run: the operation.
        fmt: its format.
        like: gives the shapes of the results, each of which is sharded like `x` as far as its shape allows.
        x: numbers; or packed codes, of which `like` are the numbers.
        arrays: the other operands.
        bits: of a code.
    """
    if not has_sharding(x):
        return run(x, *arrays)
    shapes = like()
    *units, last = _group_units(fmt, x.shape if bits == 8 else shapes.shape)
    cut = axes_cut_by_sharding(x, [*units, last * bits // math.gcd(8, last * bits)])
    if not cut:
        return run(x, *arrays)
    whole = x if _depends_on_ends(fmt) else gather_axes(x, cut)
    where, then = (
        jax.tree.map(lambda part, like=like: fit_sharding(like, part.shape), shapes)
        for like in (jax.typeof(whole).sharding, jax.typeof(x).sharding)
    )
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    # In two steps: a sharding of the results along gathered axes would spread to the sums.
    out = jax.sharding.auto_axes(run, axes=explicit, out_sharding=where)(whole, *arrays)
    return out if whole is x else jax.sharding.reshard(out, then)


def _group_units(fmt: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The length along each axis that parts must be multiples of: of groups, and of groups of their scales."""
    if not isinstance(fmt, ScaledFormat):
        return (1,) * len(shape)
    return tuple(map(operator.mul, fmt.group_shape(shape), _group_units(fmt.scale, fmt.scale_shape(shape))))


def _depends_on_ends(fmt: Any) -> bool:
    """Whether the scales of groups, and the scales of these, depend on nothing but ends."""
    return not isinstance(fmt, ScaledFormat) or (fmt.scale_rule.by_ends and _depends_on_ends(fmt.scale))
