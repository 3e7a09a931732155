"""The factors of the channels of a value, and how they pass through one equation: from one of its values to all others.

The channels of a mapping are numbered from 0. A value whose numbers have factors has, on each axis, runs (size, stride)
of indexes, the last one moving fastest. The channel of a number is the sum of index times stride over all runs. A
stride of 0 is a run of indexes with one factor. So axes that are split, merged and moved are followed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from jchop._quantized.products.product import ConvProduct, DotProduct, RaggedProduct
from jchop._quantized.program import provenance
from jchop.ptq._equalize.graph import LOOP_STACK, LOOP_VALUE, SAME_VALUE, GraphNode, GraphValue

#: The size of a run of indexes, and the distance of the channels of two neighbours.
ChannelRun = tuple[int, int]
RunAxis = tuple[ChannelRun, ...]


class FoldError(Exception):
    """Factors cannot be folded; the text says why."""


@dataclass(frozen=True)
class FactorLabel:
    """The factors of a value.

    Args:
        power: of the factors of its channels.
        axes: the runs of each axis: first of the loops around it, then its own.
    """

    power: Fraction
    axes: tuple[RunAxis, ...]

    def to(self, axes: Iterable[RunAxis]) -> FactorLabel:
        """The same power on other axes."""
        return replace(self, axes=tuple(axes))

    def to_power(self, exponent: Fraction | int) -> FactorLabel:
        """The factors to a power."""
        return replace(self, power=self.power * exponent)

    def indexes(self) -> np.ndarray:
        """The channel of each number; axes of one factor have length 1."""
        channels = np.zeros((1,) * len(self.axes), np.int64)
        for i, axis in enumerate(self.axes):
            axis_channels = np.zeros(1, np.int64)
            for size, stride in axis if not has_one_factor(axis) else ():
                axis_channels = (axis_channels[:, None] + stride * np.arange(size)).reshape(-1)
            channels = channels + axis_channels.reshape([-1 if j == i else 1 for j in range(len(self.axes))])
        return channels


def has_one_factor(axis: RunAxis) -> bool:
    """Whether all numbers along an axis have one factor."""
    return all(stride == 0 for _, stride in axis)


def merge_runs(runs: Iterable[ChannelRun]) -> RunAxis:
    """Runs, joined where they are one."""
    parts = provenance.merge_factors([provenance.AxisFactor(0, size, stride) for size, stride in runs if size != 1])
    return tuple((part.size, part.inner) for part in parts)


def reshape_runs(axes: Sequence[RunAxis], shape: Sequence[int]) -> tuple[RunAxis, ...]:
    """The runs of axes that are taken apart and put together.

    Raises:
        FoldError: if a run would be cut at a place that is no multiple.
    """
    runs = merge_runs(run for axis in axes for run in axis)
    parts = tuple(provenance.AxisFactor(0, size, stride) for size, stride in runs)
    result = provenance.distribute_factors([parts], [math.prod(size for size, _ in runs)], shape)
    if result is None:
        raise FoldError("a reshape cuts its channels into unequal parts")
    return tuple(tuple((part.size, part.inner) for part in some) for some in result)


@dataclass(frozen=True)
class Channels:
    """The channels of a mapping.

    Args:
        count: how many there are.
        tied: runs of channels that must have one factor.
    """

    count: int
    tied: frozenset[ChannelRun] = frozenset()

    def tie(self, runs: Iterable[ChannelRun]) -> Channels:
        """The channels with more runs tied.

        Raises:
            FoldError: if no channel would have a factor of its own.
        """
        tied_channels = Channels(self.count, self.tied | {run for run in runs if run[1]})
        if has_one_factor(tied_channels.axis(self.count, 1)):
            raise FoldError("all channels would be tied")
        return tied_channels

    def axis(self, size: int, stride: int) -> RunAxis:
        """The runs of an axis over channels that lie `stride` apart."""
        cuts = {stride, stride * size}
        for tied_size, tied_stride in self.tied:
            cuts |= {bound for bound in (tied_stride, tied_stride * tied_size) if stride < bound < stride * size}
        bounds = sorted(cuts)
        if any(b % a for a, b in pairwise(bounds)):
            raise FoldError("its channels would be tied in parts that overlap")
        runs = [(b // a, 0 if self._is_tied(a) else a) for a, b in pairwise(bounds)]
        return merge_runs(reversed(runs))

    @property
    def free(self) -> int:
        """How many channels there are in the runs that are not tied."""
        return math.prod(size for size, stride in self.axis(self.count, 1) if stride)

    def _is_tied(self, stride: int) -> bool:
        return any(tied_stride <= stride < tied_stride * size for size, tied_stride in self.tied)


def axis_lengths(axes: Sequence[RunAxis]) -> tuple[int, ...]:
    """The lengths of axes."""
    return tuple(math.prod(size for size, _ in axis) for axis in axes)


@dataclass(frozen=True)
class TiedChannels:
    """Channels that must have one factor before anything else can be said."""

    runs: tuple[ChannelRun, ...]


#: The factors of all operands and of all results, None for one without; the first one that leads on is taken.
FactorAssignments = Iterator[tuple[list[FactorLabel | None], list[FactorLabel | None]] | TiedChannels]


@dataclass(frozen=True)
class Port:
    """A node, one of whose values has factors.

    Args:
        node: the node.
        label: the factors.
        place: which operand or result has them.
        is_result: whether it is a result.
    """

    node: GraphNode
    label: FactorLabel
    place: int
    is_result: bool

    @property
    def loops(self) -> int:
        """How many axes are of loops."""
        return len(self.node.outs[0].loops)

    @property
    def own(self) -> tuple[RunAxis, ...]:
        """The axes of the value itself."""
        return self.label.axes[self.loops :]

    def with_value_axes(self, axes: Sequence[RunAxis]) -> FactorLabel:
        """The factors on other axes of the value itself."""
        return self.label.to((*self.label.axes[: self.loops], *axes))

    def same_for_all(self) -> tuple[list[FactorLabel | None], list[FactorLabel | None]]:
        """Every value has the factors."""
        return [self.label] * len(self.node.ins), [self.label] * len(self.node.outs)

    def first_and_result(self, other: FactorLabel) -> tuple[list[FactorLabel | None], list[FactorLabel | None]]:
        """The first operand and all results have factors: the one that is not the port's has these."""
        first, result = (other, self.label) if self.is_result else (self.label, other)
        return [first, *[None] * (len(self.node.ins) - 1)], [result] * len(self.node.outs)

    def require_one_factor(self, axes: Sequence[int], reason: str) -> None:
        """Refuse factors that differ along some axes."""
        if any(not has_one_factor(self.own[axis]) for axis in axes):
            raise FoldError(f"{self.node} {reason}")


