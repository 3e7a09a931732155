"""The table of layers and of their roundings; how a layer gets the roundings of a rule, and packed parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array, lax

from jchop._quantized.products.codes import restore_param_axes
from jchop._quantized.products.contraction import ProductRoundings, einsum_dimensions
from jchop._quantized.products.operand_layout import OperandLayout, check_finite, check_layout_axes, norm_scale_spec
from jchop._quantized.products.product import DotProduct
from jchop._quantized.products.rule import (
    Location,
    Rule,
    exclusion_advice,
    is_stochastic,
    multiplies_codes,
    refuse_code_products,
    refuse_forward_rotation,
)
from jchop._quantized.products.scale_from import LSQ, DelayedScaling
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop._storage import QArray, fit_scale, quantize
from jchop._storage._axis_groupings import map_over_stack
from jchop.nn._nnx import rounding_modules
from jchop.nn._nnx.nodes import QuantizedParam, packed_nnx_variable

#: The fields of a rule that a product of a layer has.
PRODUCT_RULE_FIELDS = ("gradient", "input_gradient", "weight_gradient", "matmul", "rotation")


@dataclass(frozen=True)
class NnxKind:
    """A class of layers of Flax: its parameters, and the places where its arrays are rounded and multiplied.

    Args:
        parameters: its parameters, each with the field of a rule that it is rounded by.
        slots: the arguments of its `promote_dtype`, one tuple for each number of arrays. Names of parameters,
            ``"inputs"``, others (``""``); with a star the arrays that the product rounds.
        product: the attribute that multiplies, the rounding module that replaces it, and Flax's function. A layer with
            a layout and without it has a product that backward roundings cannot reach.
        layout: of its weights, as the product sums over them. Default: its last axis is summed over.
        inputs: layout of the inputs, if `promote_dtype` rounds them. Default: their own axes.
        ndim: how many axes a parameter without a layout has; more of them in front come of a stack of layers.
        operation: its computation with its parameters, as a rule's `operation` names it; empty for a norm.
    """

    parameters: Mapping[str, str]
    slots: tuple[tuple[str, ...], ...] = ()
    product: tuple[str, type[rounding_modules.RoundedProduct], tuple[Any, ...]] | None = None
    layout: Callable[[Any], OperandLayout] | None = None
    inputs: Callable[[Any], OperandLayout] | None = None
    ndim: int = 1
    operation: str = "dot_general"

    def fields(self, layer: Any) -> tuple[str, ...]:
        """The fields of a rule that say something for a layer of this kind."""
        roles = [role for name, role in self.parameters.items() if getattr(layer, name) is not None]
        activation = ["activation"] if self.product or any("inputs" in slots for slots in self.slots) else []
        return (
            *dict.fromkeys(roles),
            *activation,
            *["output"] * (not self.caches),
            *(PRODUCT_RULE_FIELDS if self.product else ()),
            *["scale_from"] * self.keeps_scales,
            *["cache"] * self.caches,
        )

    def spec(self, rule: Rule, name: str) -> Spec | None:
        """The spec of a rule for a parameter."""
        spec = getattr(rule, self.parameters[name])
        return norm_scale_spec(spec) if name == "scale" else spec

    @property
    def caches(self) -> bool:
        """Whether it keeps keys and values. Its result is then the result of an inner layer, which has an `output`."""
        return self.product is not None and self.product[1] is rounding_modules.RoundedAttention

    @property
    def keeps_scales(self) -> bool:
        """Whether its product is of an input and a kernel, whose scales can be kept."""
        return self.product is not None and self.layout is not None


def _linear_general_layout(layer: nnx.LinearGeneral) -> OperandLayout:
    batch, inside, out = len(layer.batch_axis), len(layer.in_features), len(layer.out_features)
    free_axes = (*range(batch), *range(batch + inside, batch + inside + out))
    return OperandLayout(free_axes, tuple(range(batch, batch + inside)))


def _nnx_einsum_layout(layer: nnx.Einsum) -> OperandLayout:
    """Indices of a batch come first, then others that stay, then those that are summed over."""
    first_term = layer.einsum_str.partition(",")[0]
    ndims = len(first_term.replace("...", "")), len(layer.kernel_shape)
    (contracting, batch), *_ = einsum_dimensions(layer.einsum_str, *ndims)
    return DotProduct(contracting, batch, ndims).forward.right


def _nnx_conv_transpose_layout(layer: nnx.ConvTranspose) -> OperandLayout:
    space = len(layer.kernel_size)
    inside, out = (space + 1, space) if layer.transpose_kernel else (space, space + 1)
    return OperandLayout((out,), (*range(space), inside))


_LINEAR_KIND = NnxKind(
    MappingProxyType({"kernel": "weight", "bias": "bias"}),
    (("*inputs", "*kernel", "bias"),),
    ("dot_general", rounding_modules.RoundedDotGeneral, (lax.dot_general, None)),
    lambda layer: OperandLayout((1,), (0,)),
)
_NORM_KIND = NnxKind(
    MappingProxyType({"scale": "weight", "bias": "bias"}), (("inputs", "scale", "bias"),), operation=""
)

#: Every layer that can be quantized. Cells of recurrent networks consist of Linear layers.
NNX_KINDS: Mapping[type, NnxKind] = MappingProxyType(
    {
        nnx.Linear: _LINEAR_KIND,
        nnx.LoRALinear: _LINEAR_KIND,
        nnx.LinearGeneral: replace(_LINEAR_KIND, layout=_linear_general_layout),
        nnx.Einsum: replace(
            _LINEAR_KIND,
            product=("einsum_op", rounding_modules.RoundedEinsum, (jnp.einsum,)),
            layout=_nnx_einsum_layout,
        ),
        nnx.Conv: replace(
            _LINEAR_KIND,
            product=("conv_general_dilated", rounding_modules.RoundedConvolution, (lax.conv_general_dilated,)),
            layout=lambda layer: OperandLayout((len(layer.kernel_size) + 1,), tuple(range(len(layer.kernel_size) + 1))),
            operation="conv",
        ),
        nnx.ConvTranspose: replace(
            _LINEAR_KIND,
            slots=(("inputs", "kernel", "bias"),),
            product=None,
            layout=_nnx_conv_transpose_layout,
            inputs=lambda layer: OperandLayout((0,), tuple(range(1, len(layer.kernel_size) + 2))),
            operation="conv",
        ),
        nnx.Embed: NnxKind(
            MappingProxyType({"embedding": "weight"}),
            (("embedding",), ("*inputs", "*embedding")),
            ("product", rounding_modules.RoundedDotGeneral, (None,)),
            ndim=2,
            operation="embedding",
        ),
        nnx.BatchNorm: replace(_NORM_KIND, slots=(("inputs", "", "", "scale", "bias"),)),
        nnx.LayerNorm: _NORM_KIND,
        nnx.RMSNorm: replace(
            _NORM_KIND, parameters=MappingProxyType({"scale": "weight"}), slots=(("inputs", "scale"),)
        ),
        nnx.GroupNorm: _NORM_KIND,
        nnx.InstanceNorm: _NORM_KIND,
        nnx.LoRA: replace(
            _LINEAR_KIND,
            parameters=MappingProxyType({"lora_a": "weight", "lora_b": "weight"}),
            slots=(("inputs", "lora_a", "lora_b"),),
            product=None,
        ),
        nnx.MultiHeadAttention: NnxKind(
            MappingProxyType({}), (), ("attention_fn", rounding_modules.RoundedAttention, (nnx.dot_product_attention,))
        ),
    }
)


# -- roundings of a layer ----------------------------------------------------------------------------------------------

#: By a variable and how it is packed: the variable, which keeps its identity from being used again, the packed one, and
#: its form.
PackedVariables = dict[Any, tuple[Any, Any, rounding_modules.PackedForm]]


def attach(
    layer: Any,
    kind: NnxKind,
    rule: Rule,
    path: str,
    *,
    packs: bool,
    rngs: nnx.Rngs | None,
    before: Any = None,
    codes_by_name: Mapping[str, QArray] = MappingProxyType({}),
    tied: PackedVariables | None = None,
) -> None:
    """Add the roundings of a rule to `layer`, which already has a class of jchop.

    Args:
        layer: changed in place.
        kind: its row of `NNX_KINDS`.
        rule: the rule of the layer.
        path: of the layer, for errors.
        packs: whether parameters are stored packed, else rounded each time.
        rngs: for streams of keys.
        before: the previous rounding module of the layer's product, whose scales are kept if they are of the same kind.
        codes_by_name: parameters that are packed already, in their layout, by name.
        tied: the parameters packed so far in the model; a parameter that is packed again in the same way stays one.
    """
    place = Location(type(layer).__name__, path, rule)
    _check_layer_rule(layer, kind, rule, path)
    check_param_axes(layer, kind, place)
    input_source, weight_source = operand_scale_sources(layer, kind, rule, packs, before)
    packed_params = (
        _pack_layer_params(layer, kind, rule, path, rngs, weight_source, codes_by_name, {} if tied is None else tied)
        if packs
        else ()
    )

    def stream(*stochastic: bool) -> nnx.RngStream | None:
        return fork_rounding_stream(rule, rngs, path) if any(stochastic) else None

    weight = None if packs else rule.weight
    by_codes = multiplies_codes(rule)
    if kind.product is not None:
        attribute, module_class, _ = kind.product
        codes = by_codes and (rule.activation is not None or rule.weight is not None)
        right_spec = rule.activation if not kind.parameters else rule.weight if codes else weight
        fields = (getattr(rule, name) for name in PRODUCT_RULE_FIELDS)
        how = ProductRoundings(
            rule.activation, right_spec, *fields, place=place, codes=codes, stored_only=rule.product == "auto"
        )
        draws = how.stochastic and not (packs and how.stored_only)
        module = module_class(how, stream(draws), input_source, None if packs else weight_source)
        if before is not None and before.how.left == rule.activation and input_source is None and how.keeps_left:
            module.set_data(range=before.range)
        setattr(layer, attribute, module.as_attribute())
    if kind.slots:
        specs = tuple(_promotion_specs(layer, kind, rule, packs))
        draws = stream(*(is_stochastic(spec) for _, spec, _ in specs))
        if specs or packed_params:
            promote = rounding_modules.RoundedPromotion(
                layer.promote_dtype, kind.slots, specs, packed_params, draws, place, by_codes
            )
            layer.promote_dtype = promote.as_attribute()
    if kind.caches:
        layer.cache = rule.cache
    elif rule.output is not None:
        layer.output = rounding_modules.RoundedOutput(
            rule.output, stream(is_stochastic(rule.output)), place
        ).as_attribute()


def attach_emulation(layer: Any, kind: NnxKind, rule: Rule, path: str, rngs: nnx.Rngs | None) -> None:
    """Give `layer` the arithmetic that a rule says: `activation` for every operation, `matmul` for sums."""
    _check_layer_rule(layer, kind, rule, path, emulates=True)
    if rule.activation is None:
        raise ValueError(f"{rule}: mode='emulate' needs an activation, which every operation is rounded to")
    draws = is_stochastic(rule.activation) or (rule.matmul is not None and rule.matmul.stochastic)
    stream = fork_rounding_stream(rule, rngs, path) if draws else None
    as_spec(rule.activation, "activation")  # a scaled format has no single numbers
    if kind.parameters:
        layer.emulation = rounding_modules.LayerEmulation(rule.activation, rule.matmul, stream).as_attribute()
    else:
        layer.attention_fn = rounding_modules.EmulatedAttention(rule.activation, rule.matmul, stream).as_attribute()


def _promotion_specs(layer: Any, kind: NnxKind, rule: Rule, packs: bool) -> Any:
    """The arrays that `promote_dtype` rounds: (name, spec, layout)."""
    layout = None if kind.layout is None else kind.layout(layer)
    for name, role in kind.parameters.items():
        spec = kind.spec(rule, name)
        if spec is not None and not packs and any(name in slots for slots in kind.slots):
            yield name, spec, layout if role == "weight" else None
    if rule.activation is not None and any("inputs" in slots for slots in kind.slots):
        yield "inputs", rule.activation, None if kind.inputs is None else kind.inputs(layer)


# -- sources of scales -------------------------------------------------------------------------------------------------


def operand_scale_sources(
    layer: Any, kind: NnxKind, rule: Rule, packs: bool, before: Any
) -> tuple[rounding_modules.ScaleSource | None, rounding_modules.ScaleSource | None]:
    """The sources of scales of both operands of a layer's product, by the rule or from its previous module."""
    how = rule.scale_from
    if how is None or not kind.keeps_scales:
        return None, None
    if packs and isinstance(how, DelayedScaling):
        raise ValueError(f"{rule}: a history of scales is for training, mode='qat'; leave scale_from out to pack")
    layout, stack_ndim = param_layout(layer, kind, "kernel")
    kernel = _param_in_compute_dtype(layer, "kernel")
    stack = kernel.shape[:stack_ndim]

    def source(side: str, field: str, spec: Spec | None) -> rounding_modules.ScaleSource | None:
        old = getattr(before, side, None)
        if old is not None and old.how == how and getattr(before.how, side) == spec:
            return old
        if spec is None or field not in how.fields:
            return None
        if not isinstance(how, LSQ) or field != "weight":
            return rounding_modules.ScaleSource(how, stack)
        scale = map_over_stack(stack_ndim, lambda v: fit_scale(layout.lay(v), spec)[0], kernel)
        return rounding_modules.ScaleSource(how, stack, layout, scale)

    return source("left", "activation", rule.activation), source("right", "weight", rule.weight)


