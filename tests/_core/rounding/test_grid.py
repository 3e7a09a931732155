"""Which carriers hold the results of a spec; the grids themselves are seen in tests/_round/test_round_values.py."""

from __future__ import annotations

import numpy as np
import pytest

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.rounding.grid import carrier_holds

#: Specs, and the carriers that hold their results.
HELD = {
    "e5m2": ["float16", "bfloat16", "float32", "float64"],
    "e5m10": ["float16", "float32", "float64"],
    "bfloat16": ["bfloat16", "float32", "float64"],
    "e8m3(bias=120)": ["float64"],  # coarser than float32, and wider
    # As fine as the carrier or finer, and wider: no finite number moves, and nothing is brought to the largest value.
    "binary64": ["float16", "bfloat16", "float32", "float64"],
    "binary64:propagate": ["float16", "bfloat16", "float32", "float64"],
    "binary64:saturate": ["float64"],
    "e9m23": ["float16", "bfloat16", "float32", "float64"],
    "e9m22": ["float16", "bfloat16", "float64"],  # a bit coarser than float32
    "e9m10:propagate": ["float16", "bfloat16", "float64"],
    "e9m23(infinities=false,nans=none)": ["float64"],
    "e9m23(infinities=false,nans=top)": ["float16", "bfloat16", "float32", "float64"],
    "codebook(-1,0.5,1.0009765625)": ["float16", "float32", "float64"],
    "integer8:wrap": ["float16", "bfloat16", "float32", "float64"],
    "integer24:wrap": ["float16", "bfloat16", "float32", "float64"],
    "uinteger24:wrap": ["float32", "float64"],
    "integer24": ["float32", "float64"],
    "float8_e8m0fnu": ["bfloat16", "float32", "float64"],  # no zero, for which a smallest value has to be there
}


def test_carriers_that_hold_every_result() -> None:
    for text, names in HELD.items():
        assert [name for name, carrier in CARRIERS.items() if carrier_holds(jc.Spec(text), carrier)] == names, text


@pytest.mark.parametrize(("mode", "want"), [("nearest_even", [8, 10, 10, 12]), ("odd", [9, 9, 11, 11])])
def test_ties_of_a_format_with_subnormals_of_the_carrier(mode: str, want: list[int]) -> None:
    """Normal numbers of the format are subnormals of float32: its smallest exponent is -129."""
    spec = jc.Spec(f"e8m3(bias=130,infinities=false,nans=none):{mode}")
    for exponent in (-129, -127, -126, 0):
        x = np.ldexp(np.array([8.5, 9.5, 10.5, 11.5], np.float32), exponent - 3)
        np.testing.assert_array_equal(jc.round_to_format(x, spec), np.ldexp(np.array(want, np.float32), exponent - 3))
