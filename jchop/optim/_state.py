"""Any transformation with its state packed between steps, or kept on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._common.bit_ops import fit_sharding, varying_like
from jchop._common.checks import check_choice
from jchop._common.settings import always_jit
from jchop._spec.spec import Spec
from jchop.optim._arguments import as_transformation, check_static_size
from jchop.optim._chunks import Chunks, loop_over_chunks, merge_leaves, plan_chunks
from jchop.optim._leaves import (
    first_state_key,
    is_float_leaf,
    make_transformation,
    map_with_keys,
    owner_index,
    split_key,
)
from jchop.optim._nonfinite import (
    all_hold,
    count_skips,
    finite_leaves,
    select_tree,
    sound_on_all_ranks,
    stays_finite,
    zeros_unless,
)
from jchop.optim._pack import (
    QuantizedState,
    as_state_rules,
    first_quantized_state,
    is_packed_leaf,
    leaf_codes,
    pack_by_plan,
    plan_packing,
    repack_leaf,
    require_plan,
    rows_sharding,
    stored_parts,
    unpack_leaf,
)

Array = jax.Array

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
    """`inner` with its floating-point state held packed, each array as a `QArray`, between steps.

    A step unpacks the state, runs `inner` on plain arrays, and packs the new state. ``init`` selects the packed arrays
    by size and by path; `state_report` lists them. If the last axis of an array is too short for the groups of a
    format, its last axes are joined. No step changes the dtypes of the state, whatever those of the gradients.

    If a format has no zero, zeros are stored as numbers of at most 2^-100.

    Args:
        inner: any Optax transformation.
        spec: a `Spec`, format or text for every array; or a mapping of patterns ([](patterns.md)) to specs, or to None
            for arrays that stay unpacked. A path is a text like ``0.mu.layer.kernel``: indexes and names from the state
            of `inner` down. The first pattern that matches decides; arrays without a match stay unpacked.
        key: a typed key, needed by stochastic specs. The state keeps it, and each step splits it into a key for each
            array.
        min_size: arrays of fewer elements stay unpacked. Default (None): 4096.
        nonfinite: the choice if a gradient, an update or the new state is NaN or infinite; few packed formats have such
            values. ``"skip"`` (default): the step is skipped, parameters and state do not change, and ``state.skipped``
            counts it. ``"propagate"``: groups that hold such a number become NaN as a whole; an error for formats
            without NaN.
        chunks: the number of chunks of a step. Each chunk is a part, along the first axis, of every array that can be
            cut without cutting groups; the results stay the same. Unpacked moments then take less memory, and on a CPU
            less time. Only for an `inner` that treats each number by itself (no clipping by a norm, no factored
            moments), and for arrays that are not split between devices along their first axis. Default (None): 1.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for an argument that is not allowed; at ``init``, for a rule that matches no array; when
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
    check_choice("nonfinite", nonfinite, _NONFINITE_CHOICES)
    count = check_static_size("chunks", chunks, 1)
    least = check_static_size("min_size", min_size, MIN_PACKED_SIZE)
    rules = as_state_rules(spec)
    if nonfinite == "propagate":
        rules = tuple((pattern, None if rule is None else _with_nan_groups(rule)) for pattern, rule in rules)
    start = first_state_key(key, *(rule for _, rule in rules if rule is not None and rule.rounding.stochastic))
    inner = as_transformation(inner)

    def init(params: Any) -> QuantizedState:
        inner_state = inner.init(params)
        leaves, structure = jax.tree_util.tree_flatten_with_path(inner_state, is_leaf=is_packed_leaf)
        specs = structure.unflatten(plan_packing(leaves, rules, least))
        following, packed_tree = map_with_keys(pack_by_plan, start, inner_state, specs)
        packed_leaves = structure.flatten_up_to(packed_tree)
        return first_quantized_state(structure, packed_leaves, following, inner_state)

    def update(updates: Any, state: QuantizedState, params: Any = None, **extra: Any) -> tuple[Any, QuantizedState]:
        inner_state = state.inner_state
        leaves, structure = jax.tree_util.tree_flatten_with_path(inner_state, is_leaf=is_packed_leaf)
        require_plan(state.skips, leaves, rules, least)
        following, keys = split_key(state.key, len(leaves))

        def advance(updates: Any, old_leaves: list[Any], params: Any) -> tuple[Any, list[Any]]:
            unpacked = structure.unflatten(map(unpack_leaf, old_leaves))
            inner_updates, new = inner.update(updates, unpacked, params, **extra)
            return inner_updates, list(map(_in_old_dtype, old_leaves, structure.flatten_up_to(new)))

        leaves_out = nonfinite == "skip"
        operands = updates, [leaf for _, leaf in leaves], params
        cuts = plan_chunks(updates, inner_state, count) if count > 1 else None
        if cuts is None:
            inner_updates, packed_leaves, sound = _step_whole(advance, keys, operands, leaves_out)
        else:
            inner_updates, packed_leaves, sound = _step_in_chunks(advance, keys, operands, leaves_out, cuts)
        skips, parts = state.skips, stored_parts(structure, packed_leaves, state.arrays)
        if leaves_out:
            sound = sound_on_all_ranks(sound, advance, *operands)
            skips = {name: count_skips(total, sound) for name, total in skips.items()}
            # A choice between codes in the shape of their array keeps the sharding that the old ones have.
            codes, treedef = jax.tree.flatten(parts)
            parts = treedef.unflatten(select_tree(sound, codes, jax.tree.leaves((state.arrays, state.scales))))
            inner_updates = zeros_unless(sound, inner_updates)
        arrays, scales = parts
        return inner_updates, QuantizedState(skips, arrays, scales, state.packing, following)

    return make_transformation(init, update)


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
        return inner_updates, list(map(repack_leaf, keys, old_leaves, new)), jnp.asarray(True)
    stays = list(map(_leaf_stays_finite, old_leaves, new))
    packed_leaves = list(map(_repack_if, keys, old_leaves, new, stays))
    return inner_updates, packed_leaves, _is_step_sound(operands[0], inner_updates, stays)


