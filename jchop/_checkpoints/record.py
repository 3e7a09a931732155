"""An array as the tensors of a layout, and the metadata and the configuration that go with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import group_lengths, pieces
from jchop._checkpoints.checkpoint import OWN_LAYOUT, PLAIN_LAYOUT
from jchop._checkpoints.row import LayoutRow, check
from jchop._checkpoints.table import CONFIG_FIELD, LAYOUTS, WEIGHT_NAME, CheckpointLayout
from jchop.storage._array import QArray
from jchop.storage._quantize import dequantize
from jchop.storage._save import QARRAYS_KEY, qarray_description, qarray_tensors

#: An array of a model and the bytes that it takes before it is written; it is made when it is needed.
ModelArray = QArray | np.ndarray


@dataclass(frozen=True)
class WriteJob:
    """An array that is to be written.

    Args:
        name: of the array.
        nbytes: its bytes, by which files are divided.
        make: gives the array, with NumPy leaves.
    """

    name: str
    nbytes: int
    make: Callable[[], ModelArray]


def layout_bytes(layout: str, nbytes: int, shape: tuple[int, ...], quantized: bool) -> int:
    """The bytes of an array in a layout, as far as its bytes and its shape show them."""
    return 4 * math.prod(shape) if quantized and layout == PLAIN_LAYOUT else nbytes


@dataclass
class LayoutRecord:
    """What is known of the arrays that were written, in JSON.

    Args:
        rows: the row and the facts of each quantized weight by name.
        plain: the names and the numbers of axes of other arrays.
        config: whether a configuration stands beside the tensors.
    """

    rows: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    config: bool = True


def layout_tensors(
    layout: str, name: str, value: ModelArray, exact: bool, record: LayoutRecord
) -> dict[str, np.ndarray]:
    """The tensors of an array; adds to the record.

    Raises:
        ValueError: if the layout has no form for the array; the message has a spec that it has.
    """
    if not isinstance(value, QArray) or layout == PLAIN_LAYOUT:
        record.plain[name] = len(value.shape)
        return {name: dequantize(value) if isinstance(value, QArray) else value}
    if layout == OWN_LAYOUT:
        record.rows[name] = [OWN_LAYOUT, qarray_description(value)]
        return {part: np.asarray(leaf) for part, leaf in qarray_tensors(name, value).items()}
    return _tensors_in_rows(LAYOUTS[layout], name, value, exact, record)


def _tensors_in_rows(
    layout: CheckpointLayout, name: str, q: QArray, exact: bool, record: LayoutRecord
) -> dict[str, np.ndarray]:
    if not (layout.appends or name == WEIGHT_NAME or name.endswith(f".{WEIGHT_NAME}")):
        raise ValueError(
            f"{name!r} is quantized, and the layout {layout.name} has quantized arrays named '….weight' alone, of axes "
            f"(out, in). The layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold any name; "
            "jchop.storage.save_checkpoint takes new names"
        )
    reasons = []
    for row in layout.rows:
        try:
            parts, facts = row.write(q, exact)
            if not (record.config or layout.records):
                _check_without_config(row, parts, q)
        except ValueError as error:
            reasons.append(f"{row.name}: {error}")
            continue
        record.rows[name] = [row.name, facts]
        return {layout.stem(layout.owner(name)) + part: array for part, array in parts.items()}
    fits = ", ".join(dict.fromkeys(row.fits for row in layout.rows))
    raise ValueError(
        f"{name!r} of {q.spec} cannot be written in the layout {layout.name} ({'; '.join(dict.fromkeys(reasons))}). "
        f"The layouts {OWN_LAYOUT} and {PLAIN_LAYOUT} hold any array; {layout.name} holds, for example, {fits}"
    )


def _check_without_config(row: LayoutRow, parts: dict[str, np.ndarray], q: QArray) -> None:
    """Refuses tensors that need a configuration to be read; ValueError."""
    has_own_groups = q.ndim != 2 or any(
        part.endswith("g_idx") for part in parts
    )  # the groups of gpt-oss, or of each column
    try:
        result = row.read(parts, {})
        same = has_own_groups or group_lengths(pieces(result)) == group_lengths(pieces(q))
        check(same and result.spec.element.bits == q.spec.element.bits, "its tensors do not show its groups and width")
    except ValueError as error:
        raise ValueError(f"{error}; a folder has a configuration, which says so") from None


def layout_metadata(layout: str, record: LayoutRecord) -> dict[str, str]:
    """The metadata of a file with the arrays of a record."""
    if layout == OWN_LAYOUT:
        descriptions = {name: facts for name, (_, facts) in record.rows.items()}
        return {"format": "pt"} | ({QARRAYS_KEY: json.dumps(descriptions)} if descriptions else {})
    if layout not in LAYOUTS or not LAYOUTS[layout].records:
        return {"format": "pt"}
    records = {name: json.dumps(facts) for name, (_, facts) in record.rows.items()}
    records |= {name: json.dumps({"_type": "Tensor"}) for name in record.plain}
    return {"format": "pt", "tensor_names": json.dumps(list(records))} | records


def layout_config(layout: str, config: Mapping[str, Any], record: LayoutRecord) -> dict[str, Any]:
    """The configuration of a model with the arrays of a record.

    Raises:
        ValueError: if weights have several forms, and the layout has one for all.
    """
    base = {name: value for name, value in config.items() if name != CONFIG_FIELD}
    if layout not in LAYOUTS or not record.rows:
        return base
    table_layout = LAYOUTS[layout]
    by_name = {row.name: row for row in table_layout.rows}
    modules = {table_layout.owner(name): (by_name[row], facts) for name, (row, facts) in record.rows.items()}
    plain = [name for name, axes in record.plain.items() if axes == 2 and name.endswith(f".{WEIGHT_NAME}")]
    return base | {CONFIG_FIELD: table_layout.config(modules, [name.removesuffix(f".{WEIGHT_NAME}") for name in plain])}
