"""Pictures: heat maps of tables, values of a format on the number line, errors of programs, weights, formats.

Every function returns a new `matplotlib.figure.Figure` and saves nothing. Matplotlib (extra ``plot``) is imported on
first use. pyplot is not imported, so no window opens and no global state changes.
"""

from jchop.plot._charts import Panel, heat_map, pareto
from jchop.plot._formats import code_histogram, rounding_error, value_grid, value_grids
from jchop.plot._reports import blame, calibration, report, sensitivity, tune

__all__ = [
    "Panel",
    "blame",
    "calibration",
    "code_histogram",
    "heat_map",
    "pareto",
    "report",
    "rounding_error",
    "sensitivity",
    "tune",
    "value_grid",
    "value_grids",
]
