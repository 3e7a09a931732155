"""A program as one graph: the programs within calls, loops and branches joined to the values around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jchop._program.control import CONTROL, ScanOrder, ScanTurn, roles_of
from jchop._program.run import interpret
from jchop._quantized.program.param_uses import dot_product_of
from jchop.ptq._data.sites import ProgramWalk, WeightSite, WeightSites, runs_step_by_step, scanned_leaves

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
            alone. Empty if a node makes it of others.
        leaf: the index of the parameter that it is, or None.
        zero: whether it is zero.
        nodes: the nodes that make or read it.
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
    """The values of a program and the equations between them, from its parameters on.

    Args:
        parameters: by index.
        places: of the sites, in the order of the program, without convolutions in groups.
    """

    parameters: dict[int, GraphValue] = field(default_factory=dict)
    places: list[ProductPlace] = field(default_factory=list)


def graph_of(program: Any, sites: WeightSites) -> ProgramGraph:
    """The graph of a program that `QuantizedFunction.traced` gave."""
    walk, ins = _GraphWalk(sites), []
    for i, v in enumerate(program.plan.jaxpr.invars):
        value = GraphValue((), getattr(v.aval, "shape", ()), _is_real(v.aval), "an argument of the function")
        if i < len(program.paths) and value.real:
            value.source, value.leaf, value.is_parameter = "", i, True
            walk.graph.parameters[i] = value
        ins.append(value)
    for value in interpret(walk, program.plan, None, ins):
        value.result = True
    return walk.graph


def _is_real(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


class _GraphWalk(ProgramWalk):
    """Makes the graph; the facts are its values."""

    def __init__(self, sites: WeightSites) -> None:
        self.graph, self.sites = ProgramGraph(), sites
        self.loops: tuple[int, ...] = ()  # the lengths of the loops around
        self.stacked_leaves: tuple[frozenset[int], ...] = ()  # the parameters that each of them runs over

    def constant(self, value: Any) -> GraphValue:
        """A constant or a literal."""
        value = value if hasattr(value, "dtype") else np.asarray(value)
        is_zero = jnp.issubdtype(value.dtype, jnp.number) and not np.any(np.asarray(value))
        return GraphValue(self.loops, np.shape(value), _is_real(value), _CONSTANT, zero=is_zero)

    def run(self, part: Any, seeds: Any, args: list[GraphValue]) -> list[GraphValue]:
        """Adds a node for an equation, and a place for each site of a product; gives the values of the results."""
        avals = [v.aval for v in part.eqn.outvars]
        outs = [GraphValue(self.loops, getattr(aval, "shape", ()), _is_real(aval)) for aval in avals]
        function = part.scope.rpartition("/")[2]
        where = " ".join(text for text in (function and f"of {function}", part.source and f"at {part.source}") if text)
        product = part.product
        if part.name == "dot_general" and all(value.real for value in (*args, *outs)):
            product = dot_product_of(part.eqn)  # one that sums over no axis is none of those that are rounded
        if part.name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            outs[0].zero = args[0].zero
        is_constant = all(value.is_constant for value in args)
        is_parameter = not is_constant and all(v.is_parameter or v.is_constant for v in args)
        for value in outs:
            value.is_parameter, value.source = is_parameter, _CONSTANT if is_constant else ""
        node = _join(part.name, args, outs, dict(part.eqn.params), where, product)
        side, step_sites = self.sites.of_step.get(id(part), (0, ()))
        for site in step_sites:
            if site.groups == 1:
                turns = tuple(site.leaf in leaves for leaves in self.stacked_leaves)
                self.graph.places.append(ProductPlace(node, side, site, turns))
        return outs

    def control(self, step: Any, seeds: Any, args: list[GraphValue]) -> list[GraphValue]:
        """A step that holds programs; the operands of a loop become values in all of its turns."""
        if not runs_step_by_step(step):
            return self.run(step, seeds, args)
        turns = CONTROL[step.name].turns
        if turns is None:
            return super().control(step, seeds, args)
        outer = self.loops, self.stacked_leaves
        self.loops, self.stacked_leaves = (*self.loops, turns(step)), (*self.stacked_leaves, scanned_leaves(step))
        outs = super().control(step, seeds, list(map(self._value_in_loop, args, roles_of(step))))
        self.loops, self.stacked_leaves = outer
        return outs

    def _value_in_loop(self, outer: GraphValue, role: str) -> GraphValue:
        """The value of a loop's operand inside the loop. A carried one changes, so it is no parameter there."""
        is_stack = role == "sliced"
        value = GraphValue(self.loops, outer.shape[1:] if is_stack else outer.shape, outer.real)
        if role != "carried":
            value.is_parameter, value.zero, value.source = outer.is_parameter, outer.zero, outer.source
        _join(LOOP_STACK if is_stack else LOOP_VALUE, [outer], [value])
        return value

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> list[GraphValue]:
        """Branches: a result is one of theirs."""
        outs = []
        for values in zip(*[run(operands) for run in branches], strict=True):
            outs.append(GraphValue(self.loops, values[0].shape, values[0].real))
            for value in values:
                _join(SAME_VALUE, [value], outs[-1:])
        return outs

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """A loop: the last carried values, and the stacks of the others."""
        results = carry, ys = turn(start, xs, 0)
        last, stacks = ([GraphValue(self.loops[:-1], value.shape, value.real) for value in some] for some in results)
        for stack in stacks:
            stack.shape = (order.length, *stack.shape)
        # The value outside comes first, for both directions are the same relation.
        for name, outs, values in ((LOOP_VALUE, last, carry), (LOOP_STACK, stacks, ys)):
            for out, value in zip(outs, values, strict=True):
                _join(name, [out], [value])
        for before, after in zip(start, carry, strict=True):
            _join(SAME_VALUE, [after], [before])
        return last, stacks


def _join(
    name: str, ins: Sequence[GraphValue], outs: Sequence[GraphValue], params: Any = None, where: str = "",
    product: Any = None,
) -> GraphNode:  # fmt: skip
    """A node, known to its values."""
    node = GraphNode(name, params or {}, tuple(ins), tuple(outs), where, product)
    for value in dict.fromkeys((*ins, *outs)):
        value.nodes.append(node)
    return node
