"""Which parameters take up the factors of the channels of a product, so that the function stays what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jchop._quantized.products.product import ConvProduct, RaggedProduct
from jchop.ptq._equalize.factor_rules import FactorAssignments, TiedChannels, factor_assignments
from jchop.ptq._equalize.graph import GraphNode, GraphValue, ProductPlace
from jchop.ptq._equalize.labels import Channels, FactorLabel, FoldError, RunAxis

__all__ = ["Fold", "channels_of", "fold_of"]

#: The most equations that a search looks at.
_MOST_EQUATIONS = 20_000
_Labels = dict[GraphValue, FactorLabel | None]
_ValueAndNode = tuple[GraphValue, GraphNode]


@dataclass(frozen=True, eq=False)
class Fold:
    """Factors of channels that cancel; or a rotation of them.

    Args:
        channels: the channels: those of the inputs of a product, in the order of its statistics.
        labels: the values that have factors, or are rotated.
    """

    channels: Channels
    labels: dict[GraphValue, FactorLabel]


def channels_of(place: ProductPlace) -> tuple[int, tuple[int, ...], list[tuple[int, int]]]:
    """The channels of the inputs of a product, in the order of their statistics.

    Returns:
        Their number, the lengths of the axes of the weight (loops, then its own), and of those that count channels the
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

    The weight takes the factors s, so that its input must have 1/s, and so on through the program, equation by
    equation, until every value that has factors is made and read by equations that keep the function what it is.

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
        """From the weight, under more and more ties."""
        _, shape, axes = channels_of(self.place)
        runs: list[RunAxis] = [((n, 0),) if n != 1 else () for n in shape]
        for axis, stride in axes:
            runs[axis] = channels.axis(shape[axis], stride)
        weight = self.place.node.ins[self.place.side]
        labels: _Labels = {}
        pending: list[_ValueAndNode] = []
        self._set(labels, pending, weight, FactorLabel(Fraction(1), tuple(runs)), self.place.node)
        return self._solve(channels, labels, pending)

    def _solve(self, channels: Channels, labels: _Labels, pending: list[_ValueAndNode]) -> Fold:
        """Equations with one way first; then each way of the others in turn."""
        open_pairs: list[_ValueAndNode] = []
        while pending or open_pairs:
            has_choices_only = not pending
            value, node = (pending or open_pairs).pop()
            self.budget -= 1
            if self.budget < 0:
                raise FoldError("the program is too long to follow")
            ways = self._ways(labels, value, node)
            if len(ways) > 1 and not has_choices_only:
                open_pairs.insert(0, (value, node))
            elif len(ways) > 1:
                return self._first_way(channels, labels, open_pairs, node, ways)
            elif isinstance(ways[0], TiedChannels):
                return self.start(channels.tie(ways[0].runs))
            else:
                self._apply_way(labels, pending, node, ways[0])
        return Fold(channels, {value: label for value, label in labels.items() if label is not None})

    def _first_way(
        self, channels: Channels, labels: _Labels, pending: list[_ValueAndNode], node: GraphNode, ways: Sequence[Any]
    ) -> Fold:
        """The first way that leads to an end."""
        reasons: list[FoldError] = []
        for way in ways:
            try:
                if isinstance(way, TiedChannels):
                    return self.start(channels.tie(way.runs))
                branch_labels, branch_pending = dict(labels), list(pending)
                self._apply_way(branch_labels, branch_pending, node, way)
                return self._solve(channels, branch_labels, branch_pending)
            except FoldError as reason:
                reasons.append(reason)
        raise reasons[0]

    def _ways(self, labels: _Labels, value: GraphValue, node: GraphNode) -> list[Any]:
        """The ways that agree with what is known."""
        label = labels[value]
        assert label is not None
        is_result = value not in node.ins
        place = (node.outs if is_result else node.ins).index(value)
        ways = list(self.ways(node, label, place, is_result))
        fitting = [way for way in ways if isinstance(way, TiedChannels) or self._fits(labels, node, way)]
        if not fitting:
            raise FoldError(f"the factors that its values need disagree at {node}")
        return fitting

    def _fits(self, labels: _Labels, node: GraphNode, way: Any) -> bool:
        new_labels: _Labels = {}
        for value, label in zip((*node.ins, *node.outs), (*way[0], *way[1]), strict=True):
            if value.zero:
                continue
            if labels.get(value, label) != label or new_labels.setdefault(value, label) != label:
                return False
        return True

    def _apply_way(self, labels: _Labels, pending: list[_ValueAndNode], node: GraphNode, way: Any) -> None:
        for value, label in zip((*node.ins, *node.outs), (*way[0], *way[1]), strict=True):
            if not value.zero and value not in labels:
                self._set(labels, pending, value, label, node)

    def _set(
        self,
        labels: _Labels,
        pending: list[_ValueAndNode],
        value: GraphValue,
        label: FactorLabel | None,
        node: GraphNode,
    ) -> None:
        labels[value] = label
        if label is None:
            return
        if value.source:
            raise FoldError(f"{node} takes {value.source}")
        if value.result:
            raise FoldError(f"{node} makes a result of the function")
        if not value.real:
            raise FoldError(f"{node} makes numbers that are not real")
        pending.extend((value, node) for node in value.nodes)
