"""The study of a network: check, train, round, evaluate; its results as plain values, tables, a heat map, files."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common import html
from jchop._common.checks import as_iterable, check, check_bool, check_choice, check_int
from jchop._common.files import distribution_version, require_extra, write_atomically
from jchop._common.text import RowReport, TableOrLine
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.formats.rounding import Rounding, as_rounding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A function of (stage, done, total, note), called during a study.
StudyProgress = Callable[[str, int, int, str], None]

_BAR_WIDTH = 24


class ProgressBar:
    """A `progress` function: a line that is overwritten on a terminal, a few plain lines on another stream."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._live = stream.isatty()

    def __call__(self, stage: str, count: int, total: int, note: str) -> None:
        """Shows that `count` of `total` steps of `stage` are complete."""
        quarter = count == total or count * 4 // total != (count - 1) * 4 // total
        if not (self._live or quarter):
            return
        length = _BAR_WIDTH * count // total
        line = f"{stage:9} [{'#' * length}{'.' * (_BAR_WIDTH - length)}] {count:>{len(str(total))}}/{total}  {note}"
        start, end = ("\r\x1b[K", "\n" if count == total else "") if self._live else ("", "\n")
        print(start + line, end=end, file=self._stream, flush=True)


#: The data sets, with the default number of epochs.
DATASETS = {"digits": 30, "breast-cancer": 60, "wine": 100}

#: Table 8 of arXiv 2504.07835 (q43 q52 e5m5 e5m7 e8m4 half bfloat16 tf32 fp32), OCP's formats, and scaled ones.
FORMATS = (
    "float4_e2m1fn", "mxfp4", "nvfp4", "nf4(group=64)", "int4(group=32,scale=bfloat16)", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e4m3fn", "q43", "q52", "e5m5", "e5m7", "e8m4", "half", "bfloat16", "tf32", "fp32",
)  # fmt: skip

#: The six modes of Table 8.
MODES = ("nearest_even", "up", "down", "toward_zero", "stochastic", "stochastic_equal")

_PACKAGES = ("flax", "optax", "sklearn")
_VERSIONS = ("jchop", "jax", "jaxlib", "numpy", "flax", "optax", "scikit-learn", "matplotlib")


