"""The arithmetic of a sum of products: the roundings, the order of the additions, and the sums of tensor cores.

Throughout, P rounds products and A rounds accumulator values. One output element is a sum of the K products
a_k b_k, k = 0 ... K-1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jchop._common import checks
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat
from jchop.formats.scaled.scaled import as_format

#: The sequential orders of multiply-adds, which can be fused.
_FUSABLE_ORDERS = ("sequential", "blocked")
#: The numbers that each order takes.
_ORDER_NUMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sequential": (),
        "blocked": ("block",),
        "pairwise": (),
        "matrix_unit": ("block",),
        "aligned": ("block", "bits"),
        "aligned_apart": ("block", "bits"),
        "aligned_halves": ("block", "bits"),
        "aligned_sums": ("block", "bits"),
        "blocked_pairwise": ("block",),
    }
)
#: The orders whose blocks are summed exactly on one grid.
_ALIGNED_ORDERS = ("aligned", "aligned_apart", "aligned_halves", "aligned_sums")
#: The orders that take operands of a scaled format.
_SCALED_OPERAND_ORDERS = ("aligned", "aligned_sums")
#: Products in one of the sums of ``aligned_sums``.
MERGED = 16
_ORDER_KINDS = tuple(_ORDER_NUMBERS)
#: Why an order has no rounded products.
_EXACT_PRODUCT_REASONS = {
    "matrix_unit": "order='matrix_unit' sums the products in the carrier",
    **{kind: f"order={kind!r} aligns the exact products" for kind in _ALIGNED_ORDERS},
}
_MAX_BLOCK = (1 << 31) - 1
#: The most products in a block of an aligned order, and the most fraction bits of its grid.
_MAX_ALIGNED_BLOCK, _MAX_GRID_BITS = 64, 45


@dataclass(frozen=True, repr=False)
class Order(checks.FieldsRepr):
    """The order in which products are added; its text is ``"sequential"``, ``"blocked(8)"`` and so on.

    * ``sequential``: c <- A(c + P(a_k b_k)) from c = 0, k ascending.
    * ``blocked(b)``: each block of b products is summed in this way from zero, then the block sums (FABsum: Blanchard,
      Higham and Mary, SIAM J. Sci. Comput. 42, 2020).
    * ``pairwise``: a sum of n is A(left + right), the left part the largest power of two below n.
    * ``matrix_unit(b)``: c <- A(c + d), with d the sum of a block of b products by the carrier's dot. Each block has
      one rounding into the accumulator.
    * ``aligned(b, f)``: a tensor core. c <- A(t(c) + t(a_1 b_1) + ... + t(a_b b_b)). t drops the bits below 2^(M - f),
      toward zero. M is the largest exponent of the b + 1 terms. The sum is exact, so A is the only rounding. The
      exponent of a product is the exponent of a plus the exponent of b, so a significand may be as large as 4.
      Subnormal numbers have the exponent of the smallest normal number of their format.
    * ``aligned_apart(b, f)``: the same in two stages. The b products are aligned with each other, toward zero, and
      summed exactly; a product of 2^128 and more is infinite. Then this sum loses the bits below 2^(N - f - 7), and c
      the bits below 2^(N - f), downward. N is the larger of M and the exponent of c.
    * ``aligned_halves(b, f)``: as ``aligned_apart``, but the products of even and of odd index are first summed apart,
      each on its own grid. Then both sums lose the bits below 2^(M - f), downward, with M the larger of their largest
      exponents. If the exponent of c is less than N - f - 1, c counts as zero.
    * ``aligned_sums(b, f)``: as ``aligned``, with operands of a scaled format. 16 products of elements at a time are
      summed exactly. The exponent of this sum times its two scales is the sum of the exponents of the scales.
    * ``blocked_pairwise(b)``: c <- A(c + d), with d the pairwise sum of a block of b products.

    The last block may be smaller. Aligned orders are computed in float32. A sum of 2^128 and more is infinite unless A
    saturates. A sum of zero is +0. An infinite or NaN product is added as in IEEE 754. The aligned orders are defined
    as in MMA-Sim (arXiv 2511.10909); `jchop.tensor_core` has the numbers of each unit.

    Args:
        kind: one of the names above.
        block: products in a block, b >= 1, for the orders that have blocks (at most 64 for the aligned ones).
        bits: f, the fraction bits that alignment keeps, 1 to 45, for the aligned orders; else None.
        promote_every: for the aligned orders, a multiple of `block`. Each part of so many products is summed from zero.
            Its sum is added to a float32 total, to nearest, ties to even. Default None: one sum.

    Raises:
        TypeError, ValueError: for an unknown kind, or a number that is missing, superfluous or out of range.

    Example:
        >>> import jchop as jc
        >>> str(jc.Order("blocked", 8)), jc.Order.parse("pairwise")
        ('blocked(8)', Order(kind='pairwise'))
        >>> str(jc.Order("aligned", 32, 13, promote_every=128))
        'aligned(32, 13, promote_every=128)'
    """

    kind: str = "sequential"
    block: int | None = None
    bits: int | None = None
    promote_every: int | None = None

    def __post_init__(self) -> None:
        checks.check_choice("order", self.kind, _ORDER_KINDS)
        most = _MAX_ALIGNED_BLOCK if self.aligned else _MAX_BLOCK
        self._check_number("block", "block length", "blocks", most)
        self._check_number("bits", "number of fraction bits", "grid", _MAX_GRID_BITS)
        self._check_promotion()

    def _check_number(self, field: str, noun: str, feature: str, most: int) -> None:
        value = getattr(self, field)
        if field in _ORDER_NUMBERS[self.kind]:
            if value is None:
                example = ", ".join(["16", "25"][: len(_ORDER_NUMBERS[self.kind])])
                raise ValueError(f"order={self.kind!r} needs a {noun}, as in '{self.kind}({example})'")
            object.__setattr__(self, field, checks.check_int(f"order: {field} of {self.kind}", value, 1, most))
        elif value is not None:
            having = tuple(kind for kind, parts in _ORDER_NUMBERS.items() if field in parts)
            raise ValueError(f"order={self.kind!r} has no {feature}, but {field}={value!r}; orders with: {having}")

    def _check_promotion(self) -> None:
        if self.promote_every is None:
            return
        if not self.aligned:
            raise ValueError(
                f"order={self.kind!r} is never promoted, but promote_every={self.promote_every!r}; orders that can be: "
                f"{_ALIGNED_ORDERS}"
            )
        every, block = checks.check_int("order: promote_every", self.promote_every, 1, _MAX_BLOCK), self.block or 1
        checks.check(not every % block, f"promote_every={every} must be a multiple of the block length {block}")
        object.__setattr__(self, "promote_every", every)

    @property
    def aligned(self) -> bool:
        """Whether a block is summed exactly, on one grid."""
        return self.kind in _ALIGNED_ORDERS

    def __str__(self) -> str:
        numbers = [str(getattr(self, field)) for field in _ORDER_NUMBERS[self.kind]]
        if self.promote_every is not None:
            numbers.append(f"promote_every={self.promote_every}")
        return f"{self.kind}({', '.join(numbers)})" if numbers else self.kind

    @staticmethod
    def parse(text: str) -> Order:
        """The order of a text, for example ``"matrix_unit(16)"``."""
        match = _ORDER_TEXT.fullmatch(checks.check_text("order", text))
        if match is None or match["kind"] not in _ORDER_KINDS:
            raise ValueError(f"order={checks.quote(text)} is not known; allowed: {_ORDER_CHOICES}")
        texts = match["numbers"].split(",") if match["numbers"] else ()
        numbers = dict(zip(("block", "bits"), map(int, texts), strict=False))
        every = None if match["every"] is None else int(match["every"])
        return Order(match["kind"], **numbers, promote_every=every)


_ORDER_INTEGER = r"\s*[0-9]{1,20}\s*"
_ORDER_TEXT = re.compile(
    rf"(?P<kind>[a-z_]+)(?:\((?P<numbers>{_ORDER_INTEGER}(?:,{_ORDER_INTEGER})?)(?:,\s*promote_every\s*=(?P<every>{_ORDER_INTEGER}))?\))?"
)
_ORDER_CHOICES = (
    "'sequential', 'blocked(b)', 'pairwise', 'matrix_unit(b)', 'blocked_pairwise(b)' with a block length b >= 1, and "
    "'aligned(b, f)', 'aligned_apart(b, f)', 'aligned_halves(b, f)', 'aligned_sums(b, f)' with f fraction bits, also "
    "'aligned(b, f, promote_every=n)'"
)


@dataclass(frozen=True, repr=False)
class MatmulSpec(checks.FieldsRepr):
    """The arithmetic of a matrix product or another sum of products: every rounding in it, and the order of the sum.

    Each of the three roundings is applied once, to the exact result of its operation, without an intermediate rounding
    to the carrier, in every mode. None stands for the carrier: a product or a sum is then the carrier's (to nearest,
    ties to even), and an operand is not rounded.

    Args:
        operands: the rounding of both operands before the product: a `Spec`, a format, or text; default None. For
            `jchop.math.matmul` with the order ``aligned`` it may be a scaled format whose scales are powers of two.
            With ``aligned_sums`` the format has groups of a multiple of 16 along the summed axis. Elements are
            multiplied, and the exponents of the scales count for the alignment.
        product: P, the rounding of every product a_k b_k; default None. Not with ``fused``, ``matrix_unit`` or the
            aligned orders, which have no separate product.
        accumulate: A, the rounding of every sum; default None, **the carrier** (float32, for example), not the
            operands' format.
        order: an `Order`, or its text: ``"sequential"`` (the default), ``"blocked(b)"``, ``"pairwise"``,
            ``"matrix_unit(b)"``, ``"aligned(b, f)"``, ``"aligned_apart(b, f)"``, ``"blocked_pairwise(b)"``, and so on.
        fused: c <- A(c + a_k b_k), with the exact product (fused multiply-add); for the orders ``sequential`` and
            ``blocked``. Default False.

    Raises:
        TypeError, ValueError: for a field that is not allowed, or has no effect beside the others.

    Example:
        >>> import jchop as jc
        >>> spec = jc.MatmulSpec("e4m3", product="e5m10", accumulate="e5m10:stochastic", order="blocked(8)")
        >>> str(spec)
        'operands=float8_e4m3, product=e5m10, accumulate=e5m10:stochastic, order=blocked(8)'
    """

    operands: Spec | None = None
    product: Spec | None = None
    accumulate: Spec | None = None
    order: Order = Order()
    fused: bool = False

    if TYPE_CHECKING:  # the arguments may have more types than the fields

        def __init__(
            self,
            operands: SpecLike | None = ...,
            product: SpecLike | None = ...,
            accumulate: SpecLike | None = ...,
            order: Order | str = ...,
            fused: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in _ROUNDING_FIELDS:
            value = getattr(self, name)
            spec = None if value is None else as_spec(value, name, scaled=name == "operands")
            object.__setattr__(self, name, spec)
        if not isinstance(self.order, Order | str):
            raise TypeError(f"order={self.order!r} must be an Order or its text: {_ORDER_CHOICES}")
        object.__setattr__(self, "order", Order.parse(self.order) if isinstance(self.order, str) else self.order)
        checks.check_bool("fused", self.fused)
        self._check_scaled_operands()
        if self.fused and self.order.kind not in _FUSABLE_ORDERS:
            raise ValueError(f"fused=True is for the orders {_FUSABLE_ORDERS}, not order={str(self.order)!r}")
        why = "fused=True adds the exact product" if self.fused else _EXACT_PRODUCT_REASONS.get(self.order.kind)
        if why is not None and self.product is not None:
            raise ValueError(f"product={str(self.product)!r} is never used, since {why}; leave product=None")
        self._check_gradients()

    def _check_scaled_operands(self) -> None:
        fmt, aligned_sums = None if self.operands is None else self.operands.scaled, self.order.kind == "aligned_sums"
        if fmt is None:
            checks.check(
                not aligned_sums, f"order={str(self.order)!r} needs operands of a scaled format, such as 'nvfp4'"
            )
            return
        along = isinstance(fmt.group, int) and fmt.axis == -1 and fmt.zero_point is None and fmt.sparse is None
        floats = isinstance(fmt.element, FloatFormat) and isinstance(fmt.scale, FloatFormat)
        if self.order.kind not in _SCALED_OPERAND_ORDERS:
            or_else = ", or take order='aligned(b, f)' or 'aligned_sums(b, f)'" if along and floats else ""
            raise ValueError(f"operands={str(self.operands)!r} is a scaled format, and order={str(self.order)!r} adds "
                             "numbers without scales; round both arrays before, along the axis of the sum, with "
                             f"jchop.round_to_format{or_else}")  # fmt: skip
        if not along or not floats or self.operands.rounding.stochastic:  # type: ignore[union-attr]
            raise ValueError(f"operands={str(self.operands)!r}: order={str(self.order)!r} takes elements and scales "
                             "that are floats, in groups along the last axis, rounded to a neighbour, none of them "
                             "dropped")  # fmt: skip
        fits = _is_merged_sum_exact(fmt, self.order) if aligned_sums else not fmt.scale_format.frac_bits
        if not fits:
            need = (
                f"groups of a multiple of {MERGED}, elements and scales of few bits"
                if aligned_sums
                else "powers of two"
            )
            raise ValueError(f"operands={str(self.operands)!r}: order={str(self.order)!r} needs {need}")

    @property
    def group(self) -> int:
        """The number of elements under one scale; 0 if operands have no scales."""
        fmt = None if self.operands is None else self.operands.scaled
        return 0 if fmt is None else fmt.group  # type: ignore[return-value]

    def _check_gradients(self) -> None:
        for name in ("product", "accumulate"):
            spec = getattr(self, name)
            if spec is not None and spec.gradient != Gradient():
                raise ValueError(f"{name}={str(spec)!r} has a gradient; only that of operands is used: derivatives "
                                 "are those of the product of the rounded operands in the carrier")  # fmt: skip
        backward = None if self.operands is None else self.operands.gradient.round
        if backward is not None and backward.rounding.stochastic:
            raise ValueError(f"operands={str(self.operands)!r} rounds cotangents stochastically, for which there is no "
                             "key; use round_to_format with a gradient_key on the operands instead")  # fmt: skip

    @property
    def stochastic(self) -> bool:
        """Whether any rounding draws random bits, and therefore needs a key."""
        return any(
            spec is not None and spec.rounding.stochastic for spec in map(self.__getattribute__, _ROUNDING_FIELDS)
        )

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in _ROUNDING_FIELDS if getattr(self, name) is not None]
        return ", ".join([*parts, f"order={self.order}", *["fused"] * self.fused])


_ROUNDING_FIELDS = ("operands", "product", "accumulate")


def _is_merged_sum_exact(fmt: ScaledFormat, order: Order) -> bool:
    """Whether a sum of products times its scales is exact in float32, and a block's sum in two words of 24 bits."""
    element, block = fmt.element, order.block or 0
    assert isinstance(element, FloatFormat) and isinstance(fmt.group, int) and order.bits is not None
    bits = element.emax + 1 - (element.emin - element.frac_bits) + fmt.scale_format.frac_bits + 1
    units = 4 << (2 * (element.emax + 1) + order.bits)
    return fmt.group % MERGED == block % MERGED == 0 and 2 * bits + 4 <= 24 and units * block <= 1 << 54


