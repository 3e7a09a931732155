"""Tensors and JAX arrays in shared memory; operators of torch: opaque to torch.compile, with shape and vmap rules.

Specs are passed as text, keys as `words`: an int32 tensor of two words of key data (their bits). Numbers follow that
are folded into the key in turn; without random bits it is empty. `batch` is the number of leading axes of tensors and
words that vmap added; each row is computed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import Array, lax
from torch import Tensor

from jchop._common.bit_ops import CARRIERS, enable_x64_for
from jchop._common.checks import check, check_instance, check_int
from jchop._common.settings import always_jit
from jchop._round.arguments import has_tracer
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Gradient, Spec, as_spec, parse

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compile_constant(function: AnyFunction) -> AnyFunction:
    """A function whose results are constants for torch.compile, like its arguments.

    Equivalent to `torch.compiler.assume_constant_result`, which would import the compiler and take seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: AnyFunction) -> AnyFunction:
    """A function that torch.compile does not trace: its graph ends before a call, and another one begins after it.

    Equivalent to `torch.compiler.disable`, which would import the compiler and take seconds.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _disable_compile(function):
            return function.outside(*args, **kwargs)  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@compile_constant
def _disable_compile(function: Any) -> bool:
    """True; runs while torch.compile traces, which finds the new attribute afterwards."""
    function.outside = torch.compiler.disable(function)
    return True


class SpecPlan(NamedTuple):
    """The facts of a spec: constants for torch.compile."""

    spec: str  # without the rounding of the cotangent
    draws: bool
    gradient: str | None
    gradient_draws: bool


@compile_constant
def plan_of(spec: Any) -> SpecPlan:
    """The plan of a spec, a format or a text."""
    return _cached_plan(spec if isinstance(spec, str) else as_spec(spec, scaled=True))


@lru_cache(maxsize=256)
def _cached_plan(value: Spec | str) -> SpecPlan:
    """The texts of a spec's rounding and of its cotangent's, and whether they draw."""
    spec = as_spec(value, scaled=True)
    backward = spec.gradient.round
    forward = replace(spec, gradient=Gradient(clipped=spec.gradient.clipped))
    gradient = (None, False) if backward is None else (str(backward), backward.rounding.stochastic)
    return SpecPlan(str(forward), spec.rounding.stochastic, *gradient)


@compile_constant
def clips_gradient(spec: str) -> bool:
    """Whether the gradient is zero for values that overflow."""
    return as_spec(spec, scaled=True).gradient.clipped


# -- words -------------------------------------------------------------------------------------------------------------


def key_words(numbers: Sequence[int]) -> Tensor:
    """Words of 32 bits as an int32 tensor of the same bits."""
    return torch.tensor([number - (1 << 32) if number >> 31 else number for number in numbers], dtype=torch.int32)


def seed_numbers(seed: int | tuple[int, ...], name: str = "seed") -> tuple[int, ...]:
    """The two words of the key of a seed, and the numbers after it, which are folded in."""
    first, *fold_ins = seed if isinstance(seed, tuple) else (seed,)
    first = check_int(name, first, 0, (1 << 64) - 1)
    return (first >> 32, first & 0xFFFF_FFFF, *(check_int(name, fold_in, 0, (1 << 32) - 1) for fold_in in fold_ins))


def rounding_words(
    spec: str, draws: bool, seed: int | None, generator: torch.Generator | None, name: str = "seed"
) -> Tensor:
    """The words of one rounding; none if the spec is not stochastic.

    Raises:
        TypeError, ValueError: for an invalid seed, or if neither seed nor generator is given.
    """
    check(seed is None or generator is None, f"{name}={seed!r} and generator= are given; pass one of them")
    if not draws:
        return key_words(())
    if seed is not None:
        return key_words(seed_numbers(seed, name))
    check(generator is not None, f"spec={spec!r} rounds stochastically: pass {name}=, an integer, or generator=")
    check_instance("generator", generator, torch.Generator, "a torch.Generator")
    return generator_words(generator)


def generator_words(generator: torch.Generator | None = None) -> Tensor:
    """The words of a key, from a generator; None: torch's global one of the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, generator=generator, device=device)


#: Alignment that XLA's CPU backend requires of a buffer that it did not allocate.
ALIGNMENT = 64
_DEVICES = ("cpu", "cuda")


