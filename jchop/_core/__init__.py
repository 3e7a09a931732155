"""The core, in pure jnp: XLA runs it on arrays, and every kernel on its tile.

The rooms in order: `xla` (workarounds for XLA's backends), `rounding`, `arithmetic`, `matmul`, `elementary`, `scaled`.
Each imports only from the earlier ones. The bodies of operations stand beside them.
"""
