"""Models of NNX in checkpoints of other programs: names, the orientation of weights, packed layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jchop._checkpoints.checkpoint import Checkpoint, TensorNaming, check_tensor_names, in_shape_and_dtype
from jchop._common.checks import check
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.weight_layout import StoredAs
from jchop._storage import QArray
from jchop._storage._array import named_sharding_of
from jchop.nn._nnx.layer_kinds import NNX_KINDS, NnxKind, attach, param_layout
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, layer_entries
from jchop.nn._nnx.lora import Adapted
from jchop.nn._nnx.nodes import ModuleEntry, QuantizedParam

T = TypeVar("T", bound=nnx.Module)

#: The parameters of Flax's layers that have another name in checkpoints. Those of other modules keep theirs.
_CHECKPOINT_NAMES: Mapping[str, str] = {
    "kernel": "weight", "embedding": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var",
}  # fmt: skip
_CHECKPOINT_VARIABLES = (nnx.Param, QuantizedParam, nnx.BatchStat)


def model_arrays(model: nnx.Module, names: TensorNaming | None) -> dict[str, Any]:
    """The arrays of a model by their names in a checkpoint, as that has them."""
    arrays: dict[str, Any] = {}
    for tensor in _model_tensors(model, names):
        check(tensor.name not in arrays, f"names gives {tensor.name!r} to two parameters")
        arrays[tensor.name] = tensor.value()
    return arrays


def fill_model(source: Checkpoint, like: T, names: TensorNaming | None, skip: str | None, exact: bool) -> T:
    """A model like one, with the weights of a checkpoint."""
    result: Any = nnx.merge(*nnx.split(like), copy=True)
    tensors = list(_model_tensors(result, names, source.items))
    check_tensor_names(source, [tensor.name for tensor in tensors], skip)
    for _, group in groupby(tensors, key=lambda tensor: id(tensor.entry)):
        parts = list(group)
        codes_by_key = {part.key: q for part in parts if (q := part.put(source.read(part.name, exact))) is not None}
        if codes_by_key:
            _attach_packed_params(parts[0], codes_by_key)
    for keys, value in nnx.to_flat_state(nnx.state(result)):
        if isinstance(jax.tree.leaves(value)[0], jax.ShapeDtypeStruct):
            raise ValueError(f"like has no value for {'/'.join(map(str, keys))!r}, and a checkpoint has none")
    return result


class _ModelTensor(NamedTuple):
    """A parameter of a model, and its place in a checkpoint."""

    name: str
    key: str
    variable: Any
    entry: ModuleEntry
    kind: NnxKind | None

    @property
    def _layout(self) -> OperandLayout | None:
        """The axes in a checkpoint: first those that stay, then those that a product sums over."""
        layer, axes = self.entry.module, self.variable.get_value().ndim
        if self.kind is None or self.key not in self.kind.parameters:
            return None
        layout, stack = param_layout(layer, self.kind, self.key)
        if stack or (axes > 1 and layout.ndim != axes) or axes > 2:
            raise ValueError(
                f"{type(layer).__name__} at {self.entry.paths[0]!r}: {self.key} of shape "
                f"{list(self.variable.get_value().shape)} has no form in checkpoints, which have matrices "
                "of Linear and Embed; jchop.save keeps it"
            )
        return layout

    def value(self) -> Any:
        """The array as a checkpoint has it."""
        value, layout = self.variable.get_value(), self._layout
        if isinstance(value, StoredAs) and value.input_factors is not None:
            raise ValueError(
                f"{self.entry.paths[0]!r} has factors by which its inputs are multiplied when the model runs, which "
                "have no form in checkpoints; jchop.save keeps them"
            )
        if isinstance(value, StoredAs):
            return value.stored
        return value if layout is None else value.transpose(*layout.free, *layout.contracting)

    def put(self, value: np.ndarray | QArray) -> QArray | None:
        """Gives the model the array of a checkpoint; one that is packed comes back."""
        layout, current = self._layout, self.variable.get_value()
        order = range(current.ndim) if layout is None else (*layout.free, *layout.contracting)
        dtype = (isinstance(value, QArray) and getattr(self.entry.module, "dtype", None)) or current.dtype
        numbers = in_shape_and_dtype(self.name, value, tuple(current.shape[axis] for axis in order), dtype)
        if isinstance(numbers, QArray):
            with jax.enable_x64(True):  # as `load_checkpoint`
                return jax.tree.map(jnp.asarray, numbers)
        numbers = numbers if layout is None else layout.back(numbers, current.shape)
        sharding = named_sharding_of(current)
        self.variable.set_value(jnp.asarray(numbers) if sharding is None else jax.device_put(numbers, sharding))
        return None


def _attach_packed_params(tensor: _ModelTensor, codes_by_key: Mapping[str, QArray]) -> None:
    """Makes the layer of a tensor one that holds packed parameters."""
    layer: Any = tensor.entry.module
    path, kind = tensor.entry.paths[0], tensor.kind
    if kind is None or type(layer) not in NNX_KINDS or not set(codes_by_key) <= set(kind.parameters):
        raise ValueError(
            f"{', '.join(codes_by_key)} of {type(layer).__name__} at {path!r} is packed in the checkpoint, and that is "
            "no plain layer of Flax; `jchop convert --layout plain` unpacks it"
        )
    layer.__class__ = QUANTIZED_CLASSES[type(layer)]
    fields: dict[str, Any] = {kind.parameters[key]: q.spec for key, q in codes_by_key.items()}
    rule = Rule(path or "*", **fields)
    attach(layer, kind, rule, path, packs=True, rngs=None, codes_by_name=codes_by_key)


def _model_tensors(model: nnx.Module, names: TensorNaming | None, file_names: Any = ()) -> Iterator[_ModelTensor]:
    """Every parameter of a model, by the first of its names that is in `file_names`."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Adapted):
            raise ValueError(
                "the model has adapters: jchop.nn.merge_lora adds them to the weights, and save_lora saves them"
            )
    for entry, kind in layer_entries(model):
        for key, variable in entry.variables.items():
            if not isinstance(variable, _CHECKPOINT_VARIABLES):
                continue
            last = key if kind is None else _CHECKPOINT_NAMES.get(key, key)
            tensor_names = [f"{path}/{last}".strip("/").replace("/", ".") for path in entry.paths]
            tensor_names = [names(name) for name in tensor_names] if names is not None else tensor_names
            yield _ModelTensor(
                next((name for name in tensor_names if name in file_names), tensor_names[0]), key, variable, entry, kind
            )
