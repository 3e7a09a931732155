"""Which tests a run takes: by the id of each test alone, so that every slow test runs and none moves."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from selection import part_of

TESTS = Path(__file__).parent
NEXT_TURN = TESTS.parent / ".ci" / "next_turn.py"

TABLE = """
import pytest

@pytest.mark.in_turn(4)
@pytest.mark.parametrize("number", [{numbers}])
def test_table(number):
    pass

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_marked(number):
    pass
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Pytest with the selection alone: neither `conftest.py` nor JAX."""
    (folder / "test_it.py").write_text(text, "utf-8")
    markers = "slow: s\n  in_turn(n): t\n  smoke: s"
    (folder / "pytest.ini").write_text(
        f"[pytest]\naddopts = -p selection -p no:cacheprovider\nmarkers =\n  {markers}\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@functools.cache
def selected(folder: Path, text: str, *options: str) -> set[str]:
    done = run(folder, text, *options)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def table(numbers: range) -> str:
    return TABLE.format(numbers=", ".join(map(str, numbers)))


def test_parts_hold_every_slow_test_once(tmp_path: Path) -> None:
    slow = selected(tmp_path, table(range(40)), "-m", "slow")
    parts = [selected(tmp_path, table(range(40)), "-m", "slow", "--parts=3", f"--part={k}") for k in range(3)]
    assert set.union(*parts) == slow and sum(map(len, parts)) == len(slow) > 20
    every = selected(tmp_path, table(range(40)))
    assert every == slow | selected(tmp_path, table(range(40)), "-m", "not slow") and len(every) == 42


def test_a_new_case_moves_no_other(tmp_path: Path) -> None:
    """Neither to another part, nor between the default run and the slow one."""
    for options in (["-m", "slow", "--parts=3", "--part=1"], ["-m", "not slow"]):
        before, after = (selected(tmp_path, table(range(n)), *options) for n in (30, 33))
        assert before and before <= after
        assert all(int(name.split("[")[1][:-1]) >= 30 for name in after - before)


def test_the_first_case_runs_by_default(tmp_path: Path) -> None:
    default = selected(tmp_path, table(range(40)), "-m", "not slow")
    assert "test_it.py::test_table[0]" in default
    chosen = {f"test_it.py::test_table[{i}]" for i in range(1, 40) if part_of(f"test_it.py::test_table[{i}]", 4) == 0}
    assert default == chosen | {"test_it.py::test_table[0]", "test_it.py::test_marked[1]"} and len(chosen) > 3


ALL_SLOW = """
import pytest
slow = pytest.mark.slow

@slow
def test_function():
    pass

class TestThem:
    @slow
    def test_method(self):
        pass

@pytest.mark.parametrize("x", [pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_cases(x):
    pass

def test_other():
    pass
"""


@pytest.mark.parametrize("marks", ["not slow", ""])
def test_a_test_without_default_case_is_an_error(tmp_path: Path, marks: str) -> None:
    done = run(tmp_path, ALL_SLOW, "-m", marks)
    assert done.returncode == 4 and "no default case" in done.stderr and "test_other" not in done.stderr
    assert all(name in done.stderr for name in ("test_function", "TestThem::test_method", "test_cases"))
    done = run(tmp_path, "import pytest\npytestmark = pytest.mark.slow\ndef test_alone(): pass", "-m", marks)
    assert done.returncode == 4 and "test_alone" in done.stderr


def test_a_part_that_does_not_exist(tmp_path: Path) -> None:
    done = run(tmp_path, table(range(3)), "--parts=4", "--part=4")
    assert done.returncode == 4 and "--part=4 must be from 0 to 3" in done.stderr


def test_the_last_turns_have_run_every_slow_test() -> None:
    """`python tests/selection.py` lists them: here without collecting, as any ids will do."""
    turn = runpy.run_path(str(NEXT_TURN))["read"]()
    tests = [f"tests/test_{i % 7}.py::test_it[{i}]" for i in range(500)]
    ran = {test for value in range(turn - 7, turn + 1) for test in tests if part_of(test, 8) == value % 8}
    assert ran == set(tests)


@pytest.mark.parametrize("text", [None, "", "two", "-1", "1.5", "٣"])
def test_a_turn_that_is_no_integer_is_an_error(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "next_turn.py"
    script.write_bytes(NEXT_TURN.read_bytes())
    if text is not None:
        (tmp_path / "turn").write_text(text, "utf-8")
    for arguments in ([], ["--check"]):
        done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
        assert done.returncode == 1 and "write one integer" in done.stderr and str(tmp_path / "turn") in done.stderr


def test_the_turn_is_raised_by_one(tmp_path: Path) -> None:
    script = tmp_path / "next_turn.py"
    script.write_bytes(NEXT_TURN.read_bytes())
    (tmp_path / "turn").write_text("41\n", "utf-8")
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    done = subprocess.run([sys.executable, str(script), "--check"], check=True, capture_output=True, text=True)
    assert done.stdout == "42\n"


def test_a_turn_that_was_not_raised_is_said(tmp_path: Path) -> None:
    script, turn = tmp_path / ".ci" / "next_turn.py", tmp_path / ".ci" / "turn"
    script.parent.mkdir()
    script.write_bytes(NEXT_TURN.read_bytes())
    turn.write_text("3\n", "utf-8")

    def commit(hour: int) -> str:
        date = f"2026-01-01T{hour:02}:00:00+00:00"
        env = {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        names = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", "-C", str(tmp_path), "add", "-A"], check=True, env=env)
        command = ["git", "-C", str(tmp_path), *names, "commit", "-q", "--allow-empty", "-m", "x"]
        subprocess.run(command, check=True, env=env)
        said = subprocess.run([sys.executable, str(script), "--check"], check=True, capture_output=True, text=True)
        return said.stderr

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env={"PATH": "/usr/bin:/bin"})
    assert commit(1) == ""
    assert commit(3) == ""  # one submission has several commits
    assert ".ci/turn is 3 as before" in commit(8)
    turn.write_text("4\n", "utf-8")
    assert commit(9) == ""
