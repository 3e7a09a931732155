"""Functions with a rule of their own; on_cotangent: the identity forward, any rule backward, under every transform."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jchop as jc
from jchop._common.gradients import CustomJvp, on_cotangent


@dataclass(frozen=True)
class Scale:
    """A rule that can tell what it was given: g * factor, times every residual. Equal rules are equal values."""

    factor: float = 1.0

    def __call__(self, cotangent: jax.Array, *residuals: jax.Array) -> jax.Array:
        for residual in residuals:
            cotangent = cotangent * residual
        return cotangent * self.factor


def clip(cotangent: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.clip(cotangent, low, high)


def pull(f, x, cotangent):
    return jax.vjp(f, x)[1](cotangent)[0]


X, G = jnp.arange(1.0, 7.0).reshape(2, 3), jnp.array([[-1.0, -0.625, -0.25], [0.25, 0.5, 1.0]])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
def test_identity_forward_and_rule_backward(transform):
    f = transform(lambda x: on_cotangent(Scale(3.0), x))
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(jax.jvp(f, (X,), (G,))[1], G)
    np.testing.assert_array_equal(pull(f, X, G), 3 * G)


def test_residuals():
    def f(x, low, high):
        return on_cotangent(clip, x, low, high)

    value, back = jax.vjp(f, X, jnp.float32(-0.5), jnp.float32(0.25))
    np.testing.assert_array_equal(value, X)
    x_bar, low_bar, high_bar = back(G)
    np.testing.assert_array_equal(x_bar, jnp.clip(G, -0.5, 0.25))
    assert low_bar == high_bar == 0  # nothing is differentiated by the residuals
    tangent = jax.jvp(f, (X, jnp.float32(-0.5), jnp.float32(0.25)), (G, jnp.float32(1), jnp.float32(1)))[1]
    np.testing.assert_array_equal(tangent, G)


def test_integer_residuals():
    f = lambda x: on_cotangent(lambda g, k: g * k, x, jnp.int32(4))  # noqa: E731
    np.testing.assert_array_equal(pull(f, X, G), 4 * G)


def test_a_nonlinear_rule_sees_the_whole_cotangent():
    """Two uses of one value: their cotangents are added before the rule, not after."""
    f = lambda x: (lambda y: y + 2 * y)(on_cotangent(clip, x, jnp.float32(-1), jnp.float32(1)))  # noqa: E731
    np.testing.assert_array_equal(pull(f, X, G), jnp.clip(3 * G, -1, 1))


def test_symbolic_zeros():
    """A tangent or cotangent that is zero by construction passes as such."""
    f = lambda x: on_cotangent(lambda g: g + 1, x)  # noqa: E731
    np.testing.assert_array_equal(jax.jvp(lambda x: f(lax.stop_gradient(x)) + x, (X,), (G,))[1], G)
    np.testing.assert_array_equal(jax.grad(lambda x: (lax.stop_gradient(f(x)) * x).sum())(X), X)
    two = lambda x: (f(x), x * 2)  # noqa: E731
    np.testing.assert_array_equal(jax.grad(lambda x: two(x)[1].sum())(X), jnp.full_like(X, 2))


def test_a_zero_tangent_beside_a_live_residual():
    """Only the residual has a tangent: the result's is zero."""
    f = lambda r: on_cotangent(Scale(), X, r)  # noqa: E731
    np.testing.assert_array_equal(jax.jvp(f, (jnp.float32(2),), (jnp.float32(1),))[1], jnp.zeros_like(X))
    assert jax.grad(lambda r: f(r).sum())(jnp.float32(2)) == 0


# --- vmap ---------------------------------------------------------------------------------------------------------

R = jnp.array([2.0, 5.0])


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 0), (1, None)], ids=str)
def test_vmap_equals_the_loop(axes):
    """Tangent and residual batched or not, along any axis; the cotangent is batched throughout."""

    def one(x, r, g):
        return pull(lambda x: on_cotangent(Scale(3.0), x, r), x, g)

    x = {0: X, 1: X.T, None: X[0]}[axes[0]]
    r = R if axes[1] == 0 else R[1]
    got = jax.vmap(one, in_axes=(*axes, 0))(x, r, G)
    np.testing.assert_array_equal(got, jnp.stack([3 * G[i] * (R[i] if axes[1] == 0 else R[1]) for i in range(2)]))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("batched", [True, False], ids=["residual batched", "residual shared"])
