"""README.md and the documentation pages say only what is so: their code runs, and gives the results they show.

In a ```python block, an expression followed by `# -> text` must have that representation (comment lines below it that
are indented, `#    text`, go on with it). In a ```console block, each `$ jchop ...` line is run, and what follows it
must be what it prints.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from each_case import each
from further import Further

further = Further()

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [
        ROOT / "README.md",
        *(page for folder in ("docs", "docs/tasks", "docs/measurements") for page in (ROOT / folder).glob("*.md")),
    ]
    if "```python\n" in page.read_text(encoding="utf-8")
)
#: Pages whose code needs a package that is no part of the test environment.
NEEDS = {"docs/torch.md": "torch", "docs/tasks/torch_user.md": "torch", "docs/programs.md": "equinox"}
#: Pages that a newcomer does not begin with, which are for the slow run.
LONG = {page for page in PAGES if page not in ("README.md", "docs/index.md", "docs/formats.md")}
SMALL_STUDY = ["--epochs", "1", "--seeds", "1", "--modes", "nearest_even,stochastic"]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESULT = re.compile(r"\s*# -> (.*)$")


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """(number of the first line, text) of every fenced block of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2]) for match in _BLOCK.finditer(text) if match[1] == language
    ]


def expected_result(lines: list[str], statement: ast.stmt, next_line: int) -> str | None:
    """What stands after `# ->` on the last line of a statement or below it, up to the next statement."""
    assert statement.end_lineno is not None
    below = lines[statement.end_lineno : next_line - 1]
    found = _RESULT.search(lines[statement.end_lineno - 1])
    if found is None and below:
        found, below = _RESULT.match(below[0]), below[1:]
    if found is None:
        return None
    more = itertools.takewhile(lambda line: line.lstrip().startswith("#   "), below)
    return " ".join([found[1].strip(), *(line.strip(" #") for line in more)])


def run_python(block: str, namespace: dict[str, Any], where: str) -> None:
    """Runs a block statement by statement in `namespace` and compares what it shows."""
    lines = block.splitlines()
    statements = ast.parse(block).body
    starts = [statement.lineno for statement in statements[1:]] + [len(lines) + 1]
    for statement, next_line in zip(statements, starts, strict=True):
        expected = expected_result(lines, statement, next_line)
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), where, "eval"), namespace)
            if expected is not None:
                assert " ".join(repr(value).split()) == expected, f"{where}: {ast.unparse(statement)}"
        else:
            assert expected is None, f"{where}: a result stands after a statement that has none"
            exec(compile(ast.Module([statement], []), where, "exec"), namespace)


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES])
def python_blocks_run_and_show_what_they_give(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)  # for files that a page writes
    namespace: dict[str, Any] = {}
    for line, block in blocks(page, "python"):
        run_python(block, namespace, f"{page}:{line}")


def console_lines() -> list[tuple[str, str]]:
    """(command, shown output) of every `$ jchop` line on the page of the command line."""
    result = []
    for _, block in blocks("docs/command_line.md", "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            result.append((command, shown.strip("\n")))
    return result


def test_the_main_pages_show_code() -> None:
    assert {"README.md", "docs/index.md", "docs/formats.md", "docs/numerics.md"} <= set(PAGES)


def test_a_page_shows_the_command_line() -> None:
    verbs = {command.split()[1] for command, _ in console_lines()}
    assert verbs >= {"formats", "info", "round", "study"}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(*line, marks=[pytest.mark.slow] * line[0].startswith("jchop study")) for line in console_lines()],
)
def test_console_lines_run_and_print_what_is_shown(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jchop.__main__ import main

    program, *arguments = shlex.split(command, comments=True)
    assert program == "jchop"
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "study":
        arguments += SMALL_STUDY
    assert not main(arguments)
    printed = [line.rstrip() for line in capsys.readouterr().out.strip("\n").splitlines()]
    lines = shown.splitlines()
    if lines and lines[-1].strip() == "...":  # the rest is left out
        lines.pop()
        printed = printed[: len(lines)]
    if arguments[0] != "study" and lines:
        assert printed == [line.rstrip() for line in lines]


@further.first
def commands_for_a_fresh_machine_are_marked() -> None:
    """.ci/run takes the two set-up commands from README.md by these marks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark, last in (("study", "jchop study"), ("tests", "pytest -n 2")):
        found = re.search(rf"<!-- ci:{mark} -->\n+```sh\n(.*?)\n```\n", text, re.DOTALL)
        assert found is not None, mark
        assert found[1].endswith(last), found[1]


@each("folder", [".", "docs", "docs/tasks", "docs/measurements", "examples/llama"])
def test_links_have_a_text_and_a_file(folder: str) -> None:
    """Pages are read as plain Markdown, too: nothing is there that only Sphinx makes."""
    for page in (ROOT / folder).glob("*.md"):
        links = re.findall(r"\[([^][]*)\]\(([^)#\s]*)[^)]*\)", _BLOCK.sub("", page.read_text(encoding="utf-8")))
        for text, target in links:
            assert text and ("://" in target or (page.parent / target).exists()), (page, text, target)


test_further = further.test()
