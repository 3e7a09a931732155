"""Selective state spaces as in Mamba: a depthwise convolution, steps that depend on the input, a scan over time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, nnx_case, tokens

VOCAB, WIDTH, INNER, STATES, RANK, TAPS = 64, 32, 64, 8, 32, 4


def scan_steps(decay: Any, update: Any) -> Any:
    """The states h(t) = decay(t) h(t - 1) + update(t), of (length, ...), one step at a time."""

    def step(h: Any, at: Any) -> tuple[Any, Any]:
        h = at[0] * h + at[1]
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(update[0]), (decay, update))[1]


def scan_tree(decay: Any, update: Any) -> Any:
    """The same states, by a tree of pairs."""

    def join(a: Any, b: Any) -> tuple[Any, Any]:
        return b[0] * a[0], b[0] * a[1] + b[1]

    return jax.lax.associative_scan(join, (decay, update))[1]


class Mixer(nnx.Module):
    def __init__(self, scan: Any, rngs: nnx.Rngs) -> None:
        self.scan = scan
        self.in_proj = nnx.Linear(WIDTH, 2 * INNER, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(INNER, INNER, (TAPS,), feature_group_count=INNER, padding=((TAPS - 1, 0),), rngs=rngs)
        self.x_proj = nnx.Linear(INNER, RANK + 2 * STATES, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(RANK, INNER, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, STATES + 1), (INNER, 1))))
        self.D = nnx.Param(jnp.ones(INNER))
        self.out_proj = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x, gate = jnp.split(self.in_proj(x), 2, axis=-1)
        x = nnx.silu(self.conv1d(x))
        step, b, c = jnp.split(self.x_proj(x), [RANK, RANK + STATES], axis=-1)
        step = nnx.softplus(self.dt_proj(step))
        decay = jnp.exp(step[..., None] * -jnp.exp(self.A_log[...]))
        update = (step * x)[..., None] * b[:, :, None, :]
        states = jax.vmap(self.scan)(decay, update)
        y = jnp.einsum("blds,bls->bld", states, c) + x * self.D[...]
        return self.out_proj(y * nnx.silu(gate))


class Mamba(nnx.Module):
    def __init__(self, scan: Any, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mixers = nnx.List([Mixer(scan, rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.norm_f = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.embedding.attend(self.norm_f(x))


CASES = [
    nnx_case(
        name,
        lambda rngs, scan=scan: Mamba(scan, rngs),
        lambda: (tokens(2, 8),),
        expand("embedding/embedding", "mixers/{0,1}/{in_proj,conv1d,x_proj,dt_proj,out_proj}/kernel"),
        expand("mixers/{0,1}/{A_log,D,conv1d/bias,dt_proj/bias}", "norms/{0,1}/scale", "norm_f/scale"),
    )
    for name, scan in (("mamba_scan", scan_steps), ("mamba_associative_scan", scan_tree))
]
