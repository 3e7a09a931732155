"""The arguments of a call of a function of parameters, taken apart; batches of them; parameters within a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check
from jchop._kernels.primitive import materialize
from jchop._quantized.products.codes import CodedArray, expand_codes
from jchop._quantized.products.rule import is_stochastic
from jchop._quantized.program.adapters import AdaptedParam, LoraAdapter
from jchop._quantized.program.provenance import FROM_DATA, FROM_KEYS, NO_PROVENANCE, Provenance, param_provenance
from jchop._quantized.program.weight_layout import StoredAs, WeightLayout, WeightScaleState
from jchop._storage import QArray, dequantize

# -- parameters within a run -------------------------------------------------------------------------------------------


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "scale_state", "adapter"],
    meta_fields=["placement", "leaf", "keeps_full", "codes", "barrier", "factors_fit"],
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
        factors_fit: whether only products take it, whose other operand can be multiplied by factors that are stored
            with it. If not, or if one of several layers is taken by an index, its numbers are multiplied by them.
    """

    value: Any
    placement: WeightLayout | None
    leaf: int
    keeps_full: bool = False
    codes: bool = False
    scale_state: WeightScaleState | None = None
    barrier: bool = False
    adapter: LoraAdapter | None = None
    factors_fit: bool = False

    @property
    def stack(self) -> int:
        """How many axes of a stack it has still."""
        if self.placement is not None:
            return self.value.ndim - self.placement.ndim
        return 0 if self.adapter is None else self.adapter.stack

    def numbers(self, keys: Keys | None) -> Any:
        """The rounded numbers; as `RoundedAndFull` if products need full ones, codes, factors or an adapter, too."""
        key, placement, packed, factors = None, self.placement, self.value, None
        if self.factors_fit and not self.stack:  # stored numbers are used, and the product has the factors
            factors, packed = packed.input_factors.reshape(-1), packed.without_factors
        if is_packed_param(packed):
            low = full = unpack_param(packed)
        elif placement is None:
            low = full = self.value
        else:
            seeds = keys if is_stochastic(placement.spec) else None
            key, backward = (None if seeds is None else seeds.turn(_PARAM_SEEDS + i, self.leaf).key for i in range(2))
            full = placement.rotate(self.value)
            if self.scale_state is None:
                low = placement.round(full, key, backward)
            else:
                low = placement.round_under(self.scale_state, full, key)
        if self.barrier:
            low = materialize(low)
        if placement is not None and self.codes:
            numbers = None if is_packed_param(packed) else jax.lax.stop_gradient(full)
            qarray = packed if numbers is None else placement.pack(numbers, key)
            codes = _packed_param_codes(qarray, numbers) if getattr(qarray, "input_factors", None) is None else None
            return RoundedAndFull(low, full, codes, self.stack, self.adapter, factors)
        is_alone = self.adapter is None and factors is None and not self.keeps_full
        return low if is_alone else RoundedAndFull(low, full, adapter=self.adapter, factors=factors)


@partial(
    jax.tree_util.register_dataclass, data_fields=["low", "full", "codes", "adapter", "factors"], meta_fields=["stack"]
)
@dataclass(frozen=True, eq=False)
class RoundedAndFull:
    """A rounded parameter with itself in full precision, and its codes if they are multiplied, all transformed alike.

    `stack` is the number of axes of a stack that it has still; 0 after a move of its numbers. `adapter` is for the
    products that take it, and `factors` are the factors of their other operand, in the order of the
    parameter.
    """

    low: Any
    full: Any
    codes: CodedArray | None = None
    stack: int = 0
    adapter: LoraAdapter | None = None
    factors: Array | None = None


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
        ValueError: if it has an adapter, or factors of inputs, which would be lost.
    """
    if not isinstance(value, RoundedAndFull):
        return value
    if value.adapter is not None or value.factors is not None:
        what, where = ("an adapter", "rules of the adapters") if value.factors is None else ("factors", "step online")
        raise ValueError(
            f"a parameter of shape {list(value.low.shape)} with {what} reaches another operation than a product, "
            f"through a function with a derivative of its own, a slice or the like; leave it out of the {where}"
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
        """The keys of turn `step` of the equation or program that has the number."""
        return Keys(jax.random.fold_in(jax.random.fold_in(self.key, number), step))

    def within(self, axes: tuple[str, ...], check_vma: bool) -> Keys:
        """The keys of a shard. Under `check_vma` all shards draw alike, because values may be equal on all of them."""
        return self if check_vma else self.turn(0, jax.lax.axis_index(axes))


def batch_arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of a call that a batch stands for: a tuple of them, or the only one."""
    return batch if isinstance(batch, tuple) else (batch,)


