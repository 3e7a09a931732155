"""The biases that a program adds to its products, and the mean errors that they can take off."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.settings import always_jit
from jchop._program.run import interpret
from jchop._program.step import ProgramPlan
from jchop._quantized.products.product import ConvProduct, DotProduct
from jchop._quantized.program.provenance import AxisFactors, MatrixLayout, MatrixView, ParamOrigin, move_origin
from jchop._quantized.program.weight_layout import stack_ndim
from jchop.ptq._data.sites import ProgramWalk, WeightSites

#: Sums, and the sign with which each operand enters.
_SUM_SIGNS = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1)}


@dataclass(frozen=True)
class BiasSite:
    """A parameter that is added to the product of a weight.

    Args:
        leaf: the index of the parameter.
        sign: 1, or -1 if the parameter is subtracted.
        shape: the shape of the parameter, without axes of a stack.
        axes: for each axis of the product that the parameter has, the factors of the weight's axes and of its axes.
    """

    leaf: int
    sign: int
    shape: tuple[int, ...]
    axes: tuple[tuple[AxisFactors, AxisFactors], ...]

    def result_entries(self, layout: MatrixLayout) -> np.ndarray:
        """The flat index of the bias entry that is added to each result of the matrices: (batch, kept)."""
        indexes = np.meshgrid(*map(np.arange, layout.shape), indexing="ij", copy=False)  # views of one axis each
        result_indexes = list(map(layout.results, indexes))
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        bias_indexes = np.zeros((layout.matrix_shape[0], layout.matrix_shape[2]), np.int64)
        for weight_factors, bias_factors in self.axes:
            position = np.zeros_like(bias_indexes)
            for factor in weight_factors:
                position = position * factor.size + result_indexes[factor.axis] // factor.inner % factor.size
            for factor in reversed(bias_factors):
                bias_indexes += position % factor.size * factor.inner * strides[factor.axis]
                position //= factor.size
        return bias_indexes


def find_biases(program: Any, sites: WeightSites) -> tuple[dict[int, BiasSite], dict[int, str]]:
    """The bias of each weight whose inputs are looked at, and of the other weights why there is none.

    A product is followed to the first sum with a parameter. Steps between may only move its numbers, or be sums with
    data that have no other use.
    """
    search = _BiasSearch(sites)
    interpret(search, program.plan, None, [()] * len(program.plan.jaxpr.invars))
    biases: dict[int, BiasSite] = {}
    reasons: dict[int, str] = {}
    for leaf, site in sites.by_leaf.items():
        sums = search.sums.get(leaf, [])
        if search.products[leaf] != 1:
            reasons[leaf] = "several products take the weight"
        elif len(sums) > 1:
            reasons[leaf] = "several parameters are added to its product"
        elif not sums:
            reasons[leaf] = "no bias is added to its product"
        else:
            bias = _bias_of_sum(program, site.stack, site.turns, sums[0], search.loops)
            if isinstance(bias, str):
                reasons[leaf] = bias
            else:
                biases[leaf] = bias
    return biases, reasons


@dataclass(frozen=True)
class _BiasSum:
    """A sum of a product and a parameter."""

    weight: ParamOrigin
    bias: ParamOrigin
    sign: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _ProductTerm:
    """A product in a value, as the origin whose axes are parts of its weight's.

    Args:
        weight: the origin.
        sign: with which the product enters.
        has_others: whether the value has other terms.
    """

    weight: ParamOrigin
    sign: int = 1
    has_other_terms: bool = False


_ProductTerms = tuple[_ProductTerm, ...]


class _BiasSearch(ProgramWalk):
    """Follows products through a program; the facts are the product terms in each value."""

    unknown: _ProductTerms = ()

    def __init__(self, sites: WeightSites) -> None:
        self.sites = sites
        self.sums: dict[int, list[_BiasSum]] = {}
        self.products: Counter[int] = Counter()
        self.loops: dict[int, tuple[int, ...]] = {}  # those that run over each parameter where it was last met
        self._uses: Counter[Any] = Counter()  # of each variable of the programs that were entered

    def parts(self, plan: ProgramPlan) -> Iterable[Any]:
        """The steps of a program that is entered."""
        reads = [v for step in plan.steps for v in step.eqn.invars] + list(plan.jaxpr.outvars)
        self._uses |= Counter(v for v in reads if not hasattr(v, "val"))
        return plan.steps

    def _terms_of(self, variables: Sequence[Any], terms: Sequence[_ProductTerms]) -> list[_ProductTerms]:
        """The terms that each variable brings to its use; a sum that has several uses brings none."""
        return [
            tuple(term for term in known if self._uses[v] == 1 or not term.has_other_terms)
            for v, known in zip(variables, terms, strict=True)
        ]

    def control(self, step: Any, seeds: Any, args: list[_ProductTerms]) -> list[_ProductTerms]:
        """A step that holds programs."""
        outs = super().control(step, seeds, self._terms_of(step.eqn.invars, args))
        return self._terms_of(step.inner[-1].jaxpr.outvars, outs) if any(outs) else outs

    def _set_loops(self, leaf: int) -> None:
        """Notes the loops that run over a parameter where it is now."""
        self.loops[leaf] = tuple(map(id, self.loops_over.get(leaf, ())))

    def run(self, part: Any, seeds: Any, args: list[_ProductTerms]) -> list[_ProductTerms]:
        """The product terms of the results: a product with one site starts a term, moves keep it, `_sum` adds terms."""
        terms, outvars = self._terms_of(part.eqn.invars, args), part.eqn.outvars
        nothing: list[_ProductTerms] = [()] * len(outvars)
        if id(part) in self.sites.of_step:
            side, sites = self.sites.of_step[id(part)]
            for site in sites:
                self.products[site.leaf] += 1
                self._set_loops(site.leaf)
            if len(sites) != 1:
                return nothing
            axes = _axes_of_result(part.product, side, sites[0].view, part.eqn)
            return [(_ProductTerm(ParamOrigin(sites[0].leaf, axes)),)]
        if part.name in _SUM_SIGNS and any(terms):
            return self._sum(part, terms)
        if terms and terms[0] and len(outvars) == 1:
            before, after = (v.aval.shape for v in (part.eqn.invars[0], outvars[0]))
            origins = [(t, move_origin(part.name, part.eqn.params, t.weight, before, after)) for t in terms[0]]
            return [tuple(replace(t, weight=o) for t, o in origins if o is not None and o.is_intact)]
        return nothing

    def _sum(self, step: Any, operand_terms: list[_ProductTerms]) -> list[_ProductTerms]:
        """The product terms in a sum; a sum with a parameter has none, and is appended to `sums`."""
        shape, signs = tuple(step.eqn.outvars[0].aval.shape), _SUM_SIGNS[step.name]
        parameter_origins = [fact.origins for fact in step.known if not fact.data and fact.origins]
        if not parameter_origins:
            sum_terms: list[_ProductTerm] = []
            for sign, v, terms in zip(signs, step.eqn.invars, operand_terms, strict=True):
                if terms and self._uses[v] == 1 and v.aval.shape == shape:  # a literal has no terms, nor a hash
                    sum_terms += [replace(term, sign=sign * term.sign, has_other_terms=True) for term in terms]
            return [tuple(sum_terms)]
        for term in (*operand_terms[0], *operand_terms[1]) if len(parameter_origins[0]) == 1 else ():
            (bias,) = parameter_origins[0]
            self._set_loops(bias.leaf)
            bias_sum = _BiasSum(term.weight, bias, term.sign * signs[0] * signs[1], shape)
            self.sums.setdefault(term.weight.leaf, []).append(bias_sum)
        return [()]


def _axes_of_result(product: Any, side: int, view: MatrixView, eqn: Any) -> tuple[AxisFactors, ...]:
    """For each axis of a product, the factors of the weight's axes that it consists of."""
    ndim = len(eqn.outvars[0].aval.shape)
    if isinstance(product, DotProduct):
        parts = dict(zip(product.result_axes(side).values(), view.free, strict=True))
    else:
        parts = {product.numbers.out_spec[1] if isinstance(product, ConvProduct) else ndim - 1: view.free[-1]}
    return tuple(parts.get(axis, ()) for axis in range(ndim))


