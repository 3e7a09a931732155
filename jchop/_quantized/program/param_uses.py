"""The plan of a program under rules: which parameters reach which products, and how each product takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jchop._common.checks import check
from jchop._common.paths import matches_path
from jchop._program import step
from jchop._program.control import CONTROL
from jchop._program.run import Planner
from jchop._program.step import ProgramPlan, is_jchop_scope, source_line_of
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.product import ConvProduct, DotProduct, RaggedProduct
from jchop._quantized.program import provenance
from jchop._round.arguments import JCHOP_SCOPE


@dataclass(frozen=True)
class ParamUse:
    """A place where a parameter stops being one.

    Args:
        leaf: the index of the parameter.
        kind: ``"product"``, ``"rows"`` (rows are looked up, as in an embedding), ``"sum"`` (it is added to data, or
            is another bias), or ``"other"``.
        primitive: that takes it.
        source: file and line.
        view: how a product takes it, or a look-up.
        reversed_axes: whose numbers a product takes in reverse order; None if it does not take the numbers themselves,
            or along the sum in another order.
        cuts: the slices of it that were taken before.
        why: why it has no scales for this use; empty if it may have.
        axes: the parts of each axis of the value that is added to data.

    If `kind` is ``"product"`` and there is no `view`, a product reads a value that the primitive computes from it.
    """

    leaf: int
    kind: str
    primitive: str
    source: str
    view: provenance.MatrixView | None = None
    reversed_axes: frozenset[int] | None = frozenset()
    cuts: tuple[tuple[provenance.AxisFactors, Any, Any], ...] = ()
    why: str = ""
    axes: tuple[provenance.AxisFactors, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether a product takes its numbers themselves, along the sum in their order."""
        return self.reversed_axes == frozenset()

    @property
    def where(self) -> str:
        """The primitive that takes it, and its line."""
        return f"{self.primitive} at {self.source or 'an unknown line'}"

    @property
    def is_opaque(self) -> bool:
        """Whether a product reads a value that is computed from a parameter, without its axes."""
        return self.kind == "product" and self.view is None

    @property
    def takes_apart(self) -> bool:
        """Whether a slice along one axis became a matrix: some of its parts are kept, and others summed over."""
        if self.view is None:
            return self.is_opaque and self.primitive == "reshape" and bool(self.cuts)
        free = [part for parts in self.view.free for part in parts]
        for parts, *_ in self.cuts:
            both = [[part for part in some if _lies_within(part, parts)] for some in (free, self.view.contracting)]
            if all(both) and any(part not in parts for some in both for part in some):
                return True
        return False

    def block_of(self, group: int) -> int:
        """How many neighbours along the sum of a product have one scale, if groups of some numbers had one before."""
        assert self.view is not None
        contracting, block = self.view.contracting, group
        if not self.is_intact and (self.cuts or len(contracting) != 1 or contracting[0].size % group):
            return 1  # reversed
        for i, part in enumerate(contracting):
            step = math.prod(p.size for p in contracting[i + 1 :])
            for parts, *ends in self.cuts:
                for j, whole in enumerate(parts):
                    if _lies_within(part, (whole,)):
                        unit = part.inner // whole.inner * math.prod(p.size for p in parts[j + 1 :])
                        for end in ends if i else ends[:1]:  # along the slowest part a slice may have any length
                            divides = isinstance(end, int) and end % unit == 0
                            block = math.gcd(block, (end // unit % part.size if divides else 1) * step)
        return block


@dataclass(frozen=True)
class DeclaredCall:
    """A call by its name, of a kernel or function, whose sums a rule declares. Its derivatives are its own.

    Args:
        name: of the function or kernel.
        layouts: of each operand; None for one that stays as it is.
    """

    name: str
    layouts: tuple[OperandLayout | None, ...]


@dataclass(frozen=True, kw_only=True)
class ProductStep(step.ProgramStep):
    """One equation, and the parameters that reach it.

    Args:
        uses: of parameters, for each operand.
        product: which product it is; None for another equation.
        refused: why the operands of a product cannot be rounded; empty if they can.
        data: which operands depend on data.
        moves: whether it only moves numbers.
        source: file and line.
        opaque_uses: uses of parameters of which an operand of the product is computed, without their axes.
        call: of a call that a rule declares, which has no `product`.
    """

    uses: tuple[tuple[ParamUse, ...], ...] = ()
    opaque_uses: tuple[ParamUse, ...] = ()
    product: DotProduct | ConvProduct | RaggedProduct | None = None
    refusal: str = ""
    data: tuple[bool, ...] = ()
    moves: bool = False
    source: str = ""
    call: DeclaredCall | None = None

    @property
    def name(self) -> str:
        """The name of the primitive, or of the declared call."""
        return super().name if self.call is None else self.call.name

    @property
    def where(self) -> str:
        """The primitive and the line of the equation, for errors."""
        return f"{self.name} at {self.source or 'an unknown line'}"

    @property
    def param_uses(self) -> list[ParamUse]:
        """The uses of parameters, of all operands."""
        return [use for uses in self.uses for use in uses]


class ProvenancePlanner(Planner):
    """Follows parameters through a program.

    Args:
        axes_of_calls: as of `Rule`.
    """

    no_facts = provenance.NO_PROVENANCE

    def __init__(self, axes_of_calls: Mapping[str, Sequence[int | None]] | None = None) -> None:
        super().__init__()
        self._axes_of_calls = axes_of_calls or {}
        self._last_source = self._outer_source = ""  # of the last equation, and of the one that holds the program
        self._name = ""  # the primitive of the last equation
        self._call = self._outer_call = ""  # the outermost function with a derivative of its own, likewise
        self.data_changes: dict[int, ParamUse] = {}

    def plan(
        self, closed: Any, known: Sequence[Any], scope: str = "", constants: Sequence[Any] | None = None
    ) -> ProgramPlan:
        """The plan of a jaxpr. An equation with frames of libraries alone has the source of the equation around it."""
        before = self._outer_source, self._last_source, self._name, self._outer_call
        self._outer_source, self._outer_call = self._last_source, self._call
        try:
            return super().plan(closed, known, scope, constants)
        finally:
            self._outer_source, self._last_source, self._name, self._outer_call = before

    def common(self, knowns: Iterable[provenance.Provenance | None]) -> provenance.Provenance:
        """The provenance of a value that is one of several; `data_changes` has parameters that data replace."""
        facts = [known or provenance.NO_PROVENANCE for known in knowns]
        both = provenance.merge_provenance(facts)
        if not both.data:
            return both
        leaves = (origin.leaf for fact in facts for origin in fact.origins)
        uses = [ParamUse(leaf, "other", self._name, self._last_source, why=_DATA_CHANGE_REASON) for leaf in leaves]
        for use in uses:
            self.data_changes.setdefault(use.leaf, use)
        return replace(both, opaque_uses=(*both.opaque_uses, *(replace(use, kind="product") for use in uses)))

    one_turn = staticmethod(provenance.unstack_provenance)  # type: ignore[assignment]
    all_turns = staticmethod(provenance.stack_provenance)  # type: ignore[assignment]

    def draws(self, step: Any) -> int:
        """Products split their own key."""
        return 1

    def step(self, eqn: Any, env: dict[Any, provenance.Provenance], scope: str, number: int) -> ProductStep:
        """The step of one equation, with the uses of parameters in it."""
        name = eqn.primitive.name
        facts = tuple(self.read(v, env) for v in eqn.invars)
        source = self._last_source = source_line_of(eqn.source_info, self._outer_source)
        self._name = name
        result = ProductStep(
            eqn=eqn, kind="bound", scope=scope, number=number, known=facts, data=tuple(f.data for f in facts),
            source=source,
        )  # fmt: skip
        call = name_of_call(eqn)
        declared = (axes for pattern, axes in self._axes_of_calls.items() if call and matches_path(pattern, call))
        axes = next(declared, None)
        if axes is not None and any(result.data) and not is_jchop_scope(scope):
            return _declared_call(result, call, axes)
        if name in CONTROL and not is_jchop_scope(scope):
            self._call = self._outer_call or (call if name in step.CUSTOM_CALLS else "")
            return replace(result, kind="control")
        if name == "optimization_barrier":  # each result is its own operand
            return replace(result, out=facts, moves=True)
        data = any(fact.data for i, fact in enumerate(facts) if i not in _INDEX_OPERANDS.get(name, ()))
        if not any(fact.origins or (fact.opaque_uses and not fact.data) for fact in facts):
            data = any(result.data)  # the constants that data choose
        from_keys = any(fact.from_keys for fact in facts)
        # One that sums over no axis multiplies, as `mul` does.
        sums = name in _PRODUCT_READERS and (name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0]))
        if sums and any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars[:2]):
            product = _PRODUCT_READERS[name](eqn)
            has_product = not data and any(fact.origins or fact.has_product for fact in facts)
            out = (provenance.Provenance(data=data, from_keys=from_keys, has_product=has_product),)
            if isinstance(product, str):
                uses = _uses_of(facts, lambda o: ParamUse(o.leaf, "other", f"{name} ({product})", source))
                return replace(result, refusal=product, uses=uses, out=out)
            why = _COMPLEX_REASON if is_complex_product(eqn) else ""
            batch = len(product.batch[0]) if isinstance(product, DotProduct) else isinstance(product, RaggedProduct)
            uses, opaque_uses = [], [*provenance.opaque_uses_of(facts)]
            use = partial(ParamUse, kind="product", primitive=name, source=source, why=why)
            for i, layout in enumerate(product.forward):
                shape, matter = eqn.invars[i].aval.shape, (*layout.free[:batch], *layout.contracting)
                biases = [o for o in facts[i].origins if o.bias_use and not _is_weight_matrix(o, layout, batch)]
                opaque_uses += [o.bias_use for o in biases]
                uses.append(tuple(
                    use(o.leaf, view=_view_of(o, layout), reversed_axes=_reversals(o, matter, shape), cuts=o.cuts)
                    for o in facts[i].origins if o not in biases
                ))  # fmt: skip
            return replace(
                result, kind="product", product=product, uses=tuple(uses), opaque_uses=tuple(opaque_uses), out=out
            )
        if name in _LOOK_UP_AXES and not data:
            return self._look_up(result)
        taker = JCHOP_SCOPE if name in CONTROL else name  # a program that a function of jchop holds
        if data:
            kind = "sum" if name in _SUM_PRIMITIVES else "other"
            why = _KERNEL_REASON.format(call=self._outer_call or call) if _is_kernel(eqn) else ""
            uses = _uses_of(facts, lambda o: ParamUse(o.leaf, kind, taker, source, cuts=o.cuts, why=why, axes=o.axes))
            return replace(result, uses=uses, out=(provenance.FROM_DATA,) * len(eqn.outvars))
        outs = [self._out(eqn, facts, i) for i in range(len(eqn.outvars))]
        if name in _SUM_PRIMITIVES:
            outs = [_mark_biases(outs[0], eqn, facts, source)]
        goes_on = {o.leaf for fact in outs for o in fact.origins}
        uses = _uses_of(facts, lambda o: ParamUse(o.leaf, "other", taker, source, cuts=o.cuts), goes_on)
        taken = (replace(use, kind="product") for some in uses for use in some if use.kind != "sum")
        opaque_after = (*provenance.opaque_uses_of(facts), *taken)
        outs = [replace(out, opaque_uses=opaque_after, from_keys=from_keys) for out in outs]
        return replace(result, uses=uses, out=tuple(outs), moves=name in provenance.MOVE_PRIMITIVES)

    def _out(self, eqn: Any, facts: Sequence[provenance.Provenance], number: int) -> provenance.Provenance:
        """The facts about one of the results, that no data reaches."""
        name, shape, origins = eqn.primitive.name, getattr(eqn.outvars[number].aval, "shape", ()), {}
        for v, fact in zip(eqn.invars, facts, strict=True):
            for origin in fact.origins:
                after = provenance.move_origin(name, eqn.params, origin, v.aval.shape, shape)
                if after is not None:
                    cuts = (*origin.cuts, *_axis_slices(eqn, number, origin, v.aval.shape, shape))
                    origins.setdefault(origin.leaf, replace(after, cuts=cuts))
        return provenance.Provenance(
            origins=tuple(origins.values()), has_product=any(fact.has_product for fact in facts)
        )

    def _look_up(self, step: ProductStep) -> ProductStep:
        """The step of a look-up by indexes: of rows (an embedding), of experts' matrices, or of a loop's layer."""
        eqn, fact = step.eqn, step.known[0]
        out = self._out(eqn, (fact, *(provenance.NO_PROVENANCE for _ in eqn.invars[1:])), 0)
        index_axes, sizes, uses = _LOOK_UP_AXES[step.name](step), eqn.params["slice_sizes"], []
        for before, after in zip(fact.origins, out.origins, strict=True):
            along = [parts for parts, n in zip(after.axes, eqn.outvars[0].aval.shape, strict=True) if parts and n != 1]
            if index_axes and len(along) <= 1:
                among = [parts for i, parts in enumerate(before.axes) if i in index_axes or sizes[i] != 1]
                # Rows that are looked up are kept; a product would sum along a row.
                row = tuple(part for parts in along or _last_factor(step, before, index_axes) for part in parts)
                free = (tuple(part for part in parts if part not in row) for parts in among)
                rows = provenance.MatrixView(tuple(filter(None, free)), row)
                use = ParamUse(before.leaf, "rows", step.name, step.source, rows, cuts=before.cuts)
                uses.append(use if any(before.axes[i] for i in index_axes) else before.bias_use or use)
        if uses:
            return replace(step, uses=(tuple(uses),), out=(provenance.FROM_DATA,))
        from_keys = any(fact.from_keys for fact in step.known)
        return replace(step, out=(replace(out, opaque_uses=fact.opaque_uses, from_keys=from_keys),), moves=True)


