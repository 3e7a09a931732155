"""Digests of calls of the whole public face: what two versions of jchop must have in common.

`__main__.py` has the commands, `face.py` the public names, `hashing.py` the digest of a result, and the other files the
calls, by subject. A file has a generator `calls()`; a call has a stable name that says what is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
DATA = FOLDER.parent / "data"
ROOMS = ("formats", "rounding", "scaled", "stored", "arithmetic", "emulated", "programs", "networks", "training",
         "reports", "words", "tensors")  # fmt: skip

#: Public names that no call can give.
UNCOVERED: frozenset[str] = frozenset()


def prepare() -> None:
    """What a process needs before JAX is imported: the CPU with eight devices, and few of LLVM's optimizations.

    From JAX 0.12 on such code flushes subnormal bfloat16 numbers, so calls compile there as users do.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "Agg")
    root = FOLDER.parents[1]
    sys.path[:0] = [str(FOLDER.parent), str(root), str(root / "docs/_extensions")]
    import jax

    jax.config.update("jax_disable_most_optimizations", jax.__version_info__ < (0, 12))


@dataclass(frozen=True)
class Call:
    """One call. The bits of a loose one may depend on the processor: XLA's own sums, `exp`, `tanh` are in it."""

    name: str
    run: Callable[[], Any]
    loose: bool = False
    torch: bool = False


def every_call(only: str = "") -> Iterator[Call]:
    """All calls whose room or name starts with a prefix, in the order of the rooms."""
    for room in (only,) if only in ROOMS else ROOMS:
        for call in import_module(f"digests.{room}").calls():
            if room == only or call.name.startswith(only):
                yield call
