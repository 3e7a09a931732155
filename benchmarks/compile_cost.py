"""What it costs to trace, lower and compile programs that round: a training step, an optimizer, an emulated program.

    python benchmarks/compile_cost.py [--repeat 9] [--only CASE ...]
    pip install qwix                                 # adds qwix's quantization-aware training to the table

Seconds are those of the processor, which other programs on the machine change little. "lines" are those of StableHLO,
as JAX lowers the program; "optimized" those of XLA's program for this device. JAX's caches are emptied before each
case. Steps are timed in turn, after everything has been compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jchop as jc

INT8 = jc.nn.Rule(weight="int8(group=all)", activation="int8(group=all)", gradient="int8(group=all)")
RULES = {
    "int8": INT8,
    "int8, forward only": jc.nn.Rule(weight="int8(group=all)", activation="int8(group=all)"),
    "nvfp4": jc.nn.recipe("nvfp4"),
    "mxfp8": jc.nn.recipe("mxfp8"),
}
#: The formats of weights, activations and gradients in qwix, for the rules of the same names.
IN_QWIX = {"int8": ("int8", "int8", "int8"), "int8, forward only": ("int8", "int8", None)}

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class LanguageModel(nnx.Module):
    """Two blocks of width 64 that predict the next of 256 letters."""

    def __init__(self, *, rngs: nnx.Rngs, blocks: int = 2, width: int = 64, letters: int = 256) -> None:
        self.embed = nnx.Embed(letters, width, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2 * blocks)])
        self.attention = nnx.List([nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs) for _ in range(blocks)])
        self.up = nnx.List([nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(blocks)])
        self.down = nnx.List([nnx.Linear(4 * width, width, rngs=rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, letters, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        for i, (attention, up, down) in enumerate(zip(self.attention, self.up, self.down, strict=True)):
            x = x + attention(self.norms[2 * i](x), mask=mask)
            x = x + down(nnx.gelu(up(self.norms[2 * i + 1](x))))
        return self.head(x)


# -- programs ----------------------------------------------------------------------------------------------------------


def training_step(model: Any, tokens: Any) -> Program:
    """A step of stochastic gradient descent, as a function of arrays."""
    graph, state = nnx.split(model)
    labels = jnp.roll(tokens, -1, axis=-1)

    def step(state: Any, tokens: Any, labels: Any) -> Any:
        model = nnx.merge(graph, state)

        def loss_of(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), labels).mean()

        loss, gradient = nnx.value_and_grad(loss_of)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))
        return loss, nnx.state(model)

    return step, (state, tokens, labels)


def models(tokens: Any) -> dict[str, Callable[[], Program]]:
    def plain() -> Any:
        return LanguageModel(rngs=nnx.Rngs(0, rounding=1))

    made: dict[str, Callable[[], Program]] = {"float32": lambda: training_step(plain(), tokens)}
    for name, rule in RULES.items():
        made[name] = lambda rule=rule: training_step(jc.nn.quantize(plain(), rule, rngs=nnx.Rngs(rounding=1)), tokens)
    if importlib.util.find_spec("qwix"):
        import qwix

        for name, (weight, activation, gradient) in IN_QWIX.items():
            rule = qwix.QtRule(weight_qtype=weight, act_qtype=activation, bwd_qtype=gradient)
            made[f"qwix: {name}"] = lambda rule=rule: training_step(
                qwix.quantize_model(plain(), qwix.QtProvider([rule]), tokens), tokens
            )
    return made


def optimizing_step(tx: Any) -> Program:
    """A step of an optimizer on the parameters of a model of four blocks."""
    params = nnx.to_pure_dict(nnx.state(LanguageModel(rngs=nnx.Rngs(0), blocks=4), nnx.Param))
    gradients = jax.tree.map(lambda p: 0.01 * p, params)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.jit(tx.init)(params), gradients)


def network(layers: int) -> Program:
    """An unrolled network with norms and softmax: 20 and more equations a layer."""
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys[1:]]

    def run(x: Any, weights: Any) -> Any:
        for a, b in zip(weights[::2], weights[1::2], strict=True):
            centred = x - jnp.mean(x, axis=-1, keepdims=True)
            normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
            scores = normed @ normed.T / math.sqrt(x.shape[-1])
            x = x + jax.nn.softmax(scores) @ (normed @ a)
            x = x + jnp.tanh(x @ b) * jax.nn.sigmoid(x)
        return x

    return run, (jax.random.normal(keys[0], (16, 32)), weights)


def emulated(spec: str, layers: int = 12) -> Program:
    run, args = network(layers)
    key = jax.random.key(1) if jc.parse(spec).rounding.stochastic else None
    return jc.emulate(run, spec, key=key), args


def elementwise(count: int, size: int = 4096) -> Program:
    """A sequence of products, quotients, sums and roots."""

    def run(x: Any, y: Any) -> Any:
        for i in range(count):
            x = (x + y, x * y, x / y, jnp.sqrt(jnp.abs(x)))[i % 4]
        return x

    return run, (jnp.linspace(0.5, 1.5, size), jnp.linspace(0.75, 1.25, size))


def cases() -> dict[str, Callable[[], Program]]:
    tokens = jax.random.randint(jax.random.key(0), (8, 32), 0, 256)
    made = models(tokens)
    made["optax.adamw"] = lambda: optimizing_step(optax.adamw(1e-3))
    made["adamw8bit"] = lambda: optimizing_step(jc.optim.adamw8bit(1e-3))
    made["adamw4bit"] = lambda: optimizing_step(jc.optim.adamw4bit(1e-3))
    made["network of 12 layers"] = lambda: network(12)
    for spec in ("bfloat16", "e4m3", "bfloat16:stochastic"):
        made[f"emulate, network, {spec}"] = lambda spec=spec: emulated(spec)
    made["elementwise, 100"] = lambda: elementwise(100)
    chain, _ = elementwise(100)
    made["emulate, elementwise, bfloat16"] = lambda: (jc.emulate(chain, "bfloat16"), elementwise(100)[1])
    return made


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one program cost, in seconds of the processor and in lines."""

    trace: float
    lower: float
    lines: int
    compile: float
    optimized: int


