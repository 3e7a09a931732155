"""Reports of a study: text tables, CSV, JSON and a heat map."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jchop._common.files import require_extra, write_atomically
from jchop.study._result import Row, StudyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The files of `save`.
STUDY_FILES = ("study.csv", "study.json", "study.png")
_FIGURE_FIELDS = ("accuracy", "accuracy_std", "cross_entropy", "cross_entropy_std")


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
    accuracy = _grid_lines(result, lambda row: _mean_text(100 * row.accuracy, 100 * row.accuracy_std, row.runs, ".1f"))
    entropy = _grid_lines(result, lambda row: _mean_text(row.cross_entropy, row.cross_entropy_std, row.runs, ".3g"))
    return "\n".join(
        [
            f"Test accuracy (%); unrounded {100 * result.accuracy:.1f}",
            *accuracy,
            "",
            f"Mean cross-entropy (nats); unrounded {result.cross_entropy:.3g}",
            *entropy,
            "",
            f"{_sample_note(result)}.",
            accuracy_summary(result),
        ]
    )


def _mean_text(mean: float, deviation: float, runs: int, spec: str) -> str:
    return f"{mean:{spec}}" + (f"±{deviation:{spec if spec.endswith('f') else '.2g'}}" if runs > 1 else "")


def _grid_lines(result: StudyResult, text: Any) -> list[str]:
    cells = [["format", "bits", *result.modes]]
    cells += [[name, f"{rows[0].bits:g}", *map(text, rows)] for name, rows in _grid_rows(result)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


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
    picture = io.BytesIO()
    figure(result).savefig(picture, format="png", dpi=100)
    contents = (_study_csv(result).encode(), _study_json(result).encode(), picture.getvalue())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in STUDY_FILES]
    for path, content in zip(paths, contents, strict=True):
        write_atomically(path, lambda file, content=content: file.write(content))
    return paths


def _study_csv(result: StudyResult) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) | {"also": " ".join(row.also)} for row in result.rows)
    return text.getvalue()


def _study_json(result: StudyResult) -> str:
    fields = _without_nan(dataclasses.asdict(result))
    fields["rows"] = fields.pop("rows")  # the rows come last
    return json.dumps(fields, indent=2, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
