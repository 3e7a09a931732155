"""The products whose inputs are looked at, in the order of a program; and why others are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jchop._program.control import CONTROL, ScanOrder, ScanTurn, operands_of_role, roles_of, turns_around
from jchop._program.run import Runner, interpret
from jchop._program.step import CUSTOM_CALLS
from jchop._quantized.products.product import ConvProduct, DotProduct, RaggedProduct
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.provenance import AxisFactor, MatrixLayout, MatrixView, ParamOrigin, move_origin
from jchop._quantized.program.weight_layout import stack_ndim


def runs_step_by_step(step: Any) -> bool:
    """Whether the programs of a step are run equation by equation: in calls, branches and loops of known length.

    The row of `CONTROL` says it: a loop has turns, and calls and branches pass operands on, or are derivative rules.
    """
    is_call = step.name in (*CUSTOM_CALLS, "cond") or "passed" in roles_of(step)
    return is_call or CONTROL[step.name].turns is not None


class ProgramWalk(Runner):
    """Follows facts through a program in place of numbers; `CONTROL` says where they go. A use of it is a subclass."""

    differentiates = False
    #: The fact about a value of which nothing is known.
    unknown: Any = None
    #: The loops around that run over a parameter, by its index.
    loops_over: Mapping[int, tuple[Any, ...]] = MappingProxyType({})

    def constant(self, value: Any) -> Any:
        """A constant or a literal."""
        return self.unknown

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of a step that holds programs; of one that does not run step by step nothing is known."""
        if runs_step_by_step(step):
            return super().control(step, seeds, args)
        for plan in step.inner:
            interpret(self, plan, None, [self.unknown] * len(plan.jaxpr.invars))
        return [self.unknown] * len(step.eqn.outvars)

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """Walks the branches once each. Of their operands and results nothing is known."""
        for run in branches:
            outs = run([self.unknown] * len(operands))
        return [self.unknown] * len(outs)

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """Walks one turn of a loop, with the loop in `loops_over`. Of its operands and results nothing is known."""
        outer = self.loops_over
        self.loops_over = {**outer, **{leaf: (*outer.get(leaf, ()), step) for leaf in scanned_leaves(step)}}
        carry, ys = turn([self.unknown] * len(start), [self.unknown] * len(xs), 0)
        self.loops_over = outer
        return [self.unknown] * len(carry), [self.unknown] * len(ys)


@dataclass(frozen=True)
class WeightSite:
    """A parameter that is the weight of a product.

    Args:
        leaf: the index of the parameter.
        view: how its first product views it.
        batch: how many of the axes that its product keeps, the first ones, are axes of a batch.
        layout: the parameter as matrices.
        stack: how many axes of a stack it has in front.
        turns: how many of these are turns of loops, or have constant indexes, and are looked at one by one.
        groups: how many groups of channels its convolution has; each is a matrix of the batch of `layout`.
        flips_kernel: whether its convolution takes it in reverse order along all axes of the space.
    """

    leaf: int
    view: MatrixView
    batch: int
    layout: MatrixLayout
    stack: int
    turns: int
    groups: int = 1
    flips_kernel: bool = False


@dataclass(frozen=True)
class Stage:
    """Parameters that are rounded at once, because their products have one input.

    Args:
        leaves: their indexes.
        turn: of the loops around the products, or the constant indexes of a stack.
    """

    leaves: tuple[int, ...]
    turn: tuple[int, ...] = ()


#: A value with numbers from others than its first parameter, so that its slices are not slices of this parameter.
_JOINED, _JOINING_PRIMITIVES = 2, frozenset(("concatenate", "pad", "stack"))


