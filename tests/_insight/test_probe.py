"""`jchop.probe`: it finds the numbers of the definitions, of every unit of the table and of NumPy's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop import MatmulSpec, Probe

further = Further()

#: Fraction bits and least exponent of operands, by type.
OPERANDS = {"fp16": (10, -14), "bf16": (7, -126), "tf32": (10, -126), "fp8": (3, -6), "fp8_e5m2": (2, -14)}
#: Products in a block and fraction bits of the grid, as the papers have them, and the bits of the sum.
NVIDIA = {
    ("volta", "fp16"): (4, 23, 23),
    ("turing", "fp16"): (8, 24, 23),
    **{("ampere", dtype): (8, 24, 23) for dtype in ("fp16", "bf16")},
    ("ampere", "tf32"): (4, 24, 23),
    **{("hopper", dtype): (16, 25, 23) for dtype in ("fp16", "bf16")},
    ("hopper", "tf32"): (8, 25, 23),
    **{("ada", dtype): (16, 13, 13) for dtype in ("fp8", "fp8_e5m2")},
    **{("hopper", dtype): (32, 13, 13) for dtype in ("fp8", "fp8_e5m2")},
    **{("blackwell", dtype): (32, 25, 23) for dtype in ("fp8", "fp8_e5m2")},
}
#: Later units with the arithmetic of an earlier one.
SAME = {(late, dtype): early for late, early in (("ada", "ampere"), ("blackwell", "hopper"))
        for dtype in ("fp16", "bf16", "tf32")}  # fmt: skip
#: Products of even and odd index are aligned apart, then moved to one grid, downward.
HALVES = {("cdna3", dtype): 16 for dtype in ("fp8", "fp8_e5m2")}
SCALED = {("blackwell", dtype): 32 for dtype in ("mxfp8", "mxfp8_e5m2")}
#: Operands of 4 bits under one scale hold no large number beside a small one, so no probe sees their sums.
UNSEEN = {("blackwell", "mxfp4"), ("blackwell", "nvfp4")}
AMD = {("cdna1", "fp16"): 4, ("cdna1", "bf16"): 2, ("cdna2", "fp16"): 4, ("cdna2", "bf16"): 4}
LATE = {("cdna3", "fp16"): 8, ("cdna3", "bf16"): 8, ("cdna3", "tf32"): 4}
#: In the default run.
QUICK = [("ampere", "fp16"), ("cdna2", "fp16")]


def compiled(spec: MatmulSpec) -> Callable[[Any, Any], Any]:
    return jax.jit(partial(jc.math.matmul, spec=spec))


#: The order, the products in a block, the bits that alignment keeps of products and of the sum, how both are cut, the
#: bits of a sum, and its rounding.
UNITS: dict[tuple[str, str], tuple[Any, ...]] = {
    **{unit: ("aligned", k, bits, bits, "toward_zero", "toward_zero", out, "toward_zero")
       for unit, (k, bits, out) in NVIDIA.items()},
    **{unit: ("aligned", k, 25, 25, "toward_zero", "toward_zero", 23, "toward_zero") for unit, k in SCALED.items()},
    **{unit: ("aligned", k, 24, 24, "toward_zero", "down", 23, "nearest_even") for unit, k in LATE.items()},
    **{unit: ("aligned", k, 24, 24, "down", "down", 23, "nearest_even") for unit, k in HALVES.items()},
    **{unit: ("blocked_pairwise", k, None, None, None, None, 23, "nearest_even") for unit, k in AMD.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    ("unit", "dtype"), [*QUICK, *(pytest.param(*unit, marks=pytest.mark.slow) for unit in UNITS if unit not in QUICK)]
)
def test_units(unit: str, dtype: str) -> None:
    p = jc.probe(compiled(jc.tensor_core(unit, dtype)), length=80)
    assert (p.order, p.k, p.bits, p.sum_bits, p.cut, p.sum_cut, p.out_bits, p.rounding) == UNITS[unit, dtype]
    assert p.promote_every is None
    bits, emin = OPERANDS[dtype.removeprefix("mx")]
    assert p.operand_bits == bits
    if (unit, dtype) not in SCALED:
        assert p.operand_emin == emin - ((unit, dtype) in HALVES)
        assert p.subnormal_operands is (unit != "cdna2")


def test_every_unit_is_probed() -> None:
    table = {(unit, dtype) for unit, types in jc.TENSOR_CORES.items() for dtype in types}
    assert table == {*UNITS, *SAME, *UNSEEN, ("tpu", "bf16")}
    for (unit, dtype), early in SAME.items():
        assert jc.tensor_core(unit, dtype) == jc.tensor_core(early, dtype), (unit, dtype)


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_promotion_and_a_half_accumulator(dtype: str) -> None:
    if dtype == "fp8":
        p = jc.probe(compiled(jc.tensor_core("hopper", "fp8", promote_every=128)))
        assert (p.order, p.k, p.bits, p.promote_every) == ("aligned", 32, 13, 128)
    else:
        half = jc.probe(compiled(jc.tensor_core("hopper", "fp16", out="binary16")), length=80)
        assert (half.out_bits, half.rounding) == (10, "nearest_even")


#: Orders and their blocks.
ORDERS = {"sequential": None, "pairwise": None, "blocked(8)": 8, "blocked_pairwise(6)": 6, "aligned(8, 20)": 8}
MODES = ("nearest_away", "nearest_even", "nearest_zero", "toward_zero", "up", "down", "odd")


#: Each order with each rounding, under one of three accumulators.
SUMS = [
    (order, mode, ("e8m13", "e8m18", "e5m10")[(i + j) % 3])
    for i, mode in enumerate(MODES)
    for j, order in enumerate(ORDERS)
]


@pytest.mark.in_turn(50)
@pytest.mark.parametrize(("order", "mode", "accumulate"), SUMS)
def test_every_order_and_rounding(order: str, mode: str, accumulate: str) -> None:
    p = jc.probe(compiled(MatmulSpec("binary16", accumulate=f"{accumulate}:{mode}", order=order)), length=64)
    bits = int(accumulate.partition("m")[2])
    assert (p.order, p.k, p.out_bits, p.rounding) == (order.partition("(")[0], ORDERS[order], bits, mode)


def test_fused_sums_and_blocks() -> None:
    fused = jc.probe(compiled(MatmulSpec("binary16", accumulate="e8m13:up", fused=True)), length=64)
    assert (fused.order, fused.k, fused.out_bits, fused.rounding) == ("sequential", None, 13, "up")
    blocked = jc.probe(compiled(MatmulSpec("binary16", accumulate="binary32", order="blocked(16)")), length=64)
    assert (blocked.order, blocked.k, blocked.out_bits, blocked.rounding) == ("blocked", 16, 23, "nearest_even")


def one_by_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """NumPy's float32, product after product."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        c = c + a[:, k, None] * b[k]
    return c


def halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """NumPy's float16, as a tree."""
    c = (a[:, :, None] * b).astype(np.float16)
    while c.shape[1] > 1:
        c = np.concatenate([c[:, :-1:2] + c[:, 1::2], c[:, c.shape[1] // 2 * 2 :]], 1)
    return c[:, 0]


def test_arithmetic_of_numpy() -> None:
    p = jc.probe(one_by_one, length=64)
    assert (p.order, p.out_bits, p.rounding) == ("sequential", 23, "nearest_even")
    assert (p.operand_bits, p.operand_emin, p.subnormal_operands, p.smallest_result) == (23, -126, True, -149)
    with np.errstate(all="ignore"):
        assert jc.probe(halves, length=64).order == "pairwise"


def test_a_tree_is_found_under_a_rounding_that_has_no_name() -> None:
    """To 13 bits, ties upward."""

    def tree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        c = a[:, :, None].astype(float) * b
        while c.shape[1] > 1:
            c = c[:, ::2] + c[:, 1::2]
            power = np.frexp(c)[1] - 14
            c = np.ldexp(np.floor(np.ldexp(c, -power) + 0.5), power)
        return c[:, 0]

    p = jc.probe(tree, length=64)
    assert (p.order, p.k, p.out_bits) == ("pairwise", None, 13)


def test_sums_from_the_last_product_are_another_order() -> None:
    for length in (64, 65, 68, 288):
        assert jc.probe(lambda a, b: one_by_one(a[:, ::-1], b[::-1]), length=length).order == "other", length


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize(("k", "length"), [(61, 64), (64, 64), (63, 66)])
def a_block_that_is_as_long_as_the_sum_is_refused(k: int, length: int) -> None:
    product = compiled(MatmulSpec("binary16", accumulate="binary32:toward_zero", order=f"aligned({k}, 24)"))
    with pytest.raises(ValueError, match=rf"length={length} must be {k + 4} or more: matmul sums {k} or more at once"):
        jc.probe(product, length=length)
    p = jc.probe(product, length=k + 4)
    assert (p.order, p.k, p.bits, p.out_bits) == ("aligned", k, 24, 23)


@further
@pytest.mark.parametrize("bits", [24, 28, 31, 32, 33, 40])
@pytest.mark.in_turn(100)
def wide_accumulators(bits: int) -> None:
    spec = MatmulSpec(accumulate=f"e11m{bits}", order="sequential")
    p = jc.probe(lambda a, b: jc.math.matmul(a.astype(float), b.astype(float), spec), length=64)
    assert (p.order, p.out_bits, p.rounding) == ("sequential", bits, "nearest_even")


def test_a_float64_sum_and_operands_that_do_not_show_it() -> None:
    def sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        c = np.zeros((a.shape[0], b.shape[1]))
        for k in range(a.shape[1]):
            c = c + a[:, k, None].astype(float) * b[k].astype(float)
        return c

    p = jc.probe(sums, length=64)
    assert (p.order, p.out_bits, p.rounding) == ("sequential", 52, "nearest_even")
    narrow = jc.probe(lambda a, b: sums(*(jc.round_to_format(x, "float8_e4m3fn") for x in (a, b))), length=64)
    assert (narrow.order, narrow.out_bits, narrow.rounding) == ("other", None, None)


@further.first
def a_probe_is_shown_as_a_table() -> None:
    p = Probe("aligned", 4, 23, subnormal_operands=False)
    assert "products in a block                       4\n" in str(p)
    assert "read as zero" in p._repr_html_()


def test_refusals() -> None:
    bad: Any = 3
    with pytest.raises(TypeError, match="matmul=3 must be a function"):
        jc.probe(bad)
    with pytest.raises(ValueError, match=r"length=10 must be an integer"):
        jc.probe(np.matmul, length=10)
    for wrong in (0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=rf"matmul gave {wrong} for 1 times 1; it must be a matrix product"):
            jc.probe(lambda a, b, wrong=wrong: np.full_like(a, wrong), length=64)
    with pytest.raises(ValueError, match=r"matmul gave shape \(64,\)"):
        jc.probe(lambda a, b: a[0], length=64)


test_further = further.test()
