"""Safetensors files that nobody vouches for: an error that says what is wrong, and no memory, wait or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from hostile_files import packed, search
from refusals import assert_refused

import jchop as jc
from jchop.__main__ import main
from jchop._storage._chunks import TensorRule, quantize_file
from jchop._storage._files.safetensors import TensorFile

further = Further()

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")


def u8(shape: Any, offsets: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = json.dumps({"x": u8([4], [0, 4])})[:-1]
#: (what the message says, header, data) of files that every reader refuses.
REFUSED: list[tuple[str, Any, bytes]] = [
    ("nested too deep", b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}", b""),
    ("must be an object with dtype", {"x": 3}, b""),
    ("must be an object with dtype", {"x": []}, b""),
    ("must be an object with dtype", {"x": {"dtype": "U8"}}, b""),
    ("it is not an object", [], b""),
    ("is not known", {"x": u8([1], [0, 1], ["U8"])}, b"0"),
    ("must be a list of integers", b'{"x":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', b"0"),
    ("must be a list of integers", {"x": u8([True], [0, 1])}, b"0"),
    ("must be a list of integers", {"x": u8([1.0], [0, 1])}, b"0"),
    ("must be a list of integers", {"x": u8([-1], [0, 1])}, b"0"),
    ("must be a list of integers", {"x": u8("1", [0, 1])}, b"0"),
    ("must be a list of integers", {"x": u8([1] * 65, [0, 1])}, b"0"),
    ("must be a list of integers", {"x": u8([0, 2**62, 2**62], [0, 0])}, b""),
    ("do not fit", {"x": u8([1], [False, True])}, b"0"),
    ("do not fit", {"x": u8([1], [0])}, b"0"),
    ("do not fit", {"x": u8([2], [0, 1])}, b"0"),
    ("do not fit", {"x": u8([10**12], [0, 10**12])}, b"0"),
    ("begins at byte 3 .* must at 2", {"x": u8([2], [0, 2]), "y": u8([1], [3, 4])}, b"0000"),
    ("begins at byte 2 .* must at 3", {"x": u8([3], [0, 3]), "y": u8([2], [2, 4])}, b"0000"),
    ("fill 4 bytes, and the file has 5", {"x": u8([4], [0, 4])}, b"00000"),
    ("the key 'x' is duplicated", f"{TWICE}, {TWICE[1:]}}}".encode(), b"0000"),
    ("the key 'dtype' is duplicated", b'{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"0"),
    ("must be an object of texts", {"__metadata__": {"a": 1}}, b""),
    ("must be an object of texts", {"__metadata__": "a"}, b""),
    ("Extra data", b"{}{}", b""),
    ("invalid start byte", b'{"\xff":1}', b""),
]


def test_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.safetensors"

    def read(header: Any, data: bytes) -> None:
        path.write_bytes(packed(header, data))
        assert main(["inspect", str(path)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("jchop: error: ")
        jc.load(path)

    table = {f"{said}, {i}": (partial(read, *given), ValueError, f"is not a safetensors file that jchop reads: bad "
                              f"header: .*{said}") for i, (said, *given) in enumerate(REFUSED)}  # fmt: skip
    assert_refused(table)


@further.first
def bad_headers_are_not_quantized(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def quantized(header: Any, data: bytes) -> None:
        path.write_bytes(packed(header, data))
        quantize_file(path, tmp_path / "out.safetensors", [TensorRule(".*", jc.Spec("bfloat16"))])

    assert_refused({f"{said}, {i}": (partial(quantized, *given), ValueError, said)
                    for i, (said, *given) in enumerate(REFUSED)})  # fmt: skip
    assert not (tmp_path / "out.safetensors").exists()


def test_what_the_reference_implementation_reads_is_read(tmp_path: Path) -> None:
    reference = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    last = {"y": u8([2], [2, 4]), "x": u8([2], [0, 2])}
    good = [
        (last, b"0123"),
        (last | {"z": u8([0], [2, 2])}, b"0123"),
        ({"__metadata__": None, "x": u8([4], [0, 4]) | {"more": {"a": [1]}}}, b"0123"),
        (b" {} \n\t", b""),
    ]
    for header, data in good:
        path.write_bytes(content := packed(header, data))
        names = {name for name, _ in reference.deserialize(content)}
        assert set(jc.load(path)) == names
    path.write_bytes(packed({"x": u8([], [0, 8], "C64")}, bytes(8)))  # which its first versions do not read
    assert set(jc.load(path)) == {"x"}
    short = packed({}, b"")
    for content in (b"", short[:7], short[:9], (1 << 63).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(reference.SafetensorError):
            reference.deserialize(content)
        with pytest.raises(ValueError, match=r"not the length of a header|it is empty"):
            jc.load(path)


@pytest.mark.smoke
def test_long_headers_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(b"{}" + b" " * (1 << 24), b""))
    with pytest.raises(ValueError, match="would take 16777218 bytes, and at most 16777216"):
        jc.load(path)
    path.write_bytes(packed(b"{}" + b" " * ((1 << 24) - 2), b""))
    assert jc.load(path) == {}
    many = ",".join(f'"{i}":""' for i in range((1 << 18) + 1))
    path.write_bytes(packed(b'{"__metadata__":{' + many.encode() + b"}}", b""))
    with pytest.raises(ValueError, match="more than 262144 entries"):
        jc.load(path)


GOOD = {"spec": "int4(group=4)", "size": 8, "dtype": "float32"}


BAD_FIELDS: list[tuple[str, Any]] = [
    ("must be an object of spec", []),
    ("must be an object of spec", {"spec": "mxfp4"}),
    ("must be an object of spec", GOOD | {"more": 1}),
    ("spec=3 must be text", GOOD | {"spec": 3}),
    ("int4x", GOOD | {"spec": "int4x"}),
    ("size=True", GOOD | {"size": True}),
    ("size=8.0", GOOD | {"size": 8.0}),
    ("size=-8", GOOD | {"size": -8}),
    ("do(es)? not fit|the leaves are", GOOD | {"size": 10**18}),
    ("the leaves are", GOOD | {"size": 6}),
    ("does not fit length=None", GOOD | {"size": None}),
    ("dtype='int32' must be one of", GOOD | {"dtype": "int32"}),
    ("dtype=\\['float32'\\]", GOOD | {"dtype": ["float32"]}),
    ("lacks tensors of its QArrays: w.tensor_scale", GOOD | {"spec": "nvfp4"}),
    ("does not fit an array", GOOD | {"spec": "int4(group=2)"}),
    ("names axis|does not fit", GOOD | {"spec": "int4(group=4,axis=-3)"}),
    ("not counted from the end", GOOD | {"spec": "int4(group=4,axis=1)"}),
    ("the leaves are", GOOD | {"spec": "int8(group=4)"}),
    ("the leaves are", GOOD | {"spec": "int4(group=4,scale=bfloat16)"}),
    ("at most|the leaves are", GOOD | {"spec": "binary32"}),
]


def test_metadata_of_qarrays(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    jc.save(path, {"w": jc.quantize(np.ones((2, 8), np.float32), "int4(group=4)")})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert json.loads(header["__metadata__"]["jchop.qarrays"]) == {"w": GOOD}

    def write(fields: Any) -> None:
        header["__metadata__"]["jchop.qarrays"] = json.dumps({"w": fields})
        path.write_bytes(packed(header, data[8 + length :]))
        assert main(["inspect", str(path)]) == 0

    def load(fields: Any) -> None:
        write(fields)
        jc.load(path)

    def quantize(fields: Any) -> None:
        write(fields)
        quantize_file(path, tmp_path / "out.safetensors", [TensorRule(".*", jc.Spec("bfloat16"))])

    for read in (load, quantize):
        assert_refused({f"{read.__name__} {fields}": (partial(read, fields), ValueError,
                        f"bad metadata 'jchop.qarrays' .*({said})") for said, fields in BAD_FIELDS})  # fmt: skip


BAD_RECORDS: list[tuple[str, Any]] = [
    ("other arrays", {"a.0": ["a", 0]}),
    ("does not lead to", {"a.0": ["a", 0], "b": ["c"]}),
    ("is not a step", {"a.0": ["a", True], "b": ["b"]}),
    ("is not a step", {"a.0": ["a", [0, 1]], "b": ["b"]}),
    ("does not lead to", {"a.0": "a.0", "b": ["b"]}),
    ("does not lead to", {"a.0": {}, "b": ["b"]}),
    ("does not lead to", {"a.0": 1, "b": ["b"]}),
    ("it is not an object", []),
]


def test_records_of_trees(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def nested(record: Any) -> None:
        text = json.dumps(
            {"__metadata__": {"jchop.tree": json.dumps(record)}, "a.0": u8([1], [0, 1]), "b": u8([1], [1, 2])}
        )
        path.write_bytes(packed(text.encode(), b"12"))
        assert set(jc.load(path)) == {"a.0", "b"}
        jc.load(path)

    assert_refused({str(record): (partial(nested, record), ValueError, f"bad metadata 'jchop.tree': .*({said})")
                    for said, record in BAD_RECORDS})  # fmt: skip


def test_lists_with_gaps_and_steps_that_contradict(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    deep = ".".join(["a"] * 300)
    for said, names in (
        ("a list has the entries", {"a.1": ["a", 1], "a.2": ["a", 2]}),
        ("a list has the entries", {"a.0": ["a", 0], "a.b": ["a", "b"]}),
        ("to an array and to a container", {"a": ["a"], "a.b": ["a", "b"]}),
        ("more than 200 steps", {deep: ["a"] * 300, "b": ["b"]}),
    ):
        tensors = {name: u8([1], [i, i + 1]) for i, name in enumerate(names)}
        path.write_bytes(packed({"__metadata__": {"jchop.tree": json.dumps(names)}, **tensors}, b"12"))
        with pytest.raises(ValueError, match=said):
            jc.load(path)


@pytest.mark.skipif(os.name != "posix", reason="needs FIFOs")
def test_what_is_no_file_does_not_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(fifo := tmp_path / "x.safetensors")
    for path in (fifo, tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            jc.load(path)
        assert main(["inspect", str(path)]) == 2
        assert main(["quantize", str(path), str(tmp_path / "y.safetensors"), "--rule", ".*=bfloat16"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_more_than_memory_holds_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file takes no room on the disk, and its header is right."""
    path = tmp_path / "x.safetensors"
    jc.save(path, {"x": jnp.ones(4)})

    def full(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("jchop._storage._files.safetensors.np.empty", full)
    with pytest.raises(ValueError, match="tensor 'x' of 16 bytes does not fit in memory"):
        jc.load(path)


def test_a_source_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    jc.save(path, {"x": jnp.ones((64, 1024))})

    def shrink(name: str, done: int, total: int) -> None:
        os.truncate(path, 5000)

    with pytest.raises(ValueError, match="ends within tensor 'x'"):
        quantize_file(path, target, [TensorRule("x", jc.Spec("bfloat16"))], progress=shrink, chunk=1 << 14)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="not a safetensors file"):
        TensorFile(path)


@further
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=[pytest.mark.slow, linux])])
def mutants(tmp_path: Path, count: int) -> None:
    """Some here, and thousands by a process of little memory."""
    if count == 60:
        assert search(tmp_path, 60, 60) == []
        return
    argv = [sys.executable, str(ROOT / "tests/hostile_files.py"), str(tmp_path), str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "0 faults", run.stdout[-4000:]


test_further = further.test()
