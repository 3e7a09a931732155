"""Runs a program and sums up the inputs of its products, separately for each iteration of its loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._core.elementary import pairs
from jchop._core.elementary.pairs import FloatPair
from jchop._program.control import ScanOrder, ScanTurn, as_jax_value, without_weak_types
from jchop._program.run import Runner, interpret
from jchop._program.step import ProgramPlan
from jchop._quantized.products.code_products import patch_rows
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.operand_layout import OperandLayout, rotate_along_sum, round_in_layout
from jchop._quantized.products.product import ConvProduct, OperandSwap, RaggedProduct
from jchop._quantized.products.rule import is_stochastic
from jchop._quantized.program.runner import QuantizedRunner
from jchop.ptq._data.sites import WeightSite, WeightSites, runs_step_by_step, scanned_leaves

#: How many rows one matrix product sums over; sums of more are sums of pairs.
_ROWS_PER_PRODUCT = 1024


class InputSums(NamedTuple):
    """Sums over the rows x (tokens) of the matrices of a product; y are the rows of the other trajectory.

    Args:
        gram: of x x^T, (batch, summed, summed).
        cross: of x (y - x)^T, in the same shape; None if there is one trajectory.
        total: of x, (batch, summed).
        shift: of y - x; None if there is one trajectory.
        magnitude: of |x|, (batch, summed).
        largest: the largest |x|.
        count: how many rows there were, (batch,).
    """

    gram: FloatPair
    cross: FloatPair | None
    total: FloatPair
    shift: FloatPair | None
    magnitude: FloatPair
    largest: Array
    count: FloatPair


def pair_value(pair: FloatPair) -> Array:
    """A pair as one number."""
    return pair.hi + pair.lo


def add_sums(a: InputSums, b: InputSums) -> InputSums:
    """The sums over the rows of both."""

    def add(x: Any, y: Any) -> Any:
        return x + y if isinstance(x, FloatPair) else jnp.maximum(x, y)

    return jax.tree.map(add, a, b, is_leaf=lambda v: isinstance(v, FloatPair))


class InputMeans(NamedTuple):
    """`InputSums` as means over the rows; zeros where there was none."""

    gram: Array
    cross: Array | None
    mean: Array
    shift: Array | None
    magnitude: Array
    rows: Array


def input_means(sums: InputSums) -> InputMeans:
    """The means over the rows."""
    rows = pair_value(sums.count)
    divisor = jnp.maximum(rows, 1)

    def mean(pair: FloatPair) -> Array:
        return pair_value(pair) / divisor.reshape(*divisor.shape, *[1] * (pair.hi.ndim - divisor.ndim))

    pairs_of_means = (sums.gram, sums.cross, sums.total, sums.shift, sums.magnitude)
    return InputMeans(*(None if pair is None else mean(pair) for pair in pairs_of_means), rows)  # type: ignore[arg-type]


@partial(jax.jit, donate_argnums=0)
def means_in_place(gram: Array, other_sums: InputSums) -> InputMeans:
    """`input_means`, in the memory of the leading numbers of the sums `gram`, which `other_sums` lack."""
    return input_means(other_sums._replace(gram=other_sums.gram._replace(hi=gram)))


def sums_over_rows(x: Array, y: Array | None = None, mask: Array | None = None) -> InputSums:
    """The sums over rows.

    A product of matrices sums over `_ROWS_PER_PRODUCT` rows in the carrier; the sums of these are compensated.

    Args:
        x: (batch, rows, summed).
        y: of the other trajectory, in the same shape; default None.
        mask: which rows count, (batch, rows). Default: all.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    operands = [x] if y is None else [x, y.astype(x.dtype)]
    batch, rows, _ = x.shape
    if mask is not None:
        operands = [jnp.where(mask[..., None], v, 0) for v in operands]
    count = (jnp.full((batch,), rows) if mask is None else mask.sum(1)).astype(x.dtype)
    chunk_rows = min(_ROWS_PER_PRODUCT, max(rows, 1))
    padded = (jnp.pad(v, [(0, 0), (0, -rows % chunk_rows), (0, 0)]) for v in operands)
    chunks = [v.reshape(batch, -1, chunk_rows, v.shape[2]).swapaxes(0, 1) for v in padded]  # (chunks, batch, rows, ...)

    def add_chunk(earlier_sums: InputSums, chunk: list[Array]) -> tuple[InputSums, None]:
        return add_sums(earlier_sums, _chunk_sums(chunk, jnp.zeros_like(count))), None

    first_sums = _chunk_sums([v[0] for v in chunks], count)
    return lax.scan(add_chunk, first_sums, [v[1:] for v in chunks])[0] if rows > chunk_rows else first_sums


