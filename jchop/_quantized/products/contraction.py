"""The one mechanism: a product whose operands are rounded, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jchop._common.bit_ops import has_sharding
from jchop._common.checks import check
from jchop._common.settings import always_jit, split_prng_key
from jchop._kernels.primitive import materialize_on_cpu
from jchop._program.bind import straight_through
from jchop._quantized.products.codes import (
    CodedArray,
    block_along_sum,
    check_code_format,
    encode_operand,
    expand_codes,
    param_codes,
    restore_param_axes,
)
from jchop._quantized.products.operand_layout import (
    Hadamard,
    OperandLayout,
    check_layout_axes,
    rotate_along_sum,
    round_in_layout,
    rounds_transpose_alike,
)
from jchop._quantized.products.product import AnyProduct, ConvProduct, DotProduct, OperandSwap, RaggedProduct, Which
from jchop._quantized.products.rule import NO_LOCATION, Location, any_draw
from jchop._round.arguments import JCHOP_SCOPE, mark_results
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop._storage import quantize


@dataclass(frozen=True)
class ProductRoundings:
    """The roundings of a product: the fields of a rule by operand, its location, and whether codes are multiplied.

    `stored_only`: whether codes are multiplied only of a right operand alone that is read as it is stored.
    `skip_weight_rotation`: whether a right operand that is rounded already was rotated before, if there is a rotation
    of the product. `weight`: in a program the number of the operand that is the weight; -1 for a product of data.
    """

    left: Spec | None = None
    right: Spec | None = None
    gradient: Spec | None = None
    input_gradient: Spec | None = None
    weight_gradient: Spec | None = None
    matmul: MatmulSpec | None = None
    rotation: Hadamard | None = None
    place: Location = NO_LOCATION
    codes: bool = False
    stored_only: bool = False
    skip_weight_rotation: bool = False
    weight: int = -1

    def for_operand(self, product: AnyProduct, shape: tuple[int, ...]) -> ProductRoundings:
        """These, without codes if a right operand of a shape is not read as it is stored and has to be."""
        if not self.stored_only:
            return self
        others = (self.left, *self.specs[2:], self.matmul, self.rotation)
        reads = isinstance(product, DotProduct) and self.right is not None and product.reads_stored(self.right, shape)
        return replace(self, codes=self.codes and reads and not any(others), stored_only=False)

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """The specs of all operands, forward and backward."""
        return self.left, self.right, self.gradient, self.input_gradient, self.weight_gradient

    @property
    def stochastic(self) -> bool:
        """Whether a product needs a key."""
        return any_draw(self.specs, self.matmul, self.rotation)

    @property
    def keeps_left(self) -> bool:
        """Whether the left operand is rounded once, for all products, so that its range can be fixed."""
        return not any(self.specs[2:])

    @property
    def backward(self) -> bool:
        """Whether the backward products differ from the products of the rounded operands in the carrier."""
        return any(self.specs[2:]) or self.matmul is not None

    def rotation_of(self, which: Which) -> Hadamard | None:
        """The rotation of the operands of one of the three products."""
        own = self.rotation
        if own is None:
            return None
        rotates = {"forward": own.forward, "input": own.of_input, "weight": own.of_weight}
        return own if rotates[which] else None

    @property
    def forward_rotation(self) -> Hadamard | None:
        """The rotation of the operands of the product itself."""
        return self.rotation_of("forward")

    def operands(self, which: Which) -> tuple[Spec | None, Spec | None]:
        """The roundings of both operands of one of the three products."""
        own = {"input": self.input_gradient, "weight": self.weight_gradient}.get(which)
        if own is not None:
            return own, own
        left = self.gradient if which == "input" else self.left
        return left, self.gradient if which == "weight" else self.right

    @property
    def rounds_input_again(self) -> bool:
        """Whether dw takes an x that is rounded otherwise than the forward product's, or whose codes it needs."""
        return (
            (self.codes and self.gradient is not None)
            or self.weight_gradient is not None
            or self.rotation_of("weight") is not None
            or (self.gradient is not None and not rounds_transpose_alike(self.left))
        )

    @property
    def rounds_weight_again(self) -> bool:
        """Whether dx takes a w that is rounded otherwise than the forward product's, or whose codes it needs."""
        return self.input_gradient is not None or (
            self.gradient is not None
            and (self.codes or self.rotation_of("input") is not None or not rounds_transpose_alike(self.right))
        )


