"""Stored codes: packed into bytes, or in a dtype of the same bits; and the numbers that codes and scales stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop import formats
from jchop._common.bit_ops import CARRIERS, FLOAT32, FLOAT64, Carrier, has_sharding
from jchop._common.checks import check
from jchop._common.gradients import CustomJvp
from jchop._common.settings import always_jit
from jchop._core.rounding.codes import decode_elements, encode_elements, pack_codes, packed_size, unpack_codes
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import CARRIER_SPECS, carrier_holds
from jchop._core.scaled.elements import narrow_16_bit, widen_16_bit
from jchop._core.scaled.groups import gather_sparse, scatter_sparse
from jchop._kernels.scaled import code_and_scale_shapes, dequantize_scaled
from jchop._spec.spec import Spec
from jchop._storage import _axis_groupings as groupings

#: Codes of NumPy or JAX; the result of a function is of the same library.
Codes = Any

#: The format of each carrier.
CARRIER_FORMATS: dict[str, Any] = {name: spec.format for name, spec in CARRIER_SPECS.items()}
#: Formats whose codes are the bits of a dtype that JAX's backends, other libraries and files support.
_NATIVE_DTYPES: dict[formats.ElementFormat, str] = {fmt: name for name, fmt in CARRIER_FORMATS.items()}
_NATIVE_DTYPES |= {formats.float8_e4m3fn: "float8_e4m3fn", formats.float8_e5m2: "float8_e5m2"}
#: The most bits of codes without a dtype of the same values.
_MOST_CODE_BITS = 16


def native_dtype(fmt: formats.ElementFormat) -> np.dtype | None:
    """The dtype with the values of `fmt`, bit for bit; None if there is no widely supported one."""
    return jnp.dtype(_NATIVE_DTYPES[fmt]) if fmt in _NATIVE_DTYPES else None


def code_dtype(fmt: formats.ElementFormat) -> np.dtype:
    """The dtype of stored codes.

    The dtype of the same values if there is one: the floats above, int8 and uint8 for 8-bit integers and fixed point.
    Else uint16 for codes of 9 to 16 bits, and uint8 for codes of 8 bits, or packed codes of fewer.

    Raises:
        ValueError: for codes that are too wide.
    """
    native = native_dtype(fmt)
    if native is not None:
        return native
    if fmt.bits > _MOST_CODE_BITS:
        raise ValueError(
            f"{fmt} has codes of {fmt.bits} bits; at most {_MOST_CODE_BITS} are stored, or a format with a dtype"
        )
    if isinstance(fmt, formats.UniformFormat) and fmt.bits == 8:
        return np.dtype(np.int8 if fmt.signed else np.uint8)
    return np.dtype(np.uint8 if fmt.bits <= 8 else np.uint16)


def packs_codes(fmt: formats.ElementFormat) -> bool:
    """Whether several codes share a byte."""
    return fmt.bits < 8


def store_codes(codes: Codes, fmt: formats.ElementFormat) -> Codes:
    """Unsigned codes, packed if they have fewer than 8 bits, in the stored dtype; `load_codes` is the inverse."""
    return _bitcast_codes(codes, code_dtype(fmt))


def load_codes(codes: Codes, fmt: formats.ElementFormat) -> Codes:
    """Stored codes as unsigned integers, still packed."""
    check_code_dtype(codes, fmt)
    return _bitcast_codes(codes, np.dtype(f"u{code_dtype(fmt).itemsize}"))


def check_code_dtype(codes: Codes, fmt: formats.ElementFormat) -> None:
    """Refuses numbers in the place of codes, as arithmetic on the leaves of a QArray makes them.

    Raises:
        ValueError: for a dtype of another size than the dtype of codes.
    """
    own = code_dtype(fmt)
    if codes.dtype == jax.dtypes.float0:
        raise ValueError("the QArray is a gradient, in which integer codes have none (float0): only its scales, and "
                         "float zero points, have numbers")  # fmt: skip
    if codes.dtype.itemsize != own.itemsize:
        raise ValueError(
            f"qvalue is {codes.dtype}, and the codes of its spec are {own}: arithmetic on the leaves of a QArray does "
            "not compute with its numbers; jc.dequantize has them, and jc.optim.apply_updates packs sums"
        )


def unpack_entries(codes: Codes, fmt: formats.ElementFormat, count: int) -> Codes:
    """Stored codes, unpacked to one entry for each element, so that any axis can be cut or moved."""
    return _unpack_codes(codes, fmt.bits, count) if packs_codes(fmt) else codes


def pack_entries(entries: Codes, fmt: formats.ElementFormat) -> Codes:
    """The inverse of `unpack_entries`."""
    return _pack_codes(entries, fmt.bits) if packs_codes(fmt) else entries


def _keeps_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function whose results are NumPy if its first argument is NumPy."""

    @wraps(function)
    def call(first: Codes, *others: Any) -> Any:
        results = function(first, *others)
        return jax.tree.map(np.asarray, results) if isinstance(first, np.ndarray) else results

    return call


