"""Which parameters take up the factors of channels, or their rotation, so that the function stays the same.

For a rotation, a label of power 1: an orthogonal matrix multiplies the channels of a value, along the runs
that are not tied. A label of power 2: they are the squares of these numbers, which can only be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jchop._quantized.products.product import ConvProduct, DotProduct, RaggedProduct
from jchop._quantized.program.provenance import AXIS_PAIRS
from jchop.ptq._equalize.factor_rules import (
    Channels,
    FactorAssignments,
    FactorLabel,
    FoldError,
    Port,
    RunAxis,
    TiedChannels,
    factor_assignments,
    fit_broadcast_axes,
    has_one_factor,
)
from jchop.ptq._equalize.graph import LOOP_STACK, LOOP_VALUE, SAME_VALUE, GraphNode, GraphValue, ProductPlace

#: The most equations that a search looks at.
_MOST_EQUATIONS = 20_000
_ValueAndNode = tuple[GraphValue, GraphNode]


@dataclass(frozen=True, eq=False)
class Fold:
    """Factors of channels that cancel; or a rotation of them.

    Args:
        channels: the channels of the inputs of a product, in the order of its statistics.
        labels: the values that have factors, or are rotated.
    """

    channels: Channels
    labels: dict[GraphValue, FactorLabel]


def channels_of(place: ProductPlace) -> tuple[int, tuple[int, ...], list[tuple[int, int]]]:
    """The channels of the inputs of a product, in the order of their statistics.

    Returns:
        Their number, the lengths of the axes of the weight (loops, then its own), and of axes that count channels the
        number of the axis and the distance of neighbours.
    """
    value = place.node.ins[place.side]
    shape, loops = (*value.loops, *value.shape), len(value.loops)
    operand = (place.node.product.forward.left, place.node.product.forward.right)[place.side]
    batch = [operand.free[i] for i in range(place.site.batch) if place.site.view.free[i]]
    axes = [i for i, is_stacked in enumerate(place.turns) if is_stacked]
    axes += [loops + axis for axis in (*batch, *operand.contracting)]
    count, channel_axes = 1, []
    for axis in reversed(axes):
        channel_axes.append((axis, count))
        count *= shape[axis]
    return count, shape, channel_axes[::-1]


def fold_of(
    place: ProductPlace, ways: Callable[..., FactorAssignments] = factor_assignments, same_factors: bool = False
) -> Fold:
    """How factors of the inputs of a product can be folded into parameters.

    The weight takes the factors s, so its input must have 1/s, and so on through the program. This ends when every
    value that has factors is made and read by equations that keep the function the same.

    Args:
        place: the product.
        ways: how one equation passes them on.
        same_factors: whether all turns of loops, and all matrices of a batch, have the same. Default False.

    Raises:
        FoldError: if they cannot.
    """
    count, shape, axes = channels_of(place)
    tied_runs: list[tuple[int, int]] = []
    loop_count = len(place.node.ins[place.side].loops)
    if isinstance(place.node.product, ConvProduct):  # the factors of an image's channel, whatever the place in a patch
        input_axis = loop_count + place.node.product.numbers.rhs_spec[1]
        tied_runs = [(shape[axis], stride) for axis, stride in axes if axis >= loop_count and axis != input_axis]
    elif isinstance(place.node.product, RaggedProduct):  # any row may be of any group
        tied_runs = [(shape[axis], stride) for axis, stride in axes if axis == loop_count]
    if same_factors:
        operand = (place.node.product.forward.left, place.node.product.forward.right)[place.side]
        sum_axes = {loop_count + axis for axis in operand.contracting}
        tied_runs += [(shape[axis], stride) for axis, stride in axes if axis not in sum_axes]
    return _FoldSearch(place, ways).start(Channels(count).tie(tied_runs))


class _FoldSearch:
    def __init__(self, place: ProductPlace, ways: Callable[..., FactorAssignments]) -> None:
        self.place, self.ways, self.budget = place, ways, _MOST_EQUATIONS

    def start(self, channels: Channels) -> Fold:
        """The fold of a weight: the factors of its channels go through the program, which may tie channels."""
        _, shape, axes = channels_of(self.place)
        runs: list[RunAxis] = [((n, 0),) if n != 1 else () for n in shape]
        for axis, stride in axes:
            runs[axis] = channels.axis(shape[axis], stride)
        state = _PartialFold()
        state.set(self.place.node.ins[self.place.side], FactorLabel(Fraction(1), tuple(runs)), self.place.node)
        return self._solve(channels, state)

    def _solve(self, channels: Channels, state: _PartialFold) -> Fold:
        """Equations with one way first; then each way of the others in turn."""
        open_pairs: list[_ValueAndNode] = []
        while state.pending or open_pairs:
            has_choices_only = not state.pending
            value, node = (state.pending or open_pairs).pop()
            self.budget -= 1
            if self.budget < 0:
                raise FoldError("the program is too long to follow")
            ways = self._ways(state, value, node)
            if len(ways) > 1 and not has_choices_only:
                open_pairs.insert(0, (value, node))
            elif len(ways) > 1:
                return self._first_way(channels, _PartialFold(state.labels, open_pairs), node, ways)
            elif isinstance(ways[0], TiedChannels):
                return self.start(channels.tie(ways[0].runs))
            else:
                state.apply(node, ways[0])
        return Fold(channels, {value: label for value, label in state.labels.items() if label is not None})

    def _first_way(self, channels: Channels, state: _PartialFold, node: GraphNode, ways: Sequence[Any]) -> Fold:
        """The first way that leads to an end."""
        reasons: list[FoldError] = []
        for way in ways:
            try:
                if isinstance(way, TiedChannels):
                    return self.start(channels.tie(way.runs))
                branch = _PartialFold(dict(state.labels), list(state.pending))
                branch.apply(node, way)
                return self._solve(channels, branch)
            except FoldError as reason:
                reasons.append(reason)
        raise reasons[0]

    def _ways(self, state: _PartialFold, value: GraphValue, node: GraphNode) -> list[Any]:
        """The ways that agree with the known facts."""
        label = state.labels[value]
        assert label is not None
        is_result = value not in node.ins
        place = (node.outs if is_result else node.ins).index(value)
        ways = list(self.ways(node, label, place, is_result))
        fitting = [way for way in ways if isinstance(way, TiedChannels) or state.fits(node, way)]
        if not fitting:
            raise FoldError(f"the factors that its values need disagree at {node}")
        return fitting


@dataclass(frozen=True)
class _PartialFold:
    """The known facts of a search.

    Args:
        labels: the labels, None for values without factors.
        pending: the values whose nodes are not looked at, each with a node.
    """

    labels: dict[GraphValue, FactorLabel | None] = field(default_factory=dict)
    pending: list[_ValueAndNode] = field(default_factory=list)

    def fits(self, node: GraphNode, way: Any) -> bool:
        """Whether a way agrees with the labels, and with itself."""
        new_labels: dict[GraphValue, FactorLabel | None] = {}
        return all(
            value.zero or self.labels.get(value, label) == label == new_labels.setdefault(value, label)
            for value, label in zip((*node.ins, *node.outs), (*way[0], *way[1]), strict=True)
        )

    def apply(self, node: GraphNode, way: Any) -> None:
        """Add the labels of a way."""
        for value, label in zip((*node.ins, *node.outs), (*way[0], *way[1]), strict=True):
            if not value.zero and value not in self.labels:
                self.set(value, label, node)

    def set(self, value: GraphValue, label: FactorLabel | None, node: GraphNode) -> None:
        """Add a label, which a node needs.

        Raises:
            FoldError: for factors of a value that cannot have any.
        """
        self.labels[value] = label
        if label is None:
            return
        if value.source:
            raise FoldError(f"{node} takes {value.source}")
        if value.result:
            raise FoldError(f"{node} makes a result of the function")
        if not value.real:
            raise FoldError(f"{node} makes numbers that are not real")
        self.pending.extend((value, node) for node in value.nodes)


class GainError(FoldError):
    """A rotation meets parameters that are multiplied with its channels.

    Args:
        node: the product with them.
        leaves: their indexes.
    """

    def __init__(self, node: GraphNode, leaves: frozenset[int]) -> None:
        super().__init__(f"{node} multiplies its channels by different numbers")
        self.leaves = leaves


def rotation_of(place: ProductPlace, value_of: Callable[[int], Any]) -> Fold:
    """How a rotation of the inputs of a product can be folded into parameters; all turns of loops have the same.

    Args:
        place: the product.
        value_of: the parameter of an index.

    Raises:
        GainError: if it could be, were some parameters the same for all channels.
        FoldError: if it cannot.
    """
    fold = fold_of(place, _RotationWays(value_of).ways_of, same_factors=True)
    if fold.channels.free % 2:
        raise FoldError(f"its {fold.channels.free} channels are an odd number, for which there is no Hadamard matrix")
    return fold


class _RotationWays:
    def __init__(self, value_of: Callable[[int], Any]) -> None:
        self.value_of = value_of
        self.cache: dict[tuple[GraphValue, tuple[int, ...]], frozenset[int] | None] = {}

    def ways_of(self, node: GraphNode, label: FactorLabel, place: int, is_result: bool) -> FactorAssignments:
        """The ways in which a rotation of one value of a node goes to its other values, as labels or ties."""
        port = Port(node, label, place, is_result)
        for way in self._ways(port):
            if not isinstance(way, TiedChannels):
                yield _without_signs(port, way[0]), _without_signs(port, way[1])
            elif {run for axis in label.axes for run in axis if run[1]} <= set(way.runs):
                raise _fold_rotation_error(port)  # no channels would be left
            else:
                yield way

    def _ways(self, port: Port) -> FactorAssignments:
        """The ways of a rotation through a node; a FoldError if the node does not commute with it."""
        node = port.node
        rule = _ROTATION_RULES.get(node.name)
        if port.label.power == 2 and node.name not in _OF_SQUARES:
            raise _fold_rotation_error(port)
        if isinstance(node.product, DotProduct):
            return _dot_rotation(port)
        if isinstance(node.product, ConvProduct) and node.product.feature_groups != 1:
            raise _fold_rotation_error(port)
        if rule is not None:
            return fit_broadcast_axes(port, rule(self, port))
        if node.product is None and node.name not in _ROTATION_LINEAR:
            raise _fold_rotation_error(port)
        return factor_assignments(node, port.label, port.place, port.is_result)

    # -- values that are the same along channels -----------------------------------------------------------------------

    def varying_leaves(self, value: GraphValue, axes: tuple[int, ...]) -> frozenset[int] | None:
        """The parameters that make a value differ along some of its axes; None if other things do."""
        if all(value.shape[axis] == 1 for axis in axes):
            return frozenset()
        if value.leaf is not None:
            parameter = jnp.asarray(self.value_of(value.leaf))
            first = parameter[tuple(slice(0, 1) if i in axes else slice(None) for i in range(parameter.ndim))]
            return frozenset() if bool((parameter == first).all()) else frozenset({value.leaf})
        key = value, axes
        if key not in self.cache:
            self.cache[key] = None  # a value that a loop carries may vary
            producers = [node for node in value.nodes if value in node.outs]
            leaf_sets = [self._varying_from_node(node, value, axes) for node in producers]
            self.cache[key] = _union_of_leaves(leaf_sets) if producers else None
        return self.cache[key]

    def _varying_from_node(self, node: GraphNode, value: GraphValue, axes: tuple[int, ...]) -> frozenset[int] | None:
        """The parameters that make the result `value` of a node differ along `axes`; None if other things do."""
        if not node.ins:
            return None
        first = node.ins[0]
        if node.name in (LOOP_VALUE, SAME_VALUE):
            return self.varying_leaves(first, axes)
        if node.name == LOOP_STACK:  # the stack has an axis of turns in front, unless it is inside of the loop
            extra_axes = len(first.shape) - len(value.shape)
            return self.varying_leaves(first, tuple(axis + extra_axes for axis in axes)) if extra_axes > 0 else None
        if node.name in _ROTATION_ELEMENTWISE:
            return _union_of_leaves(self.varying_leaves(v, axes if v.shape else ()) for v in node.ins)
        if node.name in ("broadcast_in_dim", "squeeze"):
            pairs = AXIS_PAIRS[node.name](node.params, first.shape, value.shape)
            return self.varying_leaves(first, tuple(axis for axis, out in pairs if out in axes))
        if node.name == "reshape":  # one that adds or drops axes of length 1
            long_axes = [[i for i, n in enumerate(v.shape) if n > 1] for v in (first, value)]
            if [first.shape[i] for i in long_axes[0]] != [value.shape[i] for i in long_axes[1]]:
                return None
            return self.varying_leaves(first, tuple(a for a, b in zip(*long_axes, strict=True) if b in axes))
        if node.name in ("slice", "dynamic_slice"):
            return self.varying_leaves(first, axes)
        return None


def _union_of_leaves(leaf_sets: Any) -> frozenset[int] | None:
    leaves: frozenset[int] = frozenset()
    for leaf_set in leaf_sets:
        if leaf_set is None:
            return None
        leaves |= leaf_set
    return leaves


def _without_signs(port: Port, labels: list[FactorLabel | None]) -> list[FactorLabel | None]:
    """Labels with positive powers: the inverse of an orthogonal matrix rotates like the matrix itself.

    Raises:
        FoldError: for a power other than 1 or 2.
    """
    positive = [None if label is None else replace(label, power=abs(label.power)) for label in labels]
    if any(label is not None and label.power not in (1, 2) for label in positive):
        raise _fold_rotation_error(port)
    return positive


def _fold_rotation_error(port: Port) -> FoldError:
    return FoldError(f"{port.node} does not commute with a rotation of its channels")


def _rotation_axes(port: Port) -> tuple[int, ...]:
    """The axes of the value itself along which it is rotated."""
    return tuple(i for i, axis in enumerate(port.own) if not has_one_factor(axis))


def _one_operand(port: Port, side: int) -> tuple[list[FactorLabel | None], list[FactorLabel | None]]:
    """Labels of a node whose operand `side` and result are rotated."""
    return [port.label if i == side else None for i in range(len(port.node.ins))], [port.label]


def _mul_rotation(rotation: _RotationWays, port: Port) -> FactorAssignments:
    """The labels of a b: a rotation passes if the other operand is the same along its channels."""
    a, b = port.node.ins
    if a is b:
        yield from _square_rotation(rotation, port)
        return
    varying_leaves = [rotation.varying_leaves(v, _rotation_axes(port) if v.shape else ()) for v in (a, b)]
    side = port.place if not port.is_result else 1 if varying_leaves[0] == frozenset() else 0
    gain_leaves = varying_leaves[1 - side]
    if gain_leaves is None:
        raise _fold_rotation_error(port)
    if gain_leaves:
        raise GainError(port.node, gain_leaves)
    yield _one_operand(port, side)


def _div_rotation(rotation: _RotationWays, port: Port) -> FactorAssignments:
    divisor_leaves = rotation.varying_leaves(port.node.ins[1], _rotation_axes(port) if port.node.ins[1].shape else ())
    if divisor_leaves is None or (port.place == 1 and not port.is_result):
        raise _fold_rotation_error(port)
    if divisor_leaves:
        raise GainError(port.node, divisor_leaves)
    yield _one_operand(port, 0)


def _square_rotation(_: _RotationWays, port: Port) -> FactorAssignments:
    if port.node.params.get("y", 2) != 2:
        raise _fold_rotation_error(port)
    powers = (Fraction(1, 2), 1) if port.is_result else (1, 2)
    before, after = (port.label.to_power(power) for power in powers)
    yield [before] * len(port.node.ins), [after]


def _sum_rotation(_: _RotationWays, port: Port) -> FactorAssignments:
    """A sum of squares of all rotated channels, or along other axes."""
    reduce_axes = {int(axis) for axis in port.node.params["axes"]}
    if port.label.power == 2 and not port.is_result and reduce_axes.issuperset(_rotation_axes(port)):
        yield [port.label], [None]
    else:
        yield from factor_assignments(port.node, port.label, port.place, port.is_result)


def _select_rotation(rotation: _RotationWays, port: Port) -> FactorAssignments:
    condition = port.node.ins[0]
    if rotation.varying_leaves(condition, _rotation_axes(port) if condition.shape else ()) != frozenset():
        raise _fold_rotation_error(port)
    yield from factor_assignments(port.node, port.label, port.place, port.is_result)


def _dot_rotation(port: Port) -> Iterator[Any]:
    """A product sums over all of the channels, or none; the channels of its batch are not mixed."""
    dot: Any = port.node.product
    batch = range(len(dot.batch[0])) if port.is_result else dot.batch[port.place]
    batch_runs = [run for axis in batch for run in port.own[axis] if run[1]]
    if batch_runs:
        yield TiedChannels(tuple(batch_runs))
    else:
        yield from factor_assignments(port.node, port.label, port.place, port.is_result)


_ROTATION_RULES: dict[str, Callable[[_RotationWays, Port], FactorAssignments]] = {
    "mul": _mul_rotation,
    "div": _div_rotation,
    "square": _square_rotation,
    "integer_pow": _square_rotation,
    "reduce_sum": _sum_rotation,
    "select_n": _select_rotation,
}
#: The primitives whose rules of factors hold for rotations.
_ROTATION_LINEAR_NAMES = """
    add add_any sub neg copy copy_p name stop_gradient sharding_constraint reshard device_put optimization_barrier slice
    dynamic_slice convert_element_type reshape transpose broadcast_in_dim squeeze expand_dims rev cumsum concatenate
    jchop_result split pad gather scatter scatter-add
"""
_ROTATION_LINEAR = frozenset((*_ROTATION_LINEAR_NAMES.split(), SAME_VALUE, LOOP_STACK, LOOP_VALUE))
_OF_SQUARES = frozenset(("mul", "div", "square", "integer_pow", "reduce_sum", "convert_element_type", "reshape"))
#: Those each of whose numbers is made of those at its place in the operands.
_ROTATION_ELEMENTWISE_NAMES = """
    add add_any sub mul div neg exp exp2 log tanh logistic sqrt rsqrt square integer_pow pow abs sign max min select_n
    convert_element_type copy copy_p name jchop_result stop_gradient not and or eq ne lt le gt ge
"""
_ROTATION_ELEMENTWISE = frozenset(_ROTATION_ELEMENTWISE_NAMES.split())
