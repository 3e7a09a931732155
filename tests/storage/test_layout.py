"""The dtypes of codes, the grouping of axes, and indexes of stored arrays, by themselves."""

from __future__ import annotations

import numpy as np
import pytest

import jchop as jc
from jchop.storage._codes import code_dtype, is_packed
from jchop.storage._index import scale_entry
from jchop.storage._layout import OWN, WHOLE, kinds_of


@pytest.mark.parametrize(
    ("text", "dtype", "packed"),
    [
        ("e3m2fn", "uint8", True),
        ("e3m3", "uint8", True),
        ("e3m4", "uint8", False),
        ("integer8", "int8", False),
        ("uinteger8", "uint8", False),
        ("e5m3", "uint16", False),
        ("e7m8", "uint16", False),
        ("bfloat16", "bfloat16", False),
        ("float8_e4m3fn", "float8_e4m3fn", False),
    ],
)
def test_dtypes_of_codes(text: str, dtype: str, packed: bool) -> None:
    fmt = jc.parse(text).element
    assert (code_dtype(fmt).name, is_packed(fmt)) == (dtype, packed)


def test_the_widest_codes() -> None:
    assert code_dtype(jc.parse("e7m8").element) == np.uint16
    with pytest.raises(ValueError, match="17 bits"):
        code_dtype(jc.parse("e8m8").element)


@pytest.mark.parametrize(
    ("text", "ndim", "batch", "kinds"),
    [
        ("int8", 2, 0, (WHOLE, WHOLE)),
        ("int8", 3, 1, (OWN, WHOLE, WHOLE)),
        ("int8(channel=0)", 3, 1, (OWN, OWN, WHOLE)),
        ("int8(channel=-1)", 4, 2, (OWN, OWN, WHOLE, OWN)),
        ("int4(group=8)", 3, 1, (OWN, OWN, 8)),
    ],
)
def test_kinds_of_axes(text: str, ndim: int, batch: int, kinds: tuple) -> None:
    fmt = jc.parse(text).scaled
    assert fmt is not None
    assert kinds_of(fmt, ndim, batch) == kinds


def test_axes_that_are_not_there() -> None:
    fmt = jc.parse("int8(channel=1)").scaled
    assert fmt is not None
    with pytest.raises(ValueError, match="names axis 1, which an array of 1 axes does not have"):
        kinds_of(fmt, 2, batch=1)


def test_only_integers_are_indexes() -> None:
    q = jc.quantize(np.ones((4, 6), np.float32), "int8(channel=0)")
    for entry in (np.array([0.0, 1.0]), np.array([True, False, True, False])):
        with pytest.raises(TypeError, match="must be an integer, a slice, or an array of integers"):
            q[entry]
    assert q[np.array([0, 1])].shape == (2, 6)


@pytest.mark.parametrize(
    ("entry", "kind", "expected"),
    [
        (slice(8, 16), 8, slice(1, 2)),
        (slice(8, 20), 8, slice(1, 3)),  # to the end of 20
        (slice(0, 0), WHOLE, slice(0, 0)),
        (slice(3, 5), WHOLE, slice(None)),
        (3, WHOLE, 0),
        (3, OWN, 3),
    ],
)
def test_indexes_of_scales(entry, kind, expected) -> None:
    assert scale_entry(0, entry, kind, 20) == expected


@pytest.mark.parametrize("entry", [slice(4, 16), slice(8, 15), slice(0, 16, 2), 3])
def test_indexes_that_cut_groups(entry) -> None:
    with pytest.raises(ValueError, match="cuts groups of 8"):
        scale_entry(0, entry, 8, 20)
