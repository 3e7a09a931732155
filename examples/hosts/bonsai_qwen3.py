"""Bonsai: its Qwen3, from random weights to tokens of a model in int4.

    git clone https://github.com/jax-ml/bonsai && git -C bonsai checkout 36284254cf738d99c1c5d1e3a292d27656a0a365
    pip install jaxtyping && PYTHONPATH=bonsai python examples/hosts/bonsai_qwen3.py

The model takes keyword arguments, and changes its cache. The packed one generates the tokens of a model of Bonsai whose
parameters were rounded one by one.
"""

import jax
import jax.numpy as jnp
from bonsai.models.qwen3 import modeling
from flax import nnx

import jchop as jc

SIZES = {"num_layers": 2, "vocab_size": 256, "emb_dim": 64, "mlp_dim": 128, "num_heads": 4, "head_dim": 16}
ROPE = {"rope_theta": 10_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4}
CONFIG = modeling.ModelConfig(**SIZES, **ROPE, num_kv_heads=2, norm_eps=1e-6, tie_word_embeddings=True)


def inputs_of(tokens, cache):
    return {"tokens": tokens, "cache": cache, "segment_ids": jnp.ones_like(tokens)}


def generate(model, tokens, count):
    """Greedy tokens, and the logits of the prompt."""
    cache, found, first = modeling.init_cache(CONFIG, 1, 4, 8, jnp.float32), [], None
    for _ in range(count):
        logits = model(**inputs_of(tokens, cache))
        first = logits if first is None else first
        tokens = logits[:, -1:].argmax(-1)
        found.append(int(tokens[0, 0]))
    return found, first


def rounded_by_hand(model):
    """A copy whose matrices are rounded in groups of 32 numbers along their sums; o_proj sums over heads, too."""
    copy = nnx.clone(model)
    for path, param in nnx.iter_graph(copy):
        if isinstance(param, nnx.Param) and param.ndim > 1 and path[0] != "embedder":
            groups = "group=(all,8),axis=(0,1)" if "o_proj" in path else "group=32,axis=0"
            param[...] = jc.round_to_format(param[...], f"int4({groups})")
    return copy


def main():
    model, tokens = modeling.Qwen3(CONFIG, rngs=nnx.Rngs(0)), jnp.array([[1, 5, 9, 3]])
    given = inputs_of(tokens, modeling.init_cache(CONFIG, 1, 4, 8, jnp.float32))
    packed = jc.nn.quantize(model, {"embedder": None, "*": "int4(group=32)"}, mode="ptq", inputs=given)
    (ours, logits), (hand, wanted) = generate(packed, tokens, 6), generate(rounded_by_hand(model), tokens, 6)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(each))) for each in (packed, model)]
    print("tokens:", *ours, "| by hand:", *hand, "| float32:", *generate(model, tokens, 6)[0])
    print(f"largest difference of logits from those by hand: {float(jnp.abs(logits - wanted).max())}")
    print(f"bytes: {sizes[0]:,}; in float32: {sizes[1]:,}")
    return ours, hand, sizes


if __name__ == "__main__":
    main()
