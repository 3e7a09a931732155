"""Which carriers hold the results of a spec; the grids themselves are seen in tests/test_round_values.py."""

from __future__ import annotations

import pytest

import jchop as jc
from jchop._bits import CARRIERS
from jchop._core.rounding.grid import holds

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
}


@pytest.mark.parametrize("text", HELD)
def test_carriers_that_hold_every_result(text: str) -> None:
    assert [name for name, carrier in CARRIERS.items() if holds(jc.parse(text), carrier)] == HELD[text]