def _chunk_sums(operands: list[Array], count: Array) -> InputSums:
    """The sums over one chunk, of x and, if there is one, y."""

    def product(a: Array, b: Array) -> FloatPair:
        return pairs.pair_of_number(jnp.einsum("btk,btl->bkl", a, b, precision=lax.Precision.HIGHEST))

    x, *y = operands
    magnitude = jnp.abs(x)
    cross = product(x, y[0] - x) if y else None
    total, shift = pairs.pair_of_number(x.sum(1)), pairs.pair_of_number((y[0] - x).sum(1)) if y else None
    magnitudes = pairs.pair_of_number(magnitude.sum(1)), magnitude.max(1, initial=0)
    return InputSums(product(x, x), cross, total, shift, *magnitudes, pairs.pair_of_number(count))


#: Primitives that choose an order, or an expert, by data.
_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))


class Lanes(tuple):
    """The values of one variable, in each trajectory."""


jax.tree_util.register_pytree_node(Lanes, lambda lanes: (tuple(lanes), None), lambda _, values: Lanes(values))


@dataclass(eq=False)
class Collector(Runner):
    """Runs a program on several trajectories at once, equation by equation, and sums up the inputs of products.

    All trajectories take the branches, the order and the experts that the last one chooses. So a row of an input
    is one sample in all of them.

    Args:
        lanes: the runner of each trajectory; the sums are of the last one, and beside it of the first.
        roundings: of the products of the last one.
        sites: the products.
        leaves: the indexes of the parameters whose inputs are summed up.
    """

    lanes: Sequence[Runner]
    roundings: dict[int, ProductRoundings]
    sites: WeightSites
    leaves: frozenset[int]
    _sums: dict[Any, InputSums] = field(default_factory=dict)
    _window: tuple[Any, int] | None = None
    _layer_window: tuple[Any, int] | None = None  # `_window`, which stays set within loops
    _in_window: Any = None  # whether the iteration that is traced is within the window

    differentiates = False

    def collect(
        self, plan: ProgramPlan, values: Sequence[Any], overrides: Sequence[Mapping[int, Any]], seeds: Any = None,
        window_start: Any = None, *, window_size: int | None = None,
    ) -> dict[Any, InputSums]:  # fmt: skip
        """The sums of a program, by the index of the parameter.

        Args:
            plan: the program.
            values: its arguments.
            overrides: the arguments that each trajectory has changed, by their index.
            seeds: of random roundings.
            window_start: if only a window of turns is summed, its first turn of the outermost loop over a stack of each
                parameter, or of its constant indexes. Default: all.
            window_size: how many turns these are.
        """
        self._window = self._layer_window = None if window_size is None else (window_start, window_size)
        indexes = {i for changes in overrides for i in changes}
        args = [Lanes(changes.get(i, x) for changes in overrides) if i in indexes else x for i, x in enumerate(values)]
        try:
            return self._collected(partial(interpret, self, plan, seeds, args))[1]
        finally:
            self._window = self._layer_window = None

    def _collected(self, run: Callable[[], Any]) -> tuple[Any, dict[Any, InputSums]]:
        """The results of a program within, and its sums."""
        outer_sums, self._sums = self._sums, {}
        try:
            return run(), self._sums
        finally:
            self._sums = outer_sums

    def finish(self, value: Any, seeds: Any) -> Lanes:
        """A result of a program."""
        return Lanes(map(as_jax_value, value if isinstance(value, Lanes) else (value,) * len(self.lanes)))

    def _add_sums(self, leaf: Any, sums: InputSums) -> None:
        self._sums[leaf] = add_sums(self._sums[leaf], sums) if leaf in self._sums else sums

    def _add_in_window(self, leaf: Any, compute_sums: Callable[[], InputSums]) -> None:
        """Add sums; outside the window they are zeros, and not computed."""
        self._add_sums(leaf, compute_sums() if self._in_window is None else _sums_if(self._in_window, compute_sums))

    def _add_layer(self, leaf: int, indexes: tuple[int, ...], compute_sums: Callable[[], InputSums]) -> None:
        """Add sums to the sums of one layer of a stack, if the layer is within the window."""
        length, *other_lengths = self.sites.stacks[leaf]
        slot, *other_indexes = indexes
        if self._layer_window is None:
            sums = compute_sums()
        else:
            start, length = self._layer_window
            slot = _window_slot(slot - start, length)
            sums = _sums_if(slot < length, compute_sums)
        totals = self._sums.get(leaf)
        if totals is None:
            totals = jax.tree.map(lambda v: jnp.zeros((length, *other_lengths, *v.shape), v.dtype), sums)
        index = (slot, *other_indexes)
        new_sums = add_sums(jax.tree.map(lambda v: v[index], totals), sums)
        self._sums[leaf] = jax.tree.map(lambda v, layer_sum: v.at[index].set(layer_sum, mode="drop"), totals, new_sums)

    # -- equations -----------------------------------------------------------------------------------------------------

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """The results of an equation in each trajectory; the inputs of its sites are added to the sums first."""
        by_lane = self._args_by_lane(args)
        for site in self.sites.of_step.get(id(part), (0, ()))[1]:
            if site.leaf in self.leaves:
                self._add_input(part, site, by_lane)
        outs = self._run_each("run", part, seeds, by_lane)
        return self._align_choices(part.eqn, by_lane, outs) if _is_choice(part.eqn) else outs

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A step with inner programs; run equation by equation if they have a site, or a choice of all lanes."""
        if runs_step_by_step(step) and any(map(self._has_sites, step.inner)):
            return super().control(step, seeds, [self.finish(x, seeds) for x in args])
        return self._run_each("control", step, seeds, self._args_by_lane(args))

    def _has_sites(self, plan: ProgramPlan) -> bool:
        sites = (site for step in plan.walk() for site in self.sites.of_step.get(id(step), (0, ()))[1])
        aligns = len(self.lanes) > 1 and any(_is_choice(step.eqn) for step in plan.walk())
        return aligns or any(site.leaf in self.leaves for site in sites)

    def _args_by_lane(self, args: Sequence[Any]) -> list[list[Any]]:
        return [[x[i] if isinstance(x, Lanes) else x for x in args] for i in range(len(self.lanes))]

    def _run_each(self, method_name: str, step: Any, seeds: Any, by_lane: Sequence[list[Any]]) -> list[Any]:
        outs = [getattr(lane, method_name)(step, seeds, args) for lane, args in zip(self.lanes, by_lane, strict=True)]
        return [Lanes(values) for values in zip(*outs, strict=True)]

    def _align_choices(self, eqn: Any, by_lane: Sequence[list[Any]], outs: list[Any]) -> list[Any]:
        """The results of a choice, with the order of the last trajectory in all of them."""
        params, last_args = eqn.params, by_lane[-1]
        if eqn.primitive.name == "sort" and len(last_args) > 1:
            axis = params["dimension"]
            positions = lax.broadcasted_iota(jnp.int32, last_args[0].shape, axis)
            *_, order = lax.sort([*last_args, positions], dimension=axis, is_stable=True, num_keys=params["num_keys"])
            return [Lanes(jnp.take_along_axis(x, order, axis) for x in lanes) for lanes in zip(*by_lane, strict=True)]
        if eqn.primitive.name in ("top_k", "approx_top_k"):
            order = outs[1][-1]
            axis = params.get("axis", params.get("reduction_dimension", -1))
            values = Lanes(jnp.take_along_axis(x, order, axis) for (x,) in by_lane)
            return [values, Lanes((order,) * len(by_lane))]
        pairs = zip(eqn.outvars, outs, strict=True)
        return [Lanes(x[-1:] * len(x)) if jnp.issubdtype(v.aval.dtype, jnp.integer) else x for v, x in pairs]

    # -- loops and branches --------------------------------------------------------------------------------------------

    def scan(self, step: Any, turn: ScanTurn, start: Any, xs: Any, order: ScanOrder) -> tuple[Any, Any]:
        """A loop: stacked parameters have sums for each turn; the sums of others run through the turns."""
        stacked_leaves = scanned_leaves(step)
        window = self._window if stacked_leaves & self.leaves else None

        def window_slot(iteration: Any) -> Any:
            assert window is not None
            index = iteration.astype(jnp.int32)
            return _window_slot((order.length - 1 - index if order.reverse else index) - window[0], window[1])

        def run_iteration(carry: Any, x: Any, iteration: Any) -> tuple[tuple[Any, Any], dict[Any, InputSums]]:
            outer_window = self._window, self._in_window
            if window is not None:
                self._window, self._in_window = None, window_slot(iteration) < window[1]
            try:
                return self._collected(partial(turn, carry, x, iteration))
            finally:
                self._window, self._in_window = outer_window

        start, first = without_weak_types(start), jax.eval_shape(lambda xs: jax.tree.map(lambda v: v[0], xs), xs)
        shapes = jax.eval_shape(lambda carry, x: run_iteration(carry, x, jnp.uint32(0))[1], start, first)
        stacked_shapes = {leaf: sums for leaf, sums in shapes.items() if leaf in stacked_leaves}
        shared_sums = {leaf: sums for leaf, sums in shapes.items() if leaf not in stacked_leaves}
        shared_sums = jax.tree.map(_zeros_of_shape, shared_sums)
        window_sums: dict[int, Any] = {}  # the turns of the window, which is written to in the loop
        if window is not None:
            size = window[1]
            window_sums = jax.tree.map(lambda v: jnp.zeros((size, *v.shape), v.dtype), stacked_shapes)

        def turn_with_sums(state: Any, x: Any, iteration: Any) -> tuple[Any, Any]:
            carry, earlier_sums, slots = state
            (carry, ys), sums = run_iteration(carry, x, iteration)
            new_sums = {leaf: add_sums(earlier_sums[leaf], sums[leaf]) for leaf in earlier_sums}
            stacked_sums = {leaf: value for leaf, value in sums.items() if leaf not in earlier_sums}
            if window is not None:
                slot = window_slot(iteration)
                write = lambda v, iteration_sum: v.at[slot].set(iteration_sum, mode="drop")  # noqa: E731
                slots, stacked_sums = jax.tree.map(write, slots, stacked_sums), {}
            return (carry, new_sums, slots), (ys, stacked_sums)

        state, (ys, stacked_sums) = super().scan(step, turn_with_sums, (start, shared_sums, window_sums), xs, order)
        for leaf, sums in (*stacked_sums.items(), *state[1].items(), *state[2].items()):
            self._add_sums(leaf, sums)
        return state[0], ys

    def switch(self, index: Any, branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
        """A branch: all trajectories take the branch of the last one, so that their values can be compared."""

        def collected(run: Callable[[Any], Any], values: Any) -> Any:
            return self._collected(partial(run, values))

        shapes: dict[int, Any] = {}
        for run in branches:
            shapes |= jax.eval_shape(partial(collected, run), operands)[1]

        def with_all_sums(run: Callable[[Any], Any], values: Any) -> Any:
            out, sums = collected(run, values)
            return out, jax.tree.map(_zeros_of_shape, shapes) | sums

        out, sums = super().switch(index[-1], [partial(with_all_sums, run) for run in branches], operands)
        for leaf, value in sums.items():
            self._add_sums(leaf, value)
        return out

    # -- products ------------------------------------------------------------------------------------------------------

    def _add_input(self, step: Any, site: WeightSite, by_lane: Sequence[list[Any]]) -> None:
        """Add the input of a product to the sums of its weight."""
        side = self.sites.of_step[id(step)][0]
        product = OperandSwap(step.product) if side == 0 else step.product
        inputs = [args[1 - side] for args in by_lane]
        how = self.roundings.get(id(step))
        if how is not None and how.left is not None and not is_stochastic(how.left):
            inputs[-1] = _round_input(product.forward.left, _as_floating(inputs[-1]), how)
        others = by_lane[-1][2:]
        kernel = by_lane[-1][side].shape
        x, *y = [_input_rows(product, site, _as_floating(v), kernel) for v in (inputs[-1], *inputs[:-1])]
        other_x = y[0] if y else None
        compute_sums = partial(sums_over_rows, x, other_x)
        if isinstance(step.product, RaggedProduct):
            has_stack = site.layout.matrix_shape[0] > 1  # else all groups have one matrix
            sizes = others[0] if has_stack else others[0].sum(keepdims=True)
            compute_sums = partial(_sums_by_group, x[0], None if other_x is None else other_x[0], sizes)
        indexes = self.sites.indexes.get((id(step), site.leaf))
        if indexes is None:
            self._add_in_window(site.leaf, compute_sums)
        else:
            self._add_layer(site.leaf, indexes, compute_sums)


class ErrorCollector(Collector):
    """Runs a program in full precision, and sums up squared results and errors of some steps on rounded parameters.

    Args:
        others: the uses of each parameter, as `WeightSites.others`.
    """

    def __init__(self, others: Mapping[int, Sequence[Any]]) -> None:
        self._operands: dict[int, list[tuple[tuple[int, int], int]]] = {}  # with the number of its use
        for leaf, uses in others.items():
            for number, (step, operand, _) in enumerate(uses):
                self._operands.setdefault(id(step), []).append(((leaf, number), operand))
        super().__init__([QuantizedRunner({})] * 3, {}, WeightSites(), frozenset())

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """One equation: in each lane if its operands depend on parameters alone, else in full precision only."""
        by_lane = self._args_by_lane(args)
        if not any(part.data):
            outs = self._run_each("run", part, seeds, by_lane)
        else:
            outs = self.lanes[0].run(part, seeds, by_lane[0])
        for key, operand in self._operands.get(id(part), ()):
            exact = by_lane[0]
            rounded_args = ([*exact[:operand], lane[operand], *exact[operand + 1 :]] for lane in by_lane[1:])
            result, *others = (self.lanes[0].run(part, seeds, lane)[0] for lane in (exact, *rounded_args))
            vectors = [_as_floating(v).reshape(-1) for v in (result, *(result - other for other in others))]
            self._add_in_window(key, partial(sums_over_rows, jnp.stack(vectors, -1)[None]))
        return outs

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A step with inner programs: in each lane without data, else in full precision only."""
        if runs_step_by_step(step):
            return super().control(step, seeds, args)
        if any(step.data):
            return self.lanes[0].control(step, seeds, self._args_by_lane(args)[0])
        return self._run_each("control", step, seeds, self._args_by_lane(args))

    def _has_sites(self, plan: ProgramPlan) -> bool:
        return True


