"""Runs the tests of this folder and writes what they saw as a page: `python tests/clients/matrix.py PAGE`."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PACKAGES = (
    "transformers", "compressed-tensors", "torchao", "bitsandbytes", "gguf", "xllamacpp", "auto_gptq", "autoawq",
    "torch", "jax", "flax",
)  # fmt: skip
READ, WRITE = "it writes, jchop reads", "jchop writes, it reads"
#: The program, the directions and the layout of each test; without a layout its case begins with it.
TESTS = {
    "test_jchop_reads_what_a_compressor_writes": ("compressed-tensors", (READ, WRITE), "compressed-tensors"),
    "test_a_compressor_reads_what_jchop_writes": ("compressed-tensors", (WRITE,), "compressed-tensors"),
    "test_inputs_of_a_rule_are_a_scheme": ("compressed-tensors", (WRITE,), "compressed-tensors"),
    "test_transformers_loads_what_jchop_writes": ("transformers", (WRITE,), None),
    "test_jchop_reads_what_transformers_writes": ("transformers", (READ,), None),
    "test_jchop_reads_and_writes_a_model_of_a_compressor": ("transformers", (READ, WRITE), "compressed-tensors"),
    "test_jchop_reads_llm_int8": ("transformers", (READ,), "llm_int8"),
    "test_transformers_loads_experts_of_gpt_oss_that_jchop_writes": ("transformers", (WRITE,), "mxfp4"),
    "test_transformers_runs_a_model_of_flax": ("transformers", (WRITE,), "compressed-tensors"),
    "test_jchop_reads_every_type_as_gguf_does": ("gguf", (READ,), "gguf"),
    "test_jchop_writes_the_bytes_that_llama_cpp_quantized": ("llama.cpp", (READ, WRITE), "gguf"),
    "test_gguf_reads_what_jchop_writes": ("gguf", (WRITE,), "gguf"),
    "test_llama_cpp_generates_from_what_jchop_makes_of_a_folder": ("llama.cpp", (WRITE,), "gguf"),
    "test_ten_tokens_are_the_same_after_a_conversion": ("llama.cpp", (WRITE,), "gguf"),
    "test_gptq": ("auto_gptq", (READ, WRITE), "gptq"),
    "test_gptq_with_columns_of_any_order": ("auto_gptq", (READ, WRITE), "gptq"),
    "test_awq": ("autoawq", (READ, WRITE), "awq"),
}
#: The parameters of tests that say what is stored.
VARIANTS = ("preset", "case", "name", "spec", "weight", "activation", "text", "bits")
LAYOUTS = {"ct": "compressed-tensors", "fp8": "fp8", "nf4": "bitsandbytes", "torchao": "torchao"}


class Matrix:
    """A plugin of pytest: the outcomes by layout, variant, program and direction."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, str, str, str]]] = {}
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            program, directions, layout = TESTS[item.originalname]
            params = item.callspec.params if hasattr(item, "callspec") else {}
            variant = ", ".join(str(params[name] or "plain") for name in VARIANTS if name in params)
            if layout is None:
                layout = LAYOUTS[variant.split()[0].strip(",")]
            self.rows[item.nodeid] = [(layout, variant, program, direction) for direction in directions]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def page(self) -> str:
        """The page in Markdown."""
        found: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test, rows in self.rows.items():
            for layout, variant, program, direction in rows:
                found[layout, variant, program][direction].append(self.outcomes.get(test, "skipped"))
        lines = [f"| layout | variant | program | {READ} | {WRITE} |", "|---|---|---|---|---|"]
        for key, directions in sorted(found.items()):
            cells = [_cell(directions.get(direction, [])) for direction in (READ, WRITE)]
            lines.append(f"| {' | '.join([*(part or '–' for part in key), *cells])} |")
        versions = [
            f"| {name} | {number.partition('+')[0]} |" for name in ("jchop", *PACKAGES) if (number := _version(name))
        ]
        return _PAGE.format(versions="\n".join(versions), table="\n".join(lines))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cell(outcomes: list[str]) -> str:
    """How many tests passed of those that ran."""
    ran = [one for one in outcomes if one != "skipped"]
    return f"{ran.count('passed')} of {len(ran)}" if ran else "not run" if outcomes else "–"


_PAGE = """# Checkpoints beside other programs

`python tests/clients/matrix.py docs/measurements/clients.md` runs `tests/clients` and writes this page. Cells have the
tests that passed: weights bit for bit, and logits or tokens of tiny random models. *Not run*: it is not installed.

| package | version |
|---|---|
{versions}

{table}
"""

if __name__ == "__main__":
    matrix = Matrix()
    folder = str(Path(__file__).resolve().parent)
    code = pytest.main(["-q", "-n0", "-m", "clients", folder, *sys.argv[2:]], plugins=[matrix])
    Path(sys.argv[1]).write_text(matrix.page(), encoding="utf-8")
    sys.exit(code)
