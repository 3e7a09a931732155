"""Products of codes: integers summed exactly, float8 multiplied as it is stored, scales behind the sums.

The sum. K numbers are summed over, in blocks in which neither operand's scale changes; e are elements, z zero points:

    block   S_g = sum of (e_x - z_x) (e_w - z_w), an exact integer if both are integers of at most 8 bits; else the sum
            that `jax.lax.dot_general` gives for float8 operands, or for both in float32, with float32 sums; in the
            kernel of Hopper GPUs the unit's sum of up to 256 products of float8, these sums added in float32
    scaled  t_g = S_g, times the scale of x if that changes along the sum, times the scale of w likewise
    sum     y = ((t_0 + t_1) + t_2) + ..., from the first block to the last
    scales  times the scale of x if it is one along the sum, times the scale of w likewise

Every line is rounded to nearest in float32 (float64 for results of that dtype); the result is rounded to its dtype.
Zero points are within the range of the codes, as `quantize` fits them. So the sum of integers has one value on every
device, however many numbers it has. XLA's CPU backend computes sums of floats in panels of 1,024, added in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jchop._common.bit_ops import CARRIERS, FLOAT32, varying_like
from jchop._common.settings import always_jit
from jchop._core.rounding.grid import carrier_holds
from jchop._core.scaled.groups import Groups
from jchop._core.xla.cpu import dot_with_one_row, dot_with_two_rows, integer_maximum, prevent_fma
from jchop._core.xla.gpu import dot_precision, pad_to_whole_words
from jchop._kernels.primitive import by_platform, make_op
from jchop._kernels.products import product_of_blocks
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._round.arguments import JCHOP_SCOPE, mark_results
from jchop._spec.spec import Spec
from jchop._storage import QArray, _codes, quantize
from jchop._storage._axis_groupings import WHOLE_AXIS, AxisGrouping, axis_groupings, scale_shape_of, with_groupings
from jchop.formats import ElementFormat, FloatFormat, IntegerFormat
from jchop.formats._catalogue import float8_e4m3fn, float8_e5m2


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scale", "zero", "qarray"],
    meta_fields=["block", "shift"],
)
@dataclass(frozen=True, eq=False)
class CodedArray:
    """An array as elements, scales and zero points, each of its shape, so that all move alike.

    Args:
        elements: int8 for integers of up to 8 bits, float8 for its values, else a float dtype that holds them.
        scale: of each element; None for a plain format, unless NaN of its numbers are marked (`expand_codes`).
        zero: of each element, int32; None if all are zero.
        block: how many numbers along the sum have one scale; None for all.
        qarray: the array itself, if it has not been moved since.
        shift: the number added to the elements of `qarray` to get these.
    """

    elements: Array
    scale: Array | None
    zero: Array | None
    block: int | None = None
    qarray: QArray | None = None
    shift: int = 0

    def map_arrays(self, move: Callable[[Array], Array]) -> CodedArray:
        """The array after a move of each of its parts."""
        return self.with_elements(move(self.elements), move)

    def with_elements(self, elements: Array, move: Callable[[Array], Array]) -> CodedArray:
        """Other elements, with its scales and zero points after a move of them."""
        scale, zero = (None if part is None else move(part) for part in (self.scale, self.zero))
        return CodedArray(elements, scale, zero, self.block)

    @property
    def is_plain(self) -> bool:
        """Whether it is of floats that were not rounded."""
        wide = jnp.issubdtype(self.elements.dtype, jnp.floating) and self.elements.dtype.itemsize > 1
        return self.scale is None and self.zero is None and self.qarray is None and wide

    def reshape(self, *shape: int) -> CodedArray:
        """The array in another shape."""
        return self.map_arrays(lambda v: v.reshape(shape))


# -- from numbers to codes ---------------------------------------------------------------------------------------------


def check_code_format(field: str, spec: Spec, where: Any, instead: str = "leave product='codes' out") -> None:
    """Refuse a format whose elements are not multiplied; the error ends with `instead`, the change that works.

    Raises:
        ValueError: that names the field, its value and the reason.
    """
    if why := why_no_codes(spec):
        raise ValueError(f"{field}={str(spec)!r} of the {where}: {why}, so its codes cannot be multiplied; {instead}")


def why_no_codes(spec: Spec) -> str:
    """Why elements of a format are not multiplied as codes; empty if they are."""
    fmt, scaled_format = spec.element, spec.scaled
    if not isinstance(fmt, FloatFormat) and (fmt.bits > 8 or not carrier_holds(Spec(fmt), FLOAT32)):
        return "its elements have more than 8 bits, or are no numbers of float32"
    if scaled_format is not None and scaled_format.zero_point == "float":
        return "its zero points are numbers"
    if scaled_format is not None and scaled_format.scale_rule.second is not None:
        return "its groups have levels of two formats"
    if scaled_format is not None and scaled_format.sparse is not None:
        return "it stores no codes of the numbers that sparse drops"
    return "its elements have no 1" if scaled_format is not None and fmt.code_of(1) is None else ""


def block_along_sum(spec: Spec, ndim: int) -> int | None:
    """How many numbers along the last of `ndim` axes share a scale; None for all."""
    if spec.scaled is None:
        return None
    kind = axis_groupings(spec.scaled, ndim)[-1]
    return None if kind == WHOLE_AXIS else kind if isinstance(kind, int) else 1


@partial(always_jit, static_argnames="spec", inline=True)
def encode_operand(operand: Array, spec: Spec | None, key: Array | None = None) -> CodedArray:
    """An array, with the sum along its last axis, as codes, without derivatives; without a spec as it is."""
    operand = lax.stop_gradient(operand)
    if spec is None:
        return CodedArray(operand, None, None)
    return replace(expand_codes(quantize(operand, spec, key), operand), block=block_along_sum(spec, operand.ndim))


def expand_codes(q: QArray, numbers: Array | None = None) -> CodedArray:
    """The elements, scales and zero points of a stored array, repeated for each element.

    If its `numbers` are given and its elements have no NaN, the scale of a group with a NaN is NaN. An array without
    scales then has the scale 1, or NaN for all.
    """
    _codes.check_code_dtype(q.qvalue, q.spec.element)
    with jax.named_scope(JCHOP_SCOPE):  # `emulate` rounds no scale
        elements, shift = _unit_elements(q)
        kinds: Sequence[AxisGrouping] = (WHOLE_AXIS,) * q.ndim
        scale, sizes = None, q.shape
        if (fmt := _codes.spec_of_part(q.spec, q.ndim).scaled) is not None:
            batch = _codes.batch_axes(q.spec, q.shape, q.scale)
            kinds, scale = axis_groupings(fmt, q.ndim, batch), group_scales(q)
            sizes = (1,) * batch + fmt.group_shape(q.shape[batch:])
        if numbers is not None and numbers.size and not q.spec.element.has_nan:
            known = jnp.float32(1) if scale is None else scale
            scale = jnp.where(_groups_with_nan(numbers, Groups(q.shape, sizes)), jnp.nan, known)

        def per_element(values: Array) -> Array:
            return jnp.broadcast_to(_codes.repeat_over_groups(values, kinds, q.shape), q.shape)

        zero = None if q.zero_point is None else per_element(q.zero_point).astype(jnp.int32)
        if shift:
            zero = (jnp.zeros(q.shape, jnp.int32) if zero is None else zero) - shift
        return CodedArray(elements, None if scale is None else per_element(scale), zero, None, q, -shift)


def _groups_with_nan(x: Array, groups: Groups) -> Array:
    """Whether each group has a NaN, in the shape of the scales."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"int{jnp.finfo(x.dtype).bits}"))
    largest = groups.squeeze(integer_maximum(groups.view(bits), groups.axes))
    return largest > lax.bitcast_convert_type(jnp.array(jnp.inf, x.dtype), bits.dtype)


