"""Pictures: heat maps of tables, values of a format on the number line, errors of programs, weights, formats.

Every function returns a new `matplotlib.figure.Figure` and saves nothing. Matplotlib (extra ``plot``) is imported on
first use. pyplot is not imported, so no window opens and no global state changes.
"""

from jchop.plot._formats import value_grid
from jchop.plot._fronts import calibration, pareto
from jchop.plot._heat_map import Panel, heat_map
from jchop.plot._programs import blame, report
from jchop.plot._tune import tune

__all__ = ["Panel", "blame", "calibration", "heat_map", "pareto", "report", "tune", "value_grid"]
