"""An interpreter of jaxprs that imports nothing from jchop: each equation in float64, its result rounded by NumPy.

It rounds to nearest, ties to even, in formats of so few bits that float64 gives the exact sums, products, quotients and
roots, rounded correctly. Elementary functions are those of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

__all__ = ["Carrier", "Format", "NotCovered", "emulated"]


class NotCovered(Exception):
    """A primitive that has no line here."""


@dataclass(frozen=True)
class Format:
    """A binary format of IEEE's kind: bits of the exponent, bits of the fraction."""

    exponent: int
    fraction: int

    def round(self, x: Any) -> np.ndarray:
        """Each number rounded to nearest, ties to even."""
        x = np.asarray(x, np.float64)
        bias = 2 ** (self.exponent - 1) - 1
        finite = np.where(np.isfinite(x), x, 0.0)
        place = np.maximum(np.frexp(finite)[1] - 1, 1 - bias) - self.fraction
        rounded = np.ldexp(np.rint(np.ldexp(finite, -place)), place)
        largest = (2 - 2.0**-self.fraction) * 2.0**bias
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded)
        return np.where(np.isfinite(x), np.copysign(rounded, x), x)


_FLOAT32 = Format(8, 23)


@dataclass(frozen=True)
class Carrier:
    """The numbers of a dtype itself: nothing is rounded, and JAX computes each primitive as a program of its own."""

    dtype: Any

    def round(self, x: Any) -> np.ndarray:
        """The numbers."""
        return np.asarray(x)


#: Operands rounded, the operation in float64, its results rounded.
_COMPUTED = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "sqrt",
        "square",
        "neg",
        "abs",
        "max",
        "min",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "asinh",
        "acosh",
        "atanh",
        "atan2",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "lgamma",
        "digamma",
        "cbrt",
        "rsqrt",
        "pow",
        "floor",
        "ceil",
        "round",
        "sign",
        "rem",
        "reduce_sum",
        "dot_general",
        "conv_general_dilated",
        "reduce_prod",
        "iota",
        "reduce_window_sum",
    ]
)
#: Nothing is computed.
_MOVED = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "gather",
        "rev",
        "select_n",
        "sort",
        "reduce_max",
        "reduce_min",
        "copy",
        "copy_p",
        "stop_gradient",
        "expand_dims",
        "split",
        "cummax",
        "cummin",
        "argmax",
        "argmin",
        "optimization_barrier",
        "clamp",
        "scatter",
        "stack",
        "unstack",
        "top_k",
        "tile",
        "reduce_window_max",
    ]
)
#: Functions of several operations that are rounded once.
_ONE_OPERATION: dict[str, Any] = {"logaddexp": np.logaddexp, "hypot": np.hypot}
_CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "remat2", "checkpoint"]
)


def _holds_programs(eqn: Any) -> bool:
    return eqn.primitive.name in _CALLS or eqn.primitive.name in ("scan", "while", "cond")


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def _name_of_call(params: Any) -> str:
    """The name of the function that an equation calls; empty for other equations."""
    inner = params.get("call_jaxpr")
    info = None if inner is None else getattr(inner, "jaxpr", inner).debug_info
    return params.get("name", "" if info is None else info.func_name) or ""


def _wide(value: Any) -> Any:
    return np.dtype(np.float64) if value == np.dtype(np.float32) and isinstance(value, np.dtype | type) else value


#: Whether an equation, within equations that hold its program, is one whose results are not rounded.
Exact = Callable[[Any, tuple[Any, ...]], bool]


