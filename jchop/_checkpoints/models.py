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

from jchop._checkpoints import checkpoint
from jchop._common.checks import check
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.weight_layout import StoredAs
from jchop._spec.spec import Spec
from jchop._storage import QArray
from jchop._storage._array import named_sharding_of
from jchop._storage._axis_groupings import OWN_SCALE, WHOLE_AXIS, axis_groupings, with_groupings
from jchop.formats._catalogue import float8_e4m3fn
from jchop.nn._nnx.layer_kinds import NNX_KINDS, NnxKind, attach, codes_in_own_shape, param_layout
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, layer_entries
from jchop.nn._nnx.lora import Adapted
from jchop.nn._nnx.nodes import ModuleEntry, QuantizedParam, packed_nnx_variable
from jchop.nn._nnx.rounding_modules import PackedForm, RoundedPromotion, rounding_module_in

T = TypeVar("T", bound=nnx.Module)

#: The parameters of Flax's layers that have another name in checkpoints. Other modules' parameters keep their names.
_CHECKPOINT_NAMES: Mapping[str, str] = {
    "kernel": "weight", "embedding": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var",
}  # fmt: skip
#: The layers of `flax.nnx.MultiHeadAttention` under the names of Hugging Face.
_ATTENTION_NAMES: Mapping[str, str] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj", "query_ln": "q_norm", "key_ln": "k_norm",
}  # fmt: skip
_CHECKPOINT_VARIABLES = (nnx.Param, QuantizedParam, nnx.BatchStat)


def model_arrays(model: nnx.Module, names: checkpoint.TensorNaming | None) -> dict[str, Any]:
    """The arrays of a model by their names in a checkpoint, as that has them."""
    arrays: dict[str, Any] = {}
    for tensor in _model_tensors(model, names):
        for name, value in tensor.arrays():
            check(name not in arrays, f"names gives {name!r} to two parameters")
            arrays[name] = value
    return arrays


def model_activations(model: nnx.Module, names: checkpoint.TensorNaming | None) -> dict[str, Spec]:
    """The specs to which packed layers round their inputs, by the names of their weights in a checkpoint."""
    found: dict[str, Spec] = {}
    for tensor in _model_tensors(model, names):
        product = tensor.kind.product if tensor.kind is not None and tensor.kind.layout is not None else None
        module = None if product is None else rounding_module_in(tensor.entry.module, product[0], product[1])
        if module is not None and module.how.left is not None and tensor.key == "kernel":
            found |= dict.fromkeys((name for name, _ in tensor.places()), module.how.left)
    return found


def has_float8_caches(model: nnx.Module) -> bool:
    """Whether all layers of attention have a cache, whose keys and values are rounded to e4m3 without a scale."""
    layers = [entry.module for entry, kind in layer_entries(model) if kind is not None and kind.caches]
    specs = {getattr(layer, "cache", None) for layer in layers}
    return bool(specs) and all(spec is not None and spec.format == float8_e4m3fn for spec in specs)


