"""Rules, and products of rounded operands or of codes."""
