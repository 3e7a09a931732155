"""The public face: every name exists once, is documented, and its examples run."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import pkgutil
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from each_case import each
from further import Further

import jchop
from jchop.formats import ALIASES, CATALOGUE, SCALED_CATALOGUE, ElementFormat, ScaledFormat

further = Further()

ROOT = Path(__file__).resolve().parents[1]

# Second names of one and the same object. Anything else that is exported twice is a mistake.
SECOND_NAMES: dict[str, str] = {}

NAMES = list(jchop.__all__)
# Scaled formats can be called too.
CONSTANTS = [
    name for name in jchop.formats.__all__ if isinstance(getattr(jchop.formats, name), ElementFormat | ScaledFormat)
]


def loads(name: str) -> bool:
    """Whether what a module requires is there: torch is no part of the test environment."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    needs_torch = re.compile(r'^require_extra\(.*"torch"|^from jchop\.compat\._torch import', re.MULTILINE)
    requires = needs_torch.search(Path(spec.origin).read_text(encoding="utf-8"))
    return requires is None or importlib.util.find_spec("torch") is not None


MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(ROOT / "jchop")], prefix="jchop.") if loads(module.name)
)


def test_names_exist_once_and_in_order() -> None:
    assert sorted(NAMES) == sorted(set(NAMES))
    missing = [name for name in NAMES if not hasattr(jchop, name)]
    assert not missing


def test_nothing_public_is_left_out_of_all() -> None:
    stray = [
        name
        for name, value in vars(jchop).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in NAMES
    ]
    assert not stray


def test_no_object_has_two_names_but_the_listed_ones() -> None:
    first: dict[int, str] = {}
    for name in NAMES:
        if name in SECOND_NAMES:
            assert getattr(jchop, name) is getattr(jchop, SECOND_NAMES[name])
            continue
        other = first.setdefault(id(getattr(jchop, name)), name)
        assert other == name, f"{name} and {other} are one object"


def test_no_two_names_have_copies_of_one_format() -> None:
    formats = [getattr(jchop.formats, name) for name in CONSTANTS]
    for fmt in formats:
        assert all(other is fmt for other in formats if other == fmt), str(fmt)


def test_every_named_format_is_public_and_prints_its_name() -> None:
    for name, fmt in [*CATALOGUE.items(), *SCALED_CATALOGUE.items()]:
        assert getattr(jchop.formats, name) is fmt
        assert str(fmt) == name


@each("name", CONSTANTS)
def test_every_constant_is_what_its_name_means_as_text(name: str) -> None:
    fmt = getattr(jchop.formats, name)
    assert str(fmt) == name
    assert jchop.Spec(name) == jchop.Spec(fmt)


@each("name", [name for name in NAMES if callable(getattr(jchop, name))])
def test_classes_and_functions_are_documented_where_they_are_defined(name: str) -> None:
    obj = getattr(jchop, name)
    assert obj.__module__.startswith("jchop."), f"{name} is defined in {obj.__module__}"
    assert obj.__name__ == name
    assert getattr(sys.modules[obj.__module__], name) is obj
    text = inspect.getdoc(obj) or ""
    assert len(text.split()) > 10, f"{name} has no docstring worth the name"
    assert ">>>" in text, f"the docstring of {name} shows no example"
    if inspect.isclass(obj):
        undocumented = [
            member
            for member, value in vars(obj).items()
            if not member.startswith("_")
            and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
            and not inspect.getdoc(getattr(obj, member))
        ]
        assert not undocumented, f"{name}: no docstring on {undocumented}"


def rows_of_formats() -> list[str]:
    """The names in the first column of the tables of docs/formats.md."""
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    return [
        name for row in re.findall(r"^\| (`\w+`[^|]*)\|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]


def test_every_constant_has_its_row_in_the_documented_formats() -> None:
    rows = rows_of_formats()
    assert [name for name in CONSTANTS if rows.count(name) != 1] == []


def has_examples(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return ">>>" in Path(spec.origin).read_text(encoding="utf-8")


@further.first
@pytest.mark.in_turn(80)
@pytest.mark.parametrize("module", [module for module in MODULES if has_examples(module)])
def docstring_examples_run(module: str) -> None:
    """The examples of a public module stand on their own: they import what they use."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    names = None if "._" in module else {}  # a private module's examples see its names
    for test in finder.find(importlib.import_module(module), module, globs=names):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


# -- the table of docs/formats.md -------------------------------------------------------------------------------------
def _number(cell: str) -> Fraction | None:
    """The value of a cell such as `65504`, `2^-14` or `2^127 (2 - 2^-23)`; None for a dash."""
    if cell == "–":
        return None
    text = re.sub(r"2\^(-?\d+)", r"(two**\1)", cell).replace(") (", ") * (")
    return Fraction(eval(text, {"two": Fraction(2)}))


def _table() -> dict[str, list[str]]:
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row for row in rows if len(row) == 11 and row[0].startswith("`")}


def test_the_documented_formats_are_the_catalogue() -> None:
    assert list(_table()) == list(CATALOGUE)


@each("name", CATALOGUE)
def test_the_documented_facts_are_true(name: str) -> None:
    fmt = CATALOGUE[name]
    _, others, widths, bias, largest, normal, subnormal, inf, nan, negative_zero, source = _table()[name]
    assert set(re.findall(r"`(\w+)`", others)) == {other for other, main in ALIASES.items() if main == name}
    assert widths == f"{fmt.exp_bits}, {fmt.frac_bits}"
    assert int(bias) == fmt.bias
    facts = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal)
    for cell, fact in zip((largest, normal, subnormal), facts, strict=True):
        assert _number(cell) == (None if fact is None else Fraction(fact))
    answers = tuple("yes" if fact else "no" for fact in (fmt.has_inf, fmt.has_nan, fmt.has_negative_zero))
    assert (inf, nan, negative_zero) == answers
    assert source


# -- the package ------------------------------------------------------------------------------------------------------


def test_package_is_marked_as_typed() -> None:
    assert (Path(jchop.__file__).parent / "py.typed").is_file()


test_further = further.test()
