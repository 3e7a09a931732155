"""Rounding within a chain: of gradients, of updates, and of the updated parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.optim._arguments import ABOVE_ZERO, check_carrier_dtype, check_number
from jchop.optim._leaves import (
    NO_PARAMS,
    first_state_key,
    make_transformation,
    map_with_keys,
    round_leaf,
    rounded_sum_like,
    update_to_target,
)

Array = jax.Array
_RoundSpec = Spec | ElementFormat | ScaledFormat | str


class RoundState(NamedTuple):
    """State of a rounding: the key of the next step, or None for a deterministic spec."""

    key: Array | None


def round_gradients(
    spec: _RoundSpec, key: Array | None = None, *, scale: Any = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Gradients, multiplied by `scale`, rounded to `spec`: the first link of a chain.

    Each leaf has a separate key, split from the key in the state, as in `optax.add_noise`.

    Args:
        spec: a `Spec`, a format, or text.
        key: a typed key, needed by the stochastic modes.
        scale: the factor of gradients before their rounding, a finite number above 0: 1 / s for gradients of s times
            the loss. Default 1.

    Returns:
        An Optax transformation.

    Raises:
        ValueError: for a stochastic spec without a key.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(jc.optim.round_gradients("float8_e5m2"), optax.sgd(1.0))
        >>> params = jnp.zeros(2)
        >>> tx.update(jnp.array([1.1, 3.3]), tx.init(params), params)[0].tolist()
        [-1.0, -3.5]
    """
    return _round_in_chain(as_spec(spec, scaled=True), key, scale)


def round_updates(spec: _RoundSpec, key: Array | None = None) -> optax.GradientTransformationExtraArgs:
    """The updates at this place of a chain, rounded to `spec`.

    Args:
        spec: a `Spec`, a format, or text.
        key: a typed key, needed by the stochastic modes.

    Returns:
        An Optax transformation. Its state is a `RoundState`.

    Raises:
        ValueError: for a stochastic spec without a key.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(optax.sgd(0.5), jc.optim.round_updates("fixed4.4"))
        >>> params = jnp.zeros(2)
        >>> tx.update(jnp.array([1.1, 3.3]), tx.init(params), params)[0].tolist()
        [-0.5625, -1.625]
    """
    return _round_in_chain(as_spec(spec, scaled=True), key, 1.0)


def _round_in_chain(spec: Spec, key: Array | None, scale: Any) -> optax.GradientTransformationExtraArgs:
    start = first_state_key(spec, key)
    check_number("scale", scale, ABOVE_ZERO)
    is_one = isinstance(scale, int | float) and scale == 1

    def init(params: Any) -> RoundState:
        del params
        return RoundState(start)

    def update(updates: Any, state: RoundState, params: Any = None, **extra: Any) -> tuple[Any, RoundState]:
        del params, extra
        following, outputs = map_with_keys(
            lambda key, u: round_leaf(key, u if is_one else (u * scale).astype(u.dtype), spec), state.key, updates
        )
        return outputs, RoundState(following)

    return make_transformation(init, update)


def round_params(
    spec: _RoundSpec, key: Array | None = None, *, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Updates u' for which `optax.apply_updates` gives p + u rounded to `spec`: the last link of a chain.

    The exact sum is rounded once (for a scaled format or a codebook: the sum in the dtype). With a stochastic spec,
    parameters of 16 bits train without a master copy: an update below half a gap counts on average.

    Parameters of 16 bits get exactly the rounded value, for every update. Parameters of 32 bits get it if they change
    by at most a factor of two, or if float32 holds the difference. If the change is over many binades, or through zero,
    `apply_updates` may miss the value by a unit in the last place of float32. `apply_updates` reads numbers as zero if
    the device does, above all subnormals of float32.

    Args:
        spec: a `Spec`, a format, or text; the parameters' dtype must hold every value of it.
        key: a typed key, needed by the stochastic modes.
        dtype: dtype of the emitted updates. Default: float32, and float64 for float64 parameters. A wrapper that
            requires updates in the gradients' dtype (`optax.apply_if_finite`, for 16-bit gradients) needs that dtype
            here; then a step over many binades may miss the value as above.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state is a `RoundState`.

    Raises:
        ValueError: for a stochastic spec without a key; and when traced, without parameters, or for parameters of a
            dtype that cannot hold the results.

    References:
        Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(optax.sgd(1e-4), jc.optim.round_params("bfloat16:stochastic", jax.random.key(0)))
        >>> params = jnp.ones(10_000, "bfloat16")
        >>> updates, state = tx.update(jnp.ones(10_000), tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> params.dtype, round(float(1 - params.astype("float32").mean()), 5)
        (dtype(bfloat16), 0.0001)
    """
    spec, dtype = as_spec(spec, scaled=True), check_carrier_dtype("dtype", dtype)
    start = first_state_key(spec, key)

    def init(params: Any) -> RoundState:
        del params
        return RoundState(start)

    def update(updates: Any, state: RoundState, params: Any = None, **extra: Any) -> tuple[Any, RoundState]:
        del extra
        if params is None:
            raise ValueError(NO_PARAMS)

        def leaf(key: Array | None, u: Any, p: Any) -> Array:
            return update_to_target(p, rounded_sum_like(key, p, u, spec), dtype)

        following, outputs = map_with_keys(leaf, state.key, updates, params)
        return outputs, RoundState(following)

    return make_transformation(init, update)
