"""Any function of JAX in another arithmetic, every operation rounded.

`rules/rules.py` says how each primitive is computed, `rules/plan.py` applies it to a program, and `paired.py` runs the
program beside a reference.
"""
