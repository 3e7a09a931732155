"""The safetensors file format: a header with the position of each tensor, then the bytes.

The layout (https://github.com/huggingface/safetensors): eight bytes with the length of the header (little endian), the
header as JSON, the data. The header has the dtype, shape and range of bytes by name; ``__metadata__`` has texts. The
package `safetensors` maps files into memory, so truncation by another process ends the program. It has no float8 and
no float4 for NumPy, takes the last of duplicate keys, and writes whole files from memory.

A folder may have several such files with an index; and each process may read and write parts of one.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import ml_dtypes
import numpy as np
from jax import Array

from jchop._common import files
from jchop._common.checks import check, first_names, place_in_errors

#: The dtypes of the format by name.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in (
        ("F4", ml_dtypes.float4_e2m1fn), ("BOOL", "?"), ("U8", "u1"), ("I8", "i1"),
        ("F8_E5M2", ml_dtypes.float8_e5m2), ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz), ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu), ("U16", "<u2"), ("I16", "<i2"), ("F16", "<f2"),
        ("BF16", ml_dtypes.bfloat16), ("U32", "<u4"), ("I32", "<i4"), ("F32", "<f4"),
        ("U64", "<u8"), ("I64", "<i8"), ("F64", "<f8"), ("C64", "<c8"),
    )
}  # fmt: skip
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: The dtype of which a file has two numbers in a byte, the first in the low nibble, and an array one.
_HALF_BYTE_DTYPE = DTYPES["F4"]
_METADATA_KEY = "__metadata__"
#: The longest header, in bytes, and the most axes of a tensor, as in NumPy.
_MOST_HEADER_BYTES = 1 << 24
_MOST_SAFETENSORS_AXES = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Args:
        dtype: of its elements.
        shape: C order.
        start: its first byte, counted from the end of the header.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the file."""
        return -(-math.prod(self.shape) * self.bits // 8)

    @property
    def bits(self) -> int:
        """Bits of an element in the file."""
        return 4 if self.dtype == _HALF_BYTE_DTYPE else 8 * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of its dtype in the format.

        Raises:
            TypeError: if the format does not have it.
        """
        if self.dtype not in _SAFETENSORS_NAMES:
            little_endian, names = self.dtype.newbyteorder("<"), ", ".join(map(str, _SAFETENSORS_NAMES))
            advice = f". Convert it, for example by x.astype({little_endian.str!r})"
            advice *= little_endian in _SAFETENSORS_NAMES
            raise TypeError(f"dtype {self.dtype} is none of a safetensors file; allowed: {names}{advice}")
        return _SAFETENSORS_NAMES[self.dtype]


class TensorFile(files.RegularFile):
    """A safetensors file open for reading: it reads the header at once, the bytes of each tensor on request.

    A file is refused if the reference implementation refuses it, and if it has a duplicate key. The whole header is
    checked before memory is allocated for a tensor.

    Args:
        path: of the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a valid safetensors file; the message has the reason. Headers of more than 16 MiB,
            arrays of more than 64 axes and dtypes that JAX lacks are refused, too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), self._read_header)

    def read(self, name: str, start: int = 0, count: int | None = None) -> np.ndarray:
        """A whole tensor, or `count` of its elements from `start` on in C order, as a vector.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it has become shorter, or the tensor does not fit in memory.
        """
        entry = self.entries[name]
        shape = entry.shape if count is None else (count,)
        first, end = start * entry.bits // 8, -(-(start + math.prod(shape)) * entry.bits // 8)
        data = self.read_bytes(self._data + entry.start + first, end - first, f"tensor {name!r}")
        if entry.bits < 8:
            data = np.stack([data & 15, data >> 4], -1).reshape(-1)[start % 2 :][: math.prod(shape)]
        return data.view(entry.dtype).reshape(shape)

    def _read_header(self) -> None:
        """Reads the entries and the metadata; also sets the position of the data."""
        start = self._file.read(8)
        length, size = int.from_bytes(start, "little"), self.file_size - 8
        wrong = f"{self.path} is not a safetensors file"
        why = "its first eight bytes are not the length of a header" if start else "it is empty"
        check(len(start) == 8 and length <= size, f"{wrong}: {why}")
        most = f"at most {_MOST_HEADER_BYTES}"
        check(length <= _MOST_HEADER_BYTES, f"{wrong}: its header would take {length} bytes, and {most}")
        self._data, size = 8 + length, size - length
        with place_in_errors(f"{wrong} that jchop reads: bad header"):
            fields = files.json_object(self._file.read(length).decode("utf-8"))
            self.metadata = files.string_object(fields.pop(_METADATA_KEY, None), _METADATA_KEY)
            self.entries = {
                name: _read_entry(f"tensor {files.short_text(name)}", fields[name], size) for name in fields
            }
            at = 0
            for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
                begins = f"tensor {files.short_text(name)} begins at byte {entry.start} of the data"
                check(entry.start == at, f"{begins}, and must at {at}")
                at += entry.nbytes
            check(at == size, f"the tensors fill {at} bytes, and the file has {size}")


