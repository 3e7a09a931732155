"""The gallery: pages made from the scripts of examples/, which run while the pages are built.

``gallery.toml`` lists the scripts. Each one runs with ``--plot``; its page in ``gallery/`` has the text at its head,
the picture, the printed lines, the source, and a notebook to download. A script runs again only after it, or a file of
the package, has changed. A build without ``-t gallery`` runs none: its pages are those of scripts that ran before.

A script that fails, or passes its limit of processor time, is left out with a warning; ``gallery/NAME.log`` has what it
printed. The other pages are built.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import processes

DOCS = Path(__file__).resolve().parents[1]
ROOT, FOLDER, EXAMPLES = DOCS.parent, DOCS / "gallery", DOCS.parent / "examples"
PARSING = Lock()  # CPython 3.11 counts the depth of `ast.parse` for all threads together


@dataclass(frozen=True)
class Example:
    """One block of gallery.toml."""

    script: str
    title: str
    learn: str
    arguments: tuple[str, ...] = ("--small",)

    @property
    def path(self) -> Path:
        """The program: a file, or that of a folder."""
        single = EXAMPLES / f"{self.script}.py"
        return single if single.exists() else EXAMPLES / self.script / "__main__.py"

    @property
    def place(self) -> str:
        """What Python is given to run it."""
        return source_of(self.path).removesuffix("/__main__.py")

    @property
    def picture(self) -> Path:
        return FOLDER / f"{self.script}.png"

    @property
    def command(self) -> str:
        return " ".join(["python", self.place, *self.arguments])


def source_of(path: Path) -> str:
    """The place of a program in the repository."""
    return f"examples/{path.relative_to(EXAMPLES).as_posix()}"


def examples(table: Path = DOCS / "gallery.toml") -> list[Example]:
    """The blocks of the table, in its order."""
    blocks = tomllib.loads(table.read_text(encoding="utf-8"))["example"]
    return [Example(**{**block, "arguments": tuple(block.get("arguments", ("--small",)))}) for block in blocks]


def needed(script: Path) -> list[Path]:
    """A script and the others beside it that it imports, the imported ones first."""
    with PARSING:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    beside = [path for name in names if (path := script.parent / f"{name}.py").exists()]
    return [*dict.fromkeys(each for path in beside for each in needed(path)), script]


# -- runs --------------------------------------------------------------------------------------------------------------
def stamp(example: Example) -> str:
    """A digest of all that the run depends on."""
    return processes.digest_of(repr(example.arguments), *(path.read_bytes() for path in needed(example.path)))


def kept(example: Example) -> str | None:
    """The printed lines of the last run, if nothing has changed since."""
    file = FOLDER / f"{example.script}.json"
    if not file.exists() or not example.picture.exists():
        return None
    before = json.loads(file.read_text(encoding="utf-8"))
    return before["output"] if before["stamp"] == stamp(example) else None


def run(example: Example, limit: float = processes.LIMIT) -> str:
    """The printed lines of a script, which also draws its picture; those of the last run if nothing has changed.

    RuntimeError if it fails, passes the limit or draws nothing.
    """
    before = kept(example)
    if before is not None:
        return before
    command = [sys.executable, str(example.path), *example.arguments, "--plot", str(example.picture)]
    ended = processes.run(command, ROOT, limit)
    log = FOLDER / f"{example.script}.log"
    log.write_text(ended.output + ended.errors, encoding="utf-8")
    fault = ended.fault or ("" if example.picture.exists() else "it drew nothing")
    if fault:
        last = "\n".join((ended.output + ended.errors).splitlines()[-15:])
        raise RuntimeError(f"{example.command} is left out: {fault}. {log} has all that it printed; the end:\n{last}")
    lines = [line for line in ended.output.splitlines() if not line.startswith("wrote ")]
    output = "\n".join(lines).rstrip() + "\n"
    text = json.dumps({"stamp": stamp(example), "output": output})
    (FOLDER / f"{example.script}.json").write_text(text, encoding="utf-8")
    return output


# -- pages -------------------------------------------------------------------------------------------------------------
def said(example: Example) -> str:
    """The text at the head of a script, as Markdown: its commands are indented, so they stand as code."""
    text = ast.get_docstring(ast.parse(example.path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"([|*])", r"\\\1", text)


def page(example: Example, output: str) -> str:
    name, place = example.script, source_of(example.path)
    others = needed(example.path)[:-1] if place != example.place else []
    beside = "".join(f"\n{_included(source_of(path))}" for path in others)
    return f"""# {example.title}

**You learn:** {example.learn}

```{{image}} {name}.png
:alt: {example.title}
:class: picture
```

{said(example)}

Download: {{download}}`the script <../../{place}>`, {{download}}`a notebook <{name}.ipynb>`.

## Printed

