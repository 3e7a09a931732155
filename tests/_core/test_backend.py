"""The fence of the compilers: what the values of `Backend` allow, and that bodies know of no other quirk."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jchop
from jchop._core.xla.backend import ONE_CPU, PORTABLE, TILE

PACKAGE = Path(jchop.__file__).parent


@pytest.mark.smoke
def test_bodies_and_kernels_import_quirks_through_their_backend_alone() -> None:
    files = [path for room in ("_core", "_kernels", "_round") for path in (PACKAGE / room).rglob("*.py")]
    others = [path for path in files if path.parent.name != "xla"]
    assert len(others) > 50
    wrong = [str(path) for path in others if re.search(r"xla(\.| import )(cpu|gpu)\b", path.read_text("utf-8"))]
    assert wrong == []


def test_one_cpu_alone_branches_and_has_float64() -> None:
    assert [(own.branch is None, own.float64) for own in (PORTABLE, ONE_CPU, TILE)] == [
        (True, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize("backend", [PORTABLE, ONE_CPU, TILE], ids=["portable", "one_cpu", "tile"])
def test_all_give_the_same_numbers(backend) -> None:
    x = np.random.default_rng(0).integers(-(1 << 30), 1 << 30, (4, 3, 96), np.int32)
    np.testing.assert_array_equal(
        backend.maximum(jnp.asarray(x), axis=(0, 2), keepdims=True), x.max((0, 2), keepdims=True)
    )
    parts = {"numbers": jnp.asarray(x, jnp.float32), "none": None, "more": (jnp.asarray(x[0]),)}
    for one, other in zip(backend.per_group(parts)["more"], parts["more"], strict=True):
        np.testing.assert_array_equal(one, other)
    product = backend.prevent_fma(parts["numbers"], jnp.abs(parts["numbers"]))
    np.testing.assert_array_equal(product, parts["numbers"])