def _is_choice(eqn: Any) -> bool:
    """Whether an equation makes integers, such as ranks and codes, from data that are no integers."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _CHOICES
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(after, jnp.integer) and not jnp.issubdtype(before, jnp.integer)


def _window_slot(offset: Any, window_size: int) -> Array:
    """The offset if it lies within a window, else the window's size, at which writes are dropped."""
    return jnp.where((offset >= 0) & (offset < window_size), offset, window_size)


def _sums_if(in_window: Any, compute_sums: Callable[[], InputSums]) -> InputSums:
    """The sums, computed only if `in_window` holds; else zeros."""
    shapes = jax.eval_shape(compute_sums)
    return lax.cond(in_window, compute_sums, lambda: jax.tree.map(_zeros_of_shape, shapes))


def _zeros_of_shape(shape: Any) -> Array:
    return jnp.zeros(shape.shape, shape.dtype)


def _as_floating(x: Any) -> Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _round_input(layout: OperandLayout, x: Array, roundings: ProductRoundings) -> Array:
    """An input of a product as it is rounded; one that is rotated before, rotated back, since sums are of inputs."""
    rotation = roundings.forward_rotation
    rounded_x = round_in_layout(layout, x, roundings.left, rotation=rotation)
    if rotation is None:
        return rounded_x
    (unrotated_x,) = jax.linear_transpose(lambda v: rotate_along_sum(layout, v, rotation), x)(rounded_x)
    return unrotated_x


