"""A model of Flax NNX with attention, a tied embedding and experts, exported by jchop and run by transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc

nnx = pytest.importorskip("flax.nnx")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of other packages

WIDTH, INNER, HEADS, EXPERTS, VOCABULARY, THETA = 128, 256, 4, 4, 320, 1e4
CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "hidden_act": "silu",
    "sliding_window": None,
}  # fmt: skip


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embeddings of (batch, position, head, number), whose halves are pairs."""
    size = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None] / THETA ** (jnp.arange(0, size, 2) / size)
    sin, cos = (f(jnp.concatenate([angles, angles], -1))[:, None] for f in (jnp.sin, jnp.cos))
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    return nnx.dot_product_attention(rotated(query), rotated(key), value, **options)


class Expert(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.w1, self.w3 = (nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs) for _ in range(2))
        self.w2 = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(nnx.silu(self.w1(x)) * self.w3(x))


class Experts(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.gate = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = nnx.List([Expert(rngs) for _ in range(EXPERTS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        chances, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(x)), 2)
        chances /= chances.sum(-1, keepdims=True)
        shares = (jax.nn.one_hot(chosen, EXPERTS) * chances[..., None]).sum(-2)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Layer(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.self_attn = nnx.MultiHeadAttention(
            HEADS, WIDTH, num_kv_heads=2, use_bias=False, decode=False, attention_fn=attend, rngs=rngs
        )
        self.input_layernorm, self.post_attention_layernorm = (
            nnx.RMSNorm(WIDTH, epsilon=1e-5, rngs=rngs) for _ in range(2)
        )
        self.block_sparse_moe = Experts(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.self_attn(self.input_layernorm(x), mask=mask)
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed_tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.attend(self.norm(x))


#: Errors of sums in binary32, of at most 256 products, relative to the largest logit: seven layers of products.
TOLERANCE = 2.0**-17


@pytest.mark.parametrize("weight", [None, "int4(group=32)", "float8_e4m3fn(channel=0)"])
def test_transformers_runs_a_model_of_flax(weight: str | None, tmp_path: Path) -> None:
    """Weights are equal, and logits to the order of sums."""
    model = Model(nnx.Rngs(0))
    for path, norm in nnx.iter_modules(model):
        if isinstance(norm, nnx.RMSNorm):  # no norm is that of the start
            norm.scale[...] = 1 + 0.1 * jax.random.normal(jax.random.key(len(path)), norm.scale.shape)
    rules = {} if weight is None else {"layers/*/self_attn/*": weight, "layers/*/block_sparse_moe/experts/*/*": weight}
    packed = jc.nn.quantize(model, rules, mode="ptq") if rules else model
    names = "model.{}".format
    layout = "plain" if weight is None else "compressed-tensors"
    jc.save_checkpoint(tmp_path / "m", packed, layout, names=names, config=CONFIG)
    tensors = set(jc.load_checkpoint(tmp_path / "m"))
    assert "model.layers.1.self_attn.k_proj.weight" in tensors and not any("lm_head" in name for name in tensors)
    fields = json.loads((tmp_path / "m/config.json").read_text()).get("quantization_config", {})
    assert not fields or "lm_head" in fields["ignore"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    ids = np.arange(12)[None] * 7 % VOCABULARY
    with torch.no_grad():
        found = theirs(torch.from_numpy(ids)).logits.numpy()
    wanted = np.asarray(packed(jnp.asarray(ids)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
    assert weight is None or np.abs(wanted - np.asarray(model(jnp.asarray(ids)))).max() > 0.01
    again = jc.load_checkpoint(tmp_path / "m", like=nnx.eval_shape(lambda: Model(nnx.Rngs(0))), names=names)
    np.testing.assert_array_equal(again(jnp.asarray(ids)), wanted)
    print("largest error relative to the largest logit:", np.abs(found - wanted).max() / np.abs(wanted).max())
