"""Records of a calibration: its report, and the folder by which a run that was killed is continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jchop._common.files import distribution_version, write_atomically
from jchop._common.text import PictureReport, TableOrLine
from jchop._core.elementary.pairs import FloatPair
from jchop._quantized.program.call import batch_arguments, enumerate_batches
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop._storage import load, save
from jchop._storage._files.safetensors import TensorFile
from jchop.ptq._data.collect import InputSums


@dataclass(frozen=True)
class WeightRow:
    """The rounding of a weight: its method and its errors.

    Args:
        path: its path, joined by slashes, and the indexes of a layer of a stack in brackets.
        shape: its shape; for a stack the shape of one layer.
        spec: the spec of its rounding; empty if it is not rounded.
        bits: bits of codes and scales for each element; NaN if it is not rounded.
        method: the steps of its rounding; ``"nearest"`` without any; empty if it is not rounded.
        before: signal-to-noise ratio of its product on the data in dB, if each element of the given weight is rounded
            to nearest by itself. NaN if its product was not measured.
        after: the same of the rounded weight, and of its corrected bias.
        damping: the damping of the factorization, the largest of several matrices; 0 if there was none.
        tries: the number of factorizations, the most of several matrices.
        dead: the number of columns whose inputs were all zero.
        rows: the number of rows (tokens) of input.
        sparsity: the share of its numbers that are zero after the rounding; NaN if its product was not measured.
        bias: the path of the bias that corrects its mean error; empty if none does.
        note: why a step was left out, and other remarks; else empty.
    """

    path: str
    shape: tuple[int, ...]
    spec: str
    bits: float = math.nan
    method: str = "nearest"
    before: float = math.nan
    after: float = math.nan
    damping: float = 0.0
    tries: int = 0
    dead: int = 0
    rows: float = 0.0
    sparsity: float = math.nan
    bias: str = ""
    note: str = ""

    def _cells(self) -> tuple[str, ...]:
        """The row of the table."""
        name, bits = (self.path, "×".join(map(str, self.shape))), _format_number(self.bits, ".3g")
        ratios = (_format_number(ratio, ".2f") for ratio in (self.before, self.after))
        damping, dead = f"{self.damping:g}" if self.tries else "", str(self.dead) if self.rows else ""
        zeros = _format_number(self.sparsity, ".0%")
        return *name, bits, self.method, *ratios, damping, dead, zeros, self.bias, self.note


@dataclass(frozen=True)
class PtqReport(PictureReport):
    """The rows of a calibration; its ``str`` is a table.

    Args:
        weights: a `WeightRow` for each weight that reaches a product, and each rounded parameter, in the order of
            rounding. Rows without a measured product come last.
        passes: the number of runs of the data.
    """

    weights: tuple[WeightRow, ...]
    passes: int = 1

    _rows_field = "weights"

    _picture, _title = "draw_calibration", "Signal-to-noise ratio of products"
    _align, _optional = "<<><>>>>><<", ("dead", "zeros", "shape", "damping", "bias")

    def _parts(self) -> list[TableOrLine]:
        head = ("weight", "shape", "bits", "method", "nearest dB", "SNR dB", "damping", "dead", "zeros", "bias", "note")
        return [[head, *(row._cells() for row in self.weights)]]


def _format_number(value: float, format_spec: str) -> str:
    return "" if math.isnan(value) else format(value, format_spec)


_RUN_FILE, _SUMS_FILE = "run.json", "sums.safetensors"
_STAGE_FILE = "stage-{:05d}.safetensors"
_JOURNAL_FILES = re.compile(r"run\.json|sums\.safetensors|stage-\d+\.safetensors|\..*\.part")
_PAIR_STRUCTURE: Any = FloatPair(0, 0)  # type: ignore[arg-type]
#: The structure of sums over one trajectory.
_SUMS_STRUCTURE = jax.tree.structure(
    InputSums(_PAIR_STRUCTURE, None, _PAIR_STRUCTURE, None, _PAIR_STRUCTURE, _PAIR_STRUCTURE.hi, _PAIR_STRUCTURE)
)


class StageRecord(NamedTuple):
    """The changes by one stage.

    Args:
        rows: of the report.
        weights: the index of a parameter, the turn, and the leaves of its packed value.
        biases: the corrected biases by index.
    """

    rows: list[WeightRow]
    weights: list[tuple[int, tuple[int, ...], list[Any]]]
    biases: dict[int, Any]


def run_facts(
    low: QuantizedFunction, params: Any, batches: Iterable[Any], steps: Any, key: Array | None,
    memory: int | None = None,
) -> tuple[dict[str, str], Any]:  # fmt: skip
    """Digests and texts by name of all that a run depends on; and the last batch. Runs once through the batches."""
    batch_digest, last_batch, program_digest = hashlib.sha256(), None, hashlib.sha256()
    for batch_number, batch in enumerate_batches(batches):
        _update_digest(batch_digest, batch)
        if batch_number == 1:
            program, _ = low.traced(params, *batch_arguments(batch))
            program_digest.update(re.sub(r"0x[0-9a-f]+", "", str(program.plan.jaxpr)).encode())
            for plan in (program.plan, *(plan for step in program.plan.walk() for plan in step.inner)):
                _update_digest(program_digest, list(plan.consts))
        last_batch = batch
    param_digest = hashlib.sha256()
    _update_digest(param_digest, params)
    facts = {
        "versions": f"jchop {distribution_version('jchop') or '(not installed)'}, jax {jax.__version__}",
        "rules": repr(low.rules),
        "steps": repr(steps),
        "memory": str(memory),
        "key": "none" if key is None else str(np.asarray(jax.random.key_data(key)).tolist()),
        "function": program_digest.hexdigest(),
        "params": param_digest.hexdigest(),
        "batches": batch_digest.hexdigest(),
    }
    return facts, last_batch


def _update_digest(digest: Any, tree: Any) -> None:
    """Add a pytree to a digest: its structure, and the bytes of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    digest.update(re.sub(r"0x[0-9a-f]+", "", str(structure)).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
        else:
            digest.update(f"{type(leaf).__name__} {leaf!r}".encode())


class Journal:
    """The folder of a run.

    Args:
        folder: its path; created if it does not exist.
        facts: the facts that the run depends on.
        last_batch: the last batch.

    Raises:
        ValueError: if the folder has a run that depends on something else, or other files.
        OSError: if it cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], facts: Mapping[str, str], last_batch: Any) -> None:
        self.folder, self.last_batch = Path(folder), last_batch
        self.folder.mkdir(exist_ok=True)
        path = self.folder / _RUN_FILE
        names = sorted(p.name for p in self.folder.iterdir())
        other_files = [name for name in names if not _JOURNAL_FILES.fullmatch(name)]
        if other_files:
            raise ValueError(f"resume={str(folder)!r} has files of something else, such as {other_files[0]!r}")
        self._facts, self._files = facts, {}
        if not any(name.endswith(".safetensors") for name in names):  # nothing is done yet
            self._write()
        prior = _read_run_facts(path)
        self._files = prior.pop("files")
        differences = sorted(name for name in {*prior, *facts} if prior.get(name) != facts.get(name))
        if len(differences) > 1 and "function" in differences:
            differences.remove("function")  # its digest is of a trace for parameters and data, and follows them
        if differences:
            raise ValueError(
                f"resume={str(folder)!r} holds a run with other {' and '.join(differences)}; it continues with the "
                "same alone. Give the old ones, another folder, or delete this one to begin anew"
            )

    def _write(self) -> None:
        """Write the facts that the run depends on, and the digests of its files."""
        text = json.dumps({**self._facts, "files": self._files}, indent=1)
        write_atomically(self.folder / _RUN_FILE, lambda file: file.write(text.encode()))

    def _save_file(self, name: str, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
        """Write a file atomically, and then its digest."""
        save(self.folder / name, arrays, metadata=metadata)
        self._files[name] = _file_digest(self.folder / name)
        self._write()

    def _has_file(self, name: str) -> bool:
        """Whether a file has the digest that it was written with; the caller writes another one again."""
        path = self.folder / name
        return name in self._files and path.is_file() and _file_digest(path) == self._files[name]

    def load_sums(self) -> dict[int, InputSums] | None:
        """The sums of a run that rounds all weights at once, if its pass is done."""
        if not self._has_file(_SUMS_FILE):
            return None
        parts: dict[int, dict[int, Any]] = {}  # by parameter, then by the place in its sums
        for name, array in load(self.folder / _SUMS_FILE).items():
            leaf, part_index = map(int, name.split("."))
            parts.setdefault(leaf, {})[part_index] = array
        return {
            leaf: jax.tree.unflatten(_SUMS_STRUCTURE, [leaf_parts[i] for i in sorted(leaf_parts)])
            for leaf, leaf_parts in sorted(parts.items())
        }

    def save_sums(self, sums: Mapping[int, InputSums]) -> None:
        """Write the sums of the pass over the data."""
        leaves = {leaf: jax.tree.leaves(leaf_sums) for leaf, leaf_sums in sums.items()}
        self._save_file(
            _SUMS_FILE, {f"{i}.{j}": jnp.asarray(x) for i, some in leaves.items() for j, x in enumerate(some)}
        )

    def load_stage(self, stage_index: int) -> StageRecord | None:
        """The changes by a stage, if it is done."""
        path = self.folder / _STAGE_FILE.format(stage_index)
        if not self._has_file(path.name):
            return None
        with TensorFile(path) as file:
            record = json.loads(file.metadata["ptq"])
        arrays = load(path)
        rows = [WeightRow(**{**row, "shape": tuple(row["shape"])}) for row in record["rows"]]
        weights = [
            (leaf, tuple(turn), [arrays[f"weight{i}.{j}"] for j in range(array_count)])
            for i, (leaf, turn, array_count) in enumerate(record["weights"])
        ]
        return StageRecord(rows, weights, {leaf: arrays[f"bias{leaf}"] for leaf in record["biases"]})

    def save_stage(self, stage_index: int, record: StageRecord) -> None:
        """Write the changes by a stage, atomically."""
        arrays: dict[str, Any] = {f"bias{leaf}": array for leaf, array in record.biases.items()}
        for i, (_, _, leaves) in enumerate(record.weights):
            arrays |= {f"weight{i}.{j}": leaf for j, leaf in enumerate(leaves)}
        facts = {
            "rows": [dataclasses.asdict(row) for row in record.rows],
            "weights": [(leaf, turn, len(leaves)) for leaf, turn, leaves in record.weights],
            "biases": list(record.biases),
        }
        self._save_file(_STAGE_FILE.format(stage_index), arrays, {"ptq": json.dumps(facts)})


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_run_facts(path: Path) -> dict[str, Any]:
    """The facts of a run, and the digests of its files."""
    problem = "it has no facts of a run and digests of its files"
    try:
        facts: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError) as error:
        facts, problem = None, str(error)
    if not isinstance(facts, dict) or not isinstance(facts.get("files"), dict):
        raise ValueError(f"{path} is damaged ({problem}); delete the folder to begin anew")
    return facts


def discard_run(folder: Path) -> None:
    """Remove the files of a run, and the folder if there is nothing else in it."""
    for path in list(folder.iterdir()):
        if _JOURNAL_FILES.fullmatch(path.name):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