def factor_assignments(node: GraphNode, label: FactorLabel, place: int, is_result: bool) -> FactorAssignments:
    """The factors that the values of a node may have, if one of them has the factors of `label`.

    Args:
        node: the node.
        label: the factors of one value.
        place: its number among the operands, or the results.
        is_result: whether it is a result.

    Raises:
        FoldError: if there are none.
    """
    port = Port(node, label, place, is_result)
    if node.product is not None:
        return _PRODUCT_FACTOR_RULES[type(node.product)](port)
    rule = _FACTOR_RULES.get(node.name)
    if rule is None:
        raise FoldError(f"{node} does not commute with factors")
    return fit_broadcast_axes(port, rule(port))


def fit_broadcast_axes(port: Port, assignments: FactorAssignments) -> FactorAssignments:
    """Ways in which operands of length 1 along an axis, if they are broadcast, have one factor there."""
    for assignment in assignments:
        if isinstance(assignment, TiedChannels) or port.node.name not in _BROADCAST_PRIMITIVES:
            yield assignment
            continue
        tied_runs: list[ChannelRun] = []
        fitted_labels = [
            [_fit_broadcast_label(port, value, label, tied_runs) for value, label in zip(values, labels, strict=True)]
            for values, labels in zip((port.node.ins, port.node.outs), assignment, strict=True)
        ]
        yield TiedChannels(tuple(tied_runs)) if tied_runs else (fitted_labels[0], fitted_labels[1])


