"""Where the scale of an operand comes from: state of a model in place of each array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jchop._common.checks import check, check_bool, check_choice, check_float, check_instance, check_int
from jchop._spec.spec import Gradient, Spec
from jchop.formats import FloatFormat, ScaledFormat


@dataclass(frozen=True)
class MovingAverage:
    """Scales of activations from a moving average of their ranges (EMA), which is state of the model.

    In training mode each call moves the range, ``r <- decay r + (1 - decay) (min, max)``, and rounds under the moved
    one. The first range is the range of the first array. After ``model.eval()`` the range and the scales stay, as the
    averages of a batch norm do.

    Args:
        decay: the share of the range that stays, from 0 to 1, 1 excluded. Default 0.99.

    Source: Jacob et al., "Quantization and training of neural networks", 2018, section 3.1.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(activation="int8", scale_from=jc.MovingAverage(0.5))
        >>> layer = jc.nn.Linear(2, 2, rule=rule, rngs=nnx.Rngs(0))
        >>> for x in (jnp.array([[1.0, -1.0]]), jnp.array([[3.0, -1.0]])):
        ...     _ = layer(x)
        >>> layer.dot_general.left.range[...].tolist()
        [-1.0, 2.0]
    """

    decay: float = 0.99
    fields: ClassVar[tuple[str, ...]] = ("activation",)

    def __post_init__(self) -> None:
        check_float("decay", self.decay, 0, 1, "[)")


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the largest magnitudes of earlier steps (delayed scaling), which are state of the model.

    An activation or a weight is rounded under the scale of its history. Then its own largest magnitude becomes part of
    the history. So a scale is known before the array is. Numbers larger than any of the history overflow, as the format
    says. Before there is a history the array's own magnitude counts. After ``model.eval()`` the history stays. A
    gradient has no history, because the backward pass returns nothing but gradients. Its scale comes from the gradient
    itself.

    Args:
        length: the number of steps in the history, at least 1. Default 1024, as in NVIDIA's Transformer Engine.
        take: the magnitude of the history that counts: ``"max"``, the largest (default), or ``"last"``, the most
            recent.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022; NVIDIA's Transformer Engine, ``DelayedScaling``.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(activation="float8_e4m3fn(group=tensor)", scale_from=jc.DelayedScaling(3))
        >>> layer = jc.nn.Linear(2, 2, rule=rule, rngs=nnx.Rngs(0))
        >>> for x in (jnp.array([[1.0, -4.0]]), jnp.array([[2.0, 0.5]])):
        ...     _ = layer(x)
        >>> layer.dot_general.left.history[...].tolist()
        [2.0, 4.0, 0.0]
    """

    length: int = 1024
    take: Literal["max", "last"] = "max"
    fields: ClassVar[tuple[str, ...]] = ("activation", "weight")

    def __post_init__(self) -> None:
        check_int("length", self.length, 1)
        check_choice("take", self.take, ("max", "last"))


@dataclass(frozen=True)
class LSQ:
    """Scales that are parameters, trained with the others (LSQ).

    A weight's scales start as the format's rule gives them. An activation has one scale for the whole array, which
    `calibrate` finds. Each is a `LearnedScale`. Let v be the number, s its scale, x = s e the rounded number and [m, M]
    the range of elements. The gradient of x follows the paper. In s it is e - v/s where m < v/s < M, else e (which then
    is m or M). In v it is 1 where m < v/s < M, else 0.

    Args:
        factor: whether the gradient of a scale is multiplied by 1/sqrt(n M), with n the count of numbers that share it.
            For an activation n counts the numbers of one example (its first axis counts examples). Default True.

    Source: Esser et al., "Learned step size quantization", ICLR 2020.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(weight="int4(group=4)", scale_from=jc.LSQ())
        >>> layer = jc.nn.Linear(8, 3, rule=rule, rngs=nnx.Rngs(0))
        >>> layer.dot_general.right.scale[...].shape
        (3, 2)
    """

    factor: bool = True
    fields: ClassVar[tuple[str, ...]] = ("weight", "activation")

    def __post_init__(self) -> None:
        check_bool("factor", self.factor)


ScaleFrom = MovingAverage | DelayedScaling | LSQ


def has_tensor_scale(spec: Spec | None) -> bool:
    """Whether a spec has one scale of one part for a whole array."""
    fmt = None if spec is None else spec.format
    return isinstance(fmt, ScaledFormat) and fmt.group is None and fmt.channel is None and len(fmt.scale_parts) == 1


def check_scale_from(source: Any, specs: Mapping[str, Spec | None]) -> None:
    """Refuse an object that is no source of scales, or cannot be one for the specs of a rule.

    Raises:
        TypeError, ValueError: that says why.
    """
    check_instance("scale_from", source, ScaleFrom, "a jchop.MovingAverage, DelayedScaling or LSQ")
    operand_specs = {name: spec for name in source.fields if (spec := specs[name]) is not None}
    if not operand_specs:
        raise ValueError(f"scale_from={source!r} has no effect without {' or '.join(source.fields)}")
    for name in ("input_gradient", "weight_gradient"):
        if specs[name] is not None:
            raise ValueError(
                f"scale_from={source!r} with {name}={str(specs[name])!r}: operands under such a scale are rounded "
                "once, for all three products"
            )
    for name, spec in operand_specs.items():
        requirement = _spec_requirement(source, name, spec)
        check(not requirement, f"{name}={str(spec)!r} with scale_from={source!r} must {requirement}")


def _spec_requirement(source: ScaleFrom, name: str, spec: Spec) -> str | None:
    """What a spec would have to do for a source of scales, as the end of a sentence with must; None if it does."""
    if spec.gradient != Gradient():
        return "have no gradient of its own: it passes straight through"
    if spec.scaled is not None and spec.scaled.sparse is not None:
        return "keep all numbers: leave sparse out"
    if isinstance(source, LSQ) and name == "weight":
        fmt = spec.scaled
        numbers = fmt is not None and isinstance(fmt.scale, FloatFormat) and fmt.scale.bits >= 16
        if fmt is None or not numbers or len(fmt.scale_parts) != 1 or fmt.zero_point:
            return "be a scaled format with one scale for a group, kept in 16 bits or more, and no zero point"
        return None
    if not has_tensor_scale(spec):
        return "have one scale for the whole array, as 'int8'"
    assert spec.scaled is not None
    if isinstance(source, DelayedScaling | LSQ) and spec.scaled.zero_point:
        return "have no zero point: there is one number for both signs"
    return None
