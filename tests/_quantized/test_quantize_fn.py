"""`quantize_fn`: rules over the products of any program."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from zoo import CASES

import jchop as jc

further = Further()

KEY = jax.random.key(3)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


PARAMS = {"up": normal(32, 16), "bias": normal(16, seed=1), "down": normal(16, 4, seed=2)}
X = normal(8, 32, seed=3)


# -- models of the zoo -------------------------------------------------------------------------------------------------

FORMATS = ["int8(group=all)", "int4(group=32)", "float8_e4m3fn", "mxfp8_e4m3", "nvfp4", "nf4(group=32)"]
#: Weights that are computed with before their product, and tiny products that a compiler fuses: sums in another order.
LOOSE = {"odd_changed", "odd_products", "odd_convolutions"}


#: Some models at a time; the first ones are those that the default run traces.
SOME = [[*CASES][part::7] for part in range(7)]


@pytest.mark.parametrize(
    "names", [SOME[0], *(pytest.param(some, marks=pytest.mark.slow) for some in SOME[1:])], ids=",".join
)
def test_every_weight_of_a_product_is_rounded_and_nothing_else(names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        params, args = case.params()
        report = jc.quantize_fn(case.apply, jc.Rule(weight="int4(group=32)")).report(params, *args)
        rows = {row.path: row for row in report.parameters}
        products = {path.removesuffix("/value") for path in case.products}
        assert {path for path, row in rows.items() if row.spec} == products, name
        # The magnitudes of columns make a weight together with their directions, and are not rounded.
        assert report.rounded_share == (5 * 32 / (5 * 32 + 1) if name == "odd_changed" else 1.0), name
        assert all(row.source for row in rows.values() if row.spec), name


#: Every model under one format, in turn, and a small one under each: which numbers a format has is no part of a model.
MODELS = [("dict_mlp", spec) for spec in FORMATS]
MODELS += [(name, FORMATS[at % len(FORMATS)]) for at, name in enumerate(CASES) if name != "dict_mlp"]


@further
@pytest.mark.parametrize(
    ("name", "spec"), [MODELS[0], *(pytest.param(*model, marks=pytest.mark.slow) for model in MODELS[1:])]
)
def models_train_and_serve_the_same_numbers(name: str, spec: str) -> None:
    case = CASES[name]
    params, args = case.params()
    low = jc.quantize_fn(case.apply, jc.Rule(weight=spec))
    packed = low.pack(params, *args)
    trained, served = jax.jit(low)(params, *args), jax.jit(low)(packed, *args)
    if name in LOOSE:
        chex.assert_trees_all_close(trained, served, rtol=1e-4, atol=1e-5)
    else:
        chex.assert_trees_all_equal(trained, served)

    def beside(params: Any) -> Any:
        return case.apply(params, *args), jax.grad(lambda p: case.loss(low(p, *args)), allow_int=True)(params)

    plain, gradient = jax.jit(beside)(params)
    errors = [
        float(jnp.linalg.norm(jnp.asarray(a - b, jnp.float32)) / jnp.linalg.norm(jnp.asarray(b, jnp.float32)))
        for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(plain), strict=True)
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    assert 0 < max(errors) < 1
    inexact = [g for g in jax.tree.leaves(gradient) if jnp.issubdtype(g.dtype, jnp.floating)]
    assert all(bool(jnp.isfinite(g).all()) for g in inexact)
    assert any(bool((g != 0).any()) for g in inexact)


# -- values ------------------------------------------------------------------------------------------------------------


def rounded(x: Any, spec: str) -> Any:
    return jc.round_to_format(x, spec)


def test_operands_are_rounded_along_the_sum() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)", activation="int8(group=all)", bias="bfloat16"))
    hidden = rounded(X, "int8(group=all)") @ rounded(PARAMS["up"].T, "int4(group=16)").T
    hidden = jnp.tanh(hidden + rounded(PARAMS["bias"], "bfloat16"))
    expected = rounded(hidden, "int8(group=all)") @ rounded(PARAMS["down"].T, "int4(group=16)").T
    np.testing.assert_array_equal(low(PARAMS, X), expected)


@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=pytest.mark.slow)])
def test_backward_products_have_roundings_of_their_own(side: str) -> None:
    """As the layers of Flax have them: each product in its own layout, from full precision."""
    w, x, g = normal(32, 16), normal(8, 32, seed=1), normal(8, 16, seed=2)
    rule = jc.Rule(weight="int4(group=8)", activation="int8(group=all)", gradient="e5m2", weight_gradient="bfloat16")
    product = (lambda w, x: x @ w) if side == "right" else (lambda w, x: (w.T @ x.T).T)
    low = jc.quantize_fn(product, rule)
    _, back = jax.vjp(low, w, x)
    dw, dx = back(g)
    np.testing.assert_allclose(dx, rounded(g, "e5m2") @ rounded(w, "int4(group=8)").T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, rounded(x, "bfloat16").T @ rounded(g, "bfloat16"), rtol=1e-5, atol=1e-5)


def test_products_of_data_have_the_rule_of_their_scope() -> None:
    def attend(p: Any, x: Any) -> Any:
        q = x @ p["q"]
        with jax.named_scope("scores"):
            s = q @ x.T
        return s @ x

    params, x = {"q": normal(16, 16)}, normal(4, 16, seed=1)
    q = x @ params["q"]
    low = jc.quantize_fn(attend, jc.Rule("scores", activation="int8(group=all)"))
    expected = (rounded(q, "int8(group=all)") @ rounded(x, "int8(group=all)").T) @ x
    np.testing.assert_array_equal(low(params, x), expected)
    everywhere = jc.quantize_fn(attend, jc.Rule(activation="int8(group=all)")).report(params, x)
    assert [dict(row.roundings) for row in everywhere.products] == [{"activation": "int8(group=all)"}] * 3


def test_experts_are_rounded_along_the_sum() -> None:
    sizes = jnp.array([3, 0, 5])
    w, x = normal(3, 32, 4), normal(8, 32, seed=1)
    low = jc.quantize_fn(
        lambda w, x: jax.lax.ragged_dot(x, w, sizes), jc.Rule(weight="int4(group=16)", activation="e4m3")
    )
    each = rounded(w.swapaxes(1, 2), "int4(group=16)").swapaxes(1, 2)
    np.testing.assert_array_equal(low(w, x), jax.lax.ragged_dot(rounded(x, "e4m3"), each, sizes))
    full = jc.quantize_fn(
        lambda w, x: jax.lax.ragged_dot(x, w, sizes), jc.Rule(weight="int4(group=4)", gradient="e5m2")
    )
    _, back = jax.vjp(full, w, x)
    g = normal(8, 4, seed=2)
    dw, dx = back(g)
    low_g, turned = rounded(g, "e5m2"), rounded(w, "int4(group=4)").swapaxes(1, 2)
    np.testing.assert_array_equal(dx, jax.lax.ragged_dot(low_g, turned, sizes))
    np.testing.assert_allclose(dw[2], x[3:].T @ low_g[3:], rtol=1e-6, atol=1e-5)


def test_emulated_sums() -> None:
    how = jc.MatmulSpec(accumulate="e5m10")
    w, x = normal(16, 4), normal(2, 16, seed=1)
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="e4m3", activation="e4m3", matmul=how))
    np.testing.assert_array_equal(low(w, x), jc.math.matmul(rounded(x, "e4m3"), rounded(w, "e4m3"), how))


# -- transformations ---------------------------------------------------------------------------------------------------


@further
def under_transformations() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)", activation="e4m3"))
    expected = low(PARAMS, X)
    np.testing.assert_array_equal(jax.vmap(lambda x: low(PARAMS, x))(X), expected)
    chex.assert_trees_all_close(jax.jit(low)(PARAMS, X), expected, rtol=1e-6)
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
    np.testing.assert_array_equal(jax.vmap(low, (0, None))(stacked, X)[0], expected)
    reverse = jax.jacrev(low)(PARAMS, X[:1])["down"]
    hidden = jnp.tanh(rounded(X[:1], "e4m3") @ rounded(PARAMS["up"].T, "int4(group=16)").T + PARAMS["bias"])
    np.testing.assert_allclose(reverse[0, 0, :, 0], rounded(hidden, "e4m3")[0], rtol=1e-6)


@further
def draws_follow_the_key() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16):stochastic", activation="e4m3:stochastic"))
    with pytest.raises(ValueError, match="key=None"):
        low(PARAMS, X)
    first, again, other = (low(PARAMS, X, key=jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    packed = low.pack(PARAMS, X, key=KEY)
    first, other = (low(packed, X, key=jax.random.key(k)) for k in (0, 1))
    assert (first != other).any()  # of activations, which are rounded in each call


#: Halves are rounded to 0 or 1, with the same probability.
HALF, HALVES = "fixed8.0:stochastic", jnp.full((1, 32), 0.5)


def drawn_apart(*halves: jax.Array) -> None:
    """Each of these was drawn, with bits of its own."""
    assert all(set(v.ravel().tolist()) == {0, 1} for v in halves)
    assert len({np.abs(v).tobytes() for v in halves}) == len(halves)


def test_layers_of_a_stack_draw_anew() -> None:
    w, x = jnp.broadcast_to(normal(32, 32), (2, 32, 32)), normal(4, 32, seed=1)
    low = jc.quantize_fn(lambda w, x: [x @ w[0], x @ w[1]], jc.Rule(weight="int2(group=32):stochastic"))
    first, second = low(w, x, key=KEY)
    assert (first != second).any()


@pytest.mark.parametrize("packed", [True, False])
def test_equal_parameters_draw_each_for_itself(packed: bool) -> None:
    w, x = normal(8, 4), normal(2, 8, seed=1)
    low = jc.quantize_fn(lambda p, x: [x @ p["a"], x @ p["b"]], jc.Rule(weight="int2(group=all):stochastic"))
    params = {"a": w, "b": w}
    first, second = low(low.pack(params, x, key=KEY) if packed else params, x, key=KEY)
    assert (first != second).any()


def test_equal_products_draw_each_for_itself() -> None:
    low = jc.quantize_fn(lambda w, x: [x @ w, x @ w], jc.Rule(activation=HALF, gradient=HALF))
    (first, second), pull = jax.vjp(partial(low, key=KEY), jnp.eye(32), HALVES)
    drawn_apart(first, second, pull([HALVES, 0 * HALVES])[1], pull([0 * HALVES, HALVES])[1])


def derivatives(x: jax.Array, w: jax.Array, g: jax.Array, **rule: Any) -> list[jax.Array]:
    """x w under a rule, and what g becomes for w and for x."""
    y, pull = jax.vjp(partial(jc.quantize_fn(lambda w, x: x @ w, jc.Rule(**rule)), key=KEY), w, x)
    return [y, *pull(g)]


EYE, COLUMN = jnp.eye(32), jnp.ones((32, 1))


def test_each_operand_of_the_products_of_a_derivative_draws_for_itself() -> None:
    y, dw, dx = derivatives(HALVES, EYE, HALVES, activation=HALF, gradient=HALF, weight_gradient=HALF)
    drawn_apart(y, dx, dw.max(0), dw.max(1))
    y, dw, dx = derivatives(EYE, COLUMN / 2, COLUMN, weight=HALF, input_gradient=HALF)
    drawn_apart(y, dx[0])


def test_the_cotangent_of_a_rounding_draws_for_itself() -> None:
    with_slope = f"{HALF}:gradient=[{HALF}]"
    y, dw, _ = derivatives(EYE, COLUMN / 2, COLUMN / 2, weight=with_slope)
    drawn_apart(y, dw)
    y, _, dx = derivatives(HALVES, EYE, HALVES, activation=with_slope)
    drawn_apart(y, dx)


def test_the_sums_of_the_products_of_a_derivative_draw_for_themselves() -> None:
    """If those for the weight drew the words of others, a quarter would go up where a half does, and not elsewhere."""
    y, dw, dx = derivatives(HALVES, EYE, HALVES, matmul=jc.MatmulSpec(accumulate=HALF, order="matrix_unit(32)"))
    drawn_apart(y, dx)
    assert (dw[0] > y).any() and (dw[0] > dx).any()


def test_turns_of_a_loop_draw_anew() -> None:
    same = lambda w, x: jax.lax.scan(lambda c, _: (c, c @ w), x, length=2)[1]  # noqa: E731
    first, second = jc.quantize_fn(same, jc.Rule(activation="int2(group=all):stochastic"))(
        normal(8, 2), normal(3, 8, seed=1), key=KEY
    )
    assert (first != second).any()


def test_a_custom_derivative_stays() -> None:
    @jax.custom_vjp
    def halved(x: Any) -> Any:
        return x

    halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))
    low = jc.quantize_fn(lambda w, x: halved(x @ w), jc.Rule(weight="e4m3", activation="e4m3"))
    plain = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="e4m3", activation="e4m3"))
    w = normal(8, 4)
    ours, theirs = (jax.grad(lambda w, f=f: jnp.sum(f(w, X[:, :8])))(w) for f in (low, plain))
    np.testing.assert_array_equal(2 * ours, theirs)


def test_a_rule_of_batches_stays() -> None:
    @jax.custom_batching.custom_vmap
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    double.def_vmap(lambda size, batched, x: (x * 3, batched[0]))
    low = jc.quantize_fn(lambda w, x: double(x @ w) + double(w)[0], jc.Rule(weight="int8(group=all)"))
    w, x = normal(4, 3), normal(2, 5, 4)
    rounded = jc.round_to_format(w.T, "int8(group=all)").T
    np.testing.assert_allclose(jax.vmap(low, (None, 0))(w, x), 3 * (x @ rounded) + 2 * rounded[0], rtol=1e-6)


def test_results_have_the_types_that_they_have_in_jit() -> None:
    def fun(w: jax.Array, x: Any) -> Any:
        return jnp.ones((2, 4)) @ w, x * 0.5, x, 3, jnp.ones(2) * x

    def types_of(fun: Any) -> list[Any]:
        return [(x.dtype, x.weak_type) for x in fun(normal(4, 3), 2.0)]

    low = jc.quantize_fn(fun, jc.Rule(weight="int8"))
    assert types_of(low) == types_of(jax.jit(low)) == types_of(jax.jit(fun))


def test_an_error_names_the_function() -> None:
    def with_text(w: jax.Array, x: jax.Array) -> Any:
        return x @ w, "text"

    with pytest.raises(TypeError, match=r"with_text at .*test_quantize_fn\.py.*'str'"):
        jc.quantize_fn(with_text, jc.Rule(weight="int8"))(normal(4, 3), normal(2, 4))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_custom_derivative_takes_entries_of_a_constant(compiled: bool) -> None:
    """In a loop, as those of `odeint`."""

    @jax.custom_vjp
    def scaled(y: Any, times: Any) -> Any:
        return y * times.sum()

    def backward(times: Any, g: Any) -> Any:
        summed = jax.lax.fori_loop(0, times.shape[0], lambda i, total: total + g * times[i], jnp.zeros_like(g))
        return summed, jnp.zeros_like(times)

    scaled.defvjp(lambda y, times: (scaled(y, times), times), backward)
    w = normal(8, 4)
    ours, theirs = (
        jax.grad(lambda w, f=f: jc.quantize_fn(f, jc.Rule(weight="e4m3"))(w, X[:, :8]).sum())
        for f in (lambda w, x: scaled(x @ w, jnp.array([0.25, 0.5])), lambda w, x: x @ w * 0.75)
    )
    np.testing.assert_array_equal((jax.jit(ours) if compiled else ours)(w), theirs(w))


@pytest.mark.parametrize(
    "joined",
    [
        jnp.stack,
        lambda layers: jnp.concatenate([w[None] for w in layers]),
        lambda layers: jnp.stack(layers, axis=2).transpose(2, 0, 1),
        lambda layers: jnp.tile(layers[0][None], (3, 1, 1)),
        lambda layers: jnp.stack(jnp.unstack(jnp.stack(layers))),
    ],
    ids=["stack", "concatenate", "last", "tile", "unstack"],
)
def test_layers_that_the_program_stacks_are_rounded(joined: Any) -> None:
    def net(layers: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, joined(layers))[0]

    layers = [normal(16, 16, seed=i) for i in range(3)]
    low = jc.quantize_fn(net, jc.Rule(weight="int8(group=all)"))
    report = low.report(layers, X[:, :16])
    used = [row for row in report.parameters if row.use]
    assert report.rounded_share == 1 and {row.spec for row in used} == {"int8(group=all,axis=-2)"}
    packed = low.pack(layers, X[:, :16])
    assert all(isinstance(q, jc.QArray) for q, row in zip(packed, report.parameters, strict=True) if row.use)
    np.testing.assert_array_equal(jax.jit(low)(packed, X[:, :16]), jax.jit(low)(layers, X[:, :16]))


def test_a_constant_that_is_rounded_has_a_note() -> None:
    """A basis that the function computes with is no parameter; a rule without a path rounds it as an activation."""
    basis = np.cos(np.outer(np.arange(16), np.arange(16)) * np.pi / 16).astype(np.float32)

    def net(p: Any, x: Any) -> Any:
        with jax.named_scope("dct"):
            h = x @ basis
        return basis.T @ (h @ p).T

    rule, (p, x) = jc.Rule(weight="int8(group=all)", activation="int8(group=all)"), (normal(16, 16), X[:, :16])
    first, weight, last = (row.note for row in jc.quantize_fn(net, rule).report(p, x).products)
    assert first.startswith("dot_general at test_quantize_fn.py:") and "constant (16×16) is rounded to int8" in first
    assert first.endswith("Rule('dct') first leaves it") and weight == ""
    assert last.endswith("Rule('basis') first, within jax.named_scope('basis'), leaves it")
    report = jc.quantize_fn(net, [jc.Rule("dct"), rule]).report(p, x)
    assert [row.note for row in report.products] == ["", "", last] and report.table(width=None).endswith(f"\n\n{last}")
    assert not any(row.note for row in jc.quantize_fn(net, jc.Rule(weight="int8")).report(p, x).products)


def test_parameters_whose_axes_are_lost_count_as_not_rounded() -> None:
    def net(params: Any, x: Any) -> Any:
        return x @ jnp.sort(params["sorted"], 0) + x @ params["set"].at[0].set(0.0)

    params, x = {"sorted": normal(16, 16), "set": normal(16, 16, seed=1)}, X[:, :16]
    low = jc.quantize_fn(net, jc.Rule(weight="int8(group=all)"))
    report = low.report(params, x)
    assert [(row.path, row.primitive, bool(row.spec)) for row in report.parameters] == [
        ("set", "dot_general", True), ("sorted", "sort", False)
    ]  # fmt: skip
    assert report.rounded_share == 0.5
    with pytest.raises(
        ValueError, match=r"weight has no effect .*: the parameter 'w' reaches sort at .*quantize_fn.py"
    ):
        jc.quantize_fn(lambda p, x: x @ jnp.sort(p["w"], 0), jc.Rule(weight="int8"))({"w": params["set"]}, x)
    with pytest.raises(ValueError, match="names the parameter 'sorted', of which a product takes no axis"):
        jc.quantize_fn(net, jc.Rule("sorted", weight="int8"))(params, x)


LOOK_UPS = {
    "index": lambda w, t: w[t],
    "at": lambda w, t: w.at[t].get(mode="fill"),
    "take": lambda w, t: jnp.take(w, t, axis=0),
}
NORMED = {"table": normal(10, 8), "scale": 1 + 0.1 * normal(8, seed=1), "experts": normal(10, 8, 6, seed=2)}


@further
@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("index", "float"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("at", "codes"), ("take", "float"))),
    ],
)
def one_token_is_looked_up_as_several_are(name: str, product: Any) -> None:
    def net(p: Any, token: Any) -> Any:
        h = LOOK_UPS[name](p["table"], token)
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * p["scale"]
        return jnp.einsum("...d,...de->...e", h, LOOK_UPS[name](p["experts"], token))

    rule = jc.Rule(weight="int8(group=all)", activation="int4(group=all)", product=product)
    low, token = jc.quantize_fn(net, rule), jnp.int32(3)
    one, several = low.report(NORMED, token), low.report(NORMED, token[None])
    specs = [[(row.path, row.use, row.spec) for row in report.parameters] for report in (one, several)]
    assert specs[0] == specs[1] == [
        ("experts", "product", "int8(group=all,axis=-2)"), ("scale", "other", ""), ("table", "rows", "int8(group=all)")
    ]  # fmt: skip
    assert dict(one.products[0].roundings)["activation"] == "int4(group=all)"
    expected = jax.jit(low)(NORMED, token[None])[0]
    np.testing.assert_array_equal(jax.jit(low)(NORMED, token), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(low, (None, 0)))(NORMED, token[None])[0], expected)
    np.testing.assert_array_equal(jax.jit(low)(low.pack(NORMED, token), token), expected)


def test_what_is_beyond_the_end_is_nan_of_codes_too() -> None:
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", product="codes")
    low = jc.quantize_fn(lambda w, x, t: x @ jnp.take(w, t, axis=0), rule)
    assert jnp.isnan(jax.jit(low)(NORMED["experts"], normal(4, 8), jnp.int32(10))).all()


def test_rules_for_rows_select_them_as_an_embedding() -> None:
    rules = [jc.Rule(operation="embedding", weight="e4m3"), jc.Rule(weight="int8(group=all)", activation="e5m2")]
    low = jc.quantize_fn(lambda p, t: p["table"][t] @ p["experts"][0], rules)
    specs = {row.path: row.spec for row in low.report(NORMED, jnp.int32(3)).parameters}
    assert specs == {"experts": "int8(group=all,axis=-2)", "scale": "", "table": "float8_e4m3"}


BIASES = {
    "itself": lambda b, shape: b,
    "broadcast": jnp.broadcast_to,
    "tiled": lambda b, shape: jnp.tile(b, (shape[0], 1)),
    "repeated": lambda b, shape: jnp.repeat(b[None], shape[0], 0),
    "cast": lambda b, shape: jnp.broadcast_to(b.astype(jnp.bfloat16), shape).astype(jnp.float32),
    "reshaped": lambda b, shape: jnp.broadcast_to(b.reshape(1, 4, 4), (shape[0], 4, 4)).reshape(shape),
    "scaled": lambda b, shape: jnp.broadcast_to(2 * b, shape),
}


#: With one latent the shapes of a bias and of its sum are the same.
OF_LATENTS = [*((name, 6) for name in BIASES), ("itself", 1), ("broadcast", 1), ("reshaped", 1)]


@further
@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("name", "latents"), OF_LATENTS)
def a_bias_that_is_added_to_a_product_of_parameters_is_a_bias(name: str, latents: int) -> None:
    def attend(p: Any, x: Any) -> Any:
        y = p["latents"] @ p["query"]
        return jnp.einsum("ld,btd->blt", y + BIASES[name](p["bias"], y.shape), x @ p["key"] + p["bias_of_key"])

    own = {"latents": normal(latents, 32), "query": normal(32, 16), "bias": normal(16), "key": normal(32, 16)}
    params, x = own | {"bias_of_key": normal(16)}, normal(2, 5, 32)
    low = jc.quantize_fn(attend, jc.Rule(weight="int4(group=all)"))
    report, packed = low.report(params, x), low.pack(params, x)
    rows = {row.path: (row.use, row.primitive, bool(row.spec), row.reason) for row in report.parameters}
    assert rows["bias"] == rows["bias_of_key"] == ("sum", "add", False, "")
    assert {path for path, row in rows.items() if row[2]} == {"latents", "query", "key"}
    assert isinstance(packed["bias"], jax.Array)
    np.testing.assert_array_equal(low(packed, x), low(params, x))
    both = jc.quantize_fn(attend, jc.Rule(weight="int4(group=all)", bias="e4m3")).report(params, x)
    assert {row.path: row.spec for row in both.parameters}["bias"] == "float8_e4m3"


OTHER_BIASES = {
    "of heads": lambda p, x: jnp.einsum(
        "lhk,thk->htl", jnp.einsum("ld,dhk->lhk", p["latents"], p["query"]) + p["bias"], x
    ),
    "of values": lambda p, x: jax.nn.softmax(x[:, 0, :4] @ p["latents"].T[:4]) @ (p["latents"] @ p["key"] + p["row"]),
    "of a table": lambda p, x: (p["latents"] @ p["key"] + p["row"])[jnp.arange(5)],
    "of latents": lambda p, x: (p["latents"] + p["row"]) @ p["key"] @ x.reshape(8, -1),
    "beside data": lambda p, x: (p["latents"] @ p["key"] + p["row"]) * x[0, 0, 0],
}


def test_a_vector_that_is_repeated_and_added_is_a_bias() -> None:
    own = {"latents": normal(6, 8), "query": normal(8, 4, 8), "bias": normal(4, 8), "key": normal(8, 8)}
    for name, fun in OTHER_BIASES.items():
        low = jc.quantize_fn(fun, jc.Rule(weight="int4(group=4)"))
        rows = {row.path: row for row in low.report(own | {"row": normal(8)}, normal(5, 4, 8)).parameters if row.use}
        bias = rows["bias" if name == "of heads" else "row"]
        assert (bias.use, bias.primitive, bias.spec) == ("sum", "add", ""), name
        assert all(row.spec for row in rows.values() if row is not bias), name


SUMS_OF_WEIGHTS = {
    "low rank": lambda p: p["w"] + p["a"] @ p["b"],
    "low rank, with a new axis": lambda p: (p["w"][None] + (p["a"] @ p["b"])[None])[0],
    "of one column": lambda p: p["w"] - p["a"][:, :1] @ p["b"][:1],
    "two": lambda p: p["w"] + p["other"],
    "a convolution": lambda p: (p["w"][None] + jax.lax.conv(p["w"][None], p["kernel"], (1,), "SAME"))[0],
    "standardized": lambda p: p["w"] - p["w"].mean(0),
    "a constant": lambda p: (jnp.broadcast_to(p["w"], (2, 32, 16)) + 1e-6)[0],
    "one for several": lambda p: (p["w"] + jnp.stack([p["a"], 2 * p["a"]]) @ p["b"])[1],
    "one for several, broadcast": lambda p: (jnp.broadcast_to(p["w"], (2, 32, 16)) + jnp.stack([p["other"]] * 2))[1],
    "repeated": lambda p: jnp.repeat(p["w"][:, :8], 2, 1) + p["a"] @ p["b"],
    "of one output": lambda p: p["w"][:, :1] + p["a"] @ p["b"][:, :1],
    "a column": lambda p: p["column"] + p["a"] @ p["b"][:, :1],
    "a vector": lambda p: p["column"][:, 0] + p["a"] @ p["b"][:, 0],
}


def test_a_sum_of_weights_is_a_weight() -> None:
    params = {"w": normal(32, 16), "a": normal(32, 2), "b": normal(2, 16), "other": normal(32, 16)}
    params["column"] = normal(32, 1)
    params["kernel"] = normal(32, 32, 3)
    for name, total in SUMS_OF_WEIGHTS.items():
        low = jc.quantize_fn(lambda p, x, total=total: x @ total(p), jc.Rule(weight="int4(group=all)"))
        used = [row for row in low.report(params, X).parameters if row.use]
        assert used and all(row.spec for row in used), name


@further
@pytest.mark.parametrize("gradient", [None, "e5m2"])
def a_weight_comes_out_of_a_function_under_jit_as_it_went_in(gradient: str | None) -> None:
    rule = jc.Rule(
        weight="int4(group=4)", activation="int8(group=4)", gradient=gradient, product="float" if gradient else "codes"
    )

    def gradients(take: Any) -> Any:
        low = jc.quantize_fn(lambda w, x: x @ take(w, 1), rule)
        return jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(low(w, x) ** 2), (0, 1)))(NORMED["experts"], X[:, :8])

    chex.assert_trees_all_equal(gradients(jax.jit(lambda w, i: w[i])), gradients(lambda w, i: w[i]))


@pytest.mark.parametrize("text", ["int8(group=all)", pytest.param("mxfp8_e4m3", marks=pytest.mark.slow)])
def test_products_of_codes_have_forward_mode(text: str) -> None:
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=text, activation=text, product="codes"))
    given, moved = (PARAMS["up"], X), (jnp.cos(PARAMS["up"]), jnp.sin(X))
    _, tangent = jax.jit(partial(jax.jvp, low))(given, moved)
    w, x = rounded(PARAMS["up"].T, text).T, rounded(X, text)
    np.testing.assert_allclose(tangent, moved[1] @ w + x @ moved[0], rtol=1e-4, atol=1e-4)
    _, alone = jax.jit(lambda *v: jax.jvp(partial(low, given[0]), *v))(given[1:], moved[1:])
    np.testing.assert_allclose(alone, moved[1] @ w, rtol=1e-4, atol=1e-4)


def test_products_of_experts_by_codes_have_forward_mode() -> None:
    text, sizes, w, x = "int8(group=all)", jnp.array([3, 5]), normal(2, 8, 4), X[:, :8]
    rule = jc.Rule(weight=text, activation=text, product="codes")
    low = jc.quantize_fn(lambda w, x: jax.lax.ragged_dot(x, w, sizes), rule)
    _, tangent = jax.jit(partial(jax.jvp, low))((w, x), (jnp.cos(w), jnp.sin(x)))
    stack = jnp.swapaxes(rounded(jnp.swapaxes(w, 1, 2), text), 1, 2)
    want = jax.lax.ragged_dot(jnp.sin(x), stack, sizes)
    want += jax.lax.ragged_dot(rounded(x, text), jnp.cos(w), sizes)
    np.testing.assert_allclose(tangent, want, rtol=1e-4, atol=1e-4)


@further
def products_of_codes_have_second_derivatives_in_loops() -> None:
    def net(layers: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]

    layers, x = 0.3 * normal(2, 8, 8), X[:, :8]
    found = []
    for product in ("codes", "float"):
        low = jc.quantize_fn(net, jc.Rule(weight="int8(group=all)", product=product))
        of_loss = jax.grad(lambda p, low=low: jnp.sum(low(p, x) ** 2))
        found.append(jax.jit(lambda p, of_loss=of_loss: jax.vjp(of_loss, p)[1](p)[0])(layers))
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-3)


def test_a_traced_program_is_kept() -> None:
    count = 0

    def counted(w: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return x @ w

    low = jc.quantize_fn(counted, jc.Rule(weight="e4m3"))
    w = normal(8, 4)
    for weight in (w, w + 1, w):
        low(weight, normal(2, 8))
    assert count == 1
    low(w, normal(3, 8))
    assert count == 2


def test_abstract_parameters_are_packed_abstractly() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)"))
    shapes = jax.eval_shape(lambda: PARAMS)
    packed = low.pack(shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(packed, low.pack(PARAMS, X))


def test_parameters_that_a_traced_function_holds_are_packed_and_checked() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)"))
    np.testing.assert_array_equal(jax.jit(lambda x: low(low.pack(PARAMS, x), x))(X), jax.jit(low)(PARAMS, X))
    wrong = {**PARAMS, "up": PARAMS["up"].at[0, 0].set(jnp.inf)}
    with pytest.raises(ValueError, match="'up' holds 0 NaN and 1 infinities"):
        jax.eval_shape(lambda: low.pack(wrong, X))


# -- errors ------------------------------------------------------------------------------------------------------------


USELESS: list[tuple[Any, str]] = [
    (jc.Rule("upp", weight="int8"), r"Rule\('upp', weight=int8\) matches no parameter.*nearest paths are 'up'"),
    (
        jc.Rule("bias", weight="int8"),
        r"names the parameter 'bias', which reaches no product; it reaches add at .*_fn.py:\d+.*Rule\('bias'\)",
    ),
    (jc.Rule("up", weight="int8", bias="e4m3"), r"bias has no effect on the parameters and products"),
    ([jc.Rule("bias", activation="int8"), jc.Rule(weight="int8")], r"activation has no effect"),
    ([jc.Rule(weight="int8"), jc.Rule("up", weight="e4m3")], r"Rule\('up', weight=float8_e4m3\) matches no"),
]


def test_a_rule_that_does_nothing_is_an_error() -> None:
    for rules, message in USELESS:
        with pytest.raises(ValueError, match=message):
            jc.quantize_fn(mlp, rules)(PARAMS, X)


def test_a_function_that_rounds_its_weights_already_is_said() -> None:
    rule, params = jc.Rule(weight="int4(group=16)"), {"w": PARAMS["up"]}
    by_hand = lambda p, x: x @ jc.round_to_format(p["w"], "int4(group=16,axis=0)")  # noqa: E731
    packed = lambda p, x: x @ jc.dequantize(jc.quantize(p["w"], "int4(group=16,axis=0)"))  # noqa: E731
    low = jc.quantize_fn(lambda p, x: x @ p["w"], rule)
    already = "parameter 'w'.* is rounded already, by {}; give the plain function$"
    for fun, by in ((low, "the rules of .*"), (by_hand, r"jchop at .*_fn.py:\d+"), (packed, r"jchop at .*_fn.py:\d+")):
        for again in (jc.quantize_fn(fun, rule), jc.quantize_fn(fun, jc.Rule("w", weight="int8"))):
            for call in (again, again.pack, again.report):
                with pytest.raises(ValueError, match=already.format(by)):
                    call(params, X)
        with pytest.raises(ValueError, match=already.format(by)):
            jc.quantize_fn(fun, rule).pack(params, batches=[X], return_report=True)


def test_a_rule_of_products_of_parameters_alone_is_said() -> None:
    own, rest = jc.Rule("down", weight="e4m3", activation="e5m2"), jc.Rule(weight="e4m3")
    with pytest.raises(ValueError, match=r"activation has no effect.*'down' reaches dot_general.*parameters alone"):
        jc.quantize_fn(lambda p, x: x @ p["up"] @ (p["down"] @ p["down"].T), [own, rest])(PARAMS, X)
    with pytest.raises(ValueError, match=r"'down' reaches dot_general at .*, whose rule is that of 'a'"):
        jc.quantize_fn(lambda p, x: x @ (p["a"] + p["down"]), [own, rest])({"a": PARAMS["up"], "down": PARAMS["up"]}, X)


_BLOCKS = {f"{i}/{name}": PARAMS["up"] for i in (0, 10) for name in ("kernel", "other")}
_OTHERS = {"b8": np.zeros((32, 4), np.float32), "s": np.zeros((2, 8, 8), np.float32)}
_MASKED = {
    "flat": ({"a": PARAMS["up"], "b": PARAMS["up"], "c": PARAMS["up"]}, "a", "b", "a b"),
    "layers": (_BLOCKS, "0/kernel", "10/kernel", "*/kernel"),
    "some layers": (_BLOCKS | {"5/kernel": PARAMS["up"]}, "0/kernel", "10/kernel", "0/kernel 10/kernel"),
    "in a loop": (_OTHERS | {"a": PARAMS["up"]}, "a", "s", "a s"),
}


@pytest.mark.parametrize("name", ["flat", *(pytest.param(name, marks=pytest.mark.slow) for name in list(_MASKED)[1:])])
def test_all_weights_without_codes_are_said_at_once_with_a_rule_that_leaves_them(name: str) -> None:
    params, first, other, pattern = _MASKED[name]
    masked = {"a", "b", "s"} | {path for path in params if path in ("0/kernel", "10/kernel")}

    def fun(p: Any, x: jax.Array) -> jax.Array:
        for path, w in p.items():
            if w.ndim == 3:
                _, y = jax.lax.scan(lambda x, w: (x, x[:, :8] @ (w * 2)), x, w)
                x = x + y.sum()
            else:
                x = x + (x @ (jnp.tril(w) if path in masked else w)).sum()
        return x

    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", product="codes")
    with pytest.raises(ValueError, match=f"the weight {first!r}, like 1 other, such as {other!r}") as error:
        jc.quantize_fn(fun, rule)(params, X)
    assert f"put Rule({pattern!r}, ...) without product before" in str(error.value)
    left = jc.quantize_fn(fun, [jc.Rule(pattern, weight="int8(group=all)"), rule])
    rows = {row.parameters[0]: row.rule for row in left.report(params, X).products}
    assert {path for path, text in rows.items() if "codes" not in text} == masked & set(params)


def test_all_weights_whose_groups_are_no_blocks_are_said_at_once() -> None:
    params = dict.fromkeys(("l0", "l1", "z"), PARAMS["up"])

    def fun(p: Any, x: jax.Array) -> jax.Array:
        for name in ("l0", "l1"):
            x = (x @ p[name]) @ p[name].T
        return x @ p["z"]

    rule = jc.Rule(weight="int8(group=4)", product="codes")
    words = r"'l0' follow its first product.*; 1 more are like it: put Rule\('l\*', \.\.\.\) without product"
    with pytest.raises(ValueError, match=words):
        jc.quantize_fn(fun, rule)(params, X)
    jc.quantize_fn(fun, [jc.Rule("l*", weight="int8(group=4)"), rule]).report(params, X)


def test_a_weight_without_codes_is_said_with_its_rule() -> None:
    codes = jc.Rule(weight="int8(group=all)", product="codes")
    with pytest.raises(ValueError, match=r"the weight '' .* is computed with before .*Rule\('/', \.\.\.\) without"):
        jc.quantize_fn(lambda w, x: x @ (2 * w), codes)(PARAMS["up"], X)
    jc.quantize_fn(lambda w, x: x @ (2 * w), jc.Rule("/", weight="int8(group=all)"))(PARAMS["up"], X)
    with pytest.raises(ValueError, match=r"the weight 'up' .* is joined with others, padded.*Rule\('up', "):
        jc.quantize_fn(lambda p, x: x @ jnp.pad(p["up"], ((0, 0), (0, 1))), codes)({"up": PARAMS["up"]}, X)
    scaled = jc.quantize_fn(lambda p, x: x @ (p["up"] * p["gain"]), codes)
    params = {"up": PARAMS["up"], "gain": PARAMS["up"]}
    for refused in (scaled, scaled.report, scaled.pack, scaled.report):
        with pytest.raises(ValueError, match=r"the weight '(up|gain)' .* is computed with before"):
            refused(params, X)


WITHOUT_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"output": "e4m3"}, "output needs layers.*round_to_format"),
    ({"cache": "int8(group=all)"}, "cache needs the attention"),
    ({"scale_from": jc.LSQ(), "weight": "int8", "product": "codes"}, "leave scale_from or product out"),
]


def test_what_a_program_does_not_have_is_refused() -> None:
    for field, message in WITHOUT_LAYERS:
        with pytest.raises(NotImplementedError, match=message):
            jc.quantize_fn(mlp, jc.Rule(**field))


def test_rules_select_by_operation_and_by_class() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Table:
        rows: Any

    def fun(p: Any, tokens: Any) -> Any:
        x = p["table"].rows[tokens]
        x = jax.lax.conv_general_dilated(x, p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return x @ p["out"] @ p["table"].rows.T

    params = {"table": Table(normal(16, 8)), "conv": normal(3, 8, 8), "out": normal(8, 8)}
    tied = {**params, "look": normal(16, 8)}

    def rounded_by(**select: Any) -> set[str]:
        low = jc.quantize_fn(lambda p, t: fun(p, t) + p["look"][t][..., :1], jc.Rule(weight="int8", **select))
        return {row.path for row in low.report(tied, jnp.zeros((2, 4), jnp.int32)).parameters if row.spec}

    assert rounded_by(operation="conv") == {"conv"}
    assert rounded_by(operation="dot_general") == {"out", "table/rows"}  # of its first product, not of its look-up
    assert rounded_by(operation="!dot_general") == {"conv", "look"}
    assert rounded_by(layer="Table") == {"table/rows"}
    assert rounded_by(path="!out", layer="dict") == {"conv", "look"}


def test_what_is_packed_is_finite_and_packed_once() -> None:
    low = jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)"))
    with pytest.raises(ValueError, match="'up' holds 1 NaN and 0 infinities"):
        low.pack({**PARAMS, "up": PARAMS["up"].at[0, 0].set(jnp.nan)}, X)
    with pytest.raises(ValueError, match=r"'(up|down)' is packed already"):
        low.pack(low.pack(PARAMS, X), X)
    with pytest.raises(TypeError, match="fun=3"):
        jc.quantize_fn(3, jc.Rule(weight="int8"))  # type: ignore[arg-type]


def test_the_report_is_a_table() -> None:
    text = str(jc.quantize_fn(mlp, jc.Rule(weight="int4(group=16)", activation="e4m3")).report(PARAMS, X))
    assert "up" in text and "int4(group=16,axis=-2)" in text and "activation=float8_e4m3" in text
    assert "as it is" in text and "test_quantize_fn.py:" in text


# -- products that are none, and operands that are no floats -----------------------------------------------------------


def test_integers_in_a_product_become_floats() -> None:
    """As the product itself takes them; a mask of integers times data, which sums over nothing, is left alone."""
    table, tokens = normal(6, 4), jnp.array([[1, 0, 3, 0, 0, 1], [0, 2, 0, 0, 127, 0]], jnp.int8)
    dot = lambda w, x: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)  # noqa: E731
    rule = jc.Rule(weight="int8(group=all)", activation="e4m3", gradient="e5m2")
    low = jc.quantize_fn(dot, rule)
    np.testing.assert_array_equal(low(table, tokens), low(table, tokens.astype(jnp.float32)))
    got, want = (jax.grad(lambda w, x=x: jnp.sum(low(w, x) ** 2))(table) for x in (tokens, tokens.astype(jnp.float32)))
    np.testing.assert_array_equal(got, want)

    def masked(w: Any, x: Any, mask: Any) -> Any:
        return jnp.einsum("bh,h->bh", x @ w, mask)

    mask, x = jnp.array([1, 0, 1, 1]), normal(3, 6, seed=1)
    low = jc.quantize_fn(masked, rule)
    assert [row.primitive for row in low.report(table, x, mask).products] == ["dot_general"]
    np.testing.assert_array_equal(low(table, x, mask), jc.quantize_fn(lambda w, x: x @ w, rule)(table, x) * mask)


def test_complex_numbers() -> None:
    """Complex operands have no scales, so parameters that only complex products read stay; the report says so."""

    def recurrence(p: Any, x: Any) -> Any:
        return jnp.einsum("nd,td->tn", jax.lax.complex(p["real"], p["imag"]), x).real

    params, x = {"real": normal(6, 8), "imag": normal(6, 8, seed=1)}, normal(5, 8, seed=2)
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)")
    whole, out = params | {"out": normal(6, 4, seed=3)}, lambda p, x: recurrence(p, x) @ p["out"]
    report = jc.quantize_fn(out, rule).report(whole, x)
    first, second = report.products
    assert (first.primitive, dict(first.roundings)) == ("dot_general (complex)", {})
    assert (second.primitive, [*second.roundings]) == ("dot_general", ["activation"])
    reasons = {row.path: row.reason for row in report.parameters if not row.spec}
    assert reasons == dict.fromkeys(params, "complex numbers have no scales") and "as it is: complex" in str(report)
    assert report.rounded_share == 24 / (24 + 2 * 48)
    packed = jc.quantize_fn(out, rule).pack(whole, x)
    assert [name for name, value in packed.items() if isinstance(value, jax.Array)] == ["imag", "real"]
    for rules in (jc.Rule("real", weight="int8(group=all)"), rule):
        with pytest.raises(ValueError, match=r"complex numbers have no scales"):
            jc.quantize_fn(recurrence, rules)(params, x)
    both = jc.quantize_fn(lambda p, x: recurrence(p, x) + x @ p["real"].T, rule).report(params, x)
    assert {row.path: bool(row.spec) for row in both.parameters} == {"real": True, "imag": False}
    plain = jc.quantize_fn(recurrence, jc.Rule(weight="e4m3", activation="bfloat16"))
    low = {name: jc.round_to_format(value, "e4m3") for name, value in params.items()}
    want = jax.jit(recurrence)(low, jc.round_to_format(x, "bfloat16"))
    np.testing.assert_array_equal(jax.jit(plain)(params, x), want)


TREE = {"a": normal(16, 32), "b": 100 * normal(32, 8, seed=1), "c": normal(8, seed=2)}


def affine(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]


def two_levels(p: Any, x: Any) -> Any:
    """Layers in blocks of two, and those that are left."""
    inner = lambda x, stack: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)  # noqa: E731
    x, _ = jax.lax.scan(inner, x, p["stack"][:4].reshape(2, 2, 8, 8))
    return inner(x, p["stack"][4:])[0]


def swapped(p: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[0], jnp.tanh(c[2] @ c[0])), (p["a"], p["b"], x))[2]


MATRICES = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}
STACK = {"stack": normal(5, 8, 8, seed=2)}
FOLLOWED: dict[str, tuple[Any, Any]] = {
    "cond": (lambda p, x: x @ jax.lax.cond(x[0, 0] > 0, lambda: p["a"], lambda: p["b"]), MATRICES),
    "cond of one": (
        lambda p, x: x @ jax.lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w.T / 2, p["a"]),
        {"a": MATRICES["a"]},
    ),
    "switch": (lambda p, x: x @ jax.lax.switch(jnp.int32(x[0, 0] > 0), [lambda: p["a"], lambda: p["b"]]), MATRICES),
    "carried": (swapped, MATRICES),
    "map": (lambda p, x: x @ jax.lax.map(jnp.tanh, p["stack"])[1], STACK),
    "scan": (lambda p, x: x @ jax.lax.scan(lambda c, w: (c, w.T), 0, p["stack"])[1][1], STACK),
    "batches": (lambda p, x: jax.lax.map(lambda w: x @ w, p["stack"], batch_size=2), STACK),
    "blocks": (two_levels, STACK),
}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", FOLLOWED)
def test_parameters_come_out_of_branches_and_loops(name: str) -> None:
    fun, params = FOLLOWED[name]
    low, x = jc.quantize_fn(fun, jc.Rule(weight="int4(group=4)")), normal(3, 8, seed=3)
    packed = low.pack(params, x)
    assert low.report(params, x).rounded_share == 1
    assert all(isinstance(value, jc.QArray) for value in packed.values())
    want = jax.jit(fun)({name: jc.dequantize(value) for name, value in packed.items()}, x)
    np.testing.assert_array_equal(jax.jit(low)(params, x), want)
    np.testing.assert_array_equal(jax.jit(low)(packed, x), want)


def test_a_weight_that_data_change_counts_as_not_rounded() -> None:
    def fast(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda w, row: (w + jnp.outer(row, row), row @ w), p["fast"], x @ p["slow"])[1]

    for weight in ("int4(group=all)", "e4m3"):
        report = jc.quantize_fn(fast, jc.Rule(weight=weight)).report({"fast": jnp.eye(8), "slow": jnp.eye(8)}, X[:, :8])
        assert report.rounded_share == 0.5 and report.parameters[0].reason == "data change it"


def horner(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda y, w: (y * x + w, None), 0 * x, p["w"])[0]


def test_a_parameter_that_is_only_added_in_a_loop_is_named() -> None:
    rule = jc.Rule(weight="e4m3", bias="e4m3")
    with pytest.raises(ValueError, match=r"weight has no effect.*'w' reaches add at .*test_quantize_fn.py:\d+ alone"):
        jc.quantize_fn(horner, rule)({"w": jnp.ones(8)}, jnp.ones(2))


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("tree", "fun"),
    [
        (TREE, affine),
        ({name: TREE[name] for name in "ab"}, lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]),
        ({"b": normal(16, 8), "c": normal(8)}, lambda p, x: x @ p["b"] + p["c"]),
        ({"w": normal(16, seed=1), "z": normal(1)[0]}, lambda p, x: (x @ p["w"] + p["z"])[:, None]),
        ({"rows": normal(9, 8), "y": normal(8)}, lambda p, x: p["rows"][x[:, 0].astype(int)]),
    ],
    ids=["matrices and a bias", "two matrices", "rows of a bias", "a vector and its bias", "a table"],
)
def a_vector_that_holds_several_arrays_stays(tree: Any, fun: Any) -> None:
    flat, unravel = jax.flatten_util.ravel_pytree(tree)
    x, rule = normal(4, 16, seed=4), jc.Rule(weight="int8(group=all)", activation="int8(group=all)")
    last = lambda p, x: jnp.sum(fun(unravel(p["flat"]), x), 1, keepdims=True) @ p["last"]  # noqa: E731
    params = {"flat": flat, "last": normal(1, 4, seed=5)}
    low = jc.quantize_fn(last, rule)
    rows = {row.path: row for row in low.report(params, x).parameters}
    assert rows["last"].spec and not rows["flat"].spec and "holds several arrays" in rows["flat"].reason
    assert low.pack(params, x)["flat"] is flat
    with pytest.raises(ValueError, match=r"names the parameter 'flat', which stays.*it holds several arrays"):
        jc.quantize_fn(last, [jc.Rule("flat", weight="int8(group=all)"), rule])(params, x)
    with pytest.raises(ValueError, match=r"weight has no effect.*it holds several arrays"):
        jc.quantize_fn(lambda v, x: fun(unravel(v), x), jc.Rule(weight="int8(group=all)"))(flat, x)
    alone = jc.quantize_fn(last, jc.Rule(weight="int8(group=all)"))
    want = last(params | {"last": jc.round_to_format(params["last"], "int8(group=all,axis=0)")}, x)
    np.testing.assert_allclose(alone(params, x), want, rtol=1e-5, atol=1e-5)


def test_activations_of_a_vector_that_stays_are_rounded() -> None:
    flat, unravel = jax.flatten_util.ravel_pytree(TREE)
    params, x = {"flat": flat, "w": normal(32, 4)}, normal(4, 16, seed=4)
    own, both = jc.Rule("flat", activation="e4m3"), jc.Rule(weight="int8(group=all)", activation="e4m3")
    low = jc.quantize_fn(lambda p, x: affine(unravel(p["flat"]), x) @ TREE["b"].T @ p["w"], both)
    want = jc.quantize_fn(low.fun, [own, both])(params, x)
    np.testing.assert_array_equal(low(params, x), want)


@pytest.mark.parametrize("part", [slice(0, 16), slice(16, 32)])
def test_slices_that_are_rows_are_parts_of_their_parameter(part: slice) -> None:
    """Also if heads are taken apart, if a slice follows that, and if one slice is a layer of a stack."""
    w, x, rule = normal(32, 8), normal(4, 8, seed=1), jc.Rule(weight="int8(group=all)")
    want = jc.round_to_format(w, "int8(group=all,axis=-1)")[part]
    for fun in (
        lambda w, x: x @ w[part].T,
        lambda w, x: jnp.einsum("bi,hdi->bhd", x, w[part].reshape(4, 4, 8)).reshape(4, 16),
        lambda w, x: jnp.einsum("bi,hdi->bhd", x, w.reshape(8, 4, 8)[part.start // 4 :][:4]).reshape(4, 16),
    ):
        np.testing.assert_allclose(jc.quantize_fn(fun, rule)(w, x), x @ want.T, rtol=1e-5, atol=1e-5)


@further.first
def a_parameter_that_data_change_in_a_loop_is_said() -> None:
    def learned(p: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, w: w + 0.1 * x.T @ jnp.tanh(x @ w), p["w"])

    params, x = {"w": normal(16, 8)}, normal(4, 16, seed=1)
    with pytest.raises(
        ValueError, match=r"'w' reaches (scan|while) at .*_fn.py:\d+, and stays as it is: data change it"
    ):
        jc.quantize_fn(learned, jc.Rule(weight="int8(group=all)"))(params, x)
    (row,) = jc.quantize_fn(learned, jc.Rule(activation="int8(group=all)")).report(params, x).parameters
    assert row.reason == "data change it" and row.primitive in ("scan", "while") and "_fn.py" in row.source


def test_of_what_a_loop_trains_the_weights_are_said_and_not_a_bias() -> None:
    def trained(p: Any, x: Any) -> Any:
        run = lambda q: jnp.tanh(x @ q["w1"] + q["b"]) @ q["w2"]  # noqa: E731
        step = lambda q, _: (jax.tree.map(jnp.subtract, q, jax.grad(lambda q: (run(q) ** 2).mean())(q)), None)  # noqa: E731
        return run(jax.lax.scan(step, p, None, length=2)[0])

    params = {"w1": normal(16, 8), "b": jnp.zeros(8), "w2": normal(8, 2)}
    with pytest.raises(ValueError, match=r": the parameter 'w1', like 'w2', reaches scan at .*it is: data change it"):
        jc.quantize_fn(trained, jc.Rule(weight="int4(group=all)"))(params, normal(4, 16, seed=1))


def test_a_product_that_cannot_be_rounded_is_left_and_named() -> None:
    def grouped(p: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", batch_group_count=2)
        return y @ p["out"]

    params, x = {"kernel": normal(4, 3, 3), "out": normal(8, 2, seed=1)}, normal(4, 3, 8, seed=2)
    low = jc.quantize_fn(grouped, jc.Rule(weight="int8(group=all)", activation="e4m3"))
    report = low.report(params, x)
    assert [row.primitive for row in report.products] == ["conv_general_dilated (batch_group_count=2)", "dot_general"]
    assert {row.path: bool(row.spec) for row in report.parameters} == {"kernel": False, "out": True}
    want = grouped(params | {"out": jc.round_to_format(params["out"], "int8(group=all,axis=0)")}, x)
    assert jnp.linalg.norm(low(params, x) - want) < 0.1 * jnp.linalg.norm(want)
    with pytest.raises(ValueError, match=r"names the parameter 'kernel'.*batch_group_count=2.*test_quantize_fn.py"):
        jc.quantize_fn(grouped, jc.Rule("kernel", weight="int8(group=all)"))(params, x)


@further
@pytest.mark.parametrize("text", ["int8(channel=0)", pytest.param("nvfp4", marks=pytest.mark.slow)])
def a_program_that_computes_with_a_parameter_gives_the_same_bits_packed(text: str) -> None:
    """A norm of the weight: a sum of squares, fused with whatever makes the numbers (`sums_ordered_by_fusion`)."""

    def network(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = jnp.linalg.norm(p["v"], axis=0)
        return x @ (p["g"] * p["v"] / norm), norm

    keys = jax.random.split(jax.random.key(3), 2)
    params = {"v": jax.random.normal(keys[0], (32, 64)), "g": jnp.ones(64)}
    x = jax.random.normal(keys[1], (4, 32))
    low = jc.quantize_fn(network, jc.Rule(weight=text))
    run = jax.jit(lambda p, x: low(p, x))
    packed = low.pack(params, x)
    for one, other in zip(run(params, x), run(packed, x), strict=True):
        np.testing.assert_array_equal(one, other)
    gradient = jax.grad(lambda g, v: low({"v": v, "g": g}, x)[0].sum())
    np.testing.assert_array_equal(gradient(params["g"], params["v"]), gradient(params["g"], packed["v"]))
    second = jax.hessian(lambda g: low({**params, "g": g}, x)[0].sum())(params["g"])
    assert not second.any()


test_further = further.test()


@pytest.mark.parametrize("window", [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1)])
def test_groups_of_a_convolution_cross_axes_of_one_number(window: tuple[int, ...]) -> None:
    """The sum runs over the window and the channels as one axis, whichever of them has one number."""
    k = jax.random.normal(jax.random.key(0), (*window, 3, 2))
    x = jax.random.normal(jax.random.key(1), (1, 4, 4, 4, 3))

    def convolution(k: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, k, (1, 1, 1), "SAME", dimension_numbers=("NXYZC", "XYZIO", "NXYZC"))

    rows = jc.round_to_format(k.reshape(12, 2).T, "int4(group=4)").T
    low = jc.quantize_fn(convolution, jc.Rule(weight="int4(group=4)"))
    np.testing.assert_array_equal(low(k, x), convolution(rows.reshape(k.shape), x))
    np.testing.assert_array_equal(low.pack(k, x).dequantize(), rows.reshape(k.shape))
