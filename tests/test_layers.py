"""The floors: a file of jchop imports only what stands above it in the table below, or what lies in its own folder.

docs/design.md says why. Imports inside functions count like any other; so do those under TYPE_CHECKING, except of other
packages, which then are not needed to run.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

PACKAGE = Path(__file__).resolve().parents[1] / "jchop"

# One line for each file or folder at the root of the package: (floor, name). Within a floor a line may import from the
# lines before it, except on SIBLING_FLOOR. A new file has to be given its place here.
FLOORS: list[tuple[int, str]] = [
    (1, "_checks"),
    (1, "_decibels"),
    (1, "rounding"),
    (1, "_files"),
    (1, "_paths"),
    (1, "_bits"),
    (1, "_settings"),
    (1, "_text"),
    (2, "formats"),
    (2, "spec"),
    (2, "_finfo"),
    (2, "accumulation"),
    (2, "tensor_cores"),
    (3, "gradients"),
    (4, "_core"),
    (5, "_kernels"),
    (6, "_arguments"),
    (6, "_round"),
    (6, "_linalg"),
    (6, "_program"),
    (7, "storage"),
    (7, "_round_file"),
    (7, "_emulate"),
    (7, "sparsity"),
    (8, "math"),
    (8, "optim"),
    (8, "distributed"),
    (8, "matlab"),
    (8, "plot"),
    (9, "_tune"),
    (9, "_products"),
    (9, "_attention"),
    (9, "ptq"),
    (9, "torch"),
    (9, "nn"),
    (9, "_compare"),
    (9, "_probe"),
    (10, "compat"),
    (10, "study"),
    (10, "_cli"),
    (10, "__main__"),
    (11, "__init__"),  # the public face: names and nothing else, so nothing below imports it
]
SIBLING_FLOOR = 8
# The rooms of the core, in order; the bodies of operations stand beside them, on top, and BELOW_ROOMS beneath.
BELOW_ROOMS = ("sizes", "xla_cpu", "xla_gpu")
ROOMS = ["rounding", "arithmetic", "elementary", "scaled", "scaled_float32"]
MOST_FILES = 17  # in a folder

# What the hard dependencies are, and where each of the others may be imported.
EVERYWHERE = {"jax", "jaxlib", "ml_dtypes", "numpy"}
ONLY_IN: dict[str, set[str]] = {
    "flax": {"nn", "study"},
    "optax": {"optim", "study"},
    "matplotlib": {"plot"},
    "sklearn": {"study"},
    "torch": {"torch", "compat"},
    "qwix": {"storage"},
    "treescope": {"storage"},
    "dask": set(),
    "equinox": {"nn"},
}
NO_JAX = {"rounding", "_checks", "formats", "spec", "accumulation", "tensor_cores"}

# Only this file asks what device it is on.
DEVICE_FILE = "_kernels.primitive"
DEVICE_NAMES = {
    "backends",
    "default_backend",
    "device_count",
    "devices",
    "local_device_count",
    "local_devices",
    "platform",
    "platform_dependent",
}

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PLACES = {name: (floor, order) for order, (floor, name) in enumerate(FLOORS)}


def place_of(module: str) -> str:
    """The line of FLOORS that a module (its dotted name below jchop) belongs to."""
    return module.split(".")[0]


def is_package(module: str) -> bool:
    return FILES[module].name == "__init__.py"


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of what `from ... import` names in `module`."""
    if node.level == 0:
        return node.module or ""
    parents = ["jchop", *module.split(".")] if module != "__init__" else ["jchop"]
    up = node.level - 1 if is_package(module) else node.level
    return ".".join([*parents[: len(parents) - up], *([node.module] if node.module else [])])


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(module)))


@functools.cache
def imported_names(module: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, the names of `from` imports included."""
    return list(_imported_names(module))


def called(node: ast.Call) -> str:
    """The name of a function, with that of its module."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return f"{node.func.value.id}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _imported_names(module: str) -> Iterator[tuple[int, str]]:
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"importlib.import_module", "__import__"}:
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield node.lineno, re.sub(r"^\.+", "jchop.", str(name.value))
            elif module != "__init__":  # only the public face may work out what it loads on first use
                yield node.lineno, f"<{ast.unparse(name)}>"