def cost_of(program: Program) -> tuple[Cost, Callable[[], Any]]:
    function, args = program
    jax.clear_caches()
    jax.jit(lambda x: x * 2)(1.0)
    times = [time.process_time()]
    traced = jax.jit(function).trace(*args)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lines = lowered.as_text().count("\n")
    start = time.process_time()
    compiled = lowered.compile()
    times.append(time.process_time() - start)
    optimized = (compiled.as_text() or "").count("\n")
    cost = Cost(times[1] - times[0], times[2] - times[1], lines, times[3], optimized)
    return cost, lambda: jax.block_until_ready(compiled(*args))


def step_times(runs: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median milliseconds of the processor in a call of each program, in turn."""
    calls = {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(0.05 / (time.perf_counter() - start)))
    spent: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for _ in range(repeat):
        for name in draw.sample(list(runs), len(runs)):
            start = time.process_time()
            for _ in range(calls[name]):
                runs[name]()
            spent[name].append(1e3 * (time.process_time() - start) / calls[name])
    return {name: float(np.median(times)) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="names of cases")
    options = parser.parse_args()
    made, costs, runs = cases(), {}, {}
    for name in options.only or made:
        costs[name], runs[name] = cost_of(made[name]())
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__name__} {jc.__version__}\n")
    print("| program | trace, s | lower, s | lines | compile, s | optimized | step, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    steps = step_times(runs, options.repeat)
    for name, cost in costs.items():
        seconds = f"{cost.trace:.2f} | {cost.lower:.2f} | {cost.lines:,} | {cost.compile:.2f}"
        print(f"| {name} | {seconds} | {cost.optimized:,} | {steps[name]:.3f} |")


if __name__ == "__main__":
    main()
