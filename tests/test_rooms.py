"""The rooms: a file of jchop imports only from rooms before its own, and the core imports no wing.

docs/design.md says why. Imports inside functions count like any other; so do those under TYPE_CHECKING, except of other
packages, which then are not needed to run. The `__init__` of a package may name what it loads when first used.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

PACKAGE = Path(__file__).resolve().parents[1] / "jchop"

# In order: a file imports from rooms before its own. A new room has to be given its place here.
CORE = (
    "_common",
    "formats",
    "_spec",
    "_core",
    "_kernels",
    "_round",
    "_storage",
    "_program",
    "_emulate",
    "math",
    "sparsity",
    "_quantized",
    "optim",
    "torch",
    "nn",
)
# A wing imports the core, and the wings that are named here.
WINGS: dict[str, set[str]] = {
    "distributed": set(),
    "_serving": set(),
    "_checkpoints": set(),
    "matlab": set(),
    "compat": {"matlab"},
    "_insight": {"plot"},  # a report draws itself
    "plot": {"_insight"},
    "ptq": {"plot"},
    "study": {"plot"},
    "_cli": {"_checkpoints", "_insight", "plot", "ptq", "study"},
    "__main__": {"_cli"},
}
# The rooms of the core of the core, in order; bodies of operations stand on top of them.
CORE_ROOMS = ("xla", "rounding", "arithmetic", "matmul", "elementary", "scaled")
MOST_FILES = 18  # in a folder
MOST_MODULES = 120  # loaded by `import jchop`
# Names that several files define for themselves: aliases of types, type variables, registrars of JAX; and the public
# names that several public modules have.
SHARED_NAMES = {
    *("Keys", "Number", "T"),
    *("ChopSTE", "ChopfSTE", "ChopiSTE", "LightChop", "OptimLP", "Quantizer"),
    "report",
    *("clip", "dot", "einsum", "matmul", "round_to_format"),
    *("dequantize", "quantize"),
}

# What the hard dependencies are, and where each of the others may be imported.
EVERYWHERE = {"jax", "jaxlib", "ml_dtypes", "numpy"}
ONLY_IN: dict[str, set[str]] = {
    "flax": {"nn", "study", "ptq", "_checkpoints", "_insight"},
    "optax": {"optim", "study"},
    "matplotlib": {"plot"},
    "sklearn": {"study"},
    "torch": {"torch", "compat"},
    "qwix": {"_storage"},
    "tokamax": {"_storage"},
    "treescope": {"_storage"},
    "dask": set(),
    "equinox": {"nn"},
}
NO_JAX = {"formats", "_spec"}

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


def place_of(module: str) -> str:
    """The room of a module, by its dotted name below jchop."""
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
        elif isinstance(node, ast.Call) and called(node) in {"importlib.import_module", "import_module", "__import__"}:
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield node.lineno, re.sub(r"^\.+", "jchop.", str(name.value))
            elif module != "_common.on_demand":  # the only file that works out what it loads
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
    tests = {"TYPE_CHECKING", "typing.TYPE_CHECKING", "_typing.TYPE_CHECKING"}
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
    """What is wrong with an import between two files in different rooms; None if nothing is."""
    room, other = place_of(source), place_of(target)
    if other == "__init__":
        return "nothing imports the public face"
    if room in CORE:
        if other not in CORE:
            return "the core imports a wing"
        return None if CORE.index(other) < CORE.index(room) else f"{other} stands after {room}"
    return None if other in CORE or other in WINGS[room] else "wings do not import each other"


def is_face(module: str) -> bool:
    """Whether a module gives the names of others."""
    return module == "__init__" or is_package(module)


def test_every_file_has_a_place() -> None:
    homeless = [str(path) for module, path in FILES.items() if place_of(module) not in {*CORE, *WINGS, "__init__"}]
    assert not homeless, f"neither CORE nor WINGS has these: {homeless}"


def test_imports_come_from_rooms_before() -> None:
    faults = [
        f"{where(module, line)} imports {target}: {fault}"
        for module in FILES
        for line, target in arrows(module)
        if module != "__init__" and not (is_face(module) and line in annotation_lines(module))
        if place_of(target) != place_of(module) and (fault := fault_of(module, target))
    ]
    assert not faults, "\n".join(faults)


def test_no_two_folders_import_each_other() -> None:
    pairs: dict[tuple[Path, Path], list[str]] = collections.defaultdict(list)
    for module in FILES:
        for line, target in () if is_face(module) else arrows(module):
            folders = FILES[module].parent, FILES[target].parent
            if PACKAGE not in folders and folders[0] != folders[1]:
                pairs[folders].append(f"{where(module, line)} imports {target}")
    faults = [fault for pair in pairs if pair[::-1] in pairs for fault in pairs[pair]]
    assert not faults, "\n".join(faults)


def defined_names(module: str) -> Iterator[str]:
    """The functions, classes and constants that a file defines at module level."""
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part.id for part in parts if isinstance(part, ast.Name))


def test_a_name_stands_once() -> None:
    homes: dict[str, set[str]] = collections.defaultdict(set)
    for module in FILES:
        for name in defined_names(module):
            if not name.startswith("__"):
                homes[name].add(module)
    doubles = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in doubles.items() if name not in SHARED_NAMES} == {}
    assert doubles.keys() >= SHARED_NAMES and len(SHARED_NAMES) <= 40


def test_import_is_light() -> None:
    program = "import sys, jchop; print(sum(name.split('.')[0] == 'jchop' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= MOST_MODULES


def test_what_is_loaded_later_is_what_checkers_see() -> None:
    """A package that loads names when first used imports the same names for type checkers."""
    for module in (module for module in FILES if is_face(module)):
        for call in nodes_of(module):
            if not isinstance(call, ast.Call) or called(call).lstrip("_") != "on_demand":
                continue
            given = ast.literal_eval(call.args[2]) if len(call.args) > 2 else {}
            names = {home: list(own) for home, own in given.items()}
            seen: dict[str, list[str]] = collections.defaultdict(list)
            for node in nodes_of(module):
                if isinstance(node, ast.ImportFrom) and node.lineno in annotation_lines(module):
                    seen[node.module or ""] += [alias.name for alias in node.names]
            own = "jchop" if module == "__init__" else f"jchop.{module}"
            assert {home: sorted(own) for home, own in names.items()} == {
                home: sorted(own) for home, own in seen.items() if home != own_name(module)
            }, own


def own_name(module: str) -> str:
    return "jchop" if module == "__init__" else f"jchop.{module}"


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
    """The number of a core file's room, and the last for bodies. None for other files and packages."""
    parts = module.split(".")
    if parts[0] != "_core" or is_package(module):
        return None
    return CORE_ROOMS.index(parts[1]) if len(parts) > 2 else len(CORE_ROOMS)


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
MODES_IN = {"formats.rounding", "_core.rounding.modes", "_core.scaled.grid_elements"}