#: A `MatmulSpec`, or a value that is converted to one.
SumSpecLike = MatmulSpec | SpecLike


def as_matmul_spec(value: object, argument: str = "spec") -> MatmulSpec:
    """A `MatmulSpec`; one spec alone stands for every rounding in it, in sequential order."""
    if isinstance(value, MatmulSpec):
        return value
    if not isinstance(value, str) and not isinstance(as_format(value), Spec | ElementFormat | ScaledFormat):
        raise TypeError(
            f"{argument}={value!r} must be a MatmulSpec, such as MatmulSpec(product='e5m10', accumulate='e5m10'), or "
            "a Spec, a format or text for every rounding"
        )
    spec = as_spec(value, argument)
    return MatmulSpec(spec, spec, spec)


# == tensor cores ======================================================================================================


@dataclass(frozen=True)
class TensorCore:
    """One unit and type of operands: its arithmetic with a float32 accumulator, and the source.

    Args:
        spec: the arithmetic.
        source: the publication that says so.
        narrow: whether the unit has a float16 accumulator too.

    Example:
        >>> import jchop as jc
        >>> row = jc.TENSOR_CORES["hopper"]["fp8"]
        >>> str(row.spec.order), row.source.split()[0]
        ('aligned(32, 13)', 'MMA-Sim')
    """

    spec: MatmulSpec
    source: str
    narrow: bool = False