def _input_rows(product: Any, site: WeightSite, x: Array, kernel: Sequence[int]) -> Array:
    """The input of a product as (batch, rows, summed): an axis of the batch that the weight has not is one of rows."""
    if isinstance(product, ConvProduct):
        image, places = x.transpose(product.numbers.lhs_spec), [kernel[axis] for axis in product.numbers.rhs_spec[2:]]
        geometry = product.geometry(image.shape[2:], places)
        geometry = replace(geometry, flips_kernel=geometry.flips_kernel != site.flips_kernel)
        patches = geometry.patches(jnp.moveaxis(image, 1, -1), places)
        rows = patch_rows(patches, product.feature_groups)
        return rows.reshape(site.layout.matrix_shape[0], -1, rows.shape[-1])  # 1: all groups have one matrix
    if isinstance(product, RaggedProduct):
        return x[None]
    layout = product.forward.left
    matrices = layout.lay(x)
    batch_axes = [i for i in range(site.batch) if site.view.free[i]]
    order = [*batch_axes, *(i for i in range(matrices.ndim - 1) if i not in batch_axes), matrices.ndim - 1]
    return matrices.transpose(order).reshape(site.layout.matrix_shape[0], -1, matrices.shape[-1])


def _sums_by_group(x: Array, y: Array | None, group_sizes: Array) -> InputSums:
    """The sums over each group of rows."""
    group_of_row = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")

    def sums_of_group(group_index: Array) -> InputSums:
        sums = sums_over_rows(x[None], None if y is None else y[None], (group_of_row == group_index)[None])
        return jax.tree.map(lambda v: v[0], sums)

    return lax.map(sums_of_group, jnp.arange(group_sizes.shape[0]))
