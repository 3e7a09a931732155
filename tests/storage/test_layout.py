"""The dtypes of codes, the grouping of axes, and indexes of stored arrays, by themselves."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from refusals import assert_refused

import jchop as jc
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, axis_groupings, scale_entry
from jchop._storage._codes import code_dtype, packs_codes


def test_dtypes_of_codes() -> None:
    for text, dtype, packed in (
        ("e3m2fn", "uint8", True),
        ("e3m3", "uint8", True),
        ("e3m4", "uint8", False),
        ("integer8", "int8", False),
        ("uinteger8", "uint8", False),
        ("e5m3", "uint16", False),
        ("e7m8", "uint16", False),
        ("bfloat16", "bfloat16", False),
        ("float8_e4m3fn", "float8_e4m3fn", False),
    ):
        fmt = jc.Spec(text).element
        assert (text, code_dtype(fmt).name, packs_codes(fmt)) == (text, dtype, packed)


def test_the_widest_codes() -> None:
    assert code_dtype(jc.Spec("e7m8").element) == np.uint16
    with pytest.raises(ValueError, match="17 bits"):
        code_dtype(jc.Spec("e8m8").element)


def test_kinds_of_axes() -> None:
    for text, ndim, batch, kinds in (
        ("int8", 2, 0, (WHOLE_AXIS, WHOLE_AXIS)),
        ("int8", 3, 1, (OWN_SCALE, WHOLE_AXIS, WHOLE_AXIS)),
        ("int8(channel=0)", 3, 1, (OWN_SCALE, OWN_SCALE, WHOLE_AXIS)),
        ("int8(channel=-1)", 4, 2, (OWN_SCALE, OWN_SCALE, WHOLE_AXIS, OWN_SCALE)),
        ("int4(group=8)", 3, 1, (OWN_SCALE, OWN_SCALE, 8)),
    ):
        fmt = jc.Spec(text).scaled
        assert fmt is not None
        assert axis_groupings(fmt, ndim, batch) == kinds, text


def test_axes_that_are_not_there() -> None:
    fmt = jc.Spec("int8(channel=1)").scaled
    assert fmt is not None
    with pytest.raises(ValueError, match="names axis 1, which an array of 1 axes does not have"):
        axis_groupings(fmt, 2, batch=1)


def test_only_integers_are_indexes() -> None:
    q = jc.quantize(np.ones((4, 6), np.float32), "int8(channel=0)")
    for entry in (np.array([0.0, 1.0]), np.array([True, False, True, False])):
        with pytest.raises(TypeError, match="must be an integer, a slice, or an array of integers"):
            q[entry]
    assert q[np.array([0, 1])].shape == (2, 6)


def test_indexes_of_scales() -> None:
    for entry, kind, expected in (
        (slice(8, 16), 8, slice(1, 2)),
        (slice(8, 20), 8, slice(1, 3)),  # to the end of 20
        (slice(0, 0), WHOLE_AXIS, slice(0, 0)),
        (slice(3, 5), WHOLE_AXIS, slice(None)),
        (3, WHOLE_AXIS, 0),
        (3, OWN_SCALE, 3),
    ):
        assert scale_entry(0, entry, kind, 20) == expected, (entry, kind)


def test_indexes_that_cut_groups() -> None:
    entries = (slice(4, 16), slice(8, 15), slice(0, 16, 2), 3)
    assert_refused(
        {
            entry_: (partial(scale_entry, 0, entry, 8, 20), ValueError, "cuts groups of 8")
            for entry_, entry in ((str(entry), entry) for entry in entries)
        }
    )