def _uses_of(
    facts: Sequence[provenance.Provenance], use: Callable[[provenance.ParamOrigin], ParamUse], but: Collection[int] = ()
) -> tuple[tuple[ParamUse, ...], ...]:
    """The uses of the parameters of each operand, `but` of some: as a bias, or `use`."""
    return tuple(tuple(o.bias_use or use(o) for o in fact.origins if o.leaf not in but) for fact in facts)


def _is_kernel(eqn: Any) -> bool:
    """Whether an equation calls a kernel, whose program says nothing about sums."""
    return eqn.primitive.name in ("pallas_call", "ffi_call", *step.BATCHED_CALLS)


def name_of_call(eqn: Any) -> str:
    """The name of the function or kernel that an equation calls; empty for another equation."""
    if not _is_kernel(eqn) and eqn.primitive.name not in _NAMED_CALLS:
        return ""
    info = next((program.debug_info for program in step.programs_of(eqn)), None)
    return str(eqn.params.get("name") or eqn.params.get("target_name") or getattr(info, "func_name", ""))


def _declared_call(result: ProductStep, call: str, axes: Sequence[int | None]) -> ProductStep:
    """A step of a call that sums over declared axes of its first operands of floats.

    Raises:
        ValueError: for axes that the operands do not have, or two sums of different lengths.
    """
    eqn, facts = result.eqn, result.known
    programs = step.programs_of(eqn) if eqn.primitive.name in step.PLAIN_CALLS else ()
    names = next((program.debug_info.arg_names for program in programs), None) or ()  # empty for values closed over
    consts = eqn.params.get("num_consts", next((i for i, name in enumerate(names) if name), 0))
    shapes = {i: v.aval.shape for i, v in enumerate(eqn.invars) if getattr(v.aval, "dtype", None) is not None}
    floats = [i for i in shapes if i >= consts and jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.floating)]
    given = ", ".join(str(list(shapes[i])) for i in floats)
    text = f"operation: {call}({','.join('_' if axis is None else str(axis) for axis in axes)}) at {result.source}"
    check(len(axes) <= len(floats), f"{text} names {len(axes)} operands of floats; it has {len(floats)}: {given}")
    summed = {i: axis for i, axis in zip(floats, axes, strict=False) if axis is not None}
    fit = all(-len(shapes[i]) <= axis < len(shapes[i]) for i, axis in summed.items())
    lengths = [shapes[i][axis] for i, axis in summed.items()] if fit else []
    if not fit or len(set(lengths[:2])) > 1:
        raise ValueError(
            f"{text} does not fit its operands, of shapes {given}: the first two are summed over axes of one length; "
            "a call along other axes needs a name of its own, of a jax.jit around it"
        )
    layouts, uses = [], []
    for i, fact in enumerate(facts):
        if i not in summed:
            layouts.append(None)
            uses.append(_uses_of([fact], lambda o: ParamUse(o.leaf, "other", call, result.source, cuts=o.cuts))[0])
            continue
        ndim = len(shapes[i])
        axis = summed[i] % ndim
        layouts.append(layout := OperandLayout(tuple(provenance.other_axes([axis], ndim)), (axis,)))
        use = partial(ParamUse, kind="product", primitive=call, source=result.source)
        uses.append(tuple(
            use(o.leaf, view=_view_of(o, layout), reversed_axes=_reversals(o, (axis,), shapes[i]), cuts=o.cuts)
            for o in fact.origins
        ))  # fmt: skip
    return replace(
        result, kind="product", call=DeclaredCall(call, tuple(layouts)), uses=tuple(uses),
        opaque_uses=provenance.opaque_uses_of(facts), out=(provenance.FROM_DATA,) * len(eqn.outvars),
    )  # fmt: skip


