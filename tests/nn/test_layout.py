"""An operand rounded in the layout of its product: by hand, and by the oracle."""

from __future__ import annotations

import math
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_scaled
import pytest
from cases_scaled import adversarial, values_of

import jchop as jc
from jchop._quantized.products.operand_layout import OperandLayout, round_in_layout
from jchop._spec.spec import Spec, as_spec

#: Shapes of operands and their layouts: kernels of heads and of a convolution, an operand of a batch, one sum.
OPERANDS = {
    "heads": ((6, 2, 3), OperandLayout((1, 2), (0,))),
    "convolution": ((3, 2, 4, 5), OperandLayout((3,), (0, 1, 2))),
    "batch": ((2, 5, 3), OperandLayout((0, 2), (1,))),
    "one sum": ((4, 6), OperandLayout((), (1, 0))),
}
WHOLE = (
    "int8(group=all)",
    "int4(group=all,axis=-1,rule=half_range,scale=bfloat16)",
    "mxfp8_e4m3(group=all)",
    "int8(channel=-1)",
    "float8_e5m2(channel=0)",
)
#: What must be moved: blocks, drawn bits, sums over a group, and groups of scales.
BLOCKS = "int4(group=3)"
MOVED = ("int8(group=all,rule=mse)", "int4(group=all,zero_point=integer)", "int4(group=all,scale=int8(group=2))")


def laid(layout: OperandLayout, x: np.ndarray) -> np.ndarray:
    return x.transpose(*layout.free, *layout.contracting).reshape(*(x.shape[axis] for axis in layout.free), -1)


def unlaid(layout: OperandLayout, y: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    order = (*layout.free, *layout.contracting)
    return y.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_is_rounded_as_if_it_were_laid_out(name: str) -> None:
    shape, layout = OPERANDS[name]
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape).astype(np.float32) * np.exp2(rng.integers(-3, 4, shape)).astype(np.float32)
    specs = [as_spec(text, scaled=True) for text in (*WHOLE, BLOCKS)]

    @jax.jit
    def both(x: jax.Array, moved: jax.Array) -> Any:
        return [(round_in_layout(layout, x, spec), jc.round_to_format(moved, spec)) for spec in specs]

    for spec, (got, expected) in zip(specs, both(x, laid(layout, x)), strict=True):
        wanted = unlaid(layout, np.asarray(expected), shape)
        np.testing.assert_array_equal(cases.bits(np.asarray(got)), cases.bits(wanted), err_msg=str(spec))


def test_whole_groups_are_not_moved_and_what_has_an_order_is() -> None:
    for shape, layout in OPERANDS.values():
        for text in WHOLE:
            same = layout.spec_in_place(as_spec(text, scaled=True), shape)
            assert same is not None and same.scaled is not None
            if "group=all" in text:
                whole = tuple(1 if axis in layout.free else size for axis, size in enumerate(shape))
                assert same.scaled.group_shape(shape) == whole
        whole = len(layout.contracting) == 1 or shape[layout.contracting[-1]] % 3 == 0
        assert (layout.spec_in_place(as_spec(BLOCKS, scaled=True), shape) is not None) == whole
        for text in MOVED:
            assert layout.spec_in_place(as_spec(text, scaled=True), shape) is None
        for spec in (
            Spec("int8(group=all)", rounding="stochastic"),
            Spec("int8(group=all)", gradient="e5m2:stochastic"),
            Spec("int8(group=all)", gradient="mxfp8_e5m2"),
        ):
            assert layout.spec_in_place(spec, shape) is None


@pytest.mark.smoke
def test_a_kernel_of_a_convolution_is_what_the_oracle_says() -> None:
    shape, layout = OPERANDS["convolution"]
    scale = oracle.describe(jc.formats.binary32)
    assert isinstance(scale, oracle.FloatSet)
    blocks = oracle_scaled.Blocks(oracle.describe(jc.formats.int8.element), scale, "absmax")
    scheme, carrier = oracle_scaled.Scheme(blocks, channel=3), oracle.CARRIERS["float32"]
    rounder = jax.jit(lambda x: round_in_layout(layout, x, as_spec("int8(group=all)", scaled=True)))
    rows = adversarial(jc.formats.int8.element, math.prod(shape[:3]), "float32", 8 * shape[3], np.random.default_rng(2))
    for part in np.split(rows, 8):
        x = unlaid(layout, part, shape)
        numbers = oracle_scaled.quantize_array(values_of(x.ravel()), shape, scheme, carrier, 1, [0] * x.size).numbers
        expected = np.array([oracle.to_bits(value, carrier) for value in numbers], carrier.words)
        expected[np.isnan(x.ravel())] = carrier.infinity + 1  # layers keep NaN
        cases.assert_bits(x.ravel(), np.asarray(rounder(jnp.asarray(x))).ravel(), expected)