# -- packed parameters -------------------------------------------------------------------------------------------------


def _pack_layer_params(
    layer: Any,
    kind: NnxKind,
    rule: Rule,
    path: str,
    rngs: nnx.Rngs | None,
    weight_source: Any,
    codes_by_name: Mapping[str, QArray],
    tied: PackedVariables,
) -> tuple[tuple[str, rounding_modules.PackedForm], ...]:
    """Store the parameters that the rule rounds as QArrays, or those in `codes_by_name`; the form of each."""
    packed_params = []
    for name, role in kind.parameters.items():
        variable, spec = getattr(layer, name), kind.spec(rule, name)
        if variable is None or spec is None:
            continue
        layout, stack_ndim = param_layout(layer, kind, name)
        shape = tuple(variable.get_value().shape[stack_ndim:])
        has_mask = name == "kernel" and getattr(layer, "mask", None) is not None
        identity: Any = None
        if name in codes_by_name:
            if has_mask:
                raise ValueError(
                    f"{type(layer).__name__} at {path!r} has a mask, and its kernel is packed already: a packed kernel "
                    "has been multiplied by its mask. Make the layer with mask=None"
                )
            codes, codes_layout = codes_in_own_shape(codes_by_name[name], layout, shape, stack_ndim)
        else:
            check_finite(variable.get_value(), f"{name} of the {Location(type(layer).__name__, path, rule)}")
            key = fork_rounding_stream(rule, rngs, path)() if spec.rounding.stochastic else None
            scale = weight_source.scale[...] if weight_source is not None and role == "weight" else None
            if key is None and scale is None and not has_mask:
                identity = id(variable), spec, layout, stack_ndim, getattr(layer, "dtype", None)
            if identity in tied:
                _, new, form = tied[identity]
                packed_params.append((name, form))
                setattr(layer, name, new)
                continue
            codes, codes_layout = pack_param(
                _param_in_compute_dtype(layer, name, has_mask), layout, stack_ndim, spec, key, scale
            )
        form = rounding_modules.PackedForm(codes.spec, codes_layout, shape)
        packed_params.append((name, form))
        new = packed_nnx_variable(variable, codes, codes_layout)
        setattr(layer, name, new)
        if identity is not None:
            tied[identity] = variable, new, form
        if has_mask:
            layer.mask = None  # it is in the packed kernel, since the product rounds kernel * mask
    return tuple(packed_params)


