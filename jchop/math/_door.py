"""What every function of `jchop.math` does at its door: operands, carriers, keys, specs, and NumPy in, NumPy out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jchop._bits import CARRIERS, Carrier
from jchop._checks import as_numpy
from jchop._core.arithmetic.basic import carrier_range, range_of, require_operation
from jchop._core.rounding.grid import require_carrier
from jchop._round import _check_key
from jchop.accumulation import MatmulSpec
from jchop.formats import ElementFormat
from jchop.spec import Spec, as_spec

Array = jax.Array
#: What may be given for a rounding, and for the arithmetic of a sum.
SpecLike = Spec | ElementFormat | str
SumSpecLike = MatmulSpec | SpecLike

_PARTS = {"complex64": "float32", "complex128": "float64"}


# -- operands ----------------------------------------------------------------------------------------------------------


def as_array(name: str, value: Any) -> Array | np.ndarray:
    """A JAX array as it is, anything else as a NumPy array in the machine's byte order."""
    return value if isinstance(value, Array) else as_numpy(name, value)


def as_operands(names: Sequence[str], values: Sequence[Any], *, complex_too: bool = False) -> list[Array | np.ndarray]:
    """Arrays of one dtype, which is a carrier; Python numbers take the dtype of the arrays beside them.

    Raises:
        TypeError: for a dtype that is no carrier, or two dtypes.
        ValueError: for a finite Python number beyond the range of the dtype.
    """
    number = [type(value) in (int, float) for value in values]
    given = [None if plain else as_array(n, v) for plain, n, v in zip(number, names, values, strict=True)]
    dtype = next((array.dtype for array in given if array is not None), np.dtype("float64"))
    arrays = [_number(n, v, dtype) if a is None else a for n, a, v in zip(names, given, values, strict=True)]
    for name, array in zip(names, arrays, strict=True):
        _check_dtype(name, array.dtype, complex_too)
        if array.dtype != dtype:
            raise TypeError(
                f"{names[0]} has dtype {dtype} and {name} has dtype {array.dtype}; they must be the same: cast one "
                "of them"
            )
    return arrays


def _number(name: str, value: float, dtype: Any) -> np.ndarray:
    """A Python number in a dtype, whose range it must not leave."""
    with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
        array = np.asarray(value, dtype)
        if value in (math.inf, -math.inf) or not np.isinf(array):
            return array
    raise ValueError(f"{name}={value!r} is beyond the range of {dtype}")


def _check_dtype(name: str, dtype: Any, complex_too: bool) -> None:
    if dtype.name in CARRIERS or (complex_too and dtype.name in _PARTS):
        return
    allowed = ", ".join((*CARRIERS, *_PARTS) if complex_too else CARRIERS)
    raise TypeError(
        f"{name} has dtype {dtype}, which is no carrier; allowed: {allowed}. Convert it first, for example "
        f"{name}.astype('float32')"
    )


def own_carrier(dtype: Any) -> Carrier:
    """The carrier that arrays of `dtype` are, by parts where they are complex."""
    return CARRIERS[str(_PARTS.get(dtype.name, dtype.name))]


def wide_carrier(dtype: Any) -> Carrier:
    """The carrier that arithmetic on arrays of `dtype` is emulated in."""
    return CARRIERS["float64" if own_carrier(dtype).width == 64 else "float32"]


def widened(x: Array) -> Array:
    """Values of a 16-bit dtype in float32."""
    return x.astype(jnp.float32) if x.dtype.itemsize == 2 else x


# -- specs and keys ----------------------------------------------------------------------------------------------------


def as_matmul_spec(value: Any, argument: str = "spec") -> MatmulSpec:
    """A `MatmulSpec`; one spec alone stands for every rounding in it, in sequential order."""
    if isinstance(value, MatmulSpec):
        return value
    if not isinstance(value, SpecLike):
        raise TypeError(
            f"{argument}={value!r} must be a MatmulSpec, such as MatmulSpec(product='e5m10', accumulate='e5m10'), or "
            "a Spec, a format or text for every rounding"
        )
    spec = as_spec(value, argument)
    return MatmulSpec(spec, spec, spec)


def check_matmul_spec(spec: MatmulSpec, dtype: Any) -> None:
    """Refuse roundings that arithmetic on operands of `dtype` cannot do, or their dtype not hold."""
    carrier = wide_carrier(dtype)
    if spec.operands is not None:
        require_carrier(spec.operands, carrier)
    require_operation(spec.product, carrier, "product")
    require_operation(spec.accumulate, carrier, "accumulate")
    if spec.accumulate is None or dtype.itemsize > 2:
        return
    sums, held = range_of(spec.accumulate, carrier), carrier_range(CARRIERS[dtype.name])
    if sums.precision > held.precision or sums.quantum < held.quantum or sums.top > held.top:
        raise ValueError(
            f"accumulate={str(spec.accumulate)!r} has values that {dtype}, the dtype of a and b, cannot hold; cast "
            "them to float32"
        )


def checked_key(key: Any, stochastic: bool, spec: Any) -> Array | None:
    """The key, where something draws from it."""
    if key is not None:
        _check_key("key", key)
    elif stochastic:
        raise ValueError(
            f"key=None, but spec={str(spec)!r} rounds stochastically: pass a typed key, for example "
            "key=jax.random.key(0)"
        )
    return key if stochastic else None


# -- running -----------------------------------------------------------------------------------------------------------


def run(function: Callable[..., Any], operands: Sequence[Array | np.ndarray], key: Array | None) -> Any:
    """``function(*operands, key)``, with NumPy results where all operands are NumPy.

    64-bit data stays so, whatever the flag.
    """
    wide = own_carrier(operands[0].dtype).width == 64
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        if any(isinstance(operand, Array) for operand in operands):
            return function(*operands, key)
        return _numpy(function, operands, key)


def _numpy(function: Callable[..., Any], operands: Sequence[Any], key: Array | None) -> Any:
    """The result for NumPy operands, which are constants within a trace too."""
    if isinstance(key, jax.core.Tracer):
        raise TypeError(
            "key is traced but the operands are NumPy values, whose result could not be NumPy; pass "
            "jax.numpy.asarray of one of them"
        )
    result = function(*operands, key)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)):
        with jax.ensure_compile_time_eval():
            result = function(*operands, key)
    return jax.tree.map(lambda leaf: np.array(leaf)[()], result)
