"""`load_checkpoint`, `save_checkpoint`, and the conversion of folders."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jchop._checkpoints.checkpoint import OWN_LAYOUT, PLAIN_LAYOUT, Checkpoint, open_checkpoint
from jchop._checkpoints.writer import (
    SHARD_BYTES,
    ByteProgress,
    WriteJob,
    WriteOptions,
    layout_bytes,
    no_progress,
    write_jobs,
)
from jchop._common.checks import check, check_bool
from jchop._common.files import as_path, short_text
from jchop._common.paths import check_path_pattern, matches_path
from jchop._round.arguments import has_tracer
from jchop.storage._array import PackedParam, QArray
from jchop.storage._files.safetensors import CONFIG_FILE, INDEX_FILE
from jchop.storage._save import leaves_by_name

#: Names in a warning.
_MOST_NAMES = 9
#: Changes an array of a checkpoint before it is written: by its name.
ArrayChange = Callable[[str, QArray | np.ndarray], QArray | np.ndarray]


def load_checkpoint(
    path: str | os.PathLike[str],
    layout: str = "auto",
    *,
    exact: bool = True,
    skip: str | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint of another program, quantized or not, as arrays and QArrays.

    The weights stay packed. The numbers of a QArray are those that the layout defines in float32, bit for bit but for
    the sign of zeros, and a weight has the axes (out, in) of its model in every layout.

    Args:
        path: a safetensors file, a folder with ``model.safetensors`` or ``model.safetensors.index.json`` and possibly
            ``config.json``, or a GGUF_LAYOUT file.
        layout: ``"compressed-tensors"``, ``"gptq"``, ``"gptq_v2"``, ``"awq"``, ``"fp8"`` (DeepSeek),
            ``"bitsandbytes"``, ``"torchao"``, ``"mxfp4"`` (gpt-oss), ``"gguf"``, ``"jchop"`` (of `save_safetensors`)
            or ``"plain"`` (every tensor as it is).
            Default ``"auto"``: by ``quantization_config`` in ``config.json``, else by the names of the tensors.
        exact: whether NVFP4 keeps every bit: its groups then have float32 scales, unless the reciprocal of
            ``weight_global_scale`` gives the same numbers. With False the scales stay in 8 bits, and numbers may differ
            in their last bit. Default True.
        skip: a pattern of names that are not read, such as ``"visual"``. Default: none.
        strict: whether an array that cannot be read is an error. With False it is left out, and a warning
            (RuntimeWarning) names it. Default True.

    Returns:
        JAX arrays and QArrays by name, such as ``"model.layers.0.mlp.up_proj.weight"``.

    Raises:
        TypeError: for `exact` or `strict` that is no boolean, or a `skip` that is no text.
        ValueError: for an invalid or damaged file, a layout that is not known, or a weight that no QArray holds.
        OSError: if a file cannot be read.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> q = jc.quantize(jnp.ones((32, 64)), "int4(group=32,scale=float16)")
        >>> jc.storage.save_checkpoint({"up.weight": q, "up.bias": jnp.zeros(32)}, folder, layout="gptq")
        >>> tree = jc.storage.load_checkpoint(folder)
        >>> str(tree["up.weight"].spec), tree["up.bias"].shape
        ('int4(group=32,scale=binary16)', (32,))
    """
    check_bool("exact", exact)
    check_bool("strict", strict)
    if skip is not None:
        check_path_pattern("skip", skip, "'visual'")
    arrays: dict[str, Any] = {}
    unread: dict[str, str] = {}
    with open_checkpoint(as_path("path", path), layout) as source, jax.enable_x64(True):
        names = [name for name in source.items if skip is None or not matches_path(skip, name)]
        for name in sorted(names, key=lambda name: name not in source.unread):  # errors before large arrays
            try:
                arrays[name] = jax.tree.map(jnp.asarray, source.read(name, exact))
            except ValueError as error:
                if strict:
                    others = "; strict=False reads the other arrays, and names those it leaves out"
                    raise ValueError(f"{error}{others if len(names) > 1 else ''}") from None
                unread[name] = str(error)
    if unread:
        (first, *others), why = map(short_text, unread), next(iter(unread.values()))
        more = f", and {len(others)} more: {', '.join(others[: _MOST_NAMES - 1])}" if others else ""
        warnings.warn(f"{first} is not read: {why}{more}", RuntimeWarning, 2)
    return arrays


