"""Chains of elementwise operations as one operation; programs for one CPU first try a faster way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jchop._core.matmul.chain import chain_body, try_chain
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._kernels.primitive import make_op

Array = jax.Array

#: The fewest elements for a try; with fewer it would cost more than it saves.
MIN_CHAIN_ELEMENTS_TO_TRY = 1 << 14

#: Compiled apart, so that the test for NaN reads the result from memory and does not compute it again.
_try_op = make_op("jchop_try_chain", try_chain, no_inline=True)


def _chain_on_backend(*arrays: Array, backend: Backend = PORTABLE, **static: Any) -> Array:
    if backend.branch is None:
        return chain_body(*arrays, **static)
    out = _try_op(*arrays, **static)
    return backend.branch(jnp.any(jnp.isnan(out)), lambda: chain_body(*arrays, **static), lambda: out)


chain_op = make_op("jchop_chain", _chain_on_backend, by_backend=True)
