"""Half-quadratic zero points beside the same search in NumPy, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._storage import fit_half_quadratic

further = Further()

FIT = fit_half_quadratic


def searched(x: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """The published turns in float64, for codes from 0 to 15 of the rows of x."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale = (high - low) / 15
    zero, best, kept, weight = low, np.inf, low, 10.0
    for turn in range(iterations + 1):
        whole = np.clip(np.rint((x - zero) / scale), 0, 15) * scale
        rest = x - whole - zero
        if np.abs(rest).mean() >= best:
            break
        best, kept = np.abs(rest).mean(), zero
        size = np.where(rest == 0, 1e-300, np.abs(rest))
        sparse = np.sign(rest) * np.maximum(size - size**-0.3 / (weight * 1.01**turn), 0)
        zero = (x - sparse - whole).mean(1, keepdims=True)
    return scale, kept


@further.first
def the_turns_are_the_published_ones() -> None:
    x = np.random.default_rng(3).standard_t(3, (8, 64))
    scale, zero = FIT(x, "uint4(channel=0,zero_point=float,scale=float64)")
    wanted = searched(x, 20)
    np.testing.assert_allclose(scale, wanted[0], rtol=1e-12)
    np.testing.assert_allclose(zero, wanted[1], rtol=1e-9, atol=1e-12)
    assert isinstance(zero, np.ndarray) and zero.dtype == np.float64
    moved = np.abs(zero - x.min(1, keepdims=True))
    assert np.all(moved > 0) and np.all(moved < 3 * scale)


@further
def kinds_of_arrays() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 20)), jnp.bfloat16).at[1, 3].set(jnp.inf)
    text = "int4(group=8,zero_point=float,scale=bfloat16)"
    scale, zero = FIT(x, text, iterations=2)
    assert isinstance(zero, jax.Array) and zero.dtype == jnp.bfloat16 and zero.shape == scale.shape == (3, 3)
    q = jc.quantize(x, text, scale=scale, zero_point=zero)
    assert bool(jnp.isfinite(jc.dequantize(q)).all())
    assert FIT(jnp.zeros((0, 3)), text)[1].shape == (0, 1)


def test_refused() -> None:
    x = np.ones((2, 8), np.float32)
    for said, text, options in (
        ("has zero_point=integer.*'uint4.*zero_point=float", "uint4(group=8,zero_point=integer)", {}),
        ("has zero_point=None.*'uint4.*zero_point=float", "e4m3", {}),
        ("must be None, 'integer' or 'float'", "uint4(group=8,zero_point=floats)", {}),
        (
            "has scale='float8_e4m3fn'; the search needs one of float16",
            "int4(group=8,zero_point=float,scale=e4m3fn)",
            {},
        ),
        ("iterations=0", "int4(group=8,zero_point=float)", {"iterations": 0}),
        ("norm=1.0", "int4(group=8,zero_point=float)", {"norm": 1.0}),
        ("weight=0", "int4(group=8,zero_point=float)", {"weight": 0}),
    ):
        with pytest.raises(ValueError, match=said):
            FIT(x, text, **options)  # type: ignore[arg-type]
    for name, value in (("norm", "a"), ("norm", None), ("weight", True), ("growth", np.ones(2))):
        with pytest.raises(TypeError, match=f"{name}=.* must be a"):
            FIT(x, "int4(group=8,zero_point=float)", **{name: value})  # type: ignore[arg-type]


@pytest.mark.smoke
def test_a_stochastic_rounding_is_one_to_nearest_in_the_search() -> None:
    x = np.random.default_rng(5).normal(size=(2, 8)).astype(np.float32)
    text = "int4(group=8,zero_point=float)"
    np.testing.assert_array_equal(FIT(x, f"{text}:stochastic"), FIT(x, text))


test_further = further.test()
