"""Elementary functions rounded once: every argument of 16-bit formats, in every mode, against integer arithmetic."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle_elementary as exact
import pytest

import jchop as jc
from jchop._core.elementary.rounded import FUNCTIONS, elementary

#: By name: exponent and fraction bits.
FORMATS = {"bfloat16": (8, 7), "binary16": (5, 10), "float8_e5m2": (5, 2), "float8_e4m3": (4, 3)}
#: The names of primitives, by those of NumPy.
NAMES = {"a" + name[3:] if name.startswith("arc") else name: name for name in exact.EXACT}
EVERY = 37  # of how many arguments the default run takes one


@cache
def arguments(text: str) -> np.ndarray:
    """Every number of a format."""
    width = 1 + sum(FORMATS[text])
    codes = np.arange(1 << width).astype(np.uint16 if width > 8 else np.uint8)
    return np.asarray(jc.parse(text).format.decode(codes), np.float32)


@cache
def words(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)


def wrong(name: str, text: str, modes: tuple[str, ...], step: int = 1, start: int = 0) -> dict[str, int]:
    """How many results differ from the true ones, by mode."""
    x, word = arguments(text)[start::step], words(1 << 16)[: len(arguments(text))][start::step]
    rows = [partial(exact.round_array, exponent_bits=FORMATS[text][0], fraction_bits=FORMATS[text][1], mode=mode, word=word)
            for mode in exact.MODES]  # fmt: skip
    y = exact.values(NAMES[name], x.astype(float), lambda v: np.stack([row(v) for row in rows]))
    counts = {}
    for mode in modes:
        spec = jc.parse(f"{text}:{mode}")
        drawn = [jnp.asarray(word)] if spec.rounding.stochastic else []
        got = np.asarray(jax.jit(partial(elementary, name=name, spec=spec))(jnp.asarray(x), *drawn))
        want = rows[exact.MODES.index(mode)](y).astype(np.float32)
        bad = ~(np.isnan(got) & np.isnan(want)) & (got.view(np.int32) != want.view(np.int32))
        counts[mode] = int(bad.sum())
        if bad.any():
            i = np.flatnonzero(bad)[:3]
            print(name, text, mode, x[i], got[i], want[i], y[i])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_result_is_the_true_one_rounded_once(name: str, text: str) -> None:
    assert wrong(name, text, exact.MODES) == dict.fromkeys(exact.MODES, 0)
