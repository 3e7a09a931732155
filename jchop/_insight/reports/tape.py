"""A recorded run of an emulated program beside the same program in the carrier, and its adjoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from jchop._common.settings import always_jit
from jchop._emulate.paired import (
    CHOOSING_KINDS,
    ELEMENTWISE_KINDS,
    SILENT_KINDS,
    LaneSeeds,
    PairedRun,
    ValuePair,
    as_double_precision,
)
from jchop._emulate.rules.rules import is_number
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._program.control import as_jax_value
from jchop._program.lanes import ShardAxes, bind_shards, same_bits, shard_row, with_vmap_collective
from jchop._program.run import is_foreign_primitive
from jchop._program.step import is_reference

#: Takes the cotangents of results to the cotangents of operands; None stands for zeros.
Pullback = Callable[[list[Any]], Sequence[Any]]
#: A secant replaces the mean of two derivatives if an operand differs by more than this part of itself.
_FAR_OPERANDS = 2.0**-6
_NO_PARTS = "so the error of the output has no parts"


class TapeNode(tuple[Any, Any]):
    """A value of the emulated program and the carrier's value, with the cotangent of both.

    ``rounding_error`` is the rounding error made in the emulated value; None if there is none.
    """

    rounding_error: Any = None
    cotangent: Any = None

    def add(self, cotangent: Any) -> None:
        """Adds to the cotangent."""
        if isinstance(self[0], Array) and self[0].sharding.num_devices > 1:  # JAX compares the axes of explicit meshes
            cotangent = jax.device_put(cotangent, self[0].sharding)
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent


@dataclass
class ErrorShare:
    """The rounding errors of one equation: their part of the output's error, by outermost turn, and their size."""

    contribution: float = 0.0
    squares: float = 0.0
    count: int = 0
    turns: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _TapeEntry:
    step: Any
    turn: tuple[int, ...]
    operands: list[ValuePair]
    results: list[TapeNode]
    pull: Pullback


