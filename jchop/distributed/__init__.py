"""Collectives that move codes: quantized sums, gathers and exchanges between devices and processes."""

from jchop._common.on_demand import on_demand
from jchop.distributed._collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from jchop.distributed._messages import Hierarchical
from jchop.distributed._parts import quantize_parts, unshard
from jchop.distributed._training import diloco, psum_with_feedback

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
    "unshard",
]

__getattr__, __dir__ = on_demand(
    "jchop.distributed",
    elsewhere={
        "sharded_psum": "jax.shard_map(lambda x: psum(x[0], 'd', spec), mesh=mesh, in_specs=P('d'), out_specs=P())",
        "hierarchical": "Hierarchical(inner, outer)",
        "all_reduce": "psum(x, axis_name, spec)",
        "reduce_scatter": "psum_scatter(x, axis_name, spec)",
    },
)
