"""Flipped bits: which elements, which bit, and what the codes then say, from the words of the stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further

import jchop as jc

further = Further()

KEY = jax.random.key(11)


def drawn(shape: tuple[int, ...], p: float, count: int, key: jax.Array = KEY) -> tuple[np.ndarray, np.ndarray]:
    """Which elements are flipped, and which of `count` bits, by the definition."""
    with jax.enable_x64(True):
        whether = np.asarray(jc.random_bits(jax.random.fold_in(key, 1), shape, width=64))
    which = np.asarray(jc.random_bits(jax.random.fold_in(key, 2), shape))
    hit = np.array([word < p * 2**64 for word in whether.ravel().tolist()], bool).reshape(shape)
    bit = [(word >> 8) * count // 2**24 for word in which.ravel().tolist()]
    return hit, np.array(bit, np.uint64).reshape(shape)


def numbers(size: int) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal(size) * 2.0 ** np.random.default_rng(6).integers(-18, 10, size)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30]
    return x


# A spec, the carrier of the data, the dtype whose bits are the codes, the fraction bits of these.
FLOATS = [
    ("e5m2:saturate", np.float32, ml_dtypes.float8_e5m2, 2),
    ("float8_e4m3fn:saturate", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, 3),
    ("binary32", np.float32, np.float32, 23),
    ("binary64", np.float64, np.float64, 52),
]


@further
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(("text", "carrier", "coded", "fraction"), FLOATS)
def codes_of_floats(text: str, carrier: type, coded: type, fraction: int) -> None:
    x = numbers(400).astype(carrier)
    width = np.dtype(coded).itemsize * 8
    # The codes in which nothing has flipped; that rounding is right is proved elsewhere.
    plain = np.asarray(jc.round_to_format(x, text)).astype(np.float64).astype(coded)
    codes = plain.view(f"uint{width}").astype(np.uint64)
    for where, p, count in (("significand", 0.25, fraction), ("code", 1.0, width))[text == "binary64" :]:
        hit, bit = drawn(x.shape, p, count)
        if where == "significand":
            hit &= np.isfinite(plain.astype(np.float64))
        flipped = np.where(hit, codes ^ (np.uint64(1) << bit), codes).astype(f"uint{width}").view(coded)
        with np.errstate(invalid="ignore"):  # signalling NaN
            expected = flipped.astype(np.float64)
        got = jc.flip_bits(x, text, p, KEY, where=where)  # type: ignore[arg-type]
        assert isinstance(got, np.ndarray) and got.dtype == np.dtype(carrier)
        assert hit.sum() > 50
        np.testing.assert_array_equal(got.astype(np.float64), expected)
        signs = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got)[signs], np.signbit(expected)[signs])


@pytest.mark.parametrize(
    ("text", "scale"),
    [("integer4", 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("fixed1.3", 8), ("codebook", 1)))],
)
def test_codes_of_integers_and_tables(text: str, scale: int) -> None:
    x = np.array([-8.0, -7.0, -1.0, 0.0, 3.0, 7.0] * 20, np.float32)
    if text != "codebook":
        hit, bit = drawn(x.shape, 0.5, 3)
        flipped = [int(v) % 16 ^ (1 << int(b)) if h else int(v) % 16 for v, h, b in zip(x, hit, bit, strict=True)]
        expected = np.array([code - 16 if code > 7 else code for code in flipped], np.float32) / scale
        np.testing.assert_array_equal(jc.flip_bits(x / scale, text, 0.5, KEY, where="significand"), expected)
        return
    levels = jc.formats.CodebookFormat((-1.0, 0.0, 0.5))  # of the four codes the last has no value
    got = jc.flip_bits(np.array([-1.0, 0.0, 0.5] * 20), levels, 1, KEY, where="code")
    _, bit = drawn((60,), 1, 2)
    table = [-1.0, 0.0, 0.5, np.nan]
    np.testing.assert_array_equal(got, [table[i % 3 ^ (1 << int(b))] for i, b in enumerate(bit)])


@pytest.mark.parametrize("kind", ["zero", pytest.param("special", marks=pytest.mark.slow)])
def test_what_has_no_code_stays(kind: str) -> None:
    if kind == "zero":
        zeros = np.array([0.0, -0.0] * 8, np.float32)
        kept = jc.flip_bits(zeros, "e5m2(subnormals=false)", 1, KEY)
        np.testing.assert_array_equal(np.signbit(kept), np.signbit(zeros))
        assert (kept == 0).all() and (jc.flip_bits(zeros, "e5m2", 1, KEY) != 0).all()
        return
    x = np.array([np.nan, np.inf, -np.inf] * 8, np.float32)
    assert (np.isnan(jc.flip_bits(x, "e3m2fn", 1, KEY, where="code")) == np.isnan(x)).all()
    np.testing.assert_array_equal(jc.flip_bits(x, "e5m2", 1, KEY), x)


@further.first
def rounding_draws_from_the_key_itself() -> None:
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    rounded = jc.round_to_format(x, "e5m2:stochastic", KEY)
    np.testing.assert_array_equal(jc.flip_bits(x, "e5m2:stochastic", 0, KEY), rounded)
    flipped = jc.flip_bits(x, "e5m2:stochastic", 0.5, KEY)
    np.testing.assert_array_equal(flipped, jc.flip_bits(rounded, "e5m2", 0.5, KEY))
    assert 200 < (flipped != rounded).sum() < 300


@pytest.mark.parametrize("kind", ["vmap", pytest.param("others", marks=pytest.mark.slow)])
def test_transforms(kind: str) -> None:
    if kind == "others":
        other_transforms()
        return
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)), jnp.float32)
    keys = jax.random.split(KEY, 3)
    eager = np.stack([jc.flip_bits(np.asarray(row), "e4m3", 0.5, key) for row, key in zip(x, keys, strict=True)])
    batched = jax.jit(jax.vmap(lambda row, key: jc.flip_bits(row, "e4m3", 0.5, key)))(x, keys)
    np.testing.assert_array_equal(batched, eager)


def other_transforms() -> None:
    clipped = jc.Spec("e4m3", overflow="saturate", gradient="clipped")
    slopes = jax.grad(lambda v: jc.flip_bits(v, clipped, 0.5, KEY).sum())(jnp.array([1.0, 1e6, -3.0]))
    assert slopes.tolist() == [1.0, 0.0, 1.0]
    constant = jax.jit(lambda s: s + jc.flip_bits(np.ones(9, np.float32), "e5m2", 0.5, KEY))(0.0)
    np.testing.assert_array_equal(constant, jc.flip_bits(np.ones(9, np.float32), "e5m2", 0.5, KEY))
    assert jc.flip_bits(1.0, "e5m2", 1.0, KEY) in (1.25, 1.5)


@pytest.mark.smoke
def test_refused() -> None:
    x = np.ones(3, np.float32)
    for error, said, call in (
        (ValueError, "p=1.5 must be", lambda: jc.flip_bits(x, "e5m2", 1.5, KEY)),
        (TypeError, "p='often' must be", lambda: jc.flip_bits(x, "e5m2", "often", KEY)),  # type: ignore[arg-type]
        (ValueError, "key=None", lambda: jc.flip_bits(x, "e5m2", 0.5, None)),  # type: ignore[arg-type]
        (TypeError, "typed key", lambda: jc.flip_bits(x, "e5m2", 0.5, 3)),  # type: ignore[arg-type]
        (ValueError, "where='sign'", lambda: jc.flip_bits(x, "e5m2", 0.5, KEY, where="sign")),  # type: ignore[arg-type]
        (ValueError, "scaled format", lambda: jc.flip_bits(x, "mxfp4", 0.5, KEY)),
        (ValueError, "no significand bits", lambda: jc.flip_bits(x, "codebook(-1,0,1)", 0.5, KEY)),
        (ValueError, "at most 16", lambda: jc.flip_bits(x, "fixed10.10", 0.5, KEY)),
        (ValueError, "lacks values of binary32", lambda: jc.flip_bits(x.astype(np.float16), "binary32", 0.5, KEY)),
        (ValueError, "lacks values of binary64", lambda: jc.flip_bits(x, "binary64", 0.5, KEY)),
        (TypeError, "complex64", lambda: jc.flip_bits(x.astype(np.complex64), "e5m2", 0.5, KEY)),
        (TypeError, "traced", lambda: jax.jit(lambda key: jc.flip_bits(x, "e5m2", 0.5, key))(KEY)),
    ):
        with pytest.raises(error, match=said):
            call()


test_further = further.test()
