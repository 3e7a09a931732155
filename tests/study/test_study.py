"""The study, at small settings: its figures, its files, its arguments."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import exact
import jax
import numpy as np
import oracle
import pytest
from further import Further
from refusals import assert_refused

from jchop import Spec, study
from jchop.__main__ import main
from jchop._common.files import write_atomically
from jchop.formats.rounding import Rounding
from jchop.study import StudyResult
from jchop.study._run import ProgressBar, StudyRow, accuracy_summary

further = Further()

FORMATS = ["e2m1fn", "q43", "fp32"]


MODES = ["nearest_even", "down", "stochastic"]
EPOCHS = {"wine": 12, "digits": 2}


@pytest.fixture(scope="module")
def wine() -> StudyResult:
    return study.run("wine", formats=FORMATS, modes=MODES, epochs=EPOCHS["wine"], seeds=2)


@pytest.fixture(scope="module", params=["wine", pytest.param("digits", marks=pytest.mark.slow)])
def figures(request: pytest.FixtureRequest) -> StudyResult:
    if request.param == "wine":
        return request.getfixturevalue("wine")
    return study.run(formats=FORMATS, modes=MODES, epochs=EPOCHS["digits"], seeds=2)


# -- figures -----------------------------------------------------------------------------------------------------------
def test_every_format_meets_every_mode_in_order(figures: StudyResult) -> None:
    assert [(row.format, row.rounding) for row in figures.rows] == [(fmt, mode) for fmt in FORMATS for mode in MODES]
    assert figures.formats == tuple(FORMATS) and figures.modes == tuple(MODES)
    assert [row.runs for row in figures.rows] == [1, 1, 2] * 3
    assert [row.bits for row in figures.rows[::3]] == [4, 8, 32]
    assert figures.rows[2].spec == "float4_e2m1fn:stochastic"


def test_binary32_parameters_do_not_move(figures: StudyResult) -> None:
    for mode in ("stochastic", "nearest_even", "down"):
        row = figures.cell("fp32", mode)
        assert (row.accuracy, row.cross_entropy) == (figures.accuracy, figures.cross_entropy), mode
        assert (row.accuracy_std, row.cross_entropy_std) == (0.0, 0.0), mode


def test_the_network_learns_and_narrow_formats_lose(figures: StudyResult) -> None:
    assert figures.accuracy > 0.85 and figures.losses[1] < figures.losses[0]
    assert figures.cell("e2m1fn", "down").accuracy < 0.5 * figures.accuracy + 0.05
    assert figures.cell("e2m1fn", "down").cross_entropy > figures.cross_entropy
    assert abs(figures.cell("q43", "nearest_even").accuracy - figures.accuracy) < 0.05


def test_stochastic_runs_differ(figures: StudyResult) -> None:
    assert figures.cell("q43", "stochastic").cross_entropy_std > 0
    assert figures.cell("q43", "down").cross_entropy_std == 0


@further
def rounded_activations_add_error(wine: StudyResult) -> None:
    low = study.run("wine", formats=["q43", "fp32"], modes=["nearest_even"], epochs=EPOCHS["wine"], activations=True)
    assert low.cross_entropy == wine.cross_entropy
    assert low.cell("q43", "nearest_even").cross_entropy != wine.cell("q43", "nearest_even").cross_entropy
    assert low.cell("fp32", "nearest_even").cross_entropy == pytest.approx(wine.cross_entropy, rel=1e-6)
    assert low.settings["activations"] is True


@further.first
def the_same_seed_gives_the_same_study(wine: StudyResult) -> None:
    def again(seed: int) -> StudyResult:
        return study.run("wine", formats=["q43"], modes=["stochastic"], epochs=EPOCHS["wine"], seeds=2, seed=seed)

    assert again(0).rows == (wine.cell("q43", "stochastic"),)
    assert again(1).accuracy != wine.accuracy or again(1).cross_entropy != wine.cross_entropy


@further
def overflow_to_nan_is_reported_as_nan() -> None:
    # e2m1 with a NaN instead of its largest value: inputs beyond 4 become NaN, and so does every output.
    result = study.run("breast-cancer", formats=["e2m1fn(nans=top)"], modes=["rne"], epochs=1, activations=True)
    row = result.rows[0]
    assert math.isnan(row.cross_entropy) and row.accuracy < 1
    assert " nan" in str(result)


@further
def formats_come_by_bits_and_names_of_one_format_share_a_row() -> None:
    asked = ["fp32", "half", "nvfp4", "e2m1fn", "binary16", "fp16"]
    result = study.run("wine", formats=asked, modes=["rne", "sr"], epochs=1, seeds=2)
    assert result.formats == ("e2m1fn", "nvfp4", "half", "fp32")
    assert [row.bits for row in result.rows[::2]] == [4, 4.5, 16, 32]
    assert result.cell("half", "stochastic").also == ("binary16", "fp16")
    assert result.cell("fp16", "stochastic") is result.cell("half", "stochastic")
    lines = str(result).splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == ["e2m1fn", "nvfp4", "half = binary16 = fp16", "fp32"]
    assert "53 test samples, so one is 1.9 %; ± is the standard deviation over 2 rounding seeds." in lines


STUDY_FILES = ["study.csv", "study.html", "study.json", "study.png"]


def stored(
    name: str, bits: float, accuracy: float, accuracy_std: float, entropy: float, entropy_std: float, runs: int = 1
) -> StudyRow:
    return StudyRow(name, "down", f"{name}:down", bits, runs, accuracy, accuracy_std, entropy, entropy_std)


def test_formats_with_the_same_figures_share_a_row() -> None:
    rows = (
        stored("a", 4, 0.5, 0.0, math.nan, math.nan),
        stored("b", 4, 0.5, 0.0, math.nan, math.nan),
        stored("c", 4, 0.5, 0.0, 0.7, 0.0),
        stored("d", 8, 0.5, 0.0, 0.7, 0.0),
    )
    result = StudyResult(rows, {"dataset": "wine"}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})
    lines = str(result).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["a, b", "c", "d"]
    labels = [label.get_text() for label in result.plot().axes[0].get_yticklabels()]
    assert labels == ["a (4 bits)", "b (4 bits)", "c (4 bits)", "d (8 bits)"]


def test_the_picture_says_what_its_figures_are_of() -> None:
    rows = (stored("a", 4.25, 0.5, 0.125, 0.7, 0.5, runs=3), stored("b", 8, 0.25, 0.0, 90.0, 0.0))
    result = StudyResult(rows, {"dataset": "wine"}, 0.5, 0.7, (), 9, 3, 200, 0.1, {})
    axes = result.plot().axes[0]
    assert axes.get_xlabel() == ("points of accuracy lost; unrounded 50.0 %\n200 test samples, so one is 0.5 points")
    assert [np.asarray(dot.get_offsets()).tolist() for dot in axes.collections[1:2]] == [[[0.0, 0.0], [25.0, 1.0]]]


def test_groups_of_scaled_formats_lie_along_the_inputs() -> None:
    from jchop.study._network import Evaluator, load_dataset, make_model

    evaluator = Evaluator(*make_model(load_dataset("wine", 0), 0), load_dataset("wine", 0))
    numbers = jax.numpy.arange(evaluator.flat.size, dtype=np.float32)
    kernels = [np.asarray(x) for x in jax.tree.leaves(evaluator._unravel(numbers)) if x.ndim == 2]
    assert [kernel.shape for kernel in kernels] == [(13, 64), (64, 32), (32, 3)]
    for kernel in kernels:
        np.testing.assert_array_equal(np.diff(kernel, axis=0), 1)


@pytest.fixture(scope="module")
def small() -> Any:
    """Data of five samples, which are those of the test, too."""
    from jchop.study._network import Dataset

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)).astype(np.float32), np.array([0, 1, 2, 1, 0], np.int32)
    return Dataset(x, y, x, y, 3)


def entropy_of(graph: Any, params: Any, data: Any, rounded: Callable[[Any], np.ndarray]) -> float:
    """The mean cross-entropy of the multilayer perceptron, whose inputs and layers are rounded."""
    from flax import nnx

    model, h = nnx.merge(graph, params), rounded(data.test_x)
    for layer in (model.hidden1, model.hidden2, model.output):
        h = h @ rounded(layer.kernel[...]) + rounded(layer.bias[...])
        h = rounded(h if layer is model.output else np.maximum(h, 0))
    h = h.astype(np.float64)
    return float((np.log(np.exp(h).sum(-1)) - h[range(5), data.test_y]).mean())


def test_activations_are_rounded_before_the_first_layer_and_after_each(small: Any) -> None:
    from jchop.study._network import Evaluator, make_model

    graph, params = make_model(small, 0)
    spec, keys = Spec("e4m1"), jax.random.split(jax.random.key(0), 1)
    (_, (entropy,)) = Evaluator(graph, params, small).cell(spec, keys, activations=True)
    want = entropy_of(graph, params, small, lambda v: exact.rounded(np.asarray(v), oracle.describe(spec.format)))
    assert entropy == pytest.approx(want, rel=1e-5)


def test_each_layer_draws_for_itself() -> None:
    from jchop.study._network import _activation_rounding

    after, halves = _activation_rounding(Spec("fixed8.0:stochastic"), jax.random.key(0)), np.full(32, 0.5, np.float32)
    assert (np.asarray(after(halves)) != np.asarray(after(halves))).any()  # type: ignore[arg-type]


def test_an_epoch_takes_every_sample(small: Any) -> None:
    """Its loss, of one batch, is that of the first parameters over all of them."""
    from jchop.study._network import make_model, train

    graph, params = make_model(small, 0)
    want, losses = entropy_of(graph, params, small, np.asarray), []
    train(graph, params, small, epochs=1, seed=0, report=lambda number, loss: losses.append(loss))
    assert losses == [pytest.approx(want, rel=1e-5)]


def test_default_formats_are_in_order_and_scaled_ones_among_them() -> None:
    specs = [Spec(text) for text in study.FORMATS]
    bits = [s.format.bits if s.scaled is None else s.scaled.bits_per_element() for s in specs]
    assert bits == sorted(bits) and len(set(specs)) == len(specs)
    scaled = {text for text, spec in zip(study.FORMATS, specs, strict=True) if spec.scaled is not None}
    assert scaled == {"mxfp4", "nvfp4", "nf4(group=64)", "int4(group=32,scale=bfloat16)"}


@further
def a_format_keeps_the_rest_of_its_spec() -> None:
    result = study.run(
        "wine",
        formats=["fixed4.4", "e4m3fn:saturate", "e5m2:stochastic:random_bits=3", "e6m9:flush"],
        modes=[Rounding.UP, "sr"],
        epochs=1,
        seeds=1,
    )
    assert [row.spec for row in result.rows] == [
        "fixed4.4:up", "fixed4.4:stochastic", "float8_e4m3fn:up:saturate", "float8_e4m3fn:stochastic:saturate",
        "float8_e5m2:up", "float8_e5m2:stochastic:random_bits=3", "e6m9:up:flush", "e6m9:stochastic:flush",
    ]  # fmt: skip


# -- data --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dataset", study.DATASETS)
def test_data_is_split_and_standardised_by_its_training_part(dataset: str) -> None:
    from jchop.study._network import load_dataset  # and with it scikit-learn, which takes a second

    data, again, other = load_dataset(dataset, 3), load_dataset(dataset, 3), load_dataset(dataset, 4)
    np.testing.assert_array_equal(data.test_y, again.test_y)
    assert not np.array_equal(data.test_y, other.test_y)
    total = len(data.train_y) + len(data.test_y)
    assert len(data.test_y) == round(0.3 * total)
    assert data.train_x.dtype == np.float32
    axis = None if dataset == "digits" else 0
    np.testing.assert_allclose(data.train_x.mean(axis=axis), 0, atol=1e-5)
    np.testing.assert_allclose(data.train_x.std(axis=axis), 1, atol=1e-5)
    assert set(data.train_y) == set(range(data.classes))


# -- arguments ---------------------------------------------------------------------------------------------------------
BAD: list[tuple[dict, str]] = [
    ({"dataset": "mnist"}, "dataset='mnist'"),
    ({"formats": []}, "at least one"),
    ({"modes": []}, "at least one"),
    ({"formats": ["e9x"]}, "e9x"),
    ({"formats": ["e5m2:up"]}, "names a rounding"),
    ({"formats": ["e9m10"]}, "float64"),
    ({"formats": ["int8(channel=0)"]}, "channels or tiles"),
    ({"formats": ["int8(group=(2,2))"]}, "channels or tiles"),
    ({"modes": ["sideways"]}, "sideways"),
    ({"seeds": 0}, "seeds=0"),
    ({"epochs": 0}, "epochs=0"),
    ({"seed": -1}, "seed=-1"),
]


def test_bad_arguments_are_refused_before_training() -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("training has begun")

    assert_refused(
        {str(given): (partial(study.run, **given, progress=unexpected), ValueError, said) for given, said in BAD}
    )


# -- files -------------------------------------------------------------------------------------------------------------
def test_files_agree_with_the_result(wine: StudyResult, tmp_path: Path) -> None:
    paths = wine.save(tmp_path / "new" / "folder")
    names = [path.name for path in paths]
    assert sorted(names) == STUDY_FILES == sorted(path.name for path in paths[0].parent.iterdir())
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    stored = json.loads(paths[1].read_text())
    assert len(rows) == len(stored["rows"]) == len(wine.rows)
    for text, entry, row in zip(rows, stored["rows"], wine.rows, strict=True):
        assert (text["format"], text["rounding"], text["spec"]) == (row.format, row.rounding, row.spec)
        assert text["also"] == "" and entry["also"] == []
        for name in ("accuracy", "accuracy_std", "cross_entropy", "cross_entropy_std", "bits", "runs"):
            assert float(text[name]) == entry[name] == getattr(row, name)
    assert stored["settings"] == dict(wine.settings)
    assert stored["settings"]["activations"] is False and stored["settings"]["epochs"] == EPOCHS["wine"]
    assert stored["versions"]["jax"] == jax.__version__
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_nan_is_nan_in_csv_and_null_in_json(tmp_path: Path) -> None:
    row = StudyRow("half", "down", "binary16:down", 16, 1, 0.5, 0.0, math.nan, math.nan)
    result = StudyResult((row,), {"dataset": "wine"}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})
    table, data, *_ = result.save(tmp_path)
    assert table.read_text().splitlines()[1].endswith(",nan,nan,")
    assert json.loads(data.read_text())["rows"][0]["cross_entropy"] is None
    assert accuracy_summary(result).startswith("Unrounded accuracy 50.0 %; half (16 bits) is the narrowest")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "study.csv"
    target.write_text("old")

    def broken(file) -> None:
        file.write(b"half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_atomically(target, broken)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    write_atomically(target, lambda file: file.write(b"new"))
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


# -- the command -------------------------------------------------------------------------------------------------------


@further
def the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "study --dataset wine --epochs 2 --seeds 2 --modes rne,sr --formats q43 fp32, codebook(-1,0,1)"
    assert main([*words.split(), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[2:5]] == ["codebook(-1,0,1)", "q43", "fp32"]
    assert "Mean cross-entropy" in printed.out and "±" in printed.out
    assert str(tmp_path / "out" / "study.png") in printed.out
    assert "training" in printed.err and "6/6  fp32 stochastic" in printed.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == STUDY_FILES


def test_the_command_needs_a_folder_before_it_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["study", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.endswith(f"{tmp_path / 'file'} is not a folder that can be written to\n")
    assert main(["study", "--out", str(tmp_path / "new"), "--formats", "e9x"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_progress_is_one_line_on_a_terminal_and_few_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, live = io.StringIO(), io.StringIO()
    monkeypatch.setattr(live, "isatty", lambda: True)
    for bar in (ProgressBar(plain), ProgressBar(live)):
        for done in range(1, 101):
            bar("training", done, 100, f"loss {1 / done:.2f}")
    assert len(plain.getvalue().splitlines()) == 4
    assert live.getvalue().count("\r") == 100 and live.getvalue().count("\n") == 1
    assert live.getvalue().endswith("[########################] 100/100  loss 0.01\n")


@further
def importing_the_study_loads_no_extra() -> None:
    code = "import sys, jchop.study; print(sorted({'flax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.stdout.strip() == "[]"


test_further = further.test()
