"""Folders of several files: one writer at a time, whole or unfinished, and copies of other files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_case import each

import jchop as jc
from jchop import load_checkpoint, save_checkpoint
from jchop._checkpoints import writer
from jchop._checkpoints.writer import convert_checkpoint
from jchop.nn._shared.lora_rule import read_adapters, write_adapters

posix = pytest.mark.skipif(os.name != "posix", reason="locks, permissions and links of POSIX")
SHARD = 64


def tree(sign: int) -> dict[str, np.ndarray]:
    return {f"l{i}.weight": np.full((2, 8), sign * (i + 1), np.float32) for i in range(3)}


def is_tree(path: Path, sign: int) -> bool:
    found = load_checkpoint(path)
    return list(found) == list(tree(sign)) and all((found[name] == x).all() for name, x in tree(sign).items())


def save_tree(path: Path, sign: int) -> None:
    save_checkpoint(path, tree(sign), "plain", shard_bytes=SHARD)


def save_adapters(path: Path, sign: int) -> None:
    rule = jc.nn.LoraRule("*", rank=1, alpha=8.0 + sign)
    write_adapters(path, {"l": {"lora_a": np.ones((2, 1), "f4"), "lora_b": np.full((1, 2), sign, "f4"), "rule": rule}})


def are_adapters(path: Path, sign: int) -> bool:
    _, b, rule = read_adapters(path, ["l"], lambda path: (2, 2))["l"]
    return rule.alpha == 8.0 + sign and bool((b == sign).all())


@posix
@each("save, holds", [(save_tree, is_tree), (save_adapters, are_adapters)])
def test_a_second_writer_is_refused(
    tmp_path: Path, save: Callable[[Path, int], None], holds: Callable[[Path, int], bool], monkeypatch: Any
) -> None:
    """It comes while the first one writes: the folder is that of the first, and of the next one that has it alone."""
    said, whole = [], os.fsync

    def fsync(descriptor: int) -> None:
        if not said:
            said.append("")
            with pytest.raises(ValueError, match="is being written by another call") as error:
                save(tmp_path / "m", -1)
            said[0] = str(error.value)
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path / "m", 1)
    assert said[0] and holds(tmp_path / "m", 1)
    assert not [path for path in (tmp_path / "m").iterdir() if path.name.startswith(".")]
    shutil.rmtree(tmp_path / "m")
    save(tmp_path / "m", -1)
    assert holds(tmp_path / "m", -1)


@posix
def test_a_conversion_and_a_save_do_not_mix(tmp_path: Path) -> None:
    save_tree(tmp_path / "in", 1)
    target, refused = tmp_path / "out", []

    def meanwhile(name: str, done: int, total: int) -> None:
        with pytest.raises(ValueError, match="is being written by another call"):
            save_tree(target, -1)
        with pytest.raises(ValueError, match="is being written by another call"):
            convert_checkpoint(tmp_path / "in", target, "plain", shard_bytes=SHARD)
        refused.append(name)

    convert_checkpoint(tmp_path / "in", target, "plain", shard_bytes=SHARD, progress=meanwhile)
    assert len(refused) == 6 and is_tree(target, 1)
    with pytest.raises(ValueError, match="has tensors already"):
        save_tree(target, -1)
    assert is_tree(target, 1)


@each("save, holds, old", [(save_tree, is_tree, False), (save_adapters, are_adapters, True)])
def test_a_save_that_fails_leaves_what_it_found(
    tmp_path: Path, save: Callable[[Path, int], None], holds: Callable[[Path, int], bool], old: bool, monkeypatch: Any
) -> None:
    """Wherever the disk is full: no file of the save is left, and the files that were there are as they were."""
    path, whole = tmp_path / "m", os.fsync
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    if old:
        save(path, 1)
    for room in range(100):
        synced: set[int] = set()

        def fsync(descriptor: int, synced: set[int] = synced, room: int = room) -> None:
            synced.add(os.fstat(descriptor).st_ino)
            if len(synced) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            save(path, -1)
            break
        except OSError:
            assert sorted(one.name for one in path.iterdir() if not one.name.startswith("adapter_")) == ["notes.txt"]
            assert not old or holds(path, 1)
    assert 0 < room < 99 and holds(path, -1) and (path / "notes.txt").read_text() == "mine"


@each("shard_bytes", [SHARD, 1 << 20])
def test_an_unfinished_folder_is_no_checkpoint(tmp_path: Path, shard_bytes: int, monkeypatch: Any) -> None:
    """Nothing reads it, also if its only file is there; another save of the same names is wholly new."""

    write = writer._write_index_and_config

    def copy_folder(target: Path, *others: Any) -> None:
        write(target, *others)
        shutil.copytree(target, tmp_path / "killed")

    monkeypatch.setattr(writer, write.__name__, copy_folder)
    save_checkpoint(tmp_path / "m", tree(1), "plain", config={"a": 1}, shard_bytes=shard_bytes)
    monkeypatch.undo()
    assert is_tree(tmp_path / "m", 1) and list((tmp_path / "killed").glob("*.safetensors"))
    with pytest.raises(FileNotFoundError, match="of an unfinished run of jchop"):
        load_checkpoint(tmp_path / "killed")
    save_checkpoint(tmp_path / "killed", tree(-1), "plain", shard_bytes=shard_bytes)
    assert is_tree(tmp_path / "killed", -1)


class Killed(BaseException):
    """Ends a run as a signal does."""


@each("what", ["journal", "file"])
def test_a_damaged_run_does_not_go_on(tmp_path: Path, what: str) -> None:
    """An altered journal is none of this run, and a file that is gone is written again."""

    def kill(name: str, done: int, total: int) -> None:
        if done == total:
            raise Killed

    save_tree(tmp_path / "in", 1)
    with pytest.raises(Killed):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "plain", shard_bytes=SHARD, progress=kill)
    if what == "file":
        (tmp_path / "out/model-00002-of-00003.safetensors").unlink()
        assert convert_checkpoint(tmp_path / "in", tmp_path / "out", "plain", shard_bytes=SHARD)
        assert is_tree(tmp_path / "out", 1)
        return
    journal = tmp_path / "out/.jchop-unfinished.json"
    for text in (journal.read_text().replace("l1.weight", "l9.weight"), '{"run": 3, "done": 5}', "[" * 100000):
        journal.write_text(text)
        with pytest.raises(ValueError, match="unfinished run of other arrays or options"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", "plain", shard_bytes=SHARD)


# -- other files of a converted folder ---------------------------------------------------------------------------------


@posix
@each("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_links_out_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    save_tree(tmp_path / "in", 1)
    (tmp_path / "secret").write_text('{"key": "x"}')
    for link in ("../secret", str(tmp_path / "secret")):
        (tmp_path / "in" / name).symlink_to(link)
        with pytest.raises(ValueError, match=f"{name} is a link to a file outside of the folder"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", "plain")
        assert not (tmp_path / "out").exists()
        (tmp_path / "in" / name).unlink()


@posix
def test_copies_follow_links_within_a_folder_and_to_the_blobs_of_a_cache(tmp_path: Path) -> None:
    source, blobs = tmp_path / "models--a/snapshots/1", tmp_path / "models--a/blobs"
    save_tree(source, 1)
    blobs.mkdir()
    (blobs / "0f").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/0f")
    (source / "special.json").symlink_to("tokenizer.json")
    convert_checkpoint(source, tmp_path / "out", "plain")
    for name in ("tokenizer.json", "special.json"):
        assert (tmp_path / "out" / name).read_text() == "{}" and not (tmp_path / "out" / name).is_symlink()
    (source / "other.json").symlink_to("../../refs")
    (tmp_path / "models--a/refs").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is a link to a file outside"):
        convert_checkpoint(source, tmp_path / "out2", "plain")


@posix
@each("given, wanted", [(0o600, 0o600), (0o640, 0o640), (0o755, 0o644), (0o666, 0o644), (0o400, 0o400)])
def test_copies_have_no_more_permissions(tmp_path: Path, given: int, wanted: int) -> None:
    save_tree(tmp_path / "in", 1)
    (tmp_path / "in/tokenizer.json").write_text("{}")
    (tmp_path / "in/tokenizer.json").chmod(given)
    before = os.umask(0o022)
    try:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "plain")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out/tokenizer.json").stat().st_mode) == wanted
