"""Where factors of channels can be folded: functions stay what they are, in float64; and why not elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jchop._quantized.quantize_fn import QuantizedFunction
from jchop.ptq._data.sites import find_sites
from jchop.ptq._equalize.factor_rules import Channels, FoldError, reshape_runs
from jchop.ptq._equalize.graph import graph_of
from jchop.ptq._equalize.mapping import multiply_by_factors
from jchop.ptq._equalize.search import fold_of
from tests.ptq.tables import case, some_of

Shapes = dict[str, tuple[int, ...]]


def rms(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale + bias


def flax_norm(x: Any, scale: Any, bias: Any) -> Any:
    """As Flax has it: the scale is multiplied with the inverse deviation first."""
    mean = x.mean(-1, keepdims=True)
    factor = lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-6) * scale.reshape(1, -1)
    return (x - mean) * factor + bias.reshape(1, -1)


def heads(x: Any, w: Any, n: int) -> Any:
    return (x @ w).reshape(*x.shape[:2], n, -1)


def attention(repeated: bool, kv: int = 2, h: int = 4) -> Callable[..., Any]:
    def attend(p: Any, x: Any) -> Any:
        y = rms(x, p["norm"])
        q, k, v = heads(y, p["q"], h), heads(y, p["k"], kv), heads(y, p["v"], kv)
        if repeated:
            k, v = (jnp.repeat(u, h // kv, axis=2) for u in (k, v))
            o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        else:
            o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return x + o.reshape(*x.shape[:2], -1) @ p["o"]

    return attend


ATTENTION: Shapes = {"norm": (8,), "q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}
MLP: Shapes = {"scale": (8,), "gate": (8, 12), "up": (8, 12), "down": (12, 8)}


def gated(p: Any, x: Any) -> Any:
    y = rms(x, p["scale"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def relu_layer(p: Any, x: Any) -> Any:
    return jax.nn.relu(layer_norm(x, p["scale"], p["bias"]) @ p["a"] + p["b"]) @ p["c"]


def conv(x: Any, w: Any, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def by_data(p: Any, x: Any) -> Any:
    """A depthwise convolution with a kernel that is no parameter."""
    kernel = jnp.exp(x[:1, :2, :2, :1] + jnp.ones(4)).transpose(1, 2, 0, 3)
    return conv(conv(jax.nn.relu(conv(x, p["a"])), kernel, 4), p["c"])


def scanned(p: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(w: Any, h: Any) -> Any:
        return gated(w, attention(True)(w, h))

    return lax.scan(lambda h, w: (layer(w, h), None), x, p)[0]


def branches(p: Any, x: Any) -> Any:
    h = lax.cond(x[0, 0] > 0, lambda h: jax.nn.relu(h @ p["a"]), lambda h: jnp.abs(h @ p["b"]), x)
    return h @ p["c"]


def experts(p: Any, x: Any) -> Any:
    sizes = jnp.array([1, 3])
    return lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x, p["a"], sizes)), p["b"], sizes)


def tied_norm(p: Any, x: Any) -> Any:
    return rms(jax.nn.relu(rms(x, p["scale"]) @ p["a"]), p["scale"]) @ p["b"]


def halves(p: Any, x: Any) -> Any:
    up, gate = jnp.split(x @ p["a"], 2, -1)
    return (up * jax.nn.silu(gate)) @ p["w"]


def kernels_of_heads(p: Any, x: Any) -> Any:
    """Kernels with axes of heads, as those of Flax."""
    v = jnp.einsum("td,dhk->thk", x, p["v"]) + p["bias"]
    return jnp.einsum("thk,hkd->td", jnp.tanh(x @ x.T)[:, :, None, None].mean(1) * v, p["o"])


def sorted_rows(p: Any, x: Any) -> Any:
    """Rows of a product and of a table, taken and put in another order."""
    order = jnp.argsort(x[:, 0])
    h = (jax.nn.relu(x @ p["a"]) + p["t"][order])[order]
    return jnp.zeros((7, 6)).at[order].add(h) @ p["b"]


#: The function, the shapes of its parameters and of its argument, and for each weight the parameters that take factors.
FOLDED: dict[str, tuple[Callable[..., Any], Shapes, tuple[int, ...], dict[str, str]]] = {
    "RMSNorm, gated": (gated, MLP, (5, 8), {"gate": "gate scale up", "up": "gate scale up", "down": "down up"}),
    "LayerNorm, relu": (
        relu_layer, {"scale": (8,), "bias": (8,), "a": (8, 12), "b": (12,), "c": (12, 4)}, (5, 8),
        {"a": "a bias scale", "c": "a b c"},
    ),
    "Flax's LayerNorm": (
        lambda p, x: flax_norm(x, p["scale"], p["bias"]).astype(jnp.float64) @ p["a"],
        {"scale": (8,), "bias": (8,), "a": (8, 3)}, (5, 8), {"a": "a bias scale"},
    ),
    "attention": (attention(False, 4), {**ATTENTION, "k": (8, 8), "v": (8, 8)}, (2, 3, 8),
        {"q": "k norm q v", "o": "o v"}),
    "grouped queries": (attention(False), ATTENTION, (2, 3, 8), {"q": "k norm q v", "o": "o v"}),
    "heads that are repeated": (attention(True), ATTENTION, (2, 3, 8), {"v": "k norm q v", "o": "o v"}),
    "kernels of heads": (
        kernels_of_heads, {"v": (8, 2, 3), "bias": (2, 3), "o": (2, 3, 8)}, (5, 8), {"o": "bias o v"}
    ),
    "scan": (
        scanned, {name: (3, *shape) for name, shape in (ATTENTION | MLP).items()}, (2, 3, 8),
        {"k": "k norm q v", "o": "o v", "up": "gate scale up", "down": "down up"},
    ),
    "convolutions": (
        lambda p, x: conv(jax.nn.leaky_relu(conv(x, p["a"]) + p["b"]), p["c"]),
        {"a": (3, 3, 2, 5), "b": (5,), "c": (2, 2, 5, 3)}, (2, 4, 4, 2), {"c": "a b c"},
    ),
    "squares": (lambda p, x: jnp.square(jax.nn.relu(x @ p["a"])) @ p["b"], {"a": (8, 6), "b": (6, 3)}, (5, 8),
        {"b": "a b"}),
    "branches": (branches, {"a": (8, 6), "b": (8, 6), "c": (6, 3)}, (5, 8), {"c": "a b c"}),
    "experts": (experts, {"a": (2, 8, 6), "b": (2, 6, 3)}, (4, 8), {"b": "a b"}),
    "a depthwise convolution": (
        lambda p, x: conv(jax.nn.relu(conv(conv(x, p["a"]), p["d"], 4) + p["b"]), p["c"]),
        {"a": (3, 3, 2, 4), "d": (2, 2, 1, 4), "b": (4,), "c": (2, 2, 4, 3)}, (2, 6, 6, 2), {"c": "b c d"},
    ),
    "beside a depthwise convolution": (
        lambda p, x: conv(h := jax.nn.relu(conv(x, p["a"])), p["c"]) + conv(h, p["d"], 4).mean(-1, keepdims=True),
        {"a": (3, 3, 2, 4), "d": (2, 2, 1, 4), "c": (2, 2, 4, 3)}, (2, 6, 6, 2), {"c": "a c d"},
    ),
    "a depthwise convolution by data": (by_data, {"a": (3, 3, 2, 4), "c": (2, 2, 4, 3)}, (2, 6, 6, 2), {"c": "a c"}),
    "rows in another order": (sorted_rows, {"a": (8, 6), "t": (5, 6), "b": (6, 3)}, (5, 8), {"b": "a b t"}),
    "masks of experts": (
        lambda p, x: jnp.einsum(
            "etn,enk->tk", jnp.einsum("te,tn->etn", jax.nn.softmax(x[:, :2]), x * p["s"]), p["w"]
        ),
        {"s": (8,), "w": (2, 8, 3)}, (5, 8), {"w": "s w"},
    ),
    "tied alike": (tied_norm, {"scale": (8,), "a": (8, 8), "b": (8, 3)}, (5, 8), {"a": "a b scale", "b": "a b scale"}),
    "a mask": (
        lambda p, x: jnp.where(x[:, :1] > 0, -jnp.maximum(x @ p["a"], x @ p["b"]), 0) / 3 @ p["c"],
        {"a": (8, 6), "b": (8, 6), "c": (6, 3)}, (5, 8), {"c": "a b c"},
    ),
}  # fmt: skip


def graph(fun: Any, params: Any, x: Any) -> tuple[Any, Any]:
    program, _ = QuantizedFunction(fun, ()).traced(params, x)
    return program, graph_of(program, find_sites(program))


def check_the_function_stays_what_it_is(
    fun: Callable[..., Any], shapes: Shapes, shape: tuple[int, ...], expected: dict[str, str]
) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {key: jnp.asarray(rng.normal(size=n)) for key, n in shapes.items()}
        x = jnp.asarray(rng.normal(size=shape))
        program, found = graph(fun, params, x)
        run = jax.jit(fun)
        y = np.asarray(run(params, x))
        for path, folded in expected.items():
            place = next(place for place in found.places if program.paths[place.site.leaf] == path)
            fold = fold_of(place)
            labels = {program.paths[v.leaf]: label for v, label in fold.labels.items() if v.leaf is not None}
            assert sorted(labels) == folded.split()
            factors = rng.uniform(0.2, 5, size=fold.channels.count)
            mapped = params | {key: multiply_by_factors(params[key], label, factors) for key, label in labels.items()}
            assert all(np.abs(mapped[key] / params[key] - 1).max() > 0.1 for key in labels)
            np.testing.assert_allclose(run(mapped, x), y, rtol=1e-12, atol=1e-12 * np.abs(y).max())


@some_of(FOLDED, 5, 2)
def test_the_function_stays_what_it_is(names: list[str]) -> None:
    for name in names:
        with case(name):
            check_the_function_stays_what_it_is(*FOLDED[name])


REFUSED: dict[str, tuple[Callable[..., Any], Shapes, str, str]] = {
    "softmax": (lambda p, x: jax.nn.softmax(x @ p["a"]) @ p["w"], {"a": (8, 6), "w": (6, 3)}, "w", "reduce_sum"),
    "gelu": (lambda p, x: jax.nn.gelu(x @ p["a"]) @ p["w"], {"a": (8, 6), "w": (6, 3)}, "w", "disagree at integer_pow"),
    "silu": (lambda p, x: jax.nn.silu(x @ p["a"]) @ p["w"], {"a": (8, 6), "w": (6, 3)}, "w", "logistic of silu"),
    "an argument": (lambda p, x: x @ p["w"], {"w": (8, 3)}, "w", "an argument of the function"),
    "no scale": (lambda p, x: rms(x @ p["a"], 1.0) @ p["w"], {"a": (8, 6), "w": (6, 3)}, "w", "reduces its channels"),
    "one plus the scale": (lambda p, x: rms(x, 1 + p["a"]) @ p["w"], {"a": (8,), "w": (8, 3)}, "w", "a constant"),
    "another reader": (
        lambda p, x: (h := jax.nn.relu(x @ p["a"])) @ p["w"] + h.sum(-1, keepdims=True),
        {"a": (8, 6), "w": (6, 3)}, "w", "reduces its channels",
    ),
    "a result": (
        lambda p, x: ((h := jax.nn.relu(x @ p["a"])), h @ p["w"]), {"a": (8, 6), "w": (6, 3)}, "w", "a result",
    ),
    "tied": (lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"], {"w": (8, 8)}, "w", "disagree at dot_general"),
    "tied to a table": (
        lambda p, x: rms(p["w"][x[:, 0].astype(jnp.int32)], p["a"]) @ p["w"].T, {"a": (8,), "w": (9, 8)}, "w",
        "reduces its channels",
    ),
    "parts of rows": (
        lambda p, x: lax.dynamic_slice(x @ p["a"], (x[0, 0].astype(jnp.int32), 2), (3, 4))[jnp.array([1])] @ p["w"],
        {"a": (8, 6), "w": (4, 3)}, "w", "takes some channels",
    ),
    "a convolution in groups": (
        lambda p, x: conv(conv(x.reshape(5, 2, 2, 2), p["a"], 2), p["w"]), {"a": (1, 1, 1, 4), "w": (1, 1, 4, 3)}, "w",
        "feature_group_count=2",
    ),
    "columns": (
        lambda p, x: jnp.zeros((5, 6)).at[:, jnp.array([0, 1])].add(x @ p["a"]) @ p["w"], {"a": (8, 2), "w": (6, 3)},
        "w", "scatter-add .* takes some of its channels",
    ),
    "a table of indexes": (
        lambda p, x: x[jnp.round(x @ p["a"]).astype(jnp.int32)[0]] @ p["w"], {"a": (8, 5), "w": (8, 3)}, "w",
        "an argument",
    ),
    "split": (halves, {"a": (8, 12), "w": (6, 3)}, "w", "split .* takes its channels apart"),
    "from turn to turn": (
        lambda p, x: lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, p["w"])[0], {"w": (3, 8, 8)}, "w",
        "a loop makes a result",
    ),
    "while": (
        lambda p, x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 2), (0, x @ p["a"]))[1] @ p["w"],
        {"a": (8, 6), "w": (6, 3)}, "w", "while",
    ),
}  # fmt: skip


#: Small programs, as those of `FOLDED`.
SMALL = {
    "a product with itself": (lambda p, x: (h := jax.nn.relu(x @ p["a"])) * h @ p["b"], {"a": (4, 3), "b": (3, 2)},
        (2, 4), {"b": "a b"}),
    "carried into two loops": (
        lambda p, x: lax.scan(lambda h, w: (repeated(w, h), None), x, p)[0], {"a": (3, 4, 5), "b": (3, 5, 4)}, (2, 4),
        {"b": "a b"},
    ),
}  # fmt: skip


def repeated(w: Any, h: Any) -> Any:
    """Two turns with the same weights."""
    return lax.scan(lambda h, _: (h + jax.nn.relu(h @ w["a"]) @ w["b"], None), h, None, length=2)[0]


def test_squares_and_weights_that_inner_loops_share_take_factors() -> None:
    for name, found in SMALL.items():
        with case(name):
            check_the_function_stays_what_it_is(*found)


def test_the_reason_is_named() -> None:
    for name, (fun, shapes, path, reason) in REFUSED.items():
        params = {key: jnp.ones(shape) for key, shape in shapes.items()}
        program, found = graph(fun, params, jnp.ones((5, 8)))
        place = next(place for place in found.places if program.paths[place.site.leaf] == path)
        with pytest.raises(FoldError) as error:
            fold_of(place)
        assert re.search(reason, str(error.value)), f"{name}: {error.value}"


def test_runs_of_channels() -> None:
    assert Channels(24).axis(24, 1) == ((24, 1),)
    tied = Channels(24).tie([(3, 4)])
    assert tied.axis(24, 1) == ((2, 12), (3, 0), (4, 1)) and tied.axis(2, 12) == ((2, 12),)
    assert reshape_runs([tied.axis(24, 1)], (2, 12)) == (((2, 12),), ((3, 0), (4, 1)))
    assert reshape_runs([((6, 0),), ((4, 1),)], (2, 3, 2, 2)) == (((2, 0),), ((3, 0),), ((2, 2),), ((2, 1),))
    with pytest.raises(FoldError, match="unequal parts"):
        reshape_runs([((6, 1),), ((4, 6),)], (4, 6))
    with pytest.raises(FoldError, match="would be tied"):
        tied.tie([(2, 12), (4, 1)])
