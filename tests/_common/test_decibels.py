"""Signal-to-noise ratio in decibels."""

import math

import pytest
from each_case import each

from jchop._common.text import decibels


@each(
    ("signal", "error", "wanted"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 1000.0, -30.0),
        (3.0, 0.0, math.inf),
        (0.0, 0.0, math.inf),
        (0.0, 2.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (1.0, math.nan, -math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_values(signal: float, error: float, wanted: float) -> None:
    assert decibels(signal, error) == pytest.approx(wanted, rel=1e-15)
