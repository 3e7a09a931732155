"""Mixtures of experts as in Mixtral: every expert by an einsum, or the chosen ones by a ragged product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, floats, nnx_case

WIDTH, HIDDEN, EXPERTS, CHOSEN = 32, 64, 4, 2


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.w_gate = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.w_up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.w_down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def route(self, x: Any) -> tuple[Any, Any]:
        """Weights and numbers of the chosen experts, both (tokens, chosen)."""
        weights, chosen = jax.lax.top_k(self.router(x), CHOSEN)
        return jax.nn.softmax(weights, axis=-1), chosen


class DenseExperts(Experts):
    """Every expert sees every token; the weights of those that are not chosen are zero."""

    def __call__(self, x: Any) -> Any:
        weights, chosen = self.route(x)
        combine = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, EXPERTS))
        gate = jnp.einsum("td,edf->etf", x, self.w_gate[...])
        up = jnp.einsum("td,edf->etf", x, self.w_up[...])
        y = jnp.einsum("etf,efd->etd", nnx.silu(gate) * up, self.w_down[...])
        return jnp.einsum("etd,te->td", y, combine)


class RaggedExperts(Experts):
    """The tokens are sorted by expert, and each expert sees its own."""

    def __call__(self, x: Any) -> Any:
        weights, chosen = self.route(x)
        order = jnp.argsort(chosen.reshape(-1))
        rows = x[order // CHOSEN]
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
        gate = jax.lax.ragged_dot(rows, self.w_gate[...], sizes)
        up = jax.lax.ragged_dot(rows, self.w_up[...], sizes)
        y = jax.lax.ragged_dot(nnx.silu(gate) * up, self.w_down[...], sizes)
        back = y[jnp.argsort(order)].reshape(*chosen.shape, WIDTH)
        return jnp.sum(back * weights[..., None], axis=1)


class Block(nnx.Module):
    """Causal attention of Flax and a mixture, with the names of Mixtral's checkpoint."""

    def __init__(self, experts: type[Experts], rngs: nnx.Rngs) -> None:
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.self_attn = nnx.MultiHeadAttention(2, WIDTH, 64, use_bias=False, decode=False, rngs=rngs)
        self.block_sparse_moe = experts(rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:-1]))
        x = x + self.self_attn(self.input_layernorm(x), mask=mask)
        y = self.post_attention_layernorm(x)
        return x + self.block_sparse_moe(y.reshape(-1, WIDTH)).reshape(x.shape)


class Mixtral(nnx.Module):
    def __init__(self, experts: type[Experts], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(experts, rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


CASES = [
    nnx_case(
        name,
        lambda rngs, experts=experts: Mixtral(experts, rngs),
        lambda: (floats(2, 8, WIDTH),),
        expand(
            "layers/{0,1}/self_attn/{query,key,value,out}/kernel",
            "layers/{0,1}/block_sparse_moe/{w_gate,w_up,w_down}",
            "layers/{0,1}/block_sparse_moe/router/kernel",
        ),
        expand("layers/{0,1}/{input_layernorm,post_attention_layernorm}/scale"),
    )
    for name, experts in (("mixtral_einsum", DenseExperts), ("mixtral_ragged", RaggedExperts))
]
