"""Files appear whole, under the permissions that they should have, whatever else happens in their folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest
from each_case import each

from jchop._common.files import exclusive_folder, open_regular_file, remove_part_files, write_atomically

ROOT = Path(__file__).resolve().parents[2]
posix = pytest.mark.skipif(os.name != "posix", reason="permissions, links and FIFOs of POSIX")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.smoke
def test_threads_under_one_name_never_damage_the_file(tmp_path: Path) -> None:
    target, bad = tmp_path / "x", []
    contents = [bytes([i]) * (100_000 + i) for i in range(8)]
    target.write_bytes(contents[0])

    def save(content: bytes) -> None:
        def write(file: IO[bytes]) -> None:
            for at in range(0, len(content), 10_000):
                file.write(content[at : at + 10_000])

        try:
            for _ in range(10):
                write_atomically(target, write)
                if target.read_bytes() not in contents:
                    bad.append("damaged")
        except OSError as error:
            bad.append(repr(error))

    threads = [threading.Thread(target=save, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad and list(tmp_path.iterdir()) == [target]


@posix
@each("umask", [0o022, 0o077, 0o002])
def test_permissions(tmp_path: Path, umask: int) -> None:
    seen = []

    def write(file: IO[bytes]) -> None:
        seen.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        file.write(b"new")

    before = os.umask(umask)
    try:
        for name, given in (("fresh", None), ("private", 0o600), ("shared", 0o664)):
            path = tmp_path / name
            if given is not None:
                path.write_bytes(b"old")
                path.chmod(given)
            write_atomically(path, write)
    finally:
        os.umask(before)
    assert set(seen) == {0o600}
    assert [mode(tmp_path / name) for name in ("fresh", "private", "shared")] == [0o666 & ~umask, 0o600, 0o664]


@posix
def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_bytes(b"keep")
    victim.chmod(0o640)
    (target := tmp_path / "x").symlink_to(victim)
    # Links under the names that a process could be expected to use.
    for name in (f".x.{os.getpid()}.part", ".x.part", "x.part"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(target, lambda file: file.write(b"new"))
    assert victim.read_bytes() == b"keep" and not target.is_symlink()
    assert target.read_bytes() == b"new" and mode(target) == 0o640
    (dangling := tmp_path / "y").symlink_to(tmp_path / "nothing")
    write_atomically(dangling, lambda file: file.write(b"new"))
    assert not dangling.is_symlink() and not (tmp_path / "nothing").exists()


def test_a_planted_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a guessed random name does no harm: the file must be new."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (planted := tmp_path / ".x.guessed.part").write_bytes(b"keep")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "x", lambda file: file.write(b"new"))
    assert planted.read_bytes() == b"keep" and list(tmp_path.iterdir()) == [planted]


def test_errors_leave_nothing_and_name_the_file(tmp_path: Path) -> None:
    def broken(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    (target := tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, broken)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "no" / "x", broken)
    assert caught.value.filename == str(tmp_path / "no" / "x")
    with pytest.raises(ValueError, match="not a regular file"):
        write_atomically(tmp_path, broken)
    long = tmp_path / ("ä" * 120)
    write_atomically(long, lambda file: file.write(b"new"))
    assert long.read_bytes() == b"new"


@posix
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "x"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"large: '{path}'$"):
            write_atomically(path, lambda file: file.write(bytes(2000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@posix
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    for path in (fifo, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="not a regular file"):
            open_regular_file(path)
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "nothing")
    (plain := tmp_path / "x").write_bytes(b"abc")
    with open_regular_file(plain) as file:
        assert file.read() == b"abc"


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from jchop._common.files import write_atomically
target, contents = Path(sys.argv[1]), [bytes([i]) * 300_000 for i in (1, 2)]
target.write_bytes(contents[0])
draw, damaged, killed = random.Random(0), 0, 0
for kill in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        while True:
            for content in contents:
                write_atomically(target, lambda file: [file.write(content[:1000]) for _ in range(300)])
    time.sleep(draw.uniform(0.001, 0.01))
    os.kill(child, signal.SIGKILL)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    damaged += target.read_bytes() not in contents
print(killed, damaged)
"""


@posix
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_damage_nothing(tmp_path: Path, kills: int) -> None:
    argv = [sys.executable, "-c", KILLS, str(tmp_path / "x"), str(kills)]
    run = subprocess.run(argv, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.stdout.split() == [str(kills), "0"]
    assert all(path.name.endswith(".part") for path in tmp_path.iterdir() if path.name != "x")


def test_unfinished_files_of_some_names_are_removed(tmp_path: Path) -> None:
    long = "model-" + "x" * 60 + ".safetensors"
    mine = [f".{long[:40]}.{'0a' * 8}.part", f".config.json.{'ff' * 8}.part"]
    others = [f".other.json.{'0a' * 8}.part", ".config.json.12.part", "config.json", f"config.json.{'0a' * 8}.part"]
    for name in (*mine, *others):
        (tmp_path / name).touch()
    remove_part_files(tmp_path, [long, "config.json", "absent"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@posix
def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second one is refused, also a thread; what a killed one left behind is no writer."""
    folder = tmp_path / "a/b"
    (tmp_path / "a/b").mkdir(parents=True)
    (folder / ".jchop-lock").touch()
    refused = []

    def second() -> None:
        with pytest.raises(ValueError, match="b is being written by another call"), exclusive_folder(folder):
            raise AssertionError
        refused.append(True)

    with exclusive_folder(folder):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        second()
    with exclusive_folder(folder):
        assert len(refused) == 2
    assert not list(folder.iterdir())
    with pytest.raises(KeyError), exclusive_folder(tmp_path / "c/d"):
        raise KeyError
    assert not (tmp_path / "c").exists()
    (folder / ".jchop-lock").symlink_to(tmp_path / "else")
    with pytest.raises(OSError), exclusive_folder(folder):
        raise AssertionError
    assert not (tmp_path / "else").exists()
