"""Calls of a quantized module of Linen: rounding of each layer's inputs, product and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from jchop._common.settings import split_prng_key
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.operand_layout import check_layout_axes, round_in_layout
from jchop._quantized.products.rule import Location, Rule, is_stochastic, refuse_code_products
from jchop._spec.spec import Spec
from jchop.nn._linen.cache import DecodeStep, has_cache, pack_empty_cache
from jchop.nn._linen.layer_kinds import LINEN_KINDS, LinenKind
from jchop.nn._linen.scales import round_linen_operands
from jchop.nn._nnx.layer_kinds import PRODUCT_RULE_FIELDS

Array = jax.Array

__all__ = ["RoundingInterceptor"]


@dataclass(frozen=True)
class RoundingInterceptor:
    """An interceptor for `flax.linen.intercept_methods`.

    Args:
        rules: the rules of layers, by path.
        packed_kernels: the packed kernels of layers whose parameters are rounded already, by path; None if it has none.
        starting: whether the call is to begin scales that are kept.
    """

    rules: Mapping[tuple[str, ...], Rule]
    packed_kernels: Mapping[tuple[str, ...], Any]
    starting: bool = False

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """A method of a layer; if a rule matches the layer, its inputs, product and result are rounded."""
        layer, kind = context.module, LINEN_KINDS.get(type(context.module))
        rule = self.rules.get(layer.path)
        if kind is None or rule is None or context.method_name not in ("__call__", "attend"):
            return call(*args, **kwargs)

        def draw_keys(spec: Spec | None) -> tuple[Array | None, Array | None]:
            if not is_stochastic(spec):
                return None, None
            forward, backward = split_prng_key(layer.make_rng(rule.stochastic_stream))
            return forward, backward

        cache = rule.cache if kind.caches and layer.decode else None
        is_decoding = cache is not None and has_cache(layer)
        if kind.hook is not None:
            decode_step = DecodeStep.of(layer, cache) if cache is not None and is_decoding else None
            self._set_product(layer, kind, rule, decode_step)
        elif rule.activation is not None and not _is_embedding_lookup(layer, context.method_name):
            layout = None if kind.inputs is None else kind.inputs(layer, args[0].ndim)
            check_layout_axes(
                "activation",
                rule.activation,
                args[0].ndim if layout is None else layout.ndim,
                linen_layer_location(layer, rule),
            )
            args = (round_in_layout(layout, args[0], rule.activation, *draw_keys(rule.activation)), *args[1:])
        y = call(*args, **kwargs)
        if cache is not None and not is_decoding:
            pack_empty_cache(layer, cache)
        if rule.output is None or not kind.parameters:
            return y
        check_layout_axes("output", rule.output, y.ndim, linen_layer_location(layer, rule))
        return round_in_layout(None, y, rule.output, *draw_keys(rule.output))

    def _set_product(self, layer: Any, kind: LinenKind, rule: Rule, decode_step: DecodeStep | None) -> None:
        """The product of this one call; a layer of Linen is made anew for each."""
        assert kind.hook is not None
        name, product = kind.hook
        codes = rule.product == "codes" and (rule.activation is not None or rule.weight is not None)
        packed_kernel = self.packed_kernels.get(layer.path) if codes else None
        if kind.keeps_scales and rule.scale_from is not None:
            refuse_code_products(
                rule, str(linen_layer_location(layer, rule)), "codes have scales of their own, and none from scale_from"
            )
        skips_weight = layer.path in self.packed_kernels and not codes
        if self.packed_kernels.get(layer.path) is not None and getattr(layer, "mask", None) is not None:
            object.__setattr__(layer, "mask", None)  # it is in the packed kernel
        right = rule.activation if not kind.parameters else None if skips_weight else rule.weight
        fields = (getattr(rule, field) for field in PRODUCT_RULE_FIELDS)
        how = ProductRoundings(rule.activation, right, *fields, place=linen_layer_location(layer, rule), codes=codes)

        def key() -> Array | None:
            return layer.make_rng(rule.stochastic_stream) if how.stochastic else None

        def multiply(x: Array, w: Array, *args: Any, **kwargs: Any) -> Array:
            assert kind.layout is not None
            layout, source = kind.layout(layer, w.ndim), rule.scale_from
            if packed_kernel is not None and packed_kernel.shape != w.shape:
                refuse_code_products(
                    rule,
                    str(linen_layer_location(layer, rule)),
                    f"its packed kernel is one of a stack of {packed_kernel.shape}",
                )
            code_arguments = {} if packed_kernel is None else {"rounded": w, "codes": packed_kernel.codes()}
            x, w, remaining, product_key = round_linen_operands(layer, source, layout, how, x, w, key(), self.starting)
            return product(x, w, *args, **kwargs, how=remaining, key=product_key, **code_arguments)

        attend = _linen_attention_fn(product, how, key, decode_step)
        object.__setattr__(layer, name, multiply if kind.parameters else attend)


def linen_layer_location(layer: nn.Module, rule: Rule) -> Location:
    """The location of a layer, for errors."""
    return Location(type(layer).__name__, "/".join(layer.path), rule)


def _is_embedding_lookup(layer: nn.Module, method: str) -> bool:
    return isinstance(layer, nn.Embed) and method == "__call__"


def _linen_attention_fn(
    product: Any, how: ProductRoundings, draw_key: Callable[[], Any], decode_step: DecodeStep | None
) -> Callable[..., Array]:
    """In place of `flax.linen.dot_product_attention`."""

    # Linen passes only the arguments of the signature.
    def attend(
        query: Array,
        key: Array,
        value: Array,
        *,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
    ) -> Array:
        if force_fp32_for_softmax:
            raise NotImplementedError("force_fp32_for_softmax=True: a rounded attention has its softmax in its dtype")
        if decode_step is not None:
            key, value = decode_step.put_token(key, value)
        y, weights = product(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, how=how, keys=(draw_key(), draw_key()),
        )  # fmt: skip
        if module is not None:
            module.sow("intermediates", "attention_weights", weights)
        return y

    return attend
