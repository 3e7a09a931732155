"""The products whose inputs are looked at, in the order of a program; and why others are not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._program.control import operands_of_role
from jchop._program.step import CUSTOM_CALLS, HIGH_CALLS, PLAIN_CALLS, REMAT_CALLS, ProgramPlan, carry_count
from jchop._quantized.products.product import ConvProduct, DotProduct, RaggedProduct
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.provenance import AxisFactor, MatrixLayout, MatrixView, ParamOrigin, move_origin
from jchop._quantized.program.weight_layout import stack_ndim

#: Calls whose programs are run in their place.
INLINE_CALLS = frozenset((*PLAIN_CALLS, *HIGH_CALLS, *REMAT_CALLS, *CUSTOM_CALLS))


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
    """

    leaf: int
    view: MatrixView
    batch: int
    layout: MatrixLayout
    stack: int
    turns: int
    groups: int = 1


@dataclass(frozen=True)
class Stage:
    """Parameters that are rounded at once, because their products have one input.

    Args:
        leaves: their indexes.
        turn: of the loops around the products, or the constant indexes of a stack.
    """

    leaves: tuple[int, ...]
    turn: tuple[int, ...] = ()


#: A value of which not all numbers are those of its first parameter, so that its slices are not those of this one.
_MIXED, _MIXING_PRIMITIVES = 2, frozenset(("concatenate", "pad", "stack"))
#: The lengths of the loops around a product that run over a parameter, by its index.
_LoopLengths = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _LoopSites:
    leaves: frozenset[int]
    turns: tuple[int, ...]
    inputs: list[Any]  # loops, and a leaf, the constant indexes of its stack, and the input of its product


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
        others: what takes a parameter beside the products that are looked at: the step, which of its operands it is,
            and the use.
        inputs: the products in the order of the program, as in `_LoopSites`.
        dependence: of each operand of a product 0 if it depends on no parameter, 1 if it does, 2 if it does on one that
            was joined with something; by the identity of its step.
    """

    by_leaf: dict[int, WeightSite] = field(default_factory=dict)
    of_step: dict[int, tuple[int, list[WeightSite]]] = field(default_factory=dict)
    indexes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    stacks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    others: dict[int, list[tuple[ProductStep, int, ParamUse]]] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    dependence: dict[int, list[int]] = field(default_factory=dict)

    def stages(self, leaves: Sequence[int]) -> Iterator[Stage]:
        """The stages of some parameters, in the order of the program; each turn of a loop by itself."""
        earlier: set[tuple[int, tuple[int, ...]]] = set()
        for input_pairs in _leaves_by_input(self.inputs, {}):
            new_pairs = [pair for pair in dict.fromkeys(input_pairs) if pair[0] in leaves and pair not in earlier]
            earlier.update(new_pairs)
            for indexes in dict.fromkeys(indexes for _, indexes in new_pairs):
                yield Stage(tuple(leaf for leaf, leaf_indexes in new_pairs if leaf_indexes == indexes), indexes)

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


def _leaves_by_input(
    inputs: Sequence[Any], iterations: dict[int, tuple[int, ...]]
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """Parameters whose products have one input, each with the turns of the loops that run over it, or its indexes."""
    pending: list[tuple[int, tuple[int, ...]]] = []
    last_source: Any = None
    for entry in inputs:
        if isinstance(entry, _LoopSites):
            if pending:
                yield pending
            pending, last_source = [], None
            for iteration in entry.turns:
                yield from _leaves_by_input(
                    entry.inputs, {**iterations, **{i: (*iterations.get(i, ()), iteration) for i in entry.leaves}}
                )
            continue
        leaf, indexes, source = entry
        if pending and source is not last_source:
            yield pending
            pending = []
        pending.append((leaf, indexes or iterations.get(leaf, ())))
        last_source = source
    if pending:
        yield pending


def find_sites(program: Any) -> WeightSites:
    """The sites of a program that `QuantizedFunction.traced` gave."""
    sites = WeightSites()
    arguments = [int(i < len(program.paths)) for i in range(len(program.plan.jaxpr.invars))]
    _follow_parameters(program.plan, arguments, sites.dependence)
    first_views: dict[int, MatrixView] = {}
    for leaf, uses in program.uses.items():
        view = next((use.view for use in uses if use.kind == "product"), None)
        if view is not None:
            first_views[leaf] = view
    index_counts: dict[int, list[int]] = {}  # how many constant indexes each product takes
    for step in (step for step in program.plan.walk() if step.product is not None):
        for uses, dependence in zip(step.uses, sites.dependence[id(step)], strict=False):
            for use in uses:
                indexes = _layer_indexes(use, program.shapes[use.leaf]) if dependence != _MIXED else ()
                index_counts.setdefault(use.leaf, []).append(len(indexes))
    sites.stacks = {leaf: program.shapes[leaf][: counts[0]] for leaf, counts in index_counts.items() if all(counts)}
    _walk_sites(program.plan, program, first_views, sites, {}, "")
    for leaf in set(sites.reasons) & set(sites.by_leaf):
        del sites.reasons[leaf]
    for step in program.plan.walk():
        for operand, use in ((operand, use) for operand, uses in enumerate(step.uses) for use in uses):
            if use.leaf in sites.by_leaf and _is_other_use(step, operand, use, program.shapes[use.leaf], sites):
                sites.others.setdefault(use.leaf, []).append((step, operand, use))
    return sites


def rounded_sites(program: Any, sites: WeightSites) -> dict[int, WeightSite]:
    """The sites of parameters that rules round, as their first product views them."""
    placements = program.placements
    return {i: site for i, site in sites.by_leaf.items() if i in placements and placements[i][1].view == site.view}


def _is_other_use(step: ProductStep, operand: int, use: ParamUse, shape: tuple[int, ...], sites: WeightSites) -> bool:
    """Whether a use is no site, and reads numbers that a site of the parameter reads, too."""
    side, step_sites = sites.of_step.get(id(step), (0, []))
    if (side == operand and any(site.leaf == use.leaf for site in step_sites)) or not (step.product or any(step.data)):
        return False
    layer = _layer_indexes(use, shape) if use.leaf in sites.stacks else ()
    layers = [indexes for (_, leaf), indexes in sites.indexes.items() if leaf == use.leaf]
    return not layers or any(indexes[: len(layer)] == layer for indexes in layers)


def _walk_sites(
    plan: ProgramPlan, program: Any, views: dict[int, MatrixView], sites: WeightSites, loops: _LoopLengths, refusal: str
) -> None:
    inputs = sites.inputs
    for step in plan.steps:
        if step.product is not None:
            inputs += _sites_of_product(step, program, views, sites, loops, refusal)
        elif step.kind == "control":
            is_run = step.name in INLINE_CALLS or step.name in ("scan", "cond")
            reason = refusal or ("" if is_run else f"within {step.name}")
            if step.name == "scan":
                stacked_leaves = scanned_leaves(step)
                order = range(step.eqn.params["length"])
                inner_loops = {leaf: (*loops.get(leaf, ()), len(order)) for leaf in stacked_leaves}
                loop = _LoopSites(stacked_leaves, tuple(reversed(order) if step.eqn.params["reverse"] else order), [])
                sites.inputs = loop.inputs
                _walk_sites(step.inner[0], program, views, sites, {**loops, **inner_loops}, reason)
                sites.inputs = inputs
                if loop.inputs:
                    inputs.append(loop)
            else:
                for inner in step.inner:
                    _walk_sites(inner, program, views, sites, loops, reason)


def scanned_leaves(step: Any) -> frozenset[int]:
    """The parameters that a `scan` runs over."""
    return frozenset(o.leaf for fact in operands_of_role(step, "sliced", step.known) for o in fact.origins)


def _sites_of_product(
    step: ProductStep, program: Any, views: dict[int, MatrixView], sites: WeightSites, loops: _LoopLengths, refusal: str
) -> Iterator[tuple[int, tuple[int, ...], Any]]:
    """The sites of one product, each with the constant indexes of its layer and the variable that is its input."""
    sides = [i for i in (0, 1) if step.uses and step.uses[i]]
    for side in sides:
        step_sites = []
        for use in step.uses[side]:
            reason = refusal or _product_refusal(step, side, use, views, sites.dependence[id(step)])
            site = None
            if not reason:
                site = _site_of_use(step, side, use, program.shapes[use.leaf], loops.get(use.leaf, ()))
                reason = site if isinstance(site, str) else ""
            if reason or not isinstance(site, WeightSite):
                sites.reasons.setdefault(use.leaf, reason)
                continue
            indexes = (
                _layer_indexes(use, program.shapes[use.leaf]) if use.leaf in sites.stacks and not site.turns else ()
            )
            if indexes:
                site = replace(site, turns=len(indexes))
                sites.indexes[id(step), use.leaf] = indexes
            first_site = sites.by_leaf.setdefault(use.leaf, site)
            if first_site != site:
                sites.reasons.setdefault(use.leaf, "another product takes it in another loop")
                continue
            step_sites.append(site)
            yield use.leaf, indexes, step.eqn.invars[1 - side]
        if step_sites:
            sites.of_step[id(step)] = side, step_sites


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


def _follow_parameters(plan: ProgramPlan, dependence: Sequence[int], operands: dict[int, list[int]]) -> list[int]:
    """Whether results of a program depend on parameters, as `WeightSites.dependence`; fills `operands`, of products."""
    env = dict(zip(plan.jaxpr.invars, dependence, strict=True))

    def read(v: Any) -> int:
        return 0 if isinstance(v, Literal) else env.get(v, 0)

    for step in plan.steps:
        levels = [read(v) for v in step.eqn.invars]
        highest = max(levels, default=0)
        outs = [_MIXED if highest and step.name in _MIXING_PRIMITIVES else highest] * len(step.eqn.outvars)
        if step.product is not None:
            operands[id(step)] = levels
        elif not step.inner:
            pass
        elif step.name in INLINE_CALLS:
            outs = _follow_parameters(step.inner[0], levels, operands)
        elif step.name == "cond":
            branches = [_follow_parameters(inner, levels[1:], operands) for inner in step.inner]
            outs = [max(levels[0], *branch_outs) for branch_outs in zip(*branches, strict=True)]
        elif step.name == "scan":
            num_consts, num_carry = carry_count(step.eqn.params)
            earlier: list[int] | None = None
            while earlier != levels[num_consts : num_consts + num_carry]:
                earlier = levels[num_consts : num_consts + num_carry]
                outs = _follow_parameters(step.inner[0], levels, operands)
                levels[num_consts : num_consts + num_carry] = [max(pair) for pair in zip(earlier, outs, strict=False)]
        else:
            for inner in step.inner:
                _follow_parameters(inner, [_MIXED] * len(inner.jaxpr.invars), operands)
        env.update(zip(step.eqn.outvars, outs, strict=True))
    return [read(v) for v in plan.jaxpr.outvars]


def _product_refusal(
    step: ProductStep, side: int, use: ParamUse, views: dict[int, MatrixView], dependence: Sequence[int]
) -> str:
    """Why a product is not looked at; empty if it is."""
    if not step.data[1 - side] and dependence[1 - side]:
        return "a product of parameters alone"
    if use.view != views[use.leaf]:
        return "another product takes it along other axes"
    if not use.is_intact:
        return "its numbers are computed with before the product"
    if any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in step.eqn.invars[:2]):
        return "its product is complex"
    if isinstance(step.product, DotProduct):
        return ""
    if side == 0:
        return f"it is the left operand of {step.name}"
    return ""


def _site_of_use(
    step: ProductStep, side: int, use: ParamUse, shape: tuple[int, ...], turns: Sequence[int]
) -> WeightSite | str:
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
    return WeightSite(use.leaf, view, batch, layout, stack, len(turns), groups)
