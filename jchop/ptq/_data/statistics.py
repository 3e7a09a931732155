"""`statistics`: the inputs of the products of a function, summed up over data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jchop._common.text import table_lines
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop.ptq._data.input_sums import InputSums, pair_value
from jchop.ptq._data.passes import BatchData, check_batches

Array = jax.Array

__all__ = ["InputStatistics", "Statistics", "mean_statistics", "statistics"]


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """The inputs x of the product of a parameter, over all rows (tokens) of the data.

    A parameter that is a stack of layers has the turns of the loop as leading axes; the second axis from there is that
    of a batch of products (experts, groups of a convolution), of length 1 if there is none.

    Args:
        gram: the mean of x x^T, (batch, summed, summed), in float32 (float64 for inputs of that dtype).
        mean_abs: the mean of abs(x), (batch, summed).
        max_abs: the largest abs(x), (batch, summed).
        count: how many rows there were, (batch,).
    """

    gram: Array
    mean_abs: Array
    max_abs: Array
    count: Array


class Statistics(Mapping[str, InputStatistics]):
    """`InputStatistics` by the path of the parameter.

    Args:
        found: those of the parameters whose inputs were summed up.
        left_out: of other parameters that reach a product, the reason.
    """

    def __init__(self, found: Mapping[str, InputStatistics], left_out: Mapping[str, str]) -> None:
        self._by_path, self.left_out = dict(found), dict(left_out)

    def __getitem__(self, path: str) -> InputStatistics:
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

    def __str__(self) -> str:
        rows = [("parameter", "inputs", "rows", "largest")]
        for path, inputs in self.items():
            shape = "×".join(map(str, inputs.mean_abs.shape))
            rows.append((path, shape, f"{float(inputs.count.sum()):.0f}", f"{float(inputs.max_abs.max()):.4g}"))
        rows += [(path, "left out", "", reason) for path, reason in self.left_out.items()]
        return "\n".join(table_lines(rows))


def statistics(
    fun: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    progress: Callable[[int], object] | None = None,
) -> Statistics:
    """The second moments and magnitudes of the inputs of all products of parameters and data, in one pass.

    The program that JAX traces of `fun` shows the products: `rounded_dot_general` with any contracted axes and axes of
    a batch, convolutions (their patches) and `ragged_dot`, each group by itself; also within `jit`, `remat`, branches,
    and `scan`, where each turn over a stack of parameters has statistics of its own. So has each layer of a stack, if
    all products take layers by constant indexes. Inputs are multiplied in float32 in full precision, 1,024 rows at a
    time; sums beyond are compensated, so that they do not depend on the number of batches.

    Args:
        fun: a function of a pytree of parameters, and of anything else.
        params: the parameters.
        batches: arguments after the parameters: tuples, or the only argument. One is in memory at a time.
        progress: called with the number of batches that were run. Default None.

    Returns:
        A `Statistics`: a mapping from paths (as in `jchop.quantize_fn`) to `InputStatistics`; its `left_out` says which
        parameters of products are not looked at, and why: those within `while` loops and `shard_map`, those that are
        computed with before the product, and parts of an axis.

    Raises:
        TypeError: for batches that are none.
        ValueError: for no batch, or NaN and infinities in the inputs of a product.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> dense = lambda p, x: jnp.tanh(x @ p["w"])
        >>> found = jc.ptq.statistics(dense, {"w": jnp.ones((2, 3))}, [jnp.array([[1.0, -2.0], [3.0, 0.0]])])
        >>> found["w"].gram.tolist(), found["w"].max_abs.tolist(), found["w"].count.tolist()
        ([[[5.0, -1.0], [-1.0, 2.0]]], [[3.0, 2.0]], [2.0])
    """
    if not callable(fun):
        raise TypeError(f"fun={fun!r} must be a function of parameters and other arguments")
    check_batches(batches, repeated=False)
    data = BatchData(QuantizedFunction(fun, ()), params, batches, progress=progress)
    sums, (program, _, sites) = data.sums()
    by_path = {program.paths[leaf]: mean_statistics(leaf_sums) for leaf, leaf_sums in sums.items()}
    return Statistics(by_path, {program.paths[leaf]: reason for leaf, reason in sites.reasons.items()})


def mean_statistics(sums: InputSums) -> InputStatistics:
    """Sums as means over the rows; zeros where there was none."""
    count = pair_value(sums.count)
    rows = jnp.maximum(count, 1)
    gram, magnitude = pair_value(sums.gram) / rows[..., None, None], pair_value(sums.magnitude) / rows[..., None]
    return InputStatistics(gram, magnitude, sums.largest, count)
