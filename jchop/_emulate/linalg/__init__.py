"""Algorithms of linear algebra with every operation rounded, and their arithmetic."""
