"""Parts of .npy files: the numbers that NumPy reads, in either order and from files of other types."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from refusals import assert_refused

from jchop._storage._files.npy import NpyFile


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.smoke
def test_parts_are_read_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any box of an array in either order, by whole rows, by pieces of them, and by single elements."""
    rng = np.random.default_rng(0)
    for row, block in ((1 << 14, 1 << 20), (0, 1 << 20), (40, 64)):
        monkeypatch.setattr("jchop._storage._files.npy._SHORT_ROW", row)
        monkeypatch.setattr("jchop._storage._files.npy._BLOCK", block)
        for x in (numbers(5), numbers(4, 6).astype(">f8"), numbers(3, 4, 5), numbers(2, 3, 4, 5).astype(np.complex64)):
            for stored in (x, np.asfortranarray(x)):
                np.save(tmp_path / "x.npy", stored)
                with NpyFile(tmp_path / "x.npy", "x") as file:
                    for _ in range(20):
                        starts = [int(rng.integers(n)) for n in x.shape]
                        shape = [int(rng.integers(n - at + 1)) for n, at in zip(x.shape, starts, strict=True)]
                        box = tuple(slice(at, at + n) for at, n in zip(starts, shape, strict=True))
                        got = file.read(starts, shape)
                        np.testing.assert_array_equal(got, x[box])
                        assert got.dtype == x.dtype.newbyteorder("=") and got.dtype.isnative


def test_every_version_is_read(tmp_path: Path) -> None:
    for version, x in itertools.product(
        [(1, 0), (2, 0), (3, 0)], [np.float64(1.5), numbers(3, 4), numbers(0, 3), np.arange(3)]
    ):
        with (tmp_path / "x.npy").open("wb") as out:
            np.lib.format.write_array(out, np.asarray(x), version)
        with NpyFile(tmp_path / "x.npy", "x") as file:
            assert (version, file.shape, file.dtype, file.fortran_order) == (version, np.shape(x), x.dtype, False)
            np.testing.assert_array_equal(file.read((0,) * x.ndim, x.shape), x, err_msg=str(version))


def test_numbers_are_converted_only_without_loss(tmp_path: Path) -> None:
    held: list[tuple[np.ndarray, Any]] = [
        (np.array([0, 2**24, -5]), np.float32),
        (np.array([1.5, np.nan, np.inf]), ml_dtypes.bfloat16),
    ]
    lost: list[tuple[np.ndarray, Any]] = [
        (np.array([2**24 + 1]), np.float32),
        (np.array([0.1]), np.float32),
        (np.array([1e10]), np.float16),
        (np.array([1j], np.complex64), np.float64),
    ]

    def read(x: np.ndarray, dtype: Any) -> np.ndarray:
        np.save(tmp_path / "x.npy", x)
        with NpyFile(tmp_path / "x.npy", "x", np.dtype(dtype)) as file:
            return file.read((0,), x.shape)

    for x, dtype in held:
        np.testing.assert_array_equal(read(x, dtype).astype(x.dtype), x)
    said = "cannot hold: they would be rounded twice"
    assert_refused({f"{x} in {np.dtype(dtype)}": (partial(read, x, dtype), ValueError, said) for x, dtype in lost})
