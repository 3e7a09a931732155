"""Carriers, and integer arithmetic on their bit patterns that every backend supports.

A carrier's bits are signed integers of 32 bits (float16, bfloat16, float32) or 64 bits (float64). The magnitude, with
the sign bit cleared, is then never negative and has the order of the values. No floating-point operation reads the
data, because XLA's CPU backend reads subnormal inputs as zero in arithmetic and comparisons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class Carrier:
    """A floating-point dtype that holds results: fraction bits M, exponent bias B, width of its words."""

    name: str
    fraction: int
    bias: int
    width: int

    @cached_property
    def work(self) -> np.dtype:
        """Signed integer dtype of the arithmetic."""
        return np.dtype("int64" if self.width == 64 else "int32")

    @cached_property
    def work_width(self) -> int:
        """Bits of `work`."""
        return 64 if self.width == 64 else 32

    @cached_property
    def sign_bit(self) -> int:
        """The sign bit, as a value of `work`."""
        return 1 << 15 if self.width == 16 else -(1 << (self.width - 1))

    @cached_property
    def inf(self) -> int:
        """Magnitude bits of infinity."""
        return (2 * self.bias + 1) << self.fraction

    @cached_property
    def nan(self) -> int:
        """Magnitude bits of the quiet NaN."""
        return self.inf | (1 << (self.fraction - 1))

    @cached_property
    def tiny_exponent(self) -> int:
        """Exponent of the smallest positive (subnormal) value."""
        return 1 - self.bias - self.fraction

    @property
    def max(self) -> Fraction:
        """Largest finite value."""
        return (2 - Fraction(1, 1 << self.fraction)) * 2**self.bias

    def toward_zero(self, value: Fraction) -> tuple[int, bool]:
        """Magnitude bits of the largest magnitude <= |value|, with unlimited exponent; whether it equals |value|."""
        count = abs(value) / Fraction(2) ** self.tiny_exponent
        whole = int(count)
        shift = max(whole.bit_length() - 1 - self.fraction, 0)
        return (shift << self.fraction) + (whole >> shift), count == whole >> shift << shift

    def magnitude_bits(self, value: Fraction) -> int | None:
        """Magnitude bits of |value|; None if the carrier does not hold it exactly."""
        bits, exact = self.toward_zero(value)
        return bits if exact and bits < self.inf else None

    def ceil_bits(self, value: Fraction) -> int:
        """Ordered integer (see `ordered_integers`) of the smallest carrier value >= value."""
        bits, exact = self.toward_zero(value)
        return -bits if value < 0 else bits if exact else bits + 1

    def holds_all(self, numbers: Sequence[float]) -> bool:
        """Whether the carrier holds each of some finite binary64 numbers exactly."""
        given = np.array(numbers, np.float64)
        with np.errstate(over="ignore"):
            return bool((given.astype(self.name) == given).all())

    def ordered_bits(self, numbers: Sequence[float] | np.ndarray) -> np.ndarray:
        """Ordered integers (see `ordered_integers`) of numbers that the carrier holds exactly."""
        bits = np.array(numbers, np.float64).astype(self.name).view(f"int{self.width}")
        return np.where(bits < 0, -(bits & np.iinfo(bits.dtype).max), bits).astype(self.work)


_CARRIER_ROWS = (("float16", 10, 15, 16), ("bfloat16", 7, 127, 16), ("float32", 23, 127, 32), ("float64", 52, 1023, 64))
CARRIERS = {row[0]: Carrier(*row) for row in _CARRIER_ROWS}
FLOAT32, FLOAT64 = CARRIERS["float32"], CARRIERS["float64"]


def split_sign(x: jax.Array, carrier: Carrier) -> tuple[jax.Array, jax.Array]:
    """The bits of `x` as (sign bit in place, magnitude), both in the work dtype."""
    word = jnp.uint16 if carrier.width == 16 else carrier.work
    bits = lax.bitcast_convert_type(x, word).astype(carrier.work)
    sign = with_constant(lax.bitwise_and, bits, carrier.sign_bit)
    return sign, lax.bitwise_xor(bits, sign)


def join_sign(sign: jax.Array, magnitude: jax.Array, carrier: Carrier) -> jax.Array:
    """The carrier values of sign bits and magnitudes, the inverse of `split_sign`."""
    bits = sign | magnitude
    if carrier.width == 16:
        bits = bits.astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.dtype(carrier.name))


def lax_where(condition: Any, yes: Any, no: Any) -> jax.Array:
    """`jnp.where` of broadcast operands as one operation of the program; JAX's own is a function for each shape."""
    dtype = jnp.result_type(yes, no)
    arrays = [x for x in (yes, no) if isinstance(x, jax.Array)]
    if not arrays or any(x.weak_type or x.dtype.itemsize > dtype.itemsize for x in arrays):
        return jnp.where(condition, yes, no)  # of weak type, or 64-bit data without jax_enable_x64
    shape = jnp.broadcast_shapes(*map(jnp.shape, (condition, yes, no)))
    if sharded_values := [x for x in (condition, yes, no) if has_sharding(x)]:
        whole = next((x for x in sharded_values if x.shape == shape), sharded_values[0])
        return jnp.where(*(reshard_like(x, whole) if jnp.shape(x) == whole.shape else x for x in (condition, yes, no)))
    like = next((x for x in (condition, yes, no) if jnp.shape(x) == shape), None)
    operands = ((condition, bool), (yes, dtype), (no, dtype))
    return lax.select(*(_broadcast_like(x, shape, kind, like) for x, kind in operands))


