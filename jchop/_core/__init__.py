"""The core, in pure jnp: XLA runs it on arrays, and every kernel on its tile.

The rooms in order, each of which imports from those before it: `rounding`, `arithmetic`, `scaled`, `scaled_float32`,
and the bodies of operations beside them. `xla_cpu`, the workarounds for XLA's CPU backend, stands below the rooms.
"""