def _step_in_chunks(
    advance: _StateAdvance, keys: list[Array | None], operands: _StepOperands, skips: bool, cuts: Chunks
) -> tuple[Any, list[Any], Array]:
    """`_step_whole` with the leaves that can be cut computed chunk by chunk."""
    whole, packed_leaves, sound = _step_whole(advance, keys, cuts.rest(*operands), skips)
    leaves = operands[1]

    def step_of_chunk(i: Array) -> tuple[Any, Any, Array]:
        part = cuts.chunk(*operands, i)
        # The barrier keeps the compiler from fusing the computation of new moments with their uses.
        inner_updates, new = jax.lax.optimization_barrier(advance(*part))
        old_leaves = part[1]
        places = [place for place, is_cut in enumerate(cuts.state_is_cut) if is_cut]
        codes = [
            repack_leaf(keys[place], old_leaves[place], new[place], cuts.start(leaves[place], i)) for place in places
        ]
        inner_updates = [
            u for u, is_cut in zip(jax.tree.leaves(inner_updates), cuts.update_is_cut, strict=True) if is_cut
        ]
        is_sound = (
            _is_step_sound(
                part[0],
                inner_updates,
                [_leaf_stays_finite(old_leaves[place], new[place]) for place in places],
                in_memory=True,
            )
            if skips
            else True
        )
        return inner_updates, codes, jnp.asarray(is_sound)

    inner_updates, codes, chunks_sound = loop_over_chunks(step_of_chunk, cuts.count)
    update_leaves, structure = jax.tree.flatten(whole)
    whole = structure.unflatten(merge_leaves(update_leaves, inner_updates, cuts.update_is_cut))
    like = [leaf for leaf, is_cut in zip(leaves, cuts.state_is_cut, strict=True) if is_cut]
    codes = [
        jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)) for old, new in zip(like, codes, strict=True)
    ]
    return whole, merge_leaves(packed_leaves, codes, cuts.state_is_cut), sound & chunks_sound


