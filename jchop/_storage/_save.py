"""`save` and `load`: models and pytrees with QArrays in safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, check_instance, keyword_hints, place_in_errors
from jchop._common.files import as_path, json_object, short_text
from jchop._common.on_demand import is_module_of, load_name
from jchop._round.arguments import has_tracer
from jchop._spec.spec import parse
from jchop._storage._array import QArray, named_sharding_of, refuse_qarray_dicts
from jchop._storage._codes import check_qarray_leaves, qarray_shape
from jchop._storage._files import safetensors
from jchop._storage._quantize import StoredAs
from jchop.formats import ScaledFormat

#: The metadata key that describes QArrays: JSON, which maps the name of each to its spec as text, the length of its
#: last axis and its dtype.
QARRAYS_KEY = "jchop.qarrays"
#: The metadata key that names the random keys among the tensors: JSON, which maps each name to its implementation.
RANDOM_KEYS_KEY = "jchop.keys"
#: The metadata key for packed parameters that are stored in another shape than their own: JSON, which maps the name of
#: each to its shape, and to how many axes the stored array has for one of a stack.
STORED_SHAPES_KEY = "jchop.packed"
#: The tensor of the factors by which the inputs of a packed parameter are multiplied.
_FACTORS = "input_factors"
#: The most differing leaves in an error.
_MOST_DIFFERENCES = 3


def save(path: str | os.PathLike[str], tree: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes arrays and QArrays, or a model that holds them, to a safetensors file for `load`, in one step.

    Packed arrays stay packed. The name of a tensor is its path in the tree, joined with dots (``layers.0.kernel``). The
    leaves of a QArray are plain tensors named ``NAME.qvalue``, ``NAME.scale``, ``NAME.zero_point``, ``NAME.places``. A
    scale of several parts has more tensors. A rule with a scale of the tensor adds ``NAME.tensor_scale``. Quantized
    scales add ``NAME.scale_scale`` and possibly ``NAME.scale_zero_point``. A random key (`jax.random.key`) is the
    tensor of its data. No further package is needed.

    If an array spans several processes (`jax.distributed`), all processes call this with the same path, in a folder
    that all of them see. They write one file together: each writes the parts of its own devices, the first one all
    other arrays. The file does not depend on the number of processes. If a process fails, all raise an error. Then, and
    if a process is killed, an old file stays.

    Args:
        path: path of the file. A symbolic link is replaced; its target stays.
        tree: a module of Flax NNX or Equinox, variables of Linen, or another container (dict, list, state of an
            optimizer ...). Its leaves are JAX and NumPy arrays and QArrays.
        metadata: texts for the header of the file. Default: none.

    Raises:
        TypeError: for a leaf that is not an array, a dtype that the file format lacks, and metadata that is not text.
        ValueError: for two leaves of one name, or metadata with a key of jchop.
        OSError: if the file cannot be written, by this process or another one.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.save(path, {"kernel": jc.quantize(jnp.ones((2, 8)), jc.formats.mxfp4), "bias": jnp.zeros(2)})
        >>> jc.load(path)["kernel"].bits_per_element
        5.0
    """
    if has_tracer(tree):
        raise TypeError("tree has traced arrays, and save writes values: call it outside of transformations")
    texts, path = _check_metadata(metadata), as_path("path", path)
    tensors: dict[str, Any] = {}
    descriptions: dict[str, dict[str, Any]] = {}
    leaves = leaves_by_name(split_model(tree)[0], QArray | StoredAs)
    used: set[str] = set()
    keys: dict[str, str] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for name, _, leaf in leaves:
        factors = {}
        if isinstance(leaf, StoredAs):
            factors = {} if leaf.input_factors is None else {f"{name}.{_FACTORS}": leaf.input_factors}
            shapes[name], leaf = {"shape": leaf.shape, "axes": leaf.ndim_stored}, leaf.stored
        elif _is_random_key(leaf):
            keys[name], leaf = _random_key_kind(leaf), jax.random.key_data(leaf)
        parts = {name: leaf}
        if isinstance(leaf, QArray):
            parts, descriptions[name] = qarray_tensors(name, leaf) | factors, qarray_description(leaf)
        if twice := used & {name, *parts}:
            raise ValueError(f"tree has two leaves of the name {min(twice)!r}")
        used |= {name, *parts}
        tensors |= parts
    entries = safetensors.place_tensors({name: _tensor_entry(name, array) for name, array in tensors.items()})
    texts |= {STORED_SHAPES_KEY: json.dumps(shapes)} if shapes else {}
    texts |= qarray_metadata(descriptions) | tree_metadata({name: path for name, path, _ in leaves})
    texts |= {RANDOM_KEYS_KEY: json.dumps(keys)} if keys else {}
    if any(map(safetensors.spans_processes, tensors.values())):
        safetensors.write_together(path, tensors, entries, texts)
        return

    safetensors.write_tensors(path, entries, texts, lambda name: np.asarray(tensors[name]))


