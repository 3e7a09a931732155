"""Ways from a parameter to a product, each in a few lines: what people do with an array before they multiply it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zoo.case import floats, tokens
from zoo.dict_models import dict_case, shapes

WIDTH, HIDDEN = 32, 64
IMAGE = ("NHWC", "HWIO", "NHWC")


def layouts(params: Any, x: Any) -> Any:
    """Transposed, with swapped axes, reshaped, cast, broadcast."""
    x = jnp.tanh(x @ params["rows"].T)
    x = jnp.tanh(jnp.matmul(x, jnp.swapaxes(params["swapped"], 0, 1)))
    x = jnp.tanh(x @ params["heads"].reshape(WIDTH, -1))
    x = jnp.tanh((x.astype(jnp.bfloat16) @ params["cast"].astype(jnp.bfloat16)).astype(jnp.float32))
    many = jnp.broadcast_to(params["shared"][None], (x.shape[0], WIDTH, HIDDEN))
    return jnp.einsum("bd,bdf->bf", x, many)


def pieces(params: Any, x: Any) -> Any:
    """One layer of a stack, three weights joined to one, one weight split in three, a slice, a padded weight."""
    for number in range(2):
        x = jnp.tanh(x @ params["stack"][number])
    fused = jnp.concatenate([params["wq"], params["wk"], params["wv"]], axis=1)
    q, k, v = jnp.split(x @ fused, 3, axis=-1)
    a, b, c = jnp.split(params["three"], 3, axis=1)
    y = q @ a + k @ b + v @ c
    y = y @ params["wide"][:, :WIDTH]
    return y @ jnp.pad(params["short"], ((0, 0), (0, 8)))


def changed(params: Any, x: Any) -> Any:
    """A mask, a norm of each column, a scale from the largest singular value, the mean of two."""
    x = jnp.tanh(x @ jnp.where(jnp.tri(WIDTH, dtype=bool), params["masked"], 0))
    v = params["direction"]
    x = jnp.tanh(x @ (params["magnitude"] * v / jnp.linalg.norm(v, axis=0)))
    w, u = params["spectral"], jnp.ones(WIDTH)
    u = lax.stop_gradient(lax.fori_loop(0, 3, lambda _, u: normal(w @ normal(u @ w)), u))
    x = jnp.tanh(x @ (w / (u @ w @ normal(u @ w))))
    return x @ (0.5 * (params["one"] + params["other"]))


def normal(v: Any) -> Any:
    return v / jnp.sqrt(jnp.sum(v * v) + 1e-6)


def branches(params: Any, x: Any) -> Any:
    """A choice between weights by data, a layer by its number in a loop; both signs, so that both are chosen."""

    def run(x: Any) -> Any:
        positive = jnp.sum(x) > 0
        x = lax.cond(positive, lambda x: x @ params["yes"], lambda x: x @ params["no"], x)
        x = x @ lax.select(positive, params["this"], params["that"])
        x = lax.switch(jnp.argmax(x[0, :3]), [lambda x, n=n: jnp.tanh(x @ params["stack"][n]) for n in range(3)], x)
        return lax.fori_loop(0, 3, lambda n, x: jnp.tanh(x @ params["stack"][n]), x)

    return run(x), run(-x)


def power_iteration(params: Any, x: Any) -> Any:
    """The largest singular value of a weight after x, until it stands; no gradient passes the loop."""
    w = lax.stop_gradient(params["w"])

    def step(state: Any) -> Any:
        v, _, size, number = state
        v = w.T @ (w @ v)
        return v / jnp.linalg.norm(v), size, jnp.linalg.norm(v), number + 1

    start = (jnp.ones(HIDDEN) / HIDDEN**0.5, jnp.float32(0), jnp.float32(1), 0)
    more = lambda state: (jnp.abs(state[2] - state[1]) > 1e-3) & (state[3] < 20)  # noqa: E731
    return (x @ params["w"]) / jnp.sqrt(lax.while_loop(more, step, start)[2])


def products(params: Any, x: Any, y: Any) -> Any:
    """The products of `jax.numpy` beside matmul: vectors, a tensor over two axes, a form, vmap over rows."""
    score = jnp.dot(x, params["vector"]) + jnp.vdot(params["vector"], x[0]) + jnp.inner(x, params["inner"])[:, 0]
    cube = jnp.tensordot(x.reshape(-1, 4, 8), params["cube"], axes=((1, 2), (0, 1)))
    form = jnp.einsum("bi,ij,bj->b", x, params["form"], y) + jnp.diag(x @ params["form"] @ y.T)
    rows = jax.vmap(lambda row: jnp.matmul(params["columns"], row))(x)
    outer = jnp.einsum("bi,oij,bj->bo", x, params["bilinear"], y)
    kron = jnp.einsum("bpq,pi,qj->bij", x.reshape(-1, 4, 8), params["left"], params["right"])
    return score + form, cube, rows, outer, kron


def convolutions(params: Any, x: Any) -> Any:
    """Groups, one filter per channel, a standardized weight, dilation, the transpose, a convolution by jnp."""
    kernel = params["standard"]
    kernel = (kernel - kernel.mean((0, 1, 2))) / jnp.sqrt(kernel.var((0, 1, 2)) + 1e-5)
    x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=IMAGE))
    depthwise = {"dimension_numbers": IMAGE, "feature_group_count": WIDTH}
    x = lax.conv_general_dilated(x, params["depthwise"], (1, 1), "SAME", **depthwise)
    grouped = {"dimension_numbers": IMAGE, "feature_group_count": 4, "rhs_dilation": (2, 2)}
    x = jax.nn.relu(lax.conv_general_dilated(x, params["grouped"], (1, 1), "SAME", **grouped))
    x = lax.conv_transpose(x, params["transposed"], (2, 2), "SAME", dimension_numbers=IMAGE)
    first = jnp.moveaxis(x, -1, 1)  # the layout of other frameworks: NCHW and OIHW
    first = lax.conv(first, params["first"], (2, 2), "SAME")
    return jax.vmap(lambda row: jnp.convolve(row, params["signal"], mode="same"))(first.reshape(-1, 16))


def attention(params: Any, x: Any) -> Any:
    """Queries that are a parameter, and a memory of keys that are also the values."""
    k, v = jnp.split((x @ params["kv"]).reshape(*x.shape[:2], 2, WIDTH), 2, axis=-1)
    latent = jnp.broadcast_to(params["latent"].reshape(1, 4, 2, 16), (x.shape[0], 4, 2, 16))
    y = jax.nn.dot_product_attention(latent, k, v)
    return jax.nn.softmax(y.reshape(x.shape[0], 4, WIDTH) @ params["memory"].T, axis=-1) @ params["memory"]


def rows(params: Any, ids: Any, x: Any) -> Any:
    """Tables read by rows: take, one-hot, segments, an index from a nearest neighbour."""
    summed = jax.ops.segment_sum(jnp.take(params["table"], ids, axis=0), jnp.arange(ids.size) // 2, num_segments=4)
    hot = jax.nn.one_hot(ids[:4], HIDDEN) @ params["hot"]
    distance = jnp.sum(x**2, 1, keepdims=True) - 2 * x @ params["book"].T + jnp.sum(params["book"] ** 2, 1)
    nearest = params["book"][jnp.argmin(distance, axis=1)]
    return summed + hot + x + nearest


SQUARE, UP = (WIDTH, WIDTH), (WIDTH, HIDDEN)


def inputs() -> tuple[Any, ...]:
    return (floats(4, WIDTH),)


CASES = [
    dict_case(
        "odd_layouts",
        layouts,
        shapes(rows=(HIDDEN, WIDTH), swapped=UP, heads=(WIDTH, 2, 16), cast=SQUARE, shared=UP),
        inputs,
    ),
    dict_case(
        "odd_pieces",
        pieces,
        shapes(
            stack=(2, *SQUARE), wq=SQUARE, wk=SQUARE, wv=SQUARE, three=(WIDTH, 3 * WIDTH), wide=UP, short=(WIDTH, 24)
        ),
        inputs,
    ),
    dict_case(
        "odd_changed",
        changed,
        shapes(masked=SQUARE, direction=SQUARE, magnitude=(WIDTH,), spectral=SQUARE, one=SQUARE, other=SQUARE),
        inputs,
        ("magnitude",),
        derived=("masked", "direction", "spectral", "one", "other"),
    ),
    dict_case(
        "odd_branches", branches, shapes(yes=SQUARE, no=SQUARE, this=SQUARE, that=SQUARE, stack=(3, *SQUARE)), inputs
    ),
    dict_case("odd_power_iteration", power_iteration, shapes(w=UP), inputs),
    dict_case(
        "odd_products",
        products,
        shapes(
            vector=(WIDTH,),
            inner=(5, WIDTH),
            cube=(4, 8, 16),
            form=SQUARE,
            columns=(HIDDEN, WIDTH),
            bilinear=(3, *SQUARE),
            left=(4, 8),
            right=(8, 4),
        ),
        lambda: (floats(4, WIDTH), floats(4, WIDTH, seed=2)),
    ),
    dict_case(
        "odd_convolutions",
        convolutions,
        shapes(
            standard=(3, 3, 3, WIDTH),
            depthwise=(3, 3, 1, WIDTH),
            grouped=(3, 3, 8, WIDTH),
            transposed=(2, 2, WIDTH, 16),
            first=(WIDTH, 16, 2, 2),
            signal=(5,),
        ),
        lambda: (floats(2, 8, 8, 3),),
        derived=("standard",),
    ),
    dict_case(
        "odd_attention", attention, shapes(kv=UP, latent=(4, WIDTH), memory=(16, WIDTH)), lambda: (floats(2, 8, WIDTH),)
    ),
    dict_case(
        "odd_rows",
        rows,
        shapes(table=(HIDDEN, WIDTH), hot=(HIDDEN, WIDTH), book=(16, WIDTH)),
        lambda: (tokens(8), floats(4, WIDTH)),
    ),
]