def inner(name: str) -> str | None:
    """The file of jchop that an absolute dotted name leads to; None for another package."""
    parts = name.split(".")
    if parts[0] != "jchop":
        return None
    for length in range(len(parts), 1, -1):
        if ".".join(parts[1:length]) in FILES:
            return ".".join(parts[1:length])
    return "__init__"


def arrows(module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of another file of jchop."""
    for line, name in imported_names(module):
        target = inner(name)
        if target is not None:
            yield line, target


@functools.cache
def annotation_lines(module: str) -> set[int]:
    """The lines under `if TYPE_CHECKING:`, which never run."""
    tests = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    blocks = [node for node in nodes_of(module) if isinstance(node, ast.If) and ast.unparse(node.test) in tests]
    return {line for node in blocks for line in range(node.lineno, (node.body[-1].end_lineno or 0) + 1)}


def outer(module: str) -> Iterator[tuple[int, str]]:
    """(line, package) of every import that can run, from outside jchop and the standard library."""
    annotations = annotation_lines(module)
    for line, name in imported_names(module):
        package = name.split(".")[0]
        inside = package in {"jchop", "__future__"} or package in sys.stdlib_module_names
        if not inside and line not in annotations:
            yield line, package


def where(module: str, line: int) -> str:
    return f"{FILES[module].relative_to(PACKAGE.parent)}:{line}"


def fault_of(source: str, target: str) -> str | None:
    """What is wrong with an arrow between two files in different places; None where it points down."""
    (from_floor, from_order), (to_floor, to_order) = PLACES[place_of(source)], PLACES[place_of(target)]
    if to_floor > from_floor:
        return f"floor {from_floor} imports from floor {to_floor}"
    if to_floor == from_floor == SIBLING_FLOOR:
        return f"siblings on floor {SIBLING_FLOOR} do not import each other"
    if to_order > from_order:
        return f"{place_of(target)} stands after {place_of(source)} on floor {to_floor}"
    return None


def test_every_file_has_a_place() -> None:
    homeless = [str(path) for module, path in FILES.items() if place_of(module) not in PLACES]
    assert not homeless, f"no line in FLOORS says on which floor these stand: {homeless}"


def test_imports_point_down() -> None:
    faults = [
        f"{where(module, line)} imports {target}: {fault}"
        for module in FILES
        for line, target in arrows(module)
        if place_of(target) != place_of(module) and (fault := fault_of(module, target))
    ]
    assert not faults, "\n".join(faults)


def test_no_circle() -> None:
    """Inside a folder, too, there is an order: no file imports itself by way of others."""
    graph = {module: {target for _, target in arrows(module)} - {module} for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "circle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def room_of(module: str) -> int | None:
    """The number of a core file's room; -1 below the rooms, the last for bodies. None for other files and packages."""
    parts = module.split(".")
    if parts[0] != "_core" or is_package(module):
        return None
    if parts[1] in BELOW_ROOMS:
        return -1
    return ROOMS.index(parts[1]) if len(parts) > 2 else len(ROOMS)


def private_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a file imports from another file of jchop, or reads from one as an attribute."""
    homes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{absolute(module, node)}.{alias.name}"
                if name.startswith("jchop.") and name.removeprefix("jchop.") in FILES:
                    homes[alias.asname or alias.name] = name
                elif name.startswith("jchop.") and is_private(alias.name):
                    yield f"{where(module, node.lineno)} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            home = homes.get(ast.unparse(node.value), ast.unparse(node.value))
            name = f"{home}.{node.attr}"
            if home.startswith("jchop.") and inner(home) == inner(name) == home.removeprefix("jchop."):
                yield f"{where(module, node.lineno)} reads {home}.{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_stay_in_their_file() -> None:
    faults = [fault for module in FILES for fault in private_names(module, tree_of(module))]
    assert not faults, f"{len(faults)} private names are taken from another file:\n" + "\n".join(faults)


# Where modes are told apart: the definition, the tables, and a short cut that needs tables of its own.
MODES_IN = {"rounding", "_core.rounding.modes", "_core.scaled_float32.integers"}


def test_rounding_modes_are_told_apart_in_one_table() -> None:
    """Elsewhere a file may ask for a mode or two that it treats apart, but not list them all."""
    named = {
        module: {node.attr for node in nodes_of(module) if is_mode(node)} - {"NEAREST_EVEN"}
        for module in FILES
        if place_of(module) in ("_core", "_kernels", "rounding", "formats", "_linalg", "math", "storage", "_emulate")
    }
    assert {module for module, modes in named.items() if len(modes) > 3} == MODES_IN


def is_mode(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Rounding" and node.attr.isupper()


def test_rooms_of_the_core_have_an_order() -> None:
    faults = [
        f"{where(module, line)} imports {target}"
        for module in FILES
        for line, target in arrows(module)
        if (room := room_of(module)) is not None and (other := room_of(target)) is not None and other > room
    ]
    assert not faults, "\n".join(faults)
    rooms = [path for path in (PACKAGE / "_core").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in rooms} == set(ROOMS)


def test_no_folder_is_large() -> None:
    folders = collections.Counter(path.parent for path in FILES.values())
    assert {str(folder): count for folder, count in folders.items() if count > MOST_FILES} == {}


def reached(module: str) -> set[str]:
    """The files that importing `module` brings in, itself included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(target for _, target in arrows(current))
    return seen


def test_formats_do_not_need_jax() -> None:
    faults = [
        f"{where(other, line)} imports {package}"
        for module in FILES
        if place_of(module) in NO_JAX
        for other in reached(module)
        for line, package in outer(other)
        if package in {"jax", "jaxlib"}
    ]
    assert not faults, "\n".join(faults)


def test_other_packages_stay_in_their_place() -> None:
    faults = [
        f"{where(module, line)} imports {package}"
        for module in FILES
        for line, package in outer(module)
        if package not in EVERYWHERE and place_of(module) not in ONLY_IN.get(package, set())
    ]
    assert not faults, "\n".join(faults)


def test_one_file_asks_for_devices() -> None:
    others = [module for module in FILES if module != DEVICE_FILE]
    faults = [
        f"{where(module, node.lineno)}: {ast.unparse(node)}"
        for module in others
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute)
        and node.attr in DEVICE_NAMES
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "sys"})
    ]
    faults += [
        f"{where(module, line)}: {name}"
        for module in others
        for line, name in imported_names(module)
        if name.split(".")[0] in {"jax", "jaxlib"} and name.split(".")[-1] in DEVICE_NAMES
    ]
    assert not faults, "\n".join(faults)


