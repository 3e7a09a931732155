"""The gallery: its table, its pages and its notebooks; the docs step of .ci/run runs the scripts."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from example_cases import SCRIPTS

ROOT = Path(__file__).resolve().parents[1]
#: Examples that are not in the gallery: another package, minutes of work, or nothing to draw.
OTHERS = {"accumulators", "diloco", "fsdp", "packages", "pipeline", "ptq_transformer", "serving", "torch_training"}


def extension(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs/_extensions" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


gallery = extension("gallery")
TABLE = gallery.examples()


def test_every_example_is_in_the_gallery_or_has_a_reason() -> None:
    shown = [example.script for example in TABLE]
    assert len(shown) == len(set(shown)) and set(shown) | OTHERS == set(SCRIPTS) and not set(shown) & OTHERS
    assert all('"--plot"' in example.path.read_text(encoding="utf-8") for example in TABLE)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("example", TABLE, ids=lambda example: example.script)
def test_a_notebook_has_the_whole_script_and_runs_it(example: Any) -> None:
    book = gallery.notebook(example)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    code = [text for text in code if not text.startswith("%%writefile")]
    tree = ast.parse(example.path.read_text(encoding="utf-8"))
    script = [ast.dump(node) for node in tree.body[1:-1]]  # without its text, and without the call of main
    cells = [ast.dump(node) for text in code[:-2] for node in ast.parse(text).body]
    assert cells == script
    assert code[-2].endswith("main()") and "--plot" in code[-2]


def test_a_page_shows_all_parts() -> None:
    text = gallery.page(TABLE[0], "1 2 3\n")
    for part in (
        TABLE[0].title,
        TABLE[0].learn,
        f"{TABLE[0].script}.png",
        f"{TABLE[0].script}.ipynb",
        "1 2 3",
        "literalinclude",
    ):
        assert part in text
    assert all(f"({example.script}.md)" in gallery.index(TABLE) for example in TABLE)


def test_a_script_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text('"""Bad."""\nraise SystemExit("no luck")\n')
    monkeypatch.setattr(gallery, "EXAMPLES", tmp_path)
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)bad.py --small failed.*no luck"):
        gallery.run(gallery.Example("bad", "Bad", "nothing"))


def test_the_check_of_the_reference_sees_a_missing_name() -> None:
    pytest.importorskip("sphinx")
    every_name = extension("every_name")
    names = every_name.public_names()
    for name in ("jchop.round_to_format", "jchop.math.add", "jchop.nn.sensitivity", "jchop.plot.pareto"):
        assert name in names
    page = " ".join(f"`{name}`" for name in names if name != "jchop.math.add")
    assert every_name.missing(set(), page) == ["jchop.math.add"]
    assert every_name.missing({"jchop.math.add"}, page) == []
