"""Layers of Flax, NNX and Linen, and what each computes under a rule, written by hand from `round_to_format` and JAX.

Parameters are dictionaries of arrays. Layers of both interfaces have the same, but for cells of recurrent networks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from programs.program import equations

import jchop as jc


@dataclass(frozen=True)
class Formats:
    """What a rule rounds; None: nothing."""

    weight: str
    activation: str | None = None
    bias: str | None = None
    output: str | None = None

    def by_rows(self, w: Any) -> Any:
        """A kernel whose last axis is kept, rounded along the others as one."""
        kept = jnp.moveaxis(w, -1, 0)
        rows = jc.round_to_format(kept.reshape(w.shape[-1], -1), self.weight)
        return jnp.moveaxis(rows.reshape(kept.shape), 0, -1)

    def gain(self, w: Any) -> Any:
        return jc.round_to_format(w, self.weight)

    def act(self, x: Any) -> Any:
        return x if self.activation is None else jc.round_to_format(x, self.activation)

    def small(self, b: Any) -> Any:
        return b if self.bias is None else jc.round_to_format(b, self.bias)

    def end(self, y: Any) -> Any:
        return y if self.output is None else jc.round_to_format(y, self.output)


def linear(f: Formats, p: Any, x: Any) -> Any:
    y = f.act(x) @ f.by_rows(p["kernel"])
    return f.end(y + f.small(p["bias"]) if "bias" in p else y)


def linear_general(f: Formats, p: Any, x: Any) -> Any:
    a, b, out = p["kernel"].shape  # both a and b are summed over
    laid = f.act(x.reshape(-1, a * b))
    y = laid @ f.by_rows(p["kernel"]).reshape(a * b, out)
    return f.end(y + f.small(p["bias"])).reshape(*x.shape[:-2], out)


def _gain_by_rows(f: Formats, w: Any) -> Any:
    """The kernel of an Einsum (h, a, b), a summed over."""
    return jnp.swapaxes(f.gain(jnp.swapaxes(w, 1, 2)), 1, 2)


def einsum(f: Formats, p: Any, x: Any) -> Any:
    y = lax.dot_general(f.act(x), _gain_by_rows(f, p["kernel"]), (((2,), (1,)), ((1,), (0,))))  # (h, n, b)
    return f.end(jnp.swapaxes(y, 0, 1) + f.small(p["bias"]))


def linen_einsum(f: Formats, p: Any, x: Any) -> Any:
    """The product is Flax's own, which multiplies the kernel by the input, and so may take the sums otherwise."""
    return f.end(jnp.einsum("nha,hab->nhb", f.act(x), _gain_by_rows(f, p["kernel"])) + f.small(p["bias"]))


def conv(f: Formats, p: Any, x: Any) -> Any:
    space = "XYZ"[: x.ndim - 2]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    image = f.act(x.reshape(x.shape[0], -1)).reshape(x.shape)
    y = lax.conv_general_dilated(image, f.by_rows(p["kernel"]), (1,) * len(space), "SAME", dimension_numbers=numbers)
    return f.end(y + f.small(p["bias"]))


def conv_transpose(f: Formats, p: Any, x: Any) -> Any:
    image = f.act(x.reshape(x.shape[0], -1)).reshape(x.shape)
    return f.end(lax.conv_transpose(image, f.by_rows(p["kernel"]), (2,), "SAME") + f.small(p["bias"]))


def embed(f: Formats, p: Any, x: Any) -> Any:
    return f.end(f.gain(p["embedding"])[x])


def batch_norm(f: Formats, p: Any, x: Any) -> Any:
    x = f.act(x)
    mean = x.mean(0)
    var = jnp.maximum(0.0, (x * x).mean(0) - mean * mean)
    return f.end((x - mean) * (lax.rsqrt(var + 1e-5) * f.gain(p["scale"])) + f.small(p["bias"]))


def layer_norm(f: Formats, p: Any, x: Any) -> Any:
    x = f.act(x)
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return f.end((x - mean) * (lax.rsqrt(var + 1e-6) * f.gain(p["scale"])) + f.small(p["bias"]))


def rms_norm(f: Formats, p: Any, x: Any) -> Any:
    x = f.act(x)
    return f.end(x * (lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * f.gain(p["scale"])))