@dataclass
class WeightSites:
    """The sites of a program.

    Args:
        by_leaf: by the index of the parameter.
        of_step: the sites of a product, and which of its operands they are, by the identity of its step.
        indexes: the constants by which a product takes one layer of a stack, by the identity of its step and the index
            of the parameter.
        stacks: the axes of these stacks, by the index of the parameter.
        reasons: why a parameter that reaches a product is not looked at.
        others: other uses of a parameter than the products that are looked at: the step, which of its operands it is,
            and the use.
        inputs: the products in the order of the program, each turn of a loop by itself. Each has the parameter, the
            turns of loops that run over it or its constant indexes, and a value equal for neighbours with one input.
    """

    by_leaf: dict[int, WeightSite] = field(default_factory=dict)
    of_step: dict[int, tuple[int, list[WeightSite]]] = field(default_factory=dict)
    indexes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    stacks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    others: dict[int, list[tuple[ProductStep, int, ParamUse]]] = field(default_factory=dict)
    inputs: list[tuple[int, tuple[int, ...], Any]] = field(default_factory=list)

    def stages(self, leaves: Sequence[int]) -> Iterator[Stage]:
        """The stages of some parameters, in the order of the program; each turn of a loop by itself."""
        earlier: set[tuple[int, tuple[int, ...]]] = set()
        for _, group in groupby(self.inputs, lambda entry: entry[2]):
            pairs = dict.fromkeys((leaf, turn) for leaf, turn, _ in group if leaf in leaves)
            new_pairs = [pair for pair in pairs if pair not in earlier]
            earlier.update(new_pairs)
            for turn in dict.fromkeys(turn for _, turn in new_pairs):
                yield Stage(tuple(leaf for leaf, leaf_turn in new_pairs if leaf_turn == turn), turn)

    def other_layers(self, program: Any, stages: Sequence[Stage]) -> list[tuple[int, tuple[int, ...], str]]:
        """The layers of stacks that are in none of some stages: the parameter, the indexes, and its use if known."""
        stage_layers = {(leaf, stage.turn) for stage in stages for leaf in stage.leaves}
        layers = []
        for leaf, layer in ((leaf, layer) for leaf, shape in self.stacks.items() for layer in np.ndindex(*shape)):
            if (leaf, layer) not in stage_layers:
                uses = [use for use in program.uses[leaf] if use.kind == "rows"]
                lookups = [_layer_indexes(use, program.shapes[leaf]) for use in uses]
                is_lookup = any(indexes == layer[: len(indexes)] for indexes in lookups)
                layers.append((leaf, layer, "rows" if is_lookup else ""))
        return layers


def find_sites(program: Any) -> WeightSites:
    """The sites of a program that `QuantizedFunction.traced` gave."""
    sites, walk, argument_count = WeightSites(), _DependenceWalk(), len(program.plan.jaxpr.invars)
    interpret(walk, program.plan, None, [int(i < len(program.paths)) for i in range(argument_count)])
    first_views: dict[int, MatrixView] = {}
    for leaf, uses in program.uses.items():
        view = next((use.view for use in uses if use.kind == "product"), None)
        if view is not None:
            first_views[leaf] = view
    index_counts: dict[int, list[int]] = {}  # how many constant indexes each product takes
    for step in (step for step in program.plan.walk() if step.product is not None):
        for uses, dependence in zip(step.uses, walk.operands[id(step)], strict=False):
            for use in uses:
                indexes = () if dependence == _JOINED else _layer_indexes(use, program.shapes[use.leaf])
                index_counts.setdefault(use.leaf, []).append(len(indexes))
    sites.stacks = {leaf: program.shapes[leaf][: counts[0]] for leaf, counts in index_counts.items() if all(counts)}
    interpret(_SiteWalk(program, first_views, sites, walk.operands), program.plan, None, [None] * argument_count)
    calls = ((step, use) for step in program.plan.walk() if step.call for use in step.param_uses if use.view)
    sites.reasons |= {use.leaf: f"{step.name} has sums of its own" for step, use in calls}
    for leaf in set(sites.reasons) & set(sites.by_leaf):
        del sites.reasons[leaf]
    for step in program.plan.walk():
        for operand, use in ((operand, use) for operand, uses in enumerate(step.uses) for use in uses):
            if use.leaf in sites.by_leaf and _is_other_use(step, operand, use, program.shapes[use.leaf], sites):
                sites.others.setdefault(use.leaf, []).append((step, operand, use))
    return sites


def rounded_sites(program: Any, sites: WeightSites) -> dict[int, WeightSite]:
    """The sites of the parameters that rules round, in the layout of the site, by the index of the parameter."""
    rounded, by_leaf = program.rounded_params, sites.by_leaf
    return {leaf: by_leaf[leaf] for leaf in by_leaf if leaf in rounded and rounded[leaf].use.view == by_leaf[leaf].view}


