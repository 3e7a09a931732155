"""Calls that make no sense are refused by an error that names the argument."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jchop as jc
import jchop.matlab
from jchop._storage import fit_half_quadratic
from jchop.compat import piquant, pychop
from jchop.compat.qtorch import quant as qtorch

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
MASKED = np.ma.masked_array(X, X > 0)
MASKED_SQUARE = np.ma.masked_array(np.eye(2), np.eye(2) > 0)
CODES = np.ma.masked_array(np.zeros(4, np.uint8), True)
A, B = np.array([[4.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0])
IMAGE, WINDOW = X.reshape(1, 2, 4), np.ones((1, 2, 2), np.float32)
TWICE = "e5m2:stochastic:gradient=[e5m2:stochastic]"
OFFSET = "bfloat16:stochastic"
HQQ = "uint4(group=2,zero_point=float)"
math, linalg = jc.math, jc.math.linalg
REDUCED = (math.sum, math.mean, math.var, math.std, math.norm, math.prod)
RUNNING = (math.cumsum, math.cumprod)
CUMULATIVE = (math.cumsum, math.cumprod)
MASKING = (math.sum, math.mean, math.var, math.std, math.prod, math.logsumexp)


def key() -> jax.Array:
    return jax.random.key(0)


def stored() -> jc.QArray:
    return jc.quantize(X, "int8(channel=0)")


def sparse() -> BCOO:
    return BCOO.fromdense(jnp.eye(2))


def lu_solve(p: Any, wrap: Callable[[Any], Any] = np.asarray) -> Any:
    return linalg.lu_solve((wrap(A), wrap(p)), wrap(B), "bfloat16")


def conv(**more: Any) -> Any:
    return math.conv(IMAGE, WINDOW, "bfloat16", **more)


def rounded(spec: str = OFFSET, **more: Any) -> Any:
    return jc.round_to_format(X, spec, key(), **more)


# What is called, and what its error says.
Row = tuple[Callable[[], Any], str]

ELEMENTS: list[Row] = [
    (lambda: jc.round_to_format(MASKED, "e5m2"), r"x is a masked array.*x\.filled"),
    (lambda: jc.round_to_format(MASKED, "mxfp4"), "x is a masked array"),
    (lambda: jc.flip_bits(MASKED, "e5m2", 0.5, key()), "x is a masked array"),
    (lambda: rounded(TWICE, gradient_key=key()), "gradient_key is the same as key"),
    (lambda: rounded("e5m2", offset=-1), "offset=-1"),
    (lambda: rounded(offset=1.5), r"offset=1\.5"),
    (lambda: rounded(offset=True), "offset=True"),
    (lambda: rounded(offset=jnp.int32(-3)), "offset=.*-3"),
    (lambda: rounded(offset=jnp.arange(2)), "offset has an entry of shape"),
    (lambda: rounded(offset=((jnp.int32(5), 0), (2, 4))), "offset=.*does not lie within the whole"),
    (lambda: rounded(offset=((0, 1), (2, 4))), "offset=.*does not lie within the whole"),
    (lambda: rounded(offset=((0, -1), (2, 4))), "offset=-1"),
    (lambda: rounded(impl="fast"), "impl='fast'"),
    (lambda: rounded(generator="fast"), "generator='fast'"),
    (lambda: jc.round_to_format(np.int64(3), "e5m2"), r"x has dtype int64.*x\.astype\('float32'\)"),
    (lambda: jc.round_to_format([2**53 + 1], "e5m2"), r"x has integers beyond 2\*\*53"),
    (lambda: jc.round_to_format([2**63], "e5m2"), r"x has integers beyond 2\*\*53"),
    (lambda: jc.round_to_format([1, 10**400], "e5m2"), "x has integers of more than 64 bits"),
    (lambda: jc.round_to_format(True, "e5m2"), "x has dtype bool"),
    (lambda: jc.round_to_format(None, "e5m2"), "x has dtype object.*Pass a number or an array of floats"),
    (lambda: jc.round_to_format("1", "e5m2"), "x has dtype <U1.*Pass a number or an array of floats"),
    (lambda: jc.round_to_format({"a": X}, "e5m2"), "x is a dict.*jax.tree.map"),
    (lambda: jc.round_to_format(sparse(), "e5m2"), r"x is a sparse BCOO.*x\.data, or x\.todense\(\)"),
    (lambda: jc.quantize(sparse(), "int8"), r"x is a sparse BCOO.*x\.data, or x\.todense\(\)"),
    (lambda: jc.quantize(X * 1j, "int8"), r"x has dtype complex64.*x\.real and x\.imag"),
    (lambda: jc.quantize(jax.ShapeDtypeStruct((2,), "float32"), "int8"), "x is a ShapeDtypeStruct, not an array"),
    (lambda: jc.quantize(jc.Rule(), "int8"), "x is a Rule, not an array; jchop.nn.quantize takes models"),
    (lambda: math.add(X, len, "bfloat16"), "y is a builtin_function_or_method, not an array.*jax.tree.map"),
    (lambda: jc.round_to_format(stored(), "e5m2"), r"x is a QArray.*jchop\.dequantize\(x\)"),
    (lambda: jc.round_to_format(X, "e5m2", 0), "key=0 must be a typed key"),
    (lambda: jc.round_to_format(X, OFFSET, jax.random.key_data(key())), "key=an array of dtype uint32"),
    (lambda: jc.round_to_format(X, OFFSET, jax.random.split(key())), r"key has shape \(2,\)"),
    (lambda: jc.round_to_format(X, "int4(channel=5)"), "channel=5"),
    (lambda: jc.round_to_format(X, "int4(group=0)"), "group=0"),
    (lambda: jc.random_bits(key(), 3), "shape=3"),
    (lambda: jc.random_bits(key(), (-3,)), r"^shape=\(-3,\): length=-3 must be"),
    (lambda: jc.random_bits(key(), (2.0,)), r"shape=\(2\.0,\): length=2\.0"),
    (lambda: jc.random_bits(key(), (True,)), r"shape=\(True,\): length=True"),
    (lambda: jc.random_bits(key(), (3,), width=16), "width=16"),
    (lambda: jc.random_bits(key(), (3,), offset=((0,), (2,))), "offset=.*does not lie within the whole"),
    (lambda: jc.flip_bits(X, "e5m2", 1.5, key()), r"p=1\.5"),
    (lambda: jc.flip_bits(X, "e5m2", float("nan"), key()), "p=nan"),
    (lambda: jc.flip_bits(X, "e5m2", True, key()), "p=True"),
    (lambda: jc.flip_bits(X, "e5m2", 0.5, key(), where="sign"), "where='sign'"),
    (lambda: jc.formats.float8_e5m2.encode(MASKED), "values is a masked array"),
    (lambda: jc.formats.float8_e5m2.decode(CODES), "codes is a masked array"),
    (lambda: jc.formats.float8_e5m2.decode([256]), "codes must lie in"),
    (lambda: jax.jit(jc.formats.float8_e5m2.decode)(3), r"^codes has arrays that JAX traces .*jchop.quantize"),
    (lambda: jax.jit(jc.formats.float8_e5m2.encode)(3.0), "^values has arrays that JAX traces"),
]
STORAGE: list[Row] = [
    (lambda: jc.quantize(MASKED, "int8(channel=0)"), "x is a masked array"),
    (lambda: jc.fit_scale(MASKED, "int8(channel=0)"), "x is a masked array"),
    (lambda: fit_half_quadratic(MASKED, HQQ), "x is a masked array"),
    (lambda: fit_half_quadratic(X, HQQ, iterations=0), "iterations=0"),
    (lambda: jc.quantize(X, "int8(channel=2)"), "axis 2"),
    (lambda: jc.quantize(X, "int8(channel=0)", scale=-1.0), r"scale is -1\.0"),
    (lambda: jc.dequantize(stored(), dtype="int32"), "dtype='int32'"),
    (lambda: stored()[5], "index 5 is outside axis 0"),
    (lambda: stored()[jnp.int32(5)], "index 5 is outside axis 0"),
    (lambda: stored()[jnp.array([0, 5])], "index 5 is outside axis 0"),
    (lambda: stored()[np.array([0, -3])], "index -3 is outside axis 0"),
    (lambda: stored()[[0, 2]], "index 2 is outside axis 0"),
    (lambda: stored()[:, np.array([4])], "index 4 is outside axis 1"),
    (lambda: stored()[np.ma.masked_array([0, 1], [0, 1])], "index is a masked array"),
    (lambda: stored()[0.5], r"index 0\.5"),
    (lambda: stored()[0, 0, 0], "3 indexes for an array of 2 axes"),
    (lambda: stored().transpose(0, 0), r"axes=\(0, 0\)"),
    (lambda: stored().transpose(0, 5), "axes=5"),
    (lambda: stored().transpose(-3, 0), "axes=-3"),
    (lambda: stored().transpose(0.0, 1), r"axes=0\.0"),
    (lambda: stored().transpose("ab"), "axes='a'"),
    (lambda: stored().reshape(2.0, 4), r"shape=2\.0"),
    (lambda: stored().reshape(3, 3), r"shape=\(3, 3\)"),
    (lambda: stored().reshape(-2, -4), "shape=-2"),
]
MATH: list[Row] = [
    *((lambda f=f: f(MASKED, "bfloat16"), "x is a masked array") for f in (*REDUCED, *RUNNING)),
    *((lambda f=f: f(X, "bfloat16", axis=5), "axis=5") for f in (*REDUCED, *RUNNING)),
    *((lambda f=f: f(X, "bfloat16", axis=(0, 0)), r"axis=\(0, 0\)") for f in REDUCED),
    *((lambda f=f: f(X, "bfloat16", axis=(0, 9)), "axis=9") for f in REDUCED),
    *((lambda f=f: f(X, "bfloat16", keepdims=1), "keepdims=1") for f in REDUCED),
    *((lambda f=f: f(X, "bfloat16", ddof=8), "ddof=8 .*8") for f in (math.var, math.std)),
    *((lambda f=f: f(X, "bfloat16", axis=0, ddof=3), "ddof=3 .*2") for f in (math.var, math.std)),
    *((lambda f=f: f(X, "bfloat16", ddof=0.5), r"ddof=0\.5") for f in (math.var, math.std)),
    *((lambda f=f: f(X, "bfloat16", ddof=float("nan")), "ddof=nan") for f in (math.var, math.std)),
    (lambda: math.norm(X, "bfloat16", ord=3), "ord=3"),
    (lambda: math.norm(X, "bfloat16", ord=1), "ord=1 with axis=None"),
    (lambda: math.diff(X, "bfloat16", n=-1), "n=-1"),
    (lambda: math.diff(X, "bfloat16", axis=5), "axis=5"),
    (lambda: math.diff(MASKED, "bfloat16"), "x is a masked array"),
    (lambda: math.frexp(MASKED, "bfloat16"), "x is a masked array"),
    (lambda: math.modf(MASKED, "bfloat16"), "x is a masked array"),
    (lambda: math.ldexp(X, 1.5, "bfloat16"), "n has dtype float64"),
    (lambda: math.ldexp(X, np.ma.masked_array([1, 2, 3, 4], [0, 1, 0, 0]), "bfloat16"), "n is a masked array"),
    (lambda: math.add(X, np.array(["1"]), "bfloat16"), "y has dtype <U1"),
    (lambda: math.add(X, np.ones(4, object), "bfloat16"), "y has dtype object"),
    *((lambda f=f: f(X, "bfloat16", axis=(0, 1)), r"axis=\(0, 1\) must be an integer from -2") for f in CUMULATIVE),
    *((lambda f=f: f(X, "bfloat16", axis=()), r"axis=\(\) must be an integer from -2") for f in CUMULATIVE),
    *((lambda f=f: f(X * 1j, "bfloat16"), r"complex64.*jchop\.emulate\(fun, spec\).*x\.real") for f in CUMULATIVE),
    (lambda: math.add(1.0, X * 1j, "bfloat16"), r"y has dtype complex64.*jchop\.emulate\(fun, spec\)"),
    (lambda: math.matmul(X * 1j, X, "bfloat16"), r"a has dtype complex64.*jchop\.emulate\(fun, spec\)"),
    (lambda: math.sin(sparse(), "bfloat16"), r"x is a sparse BCOO.*x\.data, or x\.todense\(\)"),
    *((lambda f=f: f(X, "bfloat16", where=X), "where has dtype float32") for f in (*MASKING, math.max, math.softmax)),
    *((lambda f=f: f(X, "bfloat16", where=np.ones(3, bool)), "where has shape") for f in MASKING),
    *((lambda f=f: f(X, "bfloat16", initial=X), "initial has shape") for f in (math.sum, math.prod, math.max)),
    (lambda: math.add(X.astype(np.float16), 70000, "e4m3"), "y=70000 is beyond the range of float16"),
    (lambda: math.add(X, -1e39, "bfloat16"), r"y=-1e\+39 is beyond the range of float32"),
    (lambda: math.add(10**400, X, "bfloat16"), "x=10+ is beyond the range of float32"),
    (lambda: math.sin(X, "mxfp4"), "spec='mxfp4'"),
    (lambda: math.matmul(X, X, "bfloat16"), "a has shape"),
    (lambda: math.matmul(X, MASKED.T, "bfloat16"), "b is a masked array"),
    (lambda: math.dot(MASKED, X.T, "bfloat16"), "a is a masked array"),
    (lambda: math.axpy(2.0, X, MASKED, "bfloat16"), "y is a masked array"),
    (lambda: math.einsum("ij,ij->", X, MASKED, spec="bfloat16"), r"operands\[1\] is a masked array"),
    (lambda: math.einsum("ij,kj->il", X, X, spec="bfloat16"), "subscripts='ij,kj->il'"),
    (lambda: math.conv(np.ma.masked_array(IMAGE), WINDOW, "bfloat16"), "x is a masked array"),
    (lambda: conv(stride=0), "stride=0"),
    (lambda: conv(dilation=-1), "dilation=-1"),
    (lambda: conv(padding=1), "padding=1"),
    (lambda: conv(padding=((-3, -3),)), "padding=-3"),
    (lambda: linalg.lu(MASKED_SQUARE, "bfloat16"), "a is a masked array"),
    (lambda: linalg.qr(MASKED_SQUARE, "bfloat16"), "a is a masked array"),
    (lambda: linalg.cholesky(MASKED_SQUARE, "bfloat16"), "a is a masked array"),
    (lambda: linalg.solve_triangular(A, np.ma.masked_array(B), "bfloat16"), "b is a masked array"),
    (lambda: linalg.cg(MASKED_SQUARE, B, "bfloat16", maxiter=1), "a is a masked array"),
    (lambda: linalg.gmres(A, np.ma.masked_array(B), "bfloat16", restart=1, maxiter=1), "b is a masked array"),
    (lambda: linalg.gmres(A, B, "bfloat16", restart=0), "restart=0"),
    (lambda: lu_solve([0, 5]), r"factors\[1\]=\[0, 5\]"),
    (lambda: lu_solve([0, 0]), r"factors\[1\]=\[0, 0\]"),
    (lambda: lu_solve([-1, 0]), r"factors\[1\]=\[-1, 0\]"),
    (lambda: lu_solve([0, 7], jnp.asarray), r"factors\[1\]=\[0, 7\]"),
    (lambda: lu_solve([True, False]), r"factors\[1\] has shape \(2,\) and dtype bool"),
    (lambda: lu_solve([0]), r"factors\[1\] has shape \(1,\)"),
    (lambda: linalg.lu_solve((A,), B, "bfloat16"), "factors must be"),
]
PROGRAMS: list[Row] = [
    (lambda: jc.emulate(3, "bfloat16"), "fun=3"),
    (lambda: jc.emulate(jnp.sin, "bfloat16", unknown="ignore"), "unknown='ignore'"),
    (lambda: jc.emulate(jnp.sin, "bfloat16", accumulate="e5m2"), "accumulate='e5m2'"),
    (lambda: jc.emulate(jnp.sin, "bfloat16", rules={3: None}), "rules: pattern=3"),
    (lambda: jc.emulate(jnp.sin, "bfloat16", rules={"cos": None})(X), "rules: 'cos'"),
    (lambda: jc.emulate(jnp.sin, "bfloat16")(MASKED), "masked array.*filled"),
    (lambda: jc.emulate(jnp.sin, "bfloat16")(X, key=3), "key=3"),
]
FACES: list[Row] = [
    (lambda: jchop.matlab.chop(MASKED, {"format": "h"}), "x is a masked array"),
    (lambda: jchop.matlab.chop(X, {"formt": "h"}), "option 'formt'"),
    (lambda: jchop.matlab.chop(X, {"round": 9}), "round=9"),
    (
        lambda: jchop.matlab.chop(X, {"round": 5, "randfunc": lambda n: np.ma.masked_array(np.zeros(n))}),
        r"randfunc\(8\) is a masked array",
    ),
    (lambda: pychop.Chop(5, 2)(MASKED), "x is a masked array"),
    (lambda: pychop.Chopf(4, 4)(MASKED), "x is a masked array"),
    (lambda: pychop.Chopi(8)(MASKED), "x is a masked array"),
    (lambda: pychop.sin(MASKED, pychop.Chop(5, 2)), "x is a masked array"),
    (lambda: qtorch.float_quantize(MASKED, 5, 2, rounding="nearest"), "x is a masked array"),
    (lambda: qtorch.fixed_point_quantize(MASKED, 8, 4, rounding="nearest"), "x is a masked array"),
    (lambda: qtorch.block_quantize(MASKED, 8, rounding="nearest"), "x is a masked array"),
    (lambda: piquant.compute_quant_params(MASKED, "uint4"), "array is a masked array"),
    (lambda: piquant.quantize(MASKED, "uint4", scale=0.5, zero_point=1), "array is a masked array"),
    (lambda: piquant.quantize(X, "uint4", scale=-0.5, zero_point=1), r"scale=-0\.5"),
    (lambda: piquant.quantize(X, "uint4", scale=0.5, zero_point=16), "zero_point has 16"),
]


def elementwise() -> Iterator[Row]:
    """Every elementwise function, at a masked array in the place of each operand in turn."""
    for name in jc.math.__all__:
        function = getattr(jc.math, name)
        operands = list(inspect.signature(function).parameters) if callable(function) else []
        operands = operands[: operands.index("spec")] if "spec" in operands else []
        if operands == list("xyz"[: len(operands)]) and operands and function not in (*REDUCED, *RUNNING):
            for i, operand in enumerate(operands):
                values = [MASKED if j == i else X for j in range(len(operands))]
                yield (lambda f=function, v=values: f(*v, "bfloat16")), f"{operand} is a masked array"


TABLES = {"elements": ELEMENTS, "storage": STORAGE, "math": MATH, "programs": PROGRAMS, "faces": FACES}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("table", TABLES)
def test_a_misuse_is_refused(table: str) -> None:
    for call, text in TABLES[table]:
        with pytest.raises((TypeError, ValueError, IndexError), match=text):
            call()


def test_every_function_refuses_masked_operands() -> None:
    rows = list(elementwise())
    assert len(rows) > 60
    for call, text in rows:
        with pytest.raises(TypeError, match=text):
            call()


def test_masked_blocks_of_dask_are_refused() -> None:
    array = pytest.importorskip("dask.array").from_array(MASKED, chunks=(1, 4))
    with pytest.raises(TypeError, match="x is a masked array"):
        jc.round_to_format(array, "e5m2").compute()


@pytest.mark.parametrize("part", ["rounding", *(pytest.param(p, marks=pytest.mark.slow) for p in ("packed", "math"))])
def test_what_is_near_a_misuse_still_works(part: str) -> None:
    {"rounding": near_of_rounding, "packed": near_of_packed, "math": near_of_math}[part]()


def near_of_rounding() -> None:
    keys = jax.random.split(key())
    rounded(TWICE, gradient_key=keys[1])
    rounded(OFFSET, gradient_key=key())  # which nothing draws from
    np.testing.assert_array_equal(rounded(offset=jnp.int32(3)), rounded(offset=3))


def near_of_packed() -> None:
    q = jc.quantize(jnp.asarray(X), "int8(channel=0)")
    whole = np.asarray(jc.dequantize(q))
    np.testing.assert_array_equal(jc.dequantize(q[np.array([-1, 0, -2])]), whole[[-1, 0, -2]])
    np.testing.assert_array_equal(jax.jit(lambda i: jc.dequantize(q[i]))(jnp.array([1])), whole[[1]])


def near_of_math() -> None:
    assert np.isnan(math.add(X, float("nan"), "bfloat16")).all()
    assert np.isinf(math.add(X, -float("inf"), "bfloat16")).all()
    assert float(math.var(X, "bfloat16", ddof=7)) > 0
    assert np.isnan(math.var(np.ones(0), "bfloat16"))
    assert (math.ldexp(np.float32([1.0, -1.0]), 2**40, "bfloat16") == [np.inf, -np.inf]).all()
    assert (math.ldexp(np.float32([1.0]), np.int64(-(2**40)), "bfloat16") == 0).all()
    lu_solve(np.array([1, 0], np.uint8))


def test_one_key_twice_in_a_trace() -> None:
    with pytest.raises(ValueError, match="gradient_key is the same as key"):
        jax.jit(lambda x, key: jc.round_to_format(x, TWICE, key, gradient_key=key))(X, key())