def _read_entry(what: str, fields: Any, size: int) -> TensorEntry:
    """The entry of a tensor, in a file with `size` bytes of data."""
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise ValueError(f"{what} must be an object with dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what}: dtype {files.short_text(dtype)} is not known; read are {', '.join(DTYPES)}")
    if not are_counts(shape) or len(shape) > _MOST_SAFETENSORS_AXES or math.prod(n or 1 for n in shape) >> 58:
        requirement = f"a list of integers >= 0, at most {_MOST_SAFETENSORS_AXES} and of a product below 2^58"
        raise ValueError(f"{what}: shape {files.short_text(shape)} must be {requirement}")
    if not are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{what}: data_offsets {files.short_text(offsets)} do not fit: they are not two integers")
    entry = TensorEntry(DTYPES[dtype], tuple(shape), offsets[0])
    whole = math.prod(shape) * entry.bits % 8 == 0
    if offsets[1] - offsets[0] != entry.nbytes or offsets[1] > size or not whole:
        raise ValueError(f"{what}: data_offsets {offsets} do not fit shape {files.short_text(shape)} and the file")
    return entry


def are_counts(numbers: Any) -> bool:
    """Whether `numbers` is a list of integers >= 0, without booleans."""
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def place_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The same tensors in consecutive positions; wide elements come first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # stable
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name in order:
        entries[name] = TensorEntry(tensors[name].dtype, tensors[name].shape, start)
        start += entries[name].nbytes
    return entries