def param_layout(layer: Any, kind: NnxKind, name: str) -> tuple[OperandLayout, int]:
    """The layout of a parameter, and how many axes in front come of a stack of layers."""
    weight = kind.parameters[name] == "weight"
    layout = None if kind.layout is None else kind.layout(layer)
    if layout is None or not weight:
        ndim = kind.ndim if layout is None else len(layout.free)
        if isinstance(layer, nnx.Einsum) and layer.bias_shape is not None and not weight:
            ndim = len(layer.bias_shape)
        layout = OperandLayout(tuple(range(ndim - 1)), tuple(range(ndim - 1, ndim)))
    return layout, getattr(layer, name).get_value().ndim - len(layout.free) - len(layout.contracting)


def _param_in_compute_dtype(layer: Any, name: str, times_mask: bool = False) -> Array:
    """A parameter in the dtype that the layer computes in; of a convolution also times its mask."""
    value, dtype = getattr(layer, name).get_value(), getattr(layer, "dtype", None)
    value = value * layer.mask if times_mask else value
    return value if dtype is None else value.astype(dtype)


def packed_param_shape(layer: Any, kind: NnxKind, name: str, spec: Spec) -> Any:
    """The shapes of a packed parameter."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = jax.ShapeDtypeStruct(getattr(layer, name).get_value().shape, getattr(layer, name).get_value().dtype)
    how = param_layout(layer, kind, name)
    return jax.eval_shape(lambda value, key: pack_param(value, *how, spec, key)[0], shape, key)


def exact_and_rounded_param(layer: Any, kind: NnxKind, name: str, spec: Spec) -> tuple[Array, Array]:
    """A parameter in its layout, and the same rounded by a spec that draws nothing."""
    layout, stack_ndim = param_layout(layer, kind, name)
    value, mask = getattr(layer, name).get_value(), getattr(layer, "mask", None) if name == "kernel" else None
    value = value if mask is None else value * mask
    exact = map_over_stack(stack_ndim, layout.lay, value)
    return exact, map_over_stack(stack_ndim, lambda one: round_to_format(layout.lay(one), spec), value)


def pack_param(
    value: Array, layout: OperandLayout, stack_ndim: int, spec: Spec, key: Array | None, scale: Any = None
) -> tuple[QArray, OperandLayout | None]:
    """A parameter quantized along the axes of its layout, under its own or given scales; each of a stack by itself.

    Returns:
        The codes and scales in the parameter's own shape, and None. If that shape would split groups, the codes and
        scales in the layout, and the layout.
    """

    def quantize_one(both: tuple[Array, Any], key: Array | None) -> QArray:
        return quantize(layout.lay(both[0]), spec, key, scale=both[1])

    codes = map_over_stack(stack_ndim, quantize_one, (value, scale), key)
    return codes_in_own_shape(codes, layout, tuple(value.shape[stack_ndim:]), stack_ndim)


def codes_in_own_shape(
    codes: QArray, layout: OperandLayout, shape: tuple[int, ...], stack_ndim: int
) -> tuple[QArray, OperandLayout | None]:
    """Codes and scales in a layout as `pack_param` returns them: in the parameter's own shape if groups allow it."""
    # Layer by layer, so that the spec is for one layer: as an axis among others, the stack's axis would be named.
    own = map_over_stack(stack_ndim, lambda one: restore_param_axes(one, layout, shape), codes)
    return (codes, layout) if own is None else (own, None)