def group_scales(q: QArray) -> Array:
    """The scale of each group, with its parts multiplied: the number of an element 1 in each group."""
    own = _codes.spec_of_part(q.spec, q.ndim).scaled
    assert own is not None
    batch = _codes.batch_axes(q.spec, q.shape, q.scale)
    kinds = axis_groupings(own, q.ndim, batch)
    shape = (*q.shape[:batch], *scale_shape_of(kinds[batch:], q.shape[batch:]))
    wide = "float64" if q.dtype == np.float64 else "float32"
    if not isinstance(q.scale, tuple) and q.scale.shape == shape and q.scale.dtype.name in CARRIERS:
        return q.scale.astype(wide)
    fmt = with_groupings(own, [1 if isinstance(kind, int) else kind for kind in kinds[batch:]])
    fmt = replace(fmt, scale=own.scale)
    one = q.spec.element.code_of(1)
    assert one is not None
    ones = jnp.full(shape or (1,), one, jnp.uint8 if q.spec.element.bits <= 8 else jnp.uint16)
    zero = None if q.zero_point is None else jnp.zeros_like(q.zero_point)
    size = shape[-1] if shape else None
    codes = _codes.store_codes(_codes.pack_entries(ones, q.spec.element), q.spec.element)
    single = QArray(codes, q.scale, zero, replace(q.spec, format=fmt), size, q.dtype)
    return _codes.decode_qarray(single.form(wide), single.qvalue, single.scale, single.zero_point)


