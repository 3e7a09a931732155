"""Links of a chain: rounding, kept errors, averages, sparse and packed parameters; gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.extend.core import nonempty_axis_env_DO_NOT_USE  # pyright: ignore[reportPrivateImportUsage]

from jchop._common.settings import always_jit
from jchop._core.xla.cpu import materialize_per_group
from jchop._round.arguments import has_tracer
from jchop._spec.spec import Spec, SpecLike, as_spec
from jchop._storage import dequantize
from jchop._storage._quantize import StoredAs, requantize
from jchop.formats import FloatFormat, bfloat16
from jchop.formats.scaled.scaled import axis_indexes
from jchop.optim import _leaves as base
from jchop.optim._pack import QuantizedState
from jchop.sparsity._masks import check_sparsity_pattern, sparsity_mask


class RoundState(NamedTuple):
    """State of a rounding: the key of the next step, or None for a deterministic spec."""

    key: Array | None


def round_updates(
    spec: SpecLike, key: Array | None = None, *, scale: Any = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by `scale` and rounds them to `spec`; the first link of a chain rounds gradients.

    Each leaf has a separate key, split from the key in the state, as in `optax.add_noise`.

    Args:
        spec: a `Spec`, a format, or text.
        key: a typed key, needed by the stochastic modes.
        scale: the factor of updates before their rounding, a finite number above 0. It is 1 / s for gradients of s
            times the loss. Default 1.

    Returns:
        An Optax transformation. Its state holds the key.

    Raises:
        TypeError, ValueError: for another scale, or a stochastic spec without a key.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = optax.chain(jc.optim.round_updates("float8_e5m2"), optax.sgd(0.5), jc.optim.round_updates("fixed4.2"))
        >>> params = jnp.zeros(2)
        >>> tx.update(jnp.array([1.1, 3.3]), tx.init(params), params)[0].tolist()
        [-0.5, -1.75]
    """
    spec = as_spec(spec, scaled=True)
    base.check_number("scale", scale, 0, ends="()")
    is_one = isinstance(scale, int | float) and scale == 1

    def leaf(key: Array | None, u: Any) -> Array:
        return base.round_leaf(key, u if is_one else (u * scale).astype(u.dtype), spec)

    return _rounding_link(leaf, base.first_state_key(key, spec))


def _rounding_link(
    leaf: Callable[..., Array], start: Array | None, *, needs_params: bool = False
) -> optax.GradientTransformationExtraArgs:
    """A link that has a function of a key and an update, and a parameter if it needs that, for every leaf."""

    def update(updates: Any, state: RoundState, params: Any) -> tuple[Any, RoundState]:
        following, outputs = base.map_with_keys(leaf, state.key, updates, *((params,) if needs_params else ()))
        return outputs, RoundState(following)

    return base.make_link(lambda _: RoundState(start), update, needs_params=needs_params)


