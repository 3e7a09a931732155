"""Pytrees that hold QArrays, in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._files import write_atomically
from jchop.formats import ScaledFormat
from jchop.spec import parse
from jchop.storage._array import QArray
from jchop.storage._file import Entry, TensorFile, TensorWriter, lay_out

#: Under this name the metadata of a file say which tensors are the leaves of QArrays: JSON, for the name of each its
#: spec as text, the length of its last axis and its dtype.
QARRAYS = "jchop.qarrays"


def save_safetensors(path: str | os.PathLike[str], tree: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a pytree of arrays and QArrays to a safetensors file, whole or not at all.

    A tensor has the name of its path in the tree, joined with dots (``layers.0.kernel``). The leaves of a QArray are
    plain tensors named ``NAME.qvalue``, ``NAME.scale``, ``NAME.zero_point``, and where a scale has several parts
    ``NAME.tensor_scale`` (rule "two_level") or ``NAME.scale_scale`` and maybe ``NAME.scale_zero_point`` (scales that
    are quantized again). The file appears in one step, in the place of an old one. No package is needed beyond jchop's
    own.

    Args:
        path: of the file.
        tree: a container (dict, list, NNX state ...) of JAX and NumPy arrays and QArrays.
        metadata: texts to store beside. Default: none.

    Raises:
        TypeError: for a leaf that is no array, or of a dtype that a file cannot have.
        ValueError: for two leaves of one name, or metadata named as jchop's own.
        OSError: where the file cannot be written.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.save_safetensors(path, {"kernel": jc.quantize(jnp.ones((2, 8)), jc.mxfp4), "bias": jnp.zeros(2)})
        >>> jc.load_safetensors(path)["kernel"].bits_per_element
        5.0
    """
    if metadata and QARRAYS in metadata:
        raise ValueError(f"metadata has an entry {QARRAYS!r}, which is jchop's own")
    tensors: dict[str, Any] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, leaf in _named_leaves(tree):
        parts = {name: leaf}
        if isinstance(leaf, QArray):
            parts, described[name] = parts_of(name, leaf), description(leaf)
        for part, array in parts.items():
            if part in tensors:
                raise ValueError(f"tree has two leaves of the name {part!r}")
            tensors[part] = array
    entries = lay_out({name: _entry(name, array) for name, array in tensors.items()})
    texts = dict(metadata or {}) | qarray_metadata(described)

    def write(file: Any) -> None:
        writer = TensorWriter(file, entries, texts)
        for name in entries:
            writer.write(name, np.asarray(tensors[name]))
        writer.finish()

    write_atomically(Path(path), write)


def load_safetensors(path: str | os.PathLike[str], *, like: Any = None) -> Any:
    """Reads what `save_safetensors` wrote, or any other safetensors file.

    Args:
        path: of the file.
        like: a pytree of the structure that is wanted; its leaves (and QArrays) give names alone. Default: none.

    Returns:
        JAX arrays and QArrays of them: in a dict by name, or in the structure of `like`. 64-bit data stays so, whatever
        the state of ``jax_enable_x64``.

    Raises:
        ValueError: for what is no such file, or one whose names are not those of `like`.
        OSError: where it cannot be read.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> jc.save_safetensors(path, {"layers": [{"bias": jnp.arange(3.0)}]})
        >>> jc.load_safetensors(path)
        {'layers.0.bias': Array([0., 1., 2.], dtype=float32)}
        >>> jc.load_safetensors(path, like={"layers": [{"bias": 0}]})
        {'layers': [{'bias': Array([0., 1., 2.], dtype=float32)}]}
    """
    with TensorFile(path) as file, jax.enable_x64(True):
        described = described_in(file)
        owners = {part: name for name, fields in described.items() for part in part_names(name, fields)}
        missing = sorted(set(owners) - set(file.entries))
        if missing:
            raise ValueError(f"{file.path} lacks tensors of its QArrays: {', '.join(missing)}")
        found: dict[str, Any] = {name: jnp.asarray(file.read(name)) for name in file.entries if name not in owners}
        for name, fields in described.items():
            arrays = [jnp.asarray(file.read(part)) for part in part_names(name, fields)]
            found[name] = _joined(arrays, fields)
    if like is None:
        return found
    names = [name for name, _ in _named_leaves(like)]
    if set(names) != set(found):
        lacking, more = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        raise ValueError(f"{path} and like= differ: not in the file {lacking}, in the file alone {more}")
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_qarray), [found[name] for name in names])


# -- QArrays as tensors ------------------------------------------------------------------------------------------------


def parts_of(name: str, q: QArray) -> dict[str, Any]:
    """The leaves of a QArray by the names of their tensors."""
    scales = q.scale if isinstance(q.scale, tuple) else (q.scale,)
    arrays = [array for array in (q.qvalue, *scales, q.zero_point) if array is not None]
    return dict(zip(part_names(name, description(q)), arrays, strict=True))


def description(q: QArray) -> dict[str, Any]:
    """What is static of a QArray, as JSON has it.

    Raises:
        ValueError: for a spec whose text does not give it back.
    """
    text = str(q.spec)
    try:
        reads_back = parse(text) == q.spec
    except ValueError:
        reads_back = False
    if not reads_back:
        raise ValueError(f"spec={text!r} is a text that does not give it back, so that it cannot be stored")
    return {"spec": text, "size": q.size, "dtype": np.dtype(q.dtype).name}


def part_names(name: str, fields: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that a QArray consists of."""
    fmt = parse(fields["spec"]).format
    parts = ["qvalue"]
    if isinstance(fmt, ScaledFormat):
        parts += [*fmt.scale_parts, *(["zero_point"] if fmt.zero_point else [])]
    return [f"{name}.{part}" for part in parts]


def qarray_metadata(described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The metadata of a file that holds the QArrays described."""
    return {QARRAYS: json.dumps(described)} if described else {}


def described_in(file: TensorFile) -> dict[str, dict[str, Any]]:
    """What a file says of the QArrays in it.

    Raises:
        ValueError: where that cannot be read.
    """
    try:
        return json.loads(file.metadata.get(QARRAYS, "{}"))
    except ValueError as error:
        raise ValueError(f"{file.path}: bad metadata {QARRAYS!r} ({error})") from None


def _joined(arrays: list[Any], fields: Mapping[str, Any]) -> QArray:
    spec = parse(fields["spec"])
    fmt, (qvalue, *rest) = spec.format, arrays
    scale = zero_point = None
    if isinstance(fmt, ScaledFormat):
        zero_point = rest.pop() if fmt.zero_point else None
        scale = tuple(rest) if len(rest) > 1 else rest[0]
    return QArray(qvalue, scale, zero_point, spec, fields["size"], jnp.dtype(fields["dtype"]))


# -- trees -------------------------------------------------------------------------------------------------------------


def _is_qarray(node: Any) -> bool:
    return isinstance(node, QArray)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_qarray)[0]
    if leaves and not leaves[0][0]:
        raise ValueError("a single array has no name; put it into a dict: {'name': array}")
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _entry(name: str, leaf: Any) -> Entry:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"leaf {name!r} is {leaf!r}, and only arrays and QArrays are saved")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"leaf {name!r} is a typed key; save jax.random.key_data of it")
    entry = Entry(np.dtype(leaf.dtype), tuple(leaf.shape))
    try:
        entry.dtype_name  # noqa: B018
    except TypeError as error:
        raise TypeError(f"leaf {name!r}: {error}") from None
    return entry
