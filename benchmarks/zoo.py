"""Every model of tests/zoo in every format: which run, in training and packed, and whether both give the same numbers.

    python benchmarks/zoo.py rows.jsonl              # goes on where it was stopped
    python benchmarks/zoo.py rows.jsonl --summary    # what the file has

A row is a model in a format: the share of rounded weights, the relative error of the output, whether all gradients are
finite, whether packed parameters give the numbers of training bit for bit under `jax.jit` (with activations rounded,
and with weights alone), or the problem.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from zoo import CASES, Case

FORMATS = {
    "int8": "int8(group=all)",
    "int4 g32": "int4(group=32)",
    "fp8 e4m3": "e4m3fn(group=all)",
    "mxfp8": "mxfp8_e4m3",
    "nvfp4": "nvfp4",
    "nf4": "nf4(group=32)",
}


def row_of(case: Case, spec: str) -> dict[str, Any]:
    """What becomes of a model in a format."""
    params, args = case.params()
    plain = jax.jit(case.apply)(params, *args)
    both = jc.quantize_fn(case.apply, jc.Rule(weight=spec, activation=spec))
    gradient = jax.jit(jax.grad(lambda p: case.loss(both(p, *args)), allow_int=True))(params)
    floats = [g for g in jax.tree.leaves(gradient) if jnp.issubdtype(g.dtype, jnp.floating)]
    row: dict[str, Any] = {"share": both.report(params, *args).rounded_share}
    row["finite"] = all(bool(jnp.isfinite(g).all()) for g in floats)
    for name, low in (("equal", both), ("weight_only_equal", jc.quantize_fn(case.apply, jc.Rule(weight=spec)))):
        trained, served = jax.jit(low)(params, *args), jax.jit(low)(low.pack(params, *args), *args)
        pairs = zip(jax.tree.leaves(trained), jax.tree.leaves(served), strict=True)
        row[name] = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
        if low is both:
            row["error"] = distance(trained, plain)
    return row


def distance(a: Any, b: Any) -> float:
    """The largest relative error of the floats of an output."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    norms = [
        (float(jnp.linalg.norm((x - y).astype(jnp.float32))), float(jnp.linalg.norm(y.astype(jnp.float32))))
        for x, y in pairs
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return max((error / size for error, size in norms if size), default=0.0)


def main() -> None:
    """Fill the file, or say what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--models", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--summary", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    lines = chosen.rows.read_text().splitlines() if chosen.rows.exists() else []
    done = {(row["model"], row["format"]): row for row in map(json.loads, lines)}
    for text in () if chosen.summary else chosen.formats:
        for name in chosen.models:
            if (name, text) in done:
                continue
            jax.clear_caches()
            row, start = {"model": name, "format": text}, time.perf_counter()
            try:
                row |= row_of(CASES[name], FORMATS[text])
            except Exception as error:
                row["problem"] = f"{type(error).__name__}: {error}"[:400]
            row["seconds"] = round(time.perf_counter() - start, 1)
            done[name, text] = row
            with chosen.rows.open("a") as file:
                print(json.dumps(row), file=file)
    for text in FORMATS:
        rows = [row for (_, other), row in done.items() if other == text]
        counts = Counter(key for row in rows for key in ("finite", "equal", "weight_only_equal") if row.get(key))
        whole = sum(row.get("share") == 1 for row in rows)
        print(f"{text}: {len(rows)} models, all weights rounded in {whole}, {dict(counts)}")
    for (name, text), row in done.items():
        wrong = [key for key in ("finite", "equal", "weight_only_equal") if not row.get(key)]
        if "problem" in row or wrong or row["share"] != 1:
            print(name, text, row.get("problem") or f"not {wrong}, share {row['share']}", sep=", ")


if __name__ == "__main__":
    main()