def _in_old_dtype(old: Any, new: Any) -> Any:
    """A leaf of the new state in the dtype of the old one. A packed leaf is packed from the dtype that was computed."""
    return jnp.asarray(new, old.dtype) if is_float_leaf(old) and not is_packed_leaf(old) else new


def _is_step_sound(updates: Any, inner_updates: Any, stays: list[Array], in_memory: bool = False) -> Array:
    return all_hold([*finite_leaves(updates, in_memory=True), *finite_leaves(inner_updates, in_memory), *stays])


@always_jit
def _leaf_stays_finite(old: Any, new: Any) -> Array:
    """Whether finite numbers of a leaf stay finite. A packed leaf is unpacked only if the new one is not finite."""
    if not is_packed_leaf(old):
        return stays_finite(new, old)
    new = new.astype(leaf_codes(old).dtype)  # as the next step unpacks it
    finite = all_hold(finite_leaves(new, in_memory=True))
    if not _may_be_nonfinite(leaf_codes(old).spec):
        return finite
    of_both = partial(_vary_like_both, new, old)
    return jax.lax.cond(finite, lambda: of_both(jnp.asarray(True)), lambda: stays_finite(new, unpack_leaf(old)))


@always_jit
def _repack_if(key: Array | None, old: Any, new: Any, sound: Array) -> Any:
    """A leaf packed like the old leaf, if it is sound.

    The operands and results of a branch are computed once. Without the branch, the compiler computes the new numbers
    again for each use: the tests, the scales, the codes and the update.
    """
    if not is_packed_leaf(old):
        return new
    of_both = partial(_vary_like_both, new, old)
    return jax.lax.cond(sound, lambda: of_both(repack_leaf(key, old, new)), lambda: of_both(old))


def _may_be_nonfinite(spec: Spec) -> bool:
    """Whether packed numbers may be NaN or infinite; if not, those of a state are finite, and need not be unpacked."""
    element, fmt = spec.element, spec.scaled
    return element.has_nan or element.has_inf or (fmt is not None and fmt.nan_block)


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
    """Shardings for the state of `tx`, taken from the parameters.

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
        owner = owner_index(path, leaf, param_leaves)
        return default if owner is None else param_leaves[owner][1].sharding

    def of_state(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedState):
            return fit_sharding(place_of(path, leaf), leaf.shape)
        inner, _ = jax.tree_util.tree_flatten_with_path(leaf.inner_state, is_leaf=is_packed_leaf)
        arrays, structure = jax.tree.flatten(leaf.arrays)
        places = [place_of(keys, array) for keys, array in inner]
        of_arrays = list(map(_part_sharding, places, arrays))
        of_rows = [rows_sharding(inner[place][1], places[place]) for place, *_ in leaf.packing.entries]
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
    """`inner` with its larger state arrays in another memory between steps; each step moves them to the device.

    Put it around `quantize_state`, so that only packed bytes are moved.

    Args:
        inner: any Optax transformation.
        memory_kind: the memory of the state: ``"pinned_host"`` (default), or ``"device"``, which changes nothing.
        min_size: arrays of fewer elements stay on the device. Default (None): 4096.

    Returns:
        An Optax transformation; its state has the structure of the state of `inner`. A backend without that memory
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
    least = check_static_size("min_size", min_size, MIN_PACKED_SIZE)
    inner = as_transformation(inner)

    def move(tree: Any, memory: Any) -> Any:
        large = jax.tree.map(lambda x: math.prod(getattr(x, "shape", ())) >= least, tree)
        return jax.tree.map(lambda x, far: jax.device_put(x, memory) if far else x, tree, large)

    def init(params: Any) -> Any:
        return move(inner.init(params), _MEMORY_SPACES[memory_kind])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        inner_updates, inner_state = inner.update(updates, move(state, _MEMORY_SPACES["device"]), params, **extra)
        return inner_updates, move(inner_state, _MEMORY_SPACES[memory_kind])

    return make_transformation(init, update)


_MEMORY_SPACES = {"pinned_host": jax.memory.Space.Host, "device": jax.memory.Space.Device}
