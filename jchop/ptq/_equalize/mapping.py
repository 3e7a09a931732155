"""Parameters mapped by statistics: the factors, their places, and the facts for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import enable_x64_for
from jchop._common.settings import always_jit
from jchop._quantized.products.operand_layout import HadamardBlocks
from jchop._quantized.program.call import is_packed_param, unpack_param
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.weight_layout import WeightLayout
from jchop._storage._quantize import multiply_in_own_dtype
from jchop.ptq._data.collect import InputSums, add_sums, input_means
from jchop.ptq._data.passes import BatchData, LazySums
from jchop.ptq._data.sites import rounded_sites
from jchop.ptq._equalize.factor_rules import FactorLabel, FoldError, has_one_factor
from jchop.ptq._equalize.graph import GraphValue, ProductPlace, graph_of
from jchop.ptq._equalize.search import Fold, GainError, channels_of, fold_of, rotation_of
from jchop.ptq._steps.round import element_scales, placement_to_nearest, qarray_of, round_parameter
from jchop.ptq._steps.steps import Awq, CalibrationSteps, MappingStep, Rotate, Smooth

#: Factors are kept within these, so that parameters neither vanish nor overflow.
_LEAST_FACTOR, _MOST_FACTOR = 1e-5, 1e5


@dataclass(frozen=True, eq=False)
class ChannelWeight:
    """A weight whose inputs have the channels.

    Args:
        weight: with the axes of a stack.
        stack: how many of these there are.
        turns: how many of these are turns of loops.
        placement: how the weight is rounded.
        layout: the weight as matrices.
        sums: the sums over its inputs.
        channels: the channel of each input of each of its matrices, (turns, batch, summed) in one.
    """

    weight: Any
    stack: int
    turns: int
    placement: WeightLayout
    layout: MatrixLayout
    sums: InputSums
    channels: np.ndarray

    @property
    def layers(self) -> list[tuple[int, ...]]:
        """The indexes of its layers."""
        return list(np.ndindex(*self.weight.shape[: self.stack]))

    def turn(self, layer: tuple[int, ...]) -> int:
        """The index of the loop iteration, and so of the statistics, of a layer."""
        shape = self.weight.shape[: self.turns]
        return int(np.ravel_multi_index(layer[: self.turns], shape)) if shape else 0

    def by_turn(self, values: np.ndarray) -> np.ndarray:
        """Numbers of channels as (turns, batch, summed)."""
        return values[self.channels].reshape(-1, *self.layout.matrix_shape[:2])


def smooth_factors(step: Smooth, members: Sequence[ChannelWeight], count: int) -> np.ndarray:
    """The factor max|x|^alpha / max|w|^(1 - alpha) of each channel."""
    inputs, weights = np.zeros(count), np.zeros(count)
    for member in members:
        np.maximum.at(inputs, member.channels, np.asarray(member.sums.largest, np.float64).reshape(-1))
        for layer in member.layers:
            rows = np.asarray(jnp.abs(member.layout.lay(jnp.asarray(member.weight)[layer])).max(2), np.float64)
            np.maximum.at(weights, member.by_turn(np.arange(count))[member.turn(layer)].reshape(-1), rows.reshape(-1))
    bounds = np.where(inputs > 0, inputs, 1.0), np.where(weights > 0, weights, 1.0)
    factors = bounds[0] ** step.alpha / bounds[1] ** (1 - step.alpha)
    return np.where(inputs > 0, factors.clip(_LEAST_FACTOR, _MOST_FACTOR), 1.0)


def awq_factors(step: Awq, members: Sequence[ChannelWeight], count: int, units: int) -> tuple[np.ndarray, list[str]]:
    """The factors of least error at the outputs, and the choice in each unit.

    Args:
        step: the grid.
        members: the weights.
        count: how many channels there are.
        units: how many parts of the channels, one after the other, have an exponent of their own.
    """
    is_used = np.zeros(count, bool)
    for member in members:
        is_used[member.channels] = True
    magnitudes = ((m.channels, np.asarray(input_means(m.sums).magnitude, np.float64).reshape(-1)) for m in members)
    inputs, weights = _channel_means(magnitudes, count), None
    if step.duo:
        weights = _channel_means((_channel_magnitudes(m, layer) for m in members for layer in m.layers), count)
    ratios = [i / step.points for i in range(step.points)]
    candidates = np.stack([np.ones(count), *(_candidate_factors(inputs, weights, is_used, r, units) for r in ratios)])
    losses = np.zeros((len(candidates), units))
    for member in members:
        shape = (len(candidates), -1, *member.layout.matrix_shape[:2])
        factors = np.stack([member.by_turn(s) for s in candidates]).reshape(shape)
        for layer in member.layers:
            turn = member.turn(layer)
            sums = jax.tree.map(lambda v, turn=turn, m=member: v.reshape(-1, *v.shape[m.turns :])[turn], member.sums)
            moments = input_means(sums)
            weight = jnp.asarray(member.weight)[layer]
            with enable_x64_for(weight.dtype):
                member_losses = _factor_losses(
                    weight, moments.gram, moments.rows, jnp.asarray(factors[:, turn], moments.gram.dtype),
                    placement=member.placement, layout=member.layout,
                )  # fmt: skip
            losses[:, turn if units > 1 else 0] += np.asarray(member_losses, np.float64)
    best = np.where(np.isfinite(losses), losses, np.inf).argmin(0)
    factors = np.concatenate([candidates[b].reshape(units, -1)[unit] for unit, b in enumerate(best)])
    return factors, [f"r={ratios[b - 1]:g}" if b else "no factors were better" for b in best]


def _candidate_factors(
    inputs: np.ndarray, weights: np.ndarray | None, is_used: np.ndarray, ratio: float, units: int
) -> np.ndarray:
    """The factors of one exponent; the factors of a unit have 1 in the middle of their range."""
    factors = inputs**ratio if weights is None else inputs**ratio / (weights ** (1 - ratio) + 1e-4)
    factors = np.where(np.isfinite(factors), factors, 1.0).clip(1e-4)
    unit_factors = np.where(is_used, factors, np.nan).reshape(units, -1)
    middle = np.sqrt(np.nanmax(unit_factors, 1, keepdims=True) * np.nanmin(unit_factors, 1, keepdims=True))
    return np.where(is_used, (unit_factors / middle).reshape(-1), 1.0).clip(_LEAST_FACTOR, _MOST_FACTOR)


def _channel_means(channel_values: Any, channel_count: int) -> np.ndarray:
    """The mean of the numbers of each channel."""
    totals, counts = np.zeros(channel_count), np.zeros(channel_count)
    for channels, values in channel_values:
        np.add.at(totals, channels, values)
        np.add.at(counts, channels, 1)
    return totals / np.maximum(counts, 1)


def _channel_magnitudes(member: ChannelWeight, layer: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The channels of a matrix, and the mean of abs(w) over the largest of its group."""
    weight = jnp.asarray(member.weight)[layer]
    with enable_x64_for(weight.dtype):
        magnitudes = _mean_in_scale_units(weight, placement=member.placement, layout=member.layout)
    channels = member.channels.reshape(-1, *member.layout.matrix_shape[:2])[member.turn(layer)]
    return channels.reshape(-1), np.asarray(magnitudes, np.float64).reshape(-1)


