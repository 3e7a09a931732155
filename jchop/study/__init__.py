"""The format study: the accuracy of a small neural network after rounding of its parameters.

A classifier (Flax NNX, Optax adam) is trained in binary32 on a data set that comes with scikit-learn. It is evaluated
on test data with its parameters (and optionally its activations) rounded to each format in each rounding mode. This is
Table 8 of Carson and Chen's "Pychop" paper (arXiv 2504.07835). ``jchop study`` runs it from the command line.

`run_function` studies a function of the user instead: its errors with every operation rounded. The results of both are
tables as text, and have the methods ``plot()`` and ``save(folder)``.

Needs the extra ``study``. Importing this module does not import Flax, Optax, scikit-learn or matplotlib.
"""

from jchop._common.on_demand import on_demand
from jchop.study._function_study import run_function
from jchop.study._run import DATASETS, FORMATS, MODES, StudyResult, run

_METHODS = {"figure": "result.plot()", "table": "str(result)"}
_METHODS |= dict.fromkeys(("save", "save_function"), "result.save(folder)")
__getattr__, __dir__ = on_demand(__name__, elsewhere=_METHODS)

__all__ = ["DATASETS", "FORMATS", "MODES", "StudyResult", "run", "run_function"]