_unpack_codes = _keeps_library(always_jit(unpack_codes, static_argnums=(1, 2), inline=True))
_pack_codes = _keeps_library(always_jit(pack_codes, static_argnums=1, inline=True))


def _bitcast_codes(codes: Codes, dtype: np.dtype) -> Codes:
    return codes.view(dtype) if isinstance(codes, np.ndarray) else lax.bitcast_convert_type(codes, dtype)


# -- n of every m numbers ----------------------------------------------------------------------------------------------


@_keeps_library
@partial(always_jit, static_argnums=2, inline=True)
def sparse_codes(qvalue: Codes, mask: Any, spec: Spec) -> tuple[Codes, Codes]:
    """The codes of the kept numbers, and one bit for each number, from the codes of all; both as they are stored.

    Args:
        qvalue: stored codes.
        mask: which numbers are kept.
        spec: with `sparse`, and axes counted from the end.
    """
    fmt, element = spec.scaled, spec.element
    assert fmt is not None and fmt.sparse is not None
    codes = unpack_entries(load_codes(qvalue, element), element, mask.shape[-1])
    sparse = gather_sparse(codes, mask, fmt.sparse, fmt.axis_of_sparse % mask.ndim)
    return store_codes(pack_entries(sparse, element), element), pack_codes(mask, 1)


@_keeps_library
@partial(always_jit, static_argnums=(2, 3), inline=True)
def dense_codes(qvalue: Codes, places: Codes, size: int, spec: Spec) -> tuple[Codes, Codes]:
    """The codes of all numbers, and which are kept, as the inverse of `sparse_codes`; codes of others mean nothing."""
    fmt, element = spec.scaled, spec.element
    assert fmt is not None and fmt.sparse is not None
    mask = unpack_codes(places, 1, size) != 0
    codes = unpack_entries(qvalue, element, fmt.kept_shape(mask.shape)[-1])
    return pack_entries(scatter_sparse(codes, mask, fmt.sparse, fmt.axis_of_sparse % mask.ndim), element), mask


# -- formats without a scale -------------------------------------------------------------------------------------------


def encode_unscaled(values: Array, fmt: formats.ElementFormat) -> Array:
    """The stored codes of values of a plain format, packed along the last axis.

    If `fmt` has no NaN, a NaN becomes its largest value, as in scaled formats.
    """
    carrier = CARRIERS[values.dtype.name]
    if fmt == formats.binary64 and carrier.width < 64:
        raise ValueError(f"x has dtype {carrier.name}, which binary64 would store in more bits than it has")
    codes = encode_elements(widen_16_bit(values, carrier), fmt, _arithmetic_carrier(carrier))
    if not fmt.has_nan:
        codes = jnp.where(jnp.isnan(values), np.asarray(fmt.code_of(fmt.max), codes.dtype), codes)
    return store_codes(pack_entries(codes, fmt), fmt)


def needs_float64(fmt: formats.ElementFormat) -> bool:
    """Whether values of a plain format are computed in float64: binary64, and tapered formats with a wider range."""
    return fmt == formats.binary64 or (isinstance(fmt, formats.TaperedFormat) and not carrier_holds(Spec(fmt), FLOAT32))


def decode_unscaled(codes: Array, fmt: formats.ElementFormat, count: int, carrier: Carrier) -> Array:
    """The values of stored codes, rounded to nearest if `carrier` does not hold them."""
    compute = FLOAT64 if needs_float64(fmt) else _arithmetic_carrier(carrier)
    values = decode_elements(unpack_entries(load_codes(codes, fmt), fmt, count), fmt, compute)
    if compute.width == carrier.width:
        return values
    values = round_to_spec(values, CARRIER_SPECS[carrier.name], compute)
    if compute.width == 64:
        return values.astype(carrier.name)
    return narrow_16_bit(values, carrier)


