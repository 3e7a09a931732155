"""Quantized products: rules, the layouts of operands, and the products of any program under rules."""
