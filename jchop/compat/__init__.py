"""Faces of other programs: their names and arguments translated into specs, so that a script changes an import alone.

`jchop.compat.pychop`, `jchop.compat.qtorch` and `jchop.compat.piquant`. What they compute is what jchop computes; each
module's docstring lists where that differs from the original. docs/compat.md has examples.
"""