def _unit_elements(q: QArray) -> tuple[Array, int]:
    """The elements in the smallest dtype that a unit takes, and by how much unsigned integers were lowered."""
    fmt, count = q.spec.element, 1 if q.length is None else q.length
    integer = isinstance(fmt, IntegerFormat)
    if _codes.native_dtype(fmt) is not None or (integer and fmt.bits == 8):
        whole = q.qvalue.reshape(q.shape)
        if not integer or fmt.signed:
            return whole, 0
        return (whole.astype(jnp.int16) - 128).astype(jnp.int8), 128
    numbers = _codes.decode_unscaled(q.qvalue, fmt, count, FLOAT32).reshape(q.shape)
    return numbers.astype(jnp.int8 if integer else float8_operand_dtype(fmt) or jnp.float32), 0


_FLOAT8_OPERANDS = ((float8_e4m3fn, jnp.float8_e4m3fn), (float8_e5m2, jnp.float8_e5m2))


def float8_operand_dtype(fmt: ElementFormat) -> Any:
    """The float8 dtype that has the values of a format; None if there is none."""
    if fmt.bits > 8:
        return None
    values = fmt.values()
    finite = values[~np.isnan(values)]
    return next((dtype for wide, dtype in _FLOAT8_OPERANDS if np.isin(finite, wide.values()).all()), None)


# -- the product -------------------------------------------------------------------------------------------------------


def to_batched_matrices(x: CodedArray, batch: int) -> CodedArray:
    """An array in the layout of its product as (batch, rows, contracting)."""
    return x.map_arrays(lambda v: v.reshape(math.prod(v.shape[:batch]), math.prod(v.shape[batch:-1]), v.shape[-1]))


def param_codes(qarray: QArray, layout: OperandLayout | None, shape: tuple[int, ...]) -> CodedArray:
    """The codes of a parameter of `shape` that is stored in a layout (None: with its own axes)."""
    parts = expand_codes(qarray)
    return parts if layout is None else parts.map_arrays(lambda v: layout.back(v, shape))


def restore_param_axes(q: QArray, layout: OperandLayout, shape: tuple[int, ...]) -> QArray | None:
    """A packed parameter with the axes that it had before it was laid out; None if that would split groups.

    Then no transpose stands between its numbers and the product. A compiler may take a transpose into the product,
    which then adds in another order than the product of the rounded parameter in training.
    """
    order = (*layout.free, *layout.contracting)
    try:
        apart = q.reshape(*(shape[axis] for axis in order))
    except ValueError:
        return None
    return apart.transpose(*sorted(range(len(order)), key=order.__getitem__))


