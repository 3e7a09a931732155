"""Any transformation with its state packed between steps, in chunks if asked, or kept on the host.

A chunk is a part of every large array, so that intermediate results fit in a cache. Arrays are cut along their first
axis, so that cutting and joining move no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._common.bit_ops import fit_sharding, varying_like
from jchop._common.checks import check_choice
from jchop._common.settings import always_jit
from jchop._kernels.scaled import code_and_scale_shapes
from jchop._spec.spec import Spec
from jchop._storage import QArray
from jchop.optim import _chain as chain
from jchop.optim import _leaves as base
from jchop.optim import _pack as packing
from jchop.optim._join import plan_joining
from jchop.optim._pack import QuantizedState, is_packed_leaf, leaf_codes

#: The limit of elements of an array that is cut: its place in the stream of random words has 32 bits.
_MOST_CHUNK_ELEMENTS = 1 << 32


@dataclass(frozen=True)
class Chunks:
    """The leaves that are cut, and the number of chunks.

    Args:
        count: of chunks.
        update_is_cut: for each leaf of the updates, whether it is cut.
        owners: for each leaf of the state (a packed array is one leaf), the index of its leaf of the updates. None if
            it has none.
    """

    count: int
    update_is_cut: tuple[bool, ...]
    owners: tuple[int | None, ...]

    @property
    def state_is_cut(self) -> tuple[bool, ...]:
        """For each leaf of the state, whether it is cut."""
        return tuple(owner is not None and self.update_is_cut[owner] for owner in self.owners)

    def part(self, updates: Any, leaves: list[Any], params: Any, i: Array | None = None) -> tuple[Any, list[Any], Any]:
        """Chunk i of the leaves that are cut; for None, the other leaves. The rest are empty arrays.

        Leaves of the state without a leaf of the updates stay.
        """

        def change(leaf: Any, is_cut: bool) -> Any:
            if is_cut == (i is None):
                return _empty_like_leaf(leaf)
            return leaf if i is None else self._chunk(leaf, i)

        leaves = [
            leaf if owner is None else change(leaf, self.update_is_cut[owner])
            for leaf, owner in zip(leaves, self.owners, strict=True)
        ]
        is_cut = jax.tree.unflatten(jax.tree.structure(updates), self.update_is_cut)
        updates, params = (None if tree is None else jax.tree.map(change, tree, is_cut) for tree in (updates, params))
        return updates, leaves, params

    def _chunk(self, leaf: Any, i: Array) -> Any:
        if isinstance(leaf, QArray):
            length = leaf.length // self.count if leaf.ndim == 1 and leaf.length is not None else leaf.length
            return replace(jax.tree.map(lambda x: self._chunk(x, i), leaf), length=length)
        chunks = _short_floats_as_words(leaf).reshape(self.count, leaf.shape[0] // self.count, *leaf.shape[1:])
        return _words_as_floats(lax.dynamic_index_in_dim(chunks, i, 0, keepdims=False), leaf.dtype)

    def start(self, leaf: Any, i: Array) -> Array:
        """The index of the first element of chunk i in a leaf of the state."""
        return i.astype(jnp.uint32) * jnp.uint32(math.prod(leaf.shape) // self.count)


def plan_chunks(updates: Any, state: Any, count: int) -> Chunks | None:
    """The leaves that can be cut into `count` chunks; None if there are none.

    The leaves of the state that belong to a leaf of the updates have its shape, and a path that ends with its path. The
    leaf is cut if the first axes of all their stored arrays, and its own, are multiples of `count`. At least one of
    them must be packed.

    Args:
        updates: a pytree of arrays.
        state: the state of the wrapped transformation, with packed leaves.
        count: number of chunks, 2 or more.
    """
    update_leaves = jax.tree_util.tree_leaves_with_path(updates)
    state_leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_packed_leaf)
    owners = [base.owner_index(path, leaf, update_leaves) for path, leaf in state_leaves]
    cut = []
    for place, (_, update) in enumerate(update_leaves):
        own = [leaf for owner, (_, leaf) in zip(owners, state_leaves, strict=True) if owner == place]
        is_divisible = base.is_float_leaf(update) and all(_is_divisible(leaf, count) for leaf in (update, *own))
        cut.append(is_divisible and any(map(is_packed_leaf, own)))
    return Chunks(count, tuple(cut), tuple(owners)) if any(cut) else None


def _is_divisible(leaf: Any, count: int) -> bool:
    """Whether an array of the state can be cut into `count` chunks along its first axis without cutting groups."""
    shape = tuple(leaf.shape)
    if not shape or not shape[0] or shape[0] % count or math.prod(shape) >= _MOST_CHUNK_ELEMENTS:
        return False
    if not is_packed_leaf(leaf):
        return True
    if not isinstance(leaf, QArray):
        return False
    if leaf.spec.scaled is None:
        return len(shape) > 1
    chunk_parts = jax.tree.leaves(code_and_scale_shapes(leaf.spec, (shape[0] // count, *shape[1:]))[1:])
    parts = jax.tree.leaves((leaf.scale, leaf.zero_point))
    return leaf.qvalue.shape[0] % count == 0 and [part.shape for part in chunk_parts] == [
        (part.shape[0] // count, *part.shape[1:]) if part.shape and part.shape[0] % count == 0 else None
        for part in parts
    ]


def _empty_like_leaf(leaf: Any) -> Any:
    """An empty array with the axes of a leaf, and one axis at least."""
    return jnp.zeros((0, *tuple(leaf.shape)[1:]), (leaf_codes(leaf) if is_packed_leaf(leaf) else leaf).dtype)


def _short_floats_as_words(x: Array) -> Array:
    """The bits of short floats, because of the quirk `short_floats_converted_whole` (`_core/xla/cpu.py`)."""
    short = base.is_float_leaf(x) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if short else x


def _words_as_floats(x: Array, dtype: Any) -> Array:
    """The inverse of `_short_floats_as_words`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