def has_sharding(x: Any) -> bool:
    """Whether a value has an explicit sharding."""
    return isinstance(x, jax.Array) and any(part is not None for part in jax.typeof(x).sharding.spec)


def gather_axes(x: Any, axes: Sequence[int]) -> Any:
    """An array without an explicit sharding along axes, counted from its end; each device then has their elements."""
    sharding = jax.typeof(x).sharding if has_sharding(x) else None
    if sharding is None or all(sharding.spec[axis] is None for axis in axes):
        return x
    spec = [None if i - x.ndim in axes else part for i, part in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, sharding.update(spec=jax.P(*spec)))


def axes_cut_by_sharding(x: jax.Array, sizes: Sequence[int]) -> list[int]:
    """The axes, counted from the end, that an explicit sharding cuts within parts of these sizes."""
    if not has_sharding(x):
        return []
    shard = jax.typeof(x).sharding.shard_shape(x.shape)
    return [i - x.ndim for i, size in enumerate(sizes) if shard[i] < x.shape[i] and shard[i] % size]


def gather_cut_axes(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """An array gathered along the axes that an explicit sharding cuts within parts of these sizes."""
    return gather_axes(x, axes_cut_by_sharding(x, sizes))


def reshard_like(x: Any, like: jax.Array) -> Any:
    """An array of the same shape with the explicit sharding of `like`, if that has one; other values as they are."""
    if not isinstance(x, jax.Array) or not has_sharding(like) or jax.typeof(x).sharding == jax.typeof(like).sharding:
        return x
    return jax.sharding.reshard(x, jax.typeof(like).sharding)


def place_like(x: Any, like: Any) -> Any:
    """An array, sharded as far as its shape allows like one whose sharding is known: explicit, or not traced."""
    if has_sharding(like):
        sharding = fit_sharding(jax.typeof(like).sharding, x.shape)
        return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)
    is_concrete = isinstance(like, jax.Array) and not any(isinstance(v, Tracer) for v in (x, like))
    sharding = like.sharding if is_concrete else None
    return jax.device_put(x, fit_sharding(sharding, x.shape)) if isinstance(sharding, NamedSharding) else x


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """``x.reshape(shape)``; with an explicit sharding, as `entries_after_reshape`."""
    if not has_sharding(x):
        return x.reshape(shape)
    sharding = jax.typeof(x).sharding
    entries = entries_after_reshape(sharding.spec, parts_of_axes(sharding), x.shape, shape)
    return jnp.reshape(x, shape, out_sharding=sharding.update(spec=jax.P(*entries)))


def entries_after_reshape(
    entries: Sequence[Any], counts: Sequence[int], old: Sequence[int], new: Sequence[int]
) -> tuple[Any, ...]:
    """The entries of a `PartitionSpec` for an array in another shape of as many elements.

    Of axes that are joined or split, the first one keeps or gives its entry, if its length can be cut so.

    Args:
        entries: of the axes before; entries that are missing at the end are None.
        counts: the number of parts of each.
        old: the shape before.
        new: the shape.
    """
    new_entries: list[Any] = [None] * len(new)
    at = to = 0
    while at < len(old) and to < len(new) and math.prod(old):
        first, goal, size, new_size = at, to, old[at], new[to]
        at, to = at + 1, to + 1
        while size != new_size:
            if size < new_size:
                size, at = size * old[at], at + 1
            else:
                new_size, to = new_size * new[to], to + 1
        owner = next((i for i in range(first, at) if old[i] > 1), first)
        taker = next((i for i in range(goal, to) if new[i] > 1), goal)
        if owner < len(entries) and new[taker] % counts[owner] == 0:
            new_entries[taker] = entries[owner]
    return tuple(new_entries)


def parts_of_axes(sharding: NamedSharding) -> list[int]:
    """The number of parts that each axis which a sharding names is cut into."""
    axis_groups = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    return [math.prod(sharding.mesh.shape[axis] for axis in axes if axis is not None) for axes in axis_groups]