class MatrixSums:
    """The sums of a product of (batch, m, k) and (batch, n, k). Other products differ in the methods that they replace.

    The last axis of each operand is along the sum; ``width`` numbers of the sum stand at one index of it.

    Args:
        apart: whether the rows of the right operand are known to be the last axis of memory.
        platform: "cpu" or "tpu" in a branch of a program for that platform alone.
    """

    width = 1
    apart = False
    platform: str | None = None

    def __init__(self, *, apart: bool = False, platform: str | None = None) -> None:
        self.apart, self.platform = apart, platform

    def shape(self, a: Array, b: Array) -> tuple[int, ...]:
        """The shape of the result."""
        return (*a.shape[:2], b.shape[1])

    def dot(self, a: Array, b: Array, dtype: Any) -> Array:
        """The sums of products of elements."""
        dims = (((2,), (2,)), ((0,), (0,)))
        return lax.dot_general(a, b, dims, precision=dot_precision(a.dtype), preferred_element_type=dtype)

    def on_gpu(self, a: Array, b: Array, dtype: Any) -> Array:
        """`dot` on a GPU."""
        if dtype != jnp.int32:
            return self.dot(a, b, dtype)
        # The library's product gives integers: without a barrier their conversion is an operation of its own after it.
        return lax.optimization_barrier(self.dot(pad_to_whole_words(a), pad_to_whole_words(b), dtype))

    def wide(self, a: Array, b: Array, dtype: Any) -> Array:
        """The sums of products of elements as numbers of a wider dtype."""
        return self.dot(a.astype(dtype), b.astype(dtype), dtype)

    def left(self, rows: Array) -> Array:
        """Numbers for rows of the left operand, (batch, m), as numbers for results, in a shape that broadcasts."""
        return rows[..., None]

    def right(self, rows: Array) -> Array:
        """Numbers for rows of the right operand, (batch, n), as numbers for results, in a shape that broadcasts."""
        return rows[..., None, :]

    def left_sum(self, a: Array) -> Array:
        """The sum of the left elements, int32, for each result."""
        return self.left(jnp.sum(a, -1, jnp.int32))

    def right_sum(self, b: Array) -> Array:
        """The sum of the right elements, int32, for each result."""
        return self.right(jnp.sum(b, -1, jnp.int32))

    def run(self, on_cpu: Callable[..., Array], native: Callable[..., Array], a: Array, b: Array) -> Array:
        """Sums on a CPU, or by the units of another device; `native` takes a `dot` first."""
        ways = {"cpu": on_cpu, "tpu": partial(native, self.dot)}
        return ways[self.platform](a, b) if self.platform else by_platform(partial(native, self.on_gpu), a, b, **ways)

    def integers(self, a: Array, b: Array) -> Array:
        """The exact sums of int8, which int32 holds."""
        return self.run(self.integers_on_cpu, lambda dot, a, b: dot(a, b, jnp.int32), a, b)

    def integers_on_cpu(self, a: Array, b: Array) -> Array:
        """The exact sums of int8 on a CPU."""
        row = dot_with_one_row(a, b) if self.apart and a.shape[1] == 1 else None
        return row if row is not None else dot_with_two_rows(partial(self.dot, dtype=jnp.int32), a, b)

    def panels(self, product: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        """A product panel by panel along the sum, added from the first to the last: no operand is written wide."""
        size = _PANEL_LENGTH // self.width
        whole, rest = divmod(a.shape[-1], size)
        total = product(a[..., :size], b[..., :size])

        def panel(v: Array, i: Array) -> Array:
            return lax.dynamic_slice_in_dim(v, i * size, size, v.ndim - 1)

        if whole > 1:
            total = lax.fori_loop(1, whole, lambda i, total: total + product(panel(a, i), panel(b, i)), total)
        return total + product(a[..., -rest:], b[..., -rest:]) if rest and whole else total


#: 1,024 products of integers of 8 bits have a sum of at most 2^24: every sum on the way is exact in float32.
_PANEL_LENGTH = 1024
#: The most numbers of a sum that one index may stand for.
LARGEST_SUM_WIDTH = _PANEL_LENGTH
_MATRIX_SUMS = MatrixSums()


def multiply_codes(x: CodedArray, w: CodedArray, dtype: Any, sums: MatrixSums = _MATRIX_SUMS) -> Array:
    """The product of (batch, m, k) and (batch, n, k), as (batch, m, n).

    Args:
        x: the first operand.
        w: the second.
        dtype: of the result.
        sums: the sums of another product, with its shapes.

    Raises:
        ValueError: for blocks of lengths of which neither divides the other.
    """
    count = x.elements.shape[-1]
    blocks = [count if v.block is None or v.scale is None else min(v.block, count) for v in (x, w)]
    block = min(blocks)
    if count and (max(blocks) % block and max(blocks) != count):
        raise ValueError(
            f"the operands of a product of codes have scales of {blocks[0]} and of {blocks[1]} numbers along the sum; "
            "one length must divide the other"
        )
    out = sums.shape(x.elements, w.elements)
    if not all(math.prod(shape) for shape in (x.elements.shape, w.elements.shape, out)):
        return jnp.zeros(out, dtype)
    with jax.named_scope(JCHOP_SCOPE):
        return mark_results(_multiply_blocks(x, w, block, blocks, dtype, sums))


def scaled_sum_dtype(dtype: Any) -> Any:
    """The dtype of scaled sums."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def scale_sums(total: Array, scale: Array) -> Array:
    """Sums times the scales of rows or columns, rounded before anything is added to them."""
    scale = scale.astype(total.dtype)
    product = total * scale
    return prevent_fma(product, jnp.broadcast_to(scale, product.shape)) if total.dtype == jnp.float32 else product


def _multiply_blocks(
    x: CodedArray, w: CodedArray, block: int, blocks: Sequence[int], dtype: Any, sums: MatrixSums
) -> Array:
    """The product of operands with scales of `blocks` numbers along the sum each."""
    parts = {
        name: values[..., :: block if length < x.elements.shape[-1] else length]
        for side, v, length in zip("xw", (x, w), blocks, strict=True)
        for name, values in ((f"{side}_scale", v.scale), (f"{side}_zero", v.zero))
        if values is not None
    }
    arrays = x.elements, w.elements, *parts.values()
    static = {"names": tuple(parts), "block": block, "dtype": jnp.dtype(dtype).name}
    op = partial(product_of_blocks_op, **static, apart=sums.apart)
    if type(sums) is MatrixSums and block < x.elements.shape[-1]:
        return op(*arrays)
    if type(sums) is not MatrixSums or any(v.elements.dtype.itemsize > 1 for v in (x, w)):
        return _multiply_blocks_body(*arrays, **static, sums=sums)
    # A single block has a kernel on some GPUs alone; elsewhere it is not kept from the operations around it.
    own = {p: MatrixSums(apart=sums.apart, platform=p) for p in ("cpu", "tpu")}
    bodies = {p: partial(_multiply_blocks_body, **static, sums=of_platform) for p, of_platform in own.items()}
    return by_platform(op, *arrays, **bodies)


def _multiply_blocks_body(
    x: Array,
    w: Array,
    *parts: Array,
    names: tuple[str, ...],
    block: int,
    dtype: str,
    apart: bool = False,
    sums: MatrixSums | None = None,
) -> Array:
    """The scaled sums of the blocks, added from the first to the last.

    Args:
        x: elements (batch, m, k).
        w: elements (batch, n, k).
        parts: of each operand scales and zero points, (batch, rows, blocks), or (batch, rows, 1) if they are one along
            the sum.
        names: the name of each part, of "x_scale", "w_scale", "x_zero", "w_zero".
        block: numbers of the sum in a block.
        dtype: of the result.
        apart: as in `MatrixSums`.
        sums: the sums of another product.
    """
    sums = sums or MatrixSums(apart=apart)
    parts_by_name, sum_dtype, size = dict(zip(names, parts, strict=True)), scaled_sum_dtype(dtype), x.shape[-1]
    count = -(-size // block)

    def split_blocks(v: Array) -> Array:
        """(blocks, ..., block); zeros fill up the last block."""
        v = jnp.pad(v, ((0, 0),) * (v.ndim - 1) + ((0, count * block - size),))
        return jnp.moveaxis(v.reshape(*v.shape[:-1], count, block), -2, 0)

    changing = {name: jnp.moveaxis(v, -1, 0)[..., None] for name, v in parts_by_name.items() if v.shape[-1] > 1}
    lengths = np.minimum(block, size - block * np.arange(count)).astype(np.int32)
    spreads = {"x_scale": sums.left, "w_scale": sums.right}

    def sum_of_block(left: Array, right: Array, length: Any, changed: dict[str, Array]) -> Array:
        own = parts_by_name | changed
        a, b = (CodedArray(v, None, own.get(f"{side}_zero")) for side, v in (("x", left), ("w", right)))
        term = _block_sum(a, b, length, sum_dtype, sums)
        for name, spread in spreads.items():
            if name in changed:
                term = scale_sums(term, spread(changed[name][..., 0]))
        return term

    def add_block(total: Array, block_of_each: Any) -> tuple[Array, None]:
        return total + sum_of_block(*block_of_each), None

    if count == 1:
        total = sum_of_block(x, w, size * sums.width, {})
    else:
        start = varying_like(jnp.zeros(sums.shape(x, w), sum_dtype), x, w, *parts)
        total = lax.scan(add_block, start, (split_blocks(x), split_blocks(w), lengths, changing))[0]
    for name, spread in spreads.items():
        if name in parts_by_name and name not in changing:
            total = scale_sums(total, spread(parts_by_name[name][..., 0]))
    return total.astype(dtype)


product_of_blocks_op = make_op(
    "jchop_product_of_blocks",
    _multiply_blocks_body,
    tpu=product_of_blocks.TPU_KERNEL,
    gpu=product_of_blocks.HOPPER_KERNEL,
)


def _block_sum(x: CodedArray, w: CodedArray, length: Any, sum_dtype: Any, sums: MatrixSums) -> Array:
    """The sums of one block of `length` numbers, in which zero points do not change."""
    if x.elements.dtype == w.elements.dtype == jnp.int8:
        return _integer_block_sum(x, w, length, sum_dtype, sums)
    kinds = {jnp.dtype(v.elements.dtype) for v in (x, w)}
    small = kinds <= {jnp.dtype(t) for t in (jnp.int8, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)}
    operand_dtype = sum_dtype if not small or any(v.zero is not None for v in (x, w)) else jnp.bfloat16
    left, right = (
        v.elements if v.zero is None else v.elements.astype(sum_dtype) - v.zero[..., :1].astype(sum_dtype)
        for v in (x, w)
    )
    units = kinds <= {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}

    def native(dot: Callable[..., Array], a: Array, b: Array) -> Array:
        return dot(a, b, sum_dtype) if units else dot(a.astype(operand_dtype), b.astype(operand_dtype), sum_dtype)

    by_panels = partial(sums.panels, lambda a, b: sums.wide(a, b, sum_dtype))
    return sums.run(by_panels, native, left, right)


def exact_block_sum(x: CodedArray, w: CodedArray, length: Any, sums: MatrixSums = _MATRIX_SUMS) -> Array:
    """The sum of one block of `length` numbers, of int8, which int32 holds."""
    a, b = x.elements, w.elements
    total = sums.integers(a, b)
    za = None if x.zero is None else sums.left(x.zero[..., 0])
    zb = None if w.zero is None else sums.right(w.zero[..., 0])
    if zb is not None:
        total = total - sums.left_sum(a) * zb
    if za is not None:
        total = total - za * sums.right_sum(b)
    return total if za is None or zb is None else total + length * za * zb


def _integer_block_sum(x: CodedArray, w: CodedArray, length: Any, sum_dtype: Any, sums: MatrixSums) -> Array:
    """The exact sum, rounded once. One that int32 may not hold is cut, and its parts are added as halves of 16 bits."""
    widest = [128 if v.zero is None else 255 for v in (x, w)]
    panel = _PANEL_LENGTH // sums.width
    most = (2**31 - 1) // math.prod(widest) // (panel * sums.width) * panel
    size = x.elements.shape[-1]
    parts = []
    for start in range(0, size, most):
        a, b = (replace(v, elements=v.elements[..., start : start + most]) for v in (x, w))
        count = length if size <= most else min(most, size - start) * sums.width
        parts.append(exact_block_sum(a, b, count, sums))
    if len(parts) == 1:
        return parts[0].astype(sum_dtype)
    high, low = (jnp.sum(jnp.stack(halves), 0) for halves in zip(*((v >> 16, v & 0xFFFF) for v in parts), strict=True))
    return high.astype(sum_dtype) * 65536 + low.astype(sum_dtype)
