"""Rounding with data: the statistics of a program's products, and the steps by which `pack` rounds with batches."""

from jchop._common.on_demand import on_demand
from jchop.ptq._data.passes import Statistics, statistics
from jchop.ptq._records import PtqReport
from jchop.ptq._steps.steps import (
    awq,
    clip,
    correct_biases,
    correct_error,
    gptq,
    hqq,
    rotate,
    sequential,
    sign_round,
    smooth,
    sparse,
)

__getattr__, __dir__ = on_demand(
    __name__, (), {}, {"quantize": "jchop.quantize_fn(fun, rules).pack(params, batches=batches, steps=[...])"}
)

__all__ = [
    "PtqReport",
    "Statistics",
    "awq",
    "clip",
    "correct_biases",
    "correct_error",
    "gptq",
    "hqq",
    "rotate",
    "sequential",
    "sign_round",
    "smooth",
    "sparse",
    "statistics",
]