def _arithmetic_carrier(carrier: Carrier) -> Carrier:
    """The carrier of the arithmetic: float32 for 16-bit numbers."""
    return CARRIERS["float64" if carrier.width == 64 else "float32"]


# -- conversion of stored parts (codes, scales, zero points) to numbers, with derivatives in the float parts -----------


#: The scales: an array; a tuple if a scale has several parts; None for a plain format.
Scale = Any


@dataclass(frozen=True)
class QArrayForm:
    """Static data of stored numbers.

    Args:
        spec: the spec of the codes.
        size: length of the last axis, which packed codes do not determine; None for an array without axes.
        dtype: name of the carrier of the result.
    """

    spec: Spec
    size: int | None
    dtype: str


def qarray_shape(qvalue: Any, size: int | None, places: Any = None) -> tuple[int, ...]:
    """The shape of the numbers with codes `qvalue`; an array without axes is stored as a row of one code.

    If only some numbers have codes, `places` has a bit for each number.
    """
    rows = qvalue if places is None else places
    return tuple(rows.shape[:-1]) if size is None else (*rows.shape[:-1], size)


def spec_of_part(spec: Spec, ndim: int) -> Spec:
    """The spec of a stored array of `ndim` axes, without channels along removed axes (`format_of_part`)."""
    fmt = None if spec.scaled is None else groupings.format_of_part(spec.scaled, ndim)
    return spec if fmt is None or fmt == spec.scaled else replace(spec, format=fmt)


def batch_axes(spec: Spec, shape: Sequence[int], scale: Scale) -> int:
    """The number of leading axes that vmap or scan added after quantization; the scales have them, too.

    Raises:
        ValueError: if the shape of the scales does not fit the array.
    """
    shapes, fitting = [tuple(part.shape) for part in _scale_parts(scale)], spec_of_part(spec, len(shape))
    for batch in range(len(shape) + 1):
        front, core = tuple(shape[:batch]), tuple(shape[batch:])
        try:
            parts = jax.tree.leaves(code_and_scale_shapes(fitting, core)[1])
        except ValueError:  # an array with so few axes lacks an axis of the format
            break
        if shapes == [(*front, *part.shape) for part in parts]:
            return batch
    raise ValueError(
        f"scale has the shape {' and '.join(map(str, shapes))}, which does not fit an array of shape {tuple(shape)} "
        f"quantized to {spec}"
    )


