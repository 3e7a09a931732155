"""The table of Linen's layers and of their roundings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flax import linen as nn

from jchop._quantized.products.contraction import rounded_conv, rounded_dot_general
from jchop._quantized.products.operand_layout import OperandLayout, norm_scale_spec
from jchop._quantized.products.rule import Rule
from jchop._spec.spec import Spec
from jchop.nn._nnx.attention import rounded_attention
from jchop.nn._nnx.layer_kinds import PRODUCT_RULE_FIELDS, einsum_layouts

__all__ = ["LINEN_KINDS", "LinenKind", "learned_scale_name"]


def learned_scale_name(role: str) -> str:
    """The name of the learned scale of ``"weight"`` or ``"activation"`` among the parameters of a layer."""
    return f"{role}_scale"


@dataclass(frozen=True)
class LinenKind:
    """One layer of Linen.

    Args:
        parameters: each with the field of a rule that it is rounded by.
        hook: the field that a product with rounded operands can be set in, and that product.
        layout: of a weight of so many axes.
        inputs: layout of inputs by number of axes, if no product rounds them. Default: their own axes.
        refuses: the fields of a rule that the same layer of NNX has, and this one cannot have, since Flax gives no
            access to its product.
        operation: what it computes with its parameters, as a rule's `operation` names it; empty for a norm.
    """

    parameters: Mapping[str, str]
    hook: tuple[str, Callable[..., Any]] | None = None
    layout: Callable[[Any, int], OperandLayout] | None = None
    inputs: Callable[[Any, int], OperandLayout] | None = None
    refuses: tuple[str, ...] = ()
    operation: str = "dot_general"

    def fields(self, names: Collection[str]) -> set[str]:
        """The fields of a rule that say something for such a layer with the parameters `names`."""
        roles = {role for name, role in self.parameters.items() if name in names}
        flags = {"output": self.parameters, "scale_from": self.keeps_scales, "cache": self.caches}
        return {
            *roles,
            "activation",
            *(PRODUCT_RULE_FIELDS if self.hook else ()),
            *(name for name in flags if flags[name]),
        }

    @property
    def keeps_scales(self) -> bool:
        """Whether its product is of an input and a kernel, whose scales can be kept."""
        return self.hook is not None and bool(self.parameters)

    def spec(self, rule: Rule, name: str) -> Spec | None:
        """The spec of a rule for a parameter."""
        spec = getattr(rule, self.parameters[name])
        return norm_scale_spec(spec) if name == "scale" else spec

    @property
    def caches(self) -> bool:
        """Whether it keeps keys and values."""
        return self.hook is not None and self.hook[1] is rounded_attention


def _dense_layout(layer: Any, ndim: int) -> OperandLayout:
    """A kernel whose last axis is that of the outputs."""
    return OperandLayout((ndim - 1,), tuple(range(ndim - 1)))


def _dense_general_layout(layer: Any, ndim: int) -> OperandLayout:
    features = 1 if isinstance(layer.features, int) else len(layer.features)
    batch, first_feature = len(layer.batch_dims), ndim - features
    return OperandLayout((*range(batch), *range(first_feature, ndim)), tuple(range(batch, first_feature)))


def _linen_conv_transpose_layout(layer: nn.ConvTranspose, ndim: int) -> OperandLayout:
    in_axis, out_axis = (ndim - 1, ndim - 2) if layer.transpose_kernel else (ndim - 2, ndim - 1)
    return OperandLayout((out_axis,), (*range(ndim - 2), in_axis))


def _conv_transpose_input_layout(layer: nn.ConvTranspose, ndim: int) -> OperandLayout:
    space_ndim = 1 if isinstance(layer.kernel_size, int) else len(layer.kernel_size)
    batch = ndim - space_ndim - 1
    return OperandLayout(tuple(range(batch)), tuple(range(batch, ndim)))


def _linen_einsum_layout(layer: nn.Einsum, ndim: int) -> OperandLayout:
    text = _einsum_subscripts(layer)
    return einsum_layouts(text, len(text.partition(",")[0].replace("...", "")), ndim)[1]


def _einsum_input_layout(layer: nn.Einsum, ndim: int) -> OperandLayout:
    return einsum_layouts(_einsum_subscripts(layer), ndim, len(layer.shape))[0]


def _einsum_subscripts(layer: nn.Einsum) -> str:
    if layer.einsum_str is None:
        raise NotImplementedError(
            f"Einsum at {'/'.join(layer.path)!r} gets its einsum_str when it is called; give it to the layer"
        )
    return layer.einsum_str.replace(" ", "")


_LINEN_LINEAR_ROLES = MappingProxyType({"kernel": "weight", "bias": "bias"})
_LINEN_NORM_ROLES = MappingProxyType({"scale": "weight", "bias": "bias"})
LINEN_KINDS: Mapping[type, LinenKind] = MappingProxyType(
    {
        nn.Dense: LinenKind(_LINEN_LINEAR_ROLES, ("dot_general", rounded_dot_general), _dense_layout),
        nn.DenseGeneral: LinenKind(_LINEN_LINEAR_ROLES, ("dot_general", rounded_dot_general), _dense_general_layout),
        nn.Einsum: LinenKind(
            _LINEN_LINEAR_ROLES, None, _linen_einsum_layout, _einsum_input_layout, (*PRODUCT_RULE_FIELDS, "scale_from")
        ),
        nn.Conv: LinenKind(
            _LINEN_LINEAR_ROLES, ("conv_general_dilated", rounded_conv), _dense_layout, operation="conv"
        ),
        nn.ConvTranspose: LinenKind(
            _LINEN_LINEAR_ROLES,
            None,
            _linen_conv_transpose_layout,
            _conv_transpose_input_layout,
            PRODUCT_RULE_FIELDS,
            "conv",
        ),
        nn.Embed: LinenKind(
            MappingProxyType({"embedding": "weight"}), refuses=PRODUCT_RULE_FIELDS, operation="embedding"
        ),
        nn.BatchNorm: LinenKind(_LINEN_NORM_ROLES, operation=""),
        nn.LayerNorm: LinenKind(_LINEN_NORM_ROLES, operation=""),
        nn.RMSNorm: LinenKind(MappingProxyType({"scale": "weight"}), operation=""),
        nn.GroupNorm: LinenKind(_LINEN_NORM_ROLES, operation=""),
        nn.InstanceNorm: LinenKind(_LINEN_NORM_ROLES, operation=""),
        nn.MultiHeadDotProductAttention: LinenKind(MappingProxyType({}), ("attention_fn", rounded_attention)),
        nn.MultiHeadAttention: LinenKind(MappingProxyType({}), ("attention_fn", rounded_attention)),
    }
)