def _bias_of_sum(
    program: Any, stack: int, turns: int, bias_sum: _BiasSum, loops: Mapping[int, tuple[int, ...]]
) -> BiasSite | str:
    """The bias of a sum, or why it is none."""
    leaf = bias_sum.bias.leaf
    path, shape = program.paths[leaf], program.shapes[leaf]
    if not bias_sum.bias.is_intact:
        return f"its bias {path!r} is computed with before it is added"
    if len(program.uses[leaf]) != 1:
        return f"its bias {path!r} is used elsewhere, too"
    bias_stack = stack_ndim(shape, MatrixView(bias_sum.bias.axes, ()))
    if stack != turns or bias_stack != turns or loops[leaf] != loops[bias_sum.weight.leaf]:
        return f"its bias {path!r} is not that of each layer of the stack alone"
    axes = []
    bias_axes = bias_sum.bias.axes or ((),) * len(bias_sum.shape)  # a number without axes is not broadcast before a sum
    for size, weight_axis, bias_axis in zip(bias_sum.shape, bias_sum.weight.axes, bias_axes, strict=True):
        if bias_axis and (_axis_length(weight_axis) != size or _axis_length(bias_axis) != size or not weight_axis):
            return f"its bias {path!r} has an axis that the weight has not"
        if bias_axis:
            axes.append((_without_stack(weight_axis, stack), _without_stack(bias_axis, bias_stack)))
    layer_shape = shape[bias_stack:]
    if math.prod(_axis_length(own) for _, own in axes) != math.prod(layer_shape):
        return f"only a part of its bias {path!r} is added"
    return BiasSite(leaf, bias_sum.sign, tuple(layer_shape), tuple(axes))