def weight_names(module: Any, kind: NnxKind) -> list[str]:
    """The names of the parameters with the role of weights."""
    return [name for name, role in kind.parameters.items() if role == "weight" and getattr(module, name) is not None]


# -- checks ------------------------------------------------------------------------------------------------------------


def check_param_axes(layer: Any, kind: NnxKind, place: Location) -> None:
    """Refuse formats that name axes which their parameters have not, before anything runs."""
    assert place.rule is not None
    for name, role in kind.parameters.items():
        if getattr(layer, name) is not None:
            check_layout_axes(role, kind.spec(place.rule, name), param_layout(layer, kind, name)[0].ndim, place)


def _check_layer_rule(layer: Any, kind: NnxKind, rule: Rule, path: str, emulates: bool = False) -> None:
    """Refuses a rule that a layer cannot follow: functions of its own, fields without effect, a packed parameter."""
    what = f"{type(layer).__name__} at {path!r}"
    if kind.slots and layer.promote_dtype is not dtypes.promote_dtype:
        raise ValueError(f"{what} has a promote_dtype of its own, in whose place the rounding would stand")
    refuse_forward_rotation(rule, what)
    if kind.product is not None:
        attribute, _, usual = kind.product
        own = getattr(layer, attribute, None)
        if not any(own is function for function in usual) or getattr(layer, "dot_general_cls", None) is not None:
            raise ValueError(f"{what} has a {attribute} of its own, in whose place the rounding would stand")
    if kind.product is None and kind.layout is not None and not emulates:
        for name in PRODUCT_RULE_FIELDS:
            if getattr(rule, name) is not None:
                raise NotImplementedError(
                    f"{what}: {name}={str(getattr(rule, name))!r} cannot be had, since Flax gives no access to its "
                    f"product. {exclusion_advice([path], rule, ', ...')}"
                )
        refuse_code_products(rule, what, "Flax gives no access to its product")
    if kind.keeps_scales and rule.scale_from is not None:
        refuse_code_products(rule, what, "codes have scales of their own, and none from scale_from")
    for name, role in kind.parameters.items():
        if role in ("weight", "bias") and isinstance(getattr(layer, name), QuantizedParam):
            raise ValueError(f"{what} is packed already; quantize the model that it was made from")


def fork_rounding_stream(rule: Rule, rngs: nnx.Rngs | None, path: str) -> nnx.RngStream:
    """A new stream of keys for the layer at `path`, from the stream of `rngs` that the rule names."""
    if rngs is None:
        raise ValueError(
            f"rngs=None, but {rule} rounds stochastically in the layer {path!r}: pass flax.nnx.Rngs, for example "
            f"rngs=nnx.Rngs({rule.stochastic_stream}=0)"
        )
    stream = getattr(rngs, rule.stochastic_stream, None)  # the stream of the name, or "default"
    if stream is None:
        raise ValueError(
            f"rngs has no stream {rule.stochastic_stream!r}, which {rule} draws from in the layer {path!r}: it has "
            f"{', '.join(map(repr, rngs)) or 'none'}"
        )
    return stream.fork()
