"""Masks with at most n of every m numbers."""

from jchop.sparsity._masks import mask

__all__ = ["mask"]
