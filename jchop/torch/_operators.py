"""Rounding as operators of torch: opaque to torch.compile, with shape and vmap rules.

Specs are passed as text, keys as `words`: an int32 tensor of two words of key data (their bits), followed by numbers
that are folded into the key in turn; empty without random bits. `batch` is the number of leading axes of tensors and
words that vmap added; each row is rounded separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax

from jchop._common.bit_ops import enable_x64_for
from jchop._common.settings import always_jit
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import parse
from jchop.torch._bridge import as_tensor, check_tensor, dense, import_tensor, inverse_order

Array = jax.Array
Tensor = torch.Tensor

#: The dtypes that can be rounded, and their names in JAX.
CARRIER_NAMES: dict[torch.dtype, str] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def check_carrier(name: str, value: object, *, complex_too: bool = True) -> None:
    """Refuse all but tensors of a carrier dtype."""
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    dtypes = [dtype for dtype in CARRIER_NAMES if complex_too or not dtype.is_complex]
    if value.dtype not in dtypes:
        complex_remedy = f"Pass its parts, {name}.real and {name}.imag"
        remedy = complex_remedy if value.is_complex() else "Convert it first, for example x.float()"
        raise TypeError(
            f"{name} has dtype {value.dtype}, which is not a carrier; allowed: {', '.join(map(str, dtypes))}. {remedy}"
        )


# -- rounding ----------------------------------------------------------------------------------------------------------


def round_now(x: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    """`x` rounded, with the same strides if its memory has no gaps: the operator's function, called directly."""
    return _run_elementwise(_round_rows, (x,), words, copy, spec=spec, batch=batch)


round_operator = torch.library.custom_op(
    "jchop::round_to_format",
    round_now,
    mutates_args=(),
    schema="(Tensor x, Tensor words, str spec, int batch, bool copy) -> Tensor",
)


@torch.library.custom_op(
    "jchop::within_range",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor words, str spec, int batch) -> Tensor",
)
def within_range_operator(gradient: Tensor, x: Tensor, words: Tensor, spec: str, batch: int) -> Tensor:
    """`gradient`, but 0 for elements of `x` that overflow."""
    gradient = gradient.to(memory_format=torch.contiguous_format)
    return _run_elementwise(_within_range_rows, (gradient, x.contiguous()), words, True, spec=spec, batch=batch)


def _run_elementwise(
    function: Callable[..., Array], tensors: Sequence[Tensor], words: Tensor, copy: bool, **options: Any
) -> Tensor:
    """A jitted function of tensors, with all axes in the memory order of the first tensor."""
    views = [dense(tensor.detach(), copy) for tensor in tensors]
    order = views[0][1]
    result = run_on_tensors(function, [view for view, _ in views], words, order=order, **options)
    return _restore_order(result, order, views[0][0])


def run_on_tensors(function: Callable[..., Any], tensors: Sequence[Tensor], words: Tensor, **options: Any) -> Any:
    """A jitted function of tensors, contiguous and aligned, and words; its results as tensors.

    On the CPU the tensors are passed as NumPy arrays of the same memory, which JAX reads in place; this has less
    overhead than imported arrays. The call waits for its results, because the caller may then overwrite a tensor.
    """
    with enable_x64_for(CARRIER_NAMES[tensors[0].dtype]):
        if tensors[0].is_cuda:
            result = function(*map(import_tensor, tensors), import_words(words), **options)
        else:
            with jax.default_device(_cpu_device()):
                result = function(*map(_host_array, tensors), import_words(words), **options)
    to_tensor = as_tensor if tensors[0].is_cuda else _fetch
    return to_tensor(result) if isinstance(result, Array) else jax.tree.map(to_tensor, result)  # a tree takes time


#: Bytes that can be copied in the time in which JAX wakes a thread to share its memory.
_SHORT_RESULT_BYTES = 1 << 16
_DTYPES_BY_NAME = {name: dtype for dtype, name in CARRIER_NAMES.items()} | {"uint8": torch.uint8}


