"""Functions of `jax.numpy` in emulated arithmetic: every operation rounded, not only the result."""

from jchop.math._matmul import matmul

__all__ = ["matmul"]