class OperandForms(NamedTuple):
    """The inputs of a product beside its operands x and w.

    Args:
        key: a typed key if any rounding is stochastic. It is split into one for each rounding and each product.
        rounded: `w` rounded already, with the same derivative; `how.right` is then of the backward products alone.
        codes: of a `w` that is rounded already, with its axes; for a product of codes.
        left_codes: of an `x` that is rounded already, under one scale.
        extra: more operands of the product, which have no derivative.
    """

    key: Array | None = None
    rounded: Array | None = None
    codes: CodedArray | None = None
    left_codes: CodedArray | None = None
    extra: tuple[Array, ...] = ()


_OPERANDS_ALONE = OperandForms()


def contract(
    product: AnyProduct, x: Array, w: Array, roundings: ProductRoundings, forms: OperandForms = _OPERANDS_ALONE
) -> Array:
    """``product(x, w)``, its operands rounded along the contracting axes, and its derivative as `roundings` says.

    Args:
        product: which product; `check_operand_specs` has let it and `roundings` through.
        x: the left operand, a carrier.
        w: the right operand, of the same dtype.
        roundings: the roundings.
        forms: a key, and other forms of the operands.

    Returns:
        The product. Its derivative is straight-through in the roundings of x and w, or as their specs say.
    """
    roundings = roundings.for_operand(product, w.shape)
    try:
        alike = replace(roundings, place=NO_LOCATION, weight=-1)
        return _contract_operands(product, alike, x, w, forms)
    except Exception as error:
        error.add_note(f"This is of the {roundings.place}.")
        raise


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _contract_operands(
    product: AnyProduct, roundings: ProductRoundings, x: Array, w: Array, forms: OperandForms
) -> Array:
    """`contract` of operands that are checked: traced once for equal products, wherever they are."""
    key, rounded_weight, extra = forms.key, forms.rounded, forms.extra
    if (rotation := roundings.rotation_of("forward")) is not None:
        x = rotate_along_sum(product.forward.left, x, rotation)
        if not roundings.skip_weight_rotation:
            w = rotate_along_sum(product.forward.right, w, rotation)
            if rounded_weight is not None:
                rounded_weight = rotate_along_sum(product.forward.right, rounded_weight, rotation)
    keys = dict.fromkeys(_KEY_NAMES)
    if key is not None and roundings.stochastic:
        keys = dict(zip(_KEY_NAMES, split_prng_key(key, len(_KEY_NAMES)), strict=True))
    left = round_in_layout(product.forward.left, x, roundings.left, keys["left"], keys["left gradient"])
    right = rounded_weight
    if right is None:
        right = round_in_layout(product.forward.right, w, roundings.right, keys["right"], keys["right gradient"])
    if isinstance(_base_product(product), DotProduct) and not roundings.codes and roundings.matmul is None:
        # The other one of a single row or column is read from memory (quirk `sums_ordered_by_fusion`).
        rows, columns = (
            math.prod(v.shape[a] for a in layout.free) for v, layout in zip((x, w), product.forward, strict=True)
        )
        left = materialize_on_cpu(left) if columns == 1 else left
        right = materialize_on_cpu(right) if rows == 1 else right
    if not roundings.backward and not roundings.codes:
        return product(left, right, *extra)
    again = (roundings.rounds_input_again, roundings.rounds_weight_again)
    full = tuple(lax.stop_gradient(v) if anew else None for v, anew in zip((x, w), again, strict=True))
    both = _encode_operands(product, x, w, roundings, keys, forms) if roundings.codes else None
    if not roundings.backward and not any(roundings.rotation_of(which) for which in _BACKWARD):
        return _product_of_codes(product, left, right, lax.stop_gradient(both), extra)
    return _rounded_product(product, roundings, left, right, full, (keys, extra, both))


