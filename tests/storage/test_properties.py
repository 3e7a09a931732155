"""Properties of stored arrays, whatever the numbers: what quantizing again, sorting, scaling and moving groups do."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from hypothesis import given, settings
from hypothesis import strategies as st

import jchop as jc
from jchop import QArray

further = Further()

GROUP = 4
#: Integers, a codebook, floats under powers of two, integers with integer and with added zero points.
TEXTS = ("int4(group=4)", "nf4(group=4)", "mxfp8_e4m3(group=4)", "uint4(group=4,zero_point=integer)",
         "int4(group=4,zero_point=float)")  # fmt: skip
FLOATS = st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 2.0**-20)
ROWS = st.lists(st.lists(FLOATS, min_size=8, max_size=8), min_size=2, max_size=2)


@functools.cache
def storing(text: str) -> Any:
    """Quantized and dequantized; and the numbers quantized once more under the same scales."""

    @jax.jit
    def run(x: jax.Array) -> tuple[QArray, jax.Array, QArray]:
        q = jc.quantize(x, text)
        numbers = jc.dequantize(q)
        return q, numbers, jc.quantize(numbers, text, scale=q.scale, zero_point=q.zero_point)

    return lambda rows: jax.tree.map(np.asarray, run(np.array(rows, np.float32)))


def entries(q: QArray) -> np.ndarray:
    return q.codes


def same(got: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@further.first
@pytest.mark.in_turn(8)
@pytest.mark.parametrize("text", TEXTS)
@settings(deadline=None, max_examples=20)
@given(ROWS, st.integers(-30, 30), st.permutations(range(4)))
def properties(text: str, rows: list[list[float]], power: int, order: list[int]) -> None:
    q, numbers, again = storing(text)(rows)
    x = np.array(rows, np.float32)
    if "float" not in text:  # an added zero point may be far larger than the scale
        same(entries(again), entries(q))
    # Monotone within a group.
    for group, stored in zip(x.reshape(-1, GROUP), numbers.reshape(-1, GROUP), strict=True):
        assert np.all(np.diff(stored[np.argsort(group)]) >= 0)
    # Groups do not see each other.
    moved, *_ = storing(text)(x.reshape(-1, GROUP)[list(order)].reshape(x.shape))
    same(entries(moved).reshape(-1, GROUP), entries(q).reshape(-1, GROUP)[list(order)])
    same(moved.scale.ravel(), q.scale.ravel()[list(order)])
    # Powers of two change the scales alone; a group without a range has scale 1.
    if np.all(np.ptp(x.reshape(-1, GROUP), axis=1) > 0):
        scaled, values, _ = storing(text)(np.ldexp(x, power))
        same(entries(scaled), entries(q))
        same(values, np.ldexp(numbers, power))


@further
@settings(deadline=None, max_examples=10)
@given(st.sampled_from(TEXTS), ROWS)
def loaded_is_saved(text: str, rows: list[list[float]]) -> None:
    q = jax.tree.map(jnp.asarray, storing(text)(rows)[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        jc.save(path, {"x": q})
        loaded = jc.load(path)["x"]
    assert jax.tree.structure(loaded) == jax.tree.structure(q)
    same(loaded, q)


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", TEXTS)
def test_compiled_is_eager(text: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    q, numbers, _ = storing(text)(x)
    eager = jc.quantize(jnp.asarray(x), text)
    same(eager, q)
    same(jc.dequantize(eager), numbers)
    same(jc.round_to_format(jnp.asarray(x), text), numbers)


test_further = further.test()
