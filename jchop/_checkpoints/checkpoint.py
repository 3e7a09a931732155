"""`Checkpoint`: a checkpoint of any layout, open for reading weight by weight; `load_checkpoint`."""

from __future__ import annotations

import json
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jchop._checkpoints.gguf import GGUF_BLOCKS, READABLE_TYPES, GGUFFile, GGUFKeys, is_gguf
from jchop._checkpoints.row import FLOAT8, SCALE_FORMATS, TensorSource
from jchop._checkpoints.table import LAYOUTS, UnreadWeight, code_scale_pairs, detect_layout
from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_bool, check_choice, place_in_errors
from jchop._common.files import as_path, short_text
from jchop._common.on_demand import is_module_of, load_name
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._kernels.primitive import host_device
from jchop._round.round_to_format import round_to_format
from jchop._storage import _save
from jchop._storage._array import QArray, named_sharding_of
from jchop._storage._files.safetensors import ShardFiles, TensorEntry
from jchop._storage._quantize import StoredAs

#: The layouts that have no row in the table: jchop's own, GGUF, and tensors that are not quantized.
OWN_LAYOUT, GGUF_LAYOUT, PLAIN_LAYOUT = "jchop", "gguf", "plain"
LAYOUT_NAMES = (*LAYOUTS, GGUF_LAYOUT, OWN_LAYOUT, PLAIN_LAYOUT)


#: Gives the name of a tensor in a file for that by its path in a model.
TensorNaming = Callable[[str], str]


class CheckpointItem(NamedTuple):
    """An array of a checkpoint: its format in the layout's words, shape, bytes in the file; whether it is quantized."""

    format: str
    shape: tuple[int, ...]
    nbytes: int
    quantized: bool


#: The ends of names of tensors with scales, and their dtypes. Others are exponents, or codes of scales.
_HOLDS_SCALES, _SCALE_DTYPES = re.compile(r"scale(s|_inv|_2)?$|absmax$"), (*SCALE_FORMATS, FLOAT8)
#: The errors that numbers and arrays raise, too, if they are too large.
_READ_ERRORS = (ValueError, ArithmeticError, MemoryError)


class Checkpoint(ABC):
    """A checkpoint open for reading.

    Attributes:
        path: of the file or folder.
        layout: its name.
        items: the arrays by name.
        unread: why some of them cannot be read, as far as it is known before they are read.
        config: the fields of ``config.json``; empty if there is none.
        dtype: of floats that are not quantized, and of QArrays; None for the dtypes of the file.
    """

    path: Path
    layout: str
    items: dict[str, CheckpointItem]
    unread: dict[str, str]
    config: Mapping[str, Any]
    dtype: np.dtype | None = None

    def read(self, name: str, exact: bool = True) -> QArray | np.ndarray:
        """An array, with NumPy leaves; ValueError for one that cannot be read."""
        if name in self.unread:
            raise ValueError(f"{self.path}: {self.unread[name]}")
        with place_in_errors(f"{self.path}: {short_text(name)}", _READ_ERRORS):
            value = self._read(name, exact)
            if self.dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
                return value
            return replace(value, dtype=self.dtype) if isinstance(value, QArray) else _in_dtype(value, self.dtype)

    def gguf_keys(self) -> GGUFKeys | None:
        """The keys of a GGUF file; None if it is none."""
        return None

    def scales(self, name: str) -> dict[str, np.ndarray]:
        """The scales of a weight as the file has them, by the ends of their names; empty for other arrays."""
        return {}

    @abstractmethod
    def _read(self, name: str, exact: bool) -> QArray | np.ndarray:
        """An array that is not `unread`."""


@partial(jax.tree_util.register_dataclass, data_fields=["tensors"], meta_fields=["layout", "config_text", "texts"])
@dataclass(frozen=True, eq=False, repr=False)
class EncodedCheckpoint:
    """The tensors of a checkpoint in memory, as `jchop.encode_checkpoint` makes them: a pytree of arrays.

    Args:
        tensors: arrays by name.
        layout: of the tensors, or "auto".
        config_text: of ``config.json``.
        texts: the metadata of a file with the tensors, in JSON.
    """

    tensors: Mapping[str, Any]
    layout: str = "auto"
    config_text: str = "{}"
    texts: str = "{}"

    @property
    def config(self) -> dict[str, Any]:
        """The fields of ``config.json``, of which ``quantization_config`` says how weights are stored."""
        return json.loads(self.config_text)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a safetensors file with the tensors."""
        return json.loads(self.texts)

    def __repr__(self) -> str:
        return f"EncodedCheckpoint(layout={self.layout!r}, {len(self.tensors)} tensors)"


class _TensorsInMemory:
    """Tensors in memory, with the facts that are read of files."""

    path = Path("the arrays in memory")

    def __init__(self, checkpoint: EncodedCheckpoint) -> None:
        self.tensors, self.config, self.metadata = checkpoint.tensors, checkpoint.config, checkpoint.metadata
        self.files = (self,)
        self.entries = {
            name: TensorEntry(np.dtype(array.dtype), tuple(array.shape)) for name, array in self.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A tensor in the memory of the host."""
        return np.asarray(self.tensors[name])