@keyword_hints({"nested": "nothing: load gives the saved dicts and lists; load_checkpoint gives arrays by name"})
def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads a safetensors file of `save` or any other program.

    Args:
        path: path of the file.
        like: a model or pytree with the structure of the result. A module of Flax NNX or Equinox must be quantized by
            the same rules; under `flax.nnx.eval_shape` or `equinox.filter_eval_shape` its construction allocates no
            arrays. Any other container will do. Its arrays, QArrays and `jax.ShapeDtypeStruct` (as from
            `jax.eval_shape`) must have the shapes, dtypes and specs of the file. A leaf without a shape and a dtype, as
            0, stands for any array. An array or a `jax.ShapeDtypeStruct` with a `jax.sharding.NamedSharding` says where
            the array is placed. Every process reads the parts of its own devices, array by array. Default: none.

    Returns:
        A new model or tree like `like`, with the JAX arrays and QArrays of the file. Without `like`, the saved dicts
        and lists: tuples and other sequences become lists, other containers dicts. Containers without arrays are
        omitted. A file of another program has no record of containers and gives a dict by name.
        (`jchop.load_checkpoint` gives the names of any file.) 64-bit data keeps its dtype for every value of
        ``jax_enable_x64``.

    Raises:
        ValueError: if the file is not a valid safetensors file, or an array differs from `like`; the message names the
            array.
        OSError: if it cannot be read.

    Example:
        >>> import tempfile, pathlib, jax, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.save(path, {"layers": [{"bias": jnp.arange(3.0)}]})
        >>> jc.load(path)
        {'layers': [{'bias': Array([0., 1., 2.], dtype=float32)}]}
        >>> jc.load(path, like={"layers": [{"bias": jax.ShapeDtypeStruct((3,), "float32")}]})
        {'layers': [{'bias': Array([0., 1., 2.], dtype=float32)}]}
    """
    like_tree, rebuild = split_model(like)
    with safetensors.TensorFile(as_path("path", path)) as file, jax.enable_x64(True):
        descriptions = qarrays_in(file)
        parts = {name: qarray_tensor_names(name, fields) for name, fields in descriptions.items()}
        owners = {part for own in parts.values() for part in own}
        shapes = _stored_shapes_in(file, descriptions)
        factor_names = {name: f"{name}.{_FACTORS}" for name in shapes if f"{name}.{_FACTORS}" in file.entries}
        owners |= {*factor_names.values()}
        keys = _random_keys_in(file, owners)
        # Without a record of shapes the names are the names of the parts of parameters.
        packed_types = QArray | StoredAs if shapes else QArray
        like_leaves = {} if like is None else {name: leaf for name, _, leaf in leaves_by_name(like_tree, packed_types)}
        for name in (name for name, leaf in like_leaves.items() if _is_random_key(leaf) and name in file.entries):
            if name not in keys:  # a file without kinds
                keys[name] = _random_key_kind(like_leaves[name])
                with place_in_errors(f"{path} and like= differ: {name!r}", (ValueError, TypeError)):
                    _random_key_type(file, name, keys[name])
        recorded = like is None and TREE_KEY in file.metadata
        paths = tree_paths_in(file, {*descriptions, *file.entries} - owners) if recorded else {}

        def leaves_of(read: Callable[[str], Any]) -> dict[str, Any]:
            owned = {part for own in parts.values() for part in own}
            leaves: dict[str, Any] = {name: read(name) for name in file.entries if name not in owned}
            leaves |= {name: join_qarray(list(map(read, own)), descriptions[name]) for name, own in parts.items()}
            leaves |= {name: jax.random.wrap_key_data(leaves[name], impl=kind) for name, kind in keys.items()}
            factors = {name: leaves.pop(tensor) for name, tensor in factor_names.items()}
            packed = {name: StoredAs(leaves[name], *fields, factors.get(name)) for name, fields in shapes.items()}
            return leaves | packed

        if like is not None:
            types = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in file.entries.items()}
            _check_like_tree(path, like_leaves, jax.eval_shape(lambda types: leaves_of(types.get), types))
        tensor_shardings = _tensor_shardings(like_leaves)

        def read(name: str) -> jax.Array:
            sharding = tensor_shardings.get(name)
            return (
                jnp.asarray(file.read(name)) if sharding is None else safetensors.read_to_devices(file, name, sharding)
            )

        arrays = leaves_of(read)
        for name in keys:
            if (sharding := named_sharding_of(like_leaves.get(name))) is not None:
                arrays[name] = jax.device_put(arrays[name], sharding)
    if like is None:
        return nest_leaves([(paths[name], arrays[name]) for name in arrays]) if recorded else arrays
    structure = jax.tree.structure(like_tree, is_leaf=lambda node: isinstance(node, packed_types))
    return rebuild(structure.unflatten([arrays[name] for name in like_leaves]))


def split_model(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The arrays of a tree or a model, and a function that gives one like it of other arrays."""
    if is_module_of("flax.nnx", tree) or is_module_of("equinox", tree):
        return load_name("jchop.nn._arrays", "split_arrays")(tree)
    return tree, lambda arrays: arrays


