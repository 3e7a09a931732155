"""The results of a study: plain values, tables, a heat map, files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.files import require_extra, write_atomically
from jchop._common.text import RowReport, TableOrLine, table_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The files of `save`.
STUDY_FILES = ("study.csv", "study.json", "study.png")
_FIGURE_FIELDS = ("accuracy", "accuracy_std", "cross_entropy", "cross_entropy_std")


@dataclass(frozen=True)
class Row:
    """One cell of the study: one format in one rounding mode.

    Args:
        format: the given text of the format, the first one if there are several names.
        rounding: the mode's text.
        spec: the whole specification used, in the text grammar.
        bits: width of the format's codes; for a scaled format including a number's share of the scales.
        runs: number of averaged evaluations: 1 for a deterministic mode, otherwise one for each rounding seed.
        accuracy: mean share of correctly classified test samples, 0 to 1; a sample with a NaN output counts as wrong.
        accuracy_std: standard deviation of the accuracy over the runs (population), 0 for one run.
        cross_entropy: mean cross-entropy of the test samples in nats; NaN if an output is NaN or infinities cancel.
        cross_entropy_std: its standard deviation over the runs.
        also: other given names of the same format.

    Example:
        >>> from jchop import study
        >>> study.Row("half", "down", "binary16:down", 16, 1, 0.5, 0.0, 0.7, 0.0).accuracy
        0.5
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


@dataclass(frozen=True)
class StudyResult(RowReport):
    """A whole study: its rows, formats outermost, with settings and data of the run.

    Args:
        rows: a `Row` for each format and mode, formats of few bits first.
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
        >>> row = study.Row("half", "down", "binary16:down", 16, 1, 0.5, 0.0, 0.7, 0.0)
        >>> result = study.StudyResult((row,), {}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})
        >>> result.cell("half", "down").bits, result.formats, result.modes
        (16, ('half',), ('down',))
    """

    rows: tuple[Row, ...]
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
    def formats(self) -> tuple[str, ...]:
        """The formats' texts, in order."""
        return tuple(dict.fromkeys(row.format for row in self.rows))

    @property
    def modes(self) -> tuple[str, ...]:
        """The rounding modes' texts, in order."""
        return tuple(dict.fromkeys(row.rounding for row in self.rows))

    def __str__(self) -> str:
        return table(self)

    def _parts(self) -> Iterator[TableOrLine]:
        yield f"Test accuracy (%); unrounded {100 * self.accuracy:.1f}"
        yield _grid(self, lambda row: _mean_text(100 * row.accuracy, 100 * row.accuracy_std, row.runs, ".1f"))
        yield from ("", f"Mean cross-entropy (nats); unrounded {self.cross_entropy:.3g}")
        yield _grid(self, lambda row: _mean_text(row.cross_entropy, row.cross_entropy_std, row.runs, ".3g"))
        yield from ("", f"{_sample_note(self)}.", accuracy_summary(self))

    def cell(self, fmt: str, rounding: str) -> Row:
        """The row of one format and mode; KeyError if there is none."""
        for row in self.rows:
            if row.rounding == rounding and fmt in (row.format, *row.also):
                return row
        raise KeyError((fmt, rounding))


def table(result: StudyResult) -> str:
    """The study as text: accuracy in per cent, mean cross-entropy in nats, the size of the test set, and a conclusion.

    Both tables have a row for each format, in the order of bits, and a column for each mode; ``±`` is the standard
    deviation over the rounding seeds of a stochastic mode. Names of one format share a row, with ``=`` between them;
    formats of equal bits with the same figures in every mode share a row, with a comma.

    Args:
        result: from `jchop.study.run`.

    Example:
        >>> from jchop import study
        >>> row = study.Row("half", "down", "binary16:down", 16, 1, 0.5, 0.0, 0.7, 0.0)
        >>> print(study.table(study.StudyResult((row,), {}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})).splitlines()[0])
        Test accuracy (%); unrounded 50.0
    """
    lines: list[str] = []
    for part in result._parts():
        if isinstance(part, str):
            lines.append(part)
        else:
            head, *body = table_lines(part, "<" + ">" * (len(part[0]) - 1))
            lines += [head, "-" * len(head), *body]
    return "\n".join(lines)


def _mean_text(mean: float, deviation: float, runs: int, spec: str) -> str:
    return f"{mean:{spec}}" + (f"±{deviation:{spec if spec.endswith('f') else '.2g'}}" if runs > 1 else "")


def _grid(result: StudyResult, text: Callable[[Row], str]) -> list[list[str]]:
    rows = [[name, f"{rows[0].bits:g}", *map(text, rows)] for name, rows in _grid_rows(result)]
    return [["format", "bits", *result.modes], *rows]


