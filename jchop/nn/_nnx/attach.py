"""Adds roundings to one layer: sites instead of Flax's functions, and packed parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.core
from flax import nnx
from flax.nnx.nn import dtypes

from jchop._products.codes import in_own_shape
from jchop._products.contraction import Roundings
from jchop._products.layout import Layout, check_axes, check_finite
from jchop._products.rule import Rule, StreamOffset, is_stochastic, left_alone, refuse_codes, refuse_turn
from jchop._products.scale_from import LSQ, DelayedScaling, ScaleFrom
from jchop._round.round_to_format import round_to_format
from jchop.nn._nnx.emulation import EmulatedAttention, Emulation
from jchop.nn._nnx.hooks import Output, Promote
from jchop.nn._nnx.kinds import PRODUCT_FIELDS, Kind
from jchop.nn._nnx.variables import QuantizedParam, packed_variable
from jchop.nn._scale_state import LearnedStep, Source, source_of
from jchop.spec import Spec, as_spec
from jchop.storage import QArray, fit_scale, quantize
from jchop.storage._layout import over_stack

Array = jax.Array

__all__ = [
    "Tied",
    "attach",
    "attach_emulated",
    "check_parameters",
    "fitted",
    "fork",
    "laid_and_rounded",
    "layout_of",
    "pack",
    "packed_shape",
]


#: By a variable and how it is packed: the variable, which keeps its identity from being used again, the packed one, and
#: its layout.
Tied = dict[Any, tuple[Any, Any, Layout | None]]


def attach(
    layer: Any,
    kind: Kind,
    rule: Rule,
    path: str,
    *,
    packed: bool,
    rngs: nnx.Rngs | None,
    before: Any = None,
    stored: Mapping[str, QArray] = MappingProxyType({}),
    tied: Tied | None = None,
) -> None:
    """Add the roundings of a rule to `layer`, which already has a class of jchop.

    Args:
        layer: changed in place.
        kind: its line in the table.
        rule: the rule of the layer.
        path: of the layer, for errors.
        packed: whether parameters are stored packed, else rounded each time.
        rngs: for streams of keys.
        before: the previous site of the layer's product, whose scales are kept if they are of the same kind.
        stored: parameters that are packed already, in their layout, by name.
        tied: what has been packed in the model; a parameter that is packed again in the same way stays one.
    """
    place = StreamOffset(type(layer).__name__, path, rule)
    _check(layer, kind, rule, path)
    check_parameters(layer, kind, place)
    left, right = sources(layer, kind, rule, packed, before)
    held = _pack(layer, kind, rule, path, rngs, right, stored, {} if tied is None else tied) if packed else ()

    def stream(*needed: bool) -> nnx.RngStream | None:
        return fork(rule, rngs, path) if any(needed) else None

    weight = None if packed else rule.weight
    if kind.product is not None:
        attribute, site, _ = kind.product
        codes = rule.product == "codes" and (rule.activation is not None or rule.weight is not None)
        taken = rule.activation if not kind.parameters else rule.weight if codes else weight
        fields = (getattr(rule, name) for name in PRODUCT_FIELDS)
        how = Roundings(rule.activation, taken, *fields, place=place, codes=codes)
        made = site(how, stream(how.stochastic), left, None if packed else right)
        if before is not None and before.how.left == rule.activation and left is None and how.keeps_left:
            made.keep(before.range)
        setattr(layer, attribute, made.as_attribute())
    if kind.slots:
        specs = tuple(_promoted(layer, kind, rule, packed))
        draws = stream(*(is_stochastic(spec) for _, spec, _ in specs))
        if specs or held:
            codes = rule.product == "codes"
            promote = Promote(layer.promote_dtype, kind.slots, specs, held, draws, place, codes)
            layer.promote_dtype = promote.as_attribute()
    if kind.caches:
        layer.cache = rule.cache
    if kind.output and rule.output is not None:
        layer.output = Output(rule.output, stream(is_stochastic(rule.output)), place).as_attribute()


def attach_emulated(layer: Any, kind: Kind, rule: Rule, path: str, rngs: nnx.Rngs | None) -> None:
    """Give `layer` the arithmetic that a rule says: `activation` for every operation, `matmul` for sums."""
    _check(layer, kind, rule, path, emulated=True)
    if rule.activation is None:
        raise ValueError(f"{rule}: mode='emulate' needs an activation, which every operation is rounded to")
    draws = is_stochastic(rule.activation) or (rule.matmul is not None and rule.matmul.stochastic)
    stream = fork(rule, rngs, path) if draws else None
    as_spec(rule.activation, "activation")  # a scaled format has no single numbers
    if kind.parameters:
        layer.emulation = Emulation(rule.activation, rule.matmul, stream).as_attribute()
    else:
        layer.attention_fn = EmulatedAttention(rule.activation, rule.matmul, stream).as_attribute()


def _promoted(layer: Any, kind: Kind, rule: Rule, packed: bool) -> Any:
    """The arrays that `promote_dtype` rounds: (name, spec, layout)."""
    layout = None if kind.layout is None else kind.layout(layer)
    for name, role in kind.parameters.items():
        spec = kind.spec(rule, name)
        if spec is not None and not packed and any(name in slots for slots in kind.slots):
            yield name, spec, layout if role == "weight" else None
    if rule.activation is not None and any("inputs" in slots for slots in kind.slots):
        yield "inputs", rule.activation, None if kind.inputs is None else kind.inputs(layer)


# -- scales that are kept ----------------------------------------------------------------------------------------------


def sources(layer: Any, kind: Kind, rule: Rule, packed: bool, before: Any) -> tuple[Source | None, Source | None]:
    """The sources of scales of both operands of a layer's product, by the rule or from the previous site."""
    how = rule.scale_from
    if how is None or not kind.keeps_scales:
        return None, None
    if packed and isinstance(how, DelayedScaling):
        raise ValueError(f"{rule}: a history of scales is for training, mode='qat'; leave scale_from out to pack")
    layout, stacked = layout_of(layer, kind, "kernel")
    kernel = _in_use(layer, "kernel")
    stack = kernel.shape[:stacked]
    left = _kept(before, "left", rule.activation, how) or source_of(how, "activation", rule.activation, stack)
    right = _kept(before, "right", rule.weight, how)
    if right is None and isinstance(how, LSQ) and rule.weight is not None:
        right = LearnedStep(how, stack, layout, fitted(kernel, layout, stacked, rule.weight))
    return left, right or source_of(how, "weight", rule.weight, stack)


