"""Every public function of jchop within an emulated function: it keeps its own arithmetic, or is refused with a reason.

What a function of jchop returns is that of the function called by itself, on the rounded arguments, rounded once to the
arithmetic around; codes and scales are not rounded. Functions that need values, which a trace does not have, are
refused.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop.formats import ElementFormat, ScaledFormat

further = Further()

math, linalg = jc.math, jc.math.linalg

KEY = jax.random.key(5)
#: The arithmetic around, and that of the functions: neither holds the other's values, and no two roundings commute.
AROUND, OWN = "e5m4", "e5m7:up"
SUMS, PRODUCTS = jc.MatmulSpec("e4m5:down", None, "e5m7:odd"), jc.MatmulSpec("e4m5:down", OWN, "e5m7:odd")
NUMBERS = [np.random.default_rng(i).uniform(0.2, 0.9, (4, 8)).astype(np.float32) for i in range(3)]
X, Y, Z = map(jax.device_put, NUMBERS)
SQUARE = jax.device_put(NUMBERS[0] @ NUMBERS[0].T + 2 * np.eye(4, dtype=np.float32))
SCALED, ZERO_POINTS = "int8(channel=0)", "uint4(group=4,zero_point=float)"
PARTS = ("absmax", "zero")
MATRICES = dict.fromkeys(("cg", "gmres", "refine", "solve_triangular"), (SQUARE, jax.device_put(NUMBERS[0][:, 0])))


@dataclass(frozen=True)
class Row:
    """A call of a public function: what it takes, and what is expected of it within an emulated function."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = (X,)
    error: str | None = None  # the words of a refusal
    rounded: bool = True  # whether results are rounded to the arithmetic around


def row(name: str, *args: Any, **more: Any) -> Row:
    return Row(partial(getattr(math, name), spec=OWN, **more), args or (X,))


def stored(x: jax.Array) -> jc.QArray:
    return jc.quantize(x, SCALED)


@cache
def experts() -> jc.QArray:
    return jc.quantize(np.stack([X.T, Y.T]), "int8(group=all,axis=1)")


@cache
def kept() -> jc.KVCache:
    return jc.KVCache.full((1, 8, 1, 4)).update(X[None, :, None, :4], Y[None, :, None, :4])


TOP: dict[str, Row] = {
    "round_to_format": Row(lambda x: jc.round_to_format(x, SCALED)),
    "quantize": Row(lambda x: jc.quantize(x, SCALED), rounded=False),
    "dequantize": Row(jc.dequantize, (jc.quantize(X, SCALED),)),
    "fit_scale": Row(lambda x: jc.fit_scale(x, ZERO_POINTS), rounded=False),
    "flip_bits": Row(lambda x: jc.flip_bits(x, "e5m7", 0.5, KEY)),
    "random_bits": Row(lambda x: jc.random_bits(KEY, x.shape)),
    "emulate": Row(jc.emulate(lambda x: jnp.sin(x) * x, OWN)),
    "quantize_fn": Row(jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="e5m2")), (X.T, X)),
    "dot": Row(jc.dot, (X, jc.quantize(X.T, "int8(group=all,axis=0)"))),
    "einsum": Row(lambda x: jc.einsum("ij,kj->ik", x, stored(x))),
    "ragged_dot": Row(lambda x: jc.ragged_dot(x, experts(), np.array([1, len(X) - 1]))),
    "dot_product_attention": Row(lambda q: jc.dot_product_attention(q, kept()), (jnp.ones((1, 1, 2, 4)) / 3,)),
    "save": Row(lambda x: jc.save("never.safetensors", {"x": x}), error="save writes"),
    "load": Row(lambda: jc.load(Path("none.safetensors")), (), error=r"none\.safetensors"),
    "load_checkpoint": Row(lambda: jc.load_checkpoint("none.gguf"), (), error=r"none\.gguf"),
    "encode_checkpoint": Row(lambda x: jc.encode_checkpoint({"x": x}, "plain").tensors["x"]),
    "save_checkpoint": Row(lambda x: jc.save_checkpoint("never", {"x": x}, "plain"), error="save_checkpoint writes"),
    "round_file": Row(lambda: jc.round_file("none.npy", "never.npy", "e5m2"), (), error=r"none\.npy"),
    "compare": Row(jc.compare, error="x is traced: compare looks at numbers"),
    "probe": Row(lambda x: jc.probe(lambda a, b: x, length=64), error="matmul gave shape|traced|Tracer"),
    "significant_digits": Row(
        lambda x: jc.significant_digits(jnp.sin, x, key=KEY), error="significant_digits needs arguments that are not"
    ),
    "tune": Row(lambda x: jc.tune(jnp.sin, [OWN, None], [(x,)], 0.1), error="tune needs arguments that are not traced"),
    "to_qwix": Row(lambda x: jc.to_qwix(stored(x)), error="to_qwix|never"),
    "from_qwix": Row(lambda x: jc.from_qwix(x), error="from_qwix|WithAux"),
}
#: Public functions that make formats and specs, and the policy of `jax.checkpoint`.
MAKERS = {"parse", "bfp", "p3109", "finfo", "tensor_core", "TENSOR_CORES", "save_codes"}

