"""Parameters within a program that is run, rounded where something first computes with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jchop._kernels.primitive import materialize
from jchop._quantized.products.codes import CodedArray, expand_codes
from jchop._quantized.products.rule import is_stochastic
from jchop._quantized.program.adapters import LoraAdapter
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout, WeightScaleState
from jchop.storage import QArray, dequantize

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "scale_state", "adapter"],
    meta_fields=["placement", "leaf", "keeps_full", "codes", "barrier"],
)
@dataclass(frozen=True, eq=False)
class LazyParam:
    """A parameter, or one of a stack, that is rounded, or unpacked, where it is first computed with.

    So a loop over a stack of layers holds the numbers of one layer at a time.

    Args:
        value: its numbers, or its codes and scales.
        placement: its rounding; None if it has an adapter and is not rounded.
        leaf: its index.
        keeps_full: whether its numbers before the rounding are needed, too.
        codes: whether its codes are.
        scale_state: its kept scales; None: from its numbers.
        barrier: whether other operations than products compute with it. These are then compiled alike for codes and
            for numbers.
        adapter: beside the products that take it; None for none.
    """

    value: Any
    placement: WeightLayout | None
    leaf: int
    keeps_full: bool = False
    codes: bool = False
    scale_state: WeightScaleState | None = None
    barrier: bool = False
    adapter: LoraAdapter | None = None

    @property
    def stack(self) -> int:
        """How many axes of a stack it has still."""
        if self.placement is not None:
            return self.value.ndim - self.placement.ndim
        return 0 if self.adapter is None else self.adapter.stack

    def numbers(self, keys: Keys | None) -> Any:
        """The rounded numbers."""
        key = None
        if is_packed_param(self.value):
            low = full = unpack_param(self.value)
        elif self.placement is None:
            low = full = self.value
        else:
            seeds = keys if is_stochastic(self.placement.spec) else None
            key, backward = (None if seeds is None else seeds.turn(_PARAM_SEEDS + i, self.leaf).key for i in range(2))
            full = self.placement.rotate(self.value)
            low = (
                self.placement.round(full, key, backward)
                if self.scale_state is None
                else self.placement.round_under(self.scale_state, full, key)
            )
        if self.barrier:
            low = materialize(low)
        if self.placement is None or not self.codes:
            return (
                RoundedAndFull(low, full, adapter=self.adapter) if self.keeps_full or self.adapter is not None else low
            )
        numbers = None if is_packed_param(self.value) else jax.lax.stop_gradient(full)
        qarray = self.value if numbers is None else self.placement.pack(numbers, key)
        return RoundedAndFull(low, full, _packed_param_codes(qarray, numbers), self.stack, self.adapter)


@partial(jax.tree_util.register_dataclass, data_fields=["low", "full", "codes", "adapter"], meta_fields=["stack"])
@dataclass(frozen=True, eq=False)
class RoundedAndFull:
    """A rounded parameter with itself in full precision, and its codes if they are multiplied, all transformed alike.

    `stack` is the number of axes of a stack that it has still; 0 after a move of its numbers. `adapter` is for the
    products that take it.
    """

    low: Any
    full: Any
    codes: CodedArray | None = None
    stack: int = 0
    adapter: LoraAdapter | None = None


def _packed_param_codes(packed: QArray | StoredAs, numbers: jax.Array | None) -> CodedArray:
    """The codes of a packed parameter, in its shape; of its numbers, if they are known."""
    if isinstance(packed, QArray):
        return expand_codes(packed, numbers)
    qarray = packed.stored
    parts = expand_codes(qarray, None if numbers is None else numbers.reshape(qarray.shape))
    return parts.map_arrays(lambda v: v.reshape(packed.shape))


def rounded_value(value: Any) -> Any:
    """A value in low precision, without itself in full precision.

    Raises:
        ValueError: if it has an adapter, which would be lost.
    """
    if not isinstance(value, RoundedAndFull):
        return value
    if value.adapter is not None:
        raise ValueError(
            f"a parameter of shape {list(value.low.shape)} with an adapter reaches another operation than a product, "
            "through a function with a derivative of its own, a slice or the like; leave it out of the rules of the "
            "adapters"
        )
    return value.low


def is_packed_param(value: Any) -> bool:
    """Whether a parameter is stored as codes and scales."""
    return isinstance(value, QArray | StoredAs)


def unpack_param(value: QArray | StoredAs) -> Array:
    """The numbers of a packed parameter."""
    return jnp.asarray(value.dequantize() if isinstance(value, StoredAs) else dequantize(value))


#: The number under which parameters draw, and by one more their cotangents; equations have smaller ones.
_PARAM_SEEDS = 1 << 30


@partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=[])
@dataclass(frozen=True)
class Keys:
    """The key of a program; each equation and each turn of a loop has one of its own."""

    key: Array

    def turn(self, number: int, step: Array | int = 0) -> Keys:
        """That of turn `step` of the equation or program that has the number."""
        return Keys(jax.random.fold_in(jax.random.fold_in(self.key, number), step))

    def within(self, axes: tuple[str, ...], check_vma: bool) -> Keys:
        """That of a shard: all draw alike if the types of values say what varies, because some may not."""
        return self if check_vma else self.turn(0, jax.lax.axis_index(axes))
