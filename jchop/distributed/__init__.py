"""Collectives that move codes: quantized sums, gathers and exchanges between devices and processes."""

from jchop.distributed._algorithms import Hierarchical, hierarchical
from jchop.distributed._collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from jchop.distributed._diloco import DilocoState, diloco
from jchop.distributed._feedback import FeedbackState, psum_with_feedback
from jchop.distributed._quantize_parts import quantize_parts
from jchop.distributed._sharded_psum import sharded_psum
from jchop.distributed._unshard import unshard

__all__ = [
    "DilocoState",
    "FeedbackState",
    "Hierarchical",
    "all_gather",
    "all_to_all",
    "diloco",
    "hierarchical",
    "ppermute",
    "psum",
    "psum_scatter",
    "psum_with_feedback",
    "quantize_parts",
    "sharded_psum",
    "unshard",
]