def test_vmap_inside_the_derivative(batched):
    """The rule runs row by row: one that looks at its whole argument tells."""
    rule = lambda g, r: g / jnp.abs(g).max() * r  # noqa: E731
    r, axis = (R, 0) if batched else (R[1], None)
    f = lambda x: jax.vmap(lambda x, r: on_cotangent(rule, x, r), in_axes=(0, axis))(x, r)  # noqa: E731
    np.testing.assert_array_equal(f(X), X)
    rows = [rule(G[i], R[i] if batched else R[1]) for i in range(2)]
    np.testing.assert_allclose(pull(f, X, G), jnp.stack(rows), rtol=1e-6)


def test_an_unbatched_tangent_with_batched_residuals():
    """The cotangents of the rows pass the rule one by one and are then added."""
    f = lambda x: jax.vmap(lambda r: on_cotangent(clip, x, -r, r))(jnp.array([0.25, 0.5]))  # noqa: E731
    x, g = X[0], jnp.stack([G[0], -G[0]])
    np.testing.assert_array_equal(f(x), jnp.stack([x, x]))
    np.testing.assert_array_equal(pull(f, x, g), jnp.clip(g[0], -0.25, 0.25) + jnp.clip(g[1], -0.5, 0.5))


@pytest.mark.smoke
def test_nested_vmap():
    rule = lambda g, r, s: g / jnp.abs(g).max() * r + s  # noqa: E731
    x, g = jnp.ones((2, 3, 4)), jnp.arange(1.0, 25.0).reshape(2, 3, 4)
    r, s = jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0, 20.0])

    def inner(x, s):
        return jax.vmap(lambda x, r: on_cotangent(rule, x, r, s), in_axes=(1, 0), out_axes=1)(x.T, r).T

    f = lambda x: jax.vmap(inner)(x, s)  # noqa: E731
    expected = jnp.stack([jnp.stack([rule(g[i, j], r[j], s[i]) for j in range(3)]) for i in range(2)])
    np.testing.assert_array_equal(f(x), x)
    np.testing.assert_allclose(jax.jit(lambda x, g: pull(f, x, g))(x, g), expected, rtol=1e-6)


def test_vmap_of_an_empty_batch():
    got = jax.vmap(lambda x, g: pull(lambda x: on_cotangent(Scale(), x), x, g))(X[:0], G[:0])
    assert got.shape == (0, 3)


# --- control flow, and both directions ----------------------------------------------------------------------------


def test_scan():
    f = lambda x: lax.scan(lambda c, r: (on_cotangent(clip, c * 2, -r, r), None), x, R / 10)[0]  # noqa: E731
    np.testing.assert_array_equal(f(X), 4 * X)
    expected = jnp.clip(jnp.clip(G, -0.5, 0.5) * 2, -0.2, 0.2) * 2
    np.testing.assert_array_equal(jax.jit(lambda x, g: pull(f, x, g))(X, G), expected)
    np.testing.assert_array_equal(jax.jvp(f, (X,), (G,))[1], 4 * G)


def test_cond():
    f = lambda x, p: lax.cond(p, lambda x: on_cotangent(Scale(3.0), x), lambda x: x, x)  # noqa: E731
    for p, factor in ((True, 3), (False, 1)):
        np.testing.assert_array_equal(pull(lambda x, p=p: f(x, p), X, G), factor * G)


def test_second_derivatives():
    """Every nesting gives the second derivative, the rule being linear."""
    f = lambda x: (on_cotangent(Scale(1.0), x) ** 3).sum()  # noqa: E731
    x = jnp.array([1.0, 2.0])
    expected = jnp.diag(6 * x)
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(outer(inner(f)))(x), expected, rtol=1e-6)


def test_linearize_and_linear_transpose():
    f = lambda x: on_cotangent(Scale(3.0), x * 2)  # noqa: E731
    value, linear = jax.linearize(f, X)
    np.testing.assert_array_equal(value, 2 * X)
    np.testing.assert_array_equal(linear(G), 2 * G)
    np.testing.assert_array_equal(jax.linear_transpose(linear, X)(G)[0], 6 * G)


def test_equal_rules_share_a_trace():
    traced = jax.jit(lambda x, rule: pull(lambda x: on_cotangent(rule, x), x, x), static_argnames="rule")
    for rule in (Scale(2.0), Scale(2.0), Scale(2)):
        np.testing.assert_array_equal(traced(X, rule=rule), 2 * X)
    assert traced._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_dtypes_and_shapes(dtype):
    for shape in ((), (0,), (2, 3)):
        x = jnp.ones(shape, dtype)
        got = pull(lambda x: on_cotangent(Scale(2.0), x), x, x)
        assert got.dtype == x.dtype and got.shape == shape and (got == 2).all()


