"""Masks with at most n of every m numbers, and packed arrays of which only these are stored."""

from jchop.sparsity._masks import mask, pack

__all__ = ["mask", "pack"]
