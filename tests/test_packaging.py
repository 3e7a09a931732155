"""What stands in several files is the same in all: versions, lower bounds, Pythons; and no cache is without a bound."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import jchop

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Extras whose lower bounds are tried: those of the tests. What `test` takes in is among them.
TRIED = ("flax", "optax", "plot", "dask", "study", "test")


def lower_bounds() -> dict[str, str]:
    wanted = PROJECT["dependencies"] + [text for name in TRIED for text in PROJECT["optional-dependencies"][name]]
    found = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", text) for text in wanted if not text.startswith("jchop["))
    return {match[1]: match[2] for match in found if match}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = lower_bounds()
    assert set(pinned) == set(bounds) and len(bounds) == 19
    for name, bound in bounds.items():
        assert pinned[name] == bound or re.fullmatch(re.escape(bound) + r"(\.0)+", pinned[name]), name


def test_the_version_is_one() -> None:
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == jchop.__version__  # type: ignore[index]
    heading = re.search(r"^## \[(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None and jchop.__version__ in heading[1]


def test_every_python_of_the_classifiers_is_tried() -> None:
    claimed = {text.split(" :: ")[-1] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    installed = set(re.findall(r"^ +(3\.\d+)$", workflow, re.M))
    named = {f"3.{minor}" for minor in re.findall(r"\bpython3\.(\d+)", (ROOT / ".ci" / "run").read_text())}
    assert claimed == installed == named and len(claimed) == 4


def test_every_cache_has_a_bound() -> None:
    """No `functools.cache`; of `lru_cache` a bound that is said, and is not None."""
    for path in sorted((ROOT / "jchop").rglob("*.py")):
        text = path.read_text()
        if "cache" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                assert "cache" not in [name.name for name in node.names], path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "functools":
                assert node.attr != "cache", path
            for decorator in getattr(node, "decorator_list", []):
                text = ast.unparse(decorator)
                assert "lru_cache" not in text or re.search(r"lru_cache\(maxsize=(?!None)", text), f"{path}: {text}"
