"""Scales that double at the levels of groups within groups, as those of HiF4.

A scale s of the largest groups is stored in its own format. Each group within doubles its scale, if its largest number
asks for it, and so does each group within that. The doublings are scales that are quantized again to the levels 1 and
2, so that their codes have one bit, and the storage is that of any such format.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp

from jchop._core.scaled.groups import Groups
from jchop._core.scaled.scales import BlockScales as Chosen
from jchop._core.scaled.scales import ScaledPlan, round_scales, scale_magnitude

Array = jax.Array


def fit_levels(largest: Array, plan: ScaledPlan) -> Array:
    """Magnitude bits of the scales of the smallest groups.

    With a the largest magnitude of a largest group, M the largest element and n levels, s is a / (2^n M) in the format
    of the scales. From the outermost level inward, the scale c of a group becomes 2 c if the group's largest number is
    at least 2^k c, with k the number of levels from this one on; so 2^k c is beyond all numbers under the scale c.

    Args:
        largest: magnitude bits of the largest numbers of the smallest groups, in the shape of the stored scales.
        plan: a plan whose scales are quantized again, once for each level.
    """
    compute, levels, within = plan.compute, [], plan
    while within.of_scales is not None:
        within = within.of_scales
        groups = Groups(largest.shape, within.fmt.group_shape(largest.shape))
        levels.append((largest, groups))
        view = groups.view(largest)
        largest = groups.squeeze(jnp.max(view, axis=groups.axes, keepdims=True))
    divisor = Fraction(plan.element.format.max) * (1 << len(levels))
    base = replace(within, carrier=compute)
    scale = scale_magnitude(Chosen(round_scales((largest,), None, base, (divisor,))[0]), base)
    for remaining, (inner, groups) in reversed(list(enumerate(levels, 1))):
        view = groups.view(inner)
        outer = jnp.broadcast_to(groups.expand(scale), view.shape)
        doubles = view >= outer + (remaining << compute.fraction)
        scale = groups.back(outer + (doubles.astype(outer.dtype) << compute.fraction))
    return scale