_MMA_SIM = "MMA-Sim (github.com/microsoft/MMA-Sim, c785138; arXiv 2511.10909)"
_FASI_2021 = "Fasi, Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330, 2021; " + _MMA_SIM
_MMA_SIM_FDPA = "MMA-Sim (github.com/microsoft/MMA-Sim, 0cb7846, arithmetic/fdpa.py; arXiv 2511.10909)"
_CDNA1_SOURCE = _MMA_SIM + "; later revisions of MMA-Sim sum four products of CDNA1 and c exactly"
_TPU_SOURCE = (
    "cloud.google.com/tpu/docs/bfloat16: bfloat16 products, float32 sums; the order of the sums and their rounding "
    "are not published, so the order is that of the array's 128 rows, and a block's sum is the carrier's"
)
_TF32_TOWARD_ZERO = "tf32:toward_zero"


def _core(
    operands: str, total: str, order: str, source: str = _MMA_SIM, product: str | None = None, narrow: bool = False
) -> TensorCore:
    """A row of the table of tensor cores, from the texts of its specs and of its order."""
    return TensorCore(MatmulSpec(operands, product, total, order), source, narrow)


def _aligned_core(operands: str, block: int, bits: int, source: str = _MMA_SIM, narrow: bool = False) -> TensorCore:
    """An NVIDIA unit; with 13 bits the accumulator has no more either."""
    total = "e8m13:toward_zero" if bits == 13 else "binary32:toward_zero"
    return _core(operands, total, f"aligned({block}, {bits})", source, narrow=narrow)


