"""The table of layers and of their roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax import lax

from jchop._products.contraction import letters_of
from jchop._products.layout import Layout, as_gain
from jchop._products.rule import Rule
from jchop.nn._nnx import hooks
from jchop.spec import Spec

Array = jax.Array

__all__ = ["KINDS", "Kind", "einsum_layouts", "for_norms"]

_LINEAR = MappingProxyType({"kernel": "weight", "bias": "bias"})
_NORM = MappingProxyType({"scale": "weight", "bias": "bias"})
#: The fields of a rule that a product of a layer has.
PRODUCT_FIELDS = ("gradient", "input_gradient", "weight_gradient", "matmul", "rotation")


@dataclass(frozen=True)
class Kind:
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
    product: tuple[str, type[hooks.Product], tuple[Any, ...]] | None = None
    layout: Callable[[Any], Layout] | None = None
    inputs: Callable[[Any], Layout] | None = None
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
            *(PRODUCT_FIELDS if self.product else ()),
            *["scale_from"] * self.keeps_scales,
            *["cache"] * self.caches,
        )

    def spec(self, rule: Rule, name: str) -> Spec | None:
        """The spec of a rule for a parameter."""
        spec = getattr(rule, self.parameters[name])
        return as_gain(spec) if name == "scale" else spec

    @property
    def caches(self) -> bool:
        """Whether it keeps keys and values."""
        return self.product is not None and self.product[1] is hooks.Attention

    @property
    def keeps_scales(self) -> bool:
        """Whether its product is of an input and a kernel, whose scales can be kept."""
        return self.product is not None and self.layout is not None


def for_norms(rules: Sequence[Rule], layer_kinds: Iterable[tuple[int, Any]]) -> tuple[Rule, ...]:
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


def _matrix(layer: Any) -> Layout:
    return Layout((1,), (0,))


def _general(layer: nnx.LinearGeneral) -> Layout:
    batch, inside = len(layer.batch_axis), len(layer.in_features)
    free_axes = (*range(batch), *range(batch + inside, batch + inside + len(layer.out_features)))
    return Layout(free_axes, tuple(range(batch, batch + inside)))


def einsum_layouts(subscripts: str, *ndims: int) -> tuple[Layout, Layout]:
    """The layouts of both arrays of an einsum: indices of a batch, others that stay, those that are summed over."""
    left, right, result = letters_of(subscripts, *ndims)
    both = [letter for letter in left if letter in right]
    batch, contraction = ([letter for letter in both if (letter in result) is stays] for stays in (True, False))

    def of(term: str) -> Layout:
        free = [*batch, *(letter for letter in term if letter not in both)]
        return Layout.of([term.index(letter) for letter in free], [term.index(letter) for letter in contraction])

    return of(left), of(right)


def _of_einsum(layer: nnx.Einsum) -> Layout:
    first_term = layer.einsum_str.partition(",")[0]
    return einsum_layouts(layer.einsum_str, len(first_term.replace("...", "")), len(layer.kernel_shape))[1]


def _of_conv(layer: nnx.Conv) -> Layout:
    space = len(layer.kernel_size)
    return Layout((space + 1,), tuple(range(space + 1)))


def _of_transposed(layer: nnx.ConvTranspose) -> Layout:
    space = len(layer.kernel_size)
    inside, out = (space + 1, space) if layer.transpose_kernel else (space, space + 1)
    return Layout((out,), (*range(space), inside))


_DOT = ("dot_general", hooks.DotGeneral, (lax.dot_general, None))
_PRODUCT = (("*inputs", "*kernel", "bias"),)

#: Every layer that can be quantized. Cells of recurrent networks consist of Linear layers.
KINDS: Mapping[type, Kind] = MappingProxyType(
    {
        nnx.Linear: Kind(_LINEAR, _PRODUCT, _DOT, _matrix, axes=lambda layer: 2),
        nnx.LoRALinear: Kind(_LINEAR, _PRODUCT, _DOT, _matrix, axes=lambda layer: 2),
        nnx.LinearGeneral: Kind(
            _LINEAR,
            _PRODUCT,
            _DOT,
            _general,
            axes=lambda v: len(v.batch_axis) + len(v.in_features) + len(v.out_features),
        ),
        nnx.Einsum: Kind(
            _LINEAR,
            _PRODUCT,
            ("einsum_op", hooks.Einsum, (jax.numpy.einsum,)),
            _of_einsum,
            axes=lambda layer: len(layer.kernel_shape),
        ),
        nnx.Conv: Kind(
            _LINEAR,
            _PRODUCT,
            ("conv_general_dilated", hooks.Convolution, (lax.conv_general_dilated,)),
            _of_conv,
            axes=lambda layer: len(layer.kernel_size) + 2,
            operation="conv",
        ),
        nnx.ConvTranspose: Kind(
            _LINEAR,
            (("inputs", "kernel", "bias"),),
            None,
            _of_transposed,
            lambda layer: Layout((0,), tuple(range(1, len(layer.kernel_size) + 2))),
            axes=lambda layer: len(layer.kernel_size) + 2,
            hides_product=True,
            operation="conv",
        ),
        nnx.Embed: Kind(
            MappingProxyType({"embedding": "weight"}),
            (("embedding",), ("*inputs", "*embedding")),
            ("product", hooks.DotGeneral, (None,)),
            axes=lambda layer: 2,
            operation="embedding",
        ),
        nnx.BatchNorm: Kind(_NORM, (("inputs", "", "", "scale", "bias"),), operation=""),
        nnx.LayerNorm: Kind(_NORM, (("inputs", "scale", "bias"),), operation=""),
        nnx.RMSNorm: Kind(MappingProxyType({"scale": "weight"}), (("inputs", "scale"),), operation=""),
        nnx.GroupNorm: Kind(_NORM, (("inputs", "scale", "bias"),), operation=""),
        nnx.InstanceNorm: Kind(_NORM, (("inputs", "scale", "bias"),), operation=""),
        nnx.LoRA: Kind(
            MappingProxyType({"lora_a": "weight", "lora_b": "weight"}),
            (("inputs", "lora_a", "lora_b"),),
            layout=_matrix,
            axes=lambda layer: 2,
            hides_product=True,
        ),
        nnx.MultiHeadAttention: Kind(
            MappingProxyType({}), (), ("attention_fn", hooks.Attention, (nnx.dot_product_attention,)), output=False
        ),
    }
)
