"""`Quantized`: a module of Linen with the rules of its layers; `Packed`: a parameter that is stored packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export

from jchop._common.checks import check_choice
from jchop._common.settings import split_prng_key
from jchop._quantized.products.chip_operands import OPERANDS_BY_PLATFORM
from jchop._quantized.products.codes import CodedArray, param_codes
from jchop._quantized.products.operand_layout import OperandLayout, check_finite, round_in_layout
from jchop._quantized.products.rule import Rule, is_stochastic
from jchop._quantized.products.scale_from import DelayedScaling
from jchop._spec.spec import Spec
from jchop.nn._linen.cache import CACHE_COLLECTION
from jchop.nn._linen.interceptor import RoundingInterceptor
from jchop.nn._linen.layer_kinds import learned_scale_name
from jchop.nn._linen.layers import LayerMatch, LinenPath, linen_params, match_linen_layers, module_calls
from jchop.nn._linen.report import linen_report
from jchop.nn._linen.scales import initial_linen_scales
from jchop.nn._shared.model_report import ModelReport
from jchop.storage import QArray, dequantize
from jchop.storage._array import PackedParam, refuse_qarray_dicts
from jchop.storage._axis_groupings import map_over_stack
from jchop.storage._quantize import requantize

Array = jax.Array

__all__ = ["Packed", "Quantized", "unpack_variables"]


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["layout", "shape"])
@dataclass(frozen=True)
class Packed(PackedParam):
    """A packed parameter among the variables of a Linen module.

    Args:
        stored: the `jchop.QArray`, in the parameter's own shape; if groups run over several axes, laid out so that the
            axes that a product sums over come last.
        layout: how it is laid out; axes in front of those are of a stack of layers.
        shape: shape of the parameter.
    """

    stored: QArray
    layout: OperandLayout
    shape: tuple[int, ...]

    def codes(self) -> CodedArray:
        """The codes, in the form that the module expects."""
        return param_codes(self.stored, self.layout, self.shape)

    @property
    def _stack(self) -> int:
        return len(self.shape) - len(self.layout.free) - len(self.layout.contracting)

    def unpack(self) -> Array:
        """The parameter in the form that the module expects."""
        return self.dequantize()

    def dequantize(self, dtype: Any = None) -> Array:
        """`unpack`, in a dtype."""
        shape = self.shape[self._stack :]
        return map_over_stack(self._stack, lambda q: self.layout.back(dequantize(q, dtype), shape), self.stored)

    def requantize(self, x: Array, key: Array | None = None) -> Packed:
        """Other numbers of the parameter, packed in the same way."""
        return replace(self, stored=requantize(self.stored, map_over_stack(self._stack, self.layout.lay, x), key))


def _packed_layout_to_bytes(static: tuple[OperandLayout, tuple[int, ...]]) -> bytes:
    layout, shape = static
    return json.dumps([layout.free, layout.contracting, shape]).encode()


def _packed_layout_from_bytes(data: bytes) -> tuple[OperandLayout, tuple[int, ...]]:
    free_axes, sum_axes, shape = map(tuple, json.loads(data))
    return OperandLayout(free_axes, sum_axes), shape


export.register_pytree_node_serialization(
    Packed,
    serialized_name="jchop.nn.linen.Packed",
    serialize_auxdata=_packed_layout_to_bytes,
    deserialize_auxdata=_packed_layout_from_bytes,
)


@dataclass(frozen=True)
class Quantized:
    """A module of Linen with the rules of its layers; a result of `quantize`.

    Args:
        module: the module.
        rules: the rules.
    """

    module: nn.Module
    rules: tuple[Rule, ...]

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables of the module and those of its rules.

        Parameters are those of the module, bit for bit. With `scale_from` or `cache` in a rule, `start` adds the
        variables of the rules, which runs the rounded module once more.

        Args:
            rngs: a key, or streams of keys by name, including those of stochastic rules.
            args: arguments of the module. Pass data, because their range is the initial value of an activation's
                learned scale.
            kwargs: keyword arguments of the module and of Linen's `init`.
        """
        variables = self.module.init(rngs, *args, **kwargs)
        if all(rule.scale_from is None and rule.cache is None for rule in self.rules):
            return variables
        options = {name: value for name, value in kwargs.items() if name not in ("mutable", "capture_intermediates")}
        cache = {name: value for name, value in variables.items() if name == CACHE_COLLECTION}
        others = {name: value for name, value in variables.items() if name != CACHE_COLLECTION}
        return {**cache, **self.start(others, *args, rngs=rngs, **options)}

    def start(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Variables of the plain module, for example trained ones, extended by the variables of the rules.

        Existing variables are kept. For each layer whose rule has `scale_from` there are:

        * ``"params"``: with `LSQ` ``weight_scale``, by the format's rule for the kernel, and ``activation_scale``,
          from the range of the layer's input in this call, in which such inputs are not rounded, like `calibrate` with
          one batch;
        * ``"scale_stats"``: with `MovingAverage` ``activation_range``, NaN until the first call that updates it; with
          `DelayedScaling` ``activation_history`` and ``weight_history``, zeros.

        Args:
            variables: variables of the module, not packed. If they have no ``"cache"``, and layers that decode have a
                rule with `cache`, an empty packed cache is added, for sequences as long as those in `args`.
            args: arguments of the module.
            rngs: streams of keys by name.
            kwargs: as of the module.

        Raises:
            ValueError, NotImplementedError: as `apply`.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> from flax import linen
            >>> trained = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 8)))
            >>> rule = jc.nn.Rule(weight="int4(group=4)", scale_from=jc.nn.LSQ())
            >>> variables = jc.nn.linen.quantize(linen.Dense(3), rule).start(trained, jnp.ones((1, 8)))
            >>> {name: value.shape for name, value in sorted(variables["params"].items())}
            {'bias': (3,), 'kernel': (8, 3), 'weight_scale': (3, 2)}
        """
        if any(isinstance(leaf, Packed) for leaf in linen_params(variables).values()):
            raise ValueError("variables are packed; start with those that are not")
        # Layers decode only if there is a cache; without one they process whole sequences.
        kwargs, collections = (
            {**kwargs, "mutable": True},
            {name: v for name, v in variables.items() if name != CACHE_COLLECTION},
        )
        layers = match_linen_layers(self.module, self.rules, collections, args, rngs, kwargs)
        for name, new in initial_linen_scales(layers, linen_params(variables)).items():
            collections[name] = unflatten_dict({**new, **flatten_dict(dict(collections.get(name, {})))})
        result = {**variables, **collections}
        if any(match.needs_run for match in layers.values()):
            _, new_variables = self._call(collections, args, rngs, kwargs, starts_scales=True)
            result["params"] = unflatten_dict({**linen_params(new_variables), **linen_params(collections)})
            result |= (
                {CACHE_COLLECTION: new_variables[CACHE_COLLECTION]}
                if CACHE_COLLECTION in new_variables and CACHE_COLLECTION not in variables
                else {}
            )
        return result

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the rounded module, with the arguments of Linen's `apply`.

        A call with ``mutable=["scale_stats"]`` updates ranges and histories (`MovingAverage`, `DelayedScaling`) and
        returns them, like training mode in NNX; a call without it does not change them, like evaluation mode. A packed
        cache takes the new token with ``mutable=["cache"]``.

        Args:
            variables: variables of the module, packed or not, including those of the rules.
            args: arguments of the module.
            rngs: streams of keys by name, with that which a stochastic rule names.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: for a rule that matches no layer or has no effect, a stochastic one without its stream, or
                missing variables of the rules.
            NotImplementedError: for a module with parameters that is no known layer, or a product out of reach.
        """
        return self._call(variables, args, rngs, kwargs)

    def pack(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The variables with the rounded weights and biases stored packed, for `apply`.

        The learned scale of a weight becomes a part of the packed weight. Ranges and learned scales of activations
        stay.

        Args:
            variables: variables of the module, including those of the rules.
            args: example arguments, of which only shapes are used.
            rngs: streams of keys by name.
            kwargs: as of `apply`.

        Raises:
            ValueError, NotImplementedError: as `apply`; and for a rule with a `DelayedScaling`, which is for training,
                or a kernel that is changed before the product, as by `flax.linen.SpectralNorm`.
        """
        layers = match_linen_layers(self.module, self.rules, unpack_variables(variables), args, rngs, kwargs)
        keys, leaves = _ParamKeys(rngs), dict(linen_params(variables))
        for path, match in layers.items():
            if isinstance(match.rule.scale_from, DelayedScaling) and match.kind.keeps_scales:
                raise ValueError(f"{match.rule}: a history of scales is for training; leave scale_from out to pack")
            for name, role in match.kind.parameters.items():
                spec, value = match.spec(name), leaves.get((*path, name))
                if spec is None or value is None:
                    continue
                if isinstance(value, Packed):
                    raise ValueError(f"{'/'.join((*path, name))!r} is packed already")
                if isinstance(value, nn.meta.AxisMetadata):
                    raise TypeError(
                        f"variables['params'] hold {'/'.join((*path, name))!r} in a box ({type(value).__name__}): pass "
                        "program=True to quantize, or unbox it by flax.linen.meta.unbox"
                    )
                scale = leaves.pop((*path, learned_scale_name(role)), None) if role == "weight" else None
                leaves[(*path, name)] = _pack_linen_param(match, name, value, keys.of(match.rule, spec)[0], scale)
        return {**variables, "params": unflatten_dict(leaves)}

    def report(
        self, variables: Any, *args: Any, rngs: Any = None, platform: str | None = None, **kwargs: Any
    ) -> ModelReport:
        """The effect of the rules on each layer, like `jchop.nn.report`, without quantizing.

        Args:
            variables: as those of the module, not packed.
            args: example arguments, of which only shapes are used.
            rngs: streams of keys by name.
            platform: as of `jchop.nn.report`.
            kwargs: as of `apply`.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> from flax import linen
            >>> dense = jc.nn.linen.quantize(linen.Dense(2), jc.nn.Rule(weight="e4m3"))
            >>> print(dense.report(dense.init(jax.random.key(0), jnp.ones((1, 4))), jnp.ones((1, 4))))
            path         layer  rounds              bytes  packed
            (the model)  Dense  weight=float8_e4m3     40      16
                                                       40      16
            stays wide: bias (2,): Rule('*', weight=float8_e4m3) has no bias
        """
        if platform is not None:
            check_choice("platform", platform, tuple(OPERANDS_BY_PLATFORM))
        return linen_report(module_calls(self.module, variables, args, rngs, kwargs), self.rules, variables, platform)

    def _call(self, variables: Any, args: Any, rngs: Any, kwargs: Any, *, starts_scales: bool = False) -> Any:
        plain_variables = unpack_variables(variables)
        layers = match_linen_layers(self.module, self.rules, plain_variables, args, rngs, kwargs)
        packed_kernels = _packed_kernels(variables, layers)
        keys = _ParamKeys(rngs)
        weights = dict(linen_params(plain_variables))
        for path, match in layers.items():
            for name, role in match.kind.parameters.items():
                spec = match.spec(name)
                is_product_operand = match.kind.hook is not None and role == "weight"  # the product rounds it
                if spec is None or is_product_operand or path in packed_kernels or (*path, name) not in weights:
                    continue
                value, layout = weights[(*path, name)], match.layout(name)
                weights[(*path, name)] = map_over_stack(
                    match.stack_ndim(name, value),
                    partial(_round_linen_param, layout, spec),
                    value,
                    *keys.of(match.rule, spec),
                )
        rules = {path: match.rule for path, match in layers.items()}
        with nn.intercept_methods(RoundingInterceptor(rules, packed_kernels, starts_scales)):
            return self.module.apply({**variables, "params": unflatten_dict(weights)}, *args, rngs=rngs, **kwargs)


def unpack_variables(variables: Any) -> Any:
    """Variables as the module itself has them."""
    refuse_qarray_dicts("variables", variables)

    def unpack_leaf(leaf: Any) -> Any:
        return leaf.unpack() if isinstance(leaf, Packed) else dequantize(leaf) if isinstance(leaf, QArray) else leaf

    return jax.tree.map(unpack_leaf, variables, is_leaf=lambda leaf: isinstance(leaf, Packed | QArray))


def _round_linen_param(layout: OperandLayout | None, spec: Spec, x: Array, *keys: Array | None) -> Array:
    return round_in_layout(layout, x, spec, *keys)


def _pack_linen_param(match: LayerMatch, name: str, value: Array, key: Array | None, scale: Array | None) -> Packed:
    check_finite(value, f"{name} of the {match.place}")
    return Packed(*match.pack_param(name, match.times_mask(name, value), key, scale), value.shape)


def _packed_kernels(variables: Any, layers: Mapping[LinenPath, LayerMatch]) -> dict[LinenPath, Packed | None]:
    """The layers with packed parameters, and their packed kernels.

    Raises:
        ValueError: for a parameter that is packed as the rules do not say.
    """
    packed_params = {path: leaf for path, leaf in linen_params(variables).items() if isinstance(leaf, Packed)}
    for (*above, name), leaf in packed_params.items():
        match = layers.get(tuple(above))
        spec = None if match is None else match.packed_spec(name, leaf.shape, leaf.stored.dtype)
        packed_spec = leaf.stored.spec
        if packed_spec != spec:
            raise ValueError(
                f"variables['params'] hold {'/'.join((*above, name))!r} packed as {packed_spec}, and by the rules it "
                f"is {'left as it is' if spec is None else f'packed as {spec}'}: it belongs to a module with "
                "other rules"
            )
    return {path[:-1]: packed_params.get((*path[:-1], "kernel")) for path in packed_params}


class _ParamKeys:
    """Keys of parameters, one after the other, from the streams of a call."""

    def __init__(self, rngs: Any) -> None:
        self.rngs, self.count = rngs, 0

    def of(self, rule: Rule, spec: Spec) -> tuple[Array | None, Array | None]:
        if not is_stochastic(spec):
            return None, None
        name = rule.stochastic_stream
        if not isinstance(self.rngs, Mapping) or name not in self.rngs:
            raise ValueError(f"{rule} rounds stochastically: pass rngs={{{name!r}: a key}}")
        self.count += 1
        forward, backward = split_prng_key(jax.random.fold_in(self.rngs[name], self.count))
        return forward, backward
