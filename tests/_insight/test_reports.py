"""`EmulatedFunction.report` points: where something happened first, how many bits cancelled, beside which reference.

And loops that never end: they are stopped, and the condition is named.
"""

from __future__ import annotations

import json
import warnings
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulate_cases import KEY, X
from further import Further
from jax import lax

import jchop as jc

further = Further()

report = jc.EmulatedFunction.report

# -- where -------------------------------------------------------------------------------------------------------------


def grown(x: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        with jax.named_scope("inner"):
            carry = lax.fori_loop(0, 2, lambda i, c: c * 4.0, carry)
        return carry, jnp.exp(carry) - jnp.exp(carry)

    return lax.scan(turn, x, None, 3)


@pytest.mark.smoke
def test_a_row_has_its_first_event() -> None:
    """0.1 × 4^5 = 102 and 2 × 4^3 = 128 are within e4m3, the next multiple of 2 × 4^3 is 512; and e^5.5 is beyond."""
    seen = report(jc.emulate(grown, "e4m3"), jnp.array([0.1, 2.0]), trace_values=True)
    rows = {row.primitive: row for row in seen.rows}
    head = grown.__code__.co_firstlineno
    mul, exp, sub = rows["mul"], rows["exp"], rows["sub"]
    assert (mul.scope, mul.place) == ("inner", f"test_reports.py:{head + 3}")
    assert (mul.first_overflow.turn, mul.first_overflow.where) == ((1, 1), (1,))  # type: ignore[union-attr]
    assert (exp.first_overflow.turn, exp.first_overflow.where) == ((0,), (1,))  # type: ignore[union-attr]
    assert str(sub.first_invalid) == str(sub.first_nan) == "turn 0, [1]"
    assert (mul.nans, mul.first_nan, sub.first_overflow) == (0, None, None)
    assert seen.first("overflow") == exp and seen.first("nan") == seen.first("invalid") == sub
    text = seen.table(width=None).splitlines()
    assert {"first_overflow", "first_nan", "first_invalid"} <= set(text[0].split())
    places = [line.rstrip().rfind("test_reports.py") for line in text[1:4]]
    assert len(set(places)) == 1 and places[0] == text[0].rfind("source")


@pytest.mark.parametrize("spec", ["fixed4.4", "fixed4.4:wrap"])
def test_results_that_saturate_or_wrap_are_counted(spec: str) -> None:
    seen = report(jc.emulate(lambda x: x + x, spec), jnp.array([3.0, 7.0, 100.0, -4.0]), trace_values=True)
    counts = [(row.primitive, row.overflows, row.infinities) for row in seen.rows]
    assert counts == [("argument [0]", 1, 0), ("add", 2, 0)]
    assert seen.rows[1].first_overflow.where == (1,)  # type: ignore[union-attr]


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize("reference", [None, "binary64"])
def shards_are_measured_as_the_whole(reference: str | None) -> None:
    """Of elementwise operations; the index of an event has the shard's first."""

    def fun(x: Any) -> Any:
        y = jnp.exp(x) / 3
        return lax.scan(lambda c, z: (c + z, c * z), y - y[::-1], jnp.stack([y, y]))[1].sum(0)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec(None, "x")
    mapped = jax.shard_map(jax.vmap(fun, 1, 1), mesh=mesh, in_specs=rows, out_specs=rows)
    x = jnp.array([[0.1, 2.0, 6.5, -3.0], [1.5, 0.7, 0.3, -9.0], [1.0, 0.0, -1.0, 2.0]])
    whole, parts = (
        report(jc.emulate(f, "e4m3"), x, trace_values=True, reference=reference) for f in (jax.vmap(fun, 1, 1), mapped)
    )
    known = {(row.primitive, row.source): row for row in whole.rows}
    seen = [row for row in parts.rows if (row.primitive, row.source) in known and row.primitive != "reduce_sum"]
    assert {row.primitive for row in seen} == {"exp", "div", "sub", "add", "mul"}
    for row in seen:
        one = known[row.primitive, row.source]
        for name in ("overflows", "underflows", "infinities", "nans", "smallest", "largest", "error", "deviation"):
            np.testing.assert_equal(getattr(row, name), getattr(one, name), err_msg=f"{row.primitive} {name}")
    first = parts.first("overflow")
    assert first is not None and first.primitive == "exp" and first.first_overflow.where[0] == 2  # type: ignore[union-attr]


def test_nan_is_invalid_only_where_no_operand_is_nan() -> None:
    """Elementwise at each place; of sums and products of matrices if no operand has any."""

    def fun(x: Any) -> Any:
        y = jnp.sqrt(x)
        z = y + jnp.array([1.0, -jnp.inf, jnp.inf])
        return z * 0.0, jnp.sum(y), jnp.array([[0.0, jnp.inf, 1.0]]) @ jnp.zeros((3, 1))

    seen = report(jc.emulate(fun, "e5m2"), jnp.array([-1.0, 4.0, jnp.inf]), trace_values=True)
    counts = {row.primitive: (row.nans, row.invalid) for row in seen.rows}
    assert counts["sqrt"] == (1, 1) and counts["add"] == (1, 0) and counts["mul"] == (3, 2)
    assert counts["reduce_sum"] == (1, 0) and counts["dot_general"] == (1, 1)
    assert seen.first("nan").primitive == "sqrt"  # type: ignore[union-attr]


def test_infinities_and_nan_have_rows_wherever_they_are_born() -> None:
    """On entry, of constants, and of what only moves numbers."""
    table = jnp.array([1.0, 1e6])

    def fun(x: Any, scale: Any) -> Any:
        return jnp.where(x > 1, x, jnp.nan) * scale, x.at[5].get(mode="fill", fill_value=jnp.inf), table + 1.0

    seen = report(jc.emulate(fun, "e4m3"), jnp.array([0.5, 1e5]), scale=jnp.float32(jnp.nan), trace_values=True)
    rows = {row.primitive: row for row in seen.rows}
    assert rows["argument [0]"].overflows == 1 and str(rows["argument [0]"].first_overflow) == "[1]"
    assert rows["argument ['scale']"].nans == 1 and rows["constant"].infinities == 1
    assert rows["argument [0]"].place == f"test_reports.py:{fun.__code__.co_firstlineno}"
    line = fun.__code__.co_firstlineno + 1
    born = {row.place for row in seen.rows if row.spec == "float8_e4m3" and row.primitive not in ("mul", "add")}
    assert f"test_reports.py:{line}" in born  # the NaN of where, and what fills the gather
    plain = report(jc.emulate(fun, "e4m3"), jnp.array([0.5, 2.0]), scale=jnp.float32(1), trace_values=True)
    assert not any(row.primitive.startswith("argument") for row in plain.rows)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("overflow", r"stopped at the first overflow: exp of 8.0 is inf \(turn 0, \[1\]\) at .*test_reports.py:"),
        ("nan", r"stopped at the first nan: sub of inf, inf is nan \(turn 0, \[1\]\) at .*test_reports.py:"),
        ("invalid", r"stopped at the first invalid: sub of inf, inf is nan"),
    ],
)
def test_a_run_stops_at_an_event(event: Any, words: str) -> None:
    low, x = jc.emulate(grown, "e4m3"), jnp.array([0.01, 0.5])
    seen = report(low, x, stop_at=event)
    line = grown.__code__.co_firstlineno + 4
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(seen.stopped)
    assert f":{line}" in seen.stopped and seen.table(width=None).endswith(seen.stopped) and seen.traced
    assert sum(row.overflows for row in seen.rows) == (1 if event == "overflow" else 2)
    assert not report(low, x / 1e3, stop_at=event).stopped
    on_entry = report(low, jnp.array([1e6, jnp.nan]), stop_at="nan")
    assert on_entry.stopped.startswith("stopped at the first nan: argument [0], nan, is nan ([1]) at ")


