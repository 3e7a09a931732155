"""Mutated .npy files: each is rounded as NumPy reads it, or refused in one line; none hangs or takes memory."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.__main__ import main

resource = pytest.importorskip("resource")  # of POSIX

SECONDS = 20  # for one file; a hang is what takes longer
MEMORY = 256 << 20  # beside the bytes of a file

HUGE = (
    "9" * 5000,
    2**63,
    2**62,
    2**40,
    2**31,
    -1,
    "True",
    "1e9",
    "0x10",
    "7",
    "2**9",
    "(3,)",
    "'3'",
    "None",
    "1.0",
    "",
)
DESCRS = (
    "'<f4'", "'>f8'", "'=f2'", '"|u1"', "'<c16'", "'<f16'", "'<f3'", "'<i8'", "'|b1'", "'|V2'", "'|O'", "'|S9'",
    "'<U4'", "'<M8[ns]'", "[('a', '<f4')]", "('<f4', (9999, 9999))", "None", "4", "'f4,' * 9", "''", "'<f4",
    "'float32'", "'<f4\\x00'", "[" * 3000 + "]" * 3000, "{'a': 1}", "__import__('os')",
)  # fmt: skip


def saved(x: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of versions that only newer readers know
        np.lib.format.write_array(file, x, version)
    return file.getvalue()


def with_header(text: bytes, body: bytes, version: int, length: int | None = None) -> bytes:
    count = len(text) if length is None else length
    field = count.to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + field + text + body


def seeds() -> list[bytes]:
    x = np.random.default_rng(0).standard_normal((3, 8))
    return [
        saved(x.astype(np.float32)),
        saved(np.asfortranarray(x)),
        saved(x.astype(np.complex64), (2, 0)),
        saved(x.astype(">f2"), (3, 0)),
        saved(np.array(1.1, np.float32)),
        saved(np.zeros((0, 5), np.float32)),
        saved(np.arange(24)),
    ]


def mutants(count: int, start: int = 0) -> Iterator[bytes]:
    originals = seeds()
    for number in range(start, start + count):
        rng = np.random.default_rng(number)
        data = bytearray(originals[rng.integers(len(originals))])
        place = int(rng.integers(len(data)))
        kind = number % 6
        if kind == 0:  # other bytes
            for _ in range(rng.integers(1, 9)):
                data[rng.integers(len(data))] = rng.integers(256)
        elif kind == 1:  # shorter
            del data[place:]
        elif kind == 2:  # longer
            data[place:place] = rng.bytes(int(rng.integers(1, 200)))
        elif kind == 3:  # a part of it twice, or away
            part = data[place : place + int(rng.integers(1, 40))]
            data[place : place + len(part)] = part * int(rng.integers(0, 3))
        elif kind == 4:  # another length of the header
            data[8:10] = rng.bytes(2)
        else:  # a header of another kind
            data = bytearray(with_header(hostile(rng), bytes(data[-96:]), *version_and_length(rng)))
        yield bytes(data)


def hostile(rng: np.random.Generator) -> bytes:
    def pick(*items: Any) -> Any:
        return items[int(rng.integers(len(items)))]

    sizes = ", ".join(str(pick(*HUGE, 0, 1, 2, 3, 8, 24)) for _ in range(pick(0, 1, 2, 3, 33, 65, 3000)))
    good = ("(24,)", "(3, 8)", "(2, 2, 6)", "(0, 4611686018427387904)")
    pairs = [
        "'descr': " + pick("'<f4'", "'>f4'", "'<f4'", pick(*DESCRS)),
        "'fortran_order': " + pick("False", "True", "False", pick("0", "None", "False and 1")),
        "'shape': " + pick(*good, f"({sizes},)", f"({sizes})", f"[{sizes}]", sizes),
    ]
    for _ in range(pick(0, 0, 0, 1, 2)):
        pairs.append(pick(*pairs, "'extra': 1", "'shape': ()"))
    rng.shuffle(pairs)
    text = f"{{{', '.join(pairs)}, }}"
    return pick(text, text, text, text + " " * 70_000, "(" * 9000, text * 2, text[:-9], "#" + text).encode() + b"\n"


def version_and_length(rng: np.random.Generator) -> tuple[int, int | None]:
    version = int(rng.integers(2, 5))
    lengths = (0, 2**31, 2**32 - 1)
    return version, lengths[rng.integers(3)] if rng.random() < 0.2 else None


@contextlib.contextmanager
def a_limit_of_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"still at work after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(data: bytes, folder: Path, spec: str) -> bool:
    """Whether a file is rounded; it must be what NumPy reads then."""
    source, target = folder / "x.npy", folder / "y.npy"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    try:
        jc.round_file(source, target, spec)
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000 + len(str(source))
        assert not target.exists() and list(folder.iterdir()) == [source]
        return False
    array = np.lib.format.read_array(io.BytesIO(data))
    np.testing.assert_array_equal(np.load(target), jc.round_to_format(array, spec))
    return True


def run_fuzz(count: int, folder: Path, capsys: pytest.CaptureFixture[str], start: int = 0) -> int:
    """How many mutants are still files that can be rounded."""
    good, before = 0, peak()
    for data in mutants(count, start):
        with a_limit_of_time():
            rounded = check(data, folder, "int8(group=tensor)" if len(data) % 2 else "e5m2")
            status = main(["round", str(folder / "x.npy"), "--to", "e5m2"])
            printed = capsys.readouterr()
            assert status == (0 if rounded else 2)
            assert printed.err.count("\n") == (status == 2) and printed.err.strip().isprintable()
        good += rounded
        assert peak() - before < len(data) + MEMORY
    return good


@pytest.mark.skipif(os.name != "posix", reason="needs SIGALRM")
@pytest.mark.parametrize(
    ("count", "start", "least", "most"), [(30, 0, 1, 20), pytest.param(1500, 1000, 60, 1000, marks=pytest.mark.slow)]
)
def test_mutated_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, start: int, least: int, most: int
) -> None:
    assert least <= run_fuzz(count, tmp_path, capsys, start) <= most


@each("array", [np.array(["a"]), np.array([None])])
def test_only_types_of_short_floats_get_a_way_out(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=r"it holds '.*', which is not a numeric type$"):
        jc.round_file(tmp_path / "x.npy", tmp_path / "y.npy", "e5m2")


@each(
    ("shape", "descr", "said"),
    [
        ("(4611686018427387904, 4)", "'<f4'", "too large for an array"),
        ("(1099511627776,)", "'<f4'", "needs 4398046511104 bytes; it has 96"),
        ("(25,)", "'<f4'", "needs 100 bytes; it has 96"),
        ("(23,)", "'<f4'", "needs 92 bytes; it has 96"),
        (f"({'1, ' * 65})", "'<f4'", "64 axes at most"),
        ("(-1,)", "'<f4'", "its shape (-1,) is not known"),
        ("(24)", "'<f4'", "not that of an array of numbers: shape is not valid: 24"),
        (f"({'9' * 5000},)", "'<f4'", "not that of an array of numbers"),
        ("(48,)", "'|V2'", "'|V2', which is not a numeric type; if it was saved from bfloat16 or float8, save it as"),
        ("(96,)", "'<f1'", "'<f1'; if it was saved from bfloat16 or float8, save it as"),
        ("(24,)", "[('a', '<f4')]", "'|V4', which is not a numeric type"),
        ("(24,)", "'<f5'", "not a valid dtype descriptor: '<f5'"),
        ("(24,), 'x': 1", "'<f4'", "not that of an array of numbers"),
    ],
)
def test_a_header_is_checked_against_the_file(tmp_path: Path, shape: str, descr: str, said: str) -> None:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    source = tmp_path / "x.npy"
    source.write_bytes(with_header(header, bytes(96), 1))
    with pytest.raises(ValueError, match=r"is not a \.npy file that can be read") as refused:
        jc.round_file(source, tmp_path / "y.npy", "e5m2")
    assert said in str(refused.value)


@pytest.mark.smoke
def test_a_shape_without_elements_takes_no_memory(tmp_path: Path) -> None:
    """Its scales would be many: one for each index of an axis."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 0, 1099511627776)}\n"
    (tmp_path / "x.npy").write_bytes(with_header(header, b"", 1))
    jc.round_file(tmp_path / "x.npy", tmp_path / "y.npy", "int8(channel=2)")
    written = (tmp_path / "y.npy").read_bytes()
    assert b"(2, 0, 1099511627776)" in written
