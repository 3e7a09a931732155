"""Opens regular files only, writes files atomically, checks JSON, and names the extra of a missing package."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np

from jchop._common.checks import check, check_instance


def open_regular_file(path: Path, name: str = "") -> BufferedReader:
    """A regular file, open for reading. It never blocks, as opening a FIFO would.

    Args:
        path: path of the file.
        name: name of the file in errors. Default: its path.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if `path` is a folder, a FIFO, a device or a socket.
    """
    descriptor = os.open(path, os.O_RDONLY | _open_flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise ValueError(f"{name or path} is not a regular file, but {kind}: it cannot be read in parts")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


class RegularFile(ExitStack):
    """A regular file that is open for reading until the end of a context.

    Args:
        path: path of the file.
        name: name of the file in errors. Default: its path.
        read_header: called when it is open; an error closes it.

    Attributes:
        file_size: its bytes when it was opened.

    Raises:
        OSError, ValueError: as `open_regular_file`, and as `read_header`.
    """

    def __init__(self, path: Path, read_header: Callable[[], object], name: str = "") -> None:
        super().__init__()
        self.path, self.name = path, name or str(path)
        self._file = self.enter_context(open_regular_file(path, name))
        self.file_size = os.fstat(self._file.fileno()).st_size
        try:
            read_header()
        except BaseException:
            self.close()
            raise

    def read_bytes(self, start: int, count: int, what: str) -> np.ndarray:
        """Bytes from `start` on.

        Raises:
            ValueError: if the file is shorter than when it was opened, or they do not fit in memory.
        """
        try:
            data = np.empty(count, np.uint8)
        except MemoryError:
            raise ValueError(f"{self.name}: {what} of {count} bytes does not fit in memory") from None
        self.fill(data.data, start, what)
        return data

    def fill(self, data: memoryview, start: int, what: str) -> None:
        """Reads bytes from a position on; ValueError if the file has become shorter."""
        self._file.seek(start)
        is_whole = self._file.readinto(data) == len(data)
        check(is_whole, f"{self.name} ends within {what}: it became shorter while it was read")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], most: int = 0o777) -> None:
    """Calls `write` on a new file in the folder of `path`, then renames it to `path`.

    Other programs see the old content or the new, never a part. After an error `path` keeps its old content, and the
    new file is removed. A killed process leaves the file ``.NAME.RANDOM.part`` behind.

    Each call has its own new file, so concurrent calls are safe: the last one replaces the others. Only its owner may
    read it until it is complete. Then it gets the permissions of the file that it replaces, or the default ones. A
    symbolic link at `path` is replaced; its target stays, and its permissions are used.

    Args:
        path: path of the file.
        write: function that is called with the new file, which is seekable and open for writing.
        most: the permissions that it may have. Default: all.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if `path` is a folder, a FIFO, a device or a socket.
    """
    with atomic_file(path, most=most) as file:
        write(file)


@contextmanager
def atomic_file(path: Path, token: str | None = None, most: int = 0o777) -> Iterator[IO[bytes]]:
    """The new file of `write_atomically`, which replaces `path` when the context ends without an error.

    Args:
        path: path of the file.
        token: of the name of the new file, which `part_path` has. Default: random.
        most: as in `write_atomically`.
    """
    old_mode = path.stat().st_mode if path.exists() else None
    check(old_mode is None or stat.S_ISREG(old_mode), f"{path} is not a regular file, and cannot be replaced by one")
    part = part_path(path, secrets.token_hex(8) if token is None else token)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _open_flags("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")
    try:
        # The umask can be read without changing it for other threads only by creating a file. The file is empty as long
        # as others may read it.
        descriptor = os.open(part, flags, 0o666 if old_mode is None else 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "w+b") as file:
            mode = os.fstat(descriptor).st_mode if old_mode is None else old_mode
            _set_permissions(descriptor, 0o600)
            yield file
            file.flush()
            _set_permissions(descriptor, mode & most)
            os.fsync(descriptor)
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno in _NO_SPACE_ERRNOS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Makes a folder, and keeps other writers out until the context ends, also if this process is killed.

    After an error the folders that it has made are removed, if they are empty. File systems without locks, and Windows,
    keep nobody out.

    Raises:
        OSError: if the folder cannot be made.
        ValueError: if another process, or another thread, writes to the folder.
    """
    new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _folder_lock(folder):
            yield
    except BaseException:
        with suppress(OSError):
            for place in new_folders:
                place.rmdir()
        raise


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    from fcntl import LOCK_EX, LOCK_NB, flock

    path = folder / ".jchop-lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _open_flags("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"), 0o666)
    try:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            is_busy = not os.path.samestat(os.fstat(descriptor), os.stat(path))  # by one that had it, and removed it
        except OSError as error:
            is_busy = error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
        check(not is_busy, f"{folder} is being written by another call: wait for its end, or write to another folder")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # of a write, which names no file


