"""Elementwise operations: rounded once, some in float64 on one CPU; chains of them; elementary functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jchop._core.arithmetic import float64
from jchop._core.arithmetic.exact import ValueRange, range_of
from jchop._core.elementary.functions import elementary_function
from jchop._core.matmul.operations import chain_body, operation_carrier, round_operation, try_chain, widen_operand
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._kernels.primitive import make_op
from jchop._spec.spec import Spec


def operation_on_device(
    name: str, args: Sequence[Array], spec: Spec | None, word: Array | None = None, *, ranges: Sequence[ValueRange] = ()
) -> Array:
    """`round_operation`, with its arguments and bits; a quotient or a root may take a shorter way."""
    carrier = operation_carrier(args[0].dtype)
    if spec is None or carrier.name != "float32":
        return round_operation(name, args, spec, word, ranges=ranges)
    operand_ranges = tuple(ranges) or (range_of(spec, carrier),) * len(args)
    if not float64.supports_float64_operation(name, spec, operand_ranges):
        return round_operation(name, args, spec, word, ranges=ranges)
    arrays = [widen_operand(x) for x in jnp.broadcast_arrays(*args)]
    out = _quotient_or_root_op(*arrays, *(() if word is None else (word,)), name=name, spec=spec, ranges=operand_ranges)
    return out.astype(args[0].dtype)


def _quotient_or_root_body(
    *arrays: Array, name: str, spec: Spec, ranges: tuple[ValueRange, ...], backend: Backend = PORTABLE
) -> Array:
    args, (word, *_) = arrays[: len(ranges)], (*arrays[len(ranges) :], None)
    if backend.float64:
        return float64.operation_in_float64(name, args, spec, word)
    return round_operation(name, args, spec, word, ranges=ranges)


_quotient_or_root_op = make_op("jchop_quotient_or_root", _quotient_or_root_body, like_first=True, by_backend=True)


# == chains; programs for one CPU first try a faster way ===============================================================


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


# == elementary functions ==============================================================================================


#: `_core.elementary.functions.elementary_function` as an operation: ``(x, *words, name=, spec=)``.
elementary_op = make_op("jchop_elementary", elementary_function, like_first=True, no_inline=True)
