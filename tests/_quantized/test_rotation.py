"""Rotations of the operands of products, against matrices in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc

further = Further()

#: Of NVIDIA's Transformer Engine, for its NVFP4 recipe.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def sylvester(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@further.first
def the_matrix_is_orthogonal_and_exact() -> None:
    for size in (4, 16, 64, 256):
        rotation = jc.Hadamard(size)
        np.testing.assert_array_equal(rotation.matrix @ rotation.matrix.T, np.eye(size))
        np.testing.assert_array_equal(rotation.matrix, sylvester(size) * rotation.signs / np.sqrt(size))
    assert jc.Hadamard().signs == SIGNS == tuple(jc.Hadamard(64).signs or ())[16:32]


def turned(x: np.ndarray, rotation: jc.Hadamard) -> np.ndarray:
    """The last axis times the matrix, by blocks; what is left over stays."""
    out, size = np.array(x), len(rotation.matrix)
    for start in range(0, x.shape[-1] // size * size, size):
        out[..., start : start + size] = x[..., start : start + size] @ rotation.matrix.T
    return out


def test_blocks_are_turned_and_the_rest_stays() -> None:
    rotation = jc.Hadamard(4, signs=(1, -1, -1, 1))
    whole = np.random.default_rng(0).integers(-8, 9, (3, 2, 11)).astype(np.float32)  # exact in any order
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(rotation.rotate)(jnp.asarray(whole, dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), turned(whole, rotation))
    for shape in ((3,), (2, 0), (0, 4)):
        assert rotation.rotate(jnp.ones(shape)).shape == shape


def test_signs_that_are_drawn() -> None:
    """The matrix has other signs for another key; they are the same for both operands of a product, so sums stay."""
    rotation, keys = jc.Hadamard(32, "random", products="both"), jax.random.split(jax.random.key(0), 64)
    rows = np.asarray(jax.vmap(lambda key: rotation.rotate(jnp.eye(32), key))(keys)) * np.sqrt(32)
    signs = rows[:, :, 0]  # the first row of Sylvester's matrix is ones
    np.testing.assert_allclose(rows, signs[:, :, None] * sylvester(32), atol=1e-5)
    assert len({tuple(row) for row in np.rint(signs).tolist()}) == 64 and abs(signs.mean()) < 0.1
    w, x, g = (
        jnp.asarray(normal(*shape, seed=i), jnp.float32) for i, shape in enumerate(((40, 32), (64, 40), (64, 32)))
    )
    rule = jc.Rule(weight="binary32", gradient="binary32", input_gradient="binary32", rotation=rotation)
    _, dw, dx = pulled(rule, w, x, g, keys[0])
    np.testing.assert_allclose(dx, g @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ g, atol=1e-4)
    assert (pulled(rule, w, x, g, keys[1])[2] != dx).any() and str(
        rotation
    ) == "Hadamard(32, signs='random', products='both')"
    with pytest.raises(ValueError, match="signs='random' with products='forward'"):
        jc.Hadamard(32, "random", products="forward")
    for wrong, key in ((rotation, None), (jc.Hadamard(32), keys[0])):
        with pytest.raises(ValueError, match="pass a key if signs='random', and only then"):
            wrong.rotate(x, key)
    with pytest.raises(ValueError, match="has another matrix in each product"):
        print(jc.Hadamard("all", "random").matrix)


def pulled(rule: jc.Rule, w: Any, x: Any, g: Any, key: Any = None) -> Any:
    low = jc.quantize_fn(lambda w, x: x @ w, rule)
    y, back = jax.vjp(lambda w, x: low(w, x, key=key), w, x)
    return jax.tree.map(np.asarray, (y, *back(g)))


@pytest.mark.usefixtures("x64")
def test_without_rounding_dw_is_that_of_the_product() -> None:
    """A gradient in float64: the rotation is in dw alone, and leaves its sum."""
    w, x, g = (jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(((5, 3), (2, 19, 5), (2, 19, 3))))
    plain = jc.Rule(weight="e4m3", gradient="binary64")
    y, dw, dx = pulled(plain, w, x, g)
    turned_y, turned_dw, turned_dx = pulled(
        jc.Rule(weight="e4m3", gradient="binary64", rotation=jc.Hadamard()), w, x, g
    )
    np.testing.assert_array_equal(y, turned_y)
    np.testing.assert_array_equal(dx, turned_dx)
    np.testing.assert_allclose(turned_dw, dw, rtol=0, atol=1e-14)
    assert (turned_dw != dw).any()  # the terms are others


@further
@pytest.mark.parametrize("product", ["float", pytest.param("codes", marks=pytest.mark.slow)])
def operands_are_rounded_after_they_are_turned(product: Any) -> None:
    """Of whole numbers, whose sums are exact, against the definition with matrices."""
    rng, rotation = np.random.default_rng(2), jc.Hadamard(4, products="both")
    w, x, g = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((6, 8), (10, 6), (10, 8)))
    spec = "int4(group=4,scale=e8m0fnu,rule=rceil)"
    rule = jc.Rule(weight=spec, activation=spec, gradient=spec, rotation=rotation, product=product)
    y, dw, dx = pulled(rule, jnp.asarray(w), jnp.asarray(x), jnp.asarray(g))

    def rounded(a: np.ndarray) -> np.ndarray:
        return np.asarray(jc.round_to_format(a.astype(np.float32), spec), np.float64)

    def both(a: np.ndarray) -> np.ndarray:
        return rounded(turned(a, rotation))

    np.testing.assert_array_equal(y, rounded(x) @ rounded(w.T).T)
    np.testing.assert_array_equal(dx, both(g) @ both(w).T)
    np.testing.assert_array_equal(dw, both(x.T) @ both(g.T).T)
    one = jc.Rule(weight=spec, activation=spec, gradient=spec, rotation=jc.Hadamard(4), product=product)
    _, dw_alone, dx_alone = pulled(one, jnp.asarray(w), jnp.asarray(x), jnp.asarray(g))
    np.testing.assert_array_equal(dw_alone, dw)
    np.testing.assert_array_equal(dx_alone, rounded(g) @ rounded(w).T)


@further
@pytest.mark.parametrize("bits", [12, pytest.param(16, marks=pytest.mark.slow)])
def nvfp4_gradients_are_right_on_average(bits: int) -> None:
    """2^12 or 2^16 draws of dw under the recipe, in which g alone is rounded.

    The scales of its blocks are exact here. Elsewhere a scale that is rounded down clips the largest number of a block.
    """
    rule = jc.nn.recipe("nvfp4", activation=None)
    w, x = (jnp.asarray(normal(*shape, seed=i), jnp.float32) for i, shape in enumerate(((4, 8), (16, 4))))
    blocks = normal(8, 16, seed=2)  # of the rotated gradient, each with a power of two as its largest magnitude
    blocks *= 2.0 ** (np.arange(8) % 3)[:, None] / np.abs(blocks).max(1, keepdims=True)
    g = jnp.asarray((blocks @ jc.Hadamard().matrix).T, jnp.float32)
    low = jc.quantize_fn(lambda w, x: x @ w, rule)

    def run(key: Any) -> Any:
        return jax.vjp(lambda w: low(w, x, key=key), w)[1](g)[0]

    draws = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 2**bits)), np.float64)
    error = draws.std(0) / 2 ** (bits / 2)
    assert (error > 0).all()
    off = np.abs(draws.mean(0) - np.asarray(x, np.float64).T @ np.asarray(g, np.float64)) / error
    assert off.max() < 4.5 and np.sqrt((off**2).mean()) < 1.5  # of 32 means


def test_refused() -> None:
    for arguments, message in (
        ({"size": 52}, "size=52 must be 'all', a power of two, or"),
        ({"size": "some"}, "size='some' must be"),
        ({"size": "all", "signs": (1, 1)}, "another number in each product"),
        ({"size": 4, "signs": (1, 1, 1)}, r"signs=\(1, 1, 1\) must be 4 numbers"),
        ({"products": "backward"}, "products='backward'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jc.Hadamard(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has another matrix in each product"):
        _ = jc.Hadamard("all").matrix
    with pytest.raises(ValueError, match="needs a weight= or an activation="):
        jc.Rule(gradient="e5m2", rotation=FORWARD)
    turn = jc.Hadamard()
    with pytest.raises(TypeError, match=r"rotation=16 must be a jchop\.Hadamard"):
        jc.Rule(weight="e4m3", gradient="e5m2", rotation=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rotation=Hadamard\(16\) needs a gradient="):
        jc.Rule(weight="e4m3", rotation=turn)
    with pytest.raises(ValueError, match="needs a gradient="):
        jc.Rule(weight_gradient="e4m3", rotation=jc.Hadamard(products="both"))
    with pytest.raises(ValueError, match="rounded once"):
        jc.Rule(activation="int8", gradient="int8", scale_from=jc.MovingAverage(0.5), rotation=turn)
    rule = jc.Rule(weight="e4m3", gradient="e5m2", rotation=turn)
    conv = jc.quantize_fn(lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"), rule)
    with pytest.raises(NotImplementedError, match=r"rotation=Hadamard\(16\).*operation='conv'"):
        conv(jnp.ones((2, 1, 3, 3)), jnp.ones((1, 1, 4, 4)))


# -- forward products --------------------------------------------------------------------------------------------------

FORWARD = jc.Hadamard("all", products="forward")


def test_other_sizes() -> None:
    """The definition of Hadamard matrices, and the product with one."""
    for size in (2, 12, 96):
        rotation = jc.Hadamard(size)
        np.testing.assert_allclose(rotation.matrix @ rotation.matrix.T, np.eye(size), atol=1e-14)
        np.testing.assert_allclose(np.abs(rotation.matrix), size**-0.5, rtol=1e-14)
        x = normal(3, 2 * size + 1, seed=0).astype(np.float32)
        np.testing.assert_allclose(rotation.rotate(jnp.asarray(x)), turned(x, rotation), atol=1e-5)
        whole = jc.Hadamard("all").rotate(jnp.asarray(x[:, :size]))
        np.testing.assert_array_equal(whole, rotation.rotate(jnp.asarray(x[:, :size])))


def block(p: Any, x: Any) -> Any:
    """Scores of turned queries and keys, experts, a stack in a scan, and a product after relu."""
    q, k = (x @ p[name] for name in ("q", "k"))
    with jax.named_scope("scores"):
        scores = jax.nn.softmax(jnp.einsum("td,sd->ts", jnp.cos(q), jnp.sin(k)))
    experts = jax.lax.ragged_dot(scores @ x, p["experts"], jnp.array([3, 5]))
    turns = jax.lax.scan(lambda h, w: (jax.nn.relu(h) @ w, None), experts, p["stack"])[0]
    heads = jax.nn.relu(turns).reshape(8, 3, 4)
    return jnp.einsum("thd,hdn->tn", heads, p["heads"].transpose(1, 2, 0))


SHAPES = {"q": (12, 8), "k": (12, 8), "experts": (2, 12, 12), "stack": (2, 12, 12), "heads": (5, 3, 4)}


@further
@pytest.mark.usefixtures("x64")
def without_rounding_the_function_stays_what_it_is() -> None:
    params = {name: jnp.asarray(normal(*shape, seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}
    x = jnp.asarray(normal(8, 12, seed=9))
    wide: Any = {"weight": "binary64", "activation": "binary64"}
    rules = [jc.Rule("scores", activation="binary64", rotation=jc.Hadamard(4, products="forward"))]
    low = jc.quantize_fn(block, [*rules, jc.Rule(**wide, rotation=FORWARD)])
    alone = jc.quantize_fn(block, [*rules, jc.Rule(activation="binary64", rotation=FORWARD)])  # no weight is stored
    packed = low.pack(params, x)
    y, *found = jax.jit(lambda p, q: (block(p, x), low(p, x), low(q, x), alone(p, x)))(params, packed)
    for own in found:
        np.testing.assert_allclose(own, y, rtol=0, atol=1e-12)
    for name, axis in (("q", 0), ("experts", 1), ("stack", 1)):
        expected = np.moveaxis(np.moveaxis(np.asarray(params[name]), axis, -1) @ jc.Hadamard(12).matrix.T, -1, axis)
        np.testing.assert_allclose(jc.dequantize(packed[name]), expected, atol=1e-14)


@pytest.mark.parametrize("product", ["float", pytest.param("codes", marks=pytest.mark.slow)])
def test_forward_operands_are_rounded_after_they_are_turned(product: Any) -> None:
    """Of whole numbers, whose sums are exact, against the definition; derivatives are those of the rounded weight."""
    rng, rotation = np.random.default_rng(2), jc.Hadamard(4, products="forward")
    w, x, g = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((6, 8), (10, 6), (10, 8)))
    spec = "int4(group=4,scale=e8m0fnu,rule=rceil)"
    rule = jc.Rule(weight=spec, activation=spec, rotation=rotation, product=product)
    low = jc.quantize_fn(lambda w, x: x @ w, rule)
    y, dw, dx = pulled(rule, jnp.asarray(w), jnp.asarray(x), jnp.asarray(g))

    def both(a: np.ndarray) -> np.ndarray:
        return np.asarray(jc.round_to_format(turned(a, rotation).astype(np.float32), spec), np.float64)

    def back(a: np.ndarray) -> np.ndarray:  # the inverse
        out = a.copy()
        out[:, :4] = a[:, :4] @ rotation.matrix
        return out

    np.testing.assert_array_equal(y, both(x) @ both(w.T).T)
    np.testing.assert_array_equal(low(low.pack(jnp.asarray(w), jnp.asarray(x)), x), y)
    np.testing.assert_array_equal(dx, back(g @ both(w.T)))
    np.testing.assert_array_equal(dw, back(g.T @ both(x)).T)


def test_parameters_that_are_needed_as_they_are() -> None:
    """A weight that is stored rotated has no other uses, and all of its products rotate their inputs."""
    rule = jc.Rule(weight="int8(group=all)", rotation=FORWARD)
    table, x, index = jnp.ones((6, 8)), jnp.ones((3, 8)), jnp.array([1])
    refused: dict[str, tuple[Any, Any, Any]] = {
        "gather at .* takes it as it is": (lambda w, x: (x @ w.T, w[index]), rule, table),
        "dot_general at .* sums over other axes": (lambda w, x: x @ w.T @ w, rule, table),
        "computed with before dot_general": (lambda w, x: x @ (w.T * jnp.arange(8.0)[:, None]), rule, table),
        "put in another order": (lambda w, x: x @ jnp.roll(w, 4, 1).T, rule, table),
        "the function returns it": (lambda w, x: (x @ w.T, w), rule, table),
        "the inputs of dot_general .* not rotated in the same way": (
            lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1).T, rule,
            {"a": table[:, :4], "b": table[:, 4:]},
        ),
        "rotation=.* of the parameter 'a': the inputs": (
            lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 0).T, [jc.Rule("b", weight="int8(group=all)"), rule],
            {"a": table, "b": table},
        ),
        "dot_general at .* takes a part of an axis": (lambda w, x: x @ w.reshape(2, 8, 3)[1], rule, jnp.ones((16, 3))),
        "7 numbers, which is odd": (lambda w, x: x[:, :7] @ w, rule, jnp.ones((7, 2))),
    }  # fmt: skip
    for message, (fun, rules, params) in refused.items():
        with pytest.raises(ValueError, match=message):
            jc.quantize_fn(fun, rules).report(params, x)
    with pytest.raises(NotImplementedError, match=r"rotation=Hadamard\('all', products='forward'\).*convolution"):
        jc.quantize_fn(lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"), rule).report(
            jnp.ones((2, 1, 3, 3)), jnp.ones((1, 1, 4, 4))
        )


def test_layers_refuse_rotations_of_programs() -> None:
    from flax import nnx

    rule = jc.Rule(weight="int8(group=all)", rotation=FORWARD)
    with pytest.raises(NotImplementedError, match=r"Linear at .*quantize the program"):
        jc.nn.quantize(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), rule)


def test_linen_rotates_as_its_program() -> None:
    from flax import linen

    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((3, 16), (16, 4))))
    rule = jc.Rule(weight="int4(group=all)", rotation=FORWARD)
    module = jc.nn.quantize(linen.Dense(4), rule)
    y = module.apply({"params": {"kernel": w, "bias": jnp.zeros(4)}}, x)
    np.testing.assert_array_equal(y, jc.quantize_fn(lambda p, x: x @ p["kernel"], rule)({"kernel": w}, x))
    assert (y != x @ jc.round_to_format(w, "int4(group=all,axis=0)")).any()


test_further = further.test()