def header_of(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its tensors; arguments and errors are as in `TensorWriter`."""
    check(_METADATA_KEY not in entries, f"no tensor can have the name {_METADATA_KEY!r}")
    fields: dict[str, Any] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        if math.prod(entry.shape) * entry.bits % 8:
            raise ValueError(f"tensor {name!r} of {entry.dtype}{list(entry.shape)} fills no whole bytes of a file")
        offsets = [entry.start, entry.start + entry.nbytes]
        fields[name] = {"dtype": entry.dtype_name, "shape": list(entry.shape), "data_offsets": offsets}
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header += b" " * (-len(header) % 8)
    fits = len(header) <= _MOST_HEADER_BYTES and max(len(entries), len(metadata)) <= files.MOST_ENTRIES
    made = f"{len(entries)} tensors and {len(metadata)} metadata make a header of {len(header)} bytes"
    check(fits, f"{made}; a file has at most {files.MOST_ENTRIES} of each and a header of {_MOST_HEADER_BYTES}")
    return len(header).to_bytes(8, "little") + header


class TensorWriter:
    """Writes the header of a safetensors file, then chunks of tensors in any order.

    Args:
        file: open for writing, at its start, and seekable.
        entries: the tensors, as returned by `place_tensors`.
        metadata: texts for the header.

    Raises:
        TypeError: for a dtype that the format does not have.
        ValueError: for a tensor with the name of the metadata, or a header that is too long for `TensorFile`.
    """

    def __init__(self, file: IO[bytes], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        start = header_of(entries, metadata)
        self._file, self._entries, self._data = file, entries, len(start)
        self._positions = dict.fromkeys(entries, 0)
        file.write(start)

    def write(self, name: str, chunk: np.ndarray) -> None:
        """Writes the next elements of a tensor, in C order, at their position; they fill whole bytes."""
        entry = self._entries[name]
        raw_bytes = np.ascontiguousarray(chunk, entry.dtype).reshape(-1).view(np.uint8)
        data = (raw_bytes if entry.bits >= 8 else (raw_bytes[0::2] & 15) | (raw_bytes[1::2] << 4)).data
        at = self._positions[name]
        if at + len(data) > entry.nbytes:
            raise ValueError(f"tensor {name!r} takes {entry.nbytes} bytes, and {at + len(data)} are written")
        self._file.seek(self._data + entry.start + at)
        self._file.write(data)
        self._positions[name] = at + len(data)

    def finish(self) -> None:
        """Checks that every byte was written.

        Raises:
            ValueError: if a tensor lacks bytes.
        """
        short = [name for name in self._entries if self._positions[name] != self._entries[name].nbytes]
        check(not short, f"tensors not wholly written: {', '.join(short)}")


def write_tensors(
    path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], read: Callable[[str], np.ndarray]
) -> None:
    """Writes a file in one step; `read` gives each tensor when it is written."""

    def write(file: IO[bytes]) -> None:
        writer = TensorWriter(file, entries, metadata)
        for name in entries:
            writer.write(name, read(name))
        writer.finish()

    files.write_atomically(path, write)


# -- a file or a folder with an index, and the configuration of the model beside them ----------------------------------


INDEX_FILE, SINGLE_FILE, CONFIG_FILE = "model.safetensors.index.json", "model.safetensors", "config.json"
#: The record of a folder that `convert_checkpoint` has not finished.
JOURNAL_FILE = ".jchop-unfinished.json"
#: The longest configuration and index, in bytes, and the most files of a folder.
_LONGEST_CONFIG, _LONGEST_INDEX, _MOST_FILES = 1 << 20, 1 << 24, 4096
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", re.DOTALL)


class ShardFiles(ExitStack):
    """The tensors of a file or of a folder, by name.

    Args:
        path: a safetensors file, or a folder with ``model.safetensors``, ``model.safetensors.index.json``, or all files
            ``NAME-00001-of-0000N.safetensors`` of one name.

    Attributes:
        files: the open files, in the order of their names.
        entries: the dtypes and shapes of the tensors.
        metadata: of all files.
        config: the fields of ``config.json``; empty if there is none.

    Raises:
        OSError: if it cannot be read.
        ValueError: for an invalid file, index or configuration, or an index that the files contradict.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()
        try:
            self.config: dict[str, Any] = {}
            if path.is_dir() and (config := path / CONFIG_FILE).exists():
                with place_in_errors(f"{config} is not a configuration"):
                    self.config = files.json_object(_read_text(config, _LONGEST_CONFIG))
            self.files = [self.enter_context(TensorFile(name)) for name in self._paths(path)]
            self.entries: dict[str, TensorEntry] = {}
            self._homes: dict[str, TensorFile] = {}
            self.metadata: dict[str, str] = {}
            for file in self.files:
                for name, entry in file.entries.items():
                    if name in self._homes:
                        raise ValueError(
                            f"{file.path}: tensor {files.short_text(name)} is in {self._homes[name].path.name}, too"
                        )
                    self._homes[name], self.entries[name] = file, entry
                self.metadata |= file.metadata
            remedy = "if it is tied to another, remove its line from the index"
            for name, home in self._index.items():
                there = name in self._homes and self._homes[name].path.name == home
                place = f"tensor {files.short_text(name)} is not in {files.short_text(home)}"
                check(there, f"{path / INDEX_FILE}: {place}; {remedy}")
        except BaseException:
            self.close()
            raise

    def _paths(self, path: Path) -> list[Path]:
        self._index: dict[str, str] = {}
        if not path.is_dir():
            return [path]
        if (path / JOURNAL_FILE).exists():
            raise _no_model(path, "it is of an unfinished run of jchop: repeat its command")
        if not (path / INDEX_FILE).exists():
            return [path / SINGLE_FILE] if (path / SINGLE_FILE).exists() else _files_without_index(path)
        self._index = _read_index(path / INDEX_FILE)
        names = sorted(set(self._index.values()))
        if len(names) > _MOST_FILES:
            raise ValueError(f"{path / INDEX_FILE} names {len(names)} files, and at most {_MOST_FILES} are read")
        for name in names:
            if not (path / name).exists():
                raise _no_file(path / name, f"which {INDEX_FILE} names; is the download complete?")
        return [path / name for name in names]

    def read(self, name: str) -> np.ndarray:
        """A tensor."""
        return self._homes[name].read(name)


def _files_without_index(folder: Path) -> list[Path]:
    """The files of a folder that are numbered from 1 to their number.

    Raises:
        FileNotFoundError: if there are none, or some are missing; the message has a way out.
    """
    names = sorted(path.name for path in folder.iterdir())
    tensors = [name for name in names if name.endswith(".safetensors")]
    matches = [_SHARD_NAME.fullmatch(name) for name in tensors]
    kinds = {(one[1], one[3]) for one in matches if one}
    if len(kinds) == 1 and None not in matches:
        ((_, count),) = kinds
        lacking = set(range(1, min(int(count), _MOST_FILES) + 1)) - {int(one[2]) for one in matches if one}
        if not lacking and len(tensors) == int(count):
            return [folder / name for name in tensors]
        first = f", number {min(lacking)} first" if lacking else ""
        raise _no_file(folder / INDEX_FILE, f"and not all of {int(count)} numbered files are there{first}")
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if models := tensors or gguf:
        raise _no_model(folder, f"pass the path of one of its files: {first_names(models, files.short_text)}")
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth"))][:1]
    torch = "is a pickle of torch, which is not read: save it as safetensors"
    raise _no_model(folder, f"{files.short_text(others[0])} {torch}" if others else "")


def _no_model(folder: Path, why: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, f"the folder has no {SINGLE_FILE} and no {INDEX_FILE}{'; ' if why else ''}{why}", str(folder)
    )


def _no_file(path: Path, why: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"No such file, {why}", str(path))


def _read_text(path: Path, most: int) -> str:
    with files.open_regular_file(path) as file:
        data = file.read(most + 1)
    check(len(data) <= most, f"{path} is longer than {most} bytes")
    with place_in_errors(f"{path} is not text"):
        return data.decode("utf-8")


def _read_index(path: Path) -> dict[str, str]:
    text = _read_text(path, _LONGEST_INDEX)
    with place_in_errors(f"{path} is not an index"):
        homes = files.string_object(files.json_object(text).get("weight_map"), "weight_map")
        check(homes, "it has no weight_map")
        for name in homes.values():
            if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise ValueError(f"{files.short_text(name)} is no name of a safetensors file in the folder")
    return homes


# -- parts of tensors: the parts on the devices of one process, without the others -------------------------------------


def spans_processes(leaf: Any) -> bool:
    """Whether a part of an array is in another process alone."""
    return isinstance(leaf, Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def contiguous_runs(shape: Sequence[int], index: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of the runs of a part that are contiguous in C order, in that order.

    Args:
        shape: of the whole array.
        index: for each axis the part, of step 1.
    """
    bounds = [each.indices(n)[:2] for each, n in zip(index, shape, strict=True)]
    cut = [axis for axis, (n, (start, stop)) in enumerate(zip(shape, bounds, strict=True)) if (start, stop) != (0, n)]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    start, stop = bounds[last] if bounds else (0, 1)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for places in itertools.product(*(range(*each) for each in bounds[:last])):
        before = sum(at * step for at, step in zip(places, steps, strict=False))
        yield before + start * inner, (stop - start) * inner


# -- reading -----------------------------------------------------------------------------------------------------------


def read_to_devices(file: TensorFile, name: str, sharding: Any) -> Array:
    """A tensor on the devices of a sharding; this process reads the parts of its own devices, one at a time."""
    entry = file.entries[name]
    last_part: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        bounds = tuple(each.indices(n)[:2] for each, n in zip(index, entry.shape, strict=True))
        if bounds not in last_part:
            last_part.clear()  # devices with the same part are neighbours, mostly
            last_part[bounds] = np.empty([stop - start for start, stop in bounds], entry.dtype)
            flat, at = last_part[bounds].reshape(-1), 0
            for start, count in contiguous_runs(entry.shape, index):
                flat[at : at + count] = file.read(name, start, count)
                at += count
        return last_part[bounds]

    return jax.make_array_from_callback(entry.shape, sharding, part)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_together(
    path: Path, tensors: Mapping[str, Any], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> None:
    """Writes one file from all processes; each writes the parts of its devices, and the first one the other arrays.

    The new file has its name when all processes have written. If one of them fails, all raise an error, and the old
    file stays.

    Args:
        path: of the file, which is the same for all processes.
        tensors: arrays by name.
        entries: as from `place_tensors`.
        metadata: texts for the header.
    """
    from jax.experimental import multihost_utils

    for name, entry in entries.items():
        if entry.bits < 8:
            raise TypeError(f"leaf {name!r} of {entry.dtype}: several processes write whole bytes, not halves")
    header, first = header_of(entries, metadata), jax.process_index() == 0
    token = multihost_utils.broadcast_one_to_all(np.frombuffer(secrets.token_bytes(8), np.uint8)).tobytes().hex()
    with ExitStack() as stack:

        def begin() -> IO[bytes] | None:
            if not first:
                return None
            file = stack.enter_context(files.atomic_file(path, token))
            file.write(header)
            file.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))
            file.flush()
            return file

        def write(file: IO[bytes] | None) -> None:
            mine = file or stack.enter_context(files.part_path(path, token).open("r+b"))
            for name, entry in entries.items():
                _write_own_parts(mine, len(header) + entry.start, entry, tensors[name], first)
            mine.flush()
            os.fsync(mine.fileno())

        shared_file = _in_all_processes(path, begin)
        _in_all_processes(path, lambda: write(shared_file))
        _in_all_processes(path, stack.close)


def _write_own_parts(file: IO[bytes], start: int, entry: TensorEntry, array: Any, first: bool) -> None:
    """Writes the parts of an array that this process answers for: each part is written by one process."""
    parts = [(tuple(slice(None) for _ in entry.shape), array)] if first else []
    if isinstance(array, Array) and not array.is_fully_addressable:
        parts = [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]
    for index, data in parts:
        flat, at = np.ascontiguousarray(np.asarray(data), entry.dtype).reshape(-1), 0
        for place, count in contiguous_runs(entry.shape, index):
            file.seek(start + place * entry.dtype.itemsize)
            file.write(flat[at : at + count].view(np.uint8).data)
            at += count


def _in_all_processes(path: Path, action: Callable[[], Any]) -> Any:
    """The result of an action, when all processes have done it.

    Raises:
        OSError: if another process failed; its number is in the message.
    """
    from jax.experimental import multihost_utils

    result = fault = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the others have to hear of it before it is raised
        fault = error
    successes = np.asarray(multihost_utils.process_allgather(np.int32(fault is None))).reshape(-1)
    if fault is not None:
        raise fault
    if not successes.all():
        processes = ", ".join(map(str, np.flatnonzero(~successes)))
        raise OSError(f"{path} is not written, since it failed in the processes {processes}; an old file is unchanged")
    return result
