"""The table of Linen's layers and of their roundings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flax import linen as nn

from jchop._products.contraction import conv_general_dilated, dot_general
from jchop._products.layout import Layout, as_gain
from jchop._products.rule import Rule
from jchop.nn._nnx.attention import attention
from jchop.nn._nnx.kinds import PRODUCT_FIELDS, einsum_layouts
from jchop.spec import Spec

__all__ = ["KINDS", "Kind", "scale_name"]


def scale_name(role: str) -> str:
    """The name of the learned scale of ``"weight"`` or ``"activation"`` among the parameters of a layer."""
    return f"{role}_scale"


@dataclass(frozen=True)
class Kind:
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
    layout: Callable[[Any, int], Layout] | None = None
    inputs: Callable[[Any, int], Layout] | None = None
    refuses: tuple[str, ...] = ()
    operation: str = "dot_general"

    def fields(self, names: Collection[str]) -> set[str]:
        """The fields of a rule that say something for such a layer with the parameters `names`."""
        roles = {role for name, role in self.parameters.items() if name in names}
        flags = {"output": self.parameters, "scale_from": self.keeps_scales, "cache": self.caches}
        return {*roles, "activation", *(PRODUCT_FIELDS if self.hook else ()), *(name for name in flags if flags[name])}

    @property
    def keeps_scales(self) -> bool:
        """Whether its product is of an input and a kernel, whose scales can be kept."""
        return self.hook is not None and bool(self.parameters)

    def spec(self, rule: Rule, name: str) -> Spec | None:
        """The spec of a rule for a parameter."""
        spec = getattr(rule, self.parameters[name])
        return as_gain(spec) if name == "scale" else spec

    @property
    def caches(self) -> bool:
        """Whether it keeps keys and values."""
        return self.hook is not None and self.hook[1] is attention


def _last(layer: Any, ndim: int) -> Layout:
    """A kernel whose last axis is that of the outputs."""
    return Layout((ndim - 1,), tuple(range(ndim - 1)))


def _general(layer: Any, ndim: int) -> Layout:
    features = 1 if isinstance(layer.features, int) else len(layer.features)
    batch, first = len(layer.batch_dims), ndim - features
    return Layout((*range(batch), *range(first, ndim)), tuple(range(batch, first)))


def _of_transposed(layer: nn.ConvTranspose, ndim: int) -> Layout:
    inside, out = (ndim - 1, ndim - 2) if layer.transpose_kernel else (ndim - 2, ndim - 1)
    return Layout((out,), (*range(ndim - 2), inside))


def _image(layer: nn.ConvTranspose, ndim: int) -> Layout:
    space = 1 if isinstance(layer.kernel_size, int) else len(layer.kernel_size)
    batch = ndim - space - 1
    return Layout(tuple(range(batch)), tuple(range(batch, ndim)))


def _of_einsum(layer: nn.Einsum, ndim: int) -> Layout:
    text = _subscripts(layer)
    return einsum_layouts(text, len(text.partition(",")[0].replace("...", "")), ndim)[1]


def _into_einsum(layer: nn.Einsum, ndim: int) -> Layout:
    return einsum_layouts(_subscripts(layer), ndim, len(layer.shape))[0]


def _subscripts(layer: nn.Einsum) -> str:
    if layer.einsum_str is None:
        raise NotImplementedError(
            f"Einsum at {'/'.join(layer.path)!r} gets its einsum_str when it is called; give it to the layer"
        )
    return layer.einsum_str.replace(" ", "")


_LINEAR = MappingProxyType({"kernel": "weight", "bias": "bias"})
_NORM = MappingProxyType({"scale": "weight", "bias": "bias"})
KINDS: Mapping[type, Kind] = MappingProxyType(
    {
        nn.Dense: Kind(_LINEAR, ("dot_general", dot_general), _last),
        nn.DenseGeneral: Kind(_LINEAR, ("dot_general", dot_general), _general),
        nn.Einsum: Kind(_LINEAR, None, _of_einsum, _into_einsum, (*PRODUCT_FIELDS, "scale_from")),
        nn.Conv: Kind(_LINEAR, ("conv_general_dilated", conv_general_dilated), _last, operation="conv"),
        nn.ConvTranspose: Kind(_LINEAR, None, _of_transposed, _image, PRODUCT_FIELDS, "conv"),
        nn.Embed: Kind(MappingProxyType({"embedding": "weight"}), refuses=PRODUCT_FIELDS, operation="embedding"),
        nn.BatchNorm: Kind(_NORM, operation=""),
        nn.LayerNorm: Kind(_NORM, operation=""),
        nn.RMSNorm: Kind(MappingProxyType({"scale": "weight"}), operation=""),
        nn.GroupNorm: Kind(_NORM, operation=""),
        nn.InstanceNorm: Kind(_NORM, operation=""),
        nn.MultiHeadDotProductAttention: Kind(MappingProxyType({}), ("attention_fn", attention)),
        nn.MultiHeadAttention: Kind(MappingProxyType({}), ("attention_fn", attention)),
    }
)
