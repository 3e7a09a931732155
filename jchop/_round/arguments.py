"""Arguments of the public functions: arrays and their carriers, keys, offsets; NumPy results for NumPy operands."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer, eval_context
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jchop._common.bit_ops import CARRIERS, Carrier, enable_x64_for
from jchop._common.checks import as_numpy, check_int
from jchop._common.settings import jax_default_settings
from jchop._core.rounding.random_bits import STREAM_START, StreamOffset
from jchop._spec.spec import Spec

#: The argument `key`: a typed key, which a stochastic spec needs.
Key = Array | None
#: The key of the rounding and the key of the cotangent's rounding; None if it draws nothing.
Keys = tuple[Key, Key]

#: The named scope of the operations of a public function. `emulate` runs these operations unchanged.
JCHOP_SCOPE = "jchop_function"
#: The primitive of its results, which `emulate` rounds to the emulated arithmetic.
JCHOP_RESULT = "jchop_result"

_COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}


# -- arrays ------------------------------------------------------------------------------------------------------------


def as_array(name: str, value: Any) -> Array | np.ndarray:
    """A JAX array unchanged; any other value as a NumPy array in the machine's byte order.

    Raises:
        TypeError: for a tensor of torch, a QArray, a sparse array, a pytree or a model.
        ValueError: for integers of more than 64 bits.
    """
    if isinstance(value, Array):
        return value
    if not isinstance(value, np.ndarray):
        _check_array_type(name, value)
    array = as_numpy(name, value)
    if array.dtype == object and not (value is None or isinstance(value, np.ndarray)):
        if array.size and all(isinstance(number, int) for number in array.flat):
            raise ValueError(f"{name} has integers of more than 64 bits: pass an array of floats")
        raise TypeError(
            f"{name} is a {type(value).__name__}, not an array; jchop.nn.quantize takes models, and jax.tree.map calls "
            "a function for each leaf of a pytree"
        )
    return array


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a tensor of PyTorch, which this does not import."""
    return any((kind.__module__, kind.__name__) == ("torch", "Tensor") for kind in type(value).__mro__)


def _check_array_type(name: str, value: Any) -> None:
    """Refuses values that NumPy would read as something else; without an import of torch or of the storage."""
    if is_torch_tensor(value):
        raise TypeError(
            f"{name} is a torch.Tensor; jchop.torch.round_to_format and jchop.torch.quantize take tensors, other "
            f"functions take the array jchop.torch.as_jax({name})"
        )
    if hasattr(value, "qvalue"):
        raise TypeError(
            f"{name} is a QArray of codes; jchop.dot and jchop.einsum multiply codes, other functions take its "
            f"numbers, jchop.dequantize({name})"
        )
    if hasattr(value, "todense"):
        raise TypeError(
            f"{name} is a sparse {type(value).__name__}, not an array; pass its numbers, {name}.data, or "
            f"{name}.todense()"
        )
    if isinstance(value, Mapping):
        raise TypeError(
            f"{name} is a {type(value).__name__}, not an array; jax.tree.map calls a function for each leaf"
        )


def carrier_of_dtype(dtype: Any, name: str = "x", *, complex_too: bool = True) -> Carrier:
    """The carrier of arrays of `dtype`. Complex numbers have the carrier of their parts.

    Raises:
        TypeError: for a dtype that is not a carrier; the error has the argument's `name`.
    """
    dtypes = (*CARRIERS, *_COMPLEX_PARTS) if complex_too else tuple(CARRIERS)
    if dtype.name not in dtypes:
        raise TypeError(
            f"{name} has dtype {dtype}, which is not a carrier; allowed: {', '.join(dtypes)}. {_advice(name, dtype)}"
        )
    return CARRIERS[str(_COMPLEX_PARTS.get(dtype.name, dtype.name))]


def _advice(name: str, dtype: Any) -> str:
    if not (is_integer_or_bool(dtype) or jnp.issubdtype(dtype, jnp.inexact)):
        return "Pass a number or an array of floats"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return f"jchop.emulate(fun, spec) computes with complex numbers; here pass {name}.real and {name}.imag"
    return f"Convert it first, for example {name}.astype('float32')"


