"""Scales that are state or parameters: the modules that round an operand of a product under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jchop._products.layout import Layout, with_nan
from jchop._products.scale_from import LSQ, DelayedScaling, MovingAverage, ScaleFrom
from jchop.nn._scale_state.learned import round_learned
from jchop.nn._scale_state.static import ActivationRange, round_within
from jchop.spec import Spec
from jchop.storage import fit_scale

Array = jax.Array

__all__ = [
    "AmaxHistory",
    "LearnedScale",
    "LearnedStep",
    "MovingRange",
    "PastMagnitudes",
    "Source",
    "moved",
    "remembered",
    "round_stepwise",
    "source_of",
    "span_of",
    "step_of",
]


class AmaxHistory(nnx.Variable):
    """The largest magnitudes of an operand in earlier steps, the most recent first; zeros for missing steps.

    It is ordinary state of the model, as the averages of a batch norm.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> layer = jc.nn.Linear(2, 2, rule=jc.nn.recipe("float8_delayed"), rngs=nnx.Rngs(0))
        >>> _ = layer(jnp.array([[0.5, -2.0]]))
        >>> layer.dot_general.left.history[...].shape, float(layer.dot_general.left.history[...].max())
        ((1024,), 2.0)
    """


class LearnedScale(nnx.Param):
    """A scale that is trained, in the form of `jchop.fit_scale`; it has to stay above zero.

    Filters tell it from other parameters, for example to give it a learning rate of its own.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> rule = jc.nn.Rule(weight="int8(group=all)", scale_from=jc.nn.LSQ())
        >>> layer = jc.nn.Linear(4, 3, rule=rule, rngs=nnx.Rngs(0))
        >>> [path for path, _ in nnx.to_flat_state(nnx.state(layer, jc.nn.LearnedScale))]
        [('dot_general', 'right', 'scale')]
    """


class Source(nnx.Module):
    """Rounds one operand under scales of its own; `start` begins with the range that `calibrate` found."""

    how: Any  # the value of the rule that it was made for

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        """Its variable, and the required shape; None if it is checked elsewhere."""
        raise NotImplementedError

    def start(self, span: Array, spec: Spec) -> None:
        raise NotImplementedError

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        raise NotImplementedError


class _Following(Source):
    """State that follows the data in training mode, and stays in evaluation mode."""

    def __init__(self) -> None:
        self.use_running_average = False

    def set_view(self, use_running_average: bool | None = None) -> None:
        """The hook of `flax.nnx.view`."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


class MovingRange(_Following):
    """A range that moves with those of the arrays; NaN before the first."""

    def __init__(self, how: MovingAverage, stack: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.range = ActivationRange(jnp.full((*stack, 2), jnp.nan))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        return self.range, (2,)

    def start(self, span: Array, spec: Spec) -> None:
        self.range[...] = span.astype(jnp.float32)

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        span = moved(self.how, self.range[...], x, self.use_running_average)
        if not self.use_running_average:
            self.range[...] = span
        return round_within(x, spec, span, key)


class PastMagnitudes(_Following):
    """The largest magnitudes of earlier steps."""

    def __init__(self, how: DelayedScaling, stack: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.history = AmaxHistory(jnp.zeros((*stack, how.length)))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        return self.history, (self.how.length,)

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        span, history = remembered(self.how, self.history[...], x)
        if not self.use_running_average:
            self.history[...] = history
        return round_within(x, spec, span, key)


class LearnedStep(Source):
    """A scale that is a parameter.

    Args:
        how: with the factor of its gradient or without.
        stack: how many layers it is of, as axes in front.
        layout: of a kernel; None of an activation, which has one scale, and none before `start`.
        scale: of a kernel.
    """

    def __init__(
        self, how: LSQ, stack: tuple[int, ...], layout: Layout | None = None, scale: Array | None = None
    ) -> None:
        self.how, self.layout = how, layout
        self.scale: LearnedScale | None = nnx.data(None if scale is None else LearnedScale(scale))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        return (self.scale if self.layout is None else None), ()  # those of a kernel are for `quantize` to see

    def start(self, span: Array, spec: Spec) -> None:
        self.scale = nnx.data(LearnedScale(step_of(span, spec)))

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        if self.scale is None:
            raise ValueError(
                f"activation={str(spec)!r} with scale_from={self.how!r} has no scale yet: run jchop.nn.calibrate, "
                "which gives it the one to start from"
            )
        return round_stepwise(self.how, self.layout, x, spec, self.scale[...], key)


_MODULES: Mapping[type, Callable[[Any, tuple[int, ...]], Source]] = MappingProxyType(
    {MovingAverage: MovingRange, DelayedScaling: PastMagnitudes, LSQ: LearnedStep}
)


def source_of(how: ScaleFrom, name: str, spec: Spec | None, stack: tuple[int, ...]) -> Source | None:
    """A new module for one operand, ``"activation"`` or ``"weight"``; None if its scales are those of each array."""
    return None if spec is None or name not in how.fields else _MODULES[type(how)](how, stack)


# -- the formulas of each kind, independent of the storage of its state ------------------------------------------------


def moved(how: MovingAverage, known: Array, x: Array, fixed: bool) -> Array:
    """The range for the rounding of `x`: the known one, updated unless it is fixed; that of `x` if there is none."""
    found = span_of(x)
    span = known if fixed else how.decay * known + (1 - how.decay) * found
    return jnp.where(jnp.isnan(known), found, span)


def remembered(how: DelayedScaling, history: Array, x: Array) -> tuple[Array, Array]:
    """The range that `x` is rounded under, and the history with it."""
    now = jnp.max(jnp.abs(_numbers(x)))
    past = history[0] if how.take == "last" else history.max()
    most = jnp.where(past > 0, past, now)
    return jnp.stack([-most, most]), jnp.concatenate([now[None], history[:-1]])


def round_stepwise(how: LSQ, layout: Layout | None, x: Array, spec: Spec, scale: Array, key: Array | None) -> Array:
    """`x` rounded under a learned scale: of a kernel in its layout, or (None) of an activation, which has one scale."""
    if layout is None:
        laid, scale = x, scale.reshape((1,) * x.ndim)
        sharing = x.size // x.shape[0] if x.ndim > 1 else x.size
    else:
        laid = layout.lay(x)
        sharing = laid.size // scale.size
    y = round_learned(laid, spec, scale, key, sharing=sharing if how.factor else None)
    return with_nan(x, y if layout is None else layout.back(y, x.shape), spec)


def step_of(span: Array, spec: Spec) -> Array:
    """The scale that an activation of this range starts with."""
    return fit_scale(span.astype(jnp.float32), spec)[0].reshape(())


def span_of(x: Array) -> Array:
    """The least and the largest number of an array."""
    numbers = _numbers(x)
    return jnp.stack([numbers.min(), numbers.max()])


def _numbers(x: Array) -> Array:
    """The finite numbers of an array, which alone count for a scale."""
    x = lax.stop_gradient(x).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), x, 0)