def _stored_shapes_in(
    file: safetensors.TensorFile, descriptions: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shapes of parameters that are stored in another one, and how many axes that has, by name; without a stack.

    Raises:
        ValueError: if the metadata are damaged, or a shape is none of the stored array.
    """
    shapes = {}
    for name, fields in _jchop_metadata(file, STORED_SHAPES_KEY).items():
        with place_in_errors(f"{file.path}: bad metadata {STORED_SHAPES_KEY!r} for {short_text(name)}"):
            are_fields = isinstance(fields, dict) and set(fields) == {"shape", "axes"}
            if not are_fields or not safetensors.are_counts(fields["shape"]):
                raise ValueError(f"{short_text(fields)} must be an object of shape, a list of integers >= 0, and axes")
            check(name in descriptions, "no QArray has this name")
            stored = qarray_shape_in(file.entries, name, descriptions[name])
            shape, axes = tuple(fields["shape"]), fields["axes"]
            stack = len(stored) - axes if safetensors.are_counts([axes]) and axes else -1
            fits = 0 <= stack <= len(shape) and stored[:stack] == shape[:stack]
            fits = fits and math.prod(stored) == math.prod(shape)
            check(fits, f"{short_text(fields)} is no shape of a QArray of shape {list(stored)}")
            factors = file.entries.get(f"{name}.{_FACTORS}")
            fit = factors is None or (
                len(factors.shape) == len(shape) and all(n in (1, m) for n, m in zip(factors.shape, shape, strict=True))
            )
            check(fit, f"its {_FACTORS} do not have {len(shape)} axes of 1 or of its lengths")
            shapes[name] = (shape[stack:], axes)
    return shapes


def _random_keys_in(file: safetensors.TensorFile, owners: set[str]) -> dict[str, str]:
    """The implementations of the random keys of a file by name.

    Raises:
        ValueError: if the metadata are damaged, or a tensor is not the data of such a key.
    """
    keys = _jchop_metadata(file, RANDOM_KEYS_KEY)
    for name, kind in keys.items():
        place = f"{file.path}: bad metadata {RANDOM_KEYS_KEY!r} for {short_text(name)}"
        with place_in_errors(place, (ValueError, TypeError)):
            check(name in file.entries and name not in owners, "no tensor has this name")
            _random_key_type(file, name, kind)
    return keys


def _random_key_kind(key: Any) -> str:
    """The implementation of a random key, which may be abstract."""
    kinds: list[str] = []
    jax.eval_shape(lambda key: kinds.append(str(jax.random.key_impl(key))), key)
    return kinds[0]


def _random_key_type(file: safetensors.TensorFile, name: str, kind: str) -> Any:
    """The type of a random key."""
    data = jax.ShapeDtypeStruct(file.entries[name].shape, file.entries[name].dtype)
    return jax.eval_shape(lambda words: jax.random.wrap_key_data(words, impl=kind), data)


def _tensor_shardings(like_leaves: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """The shardings of tensors, by the arrays of `like` that have one."""
    tensors: dict[str, Any] = {}
    for name, leaf in like_leaves.items():
        if isinstance(leaf, StoredAs):
            tensors |= {f"{name}.{_FACTORS}": leaf.input_factors}
            leaf = leaf.stored
        if not _is_random_key(leaf):
            tensors |= qarray_tensors(name, leaf) if isinstance(leaf, QArray) else {name: leaf}
    return {name: where for name, leaf in tensors.items() if (where := named_sharding_of(leaf)) is not None}


def _check_like_tree(path: object, like_leaves: Mapping[str, Any], file_leaves: Mapping[str, Any]) -> None:
    """Checks that a file has the arrays of `like`, and no others."""
    if set(like_leaves) != set(file_leaves):
        lacking, more = sorted(set(like_leaves) - set(file_leaves)), sorted(set(file_leaves) - set(like_leaves))
        raise ValueError(f"{path} and like= differ: not in the file {lacking}, only in the file {more}")
    pairs = {name: (_leaf_facts(file_leaves[name]), _leaf_facts(leaf)) for name, leaf in like_leaves.items()}
    other = [f"{name!r} is {got}, and {want} in like" for name, (got, want) in pairs.items() if want not in (None, got)]
    if other:
        more = f"; and {len(other) - _MOST_DIFFERENCES} more" if len(other) > _MOST_DIFFERENCES else ""
        text = f"{path} and like= differ: {'; '.join(other[:_MOST_DIFFERENCES])}{more}"
        raise ValueError(f"{text}. Pass a tree or model quantized by the same rules, which may be abstract")


def _leaf_facts(leaf: Any) -> str | None:
    """The dtype and shape of a leaf; for a QArray also its spec and its parts. None if it has no dtype or shape."""
    packed = isinstance(leaf, QArray | StoredAs)
    arrays = jax.tree.leaves(leaf) if packed else [leaf]
    if not all(hasattr(array, "dtype") and hasattr(array, "shape") for array in arrays):
        return None
    parts = " and ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    return f"{leaf.spec} of {leaf.dtype}{list(leaf.shape)} ({parts})" if packed else parts


# -- QArrays as tensors ------------------------------------------------------------------------------------------------


def qarray_tensors(name: str, q: QArray) -> dict[str, Any]:
    """The leaves of a QArray by tensor name."""
    scales = q.scale if isinstance(q.scale, tuple) else (q.scale,)
    arrays = [array for array in (q.qvalue, *scales, q.zero_point, q.places) if array is not None]
    return dict(zip(qarray_tensor_names(name, qarray_description(q)), arrays, strict=True))


def qarray_description(q: QArray) -> dict[str, Any]:
    """The static data of a QArray, for JSON.

    Raises:
        ValueError: for a spec that its text does not represent.
    """
    text = str(q.spec)
    try:
        reads_back = parse(text) == q.spec
    except ValueError:
        reads_back = False
    check(reads_back, f"spec={text!r} cannot be stored: parsing this text does not return the spec")
    return {"spec": text, "size": q.length, "dtype": np.dtype(q.dtype).name}


def qarray_tensor_names(name: str, fields: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that a QArray consists of."""
    fmt = parse(fields["spec"]).format
    parts = ["qvalue"]
    if isinstance(fmt, ScaledFormat):
        parts += [*fmt.scale_parts, *(["zero_point"] if fmt.zero_point else []), *(["places"] if fmt.sparse else [])]
    return [f"{name}.{part}" for part in parts]


def qarray_shape_in(
    entries: Mapping[str, safetensors.TensorEntry], name: str, fields: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape of a QArray of a file."""
    first, last = (entries[qarray_tensor_names(name, fields)[place]] for place in (0, -1))
    fmt = parse(fields["spec"]).scaled
    return qarray_shape(first, fields["size"], last if fmt is not None and fmt.sparse else None)


def qarray_metadata(descriptions: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The metadata of a file with the described QArrays."""
    return {QARRAYS_KEY: json.dumps(descriptions)} if descriptions else {}


def qarrays_in(file: safetensors.TensorFile, unread: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The QArrays in the metadata of a file: the spec, the length of the last axis and the dtype by name.

    Args:
        file: of the metadata.
        unread: takes the errors of single QArrays, which are left out. Default: the first is raised.

    Raises:
        ValueError: if the metadata are damaged, or the tensors of a QArray do not match its spec.
    """
    descriptions = _jchop_metadata(file, QARRAYS_KEY)
    for name, fields in list(descriptions.items()):
        try:
            _check_qarray_tensors(file, name, fields)
        except (ValueError, TypeError, OverflowError) as error:
            why = f"bad metadata {QARRAYS_KEY!r} for {short_text(name)}: {error}"
            if unread is None:
                raise ValueError(f"{file.path}: {why}") from None
            unread[name] = why
            del descriptions[name]
    return descriptions


def _jchop_metadata(file: safetensors.TensorFile, key: str) -> dict[str, Any]:
    """A JSON object in the metadata of a file; empty if it is missing."""
    with place_in_errors(f"{file.path}: bad metadata {key!r}"):
        return json_object(file.metadata.get(key, "{}"))


def _check_qarray_tensors(file: safetensors.TensorFile, name: str, fields: Any) -> None:
    """Checks that the tensors of a file form the described QArray."""
    if not isinstance(fields, dict) or set(fields) != {"spec", "size", "dtype"}:
        raise ValueError(f"{short_text(fields)} must be an object of spec, size and dtype")
    spec, size, dtype = fields["spec"], fields["size"], fields["dtype"]
    if not isinstance(spec, str):
        raise ValueError(f"spec={short_text(spec)} must be text")
    if not (size is None or (type(size) is int and size >= 0)):
        raise ValueError(f"size={short_text(size)} must be an integer >= 0, or null")
    if not isinstance(dtype, str) or dtype not in CARRIERS:
        raise ValueError(f"dtype={short_text(dtype)} must be one of {', '.join(CARRIERS)}")
    parts = qarray_tensor_names(name, fields)
    if missing := [part for part in parts if part not in file.entries]:
        raise ValueError(f"the file lacks tensors of its QArrays: {', '.join(missing)}")
    check(name not in file.entries, "a tensor has this name, too")
    entries = [file.entries[part] for part in parts]
    check_qarray_leaves(join_qarray([jax.ShapeDtypeStruct(entry.shape, entry.dtype) for entry in entries], fields))


def join_qarray(arrays: list[Any], fields: Mapping[str, Any]) -> QArray:
    """The QArray of its leaves."""
    spec = parse(fields["spec"])
    fmt, (qvalue, *rest) = spec.format, arrays
    scale = zero_point = places = None
    if isinstance(fmt, ScaledFormat):
        places = rest.pop() if fmt.sparse else None
        zero_point = rest.pop() if fmt.zero_point else None
        scale = tuple(rest) if len(rest) > 1 else rest[0]
    return QArray(qvalue, scale, zero_point, spec, fields["size"], jnp.dtype(fields["dtype"]), places)


# -- trees -------------------------------------------------------------------------------------------------------------


def _is_random_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaves_by_name(tree: Any, kinds: Any = QArray) -> list[tuple[str, tuple[Any, ...], Any]]:
    """The name, path and value of each leaf; an object of these classes is a leaf."""
    refuse_qarray_dicts("tree", tree)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))[0]
    if tree is None or (leaves and not leaves[0][0]):
        check(not hasattr(tree, "shape"), "a single array has no name; pass a dict: {'name': array}")
        raise TypeError(
            f"a {type(tree).__name__} is no container of arrays, and no module of Flax NNX or Equinox; of a "
            "module of Linen, pass the variables"
        )
    return [(jax.tree_util.keystr(path, simple=True, separator="."), path, leaf) for path, leaf in leaves]


def _tensor_entry(name: str, leaf: Any) -> safetensors.TensorEntry:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"leaf {name!r} is {leaf!r}, but only arrays and QArrays can be saved")
    entry = safetensors.TensorEntry(np.dtype(leaf.dtype), tuple(leaf.shape))
    try:
        entry.dtype_name  # noqa: B018
    except TypeError as error:
        raise TypeError(f"leaf {name!r}: {error}") from None
    return entry


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Metadata of the caller, which must be texts under other keys than jchop's."""
    check_instance("metadata", metadata, Mapping | None, "a mapping from text to text")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata has the entry {key!r}: {text!r}; both must be text")
        if key in (RANDOM_KEYS_KEY, QARRAYS_KEY, STORED_SHAPES_KEY, TREE_KEY):
            raise ValueError(f"metadata has an entry {key!r}, which is jchop's own")
    return dict(metadata or {})


# -- the record of dicts and lists -------------------------------------------------------------------------------------


#: The metadata key of the record: JSON, which maps the name of each array to the steps to it in the tree. A string is a
#: key of a dict, an integer the index in a list, a list of one integer an integer key.
TREE_KEY = "jchop.tree"
#: The most steps to an array.
_MOST_TREE_STEPS = 200

TreeStep = str | int | list[int]


def tree_metadata(paths: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """The metadata that record a tree: empty if it does not consist of dicts and lists of arrays.

    Args:
        paths: JAX's path of each array, by name.
    """
    steps = {name: [_tree_step(key) for key in path] for name, path in paths.items()}
    try:
        nest_leaves([(path, None) for path in steps.values()])
    except ValueError:  # a list with entries without arrays, or a key that is neither a string nor an integer
        return {}
    return {TREE_KEY: json.dumps(steps, separators=(",", ":"))} if steps else {}


def tree_paths_in(file: safetensors.TensorFile, names: Iterable[str]) -> dict[str, list[TreeStep]]:
    """The recorded steps to each array of a file.

    Raises:
        ValueError: if the record is damaged or does not match `names`.
    """
    names = set(names)
    with place_in_errors(f"{file.path}: bad metadata {TREE_KEY!r}"):
        record = json_object(file.metadata.get(TREE_KEY, "{}"))
        if set(record) != names:
            other = short_text(sorted(set(record) ^ names))
            raise ValueError(f"it is of other arrays: {other}; jchop.load_checkpoint(path) reads arrays by name")
        for name, path in record.items():
            if not isinstance(path, list) or ".".join(map(_tree_step_text, path)) != name:
                raise ValueError(f"{short_text(path)} does not lead to {short_text(name)}")
        nest_leaves([(path, None) for path in record.values()])
    return record


def nest_leaves(leaves: Sequence[tuple[Sequence[TreeStep], Any]], depth: int = 0) -> Any:
    """The dicts and lists of leaves, from the steps to each leaf.

    Raises:
        ValueError: for contradictory steps, a missing entry of a list, or too many steps.
    """
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    check(depth != _MOST_TREE_STEPS, f"more than {_MOST_TREE_STEPS} steps")
    groups: dict[tuple[type, Any], list[tuple[Sequence[TreeStep], Any]]] = {}
    for path, leaf in leaves:
        check(len(path) != depth, f"{short_text(path)} leads to an array and to a container")
        _tree_step_text(step := path[depth])
        groups.setdefault((type(step), step[0] if isinstance(step, list) else step), []).append((path, leaf))
    children = {key: nest_leaves(group, depth + 1) for key, group in groups.items()}
    if all(kind is not int for kind, _ in children):
        return {key: value for (_, key), value in children.items()}
    if set(children) != {(int, index) for index in range(len(children))}:
        raise ValueError(f"a list has the entries {short_text([key for _, key in children])}")
    return [children[int, index] for index in range(len(children))]


def _tree_step(key: Any) -> Any:
    """A step of a JAX path in the form of the record; None if it cannot be recorded."""
    match key:
        case SequenceKey(idx=int(index)) | FlattenedIndexKey(key=int(index)):
            return index
        case DictKey(key=str(text)) | GetAttrKey(name=str(text)):
            return text
        case DictKey(key=int(number)) if not isinstance(number, bool):
            return [number]
    return None


def _tree_step_text(step: Any) -> str:
    """The text of a step in a name.

    Raises:
        ValueError: if it is not a step.
    """
    number = step[0] if isinstance(step, list) and len(step) == 1 else step
    if type(number) is int:
        return str(number)
    if not isinstance(step, str):
        raise ValueError(f"{short_text(step)} is not a step to an array")
    return step
