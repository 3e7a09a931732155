"""`QArray.astype` with a spec: the same numbers as fractions, or an error that names the first that is lost."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc

CASTS = [
    ("mxfp4", "nvfp4"), ("mxfp4", "float8_e4m3fn(channel=0)"), ("mxfp4", "float8_e4m3fn(group=(128,128))"),
    ("mxfp4", "mxfp8_e4m3"), ("mxfp4", "int8(group=32)"), ("int4(group=32,scale=float16)", "int8(group=32)"),
    ("uint4(group=32,zero_point=integer)", "int8(group=32)"), ("int4(group=32)", "uint4(group=32,zero_point=integer)"),
    ("int4(group=64)", "int4(group=32)"), ("float8_e4m3fn", "float8_e4m3fn(channel=0)"),
]  # fmt: skip


def fractions(q: jc.QArray) -> list[Fraction]:
    """The numbers of a matrix, from its codes and scales."""
    fmt = q.spec.scaled
    elements = q.spec.element.decode(q.codes)
    if fmt is None:
        return [Fraction(float(v)) for v in elements.ravel()]
    parts = q.scale if isinstance(q.scale, tuple) else (q.scale,)
    stored = np.asarray(parts[0])
    scale = fmt.scale.decode(stored) if fmt.scale.bits == 8 else stored.astype(np.float64)
    factor = Fraction(float(parts[1])) if len(parts) > 1 else Fraction(1)
    zero = np.zeros(scale.shape) if q.zero_point is None else np.asarray(q.zero_point)
    result = []
    for (i, j), element in np.ndenumerate(elements):
        at = tuple(k * n // m for k, n, m in zip((i, j), scale.shape, q.shape, strict=True))
        result.append((Fraction(float(element)) - int(zero[at])) * Fraction(float(scale[at])) * factor)
    return result


@pytest.mark.parametrize("before, after", CASTS)
def test_numbers_stay(before: str, after: str) -> None:
    x = np.random.default_rng(0).standard_normal((8, 128)) * np.exp2(np.arange(8) % 5)[:, None]
    x[3] = 0
    for array in (jnp.asarray(x, jnp.bfloat16), x.astype(np.float32)):
        q = jc.quantize(array, before)
        cast = q.astype(after)
        assert cast.spec.scaled == jc.quantize(x, after).spec.scaled and cast.dtype == q.dtype
        assert isinstance(cast.qvalue, jax.Array) == isinstance(q.qvalue, jax.Array)
        assert fractions(cast) == fractions(q)


def test_pairs_are_cast_if_and_only_if_one_scale_has_them() -> None:
    """All pairs of int4 under one scale, to e2m1: possible where two elements have the same quotient."""
    levels = [Fraction(float(v)) for v in jc.formats.float4_e2m1fn.decode(range(16))]
    pairs = np.array(list(itertools.product(range(-7, 8), repeat=2)), np.float32)
    for pair in pairs:
        q = jc.quantize(pair[None] * 0.375, "int4(group=2)", scale=np.full((1, 1), 0.375, np.float32))
        a, b = (Fraction(float(v)) for v in pair)
        possible = any(e * b == f * a and (e == 0) == (a == 0) and (f == 0) == (b == 0) for e in levels for f in levels)
        if possible:
            assert fractions(q.astype("float4_e2m1fn(group=2)")) == fractions(q), pair
        else:
            with pytest.raises(ValueError, match="would change under float4"):
                q.astype("float4_e2m1fn(group=2)")


def test_what_has_no_cast() -> None:
    x = np.linspace(-7, 7, 64, dtype=np.float32).reshape(1, 64).round()
    x[0, 5] = 100
    q = jc.quantize(x, "int8(group=all)", scale=np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match=r"number 100\.0 at \[0, 5\] would change under int4.*rounds$"):
        jc.quantize(x, "bfloat16").astype("int4(group=all)")
    with pytest.raises(ValueError, match=r"number -7\.0 at \[0, 0\]"):
        q.astype("mxfp4")
    with pytest.raises(ValueError, match="must be a carrier, or a scaled format without"):
        q.astype("nf4(scale=uint8(group=256,zero_point=float))")
    with pytest.raises(TypeError, match="call it outside"):
        jax.jit(lambda q: q.astype("int8(group=all)"))(jax.tree.map(jnp.asarray, q))
    assert q.astype("float16").dtype == np.float16 and q.astype(jnp.float32).dtype == np.float32


def test_a_layout_holds_what_a_cast_has(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    q = jc.quantize(x, "mxfp4")
    for layout in ("fp8", "torchao"):
        jc.save_checkpoint(tmp_path / layout, {"a.weight": q}, layout)
        found = jc.load_checkpoint(tmp_path / layout)["a.weight"]
        assert found.spec.element.bits == 8
        np.testing.assert_array_equal(jc.dequantize(found), jc.dequantize(q))
