"""The sweep of GPTQ against its identities, nearest planes, all codes of small matrices, and a textbook in NumPy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop import QArray
from jchop.ptq._steps.round import column_order, element_scales, gptq_sweep, inverse_factor, with_entries

further = Further()

FORMATS = [
    "int4(group=16)",
    "int3(group=12)",  # the last group is shorter
    "uint4(group=16,zero_point=integer)",
    "uint4(group=16,zero_point=float)",
    "nf4(group=16)",
    "float8_e4m3fn(group=all)",
    "mxfp4(rule=rceil)",
    "nvfp4",
    "int4(group=16,scale=uint8(group=2))",
    "int4(group=(4,8))",
    "int4",
    "float8_e5m2",  # without scales
]


def problem(rows: int = 24, columns: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and the Gram matrix of inputs that depend on each other, some of them larger than others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(400, columns)) @ rng.normal(size=(columns, columns)) / columns**0.5
    x[:, rng.choice(columns, 3, replace=False)] *= 10
    return rng.normal(size=(rows, columns)), x.T @ x / len(x)


def rounded(
    w: np.ndarray, gram: np.ndarray, text: str, order: np.ndarray | None = None, damping: float = 0.01, block: int = 128
) -> tuple[QArray, QArray, np.ndarray, np.ndarray]:
    """Rounded to nearest, swept, the sums of squared errors of the rows, and U."""
    with jax.enable_x64(True):
        q = jc.quantize(jnp.asarray(w), text)
        scales = element_scales(q)
        order = np.arange(w.shape[1]) if order is None else order
        found = inverse_factor(jnp.asarray(gram)[order][:, order], jnp.asarray(damping))
        codes, loss = gptq_sweep(
            jnp.asarray(w).T[order], scales.with_elements([part.T[order] for part in scales.by_element]), found.upper,
            None, block=block,
        )  # fmt: skip
        swept = with_entries(q, jnp.zeros_like(codes).at[order].set(codes).T)
        assert isinstance(swept, QArray)
        return q, swept, np.asarray(loss), np.asarray(found.upper)


def numbers(q: QArray) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(jc.dequantize(q))


def error(w: np.ndarray, q: QArray, gram: np.ndarray) -> float:
    rest = w - numbers(q)
    return float(np.einsum("ij,jk,ik->", rest, gram, rest))


@further
@pytest.mark.in_turn(12)
@pytest.mark.parametrize("text", FORMATS)
def every_format_gains_where_inputs_depend_on_each_other(text: str) -> None:
    """And where they do not, all numbers are rounded to nearest."""
    w, gram = problem()
    order = np.asarray(column_order(jnp.asarray(gram), True))
    plain, swept, _, _ = rounded(w, np.diag(np.diag(gram)), text, order)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(swept), strict=True):
        np.testing.assert_array_equal(a, b)
    _, swept, _, _ = rounded(w, gram, text, order)
    assert error(w, swept, gram) < 0.6 * error(w, plain, gram)


def test_numbers_of_a_column_are_rounded_under_given_scales() -> None:
    """Whatever the format of the scales is, here one with scales of its own."""
    column, scale = np.array([1.1, -5.0, 3.3], np.float32), np.array([0.25, 2, 0.3], np.float32)
    q = jc.quantize(jnp.ones((2, 16)), "int4(group=4,scale=uint8(group=2))")
    _, found = element_scales(q).with_elements([jnp.asarray(scale)]).round(jnp.asarray(column))
    np.testing.assert_array_equal(found, np.clip(np.rint(column / scale), -8, 7) * scale)


def test_columns_with_large_inputs_come_first() -> None:
    w, gram = problem()
    falling = np.asarray(column_order(jnp.asarray(gram), True))
    assert (np.diff(np.diag(gram)[falling]) <= 0).all()
    errors = [error(w, rounded(w, gram, "int4(group=16)", order)[1], gram) for order in (falling, None, falling[::-1])]
    assert errors[0] < 0.8 * errors[1] < 0.8 * errors[2]


def test_strong_damping_rounds_to_nearest() -> None:
    w, gram = problem()
    plain, swept, _, _ = rounded(w, gram, "int4(group=16)", damping=1e30)
    np.testing.assert_array_equal(plain.qvalue, swept.qvalue)


@pytest.mark.parametrize("text", ["int4(group=16)", pytest.param("nf4(group=16)", marks=pytest.mark.slow)])
def test_the_loss_is_the_damped_error(text: str) -> None:
    w, gram = problem()
    _, swept, loss, _ = rounded(w, gram, text)
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(len(gram))
    rest = w - numbers(swept)
    np.testing.assert_allclose(loss, np.einsum("ij,jk,ik->i", rest, damped, rest), rtol=1e-12)


@further
def the_loss_is_bounded_where_nothing_is_clipped() -> None:
    w, gram = problem()
    wide = np.concatenate([w, np.full((len(w), 1), 40.0)], axis=1)  # a large number of a column makes the scale wide
    gram = np.pad(gram, [(0, 1), (0, 1)])
    gram[-1, -1] = 1e-9
    q, swept, loss, upper = rounded(wide, gram, "int8(group=all)")
    step = np.asarray(q.scale)[:, 0]
    assert np.abs(numbers(swept)[:, :-1] / step[:, None]).max() < 127
    bound = step**2 / 4 * (1 / np.diag(upper) ** 2).sum()
    assert (loss < bound).all() and (loss > 0.05 * bound).all()


@pytest.mark.parametrize("block", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_size_of_blocks_changes_no_code(block: int) -> None:
    w, gram = problem()
    order = np.asarray(column_order(jnp.asarray(gram), True))
    whole, part = (rounded(w, gram, "int4(group=16)", order, block=b)[1] for b in (128, block))
    np.testing.assert_array_equal(whole.qvalue, part.qvalue)


def nearest_planes(w: np.ndarray, gram: np.ndarray, step: np.ndarray, least: int, most: int) -> np.ndarray:
    """Babai's algorithm on the lattice of a Cholesky factor, from its last coordinate to its first."""
    basis = np.linalg.cholesky(gram).T
    codes = np.zeros_like(w)
    for i in reversed(range(w.shape[1])):
        rest = (w - codes * step)[:, i + 1 :] @ basis[i, i + 1 :] / basis[i, i]
        codes[:, i] = np.clip(np.rint((w[:, i] + rest) / step[:, 0]), least, most)
    return codes