def holds_several_arrays(uses: Sequence[ParamUse]) -> bool:
    """Whether the slices of a parameter are arrays of their own, so that no layout of the whole suits them.

    A slice along one axis becomes a matrix, as of a flat vector. Or one slice is multiplied, and data are added to
    another, or scaled by it.
    """
    product_uses = [use for use in uses if use.kind in ("product", "rows")]
    beside = [use for use in uses if use.kind == "sum" or use.primitive == "mul"]
    apart = (use.cuts and other.cuts and use.cuts != other.cuts for use in product_uses for other in beside)
    return any(use.takes_apart for use in product_uses) or any(apart)


def _axis_slices(
    eqn: Any, number: int, origin: provenance.ParamOrigin, old: Sequence[int], new: Sequence[int]
) -> list[tuple[provenance.AxisFactors, Any, Any]]:
    """The axes that an equation slices: their parts, where the slice begins, and how long it is.

    The beginning is no integer if it is unknown, or if the slice takes one of several numbers.
    """
    params = eqn.params
    if eqn.primitive.name == "slice":
        strides = params["strides"] or [1] * len(old)
        starts = [a if n == 1 else (a, n) for a, n in zip(params["start_indices"], strides, strict=True)]
    elif eqn.primitive.name == "split":
        starts = [sum(params["sizes"][:number])] * len(old)
    elif eqn.primitive.name == "dynamic_slice":
        starts = [int(v.val) if isinstance(v, Literal) else None for v in eqn.invars[1:]]
    elif eqn.primitive.name == "gather":
        both = zip(origin.axes, params["slice_sizes"], old, strict=True)
        return [(parts, None, short) for parts, short, n in both if parts and short not in (1, n)]
    else:
        return []
    both = zip(origin.axes, starts, old, new, strict=True)
    return [(parts, start, short) for parts, start, n, short in both if parts and n != short]


