"""How the backends of XLA differ from their programs, and the functions that work around it."""
