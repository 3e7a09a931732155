"""Sums with a named order: reductions, products of matrices, convolutions, cumulative sums and products, scatters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jchop._common.bit_ops import CARRIERS, in_auto_mesh
from jchop._core.arithmetic.exact import range_of
from jchop._core.matmul.operations import (
    cumulative_along,
    fold_seeds,
    operation_carrier,
    operation_words,
    product_along,
    round_operation,
    spec_draws,
    sum_along,
)
from jchop._core.rounding.elements import round_to_spec
from jchop._emulate.rules.run_task import round_value
from jchop._emulate.rules.step import EmulatedStep
from jchop._emulate.rules.value_facts import is_exact_under, is_number
from jchop._kernels.products.matmul import matmul_op
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import Seeds
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

Array = jax.Array


def accumulate_in_order(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of an equation that sums, in the order and with the roundings of ``step.choice.accumulate``."""
    how = step.choice.accumulate
    assert how is not None
    arrays = [jnp.asarray(x) for x in args]
    facts = step.known
    if how.operands is not None:
        number = step.number + len(args)
        arrays = [
            _sum_operand(x, k, how.operands, seeds, number + i) if is_number(x) else x
            for i, (x, k) in enumerate(zip(arrays, facts, strict=True))
        ]
        facts = (how.operands,) * len(arrays)
    plain = partial(_carrier_sum, step)
    run = partial(_SUM_RULES[step.name], step, replace(how, operands=_common_spec(facts)))
    if step.name in _SUM_AXES:
        along = _SUM_AXES[step.name](step.eqn.params)
        ends = [(), *([axis - x.ndim for axis in axes] for x, axes in zip(arrays, along, strict=True))]
        run = partial(in_auto_mesh, run, along=ends, like=lambda seeds, *values: plain(*values))
    return [straight_through(lambda values, seeds: _round_sum(step, run(seeds, *values), seeds), plain, arrays, seeds)]


def _sum_operand(x: Array, fact: Spec | None, spec: Spec, seeds: Seeds | None, number: int) -> Array:
    if is_exact_under(fact, spec):
        return x
    word = seeds.words(x, number) if spec_draws(spec) and seeds is not None else None
    return round_value(x, spec, word)


def _common_spec(facts: Sequence[Spec | None]) -> Spec | None:
    """The spec that holds all operands, if it is the same for all; else None."""
    return facts[0] if len(set(facts)) == 1 else None


def _carrier_sum(step: EmulatedStep, *args: Array) -> Array:
    return bind(step.eqn.primitive, step.eqn.params, *args)[0]


def _round_sum(step: EmulatedStep, total: Array, seeds: Seeds | None) -> Array:
    """The sum in the dtype of the equation, rounded to its spec if the accumulator's values are not of it."""
    aval, spec, how = step.eqn.outvars[0].aval, step.choice.spec, step.choice.accumulate
    assert how is not None
    dtype = aval.dtype
    if not is_exact_under(how.accumulate, spec):
        assert spec is not None
        word = seeds.words(total, step.number + _FIRST_SUM_DRAW - 1) if spec_draws(spec) and seeds is not None else None
        total = round_to_spec(total, spec, CARRIERS[total.dtype.name], word)
    elif total.dtype != dtype and how.accumulate is None:
        own = {"float16": "binary16", "bfloat16": "bfloat16"}[dtype.name]
        total = round_to_spec(total, Spec(own), CARRIERS[total.dtype.name])
    return total.astype(dtype)


def _product_and_sum_seeds(seeds: Seeds | None, how: MatmulSpec, step: EmulatedStep, *args: Array) -> Array | None:
    """The seeds of the products and of the sums of a matrix product of these arrays."""
    if seeds is None or not (spec_draws(how.product) or spec_draws(how.accumulate)):
        return None
    number = step.number + _FIRST_SUM_DRAW
    return jnp.stack([*seeds.turn(number, 0).of(*args), *seeds.turn(number, 1).of(*args)])


def _run_ordered_matmul(how: MatmulSpec, seeds: Array | None, a: Array, b: Array) -> Array:
    """The products of matrices of shapes (batch, m, k) and (batch, k, n)."""
    carrier = operation_carrier(a.dtype).name
    extra = () if seeds is None else (seeds,)
    return matmul_op(a.astype(carrier), b.astype(carrier), *extra, spec=how)


