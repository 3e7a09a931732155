"""The examples run, and show that training in a few bits works."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_cases import EXAMPLES, SCRIPTS, load
from flax import nnx
from further import Further

import jchop as jc

further = Further()

slow = pytest.mark.slow


def digits(rows: list[list[str]]) -> None:
    """Two bits lose accuracy, and training brings it back."""
    (head, *_), *lines = rows
    assert head == "weights" and len(lines) == 3 and lines[0][0] == "float32"
    float32, _, two_bits = (list(map(float, line[1:])) for line in lines)
    assert two_bits[0] < float32[0] - 0.1 and min(two_bits[1:3]) > float32[1] - 0.03


def sums(rows: list[list[str]]) -> None:
    """Sums in e5m2 collapse to nearest, and not stochastically."""
    nearest, stochastic = (float(row[1]) for row in rows[1:])
    assert nearest < stochastic - 0.05


def transformer(rows: list[list[str]]) -> None:
    """It learns in eight bits."""
    exact, rounded = (float(row[-1]) for row in rows)
    assert exact < 3.4 and abs(rounded - exact) < 0.1


def packed(rows: list[list[str]]) -> None:
    """It is packed."""
    table = {row[0]: row[1:] for row in rows[1:]}
    exact, eight, four = (float(table[name][0]) for name in ("float32", "mxfp8_e4m3", "mxfp4"))
    assert abs(eight - exact) < 0.02 * exact and exact < four < 1.3 * exact
    assert int(table["mxfp4"][1]) < 0.17 * int(table["float32"][1])


CHECKS = {"qat_digits": digits, "accumulators": sums, "transformer_training": transformer, "ptq_transformer": packed}
LEAST = {"int8 × int8": 39, "e4m3fn × e4m3fn": 28, "int4, cache int8": 19}


def serve(kind: str, names: tuple[str, ...]) -> None:
    """Width 128, depth 2, prompts of up to 48 tokens; decibels of all their logits."""
    serving = load("serving")
    rows = {name: (snr, served) for name, snr, served in serving.table(serving.SMALL, kind, 12, ("float32", *names))}
    assert {name: rows[name][0] for name in names if not LEAST[name] <= rows[name][0] < 60} == {}
    exact, low = rows["float32"][1], rows["int4, cache int8"][1]
    assert low.weights < 0.3 * exact.weights and low.cache < 0.32 * exact.cache  # letters stay in float32
    assert exact.tokens.shape == low.tokens.shape == (4, 12)


# -- examples/llama: its files mean in NumPy what the model computes, and the whole way holds what its page says ------


@pytest.fixture
def llama(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS["llama"].parent))
    for name in ("llama_model", "llama_serve", "llama_train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return load("llama")


def reference(w: dict[str, np.ndarray], config: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence in float64, from the tensors of a file by Hugging Face's names, (out, in)."""
    size, count = config.hidden_size // config.num_attention_heads, len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * w[f"{name}.weight"]

    def heads(x: np.ndarray, name: str, turns: bool) -> np.ndarray:
        x = (x @ w[f"{name}.weight"].T).reshape(count, -1, size)
        if not turns:
            return x
        pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]  # a rotation is a product of complex numbers
        rates = config.rope_theta ** (-2 * np.arange(size // 2) / size)
        pairs = pairs * np.exp(1j * np.arange(count)[:, None, None] * rates)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k = heads(y, f"{at}.self_attn.q_proj", True), heads(y, f"{at}.self_attn.k_proj", True)
        v, out = heads(y, f"{at}.self_attn.v_proj", False), np.zeros_like(q)
        for head in range(config.num_attention_heads):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            scores = q[:, head] @ k[:, shared].T / math.sqrt(size)
            scores = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf))
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, shared]
        x = x + out.reshape(count, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def llama_files(llama: Any, tied: bool, tmp_path: Path) -> None:
    """The files mean what the model computes."""
    config = llama.Config(32, 16, 24, 1 + tied, 4, 2, tie_word_embeddings=tied)
    model = llama.Llama(config, rngs=nnx.Rngs(3))
    jc.save_checkpoint(tmp_path / "f", model, "plain", config=config.as_json(), shard_bytes=4096)
    assert len(list((tmp_path / "f").glob("model-*-of-*.safetensors"))) > 1
    tensors = {k: np.asarray(v, np.float64) for k, v in jc.load_checkpoint(tmp_path / "f").items()}
    assert ("lm_head.weight" in tensors) != tied
    tokens = np.random.default_rng(0).integers(0, 32, (2, 8))
    wanted = np.stack([reference(tensors, config, row) for row in tokens])
    np.testing.assert_allclose(model(jnp.asarray(tokens)), wanted, rtol=1e-3, atol=1e-5)
    caches = llama.empty_caches(config, 2, 8, None)
    first, caches = model.step(jnp.asarray(tokens[:, :4]), np.arange(4)[None].repeat(2, 0), caches)
    second, _ = model.step(jnp.asarray(tokens[:, 4:]), np.arange(4, 8)[None].repeat(2, 0), caches)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), wanted, rtol=1e-3, atol=1e-5)


