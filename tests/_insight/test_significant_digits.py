"""`jchop.significant_digits`: estimates beside true digits, samples, loops and branches, instabilities, errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._insight.reports.digits import Instability, student_quantile

further = Further()

Array = jax.Array
KEY = jax.random.key(7)
MOST = 24 * math.log10(2)


def true_digits(found: Any, exact: Fraction) -> float:
    """The digits that the mean shares with an exact number, at most those of binary32."""
    if not math.isfinite(found):
        return 0.0
    error = abs(Fraction(float(found)) - exact) / abs(exact)
    return min(max(-math.log10(error), 0.0), MOST) if error else MOST


def kinds(found: jc.SignificantDigits) -> dict[str, int]:
    return {row.kind: row.count for row in found.instabilities}


# -- estimates ---------------------------------------------------------------------------------------------------------


def random_program(seed: int) -> tuple[Callable[..., Any], list[float]]:
    """Ten operations on four numbers: a tree whose every result is used by a later one, or is the output."""
    rng = np.random.default_rng(seed)
    inputs = [float(np.float32(x)) for x in rng.uniform(0.5, 2, 4) * rng.choice([-1, 1], 4)]
    choices = [(rng.integers(4), rng.integers(3 + i), rng.integers(100)) for i in range(10)]

    def program(*given: Any) -> Any:
        values = list(given)
        for op, i, j in choices:
            a, b = values[-1], values[i]
            if j % 2:
                a, b = b, a
            values.append((a + b, a - b, a * b, a / b if b is not a else a * a)[op])
        return values[-1]

    return program, inputs


@further
@pytest.mark.parametrize("count", [8, pytest.param(120, marks=pytest.mark.slow)])
def estimates_of_random_programs_are_true(count: int) -> None:
    """At most half a digit above the truth, in 95 of 100 of the programs whose exact value is a number."""
    above = programs = 0
    seed = 0
    while programs < count:
        program, inputs = random_program(seed)
        seed += 1
        try:
            exact = program(*map(Fraction, inputs))
        except ZeroDivisionError:
            continue
        if not exact:
            continue
        programs += 1
        found = jc.significant_digits(program, *inputs, key=jax.random.key(seed))
        above += bool(found.digits > true_digits(found.mean, exact) + 0.5)
    assert above <= count / 20


def determinant(rows: list[list[Any]]) -> Any:
    """By elimination without pivots."""
    rows, product = [list(row) for row in rows], 1
    for k in range(len(rows)):
        product = product * rows[k][k]
        for i in range(k + 1, len(rows)):
            factor = rows[i][k] / rows[k][k]
            for j in range(k + 1, len(rows)):
                rows[i][j] = rows[i][j] - factor * rows[k][j]
    return product


@pytest.mark.in_turn(20)
@pytest.mark.parametrize(("n", "low", "high"), [(4, 3.0, 5.0), (6, 0.3, 2.7), (8, 0.0, 1.0)])
def test_determinants_of_hilbert_matrices_lose_their_digits(n: int, low: float, high: float) -> None:
    one = Fraction(1)
    exact = determinant([[one / (i + j + 1) for j in range(n)] for i in range(n)])

    def hilbert(one: Any) -> Any:
        return determinant([[one / (i + j + 1.0) for j in range(n)] for i in range(n)])

    found = [jc.significant_digits(hilbert, 1.0, key=jax.random.key(i)) for i in range(3)]
    estimates = [float(x.digits) for x in found]
    assert low <= float(np.median(estimates)) <= high, estimates
    assert np.median(estimates) <= np.median([true_digits(x.mean, exact) for x in found]) + 0.5
    if n == 8:
        assert "none" in str(found[0])
        assert kinds(found[0])["division"] > 0


def muller(turns: int) -> Callable[[Any, Any], Any]:
    """J.-M. Muller's sequence: its limit is 6, and rounding errors lead it to 100."""

    def step(pair: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        before, now = pair
        return (now, 111 - 1130 / now + 3000 / (now * before)), None

    return lambda x, y: jax.lax.scan(step, (x, y), length=turns)[0][1]


def test_the_sequence_of_muller_has_no_digits() -> None:
    few, none, wrong = (jc.significant_digits(muller(n), 11 / 2, 61 / 11, key=KEY) for n in (2, 6, 13))
    assert few.worst > 2
    assert few.instabilities == ()
    assert none.worst < 1
    assert "none" in str(none)
    # All samples agree on the wrong limit; the quotients by noise on the way are counted.
    assert float(wrong.mean) == pytest.approx(100, rel=1e-5)
    assert kinds(wrong)["division"] >= 2


def test_the_quantiles_are_those_of_the_table_of_student() -> None:
    """By the degrees of freedom and the confidence."""
    table = {(1, 0.95): 12.706, (2, 0.95): 4.303, (3, 0.9): 2.353, (3, 0.99): 5.841, (4, 0.95): 2.776}
    table[99, 0.95] = 1.984
    assert {row: student_quantile(*row) for row in table} == pytest.approx(table, abs=5e-4)


def test_digits_follow_the_number_of_samples_and_the_confidence() -> None:
    """The factor √N / τ of the table of Student's distribution, for the same samples."""
    sure = jc.significant_digits(lambda x: x / 3, 1.0, key=KEY, samples=4, confidence=0.99)
    unsure = jc.significant_digits(lambda x: x / 3, 1.0, key=KEY, samples=4, confidence=0.9)
    assert float(sure.spread) > 0
    assert float(unsure.digits) == pytest.approx(
        math.log10(2 * abs(float(unsure.mean)) / (2.353 * float(unsure.spread))), abs=1e-3
    )
    assert float(unsure.digits - sure.digits) == pytest.approx(math.log10(5.841 / 2.353), abs=1e-3)


def test_a_complex_number_has_the_digits_of_its_worse_part() -> None:
    """Here of the imaginary part: the real part is exact."""
    found = jc.significant_digits(lambda x: jax.lax.complex(x, x / 3), 1.0, key=KEY, samples=4, confidence=0.9)
    assert float(found.spread) > 0 and found.mean.real == 1
    assert float(found.mean.imag) == pytest.approx(1 / 3, rel=1e-6)
    assert float(found.digits) == pytest.approx(math.log10(2 * found.mean.imag / (2.353 * found.spread)), abs=1e-3)


# -- samples -----------------------------------------------------------------------------------------------------------


def halvings(x: Array) -> tuple[Array, int]:
    return jax.lax.while_loop(lambda c: c[0] > 0.3, lambda c: (c[0] * 0.99 - 0.001, c[1] + 1), (x, 0))


def branches(x: Array) -> Array:
    return jax.lax.cond(x * x > 1.21, lambda x: jnp.sin(x) * 3, lambda x: x / 3, x)


def folds(x: Array) -> tuple[Array, Array]:
    return jax.lax.scan(lambda c, y: (c * y + 0.1, c / y), x[0], x, reverse=True)


@jax.custom_jvp
def squared(x: Array) -> Array:
    return x * x


squared.defjvp(lambda primals, tangents: (squared(*primals), 2 * primals[0] * tangents[0]))


def shards(x: Array) -> tuple[Array, Array]:
    """Four shards, each with its own turns and branches."""
    rank = jax.lax.axis_index("x")
    y = jax.lax.while_loop(lambda c: jnp.max(c) > 0.3, lambda c: c * 0.9, x / 3 + rank / 2)
    y, rows = jax.lax.scan(lambda c, z: (c + z / 7, c * z), jax.lax.cond(rank > 1, lambda y: y / 7, jnp.sin, y), x)
    return y + jax.lax.psum(y, "x"), rows


def on_shards(typed: bool) -> Callable[[Array], Any]:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("x")
    return jax.shard_map(shards, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=typed)


PROGRAMS = [
    (lambda x: jnp.sum(x / 3) * jax.jit(jnp.cos)(x[0]), jnp.array([1.0, 0.7, 0.3])),
    (halvings, jnp.float32(1.1)),
    (branches, jnp.float32(1.1)),
    (folds, jnp.array([1.0, 0.7, 0.3])),
    (jax.vmap(halvings), jnp.array([1.1, 0.2, 0.5])),
    (lambda x: {"a": squared(x), "b": jax.checkpoint(jnp.exp)(x)}, jnp.float32(0.3)),
    pytest.param(
        lambda x: jnp.linalg.solve(jnp.outer(x, x) + jnp.eye(3), x), jnp.array([1.0, 0.7, 0.3]), marks=pytest.mark.slow
    ),
    (lambda x: x * (1 + 2j) / 3, jnp.array([1.0, 0.7])),
    pytest.param(lambda x: on_shards(True)(x), jnp.linspace(0.3, 1.3, 8), marks=pytest.mark.slow),
    pytest.param(lambda x: on_shards(False)(x), jnp.linspace(0.3, 1.3, 8), marks=pytest.mark.slow),
]


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize(("fun", "x"), PROGRAMS)
def samples_are_runs_with_other_keys(fun: Callable[..., Any], x: Array) -> None:
    """Bit for bit, also if the samples take other branches and other numbers of turns."""
    low = jc.emulate(fun, "bfloat16:stochastic")
    found = jc.significant_digits(low, x, key=KEY, samples=5)
    runs = [low(x, key=jax.random.fold_in(KEY, i)) for i in range(5)]
    for mean, spread, *each in zip(*map(jax.tree.leaves, (found.mean, found.spread, *runs)), strict=True):
        every = np.stack([np.asarray(one) for one in each])
        every = every.astype(np.complex128 if np.iscomplexobj(every) else np.float64)
        np.testing.assert_allclose(mean, every.mean(0), rtol=1e-13)
        np.testing.assert_allclose(spread, every.std(0, ddof=1), rtol=1e-7, atol=1e-15)
    assert jax.tree.structure(found.digits) == jax.tree.structure(runs[0])


def test_float32_arguments_run_in_float64() -> None:
    """Without 64 bits in the configuration, which stays as it is."""
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    found = jc.significant_digits(lambda x: {"y": x["w"] * 1.1}, {"w": jnp.ones(3)}, key=KEY)
    assert found.digits["y"].shape == (3,)
    assert found.most == pytest.approx(MOST)
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize(
    "fun",
    [
        lambda v: jax.lax.scan(lambda c, x: (c + x * x, None), jnp.float32(0), v)[0],
        lambda v: jax.lax.fori_loop(0, 3, lambda i, c: c + v, jnp.zeros(2, jnp.float32)),
        lambda v: jax.lax.add(v, jnp.ones(2, jnp.float32)),
    ],
)
def test_a_function_with_float32_of_its_own_says_what_to_change(fun: Callable[[Array], Array]) -> None:
    with pytest.raises(TypeError, match=r"fun=.* does not run in float64: .* as in jnp.zeros\(\(\), x.dtype\)"):
        jc.significant_digits(fun, jnp.array([0.1, 0.3]), key=KEY)
    kept = jc.significant_digits(jc.emulate(fun, "bfloat16:stochastic"), jnp.array([0.1, 0.3]), key=KEY)
    assert kept.most < 3


def test_a_function_that_never_runs_keeps_its_error() -> None:
    with pytest.raises(TypeError, match="incompatible shapes"):
        jc.significant_digits(lambda v: v + jnp.ones(3), jnp.array([0.1, 0.3]), key=KEY)


def test_equal_samples_have_all_digits_and_no_numbers_none() -> None:
    found = jc.significant_digits(lambda x: (x + x, x * 0, jnp.int32(3), x > 0, 1 / (x - x)), 1.5, key=KEY)
    assert [float(x) for x in found.digits] == pytest.approx([MOST] * 3 + [MOST, 0.0])
    keys = jc.significant_digits(lambda x: (x, jax.random.key(0)), 1.5, key=KEY)
    assert keys.digits[1] is None


def test_instabilities_of_shards_are_counted() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("x")
    fun = jax.shard_map(lambda x: (x / 3 + 1e5) - 1e5, mesh=mesh, in_specs=rows, out_specs=rows)
    (row,) = jc.significant_digits(fun, jnp.ones(4), key=KEY, samples=12).instabilities
    assert (row.kind, row.count, row.primitive) == ("cancellation", 4, "sub")
    one = jax.shard_map(lambda x: jnp.sum(x / 3)[None], mesh=mesh, in_specs=rows, out_specs=rows)
    every = jax.shard_map(lambda x: jax.lax.psum(x / 3, "x"), mesh=mesh, in_specs=rows, out_specs=jax.P())
    for summed, x in ((one, [1e6, -1e6 + 0.3, 1, 2, 3, 4, 5, 6]), (every, [1e6, 1, -1e6, 0.3])):
        found = jc.significant_digits(summed, jnp.array(x), key=KEY, samples=12)
        assert kinds(found) == {"cancellation": 1 if summed is one else 4}


# -- instabilities -----------------------------------------------------------------------------------------------------


def test_a_cancellation_is_counted_with_its_line() -> None:
    found = jc.significant_digits(lambda x: (x / 3 + 1e5) - 1e5, jnp.ones(4), key=KEY)
    (row,) = found.instabilities
    assert (row.kind, row.count, row.primitive) == ("cancellation", 4, "sub")
    assert row.place.startswith("test_significant_digits.py:")


#: Sums in one operation of terms that cancel, and of terms that do not; the count of cancellations.
SUMS = {
    "reduce_sum": (jnp.sum, 1),
    "dot_general": (lambda t: t[None] @ jnp.ones((4, 3), t.dtype), 3),
    "scatter-add": (lambda t: jax.ops.segment_sum(t, jnp.array([1, 1, 1, 0]), num_segments=2), 1),
    "cumsum": (jnp.cumsum, 2),
    "scatter-sub": (lambda t: t.at[0].subtract(-t[2]), 1),
    "reduce_window_sum": (lambda t: jax.lax.reduce_window(t, 0.0, jax.lax.add, (4,), (1,), "VALID"), 1),
    "conv_general_dilated": (lambda t: jnp.convolve(t, jnp.ones(4, t.dtype), "valid"), 1),
    "ragged_dot_general": (lambda t: jax.lax.ragged_dot(t[None], jnp.ones((1, 4, 2), t.dtype), jnp.array([1])), 2),
}
TERMS = jnp.array([1e6, 1.0, -1e6, 0.3])


@pytest.mark.parametrize(
    "primitive", [pytest.param(x, marks=[] if i < 3 else pytest.mark.slow) for i, x in enumerate(SUMS)]
)
def test_a_cancellation_in_a_sum_of_many_terms_is_counted(primitive: str) -> None:
    fun, count = SUMS[primitive]
    found = jc.significant_digits(lambda x: fun(x / 3), TERMS, key=jax.random.key(3), samples=10)
    assert [(r.kind, r.primitive, r.count) for r in found.instabilities] == [("cancellation", primitive, count)]
    assert jc.significant_digits(lambda x: fun(x / 3), jnp.abs(TERMS), key=KEY, samples=10).instabilities == ()


@pytest.mark.parametrize("fun", [lambda a: a[0] / 1.1 + a[1] / 1.1, lambda a: jnp.sum(a / 1.1), lambda a: (a / 3) @ a])
def test_an_overflow_is_no_cancellation(fun: Callable[..., Any]) -> None:
    found = jc.significant_digits(fun, jnp.full(2, 3e38, jnp.float32), key=KEY)
    assert (found.worst, found.instabilities) == (0, ())


def test_small_and_noisy_terms_hide_no_cancellation_and_earlier_losses_are_not_counted() -> None:
    def noise(x: Array) -> Array:
        return (x / 3 + 1e12) - 1e12

    def hidden(x: Array) -> Array:  # the terms: a large one, noise far below the error of the sum, zero, a large one
        return jnp.sum(jnp.stack([x[0] / 3, noise(x[1]) * 1e-12, 0 * x[0], x[2] / 3 + 0.05]))

    def before(x: Array) -> Array:  # noise of the size of the sum
        return jnp.sum(jnp.stack([x[0] / 3, -noise(x[0])]))

    rows = [jc.significant_digits(f, TERMS, key=KEY, samples=10).instabilities for f in (hidden, before)]
    assert [[r.primitive for r in each if r.primitive == "reduce_sum"] for each in rows] == [["reduce_sum"], []]


@further
def cancellations_of_a_matrix_product_are_those_of_its_terms() -> None:
    """From the samples: by the sum of all products of two numbers, and of their variances."""

    def fun(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
        u, v = jnp.concatenate([a, a * c], 1) / 3, jnp.concatenate([b, -b]) / 7
        return u, v, u @ v

    rng, samples = np.random.default_rng(0), 5
    with jax.enable_x64(True):  # type: ignore[attr-defined]
        low = jc.emulate(fun, "binary32:stochastic")
        args = rng.normal(size=(9, 5)), rng.normal(size=(5, 7)), 1 + 1e-4 * rng.normal(size=(9, 5))
        found = jc.significant_digits(low, *args, key=KEY, samples=samples)
        runs = [[np.asarray(x) for x in low(*args, key=jax.random.fold_in(KEY, i))] for i in range(samples)]
    every = [np.stack(x) for x in zip(*runs, strict=True)]
    (u, v, y), (du, dv, dy) = ([f(x) for x in every] for f in (lambda x: x.mean(0), lambda x: x.var(0, ddof=1)))
    u, du = u[:, :, None], du[:, :, None]
    size, error = ((u * v) ** 2).sum(1), (du * v**2 + u**2 * dv + du * dv).sum(1)
    factor = math.sqrt(samples) / 2.776  # Student's distribution with four degrees of freedom
    before, after = (
        np.clip(np.log10(factor * np.sqrt(square / var)), 0, MOST) for square, var in ((size, error), (y**2, dy))
    )
    count = int(np.sum(before - after >= 4))
    assert 3 < count < 60
    assert kinds(found) == {"cancellation": count}


@further.first
def a_division_by_noise_is_counted() -> None:
    def noise(x: Array) -> Array:
        with jax.named_scope("noise"):
            return 1 / ((x / 3 + 1e7) - (1e7 + x / 3))

    found = jc.significant_digits(noise, 1.0, key=jax.random.key(0), samples=5)
    assert [row.scope for row in found.instabilities if row.kind == "division"] == ["noise"]
    assert jc.significant_digits(lambda x: 1 / (x / 3), 1.0, key=KEY).instabilities == ()


def test_comparisons_with_several_outcomes_are_counted_in_all_turns() -> None:
    def fun(x: Array) -> Array:
        def turn(c: Array, _: None) -> tuple[Array, Array]:
            return c, jnp.where(c / 3 * 3 > c, 1.0, -1.0)

        return jnp.sum(jax.lax.scan(turn, x, length=10)[1])

    found = jc.significant_digits(fun, 1.0, key=KEY)
    (row,) = found.instabilities
    assert (row.kind, row.primitive) == ("branching", "gt")
    assert 1 < row.count <= 10
    assert jc.significant_digits(lambda x: jnp.where(x / 3 > 0.2, x, 0), 1.0, key=KEY).instabilities == ()


def test_a_loop_that_never_ends_says_why() -> None:
    with pytest.warns(RuntimeWarning, match=r"max_turns=30.*<"):
        found = jc.significant_digits(
            lambda x: jax.lax.while_loop(lambda t: t < 1e9, lambda t: t + 0.25, x), 0.0, key=KEY, max_turns=30
        )
    assert "max_turns=30" in found.notes[0]
    assert float(found.mean) == 7.5


@further
def a_matrix_is_factored_by_code_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """For all samples and turns: the factors, and two triangular systems."""
    a = jnp.eye(3) * 3 + 1

    def compiled(turns: int) -> int:
        def fun(x: Array) -> Array:
            return jax.lax.scan(lambda c, _: (jnp.linalg.solve(a, c) + x, None), x, length=turns)[0]

        with jax.log_compiles():
            caplog.clear()
            jc.significant_digits(jc.emulate(fun, "e5m8:stochastic"), jnp.ones(3), key=KEY, samples=2)
        return sum("Finished XLA compilation" in record.message for record in caplog.records)

    compiled(1)
    assert compiled(2) <= 3


# -- faces and errors --------------------------------------------------------------------------------------------------


def test_the_result_is_text_and_plain_data() -> None:
    found = jc.significant_digits(lambda x: (x / 3, (x + 1e7) - 1e7), jnp.array([1.3, 0.3]), key=KEY, samples=8)
    text = str(found)
    assert "significant digits of 4 numbers: worst none" in text
    assert "2 numbers have none (8 samples)" in text
    assert "cancellation" in text
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert max(data["digits"]["[1]"]) < 1 < min(data["digits"]["[0]"])
    assert data["instabilities"][0]["count"] == 2
    assert isinstance(found.instabilities[0], Instability)
    assert "<table" in found._repr_html_()


class Model:
    @jc.emulate("bfloat16:stochastic")
    def third(self, x: Array) -> Array:
        return x / 3


def test_methods_and_keyword_arguments() -> None:
    assert jc.significant_digits(Model().third, jnp.float32(1), key=KEY).most == pytest.approx(8 * math.log10(2))
    found = jc.significant_digits(lambda x, *, y: x / y, 1.0, y=3.0, key=KEY)
    assert float(found.mean) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "fun=3", lambda: jc.significant_digits(3, key=KEY)),  # type: ignore[arg-type]
        (ValueError, "samples=1", lambda: jc.significant_digits(jnp.sin, 1.0, key=KEY, samples=1)),
        (ValueError, "confidence=1", lambda: jc.significant_digits(jnp.sin, 1.0, key=KEY, confidence=1)),
        (ValueError, "max_turns=0", lambda: jc.significant_digits(jnp.sin, 1.0, key=KEY, max_turns=0)),
        (ValueError, "a stochastic spec", lambda: jc.significant_digits(jnp.sin, 1.0, key=KEY, spec="binary32")),
        (TypeError, "key=3", lambda: jc.significant_digits(jnp.sin, 1.0, key=3)),  # type: ignore[arg-type]
        (
            ValueError,
            "leave spec out",
            lambda: jc.significant_digits(jc.emulate(jnp.sin, "e5m2:stochastic"), 1.0, key=KEY, spec="e5m2:stochastic"),
        ),
        (ValueError, "a stochastic spec", lambda: jc.significant_digits(jc.emulate(jnp.sin, "e5m2"), 1.0, key=KEY)),
        (ValueError, "float32", lambda: jc.significant_digits(lambda x: jnp.sin(jnp.float32(x)), 1.0, key=KEY)),
    ],
)
def test_bad_input_is_named(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()


test_further = further.test()