def round_params(
    spec: SpecLike, key: Array | None = None, *, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Makes `optax.apply_updates` give p + u rounded to `spec`: the last link of a chain.

    The exact sum of parameter p and update u is rounded once (for a scaled format or a codebook, the sum in the dtype).
    With a stochastic spec, parameters of 16 bits train without a master copy, since an update below half a gap counts
    on average.

    Parameters of 16 bits get exactly the rounded value, for every update. Parameters of 32 bits get it if they change
    by at most a factor of two, or if float32 holds the difference. If the change is over many binades, or through zero,
    `apply_updates` may miss the value by a unit in the last place of float32. `apply_updates` reads numbers as zero if
    the device does, above all subnormals of float32.

    Args:
        spec: a `Spec`, a format, or text; the parameters' dtype must hold every value of it.
        key: a typed key, needed by the stochastic modes.
        dtype: the dtype of the emitted updates. Default: float32, and float64 for float64 parameters. A wrapper that
            requires updates in the gradients' dtype (`optax.apply_if_finite`, for 16-bit gradients) needs their dtype
            here. Then a step over many binades may miss the value as above.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state holds the key.

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
    spec, dtype = as_spec(spec, scaled=True), base.check_carrier_dtype("dtype", dtype)

    def leaf(key: Array | None, u: Any, p: Any) -> Array:
        return base.update_to_target(p, base.rounded_sum(key, p, u, spec), dtype)

    return _rounding_link(leaf, base.first_state_key(key, spec), needs_params=True)


# -- errors that are kept ----------------------------------------------------------------------------------------------


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`: the rounding errors, in float32 at least; and the key."""

    error: Any
    key: Array | None


def error_feedback(spec: SpecLike, key: Array | None = None) -> optax.GradientTransformationExtraArgs:
    """Adds the previous rounding errors to the updates, then rounds them to `spec`.

    With the error e of the step before: c = u + e, q = round(c), and the new error is c - q. Over many steps the sum of
    all q differs from the sum of all u by one error only. Where the new error is not finite, the old one stays.

    Args:
        spec: a `Spec`, a format, or text; even formats so coarse that single updates mean little (signs, 1 or 2 bits).
        key: a typed key, needed by the stochastic modes.

    Returns:
        An Optax transformation. Its state has `error`, the rounding errors, and `key`.

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
    start = base.first_state_key(key, spec)

    def init(params: Any) -> ErrorFeedbackState:
        return ErrorFeedbackState(jax.tree.map(lambda p: jnp.zeros_like(p, base.sum_dtype(p)), params), start)

    def update(updates: Any, state: ErrorFeedbackState, params: Any) -> Any:

        def leaf(key: Array | None, u: Any, c: Array) -> Array:
            base.require_representable("spec", spec, "updates", u)
            return base.round_leaf(key, c, spec)

        sums = jax.tree.map(lambda u, e: u.astype(e.dtype) + e, updates, state.error)
        following, outputs = base.map_with_keys(leaf, state.key, updates, sums)
        # The barrier keeps the compiler from contracting a product in `q` with the subtraction.
        error = jax.tree.map(
            lambda c, q, e: base.finite_or(c - jax.lax.optimization_barrier(q), e), sums, outputs, state.error
        )
        outputs = jax.tree.map(lambda q, u: q.astype(u.dtype), outputs, updates)
        return outputs, ErrorFeedbackState(error, following)

    return base.make_link(init, update)


class CompensationState(NamedTuple):
    """State of `compensate`: the rounding error of each parameter, in its dtype or as a byte; and the key."""

    lost: Any
    key: Array | None


def compensate(
    spec: SpecLike, key: Array | None = None, *, compensation: SpecLike | None = None, bits: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Rounds parameters to `spec` with Kahan's compensation: the last link of a chain, in place of `round_params`.

    With the error c so far: y = u + c, t = round(p + y), and the new c is y - (t - p). The parameter becomes t. Small
    updates add up in c until they move the parameter, without randomness. The cost is a second array like the
    parameters. Where the new c is not finite, the old one stays.

    With ``bits=8`` c has one byte. A bfloat16 parameter and its byte are a number of 24 bits, of 8 exponent and 15
    fraction bits: a master copy. The byte is the distance in 256ths of the parameter's last place. `spec` rounds the
    sum of that number and the update once, and the parameter is the nearest bfloat16 number, ties away from zero.
    Parameters of other dtypes become p + u.

    Args:
        spec: a `Spec`, a format, or text; the parameters' dtype must hold every value of it. With `bits` it is bfloat16
            in any rounding mode.
        key: a typed key, needed by the stochastic modes of either spec.
        compensation: the rounding of c. Default: the parameters' dtype.
        bits: 8 for the byte above. Default (None): c is an array in the parameters' dtype.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state has `lost`, the rounding errors, and
        `key`.

    Raises:
        ValueError: for a stochastic spec without a key, or `bits` with another spec or with `compensation`. When
            traced, also without parameters, or for parameters of a dtype that cannot hold the results.

    References:
        Kahan, Communications of the ACM 8 (1965) 40; Zamirai et al., arXiv 2010.06192, algorithm 3. For the byte:
        FlashOptim, arXiv 2602.23349.

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
    start = base.first_state_key(key, spec, rest)
    if bits is not None:
        if bits != 8 or rest is not None or spec.format != bfloat16:
            raise ValueError(f"bits={bits!r} must be 8, with spec='bfloat16' and no compensation, not {str(spec)!r}")
        spec = replace(spec, format=_MASTER_FORMAT)

    def init(params: Any) -> CompensationState:
        if bits is None:
            return CompensationState(jax.tree.map(jnp.zeros_like, params), start)
        return CompensationState(jax.tree.map(_first_byte, params), start)

    def update(updates: Any, state: CompensationState, params: Any) -> Any:
        def leaf(key: Array | None, u: Any, p: Any, error: Any) -> tuple[Array, Array]:
            if bits is not None:
                if p.dtype != jnp.bfloat16:
                    return u, error
                target, error = _split_master(base.rounded_sum(key, join_master(p, error), u, spec))
                return base.update_to_target(p, target), error
            _, (target_key, error_key) = base.split_key(key, 2)
            wide = base.sum_dtype(p, u)
            change = u.astype(wide) + error.astype(wide)
            target = base.rounded_sum(target_key, p, change, spec)
            new_error = change - (jax.lax.optimization_barrier(target).astype(wide) - p.astype(wide))
            if rest is not None:
                base.require_representable("compensation", rest, "params", error)
                new_error = base.round_leaf(error_key, new_error, rest)
            return base.update_to_target(p, target), base.finite_or(new_error.astype(error.dtype), error)

        following, pairs = base.map_with_keys(leaf, state.key, updates, params, state.lost)
        outputs, errors = base.split_pairs(updates, pairs)
        return outputs, CompensationState(errors, following)

    return base.make_link(init, update, needs_params=True)


#: A master copy has 8 fraction bits more than bfloat16.
_MASTER_FORMAT = FloatFormat(8, 15)
_INFINITY16 = 0x7F80


def _first_byte(p: Array) -> Array:
    """The byte of each bfloat16 parameter before the first step; other parameters have one for all."""
    return jnp.zeros_like(p, jnp.int8) if p.dtype == jnp.bfloat16 else jnp.zeros([], jnp.int8)


def join_master(p: Array, correction: Array) -> Array:
    """The master copy of a bfloat16 parameter and its byte, in float32; other parameters as they are."""
    if p.dtype != jnp.bfloat16:
        return p
    bits = lax.bitcast_convert_type(p, jnp.uint16).astype(jnp.int32)
    magnitude = jnp.maximum(((bits & 0x7FFF) << 8) + correction, 0)
    return lax.bitcast_convert_type(((bits >> 15) << 31) | (magnitude << 8), jnp.float32)


def _split_master(master: Array) -> tuple[Array, Array]:
    """The bfloat16 number nearest to a master copy, ties away from zero, and the byte. It is finite where the copy is.

    The byte has the sign of the change of the magnitude, so it is within -128 and 127.
    """
    bits = lax.bitcast_convert_type(master, jnp.int32)
    magnitude = (bits & 0x7FFFFFFF) >> 8
    finite = magnitude < _INFINITY16 << 8
    nearest = jnp.where(finite, jnp.minimum((magnitude + 128) >> 8, _INFINITY16 - 1), magnitude >> 8)
    correction = jnp.where(finite, jnp.minimum(magnitude - (nearest << 8), 127), 0).astype(jnp.int8)
    p = lax.bitcast_convert_type((nearest | ((bits >> 16) & 0x8000)).astype(jnp.uint16), jnp.bfloat16)
    return p, correction


# -- a whole optimizer -------------------------------------------------------------------------------------------------


class LowPrecisionState(NamedTuple):
    """State of `low_precision`: the wrapped transformation's state, the accumulator or None, the key or None."""

    inner_state: Any
    accumulator: Any
    key: Array | None


def low_precision(
    inner: optax.GradientTransformation,
    *,
    weight: SpecLike | None = None,
    gradient: SpecLike | None = None,
    momentum: SpecLike | None = None,
    accumulator: SpecLike | None = None,
    gradient_scale: Any = 1.0,
    key: Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` with rounded gradients, parameters and moments, in the order of QPyTorch's OptimLP.

    A step rounds the gradient, g = Qg(gradient_scale * gradient). `inner` computes an update u from g and the
    accumulator a (the parameter p if there is no accumulator). Then a = Qa(a + u), p = Qw(a), and every moment m =
    Qm(m), after its use. Each sum is rounded once, from its exact value; `inner` computes in its own dtypes.

    It is the last link of a chain: its updates lead `optax.apply_updates` to the rounded parameters, as in
    `round_params`.

    Args:
        inner: any Optax transformation: SGD, Adam, AdamW, RMSProp, Adagrad, Adadelta ...
        weight: Qw, the rounding of parameters. Default None, here and below: not rounded.
        gradient: Qg, the rounding of gradients.
        momentum: Qm, for every array of the state of `inner` that mirrors a parameter.
        accumulator: Qa. With it, a copy of the parameters, in float32 at least, is updated instead of the parameters,
            and rounded by Qa. `inner` begins from this copy.
        gradient_scale: the factor of gradients before their rounding, a finite number above 0. It is 1 / s for a loss
            multiplied by s. Default 1.
        key: a typed key, needed if a spec is stochastic.

    Returns:
        An Optax transformation; its ``update`` needs the parameters. Its state has `inner_state`, `accumulator` (or
        None) and `key`.

    Raises:
        TypeError, ValueError: for a value that is not a spec, a stochastic spec without a key, or `momentum` if the
            state of `inner` is packed. When traced, for parameters of a dtype that cannot hold the results.

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
    start = base.first_state_key(key, *roundings.values())
    base.check_number("gradient_scale", gradient_scale, 0, ends="()")
    inner = base.as_transformation(inner)
    to_gradient, to_accumulator, to_weight, to_momentum = roundings.values()

    def init(params: Any) -> LowPrecisionState:
        master = None if to_accumulator is None else jax.tree.map(base.in_sum_dtype, params)
        inner_state = inner.init(params if master is None else master)  # `update` gives it the accumulator, too
        nodes = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, QuantizedState))
        packs = any(isinstance(node, QuantizedState) and node.packing.entries for node in nodes)
        if to_momentum is not None and packs:
            raise ValueError(f"momentum={str(to_momentum)!r} rounds arrays, and inner packs its state: leave one out")
        return LowPrecisionState(inner_state, master, start)

    def rounded_gradient(key: Array | None, g: Any) -> Array:
        product = (g * gradient_scale).astype(g.dtype)
        return product if to_gradient is None else base.round_leaf(key, product, to_gradient)

    def advance(key: Array | None, origin: Any, u: Any, p: Any) -> tuple[Array, Array]:
        """The new accumulator and parameter."""
        _, (first, second) = base.split_key(key, 2)
        if to_accumulator is None:
            target = (p + u).astype(p.dtype) if to_weight is None else base.rounded_sum(first, p, u, to_weight)
            return origin, target
        master = base.rounded_sum(first, origin, u, to_accumulator)
        if to_weight is None:
            return master, master.astype(p.dtype)
        return master, base.rounded_sum(second, jnp.zeros_like(p), master, to_weight)

    def update(updates: Any, state: LowPrecisionState, params: Any, **extra: Any) -> Any:
        _, keys = base.split_key(state.key, 4)
        _, gradients = base.map_with_keys(rounded_gradient, keys[0], updates)
        origin = params if state.accumulator is None else state.accumulator
        inner_updates, inner_state = inner.update(gradients, state.inner_state, origin, **extra)
        _, pairs = base.map_with_keys(advance, keys[1], origin, inner_updates, params)
        masters, targets = base.split_pairs(params, pairs)
        if to_momentum is not None:
            inner_state = _round_moments(inner, keys[2], inner_state, to_momentum)
        new_accumulator = None if state.accumulator is None else masters
        outputs = jax.tree.map(base.update_to_target, params, targets)
        return outputs, LowPrecisionState(inner_state, new_accumulator, keys[3])

    return base.make_transformation(init, update, needs_params=True)