def llama_whole_way(llama: Any, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    ways: list[Any] = []
    way = llama.whole_way
    monkeypatch.setattr(llama, "whole_way", lambda *args, **kwargs: ways.append(way(*args, **kwargs)) or ways[-1])
    picture, folder = tmp_path / "llama.png", tmp_path / "files"
    words = ["--small", "--steps", "60", "--plot", str(picture), "--folder", str(folder)]
    monkeypatch.setattr(sys, "argv", ["examples/llama", *words])
    llama.main()
    rows, live, exported = {row.name: row for row in ways[0].rows}, ways[0].live, ways[0].exported
    assert "tokens of the exported model are those of the live one" in capsys.readouterr().out
    np.testing.assert_array_equal(live.tokens, exported.tokens)
    np.testing.assert_array_equal(live.logits, exported.logits)
    assert picture.read_bytes().startswith(b"\x89PNG")

    same = ("saved and loaded", "with adapters", "adapters loaded", "saved and loaded again")
    assert all(rows[name].decibels == math.inf for name in same)  # bit for bit
    assert rows["trained"].code < math.log(256) - 1.5
    assert 18 < rows["jchop quantize"].decibels < rows["GPTQ, loaded"].decibels
    assert rows["fine-tuned (QLoRA)"].prose < rows["GPTQ, loaded"].prose - 0.1
    assert rows["merged, float32"].decibels > 100 > rows["merged, packed again"].decibels > 15
    assert rows["GPTQ, loaded"].nbytes == rows["saved and loaded again"].nbytes < 0.45 * rows["trained"].nbytes
    whole = llama.Llama(llama.SMALL, rngs=nnx.Rngs(0))
    served = jc.load_checkpoint(folder / "merged", like=whole)
    assert live.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(served)))
    exact = jc.load_checkpoint(folder / "gptq", like=whole)
    assert str(exact.model.layers[0].mlp.up_proj.kernel[...].spec) == "int4(group=32,axis=-2,scale=bfloat16)"


OTHERS = ("paged", "kinds of caches", "llama files", "llama tied files", "llama whole way")


@further.first
@pytest.mark.parametrize("name", ["two bits", *(pytest.param(name, marks=slow) for name in (*CHECKS, *OTHERS))])
def an_example_shows_what_it_says(name: str, request: Any, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    if name.startswith("llama"):
        llama = request.getfixturevalue("llama")
        if name == "llama whole way":
            return llama_whole_way(llama, monkeypatch, capsys, tmp_path)
        return llama_files(llama, "tied" in name, tmp_path)
    if name == "two bits":
        example = load("qat_digits")
        table = example.run(example.FORMATS[-1:], steps=150, tuning=60, hidden=32)
        (exact, *_), (before, after, distilled, size) = table["float32"], table[example.FORMATS[-1]]
        assert before < exact - 0.1 and size < 1500  # of 13,864 bytes
        assert min(after, distilled) - before > (exact - before) / 2
    elif name == "paged":
        serve(name, tuple(LEAST))
    elif name == "kinds of caches":  # a rolling cache attends to a window, which holds all tokens here
        example = load("serving")
        sizes = example.Sizes(width=64, depth=1, heads=4, letters=32, prompt=20, window=40)
        params, choice = example.make(sizes), example.CHOICES["cache int8"]
        full, *others = (example.serve(params, choice, sizes, kind, 8).tokens for kind in ("full", "rolling", "paged"))
        for tokens in others:
            np.testing.assert_array_equal(tokens, full)
        for kind in ("full", "paged"):  # drafted by the packed model, and checked
            plain, drafted = (
                example.serve(params, example.CHOICES[n], sizes, kind, 8) for n in ("float32", "int8 drafts")
            )
            np.testing.assert_array_equal(drafted.tokens, plain.tokens)
            assert drafted.steps < plain.steps == 7
    else:
        picture = tmp_path / "drawn.png"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--small", "--plot", str(picture)])
        load(name).main()
        CHECKS[name]([line.split() for line in capsys.readouterr().out.splitlines()])
        assert picture.read_bytes().startswith(b"\x89PNG")


test_further = further.test()
