"""`jchop blame`: the table of `EmulatedFunction.blame` for a function of a file, its files, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from _cli.test_cli import PNG, error, lines
from each_case import each
from html_check import check_html

import jchop as jc
from jchop.__main__ import main

CODE = """
import jax.numpy as jnp


def loss(x, y):
    return jnp.sum((x - y) ** 2) / 3


def keyword_loss(x, *, y):
    return loss(x, y)


def spread(x):
    return x / jnp.max(x)


def first(result):
    return result[0]


def same(x):
    return x


def branching(x):
    return x if x[0] > 0 else -x


def chosen(x):
    return x[x > 0]


def inner(x):
    raise ValueError("boom")


def boom(x):
    return inner(x)


def divided(x):
    return x * (1 / 0)


def shapes(x):
    return x @ x[:-1]


def nothing(x):
    assert x.ndim == 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module and data of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blamed_model.py").write_text(CODE)
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=(2, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", y=y, x=x)
    np.savez(tmp_path / "x.npz", rng.normal(size=8).astype(np.float32))
    return tmp_path


def test_json_is_that_of_blame(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(
        "\n".join(lines(capsys, "blame", "blamed_model:loss", "--data", "data.npz", "--to", "e4m3", "--json"))
    )
    import blamed_model  # type: ignore[import-not-found]

    data = np.load(folder / "data.npz")
    found = jc.emulate(blamed_model.loss, "e4m3").blame(data["x"], data["y"])
    names = ("error", "value", "reference", "unexplained")
    assert [printed[name] for name in names] == [getattr(found, name) for name in names]
    rows = [(row["primitive"], row["contribution"]) for row in printed["rows"]]
    assert rows == [(row.primitive, row.contribution) for row in found.rows]


def test_the_report_is_that_of_low_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("report", "blamed_model:loss", "--data", "data.npz", "--to", "e4m3")
    assert lines(capsys, *command, "--html", "page.html")[-1] == "wrote page.html"
    text = (folder / "page.html").read_text()
    check_html(text)
    assert "data:image/png;base64," in text and "cancelled" in text
    import blamed_model  # type: ignore[import-not-found]

    with np.load(folder / "data.npz") as data:
        found = jc.emulate(blamed_model.loss, "e4m3").report(data["x"], data["y"], trace_values=True)
    assert json.loads("\n".join(lines(capsys, *command, "--json"))) == json.loads(found.to_json())


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("blame --to e4m3", "error"),
        ("study --formats e4m3 --modes nearest_even", "rows"),
        ("tune --tolerance 1 --menu e4m3,e5m2", "errors"),
    ],
)
def test_arguments_by_keyword_alone(folder: Path, command: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are taken by name, or in their order after the others."""
    np.savez(folder / "list.npz", *(np.load(folder / "data.npz")[name] for name in ("x", "y")))
    name, *options = command.split()
    found = []
    for function, data in (("loss", "data.npz"), ("keyword_loss", "data.npz"), ("keyword_loss", "list.npz")):
        assert main([name, f"blamed_model:{function}", "--data", data, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)[field])
    assert found[0] and found[0] == found[1] == found[2]
    np.savez(folder / "many.npz", *np.ones((3, 8), np.float32))
    said = error(capsys, name, "blamed_model:keyword_loss", "--data", "many.npz", *options)
    assert "keyword_loss() takes 1 positional argument but 2" in said


def test_files_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["blame", "blamed_model:spread", "--data", "x.npz", "--to", "e4m3:stochastic", "--seed", "3"]
    printed = lines(capsys, *command, "--output", "blamed_model:first", "--plot", "blame.png", "--html", "blame.html")
    assert printed[0].split()[:4] == ["primitive", "spec", "contribution", "share"]
    assert printed[-2:] == ["wrote blame.png", "wrote blame.html"]
    assert (folder / "blame.png").read_bytes().startswith(PNG)
    text = (folder / "blame.html").read_text()
    check_html(text)
    assert "data:image/png;base64," in text and "contribution" in text
    import blamed_model  # type: ignore[import-not-found]

    low = jc.emulate(blamed_model.spread, "e4m3:stochastic", key=jax.random.key(3))
    found = low.blame(np.load(folder / "x.npz")["arr_0"], output=blamed_model.first)
    assert f"error {found.error:.4g}," in "\n".join(printed)


@each(
    ("options", "message"),
    [
        (["blamed_model:loss", "--data", "data.npz", "--to", "e4m9x"], "e4m9x"),
        (["blamed_model:loss", "--data", "x.npz", "--to", "e4m3"], "missing 1 required positional argument: 'y'"),
        (["blamed_model:none", "--data", "x.npz", "--to", "e4m3"], "FUNCTION 'blamed_model:none' cannot be loaded"),
        (["blamed_model:spread", "--data", "x.npz", "--to", "e4m3:stochastic"], "needs --seed N"),
        (
            ["blamed_model:spread", "--data", "x.npz", "--to", "e4m3", "--plot", "b.jpg"],
            "--plot b.jpg must end in .png",
        ),
        (["blamed_model:spread", "--data", "x.npz", "--to", "e4m3", "--max-turns", "0"], "max_turns=0"),
        (["blamed_model:spread", "--data", "x.npz"], "--to"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(capsys, "blame", *options)


def test_the_help_names_the_limit_of_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "looping.py").write_text(
        "import jax\ndef loop(x):\n    return jax.lax.while_loop(lambda y: y[0] < 1e6, lambda y: y + 1, x * 1.1)\n"
    )
    np.savez(folder / "zero.npz", np.zeros(1, np.float32))
    said = error(capsys, "blame", "looping:loop", "--data", "zero.npz", "--to", "e8m20")
    (limit,) = re.findall(r"max_turns=(\d+) turns", said)
    assert main(["blame", "--help"]) == 0
    assert f"a loop of more than {limit} is an error" in " ".join(capsys.readouterr().out.split())


def test_a_function_without_roundings_draws_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(folder / "ones.npz", np.ones(4, np.float32))
    message = error(capsys, "blame", "blamed_model:same", "--data", "ones.npz", "--to", "e4m3", "--plot", "b.png")
    assert "FUNCTION blamed_model:same makes no error in e4m3" in message
    assert not (folder / "b.png").exists()


def test_a_function_that_jax_cannot_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error(capsys, "blame", "blamed_model:branching", "--data", "x.npz", "--to", "e4m3")
    assert "FUNCTION 'blamed_model:branching' cannot be traced by JAX: Attempted boolean conversion" in said
    assert "use jax.numpy and jax.lax in place of float, int, if" in said and "http" not in said
    said = error(capsys, "blame", "blamed_model:chosen", "--data", "x.npz", "--to", "e4m3")
    assert "cannot be traced by JAX: Array boolean indices must be concrete" in said and "http" not in said


@pytest.mark.parametrize("command", ["blame --to e4m3", "study", "tune --tolerance 1 --menu e4m3,e5m2"])
@pytest.mark.usefixtures("folder")
def test_errors_of_the_function_have_its_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = command.split()
    line = {text.strip(): number for number, text in enumerate(CODE.splitlines(), start=1)}
    raising = line['raise ValueError("boom")']
    for function, told in (
        ("boom", f"ValueError at blamed_model.py:{raising}: boom"),
        ("divided", f"ZeroDivisionError at blamed_model.py:{line['return x * (1 / 0)']}: division by zero"),
        ("shapes", f"TypeError at blamed_model.py:{line['return x @ x[:-1]']}: "),
        ("nothing", f"AssertionError at blamed_model.py:{line['assert x.ndim == 2']}"),
        ("loss", "TypeError: loss() missing 1 required positional argument: 'y'"),
    ):
        said = error(capsys, name, f"blamed_model:{function}", "--data", "x.npz", *options)
        assert f"FUNCTION 'blamed_model:{function}' raised {told}" in said


def test_errors_of_the_module_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "failing_model.py").write_text("x = 1 / 0\n")
    said = error(capsys, "blame", "failing_model:f", "--data", "x.npz", "--to", "e4m3")
    assert "FUNCTION 'failing_model:f' cannot be loaded: division by zero" in said
