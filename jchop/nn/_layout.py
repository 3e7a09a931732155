"""How an array is laid out for a product, so that a scaled format has its groups along the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jchop._round import round_to_format
from jchop.formats import ScaledFormat
from jchop.scaling import RULES
from jchop.spec import Spec

Array = jax.Array

__all__ = ["Layout", "round_in"]


@dataclass(frozen=True)
class Layout:
    """The axes of an operand: those that are kept, in order, then those that are summed over, as one.

    Args:
        kept: axes that stay axes.
        summed: axes that become the last one, in C order.
    """

    kept: tuple[int, ...]
    summed: tuple[int, ...]

    @staticmethod
    def of(kept: Sequence[int], summed: Sequence[int]) -> Layout:
        """A layout of any sequences of axes."""
        return Layout(tuple(kept), tuple(summed))

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.kept, *self.summed)

    def lay(self, x: Array) -> Array:
        """`x` in this layout."""
        moved = x.transpose(self._order)
        return moved.reshape(*moved.shape[: len(self.kept)], math.prod(moved.shape[len(self.kept) :]))

    def back(self, laid: Array, shape: Sequence[int]) -> Array:
        """An array of `shape` from its layout."""
        order = self._order
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return laid.reshape([shape[axis] for axis in order]).transpose(inverse)

    def concerns(self, spec: Spec) -> bool:
        """Whether rounding to `spec` in this layout may differ from rounding the array as it lies."""
        fmt = spec.format
        grouped = isinstance(fmt, ScaledFormat) and (fmt.group is not None or fmt.channel is not None)
        return grouped and (self._order != tuple(range(len(self._order))) or len(self.summed) != 1)

    def as_it_lies(self, spec: Spec) -> Spec | None:
        """A spec that gives an array as it lies what `spec` gives it in this layout; None where there is none.

        Groups of whole axes have no order of their own, so nothing need be moved; but drawn bits depend on the layout,
        and so do sums over a group, where a rule takes some, and groups of scales.
        """
        fmt, behind = spec.format, spec.gradient.round
        if not isinstance(fmt, ScaledFormat) or fmt.rule not in RULES or isinstance(fmt.scale, ScaledFormat):
            return None
        placed = behind is not None and (behind.rounding.stochastic or behind.scaled is not None)
        if spec.rounding.stochastic or placed:
            return None
        last = len(self.kept)
        if fmt.channel is not None:
            named = fmt.channel if isinstance(fmt.channel, tuple) else (fmt.channel,)
            apart = {axis % (last + 1) for axis in named}
        elif fmt.group == "all" and fmt.axis in (-1, last):
            apart = set(range(last))
        else:
            return None
        axes = [a for i in sorted(apart) for a in ((self.kept[i],) if i < last else self.summed)]
        return replace(spec, format=fmt(channel=tuple(axes)) if axes else fmt(group=None))


def round_in(
    layout: Layout | None, x: Array, spec: Spec | None, key: Array | None = None, gradient_key: Array | None = None
) -> Array:
    """`x` rounded in a layout (None: as it lies); its own dtype, shape and order of axes come back."""
    if spec is None:
        return x
    if layout is None or not layout.concerns(spec):
        return round_to_format(x, spec, key, gradient_key=gradient_key)
    if (same := layout.as_it_lies(spec)) is not None:
        return round_to_format(jnp.asarray(x), same, key, gradient_key=gradient_key)
    return layout.back(round_to_format(layout.lay(jnp.asarray(x)), spec, key, gradient_key=gradient_key), x.shape)
