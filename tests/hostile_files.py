"""Mutants of safetensors files, and what readers make of each; `python hostile_files.py FOLDER COUNT` under limits."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import random
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jchop as jc
from jchop.__main__ import main
from jchop._storage._chunks import TensorRule, quantize_file

#: What takes the place of a value. Texts between @ are put into the JSON as they are.
HOSTILE: list[Any] = [
    *(None, True, False, "", "x", "F64", "BF16", "F4", "nvfp4", "int4(group=4)", "int4(axis=9,group=2)", "float32"),
    *(-1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 1.0, 1.5, "@1e999@", "@-1e999@", "@NaN@"),
    *("@" + "9" * 5000 + "@", "@Infinity@", "@" + "[" * 3000 + "]" * 3000 + "@", "@" + '{"a":' * 3000 + "@"),
    *([], {}, [0], [1, 2, 3], [[0, 4]], {"a": 1}, [True, 4], [0.0, 4.0], ["0", "4"], [0] * 70, "\ud800", "e5m2:" * 50),
]
SECONDS = 30
MEBIBYTE = 1 << 20


def originals() -> list[tuple[dict[str, Any], bytes]]:
    """Headers and data of good files."""
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    texts = (
        "nvfp4",
        "uint4(group=8,zero_point=integer)",
        "nf4(group=8,scale=uint8(group=2,zero_point=float))",
        "e3m2fn",
    )
    trees: list[Any] = [
        {"a": x, "b": np.array([1, 2, 3], np.int8), "c": np.zeros((0, 3), np.float16), "d": jnp.bfloat16(1)},
        {"layers": [{"kernel": jc.quantize(x, text), "bias": x[0]} for text in texts], "0": {7: x[1]}},
    ]
    path, found = Path("original.safetensors"), []
    for tree in trees:
        jc.save(path, tree, metadata={"format": "pt"})
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        found.append((json.loads(data[8 : 8 + length]), data[8 + length :]))
    return found


def packed(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else dumped(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def dumped(value: Any) -> str:
    return re.sub(r'"@([^@]*)@"', lambda found: found[1].replace(r"\"", '"'), json.dumps(value))


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])


def altered(draw: random.Random, node: Any) -> None:
    """Changes one value, or takes or adds one."""
    found = list(places(node))
    if not found:
        return
    container, key = draw.choice(found)
    what = draw.random()
    if what < 0.7:
        container[key] = draw.choice(HOSTILE)
    elif what < 0.8:
        del container[key]
    elif isinstance(container[key], int) and not isinstance(container[key], bool):
        container[key] += draw.choice((-8, -1, 1, 8, 1 << 40))
    elif isinstance(container, dict):
        container[draw.choice([*container, "x", "__metadata__", "w.scale"])] = copy.deepcopy(container[key])
    else:
        container.append(draw.choice(HOSTILE))


def mutant(draw: random.Random, header: dict[str, Any], data: bytes) -> bytes:
    """One damaged file."""
    header, what = copy.deepcopy(header), draw.randrange(8)
    if what < 3:
        altered(draw, header)
        return packed(header, data)
    own = [key for key in header.get("__metadata__", {}) if key.startswith("jchop.")]
    if what < 5 and own:
        key = draw.choice(own)
        inner = json.loads(header["__metadata__"][key])
        altered(draw, inner)
        header["__metadata__"][key] = dumped(inner)
        return packed(header, data)
    whole = bytearray(packed(header, data))
    length = len(whole) - len(data)
    if what == 5:
        return bytes(whole[: draw.randrange(len(whole))]) + bytes(draw.choice((0, 0, 0, 9)))
    if what == 6:
        for _ in range(draw.choice((1, 2, 8))):
            whole[draw.randrange(length)] ^= 1 << draw.randrange(8)
        return bytes(whole)
    text = bytes(whole[8:length])  # a piece of the text repeated, taken away or moved
    first, last = sorted(draw.randrange(len(text)) for _ in range(2))
    times, at = draw.choice((0, 2, 3)), draw.randrange(len(text))
    return packed(draw.choice((text[:first] + text[first:last] * times + text[last:], text[at:] + text[:at])), data)


def hostile_headers() -> Iterator[Iterator[str]]:
    """Headers of the longest size, made to take memory or time, in pieces."""
    size = (1 << 24) - 64
    for front, unit, back in (
        ('{"a":', "[],", "1}"),
        ('{"a":[', "[],", "1]}"),
        ('{"a":[', "{},", "1]}"),
        ('{"a":', "[", "}"),
        ('{"a":', '{"a":', "}"),
        ('{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[', "9999,", "0]}}"),
        ('{"__metadata__":{"a":"', "ä", '"}}'),
        ('{"__metadata__":{"jchop.qarrays":"', "[", '"}}'),
        ("", " ", "{}"),
    ):
        many = 1 << 10
        count = size // (many * len(unit.encode()))
        yield itertools.chain([front], itertools.repeat(unit * many, count), [back])
    tensor = ',"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    for unit, front, back in (
        (tensor, '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', "}"),
        (',"{}":""', '{"__metadata__":{"a":""', "}}"),
    ):
        yield itertools.chain([front], map(unit.format, range(size // (len(unit) + 6))), [back])
    yield iter(["{}", " " * (1 << 24)])


def write(path: Path, pieces: Iterator[str]) -> None:
    with path.open("wb") as out:
        out.write(bytes(8))
        for piece in pieces:
            out.write(piece.encode())
        length = out.tell() - 8
        out.seek(0)
        out.write(length.to_bytes(8, "little"))


class Hang(BaseException):
    """A reader that takes too long."""


def faults(path: Path, *, quantizing: bool) -> list[str]:
    """What goes wrong with one file: anything but a result, a ValueError or an OSError."""

    def stop(number: int, frame: object) -> None:
        raise Hang(f"more than {SECONDS} s of the processor")

    def inspect() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            status = main(["inspect", str(path)])
        lines = said.getvalue().splitlines()
        if (status, len(lines)) not in ((0, 0), (2, 1)):
            raise AssertionError(f"status {status}, {len(lines)} lines")

    calls = [lambda: jc.load(path), lambda: jc.load_checkpoint(path), inspect]
    if quantizing:
        target = path.with_name("out.safetensors")
        calls.append(lambda: quantize_file(path, target, [TensorRule(".*", jc.Spec("bfloat16"))]))
    found = []
    for call in calls:
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            call()
        except (ValueError, OSError) as error:
            if "in memory" in str(error):
                found.append(f"{error!s:.200}")
        except BaseException:
            found.append(traceback.format_exc(limit=-3))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def search(folder: Path, count: int, quantize_each: int) -> list[str]:
    """The faults of so many mutants."""
    with contextlib.chdir(folder):
        files = originals()
        found = []
        for seed in range(count):
            draw = random.Random(seed)
            (path := Path("x.safetensors")).write_bytes(mutant(draw, *files[seed % len(files)]))
            said = faults(path, quantizing=seed % quantize_each == 0)
            found += [f"mutant {seed}: {fault}" for fault in said]
    return found


def memory(name: str) -> int:
    """Bytes of this process, from a line of /proc/self/status."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def run(folder: Path, count: int) -> None:
    """The whole search, with at most 256 MiB more memory than before it, beside the file."""
    found = search(folder, 20, 1)  # what the programs of JAX take is there before the limit
    allowed = 256 * MEBIBYTE
    import resource  # of POSIX alone

    limit = memory("VmData") + allowed + (1 << 24)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = memory("VmRSS")
    found += search(folder, count, 50)
    for number, pieces in enumerate(hostile_headers()):
        write(path := folder / "x.safetensors", pieces)
        found += [f"header {number}: {fault}" for fault in faults(path, quantizing=True)]
    grown = memory("VmHWM") - before
    if grown > allowed + (1 << 24):
        found.append(f"{grown >> 20} MiB more")
    print(*found, f"grown by {grown >> 20} MiB", f"{len(found)} faults", sep="\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
