"""Comforts of the command line: JSON of every command, completion in a shell, hints for misspelt words."""

from __future__ import annotations

import io
import json
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop.__main__ import COMMANDS, main
from jchop._cli._command import bold
from jchop._cli._completion import words_by_command


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> object:
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_has_json() -> None:
    assert [name for name, options in words_by_command(COMMANDS).items() if "--json" not in options] == ["completion"]


def test_the_page_names_every_command() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert [name for name in words_by_command(COMMANDS) if f"`jchop {name}" not in page] == []


def test_formats_and_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "formats", "--json")
    assert isinstance(rows, list) and {row["name"] for row in rows} >= {"bfloat16", "float8_e4m3fn"}
    half = next(row for row in rows if row["name"] == "binary16")
    assert (half["bits"], half["max"], half["roundoff"], half["inf"]) == (16, 65504, 2**-11, True)
    facts = printed(capsys, "info", "e4m3fn", "--json")
    assert isinstance(facts, dict) and (facts["format"], facts["bits"], facts["bias"]) == ("float8_e4m3fn", 8, 7)
    assert (facts["smallest exponent"], facts["eps"], facts["infinities"]) == (-6, 0.125, False)
    values = {row["which"]: row["value"] for row in facts["codes"]}
    assert values["smallest positive"] == 2.0**-9 and values["NaN"] == "nan"
    assert math.copysign(1, values["minus zero"]) == -1


