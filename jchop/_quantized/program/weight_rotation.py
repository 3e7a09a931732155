"""Parameters that are stored rotated, for rotations of forward products; and why others cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jchop._common.paths import path_pattern
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.matrix_layout import MatrixLayout, WeightRotation
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.weight_layout import WeightLayout, stack_ndim


def weight_rotation_of(
    rule: Rule, path: str, shape: Sequence[int], uses: Sequence[ParamUse], is_result: bool
) -> WeightRotation | None:
    """The rotation of a parameter that a rule rounds, along the sum of its products; None if there is none.

    Args:
        rule: the rule.
        path: of the parameter.
        shape: of it.
        uses: all of them.
        is_result: whether the function returns it, too.

    Raises:
        ValueError: if anything needs the parameter as it is.
    """
    first = next((use for use in uses if use.kind == "product" and use.view is not None), None)
    if rule.forward_rotation is None or first is None:
        return None
    assert first.view is not None
    for use in uses:
        if use.kind != "product":
            raise _rotation_error(rule, path, f"{use.where} takes it as it is")
        if use.view is None or use.view.contracting != first.view.contracting:
            raise _rotation_error(rule, path, f"{use.where} sums over other axes")
        if not use.is_intact:
            why = f"its numbers are computed with before {use.where}"
            raise _rotation_error(rule, path, f"{why}, or put in another order, or sent between devices")
    if is_result:
        raise _rotation_error(rule, path, "the function returns it")
    layout = MatrixLayout.of(shape, stack_ndim(shape, first.view), first.view, 0)
    if layout is None:
        raise _rotation_error(rule, path, f"{first.where} takes a part of an axis")
    return WeightRotation(rule.forward_rotation, layout)


def with_weight_rotation(
    step: ProductStep,
    roundings: tuple[ProductRoundings, int] | None,
    placements: Mapping[int, tuple[WeightLayout, ParamUse]],
    paths: Sequence[str],
    rules: Mapping[int, Rule],
) -> tuple[ProductRoundings, int] | None:
    """The roundings of a product whose weight may be stored rotated.

    Args:
        step: the product.
        roundings: its roundings, and which operand the weight is; None if nothing is rounded.
        placements: of the parameters that are rounded.
        paths: of the parameters.
        rules: of the parameters that are rounded.

    Raises:
        ValueError: if the product does not rotate its inputs as its weight is.
    """
    uses = step.param_uses
    rotations = {use.leaf: placements[use.leaf][0].rotation if use.leaf in placements else None for use in uses}
    if roundings is not None and (rotation := roundings[0].forward_rotation) is not None and step.product is not None:
        width = _sum_length(step)
        if rotation.size == "all" and width % 2:
            raise ValueError(
                f"rotation={rotation} of the {roundings[0].place}: its sum has {width} numbers, which is odd, so "
                "there is no Hadamard matrix; put a rule without a rotation before it"
            )
    if not any(rotations.values()):
        return roundings
    for use in uses:
        param_rotation = rotations[use.leaf] or next(filter(None, rotations.values()))
        own_rotation = None if roundings is None else roundings[0].forward_rotation
        whole = use.view is not None and math.prod(part.size for part in use.view.contracting) == _sum_length(step)
        if rotations[use.leaf] is None or own_rotation != param_rotation.rotation or not whole:
            why = f"the inputs of {step.where} are not rotated in the same way"
            leaf = next(leaf for leaf, own in rotations.items() if own is not None)
            raise _rotation_error(rules[leaf], paths[leaf], why)
    assert roundings is not None
    return replace(roundings[0], skip_weight_rotation=True), roundings[1]


def _sum_length(step: ProductStep) -> int:
    """How many products are summed for each result."""
    assert step.product is not None
    return math.prod(step.eqn.invars[0].aval.shape[axis] for axis in step.product.forward.left.contracting)


def _rotation_error(rule: Rule, path: str, why: str) -> ValueError:
    return ValueError(
        f"rotation={rule.rotation} of the parameter {path!r}: {why}; put Rule({path_pattern(path)!r}, ...) without a "
        f"rotation before {rule}"
    )