# -- cancelled bits ----------------------------------------------------------------------------------------------------


def test_cancelled_bits_are_the_drop_of_the_exponent() -> None:
    """Against the logarithms of exact sums."""
    rng = np.random.default_rng(0)
    a = jc.round_to_format(rng.uniform(1, 2, 200).astype(np.float32), "e5m7")
    b = jc.round_to_format(-a * rng.uniform(0.98, 1.02, 200).astype(np.float32), "e5m7")
    seen = report(jc.emulate(lambda a, b: a + b, "e5m7"), a, b, trace_values=True)
    exponent = lambda x: x.numerator.bit_length() - x.denominator.bit_length()  # noqa: E731
    exact = [(Fraction(float(p)), Fraction(float(q))) for p, q in zip(a, b, strict=True)]
    drops = [8 if p == -q else max(0, max(map(exponent, (p, q))) - exponent(p + q)) for p, q in exact]
    (row,) = seen.rows
    assert 5 <= max(drops) == row.cancelled and row.cancelled_mean == pytest.approx(np.mean(drops))
    product = report(jc.emulate(lambda a, b: (a * b, jnp.sum(a)), "e5m7"), a, b, trace_values=True)
    assert all(np.isnan(row.cancelled) for row in product.rows)


def test_a_zero_difference_has_lost_every_digit() -> None:
    for spec, digits in (("e5m2", 3), (None, 24)):
        (row,) = report(jc.emulate(lambda x: x - x, spec), jnp.array([1.0, 0.0]), trace_values=True).rows
        assert (row.cancelled, row.cancelled_mean) == (digits, digits)


# -- references --------------------------------------------------------------------------------------------------------


