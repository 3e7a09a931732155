"""Adapters beside the parameters of a module of Linen: the collection ``"lora"`` of its variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn

from jchop._common.checks import check_instance
from jchop._quantized.program.adapters import AdaptedParam
from jchop._quantized.program.call import CallArguments
from jchop.nn._linen.quantized import (
    LORA_COLLECTION,
    Quantized,
    flat_params,
    linen_params_with_adapters,
    lora_adapters,
    nest_params,
    with_box_of,
)
from jchop.nn._shared.program_classes import ExampleInputs, method_inputs
from jchop.nn._trees.lora import AdaptableModel


def is_linen(model: Any, fun: Any = None) -> bool:
    """Whether `fun` is a module of Linen, or a model is variables with adapters."""
    return isinstance(fun, nn.Module | Quantized) or (isinstance(model, Mapping) and bool(lora_adapters(model)))


class AdaptableLinen(AdaptableModel):
    """Variables of a module of Linen."""

    @property
    def adapted(self) -> dict[str, AdaptedParam]:
        """The parameters that have adapters, by path, without boxes of metadata."""
        leaves = flat_params(linen_params_with_adapters(self.model)).items()
        return {path: value for path, leaf in leaves if isinstance(value := nn.meta.unbox(leaf), AdaptedParam)}

    def programs(self, inputs: ExampleInputs) -> Iterable[tuple[Any, CallArguments]]:
        """The program of each method that has example inputs, with its call."""
        words = "a result of jchop.nn.quantize; of a module without rules, jchop.nn.quantize(module, jchop.Rule())"
        low = check_instance("fun", self.fun, Quantized, words)
        methods = method_inputs(inputs, type(low.module)).items()
        return [low.traced(self.model, args, None, {**kwargs, "method": name}) for name, (args, kwargs) in methods]

    def names(self, path: str) -> tuple[str, ...]:
        """The names that a parameter has in files; the kernel of the module itself is of a layer without a name."""
        return ("",) if path == "kernel" else super().names(path)

    def originals(self, original: Any) -> Any:
        """The parameters of variables that were not packed, by path, each with None: it has its target's layout."""
        return super().originals(dict(original)["params"])

    def put(self, leaves: Iterable[tuple[str, Any]], unpacked: Sequence[str] = ()) -> Any:
        """The variables with other parameters at some paths; their adapters stand in a collection of their own."""
        variables, params = dict(self.model), flat_params(self.model["params"])
        adapters = lora_adapters(variables)
        for path, leaf in leaves:
            base = leaf.base if isinstance(leaf, AdaptedParam) else leaf
            params[path] = with_box_of(params[path], base)
            adapters.pop(path, None)
            if isinstance(leaf, AdaptedParam):
                adapters[path] = leaf.adapter
        variables.pop(LORA_COLLECTION, None)
        more = {LORA_COLLECTION: nest_params(adapters)} if adapters else {}
        return {**variables, "params": nest_params(params), **more}
