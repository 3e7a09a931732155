"""Pallas kernels of the operations in `_reference`, and the choice between the two."""
