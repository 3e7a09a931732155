"""A pytree of parameters, packed by rules for the paths of its leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jchop._common.paths import first_matches
from jchop._common.settings import split_prng_key
from jchop._quantized.products.operand_layout import check_finite
from jchop._quantized.products.rule import ROUNDING_FIELDS, Location, Rule, RuleLike, as_rule_tuple
from jchop._round.arguments import check_key
from jchop._storage import quantize


def quantize_tree(params: Any, rules: RuleLike, key: Array | None = None) -> Any:
    """A pytree of parameters, stored packed if rules match them; `jchop.quantize` of trees.

    Args:
        params: a pytree of arrays.
        rules: a `Rule`, or several, which have a weight alone, or nothing.
        key: a typed key if a rule is stochastic; it is split, one for each leaf.

    Raises:
        TypeError: for rules that are none, or a matched leaf that is no array of a carrier dtype.
        ValueError: for a rule that matches no leaf or has another field than a weight, or a stochastic one without a
            key. For infinities or NaN in a leaf to be packed, or an array without the axes that its format names.
    """
    all_rules = as_rule_tuple(rules)
    for rule in all_rules:
        wrong = [name for name in ROUNDING_FIELDS if name != "weight" and getattr(rule, name) is not None]
        wrong += [name for name in ("layer", "operation") if getattr(rule, name) is not None]
        if wrong:
            raise ValueError(f"{rule}: parameters have a weight alone, and {', '.join(wrong)} has no effect on them")
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    if key is not None:
        check_key("key", key)
    keys = [None] * len(leaves) if key is None else list(split_prng_key(key, len(leaves)))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    rule_indices = first_matches("rules", [rule.path for rule in all_rules], paths)
    return jax.tree.unflatten(
        tree,
        [
            leaf if index is None else _quantize_leaf(path, leaf, all_rules[index], key)
            for path, index, (_, leaf), key in zip(paths, rule_indices, leaves, keys, strict=True)
        ],
    )


def _quantize_leaf(path: str, leaf: Any, rule: Rule, key: Array | None) -> Any:
    if rule.weight is None:
        return leaf
    try:
        array = leaf if isinstance(leaf, Array) else jnp.asarray(leaf)
        qarray = quantize(array, rule.weight, key)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the leaf {path!r}, by {rule}: {error}") from None
    check_finite(array, f"weight of the {Location('leaf', path, rule)}")
    return qarray
