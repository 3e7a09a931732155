"""Damaged checkpoints of every layout, read by `load_checkpoint`: `python hostile_checkpoints.py FOLDER COUNT MIB`."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_layouts import CASES, GGUF_COUNTS, GGUF_SIZES, Case, gguf_blocks, gguf_file, pack_file
from hostile_files import MEBIBYTE, SECONDS, Hang, altered, dumped, memory, mutant

from jchop import load_checkpoint

_NAMES = ["config.json", "model.safetensors.index.json"]


def originals() -> list[tuple[str, Case | None, bytes]]:
    """(name of the file, its case, its bytes) of good files."""
    found: list[tuple[str, Case | None, bytes]] = []
    for name, case in CASES.items():
        tensors = case.make(np.random.default_rng(len(name))) | {"b": np.ones(3, np.float32)}
        found.append(("model.safetensors", case, pack_file(tensors, case.metadata)))
    rng = np.random.default_rng(0)
    blocks = {
        str(kind): (kind, (2, 2 * GGUF_COUNTS[kind]), gguf_blocks(kind, rng, 2, 2).tobytes()) for kind in GGUF_SIZES
    }
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    key += (2).to_bytes(8, "little") + 2 * ((1).to_bytes(8, "little") + b"t")
    found += [("x.gguf", None, gguf_file(blocks | {"a": (0, (2, 3), bytes(24))}, key, 1))] * 6
    return found


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """A file of bytes with some changed, cut or repeated; most damage is in the first 600 bytes."""
    whole, what = bytearray(data), draw.randrange(4)
    at = draw.randrange(min(len(whole), draw.choice((600, len(whole)))))
    if what == 0:
        return bytes(whole[:at])
    if what == 1:
        whole[at : at + 8] = draw.choice((0, 1, 255, 1 << 31, (1 << 64) - 1, 1 << 40)).to_bytes(8, "little")
    elif what == 2:
        for _ in range(draw.choice((1, 2, 8))):
            whole[draw.randrange(min(len(whole), 600))] ^= 1 << draw.randrange(8)
    else:
        whole[at:at] = whole[at : at + draw.choice((1, 8, 64))]
    return bytes(whole)


def damage(draw: random.Random, folder: Path, name: str, case: Case | None, data: bytes) -> None:
    """Writes one damaged checkpoint."""
    for other in ["x.gguf", "model.safetensors", *_NAMES]:
        (folder / other).unlink(missing_ok=True)
    config: Any = {} if case is None else {"quantization_config": copy.deepcopy(case.config)}
    what = draw.randrange(4)
    if case is None:
        data = damaged_bytes(draw, data)
    elif what < 2:
        length = int.from_bytes(data[:8], "little")
        data = mutant(draw, json.loads(data[8 : 8 + length]), data[8 + length :])
    elif what == 2:
        length = 8 + int.from_bytes(data[:8], "little")
        rest = bytearray(data)
        for _ in range(draw.choice((1, 4, 64))):
            rest[draw.randrange(length, len(rest))] = draw.choice((0, 127, 128, 255, draw.randrange(256)))
        data = bytes(rest)
    else:
        config["quantization_config"] |= {"weight_block_size": [128, 128], "bits": 4}
        altered(draw, config)
    (folder / name).write_bytes(data)
    if case is not None and (case.config or what == 3):
        (folder / "config.json").write_bytes(dumped(config).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.05:
        index: Any = {"metadata": {"total_size": 3}, "weight_map": {"b": "model.safetensors"}}
        altered(draw, index)
        (folder / _NAMES[1]).write_bytes(dumped(index).encode("utf-8", "surrogatepass"))


def fault(path: Path, layout: str) -> str | None:
    """The fault of one checkpoint: anything but a result or an error of one line."""

    def stop(number: int, frame: object) -> None:
        raise Hang(f"more than {SECONDS} s of the processor")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        load_checkpoint(path, layout)
    except (ValueError, OSError) as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            return f"{error!s:.300}"
    except BaseException:
        return traceback.format_exc(limit=-3)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def search(folder: Path, count: int) -> list[str]:
    """The faults of so many damaged checkpoints."""
    found, files = [], originals()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(count):
            draw = random.Random(seed)
            name, case, data = files[seed % len(files)]
            damage(draw, folder, name, case, data)
            layout = case.layout if case is not None and draw.random() < 0.5 else "auto"
            said = fault(folder / name if case is None else folder, layout)
            found += [] if said is None else [f"damaged {seed}: {said}"]
    return found


def run(folder: Path, count: int, mebibytes: int = 64) -> None:
    """The whole search, with at most so much more memory than before it."""
    found = search(folder, 300)  # the modules and the arrays of JAX are there before the limit
    before, allowed = memory("VmRSS"), mebibytes * MEBIBYTE
    with contextlib.suppress(ImportError):
        import resource  # of POSIX alone

        limit = memory("VmData") + allowed + (1 << 24)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    found += search(folder, count)
    grown = memory("VmHWM") - before
    if grown > allowed:
        found.append(f"{grown >> 20} MiB more")
    print(*found, f"grown by {grown >> 20} MiB", f"{len(found)} faults", sep="\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
