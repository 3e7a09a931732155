"""An array as the tensors of a layout, and the metadata and the configuration that go with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jchop.storage._array import QArray
from jchop.storage._checkpoints.arrays import lengths, pieces
from jchop.storage._checkpoints.opened import OWN, PLAIN
from jchop.storage._checkpoints.row import Row, check
from jchop.storage._checkpoints.table import CONFIG, LAYOUTS, WEIGHT, Layout
from jchop.storage._quantize import dequantize
from jchop.storage._save import QARRAYS, description, parts_of

#: An array of a model and the bytes that it takes before it is written; it is made when it is needed.
Made = QArray | np.ndarray


@dataclass(frozen=True)
class Job:
    """An array that is to be written.

    Args:
        name: of the array.
        nbytes: its bytes, by which files are divided.
        make: gives the array, with NumPy leaves.
    """

    name: str
    nbytes: int
    make: Callable[[], Made]


def written_bytes(layout: str, nbytes: int, shape: tuple[int, ...], quantized: bool) -> int:
    """The bytes of an array in a layout, as far as its bytes and its shape show them."""
    return 4 * math.prod(shape) if quantized and layout == PLAIN else nbytes


@dataclass
class Record:
    """What is known of the arrays that were written, in JSON.

    Args:
        rows: the row and the facts of each quantized weight by name.
        plain: the names and the numbers of axes of other arrays.
        config: whether a configuration stands beside the tensors.
    """

    rows: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    config: bool = True


def tensors_of(layout: str, name: str, value: Made, exact: bool, record: Record) -> dict[str, np.ndarray]:
    """The tensors of an array; adds to the record.

    Raises:
        ValueError: if the layout has no form for the array; the message has a spec that it has.
    """
    if not isinstance(value, QArray) or layout == PLAIN:
        record.plain[name] = len(value.shape)
        return {name: dequantize(value) if isinstance(value, QArray) else value}
    if layout == OWN:
        record.rows[name] = [OWN, description(value)]
        return {part: np.asarray(leaf) for part, leaf in parts_of(name, value).items()}
    return _in_rows(LAYOUTS[layout], name, value, exact, record)


def _in_rows(layout: Layout, name: str, q: QArray, exact: bool, record: Record) -> dict[str, np.ndarray]:
    if not (layout.appends or name == WEIGHT or name.endswith(f".{WEIGHT}")):
        raise ValueError(
            f"{name!r} is quantized, and the layout {layout.name} has quantized arrays named '….weight' alone, of axes "
            f"(out, in). The layouts {OWN} and {PLAIN} hold any name; "
            "jchop.storage.save_checkpoint takes new names"
        )
    reasons = []
    for row in layout.rows:
        try:
            parts, facts = row.write(q, exact)
            if not (record.config or layout.records):
                _check_alone(row, parts, q)
        except ValueError as error:
            reasons.append(f"{row.name}: {error}")
            continue
        record.rows[name] = [row.name, facts]
        return {layout.stem(layout.owner(name)) + part: array for part, array in parts.items()}
    fits = ", ".join(dict.fromkeys(row.fits for row in layout.rows))
    raise ValueError(
        f"{name!r} of {q.spec} cannot be written in the layout {layout.name} ({'; '.join(dict.fromkeys(reasons))}). "
        f"The layouts {OWN} and {PLAIN} hold any array; {layout.name} holds, for example, {fits}"
    )


def _check_alone(row: Row, parts: dict[str, np.ndarray], q: QArray) -> None:
    """Refuses tensors that need a configuration to be read; ValueError."""
    has_own_groups = q.ndim != 2 or any(
        part.endswith("g_idx") for part in parts
    )  # the groups of gpt-oss, or of each column
    try:
        result = row.read(parts, {})
        same = has_own_groups or lengths(pieces(result)) == lengths(pieces(q))
        check(same and result.spec.element.bits == q.spec.element.bits, "its tensors do not show its groups and width")
    except ValueError as error:
        raise ValueError(f"{error}; a folder has a configuration, which says so") from None


def metadata_of(layout: str, record: Record) -> dict[str, str]:
    """The metadata of a file with the arrays of a record."""
    if layout == OWN:
        descriptions = {name: facts for name, (_, facts) in record.rows.items()}
        return {"format": "pt"} | ({QARRAYS: json.dumps(descriptions)} if descriptions else {})
    if layout not in LAYOUTS or not LAYOUTS[layout].records:
        return {"format": "pt"}
    records = {name: json.dumps(facts) for name, (_, facts) in record.rows.items()}
    records |= {name: json.dumps({"_type": "Tensor"}) for name in record.plain}
    return {"format": "pt", "tensor_names": json.dumps(list(records))} | records


def config_of(layout: str, config: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The configuration of a model with the arrays of a record.

    Raises:
        ValueError: if weights have several forms, and the layout has one for all.
    """
    base = {name: value for name, value in config.items() if name != CONFIG}
    if layout not in LAYOUTS or not record.rows:
        return base
    table_layout = LAYOUTS[layout]
    by_name = {row.name: row for row in table_layout.rows}
    modules = {table_layout.owner(name): (by_name[row], facts) for name, (row, facts) in record.rows.items()}
    plain = [name for name, axes in record.plain.items() if axes == 2 and name.endswith(f".{WEIGHT}")]
    return base | {CONFIG: table_layout.config(modules, [name.removesuffix(f".{WEIGHT}") for name in plain])}
