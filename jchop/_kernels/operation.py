"""An operation rounded once, as in `_linen_module_of.arithmetic.operations`; programs for one CPU compute some in float64."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jchop._core.arithmetic import float64
from jchop._core.arithmetic.operations import operation, operation_carrier, widened
from jchop._core.arithmetic.ranges import Range, range_of
from jchop._kernels.primitive import make_op
from jchop.spec import Spec

__all__ = ["operation_on_device"]

Array = jax.Array


def operation_on_device(
    name: str, args: Sequence[Array], spec: Spec | None, word: Array | None = None, *, ranges: Sequence[Range] = ()
) -> Array:
    """`round_operation`, with its arguments and bits; a quotient or a root may take a shorter way."""
    carrier = operation_carrier(args[0].dtype)
    if spec is None or carrier.name != "float32":
        return operation(name, args, spec, word, ranges=ranges)
    operand_ranges = tuple(ranges) or (range_of(spec, carrier),) * len(args)
    if not float64.computes(name, spec, operand_ranges):
        return operation(name, args, spec, word, ranges=ranges)
    arrays = [widened(x) for x in jnp.broadcast_arrays(*args)]
    out = _short_op(*arrays, *(() if word is None else (word,)), name=name, spec=spec, ranges=operand_ranges)
    return out.astype(args[0].dtype)


def _body(*arrays: Array, name: str, spec: Spec, ranges: tuple[Range, ...]) -> Array:
    args, word = arrays[: len(ranges)], arrays[len(ranges) :]
    return operation(name, args, spec, *word, ranges=ranges)


def _in_float64(*arrays: Array, name: str, spec: Spec, ranges: tuple[Range, ...]) -> Array:
    args, word = arrays[: len(ranges)], arrays[len(ranges) :]
    return float64.compute(name, args, spec, word[0] if word else None)


_short_op = make_op("jchop_quotient_or_root", _body, single_cpu=_in_float64, like_first=True)