def _fetch(result: Array) -> Tensor:
    """A finished result on the CPU: a copy if that is faster than sharing its memory."""
    dtype = _DTYPES_BY_NAME.get(result.dtype.name)
    if dtype is None or result.nbytes > _SHORT_RESULT_BYTES:
        return as_tensor(result.block_until_ready())
    tensor = torch.empty(result.shape, dtype=dtype, device="cpu")
    _host_array(tensor)[...] = np.asarray(result)
    return tensor


def _host_array(tensor: Tensor) -> np.ndarray:
    """A NumPy array that shares the memory of a tensor."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@lru_cache(maxsize=1)
def _cpu_device() -> Any:
    """The CPU device on which JAX places imported arrays."""
    return next(iter(import_tensor(torch.zeros(1)).sharding.device_set))


def import_words(words: Tensor) -> Any:
    """Words as a JAX array; None if there are none."""
    if not words.shape[-1]:
        return None
    return import_tensor(words) if words.is_cuda else words.numpy()


def _restore_order(tensor: Tensor, order: tuple[int, ...], source: Tensor) -> Tensor:
    """The result with its axes in the original order, and never in the memory of the source."""
    if tensor.data_ptr() == source.data_ptr() and tensor.numel():
        tensor = tensor.clone()
    return tensor if order == tuple(range(len(order))) else tensor.permute(inverse_order(order))


@round_operator.register_fake
def _fake_round(x: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    del words, copy
    require_rounding(x.dtype, x.ndim - batch, spec)
    return torch.empty_like(x)


@within_range_operator.register_fake
def _fake_within_range(gradient: Tensor, x: Tensor, words: Tensor, spec: str, batch: int) -> Tensor:
    del x, words, spec, batch
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def add_vmap_rule(operator: Any) -> None:
    """Give an operator its rule for vmap: the new axis is the first of the axes that `batch` counts.

    The tensors are the first arguments, with the words as the last of them; the spec and `batch` follow.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        spec, batch, *options = arguments[len(tensors) :]
        rows = [
            x.expand(info.batch_size, *x.shape).contiguous() if axis is None else x.movedim(axis, 0)
            for x, axis in zip(tensors, in_dims, strict=False)
        ]
        result = operator(*rows, spec, batch + 1, *options)
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    operator.register_vmap(rule)


add_vmap_rule(round_operator)
add_vmap_rule(within_range_operator)


@lru_cache(maxsize=256)
def require_rounding(dtype: torch.dtype, ndim: int, spec: str) -> None:
    """Raise the errors of rounding before anything is computed."""
    x = jax.ShapeDtypeStruct((1,) * ndim, CARRIER_NAMES[dtype])
    with enable_x64_for(x.dtype):
        jax.eval_shape(lambda x: round_to_format(x, parse(spec), jax.random.key(0), gradient_key=jax.random.key(0)), x)


@partial(always_jit, static_argnames=("spec", "batch", "order"))
def _round_rows(x: Array, words: Array | None, *, spec: str, batch: int, order: tuple[int, ...]) -> Array:
    function = vmap_rows(lambda x, words: round_to_format(x, parse(spec), key_of_words(words)), batch)
    return function(x.transpose(inverse_order(order)), words).transpose(order)


@partial(always_jit, static_argnames=("spec", "batch", "order"))
def _within_range_rows(
    g: Array, x: Array, words: Array | None, *, spec: str, batch: int, order: tuple[int, ...]
) -> Array:
    del order  # both are contiguous

    def pull_back(g: Array, x: Array, words: Array | None) -> Array:
        return jax.vjp(lambda x: round_to_format(x, parse(spec), key_of_words(words)), x)[1](g)[0]

    return vmap_rows(pull_back, batch)(g, x, words)


def vmap_rows(function: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """`function` under one `jax.vmap` for each leading axis."""
    for _ in range(batch):
        function = jax.vmap(function)
    return function


def key_of_words(words: Array | None) -> Array | None:
    """The key of words; None if there are none."""
    if words is None:
        return None
    bits = lax.bitcast_convert_type(jnp.asarray(words), jnp.uint32)
    key = jax.random.wrap_key_data(bits[:2], impl="threefry2x32")
    for index in range(2, words.shape[-1]):
        key = jax.random.fold_in(key, bits[index])
    return key
