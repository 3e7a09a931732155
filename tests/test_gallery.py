"""The gallery: its table, its pages and its notebooks; the docs step of .ci/run runs the scripts."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import gallery
import pytest
from example_cases import SCRIPTS

ROOT = Path(__file__).resolve().parents[1]
#: Examples that are not in the gallery: another package, minutes of work, or nothing to draw.
OTHERS = {"accumulators", "diloco", "experts", "fsdp", "packages", "pipeline", "ptq_transformer", "real_speech",
          "real_weights", "rollout", "serving", "torch_training"}  # fmt: skip


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


SLOW = "import time\nprint('begun', flush=True)\nwhile time.process_time() < 60: pass\n"
GOOD = """
import sys
from matplotlib.figure import Figure
Figure().savefig(sys.argv[-1])
print(len(sys.argv))
"""


def test_a_bad_script_is_left_out_and_nothing_else_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    sources = {"bad": 'raise SystemExit("no luck")\n', "slow": SLOW, "empty": "", "good": GOOD}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(f'"""The {name} one."""\n{source}')
    for name in ("EXAMPLES", "FOLDER"):
        monkeypatch.setattr(gallery, name, tmp_path)
    monkeypatch.setattr(gallery, "run", functools.partial(gallery.run, limit=3))
    chosen = [gallery.Example(name, name.title(), "nothing") for name in sources]
    faults = sorted(gallery.build(chosen, to_run=True))
    reasons = ["ended with code 1.*no luck", "it drew nothing", "more than 3 s.*begun"]
    for fault, text in zip(faults, reasons, strict=True):
        assert re.search(f"(?s)is left out: .*{text}", fault)
    assert (tmp_path / "slow.log").read_text() == "begun\n"
    assert (tmp_path / "good.md").exists() and not (tmp_path / "slow.md").exists()
    index = (tmp_path / "index.md").read_text()
    assert "(good.md)" in index and "## Not run in this build" in index and "* **Slow**" in index
    # A build that runs none has the page that is still true, and not that of a script that has changed.
    assert gallery.build(chosen, to_run=False) == [] and (tmp_path / "good.md").exists()
    (tmp_path / "good.py").write_text('"""Another."""\n')
    assert gallery.build(chosen, to_run=False) == [] and not (tmp_path / "good.md").exists()
