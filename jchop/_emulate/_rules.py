"""The table: what each primitive is to an emulated arithmetic; and which arithmetic an equation gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Primitive

from jchop._arguments import OWN_SCOPE
from jchop._checks import check_choice
from jchop._kernels.primitive import OpPrimitive
from jchop._paths import matches_path
from jchop.accumulation import MatmulSpec
from jchop.formats import ElementFormat
from jchop.spec import Gradient, Spec, as_spec

__all__ = [
    "CALLS",
    "COMPLEX",
    "CUSTOM_CALLS",
    "EXACT",
    "HIGH_CALLS",
    "KINDS",
    "PLAIN_CALLS",
    "REMAT_CALLS",
    "UNKNOWN",
    "Choice",
    "Settings",
    "is_own",
    "kind_of",
    "make_settings",
    "scope_of",
]

#: Primitives that are an operation of `_core.arithmetic.operations`: the exact result, rounded once.
EXACT = {name: name for name in ("add", "sub", "mul", "div", "sqrt", "square", "neg", "abs")} | {
    "add_any": "add",
    "add_jaxvals": "add",
}
#: Operands rounded, then the carrier's result, rounded once.
_ELEMENTARY = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor igamma igamma_grad_a igammac lgamma log log1p log2 logistic one_minus_square polygamma polynomial pow
    regularized_incomplete_beta rem round rsqrt sign sin sinh tan tanh zeta random_gamma_grad
"""
#: Sums without an order of their own, and what makes floats of other things: the carrier's result, rounded once.
_MADE = """
    bitcast_convert_type cumlogsumexp iota psum psum_invariant psum_scatter random_gamma reduce_precision
    reduce_scatter rng_uniform scatter-add scatter-mul scatter_add scatter_mul select_and_scatter_add
    select_and_gather_add unreduced_psum
"""
#: Nothing is computed, only moved or chosen.
_STRUCTURAL = """
    all_gather all_gather_invariant all_to_all approx_top_k broadcast broadcast_in_dim clamp concatenate copy copy_p
    cummax cummin device_put dynamic_slice dynamic_update_slice expand_dims gather jchop_on_cotangent mesh_cast name
    optimization_barrier pad pbroadcast pcast pgather pmax pmin ppermute pvary reduce_max reduce_min
    reduce_window_max reduce_window_min reshape reshard rev scatter scatter-max scatter-min scatter_max scatter_min
    select_n sharding_constraint slice sort split squeeze stack stop_gradient tile top_k transpose unstack
    layout_constraint
"""
_ACCUMULATING = "reduce_sum reduce_prod cumsum cumprod dot_general conv_general_dilated reduce_window_sum"
#: Matrices: the textbook's algorithms, every operation rounded.
_LINEAR = "triangular_solve cholesky lu qr"
#: What has a rule for complex operands or results: parts that are real operations, beside what only moves numbers.
COMPLEX = frozenset(["add", "add_any", "sub", "mul", "square", "neg", "conj", "real", "imag", "complex"])
#: Calls of another program, by how they are put together again.
PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call", "call")
#: Primitives of a higher level, which newer versions of JAX have for some functions; they say what they consist of.
HIGH_CALLS = ("call_hi_primitive",)
REMAT_CALLS = ("remat", "remat2", "checkpoint")
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
CALLS = (*PLAIN_CALLS, *HIGH_CALLS, *REMAT_CALLS, *CUSTOM_CALLS, "shard_map")
_CONTROL = " ".join((*CALLS, "custom_linear_solve scan while cond"))
#: What each primitive is.
KINDS: dict[str, str] = {
    name: kind
    for kind, names in (
        ("exact", " ".join(EXACT)),
        ("power", "integer_pow"),
        ("elementary", _ELEMENTARY),
        ("made", _MADE),
        ("structural", _STRUCTURAL),
        ("extremum", "max min"),
        ("converted", "convert_element_type"),
        ("accumulating", _ACCUMULATING),
        ("linear", _LINEAR),
        ("control", _CONTROL),
    )
    for name in names.split()
}