def test_info_as_json_has_exact_numbers_and_those_of_scales(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed(capsys, "info", "integer64", "--json")
    assert isinstance(whole, dict) and (whole["max"], whole["min"], whole["precision"]) == (2**63 - 1, -(2**63), None)
    wide = printed(capsys, "info", "fixed4.60", "--json")
    assert isinstance(wide, dict) and (wide["max"], wide["smallest"]) == ("9223372036854775807 * 2^-60", 2.0**-60)
    scaled = printed(capsys, "info", "mxfp4", "--json")
    assert isinstance(scaled, dict) and (scaled["element"], scaled["bits per element"]) == ("float4_e2m1fn", 4.25)


def test_round_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = printed(capsys, "round", "0.1", "1e9", "--to", "integer4:saturate", "--json")
    assert isinstance(found, dict) and found["to"] == "integer4:saturate"
    assert [row["rounded"] for row in found["numbers"]] == [0, 7]
    assert [row["binary"] for row in found["numbers"]] == ["0000", "0111"]
    np.save(tmp_path / "x.npy", np.array([1.0, 1.1, 1e9], np.float32))
    facts = printed(
        capsys, "round", str(tmp_path / "x.npy"), "--to", "e5m2", "--out", str(tmp_path / "y.npy"), "--json"
    )
    assert isinstance(facts, dict) and (facts["shape"], facts["changed"], facts["overflows"]) == ([3], 2, 1)


def test_round_as_json_has_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    long = "0.1" + "0" * 70 + "1"
    words = ["0.3", "-0", "1e400", "nan", long]
    found = printed(capsys, "round", *words, "--to", "e5m2:saturate", "--carrier", "float32", "--json")
    assert isinstance(found, dict)
    third, zero, huge, nan, tenth = found["numbers"]
    assert third["rounded"] == 0.3125 and math.copysign(1, zero["rounded"]) == -1
    assert third["abs. error"] == float(Fraction("0.3125") - Fraction("0.3"))
    assert third["rel. error"] == float((Fraction("0.3125") - Fraction("0.3")) / Fraction("0.3"))
    assert (huge["rounded"], huge["abs. error"], huge["rel. error"]) == (57344, "1e+400", 1)
    assert (nan["rounded"], nan["code"], tenth["value"]) == ("nan", "0x7e", long)
    found = printed(capsys, "round", "1.5", "2", "0.1", str(2**53 + 1), str(2**70 + 1), "inf", "--to", "e5m2", "--json")
    assert isinstance(found, dict)
    assert [row["value"] for row in found["numbers"]] == [1.5, 2, "0.1", 2**53 + 1, str(2**70 + 1), "inf"]
    found = printed(capsys, "round", "0.1", "--to", "binary32", "--carrier", "float32", "--json")
    assert isinstance(found, dict) and found["numbers"][0]["rounded"] == float(np.float32(0.1))
    found = printed(capsys, "round", "0.1", "--to", "int8", "--json")
    assert isinstance(found, dict) and found["numbers"][0]["code"] is None


def test_quantize_and_inspect_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    jc.save(source, {"7": np.ones((4, 64), np.float32)})
    capsys.readouterr()
    rows = printed(capsys, "quantize", source, target, "--rule", "*=int8(group=32)", "--json")
    assert isinstance(rows, list) and (rows[0]["tensor"], rows[0]["bytes before"]) == ("7", 1024)
    found = printed(capsys, "inspect", target, "--json")
    assert isinstance(found, dict) and found["arrays"][0]["array"] == "7" and found["layout"] == "jchop"


@each(
    ("argv", "near"),
    [
        (["rond", "1", "--to", "e5m2"], "did you mean round"),
        (["round", "1", "--to", "e5m2", "--roundng", "up"], "did you mean --rounding"),
        (["round", "1", "--to", "e5m2", "--rounding", "nearest_evn"], "did you mean nearest_even"),
        (["round", "1", "--to", "bfloat61"], "did you mean bfloat16"),
        (["compare", "x.npy", "--scale", "fitt"], "did you mean fit"),
        (["formats", "--bits", "8"], "unrecognized arguments: --bits 8 (see jchop formats --help)"),
        (["completion", "bsh"], "did you mean bash"),
        (["info", "int4(group=32"], "not as many closing as opening parentheses"),
        (["study", "fine.py:fun", "--data", "x.npz"], "as 'model:apply' for a function of model.py"),
        (["study", "broken:fun", "--data", "x.npz"], "broken.py, line 1: '(' was never closed"),
        (["study", "fine:fum", "--data", "x.npz"], "did you mean fun"),
        (["study", "fne:fun", "--data", "x.npz"], "did you mean fine"),
        (["study", "fine:fun", "--data", "x.npz", "--formats", "int8"], "integers without a scale are 'integer8'"),
    ],
)
def test_a_wrong_word_gets_its_neighbours_or_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], near: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fine.py").write_text("def fun(x):\n    return x\n")
    Path("broken.py").write_text("def fun(x:\n")
    np.savez("x.npz", x=np.ones(3))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert near in error and error.count("\n") == 1


@each(
    ("words", "wanted"),
    [
        (["jchop", "comp"], {"compare", "completion"}),
        (["jchop", "round", "--ov"], {"--overflow"}),
        (["jchop", "round", "--overflow", "sat"], {"saturate"}),
        (["jchop", "round", "1", "--to", "float8_e4m3f"], {"float8_e4m3fn", "float8_e4m3fnuz"}),
        (["jchop", "info", "nvf"], {"nvfp4", "nvfp4_e5m3"}),
        (["jchop", "tune", "--by", "eq"], {"equation"}),
        (["jchop", "tune", "--metric", "l"], {"largest"}),
        (["jchop", "tune", "--cost", "b"], {"bits", "bytes"}),
        (["jchop", "ptq", "--method", "s"], {"smooth", "sparse", "sign_round", "sequential"}),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], words: list[str], wanted: set[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _jchop; echo ${{COMPREPLY[@]}}"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) == wanted and not run.stderr


def test_the_other_shells_know_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(name in script for name in words_by_command(COMMANDS)) and "budget-seconds" in script


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bold_letters_are_for_terminals() -> None:
    assert bold("head", Terminal()) == "\x1b[1mhead\x1b[0m"
    assert bold("head", io.StringIO()) == bold("head", None) == "head"