def _is_other_use(step: ProductStep, operand: int, use: ParamUse, shape: tuple[int, ...], sites: WeightSites) -> bool:
    """Whether a use is no site, and reads numbers that a site of the parameter reads, too."""
    side, step_sites = sites.of_step.get(id(step), (0, []))
    if (side == operand and any(site.leaf == use.leaf for site in step_sites)) or not (step.product or any(step.data)):
        return False
    layer = _layer_indexes(use, shape) if use.leaf in sites.stacks else ()
    layers = [indexes for (_, leaf), indexes in sites.indexes.items() if leaf == use.leaf]
    return not layers or any(indexes[: len(layer)] == layer for indexes in layers)


class _DependenceWalk(ProgramWalk):
    """Finds the level of each operand of a product: 0 depends on no parameter, 1 on one, 2 on one that is joined."""

    unknown = _JOINED

    def __init__(self) -> None:
        self.operands: dict[int, Sequence[int]] = {}  # by the identity of the step

    def constant(self, value: Any) -> int:
        """A constant or a literal."""
        return 0

    def control(self, step: Any, seeds: Any, args: list[int]) -> list[int]:
        """A step that holds programs."""
        outs = super().control(step, seeds, args)
        return outs if runs_step_by_step(step) else [max(args, default=0)] * len(outs)

    def run(self, part: Any, seeds: Any, args: list[int]) -> list[int]:
        """The levels of the results: the highest of the operands, or `_JOINED`. Levels at products are kept."""
        if part.product is not None:
            self.operands[id(part)] = args
        highest = max(args, default=0)
        return [_JOINED if highest and part.name in _JOINING_PRIMITIVES else highest] * len(part.eqn.outvars)

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """The levels of a branch's results: the highest of all branches and of the index."""
        return [max(index, *levels) for levels in zip(*(run(operands) for run in branches), strict=True)]

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """The levels of a loop's results: turns are walked until the levels of the carry stay."""
        while True:
            after, ys = turn(start, xs, 0)
            after = list(map(max, start, after))
            if after == start:
                return start, ys
            start = after


class _SiteWalk(ProgramWalk):
    """Finds the sites of a program, in its order; `first_views` are for the first product of each parameter."""

    def __init__(
        self, program: Any, first_views: Mapping[int, MatrixView], sites: WeightSites, dependence: Mapping[int, Any]
    ) -> None:
        self.program, self.views, self.sites, self.inputs = program, first_views, sites, sites.inputs
        self.dependence = dependence
        self.refusal = ""

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A step that holds programs; not every one may have sites."""
        outer = self.refusal
        self.refusal = outer or ("" if runs_step_by_step(step) else f"within {step.name}")
        outs = super().control(step, seeds, args)
        self.refusal = outer
        return outs

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """Walks one turn of a loop, then lists its products in `inputs`, for each turn if they take layers."""
        leaves, outer, self.inputs = scanned_leaves(step), self.inputs, []
        outs = super().scan(step, turn, start, xs, order)
        inner, self.inputs = self.inputs, outer
        turns = range(order.length)[:: -1 if order.reverse else 1]
        if not any(leaf in leaves for leaf, *_ in inner):
            turns = turns[:1]  # they are the same in all turns
        for k in turns:
            place = id(step), k
            self.inputs += [
                (leaf, (k, *own) if leaf in leaves else own, (*place, source)) for leaf, own, source in inner
            ]
        return outs

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """Finds the sites of a product and puts them into `of_step`; nothing is known of results."""
        for side in (i for i in (0, 1) if part.product is not None and part.uses and part.uses[i]):
            sites = [site for use in part.uses[side] if (site := self._site_of(part, side, use)) is not None]
            if sites:
                self.sites.of_step[id(part)] = side, sites
        return [None] * len(part.eqn.outvars)

    def _site_of(self, step: ProductStep, side: int, use: ParamUse) -> WeightSite | None:
        """The site of a use, with the constant indexes of its layer and the variable that is its input."""
        sites, shape = self.sites, self.program.shapes[use.leaf]
        site = self.refusal or _product_refusal(step, side, use, self.views, self.dependence[id(step)])
        turns = [length for _, length in turns_around(self.loops_over.get(use.leaf, ()))]
        site = site or _site_of_use(step, side, use, shape, turns)
        if isinstance(site, str):
            sites.reasons.setdefault(use.leaf, site)
            return None
        indexes = _layer_indexes(use, shape) if use.leaf in sites.stacks and not site.turns else ()
        if indexes:
            site = replace(site, turns=len(indexes))
            sites.indexes[id(step), use.leaf] = indexes
        if sites.by_leaf.setdefault(use.leaf, site) != site:
            sites.reasons.setdefault(use.leaf, "another product takes it in another loop")
            return None
        self.inputs.append((use.leaf, indexes, step.eqn.invars[1 - side]))
        return site


def scanned_leaves(step: Any) -> frozenset[int]:
    """The parameters that a `scan` runs over."""
    return frozenset(o.leaf for fact in operands_of_role(step, "sliced", step.known) for o in fact.origins)


def _layer_indexes(use: ParamUse, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The constant indexes of the layer of a stack that a product takes; none if it takes no layer, or another way."""
    indexes = []
    for axis in range(0 if use.view is None else stack_ndim(shape, use.view)):
        index, length = 0, shape[axis]
        for parts, start, size in (cut for cut in use.cuts if any(part.axis == axis for part in cut[0])):
            if (
                parts != (AxisFactor(axis, shape[axis]),)
                or not isinstance(start, int)
                or not 0 <= start <= length - size
            ):
                return ()
            index, length = index + start, size
        if length != 1:
            return ()
        indexes.append(index)
    return tuple(indexes)