@partial(always_jit, static_argnames=("placement", "layout"))
def _mean_in_scale_units(weight: Array, *, placement: WeightLayout, layout: MatrixLayout) -> Array:
    """The mean over the outputs of abs(w) in units of its group's scale, the largest being 1."""
    q = qarray_of(placement.pack(weight, None))
    magnitudes = jnp.abs(weight).reshape(q.shape)
    for scale in element_scales(q).scale:
        magnitudes = magnitudes / scale.astype(magnitudes.dtype)
    magnitudes = jnp.where(jnp.isfinite(magnitudes), magnitudes, 0)
    return layout.lay(magnitudes / jnp.maximum(magnitudes.max(), jnp.finfo(magnitudes.dtype).tiny)).mean(2)


@partial(always_jit, static_argnames=("placement", "layout"))
def _factor_losses(
    weight: Array, gram: Array, rows: Array, factors: Array, *, placement: WeightLayout, layout: MatrixLayout
) -> Array:
    """For each s, the squared error of the outputs of a weight that is multiplied by s, rounded, and divided by s."""
    matrices = layout.lay(weight).astype(gram.dtype)

    def loss(s: Array) -> Array:
        scaled_weight = layout.back(matrices * s[:, :, None]).astype(weight.dtype)
        rounded_w = layout.lay(unpack_param(placement.pack(scaled_weight, None))).astype(gram.dtype) / s[:, :, None]
        error = matrices - rounded_w
        outputs = jnp.einsum("bkl,bln->bkn", gram, error, precision=lax.Precision.HIGHEST)
        return ((error * outputs).sum((1, 2)) * rows).sum()

    return lax.map(loss, factors)