def _pairwise_core(operands: str, block: int, source: str, flush: bool = False) -> TensorCore:
    end = ":flush" * flush
    return _core(operands + end, "binary32" + end, f"blocked_pairwise({block})", source, "binary32" + end)


def _nvidia_cores(halves: int, bits: int, source: str = _MMA_SIM) -> dict[str, TensorCore]:
    return {
        "fp16": _aligned_core("binary16", halves, bits, source, narrow=True),
        "bf16": _aligned_core("bfloat16", halves, bits, source),
        "tf32": _aligned_core(_TF32_TOWARD_ZERO, halves // 2, bits, source),
    }


def _nvidia_fp8_cores(block: int, bits: int) -> dict[str, TensorCore]:
    return {
        name: _aligned_core(operands, block, bits, narrow=True)
        for name, operands in (("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"))
    }


#: The scaled types of Blackwell: the format of the operands and the order.
_BLACKWELL_SCALED = {
    "mxfp8": ("mxfp8_e4m3", "aligned(32, 25)"),
    "mxfp8_e5m2": ("mxfp8_e5m2", "aligned(32, 25)"),
    "mxfp4": ("mxfp4", "aligned_sums(64, 35)"),
    "nvfp4": ("nvfp4", "aligned_sums(64, 35)"),
}
#: Types that a unit has, but of which no model is published.
_TYPES_WITHOUT_MODEL = {
    "blackwell": ("fp6", "mxfp6", "fp6_e3m2", "fp6_e2m3", "fp4", "mxfp6_e3m2", "mxfp6_e2m3"),
    "tpu": ("fp8", "fp8_e5m2", "int8", "int4"),
}

#: The units by name, and of each the types of operands by name. Each has a `TensorCore`: its arithmetic and the source.
TENSOR_CORES: Mapping[str, Mapping[str, TensorCore]] = MappingProxyType(
    {
        unit: MappingProxyType(types)
        for unit, types in {
            "volta": {"fp16": _aligned_core("binary16", 4, 23, _FASI_2021, narrow=True)},
            "turing": {"fp16": _aligned_core("binary16", 8, 24, _FASI_2021, narrow=True)},
            "ampere": _nvidia_cores(8, 24, _FASI_2021),
            "ada": {**_nvidia_cores(8, 24), **_nvidia_fp8_cores(16, 13)},
            "hopper": {**_nvidia_cores(16, 25), **_nvidia_fp8_cores(32, 13)},
            "blackwell": {
                **_nvidia_cores(16, 25),
                **_nvidia_fp8_cores(32, 25),
                **{
                    name: _core(operands, "binary32:toward_zero", order, _MMA_SIM_FDPA)
                    for name, (operands, order) in _BLACKWELL_SCALED.items()
                },
            },
            "cdna1": {
                "fp16": _pairwise_core("binary16", 4, _CDNA1_SOURCE),
                "bf16": _pairwise_core("bfloat16", 2, _CDNA1_SOURCE),
            },
            "cdna2": {
                "fp16": _pairwise_core("binary16", 4, _MMA_SIM, True),
                "bf16": _pairwise_core("bfloat16", 4, _MMA_SIM, True),
            },
            "cdna3": {
                "fp16": _core("binary16", "binary32", "aligned_apart(8, 24)"),
                "bf16": _core("bfloat16", "binary32", "aligned_apart(8, 24)"),
                "tf32": _core(_TF32_TOWARD_ZERO, "binary32", "aligned_apart(4, 24)"),
                "fp8": _core("float8_e4m3fnuz", "binary32", "aligned_halves(16, 24)", _MMA_SIM_FDPA),
                "fp8_e5m2": _core("float8_e5m2fnuz", "binary32", "aligned_halves(16, 24)", _MMA_SIM_FDPA),
            },
            "tpu": {"bf16": TensorCore(MatmulSpec("bfloat16", order="matrix_unit(128)"), _TPU_SOURCE)},
        }.items()
    }
)


def tensor_core(unit: str, dtype: str, *, out: str = "binary32", promote_every: int | None = None) -> MatmulSpec:
    """The arithmetic of a tensor core, for `jchop.math.matmul` and every other function that accepts a `MatmulSpec`.

    NVIDIA's units add k products and the accumulator exactly on one grid of f fraction bits, ``aligned(k, f)``. They
    cut the sum to float32, or for fp8 on Ada and Hopper to 13 fraction bits. Hopper and later units need no other order
    than k ascending. The AMD units and the TPU follow other orders of `Order`.

    The operands are rounded to their type first. Block-scaled types are mxfp8, mxfp4 and nvfp4. Their elements are
    multiplied, and the scales of the blocks count for the alignment. `jchop.math.matmul` alone accepts their specs.
    After the sums the result is multiplied by the product of both tensors' scales, if the format has them, each product
    rounded to nearest float32.

    In a `jchop.Rule` the rule rounds them. So pass ``dataclasses.replace(spec, operands=None)`` of a type without
    scales. Then subnormal operands are aligned as if they were normal, and scales are part of the operands.

    Args:
        unit: ``"volta"``, ``"turing"``, ``"ampere"``, ``"ada"``, ``"hopper"``, ``"blackwell"`` (datacenter, tcgen05),
            ``"cdna1"``, ``"cdna2"``, ``"cdna3"`` or ``"tpu"``.
        dtype: ``"fp16"``, ``"bf16"``, ``"tf32"`` (operands cut to 10 fraction bits), ``"fp8"`` (e4m3fn; e4m3fnuz on
            CDNA3) or ``"fp8_e5m2"``, if the unit has it. On Blackwell also ``"mxfp8"`` (e4m3fn), ``"mxfp8_e5m2"``,
            ``"mxfp4"`` and ``"nvfp4"``. Or the format of the operands, which names the same row: ``"float16"``,
            ``"bfloat16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"``. `TENSOR_CORES` has all rows, with the source of
            each.
        out: the accumulator: ``"binary32"`` (default), or ``"binary16"``, rounded to nearest, for fp16 and fp8 on
            NVIDIA's units.
        promote_every: a multiple of k: sums of so many products are added to a float32 total, as DeepSeek-V3 does with
            128 (arXiv 2412.19437, 3.3.2). Default None.

    Raises:
        TypeError, ValueError: for a unit, type or accumulator that is not in the table; the message names the ones that
            are. For a type whose sums are not published, as mxfp6 on Blackwell, the message says so.

    Example:
        >>> import jchop as jc
        >>> str(jc.tensor_core("volta", "fp16"))
        'operands=binary16, accumulate=binary32:toward_zero, order=aligned(4, 23)'
        >>> str(jc.tensor_core("hopper", "fp8", promote_every=128).order)
        'aligned(32, 13, promote_every=128)'
        >>> jc.tensor_core("hopper", "float8_e4m3fn") == jc.tensor_core("hopper", "fp8")
        True
    """
    types = _core_entry(TENSOR_CORES, "unit", unit)
    names = dtype, *(_type_of_format(some, dtype) for some in TENSOR_CORES.values())
    if any(name in _TYPES_WITHOUT_MODEL.get(unit, ()) for name in names):
        raise ValueError(f"dtype={dtype!r}: how {unit} adds {dtype} is not published; known: {', '.join(types)}")
    row = _core_entry(types, "dtype", _type_of_format(types, dtype), f" of {unit}")
    checks.check_choice("out", out, ("binary32", "binary16"))
    spec = row.spec
    if out == "binary16":
        checks.check(row.narrow, f"out='binary16': {dtype} on {unit} has no float16 accumulator; leave out='binary32'")
        spec = replace(spec, accumulate="binary16")  # type: ignore[arg-type]
    return spec if promote_every is None else replace(spec, order=replace(spec.order, promote_every=promote_every))


def _type_of_format(types: Mapping[str, TensorCore], dtype: str) -> str:
    """The type whose operands have the format that `dtype` names; else `dtype` itself."""
    try:
        fmt = str(as_spec(dtype, scaled=True))
    except (TypeError, ValueError):
        return dtype
    return next((name for name, row in types.items() if str(row.spec.operands).partition(":")[0] == fmt), dtype)


def _core_entry(table: Mapping, name: str, key: str, of: str = "") -> Any:
    if not isinstance(key, str):
        raise TypeError(f"{name}={key!r} must be one of {', '.join(map(repr, table))}")
    if key not in table:
        hint = checks.close_names_hint(key, table) or f"; allowed: {', '.join(map(repr, table))}"
        raise ValueError(f"{name}={key!r} is not known{of}{hint}")
    return table[key]
