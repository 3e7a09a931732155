"""The parameters of a program that may have adapters, and why others may not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jchop._program.step import ProgramPlan
from jchop._quantized.products.product import DotProduct
from jchop._quantized.program.matrix_layout import MatrixLayout, MatrixView
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.provenance import AxisFactors
from jchop._quantized.program.weight_layout import stack_ndim


def lora_layouts(plan: ProgramPlan, shapes: Sequence[tuple[int, ...]]) -> dict[int, MatrixLayout | str]:
    """The parameters that reach a product: each as a matrix, if all that takes it are `rounded_dot_general` alike.

    Args:
        plan: the program.
        shapes: of the parameters.

    Returns:
        By the number of the parameter its layout, or the reason why it can have no adapter.
    """
    layouts: dict[int, MatrixLayout | str] = {}
    products: set[int] = set()
    for step, side, use in _uses_by_step(plan):
        before, new = layouts.get(use.leaf), _lora_layout(step, side, use, shapes[use.leaf])
        if use.kind == "product":
            products.add(use.leaf)
        if isinstance(before, MatrixLayout) and isinstance(new, MatrixLayout) and before != new:
            new = f"{use.primitive} at {use.source or 'an unknown line'} sums over other axes of it than before"
        layouts[use.leaf] = before if isinstance(before, str) else new
    for fact in plan.out:
        for origin in () if fact is None else fact.origins:
            layouts[origin.leaf] = "the function returns it"
    return {leaf: layouts[leaf] for leaf in sorted(products)}


def _uses_by_step(plan: ProgramPlan) -> Iterator[tuple[ProductStep, int, ParamUse]]:
    for step in plan.walk():
        yield from ((step, side, use) for side, some in enumerate(step.uses) for use in some)


def _lora_layout(step: ProductStep, side: int, use: ParamUse, shape: tuple[int, ...]) -> MatrixLayout | str:
    where = f"{use.primitive} at {use.source or 'an unknown line'}"
    if use.kind != "product" or not isinstance(step.product, DotProduct):
        return f"{where} takes it, which is no product of matrices"
    if sum(map(len, step.uses)) > 1:
        return f"{where} multiplies several parameters"
    if any(step.product.batch):
        return f"{where} is batched over an axis of it"
    if use.view is None or not use.is_intact:
        return f"it is computed with before {where}"
    view = MatrixView(use.view.free, _sort_factors(use.view.contracting))
    layout = MatrixLayout.of(shape, stack_ndim(shape, view), view, 0)
    if layout is None or math.prod(layout.matrices) != math.prod(step.eqn.invars[side].aval.shape):
        return f"{where} takes a part of an axis"
    return layout


def _sort_factors(parts: AxisFactors) -> AxisFactors:
    return tuple(sorted(parts, key=lambda part: (part.axis, -part.inner)))
