"""Rotations of backward products, against matrices in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc

#: Of NVIDIA's Transformer Engine, for its NVFP4 recipe.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def sylvester(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_the_matrix_is_orthogonal_and_exact(size: int) -> None:
    rotation = jc.Hadamard(size)
    np.testing.assert_array_equal(rotation.matrix @ rotation.matrix.T, np.eye(size))
    np.testing.assert_array_equal(rotation.matrix, sylvester(size) * rotation.signs / np.sqrt(size))
    assert jc.Hadamard().signs == SIGNS == tuple(jc.Hadamard(64).signs or ())[16:32]


def turned(x: np.ndarray, rotation: jc.Hadamard) -> np.ndarray:
    """The last axis times the matrix, by blocks; what is left over stays."""
    out, size = np.array(x), rotation.size
    for start in range(0, x.shape[-1] // size * size, size):
        out[..., start : start + size] = x[..., start : start + size] @ rotation.matrix.T
    return out


def test_blocks_are_turned_and_the_rest_stays() -> None:
    rotation = jc.Hadamard(4, signs=(1, -1, -1, 1))
    whole = np.random.default_rng(0).integers(-8, 9, (3, 2, 11)).astype(np.float32)  # exact in any order
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(rotation.rotate)(jnp.asarray(whole, dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), turned(whole, rotation))
    for shape in ((3,), (2, 0), (0, 4)):
        assert rotation.rotate(jnp.ones(shape)).shape == shape


def pulled(rule: jc.Rule, w: Any, x: Any, g: Any, key: Any = None) -> Any:
    low = jc.quantize_fn(lambda w, x: x @ w, rule, key=key)
    y, back = jax.vjp(low, w, x)
    return jax.tree.map(np.asarray, (y, *back(g)))


@pytest.mark.usefixtures("x64")
def test_without_rounding_dw_is_that_of_the_product() -> None:
    """A gradient in float64: the rotation is in dw alone, and leaves its sum."""
    w, x, g = (jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(((5, 3), (2, 19, 5), (2, 19, 3))))
    plain = jc.Rule(weight="e4m3", gradient="binary64")
    y, dw, dx = pulled(plain, w, x, g)
    turned_y, turned_dw, turned_dx = pulled(
        jc.Rule(weight="e4m3", gradient="binary64", rotation=jc.Hadamard()), w, x, g
    )
    np.testing.assert_array_equal(y, turned_y)
    np.testing.assert_array_equal(dx, turned_dx)
    np.testing.assert_allclose(turned_dw, dw, rtol=0, atol=1e-14)
    assert (turned_dw != dw).any()  # the terms are others


@pytest.mark.parametrize("product", ["float", pytest.param("codes", marks=pytest.mark.slow)])
def test_operands_are_rounded_after_they_are_turned(product: Any) -> None:
    """Of whole numbers, whose sums are exact, against the definition with matrices."""
    rng, rotation = np.random.default_rng(2), jc.Hadamard(4, products="both")
    w, x, g = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((6, 8), (10, 6), (10, 8)))
    spec = "int4(group=4,scale=e8m0fnu,rule=rceil)"
    rule = jc.Rule(weight=spec, activation=spec, gradient=spec, rotation=rotation, product=product)
    y, dw, dx = pulled(rule, jnp.asarray(w), jnp.asarray(x), jnp.asarray(g))

    def rounded(a: np.ndarray) -> np.ndarray:
        return np.asarray(jc.round_to_format(a.astype(np.float32), spec), np.float64)

    def both(a: np.ndarray) -> np.ndarray:
        return rounded(turned(a, rotation))

    np.testing.assert_array_equal(y, rounded(x) @ rounded(w.T).T)
    np.testing.assert_array_equal(dx, both(g) @ both(w).T)
    np.testing.assert_array_equal(dw, both(x.T) @ both(g.T).T)
    one = jc.Rule(weight=spec, activation=spec, gradient=spec, rotation=jc.Hadamard(4), product=product)
    _, dw_alone, dx_alone = pulled(one, jnp.asarray(w), jnp.asarray(x), jnp.asarray(g))
    np.testing.assert_array_equal(dw_alone, dw)
    np.testing.assert_array_equal(dx_alone, rounded(g) @ rounded(w).T)


@pytest.mark.slow
def test_nvfp4_gradients_are_right_on_average() -> None:
    """2^16 draws of dw under the recipe, in which g alone is rounded.

    The scales of its blocks are exact here. Elsewhere a scale that is rounded down clips the largest number of a block.
    """
    rule = jc.nn.recipe("nvfp4", activation=None)
    w, x = (jnp.asarray(normal(*shape, seed=i), jnp.float32) for i, shape in enumerate(((4, 8), (16, 4))))
    blocks = normal(8, 16, seed=2)  # of the rotated gradient, each with a power of two as its largest magnitude
    blocks *= 2.0 ** (np.arange(8) % 3)[:, None] / np.abs(blocks).max(1, keepdims=True)
    g = jnp.asarray((blocks @ jc.Hadamard().matrix).T, jnp.float32)
    low = jc.quantize_fn(lambda w, x: x @ w, rule)

    def run(key: Any) -> Any:
        return jax.vjp(lambda w: low(w, x, key=key), w)[1](g)[0]

    draws = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 2**16)), np.float64)
    error = draws.std(0) / 2**8
    assert (error > 0).all()
    off = np.abs(draws.mean(0) - np.asarray(x, np.float64).T @ np.asarray(g, np.float64)) / error
    assert off.max() < 4.5 and np.sqrt((off**2).mean()) < 1.5  # of 32 means


def test_refused() -> None:
    for arguments, message in (
        ({"size": 8}, "size=8 must be one of 4, 16, 64, 256"),
        ({"size": 4, "signs": (1, 1, 1)}, r"signs=\(1, 1, 1\) must be 4 numbers"),
        ({"products": "forward"}, "products='forward'"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.Hadamard(**arguments)  # type: ignore[arg-type]
    turn = jc.Hadamard()
    with pytest.raises(TypeError, match=r"rotation=16 must be a jchop\.Hadamard"):
        jc.Rule(weight="e4m3", gradient="e5m2", rotation=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rotation=Hadamard\(16\) needs a gradient="):
        jc.Rule(weight="e4m3", rotation=turn)
    with pytest.raises(ValueError, match="needs a gradient="):
        jc.Rule(weight_gradient="e4m3", rotation=jc.Hadamard(products="both"))
    with pytest.raises(ValueError, match="rounded once"):
        jc.Rule(activation="int8", gradient="int8", scale_from=jc.MovingAverage(0.5), rotation=turn)
    rule = jc.Rule(weight="e4m3", gradient="e5m2", rotation=turn)
    conv = jc.quantize_fn(lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"), rule)
    with pytest.raises(NotImplementedError, match=r"rotation=Hadamard\(16\).*operation='conv'"):
        conv(jnp.ones((2, 1, 3, 3)), jnp.ones((1, 1, 4, 4)))