def _kept(before: Any, side: str, spec: Spec | None, how: ScaleFrom) -> Source | None:
    """The source of the previous site, if it is of the same kind and for the same spec."""
    source = getattr(before, side, None)
    return source if source is not None and source.how == how and getattr(before.how, side) == spec else None


def fitted(value: Array, layout: Layout, stacked: int, spec: Spec) -> Any:
    """The scales that a parameter has by the format's rule; of a stack, those of each layer."""
    return over_stack(stacked, lambda v: fit_scale(layout.lay(v), spec)[0], value)


# -- packed parameters -------------------------------------------------------------------------------------------------


def _pack(
    layer: Any,
    kind: Kind,
    rule: Rule,
    path: str,
    rngs: nnx.Rngs | None,
    right: Any,
    stored: Mapping[str, QArray],
    tied: Tied,
) -> tuple[tuple[str, Spec, Layout | None, tuple[int, ...]], ...]:
    """Store the parameters that the rule rounds as QArrays, or those that are `stored`; how to get each back."""
    made = []
    for name, role in kind.parameters.items():
        variable, spec = getattr(layer, name), kind.spec(rule, name)
        if variable is None or spec is None:
            continue
        layout, stacked = layout_of(layer, kind, name)
        shape = tuple(variable.get_value().shape[stacked:])
        masked = name == "kernel" and getattr(layer, "mask", None) is not None
        same: Any = None
        if name in stored:
            if masked:
                raise ValueError(
                    f"{type(layer).__name__} at {path!r} has a mask, and its kernel is packed already: a packed kernel "
                    "has been multiplied by its mask. Make the layer with mask=None"
                )
            codes, laid = _in_place(stored[name], layout, shape, stacked)
        else:
            check_finite(variable.get_value(), f"{name} of the {StreamOffset(type(layer).__name__, path, rule)}")
            key = fork(rule, rngs, path)() if spec.rounding.stochastic else None
            scale = right.scale[...] if right is not None and role == "weight" else None
            if key is None and scale is None and not masked:
                same = id(variable), spec, layout, stacked, getattr(layer, "dtype", None)
            if same in tied:
                _, new, laid = tied[same]
                made.append((name, new.get_value().spec, laid, shape))
                setattr(layer, name, new)
                continue
            codes, laid = pack(_in_use(layer, name, masked), layout, stacked, spec, key, scale)
        made.append((name, codes.spec, laid, shape))
        new = packed_variable(variable, codes, laid)
        setattr(layer, name, new)
        if same is not None:
            tied[same] = variable, new, laid
        if masked:
            layer.mask = None  # it is in the packed kernel, since the product rounds kernel * mask
    return tuple(made)


def layout_of(layer: Any, kind: Kind, name: str) -> tuple[Layout, int]:
    """How a parameter is laid out, and how many axes in front come of a stack of layers."""
    weight = kind.parameters[name] == "weight"
    axes = kind.axes(layer) if weight else _axes_of_bias(layer)
    layout = kind.layout(layer) if weight and kind.layout is not None else _as_it_lies(axes)
    return layout, getattr(layer, name).get_value().ndim - axes


def _in_use(layer: Any, name: str, masked: bool = False) -> Array:
    """A parameter in the dtype that the layer computes in, of a convolution also `masked`."""
    value, dtype = getattr(layer, name).get_value(), getattr(layer, "dtype", None)
    value = value * layer.mask if masked else value
    return value if dtype is None else value.astype(dtype)