def _encode_operands(
    product: AnyProduct, x: Array, w: Array, roundings: ProductRoundings, keys: Mapping[str, Any], forms: OperandForms
) -> tuple[CodedArray, CodedArray]:
    """Both operands as codes, in the layouts of the forward product; from their own codes if they have any."""
    (left, right), data, weight = product.forward, forms.left_codes, forms.codes
    first = encode_operand(left.lay(x), roundings.left, keys["left"]) if data is None else data.map_arrays(left.lay)
    if weight is None and roundings.left is None and roundings.right is not None and data is None:
        qarray = quantize(right.lay(lax.stop_gradient(w)), roundings.right, keys["right"])
        own = restore_param_axes(qarray, right, w.shape)  # a weight alone is read in its own order of axes
        weight = param_codes(qarray, right, w.shape) if own is None else expand_codes(own)
    if weight is None:  # the stored array is not in the shape of w
        return first, replace(encode_operand(right.lay(w), roundings.right, keys["right"]), qarray=None)
    assert roundings.right is not None
    block = block_along_sum(roundings.right, right.ndim) if weight.block is None else weight.block
    second = replace(weight.map_arrays(right.lay), block=block, qarray=weight.qarray, shift=weight.shift)
    return first, jax.tree.map(lax.stop_gradient, second)


def check_operand_specs(product: AnyProduct, roundings: ProductRoundings) -> None:
    """Refuse formats that name axes which an operand has not, in any of the three products."""
    rule = roundings.place.rule
    right = "activation" if rule is not None and rule.weight is None else "weight"  # attention has no weight
    operands = [("activation", roundings.left, product.forward.left), (right, roundings.right, product.forward.right)]
    if roundings.backward or roundings.rotation is not None:
        operands += _backward_operands(product, roundings, right)
    rotates = DotProduct if roundings.rotation_of("weight") is not None else DotProduct | RaggedProduct
    if roundings.rotation is not None and not isinstance(_base_product(product), rotates):
        raise NotImplementedError(
            f"rotation={roundings.rotation} of the {roundings.place}: the rows of a convolution or, backward, of "
            "experts are not independent; put a rule with operation='conv' or 'ragged_dot' and no rotation before it"
        )
    codes = roundings.codes and not roundings.stored_only  # else codes that cannot be multiplied are floats
    for field, spec, layout in operands:
        check_layout_axes(field, spec, layout.ndim, roundings.place)
        if codes and spec is not None:
            check_code_format(field, spec, roundings.place)


def _backward_operands(
    product: AnyProduct, roundings: ProductRoundings, right: str
) -> Iterator[tuple[str, Spec | None, OperandLayout]]:
    """The field, spec and layout of the operands that backward products round; `right` is the field of w."""
    (g, w), (x, h) = map(product.layouts, _BACKWARD)
    (of_g, of_w), (of_x, of_h) = map(roundings.operands, _BACKWARD)
    names = ("gradient", right) if roundings.input_gradient is None else ("input_gradient",) * 2
    yield names[0], of_g, g
    if roundings.rounds_weight_again:
        yield names[1], of_w, w
    names = ("activation", "gradient") if roundings.weight_gradient is None else ("weight_gradient",) * 2
    if roundings.rounds_input_again:
        yield names[0], of_x, x
    yield names[1], of_h, h


#: The products of derivatives.
_BACKWARD: tuple[Which, Which] = ("input", "weight")
#: The roundings of a product and the products themselves, in the order of their keys.
_KEY_NAMES: tuple[str, ...] = (
    "left", "right", "left gradient", "right gradient", "forward", "input", "weight", "left of input",
    "right of weight", "left of weight", "right of input",
)  # fmt: skip


