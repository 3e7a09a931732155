"""A program as one graph: the programs within calls, loops and branches joined to the values around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._program.step import ProgramPlan, carry_count
from jchop._quantized.program.param_uses import dot_product_of
from jchop.ptq._data.sites import INLINE_CALLS, WeightSite, WeightSites, scanned_leaves

#: Names of nodes that are no equations: one value in all turns of a loop; a stack of which each turn has one; a result
#: of one of several branches.
LOOP_VALUE, LOOP_STACK, SAME_VALUE = "carried", "over turns", "same"
_CONSTANT = "a constant"
_NODE_TEXTS = {LOOP_VALUE: "a loop", LOOP_STACK: "a loop", SAME_VALUE: "a loop or branch"}


@dataclass(eq=False)
class GraphValue:
    """A variable, in all turns of the loops around it.

    Args:
        loops: the lengths of these loops.
        shape: in one turn.
        real: whether it holds real numbers.
        source: the fixed value that it is: ``"an argument"``, ``"a constant"``, also one that nodes make of constants
            alone; empty if a node makes it of others.
        leaf: the index of the parameter that it is, or None.
        zero: whether it is zero.
        nodes: those that make or read it.
        result: whether it is a result of the program.
        is_parameter: whether it is computed from parameters alone.
    """

    loops: tuple[int, ...]
    shape: tuple[int, ...]
    real: bool = True
    source: str = ""
    leaf: int | None = None
    zero: bool = False
    nodes: list[GraphNode] = field(default_factory=list)
    result: bool = False
    is_parameter: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is a constant of the program."""
        return self.source == _CONSTANT


@dataclass(eq=False)
class GraphNode:
    """An equation, or how a value outside of a loop or a branch is one inside.

    Args:
        name: of the primitive.
        params: of the equation.
        ins: its operands.
        outs: its results.
        where: the function and the line of it.
        product: which product it is, or None.
    """

    name: str
    params: dict[str, Any]
    ins: tuple[GraphValue, ...]
    outs: tuple[GraphValue, ...]
    where: str = ""
    product: Any = None

    def __str__(self) -> str:
        return f"{_NODE_TEXTS.get(self.name, self.name)} {self.where}".strip()


@dataclass(frozen=True)
class ProductPlace:
    """Where the product of a site is.

    Args:
        node: the product.
        side: which operand the weight is.
        site: the site.
        turns: which of the loops around it run over a stack of the weight.
    """

    node: GraphNode
    side: int
    site: WeightSite
    turns: tuple[bool, ...]


@dataclass
class ProgramGraph:
    """A program.

    Args:
        parameters: by index.
        places: of the sites, in the order of the program; without those of convolutions in groups.
    """

    parameters: dict[int, GraphValue] = field(default_factory=dict)
    places: list[ProductPlace] = field(default_factory=list)


def graph_of(program: Any, sites: WeightSites) -> ProgramGraph:
    """The graph of a program that `QuantizedFunction.traced` gave."""
    graph, ins = ProgramGraph(), []
    for i, v in enumerate(program.plan.jaxpr.invars):
        is_parameter = i < len(program.paths) and _is_real_aval(v.aval)
        value = GraphValue(
            (), _aval_shape(v), _is_real_aval(v.aval), "" if is_parameter else "an argument of the function"
        )
        if is_parameter:
            value.leaf, value.is_parameter = i, True
            graph.parameters[i] = value
        ins.append(value)
    for value in _GraphBuilder(graph, sites).enter(program.plan, ins, (), ()):
        value.result = True
    return graph


def _aval_shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _is_real_aval(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_zero_constant(v: Any, value: Any) -> bool:
    return hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, jnp.number) and not np.any(np.asarray(value))