@dataclass
class Tape(PairedRun):
    """A run that records each equation. Loops and branches follow the emulated program."""

    entries: list[_TapeEntry] = field(default_factory=list)
    check: Callable[[], None] | None = None  # called once, when a loop turns out to be long
    sources: dict[int, str] = field(default_factory=dict)  # file and line of a step, by its id
    steep: str | None = None  # the equation nearest to the output whose derivative is not finite, and where
    diverges: bool = False  # whether the carrier alone would take another path

    def argument(self, label: Any, low: Any, wide: Any) -> TapeNode:
        """An argument or a constant, rounded on entry."""
        node = TapeNode((low, wide))
        if is_number(jax.typeof(wide)):
            node.rounding_error = _rounding_error(low, wide)
            self.entries.append(_TapeEntry(label, (), [], [node], lambda _: []))
        return node

    def control(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The results of an equation that holds programs; foreign code, which has no derivative inside, is one step."""
        return self.run(step, seeds, args) if is_foreign_primitive(step) else super().control(step, seeds, args)

    def run(self, part: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The results of one equation, which is recorded."""
        if part.name == "select_n" and self.while_depth:
            # Turns follow the emulated program, and so do choices in a loop, as of a solver that rejects a part.
            args = [(low := self.path_value(args[0]), low), *args[1:]]
        args = self._with_literal_nodes(part, seeds, args)
        out = [TapeNode(pair) for pair in super().run(part, seeds, args)]
        # Of a move, a constant operand may be rounded.
        if part.kind not in SILENT_KINDS or is_foreign_primitive(part) or any(part.rounds):
            low = [pair[0] for pair in args]
            exact = self.reference.bind(with_vmap_collective(part, self.axes), low, self.axes, rounds=False)
            for v, node, exact_result in zip(part.eqn.outvars, out, exact, strict=True):
                if is_number(v.aval):
                    node.rounding_error = _rounding_error(node[0], exact_result)
        axes = self.axes
        self._record(part, args, out, lambda cotangents: self._pull_back_step(part, axes, args, out, cotangents))
        return list(out)

    def check_long(self) -> None:
        """Called when a `while` loop has made many turns."""
        check, self.check = self.check, None
        if check is not None:
            check()

    def path_value(self, value: ValuePair, lane: int = 0) -> Any:
        """The emulated condition; notes whether the carrier's differs."""
        self.diverges = self.diverges or not same_bits(*value)
        return value[lane]

    def _with_literal_nodes(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The operands of arithmetic; a literal whose rounding overflows or gives zero has a share of its own."""
        if step.kind in SILENT_KINDS:  # whose share is the share of its literals
            return args
        args = list(args)
        for i, low, _ in self.literals_out_of_range(step, seeds, args):
            literal_step = self.literal_steps.setdefault(id(step), replace(step, kind="constant"))
            self.sources[id(literal_step)] = self.sources.get(id(step), step.place)
            node = TapeNode((low, args[i][1]))
            node.rounding_error = _rounding_error(*node)
            self._record(literal_step, [args[i]], [node], lambda cotangents: cotangents)
            args[i] = node
        return args

    def _look_at_literals(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> None:
        """Measures nothing: literals are recorded as constants."""

    def _look(self, step: EmulatedStep, low: list[Any], results: list[Any], reference: list[Any]) -> None:
        """Nothing is measured: the errors are recorded."""

    def _record(self, step: Any, operands: list[ValuePair], results: list[TapeNode], pull: Pullback) -> None:
        if any(is_number(jax.typeof(node[0])) for node in results):
            self.entries.append(_TapeEntry(step, self.turn, operands, results, pull))

    # -- pairs made of pairs -------------------------------------------------------------------------------------------

    def rounded_operands(self, step: EmulatedStep, seeds: LaneSeeds, args: list[ValuePair]) -> list[ValuePair]:
        """The operands of an equation that holds programs; their roundings are the equation's."""
        low = self.emulated_operands(step, seeds, args)
        out: list[ValuePair] = []
        for x, pair in zip(low, args, strict=True):
            if x is pair[0]:
                out.append(pair)
                continue
            node = TapeNode((x, pair[1]))
            node.rounding_error = _rounding_error(x, pair[0])
            self._record(step, [pair], [node], lambda cotangents: cotangents)
            out.append(node)
        return out

    def map_lanes(self, move: Callable[[Any], Any], value: ValuePair) -> ValuePair:
        """The pair with its numbers in another place."""
        node = TapeNode(super().map_lanes(move, value))
        zeros = jnp.zeros(jnp.shape(value[0]), jax.typeof(node[0]).dtype)
        self._record(None, [value], [node], lambda cotangents: jax.vjp(move, zeros)[1](cotangents[0]))
        return node

    def row(self, value: ValuePair, k: int) -> ValuePair:
        """Row k of arrays."""
        node, shape = TapeNode(shard_row(x, k, self.axes) for x in value), jnp.shape(value[0])
        index = (slice(None),) * len(self.axes) + (k,)
        self._record(None, [value], [node], lambda cts: [jnp.zeros(shape, cts[0].dtype).at[index].set(cts[0])])
        return node

    def stack(self, rows: list[ValuePair], aval: Any) -> ValuePair:
        """The results of the turns of a scan along a first axis."""
        node = TapeNode(super().stack(rows, aval))
        depth = len(self.axes)
        self._record(None, rows, [node], lambda cotangents: list(jnp.moveaxis(cotangents[0], depth, 0)))
        return node

    def choose(self, active: Mapping[int, Any], new: ValuePair, old: ValuePair) -> ValuePair:
        """The new values where loops of a batch still run, and old ones elsewhere."""
        if bool(jnp.all(active[0])):
            return new
        node = TapeNode(super().choose(active, new, old))
        mask = jnp.reshape(active[0], jnp.shape(active[0]) + (1,) * (jnp.ndim(node[0]) - jnp.ndim(active[0])))
        self._record(None, [new, old], [node], lambda cts: [jnp.where(mask, cts[0], 0), jnp.where(mask, 0, cts[0])])
        return node

    # -- adjoints ------------------------------------------------------------------------------------------------------

    def shares(self, results: Sequence[ValuePair], cotangents: Sequence[Any]) -> dict[Any, ErrorShare]:
        """The shares of equations, by the id of their step, and of arguments and constants, by their label.

        Args:
            results: the results of the program.
            cotangents: for each result, the derivative of the output by it; None for no number.
        """
        for pair, cotangent in zip(results, cotangents, strict=True):
            if isinstance(pair, TapeNode) and cotangent is not None:
                pair.add(cotangent)
        shares: dict[Any, ErrorShare] = {}
        for entry in reversed(self.entries):
            key = _share_key(entry)
            for node in entry.results:
                if node.rounding_error is not None:
                    _add_share(shares.setdefault(key, ErrorShare()), node, entry.turn)
            result_cotangents = [node.cotangent for node in entry.results]
            if entry.operands and any(x is not None for x in result_cotangents):
                for pair, cotangent in zip(entry.operands, entry.pull(result_cotangents), strict=True):
                    if isinstance(pair, TapeNode) and cotangent is not None:
                        pair.add(cotangent)
            for node in entry.results:
                node.cotangent = None  # read; each node is the result of one entry
        self._check_finite(shares)
        return shares

    def _check_finite(self, shares: dict[Any, ErrorShare]) -> None:
        """Refuses infinite parts of a finite output: of an infinite value, as of x / 0 in a quotient, or derivative."""
        infinite_keys = {key for key, share in shares.items() if not math.isfinite(share.contribution)}
        entries = [entry for entry in self.entries if _share_key(entry) in infinite_keys]
        if not entries:
            return
        pairs = ((entry, pair) for entry in self.entries for pair in _number_nodes(entry))
        overflows = (entry for entry, (x, y) in pairs if bool(jnp.any(~jnp.isfinite(x) & jnp.isfinite(y))))
        infinite = next(overflows, None)  # in the emulated program alone
        if self.steep is None and infinite is not None:
            raise ValueError(
                f"the result of {self._name(infinite.step)} is not finite although the output is, {_NO_PARTS}; take a "
                "format with more range or digits there, as rules={...: None} of jchop.emulate"
            )
        name = self._name(entries[-1].step)
        if self.steep is None and all(_are_finite(pair) for entry in self.entries for pair in _number_nodes(entry)):
            # Values and derivatives of single equations are finite, so products or sums of these derivatives are not.
            prefix = "the result of " if isinstance(entries[-1].step, EmulatedStep) else ""
            carrier = jnp.finfo(_number_nodes(entries[-1])[0][0].dtype).dtype
            wider = "" if carrier == jnp.float64 else "use float64 arrays (jax_enable_x64), or "
            raise ValueError(
                f"the derivative of the output by {prefix}{name} overflows {carrier}, {_NO_PARTS}; "
                f"{wider}blame fewer turns of a loop"
            )
        reason = self.steep or f"the part of {name} is not finite although the output is"
        raise ValueError(f"{reason}, {_NO_PARTS}; it may have parts at other arguments")

    def _name(self, step: Any) -> str:
        if not isinstance(step, EmulatedStep):
            return str(step)
        name = step.kind if step.kind == "constant" else step.name
        return f"{name} ({self.sources.get(id(step), step.place)})"

    def _pull_back_step(
        self, step: EmulatedStep, axes: ShardAxes, args: list[ValuePair], out: list[TapeNode], cotangents: list[Any]
    ) -> list[Any]:
        """The cotangents of a step's operands from the cotangents of its results; None for other than numbers."""
        operands = [
            i
            for i, (v, x) in enumerate(zip(step.eqn.invars, args, strict=True))
            if is_number(v.aval) and (isinstance(x, TapeNode) or not isinstance(v, Literal))
        ]
        result: list[Any] = [None] * len(args)
        if any(is_reference(v.aval) for v in step.eqn.invars):
            raise NotImplementedError(
                f"blame needs the derivative of {self._name(step)}, which reads a mutable reference"
            )
        if not operands:
            return result
        if step.name == "stop_gradient":
            return list(cotangents)
        low, wide = ([as_jax_value(pair[side]) for pair in args] for side in (0, 1))
        # Without the results that do not count: the vectors of equal eigenvalues have no derivative, the values have.
        numbers = [i for i, x in enumerate(cotangents) if x is not None and np.any(np.asarray(x) != 0)]
        if not numbers:
            for i in operands:
                result[i] = jnp.zeros(low[i].shape, low[i].dtype)
            return result
        eqn = with_vmap_collective(step, axes).eqn
        params = tuple(sorted(eqn.params.items()))
        kinds = (step.kind in ELEMENTWISE_KINDS, step.kind in CHOOSING_KINDS)
        equation = _EquationFacts(eqn.primitive, params, tuple(operands), tuple(numbers), axes, *kinds)
        number_cotangents = [cotangents[i] for i in numbers]

        def pull(cotangents: list[Any]) -> list[Any]:
            mean = _pull_back(equation, low, wide, cotangents)
            return mean if _are_finite(mean) else _with_secants(equation, low, wide, cotangents, mean)

        try:
            pullback = pull(number_cotangents)
        except (NotImplementedError, ValueError) as error:  # of a callback it is a ValueError
            raise type(error)(f"blame needs the derivative of {self._name(step)}: {error}") from error
        if self.steep is None and _are_finite(number_cotangents) and not _are_finite(pullback):
            # With smaller derivatives of the output: these may be too large, and not the derivative of the equation.
            unit = pull([x / jnp.max(jnp.abs(x), initial=1.0) for x in number_cotangents])
            where = None if _are_finite(unit) else _steep_operands(equation, args, [out[i] for i in numbers], unit)
            if where is not None:
                self.steep = f"the derivative of {self._name(step)} is not finite{where} although its result is"
        for i, cotangent in zip(operands, pullback, strict=True):
            result[i] = cotangent
        return result


@dataclass(frozen=True)
class _EquationFacts:
    """The facts on which the derivative of an equation depends; equal ones are compiled once.

    Args:
        primitive: the primitive.
        params: its parameters, by name.
        operand_places: the places of the operands that are numbers of the program.
        numbers: the places of the results that are numbers.
        axes: of the mesh, which operands and results have first.
        elementwise: whether each result depends only on the operands at the same index.
        choosing: whether each result is one of the operands' numbers.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    operand_places: tuple[int, ...]
    numbers: tuple[int, ...]
    axes: ShardAxes
    elementwise: bool
    choosing: bool

    def results(self, args: list[Any], values: Sequence[Any]) -> list[Any]:
        """The results that are numbers, with other values for the operands that move."""
        operands = list(args)
        for i, value in zip(self.operand_places, values, strict=True):
            operands[i] = value
        out = bind_shards(self.axes, self.primitive, dict(self.params), operands)
        return [out[i] for i in self.numbers]

    def sorts(self, x: Any) -> bool:
        """Whether the only result that counts is the sorted operand `x`."""
        sorts = self.primitive.name == "top_k" or dict(self.params).get("num_keys") == 1
        return sorts and self.operand_places == self.numbers == (0,) and not jnp.iscomplexobj(x)


@partial(always_jit, static_argnums=0)
def _pull_back(equation: _EquationFacts, low: list[Any], wide: list[Any], cotangents: list[Any]) -> list[Any]:
    """The mean of an equation's transposed derivatives at both ends, or a secant."""
    operands, numbers = equation.operand_places, equation.numbers
    ends = [(lambda *values, side=side: equation.results(side, values)) for side in (low, wide)]
    sides = [[side[i] for i in operands] for side in (low, wide)]
    (out, pull), (reference, back) = (jax.vjp(end, *side) for end, side in zip(ends, sides, strict=True))
    first = second = cotangents
    if equation.choosing:
        if equation.sorts(low[0]):
            ends = _sort_moves(equation, low[0], wide[0])
            pull, back = (jax.vjp(end, *side)[1] for end, side in zip(ends, sides, strict=True))
        weights = _secant_weights(ends, sides, out, reference)
        first = [w * x for w, x in zip(weights, cotangents, strict=True)]
        second = [(2 - w) * x for w, x in zip(weights, cotangents, strict=True)]
    mean = [(x + y) / 2 for x, y in zip(pull(first), back(second), strict=True)]
    x, y = low[operands[0]], wide[operands[0]]
    if equation.elementwise and len(operands) == len(numbers) == 1 and x.shape == out[0].shape:
        is_far = jnp.abs(x - y) > _FAR_OPERANDS * jnp.maximum(jnp.abs(x), jnp.abs(y))
        slope = (out[0] - reference[0]) / jnp.where(is_far, x - y, 1)
        mean = [jnp.where(is_far, (slope * cotangents[0]).astype(mean[0].dtype), mean[0])]
    if equation.elementwise:  # a result that does not count has operands that do not, at infinite slopes too
        mean = [jnp.where(cotangents[0] == 0, 0, x) if x.shape == cotangents[0].shape else x for x in mean]
    return mean


def _secant_weights(ends: Sequence[Any], sides: Sequence[Any], out: Sequence[Any], wide: Sequence[Any]) -> list[Any]:
    """For each result, twice the weight of the first of two choices beside the second, with which they are a secant.

    Such weights exist for a maximum: its change lies between the changes of the operands that the two programs choose.
    """
    changes = tuple(map(_finite_change, *sides))
    slopes = (jax.jvp(end, tuple(side), changes)[1] for end, side in zip(ends, sides, strict=True))
    weights = []
    for x, y, first, second in zip(out, wide, *slopes, strict=True):
        weight = 2 * jnp.real((_finite_change(x, y) - second) / (first - second))
        weights.append(jnp.where(jnp.isfinite(weight), jnp.clip(weight, 0, 2), 1))
    return weights


def _sort_moves(equation: _EquationFacts, x: Any, y: Any) -> list[Callable[[Any], list[Any]]]:
    """Two moves of the operand of a sort or `top_k`, between whose changes lies the change of each result.

    One gives the last in the emulated order of the operands with the places up to k in the carrier. The other gives the
    first of the operands with the places from k on. Both are the result at place k if no operands change places.
    """
    params, top = dict(equation.params), equation.primitive.name == "top_k"
    axis = params["axis" if top else "dimension"] + len(equation.axes)
    order = jnp.argsort(y, axis, descending=top)
    x = jnp.take_along_axis(x, order, axis)
    x, position = -x if top else x, lax.broadcasted_iota(order.dtype, x.shape, axis)
    last = lax.cummax(jnp.where(x >= lax.cummax(x, axis), position, 0), axis)
    first = lax.cummin(jnp.where(x <= lax.cummin(x, axis, reverse=True), position, position.size), axis, reverse=True)

    def move(values: Any, places: Any) -> list[Any]:
        places = jnp.take_along_axis(order, lax.slice_in_dim(places, 0, params.get("k"), axis=axis), axis)
        return [jnp.take_along_axis(values, places, axis)]

    return [partial(move, places=last), partial(move, places=first)]


@partial(always_jit, static_argnums=0)
def _with_secants(
    equation: _EquationFacts, low: list[Any], wide: list[Any], cotangents: list[Any], pullback: list[Any]
) -> list[Any]:
    """The cotangents of operands, with finite ones in place of infinite ones and NaN where those can be had.

    Operands that are equal at both ends change no result: theirs are 0. Of an elementwise equation the others have
    secants. The operands move to the other end one by one, in both orders, and each has the mean of its two
    changes of the result. These always add up to the whole change.
    """
    pairs = [(low[i], wide[i]) for i in equation.operand_places]
    steep = [~jnp.isfinite(x) for x in pullback]
    result = [jnp.where(a & _equal_or_nan(x, y), 0, one) for a, one, (x, y) in zip(steep, pullback, pairs, strict=True)]
    if not equation.elementwise or any(x.shape != cotangents[0].shape for x, _ in pairs):
        return result
    unresolved = jnp.any(jnp.stack([~jnp.isfinite(x) for x in result]), 0)
    changes: list[Any] = [0] * len(pairs)
    for order in (range(len(pairs)), reversed(range(len(pairs)))):
        values = [y for _, y in pairs]
        (before,) = equation.results(low, values)
        for k in order:
            values[k] = pairs[k][0]
            (after,) = equation.results(low, values)
            changes[k] += _finite_change(after, before) / 2
            before = after
    for k, (x, y) in enumerate(pairs):
        uses_secant = unresolved & ~_equal_or_nan(x, y)
        secant = changes[k] / jnp.where(uses_secant, x - y, 1) * cotangents[0]
        result[k] = jnp.where(uses_secant, secant.astype(pullback[k].dtype), result[k])
    return result


def _are_finite(cotangents: Sequence[Any]) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x)))) for x in cotangents)


