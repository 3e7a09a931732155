"""`pack_with_data`: packs the parameters of a function, rounded by statistics of the inputs of its products."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check_instance
from jchop._common.text import decibels
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.program.call import is_packed_param, unpack_param
from jchop._quantized.program.param_uses import ParamUse
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop._round.arguments import check_key, has_tracer
from jchop._storage._quantize import check_float_zero_points
from jchop.ptq._biases import BiasSite, bias_means, find_biases, mean_errors
from jchop.ptq._data import passes
from jchop.ptq._data.collect import InputMeans, InputSums, input_means, means_in_place, pair_value
from jchop.ptq._data.sites import Stage, WeightSites, rounded_sites
from jchop.ptq._equalize.mapping import InputFactors, MappingRecord, map_parameters
from jchop.ptq._records import Journal, PtqReport, StageRecord, WeightRow, run_facts
from jchop.ptq._steps.round import RoundingOutcome, param_neighbours, pruning_of, qarray_of, round_parameter
from jchop.ptq._steps.steps import CalibrationSteps, HalfQuadratic, SignDescent, Sweep, as_steps, clip, gptq


def pack_with_data(
    low: QuantizedFunction,
    params: Any,
    batches: Iterable[Any],
    steps: Any = None,
    key: Array | None = None,
    progress: Callable[[int], object] | None = None,
    resume: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    tell: Callable[[WeightRow, int, int], object] | None = None,
    donate: bool = False,
) -> tuple[Any, PtqReport]:
    """`QuantizedFunction.pack` with batches: the packed parameters, and a report.

    `tell` is called with the row of each weight, and the numbers of stages that are done and that there are.
    """
    if has_tracer(jnp.zeros(())):  # also where params and batches are arrays
        raise ValueError("rounding with data cannot be part of a traced function, as under jax.jit or nnx.eval_shape")
    plan = as_steps([clip(), gptq()] if steps is None else steps)
    if stateful_rule := next((rule for rule in low.rules if rule.scale_from is not None), None):
        raise NotImplementedError(f"{stateful_rule} keeps scales: round with data under rules without scale_from")
    in_order = plan.in_order is not None or plan.correction is not None
    check_instance("resume", resume, str | os.PathLike | None, "the path of a folder, or None")
    if in_order and any(step.online for step in plan.mappings):
        raise ValueError("steps: online=True cannot stand beside sequential() or correct_error(); leave one out")
    memory_limit, of_results = passes.memory_bytes(memory), _descends_results(plan)
    if of_results and (in_order or memory_limit is not None or any(step.online for step in plan.mappings)):
        raise ValueError(f"{plan.sweep} cannot stand beside sequential(), correct_error(), online=True or memory=; "
                         "leave them out")  # fmt: skip
    passes.check_batches(
        batches, repeated=in_order or bool(plan.mappings or resume or memory_limit is not None or of_results)
    )
    if key is not None:
        check_key("key", key)
    journal = None
    if resume is not None:
        journal = Journal(resume, *run_facts(low, params, batches, plan, key, memory_limit))
    data = passes.BatchData(low, params, batches, key, progress, adds_in_place=donate)
    mapping_record = map_parameters(data, plan.mappings, memory_limit)
    job = _CalibrationJob(
        data, plan, key, mapping_record, journal, tell, memory_limit, in_order, params if donate else None
    )
    if in_order or memory_limit is not None:
        job.round_in_several_passes()
    else:
        job.round_in_one_pass()
    return job.result()


class _CalibrationJob:
    """The state of a calibration: packed parameters, their current values, and rows of the report."""

    def __init__(
        self, data: passes.BatchData, steps: CalibrationSteps, key: Array | None, mapping_record: MappingRecord,
        journal: Journal | None, tell: Callable[[WeightRow, int, int], object] | None, memory: int | None,
        in_order: bool, donated: Any,
    ) -> None:  # fmt: skip
        self.in_order, self.donated = in_order, jax.tree.leaves(donated, is_leaf=is_packed_param)
        self.reads: Mapping[int, frozenset[int]] = {}  # the parameters that the sums of a weight's inputs depend on
        self.low, self.params, self.data, self.steps, self.key = data.low, data.params, data, steps, key
        self.mapping_record, self.journal, self.tell, self.memory = mapping_record, journal, tell, memory
        self.rows: list[WeightRow] = []
        self.above: Mapping[int, Array] = {}  # which numbers take the neighbour above, if that is chosen before
        self.passes = mapping_record.passes

    def round_in_one_pass(self) -> None:
        """All weights by the inputs of the model in full precision."""
        sums = None if self.journal is None else self.journal.load_sums()
        if self.journal is not None and sums is not None:
            trace = self.data.program(self.journal.last_batch)
        else:
            sums, trace = self.data.sums()
            if self.journal is not None:
                self.journal.save_sums(sums)
        self._start(trace)
        parts = [passes.StagePart(tuple(self.stages), (), None)]
        if _descends_results(self.steps):
            self._choose_by_results(parts, sums)
        self._round_stages(parts, lambda _: sums)

    def _choose_by_results(self, parts: Sequence[passes.StagePart], sums: Any) -> None:
        """Choose the neighbours of all numbers by the results of the function, under the scales of each weight."""
        steps, journal, tell, donated = self.steps, self.journal, self.tell, self.donated
        assert isinstance(steps.sweep, SignDescent)
        self.steps, self.journal, self.tell, self.donated = replace(steps, sweep=None, biases=None), None, None, []
        self._round_stages(parts, lambda _: sums)
        self.steps, self.journal, self.tell, self.donated = steps, journal, tell, donated
        self.rows, self.passes = [], self.passes - len(parts)
        packed = {i: self.low_leaves.get(i, self.leaves[self.call.places[i]]) for i in self.program.rounded_params}
        targets: dict[int, tuple[Array, Array, Array]] = {}
        for leaf in self.weight_sites.keys() - self.sites.others.keys():
            weight = self.program.rounded_params[leaf].layout.rotate(jnp.asarray(self.call.values[leaf]))
            stack = self.weight_sites[leaf].stack
            targets[leaf] = weight, *param_neighbours(packed[leaf], weight, stack)
        fixed = {leaf: unpack_param(value) for leaf, value in packed.items() if leaf not in targets}
        self.above, count = self.data.descend(steps.sweep, targets, fixed)
        self.passes += count

    def round_in_several_passes(self) -> None:
        """The same with the statistics of some weights at a time; or in order, by the model as it is rounded so far."""
        self._start(self.data.first())
        in_order = self.in_order
        two_trajectories = in_order and (self.steps.correction is not None or self.steps.biases is not None)
        values, path_of = self.call.values, self.program.paths.__getitem__
        sizes = {i: passes.sum_bytes(site, values[i], two_trajectories) for i, site in self.weight_sites.items()}
        full_precision: dict[int, Array] = {}
        trajectories = [full_precision]
        if in_order:
            trajectories = [*([full_precision] if two_trajectories else []), self.values]
            windowed = self.memory is not None
            if self.memory is not None:
                passes.check_memory(self.stages, sizes, self.memory, path_of)
            windows = [(stage.turn[0], 1) if windowed and stage.turn else None for stage in self.stages]
            parts = [passes.StagePart((s,), s.leaves, window) for s, window in zip(self.stages, windows, strict=True)]
        else:
            assert self.memory is not None
            parts = passes.split_stages(self.stages, sizes, self.memory, path_of)
        if self.donated:  # errors of the data come before any array is deleted
            self.reads = self.data.check(trajectories, in_order, tuple(self.weight_sites))
            self.passes += 1
        self._round_stages(parts, lambda part: self.data.sums(trajectories, in_order, part.leaves, part.window)[0])

    def _round_stages(
        self, parts: Sequence[passes.StagePart], sums_of: Callable[[passes.StagePart], Mapping[int, InputSums]]
    ) -> None:
        """Round the weights stage after stage; those that a killed run finished are taken from its folder."""
        self.passes += len(parts)
        stages = list(enumerate((part, stage) for part in parts for stage in part.stages))
        if self.donated and not self.in_order and self.steps.biases is None:
            stages.reverse()  # no pass reads the weights after those that it is for
        rows: dict[int, list[WeightRow]] = {}
        sums: Mapping[int, InputSums] = {}
        summed = None
        for count, (stage_index, (part, stage)) in enumerate(stages, 1):
            later = [entry for _, entry in stages[count:]]
            waiting = {leaf for _, other in later for leaf in other.leaves}
            record = None if self.journal is None else self.journal.load_stage(stage_index)
            earlier_rows = len(self.rows)
            if record is not None:
                self._restore_stage(record)
            else:
                if summed is not part:
                    sums = {}  # the memory is free before the next pass
                    summed, sums = part, sums_of(part)
                stage_sums = _sums_of_stage(sums, stage, part.window)
                if self.donated:
                    sums = {leaf: value for leaf, value in sums.items() if leaf in waiting}
                self.stage_record = StageRecord([], [], {})
                for leaf in stage.leaves:
                    self._round(leaf, stage.turn, stage_sums.pop(leaf, None))
                if self.journal is not None:
                    self.journal.save_stage(stage_index, self.stage_record._replace(rows=self.rows[earlier_rows:]))
            rows[stage_index] = self.rows[earlier_rows:]
            if self.tell is not None:
                for row in rows[stage_index]:
                    self.tell(row, count, len(stages))
            if self.donated:
                unsummed = {i for other, _ in later if other is not summed for i in other.leaves}
                biases = (site.leaf for site in self.bias_sites.values())
                reads = (self.reads.get(i, ()) for i in unsummed)
                self._delete(waiting.union(biases, self.nearest and self.program.rounded_params, *reads))
        self.rows = [row for _, own in sorted(rows.items()) for row in own]

    def _delete(self, kept: Set[int]) -> None:
        """Delete the donated arrays of all parameters that have codes but those `kept`."""
        values, params, donated = self.call.values, self.program.rounded_params, self.donated
        free = params.keys() - kept
        self.data.packed |= {i: self.low_leaves.get(i, self.leaves[self.call.places[i]]) for i in free}
        held = {id(value) for i, value in enumerate(values) if i not in free}
        held |= {id(value) for i, value in enumerate(donated) if i not in params}
        mapped = (donated[i] for i in params if donated[i] is not values[i])
        for array in (*(values[i] for i in free), *mapped):
            if isinstance(array, Array) and id(array) not in held:
                array.delete()

    def _restore_stage(self, record: StageRecord) -> None:
        """Store the rows, weights and biases of a stage that was read from the folder of a run."""
        self.rows += record.rows
        for leaf, turn, arrays in record.weights:
            packed_weight = self.low_leaves[leaf]
            self._store_weight(leaf, turn, jax.tree.unflatten(jax.tree.structure(packed_weight), arrays))
        for leaf, bias in record.biases.items():
            self._store_bias(leaf, bias)

    def _store_weight(self, leaf: int, turn: tuple[int, ...], packed_weight: Any) -> None:
        """Store a rounded weight, or a layer of a stack of them, and its values if later steps read them."""
        new = [(self.low_leaves, packed_weight)]
        if leaf in self.values:
            as_codes = self.donated and not turn and leaf not in self.nearest
            new.append((self.values, packed_weight if as_codes else unpack_param(packed_weight)))
        for own, value in new:
            own[leaf] = jax.tree.map(lambda a, b: a.at[turn].set(b), own[leaf], value) if turn else value

    def _store_bias(self, leaf: int, bias: Array) -> None:
        """Store a corrected bias, and its values as its rule rounds them."""
        self.biases[leaf] = bias
        low_bias = self._pack_bias(leaf, bias)
        self.values[leaf] = unpack_param(low_bias) if is_packed_param(low_bias) else low_bias

    def result(self) -> tuple[Any, PtqReport]:
        """The packed parameters and the report."""
        leaves = list(self.leaves)
        for leaf in self.weight_sites:
            packed_weight, factors = self.low_leaves[leaf], self.mapping_record.online.get(leaf)
            if factors is not None:
                core = packed_weight.shape[self.weight_sites[leaf].stack :]
                stored, ndim = qarray_of(packed_weight), len(self.program.rounded_params[leaf].layout.shape)
                packed_weight = StoredAs(stored, core, ndim, factors)
            leaves[self.call.places[leaf]] = packed_weight
        for leaf, bias in self.biases.items():
            leaves[self.call.places[leaf]] = self._pack_bias(leaf, bias)
        self._add_other_rows()
        if self.donated:
            self._delete(frozenset())
        return jax.tree.unflatten(self.tree, leaves), PtqReport(tuple(self.rows), self.passes)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _start(self, trace: tuple[Any, Any, WeightSites]) -> None:
        """Pack all parameters; those to be calibrated have values in full precision until they are rounded."""
        self.program, self.call, self.sites = trace
        params = self.program.rounded_params
        self.weight_sites = weight_sites = rounded_sites(self.program, self.sites)
        for i in weight_sites:
            _check_step_formats(self.steps, self.program.paths[i], self.program.shapes[i], *params[i])
        self.stages, shapes = list(self.sites.stages(list(weight_sites))), list(self.call.leaves)
        staged = {i for stage in self.stages for i in stage.leaves if i not in self.sites.others}
        for i in staged:  # codes of its own come with its stage
            value = self.call.values[i]
            if not weight_sites[i].stack and isinstance(value, Array):
                check_finite(value, f"params: {self.program.paths[i]!r}")
                shapes[self.call.places[i]] = jax.ShapeDtypeStruct(value.shape, value.dtype)
        (shape_params, *args), _ = jax.tree.unflatten(self.call.tree, shapes)
        packed_params = self.low.pack(shape_params, *args, key=self.key)
        self.leaves, self.tree = jax.tree.flatten(packed_params, is_leaf=is_packed_param)
        packed_leaves = {i: self.leaves[self.call.places[i]] for i in params}
        self.low_leaves: dict[int, Any] = {i: packed_leaves[i] for i in weight_sites}
        for i in weight_sites:
            self.leaves[self.call.places[i]] = None  # `low_leaves` has it
        weights = (i for i in weight_sites if i in self.sites.others)
        self.nearest = {i: unpack_param(packed_leaves[i]) for i in weights if params[i].layout.rotation is None}
        others = (i for i in packed_leaves if self.in_order and i not in weight_sites)
        self.values = {i: packed_leaves[i] if self.donated else unpack_param(packed_leaves[i]) for i in others}
        kept = weight_sites if self.in_order else self.nearest  # a pass in full precision reads none of the values
        self.values |= {i: params[i].layout.rotate(jnp.asarray(self.call.values[i])) for i in kept}
        other_layers = self.sites.other_layers(self.program, self.stages)
        self.other_layers = [layer for layer in other_layers if layer[0] in weight_sites]
        for leaf, indexes, _ in (layer for layer in self.other_layers if layer[0] in self.values):
            self.values[leaf] = self.values[leaf].at[indexes].set(unpack_param(packed_leaves[leaf])[indexes])
        self.biases: dict[int, Array] = {}  # corrected ones, before they are rounded
        self.bias_sites, self.no_bias = dict[int, BiasSite](), dict[int, str]()
        if self.steps.biases is not None:
            self.bias_sites, self.no_bias = find_biases(self.program, self.sites)

    def _round(self, leaf: int, turn: tuple[int, ...], inputs: InputSums | None) -> None:
        """Round a weight, or a layer of a stack of them."""
        site, (placement, _) = self.weight_sites[leaf], self.program.rounded_params[leaf]
        if inputs is None:
            if not turn:
                placement = self.program.rounded_params[leaf].layout
                weight = placement.rotate(jnp.asarray(self.call.values[leaf]))
                self.low_leaves[leaf] = placement.pack(weight, self._rounding_key(placement, leaf))
            self.rows.append(self._row(leaf, note="no batch has its product"))
            return
        count = pair_value(inputs.count)
        notes = [] if site.turns == site.stack else ["one statistic for the whole stack"]
        if without_input := int((count == 0).sum()):
            some = without_input < count.size
            notes = [f"no input reached {without_input} of its {count.size} matrices" if some else _NO_INPUT]
        few_rows = int(((count > 0) & (count < site.layout.matrix_shape[1])).sum())
        dtype_info = jnp.finfo(inputs.largest.dtype)
        square_limit = float(np.sqrt(float(dtype_info.tiny) / float(dtype_info.eps)))
        if bool(((inputs.largest > 0).any(-1) & (inputs.largest < square_limit).all(-1)).any()):
            notes += [f"inputs below {square_limit:.2g}: their squares underflow, and count as zero or lose digits"]
        steps = self._steps_of(leaf)
        if steps != self.steps:
            uses = dict.fromkeys(map(_use_name, self.sites.others[leaf]))
            notes += [f"no step by the inputs of one use, since it has others: {', '.join(uses)}"]
        if few_rows and (isinstance(steps.sweep, Sweep) or steps.correction is not None):
            matrices_text = "" if few_rows == count.size else f" in {few_rows} of its {count.size} matrices"
            notes += [f"fewer rows than inputs{matrices_text}"]
        if self.donated:
            means = means_in_place(inputs.gram.hi, inputs._replace(gram=inputs.gram._replace(hi=None)))
        else:
            means = input_means(inputs)
        inputs = None  # the sums need as much memory again
        for indexes in np.ndindex(*self.call.values[leaf].shape[len(turn) : site.stack]):
            self._round_layer(leaf, (*turn, *indexes), means, notes, placement)

    def _steps_of(self, leaf: int) -> CalibrationSteps:
        """The steps of a weight: those by inputs of its product would make its other uses worse."""
        return self.steps.without_data if leaf in self.sites.others else self.steps

    def _round_layer(
        self, leaf: int, turn: tuple[int, ...], means: InputMeans, notes: Sequence[str], placement: WeightLayout
    ) -> None:
        """Rounds one layer of a weight by the statistics of its inputs, stores it, and adds a row to the report."""
        gram, cross, mean, shift, _, rows = means
        weight, path = jnp.asarray(self.call.values[leaf])[turn], self._path(leaf, turn)
        check_finite(weight, f"params: {path!r}")
        with enable_x64_for(weight.dtype):
            options: Any = {"layout": self.weight_sites[leaf].layout, "steps": self._steps_of(leaf)}
            factors = self.mapping_record.online.get(leaf)
            change = placement.rotation if factors is None else InputFactors(factors[turn], options["layout"])
            if change is not None:  # the statistics are of inputs that are not rotated or multiplied
                weight, gram, mean = change.parameter(weight), change.gram(gram), change.inputs(mean)
                cross = None if cross is None else change.gram(cross)
                shift = None if shift is None else change.inputs(shift)
            rounding_key = self._rounding_key(placement, leaf, *turn)
            above = self.above[leaf][turn] if leaf in self.above else None
            outcome = round_parameter(weight, gram, cross, rounding_key, placement=placement, above=above, **options)
        if bool(outcome.no_factor.any()):
            raise ValueError(
                f"params: the inputs of {path!r} have a Gram matrix that cannot be factorized even with damping="
                f"{float(outcome.damping.max()):g}; its numbers lie too far apart"
            )
        self._store_weight(leaf, turn, outcome.weight)
        self.stage_record.weights.append((leaf, turn, jax.tree.leaves(outcome.weight)))
        if self.steps.biases is not None:
            outcome, reason = self._correct_bias(leaf, turn, weight, outcome, mean, shift, rows)
            notes = [*notes, reason]
        row = self._row(leaf, turn, outcome, rows, _join_notes(*notes))
        if self.steps.pruning is None and round(row.after, 2) < round(row.before, 2):  # as the report shows them
            reason = "worse than nearest" if self.steps.correction is None else _WORSE_WITHOUT_CORRECTION
            row = replace(row, note=_join_notes(row.note, reason))
        self.rows.append(self._with_mapping(leaf, turn, row))

    def _with_mapping(self, leaf: int, turn: tuple[int, ...], row: WeightRow) -> WeightRow:
        """A row with the errors before the parameters were mapped, and with the steps of the mapping."""
        record = self.mapping_record
        energy, before = record.before.get((leaf, turn), (0.0, 0.0))
        methods = ", ".join([*record.methods.get(leaf, ()), *([] if row.method == "nearest" else [row.method])])
        before = _snr_of(energy, before) if energy else row.before
        note = _join_notes(row.note, record.note(leaf, turn))
        return replace(row, method=methods or row.method, before=before, note=note)

    def _correct_bias(
        self, leaf: int, turn: tuple[int, ...], weight: Array, outcome: RoundingOutcome, mean: Array,
        shift: Array | None, rows: Array,
    ) -> tuple[RoundingOutcome, str]:  # fmt: skip
        """Subtract the mean error of a product in its bias; the outcome with new errors, or why there is no bias."""
        site = self.bias_sites.get(leaf)
        if site is None:
            return outcome, f"correct_biases: {self.no_bias[leaf]}"
        layout = self.weight_sites[leaf].layout
        means = mean_errors(weight, outcome.numbers, mean, shift, layout=layout)
        rounding, total = (np.asarray(v, np.float64) for v in means)
        entries, counts = site.result_entries(layout), np.asarray(rows, np.float64)
        mean_error, mean_rounding = (bias_means(v, counts, entries, math.prod(site.shape)) for v in (total, rounding))
        bias = self.biases.get(site.leaf, jnp.asarray(self.call.values[site.leaf]))
        change = jnp.asarray(site.sign * mean_error.reshape(site.shape), bias.dtype)
        self._store_bias(site.leaf, bias.at[turn].add(change) if turn else bias + change)
        self.stage_record.biases[site.leaf] = self.biases[site.leaf]
        correction = mean_rounding[entries]
        reduction = (2 * rounding * correction - correction * correction).sum(1)
        return outcome._replace(after=jnp.maximum(outcome.after - jnp.asarray(reduction, outcome.after.dtype), 0)), ""

    def _pack_bias(self, leaf: int, bias: Array) -> Any:
        """A bias as its rule stores it."""
        rounded = self.program.rounded_params.get(leaf)
        return bias if rounded is None else rounded.layout.pack(bias, self._rounding_key(rounded.layout, leaf))

    def _rounding_key(self, placement: WeightLayout, *indexes: int) -> Array | None:
        """The key of a parameter, or of a layer of a stack; None if its rounding draws nothing."""
        if not placement.spec.rounding.stochastic:
            return None
        assert self.key is not None
        return reduce(jax.random.fold_in, indexes, self.key)

    def _row(
        self, leaf: int, turn: tuple[int, ...] = (), outcome: RoundingOutcome | None = None, rows: Array | None = None,
        note: str = "",
    ) -> WeightRow:  # fmt: skip
        """A row of the report: a weight, or a layer of a stack at `turn`, with the errors of its rounding."""
        shape = tuple(self.program.shapes[leaf][len(turn) :])
        row = WeightRow(self._path(leaf, turn), shape, "", method="", note=note)
        if leaf in self.program.rounded_params:
            array = self.low_leaves.get(leaf, self.leaves[self.call.places[leaf]])
            factors = self.mapping_record.online.get(leaf)
            nbytes = array.nbytes + (0 if factors is None else factors.nbytes)
            bits = 8 * nbytes / max(1, math.prod(array.shape))
            row = replace(row, spec=str(array.spec), bits=bits, method="nearest")
        if outcome is None:
            return row
        assert rows is not None
        energy, before, after = (float((v * rows).sum()) for v in (outcome.energy, outcome.before, outcome.after))
        return replace(
            row, method=self._steps_of(leaf).names, before=_snr_of(energy, before), after=_snr_of(energy, after),
            damping=float(outcome.damping.max()), tries=int(outcome.tries.max()), dead=int(outcome.dead.sum()),
            rows=float(rows.sum()), sparsity=float(outcome.zeros),
            bias=self.program.paths[self.bias_sites[leaf].leaf] if leaf in self.bias_sites else "",
        )  # fmt: skip

    def _path(self, leaf: int, turn: tuple[int, ...]) -> str:
        """The path of a parameter, with the indexes of a layer of a stack."""
        return self.program.paths[leaf] + (f"[{','.join(map(str, turn))}]" if turn else "")

    def _add_other_rows(self) -> None:
        """Rows of other uses, of values that are rounded by themselves, and of weights that no rule rounds."""
        self._add_use_rows()
        for leaf, indexes, use in self.other_layers:
            row = self._row(leaf, indexes, note=_USES_WITHOUT_PRODUCT.get(use, _NO_INPUT))
            self.rows.append(self._with_mapping(leaf, indexes, row))
        params, reasons = self.program.rounded_params, self.sites.reasons
        for leaf in sorted({*params, *self.sites.by_leaf, *reasons} - set(self.weight_sites)):
            note = "no rule rounds it"
            if leaf in params:
                note = _USES_WITHOUT_PRODUCT.get(params[leaf].use.kind, "its product is not in every batch")
                note = reasons.get(leaf, note)
            self.rows.append(self._row(leaf, note=note))

    def _add_use_rows(self) -> None:
        """Rows of the uses of weights beside the products that are looked at."""
        others = {leaf: self.sites.others[leaf] for leaf in self.nearest}
        errors: dict[Any, tuple[float, float, float]] = {}
        if others and iter(self.data.batches) is not iter(self.data.batches):
            errors = self.data.errors(others, [self.nearest, {leaf: self.values[leaf] for leaf in others}])
            self.passes += 1
        for leaf, index, use in ((leaf, index, use) for leaf, uses in others.items() for index, use in enumerate(uses)):
            row = replace(self._row(leaf, note=f"taken by {_use_name(use)}"), method=self._steps_of(leaf).names)
            if (leaf, index) in errors:
                energy, before, after = errors[leaf, index]
                row = replace(row, before=_snr_of(energy, before), after=_snr_of(energy, after))
            else:
                row = replace(row, note=_join_notes(row.note, "its errors are not measured"))
            self.rows.append(row)


def _use_name(step_operand_use: tuple[Any, int, ParamUse]) -> str:
    """The primitive of a use and its source line; `step_operand_use` is an entry of `WeightSites.others`."""
    use = step_operand_use[2]
    return f"{use.primitive} at {use.source}" if use.source else use.primitive


def _sums_of_stage(sums: Mapping[int, InputSums], stage: Stage, window: tuple[int, int] | None) -> dict[int, InputSums]:
    """The sums of one turn of the loops, of all turns or of those in a window of the outermost loop."""
    index = stage.turn if window is None else (stage.turn[0] - window[0], *stage.turn[1:])
    return {leaf: jax.tree.map(lambda v: v[index], sums[leaf]) for leaf in stage.leaves if leaf in sums}


_NO_INPUT = "no input reached it"
_WORSE_WITHOUT_CORRECTION = "worse than nearest, not counting the errors that correct_error makes up for"
#: Why a parameter without a product is rounded by itself.
_USES_WITHOUT_PRODUCT = {"rows": "it is looked up", "sum": "it is added"}


def _check_step_formats(
    steps: CalibrationSteps, path: str, shape: Sequence[int], placement: WeightLayout, use: ParamUse
) -> None:
    """Refuse to prune a weight whose format has no zero, and to search zero points that it has not."""
    spec, fmt = placement.spec, placement.spec.scaled
    pruning = pruning_of(steps, spec)
    if pruning is not None and _descends_results(steps):
        raise ValueError(f"{steps.sweep} rounds no weight that is pruned, as {path!r} is; leave loss out")
    if pruning is not None and (spec.element.code_of(0) is None or (fmt and fmt.zero_point == "float")):
        raise ValueError(f"{pruning} makes numbers of {path!r} zero, which {str(spec)!r} does not have")
    if pruning is not None and fmt is not None and fmt.sparse is not None:
        if steps.pruning is not None and (steps.pruning.n, steps.pruning.m) != fmt.sparse:
            raise ValueError(f"{steps.pruning} prunes {path!r}, which {str(spec)!r} does otherwise; leave one of them "
                             "out, or give both the same numbers")  # fmt: skip
        if not _sparse_along_sum(shape, placement, use):
            raise ValueError(f"{path!r}: {str(spec)!r} counts along another axis than the sum, along which {pruning} "
                             "prunes; leave sparse_axis out, or pass steps=[]")  # fmt: skip
    if isinstance(steps.scales, HalfQuadratic):
        try:
            check_float_zero_points(spec)
        except ValueError as error:
            raise ValueError(f"{steps.scales} of {path!r}: {error}") from None


def _descends_results(steps: CalibrationSteps) -> bool:
    """Whether weights are rounded by the results of the function."""
    return isinstance(steps.sweep, SignDescent) and steps.sweep.loss == "results"


def _sparse_along_sum(shape: Sequence[int], placement: WeightLayout, use: ParamUse) -> bool:
    """Whether the numbers that a format with `sparse` counts together belong to consecutive inputs."""
    assert use.view is not None and placement.spec.scaled is not None
    factor = next((part for part in reversed(use.view.contracting) if part.size > 1), None)
    inner_shape = placement.shape[placement.spec.scaled.axis_of_sparse % len(placement.shape) + 1 :]
    return factor is None or factor.inner * math.prod(shape[factor.axis + 1 :]) == math.prod(inner_shape)


def _join_notes(*notes: str) -> str:
    return "; ".join(text for text in notes if text)


def _snr_of(energy: float, error: float) -> float:
    """Signal-to-noise ratio of a product in decibels; NaN without a signal."""
    return decibels(energy, max(error, 0.0)) if energy > 0 else math.nan  # a rounding error may make it negative
