"""Packed arrays without their zeros: bytes, bits of codes and places against NumPy, and the numbers they had."""

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
    ("float6_e2m3fn(group=tensor)", 1, 2, 1),
    ("uint4(group=8,zero_point=integer)", 2, 4, 1),
]


@pytest.mark.parametrize(
    ("text", "n", "m", "axis"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=str,
)
def test_it_has_the_numbers_of_the_array(text: str, n: int, m: int, axis: int) -> None:
    w = np.random.default_rng(0).normal(size=(22, 16)).astype(np.float32)
    w = np.where(jc.sparsity.mask(w, n, m, axis=axis), w, 0)
    q = jc.quantize(jnp.asarray(w), text)
    packed = jc.sparsity.pack(q, n, m, axis=axis)
    np.testing.assert_array_equal(jc.dequantize(packed), jc.dequantize(q))
    assert packed.shape == q.shape and packed.nbytes < q.nbytes + packed.places.nbytes
    wanted = jax.eval_shape(lambda w: jc.quantize(w, packed.spec), w)
    assert jax.tree.structure(packed) == jax.tree.structure(wanted)
    assert [v.shape for v in jax.tree.leaves(packed)] == [v.shape for v in jax.tree.leaves(wanted)]


def test_codes_and_places_are_those_of_the_definition() -> None:
    """int4, 2 of 4: two codes of 4 bits and four places of a bit in every four numbers, low bits first."""
    x = jnp.asarray([[0, 3.0, 0, -7.0, 0, 0, 0, 5.0], [1.0, 2.0, 0, 0, 0, 0, 0, 7.0]])
    packed = jc.sparsity.pack(jc.quantize(x, "int4(channel=0)"), 2, 4, axis=1)
    bits = 8 * (packed.qvalue.nbytes + packed.places.nbytes)
    assert bits / x.size == 3 and packed.nbytes == bits // 8 + 8
    codes = [[3 | 9 << 4, 0 | 5 << 4], [1 | 2 << 4, 0 | 7 << 4]]
    assert packed.qvalue.tolist() == codes  # of a group with one number the first zero is stored with it
    assert packed.places.tolist() == [[0b1001_1010], [0b1001_0011]]


@pytest.mark.parametrize("swept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_stores_what_the_format_prunes(swept: bool) -> None:
    """By magnitudes, and in the sweep of GPTQ."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 64), (64, 32)))
    dense, text = (
        lambda p, x: x @ p,
        "int4(group=32,scale=bfloat16)" if swept else "int4(group=32,axis=0,scale=bfloat16)",
    )
    if swept:
        steps = [jc.ptq.sparse(2, 4), jc.ptq.clip(), jc.ptq.gptq()]
        found = jc.quantize_fn(dense, jc.Rule(weight=text)).pack(w, batches=[x], steps=steps)
        same = jc.quantize_fn(dense, jc.Rule(weight=f"{text[:-1]},sparse=2:4)")).pack(w, batches=[x])
    else:
        found = jc.quantize(jnp.where(jc.sparsity.mask(w, 2, 4, axis=0), w, 0), text)
        same = jc.quantize(w, f"{text[:-1]},sparse=2:4)")
    packed = jc.sparsity.pack(found, 2, 4)
    assert 8 * packed.nbytes / w.size == 3.5 and packed.spec == same.spec
    np.testing.assert_array_equal(jc.dequantize(packed), jc.dequantize(same))
    np.testing.assert_array_equal(packed.scale, same.scale)
    if swept:  # of a number that was rounded to zero the format knows the place, and `pack` does not
        for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_is_refused() -> None:
    x = jnp.ones((4, 8)).at[1].set(-0.0)
    with pytest.raises(ValueError, match=r"q has 4 of 4 numbers along axis=1 that are not zero; n=2"):
        jc.sparsity.pack(jc.quantize(x, "int4"), 2, 4, axis=1)
    with pytest.raises(ValueError, match="needs a scaled format that keeps all numbers"):
        jc.sparsity.pack(jc.quantize(x, "float8_e4m3fn"), 3, 4)
    with pytest.raises(ValueError, match="needs a scaled format that keeps all numbers"):
        jc.sparsity.pack(jc.quantize(x, "int4(sparse=2:4)"), 2, 4)
    with pytest.raises(ValueError, match="numbers along axis=-2 that are not zero"):
        jc.sparsity.pack(jc.quantize(x, "codebook(-1,1,group=tensor)"), 2, 4)
    with pytest.raises(
        TypeError, match=r"^q is \w+ float32\[4, 8\]; it must be a QArray, as returned by jchop\.quantize$"
    ):
        jc.sparsity.pack(x, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a QArray outside jit"):
        jax.jit(lambda x: jc.sparsity.pack(jc.quantize(x, "int4"), 2, 4).qvalue)(x)
    q = jc.quantize(x, "float8_e4m3fn(group=tensor)")  # -0 is zero
    np.testing.assert_array_equal(jc.dequantize(jc.sparsity.pack(q, 3, 4, axis=0)), x)
