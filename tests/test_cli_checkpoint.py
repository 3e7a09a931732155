"""`jchop convert`, and `jchop inspect` and `jchop quantize` for folders: output, errors, and runs that were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_layouts import CASES, write_folder
from test_cli import error
from test_cli_quantize import run

import jchop as jc
from jchop.storage import load_checkpoint, save_checkpoint
from jchop.storage._checkpoints.public import convert


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_convert_and_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    assert "It has int4" in error(capsys, "convert", str(source), str(tmp_path / "out"), "--layout", "gptq")
    assert "is the checkpoint that is read" in error(capsys, "convert", str(source), str(source), "--layout", "jchop")
    assert "has tensors already" in _again(capsys, source, tmp_path / "b")
    (tmp_path / "empty").mkdir()
    assert "the folder has no model.safetensors" in error(capsys, "inspect", str(tmp_path / "empty"))


def _again(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    run(capsys, "convert", source, target, "--layout", "jchop")
    return error(capsys, "convert", str(source), str(target), "--layout", "jchop")


class Killed(BaseException):
    """Ends a run as a signal does."""


def test_a_killed_run_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 32, 64)).astype(np.float32)
    tree = {f"l{i}.weight": jc.quantize(part, "int4(group=32,scale=float16)") for i, part in enumerate(x)}
    save_checkpoint(tree, source := tmp_path / "in", "awq", shard_bytes=3000)
    convert(source, whole := tmp_path / "whole", "gptq", shard_bytes=3000)
    target = tmp_path / "out"

    def kill(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise Killed

    with pytest.raises(Killed):
        convert(source, target, "gptq", shard_bytes=3000, progress=kill)
    kept = {name: (target / name).stat().st_mtime_ns for name in contents(target) if name.endswith(".safetensors")}
    assert kept and ".jchop-unfinished.json" in contents(target)
    assert "has no model.safetensors" in error(capsys, "inspect", str(target))  # nothing that reads as a checkpoint
    with pytest.raises(ValueError, match="unfinished run of other arrays"):
        convert(source, target, "awq", shard_bytes=3000)
    assert convert(source, target, "gptq", shard_bytes=3000)
    assert contents(target) == contents(whole)
    assert all((target / name).stat().st_mtime_ns == when for name, when in kept.items())


def test_quantize_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x: Any = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    tree = {f"l{i}.weight": part for i, part in enumerate(x)} | {"norm": x[0, 0]}
    save_checkpoint(tree, source := tmp_path / "in", "plain", shard_bytes=4096)
    rules = ("--rule", "weight=int8(channel=0)", "--rule", "norm=bfloat16")
    run(capsys, "quantize", source, target := tmp_path / "out", *rules)
    found = load_checkpoint(target)
    jax.tree.map(np.testing.assert_array_equal, found["l1.weight"], jc.quantize(x[1], "int8(channel=0)"))
    assert found["norm"].dtype == np.float32 and found["norm"].qvalue.dtype == "bfloat16"
    said = error(capsys, "quantize", str(source), str(tmp_path / "c"), "--rule", "kernel=int8")
    assert "no tensor is quantized by 'kernel=int8" in said
