"""The result of `jchop.tune`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jchop._common.text import RowReport, TableOrLine, plain_data
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec

__all__ = ["TunedSite", "Tuning", "TuningPoint"]


@dataclass(frozen=True)
class TunedSite:
    """The equations that share a format.

    Args:
        path: their scope, and by equation the primitive; ``"/"`` is the scope outside of all.
        spec: their rounding as text; ``"carrier"`` for none. The rule of sums follows, if there is one.
        bits: the bits of a result.
        equations: their number.
        results: the count of their results, in all turns of scans.
        alone: the error if every other site has the most exact format of the menu; NaN if it was not measured.
    """

    path: str
    spec: str
    bits: int
    equations: int
    results: int
    alone: float = math.nan


@dataclass(frozen=True)
class TuningPoint:
    """A measured assignment that no other one beats in cost and error.

    Args:
        cost: its cost.
        error: its largest error of all inputs, as the search measured it.
        specs: the roundings of the sites as text, in the order of the rows.
    """

    cost: float
    error: float
    specs: tuple[str, ...]


@dataclass(frozen=True)
class Tuning(RowReport):
    """The result of `jchop.tune`; its ``str`` is a table.

    Args:
        rules: for ``jchop.emulate(fun, None, rules=rules)``: a pattern for each site, with its spec or None,
            and for sums with a rule their `MatmulSpec`.
        rows: the sites, in the order of the program.
        tolerance: the largest error allowed.
        errors: the error on each input, of the function from `emulate` with these rules.
        held_out: the same on each input of `held_out`.
        cost: the cost of the assignment.
        cost_name: its unit.
        uniform: the cheapest single format within the tolerance as text, and its cost; None if there is none.
        front: measured assignments from cheap to exact.
        evaluations: the number of assignments measured.
        compiled: whether formats were arguments of one compiled program, or each assignment ran by `emulate`.
        notes: sentences about the search.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> def f(x):
        ...     with jax.named_scope("root"):
        ...         y = jnp.sqrt(x)
        ...     return y - 1.0
        >>> found = jc.tune(f, [(jnp.float32(1.1),)], 0.05, ["bfloat16", "e4m3"])
        >>> [(row.path, row.spec) for row in found.rows], found.error <= 0.05
        ([('root', 'bfloat16'), ('/', 'bfloat16')], True)
    """

    rules: dict[str, Spec | MatmulSpec | None]
    rows: tuple[TunedSite, ...]
    tolerance: float
    errors: tuple[float, ...]
    held_out: tuple[float, ...]
    cost: float
    cost_name: str
    uniform: tuple[str, float] | None
    front: tuple[TuningPoint, ...]
    evaluations: int
    compiled: bool
    notes: tuple[str, ...] = ()

    _align = "<<>>>>"

    @property
    def error(self) -> float:
        """The largest error of the inputs."""
        return max(self.errors)

    def as_dict(self) -> dict[str, Any]:
        """As of every report, and the largest error."""
        return {"error": plain_data(self.error), **super().as_dict()}

    def _parts(self) -> Iterator[TableOrLine]:
        head = ("site", "format", "bits", "equations", "results", "error alone")
        yield [head, *map(_tuning_cells, self.rows)]
        yield f"error {self.error:.3g} on {_inputs_text(self.errors)}, tolerance {self.tolerance:.3g}"
        if self.held_out:
            yield f"error {max(self.held_out):.3g} on {_inputs_text(self.held_out)} held out"
        uniform = "no single format is" if self.uniform is None else f"{self.uniform[0]} alone: {self.uniform[1]:.4g}"
        yield f"cost {self.cost:.4g} ({self.cost_name}); {uniform}{' within it' if self.uniform is None else ''}"
        yield from self.notes


def _inputs_text(errors: tuple[float, ...]) -> str:
    return f"{len(errors)} input{'' if len(errors) == 1 else 's'}"


def _tuning_cells(row: TunedSite) -> tuple[str, ...]:
    alone = "" if math.isnan(row.alone) else f"{row.alone:.2g}"
    return row.path, row.spec, str(row.bits), str(row.equations), str(row.results), alone
