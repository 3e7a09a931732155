"""How a parameter is rounded and stored: the groups of a format along the axes that its product sums over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jchop._common.bit_ops import reshape
from jchop._common.paths import path_pattern
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.operand_layout import keep_nan, round_in_layout
from jchop._quantized.products.rule import Rule, ScaleFrom
from jchop._quantized.products.scale_from import LSQ, DelayedScaling
from jchop._quantized.products.scales import round_in_range, round_lsq, update_history
from jchop._quantized.program import provenance
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.scale_slots import Scales
from jchop._spec.spec import Spec
from jchop._storage import QArray, fit_scale, quantize
from jchop._storage._axis_groupings import (
    OWN_SCALE,
    WHOLE_AXIS,
    AxisGrouping,
    axis_groupings,
    map_over_stack,
    with_groupings,
    with_sparse_axis,
)
from jchop._storage._quantize import StoredAs
from jchop.formats import ScaledFormat
from jchop.formats.scaled.scaled import axis_indexes


@dataclass(frozen=True)
class WeightLayout:
    """How a parameter is rounded.

    Args:
        spec: along the axes of `shape`.
        shape: of the rounded array, without the axes of a stack; it has the parameter's numbers in their order.
        ndim: how many axes the parameter has, without the axes of a stack in front. Each array of a stack is rounded by
            itself.
        rotation: the rotation of the parameter before it is rounded (`rotate`), which `round` and `pack` leave to the
            caller; None for none.
    """

    spec: Spec
    shape: tuple[int, ...]
    ndim: int
    rotation: provenance.WeightRotation | None = None

    def rotate(self, x: Array) -> Array:
        """A parameter, or a stack, in full precision, as it is before it is rounded."""
        return x if self.rotation is None else map_over_stack(x.ndim - self.ndim, self.rotation.parameter, x)

    def _map(self, run: Callable[..., Any], x: Array, *keys: Array | None, beside: tuple[Any, ...] = ()) -> Any:
        """A function of each array of a stack, in the shape that is rounded, of the values beside it, and of keys."""
        stack = x.ndim - self.ndim
        arrays = reshape(x, x.shape[:stack] + self.shape), *beside
        return map_over_stack(stack, lambda arrays, *keys: run(*arrays, *keys), arrays, *keys)

    def round(self, x: Array, key: Array | None = None, gradient_key: Array | None = None) -> Array:
        """A parameter, or one of a stack, rounded; straight-through, but for the spec's changes to its cotangent."""
        rounded = self._map(lambda v, *keys: round_in_layout(None, v, self.spec, *keys), x, key, gradient_key)
        return reshape(rounded, x.shape)

    def round_under(self, state: WeightScaleState, x: Array, key: Array | None = None) -> Array:
        """A parameter rounded under kept scales."""

        def round_one(v: Array, entry: Array, key: Array | None) -> Array:
            if isinstance(state.source, LSQ):
                sharing = v.size // entry.size if state.source.factor else None
                return keep_nan(v, round_lsq(v, self.spec, entry, key, sharing=sharing), self.spec)
            return round_in_range(v, self.spec, entry, key)

        return reshape(self._map(round_one, x, key, beside=(state.entry,)), x.shape)

    def fit_scales(self, x: Array) -> Array:
        """The scales that a parameter has by the format's rule."""
        return self._map(lambda v: fit_scale(v, self.spec)[0], x)

    def pack(
        self, x: Array, key: Array | None = None, scale: Array | None = None, zero_point: Array | None = None
    ) -> QArray | StoredAs:
        """A parameter as codes and scales, in its own shape; under given scales and zero points, if it has them."""

        def pack_one(v: Array, scale: Array | None, zero_point: Array | None, key: Array | None) -> QArray:
            return quantize(v, self.spec, key, scale=scale, zero_point=zero_point)

        qarray = self._map(pack_one, x, key, beside=(scale, zero_point))
        core = tuple(x.shape[x.ndim - self.ndim :])
        return qarray if core == self.shape else StoredAs(qarray, core, len(self.shape))


