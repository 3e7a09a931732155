"""Collectives that move codes: quantized sums, gathers and exchanges between devices and processes."""

from jchop.distributed._collectives import all_gather, all_to_all, ppermute, psum, psum_scatter, sharded_psum
from jchop.distributed._messages import Hierarchical, hierarchical
from jchop.distributed._parts import quantize_parts, unshard
from jchop.distributed._training import DilocoState, FeedbackState, diloco, psum_with_feedback

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