@dataclass
class MappingRecord:
    """The record of mappings.

    Args:
        methods: the names of the steps that were taken for a weight, by its index.
        notes: of a weight, or of a layer of a stack of them: its index, and the turn or ``()``.
        before: signal-to-noise ratio of the product of a weight before it was changed, each element rounded to nearest.
            It is the mean squares of the outputs and of their errors.
        passes: how often the data were run.
        online: factors of the inputs of weights that no parameter has taken, by the index of the weight, as
            `StoredAs.input_factors`.
    """

    methods: dict[int, list[str]] = field(default_factory=dict)
    notes: dict[tuple[int, tuple[int, ...]], list[str]] = field(default_factory=dict)
    before: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = field(default_factory=dict)
    passes: int = 0
    online: dict[int, Array] = field(default_factory=dict)

    def note(self, leaf: int, turn: tuple[int, ...]) -> str:
        """The notes on a weight, or on a layer of a stack."""
        prefixes = [turn[:i] for i in range(len(turn) + 1)]
        return "; ".join(text for prefix in prefixes for text in self.notes.get((leaf, prefix), ()))

    def add(self, leaf: int, text: str, turn: tuple[int, ...] = ()) -> None:
        """Add a note on a weight, or on a layer of a stack."""
        self.notes.setdefault((leaf, turn), []).append(text)


def map_parameters(data: BatchData, steps: Sequence[MappingStep], memory: int | None = None) -> MappingRecord:
    """Map the parameters of `data`, one step after the other.

    Each runs the data once, or, if there is a bound of `memory` in bytes, as often as that takes.

    Raises:
        ValueError: as a run of the data; for a parameter that overflows its dtype; for less memory than the weights
            need that share an input.
    """
    record = MappingRecord()
    for step in steps:
        sums, trace = (None, data.last()) if memory is not None else data.sums()
        program, _, sites = trace
        weight_sites = rounded_sites(program, sites)
        for leaf in [leaf for leaf in weight_sites if program.rounded_params[leaf].layout.rotation is not None]:
            del weight_sites[leaf]
            record.add(leaf, f"not by {step.name}: its inputs are rotated when the function runs")
        for leaf in record.online.keys() & weight_sites.keys():
            del weight_sites[leaf]
            record.add(leaf, f"not by {step.name}: its inputs have factors when the function runs")
        for leaf, site in weight_sites.items():
            if site.groups > 1:
                record.add(leaf, f"not by {step.name}: a convolution of feature_group_count={site.groups}")
        job = _MappingJob(step, record, data, LazySums(data, weight_sites, trace, memory or 0, sums))
        job.run()
        data.params = job.result(data.params)
        record.passes += job.lazy_sums.passes
    return record


