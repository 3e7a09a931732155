"""The table of `mutate.py`: files and tests that exist, mutants that stand where it says."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mutate", TESTS / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["mutate"]


def test_the_files_exist(mutate):
    missing = [path for path in mutate.TESTS if not (TESTS.parent / path).is_file()]
    assert not missing


@pytest.mark.slow
def test_the_tests_exist(mutate):
    named = {name for names in mutate.TESTS.values() for name in names}
    assert named
    missing = []
    for name in sorted(named):
        path, _, function = name.partition("::")
        file = TESTS / path
        functions = (
            {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
            if file.is_file()
            else set()
        )
        if not functions or (function and function not in functions):
            missing.append(name)
    assert not missing


def test_every_module_of_the_core_is_mutated(mutate):
    files = {str(path.relative_to(TESTS.parent)) for path in (TESTS.parent / "jchop" / "_core").rglob("*.py")}
    modules = {path for path in files if not path.endswith("__init__.py")}
    assert modules and modules <= set(mutate.TESTS)


def test_equivalent_mutants_are_of_lines_that_stand(mutate):
    for path, line, before, _ in mutate.EQUIVALENT:
        lines = [text.strip() for text in (TESTS.parent / path).read_text().splitlines()]
        assert line in lines, (path, line)
        assert before in line