@outside_graphs
def as_jax(tensor: torch.Tensor, *, copy: bool = False) -> Array:
    """Returns a JAX array that shares the memory of a tensor.

    JAX arrays are immutable, so the tensor must not be written to while the array exists.

    Args:
        tensor: a tensor of any dtype that both libraries have. Any shape, on the CPU or a CUDA device. Its gradient is
            not converted.
        copy: whether a tensor may be copied if its memory cannot be shared. Memory is shared if it is contiguous in C
            order and starts at a multiple of 64 bytes, which slices may not. A lazy conjugate or negative cannot be
            shared, either. Default False: an error then.

    Returns:
        An array of the same shape, dtype and device. float64 and complex128 keep their dtype for every
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
    """Returns a tensor that shares the memory of a JAX array.

    JAX arrays are immutable, so the tensor must not be written to while the array exists.

    Args:
        array: an array of any dtype that both libraries have. Any shape, on one device.

    Returns:
        A contiguous tensor of the same shape, dtype and device.

    Raises:
        TypeError: if `array` is not a JAX array, is traced by JAX, or has a dtype that torch cannot read, as int4.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.array([1.0, 0.3, -7.5, 100.0]), jc.formats.mxfp4(group=2))
        >>> jc.torch.as_tensor(q.qvalue)
        tensor([ 38, 121], dtype=torch.uint8)
    """
    check_instance("array", array, Array, "a JAX array; for a NumPy array use torch.from_numpy")
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
    check(copy, f"tensor {reason}, so its memory cannot be shared with JAX: pass copy=True to allow a copy")
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def check_has_numbers(name: str, value: Any) -> None:
    """Refuse arrays that JAX traces: they have no numbers yet."""
    if has_tracer(value):
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


#: The dtypes that can be rounded, and their names in JAX.
CARRIER_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in (*CARRIERS, "complex64", "complex128")}


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


def define_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """An operator of torch: its name and types, its results without numbers, and its rule for vmap.

    Its arguments are tensors, of which the last are words, then a spec, a count of axes, ``batch``, and options. The
    axis that `torch.func.vmap` maps becomes the first of the ``batch`` axes, which JAX maps.
    """
    name, _, types = schema.partition("(")

    def define(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"jchop::{name}", function, mutates_args=(), schema=f"({types}")
        operator.register_fake(fake)

        @operator.register_vmap
        def _(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            spec, batch, *options = arguments[len(tensors) :]
            rows = [
                x.expand(info.batch_size, *x.shape).contiguous() if axis is None else x.movedim(axis, 0)
                for x, axis in zip(tensors, in_dims, strict=False)
            ]
            result = operator(*rows, spec, batch + 1, *options)
            return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

        return operator

    return define


def round_now(x: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    """`x` rounded, without an operator: all axes in the order of its memory, and never in its memory."""
    view, order = dense(x.detach(), copy)
    result = _in_own_memory(run_on_tensors(_round_rows, [view], words, spec=spec, batch=batch, order=order), view)
    return result if order == tuple(range(len(order))) else result.permute(inverse_order(order))


def _fake_round(x: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    require_rounding(x.dtype, x.ndim - batch, spec)
    return torch.empty_like(x)


round_operator = define_operator(
    "round_to_format(Tensor x, Tensor words, str spec, int batch, bool copy) -> Tensor", _fake_round
)(round_now)


@define_operator(
    "within_range(Tensor gradient, Tensor x, Tensor words, str spec, int batch) -> Tensor",
    lambda gradient, *_: torch.empty_like(gradient, memory_format=torch.contiguous_format),
)
def within_range_operator(gradient: Tensor, x: Tensor, words: Tensor, spec: str, batch: int) -> Tensor:
    """`gradient`, but 0 for elements of `x` that overflow."""
    tensors = [contiguous(tensor, True) for tensor in (gradient, x)]
    return _in_own_memory(run_on_tensors(_within_range_rows, tensors, words, spec=spec, batch=batch), tensors[0])


def _in_own_memory(result: Tensor, source: Tensor) -> Tensor:
    """A result that is never in the memory of its source, which JAX returns where nothing changes."""
    return result.clone() if result.data_ptr() == source.data_ptr() else result


def run_on_tensors(function: Callable[..., Any], tensors: Sequence[Tensor], words: Tensor, **options: Any) -> Any:
    """A jitted function of tensors, contiguous and aligned, and words; its results as tensors.

    On the CPU the tensors are passed as NumPy arrays of the same memory, which JAX reads in place. This has less
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


@partial(always_jit, static_argnames=("spec", "batch"))
def _within_range_rows(g: Array, x: Array, words: Array | None, *, spec: str, batch: int) -> Array:
    return gradient_rows(lambda x, words: round_to_format(x, parse(spec), key_of_words(words)), batch, g, words, x)[0]


def gradient_rows(function: Callable[..., Array], batch: int, g: Array, words: Array | None, *inputs: Array) -> Any:
    """The gradients of the inputs of a function of inputs and words, row by row."""
    each = vmap_rows(lambda g, words, *inputs: jax.vjp(lambda *x: function(*x, words), *inputs)[1](g), batch)
    return each(g, words, *inputs)


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