class _MappingJob:
    """The work of one mapping step: its graphs, its statistics, and the parameters that it changes.

    Args:
        step: the step.
        record: the record for the report.
        data: its other programs are of batches of other shapes.
        lazy_sums: the statistics of the inputs, with the program and the sites of the weights that are rounded.
    """

    def __init__(self, step: MappingStep, record: MappingRecord, data: BatchData, lazy_sums: LazySums) -> None:
        self.step, self.record, self.lazy_sums, self.weight_sites = step, record, lazy_sums, lazy_sums.sites
        self.program, self.call, sites = lazy_sums.trace
        self.graph = graph_of(self.program, sites)
        self.other_graphs = [graph_of(*entry) for entry in data.programs if entry[0] is not self.program]
        self.new_values: dict[int, Any] = {}

    def run(self) -> None:
        """Map every weight that is rounded, together with the weights that share its input."""
        previous: set[int] = set()
        for place in self.graph.places:
            leaf = place.site.leaf
            if leaf in previous or leaf not in self.weight_sites:
                continue
            previous.add(leaf)
            try:
                fold = self._fold(place)
            except FoldError as error:
                what, advice = (
                    ("rotation", "") if isinstance(self.step, Rotate) else ("factors", "; online=True keeps them")
                )
                reason = self._multiply_online(place) if self.step.online else f"{error}{advice}"
                if reason:
                    self.record.add(leaf, f"no {what} by {self.step.name}: {reason}")
                continue
            members = self._members(fold)
            previous |= set(members)
            self._map_products(place, fold, members)

    def result(self, params: Any) -> Any:
        """The parameters with the changed ones."""
        leaves, tree = jax.tree.flatten(params, is_leaf=is_packed_param)
        for leaf, value in self.new_values.items():
            leaves[self.call.places[leaf]] = value
        return jax.tree.unflatten(tree, leaves)

    def _fold(self, place: ProductPlace) -> Fold:
        """The fold of a product's weight; for a rotation, gains in its way are first moved into the next weight."""
        if not isinstance(self.step, Rotate):
            return self._fold_in_all_batches(place, fold_of)
        earlier_values = dict(self.new_values)
        while True:
            try:
                return self._fold_in_all_batches(place, lambda product_place: rotation_of(product_place, self._value))
            except GainError as reason:
                try:
                    self._move_gain(min(reason.leaves))
                except FoldError as gain_reason:
                    self.new_values = earlier_values
                    raise FoldError(f"{reason}, {gain_reason}") from None
            except FoldError:
                self.new_values = earlier_values
                raise

    def _fold_in_all_batches(self, place: ProductPlace, search: Callable[[ProductPlace], Fold]) -> Fold:
        """The fold that `search` finds, which must be the same in the programs of all batches."""
        fold = search(place)
        labels = _labels_by_leaf(fold)
        for graph in self.other_graphs:
            hit = next((other for other in graph.places if other.site.leaf == place.site.leaf), None)
            same = _labels_by_leaf(search(hit)) == labels if hit else not any(graph.parameters[i].nodes for i in labels)
            if not same:
                raise FoldError("other batches have a program in which the factors would go elsewhere")
        return fold

    def _move_gain(self, leaf: int) -> None:
        """Make the scale of a norm 1 by factors that go into the weights after it.

        Raises:
            FoldError: if they cannot.
        """
        path, gain = self.program.paths[leaf], np.asarray(self._value(leaf), np.float64)
        for place in self.graph.places:
            try:
                fold = self._fold_in_all_batches(place, fold_of)
            except FoldError:
                continue
            targets = _labels_by_leaf(fold)
            if leaf not in targets or targets[leaf].power != -1:
                continue
            if not (gain > 0).all():
                raise FoldError(f"and {path} is not positive")
            factors, indexes = np.ones(fold.channels.count), np.broadcast_to(targets[leaf].indexes(), gain.shape)
            factors[indexes] = gain
            if (factors[indexes] != gain).any():
                raise FoldError(f"and not all of {path} goes into the weights after it")
            for target, label in targets.items():
                self._change(target, partial(multiply_by_factors, label=label, factors=factors))
            self.new_values[leaf] = np.ones_like(self._value(leaf))
            return
        raise FoldError(f"and {path} does not go into the weights after it")

    def _members(self, fold: Fold) -> dict[int, ProductPlace]:
        """The weights, by their index, whose inputs have the channels: those that take the factors themselves."""
        places: dict[int, ProductPlace] = {}
        for place in self.graph.places:
            weight, inputs = (fold.labels.get(place.node.ins[side]) for side in (place.side, 1 - place.side))
            fits = weight is not None and inputs is not None and weight.power == 1
            if fits and place.site.leaf in self.weight_sites and self.graph.parameters[place.site.leaf] in fold.labels:
                places.setdefault(place.site.leaf, place)
        return places

    def _map_products(self, place: ProductPlace, fold: Fold, places: dict[int, ProductPlace]) -> None:
        """Maps the parameters of a fold: statistics, factors or a rotation, the report, then the new values."""
        error_leaves = [leaf for leaf in _labels_by_leaf(fold) if self._needs_errors(leaf)]
        if self.lazy_sums.fits({*places, *error_leaves}):
            self.lazy_sums.sums_of([*dict.fromkeys([*places, *error_leaves])], self.step)
        text, choices, count = self.step.name, list[str](), fold.channels.count
        if isinstance(self.step, Rotate):
            hadamard = HadamardBlocks.of(fold.channels.free, self.step.seed)
            text, transform = f"{text} by {hadamard}", partial(rotate_channels, hadamard=hadamard)
        else:
            sums = self.lazy_sums.sums_of([*places], self.step)
            members = [self._member(fold, product_place, sums[leaf]) for leaf, product_place in places.items()]
            factors, choices = self._factors(members, count, lambda: self._units(place, members, count))
            transform = partial(multiply_by_factors, factors=factors)
        self._report(fold, places, text, choices)
        for leaf, label in _labels_by_leaf(fold).items():
            self._change(leaf, partial(transform, label=label))

    def _factors(
        self, members: Sequence[ChannelWeight], count: int, units: Callable[[], int]
    ) -> tuple[np.ndarray, list[str]]:
        """The factor of each channel, and the choice in each unit."""
        if isinstance(self.step, Smooth):
            return smooth_factors(self.step, members, count), []
        assert isinstance(self.step, Awq)
        return awq_factors(self.step, members, count, units())

    def _multiply_online(self, place: ProductPlace) -> str:
        """Choose factors of the inputs of a weight alone, by which they are multiplied when the function runs.

        Returns:
            Why its products cannot do that; empty if they can.
        """
        site, leaf, stack = place.site, place.site.leaf, self.program.shapes[place.site.leaf][: place.site.stack]
        fit, name = self.program.adaptable.get(leaf), self.step.name
        batch, size, kept = site.layout.matrix_shape
        matrices: Any = np.broadcast_to(np.arange(size)[None, :, None], (batch, size, kept))
        channels: Any = site.layout.back(
            matrices
        )  # the channels of each element of the weight, then without the axes of outputs
        for axis in range(channels.ndim):
            if (channels == (first := channels.take([0], axis))).all():
                channels = first
        if isinstance(fit, str):
            return fit
        if channels.size != size:
            return "it has an axis that its product sums over in part"
        if sum(place.turns) != site.stack:
            return "its product takes one of several layers by an index"
        turns, sums = math.prod(stack), self.lazy_sums.sums_of([leaf], self.step)[leaf]
        placement = placement_to_nearest(self.program.rounded_params[leaf].layout)
        numbers = np.arange(turns * size)
        member = ChannelWeight(self._value(leaf), site.stack, site.stack, placement, site.layout, sums, numbers)
        factors, choices = self._factors([member], turns * size, lambda: turns)
        self._record_errors(leaf)
        inverse = (1 / factors).reshape(*stack, size)[..., channels]
        with enable_x64_for(member.weight.dtype):
            self.record.online[leaf] = jnp.asarray(inverse, jnp.promote_types(member.weight.dtype, jnp.float32))
        self.record.methods.setdefault(leaf, []).append(name)
        self.record.add(leaf, f"{name} when the function runs: its inputs are multiplied by {size} factors")
        for turn, choice in zip(np.ndindex(*stack if len(choices) > 1 else ()), choices, strict=False):
            self.record.add(leaf, choice, turn)
        return ""

    def _report(self, fold: Fold, places: dict[int, ProductPlace], text: str, choices: Sequence[str]) -> None:
        """Report for each weight the step, the parameters it was folded into, and the choice for each turn or all."""
        parameters = self.graph.parameters
        leaves = (i for i in _labels_by_leaf(fold) if i not in places or _reaches_data(parameters[i], fold))
        targets = sorted(self.program.paths[leaf] for leaf in leaves)
        for leaf in places:
            self.record.methods.setdefault(leaf, []).append(self.step.name)
            if targets:
                self.record.add(leaf, f"{text} folded into {', '.join(targets)}")
            turn_count = self.weight_sites[leaf].turns if len(choices) > 1 else 0
            for turn, choice in zip(np.ndindex(*self.program.shapes[leaf][:turn_count]), choices, strict=False):
                self.record.add(leaf, choice, turn)

    def _value(self, leaf: int) -> Any:
        """The value of a parameter, as earlier folds have changed it."""
        return self.new_values.get(leaf, self.call.values[leaf])

    def _member(self, fold: Fold, place: ProductPlace, sums: InputSums) -> ChannelWeight:
        """A weight of a fold, with its statistics and the channel of each of its inputs."""
        site, node = place.site, place.node
        label = fold.labels[node.ins[place.side]]
        _, shape, axes = channels_of(place)
        channel_indexes = FactorLabel(label.power, tuple(label.axes[axis] for axis, _ in axes)).indexes()
        channels = np.broadcast_to(channel_indexes, [shape[axis] for axis, _ in axes]).reshape(-1)
        placement = placement_to_nearest(self.program.rounded_params[site.leaf].layout)
        turns = sum(place.turns)
        if turns < site.turns:  # constant indexes: all layers have the same factors
            layers = np.ndindex(*self.program.shapes[site.leaf][: site.turns])
            sums = reduce(add_sums, [jax.tree.map(lambda v, i=i: v[i], sums) for i in layers])
        return ChannelWeight(self._value(site.leaf), site.stack, turns, placement, site.layout, sums, channels)

    def _units(self, place: ProductPlace, members: Sequence[ChannelWeight], count: int) -> int:
        """How many parts of the channels belong to turns of loops, each with the matrices of its own turn."""
        _, shape, axes = channels_of(place)
        loop_count = len(place.node.ins[place.side].loops)
        turns = int(np.prod([shape[axis] for axis, _ in axes if axis < loop_count], dtype=np.int64))
        for member in members:
            if int(np.prod(member.weight.shape[: member.turns], dtype=np.int64)) != turns:
                return 1
            unit_indexes = member.channels.reshape(turns, -1) // (count // turns)
            if not (unit_indexes == np.arange(turns)[:, None]).all():
                return 1
        return turns

    def _needs_errors(self, leaf: int) -> bool:
        """Whether the errors of a weight before any step are needed, and not known."""
        return leaf in self.weight_sites and not any(recorded_leaf == leaf for recorded_leaf, _ in self.record.before)

    def _record_errors(self, leaf: int) -> None:
        """The errors of a weight that is rounded as it was before any step."""
        if not self._needs_errors(leaf):
            return
        site, sums = self.weight_sites[leaf], self.lazy_sums.sums_of([leaf], self.step)[leaf]
        placement = placement_to_nearest(self.program.rounded_params[leaf].layout)
        weights = jnp.asarray(self._value(leaf))
        for layer in np.ndindex(*weights.shape[: site.stack]):
            inputs = input_means(jax.tree.map(lambda v, turn=layer[: site.turns]: v[turn], sums))
            weight = weights[layer]
            with enable_x64_for(weight.dtype):
                outcome = round_parameter(
                    weight, inputs.gram, None, None, placement=placement, layout=site.layout, steps=CalibrationSteps()
                )
            energy, before = (float((v * inputs.rows).sum()) for v in (outcome.energy, outcome.before))
            self.record.before[leaf, layer] = energy, before

    def _change(self, leaf: int, transform: Callable[[Any], Any]) -> None:
        """Change a parameter.

        Raises:
            ValueError: if it overflows.
        """
        self._record_errors(leaf)
        before = self._value(leaf)
        after = transform(before)
        if bool((jnp.isfinite(jnp.asarray(before)) & ~jnp.isfinite(jnp.asarray(after))).any()):
            what = f"params: {self.program.paths[leaf]!r} of dtype {before.dtype}"
            raise ValueError(f"{what} overflows under the factors of {self.step}")
        self.new_values[leaf] = after


