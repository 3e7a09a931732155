"""The gallery: pages made from the scripts of examples/, which run while the pages are built.

``gallery.toml`` lists the scripts. Each one runs with ``--plot``; its page in ``gallery/`` has the text at its head,
the picture, the printed lines, the source, and a notebook to download. A script runs again only after it, or a file of
the package, has changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT, FOLDER, EXAMPLES = DOCS.parent, DOCS / "gallery", DOCS.parent / "examples"
WORKERS, LIMIT = 2, 600  # scripts at once; seconds of each
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
    digest = hashlib.sha256(repr(example.arguments).encode())
    for path in [*needed(example.path), *sorted(ROOT.glob("jchop/**/*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(example: Example) -> str:
    """The printed lines of a script, which also draws its picture; those of the last run if nothing has changed."""
    kept, now = FOLDER / f"{example.script}.json", stamp(example)
    if kept.exists() and example.picture.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["stamp"] == now:
            return before["output"]
    command = [sys.executable, str(example.path), *example.arguments, "--plot", str(example.picture)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT)
    if done.returncode or not example.picture.exists():
        raise RuntimeError(f"{example.command} failed, or drew nothing:\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("wrote ")]
    output = "\n".join(lines).rstrip() + "\n"
    kept.write_text(json.dumps({"stamp": now, "output": output}), encoding="utf-8")
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

```text
{output}```

## The program

{_included(place)}{beside}"""


def _included(place: str) -> str:
    return f"""```{{literalinclude}} ../../{place}
:language: python
```
"""


def index(chosen: Iterable[Example]) -> str:
    cards, names = [], []
    for example in chosen:
        name = example.script
        names.append(name)
        title = example.title
        card = f"[![{title}](thumbnails/{name}.png)]({name}.md)\n\n**[{title}]({name}.md)**\n\n{example.learn}"
        cards.append(f":::{{container}} card\n{card}\n:::")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    return (
        "# Gallery\n\nEach page shows one experiment: a picture, a program to copy, and a notebook. All of them run "
        "in less than a minute.\n\n::::{container} gallery\n" + "\n\n".join(cards) + f"\n::::\n\n{tree}\n"
    )


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


def build(chosen: list[Example]) -> None:
    """Runs the scripts, and writes pages, thumbnails and notebooks."""
    from matplotlib.image import thumbnail

    (FOLDER / "thumbnails").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(WORKERS) as pool:
        outputs = list(pool.map(run, chosen))
    for example, output in zip(chosen, outputs, strict=True):
        write(FOLDER / f"{example.script}.md", page(example, output))
        write(FOLDER / f"{example.script}.ipynb", json.dumps(notebook(example), indent=1, ensure_ascii=False) + "\n")
        thumbnail(example.picture, FOLDER / "thumbnails" / example.picture.name, scale=0.4)
    write(FOLDER / "index.md", index(chosen))


def not_edited(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """No link to edit a page that a build writes."""
    if name.startswith(f"{FOLDER.name}/"):
        context["page_source_suffix"] = ""


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: build(examples()))
    app.connect("html-page-context", not_edited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
