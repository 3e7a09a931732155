"""Steps that choose the numbers or the codes of a weight."""
