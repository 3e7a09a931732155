"""A traced program with the rule of each parameter and each product, and the roundings that these ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jchop._common.checks import check_choice
from jchop._common.paths import common_path_pattern, names_last_part, path_pattern
from jchop._program.step import ProgramPlan
from jchop._quantized.products.codes import block_along_sum
from jchop._quantized.products.contraction import ProductRoundings, check_operand_specs
from jchop._quantized.products.operand_layout import OperandLayout, check_layout_axes
from jchop._quantized.products.product import ConvProduct, OperandSwap
from jchop._quantized.products.rule import (
    OPERATION_NAMES,
    ROUNDING_FIELDS,
    Location,
    Rule,
    ScaleFrom,
    multiplies_codes,
    param_rule_index,
    refuse_idle_rules,
    rule_index,
)
from jchop._quantized.products.scales import STATE_KINDS
from jchop._quantized.program import report
from jchop._quantized.program.adapters import lora_layouts
from jchop._quantized.program.call import CallArguments, LazyParam
from jchop._quantized.program.param_uses import (
    ParamUse,
    ProductStep,
    ProvenancePlanner,
    holds_several_arrays,
    is_complex_product,
    name_of_call,
)
from jchop._quantized.program.provenance import MatrixLayout, MatrixView
from jchop._quantized.program.runner import QuantizedRunner
from jchop._quantized.program.scale_slots import ScaleSlot, scale_slots_of
from jchop._quantized.program.weight_layout import (
    WeightLayout,
    blocks_fit_axes,
    stack_ndim,
    weight_layout_of,
    weight_rotation_of,
    with_weight_rotation,
)
from jchop._spec.spec import Spec


class RoundedParam(NamedTuple):
    """A parameter that its rule rounds: how it is rounded and stored, and its use that decides so."""

    layout: WeightLayout
    use: ParamUse


@dataclass(frozen=True, kw_only=True)
class QuantizedProgram:
    """A function traced for some arguments, and the effects of its rules on parameters and products.

    Args:
        plan: the program.
        tree: the structure of its results.
        rules: all rules.
        paths: of each parameter.
        shapes: of each parameter.
        uses: the uses of each parameter, by its number; parameters that nothing takes are absent.
        rule_indexes: which of the rules applies to each parameter; None for none.
        products: the products in the order of the program, each with its rule.
        rounded_params: the parameters that are rounded, by number.
        runner: the roundings of the products, by their steps.
        slots: the activations with scales from elsewhere than their data, by the steps of their products.
        entries_of_scan: the entries of the kept scales of a loop's body, by its step.
    """

    plan: ProgramPlan
    tree: Any
    rules: tuple[Rule, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: Mapping[int, Sequence[ParamUse]]
    rule_indexes: tuple[int | None, ...]
    products: tuple[tuple[ProductStep, Rule | None], ...]
    rounded_params: Mapping[int, RoundedParam] = field(default_factory=dict)
    runner: QuantizedRunner = field(default_factory=lambda: QuantizedRunner({}))
    slots: dict[int, ScaleSlot] = field(default_factory=dict)
    entries_of_scan: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def main_use(self, leaf: int) -> ParamUse | None:
        """The use that says how a parameter is rounded."""
        return _main_use(self.uses.get(leaf, ()))

    def rule_of(self, leaf: int) -> Rule:
        """The rule of a parameter that has one."""
        number = self.rule_indexes[leaf]
        assert number is not None
        return self.rules[number]

    def exemption(self, leaf: int) -> str:
        """Why a parameter is not rounded as its rule says; empty if nothing prevents it."""
        return _exemption_reason(self.rule_of(leaf), self.uses.get(leaf, ()))

    @property
    def keeps_constants(self) -> bool:
        """Whether no constant of the program belongs to a trace that ends, so that later calls can run it."""
        plans = (self.plan, *(plan for step in self.plan.walk() for plan in step.inner))
        return not any(isinstance(c, Tracer) for plan in plans for c in plan.consts)

    @property
    def rounds(self) -> bool:
        """Whether a call rounds anything."""
        return bool(self.rounded_params or self.runner.roundings)

    @cached_property
    def adaptable(self) -> dict[int, MatrixLayout | str]:
        """The parameters that reach products, by number: each as a matrix, or why it can have no adapter."""
        return lora_layouts(self.plan, self.shapes)

    @cached_property
    def rules_by_path(self) -> dict[str, Rule]:
        """The rules of the parameters, by the paths with which the names of entries begin."""
        pairs = zip(self.paths, self.rule_indexes, strict=True)
        return {path or "params": self.rules[number] for path, number in pairs if number is not None}

    @cached_property
    def lazy_params(self) -> dict[int, LazyParam]:
        """How a run takes each parameter that is rounded, without its numbers."""
        params, found = {}, ((step, self.runner.roundings.get(id(step))) for step, _ in self.products)
        coded_leaves = {use.leaf for step, how in found if how and how.codes for use in step.param_uses}
        for leaf, (layout, use) in self.rounded_params.items():
            rule = self.rule_of(leaf)
            by_codes = use.kind == "product" and (rule.product == "codes" or leaf in coded_leaves)
            roundings = ProductRoundings(
                right=_weight_spec(rule), gradient=rule.gradient, input_gradient=rule.input_gradient,
                rotation=rule.rotation, codes=by_codes,
            )  # fmt: skip
            keeps_full = rule.weight is not None and roundings.rounds_weight_again
            barrier = any(other.kind == "other" or not other.is_intact for other in self.uses[leaf])
            params[leaf] = LazyParam(None, layout, leaf, keeps_full, by_codes, barrier=barrier)
        return params

    @cached_property
    def weights_with_state(self) -> dict[int, tuple[str, WeightLayout, ScaleFrom]]:
        """The parameters whose scales are kept: the name of the entry, the rounding, the source."""
        states = {}
        names: dict[str, int] = {}
        for leaf, (layout, use) in self.rounded_params.items():
            source = self.rule_of(leaf).scale_from
            if source is not None and "weight" in source.fields and use.kind != "sum":
                name = f"{self.paths[leaf] or 'params'}_weight_{STATE_KINDS[type(source)]}"
                count = names[name] = names.get(name, -1) + 1  # {"a": {"b": w}, "a/b": v} has one path twice
                states[leaf] = f"{name}_{count}" if count else name, layout, source
        return states

    def report(self, platform: str | None = None) -> report.ProgramReport:
        """A row for each parameter and each product.

        Raises:
            TypeError, ValueError: for a platform that is neither None nor in `OPERANDS_BY_PLATFORM`.
        """
        if platform is not None:
            check_choice("platform", platform, tuple(report.OPERANDS_BY_PLATFORM))
        return report.ProgramReport(
            tuple(self._parameter_row(leaf) for leaf in range(len(self.paths))),
            tuple(self._product_row(step, rule, platform) for step, rule in self.products),
        )

    def _parameter_row(self, leaf: int) -> report.ParameterRow:
        number, use, rounded = self.rule_indexes[leaf], self.main_use(leaf), self.rounded_params.get(leaf)
        return report.ParameterRow(
            self.paths[leaf],
            self.shapes[leaf],
            "" if number is None else str(self.rules[number]),
            "" if use is None else use.primitive,
            "" if use is None else use.kind,
            "" if rounded is None else str(rounded.layout.spec),
            "" if use is None else use.source,
            "" if number is None or rounded is not None else self.exemption(leaf),
        )

    def _product_row(self, step: ProductStep, rule: Rule | None, platform: str | None) -> report.ProductRow:
        roundings = self.runner.roundings.get(id(step))
        slot = self.slots.get(id(step))
        rounded = {} if roundings is None else {
            "activation": roundings.left, "gradient": roundings.gradient,
            "input_gradient": roundings.input_gradient, "weight_gradient": roundings.weight_gradient,
            "matmul": roundings.matmul, "rotation": roundings.rotation,
            "product": "codes" if roundings.codes else None, "scale_from": None if slot is None else slot.source,
        }  # fmt: skip
        refusal = step.refusal or ("complex" if roundings is None and is_complex_product(step.eqn) else "")
        return report.ProductRow(
            step.scope,
            f"{step.name} ({refusal})" if refusal else step.name,
            tuple(self.paths[use.leaf] for use in step.param_uses),
            "" if rule is None else str(rule),
            {name: str(value) for name, value in rounded.items() if value is not None},
            step.source,
            "" if platform is None or rule is None or refusal or step.call else _operand_types(step, rule, platform),
            "" if roundings is None else _constant_note(step, roundings),
        )


def _constant_note(step: ProductStep, roundings: ProductRoundings) -> str:
    """That an operand of a product of data is a constant, such as a Fourier basis, and is rounded; else empty."""
    side = next((i for i, is_data in enumerate(step.data[:2]) if not is_data), None)
    spec = roundings.left if side == 0 else roundings.right
    if side is None or step.param_uses or spec is None or step.call is not None:
        return ""
    scope, shape = step.scope, "×".join(map(str, step.eqn.invars[side].aval.shape))
    name, within = (path_pattern(scope), "") if scope else ("basis", ", within jax.named_scope('basis'),")
    where = f"{step.name} at {os.path.basename(step.source)}"
    return f"{where}: a constant ({shape}) is rounded to {spec}; Rule({name!r}) first{within} leaves it"


def _operand_types(step: ProductStep, rule: Rule, platform: str) -> str:
    """The types of the operands of a product on a platform."""
    carrier = jnp.result_type(*(v.aval.dtype for v in step.eqn.invars[:2])).name
    if _multiplies_params_alone(step):
        return f"{carrier} x {carrier}"
    return report.operand_types_on(platform, rule, carrier, any(step.uses), not isinstance(step.product, ConvProduct))


def _weight_spec(rule: Rule) -> Spec | None:
    """The rounding of a weight for each product, unless its scales are kept: then it is rounded once for all."""
    has_state = rule.scale_from is not None and "weight" in rule.scale_from.fields
    return None if has_state else rule.weight


def plan_quantized_program(
    fun: Callable[..., Any],
    rules: tuple[Rule, ...],
    call: CallArguments,
    classes: Mapping[str, str],
    *,
    all_in_use: bool,
    whole: bool = True,
    elsewhere: Collection[int] = (),
) -> QuantizedProgram:  # fmt: skip
    """Trace a function for the arguments of a call, and find the effects of the rules on it.

    Args:
        fun: the function.
        rules: the rules.
        call: the arguments.
        classes: the class of the module that holds each parameter, by the path of the parameter.
        all_in_use: whether a rule without an effect is an error.
        whole: whether a rule that matches nothing is an error.
        elsewhere: the numbers of rules that match something else, for which it is none.

    Raises:
        ValueError: for rules that match nothing, have no effect, or cannot be applied.
    """

    def flat(*values: Any) -> Any:
        (params, *args), kwargs = call.with_values(values)
        return fun(params, *args, **kwargs)

    flat.__wrapped__ = fun  # type: ignore[attr-defined] # JAX's errors name it
    with jax.disable_jit(False):
        jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*call.abstract)
    analyst = ProvenancePlanner(_axes_of_calls(rules))
    plan = analyst.plan(jaxpr, call.facts)
    uses: dict[int, list[ParamUse]] = {leaf: [use] for leaf, use in analyst.data_changes.items()}
    for step in plan.walk():
        for use in (*step.param_uses, *step.opaque_uses):
            uses.setdefault(use.leaf, []).append(use)
    shapes = tuple(tuple(x.shape) for x in call.abstract[: call.count])
    numbers = []
    for leaf, path in enumerate(call.paths):
        use = _main_use(uses.get(leaf, ()))
        operation = "" if use is None or use.view is None else OPERATION_NAMES.get(use.primitive, use.primitive)
        numbers.append(param_rule_index(path, rules, classes.get(path, ""), operation))
    program = QuantizedProgram(
        plan=plan, tree=jax.tree.structure(out), rules=rules, paths=call.paths, shapes=shapes, uses=uses,
        rule_indexes=tuple(numbers), products=tuple(_products_with_rules(plan, rules, numbers, classes)),
    )  # fmt: skip
    program = replace(program, rounded_params=_rounded_params(program))
    if whole:
        _check_rules_match(program, elsewhere)
    roundings, refusals = {}, {}
    for step, rule in program.products:
        how = None if rule is None else _roundings_of_product(step, rule, program.rounded_params)
        how = with_weight_rotation(program, step, how)
        if rule is None or how is None:
            continue
        no_blocks = dict(_params_without_blocks(program, step, rule)) if how.codes else {}
        if how.stored_only and no_blocks:
            how = replace(how, codes=False)
        elif no_blocks:
            refusals |= no_blocks
        roundings[id(step)] = how
    if refusals:
        path, *others = refusals
        pattern = common_path_pattern(refusals, (path for path in call.paths if path not in refusals))
        more = f"; {len(others)} more are like it: put Rule({pattern!r}, ...) without product before that rule"
        raise ValueError(f"{refusals[path]}{more * bool(others)}")
    slots, entries_of_scan = scale_slots_of(plan, roundings, call.paths)
    runner = QuantizedRunner(roundings, call.paths)
    program = replace(program, runner=runner, slots=slots, entries_of_scan=entries_of_scan)
    if all_in_use:
        _check_rules_effect(program, {slot.source for slot in slots.values()})
    return program


def _axes_of_calls(rules: Sequence[Rule]) -> dict[str, tuple[int | None, ...]]:
    """The calls that rules declare."""
    declared: dict[str, tuple[int | None, ...]] = {}
    for name, axes in (call for rule in rules for call in rule.axes_of_calls.items()):
        if declared.setdefault(name, axes) != axes:
            raise ValueError(
                f"operation: rules declare {name!r} with axes {declared[name]} and {axes}; give one of these calls "
                "another name, of a jax.jit around it"
            )
    return declared


def _products_with_rules(
    plan: ProgramPlan, rules: Sequence[Rule], numbers: Sequence[int | None], classes: Mapping[str, str]
) -> Iterator[tuple[ProductStep, Rule | None]]:
    """The products of a program, each with its rule: the rule of its first parameter, or of its scope."""
    for step in plan.walk():
        if step.refusal:
            yield step, None
        if step.product is None and step.call is None:
            continue
        if step.param_uses:
            rule_numbers = [n for use in step.param_uses if (n := numbers[use.leaf]) is not None]
            yield step, rules[rule_numbers[0]] if rule_numbers else None
        elif any(step.data):
            operation = OPERATION_NAMES.get(step.name, step.name)
            number = rule_index(step.scope, rules, _scope_class(step.scope, classes), operation)
            yield step, None if number is None else rules[number]


def _rounded_params(program: QuantizedProgram) -> dict[int, RoundedParam]:
    """The parameters that rules round, by number: each in the layout of its main use.

    Raises:
        ValueError: for a format that does not fit the parameter.
    """
    results = {o.leaf for fact in program.plan.out if fact is not None for o in fact.origins}
    params = {}
    for leaf, number in enumerate(program.rule_indexes):
        use, path, shape = program.main_use(leaf), program.paths[leaf], program.shapes[leaf]
        if number is None or use is None:
            continue
        rule = program.rules[number]
        spec = rule.bias if use.kind == "sum" else rule.weight if use.view is not None else None
        if spec is None or program.exemption(leaf):
            continue
        try:
            stack = stack_ndim(shape, MatrixView(use.axes, ())) if use.kind == "sum" else 0
            layout = weight_layout_of(shape[stack:], use.view, spec)
        except ValueError as error:
            field = "bias" if use.kind == "sum" else "weight"
            raise ValueError(
                f"{field}={str(spec)!r} of the parameter {path!r}, of shape {shape}, in {use.where}, by {rule}: {error}"
            ) from None
        rotation = weight_rotation_of(rule, path, shape, program.uses[leaf], leaf in results)
        params[leaf] = RoundedParam(layout if rotation is None else replace(layout, rotation=rotation), use)
    return params


def _scope_class(scope: str, classes: Mapping[str, str]) -> str:
    """The class of the innermost module in whose scope a product is; empty if none is known."""
    while scope and scope not in classes:
        scope = scope.rpartition("/")[0]
    return classes.get(scope, "") if scope else ""


def _roundings_of_product(step: ProductStep, rule: Rule, rounded_params: Collection[int]) -> ProductRoundings | None:
    """How the operands of a product are rounded; None if nothing is."""
    if step.call is not None:
        return _roundings_of_call(step, step.call.layouts, rule)
    assert step.product is not None
    if _multiplies_params_alone(step):
        return None
    weights = [i for i in (0, 1) if step.uses and step.uses[i]]
    weight = weights[0] if weights else -1
    place = Location(step.name, step.scope or step.source, rule)
    right = _weight_spec(rule) if weights else rule.activation
    if weights and not any(use.leaf in rounded_params for use in step.uses[weight]):
        right = None  # no weight of its is rounded
    codes = multiplies_codes(rule) and (rule.activation is not None or right is not None)
    roundings = ProductRoundings(
        rule.activation, right, rule.gradient, rule.input_gradient, rule.weight_gradient, rule.matmul, rule.rotation,
        place, codes, rule.product == "auto", weight=weight,
    )  # fmt: skip
    product = OperandSwap(step.product) if weight == 0 else step.product
    if roundings.stored_only and not roundings.for_operand(product, step.eqn.invars[weight].aval.shape).codes:
        roundings = replace(roundings, codes=False)
    idle = not (roundings.left or roundings.backward or roundings.codes or roundings.forward_rotation)
    scaled = any(spec is not None and spec.scaled is not None for spec in roundings.specs)
    if idle or (scaled and is_complex_product(step.eqn)):  # only real numbers have scales
        return None
    check_operand_specs(product, roundings)
    return roundings


def _roundings_of_call(
    step: ProductStep, layouts: Sequence[OperandLayout | None], rule: Rule
) -> ProductRoundings | None:
    """How the data of a declared call are rounded; None if they are not."""
    fields = ("gradient", "input_gradient", "weight_gradient", "matmul", "rotation", "scale_from")
    refused = [name for name in fields if getattr(rule, name) is not None] + ["product"] * (rule.product == "codes")
    if refused:
        raise NotImplementedError(
            f"{rule}: {', '.join(refused)} of {step.where}, which has sums and derivatives of its own; put a rule with "
            f"operation={step.name!r} and weight= or activation= alone before it"
        )
    roundings = ProductRoundings(rule.activation, place=Location(step.name, step.scope or step.source, rule))
    for layout, data in zip(layouts, step.data, strict=True):
        if layout is not None and data:
            check_layout_axes("activation", rule.activation, layout.ndim, roundings.place)
    return None if rule.activation is None else roundings


def _params_without_blocks(program: QuantizedProgram, step: ProductStep, rule: Rule) -> Iterator[tuple[str, str]]:
    """The parameters whose groups are not blocks along the sum of this product, so that codes are refused; and why."""
    for use in step.param_uses:
        path, shape = program.paths[use.leaf], program.shapes[use.leaf]
        rounded = program.rounded_params.get(use.leaf)
        if rounded is None or use.view is None or rule.weight is None:
            continue
        block = block_along_sum(rule.weight, len(use.view.free) + 1)
        what = f"product='codes': the groups of the parameter {path!r}"
        if weight_layout_of(shape, use.view, rule.weight) != replace(rounded.layout, rotation=None):
            first = rounded.use
            alike = first.view is not None and stack_ndim(shape, first.view) == stack_ndim(shape, use.view)
            why = (
                f"{what} follow its first product, which sums over {_sum_axes_text(first)}, and are not blocks along "
                f"the sum of another, over {_sum_axes_text(use)}; leave product out of {rule}"
                f"{', or give weight a format with one scale, as int8(group=tensor)' if alike else ''}"
            )
        elif not blocks_fit_axes(use.view, block):
            sizes = " × ".join(str(part.size) for part in use.view.contracting)
            why = (
                f"{what} are no blocks along the sum of {use.where}: blocks of {block} numbers do not "
                f"fit its axes of {sizes}; leave product out of {rule}, or name a group that fits, or group=all"
            )
        else:
            continue
        yield path, why


def _sum_axes_text(use: ParamUse) -> str:
    """The axes of a parameter that a product sums over, which tell products on one line apart, and its place."""
    axes = sorted({part.axis for part in use.view.contracting}) if use.view is not None else ()
    text = " and ".join(f"axis {axis}" for axis in axes) or "no axis"
    return f"{text} of it ({use.where})"


def _check_rules_match(program: QuantizedProgram, elsewhere: Collection[int]) -> None:
    """Refuse rules that match nothing, and those that name a parameter which reaches no product."""
    rules, paths, products = program.rules, program.paths, program.products
    numbers_in_use = {*elsewhere, *(number for number in program.rule_indexes if number is not None)}
    numbers_in_use |= {rules.index(rule) for _, rule in products if rule is not None}
    idle = [rule for number, rule in enumerate(rules) if number not in numbers_in_use]
    scopes = sorted({step.scope for step, _ in products if step.scope})
    names = {name_of_call(step.eqn) for step in program.plan.walk()} if any(rule.axes_of_calls for rule in idle) else ()
    calls = f"; the program has calls: {', '.join(sorted(filter(None, names))[:8])}" if names else ""
    refuse_idle_rules(idle, "parameter and no product", [*paths, *scopes], calls)
    for leaf, number in enumerate(program.rule_indexes):
        if number is None:
            continue
        rule, use = rules[number], program.main_use(leaf)
        if rule.weight is None or not names_last_part(rule.path, paths[leaf]):
            continue
        exemption = program.exemption(leaf)
        if use is not None and (use.view is None or exemption):
            reason = "of which a product takes no axis" if use.is_opaque else "which reaches no product"
            reason = f"which stays as it is: {exemption}" if exemption else reason
            if already := _earlier_rounding_text(use):
                raise ValueError(f"{rule} names the parameter {paths[leaf]!r}, which {already}")
            raise ValueError(
                f"{rule} names the parameter {paths[leaf]!r}, {reason}; it reaches {use.where}. Put "
                f"Rule({path_pattern(paths[leaf])!r}) before it to leave it as it is"
            )


def _check_rules_effect(program: QuantizedProgram, sources: set[Any]) -> None:
    """Refuse fields of rules that round nothing; `sources` are the sources of the scales of activations."""
    for number, rule in enumerate(program.rules):
        own = (use for leaf, (_, use) in program.rounded_params.items() if program.rule_indexes[leaf] == number)
        used = {"bias" if use.kind == "sum" else "weight" for use in own}
        if any(its is rule and not _multiplies_params_alone(step) for step, its in program.products):
            used |= {"activation", "gradient", "input_gradient", "weight_gradient", "matmul", "rotation"}
        source = rule.scale_from
        if source is not None and (source in sources or ("weight" in source.fields and "weight" in used)):
            used.add("scale_from")
        idle = [name for name in ROUNDING_FIELDS if getattr(rule, name) is not None and name not in used]
        if idle:
            hint = "report, under rules that have an effect, shows what each parameter reaches"
            raise ValueError(
                f"{rule}: {', '.join(idle)} has no effect on the parameters and products that it matches: "
                f"{_reach_text(program, number, hint)}"
            )


def check_weight_rules(programs: Sequence[QuantizedProgram]) -> None:
    """Refuse a rule whose weight rounds no parameter in any of the programs of a model.

    Raises:
        ValueError: that names the rule and the operation that a parameter reaches in the first program.
    """
    first = programs[0]
    why = "A parameter is not followed if it is combined with data, such as arguments and state that is no parameter"
    for number, rule in enumerate(first.rules):
        own = (p.use for one in programs for i, p in one.rounded_params.items() if one.rule_indexes[i] == number)
        if rule.weight is not None and all(use.kind == "sum" for use in own):
            raise ValueError(
                f"{rule}: weight rounds no parameter of the methods that have example arguments: "
                f"{_reach_text(first, number, why)}"
            )


def _reach_text(program: QuantizedProgram, number: int, hint: str) -> str:
    """Where a parameter of a rule goes that is not rounded, else the product that it shares; and a hint.

    There is no hint where a function of jchop takes the parameter.
    """
    text = _reach_of_rule(program, number)
    return text if text.endswith(_GIVE_PLAIN_FUNCTION) else f"{text}. {hint}"


def _reach_of_rule(program: QuantizedProgram, number: int) -> str:
    """The text of an error: where the first parameter of a rule goes that is not rounded."""
    rule, numbers, paths = program.rules[number], program.rule_indexes, program.paths
    main_uses = {leaf: program.main_use(leaf) for leaf, n in enumerate(numbers) if n == number}
    exempt = [(leaf, use) for leaf, use in main_uses.items() if leaf not in program.rounded_params and use is not None]
    weights = [(leaf, use) for leaf, use in exempt if use.is_opaque and rule.weight is not None]
    for leaf, use in weights or exempt:
        others = [repr(paths[other]) for other, it in weights if other != leaf and replace(it, leaf=leaf) == use]
        like = f", like {', '.join(others[:3])}{' and more' * (len(others) > 3)}," if others else ""
        why = f", and stays as it is: {exemption}" if (exemption := program.exemption(leaf)) else ""
        return f"the parameter {paths[leaf]!r}{like} {_earlier_rounding_text(use) or f'reaches {use.where}{why}'}"
    for step, _ in program.products:
        leaves = [use.leaf for use in step.param_uses]
        mine = next((leaf for leaf in leaves if numbers[leaf] == number), None)
        if mine is None:
            continue
        shared = numbers[leaves[0]] not in (None, number)
        why = f", whose rule is that of {paths[leaves[0]]!r}" if shared else ""
        why = ", which multiplies parameters alone" if _multiplies_params_alone(step) else why
        return f"the parameter {paths[mine]!r} reaches {step.where}{why}"
    uses = ((leaf, use) for leaf, use in main_uses.items() if use is not None)
    reaches = (f"the parameter {paths[leaf]!r} reaches {use.where} alone" for leaf, use in uses)
    return next(reaches, "no parameter that it matches reaches anything")


def _earlier_rounding_text(use: ParamUse) -> str:
    """That a function of jchop takes a parameter before any product does; empty if none does."""
    by = f"jchop at {use.source}" if use.source else "the rules of the function itself"
    return f"is rounded already, by {by}; {_GIVE_PLAIN_FUNCTION}" if use.primitive.startswith("jchop_") else ""


def _multiplies_params_alone(step: ProductStep) -> bool:
    """Whether both operands of a product come from parameters, and neither from data."""
    return bool(step.uses) and all(step.uses[:2]) and step.call is None


_USE_ORDER = {"product": 0, "rows": 1, "complex": 2, "sum": 3, "opaque": 4, "other": 5}


def _main_use(uses: Sequence[ParamUse]) -> ParamUse | None:
    """The use that says how a parameter is rounded: its first product; else a look-up; else a sum."""

    def kind(use: ParamUse) -> str:
        return "opaque" if use.is_opaque else "complex" if use.kind == "product" and use.why else use.kind

    return min(uses, key=lambda use: _USE_ORDER[kind(use)], default=None)


def _exemption_reason(rule: Rule, uses: Sequence[ParamUse]) -> str:
    """Why a parameter is not rounded as a weight though its rule would; empty if nothing prevents it."""
    use = _main_use(uses)
    if use is not None and use.is_opaque and use.why:
        return use.why
    if use is None or (use.kind != "other" and (rule.weight is None or use.kind == "sum")):
        return ""
    if holds_several_arrays(uses):
        return _SEVERAL_ARRAYS
    return use.why if use.kind == "other" or (rule.weight is not None and rule.weight.scaled is not None) else ""


_GIVE_PLAIN_FUNCTION = "give the plain function"
_SEVERAL_ARRAYS = "it holds several arrays; quantize a function of their tree, and ravel afterwards"
