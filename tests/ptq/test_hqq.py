"""Half-quadratic quantization as a step: the numbers of `fit_half_quadratic`, a sweep under them, and errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._storage import fit_half_quadratic
from tests.ptq.test_quantize import decibels, dense, outliers

further = Further()


def check_search() -> None:
    """And a sweep after it rounds under them."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_t(3, size=shape), jnp.float32) for shape in ((16, 6), (32, 16)))
    rule = jc.Rule(weight="uint3(group=8,zero_point=float)")
    packed, report = jc.quantize_fn(dense, rule).pack(
        {"w": w}, batches=[x], steps=jc.ptq.hqq(5, norm=0.6), return_report=True
    )
    scale, zero = fit_half_quadratic(w, packed["w"].spec, iterations=5, norm=0.6)
    expected = jc.quantize(w, packed["w"].spec, scale=scale, zero_point=zero)
    for found, own in zip(jax.tree.leaves(packed["w"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, own)
    assert (packed["w"].zero_point != jc.fit_scale(w, packed["w"].spec)[1]).any()
    assert report.weights[0].method == "hqq"
    swept = jc.quantize_fn(dense, rule).pack({"w": w}, batches=[x], steps=[jc.ptq.hqq(5, norm=0.6), jc.ptq.gptq()])
    np.testing.assert_array_equal(swept["w"].zero_point, packed["w"].zero_point)
    assert (swept["w"].qvalue != packed["w"].qvalue).any()


def check_patches() -> None:
    """Of a convolution, stored in another shape."""

    def conv(p: Any, x: Any) -> Any:
        return jax.lax.conv(x, p["w"], (2, 2), "VALID")

    rng, fmt = np.random.default_rng(0), "uint4(group=8,zero_point=float)"
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 3, 2, 2), (8, 3, 6, 6)))
    alone, both = (
        jc.quantize_fn(conv, jc.Rule(weight=fmt)).pack({"w": w}, batches=[x], steps=steps)["w"].stored
        for steps in ([jc.ptq.hqq()], [jc.ptq.hqq(), jc.ptq.gptq()])
    )
    np.testing.assert_array_equal(alone.zero_point, both.zero_point)
    assert (alone.qvalue != both.qvalue).any()


def check_gains() -> None:
    """On fresh data."""
    params, x, fresh = outliers()
    y, rule = fresh @ params["w"], jc.Rule(weight="uint4(group=64,zero_point=float)")
    low, found = jc.quantize_fn(dense, rule), {}
    for steps in ([], [jc.ptq.hqq()], [jc.ptq.hqq(), jc.ptq.gptq()]):
        packed, report = jc.quantize_fn(dense, rule).pack(params, batches=[x], steps=steps, return_report=True)
        found[report.weights[0].method] = decibels(y, low(packed, fresh) - y)
    assert found["hqq"] > found["nearest"] + 0.3 and found["hqq, gptq"] > found["nearest"] + 7.5


@further
@pytest.mark.parametrize(
    "check", [check_search, *(pytest.param(check, marks=pytest.mark.slow) for check in (check_patches, check_gains))]
)
def the_zero_points_are_those_of_the_search(check: Any) -> None:
    check()


@further.first
def refused() -> None:
    w, x = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
    for fmt, message in (
        ("int4(group=all)", r"hqq\(20, .* of 'w': .*has zero_point=None"),
        ("uint4(group=4,zero_point=float,scale=float8_e5m2)", "the search needs one of float16"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.quantize_fn(dense, jc.Rule(weight=fmt)).pack(w, batches=[x], steps=jc.ptq.hqq(), return_report=True)
    with pytest.raises(ValueError, match="then one clip or hqq, then"):
        jc.quantize_fn(dense, jc.Rule(weight="int4")).pack(
            w, batches=[x], steps=[jc.ptq.clip(), jc.ptq.hqq()], return_report=True
        )
    for arguments, message in (
        ({"iterations": 0}, "iterations=0"),
        ({"norm": 1.0}, "norm=1.0 must be a finite number > 0 and < 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.ptq.hqq(**arguments)


test_further = further.test()
