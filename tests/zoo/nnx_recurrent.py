"""Recurrent networks: sequence to sequence by LSTMs of Flax, and cells of one's own under `lax.scan`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.case import expand, floats, nnx_case, tokens

VOCAB, WIDTH = 64, 32


class Seq2Seq(nnx.Module):
    """The decoder starts from the encoder's last carry, and looks at its outputs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder: Any = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs), return_carry=True)
        self.decoder: Any = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.attend = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH)))
        self.out = nnx.Linear(2 * WIDTH, VOCAB, rngs=rngs)

    def __call__(self, source: Any, target: Any) -> Any:
        carry, memory = self.encoder(self.embed(source))
        y = self.decoder(self.embed(target), initial_carry=carry)
        scores = jnp.einsum("btd,de,bse->bts", y, self.attend[...], memory)
        context = jax.nn.softmax(scores, axis=-1) @ memory
        return self.out(jnp.concatenate([y, context], axis=-1))


class GatedCell(nnx.Module):
    """A GRU of four products in two, with the parameters of a framework without names for gates."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.orthogonal()
        self.weight_ih = nnx.Param(init(rngs.params(), (3 * WIDTH, WIDTH)))
        self.weight_hh = nnx.Param(init(rngs.params(), (3 * WIDTH, WIDTH)))
        self.bias_ih, self.bias_hh = nnx.Param(jnp.zeros(3 * WIDTH)), nnx.Param(jnp.zeros(3 * WIDTH))

    def __call__(self, h: Any, x: Any) -> tuple[Any, Any]:
        r, z, n = jnp.split(x @ self.weight_ih[...].T + self.bias_ih[...], 3, axis=-1)
        hr, hz, hn = jnp.split(h @ self.weight_hh[...].T + self.bias_hh[...], 3, axis=-1)
        update = jax.nn.sigmoid(z + hz)
        h = (1 - update) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + update * h
        return h, h


class Tagger(nnx.Module):
    """Two directions of the same sequence, each by `lax.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.forward, self.backward = GatedCell(rngs), GatedCell(rngs)
        self.out = nnx.Linear(2 * WIDTH, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        start, steps = jnp.zeros((x.shape[0], WIDTH)), jnp.swapaxes(x, 0, 1)
        _, a = jax.lax.scan(self.forward, start, steps)
        _, b = jax.lax.scan(self.backward, start, steps, reverse=True)
        return self.out(jnp.concatenate([a, b], axis=-1))


CASES = [
    nnx_case(
        "lstm_seq2seq",
        Seq2Seq,
        lambda: (tokens(2, 6), tokens(2, 5, seed=2)),
        expand(
            "embed/embedding",
            "encoder/cell/{dense_i,dense_h}/kernel",
            "decoder/cell/{ii,if_,ig,io,hi,hf,hg,ho}/kernel",
            "attend",
            "out/kernel",
        ),
        expand("encoder/cell/dense_h/bias", "decoder/cell/{hi,hf,hg,ho}/bias", "out/bias"),
    ),
    nnx_case(
        "gru_tagger",
        Tagger,
        lambda: (floats(2, 6, WIDTH),),
        expand("{forward,backward}/{weight_ih,weight_hh}", "out/kernel"),
        expand("{forward,backward}/{bias_ih,bias_hh}", "out/bias"),
    ),
]