def run(
    dataset: str = "digits",
    *,
    formats: Iterable[str | ElementFormat | ScaledFormat | Spec] | ElementFormat | ScaledFormat | Spec = FORMATS,
    modes: Iterable[str | Rounding] | Rounding = MODES,
    seeds: int = 10,
    epochs: int | None = None,
    activations: bool = False,
    seed: int = 0,
    progress: StudyProgress | None = None,
) -> StudyResult:
    """Trains a classifier, then evaluates it rounded to each format in each rounding mode.

    The network is trained once, in binary32. Its parameters are rounded as one vector, and the test set is evaluated in
    binary32 arithmetic. So the study is about storage in a format, not about arithmetic. In the vector the weights of
    one output are consecutive, so the groups of a scaled format are along the inputs of a layer. With `activations` the
    inputs and each layer's outputs are rounded too. All formats and modes use the same rounding keys, so their draws
    are comparable.

    Args:
        dataset: ``"digits"`` (a convolutional network), ``"breast-cancer"`` or ``"wine"`` (a multilayer perceptron).
        formats: formats, Specs or texts, or one of them. Overflow rule, flush and random bits of a Spec are kept;
            `modes` define the rounding. A scaled format has groups of one length, or one scale for all. Results are in
            the order of bits; names of one format share a row.
        modes: rounding modes or their texts, or one of them.
        seeds: the number of rounding seeds over which a stochastic mode is averaged. A deterministic mode is evaluated
            once.
        epochs: passes over the training data; default by data set, see `jchop.study.DATASETS`.
        activations: whether to round the activations, too.
        seed: seed of the split of the data, the initial parameters, the order of training and the rounding keys.
        progress: function of (stage, done, total, note), called during the study.

    Raises:
        ModuleNotFoundError: if Flax, Optax or scikit-learn is missing.
        TypeError, ValueError: for an argument out of range, or a spec with a rounding. For a format that binary32
            cannot hold, or a scaled format with channels or several axes.

    Example:
        >>> from jchop import study
        >>> result = study.run("wine", formats=["fp32", "e2m1fn"], modes=["down"], epochs=5)
        >>> result.cell("fp32", "down").accuracy == result.accuracy
        True
    """
    check_choice("dataset", dataset, tuple(DATASETS))
    check_int("seeds", seeds, 1)
    check_int("seed", seed, 0, 2**31 - 1)
    check_bool("activations", activations)
    epochs = DATASETS[dataset] if epochs is None else check_int("epochs", epochs, 1)
    specs = study_specs(formats, modes)
    scalar, key = jax.ShapeDtypeStruct((1,), jnp.float32), jax.random.key(0)
    for _, spec in specs:  # so that errors are raised before training
        jax.eval_shape(lambda x, spec=spec: round_to_format(x, spec, key if spec.rounding.stochastic else None), scalar)
    require_extra("the study", "study", _PACKAGES)
    from jchop.study._network import Evaluator, load_dataset, make_model, train

    report = progress or (lambda stage, count, total, note: None)
    start = time.perf_counter()
    data = load_dataset(dataset, seed)
    graph, params = make_model(data, seed)
    losses: list[float] = []

    def record_loss(epoch: int, loss: float) -> None:
        losses.append(loss)
        report("training", epoch, epochs, f"loss {loss:.4f}")

    params = train(graph, params, data, epochs=epochs, seed=seed, report=record_loss)
    evaluator = Evaluator(graph, params, data)
    unrounded = evaluator.evaluate(evaluator.flat)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), seeds)
    rows = []
    for index, (names, spec) in enumerate(specs, start=1):
        runs = evaluator.cell(spec, keys, activations)
        with np.errstate(invalid="ignore"):
            # Relative to the first run, so that equal runs have a deviation of exactly 0.
            figures = np.stack([runs.mean(axis=1), (runs - runs[:, :1]).std(axis=1)], axis=1).ravel().tolist()
        cell = names[0], spec.rounding.value, str(spec), _bits_per_number(spec), runs.shape[1]
        rows.append(StudyRow(*cell, *figures, also=names[1:]))
        report("rounding", index, len(specs), f"{names[0]} {spec.rounding.value}")
    settings = {"dataset": dataset, **names_of_specs(specs), "seeds": seeds, "epochs": epochs}
    settings |= {"activations": activations, "seed": seed}
    sizes = int(evaluator.flat.size), len(data.train_y), len(data.test_y)
    results = tuple(rows), settings, *unrounded, tuple(losses), *sizes
    return StudyResult(*results, time.perf_counter() - start, package_versions())


def study_specs(formats: Any, modes: Any) -> list[tuple[tuple[str, ...], Spec]]:
    """(names, Spec) of every cell, formats outermost and narrow ones first, names of one format together."""
    roundings = list(dict.fromkeys(as_rounding(mode) for mode in as_iterable(modes)))
    names: dict[Spec, list[str]] = {}
    for value in as_iterable(formats):
        spec = as_spec(value, "formats", scaled=True)
        if spec.rounding is not Rounding.NEAREST_EVEN and not spec.random_bits:
            raise ValueError(f"formats: {value} names a rounding; use modes= (--modes) instead")
        if spec.scaled is not None and (spec.scaled.channel is not None or isinstance(spec.scaled.group, tuple)):
            raise ValueError(
                f"formats: {value} has channels or tiles, but the parameters are rounded as one vector; allowed are "
                "scaled formats with group=N, or with one scale for all"
            )
        labels = names.setdefault(spec, [])
        label = value if isinstance(value, str) else str(value)
        if label not in labels:
            labels.append(label)
    check(names and roundings, "formats and modes must each name at least one")
    by_bits = sorted(names.items(), key=lambda item: _bits_per_number(item[0]))
    return [(tuple(format_names), _with_rounding(spec, mode)) for spec, format_names in by_bits for mode in roundings]


def names_of_specs(specs: list[tuple[tuple[str, ...], Spec]]) -> dict[str, Any]:
    """The formats and modes of `study_specs` among the settings of a study."""
    formats = dict.fromkeys(name for names, _ in specs for name in names)
    return {"formats": [*formats], "modes": [*dict.fromkeys(spec.rounding.value for _, spec in specs)]}


def _bits_per_number(spec: Spec) -> float:
    """Bits for each number, including its share of the scales."""
    return spec.format.bits if spec.scaled is None else spec.scaled.bits_per_element()


def _with_rounding(spec: Spec, mode: Rounding) -> Spec:
    takes_bits = mode.stochastic and mode is not Rounding.STOCHASTIC_EQUAL
    return dataclasses.replace(spec, rounding=mode, random_bits=spec.random_bits if takes_bits else None)


