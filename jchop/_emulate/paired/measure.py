"""Measures of the results of operations: counts, ranges, errors, cancelled bits, and first events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from jchop._emulate.rules.rules import EVENTS, finite_range_of
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, UniformFormat


@dataclass(frozen=True)
class Event:
    """The place of the first event of a kind.

    Args:
        turn: the turns of the enclosing loops, from 0, the outermost first; empty outside of loops.
        where: the index in the result; empty for a scalar.
        order: the number of earlier operations.
    """

    turn: tuple[int, ...]
    where: tuple[int, ...]
    order: int

    def __str__(self) -> str:
        turn = f"turn {'.'.join(map(str, self.turn))}" if self.turn else ""
        where = str(list(self.where)) if self.where else ""
        return ", ".join(filter(None, (turn, where))) or "scalar"


@dataclass
class Measure:
    """Counts, ranges and errors of some results."""

    overflows: int = 0
    underflows: int = 0
    infinities: int = 0
    nans: int = 0
    invalid: int = 0
    new_nonfinite: int = 0  # infinities and NaN of finite operands, without regard to constants
    digit_loss: float = 0.0  # cancelled bits of all sums
    sums: int = 0
    cancelled: float = -math.inf
    smallest: float = math.inf
    largest: float = -math.inf
    error: float = -math.inf
    deviation: float = -math.inf
    exponents: Counter[int] = field(default_factory=Counter)  # this and the next: of `EmulatedFunction.ranges` alone
    numbers: int = 0
    zeros: int = 0
    subnormals: int = 0
    first_overflow: Event | None = None
    first_nan: Event | None = None
    first_invalid: Event | None = None

    def facts(self) -> dict[str, Any]:
        """The fields of a row; NaN if there is no number."""
        inner = ("new_nonfinite", "digit_loss", "sums", "exponents", "numbers", "zeros", "subnormals")
        rest = ((name, v) for name, v in vars(self).items() if name not in inner)
        numbers = {name: math.nan if isinstance(v, float) and not math.isfinite(v) else v for name, v in rest}
        return numbers | {"cancelled_mean": self.digit_loss / self.sums if self.sums else math.nan}

    def add(self, other: Measure | None) -> None:
        """Adds another measure."""
        if other is None:
            return
        for name in (f.name for f in fields(self)):
            one, two = getattr(self, name), getattr(other, name)
            if name.startswith("first_"):
                new = min(filter(None, (one, two)), key=lambda event: event.order, default=None)
            elif name in _MAXIMUM_FIELDS:
                new = max(one, two)
            else:
                new = min(one, two) if name == "smallest" else one + two
            setattr(self, name, new)

    def events(self) -> Iterator[tuple[str, Event]]:
        """The names in `EVENTS` of the events that happened, each with its place."""
        for name in EVENTS:
            event = getattr(self, f"first_{name}")
            if event is not None:
                yield name, event


_MAXIMUM_FIELDS = ("largest", "error", "deviation", "cancelled")


def measure_results(
    low: Any,
    same: Any,
    reference: Any,
    operands: Sequence[Any],
    from_program: Sequence[bool] | None = None,
    *,
    turn: tuple[int, ...] = (),
    order: int = 0,
    elementwise: bool = False,
    digits: int | None = None,
    spec: Spec | None = None,
) -> Measure:
    """The measure of results.

    Args:
        low: the emulated results.
        same: the results without rounding, for the same operands.
        reference: the results of the reference program.
        operands: the operands that are numbers.
        from_program: whether each operand is a result; infinities and NaN of constants count as new. None: all are.
        turn: the turns of the enclosing loops.
        order: the number of earlier operations.
        elementwise: whether each result depends only on the operands at the same index.
        digits: the precision of the operands of a sum or difference; None for other operations.
        spec: the rounding of the results; None for none.
    """
    low, same, reference = (as_double_precision(x) for x in (low, same, reference))
    operands = [as_double_precision(x) for x in operands]
    magnitude = np.abs(low[np.isfinite(low) & (low != 0)])
    nan, infinite = np.isnan(low), np.isinf(low)
    overflow = np.isfinite(same) & (~np.isfinite(low) | _beyond_format(same, spec))
    invalid = _without_operand_cause(nan, [np.isnan(x) for x in operands], elementwise)
    sources = operands if from_program is None else [x for x, flag in zip(operands, from_program, strict=True) if flag]
    new_nonfinite = _without_operand_cause(infinite | nan, [~np.isfinite(x) for x in sources], elementwise)
    losses = _cancellation_bits(low, operands, digits) if digits is not None else np.zeros(0)
    events = {"overflow": overflow, "nan": nan, "invalid": invalid}
    firsts: dict[str, Any] = {
        f"first_{name}": Event(turn, tuple(map(int, np.argwhere(mask)[0])), order) if mask.any() else None
        for name, mask in events.items()
    }
    return Measure(
        overflows=int(overflow.sum()),
        underflows=int(np.sum((low == 0) & (same != 0))),
        infinities=int(infinite.sum()),
        nans=int(nan.sum()),
        invalid=int(invalid.sum()),
        new_nonfinite=int(new_nonfinite.sum()),
        digit_loss=float(losses.sum()),
        sums=losses.size,
        cancelled=float(losses.max(initial=-math.inf)),
        smallest=float(magnitude.min(initial=math.inf)),
        largest=float(magnitude.max(initial=-math.inf)),
        error=_largest_relative_error(low, same),
        deviation=_largest_relative_error(low, reference),
        **firsts,
    )


def as_double_precision(x: Any) -> np.ndarray:
    """Numbers in float64 or complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _beyond_format(exact: np.ndarray, spec: Spec | None) -> Any:
    """Whether numbers lie beyond the ends of the format by more than half its step there: they saturate or wrap.

    The step of a tapered format or a codebook counts as zero.
    """
    if spec is None:
        return False
    if np.iscomplexobj(exact):
        return _beyond_format(np.real(exact), spec) | _beyond_format(np.imag(exact), spec)
    fmt, half = spec.format, 0.0
    if isinstance(fmt, FloatFormat):
        half = math.ldexp(1.0, fmt.emax - fmt.frac_bits - 1)
    elif isinstance(fmt, UniformFormat):
        half = math.ldexp(1.0, -fmt.frac_bits - 1)
    low, high = finite_range_of(fmt)
    below = 0.0 if isinstance(fmt, FloatFormat) and not fmt.signed else half
    return (exact > high + half) | (exact < low - below)


