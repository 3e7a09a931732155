"""Statistics of the inputs of products, against NumPy, through every kind of product, call and loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from tests.ptq.tables import case, some_of

further = Further()


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mean_of(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return x.T @ x / len(x)


def only(fun: Any, params: Any, *batches: Any) -> Any:
    (found,) = jc.ptq.statistics(fun, params, batches).values()
    return found


@pytest.mark.smoke
def test_means_are_over_rows_and_not_over_batches() -> None:
    x, y = normal(3, 5), normal(40, 5, seed=1)
    found = only(lambda p, x: x @ p["w"], {"w": normal(5, 2)}, x, y)
    both = np.concatenate([x, y])
    np.testing.assert_allclose(found.gram[0], mean_of(both), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.mean_abs[0], np.abs(both).mean(0), rtol=1e-6)
    np.testing.assert_array_equal(found.max_abs[0], np.abs(both).max(0))
    assert found.count.tolist() == [43]


@further
@pytest.mark.parametrize("rows", [120_000, pytest.param(300_000, marks=pytest.mark.slow)])
def many_rows_are_summed_with_compensation(rows: int) -> None:
    x = normal(rows, 2) + 8
    found = only(lambda p, x: x @ p, normal(2, 2), x)
    np.testing.assert_allclose(found.gram[0], mean_of(x), rtol=2e-7)
    batches = only(lambda p, x: x @ p, normal(2, 2), *np.split(np.asarray(x), rows // 3000))
    np.testing.assert_allclose(batches.gram[0], mean_of(x), rtol=2e-7)


PRODUCTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "weight on the left": (lambda p, x: p @ x.T, (4, 6)),
    "several axes": (lambda p, x: jnp.einsum("tij,ijk->tk", x.reshape(-1, 2, 3), p), (2, 3, 4)),
    "transposed before": (lambda p, x: x @ p.T.astype(jnp.bfloat16).astype(jnp.float32), (4, 6)),
    "weight without the batch": (lambda p, x: jnp.einsum("btk,kn->bnt", x.reshape(5, -1, 6), p), (6, 2)),
    "jit": (lambda p, x: jax.jit(lambda p, x: x @ p)(p, x), (6, 2)),
    "remat": (lambda p, x: jax.checkpoint(lambda p, x: jnp.tanh(x @ p))(p, x), (6, 2)),
    "vmap": (lambda p, x: jax.vmap(lambda row: row @ p)(x), (6, 2)),
    "branch": (lambda p, x: lax.cond(x[0, 0] < 9, lambda: x @ p, lambda: x[:, :2]), (6, 2)),
    "branch without": (lambda p, x: lax.cond(x[0, 0] > 9, lambda: x @ p, lambda: x[:, :2]), (6, 2)),
}


def check_every_way_to_multiply(name: str) -> None:
    fun, shape = PRODUCTS[name]
    x = normal(10, 6)
    found = only(fun, normal(*shape), x)
    if name == "branch without":
        assert found.count.tolist() == [0] and not found.gram.any()
    else:
        assert found.count.tolist() == [10]
        np.testing.assert_allclose(found.gram[0], mean_of(x), rtol=1e-5, atol=1e-6)


@some_of(PRODUCTS, 2, 3)
def test_every_way_to_multiply(names: list[str]) -> None:
    for name in names:
        with case(name):
            check_every_way_to_multiply(name)


def test_convolutions_have_patches() -> None:
    x, w = normal(2, 7, 6, 3), normal(3, 2, 3, 4)
    numbers = ("NHWC", "HWIO", "NHWC")

    def fun(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p, (2, 1), ((1, 0), (2, 1)), rhs_dilation=(1, 2), dimension_numbers=numbers)

    found, out = only(fun, w, x), np.asarray(fun(w, x))
    matrix = np.asarray(w).reshape(-1, 4)
    assert float(found.count[0]) == out.size / 4
    gram = np.einsum("ki,kl,lj->ij", matrix, np.asarray(found.gram[0]), matrix)
    np.testing.assert_allclose(gram, mean_of(out), rtol=1e-4, atol=1e-4)


def test_groups_of_rows_and_experts_have_their_own() -> None:
    x, w = normal(7, 3), normal(3, 3, 2)
    sizes = jnp.array([4, 0, 2])
    found = only(lambda p, x: lax.ragged_dot(x, p, sizes), w, x)
    assert found.count.tolist() == [4, 0, 2]
    np.testing.assert_allclose(found.gram[0], mean_of(x[:4]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.gram[2], mean_of(x[4:6]), rtol=1e-5, atol=1e-6)
    assert not found.gram[1].any()
    alike = only(lambda p, x: lax.ragged_dot(x, jnp.stack([p] * 3), sizes), w[0], x)
    assert alike.count.tolist() == [6]
    np.testing.assert_allclose(alike.gram[0], mean_of(x[:6]), rtol=1e-5, atol=1e-6)
    each = only(lambda p, x: jnp.einsum("etk,ekn->tne", x.reshape(3, 2, 3), p), w, x[:6])
    for expert in range(3):
        np.testing.assert_allclose(each.gram[expert], mean_of(x[2 * expert : 2 * expert + 2]), rtol=1e-5, atol=1e-6)


@further
def parts_that_an_index_chooses_have_one_together() -> None:
    x = np.random.default_rng(7).standard_normal((24, 32)).astype(np.float32)
    experts = {"w": jax.random.normal(jax.random.key(0), (4, 32, 8))}

    def chosen(p: Any, x: Any) -> Any:
        return jax.vmap(lambda token, i: token @ p["w"][i])(x, jnp.argmax(x[:, :4], -1))

    gram = jc.ptq.statistics(chosen, experts, [x])["w"].gram
    np.testing.assert_allclose(gram, (x.T @ x / 24)[None], rtol=1e-4, atol=1e-6)
    _, report = jc.quantize_fn(chosen, jc.Rule(weight="int4(group=32)")).pack(
        experts, batches=[x], steps=[], return_report=True
    )
    assert {row.note for row in report.weights} == {"one statistic for the whole stack"}


def by_index(p: Any, x: Any) -> Any:
    """Of two axes of a stack; one layer twice, also within a loop, and one never."""
    h = jnp.tanh(x @ p[1:][0, 1].T)
    h = jax.jit(lambda h: jnp.tanh(h @ p[0][-1].T))(h)
    return lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p[1, 1].T), h) @ p[0, 0].T


@further
def each_constant_index_has_its_own() -> None:
    stack, x = normal(2, 2, 4, 4), normal(9, 4, seed=1)
    found = only(by_index, stack, x)
    w, h = np.asarray(stack, np.float64).swapaxes(2, 3), [np.asarray(x, np.float64)]
    for place in ((1, 1), (0, 1), (1, 1), (1, 1)):
        h.append(np.tanh(h[-1] @ w[place]))
    assert found.count.tolist() == [[[9], [9]], [[0], [27]]]
    np.testing.assert_allclose(found.gram[1, 1, 0], mean_of(np.stack([h[0], h[2], h[3]])), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.gram[0, 1, 0], mean_of(h[1]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.gram[0, 0, 0], mean_of(h[4]), rtol=1e-5, atol=1e-6)


#: Stacks of which some layer is not taken by a constant, or whose layers are moved before.
POOLED: dict[str, Any] = {
    "another order": lambda p, x: x @ jnp.stack([p[1], p[0]])[0],
    "zeros in front": lambda p, x: x @ jnp.pad(p, ((1, 0), (0, 0), (0, 0)))[1],
    "joined": lambda p, x: x @ jnp.concatenate([p[1:], p])[1],
    "data choose one": lambda p, x: (x @ p[0]) @ p[jnp.argmax(x[0, :3])],
    "strides": lambda p, x: x @ p[::2][1],
    "a counter": lambda p, x: lax.fori_loop(0, 3, lambda i, h: h @ p[i], x),
}


def check_other_indexes_have_one_together(name: str) -> None:
    assert only(POOLED[name], normal(3, 4, 4), normal(9, 4, seed=1)).gram.shape == (1, 4, 4)


@some_of(POOLED, 1, 3)
def test_other_indexes_have_one_together(names: list[str]) -> None:
    for name in names:
        with case(name):
            check_other_indexes_have_one_together(name)


@pytest.mark.parametrize(
    "groups, rows", [(4, 8), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((2, 6), (4, 4)))]
)
def test_groups_of_a_convolution_have_patches_of_their_own(groups: int, rows: int) -> None:
    w, x = normal(rows, 4 // groups, 2, 3), normal(2, 5, 6, 4, seed=1)
    numbers = ("NHWC", "OIHW", "NHWC")

    def fun(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(
            x, p, (2, 1), "VALID", rhs_dilation=(1, 2), dimension_numbers=numbers, feature_group_count=groups
        )

    found = only(fun, w, x)
    v = np.asarray(x, np.float64).reshape(2, 5, 6, groups, -1)
    places = [(i, j) for i in (0, 2) for j in (0, 1)]
    patches = np.stack([v[:, i : i + 2, j : j + 5 : 2] for i, j in places], 1)  # (image, place, 2, 3, group, channel)
    patches = patches.transpose(4, 0, 1, 2, 3, 5).reshape(groups, 8, -1)
    np.testing.assert_allclose(found.gram, [mean_of(own) for own in patches], rtol=1e-5, atol=1e-6)
    assert found.count.tolist() == [8] * groups


def test_a_kernel_that_all_groups_share_has_one_matrix() -> None:
    w, x = normal(2, 2, 1, 1), normal(3, 5, 5, 4, seed=1)
    numbers = ("NHWC", "HWIO", "NHWC")

    def fun(p: Any, x: Any) -> Any:
        kernel = jnp.broadcast_to(p, (2, 2, 1, 4))
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)

    found = only(fun, w, x)
    padded = np.pad(np.asarray(x), [(0, 0), (0, 1), (0, 1), (0, 0)])
    patches = [padded[:, i : i + 5, j : j + 5] for i in (0, 1) for j in (0, 1)]
    np.testing.assert_allclose(found.gram[0], mean_of(np.stack(patches, -1)), rtol=1e-5, atol=1e-6)
    assert found.count.tolist() == [300]


@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_turn_over_a_stack_has_its_own(reverse: bool) -> None:
    layers, x = normal(3, 4, 4), normal(9, 4, seed=1)

    def fun(p: Any, x: Any) -> Any:
        return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p, reverse=reverse)[0]

    found, h = only(fun, layers, x), x
    for turn in (2, 1, 0) if reverse else (0, 1, 2):
        np.testing.assert_allclose(found.gram[turn, 0], mean_of(h), rtol=1e-5, atol=1e-6)
        h = jnp.tanh(h @ layers[turn])


def test_a_weight_that_all_turns_share_has_one() -> None:
    w, x = normal(4, 4), normal(9, 4, seed=1)
    found = only(lambda p, x: lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p), x), w, x)
    inputs = [x]
    for _ in range(2):
        inputs.append(jnp.tanh(inputs[-1] @ w))
    np.testing.assert_allclose(found.gram[0], mean_of(jnp.concatenate(inputs)), rtol=1e-5, atol=1e-6)
    assert found.count.tolist() == [27]


def embedded(p: Any, x: Any) -> Any:
    """A time embedding whose only parameter is `t`; the counter is carried, beside what depends on parameters."""

    def step(i: Any, h: Any) -> Any:
        return jnp.tanh(h @ p["w"] + jax.jit(jnp.cos)(i * jnp.arange(1.0, 6.0)) @ p["t"])

    return lax.fori_loop(0, 3, step, x)


@further
def inputs_that_are_no_data_are_looked_at() -> None:
    params, x = {"t": normal(5, 4), "w": normal(4, 4, seed=1)}, normal(9, 4, seed=2)
    found = jc.ptq.statistics(embedded, params, [x, x])
    rows = np.cos(np.arange(3)[:, None] * np.arange(1.0, 6.0))
    assert not found.left_out and found["t"].count.tolist() == [6] and found["w"].count.tolist() == [54]
    np.testing.assert_allclose(found["t"].gram[0], mean_of(rows), rtol=1e-5, atol=1e-6)
    one = only(lambda p, x: jnp.eye(3, 5) @ p + x, normal(5, 4), normal(3, 4))
    np.testing.assert_allclose(one.gram[0], mean_of(np.eye(3, 5)), rtol=1e-6)


#: Both operands of the product of p["w"] come from parameters.
OF_PARAMETERS: dict[str, Any] = {
    "another": lambda p, x: x @ (p["a"] @ p["w"]),
    "a product of others": lambda p, x: x + jnp.cos(p["a"] @ p["b"]) @ p["w"],
    "within jit": lambda p, x: x + jax.jit(lambda a, w: (a @ p["b"]) @ w)(p["a"], p["w"]),
    "carried": lambda p, x: x + lax.fori_loop(0, 2, lambda i, h: (h @ p["a"]) @ p["w"], jnp.eye(4)),
    "a branch": lambda p, x: x + lax.cond(p["a"][0, 0] > 0, lambda: jnp.eye(4), lambda: jnp.ones((4, 4))) @ p["w"],
}


def test_products_of_parameters_alone_are_left_out() -> None:
    params = {key: normal(4, 4, seed=i) for i, key in enumerate("abw")}
    for name, fun in OF_PARAMETERS.items():
        found = jc.ptq.statistics(fun, params, [normal(4, 4)])
        assert "w" not in found and found.left_out["w"] == "a product of parameters alone", name


def through(x: Any, stack: Any) -> Any:
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]


LEFT_OUT: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "the last layers": (lambda p, x: through(x, p[1:]), (4, 6, 6), "a part of the stack"),
    "two loops": (lambda p, x: through(through(x, p[:2]), p[2:]), (4, 6, 6), "a part of the stack"),
    "another order": (lambda p, x: through(x, jnp.roll(p, 1, 0)), (4, 6, 6), "a part of the stack"),
    "twice": (lambda p, x: through(x, jnp.concatenate([p, p])), (4, 6, 6), "over several stacks"),
    "computed": (lambda p, x: x @ (2 * p), (6, 2), "computed with before the product"),
    "reversed": (lambda p, x: x @ p[::-1], (6, 2), "computed with before the product"),
    "part": (lambda p, x: x[:, :3] @ p[:3], (6, 2), "takes a part of an axis"),
    "while": (
        lambda p, x: lax.while_loop(lambda s: s[1] < x[0, 0], lambda s: (s[0] @ p, s[1] + 1.0), (x, 0.0))[0],
        (6, 6),
        "within while",
    ),
}


@further.first
def others_are_left_out_with_the_reason() -> None:
    for name, (fun, shape, reason) in LEFT_OUT.items():
        found = jc.ptq.statistics(lambda p, x, fun=fun: fun(p["w"], x), {"w": normal(*shape)}, [normal(10, 6)])
        assert not found and reason in found.left_out["w"] and reason in str(found), name


def test_bad_data_are_errors() -> None:
    w, x = {"w": normal(6, 2)}, normal(10, 6)
    dense = lambda p, x: x @ p["w"]  # noqa: E731
    with pytest.raises(ValueError, match="batches has no batch"):
        jc.ptq.statistics(dense, w, [])
    with pytest.raises(ValueError, match=r"parameter 'w' at .* an input with NaN"):
        jc.ptq.statistics(dense, w, [x, x.at[3, 2].set(jnp.nan)])
    with pytest.raises(TypeError, match="batches=3 must be an iterable"):
        jc.ptq.statistics(dense, w, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fun=4 must be a function"):
        jc.ptq.statistics(4, w, [x])  # type: ignore[arg-type]


def test_progress_and_generators() -> None:
    seen: list[int] = []
    batches = (normal(n, 6) for n in (3, 4))
    found = jc.ptq.statistics(lambda p, x: x @ p, normal(6, 2), batches, progress=seen.append)
    assert seen == [1, 2] and found[""].count.tolist() == [7]


def test_one_token_is_an_input() -> None:
    """Rows of a table that one index chooses, as those that several choose."""

    def fun(p: Any, token: Any) -> Any:
        return p["table"][token] @ p["w"]

    params = {"table": jnp.eye(5, 4) + 1, "w": jnp.ones((4, 2))}
    one, several = only(fun, params, *map(jnp.int32, range(5))), only(fun, params, jnp.arange(5))
    np.testing.assert_allclose(one.gram[0], mean_of(params["table"]), rtol=1e-6)
    np.testing.assert_allclose(one.gram[0], several.gram[0], rtol=1e-6)
    assert one.count.tolist() == several.count.tolist() == [5]


test_further = further.test()
