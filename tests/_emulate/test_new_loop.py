"""A loop primitive that jchop does not know, with one row of `CONTROL`: everything that runs programs runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

import jchop as jc
from jchop._emulate.rules import rules
from jchop._program import control

repeat_p = Primitive("repeated")
repeat_p.multiple_results = True


def _repeated(*args: Any, jaxpr: Any, times: int, fixed: int) -> list[Any]:
    def turn(i: Any, values: list[Any]) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*args[:fixed], *values)

    return lax.fori_loop(0, times, turn, list(args[fixed:]))


repeat_p.def_impl(lambda *args, **params: jax.jit(lambda *args: _repeated(*args, **params))(*args))
repeat_p.def_abstract_eval(lambda *avals, fixed, **params: list(avals[fixed:]))
mlir.register_lowering(repeat_p, mlir.lower_fun(_repeated, multiple_results=True))
ad.primitive_jvps[repeat_p] = lambda primals, tangents, **params: jax.jvp(
    lambda *args: _repeated(*args, **params), primals, tuple(map(ad.instantiate_zeros, tangents))
)


def body(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) + x / 3,)


def program(w: Any, x: Any) -> Any:
    return repeat_p.bind(w, x, jaxpr=jax.make_jaxpr(body)(w, x), times=3, fixed=1)[0]


def same(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, _: (body(w, x)[0], None), x, length=3)[0]


def plan(planner: Any, step: Any) -> Any:
    fixed, facts = step.eqn.params["fixed"], step.known
    while True:
        inner = planner.plan(step.eqn.params["jaxpr"], facts, step.scope)
        after = tuple(map(planner.common, zip(facts[fixed:], inner.out, strict=True)))
        if after == tuple(facts[fixed:]):
            return replace(step, inner=(inner,), out=after)
        facts = (*facts[:fixed], *after)


def run(loops: control.Loops, step: Any, seeds: Any, args: list[Any], interpret: control.Interpret) -> list[Any]:
    params = step.eqn.params
    fixed = args[: params["fixed"]]

    def turn(values: list[Any], row: list[Any], count: Any) -> tuple[list[Any], list[Any]]:
        return interpret(step.inner[0], loops.inside(seeds, step.number, count), [*fixed, *values]), []

    return loops.scan(step, turn, args[params["fixed"] :], [], control.ScanOrder(params["times"]))[0]


def roles(step: Any) -> list[str]:
    fixed = step.eqn.params["fixed"]
    return ["fixed"] * fixed + ["carried"] * (len(step.eqn.invars) - fixed)


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    turns = lambda step: step.eqn.params["times"]  # noqa: E731
    monkeypatch.setitem(control.CONTROL, "repeated", control.ControlPrimitive(plan, run, roles, turns))
    monkeypatch.setitem(rules.PRIMITIVE_KINDS, "repeated", "control")  # made of CONTROL when it is imported
    yield


def operands() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=(4, 4)), jnp.float32), jnp.asarray(random.normal(size=(2, 4)), jnp.float32)


@pytest.mark.parametrize("spec", ["bfloat16", "e5m2:stochastic"])
def test_emulated(spec: str) -> None:
    """The numbers of the same scan, in a call and under `jax.jit`."""
    key = jax.random.key(1)
    want = jc.emulate(same, spec, key=key)(*operands())
    low = jc.emulate(program, spec, key=key)
    np.testing.assert_array_equal(low(*operands()), want)
    np.testing.assert_array_equal(jax.jit(low)(*operands()), want)


def test_reported_and_blamed() -> None:
    """Each turn is seen: rows count all runs, and blame explains the error."""
    low, own = (jc.emulate(fun, "bfloat16") for fun in (program, same))
    results = [[row.results for row in f.report(*operands()).rows if row.primitive == "tanh"] for f in (low, own)]
    assert results[0] == results[1] != []
    found, want = (f.blame(*operands(), output=jnp.sum) for f in (low, own))
    assert found.error == want.error
    assert found.unexplained == pytest.approx(want.unexplained)


def test_digits() -> None:
    """Samples run turn by turn."""
    found, want = (jc.significant_digits(f, *operands(), key=jax.random.key(2)) for f in (program, same))
    np.testing.assert_array_equal(found.digits, want.digits)


def test_tuned() -> None:
    """The program is compiled once, with formats as arguments."""
    found, want = (jc.tune(f, [operands()], 1e-3, ["bfloat16", "e8m14", None]) for f in (program, same))
    assert (found.error, [*found.rules.values()]) == (want.error, [*want.rules.values()])


def test_quantized() -> None:
    """Weights are rounded once; scales that are kept are carried."""
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)")
    low, want = (jc.quantize_fn(f, rule)(*operands()) for f in (program, same))
    np.testing.assert_array_equal(low, want)
    rule = jc.Rule(activation="float8_e4m3fn(group=tensor)", scale_from=jc.DelayedScaling(3))
    results = []
    for function in (program, same):
        low = jc.quantize_fn(function, rule)
        y, scales = low.update(*operands(), scales=low.start(*operands()))
        results.append((y, scales.stats))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_rounded_with_data() -> None:
    """Its weights have sites, and their statistics and roundings are those of the same scan; so have their biases."""
    w, x = operands()
    found, want = (jc.ptq.statistics(fun, w, [x]) for fun in (program, same))
    assert not found.left_out and [*found] == [*want] == [""]
    np.testing.assert_array_equal(found[""].gram, want[""].gram)
    rule, steps = jc.Rule(weight="int4(group=all)"), [jc.ptq.smooth(), jc.ptq.gptq(), jc.ptq.correct_biases()]
    results = [
        jc.quantize_fn(fun, rule).pack(w, batches=[x], steps=[jc.ptq.sequential(), *steps], return_report=True)
        for fun in (program, same)
    ]
    np.testing.assert_array_equal(*(jc.dequantize(packed) for packed, _ in results))
    (row,), (other,) = (report.weights for _, report in results)
    assert row.method == other.method == "gptq" and (row.before, row.after) == (other.before, other.after)
    assert "no factors by smooth" in row.note
