"""`save_codes`: residuals of rematerialized programs are codes, and gradients stay what they are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.extend.core import ClosedJaxpr, Jaxpr

import jchop as jc

E4, E5 = "float8_e4m3fn(group=tensor)", "float8_e5m2(group=tensor)"
ONE_SCALE = jc.Rule(weight=E4, activation=E4, gradient=E5)
WIDTH, ROWS = 16, 128


def mlp(params, x):
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return x


def data(dtype):
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, dtype)

    return [(draw(WIDTH, 4 * WIDTH), draw(4 * WIDTH, WIDTH) / 8) for _ in range(2)], draw(ROWS, WIDTH)


def residual_bytes(fun, params, x):
    kept: Any = saved_residuals(lambda params: fun(params, x).astype(jnp.float32).sum(), params)
    return sum(aval.size * aval.dtype.itemsize for aval, why in kept if "argument" not in why)


def roundings(jaxpr):
    """The operations of a program that round."""
    count = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("jchop_quantize_scaled", "jchop_round_scaled"):
            count += 1
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            count += roundings(inner) if isinstance(inner, Jaxpr) else 0
    return count


RULES = {
    "one_scale": ONE_SCALE,
    "rows": jc.nn.recipe("float8_rowwise"),
    "mxfp8": jc.nn.recipe("mxfp8"),
    "forward": jc.Rule(weight=E4, activation=E4),
    "codes": jc.Rule(weight=E4, activation=E4, gradient=E5, product="codes"),
}


SLOW = ("rows", "forward")


@pytest.mark.parametrize("name", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in RULES])
def test_residuals_are_small_and_gradients_stay(name):
    params, x = data(jnp.bfloat16)
    low = jc.quantize_fn(mlp, RULES[name])
    saving = jax.checkpoint(low, policy=jc.save_codes)
    assert residual_bytes(saving, params, x) <= 0.6 * residual_bytes(mlp, params, x)
    params, x = data(jnp.float32)
    grads = [jax.jit(jax.grad(lambda params, fun=fun: fun(params, x).sum()))(params) for fun in (low, saving)]
    for plain, saved in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_array_equal(plain, saved)


@pytest.mark.parametrize("name", ["one_scale", "mxfp8", "codes"])
def test_an_operand_is_rounded_once(name):
    """Without the policy, the operands of the products that are computed again are rounded again."""
    params, x = data(jnp.float32)
    plain = jc.quantize_fn(mlp, RULES[name])
    inner = jc.quantize_fn(jax.checkpoint(mlp, policy=jc.save_codes), RULES[name])
    outer = jax.checkpoint(plain, policy=jc.save_codes)

    def count(fun):
        grad = jax.value_and_grad(lambda params, x: fun(params, x).sum(), argnums=(0, 1))
        return roundings(jax.make_jaxpr(grad)(params, x).jaxpr)

    assert count(inner) == count(outer) == count(plain) < count(jax.checkpoint(plain))


def test_other_policies_keep_their_residuals():
    params, x = data(jnp.bfloat16)
    low, policies = jc.quantize_fn(mlp, ONE_SCALE), jax.checkpoint_policies
    both = policies.save_from_both_policies(jc.save_codes, policies.save_only_these_names("none"))
    sizes = [
        residual_bytes(jax.checkpoint(low, policy=policy), params, x)
        for policy in (policies.nothing_saveable, jc.save_codes, both, policies.everything_saveable)
    ]
    assert sizes[0] == x.nbytes < sizes[1] == sizes[2] < 0.6 * sizes[3]


def test_a_second_derivative_is_refused():
    low = jax.checkpoint(jc.quantize_fn(lambda w, x: jnp.sin(x @ w), jc.Rule(activation=E4)), policy=jc.save_codes)
    with pytest.raises(NotImplementedError, match="leave out policy="):
        jax.hessian(lambda x: low(jnp.eye(2), x).sum())(jnp.array([[1.0, 3.1]]))


def test_one_layer_of_a_scan():
    """Under vmap, in a loop over layers: the gradients of each row stay."""
    params, x = data(jnp.float32)
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *params)
    low = jc.quantize_fn(lambda layer, x: mlp([layer], x), jc.Rule(activation="float8_e4m3fn(group=tensor):stochastic"))

    def loss(stacked, x, layer):
        return jax.lax.scan(lambda x, params: (layer(params, x), None), x, stacked)[0].sum()

    def grads(layer):
        return jax.jit(jax.vmap(jax.grad(lambda x: loss(stacked, x, layer))))(x.reshape(4, -1, WIDTH))

    layer = functools.partial(low, key=jax.random.key(1))
    np.testing.assert_array_equal(grads(layer), grads(jax.checkpoint(layer, policy=jc.save_codes)))


def test_the_largest_number_and_nan_stay():
    """`jax.checkpoint` narrows float residuals to IEEE's range, in which 448 is no number of four exponent bits."""
    low = jax.checkpoint(jc.quantize_fn(lambda w, x: jnp.sin(x @ w), "float8_e4m3fn"), policy=jc.save_codes)
    grads = jax.grad(lambda w: low(w, jnp.array([[448.0, 2.0]])).sum())(jnp.array([[2.0**-9], [1.0]]))
    np.testing.assert_allclose(grads, np.array([[448.0], [2.0]]) * np.cos(2.875), rtol=1e-6)
    grads = jax.grad(lambda w: low(w, jnp.array([[np.nan, 2.0]])).sum())(jnp.ones((2, 1)))
    assert np.isnan(grads).all()


def test_nan_without_a_code_stays():
    """int8 has no code for NaN: the backward pass takes it from the operand."""
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=4)")
    plain = jc.quantize_fn(lambda w, x: jnp.sin(x @ w) @ w, rule)
    x = jnp.linspace(-3, 3, 64).reshape(8, 8).at[1, 2].set(jnp.nan)
    w = jnp.eye(8) + jnp.linspace(0, 1, 8)
    want, saved = (
        jax.jit(jax.vmap(jax.grad(lambda x, low=low: low(w, x).sum())))(x[:, None])
        for low in (plain, jax.checkpoint(plain, policy=jc.save_codes))
    )
    np.testing.assert_array_equal(np.isnan(want).any((1, 2)), np.arange(8) == 1)
    np.testing.assert_array_equal(saved, want)


def test_in_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    low = jc.quantize_fn(lambda w, x: jnp.tanh(x @ w) @ w, jc.Rule(weight=E4, activation="mxfp8_e4m3"))
    with jax.set_mesh(mesh):
        w, x = jnp.eye(32) * 0.7, jax.device_put(jax.random.normal(jax.random.key(0), (8, 32)), jax.P("d", None))
        plain, saved = (
            jax.jit(jax.grad(lambda x, fun=fun: fun(w, x).sum()))(x)
            for fun in (low, jax.checkpoint(low, policy=jc.save_codes))
        )
    assert saved.sharding == plain.sharding == x.sharding
    np.testing.assert_array_equal(plain, saved)