@dataclass(frozen=True, eq=False)
class InputFactors:
    """The factors by which the inputs of a weight without a stack are multiplied when the function runs.

    It has the methods of `provenance.WeightRotation`.

    Args:
        factors: as `StoredAs.input_factors`.
        layout: the weight as matrices, of which there is one.
    """

    factors: Array
    layout: MatrixLayout

    def parameter(self, x: Array) -> Array:
        """The weight divided by them."""
        return multiply_in_own_dtype(x, 1 / self.factors)

    def inputs(self, x: Array) -> Array:
        """Inputs, whose last axis is the sum, multiplied by them."""
        return x * self.layout.lay(jnp.broadcast_to(self.factors, self.layout.shape))[:, :, 0].astype(x.dtype)

    def gram(self, x: Array) -> Array:
        """Means of x y^T of multiplied inputs, (1, summed, summed), from the means of the inputs."""
        return self.inputs(self.inputs(x).swapaxes(1, 2)).swapaxes(1, 2)


def multiply_by_factors(parameter: Any, label: FactorLabel, factors: np.ndarray) -> Any:
    """A parameter times its factors, in float32 or its own wider type, rounded once to its own."""
    scale = factors[label.indexes()] ** float(label.power)
    with enable_x64_for(parameter.dtype):
        dtype = jnp.promote_types(parameter.dtype, jnp.float32)
        product = (jnp.asarray(parameter).astype(dtype) * jnp.asarray(scale, dtype)).astype(parameter.dtype)
    return np.asarray(product) if isinstance(parameter, np.ndarray) else product


