"""dask arrays: rounded block by block, the same as whole, however they are cut."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jchop as jc

da: Any = pytest.importorskip("dask.array")
dask: Any = pytest.importorskip("dask")

KEY = jax.random.key(4)
SHAPE = (6, 10, 8)
CHUNKS = [(2, 10, 8), (6, 5, 8), (6, 10, 4), ((1, 5), 10, 8), (3, 5, 4)]


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def same(got: Any, wanted: np.ndarray) -> None:
    assert isinstance(got, da.Array) and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    whole = got.compute(scheduler="synchronous")
    assert isinstance(whole, np.ndarray)
    np.testing.assert_array_equal(whole, wanted)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("text", "dtype"), [("e4m3", "float64"), ("bfloat16:stochastic", "float32")])
def test_chunks_along_every_axis(text: str, dtype: str) -> None:
    x = numbers(*SHAPE, dtype=dtype)
    wanted = jc.round_to_format(x, text, KEY)
    for chunks in CHUNKS if "stochastic" in text else CHUNKS[-2:]:
        rounded = jc.round_to_format(da.from_array(x, chunks=chunks), text, KEY)
        same(rounded, wanted)
    again = jc.round_to_format(da.from_array(x, chunks=chunks), text, KEY)
    assert again.name == rounded.name  # dask sees that it is the same
    other = jc.round_to_format(da.from_array(x, chunks=chunks), text, jax.random.key(5))
    assert other.name != rounded.name or "stochastic" not in text


@pytest.mark.smoke
def test_all_kinds_of_arrays_and_keys() -> None:
    key = jax.random.key(4, impl="rbg")
    z = (numbers(6, 4) + 1j * numbers(6, 4)[::-1]).astype(np.complex64)
    same(
        jc.round_to_format(da.from_array(z, chunks=(3, 2)), "e5m2:stochastic", key),
        jc.round_to_format(z, "e5m2:stochastic", key),
    )
    scalar = da.from_array(np.float64(1.1))
    same(
        jc.round_to_format(scalar, "e4m3:stochastic", KEY), np.asarray(jc.round_to_format(1.1, "e4m3:stochastic", KEY))
    )
    wide = numbers(40, 3, dtype=np.float64)
    threads = jc.round_to_format(da.from_array(wide, chunks=(10, 3)), "e5m2:stochastic", KEY).compute(
        scheduler="threads"
    )
    np.testing.assert_array_equal(threads, jc.round_to_format(wide, "e5m2:stochastic", KEY))


def test_groups_within_chunks() -> None:
    x = numbers(8, 12)
    for text, chunks in (
        ("int4(group=4)", (8, 4)),
        ("int8(channel=0):stochastic", (4, 12)),
        ("int4(group=4,axis=0,sparse=2:4)", (4, 6)),
    ):
        same(jc.round_to_format(da.from_array(x, chunks=chunks), text, KEY), jc.round_to_format(x, text, KEY))
    for text, chunks in (
        ("int4(group=4)", (8, (2, 10))),
        ("int4(group=4)", (8, (5, 7))),
        ("int4(group=2,axis=0,sparse=2:4)", ((2, 6), 12)),
        ("int8(channel=0)", (8, 6)),
        ("int8(group=tensor)", (4, 12)),
        ("nvfp4(group=4)", (4, 12)),
        ("int4(group=2,scale=uint8(group=3,zero_point=float))", (8, 4)),
    ):
        with pytest.raises(ValueError, match="which cut groups of"):
            jc.round_to_format(da.from_array(x, chunks=chunks), text)


def test_refused_when_the_graph_is_made() -> None:
    x = da.from_array(numbers(4, 4), chunks=2)
    unknown = x[x[:, 0] > 0]
    for error, said, call in (
        (ValueError, "pass a typed key", lambda: jc.round_to_format(x, "e5m2:stochastic")),
        (ValueError, "is a whole", lambda: jc.round_to_format(x, "e5m2", offset=3)),
        (TypeError, "not a carrier", lambda: jc.round_to_format(x.astype(np.int32), "e5m2")),
        (ValueError, "bfloat16", lambda: jc.round_to_format(x.astype(np.float16), "bfloat16")),
        (ValueError, "unknown size", lambda: jc.round_to_format(unknown, "e5m2:stochastic", KEY)),
        (ValueError, "bits are not for a dask", lambda: jc.round_to_format(unknown, "e5m2:stochastic", bits=3)),
    ):
        with pytest.raises(error, match=said):
            call()
    plain = jc.round_to_format(unknown, "e5m2").compute(scheduler="synchronous")
    np.testing.assert_array_equal(plain, jc.round_to_format(numbers(4, 4)[numbers(4, 4)[:, 0] > 0], "e5m2"))
