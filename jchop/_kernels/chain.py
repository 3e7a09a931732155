"""Chains of elementwise operations as one operation, which in a program for one CPU tries what is faster first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.arithmetic.chain import chain_body, try_chain
from jchop._core.xla_cpu import branch
from jchop._kernels.primitive import make_op

__all__ = ["LEAST_TRIED", "chain_op"]

Array = jax.Array

#: For fewer elements nothing is tried: it would cost more than it saves.
LEAST_TRIED = 1 << 14

#: Apart, so that what asks for NaN reads what was written and does not work it out anew.
_try_op = make_op("jchop_try_chain", try_chain, apart=True)


def _tried(*arrays: Array, **static: Any) -> Array:
    out = _try_op(*arrays, **static)
    return branch(jnp.any(jnp.isnan(out)), lambda: chain_body(*arrays, **static), lambda: out)


chain_op = make_op("jchop_chain", chain_body, single_cpu=_tried)
