"""Modules of Linen: their layers, calls and scales."""