def _axis_length(parts: AxisFactors) -> int:
    return math.prod(part.size for part in parts)


def _without_stack(parts: AxisFactors, stack: int) -> AxisFactors:
    """Parts of a parameter without the axes of a stack in front."""
    return tuple(type(part)(part.axis - stack, part.size, part.inner) for part in parts)


@partial(always_jit, static_argnames=("layout",))
def mean_errors(
    weight: Array, rounded_weight: Array, mean: Array, shift: Array | None, *, layout: MatrixLayout
) -> tuple[Array, Array]:
    """The means of W x - W' x and of W x - W' y for inputs y of a rounded weight W': two of (batch, kept).

    Args:
        weight: the weight W.
        rounded_weight: W'.
        mean: of the inputs y, (batch, summed).
        shift: of x - y; None: they are the same.
        layout: the weight as matrices.
    """
    weight_matrices, error_matrices = (layout.lay(v).astype(mean.dtype) for v in (weight, weight - rounded_weight))

    def product(x: Array, w: Array) -> Array:
        return jnp.einsum("bk,bkn->bn", x, w, precision=lax.Precision.HIGHEST)

    rounding_error = product(mean, error_matrices)
    return rounding_error, rounding_error if shift is None else rounding_error + product(shift, weight_matrices)


def bias_means(values: np.ndarray, counts: np.ndarray, bias_indexes: np.ndarray, bias_size: int) -> np.ndarray:
    """The mean of the results to which each number of a bias is added; zero if it is added to none.

    Args:
        values: of the results, (batch, kept).
        counts: how many rows each index of the batch has, (batch,).
        bias_indexes: of `BiasSite.result_entries`.
        bias_size: how many numbers the bias has.
    """
    weights = np.broadcast_to(counts[:, None], values.shape).ravel()
    weight_sums = np.bincount(bias_indexes.ravel(), weights=weights, minlength=bias_size)
    value_sums = np.bincount(bias_indexes.ravel(), weights=weights * values.ravel(), minlength=bias_size)
    return value_sums / np.where(weight_sums > 0, weight_sums, 1)
