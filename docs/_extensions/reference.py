"""The reference: a page for each module or room of the package, made from its `__all__` while the pages are built.

A class that a public function returns, or that such a class holds, stands on the same page, also if it is in no
`__all__`. So nobody edits a list when a name comes or goes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jchop

FOLDER = Path(__file__).resolve().parents[1] / "reference"
#: Modules whose names for users are those of `jchop` itself; the others are for its own files.
INTERNAL = {"accumulation", "gradients", "rounding", "spec"}
#: Modules for users of other packages (docs/compat.md); their other modules have the names of those packages.
COMPAT = ("compat.pychop", "compat.qtorch", "compat.qtorch.quant", "compat.piquant")
#: The extras that the environment of the pages may lack.
OPTIONAL = {"torch", "optax", "flax", "matplotlib", "sklearn", "dask", "qwix"}

#: Classes for jchop's own files, which some public methods return; the reference has neither.
INSIDE = {"QuantizedProgram", "CallArguments", "ScaleSlot", "QArrayForm", "KVRows", "Packing", "Transformation",
          "LoraAdapter", "WeightLayout", "MatrixLayout"}  # fmt: skip
#: Classes that a public name gives where its annotation is `Any`.
GIVEN = {"QuantizedFunction": "StoredAs"}

#: Room or module -> the page on which its names stand, if that is not its own.
PAGES = {"_round": "rounding", "_spec": "rounding", "dict": "rounding", "_serving": "quantized",
         "_checkpoints": "storage", "study.network": "study"} | dict.fromkeys(COMPAT, "compat")  # fmt: skip
#: Page -> its title, and the pages that explain it. A page without a row has the name of its module or room.
TITLES = {
    "rounding": ("Rounding and specifications", "numerics.md", "formats.md"),
    "formats": ("Formats", "formats.md"),
    "storage": ("Packed arrays and files", "storage.md", "checkpoints.md"),
    "emulate": ("Emulated functions", "emulate.md"),
    "insight": ("Errors, digits and searches for formats", "blame.md", "digits.md", "tune.md", "which_format.md"),
    "math": ("Mathematical functions", "math.md"),
    "math.linalg": ("Linear algebra", "math.md"),
    "quantized": ("Quantized functions, and attention", "programs.md", "serving.md"),
    "nn": ("Quantized models", "nn.md"),
    "ptq": ("Rounding with data", "ptq.md"),
    "sparsity": ("Sparsity", "ptq.md"),
    "optim": ("Optimizers", "optim.md"),
    "distributed": ("Several devices", "distributed.md"),
    "torch": ("PyTorch", "torch.md"),
    "plot": ("Pictures", "which_format.md"),
    "study": ("The study", "which_format.md"),
    "matlab": ("MATLAB", "matlab.md"),
    "compat": ("Interfaces of other packages", "compat.md"),
}


# -- names -------------------------------------------------------------------------------------------------------------
def modules() -> list[str]:
    """The modules with names for users, those of `jchop.compat` last."""
    found = [m.name for m in pkgutil.walk_packages(jchop.__path__, "jchop.") if is_public(m.name)]
    return ["jchop", *sorted(found, key=lambda name: name.count(".")), *(f"jchop.{name}" for name in COMPAT)]


def is_public(name: str) -> bool:
    """Whether a module has names for users; those of `jchop.compat` are other packages' own (docs/compat.md)."""
    parts = name.split(".")
    return not any(part.startswith("_") for part in parts) and parts[1] not in {"compat", *INTERNAL}


def names_of(module: str) -> dict[str, Any]:
    """The public names of a module and their values; None is a value whose package is not installed."""
    try:
        names = getattr(importlib.import_module(module), "__all__", ())
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)]
        return dict.fromkeys(ast.literal_eval(lists[0])) if lists else {}
    found = {}
    for name in names:
        try:
            found[name] = getattr(sys.modules[module], name)
        except ModuleNotFoundError:
            found[name] = None
    return found


