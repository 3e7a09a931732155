"""Counts: the numbers of terms by which a program divides sums, as a mean does, and the integers that make them.

A count is no number of the computation, so it is not rounded. It is found by its place. It divides a sum of so
many terms, or, in the derivative of this quotient, a number that is then copied so many times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jchop._emulate.rules.rules import PRIMITIVE_KINDS, is_carrier_float
from jchop._program.step import CALLS, HIGH_CALLS, equations_of, programs_of

#: The degrees of freedom that a literal count may lack, as n - 1 in a variance.
_DEGREES_OF_FREEDOM = 2
#: The most products of lengths that are kept of one value.
_MOST_LENGTHS = 128
#: A length that is not known: of axes of a mesh, or a symbolic one.
_UNKNOWN_LENGTH = 0
#: Primitives that add numbers, by the lengths of the axes that they add.
_REDUCED_AXIS_LENGTHS = {
    "reduce_sum": lambda eqn: [eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"]],
    "reduce_window_sum": lambda eqn: eqn.params["window_dimensions"],
    "cumsum": lambda eqn: [eqn.invars[0].aval.shape[eqn.params["axis"]]],
    "dot_general": lambda eqn: [eqn.invars[0].aval.shape[axis] for axis in eqn.params["dimension_numbers"][0][0]],
    "scatter-add": lambda eqn: eqn.invars[2].aval.shape,
    **dict.fromkeys(("psum", "psum_invariant"), lambda eqn: [_UNKNOWN_LENGTH]),  # over axes of a mesh
}
#: Other primitives whose results are integers if their operands are, and sums if one of these is.
_INTEGER_OPS = frozenset(
    ("add", "add_any", "sub", "mul", "neg", "abs", "convert_element_type", "iota", "reduce_max", "reduce_min")
)
#: Primitives that read counts: a sum is divided by one, or multiplied by the inverse of one.
_COUNT_READERS = ("div", "mul")
_STRUCTURAL_OPS = frozenset(name for name, kind in PRIMITIVE_KINDS.items() if kind in ("structural", "extremum"))


@dataclass(eq=False)
class _CountValue:
    """A value of a program.

    Args:
        whole: whether it is an integer that is computed from integers alone.
        number: of a literal.
        terms: the numbers of terms of the sums that it is made of.
        copies: the numbers of its copies in later values.
        counts: whether it is read as a count.
        other: whether it is read as something else.
    """

    whole: bool = False
    number: Any = None
    terms: frozenset[int] = frozenset()
    copy_counts: frozenset[int] = frozenset()
    counts: bool = False
    other: bool = False

    @property
    def is_only_count(self) -> bool:
        return self.whole and self.counts and not self.other


@dataclass(eq=False)
class _CountOp:
    """An equation with its values. A call has one literal operand, and the call's argument as its result."""

    eqn: Any
    operands: list[_CountValue]
    results: list[_CountValue]
    place: int | None = None

    @property
    def name(self) -> str:
        return self.eqn.primitive.name if self.place is None else "copy"


@dataclass
class Counts:
    """The counts of programs.

    Args:
        operands: the places of the operands that are counts, by the id of their equation.
        equations: the ids of the equations that compute counts.
    """

    operands: dict[int, tuple[int, ...]] = field(default_factory=dict)
    equations: set[int] = field(default_factory=set)
    _jaxprs: dict[int, Any] = field(default_factory=dict)

    def add(self, jaxpr: Any) -> None:
        """Finds the counts of a jaxpr and of the programs within it."""
        if id(jaxpr) in self._jaxprs or all(eqn.primitive.name not in _COUNT_READERS for eqn in equations_of(jaxpr)):
            return
        ops: list[_CountOp] = []
        self._flatten(jaxpr, [_CountValue() for _ in jaxpr.invars], ops, outermost=True)
        for op in ops:
            _propagate_terms(op)
        for op in reversed(ops):
            _propagate_copies(op)
        places = [_count_operands(op) for op in ops]
        for op, own in zip(reversed(ops), reversed(places), strict=True):
            # Notes how operands are read.
            makes_counts = _makes_counts(op)
            compares = not any(is_carrier_float(v.aval) for v in op.eqn.outvars) and op.place is None
            for i, x in enumerate(op.operands):
                x.counts |= makes_counts or i in own
                x.other |= not (makes_counts or compares or i in own)
        self._keep(ops, places)

    def _flatten(
        self, jaxpr: Any, args: Sequence[_CountValue], ops: list[_CountOp], outermost: bool = False
    ) -> list[_CountValue]:
        """The results of a jaxpr; its equations and the equations of calls become operations."""
        self._jaxprs[id(jaxpr)] = jaxpr
        env = {v: _count_value_of(v) for v in jaxpr.constvars} | dict(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> _CountValue:
            return _count_value_of(v) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            operands, inner = [read(v) for v in eqn.invars], list(programs_of(eqn))
            if eqn.primitive.name in CALLS and eqn.primitive.name not in HIGH_CALLS and len(inner) == 1:
                for i, value in enumerate(operands):
                    if value.number is not None:
                        operands[i] = _CountValue(value.whole, value.number)
                        ops.append(_CountOp(eqn, [value], [operands[i]], i))
                results = self._flatten(inner[0], operands, ops)
            else:
                results = [_count_value_of(v) for v in eqn.outvars]
                ops.append(_CountOp(eqn, operands, results))
                for one in inner:
                    self._flatten(one, [_CountValue() for _ in one.invars], ops, outermost=True)
            env.update(zip(eqn.outvars, results, strict=True))
        results = [read(v) for v in jaxpr.outvars]
        for value in results if outermost else ():
            value.other = True
        return results

    def _keep(self, ops: Sequence[_CountOp], places: Sequence[Sequence[int]]) -> None:
        """A program that is called twice has counts where both calls have them."""
        operands: dict[int, list[set[int]]] = {}
        computing: dict[int, list[bool]] = {}
        call_operands: dict[tuple[int, int], list[bool]] = {}
        for op, own in zip(ops, places, strict=True):
            if op.place is not None:
                call_operands.setdefault((id(op.eqn), op.place), []).append(op.results[0].is_only_count)
                continue
            computing.setdefault(id(op.eqn), []).append(_makes_counts(op))
            operands.setdefault(id(op.eqn), []).append(set(own))
        self.equations |= {key for key, per_call in computing.items() if all(per_call)}
        every = {key: set.intersection(*per_call) for key, per_call in operands.items()}
        for (key, place), per_call in call_operands.items():
            every.setdefault(key, set()).update([place] if all(per_call) else [])
        self.operands |= {key: tuple(sorted(counts)) for key, counts in every.items() if counts}


def _count_value_of(v: Any) -> _CountValue:
    """A value of which nothing is known but its type, and the number of a literal."""
    dtype = getattr(v.aval, "dtype", None)
    whole = dtype is not None and bool(jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))
    if not isinstance(v, Literal) or not is_carrier_float(v.aval) or np.size(v.val) != 1:
        return _CountValue(whole)
    number = float(np.asarray(v.val).astype(np.float64).item())
    return _CountValue(number.is_integer(), number)


