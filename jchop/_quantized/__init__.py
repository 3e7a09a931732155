"""Quantized products: `Rule`, the layouts of operands, products of codes, and `quantize_fn`: any program under rules.

`products/` has rules and products, `program/` follows parameters through a program to their products, `scales/` has
the formulas of scales that are kept or learned.
"""
