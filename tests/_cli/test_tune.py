"""`jchop tune`: the table of `jc.tune` for a function of a file, its files, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from _cli.test_cli import PNG, error, lines
from each_case import each
from further import Further
from html_check import check_html

import jchop as jc

further = Further()

CODE = """
import jax
import jax.numpy as jnp


def apart(x, y):
    with jax.named_scope("product"):
        z = x * y
    with jax.named_scope("root"):
        return jnp.sqrt(z * z + 1)


def plain(x, y):
    return x * y + 1


def worst(low, exact):
    return jnp.max(jnp.abs(low - exact))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module and data of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned_model.py").write_text(CODE)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        y, x = rng.normal(size=(2, 8)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", y=y, x=x)
    return tmp_path


COMMAND = ("tune", "tuned_model:apart", "--data", "a.npz", "--tolerance", "0.01", "--menu", "e4m3,bfloat16,carrier")


@further
def json_is_that_of_tune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metric = ["--metric", "tuned_model:worst", "--held-out", "b.npz"]
    printed = json.loads("\n".join(lines(capsys, *COMMAND, *metric, "--json", "--plot", "tune.png")))
    import tuned_model  # type: ignore[import-not-found]

    inputs = [tuple(np.load(folder / f"{name}.npz")[x] for x in ("x", "y")) for name in ("a", "b")]
    menu = ["e4m3", "bfloat16", None]
    found = jc.tune(tuned_model.apart, menu, inputs[:1], 0.01, metric=tuned_model.worst, held_out=inputs[1:])
    assert printed == json.loads(json.dumps(found.as_dict()))
    assert (folder / "tune.png").read_bytes().startswith(PNG)


@further.first
def files_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines(capsys, *COMMAND, "--by", "equation", "--html", "tune.html")
    assert printed[0].split()[:3] == ["site", "format", "bits"]
    assert printed[-1] == "wrote tune.html" and any("tolerance 0.01" in line for line in printed)
    text = (folder / "tune.html").read_text()
    check_html(text)
    assert "data:image/png;base64," in text and "product/mul" in text
    assert "--by equation" in lines(capsys, "tune", "tuned_model:plain", *COMMAND[2:])[-1]


@each(
    ("options", "message"),
    [
        (["--menu", "e4m9x,e5m2"], "e4m9x"),
        (["--menu", "e4m3"], "two formats"),
        (["--tolerance", "-1"], "tolerance=-1.0"),
        (["--by", "line"], "by='line'"),
        (["--cost", "time"], "cost='time'"),
        (["--metric", "tuned_model:none"], "--metric 'tuned_model:none' cannot be loaded"),
        (["--data", "none.npz"], "none.npz"),
        (["--plot", "tune.jpg"], "--plot tune.jpg must end in .png"),
        (["--html", "tune.txt"], "--html tune.txt must end in .html"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(capsys, *COMMAND, *options)


test_further = further.test()