def dotted(x: Any) -> Any:
    y = lax.fori_loop(0, 3, lambda i, c: c * 1.1 + 0.3, x)
    return lax.cond(y[0] > 0, jnp.sum, jnp.prod, y) / 3


def test_a_wider_reference() -> None:
    """Errors of float32 itself are seen: the final deviation is that of NumPy's float64 program of the same numbers."""
    x = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1, 8), jnp.float32)
    low = jc.emulate(dotted, None)
    y = np.asarray(x, np.float64)
    for _ in range(3):
        y = y * np.float64(np.float32(1.1)) + np.float64(np.float32(0.3))
    want = y.sum() / 3
    seen = report(low, x, reference="binary64")
    assert seen.traced and seen.reference == "binary64"
    row = next(row for row in seen.rows if row.primitive == "div")
    assert row.deviation == pytest.approx(abs(row.largest - want) / want, rel=1e-9) and 0 < row.deviation < 1e-6
    assert {row.deviation for row in report(low, x, trace_values=True).rows if row.deviation == row.deviation} == {0}
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]


def test_a_reference_in_another_format() -> None:
    """The reference program is the emulated one, if it has its format and no sum is longer than its digits."""
    x = jc.round_to_format(X, "bfloat16")
    fun = lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: c * 1.5 + x, x) / 3 - x  # noqa: E731
    seen = report(jc.emulate(fun, "bfloat16"), x, reference="bfloat16")
    assert [row.deviation for row in seen.rows] == [0.0] * len(seen.rows) and len(seen.rows) == 4
    other = report(jc.emulate(fun, "bfloat16"), x, reference="tf32")
    assert 0 < max(row.deviation for row in other.rows) < 0.02
    with pytest.raises(ValueError, match="must be deterministic"):
        report(jc.emulate(fun, "bfloat16"), x, reference="e5m2:stochastic")


def test_primitives_without_a_form_in_float64_are_named() -> None:
    fun = lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) + 1, jnp.float32) * 2.0  # noqa: E731
    seen = report(jc.emulate(fun, "bfloat16"), X, reference="binary64")
    assert any("the reference is the carrier's for: bitcast_convert_type" in note for note in seen.notes)
    draw = lambda key: jax.random.normal(key, (3,)) * 2.0  # noqa: E731
    drawn = report(jc.emulate(draw, "bfloat16"), KEY, reference="binary64")
    assert max(row.deviation for row in drawn.rows) < 0.01 and len(drawn.rows) == 2


# -- as data -----------------------------------------------------------------------------------------------------------


@further.first
def a_report_is_strict_json() -> None:
    def constant(text: str) -> Any:
        raise AssertionError(text)

    low = jc.emulate(grown, "e4m3", rules={"exp": None})
    seen = report(low, jnp.array([0.1, 60.0]), trace_values=True)
    read = json.loads(seen.to_json(indent=1), parse_constant=constant)
    assert read == seen.as_dict() and read["traced"] is True and read["reference"] == "carrier"
    assert [row["primitive"] for row in read["rows"]] == [row.primitive for row in seen.rows]
    mul = next(row for row in read["rows"] if row["primitive"] == "mul")
    assert mul["cancelled"] is None and mul["first_overflow"]["turn"] == [0, 1] and mul["results"] == 12
    assert json.loads(report(low, X).to_json(), parse_constant=constant)["traced"] is False


def test_what_is_left_wide_is_listed() -> None:
    low = jc.emulate(lambda x: jnp.exp(jnp.sin(x)) + jnp.exp(x), "e5m2", rules={"exp": None})
    seen = report(low, X)
    assert seen.notes == ("left in the carrier: exp (2)",) and str(seen).endswith(seen.notes[0])
    assert not report(jc.emulate(jnp.exp, "e5m2"), X).notes


# -- loops that never end ----------------------------------------------------------------------------------------------


def stuck(t: Any) -> Any:
    return lax.while_loop(lambda t: t < 10, lambda t: t + 0.01, t)


LINE = stuck.__code__.co_firstlineno + 1


