"""Functions of `jax.numpy` in emulated arithmetic: every operation rounded, not only the result.

Each is called as ``f(*operands, spec, key=None)``. docs/math.md has a table of the functions and their accuracy.
"""

from jchop.math import _elementwise, _products, _reductions, linalg
from jchop.math._elementwise import *  # noqa: F403
from jchop.math._matmul import matmul, matmul_double
from jchop.math._products import *  # noqa: F403
from jchop.math._reductions import *  # noqa: F403

__all__ = ["linalg", "matmul", "matmul_double"]
__all__ += _elementwise.__all__
__all__ += _products.__all__
__all__ += _reductions.__all__