def _reversals(origin: provenance.ParamOrigin, axes: Sequence[int], shape: Sequence[int]) -> frozenset[int] | None:
    """The axes whose numbers are reversed; None if it has other numbers, or, along some axes, another order.

    An axis that was cut and is as long as before was joined of pieces, perhaps in another order.
    """
    whole = [origin.axes[i] for i in axes if math.prod(part.size for part in origin.axes[i]) == shape[i]]
    pairs = [(part, one) for parts in whole for part in parts for cut, *_ in origin.cuts for one in cut]
    return None if any(_lies_within(a, (b,)) or _lies_within(b, (a,)) for a, b in pairs) else origin.reversed_axes


def _lies_within(part: provenance.AxisFactor, parts: provenance.AxisFactors) -> bool:
    """Whether a part of an axis lies in one of others."""
    return any(
        part.axis == one.axis and one.inner <= part.inner and part.inner * part.size <= one.inner * one.size
        for one in parts
    )


def is_complex_product(eqn: Any) -> bool:
    """Whether an operand of a product has complex numbers."""
    return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.invars[:2])


def _view_of(origin: provenance.ParamOrigin, layout: OperandLayout) -> provenance.MatrixView:
    contracting = tuple(part for axis in layout.contracting for part in origin.axes[axis])
    return provenance.MatrixView(tuple(origin.axes[axis] for axis in layout.free), contracting)


