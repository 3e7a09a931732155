"""The format study: the accuracy of a small neural network after rounding of its parameters.

A classifier (Flax NNX, Optax adam) is trained in binary32 on a data set that comes with scikit-learn, then evaluated on
test data with its parameters (and optionally its activations) rounded to each format in each rounding mode, as in Table
8 of Carson and Chen's "Pychop" paper (arXiv 2504.07835). ``jchop study`` runs it from the command line.

`run_function` studies a function of the user instead: its errors with every operation rounded.

Needs the extra ``study``. Importing this module does not import Flax, Optax, scikit-learn or matplotlib.
"""

from jchop.study._function_study import FunctionRow, FunctionStudy, run_function, save_function
from jchop.study._run import DATASETS, FORMATS, MODES, Row, StudyResult, figure, run, save, table

__all__ = [
    "DATASETS",
    "FORMATS",
    "MODES",
    "FunctionRow",
    "FunctionStudy",
    "Row",
    "StudyResult",
    "figure",
    "run",
    "run_function",
    "save",
    "save_function",
    "table",
]
