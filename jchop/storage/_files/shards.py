"""Tensors of one safetensors file, or of a folder with an index, and the configuration of the model beside them."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from jchop._files import open_regular
from jchop.storage._files.json import document, read_object, shown, small, strings
from jchop.storage._files.safetensors import Entry, TensorFile

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
#: The longest configuration and index, in bytes, and the most files of a folder.
_LONGEST_CONFIG, _LONGEST_INDEX, _MOST_FILES = 1 << 20, 1 << 24, 4096


class Shards:
    """The tensors of a file or of a folder, by name.

    Args:
        path: a safetensors file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        OSError: if it cannot be read.
        ValueError: for an invalid file, index or configuration, or an index that the files contradict.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        try:
            self.config = _config(path / CONFIG) if path.is_dir() else {}
            self._files = [self._stack.enter_context(TensorFile(name)) for name in self._paths(path)]
            self._homes: dict[str, TensorFile] = {}
            self.metadata: dict[str, str] = {}
            for file in self._files:
                for name in file.entries:
                    if name in self._homes:
                        raise ValueError(f"{file.path}: tensor {shown(name)} is in {self._homes[name].path.name}, too")
                    self._homes[name] = file
                self.metadata |= file.metadata
            self._check_index()
        except BaseException:
            self._stack.close()
            raise

    def _paths(self, path: Path) -> list[Path]:
        self._index: dict[str, str] = {}
        if not path.is_dir():
            return [path]
        if not (path / INDEX).exists():
            if not (path / SINGLE).exists():
                raise FileNotFoundError(errno.ENOENT, f"the folder has no {SINGLE} and no {INDEX}", str(path))
            return [path / SINGLE]
        self._index = _index(path / INDEX)
        names = sorted(set(self._index.values()))
        if len(names) > _MOST_FILES:
            raise ValueError(f"{path / INDEX} names {len(names)} files, and at most {_MOST_FILES} are read")
        return [path / name for name in names]

    def _check_index(self) -> None:
        for name, file in self._index.items():
            if name not in self._homes or self._homes[name].path.name != file:
                raise ValueError(f"{self.path / INDEX}: tensor {shown(name)} is not in {shown(file)}")

    @property
    def files(self) -> list[TensorFile]:
        """The open files, in the order of their names."""
        return self._files

    @property
    def entries(self) -> dict[str, Entry]:
        """The dtypes and shapes of the tensors."""
        return {name: file.entries[name] for name, file in self._homes.items()}

    def home(self, name: str) -> str:
        """The name of the file that a tensor is in."""
        return self._homes[name].path.name

    def read(self, name: str) -> np.ndarray:
        """A tensor."""
        return self._homes[name].read(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()


def _text(path: Path, most: int) -> str:
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is longer than {most} bytes")
    try:
        return data.decode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path} is not text: {error}") from None


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return document(_text(path, _LONGEST_CONFIG))
    except ValueError as error:
        raise ValueError(f"{path} is not a configuration: {error}") from None


def _index(path: Path) -> dict[str, str]:
    text = _text(path, _LONGEST_INDEX)
    try:
        found = read_object(text, lambda key: strings if key == "weight_map" else small)
        homes = found.get("weight_map")
        if not homes:
            raise ValueError("it has no weight_map")
        for name in homes.values():
            if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise ValueError(f"{shown(name)} is no name of a safetensors file in the folder")
    except ValueError as error:
        raise ValueError(f"{path} is not an index: {error}") from None
    return homes
