"""The arithmetic of a sum of products: the roundings, and the order of the additions.

Throughout, P and A are the roundings of products and of accumulator values, and the K products of one output element
are a_k b_k, k = 0 ... K-1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jchop._checks import check_bool, check_choice, check_int, check_text, quoted
from jchop.formats import ElementFormat
from jchop.spec import Gradient, Spec, as_spec

__all__ = ["MatmulSpec", "Order", "SumSpecLike", "as_matmul_spec"]

#: The orders that take a block length.
_BLOCKED = ("blocked", "matrix_unit")
#: The sequential orders of multiply-adds, which can be fused.
_STEPWISE = ("sequential", "blocked")
_KINDS = ("sequential", "blocked", "pairwise", "matrix_unit")
_LONGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Order:
    """The order in which products are added; its text is ``"sequential"``, ``"blocked(8)"`` and so on.

    * ``sequential``: c <- A(c + P(a_k b_k)) from c = 0, k ascending.
    * ``blocked(b)``: each block of b products is summed in this way from zero, then the block sums (FABsum: Blanchard,
      Higham and Mary, SIAM J. Sci. Comput. 42, 2020).
    * ``pairwise``: a sum of n is A(left + right), the left part the largest power of two below n.
    * ``matrix_unit(b)``: c <- A(c + d), with d the sum of a block of b products by the carrier's dot: one rounding into
      the accumulator for each block, as in tensor cores and systolic arrays.

    The last block may be smaller.

    Args:
        kind: ``"sequential"``, ``"blocked"``, ``"pairwise"`` or ``"matrix_unit"``.
        block: products in a block, b >= 1, for the two orders that have blocks; else None.

    Raises:
        TypeError, ValueError: for an unknown kind, or a block that is missing, superfluous or not a positive integer.

    Example:
        >>> import jchop as jc
        >>> str(jc.Order("blocked", 8)), jc.Order.parse("pairwise")
        ('blocked(8)', Order(kind='pairwise', block=None))
    """

    kind: str = "sequential"
    block: int | None = None

    def __post_init__(self) -> None:
        check_choice("order", self.kind, _KINDS)
        if self.kind in _BLOCKED:
            if self.block is None:
                raise ValueError(f"order={self.kind!r} needs a block length, as in '{self.kind}(16)'")
            object.__setattr__(self, "block", check_int(f"order: block of {self.kind}", self.block, 1, _LONGEST))
        elif self.block is not None:
            raise ValueError(f"order={self.kind!r} has no blocks, but block={self.block!r}; orders with: {_BLOCKED}")

    def __str__(self) -> str:
        return self.kind if self.block is None else f"{self.kind}({self.block})"

    @staticmethod
    def parse(text: str) -> Order:
        """The order of a text such as ``"matrix_unit(16)"``."""
        found = _TEXT.fullmatch(check_text("order", text))
        if found is None or found["kind"] not in _KINDS:
            raise ValueError(f"order={quoted(text)} is not known; allowed: {_ORDERS}")
        return Order(found["kind"], None if found["block"] is None else int(found["block"]))


_TEXT = re.compile(r"(?P<kind>[a-z_]+)(?:\(\s*(?P<block>[0-9]{1,20})\s*\))?")
_ORDERS = "'sequential', 'blocked(b)', 'pairwise', 'matrix_unit(b)' with a block length b >= 1"


@dataclass(frozen=True)
class MatmulSpec:
    """The arithmetic of a matrix product or another sum of products: every rounding in it, and the order of the sum.

    Each of the three roundings is applied once, to the exact result of its operation, without an intermediate rounding
    to the carrier, in every mode. None stands for the carrier: a product or a sum is then the carrier's (to nearest,
    ties to even), and an operand is not rounded.

    Args:
        operands: the rounding of both operands before the product: a `Spec`, a format, or text; default None.
        product: P, the rounding of every product a_k b_k; default None. Not with ``fused`` or ``matrix_unit``, which
            have no separate product.
        accumulate: A, the rounding of every sum; default None, **the carrier** (such as float32), not the operands'
            format.
        order: an `Order`, or its text: ``"sequential"`` (the default), ``"blocked(b)"``, ``"pairwise"``,
            ``"matrix_unit(b)"``.
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
            operands: Spec | ElementFormat | str | None = ...,
            product: Spec | ElementFormat | str | None = ...,
            accumulate: Spec | ElementFormat | str | None = ...,
            order: Order | str = ...,
            fused: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in _ROUNDINGS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else as_spec(value, name))
        object.__setattr__(self, "order", _as_order(self.order))
        check_bool("fused", self.fused)
        self._check_product()
        self._check_gradients()

    def _check_product(self) -> None:
        if self.fused and self.order.kind not in _STEPWISE:
            raise ValueError(f"fused=True is for the orders {_STEPWISE}, not order={str(self.order)!r}")
        for unrounded, why in (
            (self.fused, "fused=True adds the exact product"),
            (self.order.kind == "matrix_unit", "order='matrix_unit' sums the products in the carrier"),
        ):
            if unrounded and self.product is not None:
                raise ValueError(f"product={str(self.product)!r} is never used, since {why}; leave product=None")

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
        return any(spec is not None and spec.rounding.stochastic for spec in map(self.__getattribute__, _ROUNDINGS))

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in _ROUNDINGS if getattr(self, name) is not None]
        return ", ".join([*parts, f"order={self.order}", *["fused"] * self.fused])


_ROUNDINGS = ("operands", "product", "accumulate")


def _as_order(value: object) -> Order:
    if isinstance(value, Order):
        return value
    if isinstance(value, str):
        return Order.parse(value)
    raise TypeError(f"order={value!r} must be an Order or its text: {_ORDERS}")


#: A `MatmulSpec`, or a value that is converted to one.
SumSpecLike = MatmulSpec | Spec | ElementFormat | str


def as_matmul_spec(value: object, argument: str = "spec") -> MatmulSpec:
    """A `MatmulSpec`; one spec alone stands for every rounding in it, in sequential order."""
    if isinstance(value, MatmulSpec):
        return value
    if not isinstance(value, Spec | ElementFormat | str):
        raise TypeError(
            f"{argument}={value!r} must be a MatmulSpec, such as MatmulSpec(product='e5m10', accumulate='e5m10'), or "
            "a Spec, a format or text for every rounding"
        )
    spec = as_spec(value, argument)
    return MatmulSpec(spec, spec, spec)
