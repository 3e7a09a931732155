"""The view of a `QArray` in a notebook: facts, a heat map of its numbers, a histogram of its scales.

Codes are never shown: packed bytes look like data, and mean nothing without their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jchop._common import html
from jchop._common.settings import always_jit
from jchop._storage._codes import codes_at_ends, decode_qarray
from jchop.formats import ScaledFormat

#: The most rows and columns of a heat map, and bars of a histogram.
_ROWS, _COLUMNS, _BARS = 48, 96, 24


_compiled_decode = always_jit(decode_qarray, static_argnums=0)


def qarray_title(q: Any) -> str:
    """The first line: format, shape, and bits per element.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> qarray_title(jc.quantize(jnp.ones((2, 64)), "nf4"))
        'QArray nf4 [2, 64], 4.5 bits per element'
    """
    shape = ", ".join(map(str, q.shape))
    bits = "" if math.isnan(q.bits_per_element) else f", {q.bits_per_element:.4g} bits per element"
    text = str(q.spec)
    spec = text if len(text) <= 80 else f"{text[:60]}..."  # a codebook names each of its levels
    return f"QArray {spec} [{shape}]{bits}"


def qarray_facts(q: Any) -> list[tuple[str, str]]:
    """Facts that need no numbers, by name: dtype, bytes, the share of float32's."""
    wide = 4 * math.prod(q.shape)
    less = f" ({wide / q.nbytes:.3g}× less than float32)" if q.nbytes and wide else ""
    rows = [("dtype", np.dtype(q.dtype).name), ("stored", f"{q.nbytes:,} bytes{less}")]
    if q.spec.scaled is not None:
        groups = " + ".join("×".join(map(str, leaf.shape)) or "1" for leaf in jax.tree.leaves(q.scale))
        rows.append(("scales", f"{groups}, {q.spec.scaled.scale}"))
    return rows


def _has_readable_numbers(q: Any) -> bool:
    """Whether all leaves are arrays that can be read here: no tracers, shapes, gradients, deleted or remote arrays."""
    for leaf in jax.tree.leaves(q):
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
            return False
        if leaf.dtype == jax.dtypes.float0:  # of codes in a gradient
            return False
        if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
            return False
    return bool(math.prod(q.shape))


def _numbers_as_float32(q: Any) -> np.ndarray:
    # As float32, also numbers of a wider carrier: a picture does not show the difference.
    with jax.enable_x64(True):
        return np.asarray(_compiled_decode(q.form(np.float32), q.qvalue, q.scale, q.zero_point, q.places))


def _number_shares(q: Any, numbers: np.ndarray) -> list[tuple[str, str]]:
    count = numbers.size
    rows = [("zero", f"{100 * (count - np.count_nonzero(numbers)) / count:.3g} %")]
    at_ends = codes_at_ends(q)
    if at_ends is not None:
        rows.append(("at the ends of the range", f"{100 * np.count_nonzero(at_ends) / count:.3g} %"))
    nonfinite = count - np.count_nonzero(np.isfinite(numbers))
    return rows + ([("infinite or NaN", str(nonfinite))] if nonfinite else [])


def _heat_map_cells(numbers: np.ndarray) -> np.ndarray:
    """A matrix of at most _ROWS by _COLUMNS: the number of largest magnitude of each block, with its sign.

    All axes but the last are joined to one.
    """
    matrix = numbers.reshape(-1, numbers.shape[-1]) if numbers.ndim else numbers.reshape(1, 1)
    by_rows = _block_extremes(matrix, -(-matrix.shape[0] // _ROWS))  # rows first: NumPy reduces that axis faster
    return _block_extremes(by_rows.T, -(-matrix.shape[1] // _COLUMNS)).T


def _block_extremes(matrix: np.ndarray, size: int) -> np.ndarray:
    """Of every `size` rows, the numbers of largest magnitude, with their signs; NaN counts as the largest."""
    if size == 1:
        return matrix
    whole = len(matrix) // size * size
    parts = [matrix[:whole].reshape(-1, size, matrix.shape[1]), matrix[None, whole:]]
    parts = [part for part in parts if part.size]
    high, low = (np.concatenate([f(part, axis=1) for part in parts]) for f in (np.max, np.min))
    return np.where(np.abs(low) > np.abs(high), low, high)


def _scale_magnitudes(q: Any, scale_qarray: Callable[[ScaledFormat, ScaledFormat], Any]) -> np.ndarray | None:
    """The magnitudes of the scales of the groups; None without scales, or if there is one."""
    fmt = q.spec.scaled
    if fmt is None:
        return None
    first = q.scale[0] if isinstance(q.scale, tuple) else q.scale
    if math.prod(first.shape) < 2:
        return None
    if isinstance(fmt.scale, ScaledFormat):
        return np.abs(_numbers_as_float32(scale_qarray(fmt, fmt.scale))).ravel()
    scales = np.asarray(first)
    if scales.dtype.name in ("float32", "float64", "float16", "bfloat16"):
        return np.abs(scales.astype(np.float64)).ravel()
    unsigned = scales.view(f"u{scales.dtype.itemsize}")
    return np.abs(fmt.scale_format.decode(unsigned).astype(np.float64)).ravel()


def _scale_histogram(scales: np.ndarray) -> tuple[str, str] | None:
    """The histogram of scales by their binary logarithm, with its caption."""
    logarithms = np.log2(scales[np.isfinite(scales) & (scales > 0)])
    if not logarithms.size:
        return None
    low, high = float(logarithms.min()), float(logarithms.max())
    counts, _ = np.histogram(logarithms, bins=_BARS, range=(low, high) if high > low else (low - 0.5, high + 0.5))
    bars = html.histogram(counts.tolist(), f"2^{low:.3g}", f"2^{high:.3g}")
    return f"{scales.size:,} scales, logarithmic", bars


def qarray_html(q: Any, scale_qarray: Callable[[ScaledFormat, ScaledFormat], Any]) -> str:
    """The facts and pictures of a QArray as a fragment of HTML; of an abstract one the facts alone.

    Args:
        q: the QArray.
        scale_qarray: of its format and the format of its scales: scales that are quantized again, as a QArray.
    """
    if not _has_readable_numbers(q):
        return html.box(qarray_title(q), qarray_facts(q))
    numbers = _numbers_as_float32(q)
    finite = numbers if np.isfinite(numbers).all() else numbers[np.isfinite(numbers)]
    ends = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "no finite number"
    cells = _heat_map_cells(numbers)
    caption = f"numbers, {ends}" + (", the largest of each block" if cells.size < numbers.size else "")
    pictures = [(caption, html.heat_map_image(cells, f"heat map of {qarray_title(q)}"))]
    scales = _scale_magnitudes(q, scale_qarray)
    bars = None if scales is None else _scale_histogram(scales)
    return html.box(
        qarray_title(q), [*qarray_facts(q), *_number_shares(q, numbers)], *pictures, *([bars] if bars else [])
    )


def qarray_treescope(q: Any, path: str | None) -> Any:
    """A QArray in treescope: its title in a line, and its facts when it is unfolded.

    treescope adds the object's `_repr_html_`, so the pictures are there without being drawn here.
    """
    from treescope import rendering_parts as parts

    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(f"<{qarray_title(q)}:", parts.fold_condition(collapsed=parts.text(" "))),
        children=[parts.text(f"{name}: {value}") for name, value in qarray_facts(q)],
        suffix=parts.text(">"),
        comma_separated=True,
        path=path,
    )