# -- the loop ----------------------------------------------------------------------------------------------------------


def loop_over_chunks(step_of_chunk: Callable[[Array], tuple[Any, Any, Array]], count: int) -> tuple[Any, Any, Array]:
    """The results of `step_of_chunk` for each chunk, joined along the first axis; and whether all chunks are sound.

    Args:
        step_of_chunk: maps the index of a chunk, an int32 scalar, to two pytrees of arrays and a bool scalar. The
            arrays of the second pytree take long to compute, and are stored one iteration later, because of the quirk
            `write_into_part_has_one_thread` (`_core/xla/cpu.py`).
        count: of chunks.
    """
    first = jax.eval_shape(step_of_chunk, jax.ShapeDtypeStruct((), jnp.int32))
    words = jax.eval_shape(lambda parts: jax.tree.map(_short_floats_as_words, parts), first[:2])
    early, late = jax.tree.map(lambda x: jnp.zeros((count * x.shape[0], *x.shape[1:]), x.dtype), words)
    pending = jax.tree.map(jnp.zeros_like, words[1])

    def body(i: Array, carry: Any) -> Any:
        early, late, pending, sound = carry
        late = _write_chunk(late, pending, jnp.maximum(i - 1, 0))
        now, pending, is_sound = step_of_chunk(i)
        now, pending = jax.tree.map(_short_floats_as_words, (now, pending))
        return _write_chunk(early, now, i), late, pending, sound & is_sound

    early, late, pending, sound = lax.fori_loop(0, count, body, (early, late, pending, jnp.asarray(True)))
    late = _write_chunk(late, pending, jnp.asarray(count - 1))
    return *jax.tree.map(lambda x, like: _words_as_floats(x, like.dtype), (early, late), first[:2]), sound


def _write_chunk(whole: Any, parts: Any, i: Array) -> Any:
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * part.shape[0], 0), whole, parts)


def merge_leaves(whole: list[Any], cut: list[Any], is_cut: tuple[bool, ...]) -> list[Any]:
    """Leaves in order: the next leaf of `cut` if `is_cut`, else the leaf of `whole`."""
    rest = iter(cut)
    return [next(rest) if chunk else leaf for leaf, chunk in zip(whole, is_cut, strict=True)]


#: The default of the fewest elements of a packed array.
MIN_PACKED_SIZE = 4096
_NONFINITE_CHOICES = ("skip", "propagate")


