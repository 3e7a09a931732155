"""Pictures, studies and the command line."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from digests import Call
from digests.common import coarse, f32, files_of, folder, jc
from digests.emulated import X, halves
from digests.face import facts
from digests.networks import Net
from digests.programs import layers, mlp

MODEL = """import jax.numpy as jnp


def apply(w, x):
    return jnp.tanh(x @ w)


def net(params, x):
    return jnp.maximum(x @ params["first"], 0) @ params["second"]


def energy(y):
    return jnp.sum(y * y)
"""


def pictures() -> Iterator[Call]:
    p = jc.plot
    x = coarse("histogram", (400,))
    for text in ("e3m2fn", "fixed2.2", "posit6", "integer4", "e2m1fn"):
        yield Call(f"plot.value_grid {text}", lambda t=text: p.value_grid(formats=t))
        yield Call(f"plot.code_histogram {text}", lambda t=text: p.code_histogram(x=x, fmt=t))
    yield Call("plot.value_grid several", lambda: p.value_grid(formats=["e3m2fn", "e2m3fn"], title="mine"))
    yield Call("plot.code_histogram title", lambda: p.code_histogram(x, "e2m1fn", title="mine"))
    yield Call("plot.rounding_error", lambda: p.rounding_error(specs=["e3m2fn", "e2m3fn:up"], start=0.5, stop=4.0, points=101))
    yield Call("plot.rounding_error options", lambda: p.rounding_error("e3m2fn", 0.5, 4.0, relative=False, points=50, title="mine"))
    series = {"values": {"c": [1.0, 3.0], "d": [2.0, 80.0]}, "rows": ["r", "s"], "xlabel": "points", "title": "mine"}
    for case, options in {"plain": {}, "note": {"note": "a note"}}.items():
        yield Call(f"plot.dot_plot {case}", lambda o=options: p.dot_plot(**series, **o))
    two = {"names": ["a", "b", "c"], "bits": [4.0, 6.0, 8.0], "values": [3.0, 2.0, 2.5], "ylabel": "error"}
    yield Call("plot.pareto", lambda: p.pareto(**two))
    yield Call("plot.pareto options", lambda: p.pareto(**two, title="mine", higher_is_better=True, log=True))
    low = lambda: jc.emulate(halves, "bfloat16")
    for title in ({}, {"title": "mine"}):
        case = "title" if title else "plain"
        yield Call(f"Report.plot {case}", lambda t=title: low().report(X, trace_values=True).plot(**t), loose=True)
        yield Call(f"Blame.plot {case}", lambda t=title: low().blame(X).plot(**t), loose=True)
        yield Call(f"Tuning.plot {case}", lambda t=title: jc.tune(halves, ["bfloat16", "tf32"], [(X,)], 1e-2).plot(**t), loose=True)
        yield Call(f"PtqReport.plot {case}", lambda t=title: jc.quantize_fn(mlp, jc.Rule(weight="int4(group=8)")).pack(layers()[0], batches=[layers()[1]], steps=jc.ptq.gptq(), return_report=True)[1].plot(**t), loose=True)
        yield Call(f"Sensitivity.plot {case}", lambda t=title: jc.nn.sensitivity(Net(), ["e4m3fn", "e5m2"], [f32(coarse("net", (8, 32)))]).plot(**t), loose=True)


def studies() -> Iterator[Call]:
    s = jc.study
    few = {"formats": ["e4m3fn", "e5m2"], "modes": ["nearest_even", "stochastic"], "seeds": 2, "seed": 3, "progress": lambda *a: None}

    def trained() -> Any:
        result = s.run(dataset="wine", epochs=3, activations=True, **few)
        with folder() as where:
            names = result.save(folder=where)
            data = {n: b for n, b in files_of(where).items() if n.endswith(".csv")}
        return result, str(result), result.plot(), sorted(f.name for f in names), data, result.cell(fmt="e5m2", rounding="stochastic"), facts(result)

    def of_function() -> Any:
        result = s.run_function(halves, X, **few, budget_seconds=1e6)
        found = {"fields": result, "reading": result.reading(), "csv": result.to_csv(), "figure": result.plot(), "dict": sorted(result.as_dict())}
        found |= {"json": len(result.to_json(indent=1)) > 0, "html": "<table" in result.to_html()}
        with folder() as where:
            names = result.save(folder=where)
            found["files"] = sorted(f.name for f in names)
        return found

    yield Call("study.run", trained, loose=True)
    yield Call("study.run_function", of_function, loose=True)
    for name in ("DATASETS", "FORMATS", "MODES"):
        yield Call(f"study.{name}", lambda n=name: getattr(s, n))


def command(*arguments: str, files: dict[str, Callable[[Any], Any]] | None = None) -> Any:
    """Exit status, what is printed, and the files that are written; lines with versions, paths and times go."""
    from jchop.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    before, path = os.getcwd(), list(sys.path)
    with folder() as where:
        (where / "model_of_digests.py").write_text(MODEL)
        np.save(where / "x.npy", coarse("npy", (8, 32)))
        np.savez(where / "in.npz", w=coarse("cw", (8, 4)), x=coarse("cx", (16, 8)))
        np.savez(where / "data.npz", x=coarse("cd", (16, 16)))
        jc.save(where / "w.safetensors", {"first": f32(coarse("c1", (16, 8))), "second": f32(coarse("c2", (8, 4)))})
        jc.save_checkpoint(where / "gptq", {"a.weight": jc.quantize(f32(coarse("c3", (32, 64))), "int4(group=32,scale=float16)")}, "gptq")
        start = files_of(where)
        os.chdir(where)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main([*arguments])
        finally:
            os.chdir(before)
            sys.path[:] = path
            sys.modules.pop("model_of_digests", None)
        after = {n: b for n, b in files_of(where).items() if start.get(n) != b and n.endswith((".npy", ".safetensors", ".csv"))}
    lines = [re.sub(r"[\d.]+ ?(s|ms|seconds)\b", "T", line) for line in out.getvalue().splitlines()]
    return status, [line.rstrip() for line in lines if not re.search(r"version|seconds|\bjax|numpy|python", line, re.IGNORECASE)], after


def commands() -> Iterator[Call]:
    fun = ("model_of_digests:apply", "--data", "in.npz")
    lines = [
        "round 0.1 1e9 --to e5m2", "round 0.1 -3 --to e4m3fn --rounding up --overflow saturate --json", "round 0.3 nan inf --to bfloat16:stochastic --seed 1 --random-bits 8",
        "round 0.1 --to binary16 --carrier float32", "round x.npy --to e5m2 --out y.npy", "round x.npy --to int8 --out x.npy --force --json", "round 0.1 --to e5m9m", "round",
        "formats", "formats --json", "info e4m3fn", "info bfloat16 --json", "info nf4", "info posit8", "info fixed4.4", "info e3m2fn --plot p.png", "compare x.npy",
        "compare x.npy --formats e5m2,nf4 --scale fit --json", "compare w.safetensors --tensor first --formats e5m2:stochastic --seed 1 --plot p.png",
        "quantize w.safetensors q.safetensors --rule *=int8(group=all)", "quantize w.safetensors q.safetensors --rule first=nf4(group=8) --rule *=bfloat16:stochastic --seed 2 --force --json",
        "inspect w.safetensors", "inspect gptq --json", "inspect gptq --layout gptq", "convert gptq ct --layout compressed-tensors --inexact --shard 1 --json",
        "convert gptq plain --layout plain --from gptq", "completion bash", "completion fish", "completion zsh", "doctor --json",
        "ptq model_of_digests:net w.safetensors data.npz --rule *=int4(group=8) --out q.safetensors --batch 8",
        "ptq model_of_digests:net w.safetensors data.npz --rule *=int4(group=8) --method sequential,clip,gptq --out q.safetensors --report json --activation int8 --memory 1MiB --seed 1",
        "--version", "nonsense", "roun 1",
    ]
    for line in lines:
        if not line.startswith(("doctor", "--version")):
            loose = line.startswith(("ptq", "compare"))
            yield Call(f"jchop {line}", lambda line=line: command(*line.split(" ")), loose=loose)
    for line in ("--to bfloat16", "--to bfloat16:stochastic --seed 1 --output model_of_digests:energy --json --max-turns 5", "--to e5m2 --plot p.png --html p.html"):
        yield Call(f"jchop blame {line}", lambda line=line: command("blame", *fun, *line.split()), loose=True)
    for line in ("--tolerance 1e-2 --menu bfloat16,tf32", "--tolerance 0.1 --menu e5m7,tf32 --cost bytes --by equation --metric absolute --evaluations 9 --json --held-out in.npz"):
        yield Call(f"jchop tune {line}", lambda line=line: command("tune", *fun, *line.split()), loose=True)
    for line in ("--formats bfloat16,e5m2 --modes nearest_even --seeds 1 --out o", "--formats e5m2 --modes stochastic --seeds 2 --seed 5 --json --budget-seconds 1000"):
        yield Call(f"jchop study {line}", lambda line=line: command("study", *fun, *line.split()), loose=True)


def calls() -> Iterator[Call]:
    yield from pictures()
    yield from studies()
    yield from commands()
