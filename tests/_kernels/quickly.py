"""Programs compiled with little care for their speed: compiling takes nearly all the time of tests of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` under jit, its code as XLA makes it but left as it is by LLVM. For kernels that are interpreted.

    The bodies that they are compared with run as they do for users elsewhere. Code that is left so may move bfloat16
    numbers as float32, of which subnormal ones become zero; from JAX 0.12 on it always does.
    """
    if jax.__version_info__ >= (0, 12):
        return jax.jit(fun)
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})
