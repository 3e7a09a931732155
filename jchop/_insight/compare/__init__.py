"""An array rounded to several formats, side by side."""

from jchop._insight.compare.compare import Comparison, ComparisonRow, compare, default_formats

__all__ = ["Comparison", "ComparisonRow", "compare", "default_formats"]