def _fit_broadcast_label(
    port: Port, value: GraphValue, label: FactorLabel | None, tied_runs: list[ChannelRun]
) -> FactorLabel | None:
    """The label of a value that broadcasts: one factor along axes of another length, whose runs join `tied_runs`."""
    if label is None or len(value.shape) != len(port.own):
        return label
    axes = list(label.axes)
    for i, length in enumerate(value.shape):
        axis = axes[port.loops + i]
        if axis_lengths([axis]) != (length,):
            tied_runs += [] if has_one_factor(axis) or value.zero else axis
            axes[port.loops + i] = _runs_of_one_factor(length)
    return label.to(axes)


#: Why factors cannot differ along some axes.
_PART, _REDUCED = "takes some of its channels", "reduces its channels to one"
_SUM_OF_PART, _MIXED_CHANNELS = "sums over a part of its channels", "does not keep its channels apart"


# -- values that differ in their axes alone ----------------------------------------------------------------------------


def _only_way(way_of: Callable[[Port], Any]) -> Callable[[Port], FactorAssignments]:
    """A rule of a primitive that has one way for its factors, from the function that gives it."""

    def rule(port: Port) -> FactorAssignments:
        yield way_of(port)

    return rule


def _one_label(index: int, label: FactorLabel, count: int = 2) -> list[FactorLabel | None]:
    """Labels of `count` values, of which the one at `index` has factors."""
    return [label if i == index else None for i in range(count)]


def _loop_value_factors(port: Port) -> FactorAssignments:
    """The labels of a value outside of a loop and of the same value in all of its turns."""
    (outer,), (inner,) = port.node.ins, port.node.outs
    loop_axis, length = len(outer.loops), inner.loops[-1]
    if not port.is_result:
        axes = port.label.axes
        yield [port.label], [port.label.to((*axes[:loop_axis], _runs_of_one_factor(length), *axes[loop_axis:]))]
        return
    if not has_one_factor(port.label.axes[loop_axis]):
        yield TiedChannels(port.label.axes[loop_axis])
        return
    yield [port.label.to(axis for i, axis in enumerate(port.label.axes) if i != loop_axis)], [port.label]


def _runs_of_one_factor(size: int) -> RunAxis:
    return () if size == 1 else ((size, 0),)


def _reshape_factors(port: Port) -> FactorAssignments:
    (before,), (after,) = port.node.ins[:1], port.node.outs
    if port.node.params.get("dimensions") is not None:
        raise FoldError(f"{port.node} moves axes too")
    other = before if port.is_result else after
    yield port.first_and_result(port.with_value_axes(reshape_runs(port.own, other.shape)))


def _axes_rule(pairs_of: provenance.AxisPairs, reason: str, ties: bool = False) -> Callable[[Port], FactorAssignments]:
    """A primitive of which an axis of the result is one of the first operand.

    Args:
        pairs_of: these axes.
        reason: why numbers must have one factor along the others.
        ties: whether the factors of the result may be tied to have one.
    """

    def rule(port: Port) -> FactorAssignments:
        before, after = port.node.ins[0], port.node.outs[0]
        every = pairs_of(port.node.params, before.shape, after.shape)
        pairs = [(axis, out) for axis, out in every if before.shape[axis] == after.shape[out]]
        axes = {out: axis for axis, out in pairs} if port.is_result else dict(pairs)
        varying = [runs for axis, runs in enumerate(port.own) if axis not in axes and not has_one_factor(runs)]
        if ties and port.is_result and varying:
            yield TiedChannels(tuple(run for runs in varying for run in runs))
        else:
            yield port.first_and_result(_label_by_axes(port, axes, before if port.is_result else after, reason))

    return rule


def _label_by_axes(port: Port, axes: Mapping[int, int], other: GraphValue, reason: str) -> FactorLabel:
    """The factors of another value, whose axes are the axes of this one by number; along others there is one factor."""
    other_axes = [_runs_of_one_factor(n) for n in other.shape]
    for i, runs in enumerate(port.own):
        if i in axes:
            other_axes[axes[i]] = runs
        elif not has_one_factor(runs):
            raise FoldError(f"{port.node} {reason}")
    return port.with_value_axes(other_axes)


