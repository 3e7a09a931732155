"""Algorithms of linear algebra in which every operation is rounded, and the arithmetic that they run in."""
