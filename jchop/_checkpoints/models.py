"""Models of NNX in checkpoints of other programs: names, the orientation of weights, packed layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jchop._checkpoints.checkpoint import Checkpoint, open_checkpoint
from jchop._checkpoints.writer import SHARD_BYTES
from jchop._common.checks import check, check_bool, check_instance
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._quantized.products.rule import Rule
from jchop._quantized.program.weight_layout import StoredAs
from jchop.nn._nnx.layer_kinds import NNX_KINDS, NnxKind, attach, param_layout
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, layer_entries
from jchop.nn._nnx.lora import Adapted
from jchop.nn._nnx.nodes import ModuleEntry, QuantizedParam
from jchop.storage import QArray
from jchop.storage import save_checkpoint as save_tree
from jchop.storage._array import named_sharding_of

T = TypeVar("T", bound=nnx.Module)
TensorNaming = Callable[[str], str]

#: The parameters of Flax's layers that have another name in checkpoints. Those of other modules keep theirs.
_CHECKPOINT_NAMES: Mapping[str, str] = {
    "kernel": "weight", "embedding": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var",
}  # fmt: skip
_CHECKPOINT_VARIABLES = (nnx.Param, QuantizedParam, nnx.BatchStat)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nnx.Module,
    layout: str,
    *,
    names: TensorNaming | None = None,
    config: Mapping[str, Any] | None = None,
    exact: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the parameters of a model of Flax NNX, packed or not, as `jchop.storage.save_checkpoint` does.

    A parameter is named by the path of its layer: that of ``model/layers/0/up`` is ``model.layers.0.up.weight``. The
    kernel of a `flax.nnx.Linear`, (in, out), is written as (out, in). Embeddings and scales of norms are ``weight``,
    too. A layer at several paths is written once, by its first.

    Args:
        path: a new folder, or a file, as of `jchop.storage.save_checkpoint`.
        model: of Linear and Embed layers, norms, and parameters of your own modules, which are written as they are.
        layout: as of `jchop.storage.save_checkpoint`, for example ``"plain"`` or ``"compressed-tensors"``.
        names: a function that gives a tensor's name in the file for that by its path. Default: the same.
        config: fields for ``config.json``. Default: none.
        exact: as of `jchop.storage.save_checkpoint`.
        shard_bytes: the bytes of arrays in one file of a folder. Default 256 MiB.

    Raises:
        TypeError: for another model.
        ValueError: for a layer that has no form in checkpoints, adapters, or an array that the layout cannot hold.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
        >>> packed = jc.nn.quantize(model, jc.Rule("*", weight="int4(group=32,scale=float16)"), "ptq")
        >>> jc.nn.save_checkpoint(folder, packed, "gptq")
        >>> {name: value.shape for name, value in jc.storage.load_checkpoint(folder).items()}
        {'layers.0.weight': (32, 64), 'layers.0.bias': (32,)}
    """
    tree: dict[str, Any] = {}
    for tensor in _model_tensors(model, names):
        check(tensor.name not in tree, f"names gives {tensor.name!r} to two parameters")
        tree[tensor.name] = tensor.value()
    save_tree(tree, path, layout, config=config, exact=exact, shard_bytes=shard_bytes)


