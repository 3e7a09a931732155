"""Which tests a run takes: the default cases of each table, and one part of the slow tests.

A plugin of pytest, loaded by `conftest.py`. What it decides about a test depends on the id of that test alone: a test
that is added or removed moves no other one.

    python tests/selection.py                  the slow tests that the last 8 values of .ci/turn have run, by part
    python tests/selection.py --turns 24 -m "slow and programs"
"""

from __future__ import annotations

import argparse
import collections
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def part_of(test: str, parts: int) -> int:
    """The part, from 0, that a test or a file belongs to, by its id: a hash, the same on every machine."""
    return zlib.crc32(test.encode()) % parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parts", type=int, default=1, metavar="N", help="run one of N parts of the selected tests")
    parser.addoption("--part", type=int, default=0, metavar="K", help="with --parts=N: which one, from 0")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_DefaultCases(config.option.markexpr))


class _DefaultCases:
    """Of the cases of a test marked ``in_turn(n)`` the first and about one in n run by default; the others are slow.

    Every test has a default case. A run without slow tests makes no items of slow cases, and one of smoke tests makes
    no others: that would take seconds of each worker.
    """

    def __init__(self, markexpr: str) -> None:
        self.no_slow, self.only_smoke = markexpr.startswith("not slow"), markexpr == "smoke"
        self.without_default: list[str] = []

    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
        if not callable(obj) or isinstance(obj, type) or not name.startswith("test"):
            return None
        names = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
        if "slow" in names:
            self.without_default.append(f"{collector.nodeid}::{name}")
        return [] if self.only_smoke and "smoke" not in names else None

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        slow, open_cases = set(), []
        for place, case in enumerate(metafunc._calls):  # after the marks `parametrize` have made them
            marks = {mark.name: mark for mark in (*metafunc.definition.iter_markers(), *case.marks)}
            if "slow" in marks:
                slow.add(place)
            elif "in_turn" in marks:
                open_cases.append((place, case, marks["in_turn"].args[0]))
        for place, case, n in open_cases[1:]:
            if part_of(f"{metafunc.definition.nodeid}[{case.id}]", n):
                slow.add(place)
                case.marks.append(pytest.mark.slow.mark)
        if metafunc._calls and len(slow) == len(metafunc._calls):
            self.without_default.append(metafunc.definition.nodeid)
        if (self.no_slow or self.only_smoke) and len(slow) < len(metafunc._calls):
            metafunc._calls = [case for place, case in enumerate(metafunc._calls) if place not in slow]

    def pytest_collection_modifyitems(self) -> None:
        if self.without_default:
            named = "\n".join(dict.fromkeys(self.without_default))
            raise pytest.UsageError(
                f"these tests have no default case (mark some cases slow, or the test in_turn(n)):\n{named}"
            )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One of `--parts` parts of those that `-m` has selected."""
    parts, part = (int(str(config.getoption(name))) for name in ("--parts", "--part"))
    if not 0 <= part < parts:
        raise pytest.UsageError(f"--part={part} must be from 0 to {parts - 1}, with --parts={parts}")
    left_out = [item for item in items if part_of(item.nodeid, parts) != part]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if part_of(item.nodeid, parts) == part]


# -- the turns of CI ---------------------------------------------------------------------------------------------------


def collected(marks: str) -> list[str]:
    """The ids of the tests that `-m` selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", marks]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"pytest could not collect the tests:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return [line for line in run.stdout.splitlines() if "::" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="how many values, the last one included; default 8")
    parser.add_argument("--parts", type=int, default=8, help="into how many parts CI divides the tests; default 8")
    parser.add_argument("-m", dest="marks", default="slow and not programs", help="which tests")
    options = parser.parse_args()
    last = runpy.run_path(str(ROOT / ".ci" / "next_turn.py"))["read"]()
    tests = collected(options.marks)
    by_part = collections.defaultdict(list)
    for test in tests:
        by_part[part_of(test, options.parts)].append(test)
    ran: set[str] = set()
    for turn in range(last - options.turns + 1, last + 1):
        part = turn % options.parts
        ran.update(by_part[part])
        print(f"turn {turn}: part {part} of {options.parts}, {len(by_part[part])} tests")
    print(f"{len(ran)} of {len(tests)} tests in {options.turns} turns")
    return int(len(ran) < len(tests))


if __name__ == "__main__":
    sys.exit(main())