def _along_axes_rule(axes_param: str, reason: str) -> Callable[[Port], FactorAssignments]:
    """A primitive that does not mix numbers but along the axes that a parameter names."""

    def rule(port: Port) -> FactorAssignments:
        axes = port.node.params[axes_param]
        port.require_one_factor([axes] if isinstance(axes, int) else [int(axis) for axis in axes], reason)
        yield port.same_for_all()

    return rule


def _join_rule(axis_param: str, reason: str) -> Callable[[Port], FactorAssignments]:
    """A primitive that joins values along the axis that a parameter names, or takes one apart."""

    def rule(port: Port) -> FactorAssignments:
        axis, own = port.node.params[axis_param], port.own
        port.require_one_factor([axis], reason)

        def labels(values: Sequence[GraphValue]) -> list[FactorLabel | None]:
            lengths = [v.shape[axis] for v in values]
            return [port.with_value_axes([*own[:axis], _runs_of_one_factor(n), *own[axis + 1 :]]) for n in lengths]

        yield labels(port.node.ins), labels(port.node.outs)

    return rule


_padded_axes = _axes_rule(
    lambda params, before, after: ((i, i) for i, p in enumerate(params["padding_config"]) if tuple(p) == (0, 0, 0)),
    "adds channels",
)


def _pad_factors(port: Port) -> FactorAssignments:
    (way,) = _padded_axes(port)
    if not port.node.ins[1].zero:
        raise FoldError(f"{port.node} adds other numbers than zeros")
    yield way


def _scatter_factors(port: Port) -> FactorAssignments:
    """Whole rows that are put, or added, to others."""
    (rows, _, updates), dims = port.node.ins, port.node.params["dimension_numbers"]
    dropped = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    windows = zip(provenance.other_axes(dropped, len(rows.shape)), dims.update_window_dims, strict=True)
    update_axes = {axis: update_axis for axis, update_axis in windows if rows.shape[axis] == updates.shape[update_axis]}
    if port.is_result or not port.place:
        yield [port.label, None, _label_by_axes(port, update_axes, updates, _PART)], [port.label]
    else:
        label = _label_by_axes(port, {out: axis for axis, out in update_axes.items()}, rows, _PART)
        yield [label, None, port.label], [label]


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _convert_factors(port: Port) -> FactorAssignments:
    if not (port.node.ins[0].real and port.node.outs[0].real):
        raise FoldError(f"{port.node} makes other numbers of it")
    yield port.same_for_all()


def _power_rule(exponent: Callable[[dict[str, Any]], Fraction]) -> Callable[[Port], FactorAssignments]:
    def rule(port: Port) -> FactorAssignments:
        power = exponent(port.node.params)
        if not power:
            raise FoldError(f"{port.node} does not commute with factors")
        yield port.first_and_result(port.label.to_power(1 / power if port.is_result else power))

    return rule


def _mul_factors(port: Port) -> FactorAssignments:
    """The labels of a b: factors of one operand go to the result, or, inverted, to the other operand."""
    a, b = port.node.ins
    if a is b:
        other = port.label.to_power(Fraction(1, 2) if port.is_result else 2)
        yield ([other] * 2, [port.label]) if port.is_result else ([port.label] * 2, [other])
        return
    if not port.is_result:
        yield _one_label(port.place, port.label), [port.label]
        yield [port.label if i == port.place else port.label.to_power(-1) for i in (0, 1)], [None]
        return
    for side in (0, 1) if a.is_parameter or not b.is_parameter else (1, 0):
        if not port.node.ins[side].source:
            yield _one_label(side, port.label), [port.label]


def _div_factors(port: Port) -> FactorAssignments:
    """The labels of a / b: factors go to the result, of b inverted, or to the other operand."""
    label, inverse = port.label, port.label.to_power(-1)
    if port.is_result:
        ways: list[list[FactorLabel | None]] = [[label, None], [None, inverse]]
        for way, value in zip(ways, port.node.ins, strict=True):
            if not value.source:
                yield way, [label]
    else:
        yield _one_label(port.place, label), [inverse if port.place else label]
        yield [label, label], [None]


# -- products ----------------------------------------------------------------------------------------------------------


