"""Pallas kernels of the operations in `_core`, and the choice between kernels and bodies."""