def _product_refusal(
    step: ProductStep, side: int, use: ParamUse, views: Mapping[int, MatrixView], dependence: Sequence[int]
) -> str:
    """Why a product is not looked at; empty if it is."""
    if not step.data[1 - side] and dependence[1 - side]:
        return "a product of parameters alone"
    if use.view != views[use.leaf]:
        return "another product takes it along other axes"
    if not use.is_intact and not _flips_kernel(step, side, use):
        return "its numbers are computed with before the product"
    if any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in step.eqn.invars[:2]):
        return "its product is complex"
    return "" if side or isinstance(step.product, DotProduct) else f"it is the left operand of {step.name}"


def _flips_kernel(step: ProductStep, side: int, use: ParamUse) -> bool:
    """Whether a convolution takes a kernel in reverse order along all axes of the space."""
    if not (side and isinstance(step.product, ConvProduct) and use.reversed_axes):
        return False
    origin = next(o for o in step.known[side].origins if o.leaf == use.leaf)
    return use.reversed_axes == {part.axis for i in step.product.numbers.rhs_spec[2:] for part in origin.axes[i]}


def _site_of_use(
    step: ProductStep, side: int, use: ParamUse, shape: tuple[int, ...], turns: Sequence[int]
) -> WeightSite | str:
    """The site of a parameter in a product, or why its inputs are not looked at; `turns` are lengths of loops."""
    product, view = step.product, use.view
    assert product is not None and view is not None
    batch = len(product.batch[0]) if isinstance(product, DotProduct) else 1 if isinstance(product, RaggedProduct) else 0
    operand = (product.forward.left, product.forward.right)[side]
    operand_shape = step.eqn.invars[side].aval.shape
    part_reason = "its product takes a part of an axis"
    groups = product.feature_groups if isinstance(product, ConvProduct) else 1
    free_sizes, axes, num_batch = [operand_shape[axis] for axis in operand.free], view.free, batch
    if groups > 1:  # the axis of the outputs has the groups and, within them, their outputs
        group_shape = [groups, free_sizes[0] // groups]
        origin = move_origin("reshape", {}, ParamOrigin(use.leaf, axes), free_sizes, group_shape)
        if origin is None:
            return part_reason
        free_sizes, axes, num_batch = group_shape, origin.axes, 1
    part_sizes = [math.prod(part.size for part in parts) for parts in (*axes[:num_batch], view.contracting)]
    axis_lengths = [*free_sizes[:num_batch], math.prod(operand_shape[axis] for axis in operand.contracting)]
    takes_part = part_sizes[-1] != axis_lengths[-1] or any(
        n not in (1, size) for n, size in zip(part_sizes, axis_lengths, strict=True)
    )
    stack = stack_ndim(shape, view)
    layout = None if takes_part else MatrixLayout.of(shape, stack, MatrixView(axes, view.contracting), num_batch)
    if layout is None:
        return part_reason
    if len(turns) not in (0, stack):
        return "it is a stack of stacks, and not all of them are turns of a loop"
    cuts_stack = any(part.axis < stack for parts, *_ in use.cuts for part in parts)
    if turns and (cuts_stack or tuple(turns) != shape[:stack]):
        return "its loop runs over a part of the stack, or over several stacks"
    flips_kernel = _flips_kernel(step, side, use)
    return WeightSite(use.leaf, view, batch, layout, stack, len(turns), groups, flips_kernel)
