"""Gradients that are NaN or infinite: skipped steps, and dynamic loss scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import nonempty_axis_env_DO_NOT_USE  # pyright: ignore[reportPrivateImportUsage]

from jchop._common.settings import always_jit
from jchop._core.xla.cpu import materialize_per_group
from jchop._round.arguments import has_tracer
from jchop.optim._arguments import ABOVE_ONE, ABOVE_ZERO, NORMAL_FLOAT32, as_transformation, check_count, check_number
from jchop.optim._leaves import in_sum_dtype, is_float_leaf, make_link, make_transformation, only_state, sum_dtype

Array = jax.Array


def scale_gradients(factor: Any) -> optax.GradientTransformationExtraArgs:
    """Gradients times a factor, in their own dtype: 1 / s undoes a loss multiplied by s.

    Args:
        factor: a finite number above 0, or a schedule: a function of the count of steps, an int32 scalar.

    Returns:
        An Optax transformation.

    Raises:
        TypeError, ValueError: for another factor.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> tx = jc.optim.scale_gradients(1 / 1024)
        >>> tx.update(jnp.array([512.0]), tx.init(jnp.zeros(1)))[0].tolist()
        [0.5]
    """
    check_number("factor", factor, ABOVE_ZERO, schedule=True)

    def init(_: Any) -> Any:
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)) if callable(factor) else optax.EmptyState()

    def update(updates: Any, state: Any, _: Any) -> tuple[Any, Any]:
        now = check_number("factor", factor(state.count), ABOVE_ZERO) if callable(factor) else factor
        gradients = jax.tree.map(lambda u: (u * now).astype(u.dtype), updates)
        following = optax.ScaleByScheduleState(optax.safe_increment(state.count)) if callable(factor) else state
        return gradients, following

    return make_link(init, update)


class SkipState(NamedTuple):
    """State of `skip_nonfinite`: the state of the wrapped transformation, and an int32 count of skipped steps."""

    inner_state: Any
    skipped: Array


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, but steps with a NaN or an infinity are skipped: parameters and the state of `inner` do not change.

    It checks the gradients, and the updates and the new state of `inner` (the square of a gradient of 1e20 overflows,
    though the gradient does not). `optax.apply_if_finite` checks only gradients, and stops skipping after some steps;
    this transformation always skips. Ranks that exchange numbers in `inner` skip a step together.

    Args:
        inner: any Optax transformation.

    Returns:
        An Optax transformation. Its state is a `SkipState`.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx, params = jc.optim.skip_nonfinite(optax.adam(0.1)), jnp.ones(2)
        >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped), state.inner_state[0].mu.tolist()
        ([0.0, 0.0], 1, [0.0, 0.0])
    """
    inner = as_transformation(inner)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros([], jnp.int32))

    def update(updates: Any, state: SkipState, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        inner_updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        sound = all_finite((updates, inner_updates)) & stays_finite(inner_state, state.inner_state)
        sound = sound_on_all_ranks(sound, inner.update, updates, state.inner_state, params, **extra)
        new_state = SkipState(select_tree(sound, inner_state, state.inner_state), count_skips(state.skipped, sound))
        return zeros_unless(sound, inner_updates), new_state

    return make_transformation(init, update)


def count_skips(count: Array, sound: Array) -> Array:
    """The count of skipped steps after one more step."""
    return jnp.where(sound, count, optax.safe_increment(count))


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`: the float32 scale, int32 counts of sound steps in a row and of skipped steps."""

    inner_state: Any
    scale: Array
    steady: Array
    skipped: Array


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    factor: float = 2.0,
    smallest: float = 1.0,
    largest: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """`inner` for gradients of a scaled loss, divided by a scale that shrinks on overflow and grows otherwise.

    16-bit gradients are divided in float32, and `inner` gets them in float32. So the state of `inner` begins as
    for float32 parameters: its moments take 4 bytes for each number, or fewer with ``mu_dtype`` or `quantize_state`.

    Multiply the loss by ``loss_scale(state)`` before differentiating. If a gradient, an update or the new state is NaN
    or infinite, the step is skipped, as in `skip_nonfinite`, and the scale is divided by `factor`. After
    `growth_interval` sound steps in a row the scale is multiplied by `factor`. If the scale in the state is zero,
    negative, NaN or infinite, the step is skipped, too, and the scale becomes `initial`.

    `initial`, `smallest` and `largest` are normal numbers of float32.

    Args:
        inner: any Optax transformation.
        initial: the first scale; division by a power of two does not round. Default 2^15.
        growth_interval: number of sound steps before the scale grows. Default 2000.
        factor: the factor of growth and shrinkage. Default 2.
        smallest: the least scale. Default 1.
        largest: the largest scale. Default 2^24.

    Returns:
        An Optax transformation. Its state is a `LossScaleState`.

    Raises:
        TypeError, ValueError: for numbers out of range.

    References:
        Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx, params = jc.optim.dynamic_loss_scale(optax.sgd(1.0), 1024.0), jnp.ones(1)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jnp.array([jnp.nan]), state, params)
        >>> updates.tolist(), float(jc.optim.loss_scale(state))
        ([0.0], 512.0)
    """
    check_count("growth_interval", growth_interval, 1)
    limits = {"smallest": smallest, "initial": initial, "largest": largest}
    for name, value in limits.items():
        check_number(name, value, NORMAL_FLOAT32)
    if not has_tracer(limits) and not smallest <= initial <= largest:
        raise ValueError(f"initial={initial!r} must lie between smallest={smallest!r} and largest={largest!r}")
    check_number("factor", factor, ABOVE_ONE)
    inner = as_transformation(inner)

    def init(params: Any) -> LossScaleState:
        none = jnp.zeros([], jnp.int32)
        inner_state = inner.init(jax.tree.map(lambda p: in_sum_dtype(p) if is_float_leaf(p) else p, params))
        return LossScaleState(inner_state, jnp.asarray(initial, jnp.float32), none, none)

    def update(updates: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
        gradients = jax.tree.map(lambda g: g.astype(sum_dtype(g)) / state.scale, updates)
        inner_updates, inner_state = inner.update(gradients, state.inner_state, params, **extra)
        usable = jnp.isfinite(state.scale) & (state.scale > 0)
        sound = usable & all_finite((updates, inner_updates)) & stays_finite(inner_state, state.inner_state)
        sound = sound_on_all_ranks(sound, inner.update, gradients, state.inner_state, params, **extra)
        steady = jnp.where(sound, state.steady + 1, 0)
        grows = steady >= growth_interval
        scale = jnp.where(sound, jnp.where(grows, state.scale * factor, state.scale), state.scale / factor)
        new_state = LossScaleState(
            select_tree(sound, inner_state, state.inner_state),
            jnp.clip(jnp.where(usable, scale, initial), smallest, largest).astype(jnp.float32),
            jnp.where(grows, 0, steady),
            count_skips(state.skipped, sound),
        )
        return zeros_unless(sound, inner_updates), new_state

    return make_transformation(init, update)


def loss_scale(state: Any) -> Array:
    """The present scale of `dynamic_loss_scale`, float32.

    Args:
        state: the state of `dynamic_loss_scale`, or of a transformation that contains it.

    Raises:
        ValueError: if there is no such part, or several.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = jc.optim.dynamic_loss_scale(optax.sgd(0.1))
        >>> float(jc.optim.loss_scale(tx.init(jnp.ones(1))))
        32768.0
    """
    return only_state(state, LossScaleState, "dynamic_loss_scale").scale


# -- tests and choices of trees ----------------------------------------------------------------------------------------


def all_finite(tree: Any) -> Array:
    """Whether every floating-point number of a tree is finite; a bool scalar."""
    return all_hold(finite_leaves(tree))


def finite_leaves(tree: Any, in_memory: bool = False) -> list[Array]:
    """For each floating-point leaf of a tree, whether all its numbers are finite; bool scalars.

    Args:
        tree: a pytree of arrays.
        in_memory: whether its arrays are in memory already, and not computed here. It changes only the time.
    """
    of_leaf = _is_stored_leaf_finite if in_memory else _is_leaf_finite
    return [of_leaf(leaf) for leaf in jax.tree.leaves(tree) if is_float_leaf(leaf)]


def all_hold(conditions: Iterable[Array]) -> Array:
    """Whether all of some scalar conditions hold; a bool scalar.

    It is computed once. XLA would else compute the conjunction again for each array that is selected by it: as many
    conditions as a tree has leaves, for each leaf (`barriers_removed_before_fusion` in `_core/xla/cpu.py`).
    """
    scalars = list(conditions)
    return _all_scalars_true(*scalars) if len(scalars) > 1 else (scalars or [jnp.asarray(True)])[0]


def sound_on_all_ranks(sound: Array, update: Callable[..., Any], *args: Any, **extra: Any) -> Array:
    """Whether `sound` holds on every rank that exchanges numbers with this one in ``update(*given, **extra)``.

    Ranks that decide alone would have different parameters after a step that only some of them skip.
    """
    if not nonempty_axis_env_DO_NOT_USE():
        return sound
    effects = jax.make_jaxpr(lambda: update(*args, **extra))().effects
    names = {name for effect in effects if (name := getattr(effect, "name", None)) is not None}
    return jax.lax.pmin(sound.astype(jnp.int32), tuple(sorted(names, key=str))) > 0 if names else sound


@always_jit
def _all_scalars_true(*conditions: Array) -> Array:
    return materialize_per_group(reduce(and_, conditions))


@always_jit
def _is_leaf_finite(leaf: Any) -> Array:
    return jnp.isfinite(leaf).all()


@always_jit
def _is_stored_leaf_finite(leaf: Any) -> Array:
    """Whether all numbers of an array are finite: x - x is 0 for them and NaN for others, and NaN makes the sum NaN.

    The maximum is not used, because of the quirk `maximum_loses_nan` (`_core/xla/cpu.py`).
    """
    return jnp.sum(leaf - leaf) == 0


def stays_finite(new: Any, old: Any) -> Array:
    """Whether every finite number of a state stays finite; states may hold infinities from the start. A bool scalar."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return all_hold(_is_leaf_as_finite(a, b) for a, b in pairs if is_float_leaf(a))


@always_jit
def _is_leaf_as_finite(new: Any, old: Any) -> Array:
    return jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))


def select_tree(condition: Array, new: Any, old: Any) -> Any:
    """The tree `new` if `condition` holds, else `old`, of the same structure."""
    return jax.tree.map(lambda a, b: _select_leaf(condition, a, b), new, old)


@always_jit
def _select_leaf(condition: Array, new: Any, old: Any) -> Array:
    """Floats of 8 bits are codes, and are selected as integers: `selected_float8_changes_nan` (`_core/xla/cpu.py`)."""
    if not (is_float_leaf(new) and new.dtype.itemsize == 1):
        return jnp.where(condition, new, old)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (new, old))
    return jax.lax.bitcast_convert_type(jnp.where(condition, *bits), new.dtype)


def zeros_unless(condition: Array, updates: Any) -> Any:
    """Updates if `condition` holds; else zeros, which do not change parameters."""
    return jax.tree.map(lambda u: _leaf_or_zeros(condition, u), updates)


@always_jit
def _leaf_or_zeros(condition: Array, update: Any) -> Array:
    return _select_leaf(condition, update, jnp.zeros_like(update))
