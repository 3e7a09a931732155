"""The digests of the public face: their names, a dozen of their calls, and the public names that they cover."""

from __future__ import annotations

import collections
import functools

import digests
import jax
import pytest
from digests import __main__ as commands
from digests import face, hashing

#: Calls of a few milliseconds, one of each kind of result.
CHEAP = (
    "parse bfloat16", "parse x7", "made FloatFormat bias=10", "codes float8_e4m3fn", "finfo binary16", "shapes nvfp4",
    "round bfloat16:flush", "round a list", "random_bits (7,) 11 32", "save_safetensors plain",
    "piquant.quantize uint4 NEAREST",
    "matlab.chop q52 3", "plot.value_grid e3m2fn", "jchop info e4m3fn",
)  # fmt: skip

TABLE = commands.committed()
without_a_table = pytest.mark.skipif(not TABLE.exists(), reason=f"no table of JAX {jax.__version__}")


@functools.cache
def calls() -> dict[str, digests.Call]:
    listed = [*digests.every_call()]
    twice = [name for name, count in collections.Counter(call.name for call in listed).items() if count > 1]
    assert not twice, f"two calls have one name: {twice}"
    return {call.name: call for call in listed}


@without_a_table
def test_the_calls_are_those_of_the_table() -> None:
    found, listed = commands.load(TABLE)[1], calls()
    new, gone = sorted(listed.keys() - found.keys()), sorted(found.keys() - listed.keys())
    assert not new and not gone, f"new calls: {new}; calls that are gone: {gone}; write {TABLE.name} anew"


@without_a_table
@pytest.mark.parametrize("name", CHEAP)
def test_some_calls_give_the_digests_of_the_table(name: str) -> None:
    call = calls()[name]
    digest, _ = hashing.outcome(call.run, call.loose)
    wanted = commands.load(TABLE)[1][name]
    assert digest.rpartition("~")[2] == wanted.rpartition("~")[2], f"{name} gives other bits"


@without_a_table
def test_every_public_name_is_covered() -> None:
    header = commands.load(TABLE)[0]
    if not (face.HAS_TORCH and header["torch"]):
        pytest.skip("without torch, here or where the table was written, some objects have other names")
    missing = sorted({*commands.missing(header["given"])[0]} - digests.UNCOVERED)
    assert not missing, (
        f"no call of tests/digests gives {missing}: add one to the file of its subject, and write {TABLE.name} anew"
    )