def _round_moments(inner: Any, key: Array | None, state: Any, spec: Spec) -> Any:
    """The state of `inner` with every float array that mirrors a parameter rounded."""
    mirrors = optax.tree_map_params(inner, lambda _: True, state, transform_non_params=lambda _: False)

    def moment(key: Array | None, leaf: Any, is_moment: bool) -> Any:
        return base.round_leaf(key, leaf, spec) if is_moment and base.is_float_leaf(leaf) else leaf

    return base.map_with_keys(moment, key, state, mirrors)[1]


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
    start: int = 0, every: int = 1, *, spec: SpecLike | None = None, key: Array | None = None
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
    base.check_count("start", start, 0)
    base.check_count("every", every, 1)
    of = None if spec is None else as_spec(spec, scaled=True)
    first = base.first_state_key(key, of)

    def init(params: Any) -> AverageState:
        none = jnp.zeros([], jnp.int32)
        return AverageState(jax.tree.map(lambda p: jnp.zeros_like(p, base.sum_dtype(p)), params), none, none, first)

    def update(updates: Any, state: AverageState, params: Any) -> tuple[Any, AverageState]:
        steps = jnp.asarray(optax.safe_increment(state.steps))
        due = (steps > start) & ((steps - start - 1) % every == 0)
        count = jnp.where(due, optax.safe_increment(state.taken), state.taken)

        def leaf(key: Array | None, average: Array, p: Any) -> Array:
            mean = average + (p.astype(average.dtype) - average) / count.astype(average.dtype)
            return jnp.where(due, mean if of is None else base.round_leaf(key, mean, of), average)

        after = optax.apply_updates(params, updates)
        following, average = base.map_with_keys(leaf, state.key, state.average, after)
        return updates, AverageState(average, steps, count, following)

    return base.make_link(init, update, needs_params=True)


