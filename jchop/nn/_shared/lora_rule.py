"""`LoraRule`: which layers get adapters of low rank; and the adapters that they begin with."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check_choice, check_int
from jchop._common.paths import check_path_pattern, nearest_paths_hint

Array = jax.Array

#: The first values of adapters: the name, and whether they need the weights before they were packed.
LORA_INITS: Final = {"zeros": False, "loftq": True, "pissa": True}


@dataclass(frozen=True)
class LoraRule:
    """Adapters for the layers whose path matches: y = base(x) + (alpha / rank) x A B (Hu et al., arXiv 2106.09685).

    Args:
        path: a pattern of paths ([](patterns.md)), as in `Rule`.
        rank: the number of columns of A and rows of B.
        alpha: the numerator of the factor. Default: `rank`, so that the factor is 1.
        dropout: the rate of dropout of x on its way to A, from 0 up to 1. Default 0.
        init: ``"zeros"``: A is random and B zero, so the first output equals the base's. ``"loftq"``: A B is the best
            approximation of this rank of the error of the packed weight (Li et al., arXiv 2310.08659, one step).
            ``"pissa"``: A B approximates the weight itself, and the base is the rest, packed again (Meng et al., arXiv
            2404.02948). Default ``"zeros"``.

    Raises:
        TypeError, ValueError: for a field out of range.

    Example:
        >>> import jchop as jc
        >>> jc.nn.LoraRule("mlp", rank=8, alpha=16).factor
        2.0
    """

    path: str
    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    init: str = "zeros"

    def __post_init__(self) -> None:
        check_path_pattern("path", self.path)
        check_int("rank", self.rank, 1)
        check_choice("init", self.init, tuple(LORA_INITS))
        alpha = 1.0 if self.alpha is None else self.alpha
        _check_number("alpha", alpha, "above 0", lambda v: 0 < v <= sys.float_info.max)
        _check_number("dropout", self.dropout, "from 0 up to 1", lambda v: 0 <= v < 1)

    @property
    def factor(self) -> float:
        """Alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def _check_number(name: str, value: Any, range_text: str, holds: Callable[[float], bool]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number {range_text}")
    if not holds(value):
        raise ValueError(f"{name}={value!r} must be a number {range_text}")


# -- adapters of any model ---------------------------------------------------------------------------------------------


def as_lora_rules(rules: LoraRule | Iterable[LoraRule]) -> tuple[LoraRule, ...]:
    """One or several rules, checked."""
    lora_rules = (rules,) if isinstance(rules, LoraRule) else tuple(rules)
    if not lora_rules or not all(isinstance(rule, LoraRule) for rule in lora_rules):
        raise TypeError(f"rules={rules!r} must be a LoraRule, or several")
    return lora_rules


def check_lora_rules_match(rules: Sequence[LoraRule], used: Collection[int], paths: Sequence[str]) -> None:
    """Refuse rules that no layer has taken."""
    if idle := [rule for i, rule in enumerate(rules) if i not in used]:
        hint = nearest_paths_hint([rule.path for rule in idle], paths)
        raise ValueError(
            f"{', '.join(map(str, idle))} matches no linear layer, or only such as an earlier rule matches{hint}"
        )


def initial_adapter(
    rule: LoraRule, what: str, draw: Callable[[], Array], weight: Array, original: Any, has_codes: bool
) -> tuple[Array, Array, Array | None]:
    """A and B of a layer.

    Args:
        rule: its rule.
        what: the layer, for errors.
        draw: gives a key.
        weight: (in, out), unpacked.
        original: the weight before it was packed; None if that is not known.
        has_codes: whether it is packed.

    Returns:
        A, B, and the weight that the layer is to have beside them, None for its own.
    """
    if weight.ndim != 2:
        raise ValueError(f"{what}: its weight of shape {list(weight.shape)} is no matrix")
    if not LORA_INITS[rule.init]:
        a = jax.nn.initializers.he_uniform()(draw(), (weight.shape[0], rule.rank), weight.dtype)
        return a, jnp.zeros((rule.rank, weight.shape[1]), weight.dtype), None
    if rule.rank > min(weight.shape):
        raise ValueError(f"{what}: the rank is above the sizes {list(weight.shape)} of the weight")
    if has_codes and original is None:
        raise ValueError(f"{what}: init={rule.init!r} needs original=, the model before it was packed")
    exact = np.asarray(original if has_codes else weight, np.float64)
    if exact.shape != weight.shape:
        raise ValueError(f"{what}: original has a weight of shape {list(exact.shape)}, not {list(weight.shape)}")
    is_pissa = rule.init == "pissa"
    a, b = (
        jnp.asarray(part, weight.dtype)
        for part in _low_rank_factors(exact if is_pissa else exact - np.asarray(weight), rule)
    )
    if not is_pissa:
        return a, b, None
    product = rule.factor * (np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    return a, b, jnp.asarray(exact - product, weight.dtype)


def initial_stack_adapters(
    rule: LoraRule, what: str, draw: Callable[[int], Array], weight: Array, original: Any, has_codes: bool
) -> tuple[Array, Array, Array | None]:
    """`initial_adapter` of each layer of a stack, whose axes are in front; `draw` gives a key for each."""
    stack_shape = weight.shape[:-2]
    parts = [
        initial_adapter(rule, what, partial(draw, i), weight[at], None if original is None else original[at], has_codes)
        for i, at in enumerate(np.ndindex(*stack_shape))
    ]
    a, b, base = (
        None if arrays[0] is None else jnp.stack(arrays).reshape(*stack_shape, *arrays[0].shape)
        for arrays in zip(*parts, strict=True)
    )
    assert a is not None and b is not None
    return a, b, base


def _low_rank_factors(matrix: np.ndarray, rule: LoraRule) -> tuple[np.ndarray, np.ndarray]:
    """A and B with factor A B the closest matrix of the rank (Eckart and Young, 1936)."""
    left, singular_values, right = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    root = np.sqrt(singular_values[: rule.rank] / rule.factor)
    return left[:, : rule.rank] * root, root[:, None] * right[: rule.rank]


def weight_as_matrix(weight: Array, in_ndim: int, out_ndim: int) -> Array:
    """A weight of `in_ndim` axes of inputs and `out_ndim` of outputs as (in, out); one of more axes as it is."""
    return weight.reshape(math.prod(weight.shape[:in_ndim]), -1) if weight.ndim == in_ndim + out_ndim else weight


def add_adapter_output(y: Array, x: Array, a: Array, b: Array, axis: Sequence[int], rule: LoraRule) -> Array:
    """The result y of a layer that sums over `axis` of x, with what an adapter adds."""
    sum_axes = sorted(i % x.ndim for i in axis)  # as Flax sums, in whatever order they are given
    a = a.reshape(*(x.shape[i] for i in sum_axes), a.shape[-1])
    projection = jnp.tensordot(x, a, (sum_axes, list(range(len(sum_axes)))))
    return y + (projection @ b * rule.factor).reshape(y.shape).astype(y.dtype)


def merge_lora_weight(weight: Array, a: Array, b: Array, rule: LoraRule) -> Array:
    """W + factor A B, in the shape and dtype of W."""
    product = jnp.matmul(a, b, precision="highest").reshape(weight.shape)
    return (weight + rule.factor * product).astype(weight.dtype)
