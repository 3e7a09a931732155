"""Arrays of NumPy, JAX and torch, and the random bits of objects that count their calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

from jchop._common.checks import as_numpy, check_int
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec


def is_torch(x: object) -> TypeGuard[Any]:
    """Whether `x` is a tensor of torch, without importing torch."""
    module = sys.modules.get("torch")
    return module is not None and isinstance(x, module.Tensor)


def as_numbers(x: Any) -> Any:
    """Tensors and JAX arrays unchanged, other values as a NumPy array or scalar, integers in float64."""
    if is_torch(x) or isinstance(x, jax.Array):
        return x
    array = as_numpy("x", x)
    array = array.astype(np.float64) if array.dtype.kind in "iu" else array
    return array if isinstance(x, np.ndarray) else array[()]


def as_whole_numbers(n: Any) -> Any:
    """Whole numbers, floats too, as int32; the largest become 2^30. JAX arrays and other numbers stay."""
    n, limit = as_numbers(n), 1 << 30
    if is_torch(n):
        return n if n.is_floating_point() else n.clamp(-limit, limit).int()
    if isinstance(n, jax.Array) or not np.equal(n, np.trunc(n)).all():
        return n
    return np.clip(n, -limit, limit).astype(np.int32)


def narrow_dtype(x: Any, dtype: Any) -> Any:
    """A float64 array of JAX or NumPy in a dtype of fewer bits; numbers beyond its range become infinite."""
    with jax.enable_x64(True), np.errstate(over="ignore"):
        return x.astype(dtype)


def dtype_name(x: Any) -> str:
    """NumPy's name of the dtype of an array or tensor."""
    return str(x.dtype).removeprefix("torch.")


class SeedCounter:
    """A key for each call, of the two words (seed, number of the call).

    Args:
        seed: an integer from 0 to 2^32 - 1.
    """

    def __init__(self, seed: int) -> None:
        self.seed = check_int("random_state", seed, 0, (1 << 32) - 1)
        self.calls = 0

    def next(self, x: Any) -> int:
        """The 64-bit seed of the next call: the two words in this order.

        Raises:
            ValueError: within a trace of JAX, which runs a call once and its program many times.
        """
        if isinstance(x, Tracer):
            raise ValueError("x is traced, and a compiled program would draw the same bits in every run: pass key=")
        self.calls += 1
        return (self.seed << 32) | ((self.calls - 1) & 0xFFFF_FFFF)


def key_of_seed(seed: int) -> jax.Array:
    """The key of a 64-bit seed, for every value of ``jax_enable_x64``."""
    words = np.array([seed >> 32, seed & 0xFFFF_FFFF], np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")


def round_any_array(x: Any, spec: Spec, seed: int | None = None, key: jax.Array | None = None) -> Any:
    """`x` rounded, by `jchop.torch` if it is a tensor."""
    if is_torch(x):
        from jchop.torch import round_to_format as round_tensor

        if key is not None:
            raise TypeError("key is for arrays of JAX and NumPy; x is a torch tensor")
        return round_tensor(x, spec, seed=seed, copy=True)
    return round_to_format(x, spec, key_of_seed(seed) if key is None and seed is not None else key)


def apply_to_arrays(function: Callable[..., Any], *operands: Any) -> Any:
    """A function of JAX and NumPy arrays, applied to tensors too, without their gradients."""
    if not any(map(is_torch, operands)):
        return function(*operands)
    from jchop.torch import as_jax, as_tensor

    arrays = (as_jax(operand, copy=True) if is_torch(operand) else operand for operand in operands)
    return jax.tree.map(as_tensor, function(*arrays))


def round_first(function: Callable[[Any], Any], output: Any) -> Any:
    """The output of a layer of torch, rounded by `function`; of several, as of recurrent layers, the first."""
    if not isinstance(output, tuple):
        return function(output)
    first = round_first(function, output[0])
    fields = getattr(output, "_fields", None)  # sequences of several lengths are a named tuple that begins with data
    return (first, *output[1:]) if fields is None else output._replace(**{fields[0]: first})  # type: ignore[attr-defined]