def averaged_params(state: Any, params: Any) -> Any:
    """Returns the average that `average_params` keeps; `params` if no parameters have entered it yet.

    Args:
        state: the state of a transformation that contains `average_params`.
        params: the present parameters.

    Returns:
        A pytree like `params`, in float32 at least.

    Raises:
        ValueError: if `state` has no `average_params`, or several. For parameters of other shapes.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> tx, params = jc.optim.average_params(), jnp.ones(1, "bfloat16")
        >>> jc.optim.averaged_params(tx.init(params), params).dtype
        dtype('float32')
    """
    average_state = base.only_state(state, AverageState, "average_params")
    base.require_shapes("params", params, "the average", average_state.average)
    return jax.tree.map(
        lambda a, p: jnp.where(average_state.taken > 0, a, p.astype(a.dtype)), average_state.average, params
    )


# -- n of every m ------------------------------------------------------------------------------------------------------

#: Without decay the loss of a least squares problem grows beyond the loss of pruning once; 0.02 was better than 0.002,
#: 0.1 and 0.5, under SGD and Adam.
_DEFAULT_MASK_DECAY = 0.02


class SparseState(NamedTuple):
    """State of `sparse_params`.

    Args:
        steps: an int32 count of the steps.
        masks: which numbers of each parameter are not held at zero; a single True for one that is never pruned.
        dense: the parameters before they are masked, in float32 at least, if masks are chosen again. Else None. A
            single 0 stands for one that is never pruned.
    """

    steps: Array
    masks: Any
    dense: Any