def fill_model(
    source: checkpoint.Checkpoint, like: T, names: checkpoint.TensorNaming | None, skip: str | None, exact: bool
) -> T:
    """A model like one, with the weights of a checkpoint."""
    result: Any = nnx.merge(*nnx.split(like), copy=True)
    tensors = list(_model_tensors(result, names, source.items))
    checkpoint.check_tensor_names(source, [name for tensor in tensors for name, _ in tensor.places()], skip)
    for _, group in groupby(tensors, key=lambda tensor: id(tensor.entry)):
        parts = list(group)
        with checkpoint.on_host():
            codes_by_key = {
                part.key: q
                for part in parts
                if (q := part.put([source.read(name, exact) for name, _ in part.places()], source.dtype)) is not None
            }
            if codes_by_key:
                _attach_packed_params(parts[0], codes_by_key)
        for part in parts:
            variable = getattr(part.entry.module, part.key, part.variable)
            variable.set_value(checkpoint.to_devices(variable.get_value(), None))
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
        stack: how many axes in front come of a stack of layers, each of which has tensors of its own.
        packed: the form of the codes, if the array is packed.
    """

    layout: OperandLayout
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]
    stack: int
    packed: PackedForm | None


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
            stack = value.ndim - len(packed.codes_shape)
            shape = (*shape[:stack], *packed.shape)
        is_weight = self.kind.parameters[self.key] == "weight"
        if is_weight and (self.kind.operation == "conv" or _keeps_batch(layer)):
            raise ValueError(
                f"{type(layer).__name__} at {self.entry.paths[0]!r}: {self.key} of shape {list(shape)} has no form in "
                "checkpoints, which have matrices; jchop.save keeps it"
            )
        shape = shape[stack:]
        if not is_weight or len(shape) < 2:
            return _FileForm(layout, shape, (math.prod(shape),), stack, packed)
        *free, inside = layout.shape(shape)
        return _FileForm(layout, shape, (math.prod(free), inside), stack, packed)

    def places(self) -> list[tuple[str, tuple[int, ...]]]:
        """The names of its tensors, each with its indexes in a stack; ``()`` without a stack."""
        form, shape = self._form, self.variable.get_value().shape
        stack = self.name.count("*") if form is None else form.stack
        where = f"{self.key} of shape {list(shape)} at {self.entry.paths[0]!r}"
        remedy = f"names= must give a name with {stack} '*' for its indexes, as 'layers.*.up.weight', not {self.name!r}"
        check(self.name.count("*") == stack < 1 + len(shape), f"{where} is a stack of {stack} axes: {remedy}")
        return [(checkpoint.name_in_stack(self.name, index), index) for index in np.ndindex(*shape[:stack])]

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """The names of its tensors, and the arrays as a checkpoint has them."""
        value, form = self.variable.get_value(), self._form
        for name, index in self.places():
            yield name, self._in_file(jax.tree.map(lambda leaf, at=index: leaf[at], value) if index else value, form)

    def _in_file(self, value: Any, form: _FileForm | None) -> Any:
        """The value of a parameter in the axes and shape of the file."""
        if isinstance(value, StoredAs) and value.input_factors is not None:
            raise ValueError(
                f"{self.entry.paths[0]!r} has factors by which its inputs are multiplied when the model runs, which "
                "have no form in checkpoints; jchop.save keeps them"
            )
        if form is None:
            return value.stored if isinstance(value, StoredAs) else value
        value = value.stored if isinstance(value, StoredAs) else value
        try:
            is_laid = form.packed is not None and form.packed.layout is not None
            laid = value if is_laid else value.transpose(*form.layout.free, *form.layout.contracting)
            try:
                return laid.reshape(form.file_shape)
            except ValueError:
                return _with_scales_of_rows(laid, len(form.layout.free)).reshape(form.file_shape)
        except ValueError as error:
            raise ValueError(f"{self.key} at {self.entry.paths[0]!r}: {error}") from None

    def put(self, values: list[Any], cast: Any) -> QArray | None:
        """Gives the model the arrays of a checkpoint, on the host if it has no sharding.

        Packed ones come back if the layer must become one that holds them.
        """
        form, current, layer = self._form, self.variable.get_value(), self.entry.module
        stack = tuple(current.shape[: self.name.count("*")])
        shape = tuple(current.shape[len(stack) :]) if form is None else form.file_shape
        cast = cast if jnp.issubdtype(current.dtype, jnp.floating) else None
        dtype = cast or (isinstance(values[0], QArray) and getattr(layer, "dtype", None)) or current.dtype
        pairs = zip((name for name, _ in self.places()), values, strict=True)
        parts: list[Any] = [checkpoint.in_shape_and_dtype(name, value, shape, dtype) for name, value in pairs]
        if form is not None:
            own, back = form.layout.shape(form.shape), form.layout.back
            parts = [part.reshape(own) if isinstance(part, QArray) else back(part, form.shape) for part in parts]
        value = checkpoint.stacked(self.name, parts, stack) if stack else parts[0]
        if isinstance(current, QArray | StoredAs):
            check(
                isinstance(value, QArray) and isinstance(current, QArray),
                f"{self.name!r} is not packed in the checkpoint, and packed in like: pass a like that is not quantized",
            )
            wanted: Any = current.spec, None
            if form is not None and form.packed is not None:
                wanted = form.packed.spec, form.packed.layout
                value, layout = codes_in_own_shape(value, form.layout, form.shape, len(stack))
            else:  # a parameter of a program is packed in the order of its axes
                value, layout = value if form is None else _in_order_of_parameter(value, form, len(stack)), None
            check(
                (value.spec, layout) == wanted,
                f"{self.name!r} is {value.spec} in the checkpoint, and {wanted[0]} in like: quantize "
                "like by the specs of the file, or not at all",
            )
            value = jax.tree.map(lambda new, old: checkpoint.to_devices(new, named_sharding_of(old)), value, current)
        elif not isinstance(value, QArray):
            sharding = named_sharding_of(current)
            value = value if sharding is None else jax.device_put(value, sharding)
        elif self.kind is None and "/" not in self.key:
            setattr(layer, self.key, packed_nnx_variable(self.variable, value))
            return None
        else:
            return value
        self.variable.set_value(value)
        return None


def _in_order_of_parameter(q: QArray, form: _FileForm, stack: int) -> QArray:
    """A packed array in the layout of its product, with the axes of the parameter."""
    order = (*form.layout.free, *form.layout.contracting)
    parts = q.reshape(*q.shape[:stack], *(form.shape[axis] for axis in order))
    return parts.transpose(*range(stack), *(stack + int(axis) for axis in np.argsort(order)))


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


def _model_tensors(
    model: nnx.Module, names: checkpoint.TensorNaming | None, file_names: Any = ()
) -> Iterator[_ModelTensor]:
    """Every parameter of a model, by the first of its names that is in `file_names`, or by its form as a stack."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Adapted):
            raise ValueError(
                "the model has adapters: jchop.nn.merge_lora adds them to the weights, and save_lora saves them"
            )
    entries = list(layer_entries(model))
    attentions = [entry for entry, _ in entries if isinstance(entry.module, nnx.MultiHeadAttention)]
    attention = {path for entry in attentions for path in entry.paths}

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
            found = next((name for name in tensor_names if name in file_names), tensor_names[0])
            yield _ModelTensor(checkpoint.name_of_stack(found, file_names), key, variable, entry, kind)