def _in_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats rounded once to another dtype; ValueError if a finite one becomes infinite."""
    if values.dtype == np.float64 and dtype.itemsize == 2:  # whose casts go through float32
        values = np.asarray(round_to_format(values, dtype))
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    lost = np.isinf(result) & np.isfinite(values)
    check(not lost.any(), f"{values[lost][:1]} is beyond the largest number of dtype={dtype}")
    return result


@contextmanager
def open_checkpoint(path: Path | EncodedCheckpoint, layout: str) -> Iterator[Checkpoint]:
    """A checkpoint, open until the end of the context.

    Args:
        path: a file, a folder, or tensors in memory.
        layout: one of `LAYOUT_NAMES`, or "auto".

    Raises:
        OSError: if it cannot be read.
        ValueError: for invalid files, or a layout that is not known or not theirs.
    """
    check_choice("layout", layout, ("auto", *LAYOUT_NAMES))
    if isinstance(path, EncodedCheckpoint):
        source = _TensorsInMemory(path)
        with place_in_errors(str(source.path), _READ_ERRORS):
            checkpoint = _SafetensorsCheckpoint(source.path, source, path.layout if layout == "auto" else layout)
        yield checkpoint
        return
    gguf = not path.is_dir() and is_gguf(path)
    if gguf != (layout == GGUF_LAYOUT) and not (gguf and layout == "auto"):
        raise ValueError(f"{path} is {'a' if gguf else 'no'} GGUF file, and layout={layout!r}")
    if gguf:
        with GGUFFile(path) as gguf_file:
            yield _GGUFCheckpoint(path, gguf_file)
        return
    with ShardFiles(path) as source:
        with place_in_errors(str(path), _READ_ERRORS):
            checkpoint = _SafetensorsCheckpoint(path, source, layout)
        yield checkpoint


class _GGUFCheckpoint(Checkpoint):
    """A checkpoint in one GGUF file."""

    def __init__(self, path: Path, file: GGUFFile) -> None:
        self.path, self._file, self.layout = path, file, GGUF_LAYOUT
        self.config, self.items, self.unread = {}, {}, {}
        for name, blob in self._file.tensors.items():
            block = GGUF_BLOCKS.get(blob.kind)
            kind = f"type {blob.kind}" if block is None else block.name
            self.items[name] = CheckpointItem(kind, blob.shape, blob.nbytes, block is None or block.dtype is None)
            if blob.kind not in READABLE_TYPES:
                read = ", ".join(GGUF_BLOCKS[kind].name for kind in READABLE_TYPES)
                self.unread[name] = f"tensor {short_text(name)} is {kind}, which jchop does not read; it reads {read}"

    def gguf_keys(self) -> GGUFKeys | None:
        return self._file.read_keys()

    def _read(self, name: str, exact: bool) -> QArray | np.ndarray:
        blob, data = self._file.tensors[name], self._file.read(name)
        block = GGUF_BLOCKS[blob.kind]
        if block.dtype is not None:
            return data.view(block.dtype).reshape(blob.shape)
        assert block.read is not None
        if len(blob.shape) < 2 or not data.size:
            raise ValueError(f"a tensor of {block.name} has shape {list(blob.shape)}, not two axes or more")
        rows = data.reshape(-1, blob.shape[-1] // block.count, block.size)
        return block.read(rows).reshape(blob.shape)  # such as (experts, out, in)


class _SafetensorsCheckpoint(Checkpoint):
    """A checkpoint in safetensors files, with their config.json."""

    def __init__(self, path: Path, source: TensorSource, layout: str) -> None:
        self.path, self._source, self.config = path, source, source.config
        own = any(_save.QARRAYS_KEY in file.metadata for file in source.files)
        self.layout = layout if layout != "auto" else OWN_LAYOUT if own else detect_layout(source) or PLAIN_LAYOUT
        self._weights, unread = LAYOUTS[self.layout].find(source) if self.layout in LAYOUTS else ({}, {})
        if layout == "auto" and self.layout == PLAIN_LAYOUT:
            unread = code_scale_pairs(source.entries, PLAIN_LAYOUT)
        self._descriptions: dict[str, Any] = {}
        bad: dict[str, str] = {}
        for file in source.files if self.layout == OWN_LAYOUT else ():
            self._descriptions |= _save.qarrays_in(file, bad)
        for name, why in bad.items():
            unread[name] = UnreadWeight(why, [one for one in source.entries if f"{one}.".startswith(f"{name}.")])
        entries, used = source.entries, set[str]()
        self.items, self.unread = {}, {name: weight.why for name, weight in unread.items()}

        def add(name: str, kind: str, shape: tuple[int, ...], parts: Collection[str]) -> None:
            used.update(parts)
            self.items[name] = CheckpointItem(kind, shape, sum(entries[part].nbytes for part in parts), quantized=True)

        for name, lost in unread.items():
            add(name, "unread", (), lost.tensors)
        for name, weight in self._weights.items():
            add(name, weight.row.name, weight.shape, weight.names.values())
        for name, fields in self._descriptions.items():
            shape = _save.qarray_shape_in(entries, name, fields)
            add(name, fields["spec"], shape, _save.qarray_tensor_names(name, fields))
        for name, entry in entries.items():
            if name not in used:
                check(name not in self.items, f"a tensor has the name {short_text(name)} of a quantized weight, too")
                self.items[name] = CheckpointItem(entry.dtype.name, entry.shape, entry.nbytes, quantized=False)

    def scales(self, name: str) -> dict[str, np.ndarray]:
        weight = self._weights.get(name)
        return {
            part: self._source.read(tensor)
            for part, tensor in ({} if weight is None else weight.names).items()
            if _HOLDS_SCALES.search(part) and self._source.entries[tensor].dtype in _SCALE_DTYPES
        }

    def _read(self, name: str, exact: bool) -> QArray | np.ndarray:
        if name in self._descriptions:
            fields = self._descriptions[name]
            arrays = map(self._source.read, _save.qarray_tensor_names(name, fields))
            return _save.join_qarray(list(arrays), fields)
        weight = self._weights.get(name)
        if weight is None:
            return self._source.read(name)
        parts = {part: self._source.read(tensor) for part, tensor in weight.names.items()}
        return weight.row.read(parts, weight.facts.new_child({"exact": exact}))


#: Names in a warning.
_MOST_NAMES = 9


def load_checkpoint(
    path: str | os.PathLike[str] | Mapping[str, Any] | EncodedCheckpoint,
    layout: str = "auto",
    *,
    like: Any = None,
    names: TensorNaming | None = None,
    exact: bool = True,
    skip: str | None = None,
    strict: bool = True,
    dtype: Any = None,
) -> Any:
    """Reads a checkpoint of another program, quantized or not, as arrays and QArrays by name, or into a model.

    The weights stay packed. The layout defines the numbers of a QArray in float32, which are kept bit for bit but for
    the sign of zeros. A weight has the axes (out, in) of its model in every layout.

    In a model of Flax NNX, a packed weight gets the layer of `jchop.nn` that `jchop.nn.quantize` makes with
    ``mode="ptq"``. Its rule has the spec of the file. So `jchop.nn.add_lora`, `jchop.save` and
    `jchop.nn.report` take it as any other. Names and orientations are as `jchop.save_checkpoint` writes them.

    Args:
        path: a safetensors file, a GGUF file, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json`` and possibly ``config.json``. Also the result of
            `jchop.encode_checkpoint`, or arrays by name, to be read in the memory of the host.
        layout: ``"compressed-tensors"``, ``"gptq"``, ``"gptq_v2"``, ``"awq"``, ``"fp8"`` (DeepSeek),
            ``"bitsandbytes"``, ``"llm_int8"``, ``"torchao"``, ``"modelopt"``, ``"mlx"``, ``"hqq"``, ``"mxfp4"``
            (gpt-oss), ``"gguf"``, ``"jchop"`` (of `jchop.save`) or ``"plain"`` (every tensor as it is). Default
            ``"auto"``: by ``quantization_config`` in ``config.json``, else by the names of the tensors.
        like: a model of Flax NNX with the structure, shapes, dtypes and shardings, not quantized; under
            `flax.nnx.eval_shape` its construction allocates no arrays. Or a module of Equinox or a container of arrays,
            which may be abstract, with the axes of the file. Default: none, for arrays by name.
        names: a function that gives a tensor's name in the file for its path in `like`. Default: the same.
        exact: whether NVFP4 keeps every bit: its groups then have float32 scales, unless the reciprocal of
            ``weight_global_scale`` gives the same numbers. With False the scales stay in 8 bits, and numbers may differ
            in their last bit. Default True.
        skip: a pattern of names that are not read, as ``"visual"``; beside `like`, of names that it does not need.
            Default: none.
        strict: whether an array that cannot be read is an error. With False it is left out, and a warning
            (RuntimeWarning) names it. Default True.
        dtype: of floats that are not quantized, also in `like`, and of QArrays: float16, bfloat16, float32 or float64.
            The floats are rounded to nearest even. Default: the dtype in the file, or in `like`.

    Returns:
        JAX arrays and QArrays by name, such as ``"model.layers.0.mlp.up_proj.weight"``; or a new model or tree like
        `like`.

    Raises:
        TypeError: for `exact` or `strict` that is no boolean, or a `skip` that is no text.
        ValueError: for an invalid or damaged file, a layout that is not known, or a weight that no QArray holds.
            Beside `like`, for an array that the file lacks or has in another shape. Also for a tensor without a place
            in `like`, or numbers that its dtype does not have.
        OSError: if a file cannot be read.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> q = jc.quantize(jnp.ones((32, 64)), "int4(group=32,scale=float16)")
        >>> jc.save_checkpoint(folder, {"up.weight": q, "up.bias": jnp.zeros(32)}, layout="gptq")
        >>> tree = jc.load_checkpoint(folder)
        >>> str(tree["up.weight"].spec), tree["up.bias"].shape
        ('int4(group=32,scale=binary16)', (32,))
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Dict(up=nnx.Linear(64, 32, rngs=nnx.Rngs(0))))
        >>> loaded = jc.load_checkpoint(folder, like=model)
        >>> loaded["up"](jnp.ones((1, 64))).shape, loaded["up"].kernel[...].nbytes
        ((1, 32), 1152)
    """
    if not isinstance(layout, str):
        raise TypeError(f"layout={type(layout).__name__} must be text; what is to be filled is like=, by keyword")
    check_bool("exact", exact)
    check_bool("strict", strict)
    if skip is not None:
        check_path_pattern("skip", skip, "'visual'")
    if isinstance(path, Mapping):
        wrong = [name for name, array in path.items() if not isinstance(array, jax.Array | np.ndarray)]
        check(not wrong, f"path has {short_text(wrong[:1])}, which is no array of JAX or NumPy")
        path = EncodedCheckpoint(path)
    home = path if isinstance(path, EncodedCheckpoint) else as_path("path", path)
    if dtype is not None:
        dtype = jnp.dtype(check_choice("dtype", jnp.dtype(dtype).name, tuple(CARRIERS)))
    if like is not None:
        check(strict, "strict=False has no effect beside like=, whose arrays are needed")
        with open_checkpoint(home, layout) as source:
            source.dtype = dtype
            of_nnx = is_module_of("flax.nnx", like)
            fill = load_name("jchop._checkpoints.models", "fill_model") if of_nnx else _fill_tree
            return fill(source, like, names, skip, exact)
    check(names is None, "names= has no effect without like=")
    arrays: dict[str, Any] = {}
    unread: dict[str, str] = {}
    with open_checkpoint(home, layout) as source, jax.enable_x64(True):
        source.dtype = dtype
        wanted = [name for name in source.items if skip is None or not matches_path(skip, name)]
        for name in sorted(wanted, key=lambda name: name not in source.unread):  # errors before large arrays
            try:
                arrays[name] = jax.tree.map(jnp.asarray, source.read(name, exact))
            except ValueError as error:
                if strict:
                    others = "; strict=False reads the other arrays, and names those it leaves out"
                    raise ValueError(f"{error}{others if len(wanted) > 1 else ''}") from None
                unread[name] = str(error)
    if unread:
        (first, *others), why = map(short_text, unread), next(iter(unread.values()))
        more = f", and {len(others)} more: {', '.join(others[: _MOST_NAMES - 1])}" if others else ""
        warnings.warn(f"{first} is not read: {why}{more}", RuntimeWarning, 2)
    return arrays


def _fill_tree(source: Checkpoint, like: Any, names: TensorNaming | None, skip: str | None, exact: bool) -> Any:
    """A tree like one, with the arrays of a checkpoint."""
    like_tree, rebuild = _save.split_model(like)
    leaves = _save.leaves_by_name(like_tree, QArray | StoredAs)
    leaf_names = [name if names is None else names(name) for name, _, _ in leaves]
    leaf_names = [name_of_stack(name, source.items) for name in leaf_names]
    stacks = [tuple(leaf.shape[: name.count("*")]) for name, (_, _, leaf) in zip(leaf_names, leaves, strict=True)]
    parts = [
        [name_in_stack(name, index) for index in np.ndindex(*stack)]
        for name, stack in zip(leaf_names, stacks, strict=True)
    ]
    check_tensor_names(source, [one for several in parts for one in several], skip)
    arrays = []
    for name, stack, several, (_, _, leaf) in zip(leaf_names, stacks, parts, leaves, strict=True):
        cast = source.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else None
        with on_host():
            values = [
                in_shape_and_dtype(one, source.read(one, exact), leaf.shape[len(stack) :], cast or leaf.dtype)
                for one in several
            ]
            value = stacked(name, values, stack) if stack else values[0]
        arrays.append(to_devices(value, named_sharding_of(leaf)))
    structure = jax.tree.structure(like_tree, is_leaf=lambda node: isinstance(node, QArray | StoredAs))
    return rebuild(structure.unflatten(arrays))


def name_of_stack(name: str, file_names: Collection[str]) -> str:
    """A name, with `*` where the names of a stack in a file have an index, if that is one place."""
    steps = name.split(".")
    if "*" in name or name in file_names:
        return name
    places = [places for count in (1, 2) for places in combinations(range(len(steps)), count)]
    forms = [".".join(f"*.{step}" if at in chosen else step for at, step in enumerate(steps)) for chosen in places]
    fits = [form for form in forms if form.replace("*", "0") in file_names]
    return fits[0] if len(fits) == 1 else name


def name_in_stack(name: str, index: Sequence[int]) -> str:
    """The name of a tensor of a stack."""
    for number in index:
        name = name.replace("*", str(number), 1)
    return name


def stacked(name: str, parts: Sequence[Any], stack: tuple[int, ...]) -> Any:
    """Arrays, or codes and scales, as one array with the axes of a stack in front, in the memory of the host."""
    kinds = {str(part.spec) if isinstance(part, QArray) else f"not quantized ({part.dtype})" for part in parts}
    check(len(kinds) == 1, f"the layers of {name!r} differ, and one array has one form: {', '.join(sorted(kinds))}")
    return jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*stack, *leaves[0].shape), *parts)


@contextmanager
def on_host() -> Iterator[None]:
    """A context in which arrays are laid out in the memory of the host, so that devices receive their shards alone."""
    with jax.enable_x64(True), jax.default_device(host_device()):
        yield


def to_devices(value: Any, sharding: NamedSharding | None) -> Any:
    """An array of the host, or codes and scales, on the devices of a sharding; without one, on the default device."""
    with jax.enable_x64(True):
        if sharding is not None:
            return jax.device_put(value, value.shardings(sharding) if isinstance(value, QArray) else sharding)
        return jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf)) if named_sharding_of(leaf) is None else leaf, value
        )


def in_shape_and_dtype(
    name: str, value: QArray | np.ndarray, shape: tuple[int, ...], dtype: Any
) -> QArray | np.ndarray:
    """An array of a checkpoint in the dtype that a model has for it.

    Raises:
        ValueError: for another shape, or numbers that the dtype does not have.
    """
    if value.shape != tuple(shape):
        raise ValueError(f"{name!r} has shape {list(value.shape)}, and the model has {list(shape)} for it")
    if isinstance(value, QArray):
        return replace(value, dtype=np.dtype(dtype))
    with np.errstate(over="ignore"):
        numbers = value.astype(dtype)
    same = bool(((numbers.astype(value.dtype) == value) | (value != value)).all())
    wrong = f"{name!r} in {value.dtype} has numbers that {dtype} of the model has not"
    check(same, f"{wrong}: make the model with param_dtype={value.dtype}")
    return numbers


def check_tensor_names(source: Checkpoint, model_names: list[str], skip: str | None) -> None:
    """Refuses arrays of a model without a tensor, and tensors without a place in it."""
    if missing := [name for name in model_names if name not in source.items]:
        near = nearest_paths_hint(missing[:1], [name for name in source.items if name not in model_names])
        raise ValueError(f"the checkpoint has no {missing[0]!r}, and {len(missing)} are missing in all{near}")
    extra = [name for name in source.items if name not in model_names]
    extra = [name for name in extra if skip is None or not matches_path(skip, name)]
    if extra:
        raise ValueError(f"the model has no parameter for {extra[0]!r} and {len(extra) - 1} more; skip= is for those")
