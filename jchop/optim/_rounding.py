"""Rounding within a chain: of gradients, updates and parameters, with errors that are kept, and of whole optimizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jchop._spec.spec import AnySpec, Spec, as_spec
from jchop.optim._arguments import ABOVE_ZERO, as_transformation, check_carrier_dtype, check_number
from jchop.optim._leaves import (
    finite_or,
    first_state_key,
    in_sum_dtype,
    is_float_leaf,
    make_link,
    make_transformation,
    map_with_keys,
    require_representable,
    round_leaf,
    rounded_sum_like,
    split_key,
    sum_dtype,
    update_to_target,
)
from jchop.optim._pack import QuantizedState

Array = jax.Array


class RoundState(NamedTuple):
    """State of a rounding: the key of the next step, or None for a deterministic spec."""

    key: Array | None


def round_gradients(
    spec: AnySpec, key: Array | None = None, *, scale: Any = 1.0
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


def round_updates(spec: AnySpec, key: Array | None = None) -> optax.GradientTransformationExtraArgs:
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
    start = first_state_key(key, spec)
    check_number("scale", scale, ABOVE_ZERO)
    is_one = isinstance(scale, int | float) and scale == 1

    def update(updates: Any, state: RoundState, params: Any) -> tuple[Any, RoundState]:
        following, outputs = map_with_keys(
            lambda key, u: round_leaf(key, u if is_one else (u * scale).astype(u.dtype), spec), state.key, updates
        )
        return outputs, RoundState(following)

    return make_link(lambda _: RoundState(start), update)


def round_params(
    spec: AnySpec, key: Array | None = None, *, dtype: Any = None
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
    start = first_state_key(key, spec)

    def update(updates: Any, state: RoundState, params: Any) -> tuple[Any, RoundState]:
        def leaf(key: Array | None, u: Any, p: Any) -> Array:
            return update_to_target(p, rounded_sum_like(key, p, u, spec), dtype)

        following, outputs = map_with_keys(leaf, state.key, updates, params)
        return outputs, RoundState(following)

    return make_link(lambda _: RoundState(start), update, needs_params=True)


# -- errors that are kept ----------------------------------------------------------------------------------------------


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`: the rounding errors, in float32 at least; and the key."""

    error: Any
    key: Array | None


def error_feedback(spec: AnySpec, key: Array | None = None) -> optax.GradientTransformationExtraArgs:
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
    start = first_state_key(key, spec)

    def init(params: Any) -> ErrorFeedbackState:
        return ErrorFeedbackState(jax.tree.map(lambda p: jnp.zeros_like(p, sum_dtype(p)), params), start)

    def update(updates: Any, state: ErrorFeedbackState, params: Any) -> Any:

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

    return make_link(init, update)


class CompensationState(NamedTuple):
    """State of `compensate`: the rounding error of each parameter, in its dtype; and the key."""

    lost: Any
    key: Array | None


def compensate(
    spec: AnySpec, key: Array | None = None, *, compensation: AnySpec | None = None
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
    start = first_state_key(key, spec, rest)

    def init(params: Any) -> CompensationState:
        return CompensationState(jax.tree.map(jnp.zeros_like, params), start)

    def update(updates: Any, state: CompensationState, params: Any) -> Any:
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

    return make_link(init, update, needs_params=True)


# -- a whole optimizer -------------------------------------------------------------------------------------------------


class LowPrecisionState(NamedTuple):
    """State of `low_precision`: the wrapped transformation's state, the accumulator or None, the key or None."""

    inner_state: Any
    accumulator: Any
    key: Array | None


def low_precision(
    inner: optax.GradientTransformation,
    *,
    weight: AnySpec | None = None,
    gradient: AnySpec | None = None,
    momentum: AnySpec | None = None,
    accumulator: AnySpec | None = None,
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
    start = first_state_key(key, *roundings.values())
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

    def update(updates: Any, state: LowPrecisionState, params: Any, **extra: Any) -> Any:
        _, keys = split_key(state.key, 4)
        _, gradients = map_with_keys(rounded_gradient, keys[0], updates)
        base = params if state.accumulator is None else state.accumulator
        inner_updates, inner_state = inner.update(gradients, state.inner_state, base, **extra)
        _, pairs = map_with_keys(advance, keys[1], base, inner_updates, params)
        masters, targets = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs)
        if to_momentum is not None:
            inner_state = _round_moments(inner, keys[2], inner_state, to_momentum)
        new_accumulator = None if state.accumulator is None else masters
        return jax.tree.map(update_to_target, params, targets), LowPrecisionState(inner_state, new_accumulator, keys[3])

    return make_transformation(init, update, needs_params=True)


def _has_packed_arrays(state: Any) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedState))
    return any(isinstance(node, QuantizedState) and node.packing.entries for node in nodes)


def _master_as_param(key: Array | None, master: Array, p: Any, spec: Spec) -> Array:
    """The accumulator as a parameter: rounded once, in the dtype of the parameter, which must hold it."""
    return rounded_sum_like(key, jnp.zeros_like(p), master, spec)


def _round_moments(inner: Any, key: Array | None, state: Any, spec: Spec) -> Any:
    """The state of `inner` with every float array that mirrors a parameter rounded."""
    mirrors = optax.tree_map_params(inner, lambda _: True, state, transform_non_params=lambda _: False)
    return map_with_keys(
        lambda key, leaf, is_moment: round_leaf(key, leaf, spec) if is_moment and is_float_leaf(leaf) else leaf,
        key,
        state,
        mirrors,
    )[1]
