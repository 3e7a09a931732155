"""What a step of quantization-aware training costs beside one in float32: a network of convolutions, a transformer.

    python benchmarks/nn.py [--repeat 9] [--batch 64]
    taskset -c 0 python benchmarks/nn.py --processor # the processor's time in place of the clock's: for a busy machine
    pip install qwix                                 # adds qwix's quantization-aware training to the tables
    python benchmarks/nn.py --memory                 # instead: the bytes of a transformer packed to int4, and the peak

All steps run in one process, in turn, and are quoted as ratios of medians. Memory is measured in a process of its own
(Linux), as the largest resident size since the model was made, beyond what was resident before.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rounding import Case, measure, table

import jchop as jc

RULES = {
    "int8 weights": jc.Rule(weight="int8(group=all)"),
    "int8 weights and activations": jc.Rule(weight="int8(group=all)", activation="int8"),
    "e4m3 weights and activations": jc.Rule(weight="e4m3", activation="e4m3"),
    "float8_tensorwise": jc.nn.recipe("float8_tensorwise"),
    "mxfp8": jc.nn.recipe("mxfp8"),
}

#: What a rule is in qwix: the formats of weights and activations. Scales of weights are those of channels, as here;
#: of activations those of rows, here of the array.
IN_QWIX = {"int8 weights": ("int8", None), "int8 weights and activations": ("int8", "int8")}


class Images(nnx.Module):
    """Two convolutions and two layers, for images of 8 x 8."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(512, 64, rngs=rngs)
        self.output = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv2(nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))))
        return self.output(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Transformer(nnx.Module):
    """Two blocks of width 128 on sequences of 32."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.List([nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs) for _ in range(2)])
        self.up = nnx.List([nnx.Linear(128, 512, rngs=rngs) for _ in range(2)])
        self.down = nnx.List([nnx.Linear(512, 128, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(x)
            x = x + down(nnx.gelu(up(x)))
        return x


def step_of(model: Any, x: Any) -> Case:
    """A step of Adam on the mean square of the output."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    return lambda: jax.block_until_ready(step(model, optimizer, x))


def cases_of(make: Any, x: Any) -> dict[str, Case]:
    cases = {"float32": step_of(make(rngs=nnx.Rngs(0)), x)}
    for name, rule in RULES.items():
        cases[name] = step_of(jc.nn.quantize(make(rngs=nnx.Rngs(0)), rule), x)
    if importlib.util.find_spec("qwix"):
        import qwix

        for name, (weight, activation) in IN_QWIX.items():
            provider = qwix.QtProvider([qwix.QtRule(weight_qtype=weight, act_qtype=activation)])
            cases[f"qwix: {name}"] = step_of(qwix.quantize_model(make(rngs=nnx.Rngs(0)), provider, x), x)
    return cases


def processor_time(cases: dict[str, Case], repeat: int) -> dict[str, float]:
    """Median seconds of the processor in a call of each case, in turn: what other programs take of it counts little."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    draw = random.Random(0)
    for _ in range(repeat):
        for name in draw.sample(list(cases), len(cases)):
            cases[name]()
            start = time.process_time()
            cases[name]()
            seconds[name].append(time.process_time() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


# -- memory ------------------------------------------------------------------------------------------------------------

PACKED = jc.Rule(weight="int4(group=128)")


class Decoder(nnx.Module):
    """The kernels of a transformer: 14 blocks of width 768 and 2048 letters hold 100 million numbers."""

    def __init__(self, blocks: int, *, rngs: nnx.Rngs, width: int = 768, letters: int = 2048) -> None:
        more: dict[str, Any] = {"use_bias": False, "rngs": rngs}
        self.embed = nnx.Embed(letters, width, rngs=rngs)
        self.attention = nnx.List([nnx.MultiHeadAttention(12, width, decode=False, **more) for _ in range(blocks)])
        self.up = nnx.List([nnx.Linear(width, 4 * width, **more) for _ in range(blocks)])
        self.down = nnx.List([nnx.Linear(4 * width, width, **more) for _ in range(blocks)])


def resident(what: str) -> int:
    """Bytes, as the kernel counts them: VmRSS now, VmHWM at most."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def packed(blocks: int) -> None:
    """Make a model, pack it, let the first one go, and print what each step held."""
    jax.block_until_ready(nnx.state(jc.nn.quantize(Decoder(1, rngs=nnx.Rngs(0)), PACKED, mode="weight_only")))
    before = resident("VmRSS")  # everything is compiled
    model = Decoder(blocks, rngs=nnx.Rngs(0))
    jax.block_until_ready(nnx.state(model))
    original = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    small = jc.nn.quantize(model, PACKED, mode="weight_only")
    jax.block_until_ready(nnx.state(small))
    peak = resident("VmHWM") - before
    del model
    live = sum(array.nbytes for array in jax.live_arrays())
    print(f"{original // 4:,} parameters in float32: {original / 1e6:.1f} MB")
    print(f"live arrays once packed: {live / 1e6:.1f} MB, {live / original:.4f} of that")
    print(f"resident while packing, at most: {peak / 1e6:.1f} MB, {peak / original:.3f} of that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--processor", action="store_true", help="measure the processor's time; run it on one core")
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    parser.add_argument("--pack", type=int, help=argparse.SUPPRESS)  # what the process of its own does
    chosen = parser.parse_args()
    if chosen.memory:
        # What is freed goes back at once, so that the peak is the program's and not what the allocator keeps.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run([sys.executable, __file__, "--pack", "14"], check=True, env=environment)
        return
    if chosen.pack:
        packed(chosen.pack)
        return
    for make, shape in ((Images, (chosen.batch, 8, 8, 1)), (Transformer, (chosen.batch, 32, 128))):
        x = jax.random.normal(jax.random.key(0), shape)
        medians = (processor_time if chosen.processor else measure)(cases_of(make, x), chosen.repeat)
        table(f"{make.__name__}, input {shape}", medians, "float32", x.size)


if __name__ == "__main__":
    main()
