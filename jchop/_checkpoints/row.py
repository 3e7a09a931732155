"""`LayoutRow`: one way to store a quantized weight in named tensors, as two pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jchop.storage._array import QArray
from jchop.storage._files.json import short_text
from jchop.storage._files.safetensors import TensorEntry

#: The tensors of a weight, by the end of their names: ``weight_packed``, ``weight_scale``.
TensorParts = Mapping[str, np.ndarray]
#: The dtypes and shapes of these tensors.
TensorEntries = Mapping[str, TensorEntry]
#: The facts that are not in the tensors: the ``quantization_config`` of a model, or a record of the weight.
LayoutFacts = Mapping[str, Any]


@dataclass(frozen=True)
class LayoutRow:
    """One way to store a weight.

    Args:
        name: of the format, as its definition has it.
        anchor: the end of the name of the tensor that shows that a weight is stored in this way.
        parts: the ends of the names of all tensors that it must have.
        optional: the ends of the names of tensors that it may have.
        look: gives the shape of the weight from its entries; None if they are of another row.
        read: makes the QArray. It raises a ValueError for tensors that contradict each other.
        write: makes the tensors and the facts. It raises a ValueError for a QArray that has no such form.
        fits: a spec that can be written, and for which arrays; for errors.
        peek: a short tensor and a function that finds the shape of the weight in it, if the entries do not show it.
    """

    name: str
    anchor: str
    parts: tuple[str, ...]
    look: Callable[[TensorEntries], tuple[int, ...] | None]
    read: Callable[[TensorParts, LayoutFacts], QArray]
    write: Callable[[QArray, bool], tuple[dict[str, np.ndarray], dict[str, Any]]]
    fits: str
    optional: tuple[str, ...] = ()
    peek: tuple[str, Callable[[np.ndarray], tuple[int, ...]]] | None = None


def check(holds: bool, message: str) -> None:
    """Raises ValueError with `message` if something does not hold."""
    if not holds:
        raise ValueError(message)


def is_matrix(entry: TensorEntry) -> bool:
    """Whether a tensor has two axes, neither of them empty."""
    return len(entry.shape) == 2 and min(entry.shape) > 0


def fact_field(facts: LayoutFacts, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of the facts; ValueError if it has another type. A missing one, or null, is the default."""
    value = facts.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={short_text(value)} has a type that is not allowed there")
    return value