def save_checkpoint(
    tree: Any,
    path: str | os.PathLike[str],
    layout: str,
    *,
    config: Mapping[str, Any] | None = None,
    exact: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes arrays and QArrays in the layout of another program; `load_checkpoint` reads it.

    Args:
        tree: a container of arrays and QArrays; the name of an array is its path, joined with dots. A quantized array
            must have a name that ends in ``weight`` and the axes (out, in), except in ``"jchop"``, ``"gguf"`` and
            ``"mxfp4"``.
        path: a new folder; or a file that ends in ``.safetensors`` or ``.gguf`` and is written in one step.
        layout: as in `load_checkpoint`, without ``"auto"``. ``"plain"`` writes the numbers of QArrays.
        config: fields for ``config.json`` of a folder; ``quantization_config`` is added. Default: none.
        exact: whether an array whose numbers would change in their last bit (NVFP4) is an error. Default True.
        shard_bytes: the bytes of arrays in one file of a folder. Default 256 MiB.

    Raises:
        TypeError: for a leaf that is not an array, or traced arrays.
        ValueError: for an array that the layout cannot hold; the message has specs that it can, or layouts that hold
            a parameter which `jchop.quantize_fn(...).pack` stored in another shape. For a folder that has tensors
            already, or that another call writes to.
        OSError: if a file cannot be written; then no file is left.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        >>> q = jc.quantize(jnp.linspace(-1, 1, 64).reshape(2, 32), "int8(group=32,scale=float16)")
        >>> jc.storage.save_checkpoint({"w": q}, path, layout="gguf")
        >>> bool((jc.dequantize(jc.storage.load_checkpoint(path)["w"]) == jc.dequantize(q)).all())
        True
    """
    if has_tracer(tree):
        raise TypeError("tree has traced arrays, and save_checkpoint writes values: call it outside of transformations")
    # Files of save_safetensors have what is stored.
    packed_types = QArray if layout == OWN_LAYOUT else QArray | PackedParam
    jobs = []
    for name, _, leaf in leaves_by_name(tree, packed_types):
        if not isinstance(leaf, packed_types | jax.Array | np.ndarray | np.generic):
            raise TypeError(f"leaf {name!r} is {leaf!r}, but only arrays and QArrays can be saved")
        if isinstance(leaf, PackedParam) and layout != PLAIN_LAYOUT:
            raise ValueError(
                f"{name!r} of shape {list(leaf.shape)} is stored in the shape {list(leaf.stored.shape)}, because its "
                f"groups run over several axes; the layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold it, "
                f"and layout={layout!r} does not"
            )
        codes = leaf.stored if isinstance(leaf, PackedParam) else leaf
        nbytes = layout_bytes(layout, codes.nbytes, leaf.shape, isinstance(leaf, packed_types))
        jobs.append(WriteJob(name, nbytes, partial(_as_numpy_leaves, leaf)))
    options = WriteOptions(layout, dict(config or {}), exact, shard_bytes)
    write_jobs(jobs, as_path("path", path), options)


def _as_numpy_leaves(leaf: Any) -> QArray | np.ndarray:
    return jax.tree.map(np.asarray, leaf.dequantize() if isinstance(leaf, PackedParam) else leaf)


def convert_checkpoint(
    source: Path,
    target: Path,
    layout: str,
    *,
    read_as: str = "auto",
    exact: bool = True,
    shard_bytes: int = SHARD_BYTES,
    change: ArrayChange = lambda name, value: value,
    options: str = "",
    progress: ByteProgress = no_progress,
) -> bool:
    """Writes a checkpoint in another layout, array by array; other files of a folder (tokenizer) are copied.

    A copied file has no more permissions than the file that it is a copy of.
    A killed conversion to a folder goes on after its last finished file, if it is called again with the same arguments.

    Args:
        source: as the path of `load_checkpoint`, which is only read.
        target: as the path of `save_checkpoint`.
        layout: of the target.
        read_as: the layout of the source. Default "auto".
        exact: as in `save_checkpoint`.
        shard_bytes: as in `save_checkpoint`.
        change: applied to each array.
        options: a text that differs if `change` does.
        progress: function of a name, the bytes that are done, and the total.

    Returns:
        Whether files of an unfinished run were kept.

    Raises:
        ValueError: as of `load_checkpoint` and `save_checkpoint`, and for other files that are links out of the folder.
    """
    check(source.resolve() != target.resolve(), f"{target} is the checkpoint that is read; write to another place")
    with open_checkpoint(source, read_as) as checkpoint:
        for name in checkpoint.unread:  # an error before anything is written
            checkpoint.read(name)
        jobs = []
        for name, item in checkpoint.items.items():
            nbytes = layout_bytes(layout, item.nbytes, item.shape, item.quantized)
            jobs.append(WriteJob(name, nbytes, _array_maker(checkpoint, name, exact, change)))
        run = f"{_files_state(source)} {options}"
        others = _other_files(source)
        return write_jobs(
            jobs, target, WriteOptions(layout, checkpoint.config, exact, shard_bytes, run, others, progress)
        )


def _array_maker(source: Checkpoint, name: str, exact: bool, change: ArrayChange) -> Callable[[], QArray | np.ndarray]:
    return lambda: change(name, source.read(name, exact))


def _files_state(path: Path) -> str:
    """The names, sizes and times of the files of a checkpoint."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return repr(facts)


#: Endings of files that are not copied: weights.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def _other_files(source: Path) -> list[Path]:
    """The other files of a folder, such as the tokenizer.

    Raises:
        ValueError: if one of them, or the configuration, is a link out of the folder. Links of snapshots in the cache
            of Hugging Face may lead to its blobs.
    """
    if not source.is_dir():
        return []
    home = source.resolve()
    homes = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)
    files = [path for path in sorted(source.iterdir()) if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES]
    files = [path for path in files if not path.name.startswith(".") and path.name != INDEX_FILE]
    for path in files:
        if not any(path.resolve().is_relative_to(place) for place in homes):
            raise ValueError(
                f"{path} is a link to a file outside of the folder: put the file in its place, or remove it"
            )
    return [path for path in files if path.name != CONFIG_FILE]