@partial(jax.tree_util.register_dataclass, data_fields=["entry"], meta_fields=["source"])
@dataclass(frozen=True, eq=False)
class WeightScaleState:
    """The state of a parameter's scales: the learned scale, or the range by its history.

    Args:
        entry: with the axes of a stack in front.
        source: of the rule.
    """

    entry: Array
    source: ScaleFrom


# -- formats along the axes of a parameter -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def weight_layout_of(shape: tuple[int, ...], view: provenance.MatrixView | None, spec: Spec) -> WeightLayout:
    """The rounding of a parameter of `shape` that a product takes as `view` (None: with its own axes).

    Raises:
        ValueError: for a format that names axes which the operand has not, or whose groups run over parts of axes that
            do not lie together.
    """
    if view is None:
        return _checked_layout(spec, tuple(shape), len(shape))
    factors = provenance.split_axes(shape, [part for parts in (*view.free, view.contracting) for part in parts])
    stack = stack_ndim(shape, view)
    entries = [(axis, part) for axis in range(stack, len(shape)) for part in factors[axis]]
    core = tuple(shape[stack:])
    fmt = spec.scaled
    if fmt is None:
        return WeightLayout(spec, core, len(core))
    sizes = [part.size for _, part in entries]
    number = {(part.axis, part.inner): i for i, (_, part) in enumerate(entries)}

    def numbers(parts: provenance.AxisFactors) -> list[int]:
        """The indexes, in `entries`, of parts of axes; a part that is no entry stands for all entries of its axis."""
        every: dict[provenance.AxisFactor, None] = {}
        for part in parts:
            own = factors[part.axis]
            every |= dict.fromkeys([part] if part in own else own)
        return [number[p.axis, p.inner] for p in every if (p.axis, p.inner) in number]

    kinds: list[AxisGrouping] = [OWN_SCALE] * len(entries)
    runs: list[list[int]] = []
    factors_of_axis = [numbers(parts) for parts in (*view.free, view.contracting)]
    sparse, crossing = _sparse_factors(spec, factors_of_axis, sizes)
    for kind, ids in zip(axis_groupings(fmt, len(factors_of_axis)), factors_of_axis, strict=True):
        if isinstance(kind, str):
            for i in ids:
                kinds[i] = kind
            runs += [_neighbours(ids, sizes) or ids] if crossing and ids == sparse else []
        elif (crossing and ids == sparse) or not _spread_block(int(kind), ids, sizes, kinds):
            run = _neighbours(ids, sizes)  # groups run over the numbers in the order of memory
            if run is None:
                _spread_block(int(kind), ids, sizes, kinds, whole=False)
                continue
            runs.append(run)
            kinds[run[0]] = kind
    array_shape, array_kinds = _merge_axis_factors(*_join_runs(sizes, kinds, [axis for axis, _ in entries], runs))
    array_format = _with_scale_groups(with_groupings(fmt, array_kinds), fmt, array_kinds)
    if fmt.sparse is not None:
        # Without a part of two numbers, each number is alone, and stays.
        alone = array_format.dense
        array_format = _with_sparse_factor(array_format, sparse[-1], sizes, array_shape) if sparse else alone
    return _checked_layout(replace(spec, format=array_format), array_shape, len(core))


def blocks_fit_axes(view: provenance.MatrixView, block: int | None) -> bool:
    """Whether blocks of the axes are blocks along the sum: none cut at the end of an axis but the slowest."""
    rest = block
    for part in reversed(view.contracting[1:]):
        if rest is None or part.size % rest == 0:
            return True
        if rest % part.size:
            return False
        rest //= part.size
    return True