def check_batches(batches: Any, repeated: bool) -> None:
    """Refuse objects that are no batches. If they are `repeated` (run through more than once), refuse an iterator.

    Raises:
        TypeError: that names the argument.
    """
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
        raise TypeError(f"batches={batches!r} must be an iterable of arguments, such as [(x,), (x,)]")
    if repeated and iter(batches) is iter(batches):
        raise TypeError(
            f"batches={batches!r} can be run through once, and these steps need them more often (rounding layer after "
            "layer: for each layer; resume: for each start); pass a list, or an object whose __iter__ starts anew"
        )


def map_batches(batches: Any, map_arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Iterable[Any]:
    """Batches with other arguments; they can be run through as often as the given ones."""
    check_batches(batches, repeated=False)
    batches_anew = _MappedBatches(batches, map_arguments)
    return iter(batches_anew) if iter(batches) is iter(batches) else batches_anew


@dataclass(frozen=True)
class _MappedBatches:
    """Batches with other arguments, as often as it is asked for them."""

    batches: Any
    map_arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def __iter__(self) -> Iterator[Any]:
        return (self.map_arguments(batch_arguments(batch)) for batch in self.batches)


def enumerate_batches(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers, from 1.

    Raises:
        ValueError: at the end, if there was none.
    """
    count = 0
    for count, batch in enumerate(batches, start=1):
        yield count, batch
    check(count, "batches has no batch")


class CallArguments:
    """The arguments of a call, taken apart: the arrays of the parameters, then all other arrays.

    The values of parameters with adapters are these without, and `adapters` has those, by the number of the parameter.
    """

    def __init__(self, params: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves_with_path, self.tree = jax.tree_util.tree_flatten_with_path(
            ((params, *args), kwargs), is_leaf=is_param_leaf
        )
        self.leaves = [leaf for _, leaf in leaves_with_path]
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, _ARRAY_LEAF_TYPES)]
        self.values, self.adapters = [self.leaves[i] for i in self.places], dict[int, LoraAdapter]()
        for i, x in enumerate(self.values):
            if isinstance(x, AdaptedParam):
                self.values[i], self.adapters[i] = x.base, x.adapter
        paths = (leaves_with_path[i][0] for i in self.places)
        keys = [path[2:] for path in paths if path[:2] == _PATH_OF_PARAMS]
        # Without the `value` of the box (a variable, its sharding) that a parameter is in.
        boxed = (len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value") for path in keys)
        self.keys = tuple(path[:-1] if box else path for path, box in zip(keys, boxed, strict=True))
        self.paths = tuple(jax.tree_util.keystr(keys, simple=True, separator="/") for keys in self.keys)
        self.count = len(self.keys)
        self.params = params
        self.abstract = [x if isinstance(x, Array) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.values]

    def with_values(self, values: Sequence[Any]) -> Any:
        """The arguments, ``((params, ...), keywords)``, with other arrays in their places."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def classes(self) -> dict[str, str]:
        """The class of the node of the pytree that holds each parameter, by the path of the parameter."""
        return {path: _holder_class(self.params, keys) for path, keys in zip(self.paths, self.keys, strict=True)}

    @property
    def facts(self) -> list[Provenance]:
        """The provenance of each array."""
        params, others = self.abstract[: self.count], self.abstract[self.count :]
        are_keys = [jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in others]
        facts = [
            param_provenance(i, x.shape) if x.dtype.name in CARRIERS else NO_PROVENANCE for i, x in enumerate(params)
        ]
        return [*facts, *(FROM_KEYS if is_key else FROM_DATA for is_key in are_keys)]

    @property
    def signature(self) -> Any:
        """The facts that a traced program depends on; None if they cannot be compared."""
        others = ((i, leaf) for i, leaf in enumerate(self.leaves) if not isinstance(leaf, _ARRAY_LEAF_TYPES))
        static = tuple((i, type(leaf), leaf) for i, leaf in others)
        avals = tuple(jax.typeof(x) if isinstance(x, Array) else (x.shape, x.dtype) for x in self.abstract)
        settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        signature = (self.tree, self.paths, avals, static, settings)
        try:
            hash(signature)
        except TypeError:
            return None
        return signature


def _holder_class(node: Any, path: tuple[Any, ...]) -> str:
    """The class of the node that holds the end of a path; empty if a node on the way gives no names of its parts."""
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name, None)
        elif isinstance(key, jax.tree_util.DictKey | jax.tree_util.SequenceKey):
            node = node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
        else:
            return ""
    return type(node).__name__


def is_param_leaf(leaf: Any) -> bool:
    """Whether a node of a pytree is one parameter: packed, or with an adapter."""
    return isinstance(leaf, _PARAM_LEAF_TYPES)


_PARAM_LEAF_TYPES = QArray, StoredAs, AdaptedParam
_ARRAY_LEAF_TYPES = (*_PARAM_LEAF_TYPES, Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_PATH_OF_PARAMS = (jax.tree_util.SequenceKey(0),) * 2  # in ((params, ...), keywords)
