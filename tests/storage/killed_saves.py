"""Saves a tree again and again in a child that is killed, and reads the file after each kill.

python tests/storage/killed_saves.py FOLDER KILLS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import jchop as jc
from jchop._storage._files.safetensors import TensorFile

LEAVES, SIZE = 8, 1 << 18


def tree(version: int) -> dict[str, Any]:
    return {f"leaf{number}": np.full(SIZE, version, np.float32) for number in range(LEAVES)}


def main(folder: str, kills: int) -> None:
    path = Path(folder) / "model.safetensors"
    jc.save(path, tree(0))
    versions, parts = [], 0
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            version = versions[-1] if versions else 0
            while True:
                version += 1
                jc.save(path, tree(version))
        while not list(Path(folder).glob(".*.part")):  # so that a machine with other work kills no child too early
            time.sleep(0.001)
        time.sleep(0.0015 * (kill % 25))  # at other places of a save each time
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with TensorFile(path) as file:
            found = {float(number) for name in file.entries for number in np.unique(file.read(name))}
            assert set(file.entries) == set(tree(0))
        assert len(found) == 1, f"the file is torn: {found}"
        versions.append(int(found.pop()))
        assert versions == sorted(versions)
        left = list(Path(folder).glob(".*.part"))
        parts += len(left)
        for part in left:
            part.unlink()
    print(f"kills {kills}, during a save {parts}, saved {versions[-1]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
