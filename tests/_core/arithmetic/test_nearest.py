"""Rounding by adding against exact rounding, and where it is not allowed."""

from __future__ import annotations

from dataclasses import replace

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import ValueRange, carrier_range
from jchop._core.arithmetic.hardware import adds_to_round, round_by_adding

ROWS = [
    ("binary16", oracle.ieee(5, 10), "float32", "ieee"),
    ("binary16", oracle.ieee(5, 10), "float32", "saturate"),
    ("binary16", oracle.ieee(5, 10), "float64", "ieee"),
    ("float8_e4m3fn", oracle.fn(4, 3), "float32", "ieee"),
    ("float6_e3m2fn", oracle.fn(3, 2, nan="none"), "float32", "ieee"),
    ("e6m9", oracle.ieee(6, 9), "float32", "ieee"),
    ("e7m16", oracle.ieee(7, 16), "float64", "ieee"),
]


def widest(fmt: jc.formats.FloatFormat, carrier: str) -> ValueRange:
    """The largest range that is allowed."""
    bias, fraction = CARRIERS[carrier].bias, CARRIERS[carrier].fraction
    return ValueRange(1 - bias, fraction + 1, bias - fraction + fmt.frac_bits)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("name", "known", "carrier", "overflow"), ROWS)
def test_it_rounds_exactly(
    name: str, known: oracle.FloatSet, carrier: str, overflow: str, rng: np.random.Generator
) -> None:
    """Grid points, ties and their neighbours, numbers of every exponent in the range, infinities and NaN."""
    spec, fmt = jc.Spec(name, overflow=overflow), jc.formats.parse_format(name)
    assert isinstance(fmt, jc.formats.FloatFormat)
    r = widest(fmt, carrier)
    assert adds_to_round(spec, r, CARRIERS[carrier])
    x = cases.adversarial(known, carrier, 20_000, rng)
    with np.errstate(invalid="ignore", over="ignore"):
        inside = (np.abs(x) < 2.0**r.top) & (np.abs(x) >= 2.0**r.quantum)
    x = x[inside | ~np.isfinite(x) | (x == 0)]
    assert np.sum(np.isfinite(x)) > 10_000 and np.isnan(x).any() and np.isinf(x).any()
    with jax.enable_x64(carrier == "float64"):
        got = np.asarray(jax.jit(lambda x: round_by_adding(x, spec, CARRIERS[carrier]))(x))
    cases.assert_bits(x, got, cases.batch(x).round(known, "nearest_even", overflow), name)


E5M10 = jc.Spec("e5m10")
SAFE = widest(jc.formats.binary16, "float32")
NOT_ALLOWED = {
    "another mode": (replace(E5M10, rounding=jc.Rounding.NEAREST_AWAY), SAFE),
    "another end": (replace(E5M10, overflow=jc.Overflow.PROPAGATE), SAFE),
    "flush": (replace(E5M10, flush=True), SAFE),
    "subnormals of the carrier": (E5M10, replace(SAFE, quantum=SAFE.quantum - 1)),
    "too large": (E5M10, replace(SAFE, top=SAFE.top + 1)),
    "anything": (E5M10, carrier_range(CARRIERS["float32"])),
    "nothing to drop": (jc.Spec("binary32"), SAFE),
    "a wider exponent": (jc.Spec("e9m10"), SAFE),
    "no subnormals": (jc.Spec("e5m10(subnormals=false)"), SAFE),
    "no -0": (jc.Spec("float8_e4m3fnuz"), SAFE),
    "one bit of precision": (jc.Spec("e5m0"), SAFE),
    "no sign": (jc.Spec("float8_e8m0fnu"), SAFE),
    "fixed point": (jc.Spec("fixed8.8"), SAFE),
}


def test_elsewhere_it_is_not_allowed() -> None:
    assert adds_to_round(E5M10, SAFE, CARRIERS["float32"])
    for name, (spec, r) in NOT_ALLOWED.items():
        assert not adds_to_round(spec, r, CARRIERS["float32"]), name


def test_it_is_allowed_with_one_bit_to_drop() -> None:
    assert adds_to_round(jc.Spec("e8m22"), ValueRange(-126, 24, 100), CARRIERS["float32"])


def test_beyond_the_largest_value() -> None:
    x = jnp.asarray([1e5, -1e5], jnp.float32)
    for name, end in {"float6_e3m2fn": 28.0, "float8_e4m3fn": np.nan, "e5m10": np.inf}.items():
        found = round_by_adding(x, jc.Spec(name), CARRIERS["float32"])
        np.testing.assert_array_equal(found, [end, -end], name)
