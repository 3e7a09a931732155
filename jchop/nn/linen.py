"""Modules of Flax Linen, quantized by the same rules and the same products as those of NNX."""

from __future__ import annotations

from flax import linen as nn

from jchop._common.checks import check_instance
from jchop._quantized.products.rule import RuleLike, as_rule_tuple
from jchop._quantized.quantize_fn import refuse_codes_with_kept_scales
from jchop.nn._linen.quantized import Quantized

__all__ = ["Quantized", "quantize"]


def quantize(module: nn.Module, rules: RuleLike) -> Quantized:
    """A module of Flax Linen that rounds by rules, with the same variables.

    The program of the module is quantized, as `jchop.quantize_fn` does, whatever the classes of its layers: parameters
    of its own in an einsum, experts, scanned and boxed ones. Rules may have an `output`, of the results of modules with
    parameters of their own, and a `cache`, of Flax's attention with ``decode=True``. A rule that decides norms alone
    rounds their scales and inputs. Paths are those of the variables (``"Dense_0"``, ``"block/attention/query"``).

    Args:
        module: any module.
        rules: as in `jchop.nn.quantize`. Kept scales (`scale_from`) are variables, see `Quantized.start`: learned ones
            are parameters, ranges and histories are in the collection ``"scale_stats"``. A packed `cache` is in the
            collection ``"cache"``.

    Returns:
        A `Quantized` module, with the `init` and `apply` of Linen, `start`, `pack`, `calibrate` and `report`.

    Raises:
        TypeError: for invalid rules, or if `module` is not a module.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense = jc.nn.linen.quantize(linen.Dense(2), jc.Rule(weight="e4m3", activation="e5m2"))
        >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 4)))
        >>> dense.apply(variables, jnp.ones((1, 4))).shape
        (1, 2)
    """
    all_rules = as_rule_tuple(rules)
    check_instance("module", module, nn.Module, "a module of Flax Linen; for NNX use jchop.nn.quantize")
    refuse_codes_with_kept_scales(all_rules)
    return Quantized(module, all_rules)