# -- functions with a rule of their own --------------------------------------------------------------------------------

START = np.array([0.3, 0.7, -0.5], np.float32)
KEY = jax.random.key(0)


@cache
def stored() -> jc.QArray:
    return jc.quantize(jax.random.normal(KEY, (3, 3)), "int8(channel=0)")


STEPS = {
    "round": lambda x: jc.round_to_format(x * x, "bfloat16"),
    "stochastic": lambda x: jc.round_to_format(x * x, "bfloat16:stochastic", KEY),
    "clipped": lambda x: jc.round_to_format(x * x, jc.Spec("e4m3", gradient="clipped")),
    "scaled": lambda x: jc.round_to_format(x * x, "int8(group=all)"),
    "multiply": lambda x: jc.math.multiply(x, x, "bfloat16"),
    "exp": lambda x: jc.math.exp(x, "bfloat16"),
    "sum": lambda x: x * jc.math.sum(x * x, spec="bfloat16"),
    "matmul": lambda x: jc.math.matmul(jnp.outer(x, x), x, spec=jc.MatmulSpec(accumulate="bfloat16")),
    "cumsum": lambda x: jc.math.cumsum(x * x, spec="bfloat16"),
    "prod": lambda x: x * (1 + jc.math.prod(x + 1, spec="bfloat16")),
    "max": lambda x: x * jc.math.max(x * x, spec="bfloat16"),
    "softmax": lambda x: jc.math.softmax(x * x, spec="bfloat16"),
    "flip_bits": lambda x: jc.flip_bits(x * x, "bfloat16", 0.01, KEY),
    "dequantize": lambda x: jc.dequantize(stored()) @ (x * x),
    "quantize": lambda x: jc.dequantize(jc.quantize(x * x, "int8(group=all)")) + x * x,
    "emulate": lambda x: jc.emulate(lambda x: x * x + jnp.sin(x), "bfloat16")(x),
}


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", STEPS)
def test_second_derivatives_of_loops(name):
    """JAX takes a loop apart for a derivative by reverse mode; the rules of the functions in it have to stay."""
    stored()  # not while a function is traced

    def step(x):
        return jnp.tanh(STEPS[name](x) + 0.1)

    def loop(x):
        return lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0].sum()

    want = jax.jit(jax.hessian(lambda x: step(step(step(x))).sum()))(START)
    assert jnp.abs(want).max() > 1e-6
    close = partial(np.testing.assert_allclose, desired=want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))
    close(jax.jit(jax.hessian(loop))(START))
    batch = jnp.stack([2 * START, START])
    close(jax.jit(jax.vmap(jax.hessian(loop)))(batch)[1])


def test_custom_jvp():
    @partial(CustomJvp, nondiff_argnums=(1,))
    def function(x, factor, rest):
        return {"a": x["u"] * factor, "b": rest + 1}

    @partial(function.defjvp, symbolic_zeros=True)
    def rule(factor, primals, tangents):
        x, rest = primals
        dx, drest = tangents
        assert isinstance(dx["unused"], SymbolicZero) and isinstance(drest, SymbolicZero)
        out = function(x, factor, rest)
        return out, {"a": 7 * dx["u"], "b": SymbolicZero(jax.typeof(rest).to_tangent_aval())}

    def of(u, rest):
        return function({"u": u, "unused": jnp.ones(2)}, 3.0, rest)

    u, rest = jnp.arange(2.0), jnp.arange(2)
    assert of(u, rest)["a"].tolist() == [0.0, 3.0]
    value, moved = jax.jit(lambda u: jax.jvp(lambda u: of(u, rest)["a"], (u,), (jnp.ones(2),)))(u)
    assert value.tolist() == [0.0, 3.0] and moved.tolist() == [7.0, 7.0]
    back = jax.jit(jax.vmap(jax.grad(lambda u, rest: of(u, rest)["a"]), in_axes=(0, None)))(u, rest[0])
    assert back.tolist() == [7.0, 7.0]
    assert "jchop_with_rule" in {eqn.primitive.name for eqn in jax.make_jaxpr(of)(u, rest).eqns}


