"""The quirks of XLA's GPU backend: each in a small program that shows whether it is still there, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jchop._core.xla.gpu import dot_precision, pad_to_whole_words

on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def wrong_sums(*, padded: bool) -> bool:
    """Whether a product of int8 has another result than that of Python's integers."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (pad_to_whole_words(a), pad_to_whole_words(b)) if padded else (a, b)
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    rng = np.random.default_rng(0)
    for m, k, n in ((3, 37, 5), (2, 6, 2), (16, 37, 16), (1, 33, 64), (64, 7, 48)):
        a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (n, k)))
        if not np.array_equal(jax.jit(product)(a, b), a.astype(int) @ b.astype(int).T):
            return True
    return False


@on_gpu
def test_short_sums_of_integers_doubled():
    assert wrong_sums(padded=False), "the quirk is gone: its workaround may go"
    assert not wrong_sums(padded=True)


def test_zeros_fill_up_the_sum():
    x = np.arange(-10, 11, dtype=np.int8).reshape(3, 7)
    for axis, y in ((-1, x), (0, x.T), (1, x)):
        filled = np.asarray(pad_to_whole_words(jnp.asarray(y), axis))
        assert filled.shape[axis] == 16 and filled.dtype == np.int8
        kept, rest = np.split(filled, [7], axis)
        assert np.array_equal(kept, y) and not rest.any()
    whole = jnp.zeros((2, 32), jnp.int8)
    assert pad_to_whole_words(whole) is whole
    assert not wrong_sums(padded=True)


def test_float8_is_multiplied_at_high_precision_and_the_rest_at_the_highest():
    """`tests/_kernels/test_compile.py` compiles both for a GPU that is not there."""
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        assert dot_precision(dtype) == lax.Precision.HIGH
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float64):
        assert dot_precision(dtype) == lax.Precision.HIGHEST
