"""`Quantized`: a module of Linen whose program runs under rules, whatever the classes of its layers.

One interceptor in the traced call does the rest: results of modules, norms under rules of their own,
and caches of keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.scope import in_filter
from flax.linen import module as linen_module
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from jchop._common.checks import check
from jchop._common.settings import split_prng_key
from jchop._quantized.products.operand_layout import check_finite, check_layout_axes, norm_scale_spec, round_in_layout
from jchop._quantized.products.rule import Location, Rule, is_stochastic, param_rule_index, rule_index
from jchop._quantized.products.scale_from import LSQ
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.call import (
    CallArguments,
    batch_arguments,
    check_batches,
    enumerate_batches,
    is_packed_param,
    map_batches,
)
from jchop._quantized.program.quantized_program import check_weight_rules
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.scale_slots import Scales, merge_scales, scales_after_packing
from jchop._quantized.program.weight_layout import WeightLayout, weight_layout_of
from jchop._quantized.quantize_fn import QuantizedFunction, check_data_arguments
from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize, quantize
from jchop._storage._array import refuse_qarray_dicts
from jchop.nn._shared.cache import cache_with_token, empty_packed_cache

LinenPath = tuple[str, ...]

#: The collection that Linen's attention keeps its keys and values in.
CACHE_COLLECTION = "cache"
_CACHE_VARIABLES = ("cached_key", "cached_value")
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)
_ATTENTIONS = (nn.MultiHeadDotProductAttention, nn.MultiHeadAttention)
#: The operations of layers with their parameters, as a rule's `operation` names them.
_OPERATIONS: Mapping[type, str] = MappingProxyType(
    {
        **dict.fromkeys((nn.Dense, nn.DenseGeneral, nn.Einsum, *_ATTENTIONS), "dot_general"),
        **dict.fromkeys((nn.Conv, nn.ConvTranspose), "conv"),
        nn.Embed: "embedding",
    }
)
_ARGUMENT_ARRAY_TYPES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


class ModuleCall(NamedTuple):
    """A module that runs: its class, and the shapes of its own parameters by name."""

    cls: type
    shapes: Mapping[str, tuple[int, ...]]

    def rule_number(self, path: LinenPath, rules: Sequence[Rule]) -> int | None:
        """The index of the first rule that matches the module; None if none does."""
        return rule_index("/".join(path), rules, self.cls.__name__, _OPERATIONS.get(self.cls, ""))

    @property
    def is_layer(self) -> bool:
        """Whether a rule may round something in it that is neither a parameter nor a product."""
        return self.cls in (*_NORMS, *_ATTENTIONS)


def module_calls(
    module: nn.Module, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: Any
) -> dict[LinenPath, ModuleCall]:
    """The modules that run, by path, from a call that computes nothing.

    Args:
        module: of Linen.
        variables: unpacked.
        args: of the module; only shapes of arrays count.
        rngs: streams of keys.
        kwargs: as of Linen's `apply`.
    """
    calls: dict[LinenPath, ModuleCall] = {}
    leaves, structure = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARGUMENT_ARRAY_TYPES)]

    def record_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        shapes = {name: value.shape for name, value in _own_params(context.module).items()}
        calls[context.module.path] = ModuleCall(type(context.module), shapes)
        return y

    def run(variables: Any, rngs: Any, arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        values = [next(remaining) if isinstance(leaf, _ARGUMENT_ARRAY_TYPES) else leaf for leaf in leaves]
        return module.apply(variables, *jax.tree.unflatten(structure, values), rngs=rngs, **kwargs)

    with nn.intercept_methods(record_call):
        jax.eval_shape(run, variables, rngs, arrays)
    return calls


# -- norms -------------------------------------------------------------------------------------------------------------


class NormRounding(NamedTuple):
    """A norm whose rule decides norms alone. It rounds its scale and its input, which no product takes.

    Args:
        number: of its rule.
        scale: how its scale is rounded; None if it is not.
    """

    number: int
    scale: WeightLayout | None


def may_round_norms(rules: Sequence[Rule], paths: Sequence[LinenPath]) -> bool:
    """Whether a rule may decide norms alone: only a call of the module shows it.

    Args:
        rules: the rules.
        paths: of all parameters.
    """
    scaled = {path[:-1] for path in paths if path[-1] == "scale"}
    decided = {param_rule_index("/".join(path), rules) for path in paths if path[:-1] not in scaled}
    return any(
        rule.layer is not None
        or rule.operation is not None
        or ((rule.weight is not None or rule.activation is not None) and number not in decided)
        for number, rule in enumerate(rules)
    )


def norm_roundings(rules: Sequence[Rule], calls: Mapping[LinenPath, ModuleCall]) -> dict[LinenPath, NormRounding]:
    """The norms that rules round, by path: rules that decide no other layer."""
    numbers = {path: call.rule_number(path, rules) for path, call in calls.items()}
    wide = {numbers[path] for path, call in calls.items() if call.shapes and call.cls not in _NORMS}
    norms = {}
    for path, number in numbers.items():
        if number is None or number in wide or calls[path].cls not in _NORMS:
            continue
        rule, shape = rules[number], calls[path].shapes.get("scale")
        spec = norm_scale_spec(rule.weight)
        if spec is not None and shape is not None:
            check_layout_axes("weight", spec, len(shape), Location(calls[path].cls.__name__, "/".join(path), rule))
        scale = None if spec is None or shape is None else weight_layout_of(shape, None, spec)
        if scale is not None or rule.activation is not None:
            norms[path] = NormRounding(number, scale)
    return norms


# -- the interceptor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRoundings:
    """An interceptor for `flax.linen.intercept_methods` that rounds inputs of norms, and results, and packs caches.

    Args:
        rules: the rules.
        norms: the norms whose input is rounded.
        used: filled with the rules, by number, and their fields that had an effect.
        results: whether results and inputs are rounded, or caches packed alone.
    """

    rules: Sequence[Rule]
    norms: Mapping[LinenPath, NormRounding] = field(default_factory=dict)
    used: set[tuple[int, str]] = field(default_factory=set)
    results: bool = True

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """The result of a layer's call, with the input of a norm, the cache of attention and the result rounded."""
        layer = context.module
        owner = ModuleCall(type(layer), {})
        number = owner.rule_number(layer.path, self.rules)
        if number is None or context.method_name not in ("__call__", "attend"):
            return call(*args, **kwargs)
        rule = self.rules[number]
        round_array = partial(self._round, layer, number)
        if self.results and rule.activation is not None and layer.path in self.norms:
            args = (round_array("activation", rule.activation, args[0]), *args[1:])
        if owner.cls in _ATTENTIONS and rule.cache is not None:
            self.used.add((number, "cache"))
            call = partial(_call_with_packed_cache, call, layer, rule.cache) if layer.decode else call
        y = call(*args, **kwargs)
        if not self.results or rule.output is None or not _own_params(layer):
            return y
        return jax.tree.map(partial(round_array, "output", rule.output), y)

    def _round(self, layer: nn.Module, number: int, name: str, spec: Spec, x: Array) -> Array:
        rule = self.rules[number]
        self.used.add((number, name))
        check_layout_axes(name, spec, x.ndim, Location(type(layer).__name__, "/".join(layer.path), rule))
        keys = split_prng_key(layer.make_rng(rule.stochastic_stream)) if is_stochastic(spec) else (None, None)
        return round_in_layout(None, x, spec, *keys)

    def check_fields(self) -> None:
        """Refuse a rule with an `output` or a `cache` that no layer of the call has had.

        Raises:
            ValueError: that names the field.
        """
        for number, rule in enumerate(self.rules):
            idle = [name for name in ("output", "cache") if getattr(rule, name) is not None]
            if idle := [name for name in idle if (number, name) not in self.used]:
                raise ValueError(
                    f"{rule}: {', '.join(idle)} has no effect on any layer that runs. It is of "
                    f"{'attention' if 'cache' in idle else 'modules with parameters of their own'}"
                )


