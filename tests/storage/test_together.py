"""Files that several processes write together: the bytes of one process, restored by other numbers of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from distributed.test_processes import run_processes, start_processes
from further import Further
from jax.sharding import AxisType, Mesh
from storage import together

import jchop as jc
from jchop._storage._files.safetensors import TensorFile, contiguous_runs

further = Further()

SCRIPT = Path(together.__file__)
PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")


def mesh_of(rows: int, columns: int) -> Mesh:
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("process", "device"), axis_types=(AxisType.Auto,) * 2)


@further.first
def runs_are_the_part(rng: np.random.Generator) -> None:
    for shape in ((), (5,), (3, 4), (2, 3, 4), (4, 0, 2), (1, 6)):
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        for _ in range(8):
            ends = [sorted(map(int, rng.integers(0, n + 1, 2))) for n in shape]
            index = tuple(slice(*each) for each in ends)
            found = [at for start, count in contiguous_runs(shape, index) for at in range(start, start + count)]
            assert found == numbers[index].reshape(-1).tolist()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
def test_a_file_is_restored_on_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device gets its part, and no more than one part is read at a time."""
    path = tmp_path / "tree.safetensors"
    jc.save(path, together.whole())
    read, most = TensorFile.read, []

    def counted(self: TensorFile, name: str, *more: int) -> np.ndarray:
        found = read(self, name, *more)
        most.append((name, found.nbytes))
        return found

    monkeypatch.setattr(TensorFile, "read", counted)
    for rows, columns in ((2, 4), (8, 1)):
        wanted = together.like(mesh_of(rows, columns))
        together.check(jc.load(path, like=wanted), wanted)
    largest = max(size for name, size in most if name in ("rows", "columns"))
    assert largest == 4 * np.prod(together.SHAPE) // 8
    wrong = wanted | {"rows": jax.ShapeDtypeStruct((8, 64), np.float32, sharding=wanted["rows"].sharding)}
    with pytest.raises(ValueError, match="'rows' is float32"):
        jc.load(path, like=wrong)


def file_of_one(folder: Path, processes: int, devices: int, turns: str) -> None:
    run_processes(SCRIPT, processes, str(devices), str(folder), turns)
    jc.save(folder / "one.safetensors", together.whole(), metadata={"by": "all"})
    assert (folder / "tree.safetensors").read_bytes() == (folder / "one.safetensors").read_bytes()
    assert not list(folder.glob(".*.part"))
    wanted = together.like(mesh_of(1, 8))
    together.check(jc.load(folder / "tree.safetensors", like=wanted), wanted)


def two_processes(folder: Path) -> None:
    file_of_one(folder, 2, 2, "save,load,fail")


def other_numbers_of_processes(folder: Path) -> None:
    """And another library's checkpoints."""
    pytest.importorskip("orbax.checkpoint")
    file_of_one(folder, 4, 1, "save,load,fail,orbax_save,orbax_load")
    run_processes(SCRIPT, 2, "2", str(folder), "load,orbax_load")
    run_processes(SCRIPT, 1, "8", str(folder), "load,orbax_load")


def less_memory_than_the_tree(folder: Path) -> None:
    said = run_processes(SCRIPT, 4, "1", str(folder), "large")
    for text in said:
        peak, size = text.split("PEAK")[1].split()[:2]
        print(f"peak {int(peak) / int(size):.2f} of the tree")
        assert int(peak) < int(size) * 3 / 4


def one_is_lost(killed: int, folder: Path) -> None:
    """The last whole file is left."""
    path = folder / "tree.safetensors"
    for turn in range(2):
        path.unlink(missing_ok=True)
        started = start_processes(SCRIPT, 2, "2", str(folder), "forever")
        try:
            while not path.exists():
                assert all(each.poll() is None for each in started)
                time.sleep(0.01)
            time.sleep(0.1 + 0.037 * turn)  # in another part of a save
            started[killed].kill()
            started[killed].wait()
            time.sleep(0.3)
            with TensorFile(path) as file:
                found = {float(number) for name in file.entries for number in np.unique(file.read(name))}
            assert len(found) == 1, f"the file is torn: {found}"
        finally:
            for each in started:
                each.kill()
                each.communicate()


SLOW = {
    "other numbers of processes": other_numbers_of_processes,
    "less memory than the tree": less_memory_than_the_tree,
    "the first is lost": partial(one_is_lost, 0),
    "the second is lost": partial(one_is_lost, 1),
}


@further
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(two_processes, id="two processes"),
        *(
            pytest.param(check, id=name, marks=[pytest.mark.slow] + [PROC] * (name == "less memory than the tree"))
            for name, check in SLOW.items()
        ),
    ],
)
def processes_write_the_file_of_one(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


test_further = further.test()
