"""The steps of a calibration, as values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jchop._checks import check_choice, check_int
from jchop.ptq._maps.steps import Mapping

__all__ = ["Correction", "Steps", "Sweep", "as_steps", "correct_error", "gptq"]


@dataclass(frozen=True)
class Sweep:
    """GPTQ; `gptq` makes it."""

    order: str
    damping: float
    block: int

    def __str__(self) -> str:
        return f"gptq(order={self.order!r}, damping={self.damping:g}, block={self.block})"


@dataclass(frozen=True)
class Correction:
    """A correction of weights before they are rounded; `correct_error` makes it."""

    strength: float
    damping: float

    def __str__(self) -> str:
        return f"correct_error({self.strength:g}, damping={self.damping:g})"


@dataclass(frozen=True)
class Steps:
    """What is done to each weight: at most one step of each kind, None for one that is not taken; mappings before."""

    mappings: tuple[Mapping, ...] = ()
    correction: Correction | None = None
    sweep: Sweep | None = None


def gptq(order: Literal["activation", "plain"] = "activation", *, damping: float = 0.01, block: int = 128) -> Sweep:
    """GPTQ: the columns of a weight are rounded one after the other, and the error of each is taken off the others.

    The scales of all groups are chosen before, from the weight itself, by the rule of its format, and each element is
    rounded as the format says. So every format, grouping and rounding mode works alike, and the order of columns is
    independent of the groups. A column whose input was always zero is rounded as it is.

    Args:
        order: ``"activation"``: columns with larger inputs first. ``"plain"``: as they lie.
        damping: what is added to the diagonal of H, the mean of x x^T, over the mean of that diagonal; at least 0. If H
            cannot be factorized, it is made four times larger until that succeeds; the report has the last one.
            Default 0.01.
        block: how many columns are brought up to date at once. It changes the order of sums alone. Default 128.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022;
    the order by activation, with groups that stay where they are, is that of its authors' code.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.gptq("plain"))
        "gptq(order='plain', damping=0.01, block=128)"
    """
    check_choice("order", order, ("activation", "plain"))
    return Sweep(order, _number("damping", damping), check_int("block", block, 1))


def correct_error(strength: float = 0.5, *, damping: float = 0.01) -> Correction:
    """Before a weight is rounded, it is moved so that its product makes up for errors of the layers before it.

    With x the inputs in full precision and y those of the rounded model, W becomes W + strength W E[(x - y) y^T]
    (E[y y^T] + d I)^-1; with strength 1 and no damping that is the least squares solution of W x = W' y. Both
    trajectories run through the program side by side, layer after layer.

    Args:
        strength: from 0 to 1. Default 0.5.
        damping: d over the mean of the diagonal; above 0. Default 0.01.

    Raises:
        TypeError, ValueError: for an argument out of range.

    Source: Arai and Ichikawa, "Quantization Error Propagation", arXiv 2504.09629, 2025.

    Example:
        >>> import jchop as jc
        >>> str(jc.ptq.correct_error(1.0))
        'correct_error(1, damping=0.01)'
    """
    number = _number("strength", strength)
    if number > 1:
        raise ValueError(f"strength={strength!r} must be a number from 0 to 1")
    if _number("damping", damping) == 0:
        raise ValueError(f"damping={damping!r} must be above 0")
    return Correction(number, float(damping))


def _number(name: str, value: Any) -> float:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a finite number, 0 or above")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number, 0 or above")
    return float(value)


def as_steps(steps: Any) -> Steps:
    """A list of steps, checked.

    Raises:
        TypeError: for what is no step.
        ValueError: for two steps of one kind, a correction after the rounding, or a mapping after either.
    """
    kinds = Correction | Sweep | Mapping
    given = [steps] if isinstance(steps, kinds) else list(steps) if isinstance(steps, Iterable) else None
    wrong = [step for step in given or () if not isinstance(step, kinds)]
    if given is None or wrong:
        raise TypeError(f"steps={steps!r} must be a list of steps, such as [jc.ptq.correct_error(), jc.ptq.gptq()]")
    mappings = tuple(step for step in given if isinstance(step, Mapping))
    rest = given[len(mappings) :]
    if given[: len(mappings)] != [*mappings]:
        raise ValueError(f"steps=[{', '.join(map(str, given))}] must have smooth and awq before the others")
    types = [type(step) for step in rest]
    if len(set(types)) < len(types) or types == [Sweep, Correction]:
        raise ValueError(f"steps=[{', '.join(map(str, given))}] may have one correct_error, and then one gptq")
    found: dict[str, Any] = {"correction" if isinstance(step, Correction) else "sweep": step for step in rest}
    return Steps(mappings=mappings, **found)