def _mark_biases(
    out: provenance.Provenance, eqn: Any, facts: Sequence[provenance.Provenance], source: str
) -> provenance.Provenance:
    """A sum without data, in which a parameter may be a bias: spread, and added to a value made of parameters.

    Whether it is one is known where a product takes the sum (`_is_weight_matrix`).
    """
    origins = []
    for origin in out.origins:
        i = next(i for i, fact in enumerate(facts) if any(o.leaf == origin.leaf for o in fact.origins))
        other = facts[1 - i]
        if origin.spread and not origin.bias_use and (other.origins or other.opaque_uses or other.has_product):
            use = ParamUse(origin.leaf, "sum", eqn.primitive.name, source, cuts=origin.cuts)
            origin = replace(origin, bias_use=use)
        origins.append(origin)
    return replace(out, origins=tuple(origins))


def _is_weight_matrix(origin: provenance.ParamOrigin, layout: OperandLayout, batch: int) -> bool:
    """Whether a parameter has axes that a product sums over, and axes that it keeps, as a weight has."""
    return any(origin.axes[i] for i in layout.contracting) and any(origin.axes[i] for i in layout.free[batch:])


def _last_factor(
    step: ProductStep, origin: provenance.ParamOrigin, index_axes: set[int]
) -> list[provenance.AxisFactors]:
    """The last axis of a parameter of which data choose single numbers: the axis of the groups, as for its rows."""
    batch = step.eqn.params["dimension_numbers"].operand_batching_dims if step.name == "gather" else ()
    parts = [part for i in sorted({*index_axes, *batch}) for part in origin.axes[i]]
    return [(part,) for part in parts[-1:]]


