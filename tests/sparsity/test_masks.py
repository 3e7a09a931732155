"""Masks with n of every m numbers against all masks, and the energy that is left of normal numbers."""

from __future__ import annotations

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc


def groups_of(x: np.ndarray, m: int) -> np.ndarray:
    """The groups of the last axis, the last one filled up with zeros: (..., groups, m)."""
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % m)])
    return padded.reshape(*x.shape[:-1], -1, m)


@pytest.mark.parametrize(("n", "m", "axis"), [(2, 4, 0), (1, 4, 1), (4, 8, -1), (1, 2, 0), (3, 5, 1), (2, 4, -1)])
@pytest.mark.in_turn(15)
def test_no_other_mask_of_a_group_keeps_more(n: int, m: int, axis: int) -> None:
    x = np.random.default_rng(0).normal(size=(11, 13, 10)).astype(np.float32)
    kept = jc.sparsity.mask(jnp.asarray(x), n, m, axis=axis)
    assert kept.dtype == bool and kept.shape == x.shape
    energy = groups_of(np.moveaxis(x, axis, -1).astype(np.float64) ** 2, m)
    found = groups_of(np.moveaxis(np.asarray(kept), axis, -1), m)
    choices = np.array([c for c in itertools.product((False, True), repeat=m) if sum(c) == n])
    best = np.einsum("...m,cm->...c", energy, choices).max(-1)
    np.testing.assert_allclose((energy * found).sum(-1), best, rtol=1e-12)
    assert (found.sum(-1) <= n).all() and (found.sum(-1)[..., :-1] == n).all()


def test_equal_numbers_stay_in_their_order_and_nan_is_the_largest() -> None:
    x = np.array([1, 1, -1, 1, 0, 0, 0, 0, np.nan, 1, np.inf, 2, 5, 5, 5])
    assert jc.sparsity.mask(x, 2, 4).astype(int).tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0]


def all_tiles(n: int, m: int) -> np.ndarray:
    every = ((np.arange(2 ** (m * m))[:, None] >> np.arange(m * m)) & 1).reshape(-1, m, m)
    return every[(every.sum(1) == n).all(1) & (every.sum(2) == n).all(1)]


@pytest.mark.parametrize(("n", "m", "count"), [(2, 4, 90), (1, 4, 24), (3, 4, 24), (1, 3, 6), (1, 2, 2)])
@pytest.mark.in_turn(5)
def test_no_other_mask_of_a_tile_keeps_more(n: int, m: int, count: int) -> None:
    every = all_tiles(n, m)
    assert len(every) == count
    x = np.random.default_rng(1).normal(size=(3 * m, 2, 2 * m)).astype(np.float32)
    kept = np.asarray(jc.sparsity.mask(jnp.asarray(x), n, m, axis=(0, -1)))
    energy, found = (v.reshape(3, m, 2, 2, m).transpose(0, 3, 2, 1, 4) for v in (x.astype(np.float64) ** 2, kept))
    assert (found.sum(-1) == n).all() and (found.sum(-2) == n).all()
    best = np.einsum("...ij,cij->...c", energy, every).max(-1)
    np.testing.assert_allclose((energy * found).sum((-1, -2)), best, rtol=1e-6)


def test_the_energy_that_normal_numbers_keep() -> None:
    w = np.random.default_rng(0).normal(size=(512, 512))
    total, rows, tiles = (w**2).sum(), jc.sparsity.mask(w, 2, 4), jc.sparsity.mask(w, 2, 4, axis=(0, 1))
    assert isinstance(rows, np.ndarray) and rows.mean() == tiles.mean() == 0.5
    assert abs((w[rows] ** 2).sum() / total - 0.8676) < 5e-5
    assert abs((w[tiles] ** 2).sum() / total - 0.8227) < 5e-5
    np.testing.assert_array_equal(jc.sparsity.mask(w, 2, 4, axis=(1, 0)), tiles)


def test_tiles_of_extreme_numbers_and_at_the_edges() -> None:
    x = np.zeros((4, 5), np.float32)
    x[0, :3], x[1, 0], x[3, 4] = (3e38, 2e38, 1e38), 1e-40, 1e-30
    kept = jc.sparsity.mask(jnp.asarray(x), 2, 4, axis=(0, 1))
    assert bool(kept[0, 0]) and bool(kept[0, 1]) and not bool(kept[0, 2]) and bool(kept[3, 4])
    wide = np.where(np.eye(4, dtype=bool), np.inf, 1.0)
    assert np.diag(jc.sparsity.mask(wide, 1, 4, axis=(0, 1))).all()
    assert jc.sparsity.mask(np.zeros((0, 4)), 2, 4, axis=(0, 1)).shape == (0, 4)


def test_the_energies_of_many_tiles_are_never_all_in_memory() -> None:
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = jax.jit(lambda v: jc.sparsity.mask(v, 2, 4, axis=(0, 1))).lower(x).as_text()
    assert "stablehlo.while" in program
    largest = max(
        math.prod(map(int, sizes[:-1].split("x"))) for sizes in re.findall(r"tensor<((?:\d+x)+)f32>", program)
    )
    assert largest < 90 * 256 * 256 / 2  # of 90 masks of each tile


def test_under_transformations() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 8, 12), "bfloat16")
    for axis in (-1, (0, 1)):
        each = jnp.stack([jc.sparsity.mask(one, 2, 4, axis=axis) for one in x])
        np.testing.assert_array_equal(jax.jit(jax.vmap(lambda v, a=axis: jc.sparsity.mask(v, 2, 4, axis=a)))(x), each)
    slope = jax.grad(lambda v: (v * jc.sparsity.mask(v, 2, 4)).sum())(x[0].astype("float32"))
    np.testing.assert_array_equal(slope, jc.sparsity.mask(x[0], 2, 4))


def test_bad_arguments() -> None:
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="n=4 must be an integer from 1 to 3"):
        jc.sparsity.mask(x, 4, 4)
    with pytest.raises(ValueError, match="m=1 must be an integer >= 2"):
        jc.sparsity.mask(x, 1, 1)
    with pytest.raises(ValueError, match=r"m \(the side of a tile\)=8 must be an integer from 2 to 4"):
        jc.sparsity.mask(x, 2, 8, axis=(0, 1))
    with pytest.raises(ValueError, match="axis=2 is not an axis of an array of 2 dim"):
        jc.sparsity.mask(x, 2, 4, axis=2)
    with pytest.raises(ValueError, match="names an axis twice"):
        jc.sparsity.mask(x, 2, 4, axis=(1, -1))
    with pytest.raises(ValueError, match="must be one axis, or two for tiles"):
        jc.sparsity.mask(x, 2, 4, axis=(0, 1, 2))
    with pytest.raises(TypeError, match="x has dtype complex64"):
        jc.sparsity.mask(x + 0j, 2, 4)
