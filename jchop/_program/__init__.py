"""The interpreter of programs: a jaxpr is planned equation by equation, then run. Some equations are replaced.

Emulated arithmetic (`_emulate/`) and quantized products (`_products/`) are tables of rules on it.
"""
