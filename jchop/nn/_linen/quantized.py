"""`Quantized`: a module of Linen whose program runs under rules, whatever the classes of its layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
from flax import linen as nn
from flax.core.scope import in_filter
from flax.linen import module as linen_module
from flax.traverse_util import flatten_dict, unflatten_dict

from jchop._common.on_demand import load_name
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.products.rule import Rule
from jchop._quantized.products.scale_from import LSQ
from jchop._quantized.program.call import CallArguments, batch_arguments, enumerate_batches
from jchop._quantized.program.lazy_params import is_packed_param
from jchop._quantized.program.quantized_program import check_weight_rules
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.scale_slots import Scales, merge_scales, scales_after_packing
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop.nn._linen.layers import (
    CACHE_COLLECTION,
    LayerRoundings,
    LinenPath,
    ModuleCall,
    NormRounding,
    may_round_norms,
    module_calls,
    norm_roundings,
)
from jchop.storage import dequantize_params
from jchop.storage._array import refuse_qarray_dicts

#: The collection of ranges and histories; learned scales are parameters.
SCALE_COLLECTION = "scale_stats"
#: By the path of a norm, how it is rounded.
Norms = tuple[tuple[LinenPath, NormRounding], ...]


@dataclass(frozen=True)
class Quantized:
    """A module of Linen whose program runs under rules; a result of `jchop.nn.linen.quantize`.

    Args:
        module: the module.
        rules: the rules.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> class Heads(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         w = self.param("w", linen.initializers.ones, (64, 4, 8))
        ...         return jnp.einsum("bd,dhk->bhk", x, w)
        >>> heads = jc.nn.linen.quantize(Heads(), jc.Rule(weight="int4(group=32)"))
        >>> variables = heads.init(jax.random.key(0), jnp.ones((1, 64)))
        >>> packed = heads.pack(variables, jnp.ones((1, 64)))
        >>> packed["params"]["w"].nbytes, heads.apply(packed, jnp.ones((1, 64))).shape
        (1280, (1, 4, 8))
    """

    module: nn.Module
    rules: tuple[Rule, ...]

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables of the module, and those that rules with `scale_from` keep (`start`); a packed cache.

        Parameters are those of the module, bit for bit.

        Args:
            rngs: a key, or streams of keys by name, including those of stochastic rules.
            args: arguments of the module. Pass data, because their range is the initial value of an activation's
                learned scale.
            kwargs: keyword arguments of the module and of Linen's `init`.
        """
        with nn.intercept_methods(LayerRoundings(self.rules, results=False)):
            variables = self.module.init(rngs, *args, **kwargs)
        if not self._keeps:
            return variables
        options = {name: value for name, value in kwargs.items() if name not in ("mutable", "capture_intermediates")}
        return self.start(variables, *args, rngs=rngs, **options)

    def start(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Variables of the module, for example trained ones, with the scales that rules keep (`scale_from`).

        Learned scales are parameters beside those that they are for (``kernel_weight_scale``); ranges and histories
        are in the collection ``"scale_stats"``, as `jchop.quantize_fn` names them.

        Args:
            variables: variables of the module, not packed; scales among them are kept. If they have no ``"cache"``, and
                layers that decode have a rule with `cache`, an empty packed cache is added, for sequences as long as
                those in `args`.
            args: arguments of the module: data, if activations have learned scales.
            rngs: streams of keys by name.
            kwargs: as of `apply`.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> from flax import linen
            >>> trained = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 8)))
            >>> rule = jc.Rule(weight="int4(group=4)", scale_from=jc.LSQ())
            >>> variables = jc.nn.linen.quantize(linen.Dense(3), rule).start(trained, jnp.ones((1, 8)))
            >>> {name: value.shape for name, value in sorted(variables["params"].items())}
            {'bias': (3,), 'kernel': (8, 3), 'kernel_weight_scale': (2, 3)}
        """
        whole = {name: collection for name, collection in variables.items() if name != CACHE_COLLECTION}
        if any(rule.cache is not None for rule in self.rules):
            kwargs = {**kwargs, "mutable": True}  # without a cache layers process whole sequences, and begin one
        if "mutable" in kwargs and CACHE_COLLECTION not in variables:
            with nn.intercept_methods(LayerRoundings(self.rules, results=False)):
                made = self.module.apply(whole, *args, rngs=rngs, **kwargs)[1]
            variables = {**variables, **{name: made[name] for name in made if name == CACHE_COLLECTION}}
        if not self._keeps:
            return variables
        params, state, old_scales = self._split_variables(whole)
        function = self._function(whole, args, rngs, kwargs)
        new_scales = function.start(params, state, args, rngs, kwargs, key=self.key(rngs))
        return {**variables, **_param_and_scale_collections(params, merge_scales(new_scales, old_scales))}

    def calibrate(
        self, variables: Any, batches: Iterable[Any], *, method: str = "minmax", combine: str = "widest",
        rngs: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Variables with fixed ranges of activations, found by running the module on data; as `jchop.nn.calibrate`.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            batches: inputs of the module, a tuple of several or one each.
            method: as of `jchop.nn.calibrate`.
            combine: as of `jchop.nn.calibrate`.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        params, state, old_scales = self._split_variables(variables)
        calls = [batch_arguments(batch) for _, batch in enumerate_batches(batches)]
        function = self._function(variables, calls[0], rngs, kwargs)
        scales = function.calibrate(
            params, [(state, args, rngs, kwargs) for args in calls], method=method, combine=combine, scales=old_scales,
            key=self.key(rngs),
        )  # fmt: skip
        return {**variables, **_param_and_scale_collections(params, scales)}

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the module under the rules, with the arguments of Linen's `apply`, ``method`` too.

        A call with ``mutable=["scale_stats"]`` updates ranges and histories, and returns them with the result, like
        training mode in NNX; a call without it does not change them. A packed cache takes the new token with
        ``mutable=["cache"]``. A rule whose weight rounds nothing in this call is no error, since another method may use
        the parameter; `pack` refuses it.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            args: arguments of the module.
            rngs: streams of keys by name, with that which a stochastic rule names.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: as `jchop.quantize_fn`; for an `output` or a `cache` without effect.
        """
        return self.apply_with_key(self.key(rngs), variables, args, rngs, kwargs)

    def apply_with_key(self, key: jax.Array | None, variables: Any, args: Any, rngs: Any, kwargs: Any) -> Any:
        """As `apply`, with the key of the program: without stochastic rules it is for the dropout of adapters."""
        params, state, scales = self._split_variables(variables)
        function = self._function(variables, args, rngs, kwargs)
        if not scales.stats or not in_filter(kwargs.get("mutable", False), SCALE_COLLECTION):
            call_scales = scales if self._keeps or scales.stats else None
            return function(params, state, args, rngs, kwargs, scales=call_scales, key=key)
        (y, mutated), scales = function.update(params, state, args, rngs, kwargs, scales=scales, key=key)
        return y, {**mutated, SCALE_COLLECTION: nest_params(scales.stats)}

    def pack(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The variables with the rounded parameters stored packed, in their own shapes and boxes, for `apply`.

        The learned scale of a parameter becomes a part of it.

        Args:
            variables: variables of the module, with the scales that rules keep.
            args: example arguments, of which only shapes are used.
            rngs: streams of keys by name.
            kwargs: as of `apply`.

        Raises:
            ValueError: as `apply`; for a rule with a weight that rounds nothing, or with a `DelayedScaling`.
        """
        params, state, scales = self._split_variables(variables)
        norms, function = self._norms_and_function(variables, args, rngs, kwargs)
        check_weight_rules([function.resolved(params, state, args, rngs, kwargs)])
        key = self.key(rngs)
        packed_params = function.pack(params, state, args, rngs, kwargs, scales=scales, key=key)
        packed_params = _map_norm_scales(packed_params, norms, self.rules, key, _pack_norm_scale)
        return {**variables, **_param_and_scale_collections(packed_params, scales_after_packing(scales))}

    def quantize_with_data(
        self,
        variables: Any,
        batches: Iterable[Any],
        steps: Any = None,
        *,
        sequential: bool | None = None,
        rngs: Any = None,
        progress: Callable[[int], object] | None = None,
    ) -> tuple[Any, Any]:
        """The packed variables, rounded with data, and a report, as `jchop.ptq.quantize` gives them.

        Args:
            variables: variables of the module.
            batches: arguments of the module: tuples, or the only argument.
            steps: as of `jchop.ptq.quantize`.
            sequential: as of `jchop.ptq.quantize`.
            rngs: streams of keys by name.
            progress: called with the number of batches that were run.
        """
        data = load_name("jchop.ptq._models", "ModelData")(batches, steps, sequential, progress)
        params, state, _ = self._split_variables(variables)
        function = self._function(variables, data.first() if self._needs_calls(params) else (), rngs, {})
        packed_params, report = data.round(function, params, lambda args: (state, args, rngs, {}), self.key(rngs))
        others = {name: collection for name, collection in variables.items() if name != SCALE_COLLECTION}
        return {**others, "params": packed_params}, report

    def report(
        self, variables: Any, *args: Any, rngs: Any = None, platform: str | None = None, **kwargs: Any
    ) -> ProgramReport:
        """What happens to each parameter and each product; arguments as those of `pack`, and a platform."""
        params, state, _ = self._split_variables(variables)
        norms, function = self._norms_and_function(variables, args, rngs, kwargs)
        report = function.report(params, state, args, rngs, kwargs, platform=platform)
        specs = {"/".join((*path, "scale")): str(norm.scale.spec) for path, norm in norms if norm.scale is not None}
        rows = (replace(row, spec=specs.get(row.path, row.spec)) for row in report.parameters)
        return replace(report, parameters=tuple(rows))

    def traced(self, variables: Any, args: Any, rngs: Any, kwargs: Any) -> tuple[Any, CallArguments]:
        """The planned program, with the call of its function."""
        params, state, _ = self._split_variables(variables)
        return self._function(variables, args, rngs, kwargs).traced(params, state, args, rngs, kwargs)

    @property
    def _keeps(self) -> bool:
        return any(rule.scale_from is not None for rule in self.rules)

    def _split_variables(self, variables: Any) -> tuple[Any, dict[str, Any], Scales]:
        """The parameters, the other collections, and the kept scales."""
        collections = dict(variables)
        params = collections.pop("params", {})
        if CACHE_COLLECTION in collections:  # as arrays: a function of parameters is given numbers for codes
            collections[CACHE_COLLECTION] = jax.tree.flatten(collections[CACHE_COLLECTION])
        stats: dict[str, Any] = flatten_dict(dict(collections.pop(SCALE_COLLECTION, {})), sep="/")  # type: ignore[assignment]
        if not any(isinstance(rule.scale_from, LSQ) for rule in self.rules):
            return params, collections, Scales({}, stats)
        leaves = flat_params(params)
        learned_scales = {
            name: value
            for name, value in leaves.items()
            if (match := _LEARNED_SCALE_NAME.fullmatch(name)) and match[1] in leaves
        }
        return (
            nest_params({name: v for name, v in leaves.items() if name not in learned_scales}),
            collections,
            Scales(learned_scales, stats),
        )

    def _needs_calls(self, params: Any) -> bool:
        """Whether rules are for classes, or for norms alone, which a call of the module shows."""
        return may_round_norms(self.rules, [tuple(name.split("/")) for name in flat_params(params)])

    def _function(self, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]) -> QuantizedFunction:
        return self._norms_and_function(variables, args, rngs, kwargs)[1]

    def _norms_and_function(
        self, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]
    ) -> tuple[Norms, QuantizedFunction]:
        """The norms that are rounded, and the module as a function of parameters under rules."""
        refuse_qarray_dicts("variables", variables)
        calls: dict[LinenPath, ModuleCall] = {}
        params = dict(variables).get("params", {})
        if self._needs_calls(params):
            calls = module_calls(self.module, dequantize_params(variables), args, rngs, kwargs)
        classes = {"/".join((*path, name)): call.cls.__name__ for path, call in calls.items() for name in call.shapes}
        # A product without a parameter is in the scope of a module, which begins with the class of the outermost one.
        classes |= {"/".join((type(self.module).__name__, *path)): call.cls.__name__ for path, call in calls.items()}
        packed_names = {name for name, leaf in flat_params(params).items() if is_packed_param(nn.meta.unbox(leaf))}
        norms = tuple(
            (path, norm._replace(scale=None) if "/".join((*path, "scale")) in packed_names else norm)
            for path, norm in norm_roundings(self.rules, calls).items()
        )
        make: Any = _new_linen_function if _is_intercepted() else _cached_linen_function
        try:
            hash(self.module)
        except TypeError:  # a field that cannot be compared
            make = _new_linen_function
        of_layers = frozenset(call.rule_number(path, self.rules) for path, call in calls.items() if call.is_layer)
        context = str(nn.get_logical_axis_rules())
        return norms, make(self.module, self.rules, norms, tuple(classes.items()), of_layers, context)

    def key(self, rngs: Any) -> jax.Array | None:
        """The key of the program, of the stream that a stochastic rule names; None without such a rule."""
        name = next((rule.stochastic_stream for rule in self.rules if rule.stochastic), None)
        if name is None:
            return None
        if not isinstance(rngs, Mapping) or name not in rngs:
            rule = next(rule for rule in self.rules if rule.stochastic)
            raise ValueError(f"{rule} rounds stochastically: pass rngs={{{name!r}: a key}}")
        return rngs[name]


def _new_linen_function(
    module: nn.Module,
    rules: tuple[Rule, ...],
    norms: Norms,
    classes: tuple[tuple[str, str], ...],
    of_layers: frozenset[int],
    axis_rules: str,
) -> QuantizedFunction:
    """A module as a function of parameters, the other variables, arguments, keys and keywords.

    It is traced once, under the rules for logical axes of that moment, `axis_rules`.
    """
    in_norms = {norm.number for _, norm in norms}
    of_products = tuple(
        replace(rule, weight=None, activation=None) if number in in_norms else rule for number, rule in enumerate(rules)
    )

    def pure(params: Any, state: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]) -> Any:
        roundings = LayerRoundings(rules, dict(norms))
        if CACHE_COLLECTION in state:
            leaves, tree = state[CACHE_COLLECTION]
            state = {**state, CACHE_COLLECTION: jax.tree.unflatten(tree, leaves)}
        params = _map_norm_scales(params, norms, rules, rngs, _round_norm_scale)
        with nn.intercept_methods(roundings):
            y = module.apply({**state, "params": params}, *args, rngs=rngs, **kwargs)
        roundings.check_fields()
        return y

    return QuantizedFunction(pure, of_products, classes=dict(classes), elsewhere=of_layers)


def _is_intercepted() -> bool:
    """Whether calls of modules have interceptors of the caller, which a kept trace would not call again."""
    return bool(getattr(linen_module, "_global_interceptor_stack", True))


#: Of equal modules and rules one function, which is traced once.
_cached_linen_function = lru_cache(maxsize=256)(_new_linen_function)


def _map_norm_scales(params: Any, norms: Norms, rules: tuple[Rule, ...], rngs: Any, change: Callable[..., Any]) -> Any:
    """Parameters with the scales of norms changed; those of a stack of norms each by itself."""
    scaled = [(path, norm) for path, norm in norms if norm.scale is not None]
    if not scaled:
        return params
    leaves = flat_params(params)
    for i, (path, norm) in enumerate(scaled):
        leaf, key, assert_scale = leaves[name := "/".join((*path, "scale"))], None, norm.scale
        assert assert_scale is not None
        if assert_scale.spec.rounding.stochastic:
            stream = rngs[rules[norm.number].stochastic_stream] if isinstance(rngs, Mapping) else rngs
            key = jax.random.fold_in(stream, i)
        leaves[name] = with_box_of(leaf, change(name, assert_scale, nn.meta.unbox(leaf), key))
    return nest_params(leaves)


def _round_norm_scale(name: str, layout: Any, x: Any, key: jax.Array | None) -> Any:
    return layout.round(x, key, None if key is None else jax.random.fold_in(key, 1))


def _pack_norm_scale(name: str, layout: Any, x: Any, key: jax.Array | None) -> Any:
    check_finite(x, f"params: {name!r}")
    return layout.pack(x, key)


def flat_params(params: Any) -> dict[str, Any]:
    """Parameters by path, with their boxes."""
    is_box = lambda _, x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    return flatten_dict(dict(params), sep="/", is_leaf=is_box)  # type: ignore[return-value]


def nest_params(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat_params`."""
    return unflatten_dict(dict(leaves), sep="/")


def with_box_of(leaf: Any, value: Any) -> Any:
    """Another value of a parameter, in its box if it has one."""
    return leaf.replace_boxed(value) if isinstance(leaf, nn.meta.AxisMetadata) else value


def _param_and_scale_collections(params: Any, scales: Scales) -> dict[str, Any]:
    """The collections that hold parameters and kept scales."""
    if scales.learned:
        params = nest_params({**flat_params(params), **scales.learned})
    return {"params": params, **({SCALE_COLLECTION: nest_params(scales.stats)} if scales.stats else {})}


#: The name of a learned scale, and that of its parameter.
_LEARNED_SCALE_NAME = re.compile(r"(.+)_(?:weight|activation)_scale(?:_[0-9]+)?")
