"""The digest of a result, by what a user sees of it: bits of arrays, fields of reports, points of figures."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop

FLOATS = ("float16", "bfloat16", "float32", "float64")
#: In place of a digest, where a package is missing.
NEEDED = "needs a package"
#: Fields that differ from run to run.
NO_VALUES = ("seconds", "versions")
NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+\.\d+(?:[eE][-+]?\d+)?")

class Digest:
    """Two hashes of one result: of its bits, and of what another processor gives too, three digits of its sizes."""

    def __init__(self) -> None:
        self.bits, self.rough = hashlib.sha256(), hashlib.sha256()
        self.types: set[type] = set()

    def both(self, text: str) -> None:
        self.bits.update(text.encode())
        self.rough.update(text.encode())

    def text(self, text: str) -> None:
        text = re.sub(r"0x[0-9a-f]{6,}|[\w./-]*\w\.py:\d+|/[\w./-]*/(?=[\w-])", "", text)
        self.bits.update(text.encode())
        self.rough.update(NUMBER.sub(lambda m: f"{float(m[0].replace('−', '-')):.1e}", text).encode())

    def number(self, value: float, digits: int = 17) -> None:
        self.bits.update(f"{value:.{digits}g};".encode())
        self.rough.update(f"{value:.2e};".encode() if abs(value) > 1e-6 else b"0;")

    def array(self, array: np.ndarray) -> None:
        self.both(f"{array.dtype}{array.shape}")
        if array.dtype.name in FLOATS:
            array = array.copy()
            with np.errstate(invalid="ignore"):
                array[np.isnan(array)] = np.nan
        self.bits.update(np.ascontiguousarray(array).tobytes())
        if array.dtype.kind not in "biufV" or not array.size:
            return
        with np.errstate(all="ignore"):
            values = np.abs(array.astype(np.float64)).ravel()
        finite = values[np.isfinite(values)]
        self.rough.update(f"{np.isnan(values).sum()} {np.isinf(values).sum()};".encode())
        weights = 1 + np.arange(finite.size) % 7 / 7
        with np.errstate(all="ignore"):
            sizes = (finite.max(), finite.mean(), (finite * weights).mean()) if finite.size else ()
        self.rough.update("".join(f"{size:.2e};" if size > 1e-6 else "0;" for size in sizes).encode())

    def add(self, value: Any, digits: int = 17) -> None:
        self.types.add(type(value))
        kind = type(value)
        if value is None or isinstance(value, bool | int | enum.Enum | np.dtype | Fraction):
            self.both(f"{value};")
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, bytes):
            self.both(value.hex())
        elif isinstance(value, float) and not isinstance(value, np.generic):
            self.number(value, digits)
        elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            self.array(np.asarray(jax.random.key_data(value)))
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self.array(np.array(value))
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self.text(f"{key}:")
                self.add(value[key], digits)
        elif isinstance(value, list | tuple):
            self.both(f"{len(value)}[")
            for item in value:
                self.add(item, digits)
        elif isinstance(value, set | frozenset):
            self.add(sorted(map(str, value)))
        elif isinstance(value, jchop.QArray):
            self.text(f"{value.spec} {value.shape} {value.dtype}")
            self.add(jax.tree.leaves(value))
        elif isinstance(value, Path):
            self.text(value.name)
        elif kind.__module__.startswith("torch") or hasattr(value, "state_dict"):
            self.tensor(value)
        elif kind.__name__ == "Figure":
            self.add(figure(value), 4)
        elif isinstance(value, type):
            self.types.add(value)
            self.both(value.__name__)
        elif inspect.isroutine(value):
            self.both("function")
        elif hasattr(value, "get_value") and "nnx" in kind.__module__ + str(kind.__mro__):
            self.add(value.get_value())
        elif re.match(r"flax\.nnx|jchop\.nn", kind.__module__) and hasattr(value, "__call__"):  # noqa: B004
            from flax import nnx

            self.add({"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(value))})
        elif isinstance(value, jchop.formats.ElementFormat | jchop.formats.ScaledFormat | jchop.Spec | jchop.MatmulSpec | jchop.Order):
            self.text(str(value))
        elif dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.name[0] != "_" and field.name not in NO_VALUES]
            self.add({name: getattr(value, name) for name in names}, min(digits, 6))
        elif hasattr(value, "as_dict"):
            self.add(value.as_dict(), 6)
        elif jax.tree.leaves(value) != [value]:
            self.add(jax.tree.leaves(value), digits)
        else:
            raise TypeError(f"no digest of {kind}")

    def tensor(self, value: Any) -> None:
        if hasattr(value, "state_dict") and not hasattr(value, "detach"):
            self.add(dict(value.state_dict()))
        elif hasattr(value, "detach"):
            value = value.detach()
            self.both(str(value.dtype))
            self.array((value if "bfloat16" not in str(value.dtype) else value.float()).numpy())
        else:
            self.text(str(value))


def floats(array: Any) -> list[float]:
    return [float(x) for x in np.ravel(np.ma.filled(array, -1.0))]


def figure(drawn: Any) -> list[Any]:
    """Titles, labels and data of the axes: points of lines, corners of bars, numbers of images."""
    parts: list[Any] = [drawn.get_suptitle()]
    for axes in drawn.axes:
        parts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()]
        parts += [floats(line.get_xydata()[:2000]) for line in axes.lines]
        parts += [floats(patch.get_extents().bounds if not hasattr(patch, "get_bbox") else patch.get_bbox().bounds) for patch in axes.patches]
        parts += [[*map(floats, (path.vertices for path in drawing.get_paths())), floats(drawing.get_offsets())] for drawing in axes.collections]
        parts += [floats(image.get_array()) for image in axes.images]
        parts += [text.get_text() for text in axes.texts]
    return parts


def outcome(run: Any, loose: bool) -> tuple[str, set[type]]:
    """The digest of a call, and the types that its result has. An error is digested by its type."""
    try:
        result = run()
    except ModuleNotFoundError:
        return NEEDED, set()
    except Exception as error:
        if "DIGESTS_SHOW" in os.environ:
            print("ERR", type(error).__name__, str(error)[:230].replace("\n", " "), flush=True)
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return f"error {kind.__name__}", set()
    digest = Digest()
    try:
        digest.add(result)
    except Exception as error:
        return f"no digest: {error}", digest.types
    rough = f"~{digest.rough.hexdigest()[:6]}" if loose else ""
    return digest.bits.hexdigest()[:10] + rough, digest.types
