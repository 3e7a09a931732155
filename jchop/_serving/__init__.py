"""Attention from stored keys and values, for code in plain JAX."""
