"""Rounding errors are kept, and added to the next updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.optim._leaves import (
    NO_PARAMS,
    finite_or,
    first_state_key,
    make_transformation,
    map_with_keys,
    require_representable,
    round_leaf,
    rounded_sum_like,
    split_key,
    sum_dtype,
    update_to_target,
)

Array = jax.Array
_FeedbackSpec = Spec | ElementFormat | ScaledFormat | str


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`: the rounding errors, in float32 at least; and the key."""

    error: Any
    key: Array | None


def error_feedback(spec: _FeedbackSpec, key: Array | None = None) -> optax.GradientTransformationExtraArgs:
    """Updates rounded to `spec`, after the previous rounding errors are added.

    With the error e of the step before: c = u + e, q = round(c), and the new error is c - q. Over many steps the sum of
    all q differs from the sum of all u by one error only. Where the new error is not finite, the old one stays.

    Args:
        spec: a `Spec`, a format, or text; also formats so coarse that single updates mean little (signs, 1 or 2 bits).
        key: a typed key, needed by the stochastic modes.

    Returns:
        An Optax transformation. Its state is an `ErrorFeedbackState`.

    Raises:
        ValueError: for a stochastic spec without a key; and when traced, for updates of a dtype that cannot hold the
            results.

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., arXiv 1901.09847.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx, params = jc.optim.error_feedback("fixed4.0"), jnp.zeros(1)
        >>> state, sent = tx.init(params), []
        >>> for _ in range(4):
        ...     updates, state = tx.update(jnp.array([0.375]), state, params)
        ...     sent.append(float(updates[0]))
        >>> sent
        [0.0, 1.0, 0.0, 0.0]
    """
    spec = as_spec(spec, scaled=True)
    start = first_state_key(spec, key)

    def init(params: Any) -> ErrorFeedbackState:
        return ErrorFeedbackState(jax.tree.map(lambda p: jnp.zeros_like(p, sum_dtype(p)), params), start)

    def update(updates: Any, state: ErrorFeedbackState, params: Any = None, **extra: Any) -> Any:
        del params, extra

        def leaf(key: Array | None, u: Any, c: Array) -> Array:
            require_representable("spec", spec, "updates", u)
            return round_leaf(key, c, spec)

        sums = jax.tree.map(lambda u, e: u.astype(e.dtype) + e, updates, state.error)
        following, outputs = map_with_keys(leaf, state.key, updates, sums)
        # The barrier keeps the compiler from contracting a product in `q` with the subtraction.
        error = jax.tree.map(
            lambda c, q, e: finite_or(c - jax.lax.optimization_barrier(q), e), sums, outputs, state.error
        )
        outputs = jax.tree.map(lambda q, u: q.astype(u.dtype), outputs, updates)
        return outputs, ErrorFeedbackState(error, following)

    return make_transformation(init, update)


class CompensationState(NamedTuple):
    """State of `compensate`: the rounding error of each parameter, in its dtype; and the key."""

    lost: Any
    key: Array | None


def compensate(
    spec: _FeedbackSpec, key: Array | None = None, *, compensation: _FeedbackSpec | None = None
) -> optax.GradientTransformationExtraArgs:
    """Parameters rounded to `spec` with Kahan's compensation: the last link of a chain, in place of `round_params`.

    With the error c so far: y = u + c, t = round(p + y), and the new c is y - (t - p); the parameter becomes t. Small
    updates add up in c until they move the parameter, without randomness. The cost is a second array like the
    parameters. Where the new c is not finite, the old one stays.

    Args:
        spec: a `Spec`, a format, or text; the parameters' dtype must hold every value of it.
        key: a typed key, needed by the stochastic modes of either spec.
        compensation: the rounding of c. Default: the parameters' dtype.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state is a `CompensationState`.

    Raises:
        ValueError: for a stochastic spec without a key; and when traced, without parameters, or for parameters of a
            dtype that cannot hold the results.

    References:
        Kahan, Communications of the ACM 8 (1965) 40; Zamirai et al., arXiv 2010.06192, algorithm 3.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx, params = jc.optim.compensate("bfloat16"), jnp.ones(1, "bfloat16")
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.array([1e-3]), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0])
        1.1015625
    """
    spec = as_spec(spec, scaled=True)
    rest = None if compensation is None else as_spec(compensation, "compensation", scaled=True)
    draws = [first_state_key(each, key) for each in (spec, rest)]
    start = next((key for key in draws if key is not None), None)

    def init(params: Any) -> CompensationState:
        return CompensationState(jax.tree.map(jnp.zeros_like, params), start)

    def update(updates: Any, state: CompensationState, params: Any = None, **extra: Any) -> Any:
        del extra
        if params is None:
            raise ValueError(NO_PARAMS)

        def leaf(key: Array | None, u: Any, p: Any, error: Any) -> tuple[Array, Array]:
            _, (target_key, error_key) = split_key(key, 2)
            wide = sum_dtype(p, u)
            change = u.astype(wide) + error.astype(wide)
            target = rounded_sum_like(target_key, p, change, spec)
            new_error = change - (jax.lax.optimization_barrier(target).astype(wide) - p.astype(wide))
            if rest is not None:
                require_representable("compensation", rest, "params", error)
                new_error = round_leaf(error_key, new_error, rest)
            return update_to_target(p, target), finite_or(new_error.astype(error.dtype), error)

        following, pairs = map_with_keys(leaf, state.key, updates, params, state.lost)
        outputs, errors = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0)), pairs)
        return outputs, CompensationState(errors, following)

    return make_transformation(init, update)
