"""`jchop convert`, and `jchop inspect` and `jchop quantize` for folders: output, errors, and runs that were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _cli.test_cli import error
from _cli.test_quantize import ROOT, run
from checkpoint_layouts import CASES, make_nvfp4, write_folder
from further import Further

import jchop as jc
from jchop import load_checkpoint, save_checkpoint
from jchop._checkpoints.writer import convert_checkpoint

further = Further()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@further.first
def convert_and_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case, source, target = CASES["gptq_v2"], tmp_path / "in", tmp_path / "out"
    write_folder(source, case.make(np.random.default_rng(0)) | {"norm.weight": np.ones(8, np.float32)}, case)
    (source / "tokenizer.json").write_text("{}")
    before = contents(source)
    text, progress = run(capsys, "convert", source, target, "--layout", "compressed-tensors")
    assert text[0] == "layout: compressed-tensors" and text[-1] == f"wrote {target}" and "100/100" in progress
    rows = {line.split()[0]: line.split() for line in text if line}
    assert rows["w.weight"][1:] == ["32", "x", "64", "pack-quantized", "1,200", "4.688"]
    assert rows["norm.weight"][1:] == ["8", "float32", "32", "32"]
    assert contents(source) == before
    assert sorted(contents(target)) == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["config_groups"]["group_0"]["weights"]["group_size"]) == ("pack-quantized", 32)
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(target), load_checkpoint(source))
    listed, _ = run(capsys, "inspect", target)
    assert listed == text[: len(listed)]
    assert "layout: gptq_v2" in run(capsys, "inspect", source)[0]


def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = CASES["nf4"]
    write_folder(source := tmp_path / "in", case.make(np.random.default_rng(0)), case)
    assert "gptq holds, for example" in error(capsys, "convert", str(source), str(tmp_path / "out"), "--layout", "gptq")
    assert "is the checkpoint that is read" in error(capsys, "convert", str(source), str(source), "--layout", "jchop")
    assert "has tensors already" in _again(capsys, source, tmp_path / "b")
    (old := tmp_path / "old.safetensors").write_bytes(b"old")
    for command in (["convert", "--layout", "plain"], ["quantize", "--rule", "*=int8"]):
        argv = [command[0], str(source), str(old), *command[1:]]
        assert f"OUT {old} exists; --force replaces it" in error(capsys, *argv) and old.read_bytes() == b"old"
    run(capsys, "convert", source, old, "--layout", "plain", "--force")
    assert set(load_checkpoint(old)) == set(load_checkpoint(source))
    argv = ["convert", str(source), str(tmp_path / "new.safetensors"), "--layout", "plain", "--shard", "3"]
    assert f"--shard 3 belongs to a folder; OUT {argv[2]} is one file" in error(capsys, *argv)
    (tmp_path / "empty").mkdir()
    assert "the folder has no model.safetensors" in error(capsys, "inspect", str(tmp_path / "empty"))


def test_a_refused_run_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The next run may take the name; a folder that was there keeps its files."""
    save_checkpoint(source := tmp_path / "in", {"w": np.ones((8, 32), np.float32)}, "plain")
    packed = jc.quantize(np.ones((8, 32), np.float32), "int4(group=32,scale=float16)")
    save_checkpoint(odd := tmp_path / "odd", {"w": packed}, "jchop")  # no name that compressed-tensors has
    new, old = tmp_path / "new" / "folder", tmp_path / "old"
    old.mkdir()
    (old / "notes.txt").write_text("mine")
    for target in (new, old):
        refused = ("convert", str(odd), str(target), "--layout", "compressed-tensors")
        assert "weight' alone, of axes (out, in). The layouts jchop and plain hold any name" in error(capsys, *refused)
        refused = ("quantize", str(source), str(target), "--rule", "*=int8(group=5,axis=7)")
        assert "tensor 'w' of shape" in error(capsys, *refused)
    assert not new.parent.exists() and set(contents(old)) == {"notes.txt"}
    run(capsys, "convert", odd, new, "--layout", "plain")
    run(capsys, "convert", odd, old, "--layout", "plain")
    assert set(contents(old)) - set(contents(new)) == {"notes.txt"}


def test_numbers_differ_in_their_last_bit_only_where_that_is_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_folder(folder := tmp_path / "folder", make_nvfp4(np.random.default_rng(3)), CASES["nvfp4"])
    close = load_checkpoint(folder, exact=False)["w.weight"]
    save_checkpoint(source := tmp_path / "in", {"w.weight": close}, "jchop")
    argv = ["convert", str(source), str(target := tmp_path / "out"), "--layout", "compressed-tensors"]
    assert "w.weight" in error(capsys, *argv) and not target.exists()
    run(capsys, *argv, "--inexact")
    found, x = (np.asarray(jc.dequantize(q)) for q in (load_checkpoint(target)["w.weight"], close))
    assert (found != x).any()
    np.testing.assert_allclose(found, x, rtol=2.0**-22)