# -- one rule each -----------------------------------------------------------------------------------------------------


def _in_operation_carrier(x: Array) -> Array:
    return x.astype(operation_carrier(x.dtype).name)


def _reduce_sum(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array) -> Array:
    axes = step.eqn.params["axes"]
    if not axes:
        return _in_operation_carrier(x)
    twelve = _product_and_sum_seeds(seeds, replace(how, product=None), step, x)
    return sum_along(_in_operation_carrier(x), axes, how, twelve, value_spec=how.operands, matmul=matmul_op)


def _reduce_window_sum(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array) -> Array:
    p = step.eqn.params
    padded_x = lax.pad(
        x, jnp.zeros((), x.dtype), [(*pad, d - 1) for pad, d in zip(p["padding"], p["base_dilation"], strict=True)]
    )
    parts = _gather_windows(padded_x, p["window_dimensions"], p["window_strides"], p["window_dilation"])
    twelve = _product_and_sum_seeds(seeds, replace(how, product=None), step, x)
    axes = tuple(range(x.ndim, 2 * x.ndim))
    return sum_along(_in_operation_carrier(parts), axes, how, twelve, value_spec=how.operands, matmul=matmul_op)


def _dot_general(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, a: Array, b: Array) -> Array:
    (ca, cb), (ba, bb) = step.eqn.params["dimension_numbers"]
    fa, fb = ([i for i in range(x.ndim) if i not in (*c, *batch)] for x, c, batch in ((a, ca, ba), (b, cb, bb)))
    batch, m, k = ([a.shape[i] for i in axes] for axes in (ba, fa, ca))
    n = [b.shape[i] for i in fb]
    left = jnp.transpose(a, (*ba, *fa, *ca)).reshape(math.prod(batch), math.prod(m), math.prod(k))
    right = jnp.transpose(b, (*bb, *cb, *fb)).reshape(math.prod(batch), math.prod(k), math.prod(n))
    return _run_ordered_matmul(how, _product_and_sum_seeds(seeds, how, step, left, right), left, right).reshape(
        *batch, *m, *n
    )


