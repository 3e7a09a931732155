"""`LayoutRow`: one way to store a quantized weight in named tensors, as two pure functions; and shared helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jchop._common.checks import check
from jchop._common.files import short_text
from jchop._spec.spec import Spec
from jchop._storage._array import QArray
from jchop._storage._axis_groupings import (
    OWN_SCALE,
    WHOLE_AXIS,
    AxisGrouping,
    axis_groupings,
    grouping_fields,
    over_elements,
)
from jchop._storage._codes import batch_axes, load_codes, spec_of_part, store_codes
from jchop._storage._files.safetensors import TensorEntry
from jchop.formats import ElementFormat, IntegerFormat, ScaledFormat
from jchop.formats._catalogue import bfloat16, binary16, binary32, float8_e8m0fnu

#: The tensors of a weight, by the end of their names: ``weight_packed``, ``weight_scale``.
TensorParts = Mapping[str, np.ndarray]
#: `ShardFiles`, or an object with such `entries`, `config`, `metadata` and `read`.
TensorSource = Any
#: The dtypes and shapes of these tensors.
TensorEntries = Mapping[str, TensorEntry]
#: Gives the shape of a weight from its entries; None if they are of another row.
LookForShape = Callable[[TensorEntries], tuple[int, ...] | None]
#: The facts that are not in the tensors: the ``quantization_config`` of a model, or a record of the weight.
LayoutFacts = Mapping[str, Any]
#: The tensors of a weight as they are stored, and its facts.
WrittenWeight = tuple[dict[str, np.ndarray], dict[str, Any]]


@dataclass(frozen=True)
class LayoutRow:
    """One way to store a weight.

    Args:
        name: of the format, as its definition has it.
        parts: the ends of the names of all tensors that it must have. The first is the anchor, which shows that a
            weight is stored in this way.
        optional: the ends of the names of tensors that it may have.
        look: gives the shape of the weight from its entries; None if they are of another row.
        read: makes the QArray. It raises a ValueError for tensors that contradict each other.
        write: makes the tensors and the facts. It raises a ValueError for a QArray that has no form in them.
        fits: a spec that can be written, and for which arrays; for errors.
        inputs_last: whether it is the last choice for a weight whose inputs are rounded.
        peek: a short tensor and a function that finds the shape of the weight in it, if the entries do not show it.
    """

    name: str
    parts: tuple[str, ...]
    look: LookForShape
    read: Callable[[TensorParts, LayoutFacts], QArray]
    write: Callable[[QArray, bool], WrittenWeight]
    fits: str
    optional: tuple[str, ...] = ()
    peek: tuple[str, Callable[[np.ndarray], tuple[int, ...]]] | None = None
    inputs_last: bool = False

    @property
    def anchor(self) -> str:
        """The end of the name of the tensor that shows that a weight is stored in this way."""
        return self.parts[0]


#: The dtypes of tensors in layouts.
BYTE, INT8, WORD = np.dtype(np.uint8), np.dtype(np.int8), np.dtype("<i4")
FLOAT4, FLOAT8 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)
EXPONENT8 = np.dtype(ml_dtypes.float8_e8m0fnu)


def is_matrix(tensor: TensorEntry | np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Whether a tensor has two axes, neither of them empty, and a dtype, if one is given."""
    return len(tensor.shape) == 2 and min(tensor.shape) > 0 and (dtype is None or tensor.dtype == dtype)


def look_for_matrix(part: str, dtype: np.dtype | None = None, each: int = 1, **beside: np.dtype) -> LookForShape:
    """Makes the function that finds the shape of a weight, which is a matrix in one tensor.

    Args:
        part: the tensor.
        dtype: of it. Default: any.
        each: how many numbers of a row are in one of its elements. Default 1.
        beside: the dtypes of other tensors.
    """

    def look(entries: TensorEntries) -> tuple[int, ...] | None:
        fits = is_matrix(entries[part], dtype) and all(entries[name].dtype == kind for name, kind in beside.items())
        rows, columns = entries[part].shape if fits else (0, 0)
        return (rows, each * columns) if fits else None

    return look


