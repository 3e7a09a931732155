"""Modules of NNX: their layers, and the hooks that round in them."""
