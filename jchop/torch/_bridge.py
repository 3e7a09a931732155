"""Conversion between tensors and JAX arrays, which share memory through DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import torch

from jchop._common.bit_ops import enable_x64_for
from jchop.torch._plan import outside_graphs

Array = jax.Array

#: Alignment that XLA's CPU backend requires of a buffer that it did not allocate.
ALIGNMENT = 64
_DEVICES = ("cpu", "cuda")


@outside_graphs
def as_jax(tensor: torch.Tensor, *, copy: bool = False) -> Array:
    """A JAX array that shares the memory of a tensor.

    JAX arrays are immutable, so the tensor must not be written to while the array exists.

    Args:
        tensor: any dtype that both libraries have, any shape, on the CPU or a CUDA device. Its gradient is
            not converted.
        copy: whether a tensor may be copied if its memory cannot be shared: if it is not contiguous in C order, starts
            at an address that is not a multiple of 64 bytes (as slices may), or is a lazy conjugate or negative.
            Default False: such a tensor is an error.

    Returns:
        An array of the same shape, dtype and device; float64 and complex128 keep their dtype for every
        ``jax_enable_x64``.

    Raises:
        TypeError: if `tensor` is not a tensor, or is sparse.
        ValueError: for a tensor that would have to be copied, or one on another kind of device.

    Example:
        >>> import torch, jchop as jc
        >>> x = torch.arange(4.0)
        >>> array = jc.torch.as_jax(x)
        >>> array.tolist(), array.unsafe_buffer_pointer() == x.data_ptr()
        ([0.0, 1.0, 2.0, 3.0], True)
    """
    check_tensor("tensor", tensor)
    return import_tensor(contiguous(tensor, copy))


@outside_graphs
def as_tensor(array: Array) -> torch.Tensor:
    """A tensor that shares the memory of a JAX array.

    JAX arrays are immutable, so the tensor must not be written to while the array exists.

    Args:
        array: any dtype that both libraries have, any shape, on one device.

    Returns:
        A contiguous tensor of the same shape, dtype and device.

    Raises:
        TypeError: if `array` is not a JAX array, is traced by JAX, or has a dtype that torch cannot read, such as int4.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.array([1.0, 0.3, -7.5, 100.0]), jc.formats.mxfp4(group=2))
        >>> jc.torch.as_tensor(q.qvalue)
        tensor([ 38, 121], dtype=torch.uint8)
    """
    if not isinstance(array, Array):
        raise TypeError(f"array={array!r} must be a JAX array; for a NumPy array use torch.from_numpy")
    check_has_numbers("array", array)
    try:
        return torch.from_dlpack(array)
    except (RuntimeError, BufferError) as error:
        raise TypeError(
            f"array has dtype {array.dtype}, which torch cannot read; convert it by astype first"
        ) from error


# -- for the other files -----------------------------------------------------------------------------------------------


def import_tensor(tensor: torch.Tensor) -> Array:
    """The array of a contiguous tensor that needs no copy."""
    with enable_x64_for(_X64_DTYPES.get(tensor.dtype, "float32")):
        return jax.dlpack.from_dlpack(tensor)


_X64_DTYPES = dict.fromkeys((torch.float64, torch.complex128, torch.int64), "float64")


def contiguous(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """A detached tensor with memory that JAX can read; copied if necessary and `copy` allows it.

    Raises:
        ValueError: for a tensor that would have to be copied.
    """
    data = tensor.detach()
    if (reason := _hindrance(data)) is None and not data.is_contiguous():
        reason = f"has strides {tuple(data.stride())} for shape {tuple(data.shape)}"
    return data if reason is None else _copy_or_raise(data, reason, copy)


def dense(tensor: torch.Tensor, copy: bool) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A detached tensor's memory as a contiguous one whose axes are permuted, and the permutation.

    This works without a copy for transposed and channels-last tensors; others are copied if `copy` allows it.

    Raises:
        ValueError: for a tensor that would have to be copied.
    """
    reason = _hindrance(tensor)
    if reason is None:
        if tensor.is_contiguous():
            return tensor, tuple(range(tensor.ndim))
        order = tuple(sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis)))
        if (view := tensor.permute(order)).is_contiguous():
            return view, order
        reason = f"has gaps or overlaps in memory (strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)})"
    return _copy_or_raise(tensor, reason, copy), tuple(range(tensor.ndim))


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """The inverse of a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hindrance(tensor: torch.Tensor) -> str | None:
    """The reason, apart from strides, why the memory of a tensor cannot be shared; None if there is none."""
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative"
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        return f"starts at an address that is not a multiple of {ALIGNMENT} bytes"
    return None


def _copy_or_raise(tensor: torch.Tensor, reason: str, copy: bool) -> torch.Tensor:
    if not copy:
        raise ValueError(f"tensor {reason}, so its memory cannot be shared with JAX: pass copy=True to allow a copy")
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def check_has_numbers(name: str, value: Any) -> None:
    """Refuse arrays that JAX traces: they have no numbers yet."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} is traced by JAX, and torch needs its numbers: call this outside of jax.jit, vmap and grad"
        )


def check_tensor(name: str, value: object) -> None:
    """Refuse all but dense tensors on a device that both libraries support."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}={value!r} must be a torch.Tensor")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; allowed: torch.strided (call to_dense() first)")
    if value.device.type not in _DEVICES:
        raise ValueError(f"{name} is on device {value.device}; allowed: {', '.join(_DEVICES)}")
