"""Collectives that move codes: quantized sums, gathers and exchanges between devices and processes."""

from jchop.distributed._collectives import (
    all_gather,
    all_to_all,
    diloco,
    ppermute,
    psum,
    psum_scatter,
    psum_with_feedback,
    sharded_psum,
)
from jchop.distributed._messages import Hierarchical
from jchop.distributed._parts import quantize_parts, unshard

__all__ = [
    "Hierarchical",
    "all_gather",
    "all_to_all",
    "diloco",
    "ppermute",
    "psum",
    "psum_scatter",
    "psum_with_feedback",
    "quantize_parts",
    "sharded_psum",
    "unshard",
]
