"""The interpreter of programs: a jaxpr is planned equation by equation, then run. Some equations are replaced.

`planner.py` makes the plan, `run.py` runs it, `control.py` has loops and branches, `implementations.py` primitives of
other packages. Emulated arithmetic (`_emulate/`) and quantized products (`_quantized/`) are tables of rules on it.
"""
