"""Arithmetic whose exact result is rounded once: operations, sums, matrix products."""
