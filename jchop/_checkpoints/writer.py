"""Writes checkpoints: folders, whose killed run goes on after the last file, and files, each in one step.

Also `save_checkpoint`, and the conversion of folders.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jchop._checkpoints import table
from jchop._checkpoints.checkpoint import (
    GGUF_LAYOUT,
    LAYOUT_NAMES,
    OWN_LAYOUT,
    PLAIN_LAYOUT,
    EncodedCheckpoint,
    TensorNaming,
    open_checkpoint,
)
from jchop._checkpoints.compressed_tensors import activation_arguments
from jchop._checkpoints.gguf import GGUF_BLOCKS, GGUFKeys, gguf_header
from jchop._checkpoints.gguf_models import gguf_model
from jchop._checkpoints.layouts import TORCHAO_CONFIG
from jchop._checkpoints.row import LayoutRow, fact_field, group_lengths, only_read, pieces
from jchop._common import files
from jchop._common.checks import check, check_bool, check_choice, check_int
from jchop._common.on_demand import is_module_of, load_name
from jchop._round.arguments import has_tracer
from jchop._storage._array import QArray
from jchop._storage._files import safetensors
from jchop._storage._quantize import StoredAs, dequantize
from jchop._storage._save import leaves_by_name, qarray_description, qarray_metadata, qarray_tensors, split_model

#: Bytes of arrays that make one file, and the most that are in memory together, except for a larger array.
SHARD_BYTES = 1 << 28
ByteProgress = Callable[[str, int, int], None]


def no_progress(name: str, count: int, total: int) -> None:
    """A report of progress that says nothing."""


@dataclass(frozen=True)
class WriteOptions:
    """How arrays are written.

    Args:
        layout: of `LAYOUT_NAMES`.
        config: fields of ``config.json`` of a folder, or of the model in a GGUF file. Default: none.
        exact: whether every number must stay the same. Default True.
        shard_bytes: bytes of arrays in one file of a folder. Default 256 MiB.
        run: a text that differs if the arrays do. Default: none; then no run goes on, and nothing is left of one that
            fails.
        others: files that are copied into a folder, unless it has one of that name. Default: none.
        progress: function of a name, the bytes that are done, and the total.
        gguf_keys: of a GGUF file. Default: the keys of the model of `config`, if llama.cpp knows it, else the fewest.
    """

    layout: str
    config: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    shard_bytes: int = SHARD_BYTES
    run: str = ""
    others: Sequence[Path] = ()
    progress: ByteProgress = no_progress
    gguf_keys: GGUFKeys | None = None


def write_jobs(jobs: Sequence[WriteJob], target: Path, options: WriteOptions) -> bool:
    """Writes arrays to a folder or a file by its ending; whether an unfinished run was continued."""
    check_bool("exact", options.exact)
    check_int("shard_bytes", options.shard_bytes, 1)
    layout, suffix = check_choice("layout", options.layout, LAYOUT_NAMES), target.suffix.lower()
    same = (suffix == ".gguf") == (layout == GGUF_LAYOUT)
    check(same, f"{target}: layout={layout!r}, but files that end in .gguf, and only these, have the layout 'gguf'")
    if layout == GGUF_LAYOUT:
        _write_gguf(jobs, target, options)
    elif suffix == ".safetensors":
        in_memory = replace(options, shard_bytes=SHARD_BYTES)
        _write_tensors(target, jobs, in_memory, 0, sum(job.nbytes for job in jobs))
    else:
        places = "tensors are written to a folder, or to a file that ends in .safetensors or .gguf"
        check(target.is_dir() or not target.exists(), f"{target} is a file; {places}")
        return _write_folder(jobs, target, options)
    return False


def _write_folder(jobs: Sequence[WriteJob], target: Path, options: WriteOptions) -> bool:
    """Writes arrays to a folder, its index and its configuration.

    Args:
        jobs: the arrays in the order of the files.
        target: the folder, which must not have tensors yet, except of an unfinished run of the same text.
        options: of another layout than GGUF.

    Returns:
        Whether files of an unfinished run were kept.

    Raises:
        ValueError: for arrays without a form in the layout, or a folder with other tensors or another writer.
    """
    plan = _divide_jobs(jobs, options.shard_bytes)
    facts = [options.run, options.layout, options.exact, [[job.name for job in part] for part in plan]]
    count = len(plan)
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    names = names if count > 1 else [safetensors.SINGLE_FILE]
    position, total = 0, sum(job.nbytes for job in jobs)
    with files.exclusive_folder(target):
        records = _begin_run(target, facts, names if options.run else [])
        copies = [path.name for path in options.others]
        files.remove_part_files(
            target, [*names, safetensors.JOURNAL_FILE, safetensors.INDEX_FILE, safetensors.CONFIG_FILE, *copies]
        )
        continues = bool(records)
        try:
            for number, (name, part) in enumerate(zip(names, plan, strict=True)):
                if number == len(records):
                    records.append(_write_tensors(target / name, part, options, position, total, records))
                    _write_journal(target, facts, records)
                position += sum(job.nbytes for job in part)
                options.progress(name, position, total)
            _write_index_and_config(target, names, records, options)
            for path in options.others:
                if not (target / path.name).exists():
                    with files.open_regular_file(path) as file:
                        mode = os.fstat(file.fileno()).st_mode & 0o777
                        files.write_atomically(target / path.name, partial(shutil.copyfileobj, file), mode)
        except BaseException as error:
            # No run goes on, or it would end here, too.
            if not options.run or not records or isinstance(error, ValueError):
                for name in (*names, safetensors.INDEX_FILE, safetensors.JOURNAL_FILE):
                    (target / name).unlink(missing_ok=True)
            raise
        (target / safetensors.JOURNAL_FILE).unlink()  # the last step: without it the same call goes on
    return continues


def _write_index_and_config(
    target: Path, names: Sequence[str], records: Sequence[Mapping[str, Any]], options: WriteOptions
) -> None:
    """Writes the index and the configuration."""
    full_config = LayoutRecord.joined(records).full_config(options.layout, options.config)
    if len(names) > 1:
        homes = {tensor: name for name, one in zip(names, records, strict=True) for tensor in one["tensors"]}
        sizes = {"total_size": sum(one["size"] for one in records)}
        _write_json(target / safetensors.INDEX_FILE, {"metadata": sizes, "weight_map": homes})
    if full_config:
        _write_json(target / safetensors.CONFIG_FILE, full_config)


def _divide_jobs(jobs: Sequence[WriteJob], shard_bytes: int) -> list[list[WriteJob]]:
    """Jobs in shards of at most `shard_bytes`, in their order; a larger job is a shard by itself."""
    plan: list[list[WriteJob]] = [[]]
    size = 0
    for job in jobs:
        if plan[-1] and size + job.nbytes > shard_bytes:
            plan.append([])
            size = 0
        plan[-1].append(job)
        size += job.nbytes
    return plan


def _begin_run(target: Path, facts: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The facts of the finished files, of such names, of an unfinished run of the same arrays."""
    journal = target / safetensors.JOURNAL_FILE
    if journal.exists():
        with files.open_regular_file(journal) as file:
            try:
                content = files.json_object(file.read().decode("utf-8"))
                if content["run"] == _facts_digest(facts, content["done"]):
                    there = zip(names, content["done"], strict=False)
                    return [one for _, one in itertools.takewhile(lambda pair: (target / pair[0]).exists(), there)]
            except (ValueError, KeyError, TypeError):
                pass
        raise ValueError(
            f"{target} has an unfinished run of other arrays or options: remove the folder, or repeat that run"
        )
    if tensors := sorted(
        path.name for path in target.iterdir() if path.suffix == ".safetensors" or path.name == safetensors.INDEX_FILE
    ):
        raise ValueError(f"{target} has tensors already ({tensors[0]}); write to a new folder")
    _write_journal(target, facts, [])
    return []


