"""Parameters with several uses: none of them gets worse for another one, and the report measures all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc

further = Further()
RULE = jc.Rule("w", weight="int4(group=4)")
TOKENS = np.random.default_rng(3).integers(0, 6, (3, 40))


def tied(p: Any, tokens: Any) -> Any:
    return (p["w"][tokens] @ p["m"]) @ p["w"].T


def by_taking(p: Any, tokens: Any) -> Any:
    return jnp.take(p["w"].T, tokens, axis=1).T @ p["m"] @ p["w"].T


def one_hot(p: Any, tokens: Any) -> Any:
    return jax.nn.one_hot(tokens, 6) @ p["w"] @ p["m"] @ p["w"].T


def in_a_loop(p: Any, tokens: Any) -> Any:
    def turn(x: Any, _: Any) -> Any:
        return jax.jit(lambda x, w: jnp.tanh(x @ w.T) @ w)(x, p["w"]) @ p["m"], None

    return jax.lax.scan(turn, p["m"][tokens], None, length=2)[0]


def beside_a_sum(p: Any, tokens: Any) -> Any:
    return p["m"][tokens][:, :6] @ p["w"] + p["w"][tokens]


def in_while(p: Any, tokens: Any) -> Any:
    return jax.lax.while_loop(lambda v: (v**2).sum() < 0, lambda v: v @ p["m"], p["m"][tokens]) @ p["m"] @ p["w"].T


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(n, 8)) / 3, jnp.float32) for name, n in (("w", 6), ("m", 8))}


def decibels(exact: Any, low: Any) -> float:
    exact, low = (np.asarray(v, np.float64) for v in (exact, low))
    return 10 * np.log10((exact**2).sum() / ((exact - low) ** 2).sum())


def check_nearest(fun: Any, steps: Any, name: str) -> Any:
    params, rule = parameters(), jc.Rule(name, weight="int4(group=4)")
    batches = list(map(jnp.asarray, TOKENS))
    packed, report = jc.quantize_fn(fun, rule).pack(params, batches=batches, steps=steps, return_report=True)
    np.testing.assert_array_equal(jc.dequantize(packed[name]), jc.round_to_format(params[name], packed[name].spec))
    rows = [row for row in report.weights if row.path == name]
    assert {row.method for row in rows} == {"nearest"} and "no step by the inputs of one use" in rows[0].note
    assert all(row.before == row.after for row in rows[:1])
    return params, packed, rows


@pytest.mark.parametrize("fun", [tied, pytest.param(by_taking, marks=pytest.mark.slow)])
def test_a_tied_embedding_keeps_its_nearest_rows_and_the_report_has_both_uses(fun: Any) -> None:
    params, packed, rows = check_nearest(fun, None, "w")
    low, tokens = jc.dequantize(packed["w"]), TOKENS.reshape(-1)
    head, table = rows
    assert abs(table.before - decibels(params["w"][tokens], low[tokens])) < 1e-3 and table.after == table.before
    hidden = params["w"][tokens] @ params["m"]
    assert abs(head.after - decibels(hidden @ params["w"].T, hidden @ low.T)) < 1e-3
    assert "gather at" in table.note and "gather at" in head.note


@further.first
@pytest.mark.parametrize("steps", [jc.ptq.sign_round(5), [jc.ptq.clip(), jc.ptq.gptq()], jc.ptq.correct_error()])
def products_along_different_axes_have_a_row_each(steps: Any) -> None:
    params, packed, rows = check_nearest(one_hot, steps, "w")
    low = jc.dequantize(packed["w"])
    x = jax.nn.one_hot(TOKENS.reshape(-1), 6)
    hidden = x @ params["w"] @ params["m"]
    wanted = [decibels(x @ params["w"], x @ low), decibels(hidden @ params["w"].T, hidden @ low.T)]
    np.testing.assert_allclose([row.after for row in rows][1], wanted[1], atol=1e-3)
    assert len(rows) == 2


@further
@pytest.mark.parametrize(("fun", "name"), [(in_a_loop, "w"), (beside_a_sum, "w")])
def uses_in_loops_and_sums_are_measured(fun: Any, name: str) -> None:
    _, _, rows = check_nearest(fun, None, name)
    assert len(rows) == 2 and all(5 < row.before < 40 for row in rows)


@further
def a_use_that_cannot_be_measured_is_named() -> None:
    _, _, rows = check_nearest(in_while, None, "m")
    assert any("its errors are not measured" in row.note for row in rows)
    batches = iter(list(map(jnp.asarray, TOKENS)))  # can be run through once
    report = jc.quantize_fn(tied, RULE).pack(parameters(), batches=batches, return_report=True)[1]
    (_, row) = (row for row in report.weights if row.path == "w")
    assert "its errors are not measured" in row.note and np.isnan(row.before)


@further
def steps_that_look_at_no_inputs_are_for_all_uses() -> None:
    rule = jc.Rule("w", weight="uint2(group=8,zero_point=float)")
    steps = [jc.ptq.hqq(), jc.ptq.gptq()]
    packed, report = jc.quantize_fn(tied, rule).pack(
        parameters(), batches=list(map(jnp.asarray, TOKENS)), steps=steps, return_report=True
    )
    alone = jc.quantize_fn(tied, rule).pack(parameters(), batches=list(map(jnp.asarray, TOKENS)), steps=jc.ptq.hqq())
    np.testing.assert_array_equal(jc.dequantize(packed["w"]), jc.dequantize(alone["w"]))
    rows = [row for row in report.weights if row.path == "w"]
    assert [row.method for row in rows] == ["hqq", "hqq"] and rows[1].before != rows[1].after


test_further = further.test()
