"""A whole optimizer in low precision: gradients, weights, moments and an accumulator, each in its own format."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.optim._arguments import ABOVE_ZERO, as_transformation, check_number
from jchop.optim._leaves import (
    NO_PARAMS,
    first_state_key,
    in_sum_dtype,
    is_float_leaf,
    make_transformation,
    map_with_keys,
    round_leaf,
    rounded_sum_like,
    split_key,
    update_to_target,
)
from jchop.optim._pack import QuantizedState

Array = jax.Array
_LowPrecisionSpec = Spec | ElementFormat | ScaledFormat | str


class LowPrecisionState(NamedTuple):
    """State of `low_precision`: the wrapped transformation's state, the accumulator or None, the key or None."""

    inner_state: Any
    accumulator: Any
    key: Array | None


def low_precision(
    inner: optax.GradientTransformation,
    *,
    weight: _LowPrecisionSpec | None = None,
    gradient: _LowPrecisionSpec | None = None,
    momentum: _LowPrecisionSpec | None = None,
    accumulator: _LowPrecisionSpec | None = None,
    gradient_scale: Any = 1.0,
    key: Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`inner` with rounded gradients, parameters and moments, in the order of QPyTorch's OptimLP.

    A step takes g = Qg(gradient_scale * gradient). `inner` computes an update u from g and the accumulator a (the
    parameter p if there is no accumulator). Then a = Qa(a + u), p = Qw(a), and every moment m = Qm(m), after its use.
    Each sum is rounded once, from its exact value; `inner` computes in its own dtypes.

    It is the last link of a chain: its updates lead `optax.apply_updates` to the rounded parameters, as in
    `round_params`.

    Args:
        inner: any Optax transformation: SGD, Adam, AdamW, RMSProp, Adagrad, Adadelta ...
        weight: Qw, the rounding of parameters. Default None, here and below: not rounded.
        gradient: Qg, the rounding of gradients.
        momentum: Qm, for every array of the state of `inner` that mirrors a parameter.
        accumulator: Qa. If it is given, a copy of the parameters in float32 at least is kept, updated instead of the
            parameters, and rounded by Qa. `inner` begins from this copy.
        gradient_scale: the factor of gradients before their rounding, a finite number above 0: 1 / s for a loss
            multiplied by s. Default 1.
        key: a typed key, needed if a spec is stochastic.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state is a `LowPrecisionState`.

    Raises:
        TypeError, ValueError: for a value that is not a spec, or a stochastic spec without a key; for `momentum` if the
            state of `inner` is packed; and when traced, for parameters of a dtype that cannot hold the results.

    References:
        Zhang et al., QPyTorch: A Low-Precision Arithmetic Simulation Framework, arXiv 1910.04540; Wang et al., Training
        Deep Neural Networks with 8-bit Floating Point Numbers, arXiv 1812.08011; Carson and Chen, Pychop, arXiv
        2504.07835, table 7.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = jc.optim.low_precision(optax.sgd(0.1, momentum=0.9), weight="e5m2", gradient="e5m2", momentum="e6m9")
        >>> params = jnp.ones(2)
        >>> updates, state = tx.update(jnp.array([1.3, -2.2]), tx.init(params), params)
        >>> optax.apply_updates(params, updates).tolist()
        [0.875, 1.25]
    """
    specs = {"gradient": gradient, "accumulator": accumulator, "weight": weight, "momentum": momentum}
    roundings = {name: None if spec is None else as_spec(spec, name, scaled=True) for name, spec in specs.items()}
    start = next(
        (drawing_key for spec in roundings.values() if (drawing_key := first_state_key(spec, key)) is not None), None
    )
    check_number("gradient_scale", gradient_scale, ABOVE_ZERO)
    inner = as_transformation(inner)
    to_gradient, to_accumulator, to_weight, to_momentum = roundings.values()

    def init(params: Any) -> LowPrecisionState:
        master = None if to_accumulator is None else jax.tree.map(in_sum_dtype, params)
        inner_state = inner.init(params if master is None else master)  # `update` gives it the accumulator, too
        if to_momentum is not None and _has_packed_arrays(inner_state):
            raise ValueError(f"momentum={str(to_momentum)!r} rounds arrays, and inner packs its state: leave one out")
        return LowPrecisionState(inner_state, master, start)

    def rounded_gradient(key: Array | None, g: Any) -> Array:
        product = (g * gradient_scale).astype(g.dtype)
        return product if to_gradient is None else round_leaf(key, product, to_gradient)

    def advance(key: Array | None, base: Any, u: Any, p: Any) -> tuple[Array, Array]:
        """The new accumulator and parameter."""
        _, (first, second) = split_key(key, 2)
        if to_accumulator is None:
            return base, (p + u).astype(p.dtype) if to_weight is None else rounded_sum_like(first, p, u, to_weight)
        master = rounded_sum_like(first, base, u, to_accumulator)
        return master, master.astype(p.dtype) if to_weight is None else _master_as_param(second, master, p, to_weight)

    def update(updates: Any, state: LowPrecisionState, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError(NO_PARAMS)
        _, keys = split_key(state.key, 4)
        _, gradients = map_with_keys(rounded_gradient, keys[0], updates)
        base = params if state.accumulator is None else state.accumulator
        inner_updates, inner_state = inner.update(gradients, state.inner_state, base, **extra)
        _, pairs = map_with_keys(advance, keys[1], base, inner_updates, params)
        masters, targets = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs)
        if to_momentum is not None:
            inner_state = _round_moments(inner, keys[2], inner_state, params, to_momentum)
        new_accumulator = None if state.accumulator is None else masters
        return jax.tree.map(update_to_target, params, targets), LowPrecisionState(inner_state, new_accumulator, keys[3])

    return make_transformation(init, update)


def _has_packed_arrays(state: Any) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedState))
    return any(isinstance(node, QuantizedState) and node.packing.entries for node in nodes)


def _master_as_param(key: Array | None, master: Array, p: Any, spec: Spec) -> Array:
    """The accumulator as a parameter: rounded once, in the dtype of the parameter, which must hold it."""
    return rounded_sum_like(key, jnp.zeros_like(p), master, spec)


def _round_moments(inner: Any, key: Array | None, state: Any, params: Any, spec: Spec) -> Any:
    """The state of `inner` with every float array that mirrors a parameter rounded."""
    with_markers = optax.tree_map_params(
        inner, lambda leaf: _Moment(leaf), state, is_leaf=None, transform_non_params=lambda leaf: leaf
    )
    _, moments = map_with_keys(
        lambda key, leaf: leaf if not isinstance(leaf, _Moment) else _round_moment(key, leaf.value, spec),
        key,
        with_markers,
        is_leaf=lambda leaf: isinstance(leaf, _Moment),
    )
    return moments


class _Moment:
    """Marks an array of a state that mirrors a parameter; a leaf of a pytree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _round_moment(key: Array | None, value: Any, spec: Spec) -> Any:
    return round_leaf(key, value, spec) if is_float_leaf(value) else value