def group_norm(f: Formats, p: Any, x: Any) -> Any:
    x = f.act(x)
    groups = x.reshape(x.shape[0], -1, 2, x.shape[-1] // 2)
    mean = groups.mean((1, 3))
    var = jnp.maximum(0.0, (groups * groups).mean((1, 3)) - mean * mean)
    mean, var = (jnp.repeat(v, x.shape[-1] // 2, axis=1)[:, None] for v in (mean, var))
    return f.end((x - mean) * (lax.rsqrt(var + 1e-6) * f.gain(p["scale"])) + f.small(p["bias"]))


def instance_norm(f: Formats, p: Any, x: Any) -> Any:
    x = f.act(x)
    mean = x.mean(1, keepdims=True)
    var = jnp.maximum(0.0, (x * x).mean(1, keepdims=True) - mean * mean)
    return f.end((x - mean) * (lax.rsqrt(var + 1e-5) * f.gain(p["scale"])) + f.small(p["bias"]))


def lora(f: Formats, p: Any, x: Any) -> Any:
    return f.end(f.act(x) @ f.by_rows(p["lora_a"]) @ f.by_rows(p["lora_b"]))


def lora_linear(f: Formats, p: Any, x: Any) -> Any:
    y = f.act(x) @ f.by_rows(p["kernel"]) + f.small(p["bias"])
    return f.end(y + lora(f, p["lora"], x))


def heads(f: Formats, p: Any, x: Any) -> Any:
    w = jnp.moveaxis(f.gain(jnp.moveaxis(p["kernel"], 0, -1)), -1, 0)  # (in, heads, depth)
    return f.end(jnp.tensordot(f.act(x), w, 1) + f.small(p["bias"]))


def attention(f: Formats, p: Any, x: Any) -> Any:
    q, k, v = (heads(f, p[name], x) for name in ("query", "key", "value"))
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    q, k = f.act(q), f.act(k)  # (n, q or k, h, d), d summed over
    weights = jax.nn.softmax(lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))))  # (n, h, q, k)
    v = jnp.moveaxis(f.act(jnp.moveaxis(v, 1, -1)), -1, 1)  # k summed over
    y = lax.dot_general(f.act(weights), v, (((3,), (1,)), ((0, 1), (0, 2))))  # (n, h, q, d)
    return linear_general(f, p["out"], jnp.swapaxes(y, 1, 2))


# -- cells: of a carry and an input, the new carry and the result ------------------------------------------------------


def lstm(f: Formats, p: Any, carry: Any, x: Any) -> Any:
    c, h = carry
    forget = "if_" if "if_" in p else "if"
    pairs = ("ii", "hi"), (forget, "hf"), ("io", "ho"), ("ig", "hg")
    gates = [linear(f, p[inner], x) + linear(f, p[outer], h) for inner, outer in pairs]
    i, forgotten, o = (jax.nn.sigmoid(gate) for gate in gates[:3])
    c = forgotten * c + i * jnp.tanh(gates[3])
    h = o * jnp.tanh(c)
    return (c, h), h


def optimized_lstm(f: Formats, p: Any, carry: Any, x: Any) -> Any:
    c, h = carry
    gates = jnp.split(linear(f, p["dense_i"], x) + linear(f, p["dense_h"], h), 4, axis=-1)
    i, forgotten, o = (jax.nn.sigmoid(gates[n]) for n in (0, 1, 3))
    c = forgotten * c + i * jnp.tanh(gates[2])
    h = o * jnp.tanh(c)
    return (c, h), h


def _gru(inputs: Any, states: Any, h: Any) -> Any:
    r, z = (jax.nn.sigmoid(a + b) for a, b in zip(inputs[:2], states[:2], strict=True))
    n = jnp.tanh(inputs[2] + r * states[2])
    h = (1.0 - z) * n + z * h
    return h, h


def gru(f: Formats, p: Any, h: Any, x: Any) -> Any:
    inputs, states = (jnp.split(linear(f, p[name], v), 3, -1) for name, v in (("dense_i", x), ("dense_h", h)))
    return _gru(inputs, states, h)


def linen_gru(f: Formats, p: Any, h: Any, x: Any) -> Any:
    inputs, states = ([linear(f, p[f"{side}{gate}"], v) for gate in "rzn"] for side, v in (("i", x), ("h", h)))
    return _gru(inputs, states, h)


def simple(f: Formats, p: Any, h: Any, x: Any) -> Any:
    inner, outer = ("dense_i", "dense_h") if "dense_i" in p else ("i", "h")
    h = jnp.tanh(linear(f, p[inner], x) + linear(f, p[outer], h))
    return h, h


