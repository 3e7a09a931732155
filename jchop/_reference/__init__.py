"""Pure jnp bodies: what XLA runs, and what every kernel runs on its tile."""
