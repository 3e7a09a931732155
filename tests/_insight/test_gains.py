"""`EmulatedFunction.what_if`: gains are those of another interpreter, on programs that other people wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS
from programs.numpy_interpreter import Format, emulated

import jchop as jc

BFLOAT16 = Format(8, 7)
WHOLE = Format(11, 52)
#: Programs of the suite.
KNOWN = (
    "jax.numpy.var", "jax.numpy.corrcoef", "jax.numpy.polyval", "jax.nn.gelu", "jax.nn.softmax", "jax.nn.logsumexp",
    "jax.nn.dot_product_attention", "jax.scipy.stats.t.logpdf", "jax.scipy.spatial.Rotation",
    "jax.numpy.cov",
)  # fmt: skip
SCIENCE = tuple(name for name in PROGRAMS if name.startswith("science."))
QUICK = ("jax.nn.gelu", "science.conjugate_gradients", "science.kepler")


def line_of(eqn: Any) -> str:
    """The innermost line of a program of the suite."""
    frames = () if eqn.source_info.traceback is None else eqn.source_info.traceback.frames
    lines = (f"{Path(f.file_name).name}:{f.line_num}" for f in frames if Path(f.file_name).name.startswith("of_"))
    return next(lines, "")


def place_of(eqn: Any, around: tuple[Any, ...]) -> tuple[str, str]:
    """The scope and the line of an equation."""
    scope = ""
    for holder in around:
        scope += f"/{holder.source_info.name_stack}/{holder.params.get('name', '')}"
    scope = re.sub(r"\w+\(|\)", "", f"{scope}/{eqn.source_info.name_stack}")
    line = next((own for own in map(line_of, (eqn, *reversed(around))) if own), "")
    return "/".join(part for part in scope.split("/") if part), line


def rerun(fun: Callable[..., Any], args: Any, row: Any) -> np.ndarray:
    """The result with the row exact and handed on."""
    line = row.place if row.place.startswith("of_") else ""
    if row.primitive.startswith("argument"):
        number = int(re.findall(r"\d+", row.primitive)[0])
        return result(emulated(fun, BFLOAT16, args, whole=[number]))

    def exact(eqn: Any, around: tuple[Any, ...]) -> bool:
        return eqn.primitive.name == row.primitive and place_of(eqn, around) == (row.scope, line)

    return result(emulated(fun, BFLOAT16, args, exact))


def result(leaves: list[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in leaves])


def ranks(values: list[float]) -> np.ndarray:
    return np.array([np.mean([np.sum(np.array(values) < x), np.sum(np.array(values) <= x) - 1]) for x in values])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*KNOWN, *SCIENCE)]
)
@pytest.mark.filterwarnings("ignore")
def test_predicted_gains_are_those_of_another_interpreter(name: str) -> None:
    """Of the five rows of the largest contributions, in norm and along the error."""
    fun, args = PROGRAMS[name].make()
    low = jc.emulate(fun, "bfloat16")
    found = low.blame(*args)
    rows = [row for row in found.rows if not math.isnan(row.gain)]
    exact = result(emulated(fun, WHOLE, args))
    error = result(emulated(fun, BFLOAT16, args)) - exact
    falls = []
    for row in rows:
        left = rerun(fun, args, row) - exact
        falls.append(1 - np.linalg.norm(left) / np.linalg.norm(error))
        along = float((error - left) @ error / (error @ error))
        assert row.gain == pytest.approx(falls[-1], rel=0.1, abs=2e-3), row
        assert row.projection == pytest.approx(along, rel=0.1, abs=2e-3), row
    assert len(rows) == min(5, len(found.rows))
    assert [row.gain for row in rows] == sorted((row.gain for row in rows), reverse=True)
    mine, its = ranks([round(row.gain, 3) for row in rows]), ranks([round(x, 3) for x in falls])
    assert np.ptp(its) == 0 or np.corrcoef(mine, its)[0, 1] >= 0.95


def test_parts_of_several_equations() -> None:
    """Lines have their text; a part of all equations and an argument of the format leave no error."""

    def model(x: Any) -> Any:
        with jax.named_scope("head"):
            y = jnp.exp(x) / 3
        return y + x * 0.3

    x, first = jnp.array([0.5, 1.25, 2.0]), model.__code__.co_firstlineno
    low = jc.emulate(model, "bfloat16")
    found = {by: low.what_if(x, by=by) for by in ("line", "scope", "function")}
    lines = {row.place: row for row in found["line"].rows}
    assert {row.place: row.primitive for row in found["line"].rows} == {
        f"test_gains.py:{first}": "argument [0]",
        f"test_gains.py:{first + 2}": "y = jnp.exp(x) / 3",
        f"test_gains.py:{first + 3}": "return y + x * 0.3",
    }
    assert {row.scope: row.primitive for row in found["scope"].rows if not row.source} == {
        "head": "2 equations", "": "2 equations"
    }  # fmt: skip
    assert [(row.primitive, row.gain) for row in found["function"].rows] == [
        ("4 equations", 1.0),
        ("argument [0]", 0.0),
    ]
    exact = np.asarray(model(x), np.float64)
    for line in (f"test_gains.py:{first + 2}", f"test_gains.py:{first + 3}"):
        wide = jc.emulate(model, "bfloat16", rules={line: "wide"})(x)
        assert lines[line].error == pytest.approx(np.linalg.norm(np.asarray(wide, np.float64) - exact), rel=1e-6)
