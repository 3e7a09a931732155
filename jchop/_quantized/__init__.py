"""Quantized products: `Rule`, the layouts of operands, products of codes, and `quantize_fn`: any program under rules.

`traced/` follows parameters through a program to their products, `scales/` has kept and learned scales, `sums/`
products of codes of convolutions, experts, and weights alone, `adapters.py` LoRA.
"""
