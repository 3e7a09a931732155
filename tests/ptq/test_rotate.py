"""Rotations: functions stay what they are, in float64; what is rotated and what is not, and gains on fresh data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jchop as jc
from jchop.ptq._maps.hadamard import Hadamard
from tests.ptq.test_fold import ATTENTION, MLP, Shapes, attention, conv, gated, layer_norm, rms
from tests.ptq.test_quantize import decibels, outliers
from tests.ptq.test_smooth import arrays, mapped


@pytest.mark.parametrize(
    "size, paley, blocks", [(64, 1, 1), (12, 12, 1), (28, 28, 1), (96, 12, 1), (6, 1, 3), (52, 1, 13), (74 * 2, 148, 1)]
)
def test_the_matrix_is_hadamards(size: int, paley: int, blocks: int) -> None:
    """Of both of Paley's constructions, of Sylvester's, and of blocks where there is none of these."""
    found = Hadamard.of(size, 3)
    assert (found.size, found.paley, found.blocks) == (size, paley, blocks)
    matrix = found.apply(np.eye(size))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-14)
    block = size // blocks
    inside = np.kron(np.eye(blocks), np.ones((block, block))) > 0
    np.testing.assert_allclose(np.abs(matrix[inside]), block**-0.5, rtol=1e-14)
    assert not matrix[~inside].any()
    plain = Hadamard.of(size, None).apply(np.eye(size))
    signs = np.sign(matrix * plain).sum(1)
    np.testing.assert_allclose(np.abs(signs), block)
    assert set(np.sign(signs)) == {-1, 1}


def llama(p: Any, x: Any) -> Any:
    """Embedding, layers in a scan, a head: its own, after a norm with a scale, or the table of the embedding."""

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return gated(w, attention(True)(w, h)), None

    h, _ = lax.scan(layer, jnp.take(p["table"], x[..., 0].astype(jnp.int32), axis=0) * 8**0.5, p["layers"])
    return rms(h, p["last"]) @ p["head"] if "head" in p else rms(h, 1.0) @ p["table"].T


LAYERS = {name: (3, *shape) for name, shape in (ATTENTION | MLP).items()}


#: The function, the shapes of its parameters and of its argument, and for each weight what its note says.
FOLDED: dict[str, tuple[Callable[..., Any], Any, tuple[int, ...], dict[str, str]]] = {
    "two products": (
        lambda p, x: -(x @ p["a"] + p["b"]).reshape(5, 2, 6).transpose(1, 0, 2)[:, ::-1] @ p["w"] / 3,
        {"a": (8, 12), "b": (12,), "w": (6, 3)}, (5, 8), {"w": "3 Hadamard matrices of 2 folded into a, b"},
    ),
    "a mask, and a scale of each token": (
        lambda p, x: jnp.where(x[:, :1] > 0, (x @ p["a"]) * jax.nn.sigmoid(x @ p["s"]), 0) @ p["w"],
        {"a": (8, 12), "s": (8, 1), "w": (12, 3)}, (5, 8), {"w": "Hadamard 12 folded into a"},
    ),
    "a residual stream": (
        llama, {"table": (9, 8), "last": (8,), "head": (8, 9), "layers": LAYERS}, (2, 3, 8),
        {"layers/q": "Hadamard 8 folded into layers/down, layers/o, table", "layers/o": "Hadamard 2 folded into layers/v"},
    ),
    "a table that is a head too": (
        llama, {"table": (9, 8), "layers": LAYERS}, (2, 3, 8),
        {"layers/up": "Hadamard 8 folded into layers/down, layers/o"},
    ),
    "attention": (
        attention(False, 4), {**ATTENTION, "k": (8, 8), "v": (8, 8)}, (2, 3, 8),
        {"o": "Hadamard 2 folded into v"},
    ),
    "convolutions": (
        lambda p, x: conv(conv(x, p["a"]) + p["b"], p["c"]), {"a": (3, 3, 2, 4), "b": (4,), "c": (2, 2, 4, 3)},
        (2, 4, 4, 2), {"c": "Hadamard 4 folded into a, b"},
    ),
    "branches": (
        lambda p, x: lax.cond(x[0, 0] > 0, lambda h: h @ p["a"], lambda h: h @ p["b"], x) @ p["w"],
        {"a": (8, 4), "b": (8, 4), "w": (4, 3)}, (5, 8), {"w": "Hadamard 4 folded into a, b"},
    ),
    "experts": (
        lambda p, x: jnp.einsum("etn,enk->etk", jnp.einsum("tk,ekn->etn", x, p["a"]), p["w"]),
        {"a": (2, 8, 4), "w": (2, 4, 3)}, (5, 8), {"w": "Hadamard 4 folded into a"},
    ),
}  # fmt: skip


def drawn(shapes: Any, rng: np.random.Generator) -> Any:
    """Parameters; scales of norms are positive."""
    return {
        name: drawn(shape, rng)
        if isinstance(shape, dict)
        else jnp.asarray(rng.uniform(0.5, 2, shape) if name in ("norm", "scale", "last") else rng.normal(size=shape))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.in_turn(3)) for n in FOLDED])
def test_the_function_stays_what_it_is(name: str) -> None:
    fun, shapes, shape, expected = FOLDED[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params, x = drawn(shapes, rng), jnp.asarray(np.abs(rng.normal(size=shape)))
        y = np.asarray(fun(params, x))
        found, notes = mapped(fun, params, [x], jc.ptq.rotate())
        np.testing.assert_allclose(fun(found, x), y, rtol=1e-12, atol=1e-12 * np.abs(y).max())
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]
    for path, folded in expected.items():
        assert notes.note(paths.index(path), ()) == f"rotate by {folded}"
        assert notes.methods[paths.index(path)] == ["rotate"]
    changed = jax.tree.map(lambda a, b: np.abs(np.subtract(a, b)).max() > 0.1, found, params)
    named = {path for texts in expected.items() for text in texts for path in text.split(" into ")[-1].split(", ")}
    for path, moved in zip(paths, jax.tree.leaves(changed), strict=True):
        assert moved or path not in named