def _write_journal(target: Path, facts: Any, records: Sequence[Any]) -> None:
    _write_json(target / safetensors.JOURNAL_FILE, {"run": _facts_digest(facts, records), "done": records})


def _facts_digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_tensors(
    path: Path, jobs: Sequence[WriteJob], options: WriteOptions, position: int, total: int, before: Any = None
) -> dict[str, Any]:
    """Writes one file, with at most `shard_bytes` of tensors in memory; the record of it.

    Its metadata have the facts of the files before it, too: transformers takes the names in the last one for all. A
    file alone has none before it (None), and no configuration beside it.
    """
    record = LayoutRecord(config=before is not None)
    places, tensors = dict[str, int](), dict[str, safetensors.TensorEntry]()
    with tempfile.SpooledTemporaryFile(options.shard_bytes, dir=str(path.parent)) as file:  # until the header is known
        for job in jobs:
            for name, array in record.add(job._replace(make=lambda job=job: _on_host(job.make())), options).items():
                tensors[name], places[name] = safetensors.TensorEntry(array.dtype, tuple(array.shape)), file.tell()
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            position += job.nbytes
            options.progress(job.name, position, total)
        entries = safetensors.place_tensors(tensors)

        def read(name: str) -> np.ndarray:
            file.seek(places[name])
            size = math.prod(tensors[name].shape) * tensors[name].dtype.itemsize
            return np.frombuffer(file.read(size), np.uint8).view(tensors[name].dtype)

        whole = LayoutRecord.joined([*(before or ()), {"rows": record.rows, "plain": record.plain}])
        metadata = (record if options.layout == OWN_LAYOUT else whole).metadata(options.layout)
        safetensors.write_tensors(path, entries, metadata, read)
    size = sum(entry.nbytes for entry in entries.values())
    return {"rows": record.rows, "plain": record.plain, "tensors": list(entries), "size": size}


