"""Models of the test zoo through quantization tools: what runs, how exact, how much of the weights is packed.

    python benchmarks/models.py                      # jchop, and qwix if it is installed: weights stored packed
    python benchmarks/models.py --tool qwix --formats "int8" "int4 g32" --models llama gemma
    python benchmarks/models.py --train              # instead: the loss and its gradient through rounded weights
    python benchmarks/models.py --summary            # one row per format instead of one per model

Both tools get the same request: round the weights of every product and nothing else. A tool that refuses it for a whole
model is asked again for less (`REQUESTS`), and the row says what ran.

* error: ‖rounded − original‖ / ‖original‖ of all outputs.
* packed: the share of the numbers of the products' weights that the new parameters hold in another type or shape.
* bytes: all parameters, at the width of their types (an int4 is half a byte), as a share of the original's.
* lines: statements that a user writes, which is the body of the function that does it here.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jchop as jc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from zoo import CASES, Case, paths


@dataclass(frozen=True)
class Format:
    """A format of weights, as each tool writes it: of qwix the type and the size of a tile."""

    jchop: str
    qwix: tuple[str, int | None]


#: Scales of int8 and fp8 are those of channels.
FORMATS = {
    "int8": Format("int8(group=all)", ("int8", None)),
    "int4 g32": Format("int4(group=32)", ("int4", 32)),
    "fp8 e4m3": Format("e4m3fn(group=all)", ("float8_e4m3fn", None)),
    "mxfp8": Format("mxfp8_e4m3", ("mxfp8", 32)),
    "nvfp4": Format("nvfp4", ("nvfp4", 16)),
    "nf4": Format("nf4(group=32)", ("nf4", 32)),
}


@dataclass(frozen=True)
class Request:
    """The operations (empty: all) and the modules, by a regular expression, that a tool is asked for."""

    note: str = ""
    operations: tuple[str, ...] = ()
    modules: str = ".*"


#: From the whole model down. qwix packs the weight of a convolution only if activations have its type, and an einsum
#: only of two operands; rules by operation and by module are its way around.
DOTS, NO_EMBEDDING = ("dot_general", "einsum", "ragged_dot"), "(?!.*embed).*"
REQUESTS = (
    Request(),
    Request("no convolutions", DOTS),
    Request("no convolutions, no embeddings", DOTS, NO_EMBEDDING),
    Request("dot_general alone, no embeddings", ("dot_general",), NO_EMBEDDING),
    Request("einsum alone", ("einsum",)),
)


class Refused(Exception):
    """A tool has no way for a model."""


#: A function of the new parameters and the arguments, and those parameters.
Runnable = tuple[Callable[..., Any], Any]


# -- what a user writes ------------------------------------------------------------------------------------------------


def qwix_nnx(qwix: Any, rule: Any, model: Any, args: Any, train: bool) -> Any:
    provider = qwix.QtProvider([rule]) if train else qwix.PtqProvider([rule])
    return qwix.quantize_model(model, provider, *args)


def qwix_linen(qwix: Any, rule: Any, module: Any, method: str, variables: Any, args: Any) -> Any:
    module = qwix.quantize_model(module, qwix.PtqProvider([rule]), methods=(method,))
    shapes = jax.eval_shape(lambda key: module.init(key, *args, method=method), jax.random.key(0))
    return module, qwix.quantize_params(nn.unbox(variables["params"]), shapes["params"])


def qwix_linen_train(qwix: Any, rule: Any, module: Any, method: str) -> Any:
    return qwix.quantize_model(module, qwix.QtProvider([rule]), methods=(method,))


def jchop_pack(rule: Any, fun: Any, params: Any, args: Any) -> Any:
    low = jc.quantize_fn(fun, rule)
    return low, low.pack(params, *args)


def jchop_train(rule: Any, fun: Any) -> Any:
    return jc.quantize_fn(fun, rule)


def statements(function: Any) -> int:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return len(tree.body[0].body)  # type: ignore[attr-defined]


# -- tools -------------------------------------------------------------------------------------------------------------


def at_once(function: Callable[..., Any], model: Any, *args: Any) -> Runnable:
    """A model of NNX that a function makes of another, as one program: qwix runs each operation of the model once."""
    graph, state = nnx.split(model)
    made: list[Any] = []

    def make(state: Any, *args: Any) -> Any:
        graph_of, state = nnx.split(function(nnx.merge(graph, state), args))
        made.append(graph_of)
        return state

    state = jax.jit(make)(state, *args)
    return lambda state, *args: nnx.merge(made[0], state)(*args), state


def by_qwix(case: Case, fmt: Format, request: Request, train: bool) -> tuple[Runnable, int]:
    import qwix

    weight, tile = fmt.qwix
    rule = (qwix.QtRule if train else qwix.QuantizationRule)(
        weight_qtype=weight, tile_size=tile, op_names=request.operations, module_path=request.modules
    )
    model, args = case.build()
    if case.kind == "nnx":
        run = at_once(lambda model, args: qwix_nnx(qwix, rule, model, args, train), model, *args)
        return run, statements(qwix_nnx) + 1
    if case.kind == "linen" and case.run is not None:
        run, lines = case.run, statements(qwix_linen_train if train else qwix_linen) + 1
        if train:
            module, params = qwix_linen_train(qwix, rule, case.module, case.method), nn.unbox(model)
        else:
            variables = {"params": model, **case.rest()}
            module, params = qwix_linen(qwix, rule, case.module, case.method, variables, args)
        return (lambda params, *args: run(module, params, *args), params), lines
    raise Refused("not a module of Flax")


def by_jchop(case: Case, fmt: Format, request: Request, train: bool) -> tuple[Runnable, int]:
    if request != REQUESTS[0]:
        raise Refused("a smaller request is qwix's")
    rule = jc.Rule(weight=fmt.jchop)
    params, args = case.params()
    if train:
        return (jchop_train(rule, case.apply), params), statements(jchop_train) + 1
    _, packed = jchop_pack(rule, case.apply, params, args)
    # A function that has traced nothing yet, as that of the process that serves the packed parameters.
    return (jc.quantize_fn(case.apply, rule), packed), statements(jchop_pack) + 1


TOOLS = {"jchop": by_jchop, "qwix": by_qwix}


# -- measures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model under a format: the reason if it does not run, and then nothing else."""

    reason: str = ""
    note: str = ""
    error: float = 0.0
    packed: float = 0.0
    bytes: float = 0.0
    lines: int = 0
    trace: float = 0.0
    compile: float = 0.0


