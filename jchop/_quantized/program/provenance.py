"""Where the values of a program come from: parameters, and for each axis of a value the axis of its parameter.

A value that only moves a parameter's numbers (transposed, reshaped, sliced, broadcast, cast) has that parameter's axes.
So has a value computed from parameters alone (a mask, a sum with a low-rank product, weight standardization). At a
product they say which axes of the parameter are summed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import Array

from jchop._quantized.products.operand_layout import Hadamard


@dataclass(frozen=True)
class AxisFactor:
    """A part of an axis of a parameter.

    Args:
        axis: of the parameter.
        size: how many indexes the part has.
        inner: the distance of two neighbours, in indexes of the axis.
    """

    axis: int
    size: int
    inner: int = 1


#: The parts that make up an axis, the last one moving fastest. None for an axis that is no axis of the parameter.
AxisFactors = tuple[AxisFactor, ...]


@dataclass(frozen=True)
class ParamOrigin:
    """A parameter that a value comes from.

    Args:
        leaf: the index of the parameter.
        axes: the parts of each axis of the value; empty for an axis that the parameter has not.
        reversed_axes: of the parameter, whose numbers stand in reverse order; None if the value has not the numbers
            themselves: if they were computed with, merged with others, or sent between devices.
        cuts: the slices that were taken, by axis: its parts, where the slice begins, and how long it is.
        spread: whether it stands at several places along an axis that the parameter has not, perhaps of length 1.
        bias_use: the use of a parameter that was added, spread, to a value made of parameters; None for none.
    """

    leaf: int
    axes: tuple[AxisFactors, ...]
    reversed_axes: frozenset[int] | None = frozenset()
    cuts: tuple[tuple[AxisFactors, Any, Any], ...] = field(default=(), compare=False)
    spread: bool = field(default=False, compare=False)
    bias_use: Any = field(default=None, compare=False)

    @property
    def is_intact(self) -> bool:
        """Whether the value has the parameter's numbers themselves, none of them reversed."""
        return self.reversed_axes == frozenset()


@dataclass(frozen=True)
class Provenance:
    """The facts about a value that follow from its origin.

    Args:
        data: whether its numbers depend on the arguments that are no parameters.
        origins: the parameters that it comes from; none if it depends on data.
        opaque_uses: parameters that it is computed from, or is in the first iteration of a loop, none of whose axes are
            its own.
        from_keys: whether its numbers depend on keys that are arguments.
        has_product: whether a product of parameters alone is a part of it.
    """

    data: bool = False
    origins: tuple[ParamOrigin, ...] = ()
    opaque_uses: tuple[Any, ...] = ()
    from_keys: bool = False
    has_product: bool = False

    @property
    def varies(self) -> bool:
        """Whether its numbers depend on arguments that are no parameters."""
        return self.data or self.from_keys


NO_PROVENANCE = Provenance()
FROM_DATA = Provenance(data=True)
FROM_KEYS = Provenance(from_keys=True)


def param_provenance(leaf: int, shape: Sequence[int]) -> Provenance:
    """The provenance of a parameter itself: every axis is one of its own."""
    axes = tuple((AxisFactor(axis, n),) if n != 1 else () for axis, n in enumerate(shape))
    return Provenance(origins=(ParamOrigin(leaf, axes),))


def merge_provenance(facts: Sequence[Provenance]) -> Provenance:
    """The facts about a value that is one of several, as one that `select_n` chooses."""
    if any(fact.data for fact in facts):
        return replace(FROM_DATA, opaque_uses=opaque_uses_of(facts))
    origins: dict[int, ParamOrigin] = {}
    for origin in (o for fact in facts for o in fact.origins):
        earlier = origins.setdefault(origin.leaf, origin)
        if earlier != origin or earlier.cuts != origin.cuts:
            cuts = tuple(dict.fromkeys((*earlier.cuts, *origin.cuts)))
            origins[origin.leaf] = replace(earlier, reversed_axes=None, cuts=cuts)
    from_keys, has_product = any(fact.from_keys for fact in facts), any(fact.has_product for fact in facts)
    return Provenance(False, tuple(origins.values()), opaque_uses_of(facts), from_keys, has_product)


def opaque_uses_of(facts: Sequence[Provenance]) -> tuple[Any, ...]:
    """The opaque uses of all facts."""
    return tuple(dict.fromkeys(use for fact in facts for use in fact.opaque_uses))


def unstack_provenance(fact: Provenance) -> Provenance:
    """The facts about one value of a stack, along its first axis."""
    return replace(fact, origins=tuple(replace(o, axes=o.axes[1:]) for o in fact.origins))


def stack_provenance(fact: Provenance) -> Provenance:
    """The facts about a stack of values."""
    return replace(fact, origins=tuple(replace(o, axes=((), *o.axes)) for o in fact.origins))


