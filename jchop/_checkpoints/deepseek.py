"""DeepSeek's 8-bit floats: e4m3 in tiles of 128 x 128, each times a binary32 number or a power of two (e8m0).

Definition: https://github.com/deepseek-ai/DeepSeek-V3, `inference/kernel.py` (`weight_dequant`). Despite its name,
``weight_scale_inv`` is the factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jchop._checkpoints.arrays import cast_exactly, float_scales, group_lengths, pieces
from jchop._checkpoints.compressed_tensors import FLOAT_ROW, float8_array
from jchop._checkpoints.row import EXPONENT8, FLOAT8, LayoutFacts, LayoutRow, TensorParts, fact_field, look_for_matrix
from jchop._common.checks import check
from jchop.formats._catalogue import float8_e4m3fn, float8_e8m0fnu
from jchop.storage._array import QArray


def _read_tiles(parts: TensorParts, facts: LayoutFacts) -> QArray:
    block = fact_field(facts, "weight_block_size", list, [128, 128])
    ok = len(block) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in block)
    check(ok, f"weight_block_size={block} must be two integers above zero")
    weight, scale = parts["weight"], parts["weight_scale_inv"]
    if scale.dtype == np.uint8 and facts.get("scale_fmt") == "ue8m0":
        scale = scale.view(EXPONENT8)
    if scale.size == 1 and facts.get("weight_block_size") is None:
        return float8_array(weight, scale, None)
    counts = tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    ok = tuple(scale.shape) == counts
    check(ok, f"weight_scale_inv has shape {list(scale.shape)}, and tiles of {block} have {list(counts)}")
    return float8_array(weight, scale, (block[0], block[1]))


def _write_tiles(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weight = pieces(q, float8_e4m3fn)
    sizes = zip(weight.kinds, group_lengths(weight), q.shape, strict=True)
    tiles = all(kind == 128 or (not isinstance(kind, int) and size == n <= 128) for kind, size, n in sizes)
    check(tiles, f"it has the grouping of {weight.fmt}, not tiles of 128 x 128")
    powers = weight.fmt.scale == float8_e8m0fnu
    scale = weight.scale.view(EXPONENT8) if powers else cast_exactly(float_scales(weight), np.float32, "scales")
    facts = {"weight_block_size": [128, 128]} | ({"scale_fmt": "ue8m0"} if powers else {})
    return {"weight": weight.codes.view(FLOAT8), "weight_scale_inv": scale}, facts


_TILE_PARTS, _TILE_FITS = ("weight_scale_inv", "weight"), "float8_e4m3fn(group=(128,128))"
FP8_TILES = LayoutRow("fp8", _TILE_PARTS, look_for_matrix("weight", FLOAT8), _read_tiles, _write_tiles, _TILE_FITS)


def _refuse_one_scale(q: QArray, exact: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    raise ValueError("weights with one scale are only read; compressed-tensors has them")


#: A scale for the whole weight, ``weight_scale``, as the same method has it without blocks.
FP8_ONE_SCALE = replace(FLOAT_ROW, name="fp8 with one scale", write=_refuse_one_scale, fits=FP8_TILES.fits)