def _dot_factors(port: Port) -> FactorAssignments:
    """The labels of a dot: factors of free axes go to the result, of summed axes inverted to the other operand."""
    dot: DotProduct = port.node.product
    result_axes = [dot.result_axes(side) for side in (0, 1)]
    if port.is_result:
        yield from _dot_result_factors(port, result_axes)
        return
    side, other = port.place, 1 - port.place
    if all(has_one_factor(port.own[axis]) for axis in dot.contracting[side]):
        yield _one_label(side, port.label), [_label_by_axes(port, result_axes[side], port.node.outs[0], _SUM_OF_PART)]
        return
    axes = dict(
        zip((*dot.contracting[side], *dot.batch[side]), (*dot.contracting[other], *dot.batch[other]), strict=True)
    )
    inverse = _label_by_axes(port, axes, port.node.ins[other], _SUM_OF_PART).to_power(-1)
    yield [port.label if i == side else inverse for i in (0, 1)], [None]


def _dot_result_factors(port: Port, result_axes: Sequence[Mapping[int, int]]) -> FactorAssignments:
    """The labels of a dot whose result has factors: they go to the operand whose axes have them."""
    first, second = ({*axes.values()} for axes in result_axes)
    own_axes = sorted(first - second), sorted(second - first)
    runs = [[run for axis in axes for run in port.own[axis] if run[1]] for axes in own_axes]
    for side in (0, 1) if port.node.ins[0].is_parameter or not port.node.ins[1].is_parameter else (1, 0):
        if runs[0] and runs[1]:
            yield TiedChannels(tuple(runs[1 - side]))
        elif not runs[1 - side]:
            axes = {out: axis for axis, out in result_axes[side].items()}
            yield _one_label(side, _label_by_axes(port, axes, port.node.ins[side], _SUM_OF_PART)), [port.label]


def _conv_factors(port: Port) -> FactorAssignments:
    """The labels of a convolution: output channels go to the result, input channels inverted to the other operand."""
    conv: ConvProduct = port.node.product
    image, kernel, out = conv.numbers.lhs_spec, conv.numbers.rhs_spec, conv.numbers.out_spec
    values = [*port.node.ins[:2], *port.node.outs]

    def labels(axes: Sequence[int]) -> list[FactorLabel]:
        """The factors of image, kernel and result along one axis of each; the known factors are of one of them."""
        channel_axis = axes[2 if port.is_result else port.place]
        pairs = zip(values, axes, strict=False)
        return [_label_by_axes(port, {channel_axis: axis}, value, _MIXED_CHANNELS) for value, axis in pairs]

    if conv.feature_groups != 1:
        axes = image[1], kernel[0], out[1]
        if {value.shape[axis] for value, axis in zip(values, axes, strict=True)} != {conv.feature_groups}:
            raise FoldError(f"{port.node} has feature_group_count={conv.feature_groups}")
        yield from _depthwise_factors(port, labels(axes))
    elif port.is_result or (port.place == 1 and not has_one_factor(port.own[kernel[0]])):
        _, weight, result = labels((image[1], kernel[0], out[1]))
        yield [None, weight], [result]
    else:
        yield (
            [label.to_power(1 if i == port.place else -1) for i, label in enumerate(labels((image[1], kernel[1])))],
            [None],
        )


def _depthwise_factors(port: Port, labels: Sequence[FactorLabel]) -> FactorAssignments:
    """Each channel of an image times one of a kernel: two of image, kernel and result have factors."""
    pairs = [(1, 2), (0, 2)] if port.is_result else [(0, 1), (0, 2)] if port.place == 0 else [(1, 2), (0, 1)]
    for pair in pairs:
        inverse = pair == (0, 1)
        source_index = port.place if not port.is_result else 2
        channel_labels = [
            None if i not in pair else label.to_power(-1) if inverse and i != source_index else label
            for i, label in enumerate(labels)
        ]
        yield channel_labels[:2], channel_labels[2:]