def sparse_params(
    n: int, m: int, *, axis: int | Sequence[int] = -2, start: int = 0, every: int | None = None, decay: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Makes updates after which n of every m numbers of each parameter are not zero: the last link of a chain.

    `jchop.sparsity.mask` chooses the masks, from the parameters after the update. By default they are chosen once, and
    stay. With `every`, the state keeps the dense parameters, to which all updates are added. Gradients are computed at
    the masked parameters, and reach the masked numbers, too (a straight-through estimator). So these can come back when
    masks are chosen again. Parameters with fewer than two axes, or without floating-point numbers, are never
    pruned. To leave others out use `optax.masked`.

    Args:
        n: the count of numbers that stay, from 1 to m - 1.
        m: the count of numbers in a group.
        axis: an axis, or two of them for tiles of m x m (m up to 4). With tiles, products with the parameter and with
            its transpose are sparse. Default -2: the inputs of a kernel of shape (inputs, outputs), or (..., inputs,
            outputs) for a convolution.
        start: number of steps before the first masks. Default 0.
        every: number of steps from one choice of masks to the next. Default None: they are chosen once.
        decay: with `every`, the share of the masked numbers that each step subtracts from the dense parameters, so that
            masks settle. It is the learning rate times the lambda of SR-STE (2e-4 in its paper). With 0 masked numbers
            grow by gradients that do not depend on them, and masks go on changing. Default 0.02.

    Returns:
        An Optax transformation, whose ``update`` needs the parameters. Its state has `steps`, `masks` and `dense`.

    Raises:
        TypeError, ValueError: for arguments out of range. When traced, without parameters.

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
    base.check_count("start", start, 0)
    if every is not None:
        base.check_count("every", every, 1)
    if every is None and decay is not None:
        raise ValueError(f"decay={decay!r} is that of dense parameters, which are kept with every=; leave it out")
    decay = base.check_number("decay", _DEFAULT_MASK_DECAY if decay is None else decay, 0, 1)

    def is_prunable(p: Any) -> bool:
        if jnp.ndim(p) < 2 or not base.is_float_leaf(p):
            return False
        axis_indexes("axis", axes[0] if len(axes) == 1 else axes, jnp.shape(p))
        return True

    def mask_shapes(params: Any) -> Any:
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p) if is_prunable(p) else (), bool), params)

    def init(params: Any) -> SparseState:
        masks = jax.tree.map(jnp.ones_like, mask_shapes(params))
        dense = None
        if every is not None:
            dense = jax.tree.map(lambda p: jnp.array(p, base.sum_dtype(p)) if is_prunable(p) else jnp.zeros([]), params)
        return SparseState(jnp.zeros([], jnp.int32), masks, dense)

    def update(updates: Any, state: SparseState, params: Any) -> tuple[Any, SparseState]:
        base.require_shapes("params", mask_shapes(params), "the masks", state.masks)
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
            return base.update_to_target(p, jnp.where(mask, after, 0).astype(p.dtype)), mask, after

        leaves, structure = jax.tree.flatten(updates)
        others = [params, state.masks, *(() if state.dense is None else (state.dense,))]
        each = [leaf(*parts) for parts in zip(leaves, *map(structure.flatten_up_to, others), strict=True)]
        outputs, masks, dense = (structure.unflatten([one[i] for one in each]) for i in range(3))
        return outputs, SparseState(steps, masks, None if state.dense is None else dense)

    return base.make_link(init, update, needs_params=True)


