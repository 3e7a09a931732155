"""Whole programs in another arithmetic: emulate and its report, blame, tune, significant digits, probe, compare."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulate_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jchop
from digests import Call
from digests.common import KEY, coarse, hard, jc, key_for, normal, several
from digests.face import facts

X, Y = emulate_cases.X, emulate_cases.Y
SPECS = ("bfloat16", "e5m10:up", "e4m3fn:saturate", "e5m7:stochastic", "tf32:toward_zero", "fixed8.8")


def softmax(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.softmax(x * y)


def network(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.outer(x, y) @ x + y) / (1 + jnp.exp(-x))


def scanned(x: jax.Array, y: jax.Array) -> Any:
    return lax.scan(lambda c, v: (c * 0.875 + v, jnp.sin(c)), x, jnp.stack([x, y, x - y]))


def waiting(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] > 1, lambda c: c / 2, x)


def halves(x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        y = x * x / 3
    with jax.named_scope("second"):
        return jnp.sum(y * 1.1) / (1 + x[0])


def moved(x: jax.Array, y: jax.Array) -> Any:
    return jnp.sort(x / y), jnp.cumsum(x * y), jnp.where(x > y, x, y) * 3, jnp.floor(x * 7)


def algebra(x: jax.Array, y: jax.Array) -> Any:
    a = jnp.outer(x, y) + 8 * jnp.eye(4)
    return jnp.linalg.solve(a, x), jnp.linalg.qr(a)[1], jnp.linalg.cholesky(a @ a.T)


PROGRAMS = (emulate_cases.straight, emulate_cases.loops, emulate_cases.sums, softmax, network, scanned, moved)


def emulated(program: Any, spec: str, **options: Any) -> Any:
    low = jc.emulate(program, spec, **options)
    return low(X, Y, key=KEY) if key_for(spec) is not None else low(X, Y)


def foreign(x: jax.Array) -> jax.Array:
    return emulate_cases.FOREIGN.bind(x) * 2 if hasattr(emulate_cases.FOREIGN, "bind") else x


def calls() -> Iterator[Call]:
    for program in PROGRAMS:
        for spec in SPECS:
            yield Call(f"emulate {program.__name__} {spec}", lambda p=program, s=spec: emulated(p, s))
    for spec in ("bfloat16", "e5m10:up"):
        yield Call(f"emulate algebra {spec}", lambda s=spec: emulated(algebra, s), loose=True)
    for order in ("sequential", "pairwise", "blocked(2)", "aligned(4,20)"):
        spec = jchop.MatmulSpec(accumulate="e6m9", order=order)
        yield Call(f"emulate accumulate {order}", lambda s=spec: emulated(network, "bfloat16", accumulate=s))
    for case, rules in {
        "scope": {"first": "e5m2"}, "primitive": {"mul": "e4m3", "div": None}, "both": {"second/mul": "tf32", "*": "bfloat16"},
        "sum": {"reduce_sum": jchop.MatmulSpec(accumulate="e6m9")}, "wrong": {"third": "e5m2"},
    }.items():
        yield Call(f"emulate rules {case}", lambda r=rules: jc.emulate(halves, "bfloat16", rules=r)(X))
    yield Call("emulate key", lambda: jc.emulate(halves, "e5m7:stochastic", key=KEY)(X))
    for unknown in ("raise", "round_output", "carrier"):
        yield Call(f"emulate unknown={unknown}", lambda u=unknown: jc.emulate(foreign, "e5m2", unknown=u)(X))
    yield Call("emulate max_turns", lambda: jc.emulate(waiting, "bfloat16", max_turns=3)(jnp.array([1000.0])))
    for event in ("overflow", "nan", "invalid"):
        yield Call(f"emulate stop_at={event}", lambda e=event: jc.emulate(lambda x: jnp.log(x * 4e4) - x, "e5m10", stop_at=e)(X))
        yield Call(f"report stop_at={event}", lambda e=event: jc.emulate(lambda x: jnp.log(x * 4e4) - x, "e5m10").report(X, stop_at=e).table(width=None))
    yield Call("emulate decorator", lambda: jc.emulate("bfloat16", rules={"first": None})(halves)(X))
    yield Call("emulate spec", lambda: jc.emulate(fun=halves, spec=jchop.formats.bfloat16)(X))
    for program in (emulate_cases.straight, softmax, network):
        yield Call(f"emulate gradient {program.__name__}", lambda p=program: jax.grad(lambda x: jc.emulate(p, "bfloat16")(x, Y).sum())(X))
        yield Call(f"emulate jit vmap {program.__name__}", lambda p=program: jax.jit(jax.vmap(jc.emulate(p, "e5m7")))(jnp.stack([X, Y]), jnp.stack([Y, X])))
    yield from reports()
    yield from digits()
    yield from tuned()
    yield from compared()


WITHOUT_COLUMNS = {"Comparison", "BitAllocation", "PtqReport", "Report", "Sensitivity"}
WITHOUT_JSON = {"Blame", "BitAllocation", "Tuning"}


def whole(report: Any) -> Any:
    """Text, dictionary, columns, JSON: all of a report. One class gives columns and JSON: digests have those of some."""
    found = {"report": report, "text": report.table(width=None) if hasattr(report, "table") else str(report), "html": report._repr_html_() if hasattr(report, "_repr_html_") else ""}
    kind = type(report).__name__
    for name in ("as_dict", "columns", "reading"):
        if hasattr(report, name) and not (name == "columns" and kind in WITHOUT_COLUMNS):
            found[name] = getattr(report, name)()
    if hasattr(report, "to_json") and kind not in WITHOUT_JSON:
        found["json"] = report.to_json(indent=2)
    return found


def reports() -> Iterator[Call]:
    low = lambda p, s="bfloat16": jc.emulate(p, s)
    for program in (emulate_cases.sums, scanned, network):
        yield Call(f"report {program.__name__}", lambda p=program: whole(low(p).report(X, Y)), loose=True)
        yield Call(f"report {program.__name__} values", lambda p=program: whole(low(p).report(X, Y, trace_values=True)), loose=True)
        yield Call(f"blame {program.__name__}", lambda p=program: whole(low(lambda *a: jnp.sum(jax.tree.leaves(p(*a))[0])).blame(X, Y)), loose=True)
    yield Call("report options", lambda: whole(low(halves, "e5m7:stochastic").report(trace_values=True, key=KEY, reference="tf32", max_turns=9, x=X)), loose=True)
    yield Call("EmulatedFunction", lambda: facts(low(halves)))
    yield Call("report places", lambda: [(facts(row), row.as_dict()) for row in low(halves).report(X).rows])
    yield Call("report operations", lambda: (lambda r: [str(facts(r)["operations"]), [attempt(r.first, kind) for kind in ("nan", "overflow", "invalid")]])(low(halves).report(X, trace_values=True)))
    yield Call("Event", lambda: jc.emulate(lambda x: x * 9e4, "e5m10").report(X, trace_values=True).first("overflow").first_overflow)
    yield Call("blame options", lambda: whole(low(lambda x: (halves(x), x), "e5m7:stochastic").blame(output=lambda y: y[0] * 2, key=KEY, max_turns=5, x=X)), loose=True)
    yield Call("native", lambda: (lambda n: (jax.jit(n)(X), n.notes, replace(n, low=None, patch="", casts=())))(low(halves).native(X)), loose=True)
    yield Call("ranges", lambda: whole(low(halves).ranges([X, Y + 2])), loose=True)
    yield Call("what_if", lambda: [whole(low(halves).what_if(X, by=by)) for by in ("row", "line", "scope", "function")], loose=True)
    yield Call("blame columns", lambda: (lambda b: [b.to_csv().splitlines()[0], sorted(json.loads(b.to_json(indent=1)))])(low(halves).blame(X)))
    yield Call("blame places", lambda: [(facts(row), row.as_dict()) for row in low(halves).blame(X).rows], loose=True)


def attempt(function: Any, *args: Any) -> Any:
    try:
        return str(function(*args))
    except (TypeError, ValueError) as error:
        return type(error).__name__


def root(b: Any) -> Any:
    return -b + jnp.sqrt(b * b - 1)


def digits() -> Iterator[Call]:
    for case, options in {"plain": {}, "samples": {"samples": 5, "confidence": 0.9}, "spec": {"spec": "bfloat16:stochastic"}, "turns": {"max_turns": 7}}.items():
        yield Call(f"significant_digits {case}", lambda o=options: whole(jc.significant_digits(fun=root, key=KEY, **o, b=1234.5)), loose=True)
    yield Call("significant_digits places", lambda: (lambda r: (r.worst, [facts(row) for row in r.instabilities], facts(r)))(jc.significant_digits(root, 1234.5, key=KEY, samples=6)), loose=True)
    for name, multiply in {"numpy": np.matmul, "bfloat16": lambda a, b: jchop.math.matmul(a, b, "e8m7"),
                           "hopper": lambda a, b: jchop.math.matmul(a, b, jchop.tensor_core("hopper", "float16"))}.items():
        if name != "numpy":
            yield Call(f"probe {name}", lambda m=multiply: (lambda p: (p, str(p)))(jc.probe(matmul=m, length=64)))


def tuned() -> Iterator[Call]:
    inputs, menu = [(X,), (Y + 2,)], ["bfloat16", "e5m10", "tf32"]
    tune = functools.partial(lambda **o: whole(jc.tune(**{"fun": halves, "inputs": inputs, "tolerance": 1e-2, "menu": menu} | o)))
    for case, options in {
        "plain": {}, "equation": {"by": "equation"}, "bytes": {"cost": "bytes"}, "metric": {"metric": "largest", "tolerance": 1e-2},
        "held_out": {"held_out": [(X + 1,)]}, "limits": {"evaluations": 4, "seconds": 1e6, "max_turns": 3, "progress": lambda *a: None},
        "sums": {"menu": ["bfloat16", ("tf32", jchop.MatmulSpec(accumulate="e8m12"))], "tolerance": 1e-2},
        "impossible": {"tolerance": 1e-12},
    }.items():
        yield Call(f"tune {case}", lambda o=options: tune(**o), loose=True)
    yield Call("Tuning.error", lambda: facts(jc.tune(halves, menu, inputs, 1e-2))["error"], loose=True)


def compared() -> Iterator[Call]:
    x = coarse("compare", (16, 32))
    for case, options in {"plain": {}, "formats": {"formats": ["e5m2", "nf4", "int8(group=16)", "e4m3fn:up"]}, "one": {"formats": "bfloat16"},
                          "stochastic": {"formats": ["e5m2:stochastic"], "key": KEY}, "fit": {"scale": "fit"}}.items():
        yield Call(f"compare {case}", lambda o=options: whole(jc.compare(x=x, **o)), loose=True)
    yield Call("compare hard", lambda: whole(jc.compare(hard("float8_e5m2"), ["e5m2", "bfloat16", "mxfp4"])), loose=True)
    yield Call("compare lines", lambda: whole(jc.compare(*(jc.emulate(halves, s) for s in ("e5m2", "bfloat16")), X)), loose=True)
    yield Call("compare float64", lambda: whole(jc.compare(normal("x", (64,), np.float64))), loose=True)
    yield from several("compare", lambda **o: jc.compare(x, ["e5m2", "bfloat16"]).plot(**o), plot={"title": "mine"}, loose=True)