class _GraphBuilder:
    def __init__(self, graph: ProgramGraph, sites: WeightSites) -> None:
        self.graph, self.sites = graph, sites

    def enter(
        self,
        plan: ProgramPlan,
        ins: Sequence[GraphValue],
        loops: tuple[int, ...],
        stacked_leaves: tuple[frozenset[int], ...],
    ) -> list[GraphValue]:
        """The results of a program; `stacked_leaves` are the parameters that each loop runs over."""
        consts = zip(plan.jaxpr.constvars, plan.consts, strict=True)
        env: dict[Any, GraphValue] = {v: self._constant(v, loops, _is_zero_constant(v, x)) for v, x in consts}
        env.update(zip(plan.jaxpr.invars, ins, strict=True))

        def read(v: Any) -> GraphValue:
            if isinstance(v, Literal):
                return self._constant(v, loops, _is_zero_constant(v, v.val))
            return env[v]

        for step in plan.steps:
            results = self._step(step, [read(v) for v in step.eqn.invars], loops, stacked_leaves)
            env.update(zip(step.eqn.outvars, results, strict=True))
        return [read(v) for v in plan.jaxpr.outvars]

    def _constant(self, v: Any, loops: tuple[int, ...], zero: bool) -> GraphValue:
        return GraphValue(loops, _aval_shape(v), _is_real_aval(v.aval), _CONSTANT, zero=zero)

    def _step(
        self, step: Any, ins: list[GraphValue], loops: tuple[int, ...], stacked_leaves: tuple[frozenset[int], ...]
    ) -> list[GraphValue]:
        if step.inner and step.name in INLINE_CALLS:
            return self.enter(step.inner[0], ins, loops, stacked_leaves)
        if step.inner and step.name == "cond":
            branches = [self.enter(plan, ins[1:], loops, stacked_leaves) for plan in step.inner]
            outs = [self._new_value(v, loops) for v in step.eqn.outvars]
            for out, *branch_values in zip(outs, *branches, strict=True):
                for value in branch_values:
                    self._add_node(GraphNode(SAME_VALUE, {}, (value,), (out,)))
            return outs
        if step.inner and step.name == "scan":
            return self._scan(step, ins, loops, stacked_leaves)
        outs = [self._new_value(v, loops) for v in step.eqn.outvars]
        function = step.scope.rpartition("/")[2]
        where = " ".join(text for text in (function and f"of {function}", step.source and f"at {step.source}") if text)
        product = step.product
        if step.name == "dot_general" and all(value.real for value in (*ins, *outs)):
            product = dot_product_of(step.eqn)  # one that sums over no axis is none of those that are rounded
        node = GraphNode(step.name, dict(step.eqn.params), tuple(ins), tuple(outs), where, product)
        if step.name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            outs[0].zero = ins[0].zero
        is_constant = all(value.is_constant for value in ins)
        is_parameter = not is_constant and all(v.is_parameter or v.is_constant for v in ins)
        for value in outs:
            value.is_parameter, value.source = is_parameter, _CONSTANT if is_constant else ""
        self._add_node(node)
        side, step_sites = self.sites.of_step.get(id(step), (0, ()))
        for site in step_sites:
            if site.groups == 1:
                self.graph.places.append(
                    ProductPlace(node, side, site, tuple(site.leaf in leaves for leaves in stacked_leaves))
                )
        return outs

    def _scan(
        self, step: Any, ins: list[GraphValue], loops: tuple[int, ...], stacked_leaves: tuple[frozenset[int], ...]
    ) -> list[GraphValue]:
        plan, params = step.inner[0], step.eqn.params
        num_consts, num_carry = carry_count(params)
        inner_loops = (*loops, params["length"])
        inner_values = [self._new_value(v, inner_loops) for v in plan.jaxpr.invars]
        for i, (outer, value) in enumerate(zip(ins, inner_values, strict=True)):
            self._add_node(GraphNode(LOOP_VALUE if i < num_consts + num_carry else LOOP_STACK, {}, (outer,), (value,)))
            if not num_consts <= i < num_consts + num_carry:
                value.is_parameter, value.zero, value.source = outer.is_parameter, outer.zero, outer.source
        results = self.enter(plan, inner_values, inner_loops, (*stacked_leaves, scanned_leaves(step)))
        outs = [self._new_value(v, loops) for v in step.eqn.outvars]
        for i, (value, out) in enumerate(zip(results, outs, strict=True)):
            # The value outside comes first, for both directions are the same relation.
            self._add_node(GraphNode(LOOP_VALUE if i < num_carry else LOOP_STACK, {}, (out,), (value,)))
        for before, after in zip(inner_values[num_consts : num_consts + num_carry], results[:num_carry], strict=True):
            self._add_node(GraphNode(SAME_VALUE, {}, (after,), (before,)))
        return outs

    def _new_value(self, v: Any, loops: tuple[int, ...]) -> GraphValue:
        return GraphValue(loops, _aval_shape(v), _is_real_aval(v.aval))

    def _add_node(self, node: GraphNode) -> None:
        for value in dict.fromkeys((*node.ins, *node.outs)):
            value.nodes.append(node)