# -- packed parameters -------------------------------------------------------------------------------------------------


def apply_updates(params: Any, updates: Any, key: Array | None = None) -> Any:
    """Applies updates as `optax.apply_updates`, also to a `QArray`, which is quantized again under its spec.

    A parameter that `jchop.quantize_fn(...).pack` stored in another shape is packed in that shape again. Each array of
    a stack (`vmap`, `scan`) is quantized by itself, if it has scales of its own.

    Under a stochastic spec, ``"int8(channel=0):stochastic"``, updates below a quantum count on average, so that no copy
    in more bits is needed. The scales are fitted to the new numbers.

    Args:
        params: a pytree of arrays, some of them packed.
        updates: a pytree of plain arrays, in the shapes of `jchop.dequantize`.
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
        >>> state = tx.init(jc.dequantize(params))
        >>> gradients = jax.grad(lambda p: (p["w"] ** 2).sum())(jc.dequantize(params))
        >>> updates, state = tx.update(gradients, state)
        >>> jc.optim.apply_updates(params, updates, jax.random.key(1))["w"].shape
        (2, 4)
    """

    def leaf(key: Array | None, p: Any, u: Any) -> Any:
        if not base.holds_codes(p):
            return optax.apply_updates(p, u)
        return requantize(p, optax.apply_updates(dequantize(p), u), key)

    base.require_shapes("updates", updates, "params", params)
    packed_leaves = [p for p in jax.tree.leaves(params, is_leaf=base.holds_codes) if base.holds_codes(p)]
    start = base.first_state_key(key, *((p.stored if isinstance(p, StoredAs) else p).spec for p in packed_leaves))
    return base.map_with_keys(leaf, start, params, updates, is_leaf=base.holds_codes)[1]


