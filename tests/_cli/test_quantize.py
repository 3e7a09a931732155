"""`jchop quantize` and `jchop inspect`: what they print, write and refuse, and what a kill leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _cli.test_cli import error
from each_case import each

import jchop as jc
from jchop.__main__ import main
from jchop._storage._files.safetensors import TensorWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    path = tmp_path / "in.safetensors"
    jc.save(path, {"mlp": {"kernel": x, "bias": x[0]}, "step": np.int32(3)})
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[list[str], str]:
    """A command that must succeed: the lines that it prints, and what it says on standard error."""
    assert main([str(word) for word in argv]) == 0
    printed = capsys.readouterr()
    return printed.out.splitlines(), printed.err


def test_quantize_reports_and_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    target = source.with_name("out.safetensors")
    rules = ("--rule", "kernel=int4(group=32,scale=bfloat16)", "--rule", "mlp=bfloat16")
    text, progress = run(capsys, "quantize", source, target, *rules)
    rows = {line.split("  ")[0]: [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text}
    kernel, bias = rows["mlp.kernel"], rows["mlp.bias"]
    assert "SNR dB" in text[0].split("  ")
    assert kernel[1:6] == ["8 x 64", "float32", "int4(group=32,scale=bfloat16)", "2,048", "288"]
    x = jc.load_checkpoint(source)["mlp.kernel"]
    moved = np.asarray(jc.round_to_format(x, "int4(group=32,scale=bfloat16)") - x, np.float64)
    sqnr = 10 * np.log10((np.asarray(x, np.float64) ** 2).sum() / (moved**2).sum())
    assert kernel[6:] == [f"{sqnr:.2f}", f"{np.abs(moved).max():.3g}"]
    assert bias[1:6] == ["64", "float32", "bfloat16", "256", "128"]
    assert rows["step"][1:] == ["scalar", "int32", "copied: no rule", "4", "4", "-", "-"]
    assert rows["all"][1:] == ["2,308", "420", "18.2 %"] and text[-1] == f"wrote {target}"
    assert "100/100" in progress
    out = jc.load_checkpoint(target)
    jax.tree.map(np.testing.assert_array_equal, out["mlp.kernel"], jc.quantize(x, "int4(group=32,scale=bfloat16)"))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    ("spec", "mixed", "whole"),
    [
        ("int4(group=32)", "2 inf to finite, 1 nan to finite", "64 nan to finite"),
        ("float8_e4m3fn", "2 inf to nan, 1 nan kept", "64 nan kept"),
        ("float8_e5m2", "2 inf kept, 1 nan kept", "64 nan kept"),
    ],
)
def test_quantize_notes_what_became_of_nan_and_infinities(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spec: str, mixed: str, whole: str
) -> None:
    x = np.ones((2, 32), np.float32)
    x[0, 3], x[1, 4], x[1, 5] = np.nan, np.inf, -np.inf
    tree = {"all": x * np.nan, "some": x, "none": np.ones((2, 32), np.float32)}
    jc.save(source := tmp_path / "a.safetensors", tree)
    text, _ = run(capsys, "quantize", source, tmp_path / "b.safetensors", "--rule", f"*={spec}", "--json")
    rows = {row["tensor"]: row for row in json.loads("\n".join(text))[:-1]}
    assert [rows[name]["note"] for name in ("some", "all", "none")] == [mixed, whole, None]
    same = "to" not in whole
    assert [rows["all"][name] for name in ("SNR dB", "max error")] == (["exact", 0] if same else [None, None])
    assert rows["none"]["SNR dB"] == "exact"
    jc.save_checkpoint(tmp_path / "in", tree, "plain")
    _, said = run(capsys, "quantize", tmp_path / "in", tmp_path / "out", "--rule", f"*={spec}")
    notes = [line for line in said.splitlines() if line.startswith("note")]
    assert notes == [f"note: all: {whole}", f"note: some: {mixed}"]


def test_an_array_without_elements_has_no_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = np.ones((0, 32), np.float32)
    jc.save(path := tmp_path / "a.safetensors", {"a": empty, "b": jc.quantize(empty, "nvfp4")})
    jc.save_checkpoint(folder := tmp_path / "in", {"a": empty, "b": empty}, "plain")
    for place in (path, folder):
        rows = json.loads("\n".join(run(capsys, "inspect", place, "--json")[0]))["arrays"]
        assert [row["bits"] for row in rows] == [None] * 2


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compare_unpacks_quantized_arrays(capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: type) -> None:
    """Their codes and scales are no arrays of their own."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(dtype)
    q, path = jc.quantize(x, "nvfp4"), tmp_path / "x.safetensors"
    jc.save(path, {"a": q, "b": x[0], "step": np.int32(3)})
    text, _ = run(capsys, "compare", path, "--formats", "e4m3")
    tables = [str(jc.compare(array, ["e4m3"])) for array in (np.asarray(jc.dequantize(q)), x[0], np.int32(3))]
    assert "\n".join(text) == f"a: {tables[0]}\n\nb: {tables[1]}\n\nstep: {tables[2]}"


