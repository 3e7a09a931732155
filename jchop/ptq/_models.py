"""`quantize_with_data`: a model of NNX whose parameters are rounded by data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flax import nnx

from jchop._common.checks import short_repr
from jchop._quantized.products.rule import RuleLike, as_rule_tuple
from jchop._quantized.program.call import batch_arguments
from jchop.nn._nnx.layers import refuse_quantized_layers
from jchop.nn._nnx.programs import round_program_by
from jchop.ptq._data.passes import check_batches, map_batches
from jchop.ptq._quantize import calibrate_params
from jchop.ptq._records import PtqReport

T = TypeVar("T", bound=nnx.Module)


class ModelData:
    """Batches of a model's arguments, and the steps that round parameters with them.

    Args:
        batches: arguments of the model: tuples, or the only argument.
        steps: as of `jchop.ptq.quantize`.
        sequential: as of `jchop.ptq.quantize`.
        progress: called with the number of batches that were run.
    """

    def __init__(
        self, batches: Any, steps: Any, sequential: bool | None, progress: Callable[[int], object] | None
    ) -> None:
        check_batches(batches, repeated=False)
        self.batches = batches
        self._options = steps, sequential
        self._progress = progress

    def first(self) -> tuple[Any, ...]:
        """The arguments of the first batch; the batches are kept."""
        self.batches = [*self.batches]
        return batch_arguments(self.batches[0]) if self.batches else ()

    def round(
        self, function: Any, params: Any, arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]], key: Any
    ) -> tuple[Any, PtqReport]:
        """The packed parameters of a function and a report, from the arguments after the parameters."""
        calls = map_batches(self.batches, arguments)
        return calibrate_params(function, params, calls, *self._options, key, self._progress)


def quantize_with_data(
    model: T,
    rules: RuleLike,
    batches: Iterable[Any],
    steps: Any = None,
    *,
    sequential: bool | None = None,
    rngs: nnx.Rngs | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[T, PtqReport]:
    """A copy of a model, packed, each weight rounded so that its product has small errors on data.

    `jchop.ptq.quantize` for the call of a model of Flax NNX. The result is of the kind that `quantize` returns with
    ``mode="ptq"`` and ``inputs``: its program runs under the rules.

    Args:
        model: a module of Flax NNX, whose parameters under rules are not rounded yet.
        rules: a `Rule`, or several, as of `jchop.quantize_fn`.
        batches: arguments of the model's call: tuples, or the only argument.
        steps: as of `jchop.ptq.quantize`, such as ``[jc.ptq.clip(), jc.ptq.gptq()]``, the default.
        sequential: as of `jchop.ptq.quantize`.
        rngs: `flax.nnx.Rngs`, required if a rule is stochastic.
        progress: called with the number of batches that were run.

    Returns:
        The new model, and a `jchop.ptq.PtqReport`.

    Raises:
        TypeError, ValueError: as `jchop.ptq.quantize`; for a layer that rounds its parameters already.

    Example:
        >>> import jax, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (256, 64)) @ jax.random.normal(jax.random.key(1), (64, 64))
        >>> packed, report = jc.nn.quantize_with_data(model, jc.Rule(weight="int4(group=32)"), [x])
        >>> report.weights[0].path, report.weights[0].after - report.weights[0].before > 2, packed(x).shape
        ('kernel', True, (256, 8))
    """
    all_rules = as_rule_tuple(rules)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model={short_repr(model)} must be a module of Flax NNX; for Linen use Program.quantize_with_data, for "
            "Equinox jc.ptq.quantize(lambda m, x: jax.vmap(m)(x), rules, model, batches, steps)"
        )
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    refuse_quantized_layers(result, all_rules)
    data = ModelData(batches, steps, sequential, progress)
    return result, round_program_by(result, all_rules, rngs, data.round)
