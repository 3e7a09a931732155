"""Rounding with data: the statistics of a program's products, and parameters rounded by them."""

from jchop.ptq._data.passes import InputStatistics, Statistics, statistics
from jchop.ptq._quantize import quantize
from jchop.ptq._records import PtqReport, WeightRow
from jchop.ptq._steps.steps import (
    awq,
    clip,
    correct_biases,
    correct_error,
    gptq,
    hqq,
    rotate,
    sign_round,
    smooth,
    sparse,
)

__all__ = [
    "InputStatistics",
    "PtqReport",
    "Statistics",
    "WeightRow",
    "awq",
    "clip",
    "correct_biases",
    "correct_error",
    "gptq",
    "hqq",
    "quantize",
    "rotate",
    "sign_round",
    "smooth",
    "sparse",
    "statistics",
]
