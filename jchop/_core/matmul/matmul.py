"""Matrix products with an emulated accumulator: the arithmetic of one tile, and the body for every backend.

The first half adds and multiplies tiles under a `MatmulPlan`, without matrices; kernels use it on their tiles. Random
words are indexed by (step, output element), so they do not depend on the tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, FLOAT32, Carrier, enable_x64_for
from jchop._core.arithmetic.basic import add_and_round, multiply_add_and_round, multiply_and_round
from jchop._core.arithmetic.exact import ValueRange, carrier_range, product_range, range_of
from jchop._core.matmul import aligned
from jchop._core.matmul.aligned import TensorCoreUnit
from jchop._core.rounding.elements import round_to_spec
from jchop._core.rounding.random_bits import SEEDS, random_words_of_width
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._core.xla.sizes import are_static
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

StepIndex = Array | int
#: The random words of a tile: draw("product" or "accumulate", step); called only if that rounding is stochastic.
WordSource = Callable[[str, StepIndex], Array]


@dataclass(frozen=True)
class MatmulPlan:
    """The static data of a sum of `k` products on `carrier`; the operands are already rounded."""

    spec: MatmulSpec
    carrier: Carrier
    k: int
    backend: Backend = PORTABLE
    #: Whether the sums after each step of the outermost loop are the result, along a first axis.
    trace: bool = False

    @property
    def draws(self) -> bool:
        """Whether a product or a sum draws random words."""
        return spec_draws(self.spec.product) or spec_draws(self.spec.accumulate)

    @cached_property
    def operand(self) -> ValueRange:
        """The range of the operands."""
        return range_of(self.spec.operands, self.carrier)

    @cached_property
    def product(self) -> ValueRange:
        """The range of a product P(a b)."""
        if self.spec.product is not None:
            return range_of(self.spec.product, self.carrier)
        exact, whole = product_range(self.operand, self.operand), carrier_range(self.carrier)
        fits = exact.quantum >= whole.quantum and exact.precision <= whole.precision and exact.top <= whole.top
        return exact if fits else whole

    @cached_property
    def accumulator(self) -> ValueRange:
        """The range of a sum."""
        return range_of(self.spec.accumulate, self.carrier)

    @cached_property
    def dot(self) -> ValueRange:
        """The range of the carrier's own dot of a block, for any order of its sums.

        Sums of multiples of 2^q stay multiples of 2^q if they are rounded to fewer bits. One bit more than the sum of
        magnitudes is enough for b roundings. Each goes up by at most half a unit in the last place: (1 + 2^-p)^b < 2.
        """
        exact, whole = product_range(self.operand, self.operand), carrier_range(self.carrier)
        length = min(self.spec.order.block or self.k, self.k)
        top = exact.top + max(length - 1, 0).bit_length() + 1
        if top > whole.top or length >= 1 << (whole.precision - 1):
            return whole
        return ValueRange(max(exact.quantum, whole.quantum), whole.precision, top)


def spec_draws(spec: Spec | None) -> bool:
    """Whether a rounding under `spec` takes random words."""
    return spec is not None and spec.rounding.stochastic


# -- the arithmetic of a tile ------------------------------------------------------------------------------------------


def round_products(x: Array, y: Array, plan: MatmulPlan, draw: WordSource | None, step: StepIndex) -> Array:
    """P(x y), elementwise; `x` and `y` broadcast against each other."""
    spec = plan.spec.product
    word = _step_word(spec, draw, "product", step)
    x, y = jnp.broadcast_arrays(x, y)
    return multiply_and_round(x, y, spec, plan.carrier, word, plan.operand, plan.operand)


def _rounded_sum(first: str, second: str) -> Callable[..., Array]:
    """The function A(x + y) of terms whose ranges are two fields of the plan."""

    def add(x: Array, y: Array, plan: MatmulPlan, draw: WordSource | None, step: StepIndex) -> Array:
        spec, ranges = plan.spec.accumulate, (getattr(plan, first), getattr(plan, second))
        return add_and_round(x, y, spec, plan.carrier, _step_word(spec, draw, "accumulate", step), *ranges)

    return add


#: A sum and a product; two sums, of which the second is of a block, or of a part in pairwise order; two products, the
#: lowest sums of pairwise order; a sum and the carrier's dot of a block.
accumulate_product = _rounded_sum("accumulator", "product")
combine_sums = _rounded_sum("accumulator", "accumulator")
add_products = _rounded_sum("product", "product")
add_dot = _rounded_sum("accumulator", "dot")


def multiply_accumulate(
    c: Array, x: Array, y: Array, plan: MatmulPlan, draw: WordSource | None, step: StepIndex
) -> Array:
    """A(c + P(x y)), or A(c + x y) if the spec is fused; product and sum have the same step."""
    if not plan.spec.fused:
        return accumulate_product(c, round_products(x, y, plan, draw, step), plan, draw, step)
    spec = plan.spec.accumulate
    word = _step_word(spec, draw, "accumulate", step)
    x, y = jnp.broadcast_arrays(x, y)
    return multiply_add_and_round(x, y, c, spec, plan.carrier, word, plan.operand, plan.operand, plan.accumulator)


def round_single_product(p: Array, plan: MatmulPlan, draw: WordSource | None, step: StepIndex) -> Array:
    """A(p): the pairwise sum of one product."""
    spec = plan.spec.accumulate
    return p if spec is None else round_to_spec(p, spec, plan.carrier, _step_word(spec, draw, "accumulate", step))


def _step_word(spec: Spec | None, draw: WordSource | None, stream: str, step: StepIndex) -> Array | None:
    return draw(stream, step) if draw is not None and spec_draws(spec) else None


# -- random words ------------------------------------------------------------------------------------------------------

#: The index of the first of the six seeds of each stream among the twelve.
_FIRST_SEEDS = {"product": 0, "accumulate": SEEDS}


def make_word_source(seeds: Sequence[Array] | Array, index: Array, carrier: Carrier) -> WordSource:
    """The words of a tile, whose elements have the flat output `index` (uint32): the stream's at step 2^32 + index.

    Args:
        seeds: the twelve seeds, six of the products and six of the sums (an array, a sequence or a reference).
        index: flat C-order index of each element of the tile in the whole output, uint32.
        carrier: float64 gets words of 64 bits.
    """

    def draw(stream: str, step: StepIndex) -> Array:
        six = [seeds[_FIRST_SEEDS[stream] + i] for i in range(SEEDS)]
        high = step if isinstance(step, int) else step.astype(jnp.uint32)
        return random_words_of_width(six, index, high, carrier.work_width)

    return draw


# -- the body ----------------------------------------------------------------------------------------------------------

#: Steps in one compiled loop body; sums are loaded and stored once for all of them. More steps need too many registers,
#: and more time to compile.
_STEPS_PER_ITERATION = 2
#: The number of products in an unrolled tree, a power of two.
_TREE_PRODUCTS = 4


def matmul_body(
    a: Array, b: Array, *more: Array, spec: MatmulSpec, backend: Backend = PORTABLE, trace: bool = False
) -> Array:
    """The product of matrices, with the roundings and the order of sums of `spec`.

    Args:
        a: shape (batch, m, k), float32 or float64, with values already rounded to ``spec.operands``; of a scaled format
            the elements alone.
        b: shape (batch, k, n), of the same dtype, rounded too.
        more: for a scaled format the scales of groups, (batch, m, groups) and (batch, groups, n), of the same dtype.
            Then twelve uint32, the words of `seed_words` for the products and then for the sums, if either draws.
        spec: the arithmetic.
        backend: of the program; aligned sums may use its float64.
        trace: for the sums after each product, block or promoted part, in place of the last alone. Not for pairwise.

    Returns:
        Shape (batch, m, n), the dtype of `a`; with `trace` (steps, batch, m, n).
    """
    if not are_static(a.shape[2:]):
        raise NotImplementedError(
            f"shape={tuple(a.shape)}: a sum in a named order has a known number of steps, so none runs along a "
            "symbolic length, here the last one; export the program for known lengths"
        )
    plan = MatmulPlan(spec, CARRIERS[a.dtype.name], a.shape[2], backend, trace)
    # +0 for each output element, with the sharding and the varying axes of the product, behind a barrier because of the
    # quirk `zero_plus_minus_zero` (`_core/xla/cpu.py`).
    like = jnp.sum(a, 2)[:, :, None] + jnp.sum(b, 1)[:, None, :]
    bits = lax.bitcast_convert_type(like, jnp.dtype(f"uint{8 * like.dtype.itemsize}"))
    zero = lax.optimization_barrier(lax.bitcast_convert_type(bits & bits.dtype.type(0), like.dtype))
    if not plan.k:
        return jnp.zeros((0, *zero.shape), zero.dtype) if trace else zero
    scales, seeds = (more[:2], more[2:]) if spec.group else ((), more)
    draw = make_word_source(seeds[0], _output_index(zero), plan.carrier) if seeds else None
    x, y = jnp.moveaxis(a, 2, 0), jnp.moveaxis(b, 1, 0)
    if scales:
        over = [jnp.repeat(jnp.moveaxis(s, i, 0), spec.group, 0)[: plan.k] for s, i in zip(scales, (2, 1), strict=True)]
        x, y = zip((x, y), over, strict=True)
    with enable_x64_for(jnp.float64 if backend.float64 and spec.order.aligned else a.dtype):
        return _ORDER_BODIES[spec.order.kind](x, y, zero, plan, draw)


def _output_index(zero: Array) -> Array:
    """The C-order index of each output element."""
    strides = (zero.shape[1] * zero.shape[2], zero.shape[2], 1)
    axes = [lax.broadcasted_iota(jnp.uint32, zero.shape, axis) * np.uint32(s) for axis, s in enumerate(strides)]
    return (axes[0] + axes[1] + axes[2]) | jnp.zeros_like(zero, jnp.uint32)


def _outer_factors(x: Array, y: Array, i: int) -> tuple[Array, Array]:
    """The factors of product `i` of each output element; `x` is (k, batch, m), `y` (k, batch, n)."""
    return x[i][:, :, None], y[i][:, None, :]


def _add_to_step(step: StepIndex, more: int) -> StepIndex:
    return step + more if isinstance(step, int) else step + np.uint32(more)


def _multiply_step(step: StepIndex, length: int) -> StepIndex:
    return step * length if isinstance(step, int) else step * np.uint32(length)


def _in_chunks(
    body: Callable[[Any, Any, Any, StepIndex], Any], state: Any, x: Any, y: Any, length: int, trace: bool = False
) -> Any:
    """`state` after body(state, part of x, part of y, index) over parts of `length`; the last may be shorter.

    `x` and `y` are arrays, or trees of arrays of one length. With `trace`, the states after each part, stacked.
    """
    k = jax.tree.leaves(x)[0].shape[0]
    full_chunks = k // length

    def map_both(change: Callable[[Array], Array], pair: tuple[Any, Any] = (x, y)) -> tuple[Any, Any]:
        return jax.tree.map(change, pair[0]), jax.tree.map(change, pair[1])

    if trace:
        parts = map_both(lambda v: v[: full_chunks * length].reshape(full_chunks, length, *v.shape[1:]))

        def record(state: Any, part: Any) -> tuple[Any, Any]:
            return (new := body(state, *part)), new

        state, states = lax.scan(record, state, (*parts, jnp.arange(full_chunks, dtype=jnp.uint32)))
        if k % length:
            last = body(state, *map_both(lambda v: v[full_chunks * length :]), full_chunks)
            states = jnp.concatenate([states, last[None]])
        return states
    if full_chunks == 1:
        state = body(state, *map_both(lambda v: v[:length]), 0)
    elif full_chunks > 1:
        parts = map_both(lambda v: v[: full_chunks * length].reshape(full_chunks, length, *v.shape[1:]))

        # The parts of the next iteration are sliced in this one: `slice_fused_into_loop` in `xla/cpu.py`.
        def iterate(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state, current = carry
            following = map_both(lambda v: lax.dynamic_index_in_dim(v, i + np.uint32(1), 0, keepdims=False), parts)
            return body(state, current[0], current[1], i), following

        first = map_both(lambda v: v[0], parts)
        state = lax.fori_loop(np.uint32(0), np.uint32(full_chunks), iterate, (state, first))[0]
    if k % length:
        state = body(state, *map_both(lambda v: v[full_chunks * length :]), full_chunks)
    return state


def _sequential_sum(
    x: Array, y: Array, c: Array, plan: MatmulPlan, draw: WordSource | None, first: StepIndex = 0
) -> Array:
    """The sum of `c` (batch, m, n) and the products of `x` (k, batch, m) and `y` (k, batch, n), one after the other.

    `first` is the step of the first product, under which it draws.
    """
    steps = 1 if plan.trace else _STEPS_PER_ITERATION

    def add_part(c: Array, x: Array, y: Array, part: StepIndex) -> Array:
        start = first + _multiply_step(part, steps)
        for i in range(x.shape[0]):
            c = multiply_accumulate(c, *_outer_factors(x, y, i), plan, draw, _add_to_step(start, i))
        return c

    return _in_chunks(add_part, c, x, y, steps, plan.trace)


def _blockwise_sum(x: Array, y: Array, zero: Array, plan: MatmulPlan, draw: WordSource | None) -> Array:
    length, of_block = plan.spec.order.block or plan.k, replace(plan, trace=False)

    def add_block(c: Array, x: Array, y: Array, block: StepIndex) -> Array:
        block_sum = _sequential_sum(x, y, zero, of_block, draw, _multiply_step(block, length))
        return combine_sums(c, block_sum, plan, draw, _add_to_step(block, plan.k))

    return _in_chunks(add_block, zero, x, y, length, plan.trace)


def _matrix_unit_sum(x: Array, y: Array, zero: Array, plan: MatmulPlan, draw: WordSource | None) -> Array:
    def add_block(c: Array, x: Array, y: Array, block: StepIndex) -> Array:
        block_dot = lax.dot_general(x, y, (((0,), (0,)), ((1,), (1,))), precision=lax.Precision.HIGHEST)
        return add_dot(c, block_dot, plan, draw, block)

    return _in_chunks(add_block, zero, x, y, plan.spec.order.block or plan.k, plan.trace)


def _pairwise_sum(x: Array, y: Array, zero: Array, plan: MatmulPlan, draw: WordSource | None) -> Array:
    """Trees of a few leaves each, added like the digits of a binary counter: sums of equal size are merged."""
    if plan.k == 1:
        return round_single_product(round_products(*_outer_factors(x, y, 0), plan, draw, 0), plan, draw, 0)
    leaves = min(_TREE_PRODUCTS, 1 << (plan.k.bit_length() - 1))
    trees, leftover = divmod(plan.k, leaves)

    def push(sums: Array, x: Array, y: Array, part: StepIndex) -> Array:
        """Digit d of the counter is the sum of 2^d trees, `sums[d]`; the last tree starts at `part`."""
        tree_index = jnp.uint32(part)

        def has_carry(state: tuple[Array, Array]) -> Array:
            return (tree_index >> state[0]) & np.uint32(1) != 0

        def merge(state: tuple[Array, Array]) -> tuple[Array, Array]:
            digit, later = state
            earlier = lax.dynamic_index_in_dim(sums, digit, 0, keepdims=False)
            start = (tree_index + np.uint32(1) - (np.uint32(1) << digit)) * np.uint32(leaves)
            return digit + np.uint32(1), combine_sums(earlier, later, plan, draw, start)

        tree = _tree_sum(x, y, plan, draw, _multiply_step(part, leaves))
        digit, total = lax.while_loop(has_carry, merge, (jnp.uint32(0), tree))
        return lax.dynamic_update_index_in_dim(sums, total, digit, 0)

    sums = jnp.stack([zero] * trees.bit_length())
    sums = _in_chunks(push, sums, x[: trees * leaves], y[: trees * leaves], leaves)
    # At the end, the digits of the number of trees and a part of a tree are left.
    start, add_rest = trees * leaves, _PART_SUMS[False, leftover == 1]
    total = _tree_sum(x[start:], y[start:], plan, draw, start) if leftover else None
    for digit in range(trees.bit_length()):
        if trees >> digit & 1:
            total = sums[digit] if total is None else add_rest(sums[digit], total, plan, draw, start)
            start, add_rest = start - (leaves << digit), combine_sums
    assert total is not None
    return total


def _blockwise_pairwise_sum(x: Array, y: Array, zero: Array, plan: MatmulPlan, draw: WordSource | None) -> Array:
    length = plan.spec.order.block or plan.k

    def add_block(c: Array, x: Array, y: Array, block: StepIndex) -> Array:
        block_sum = _tree_sum(x, y, plan, draw, _multiply_step(block, length))
        return _PART_SUMS[False, x.shape[0] == 1](c, block_sum, plan, draw, _add_to_step(block, plan.k))

    return _in_chunks(add_block, zero, x, y, length, plan.trace)


def _tensor_core_sum(x: Any, y: Any, zero: Array, plan: MatmulPlan, draw: WordSource | None) -> Array:
    """`x` and `y` are operands, or pairs of elements and the scales of each."""
    order = plan.spec.order
    block = order.block or plan.k
    unit = TensorCoreUnit(plan.spec, min(block, plan.k))
    x, y, zero = jax.tree.map(lambda v: v.astype(jnp.float32), (x, y, zero))
    uses_float64 = plan.backend.float64 and aligned.suits_doubles(unit)
    split = aligned.double_factors if uses_float64 else aligned.limb_factors
    x_factors, y_factors = (split(v[0], unit, v[1]) if isinstance(v, tuple) else split(v, unit) for v in (x, y))

    def add_blocks(c: Array, x: Any, y: Any, first: StepIndex) -> Array:
        def add_block(c: Array, x: Any, y: Any, index: StepIndex) -> Array:
            # The factors of each product of a block, from trees of arrays as `_outer_factors` gives them.
            count = jax.tree.leaves(x)[0].shape[0]
            x_factors = [jax.tree.map(lambda v: v[i][:, :, None], x) for i in range(count)]  # noqa: B023
            x, y = x_factors, [jax.tree.map(lambda v: v[i][:, None, :], y) for i in range(count)]  # noqa: B023
            if uses_float64:
                return aligned.fused_add_doubles(c, x, y, unit)
            step = _add_to_step(index, first) if isinstance(first, int) else first + jnp.uint32(index)
            return aligned.fused_add_limbs(c, x, y, unit, _step_word(plan.spec.accumulate, draw, "accumulate", step))

        trace = plan.trace and order.promote_every is None
        c = _in_chunks(add_block, c.astype(jnp.float64) if uses_float64 else c, x, y, block, trace)
        return aligned.narrow_doubles(c) if uses_float64 else c

    if order.promote_every is None:
        return add_blocks(zero, x_factors, y_factors, 0).astype(plan.carrier.name)
    blocks_per_part = order.promote_every // block
    float32_range = carrier_range(FLOAT32)

    def add_part(total: Array, x: Any, y: Any, part: StepIndex) -> Array:
        c = add_blocks(zero, x, y, _multiply_step(part, blocks_per_part))
        return add_and_round(total, c, None, FLOAT32, None, float32_range, float32_range)

    return _in_chunks(add_part, zero, x_factors, y_factors, order.promote_every, plan.trace).astype(plan.carrier.name)


def _tree_sum(x: Array, y: Array, plan: MatmulPlan, draw: WordSource | None, first: StepIndex) -> Array:
    """The pairwise sum of a few products, unrolled; for one product, the product itself."""
    n = x.shape[0]
    if n == 1:
        return round_products(*_outer_factors(x, y, 0), plan, draw, first)
    half = 1 << ((n - 1).bit_length() - 1)
    middle = _add_to_step(first, half)
    left, right = _tree_sum(x[:half], y[:half], plan, draw, first), _tree_sum(x[half:], y[half:], plan, draw, middle)
    return _PART_SUMS[half == 1, n - half == 1](left, right, plan, draw, middle)


#: The sum of two parts, by whether the left part, and the right part, is a single product.
_PART_SUMS = {(True, True): add_products, (False, True): accumulate_product, (False, False): combine_sums}

_ORDER_BODIES = {
    "sequential": _sequential_sum,
    "blocked": _blockwise_sum,
    "pairwise": _pairwise_sum,
    "matrix_unit": _matrix_unit_sum,
    "aligned": _tensor_core_sum,
    "aligned_apart": _tensor_core_sum,
    "aligned_halves": _tensor_core_sum,
    "aligned_sums": _tensor_core_sum,
    "blocked_pairwise": _blockwise_pairwise_sum,
}
