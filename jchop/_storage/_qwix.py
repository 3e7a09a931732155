"""Conversion between QArrays of jchop and qwix. qwix is imported when one of these functions runs."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop import formats
from jchop._common.bit_ops import FLOAT32, enable_x64_for
from jchop._common.checks import check
from jchop._common.files import require_extra
from jchop._core.rounding.codes import decode_elements
from jchop._spec.spec import Spec
from jchop._storage._array import QArray, check_qarray
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, AxisGrouping, grouping_fields
from jchop._storage._codes import CARRIER_FORMATS, batch_axes, load_codes, pack_entries, spec_of_part, store_codes

#: qwix's name of the type that it stores in another dtype.
_QWIX_NF4 = "nf4"


def to_qwix(q: QArray) -> Any:
    """Converts to a ``qwix.QArray`` of the same codes and scales, with one element of a native dtype for each code.

    Its scales are numbers of ``q.dtype``, or of a wider dtype if their format needs one. qwix multiplies and returns in
    that dtype. The scales of a group and of the tensor, as in nvfp4, become their product in float32, rounded once.
    The numbers of qwix may then differ by two units of the last place. Needs the extra ``qwix``.

    Args:
        q: integers of at most 8 bits, 8-bit floats with a JAX dtype, float4_e2m1fn or NF4. It has one scale for each
            group, and groups of equal size.

    Raises:
        ImportError: if qwix is not installed.
        TypeError: if `q` is not a QArray.
        ValueError: for data without a form in qwix: other elements, scales of several parts, float zero points, ragged
            groups.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.to_qwix(jc.quantize(jnp.ones((2, 8)), "int8(channel=0)")).qvalue.dtype  # doctest: +SKIP
        dtype('int8')
    """
    qwix = _import_qwix()
    check_qarray("q", q)
    fmt = spec_of_part(q.spec, q.ndim).scaled
    ok = fmt is not None and isinstance(fmt.scale, formats.FloatFormat) and fmt.zero_point != "float" and not fmt.sparse
    has = "one scale for each group, codes of all numbers, and zero points that are codes"
    check(ok, f"q is of {q.spec.format}; qwix has {has}")
    assert fmt is not None and isinstance(fmt.scale, formats.FloatFormat)
    name = next((name for name, own in _QWIX_ELEMENTS.items() if own == fmt.element), None)
    check(name is not None, f"q has elements of {fmt.element}, for which qwix has no type")
    qtype = name if name in _QWIX_TEXTS else jnp.dtype(name)
    groups = fmt.group_shape(q.shape[batch_axes(q.spec, q.shape, q.scale) :])
    core = q.shape[len(q.shape) - len(groups) :]
    if any(n % group for n, group in zip(core, groups, strict=True)):
        raise ValueError(f"q has shape {q.shape} and groups of {groups}; the groups of qwix have one size")
    with enable_x64_for(q.dtype):
        qvalue = _codes_to_native(jnp.asarray(q._entries()), fmt.element, qtype)
        scale, *tensor = map(jnp.asarray, jax.tree.leaves(q.scale))
        if scale.dtype.name not in CARRIER_FORMATS:
            scale = decode_elements(scale, fmt.scale, FLOAT32)
        if tensor:
            scale = scale * tensor[0].reshape(tensor[0].shape + (1,) * (scale.ndim - tensor[0].ndim))
        carrier = jnp.promote_types(scale.dtype, q.dtype)
        zero_point = None if q.zero_point is None else jnp.asarray(q.zero_point).astype(qvalue.dtype)
        return qwix.QArray(qvalue, scale.astype(carrier), zero_point, qtype)


def tokamax_ragged_dot(x: Any, w: Any, group_sizes: Array, dtype: Any) -> Array:
    """`jchop.ragged_dot` by tokamax."""
    if importlib.util.find_spec("tokamax") is None:
        raise ModuleNotFoundError("impl='tokamax' needs tokamax: pip install tokamax", name="tokamax")
    operands = [to_qwix(v) if isinstance(v, QArray) else jnp.asarray(v) for v in (x, w)]
    return importlib.import_module("tokamax").ragged_dot(*operands, group_sizes, preferred_element_type=dtype)


def from_qwix(q: Any) -> QArray:
    """Converts a ``qwix.QArray`` to a QArray of the same codes and scales.

    Args:
        q: a result of `to_qwix` or ``qwix.quantize``.

    Returns:
        A QArray whose groups follow the shape of the scales, under the rule "absmax" ("minmax" with zero points).

    Raises:
        ImportError: if qwix is not installed.
        TypeError: if `q` is not a ``qwix.QArray``.
        ValueError: for elements without a format in jchop, or zero points of another shape than the scales.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, qwix  # doctest: +SKIP
        >>> jc.from_qwix(qwix.quantize(jnp.ones((2, 8)), jnp.int8, channelwise_axes=(0,))).spec  # doctest: +SKIP
        Spec(...)
    """
    qwix = _import_qwix()
    check_qarray("q", q, qwix.QArray, "qwix.QArray")
    if q.zero_point is not None and q.zero_point.shape != q.scale.shape:
        raise ValueError(f"zero_point has shape {q.zero_point.shape}, and scale {q.scale.shape}; they must be alike")
    element, dtype = _element_of_qtype(q.qtype), np.dtype(q.scale.dtype)
    kinds = [_grouping_of_count(n, count) for n, count in zip(q.shape, q.scale.shape, strict=True)]
    scale, zero_point = CARRIER_FORMATS[dtype.name], None if q.zero_point is None else "integer"
    fmt = formats.ScaledFormat(element, scale=scale, zero_point=zero_point, **grouping_fields(kinds))
    with enable_x64_for(dtype):
        codes = _native_to_codes(q.qvalue, element)
        qvalue = store_codes(pack_entries(codes.reshape(codes.shape or (1,)), element), element)
        zero_point = None if q.zero_point is None else q.zero_point.astype(jnp.int32)
    return QArray(qvalue, q.scale, zero_point, Spec(fmt), q.shape[-1] if q.shape else None, dtype)


def _import_qwix() -> Any:
    require_extra("to_qwix and from_qwix", "qwix", ("qwix",))
    return importlib.import_module("qwix")


def _grouping_of_count(n: int, count: int) -> AxisGrouping:
    check(not (n % max(count, 1)), f"q has {count} scales along an axis of {n}, which they do not divide evenly")
    return OWN_SCALE if count == n else WHOLE_AXIS if count == 1 else n // count


# -- elements ----------------------------------------------------------------------------------------------------------


#: The elements of qwix's types by name, and the names of those that are no dtypes of JAX there.
_QWIX_ELEMENTS: dict[str, formats.ElementFormat] = {
    _QWIX_NF4: formats.nf4.element,
    **{n: f for n, f in formats.CATALOGUE.items() if f.bits in (4, 8) and f != formats.float8_e8m0fnu},
    **{f"int{bits}": formats.IntegerFormat(bits) for bits in range(2, 9)},
    **{f"uint{bits}": formats.IntegerFormat(bits, signed=False) for bits in (4, 8)},
}
_QWIX_TEXTS = (_QWIX_NF4, "int2", "int3", "int5", "int6", "int7")


def _element_of_qtype(qtype: Any) -> formats.ElementFormat:
    """The element format of a qtype of qwix."""
    text = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    text = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn", "nvfp4": "float4_e2m1fn"}.get(text, text)
    check(text in _QWIX_ELEMENTS, f"q has qtype={qtype!r}; allowed: {', '.join(_QWIX_ELEMENTS)}")
    return _QWIX_ELEMENTS[text]


def _codes_to_native(entries: Array, element: formats.ElementFormat, qtype: Any) -> Array:
    """Entries of codes as elements of qwix's dtype."""
    if isinstance(element, formats.CodebookFormat):
        return entries.astype(jnp.uint4)
    if isinstance(element, formats.IntegerFormat):
        up = 8 - element.bits
        signed = load_codes(entries, element) if element.bits == 8 else entries
        signed = lax.bitcast_convert_type(signed << up, jnp.int8) >> up if element.signed else signed
        return signed.astype(qtype if not isinstance(qtype, str) else jnp.int4 if element.bits <= 4 else jnp.int8)
    codes = load_codes(entries, element) if element.bits == 8 else entries.astype(jnp.uint4)
    return lax.bitcast_convert_type(codes, qtype)


def _native_to_codes(qvalue: Array, element: formats.ElementFormat) -> Array:
    """The inverse of `_codes_to_native`, as unsigned codes of a byte each."""
    if isinstance(element, formats.IntegerFormat):
        wide = qvalue.astype(jnp.int8 if element.signed else jnp.uint8)
        return lax.bitcast_convert_type(wide, jnp.uint8) & ((1 << element.bits) - 1)
    if isinstance(element, formats.CodebookFormat):
        return qvalue.astype(jnp.uint8)
    codes = lax.bitcast_convert_type(qvalue, jnp.uint8 if element.bits == 8 else jnp.uint4)
    return codes.astype(jnp.uint8)