def _product_of_codes(product: AnyProduct, x: Array, w: Array, both: Any, extra: tuple[Array, ...]) -> Array:
    """The product of the codes of rounded operands; its derivative is as for the product of their numbers."""
    shapes, dtype = (x.shape, w.shape), _base_product(product).preferred_element_type or jnp.result_type(x, w)

    def run(values: list[Array], both: tuple[CodedArray, CodedArray]) -> Array:
        def sums_of_codes(left: CodedArray, right: CodedArray, *extra: Array) -> Array:
            return product.by_codes("forward", left, right, shapes, dtype, *extra)

        sums: Any = sums_of_codes
        if any(map(has_sharding, jax.tree.leaves(both))):  # loops and slices within would each need a sharding
            (out,) = jax.make_jaxpr(product)(*values).out_avals  # eval_shape gives no sharding of a mixed mesh
            sums = jax.sharding.auto_axes(sums, out_sharding=out.sharding)
        with jax.named_scope(JCHOP_SCOPE):
            return mark_results(sums(*both, *values[2:]))

    return straight_through(run, product, [x, w, *extra], both)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_product(
    product: AnyProduct, roundings: ProductRoundings, x: Array, w: Array, full: tuple, more: tuple
) -> Array:
    """The product of rounded operands; `full` are those that are to be rounded anew, in full precision."""
    keys, extra, both = more
    if both is not None:
        return _product_of_codes(product, x, w, both, extra)
    if roundings.matmul is None:
        return product(x, w, *extra)
    return product.emulate("forward", x, w, (x.shape, w.shape), roundings.matmul, keys["forward"])


@partial(always_jit, static_argnums=(0, 1), inline=True)
def _rounded_product_bwd(product: AnyProduct, roundings: ProductRoundings, residuals: tuple, g: Array) -> tuple:
    """Both backward products, of operands rounded anew along their sums, or as they were rounded."""
    x, w, (full_x, full_w), (keys, extra, _) = residuals
    by_codes, shapes = roundings.codes and roundings.gradient is not None, (x.shape, w.shape)

    def operand(which: Which, side: Literal[0, 1], numbers: Any, rounded: Any = None) -> Any:
        layout, spec = product.layouts(which)[side], roundings.operands(which)[side]
        key, rotation = keys[f"{('left', 'right')[side]} of {which}"], roundings.rotation_of(which)
        if by_codes:
            return encode_operand(layout.lay(numbers, rotation, keys[which]), spec, key)
        if numbers is None:
            return rounded
        return round_in_layout(layout, numbers, spec, key, rotation=rotation, rotation_key=keys[which])

    of_input = operand("input", 0, g), operand("input", 1, full_w, w)
    of_weight = operand("weight", 0, full_x, x), operand("weight", 1, g)
    if by_codes:
        with jax.named_scope(JCHOP_SCOPE):
            dx = product.by_codes("input", *of_input, shapes, x.dtype, *extra)
            dx, dw = mark_results((dx, product.by_codes("weight", *of_weight, shapes, w.dtype, *extra)))
    elif roundings.matmul is not None and isinstance(_base_product(product), DotProduct):
        dx = product.emulate("input", *of_input, shapes, roundings.matmul, keys["input"])
        dw = product.emulate("weight", *of_weight, shapes, roundings.matmul, keys["weight"])
    else:
        (dx,) = jax.linear_transpose(lambda t: product(t, of_input[1], *extra), x)(of_input[0])
        (dw,) = jax.linear_transpose(lambda t: product(of_weight[0], t, *extra), w)(of_weight[1])
    return dx, dw, None, None


def _base_product(product: AnyProduct) -> Any:
    return product.product if isinstance(product, OperandSwap) else product


_rounded_product.defvjp(
    lambda *args: (_rounded_product(*args), (*args[2:5], (*args[5][:2], None))),  # without the codes
    _rounded_product_bwd,
)


# -- the functions of JAX that layers call -----------------------------------------------------------------------------


