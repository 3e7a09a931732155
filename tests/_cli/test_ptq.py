"""`jchop ptq`: what it prints, writes and refuses, and a run that is killed in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _cli.test_cli import error
from further import Further

import jchop as jc
from jchop.__main__ import main

further = Further()

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import jax.numpy as jnp

def apply(p, x, scale):
    return jnp.tanh(x @ p["layers"][0] + p["bias"]) @ p["layers"][1] * scale[:, None]
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, its weights and data."""
    rng = np.random.default_rng(0)
    (tmp_path / "toy_model_of_ptq.py").write_text(MODEL)
    layers = [rng.normal(size=shape).astype(np.float32) / 3 for shape in ((8, 8), (8, 8))]
    jc.save_safetensors(tmp_path / "w.safetensors", {"layers": layers, "bias": np.ones(8, np.float32)})
    x = rng.normal(size=(40, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", scale=x[:, 0], x=x)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more: str, data: str = "data.npz") -> list[str]:
    named = ["ptq", "toy_model_of_ptq:apply", "w.safetensors", data, "--out", "out.safetensors"]
    return [*named, "--rule", "layers=int4(group=8)", *more]


def test_it_writes_what_quantize_gives(capsys: pytest.CaptureFixture[str], work: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(words("--method", "nearest", "--batch", "20", "--report", "json", "--plot", "r.png")) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [row["path"] for row in report["weights"]] == ["layers/0", "layers/1"]
    assert "data: batch 2 of 2\nstage 1 of 2: layers/0: " in printed.err
    assert (work / "r.png").read_bytes().startswith(b"\x89PNG") and not (work / "out.safetensors.run").exists()
    with np.load(work / "data.npz") as file:
        x, scale = file["x"], file["scale"]
    params = jc.load_safetensors(work / "w.safetensors", nested=True)
    sys.path.insert(0, str(work))
    try:
        from toy_model_of_ptq import apply  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(work))
    packed = jc.quantize_fn(apply, jc.Rule("layers", weight="int4(group=8)")).pack(
        params, batches=[(x, scale)], steps=[]
    )
    jax.tree.map(np.testing.assert_array_equal, jc.load_safetensors(work / "out.safetensors", nested=True), packed)


@further.first
def what_it_refuses(capsys: pytest.CaptureFixture[str], work: Path) -> None:
    x = np.ones((4, 8), np.float32)
    np.savez(work / "names.npz", y=x)
    np.savez(work / "lengths.npz", x=x, scale=x[:3, 0])
    np.savez(work / "empty.npz", x=x[:0], scale=x[:0, 0])
    np.savez(work / "nan.npz", x=x * np.nan, scale=x[:, 0])
    np.save(work / "one.npy", x)
    (work / "text.npz").write_text("no")
    for given, said in {
        "names.npz": "has the arrays y, and the function takes x, scale after the parameters",
        "lengths.npz": "must have first axes of one length, that of samples: x [4, 8], scale [3]",
        "empty.npz": "empty.npz has no sample",
        "one.npy": "must be a .npz file of arrays",
        "text.npz": "must be a .npz file of arrays",
        "none.npz": "none.npz",
    }.items():
        assert said in error(capsys, *words("--method", "nearest", data=given)).replace("\n", " ")
    assert main(words("--method", "nearest", data="nan.npz")) == 2
    assert "jchop: error: batches give the product of the parameter 'layers/0' at " in capsys.readouterr().err
    for more, said in {
        (
            "--method",
            "rtn",
        ): "--method 'rtn' must be nearest, or steps of sequential, smooth, awq, rotate, correct_error, sparse,",
        ("--method", "sparse(2, 4)"): "sparse(2, 4, by='loss') prunes in the sweep of gptq: add it",
        ("--method", "gptq(order='up')"): "order='up' must be one of",
        ("--method", "gptq(open('x'))"): "--method \"gptq(open('x'))\": malformed",
        ("--rule", "nowhere=int4"): "matches no parameter and no product",
        ("--batch", "0"): "--batch 0 must be at least 1",
        ("--plot", "r.pdf"): "--plot r.pdf must end in .png",
    }.items():
        assert said in error(capsys, *words(*more))
    for name, said in {
        "model": "must be MODULE:FUNCTION",
        "toy_model_of_ptq:none": "cannot be loaded",
        "no_such_module:f": "cannot be loaded",
        "toy_model_of_ptq:jnp": "is module, and no function",
    }.items():
        assert said in error(capsys, *["ptq", name, *words()[2:]])
    (work / "out.safetensors").write_bytes(b"old")
    assert "exists; --force replaces it" in error(capsys, *words())


class Killed(BaseException):
    """Ends a run as a signal does."""


class Killer(io.StringIO):
    def write(self, text: str) -> int:
        if text.startswith("stage 1 of 2"):
            raise Killed
        return len(text)


@further
@pytest.mark.parametrize("signalled", [False, pytest.param(True, marks=pytest.mark.slow)])
def a_killed_run_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, work: Path, signalled: bool
) -> None:
    steps = ("--method", "correct_error, gptq, correct_biases" if signalled else "correct_error")

    def command(*more: str) -> tuple[int, str]:
        if not signalled:
            return main(words(*steps, *more)), capsys.readouterr().err
        done = subprocess.run([sys.executable, "-m", "jchop", *words(*steps, *more)], **options, capture_output=True)
        return done.returncode, done.stderr

    options: dict[str, Any] = {"cwd": work, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    if signalled:
        argv = [sys.executable, "-m", "jchop", *words(*steps)]
        with subprocess.Popen(argv, **options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
            assert first.stderr is not None
            for line in first.stderr:
                if line.startswith("stage 1 of 2"):
                    break
            first.send_signal(signal.SIGKILL)
    else:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(sys, "stderr", Killer())
            main(words(*steps))
        capsys.readouterr()
    assert (work / "out.safetensors.run").is_dir() and not (work / "out.safetensors").exists()
    status, said = command("--batch", "7")
    assert "holds a run with other batches; it continues" in said and status == 2
    status, said = command()
    assert status == 0, said
    assert said.index("stage 1 of 2") < said.index("data: batch")
    one = (work / "out.safetensors").read_bytes()
    assert command("--force")[0] == 0
    assert (work / "out.safetensors").read_bytes() == one and not (work / "out.safetensors.run").exists()


test_further = further.test()
