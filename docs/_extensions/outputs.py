"""What the programs of a page print stands below them, and long results stand on a line of their own.

The Python blocks of a page run in turn, as its test runs them, if one of them prints. They run again only after they,
or a file of the package, have changed. So the pages have programs alone, and no output that could be out of date.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import processes

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
RESULT = re.compile(r"^( *)(\S.*?)  # -> (.*)$", re.MULTILINE)
WIDTH = 42  # characters of a line of code that a phone shows whole
PHONE, REPORT = 60, 120  # of a printed line; jchop.css makes letters of longer ones smaller, and breaks those beyond


def programs(text: str) -> list[str]:
    """The Python blocks of a page up to the last one that prints."""
    found = [match[1] for match in BLOCK.finditer(text)]
    while found and not re.search(r"^ *print\(", found[-1], re.MULTILINE):
        found.pop()
    return found


def printed(blocks: list[str]) -> list[str]:
    """Runs blocks, which share their names; returns what each one prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for block in blocks:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            exec(compile(block, "program.py", "exec"), names)
        outputs.append(text.getvalue())
    return outputs


def output_of(page: str, blocks: list[str], folder: Path) -> list[str]:
    """What the blocks of a page print, or printed in an earlier build of the same; RuntimeError if they fail."""
    stamp = processes.digest_of(*blocks)
    file = folder / f"{page.replace('/', '.')}.json"
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8")))["stamp"] == stamp:
        return before["outputs"]
    with tempfile.TemporaryDirectory() as place:
        given, result = Path(place, "blocks.json"), Path(place, "outputs.json")
        given.write_text(json.dumps(blocks), encoding="utf-8")
        ended = processes.run([sys.executable, __file__, str(given), str(result)], Path(place))
        if ended.fault:
            raise RuntimeError(f"{page}.md is shown without what it prints: {ended.fault}\n{ended.errors[-2000:]}")
        outputs = json.loads(result.read_text(encoding="utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"stamp": stamp, "outputs": outputs}), encoding="utf-8")
    return outputs


def shown(text: str, outputs: list[str]) -> str:
    """The text of a page with outputs below its blocks, and with long results on a line of their own."""
    rest = iter(outputs)

    def below(match: re.Match[str]) -> str:
        block = RESULT.sub(lambda m: m[0] if len(m[0]) <= WIDTH else f"{m[1]}{m[2]}\n{m[1]}# -> {m[3]}", match[1])
        output = next(rest, "").rstrip()
        lines = "\n".join(line.rstrip() for line in output.splitlines())
        columns = max(map(len, lines.splitlines()), default=0)
        wide = " columns-more" if columns > REPORT else f" columns-{-(-columns // 10) * 10}" if columns > PHONE else ""
        fence = f"\n````{{code-block}} text\n:class: output{wide}\n\n{lines}\n````\n" if output else ""
        return f"```python\n{block}```\n{fence}"

    return BLOCK.sub(below, text)


# -- Sphinx ------------------------------------------------------------------------------------------------------------
def run_pages(app: Any, env: Any, *given: Any) -> list[str]:
    """Runs the programs of all pages; returns the pages that print other lines than in the last build."""
    from sphinx.util import logging

    pages = {page: programs(Path(env.doc2path(page)).read_text(encoding="utf-8")) for page in env.found_docs}
    pages = {page: blocks for page, blocks in pages.items() if blocks}

    def attempt(page: str) -> list[str]:
        try:
            return output_of(page, pages[page], Path(app.doctreedir) / "outputs")
        except RuntimeError as error:
            log = logging.getLogger(__name__)
            absent = "ModuleNotFoundError" in str(error)  # PyTorch is in none of the extras
            (log.info if absent else log.warning)("%s", error)
            return []

    outputs = dict(zip(pages, processes.each(attempt, pages), strict=True))
    before, env.page_outputs = getattr(env, "page_outputs", {}), outputs
    return [page for page in outputs if before.get(page) != outputs[page]]


def show(app: Any, page: str, source: list[str]) -> None:
    """Puts the outputs into the text that Sphinx reads."""
    source[0] = shown(source[0], app.env.page_outputs.get(page, []))


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-get-outdated", run_pages)
    app.connect("source-read", show)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(printed(json.loads(Path(sys.argv[1]).read_text()))), encoding="utf-8")