def as_operands(names: Sequence[str], values: Sequence[Any], *, complex_too: bool = False) -> list[Array | np.ndarray]:
    """Arrays of one dtype, which is a carrier, promoted as in `jax.numpy`.

    Integers and booleans beside floats get the dtype of the floats. By themselves they become float64 if one has 64
    bits, else float32. A Python number gets the dtype of the arrays beside it; without arrays it is float64. A NumPy
    array beside a JAX array is converted as in `jax.numpy`: without ``jax_enable_x64``, 64 bits become 32.

    Raises:
        TypeError: for a dtype that is neither a carrier nor of integers or booleans.
        ValueError: for a finite Python number beyond the range of the dtype.
    """
    operands: list[Any] = [
        v if type(v) in _PYTHON_NUMBERS else as_array(n, v) for n, v in zip(names, values, strict=True)
    ]
    for name, value in zip(names, operands, strict=True):
        if type(value) not in _PYTHON_NUMBERS and not is_integer_or_bool(value.dtype):
            carrier_of_dtype(value.dtype, name, complex_too=complex_too)
    dtype = _common_dtype(operands)
    return [
        _number_in_dtype(n, v, dtype) if type(v) in _PYTHON_NUMBERS else convert_dtype(v, dtype)
        for n, v in zip(names, operands, strict=True)
    ]


_PYTHON_NUMBERS = (bool, int, float)


def is_integer_or_bool(dtype: Any) -> bool:
    """Whether a dtype is of integers or booleans."""
    return jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_


def _common_dtype(values: Sequence[Any]) -> np.dtype:
    """The dtype of arrays and Python numbers together, by the lattice of `jax.numpy` and with 64 bits if one has."""
    arrays = [value for value in values if type(value) not in _PYTHON_NUMBERS]
    if not arrays:
        return np.dtype("float64")
    in_jax = any(isinstance(value, Array) for value in arrays)

    def operand(value: Any) -> Any:
        if type(value) in _PYTHON_NUMBERS:
            return type(value)
        if isinstance(value, Array) or not in_jax:
            return value
        return jax.dtypes.canonicalize_dtype(value.dtype)

    wide = not in_jax or any(isinstance(value, Array) and value.dtype.itemsize == 8 for value in arrays)
    with jax_default_settings(), enable_x64_for("float64" if wide else "float32"):
        dtype = jnp.result_type(*map(operand, values))
    return np.dtype("float64" if dtype.itemsize == 8 else "float32") if is_integer_or_bool(dtype) else dtype


def convert_dtype(x: Array | np.ndarray, dtype: Any) -> Array | np.ndarray:
    """An array in another dtype, within a trace as a part of the function."""
    if x.dtype == dtype:
        return x
    if not isinstance(x, Array):
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    with jax_default_settings(), enable_x64_for(dtype), jax.named_scope(JCHOP_SCOPE):
        return x.astype(dtype)


def _number_in_dtype(name: str, value: float, dtype: Any) -> np.ndarray:
    """A Python number in a dtype, whose range it must not leave."""
    with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
        array = np.asarray(value, dtype)
        if value in (math.inf, -math.inf) or not np.isinf(array):
            return array
    raise ValueError(f"{name}={value!r} is beyond the range of {dtype}")


# -- NumPy results -----------------------------------------------------------------------------------------------------


def run_on_operands(function: Callable[..., Any], operands: Sequence[Array | np.ndarray], key: Array | None) -> Any:
    """``function(*operands, key)``, with NumPy results if all operands are NumPy. 64-bit data stays 64-bit."""
    with enable_x64_for(carrier_of_dtype(operands[0].dtype).name), jax.named_scope(JCHOP_SCOPE):
        if any(isinstance(operand, Array) for operand in operands):
            return mark_results(function(*operands, key))
        return jax.tree.map(lambda leaf: leaf[()], run_numpy(lambda: function(*operands, key), key=key))


def mark_results(values: Any) -> Any:
    """Results of a public function. Traced numbers are marked by a primitive, whose operands `emulate` rounds."""

    def mark(x: Any) -> Any:
        is_number = isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
        return _result_p.bind(x) if is_number else x

    return jax.tree.map(mark, values)


_result_p = Primitive(JCHOP_RESULT)
_result_p.def_impl(lambda x: x)
_result_p.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_result_p] = lambda primals, tangents: (_result_p.bind(*primals), *tangents)  # which are no results
ad.primitive_transposes[_result_p] = lambda cotangent, x: [cotangent]
batching.primitive_batchers[_result_p] = lambda args, dims: (_result_p.bind(*args), *dims)
mlir.register_lowering(_result_p, lambda ctx, x: [x])


def run_numpy(function: Callable[[], Any], **dependencies: Any) -> Any:
    """The results of `function`, of NumPy operands, as NumPy arrays; within a trace they are constants, computed now.

    Args:
        function: has no arguments.
        dependencies: the other values that it depends on, by name, which must not be traced.
    """
    for name, value in dependencies.items():
        if has_tracer(value):
            raise TypeError(
                f"{name} is traced but the operands are NumPy values, whose result could not be NumPy; pass "
                "one of them as a JAX array, jax.numpy.asarray(x)"
            )
    result = function()
    if has_tracer(result):
        with eval_context():  # `ensure_compile_time_eval` would also evaluate within kernels
            result = function()
    return jax.tree.map(np.array, result)


