"""Elementary functions as one operation."""

from __future__ import annotations

from jchop._core.elementary.rounded import elementary, rounds
from jchop._kernels.primitive import make_op

__all__ = ["elementary_op", "rounds"]

#: `_core.elementary.evaluate.elementary_function` as an operation: ``(x, *words, name=, spec=)``.
elementary_op = make_op("jchop_elementary", elementary, like_first=True, apart=True)
