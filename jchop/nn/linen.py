"""Modules of Flax Linen, quantized by the same rules and the same products as those of NNX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

from flax import linen as nn

from jchop._common.checks import check_bool, short_repr
from jchop._quantized.products.rule import Rule, as_rule_tuple
from jchop._quantized.quantize_fn import check_rule_fields
from jchop.nn._linen.lora import Adapted, add_lora, load_lora, merge_lora, save_lora, split_lora
from jchop.nn._linen.programs import Program
from jchop.nn._linen.quantized import Packed, Quantized

__all__ = [
    "Adapted",
    "Packed",
    "Program",
    "Quantized",
    "add_lora",
    "load_lora",
    "merge_lora",
    "quantize",
    "save_lora",
    "split_lora",
]


@overload
def quantize(module: nn.Module, rules: Rule | Iterable[Rule], *, program: Literal[False] = ...) -> Quantized: ...
@overload
def quantize(module: nn.Module, rules: Rule | Iterable[Rule], *, program: Literal[True]) -> Program: ...
def quantize(module: nn.Module, rules: Rule | Iterable[Rule], *, program: bool = False) -> Quantized | Program:
    """A module of Flax Linen that rounds by rules, with the same variables.

    Linen creates its layers while it runs, so the rules are applied in each call. Parameters are rounded before they
    enter the layer, with straight-through gradients, and layers get products with rounded operands if they have a field
    for it (`rounded_dot_general`, `rounded_conv`, `attention_fn`). Paths are those of the variables (``"Dense_0"``,
    ``"block/attention/query"``).

    Args:
        module: any module. Without `program` the layers that rules match must be Dense, DenseGeneral, Einsum, Conv,
            ConvTranspose, Embed, a norm, or attention. Cells of recurrent networks (LSTMCell, GRUCell, SimpleCell)
            consist of Dense layers, which rules match.
        rules: as in `jchop.nn.quantize`, also for norms. Kept scales (`scale_from`) are variables, see `start`: learned
            ones are parameters, ranges and histories are in the collection ``"scale_stats"``. A packed `cache` is in
            the collection ``"cache"``.
        program: quantize the program of the module, as `jchop.quantize_fn` does, whatever the classes of its layers:
            parameters of its own in an einsum, experts, scanned and boxed ones. Rules then have no `output` and
            `cache`. Default False.

    Returns:
        A `Quantized` module, with the `init` and `apply` of Linen, `start`, `pack` and `report`. With ``program=True``
        a `Program`, which has `calibrate`, too.

    Raises:
        TypeError: for invalid rules, or if `module` is not a module.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense = jc.nn.linen.quantize(linen.Dense(2), jc.nn.Rule(weight="e4m3", activation="e5m2"))
        >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 4)))
        >>> dense.apply(variables, jnp.ones((1, 4))).shape
        (1, 2)
    """
    all_rules = as_rule_tuple(rules)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={short_repr(module)} must be a module of Flax Linen; for NNX use jchop.nn.quantize")
    check_bool("program", program)
    if not program:
        return Quantized(module, all_rules)
    check_rule_fields(all_rules)
    return Program(module, all_rules)