def rotate_channels(parameter: Any, label: FactorLabel, hadamard: HadamardBlocks) -> Any:
    """A parameter times a matrix along the channels that are not tied, in float64, rounded once to its own type."""
    axes = [axis or ((1, 0),) for axis in label.axes]
    runs = [(size, 0 if has_one_factor(axis) else stride) for axis in axes for size, stride in axis]
    channel_axes = sorted((i for i, (_, stride) in enumerate(runs) if stride), key=lambda i: -runs[i][1])
    order = [*(i for i in range(len(runs)) if i not in channel_axes), *channel_axes]
    split = np.asarray(parameter, np.float64).reshape([size for size, _ in runs]).transpose(order)
    product = hadamard.apply(split.reshape(-1, hadamard.size)).reshape(split.shape).transpose(np.argsort(order))
    rotated_parameter = product.reshape(parameter.shape).astype(parameter.dtype)
    if isinstance(parameter, np.ndarray):
        return rotated_parameter
    with enable_x64_for(parameter.dtype):
        return jnp.asarray(rotated_parameter)


def _labels_by_leaf(fold: Fold) -> dict[int, FactorLabel]:
    return {v.leaf: label for v, label in fold.labels.items() if v.leaf is not None}


def _reaches_data(parameter: GraphValue, fold: Fold) -> bool:
    """Whether the factors of a parameter reach a value that depends on data, such as rows that are looked up."""
    readers = [node for node in parameter.nodes if parameter in node.ins]
    results = [value for node in readers for value in node.outs if value in fold.labels]
    return any(not value.is_parameter or _reaches_data(value, fold) for value in results)