def step(cell: Callable[..., Any]) -> Callable[[Formats, Any, Any], Any]:
    """One step of a cell; carry and input stand in one array."""
    return lambda f, p, x: cell(f, p, *_pair(x) if cell in (lstm, optimized_lstm) else x[1:])[1]


def _pair(x: Any) -> tuple[Any, Any]:
    return (x[0], x[1]), x[2]


def over_time(f: Formats, p: Any, x: Any) -> Any:
    """A recurrent network of the simple cell, from zeros."""
    start = jnp.zeros((x.shape[0], HIDDEN))
    steps = lax.scan(lambda h, x: simple(f, p["cell"], h, x), start, jnp.swapaxes(x, 0, 1))[1]
    return jnp.swapaxes(steps, 0, 1)


HIDDEN = 4

# -- a network with what has no parameters -----------------------------------------------------------------------------


def network(f: Formats, p: Any, x: Any) -> Any:
    x = jnp.maximum(conv(f, p["conv"], x), 0)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x * lax.logistic(x)
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 1, 1), (1, 1, 1, 1), "VALID") / 2
    keep = jax.random.bernoulli(jax.random.key(7), 0.5, x.shape)
    x = jnp.tanh(jnp.where(keep, x / 0.5, 0))
    return linear(f, p["linear"], x.reshape(x.shape[0], -1))


