"""A program as one graph: the programs within calls, loops and branches joined to the values around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._products.traced.analysis import dot_of
from jchop._program.step import Plan, carry_count
from jchop.ptq._sites import ENTERED, Site, Sites

__all__ = ["CARRIED", "OVER_TURNS", "SAME", "Graph", "Node", "Place", "Value", "graph_of"]

#: Names of nodes that are no equations: one value in all turns of a loop; a stack of which each turn has one; a result
#: of one of several branches.
CARRIED, OVER_TURNS, SAME = "carried", "over turns", "same"
_CONSTANT = "a constant"
_TEXTS = {CARRIED: "a loop", OVER_TURNS: "a loop", SAME: "a loop or branch"}


@dataclass(eq=False)
class Value:
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
    nodes: list[Node] = field(default_factory=list)
    result: bool = False
    is_parameter: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is a constant of the program."""
        return self.source == _CONSTANT


@dataclass(eq=False)
class Node:
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
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    where: str = ""
    product: Any = None

    def __str__(self) -> str:
        return f"{_TEXTS.get(self.name, self.name)} {self.where}".strip()


@dataclass(frozen=True)
class Place:
    """Where the product of a site is.

    Args:
        node: the product.
        side: which operand the weight is.
        site: the site.
        turns: which of the loops around it run over a stack of the weight.
    """

    node: Node
    side: int
    site: Site
    turns: tuple[bool, ...]


@dataclass
class Graph:
    """A program.

    Args:
        parameters: by index.
        places: of the sites, in the order of the program; without those of convolutions in groups.
    """

    parameters: dict[int, Value] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)


def graph_of(program: Any, sites: Sites) -> Graph:
    """The graph of a program that `QuantizedFunction.traced` gave."""
    graph, ins = Graph(), []
    for i, v in enumerate(program.plan.jaxpr.invars):
        is_parameter = i < len(program.paths) and _is_real(v.aval)
        value = Value((), _shape(v), _is_real(v.aval), "" if is_parameter else "an argument of the function")
        if is_parameter:
            value.leaf, value.is_parameter = i, True
            graph.parameters[i] = value
        ins.append(value)
    for value in _Builder(graph, sites).enter(program.plan, ins, (), ()):
        value.result = True
    return graph


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _is_real(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_zero(v: Any, value: Any) -> bool:
    return hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, jnp.number) and not np.any(np.asarray(value))


class _Builder:
    def __init__(self, graph: Graph, sites: Sites) -> None:
        self.graph, self.sites = graph, sites

    def enter(
        self, plan: Plan, ins: Sequence[Value], loops: tuple[int, ...], stacked_leaves: tuple[frozenset[int], ...]
    ) -> list[Value]:
        """The results of a program; `stacked_leaves` are the parameters that each loop runs over."""
        consts = zip(plan.jaxpr.constvars, plan.consts, strict=True)
        env: dict[Any, Value] = {v: self._fixed(v, loops, _is_zero(v, x)) for v, x in consts}
        env.update(zip(plan.jaxpr.invars, ins, strict=True))

        def read(v: Any) -> Value:
            if isinstance(v, Literal):
                return self._fixed(v, loops, _is_zero(v, v.val))
            return env[v]

        for step in plan.steps:
            results = self._step(step, [read(v) for v in step.eqn.invars], loops, stacked_leaves)
            env.update(zip(step.eqn.outvars, results, strict=True))
        return [read(v) for v in plan.jaxpr.outvars]

    def _fixed(self, v: Any, loops: tuple[int, ...], zero: bool) -> Value:
        return Value(loops, _shape(v), _is_real(v.aval), _CONSTANT, zero=zero)

    def _step(
        self, step: Any, ins: list[Value], loops: tuple[int, ...], stacked_leaves: tuple[frozenset[int], ...]
    ) -> list[Value]:
        if step.inner and step.name in ENTERED:
            return self.enter(step.inner[0], ins, loops, stacked_leaves)
        if step.inner and step.name == "cond":
            branches = [self.enter(plan, ins[1:], loops, stacked_leaves) for plan in step.inner]
            outs = [self._new(v, loops) for v in step.eqn.outvars]
            for out, *branch_values in zip(outs, *branches, strict=True):
                for value in branch_values:
                    self._join(Node(SAME, {}, (value,), (out,)))
            return outs
        if step.inner and step.name == "scan":
            return self._scan(step, ins, loops, stacked_leaves)
        outs = [self._new(v, loops) for v in step.eqn.outvars]
        function = step.scope.rpartition("/")[2]
        where = " ".join(text for text in (function and f"of {function}", step.source and f"at {step.source}") if text)
        product = step.product
        if step.name == "dot_general" and all(value.real for value in (*ins, *outs)):
            product = dot_of(step.eqn)  # one that sums over no axis is none of those that are rounded
        node = Node(step.name, dict(step.eqn.params), tuple(ins), tuple(outs), where, product)
        if step.name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            outs[0].zero = ins[0].zero
        fixed = all(value.is_constant for value in ins)
        own = not fixed and all(v.is_parameter or v.is_constant for v in ins)
        for value in outs:
            value.is_parameter, value.source = own, _CONSTANT if fixed else ""
        self._join(node)
        side, step_sites = self.sites.of_step.get(id(step), (0, ()))
        for site in step_sites:
            if site.groups == 1:
                self.graph.places.append(Place(node, side, site, tuple(site.leaf in some for some in stacked_leaves)))
        return outs

    def _scan(
        self, step: Any, ins: list[Value], loops: tuple[int, ...], stacked_leaves: tuple[frozenset[int], ...]
    ) -> list[Value]:
        plan, params = step.inner[0], step.eqn.params
        num_consts, num_carry = carry_count(params)
        inside = (*loops, params["length"])
        over = frozenset(o.leaf for fact in step.known[num_consts + num_carry :] for o in fact.origins)
        inner = [self._new(v, inside) for v in plan.jaxpr.invars]
        for i, (outer, value) in enumerate(zip(ins, inner, strict=True)):
            self._join(Node(CARRIED if i < num_consts + num_carry else OVER_TURNS, {}, (outer,), (value,)))
            if not num_consts <= i < num_consts + num_carry:
                value.is_parameter, value.zero, value.source = outer.is_parameter, outer.zero, outer.source
        results = self.enter(plan, inner, inside, (*stacked_leaves, over))
        outs = [self._new(v, loops) for v in step.eqn.outvars]
        for i, (value, out) in enumerate(zip(results, outs, strict=True)):
            # The value outside comes first, for both directions are the same relation.
            self._join(Node(CARRIED if i < num_carry else OVER_TURNS, {}, (out,), (value,)))
        for before, after in zip(inner[num_consts : num_consts + num_carry], results[:num_carry], strict=True):
            self._join(Node(SAME, {}, (after,), (before,)))
        return outs

    def _new(self, v: Any, loops: tuple[int, ...]) -> Value:
        return Value(loops, _shape(v), _is_real(v.aval))

    def _join(self, node: Node) -> None:
        for value in dict.fromkeys((*node.ins, *node.outs)):
            value.nodes.append(node)
