"""An operation rounded once, as in `_core.matmul.operations`; programs for one CPU compute some in float64."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jchop._core.arithmetic import float64
from jchop._core.arithmetic.ranges import ValueRange, range_of
from jchop._core.matmul.operations import operation_carrier, round_operation, widen_operand
from jchop._core.xla.backend import PORTABLE, Backend
from jchop._kernels.primitive import make_op
from jchop._spec.spec import Spec

Array = jax.Array


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