def two_lengths(data: np.ndarray) -> tuple[int, int]:
    """The shape of a matrix that a tensor holds."""
    ok = np.issubdtype(data.dtype, np.integer) and data.shape == (2,) and bool(((data > 0) & (data < 1 << 31)).all())
    check(ok, "the shape must be two integers above zero and below 2^31")
    return int(data[0]), int(data[1])


def only_read(q: QArray, exact: bool) -> WrittenWeight:
    """The writer of a layout that is only read."""
    raise ValueError("the layout is only read")


def fact_field(facts: LayoutFacts, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of the facts; ValueError if it has another type. A missing one, or null, is the default."""
    value = facts.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={short_text(value)} has a type that is not allowed there")
    return value


#: The name of a fact: the fields that may be a module's own, before those of the configuration.
FIELDS_OF_MODULE = "fields of the module"


def module_fields(facts: LayoutFacts, name: str) -> set[int | None]:
    """The integers that a field may have for a module."""
    return {fact_field(one, name, int, fact_field(facts, name, int)) for one in facts.get(FIELDS_OF_MODULE, ({},))}


def config_groups(facts: LayoutFacts) -> dict[str, dict[str, Any]]:
    """The groups of weights in a ``quantization_config``, by name."""
    groups = fact_field(facts, "config_groups", dict, {})
    return {key: group for key, group in groups.items() if isinstance(group, dict)}


# -- QArrays from codes and scales that other programs stored: NumPy alone, so nothing is compiled ---------------------

# The scales of a QArray are above zero. A stored scale below zero is said by codes that run the other way,
# s (u - z) = |s| ((m - u) - (m - z)) with the largest code m, and a scale of zero by codes of value zero.


#: The formats of scales by dtype.
SCALE_FORMATS = {
    np.dtype(np.float16): binary16,
    np.dtype(ml_dtypes.bfloat16): bfloat16,
    np.dtype(np.float32): binary32,
    np.dtype(ml_dtypes.float8_e8m0fnu): float8_e8m0fnu,
}


def kinds_from(shape: Sequence[int], scales: Sequence[int], block: Sequence[int] | None = None) -> list[AxisGrouping]:
    """The grouping of each axis of a weight, from the shape of its scales.

    Args:
        shape: of the weight.
        scales: shape of the scales, with as many axes.
        block: the sizes of groups if the facts have them. Default: the axes are divided evenly. Blocks of several rows
            must then have lengths that are powers of two, since the last one may be smaller.

    Raises:
        ValueError: if no grouping has these scales.
    """
    sizes = block or [n // max(count, 1) for n, count in zip(shape, scales, strict=True)]
    fits = all(size > 0 and -(-n // size) == count for n, count, size in zip(shape, scales, sizes, strict=True))
    kinds = [
        OWN_SCALE if m == n else WHOLE_AXIS if m == 1 else size for n, m, size in zip(shape, scales, sizes, strict=True)
    ]
    unsure = block is None and isinstance(kinds[0], int) and any(isinstance(k, int) and k & k - 1 for k in kinds)
    groups = f"groups of {list(sizes)}" if block else "blocks of a known size" if unsure else "equal groups"
    shapes = f"scales of shape {list(scales)} do not divide a weight of shape {list(shape)}"
    check(fits and not unsure, f"{shapes} into {groups}")
    return kinds


def as_scales(scale: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Stored scales with as many axes as the weight; a vector has one scale for each row, or one in all.

    Raises:
        ValueError: for another dtype or shape, an infinity or NaN.
    """
    names = ", ".join(map(str, SCALE_FORMATS))
    check(scale.dtype in SCALE_FORMATS, f"scales are of dtype {scale.dtype}; allowed: {names}")
    check(bool(np.isfinite(scale.astype(np.float32)).all()), "a scale is infinite or NaN")
    if scale.size == 1:
        return scale.reshape((1,) * len(shape))
    if scale.ndim == 1 and scale.shape[0] == shape[0]:
        return scale.reshape(-1, *(1,) * (len(shape) - 1))
    check(scale.ndim == len(shape), f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(shape)}")
    return scale


def integer_array(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, bits: int, kinds: Sequence[AxisGrouping]
) -> QArray:
    """The numbers s (u - z) of unsigned codes u.

    Args:
        codes: uint8, one for each element.
        scale: a float for each group.
        zero: the integer z of each group. Default: 2^(bits - 1).
        bits: 2 to 8.
        kinds: grouping of each axis.
    """
    shape, middle, most = codes.shape, 1 << (bits - 1), (1 << bits) - 1
    zeros = np.full(scale.shape, middle, np.int32) if zero is None else zero.astype(np.int32)
    check(zeros.shape == scale.shape, f"zero points have shape {list(zeros.shape)}, and scales {list(scale.shape)}")
    if (below := scale < 0).any():
        codes = np.where(over_elements(below, kinds, shape), most - codes, codes).astype(np.uint8)
        zeros = np.where(below, most - zeros, zeros)
        scale = np.abs(scale)
    zeros = np.where(scale == 0, middle, zeros)
    codes, scale = replace_zero_scales(codes, scale, kinds, np.uint8(middle))
    fields = {"scale": SCALE_FORMATS[scale.dtype], **grouping_fields(kinds)}
    if (zeros == middle).all():
        return qarray_of_codes(codes ^ np.uint8(middle), scale, None, ScaledFormat(IntegerFormat(bits), **fields))
    fmt = ScaledFormat(IntegerFormat(bits, signed=False), zero_point="integer", **fields)
    return qarray_of_codes(codes, scale, zeros.astype(np.int32), fmt)


def float_array(codes: np.ndarray, scale: np.ndarray, element: ElementFormat, kinds: Sequence[AxisGrouping]) -> QArray:
    """The numbers s e of codes of floats with a sign in their highest bit.

    Args:
        codes: uint8, one for each element.
        scale: a float for each group.
        element: the format of e.
        kinds: grouping of each axis.
    """
    sign = np.uint8(1 << (element.bits - 1))
    if (below := scale < 0).any():
        codes = np.where(over_elements(below, kinds, codes.shape), codes ^ sign, codes)
        scale = np.abs(scale)
    codes, scale = replace_zero_scales(codes, scale, kinds, codes & sign)
    fmt = ScaledFormat(element, scale=SCALE_FORMATS[scale.dtype], **grouping_fields(kinds))
    return qarray_of_codes(codes, scale, None, fmt)


def replace_zero_scales(
    codes: np.ndarray, scale: np.ndarray, kinds: Sequence[AxisGrouping], zeros: Any, one: Any = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Scales of zero replaced by `one`, and the codes under them by `zeros`."""
    if (nothing := scale == 0).any():
        codes = np.where(over_elements(nothing, kinds, codes.shape), zeros, codes)
        scale = np.where(nothing, one, scale).astype(scale.dtype)
    return codes, scale


def qarray_of_codes(codes: np.ndarray, scale: Any, zero_point: Any, fmt: ScaledFormat) -> QArray:
    """A QArray of one byte for each code; its dtype is float32."""
    element = fmt.element
    packs = element.bits < 8
    packed_codes = pack_bits(codes, element.bits) if packs else store_codes(np.ascontiguousarray(codes), element)
    if fmt.scale == float8_e8m0fnu:
        scale = scale.view(np.uint8)
    return QArray(packed_codes, scale, zero_point, Spec(fmt), codes.shape[-1], np.dtype(np.float32))


# -- the reverse: arrays of NumPy for files, or arrays of JAX, which stay on their devices -----------------------------


def numpy_of(*arrays: Any) -> Any:
    """The module with the functions of arrays: `jax.numpy` if one of them is of JAX, else NumPy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


@dataclass(frozen=True)
class Pieces:
    """A QArray in pieces: a byte for each code, floats for scales, the grouping of each axis."""

    codes: np.ndarray
    scale: Any
    zero: np.ndarray | None
    fmt: ScaledFormat
    kinds: tuple[AxisGrouping, ...]


def pieces(q: QArray, element: ElementFormat | None = None) -> Pieces:
    """A matrix in pieces, whose elements are of a format, if one is given.

    Raises:
        ValueError: for a plain format, other elements, other than two axes, or scales that vmap added axes to.
    """
    fmt = spec_of_part(q.spec, q.ndim).scaled
    if fmt is None:
        raise ValueError("it has no scales")
    check(fmt.sparse is None, "it has codes of some numbers alone (sparse), and the layout has codes of all")
    check(fmt.scale_rule.second is None, "its groups have levels of two formats")
    check(q.ndim == 2, f"it has shape {list(q.shape)}, and a stored weight has two axes (out, in)")
    check(batch_axes(q.spec, q.shape, q.scale) == 0, "vmap added axes to its scales")
    check(element in (None, fmt.element), f"its elements are not {element}")
    codes = unpack_bits(load_codes(q.qvalue, fmt.element), fmt.element.bits, q.shape[-1])
    return Pieces(codes, q.scale, q.zero_point, fmt, axis_groupings(fmt, q.ndim))


def unsigned_pieces(parts: Pieces, bits: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes u, float scales s and integers z with the numbers s (u - z).

    Raises:
        ValueError: for other elements than integers of these widths, scales without a dtype, float zero points.
    """
    element = parts.fmt.element
    fits = isinstance(element, IntegerFormat) and element.bits in bits
    check(fits, f"its elements are not integers of {' or '.join(map(str, bits))} bits")
    check(parts.fmt.zero_point != "float", "its zero points are numbers, not integers")
    scale = float_scales(parts)
    middle = 1 << (element.bits - 1)
    zero = np.zeros(scale.shape, np.int32) if parts.zero is None else parts.zero
    if getattr(element, "signed", True):
        return parts.codes ^ np.uint8(middle), scale, zero + middle
    return parts.codes, scale, zero


def zero_codes(zero: np.ndarray, bits: int) -> np.ndarray:
    """Zero points as codes of so many bits; ValueError if one is none."""
    check(((zero >= 0) & (zero < 1 << bits)).all(), f"a zero point is no code of {bits} bits")
    return zero.astype(np.uint8)


def float_scales(parts: Pieces) -> np.ndarray:
    """The scales, which must be numbers of a float dtype."""
    if not isinstance(parts.scale, tuple) and parts.scale.dtype in SCALE_FORMATS:
        return parts.scale
    several = " of several parts" if isinstance(parts.scale, tuple) else ""
    raise ValueError(f"its scales are {parts.fmt.scale}{several}, not floats")


def row_group_size(parts: Pieces) -> int | None:
    """The size of the groups along the last axis, None for one scale per row; ValueError for another grouping."""
    rows, last = parts.kinds
    n = parts.codes.shape[0]
    ok = (rows == OWN_SCALE or n == 1) and last != OWN_SCALE
    check(ok or parts.codes.shape[1] == 1, f"it has the grouping of {parts.fmt}, not groups along its last axis")
    return last if isinstance(last, int) else None


def group_by_column(parts: Pieces) -> tuple[Pieces, np.ndarray | None]:
    """A weight with a scale for each element as groups of equally many columns, and the group of each column.

    Columns with the same scales and zero points are in one group, or in several of one size. Weights with other
    groupings, or without these groups, come back as they are, with None.
    """
    if parts.kinds not in ((OWN_SCALE, OWN_SCALE), (OWN_SCALE, 1)) or isinstance(parts.scale, tuple):
        return parts, None
    scale, zero = np.asarray(parts.scale), None if parts.zero is None else np.asarray(parts.zero)
    columns = [scale] if zero is None else [scale, zero]
    words = [np.ascontiguousarray(values.T).view(np.uint8).reshape(values.shape[1], -1) for values in columns]
    _, kind, counts = np.unique(np.concatenate(words, axis=1), axis=0, return_inverse=True, return_counts=True)
    size, kind = int(np.gcd.reduce(counts)), kind.reshape(-1)
    if size == 1:
        return parts, None
    order = np.argsort(kind, kind="stable")
    index = np.empty(order.size, np.int32)
    index[order] = np.arange(order.size) // size
    first = order[::size]
    zero = None if zero is None else zero[:, first]
    return replace(parts, scale=scale[:, first], zero=zero, kinds=(OWN_SCALE, size)), index


def cast_exactly(values: Any, dtype: Any, what: str) -> Any:
    """Values in another dtype; ValueError if they change."""
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    if jnp.promote_types(values.dtype, dtype) != dtype:  # bits, since XLA may compare a subnormal number as zero
        bits = f"u{values.dtype.itemsize}"
        same = (result.astype(values.dtype).view(bits) == values.view(bits)).all()
        check(same, f"its {what} of dtype {values.dtype} are not exact in {np.dtype(dtype).name}")
    return result


def weight_arguments(parts: Pieces, kind: str, symmetric: bool) -> dict[str, Any]:
    """The arguments of a weight in a ``quantization_config`` of compressed-tensors.

    Raises:
        ValueError: for groups that do not divide the last axis. Blocks may do so.
    """
    (rows, _), (out, columns) = parts.kinds, parts.codes.shape
    block, size = group_lengths(parts), None
    if rows == WHOLE_AXIS and block[1] == columns:
        strategy = "tensor"
    elif rows != OWN_SCALE and out > 1:
        strategy = "block"
    else:
        strategy, size = ("channel", None) if block[1] == columns else ("group", block[1])
        check(columns % block[1] == 0, f"its groups of {block[1]} do not divide its last axis of {columns}")
    facts = {"num_bits": parts.fmt.element.bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    facts |= {"group_size": size, "dynamic": False}
    structure = [kind if isinstance(kind, int) else size for kind, size in zip(parts.kinds, block, strict=True)]
    return facts | ({"block_structure": structure} if strategy == "block" else {})


def group_lengths(parts: Pieces) -> list[int]:
    """The size of the groups along each axis, at most its length."""
    pairs = zip(parts.kinds, parts.codes.shape, strict=True)
    return [1 if kind == OWN_SCALE else n if kind == WHOLE_AXIS else min(int(kind), n) for kind, n in pairs]


# -- integers of a few bits in bytes and words: dense streams of bits, the lowest bit first ----------------------------


def unpack_bits(rows: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The codes of rows of bytes: ``count`` for each row, one byte each.

    Code i of a row has the bits [bits * i, bits * (i + 1)) of the row's little-endian stream.
    """
    if bits == 8:
        return rows[..., :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (rows[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*rows.shape[:-1], -1)[..., :count]
    stream = numpy_of(rows).unpackbits(rows, axis=-1, count=count * bits, bitorder="little")
    stream = stream.reshape(*rows.shape[:-1], count, bits)
    codes = stream[..., 0]
    for bit in range(1, bits):
        codes = codes | stream[..., bit] << np.uint8(bit)
    return codes


def pack_bits(codes: np.ndarray, bits: int, multiple: int = 1) -> np.ndarray:
    """The inverse of `unpack_bits`; each row is padded with zeros to a multiple of so many bytes."""
    count = codes.shape[-1]
    size = -(-count * bits // (8 * multiple)) * multiple
    if bits == 8:
        return _pad_rows(codes, size)
    if 8 % bits == 0:
        each = 8 // bits
        groups = _pad_rows(codes, size * each).reshape(*codes.shape[:-1], size, each)
        rows = groups[..., 0]
        for place in range(1, each):
            rows = rows | groups[..., place] << np.uint8(bits * place)
        return rows
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    stream = stream.reshape(*codes.shape[:-1], count * bits)
    return _pad_rows(numpy_of(codes).packbits(stream, axis=-1, bitorder="little"), size)


def codes_from_words(words: np.ndarray, bits: int, count: int, each: int | None = None) -> np.ndarray:
    """The codes of rows of 32-bit words: without gaps, or so many in each word."""
    if each is None:
        return unpack_bits(np.ascontiguousarray(words).view(np.uint8), bits, count)
    shifts = np.arange(0, bits * each, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :count]


def codes_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as rows of int32, each padded to whole words."""
    return pack_bits(codes, bits, multiple=4).view("<i4")


def word_count(count: int, bits: int, each: int | None = None) -> int:
    """The number of 32-bit words for so many codes, without gaps or with so many in each word."""
    return -(-count * bits // 32) if each is None else -(-count // each)


def _pad_rows(rows: Any, size: int) -> Any:
    rows = np.ascontiguousarray(rows) if isinstance(rows, np.ndarray) else rows
    more = size - rows.shape[-1]
    return numpy_of(rows).pad(rows, [*((0, 0),) * (rows.ndim - 1), (0, more)]) if more else rows
