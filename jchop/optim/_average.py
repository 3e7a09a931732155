"""Averages of the parameters during training, in more bits than the parameters have."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.optim._arguments import check_count
from jchop.optim._leaves import (
    NO_PARAMS,
    first_state_key,
    make_transformation,
    map_with_keys,
    only_state,
    require_shapes,
    round_leaf,
    sum_dtype,
)

Array = jax.Array
_AverageSpec = Spec | ElementFormat | ScaledFormat | str


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
    start: int = 0, every: int = 1, *, spec: _AverageSpec | None = None, key: Array | None = None
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
    first = first_state_key(of, key)

    def init(params: Any) -> AverageState:
        none = jnp.zeros([], jnp.int32)
        return AverageState(jax.tree.map(lambda p: jnp.zeros_like(p, sum_dtype(p)), params), none, none, first)

    def update(updates: Any, state: AverageState, params: Any = None, **extra: Any) -> tuple[Any, AverageState]:
        del extra
        if params is None:
            raise ValueError(NO_PARAMS)
        steps = jnp.asarray(optax.safe_increment(state.steps))
        due = (steps > start) & ((steps - start - 1) % every == 0)
        count = jnp.where(due, optax.safe_increment(state.taken), state.taken)

        def leaf(key: Array | None, average: Array, p: Any) -> Array:
            mean = average + (p.astype(average.dtype) - average) / count.astype(average.dtype)
            return jnp.where(due, mean if of is None else round_leaf(key, mean, of), average)

        after = optax.apply_updates(params, updates)
        following, average = map_with_keys(leaf, state.key, state.average, after)
        return updates, AverageState(average, steps, count, following)

    return make_transformation(init, update)


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
