"""Sums with a named order: reductions, products, convolutions, cumulative sums, scatters; and complex operations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, in_auto_mesh
from jchop._common.settings import always_jit
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
from jchop._emulate.rules.rules import is_exact_under, is_number, spec_of_fact
from jchop._emulate.rules.run_task import EmulatedStep, Task, round_value, run_task
from jchop._kernels.products.matmul import matmul_op
from jchop._program.bind import bind, straight_through
from jchop._program.seeds import SeedDraw, Seeds
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec


def accumulate_in_order(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of an equation that sums, in the order and with the roundings of ``step.choice.accumulate``."""
    how = step.choice.accumulate
    assert how is not None
    arrays = [jnp.asarray(x) for x in args]
    facts = tuple(map(spec_of_fact, step.known))
    if how.operands is not None:
        number = step.number + len(args)
        for i, (x, fact) in enumerate(zip(arrays, facts, strict=True)):
            if is_number(x) and not is_exact_under(fact, how.operands):
                word = seeds.words(x, number + i) if spec_draws(how.operands) and seeds is not None else None
                arrays[i] = round_value(x, how.operands, word)
        facts = (how.operands,) * len(arrays)
    plain = partial(_carrier_sum, step)
    common = facts[0] if len(set(facts)) == 1 else None
    run = partial(_SUM_RULES[step.name], step, replace(how, operands=common))
    if step.name in _SUM_AXES:
        along = _SUM_AXES[step.name](step.eqn.params)
        ends = [(), *([axis - x.ndim for axis in axes] for x, axes in zip(arrays, along, strict=True))]
        run = partial(in_auto_mesh, run, along=ends, like=lambda seeds, *values: plain(*values))
    return [straight_through(lambda values, seeds: _round_sum(step, run(seeds, *values), seeds), plain, arrays, seeds)]


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
    return _sum_over(step, how, seeds, x, x, axes) if axes else _in_operation_carrier(x)


def _sum_over(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array, parts: Array, axes: Any) -> Array:
    """The sums of parts of `x` along axes."""
    twelve = _product_and_sum_seeds(seeds, replace(how, product=None), step, x)
    return sum_along(_in_operation_carrier(parts), axes, how, twelve, value_spec=how.operands, matmul=matmul_op)


def _reduce_window_sum(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, x: Array) -> Array:
    p = step.eqn.params
    sides = [(*pad, d - 1) for pad, d in zip(p["padding"], p["base_dilation"], strict=True)]
    padded_x = lax.pad(x, jnp.zeros((), x.dtype), sides)
    parts = _gather_windows(padded_x, p["window_dimensions"], p["window_strides"], p["window_dilation"])
    return _sum_over(step, how, seeds, x, parts, tuple(range(x.ndim, 2 * x.ndim)))


def _dot_general(step: EmulatedStep, how: MatmulSpec, seeds: Seeds | None, a: Array, b: Array) -> Array:
    """The product of two arrays in an order of sums, as matrices (batch, m, k) and (batch, k, n)."""
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
    six = _sum_seeds(seeds, step, x)
    return cumulative_along(kind, _in_operation_carrier(x), p["axis"], spec, six, reverse=p["reverse"])


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
#: is also the value of the index of a scatter.
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


# -- complex numbers ---------------------------------------------------------------------------------------------------


ComplexParts = tuple[Array, Array]
#: An operation on parts, of its name and two operands.
PartOperation = Callable[[str, Array, Array], Array]


