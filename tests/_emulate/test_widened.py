"""Arrays of narrower dtypes inside emulated functions: `narrow="carrier"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jchop as jc

X = np.array([0.3, 1.7, -2.2, 1.1], np.float32)
KEY = jax.random.key(0)
THREE = np.array([3, 3, 3, 3], np.float32)
slow = pytest.mark.slow


@jax.custom_vjp
def _halved(y):
    return y * y.dtype.type(0.5)


_halved.defvjp(lambda y: (_halved(y), y), lambda y, g: (g * y.dtype.type(0.5),))


def _own_primitive(y):
    return _TRIPLE.bind(y)


_TRIPLE = Primitive("test_triple")
_TRIPLE.def_abstract_eval(lambda y: y)
mlir.register_lowering(_TRIPLE, mlir.lower_fun(lambda y: y * y.dtype.type(3), multiple_results=False))

#: Functions of numbers and a dtype, whose results are float32.
PROGRAMS = {
    "a scalar": lambda x, t: x * (jnp.asarray(0.7, t) * jnp.asarray(x[0], t)).astype(jnp.float32),
    "a scan": lambda x, t: lax.scan(lambda c, a: (c * a.astype(t), c + t(1.3)), t(1.1), x)[1].astype(jnp.float32),
    "a rule for derivatives": lambda x, t: jax.nn.relu(x.astype(t) * t(0.7)).astype(jnp.float32) * x,
    "a rule for cotangents": lambda x, t: _halved(x.astype(t) * t(0.7)).astype(jnp.float32) * x,
    "numbers beyond the dtype": lambda x, t: (x.astype(t) * t(1000) * t(300)).astype(jnp.float32),
    "a while loop": lambda x, t: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + t(1), c[1] * x.astype(t)), (t(0), x.astype(t))
    )[1].astype(jnp.float32),
    "a branch": lambda x, t: lax.cond(x[0] > 0, lambda y: y * t(2.7), lambda y: y, x.astype(t)).astype(jnp.float32),
    "calls": lambda x, t: jax.checkpoint(jax.jit(lambda y: y * t(2.7)))(x.astype(t)).astype(jnp.float32),
    "sums": lambda x, t: jnp.mean(x.astype(t)).astype(jnp.float32) + jnp.vdot(x.astype(t), x.astype(t)),
    "a product in its dtype": lambda x, t: jnp.matmul(x.astype(t), x.astype(t), preferred_element_type=t) * x,
    "a scatter": lambda x, t: jnp.zeros(3, t).at[jnp.array([0, 1, 1, 2])].add(x.astype(t)).astype(jnp.float32),
    "a gradient": lambda x, t: jax.grad(lambda x: jnp.sum(jax.nn.silu(x.astype(t)).astype(jnp.float32) ** 2))(x),
    "axes with names": lambda x, t: jax.vmap(lambda y: lax.psum(y.astype(t), "a"), axis_name="a")(x) * x,
    "a rule for batches": lambda x, t: jax.custom_batching.sequential_vmap(lambda y: jnp.sin(y.astype(t)))(x) * x,
    "a solver": lambda x, t: jax.scipy.sparse.linalg.cg(lambda v: v * t(2), x.astype(t))[0].astype(jnp.float32),
    "a primitive of a package": lambda x, t: _own_primitive(x.astype(t)).astype(jnp.float32),
}
EARLY = ("a scalar", "a scan", "a rule for derivatives")


@pytest.mark.parametrize("name", [name if name in EARLY else pytest.param(name, marks=slow) for name in PROGRAMS])
def test_narrower_arrays_are_computed_in_the_carrier_of_the_arguments(name: str) -> None:
    """The bits are those of the same function written in float32."""
    run = PROGRAMS[name]
    low = jc.emulate(lambda x: run(x, jnp.float16), "bfloat16", narrow="carrier")
    want = jc.emulate(lambda x: run(x, jnp.float32), "bfloat16")(X)
    for got in (low(X), jax.jit(low)(X)) if name in EARLY[:1] else (low(X),):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == jnp.float32


@pytest.mark.parametrize("name", [EARLY[0], *(pytest.param(name, marks=slow) for name in EARLY[1:])])
def test_the_default_refuses_narrower_arrays_and_names_the_option(name: str) -> None:
    """Without the option the dtype of the array must hold the format."""
    with pytest.raises(ValueError, match=r"cast x to float32.*narrow='carrier'"):
        jc.emulate(lambda x: PROGRAMS[name](x, jnp.float16), "bfloat16")(X)
    with pytest.raises(ValueError, match="narrow='float32'"):
        jc.emulate(jnp.sin, "bfloat16", narrow="float32")  # type: ignore[arg-type]


def test_arguments_and_constants_of_narrower_dtypes_are_rounded_once_to_the_format() -> None:
    """The widest argument decides; 1 + 2^-10 of float16 is 1 in bfloat16, and a Python float decides nothing."""
    half = np.array([1 + 2**-10, 65504, 3e-5, -0.1], np.float16)
    low = jc.emulate(lambda x, y, z: (x * y + half) * z, "bfloat16", narrow="carrier")
    to = lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    want = to(to(to(X) * to(half)) + to(half))
    np.testing.assert_array_equal(low(X, half, 1.0), want)
    alone = jc.emulate(lambda x, z: x * z, "e5m2", narrow="carrier")(half, 2.0)
    assert alone.dtype == jnp.float16
    np.testing.assert_array_equal(alone, jc.emulate(lambda x, z: x * z, "e5m2")(half, np.float16(2)))


def test_limits_of_narrower_dtypes_become_limits_of_the_format() -> None:
    """The least number of float16 masks in e4m3fn, which has no infinity, and is a number like others in bfloat16."""
    floor = lambda x: jnp.where(x > 9, x.astype(jnp.float16), jnp.finfo(jnp.float16).min).astype(x.dtype)  # noqa: E731
    for spec, least in (("e4m3fn", -448.0), ("bfloat16", -65536.0)):
        np.testing.assert_array_equal(jc.emulate(floor, spec, narrow="carrier")(X), np.full(4, least, np.float32))


def test_results_and_foreign_functions_keep_their_dtypes() -> None:
    """What has the format's numbers passes; what has not is refused with the line."""
    half = jnp.float16
    foreign = lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((4,), half), x.astype(half)) * x  # noqa: E731
    bits = lambda x: lax.bitcast_convert_type(x.astype(half), jnp.uint16)  # noqa: E731
    result = lambda x: x.astype(half)  # noqa: E731
    for fun in (result, foreign, bits):
        with pytest.raises(ValueError, match=r"float16, which cannot hold.*except results and foreign"):
            jc.emulate(fun, "bfloat16", narrow="carrier")(X)
    low = np.asarray(X, ml_dtypes.float8_e5m2).astype(np.float16)
    assert jc.emulate(result, "e5m2", narrow="carrier")(X).dtype == half
    np.testing.assert_array_equal(jc.emulate(result, "e5m2", narrow="carrier")(X), low)
    np.testing.assert_array_equal(jc.emulate(bits, "e5m2", narrow="carrier")(X), low.view(np.uint16))