def as_path(name: str, value: object) -> Path:
    """An argument as a path.

    Raises:
        TypeError: if it is none.
    """
    words = f"a path{', which comes first' if name == 'path' else ''}: a text or a pathlib.Path"
    return Path(check_instance(name, value, str | os.PathLike, words))  # type: ignore[arg-type]


def part_path(path: Path, token: str) -> Path:
    """The path of the new file of `atomic_file`."""
    return path.with_name(f"{_part_stem(path.name)}{token}.part")


def remove_part_files(folder: Path, names: Iterable[str]) -> None:
    """Removes the files that killed processes left behind in `write_atomically` of these names in a folder."""
    stems = {_part_stem(name) for name in names}
    for path in folder.iterdir():
        if (match := _PART_NAME.fullmatch(path.name)) and match[1] in stems:
            path.unlink(missing_ok=True)


_PART_NAME = re.compile(r"(\..+\.)[0-9a-f]{16}\.part", re.DOTALL)


def _part_stem(name: str) -> str:
    """The beginning of the names of unfinished files; a name has at most 255 bytes."""
    return f".{name[:40]}."


def _open_flags(*names: str) -> int:
    """Flags of `os.open`; missing ones are 0."""
    return sum(getattr(os, name, 0) for name in names)


def _set_permissions(descriptor: int, mode: int) -> None:
    if hasattr(os, "fchmod"):  # Windows has no such permissions
        os.fchmod(descriptor, mode)


#: The command that installs an extra, in a clone of the repository: jchop is on no package index yet.
INSTALL_EXTRA = 'pip install ".[{extra}]"'


def require_extra(purpose: str, extra: str, packages: tuple[str, ...]) -> None:
    """Raises ModuleNotFoundError if one of `packages` is missing; the message names the extra that installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        command = INSTALL_EXTRA.format(extra=extra)
        raise ModuleNotFoundError(f"{purpose} needs {names}: {command} in a clone of jchop", name=missing[0])


# -- JSON of untrusted files: with bounded memory, limited depth and no duplicate keys ---------------------------------


#: The most entries of an object. A text may have four lists and objects, and six strings, for each of so many.
MOST_ENTRIES = 1 << 18


def distribution_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a text.

    A list or an object takes up to thirty times its text when it is parsed. So they are counted before.

    Raises:
        ValueError: if the text is no object, has a duplicate key, has too many entries, or is nested too deep.
    """
    for kind, marks, most in (("lists and objects", "[{", 4), ("strings", '"', 12)):
        check(sum(map(text.count, marks)) <= most * MOST_ENTRIES, f"more {kind} than {MOST_ENTRIES} entries have")
    try:
        value = json.loads(text, object_pairs_hook=_unique_members, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("lists and objects nested too deep") from None
    check(isinstance(value, dict), "it is not an object")
    return value


def string_object(value: Any, name: str) -> dict[str, str]:
    """A parsed object whose values are strings; None counts as an empty one."""
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{name} must be an object of texts")
    return value


def short_text(value: object) -> str:
    """A value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        last = {key: place for place, (key, _) in enumerate(pairs)}
        twice = next(key for place, (key, _) in enumerate(pairs) if last[key] != place)
        raise ValueError(f"the key {short_text(twice)} is duplicated")
    check(len(members) <= MOST_ENTRIES, f"an object has more than {MOST_ENTRIES} entries")
    return members


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
