"""The kinds of primitives, the facts about values, and the choice of the arithmetic of an equation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jchop._common.checks import check_choice, check_int
from jchop._common.paths import check_pattern_mapping, matches_path
from jchop._emulate.rules.functions import FUNCTIONS, NamedFunction
from jchop._kernels.primitive import OpPrimitive
from jchop._program.control import CONTROL
from jchop._program.step import is_reference
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop.formats import ElementFormat, FloatFormat, ScaledFormat, UniformFormat

# -- facts about values ------------------------------------------------------------------------------------------------


class Wide(Enum):
    """The rule, and the fact, of results that are not rounded, nor by the operations that read them."""

    WIDE = "wide"

    def __str__(self) -> str:
        return self.value


#: A spec whose format holds the numbers; `WIDE`: no operation rounds them; None: any number of the dtype.
ValueFact = Spec | Wide | None
WIDE = Wide.WIDE

#: The dtypes that are rounded.
CARRIER_DTYPES = ("float16", "bfloat16", "float32", "float64")
_CARRIER_FLOATS = frozenset(map(jnp.dtype, CARRIER_DTYPES))


def is_carrier_float(aval: Any) -> bool:
    """Whether a value has a real dtype that carries other formats, and so is rounded; False for a reference."""
    return hasattr(aval, "dtype") and aval.dtype in _CARRIER_FLOATS and not is_reference(aval)


def is_narrow_float(aval: Any) -> bool:
    """Whether a value has a floating-point dtype of 8 bits or fewer, which only stores numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.name not in CARRIER_DTYPES


def is_complex_value(aval: Any) -> bool:
    """Whether a value is complex."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def is_number(aval: Any) -> bool:
    """Whether a value, or its real and imaginary parts, are rounded."""
    return is_carrier_float(aval) or is_complex_value(aval)


@lru_cache(maxsize=4096)
def is_exact_under(fact: ValueFact, spec: Spec | None) -> bool:
    """Whether rounding under `spec` changes no value of `fact`."""
    if spec is None or fact is WIDE:
        return True
    if not isinstance(fact, Spec) or (spec.flush and not fact.flush):
        return False
    return fact.format == spec.format or _is_format_subset(fact.format, spec.format)


def _is_format_subset(small: ElementFormat, large: ElementFormat) -> bool:
    """Whether `large` has every value of `small`, including infinities and -0; False in case of doubt."""
    if not isinstance(small, FloatFormat) or not isinstance(large, FloatFormat):
        return False
    if not (large.subnormals and large.zero and large.signed) or (small.has_inf and not large.has_inf):
        return False
    if small.has_negative_zero and not large.has_negative_zero:
        return False
    finer = small.emin - small.frac_bits >= large.emin - large.frac_bits and small.precision <= large.precision
    return finer and small.exact_max <= large.exact_max


def common_fact(facts: Iterable[ValueFact]) -> ValueFact:
    """The fact that holds for every one of several values: the spec that contains all their specs."""
    every: list[ValueFact] = list(facts)
    if WIDE in every:
        return None if None in every else WIDE
    specs = (k for k in every if isinstance(k, Spec))
    return next((k for k in specs if all(is_exact_under(other, k) for other in every)), None)


def spec_of_fact(fact: ValueFact) -> Spec | None:
    """The spec whose format holds the numbers; None: any number of the dtype."""
    return fact if isinstance(fact, Spec) else None


def holds_constant(spec: Spec | None, value: Any) -> bool:
    """Whether rounding under `spec` does not change a constant; False for a constant of several elements."""
    if spec is None:
        return True
    if np.size(value) != 1:
        return False
    whole = np.asarray(value)
    if np.iscomplexobj(whole):
        return holds_constant(spec, np.real(whole)) and holds_constant(spec, np.imag(whole))
    number, fmt = float(whole.astype(np.float64).item()), spec.format
    if number:
        return _holds_number(spec, number)
    has_zero = not isinstance(fmt, FloatFormat) or fmt.zero  # here, as a cache takes -0 for 0
    return has_zero and (math.copysign(1.0, number) > 0 or fmt.has_negative_zero)


def at_format_limits(value: Any, spec: Spec) -> Any:
    """An array, with limits of the format in place of numbers that stand for limits of the dtype.

    A number of at least half the dtype's largest that lies beyond the format's becomes the same part of the format's.
    The dtype's smallest normal or subnormal number becomes the format's. All others are unchanged.
    """
    fmt, own, x = spec.format, jnp.finfo(value.dtype), np.asarray(value).astype(np.float64)
    size, most = np.abs(x), float(own.max)
    far = np.isfinite(x) & (size >= most / 2)
    normal, least = (size == float(one) for one in (own.smallest_normal, own.smallest_subnormal))
    if not np.any(far | normal | least):
        return value
    end, smallest = np.where(x < 0, *map(abs, finite_range_of(fmt))), float(fmt.smallest or 0)
    first = float(fmt.smallest_normal) if isinstance(fmt, FloatFormat) else smallest
    cases = [far & (size > end), normal & (size < first), least & (size < smallest)]
    return np.copysign(np.select(cases, [size / most * end, first, smallest], size), x).astype(value.dtype)


def finite_range_of(fmt: ElementFormat) -> tuple[float, float]:
    """The lowest and the largest finite value; infinite beyond the range of float64."""
    low, high = (float(end) if abs(end) < 1 << 1024 else math.copysign(math.inf, end) for end in (fmt.min, fmt.max))
    return low, high


@lru_cache(maxsize=4096)
def _holds_number(spec: Spec, value: float) -> bool:
    """Whether a number is a value of a spec's format."""
    fmt = spec.format
    if math.isnan(value):
        return True
    if math.isinf(value):
        return fmt.has_inf and (value > 0 or fmt.signed)
    exact = Fraction(value)
    if isinstance(fmt, UniformFormat):
        count = exact * Fraction(2) ** fmt.frac_bits
        return count.denominator == 1 and fmt.min_code <= count <= fmt.max_code
    if not isinstance(fmt, FloatFormat) or (value < 0 and not fmt.signed) or abs(exact) > fmt.exact_max:
        return False
    exponent = math.frexp(abs(value))[1] - 1
    if exponent < fmt.emin and (spec.flush or not fmt.subnormals):
        return False
    quantum = max(exponent, fmt.emin) - fmt.frac_bits
    return (exact / Fraction(2) ** quantum).denominator == 1