def public_names() -> dict[str, Any]:
    """Each public object under the shortest path to it, but for modules and formats (docs/formats.md has those)."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}
    other = ModuleType | jchop.formats.ElementFormat | jchop.formats.ScaledFormat
    for module in modules():
        for name, thing in names_of(module).items():
            path = f"{module}.{name}"
            if not isinstance(thing, other) and (thing is None or first.setdefault(id(thing), path) == path):
                found[path] = thing
    return found


def classes() -> dict[str, type]:
    """All public classes of the package by their names, of which there are no two alike."""
    for module in pkgutil.walk_packages(jchop.__path__, "jchop."):
        if "compat" not in module.name and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue  # an extra is missing
    return {
        name: thing
        for key, module in list(sys.modules.items())
        if key.startswith("jchop.") and "compat" not in key
        for name, thing in vars(module).items()
        if isinstance(thing, type) and thing.__module__ == key and not name.startswith("_")
    }


def result_of(member: Any) -> str:
    """What a function, method or property returns, as text."""
    function = getattr(member, "fget", None) or getattr(member, "func", None) or member
    return str(getattr(function, "__annotations__", {}).get("return", ""))


def annotated(thing: Any) -> Iterator[str]:
    """What a function returns, or the described fields, methods and properties of a class hold, as text."""
    if not isinstance(thing, type):
        yield result_of(thing)
        return
    text = inspect.getdoc(thing) or ""
    for name, annotation in vars(thing).get("__annotations__", {}).items():
        if re.search(rf"^\s*{name}:", text, re.MULTILINE):
            yield str(annotation)
    yield from (result_of(getattr(thing, name, None)) for name in vars(thing) if not name.startswith("_"))


def received(thing: Any, known: dict[str, type], seen: set[type]) -> Iterator[type]:
    """The classes that users get from a public name and that are not public themselves; `seen` gets them, too."""
    for text in [*annotated(thing), GIVEN.get(getattr(thing, "__name__", ""), "")]:
        for name in re.findall(r"\b[A-Z]\w+", text):
            kind = known.get(name)
            if kind is not None and kind not in seen and name not in INSIDE:
                seen.add(kind)
                yield kind
                yield from received(kind, known, seen)


# -- pages -------------------------------------------------------------------------------------------------------------
def page_of(path: str, thing: Any) -> str:
    """The page of a name: that of its module, or for a name of `jchop` itself that of the room that defines it."""
    module = path.rpartition(".")[0].removeprefix("jchop").lstrip(".")
    room = module or getattr(thing, "__module__", "jchop.dict").split(".")[1]
    return PAGES.get(room, room.lstrip("_"))


def pages() -> dict[str, dict[str, Any]]:
    """page -> its names and their objects, received classes behind the name that leads to them."""
    public, known = public_names(), classes()
    seen = {thing for thing in public.values() if isinstance(thing, type)}
    found: dict[str, dict[str, Any]] = {}
    for path, thing in public.items():
        page = found.setdefault(page_of(path, thing), {})
        page[path] = thing
        if thing is not None:
            page |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in received(thing, known, seen)}
    return found


def entry(path: str, thing: Any) -> str:
    """The directive of a name. The fields of a class stand in its docstring, and not again as members."""
    if not isinstance(thing, type):
        keys = ", ".join(f"``{key!r}``" for key in thing) if not callable(thing) else ""
        return f".. autofunction:: {path}" if callable(thing) else f".. py:data:: {path}\n\n   Has {keys}."
    fields = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    fields += getattr(thing, "_fields", ())
    fields += [name for name in vars(thing) if any(kind in result_of(getattr(thing, name, None)) for kind in INSIDE)]
    hidden = f"\n   :exclude-members: {', '.join(fields)}" if fields else ""
    return f".. autoclass:: {path}{hidden}"


def summary(thing: Any) -> str:
    """The first sentence of a docstring, for a table."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    sentence = re.split(r"[.:;](?: |$)", text)[0] + "."
    return sentence.replace("|", r"\|").replace("*", r"\*") if callable(thing) else ""


def page_text(page: str, names: dict[str, Any]) -> str:
    module = importlib.util.find_spec(f"jchop.{page}")
    title, *guides = TITLES.get(page, (f"`jchop.{page}`" if module else page.capitalize(),))
    parts = [f"# {title}"]
    if guides:
        parts.append("Explained in " + ", ".join(f"[](../{guide})" for guide in guides) + ".")
    here = {path: thing for path, thing in names.items() if thing is not None}
    if len(here) > 3:
        rows = [f"| {{py:obj}}`~{path}` | {summary(thing)} |" for path, thing in here.items() if "._" not in path]
        parts.append("\n".join(["| name | |", "|---|---|", *rows]))
    if any("._" in path for path in here):
        parts.append("A class under a path with an underscore is what a function returns, and no name to import.")
    if len(here) < len(names):
        absent = ", ".join(f"`{path}`" for path in names if path not in here)
        parts.append(f"The package of these names was not there when this page was built; `help` has them: {absent}.")
    if here:
        parts.append("```{eval-rst}\n" + "\n\n".join(entry(*item) for item in here.items()) + "\n```")
    return "\n\n".join(parts) + "\n"


def build() -> None:
    """Writes the pages that have changed, and removes those of modules that are gone."""
    FOLDER.mkdir(exist_ok=True)
    texts = {f"{page}.md": page_text(page, names) for page, names in pages().items()}
    for file in FOLDER.glob("*.md"):
        if file.name not in texts:
            file.unlink()
    for name, text in texts.items():
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text:
            (FOLDER / name).write_text(text, encoding="utf-8")


def escape_bars(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keeps the bars of a magnitude, which reStructuredText would replace."""
    lines[:] = [line if ">>>" in line or "``" in line else re.sub(r"\|(?=\S[^|`]*\|)", r"\\|", line) for line in lines]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: build())
    app.connect("autodoc-process-docstring", escape_bars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
