"""Packed arrays without their zeros: bytes, bits of codes and places against NumPy, and the array given back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc

CASES = [
    ("int4(group=8,axis=0)", 2, 4, 0),
    ("int4(group=8,axis=0)", 1, 4, -1),
    ("nvfp4", 2, 4, 1),
    ("nf4(group=16)", 3, 5, 0),
    ("float8_e4m3fn(channel=1)", 4, 8, 0),
    ("int8(channel=1,scale=uint8(group=2))", 2, 4, 0),
    ("float6_e2m3fn", 1, 2, 1),
    ("binary32", 2, 4, 0),
]


@pytest.mark.parametrize(
    ("text", "n", "m", "axis"), [pytest.param(*c, marks=pytest.mark.in_turn(4)) for c in CASES], ids=str
)
@pytest.mark.in_turn(3)
def test_the_array_is_given_back(text: str, n: int, m: int, axis: int) -> None:
    w = np.random.default_rng(0).normal(size=(22, 16)).astype(np.float32)
    q = jc.quantize(jnp.asarray(np.where(jc.sparsity.mask(w, n, m, axis=axis), w, 0)), text)
    packed = jc.sparsity.pack(q, n, m, axis=axis)
    again = jax.jit(lambda s: s.unpack())(packed)
    assert again.spec == q.spec and again.shape == q.shape and again.dtype == q.dtype
    assert jax.tree.structure(again) == jax.tree.structure(q)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_codes_and_places_are_those_of_the_definition() -> None:
    """int4, 2 of 4: two codes of 4 bits and two places of 2 bits in every four numbers, low bits first."""
    x = jnp.asarray([[0, 3.0, 0, -7.0, 0, 0, 0, 5.0], [1.0, 2.0, 0, 0, 0, 0, 0, 7.0]])
    packed = jc.sparsity.pack(jc.quantize(x, "int4(channel=0)"), 2, 4, axis=1)
    bits = 8 * (packed.codes.nbytes + packed.places.nbytes)
    assert bits / x.size == 3 and packed.nbytes == bits // 8 + 8
    codes = [[3 | 9 << 4, 0 | 5 << 4], [1 | 2 << 4, 0 | 7 << 4]]
    assert packed.codes.tolist() == codes  # of a group with one number the first zero is stored with it
    assert packed.places.tolist() == [[1 | 3 << 2 | 0 << 4 | 3 << 6], [0 | 1 << 2 | 0 << 4 | 3 << 6]]


@pytest.mark.slow
def test_it_stores_what_the_sweep_prunes() -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 64), (64, 32)))
    rule, dense = jc.Rule(weight="int4(group=32,scale=bfloat16)"), lambda p, x: x @ p
    found, _ = jc.ptq.quantize(dense, rule, w, [x], [jc.ptq.sparse(2, 4), jc.ptq.gptq()])
    packed = jc.sparsity.pack(found, 2, 4)
    assert 8 * packed.nbytes / w.size == 3.5
    np.testing.assert_array_equal(packed.unpack().qvalue, found.qvalue)


@pytest.mark.slow
def test_what_is_refused() -> None:
    x = jnp.ones((4, 8)).at[1].set(-0.0)
    with pytest.raises(ValueError, match=r"q has 4 of 4 numbers along axis=1 that are not zero; n=2"):
        jc.sparsity.pack(jc.quantize(x, "int4"), 2, 4, axis=1)
    with pytest.raises(ValueError, match="needs a format with a zero and no zero points"):
        jc.sparsity.pack(jc.quantize(x, "uint4(zero_point=integer)"), 2, 4)
    with pytest.raises(ValueError, match="needs a format with a zero"):
        jc.sparsity.pack(jc.quantize(x, "codebook(-1,1)"), 2, 4)
    with pytest.raises(TypeError, match="must be a QArray outside jit"):
        jc.sparsity.pack(x, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a QArray outside jit"):
        jax.jit(lambda x: jc.sparsity.pack(jc.quantize(x, "int4"), 2, 4).codes)(x)
    q = jc.quantize(x, "float8_e4m3fn")  # -0 is zero
    np.testing.assert_array_equal(jc.dequantize(jc.sparsity.pack(q, 3, 4, axis=0).unpack()), x)