def test_inspect_lists_arrays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    x = np.ones((4, 64), np.float32)
    jc.save(path, {"a": jc.quantize(x, "nvfp4"), "b": x, "c": jc.quantize(x[0, 0], "int8(group=tensor)")})
    text, _ = run(capsys, "inspect", path)
    rows = {line.split()[0]: [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text if line}
    assert rows["a"] == ["a", "4 x 64", "nvfp4", "148", "4.625"]
    assert rows["b"] == ["b", "4 x 64", "float32", "1,024", "32"]
    assert rows["c"] == ["c", "scalar", "int8", "5", "40"]
    assert text[0] == "layout: jchop" and rows["1,024"] == ["1,024 bytes", "float32"]


@pytest.mark.smoke
def test_an_existing_file_stays(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    target = source.with_name("out.safetensors")
    target.write_bytes(b"old")
    said = error(capsys, "quantize", str(source), str(target), "--rule", "*=bfloat16")
    assert "exists; --force" in said and target.read_bytes() == b"old"
    run(capsys, "quantize", source, target, "--rule", "*=bfloat16", "--force")
    assert jc.load_checkpoint(target)["mlp.bias"].dtype.name == "bfloat16"


@each(
    ("rules", "said"),
    [
        ([], "--rule"),
        (["kernel"], "no equals sign"),
        (["kernel=int4x"], "int4x"),
        ([r"mlp\..*=int4(group=2)"], "is a regular expression"),
        (["kernle=int4(group=2)"], "the nearest paths are 'mlp.kernel'"),
        (["kernel=int4(group=2):stochastic"], "needs --seed N"),
    ],
)
def test_bad_rules(capsys: pytest.CaptureFixture[str], source: Path, rules: list[str], said: str) -> None:
    target = source.with_name("out.safetensors")
    argv = [word for rule in rules for word in ("--rule", rule)]
    assert said in error(capsys, "quantize", str(source), str(target), *argv)
    assert not target.exists()


def test_a_tensor_that_a_rule_cannot_quantize_can_be_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place in ("a.safetensors", "folder/model.safetensors"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        jc.save(tmp_path / place, {"w": np.ones((4, 64), np.float32), "step": np.float32(3)})
    for source, target in (("a.safetensors", "b.safetensors"), ("folder", "other")):
        argv = ("quantize", str(tmp_path / source), str(tmp_path / target), "--rule")
        said = error(capsys, *argv, "*=int4(group=32)")
        assert "tensor 'step' of shape []: int4(group=32) names axis -1" in said
        rule = said.split("; the rule ")[1].split("'")[1]
        run(capsys, *argv, rule)
        assert set(jc.load_checkpoint(tmp_path / target)) == {"w", "step"}


def test_bad_files(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    rule, folder = ("--rule", "*=bfloat16"), source.parent
    assert "must end in .safetensors" in error(capsys, "quantize", str(source), str(folder / "x.bin"), *rule)
    assert "there is no folder" in error(capsys, "quantize", str(source), str(folder / "no/x.safetensors"), *rule)
    absent = str(folder / "no.safetensors")
    assert "No such file" in error(capsys, "quantize", absent, str(folder / "x.safetensors"), *rule)
    assert "No such file" in error(capsys, "inspect", absent)
    (folder / "bad.safetensors").write_bytes(b"12345678{}")
    assert "not a safetensors file" in error(capsys, "inspect", str(folder / "bad.safetensors"))


def test_a_pattern_excludes_and_may_hold_equals_signs(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    target = source.with_name("out.safetensors")
    run(capsys, "quantize", source, target, "--rule", "* !bias !a=b=bfloat16")
    out = jc.load_checkpoint(target)
    assert out["mlp.kernel"].dtype.name == "bfloat16" and out["mlp.bias"].dtype == np.float32


KILLS = """
import json, os, signal, sys, time
from pathlib import Path
from jchop.__main__ import main
from jchop._storage._files.safetensors import TensorWriter

source, target = map(Path, sys.argv[1:])
argv = ["quantize", str(source), str(target), "--rule", "*=bfloat16", "--force"]
points = [*(("write", n) for n in (1, 2, 3)), ("finish", 1), *(("time", n) for n in (0.05, 0.3, 0.6)), ("-", 0)]

def quantize(method, at):
    inner, calls = getattr(TensorWriter, method, None), []
    def outer(self, *arguments):
        inner(self, *arguments)
        calls.append(arguments)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
    if inner is not None:
        setattr(TensorWriter, method, outer)
    sys.stdout = open(os.devnull, "w")
    os._exit(main(argv))

found = []
for name, at in points:
    target.write_bytes(b"old")
    child = os.fork()  # before JAX has any threads
    if child == 0:
        quantize(name, at)
    if name == "time":
        time.sleep(at)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    found.append((name, status == signal.SIGKILL, target.read_bytes().hex()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("signalled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_leaves_the_old_file(source: Path, monkeypatch: pytest.MonkeyPatch, signalled: bool) -> None:
    target = source.with_name("out.safetensors")
    if not signalled:  # an end that nothing catches, after the first tensor
        write = TensorWriter.write

        def once(self: TensorWriter, *arguments: Any) -> None:
            write(self, *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(TensorWriter, "write", once)
        target.write_bytes(b"old")
        with contextlib.suppress(KeyboardInterrupt):
            assert main(["quantize", str(source), str(target), "--rule", "*=bfloat16", "--force"])
        assert target.read_bytes() == b"old"
        return
    if os.name != "posix":
        pytest.skip("needs fork and SIGKILL")
    argv, environment = [sys.executable, "-c", KILLS, str(source), str(target)], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, check=True)
    *killed, (_, last_killed, whole) = json.loads(run.stdout)
    old = b"old".hex()
    for name, was_killed, content in killed:
        assert (was_killed, content) == (True, old) or (name == "time" and content in (old, whole)), name
    assert not last_killed and whole != old
    assert jc.load_checkpoint(target)["mlp.bias"].dtype.name == "bfloat16"


def test_names_are_printed_without_their_control_characters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    jc.save(source, {"a\x1b[2J\x07": np.ones(64, np.float32), "b\u202ec\nd": np.ones(8, np.float32)})
    listed, _ = run(capsys, "inspect", source)
    report, progress = run(capsys, "quantize", source, target, "--rule", "*a*=int8(group=tensor)")
    quantized, _ = run(capsys, "inspect", target)
    for text in (listed, report, quantized):
        assert any(r"a\x1b[2J\x07" in line for line in text) and any(r"b\u202ec\nd" in line for line in text)
    assert all(line.isprintable() for line in [*listed, *report, *quantized, *progress.splitlines()])
