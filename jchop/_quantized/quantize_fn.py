"""`quantize_fn`: the products of any function of parameters, rounded by rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.checks import check, short_repr
from jchop._common.on_demand import load_name
from jchop._program.control import with_weak_types
from jchop._program.run import interpret
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.products.rule import Rule, RuleLike, as_rule_tuple
from jchop._quantized.products.scale_from import LSQ, DelayedScaling
from jchop._quantized.products.scales import finite_range, initial_scale
from jchop._quantized.program.adapters import LoraAdapter
from jchop._quantized.program.call import (
    CallArguments,
    Keys,
    LazyParam,
    batch_arguments,
    enumerate_batches,
    is_packed_param,
    unpack_param,
)
from jchop._quantized.program.provenance import MatrixLayout
from jchop._quantized.program.quantized_program import QuantizedProgram, plan_quantized_program
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.runner import ScaleStateRunner
from jchop._quantized.program.scale_slots import (
    ScaleCalibration,
    Scales,
    ScaleSlot,
    check_entry_names,
    per_iteration,
    stack_entries,
)
from jchop._quantized.program.weight_layout import (
    StoredAs,
    WeightScaleState,
    first_weight_entry,
    weight_scale_entry,
    weight_scale_state,
)
from jchop._round.arguments import check_key
from jchop._storage._array import refuse_qarray_dicts


def quantize_fn(fun: Callable[..., Any], rules: RuleLike) -> QuantizedFunction:
    """Rounds the operands of the products of `fun(params, ...)` by rules, whatever library its parameters are from.

    JAX traces `fun`, and the program says which parameters reach which products: `dot_general`, convolutions,
    `ragged_dot`, and look-ups of rows, as in an embedding. It follows them through reshapes, transposes, slices of
    stacks, casts, masks, and loops. So models with an einsum of their own, experts, scanned layers and tied embeddings
    need no layer of a known class. Each parameter is rounded once, in groups along the axes that its first product sums
    over. Every operation that reads it gets the rounded numbers.

    Args:
        fun: a function of a pytree of parameters, and of anything else.
        rules: a `Rule`, or several. The first that matches the path of a parameter applies to it and to its products. A
            path has the keys of `jax.tree_util.keystr`, joined by slashes. `weight` rounds parameters that reach a
            product, `bias` parameters that are added to data and other biases, `activation` the other operand of the
            product. `gradient`, `input_gradient`, `weight_gradient` and `matmul` are as in `Rule`. A product without a
            parameter (attention) has the first rule that matches its scope (`jax.named_scope`), which rounds both
            operands to `activation`. `scale_from` keeps scales of products with a parameter. They are an argument of
            each call, `Scales`, which `start` returns first. `output` and `cache` need layers, and are refused.

    Returns:
        A `QuantizedFunction`, with the signature of `fun` and one more keyword argument, ``key``: a typed key, needed
        if a rule is stochastic. Parameters in full precision are rounded in each call, with straight-through gradients
        (quantization-aware training). Packed parameters, from its `pack`, are unpacked to the same numbers.

    Raises:
        TypeError: for `rules` of another type.
        NotImplementedError: for a rule with `output` or `cache`.
        ValueError: when called, for a rule that matches no parameter and no product. When called, for a rule that names
            a parameter which reaches no product, or axes that an operand does not have. When called, for a stochastic
            rule without a key.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> attend = lambda p, x: jnp.einsum("btd,dhk->bthk", x, p["query"])
        >>> low = jc.quantize_fn(attend, jc.Rule(weight="int4(group=32)", activation="int8(group=all)"))
        >>> params, x = {"query": jnp.ones((64, 4, 8))}, jnp.ones((1, 2, 64))
        >>> packed = low.pack(params, x)
        >>> packed["query"].shape, packed["query"].nbytes, bool((low(packed, x) == low(params, x)).all())
        ((64, 4, 8), 1280, True)
    """
    if not callable(fun):
        raise TypeError(f"fun={fun!r} must be a function of parameters and other arguments")
    all_rules = as_rule_tuple(rules)
    check_rule_fields(all_rules)
    return QuantizedFunction(fun, all_rules, all_in_use=True)


def check_rule_fields(rules: Sequence[Rule]) -> None:
    """Refuse fields of rules that a program does not have.

    Raises:
        NotImplementedError: that names them.
    """
    for rule in rules:
        for name, advice in _LAYER_FIELDS.items():
            if getattr(rule, name) is not None:
                raise NotImplementedError(f"{rule}: {name} needs {advice}")
    refuse_codes_with_kept_scales(rules)


#: Fields that only layers have, and the equivalent in a program.
_LAYER_FIELDS = {
    "output": "layers of Flax (jchop.nn); in a program, give the product that takes the result an activation, or round "
    "the result by jchop.round_to_format",
    "cache": "the attention of Flax (jchop.nn.quantize without inputs); in a program, pack keys and values by "
    "jchop.quantize",
}


def check_data_arguments(**arguments: Any) -> None:
    """Refuse arguments that are for rounding with data, where there are no batches.

    Raises:
        ValueError: that names the first.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}={short_repr(value)} needs data: pass batches=, an iterable such as [(x,), (x,)]")


