"""Digests of about 3,000 calls of every public function of jchop, each argument included.

    python tests/digests write new.json --workers 2       all calls, in two processes
    python tests/digests write new.json --only "math.sum" calls whose names begin so, or those of one file
    python tests/digests compare old.json new.json        the calls whose bits differ; exit status 1 if there are any
    python tests/digests check                            all calls against the committed table of this JAX version
    python tests/digests check --bits                     the same to the last bit, for a table of the same processor
    python tests/digests coverage [FILE]                  public names and arguments that a table's calls do not give

A call is named by what it does, so the lists of two versions need not be the same. An error is digested by its type. A
digest `bits~rough` is that of a call whose bits may depend on the processor; `check` compares the rough part. The
header of a table has the names and arguments that its calls gave, as they were noted while the calls ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its files have common names

import digests

NEEDS = "needs "  # a package: in place of a digest


def committed() -> Path:
    import jax

    return digests.DATA / f"digests-{jax.__version__}.json"


def load(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    table = json.loads(path.read_text("utf-8"))
    return table["header"], table["calls"]


def run(calls: list[digests.Call], times: dict[str, float]) -> dict[str, str]:
    import jax

    from digests import face, hashing

    found: dict[str, str] = {}
    for number, call in enumerate(calls):
        if call.torch and not face.HAS_TORCH:
            found[call.name] = f"{NEEDS}torch"
            continue
        start = time.process_time()
        assert call.name not in found, call.name
        try:
            found[call.name], types = hashing.outcome(call.run, call.loose)
        except Exception as error:
            raise RuntimeError(f"call {call.name!r}") from error
        face.note_types(types)
        times[call.name] = time.process_time() - start
        if number % 200 == 199:
            jax.clear_caches()
            print(f"{number + 1} of {len(calls)} calls, {time.process_time():.0f} s", file=sys.stderr, flush=True)
    return found


def one_part(path: Path, only: str, part: str, times: Path | None) -> None:
    """The calls of one worker: every N-th dozen of neighbours, which share compiled programs."""
    digests.prepare()
    import jax

    from digests import face

    face.names()
    face.watch()
    number, parts = map(int, part.split("/"))
    calls = [call for i, call in enumerate(digests.every_call(only)) if i // 12 % parts == number % parts]
    seconds: dict[str, float] = {}
    found = run(calls, seconds)
    given = {name: sorted(arguments) for name, arguments in face.SEEN.items()}
    header = {"jax": jax.__version__, "torch": face.HAS_TORCH, "seconds": time.process_time(), "given": given}
    path.write_text(json.dumps({"header": header, "calls": found, "times": seconds}), encoding="utf-8")
    if times:
        slowest = sorted(seconds.items(), key=lambda item: -item[1])
        times.write_text("".join(f"{s:8.2f} {found[name][:24]:24} {name}\n" for name, s in slowest), encoding="utf-8")


Table = tuple[dict[str, Any], dict[str, str]]


def write(path: Path, only: str = "", workers: int = 1, times: Path | None = None) -> Table:
    calls: dict[str, str] = {}
    given: dict[str, set[str]] = {}
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(workers)]
        command = [sys.executable, __file__, "part", "--only", only]
        running = [
            subprocess.Popen([*command, str(file), f"{i}/{workers}", *(["--times", f"{times}.{i}"] if times else [])])
            for i, file in enumerate(files)
        ]
        assert not any([process.wait() for process in running])  # noqa: C419, which would leave some running
        for file in files:
            header, found = load(file)
            assert not calls.keys() & found.keys(), sorted(calls.keys() & found.keys())
            calls |= found
            seconds += header.pop("seconds")
            for name, arguments in header["given"].items():
                given.setdefault(name, set()).update(arguments)
    header["given"] = {name: " ".join(sorted(given[name])) for name in sorted(given)}
    lines = [f"{json.dumps(name)}:{json.dumps(calls[name])}" for name in sorted(calls)]
    text = ",\n".join(lines)
    path.write_text(f'{{"header":{json.dumps(header, separators=(",", ":"))},\n"calls":{{\n{text}\n}}}}\n', "utf-8")
    errors = sum(value.startswith("error") for value in calls.values())
    print(f"{len(calls)} digests, {errors} of them errors, {seconds:.0f} s of processor time: {path}")
    return header, calls


def compare(before: dict[str, str], after: dict[str, str], *, bits: bool, whole: bool = True) -> int:
    """The number of calls that differ; calls that a side has no package for count as equal."""

    def seen(value: str) -> str:
        return value if bits else value.rpartition("~")[2]

    both = [name for name in before if name in after and not (before[name] + after[name]).count(NEEDS)]
    differing = [name for name in both if seen(before[name]) != seen(after[name])]
    for name in differing:
        print(f"{name}: {before[name]} -> {after[name]}")
    gone, new = [n for n in before if n not in after] if whole else [], [n for n in after if n not in before]
    for name in gone + new:
        print(f"{'gone' if name in before else 'new'}: {name}")
    print(f"{len(both)} calls in both, {len(differing)} differ, {len(gone)} gone, {len(new)} new")
    return len(differing) + len(gone) + len(new)


def check(only: str, workers: int, bits: bool) -> int:
    _, before = load(committed())
    with tempfile.TemporaryDirectory() as folder:
        _, after = write(Path(folder) / "new.json", only, workers)
    return compare(before, after, bits=bits, whole=not only)


def overriding(name: str) -> list[str]:
    """The names of a method in subclasses."""
    from digests import face

    owner, _, method = name.rpartition(".")
    kind = face.names().get(owner)
    if not isinstance(kind, type):
        return []
    kinds = ((n, v) for n, v in face.names().items() if isinstance(v, type) and v is not kind)
    return [f"{n}.{method}" for n, v in kinds if issubclass(v, kind)]


def missing(given: dict[str, str]) -> tuple[list[str], dict[str, list[str]], str]:
    """Public names that no call gave, arguments of the others that none gave another value than the default."""
    from digests import face

    absent, arguments, count = [], {}, 0
    for name, value in face.names().items():
        if name not in given:
            if not any(other in given for other in overriding(name)):
                absent.append(name)
            continue
        got = given[name].split()
        if isinstance(value, type) and "()" not in got:
            continue  # only results have this type
        wanted = face.parameters(name)
        count += len(wanted)
        if left := [argument for argument in wanted if argument not in got]:
            arguments[name] = left
    left = sum(map(len, arguments.values()))
    total = len(face.names())
    return absent, arguments, f"{total - len(absent)} of {total} names, {count - left} of {count} arguments"


def coverage(path: Path | None) -> int:
    absent, arguments, summary = missing(load(path or committed())[0]["given"])
    for name in absent:
        print(f"no call: {name}")
    for name, left in arguments.items():
        print(f"not given: {name}: {', '.join(left)}")
    print(summary)
    return len(absent) + len(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "check", "part"):
        command = commands.add_parser(name)
        if name != "check":
            command.add_argument("file", type=Path)
        if name == "part":  # a worker of the other two
            command.add_argument("part", metavar="K/N")
        else:
            command.add_argument("--workers", type=int, default=1)
        command.add_argument("--only", default="", metavar="PREFIX", help="a file of calls, or the start of names")
        command.add_argument("--times", type=Path, help="write the seconds of each call")
        command.add_argument("--bits", action="store_true", help="compare all bits, as on one processor")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    commands.add_parser("coverage").add_argument("file", type=Path, nargs="?")
    options = parser.parse_args()
    digests.prepare()
    if options.command == "part":
        one_part(options.file, options.only, options.part, options.times)
        return 0
    if options.command == "write":
        write(options.file, options.only, options.workers, options.times)
        return 0
    if options.command == "coverage":
        return 1 if coverage(options.file) else 0
    if options.command == "compare":
        return 1 if compare(load(options.old)[1], load(options.new)[1], bits=True) else 0
    return 1 if check(options.only, options.workers, options.bits) else 0


if __name__ == "__main__":
    sys.exit(main())