def test_rounding_modes_are_told_apart_in_one_table() -> None:
    """Elsewhere a file may ask for a mode or two that it treats apart, but not list them all."""
    named = {
        module: {node.attr for node in nodes_of(module) if is_mode(node)} - {"NEAREST_EVEN"}
        for module in FILES
        if place_of(module) in ("_core", "_kernels", "formats", "math", "_storage", "_emulate")
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
    assert {path.name for path in rooms} == set(CORE_ROOMS)


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


def test_no_private_name_of_jax_is_imported() -> None:
    """Nor Pallas' backend for Triton, which JAX will remove."""
    gone = re.compile(r"jax\._src|jax\.experimental\.pallas\.triton")
    found = [(module, name) for module in FILES for _, name in imported_names(module) if gone.match(name)]
    assert found == []


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


def test_the_design_page_names_every_room() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text(encoding="utf-8")
    rooms = [match[1] for line in page.splitlines() if (match := re.match(r"\| `(\w+)(?:/|\.py)` \|", line))]
    places = {place_of(module) for module in FILES} - {"__init__"}
    assert [room for room in rooms if room in places] == [room for room in (*CORE, *WINGS) if room in places]


def test_pages_and_comments_name_files_that_exist() -> None:
    """All paths of Python files in the page of design; elsewhere those that begin with a room, tests or benchmarks."""
    root = PACKAGE.parent
    folders = (PACKAGE, root / "tests", root / "benchmarks")
    there = [f"/{path.relative_to(root).as_posix()}" for folder in folders for path in folder.rglob("*.py")]
    design = root / "docs/design.md"
    files = [*FILES.values(), *root.glob("docs/*.md"), root / "CONTRIBUTING.md", root / "README.md"]
    starts = {*CORE, *WINGS, "jchop", "tests", "benchmarks"} - {"torch"}  # torch/ may be PyTorch's
    faults = [
        f"{file.relative_to(root)} names {name}"
        for file in files
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", file.read_text(encoding="utf-8"))
        if file == design or name.split("/")[0] in starts or name.startswith("_")
        if not any(path.endswith(f"/{name}") for path in there)
    ]
    assert faults == []


def test_the_checks_see_what_they_should() -> None:
    """The tables themselves, and imports in both directions judged as docs/design.md says."""
    assert len({*CORE, *WINGS}) == len(CORE) + len(WINGS)
    assert fault_of("_round.flip", "formats._binary") is None
    assert fault_of("_spec.spec", "formats") is None
    assert "stands after" in str(fault_of("formats.rounding", "_spec.spec"))
    assert "imports a wing" in str(fault_of("nn._quantize", "ptq"))
    assert "wings do not" in str(fault_of("compat.piquant", "plot"))
    assert fault_of("_insight.compare", "plot") is None
    assert "public face" in str(fault_of("plot", "__init__"))