def _checked_layout(spec: Spec, shape: tuple[int, ...], ndim: int) -> WeightLayout:
    if spec.scaled is not None:
        spec.scaled.group_shape(shape)
    return WeightLayout(spec, shape, ndim)


def stack_ndim(shape: Sequence[int], view: provenance.MatrixView) -> int:
    """How many axes in front the operand has not, because one index of them was taken."""
    present = {part.axis for parts in (*view.free, view.contracting) for part in parts}
    count = 0
    while count < len(shape) and count not in present and shape[count] != 1:
        count += 1
    return count if present else 0


def _neighbours(ids: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """The parts in their order with the parts of one number between them; None if others lie between them."""
    run = [i for i in range(min(ids), max(ids) + 1) if i in ids or sizes[i] == 1]
    return run if len(run) == run[-1] - run[0] + 1 else None


def _spread_block(
    block: int, ids: Sequence[int], sizes: Sequence[int], kinds: list[AxisGrouping], whole: bool = True
) -> bool:
    """Blocks over several axes, the last one moving fastest; False if they cannot be blocks of each axis.

    If not `whole`, blocks that do not fit an axis are cut at its end, so that some groups are shorter.
    """
    rest = block
    plan: dict[int, AxisGrouping] = {}
    for position in range(len(ids) - 1, -1, -1):
        i, n = ids[position], sizes[ids[position]]
        slower = any(sizes[k] > 1 for k in ids[:position])
        if rest == 1:
            plan[i] = OWN_SCALE
        elif n < rest and slower and (rest % n == 0 or not whole):
            plan[i], rest = WHOLE_AXIS, rest // n
        elif n % rest == 0 or not slower or not whole:
            plan[i], rest = rest, 1
        else:
            return False
    for i, kind in plan.items():
        kinds[i] = kind
    return True


def _sparse_factors(spec: Spec, ids: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[list[int], bool]:
    """The parts along which n of every m numbers are kept, and whether m numbers lie in several of them.

    Args:
        spec: of the parameter.
        ids: the parts of each axis of the operand.
        sizes: of the parts.

    Raises:
        ValueError: if they do, and cannot become one axis.
    """
    fmt = spec.scaled
    if fmt is None or fmt.sparse is None:
        return [], False
    own = list(ids[axis_indexes("sparse_axis", fmt.axis_of_sparse, (1,) * len(ids))[0]])
    long = [i for i in own if sizes[i] > 1]
    if len(long) < 2 or sizes[long[-1]] % fmt.sparse[1] == 0:
        return long, False
    if own != sorted(own) or _neighbours(own, sizes) is None:
        raise ValueError(
            f"{fmt.sparse[1]} consecutive numbers along the sum lie in several axes of the parameter, of which the "
            f"fastest has {sizes[long[-1]]}, and these axes do not lie together; put a rule without sparse before it"
        )
    return own, True


def _with_sparse_factor(fmt: ScaledFormat, part: int, sizes: Sequence[int], shape: Sequence[int]) -> ScaledFormat:
    """A format that keeps n of every m numbers along the axis of which a part is the fastest."""
    step = math.prod(sizes[part + 1 :])
    axes = [i for i, n in enumerate(shape) if n > 1 and math.prod(shape[i + 1 :]) == step]
    if not axes:
        raise ValueError(f"{fmt}: its numbers lie apart in a parameter of shape {tuple(shape)}, along an axis that the "
                         "product takes in parts; put a rule without sparse before it")  # fmt: skip
    return with_sparse_axis(fmt, axes[0] - len(shape))


def _join_runs(
    sizes: Sequence[int], kinds: Sequence[AxisGrouping], owners: Sequence[int], runs: Sequence[Sequence[int]]
) -> tuple[list[int], list[AxisGrouping], list[tuple[int, ...]]]:
    """Sizes, kinds and axes of the parameter after the parts of each run have become one."""
    first = {i: run[0] for run in runs for i in run}
    shape: list[int] = []
    new_kinds: list[AxisGrouping] = []
    axes: list[tuple[int, ...]] = []
    for i, (n, kind, owner) in enumerate(zip(sizes, kinds, owners, strict=True)):
        if first.get(i, i) != i:
            shape[-1], axes[-1] = shape[-1] * n, (*axes[-1], owner)
        else:
            shape.append(n)
            new_kinds.append(kind)
            axes.append((owner,))
    return shape, new_kinds, axes


def _merge_axis_factors(
    sizes: Sequence[int], kinds: Sequence[AxisGrouping], axes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[AxisGrouping]]:
    """Parts of one axis as that axis again, if blocks of the axis are blocks of its parts."""
    shape: list[int] = []
    new_kinds: list[AxisGrouping] = []
    before: tuple[int, ...] = ()
    for n, kind, own in zip(sizes, kinds, axes, strict=True):
        together = _kind_of_pair(new_kinds[-1], kind, n) if before and before[-1] == own[0] else None
        if together is None:
            shape.append(n)
            new_kinds.append(kind)
        else:
            shape[-1], new_kinds[-1] = shape[-1] * n, together
        before = own
    return tuple(shape), new_kinds


def _kind_of_pair(slow: AxisGrouping, fast: AxisGrouping, n: int) -> AxisGrouping | None:
    """The grouping of an axis from the groupings of its slow and its fast part, of n indexes; None if there is none."""
    if slow == OWN_SCALE:
        short = fast == WHOLE_AXIS or (isinstance(fast, int) and fast >= n)
        return n if short else fast if fast == OWN_SCALE or n % int(fast) == 0 else None
    if fast == WHOLE_AXIS or (isinstance(fast, int) and fast >= n):
        return WHOLE_AXIS if slow == WHOLE_AXIS else int(slow) * n
    return None


def _with_scale_groups(fmt: ScaledFormat, original: ScaledFormat, kinds: Sequence[AxisGrouping]) -> ScaledFormat:
    """Scales that are quantized themselves have their groups along the blocks of the numbers."""
    if not isinstance(original.scale, ScaledFormat) or original.scale.group is None or original.scale.axis != -1:
        return fmt
    blocks = [i - len(kinds) for i, kind in enumerate(kinds) if isinstance(kind, int)]
    if not blocks:
        return fmt
    return fmt(scale=_with_scale_groups(original.scale(axis=blocks[-1]), original.scale, kinds))


# -- entries among kept scales ---------------------------------------------------------------------------------------


def first_weight_entry(placement: WeightLayout, source: ScaleFrom, value: Any) -> Array:
    """The entry of a parameter before the first call: the scales of the format's rule, or an empty history."""
    if isinstance(source, DelayedScaling):
        return jnp.zeros((*value.shape[: value.ndim - placement.ndim], source.length))
    return placement.fit_scales(jnp.asarray(value))


def weight_scale_entry(
    name: str, placement: WeightLayout, source: ScaleFrom, value: Array, scales: Scales | None
) -> Array:
    """The entry of a parameter among kept scales, in its shape."""
    entry = None if scales is None else scales.entries.get(name)
    if entry is None:
        raise ValueError(f"scales has no {name!r}: pass scales=low.start(params, ...), or what training made of it")
    like = jax.ShapeDtypeStruct(value.shape, value.dtype)
    shape = jax.eval_shape(partial(first_weight_entry, placement, source), like).shape
    if entry.shape != shape:
        raise ValueError(f"scales: {name!r} has shape {entry.shape}, and its rule needs {shape}: it is of another rule")
    return entry


def weight_scale_state(
    name: str, placement: WeightLayout, source: ScaleFrom, value: Array, scales: Scales
) -> tuple[WeightScaleState, dict[str, Array]]:
    """The kept scales of a parameter, and its history after the call."""
    entry = weight_scale_entry(name, placement, source, value, scales)
    if not isinstance(source, DelayedScaling):
        return WeightScaleState(entry, source), {}
    stack = value.ndim - placement.ndim
    span, after = map_over_stack(stack, lambda both: update_history(source, *both), (entry, value))
    return WeightScaleState(span, source), {name: after}


# -- rotated parameters ------------------------------------------------------------------------------------------------


def weight_rotation_of(
    rule: Rule, path: str, shape: Sequence[int], uses: Sequence[ParamUse], is_result: bool
) -> provenance.WeightRotation | None:
    """The rotation of a parameter that a rule rounds, along the sum of its products; None if there is none.

    Args:
        rule: the rule.
        path: of the parameter.
        shape: of it.
        uses: all of them.
        is_result: whether the function returns it, too.

    Raises:
        ValueError: if anything needs the parameter as it is.
    """
    first = next((use for use in uses if use.kind == "product" and use.view is not None), None)
    if rule.forward_rotation is None or first is None:
        return None
    assert first.view is not None
    for use in uses:
        if use.kind != "product":
            raise _rotation_error(rule, path, f"{use.where} takes it as it is")
        if use.view is None or use.view.contracting != first.view.contracting:
            raise _rotation_error(rule, path, f"{use.where} sums over other axes")
        if not use.is_intact:
            why = f"its numbers are computed with before {use.where}"
            raise _rotation_error(rule, path, f"{why}, or put in another order, or sent between devices")
    if is_result:
        raise _rotation_error(rule, path, "the function returns it")
    layout = provenance.MatrixLayout.of(shape, stack_ndim(shape, first.view), first.view, 0)
    if layout is None:
        raise _rotation_error(rule, path, f"{first.where} takes a part of an axis")
    return provenance.WeightRotation(rule.forward_rotation, layout)


def with_weight_rotation(
    program: Any, step: ProductStep, roundings: ProductRoundings | None
) -> ProductRoundings | None:
    """The roundings of a product whose weight may be stored rotated.

    Args:
        program: the `QuantizedProgram`, with its rounded parameters.
        step: the product.
        roundings: its roundings; None if nothing is rounded.

    Raises:
        ValueError: if the product does not rotate its inputs as its weight is.
    """
    params, uses = program.rounded_params, step.param_uses
    rotations = {use.leaf: params[use.leaf].layout.rotation if use.leaf in params else None for use in uses}
    if roundings is not None and (rotation := roundings.forward_rotation) is not None and step.product is not None:
        width = _sum_length(step)
        if rotation.size == "all" and width % 2:
            raise ValueError(
                f"rotation={rotation} of the {roundings.place}: its sum has {width} numbers, which is odd, so "
                "there is no Hadamard matrix; put a rule without a rotation before it"
            )
    if not any(rotations.values()):
        return roundings
    for use in uses:
        param_rotation = rotations[use.leaf] or next(filter(None, rotations.values()))
        own_rotation = None if roundings is None else roundings.forward_rotation
        whole = use.view is not None and math.prod(part.size for part in use.view.contracting) == _sum_length(step)
        if rotations[use.leaf] is None or own_rotation != param_rotation.rotation or not whole:
            why = f"the inputs of {step.where} are not rotated in the same way"
            leaf = next(leaf for leaf, own in rotations.items() if own is not None)
            raise _rotation_error(program.rule_of(leaf), program.paths[leaf], why)
    assert roundings is not None
    return replace(roundings, skip_weight_rotation=True)


def _sum_length(step: ProductStep) -> int:
    """How many products are summed for each result."""
    assert step.product is not None
    return math.prod(step.eqn.invars[0].aval.shape[axis] for axis in step.product.forward.left.contracting)


def _rotation_error(rule: Rule, path: str, why: str) -> ValueError:
    return ValueError(
        f"rotation={rule.rotation} of the parameter {path!r}: {why}; put Rule({path_pattern(path)!r}, ...) without a "
        f"rotation before {rule}"
    )