@dataclass(frozen=True)
class _Machine:
    format: Format | Carrier
    exact: Exact = lambda eqn, around: False
    around: tuple[Any, ...] = ()
    here: bool = False

    @property
    def own(self) -> bool:
        return isinstance(self.format, Carrier)

    def rounded(self, x: Any) -> Any:
        fmt = _FLOAT32 if self.here else self.format
        return fmt.round(x) if _is_float(x) else np.asarray(x)

    def run(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr, constants = _jaxpr(closed)
        if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*jaxpr.constvars, *jaxpr.invars)):
            raise NotCovered("a key")
        values = [*map(self.rounded, constants), *args]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def read(v: Any) -> Any:
            """A variable; a constant rounded, unless it is an infinity that only bounds."""
            return self.rounded(np.asarray(v.val)) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            own = replace(self, here=self.exact(eqn, self.around))
            operands = [own.rounded(np.asarray(v.val)) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            inside = replace(self, around=(*self.around, eqn))
            machine = inside if _holds_programs(eqn) else own
            env.update(zip(eqn.outvars, machine.equation(eqn, operands), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars if hasattr(v.aval, "dtype")):
            raise NotCovered(name)
        function = _ONE_OPERATION.get(_name_of_call(params))
        if function is not None and not self.own:
            return [self.rounded(function(*(np.asarray(x, np.float64) for x in args)))]
        if name in _CALLS:
            return self.run(params.get("jaxpr", params.get("call_jaxpr")), args)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(params, args)
        if self.own:
            return self.bound(eqn, args, wide=False)
        if name == "integer_pow":
            return [self.power(args[0], params["y"])]
        if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating):
            if params["new_dtype"] != np.float32:
                raise NotCovered(name)
            x = np.asarray(args[0], np.float64)
            return [x if _is_float(args[0]) else self.rounded(x)]
        plain = not any(_is_float(v.aval) for v in eqn.outvars if hasattr(v.aval, "dtype"))
        if not plain and name not in _COMPUTED and name not in _MOVED:
            raise NotCovered(name)
        if any(jnp.issubdtype(v.aval.dtype, dtype) for v in eqn.outvars for dtype in (np.complexfloating,)):
            raise NotCovered(name)
        if getattr(params.get("update_jaxpr"), "eqns", ()):
            raise NotCovered(f"{name} of a function")
        wide = not plain and name in _COMPUTED
        if name in _MOVED or name in ("max", "min", "neg", "abs"):  # also results that are handed on as they are
            return self.bound(eqn, args, wide=False)
        return [self.rounded(x) for x in self.bound(eqn, args, wide)]

    def bound(self, eqn: Any, args: list[Any], wide: bool) -> list[Any]:
        """The primitive in float64; in float32, where it computes nothing and values of the format fit."""
        params = {key: _wide(value) if wide else value for key, value in eqn.params.items()}
        dtypes = [_wide(v.aval.dtype) if wide else v.aval.dtype for v in eqn.invars]
        with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
            operands = [jnp.asarray(x, dtype) for x, dtype in zip(args, dtypes, strict=True)]
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
            return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]

    def power(self, x: Any, n: int) -> Any:
        """By squaring, every product rounded, and for n < 0 the quotient."""
        total, square, m = None, x, abs(n)
        while m:
            if m & 1:
                total = square if total is None else self.rounded(total * square)
            m >>= 1
            square = self.rounded(square * square) if m else square
        return self.rounded(np.divide(1, np.asarray(total))) if n < 0 else total

    def _cond(self, params: Any, args: list[Any]) -> list[Any]:
        index = int(np.clip(int(args[0]), 0, len(params["branches"]) - 1))
        return self.run(params["branches"][index], args[1:])

    def _while(self, params: Any, args: list[Any]) -> list[Any]:
        test, body = params["cond_nconsts"], params["body_nconsts"]
        first, fixed, carry = args[:test], args[test : test + body], args[test + body :]
        while True:
            go_on = np.asarray(self.run(params["cond_jaxpr"], [*first, *carry])[0])
            if not go_on.any():
                return carry
            new = self.run(params["body_jaxpr"], [*fixed, *carry])
            # In a batch of loops those that have ended keep their values.
            lanes = [go_on.reshape(go_on.shape + (1,) * (np.ndim(x) - go_on.ndim)) for x in new]
            carry = [np.where(lane, x, y) for lane, x, y in zip(lanes, new, carry, strict=True)]

    def _scan(self, params: Any, args: list[Any]) -> list[Any]:
        if "num_carry" in params:
            consts, carried = params["num_consts"], params["num_carry"]
        else:  # newer versions of JAX
            consts, carried = (len(list(part)) for part in params["ft_in"].unpack()[:2])
        fixed, carry, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]
        order = range(params["length"])
        rows = []
        for k in reversed(order) if params["reverse"] else order:
            out = self.run(params["jaxpr"], [*fixed, *carry, *(x[k] for x in xs)])
            carry, ys = out[:carried], out[carried:]
            rows.append(ys)
        rows = rows[::-1] if params["reverse"] else rows
        return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


def emulated(
    fun: Callable[..., Any],
    fmt: Format | Carrier,
    args: Sequence[Any],
    exact: Exact = lambda eqn, around: False,
    whole: Sequence[int] = (),
) -> list[Any]:
    """The leaves of ``fun(*args)``, every operation rounded; `NotCovered` for primitives without a line.

    Results of equations that are `exact`, and arguments with the numbers `whole`, are handed on in float32.
    """
    floats = fmt.dtype if isinstance(fmt, Carrier) else np.float32
    leaves = [np.asarray(x, floats) if isinstance(x, float) else x for x in jax.tree.leaves(args)]
    if not all(hasattr(x, "dtype") and x.dtype in (floats, np.int32, bool) for x in leaves):
        raise NotCovered("arguments")
    machine = _Machine(fmt, exact)
    values = [np.asarray(x) if i in whole else machine.rounded(x) for i, x in enumerate(leaves)]
    return machine.run(jax.make_jaxpr(fun)(*args), values)