def fit_sharding(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A sharding without the axes that arrays of a shape do not have, or have no equal parts along."""
    counts = zip(sharding.spec, parts_of_axes(sharding), shape, strict=False)
    spec = jax.P(*(entry if length % count == 0 else None for entry, count, length in counts))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def in_auto_mesh(
    function: Callable[..., Any], *operands: Any, along: Sequence[Sequence[int]], like: Callable[..., Any] | None = None
) -> Any:
    """``function(*operands)`` for operands with an explicit sharding, whose types would refuse slices and reshapes.

    The operands are gathered along the axes of `along` first, so sums along these have the order of one device.

    Args:
        function: it is traced as in an automatic mesh.
        operands: arrays, keys or None.
        along: axes of each operand, counted from its end.
        like: a function of the gathered operands; its result has the sharding that `function` gives. Default: the
            result has the shape and the sharding of the first operand.
    """
    sharded_operands = [x for x in operands if has_sharding(x)]
    if not sharded_operands:
        return function(*operands)
    mesh = jax.typeof(sharded_operands[0]).sharding.mesh
    whole = [gather_axes(x, axes) for x, axes in zip(operands, along, strict=True)]
    result_type = jax.eval_shape(like or (lambda x, *_: x), *whole)
    # In two steps: a sharding of the result along gathered axes would spread to the sums.
    out_sharding = jax.sharding.NamedSharding(mesh, result_type.sharding.spec if result_type.sharding else jax.P())
    out: Any = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out_sharding)(*whole)
    return out if like else reshard_like(out, operands[0])


def varying_axes(x: Any) -> Sequence[str]:
    """The axes of a mesh over which a value is known to vary; the attribute depends on the version of JAX."""
    kind = jax.typeof(x) if isinstance(x, jax.Array) else x
    return tuple(getattr(getattr(kind, "mat", kind), "varying", None) or getattr(kind, "vma", ()))


def varying_like(x: jax.Array, *like: jax.Array) -> jax.Array:
    """A constant as the start of a loop, which varies over every axis of a mesh over which one of `like` does."""
    axes = {axis for v in like for axis in varying_axes(v)} - {*varying_axes(x)}
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _broadcast_like(x: Any, shape: tuple[int, ...], dtype: Any, like: Any) -> jax.Array:
    if like is not None and not isinstance(x, jax.Array):
        full_like = jnp.full_like if np.ndim(x) or not isinstance(like, jax.Array) else lax.full_like
        return full_like(like, x, dtype)
    if isinstance(x, jax.Array) and x.shape == shape and x.dtype == dtype:
        return x
    return jnp.broadcast_to(jnp.asarray(x, dtype), shape)


def with_constant(operation: Callable[[Any, Any], jax.Array], x: jax.Array, value: Any) -> jax.Array:
    """An operation of `lax` with a constant, which takes the dtype of `x`.

    The same operation of `jnp` takes ten times as long to trace, in a body that is traced for each shape.
    """
    return operation(x, x.dtype.type(value))


def lax_clip(x: jax.Array, least: Any, most: Any) -> jax.Array:
    """`jnp.clip` between numbers of the dtype of `x`, as two operations."""
    for operation, of_arrays, end in ((lax.max, jnp.maximum, least), (lax.min, jnp.minimum, most)):
        x = with_constant(operation, x, end) if isinstance(end, int) else of_arrays(x, end)
    return x


def ordered_integers(sign: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Signed integers in the order of the values; -0 and +0 are equal."""
    return lax_where(sign != 0, -magnitude, magnitude)


def low_mask(count: jax.Array | int) -> jax.Array | int:
    """Integers whose low `count` bits are ones; an int for an int."""
    if isinstance(count, int):
        return (1 << count) - 1
    return ~lax.shift_left(jnp.full_like(count, -1), count)


def shift_right(word: jax.Array, count: jax.Array | int) -> jax.Array:
    """Unsigned words shifted right by `count` in [0, width)."""
    return word >> (count if isinstance(count, int) else count.astype(word.dtype))


def top_bit(word: jax.Array) -> jax.Array:
    """Whether the highest bit of unsigned words is set."""
    return (word >> (word.dtype.itemsize * 8 - 1)) != 0


def floor_log2_integers(count: jax.Array, carrier: Carrier) -> jax.Array:
    """floor(log2 count) of positive integers below 2^(M+1), from the exponent of their exact float."""
    wide = CARRIERS["float64" if carrier.width == 64 else "float32"]
    bits = lax.bitcast_convert_type(count.astype(wide.name), wide.work)
    return (bits >> wide.fraction) - wide.bias


def compose_magnitude(count: jax.Array, exponent: jax.Array, carrier: Carrier) -> jax.Array:
    """Magnitude bits of count * 2^exponent, 0 <= count < 2^(M+1), if the carrier holds it exactly."""
    top = floor_log2_integers(jnp.maximum(count, 1), carrier)
    biased_exponent = top + exponent + carrier.bias
    normal = (
        (biased_exponent << carrier.fraction) + (count << jnp.clip(carrier.fraction - top, 0)) - (1 << carrier.fraction)
    )
    subnormal = count << jnp.clip(exponent - carrier.tiny_exponent, 0, carrier.fraction)
    return lax_where(count == 0, 0, lax_where(biased_exponent > 0, normal, subnormal))


def enable_x64_for(dtype: Any) -> contextlib.AbstractContextManager:
    """A context that keeps 64-bit data for every value of ``jax_enable_x64``."""
    return jax.enable_x64(True) if jnp.dtype(dtype).itemsize == 8 else contextlib.nullcontext()
