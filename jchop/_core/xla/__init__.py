"""What XLA's backends do otherwise than their programs say, and the functions that work around it."""
