"""Models that are pytrees: modules of Equinox, and parameters of any function."""
