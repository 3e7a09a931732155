"""Linear algebra in which every operation is rounded: solvers and factorizations of one matrix; vmap takes many.

The algorithms are the textbook ones (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.). Each sum
is formed one term after the other. There is no derivative; differentiation is an error.
"""

from jchop._common.on_demand import on_demand
from jchop.math.linalg._direct import cholesky, lu, lu_solve, qr, solve_triangular
from jchop.math.linalg._krylov import cg, gmres, refine

__getattr__, __dir__ = on_demand(
    __name__,
    (),
    {},
    {
        "solve": "lu_solve(lu(a, spec), b, spec), or jchop.emulate(jnp.linalg.solve, spec)(a, b)",
        "inv": "jchop.emulate(jnp.linalg.inv, spec)(a)",
        "bicgstab": "gmres(a, b, spec), or jchop.emulate of your own loop",
    },
)

__all__ = ["cg", "cholesky", "gmres", "lu", "lu_solve", "qr", "refine", "solve_triangular"]