def test_the_design_page_names_every_place() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if re.match(r"\| \d", line)]
    for floor, name in FLOORS:
        rows = [line for line in table if re.search(rf"`{name}(\.py|/)`", line)]
        assert len(rows) == 1, name
        assert rows[0].startswith(f"| {floor} |"), rows[0]


def test_the_design_page_names_files_that_exist() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text(encoding="utf-8")
    there = [
        f"/{path.relative_to(PACKAGE.parent).as_posix()}"
        for path in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("tests/*.py")]
    ]
    named = set(re.findall(r"`([\w/]+/\w+\.py)`", page))
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_checks_see_what_they_should() -> None:
    """The table itself: names once, floors in order, and arrows in both directions judged as docs/design.md says."""
    assert len(PLACES) == len(FLOORS)
    assert [floor for floor, _ in FLOORS] == sorted(floor for floor, _ in FLOORS)
    assert fault_of("_round", "formats._float") is None
    assert fault_of("spec", "formats") is None
    assert "imports from floor" in str(fault_of("rounding", "spec"))
    assert "stands after" in str(fault_of("formats._text", "spec"))
    assert "siblings" in str(fault_of("plot", "math"))
    assert "imports from floor" in str(fault_of("study._train", "__init__"))
    assert inner("jchop.formats._float.FloatFormat") == "formats._float"
    assert inner("jchop.round_to_format") == "__init__"
    assert inner("numpy.random") is None
    taken = "from jchop import _bits\nfrom jchop._bits import _a, b\nimport jchop._finfo\nimport torch\n"
    taken += "_bits._c, _bits.d, jchop._finfo._e, jchop._finfo.f, torch._g, jchop.formats._base"
    assert sorted(fault.split()[-1].split(".")[-1] for fault in private_names("_round.flip", ast.parse(taken))) == [
        "_a",
        "_c",
        "_e",
    ]
    assert room_of("_core.xla_cpu") == -1
