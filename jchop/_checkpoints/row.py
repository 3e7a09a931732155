"""`LayoutRow`: one way to store a quantized weight in named tensors, as two pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jchop.storage._array import QArray
from jchop.storage._files.json import short_text
from jchop.storage._files.safetensors import TensorEntry

#: The tensors of a weight, by the end of their names: ``weight_packed``, ``weight_scale``.
TensorParts = Mapping[str, np.ndarray]
#: The dtypes and shapes of these tensors.
TensorEntries = Mapping[str, TensorEntry]
#: Gives the shape of a weight from its entries; None if they are of another row.
LookForShape = Callable[[TensorEntries], tuple[int, ...] | None]
#: The facts that are not in the tensors: the ``quantization_config`` of a model, or a record of the weight.
LayoutFacts = Mapping[str, Any]


@dataclass(frozen=True)
class LayoutRow:
    """One way to store a weight.

    Args:
        name: of the format, as its definition has it.
        parts: the ends of the names of all tensors that it must have. The first is the anchor, which shows that a
            weight is stored in this way.
        optional: the ends of the names of tensors that it may have.
        look: gives the shape of the weight from its entries; None if they are of another row.
        read: makes the QArray. It raises a ValueError for tensors that contradict each other.
        write: makes the tensors and the facts. It raises a ValueError for a QArray that has no such form.
        fits: a spec that can be written, and for which arrays; for errors.
        peek: a short tensor and a function that finds the shape of the weight in it, if the entries do not show it.
    """

    name: str
    parts: tuple[str, ...]
    look: LookForShape
    read: Callable[[TensorParts, LayoutFacts], QArray]
    write: Callable[[QArray, bool], tuple[dict[str, np.ndarray], dict[str, Any]]]
    fits: str
    optional: tuple[str, ...] = ()
    peek: tuple[str, Callable[[np.ndarray], tuple[int, ...]]] | None = None

    @property
    def anchor(self) -> str:
        """The end of the name of the tensor that shows that a weight is stored in this way."""
        return self.parts[0]


#: The dtypes of tensors in layouts.
BYTE, INT8, WORD = np.dtype(np.uint8), np.dtype(np.int8), np.dtype("<i4")
FLOAT4, FLOAT8 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)
EXPONENT8 = np.dtype(ml_dtypes.float8_e8m0fnu)


def is_matrix(tensor: TensorEntry | np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Whether a tensor has two axes, neither of them empty, and a dtype, if one is given."""
    return len(tensor.shape) == 2 and min(tensor.shape) > 0 and (dtype is None or tensor.dtype == dtype)


def look_for_matrix(part: str, dtype: np.dtype | None = None, each: int = 1, **beside: np.dtype) -> LookForShape:
    """What gives the shape of a weight that is a matrix in one tensor.

    Args:
        part: the tensor.
        dtype: of it. Default: any.
        each: how many numbers of a row are in one of its elements. Default 1.
        beside: the dtypes of other tensors.
    """

    def look(entries: TensorEntries) -> tuple[int, ...] | None:
        fits = is_matrix(entries[part], dtype) and all(entries[name].dtype == kind for name, kind in beside.items())
        rows, columns = entries[part].shape if fits else (0, 0)
        return (rows, each * columns) if fits else None

    return look


def fact_field(facts: LayoutFacts, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of the facts; ValueError if it has another type. A missing one, or null, is the default."""
    value = facts.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={short_text(value)} has a type that is not allowed there")
    return value