def _on_host(value: Any) -> Any:
    return jax.tree.map(np.asarray, value)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    files.write_atomically(path, lambda file: file.write(text.encode()))


# -- an array as tensors, and the metadata and the configuration that go with them -------------------------------------


#: The names of the embedding and of the head in models of Hugging Face; one array may be both.
_TIED_EMBEDDING, _TIED_HEAD = "embed_tokens", "lm_head"
#: The dtypes of models in a configuration.
_MODEL_DTYPES = {name: jnp.dtype(name) for name in ("float16", "bfloat16", "float32")}
#: One scale for all numbers that a program rounds to e4m3: keys and values, or inputs.
_FLOAT8_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_FLOAT4_SCHEME = {
    **{"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    **{"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
}
#: How inputs are rounded, by the row of a weight and the end of the name of the scale of its inputs.
_INPUT_SCHEMES = {
    ("float-quantized", "input_scale"): _FLOAT8_SCHEME,
    ("nvfp4-pack-quantized", "input_global_scale"): _FLOAT4_SCHEME,
}
#: An array of a model. Its leaves, and the tensors that are made of it, are of NumPy for files, else of JAX.
ModelArray = QArray | np.ndarray | np.generic | jax.Array


class WriteJob(NamedTuple):
    """An array that is to be written.

    Args:
        name: of the array.
        nbytes: its bytes, by which files are divided.
        make: gives the array.
        inputs: the arguments of the inputs of its product, which are rounded, in the words of compressed-tensors.
            Default: none.
    """

    name: str
    nbytes: int
    make: Callable[[], ModelArray]
    inputs: Mapping[str, Any] | None = None


def _layout_bytes(layout: str, nbytes: int, shape: tuple[int, ...], quantized: bool) -> int:
    """The bytes of an array in a layout, as far as its bytes and its shape show them."""
    return 4 * math.prod(shape) if quantized and layout == PLAIN_LAYOUT else nbytes


@dataclass
class LayoutRecord:
    """The facts about the arrays that were written, in JSON.

    Args:
        rows: the row and the facts of each quantized weight by name.
        plain: the names and the numbers of axes of other arrays.
        config: whether a configuration stands beside the tensors.
        tensors: the names of the tensors.
    """

    rows: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    config: bool = True
    tensors: set[str] = field(default_factory=set)

    @classmethod
    def joined(cls, records: Sequence[Mapping[str, Any]]) -> LayoutRecord:
        """The arrays of several files."""
        result = cls()
        for one in records:
            result.rows |= one["rows"]
            result.plain |= one["plain"]
        return result

    def add(self, job: WriteJob, options: WriteOptions) -> dict[str, Any]:
        """The tensors of an array, which is added.

        Raises:
            ValueError: if the layout has no form for the array; the message has a spec that it has.
        """
        name, value, layout = job.name, job.make(), options.layout
        if not isinstance(value, QArray) or layout == PLAIN_LAYOUT:
            self.plain[name] = len(value.shape)
            tensors = {name: dequantize(value) if isinstance(value, QArray) else value}
        elif layout == OWN_LAYOUT:
            self.rows[name] = [OWN_LAYOUT, qarray_description(value)]
            tensors = qarray_tensors(name, value)
        else:
            # Layouts without dtypes read float32.
            dtype = options.config.get("dtype", options.config.get("torch_dtype"))
            value = replace(value, dtype=_MODEL_DTYPES[dtype]) if dtype in _MODEL_DTYPES else value
            tensors = self._add_in_rows(table.LAYOUTS[layout], name, value, options.exact, job.inputs)
        for tensor in tensors:
            check(tensor not in self.tensors, f"two arrays have a tensor of the name {tensor!r}")
        self.tensors.update(tensors)
        return tensors

    def _add_in_rows(
        self, layout: table.CheckpointLayout, name: str, q: QArray, exact: bool, inputs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The tensors of an array in the first row of the layout that it fits, else that a cast of it fits."""
        wrong = f"{name!r} is quantized, and the layout {layout.name}"
        words = f"(out, in). The layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold any name; names= of jchop.save_checkpoint"
        named = layout.appends or f".{name}".endswith(f".{table.WEIGHT_NAME}")
        check(named, f"{wrong} has quantized arrays named '….weight' alone, of axes {words} gives others")
        writes = any(row.write is not only_read for row in layout.rows)
        check(writes, f"{wrong} is only read; compressed-tensors, torchao and others are written, too")
        reasons = []
        inputs = inputs if layout.activations else None
        rows = sorted(layout.rows, key=lambda row: inputs is not None and row.inputs_last)
        casts = [] if has_tracer(q) else rows
        for row, cast in [*((row, False) for row in rows), *((row, True) for row in casts)]:
            try:
                parts, facts = row.write(q.astype(row.fits.split()[0]) if cast else q, exact)
                if not (self.config or layout.records):
                    _check_without_config(row, parts, q)
            except ValueError as error:
                reasons += [] if cast else [f"{row.name}: {error}"]
                continue
            if inputs is not None:
                facts = {**facts, table.INPUT_ACTIVATIONS: inputs}
            self.rows[name] = [row.name, facts]
            return {layout.stem(layout.owner(name)) + part: array for part, array in parts.items()}
        fits = ", ".join(dict.fromkeys(row.fits for row in layout.rows))
        raise ValueError(
            f"{name!r} of {q.spec} cannot be written in the layout {layout.name} "
            f"({'; '.join(dict.fromkeys(reasons))}). The layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold any array; "
            f"{layout.name} holds, for example, {fits}"
        )

    def metadata(self, layout: str) -> dict[str, str]:
        """The metadata of a file with the arrays."""
        if layout == OWN_LAYOUT:
            return {"format": "pt"} | qarray_metadata({name: facts for name, (_, facts) in self.rows.items()})
        if layout not in table.LAYOUTS or not table.LAYOUTS[layout].records:
            return {"format": "pt"}
        records = {
            name: json.dumps({key: fact for key, fact in facts.items() if key != TORCHAO_CONFIG})
            for name, (_, facts) in self.rows.items()
        }
        records |= {name: json.dumps({"_type": "Tensor"}) for name in self.plain}
        return {"format": "pt", "tensor_names": json.dumps(list(records))} | records

    def full_config(self, layout: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of a model with the arrays.

        Raises:
            ValueError: if weights have several forms, and the layout has one for all.
        """
        base = {name: value for name, value in config.items() if name != table.CONFIG_FIELD}
        if layout not in table.LAYOUTS or not self.rows:
            return base
        table_layout = table.LAYOUTS[layout]
        by_name = {row.name: row for row in table_layout.rows}
        modules = {table_layout.owner(name): (by_name[row], facts) for name, (row, facts) in self.rows.items()}
        end = f".{table.WEIGHT_NAME}"
        plain = [name.removesuffix(end) for name, axes in self.plain.items() if axes == 2 and name.endswith(end)]
        names = [name.rpartition(".")[2] for name in (*plain, *modules)]
        if _TIED_EMBEDDING in names and _TIED_HEAD not in names:  # a head of the embedding, which has no tensor
            plain.append(_TIED_HEAD)
        if not table_layout.activations:
            return base | {table.CONFIG_FIELD: table_layout.config(modules, plain)}
        for (row, end), scheme in _INPUT_SCHEMES.items():
            for module, (own, facts) in modules.items():
                if own.name == row and f"{module}.{end}" in self.plain:
                    modules[module] = own, {table.INPUT_ACTIVATIONS: scheme} | facts
        cache = _cache_scheme(fact_field(config, table.CONFIG_FIELD, dict, {}))
        schemes = {} if cache is None else {table.CACHE_SCHEME: cache}
        return base | {table.CONFIG_FIELD: table_layout.config(modules, plain) | schemes}


def _cache_scheme(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How keys and values of a cache are rounded, by a ``quantization_config`` of any layout; None if they are not."""
    scheme = config.get(table.CACHE_SCHEME)
    if isinstance(scheme, Mapping) and scheme:
        return _FLOAT8_SCHEME | {name: value for name, value in scheme.items() if value is not None}
    return _FLOAT8_SCHEME if scheme == "static" or config.get("kv_cache_quant_algo") == "FP8" else None


def _check_without_config(row: LayoutRow, parts: dict[str, Any], q: QArray) -> None:
    """Refuses tensors that need a configuration to be read; ValueError."""
    # The groups of gpt-oss, or of each column.
    has_own_groups = q.ndim != 2 or any(part.endswith("g_idx") for part in parts)
    try:
        result = row.read(parts, {})
        same = has_own_groups or group_lengths(pieces(result)) == group_lengths(pieces(q))
        check(same and result.spec.element.bits == q.spec.element.bits, "its tensors do not show its groups and width")
    except ValueError as error:
        raise ValueError(f"{error}; a folder has a configuration, which says so") from None


# -- GGUF files: each array is asked for twice, first for its type and bytes, then for the bytes themselves ------------


def _write_gguf(jobs: Sequence[WriteJob], target: Path, options: WriteOptions) -> None:
    """Writes arrays to a GGUF file, in one step.

    Raises:
        ValueError: for an array that no type of GGUF holds.
    """
    keys = options.gguf_keys
    if keys is None and (model := gguf_model(options.config, options.others, [job.name for job in jobs])) is not None:
        keys, arrays, more = model
        changes = [(job, *arrays[job.name]) for job in jobs]
        jobs = [WriteJob(name, job.nbytes, lambda job=job, f=change: f(job.make())) for job, name, change in changes]
        jobs += [WriteJob(name, value.nbytes, lambda value=value: value) for name, value in more.items()]
    total, position = 2 * sum(job.nbytes for job in jobs), 0
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for job in jobs:
        value = _on_host(job.make())
        kind, data = _gguf_type_and_bytes(job.name, value)
        places[job.name] = (kind, tuple(value.shape), data.nbytes)
        position += job.nbytes
        options.progress(job.name, position, total)

    header, starts, end = gguf_header(places, keys)

    def write(file: Any) -> None:
        at = position
        file.write(header)
        for job in jobs:
            data = _gguf_type_and_bytes(job.name, _on_host(job.make()))[1]
            file.seek(starts[job.name])
            file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            at += job.nbytes
            options.progress(job.name, at, total)
        file.truncate(end)

    files.write_atomically(target, write)


def _gguf_type_and_bytes(name: str, value: ModelArray) -> tuple[int, np.ndarray]:
    """The type of an array by number, and its bytes."""
    if not isinstance(value, QArray):
        for number, block in GGUF_BLOCKS.items():
            if block.dtype is not None and block.dtype == value.dtype:  # NumPy takes None for float64
                return number, np.ascontiguousarray(value)
        dtypes = ", ".join(str(block.dtype) for block in GGUF_BLOCKS.values() if block.dtype is not None)
        raise ValueError(f"{name!r} is of dtype {value.dtype}; a GGUF file has {dtypes}")
    reasons = dict[str, list[str]]()
    for number, block in GGUF_BLOCKS.items():
        if block.write is not None:
            try:
                return number, block.write(value)
            except ValueError as error:
                reasons.setdefault(str(error), []).append(block.name)
    why = "; ".join(f"{', '.join(blocks)}: {reason}" for reason, blocks in reasons.items())
    fits = ", ".join(block.fits for block in GGUF_BLOCKS.values() if block.fits)
    raise ValueError(f"{name!r} of {value.spec} cannot be written to a GGUF file ({why}). It has {fits}")


# -- `save_checkpoint`, and the conversion of folders ------------------------------------------------------------------

#: Changes an array of a checkpoint before it is written: by its name.
ArrayChange = Callable[[str, QArray | np.ndarray], QArray | np.ndarray]


def save_checkpoint(
    path: str | os.PathLike[str],
    tree: Any,
    layout: str,
    *,
    names: TensorNaming | None = None,
    config: Mapping[str, Any] | None = None,
    exact: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes arrays and QArrays, or the parameters of a model, in the layout of another program.

    `jchop.load_checkpoint` reads it. A parameter of a Flax NNX model is named by the path of its layer: the weight of
    ``model/layers/0/up`` is ``model.layers.0.up.weight``. The kernel of a `flax.nnx.Linear`, (in, out), is written as
    (out, in). Embeddings and scales of norms are ``weight``, too. A layer at several paths is written once, by its
    first.

    Args:
        path: a new folder; or a file that ends in ``.safetensors`` or ``.gguf`` and is written in one step.
        tree: a model of Flax NNX, packed or not, of Linear and Embed layers, norms, and parameters of your own modules.
            The last are written as they are. Or a module of Equinox, or a container of arrays and QArrays; the name of
            an array is its path, joined with dots. A quantized array must have a name that ends in ``weight`` and the
            axes (out, in), except in ``"jchop"``, ``"gguf"`` and ``"mxfp4"``.
        layout: as in `jchop.load_checkpoint`, without ``"auto"`` and the layouts that are only read: ``"modelopt"``,
            ``"mlx"``, ``"hqq"`` and ``"llm_int8"``. ``"plain"`` writes the numbers of QArrays.
        names: a function that gives a tensor's name in the file for its path. Default: the same.
        config: fields for ``config.json`` of a folder; ``quantization_config`` is added. A GGUF file of a model of
            Llama, Mistral, Qwen2, Qwen3 or Gemma has keys and names of llama.cpp by it. Default: none.
        exact: whether an array whose numbers would change in their last bit (NVFP4) is an error. Default True.
        shard_bytes: the bytes of arrays in one file of a folder. Default 256 MiB.

    Raises:
        TypeError: for a leaf that is not an array, or traced arrays.
        ValueError: for a layer that has no form in checkpoints, adapters, or an array that the layout cannot hold. The
            message has specs that it can hold, or layouts for a parameter that `jchop.quantize_fn(...).pack` stored
            in another shape. For a folder that has tensors already, or that another call writes to.
        OSError: if a file cannot be written; then no file is left.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        >>> q = jc.quantize(jnp.linspace(-1, 1, 64).reshape(2, 32), "int8(group=32,scale=float16)")
        >>> jc.save_checkpoint(path, {"w": q}, layout="gguf")
        >>> bool((jc.dequantize(jc.load_checkpoint(path)["w"]) == jc.dequantize(q)).all())
        True
    """
    path = files.as_path("path", path)
    if has_tracer(tree):
        raise TypeError("tree has traced arrays, and save_checkpoint writes values: call it outside of transformations")
    options = WriteOptions(layout, _model_config(tree, config), exact, shard_bytes)
    write_jobs(_jobs_of(tree, layout, names), path, options)


def encode_checkpoint(
    tree: Any,
    layout: str,
    *,
    names: TensorNaming | None = None,
    config: Mapping[str, Any] | None = None,
    exact: bool = True,
) -> EncodedCheckpoint:
    """The tensors that `jchop.save_checkpoint` writes, as JAX arrays, for a program that takes them from memory.

    The arrays have the bits of the file, and stay on the devices of `tree`. So an engine can take the weights of each
    step of training. The result is a pytree. `jax.jit` may return it if the spec alone decides the form. Numbers
    decide it for NVFP4, integer zero points, and scales whose dtype must change. `jchop.load_checkpoint` reads it.

    Args:
        tree: as in `jchop.save_checkpoint`.
        layout: as in `jchop.save_checkpoint`, without ``"gguf"``.
        names: as in `jchop.save_checkpoint`.
        config: as in `jchop.save_checkpoint`.
        exact: as in `jchop.save_checkpoint`.

    Returns:
        An object with ``tensors``, arrays by name, and ``config``, the fields of ``config.json``.

    Raises:
        TypeError: for a leaf that is not an array.
        ValueError: as of `jchop.save_checkpoint`; or if numbers of a traced array decide the form.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.ones((32, 64)), "int4(group=32)")
        >>> encoded = jax.jit(lambda q: jc.encode_checkpoint({"up.weight": q}, "compressed-tensors"))(q)
        >>> sorted(encoded.tensors), encoded.tensors["up.weight_packed"].shape
        (['up.weight_packed', 'up.weight_scale', 'up.weight_shape'], (32, 8))
        >>> encoded.config["quantization_config"]["format"]
        'pack-quantized'
        >>> jc.load_checkpoint(encoded)["up.weight"].spec == q.spec
        True
    """
    choices = tuple(name for name in LAYOUT_NAMES if name != GGUF_LAYOUT)
    layout, config = check_choice("layout", layout, choices), _model_config(tree, config)
    options = WriteOptions(layout, config, check_bool("exact", exact))
    record, tensors = LayoutRecord(), {}
    with jax.enable_x64(True):
        for job in _jobs_of(tree, layout, names):
            try:
                tensors |= {name: jnp.asarray(part) for name, part in record.add(job, options).items()}
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                raise ValueError(
                    f"{job.name!r}: its numbers decide its form in the layout {layout}, and jax.jit does not know "
                    "them; call encode_checkpoint outside of transformations"
                ) from None
    texts = json.dumps(record.full_config(layout, options.config)), json.dumps(record.metadata(layout))
    return EncodedCheckpoint(tensors, layout, *texts)


def _model_config(tree: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a configuration, with the scheme of the caches of a model."""
    fields = dict(config or {})
    if is_module_of("flax.nnx", tree) and load_name("jchop._checkpoints.models", "has_float8_caches")(tree):
        fields[table.CONFIG_FIELD] = (fields.get(table.CONFIG_FIELD) or {}) | {table.CACHE_SCHEME: _FLOAT8_SCHEME}
    return fields


def _jobs_of(tree: Any, layout: str, names: TensorNaming | None) -> list[WriteJob]:
    """The arrays of a model or a tree by their names in a file."""
    # Files of `jchop.save` have the stored arrays.
    packed_types = QArray if layout == OWN_LAYOUT else QArray | StoredAs
    jobs, inputs = [], dict[str, Any]()
    if is_module_of("flax.nnx", tree):
        specs = load_name("jchop._checkpoints.models", "model_activations")(tree, names)
        inputs = {name: activation_arguments(spec) for name, spec in specs.items()}
        tree, names = load_name("jchop._checkpoints.models", "model_arrays")(tree, names), None
    leaves = leaves_by_name(split_model(tree)[0], packed_types)
    leaf_names = [name if names is None else names(name) for name, _, _ in leaves]
    check(len(set(leaf_names)) == len(leaves), "names gives one name to two arrays")
    for name, (_, _, leaf) in zip(leaf_names, leaves, strict=True):
        if not isinstance(leaf, packed_types | jax.Array | np.ndarray | np.generic):
            raise TypeError(f"leaf {name!r} is {leaf!r}, but only arrays and QArrays can be saved")
        if isinstance(leaf, StoredAs) and layout != PLAIN_LAYOUT:
            why = f"is stored in the shape {list(leaf.stored.shape)}, because its groups run over several axes"
            if leaf.input_factors is not None:
                why = "has factors by which its inputs are multiplied when the function runs"
            raise ValueError(
                f"{name!r} of shape {list(leaf.shape)} {why}; the layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold it, "
                f"and layout={layout!r} does not"
            )
        codes = leaf.stored if isinstance(leaf, StoredAs) else leaf
        nbytes = _layout_bytes(layout, codes.nbytes, leaf.shape, isinstance(leaf, packed_types))
        numbers = leaf.dequantize if isinstance(leaf, StoredAs) else lambda leaf=leaf: leaf
        jobs.append(WriteJob(name, nbytes, numbers, inputs.get(name)))
    return jobs


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
        jobs, inputs = [], table.inputs_by_weight(checkpoint.config)
        for name, item in checkpoint.items.items():
            nbytes = _layout_bytes(layout, item.nbytes, item.shape, item.quantized)
            make = lambda name=name: change(name, checkpoint.read(name, exact))  # noqa: E731
            jobs.append(WriteJob(name, nbytes, make, inputs(name)))
        states = [(file, file.stat()) for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
        state = [(path.name, facts.st_size, facts.st_mtime_ns) for path, facts in states if path.is_file()]
        run = f"{state!r} {options}"
        how = WriteOptions(layout, checkpoint.config, exact, shard_bytes, run, _other_files(source), progress)
        how = replace(how, gguf_keys=checkpoint.gguf_keys() if layout == GGUF_LAYOUT else None)
        return write_jobs(jobs, target, how)


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
    others = [path for path in sorted(source.iterdir()) if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES]
    others = [path for path in others if not path.name.startswith(".") and path.name != safetensors.INDEX_FILE]
    for path in others:
        is_inside = any(path.resolve().is_relative_to(place) for place in homes)
        check(is_inside, f"{path} is a link to a file outside of the folder: put the file in its place, or remove it")
    return [path for path in others if path.name != safetensors.CONFIG_FILE]
