"""`round_to_format`, and rounding of other kinds of arrays."""
