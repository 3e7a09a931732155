"""Any transformation with its state packed between steps, or kept on the host."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jchop._checks import check_choice, check_int
from jchop.optim._faults import counted
from jchop.optim._leaves import (
    all_finite,
    first_key,
    map_drawing,
    select,
    stays_finite,
    transformation,
    zeros_unless,
)
from jchop.optim._pack import (
    PackedRows,
    QuantizedState,
    as_rules,
    bundle,
    codes_of,
    draws,
    is_packed,
    pack_as_planned,
    plan,
    repack,
    unpack_tree,
)
from jchop.spec import Spec

Array = jax.Array

#: The fewest elements of an array that is packed, unless said otherwise.
MIN_SIZE = 4096
_FAULTS = ("skip", "propagate")


def quantize_state(
    tx: optax.GradientTransformation,
    spec: Any,
    key: Array | None = None,
    *,
    min_size: int | None = None,
    faulty: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    """`tx` with its floating-point state held packed, each array as a `QArray`, between steps.

    A step unpacks the state, lets `tx` do its work on plain arrays, and packs what it leaves. What is packed is decided
    at ``init``, by size and by path; `state_report` lists it. An array whose last axis is too short for the groups of a
    format has its last axes joined.

    Where a format has no zero, zeros are stored as at most 2^-100.

    Args:
        tx: any Optax transformation.
        spec: a `Spec`, format or text for every array; or a mapping of regular expressions to such, or to None for
            arrays that shall stay. A path reads ``0.mu.layer.kernel``: indexes and names from the state of `tx` down,
            with dots. The first expression that matches the whole path decides; arrays that none matches stay.
        key: a typed key, needed by stochastic specs; kept in the state and split each step, each array with its own.
        min_size: arrays of fewer elements stay as they are. Default (None): 4096.
        faulty: what happens where a gradient, or what `tx` makes of it, is NaN or infinite, which a packed array can
            seldom say. ``"skip"`` (default): the step is left out, parameters and state stay as they are, and
            ``state.skipped`` counts it. ``"propagate"``: groups that hold such a number become NaN as a whole, as in an
            unpacked state; refused for formats that cannot.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for an argument that is not allowed; at ``init``, for a rule that matches no array.

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> rules = {"0.mu.*": jc.dynamic8, "0.nu.*": "bfloat16"}
        >>> tx = jc.optim.quantize_state(optax.adam(1e-3), rules)
        >>> state = tx.init({"w": jnp.zeros((64, 256)), "b": jnp.zeros(256)})
        >>> state.inner[0].mu["w"].qvalue.dtype, state.inner[0].nu["w"].qvalue.dtype, state.inner[0].mu["b"].dtype
        (dtype('uint8'), dtype(bfloat16), dtype('float32'))
    """
    check_choice("faulty", faulty, _FAULTS)
    least = MIN_SIZE if min_size is None else check_int("min_size", min_size, 1)
    rules = as_rules(spec)
    if faulty == "propagate":
        rules = tuple((pattern, None if rule is None else _saying_nan(rule)) for pattern, rule in rules)
    start = first_key(draws(rules), key)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> QuantizedState:
        inner = tx.init(params)
        following, packed = map_drawing(pack_as_planned, start, inner, plan(inner, rules, least))
        return bundle(packed, following, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: QuantizedState, params: Any = None, **extra: Any) -> tuple[Any, QuantizedState]:
        before = state.inner
        made, inner = tx.update(updates, unpack_tree(before), params, **extra)
        if faulty == "propagate":
            following, packed = map_drawing(repack, state.key, before, inner, is_leaf=is_packed)
            return made, bundle(packed, following, state.skipped)
        stays = jax.tree.map(_stays_finite, before, inner, is_leaf=is_packed)
        following, packed = map_drawing(_repack_if, state.key, before, inner, stays, is_leaf=is_packed)
        sound = all_finite(updates, stored=True) & all_finite(made) & jnp.stack([True, *jax.tree.leaves(stays)]).all()
        kept = bundle(select(sound, packed, before), following, counted(state.skipped, sound))
        return zeros_unless(sound, made), kept

    return transformation(init, update)


def _stays_finite(old: Any, new: Any) -> Array:
    """Whether every number of a leaf that was finite still is; one that is packed is seldom unpacked for that."""
    if not is_packed(old):
        return stays_finite(new, old)
    finite = all_finite(new, stored=True)
    return jax.lax.cond(finite, lambda: jnp.asarray(True), lambda: stays_finite(new, unpack_tree(old)))


def _repack_if(key: Array | None, old: Any, new: Any, sound: Array) -> Any:
    """A leaf packed as the old one is, where it is sound.

    What comes out of a branch, and what goes into it, is computed once, leaf by leaf; else the compiler computes the
    new numbers again for each that looks at them: the tests, the scales, the codes and the update.
    """
    return jax.lax.cond(sound, lambda: repack(key, old, new), lambda: old) if is_packed(old) else new


def _saying_nan(spec: Spec) -> Spec:
    """`spec` with groups that become NaN as a whole.

    Raises:
        ValueError: where its format has no way to say NaN.
    """
    if spec.scaled is None and not spec.element.has_nan:
        raise ValueError(f"faulty='propagate' needs formats with a NaN, not {spec}; use faulty='skip'")
    try:
        return spec if spec.scaled is None else replace(spec, format=spec.scaled(nan_block=True))
    except ValueError as error:
        raise ValueError(f"faulty='propagate' does not go with {spec} ({error}); use faulty='skip'") from None


# -- where a state lies ------------------------------------------------------------------------------------------------


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Shardings for the state of `tx` that are those of the parameters.

    An array of the state whose path ends with that of a parameter of the same shape is sharded as the parameter; codes
    and scales are, too, along each axis that they can be cut along so. The rest is replicated.

    Args:
        tx: any Optax transformation; also one with packed state.
        params: the parameters, as arrays or `jax.ShapeDtypeStruct`, each with a `NamedSharding`.

    Returns:
        A pytree as the state, of `NamedSharding`: for ``jax.jit(tx.init, out_shardings=...)``.

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
        >>> state.inner[0].mu["w"].qvalue.sharding.spec[0]
        'a'
    """
    known = [(tuple(map(str, path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]
    if not known:
        raise ValueError("params hold no array, so there is no sharding to follow")
    for path, leaf in known:
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(f"params{''.join(path)} has the sharding {getattr(leaf, 'sharding', None)}, which must be "
                             "a NamedSharding")  # fmt: skip
    replicated = NamedSharding(known[0][1].sharding.mesh, P())

    def sharded(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = tuple(map(str, path))
        owner = next((p for name, p in known if _ends(keys, name) and tuple(leaf.shape) == tuple(p.shape)), None)
        if owner is None:
            return jax.tree.map(lambda _: replicated, leaf)
        axes = _joined(owner.sharding.spec, leaf)
        return jax.tree.map(lambda part: _fitting(owner.sharding.mesh, axes, part.shape), leaf)

    def of_state(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedState):
            return sharded(path, leaf)
        inner = jax.tree_util.tree_map_with_path(sharded, leaf.inner, is_leaf=is_packed)
        return bundle(inner, jax.tree.map(lambda _: replicated, leaf.key), replicated)

    state = jax.eval_shape(tx.init, params)
    return jax.tree_util.tree_map_with_path(of_state, state, is_leaf=lambda x: isinstance(x, QuantizedState))


def _ends(path: tuple[str, ...], name: tuple[str, ...]) -> bool:
    return path[len(path) - len(name) :] == name


def _joined(spec: P, leaf: Any) -> tuple[Any, ...]:
    """How the axes of a leaf's arrays are cut where those of the parameter are by `spec`: of joined axes the first."""
    count = len(codes_of(leaf).shape) if isinstance(leaf, PackedRows) else len(leaf.shape)
    return (*spec, *([None] * max(count - len(spec), 0)))[:count]


def _fitting(mesh: Any, axes: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding along `axes`, less those that a shape is not divisible along."""
    if len(shape) != len(axes):
        return NamedSharding(mesh, P())

    def parts(axis: Any) -> int:
        names = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        return math.prod(mesh.shape[name] for name in names)

    kept = [axis if n % parts(axis) == 0 else None for axis, n in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, P(*kept))


def offload_state(
    tx: optax.GradientTransformation, memory_kind: str = "pinned_host", *, min_size: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """`tx` with its larger arrays of state in another memory between steps; they come to the device for the step.

    Goes around `quantize_state`, so that packed bytes are what travels.

    Args:
        tx: any Optax transformation.
        memory_kind: where the state stays: ``"pinned_host"`` (default), or ``"device"``, which changes nothing.
        min_size: arrays of fewer elements stay on the device. Default (None): 4096.

    Returns:
        An Optax transformation, whose state has the structure of that of `tx`. A backend without that memory refuses
        the transfer, when it is compiled or run.

    Raises:
        ValueError: for another memory kind.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> tx = jc.optim.offload_state(jc.optim.adamw8bit(1e-3))
        >>> state = jax.jit(tx.init)({"w": jnp.zeros((64, 256))})
        >>> state.inner[0].mu["w"].qvalue.sharding.memory_kind
        'pinned_host'
    """
    check_choice("memory_kind", memory_kind, tuple(_MEMORIES))
    least = MIN_SIZE if min_size is None else check_int("min_size", min_size, 1)
    tx = optax.with_extra_args_support(tx)

    def moved(tree: Any, memory: Any) -> Any:
        large = jax.tree.map(lambda x: math.prod(x.shape) >= least, tree)
        return jax.tree.map(lambda x, far: jax.device_put(x, memory) if far else x, tree, large)

    def init(params: Any) -> Any:
        return moved(tx.init(params), _MEMORIES[memory_kind])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        made, inner = tx.update(updates, moved(state, _MEMORIES["device"]), params, **extra)
        return made, moved(inner, _MEMORIES[memory_kind])

    return transformation(init, update)


_MEMORIES = {"pinned_host": jax.memory.Space.Host, "device": jax.memory.Space.Device}
