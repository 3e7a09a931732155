"""What serving costs: floats or integers times packed weights, and a token of `examples/serving.py`.

    python benchmarks/serve.py [--size 4096] [--rows 1 64]   # `jc.dot`, beside dequantizing the weights and a product
    python benchmarks/serve.py --integers [--size 2048]      # rounded rows times packed weights
    python benchmarks/serve.py --token                       # a token of each of four sequences
    pip install qwix torchao                                 # adds them to the tables

All programs are timed in one process, in turn. "cpu" is the processor's time, which other programs change little. MB
are XLA's temporary arrays. Decibels are those of the result, or of the logits of the prompts, against float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

#: The numbers of a scale along the sum in another package; None for all.
WEIGHTS = {"int8(group=all,axis=0)": None, "int4(group=128,axis=0)": 128, "int4(group=32,axis=0)": 32}


@dataclasses.dataclass
class Program:
    """What is timed, its result, and its temporary bytes if it is XLA's."""

    run: Callable[[], Any]
    result: np.ndarray
    megabytes: float | None = None
    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def compiled(function: Callable[..., Any], *args: Any) -> Program:
    program: Any = jax.jit(function).lower(*args).compile()
    return Program(
        lambda: jax.block_until_ready(program(*args)),
        np.asarray(jax.tree.leaves(program(*args))[0], np.float64),
        program.memory_analysis().temp_size_in_bytes / 1e6,
    )


def report(programs: dict[str, Program], exact: np.ndarray, repeat: int) -> None:
    """Time the programs in turn, in another order each time, and print a line for each."""
    for _ in range(repeat):
        for program in random.sample(list(programs.values()), len(programs)):
            wall, processor = time.perf_counter(), time.process_time()
            program.run()
            program.wall.append(1e3 * (time.perf_counter() - wall))
            program.processor.append(1e3 * (time.process_time() - processor))
    for name, program in programs.items():
        noise = np.sum((program.result - exact) ** 2)
        decibels = 10 * np.log10(np.sum(exact**2) / noise) if noise else np.inf
        memory = "" if program.megabytes is None else f"{program.megabytes:8.1f}"
        times = f"{np.median(program.wall):9.2f} {min(program.wall):9.2f} {np.median(program.processor):9.2f}"
        print(f"  {name:28}{times}{decibels:8.1f}{memory}", flush=True)


def title(text: str) -> None:
    print(f"{text}\n  {'':28}{'ms':>9} {'least':>9} {'cpu':>9}{'dB':>8}{'MB':>8}", flush=True)


def has(package: str) -> bool:
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"{package} is not installed", flush=True)
    return found


# -- floats times packed weights ---------------------------------------------------------------------------------------


def dequantized(x: jax.Array, w: jc.QArray) -> jax.Array:
    """The weights written out."""
    return x @ jc.dequantize(w)


def weights(size: int, counts: list[int], repeat: int) -> None:
    w = jax.random.normal(jax.random.key(0), (size, size))
    others = [add for name, add in (("qwix", add_qwix), ("torchao", add_torchao)) if has(name)]
    for text, group in WEIGHTS.items():
        stored = jc.quantize(w, text)
        for rows in counts:
            x = jax.random.normal(jax.random.key(1), (rows, size))
            programs = {
                "float32": compiled(jnp.matmul, x, w),
                "jchop: dot": compiled(jc.dot, x, stored),
                "jchop: dequantize, matmul": compiled(dequantized, x, stored),
            }
            for add in others:
                add(programs, x, w, group)
            title(f"{text}, {rows} x {size} x {size}")
            report(programs, programs["float32"].result, repeat)


def add_qwix(programs: dict[str, Program], x: jax.Array, w: jax.Array, group: int | None) -> None:
    import qwix

    kind: Any = jnp.int8 if group is None else jnp.int4
    stored = qwix.quantize(w, kind, channelwise_axes=(1,), tiled_axes=None if group is None else {0: group})
    programs["qwix: dot_general"] = compiled(lambda x, w: qwix.dot_general(x, w, (((1,), (0,)), ((), ()))), x, stored)


def add_torchao(programs: dict[str, Program], x: jax.Array, w: jax.Array, group: int | None) -> None:
    import torch  # type: ignore[import-not-found]
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig  # type: ignore[import-not-found]
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-not-found]

    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(*w.shape, bias=False).requires_grad_(False)
        layer.weight.copy_(torch.tensor(np.asarray(w).T))
        model = torch.nn.Sequential(layer).to(dtype)
        quantize_(model, Int8WeightOnlyConfig() if group is None else PrototypeInt4WeightOnlyConfig(group_size=group))
        rows = torch.tensor(np.asarray(x)).to(dtype)
        run = partial(torch.no_grad()(model), rows)
        programs[f"torchao: {str(dtype).removeprefix('torch.')}"] = Program(run, run().double().numpy())


# -- integers times packed weights -------------------------------------------------------------------------------------

#: Weights, and the numbers of a scale along the sum; of activations, too.
INTEGERS = (("int8", None, None), ("int4", 128, None), ("int8", 128, 128))