def quantize_state(
    inner: optax.GradientTransformation,
    spec: Any,
    key: Array | None = None,
    *,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Holds the floating-point state of `inner` packed between steps, each array as a `QArray`.

    A step unpacks the state, runs `inner` on plain arrays, and packs the new state. ``init`` selects the packed arrays
    by size and by path; `state_report` lists them. If the last axis of an array is too short for the groups of a
    format, its last axes are joined. No step changes the dtypes of the state, for any dtypes of the gradients.

    If a format has no zero, zeros are stored as numbers of at most 2^-100.

    Args:
        inner: any Optax transformation.
        spec: a `Spec`, format or text for every array. Or a mapping of patterns ([](patterns.md)) to specs, or to None
            for arrays that stay unpacked. A path is a text like ``0.mu.layer.kernel``: indexes and names from the state
            of `inner` down. The first pattern that matches decides; arrays without a match stay unpacked. A pattern
            that is the first match of no array is an error.
        key: a typed key, needed by stochastic specs. The state keeps it, and each step splits it into a key for each
            array.
        min_size: arrays of fewer elements stay unpacked. Default (None): 4096.
        nonfinite: the choice if a gradient, an update or the new state is NaN or infinite; few packed formats have
            these values. ``"skip"`` (default) skips the step: parameters and state do not change, and ``state.skipped``
            counts it. ``"propagate"`` makes groups with a NaN or an infinity NaN as a whole; an error for formats
            without NaN.
        chunks: the number of chunks of a step. Each chunk is a part, along the first axis, of every array that can be
            cut without cutting groups. The results stay the same. Unpacked moments then need less memory, and on a CPU
            less time. `inner` must treat each number by itself (no clipping by a norm, no factored moments). The arrays
            must not be split between devices along their first axis. Default (None): 1.

    Returns:
        An Optax transformation. Its state has `inner_state`, the state of `inner` with a `jchop.QArray` for each packed
        array, and `skipped`, the count of skipped steps.

    Raises:
        TypeError, ValueError: for an argument that is not allowed. At ``init``, for a rule that matches no array. When
            traced, for a state of other specs.

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> rules = {"0.mu": jc.formats.dynamic8, "0.nu": "bfloat16"}
        >>> tx = jc.optim.quantize_state(optax.adam(1e-3), rules)
        >>> state = tx.init({"w": jnp.zeros((64, 256)), "b": jnp.zeros(256)})
        >>> adam = state.inner_state[0]
        >>> adam.mu["w"].qvalue.dtype, adam.nu["w"].qvalue.dtype, adam.mu["b"].dtype
        (dtype('uint8'), dtype(bfloat16), dtype('float32'))
    """
    return pack_state(inner, spec, key, min_size, nonfinite, chunks)


def pack_state(
    inner: Any, spec: Any, key: Array | None, min_size: Any, nonfinite: Any, chunks: Any, *, may_join: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`quantize_state`; `may_join` promises that `inner` treats each number by itself.

    Then arrays may be joined (`Joining`), which copies them. `chunks` are asked for to save memory, so not with them.
    """
    check_choice("nonfinite", nonfinite, _NONFINITE_CHOICES)
    count = base.check_static_size("chunks", chunks, 1)
    least = base.check_static_size("min_size", min_size, MIN_PACKED_SIZE)
    rules = packing.as_state_rules(spec)
    if nonfinite == "propagate":
        rules = type(rules)((pattern, None if rule is None else _with_nan_groups(rule)) for pattern, rule in rules)
    start = base.first_state_key(key, *(rule for _, rule in rules if rule is not None and rule.rounding.stochastic))
    inner = base.as_transformation(inner)

    def init(params: Any) -> QuantizedState:
        inner_state = inner.init(params)
        leaves, structure = jax.tree_util.tree_flatten_with_path(inner_state, is_leaf=is_packed_leaf)
        specs = structure.unflatten(packing.plan_packing(leaves, rules, least))
        following, packed_tree = base.map_with_keys(packing.pack_by_plan, start, inner_state, specs)
        packed_leaves = structure.flatten_up_to(packed_tree)
        return packing.first_quantized_state(structure, packed_leaves, following, inner_state)

    def update(updates: Any, state: QuantizedState, params: Any = None, **extra: Any) -> tuple[Any, QuantizedState]:
        inner_state = state.inner_state
        leaves, structure = jax.tree_util.tree_flatten_with_path(inner_state, is_leaf=is_packed_leaf)
        packing.require_plan(state.skips, leaves, rules, least)
        joins = may_join and chunks is None and state.key is None
        joining = plan_joining(updates, inner_state, params) if joins else None
        operands, at_once = (updates, inner_state, params), count
        if joining is not None:
            operands = joining.join(updates), joining.join_state(inner_state), joining.join(params)
            at_once = joining.count
        step_leaves, step_structure = jax.tree.flatten(operands[1], is_leaf=is_packed_leaf)
        following, keys = base.split_key(state.key, len(step_leaves))

        def advance(updates: Any, old_leaves: list[Any], params: Any) -> tuple[Any, list[Any]]:
            unpacked = step_structure.unflatten(map(packing.unpack_leaf, old_leaves))
            inner_updates, new = inner.update(updates, unpacked, params, **extra)
            new_leaves = [  # a packed leaf is packed from the dtype that was computed
                jnp.asarray(new, old.dtype) if base.is_float_leaf(old) and not is_packed_leaf(old) else new
                for old, new in zip(old_leaves, step_structure.flatten_up_to(new), strict=True)
            ]
            return inner_updates, new_leaves

        leaves_out = nonfinite == "skip"
        cuts = plan_chunks(*operands[:2], at_once) if at_once > 1 else None
        operands = operands[0], step_leaves, operands[2]
        if cuts is None:
            inner_updates, packed_leaves, sound = _step_whole(advance, keys, operands, leaves_out)
        else:
            inner_updates, packed_leaves, sound = _step_in_chunks(advance, keys, operands, leaves_out, cuts)
        if joining is not None:
            starts = joining.row_starts(sound)
            inner_updates = joining.split(inner_updates, updates, starts)
            new_state = joining.split_state(step_structure.unflatten(packed_leaves), inner_state, starts)
            packed_leaves = structure.flatten_up_to(new_state)
        skips, parts = state.skips, packing.stored_parts(structure, packed_leaves, state.arrays)
        if leaves_out:
            sound = chain.sound_on_all_ranks(sound, advance, *operands)
            skips = {name: chain.count_skips(total, sound) for name, total in skips.items()}
            # A choice between codes in the shape of their array keeps the sharding that the old ones have.
            codes, treedef = jax.tree.flatten(parts)
            parts = treedef.unflatten(chain.select_tree(sound, codes, jax.tree.leaves((state.arrays, state.scales))))
            inner_updates = chain.zeros_unless(sound, inner_updates)
        arrays, scales = parts
        return inner_updates, QuantizedState(skips, arrays, scales, state.packing, following)

    return base.make_transformation(init, update)


_StateAdvance = Callable[[Any, list[Any], Any], tuple[Any, list[Any]]]
#: Updates, the leaves of the state, and parameters.
_StepOperands = tuple[Any, list[Any], Any]


def _step_whole(
    advance: _StateAdvance, keys: list[Array | None], operands: _StepOperands, skips: bool
) -> tuple[Any, list[Any], Array]:
    """The updates, the packed leaves of the new state, and whether all numbers are sound.

    Args:
        advance: computes the updates and the unpacked leaves of the new state.
        keys: a key or None for each leaf.
        operands: updates, the leaves of the state, and parameters.
        skips: whether unsound steps are skipped, so that soundness is computed.
    """
    inner_updates, new = advance(*operands)
    old_leaves = operands[1]
    if not skips:
        return inner_updates, list(map(packing.repack_leaf, keys, old_leaves, new)), jnp.asarray(True)
    stays = list(map(_leaf_stays_finite, old_leaves, new))
    packed_leaves = list(map(_repack_if, keys, old_leaves, new, stays))
    return inner_updates, packed_leaves, _is_step_sound(operands[0], inner_updates, stays)


def _step_in_chunks(
    advance: _StateAdvance, keys: list[Array | None], operands: _StepOperands, skips: bool, cuts: Chunks
) -> tuple[Any, list[Any], Array]:
    """`_step_whole` with the leaves that can be cut computed chunk by chunk."""
    whole, packed_leaves, sound = _step_whole(advance, keys, cuts.part(*operands), skips)
    is_cut = cuts.state_is_cut
    leaves, own_keys = list(compress(operands[1], is_cut)), list(compress(keys, is_cut))

    def step_of_chunk(i: Array) -> tuple[Any, Any, Array]:
        part = cuts.part(*operands, i)
        # The barrier keeps the compiler from fusing the computation of new moments with their uses.
        all_updates, all_new = jax.lax.optimization_barrier(advance(*part))
        inner_updates = list(compress(jax.tree.leaves(all_updates), cuts.update_is_cut))
        old, new = list(compress(part[1], is_cut)), list(compress(all_new, is_cut))
        codes = list(map(packing.repack_leaf, own_keys, old, new, [cuts.start(leaf, i) for leaf in leaves]))
        if not skips:
            return inner_updates, codes, jnp.asarray(True)
        stays = list(map(_leaf_stays_finite, old, new))
        return inner_updates, codes, _is_step_sound(part[0], inner_updates, stays, in_memory=True)

    inner_updates, codes, chunks_sound = loop_over_chunks(step_of_chunk, cuts.count)
    update_leaves, structure = jax.tree.flatten(whole)
    whole = structure.unflatten(merge_leaves(update_leaves, inner_updates, cuts.update_is_cut))
    codes = [jax.tree.structure(old).unflatten(jax.tree.leaves(new)) for old, new in zip(leaves, codes, strict=True)]
    return whole, merge_leaves(packed_leaves, codes, is_cut), sound & chunks_sound


def _is_step_sound(updates: Any, inner_updates: Any, stays: list[Array], in_memory: bool = False) -> Array:
    return chain.all_hold(
        [*chain.finite_leaves(updates, in_memory=True), *chain.finite_leaves(inner_updates, in_memory), *stays]
    )


@always_jit
def _leaf_stays_finite(old: Any, new: Any) -> Array:
    """Whether finite numbers of a leaf stay finite. A packed leaf is unpacked only if the new one is not finite."""
    if not is_packed_leaf(old):
        return chain.stays_finite(new, old)
    new = new.astype(leaf_codes(old).dtype)  # as the next step unpacks it
    finite = chain.all_hold(chain.finite_leaves(new, in_memory=True))
    element, fmt = leaf_codes(old).spec.element, leaf_codes(old).spec.scaled
    if not (element.has_nan or element.has_inf or (fmt is not None and fmt.nan_block)):
        return finite  # the old numbers are, too
    of_both = partial(_vary_like_both, new, old)
    return jax.lax.cond(
        finite, lambda: of_both(jnp.asarray(True)), lambda: chain.stays_finite(new, packing.unpack_leaf(old))
    )


@always_jit
def _repack_if(key: Array | None, old: Any, new: Any, sound: Array) -> Any:
    """A leaf packed like the old leaf, if it is sound.

    The operands and results of a branch are computed once. Without the branch, the compiler computes the new numbers
    again for each use: the tests, the scales, the codes and the update.
    """
    if not is_packed_leaf(old):
        return new
    of_both = partial(_vary_like_both, new, old)
    return jax.lax.cond(sound, lambda: of_both(packing.repack_leaf(key, old, new)), lambda: of_both(old))


def _vary_like_both(new: Any, old: Any, tree: Any) -> Any:
    """A tree with the type that branches have in common: it varies over the axes of a mesh where either array does."""
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves((new, old))), tree)


