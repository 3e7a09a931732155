"""A traced program with the rule of each parameter and each product, and the roundings that these ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jchop._checks import check_choice
from jchop._paths import names_last, nearest_paths, pattern_of, pattern_of_all
from jchop._products.codes import block_of
from jchop._products.contraction import Roundings, check_operands
from jchop._products.matrices import MatrixLayout
from jchop._products.placement import Placement, blocks_fit, place, stack_of
from jchop._products.product import Conv, Flipped
from jchop._products.rule import FIELDS, OPERATIONS, Rule, StreamOffset, rule_of, rule_of_parameter
from jchop._products.runner import Quantization
from jchop._products.scale_from import LSQ, ScaleFrom
from jchop._products.scales.sites import HISTORY, SCALE, Site, sites_of
from jchop._products.traced.adaptable import adaptable
from jchop._products.traced.analysis import Analyst, ProductStep, Use, holds_several, is_complex
from jchop._products.traced.call import Call
from jchop._products.traced.report import ParameterRow, ProductRow, ProgramReport
from jchop._products.traced.turned import turn_of, turned
from jchop._products.units import PLATFORMS, operands_on
from jchop._program.step import Plan
from jchop.spec import Spec

__all__ = ["Resolved", "check_weights", "resolve", "weight_rounding"]


@dataclass(frozen=True)
class Resolved:
    """A function traced for some arguments, and what rules do to its parameters and products.

    Args:
        plan: the program.
        tree: the structure of its results.
        rules: all rules.
        paths: of each parameter.
        shapes: of each parameter.
        uses: what computes with a parameter, by its number; parameters that nothing takes are absent.
        rule_indexes: which of the rules applies to each parameter; None for none.
        placements: how a parameter is rounded and by which use, by its number; parameters that stay are absent.
        runner: the roundings of the products, by their steps.
        products: the products in the order of the program, each with its rule.
        slots: the activations with scales from elsewhere than their data, by the steps of their products.
        entries_of_scan: the entries of the kept scales of a loop's body, by its step.
    """

    plan: Plan
    tree: Any
    rules: tuple[Rule, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: Mapping[int, Sequence[Use]]
    rule_indexes: tuple[int | None, ...]
    placements: Mapping[int, tuple[Placement, Use]]
    runner: Quantization
    products: tuple[tuple[ProductStep, Rule | None], ...]
    slots: dict[int, Site]
    entries_of_scan: dict[int, tuple[str, ...]]

    @property
    def keeps_constants(self) -> bool:
        """Whether no constant of the program belongs to a trace that ends, so that later calls can run it."""
        plans = (self.plan, *(plan for step in self.plan.walk() for plan in step.inner))
        return not any(isinstance(c, jax.core.Tracer) for plan in plans for c in plan.consts)

    @property
    def rounds(self) -> bool:
        """Whether a call rounds anything."""
        return bool(self.placements or self.runner.roundings)

    @cached_property
    def adaptable(self) -> dict[int, MatrixLayout | str]:
        """The parameters that reach products, by number: each as a matrix, or why it can have no adapter."""
        return adaptable(self.plan, self.shapes)

    def rule_of(self, leaf: int) -> Rule:
        """The rule of a parameter that is rounded."""
        number = self.rule_indexes[leaf]
        assert number is not None
        return self.rules[number]

    @cached_property
    def rules_by_path(self) -> dict[str, Rule]:
        """The rules of the parameters, by the paths with which the names of entries begin."""
        pairs = zip(self.paths, self.rule_indexes, strict=True)
        return {path or "params": self.rules[number] for path, number in pairs if number is not None}

    def weights_with_state(self) -> dict[int, tuple[str, Placement, ScaleFrom]]:
        """The parameters whose scales are kept: the name of the entry, the rounding, the source."""
        states = {}
        names: dict[str, int] = {}
        for leaf, (placement, use) in self.placements.items():
            source = self.rule_of(leaf).scale_from
            if source is not None and "weight" in source.fields and use.kind != "sum":
                kind = SCALE if isinstance(source, LSQ) else HISTORY
                name = f"{self.paths[leaf] or 'params'}_weight_{kind}"
                count = names[name] = names.get(name, -1) + 1  # {"a": {"b": w}, "a/b": v} has one path twice
                states[leaf] = f"{name}_{count}" if count else name, placement, source
        return states

    def report(self, platform: str | None = None) -> ProgramReport:
        """A row for each parameter and each product.

        Raises:
            TypeError, ValueError: for another platform than None and those of `OPERANDS_BY_PLATFORM`.
        """
        if platform is not None:
            check_choice("platform", platform, tuple(PLATFORMS))
        return ProgramReport(
            tuple(self._parameter_row(leaf) for leaf in range(len(self.paths))),
            tuple(self._product_row(step, rule, platform) for step, rule in self.products),
        )

    def _parameter_row(self, leaf: int) -> ParameterRow:
        number, use, placement = self.rule_indexes[leaf], _first(self.uses.get(leaf, ())), self.placements.get(leaf)
        return ParameterRow(
            self.paths[leaf],
            self.shapes[leaf],
            "" if number is None else str(self.rules[number]),
            "" if use is None else use.primitive,
            "" if use is None else use.kind,
            "" if placement is None else str(placement[0].spec),
            "" if use is None else use.source,
            "" if number is None or placement is not None else _why_left(self.rules[number], self.uses.get(leaf, ())),
        )

    def _product_row(self, step: ProductStep, rule: Rule | None, platform: str | None) -> ProductRow:
        roundings, _ = self.runner.roundings.get(id(step), (None, -1))
        slot = self.slots.get(id(step))
        fields = {} if roundings is None else {
            "activation": roundings.left, "gradient": roundings.gradient,
            "input_gradient": roundings.input_gradient, "weight_gradient": roundings.weight_gradient,
            "matmul": roundings.matmul, "rotation": roundings.rotation,
            "product": "codes" if roundings.codes else None, "scale_from": None if slot is None else slot.source,
        }  # fmt: skip
        refusal = step.refusal or ("complex" if roundings is None and is_complex(step.eqn) else "")
        return ProductRow(
            step.scope,
            f"{step.name} ({refusal})" if refusal else step.name,
            tuple(self.paths[use.leaf] for some in step.uses for use in some),
            "" if rule is None else str(rule),
            {name: str(value) for name, value in fields.items() if value is not None},
            step.source,
            "" if platform is None or rule is None or refusal else _operands(step, rule, platform),
        )


def _operands(step: ProductStep, rule: Rule, platform: str) -> str:
    """The types of the operands of a product on a platform."""
    carrier = jnp.result_type(*(v.aval.dtype for v in step.eqn.invars[:2])).name
    weights = sum(map(bool, step.uses))
    matrices = not isinstance(step.product, Conv)
    return f"{carrier} x {carrier}" if weights == 2 else operands_on(platform, rule, carrier, weights == 1, matrices)


def weight_rounding(rule: Rule) -> Spec | None:
    """The rounding of a weight for each product, unless its scales are kept: then it is rounded once for all."""
    has_state = rule.scale_from is not None and "weight" in rule.scale_from.fields
    return None if has_state else rule.weight


def resolve(
    fun: Callable[..., Any], rules: tuple[Rule, ...], call: Call, classes: Mapping[str, str], *, all_in_use: bool,
    whole: bool = True,
) -> Resolved:  # fmt: skip
    """Trace a function for the arguments of a call, and find what the rules do to it.

    Args:
        fun: the function.
        rules: the rules.
        call: the arguments.
        classes: the class of the module that holds each parameter, by the path of the parameter.
        all_in_use: whether a rule without an effect is an error.
        whole: whether a rule that matches nothing is an error.

    Raises:
        ValueError: for rules that match nothing, have no effect, or cannot be applied.
    """

    def flat(*values: Any) -> Any:
        (params, *args), kwargs = call.with_values(values)
        return fun(params, *args, **kwargs)

    flat.__wrapped__ = fun  # type: ignore[attr-defined] # JAX's errors name it
    with jax.disable_jit(False):
        jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*call.abstract)
    analyst = Analyst()
    plan = analyst.plan(jaxpr, call.facts)
    uses: dict[int, list[Use]] = {leaf: [use] for leaf, use in analyst.data_changes.items()}
    for step in plan.walk():
        for use in (*(use for some in step.uses for use in some), *step.opaque_uses):
            uses.setdefault(use.leaf, []).append(use)
    shapes = tuple(tuple(x.shape) for x in call.abstract[: call.count])
    numbers = tuple(
        rule_of_parameter(path, rules, classes.get(path, ""), _operation(_first(uses.get(leaf, ()))))
        for leaf, path in enumerate(call.paths)
    )
    results = frozenset(o.leaf for fact in plan.out if fact is not None for o in fact.origins)
    placements = _placements(rules, call.paths, shapes, numbers, uses, results)
    products = tuple(_products(plan, rules, numbers))
    if whole:
        _check_matches(rules, call.paths, numbers, uses, products)
    rule_of_step = {id(step): rule for step, rule in products if rule is not None}
    by_leaf = {leaf: rules[n] for leaf in placements if (n := numbers[leaf]) is not None}
    roundings, refusals = {}, {}
    for step, rule in products:
        roundings_of_step = None if rule is None else _roundings(step, rule, placements)
        roundings_of_step = turned(step, roundings_of_step, placements, call.paths, by_leaf)
        if rule is not None and roundings_of_step is not None:
            roundings[id(step)] = roundings_of_step
            if roundings_of_step[0].codes:
                refusals |= dict(_without_blocks(step, rule, call.paths, shapes, placements))
    if refusals:
        path, *others = refusals
        pattern = pattern_of_all(refusals, (path for path in call.paths if path not in refusals))
        more = f"; {len(others)} more are like it: put Rule({pattern!r}, ...) without product before that rule"
        raise ValueError(f"{refusals[path]}{more * bool(others)}")
    slots, entries_of_scan = sites_of(plan, roundings, rule_of_step, call.paths)
    if all_in_use:
        _check_effect(
            rules, call.paths, numbers, uses, placements, products, {rule_of_step[step].scale_from for step in slots}
        )
    return Resolved(
        plan,
        jax.tree.structure(out),
        rules,
        call.paths,
        shapes,
        uses,
        numbers,
        placements,
        Quantization(roundings, call.paths),
        products,
        slots,
        entries_of_scan,
    )


def _placements(
    rules: Sequence[Rule],
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    numbers: Sequence[int | None],
    uses: Mapping[int, Sequence[Use]],
    results: frozenset[int],
) -> dict[int, tuple[Placement, Use]]:
    layouts = {}
    for leaf, number in enumerate(numbers):
        use = _first(uses.get(leaf, ()))
        if number is None or use is None:
            continue
        rule = rules[number]
        spec = rule.bias if use.kind == "sum" else rule.weight if use.view is not None else None
        if spec is None or _why_left(rule, uses[leaf]):
            continue
        try:
            placement = place(shapes[leaf], use.view, spec)
        except ValueError as error:
            field = "bias" if use.kind == "sum" else "weight"
            raise ValueError(
                f"{field}={str(spec)!r} of the parameter {paths[leaf]!r}, of shape {shapes[leaf]}, in "
                f"{use.primitive} at {use.source or 'an unknown line'}, by {rule}: {error}"
            ) from None
        rotation = turn_of(rule, paths[leaf], shapes[leaf], uses[leaf], leaf in results)
        layouts[leaf] = placement if rotation is None else replace(placement, rotation=rotation), use
    return layouts


def _products(
    plan: Plan, rules: Sequence[Rule], numbers: Sequence[int | None]
) -> Iterator[tuple[ProductStep, Rule | None]]:
    """The products of a program, each with its rule: that of its first parameter, or of its scope."""
    for step in plan.walk():
        if step.refusal:
            yield step, None
        if step.product is None:
            continue
        leaves = [use.leaf for some in step.uses for use in some]
        if leaves:
            rule_numbers = [n for leaf in leaves if (n := numbers[leaf]) is not None]
            yield step, rules[rule_numbers[0]] if rule_numbers else None
        elif any(step.data):
            number = rule_of(step.scope, rules, operation=OPERATIONS[step.name])
            yield step, None if number is None else rules[number]


def _roundings(step: ProductStep, rule: Rule, placements: Mapping[int, Any]) -> tuple[Roundings, int] | None:
    """How the operands of a product are rounded, and which of them is the weight; None if nothing is."""
    assert step.product is not None
    if _of_parameters_alone(step):
        return None
    weights = [i for i in (0, 1) if step.uses and step.uses[i]]
    weight = weights[0] if weights else -1
    place = StreamOffset(step.name, step.scope or step.source, rule)
    right = weight_rounding(rule) if weights else rule.activation
    if weights and not any(use.leaf in placements for use in step.uses[weight]):
        right = None  # no weight of its is rounded
    codes = rule.product == "codes" and (rule.activation is not None or right is not None)
    roundings = Roundings(
        rule.activation, right, rule.gradient, rule.input_gradient, rule.weight_gradient, rule.matmul, rule.rotation,
        place, codes,
    )  # fmt: skip
    idle = (
        roundings.left is None and not roundings.backward and not roundings.codes and roundings.forward_rotation is None
    )
    if idle or _scales_complex(step, roundings):
        return None
    check_operands(Flipped(step.product) if weight == 0 else step.product, roundings)
    return roundings, weight


def _without_blocks(
    step: ProductStep,
    rule: Rule,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    placements: Mapping[int, tuple[Placement, Use]],
) -> Iterator[tuple[str, str]]:
    """The parameters whose groups are not blocks along the sum of this product, so that codes are refused; and why."""
    for use in (use for some in step.uses for use in some):
        placement_and_use = placements.get(use.leaf)
        if placement_and_use is None or use.view is None or rule.weight is None:
            continue
        block = block_of(rule.weight, len(use.view.free) + 1)
        what = f"product='codes': the groups of the parameter {paths[use.leaf]!r}"
        line = use.source or "an unknown line"
        if place(shapes[use.leaf], use.view, rule.weight) != replace(placement_and_use[0], rotation=None):
            first, shape = placement_and_use[1], shapes[use.leaf]
            alike = first.view is not None and stack_of(shape, first.view) == stack_of(shape, use.view)
            why = (
                f"{what} follow its first product, which sums over {_summed(first)}, and are not blocks along the sum "
                f"of another, over {_summed(use)}; leave product out of {rule}"
                f"{', or give weight a format with one scale, as int8(group=tensor)' if alike else ''}"
            )
        elif not blocks_fit(use.view, block):
            sizes = " × ".join(str(part.size) for part in use.view.contracting)
            why = (
                f"{what} are no blocks along the sum of the product at {line}: blocks of {block} numbers do not "
                f"fit its axes of {sizes}; leave product out of {rule}, or name a group that fits, or group=all"
            )
        else:
            continue
        yield paths[use.leaf], why


def _summed(use: Use) -> str:
    """The axes of a parameter that a product sums over, which tell products on one line apart, and its place."""
    axes = sorted({part.axis for part in use.view.contracting}) if use.view is not None else ()
    text = " and ".join(f"axis {axis}" for axis in axes) or "no axis"
    return f"{text} of it ({use.primitive} at {use.source or 'an unknown line'})"


def _check_matches(
    rules: Sequence[Rule],
    paths: Sequence[str],
    numbers: Sequence[int | None],
    uses: Mapping[int, Sequence[Use]],
    products: Sequence[tuple[ProductStep, Rule | None]],
) -> None:
    """Refuse rules that match nothing, and those that name a parameter which reaches no product."""
    numbers_in_use = {number for number in numbers if number is not None}
    numbers_in_use |= {rules.index(rule) for _, rule in products if rule is not None}
    idle = [rule for number, rule in enumerate(rules) if number not in numbers_in_use]
    if idle:
        scopes = sorted({step.scope for step, _ in products if step.scope})
        raise ValueError(
            f"{', '.join(map(str, idle))} matches no parameter and no product, or only such as an earlier rule "
            f"matches{nearest_paths([rule.path for rule in idle], [*paths, *scopes])}"
        )
    for leaf, number in enumerate(numbers):
        if number is None:
            continue
        rule, use = rules[number], _first(uses.get(leaf, ()))
        if rule.weight is None or not names_last(rule.path, paths[leaf]):
            continue
        exemption = _why_left(rule, uses.get(leaf, ()))
        if use is not None and (use.view is None or exemption):
            reason = "of which a product takes no axis" if use.is_opaque else "which reaches no product"
            reason = f"which stays as it is: {exemption}" if exemption else reason
            if already := _rounded_already(use):
                raise ValueError(f"{rule} names the parameter {paths[leaf]!r}, which {already}")
            raise ValueError(
                f"{rule} names the parameter {paths[leaf]!r}, {reason}; it reaches {use.primitive} at "
                f"{use.source or 'an unknown line'}. Put Rule({pattern_of(paths[leaf])!r}) before it to leave it as "
                "it is"
            )


def _check_effect(
    rules: Sequence[Rule],
    paths: Sequence[str],
    numbers: Sequence[int | None],
    uses: Mapping[int, Sequence[Use]],
    placements: Mapping[int, tuple[Placement, Use]],
    products: Sequence[tuple[ProductStep, Rule | None]],
    sources: set[Any],
) -> None:
    """Refuse fields of rules that round nothing; `sources` are the sources of the scales of activations."""
    for number, rule in enumerate(rules):
        used = {
            "bias" if use.kind == "sum" else "weight"
            for leaf, (_, use) in placements.items()
            if numbers[leaf] == number
        }  # fmt: skip
        if any(rule_of_product is rule and not _of_parameters_alone(step) for step, rule_of_product in products):
            used |= {"activation", "gradient", "input_gradient", "weight_gradient", "matmul", "rotation"}
        source = rule.scale_from
        if source is not None and (source in sources or ("weight" in source.fields and "weight" in used)):
            used.add("scale_from")
        idle = [name for name in FIELDS if getattr(rule, name) is not None and name not in used]
        if idle:
            reach = _reached(number, rules, paths, numbers, uses, placements, products)
            hint = "report, under rules that have an effect, shows what each parameter reaches"
            raise ValueError(
                f"{rule}: {', '.join(idle)} has no effect on the parameters and products that it matches: {reach}"
                f"{'' if reach.endswith(_GIVE_PLAIN) else f'. {hint}'}"
            )


def check_weights(programs: Sequence[Resolved]) -> None:
    """Refuse a rule whose weight rounds no parameter in any of the programs of a model.

    Raises:
        ValueError: that names the rule and what a parameter reaches in the first program.
    """
    first = programs[0]
    for number, rule in enumerate(first.rules):
        if rule.weight is None or any(map(partial(_has_weight, number), programs)):
            continue
        reach = _reached(
            number, first.rules, first.paths, first.rule_indexes, first.uses, first.placements, first.products
        )
        why = (
            "A parameter is not followed if it is combined with data, such as arguments and state that is no parameter"
        )
        raise ValueError(
            f"{rule}: weight rounds no parameter of the methods that have example arguments: {reach}"
            f"{'' if reach.endswith(_GIVE_PLAIN) else f'. {why}'}"
        )


def _has_weight(number: int, program: Resolved) -> bool:
    return any(
        program.rule_indexes[leaf] == number and use.kind != "sum" for leaf, (_, use) in program.placements.items()
    )


def _reached(
    number: int,
    rules: Sequence[Rule],
    paths: Sequence[str],
    numbers: Sequence[int | None],
    uses: Mapping[int, Sequence[Use]],
    placements: Mapping[int, tuple[Placement, Use]],
    products: Sequence[tuple[ProductStep, Rule | None]],
) -> str:
    """What a parameter of a rule reaches that is not rounded; else the product that it shares."""
    main_uses = {leaf: _first(uses.get(leaf, ())) for leaf, n in enumerate(numbers) if n == number}
    exempt = [(leaf, use) for leaf, use in main_uses.items() if leaf not in placements and use is not None]
    weights = [(leaf, use) for leaf, use in exempt if use.is_opaque and rules[number].weight is not None]
    for leaf, use in weights or exempt:
        others = [repr(paths[other]) for other, it in weights if other != leaf and replace(it, leaf=leaf) == use]
        like = f", like {', '.join(others[:3])}{' and more' * (len(others) > 3)}," if others else ""
        why = f", and stays as it is: {exemption}" if (exemption := _why_left(rules[number], uses[leaf])) else ""
        line = use.source or "an unknown line"
        reaches = _rounded_already(use) or f"reaches {use.primitive} at {line}{why}"
        return f"the parameter {paths[leaf]!r}{like} {reaches}"
    for step, _ in products:
        leaves = [use.leaf for some in step.uses for use in some]
        mine = next((leaf for leaf in leaves if numbers[leaf] == number), None)
        if mine is None:
            continue
        why = ""
        if _of_parameters_alone(step):
            why = ", which multiplies parameters alone"
        elif numbers[leaves[0]] not in (None, number):
            why = f", whose rule is that of {paths[leaves[0]]!r}"
        return f"the parameter {paths[mine]!r} reaches {step.name} at {step.source or 'an unknown line'}{why}"
    for leaf, n in enumerate(numbers):
        if n == number and (use := _first(uses.get(leaf, ()))) is not None:
            return f"the parameter {paths[leaf]!r} reaches {use.primitive} at {use.source or 'an unknown line'} alone"
    return "no parameter that it matches reaches anything"


def _rounded_already(use: Use) -> str:
    """That a function of jchop takes a parameter before any product does; empty if none does."""
    by = f"jchop at {use.source}" if use.source else "the rules of the function itself"
    return f"is rounded already, by {by}; {_GIVE_PLAIN}" if use.primitive.startswith("jchop_") else ""


def _of_parameters_alone(step: ProductStep) -> bool:
    """Whether both operands of a product come from parameters, and neither from data."""
    return bool(step.uses) and all(step.uses[:2])


def _scales_complex(step: ProductStep, roundings: Roundings) -> bool:
    """Whether complex operands would have scales, which formats give to real numbers alone."""
    return is_complex(step.eqn) and any(spec is not None and spec.scaled is not None for spec in roundings.specs)


_ORDER = {"product": 0, "rows": 1, "complex": 2, "sum": 3, "opaque": 4, "other": 5}


def _operation(use: Use | None) -> str:
    """The operation that takes a parameter, as a rule's `operation` names it."""
    return OPERATIONS.get(use.primitive, "") if use is not None and use.view is not None else ""


def _first(uses: Sequence[Use]) -> Use | None:
    """The use that says how a parameter is rounded: its first product; else a look-up; else a sum."""

    def kind(use: Use) -> str:
        return "opaque" if use.is_opaque else "complex" if use.kind == "product" and use.why else use.kind

    return min(uses, key=lambda use: _ORDER[kind(use)], default=None)


def _why_left(rule: Rule, uses: Sequence[Use]) -> str:
    """Why a parameter is not rounded as a weight though its rule would; empty if nothing prevents it."""
    use = _first(uses)
    if use is not None and use.is_opaque and use.why:
        return use.why
    if use is None or (use.kind != "other" and (rule.weight is None or use.kind == "sum")):
        return ""
    if holds_several(uses):
        return _SEVERAL
    return use.why if use.kind == "other" or (rule.weight is not None and rule.weight.scaled is not None) else ""


_GIVE_PLAIN = "give the plain function"
_SEVERAL = "it holds several arrays; quantize a function of their tree, and ravel afterwards"
