"""Layers every operation of which is rounded, by `jchop.emulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jchop._emulate.emulate import emulate
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.nn._nnx.rounding_modules import KeyStream, RoundingModule

Array = jax.Array

__all__ = ["EmulatedAttention", "LayerEmulation"]


class LayerEmulation(RoundingModule):
    """Runs a layer in an emulated arithmetic.

    Args:
        spec: the rounding of every operation, and of arguments and parameters on entry.
        accumulate: how sums are formed.
        stream: of keys.
    """

    def __init__(self, spec: Spec, accumulate: MatmulSpec | None, stream: KeyStream) -> None:
        super().__init__(stream)
        self.spec, self.accumulate = spec, accumulate

    def __call__(self, call: Callable[..., Any], layer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = self.key()
        graph, state = nnx.split(layer)
        update_paths: list[Any] = []

        def pure(state: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
            copy = nnx.merge(graph, state)
            before = _variable_values(copy)
            result = call(copy, *args, **kwargs)
            after = _variable_values(copy)
            # Parameters are rounded on entry; only attributes set by the layer itself are written back.
            update_paths[:] = [path for path, value in after.items() if value is not before[path]]
            return result, [after[path] for path in update_paths]

        emulated_call = emulate(pure, self.spec, accumulate=self.accumulate, key=key)
        result, values = emulated_call(state, args, kwargs)
        variables = dict(nnx.to_flat_state(nnx.state(layer)))
        updates = [(path, variables[path].replace(value)) for path, value in zip(update_paths, values, strict=True)]
        nnx.update(layer, nnx.from_flat_state(updates))
        return result


def _variable_values(module: nnx.Module) -> dict[Any, Any]:
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


class EmulatedAttention(RoundingModule):
    """In place of `flax.nnx.dot_product_attention`, in an emulated arithmetic."""

    def __init__(self, spec: Spec, accumulate: MatmulSpec | None, stream: KeyStream) -> None:
        super().__init__(stream)
        self.spec, self.accumulate = spec, accumulate

    def __call__(self, *args: Any, module: Any = None, **kwargs: Any) -> Array:
        if module is not None:
            raise NotImplementedError("sow_weights=True: weights of an emulated attention cannot be sown")
        emulated_attention = emulate(nnx.dot_product_attention, self.spec, accumulate=self.accumulate, key=self.key())
        return emulated_attention(*args, **kwargs)
