"""`jc.emulate`: rules for parts of a program, what is refused, and the report."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulate_cases import FOREIGN, KEY, X
from further import Further
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

import jchop as jc

further = Further()

# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_rules_name_primitives_and_scopes() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("block0"), jax.named_scope("norm"):
            x = x * 1.1
        return jnp.exp(x) + 0.1

    def by_hand(first: str | None, second: str | None, third: str) -> jax.Array:
        x = jc.round_to_format(X, "e5m2")
        for spec, step in ((first, lambda v: v * 1.1), (second, jnp.exp), (third, lambda v: v + 0.1)):
            x = jc.emulate(step, spec)(x)
        return x

    for rules, specs in (
        ({"block*/norm": "e6m9"}, ("e6m9", "e5m2", "e5m2")),
        ({"norm": None}, (None, "e5m2", "e5m2")),
        ({"exp": "e6m9"}, ("e5m2", "e6m9", "e5m2")),
        ({"norm": "e6m9", "mul": None, "add": "e4m3"}, ("e6m9", "e5m2", "e4m3")),  # the first that matches counts
    ):
        rules = dict(list(rules.items()))
        if "mul" in rules:
            with pytest.raises(ValueError, match="'mul'"):
                jc.emulate(fun, "e5m2", rules=rules)(X)
            del rules["mul"]
        np.testing.assert_array_equal(jc.emulate(fun, "e5m2", rules=rules)(X), by_hand(*specs))


def test_a_wide_result_is_not_rounded_by_the_operations_that_read_it() -> None:
    def fun(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        third = x / 3
        moved = jnp.concatenate([third[::2], x[1::2]]).reshape(third.shape)
        return moved * x, jax.lax.scan(lambda c, y: (c + y, c * y), third[0], third)[1]

    x = jc.round_to_format(X, "e5m2")
    line = fun.__code__.co_firstlineno + 1
    wide = jnp.concatenate([(x / 3)[::2], x[1::2]])
    total, rows = x[0] / 3, []
    for y in x / 3:
        rows.append(jc.round_to_format(total * y, "e5m2"))
        total = jc.round_to_format(total + y, "e5m2")
    for rule in ({"div": "wide"}, {f"test_rules.py:{line}": "wide"}, {f"_emulate/test_rules.py:{line}/div": "wide"}):
        product, products = jc.emulate(fun, "e5m2", rules=rule)(X)
        np.testing.assert_array_equal(product, jc.round_to_format(wide * x, "e5m2"))
        np.testing.assert_array_equal(products, jnp.stack(rows))
    rounded = jc.emulate(fun, "e5m2", rules={"div": None})(X)[0]
    np.testing.assert_array_equal(rounded, jc.emulate(fun, "e5m2")(X)[0])
    with pytest.raises(ValueError, match=f"no line of the program; the nearest paths are .*test_rules.py:{line}"):
        jc.emulate(fun, "e5m2", rules={"test_rules.py:1": "wide"})(X)


def test_rules_say_how_sums_are_formed() -> None:
    ones = jnp.ones(100)
    fun = lambda x: (jnp.sum(x), x @ x)  # noqa: E731
    total, dot = jc.emulate(fun, "e5m2", rules={"dot_general": jc.MatmulSpec(accumulate="e5m2")})(ones)
    assert (float(total), float(dot)) == (96, 8)


#: The shape, those of the indices and of the updates, and the dimension numbers.
SCATTERS: list[tuple[Any, ...]] = [
    ((4, 5), (5, 4, 2), (2, 5, 4, 3), ((0, 3), (), (1, 0))),
    ((4, 5), (6, 1), (6, 5), ((1,), (0,), (0,))),
    ((4, 5), (6, 2), (6,), ((), (0, 1), (0, 1))),
    ((3, 4, 5), (3, 6, 1), (3, 6, 2), ((2,), (1,), (1,), (0,), (0,))),
    ((4,), (0, 1), (0,), ((), (0,), (0,))),
]


@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    ("shape", "index", "new", "numbers", "name", "mode"),
    [
        (*form, ("add", "sub", "mul")[(i + j) % 3], mode)
        for i, form in enumerate(SCATTERS)
        for j, mode in enumerate(("drop", "clip"))
    ],
)
def test_scatters_take_one_update_after_the_other(
    shape: tuple[int, ...], index: Any, new: Any, numbers: Any, name: str, mode: str
) -> None:
    """Against loops of Python over the definition of a scatter."""
    rng, spec = np.random.default_rng(len(new) + len(name)), "e5m2:up"
    x, u = (jc.round_to_format(rng.normal(size=size).astype(np.float32), "e8m7") for size in (shape, new))
    places = rng.integers(-1, 6, size=index)
    d = lax.ScatterDimensionNumbers(*numbers)

    def fun(x: jax.Array, u: jax.Array) -> jax.Array:
        return getattr(lax, f"scatter_{name}")(x, jnp.asarray(places), u, d, mode=mode)

    want = x.astype(np.float64)
    outer = [axis for axis in range(u.ndim) if axis not in d.update_window_dims]
    free = [axis for axis in range(x.ndim) if axis not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    window = [new[axis] for axis in d.update_window_dims]
    most = np.array(shape) - 1
    most[free] = np.array(shape)[free] - window
    for at in np.ndindex(*[new[axis] for axis in outer]):
        start = np.zeros(x.ndim, int)
        start[list(d.scatter_dims_to_operand_dims)] = places[at]
        start[list(d.operand_batching_dims)] = np.array(at)[list(d.scatter_indices_batching_dims)]
        if mode == "clip":
            start = np.clip(start, 0, most)
        elif np.any((start < 0) | (start > most)):
            continue
        for inside in np.ndindex(*window):
            place, update = start.copy(), np.zeros(u.ndim, int)
            place[free] += np.array(inside, int)
            update[outer], update[list(d.update_window_dims)] = at, inside
            c, v = want[tuple(place)], float(u[tuple(update)])
            want[tuple(place)] = jc.round_to_format(np.float64({"add": c + v, "sub": c - v, "mul": c * v}[name]), spec)
    low = jc.emulate(fun, "e8m7", accumulate=jc.MatmulSpec(accumulate=spec))
    np.testing.assert_array_equal(low(jnp.asarray(x), jnp.asarray(u)), want)


@further
def scatters_of_complex_numbers_are_two_scatters() -> None:
    x, u = jnp.array([0.3 - 1.1j, 2.0j]), jnp.array([1.7 + 0.3j, -0.6 + 5.0j, 0.9 - 2.0j, 3.0 + 0.1j])
    accumulate = jc.MatmulSpec(accumulate="e5m2")
    low = jc.emulate(lambda x, u: x.at[jnp.array([0, 0, 1, 0])].add(u), "e8m7", accumulate=accumulate)
    np.testing.assert_array_equal(low(x, u), low(x.real, u.real) + 1j * low(x.imag, u.imag))
    np.testing.assert_array_equal(jax.grad(lambda u: low(x, u).real.sum())(u), np.ones(4))
    times = jc.emulate(lambda x, u: x.at[jnp.array([0, 0, 1, 0])].multiply(u), "e8m7", accumulate=accumulate)
    with pytest.raises(NotImplementedError, match="scatter-mul"):
        times(x, u)


def test_stochastic_sums_round_each_partial_sum_by_chance() -> None:
    """From 8 on, a sum of ones stays or grows by 2 with equal chances, each row by draws of its own."""
    low = jc.emulate(lambda x: jnp.sum(x, 1), "e8m7", accumulate=jc.MatmulSpec(accumulate="e5m2:stochastic"))
    totals = np.asarray(low(jnp.ones((64, 12)), key=KEY))
    assert {*totals.tolist()} == {8, 10, 12, 14, 16}
    assert abs(totals.mean() - 12) < 4 * 2 / 64**0.5  # four times ±1


@further
def stochastic_scatters_draw_for_each_update() -> None:
    how = jc.MatmulSpec(accumulate="e5m2:stochastic")
    low = jc.emulate(lambda v: jax.ops.segment_sum(v, jnp.zeros(100, int), 1), "e8m7", accumulate=how)
    totals = np.array([float(low(jnp.ones(100), key=jax.random.key(i))[0]) for i in range(8)])
    assert len(set(totals)) > 1
    assert abs(totals.mean() - 100) < 25


@pytest.mark.parametrize("name", ["exp", "part", "sort"])
def test_a_sum_for_a_part_without_sums_is_refused(name: str) -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("part"):
            x = jnp.sort(jnp.exp(x))
        return jnp.sum(x)

    with pytest.raises(ValueError, match=f"rules: '{name}' gives a MatmulSpec to no sum; the report"):
        jc.emulate(fun, "e5m2", rules={name: jc.MatmulSpec(accumulate="e5m2")})(X)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"dvi": None}, "'dvi' matches no primitive and no scope of the program; the nearest paths are 'part/div'"),
        ({"part": lambda x: x}, "'part' matches no primitive of the program; the nearest paths are 'part/div'"),
        ({"div": None, "part": None}, "'part' comes after a rule that matches all the same"),
    ],
)
def test_a_rule_without_effect_is_refused_with_its_reason(rules: dict[str, Any], reason: str) -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("part"):
            return x / 3

    with pytest.raises(ValueError, match=f"^rules: {reason}; the report method of the emulated function shows"):
        jc.emulate(fun, "e5m2", rules=rules)(X)


def test_a_rule_for_a_part_with_functions_of_jchop_alone() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("part"):
            return jc.math.exp(x, "bfloat16")

    rounded = jc.round_to_format(X, "e5m2")
    np.testing.assert_array_equal(jc.emulate(fun, "e5m2", rules={"part": None})(X), fun(rounded))


def test_a_part_in_the_carrier_has_its_sums_too() -> None:
    """Unless a rule says how they are formed; a rule of another arithmetic leaves the sums as they are."""

    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            return jnp.sum(x)

    ones, low, pairs = jnp.ones(100), jc.MatmulSpec(accumulate="e5m2"), jc.MatmulSpec("e5m2", None, "e5m2", "pairwise")

    def total(rules: dict[str, Any]) -> float:
        return float(jc.emulate(fun, "e5m2", accumulate=low, rules=rules)(ones))

    assert total({}) == 8
    assert total({"norm": None}) == 100
    assert total({"norm": "e5m2"}) == 8
    assert total({"norm": None, "reduce_sum": pairs}) == total({"reduce_sum": pairs, "norm": None}) == 96


@pytest.mark.smoke
def test_a_loop_carries_what_both_its_turns_give() -> None:
    """The sum in the loop is wider than what it starts from: it stays wide from turn to turn."""
    fun = lambda x: lax.fori_loop(0, 8, lambda i, c: c + 0.125, x)  # noqa: E731
    assert float(jc.emulate(fun, "e5m2", rules={"add": "e5m10"})(1.0)) == 2
    assert float(jc.emulate(fun, "e5m2")(1.0)) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_primitive_without_a_rule() -> None:
    fun = FOREIGN.bind
    x = jc.round_to_format(X, "e5m3")
    with pytest.raises(NotImplementedError, match=r"foreign.*unknown='carrier'"):
        jc.emulate(fun, "e5m3")(x)
    np.testing.assert_array_equal(jc.emulate(fun, "e5m3", unknown="carrier")(X), fun(x))
    np.testing.assert_array_equal(jc.emulate(fun, "e5m3", rules={"foreign": None})(x), fun(x))
    rounded = jc.round_to_format(fun(x), "e5m3")
    assert not np.array_equal(rounded, fun(x))
    np.testing.assert_array_equal(jc.emulate(fun, "e5m3", unknown="round_output")(x), rounded)
    # What is left in the carrier is rounded where an operation takes it, and the report says so.
    low = jc.emulate(lambda x: (-fun(x), fun(x) > rounded), "e5m3", unknown="carrier")
    np.testing.assert_array_equal(low(x)[0], -rounded)
    assert not np.any(low(x)[1])
    assert {row.spec for row in low.report(x).rows if row.primitive == "foreign"} == {"carrier"}


def test_a_rule_of_the_users_own() -> None:
    """It takes rounded operands and the parameters of the primitive, and its result is rounded once."""
    rule = lambda x: x * x  # noqa: E731
    x = jc.round_to_format(X, "e5m3")
    low = jc.emulate(FOREIGN.bind, "e5m3", rules={"foreign": rule})
    np.testing.assert_array_equal(low(X), jc.round_to_format(x * x, "e5m3"))
    np.testing.assert_array_equal(jax.jit(jax.vmap(low))(X), low(X))
    np.testing.assert_array_equal(jax.grad(lambda x: low(x).sum())(X), 2 * x)
    powers = jc.emulate(lambda x: x**3, "e5m3", rules={"integer_pow": lambda x, y: x * y})
    np.testing.assert_array_equal(powers(X), jc.round_to_format(x * 3, "e5m3"))
    with pytest.raises(TypeError, match=r"rules\['foreign'\] returned .*the primitive has"):
        jc.emulate(FOREIGN.bind, "e5m3", rules={"foreign": jnp.sum})(X)


def test_a_primitive_that_says_what_it_consists_of() -> None:
    """It is emulated as that; its derivative, where it has one, is its own."""
    primitive = Primitive("composed")
    primitive.def_impl(lambda x, y, *, by: jnp.exp(x) * y + by)
    primitive.def_abstract_eval(lambda x, y, *, by: x)
    ad.primitive_jvps[primitive] = lambda values, tangents, **params: (
        primitive.bind(*values, **params),
        7 * tangents[0],
    )
    fun = lambda x: primitive.bind(x, x, by=0.1)  # noqa: E731
    low = jc.emulate(fun, "e5m3")
    np.testing.assert_array_equal(low(X), jc.emulate(lambda x: jnp.exp(x) * x + 0.1, "e5m3")(X))
    assert [row.primitive for row in low.report(X, trace_values=True).rows] == ["exp", "mul", "add"]
    _, tangent = jax.jvp(low, (X,), (jnp.ones(4),))
    assert tangent.tolist() == [7] * 4


# -- constants, batches of loops, dtypes that store --------------------------------------------------------------------


def test_constants_are_rounded_everywhere() -> None:
    """As results, carries, results of branches, arguments of calls, and operands of comparisons."""
    tenth = 0.1015625

    def fun(x: jax.Array) -> list[Any]:
        turns = lax.fori_loop(0, x.size - 4, lambda i, c: c, 0.1)
        branch = lax.cond(x[0] > 0, lambda: 0.1, lambda: 0.2)
        rows: Any = lax.scan(lambda c, _: (c, 0.1), 0.0, None, 1)[1]
        return [0.1, turns, branch, jax.jit(lambda v: v)(0.1), rows[0]]

    for low in (jc.emulate(fun, "e4m3"), jax.jit(jc.emulate(fun, "e4m3")), jc.emulate(fun, "e4m3:stochastic", key=KEY)):
        values = low(X)
        assert all(isinstance(v, jax.Array) for v in values)
        assert all(float(v) in (tenth, 0.09375) for v in values), values
    assert [float(v) for v in jc.emulate(fun, "e4m3")(X)] == [tenth] * 5
    x = jnp.array([0.1, 0.2])
    compared = jc.emulate(lambda x: (x == 0.1, x > 0.1, x < jnp.inf, (x * 10).astype(int), 3), "float8_e4m3fn")(x)
    assert [np.asarray(v).tolist() for v in compared] == [[True, False], [False, True], [True] * 2, [1, 2], 3]


@further
def batches_of_loops_end_one_by_one() -> None:
    def loop(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] * 1.3, c[1] + 1), (x, 0))

    x = jnp.array([0.1, 0.35, 7.0])
    one_by_one = [jc.emulate(loop, "e4m3")(v) for v in x]
    for many in (jc.emulate(jax.vmap(loop), "e4m3"), jax.vmap(jc.emulate(loop, "e4m3"))):
        values, turns = many(x)
        assert values.tolist() == [float(v) for v, _ in one_by_one]
        assert turns.tolist() == [int(n) for _, n in one_by_one] and turns[2] == 0
    report = jc.emulate(jax.vmap(loop), "e4m3").report(x, trace_values=True)
    assert report.rows[0].primitive == "mul" and report.rows[0].largest >= float(values[:2].max())
    drawn, _ = jax.jit(jc.emulate(jax.vmap(loop), "e4m3:stochastic"))(x, key=KEY)
    assert bool((drawn >= 3).all()) and float(drawn[2]) == 7


def test_dtypes_of_8_bits_store() -> None:
    """A cast to one is that cast of a rounded number, and one back is exact; arithmetic in one is refused."""
    fun = lambda x: x.astype(jnp.float8_e5m2).astype(jnp.float32) * 1.1  # noqa: E731
    x = jc.round_to_format(X, "e4m3")
    want = jc.emulate(lambda x: x * 1.1, "e4m3")(x.astype(jnp.float8_e5m2).astype(jnp.float32))
    np.testing.assert_array_equal(jc.emulate(fun, "e4m3")(X), want)
    dot = lambda x: lax.dot(*[x.astype(jnp.float8_e5m2)] * 2, preferred_element_type=jnp.float32)  # noqa: E731
    exact = np.sum(np.asarray(x.astype(jnp.float8_e5m2), np.float64) ** 2)
    assert float(jc.emulate(dot, "e8m15")(x)) == exact
    assert float(jc.emulate(dot, "e8m15", accumulate=jc.MatmulSpec(accumulate="e8m15"))(x)) == exact
    with pytest.raises(TypeError, match="float8_e5m2, which is not a carrier"):
        jc.emulate(lambda x: x.astype(jnp.float8_e5m2) + 1, "e5m2")(X)


def test_calls_of_python_are_left_alone() -> None:
    seen = []

    def fun(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(float(v)), x[0])
        return jax.pure_callback(lambda v: np.asarray(v) * np.float32(1.1), jax.ShapeDtypeStruct((4,), jnp.float32), x)

    x = jc.round_to_format(X, "e4m3")
    np.testing.assert_array_equal(jc.emulate(fun, "e4m3")(X), np.asarray(x) * np.float32(1.1))
    jax.effects_barrier()
    assert seen == [float(x[0])]
    rows = jc.emulate(fun, "e4m3").report(X).rows
    assert [(row.primitive, row.spec) for row in rows] == [("debug_callback", "carrier"), ("pure_callback", "carrier")]


def _raising(x: Any, **params: Any) -> Any:
    raise TypeError("the user's own")


#: The type of an error, its words, and a call.
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "fun=3", lambda: jc.emulate(3, "e5m2")),  # type: ignore[arg-type]
    (ValueError, "unknown='ignore'", lambda: jc.emulate(jnp.sin, "e5m2", unknown="ignore")),  # type: ignore[arg-type]
    (TypeError, "accumulate='e5m2'", lambda: jc.emulate(jnp.sin, "e5m2", accumulate="e5m2")),  # type: ignore[arg-type]
    (TypeError, "rules=3", lambda: jc.emulate(jnp.sin, "e5m2", rules=3)),  # type: ignore[arg-type]
    (TypeError, "rules: pattern=3", lambda: jc.emulate(jnp.sin, "e5m2", rules={3: None})),  # type: ignore[dict-item]
    (TypeError, r"rules\['sin'\]", lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": 3})),
    (ValueError, r"rules\['sin'\]: .*'e5m2x'", lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": "e5m2x"})),
    (
        TypeError,
        r"^rules=Rule.* must .* as {'sin': 'bfloat16'}; a Rule is for jc.nn, .*$",
        lambda: jc.emulate(jnp.sin, "e5m2", rules=jc.Rule(weight="int8")),  # type: ignore[arg-type]
    ),
    (
        TypeError,
        r"rules\['sin'\] returned None; .*\(3,\)",
        lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": lambda x, **p: None})(jnp.ones(3)),
    ),
    (
        TypeError,
        r"rules\['sin'\] .* keywords \(accuracy\); write it as lambda x, \*\*params",
        lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": lambda x: x})(jnp.ones(3)),
    ),
    (TypeError, "^the user's own$", lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": _raising})(jnp.ones(3))),
    (ValueError, "gradient", lambda: jc.emulate(jnp.sin, "e5m2:gradient=clipped")),
    (
        ValueError,
        r"^rules\['sin'\]='.*:gradient=clipped' has a gradient",
        lambda: jc.emulate(jnp.sin, "e5m2", rules={"sin": "e5m2:gradient=clipped"}),
    ),
    (TypeError, "key=0", lambda: jc.emulate(jnp.sin, "e5m2", key=0)),  # type: ignore[arg-type]
    (ValueError, "key=None", lambda: jc.emulate(jnp.sin, "e5m2:stochastic")(X)),
    (ValueError, "'cos'", lambda: jc.emulate(jnp.sin, "e5m2", rules={"cos": None})(X)),
    (ValueError, "float64", lambda: jc.emulate(lambda x: x + x, "e8m22:up")(X)),
    (ValueError, "float32", lambda: jc.emulate(lambda x: x + x, "bfloat16")(X.astype(jnp.float16))),
    (ValueError, "codebook", lambda: jc.emulate(lambda x: x + x, "codebook(0,1)")(X)),
]


def test_errors_name_what_is_wrong() -> None:
    for error, message, call in ERRORS:
        with pytest.raises(error, match=message):
            call()
            pytest.fail(f"no error says {message!r}")


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        (lambda x: x * 3, "mul"),
        (jnp.sin, "sin"),
        (lambda x: x.astype(jnp.float32).astype(jnp.bfloat16), "convert_element_type"),
    ],
)
def test_a_dtype_that_cannot_hold_the_format_is_found_at_a_line(fun: Callable[[Any], Any], name: str) -> None:
    where = re.escape(f"primitive {name!r} ({__file__}:")
    with pytest.raises(ValueError, match=rf"^{where}\d+\): .*bfloat16.* cast .*float32"):
        jc.emulate(lambda x: fun(x), "e5m10")(jnp.ones(3, jnp.bfloat16))


@pytest.mark.parametrize(("dtype", "spec"), [("float32", "e8m30:up"), ("float32", "e9m23"), ("bfloat16", "tf32")])
def test_results_of_the_carrier_are_refused_if_the_format_is_finer(dtype: str, spec: str) -> None:
    words = f"'{spec}' has values that {dtype} cannot hold; cast the operands to float"
    for fun in (jnp.sin, lax.cumsum, lambda x: x @ x, lambda x: x.at[jnp.zeros(3, int)].add(x)):
        with pytest.raises(ValueError, match=words):
            jc.emulate(fun, spec)(jnp.ones(3, dtype))


def test_results_that_the_carrier_holds_are_not_refused() -> None:
    """Exact ones have every format, and sums of an order their own."""
    x = jnp.array([1.5, 2.5])
    assert jc.emulate(lambda x: jnp.floor(jnp.sort(x)), "e8m30")(x).tolist() == [1, 2]
    assert jc.emulate(jnp.sum, "binary32:up")(x) == 4
    wide = jc.emulate(lambda x: lax.dot(x, x, preferred_element_type=jnp.float32), "tf32")
    assert wide(x.astype(jnp.bfloat16)) == 8.5
    assert jc.emulate(jnp.sum, "e8m30", accumulate=jc.MatmulSpec(accumulate="e5m2"))(x) == 4


def test_arguments_that_are_no_arrays_reach_the_function() -> None:
    fun = lambda x, axis, *, scale, name: {name: jnp.sum(x["a"], axis) * scale}  # noqa: E731
    got = jc.emulate(fun, "e5m2")({"a": jnp.ones((2, 3))}, 1, scale=1.1, name="total")
    assert got["total"].tolist() == [3.0, 3.0]  # 1.1 is rounded to 1


# -- the report --------------------------------------------------------------------------------------------------------


def nested(x: jax.Array) -> jax.Array:
    with jax.named_scope("turns"):
        x = lax.fori_loop(0, 3, lambda i, c: c * 1.1, x)
    x = lax.cond(x[0] > 0, jnp.sqrt, jnp.exp, x)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x).sum()


def test_the_report_lists_what_is_rounded() -> None:
    low = jc.emulate(nested, "e5m2", rules={"turns": "e6m9", "exp": None})
    report = low.report(X)
    assert not report.traced
    found = {row.primitive: row for row in report.rows}
    assert found["mul"].scope == "turns" and found["mul"].spec == "e6m9"
    assert (found["mul"].equations, found["mul"].results) == (1, 12)
    assert found["exp"].spec == "carrier" and found["reduce_sum"].sums == "carrier"
    assert report.operations == sum(row.results for row in report.rows)
    assert "turns  mul" in str(report) and "overflows" not in str(report)


@jax.jit
def halved(x: jax.Array) -> jax.Array:
    return jnp.exp(x) * 0.5


def lined(x: jax.Array) -> Any:
    y = halved(x)
    y = lax.fori_loop(0, 2, lambda i, c: c * 1.1, y)
    y = lax.cond(x[0] > 0, jnp.sqrt, lambda v: v - 1.0, y)
    y = lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, y)
    y = y * jax.checkpoint(jnp.tanh)(y)
    return jnp.var(y), jnp.var(y[:1]), jc.math.add(y, y, "e5m10")


#: Lines below the head of `lined`, or of `halved`.
LINED = {"exp": 2, "sqrt": 3, "tanh": 5, "square": 6, "div": 6}


def test_every_row_of_the_report_names_its_line() -> None:
    """Of the user, not of JAX or jchop, also within calls, loops, branches and functions of JAX."""
    head, inner = lined.__code__.co_firstlineno, inspect.unwrap(halved).__code__.co_firstlineno
    report = jc.emulate(lined, "e5m2").report(X)
    assert {row.source.rpartition(":")[0] for row in report.rows} == {__file__}
    lines = {(row.primitive, int(row.source.rpartition(":")[2])) for row in report.rows}
    firsts = {name: head + n for name, n in LINED.items()} | {"exp": inner + 2}
    assert lines >= set(firsts.items()) | {("mul", n) for n in (inner + 2, head + 2, head + 5)}
    assert lines >= {("sub", head + 3), ("add", head + 4)}
    assert {line for _, line in lines} <= {inner + 2, *range(head, head + 7)}
    table = str(report).splitlines()
    assert table[0].split()[-1] == "source"
    assert [line.split()[-1] for line in table[1:]] == [f"test_rules.py:{r.source.split(':')[-1]}" for r in report.rows]
    gradient = jc.emulate(jax.grad(lambda x: halved(x).sum()), "e5m2").report(X)
    assert {row.place for row in gradient.rows} <= {
        f"test_rules.py:{n}" for n in (inner + 2, head + 1, *range(head + 20, head + 60))
    }


@further.first
def a_report_of_a_function_of_jax_names_the_line_that_asks() -> None:
    (row,) = jc.emulate(jnp.exp, "e5m2").report(X).rows
    assert row.place.startswith("test_rules.py:")


def test_the_report_counts_infinities_and_nans() -> None:
    """In loops, branches and inner functions, too, and whether or not the carrier has them."""

    def fun(x: jax.Array) -> Any:
        y = halved(x)
        z = lax.fori_loop(0, 3, lambda i, c: c * 2.0, y)
        return lax.cond(x[0] > 0, lambda v: v - y, jnp.sqrt, z), x + jnp.inf

    report = jc.emulate(fun, "e4m3").report(jnp.array([8.0, 8.0, 1.0]), trace_values=True)
    counts = [(row.primitive, row.overflows, row.infinities, row.nans) for row in report.rows]
    assert counts == [
        ("exp", 2, 2, 0), ("mul", 0, 2, 0), ("mul", 0, 6, 0), ("sqrt", 0, 0, 0), ("sub", 0, 0, 2), ("add", 0, 3, 0),
    ]  # fmt: skip
    table = [line.split() for line in report.table(width=None).splitlines()]
    assert table[0][6:10] == ["overflows", "underflows", "infinities", "nans"]


def test_the_report_sees_what_is_lost() -> None:
    fun = lambda x, y: (x * 1000.0, x * 1e-4, x + y)  # noqa: E731
    x, y = jnp.array([1.0, 1.25, 1.75]), jnp.array([0.125, 2.0, 0.0])
    report = jc.emulate(fun, "e4m3").report(x, y, trace_values=True)
    rows = {row.primitive: row for row in report.rows}
    assert (rows["mul"].overflows, rows["mul"].underflows) == (3, 3)
    assert rows["add"].largest == 3.25 and rows["add"].smallest == 1.125
    assert rows["add"].error == 0
    third = jc.emulate(lambda x: x / 3, "e4m3").report(jnp.array([1.0]), trace_values=True).rows[0]
    assert third.error == pytest.approx(abs(0.34375 * 3 - 1), rel=1e-6)


def test_the_report_follows_loops_and_draws_as_the_program_does() -> None:
    """The last sum lies in the report as the program gives it."""
    low = jc.emulate(nested, "e5m2:stochastic", key=KEY)
    report = low.report(jnp.array([1.7, 0.9]), trace_values=True)
    row = next(row for row in report.rows if row.primitive == "reduce_sum")
    assert row.largest == float(low(jnp.array([1.7, 0.9])))
    with pytest.raises(TypeError, match="emulate returned"):
        jc.EmulatedFunction.report(nested, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda x: low.report(x, trace_values=True))(X)


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("names", [["add", "nextafter"], ["mul", "max", "rem", "pow", "atan2"]])
def test_axes_of_size_one_are_stretched_as_by_the_primitive(names: list[str]) -> None:
    """JAX binds its primitives of two operands to shapes such as (4, 1) and (1, 3), in `jax.numpy.vander` too."""
    x, y = jnp.linspace(0.25, 2.0, 4)[:, None], jnp.linspace(0.5, 3.0, 3)[None]
    fun = jc.emulate(lambda x, y: {name: getattr(jax.lax, f"{name}_p").bind(x, y) for name in names}, "bfloat16")
    got, *others = fun(x, y), fun(*jnp.broadcast_arrays(x, y)), jax.jit(fun)(x, y)
    for name in names:
        assert got[name].shape == (4, 3), name
        for other in others:
            np.testing.assert_array_equal(got[name], other[name], name)


def test_a_cast_of_the_program_is_named() -> None:
    with pytest.raises(ValueError, match="x is what the program casts to float16 there"):
        jc.emulate(lambda x: x.astype(jnp.float16), "bfloat16")(jnp.ones(2))


test_further = further.test()
