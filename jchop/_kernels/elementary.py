"""Elementary functions as one operation."""

from __future__ import annotations

from jchop._core.elementary.functions import elementary_function
from jchop._kernels.primitive import make_op

#: `_core.elementary.evaluate.elementary_function` as an operation: ``(x, *words, name=, spec=)``.
elementary_op = make_op("jchop_elementary", elementary_function, like_first=True, no_inline=True)
