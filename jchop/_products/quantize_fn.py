"""`quantize_fn`: the products of any function of parameters, rounded by rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp

from jchop._arguments import check_key
from jchop._paths import names_last, nearest_paths
from jchop._products.analysis import Analyst, ProductStep, Use
from jchop._products.call import Call
from jchop._products.codes import block_of
from jchop._products.contraction import Roundings, check_operands, takes_anew
from jchop._products.layout import check_finite
from jchop._products.placement import Kept, Placement, blocks_fit, place
from jchop._products.product import Flipped
from jchop._products.program_report import ParameterRow, ProductRow, ProgramReport
from jchop._products.rule import FIELDS, OPERATIONS, Rule, StreamOffset, as_rules, rule_of, rule_of_parameter
from jchop._products.runner import Quantization
from jchop._products.scale_from import LSQ, DelayedScaling, ScaleFrom
from jchop._products.scales.entries import entry_of, weight_entry
from jchop._products.scales.formulas import span_of, step_of
from jchop._products.scales.kept import Keeping
from jchop._products.scales.observed import Observed, by_turn, over_entries
from jchop._products.scales.sites import HISTORY, SCALE, Scales, Site, sites_of
from jchop._products.weights import Held, Keys, is_packed, numbers_of
from jchop._program.run import interpret
from jchop._program.step import Plan
from jchop.spec import Spec

Array = jax.Array

__all__ = ["QuantizedFunction", "Scales", "check_fields", "quantize_fn"]


def quantize_fn(
    fun: Callable[..., Any], rules: Rule | Iterable[Rule], *, key: Array | None = None
) -> QuantizedFunction:
    """`fun(params, ...)` with the operands of its products rounded by rules, whatever library its parameters are from.

    The program that JAX traces of `fun` says which parameters reach which products (`dot_general`, convolutions,
    `ragged_dot`, and look-ups of rows, as in an embedding), also through reshapes, transposes, slices of stacks, casts,
    masks, and loops. So models with an einsum of their own, experts, scanned layers and tied embeddings need no layer
    of a known class. Each parameter is rounded once, in groups along the axes that its first product sums over, and all
    that reads it gets the rounded numbers.

    Args:
        fun: a function of a pytree of parameters, and of anything else.
        rules: a `Rule`, or several; the first that matches the path of a parameter applies to it and to its products.
            A path is that of `jax.tree_util.keystr`, joined by slashes. `weight` rounds parameters that reach a
            product, `bias` those that are added to data, `activation` the other operand of the product; `gradient`,
            `weight_gradient` and `matmul` are as in `Rule`. A product without a parameter (attention) has the first
            rule that matches its scope (`jax.named_scope`), which rounds both operands to `activation`. `scale_from`
            keeps scales of products with a parameter; they are an argument of each call, `Scales`, which `start`
            begins. `output` and `cache` need layers, and are refused.
        key: a typed key if a rule is stochastic; the keyword argument ``key`` of the result takes its place.

    Returns:
        A `QuantizedFunction`, with the signature of `fun` and one more keyword argument, ``key``. Called with
        parameters in full precision, it rounds them in each call, with straight-through gradients (quantization-aware
        training). Called with what its `pack` gives, it unpacks the codes: the same numbers.

    Raises:
        TypeError: for rules that are none.
        NotImplementedError: for a rule with `output` or `cache`.
        ValueError: when called, for a rule that matches no parameter and no product, that names a parameter which
            reaches no product, or that names axes which an operand has not; for a stochastic rule without a key.

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
    given = as_rules(rules)
    check_fields(given)
    if key is not None:
        check_key("key", key)
    return QuantizedFunction(fun, given, key, all_in_use=True)


