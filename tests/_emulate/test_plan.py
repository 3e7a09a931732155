"""What an emulation plans before it computes: which operands are rounded, and what is then known of each value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from emulate_cases import FOREIGN
from jax import lax

import jchop as jc
from jchop import MatmulSpec
from jchop._emulate.rules.rules import make_settings
from jchop._emulate.rules.run_task import EmulatedStep
from jchop._emulate.rules.trace import trace_program
from jchop._program.step import ProgramPlan

SPEC, E5M2 = jc.Spec("e5m10"), jc.Spec("e5m2")
X = np.ones(3, np.float32)
N = np.arange(3, dtype=np.int32)


def plan_of(
    fun: Callable[..., Any],
    *args: Any,
    spec: Any = SPEC,
    rules: Any = None,
    accumulate: MatmulSpec | None = None,
    unknown: str = "raise",
) -> ProgramPlan:
    return trace_program(fun, make_settings(spec, rules, accumulate, unknown), args, {}).plan


def last(*args: Any, **options: Any) -> EmulatedStep:
    return plan_of(*args, **options).steps[-1]


def test_operands_are_rounded_unless_they_are_known() -> None:
    first, second = plan_of(lambda x: (x + 0.1) * 2, X).steps
    assert (first.rounds, first.known, first.out) == ((False, True), (SPEC, SPEC), (SPEC,))
    assert (second.rounds, second.known, second.out) == ((False, False), (SPEC, SPEC), (SPEC,))
    step = last(lambda x: jnp.exp(x) + x, X, rules={"exp": None})
    assert (step.rounds, step.known) == ((True, False), (SPEC, SPEC))
    # Values of a narrower format stay what they are known to be; those of a wider one are rounded.
    step = last(lambda x: jnp.exp(x) * x, X, rules={"exp": E5M2})
    assert (step.rounds, step.known) == ((False, False), (E5M2, SPEC))
    step = last(lambda x: jnp.exp(x) * x, X, rules={"exp": "binary32"})
    assert (step.rounds, step.known) == ((True, False), (SPEC, SPEC))
    # In the carrier nothing is rounded, and nothing is known of the result.
    step = last(lambda x: x * x, X, rules={"mul": None})
    assert (step.rounds, step.known, step.out) == ((False, False), (SPEC, SPEC), (None,))


def test_operands_that_are_no_floats_are_left_alone() -> None:
    step = last(lax.pow, X, N)
    assert (step.rounds, step.known, step.out) == ((False, False), (SPEC, None), (SPEC,))
    assert last(lambda n: n + 1, N).kind == "compared"
    step = last(lambda x: jnp.exp(x) > 0.1, X, rules={"exp": None})
    assert (step.kind, step.rounds, step.out) == ("compared", (True, True), (None,))
    assert last(lambda x: x > jnp.inf, X, spec="float8_e4m3fn").rounds == (False, False)


def test_what_is_moved_is_still_known() -> None:
    assert last(lambda x: x.reshape(3, 1), X).out == (SPEC,)
    step = last(lambda x: jnp.concatenate([x, jnp.exp(x)]), X, rules={"exp": None})
    assert step.kind == "structural" and step.out == (None,)
    step = last(lambda x: jnp.concatenate([x, jnp.exp(x)]), X, rules={"exp": E5M2})
    assert step.out == (SPEC,)
    step = last(lambda x: lax.sort((x, jnp.exp(x)), num_keys=1), X, rules={"exp": None})
    assert step.out == (SPEC, None)
    # Constants that are moved are rounded; an infinity that only bounds is not.
    step = last(lambda x: lax.pad(x, np.float32(0.1), [(1, 0, 0)]), X)
    assert (step.rounds, step.known, step.out) == ((False, True), (SPEC, SPEC), (SPEC,))
    step = last(lambda x: lax.pad(x, np.float32(-np.inf), [(1, 0, 0)]), X, spec="float8_e4m3fn")
    assert step.rounds == (False, False) and step.out == (None,)


def test_conversions_keep_what_the_dtype_holds() -> None:
    step = last(lambda x: x.astype(jnp.bfloat16), X, spec=E5M2)
    assert (step.kind, step.out) == ("structural", (E5M2,))
    step = last(lambda x: jnp.exp(x).astype(jnp.bfloat16), X, spec="bfloat16", rules={"exp": SPEC})
    assert (step.kind, step.out) == ("converted", (jc.Spec("bfloat16"),))  # e5m10 has more digits
    step = last(lambda n: n.astype(jnp.float32), N)
    assert (step.kind, step.out) == ("converted", (SPEC,))


def test_sums_are_of_the_accumulators_format_where_there_is_no_other() -> None:
    how = MatmulSpec(accumulate="e8m12")
    assert last(jnp.sum, X, accumulate=how).out == (SPEC,)
    assert last(jnp.sum, X, spec=None, accumulate=how).out == (how.accumulate,)
    assert last(jnp.sum, X, spec=None).out == (None,)


def test_numbers_of_roundings_do_not_meet() -> None:
    """Each equation has numbers for its operands, results and what they are made of."""
    steps = plan_of(lambda x: jnp.exp((x**5 + 0.1) / x), X).steps
    for one, other in itertools.pairwise(steps):
        assert one.result_number + len(one.eqn.outvars) < other.number


def test_solvers_know_what_they_close_over() -> None:
    def fun(a: Any, b: Any) -> Any:
        return lax.custom_linear_solve(lambda v: a * v + a, b, lambda _, b: b / a + jnp.exp(a), lambda _, b: b * a)

    step = last(fun, X, X, rules={"exp": None})
    divided, _, added = step.inner[0].steps
    assert divided.known == (SPEC, SPEC) and not any(divided.rounds)
    assert added.rounds == (False, True) and step.out == (SPEC,)


def test_primitives_without_a_rule() -> None:
    fun = FOREIGN.bind
    with pytest.raises(NotImplementedError, match=r"test_plan\.py:\d+\): there is no rule for it"):
        plan_of(lambda x: fun(x), X)
    assert last(fun, X, unknown="carrier").out == (None,)
    assert last(fun, X, unknown="round_output").out == (SPEC,)


def test_complex_numbers() -> None:
    z = X.astype(np.complex64)
    first, second = plan_of(lambda z: z * z + z, z).steps
    assert first.kind == second.kind == "complex" and second.number == first.number + 4 + 6  # parts, and operations
    assert (first.known, first.out) == ((SPEC, SPEC), (SPEC,))
    for fun in (lambda x: x.astype(jnp.complex64), lambda z: z.reshape(3, 1)):
        step = last(fun, z if "reshape" in fun.__code__.co_names else X)
        assert (step.kind, step.out) == ("structural", (SPEC,))
    assert (last(jnp.exp, z).kind, last(jnp.exp, z, rules={"exp": None}).kind) == ("carried", "carrier")
    assert last(lambda z: lax.real(z) * 0.1, z).rounds == (False, True)


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (
            lambda x: x * x,
            r"primitive 'mul' \(.*test_plan.py:\d+\): spec='fixed8.8:wrap' wraps an exact result.* narrower "
            "operands, saturate, or cast the operands to float64; JAX arrays are float64 only with jax_enable_x64",
        ),
        (lambda x: jnp.mean(x), r"primitive 'div' \(.*test_plan.py:\d+\): .* a quotient has no last bit"),
        (lambda x: x**-1, "primitive 'integer_pow' .* a quotient has no last bit, so it cannot wrap; saturate instead"),
        (jnp.sqrt, "primitive 'sqrt' .* a root has no last bit, so it cannot wrap; saturate instead"),
        (lambda x: (x + 1j * x) * 2j, "primitive 'mul' .* wraps an exact result"),
        (lambda x: lax.fori_loop(0, 3, lambda _, c: c / 3, x), "primitive 'div' .* a quotient has no last bit"),
    ],
)
def test_results_that_cannot_wrap_are_refused_with_their_line(fun: Callable[..., Any], text: str) -> None:
    """When the program is planned: by a report that runs nothing, too."""
    with pytest.raises(ValueError, match=text):
        jc.emulate(fun, "fixed8.8:wrap").report(X)


def test_sums_that_cannot_wrap_are_refused_with_their_line() -> None:
    how = MatmulSpec(product="fixed8.8:wrap", accumulate="fixed8.8")
    with pytest.raises(ValueError, match=r"primitive 'dot_general' \(.*:\d+\): spec='fixed8.8:wrap' wraps"):
        plan_of(lambda x: x @ x, X, spec="fixed8.8", accumulate=how)
    assert plan_of(lambda x: x * x + x, X, spec="fixed4.4:wrap")
    assert plan_of(lambda x: x * x, X, spec="fixed4.4:wrap:stochastic")
