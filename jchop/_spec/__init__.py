"""How a format is used: its rounding, the arithmetic of a sum of products, tensor cores, facts of a format."""