def _again(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    run(capsys, "convert", source, target, "--layout", "jchop")
    return error(capsys, "convert", str(source), str(target), "--layout", "jchop")


class Killed(BaseException):
    """Ends a run as a signal does."""


def test_a_killed_run_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 32, 64)).astype(np.float32)
    tree = {f"l{i}.weight": jc.quantize(part, "int4(group=32,scale=float16)") for i, part in enumerate(x)}
    save_checkpoint(source := tmp_path / "in", tree, "awq", shard_bytes=3000)
    convert_checkpoint(source, whole := tmp_path / "whole", "gptq", shard_bytes=3000)
    target = tmp_path / "out"

    def kill(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise Killed

    with pytest.raises(Killed):
        convert_checkpoint(source, target, "gptq", shard_bytes=3000, progress=kill)
    kept = {name: (target / name).stat().st_mtime_ns for name in contents(target) if name.endswith(".safetensors")}
    assert kept and ".jchop-unfinished.json" in contents(target)
    assert "has no model.safetensors" in error(capsys, "inspect", str(target))  # nothing that reads as a checkpoint
    with pytest.raises(ValueError, match="unfinished run of other arrays"):
        convert_checkpoint(source, target, "awq", shard_bytes=3000)
    assert convert_checkpoint(source, target, "gptq", shard_bytes=3000)
    assert contents(target) == contents(whole)
    assert all((target / name).stat().st_mtime_ns == when for name, when in kept.items())


def test_quantize_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x: Any = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    tree = {f"l{i}.weight": part for i, part in enumerate(x)} | {"norm": x[0, 0]}
    save_checkpoint(source := tmp_path / "in", tree, "plain", shard_bytes=4096)
    rules = ("--rule", "weight=int8(channel=0)", "--rule", "norm=bfloat16")
    run(capsys, "quantize", source, target := tmp_path / "out", *rules)
    found = load_checkpoint(target)
    jax.tree.map(np.testing.assert_array_equal, found["l1.weight"], jc.quantize(x[1], "int8(channel=0)"))
    assert found["norm"].dtype == np.float32 and found["norm"].qvalue.dtype == "bfloat16"
    said = error(capsys, "quantize", str(source), str(tmp_path / "c"), "--rule", "kernel=int8")
    assert "no tensor is quantized by 'kernel=int8" in said
    again = error(capsys, "quantize", str(target), str(tmp_path / "c"), "--rule", "weight=int8")
    assert "by 'weight=int8'; packed already: 'l0.weight', 'l1.weight', 'l2.weight'. `jchop" in again


CHILD = """
import sys
from hostile_files import memory
from jchop.__main__ import main

command, small, source, target, *options = sys.argv[1:]
assert main([command, small, target + "-small", *options]) == 0  # modules and compiled programs are there before
before = memory("VmHWM")
code = main([command, source, target, *options])
print(memory("VmHWM") - before)
sys.exit(code)
"""


def child(target: Path, *argv: Any, kill_at: int | None = None) -> int:
    """The memory that a run takes, in bytes; one that is killed when its folder has so many files returns -1."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", CHILD, *map(str, argv)]
    shutil.rmtree(f"{target}-small", ignore_errors=True)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    while kill_at is not None and run.poll() is None:
        if target.is_dir() and len(list(target.iterdir())) >= kill_at:
            run.kill()
    out, said = run.communicate()
    if kill_at is not None:
        assert run.returncode == -signal.SIGKILL, said
        return -1
    assert run.returncode == 0, said
    return int(out.split()[-1])


def packed(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        f"l{i}.weight": jc.quantize(rng.standard_normal((512, 512)).astype(np.float32), "int4(group=32,scale=float16)")
        for i in range(count)
    }


@further
@pytest.mark.parametrize(
    ("layout", "process"),
    [("plain", False), *(pytest.param(layout, True, marks=pytest.mark.slow) for layout in ("plain", "gptq"))],
)
def a_folder_is_converted_in_little_memory_and_survives_kills(tmp_path: Path, layout: str, process: bool) -> None:
    """64 MiB as float32, 9 MiB as int4: in memory are tensors of 8 MiB, and one array with copies of it.

    Within this process half of that is converted, and what NumPy takes is counted.
    """
    if not process:
        save_checkpoint(tmp_path / "in", packed(32), "awq", shard_bytes=1 << 20)
        tracemalloc.start()
        convert_checkpoint(tmp_path / "in", tmp_path / "out", layout, shard_bytes=1 << 20)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(map(len, contents(tmp_path / "out").values())) > 32 << 20
        assert most < 20 << 20
        return
    if sys.platform != "linux":
        pytest.skip("/proc of Linux")
    tree, mebibyte = packed(64), 1 << 20
    target, whole = tmp_path / "out", tmp_path / "whole"
    for name, part in (("small", {"l.weight": tree["l0.weight"]}), ("in", tree)):
        save_checkpoint(tmp_path / name, part, "awq", shard_bytes=8 * mebibyte)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    argv = ("convert", tmp_path / "small", tmp_path / "in")
    options = ("--layout", layout, "--shard", "8")
    assert child(whole, *argv, whole, *options) < 40 * mebibyte
    files = contents(whole)
    for kill_at in (1, 2, len(files) - 1, len(files)):
        child(target, *argv, target, *options, kill_at=kill_at)
        if contents(target) == files:  # on a busy machine it may be done before the kill
            shutil.rmtree(target)
    assert child(target, *argv, target, *options) < 40 * mebibyte
    assert contents(target) == files


test_further = further.test()
