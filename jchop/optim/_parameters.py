"""What else becomes of parameters: their average, numbers that stay zero, and packed ones that are updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jchop._spec.spec import AnySpec, as_spec
from jchop.formats.scaled.scaled import axis_indexes
from jchop.optim._arguments import BELOW_ONE, check_count, check_number
from jchop.optim._leaves import (
    first_state_key,
    holds_codes,
    is_float_leaf,
    make_link,
    map_with_keys,
    only_state,
    require_shapes,
    round_leaf,
    sum_dtype,
    update_to_target,
)
from jchop.sparsity._masks import check_sparsity_pattern, sparsity_mask
from jchop.storage import dequantize
from jchop.storage._array import PackedParam
from jchop.storage._quantize import requantize

Array = jax.Array


class AverageState(NamedTuple):
    """State of `average_params`.

    The average has the structure of the parameters, in float32 at least. `steps` and `taken` are int32 counts of the
    steps and of the parameters in the average.
    """

    average: Any
    steps: Array
    taken: Array
    key: Array | None


def average_params(
    start: int = 0, every: int = 1, *, spec: AnySpec | None = None, key: Array | None = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the average of the parameters after each update: the very last link of a chain.

    After `round_params` this is stochastic weight averaging in low precision (SWALP): the parameters have few bits, and
    their average has more bits and less noise. `averaged_params` reads it.

    With `optax.MultiSteps` put it inside: outside it counts, and averages, every micro-step.

    Args:
        start: number of steps before the first parameters enter the average. Default 0.
        every: number of steps between parameters that enter the average. Default 1.
        spec: the rounding of the average after each change. Default: none, float32.
        key: a typed key, needed if `spec` is stochastic.

    Returns:
        An Optax transformation, which does not change updates; its ``update`` needs the parameters.

    Raises:
        TypeError, ValueError: for counts out of range, or a stochastic spec without a key.

    References:
        Yang et al., SWALP: Stochastic Weight Averaging in Low-Precision Training, arXiv 1904.11943.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(optax.sgd(1.0), jc.optim.round_params("fixed4.1"), jc.optim.average_params(start=1))
        >>> params = jnp.zeros(1)
        >>> state = tx.init(params)
        >>> for _ in range(4):
        ...     updates, state = tx.update(jnp.array([-0.5]), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0]), float(jc.optim.averaged_params(state, params)[0])
        (2.0, 1.5)
    """
    check_count("start", start, 0)
    check_count("every", every, 1)
    of = None if spec is None else as_spec(spec, scaled=True)
    first = first_state_key(key, of)

    def init(params: Any) -> AverageState:
        none = jnp.zeros([], jnp.int32)
        return AverageState(jax.tree.map(lambda p: jnp.zeros_like(p, sum_dtype(p)), params), none, none, first)

    def update(updates: Any, state: AverageState, params: Any) -> tuple[Any, AverageState]:
        steps = jnp.asarray(optax.safe_increment(state.steps))
        due = (steps > start) & ((steps - start - 1) % every == 0)
        count = jnp.where(due, optax.safe_increment(state.taken), state.taken)

        def leaf(key: Array | None, average: Array, p: Any) -> Array:
            mean = average + (p.astype(average.dtype) - average) / count.astype(average.dtype)
            return jnp.where(due, mean if of is None else round_leaf(key, mean, of), average)

        after = optax.apply_updates(params, updates)
        following, average = map_with_keys(leaf, state.key, state.average, after)
        return updates, AverageState(average, steps, count, following)

    return make_link(init, update, needs_params=True)


def averaged_params(state: Any, params: Any) -> Any:
    """The average that `average_params` keeps; `params` if no parameters have entered it yet.

    Args:
        state: the state of a transformation that contains `average_params`.
        params: the present parameters.

    Returns:
        A pytree like `params`, in float32 at least.

    Raises:
        ValueError: if there is no such part, or several; for parameters of other shapes.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> tx, params = jc.optim.average_params(), jnp.ones(1, "bfloat16")
        >>> jc.optim.averaged_params(tx.init(params), params).dtype
        dtype('float32')
    """
    average_state = only_state(state, AverageState, "average_params")
    require_shapes("params", params, "the average", average_state.average)
    return jax.tree.map(
        lambda a, p: jnp.where(average_state.taken > 0, a, p.astype(a.dtype)), average_state.average, params
    )