def said(call: Any) -> tuple[Any, list[str]]:
    """The result, and the warnings until all effects are done."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = jax.block_until_ready(call())
        jax.effects_barrier()
    assert all(one.category is RuntimeWarning for one in found)
    assert all((one.filename, one.lineno) == (__file__, LINE) for one in found)
    return result, [str(one.message) for one in found]


@pytest.mark.smoke
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_never_ends_is_stopped(compiled: bool) -> None:
    low = jc.emulate(stuck, "bfloat16", max_turns=400)
    low = jax.jit(low) if compiled else low
    result, words = said(lambda: low(0.0))
    assert float(result) == 4.0  # where 0.01 is less than half a step
    assert words == [
        "a while loop was stopped after 351 turns, as its values no longer change and it would never end (a format "
        f"with more digits, or a larger step or tolerance, ends it); its condition at {__file__}:{LINE} "
        "(return lax.while_loop(lambda t: t < 10, lambda t: t + 0.01, t)) still holds: 4.0 < 10.0"
    ]
    assert said(lambda: low(9.99)) == (10.0, [])


def test_exactly_as_many_turns_are_allowed() -> None:
    count = lambda n: lax.while_loop(lambda c: c < n, lambda c: c + 1.0, 0.0)  # noqa: E731
    low = jc.emulate(count, "bfloat16", max_turns=5)
    assert said(lambda: low(5.0)) == (5.0, [])
    with pytest.warns(RuntimeWarning, match=r"5\.0 < 6\.0"):
        assert float(low(6.0)) == 5.0
    with pytest.raises(ValueError, match="max_turns=0"):
        jc.emulate(count, "bfloat16", max_turns=0)


def test_batches_of_loops() -> None:
    """Those that ended are right; the others are counted and shown."""
    starts = jnp.array([0.0, 9.99, 1.0])
    result, words = said(lambda: jc.emulate(jax.vmap(stuck), "bfloat16", max_turns=400)(starts))
    assert result.tolist() == [4.0, 10.0, 4.0] and len(words) == 1 and words[0].endswith(": 4.0 < 10.0, 4.0 < 10.0")
    result, words = said(lambda: jax.vmap(jc.emulate(stuck, "bfloat16", max_turns=400))(starts))
    assert result.tolist() == [4.0, 10.0, 4.0] and len(words) == 2


def test_loops_within_loops_and_derivatives() -> None:
    def nested(x: Any) -> Any:
        def body(carry: Any) -> Any:
            i, x = carry
            return i + 1, lax.scan(lambda x, _: (stuck(x), None), x, None, 2)[0] * 0.5

        return lax.while_loop(lambda c: (c[0] < 2) & jnp.isfinite(c[1]), body, (0, x))

    (turns, x), words = said(lambda: jax.jit(jc.emulate(nested, "bfloat16", max_turns=400))(0.0))
    assert (int(turns), float(x)) == (2, 2.0) and len(words) == 4
    assert all(text.endswith("still holds: 4.0 < 10.0") for text in words)
    (x, slope), words = said(lambda: jax.jvp(jc.emulate(stuck, "bfloat16", max_turns=400), (0.0,), (1.0,)))
    assert (float(x), float(slope)) == (4.0, 1.0) and len(words) == 1
    drawn, words = said(lambda: jc.emulate(stuck, "e5m4:stochastic", max_turns=20)(0.0, key=KEY))
    assert float(drawn) < 1 and f"{float(drawn)} < 10.0" in words[0]


def test_constants_of_a_condition_are_those_that_it_has() -> None:
    """0.3 is 0.3125 in e4m3; and a condition that is not a comparison is named by its line alone."""
    low = jc.emulate(lambda: lax.while_loop(lambda t: ~(t >= 0.3), lambda t: t * 1.0, 0.25), "e4m3", max_turns=3)
    with pytest.warns(RuntimeWarning, match=r"still holds: 0\.25 >= 0\.3125 is false$"):
        low()
    flag = lambda: lax.while_loop(lambda c: c[0], lambda c: (c[0], c[1] * 1.0), (True, 1.0))  # noqa: E731
    with pytest.warns(RuntimeWarning, match=r"test_reports.py:\d+ .*still holds$"):
        jc.emulate(flag, "e4m3", max_turns=3)()


def test_the_report_of_a_loop_that_never_ends() -> None:
    """One whose values stay is stopped at once; one that draws at the bound; and the text says which bound."""
    with pytest.warns(RuntimeWarning, match=r"its values no longer change and it would never end.*4\.0 < 10\.0"):
        seen = report(jc.emulate(stuck, "bfloat16"), 0.0, trace_values=True)
    assert f"{__file__}:{LINE}" in seen.notes[0] and seen.rows[0].largest == 4.0
    assert "while loops make at most 10000 turns in this report (max_turns)" in str(seen)
    with pytest.warns(RuntimeWarning, match="max_turns=7 turns"):
        report(jc.emulate(stuck, "bfloat16:stochastic", key=KEY), 0.0, trace_values=True, max_turns=7)
    with pytest.warns(RuntimeWarning, match="max_turns=6 turns"):
        seen = report(jc.emulate(stuck, "binary16", max_turns=6), jnp.float32(0.0), trace_values=True)
    assert "at most 6 turns" in str(seen)
    ended = report(jc.emulate(stuck, "bfloat16"), 9.99, trace_values=True)
    assert len(ended.notes) == 1 and "at most" in ended.notes[0]
    assert not report(jc.emulate(jnp.exp, "bfloat16"), 1.0, trace_values=True).notes


test_further = further.test()
