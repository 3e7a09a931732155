"""The products: forward, and both backward ones, against references that round by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from layer_references import checked, each
from programs.program import equations

import jchop as jc
from jchop._quantized.products import product as _product
from jchop._quantized.products.contraction import (
    OperandForms,
    ProductRoundings,
    rounded_conv,
    rounded_dot_general,
    rounded_einsum,
)
from jchop._spec.spec import as_spec

BLOCKS = "mxfp8_e4m3(group=4)"
GRADIENT = "mxfp8_e5m2(group=4)"


def how(**specs: Any) -> ProductRoundings:
    fields: dict[str, Any] = {k: v if k == "matmul" else as_spec(v, scaled=True) for k, v in specs.items()}
    return ProductRoundings(**fields)


def last(x: Any, spec: Any) -> Any:
    return jc.round_to_format(x, spec)


def first(x: Any, spec: Any) -> Any:
    return jc.round_to_format(x.T, spec).T


def near(got: Any, expected: Any) -> None:
    """Equal but for the order of a sum of numbers that are not few bits wide."""
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


MATRICES = (((1,), (0,)), ((), ()))
X, W, G = normal(6, 10), normal(10, 7, seed=1), normal(6, 7, seed=2)


def products(how: ProductRoundings, x: Any = X, w: Any = W, g: Any = G) -> Any:
    y, pull = jax.vjp(lambda x, w: rounded_dot_general(x, w, MATRICES, how=how), x, w)
    return y, *pull(g)


def every_product_has_its_blocks_along_its_own_sum() -> None:
    rounded = how(left=BLOCKS, right=BLOCKS, gradient=GRADIENT)
    y, dx, dw = jax.jit(partial(products, rounded))()
    np.testing.assert_array_equal(y, last(X, BLOCKS) @ first(W, BLOCKS))
    np.testing.assert_array_equal(dx, last(G, GRADIENT) @ last(W, BLOCKS).T)
    np.testing.assert_array_equal(dw, first(X, BLOCKS).T @ first(G, GRADIENT))


def without_a_gradient_the_operands_are_those_of_the_forward_product() -> None:
    _, dx, dw = jax.jit(partial(products, how(left=BLOCKS, right=BLOCKS)))()
    near(dx, G @ first(W, BLOCKS).T)
    near(dw, last(X, BLOCKS).T @ G)


def the_accumulator_is_emulated_in_all_three_products() -> None:
    sums = jc.MatmulSpec(accumulate="e5m2", order="matrix_unit(3)")
    rounded = how(left="e4m3", right="e4m3", gradient="e5m2", matmul=sums)
    y, dx, dw = jax.jit(partial(products, rounded))(X[:, :6], W[:6, :6], G[:, :6])
    x, w, g = last(X[:, :6], "e4m3"), last(W[:6, :6], "e4m3"), last(G[:, :6], "e5m2")
    np.testing.assert_array_equal(y, jc.math.matmul(x, w, sums))
    np.testing.assert_array_equal(dx, jc.math.matmul(g, w.T, sums))
    np.testing.assert_array_equal(dw, jc.math.matmul(x.T, g, sums))


def clipped_gradients_and_forward_mode_hold_where_nothing_else_is_asked() -> None:
    clipped = how(left="fixed1.3:gradient=clipped", right="e4m3")
    _, dx, _ = products(clipped)
    wide = last(X, "fixed8.3")
    kept = (wide <= 0.875) & (wide >= -1.0)
    near(dx, jnp.where(kept, G @ last(W, "e4m3").T, 0))
    _, tangent = jax.jvp(lambda x: rounded_dot_general(x, W, MATRICES, how=clipped), (X,), (jnp.where(kept, 1.0, 5.0),))
    near(tangent, jnp.where(kept, 1.0, 0.0) @ last(W, "e4m3"))


def a_batch_of_products_is_rounded_product_by_product() -> None:
    x, w, g = normal(2, 5, 3, 4), normal(2, 4, 3, 6, seed=1), normal(2, 3, 5, 6, seed=2)
    rounded = how(left=BLOCKS, right=BLOCKS, gradient=GRADIENT)

    @jax.jit
    def both() -> Any:
        y, pull = jax.vjp(lambda x, w: rounded_einsum("bihk,bkhj->bhij", x, w, how=rounded), x, w)
        return (y, *pull(g)), products(rounded, x[1, :, 2], w[1, :, 2], g[1, 2])

    (y, dx, dw), one = both()
    for got, expected in zip((y[1, 2], dx[1, :, 2], dw[1, :, 2]), one, strict=True):
        near(got, expected)


ROWS = (((2, 3), (0, 1)), ((), ()))


def test_rows_become_one_axis_where_there_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = normal(2, 5, 3, 4), normal(3, 4, 7, seed=1), normal(2, 5, 7, seed=2)
    rounded = how(left="e4m3", right="e4m3")

    def run(x: Any, w: Any, g: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: rounded_dot_general(x, w, ROWS, how=rounded), x, w)
        return y, jax.jvp(lambda w: rounded_dot_general(x, w, ROWS, how=rounded), (w,), (w,))[1], *pull(g)

    found, ranks = [], []
    for alone in (False, True):
        monkeypatch.setattr(_product, "one_device_at_hand", lambda alone=alone: alone)
        jax.clear_caches()  # a product is traced once
        found.append(jax.jit(lambda *args: run(*args))(x, w, g))
        program = jax.make_jaxpr(lambda x: rounded_dot_general(x, w, ROWS, how=rounded))(x)
        (product,) = (eqn for eqn in equations(program) if eqn.primitive is lax.dot_general_p)
        ranks.append(product.invars[0].aval.ndim)
    jax.clear_caches()
    assert ranks == [4, 3]
    y, *others = zip(*found, strict=True)
    np.testing.assert_array_equal(*y)
    for one, other in others:
        near(one, other)


def convolutions_round_their_backward_products_too() -> None:
    x, w, g = normal(2, 5, 3), normal(3, 3, 4, seed=1), normal(2, 5, 4, seed=2)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, ("NWC", "WIO", "NWC"))
    rounded = how(left=BLOCKS, right=BLOCKS, gradient=GRADIENT)
    plain = partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=numbers)

    def flat(v: Any, spec: Any, order: tuple[int, ...]) -> Any:
        moved = v.transpose(order)
        out = jc.round_to_format(moved.reshape(moved.shape[0], -1), spec).reshape(moved.shape)
        return out.transpose(np.argsort(order))

    @jax.jit
    def both() -> Any:
        y, pull = jax.vjp(lambda x, w: rounded_conv(x, w, (1,), "SAME", dimension_numbers=numbers, how=rounded), x, w)
        dx = jax.vjp(lambda x: plain(x, flat(w, BLOCKS, (1, 0, 2))), x)[1](flat(g, GRADIENT, (0, 1, 2)))[0]
        dw = jax.vjp(lambda w: plain(flat(x, BLOCKS, (2, 0, 1)), w), w)[1](flat(g, GRADIENT, (2, 0, 1)))[0]
        return (y, *pull(g)), (plain(flat(x, BLOCKS, (0, 1, 2)), flat(w, BLOCKS, (2, 0, 1))), dx, dw)

    for got, expected in zip(*both(), strict=True):
        np.testing.assert_array_equal(got, expected)


def convolutions_in_an_emulated_arithmetic() -> None:
    x, w = normal(2, 6, 5, 3), normal(3, 2, 3, 4, seed=1)
    sums = jc.MatmulSpec(product="e5m4", accumulate="e5m4")
    layer = jc.nn.Conv(3, 4, (3, 2), (2, 1), rule=jc.Rule(matmul=sums), rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    expected = jc.math.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), sums, stride=(2, 1), padding="SAME")
    np.testing.assert_array_equal(layer(x), expected.transpose(0, 2, 3, 1))
    grouped = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="feature_group_count=2"):
        jc.nn.quantize(grouped, jc.Rule(matmul=sums))(normal(1, 5, 4))


@pytest.mark.parametrize(
    "check",
    [
        convolutions_round_their_backward_products_too,
        pytest.param(a_batch_of_products_is_rounded_product_by_product, marks=pytest.mark.slow),
        pytest.param(convolutions_in_an_emulated_arithmetic, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_batches_and_convolutions(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


def stochastic_products_draw_from_the_key() -> None:
    noisy = how(left="e4m3:stochastic", right="e4m3:stochastic", gradient="e5m2:stochastic")

    @jax.jit
    def run(keys: Any) -> Any:
        def one(key: Any) -> Any:
            options = {"how": noisy, "forms": OperandForms(key)}
            y, pull = jax.vjp(lambda x, w: rounded_dot_general(x, w, MATRICES, **options), X, W)
            return y, *pull(G)

        return jax.vmap(one)(keys)

    results = run(jax.random.split(jax.random.key(0), 4000))
    for mean, exact in zip((r.mean(0) for r in results), (X @ W, G @ W.T, X.T @ G), strict=True):
        np.testing.assert_allclose(mean, exact, atol=0.06)
    again = run(jax.random.split(jax.random.key(0), 4000)[:1])
    for a, b in zip(again, results, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert (b[0] != b[1]).mean() > 0.9


def the_weight_gradient_has_a_format_of_its_own() -> None:
    fine = how(left="e4m3", right="e4m3", gradient="e5m2", weight_gradient="binary32")
    _, dx, dw = jax.jit(partial(products, fine))()
    np.testing.assert_array_equal(dx, last(G, "e5m2") @ last(W, "e4m3").T)
    near(dw, X.T @ G)
    alone = how(left="e4m3", right="e4m3", weight_gradient="e5m3")
    _, dx, dw = jax.jit(partial(products, alone))()
    near(dx, G @ last(W, "e4m3").T)
    np.testing.assert_array_equal(dw, last(X, "e5m3").T @ last(G, "e5m3"))


@pytest.mark.parametrize(
    "check",
    [
        the_weight_gradient_has_a_format_of_its_own,
        pytest.param(every_product_has_its_blocks_along_its_own_sum, marks=pytest.mark.slow),
        pytest.param(without_a_gradient_the_operands_are_those_of_the_forward_product, marks=pytest.mark.slow),
        pytest.param(the_accumulator_is_emulated_in_all_three_products, marks=pytest.mark.slow),
        pytest.param(clipped_gradients_and_forward_mode_hold_where_nothing_else_is_asked, marks=pytest.mark.slow),
        pytest.param(stochastic_products_draw_from_the_key, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_products_by_hand(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each(
    ("subscripts", "axes", "words"),
    [
        ("ij,jk", (2, 2), "two arrays"),
        ("ii,ij->j", (2, 2), "once"),
        ("ij,jk->i", (2, 2), "every other index"),
        ("ij,jk->il", (2, 2), "every index"),
        ("...ij,...jk->...ik", (3, 4), "as many"),
    ],
)
def test_einsum_says_what_it_cannot_do(subscripts: str, axes: tuple[int, int], words: str) -> None:
    x, w = (jnp.ones((3,) * n) for n in axes)
    with pytest.raises(ValueError, match=words):
        rounded_einsum(subscripts, x, w, how=ProductRoundings())
