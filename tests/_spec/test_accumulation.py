"""`MatmulSpec` and `Order`: what may be said, how it prints, and that the rest is refused with a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from each_case import each

import jchop as jc
from jchop import MatmulSpec, Order

E5M10 = jc.formats.FloatFormat(5, 10)
#: As one calls them who does not read types.
spec_of: Any = MatmulSpec
order_of: Any = Order


def test_fields_are_coerced_and_default_to_the_carrier() -> None:
    spec = MatmulSpec("e5m10", E5M10, jc.Spec("e5m2", rounding="up"), "blocked(8)")
    assert spec.operands == spec.product == jc.Spec(E5M10)
    assert spec.accumulate == jc.Spec("e5m2:up")
    assert spec.order == Order("blocked", 8)
    plain = MatmulSpec()
    assert (plain.operands, plain.product, plain.accumulate, plain.fused) == (None, None, None, False)
    assert plain.order == Order("sequential") == Order()


def test_equal_specs_are_one_key() -> None:
    one = MatmulSpec("binary16", "e5m10", E5M10, order="blocked(8)")
    other = MatmulSpec(E5M10, jc.formats.binary16, jc.Spec("e5m10"), order=Order("blocked", 8))
    assert one == other
    assert hash(one) == hash(other)
    assert one != dataclasses.replace(one, order="blocked(4)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.fused = True  # type: ignore[misc]


@each(
    ("text", "order"),
    [
        ("sequential", Order("sequential")),
        ("pairwise", Order("pairwise")),
        ("blocked(8)", Order("blocked", 8)),
        (" Matrix_Unit( 16 ) ", Order("matrix_unit", 16)),
        ("blocked(1)", Order("blocked", 1)),
    ],
)
def test_orders_are_read_and_printed(text: str, order: Order) -> None:
    assert Order.parse(text) == order
    assert Order.parse(str(order)) == order
    assert MatmulSpec(order=text).order == order


@each("text", ["", "random", "blocked()", "blocked(-1)", "blocked(1.5)", "pairwise(2", "blocked 8"])
def test_other_texts_are_no_orders(text: str) -> None:
    with pytest.raises(ValueError, match=r"order=.*allowed: 'sequential', 'blocked\(b\)'"):
        MatmulSpec(order=text)


def test_specs_print_what_they_round() -> None:
    assert str(MatmulSpec()) == "order=sequential"
    spec = MatmulSpec("e4m3", accumulate="e5m10:stochastic", order="blocked(8)", fused=True)
    assert str(spec) == "operands=float8_e4m3, accumulate=e5m10:stochastic, order=blocked(8), fused"


@each("field", ["operands", "product", "accumulate"])
def test_any_stochastic_field_makes_it_stochastic(field: str) -> None:
    assert not spec_of(**{field: "e5m10"}).stochastic
    assert spec_of(**{field: "e5m10:stochastic_equal"}).stochastic


@each("order", ["sequential", "blocked(8)"])
def test_the_stepwise_orders_can_be_fused(order: str) -> None:
    assert MatmulSpec("e5m10", None, "e5m10", order, fused=True).fused


REFUSED = {
    "block missing": (lambda: order_of("blocked"), ValueError, r"order='blocked' needs a block length"),
    "block out of place": (lambda: order_of("pairwise", 4), ValueError, r"order='pairwise' has no blocks, but block=4"),
    "block of zero": (lambda: spec_of(order="blocked(0)"), ValueError, r"block of blocked=0 must be an integer"),
    "block no integer": (lambda: order_of("blocked", 2.0), TypeError, r"block of blocked=2\.0 must be an integer"),
    "kind": (lambda: order_of("kahan"), ValueError, r"order='kahan' must be one of 'sequential'"),
    "order's type": (lambda: spec_of(order=8), TypeError, r"order=8 must be an Order or its text"),
    "fused pairwise": (lambda: spec_of(order="pairwise", fused=True), ValueError, r"fused=True is for the orders"),
    "fused unit": (lambda: spec_of(order="matrix_unit(4)", fused=True), ValueError, r"fused=True is for the orders"),
    "fused product": (
        lambda: spec_of(product="e5m10", fused=True),
        ValueError,
        r"product='e5m10' is never used, since fused=True",
    ),
    "unit's product": (
        lambda: spec_of(product="e5m10", order="matrix_unit(4)"),
        ValueError,
        r"product='e5m10' is never used, since order='matrix_unit'",
    ),
    "fused's type": (lambda: spec_of(fused=1), TypeError, r"fused=1 must be True or False"),
    "format's text": (lambda: spec_of(accumulate="e5n10"), ValueError, r"e5n10"),
    "format's type": (lambda: spec_of(accumulate=8), TypeError, r"accumulate=8 must be a Spec, a format"),
    "gradient": (
        lambda: spec_of(accumulate="e5m10:gradient=clipped"),
        ValueError,
        r"accumulate='e5m10:gradient=clipped' has a gradient",
    ),
    "stochastic gradient": (
        lambda: spec_of("e5m10:gradient=[e5m2:stochastic]"),
        ValueError,
        r"operands=.*rounds cotangents stochastically",
    ),
}


@each("name", REFUSED)
def test_what_says_nothing_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def test_operands_may_have_a_gradient() -> None:
    spec = MatmulSpec("e5m10:gradient=clipped")
    assert spec.operands is not None
    assert spec.operands.gradient.clipped
