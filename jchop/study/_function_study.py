"""The study of a function of the user: every operation rounded to each format in each mode, against the carrier."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._common.checks import check, check_instance, check_int
from jchop._common.text import TableOrLine
from jchop._emulate.emulate import emulate
from jchop._emulate.rules.trace import as_program_arguments
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat
from jchop.formats.rounding import Rounding
from jchop.study._run import SavedStudy, StudyProgress, names_of_specs, package_versions, study_specs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Formats of elements: a scaled format would need whole arrays in every operation.
FUNCTION_FORMATS = (
    "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "e5m5", "e5m7", "binary16",
    "bfloat16", "tf32",
)  # fmt: skip
FUNCTION_MODES = ("nearest_even", "stochastic")

_BUDGET_NOTE = "not run: the budget was spent"


@dataclass(frozen=True)
class FunctionRow:
    """A function in one format and rounding mode, compared with its results in the carrier.

    Errors count the numbers that are finite in the carrier, all results together, and are means over the runs.

    Args:
        format: the given text of the format; several texts of one format, with = between them.
        rounding: the mode's text.
        spec: the spec of every operation.
        bits: width of the format.
        runs: 1, and for a stochastic mode one for each key.
        error: the relative error in the 2-norm, ``||y - r|| / ||r||``. Infinite if a y is not finite, or r is zero and
            y is not. NaN if no result is a float, or the run failed.
        error_std: its standard deviation over the runs (population); 0 for one run, NaN if an error is infinite.
        worst_absolute: the largest magnitude of y - r in any run; NaN as for `error`.
        lost: the share of numbers that became infinite or NaN; NaN as for `error`.
        changed: the share of the integers and booleans among the results that differ; NaN if there are none.
        note: the reason of a missing result: the error, or the budget; empty if there is one.
    """

    format: str
    rounding: str
    spec: str
    bits: float
    runs: int = 0
    error: float = math.nan
    error_std: float = math.nan
    worst_absolute: float = math.nan
    lost: float = math.nan
    changed: float = math.nan
    note: str = ""

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        errors = _figure_text(self.error), _figure_text(self.error_std) if self.runs > 1 else ""
        shares = (_figure_text(100 * share, " %") for share in (self.lost, self.changed))
        name = self.format, self.rounding, f"{self.bits:g}"
        return *name, *errors, _figure_text(self.worst_absolute), *shares, self.note


@dataclass(frozen=True)
class FunctionStudy(SavedStudy):
    """The result of `run_function`; its ``str`` is a table, and it shows itself in a notebook.

    Args:
        name: name of the function.
        rows: a `FunctionRow` for each format and mode, formats of few bits first.
        settings: the arguments of the study.
        inputs: shape and dtype of each argument.
        seconds: duration.
        versions: versions of Python and of the packages.
    """

    name: str
    rows: tuple[FunctionRow, ...]
    settings: Mapping[str, object]
    inputs: tuple[str, ...]
    seconds: float
    versions: Mapping[str, str]

    _align, _infinities_as_text = "<<>>>>>><", True
    _optional = ("worst abs.", "± runs")

    def _parts(self) -> list[TableOrLine]:
        head = ("format", "rounding", "bits", "error", "± runs", "worst abs.", "lost", "changed", "note")
        first = f"{self.name}({', '.join(self.inputs)}): {self._figure()} against the carrier's arithmetic"
        return [first, [head, *(row._cells() for row in self.rows)], self.reading()]

    def reading(self) -> str:
        """Says in one line the narrowest format that keeps each of three errors, by nearest_even or the first mode."""
        goal, unit = ("", " % changed") if self._counts_changes() else ("an error of ", " %")
        mode = next((row.rounding for row in self.rows if row.rounding == "nearest_even"), self.rows[0].rounding)
        findings = []
        for limit in (0.1, 0.01, 0.001):
            candidates = [row for row in self.rows if row.rounding == mode and _figure_of_merit(row) <= limit]
            best = min(candidates, key=lambda row: row.bits, default=None)
            narrowest = "none" if best is None else f"{best.format} ({best.bits:g} bits)"
            findings.append(f"{100 * limit:g}{unit}: {narrowest}")
        return f"The narrowest format under {mode} for {goal}at most {'; '.join(findings)}."

    def _counts_changes(self) -> bool:
        """Whether all results are integers, so that `_figure_of_merit` is the share that changed."""
        return any(math.isnan(row.error) and not math.isnan(row.changed) for row in self.rows)

    def _figure(self) -> str:
        return "share changed" if self._counts_changes() else "relative error in the 2-norm"

    def plot(self) -> Figure:
        """Draws bits and errors with `jchop.plot.pareto`; rows without a result are left out. Needs matplotlib.

        Raises:
            ValueError: if no row has a result.
        """
        from jchop.plot import pareto

        rows = [row for row in self.rows if not row.note]
        modes = {row.rounding for row in rows}
        names = [row.format if len(modes) == 1 else f"{row.format} {row.rounding}" for row in rows]
        bits, merits, title = [row.bits for row in rows], list(map(_figure_of_merit, rows)), "bits against error"
        return pareto(names, bits, merits, ylabel=self._figure(), title=f"{self.name}: {title}", log=True)

    @property
    def _has_picture(self) -> bool:
        return any(not row.note for row in self.rows)


def _figure_text(value: float, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.3g}{unit}"


def _figure_of_merit(row: FunctionRow) -> float:
    """The figure that plots and the reading look at: the error, or the share that changed if no result is a float."""
    value = row.changed if math.isnan(row.error) else row.error
    return math.inf if math.isnan(value) else value


def run_function(
    fun: Callable[..., Any],
    *args: Any,
    formats: Iterable[str | ElementFormat | Spec] | ElementFormat | Spec = FUNCTION_FORMATS,
    modes: Iterable[str | Rounding] | Rounding = FUNCTION_MODES,
    seeds: int = 3,
    seed: int = 0,
    budget_seconds: float | None = None,
    progress: StudyProgress | None = None,
) -> FunctionStudy:
    """Measures the errors of a function with every operation rounded, in each format and mode.

    Args:
        fun: a function that JAX can trace; `jchop.emulate` rounds its operations.
        *args: its arguments.
        formats: formats, Specs or texts, or one of them, without scales. Overflow rule, flush and random bits of a Spec
            are kept; `modes` define the rounding. Default: ten formats of 4 to 19 bits.
        modes: rounding modes or their texts, or one of them. Default: ``nearest_even`` and ``stochastic``.
        seeds: number of keys over which a stochastic mode is averaged. Default 3.
        seed: seed of the keys. Default 0.
        budget_seconds: the time after which no format is begun; missing rows have a note. Default None: no limit.
        progress: function of (stage, done, total, note), called during the study.

    Returns:
        A `FunctionStudy`. Results that are integers or booleans have no error; ``changed`` has the share that differs.
        A function may fail in a format, for example because the dtype of its arguments does not hold the format. Its
        row then has the error as its note.

    Raises:
        TypeError: if `fun` is not a function.
        ValueError: for an argument out of range, a spec with a rounding, or a scaled format. For a function that
            returns nothing, or no finite number, or runs in none of the formats.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop import study
        >>> square = lambda x: jnp.sum(x * x)
        >>> found = study.run_function(square, jnp.ones(8) / 3, formats=["e5m2", "half"], modes=["rne"])
        >>> [(row.format, row.error < 0.01) for row in found.rows]
        [('e5m2', False), ('half', True)]
    """
    check_instance("fun", fun, Callable, "a function")
    check_int("seeds", seeds, 1)
    check_int("seed", seed, 0, 2**31 - 1)
    check(budget_seconds is None or budget_seconds > 0, f"budget_seconds={budget_seconds!r} must be positive, or None")
    specs = study_specs(formats, modes)
    for _, spec in specs:
        as_spec(spec, "formats")
    start = time.perf_counter()
    name = getattr(fun, "__name__", type(fun).__name__)
    reference = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(fun(*as_program_arguments(args))))]
    if not reference or any(leaf.dtype.kind in "OSU" for leaf in reference):
        raise ValueError(f"fun={name} returns no arrays of numbers")
    numbers = [leaf for leaf in reference if _is_inexact(leaf)] or reference
    if not any(np.isfinite(_float64_parts(leaf)).any() for leaf in numbers):
        raise ValueError(f"fun={name}: its result in the carrier has no finite number, so it has no error")
    keys = list(jax.random.split(jax.random.key(seed), seeds))
    rows = []
    for index, (names, spec) in enumerate(specs, start=1):
        row = FunctionRow(" = ".join(names), spec.rounding.value, str(spec), float(spec.format.bits))
        if budget_seconds is not None and time.perf_counter() - start > budget_seconds:
            row = dataclasses.replace(row, note=_BUDGET_NOTE)
        else:
            row = _measure_row(row, fun, args, spec, keys, reference)
        rows.append(row)
        if progress is not None:
            progress("rounding", index, len(specs), f"{names[0]} {spec.rounding.value}")
    if not any(row.runs or row.note == _BUDGET_NOTE for row in rows):
        raise ValueError(f"fun={name} runs in none of the formats; {rows[0].spec}: {rows[0].note}")
    settings = {**names_of_specs(specs), "seeds": seeds, "seed": seed, "budget_seconds": budget_seconds}
    inputs = tuple(_argument_text(arg) for arg in args)
    return FunctionStudy(name, tuple(rows), settings, inputs, time.perf_counter() - start, package_versions())


def _argument_text(arg: Any) -> str:
    leaves = jax.tree.leaves(arg)
    if len(leaves) == 1 and hasattr(leaves[0], "shape"):
        # In JAX, where NumPy's float64 is float32 without jax_enable_x64.
        return f"{jnp.result_type(leaves[0])}{list(leaves[0].shape)}"
    return f"{len(leaves)} arrays" if len(leaves) != 1 else type(leaves[0]).__name__


def _measure_row(
    row: FunctionRow, fun: Callable[..., Any], args: tuple, spec: Spec, keys: list[Any], reference: list[np.ndarray]
) -> FunctionRow:
    stochastic = spec.rounding.stochastic
    emulated_function = emulate(fun, spec)
    runs = []
    try:
        for key in keys if stochastic else keys[:1]:
            out = emulated_function(*args, key=key) if stochastic else emulated_function(*args)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(out))]
            runs.append(_result_errors(leaves, reference))
    except (ValueError, TypeError, NotImplementedError, FloatingPointError) as error:
        return dataclasses.replace(row, note=" ".join(str(error).split())[:300])
    errors, absolute, loss_share, change_share = np.array(runs).T
    error, lost, changed = (float(values.mean()) for values in (errors, loss_share, change_share))
    deviation = float((errors - errors[0]).std()) if np.isfinite(errors).all() else math.nan
    figures = {"error": error, "error_std": deviation, "worst_absolute": float(absolute.max())}
    return dataclasses.replace(row, runs=len(runs), **figures, lost=lost, changed=changed)


def _result_errors(results: list[np.ndarray], reference: list[np.ndarray]) -> tuple[float, float, float, float]:
    """Relative error in the 2-norm, largest absolute error, share lost, share of integers changed."""
    pairs = list(zip(results, reference, strict=True))
    float_pairs = [(_float64_parts(y), _float64_parts(r)) for y, r in pairs if _is_inexact(r)]
    integer_pairs = [(y.ravel(), r.ravel()) for y, r in pairs if not _is_inexact(r)]
    error = absolute = loss_share = change_share = math.nan
    if float_pairs:
        y, r = (np.concatenate(parts) for parts in zip(*float_pairs, strict=True))
        finite = np.isfinite(r)
        y, r = y[finite], r[finite]
        not_finite = ~np.isfinite(y)
        loss_share = float(not_finite.mean()) if r.size else 0.0
        difference = np.where(not_finite, np.inf, y - np.where(not_finite, 0.0, r)) if not_finite.any() else y - r
        absolute = float(np.abs(difference).max(initial=0.0))
        error = _relative_error(difference, r, absolute)
    if integer_pairs:
        y, r = (np.concatenate(parts) for parts in zip(*integer_pairs, strict=True))
        change_share = float(np.mean(y != r)) if r.size else 0.0
    return error, absolute, loss_share, change_share


def _relative_error(difference: np.ndarray, reference: np.ndarray, absolute: float) -> float:
    if absolute == 0:
        return 0.0
    largest = float(np.abs(reference).max(initial=0.0))
    if math.isinf(absolute) or largest == 0:
        return math.inf
    # Divided by the largest magnitudes, so that no square overflows or is lost.
    return float(np.linalg.norm(difference / absolute) / np.linalg.norm(reference / largest) * (absolute / largest))


def _is_inexact(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _float64_parts(x: np.ndarray) -> np.ndarray:
    """The numbers in float64; complex ones by parts."""
    flat = x.ravel()
    parts = [np.real(flat), np.imag(flat)] if np.iscomplexobj(flat) else [flat]
    return np.concatenate([part.astype(np.float64) for part in parts])