def packed_shape(layer: Any, kind: Kind, name: str, spec: Spec) -> Any:
    """The shapes of a packed parameter."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = jax.ShapeDtypeStruct(getattr(layer, name).get_value().shape, getattr(layer, name).get_value().dtype)
    how = layout_of(layer, kind, name)
    return jax.eval_shape(lambda value, key: pack(value, *how, spec, key)[0], shape, key)


def laid_and_rounded(layer: Any, kind: Kind, name: str, spec: Spec) -> tuple[Array, Array]:
    """A parameter in its layout, and the same rounded by a spec that draws nothing."""
    layout, stacked = layout_of(layer, kind, name)
    value, mask = getattr(layer, name).get_value(), getattr(layer, "mask", None) if name == "kernel" else None
    value = value if mask is None else value * mask
    laid = over_stack(stacked, layout.lay, value)
    return laid, over_stack(stacked, lambda one: round_to_format(layout.lay(one), spec), value)


def pack(
    value: Array, layout: Layout, stacked: int, spec: Spec, key: Array | None, scale: Any = None
) -> tuple[QArray, Layout | None]:
    """A parameter quantized along the axes of its layout, under its own or given scales; each of a stack by itself.

    Returns:
        The codes and scales in the parameter's own shape, and None. If that shape would split groups, the codes and
        scales in the layout, and the layout.
    """

    def quantized(both: tuple[Array, Any], key: Array | None) -> QArray:
        return quantize(layout.lay(both[0]), spec, key, scale=both[1])

    laid = over_stack(stacked, quantized, (value, scale), key)
    return _in_place(laid, layout, tuple(value.shape[stacked:]), stacked)


def _in_place(laid: QArray, layout: Layout, shape: tuple[int, ...], stacked: int) -> tuple[QArray, Layout | None]:
    """As `pack` returns it, of codes and scales in a layout."""
    # Layer by layer, so that the spec is that of one layer: as an axis among others, that of the stack would be named.
    own = over_stack(stacked, lambda one: in_own_shape(one, layout, shape), laid)
    return (laid, layout) if own is None else (own, None)


def _as_it_lies(axes: int) -> Layout:
    return Layout(tuple(range(axes - 1)), tuple(range(axes - 1, axes)))


def _axes_of_bias(layer: Any) -> int:
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.out_features)
    return len(layer.bias_shape) if isinstance(layer, nnx.Einsum) else 1  # type: ignore[arg-type]


# -- checks ------------------------------------------------------------------------------------------------------------


def check_parameters(layer: Any, kind: Kind, place: StreamOffset) -> None:
    """Refuse formats of parameters that name axes which those have not, before anything runs."""
    assert place.rule is not None
    for name, role in kind.parameters.items():
        if getattr(layer, name) is not None:
            check_axes(role, kind.spec(place.rule, name), layout_of(layer, kind, name)[0].ndim, place)


def _check(layer: Any, kind: Kind, rule: Rule, path: str, emulated: bool = False) -> None:
    what = f"{type(layer).__name__} at {path!r}"
    if kind.slots and layer.promote_dtype is not dtypes.promote_dtype:
        raise ValueError(f"{what} has a promote_dtype of its own, in whose place the rounding would stand")
    refuse_turn(rule, what)
    if kind.product is not None:
        attribute, _, usual = kind.product
        own = getattr(layer, attribute, None)
        if not any(own is function for function in usual) or getattr(layer, "dot_general_cls", None) is not None:
            raise ValueError(f"{what} has a {attribute} of its own, in whose place the rounding would stand")
    if kind.unrounded and not emulated:
        for name in PRODUCT_FIELDS:
            if getattr(rule, name) is not None:
                raise NotImplementedError(
                    f"{what}: {name}={str(getattr(rule, name))!r} cannot be had, since Flax gives no access to its "
                    f"product. {left_alone([path], rule, ', ...')}"
                )
        refuse_codes(rule, what, "Flax gives no access to its product")
    if kind.keeps_scales and rule.scale_from is not None:
        refuse_codes(rule, what, "codes have scales of their own, and none from scale_from")
    for name, role in kind.parameters.items():
        if role in ("weight", "bias") and isinstance(getattr(layer, name), QuantizedParam):
            raise ValueError(f"{what} is packed already; quantize the model that it was made from")


def fork(rule: Rule, rngs: nnx.Rngs | None, path: str) -> nnx.RngStream:
    if rngs is None:
        raise ValueError(
            f"rngs=None, but {rule} rounds stochastically in the layer {path!r}: pass flax.nnx.Rngs, for example "
            f"rngs=nnx.Rngs({rule.stochastic_stream}=0)"
        )
    stream = getattr(rngs, rule.stochastic_stream, None)  # that of the name, or "default"
    if stream is None:
        raise ValueError(
            f"rngs has no stream {rule.stochastic_stream!r}, which {rule} draws from in the layer {path!r}: it has "
            f"{', '.join(map(repr, rngs)) or 'none'}"
        )
    return stream.fork()
