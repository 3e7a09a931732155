"""Adapters of low rank beside parameters of programs: y + factor (x A B) at each product that takes the parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._program.step import ProgramPlan
from jchop._quantized.products.product import DotProduct
from jchop._quantized.program.param_uses import ParamUse, ProductStep
from jchop._quantized.program.provenance import AxisFactors, MatrixLayout, MatrixView
from jchop._quantized.program.weight_layout import WeightLayout, stack_ndim


@partial(
    jax.tree_util.register_dataclass, data_fields=["lora_a", "lora_b"], meta_fields=["layout", "rule", "placement"]
)
@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter: A and B, for a parameter as a matrix (in, out) with the axes of each in the parameter's order.

    Args:
        lora_a: A, (in, rank), with the axes of a stack of parameters in front.
        lora_b: B, (rank, out), likewise.
        layout: the parameter as a matrix.
        rule: a `jchop.nn.LoraRule`.
        placement: how the parameter is packed; None if no rule rounds it.
    """

    lora_a: Any
    lora_b: Any
    layout: MatrixLayout
    rule: Any
    placement: WeightLayout | None

    @property
    def stack(self) -> int:
        """How many axes of a stack it has still."""
        return self.lora_a.ndim - 2


@partial(jax.tree_util.register_dataclass, data_fields=["base", "adapter"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class AdaptedParam:
    """A parameter with an adapter, in its place in a pytree; `jchop.nn.add_lora` makes it.

    Args:
        base: the parameter, packed or not.
        adapter: its adapter, with ``lora_a`` and ``lora_b``.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low, x = jc.quantize_fn(lambda p, x: x @ p["w"], jc.Rule(weight="nf4")), jnp.ones((2, 64))
        >>> packed = low.pack({"w": jnp.ones((64, 8))}, x)
        >>> rule, key = jc.nn.LoraRule("w", rank=4), jax.random.key(0)
        >>> adapted = jc.nn.add_lora(packed, rule, fun=low, inputs=(x,), key=key)
        >>> adapted["w"].shape, adapted["w"].adapter.lora_a.shape, bool((low(adapted, x) == low(packed, x)).all())
        ((64, 8), (64, 4), True)
    """

    base: Any
    adapter: LoraAdapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.base.shape)

    @property
    def ndim(self) -> int:
        """Number of axes of the parameter."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the parameter."""
        return self.base.dtype


def add_lora_delta(adapter: LoraAdapter, step: ProductStep, side: int, x: Array, y: Array, key: Array | None) -> Array:
    """Adds the output of an adapter to the result of a product.

    Args:
        adapter: of the weight.
        step: the product.
        side: which operand the weight is.
        x: the other operand.
        y: the result without the adapter.
        key: for dropout of x; None for none.
    """
    (use,), dot = step.uses[side], step.product
    assert isinstance(dot, DotProduct) and use.view is not None and not adapter.stack
    rate = adapter.rule.dropout
    if rate and key is not None:
        x = jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
    contracting = dot.contracting[1 - side]
    free = dot.forward.left.free if side == 0 else dot.forward.right.free
    dtype = jnp.result_type(x, adapter.lora_a, adapter.lora_b)
    rows = reorder_rows(adapter.lora_a, use.view.contracting)
    columns = reorder_rows(adapter.lora_b.T, tuple(part for parts in use.view.free for part in parts)).T
    lora_a = rows.reshape(*(x.shape[axis] for axis in contracting), -1)
    lora_b = columns.reshape(-1, *(step.eqn.invars[side].aval.shape[axis] for axis in free))
    x, lora_a, lora_b = (v.astype(dtype) for v in (x, lora_a, lora_b))
    multiply = partial(lax.dot_general, precision=dot.precision)
    projection = multiply(x, lora_a, ((contracting, tuple(range(len(contracting)))), ((), ())))
    last = projection.ndim - 1
    if side:
        delta = multiply(projection, lora_b, (((last,), (0,)), ((), ())))
    else:
        delta = multiply(lora_b, projection, (((0,), (last,)), ((), ())))
    return y + (delta * adapter.rule.factor).astype(y.dtype)


def reorder_rows(matrix: Array, parts: AxisFactors) -> Array:
    """Rows in the order of parts of axes as a product takes them, from the order of the parameter."""
    order = sorted(range(len(parts)), key=lambda i: (parts[i].axis, -parts[i].inner))
    if order == list(range(len(parts))):
        return matrix
    factors = matrix.reshape(*(parts[i].size for i in order), -1)
    return factors.transpose(*np.argsort(order), len(parts)).reshape(matrix.shape)


# -- parameters that may have adapters ---------------------------------------------------------------------------------


def lora_layouts(plan: ProgramPlan, shapes: Sequence[tuple[int, ...]]) -> dict[int, MatrixLayout | str]:
    """The parameters that reach a product: each as a matrix, if all that takes it are `dot_general` alike.

    Args:
        plan: the program.
        shapes: of the parameters.

    Returns:
        By the number of the parameter its layout, or the reason why it can have no adapter.
    """
    layouts: dict[int, MatrixLayout | str] = {}
    products: set[int] = set()
    every = ((step, side, use) for step in plan.walk() for side, some in enumerate(step.uses) for use in some)
    for step, side, use in every:
        before, new = layouts.get(use.leaf), _lora_layout(step, side, use, shapes[use.leaf])
        if use.kind == "product":
            products.add(use.leaf)
        if isinstance(before, MatrixLayout) and isinstance(new, MatrixLayout) and before != new:
            new = f"{use.where} sums over other axes of it than before"
        layouts[use.leaf] = before if isinstance(before, str) else new
    for fact in plan.out:
        for origin in () if fact is None else fact.origins:
            layouts[origin.leaf] = "the function returns it"
    return {leaf: layouts[leaf] for leaf in sorted(products)}


def _lora_layout(step: ProductStep, side: int, use: ParamUse, shape: tuple[int, ...]) -> MatrixLayout | str:
    """A parameter as a matrix for an adapter at one use, or why it can have none."""
    where = use.where
    if use.kind != "product" or not isinstance(step.product, DotProduct):
        return f"{where} takes it, which is no product of matrices"
    if sum(map(len, step.uses)) > 1:
        return f"{where} multiplies several parameters"
    if any(step.product.batch):
        return f"{where} is batched over an axis of it"
    if use.view is None or not use.is_intact:
        return f"it is computed with before {where}"
    contracting = tuple(sorted(use.view.contracting, key=lambda part: (part.axis, -part.inner)))
    view = MatrixView(use.view.free, contracting)
    layout = MatrixLayout.of(shape, stack_ndim(shape, view), view, 0)
    if layout is None or math.prod(layout.matrix_shape) != math.prod(step.eqn.invars[side].aval.shape):
        return f"{where} takes a part of an axis"
    return layout
