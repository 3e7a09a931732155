"""Pallas kernels of the operations in `_linen_module_of`, and the choice between kernels and bodies."""
