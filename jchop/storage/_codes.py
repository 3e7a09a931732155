"""Storage of codes: packed into bytes, or in a dtype of the same bits; and the codes of plain formats."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import CARRIERS, FLOAT32, FLOAT64, Carrier
from jchop._common.settings import always_jit
from jchop._core.rounding.codes import decode_elements, encode_elements, pack_codes, unpack_codes
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.grid import carrier_holds
from jchop._core.scaled.elements import narrow_16_bit, widen_16_bit
from jchop._core.scaled.groups import gather_sparse, scatter_sparse
from jchop._spec.spec import Spec
from jchop.formats import (
    ElementFormat,
    FloatFormat,
    TaperedFormat,
    UniformFormat,
    bfloat16,
    binary16,
    binary32,
    binary64,
    float8_e4m3fn,
    float8_e5m2,
)

Array = jax.Array
#: Codes of NumPy or JAX; the result of a function is of the same library.
Codes = Any

#: The format of each carrier.
CARRIER_FORMATS: dict[str, FloatFormat] = {
    "float16": binary16, "bfloat16": bfloat16, "float32": binary32, "float64": binary64
}  # fmt: skip
#: Formats whose codes are the bits of a dtype that JAX's backends, other libraries and files support.
_NATIVE_DTYPES: dict[ElementFormat, str] = {fmt: name for name, fmt in CARRIER_FORMATS.items()}
_NATIVE_DTYPES |= {float8_e4m3fn: "float8_e4m3fn", float8_e5m2: "float8_e5m2"}
#: The most bits of codes without a dtype of the same values.
_MOST_CODE_BITS = 16


def native_dtype(fmt: ElementFormat) -> np.dtype | None:
    """The dtype with the values of `fmt`, bit for bit; None if there is no widely supported one."""
    return jnp.dtype(_NATIVE_DTYPES[fmt]) if fmt in _NATIVE_DTYPES else None


def code_dtype(fmt: ElementFormat) -> np.dtype:
    """The dtype of stored codes.

    The dtype of the same values if there is one (the floats above; int8 and uint8 for 8-bit integers and fixed point),
    uint16 for other codes of 9 to 16 bits, else uint8: codes of 8 bits, or packed codes of fewer.

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
    if isinstance(fmt, UniformFormat) and fmt.bits == 8:
        return np.dtype(np.int8 if fmt.signed else np.uint8)
    return np.dtype(np.uint8 if fmt.bits <= 8 else np.uint16)


def packs_codes(fmt: ElementFormat) -> bool:
    """Whether several codes share a byte."""
    return fmt.bits < 8


def store_codes(codes: Codes, fmt: ElementFormat) -> Codes:
    """Unsigned codes, packed if they have fewer than 8 bits, in the stored dtype; `load_codes` is the inverse."""
    return _bitcast_codes(codes, code_dtype(fmt))


def load_codes(codes: Codes, fmt: ElementFormat) -> Codes:
    """Stored codes as unsigned integers, still packed."""
    check_code_dtype(codes, fmt)
    return _bitcast_codes(codes, np.dtype(f"u{code_dtype(fmt).itemsize}"))


def check_code_dtype(codes: Codes, fmt: ElementFormat) -> None:
    """Refuses numbers in the place of codes, as arithmetic on the leaves of a QArray makes them.

    Raises:
        ValueError: for a dtype of another size than that of codes.
    """
    own = code_dtype(fmt)
    if codes.dtype == jax.dtypes.float0:
        raise ValueError("the QArray is a gradient, in which integer codes have none (float0): only its scales, and "
                         "float zero points, have numbers")  # fmt: skip
    if codes.dtype.itemsize != own.itemsize:
        raise ValueError(
            f"qvalue is {codes.dtype}, and the codes of its spec are {own}: arithmetic on the leaves of a QArray does "
            "not compute with its numbers; jc.storage.dequantize_params has them, and jc.optim.apply_updates packs sums"
        )


def unpack_entries(codes: Codes, fmt: ElementFormat, count: int) -> Codes:
    """Stored codes, unpacked to one entry for each element, so that any axis can be cut or moved."""
    return _in_library_of(_unpack_codes(codes, fmt.bits, count), codes) if packs_codes(fmt) else codes


def pack_entries(entries: Codes, fmt: ElementFormat) -> Codes:
    """The inverse of `unpack_entries`."""
    return _in_library_of(_pack_codes(entries, fmt.bits), entries) if packs_codes(fmt) else entries


_unpack_codes = always_jit(unpack_codes, static_argnums=(1, 2), inline=True)
_pack_codes = always_jit(pack_codes, static_argnums=1, inline=True)