def bits(array: Any) -> int:
    kind = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
    return array.size * (8 if array.dtype == bool else kind(array.dtype).bits)


def arrays_of(params: Any) -> dict[str, Any]:
    """The arrays of parameters by path, without state of NNX that is none and without keys."""
    if isinstance(params, nnx.State):
        params = nnx.filter_state(params, lambda _, leaf: not isinstance(leaf, nnx.RngState | nnx.BatchStat))
    return paths(params)


def under(found: dict[str, Any], path: str) -> list[Any]:
    return [leaf for place, leaf in found.items() if place == path or place.startswith(path + "/")]


def sizes(before: Any, after: Any, case: Case) -> tuple[float, float]:
    """The share of the products' numbers that are packed, and of the bytes that are left."""
    old, new = paths(before), arrays_of(after)
    packed = 0
    for path in case.products:
        # A box of Linen is gone in some tools.
        leaves = under(new, path) or under(new, path.removesuffix("/value"))
        same = len(leaves) == 1 and (leaves[0].dtype, leaves[0].shape) == (old[path].dtype, old[path].shape)
        packed += 0 if same else old[path].size
    total = sum(old[path].size for path in case.products)
    return packed / total, sum(map(bits, new.values())) / sum(map(bits, old.values()))


def norm_of(tree: Any) -> float:
    leaves = [
        np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


def distance(one: Any, other: Any) -> float:
    """The relative distance of two trees of outputs."""
    wide = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)  # noqa: E731
    return norm_of(jax.tree.map(np.subtract, wide(one), wide(other))) / norm_of(other)


def timed(function: Any, *args: Any) -> tuple[Any, float, float]:
    """The compiled function, and the processor's seconds of tracing and compiling."""
    start = time.process_time()
    traced = jax.jit(function).trace(*args)
    middle = time.process_time()
    compiled = traced.lower().compile()
    return compiled, middle - start, time.process_time() - middle