def refuse_codes_with_kept_scales(rules: Sequence[Rule]) -> None:
    """Refuse rules with both `scale_from` and products of codes."""
    for rule in rules:
        if rule.scale_from is not None and rule.product == "codes":
            raise NotImplementedError(
                f"{rule}: codes are multiplied under the scales of each array; leave scale_from or product out"
            )


class QuantizedFunction:
    """A function with rounded products; `quantize_fn` makes it.

    Args:
        fun: the function.
        rules: the rules.
        all_in_use: whether a rule without an effect is an error; False for one of several functions of a model.
        classes: the class of the module that holds each parameter, by the path of the parameter. Default None: the
            classes of the nodes of the pytree.
        whole: whether the rules are for this function alone. False if they are for a model that it is a part of: a rule
            that matches nothing is then no error.
        elsewhere: the indexes of rules that match other things than parameters and products, and may match neither.
    """

    def __init__(
        self, fun: Callable[..., Any], rules: tuple[Rule, ...], *, all_in_use: bool = False,
        classes: Mapping[str, str] | None = None, whole: bool = True, elsewhere: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.fun, self.rules, self.all_in_use, self.classes = fun, rules, all_in_use, classes
        self.whole, self.elsewhere = whole, elsewhere
        self._programs: dict[Any, QuantizedProgram] = {}
        update_wrapper(self, fun, updated=())

    def __call__(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> Any:
        """Calls `fun` with rounded products. `params` may be packed; `key` is needed if a rule is stochastic.

        `scales` are needed if a rule has `scale_from`. They stay as they are, as in evaluation; `update` returns the
        scales after the call. Entries of another function or other rules are an error, and so are fixed ranges of some
        products alone.
        """
        return self._run(CallArguments(params, args, kwargs), scales, "fixed", key)[0]

    def update(
        self, params: Any, *args: Any, scales: Scales, key: Array | None = None, **kwargs: Any
    ) -> tuple[Any, Scales]:
        """Calls the function in training: returns the result, and the scales after it.

        Args:
            params: the parameters.
            *args: arguments as in a call.
            scales: from `start` or the call before; ranges and histories follow the data. Gradients reach
                ``scales.learned`` alone.
            key: as in a call.
            **kwargs: keyword arguments as in a call.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> rule = jc.Rule(activation="float8_e4m3fn(group=tensor)", scale_from=jc.DelayedScaling(3))
            >>> low = jc.quantize_fn(lambda w, x: x @ w, rule)
            >>> w, x = jnp.ones((2, 1)), jnp.array([[1.0, -4.0]])
            >>> y, scales = low.update(w, x, scales=low.start(w, x))
            >>> scales.stats["params_activation_history"].tolist()
            [4.0, 0.0, 0.0]
        """
        out, after, _ = self._run(CallArguments(params, args, kwargs), scales, "update", key)
        return out, scales._replace(stats={**scales.stats, **after})

    def start(self, params: Any, *args: Any, key: Array | None = None, from_data: bool = True, **kwargs: Any) -> Scales:
        """Returns the scales that rules keep (`scale_from`), before the first call; empty if none does.

        The format's rule gives learned scales of parameters. A learned scale of an activation comes from the range of
        the data in `args`; `calibrate` finds it from more data. Ranges and histories have no data yet.

        Args:
            params: the parameters, not packed.
            *args: arguments as in a call: arrays if activations have learned scales, else arrays or their shapes.
            key: as in a call.
            from_data: False leaves the learned scales of activations to `calibrate`. Default True.
            **kwargs: keyword arguments as in a call.
        """
        call = CallArguments(params, args, kwargs)
        program = self._program(call)
        scales = Scales({}, {slot.name: slot.start() for slot in program.slots.values() if slot.follows})
        for i, (name, placement, source) in program.weights_with_state.items():
            value = call.values[i]
            if is_packed_param(value):
                raise ValueError(f"params: {program.paths[i]!r} is packed; start with the parameters themselves")
            own = scales.learned if isinstance(source, LSQ) else scales.stats
            own[name] = first_weight_entry(placement, source, value)
        learned_slots = [slot for slot in program.slots.values() if isinstance(slot.source, LSQ)]
        if learned_slots and from_data:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in call.values):
                raise ValueError(f"{learned_slots[0].place}: a learned scale begins with data; pass arrays, not shapes")
            _, data = self.observe(params, *args, scales=scales, key=key, **kwargs)
            for slot in learned_slots:
                spans = per_iteration(slot, data[slot.name][1], finite_range)
                scales.learned[slot.name] = stack_entries(slot, spans, lambda span, s=slot: initial_scale(span, s.spec))
        return scales

    def calibrate(
        self,
        params: Any,
        batches: Iterable[Any],
        *,
        method: str = "minmax",
        combine: str = "widest",
        scales: Scales | None = None,
        key: Array | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Scales:
        """Runs the function on data and returns scales with fixed ranges of activations.

        This applies to products with a parameter whose activation has one scale for the whole array, as ``"int8"``.
        Pass the result to each call as `scales`. A range of a `MovingAverage` and a learned scale begin with these
        ranges; a history has none.

        Args:
            params: the parameters, packed or not.
            batches: the arguments after `params` of each call: tuples, or the only argument.
            method: as in `jchop.nn.calibrate`.
            combine: as in `jchop.nn.calibrate`.
            scales: the scales of the calls, if rules keep any. Default None: from `start`, for the first batch.
            key: as in a call.
            progress: function of the number of completed batches.

        Raises:
            ValueError: for another method, no batch, or a program without a product of this kind.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> low = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(activation="int8"))
            >>> params = {"w": jnp.ones((2, 2))}
            >>> fixed = low.calibrate(params, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])])
            >>> fixed.stats["w_activation_range"].tolist(), low(params, jnp.array([[9.0, 0.0]]), scales=fixed).tolist()
            ([-3.0, 2.0], [[3.0, 3.0]])
        """
        calibration = ScaleCalibration(method, combine)
        for count, batch in enumerate_batches(batches):
            args = batch_arguments(batch)
            if scales is None and any(rule.scale_from is not None for rule in self.rules):
                scales = self.start(params, *args, key=key, from_data=False)
            calibration.see(self.observe(params, *args, scales=scales, key=key)[1])
            if progress is not None:
                progress(count)
        return calibration.into(scales or Scales({}, {}))

    def observe(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> tuple[Any, dict[str, tuple[ScaleSlot, Array]]]:
        """Returns the result, and by name the activations with one scale, each with its data before rounding."""
        call = CallArguments(params, args, kwargs)
        out, _, data = self._run(call, scales or Scales({}, {}), "observe", key)
        slots = self._program(call).slots.values()
        return out, {slot.name: (slot, data[slot.name]) for slot in slots}

    def pack(
        self,
        params: Any,
        *args: Any,
        batches: Iterable[Any] | None = None,
        steps: Any = None,
        resume: str | os.PathLike[str] | None = None,
        memory: int | str | None = None,
        progress: Callable[[int], object] | None = None,
        return_report: bool = False,
        scales: Scales | None = None,
        donate: bool = False,
        key: Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Stores the parameters that are rounded as codes and scales, in the shapes that they have.

        With `batches`, the steps round parameters that reach a product, so that the products have small errors on data.
        Tables of look-ups, biases, and the weights that the report names as left out are rounded by themselves.

        Args:
            params: the parameters. A `jax.ShapeDtypeStruct` gives the shapes of codes and scales.
            *args: arguments as in a call. Only their shapes count, so `jax.ShapeDtypeStruct` will do. With `batches`
                they are not needed; parameters that they alone reach are packed, too.
            batches: arguments after the parameters: tuples, or the only argument. Default None: no data.
            steps: one step, or a list in a fixed order. First `jchop.ptq.sequential`; then the mappings `smooth`, `awq`
                and `rotate`, each of which runs the data once; then `correct_error`, which is sequential, too. Then
                `sparse`; `clip` or `hqq`; `gptq` or `sign_round`; `correct_biases`. With ``[]`` every element is
                rounded by itself, and the report shows the errors. Default: ``[gptq()]``.
            resume: a folder that keeps each stage as soon as it is done; it is created if it does not exist. A call
                with the same arguments continues a run that was killed, and gives the same result, bit for bit. The
                stage of a damaged file is done again. Delete the folder when the result is saved. Default None.
            memory: the most memory that statistics may need at a time, in bytes, or a text as ``"4GiB"`` (KiB, MiB,
                GiB, TiB). Each weight and each turn of its loop needs two float32 matrices (inputs, inputs) and five
                vectors (inputs,). One batch needs as many. The data are run as often as the limit requires. A mapping
                reads all turns, and the weights that share an input, at once. Default None: no limit.
            progress: a function of the number of batches that were run.
            return_report: whether a `jchop.ptq.PtqReport` is returned, too; it needs `batches`. Default False.
            scales: the scales of a call, if parameters have learned scales. They become part of the packed parameters.
            donate: whether each array of `params` that is packed is deleted as soon as its codes exist, as by
                ``donate_argnums``, so memory does not hold all of both. With `batches`, as soon as no later run reads
                it; passes then start at the last products, after one for errors. Default False.
            key: a typed key, needed if a rounding is stochastic. Default None.
            **kwargs: keyword arguments as in a call.

        Returns:
            The packed parameters, or these and the report. With `sequential`, mappings, `resume` or `memory` the
            batches are run more than once: pass a list.

        Raises:
            TypeError, ValueError: as in a call. For infinities or NaN in a parameter to be packed, or in the data. For
                other arguments, no batch, or a traced call with data. For less `memory` than each weight needs. If
                `resume` has a run with other arguments or versions.
            OSError: if `resume` cannot be read or written.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> x = jax.random.normal(jax.random.key(0), (256, 64)) @ jax.random.normal(jax.random.key(1), (64, 64))
            >>> low = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(weight="int4(group=32)"))
            >>> params = {"w": jax.random.normal(jax.random.key(2), (64, 8))}
            >>> packed, report = low.pack(params, batches=[x], return_report=True)
            >>> row = report.weights[0]
            >>> str(packed["w"].spec), row.after - row.before > 3
            ('int4(group=32,axis=-2)', True)
        """
        if batches is None:
            check_data_arguments(
                steps=steps, resume=resume, memory=memory, progress=progress, return_report=return_report
            )
            return self._pack(CallArguments(params, args, kwargs), scales, key, again=False, donate=donate)
        check(scales is None, "scales: parameters with learned scales are packed without batches")
        pack_with_data = load_name("jchop.ptq._quantize", "pack_with_data")
        packed, report = pack_with_data(self, params, batches, steps, key, progress, resume, memory, donate=donate)
        if args or kwargs:
            packed = self.pack_more(packed, *args, donate=donate, key=key, **kwargs)
        return (packed, report) if return_report else packed

    def pack_more(
        self,
        params: Any,
        *args: Any,
        scales: Scales | None = None,
        donate: bool = False,
        key: Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Packs the parameters that are not packed yet, as `pack` does."""
        return self._pack(CallArguments(params, args, kwargs), scales, key, again=True, donate=donate)

    def _pack(self, call: CallArguments, scales: Scales | None, key: Array | None, again: bool, donate: bool) -> Any:
        _refuse_adapters(call)
        program = self._valid_program(call)
        leaves, scale_states = list(call.leaves), program.weights_with_state
        for i in program.rounded_params:  # before any array is deleted
            if isinstance(call.values[i], Array | np.ndarray):
                check_finite(call.values[i], f"params: {program.paths[i]!r}")
        for i, (layout, _) in program.rounded_params.items():
            value = call.values[i]
            if is_packed_param(value) and again:
                continue
            if is_packed_param(value):
                raise ValueError(f"params: {program.paths[i]!r} is packed already; pack the parameters themselves")
            round_key = None
            if layout.spec.rounding.stochastic:
                keys = self._keys(key)
                assert keys is not None
                round_key = jax.random.fold_in(keys.key, i)
            if isinstance(value, jax.ShapeDtypeStruct):
                leaves[call.places[i]] = jax.eval_shape(layout.pack, value, round_key)
                continue
            scale = None
            if i in scale_states:
                if isinstance(scale_states[i][2], DelayedScaling):
                    raise ValueError(
                        f"{program.rule_of(i)}: a history of scales is for training; leave scale_from out to pack"
                    )
                scale = weight_scale_entry(*scale_states[i], value, scales)
            leaves[call.places[i]] = layout.pack(layout.rotate(jnp.asarray(value)), round_key, scale)
            if donate and isinstance(value, Array) and not any(value is leaf for leaf in leaves):
                value.delete()
        return jax.tree.unflatten(call.tree, leaves)[0][0]

    def report(self, params: Any, *args: Any, platform: str | None = None, **kwargs: Any) -> ProgramReport:
        """Lists the rule and the roundings of each parameter and each product; nothing is computed.

        Args:
            params: the parameters, or their shapes.
            *args: arguments as in a call, or their shapes.
            platform: ``"cpu"``, ``"v5e"``, ``"v6e"``, ``"v7x"``, ``"a100"``, ``"h200"`` or ``"b200"``. The report then
                says which types of operands reach its units in each forward product under a rule. Default None.
            **kwargs: keyword arguments as in a call.

        Returns:
            A `ProgramReport`; its ``str`` is a table.

        Raises:
            TypeError, ValueError: as in a call; for another platform.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> rule = jc.Rule(weight="int8(channel=1)", activation="int8(group=all)", product="codes")
            >>> low = jc.quantize_fn(lambda w, x: x @ w, rule)
            >>> low.report(jnp.ones((8, 4)), jnp.ones((2, 8)), platform="h200").products[0].operands
            'int8 x int8 -> int32'
        """
        return self.resolved(params, *args, **kwargs).report(platform)

    def resolved(self, params: Any, *args: Any, **kwargs: Any) -> QuantizedProgram:
        """Returns the planned program for arguments, with the effects of the rules in it."""
        return self._valid_program(CallArguments(params, args, kwargs))

    def traced(self, params: Any, *args: Any, **kwargs: Any) -> tuple[QuantizedProgram, CallArguments]:
        """Returns the planned program for arguments, and the parts of these, for `jchop.ptq`."""
        call = CallArguments(params, args, kwargs)
        _refuse_adapters(call)
        return self._program(call), call

    # -- internals -----------------------------------------------------------------------------------------------------

    def _run(
        self, call: CallArguments, scales: Scales | None, mode: Literal["fixed", "update", "observe"], key: Array | None
    ) -> tuple[Any, dict[str, Array], dict[str, Array]]:
        """The result, the ranges and histories after the call, and the observed arrays."""
        program = self._program(call)
        keys, scale_states = self._keys(key), program.weights_with_state
        keeping = any(slot.source is not None for slot in program.slots.values())
        keeping |= not all(is_packed_param(call.values[i]) for i in scale_states)
        if scales is None and keeping:
            rule = next(rule for rule in self.rules if rule.scale_from is not None)
            raise ValueError(f"scales=None, but {rule} keeps scales: pass scales=low.start(params, ...)")
        if scales is not None and not isinstance(scales, Scales):
            raise TypeError(f"scales={scales!r} must be what start, update or calibrate returns")
        scales = Scales({}, {}) if scales is None else scales
        if self.all_in_use and mode != "observe" and (scales.stats or scales.learned):
            check_entry_names(scales.entries, program.slots.values(), program.rules_by_path)
        values, weight_updates = list(call.values), {}
        for i in range(call.count):
            entry = None
            if i in scale_states and not is_packed_param(values[i]):
                entry, history = weight_scale_state(*scale_states[i], jnp.asarray(values[i]), scales)
                weight_updates |= history
            values[i] = self._lazy_param(program, i, values[i], entry, call.adapters.get(i))
        runner = program.runner
        if keeping or mode != "fixed" or scales.stats:
            runner = ScaleStateRunner(runner, program.slots, program.entries_of_scan, scales.entries, mode)
        with jax.disable_jit(False):
            out = with_weak_types(interpret(runner, program.plan, keys, values), program.plan.jaxpr.outvars)
        runner.check_codes()
        updates = runner.updates if isinstance(runner, ScaleStateRunner) else {}
        return jax.tree.unflatten(program.tree, out), {**weight_updates, **updates}, updates

    def _keys(self, key: Array | None) -> Keys | None:
        if key is not None:
            check_key("key", key)
        stochastic = [rule for rule in self.rules if rule.stochastic]
        if not stochastic:
            return None if key is None else Keys(key)  # for the dropout of adapters
        if key is None:
            raise ValueError(
                f"key=None, but {stochastic[0]} rounds stochastically: pass a typed key, for example "
                "key=jax.random.key(0)"
            )
        return Keys(key)

    def _lazy_param(
        self, program: QuantizedProgram, i: int, value: Any, entry: WeightScaleState | None, adapter: LoraAdapter | None
    ) -> Any:
        if adapter is not None and program.adaptable.get(i) != adapter.layout:
            why = program.adaptable.get(i, "no product takes it")
            why = why if isinstance(why, str) else "its products sum over other axes than those it was made for"
            raise ValueError(f"the parameter {program.paths[i]!r} has an adapter, which this call cannot take: {why}")
        packed = is_packed_param(value)
        if i not in program.rounded_params and adapter is None:
            return unpack_param(value) if packed else value
        lazy = program.lazy_params.get(i) or LazyParam(None, None, i)
        has_factors = isinstance(value, StoredAs) and value.input_factors is not None
        fit = has_factors and i in program.rounded_params and isinstance(program.adaptable.get(i), MatrixLayout)
        value = value if packed else jnp.asarray(value)
        return replace(lazy, value=value, scale_state=entry, adapter=adapter, factors_fit=fit)

    def _valid_program(self, call: CallArguments) -> QuantizedProgram:
        """The planned program. Which weights have no codes, a run finds, and no plan: so it is run for shapes alone."""
        program = self._program(call)

        def run(values: list[Any]) -> list[Any]:
            params = (self._lazy_param(program, i, x, None, None) for i, x in enumerate(values[: call.count]))
            return interpret(program.runner, program.plan, Keys(jax.random.key(0)), [*params, *values[call.count :]])

        if program.runner.is_doubtful:
            with jax.disable_jit(False):
                jax.eval_shape(run, call.values)
            program.runner.check_codes()
            program.runner.is_doubtful = False
        return program

    def _program(self, call: CallArguments) -> QuantizedProgram:
        signature = call.signature
        program = self._programs.get(signature) if signature is not None else None
        if program is not None:
            return program
        refuse_qarray_dicts("params", call.params)
        classes = self.classes if self.classes is not None else call.classes
        program = plan_quantized_program(
            self.fun, self.rules, call, classes, all_in_use=self.all_in_use, whole=self.whole, elsewhere=self.elsewhere
        )
        if signature is not None and program.keeps_constants:
            if len(self._programs) >= _MOST_TRACED_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[signature] = program
        return program


def _refuse_adapters(call: CallArguments) -> None:
    for i in call.adapters:
        raise ValueError(f"params: {call.paths[i]!r} has an adapter; jchop.nn.split_lora or merge_lora takes it out")


#: The most traced programs that a function keeps.
_MOST_TRACED_PROGRAMS = 64