def run_complex(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """The result of an equation with complex operands or a complex result; derivatives are the carrier's."""
    spec, name = step.choice.spec, step.name
    assert spec is not None
    arrays = list(jnp.broadcast_arrays(*map(jnp.asarray, args)))
    first = None
    if seeds is not None and spec_draws(spec) and name in _COMPLEX_ROUNDING:
        first = seeds.draw(jax.eval_shape(lambda x: x.real, arrays[0]), step.number + 4)
    params = tuple(sorted(step.eqn.params.items()))
    return [_run_complex_op(step.eqn.primitive, params, spec, step.apart, arrays, first)]


@partial(always_jit, static_argnums=(0, 1, 2, 3))
def _run_complex_op(
    primitive: Any, params: Any, spec: Spec, apart: bool, arrays: list[Array], first: SeedDraw | None
) -> Array:
    """A function of the program that all equations with equal facts call."""

    def run(args: list[Array], first: SeedDraw | None) -> Array:
        count = itertools.count()

        def do(name: str, x: Array, y: Array) -> Array:
            """An operation on parts; each call takes the next draw."""
            task = Task(_PART_PRIMITIVES[name], (), "exact", spec, (spec, spec), apart)
            return run_task(task, [x, y], [] if first is None else [first.later(next(count))])[0]

        parts = [(lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x, x) for x in args]
        result = _COMPLEX_RULES[primitive.name](do, *parts)
        return lax.complex(*result) if isinstance(result, tuple) else result

    return straight_through(run, lambda *args: bind(primitive, dict(params), *args)[0], arrays, first)


def run_complex_sum(step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
    """A sum is two real sums, and a scatter that adds is two scatters.

    A product of matrices is four real products: two are subtracted and two are added.
    """
    (aval,), spec = (v.aval for v in step.eqn.outvars), step.choice.spec
    if step.name in _SEQUENTIAL_PRODUCTS:
        raise NotImplementedError(
            f"primitive {step.name!r} ({step.place}): accumulate={step.choice.accumulate} forms no products of "
            f"complex numbers one after the other; leave it in the carrier by rules={{{step.name!r}: None}}"
        )
    params, zero = dict(step.eqn.params), jnp.zeros((), aval.dtype).real
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = zero.dtype
    if "update_jaxpr" in params:
        params["update_jaxpr"] = jax.make_jaxpr(_SCATTER_UPDATES[step.name])(zero, zero).jaxpr

    def total(part: int, *values: Array) -> Array:
        program = jax.make_jaxpr(partial(step.eqn.primitive.bind, **params))(*values)
        one = replace(step, eqn=program.jaxpr.eqns[0], kind="accumulating", number=0)
        return accumulate_in_order(one, None if seeds is None else seeds.turn(step.number + 5, part), list(values))[0]

    def two(name: str, part: int, x: Array, y: Array) -> Array:
        if spec is None:
            return x + y if name == "add" else x - y
        word = seeds.words(x, step.result_number + part) if spec_draws(spec) and seeds is not None else None
        plain = lax.add if name == "add" else lax.sub
        return straight_through(lambda values, word: round_operation(name, values, spec, word), plain, [x, y], word)

    real, imag = ([of(x) if jnp.iscomplexobj(x) else x for x in args] for of in (lax.real, lax.imag))
    if len(args) != 2:
        return [lax.complex(total(0, *real), total(1, *imag))]
    (a, c), (b, d) = real, imag
    first = two("sub", 0, total(0, a, c), total(1, b, d))
    return [lax.complex(first, two("add", 1, total(2, a, d), total(3, b, c)))]


_SCATTER_UPDATES = {"scatter-add": lax.add, "scatter-sub": lax.sub}
_SEQUENTIAL_PRODUCTS = ("reduce_prod", "cumprod", "scatter-mul")


_PART_PRIMITIVES = {"add": lax.add_p, "mul": lax.mul_p}
#: Those that round.
_COMPLEX_ROUNDING = frozenset(("add", "add_any", "sub", "mul", "square"))


def _complex_add(do: PartOperation, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    return do("add", x[0], y[0]), do("add", x[1], y[1])


def _complex_mul(do: PartOperation, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """Four products and two sums."""
    (a, b), (c, d) = x, y
    real = do("add", do("mul", a, c), -do("mul", b, d))
    return real, do("add", do("mul", a, d), do("mul", b, c))


_COMPLEX_RULES: dict[str, Callable[..., ComplexParts | Array]] = {
    "add": _complex_add,
    "add_any": _complex_add,
    "sub": lambda do, x, y: _complex_add(do, x, (-y[0], -y[1])),  # which is how a difference is computed
    "mul": _complex_mul,
    "square": lambda do, x: _complex_mul(do, x, x),
    "neg": lambda do, x: (-x[0], -x[1]),
    "conj": lambda do, x: (x[0], -x[1]),
    "real": lambda do, x: x[0],
    "imag": lambda do, x: x[1],
    "complex": lambda do, x, y: (x[0], y[0]),
}
