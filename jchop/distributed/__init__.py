"""Collectives that move codes: quantized sums, gathers and exchanges between devices and processes."""

from jchop.distributed._algorithms import Hierarchical, hierarchical
from jchop.distributed._collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from jchop.distributed._sharded import sharded_psum

__all__ = [
    "Hierarchical",
    "all_gather",
    "all_to_all",
    "hierarchical",
    "ppermute",
    "psum",
    "psum_scatter",
    "sharded_psum",
]
