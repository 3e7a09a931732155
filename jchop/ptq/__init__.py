"""Rounding with data: the statistics of a program's products, and parameters rounded by them."""

from jchop.ptq._statistics import InputStatistics, Statistics, statistics

__all__ = ["InputStatistics", "Statistics", "statistics"]
