"""A Llama-shaped model the whole way: trained, saved, quantized, loaded, fine-tuned, merged, served, exported.

    python examples/llama [--small] [--folder DIR] [--tied] [--cache SPEC] [--plot qlora.png]

The model learns to continue source code, a byte a token. Its files have the layout and the names of Hugging Face. It is
quantized to 4 bits by `jchop quantize` and by GPTQ, and loaded again from both. Adapters beside the packed weights then
learn another text, prose (QLoRA), and are merged. The result is served with a packed cache of keys and values, and
exported. Each line shows the losses on both texts, in nats, the decibels of the logits against those of an earlier
line, and the bytes of the parameters. Needs `pip install ".[flax,optax]"`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from llama_model import SMALL, Config, Llama
from llama_serve import Served, Server, empty_caches
from llama_train import batches, evaluate, pieces, texts, train

import jchop as jc

WEIGHT = "int4(group=32,scale=bfloat16)"
#: The matrices of attention and of gated layers; embeddings, norms and the head stay in float32.
PACKED = "*_proj"


class Row(NamedTuple):
    """A line of the table."""

    name: str
    code: float
    prose: float
    decibels: float
    against: str
    nbytes: int


class Way(NamedTuple):
    """What the whole way gave: the table, tokens and rates of the live and of the exported model."""

    rows: list[Row]
    live: Served
    exported: Served


def decibels(y: Any, exact: Any) -> float:
    """Signal-to-noise ratio."""
    y, exact = np.asarray(y, np.float64), np.asarray(exact, np.float64)
    noise = np.sum((y - exact) ** 2)
    return float(10 * np.log10(np.sum(exact**2) / noise)) if noise else float("inf")


class Table:
    """The lines so far; each is printed at once."""

    def __init__(self, code: Any, prose: Any) -> None:
        self.code, self.prose = (pieces(text, jax.random.key(7), 32) for text in (code, prose))
        self.rows: list[Row] = []
        self.logits: dict[str, Any] = {}
        print(f"{'stage':30}{'code':>7}{'prose':>7}{'dB':>7}{'bytes':>12}  against", flush=True)

    def add(self, name: str, model: Any, against: str) -> None:
        code, logits = evaluate(model, self.code)
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        self.logits[name] = logits
        row = Row(
            name, float(code), float(evaluate(model, self.prose)[0]),
            decibels(logits, self.logits[against]), against, nbytes,
        )  # fmt: skip
        self.rows.append(row)
        shown = f"{row.decibels:.1f}" if np.isfinite(row.decibels) else "equal"
        print(f"{name:30}{row.code:7.3f}{row.prose:7.3f}{shown:>7}{nbytes:12,d}  {against}", flush=True)


def whole_way(config: Config, folder: Path, cache: str, *, steps: int, tuning: int, tokens: int) -> Way:
    """Every stage, with files in a folder."""
    code, prose = texts()
    table, fields = Table(code, prose), config.as_json()
    shape = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))

    model = Llama(config, rngs=nnx.Rngs(0))
    train(model, code, optax.adam(2e-3), wrt=nnx.Param, steps=steps, seed=0)
    table.add("trained", model, "trained")
    jc.nn.save_checkpoint(folder / "float32", model, "plain", config=fields, shard_bytes=1 << 22)
    table.add("saved and loaded", jc.nn.load_checkpoint(folder / "float32", shape), "trained")

    rule = f"{PACKED}.weight={WEIGHT}"
    command = ["quantize", str(folder / "float32"), str(folder / "nearest"), "--rule", rule]
    subprocess.run([sys.executable, "-m", "jchop", *command], check=True, capture_output=True)
    table.add("jchop quantize", jc.nn.load_checkpoint(folder / "nearest", shape), "trained")

    rounded = jc.nn.quantize(model, jc.Rule(PACKED, weight=WEIGHT), "ptq", batches=batches(code, 8, seed=1))
    jc.nn.save_checkpoint(folder / "gptq", rounded, "compressed-tensors", config=fields)
    packed = jc.nn.load_checkpoint(folder / "gptq", shape)
    table.add("GPTQ, loaded", packed, "trained")

    adapted = jc.nn.add_lora(packed, jc.nn.LoraRule(PACKED, rank=8, alpha=16), rngs=nnx.Rngs(1))
    table.add("with adapters", adapted, "GPTQ, loaded")
    train(adapted, prose, jc.optim.adamw8bit(5e-3), wrt=nnx.LoRAParam, steps=tuning, seed=2)
    table.add("fine-tuned (QLoRA)", adapted, "GPTQ, loaded")
    jc.nn.save_lora(folder / "adapter", adapted)
    table.add("adapters loaded", jc.nn.load_lora(folder / "adapter", packed), "fine-tuned (QLoRA)")

    table.add("merged, float32", jc.nn.merge_lora(adapted), "fine-tuned (QLoRA)")
    merged = jc.nn.merge_lora(adapted, requantize=True)
    table.add("merged, packed again", merged, "fine-tuned (QLoRA)")
    jc.nn.save_checkpoint(folder / "merged", merged, "compressed-tensors", config=fields)
    served = jc.nn.load_checkpoint(folder / "merged", shape)
    table.add("saved and loaded again", served, "merged, packed again")

    live = serve(served, config, table.prose[:4], tokens, cache)
    return Way(table.rows, live, serve(served, config, table.prose[:4], tokens, cache, folder))


def serve(model: Any, config: Config, whole: Any, tokens: int, cache: str, folder: Path | None = None) -> Served:
    """A model served live; with a folder by functions that were exported to files in it."""
    prompt = whole[:, :-1]
    server = Server(model, empty_caches(config, len(prompt), prompt.shape[1] + tokens, cache))
    if folder is not None:
        for name, data in zip(("prefill", "decode"), server.exported(prompt), strict=True):
            (folder / f"{name}.jax").write_bytes(data)
        server.load((folder / "prefill.jax").read_bytes(), (folder / "decode.jax").read_bytes())
    served = server.serve(prompt, tokens)
    name = "served" if folder is None else "served, exported"
    print(
        f"{name}: {served.prefilled:.0f} and {served.decoded:.0f} tokens a second read and written, {served.weights:,} "
        f"bytes of weights, {served.cache:,} of {cache} cache, logits "
        f"{decibels(served.logits, evaluate(model, whole)[1]):.1f} dB from those without a cache",
        flush=True,
    )
    return served


def draw(rows: list[Row], path: str) -> None:
    """The losses on both texts after each stage."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    names = [row.name for row in rows]
    axes.plot(names, [row.code for row in rows], "o-", label="source code, which it was trained on")
    axes.plot(names, [row.prose for row in rows], "s-", label="prose, which adapters learn")
    axes.set(ylabel="cross-entropy in nats", title="QLoRA: adapters beside 4-bit weights")
    axes.tick_params(axis="x", rotation=45)
    plt.setp(axes.get_xticklabels(), ha="right")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/llama", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--folder", type=Path, help="a new folder that keeps the files; default: none is kept")
    parser.add_argument("--tied", action="store_true", help="the head has the weights of the embedding")
    parser.add_argument("--cache", default="int8(group=all)", help="spec of keys and values; default int8(group=all)")
    parser.add_argument("--steps", type=int, help="of training; default 300, with --small 150")
    parser.add_argument("--plot", help="a PNG to draw the losses into")
    chosen = parser.parse_args()
    size = SMALL if chosen.small else Config()
    config = Config(**{**vars(size), "tie_word_embeddings": chosen.tied})
    steps = chosen.steps or (150 if chosen.small else 300)
    print(f"training {steps} steps, a model of width {config.hidden_size}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        way = whole_way(config, folder, chosen.cache, steps=steps, tuning=steps // 2, tokens=32)
    same = bool(jnp.array_equal(way.live.tokens, way.exported.tokens))
    print(f"tokens of the exported model are {'' if same else 'NOT '}those of the live one")
    if chosen.plot:
        draw(way.rows, chosen.plot)


if __name__ == "__main__":
    main()
