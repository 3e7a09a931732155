"""The table of layers and of their roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax import lax

from jchop._quantized.products.contraction import einsum_letters
from jchop._quantized.products.operand_layout import OperandLayout, norm_scale_spec
from jchop._quantized.products.rule import Rule
from jchop._spec.spec import Spec
from jchop.nn._nnx import rounding_modules

Array = jax.Array

_NNX_LINEAR_ROLES = MappingProxyType({"kernel": "weight", "bias": "bias"})
_NNX_NORM_ROLES = MappingProxyType({"scale": "weight", "bias": "bias"})
#: The fields of a rule that a product of a layer has.
PRODUCT_RULE_FIELDS = ("gradient", "input_gradient", "weight_gradient", "matmul", "rotation")


@dataclass(frozen=True)
class NnxKind:
    """One layer of Flax, and the places in it.

    Args:
        parameters: its parameters, each with the field of a rule that it is rounded by.
        slots: what its `promote_dtype` is given, one tuple for each number of arrays: names of parameters,
            ``"inputs"``, others (``""``); with a star those that the product rounds.
        product: the attribute that multiplies, the rounding module that replaces it, and Flax's function.
        layout: of its weights, as the product sums over them. Default: its last axis is summed over.
        inputs: layout of the inputs, if `promote_dtype` rounds them. Default: their own axes.
        axes: how many axes that parameter has; more of them in front come of a stack of layers.
        hides_product: whether there is a product that backward roundings cannot reach.
        output: whether `output` is rounded: not if an inner layer returns it.
        operation: what it computes with its parameters, as a rule's `operation` names it; empty for a norm.
    """

    parameters: Mapping[str, str]
    slots: tuple[tuple[str, ...], ...] = ()
    product: tuple[str, type[rounding_modules.RoundedProduct], tuple[Any, ...]] | None = None
    layout: Callable[[Any], OperandLayout] | None = None
    inputs: Callable[[Any], OperandLayout] | None = None
    axes: Callable[[Any], int] = lambda layer: 1
    hides_product: bool = False
    output: bool = True
    operation: str = "dot_general"

    def fields(self, layer: Any) -> tuple[str, ...]:
        """The fields of a rule that say something for a layer of this kind."""
        roles = [role for name, role in self.parameters.items() if getattr(layer, name) is not None]
        activation = ["activation"] if self.product or any("inputs" in slots for slots in self.slots) else []
        return (
            *dict.fromkeys(roles),
            *activation,
            *["output"] * self.output,
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
        """Whether it keeps keys and values."""
        return self.product is not None and self.product[1] is rounding_modules.RoundedAttention

    @property
    def keeps_scales(self) -> bool:
        """Whether its product is of an input and a kernel, whose scales can be kept."""
        return self.product is not None and self.layout is not None


def rules_for_norms(rules: Sequence[Rule], layer_kinds: Iterable[tuple[int, Any]]) -> tuple[Rule, ...]:
    """Each rule as norms have it: if it decides other layers, too, it says only `output` and `bias` for a norm.

    A scale and an input of a norm enter no product, so programs leave them as they are under the same rule.

    Args:
        rules: the rules.
        layer_kinds: of each layer under a rule the number of the rule, and its row of `NNX_KINDS`; None without one.
    """
    wide = {number for number, kind in layer_kinds if kind is None or kind.operation}
    return tuple(
        Rule(
            rule.path,
            layer=rule.layer,
            operation=rule.operation,
            output=rule.output,
            bias=rule.bias,
            stochastic_stream=rule.stochastic_stream,
        )
        if number in wide
        else rule
        for number, rule in enumerate(rules)
    )


def _linear_layout(layer: Any) -> OperandLayout:
    return OperandLayout((1,), (0,))


def _linear_general_layout(layer: nnx.LinearGeneral) -> OperandLayout:
    batch, inside = len(layer.batch_axis), len(layer.in_features)
    free_axes = (*range(batch), *range(batch + inside, batch + inside + len(layer.out_features)))
    return OperandLayout(free_axes, tuple(range(batch, batch + inside)))


def einsum_layouts(subscripts: str, *ndims: int) -> tuple[OperandLayout, OperandLayout]:
    """The layouts of both arrays of an einsum: indices of a batch, others that stay, those that are summed over."""
    left, right, result = einsum_letters(subscripts, *ndims)
    both = [letter for letter in left if letter in right]
    batch, contraction = ([letter for letter in both if (letter in result) is stays] for stays in (True, False))

    def of(term: str) -> OperandLayout:
        free = [*batch, *(letter for letter in term if letter not in both)]
        return OperandLayout.of([term.index(letter) for letter in free], [term.index(letter) for letter in contraction])

    return of(left), of(right)


def _nnx_einsum_layout(layer: nnx.Einsum) -> OperandLayout:
    first_term = layer.einsum_str.partition(",")[0]
    return einsum_layouts(layer.einsum_str, len(first_term.replace("...", "")), len(layer.kernel_shape))[1]


def _nnx_conv_layout(layer: nnx.Conv) -> OperandLayout:
    space = len(layer.kernel_size)
    return OperandLayout((space + 1,), tuple(range(space + 1)))


def _nnx_conv_transpose_layout(layer: nnx.ConvTranspose) -> OperandLayout:
    space = len(layer.kernel_size)
    inside, out = (space + 1, space) if layer.transpose_kernel else (space, space + 1)
    return OperandLayout((out,), (*range(space), inside))


_DOT_GENERAL_PRODUCT = ("dot_general", rounding_modules.RoundedDotGeneral, (lax.dot_general, None))
_LINEAR_SLOTS = (("*inputs", "*kernel", "bias"),)

#: Every layer that can be quantized. Cells of recurrent networks consist of Linear layers.
NNX_KINDS: Mapping[type, NnxKind] = MappingProxyType(
    {
        nnx.Linear: NnxKind(
            _NNX_LINEAR_ROLES, _LINEAR_SLOTS, _DOT_GENERAL_PRODUCT, _linear_layout, axes=lambda layer: 2
        ),
        nnx.LoRALinear: NnxKind(
            _NNX_LINEAR_ROLES, _LINEAR_SLOTS, _DOT_GENERAL_PRODUCT, _linear_layout, axes=lambda layer: 2
        ),
        nnx.LinearGeneral: NnxKind(
            _NNX_LINEAR_ROLES,
            _LINEAR_SLOTS,
            _DOT_GENERAL_PRODUCT,
            _linear_general_layout,
            axes=lambda v: len(v.batch_axis) + len(v.in_features) + len(v.out_features),
        ),
        nnx.Einsum: NnxKind(
            _NNX_LINEAR_ROLES,
            _LINEAR_SLOTS,
            ("einsum_op", rounding_modules.RoundedEinsum, (jax.numpy.einsum,)),
            _nnx_einsum_layout,
            axes=lambda layer: len(layer.kernel_shape),
        ),
        nnx.Conv: NnxKind(
            _NNX_LINEAR_ROLES,
            _LINEAR_SLOTS,
            ("conv_general_dilated", rounding_modules.RoundedConvolution, (lax.conv_general_dilated,)),
            _nnx_conv_layout,
            axes=lambda layer: len(layer.kernel_size) + 2,
            operation="conv",
        ),
        nnx.ConvTranspose: NnxKind(
            _NNX_LINEAR_ROLES,
            (("inputs", "kernel", "bias"),),
            None,
            _nnx_conv_transpose_layout,
            lambda layer: OperandLayout((0,), tuple(range(1, len(layer.kernel_size) + 2))),
            axes=lambda layer: len(layer.kernel_size) + 2,
            hides_product=True,
            operation="conv",
        ),
        nnx.Embed: NnxKind(
            MappingProxyType({"embedding": "weight"}),
            (("embedding",), ("*inputs", "*embedding")),
            ("product", rounding_modules.RoundedDotGeneral, (None,)),
            axes=lambda layer: 2,
            operation="embedding",
        ),
        nnx.BatchNorm: NnxKind(_NNX_NORM_ROLES, (("inputs", "", "", "scale", "bias"),), operation=""),
        nnx.LayerNorm: NnxKind(_NNX_NORM_ROLES, (("inputs", "scale", "bias"),), operation=""),
        nnx.RMSNorm: NnxKind(MappingProxyType({"scale": "weight"}), (("inputs", "scale"),), operation=""),
        nnx.GroupNorm: NnxKind(_NNX_NORM_ROLES, (("inputs", "scale", "bias"),), operation=""),
        nnx.InstanceNorm: NnxKind(_NNX_NORM_ROLES, (("inputs", "scale", "bias"),), operation=""),
        nnx.LoRA: NnxKind(
            MappingProxyType({"lora_a": "weight", "lora_b": "weight"}),
            (("inputs", "lora_a", "lora_b"),),
            layout=_linear_layout,
            axes=lambda layer: 2,
            hides_product=True,
        ),
        nnx.MultiHeadAttention: NnxKind(
            MappingProxyType({}),
            (),
            ("attention_fn", rounding_modules.RoundedAttention, (nnx.dot_product_attention,)),
            output=False,
        ),
    }
)