def _ragged_dot_factors(port: Port) -> FactorAssignments:
    """Rows (m, k) and matrices (g, k, n): which matrix a row meets depends on data."""
    rows, weight, result = (*port.node.ins[:2], port.node.outs[0])
    others: list[FactorLabel | None] = [None] * (len(port.node.ins) - 2)
    if port.is_result or port.place == 0:
        port.require_one_factor([0], _MIXED_CHANNELS)
    elif not has_one_factor(port.own[0]):
        yield TiedChannels(tuple(port.own[0]))
        return
    if port.is_result or (port.place == 1 and has_one_factor(port.own[1])):
        last = len(port.own) - 1
        weight_label = _label_by_axes(port, {last: 2}, weight, _SUM_OF_PART)
        yield [None, weight_label, *others], [_label_by_axes(port, {last: 1}, result, _SUM_OF_PART)]
        return
    sign = -1 if port.place else 1
    row_label, weight_label = (_label_by_axes(port, {1: 1}, value, _SUM_OF_PART) for value in (rows, weight))
    yield [row_label.to_power(sign), weight_label.to_power(-sign), *others], [None]


_HOMOGENEOUS_NAMES = """
    add add_any sub max min neg abs copy copy_p name jchop_result stop_gradient sharding_constraint reshard device_put
    reduce_precision
"""
_COMPARISONS = "ge gt le lt eq ne"
_PRODUCT_FACTOR_RULES: dict[type, Callable[[Port], FactorAssignments]] = {
    DotProduct: _dot_factors,
    ConvProduct: _conv_factors,
    RaggedProduct: _ragged_dot_factors,
}
_FACTOR_RULES: dict[str, Callable[[Port], FactorAssignments]] = {
    **dict.fromkeys((SAME_VALUE, LOOP_STACK, *_HOMOGENEOUS_NAMES.split()), _only_way(Port.same_for_all)),
    LOOP_VALUE: _loop_value_factors,
    # With zero, and with a value of the same factors: these are positive.
    **dict.fromkeys(_COMPARISONS.split(), _only_way(lambda port: ([port.label] * 2, [None]))),
    "optimization_barrier": _only_way(  # each result is one operand
        lambda port: (_one_label(port.place, port.label, len(port.node.ins)),) * 2
    ),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min"),
        _axes_rule(
            lambda params, a, b: zip(provenance.other_axes(params["axes"], len(a)), range(len(b)), strict=True),
            _REDUCED,
        ),
    ),
    **dict.fromkeys(
        ("slice", "dynamic_slice"), _axes_rule(lambda params, a, b: enumerate(range(len(a))), "takes some channels")
    ),
    "convert_element_type": _convert_factors,
    "reshape": _reshape_factors,
    "transpose": _axes_rule(provenance.AXIS_PAIRS["transpose"], ""),
    "broadcast_in_dim": _axes_rule(provenance.AXIS_PAIRS["broadcast_in_dim"], "", ties=True),
    "squeeze": _axes_rule(provenance.AXIS_PAIRS["squeeze"], _REDUCED),
    "expand_dims": _axes_rule(provenance.AXIS_PAIRS["expand_dims"], _REDUCED),
    "rev": _along_axes_rule("dimensions", "reverses its channels"),
    "cumsum": _along_axes_rule("axis", "sums over its channels"),
    "concatenate": _join_rule("dimension", "joins its channels with others"),
    "split": _join_rule("axis", "takes its channels apart"),
    "pad": _pad_factors,
    "gather": _axes_rule(provenance.AXIS_PAIRS["gather"], _PART),
    **dict.fromkeys(("scatter", "scatter-add"), _scatter_factors),
    "mul": _mul_factors,
    "div": _div_factors,
    "square": _power_rule(lambda params: Fraction(2)),
    "sqrt": _power_rule(lambda params: Fraction(1, 2)),
    "rsqrt": _power_rule(lambda params: Fraction(-1, 2)),
    "integer_pow": _power_rule(lambda params: Fraction(params["y"])),
    "sign": _only_way(lambda port: ([port.label], [None])),
    "select_n": _only_way(lambda port: ([None, *[port.label] * (len(port.node.ins) - 1)], [port.label])),
}
#: Primitives that broadcast axes of length 1.
_BROADCAST_NAMES = "add add_any sub max min mul div select_n"
_BROADCAST_PRIMITIVES = frozenset((*_BROADCAST_NAMES.split(), *_COMPARISONS.split()))
