"""How factors pass through one equation, in any direction: from one of its values to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jchop._products.product import Conv, Dot, Ragged
from jchop.ptq._maps.graph import CARRIED, OVER_TURNS, SAME, Node, Value
from jchop.ptq._maps.labels import Axis, Label, RefusedError, Run, is_flat, reshaped, sizes_of

__all__ = ["Seen", "Tie", "Ways", "fitted", "ways_of"]


@dataclass(frozen=True)
class Tie:
    """Channels that must have one factor before anything else can be said."""

    runs: tuple[Run, ...]


#: The factors of all operands and of all results, None for one without; the first one that leads on is taken.
Ways = Iterator[tuple[list[Label | None], list[Label | None]] | Tie]


@dataclass(frozen=True)
class Seen:
    """A node, one of whose values has factors.

    Args:
        node: the node.
        label: the factors.
        place: which operand or result has them.
        made: whether it is a result.
    """

    node: Node
    label: Label
    place: int
    made: bool

    @property
    def loops(self) -> int:
        """How many axes are of loops."""
        return len(self.node.outs[0].loops)

    @property
    def around(self) -> tuple[Axis, ...]:
        """The axes of loops."""
        return self.label.axes[: self.loops]

    @property
    def own(self) -> tuple[Axis, ...]:
        """The axes of the value itself."""
        return self.label.axes[self.loops :]

    def on(self, axes: Sequence[Axis]) -> Label:
        """The factors on other axes of the value itself."""
        return self.label.to((*self.around, *axes))

    def all_alike(self) -> tuple[list[Label | None], list[Label | None]]:
        """Every value has the factors."""
        return [self.label] * len(self.node.ins), [self.label] * len(self.node.outs)

    def from_first(self, ins: Label, outs: Label) -> tuple[list[Label | None], list[Label | None]]:
        """The first operand and all results have factors."""
        return [ins, *[None] * (len(self.node.ins) - 1)], [outs] * len(self.node.outs)

    def flat_on(self, axes: Sequence[int], what: str) -> None:
        """Refuse factors that differ along some axes."""
        if any(not is_flat(self.own[axis]) for axis in axes):
            raise RefusedError(f"{self.node} {what}")


def ways_of(node: Node, label: Label, place: int, made: bool) -> Ways:
    """The factors that the values of a node may have, if one of them has those of `label`.

    Args:
        node: the node.
        label: the factors of one value.
        place: its number among the operands, or the results.
        made: whether it is a result.

    Raises:
        RefusedError: if there are none.
    """
    seen = Seen(node, label, place, made)
    if node.product is not None:
        return _PRODUCTS[type(node.product)](seen)
    rule = _RULES.get(node.name)
    if rule is None:
        raise RefusedError(f"{node} does not commute with factors")
    return fitted(seen, rule(seen))


def fitted(seen: Seen, ways: Ways) -> Ways:
    """Ways in which operands of length 1 along an axis, if they are broadcast, have one factor there."""
    for way in ways:
        if isinstance(way, Tie) or seen.node.name not in _ELEMENTWISE:
            yield way
            continue
        lost: list[Run] = []
        some = [
            [_fitted_one(seen, value, label, lost) for value, label in zip(values, labels, strict=True)]
            for values, labels in zip((seen.node.ins, seen.node.outs), way, strict=True)
        ]
        yield Tie(tuple(lost)) if lost else (some[0], some[1])


def _fitted_one(seen: Seen, value: Value, label: Label | None, lost: list[Run]) -> Label | None:
    if label is None or len(value.shape) != len(seen.own):
        return label
    axes = list(label.axes)
    for i, n in enumerate(value.shape):
        axis = axes[seen.loops + i]
        if sizes_of([axis]) != (n,):
            lost += [] if is_flat(axis) or value.zero else axis
            axes[seen.loops + i] = _flat(n)
    return label.to(axes)


# -- values that differ in their axes alone ----------------------------------------------------------------------------


def _alike(seen: Seen) -> Ways:
    yield seen.all_alike()


def _one_to_one(seen: Seen) -> Ways:
    """Each result is one operand."""
    ins: list[Label | None] = [None] * len(seen.node.ins)
    ins[seen.place] = seen.label
    yield ins, list(ins)


def _carried(seen: Seen) -> Ways:
    """A value outside of a loop, and in all of its turns."""
    (outer,), (inner,) = seen.node.ins, seen.node.outs
    place, length = len(outer.loops), inner.loops[-1]
    if not seen.made:
        axes = seen.label.axes
        yield [seen.label], [seen.label.to((*axes[:place], _flat(length), *axes[place:]))]
        return
    if not is_flat(seen.label.axes[place]):
        yield Tie(seen.label.axes[place])
        return
    yield [seen.label.to(axis for i, axis in enumerate(seen.label.axes) if i != place)], [seen.label]


def _flat(size: int) -> Axis:
    return () if size == 1 else ((size, 0),)


def _reshape(seen: Seen) -> Ways:
    (before,), (after,) = seen.node.ins[:1], seen.node.outs
    if seen.node.params.get("dimensions") is not None:
        raise RefusedError(f"{seen.node} moves axes too")
    other = before if seen.made else after
    yield _pair(seen, seen.on(reshaped(seen.own, other.shape)))


def _pair(seen: Seen, other: Label) -> tuple[list[Label | None], list[Label | None]]:
    return seen.from_first(other, seen.label) if seen.made else seen.from_first(seen.label, other)


def _transpose(seen: Seen) -> Ways:
    order = seen.node.params["permutation"]
    if seen.made:
        axes: list[Axis] = [()] * len(order)
        for i, axis in enumerate(order):
            axes[axis] = seen.own[i]
    else:
        axes = [seen.own[axis] for axis in order]
    yield _pair(seen, seen.on(axes))


def _broadcast(seen: Seen) -> Ways:
    placed, shape = seen.node.params["broadcast_dimensions"], seen.node.ins[0].shape
    out = seen.node.outs[0].shape
    if seen.made:
        kept = {axis for i, axis in enumerate(placed) if shape[i] == out[axis]}
        lost = [run for axis, runs in enumerate(seen.own) if axis not in kept and not is_flat(runs) for run in runs]
        if lost:
            yield Tie(tuple(lost))
            return
        axes = [seen.own[axis] if axis in kept else () for axis in placed]
    else:
        axes = [_flat(n) for n in out]
        for i, axis in enumerate(placed):
            if shape[i] == out[axis]:
                axes[axis] = seen.own[i]
    yield _pair(seen, seen.on(axes))


def _along(name: str, what: str) -> Callable[[Seen], Ways]:
    """A primitive that does not mix numbers but along the axes that a parameter names."""

    def rule(seen: Seen) -> Ways:
        axes = seen.node.params[name]
        seen.flat_on([axes] if isinstance(axes, int) else [int(axis) for axis in axes], what)
        yield seen.all_alike()

    return rule


def _sized(seen: Seen) -> Label:
    """The factors of the other value of a node, some axes of which, without factors, have other lengths."""
    other = seen.node.ins[0] if seen.made else seen.node.outs[0]
    axes = [runs if sizes_of([runs]) == (n,) else _flat(n) for runs, n in zip(seen.own, other.shape, strict=True)]
    return seen.on(axes)


def _parts(name: str, what: str) -> Callable[[Seen], Ways]:
    """A primitive that joins values along the axis that a parameter names, or takes one apart."""

    def rule(seen: Seen) -> Ways:
        axis = seen.node.params[name]
        seen.flat_on([axis], what)

        def labels(values: Sequence[Value]) -> list[Label | None]:
            return [
                seen.on([_flat(v.shape[i]) if i == axis else runs for i, runs in enumerate(seen.own)]) for v in values
            ]

        yield labels(seen.node.ins), labels(seen.node.outs)

    return rule


def _slice(seen: Seen) -> Ways:
    """A part of an axis: along it numbers must have one factor."""
    (before, *_), (after,) = seen.node.ins, seen.node.outs
    seen.flat_on(
        [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b], "takes some channels"
    )
    yield _pair(seen, _sized(seen))


def _pad(seen: Seen) -> Ways:
    padded = [i for i, some in enumerate(seen.node.params["padding_config"]) if tuple(some) != (0, 0, 0)]
    seen.flat_on(padded, "adds channels")
    if not seen.node.ins[1].zero:
        raise RefusedError(f"{seen.node} adds other numbers than zeros")
    yield _pair(seen, _sized(seen))


def _reduce(seen: Seen) -> Ways:
    gone = {int(axis) for axis in seen.node.params["axes"]}
    if not seen.made:
        seen.flat_on(sorted(gone), "reduces its channels to one")
        axes = [runs for i, runs in enumerate(seen.own) if i not in gone]
    else:
        rest = iter(seen.own)
        axes = [_flat(n) if i in gone else next(rest) for i, n in enumerate(seen.node.ins[0].shape)]
    yield _pair(seen, seen.on(axes))


def _squeeze(seen: Seen) -> Ways:
    gone = {axis % len(seen.node.ins[0].shape) for axis in seen.node.params["dimensions"]}
    rest = iter(seen.own)
    if seen.made:
        axes = [() if i in gone else next(rest) for i in range(len(seen.node.ins[0].shape))]
    else:
        axes = [runs for i, runs in enumerate(seen.own) if i not in gone]
    yield _pair(seen, seen.on(axes))


def _expand(seen: Seen) -> Ways:
    new = {axis % len(seen.node.outs[0].shape) for axis in seen.node.params["dimensions"]}
    rest = iter(seen.own)
    if seen.made:
        axes = [runs for i, runs in enumerate(seen.own) if i not in new]
    else:
        axes = [() if i in new else next(rest) for i in range(len(seen.node.outs[0].shape))]
    yield _pair(seen, seen.on(axes))


def _gather(seen: Seen) -> Ways:
    """Whole rows that are looked up."""
    table, numbers = seen.node.ins[0], seen.node.params["dimension_numbers"]
    sizes, single = seen.node.params["slice_sizes"], {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    rows = zip((i for i in range(len(sizes)) if i not in single), numbers.offset_dims, strict=True)
    whole = [(axis, out) for axis, out in rows if sizes[axis] == table.shape[axis]]
    there = {out: axis for axis, out in whole} if seen.made else dict(whole)
    yield _pair(seen, _moved(seen, there, table if seen.made else seen.node.outs[0]))


def _scatter(seen: Seen) -> Ways:
    """Whole rows that are put, or added, to others."""
    (rows, _, updates), numbers = seen.node.ins, seen.node.params["dimension_numbers"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = zip((i for i in range(len(rows.shape)) if i not in single), numbers.update_window_dims, strict=True)
    whole = {axis: own for axis, own in windows if rows.shape[axis] == updates.shape[own]}
    if seen.made or not seen.place:
        yield [seen.label, None, _moved(seen, whole, updates)], [seen.label]
    else:
        found = _moved(seen, {own: axis for axis, own in whole.items()}, rows)
        yield [found, None, seen.label], [found]


def _moved(seen: Seen, there: Mapping[int, int], other: Value) -> Label:
    """The factors of another value, whose axes are those of this one by number."""
    axes = [_flat(n) for n in other.shape]
    for i, runs in enumerate(seen.own):
        if i in there:
            axes[there[i]] = runs
        elif not is_flat(runs):
            raise RefusedError(f"{seen.node} takes some of its channels")
    return seen.on(axes)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _convert(seen: Seen) -> Ways:
    if not (seen.node.ins[0].real and seen.node.outs[0].real):
        raise RefusedError(f"{seen.node} makes other numbers of it")
    yield seen.all_alike()


def _power(exponent: Callable[[dict[str, Any]], Fraction]) -> Callable[[Seen], Ways]:
    def rule(seen: Seen) -> Ways:
        by = exponent(seen.node.params)
        if not by:
            raise RefusedError(f"{seen.node} does not commute with factors")
        yield _pair(seen, seen.label.raised(1 / by if seen.made else by))

    return rule


def _mul(seen: Seen) -> Ways:
    a, b = seen.node.ins
    if a is b:
        other = seen.label.raised(Fraction(1, 2) if seen.made else 2)
        yield ([other] * 2, [seen.label]) if seen.made else ([seen.label] * 2, [other])
        return
    if not seen.made:
        ins: list[Label | None] = [None, None]
        ins[seen.place] = seen.label
        yield ins, [seen.label]
        ins = [seen.label.raised(-1)] * 2
        ins[seen.place] = seen.label
        yield ins, [None]
        return
    for side in (0, 1) if a.is_parameter or not b.is_parameter else (1, 0):
        if not seen.node.ins[side].source:
            ins = [None, None]
            ins[side] = seen.label
            yield ins, [seen.label]


def _div(seen: Seen) -> Ways:
    if seen.made:
        ways: list[list[Label | None]] = [[seen.label, None], [None, seen.label.raised(-1)]]
        for way, value in zip(ways, seen.node.ins, strict=True):
            if not value.source:
                yield way, [seen.label]
    elif seen.place == 0:
        yield [seen.label, None], [seen.label]
        yield [seen.label, seen.label], [None]
    else:
        yield [None, seen.label], [seen.label.raised(-1)]
        yield [seen.label, seen.label], [None]


def _compare(seen: Seen) -> Ways:
    """With zero, and with a value of the same factors: these are positive."""
    yield [seen.label, seen.label], [None]


def _sign(seen: Seen) -> Ways:
    yield [seen.label], [None]


def _select(seen: Seen) -> Ways:
    yield [None, *[seen.label] * (len(seen.node.ins) - 1)], [seen.label]


# -- products ----------------------------------------------------------------------------------------------------------


def _dot(seen: Seen) -> Ways:
    dot: Dot = seen.node.product
    ndims = [len(v.shape) for v in seen.node.ins[:2]]
    taken = [{*dot.contracting[side], *dot.batch[side]} for side in (0, 1)]
    free = [[axis for axis in range(ndims[side]) if axis not in taken[side]] for side in (0, 1)]
    shared = len(dot.batch[0])
    if seen.made:
        yield from _dot_back(seen, dot, free, ndims)
        return
    side, other = seen.place, 1 - seen.place
    summed = [axis for axis in dot.contracting[side] if not is_flat(seen.own[axis])]
    ins: list[Label | None] = [None, None]
    ins[side] = seen.label
    if summed:
        seen.flat_on(free[side], "sums over a part of its channels")
        axes = [_flat(n) for n in seen.node.ins[other].shape]
        for kind in (dot.contracting, dot.batch):
            for own, theirs in zip(kind[side], kind[other], strict=True):
                axes[theirs] = seen.own[own]
        ins[other] = seen.on(axes).raised(-1)
        yield ins, [None]
        return
    axes = [_flat(n) for n in seen.node.outs[0].shape]
    axes[:shared] = [seen.own[axis] for axis in dot.batch[side]]
    start = shared + (0 if side == 0 else len(free[0]))
    axes[start : start + len(free[side])] = [seen.own[axis] for axis in free[side]]
    yield ins, [seen.on(axes)]


def _dot_back(seen: Seen, dot: Dot, free: Sequence[Sequence[int]], ndims: Sequence[int]) -> Ways:
    """From a result to the operand whose axes have the factors."""
    shared = len(dot.batch[0])
    cut = (shared, shared + len(free[0]), len(seen.own))
    runs = [[run for axis in seen.own[cut[i] : cut[i + 1]] for run in axis if run[1]] for i in (0, 1)]
    sides = [0, 1] if seen.node.ins[0].is_parameter or not seen.node.ins[1].is_parameter else [1, 0]
    if runs[0] and runs[1]:
        for side in sides:
            yield Tie(tuple(runs[1 - side]))
        return
    for side in sides:
        if runs[1 - side]:
            continue
        axes = [_flat(n) for n in seen.node.ins[side].shape]
        for i, axis in enumerate(dot.batch[side]):
            axes[axis] = seen.own[i]
        for i, axis in enumerate(free[side]):
            axes[axis] = seen.own[cut[side] + i]
        ins: list[Label | None] = [None, None]
        ins[side] = seen.on(axes)
        yield ins, [seen.label]


def _conv(seen: Seen) -> Ways:
    conv: Conv = seen.node.product
    image, kernel, out = conv.numbers.lhs_spec, conv.numbers.rhs_spec, conv.numbers.out_spec

    def label(value: Any, axis: int, runs: Axis) -> Label:
        return seen.on([runs if i == axis else _flat(n) for i, n in enumerate(value.shape)])

    if conv.feature_groups != 1:
        axes = image[1], kernel[0], out[1]
        values = [*seen.node.ins[:2], *seen.node.outs]
        if {value.shape[axis] for value, axis in zip(values, axes, strict=True)} != {conv.feature_groups}:
            raise RefusedError(f"{seen.node} has feature_group_count={conv.feature_groups}")
        own = axes[2 if seen.made else seen.place]
        seen.flat_on([i for i in range(len(seen.own)) if i != own], "does not keep its channels apart")
        yield from _depthwise(seen, [label(v, axis, seen.own[own]) for v, axis in zip(values, axes, strict=True)])
        return
    if seen.made or (seen.place == 1 and not is_flat(seen.own[kernel[0]])):
        axis = out[1] if seen.made else kernel[0]
        seen.flat_on([i for i in range(len(seen.own)) if i != axis], "does not keep its channels apart")
        runs = seen.own[axis]
        yield [None, label(seen.node.ins[1], kernel[0], runs)], [label(seen.node.outs[0], out[1], runs)]
        return
    axis = (image, kernel)[seen.place][1]
    seen.flat_on([i for i in range(len(seen.own)) if i != axis], "does not keep its channels apart")
    both = [label(value, (image, kernel)[i][1], seen.own[axis]) for i, value in enumerate(seen.node.ins)]
    yield [own.raised(1 if i == seen.place else -1) for i, own in enumerate(both)], [None]


def _depthwise(seen: Seen, labels: Sequence[Label]) -> Ways:
    """Each channel of an image times one of a kernel: two of image, kernel and result have factors."""
    pairs = [(1, 2), (0, 2)] if seen.made else [(0, 1), (0, 2)] if seen.place == 0 else [(1, 2), (0, 1)]
    for pair in pairs:
        inverse = pair == (0, 1)
        first = seen.place if not seen.made else 2
        found = [
            None if i not in pair else own.raised(-1) if inverse and i != first else own for i, own in enumerate(labels)
        ]
        yield found[:2], found[2:]


def _ragged(seen: Seen) -> Ways:
    """Rows (m, k) and matrices (g, k, n): which matrix a row meets depends on data."""
    flat = [[_flat(n) for n in v.shape] for v in (*seen.node.ins[:2], seen.node.outs[0])]
    none: list[Label | None] = [None] * len(seen.node.ins)
    if seen.made or seen.place == 0:
        seen.flat_on([0], "does not keep its channels apart")
    elif not is_flat(seen.own[0]):
        yield Tie(tuple(seen.own[0]))
        return
    if seen.made or (seen.place == 1 and is_flat(seen.own[1])):
        runs = seen.own[-1]
        weight = seen.on([*flat[1][:2], runs])
        yield [None, weight, *none[2:]], [seen.on([flat[2][0], runs])]
        return
    if seen.place == 1:
        seen.flat_on([2], "sums over a part of its channels")
    runs, way = seen.own[1], (-1 if seen.place else 1)
    rows, weight = seen.on([flat[0][0], runs]), seen.on([flat[1][0], runs, flat[1][2]])
    yield [rows.raised(way), weight.raised(-way), *none[2:]], [None]


_HOMOGENEOUS = """
    add add_any sub max min neg abs copy copy_p name jchop_result stop_gradient sharding_constraint reshard device_put
    reduce_precision