def check_qarray_leaves(q: Any) -> None:
    """Checks that the leaves of a QArray have the shapes and dtypes of its spec, without computation.

    Raises:
        ValueError: for other leaves, or axes of a format that are not counted from the end.
    """
    spec, rows = spec_of_part(q.spec, q.ndim), q.qvalue if q.places is None else q.places
    shape = qarray_shape(q.qvalue, q.length, q.places)
    if not rows.shape or (q.length is None and len(rows.shape) != 1):
        raise ValueError(f"{'qvalue' if q.places is None else 'places'} of shape {list(rows.shape)} does not fit "
                         f"length={q.length}")  # fmt: skip
    code_shape = shape or (1,)
    if (q.places is not None) != bool(spec.scaled and spec.scaled.sparse):
        raise ValueError(f"{spec} has {'no places' if q.places is not None else 'places, which are missing'}")
    if spec.scaled is not None and q.places is not None:
        check(spec.scaled.axis_of_sparse < 0, f"the axes of {spec} are not counted from the end")
        code_shape = spec.scaled.kept_shape(shape)
    count = packed_size(code_shape[-1], spec.element.bits) if packs_codes(spec.element) else code_shape[-1]
    spec_leaves = [((*code_shape[:-1], count), code_dtype(spec.element))]
    if spec.scaled is not None:
        batch = batch_axes(spec, shape, q.scale)
        if groupings.axes_from_end(spec.scaled, len(shape) - batch) != spec.scaled:
            raise ValueError(f"the axes of {spec} are not counted from the end")
        parts = jax.tree.leaves(code_and_scale_shapes(spec, shape[batch:])[1:])
        spec_leaves += [((*shape[:batch], *part.shape), part.dtype) for part in parts]
    if q.places is not None:
        spec_leaves += [((*shape[:-1], packed_size(shape[-1], 1)), np.dtype(np.uint8))]
    own_leaves = [(tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(q)]
    if own_leaves != spec_leaves:
        own, others = ([f"{dtype}{list(shape)}" for shape, dtype in leaves] for leaves in (own_leaves, spec_leaves))
        raise ValueError(f"the leaves are {' and '.join(own)}, and its spec has {' and '.join(others)}")


def _scale_parts(scale: Scale) -> tuple[Any, ...]:
    return scale if isinstance(scale, tuple) else (scale,)


def decode_qarray(
    form: QArrayForm, qvalue: Array, scale: Scale, zero_point: Array | None, places: Array | None = None
) -> Array:
    """The stored numbers, in the carrier ``form.dtype``; numbers without a place are 0."""
    if places is None:
        return _decode_dense(form, qvalue, scale, zero_point)
    assert form.spec.scaled is not None and form.size is not None
    check_code_dtype(qvalue, form.spec.element)
    codes, mask = dense_codes(qvalue, places, form.size, form.spec)
    dense = replace(form, spec=replace(form.spec, format=form.spec.scaled.dense))
    return jnp.where(mask, _decode_dense(dense, codes, scale, zero_point), 0)


@partial(CustomJvp, nondiff_argnums=(0,))
def _decode_dense(form: QArrayForm, qvalue: Array, scale: Scale, zero_point: Array | None) -> Array:
    """The numbers of an array without sparsity; axes that vmap added to its scales are mapped over."""
    fmt, shape = form.spec.format, qarray_shape(qvalue, form.size)
    if isinstance(fmt, formats.ElementFormat):
        count = 1 if form.size is None else form.size
        return decode_unscaled(qvalue, fmt, count, CARRIERS[form.dtype]).reshape(shape)
    batch = batch_axes(form.spec, shape, scale)

    def core(codes: Array, scale: Scale, zero_point: Array | None) -> Array:
        return dequantize_scaled(codes, scale, zero_point, spec=form.spec, shape=shape[batch:], dtype=form.dtype)

    for _ in range(batch):
        core = jax.vmap(core)
    return core(load_codes(qvalue, fmt.element), scale, zero_point)


# x = e s, (e - z) s or e s + z: so dx = e ds + dz, and for codes that are floats dx = s de. Each factor is the decoded
# number with the other factor replaced by 1, and the summand by 0.
def _decode_jvp(form: QArrayForm, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The numbers, and their tangent from tangents of codes, scales and float zero points."""
    qvalue, scale, zero_point = primals
    result = _decode_dense(form, *primals)
    tangent = jnp.zeros_like(result)
    if _has_tangent(tangents[0]):
        ones = _decode_dense(form, jnp.ones_like(qvalue), scale, zero_point)
        tangent += ones * tangents[0].astype(result.dtype).reshape(result.shape)
    if scale is None:
        return result, tangent
    has_summand = form.spec.scaled is not None and form.spec.scaled.zero_point == "float"
    nothing = jax.tree.map(jnp.zeros_like, zero_point) if has_summand else zero_point
    for i, part_tangent in enumerate(_scale_parts(tangents[1])):
        if not _has_tangent(part_tangent):
            continue
        with_one = tuple(map(partial(_scale_with_one, i), range(len(_scale_parts(scale))), _scale_parts(scale)))
        factor = _decode_dense(form, qvalue, with_one if isinstance(scale, tuple) else with_one[0], nothing)
        tangent += factor * _scale_over_elements(form.spec, part_tangent.astype(result.dtype), i, scale, result.shape)
    if has_summand and _has_tangent(tangents[2]):
        tangent += _scale_over_elements(form.spec, tangents[2].astype(result.dtype), 0, scale, result.shape)
    return result, tangent


def _scale_with_one(which: int, part: int, value: Array) -> Array:
    """A part of the scales: 1 if it is chosen, 0 for the other summand of scales s e + z (parts 1 and 2)."""
    if part == which:
        return jnp.ones_like(value)
    return jnp.zeros_like(value) if part and which else value


_decode_dense.defjvp(_decode_jvp, symbolic_zeros=True)


def _has_tangent(tangent: Any) -> bool:
    zero = isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    return not zero and tangent.dtype != jax.dtypes.float0


def _scale_over_elements(spec: Spec, values: Array, part: int, scale: Scale, shape: tuple[int, ...]) -> Array:
    """Values in the shape of one part of the scales, repeated for each element that it scales."""
    fmt, batch = spec.scaled, batch_axes(spec, shape, scale)
    assert fmt is not None
    if part and isinstance(fmt.scale, formats.ScaledFormat):
        scales = shape[:batch] + fmt.scale_shape(shape[batch:])
        kinds = groupings.axis_groupings(fmt.scale, len(scales), batch)
        values = jnp.broadcast_to(repeat_over_groups(values, kinds, scales), scales)
    elif part:
        return values.reshape(*values.shape, *([1] * (len(shape) - batch)))
    return repeat_over_groups(values, groupings.axis_groupings(fmt, len(shape), batch), shape)


def repeat_over_groups(values: Array, kinds: Sequence[groupings.AxisGrouping], shape: Sequence[int]) -> Array:
    """One value for each group, repeated for each element of the group; whole-axis groups keep length 1."""
    for axis, (kind, n) in enumerate(zip(kinds, shape, strict=True)):
        if kind not in (groupings.OWN_SCALE, groupings.WHOLE_AXIS):
            sharding = jax.typeof(values).sharding if has_sharding(values) else None
            values = lax.slice_in_dim(jnp.repeat(values, int(kind), axis, out_sharding=sharding), 0, n, axis=axis)
    return values


# -- elements at the ends of a format, and those that were clipped there -----------------------------------------------


#: The widest codes whose values are listed.
_MOST_TABLE_BITS = 16


@lru_cache(maxsize=32)
def _range_end_codes(fmt: formats.ElementFormat) -> tuple[np.ndarray, np.ndarray] | None:
    """For each code: whether its value is the largest or the lowest, or infinite; and the code of the value next to it.

    Other codes are next to themselves. A lowest value of zero does not count. None for codes of more than 16 bits, and
    for values that binary64 does not hold.
    """
    if fmt.bits > _MOST_TABLE_BITS:
        return None
    codes = np.arange(1 << fmt.bits)
    table, values = fmt.decode(codes), fmt.values()
    if table.dtype == object or values.size < 2:
        return None
    at_end, nearer = np.isinf(table), codes.copy()
    for end, inner in ((values[-1], values[-2]), *([(values[0], values[1])] if values[0] < 0 else [])):
        at_end |= table == end
        nearer[table == end] = codes[table == inner][0]
    return at_end, nearer


def codes_at_ends(q: Any) -> np.ndarray | None:
    """Whether each code of a `QArray` is the code of the largest or the lowest value of its format, or of an infinity.

    None if the codes have more than 16 bits.
    """
    ends = _range_end_codes(q.spec.element)
    return None if ends is None else ends[0][q.codes] & _sparse_mask(q)


def _sparse_mask(q: Any) -> Any:
    """Which numbers have codes; True for all."""
    return True if q.places is None else np.asarray(dense_codes(q.qvalue, q.places, q.length, q.spec)[1])


def clip_mask(q: Any, x: np.ndarray) -> np.ndarray | None:
    """Whether each number of `x` lay so far beyond the range of its code that a longer range would have kept it better.

    It is stored as the largest or the lowest value, and exceeds it by more than half the distance to the value next
    to it. None if the codes have more than 16 bits.

    Args:
        q: a `QArray`.
        x: float64, in its shape: the numbers that it stores. Of one that is not finite the result has no meaning.
    """
    fmt = q.spec.element
    ends = _range_end_codes(fmt)
    if ends is None:
        return None
    entries = q.codes
    inner = ends[1][entries].astype(entries.dtype)
    codes = inner.reshape(1) if q.length is None else inner
    inner_qvalue = store_codes(pack_entries(codes, fmt), fmt)
    with jax.enable_x64(True):
        form = q.form(np.float64)
        y = np.asarray(decode_qarray(form, q.qvalue, q.scale, q.zero_point, q.places))
        nearer = np.asarray(decode_qarray(form, inner_qvalue, q.scale, q.zero_point))
    with np.errstate(invalid="ignore"):
        beyond = (x - y) * np.sign(y - nearer)
        return _sparse_mask(q) & (beyond > np.abs(y - nearer) / 2)  # of a code at no end, y is `nearer`