# -- n of every m ------------------------------------------------------------------------------------------------------

#: Without decay the loss of a least squares problem grows beyond that of pruning once; 0.02 was better than 0.002,
#: 0.1 and 0.5, under SGD and Adam.
_DEFAULT_MASK_DECAY = 0.02


class SparseState(NamedTuple):
    """State of `sparse_params`.

    Args:
        steps: an int32 count of the steps.
        masks: which numbers of each parameter are not held at zero; a single True for one that is never pruned.
        dense: the parameters before they are masked, in float32 at least, if masks are chosen again, else None; a
            single 0 for one that is never pruned.
    """

    steps: Array
    masks: Any
    dense: Any


def sparse_params(
    n: int, m: int, *, axis: int | Sequence[int] = -2, start: int = 0, every: int | None = None, decay: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Updates after which n of every m numbers of each parameter are not zero: the last link of a chain.

    Masks are those of `jchop.sparsity.mask`, of the parameters after the update. By default they are chosen once, and
    stay. With `every`, the state keeps the dense parameters, which all updates enter: gradients are those at the masked
    parameters, and reach the masked numbers, too (a straight-through estimator), so that these can come back when masks
    are chosen again. Parameters with fewer than two axes, and those that are not floating-point, are never pruned; for
    others use `optax.masked`.

    Args:
        n: how many stay, from 1 to m - 1.
        m: of how many.
        axis: an axis, or two of them for tiles of m x m (m up to 4), with which products with the parameter and with
            its transpose are sparse. Default -2: the inputs of a kernel of shape (inputs, outputs), or of one of a
            convolution whose last axes are these.
        start: number of steps before the first masks. Default 0.
        every: number of steps from one choice of masks to the next. Default None: they are chosen once.
        decay: with `every`, the share of the masked numbers that each step takes off the dense parameters, so that
            masks settle: the rate of learning times the lambda of SR-STE (2e-4 in its paper). With 0 masked numbers
            grow by gradients that do not know them, and masks go on changing. Default 0.02.

    Returns:
        An Optax transformation, whose ``update`` needs the parameters. Its state is a `SparseState`.

    Raises:
        TypeError, ValueError: for arguments out of range; and when traced, without parameters.

    References:
        Zhou et al., Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, arXiv 2102.04010, 2021
        (SR-STE); Hubara et al., Accelerated Sparse Neural Training, arXiv 2102.08124, 2021 (tiles).

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(optax.sgd(1.0), jc.optim.sparse_params(2, 4))
        >>> params = jnp.array([[1.0], [2.0], [3.0], [4.0]])
        >>> updates, state = tx.update(jnp.full((4, 1), -4.0), tx.init(params), params)
        >>> optax.apply_updates(params, updates).ravel().tolist()
        [0.0, 0.0, 7.0, 8.0]
    """
    pattern, axes = check_sparsity_pattern(n, m, axis)
    check_count("start", start, 0)
    if every is not None:
        check_count("every", every, 1)
    if every is None and decay is not None:
        raise ValueError(f"decay={decay!r} is that of dense parameters, which are kept with every=; leave it out")
    decay = check_number("decay", _DEFAULT_MASK_DECAY if decay is None else decay, BELOW_ONE)

    def is_prunable(p: Any) -> bool:
        if jnp.ndim(p) < 2 or not is_float_leaf(p):
            return False
        axis_indexes("axis", axes[0] if len(axes) == 1 else axes, jnp.shape(p))
        return True

    def mask_shapes(params: Any) -> Any:
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p) if is_prunable(p) else (), bool), params)

    def init(params: Any) -> SparseState:
        masks = jax.tree.map(jnp.ones_like, mask_shapes(params))
        dense = None
        if every is not None:
            dense = jax.tree.map(lambda p: jnp.array(p, sum_dtype(p)) if is_prunable(p) else jnp.zeros([]), params)
        return SparseState(jnp.zeros([], jnp.int32), masks, dense)

    def update(updates: Any, state: SparseState, params: Any) -> tuple[Any, SparseState]:
        require_shapes("params", mask_shapes(params), "the masks", state.masks)
        steps = jnp.asarray(optax.safe_increment(state.steps))
        due = steps == start + 1 if every is None else (steps > start) & ((steps - start - 1) % every == 0)

        def leaf(u: Any, p: Any, mask: Array, dense: Any = None) -> tuple[Any, Array, Any]:
            if not is_prunable(p):
                return u, mask, dense
            p, u = jnp.asarray(p), jnp.asarray(u)
            if dense is None:
                after: Any = optax.apply_updates(p, u)
            else:
                after = dense * jnp.where(mask, 1, 1 - jnp.asarray(decay, dense.dtype)) + u.astype(dense.dtype)
            mask = lax.cond(due, lambda: sparsity_mask(after, pattern, axes), lambda: mask)
            if dense is None:
                either = jnp.promote_types(p.dtype, u.dtype)
                return jnp.where(mask, u.astype(either), -p.astype(either)), mask, None
            return update_to_target(p, jnp.where(mask, after, 0).astype(p.dtype)), mask, after

        leaves, structure = jax.tree.flatten(updates)
        others = [params, state.masks, *(() if state.dense is None else (state.dense,))]
        each = [leaf(*parts) for parts in zip(leaves, *map(structure.flatten_up_to, others), strict=True)]
        outputs, masks, dense = (structure.unflatten([one[i] for one in each]) for i in range(3))
        return outputs, SparseState(steps, masks, None if state.dense is None else dense)

    return make_link(init, update, needs_params=True)


# -- packed parameters -------------------------------------------------------------------------------------------------


def apply_updates(params: Any, updates: Any, key: Array | None = None) -> Any:
    """`optax.apply_updates` for parameters that include a `QArray`, which is quantized again under its spec.

    A parameter that `jchop.quantize_fn(...).pack` stored in another shape is packed in that shape again. Each array of
    a stack (`vmap`, `scan`) is quantized by itself, if it has scales of its own.

    Under a stochastic spec, ``"int8(channel=0):stochastic"``, updates below a quantum count on average, so that no copy
    in more bits is needed. The scales are fitted to the new numbers.

    Args:
        params: a pytree of arrays, some of them packed.
        updates: a pytree of plain arrays, in the shapes of `jchop.storage.dequantize_params`.
        key: a typed key for this step, needed if a `QArray` has a stochastic spec. It is split into a key for each
            leaf.

    Returns:
        A pytree like `params`.

    Raises:
        ValueError: for a stochastic spec without a key, or updates of other shapes.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc, optax
        >>> params = {"w": jc.quantize(jnp.ones((2, 4)), "int8(channel=0):stochastic", jax.random.key(0))}
        >>> tx = optax.sgd(0.1)
        >>> state = tx.init(jc.storage.dequantize_params(params))
        >>> gradients = jax.grad(lambda p: (p["w"] ** 2).sum())(jc.storage.dequantize_params(params))
        >>> updates, state = tx.update(gradients, state)
        >>> jc.optim.apply_updates(params, updates, jax.random.key(1))["w"].shape
        (2, 4)
    """

    def leaf(key: Array | None, p: Any, u: Any) -> Any:
        if not holds_codes(p):
            return optax.apply_updates(p, u)
        return requantize(p, optax.apply_updates(dequantize(p), u), key)

    require_shapes("updates", updates, "params", params)
    packed_leaves = [p for p in jax.tree.leaves(params, is_leaf=holds_codes) if holds_codes(p)]
    start = first_state_key(key, *((p.stored if isinstance(p, PackedParam) else p).spec for p in packed_leaves))
    return map_with_keys(leaf, start, params, updates, is_leaf=holds_codes)[1]