def _subset_products(lengths: Iterable[int]) -> frozenset[int]:
    """The products of some of these lengths."""
    lengths = [int(n) if isinstance(n, int | np.integer) else _UNKNOWN_LENGTH for n in lengths]
    subsets = itertools.chain.from_iterable(itertools.combinations(lengths, k + 1) for k in range(len(lengths)))
    return frozenset(map(math.prod, subsets)) if len(lengths) < 8 else frozenset([math.prod(lengths)])


def _multiply_lengths(new: frozenset[int], old: frozenset[int]) -> frozenset[int]:
    products = new | old | {a * b for a in new for b in old}
    return frozenset(sorted(products)[-_MOST_LENGTHS:])


def _propagate_terms(op: _CountOp) -> None:
    """Whether results are integers, and sums of how many terms."""
    name, operands = op.name, op.operands
    if name == "select_n":
        operands = operands[1:]
    if name not in _REDUCED_AXIS_LENGTHS and name not in _INTEGER_OPS and name not in _STRUCTURAL_OPS and name != "div":
        return
    terms = frozenset().union(*(x.terms for x in (operands[:1] if name == "div" else operands)))
    if name in _REDUCED_AXIS_LENGTHS:
        terms = _multiply_lengths(_subset_products(_REDUCED_AXIS_LENGTHS[name](op.eqn)), terms)
    for result in op.results:
        result.terms = terms
        result.whole = result.whole or (name != "div" and all(x.whole for x in operands))


def _propagate_copies(op: _CountOp) -> None:
    """How many copies are made of operands."""
    name = op.name
    copies = frozenset().union(*(x.copy_counts for x in op.results))
    if name == "broadcast_in_dim":
        (x, *_), params = op.eqn.invars, op.eqn.params
        own_axes = {to for to, n in zip(params["broadcast_dimensions"], x.aval.shape, strict=True) if n != 1}
        new = _subset_products(n for axis, n in enumerate(params["shape"]) if axis not in own_axes)
        copies = _multiply_lengths(new, copies)
    elif name == "reduce_window_sum":
        copies = _multiply_lengths(_subset_products(op.eqn.params["window_dimensions"]), copies)
    elif name not in _INTEGER_OPS and name not in _STRUCTURAL_OPS and name not in ("div", "reduce_sum"):
        return
    for x in op.operands[:1] if name == "div" else op.operands:
        x.copy_counts |= copies


def _count_operands(op: _CountOp) -> list[int]:
    """The places of the operands that are counts: of a divisor, of its inverse, and of an integer that is divided."""
    if op.name not in _COUNT_READERS or not is_carrier_float(op.eqn.outvars[0].aval):
        return []
    lengths = op.results[0].copy_counts
    if op.name == "div":
        x, n = op.operands
        known = n.number is not None
        if _is_count(n.number, x.terms | lengths) if known else n.whole and (x.terms or lengths or x.whole):
            return [0, 1] if x.whole and x.number is None else [1]
        return []
    for place, (n, x) in enumerate((op.operands, op.operands[::-1])):
        if n.number and x.number is None and 0 < abs(n.number) < 1:
            count, dtype = round(1 / n.number), op.eqn.invars[place].aval.dtype
            if n.number == float(np.asarray(1 / count, dtype)) and _is_count(count, x.terms | lengths):
                return [place]
    return []


def _is_count(n: float, lengths: frozenset[int]) -> bool:
    whole = float(n).is_integer() and n >= 1
    return whole and (_UNKNOWN_LENGTH in lengths or any(int(n) + k in lengths for k in range(_DEGREES_OF_FREEDOM + 1)))


def _makes_counts(op: _CountOp) -> bool:
    """Whether all results are counts and nothing else."""
    pairs = zip(op.results, op.eqn.outvars, strict=False)
    numbers = [x for x, v in pairs if op.place is not None or is_carrier_float(v.aval)]
    return bool(numbers) and all(x.is_only_count for x in numbers)
