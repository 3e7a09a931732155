"""Pictures: dot plots, values of a format on the number line, rounding errors, bits against errors.

Reports draw themselves: ``report.plot()``.

Every function returns a new `matplotlib.figure.Figure` and saves nothing. Matplotlib (extra ``plot``) is imported on
first use. pyplot is not imported, so no window opens and no global state changes.
"""

from jchop._common.on_demand import on_demand
from jchop.plot._charts import dot_plot, pareto
from jchop.plot._formats import code_histogram, rounding_error, value_grid

_REPORTS = ("report", "blame", "tune", "sensitivity", "calibration")
__getattr__, __dir__ = on_demand(__name__, elsewhere=dict.fromkeys(_REPORTS, "found.plot(), a method of the report"))

__all__ = ["code_histogram", "dot_plot", "pareto", "rounding_error", "value_grid"]