def package_versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    return versions | {name: distribution_version(name) or "not installed" for name in _VERSIONS}


# -- results ---------------------------------------------------------------------------------------------------------

_FIGURE_FIELDS = ("accuracy", "accuracy_std", "cross_entropy", "cross_entropy_std")


@dataclass(frozen=True)
class StudyRow:
    """One format in one rounding mode: a cell of the study.

    Args:
        format: the given text of the format, the first one if there are several names.
        rounding: the mode's text.
        spec: the whole specification used, in the text grammar.
        bits: width of the format's codes; for a scaled format with a number's share of the scales.
        runs: number of averaged evaluations: 1 for a deterministic mode, otherwise one for each rounding seed.
        accuracy: mean share of correctly classified test samples, 0 to 1; a sample with a NaN output counts as wrong.
        accuracy_std: standard deviation of the accuracy over the runs (population), 0 for one run.
        cross_entropy: mean cross-entropy of the test samples in nats; NaN if an output is NaN or infinities cancel.
        cross_entropy_std: its standard deviation over the runs.
        also: other given names of the same format.
    """

    format: str
    rounding: str
    spec: str
    bits: float
    runs: int
    accuracy: float
    accuracy_std: float
    cross_entropy: float
    cross_entropy_std: float
    also: tuple[str, ...] = ()


class SavedStudy(RowReport):
    """A study that writes itself to files."""

    name: str
    settings: Mapping[str, object]
    versions: Mapping[str, str]

    #: Whether there is anything to draw.
    _has_picture = True

    def plot(self) -> Figure:
        raise NotImplementedError

    def to_html(self) -> str:
        """Returns a page with the plot, the table, settings and versions, which loads nothing. Needs matplotlib."""
        parts = []
        if self._has_picture:
            picture = png_bytes(self.plot(), metadata={"Software": None})
            parts.append(html.image(picture, f"{self.name}: results by format"))
        facts = [(name, str(value)) for name, value in {**self.settings, **self.versions}.items()]
        return html.page(f"Study of {self.name}", self._repr_html_(), *parts, html.box("How it was made", facts))

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes ``study.csv``, ``study.json``, ``study.png`` and ``study.html``, each atomically.

        The page needs no other file, so it can be sent by mail. Without any result there is no picture. In JSON a NaN
        is null; in CSV it is nan.

        Args:
            folder: the output folder; it is created if it does not exist.

        Returns:
            The paths of the files.

        Raises:
            ModuleNotFoundError: if matplotlib is missing.
            OSError: if a file cannot be written.
        """
        require_extra("the study", "plot", ("matplotlib",))
        contents = {
            "study.csv": self.to_csv().encode(),
            "study.json": (self.to_json(indent=2) + "\n").encode(),
            **({"study.png": png_bytes(self.plot())} if self._has_picture else {}),
            "study.html": self.to_html().encode(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(Path(folder) / name, lambda file, content=content: file.write(content))
        return [Path(folder) / name for name in contents]


def png_bytes(drawn: Figure, dpi: Any = 100, **options: Any) -> bytes:
    """A figure as a PNG file."""
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=dpi, **options)
    return picture.getvalue()


@dataclass(frozen=True)
class StudyResult(SavedStudy):
    """A whole study: its rows, formats outermost, with settings and data of the run.

    Its text has the accuracy in per cent, the mean cross-entropy in nats, the size of the test set, and a conclusion.
    Both tables have a row for each format, in the order of bits, and a column for each mode. ``±`` is the standard
    deviation over the rounding seeds of a stochastic mode. Names of one format share a row, with ``=`` between them.
    Formats of equal bits with the same figures in every mode share a row, with a comma.

    Args:
        rows: a `StudyRow` for each format and mode, formats of few bits first.
        settings: the arguments of `jchop.study.run`, all of them.
        accuracy: test accuracy of the trained network, unrounded in binary32.
        cross_entropy: its mean cross-entropy in nats.
        losses: mean training loss of each epoch.
        parameters: number of the network's parameters.
        train_samples: size of the training set.
        test_samples: size of the test set.
        seconds: duration of the study, including training.
        versions: versions of Python and of the packages.

    Example:
        >>> from jchop import study
        >>> result = study.run("wine", formats=["half"], modes=["down"], epochs=5)
        >>> result.cell("half", "down").bits, result.formats, result.modes
        (16, ('half',), ('down',))
    """

    rows: tuple[StudyRow, ...]
    settings: Mapping[str, object]
    accuracy: float
    cross_entropy: float
    losses: tuple[float, ...]
    parameters: int
    train_samples: int
    test_samples: int
    seconds: float
    versions: Mapping[str, str]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the data set."""
        return str(self.settings.get("dataset", "study"))

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats' texts, in order."""
        return tuple(dict.fromkeys(row.format for row in self.rows))

    @property
    def modes(self) -> tuple[str, ...]:
        """The rounding modes' texts, in order."""
        return tuple(dict.fromkeys(row.rounding for row in self.rows))

    @property
    def _align(self) -> str:
        return "<" + ">" * (1 + len(self.modes))

    def _parts(self) -> Iterator[TableOrLine]:
        yield f"Test accuracy (%); unrounded {100 * self.accuracy:.1f}"
        yield _grid(self, "accuracy", 100, ".1f")
        yield from ("", f"Mean cross-entropy (nats); unrounded {self.cross_entropy:.3g}")
        yield _grid(self, "cross_entropy", 1, ".3g")
        runs = max(row.runs for row in self.rows)
        spread = f"; ± is the standard deviation over {runs} rounding seeds" if runs > 1 else ""
        samples = f"{self.test_samples} test samples, so one is {100 / self.test_samples:.2g} %{spread}."
        yield from ("", samples, accuracy_summary(self))

    def cell(self, fmt: str, rounding: str) -> StudyRow:
        """Returns the row of one format and mode; KeyError if there is none."""
        for row in self.rows:
            if row.rounding == rounding and fmt in (row.format, *row.also):
                return row
        raise KeyError((fmt, rounding))

    def plot(self) -> Figure:
        """Draws the accuracy that each format loses, in points: a row for each format, a dot for each mode.

        Raises:
            ModuleNotFoundError: if matplotlib is missing.
        """
        require_extra("the picture", "study", ("matplotlib",))
        from jchop.plot import dot_plot

        rows = [[self.cell(name, mode) for mode in self.modes] for name in self.formats]
        names = [f"{' = '.join((row[0].format, *row[0].also))} ({row[0].bits:g} bits)" for row in rows]
        lost = {
            mode: [100 * (self.accuracy - row[index].accuracy) for row in rows] for index, mode in enumerate(self.modes)
        }
        subject = "parameters and activations" if self.settings.get("activations") else "parameters"
        return dot_plot(
            lost,
            names,
            xlabel=f"points of accuracy lost; unrounded {100 * self.accuracy:.1f} %",
            title=f"{self.name}: {subject} rounded to a format",
            note=f"{self.test_samples} test samples, so one is {100 / self.test_samples:.2g} points",
        )