def rounded_dot_general(
    x: Array,
    w: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    how: ProductRoundings,
    forms: OperandForms = _OPERANDS_ALONE,
) -> Array:
    """`jax.lax.dot_general` with rounded operands."""
    (cx, cw), (bx, bw) = (tuple(tuple(int(a) for a in axes) for axes in pair) for pair in dimension_numbers)
    contracting = tuple(a % x.ndim for a in cx), tuple(a % w.ndim for a in cw)
    batch = tuple(a % x.ndim for a in bx), tuple(a % w.ndim for a in bw)
    product = DotProduct(contracting, batch, (x.ndim, w.ndim), precision, preferred_element_type, out_sharding)
    check_operand_specs(product, how)
    return contract(product, x, w, how, forms)


def rounded_conv(
    x: Array,
    w: Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    how: ProductRoundings,
    forms: OperandForms = _OPERANDS_ALONE,
) -> Array:
    """`jax.lax.conv_general_dilated` with rounded operands."""
    ones = (1,) * (x.ndim - 2)
    pads = padding if isinstance(padding, str) else tuple((int(low), int(high)) for low, high in padding)
    windows = tuple(window_strides), pads, tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    more = precision, preferred_element_type, out_sharding
    product = ConvProduct(*windows, numbers, feature_group_count, *more)
    check_operand_specs(product, how)
    return contract(product, x, w, how, forms)


def rounded_einsum(
    subscripts: str,
    x: Array,
    w: Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    how: ProductRoundings,
    forms: OperandForms = _OPERANDS_ALONE,
) -> Array:
    """`jax.numpy.einsum` of two arrays, as one `rounded_dot_general` of rounded operands.

    Raises:
        ValueError: for an index that stands twice in an array, or in one array alone and not in the result.
    """
    if out_sharding is not None:
        raise NotImplementedError(f"out_sharding={out_sharding!r}: a quantized einsum has none; leave it None")
    dims, order, _ = einsum_dimensions(subscripts, x.ndim, w.ndim)
    y = rounded_dot_general(x, w, dims, precision, preferred_element_type, how=how, forms=forms)
    return y.transpose(order)


def einsum_dimensions(subscripts: str, *ndims: int) -> tuple[Any, tuple[int, ...], tuple[str, str]]:
    """An einsum of two arrays as a product: its dimension numbers, the order of its axes in the result, the indices."""
    left, right, result = einsum_letters(subscripts, *ndims)
    both = [c for c in left if c in right]
    batch, contracting = [c for c in both if c in result], [c for c in both if c not in result]
    dims = tuple(tuple(tuple(map(term.index, some)) for term in (left, right)) for some in (contracting, batch))
    letters = [*batch, *(c for c in left if c not in both), *(c for c in right if c not in both)]
    return dims, tuple(letters.index(c) for c in result), (left, right)


def einsum_letters(subscripts: str, *ndims: int) -> tuple[str, str, str]:
    """The indices of both arrays and of the result, one letter for each axis; an ellipsis becomes capitals."""
    terms, arrow, result = subscripts.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2 or not arrow:
        raise ValueError(f"subscripts={subscripts!r} must name two arrays and the result, as in 'ij,jk->ik'")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in subscripts]
    ellipsis_ndims = [(n - len(term) + 3) * ("..." in term) for term, n in zip(operands, ndims, strict=True)]
    widest = max(ellipsis_ndims)
    counts = f"subscripts={subscripts!r}: the ellipses stand for {ellipsis_ndims} axes; they must be as many"
    check(len(set(ellipsis_ndims) - {0}) < 2 and widest >= 0, counts)
    full = ["".join(spare[:count]) for count in (*ellipsis_ndims, widest)]
    left, right, out = (term.replace("...", more) for term, more in zip((*operands, result), full, strict=True))
    for term, ndim in zip((left, right), ndims, strict=True):
        if len(set(term)) != len(term) or len(term) != ndim:
            raise ValueError(f"subscripts={subscripts!r}: {term!r} must name each of {ndim} axes once")
    alone = [c for c in left + right if c not in out and not (c in left and c in right)]
    check(
        not alone and len(set(out)) == len(out) and set(out) <= set(left + right),
        f"subscripts={subscripts!r}: every index of the result must be one of an array, once, and every other index "
        "one of both arrays",
    )
    return left, right, out