"""
_COMPARE = "ge gt le lt eq ne"
_PRODUCTS: dict[type, Callable[[Seen], Ways]] = {Dot: _dot, Conv: _conv, Ragged: _ragged}
_RULES: dict[str, Callable[[Seen], Ways]] = {
    SAME: _alike,
    OVER_TURNS: _alike,
    CARRIED: _carried,
    **dict.fromkeys(_HOMOGENEOUS.split(), _alike),
    **dict.fromkeys(_COMPARE.split(), _compare),
    "optimization_barrier": _one_to_one,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce),
    **dict.fromkeys(("slice", "dynamic_slice"), _slice),
    "convert_element_type": _convert,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "rev": _along("dimensions", "reverses its channels"),
    "cumsum": _along("axis", "sums over its channels"),
    "concatenate": _parts("dimension", "joins its channels with others"),
    "split": _parts("axis", "takes its channels apart"),
    "pad": _pad,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add"), _scatter),
    "mul": _mul,
    "div": _div,
    "square": _power(lambda params: Fraction(2)),
    "sqrt": _power(lambda params: Fraction(1, 2)),
    "rsqrt": _power(lambda params: Fraction(-1, 2)),
    "integer_pow": _power(lambda params: Fraction(params["y"])),
    "sign": _sign,
    "select_n": _select,
}
#: Primitives that broadcast axes of length 1.
_BROADCAST = "add add_any sub max min mul div select_n"
_ELEMENTWISE = frozenset((*_BROADCAST.split(), *_COMPARE.split()))
