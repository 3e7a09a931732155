"""Tensors of one safetensors file, or of a folder with an index, and the configuration of the model beside them."""

from __future__ import annotations

import errno
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jchop._common.checks import check, first_names
from jchop._common.files import open_regular_file
from jchop.storage._files.json import json_object, short_text, string_object
from jchop.storage._files.safetensors import TensorEntry, TensorFile

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
            self.config = _read_config(path / CONFIG_FILE) if path.is_dir() else {}
            self.files = [self.enter_context(TensorFile(name)) for name in self._paths(path)]
            self.entries: dict[str, TensorEntry] = {}
            self._homes: dict[str, TensorFile] = {}
            self.metadata: dict[str, str] = {}
            for file in self.files:
                for name, entry in file.entries.items():
                    if name in self._homes:
                        raise ValueError(
                            f"{file.path}: tensor {short_text(name)} is in {self._homes[name].path.name}, too"
                        )
                    self._homes[name], self.entries[name] = file, entry
                self.metadata |= file.metadata
            self._check_index()
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

    def _check_index(self) -> None:
        for name, file in self._index.items():
            if name not in self._homes or self._homes[name].path.name != file:
                raise ValueError(
                    f"{self.path / INDEX_FILE}: tensor {short_text(name)} is not in {short_text(file)}; "
                    "if it is tied to another, remove its line from the index"
                )

    def read(self, name: str) -> np.ndarray:
        """A tensor."""
        return self._homes[name].read(name)


def _files_without_index(folder: Path) -> list[Path]:
    """The files of a folder that are numbered from 1 to their number.

    Raises:
        FileNotFoundError: if there are none, or some are missing; the message has a way out.
    """
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    matches = [_SHARD_NAME.fullmatch(name) for name in files]
    kinds = {(one[1], one[3]) for one in matches if one}
    if len(kinds) == 1 and None not in matches:
        ((_, count),) = kinds
        lacking = set(range(1, min(int(count), _MOST_FILES) + 1)) - {int(one[2]) for one in matches if one}
        if not lacking and len(files) == int(count):
            return [folder / name for name in files]
        first = f", number {min(lacking)} first" if lacking else ""
        raise _no_file(folder / INDEX_FILE, f"and not all of {int(count)} numbered files are there{first}")
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if models := files or gguf:
        raise _no_model(folder, f"pass the path of one of its files: {first_names(models, short_text)}")
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth"))][:1]
    why = f"{short_text(others[0])} is a pickle of torch, which is not read: save it as safetensors" if others else ""
    raise _no_model(folder, why)


def _no_model(folder: Path, why: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, f"the folder has no {SINGLE_FILE} and no {INDEX_FILE}{'; ' if why else ''}{why}", str(folder)
    )


def _no_file(path: Path, why: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"No such file, {why}", str(path))


def _read_text(path: Path, most: int) -> str:
    with open_regular_file(path) as file:
        data = file.read(most + 1)
    check(len(data) <= most, f"{path} is longer than {most} bytes")
    try:
        return data.decode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path} is not text: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json_object(_read_text(path, _LONGEST_CONFIG))
    except ValueError as error:
        raise ValueError(f"{path} is not a configuration: {error}") from None


def _read_index(path: Path) -> dict[str, str]:
    text = _read_text(path, _LONGEST_INDEX)
    try:
        homes = string_object(json_object(text).get("weight_map"), "weight_map")
        check(homes, "it has no weight_map")
        for name in homes.values():
            if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise ValueError(f"{short_text(name)} is no name of a safetensors file in the folder")
    except ValueError as error:
        raise ValueError(f"{path} is not an index: {error}") from None
    return homes
