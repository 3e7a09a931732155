"""Models of NNX in checkpoints of other programs: names, the orientation of weights, packed layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jchop._checkpoints.checkpoint import (
    Checkpoint,
    TensorNaming,
    check_tensor_names,
    in_shape_and_dtype,
    on_host,
    to_devices,
)
from jchop._common.checks import check
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.weight_layout import StoredAs
from jchop._spec.spec import Spec
from jchop._storage import QArray
from jchop._storage._array import named_sharding_of
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, axis_groupings, with_groupings
from jchop.nn._nnx.layer_kinds import NNX_KINDS, NnxKind, attach, param_layout
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, layer_entries
from jchop.nn._nnx.lora import Adapted
from jchop.nn._nnx.nodes import ModuleEntry, QuantizedParam
from jchop.nn._nnx.rounding_modules import RoundedPromotion, rounding_module_in

T = TypeVar("T", bound=nnx.Module)

#: The parameters of Flax's layers that have another name in checkpoints. Those of other modules keep theirs.
_CHECKPOINT_NAMES: Mapping[str, str] = {
    "kernel": "weight", "embedding": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var",
}  # fmt: skip
#: The layers of `flax.nnx.MultiHeadAttention` under the names of Hugging Face.
_ATTENTION_NAMES: Mapping[str, str] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj", "query_ln": "q_norm", "key_ln": "k_norm",
}  # fmt: skip
_CHECKPOINT_VARIABLES = (nnx.Param, QuantizedParam, nnx.BatchStat)


def model_arrays(model: nnx.Module, names: TensorNaming | None) -> dict[str, Any]:
    """The arrays of a model by their names in a checkpoint, as that has them."""
    arrays: dict[str, Any] = {}
    for tensor in _model_tensors(model, names):
        check(tensor.name not in arrays, f"names gives {tensor.name!r} to two parameters")
        arrays[tensor.name] = tensor.value()
    return arrays


def model_activations(model: nnx.Module, names: TensorNaming | None) -> dict[str, Spec]:
    """The specs to which packed layers round their inputs, by the names of their weights in a checkpoint."""
    found: dict[str, Spec] = {}
    for tensor in _model_tensors(model, names):
        product = tensor.kind.product if tensor.kind is not None and tensor.kind.layout is not None else None
        module = None if product is None else rounding_module_in(tensor.entry.module, product[0], product[1])
        if module is not None and module.how.left is not None and tensor.key == "kernel":
            found[tensor.name] = module.how.left
    return found


def fill_model(source: Checkpoint, like: T, names: TensorNaming | None, skip: str | None, exact: bool) -> T:
    """A model like one, with the weights of a checkpoint."""
    result: Any = nnx.merge(*nnx.split(like), copy=True)
    tensors = list(_model_tensors(result, names, source.items))
    check_tensor_names(source, [tensor.name for tensor in tensors], skip)
    for _, group in groupby(tensors, key=lambda tensor: id(tensor.entry)):
        parts = list(group)
        with on_host():
            codes_by_key = {part.key: q for part in parts if (q := part.put(source.read(part.name, exact))) is not None}
            if codes_by_key:
                _attach_packed_params(parts[0], codes_by_key)
        for part in parts:
            variable = getattr(part.entry.module, part.key) if part.key in codes_by_key else part.variable
            variable.set_value(to_devices(variable.get_value(), None))
    for keys, value in nnx.to_flat_state(nnx.state(result)):
        if isinstance(jax.tree.leaves(value)[0], jax.ShapeDtypeStruct):
            raise ValueError(f"like has no value for {'/'.join(map(str, keys))!r}, and a checkpoint has none")
    return result


class _FileForm(NamedTuple):
    """The form of a parameter in a checkpoint: a matrix (out, in) of all axes that a product keeps and sums over.

    Args:
        layout: of the parameter's axes.
        shape: of the parameter.
        file_shape: of the matrix, or the number of a bias.
        is_laid: whether the array has the axes of the layout already.
    """

    layout: OperandLayout
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]
    is_laid: bool


class _ModelTensor(NamedTuple):
    """A parameter of a model, and its place in a checkpoint."""

    name: str
    key: str
    variable: Any
    entry: ModuleEntry
    kind: NnxKind | None

    @property
    def _form(self) -> _FileForm | None:
        """The form of the parameter of a layer in a checkpoint; None for one of a module of your own."""
        layer, value = self.entry.module, self.variable.get_value()
        if self.kind is None or self.key not in self.kind.parameters:
            return None
        promote = rounding_module_in(layer, "promote_dtype", RoundedPromotion)
        packed = None if promote is None else dict(promote.packed_params).get(self.key)
        layout, stack = param_layout(layer, self.kind, self.key)
        shape = tuple(value.shape)
        if packed is not None:
            shape, stack = packed.shape, value.ndim - len(packed.codes_shape)
        is_weight = self.kind.parameters[self.key] == "weight"
        if stack or (is_weight and (self.kind.operation == "conv" or _keeps_batch(layer))):
            raise ValueError(
                f"{type(layer).__name__} at {self.entry.paths[0]!r}: {self.key} of shape {list(shape)} has no form in "
                "checkpoints, which have matrices; jchop.save keeps it"
            )
        is_laid = packed is not None and packed.layout is not None
        if not is_weight or len(shape) < 2:
            return _FileForm(layout, shape, (math.prod(shape),), is_laid)
        *free, inside = layout.shape(shape)
        return _FileForm(layout, shape, (math.prod(free), inside), is_laid)

    def value(self) -> Any:
        """The array as a checkpoint has it."""
        value, form = self.variable.get_value(), self._form
        if isinstance(value, StoredAs) and value.input_factors is not None:
            raise ValueError(
                f"{self.entry.paths[0]!r} has factors by which its inputs are multiplied when the model runs, which "
                "have no form in checkpoints; jchop.save keeps them"
            )
        if form is None:
            return value.stored if isinstance(value, StoredAs) else value
        value = value.stored if isinstance(value, StoredAs) else value
        try:
            laid = value if form.is_laid else value.transpose(*form.layout.free, *form.layout.contracting)
            try:
                return laid.reshape(form.file_shape)
            except ValueError:
                return _with_scales_of_rows(laid, len(form.layout.free)).reshape(form.file_shape)
        except ValueError as error:
            raise ValueError(f"{self.key} at {self.entry.paths[0]!r}: {error}") from None

    def put(self, value: np.ndarray | QArray) -> QArray | None:
        """Gives the model the array of a checkpoint, on the host if it has no sharding; a packed one comes back."""
        form, current = self._form, self.variable.get_value()
        shape = current.shape if form is None else form.file_shape
        dtype = (isinstance(value, QArray) and getattr(self.entry.module, "dtype", None)) or current.dtype
        numbers = in_shape_and_dtype(self.name, value, shape, dtype)
        if isinstance(numbers, QArray):
            return numbers if form is None else numbers.reshape(form.layout.shape(form.shape))
        numbers = numbers if form is None else form.layout.back(numbers, form.shape)
        sharding = named_sharding_of(current)
        self.variable.set_value(numbers if sharding is None else jax.device_put(numbers, sharding))
        return None


def _with_scales_of_rows(q: QArray, free: int) -> QArray:
    """A packed kernel with a scale for each index of its first axes, which may be the same for several."""
    fmt = q.spec.scaled
    check(fmt is not None and not isinstance(q.scale, tuple), f"{q.spec} has groups that cross axes")
    assert fmt is not None
    kinds = axis_groupings(fmt, q.ndim)
    rows = [axis < free and kind == WHOLE_AXIS for axis, kind in enumerate(kinds)]

    def spread(part: Any) -> Any:
        lengths = zip(rows, q.shape, part.shape, strict=True)
        return jnp.broadcast_to(part, [n if row else own for row, n, own in lengths])

    kinds = [OWN_SCALE if row else kind for row, kind in zip(rows, kinds, strict=True)]
    spec = replace(q.spec, format=with_groupings(fmt, kinds))
    zero = None if q.zero_point is None else spread(q.zero_point)
    return replace(q, spec=spec, scale=spread(q.scale), zero_point=zero)


def _keeps_batch(layer: Any) -> bool:
    """Whether a product of a layer runs over axes of both operands that it keeps."""
    if isinstance(layer, nnx.Einsum):
        terms, _, result = layer.einsum_str.partition("->")
        left, _, right = terms.partition(",")
        return bool((set(left) & set(right) & set(result)) - set(". "))
    return isinstance(layer, nnx.LinearGeneral) and bool(layer.batch_axis)


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
    entries = list(layer_entries(model))
    attention = {
        path for entry, _ in entries if isinstance(entry.module, nnx.MultiHeadAttention) for path in entry.paths
    }

    def file_path(path: str) -> str:
        above, _, last = path.rpartition("/")
        last = _ATTENTION_NAMES.get(last, last) if above in attention else last
        return f"{above}/{last}" if above else last

    for entry, kind in entries:
        for key, variable in entry.variables.items():
            if not isinstance(variable, _CHECKPOINT_VARIABLES):
                continue
            last = key if kind is None else _CHECKPOINT_NAMES.get(key, key)
            tensor_names = [f"{file_path(path)}/{last}".strip("/").replace("/", ".") for path in entry.paths]
            tensor_names = [names(name) for name in tensor_names] if names is not None else tensor_names
            yield _ModelTensor(
                next((name for name in tensor_names if name in file_names), tensor_names[0]), key, variable, entry, kind
            )