def _grid_rows(result: StudyResult) -> list[tuple[str, list[Row]]]:
    """Names and cells of each row: formats of the same bits and figures share one."""
    lines: dict[Any, tuple[list[str], list[Row]]] = {}
    for name in result.formats:
        rows = [result.cell(name, mode) for mode in result.modes]
        figures = str(
            [(row.bits, *(getattr(row, field) for field in _FIGURE_FIELDS)) for row in rows]
        )  # a NaN equals a NaN
        lines.setdefault(figures, ([], rows))[0].append(" = ".join((name, *rows[0].also)))
    return [(", ".join(names), rows) for names, rows in lines.values()]


def _sample_note(result: StudyResult) -> str:
    """The size of the test set."""
    runs = max(row.runs for row in result.rows)
    spread = f"; ± is the standard deviation over {runs} rounding seeds" if runs > 1 else ""
    return f"{result.test_samples} test samples, so one is {100 / result.test_samples:.2g} %{spread}"


def accuracy_summary(result: StudyResult) -> str:
    """One line: the narrowest format that keeps the accuracy, and the greatest loss."""
    mode = "nearest_even" if "nearest_even" in result.modes else result.modes[0]
    candidates = [row for row in result.rows if row.rounding == mode and row.accuracy >= result.accuracy - 0.01]
    worst = min(result.rows, key=lambda row: row.accuracy)
    if candidates:
        best = min(candidates, key=lambda row: row.bits)
        first = f"{best.format} ({best.bits:g} bits) is the narrowest format within one point of it under {mode}"
    else:
        first = f"no format stays within one point of it under {mode}"
    return (
        f"Unrounded accuracy {100 * result.accuracy:.1f} %; {first}; "
        f"the lowest is {100 * worst.accuracy:.1f} %, {worst.format} {worst.rounding}."
    )


def figure(result: StudyResult) -> Figure:
    """The study as two heat maps, accuracy and mean cross-entropy, with the rows of `table`.

    The colours of the cross-entropy are logarithmic and end at 10 nats.

    Args:
        result: from `jchop.study.run`.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.

    Example:
        >>> from jchop import study
        >>> row = study.Row("half", "down", "binary16:down", 16, 1, 0.5, 0.0, 0.7, 0.0)
        >>> len(study.figure(study.StudyResult((row,), {}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})).axes)
        4
    """
    require_extra("the heat map", "study", ("matplotlib",))
    from jchop.plot import Panel, heat_map

    lines = _grid_rows(result)
    accuracy, accuracy_std, entropy, entropy_std = (
        np.array([[getattr(row, field) for row in rows] for _, rows in lines]) for field in _FIGURE_FIELDS
    )
    has_spread = np.array([[row.runs > 1 for row in rows] for _, rows in lines])
    panels = [
        Panel(
            100 * accuracy,
            f"test accuracy (%); unrounded {100 * result.accuracy:.1f}",
            spread=np.where(has_spread, 100 * accuracy_std, np.nan) if has_spread.any() else None,
        ),
        Panel(
            entropy,
            f"mean cross-entropy (nats); unrounded {result.cross_entropy:.3g}",
            ".3g",
            log=True,
            low_is_good=True,
            ceiling=10.0,
            spread=np.where(has_spread, entropy_std, np.nan) if has_spread.any() else None,
        ),
    ]
    subject = "parameters and activations" if result.settings.get("activations") else "parameters"
    names = [f"{name} ({rows[0].bits:g} bits)" for name, rows in lines]
    title = f"{result.settings.get('dataset', 'study')}: {subject} rounded to a format"
    return heat_map(panels, names, result.modes, title=title, note=_sample_note(result))


def save(result: StudyResult, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes ``study.csv``, ``study.json`` and ``study.png``, each atomically.

    In JSON a NaN is null; in CSV it is nan.

    Args:
        result: from `jchop.study.run`.
        folder: the output folder; it is created if it does not exist.

    Returns:
        The paths of the files.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile
        >>> from jchop import study
        >>> row = study.Row("half", "down", "binary16:down", 16, 1, 0.5, 0.0, 0.7, 0.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = study.save(study.StudyResult((row,), {}, 0.5, 0.7, (), 9, 3, 2, 0.1, {}), folder)
        >>> [path.name for path in paths]
        ['study.csv', 'study.json', 'study.png']
    """
    texts = (result.to_csv(), result.to_json(indent=2) + "\n")
    contents = (*(text.encode() for text in texts), png_bytes(figure(result)))
    return write_files(folder, dict(zip(STUDY_FILES, contents, strict=True)))


def png_bytes(drawn: Figure, **options: Any) -> bytes:
    """A figure as a PNG file."""
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=100, **options)
    return picture.getvalue()


def write_files(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> list[Path]:
    """Writes files by name, each atomically, in a folder that is made if there is none; returns their paths."""
    paths = [Path(folder) / name for name in contents]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, lambda file, content=content: file.write(content))
    return paths
