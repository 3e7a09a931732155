"""The frame of the pages: the reference, programs that run at build, the language in numbers, and the search."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import outputs
import processes
import pytest
import reference
import words

import jchop

ROOT = Path(__file__).resolve().parents[1]
#: A built site, as the docs step of .ci/run names it.
BUILT = os.environ.get("JCHOP_BUILT_PAGES")


def load_count() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_count", ROOT / "docs/count.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


# -- the reference -----------------------------------------------------------------------------------------------------
def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = reference.pages()
    described = [path for names in pages.values() for path in names]
    assert len(described) == len(set(described))
    public = reference.public_names()
    assert set(public) <= set(described)
    assert {"jchop.round_to_format", "jchop.math.add", "jchop.nn.sensitivity", "jchop.plot.pareto"} <= set(public)
    hidden = (jchop.formats.ElementFormat, jchop.formats.ScaledFormat, ModuleType)
    for name in jchop.__all__:
        assert f"jchop.{name}" in described or isinstance(getattr(jchop, name), hidden)


def test_classes_that_functions_return_stand_on_the_page_of_the_function() -> None:
    pages = reference.pages()
    on_page = {path.rpartition(".")[2]: page for page, names in pages.items() for path in names}
    for name, owner in {"Report": "emulate", "ReportRow": "emulate", "BlameRow": "Blame", "Sweep": "gptq"}.items():
        assert on_page[name] == on_page[owner], name
    text = reference.page_text("insight", pages["insight"])
    assert ".. autoclass:: jchop._insight.reports.blame.BlameRow\n   :exclude-members: scope, primitive" in text
    assert not reference.INSIDE & set(on_page)


def test_names_whose_package_is_missing_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("jchop.torch")]:
        monkeypatch.delitem(sys.modules, name)
    names = reference.names_of("jchop.torch")
    assert "quantize" in names and set(names.values()) == {None}
    assert "`jchop.torch.quantize`" in reference.page_text("torch", {"jchop.torch.quantize": None})


# -- programs ----------------------------------------------------------------------------------------------------------
SPIN = "import time\nwhile time.process_time() < 20: pass"
CHILD = f"import subprocess, sys\nprint('begun', flush=True)\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.mark.parametrize("program", [f"print('begun', flush=True)\n{SPIN}", CHILD], ids=["itself", "its child"])
def test_a_program_is_stopped_by_its_processor_time(program: str, tmp_path: Path) -> None:
    ended = processes.run([sys.executable, "-c", program], tmp_path, limit=0.5)
    assert "more than 0.5 s of processor time" in ended.fault and ended.output == "begun\n"


def test_waiting_takes_no_processor_time_and_a_program_that_hangs_is_stopped(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(2); print('done')"]
    assert processes.run(sleep, tmp_path, limit=1.5) == processes.Ended("done\n", "", "")
    start = time.monotonic()
    ended = processes.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, idle=1)
    assert "no processor time for 1 s" in ended.fault and time.monotonic() - start < 30


def test_an_interrupt_stops_the_programs_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOPPED", threading.Event())
    faults = []
    both = threading.Barrier(2)

    def attempt(seconds: int) -> None:
        both.wait()
        if not seconds:
            raise KeyboardInterrupt
        faults.append(processes.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], tmp_path).fault)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        processes.each(attempt, [0, 60])
    assert faults == ["the build was stopped"] and time.monotonic() - start < 30


def test_outputs_stand_below_their_programs(tmp_path: Path) -> None:
    text = "# A\n\n```python\nx = 2\n```\n\nB\n\n```python\nprint(x + 1)\n```\n\n```python\nx  # -> 2\n```\n"
    blocks = outputs.programs(text)
    assert blocks == ["x = 2\n", "print(x + 1)\n"]
    printed = outputs.output_of("a/b", blocks, tmp_path)
    assert printed == ["", "3\n"]
    page = outputs.shown(text, printed)
    assert "print(x + 1)\n```\n\n````{code-block} text\n:class: output\n\n3\n````\n" in page
    assert page.replace("\n````{code-block} text\n:class: output\n\n3\n````\n", "") == text
    kept = next(tmp_path.glob("*.json"))
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"outputs": ["", "4\n"]}))
    assert outputs.output_of("a/b", blocks, tmp_path) == ["", "4\n"]  # it did not run again
    assert outputs.output_of("a/b", ["print(5)"], tmp_path) == ["5\n"]
    with pytest.raises(RuntimeError, match=r"(?s)a/b.md is shown without.*ZeroDivisionError"):
        outputs.output_of("a/b", ["print(1 / 0)"], tmp_path)


def test_long_results_stand_on_a_line_of_their_own() -> None:
    long = f"    f({'x, ' * 25}x)  # -> 1"
    page = outputs.shown(f"```python\n{long}\ny  # -> 2\n```\n", [])
    assert page == f"```python\n    f({'x, ' * 25}x)\n    # -> 1\ny  # -> 2\n```\n"


def test_pages_of_reports_print_one() -> None:
    for page in ("blame", "digits", "emulate", "nn", "tune"):
        assert outputs.programs((ROOT / f"docs/{page}.md").read_text(encoding="utf-8")), f"{page}.md shows no output"


# -- language ----------------------------------------------------------------------------------------------------------
def test_the_language_of_the_pages_gets_no_worse() -> None:
    """A new page has these limits too: shorten another one."""
    every = load_count().total(load_count().count())
    assert every.words <= 28_000
    assert every.mean <= 13
    assert every.long <= 0.6
    assert every.what <= 0.2
    assert not every.undefined, "the first use of a term on a page links to its definition: docs/terms.toml"


def test_the_count_sees_what_it_counts() -> None:
    count = load_count()
    text = "# What\n\nA carrier is wide. What is `a + b`?\n\n* One of *codes*\n  and more.\n"
    text += "\n| what |\n\n```\nwhat\n```\n"
    found = count.Counts("x.md", count.sentences(text), count.headings(text), count.undefined("x.md", text))
    assert found.sentences == ["A carrier is wide.", "What is `a + b`?", "One of *codes* and more."]
    assert (found.words, found.headings, found.undefined) == (14, ["What"], ["carrier"])
    assert round(found.what) == round(2000 / 14) and found.long == 0
    assert count.undefined("x.md", "A [carrier](concepts.md#carrier) is one.") == []
    assert count.Counts("x.md", ["word " * 26], [], []).long == 100


def test_terms_are_defined_where_the_table_says() -> None:
    for term, row in load_count().terms().items():
        page, _, anchor = row["place"].partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, f"{term}: {page} has no heading {anchor}"


# -- search ------------------------------------------------------------------------------------------------------------
QUESTIONS = {
    "accuracy lost": "blame",
    "precision loss": "blame",
    "debug": "blame",
    "qat": "nn",
    "quantization aware training": "nn",
    "int4": "nn",
    "vllm": "hosts",
    "maxtext": "hosts",
    "keras": "hosts",
    "gguf": "checkpoints",
    "serving": "serving",
    "mixed precision": "tune",
    "rtl": "tasks/hardware_designer",
    "blocked": "orders",
    "8-bit optimizer": "optim",
    "significant digits": "digits",
    "stochastic rounding": "numerics",
    "first nan": "emulate",
    "recover accuracy": "ptq",
    "reproducible": "randomness",
    "loss stands still": "optim",
    "memory of the optimizer": "optim",
    "test vectors": "tasks/hardware_designer",
    "choose a format": "which_format",
}


def test_words_lead_to_pages_that_exist() -> None:
    table = words.table()
    assert all((ROOT / f"docs/{page}.md").exists() for page in table)
    every = [word.lower() for row in table.values() for word in row]
    assert len(every) == len(set(every)), "two pages have one word"
    text = words.with_words("# T\n\nA.\n", ["b c"])
    assert text == "# T\n\n```{eval-rst}\n.. index::\n   ! single: b c\n```\n\nA.\n"


@pytest.mark.skipif(not BUILT, reason="JCHOP_BUILT_PAGES is not the folder of a built site")
@pytest.mark.skipif(not shutil.which("node"), reason="the search of the site needs Node.js")
def test_the_search_answers_the_words_of_users() -> None:
    command = ["node", str(ROOT / "tests/search_site.js"), str(BUILT), *QUESTIONS]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    wrong = {q: hits[:4] for (q, page), hits in zip(QUESTIONS.items(), found, strict=True) if page not in hits[:2]}
    assert not wrong
