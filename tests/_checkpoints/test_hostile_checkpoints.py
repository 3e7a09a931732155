"""Damaged checkpoints of every layout: a result or an error of one line; no crash, no hang, little memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_layouts import CASES, gguf_file, pack_file, words
from each_case import each
from hostile_checkpoints import search

from jchop import load_checkpoint
from jchop._checkpoints.checkpoint import open_checkpoint
from jchop._storage._files.safetensors import ShardFiles

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="timers and limits of POSIX, /proc of Linux")
@pytest.mark.parametrize("count", [400, pytest.param(8000, marks=pytest.mark.slow)])
def test_damaged_checkpoints(tmp_path: Path, count: int) -> None:
    """Some here, and thousands by a process of little memory."""
    if count == 400:
        assert search(tmp_path, 400) == []
        return
    argv = [sys.executable, str(ROOT / "tests/hostile_checkpoints.py"), str(tmp_path), str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "0 faults", run.stdout[-4000:]


#: Values of another type or size than a field has.
ODD = (10**400, -(10**400), 1e308, 1 << 63, -1, None, "x", [], {}, [10**400])


def _altered(value: Any) -> Iterator[Any]:
    """A JSON value with each of its parts replaced by each of the odd values."""
    yield from ODD
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        for other in _altered(value[key]):
            changed = value.copy()
            changed[key] = other
            yield changed


def _refused(path: Path, layout: str) -> None:
    try:
        load_checkpoint(path, layout)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("nf4 double", "torchao int4") else pytest.param(name, marks=pytest.mark.slow)
        for name, case in CASES.items()
        if case.layout in ("bitsandbytes", "torchao")
    ],
)
def test_records_of_any_value(tmp_path: Path, name: str) -> None:
    """The record of a weight, in its metadata or its quant_state, with anything in place of each field."""
    case = CASES[name]
    tensors, path = case.make(np.random.default_rng(0)), tmp_path / "x.safetensors"
    for key, text in (case.metadata or {}).items():
        for changed in _altered(json.loads(text)):
            path.write_bytes(pack_file(tensors, case.metadata | {key: json.dumps(changed)}))
            _refused(path, case.layout)
    for key in (key for key in tensors if "quant_state" in key):
        for changed in _altered(json.loads(tensors[key].tobytes())):
            record = np.frombuffer(json.dumps(changed).encode(), np.uint8)
            path.write_bytes(pack_file(tensors | {key: record}, case.metadata))
            _refused(path, case.layout)


@pytest.mark.skipif(
    sys.platform != "linux" or Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1",
    reason="sparse files, and a system that does not promise memory that it has not",
)
def test_tensors_of_a_terabyte(tmp_path: Path) -> None:
    """A sparse file is as long as it says, and its tensor does not fit in memory."""
    count = 1 << 41
    for name, (kind, size) in {"plain": (0, 4 * count), "blocks": (8, count // 32 * 34)}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gguf_file({"w": (kind, (count // 32, 32), b"")}, b"", 0))
        os.truncate(path, path.stat().st_size // 32 * 32 + size)
        with pytest.raises(ValueError, match=r"tensor 'w' of \d+ bytes does not fit in memory"):
            load_checkpoint(path)


# -- what grows with the number of names -------------------------------------------------------------------------------


class Counted(dict[str, Any]):
    """A dict that counts how many of its keys are visited."""

    visits = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            Counted.visits += 1
            yield key


@each("names", ["{}_blocks", "{}.blocks", "{}.weight.quant_state.bitsandbytes__nf4", "{}.weight_packed", "{}.qweight"])
def test_names_are_visited_a_few_times(tmp_path: Path, names: str, monkeypatch: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack_file({names.format(i): np.zeros(0, np.uint8) for i in range(200)}, {}))
    opened = ShardFiles.__init__

    def counted(self: ShardFiles, path: Path) -> None:
        opened(self, path)
        self.entries = Counted(self.entries)

    monkeypatch.setattr(ShardFiles, "__init__", counted)
    Counted.visits = 0
    with contextlib.suppress(ValueError), open_checkpoint(path, "auto"):
        pass
    assert Counted.visits <= 20 * 200


@each("targets", [["w{}"], ["x{}"]])
def test_groups_are_visited_once(tmp_path: Path, targets: list[str]) -> None:
    """Calls while many weights are read under as many groups, of which one, or none, names each of them."""

    def calls(count: int) -> int:
        tensors: dict[str, np.ndarray] = {}
        groups = {}
        for i in range(count):
            parts = {"packed": words(np.ones((1, 8), np.int64), 4), "scale": np.ones((1, 1), np.float32)}
            parts["shape"] = np.array([1, 8])
            tensors |= {f"w{i}.weight_{end}": part for end, part in parts.items()}
            groups[f"g{i}"] = {"targets": [one.format(i) for one in targets], "weights": {"num_bits": 4}}
        (tmp_path / "model.safetensors").write_bytes(pack_file(tensors, {}))
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        seen = [0]

        def count_call(frame: Any, event: str, arg: Any) -> None:
            seen[0] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            with open_checkpoint(tmp_path, "auto") as source:
                found = [source.read(name) for name in source.items]
        finally:
            sys.setprofile(before)
        assert [q.shape for q in found] == [(1, 8)] * count
        return seen[0]

    calls(4)
    assert calls(80) < 2.5 * calls(40)


def test_too_many_groups_that_name_no_module(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    case = CASES["int4 symmetric"]
    path.write_bytes(pack_file(case.make(np.random.default_rng(0)), {}))
    groups = {str(i): {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": i}} for i in range(300)}
    for own in (True, False):
        groups["w"] = {"targets": ["w"] if own else ["re:.*"], "weights": {"num_bits": 4, "group_size": 32}}
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        if own:
            assert load_checkpoint(tmp_path)["w.weight"].shape
            continue
        with pytest.raises(ValueError, match="has 300 different groups, and none of them names 'w'"):
            load_checkpoint(tmp_path)
