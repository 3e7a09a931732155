"""Scales that are state or parameters: the modules that round an operand of a product under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.scale_from import LSQ, DelayedScaling, MovingAverage, ScaleFrom
from jchop._quantized.program.scale_slots import HISTORY, RANGE, Scales, state_kind
from jchop._quantized.scales.formulas import (
    initial_scale,
    round_in_range,
    round_lsq_operand,
    update_history,
    update_range,
)
from jchop._spec.spec import Spec

Array = jax.Array


class ActivationRange(nnx.Variable):
    """The range (least, largest) of a layer's input that its scale is made for, as `calibrate` found it.

    It is ordinary state of the model, saved and restored with it, and may be set by hand.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(activation="int8")
        >>> layer = jc.nn.Linear(2, 2, rule=rule, rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])])
        >>> static.dot_general.range[...].tolist()
        [-3.0, 2.0]
    """


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
        >>> rule = jc.Rule(weight="int8(group=all)", scale_from=jc.LSQ())
        >>> layer = jc.nn.Linear(4, 3, rule=rule, rngs=nnx.Rngs(0))
        >>> [path for path, _ in nnx.to_flat_state(nnx.state(layer, jc.nn.LearnedScale))]
        [('dot_general', 'right', 'scale')]
    """


class ScaleSource(nnx.Module):
    """Rounds one operand under scales of its own; `start` begins with the range that `calibrate` found."""

    how: Any  # the value of the rule that it was made for

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        """The variable, if the layer has one, and the shape of its array."""
        """Its variable, and the required shape; None if it is checked elsewhere."""
        raise NotImplementedError

    def start(self, span: Array, spec: Spec) -> None:
        """Set the state from the least and the largest number of an array."""
        raise NotImplementedError

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        """`x` rounded under the scale of the state, which follows `x` in training."""
        raise NotImplementedError


class _RunningState(ScaleSource):
    """State that follows the data in training mode, and stays in evaluation mode."""

    def __init__(self) -> None:
        self.use_running_average = False

    def set_view(self, use_running_average: bool | None = None) -> None:
        """The hook of `flax.nnx.view`."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


class ProgramScales(_RunningState):
    """The kept scales of a model whose program is quantized.

    Args:
        scales: as `jchop.quantize_fn` has them.
    """

    observer: Any = None  # what `calibrate` has seen, while it runs the model

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self.learned: dict[str, LearnedScale] = nnx.data({name: LearnedScale(v) for name, v in scales.learned.items()})
        self.stats: dict[str, nnx.Variable] = nnx.data(
            {name: _STATISTIC_VARIABLES[state_kind(name)](v) for name, v in scales.stats.items()}
        )

    @property
    def scales(self) -> Scales:
        """As arrays."""
        return Scales(
            *({name: v.get_value() for name, v in variables.items()} for variables in (self.learned, self.stats))
        )

    def take(self, stats: Mapping[str, Array]) -> None:
        """The ranges and histories after a call."""
        for name, value in stats.items():
            self.stats[name][...] = value


class MovingRange(_RunningState):
    """A range that moves with those of the arrays; NaN before the first."""

    def __init__(self, how: MovingAverage, stack: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.range = ActivationRange(jnp.full((*stack, 2), jnp.nan))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        """The variable, if the layer has one, and the shape of its array."""
        return self.range, (2,)

    def start(self, span: Array, spec: Spec) -> None:
        """Set the state from the least and the largest number of an array."""
        self.range[...] = span.astype(jnp.float32)

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        """`x` rounded under the scale of the state, which follows `x` in training."""
        span = update_range(self.how, self.range[...], x, self.use_running_average)
        if not self.use_running_average:
            self.range[...] = span
        return round_in_range(x, spec, span, key)


class PastMagnitudes(_RunningState):
    """The largest magnitudes of earlier steps."""

    def __init__(self, how: DelayedScaling, stack: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.history = AmaxHistory(jnp.zeros((*stack, how.length)))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        """The variable, if the layer has one, and the shape of its array."""
        return self.history, (self.how.length,)

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        """`x` rounded under the scale of the state, which follows `x` in training."""
        span, history = update_history(self.how, self.history[...], x)
        if not self.use_running_average:
            self.history[...] = history
        return round_in_range(x, spec, span, key)


class LearnedStep(ScaleSource):
    """A scale that is a parameter.

    Args:
        how: with the factor of its gradient or without.
        stack: how many layers it is of, as axes in front.
        layout: of a kernel; None of an activation, which has one scale, and none before `start`.
        scale: of a kernel.
    """

    def __init__(
        self, how: LSQ, stack: tuple[int, ...], layout: OperandLayout | None = None, scale: Array | None = None
    ) -> None:
        self.how, self.layout = how, layout
        self.scale: LearnedScale | None = nnx.data(None if scale is None else LearnedScale(scale))

    def state(self) -> tuple[nnx.Variable | None, tuple[int, ...]]:
        """The variable, if the layer has one, and the shape of its array."""
        return (self.scale if self.layout is None else None), ()  # those of a kernel are for `quantize` to see

    def start(self, span: Array, spec: Spec) -> None:
        """Set the state from the least and the largest number of an array."""
        self.scale = nnx.data(LearnedScale(initial_scale(span, spec)))

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        """`x` rounded under the scale of the state, which follows `x` in training."""
        if self.scale is None:
            raise ValueError(
                f"activation={str(spec)!r} with scale_from={self.how!r} has no scale yet: run jchop.nn.calibrate, "
                "which gives it the one to start from"
            )
        return round_lsq_operand(self.how, self.layout, x, spec, self.scale[...], key)


_STATISTIC_VARIABLES: Mapping[str, type[nnx.Variable]] = MappingProxyType(
    {RANGE: ActivationRange, HISTORY: AmaxHistory}
)
_SCALE_SOURCES: Mapping[type, Callable[[Any, tuple[int, ...]], ScaleSource]] = MappingProxyType(
    {MovingAverage: MovingRange, DelayedScaling: PastMagnitudes, LSQ: LearnedStep}
)


def new_scale_source(how: ScaleFrom, name: str, spec: Spec | None, stack: tuple[int, ...]) -> ScaleSource | None:
    """A new module for one operand, ``"activation"`` or ``"weight"``; None if its scales are those of each array."""
    return None if spec is None or name not in how.fields else _SCALE_SOURCES[type(how)](how, stack)