def _conv_general(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, lhs: Array, rhs: Array) -> Array:
    """A product of matrices with a row for each position of the window; in a row, channels come before positions."""
    p = step.eqn.params
    numbers = p["dimension_numbers"]
    x, w = jnp.transpose(lhs, numbers.lhs_spec), jnp.transpose(rhs, numbers.rhs_spec)
    padding = [(0, 0, 0), (0, 0, 0), *((*pad, d - 1) for pad, d in zip(p["padding"], p["lhs_dilation"], strict=True))]
    x = lax.pad(x, jnp.zeros((), x.dtype), padding)
    batches, groups = p["batch_group_count"], p["feature_group_count"] * p["batch_group_count"]
    inner = (1, 1)
    parts = _gather_windows(x, (*inner, *w.shape[2:]), (*inner, *p["window_strides"]), (*inner, *p["rhs_dilation"]))
    places, spatial = parts.shape[2 : x.ndim], x.ndim - 2
    count, channels = x.shape[0] // batches, x.shape[1] // p["feature_group_count"]
    parts = parts.reshape(batches, count, p["feature_group_count"], channels, *places, *w.shape[2:])
    order = (0, 2, 1, *range(4, 4 + spatial), 3, *range(4 + spatial, 4 + 2 * spatial))
    left = jnp.transpose(parts, order).reshape(groups, count * math.prod(places), -1)
    right = jnp.swapaxes(w.reshape(groups, w.shape[0] // groups, -1), 1, 2)
    out = _run_ordered_matmul(how, _product_and_sum_seeds(seeds, how, step, left, right), left, right)
    out = jnp.moveaxis(out.reshape(groups, count, *places, -1), 0, -2).reshape(count, *places, w.shape[0])
    return jnp.transpose(jnp.moveaxis(out, -1, 1), tuple(map(int, np.argsort(numbers.out_spec))))


def _gather_windows(x: Array, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Array:
    """The windows of a padded array: shape (*places, *sizes)."""
    n = x.ndim
    for axis, (size, stride, step) in enumerate(zip(sizes, strides, dilation, strict=True)):
        count = max((x.shape[2 * axis] - (size - 1) * step - 1) // stride + 1, 0)
        index = np.arange(count)[:, None] * stride + np.arange(size)[None, :] * step
        x = jnp.take(x, index, axis=2 * axis)
    return jnp.transpose(x, (*range(0, 2 * n, 2), *range(1, 2 * n, 2)))


def _sum_seeds(seeds: Seeds | None, step: EmulatedStep, x: Array) -> tuple[Array, ...] | None:
    return None if seeds is None else seeds.turn(step.number + _FIRST_SUM_DRAW).of(x)


def _cumulative_sum_or_product(kind: str, step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array) -> Array:
    p, spec = step.eqn.params, how.accumulate
    if spec is None:
        return _in_operation_carrier(_carrier_sum(step, x))
    return cumulative_along(
        kind, _in_operation_carrier(x), p["axis"], spec, _sum_seeds(seeds, step, x), reverse=p["reverse"]
    )


def _reduce_prod(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array) -> Array:
    axes, spec = step.eqn.params["axes"], how.accumulate
    if not axes or spec is None:
        return _in_operation_carrier(_carrier_sum(step, x) if axes else x)
    return product_along(_in_operation_carrier(x), axes, spec, _sum_seeds(seeds, step, x))


def _scatter_in_order(
    name: str, step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array, index: Array, new: Array
) -> Array:
    """Each element takes its updates one after the other, from the operand: c <- A(c + u), A(c - u) or A(c u)."""
    p, spec = step.eqn.params, how.accumulate
    if spec is None:
        return _in_operation_carrier(_carrier_sum(step, x, index, new))
    numbers, window = p["dimension_numbers"], p["dimension_numbers"].update_window_dims
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = iter(new.shape[axis] for axis in window)
    at = lax.gather(  # the element of every update; none for updates beyond the bounds
        jnp.arange(x.size, dtype=np.int32).reshape(x.shape),
        index,
        lax.GatherDimensionNumbers(
            offset_dims=window,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        ),
        [1 if axis in single else next(sizes) for axis in range(x.ndim)],
        mode="clip" if p["mode"] == lax.GatherScatterMode.CLIP else "fill",
        fill_value=x.size,
    )
    outer = [axis for axis in range(new.ndim) if axis not in window]
    shape = [math.prod(new.shape[axis] for axis in axes) for axes in (outer, window)]
    rows = [jnp.transpose(each, (*outer, *window)).reshape(shape) for each in (at, _in_operation_carrier(new))]
    six, ranges = _sum_seeds(seeds, step, x), (range_of(None, operation_carrier(x.dtype)),) * 2

    def turn(carry: tuple[Array, Array], row: list[Array]) -> tuple[tuple[Array, Array], None]:
        (total, k), (place, value) = carry, row  # the elements of one window are different ones
        word = operation_words(fold_seeds(six, 0, k), value) if spec_draws(spec) and six is not None else None
        old = total.at[place].get(mode="fill", fill_value=0)
        total = total.at[place].set(round_operation(name, [old, value], spec, word, ranges=ranges), mode="drop")
        return (total, k + jnp.uint32(1)), None

    (total, _), _ = lax.scan(turn, (_in_operation_carrier(x).ravel(), jnp.uint32(0)), rows)
    return total.reshape(x.shape)


#: The first draw number of a step's sums: at most two operands are rounded twice, and the result draws number 4, which
#: is also that of the index of a scatter.
_FIRST_SUM_DRAW = 5

#: The axes of each operand that are summed over, or lie within a window.
_SUM_AXES: dict[str, Callable[[Any], Sequence[Sequence[int]]]] = {
    "reduce_sum": lambda params: (params["axes"],),
    "reduce_prod": lambda params: (params["axes"],),
    "dot_general": lambda params: params["dimension_numbers"][0],
    "conv_general_dilated": lambda params: [numbers[1:] for numbers in params["dimension_numbers"][:2]],
}

_SUM_RULES: dict[str, Callable[..., Array]] = {
    "reduce_sum": _reduce_sum,
    "reduce_prod": _reduce_prod,
    "reduce_window_sum": _reduce_window_sum,
    "cumsum": partial(_cumulative_sum_or_product, "sum"),
    "cumprod": partial(_cumulative_sum_or_product, "prod"),
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general,
    "scatter-add": partial(_scatter_in_order, "add"),
    "scatter-sub": partial(_scatter_in_order, "sub"),
    "scatter-mul": partial(_scatter_in_order, "mul"),
}
