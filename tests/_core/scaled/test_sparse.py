"""The choice of n of every m numbers, against sorted magnitudes in NumPy, and arrays of the kept ones alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc
from jchop._core.scaled.groups import drop_outside_mask, gather_sparse, largest_mask, scatter_sparse, sparse_mask

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 1.0, 5e-324, -1e-323, 1e-45, -3e-45, 6e-8, 1e-40]


def chosen(x: np.ndarray, n: int, m: int, axis: int) -> np.ndarray:
    """By the definition: sorted by falling magnitude, NaN before infinities, then by place."""
    wide, out = np.moveaxis(x.astype(np.float64), axis, -1), np.zeros(x.shape, bool)
    lines = np.moveaxis(out, axis, -1)
    for index in np.ndindex(wide.shape[:-1]):
        for start in range(0, wide.shape[-1], m):
            group = wide[index][start : start + m]
            order = sorted(
                range(len(group)),
                key=lambda i: (
                    not np.isnan(group[i]),
                    -abs(np.nan_to_num(group[i], nan=0.0, posinf=np.inf, neginf=-np.inf)),
                    i,
                ),
            )
            for i in order[:n]:
                lines[(*index, start + i)] = True
    return out


def fmt_of(n: int, m: int, axis: int) -> Any:
    return jc.formats.int4(sparse=(n, m), sparse_axis=axis)


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("n", "m", "axis", "dtype"),
    [(2, 4, -1, "float32"), (1, 3, 0, "float16"), (4, 8, 1, "bfloat16"), (1, 2, -2, "float64"), (5, 7, 2, "float32"),
     (2, 4, -1, "float64"), (1, 3, 0, "bfloat16"), (4, 8, 1, "float16")],
)  # fmt: skip
def test_the_largest_magnitudes_are_kept(n: int, m: int, axis: int, dtype: str) -> None:
    rng = np.random.default_rng(n + m)
    x = np.where(rng.random((5, 6, 11)) < 0.5, rng.choice(SPECIAL, (5, 6, 11)), rng.integers(-2, 3, (5, 6, 11)))
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        exact = np.asarray(x).astype(np.float64)  # subnormal numbers of the dtype keep their values
        kept = jax.jit(sparse_mask, static_argnums=1)(x, fmt_of(n, m, axis))
        np.testing.assert_array_equal(kept, chosen(exact, n, m, axis))


def test_keys_decide_in_their_order() -> None:
    first, second = jnp.array([1.0, 1, 0, 1]), jnp.array([0.0, 2, 9, 2])
    assert largest_mask((first, second), 2, 4).tolist() == [False, True, False, True]
    assert largest_mask((first,), 2, 4).tolist() == [True, True, False, False]


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("n", "m", "shape", "axis"),
    [(2, 4, (10, 3), 0), (1, 3, (4, 9), 1), (5, 8, (2, 4, 16), 2), (1, 2, (3, 1, 2), 1), (2, 4, (0, 4), 1),
     (1, 3, (10, 3), 0), (5, 8, (10, 3), 0), (1, 2, (4, 9), 1)],
)  # fmt: skip
def test_kept_numbers_alone_and_back(n: int, m: int, shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    x, entries = rng.normal(size=shape).astype(np.float32), rng.integers(1, 200, shape).astype(np.uint8)

    def all_three(x: Any, entries: Any) -> Any:
        kept = sparse_mask(x, fmt_of(n, m, axis))
        short = gather_sparse(entries, kept, (n, m), axis)
        return kept, short, scatter_sparse(short, kept, (n, m), axis)

    kept, short, back = jax.jit(all_three)(x, entries)
    lines, which = (np.moveaxis(v, axis, -1).reshape(-1, shape[axis]) for v in (entries, np.asarray(kept)))
    wanted = np.array([line[own] for line, own in zip(lines, which, strict=True)], np.uint8)
    length = shape[axis] // m * n + min(n, shape[axis] % m)
    assert short.shape == (*shape[:axis], length, *shape[axis + 1 :]) and short.dtype == np.uint8
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(short), axis, -1).reshape(-1, length), wanted.reshape(-1, length)
    )
    np.testing.assert_array_equal(np.where(kept, back, 0), np.where(kept, entries, 0))


def test_a_dropped_number_does_not_count() -> None:
    x, kept = jnp.array([1.0, 2.0]), jnp.array([True, False])
    assert drop_outside_mask(x, kept, jc.formats.int4).tolist() == [1.0, 0.0]  # a NaN could make its group NaN
    assert np.isnan(drop_outside_mask(x, kept, jc.formats.int4(rule="mse"))).tolist() == [False, True]