def _own_params(layer: nn.Module) -> dict[str, Array]:
    """The parameters of a module, without the parameters of modules in it."""
    params = nn.meta.unbox(dict(layer.variables).get("params", {}))
    return {name: value for name, value in params.items() if isinstance(value, jax.Array)}


def _call_with_packed_cache(call: Callable[..., Any], layer: Any, spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """A call of attention that decodes: it packs the token into its cache, or begins one.

    Linen's own code puts the new token into arrays in full precision, so it is shown those. The function of attention
    takes the token out of them again, and into the packed ones.
    """
    if not layer.has_variable(CACHE_COLLECTION, _CACHE_VARIABLES[0]):
        y = call(*args, **kwargs)
        for name in _CACHE_VARIABLES:
            value = layer.get_variable(CACHE_COLLECTION, name)
            layer.put_variable(CACHE_COLLECTION, name, empty_packed_cache(value.shape, value.dtype, spec))
        return y
    caches = [layer.get_variable(CACHE_COLLECTION, name) for name in _CACHE_VARIABLES]
    if not all(isinstance(q, QArray) for q in caches):
        raise ValueError(
            f"the cache of {type(layer).__name__} at {'/'.join(layer.path)!r} is not packed: take the one that "
            "`init` of the quantized module returns"
        )
    for name, q in zip(_CACHE_VARIABLES, caches, strict=True):
        layer.put_variable(CACHE_COLLECTION, name, dequantize(q))
    index, attention_fn = layer.get_variable(CACHE_COLLECTION, "cache_index"), layer.attention_fn

    @wraps(attention_fn)  # Linen passes only the arguments of its signature
    def attend(query: Array, *full: Array, **options: Any) -> Array:
        numbers = []
        for name, cache, array in zip(_CACHE_VARIABLES, caches, full, strict=True):
            token = lax.dynamic_slice_in_dim(array, index, 1, array.ndim - 3)
            cache = cache_with_token(cache, quantize(token.astype(cache.dtype), spec), index)
            layer.put_variable(CACHE_COLLECTION, name, cache)
            numbers.append(dequantize(cache, array.dtype))
        return attention_fn(query, *numbers, **options)

    object.__setattr__(layer, "attention_fn", attend)  # a layer of Linen is made anew for each call
    return call(*args, **kwargs)


# -- the module -------------------------------------------------------------------------------------------------------

#: The collection of ranges and histories; learned scales are parameters.
SCALE_COLLECTION = "scale_stats"
#: By the path of a norm, how it is rounded.
Norms = tuple[tuple[LinenPath, NormRounding], ...]


@dataclass(frozen=True)
class Quantized:
    """A module of Linen whose program runs under rules; a result of `jchop.nn.quantize`.

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
        >>> heads = jc.nn.quantize(Heads(), jc.Rule(weight="int4(group=32)"))
        >>> variables = heads.init(jax.random.key(0), jnp.ones((1, 64)))
        >>> packed = heads.pack(variables, jnp.ones((1, 64)))
        >>> packed["params"]["w"].nbytes, heads.apply(packed, jnp.ones((1, 64))).shape
        (1280, (1, 4, 8))
    """

    module: nn.Module
    rules: tuple[Rule, ...]

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the variables of the module, with the scales that rules keep (`start`) and a packed cache.

        Parameters equal the module's, bit for bit.

        Args:
            rngs: a key, or streams of keys by name, including the streams of stochastic rules.
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
        """Adds the scales that rules keep (`scale_from`) to variables of the module, for example trained ones.

        Learned scales are parameters beside the parameters that they scale (``kernel_weight_scale``). Ranges and
        histories are in the collection ``"scale_stats"``, as `jchop.quantize_fn` names them.

        Args:
            variables: variables of the module, not packed; scales among them are kept. An empty packed cache is added
                if they have no ``"cache"`` and layers that decode have a rule with `cache`. It is for sequences as long
                as in `args`.
            args: arguments of the module: data, if activations have learned scales.
            rngs: streams of keys by name.
            kwargs: as of `apply`.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> from flax import linen
            >>> trained = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 8)))
            >>> rule = jc.Rule(weight="int4(group=4)", scale_from=jc.LSQ())
            >>> variables = jc.nn.quantize(linen.Dense(3), rule).start(trained, jnp.ones((1, 8)))
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
        function, operands, old_scales, _ = self._prepare(whole, args, rngs, kwargs)
        new_scales = function.start(*operands, key=self.key(rngs))
        return {**variables, **_param_and_scale_collections(operands[0], merge_scales(new_scales, old_scales))}

    def calibrate(
        self, variables: Any, batches: Iterable[Any], *, method: str = "minmax", combine: str = "widest",
        rngs: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Runs the module on data and returns variables with fixed ranges of activations, as `jchop.nn.calibrate`.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            batches: inputs of the module: tuples, or the only argument.
            method: as in `jchop.nn.calibrate`.
            combine: as in `jchop.nn.calibrate`.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        calls = [batch_arguments(batch) for _, batch in enumerate_batches(batches)]
        function, (params, state, *_), old_scales, _ = self._prepare(variables, calls[0], rngs, kwargs)
        scales = function.calibrate(
            params, [(state, args, rngs, kwargs) for args in calls], method=method, combine=combine, scales=old_scales,
            key=self.key(rngs),
        )  # fmt: skip
        return {**variables, **_param_and_scale_collections(params, scales)}

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Returns the result of the module under the rules, with the arguments of Linen's `apply`, ``method`` too.

        A call with ``mutable=["scale_stats"]`` updates ranges and histories, and returns them with the result, like
        training mode in NNX. A call without it does not change them. With ``mutable=["cache"]`` the new token is added
        to a packed cache. A rule whose weight rounds nothing in this call is no error, since another method may use the
        parameter; `pack` refuses it.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            args: arguments of the module.
            rngs: streams of keys by name, with the stream that a stochastic rule names. With a stream ``"dropout"``
                adapters have the dropout of their rules.
            kwargs: keyword arguments of the module and of Linen's `apply`.

        Raises:
            ValueError: as `jchop.quantize_fn`. For an `output` or a `cache` without effect.
        """
        key, adapters = self.key(rngs), lora_adapters(variables)
        if not isinstance(rngs, Mapping) or "dropout" not in rngs:
            still = {path: replace(one, rule=replace(one.rule, dropout=0.0)) for path, one in adapters.items()}
            variables = {**variables, LORA_COLLECTION: nest_params(still)} if adapters else variables
        elif key is None and any(one.rule.dropout for one in adapters.values()):
            key = rngs["dropout"]
            typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            key = key if typed else jax.random.wrap_key_data(key)
        function, operands, scales, _ = self._prepare(variables, args, rngs, kwargs)
        if not scales.stats or not in_filter(kwargs.get("mutable", False), SCALE_COLLECTION):
            call_scales = scales if self._keeps or scales.stats else None
            return function(*operands, scales=call_scales, key=key)
        (y, mutated), scales = function.update(*operands, scales=scales, key=key)
        return y, {**mutated, SCALE_COLLECTION: nest_params(scales.stats)}

    def pack(
        self,
        variables: Any,
        *args: Any,
        batches: Iterable[Any] | None = None,
        steps: Any = None,
        return_report: bool = False,
        rngs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Packs the rounded parameters of the variables, in their own shapes and boxes, for `apply`.

        The learned scale of a parameter becomes a part of it.

        Args:
            variables: variables of the module, with the scales that rules keep.
            args: example arguments, or their shapes; not with `batches`.
            batches: arguments of the module, tuples or the only argument. Weights are rounded with these data. Default
                None.
            steps: as in `jchop.QuantizedFunction.pack`.
            return_report: whether a `jchop.ptq.PtqReport` is returned, too; it needs `batches`. Default False.
            rngs: streams of keys by name.
            kwargs: as of `apply`.

        Raises:
            ValueError: as `apply`. For a rule with a weight that rounds nothing, or with a `DelayedScaling`.
        """
        key = self.key(rngs)
        if batches is not None:
            check(not args, "batches: they are the arguments; leave out the example arguments")
            check_batches(batches, repeated=False)
            if self._needs_calls(self._split_variables(variables)[0]):
                batches = [*batches]
                args = batch_arguments(batches[0]) if batches else ()
            function, (params, state, *_), _, norms = self._prepare(variables, args, rngs, kwargs)
            calls = map_batches(batches, lambda args: (state, args, rngs, kwargs))
            params, report = function.pack(params, batches=calls, steps=steps, return_report=True, key=key)
            params = _map_norm_scales(params, norms, self.rules, key, packs=True)
            packed = {name: value for name, value in variables.items() if name != SCALE_COLLECTION} | {"params": params}
            return (packed, report) if return_report else packed
        check_data_arguments(steps=steps, return_report=return_report)
        function, operands, scales, norms = self._prepare(variables, args, rngs, kwargs)
        check_weight_rules([function.resolved(*operands)])
        packed_params = function.pack(*operands, scales=scales, key=key)
        packed_params = _map_norm_scales(packed_params, norms, self.rules, key, packs=True)
        return {**variables, **_param_and_scale_collections(packed_params, scales_after_packing(scales))}

    def report(
        self, variables: Any, *args: Any, rngs: Any = None, platform: str | None = None, **kwargs: Any
    ) -> ProgramReport:
        """Lists the roundings of each parameter and each product; arguments as in `pack`, and a platform."""
        function, operands, _, norms = self._prepare(variables, args, rngs, kwargs)
        report = function.report(*operands, platform=platform)
        specs = {"/".join((*path, "scale")): str(norm.scale.spec) for path, norm in norms if norm.scale is not None}
        rows = (replace(row, spec=specs.get(row.path, row.spec)) for row in report.parameters)
        return replace(report, parameters=tuple(rows))

    def traced(self, variables: Any, args: Any, rngs: Any, kwargs: Any) -> tuple[Any, CallArguments]:
        """Returns the planned program, with the call of its function."""
        function, operands, _, _ = self._prepare(variables, args, rngs, kwargs)
        return function.traced(*operands)

    @property
    def _keeps(self) -> bool:
        return any(rule.scale_from is not None for rule in self.rules)

    def _split_variables(self, variables: Any) -> tuple[Any, dict[str, Any], Scales]:
        """The parameters, the other collections, and the kept scales."""
        collections = dict(variables)
        params = linen_params_with_adapters(collections)
        collections.pop("params", None)
        if lora_adapters(collections):
            del collections[LORA_COLLECTION]
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

    def _prepare(
        self, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]
    ) -> tuple[QuantizedFunction, tuple[Any, ...], Scales, Norms]:
        """The module as a function under rules, its arguments, the kept scales, and the norms that are rounded."""
        refuse_qarray_dicts("variables", variables)
        calls: dict[LinenPath, ModuleCall] = {}
        params, state, scales = self._split_variables(variables)
        if self._needs_calls(params):
            calls = module_calls(self.module, dequantize(variables), args, rngs, kwargs)
        classes = {"/".join((*path, name)): call.cls.__name__ for path, call in calls.items() for name in call.shapes}
        # A product without a parameter is in the scope of a module, which begins with the class of the outermost one.
        classes |= {"/".join((type(self.module).__name__, *path)): call.cls.__name__ for path, call in calls.items()}
        packed_names = {name for name, leaf in flat_params(params).items() if is_packed_param(nn.meta.unbox(leaf))}
        norms = tuple(
            (path, norm._replace(scale=None) if "/".join((*path, "scale")) in packed_names else norm)
            for path, norm in norm_roundings(self.rules, calls).items()
        )
        # A kept trace would not call interceptors of the caller again.
        is_intercepted = bool(getattr(linen_module, "_global_interceptor_stack", True))
        make: Any = _new_linen_function if is_intercepted else _cached_linen_function
        try:
            hash(self.module)
        except TypeError:  # a field that cannot be compared
            make = _new_linen_function
        of_layers = frozenset(call.rule_number(path, self.rules) for path, call in calls.items() if call.is_layer)
        context = str(nn.get_logical_axis_rules())
        function = make(self.module, self.rules, norms, tuple(classes.items()), of_layers, context)
        return function, (params, state, args, rngs, kwargs), scales, norms

    def key(self, rngs: Any) -> jax.Array | None:
        """The key of the program, of the stream that a stochastic rule names; None without a stochastic rule."""
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
        params = _map_norm_scales(params, norms, rules, rngs, packs=False)
        with nn.intercept_methods(roundings):
            y = module.apply({**state, "params": params}, *args, rngs=rngs, **kwargs)
        roundings.check_fields()
        return y

    return QuantizedFunction(pure, of_products, classes=dict(classes), elsewhere=of_layers)


#: Of equal modules and rules one function, which is traced once.
_cached_linen_function = lru_cache(maxsize=256)(_new_linen_function)


def _map_norm_scales(params: Any, norms: Norms, rules: tuple[Rule, ...], rngs: Any, packs: bool) -> Any:
    """Parameters with the scales of norms rounded, or packed; each scale of a stack of norms by itself."""
    scaled = [(path, norm.number, norm.scale) for path, norm in norms if norm.scale is not None]
    leaves = flat_params(params) if scaled else {}
    for i, (path, number, layout) in enumerate(scaled):
        leaf, key = leaves[name := "/".join((*path, "scale"))], None
        if layout.spec.rounding.stochastic:
            stream = rngs[rules[number].stochastic_stream] if isinstance(rngs, Mapping) else rngs
            key = jax.random.fold_in(stream, i)
        x = nn.meta.unbox(leaf)
        if packs:
            check_finite(x, f"params: {name!r}")
            new: Any = layout.pack(x, key)
        else:
            new = layout.round(x, key, None if key is None else jax.random.fold_in(key, 1))
        leaves[name] = with_box_of(leaf, new)
    return nest_params(leaves) if scaled else params


#: The collection of adapters, each at the path of its parameter.
LORA_COLLECTION = "lora"


def lora_adapters(variables: Any) -> dict[str, LoraAdapter]:
    """The adapters among variables, by the paths of their parameters."""
    collection = variables.get(LORA_COLLECTION, {})
    leaves = flat_params(collection) if isinstance(collection, Mapping) else {}
    return leaves if all(isinstance(leaf, LoraAdapter) for leaf in leaves.values()) else {}


def linen_params_with_adapters(variables: Any) -> Any:
    """The parameters among variables, parameters with adapters as `AdaptedParam`.

    Raises:
        ValueError: for an adapter of a parameter that is not there.
    """
    params, adapters = variables.get("params", {}), lora_adapters(variables)
    leaves = flat_params(params) if adapters else {}
    for path, adapter in adapters.items():
        check(path in leaves, f"variables: {path!r} has an adapter, and no parameter")
        value = nn.meta.unbox(leaves[path])
        base = value.base if isinstance(value, AdaptedParam) else value
        leaves[path] = with_box_of(leaves[path], AdaptedParam(base, adapter))
    return nest_params(leaves) if adapters else params


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
    is_adapted = lambda leaf: isinstance(leaf, AdaptedParam)  # noqa: E731
    params = jax.tree.map(lambda leaf: leaf.base if is_adapted(leaf) else leaf, params, is_leaf=is_adapted)
    if scales.learned:
        params = nest_params({**flat_params(params), **scales.learned})
    return {"params": params, **({SCALE_COLLECTION: nest_params(scales.stats)} if scales.stats else {})}


#: The name of a learned scale, and the name of its parameter.
_LEARNED_SCALE_NAME = re.compile(r"(.+)_(?:weight|activation)_scale(?:_[0-9]+)?")
