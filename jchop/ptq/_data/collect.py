"""A program that is run while the inputs of its products are summed up, in every turn of its loops by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jchop._program.bind import bind
from jchop._program.control import as_jax_value, without_weak_types
from jchop._program.run import Runner, interpret
from jchop._program.step import ProgramPlan, carry_count
from jchop._quantized.products.contraction import ProductRoundings
from jchop._quantized.products.operand_layout import OperandLayout, rotate_along_sum, round_in_layout
from jchop._quantized.products.product import ConvProduct, OperandSwap, RaggedProduct
from jchop._quantized.products.rule import is_stochastic
from jchop.ptq._data.input_sums import InputSums, add_sums, sums_over_rows
from jchop.ptq._data.sites import INLINE_CALLS, WeightSite, WeightSites

Array = jax.Array

__all__ = ["Collector", "Lanes", "PlainRunner"]


#: Primitives that choose an order, or an expert, by data.
_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))


class PlainRunner(Runner):
    """A program as it is."""

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """One equation."""
        return bind(part.eqn.primitive, part.eqn.params, *args)

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """One equation, whatever it holds."""
        return bind(step.eqn.primitive, step.eqn.params, *args)


class Lanes(tuple):
    """The values of one variable, in each trajectory."""


class Collector(Runner):
    """Runs a program on several trajectories at once, equation by equation, and sums up the inputs of products.

    All trajectories take the branches, the order and the experts that the last one chooses, so that a row of an input
    is one sample in all of them.

    Args:
        lanes: what runs each trajectory; the sums are those of the last one, and beside it of the first.
        roundings: of the products of the last one.
        sites: the products.
        leaves: the indexes of the parameters whose inputs are summed up.
    """

    def __init__(
        self,
        lanes: Sequence[Runner],
        roundings: dict[int, tuple[ProductRoundings, int]],
        sites: WeightSites,
        leaves: frozenset[int],
    ) -> None:
        self.lanes, self.roundings, self.sites, self.leaves = tuple(lanes), roundings, sites, leaves
        self._sums: dict[int, InputSums] = {}
        self._window: tuple[Any, int] | None = None
        self._layers: tuple[Any, int] | None = None  # the same, also within loops
        self._inside: Any = None  # whether a turn is within the window, while one is traced

    def collect(
        self, plan: ProgramPlan, seeds: Any, values: Sequence[Any], window: tuple[Any, int] | None = None
    ) -> dict[int, InputSums]:
        """The sums of a program, by the index of the parameter.

        Args:
            plan: the program.
            seeds: of random roundings.
            values: its arguments.
            window: the first turn, and how many turns, of the outermost loop over a stack of each parameter, or of its
                constant indexes; the sums are those of these turns alone. Default: of all.
        """
        self._window = self._layers = window
        try:
            return self._run_and_collect(plan, seeds, values)[1]
        finally:
            self._window = self._layers = None

    def values(self, values: Sequence[Any], overrides: Sequence[Mapping[int, Any]]) -> list[Any]:
        """The arguments of a program, of which each trajectory has changed some, by their index."""
        some = {i for own in overrides for i in own}
        return [Lanes(own.get(i, x) for own in overrides) if i in some else x for i, x in enumerate(values)]

    def _run_and_collect(
        self, plan: ProgramPlan, seeds: Any, values: Sequence[Any]
    ) -> tuple[list[Lanes], dict[int, InputSums]]:
        outer, self._sums = self._sums, {}
        try:
            out = [self._lanes(value) for value in interpret(self, plan, seeds, values)]
            return out, self._sums
        finally:
            self._sums = outer

    def _lanes(self, value: Any) -> Lanes:
        return value if isinstance(value, Lanes) else Lanes((value,) * len(self.lanes))

    def _add(self, leaf: int, sums: InputSums) -> None:
        before = self._sums.get(leaf)
        self._sums[leaf] = sums if before is None else add_sums(before, sums)

    def _add_if_inside(self, leaf: int, make: Callable[[], InputSums]) -> None:
        """Add sums, which are zero, and not computed, in a turn that is not looked at."""
        self._add(leaf, make() if self._inside is None else _sums_if(self._inside, make))

    def _add_layer(self, leaf: int, indexes: tuple[int, ...], make: Callable[[], InputSums]) -> None:
        """Add sums to those of a layer of a stack, if it is looked at."""
        size, *rest = self.sites.stacks[leaf]
        place, *others = indexes
        if self._layers is None:
            sums = make()
        else:
            start, size = self._layers
            place = _window_slot(place - start, size)
            sums = _sums_if(place < size, make)
        totals = self._sums.get(leaf)
        if totals is None:
            totals = jax.tree.map(lambda v: jnp.zeros((size, *rest, *v.shape), v.dtype), sums)
        at = (place, *others)
        after = add_sums(jax.tree.map(lambda v: v[at], totals), sums)
        self._sums[leaf] = jax.tree.map(lambda v, one: v.at[at].set(one, mode="drop"), totals, after)

    # -- equations -----------------------------------------------------------------------------------------------------

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """One equation, in each trajectory."""
        by_lane = self._by_lane(args)
        for site in self.sites.of_step.get(id(part), (0, ()))[1]:
            if site.leaf in self.leaves:
                self._add_input(part, site, by_lane)
        outs = self._each("run", part, seeds, by_lane)
        return self._align_choices(part.eqn, by_lane, outs) if _chooses(part.eqn) else outs

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A step that holds programs, taken apart if one of their products is looked at, or a choice is in them."""
        if not any(self._has_sites(plan) for plan in step.inner):
            return self._each("control", step, seeds, self._by_lane(args))
        if step.name in INLINE_CALLS:
            inside = None if seeds is None else seeds.turn(step.number)
            return [self._lanes(value) for value in interpret(self, step.inner[0], inside, args)]
        if step.name == "scan":
            return self._scan(step, seeds, args)
        if step.name == "cond":
            return self._cond(step, seeds, args)
        return self._each("control", step, seeds, self._by_lane(args))

    def _has_sites(self, plan: ProgramPlan) -> bool:
        steps = list(plan.walk())
        site_lists = (self.sites.of_step.get(id(step), (0, ()))[1] for step in steps)
        if any(site.leaf in self.leaves for some in site_lists for site in some):
            return True
        return len(self.lanes) > 1 and any(_chooses(step.eqn) for step in steps)

    def _by_lane(self, args: Sequence[Any]) -> list[list[Any]]:
        return [[x[i] if isinstance(x, Lanes) else x for x in args] for i in range(len(self.lanes))]

    def _each(self, what: str, step: Any, seeds: Any, by_lane: Sequence[list[Any]]) -> list[Any]:
        outs = [getattr(lane, what)(step, seeds, args) for lane, args in zip(self.lanes, by_lane, strict=True)]
        return [Lanes(values) for values in zip(*outs, strict=True)]

    def _align_choices(self, eqn: Any, by_lane: Sequence[list[Any]], outs: list[Any]) -> list[Any]:
        """The results of a choice, with the order of the last trajectory in all of them."""
        params, last = eqn.params, by_lane[-1]
        if eqn.primitive.name == "sort" and len(last) > 1:
            axis = params["dimension"]
            places = lax.broadcasted_iota(jnp.int32, last[0].shape, axis)
            *_, order = lax.sort([*last, places], dimension=axis, is_stable=True, num_keys=params["num_keys"])
            return [Lanes(jnp.take_along_axis(x, order, axis) for x in some) for some in zip(*by_lane, strict=True)]
        if eqn.primitive.name in ("top_k", "approx_top_k"):
            order = outs[1][-1]
            axis = params.get("axis", params.get("reduction_dimension", -1))
            values = Lanes(jnp.take_along_axis(x, order, axis) for (x,) in by_lane)
            return [values, Lanes((order,) * len(by_lane))]
        whole = [jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.outvars]
        return [Lanes((x[-1],) * len(by_lane)) if i else x for i, x in zip(whole, outs, strict=True)]

    # -- loops and branches --------------------------------------------------------------------------------------------

    def _scan(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A loop: the sums of stacked parameters are those of each turn, those of others run through the turns."""
        params = step.eqn.params
        num_consts, num_carry = carry_count(params)
        full = [Lanes(map(as_jax_value, self._lanes(x))) for x in args]
        consts, start, xs = full[:num_consts], full[num_consts : num_consts + num_carry], full[num_consts + num_carry :]
        stacked_leaves = {o.leaf for fact in step.known[num_consts + num_carry :] for o in fact.origins}
        window = self._window if stacked_leaves & self.leaves else None

        def slot(count: Any) -> Any:
            assert window is not None
            number = count.astype(jnp.int32)
            return _window_slot((params["length"] - 1 - number if params["reverse"] else number) - window[0], window[1])

        def once(carry: Any, count: Any, x: Any) -> tuple[Any, Any, dict[int, InputSums]]:
            inside = None if seeds is None else seeds.turn(step.number, count)
            before = self._window, self._inside
            if window is not None:
                self._window, self._inside = None, slot(count) < window[1]
            try:
                out, sums = self._run_and_collect(step.inner[0], inside, [*consts, *map(Lanes, carry), *map(Lanes, x)])
            finally:
                self._window, self._inside = before
            after = [tuple(without_weak_types(lanes)) for lanes in out]
            return after[:num_carry], after[num_carry:], sums

        begin = [tuple(without_weak_types(lanes)) for lanes in start]
        each = [tuple(lanes) for lanes in xs]
        one = jax.eval_shape(lambda x: jax.tree.map(lambda v: v[0], x), each)
        shapes = jax.eval_shape(lambda carry, x: once(carry, jnp.uint32(0), x)[2], begin, one)
        shared_sums = {
            leaf: jax.tree.map(_zeros_of_shape, sums) for leaf, sums in shapes.items() if leaf not in stacked_leaves
        }
        window_sums: dict[int, Any] = {}  # the turns of the window, which is written to in the loop
        if window is not None:
            size = window[1]
            window_sums = {
                leaf: jax.tree.map(lambda v: jnp.zeros((size, *v.shape), v.dtype), sums)
                for leaf, sums in shapes.items()
                if leaf in stacked_leaves
            }

        def body(state: Any, x: Any) -> tuple[Any, Any]:
            carry, before, slots, count = state
            carry, ys, sums = once(carry, count, x)
            after = {leaf: add_sums(before[leaf], sums[leaf]) for leaf in before}
            own = {leaf: value for leaf, value in sums.items() if leaf not in before}
            if window is not None:
                place = slot(count)
                write = lambda v, one: v.at[place].set(one, mode="drop")  # noqa: E731
                slots, own = {leaf: jax.tree.map(write, slots[leaf], own[leaf]) for leaf in slots}, {}
            return (carry, after, slots, count + jnp.uint32(1)), (ys, own)

        state, (ys, own) = lax.scan(
            body,
            (begin, shared_sums, window_sums, jnp.uint32(0)),
            each,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        for leaf, sums in (*own.items(), *state[1].items(), *state[2].items()):
            self._add(leaf, sums)
        return [*map(Lanes, state[0]), *map(Lanes, ys)]

    def _cond(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A branch: all trajectories take that of the last one, so that their values can be compared."""
        index, *rest = args
        index = index[-1] if isinstance(index, Lanes) else index
        operands = [tuple(map(as_jax_value, self._lanes(x))) for x in rest]

        def branch(i: int, values: Any) -> tuple[Any, dict[int, InputSums]]:
            inside = None if seeds is None else seeds.turn(step.number + i)
            out, sums = self._run_and_collect(step.inner[i], inside, [*map(Lanes, values)])
            return [tuple(without_weak_types(lanes)) for lanes in out], sums

        every: dict[int, Any] = {}
        for i in range(len(step.inner)):
            every |= jax.eval_shape(lambda values, i=i: branch(i, values)[1], operands)

        def branch_with_zeros(i: int, values: Any) -> tuple[Any, dict[int, InputSums]]:
            out, sums = branch(i, values)
            return out, {
                i: sums[i] if i in sums else jax.tree.map(_zeros_of_shape, shape) for i, shape in every.items()
            }

        out, sums = lax.switch(
            index, [lambda values, i=i: branch_with_zeros(i, values) for i in range(len(step.inner))], operands
        )
        for leaf, value in sums.items():
            self._add(leaf, value)
        return [*map(Lanes, out)]

    # -- products ------------------------------------------------------------------------------------------------------

    def _add_input(self, step: Any, site: WeightSite, by_lane: Sequence[list[Any]]) -> None:
        """Add the input of a product to the sums of its weight."""
        side = self.sites.of_step[id(step)][0]
        product = OperandSwap(step.product) if side == 0 else step.product
        inputs = [args[1 - side] for args in by_lane]
        how = self.roundings.get(id(step))
        rounding = None if how is None else how[0].left
        if how is not None and rounding is not None and not is_stochastic(rounding):
            inputs[-1] = _round_input(product.forward.left, _as_floating(inputs[-1]), how[0])
        extra = by_lane[-1][2:]
        kernel = by_lane[-1][side].shape
        x, *y = [_input_rows(product, site, _as_floating(v), kernel) for v in (inputs[-1], *inputs[:-1])]
        other = y[0] if y else None
        make = partial(sums_over_rows, x, other)
        if isinstance(step.product, RaggedProduct):
            sizes = extra[0] if site.layout.matrices[0] > 1 else extra[0].sum(keepdims=True)  # 1: all have one matrix
            make = partial(_sums_by_group, x[0], None if other is None else other[0], sizes)
        indexes = self.sites.indexes.get((id(step), site.leaf))
        if indexes is None:
            self._add_if_inside(site.leaf, make)
        else:
            self._add_layer(site.leaf, indexes, make)


class ErrorCollector(Collector):
    """Runs a program in full precision, and sums up squares of what steps make of rounded parameters.

    Args:
        others: steps by the parameter, as `WeightSites.others`.
    """

    def __init__(self, others: Mapping[int, Sequence[Any]]) -> None:
        every = [(leaf, place, use) for leaf, uses in others.items() for place, use in enumerate(uses)]
        self.places = {-1 - i: (leaf, place) for i, (leaf, place, _) in enumerate(every)}  # no index of a parameter
        self._operands: dict[int, list[tuple[int, int]]] = {}
        for key, (_, _, (step, operand, _)) in zip(self.places, every, strict=True):
            self._operands.setdefault(id(step), []).append((key, operand))
        super().__init__([PlainRunner()] * 3, {}, WeightSites(), frozenset())

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """One equation: of parameters alone as often as they are rounded, else once."""
        by_lane = self._by_lane(args)
        if not any(part.data):
            outs = self._each("run", part, seeds, by_lane)
        else:
            outs = self.lanes[0].run(part, seeds, by_lane[0])
        for key, operand in self._operands.get(id(part), ()):
            exact = by_lane[0]
            lows = ([*exact[:operand], own[operand], *exact[operand + 1 :]] for own in by_lane[1:])
            first, *others = (self.lanes[0].run(part, seeds, own)[0] for own in (exact, *lows))
            vectors = [_as_floating(v).reshape(-1) for v in (first, *(first - other for other in others))]
            self._add_if_inside(key, partial(sums_over_rows, jnp.stack(vectors, -1)[None]))
        return outs

    def control(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        """A step that holds programs, as often as it takes rounded parameters alone, else once."""
        if step.name in INLINE_CALLS or self._takes_operands(step):
            return super().control(step, seeds, args)
        if any(step.data):
            return self.lanes[0].control(step, seeds, self._by_lane(args)[0])
        return self._each("control", step, seeds, self._by_lane(args))

    def _has_sites(self, plan: ProgramPlan) -> bool:
        return True

    def _takes_operands(self, step: Any) -> bool:
        return step.name in ("scan", "cond") and any(id(s) in self._operands for p in step.inner for s in p.walk())


def _chooses(eqn: Any) -> bool:
    """Whether integers of an equation, such as ranks and codes, are made of data that are none."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in _CHOICES
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(after, jnp.integer) and not jnp.issubdtype(before, jnp.integer)


def _window_slot(place: Any, size: int) -> Array:
    """A place in a window; its size if it is not there."""
    return jnp.where((place >= 0) & (place < size), place, size)


def _sums_if(inside: Any, make: Callable[[], InputSums]) -> InputSums:
    """Sums, which are zero, and not computed, if they are not looked at."""
    shapes = jax.eval_shape(make)
    return lax.cond(inside, make, lambda: jax.tree.map(_zeros_of_shape, shapes))


def _zeros_of_shape(shape: Any) -> Array:
    return jnp.zeros(shape.shape, shape.dtype)


def _as_floating(x: Any) -> Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _round_input(layout: OperandLayout, x: Array, how: ProductRoundings) -> Array:
    """An input of a product as it is rounded; one that is rotated before, rotated back, since sums are of inputs."""
    rotation = how.forward_rotation
    low = round_in_layout(layout, x, how.left, rotation=rotation)
    if rotation is None:
        return low
    (back,) = jax.linear_transpose(lambda v: rotate_along_sum(layout, v, rotation), x)(low)
    return back


def _input_rows(product: Any, site: WeightSite, x: Array, kernel: Sequence[int]) -> Array:
    """The input of a product as (batch, rows, summed): an axis of the batch that the weight has not is one of rows."""
    if isinstance(product, ConvProduct):
        patches = _patches(product, x, kernel)
        return patches.reshape(site.layout.matrices[0], -1, patches.shape[-1])  # 1: all groups have one matrix
    if isinstance(product, RaggedProduct):
        return x[None]
    layout = product.forward.left
    matrices = layout.lay(x)
    own = [i for i in range(site.batch) if site.view.free[i]]
    order = [*own, *(i for i in range(matrices.ndim - 1) if i not in own), matrices.ndim - 1]
    return matrices.transpose(order).reshape(site.layout.matrices[0], -1, matrices.shape[-1])


def _patches(conv: ConvProduct, x: Array, kernel: Sequence[int]) -> Array:
    """The patches of images that a convolution multiplies, (groups, rows, summed), channels fastest.

    Args:
        conv: the convolution.
        x: the images.
        kernel: the shape of the kernel.
    """
    space = [kernel[axis] for axis in conv.numbers.rhs_spec[2:]]
    image = x.transpose(conv.numbers.lhs_spec)
    patches = lax.conv_general_dilated_patches(
        image, space, conv.strides, conv.padding, conv.input_dilation, conv.kernel_dilation,
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    groups, places = conv.feature_groups, math.prod(space)
    inner = image.shape[1] // groups
    apart = patches.reshape(patches.shape[0], groups, inner, places, -1)
    return apart.transpose(1, 0, 4, 3, 2).reshape(groups, -1, places * inner)


def _sums_by_group(x: Array, y: Array | None, sizes: Array) -> InputSums:
    """The sums over each group of rows."""
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")

    def one(number: Array) -> InputSums:
        sums = sums_over_rows(x[None], None if y is None else y[None], (group == number)[None])
        return jax.tree.map(lambda v: v[0], sums)

    return lax.map(one, jnp.arange(sizes.shape[0]))
