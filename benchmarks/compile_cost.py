"""What it costs to trace, lower and compile programs that round: a training step, an optimizer, an emulated program.

    python benchmarks/compile_cost.py [--runs 3] [--repeat 9] [--only CASE ...]
    pip install qwix                                 # adds qwix's quantization-aware training to the table

Seconds are those of the processor, which other programs on the machine change little; medians of runs, each of which
takes all cases in turn and empties JAX's caches before each. "lines" are those of StableHLO, as JAX lowers the program;
"optimized" those of XLA's program for this device. Ratios to qwix's program, or to the plain one, are of lines and of
the sum of tracing, lowering and compiling. Steps are timed in turn, after everything has been compiled. `--eager` adds
emulated functions without `jax.jit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jchop as jc

INT8 = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", gradient="int8(group=all)")
RULES = {
    "int8": INT8,
    "int8, forward only": jc.Rule(weight="int8(group=all)", activation="int8(group=all)"),
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


def step_of_function(model: Any, rule: jc.Rule, tokens: Any) -> Program:
    """A step of the same training by `quantize_fn`, which knows no layers."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    labels = jnp.roll(tokens, -1, axis=-1)
    low = jc.quantize_fn(lambda params, tokens: nnx.merge(graph, params, others)(tokens), rule)

    def step(params: Any, tokens: Any, labels: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(low(params, tokens), labels).mean()

        loss, gradient = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    return step, (params, tokens, labels)


def models(tokens: Any) -> dict[str, Callable[[], Program]]:
    def plain() -> Any:
        return LanguageModel(rngs=nnx.Rngs(0, rounding=1))

    made: dict[str, Callable[[], Program]] = {"float32": lambda: training_step(plain(), tokens)}
    for name, rule in RULES.items():
        made[name] = lambda rule=rule: training_step(jc.nn.quantize(plain(), rule, rngs=nnx.Rngs(rounding=1)), tokens)
    made["int8, any program"] = lambda: step_of_function(plain(), INT8, tokens)
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


def runge_kutta(steps: int = 6) -> Program:
    """Unrolled steps of Dormand and Prince's method for 64 pendulums with drag: 966 equations."""
    table = (
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    )

    def slope(angle: Any, speed: Any) -> tuple[Any, Any]:
        return speed, -jnp.sin(angle) - 0.1 * speed * jnp.sqrt(1 + speed * speed) / jnp.exp(0.01 * angle)

    def run(angle: Any, speed: Any) -> Any:
        for _ in range(steps):
            slopes = []
            for weights in table:
                a, s = angle, speed
                for weight, (da, ds) in zip(weights, slopes, strict=True):
                    a, s = a + 0.05 * weight * da, s + 0.05 * weight * ds
                slopes.append(slope(a, s))
            angle, speed = a, s
        return angle, speed

    return run, (jnp.linspace(0.1, 1.0, 64), jnp.linspace(-1.0, 1.0, 64))


def cases() -> dict[str, Callable[[], Program]]:
    tokens = jax.random.randint(jax.random.key(0), (8, 32), 0, 256)
    made = models(tokens)
    made["optax.adamw"] = lambda: optimizing_step(optax.adamw(1e-3))
    made["adamw8bit"] = lambda: optimizing_step(jc.optim.adamw8bit(1e-3))
    made["adamw4bit"] = lambda: optimizing_step(jc.optim.adamw4bit(1e-3))
    for program, (run, args) in {"network": network(12), "Runge-Kutta": runge_kutta()}.items():
        made[program] = lambda run=run, args=args: (run, args)
        for spec in ("bfloat16", "e4m3", "bfloat16:stochastic"):
            key = jax.random.key(1) if jc.Spec(spec).rounding.stochastic else None
            low = jc.emulate(run, spec, key=key)
            made[f"emulate, {program}, {spec}"] = lambda low=low, args=args: (low, args)
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


def other_of(name: str) -> str | None:
    """The case that another is compared with: the plain program, or the same training in qwix."""
    if name.startswith("emulate, "):
        return name.split(", ")[1]
    if name.startswith("adamw"):
        return "optax.adamw"
    known = {"int8, any program": "int8", "nvfp4": "int8", "mxfp8": "int8"}
    return None if name.startswith("qwix") or name in ("float32", "optax.adamw") else f"qwix: {known.get(name, name)}"


def median_of(costs: list[Cost]) -> Cost:
    return Cost(*(np.median(values).item() for values in zip(*(astuple(cost) for cost in costs), strict=True)))


def total(cost: Cost) -> float:
    return cost.trace + cost.lower + cost.compile


def eager_times(repeat: int) -> None:
    """Calls without `jax.jit`: the first, and later ones, beside the plain function, which runs op by op, too."""
    print("\n| outside of jit | first call, s | later, ms | plain, ms | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for program, (run, args) in {"network": network(12), "Runge-Kutta": runge_kutta()}.items():
        for spec in ("bfloat16", "e4m3", "bfloat16:stochastic"):
            key = jax.random.key(1) if jc.Spec(spec).rounding.stochastic else None
            low = jc.emulate(run, spec, key=key)
            start = time.process_time()
            jax.block_until_ready(low(*args))
            first = time.process_time() - start
            calls = {"low": partial(low, *args), "plain": partial(run, *args)}
            steps = step_times({name: lambda f=f: jax.block_until_ready(f()) for name, f in calls.items()}, repeat)
            ratio = steps["low"] / steps["plain"]
            each = f"{first:.1f} | {steps['low']:.1f} | {steps['plain']:.1f} | {ratio:.1f}"
            print(f"| emulate, {program}, {spec} | {each} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    made, runs = cases(), {}
    names = options.only or list(made)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for turn in range(options.runs):
        for name in names:
            cost, runs[name] = cost_of(made[name]())
            costs[name].append(cost)
            print(f"run {turn}, {name}: {cost}", file=sys.stderr, flush=True)
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__name__} {jc.__version__}\n")
    print("| program | trace, s | lower, s | compile, s | lines | optimized | step, ms | lines, ratio | time, ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    steps = step_times(runs, options.repeat)
    median = {name: median_of(each) for name, each in costs.items()}
    for name, cost in median.items():
        other = median.get(other_of(name) or "")
        compared = "| " if other is None else f"{cost.lines / other.lines:.1f} | {total(cost) / total(other):.1f}"
        seconds = (
            f"{cost.trace:.2f} | {cost.lower:.2f} | {cost.compile:.2f} | {cost.lines:,.0f} | {cost.optimized:,.0f}"
        )
        print(f"| {name} | {seconds} | {steps[name]:.3f} | {compared} |")
    if options.eager:
        eager_times(options.repeat)


if __name__ == "__main__":
    main()