#: Primitives that are an operation of `_core.matmul.operations`: the exact result, rounded once.
EXACT = {name: name for name in ("add", "sub", "mul", "div", "sqrt", "square", "neg", "abs")} | {
    "add_any": "add",
    "add_jaxvals": "add",
}
#: Functions of rounded operands; the exact value or the carrier's result is rounded once.
_ELEMENTARY = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor igamma igamma_grad_a igammac lgamma log log1p log2 logistic one_minus_square polygamma polynomial pow
    regularized_incomplete_beta rem round rsqrt sign sin sinh tan tanh zeta random_gamma_grad
"""
#: Sums without a named order, and primitives that make floats from other types: the carrier's result, rounded once.
_CARRIER_RESULTS = """
    bitcast_convert_type cumlogsumexp iota psum psum_invariant psum_scatter random_gamma reduce_precision
    reduce_scatter scatter_add scatter_mul scatter_sub select_and_scatter_add select_and_gather_add unreduced_psum
"""
#: Primitives that only move or choose values.
_STRUCTURAL = """
    all_gather all_gather_invariant all_to_all approx_top_k bcoo_extract bcoo_transpose broadcast broadcast_in_dim
    freeze get clamp concatenate copy copy_p jchop_result jchop_settled
    cummax cummin device_put dynamic_slice dynamic_update_slice empty empty2 expand_dims gather jchop_on_cotangent
    mesh_cast name optimization_barrier pad pbroadcast pcast pgather pmax pmin ppermute pvary reduce_max reduce_min
    reduce_window_max reduce_window_min reshape reshard rev scatter scatter-max scatter-min scatter_max scatter_min
    select_n sharding_constraint slice sort split squeeze stack stop_gradient tile top_k transpose unstack
    layout_constraint
"""
#: Operations with their own arithmetic: operands are rounded, and the carrier's results are rounded once.
_CARRIER_OPS = """
    bcoo_dot_general bcoo_dot_general_sampled bcoo_multiply_dense bcoo_reduce_sum bcoo_spdot_general bcoo_todense
    bcsr_dot_general bcsr_todense coo_fromdense coo_matmat coo_matvec coo_todense csr_fromdense csr_matmat csr_matvec
    csr_todense eig eigh ffi_call fft geqp3 geqrf hessenberg householder_product ormqr pallas_call ragged_dot
    ragged_dot_general reduce reduce_window scaled_dot scaled_matmul schur select_and_scatter svd symmetric_product
    tridiagonal tridiagonal_solve