ONE = """
    abs angle arccos arcsin arcsinh arctan arctanh cbrt ceil conj cos cosh degrees diff erf erfc exp exp2 expm1 fabs
    floor frexp gamma imag log log1p log2 log10 modf negative radians real reciprocal round sign sin sinh sqrt
    square tan tanh trunc cumsum cumprod prod argmax argmin digamma gammaln gelu max min sigmoid
"""
TWO = """
    add arctan2 bitwise_and bitwise_or bitwise_xor divide floor_divide hypot logaddexp maximum minimum mod multiply
    power subtract outer
"""

MATH: dict[str, Row] = {
    **{name: row(name) for name in ONE.split()},
    **{name: row(name, X, Y) for name in TWO.split()},
    **{name: row(name, X, Y, Z) for name in ("axpy", "fma")},
    **{name: Row(partial(getattr(math, name), spec=SUMS)) for name in ("mean", "norm", "std", "sum", "var")},
    **{name: Row(partial(getattr(math, name), spec=SUMS)) for name in ("logsumexp", "softmax", "trace")},
    **{name: Row(partial(getattr(math, name), spec=PRODUCTS), (X, Y)) for name in ("inner", "vdot")},
    "tensordot": Row(partial(math.tensordot, spec=PRODUCTS, axes=1), (X, Y.T)),
    "cross": row("cross", X[:, :3], Y[:, :3]),
    "interp": row("interp", X, jnp.linspace(0.1, 0.8, 5), Y[0, :5]),
    "linspace": row("linspace", X[0], Y[0], num=5),
    "where": Row(lambda x, y: math.where(x < y, x, y, OWN), (X, Y)),
    "arccosh": row("arccosh", 1 + X),
    "clip": row("clip", X, Y * 0.5, 0.5 + Y),
    "ldexp": Row(lambda x: math.ldexp(x, np.int32(3), OWN)),
    "conv": Row(partial(math.conv, spec=PRODUCTS), (X.reshape(1, 4, 8), Y.reshape(1, 4, 8)[:, :, :2])),
    "dot": Row(partial(math.dot, spec=PRODUCTS), (X[0], Y[0])),
    "einsum": Row(lambda x, y: math.einsum("ij,kj,kl->il", x, y, y, spec=PRODUCTS), (X, Y)),
    "matmul": Row(partial(math.matmul, spec=PRODUCTS), (X, Y.T)),
    "matmul_double": Row(lambda x, y: math.matmul_double((x, 0 * x), (y, 0 * y), tolerance=1e-8)[0], (X, Y.T)),
}

LINALG: dict[str, Row] = {
    "cg": Row(lambda a, b: linalg.cg(lambda v: a @ v, b, OWN, tol=0, maxiter=2), (SQUARE, X[:, 0])),
    "gmres": Row(lambda a, b: linalg.gmres(a, b, OWN, tol=0, restart=2, maxiter=1), (SQUARE, X[:, 0])),
    "cholesky": Row(lambda a: linalg.cholesky(a, OWN), (SQUARE,)),
    "lu": Row(lambda a: linalg.lu(a, OWN), (SQUARE,)),
    "lu_solve": Row(lambda a, b: linalg.lu_solve((a, jnp.arange(4)), b, OWN), (SQUARE, X[:, 0])),
    "qr": Row(lambda a: linalg.qr(a, OWN), (SQUARE,)),
    "solve_triangular": Row(lambda a, b: linalg.solve_triangular(a, b, OWN), (SQUARE, X[:, 0])),
    "refine": Row(
        lambda a, b: linalg.refine(a, b, factor="e5m4", working=OWN, residual="binary16", steps=1), (SQUARE, X[:, 0])
    ),
}

TABLES = {"jchop": (jc, TOP), "jchop.math": (math, MATH), "jchop.math.linalg": (linalg, LINALG)}


def same(got: Any, want: Any, name: str = "") -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want), name
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype, name
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


def rounded(value: Any) -> Any:
    return jax.tree.map(lambda x: jc.round_to_format(x, AROUND) if jnp.issubdtype(x.dtype, jnp.inexact) else x, value)


@pytest.mark.parametrize("place", TABLES)
def test_every_public_function_has_a_row(place: str) -> None:
    module, rows = TABLES[place]
    others = ElementFormat | ScaledFormat | ModuleType | type
    assert set(rows) == {name for name in module.__all__ if not isinstance(getattr(module, name), others)} - MAKERS


def parts_of_rows() -> list[tuple[str, list[str]]]:
    """The names of a table that give a result, ten at a time; first some of few operations."""
    parts = [("jchop.math", ["sign", "real", "negative", "add"])]
    for place, (_, rows) in TABLES.items():
        names = [name for name, row in rows.items() if row.error is None]
        parts += [(place, names[i : i + 10]) for i in range(0, len(names), 10)]
    return parts


