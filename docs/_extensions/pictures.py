"""Pictures of the reference: the figure that the example in a docstring of `jchop.plot` makes stands below it."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "pictures"


def figure_of(function: Any) -> Any:
    """The last Matplotlib figure that the examples in a docstring make; None if they make none."""
    from matplotlib.figure import Figure

    names: dict[str, Any] = {}
    found = None
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(function) or ""):
        try:
            value = eval(example.source, names)
        except SyntaxError:
            exec(example.source, names)
            value = None
        found = next((each for each in (value, *names.values()) if isinstance(each, Figure)), found)
    return found


def add_picture(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Adds the picture to the lines of a docstring."""
    if what != "function" or not name.startswith("jchop.plot."):
        return
    figure = figure_of(thing)
    if figure is not None:
        FOLDER.mkdir(exist_ok=True)
        figure.savefig(FOLDER / f"{name}.png", dpi=100)
        alt = f"The figure of the example of {name}"
        lines += ["", f".. image:: /pictures/{name}.png", f"   :alt: {alt}", "   :class: picture", ""]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", add_picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
