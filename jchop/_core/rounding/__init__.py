"""Rounding one number: the grid of a format, the modes, codebooks, codes, the random stream."""
