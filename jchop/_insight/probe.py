"""`jchop.probe`: the arithmetic of any matrix product, found from its results.

Sums are probed by large numbers that cancel: a small number that is added between M and -M is lost. The number of lost
ones tells which products are summed together (FPRev: Xie et al., USENIX ATC 2025). The other probes are by Fasi,
Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330, 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from jchop._common.checks import call_hint, check, check_instance, check_int
from jchop._common.text import TableOrLine, Tables

#: A product: its place, and its two factors.
_ProbeProduct = tuple[int, float, float]

#: The exponent of M: M is a number of float16, and a product of two numbers of float8_e4m3.
_LARGE_EXPONENT = 14
#: The least exponent of a product of two numbers of float8_e4m3.
_SMALL_EXPONENT = -18
_MAX_PROBE_LENGTH = 4096
#: The fraction bits of float64.
_MAX_PROBE_BITS = 52
#: Products in random sums; short sums need more, as orders differ in few of their products.
_RANDOM_PRODUCTS = 2**14
#: The rounding by the results for a quarter more and less than half a unit beyond a positive and a negative number.
_ROUNDING_OF_QUARTERS = {(0, 0): "toward_zero", (0, 1): "down", (1, 0): "up"}
#: The rounding to nearest by the results for half a unit and one and a half units.
_ROUNDING_OF_TIES = {(0, 2): "nearest_even", (1, 2): "nearest_away", (0, 1): "nearest_zero", (1, 1): "odd"}


def _found(text: str) -> Any:
    """A property, with its name in the table."""
    return field(default=None, metadata={"text": text})


@dataclass(frozen=True)
class Probe(Tables):
    """The arithmetic that `probe` found. A field is None if it does not apply, or if no probe shows it.

    Args:
        order: ``"sequential"``, ``"blocked"``, ``"pairwise"``, ``"blocked_pairwise"``, ``"aligned"`` (a block and the
            accumulator on one grid), or ``"other"``.
        k: the products in a block.
        bits: the fraction bits of products that alignment keeps.
        cut: the rounding of products at that place: ``"toward_zero"``, ``"down"``, ``"up"`` or ``"nearest"``.
        sum_bits: the fraction bits of the accumulator that alignment keeps.
        sum_cut: its rounding there.
        out_bits: the fraction bits of the accumulator.
        rounding: the rounding of sums, as in a spec.
        promote_every: the number of products after which a partial sum is added to a total.
        operand_bits: the fraction bits of operands.
        operand_emin: the exponent of the smallest operand of full precision.
        subnormal_operands: whether smaller operands are kept.
        smallest_result: the exponent of the smallest power of two that a product gave.

    Example:
        >>> import jchop as jc
        >>> found = jc.probe(lambda a, b: jc.math.matmul(a, b, jc.MatmulSpec("e5m10", accumulate="e5m10")), length=64)
        >>> found.order, found.out_bits, found.rounding
        ('sequential', 10, 'nearest_even')
    """

    order: str = field(metadata={"text": "order of sums"})
    k: int | None = _found("products in a block")
    bits: int | None = _found("fraction bits of aligned products")
    cut: str | None = _found("rounding of aligned products")
    sum_bits: int | None = _found("fraction bits of the aligned accumulator")
    sum_cut: str | None = _found("rounding of the aligned accumulator")
    out_bits: int | None = _found("fraction bits of the accumulator")
    rounding: str | None = _found("rounding of sums")
    promote_every: int | None = _found("products in a promoted part")
    operand_bits: int | None = _found("fraction bits of operands")
    operand_emin: int | None = _found("exponent of the smallest normal operand")
    subnormal_operands: bool | None = _found("subnormal operands")
    smallest_result: int | None = _found("exponent of the smallest product")

    def _parts(self) -> Iterator[TableOrLine]:
        rows = ((f.metadata["text"], _property_text(getattr(self, f.name))) for f in fields(self))
        yield [("property", "found"), *rows]


def _property_text(value: object) -> str:
    if isinstance(value, bool):
        return "kept" if value else "read as zero"
    return "-" if value is None else str(value)


@call_hint("jchop.probe(lambda a, b: a @ b)")
def probe(matmul: Callable[[Any, Any], Any], *, length: int = 288) -> Probe:
    """Finds the arithmetic of a matrix product from its results: the order of sums, the kept bits, the roundings.

    The product may be a device's, a library's or an emulated one's. It is called about a dozen times with float32
    matrices of `length` rows and columns. It may convert them to its own type of operands first. In the probes of sums
    all numbers are powers of two, or 1.5 and 3 times one. They are between 2^-9 and 2^8, so float8_e4m3 and wider
    formats hold them.

    The order is found for the first `length` products in one element of the result. A library may choose another for
    other shapes. Alignment is seen up to 31 bits, and an accumulator of up to 52 bits, the most that float64 holds.
    More than 31 need operands with products below 2^-18: float16 and wider formats hold them. Bits that operands do not
    show are None. The order of an accumulator of more than 31 bits may be ``"other"``.

    Args:
        matmul: a function of two square float32 NumPy arrays. `numpy.asarray` must convert its result, of their shape.
        length: the number of products in the longest sum, 64 to 4096. Default 288, which finds parts of up to 128.

    Returns:
        A `Probe`, shown as a table as text and in notebooks.

    Raises:
        TypeError: if `matmul` is not a function.
        ValueError: if its result has another shape, or 1 times 1 gives 0 or no finite number. If it sums so many
            products at once that `length` must be larger.

    Example:
        >>> import jchop as jc
        >>> volta = jc.tensor_core("volta", "fp16")
        >>> found = jc.probe(lambda a, b: jc.math.matmul(a, b, volta), length=64)
        >>> found.order, found.k, found.bits, found.cut, found.rounding
        ('aligned', 4, 23, 'toward_zero', 'toward_zero')
    """
    check_instance("matmul", matmul, Callable, "a function of two matrices")
    unit = _UnitUnderTest(matmul, check_int("length", length, 64, _MAX_PROBE_LENGTH))
    one = unit.results([[(0, 1, 1)]])[0]
    check(np.isfinite(one) and one != 0, f"matmul gave {one} for 1 times 1; it must be a matrix product")
    return Probe(**unit.order(), **unit.accumulator(), **unit.operands())


class _UnitUnderTest:
    """The product under test, and the facts known about it."""

    def __init__(self, matmul: Callable[[Any, Any], Any], length: int) -> None:
        self.matmul, self.length = matmul, length
        self.order_name, self.k = "other", 1
        self.product_range = 0  # how many of the products 2^13, 2^12 and so on operands hold beside 2^14

    def results(self, sums: Iterable[Sequence[_ProbeProduct]]) -> np.ndarray:
        """The result of each sum of products. All matrices have one shape, so a compiled product is compiled once."""
        sums, size = list(sums), self.length
        return np.concatenate([self._results(sums[i : i + size]) for i in range(0, len(sums), size)])

    def _results(self, sums: Sequence[Sequence[_ProbeProduct]]) -> np.ndarray:
        a, b = np.zeros((self.length, self.length), np.float32), np.zeros((self.length, self.length), np.float32)
        for i, products in enumerate(sums):
            for index, x, y in products:
                a[i, index], b[index, i] = x, y
        out = np.asarray(self.matmul(a, b))
        check(out.shape == a.shape, f"matmul gave shape {out.shape} for operands of shapes {a.shape} and {b.shape}")
        return np.diagonal(out).astype(np.float64)[: len(sums)]

    # -- the order -----------------------------------------------------------------------------------------------------

    def order(self) -> dict[str, Any]:
        """The kind of order, its block length and its parts."""
        losses = self._loss_counts()
        indexes = np.arange(1, self.length)
        if np.array_equal(losses, indexes + 1):
            self.order_name, self.k = "sequential", 1
        elif np.array_equal(losses, np.minimum(_pairwise_sum_length(indexes), self.length)):
            self.order_name = "pairwise"
        else:
            self._find_blocks(losses, indexes)
        if self.order_name == "other":
            self._find_order_by_rounding()
        block_ends = np.minimum(self.k * -(-(indexes + 1) // self.k), self.length)
        unequal = np.flatnonzero(losses != block_ends) if self.order_name == "aligned" else []
        interval = int(indexes[unequal[0]]) if len(unequal) else None
        return {"order": self.order_name, "k": self.k if self.k > 1 else None, "promote_every": interval}

    def _loss_counts(self) -> np.ndarray:
        """The number of products that are lost with M first and -M at each other place, M and -M included."""
        high, low = 2.0 ** (_LARGE_EXPONENT - 7), 2.0 ** (_SMALL_EXPONENT // 2)
        sums = []
        for index in range(1, self.length):
            small_products: list[_ProbeProduct] = [(i, low, low) for i in range(1, self.length) if i != index]
            sums.append([(0, high, 128.0), (index, -high, 128.0), *small_products])
        survivors = np.nan_to_num(self.results(sums), nan=0, posinf=0, neginf=0)  # of operands that hold no 128
        return self.length - np.rint(survivors / 2.0**_SMALL_EXPONENT).astype(int)

    def _find_blocks(self, losses: np.ndarray, indexes: np.ndarray) -> None:
        """A block length for which the products lost within the first 64 places are explained."""
        first = slice(0, min(64, self.length) - 1)
        for k in range(2, 65):
            block_ends = np.minimum(k * -(-(indexes + 1) // k), self.length)
            pair_ends = np.where(indexes < k, np.minimum(_pairwise_sum_length(indexes), k), block_ends)
            if np.array_equal(losses[first], block_ends[first]):
                one_sum = self._loses_the_sum(k)
                if one_sum and k > self.length - 4:  # the other probes of a block need four products of the next
                    raise ValueError(f"length={self.length} must be {k + 4} or more: matmul sums {k} or more at once")
                if k < self.length:  # else the first product is added last
                    self.order_name, self.k = "aligned" if one_sum else "blocked_pairwise", k
                return
            if np.array_equal(losses[first], pair_ends[first]):
                self.order_name, self.k = "blocked_pairwise", k
                return

    def _find_order_by_rounding(self) -> None:
        """An order that explains sums of random powers of two, if every sum is rounded as a sum of two products.

        Directed and odd roundings do not lose a small product beside a large one: they may move the large one.
        """
        bits = self._out_bits()
        rule = None if bits is None else _INTEGER_ROUNDINGS.get(self._rounding(bits) or "")
        if bits is None or rule is None:
            return
        rng, shape = np.random.default_rng(0), (max(32, _RANDOM_PRODUCTS // self.length), self.length)
        # Down to less than a unit of most sums, if operands hold such products.
        lowest, highest = _SMALL_EXPONENT, 7
        if bits > 24:
            lowest, highest = max(6 - bits, _LARGE_EXPONENT - self.product_range), _LARGE_EXPONENT
        small, any_size = rng.integers(lowest, lowest + 8, shape), rng.integers(lowest, highest, shape)
        exponents, signs = np.where(rng.random(shape) < 0.5, small, any_size), rng.choice([-1, 1], shape)
        factors = [[_power_of_two_factors(e) for e in row] for row in exponents.tolist()]
        results = self.results([[(i, s * x, y) for i, (s, (x, y)) in enumerate(zip(*row, strict=True))]
                             for row in zip(signs, factors, strict=True)])  # fmt: skip
        terms, blocks = signs * np.exp2(exponents), [(kind, k) for k in range(2, 65) for kind in _SUM_WITHIN_BLOCK]
        matches: list[tuple[str, int, np.ndarray]] = []
        for kind, k in (("sequential", 1), ("pairwise", self.length), *blocks):
            sums = partial(_sum_in_blocks, terms, k, _SUM_WITHIN_BLOCK.get(kind, _sum_in_pairs))
            if np.array_equal(sums(partial(_round_to_fraction_bits, bits=bits, rule=rule)), results):
                matches.append((kind, k, sums(partial(_round_to_fraction_bits, bits=4, rule=rule))))
        # Several explain sums that are hardly rounded. Those that also agree in 4 bits are one order.
        if matches and all(np.array_equal(coarse, matches[0][2]) for _, _, coarse in matches):
            self.order_name, k, _ = matches[0]
            self.k = 1 if self.order_name == "pairwise" else k

    def _loses_the_sum(self, k: int) -> bool:
        """Whether a small accumulator is lost beside two large products that cancel."""
        small = 2.0 ** (_SMALL_EXPONENT // 2)
        return self.results([self._accumulator_beside_large(min(k, self.length - 2), small, small)])[0] == 0

    def _accumulator_beside_large(self, k: int, x: float, y: float) -> list[_ProbeProduct]:
        """The accumulator x y, then a block with M and -M."""
        high = 2.0 ** (_LARGE_EXPONENT - 7)
        return [(0, x, y), (k, high, 128.0), (k + 1, -high, 128.0)]

    # -- alignment and rounding ----------------------------------------------------------------------------------------

    def accumulator(self) -> dict[str, Any]:
        """The bits that alignment keeps, and the roundings."""
        properties: dict[str, Any] = {}
        if self.order_name == "aligned":
            high = 2.0 ** (_LARGE_EXPONENT - 7)  # the accumulator M, then a block with -M and x y
            properties["bits"], properties["cut"] = self._alignment(
                lambda x, y: [(0, high, 128.0), (self.k, -high, 128.0), (self.k + 1, x, y)]
            )
            properties["sum_bits"], properties["sum_cut"] = self._alignment(
                lambda x, y: self._accumulator_beside_large(self.k, x, y)
            )
        properties["out_bits"] = bits = None if self.order_name == "other" else self._out_bits()
        if bits is not None:
            properties["rounding"] = self._rounding(bits)
        return properties

    def _alignment(self, sum_of: Callable[[float, float], list[_ProbeProduct]]) -> tuple[int | None, str | None]:
        """The place of the last bit beside 2^14, and how 1.5 of its units are rounded, positive and negative."""
        exponents = range(_LARGE_EXPONENT - 1, _SMALL_EXPONENT - 1, -1)
        is_kept = self.results([sum_of(*_power_of_two_factors(e)) for e in exponents]) != 0
        if is_kept.all() or not is_kept.any():
            return None, None
        last_exponent = exponents[int(np.flatnonzero(is_kept).max())]
        x, y = _power_of_two_factors(last_exponent)
        up, down = self.results([sum_of(1.5 * x, y), sum_of(-1.5 * x, y)]) / 2.0**last_exponent
        rounds_away = int(up == 2), int(down == -2)
        return _LARGE_EXPONENT - last_exponent, _ROUNDING_OF_QUARTERS.get(rounds_away, "nearest")

    def _out_bits(self) -> int | None:
        """The largest j for which 2^14 + 2^(14 - j) is exact, if operands also hold half of that unit."""
        high, exponents = 2.0 ** (_LARGE_EXPONENT - 7), range(_LARGE_EXPONENT - 1, 5 - _MAX_PROBE_BITS, -1)
        small: list[_ProbeProduct] = [(self.k, *_power_of_two_factors(e)) for e in exponents]
        index = 2 if self.k == 1 else 1
        in_range = self.results([[(0, high, 0), (index, 0, 128), product] for product in small]) == np.exp2(exponents)
        self.product_range = int(np.argmin([*in_range, False]))
        is_exact = self.results([[(0, high, 128), product] for product in small]) == 2.0**_LARGE_EXPONENT + np.exp2(
            exponents
        )
        bits = 1 + int(np.flatnonzero(is_exact[:_MAX_PROBE_BITS]).max(initial=-1))
        return bits if 0 < bits < self.product_range else None

    def _rounding(self, bits: int) -> str | None:
        """The rounding, from sums of 2^14 and parts of a unit.

        In aligned orders four terms of 2^12 leave two bits for the parts.
        """
        if bits + 2 > self.product_range:
            return None
        x, y = _power_of_two_factors(_LARGE_EXPONENT - bits - 2)  # a quarter of a unit
        sums = [self._sum_with(sign, count * x, y) for sign, count in ((1, 3), (-1, 3), (1, 2), (1, 6))]
        units = (np.abs(self.results(sums)) - 2.0**_LARGE_EXPONENT) / 2.0 ** (_LARGE_EXPONENT - bits)
        beyond = int(units[0] == 1), int(units[1] == 1)
        return _ROUNDING_OF_QUARTERS.get(beyond) or _ROUNDING_OF_TIES.get((int(units[2]), int(units[3])), "nearest")

    def _sum_with(self, sign: int, x: float, y: float) -> list[_ProbeProduct]:
        if self.order_name != "aligned" or self.k < 4:
            return [(0, sign * 2.0 ** (_LARGE_EXPONENT - 7), 128.0), (self.k, sign * x, y)]
        quarter = (sign * 64.0, 64.0)
        return [(0, *quarter), *((self.k + i, *quarter) for i in range(3)), (self.k + 3, sign * x, y)]

    # -- operands ------------------------------------------------------------------------------------------------------

    def operands(self) -> dict[str, Any]:
        """The fraction bits and the least exponents of operands."""
        fractions = range(1, 24)
        is_exact = self.results([[(0, 1 + 2.0**-p, 1.0)] for p in fractions]) == [1 + 2.0**-p for p in fractions]
        bits = int(np.argmin([*is_exact, False]))
        exponents = np.arange(-149, 1)
        nonzero = self.results([[(0, 2.0**e, 1.0)] for e in exponents]) != 0
        widest = 1 + 2.0**-bits if bits else 1.0
        is_full = self.results([[(0, widest * 2.0**e, 1.0)] for e in exponents]) == widest * np.exp2(exponents)
        emin = int(exponents[len(exponents) - int(np.argmin([*is_full[::-1], False]))]) if is_full[-1] else None
        sum_exponents = range(0, -150, -1)
        products = self.results([[(0, *_power_of_two_factors(e))] for e in sum_exponents]) != 0
        return {
            "operand_bits": bits,
            "operand_emin": emin,
            "subnormal_operands": None if emin is None else bool(nonzero[exponents < emin].any()),
            "smallest_result": sum_exponents[int(np.argmin([*products, False])) - 1] if products[0] else None,
        }


def _power_of_two_factors(exponent: int) -> tuple[float, float]:
    """Two powers of two with the product 2^exponent."""
    return 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)


def _pairwise_sum_length(indexes: np.ndarray) -> np.ndarray:
    """The least power of two above each place: the products of the pairwise sum that holds it and the first."""
    return 1 << np.array([int(index).bit_length() for index in indexes])


# -- sums of the definitions -------------------------------------------------------------------------------------------

#: The integer that a real number is rounded to.
_INTEGER_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nearest_even": np.rint,
    "nearest_away": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "nearest_zero": lambda x: np.copysign(np.ceil(np.abs(x) - 0.5), x),
    "toward_zero": np.trunc,
    "down": np.floor,
    "up": np.ceil,
    "odd": lambda x: np.where(x == np.floor(x), x, 2 * np.floor(x / 2) + 1),
}


def _round_to_fraction_bits(x: np.ndarray, bits: int, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Numbers rounded to so many fraction bits."""
    power = np.frexp(x)[1] - 1 - bits
    return np.ldexp(rule(np.ldexp(x, -power)), power)


def _sum_in_sequence(x: np.ndarray, round_sum: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The sums along the last axis, one number after the other."""
    total = np.zeros(x.shape[:-1])
    for i in range(x.shape[-1]):
        total = round_sum(total + x[..., i])
    return total


def _sum_in_pairs(x: np.ndarray, round_sum: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The sums along the last axis, as a tree."""
    while x.shape[-1] > 1:
        x = _pad_terms(x, 2)
        x = round_sum(x[..., ::2] + x[..., 1::2])
    return x[..., 0]


#: The order within a block.
_SUM_WITHIN_BLOCK = {"blocked": _sum_in_sequence, "blocked_pairwise": _sum_in_pairs}


def _sum_in_blocks(x: np.ndarray, k: int, sum_block: Callable[..., np.ndarray], round_sum: Any) -> np.ndarray:
    """The sums of rows, in blocks of k."""
    return _sum_in_sequence(sum_block(_pad_terms(x, k).reshape(len(x), -1, k), round_sum), round_sum)


def _pad_terms(x: np.ndarray, k: int) -> np.ndarray:
    """Numbers with zeros behind them, to a multiple of k along the last axis."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % k)])