def gradient(loss: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The gradients of the arrays of parameters that are floats; a model of NNX holds keys and counts as well."""

    def run(params: Any, *args: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(params)
        places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

        def of(given: list[Any]) -> Any:
            new = dict(zip(places, given, strict=True))
            return loss(jax.tree.unflatten(tree, [new.get(place, leaf) for place, leaf in enumerate(leaves)]), *args)

        return jax.grad(of)([leaves[place] for place in places])

    return run


def tried(tool: str, case: Case, fmt: Format, want: Any, request: Request, train: bool) -> Row:
    before, args = case.params()
    try:
        (function, params), lines = TOOLS[tool](case, fmt, request, train)
        run = gradient(lambda *args: case.loss(function(*args))) if train else function
        compiled, trace, compile = timed(run, params, *args)
        out = compiled(params, *args)
        if train:  # the gradient must be there; the error is that of the outputs
            if not all(bool(jnp.isfinite(leaf).all()) for leaf in out):
                raise FloatingPointError("a gradient is not finite")
            out = jax.jit(function)(params, *args)
        error = distance(out, want)
        if not np.isfinite(error):
            raise FloatingPointError("an output is not finite")
    except Exception as problem:  # whatever a tool raises is its answer
        text = str(problem).strip().splitlines() or [""]
        return Row(reason=f"{type(problem).__name__}: {text[0]}" if not isinstance(problem, Refused) else text[0])
    packed, share = (0.0, 1.0) if train else sizes(before, params, case)
    if not train and packed == 0:
        return Row(reason="no weight is packed")
    if train and error == 0:
        return Row(reason="no weight is rounded")
    return Row("", request.note, error, packed, share, lines, trace, compile)


def row_of(tool: str, case: Case, fmt: Format, want: Any, train: bool) -> Row:
    """The first request that runs and packs a weight; if none does, the reason of the first.

    A tool starts without compiled functions, as in a new process: qwix does not see into a function of `jax.numpy`
    that JAX has traced before.
    """
    rows: list[Row] = []
    for request in REQUESTS if case.kind in ("nnx", "linen") else REQUESTS[:1]:
        jax.clear_caches()
        rows.append(tried(tool, case, fmt, want, request, train))
        if not rows[-1].reason:
            return rows[-1]
    return rows[0]


# -- tables ------------------------------------------------------------------------------------------------------------


def line(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def shown(row: Row, train: bool) -> list[str]:
    if row.reason:
        return ["no", *[""] * (4 if train else 6), row.reason.replace("|", "\\|")[:110]]
    sizes = [] if train else [f"{row.packed:.0%}", f"{row.bytes:.0%}"]
    return ["yes", f"{row.error:.1e}", *sizes, str(row.lines), f"{row.trace:.2f}", f"{row.compile:.2f}", row.note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    installed = ["jchop", *(["qwix"] if importlib.util.find_spec("qwix") else [])]
    parser.add_argument("--tool", choices=TOOLS, nargs="+", default=installed)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--models", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--train", action="store_true", help="the gradient through rounded weights, nothing packed")
    parser.add_argument("--summary", action="store_true", help="one row per tool and format")
    chosen = parser.parse_args()
    rows: dict[tuple[str, str, str], Row] = {}
    shares = [] if chosen.train else ["packed", "bytes"]
    heads = ["tool", "model", "format", "runs", "error", *shares, "lines", "trace s", "compile s", ""]
    if not chosen.summary:
        line(*heads)
        line(*["---"] * len(heads))
    for name in chosen.models:
        case = CASES[name]
        params, args = case.params()
        want = jax.jit(case.apply)(params, *args)
        for text in chosen.formats:
            for tool in chosen.tool:  # in turn, so that a busy machine is busy for both
                rows[tool, name, text] = row = row_of(tool, case, FORMATS[text], want, chosen.train)
                if not chosen.summary:
                    line(tool, name, text, *shown(row, chosen.train))
    print("\n### Summary\n")
    heads = ["tool", "format", "models that run", "median error"]
    heads += [] if chosen.train else ["all weights packed", "mean share packed"]
    line(*heads)
    line(*["---"] * len(heads))
    for tool in chosen.tool:
        for text in chosen.formats:
            of = [rows[tool, name, text] for name in chosen.models]
            ran = [row for row in of if not row.reason]
            median = f"{np.median([row.error for row in ran]):.1e}" if ran else ""
            full, share = sum(row.packed == 1 for row in ran), sum(row.packed for row in of) / len(of)
            shares = [] if chosen.train else [str(full), f"{share:.0%}"]
            line(tool, text, f"{len(ran)} of {len(of)}", median, *shares)


if __name__ == "__main__":
    main()