def integers(size: int, counts: list[int], repeat: int) -> None:
    w = jax.random.normal(jax.random.key(0), (size, size))
    has_qwix = has("qwix")
    for kind, group, of_rows in INTEGERS:
        rule = jc.Rule(weight=f"{kind}(group={group or 'all'})", activation=f"int8(group={of_rows or 'all'})")
        for rows in counts:
            x = jax.random.normal(jax.random.key(1), (rows, size))
            programs = {"float32": compiled(jnp.matmul, x, w)}
            for product in ("codes", "float"):
                low = jc.quantize_fn(lambda w, x: x @ w, dataclasses.replace(rule, product=product))
                programs[f'jchop: "{product}"'] = compiled(low, low.pack(w, x), x)
            if has_qwix:
                programs["qwix"] = compiled(*integers_in_qwix(w, kind, group, of_rows), x)
            title(f"{rule.weight} x {rule.activation}, {rows} x {size} x {size}")
            report(programs, programs["float32"].result, repeat)


def integers_in_qwix(w: jax.Array, kind: str, group: int | None, of_rows: int | None) -> tuple[Any, Any]:
    import qwix

    def tiles(axis: int, size: int | None) -> dict[str, Any]:
        return {"channelwise_axes": (1 - axis,), "tiled_axes": None if size is None else {axis: size}}

    def product(w: Any, x: jax.Array) -> jax.Array:
        return qwix.dot_general(qwix.quantize(x, "int8", **tiles(1, of_rows)), w, (((1,), (0,)), ((), ())))

    return product, qwix.quantize(w, kind, **tiles(0, group))


# -- a token -----------------------------------------------------------------------------------------------------------


def token(repeat: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import serving

    sizes = serving.Sizes()
    params, (tokens, positions) = serving.make(sizes), serving.prompts(sizes)
    exact = partial(serving.forward, sizes=sizes)
    lengths = (np.asarray(positions) >= 0).sum(1)
    caches = serving.caches_of(sizes, "paged", None, lengths + 1)
    after = jax.jit(exact)(params, tokens, positions, caches)[1]
    step = (tokens[:, :1], jnp.asarray(lengths)[:, None], after)
    has_qwix = has("qwix")

    def measured(function: Callable[..., Any], params: Any) -> Program:
        program = compiled(function, params, *step)
        logits = jax.jit(function)(params, tokens, positions, caches)[0]
        program.result = np.asarray(logits, np.float64)[np.asarray(positions) >= 0]
        return program

    for weight, activation in (("int8", "int8"), ("int8", None), ("int4", None)):
        group = "all" if weight == "int8" else "32"
        rule = jc.Rule(
            serving.BLOCKS,
            weight=f"{weight}(group={group})",
            activation=activation and f"{activation}(group=all)",
            product="codes",
        )
        programs = {"float32": measured(exact, params)}
        for product in ("codes", "float"):
            low = jc.quantize_fn(exact, dataclasses.replace(rule, product=product))
            programs[f'jchop: "{product}"'] = measured(low, low.pack(params, *step))
        if has_qwix:
            programs["qwix"] = measured(*in_qwix(serving, params, sizes, step, weight, activation))
        title(f"{weight}(group={group}) weights, activations: {activation}")
        report(programs, programs["float32"].result, repeat)


def in_qwix(
    serving: Any, params: Any, sizes: Any, step: tuple[Any, ...], weight: str, activation: str | None
) -> tuple[Callable[..., Any], Any]:
    """The same function with the same parameters, of which the matrices of the blocks are layers of Flax."""
    import qwix
    from flax import nnx

    class Matrix(nnx.Linear):
        def __rmatmul__(self, x: jax.Array) -> jax.Array:
            return self(x)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.params = nnx.data(
                {
                    **{name: nnx.Param(v) for name, v in params.items() if name != "blocks"},
                    "blocks": [{name: self.layer(v) for name, v in block.items()} for block in params["blocks"]],
                }
            )

        @staticmethod
        def layer(v: jax.Array) -> Any:
            if v.ndim == 1:
                return nnx.Param(v)
            made = Matrix(*v.shape, use_bias=False, rngs=nnx.Rngs(0))
            made.kernel[...] = v
            return made

        def __call__(self, *args: Any) -> Any:
            is_param = lambda v: isinstance(v, nnx.Module | nnx.Variable)  # noqa: E731
            read = jax.tree.map(lambda v: v[...] if isinstance(v, nnx.Variable) else v, self.params, is_leaf=is_param)
            return serving.forward(read, *args, sizes=sizes)

    tile = 32 if weight == "int4" else None
    rule = qwix.QuantizationRule(
        module_path="params/blocks.*", weight_qtype=weight, act_qtype=activation, tile_size=tile
    )
    graph, state = nnx.split(qwix.quantize_model(Model(), qwix.PtqProvider([rule]), *step))
    packed = sum(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(state))
    assert packed == 6 * sizes.depth, f"qwix packed {packed} matrices"
    return lambda state, *args: nnx.merge(graph, state)(*args), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--token", action="store_true", help="of the example, instead of a product of floats")
    parser.add_argument("--integers", action="store_true", help="times packed weights, likewise")
    options = parser.parse_args()
    if options.token:
        token(options.repeat)
    elif options.integers:
        integers(options.size, options.rows, options.repeat)
    else:
        weights(options.size, options.rows, options.repeat)


if __name__ == "__main__":
    main()