def _with_nan_groups(spec: Spec) -> Spec:
    """`spec` with groups that become NaN as a whole.

    Raises:
        ValueError: if its format has no NaN.
    """
    if spec.scaled is None and not spec.element.has_nan:
        raise ValueError(f"nonfinite='propagate' needs formats with a NaN, not {spec}; use nonfinite='skip'")
    try:
        return spec if spec.scaled is None else replace(spec, format=spec.scaled(nan_block=True))
    except ValueError as error:
        raise ValueError(f"nonfinite='propagate' does not go with {spec} ({error}); use nonfinite='skip'") from None


# -- placement of a state ----------------------------------------------------------------------------------------------


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Derives shardings for the state of `tx` from the parameters.

    An array of the state is sharded like a parameter if it has the parameter's shape and its path ends with the
    parameter's path. Codes and scales are sharded in the same way, along each axis that is divisible. Other arrays are
    replicated.

    Args:
        tx: any Optax transformation; also one with packed state.
        params: the parameters, as arrays or `jax.ShapeDtypeStruct`, each with a `NamedSharding`.

    Returns:
        A pytree like the state, of `NamedSharding`: for ``jax.jit(tx.init, out_shardings=...)``.

    Raises:
        ValueError: for a parameter without a `NamedSharding`.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> rows = NamedSharding(jax.make_mesh((1,), ("a",)), P("a"))
        >>> params = {"w": jax.device_put(jnp.zeros((64, 256)), rows)}
        >>> tx = jc.optim.adamw8bit(1e-3)
        >>> shardings = jc.optim.state_shardings(tx, params)
        >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
        >>> state.inner_state[0].mu["w"].qvalue.sharding.spec[0]
        'a'
    """
    param_leaves = jax.tree_util.tree_leaves_with_path(params)
    if not param_leaves:
        raise ValueError("params hold no array, so there is no sharding to follow")
    for path, leaf in param_leaves:
        if not isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            name = f"params{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name} has the sharding {sharding}, which must be a NamedSharding")
    default = NamedSharding(param_leaves[0][1].sharding.mesh, P())

    def place_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        owner = base.owner_index(path, leaf, param_leaves)
        return default if owner is None else param_leaves[owner][1].sharding

    def of_state(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedState):
            return fit_sharding(place_of(path, leaf), leaf.shape)
        inner, _ = jax.tree_util.tree_flatten_with_path(leaf.inner_state, is_leaf=is_packed_leaf)
        arrays, structure = jax.tree.flatten(leaf.arrays)
        places = [place_of(keys, array) for keys, array in inner]
        of_arrays = list(map(_part_sharding, places, arrays))
        of_rows = [packing.rows_sharding(inner[place][1], places[place]) for place, *_ in leaf.packing.entries]
        of_scales = [jax.tree.map(partial(_part_sharding, at), s) for at, s in zip(of_rows, leaf.scales, strict=True)]
        key, skips = jax.tree.map(lambda _: default, (leaf.key, leaf.skips))
        return QuantizedState(skips, structure.unflatten(of_arrays), tuple(of_scales), leaf.packing, key)

    state = jax.eval_shape(tx.init, params)
    return jax.tree_util.tree_map_with_path(of_state, state, is_leaf=lambda x: isinstance(x, QuantizedState))


def _part_sharding(sharding: NamedSharding, part: Any) -> NamedSharding:
    return fit_sharding(sharding, part.shape)


def offload_state(
    inner: optax.GradientTransformation, memory_kind: str = "pinned_host", *, min_size: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the larger state arrays of `inner` in another memory between steps; each step moves them to the device.

    Put it around `quantize_state`, so that only packed bytes are moved.

    Args:
        inner: any Optax transformation.
        memory_kind: the memory of the state: ``"pinned_host"`` (default), or ``"device"``, which changes nothing.
        min_size: arrays of fewer elements stay on the device. Default (None): 4096.

    Returns:
        An Optax transformation; its state has the structure of the state of `inner`. A backend without the memory
        refuses the transfer, at compilation or at run time.

    Raises:
        ValueError: for another memory kind.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> tx = jc.optim.offload_state(jc.optim.adamw8bit(1e-3))
        >>> state = jax.jit(tx.init)({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].mu["w"].qvalue.sharding.memory_kind
        'pinned_host'
    """
    check_choice("memory_kind", memory_kind, tuple(_MEMORY_SPACES))
    least = base.check_static_size("min_size", min_size, MIN_PACKED_SIZE)
    inner = base.as_transformation(inner)

    def move(tree: Any, memory: Any) -> Any:
        large = jax.tree.map(lambda x: math.prod(getattr(x, "shape", ())) >= least, tree)
        return jax.tree.map(lambda x, far: jax.device_put(x, memory) if far else x, tree, large)

    def init(params: Any) -> Any:
        return move(inner.init(params), _MEMORY_SPACES[memory_kind])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        inner_updates, inner_state = inner.update(updates, move(state, _MEMORY_SPACES["device"]), params, **extra)
        return inner_updates, move(inner_state, _MEMORY_SPACES[memory_kind])

    return base.make_transformation(init, update)


_MEMORY_SPACES = {"pinned_host": jax.memory.Space.Host, "device": jax.memory.Space.Device}