def has_tracer(tree: Any) -> bool:
    """Whether a leaf of `tree` is traced, so that it has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


# -- keys --------------------------------------------------------------------------------------------------------------


def check_key(name: str, key: Any) -> None:
    """Refuses a value that is not one typed key."""
    if not (isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        text = f"an array of dtype {key.dtype}" if isinstance(key, Array) else repr(key)
        raise TypeError(
            f"{name}={text} must be a typed key, as jax.random.key(0) gives (jax.random.wrap_key_data makes one of "
            "raw words)"
        )
    if key.shape != ():
        raise ValueError(
            f"{name} has shape {key.shape}, but one key is drawn from; use jax.vmap over x and the keys together"
        )


def rounding_key(key: Any, draws: bool, spec: Any, name: str = "key", values: str = "") -> Array | None:
    """The key, checked, if `spec` draws from it; else None.

    Args:
        key: the argument.
        draws: whether anything draws from it.
        spec: the spec that draws, for the error.
        name: of the argument.
        values: the rounded values, for the error, if they are not the operands.
    """
    if key is not None:
        check_key(name, key)
    elif draws:
        raise ValueError(
            f"{name}=None, but spec={str(spec)!r} rounds{values} stochastically: pass a typed key, for example "
            f"{name}=jax.random.key(0)"
        )
    return key if draws else None


def rounding_keys(spec: Spec, key: Any, gradient_key: Any = None, has_bits: bool = False) -> Keys:
    """The keys that `spec` draws from, checked; with `has_bits` the rounding itself has random bits of its own."""
    backward = spec.gradient.round
    keys = (
        rounding_key(key, spec.rounding.stochastic and not has_bits, spec),
        rounding_key(
            gradient_key, backward is not None and backward.rounding.stochastic, spec, "gradient_key", " cotangents"
        ),
    )
    if all(entry is not None for entry in keys) and _same_key(*keys):
        raise ValueError(
            "gradient_key is the same as key, so x and its cotangent would be rounded by the same random bits; pass "
            "two keys, for example key, gradient_key = jax.random.split(key)"
        )
    return keys


def _same_key(key: Any, other: Any) -> bool:
    """Whether two keys are one; traced keys are, when they are the same object."""
    if key is other:
        return True
    if has_tracer((key, other)):
        return False
    return key.dtype == other.dtype and np.array_equal(jax.random.key_data(key), jax.random.key_data(other))


# -- offsets -----------------------------------------------------------------------------------------------------------


def stream_offset(offset: Any, shape: tuple[int, ...], words: int = 1) -> tuple[StreamOffset, tuple]:
    """The static part of `offset`, and its starts. Known starts are traced, too, so that offsets share a compilation.

    `words` is the number of words for each element. Indexes from 2^64 on are refused.
    """
    if type(offset) is int and offset == 0:
        return STREAM_START, ()
    if not isinstance(offset, tuple):
        start, high = _offset_start(offset)
        if not isinstance(offset, Array):
            _check_last_index(offset, int(offset) + math.prod(shape), words)
        return StreamOffset((None,), base=high), (start,)
    pair = len(offset) == 2 and all(isinstance(entry, tuple | list) for entry in offset)
    if not pair or not len(offset[0]) == len(offset[1]) == len(shape):
        raise ValueError(f"offset={offset!r} must be (starts, shape), each with {len(shape)} entries as x has axes")
    whole = tuple(check_int("offset: shape of the whole", size, 0, 1 << 32) for size in offset[1])
    for start, size, total in zip(offset[0], shape, whole, strict=True):
        if size > total or (not isinstance(start, Tracer) and start + size > total):
            raise ValueError(f"offset={offset!r}: a part of shape {shape} does not lie within the whole")
    _check_last_index(offset, math.prod(whole), words)
    return StreamOffset((None,) * len(shape), whole), tuple(_offset_start(start)[0] for start in offset[0])


def _check_last_index(offset: Any, end: int, words: int) -> None:
    if end * words > 1 << 64:
        raise ValueError(
            f"offset={offset!r}: the last element would have index {end - 1}, and random bits end at index "
            f"{(1 << 64) // words - 1}"
        )


def _offset_start(start: Any) -> tuple[Any, int]:
    """A start as an integer scalar that is not static, and a static multiple of 2^32 that goes on top of it."""
    if isinstance(start, Array):
        if start.shape != () or not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(
                f"offset has an entry of shape {start.shape} and dtype {start.dtype}; allowed: integer scalars"
            )
        if isinstance(start, Tracer):
            return start, 0
    start = check_int("offset", start, 0, (1 << 64) - 1)
    low, high = start % (1 << 32), start >> 32 << 32
    return (np.int32(low) if low < 1 << 31 else np.uint32(low)), high