"""
#: Calls of Python, which are not changed.
_PYTHON_CALLS = "debug_callback debug_print io_callback pure_callback"
_ACCUMULATING = """
    reduce_sum reduce_prod cumsum cumprod dot_general conv_general_dilated reduce_window_sum scatter-add scatter-mul
    scatter-sub
"""
#: Matrix algorithms of `_emulate/rules/linalg.py`, every operation rounded.
_MATRIX_ALGORITHMS = "triangular_solve cholesky lu qr"
#: Primitives with a rule for complex operands or results: real operations on the parts.
COMPLEX_OPS = frozenset(["add", "add_any", "sub", "mul", "square", "neg", "conj", "real", "imag", "complex"])
#: The kind of each primitive.
PRIMITIVE_KINDS: dict[str, str] = {
    name: kind
    for kind, names in (
        ("exact", " ".join(EXACT)),
        ("power", "integer_pow"),
        ("elementary", _ELEMENTARY),
        ("carried", _CARRIER_OPS),
        ("alone", _PYTHON_CALLS),
        ("made", _CARRIER_RESULTS),
        ("structural", _STRUCTURAL),
        ("extremum", "max min"),
        ("draw", "rng_uniform"),
        ("neighbour", "nextafter"),
        ("complex", "conj real imag complex"),
        ("compared", "new_ref swap"),  # values written to a reference are rounded
        ("converted", "convert_element_type"),
        ("accumulating", _ACCUMULATING),
        ("linear", _MATRIX_ALGORITHMS),
        ("control", " ".join(CONTROL)),
    )
    for name in names.split()
}


def primitive_kind(primitive: Primitive | NamedFunction) -> str:
    """The kind of a primitive. The results of jchop's own operations are rounded, unless they are codes and scales."""
    if isinstance(primitive, OpPrimitive) and primitive.name not in PRIMITIVE_KINDS:
        return "own" if primitive.stores else "made"
    return "elementary" if isinstance(primitive, NamedFunction) else PRIMITIVE_KINDS.get(primitive.name, "unknown")


@dataclass(frozen=True)
class PrimitiveFunction:
    """A user's rule for a primitive, called with the operands, and with the parameters as keywords."""

    call: Callable[..., Any]


#: The events that can end a run.
EVENTS = ("overflow", "nan", "invalid")
#: The treatments of a primitive that is not in the table.
UNKNOWN_TREATMENTS = ("raise", "round_output", "carrier")
#: The treatments of arrays whose dtype is narrower than the carrier of the arguments.
NARROW_TREATMENTS = ("raise", "carrier")


@dataclass(frozen=True)
class ArithmeticChoice:
    """The arithmetic of one equation: the spec of its results, and the rule of sums. None: the carrier's.

    A function replaces the primitive. Without `rounds_operands`, operands are taken as they are. In the functions of
    `jchop.math` all of them are rounded already, or are meant to be exact, such as counts. With `wide`, the operations
    that read the results do not round them either.
    """

    spec: Spec | None
    accumulate: MatmulSpec | None
    function: PrimitiveFunction | None = None
    rounds_operands: bool = True
    wide: bool = False


