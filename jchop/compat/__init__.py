"""Interfaces of other programs: their names and arguments, translated into specs. A script changes only its imports.

The modules are `jchop.compat.pychop`, `jchop.compat.qtorch` and `jchop.compat.piquant`. jchop computes the results;
each module's docstring lists the differences from the original. docs/compat.md has examples.
"""
