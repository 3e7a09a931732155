"""`low.ranges` and `compare` of two arithmetics: counts as NumPy's, rows by line."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each_case import each

import jchop as jc

RNG = np.random.default_rng(3)
BATCHES = [
    tuple((RNG.normal(size=(2, 200)) * 2.0 ** RNG.integers(-16, 9, (2, 200))).astype(np.float32)) for _ in range(3)
]
#: A program, its format, the type of ml_dtypes and of NumPy, and the exact operation.
PROGRAMS: dict[str, tuple[Any, str, Any, Any]] = {
    "product": (lambda x, y: x * y, "e4m3", ml_dtypes.float8_e4m3, np.multiply),
    "quotient": (lambda x, y: x / y, "binary16", np.float16, np.divide),
    "difference": (lambda x, y: x - y, "bfloat16", ml_dtypes.bfloat16, np.subtract),
}


@each("name", PROGRAMS)
def test_counts_are_those_of_numpy(name: str) -> None:
    program, spec, dtype, operation = PROGRAMS[name]
    seen = jc.emulate(program, spec).ranges(BATCHES)
    row, info = seen.rows[-1], ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        args = [tuple(x.astype(dtype).astype(np.float64) for x in batch) for batch in BATCHES]
        exact = np.concatenate([operation(*pair) for pair in args]).astype(np.float32)
        low = exact.astype(dtype).astype(np.float64)
    count, size = exact.size, np.abs(low)
    finite = exact[np.isfinite(exact) & (exact != 0)]
    assert dict(row.exponents) == Counter((np.frexp(finite)[1] - 1).tolist())
    assert (row.numbers, row.zeros) == (count, np.mean(exact == 0))
    assert row.subnormals == np.mean((size > 0) & (size < float(info.smallest_normal)))
    assert row.underflows == np.mean((size == 0) & (exact != 0))
    assert row.overflows == np.mean(~np.isfinite(low) & np.isfinite(exact))
    assert (row.smallest, row.largest) == (np.abs(finite).min(), np.abs(finite).max())
    if name == "difference":
        a, b = (np.concatenate(side) for side in zip(*args, strict=True))
        drop = np.frexp(np.maximum(np.abs(a), np.abs(b)))[1] - np.frexp(size)[1]
        drop = np.maximum(np.where(size == 0, 8, drop), 0)[(a != 0) | (b != 0)]
        assert (row.cancelled, row.cancelled_mean) == (drop.max(), pytest.approx(drop.mean()))


@each("name", PROGRAMS)
def test_the_format_that_a_line_asks_for_holds_it(name: str) -> None:
    program, spec, _, operation = PROGRAMS[name]
    row = jc.emulate(program, "binary32").ranges(BATCHES).rows[-1]
    with np.errstate(all="ignore"):
        exact = np.concatenate([operation(*batch) for batch in BATCHES]).astype(np.float64)
    exact = exact[np.isfinite(exact)]
    fmt = jc.formats.FloatFormat(row.exponent_bits, 23, bias=row.bias)
    assert np.array_equal(jc.round_to_format(exact, fmt), exact.astype(np.float32))
    low = jc.emulate(program, spec).ranges(BATCHES).rows[-1]
    limit, top = float(jc.Spec(spec).format.max), low.largest * 2.0**low.scale  # type: ignore[attr-defined]
    assert top <= limit < 2 * top


def loss(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return jnp.mean(h * h) * 1e-6


def test_a_loss_at_its_scale_keeps_the_derivatives() -> None:
    x, w = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (16, 4))
    seen = jc.emulate(jax.grad(loss), "e5m2").ranges([(w, x), (w, 2 * x)])
    assert seen.loss_scale is not None and seen.loss_scale == 15 and "derivatives: " in seen.notes[-1]
    for more, overflows in ((0, False), (1, True)):
        scaled = jc.emulate(jax.grad(lambda w, x, k=more: loss(w, x) * 2.0 ** (15 + k)), "e5m2")
        assert any(row.overflows for row in scaled.report(w, x, trace_values=True).rows) is overflows
    assert jc.emulate(loss, "e5m2").ranges([(w, x)]).loss_scale is None


def test_two_arithmetics_stand_side_by_side() -> None:
    x = jnp.array([1.0, 8.0, 0.01])
    low = [jc.emulate(lambda x: jnp.exp(x) * x, spec) for spec in ("e4m3", "e5m2")]
    seen = jc.compare(*low, x)
    reports = [one.report(x, trace_values=True) for one in low]
    (row,) = [row for row in seen.rows if "jnp.exp" in row.text]
    assert row.losses == tuple(sum(r.overflows + r.underflows + r.nans for r in one.rows) for one in reports)
    assert row.errors == tuple(max(r.error for r in one.rows) for one in reports)
    assert max(map(len, str(seen).splitlines())) <= 100
    with pytest.raises(TypeError, match=r"formats='e5m2' must be a function that jchop\.emulate returned"):
        jc.compare(low[0], "e5m2", x)  # pyright: ignore[reportArgumentType]
