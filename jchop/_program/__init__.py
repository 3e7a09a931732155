"""The interpreter of programs: a jaxpr is planned equation by equation, then run. Some equations are replaced.

`planner.py` makes the plan and `run.py` runs it. `control.py` has a row for each primitive that holds programs, and the
loops of JAX; `lanes.py` has loops on concrete values. Emulated arithmetic (`_emulate/`) and quantized products
(`_quantized/`) are tables of rules on it.
"""