def test_the_reversed_order_is_that_of_nearest_planes() -> None:
    w, gram = problem()
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(len(gram))
    q, swept, _, _ = rounded(w, gram, "int4(group=all)", np.arange(len(gram))[::-1])
    step = np.asarray(q.scale, np.float64)
    np.testing.assert_array_equal(np.rint(numbers(swept) / step), nearest_planes(w, damped, step, -8, 7))


@further.first
@pytest.mark.parametrize(("columns", "block"), [(32, 5), (300, 32)])
def a_textbook_in_numpy_gives_the_same_codes(columns: int, block: int) -> None:
    """In blocks, and in blocks of blocks, after which errors reach the columns of later ones."""
    w, gram = problem(columns=columns)
    order = np.argsort(-np.diag(gram), kind="stable")
    q, swept, _, _ = rounded(w, gram, "int4(group=16)", order, block=block)
    scale = np.repeat(np.asarray(q.scale, np.float64), 16, axis=1)[:, :columns]
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(len(gram))
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    rest, step, codes = w[:, order].copy(), scale[:, order], np.zeros_like(w)
    for i in range(w.shape[1]):
        codes[:, i] = np.clip(np.rint(rest[:, i] / step[:, i]), -8, 7)
        e = (rest[:, i] - codes[:, i] * step[:, i]) / upper[i, i]
        rest[:, i:] -= np.outer(e, upper[i, i:])
    np.testing.assert_array_equal(np.rint(numbers(swept) / scale)[:, order], codes)


@further
def all_codes_of_small_matrices() -> None:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(8, 8))
    x = rng.normal(size=(256, 8)) @ mix
    w = rng.normal(size=(64, 8))
    gram = x.T @ x
    # The largest number of a row is a tie, 1.5 scales, which it is exactly only if that product is a float64 number.
    largest = np.arange(64), np.abs(w).argmax(1)
    w[largest] = 1.5 * np.float32(w[largest] / 1.5).astype(np.float64)
    plain, swept, _, _ = rounded(w, gram, "int2(group=all,rule=half_range)")
    step = np.asarray(plain.scale, np.float64)
    every = np.array(list(itertools.product(range(-2, 2), repeat=8)), float)
    best = 0.0
    for row, s in zip(w, step, strict=True):
        rest = row - every * s
        best += np.einsum("ij,jk,ik->i", rest, gram, rest).min()
    assert abs(error(w, plain, gram) / best - 3.198) < 1e-3
    assert abs(error(w, swept, gram) / best - 1.685) < 1e-3


def test_a_damping_that_fails_grows() -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(3, 8))
        found = inverse_factor(jnp.asarray(x.T @ x), jnp.asarray(0.0))  # of rank 3
        assert int(found.tries) >= 1 and bool(jnp.isfinite(found.upper).all())
        singular = inverse_factor(jnp.ones((8, 8)), jnp.asarray(0.0))
        assert int(singular.tries) > 1 and 0 < float(singular.damping) < 1e-3
        whole = singular.upper.T @ singular.upper @ (jnp.ones((8, 8)) + singular.damping * jnp.eye(8))
        np.testing.assert_allclose(whole, np.eye(8), atol=1e-8)


def test_dead_columns_are_rounded_by_themselves() -> None:
    w, gram = problem()
    gram[[3, 7]] = gram[:, [3, 7]] = 0
    order = np.asarray(column_order(jnp.asarray(gram), True))
    plain, swept, _, upper = rounded(w, gram, "int4(group=16)", order)
    np.testing.assert_array_equal(numbers(plain)[:, [3, 7]], numbers(swept)[:, [3, 7]])
    assert (numbers(plain) != numbers(swept)).any()
    alive = order[:-2]  # the damping is a part of the mean of their diagonal alone
    damped = gram[alive][:, alive] + 0.01 * np.diag(gram)[alive].mean() * np.eye(len(alive))
    np.testing.assert_allclose((upper.T @ upper)[:-2, :-2] @ damped, np.eye(len(alive)), atol=1e-8)


test_further = further.test()
