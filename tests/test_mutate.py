"""The parts of `mutate.py`: its faults, the draw, the tables, and which tests it takes for a line."""

import ast
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent


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


@pytest.mark.parametrize(
    ("source", "kind", "after"),
    [
        ("a, b = jax.random.split(key)", "key", "a, b = (key,) * 2"),
        ("after, (a, b) = split_key(key, 2)", "key", "after, (a, b) = (key, (key,) * (2))"),
        ("k = jax.random.fold_in(key, i)", "key", "k = (key)"),
        ("y = x.sum(axis=0)", "axis", "y = x.sum(axis=(-1))"),
        ("y = jnp.sum(x, -1)", "axis", "y = jnp.sum(x, (0))"),
        ("y = x.max(-1)", "axis", "y = x.max((0))"),
        ("y = w.T @ x", "axis", "y = (w) @ x"),
        ("y = x.swapaxes(0, 1)", "axis", "y = (x)"),
        ("y = jnp.moveaxis(x, 0, 1)", "axis", "y = (x)"),
        ("y = a - b", "sign", "y = (a + b)"),
        ("y = -a", "sign", "y = (a)"),
        ("y = x / scale", "factor", "y = (x * scale)"),
        ("y = x * scale", "factor", "y = (x)"),
        ("n = size // group", "count", "n = (size // group + 1)"),
        ("n = len(x)", "count", "n = (len(x) - 1)"),
        ("n = x.shape[0]", "count", "n = (x.shape[0] - 1)"),
        ("y = f(x, group=size)", "count", "y = f(x, group=(size + 1))"),
        ("new = state._replace(count=n)", "state", "new = (state)"),
        ("new = replace(state, count=n)", "state", "new = (state)"),
        ("self.count = n", "state", "pass"),
        ("layer.index[...] = n", "state", "pass"),
        ("y = x.at[i].set(v)", "state", "y = (x)"),
        ("y = x if x is not None else d", "default", "y = (d)"),
        ("y = d if x is None else x", "default", "y = (d)"),
        ("y = a or b", "default", "y = (b)"),
        ("if c:\n    f()", "branch", "if False:\n    f()"),
        ("y = a if c else b", "branch", "y = (b)"),
        ("if c:\n    raise ValueError", "check", "if False:\n    raise ValueError"),
        ("y = h[-1]", "last", "y = (jnp.max(h))"),
        ("y = jnp.max(h)", "last", "y = (h[-1])"),
        ("y = f(x, key=k)", "argument", "y = f(x, )"),
        ("total += x", "statement", "pass"),
        ("found.append(x)", "statement", "pass"),
        ("for i in range(n):\n    f(i)", "loop", "for i in range(n - 1):\n    f(i)"),
        ("for x in xs:\n    f(x)", "loop", "for x in list(xs)[:-1]:\n    f(x)"),
        ("y = lax.fori_loop(0, n, f, x)", "loop", "y = lax.fori_loop(0, (n - 1), f, x)"),
        ("y = jnp.where(c, a, b)", "function", "y = (jnp.where(c, b, a))"),
        ("y = jnp.minimum(a, b)", "function", "y = (jnp.maximum)(a, b)"),
    ],
)
def test_faults(mutate, tmp_path, source, kind, after):
    (tmp_path / "a.py").write_text(source)
    found = mutate.mutants("a.py", tmp_path)
    assert any(mutant.kind == kind and mutant.source(tmp_path).decode() == after for mutant in found), found
    for mutant in found:
        ast.parse(mutant.source(tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(1 + 1)",
        "assert x > 1",
        "Number = int | float",
        "ok = isinstance(x, int | float)",
        "parser.add_argument(default=3)",
        "@partial(jit, donate=True)\ndef f(x: int | None): return x",
        "def __repr__(self): return a + b",
        "class A:\n    def __init__(self, x):\n        self.x = x",
    ],
)
def test_what_has_no_value_has_no_fault(mutate, tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    assert not mutate.mutants("a.py", tmp_path)


def test_a_draw_takes_turns_of_kinds_and_stays(mutate, tmp_path):
    (tmp_path / "a.py").write_text("".join(f"y{i} = a{i} - b\n" for i in range(30)) + "y = x.sum(axis=0)\n")
    found = mutate.mutants("a.py", tmp_path)
    picked = mutate.drawn(found, 4, 17)
    assert len(picked) == len({mutant.line for mutant in picked}) == 4
    assert picked == mutate.drawn(reversed(found), 4, 17)
    assert {"sign"} < {mutant.kind for mutant in picked}
    assert picked != mutate.drawn(found, 4, 18)
    (tmp_path / "a.py").write_text("z = 1\n" + (tmp_path / "a.py").read_text())  # kinds differ: the constants
    again = [mutant for mutant in mutate.mutants("a.py", tmp_path) if mutant.line > 1]
    assert [mutant.key for mutant in mutate.drawn(again, 4, 17)] == [mutant.key for mutant in picked]


def test_every_package_has_its_share(mutate):
    folders = {path.name for path in (ROOT / "jchop").iterdir() if path.is_dir() and list(path.glob("*.py"))}
    packages = {mutate.package(path) for path in mutate.files()}
    assert packages == folders - {"_core", "_round", "_spec", "formats"} | {"core", "root"}
    lines = dict.fromkeys(packages, 10) | {"core": 5000, "nn": 4000}
    counts = mutate.shares(lines)
    assert counts["core"] == 80 and counts["root"] == 12 and counts["nn"] > 200
    assert sum(counts.values()) >= 400


def test_sown_faults_stand_in_their_files(mutate):
    assert len(mutate.SOWN) >= 12
    for path, before, after in mutate.SOWN.values():
        whole = (ROOT / path).read_text()
        assert whole.count(before) == 1, (path, before)
        ast.parse(whole.replace(before, after))


def test_equivalent_mutants_can_be_drawn(mutate):
    every = {mutant.key for path in {key[0] for key in mutate.EQUIVALENT} for mutant in mutate.mutants(path)}
    assert mutate.EQUIVALENT.keys() <= every


def test_tests_of_a_line(mutate, tmp_path):
    (tmp_path / "jchop" / "optim").mkdir(parents=True)
    path = "jchop/optim/_state.py"
    (tmp_path / path).write_text("LIMIT = 1 + 1\n\n\ndef f(a, b):\n    if a > b:\n        return a\n    return b\n")
    far, near, other = "tests/test_a.py::test_far[1]", "tests/optim/test_state.py::test_near", "tests/test_a.py::test_b"
    seconds = {far: 0.1, "tests/test_a.py::test_far[2]": 0.2, near: 0.5, other: 0.1}
    groups = [(["tests/test_a.py::test_far[2]", far, near], {5, 7}), ([near], {6})]
    reach = mutate.Reach(seconds, {path: groups})
    by_line = {mutant.line: mutant for mutant in mutate.mutants(path, tmp_path)}
    first, second = reach.chosen(by_line[5], root=tmp_path)
    assert first == [near, far]  # one case of each test, the nearest file first
    assert second == ["tests/test_a.py::test_far[2]", other]  # what shares compiled code with them
    assert reach.chosen(by_line[5], [far], root=tmp_path)[0] == [far, near]
    assert reach.chosen(by_line[5], most=0.1, root=tmp_path) == [[near]]
    assert {*itertools.chain(*reach.chosen(by_line[1], root=tmp_path))} >= {
        near,
        far,
    }  # run at import: of the whole file
    assert reach.of(path, [6]) == {near} and not reach.of("jchop/other.py", None)


def test_lines_of_statements(mutate):
    source = "A = 1\n\ndef f(\n    x=1,\n):\n    if (\n        x\n    ):\n        y = [\n            x]\n    return y\n"
    lines = {line: mutate.statement_lines(source, line) for line in (1, 4, 7, 10)}
    assert lines == {1: None, 4: None, 7: range(6, 9), 10: range(9, 11)}
