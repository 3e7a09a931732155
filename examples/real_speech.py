"""A trained network that hears speech, with weights in few bits: in which parts of a recording does somebody speak?

    pip install --no-deps silero-vad==6.2.3 useful-moonshine-onnx==20251121
    python examples/real_speech.py [--small]

The wheel of silero-vad (MIT) holds a network of 0.3 million weights, which the program writes in JAX. The other wheel
(MIT) holds a spoken sentence of 10 s. The network gives each 32 ms of it a probability of speech. The program prints
the Kullback-Leibler divergence from the float32 network in nats, and the pieces with another answer.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import wave
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

FORMATS = (
    "int8(group=all)",
    "float8_e4m3fn(group=all)",
    "mxfp8_e4m3",
    "nvfp4",
    "mxfp4",
    "int4(group=32)",
    "int3(group=32)",
)
WEIGHTS = "conv2 conv3 conv4 lstm_input lstm_state"  # conv1 reads 129 channels, which no group of 32 divides
PIECE, CONTEXT, HOP, BINS = 512, 64, 128, 129


def network(p: dict[str, Any], pieces: Any) -> Any:
    """Logits of speech of pieces (number, context + 512 samples), one after the other."""

    def conv(x: Any, name: str, stride: int = 1) -> Any:
        y = jax.lax.conv_general_dilated(x, p[name], (stride,), [(1, 1)], dimension_numbers=("NCH", "OIH", "NCH"))
        return jax.nn.relu(y + p[name + "_bias"][:, None])

    x = jnp.pad(pieces, ((0, 0), (0, CONTEXT)), "reflect")
    frames = jnp.stack([x[:, i : i + 2 * HOP] for i in range(0, x.shape[1] - 2 * HOP + 1, HOP)], -1)
    waves = jnp.einsum("os,nst->not", p["stft"], frames)
    x = jnp.sqrt(waves[:, :BINS] ** 2 + waves[:, BINS:] ** 2)
    x = conv(conv(conv(conv(x, "conv1"), "conv2", 2), "conv3", 2), "conv4")[..., 0]

    def step(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(p["lstm_input"] @ x + p["lstm_state"] @ h + p["lstm_bias"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), p["out"] @ jax.nn.relu(h) + p["out_bias"]

    zeros = jnp.zeros(p["lstm_state"].shape[1])
    return jax.lax.scan(step, (zeros, zeros), x)[1][:, 0]


def weights() -> dict[str, Any]:
    """The parameters in the wheel of silero-vad."""
    stored = jc.load_checkpoint(folder("silero_vad") / "data/silero_vad_16k.safetensors", layout="plain")
    p = {name: stored[f"{name}.weight"] for name in ("conv1", "conv2", "conv3", "conv4")}
    p |= {f"{name}_bias": stored[f"{name}.bias"] for name in p}
    p |= {"stft": stored["stft_conv.weight"][:, 0], "out": stored["final_conv.weight"][..., 0]}
    p |= {"lstm_input": stored["lstm_cell.weight_ih"], "lstm_state": stored["lstm_cell.weight_hh"]}
    p["lstm_bias"] = stored["lstm_cell.bias_ih"] + stored["lstm_cell.bias_hh"]
    return p | {"out_bias": stored["final_conv.bias"]}


def recording() -> Any:
    """Pieces of the sentence, with the end of the piece before in front: (number, 576)."""
    with wave.open(str(folder("moonshine_onnx") / "assets/beckett.wav")) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 2**15
    sound = np.pad(sound, (CONTEXT, -len(sound) % PIECE))
    return jnp.asarray(np.stack([sound[i : i + CONTEXT + PIECE] for i in range(0, len(sound) - CONTEXT, PIECE)]))


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit("needs: pip install --no-deps silero-vad==6.2.3 useful-moonshine-onnx==20251121")
    return Path(spec.origin).parent


def divergence(exact: Any, logits: Any) -> float:
    """The mean of Σ p log(p / q) over speech and silence, for the logits of p and q."""
    p, log_p, log_q = jax.nn.sigmoid(exact), jax.nn.log_sigmoid, jax.nn.log_sigmoid
    no = (1 - p) * (log_p(-exact) - log_q(-logits))
    return float((p * (log_p(exact) - log_q(logits)) + no).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="three formats")
    options = parser.parse_args(argv)
    p, pieces = weights(), recording()
    print(f"reading {len(pieces)} pieces", file=sys.stderr)
    exact = jax.jit(network)(p, pieces)
    print(f"{len(pieces)} pieces, {int((exact > 0).sum())} with speech in float32")
    print(f"{'weights':28} {'divergence':>10}  other answers")
    for text in FORMATS[::3] if options.small else FORMATS:
        low = jc.quantize_fn(network, {WEIGHTS: text})
        logits = jax.jit(low)(low.pack(p, pieces), pieces)
        other = int(((exact > 0) != (logits > 0)).sum())
        print(f"{text:28} {divergence(exact, logits):10.5f}  {other}", flush=True)


if __name__ == "__main__":
    main()