@pytest.mark.in_turn(100)
@pytest.mark.parametrize(("place", "names"), parts_of_rows())
def test_within_an_emulated_function(place: str, names: list[str]) -> None:
    """Several in one program: each is an operation of its own."""
    rows = {name: TABLES[place][1][name] for name in names}
    arguments = {name: [rounded(x) if isinstance(x, jax.Array) else x for x in row.args] for name, row in rows.items()}
    want = {name: row.call(*arguments[name]) for name, row in rows.items()}
    low = jc.emulate(lambda args: {name: row.call(*args[name]) for name, row in rows.items()}, AROUND)
    got = low({name: row.args for name, row in rows.items()})
    for name, row in rows.items():
        same(got[name], rounded(want[name]) if row.rounded else want[name], f"{place}.{name}")


def test_what_is_refused_within_an_emulated_function() -> None:
    for name, row in TOP.items():
        if row.error is None or (name.endswith("_qwix") and importlib.util.find_spec("qwix") is not None):
            continue  # the error of those is that of an environment without qwix
        with pytest.raises((TypeError, ValueError, OSError, ImportError), match=row.error):
            jc.emulate(row.call, AROUND)(*row.args)
            pytest.fail(f"jchop.{name} is not refused")


@pytest.mark.smoke
@pytest.mark.in_turn(10)
@pytest.mark.parametrize(
    "spec", [SCALED, "nf4(channel=0)", "mxfp4", "nvfp4", "uint4(group=4,zero_point=float)", "e5m2"]
)
def test_formats(spec: str) -> None:
    """Arguments are rounded; so are results of `round_to_format`. Codes and scales are left, also of a constant."""
    same(jc.emulate(lambda x: jc.round_to_format(x, spec), AROUND)(X), rounded(jc.round_to_format(rounded(X), spec)))
    q = jc.quantize(X, spec)
    same(jc.emulate(lambda: jc.dequantize(q), AROUND)(), rounded(jc.dequantize(q)))
    same(jc.emulate(jc.dequantize, AROUND)(q), rounded(jc.dequantize(q)))
    packed = jc.emulate(lambda x: jc.quantize(x, spec), AROUND)(X)
    same(packed, jc.quantize(rounded(X), spec))
    same(jc.emulate(lambda x: jc.dequantize(jc.quantize(x, spec)), AROUND)(X), rounded(jc.dequantize(packed)))


@further.first
def an_operation_rounds_what_it_takes_of_a_function() -> None:
    low = jc.emulate(lambda x: -math.exp(x, OWN), AROUND)
    same(low(X), -rounded(math.exp(rounded(X), OWN)))


@further
def an_arithmetic_within_another_is_one_operation() -> None:
    """Also where one function takes the result of another, or calls others, and within loops and inner emulations."""
    twice = lambda x: math.exp(math.sin(x, OWN), OWN)  # noqa: E731
    want = rounded(math.exp(rounded(math.sin(rounded(X), OWN)), OWN))
    same(jc.emulate(twice, AROUND)(X), want)
    same(jc.emulate(jax.jit(twice), AROUND)(X), want)
    same(jc.emulate(lambda x: jax.lax.fori_loop(0, 1, lambda _, c: twice(c), x), AROUND)(X), want)
    inner = jc.emulate(twice, "e5m9")
    same(jc.emulate(inner, AROUND)(X), rounded(inner(rounded(X))))
    same(jc.emulate(jc.emulate(inner, None), AROUND)(X), rounded(inner(rounded(X))))
    deep = jc.emulate(lambda a, b: linalg.lu_solve(linalg.lu(a, OWN), b, OWN), "e5m9")
    same(jc.emulate(deep, AROUND)(SQUARE, X[:, 0]), rounded(deep(rounded(SQUARE), rounded(X[:, 0]))))
    assert float(jc.emulate(lambda x: math.divide(x, 3.0, "e4m3"), "bfloat16")(jnp.float32(1))) == 0.34375


def test_derivatives_and_transformations() -> None:
    low = jc.emulate(lambda x: math.exp(x, OWN), AROUND)
    want = rounded(math.exp(rounded(X), OWN))
    same(jax.jit(low)(X), want)
    same(jax.vmap(low)(X), want)
    same(
        jax.jvp(low, (X,), (jnp.ones_like(X),))[1],
        jax.jvp(lambda x: math.exp(x, OWN), (rounded(X),), (jnp.ones_like(X),))[1],
    )


@further
def the_report_does_not_list_operations_of_functions() -> None:
    low = jc.emulate(lambda x: math.mean(x, SUMS) + 1, AROUND)
    assert [entry.primitive for entry in low.report(X, trace_values=True).rows] == ["jchop", "add"]


test_further = further.test()
