"""Reinforcement learning with a packed engine: training and rollout have the same logits, bit for bit.

A policy learns to count: after token t it should write t + 1. In each step an engine samples answers, and the trainer
improves the policy by policy gradients of group-relative advantages (GRPO, arXiv 2402.03300). The engine never sees the
masters. It gets the tensors of a compressed-tensors checkpoint in float8, which `jc.encode_checkpoint` makes in memory,
and decodes them by the definition of that layout: codes times scales.

    python examples/rollout.py [--small]

The last columns are the usual setup: the trainer computes with its float32 masters, and the engine with float8 codes of
their bfloat16 copy. The Kullback-Leibler divergence between both policies is then not zero, and importance ratios are
not one. With `--small` it takes some 10 seconds of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jchop as jc

TOKENS, WIDTH, LENGTH, GROUP = 16, 32, 6, 8
RULES = {"hidden": "float8_e4m3fn(group=all)", "head": "float8_e4m3fn(group=all)"}


def logits(params: Any, token: jax.Array) -> jax.Array:
    """The logits of the next token, with weights (out, in) as checkpoints have them."""
    x = jnp.tanh(params["embedding"][token])
    x = x + jax.nn.gelu(jnp.einsum("...i,oi->...o", x, params["hidden"]))
    return jnp.einsum("...i,oi->...o", x, params["head"])


low = jc.quantize_fn(logits, RULES)


def decode(checkpoint: Any) -> Any:
    """The weights of an engine: the codes of each row times its scale, in float32."""
    weights = {name.removesuffix(".weight"): array for name, array in checkpoint.tensors.items()}
    return {
        name: array.astype(jnp.float32) * weights.get(f"{name}.weight_scale", 1.0)
        for name, array in weights.items()
        if not name.endswith("_scale")
    }


@jax.jit
def roll_out(weights: Any, start: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens (rows, LENGTH + 1) sampled by the engine, and the logits (rows, LENGTH, TOKENS) that they came from."""

    def step(token: jax.Array, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        scores = logits(weights, token)
        token = jax.random.categorical(key, scores)
        return token, (token, scores)

    _, (tokens, scores) = jax.lax.scan(step, start, jax.random.split(key, LENGTH))
    return jnp.concatenate([start[None], tokens]).T, scores.swapaxes(0, 1)


def loss(params: Any, tokens: jax.Array, rollout: jax.Array, policy: Any) -> tuple[jax.Array, jax.Array]:
    """The objective of policy gradients, and the logits of the trainer."""
    scores = policy(params, tokens[:, :-1])
    right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).mean(1).reshape(-1, GROUP)
    advantage = ((right - right.mean(1, keepdims=True)) / (right.std(1, keepdims=True) + 1e-3)).reshape(-1, 1)

    def log_prob(scores: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], -1)[..., 0]

    ratio = jnp.exp(log_prob(scores) - log_prob(rollout))
    return -(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)).mean(), scores


def divergence(scores: jax.Array, rollout: jax.Array) -> float:
    """The mean Kullback-Leibler divergence of the engine's distribution from the trainer's."""
    p, q = jax.nn.log_softmax(scores), jax.nn.log_softmax(rollout)
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


def train(policy: Any, pack: Any, steps: int) -> list[tuple[float, bool, float]]:
    """For each step the mean reward, whether the logits of both are equal, and their divergence."""
    keys = iter(jax.random.split(jax.random.key(0), 3 + 2 * steps))
    params = {
        name: jax.random.normal(next(keys), (rows, WIDTH)) / WIDTH**0.5
        for name, rows in (("embedding", TOKENS), ("hidden", WIDTH), ("head", TOKENS))
    }
    tx = optax.adam(0.01)
    state, table = tx.init(params), []
    gradient = jax.jit(jax.value_and_grad(partial(loss, policy=policy), has_aux=True))
    for _ in range(steps):
        start = jnp.repeat(jax.random.randint(next(keys), (16,), 0, TOKENS), GROUP)
        tokens, rollout = roll_out(pack(params), start, next(keys))
        (_, scores), grads = gradient(params, tokens, rollout)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        reward = float((tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).mean())
        table.append((reward, bool((scores == rollout).all()), divergence(scores, rollout)))
    return table


def pack_masters(params: Any) -> Any:
    """The engine's weights: those of the codes that training rounds to."""
    packed = low.pack(params, jnp.zeros(1, jnp.int32))
    return decode(
        jc.encode_checkpoint({f"{name}.weight": value for name, value in packed.items()}, "compressed-tensors")
    )


def pack_copy(params: Any) -> Any:
    """The usual engine's weights: float8 codes of a bfloat16 copy."""
    copy = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    return pack_masters(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="10 updates of the policy in place of 60")
    steps = 10 if parser.parse_args().small else 60
    print(f"training {steps} steps with a float8 engine, and {steps} in the usual setup", file=sys.stderr)
    print("step  reward  equal logits  divergence | reward  divergence, usual setup")
    rows = zip(train(low, pack_masters, steps), train(logits, pack_copy, steps), strict=True)
    for step, ((reward, equal, kl), (usual_reward, _, usual_kl)) in enumerate(rows):
        if step % max(1, steps // 6) == 0 or step == steps - 1:
            print(f"{step:4}  {reward:6.3f}  {equal!s:12}  {kl:10.1e} | {usual_reward:6.3f}  {usual_kl:10.1e}")


if __name__ == "__main__":
    main()
