"""Facts of values before they are computed (`jchop._emulate.rules.rules`), by the values of small formats."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import jchop as jc
from jchop._emulate.rules.rules import common_fact, holds_constant, is_exact_under

TEXTS = [
    "e4m3",
    "e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "e4m2",
    "e5m3",
    "e4m3(infinities=false,nans=none)",
    "e4m3(subnormals=false)",
    "e3m0",
    "binary8p4ue",
    "float8_e8m0fnu",
    "fixed4.4",
    "ufixed4.4",
    "integer4(narrow=true)",
]


def key(value: float) -> tuple[float, float]:
    """A number with the sign of its zero."""
    return value, math.copysign(1.0, value)


def values_of(text: str) -> set[tuple[float, float]]:
    fmt = jc.Spec(text).format
    found = {key(v) for v in np.asarray(fmt.values(), np.float64).tolist() if not math.isnan(v)}
    infinities = [math.inf, -math.inf][: 1 + fmt.signed] if fmt.has_inf else []
    return found | set(map(key, infinities)) | set(map(key, [-0.0] * fmt.has_negative_zero))


@pytest.mark.smoke
def test_formats_within_formats() -> None:
    """Never where a value is missing, and always among floating-point formats that have all that they may have."""
    for small, large in itertools.product(TEXTS, TEXTS):
        subset = values_of(small) <= values_of(large)
        found = is_exact_under(jc.Spec(small), jc.Spec(large))
        assert subset or not found, (small, large)
        if small == large or (large in ("e4m3", "e5m2", "e5m3") and small.startswith(("e", "float8_e4", "float8_e5"))):
            assert found == subset, (small, large)
    assert is_exact_under(jc.Spec("e4m2fnuz"), jc.Spec("e5m3fnuz"))  # neither has -0
    e5m2 = jc.Spec("e5m2")
    assert is_exact_under(None, None) and is_exact_under(e5m2, None) and not is_exact_under(None, e5m2)
    flushed = jc.Spec("e5m2:flush")
    assert not is_exact_under(e5m2, flushed) and is_exact_under(flushed, e5m2) and is_exact_under(flushed, flushed)


def test_what_is_known_of_one_of_several() -> None:
    e4m2, e4m3, e5m2 = (jc.Spec(text) for text in ("e4m2", "e4m3", "e5m2"))
    assert common_fact([e4m2, e4m3]) == common_fact([e4m3, e4m2]) == e4m3
    assert common_fact([e4m3, e5m2]) is common_fact([e4m3, None]) is None


def test_constants_that_are_values() -> None:
    for text in TEXTS:
        spec, values = jc.Spec(text), values_of(text)
        finite = sorted(v for v, _ in values if math.isfinite(v))
        between = [(a + b) / 2 for a, b in itertools.pairwise(finite)]
        others = [0.0, math.inf, -math.inf, finite[-1] * 2, finite[0] * 2, 2.0**-30, -finite[1]]
        for value in (*finite, *between, *others):
            assert holds_constant(spec, value) == (key(value) in values), (text, value)
        assert holds_constant(spec, math.nan) and holds_constant(None, 0.1) and not holds_constant(spec, [1.0, 1.0]), (
            text
        )


def test_a_zero_with_a_sign() -> None:
    for text, held in (("e5m2", True), ("float8_e4m3fnuz", False), ("fixed3.5", False)):
        assert holds_constant(jc.Spec(text), -0.0) is held


def test_a_zero_with_a_sign_after_one_without() -> None:
    spec = jc.Spec("fixed5.3")
    assert holds_constant(spec, 0.0) and not holds_constant(spec, -0.0)


def test_constants_that_a_flush_leaves() -> None:
    spec = jc.Spec("e4m3:flush")
    assert holds_constant(spec, 2.0**-6) and holds_constant(spec, 0.0) and not holds_constant(spec, 2.0**-7)
