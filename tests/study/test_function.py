"""The study of the user's function: its errors, its files, and the command on a file with its own import."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cli.test_cli import error
from further import Further
from html_check import check_html
from refusals import assert_refused

import jchop as jc
from jchop import study
from jchop.__main__ import main
from jchop.study._function_study import FunctionStudy

further = Further()

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def model(x, y):
    total = jnp.tanh(x @ y.T)
    return {"out": total, "label": total.argmax(-1)}


@pytest.fixture(scope="module")
def found() -> FunctionStudy:
    return study.run_function(
        model, X, 2 * X, formats=["half", "binary16", "e2m1fn", "e5m2"], modes=["rne", "sr"], seeds=2
    )


@further
def the_errors_are_those_of_emulate(found: FunctionStudy) -> None:
    exact = model(jnp.asarray(X), jnp.asarray(2 * X))
    for row in found.rows:
        keys = jax.random.split(jax.random.key(0), 2)[: row.runs]
        errors, changes = [], []
        for key in keys:
            low = jc.emulate(model, row.spec)
            y = low(X, 2 * X, key=key) if row.rounding == "stochastic" else low(X, 2 * X)
            difference = np.asarray(y["out"], np.float64) - np.asarray(exact["out"], np.float64)
            errors.append(np.linalg.norm(difference) / np.linalg.norm(np.asarray(exact["out"], np.float64)))
            changes.append(np.mean(y["label"] != exact["label"]))
        assert row.error == pytest.approx(np.mean(errors), rel=1e-12)
        assert row.error_std == pytest.approx(np.std(errors), abs=1e-12)
        assert (row.changed, row.lost, row.note) == (np.mean(changes), 0, "")


def test_the_rows_come_by_bits_and_a_format_comes_once(found: FunctionStudy) -> None:
    assert [(row.format, row.rounding, row.runs) for row in found.rows] == [
        (fmt, mode, runs)
        for fmt in ("e2m1fn", "e5m2", "half = binary16")
        for mode, runs in (("nearest_even", 1), ("stochastic", 2))
    ]
    assert [row.bits for row in found.rows] == [4, 4, 8, 8, 16, 16]
    assert found.inputs == ("float32[4, 8]", "float32[4, 8]") and found.name == "model"


@further.first
def results_that_are_lost() -> None:
    rows = study.run_function(lambda x: x * 1000, X, formats=["e4m3fn", "half"], modes=["rne"]).rows
    assert rows[0].error == rows[0].worst_absolute == math.inf and rows[0].lost > 0.5
    assert rows[1].lost == 0 and rows[1].error < 1e-3
    zero = study.run_function(lambda x: x * 0 + 1e-9, jnp.ones(3), formats=["e4m3fn"], modes=["rne"]).rows[0]
    assert zero.error == 1
    text = study.run_function(lambda x: x > 0.5, X, formats=["e4m3fn"], modes=["rne"])
    assert math.isnan(text.rows[0].error) and text.rows[0].changed == 0
    assert check_html(text.to_html())


@further
@pytest.mark.parametrize("wide", [False, True])
def the_reference_is_computed_by_jax(wide: bool) -> None:
    """In the dtype that JAX has, float32 or float64, with the methods of its arrays; the format has 1.00 in 1/3 + 1."""
    dtype = np.float64 if wide else np.float32
    with jax.enable_x64(wide):
        found = study.run_function(
            lambda x, y: (x.at[0].set(1.0) / 3, y / 3), np.array([2.0, 6.0]), 1.0, formats=["e5m2"], modes=["rne"]
        )
    third = float(dtype(1) / dtype(3))
    assert found.inputs == (f"{np.dtype(dtype)}[2]", "float")
    assert found.rows[0].worst_absolute == third - 0.3125
    assert found.rows[0].error == pytest.approx(
        math.sqrt(2) * (third - 0.3125) / math.hypot(third, 2, third), rel=1e-12
    )


@pytest.mark.parametrize("fun", [jnp.log, lambda x: (jnp.log(x), x > 0), lambda x: x[:0]])
def test_a_result_without_a_finite_number_is_an_error(fun) -> None:
    with pytest.raises(ValueError, match=r"fun=.*: its result in the carrier has no finite number, so it has no error"):
        study.run_function(fun, jnp.array([-1.0, -2.0]), formats=["e5m2"], modes=["rne"])


def test_integers_are_told_by_the_share_that_changed() -> None:
    found = study.run_function(lambda x: (x * 8).astype(jnp.int32), X, formats=["e3m2", "half"], modes=["rne"])
    first, *_, last = found.table(width=None).splitlines()
    assert first.endswith("share changed against the carrier's arithmetic") and found.rows[0].changed > 0.1
    told = "for at most 10 % changed: half (16 bits); 1 % changed: half (16 bits)"
    assert "nan" not in str(found)
    assert told in found.reading() == last and found.plot().axes[0].get_ylabel() == "share changed"


def test_results_without_a_float_have_no_error() -> None:
    row = study.run_function(jnp.argmax, X, formats=["half"], modes=["rne"]).rows[0]
    assert (row.runs, row.changed, row.note) == (1, 0, "")
    assert all(math.isnan(value) for value in (row.error, row.error_std, row.worst_absolute, row.lost))


def test_one_format_or_mode_is_a_list_of_it() -> None:
    pairs: list[Any] = [
        ("e5m2", "rne"),
        (jc.formats.FloatFormat(5, 2), jc.Rounding.UP),
        (jc.Spec("e5m2:saturate"), "rne"),
    ]
    for one, mode in pairs:
        found = study.run_function(lambda x: x / 3, X, formats=one, modes=mode)
        same = study.run_function(lambda x: x / 3, X, formats=[one], modes=[mode])
        assert found.to_csv() == same.to_csv() and len(found.rows) == 1, (one, mode)


def test_a_format_that_cannot_run_has_a_note() -> None:
    found = study.run_function(lambda x: x / 3, X.astype(np.float16), formats=["bfloat16", "e5m2"], modes=["rne"])
    low, wide = found.rows
    assert low.note == "" and low.error > 0
    assert "float16" in wide.note and math.isnan(wide.error)
    assert len(found.plot().axes[0].texts) == 1


def test_formats_are_those_of_the_arguments() -> None:
    """With float64 arguments that JAX has, also formats that float32 does not hold."""
    x, formats = np.float64(X), ["e5m2", "e11m20"]
    low, wide = study.run_function(lambda x: x / 3, x, formats=formats, modes=["rne"]).rows
    assert low.error > 0 and "float64 only with jax_enable_x64" in wide.note
    with jax.enable_x64(True):
        found = study.run_function(lambda x: x / 3, x, formats=formats, modes=["rne"])
    assert found.inputs == ("float64[4, 8]",)
    assert not found.rows[1].note and 0 < found.rows[1].error < 1e-6


def test_arguments_are_described_in_the_dtype_of_jax() -> None:
    found = study.run_function(lambda x, y: x + y, np.float64(X), 2.0, formats=["e5m2"], modes=["rne"])
    assert found.inputs == ("float32[4, 8]", "float")


def test_a_function_that_runs_in_no_format_is_an_error() -> None:
    said = r"fun=model runs in none of the formats; takum_linear16: .* cannot hold .* with jax_enable_x64"
    with pytest.raises(ValueError, match=said):
        study.run_function(model, X, X, formats=["e11m20", "takum_linear16"], modes=["rne"])


def test_a_spent_budget_leaves_notes(tmp_path: Path) -> None:
    found = study.run_function(model, X, X, formats=["e5m2"], modes=["rne"], budget_seconds=1e-9)
    assert [row.note for row in found.rows] == ["not run: the budget was spent"]
    assert "<img" not in found.to_html()
    paths = found.save(tmp_path)  # without a picture
    assert {path.name: path.read_text() for path in paths} == {
        "study.csv": found.to_csv(),
        "study.json": found.to_json(indent=2) + "\n",
        "study.html": found.to_html(),
    }


@further
def the_page_has_all_in_it(found: FunctionStudy, tmp_path: Path) -> None:
    paths = found.save(tmp_path / "new")
    assert [path.name for path in paths] == ["study.csv", "study.json", "study.png", "study.html"]
    text = check_html(paths[3].read_text())  # which also checks that nothing is loaded
    assert "Study of model" in text and "half = binary16" in text and "e2m1fn" in text
    assert "data:image/png;base64" in paths[3].read_text()
    assert paths[0].read_text() == found.to_csv() and len(found.to_csv().splitlines()) == 7
    assert len(json.loads(paths[1].read_text())["rows"]) == 6
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    formats = ["half", "fp16", "e2m1fn", "e5m2"]
    again = study.run_function(model, X, 2 * X, formats=formats, modes=["rne", "sr"], seeds=2)
    assert again.to_csv().replace("fp16", "binary16") == found.to_csv()


def test_what_it_refuses() -> None:
    table: list[tuple[dict, str]] = [
        ({"formats": ["nvfp4"]}, "formats='nvfp4' is a scaled format"),
        ({"formats": []}, "at least one"),
        ({"formats": ["e5m2:up"]}, "names a rounding"),
        ({"seeds": 0}, "seeds=0"),
        ({"budget_seconds": 0}, "budget_seconds=0"),
    ]
    assert_refused(
        {text: (partial(study.run_function, model, X, X, **options), ValueError, text) for options, text in table}
    )


def test_it_needs_a_function_with_results() -> None:
    with pytest.raises(TypeError, match="must be a function"):
        study.run_function("model", X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returns no arrays"):
        study.run_function(lambda x: None, X)


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that imports another of its own, one of them when it runs, and data."""
    (tmp_path / "own_sizes_of_study.py").write_text("FACTOR = 3\n")
    (tmp_path / "own_late_of_study.py").write_text("SHIFT = 1\n")
    (tmp_path / "own_module_of_study.py").write_text(
        "from own_sizes_of_study import FACTOR\n\n\ndef apply(x, y):\n"
        "    from own_late_of_study import SHIFT\n\n    return x @ y.T / FACTOR + SHIFT\n"
    )
    np.savez(tmp_path / "data.npz", y=X, x=2 * X)
    np.savez(tmp_path / "other.npz", z=X)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more: str) -> list[str]:
    return ["study", "own_module_of_study:apply", "--formats", "e5m2,half", "--modes", "rne", *more]