def _without_operand_cause(mask: np.ndarray, operand_masks: Sequence[np.ndarray], elementwise: bool) -> np.ndarray:
    """The found results for which no operand has such a value: at the same index, or anywhere."""
    for has in operand_masks:
        if elementwise and has.shape in (mask.shape, ()):
            mask = mask & ~has
        elif has.any():
            return np.zeros_like(mask)
    return mask


def _cancellation_bits(low: np.ndarray, operands: Sequence[np.ndarray], digits: int) -> np.ndarray:
    """The number of cancelled leading bits: the larger operand's exponent minus the exponent of the result.

    A sum of zero has lost every digit.
    """
    a, b, result = (np.broadcast_to(x, low.shape) for x in (*operands, low))
    use = np.isfinite(a) & np.isfinite(b) & np.isfinite(result) & ((a != 0) | (b != 0))
    largest, result = np.maximum(np.abs(a[use]), np.abs(b[use])), np.abs(result[use])
    drop = np.where(result == 0, digits, np.frexp(largest)[1] - np.frexp(result)[1])
    return np.maximum(drop, 0).astype(np.float64)


def _largest_relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest |got - want| / |want| of finite numbers; two zeros give 0, a single zero in want is skipped."""
    use = np.isfinite(got) & np.isfinite(want) & ((want != 0) | (got == 0))
    got, want = got[use], want[use]
    return float(np.max(np.abs(got - want) / np.where(want == 0, 1, np.abs(want)), initial=-math.inf))