def kind_of(primitive: Primitive) -> str:
    """What a primitive is. The results of jchop's own operations are rounded, unless they are codes and scales."""
    if isinstance(primitive, OpPrimitive):
        return "own" if primitive.stores else "made"
    return KINDS.get(primitive.name, "unknown")


#: What may be done with a primitive that has no line in the table.
UNKNOWN = ("raise", "round_output", "carrier")


@dataclass(frozen=True)
class Choice:
    """The arithmetic of one equation: what results are rounded to, and how sums are formed; None: the carrier's."""

    spec: Spec | None
    accumulate: MatmulSpec | None


@dataclass(frozen=True)
class Settings:
    """What `emulate` was told; the rules in their order, each a name or pattern and what it says."""

    spec: Spec | None
    rules: tuple[tuple[str, Spec | MatmulSpec | None], ...]
    accumulate: MatmulSpec | None
    unknown: str

    def choose(self, primitive: str, scope: str, used: set[str] | None = None) -> Choice:
        """The arithmetic of a primitive in a scope; `used` collects the rules that spoke."""
        spec, accumulate = self.spec, self.accumulate
        found: set[type] = set()
        for pattern, value in self.rules:
            kind = MatmulSpec if isinstance(value, MatmulSpec) else Spec
            if kind in found or not _matches(pattern, primitive, scope):
                continue
            found.add(kind)
            if used is not None:
                used.add(pattern)
            if isinstance(value, MatmulSpec):
                accumulate = value
            else:
                spec = value
                # A part of the program that is the carrier's sums in it too, unless a rule says how.
                accumulate = None if value is None and MatmulSpec not in found else accumulate
        return Choice(spec, accumulate)

    @property
    def stochastic(self) -> bool:
        """Whether any rounding there may be draws."""
        values = [self.spec, self.accumulate, *(value for _, value in self.rules)]
        return any(
            value.stochastic if isinstance(value, MatmulSpec) else value is not None and value.rounding.stochastic
            for value in values
        )


def _matches(pattern: str, primitive: str, scope: str) -> bool:
    return pattern == primitive or matches_path(pattern, scope)


_WRAPPED = re.compile(r"\w+\(|\)")


def scope_of(outer: str, name_stack: Any, name: str | None = None) -> str:
    """The path of scopes of an equation, the marks of transformations dropped: ``vmap(jvp(f))/g`` is ``f/g``."""
    parts = [outer, _WRAPPED.sub("", str(name_stack)), name or ""]
    return "/".join(part for part in parts if part)


def is_own(scope: str) -> bool:
    """Whether an equation of this scope is part of a public function of jchop, which says its arithmetic itself."""
    return OWN_SCOPE in scope.split("/")


def make_settings(
    spec: Spec | ElementFormat | str | None,
    rules: Mapping[str, Any] | None,
    accumulate: MatmulSpec | None,
    unknown: str,
) -> Settings:
    """What `emulate` was told, checked."""
    check_choice("unknown", unknown, UNKNOWN)
    if accumulate is not None and not isinstance(accumulate, MatmulSpec):
        raise TypeError(f"accumulate={accumulate!r} must be a MatmulSpec, or None for the carrier's own sums")
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules={rules!r} must map names of primitives or scopes to specs")
    coerced = []
    for pattern, value in (rules or {}).items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"rules: {pattern!r} must be the name of a primitive, or a pattern of scopes")
        coerced.append((pattern, value if isinstance(value, MatmulSpec) else _plain(value, f"rules[{pattern!r}]")))
    return Settings(_plain(spec, "spec"), tuple(coerced), accumulate, unknown)


def _plain(value: Any, argument: str) -> Spec | None:
    if value is None:
        return None
    spec = as_spec(value, argument)
    if spec.gradient != Gradient():
        raise ValueError(
            f"{argument}={str(spec)!r} has a gradient; derivatives of an emulated function are straight-through, "
            "and emulate(jax.grad(fun), spec) computes them in the arithmetic of spec"
        )
    return spec