@further
def the_command_runs_a_function_with_its_own_imports(capsys: pytest.CaptureFixture[str], work: Path) -> None:
    assert main(words("--data", "data.npz", "--out", "a")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("apply(float32[4, 8], float32[4, 8]): relative error") and "a/study.html" in printed
    rows = json.loads((work / "a/study.json").read_text())["rows"]
    wanted = study.run_function(lambda x, y: x @ y.T / 3 + 1, 2 * X, X, formats=["e5m2", "half"], modes=["rne"])
    assert [row["error"] for row in rows] == [row.error for row in wanted.rows]
    assert check_html((work / "a/study.html").read_text())


def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], work: Path) -> None:
    assert "--data FILE.npz is needed" in error(capsys, *words())
    assert "--data other.npz has the arrays z, and the function takes x, y; save them" in error(
        capsys, *words("--data", "other.npz")
    )
    assert "--epochs belongs to the study of a network" in error(capsys, *words("--data", "data.npz", "--epochs", "3"))
    assert "--data belongs to the study of a function" in error(capsys, "study", "--data", "data.npz")
    assert "cannot be loaded" in error(capsys, "study", "no_such_module_of_study:f", "--data", "data.npz")
    assert "must be MODULE:FUNCTION" in error(capsys, "study", "model", "--data", "data.npz")
    np.savez(work / "nan.npz", x=X * np.nan, y=X)
    assert "fun=apply: its result in the carrier has no finite number" in error(capsys, *words("--data", "nan.npz"))


test_further = further.test()