class SkipState(NamedTuple):
    """State of `skip_nonfinite`: the state of the wrapped transformation, and an int32 count of skipped steps."""

    inner_state: Any
    skipped: Array


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips the steps of `inner` with a NaN or an infinity: parameters and the state of `inner` do not change.

    It checks the gradients, and the updates and the new state of `inner`. The square of a gradient of 1e20 overflows,
    though the gradient does not. `optax.apply_if_finite` checks only gradients, and stops skipping after some steps.
    This transformation always skips. Ranks that exchange numbers in `inner` skip a step together.

    Args:
        inner: any Optax transformation.

    Returns:
        An Optax transformation. Its state has `inner_state`, and `skipped`, the count of skipped steps.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx, params = jc.optim.skip_nonfinite(optax.adam(0.1)), jnp.ones(2)
        >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped), state.inner_state[0].mu.tolist()
        ([0.0, 0.0], 1, [0.0, 0.0])
    """
    inner = base.as_transformation(inner)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros([], jnp.int32))

    def update(updates: Any, state: SkipState, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        inner_updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        sound = all_finite((updates, inner_updates)) & stays_finite(inner_state, state.inner_state)
        sound = sound_on_all_ranks(sound, inner.update, updates, state.inner_state, params, **extra)
        new_state = SkipState(select_tree(sound, inner_state, state.inner_state), count_skips(state.skipped, sound))
        return zeros_unless(sound, inner_updates), new_state

    return base.make_transformation(init, update)


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
    """Divides gradients of a scaled loss before `inner`, by a scale that shrinks on overflow and grows otherwise.

    16-bit gradients are divided in float32, and `inner` gets them in float32. So the state of `inner` begins as for
    float32 parameters: its moments need 4 bytes for each number, or fewer with ``mu_dtype`` or `quantize_state`.

    Multiply the loss by ``loss_scale(state)`` before differentiating. If a gradient, an update or the new state is NaN
    or infinite, the step is skipped, as in `skip_nonfinite`. The scale is then divided by `factor`. After
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
        An Optax transformation. Its state has `inner_state`, `scale`, `steady` (sound steps in a row) and `skipped` (a
        count).

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
    base.check_count("growth_interval", growth_interval, 1)
    limits = {"smallest": smallest, "initial": initial, "largest": largest}
    for name, value in limits.items():
        # Normal numbers of float32: no device reads them as zero, and none becomes infinite.
        base.check_number(name, value, 2.0**-126, 2.0**127, "[]")
    if not has_tracer(limits) and not smallest <= initial <= largest:
        raise ValueError(f"initial={initial!r} must lie between smallest={smallest!r} and largest={largest!r}")
    base.check_number("factor", factor, 1 + 2.0**-24, 2.0**127, "(]")  # larger than 1 in float32
    inner = base.as_transformation(inner)

    def init(params: Any) -> LossScaleState:
        none = jnp.zeros([], jnp.int32)
        inner_state = inner.init(jax.tree.map(lambda p: base.in_sum_dtype(p) if base.is_float_leaf(p) else p, params))
        return LossScaleState(inner_state, jnp.asarray(initial, jnp.float32), none, none)

    def update(updates: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
        gradients = jax.tree.map(lambda g: g.astype(base.sum_dtype(g)) / state.scale, updates)
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

    return base.make_transformation(init, update)


def loss_scale(state: Any) -> Array:
    """Returns the present scale of `dynamic_loss_scale`, float32.

    Args:
        state: the state of `dynamic_loss_scale`, or of a transformation that contains it.

    Raises:
        ValueError: if `state` has no `dynamic_loss_scale`, or several.

    Example:
        >>> import jax.numpy as jnp, jchop as jc, optax
        >>> tx = jc.optim.dynamic_loss_scale(optax.sgd(0.1))
        >>> float(jc.optim.loss_scale(tx.init(jnp.ones(1))))
        32768.0
    """
    return base.only_state(state, LossScaleState, "dynamic_loss_scale").scale


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
    return [of_leaf(leaf) for leaf in jax.tree.leaves(tree) if base.is_float_leaf(leaf)]


def all_hold(conditions: Iterable[Array]) -> Array:
    """Whether all of some scalar conditions hold; a bool scalar.

    It is computed once. XLA would else compute it again for each array that is selected by it. For each leaf it would
    need as many conditions as a tree has leaves (`barriers_removed_before_fusion` in `_core/xla/cpu.py`).
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
    return all_hold(_is_leaf_as_finite(a, b) for a, b in pairs if base.is_float_leaf(a))


@always_jit
def _is_leaf_as_finite(new: Any, old: Any) -> Array:
    return jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))


def select_tree(condition: Array, new: Any, old: Any) -> Any:
    """The tree `new` if `condition` holds, else `old`, of the same structure."""
    return jax.tree.map(lambda a, b: _select_leaf(condition, a, b), new, old)


@always_jit
def _select_leaf(condition: Array, new: Any, old: Any) -> Array:
    """Floats of 8 bits are codes, and are selected as integers: `selected_float8_changes_nan` (`_core/xla/cpu.py`)."""
    if not (base.is_float_leaf(new) and new.dtype.itemsize == 1):
        return jnp.where(condition, new, old)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (new, old))
    return jax.lax.bitcast_convert_type(jnp.where(condition, *bits), new.dtype)


def zeros_unless(condition: Array, updates: Any) -> Any:
    """Updates if `condition` holds; else zeros, which do not change parameters."""
    return jax.tree.map(lambda u: _leaf_or_zeros(condition, u), updates)


@always_jit
def _leaf_or_zeros(condition: Array, update: Any) -> Array:
    return _select_leaf(condition, update, jnp.zeros_like(update))
