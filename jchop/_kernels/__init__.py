"""Pallas kernels of the operations in `_core`, and the choice between the two."""
