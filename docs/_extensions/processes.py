"""Programs that run while the pages are built, under a limit of processor time, so that a busy machine stops none."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
STOPPED = threading.Event()
T = TypeVar("T")
R = TypeVar("R")
WORKERS = 2  # programs at once
LIMIT, IDLE = 300.0, 300.0  # seconds of processor time; seconds in which a program takes none, so that it hangs


@dataclass(frozen=True)
class Ended:
    """A program that has ended, or was stopped: all that it printed, and why it has no result (empty if it has one)."""

    output: str
    errors: str
    fault: str


def run(command: Sequence[str], folder: Path, limit: float = LIMIT, idle: float = IDLE) -> Ended:
    """Runs a program in a folder. What it printed is kept, also if it fails or passes a limit."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=folder, start_new_session=True)
        fault = _watch(process, limit, idle)
        for file in (output, errors):
            file.seek(0)
        return Ended(output.read(), errors.read(), fault)


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of a function that runs programs, some at once. An interrupt stops those that run."""
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            STOPPED.set()
            raise


def cpu_seconds(session: int) -> float:
    """The processor seconds of all processes of a session, and of their children that have ended.

    Where there is no /proc, as on macOS, a clock counts in their place.
    """
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))  # of itself in user and kernel mode, of its children in both
    return ticks / os.sysconf("SC_CLK_TCK")


def _watch(process: subprocess.Popen[bytes], limit: float, idle: float) -> str:
    """Waits for the end of a program, or stops it and its children; returns the fault."""
    start = used = cpu_seconds(process.pid)
    changed = time.monotonic()
    while True:
        try:
            code = process.wait(timeout=0.5)
            return f"it ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            before, used = used, cpu_seconds(process.pid)
        changed = time.monotonic() if used > before else changed
        if STOPPED.is_set():
            fault = "the build was stopped"
        elif used - start > limit:
            fault = f"it took more than {limit:g} s of processor time"
        elif time.monotonic() - changed > idle:
            fault = f"it took no processor time for {idle:g} s"
        else:
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return fault


@functools.cache
def package_digest() -> str:
    """A digest of all files of the package."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.glob("jchop/**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of(*parts: str | bytes) -> str:
    """A digest of texts or files and of the package: of all that a run depends on."""
    digest = hashlib.sha256(package_digest().encode())
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()
