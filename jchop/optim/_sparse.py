"""Parameters of which n of every m are not zero, throughout training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jchop.formats.scaled.scaled import axis_indexes
from jchop.optim._arguments import BELOW_ONE, check_count, check_number
from jchop.optim._leaves import (
    NO_PARAMS,
    is_float_leaf,
    make_transformation,
    require_shapes,
    sum_dtype,
    update_to_target,
)
from jchop.sparsity._masks import check_sparsity_pattern, sparsity_mask

Array = jax.Array


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

    def init(params: Any) -> SparseState:
        masks = jax.tree.map(lambda p: jnp.ones(jnp.shape(p) if is_prunable(p) else (), bool), params)
        dense = None
        if every is not None:
            dense = jax.tree.map(lambda p: jnp.array(p, sum_dtype(p)) if is_prunable(p) else jnp.zeros([]), params)
        return SparseState(jnp.zeros([], jnp.int32), masks, dense)

    def update(updates: Any, state: SparseState, params: Any = None, **extra: Any) -> tuple[Any, SparseState]:
        del extra
        if params is None:
            raise ValueError(NO_PARAMS)
        require_shapes("params", _mask_shapes(params, is_prunable), "the masks", state.masks)
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

    return make_transformation(init, update)


def _mask_shapes(params: Any, is_prunable: Any) -> Any:
    """What has the shapes of the masks of parameters."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p) if is_prunable(p) else (), bool), params)
