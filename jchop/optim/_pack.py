"""Trees of arrays whose larger arrays are packed: the choice of arrays and formats, and the sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jchop._common.bit_ops import entries_after_reshape, parts_of_axes, place_like, reshape, reshard_like
from jchop._common.paths import check_pattern_mapping, first_matches
from jchop._common.text import RowReport, TableOrLine
from jchop._core.rounding.codes import packed_size
from jchop._spec.spec import Gradient, Spec, as_spec
from jchop._storage import QArray, dequantize, quantize
from jchop._storage._axis_groupings import axes_from_end
from jchop._storage._codes import packs_codes as codes_are_packed
from jchop.optim._leaves import is_float_leaf, path_text

#: Path patterns, each with the spec for the leaves that it matches; None leaves them unpacked.
StateRules = tuple[tuple[str, Spec | None], ...]
#: The leaves of a state with their paths; a packed array is one leaf.
_PathsAndLeaves = list[tuple[tuple[Any, ...], Any]]

#: The substitute for zero in a format without zero: far below any moment's square root, far above underflow.
_ZERO_SUBSTITUTE = 2.0**-100


@partial(jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("shape",))
@dataclass(frozen=True)
class PackedRows:
    """A packed array whose last axes were joined into rows long enough for groups.

    Args:
        rows: the `QArray` of rows.
        shape: of the array.
    """

    rows: QArray
    shape: tuple[int, ...]


class PresetRules(tuple[tuple[str, Spec | None], ...]):
    """Rules of a named optimizer. One may match no array: Muon has a second moment only for some parameters."""


def is_packed_leaf(leaf: Any) -> bool:
    """Whether a leaf is a `QArray` or a `PackedRows`; not if it holds no arrays, as in a state beside adapters."""
    return isinstance(leaf, QArray | PackedRows) and bool(jax.tree.leaves(leaf))


def leaf_codes(leaf: QArray | PackedRows) -> QArray:
    """The `QArray` of a packed leaf."""
    return leaf if isinstance(leaf, QArray) else leaf.rows


def as_state_rules(value: Any) -> StateRules:
    """Rules from one spec for all leaves, or from a mapping of path patterns to specs.

    Raises:
        TypeError, ValueError: for a key that is not a pattern, or a value that is not a spec.
    """
    if isinstance(value, PresetRules):
        return value
    if not isinstance(value, Mapping):
        return (("*", _check_state_spec(as_spec(value, scaled=True))),)
    return tuple(
        (pattern, None if each is None else _check_state_spec(as_spec(each, f"spec[{pattern!r}]", scaled=True)))
        for pattern, each in check_pattern_mapping("spec", value, "{'0.mu': 'dynamic8'}")
    )


def _check_state_spec(spec: Spec) -> Spec:
    if spec.scaled is not None and spec.scaled.sparse is not None:
        raise ValueError(f"spec={str(spec)!r} drops numbers, which a state needs; leave sparse out")
    return spec


# -- packing -----------------------------------------------------------------------------------------------------------


def plan_packing(leaves: _PathsAndLeaves, rules: StateRules, min_size: int) -> list[Spec | None]:
    """The spec of each leaf of a state that is packed or will be packed, and None for other leaves.

    The first rule whose pattern matches a leaf's path decides. Leaves that are not floating-point arrays, or have
    fewer than `min_size` elements, stay unpacked.

    Raises:
        ValueError: for a pattern that is the first match of no floating-point leaf.
    """
    names = {
        place: path_text(path)
        for place, (path, leaf) in enumerate(leaves)
        if is_packed_leaf(leaf) or is_float_leaf(leaf)
    }
    patterns, may_be_idle = [pattern for pattern, _ in rules], isinstance(rules, PresetRules)
    firsts = first_matches("spec", patterns, names.values(), may_be_idle) if names else []
    specs: list[Spec | None] = [None] * len(leaves)
    for place, first in zip(names, firsts, strict=True):
        leaf = leaves[place][1]
        # a shard of a packed leaf may be small
        if first is not None and (is_packed_leaf(leaf) or math.prod(leaf.shape) >= min_size):
            specs[place] = rules[first][1]
    return specs


def pack_by_plan(key: Array | None, leaf: Any, spec: Spec | None) -> Any:
    """A leaf packed as planned.

    Because of the barrier, the first state is packed at run time, not by the compiler
    (`known_results_computed_by_compiler` in `_core/xla/cpu.py`).
    """
    return leaf if spec is None else pack_leaf(key, jax.lax.optimization_barrier(leaf), spec)


def repack_leaf(key: Array | None, old: Any, leaf: Any, offset: Any = 0) -> Any:
    """A leaf packed like the old leaf, with its dtype; unchanged if the old leaf is not packed."""
    if not is_packed_leaf(old):
        return leaf
    new = jax.tree.leaves(pack_leaf(key, leaf, leaf_codes(old).spec, offset))
    return jax.tree.unflatten(jax.tree.structure(old), map(reshard_like, new, jax.tree.leaves(old)))


def pack_leaf(key: Array | None, x: Array, spec: Spec, offset: Any = 0) -> QArray | PackedRows:
    """An array packed; its last axes are joined if they are too short for the groups of the format.

    `offset` is the index of its first element in a larger array, for the random bits.
    """
    rows = reshape(x, packed_row_shape(x.shape, spec))
    if spec.element.code_of(0) is None:
        rows = jnp.where(rows == 0, jnp.asarray(_ZERO_SUBSTITUTE, rows.dtype), rows)
    codes = quantize(rows, spec, key, offset=offset) if spec.rounding.stochastic else quantize(rows, spec)
    return codes if rows.shape == x.shape else PackedRows(codes, tuple(x.shape))


def unpack_leaf(leaf: Any) -> Any:
    """The numbers of a packed leaf; other leaves unchanged."""
    if isinstance(leaf, PackedRows):
        return reshape(dequantize(leaf.rows), leaf.shape)
    return dequantize(leaf) if isinstance(leaf, QArray) else leaf


def packed_row_shape(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """The shape in which an array is packed: with a last axis of whole groups, or of four groups and more."""
    if not shape:
        return (1,)
    fmt = spec.scaled
    group = None if fmt is None or fmt.axis != -1 else fmt.group
    if not isinstance(group, int):
        return tuple(shape)
    lead, last = list(shape[:-1]), shape[-1]
    while lead and last % group and last < 4 * group:
        last *= lead.pop()
    return (*lead, last)


# -- bundles of plain arrays -----------------------------------------------------------------------------------------


@jax.tree_util.register_static
class Packing(NamedTuple):
    """The static data of a packed tree: numbers and text in tuples, which `flax.serialization` does not change.

    Args:
        entries: for each packed leaf, its index among all leaves, its spec as text, and the length of its last axis.
            Also its dtype, and its shape if axes were joined, else None.
    """

    entries: tuple[tuple[int, str, int | None, str, tuple[int, ...] | None], ...]


class QuantizedState(NamedTuple):
    """State of `quantize_state`: a tree of plain arrays, for programs that expect them; `inner_state` reads it.

    Codes have the shape of their array, with fewer entries along one axis if several fill a byte. So the sharding of an
    array is one of its codes.

    Args:
        skips: an int32 count of the skipped steps. Its one name identifies the specs and the shapes of the packed
            arrays. A checkpoint has names but no static parts; so it does not fit a state of other specs or shapes.
        arrays: the state of the wrapped transformation, with codes for each packed array.
        scales: for each packed array its scales and its zero points, or None.
        packing: the meaning of the codes; static.
        key: the key of stochastic packing, or None.
    """

    skips: dict[str, Array]
    arrays: Any
    scales: tuple[tuple[Any, Any], ...]
    packing: Packing
    key: Array | None

    @property
    def skipped(self) -> Array:
        """The count of the skipped steps, int32."""
        return next(iter(self.skips.values()))

    @property
    def inner_state(self) -> Any:
        """The state of the wrapped transformation, with a `QArray` for each packed array (or a `PackedRows`)."""
        leaves, structure = jax.tree.flatten(self.arrays)
        for (place, text, size, dtype, shape), scales in zip(self.packing.entries, self.scales, strict=True):
            array, leaf_spec = leaves[place], as_spec(text, scaled=True)
            if shape is not None:
                *lead, last = packed_row_shape(shape, leaf_spec)
                element = leaf_spec.element
                rows = (*lead, packed_size(last, element.bits) if codes_are_packed(element) else last)
                stack = array.ndim - len(_array_codes_shape(shape, rows))  # axes that vmap added
                array = _reshape_or_struct(array, (*array.shape[:stack], *rows))
            codes = QArray(array, *scales, leaf_spec, size, np.dtype(dtype))
            leaves[place] = codes if shape is None else PackedRows(codes, shape)
        return jax.tree.unflatten(structure, leaves)


def first_quantized_state(structure: Any, leaves: list[Any], key: Array | None, like: Any) -> QuantizedState:
    """The state whose `inner_state` has these leaves, some packed; codes are sharded as the arrays of `like`."""
    packed = [(place, leaf, leaf_codes(leaf)) for place, leaf in enumerate(leaves) if is_packed_leaf(leaf)]
    packing = Packing(
        tuple(
            (place, str(codes.spec), codes.length, np.dtype(codes.dtype).name, _shape_before_rows(leaf))
            for place, leaf, codes in packed
        )
    )
    facts = [(text, tuple(leaves[place].shape), dtype) for place, text, _, dtype, _ in packing.entries]
    # A word for each spec, and a hash, but no paths, which change with the versions of other programs.
    words = dict.fromkeys(re.sub(r"\W.*", "", text) for text, *_ in facts)
    fingerprint = "_".join([*words, sha256(repr(facts).encode()).hexdigest()[:12]])
    skips = {fingerprint: jnp.zeros([], jnp.int32)}
    return QuantizedState(skips, *stored_parts(structure, leaves, like), packing, key)


def stored_parts(structure: Any, leaves: list[Any], like: Any) -> tuple[Any, tuple[tuple[Any, Any], ...]]:
    """The `arrays` and `scales` of a `QuantizedState` with these leaves; codes are sharded as the arrays of `like`."""
    arrays, scales = list(leaves), []
    for place, (leaf, own) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True)):
        if is_packed_leaf(leaf):
            codes, shape = leaf_codes(leaf), _shape_before_rows(leaf)
            stored = codes.qvalue
            if shape is not None:
                stored = _reshape_or_struct(stored, _array_codes_shape(shape, stored.shape))
            arrays[place] = place_like(stored, own)
            scales.append((codes.scale, codes.zero_point))
    return structure.unflatten(arrays), tuple(scales)


def _shape_before_rows(leaf: QArray | PackedRows) -> tuple[int, ...] | None:
    return leaf.shape if isinstance(leaf, PackedRows) else None


def rows_sharding(leaf: QArray | PackedRows, sharding: NamedSharding) -> NamedSharding:
    """The sharding of the rows of a packed leaf, from the sharding of its array."""
    spec = entries_after_reshape(tuple(sharding.spec), parts_of_axes(sharding), leaf.shape, leaf_codes(leaf).shape)
    return sharding.update(spec=jax.P(*spec))


def _array_codes_shape(shape: tuple[int, ...], rows: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which codes of rows are kept: the array's, with fewer entries along the last axis that can."""
    size, count = math.prod(shape), math.prod(rows)
    for axis in reversed(range(len(shape))):
        if size and shape[axis] * count % size == 0:
            return (*shape[:axis], shape[axis] * count // size, *shape[axis + 1 :])
    return rows


def _reshape_or_struct(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else reshape(x, shape)


def require_plan(skips: Mapping[str, Any], leaves: _PathsAndLeaves, rules: StateRules, min_size: int) -> None:
    """Refuses the skips and the leaves of a state whose arrays are not packed as in `plan_packing`.

    Raises:
        ValueError: for the first array that is packed differently, or not at all; for a state mixed from two.
    """
    if len(skips) != 1:
        raise ValueError(f"state.skips has the names {', '.join(skips)}: it is made of the states of several specs")
    for (path, leaf), spec in zip(leaves, plan_packing(leaves, rules, min_size), strict=True):
        actual = leaf_codes(leaf).spec if is_packed_leaf(leaf) else None
        target = None if spec is None else replace(spec, gradient=Gradient())
        if target is not None and target.scaled is not None:
            row_axes = len(packed_row_shape(leaf.shape, target))
            target = replace(target, format=axes_from_end(target.scaled, row_axes))
        if actual != target:
            texts = ["as it is" if s is None else f"as {_short_spec_text(s)}" for s in (actual, target)]
            raise ValueError(
                f"state keeps {path_text(path)} {texts[0]}, and this transformation keeps it {texts[1]}: the state "
                "comes from a transformation with other rules"
            )


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateRow:
    """A row of a report: one array of an optimizer's state.

    Args:
        path: its path in the state, as ``inner_state.0.mu.kernel``.
        shape: of the array.
        dtype: of the array.
        spec: the spec of a packed array, as text; None for an unpacked array.
        nbytes: its bytes, with its scales.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str | None
    nbytes: int


@dataclass(frozen=True)
class StateReport(RowReport):
    """The arrays of a state; `str` is a table.

    Args:
        rows: a `StateRow` for each array.
    """

    rows: tuple[StateRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(row.nbytes for row in self.rows)

    @property
    def packed(self) -> tuple[StateRow, ...]:
        """The arrays that are packed."""
        return tuple(row for row in self.rows if row.spec is not None)

    def _parts(self) -> list[TableOrLine]:
        cells = [(r.path, str(list(r.shape)), r.dtype, r.spec or "as it is", f"{r.nbytes:,}") for r in self.rows]
        cells = [("array", "shape", "dtype", "kept as", "bytes"), *cells]
        return [cells, f"{self.nbytes:,} bytes"]


def state_report(state: Any) -> StateReport:
    """Lists the arrays of an optimizer's state, with the specs of packed arrays, and their bytes.

    Args:
        state: the state of any transformation, or of several in one pytree. Its arrays may be `jax.ShapeDtypeStruct`,
            as from `jax.eval_shape`.

    Returns:
        A `StateReport`.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw8bit(1e-3).init({"w": jnp.zeros((64, 256)), "b": jnp.zeros(256)})
        >>> report = jc.optim.state_report(state)
        >>> [row.path for row in report.packed], report.nbytes
        (['inner_state.0.mu.w', 'inner_state.0.nu.w'], 35336)
    """

    def view(x: Any) -> Any:
        packed = isinstance(x, QuantizedState)
        return {"inner_state": x.inner_state, "key": x.key, "skipped": x.skipped} if packed else x

    tree = jax.tree.map(view, state, is_leaf=lambda x: isinstance(x, QuantizedState))
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_packed_leaf)
    return StateReport(tuple(_state_row(path_text(path), leaf) for path, leaf in leaves))


def _state_row(path: str, leaf: Any) -> StateRow:
    if is_packed_leaf(leaf):
        codes = leaf_codes(leaf)
        shape = leaf.shape
        return StateRow(path, tuple(shape), np.dtype(codes.dtype).name, _short_spec_text(codes.spec), codes.nbytes)
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)  # a Python number
    shape, dtype = tuple(leaf.shape), leaf.dtype
    size = dtype.itemsize if hasattr(dtype, "itemsize") else 0
    return StateRow(path, shape, str(dtype), None, math.prod(shape) * size)


def _short_spec_text(spec: Spec) -> str:
    """The text of a spec; for a long codebook, only its size."""
    text = str(spec)
    return re.sub(r"codebook\([^()]*\)", f"codebook of {2**spec.element.bits} levels", text) if len(text) > 99 else text