#: The scope, primitive, and line of source of equations.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Settings:
    """The settings of `emulate`. The rules are pairs of a name or pattern and a value, in the user's order.

    Results of equations at `wide` are wide whatever the rules say.
    """

    spec: Spec | None
    rules: tuple[tuple[str, Spec | MatmulSpec | PrimitiveFunction | Wide | None], ...]
    accumulate: MatmulSpec | None
    unknown: str
    max_turns: int | None = None
    stop_at: str | None = None
    narrow: str = "raise"
    functions: tuple[NamedFunction, ...] = FUNCTIONS
    wide: frozenset[Place] = frozenset()

    @cached_property
    def has_lines(self) -> bool:
        """Whether a rule names a line of source."""
        return bool(self.wide) or any(names_line(pattern) for pattern, _ in self.rules)

    def choose(self, primitive: str, scope: str, used: set[str] | None = None, line: str = "") -> ArithmeticChoice:
        """The arithmetic of a primitive in a scope, from a line of source; `used` collects the rules that matched."""
        if self.wide and (scope, primitive, line) in self.wide:
            return ArithmeticChoice(None, None, wide=True)
        spec, accumulate, wide = self.spec, self.accumulate, False
        function: PrimitiveFunction | None = None
        kinds: set[type] = set()
        for pattern, value in self.rules:
            kind = type(value) if isinstance(value, MatmulSpec | PrimitiveFunction) else Spec
            path = primitive if kind is PrimitiveFunction else f"{scope}/{primitive}"
            if kind in kinds or not matches_rule(pattern, path, line):
                continue
            kinds.add(kind)
            if used is not None and (kind is not MatmulSpec or PRIMITIVE_KINDS.get(primitive) == "accumulating"):
                used.add(pattern)
            if isinstance(value, MatmulSpec):
                accumulate = value
            elif isinstance(value, PrimitiveFunction):
                function = value
            else:
                wide, spec = value is WIDE, None if value is WIDE else value
                # A part in the carrier also sums in the carrier, unless a rule has a MatmulSpec for it.
                accumulate = None if spec is None and MatmulSpec not in kinds else accumulate
        return ArithmeticChoice(spec, accumulate, function, wide=wide)

    @property
    def stochastic(self) -> bool:
        """Whether any rounding draws."""
        values = [self.spec, self.accumulate, *(value for _, value in self.rules)]
        return any(
            value.stochastic if isinstance(value, MatmulSpec) else isinstance(value, Spec) and value.rounding.stochastic
            for value in values
        )


#: The number of a line in a pattern, which then also matches the file and line in front of a path.
_LINE = re.compile(r":[\d{\[*?]")


def names_line(pattern: str) -> bool:
    """Whether a pattern names a line of source."""
    return _LINE.search(pattern) is not None


def matches_rule(pattern: str, path: str, line: str) -> bool:
    """Whether a pattern matches a path, or, if it names a line of source, this path after its file and line."""
    return matches_path(pattern, path, *([f"{line}/{path}"] if line and names_line(pattern) else []))


def make_settings(
    spec: SpecLike | None,
    rules: Mapping[str, Any] | None,
    accumulate: MatmulSpec | None,
    unknown: str,
    max_turns: int | None = None,
    stop_at: str | None = None,
    narrow: str = "raise",
) -> Settings:
    """The checked settings of `emulate`."""
    check_choice("unknown", unknown, UNKNOWN_TREATMENTS)
    check_choice("narrow", narrow, NARROW_TREATMENTS)
    if accumulate is not None and not isinstance(accumulate, MatmulSpec):
        raise TypeError(f"accumulate={accumulate!r} must be a MatmulSpec, or None for the carrier's own sums")
    if max_turns is not None:
        max_turns = check_int("max_turns", max_turns, 1, (1 << 32) - 1)
    if stop_at is not None:
        check_choice("stop_at", stop_at, EVENTS)
    pairs = []
    if rules is not None and rules != {}:  # no rules are as none
        for pattern, value in check_pattern_mapping("rules", rules, "{'sin': 'bfloat16'}"):
            pairs.append((pattern, _as_emulation_rule(value, f"rules[{pattern!r}]")))
    return Settings(_as_plain_spec(spec, "spec"), tuple(pairs), accumulate, unknown, max_turns, stop_at, narrow)


def _as_emulation_rule(value: Any, argument: str) -> Spec | MatmulSpec | PrimitiveFunction | Wide | None:
    if isinstance(value, MatmulSpec):
        return value
    if value == WIDE.value:
        return WIDE
    if not isinstance(value, Spec | ElementFormat | ScaledFormat) and callable(value):
        return PrimitiveFunction(value)
    try:
        return _as_plain_spec(value, argument)
    except ValueError as error:  # the error of a text names no argument
        if str(error).startswith(argument):
            raise
        raise ValueError(f"{argument}: {error}") from None


def _as_plain_spec(value: Any, argument: str) -> Spec | None:
    if value is None:
        return None
    spec = as_spec(value, argument)
    if spec.gradient != Gradient():
        raise ValueError(
            f"{argument}={str(spec)!r} has a gradient; derivatives of an emulated function are straight-through, "
            "and emulate(jax.grad(fun), spec) computes them in the arithmetic of spec"
        )
    return spec