@pytest.mark.parametrize("draw", ["uniform", pytest.param("normal", marks=slow), pytest.param("gumbel", marks=slow)])
def test_draws_of_narrower_dtypes_are_rounded_once(draw: str) -> None:
    """Their bits are those of the dtype, and the result is a number of the format within its interval."""
    sample = getattr(jax.random, draw)
    low = jc.emulate(
        lambda key, x: sample(key, (300,), jnp.float16).astype(jnp.float32) + 0 * x[0], "bfloat16", narrow="carrier"
    )
    got = np.asarray(low(KEY, X))
    np.testing.assert_array_equal(got, got.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(got, np.asarray(sample(KEY, (300,), jnp.float16), np.float32), rtol=2**-6, atol=2**-8)
    assert draw != "uniform" or (got.min() >= 0 and got.max() < 1)


def test_functions_of_jchop_keep_narrower_arrays() -> None:
    """Codes, scales and results of float16 are those of the function alone."""
    fmt = "int8(group=4,scale=bfloat16)"
    alone = jc.quantize(X.astype(np.float16), fmt)
    fun = lambda x: jc.dequantize(jc.quantize(x.astype(jnp.float16), fmt)).astype(jnp.float32)  # noqa: E731
    np.testing.assert_array_equal(
        jc.emulate(fun, "binary16", narrow="carrier")(X.astype(np.float16).astype(np.float32)), jc.dequantize(alone)
    )


@pytest.mark.parametrize(
    "name",
    ["a rule for derivatives", pytest.param("a rule for cotangents", marks=slow), pytest.param("a scan", marks=slow)],
)
def test_derivatives_around_widened_programs(name: str) -> None:
    """The derivative is the carrier's at the emulated values, through the rule in its own dtype."""
    run = PROGRAMS[name]
    low = jc.emulate(lambda x: jnp.sum(run(x, jnp.float16)), "bfloat16", narrow="carrier")
    want = jax.grad(lambda x: jnp.sum(run(x, jnp.float32)))(X)
    np.testing.assert_allclose(jax.grad(low)(X), want, rtol=0.05, atol=0.02)
    np.testing.assert_array_equal(jax.vmap(low)(np.stack([X, X]))[1], low(X))


def test_reports_show_the_lines_of_the_function() -> None:
    """Rows of widened equations have the scope and the line that they had."""
    low = jc.emulate(lambda x: x * jax.nn.silu(x.astype(jnp.float16)).astype(x.dtype), "bfloat16", narrow="carrier")
    rows = low.report(X).rows
    assert {row.scope for row in rows} == {"", "silu"}
    assert all(__file__ in row.source for row in rows)


#: Functions with numbers of a fixed dtype, and the same in the dtype of the argument.
FIXED = {
    "float16": (
        lambda x: x / jnp.asarray(3, jnp.float16).astype(x.dtype) + (x / 3).astype(jnp.float16),
        lambda x: x / 3 + x / 3,
    ),
    "float32": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: c + (x / THREE)[i], jnp.float32(0)),
        lambda x: lax.fori_loop(0, 3, lambda i, c: c + x[i] / 3, jnp.zeros((), x.dtype)),
    ),
    "results": (lambda x: {"a": (x / 3).astype(jnp.bfloat16)}, lambda x: {"a": x / 3}),
}


@pytest.mark.parametrize("name", ["float32", pytest.param("float16", marks=slow), pytest.param("results", marks=slow)])
def test_significant_digits_compute_fixed_dtypes_in_float64(name: str) -> None:
    """The samples are those of the function without fixed dtypes; the default refuses and names the option."""
    fixed, free = FIXED[name]
    with pytest.raises((TypeError, ValueError), match="narrow='carrier'"):
        jc.significant_digits(fixed, X, key=KEY)
    got, want = jc.significant_digits(fixed, X, key=KEY, narrow="carrier"), jc.significant_digits(free, X, key=KEY)
    assert got.worst > 5 and jax.tree.structure(got.digits) == jax.tree.structure(want.digits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got.mean, want.mean)
    with pytest.raises(ValueError, match="from emulate has its own; pass it to emulate"):
        jc.significant_digits(jc.emulate(free, "binary16:stochastic"), X, key=KEY, narrow="carrier")