def _bitcast_codes(codes: Codes, dtype: np.dtype) -> Codes:
    return codes.view(dtype) if isinstance(codes, np.ndarray) else lax.bitcast_convert_type(codes, dtype)


def _in_library_of(result: Array, codes: Codes) -> Codes:
    """A result as NumPy if `codes` is NumPy."""
    return np.asarray(result) if isinstance(codes, np.ndarray) else result


# -- n of every m numbers ----------------------------------------------------------------------------------------------


def sparse_codes(qvalue: Codes, mask: Array, spec: Spec) -> tuple[Codes, Array]:
    """The codes of the kept numbers, and one bit for each number, from the codes of all; both as they are stored.

    Args:
        qvalue: stored codes.
        mask: which numbers are kept.
        spec: with `sparse`, and axes counted from the end.
    """
    return jax.tree.map(
        lambda v: _in_library_of(v, qvalue), _make_sparse_codes(jnp.asarray(qvalue), jnp.asarray(mask), spec=spec)
    )


def dense_codes(qvalue: Codes, places: Codes, size: int, spec: Spec) -> tuple[Codes, Array]:
    """The codes of all numbers, and which are kept, as the inverse of `sparse_codes`; codes of others mean nothing."""
    arrays = _make_dense_codes(jnp.asarray(qvalue), jnp.asarray(places), size=size, spec=spec)
    return jax.tree.map(lambda v: _in_library_of(v, qvalue), arrays)


@partial(always_jit, static_argnames="spec", inline=True)
def _make_sparse_codes(qvalue: Array, mask: Array, *, spec: Spec) -> tuple[Array, Array]:
    fmt, element = spec.scaled, spec.element
    assert fmt is not None and fmt.sparse is not None
    codes = unpack_entries(load_codes(qvalue, element), element, mask.shape[-1])
    sparse = gather_sparse(codes, mask, fmt.sparse, fmt.axis_of_sparse % mask.ndim)
    return store_codes(pack_entries(sparse, element), element), pack_codes(mask, 1)


@partial(always_jit, static_argnames=("size", "spec"), inline=True)
def _make_dense_codes(qvalue: Array, places: Array, *, size: int, spec: Spec) -> tuple[Array, Array]:
    fmt, element = spec.scaled, spec.element
    assert fmt is not None and fmt.sparse is not None
    mask = unpack_codes(places, 1, size) != 0
    codes = unpack_entries(qvalue, element, fmt.kept_shape(mask.shape)[-1])
    return pack_entries(scatter_sparse(codes, mask, fmt.sparse, fmt.axis_of_sparse % mask.ndim), element), mask


# -- formats without a scale -------------------------------------------------------------------------------------------


def encode_unscaled(values: Array, fmt: ElementFormat) -> Array:
    """The stored codes of values of a plain format, packed along the last axis.

    If `fmt` has no NaN, a NaN becomes its largest value, as in scaled formats.
    """
    carrier = CARRIERS[values.dtype.name]
    if fmt == binary64 and carrier.width < 64:
        raise ValueError(f"x has dtype {carrier.name}, which binary64 would store in more bits than it has")
    codes = encode_elements(widen_16_bit(values, carrier), fmt, _arithmetic_carrier(carrier))
    if not fmt.has_nan:
        codes = jnp.where(jnp.isnan(values), np.asarray(fmt.code_of(fmt.max), codes.dtype), codes)
    return store_codes(pack_entries(codes, fmt), fmt)


def needs_float64(fmt: ElementFormat) -> bool:
    """Whether values of a plain format are computed in float64: binary64, and tapered formats with a wider range."""
    return fmt == binary64 or (isinstance(fmt, TaperedFormat) and not carrier_holds(Spec(fmt), FLOAT32))


def decode_unscaled(codes: Array, fmt: ElementFormat, count: int, carrier: Carrier) -> Array:
    """The values of stored codes, rounded to nearest if `carrier` does not hold them."""
    compute = FLOAT64 if needs_float64(fmt) else _arithmetic_carrier(carrier)
    values = decode_elements(unpack_entries(load_codes(codes, fmt), fmt, count), fmt, compute)
    if compute.width == carrier.width:
        return values
    values = round_to_spec(values, Spec(CARRIER_FORMATS[carrier.name]), compute)
    if compute.width == 64:
        return values.astype(carrier.name)
    return narrow_16_bit(values, carrier)


def _arithmetic_carrier(carrier: Carrier) -> Carrier:
    """The carrier of the arithmetic: float32 for 16-bit numbers."""
    return CARRIERS["float64" if carrier.width == 64 else "float32"]