def test_custom_jvp_around_a_primitive_of_a_higher_level():
    """JAX 0.12 has the search in a sorted array as such a primitive, which a compiled program expands."""
    nodes = jnp.array([0.5, 1.5, 2.5])

    @CustomJvp
    def times_place(x):
        return x * jnp.searchsorted(nodes, x)

    @times_place.defjvp
    def rule(primals, tangents):
        return times_place(*primals), 7 * tangents[0]

    x = jnp.array([1.0, 3.0])
    assert jax.jit(times_place)(x).tolist() == [1.0, 9.0]
    assert jax.jit(jax.vmap(jax.value_and_grad(times_place)))(x)[1].tolist() == [7.0, 7.0]


# -- transposes --------------------------------------------------------------------------------------------------------


A = jnp.array([[5.0, 2.3, 1.0], [1.1, 5.0, 0.7], [0.3, 1.0, 6.1]])
B = jnp.array([1.0, -2.0, 3.0])
ROUNDED = np.asarray(jc.round_to_format(A, "bfloat16"), np.float64)
LINEAR = {
    "round": (lambda a, v: jc.round_to_format(a @ v, "bfloat16"), A),
    "stochastic": (lambda a, v: jc.round_to_format(a @ v, "e5m2:stochastic", jax.random.key(0)), A),
    "emulate": (jc.emulate(jnp.matmul, "bfloat16"), ROUNDED),
    "scan": (jc.emulate(lambda a, v: lax.scan(lambda c, r: (c, r @ v), 0.0, a)[1], "bfloat16"), ROUNDED),
    "vmap": (lambda a, v: jax.vmap(lambda r: jc.emulate(jnp.vdot, "bfloat16")(r, v))(a), ROUNDED),
    "matmul": (lambda a, v: jc.math.matmul(a, v, "bfloat16"), ROUNDED),
    "multiply": (lambda a, v: jc.math.multiply(a, v, "bfloat16").sum(1), ROUNDED),
    "nested": (jc.emulate(lambda a, v: jc.emulate(jnp.matmul, "bfloat16")(a, v), "e8m12"), ROUNDED),
}


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", LINEAR)
def test_the_transpose_of_a_rounded_linear_function(name):
    """It is that of the carrier's map with the rounded matrix."""
    function, matrix = LINEAR[name]
    want = np.asarray(matrix, np.float64).T @ np.asarray(B, np.float64)

    def back(a, g):
        return jax.linear_transpose(partial(function, a), g)(g)[0]

    for result in (back(A, B), jax.jit(back)(A, B), jax.vmap(back)(A[None], B[None])[0]):
        np.testing.assert_allclose(result, want, rtol=1e-6)
    moved = jax.jvp(partial(back, A), (B,), (2 * B,))[1]
    np.testing.assert_allclose(moved, 2 * want, rtol=1e-6)


def test_a_transpose_applies_the_rule_of_the_cotangent():
    spec = jc.Spec("bfloat16", gradient="e5m2")
    back = jax.linear_transpose(lambda v: jc.round_to_format(v, spec), B)
    assert back(jnp.array([1.1, 1.2, 3.3]))[0].tolist() == [1.0, 1.25, 3.5]


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(("solve", "name"), [("bicgstab", "matmul"), ("bicgstab", "emulate"), ("gmres", "round")])
def test_the_gradient_of_an_iterative_solver(solve, name):
    """It solves the transposed system, here also within an emulated program of 12 bits."""
    function, matrix = LINEAR[name]
    gradient = jax.grad(lambda b: getattr(jax.scipy.sparse.linalg, solve)(partial(function, A), b, maxiter=4)[0].sum())
    want = np.linalg.solve(np.asarray(matrix, np.float64).T, np.ones(3))
    np.testing.assert_allclose(gradient(B), want, rtol=1e-4)
    if name == "emulate":
        np.testing.assert_allclose(jc.emulate(gradient, "e8m12")(B), want, rtol=1e-2)


@pytest.mark.parametrize(
    "function",
    [
        jc.emulate(lambda v: v * v, "bfloat16"),
        jc.emulate(jnp.sin, "bfloat16"),
        lambda v: jc.round_to_format(v, "bfloat16:gradient=clipped"),
        lambda v: jc.math.maximum(v, 0.0, "bfloat16"),
    ],
    ids=["product", "sine", "clipped", "maximum"],
)
def test_only_linear_functions_have_a_transpose(function):
    with pytest.raises(ValueError, match=r"^a rounded operation on float32\[3\].* is not linear in it"):
        jax.linear_transpose(function, B)(B)


def test_constants_have_no_part_in_a_derivative():
    """Their tangents are not multiplied by anything: 0 inf would be NaN."""
    slope = jax.jvp(lambda x: jc.math.multiply(x, jnp.float32(3), "bfloat16"), (jnp.inf,), (1.0,))[1]
    assert slope == 3