def load_checkpoint(
    path: str | os.PathLike[str],
    like: T,
    layout: str = "auto",
    *,
    names: TensorNaming | None = None,
    ignore: str | None = None,
    exact: bool = True,
) -> T:
    """A model of Flax NNX with the weights of a checkpoint of another program, quantized or not.

    A weight that is packed in the file stays packed: its layer becomes the one of `jchop.nn` that `jchop.nn.quantize`
    makes with ``mode="ptq"``, under a rule with the spec of the file. So `jchop.nn.add_lora`, `jchop.nn.save` and
    `jchop.nn.report` take it as any other. Names and orientations are those of `save_checkpoint`.

    Args:
        path: a folder or a file, as of `jchop.storage.load_checkpoint`.
        like: a model with the structure, shapes, dtypes and shardings, not quantized; under `flax.nnx.eval_shape` its
            construction allocates no arrays.
        layout: as of `jchop.storage.load_checkpoint`.
        names: as of `save_checkpoint`.
        ignore: a pattern of names in the file that the model does not need, such as ``"rotary_emb"``, which may be of
            arrays that cannot be read. Default: none.
        exact: as of `jchop.storage.load_checkpoint`.

    Returns:
        A new model.

    Raises:
        TypeError: for another model.
        ValueError: for a damaged file, a parameter without a tensor or with one of another shape, a tensor without a
            parameter, or numbers that the dtype of a parameter does not have.
        OSError: if a file cannot be read.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> def model():
        ...     return nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.relu)
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> packed = jc.nn.quantize(model(), jc.Rule("*", weight="int4(group=32,scale=float16)"), "ptq")
        >>> jc.nn.save_checkpoint(folder, packed, "compressed-tensors")
        >>> loaded = jc.nn.load_checkpoint(folder, nnx.eval_shape(model))
        >>> bool((loaded(jnp.ones((1, 64))) == packed(jnp.ones((1, 64)))).all()), loaded.layers[0].kernel[...].nbytes
        (True, 288)
    """
    check_bool("exact", exact)
    if ignore is not None:
        check_path_pattern("ignore", ignore, "'rotary_emb'")
    check_instance("like", like, nnx.Module, "a module of Flax NNX")
    result: Any = nnx.merge(*nnx.split(like), copy=True)
    with open_checkpoint(Path(path), layout) as source:
        tensors = list(_model_tensors(result, names, source.items))
        _check_tensor_names(source, tensors, ignore)
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
                "of Linear and Embed; jchop.nn.save keeps it"
            )
        return layout

    def value(self) -> Any:
        """The array as a checkpoint has it."""
        value, layout = self.variable.get_value(), self._layout
        if isinstance(value, StoredAs) and value.input_factors is not None:
            raise ValueError(
                f"{self.entry.paths[0]!r} has factors by which its inputs are multiplied when the model runs, which "
                "have no form in checkpoints; jchop.nn.save keeps them"
            )
        if isinstance(value, StoredAs):
            return value.stored
        return value if layout is None else value.transpose(*layout.free, *layout.contracting)

    def put(self, value: np.ndarray | QArray) -> QArray | None:
        """Gives the model the array of a checkpoint; one that is packed comes back."""
        layout, current = self._layout, self.variable.get_value()
        order = range(current.ndim) if layout is None else (*layout.free, *layout.contracting)
        shape = tuple(current.shape[axis] for axis in order)
        if value.shape != shape:
            raise ValueError(
                f"{self.name!r} has shape {list(value.shape)}, and {self.entry.paths[0]!r} of the model {list(shape)}"
            )
        if isinstance(value, QArray):
            dtype = getattr(self.entry.module, "dtype", None) or current.dtype
            with jax.enable_x64(True):  # as `jchop.storage.load_checkpoint`
                return replace(jax.tree.map(jnp.asarray, value), dtype=np.dtype(dtype))
        with np.errstate(over="ignore"):
            numbers = value.astype(current.dtype)
        if not bool(((numbers.astype(value.dtype) == value) | (value != value)).all()):
            raise ValueError(
                f"{self.name!r} in {value.dtype} has numbers that {current.dtype} of the model has not: make the model "
                f"with param_dtype={value.dtype}"
            )
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
    check_instance("model", model, nnx.Module, "a module of Flax NNX")
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


def _check_tensor_names(source: Checkpoint, tensors: list[_ModelTensor], ignore: str | None) -> None:
    """Refuse parameters without a tensor, and tensors without a parameter."""
    model_names = [tensor.name for tensor in tensors]
    if missing := [name for name in model_names if name not in source.items]:
        near = nearest_paths_hint(missing[:1], [name for name in source.items if name not in model_names])
        raise ValueError(f"the checkpoint has no {missing[0]!r}, and {len(missing)} are missing in all{near}")
    extra = [name for name in source.items if name not in model_names]
    extra = [name for name in extra if ignore is None or not matches_path(ignore, name)]
    if extra:
        raise ValueError(f"the model has no parameter for {extra[0]!r} and {len(extra) - 1} more; ignore= is for those")