def check_fields(rules: Iterable[Rule]) -> None:
    """Refuse fields of rules that a program does not have.

    Raises:
        NotImplementedError: that names them.
    """
    for rule in rules:
        if rule.output is not None:
            raise NotImplementedError(
                f"{rule}: output needs layers of Flax (jchop.nn); in a program, give the product that takes the result "
                "an activation, or round the result by jchop.round_to_format"
            )
        if rule.cache is not None:
            raise NotImplementedError(
                f"{rule}: cache needs the attention of Flax (jchop.nn.quantize without inputs); in a program, pack "
                "keys and values by jchop.quantize"
            )
        if rule.scale_from is not None and rule.product == "codes":
            raise NotImplementedError(
                f"{rule}: codes are multiplied under the scales of each array; leave scale_from or product out"
            )


@dataclass(frozen=True)
class _Program:
    """A function traced and planned for some arguments."""

    plan: Plan
    tree: Any  # of the results
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: dict[int, list[Use]]
    numbers: tuple[int | None, ...]  # of the rule of each parameter
    placements: dict[int, tuple[Placement, Use]]
    runner: Quantization
    products: tuple[tuple[ProductStep, Rule | None], ...]
    sites: dict[int, Site]
    turns: dict[int, tuple[str, ...]]


class QuantizedFunction:
    """A function with rounded products; `quantize_fn` makes it.

    Args:
        fun: the function.
        rules: the rules.
        key: a typed key, or None.
        all_in_use: whether a rule without an effect is an error; not for one of several functions of a model.
        classes: the class of the module that holds each parameter, by the path of the parameter. Default None: of the
            nodes of the pytree.
    """

    def __init__(
        self, fun: Callable[..., Any], rules: tuple[Rule, ...], key: Array | None = None, *, all_in_use: bool = False,
        classes: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.fun, self.rules, self.key, self.all_in_use, self.classes = fun, rules, key, all_in_use, classes
        self._programs: dict[Any, _Program] = {}
        update_wrapper(self, fun, updated=())

    def __call__(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> Any:
        """`fun` of the arguments. `params` may be packed; `key` takes the place of the key of `quantize_fn`.

        `scales`, needed if a rule has `scale_from`, stay as they are, as in evaluation; `update` returns those after
        the call.
        """
        return self._run(Call(params, args, kwargs), scales, "fixed", key)[0]

    def update(
        self, params: Any, *args: Any, scales: Scales, key: Array | None = None, **kwargs: Any
    ) -> tuple[Any, Scales]:
        """A call in training: the result, and the scales after it (ranges and histories follow the data).

        Args:
            params: the parameters.
            *args: arguments as in a call.
            scales: as `start` or the call before returned them. Gradients reach ``scales.learned`` alone.
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
        out, after, _ = self._run(Call(params, args, kwargs), scales, "update", key)
        return out, scales._replace(stats={**scales.stats, **after})

    def start(self, params: Any, *args: Any, key: Array | None = None, from_data: bool = True, **kwargs: Any) -> Scales:
        """The scales that rules keep (`scale_from`), before the first call; empty if none does.

        Learned scales of parameters are those of the format's rule. A learned scale of an activation is that of the
        range of the data in `args`, which `calibrate` finds from more. Ranges and histories are those of no data yet.

        Args:
            params: the parameters, not packed.
            *args: arguments as in a call: arrays, if activations have learned scales, else shapes will do.
            key: as in a call.
            from_data: False leaves the learned scales of activations to `calibrate`. Default True.
            **kwargs: keyword arguments as in a call.
        """
        call = Call(params, args, kwargs)
        program = self._program(call)
        scales = Scales({}, {site.name: site.start() for site in program.sites.values() if site.follows})
        for i, (name, placement, source) in self._kept_weights(program).items():
            value = call.values[i]
            if is_packed(value):
                raise ValueError(f"params: {program.paths[i]!r} is packed; start with the parameters themselves")
            if isinstance(source, LSQ):
                scales.learned[name] = placement.fitted(jnp.asarray(value))
            else:
                assert isinstance(source, DelayedScaling)
                stack = value.shape[: value.ndim - placement.ndim]
                scales.stats[name] = jnp.zeros((*stack, source.length))
        learned = [site for site in program.sites.values() if isinstance(site.source, LSQ)]
        if learned and from_data:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in call.values):
                raise ValueError(f"{learned[0].place}: a learned scale begins with data; pass arrays, not shapes")
            _, seen = self.observe(params, *args, scales=scales, key=key, **kwargs)
            for site in learned:
                spans = by_turn(site, seen[site.name][1], span_of)
                scales.learned[site.name] = over_entries(site, spans, lambda span, s=site: step_of(span, s.spec))
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
        """Scales with fixed ranges of activations, found by running the function on data.

        This applies to products with a parameter whose activation has one scale for the whole array, such as
        ``"int8"``. Pass the result to each call as `scales`. A range of a `MovingAverage` and a learned scale begin
        with it; a history has none.

        Args:
            params: the parameters, packed or not.
            batches: the arguments after `params`, a tuple of several or one, of each call.
            method: as of `jchop.nn.calibrate`.
            combine: as of `jchop.nn.calibrate`.
            scales: those of the call, if rules keep any. Default None: of `start`, for the first batch.
            key: as in a call.
            progress: function of the number of completed batches.

        Raises:
            ValueError: for another method, no batch, or a program without such a product.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> low = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(activation="int8"))
            >>> params = {"w": jnp.ones((2, 2))}
            >>> fixed = low.calibrate(params, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])])
            >>> fixed.stats["w_activation_range"].tolist(), low(params, jnp.array([[9.0, 0.0]]), scales=fixed).tolist()
            ([-3.0, 2.0], [[3.0, 3.0]])
        """
        observed, count = Observed(method, combine), 0
        for count, batch in enumerate(batches, start=1):
            args = batch if isinstance(batch, tuple) else (batch,)
            if scales is None and any(rule.scale_from is not None for rule in self.rules):
                scales = self.start(params, *args, key=key, from_data=False)
            observed.see(self.observe(params, *args, scales=scales, key=key)[1])
            if progress is not None:
                progress(count)
        if not count:
            raise ValueError("batches has no batch")
        return observed.into(scales or Scales({}, {}))

    def observe(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> tuple[Any, dict[str, tuple[Site, Array]]]:
        """The result, and by name the sites of activations with one scale, each with its data before rounding."""
        call = Call(params, args, kwargs)
        out, _, seen = self._run(call, scales or Scales({}, {}), "observe", key)
        sites = self._program(call).sites.values()
        return out, {site.name: (site, seen[site.name]) for site in sites}

    def pack(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> Any:
        """The parameters with those that are rounded stored as codes and scales, in the shapes that they have.

        Args:
            params: the parameters; of a `jax.ShapeDtypeStruct` the shapes of codes and scales come back.
            *args: arguments as in a call; only their shapes count, so `jax.ShapeDtypeStruct` will do.
            scales: if parameters have learned scales, which become part of the packed parameters.
            key: a typed key if a rounding of a parameter is stochastic.
            **kwargs: keyword arguments as in a call.

        Raises:
            ValueError: as in a call; for infinities or NaN in a parameter to be packed.
        """
        return self._packed(Call(params, args, kwargs), scales, key, again=False)

    def pack_more(
        self, params: Any, *args: Any, scales: Scales | None = None, key: Array | None = None, **kwargs: Any
    ) -> Any:
        """As `pack`, of parameters some of which are packed already: these stay as they are."""
        return self._packed(Call(params, args, kwargs), scales, key, again=True)

    def _packed(self, call: Call, scales: Scales | None, key: Array | None, again: bool) -> Any:
        program = self._program(call)
        leaves, kept = list(call.leaves), self._kept_weights(program)
        for i, (placement, _) in program.placements.items():
            value = call.values[i]
            if is_packed(value) and again:
                continue
            if is_packed(value):
                raise ValueError(f"params: {program.paths[i]!r} is packed already; pack the parameters themselves")
            drawn = None
            if placement.spec.rounding.stochastic:
                keys = self._keys(key)
                assert keys is not None
                drawn = jax.random.fold_in(keys.key, i)
            if isinstance(value, jax.ShapeDtypeStruct):
                leaves[call.places[i]] = jax.eval_shape(placement.pack, value, drawn)
                continue
            scale = None
            if i in kept:
                name, _, source = kept[i]
                if isinstance(source, DelayedScaling):
                    rule = self.rules[program.numbers[i] or 0]
                    raise ValueError(f"{rule}: a history of scales is for training; leave scale_from out to pack")
                scale = entry_of(scales, name, placement.fitted, value)
            check_finite(value, f"params: {program.paths[i]!r}")
            leaves[call.places[i]] = placement.pack(jnp.asarray(value), drawn, scale)
        return jax.tree.unflatten(call.tree, leaves)[0][0]

    def report(self, params: Any, *args: Any, **kwargs: Any) -> ProgramReport:
        """What happens to each parameter and each product; nothing is computed.

        Args:
            params: the parameters, or their shapes.
            *args: arguments as in a call, or their shapes.
            **kwargs: keyword arguments as in a call.

        Returns:
            A `ProgramReport`; ``str`` of it is a table.
        """
        call = Call(params, args, kwargs)
        program = self._program(call)
        return ProgramReport(
            tuple(self._parameter_row(program, i) for i in range(len(program.paths))),
            tuple(_product_row(program, step, rule) for step, rule in program.products),
        )

    def traced(self, params: Any, *args: Any, **kwargs: Any) -> tuple[_Program, Call]:
        """The planned program for arguments, and these taken apart: for `jchop.ptq`, which runs it in its own way."""
        call = Call(params, args, kwargs)
        return self._program(call), call

    # -- internals -----------------------------------------------------------------------------------------------------

    def _run(
        self, call: Call, scales: Scales | None, mode: Literal["fixed", "update", "observe"], key: Array | None
    ) -> tuple[Any, dict[str, Array], dict[str, Array]]:
        """The result, the ranges and histories after the call, and the observed arrays."""
        program = self._program(call)
        keys, kept = self._keys(key), self._kept_weights(program)
        keeping = any(site.source is not None for site in program.sites.values())
        keeping |= not all(is_packed(call.values[i]) for i in kept)
        if scales is None and keeping:
            rule = next(rule for rule in self.rules if rule.scale_from is not None)
            raise ValueError(f"scales=None, but {rule} keeps scales: pass scales=low.start(params, ...)")
        if scales is not None and not isinstance(scales, Scales):
            raise TypeError(f"scales={scales!r} must be what start, update or calibrate returns")
        scales = Scales({}, {}) if scales is None else scales
        values, after = list(call.values), {}
        for i in range(call.count):
            entry = None
            if i in kept and not is_packed(values[i]):
                entry, more = weight_entry(*kept[i], jnp.asarray(values[i]), scales)
                after |= more
            values[i] = self._held(program, i, values[i], entry)
        runner = program.runner
        if keeping or mode != "fixed" or scales.stats:
            known = {**scales.stats, **scales.learned}
            runner = Keeping(runner.roundings, program.sites, program.turns, known, mode)
        with jax.disable_jit(False):
            out = interpret(runner, program.plan, keys, values)
        found = runner.found if isinstance(runner, Keeping) else {}
        return jax.tree.unflatten(program.tree, out), {**after, **found}, found

    def _kept_weights(self, program: _Program) -> dict[int, tuple[str, Placement, ScaleFrom]]:
        """The parameters whose scales are kept: the name of the entry, the rounding, the source."""
        kept = {}
        for i, (placement, use) in program.placements.items():
            number = program.numbers[i]
            assert number is not None
            source = self.rules[number].scale_from
            if source is not None and "weight" in source.fields and use.kind != "sum":
                kind = SCALE if isinstance(source, LSQ) else HISTORY
                kept[i] = f"{program.paths[i] or 'params'}_weight_{kind}", placement, source
        return kept

    def _keys(self, key: Array | None) -> Keys | None:
        key = self.key if key is None else key
        if key is not None:
            check_key("key", key)
        stochastic = [rule for rule in self.rules if rule.stochastic]
        if not stochastic:
            return None
        if key is None:
            raise ValueError(
                f"key=None, but {stochastic[0]} rounds stochastically: pass a typed key, for example "
                "key=jax.random.key(0)"
            )
        return Keys(key)

    def _held(self, program: _Program, i: int, value: Any, entry: Kept | None) -> Any:
        if i not in program.placements:
            return numbers_of(value) if is_packed(value) else value
        placement, _ = program.placements[i]
        number = program.numbers[i]
        assert number is not None
        rule = self.rules[number]
        coded = rule.product == "codes" and program.placements[i][1].kind == "product"
        how = Roundings(right=_anew(rule), gradient=rule.gradient, codes=coded)
        twin = rule.weight is not None and takes_anew(how)
        return Held(value if is_packed(value) else jnp.asarray(value), placement, i, twin, coded, entry)

    def _program(self, call: Call) -> _Program:
        signature = call.signature
        found = self._programs.get(signature) if signature is not None else None
        if found is not None:
            return found
        found = self._traced(call)
        plans = (found.plan, *(plan for step in found.plan.walk() for plan in step.inner))
        if signature is not None and not any(isinstance(c, jax.core.Tracer) for plan in plans for c in plan.consts):
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[signature] = found
        return found

    def _traced(self, call: Call) -> _Program:
        def flat(*values: Any) -> Any:
            leaves = list(call.leaves)
            for i, value in zip(call.places, values, strict=True):
                leaves[i] = value
            (params, *args), kwargs = jax.tree.unflatten(call.tree, leaves)
            return self.fun(params, *args, **kwargs)

        with jax.disable_jit(False):
            closed, out = jax.make_jaxpr(flat, return_shape=True)(*call.abstract)
        plan = Analyst().plan(closed, call.facts)
        uses: dict[int, list[Use]] = {}
        for step in plan.walk():
            for use in (use for some in step.uses for use in some):
                uses.setdefault(use.leaf, []).append(use)
        shapes = tuple(tuple(x.shape) for x in call.abstract[: call.count])
        classes = self.classes if self.classes is not None else call.classes
        numbers = tuple(
            rule_of_parameter(path, self.rules, classes.get(path, ""), _operation(_first(uses.get(leaf, ()))))
            for leaf, path in enumerate(call.paths)
        )
        placements = self._placements(call.paths, shapes, numbers, uses)
        products = tuple(self._products(plan, numbers))
        self._check(call.paths, numbers, uses, products)
        roundings = {
            id(step): how
            for step, rule in products
            if rule is not None and (how := self._roundings(step, rule)) is not None
        }
        for step, rule in products:
            if id(step) in roundings and roundings[id(step)][0].codes:
                self._check_codes(step, rule, call.paths, shapes, placements)
        chosen = {id(step): rule for step, rule in products if rule is not None}
        sites, turns = sites_of(plan, roundings, chosen, call.paths)
        if self.all_in_use:
            self._check_effect(numbers, placements, products, {chosen[step].scale_from for step in sites})
        return _Program(
            plan,
            jax.tree.structure(out),
            call.paths,
            shapes,
            uses,
            numbers,
            placements,
            Quantization(roundings),
            products,
            sites,
            turns,
        )

    def _placements(
        self, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], numbers: Sequence[int | None], uses: dict
    ) -> dict[int, tuple[Placement, Use]]:
        found = {}
        for leaf, number in enumerate(numbers):
            use = _first(uses.get(leaf, ()))
            if number is None or use is None:
                continue
            rule = self.rules[number]
            spec = rule.bias if use.kind == "sum" else rule.weight if use.laid is not None else None
            if spec is None:
                continue
            try:
                found[leaf] = place(shapes[leaf], use.laid, spec), use
            except ValueError as error:
                field = "bias" if use.kind == "sum" else "weight"
                raise ValueError(
                    f"{field}={str(spec)!r} of the parameter {paths[leaf]!r}, of shape {shapes[leaf]}, in "
                    f"{use.primitive} at {use.source or 'an unknown line'}, by {rule}: {error}"
                ) from None
        return found

    def _products(self, plan: Plan, numbers: Sequence[int | None]) -> Iterable[tuple[ProductStep, Rule | None]]:
        """The products of a program, each with its rule: that of its first parameter, or of its scope."""
        for step in plan.walk():
            if step.refused:
                yield step, None
            if step.product is None:
                continue
            leaves = [use.leaf for some in step.uses for use in some]
            if leaves:
                chosen = [n for leaf in leaves if (n := numbers[leaf]) is not None]
                yield step, self.rules[chosen[0]] if chosen else None
            elif any(step.data):
                number = rule_of(step.scope, self.rules, operation=OPERATIONS[step.name])
                yield step, None if number is None else self.rules[number]

    def _roundings(self, step: ProductStep, rule: Rule) -> tuple[Roundings, int] | None:
        """How the operands of a product are rounded, and which of them is the weight; None if nothing is."""
        assert step.product is not None
        weights = [i for i in (0, 1) if step.uses and step.uses[i]]
        if len(weights) == 2:
            return None  # a product of parameters alone
        weight = weights[0] if weights else -1
        place = StreamOffset(step.name, step.scope or step.source, rule)
        right = _anew(rule) if weights else rule.activation
        codes = rule.product == "codes" and (rule.activation is not None or right is not None)
        how = Roundings(
            rule.activation, right, rule.gradient, rule.weight_gradient, rule.matmul, place, codes,
        )  # fmt: skip
        if (how.left is None and not how.backward and not how.codes) or _scales_complex(step, how):
            return None
        check_operands(Flipped(step.product) if weight == 0 else step.product, how)
        return how, weight

    def _check_codes(
        self,
        step: ProductStep,
        rule: Rule | None,
        paths: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        placements: Mapping[int, tuple[Placement, Use]],
    ) -> None:
        """Refuse the codes of a parameter whose groups are not blocks along the sum of this product."""
        for use in (use for some in step.uses for use in some):
            found = placements.get(use.leaf)
            if found is None or use.laid is None or rule is None or rule.weight is None:
                continue
            same = place(shapes[use.leaf], use.laid, rule.weight) == found[0]
            if not (same and blocks_fit(use.laid, block_of(rule.weight, len(use.laid.kept) + 1))):
                raise ValueError(
                    f"product='codes': the groups of the parameter {paths[use.leaf]!r} follow its first product, at "
                    f"{found[1].source or 'an unknown line'}, and are not blocks along the sum of that at "
                    f"{use.source or 'an unknown line'}; leave product out of {rule}, or name a group that divides "
                    "its axes"
                )

    def _check(
        self,
        paths: Sequence[str],
        numbers: Sequence[int | None],
        uses: dict[int, list[Use]],
        products: Sequence[tuple[ProductStep, Rule | None]],
    ) -> None:
        spoken = {number for number in numbers if number is not None}
        spoken |= {self.rules.index(rule) for _, rule in products if rule is not None}
        idle = [rule for number, rule in enumerate(self.rules) if number not in spoken]
        if idle:
            scopes = sorted({step.scope for step, _ in products if step.scope})
            raise ValueError(
                f"{', '.join(map(str, idle))} matches no parameter and no product, or only such as an earlier rule "
                f"matches{nearest_paths([rule.path for rule in idle], [*paths, *scopes])}"
            )
        for leaf, number in enumerate(numbers):
            if number is None:
                continue
            rule, use = self.rules[number], _first(uses.get(leaf, ()))
            if rule.weight is None or not names_last(rule.path, paths[leaf]):
                continue
            if use is not None and use.laid is None:
                raise ValueError(
                    f"{rule} names the parameter {paths[leaf]!r}, which reaches no product; it reaches {use.primitive} "
                    f"at {use.source or 'an unknown line'}. Put Rule({paths[leaf]!r}) before it to leave it as it is"
                )

    def _check_effect(
        self,
        numbers: Sequence[int | None],
        placements: Mapping[int, tuple[Placement, Use]],
        products: Sequence[tuple[ProductStep, Rule | None]],
        kept: set[Any],
    ) -> None:
        """Refuse fields of rules that round nothing; `kept` are the sources of the scales of activations."""
        for number, rule in enumerate(self.rules):
            used = {
                "bias" if use.kind == "sum" else "weight"
                for leaf, (_, use) in placements.items()
                if numbers[leaf] == number
            }
            if any(chosen is rule for _, chosen in products):
                used |= {"activation", "gradient", "weight_gradient", "matmul"}
            source = rule.scale_from
            if source is not None and (source in kept or ("weight" in source.fields and "weight" in used)):
                used.add("scale_from")
            idle = [name for name in FIELDS if getattr(rule, name) is not None and name not in used]
            if idle:
                raise ValueError(
                    f"{rule}: {', '.join(idle)} has no effect on the parameters and products that it matches; report, "
                    "under rules that have an effect, shows what each parameter reaches"
                )

    def _parameter_row(self, program: _Program, i: int) -> ParameterRow:
        number, use = program.numbers[i], _first(program.uses.get(i, ()))
        placement = program.placements.get(i)
        spec: Spec | None = placement[0].spec if placement else None
        shape = program.shapes[i]
        return ParameterRow(
            program.paths[i],
            shape,
            "" if number is None else str(self.rules[number]),
            "" if use is None else use.primitive,
            "" if use is None else use.kind,
            "" if spec is None else str(spec),
            "" if use is None else use.source,
        )


def _product_row(program: _Program, step: ProductStep, rule: Rule | None) -> ProductRow:
    how = program.runner.roundings.get(id(step))
    weights = tuple(program.paths[use.leaf] for some in step.uses for use in some)
    fields = {} if how is None else {
        "activation": how[0].left, "gradient": how[0].gradient, "weight_gradient": how[0].weight_gradient,
        "matmul": how[0].matmul, "product": "codes" if how[0].codes else None,
        "scale_from": None if (site := program.sites.get(id(step))) is None else site.source,
    }  # fmt: skip
    refused = step.refused or ("complex" if how is None and _is_complex(step) else "")
    return ProductRow(
        step.scope, f"{step.name} ({refused})" if refused else step.name, weights, "" if rule is None else str(rule),
        {name: str(value) for name, value in fields.items() if value is not None}, step.source,
    )  # fmt: skip


def _is_complex(step: ProductStep) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in step.eqn.invars[:2])


def _scales_complex(step: ProductStep, how: Roundings) -> bool:
    """Whether complex operands would have scales, which formats give to real numbers alone."""
    specs = (how.left, how.right, how.gradient, how.weight_gradient)
    return _is_complex(step) and any(spec is not None and spec.scaled is not None for spec in specs)


def _anew(rule: Rule) -> Spec | None:
    """The rounding of a weight, unless its scales are kept: then it is rounded once for all products."""
    kept = rule.scale_from is not None and "weight" in rule.scale_from.fields
    return None if kept else rule.weight


#: The most traced programs that a function keeps.
_MOST_PROGRAMS = 64

_ORDER = {"product": 0, "rows": 1, "sum": 2, "other": 3}


def _operation(use: Use | None) -> str:
    """What computes with a parameter, as a rule's `operation` names it."""
    return OPERATIONS.get(use.primitive, "") if use is not None and use.laid is not None else ""


def _first(uses: Sequence[Use]) -> Use | None:
    """The use that says how a parameter is rounded: its first product; else a look-up; else a sum."""
    return min(uses, key=lambda use: _ORDER[use.kind], default=None)