# -- from one value to the next ---------------------------------------------------------------------------------------


def move_origin(
    name: str, params: dict[str, Any], origin: ParamOrigin, shape: Sequence[int], out: Sequence[int]
) -> ParamOrigin | None:
    """The origin of the result of a primitive for a value of `shape`; None if its axes are not the parameter's."""
    axes = _move_axes(name, params, origin.axes, tuple(shape), tuple(out))
    reversed_axes = origin.reversed_axes if name in MOVE_PRIMITIVES and name != "dynamic_update_slice" else None
    if name == "rev" and reversed_axes is not None:
        parts = [origin.axes[axis] for axis in params["dimensions"]]
        is_whole = all(len(some) <= 1 for some in parts)
        reversed_axes = reversed_axes.symmetric_difference(p.axis for some in parts for p in some) if is_whole else None
    broadcasts = len(out) > len(shape) or math.prod(out) > math.prod(shape)
    spread = origin.spread or (broadcasts and name not in SAME_AXES_PRIMITIVES)
    return None if axes is None else replace(origin, axes=axes, reversed_axes=reversed_axes, spread=spread)


def _move_axes(
    name: str, params: dict[str, Any], axes: tuple[AxisFactors, ...], shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[AxisFactors, ...] | None:
    """The factors of each axis of the result of a primitive that only moves numbers; None if they are lost."""
    if name in SAME_AXES_PRIMITIVES or (name in ELEMENTWISE_PRIMITIVES and shape == out):
        return axes
    if name in ADD_PRIMITIVES:
        return tuple(parts if n == m else () for parts, n, m in zip(axes, shape, out, strict=True))
    if name in COLLECTIVE_PRIMITIVES and params.get("tiled", True):
        return axes
    if "all_gather_dimension" in params:
        new, old = _device_pieces(axes, shape, params["axis_size"])
        place = params["all_gather_dimension"]
        return (*old[:place], new, *old[place:])
    if name in AXIS_PAIRS:
        parts_of = {j: axes[i] for i, j in AXIS_PAIRS[name](params, shape, out)}
        return tuple(parts_of.get(j, ()) for j in range(len(out)))
    if name == "reshape" and params.get("dimensions") is None:
        if (whole := _reshape_axes(axes, shape, out)) is not None:
            return whole
        # A piece of a stack, such as its first layers, is cut anew along the stack: the other axes stay the same.
        uncut = tuple(a if math.prod(p.size for p in a) == n else () for a, n in zip(axes, shape, strict=True))
        return _reshape_axes(uncut, shape, out) if any(uncut) else None
    return None


def other_axes(axes: Iterable[int], ndim: int) -> list[int]:
    """The axes of an array but for some."""
    left_out = {int(axis) % ndim for axis in axes}
    return [axis for axis in range(ndim) if axis not in left_out]


def _window_axes(params: Mapping[str, Any], before: Sequence[int], _: Any) -> Iterator[tuple[int, int]]:
    """The axes of the windows of a gather; axes of which one index is taken are gone."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    kept = other_axes((*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), len(before))
    return ((axis, out) for axis, out in zip(kept, numbers.offset_dims, strict=True) if sizes[axis] != 1)


#: For the parameters of a primitive and the shapes of its first operand and its result: the axes of both that are one.
AxisPairs = Callable[[Mapping[str, Any], Sequence[int], Sequence[int]], Iterable[tuple[int, int]]]
AXIS_PAIRS: Mapping[str, AxisPairs] = {
    "transpose": lambda params, a, b: zip(params["permutation"], range(len(b)), strict=True),
    "squeeze": lambda params, a, b: zip(other_axes(params["dimensions"], len(a)), range(len(b)), strict=True),
    "expand_dims": lambda params, a, b: zip(range(len(a)), other_axes(params["dimensions"], len(b)), strict=True),
    "broadcast_in_dim": lambda params, a, b: enumerate(params["broadcast_dimensions"]),
    "gather": _window_axes,
    "stack": lambda params, a, b: zip(range(len(a)), other_axes([params["axis"]], len(b)), strict=True),
    "unstack": lambda params, a, b: zip(other_axes([params["axis"]], len(a)), range(len(b)), strict=True),
    "tile": lambda params, a, b: enumerate(range(len(b) - len(a), len(b))),
}
_SAME_AXES_TEXT = """
    convert_element_type copy copy_p slice dynamic_slice dynamic_update_slice rev sharding_constraint reshard name
    optimization_barrier stop_gradient reduce_precision pad concatenate split device_put pvary pcast mesh_cast
    layout_constraint
"""
_ELEMENTWISE_TEXT = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj cos cosh div erf erf_inv
    erfc exp exp2 expm1 floor imag integer_pow log log1p logistic max min mul neg nextafter not or pow real rem round
    rsqrt select_n sign sin sinh sqrt square sub tan tanh xor
    cumlogsumexp cummax cummin cumprod cumsum
"""
_COLLECTIVES_TEXT = """
    all_gather all_gather_invariant all_gather_reduced all_to_all ppermute psum psum_invariant reduce_scatter
"""
#: Of two values; an axis of one of them may have length 1.
ADD_PRIMITIVES = frozenset(["add", "sub"])
#: Writes into an array at indexes.
SCATTER_PRIMITIVES = frozenset(["scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"])
#: Each axis stays the same, though perhaps shorter or longer.
SAME_AXES_PRIMITIVES = frozenset(_SAME_AXES_TEXT.split())
#: Computes with numbers that stand at the same place, or before it along an axis; the result has their axes.
ELEMENTWISE_PRIMITIVES = frozenset(_ELEMENTWISE_TEXT.split()) | SCATTER_PRIMITIVES
#: Between devices, whose pieces of an axis may come in any order.
COLLECTIVE_PRIMITIVES = frozenset(_COLLECTIVES_TEXT.split())
#: Primitives that only move numbers.
MOVE_PRIMITIVES = SAME_AXES_PRIMITIVES | {"reshape", *AXIS_PAIRS}


def _reshape_axes(
    axes: tuple[AxisFactors, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[AxisFactors, ...] | None:
    """Runs of axes with as many elements before and after are taken apart and put together."""
    result: list[AxisFactors] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if math.prod(old[i:]) == 1 and math.prod(new[j:]) == 1:
            return (*result, *((),) * (len(new) - j))
        first, last = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := math.prod(old[first:i])) != (b := math.prod(new[last:j])):
            if (a < b and i == len(old)) or (a > b and j == len(new)):
                return None
            i, j = (i + 1, j) if a < b else (i, j + 1)
        run = distribute_factors(axes[first:i], old[first:i], new[last:j])
        if run is None:
            return None
        result += run
    return tuple(result)


def distribute_factors(axes: Sequence[AxisFactors], old: Sequence[int], new: Sequence[int]) -> list[AxisFactors] | None:
    """The parts of some axes over new ones, from the fastest; the slowest takes the rest."""
    if [n for n in old if n != 1] == [n for n in new if n != 1]:
        rest = iter([parts for parts, n in zip(axes, old, strict=True) if n != 1])
        return [() if n == 1 else next(rest) for n in new]
    parts: list[AxisFactor | int] = []  # a number: an axis that the parameter has not
    for i, (some, n) in enumerate(zip(axes, old, strict=True)):
        if some and i and math.prod(p.size for p in some) != n:
            return None  # a piece of an axis: only the slowest may be one
        parts += list(some) if some else [n] if n != 1 else []
    result: list[AxisFactors] = []
    for position in range(len(new) - 1, 0, -1):
        remaining, factors = new[position], []
        while remaining > 1 and parts:
            part = parts.pop()
            size = part if isinstance(part, int) else part.size
            if size > remaining:
                if size % remaining:
                    return None
                if isinstance(part, int):
                    parts.append(part // remaining)
                else:
                    parts.append(AxisFactor(part.axis, size // remaining, part.inner * remaining))
                    factors.insert(0, AxisFactor(part.axis, remaining, part.inner))
                remaining = 1
            elif remaining % size:
                return None
            else:
                remaining //= size
                if not isinstance(part, int):
                    factors.insert(0, part)
        result.insert(0, merge_factors(factors))
    result.insert(0, merge_factors([part for part in parts if not isinstance(part, int)]))
    return result


def merge_factors(parts: Sequence[AxisFactor]) -> AxisFactors:
    """Neighbouring parts of one axis as one."""
    result: list[AxisFactor] = []
    for part in parts:
        before = result[-1] if result else None
        if before is not None and before.axis == part.axis and before.inner == part.inner * part.size:
            result[-1] = AxisFactor(part.axis, before.size * part.size, part.inner)
        else:
            result.append(part)
    return tuple(result)


def _device_pieces(
    axes: tuple[AxisFactors, ...], shape: Sequence[int], devices: int
) -> tuple[AxisFactors, tuple[AxisFactors, ...]]:
    """The axis of the devices, and the others, if each device has a piece of one axis; empty if it is not known which.

    The axes of a piece are the axes of the whole parameter, so they are longer than its shape says.
    """
    cut = [i for i, parts in enumerate(axes) if parts and math.prod(p.size for p in parts) == shape[i] * devices]
    if len(cut) != 1 or (slowest := axes[cut[0]][0]).size % devices:
        return (), axes
    own = AxisFactor(slowest.axis, slowest.size // devices, slowest.inner)
    ahead = AxisFactor(slowest.axis, devices, own.inner * own.size)
    rest = (own, *axes[cut[0]][1:]) if own.size != 1 else axes[cut[0]][1:]
    return (ahead,) if devices != 1 else (), (*axes[: cut[0]], rest, *axes[cut[0] + 1 :])


# -- matrices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixView:
    """The axes of a parameter as a product takes them: the free ones, in order, and the contracting ones (summed over).

    Args:
        free: the parts of each free axis of the operand.
        contracting: the parts that are summed over, the last one moving fastest.
    """

    free: tuple[AxisFactors, ...]
    contracting: AxisFactors


def split_axes(shape: Sequence[int], factors: Iterable[AxisFactor]) -> list[tuple[AxisFactor, ...]]:
    """The parts of each axis, the slowest first; an axis that these parts do not make up is one part."""
    result: list[tuple[AxisFactor, ...]] = []
    for axis, n in enumerate(shape):
        own = sorted({part for part in factors if part.axis == axis}, key=lambda part: -part.inner)
        ends = [*(part.inner * part.size for part in own[1:]), 1]
        whole = own and own[0].inner * own[0].size == n and [part.inner for part in own] == ends
        result.append(tuple(own) if whole else (AxisFactor(axis, n),))
    return result


@dataclass(frozen=True)
class MatrixLayout:
    """The axes of a parameter as matrices (batch, contracting, free).

    Args:
        shape: of the parameter, without axes of a stack.
        sizes: of the parts of its axes, in their order.
        batch: the parts over which the product is batched, each index of which has a matrix of its own.
        contracting: the parts that the product sums over, the last one moving fastest.
        free: all others.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    contracting: tuple[int, ...]
    free: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], stack: int, view: MatrixView, batch: int) -> MatrixLayout | None:
        """The layout of a parameter.

        Args:
            shape: of the parameter, with the axes of a stack.
            stack: how many of these there are.
            view: how a product takes the parameter.
            batch: how many of the free axes, the first ones, are axes of a batch.

        Returns:
            None if the product sums, or is batched, over a part of an axis of which the rest is elsewhere.
        """
        own_batch = tuple(part for parts in view.free[:batch] for part in parts)
        matters = {*own_batch, *view.contracting}
        factors = {*matters, *(part for parts in view.free for part in parts)}
        parts = [part for own in split_axes(shape, factors)[stack:] for part in own]
        if not {part for part in matters if part.axis >= stack} <= {*parts}:
            return None
        number = {part: i for i, part in enumerate(parts)}
        first, along = (tuple(number[part] for part in some) for some in (own_batch, view.contracting))
        rest = tuple(i for i in range(len(parts)) if i not in {*first, *along})
        return MatrixLayout(tuple(shape[stack:]), tuple(part.size for part in parts), first, along, rest)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape (batch, contracting, free) of the parameter as matrices."""
        parts = (self.batch, self.contracting, self.free)
        batch, contracting, free = (math.prod(self.sizes[i] for i in some) for some in parts)
        return batch, contracting, free

    def lay(self, x: Array) -> Array:
        """A parameter, or an array with as many numbers in the same order, as matrices of `matrix_shape`."""
        return x.reshape(self.sizes).transpose(*self._order).reshape(self.matrix_shape)

    def back(self, matrices: Array) -> Array:
        """The inverse of `lay`."""
        parts = matrices.reshape([self.sizes[i] for i in self._order])
        return parts.transpose(*np.argsort(self._order)).reshape(self.shape)

    def results(self, x: Any) -> Any:
        """An array in the shape of the parameter, the same along the axes summed over, as (batch, free)."""
        parts = x.reshape(self.sizes).transpose(*self.batch, *self.free, *self.contracting)
        first = parts[(..., *(0,) * len(self.contracting))]
        return first.reshape(self.matrix_shape[0], self.matrix_shape[2])

    @property
    def _order(self) -> tuple[int, ...]:
        """The parts of axes in the order of the matrices."""
        return (*self.batch, *self.contracting, *self.free)


@dataclass(frozen=True)
class WeightRotation:
    """The rotation of a parameter along the axes that its product sums over.

    Args:
        rotation: it.
        layout: the parameter as matrices.
    """

    rotation: Hadamard
    layout: MatrixLayout

    def parameter(self, x: Array) -> Array:
        """A parameter without axes of a stack, rotated."""
        return self.layout.back(self.inputs(self.layout.lay(x).swapaxes(1, 2)).swapaxes(1, 2))

    def inputs(self, x: Array) -> Array:
        """Inputs, whose last axis is the sum, rotated."""
        return self.rotation.rotate(x)

    def gram(self, x: Array) -> Array:
        """Means of x y^T of rotated inputs, (batch, contracting, contracting), from the means of the inputs."""
        return self.inputs(self.inputs(x).swapaxes(1, 2)).swapaxes(1, 2)
