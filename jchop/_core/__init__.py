"""The core, in pure jnp: XLA runs it on arrays, and every kernel on its tile.

The rooms in order, each of which imports only from the earlier ones: `xla` (workarounds for XLA's backends),
`rounding`, `arithmetic`, `matmul`, `elementary`, and `scaled`; and beside them the bodies of operations.
"""