class Network(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(2, 3, (2, 2), rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.linear = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        x = self.dropout(nnx.avg_pool(nnx.silu(x), (2, 1)), rngs=jax.random.key(7))
        return self.linear(nnx.tanh(x).reshape(x.shape[0], -1))


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.max_pool(linen.relu(linen.Conv(3, (2, 2), name="conv")(x)), (2, 2), (2, 2))
        x = linen.Dropout(0.5, deterministic=False)(linen.avg_pool(linen.silu(x), (2, 1)), rng=jax.random.key(7))
        return linen.Dense(3, name="linear")(linen.tanh(x).reshape(x.shape[0], -1))


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One layer.

    Args:
        make: it in NNX, from `Rngs`.
        linen: it in Linen; None where Linen has none.
        reference: what it computes under formats, of parameters and an input.
        shape: of an input.
        of_linen: what it computes in Linen, where its parameters are others there.
        arguments: what it is called with for an input; of two results the second counts.
        bias: whether it has one.
        still: parameters that cannot move.
        more: by name, what else it is called with.
    """

    make: Callable[[nnx.Rngs], Any]
    linen: linen.Module | None
    reference: Callable[[Formats, Any, Any], Any]
    shape: tuple[int, ...]
    of_linen: Callable[[Formats, Any, Any], Any] | None = None
    arguments: Callable[[Any], tuple[Any, ...]] = lambda x: (x,)
    bias: bool = True
    still: frozenset[tuple[str, ...]] = frozenset()
    more: Mapping[str, Any] = field(default_factory=dict)

    def run(self, function: Callable[..., Any], x: Any) -> Any:
        y = function(*self.arguments(x), **self.more)
        return y[1] if isinstance(y, tuple) else y


_NORMAL = nnx.initializers.normal()
LAYERS: dict[str, Layer] = {
    "Linear": Layer(lambda r: nnx.Linear(10, 6, rngs=r), linen.Dense(6), linear, (5, 10)),
    "LinearGeneral": Layer(
        lambda r: nnx.LinearGeneral((2, 5), 6, axis=(-2, -1), rngs=r),
        linen.DenseGeneral(6, axis=(-2, -1)),
        linear_general,
        (3, 2, 5),
    ),
    "Einsum": Layer(
        lambda r: nnx.Einsum("nha,hab->nhb", (2, 6, 5), (2, 5), rngs=r),
        linen.Einsum((2, 6, 5), "nha,hab->nhb"),
        einsum,
        (3, 2, 6),
        linen_einsum,
    ),
    "Conv1d": Layer(lambda r: nnx.Conv(3, 4, (3,), rngs=r), linen.Conv(4, (3,)), conv, (2, 5, 3)),
    "Conv2d": Layer(lambda r: nnx.Conv(3, 4, (2, 3), rngs=r), linen.Conv(4, (2, 3)), conv, (2, 5, 4, 3)),
    "Conv3d": Layer(lambda r: nnx.Conv(3, 4, (2, 1, 2), rngs=r), linen.Conv(4, (2, 1, 2)), conv, (2, 3, 2, 3, 3)),
    "ConvTranspose": Layer(
        lambda r: nnx.ConvTranspose(3, 4, (3,), (2,), rngs=r),
        linen.ConvTranspose(4, (3,), (2,)),
        conv_transpose,
        (2, 5, 3),
    ),
    "Embed": Layer(lambda r: nnx.Embed(7, 6, rngs=r), linen.Embed(7, 6), embed, (4,), bias=False),
    "BatchNorm": Layer(
        lambda r: nnx.BatchNorm(6, rngs=r), linen.BatchNorm(use_running_average=False), batch_norm, (9, 6)
    ),
    "LayerNorm": Layer(lambda r: nnx.LayerNorm(6, rngs=r), linen.LayerNorm(), layer_norm, (4, 6)),
    "RMSNorm": Layer(lambda r: nnx.RMSNorm(6, rngs=r), linen.RMSNorm(), rms_norm, (4, 6), bias=False),
    "GroupNorm": Layer(
        lambda r: nnx.GroupNorm(6, num_groups=2, rngs=r), linen.GroupNorm(num_groups=2), group_norm, (3, 5, 6)
    ),
    "InstanceNorm": Layer(
        lambda r: nnx.InstanceNorm(6, epsilon=1e-5, rngs=r), linen.InstanceNorm(epsilon=1e-5), instance_norm, (3, 5, 6)
    ),
    "LoRA": Layer(lambda r: nnx.LoRA(6, 3, 5, b_initializer=_NORMAL, rngs=r), None, lora, (4, 6), bias=False),
    "LoRALinear": Layer(
        lambda r: nnx.LoRALinear(6, 5, lora_rank=3, b_initializer=_NORMAL, rngs=r), None, lora_linear, (4, 6)
    ),
    # A bias that is the same for every key moves all scores of a query alike, and softmax does not see it.
    "MultiHeadAttention": Layer(
        lambda r: nnx.MultiHeadAttention(2, 6, qkv_features=8, decode=False, rngs=r),
        linen.MultiHeadDotProductAttention(2, qkv_features=8),
        attention,
        (2, 5, 6),
        still=frozenset({("key", "bias")}),
    ),
    "LSTMCell": Layer(
        lambda r: nnx.LSTMCell(4, HIDDEN, rngs=r), linen.LSTMCell(HIDDEN), step(lstm), (3, 2, 4), arguments=_pair
    ),
    "OptimizedLSTMCell": Layer(
        lambda r: nnx.OptimizedLSTMCell(4, HIDDEN, rngs=r), None, step(optimized_lstm), (3, 2, 4), arguments=_pair
    ),
    "GRUCell": Layer(
        lambda r: nnx.GRUCell(4, HIDDEN, rngs=r),
        linen.GRUCell(HIDDEN),
        step(gru),
        (3, 2, 4),
        step(linen_gru),
        lambda x: (x[1], x[2]),
    ),
    "SimpleCell": Layer(
        lambda r: nnx.SimpleCell(4, HIDDEN, rngs=r),
        linen.SimpleCell(HIDDEN),
        step(simple),
        (3, 2, 4),
        arguments=lambda x: (x[1], x[2]),
    ),
    "RNN": Layer(
        lambda r: nnx.RNN(nnx.SimpleCell(3, HIDDEN, rngs=r)),
        linen.RNN(linen.SimpleCell(HIDDEN)),
        over_time,
        (2, 3, 3),
        more={"initial_carry": np.zeros((2, HIDDEN), np.float32)},
    ),
    "Network": Layer(lambda r: Network(rngs=r), LinenNetwork(), network, (2, 6, 4, 2)),
}


def drawn(shapes: Any, seed: int = 0) -> Any:
    """Parameters of these shapes, none of which is at the zero or one that layers start from; nothing is compiled."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda v: jnp.asarray(draw.normal(0.1, v.size**-0.25, v.shape), v.dtype), shapes)


def each(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Any], Any]:
    """As `pytest.mark.parametrize`, in one test: for many cases that take no time. A failure names its case."""
    names = (names,) if isinstance(names, str) else names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            for case in table:
                values = (case,) if len(names) == 1 else case
                try:
                    test(**dict(zip(names, values, strict=True)), **fixtures)
                except BaseException as error:
                    error.add_note(f"in the case {values}")
                    raise

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


def checked(check: Callable[..., None], request: Any) -> None:
    """Call one of several checks that are the cases of one test, with the fixtures that it names."""
    check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})


def products_of_size(jaxpr: Any, sizes: set[int]) -> int:
    """The number of products in a program, and in those within it, whose result has one of the sizes."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")
    return sum(int(np.prod(out.aval.shape)) in sizes for eqn in products for out in eqn.outvars)