def _axes_by_start(step: ProductStep) -> set[int]:
    """The axes of which data choose one index."""
    sizes = step.eqn.params["slice_sizes"]
    return {axis for axis, start in enumerate(step.known[1:]) if start.varies and sizes[axis] == 1}


def _axes_by_indexes(step: ProductStep) -> set[int]:
    """The axes of which data, or several constants, choose one index each."""
    if not step.known[1].varies and step.eqn.invars[1].aval.ndim == 1:
        return set()
    params = step.eqn.params
    return {axis for axis in params["dimension_numbers"].start_index_map if params["slice_sizes"][axis] == 1}


def dot_product_of(eqn: Any) -> DotProduct:
    """The product that an equation ``dot_general`` is, also one that sums over no axis."""
    contracting, batch = (tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"])
    ndims = len(eqn.invars[0].aval.shape), len(eqn.invars[1].aval.shape)
    more = {name: eqn.params.get(name) for name in ("precision", "preferred_element_type", "out_sharding")}
    return DotProduct(contracting, batch, ndims, **more)  # type: ignore[arg-type]


def _conv_product_of(eqn: Any) -> ConvProduct | str:
    params = eqn.params
    if params["batch_group_count"] != 1:
        return f"batch_group_count={params['batch_group_count']}"
    windows = (tuple(params[name]) for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    more = {name: params.get(name) for name in ("precision", "preferred_element_type", "out_sharding")}
    return ConvProduct(*windows, params["dimension_numbers"], params["feature_group_count"], **more)  # type: ignore


def _ragged_product_of(eqn: Any) -> RaggedProduct | str:
    usual = dict(RaggedProduct.of_rows().params)
    if eqn.params["ragged_dot_dimension_numbers"] != usual["ragged_dot_dimension_numbers"]:
        return "not of rows (m, k) and matrices (g, k, n)"
    return RaggedProduct(tuple(sorted(eqn.params.items())))


_DATA_CHANGE_REASON = "data change it"
_KERNEL_REASON = "the sums of this kernel are not declared, as by operation='{call}(-1,-2)'"
_COMPLEX_REASON = "complex numbers have no scales"
_PRODUCT_READERS = {
    "dot_general": dot_product_of,
    "conv_general_dilated": _conv_product_of,
    "ragged_dot_general": _ragged_product_of,
}
_NAMED_CALLS = (*step.PLAIN_CALLS, *step.CUSTOM_CALLS)
_SUM_PRIMITIVES = provenance.ADD_PRIMITIVES | {"add_any"}
#: Which axes of the first operand they take single indexes of, that are no counters of loops.
_LOOK_UP_AXES: dict[str, Callable[[ProductStep], set[int]]] = {
    "gather": _axes_by_indexes,
    "dynamic_slice": _axes_by_start,
}
#: Operands that only choose among the numbers of the others.
_INDEX_OPERANDS: dict[str, tuple[int, ...]] = {
    "gather": (1,),
    "dynamic_slice": tuple(range(1, 16)),
    "dynamic_update_slice": tuple(range(2, 16)),
    "select_n": (0,),
    **dict.fromkeys(provenance.SCATTER_PRIMITIVES, (1,)),
    "ragged_dot_general": (2,),
}