The picture and these lines are from `{example.command}`, run while this page was built.

```{{code-block}} text
:class: output

{output}```

## The program

{_included(place)}{beside}"""


def _included(place: str) -> str:
    return f"""```{{literalinclude}} ../../{place}
:language: python
```
"""


def index(shown: Iterable[Example], others: Iterable[Example] = ()) -> str:
    """The first page: a card for each example with a page, and a line for each of the others."""
    cards, names = [], []
    for example in shown:
        name = example.script
        names.append(name)
        title = example.title
        card = f"[![{title}](thumbnails/{name}.png)]({name}.md)\n\n**[{title}]({name}.md)**\n\n{example.learn}"
        cards.append(f":::{{container}} card\n{card}\n:::")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    lines = [f"* **{example.title}** (`{example.command}`). {example.learn}" for example in others]
    rest = "\n".join(["\n## Not run in this build\n", *lines, ""]) if lines else ""
    grid = "\n\n".join(["::::{container} gallery\n", *cards, "::::\n"]) if cards else ""
    start = "# Gallery\n\nEach page shows one experiment: a picture, a program to copy, and a notebook.\n\n"
    return f"{start}{grid}{rest}\n{tree}\n"


# -- notebooks ---------------------------------------------------------------------------------------------------------
def notebook(example: Example) -> dict[str, Any]:
    """A notebook of the script: its text, its parts, a run, and the picture; a document of nbformat 4.5."""
    install = 'pip install "jchop[study]"  # from a clone: pip install ".[study]"'
    cells = [_markdown(f"# {example.title}\n\n**You learn:** {example.learn}\n\n{said(example)}")]
    cells.append(_markdown(f"Needs `{install.split('  #')[0]}`."))
    for other in needed(example.path)[:-1]:
        cells.append(_code(f"%%writefile {other.name}\n" + other.read_text(encoding="utf-8")))
    cells += map(_code, parts(example.path.read_text(encoding="utf-8")))
    words = [f"{example.script}.py", *example.arguments, "--plot", f"{example.script}.png"]
    cells.append(_code(f"import sys\n\nsys.argv = {words!r}\nmain()"))
    cells.append(_code(f'from IPython.display import Image\n\nImage("{example.script}.png")'))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def parts(source: str) -> list[str]:
    """A script in pieces: imports and constants together, each function alone; without its head and its end."""
    tree, lines = ast.parse(source), source.splitlines()
    body = tree.body[1 if ast.get_docstring(tree) else 0 :]
    found: list[str] = []
    alone = True  # whether the next statement begins a piece
    last = body[0].lineno - 1
    for node in body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        text = "\n".join(lines[last : node.end_lineno]).strip("\n")
        last = node.end_lineno or last
        large = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if alone or large:
            found.append(text)
        else:
            found[-1] += "\n" + "\n".join(["", text] if text.startswith("#") else [text])
        alone = large
    return found


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict[str, Any]:
    lines = text.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}


# -- Sphinx ------------------------------------------------------------------------------------------------------------
def write(path: Path, text: str) -> None:
    """Writes a file unless it is there already, so that Sphinx does not read it again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def build(chosen: list[Example], to_run: bool) -> list[str]:
    """Runs the scripts, and writes pages, thumbnails and notebooks; returns what went wrong."""
    from PIL import Image

    faults: list[str] = []

    def attempt(example: Example) -> str | None:
        try:
            return run(example) if to_run else kept(example)
        except RuntimeError as error:
            faults.append(str(error))
            return None

    (FOLDER / "thumbnails").mkdir(parents=True, exist_ok=True)
    outputs = dict(zip(chosen, processes.each(attempt, chosen), strict=True))
    for example, output in outputs.items():
        files = [FOLDER / f"{example.script}.{suffix}" for suffix in ("md", "ipynb")]
        if output is None:
            for file in files:
                file.unlink(missing_ok=True)
            continue
        write(files[0], page(example, output))
        write(files[1], json.dumps(notebook(example), indent=1, ensure_ascii=False) + "\n")
        with Image.open(example.picture) as picture:
            picture.thumbnail((picture.width * 2 // 5, picture.height * 2 // 5))
            picture.save(FOLDER / "thumbnails" / example.picture.name)
    shown = [example for example, output in outputs.items() if output is not None]
    write(FOLDER / "index.md", index(shown, [example for example in chosen if example not in shown]))
    return faults


def report(app: Any) -> None:
    from sphinx.util import logging

    for fault in build(examples(), app.tags.has("gallery")):
        logging.getLogger(__name__).warning("%s", fault, type="gallery")


def not_edited(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """No link to edit a page that a build writes, of the gallery or of the reference."""
    if name.startswith((f"{FOLDER.name}/", "reference/")):
        context["page_source_suffix"] = ""


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", report)
    app.connect("html-page-context", not_edited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
