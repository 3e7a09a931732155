"""`jc.tune`: the formats of a program within a tolerance. The search is compared with all assignments, and the compiled
program, whose formats are arguments, with `jc.emulate`, bit for bit; its rounding with the oracle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from emulate_cases import X, Y, loops, straight, sums
from further import Further

import jchop as jc
from jchop._insight.tune._search import AssignmentSearch
from jchop._insight.tune._traced_formats import format_row, is_spec_traceable, round_to_row
from jchop._insight.tune._tune import _as_menu, make_tuning_problem
from jchop._spec.spec import as_spec

further = Further()

GRIDS = ("e5m2", "e4m3fn", "bfloat16", "e5m2:saturate", "e4m3:propagate", "e2m1fn", "e8m23")


@pytest.mark.parametrize("text", GRIDS)
@pytest.mark.in_turn(7)
def test_a_row_of_integers_rounds_as_the_oracle_does(text: str) -> None:
    spec = as_spec(text)
    fmt: Any = spec.format
    step = max(1, (1 << fmt.bits - 1) // 200)
    codes = [*range(0, 40), *range(0, 1 << fmt.bits - 1, step)]
    values = [v for v in (fmt.value_of(code) for code in codes) if v is not None and np.isfinite(float(v))]
    values += [fmt.max, fmt.smallest]
    middles = [(Fraction(a) + Fraction(b)) / 2 for a, b in itertools.pairwise(sorted(set(values)))]
    beyond = Fraction(fmt.max) + Fraction(2) ** (fmt.emax - fmt.frac_bits - 1)
    x = np.array([*map(float, values), *map(float, middles), float(beyond), float(fmt.smallest) / 2, 1e300, 1e-300])
    x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, np.inf), [np.inf, np.nan]])
    x = np.concatenate([x, -x])
    with jax.enable_x64(True):
        found = np.asarray(round_to_row(jnp.asarray(x), jnp.asarray(format_row(spec))))
    wanted = exact.rounded(x, oracle.describe(fmt), overflow=spec.overflow.value)
    same = (found.view(np.uint64) == wanted.view(np.uint64)) | (np.isnan(found) & np.isnan(wanted))
    assert not x[~same].size, x[~same]


def test_only_what_the_rows_can_say_is_traced() -> None:
    able = ("bfloat16", "e8m23", "e4m3fn", "e5m10:saturate")
    unable = ("e4m3fnuz", "e8m25", "e11m52", "bfloat16:up", "fixed4.4", "e5m2:flush", "e10m5")
    assert all(is_spec_traceable(as_spec(text)) for text in able) and is_spec_traceable(None)
    assert not any(is_spec_traceable(as_spec(text)) for text in unable)


def network(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    with jax.named_scope("a"):
        h = jax.nn.gelu(jnp.outer(x, y) @ jnp.outer(y, x))
    with jax.named_scope("b"):
        h = jax.nn.softmax(h / 3)
    with jax.named_scope("c"):
        h = jnp.clip(h / jnp.sqrt(jnp.var(h) + 1e-3), -1.5, 0.1)
    with jax.named_scope("d"):
        return jnp.tanh(h @ h) ** 3 + jnp.arange(4.0), jnp.cumsum(h), -h.max()


def solve(x: jax.Array, y: jax.Array) -> jax.Array:
    with jax.named_scope("matrix"):
        a = jnp.outer(x, y) + jnp.diag(x + 4)
    return jnp.linalg.solve(a, y)


def functions(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    with jax.named_scope("a"):
        a = jnp.exp(x) + jnp.log1p(y * y)
    with jax.named_scope("b"):
        b = jnp.arctan2(x, y) * jax.nn.sigmoid(y) + jnp.power(jnp.abs(x), y) + x**-3
    c = jax.lax.lgamma(jnp.abs(a) + 1) + jax.lax.erf(b) + jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32)
    return c, jnp.where(a > b, a, 0.3), jnp.sort(b)


def assert_same_bits(fun: Any, by: str, menu: list[Any], mixes: int) -> None:
    levels = _as_menu(menu)
    problem, _ = make_tuning_problem(fun, [(X, Y)], [], levels, by, "relative", 1000)
    assert problem.has_program
    draw = np.random.default_rng(0)
    for _ in range(mixes):
        chosen = tuple(map(int, draw.integers(0, len(levels), len(problem.sites))))
        got = problem.run_program(problem.cases[0], chosen)
        want = jc.emulate(fun, None, rules=problem.rules(chosen), max_turns=1000)(X, Y)
        for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            one, two = np.asarray(one), np.asarray(two)
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(np.signbit(one) & ~np.isnan(one), np.signbit(two) & ~np.isnan(two))


FORMATS = ["bfloat16", "e4m3", "e5m10", "tf32", "e5m2:saturate"]
SUMS = [
    "bfloat16",
    ("bfloat16", jc.MatmulSpec(accumulate="e5m4")),
    ("e5m4", jc.MatmulSpec(product="e5m10", accumulate="bfloat16", order="pairwise")),
    (None, jc.MatmulSpec(accumulate="e5m10", order="blocked(2)", fused=True)),
    None,
]


@pytest.mark.parametrize(
    ("fun", "by", "menu", "mixes"),
    [
        (sums, "scope", FORMATS, 2),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (straight, "equation", FORMATS, 4),
                (loops, "equation", FORMATS, 4),
                (network, "scope", FORMATS, 4),
                (network, "equation", FORMATS, 4),
                (solve, "scope", FORMATS, 4),
                (functions, "equation", FORMATS, 4),
                (sums, "scope", SUMS, 3),
                (sums, "equation", SUMS, 3),
                (network, "equation", SUMS, 3),
            )
        ),
    ],
)
def test_formats_as_arguments_give_the_bits_of_emulate(fun: Any, by: str, menu: list[Any], mixes: int) -> None:
    """Also rules of sums."""
    assert_same_bits(fun, by, menu, mixes)


def two_sums(x: jax.Array, y: jax.Array) -> jax.Array:
    with jax.named_scope("long"):
        long = jnp.dot(x, y)
    with jax.named_scope("short"):
        return jnp.stack([long, jnp.dot(x[:4], y[:4])])


def a_long_sum_needs_the_accumulator_that_a_short_one_does_not() -> None:
    """A sum of ones in bfloat16 stops at 256: 257 is a tie, and goes to the even neighbour."""
    args = (jnp.ones(300), jnp.ones(300))
    low, high = (("bfloat16", jc.MatmulSpec(accumulate=text)) for text in ("bfloat16", "e8m15"))
    found = jc.tune(two_sums, [low, high], [args], 1e-2, metric="largest")
    accumulators = [row.spec.partition("accumulate=")[2].partition(",")[0] for row in found.rows]
    assert accumulators == ["e8m15", "bfloat16"] and found.errors == (0.0,)
    assert found.compiled and found.cost == ((16 + 24) / 2 + (16 + 16) / 2) / 2
    assert {point.error for point in found.front} == {0.0, 44.0}
    assert jc.emulate(two_sums, None, rules=found.rules)(*args).tolist() == [300, 4]


def steps_of_orders(specs: Any) -> float:
    return sum(1.0 + (sums.order.kind == "pairwise") for _, sums in specs.values())


def orders_are_chosen_too() -> None:
    args = (jnp.ones(256 + 64), jnp.ones(256 + 64))
    menu = [("bfloat16", jc.MatmulSpec(accumulate="bfloat16", order=order)) for order in ("sequential", "pairwise")]
    found = jc.tune(two_sums, menu, [args], 1e-2, metric="largest", cost=steps_of_orders)
    assert [row.spec.rpartition("=")[2] for row in found.rows] == ["pairwise", "sequential"]
    assert found.cost == 3 and found.error == 0


# -- the search --------------------------------------------------------------------------------------------------------

OPERATIONS = ("mul", "add", "sub", "div", "root", "sin")


def random_program(seed: int, sites: int):
    """Operations, each in a scope of its own, of earlier results."""
    draw = np.random.default_rng(seed)
    plan = [(OPERATIONS[draw.integers(len(OPERATIONS))], draw.integers(0, 1 + i)) for i in range(sites)]

    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        values = [x, y]
        for i, (name, other) in enumerate(plan):
            # The latest result takes part, so that every site counts.
            u, v = values[-1], values[other]
            with jax.named_scope(f"s{i}"):
                if name == "mul":
                    out = u * v
                elif name == "add":
                    out = u + v
                elif name == "sub":
                    out = u - v
                elif name == "div":
                    out = u / (abs(v) + 1)
                elif name == "root":
                    out = jnp.sqrt(jnp.abs(u) + 0.5)
                else:
                    out = jnp.sin(u)
            values.append(out)
        return values[-1]

    return fun


MENU = ["e8m5", "e8m8", "e8m11", "e8m23"]
PRECISIONS = np.array([6, 9, 12, 24])


def digits(specs: Any) -> float:
    return sum(spec.format.precision for spec in specs.values()) / len(specs)


def compare_with_all(seed: int, sites: int, tolerances: tuple[float, ...]) -> list[float]:
    """The cost of tune over that of the cheapest of all assignments, for each tolerance."""
    draw = np.random.default_rng(seed)
    fun = random_program(seed, sites)
    ratios = []
    with jax.enable_x64(True):
        inputs = [tuple(map(jnp.asarray, draw.uniform(0.5, 2.0, (2, 4)))) for _ in range(4)]
        levels = _as_menu(MENU)
        problem, _ = make_tuning_problem(fun, inputs, [], levels, "scope", "relative", 10)
        assert len(problem.sites) == sites and problem.has_program
        mixes = np.array(list(itertools.product(range(4), repeat=sites)), np.int32)
        run = jax.jit(jax.vmap(problem.run_of(problem.cases[0]), in_axes=(0, None, None)))
        errors = np.zeros(len(mixes))
        for case in problem.cases:
            low = np.asarray(run(mixes, list(case.program.values), [])[0])
            whole = np.asarray(case.exact)
            errors = np.maximum(errors, np.linalg.norm(low - whole, axis=1) / np.linalg.norm(whole))
        costs = PRECISIONS[mixes].mean(1)
        for tolerance in tolerances:
            found = jc.tune(fun, MENU, inputs, tolerance, cost=digits)
            low = jc.emulate(fun, None, rules=found.rules)
            for args, error in zip(inputs, found.errors, strict=True):
                whole = fun(*args)
                assert error == pytest.approx(float(jnp.linalg.norm(low(*args) - whole) / jnp.linalg.norm(whole)))
            assert found.error <= tolerance
            ratios.append(found.cost / costs[errors <= tolerance].min())
    return ratios


@pytest.mark.parametrize(
    ("seed", "sites", "tolerances"),
    [(0, 3, (1e-2,)), *(pytest.param(seed, 8, (1e-1, 1e-2, 1e-3), marks=pytest.mark.slow) for seed in range(6))],
)
def test_the_search_is_near_the_best_of_all_assignments(seed: int, sites: int, tolerances: tuple[float, ...]) -> None:
    """Of 65,536 with eight sites."""
    assert max(compare_with_all(seed, sites, tolerances)) <= 1.16


def error_of_weights(weights: np.ndarray, levels: np.ndarray):
    return lambda assignment: float(weights @ levels[list(assignment)])


def test_the_search_alone_against_all_assignments() -> None:
    """Sites whose errors add up: the least cost by enumeration."""
    assert sum(found_by_the_search(seed) for seed in range(8)) >= 6


def found_by_the_search(seed: int) -> bool:
    draw = np.random.default_rng(seed)
    weights, levels, bits = np.exp(draw.normal(0, 2, 6)), np.array([1.0, 1e-1, 1e-3]), np.array([4, 8, 16])
    measure = error_of_weights(weights, levels)

    def cost(assignment: tuple[int, ...]) -> float:
        return float(bits[list(assignment)].mean())

    tolerance = float(np.exp(draw.normal(-2, 2)))
    every = [a for a in itertools.product(range(3), repeat=6) if measure(a) <= tolerance]
    found = AssignmentSearch(6, 3, measure, cost, tolerance, 10_000).run()
    if not every:
        assert found is None, seed
        return False
    assert found is not None and found.error <= tolerance, seed
    assert found.cost <= 1.05 * min(map(cost, every)), seed
    return True


@further.first
def a_budget_ends_the_search_with_the_best_so_far() -> None:
    weights, levels = np.ones(6), np.array([1.0, 1e-1, 1e-3])
    calls: list[int] = []
    measure = error_of_weights(weights, levels)
    search = AssignmentSearch(
        6, 3, measure, lambda a: float(sum(a)), 0.7, 9, progress=lambda done, most, best: calls.append(done)
    )
    found = search.run()
    assert search.out_of_budget and calls == list(range(1, 10)) and found is not None and found.error <= 0.7
    errors = [point.error for point in search.front()]
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == len(errors)


# -- the public function -----------------------------------------------------------------------------------------------


def planted(x: jax.Array) -> jax.Array:
    """The variance by the mean of the squares, at a large mean; then harmless operations."""
    with jax.named_scope("squares"):
        squares = jnp.sum(x * x) / x.size
    with jax.named_scope("mean"):
        mean = jnp.sum(x) / x.size
    with jax.named_scope("difference"):
        variance = squares - mean * mean
    with jax.named_scope("after"):
        root = jnp.sqrt(variance) / 3
    with jax.named_scope("last"):
        return jnp.sin(root) * 2 + 1


def test_the_planted_cancellation_raises_the_right_sites_only() -> None:
    draw = np.random.default_rng(0)
    inputs = [(jnp.asarray(100 + draw.standard_normal(256), jnp.float32),) for _ in range(2)]
    stages: list[tuple[str, int, int, str]] = []
    found = jc.tune(
        planted, ["bfloat16", "e8m20"], inputs[:1], 1e-2, held_out=inputs[1:], progress=lambda *now: stages.append(now)
    )
    formats = {row.path: row.spec for row in found.rows}
    assert formats == {
        "squares": "e8m20",
        "mean": "e8m20",
        "difference": "e8m20",
        "after": "bfloat16",
        "last": "bfloat16",
    }
    assert found.compiled and found.uniform == ("e8m20", 29) and found.cost == pytest.approx((3 * 29 + 2 * 16) / 5)
    low = jc.emulate(planted, None, rules=found.rules)
    assert (
        found.error == pytest.approx(abs(float(low(*inputs[0])) / float(planted(*inputs[0])) - 1))
        and found.error <= 1e-2
    )
    assert " on 1 input, tolerance " in str(found) and " on 1 input held out" in str(found)
    assert len(found.held_out) == 1 and len(stages) == found.evaluations
    assert stages[-1][0] == "measuring" and "cost" in stages[-1][3]
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["rows"][0]["path"] == "squares" and again["rules"]["/after/*/"] == "bfloat16"
    costs = [point.cost for point in found.front]
    assert costs == sorted(costs) and found.columns()["bits"] == [29, 29, 29, 16, 16]
    assert "squares" in str(found) and "<table" in found._repr_html_()


def two_parts(x: jax.Array) -> jax.Array:
    with jax.named_scope("one"):
        y = x * 1.1
    with jax.named_scope("two"):
        return -(y + 0.3)


def test_other_formats_are_measured_by_emulate() -> None:
    found = jc.tune(two_parts, ["e4m3fnuz", "fixed4.4", None], [(X,)], 0.2)
    assert not found.compiled and found.error <= 0.2
    whole, low = two_parts(X), jc.emulate(two_parts, None, rules=found.rules)(X)
    assert found.error == pytest.approx(float(jnp.linalg.norm(low - whole) / jnp.linalg.norm(whole)))


def weighted(specs: Any) -> float:
    return sum(spec.format.bits * (9 if path == "one" else 1) for path, spec in specs.items())


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("metric", ["relative", "absolute", "largest"])
def infinities_and_nan_of_the_carrier_are_no_errors(metric: Any) -> None:
    x = jnp.array([-1.0, 0.0, 2.0, 3.0])  # NaN, -inf, and numbers
    menu = ["e5m2", "bfloat16", None]
    found = jc.tune(jnp.log, menu, [(x,)], 1e-2, metric=metric)
    plain = jc.tune(jnp.log, menu, [(x[2:],)], 1e-2, metric=metric)
    assert found.errors == plain.errors
    assert [row.spec for row in found.rows] == [row.spec for row in plain.rows] == ["bfloat16"]
    with pytest.raises(ValueError, match="error of 2 measured is inf"):  # where the carrier is finite, they are
        jc.tune(lambda v: jnp.exp(v) * 1e-3, ["e4m3fn", "e3m4"], [(jnp.array([20.0]),)], 1e-2, metric=metric)


def test_a_result_without_a_finite_number_is_an_error() -> None:
    bad, good, menu = (jnp.array([-1.0, -2.0]),), (jnp.array([-1.0, 2.0]),), ["e5m2", "bfloat16"]
    for inputs, held_out, name in (([good, bad], [], r"inputs\[1\]"), ([good], [bad], r"held_out\[0\]")):
        with pytest.raises(ValueError, match=f"{name}: the result of fun has no finite number, so it has no error"):
            jc.tune(jnp.log, menu, inputs, 1e-9, held_out=held_out)
    own = jc.tune(jnp.log, menu, [bad], 0.1, metric=lambda low, exact: 2 - jnp.isnan(low).sum())
    assert own.error == 0


def test_arguments_of_numpy_are_arrays_of_jax() -> None:
    def mean(x: jax.Array) -> jax.Array:
        return x.at[0].set(1.0).sum() / 3

    x, menu = np.array([2, 3, 4.5], np.float32), ["e5m2", "bfloat16"]
    assert jc.tune(mean, menu, [(x,)], 0.1) == jc.tune(mean, menu, [(jnp.asarray(x),)], 0.1)


def test_costs_and_metrics() -> None:
    args = [(X,)]
    found = jc.tune(two_parts, ["e4m3", "bfloat16"], args, 0.1, cost="bytes", metric="largest")
    assert found.cost == sum(row.results * row.bits / 8 for row in found.rows)
    low = jc.emulate(two_parts, None, rules=found.rules)(X)
    assert found.error == float(np.max(np.abs(np.float64(low) - np.float64(two_parts(X)))))
    own = jc.tune(
        two_parts,
        ["e4m3", "bfloat16", "e8m20"],
        args,
        1e-2,
        cost=weighted,
        metric=lambda low, exact: jnp.max(jnp.abs(low - exact)) / 10,
        by="scope",
    )
    assert own.cost == sum(row.bits * (9 if row.path == "one" else 1) for row in own.rows)
    assert own.error <= 1e-2


def test_no_format_alone_may_be_within_the_tolerance() -> None:
    """One site needs a range that one format lacks, another bits that the other lacks."""

    def fun(x: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope("far"):
            far = x * 256
        with jax.named_scope("fine"):
            return far, x * 1.0625

    found = jc.tune(fun, ["e5m2", "e3m4"], [(jnp.float32(1.0),)], 0.0, by="scope")
    assert found.uniform is None and found.error == 0
    assert [(row.path, row.spec) for row in found.rows] == [("far", "float8_e5m2"), ("fine", "float8_e3m4")]


def test_a_loop_that_does_not_end_is_no_solution() -> None:
    def wait(t: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda t: t < 2, lambda t: t + 0.25, t)

    found = jc.tune(wait, ["e5m0", "e5m2"], [(jnp.float32(0.0),)], 0.5, max_turns=50, by="equation")
    assert [row.spec for row in found.rows] == ["float8_e5m2"]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"fun": 3}, TypeError, "fun=3"),
        ({"fun": jc.emulate(two_parts, "e4m3")}, TypeError, "emulated already"),
        ({"inputs": X}, TypeError, "a list of arguments, as"),
        ({"inputs": []}, ValueError, "at least one"),
        ({"tolerance": -1.0}, ValueError, "tolerance=-1.0"),
        ({"tolerance": "x"}, TypeError, "tolerance='x'"),
        ({"menu": "bfloat16"}, TypeError, "menu='bfloat16'"),
        ({"menu": ["bfloat16"]}, ValueError, "two formats"),
        ({"menu": ["bfloat16", "bfloat16"]}, ValueError, "twice"),
        ({"menu": ["e4m3", "bfloat16:stochastic"]}, ValueError, "stochastically"),
        ({"menu": ["e4m3", ("e4m3", jc.MatmulSpec(accumulate="e4m3:stochastic"))]}, ValueError, r"menu\[1\]=.*stoch"),
        ({"menu": ["e4m3", ("e4m3", "bfloat16")]}, TypeError, r"menu\[1\]=.*a pair of a format and a MatmulSpec"),
        ({"menu": ["e4m3", "mxfp4"]}, ValueError, "scaled"),
        ({"by": "line"}, ValueError, "by='line'"),
        ({"cost": "time"}, ValueError, "cost='time'"),
        ({"metric": "ulp"}, ValueError, "metric='ulp'"),
        ({"evaluations": 0}, ValueError, "evaluations=0"),
        ({"seconds": 0}, ValueError, "seconds=0"),
        ({"fun": lambda x: -x}, ValueError, "nothing to tune"),
        ({"tolerance": 1e-9}, ValueError, r"smallest error .* or the carrier \(None; in a shell: carrier\)"),
        ({"fun": lambda x: x > 0}, ValueError, r"inputs\[0\]: the result of fun has no real number"),
    ],
)
def test_wrong_arguments_are_named(changes: dict, error: type[Exception], text: str) -> None:
    given = {"fun": two_parts, "inputs": [(X,)], "tolerance": 0.1, "menu": ["e4m3", "e5m2"], **changes}
    with pytest.raises(error, match=text):
        jc.tune(given.pop("fun"), given.pop("menu"), given.pop("inputs"), given.pop("tolerance"), **given)


@pytest.mark.parametrize(
    "check",
    [
        orders_are_chosen_too,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (a_long_sum_needs_the_accumulator_that_a_short_one_does_not,)
        ),
    ],
)
def test_rules_of_sums_are_chosen(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
