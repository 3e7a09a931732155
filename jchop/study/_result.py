"""The results of a study, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
class StudyResult:
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

    def cell(self, fmt: str, rounding: str) -> Row:
        """The row of one format and mode; KeyError if there is none."""
        for row in self.rows:
            if row.rounding == rounding and fmt in (row.format, *row.also):
                return row
        raise KeyError((fmt, rounding))
