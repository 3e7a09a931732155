"""Structures of NNX rather than architectures: scanned, rematerialized, shared, subclassed, adapted, mapped layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, floats, nnx_case

WIDTH, HIDDEN, DEPTH = 32, 64, 3


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Scanned(nnx.Module):
    """Layers by `nnx.scan`, whose parameters are stacked; each is computed again in the backward pass."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make(rngs)
        self.out = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def step(x: Any, block: Block) -> Any:
            return block(x)

        return self.out(step(x, self.blocks))


class Stacked(nnx.Module):
    """Layers by `lax.scan` over parameters that the model stacks itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.gain = nnx.Param(jnp.ones((DEPTH, WIDTH)))
        self.up = nnx.Param(init(rngs.params(), (DEPTH, WIDTH, HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (DEPTH, HIDDEN, WIDTH)))

    def __call__(self, x: Any) -> Any:
        @jax.checkpoint
        def step(x: Any, layer: Any) -> tuple[Any, None]:
            gain, up, down = layer
            y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain
            return x + jax.nn.relu(y @ up) @ down, None

        return jax.lax.scan(step, x, (self.gain[...], self.up[...], self.down[...]))[0]


class ScaledLinear(nnx.Linear):
    """A layer of Flax with a gain after it."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(inputs, outputs, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(outputs))

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        return super().__call__(inputs, out_sharding) * self.gain[...]


class OwnLinear(nnx.Linear):
    """A layer of Flax whose product is its own."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        assert self.bias is not None
        return jax.lax.dot_general(inputs, self.kernel[...], (((inputs.ndim - 1,), (0,)), ((), ()))) + self.bias[...]


class LoRALinear(nnx.Module):
    """A weight and a difference of low rank, added before the product."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.w = nnx.Param(init(rngs.params(), (inputs, outputs)))
        self.a = nnx.Param(init(rngs.params(), (inputs, 4)))
        self.b = nnx.Param(jnp.zeros((4, outputs)))

    def __call__(self, x: Any) -> Any:
        return x @ (self.w[...] + 0.5 * (self.a[...] @ self.b[...]))


def two(layer: Any) -> Any:
    return lambda rngs: nnx.Sequential(layer(WIDTH, HIDDEN, rngs=rngs), nnx.relu, layer(HIDDEN, 8, rngs=rngs))


class Shared(nnx.Module):
    """One block twice, and one of its layers once more under another name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)
        self.again = self.block.up

    def __call__(self, x: Any) -> Any:
        return self.again(self.block(self.block(x)))


class Ensemble(nnx.Module):
    """Members whose parameters have a first axis, mapped by `nnx.vmap`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.members = nnx.vmap(two(nnx.Linear), in_axes=0, out_axes=0)(rngs.split(DEPTH))

    def __call__(self, x: Any) -> Any:
        outputs = nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)(self.members, x)
        return outputs.mean(axis=0), outputs.std(axis=0)


LAYERS = "layers/{0,2}"


def inputs() -> tuple[Any, ...]:
    return (floats(4, WIDTH),)


CASES = [
    nnx_case(
        "nnx_scan",
        Scanned,
        inputs,
        expand("blocks/{up,down}/kernel", "out/kernel"),
        expand("blocks/{up,down}/bias", "blocks/norm/{scale,bias}", "out/bias"),
    ),
    nnx_case("nnx_stacked", Stacked, inputs, ("up", "down"), ("gain",)),
    nnx_case(
        "linear_with_gain", two(ScaledLinear), inputs, expand(LAYERS + "/kernel"), expand(LAYERS + "/{bias,gain}")
    ),
    nnx_case("linear_with_own_product", two(OwnLinear), inputs, expand(LAYERS + "/kernel"), expand(LAYERS + "/bias")),
    nnx_case("lora_by_hand", two(LoRALinear), inputs, expand(LAYERS + "/{w,a,b}"), derived=expand(LAYERS + "/w")),
    nnx_case(
        "shared_block",
        Shared,
        inputs,
        expand("again/kernel", "block/down/kernel"),
        expand("again/bias", "block/down/bias", "block/norm/{scale,bias}"),
    ),
    nnx_case(
        "ensemble", Ensemble, inputs, expand("members/" + LAYERS + "/kernel"), expand("members/" + LAYERS + "/bias")
    ),
]