def _grid(result: StudyResult, figure: str, factor: int, spec: str) -> list[list[str]]:
    """Means and deviations by format and mode; formats of the same bits and figures share a row."""
    lines: dict[Any, tuple[list[str], list[StudyRow]]] = {}
    for name in result.formats:
        rows = [result.cell(name, mode) for mode in result.modes]
        # As text, in which a NaN equals a NaN.
        figures = str([(row.bits, *(getattr(row, field) for field in _FIGURE_FIELDS)) for row in rows])
        lines.setdefault(figures, ([], rows))[0].append(" = ".join((name, *rows[0].also)))

    def cell(row: StudyRow) -> str:
        mean, deviation = (factor * getattr(row, field) for field in (figure, f"{figure}_std"))
        return f"{mean:{spec}}" + (f"±{deviation:{spec if spec.endswith('f') else '.2g'}}" if row.runs > 1 else "")

    cells = [[", ".join(names), f"{rows[0].bits:g}", *map(cell, rows)] for names, rows in lines.values()]
    return [["format", "bits", *result.modes], *cells]


def accuracy_summary(result: StudyResult) -> str:
    """One line: the narrowest format that keeps the accuracy, and the greatest loss."""
    mode = "nearest_even" if "nearest_even" in result.modes else result.modes[0]
    candidates = [row for row in result.rows if row.rounding == mode and row.accuracy >= result.accuracy - 0.01]
    worst = min(result.rows, key=lambda row: row.accuracy)
    first = f"no format stays within one point of it under {mode}"
    if candidates:
        best = min(candidates, key=lambda row: row.bits)
        first = f"{best.format} ({best.bits:g} bits) is the narrowest format within one point of it under {mode}"
    return (
        f"Unrounded accuracy {100 * result.accuracy:.1f} %; {first}; "
        f"the lowest is {100 * worst.accuracy:.1f} %, {worst.format} {worst.rounding}."
    )