def _equal_or_nan(x: Any, y: Any) -> Any:
    return (x == y) | (jnp.isnan(x) & jnp.isnan(y))


def _finite_change(x: Any, y: Any) -> Any:
    """Their difference; 0 of equal infinities and of NaN."""
    return jnp.where(_equal_or_nan(x, y), 0, x - y)


def _steep_operands(
    equation: _EquationFacts, args: Sequence[ValuePair], results: Sequence[ValuePair], pullback: Sequence[Any]
) -> str | None:
    """Says at which operands a derivative is not finite; None if a value there is not, which is the reason then."""
    operands = [args[i] for i in equation.operand_places]
    bad = next(bad for x in pullback if (bad := ~np.isfinite(np.asarray(x))).any())
    at = [
        [np.asarray(x)[bad] if equation.elementwise and np.shape(x) == bad.shape else np.asarray(x) for x in pair]
        for pair in (*operands, *results)
    ]
    if not all(np.all(np.isfinite(x)) for pair in at for x in pair):
        return None
    if not equation.elementwise:
        return ""
    return " at " + ", ".join(str(np.ravel(low)[0]) for low, _ in at[: len(operands)])


def _share_key(entry: _TapeEntry) -> Any:
    return id(entry.step) if isinstance(entry.step, EmulatedStep) else entry.step


def _number_nodes(entry: _TapeEntry) -> list[TapeNode]:
    return [node for node in entry.results if is_number(jax.typeof(node[0]))]


def _add_share(share: ErrorShare, node: TapeNode, turn: tuple[int, ...]) -> None:
    """Adds a node's rounding error to a share: its squares, and its part in the error of the output, by turn."""
    error = as_double_precision(node.rounding_error)
    share.squares += float(np.sum(np.abs(error) ** 2))
    share.count += error.size
    if node.cotangent is None:
        return
    adjoint = np.asarray(node.cotangent).astype(error.dtype)
    with np.errstate(invalid="ignore"):
        part = float(np.real(np.sum(np.where((adjoint == 0) | (error == 0), 0, adjoint * error))))
    share.contribution += part
    if turn:
        share.turns[turn[0]] = share.turns.get(turn[0], 0.0) + part


def _rounding_error(low: Any, exact: Any) -> np.ndarray:
    """Their difference in float64: exact for two numbers of float32 almost always, to half a unit else."""
    low, exact = as_double_precision(low), as_double_precision(exact)
    is_equal = (low == exact) | (np.isnan(low) & np.isnan(exact))
    with np.errstate(invalid="ignore"):
        return np.where(is_equal, 0, low - exact)
