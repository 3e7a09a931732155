"""Sums and products along axes against one exact operation after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_arithmetic as arithmetic
import oracle_math
import pytest
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Fraction, Value
from oracle_matmul import Arithmetic, How, Sum, Words, rounded
from refusals import assert_refused

import jchop as jc
from jchop import MatmulSpec
from jchop._core.matmul.operations import _recurrence_ranges

further = Further()

KEY = jax.random.key(5)
F32 = oracle.CARRIERS["float32"]
ONE = Fraction(1)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    cases.assert_bits(expected.ravel(), got.ravel(), cases.bits(expected.ravel()))


# -- the scalar interpreter --------------------------------------------------------------------------------------------


class Scalar:
    """The functions on one row of exact values; `word(part, which, step)` gives the random words of a row."""

    def __init__(
        self,
        operands: How,
        product: How | None,
        accumulate: How,
        order: str = "sequential",
        block: int = 0,
        word: Callable[[str, str, int], int] = lambda part, which, step: 0,
    ) -> None:
        self.operands, self.accumulate, self.word = operands, accumulate, word
        self.arithmetic = Arithmetic(product, accumulate, F32, order, block)

    def words(self, part: str) -> Words:
        return lambda which, step: self.word(part, which, step)

    def divided(self, total: Value, count: int, part: str = "0") -> Value:
        return rounded(arithmetic.divide(total, Fraction(count)), self.accumulate, F32, self.word(part, "result", 0))

    def sum(self, x: Sequence[Value], part: str = "") -> Value:
        how = Arithmetic(None, self.accumulate, F32, self.arithmetic.order, self.arithmetic.block)
        return Sum(x, [ONE] * len(x), how, self.words(part)).result()

    def mean(self, x: Sequence[Value], part: str = "") -> Value:
        return self.divided(self.sum(x, part), len(x), part + "0")

    def squares(self, x: Sequence[Value]) -> Value:
        return Sum(x, x, self.arithmetic, self.words("")).result()

    def var(self, x: Sequence[Value], ddof: int = 0) -> Value:
        centre, down = self.mean(x, "1"), self.operands.mode == "down"
        d = [
            rounded(oracle_math.subtract(v, centre, down), self.operands, F32, self.word("d", "result", k))
            for k, v in enumerate(x)
        ]
        return self.divided(self.squares(d), len(x) - ddof)

    def root(self, x: Value) -> Value:
        return rounded(oracle_math.sqrt(x), self.accumulate, F32, self.word("2", "result", 0))

    def std(self, x: Sequence[Value], ddof: int = 0) -> Value:
        return self.root(self.var(x, ddof))

    def norm(self, x: Sequence[Value]) -> Value:
        return self.root(self.squares(x))


def how(text: str) -> How:
    fmt, _, mode = text.partition(":")
    return How(oracle.describe(jc.formats.parse_format(fmt)), mode or "nearest_even")


SPECS: dict[str, tuple[MatmulSpec, Scalar]] = {}
for _operands, _product, _accumulate, _order, _block in (
    ("e5m7", "e5m7", "e5m7", "sequential", 0),
    ("e5m7", "e5m5:odd", "e5m6:up", "blocked", 3),
    ("e5m4:down", "e5m7:down", "bfloat16:down", "pairwise", 0),
    ("bfloat16", None, "e6m9", "matrix_unit", 1),
):
    _text = _order if not _block else f"{_order}({_block})"
    SPECS[_text] = (
        MatmulSpec(_operands, _product, _accumulate, _text),
        Scalar(how(_operands), _product and how(_product), how(_accumulate), _order, _block),  # type: ignore[arg-type]
    )


def sum_spec(spec: MatmulSpec) -> MatmulSpec:
    return MatmulSpec(spec.operands, None, spec.accumulate, spec.order)


# -- values ------------------------------------------------------------------------------------------------------------


@further.first
@pytest.mark.parametrize("order", SPECS)
def reductions_are_exact_operations_rounded_one_by_one(order: str) -> None:
    spec, scalar = SPECS[order]
    x = normal(3, 11) * 3 + 1
    rows = [oracle_math.values(row) for row in np.asarray(jc.round_to_format(x, spec.operands or "binary32"))]
    same(jc.math.sum(x, sum_spec(spec), axis=1), oracle_math.array([scalar.sum(row) for row in rows]))
    same(jc.math.std(x, spec, axis=1), oracle_math.array([scalar.std(row) for row in rows]))


@further
def the_other_reductions_are_parts_of_these() -> None:
    spec, scalar = SPECS["sequential"]
    x = normal(3, 11) * 3 + 1
    rows = [oracle_math.values(row) for row in np.asarray(jc.round_to_format(x, "e5m7"))]
    same(jc.math.mean(x, sum_spec(spec), axis=1), oracle_math.array([scalar.mean(row) for row in rows]))
    same(jc.math.var(x, spec, axis=1, ddof=1), oracle_math.array([scalar.var(row, 1) for row in rows]))
    same(jc.math.norm(x, spec, axis=1), oracle_math.array([scalar.norm(row) for row in rows]))


@further
@pytest.mark.parametrize("name", ["sum", "mean", "norm", "prod", "logsumexp"])
def every_row_draws_words_of_its_own_and_results_are_unbiased(name: str) -> None:
    function = getattr(jc.math, name)
    x = np.tile(np.linspace(1, 1.3, 7, dtype=np.float32), (4000, 1))
    rows = np.asarray(function(x, "e5m6:stochastic", KEY, axis=1))
    exact = function(x[:1].astype(np.float64), "binary64", axis=1)
    assert len(set(rows.tolist())) > 2
    np.testing.assert_allclose(rows.mean(), exact, rtol=2e-3)
    np.testing.assert_array_equal(rows, function(x, "e5m6:stochastic", KEY, axis=1))
    assert np.any(rows != function(x, "e5m6:stochastic", jax.random.key(6), axis=1))


def test_draws_are_those_of_emulate() -> None:
    x, text = normal(4, 6), "e5m4:stochastic"
    how = MatmulSpec(accumulate=text)
    low = jc.emulate(lambda x: jnp.sum(x, 1), text, accumulate=how)
    same(jc.math.sum(x, text, KEY, axis=1), low(x, key=KEY))
    same(jc.math.cumsum(x, text, KEY, axis=1), jc.emulate(lambda x: jnp.cumsum(x, 1), text, accumulate=how)(x, key=KEY))


def test_the_range_of_what_a_product_runs_through_holds_its_start() -> None:
    """It is the format's where 1 lies in it: a multiple of the last place, and not above the largest value."""
    for text, held in (("e4m3", True), ("e3m2(bias=-1)", True), ("e3m2(bias=-2)", False), ("e3m2(bias=6)", True)):
        first, own = _recurrence_ranges(jc.Spec(text), np.float32)
        assert first.quantum <= 0 < first.top
        assert (first == own) is held, text
    assert _recurrence_ranges(jc.Spec("e3m2(bias=6)"), np.float32)[0].top == 1


@further
def a_sum_stops_where_the_next_number_is_too_far() -> None:
    ones = np.ones(100, np.float32)
    assert jc.math.sum(ones, "e5m2") == 8
    assert jc.math.sum(ones, MatmulSpec(accumulate="e5m2")) == 8
    assert jc.math.sum(ones, MatmulSpec(accumulate="e5m2", order="pairwise")) == 96
    assert jc.math.sum(ones, MatmulSpec()) == 100


@further
@pytest.mark.parametrize("text", ["bfloat16", "e5m4:up", "e5m4:odd"])
def products_and_what_they_run_through(text: str) -> None:
    x = normal(3, 9) * 0.5 + 1
    own = np.asarray(jc.round_to_format(x, text))
    spec = how(text)

    def run(operation: Callable[[Value, Value], Value], c: Value, row: int) -> list[Value]:
        steps = []
        for v in oracle_math.values(own[row]):
            c = rounded(operation(c, v), spec, F32, 0)
            steps.append(c)
        return steps

    sums = [run(arithmetic.add, Fraction(0), row) for row in range(3)]
    products = [run(arithmetic.multiply, ONE, row) for row in range(3)]
    same(jc.math.cumsum(x, text, axis=1), np.array([oracle_math.array(row) for row in sums]))
    same(jc.math.cumprod(x, text, axis=1), np.array([oracle_math.array(row) for row in products]))
    same(jc.math.prod(x, text, axis=1), oracle_math.array([row[-1] for row in products]))


AXES: list[tuple[Any, bool]] = [
    (0, False), (None, True), (-1, True), ((0, 2), False), ((2, 0), True), ((), False)
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("places", [AXES[:1], AXES[1:]], ids=["one", "all"])
def test_axes_are_those_of_numpy(places: list[tuple[Any, bool]]) -> None:
    x = np.random.default_rng(1).integers(1, 3, (2, 3, 4)).astype(np.float32)
    for axis, keepdims in places:
        for name, spec in (("sum", MatmulSpec()), ("prod", "e7m9")):
            got = getattr(jc.math, name)(x, spec, axis=axis, keepdims=keepdims)
            want = getattr(np, name)(x, axis=axis, keepdims=keepdims)
            assert got.shape == want.shape, (name, axis, keepdims)
            same(got, want)
        if isinstance(axis, int) or axis is None:
            same(jc.math.cumsum(x, "e7m9", axis=axis), np.cumsum(x, axis=axis))


MASK = np.random.default_rng(7).random((3, 11)) < 0.6
MASK[2] = False


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("order", SPECS)
def test_elements_that_are_left_out_and_a_first_one(order: str) -> None:
    """An element that is left out is zero in its place, which shows in the order; the initial one comes first."""
    spec, scalar = SPECS[order]
    x = normal(3, 11) * 3 + 1
    operands = spec.operands or "binary32"
    own, start = np.asarray(jc.round_to_format(x, operands)), np.asarray(jc.round_to_format(np.float32(1.3), operands))
    rows = [oracle_math.values(np.concatenate([start[None], row])) for row in np.where(MASK, own, np.float32(0))]
    got = jc.math.sum(x, sum_spec(spec), axis=1, where=MASK, initial=1.3)
    same(got, oracle_math.array([scalar.sum(row) for row in rows]))
    counts, rows = MASK.sum(1), [row[1:] for row in rows]
    want = [scalar.divided(scalar.sum(row), int(n)) for row, n in zip(rows[:2], counts, strict=False)]
    got = jc.math.mean(x, sum_spec(spec), axis=1, where=MASK)
    same(got[:2], oracle_math.array(want))
    assert np.isnan(got[2])


@further
def a_variance_of_some_elements() -> None:
    x, some = normal(3, 11) * 3 + 1, MASK | (np.arange(11) < 3)

    @jax.jit
    def both(x: jax.Array, some: jax.Array) -> Any:
        return [getattr(jc.math, name)(x, MatmulSpec(), axis=1, ddof=1, where=some) for name in ("var", "std")]

    for got, exact in zip(both(x, some), (np.var, np.std), strict=True):
        np.testing.assert_allclose(got, exact(x, axis=1, ddof=1, where=some), rtol=1e-5)
    assert all(np.isnan(few).all() for few in both(x, np.broadcast_to(np.arange(11) < 1, (3, 11))))
    spec, scalar = SPECS["sequential"]
    row = np.asarray(jc.round_to_format(x[0], "e5m7"))
    want = scalar.var(oracle_math.values(row[some[0]]), 1)  # zeros change nothing in sequential order
    same(jc.math.var(x[:1], spec, axis=1, ddof=1, where=some[:1]), oracle_math.array([want]))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["e5m4:up", "e5m4:odd", "e3m2(bias=-2)"])
def test_a_product_of_some_factors_and_a_first_one(text: str) -> None:
    """Formats without 1 too: a factor that is left out changes nothing."""
    x = normal(3, 11) * 0.5 + 9
    fmt = text.partition(":")[0]
    own = np.asarray(jc.round_to_format(x, text))
    start = np.asarray(jc.round_to_format(np.float32(9.3), text))
    spec = How(oracle.describe(jc.formats.parse_format(fmt)), text.partition(":")[2] or "nearest_even")
    want = []
    for row in range(3):
        c: Value = ONE
        factors = zip([start, *own[row]], [True, *MASK[row]], strict=True)
        for v, counts in factors:
            if counts:
                c = arithmetic.multiply(c, oracle_math.values(np.asarray(v)[None])[0])
                c = rounded(c, spec, F32, 0)
        want.append(c)
    same(jc.math.prod(x, text, axis=1, where=MASK, initial=9.3), oracle_math.array(want))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("name", ["sum", "mean", "std", "prod"])
def test_what_is_left_out_has_no_derivative_and_no_nan(name: str) -> None:
    x = jnp.asarray(np.where(MASK, normal(3, 11), np.nan))[:2]
    some = jnp.asarray(MASK[:2])
    value, slope = jax.value_and_grad(lambda x: getattr(jc.math, name)(x, "e6m9", where=some))(x)
    assert np.isfinite(value)
    assert np.all((np.asarray(slope) != 0) == MASK[:2])
    if name != "mean":
        return
    drawn = jax.vmap(lambda x, m, key: jc.math.mean(x, "e5m3:stochastic", key, where=m))
    keys = jax.random.split(KEY, 2)
    same(jax.jit(drawn)(x, some, keys)[1], jc.math.mean(x[1], "e5m3:stochastic", keys[1], where=some[1]))


@further
def norms() -> None:
    x = normal(4, 5)
    for order in (None, 1, 2, np.inf):
        got = jc.math.norm(x, MatmulSpec(), ord=order, axis=-1)
        np.testing.assert_allclose(got, np.linalg.norm(x, order, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(jc.math.norm(x, MatmulSpec()), np.linalg.norm(x), rtol=1e-6)
    assert jc.math.norm([3.0, 4.25], "e5m2", ord=1) == 7
    assert jc.math.norm([3.0, -4.6], "e5m2", ord=np.inf) == 5


def test_the_largest_of_a_row_with_a_nan_is_nan() -> None:
    """XLA's CPU backend may lose a NaN of a long row."""
    x = normal(5, 5000)
    x[1, 3], x[2, 2500], x[3, 4999], x[4, 0] = np.nan, np.nan, np.nan, -np.inf
    got = np.asarray(jc.math.norm(x, MatmulSpec(), ord=np.inf, axis=-1))
    np.testing.assert_array_equal(got, [np.abs(x[0]).max(), np.nan, np.nan, np.nan, np.inf])


def test_of_nothing() -> None:
    nothing = np.zeros((2, 0), np.float32)
    same(jc.math.sum(nothing, "e5m2", axis=1), np.zeros(2, np.float32))
    same(jc.math.prod(nothing, "e5m2", axis=1), np.ones(2, np.float32))
    assert np.isnan(jc.math.mean(nothing, "e5m2", axis=1)).all()
    assert jc.math.cumsum(nothing, "e5m2", axis=1).shape == (2, 0)


@further
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def check_16_bit_numbers_are_summed_in_float32(dtype: Any) -> None:
    x = normal(3, 20).astype(dtype)
    got = jc.math.norm(x, "e5m6:up", axis=1)
    same(got, jc.math.norm(x.astype(np.float32), "e5m6:up", axis=1).astype(dtype))
    same(jc.math.sum(x, MatmulSpec(), axis=1), jc.math.sum(x.astype(np.float32), MatmulSpec(), axis=1).astype(dtype))
    same(jc.math.cumsum(x, "e5m6", axis=0), jc.math.cumsum(x.astype(np.float32), "e5m6", axis=0).astype(dtype))


def test_float64() -> None:
    x = np.random.default_rng(0).normal(size=9)
    want = np.float32(0)
    for v in x.astype(np.float32):
        want = want + v
    assert jc.math.sum(x, "binary32") == want


# -- transforms and derivatives ----------------------------------------------------------------------------------------

NAMES = ["sum", "std", "norm", "prod", "cumsum", "cumprod"]  # mean and var are parts of std


def test_the_derivative_of_a_product_is_that_of_its_row() -> None:
    x = np.array([[1, 2, 3], [2, -1, 4]], np.float32)
    got = jax.grad(lambda x: jnp.sum(jc.math.prod(x, "e5m9", axis=1)))(jnp.asarray(x))
    np.testing.assert_array_equal(got, [[6, 3, 2], [-4, 8, -2]])


@further
@pytest.mark.parametrize("name", NAMES)
def jit_vmap_and_derivatives(name: str) -> None:
    function = getattr(jc.math, name)
    real = np.linalg.norm if name == "norm" else getattr(np, name)
    x, keys = jnp.asarray(np.abs(normal(3, 6)) + 0.5), jax.random.split(KEY, 3)
    weights = np.arange(1.0, 7.0) if name.startswith("cum") else 1.0

    def drawn(x: jax.Array, key: jax.Array) -> jax.Array:
        return function(x, "e5m5:stochastic", key)

    def plain(x: jax.Array) -> jax.Array:
        return (function(x, "e5m9") * weights).sum()

    each, grads = jax.jit(lambda x, keys: (jax.vmap(drawn)(x, keys), jax.vmap(jax.grad(plain))(x)))(x, keys)
    same(each[1], drawn(x[1], keys[1]))
    r = np.asarray(jc.round_to_format(x[1], "e5m9")).astype(float)
    slopes = [np.sum((real(r + step) - real(r - step)) * weights) / 2e-6 for step in np.eye(6) * 1e-6]
    # Intermediate values are rounded, and so is where a derivative is taken: eight bits or so.
    np.testing.assert_allclose(grads[1], slopes, rtol=0.02, atol=2e-3)


# -- refusals ----------------------------------------------------------------------------------------------------------

untyped: Any = jc.math
X = np.ones((2, 3), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "product": (lambda: untyped.sum(X, MatmulSpec(product="e5m2")), ValueError, "a sum has no products"),
    "fused": (lambda: untyped.mean(X, MatmulSpec(fused=True)), ValueError, "a sum has no products"),
    "axis": (lambda: untyped.sum(X, "e5m2", axis=2), ValueError, "axis=2 must be"),
    "axis twice": (lambda: untyped.sum(X, "e5m2", axis=(0, -2)), ValueError, "names an axis twice"),
    "scalar": (lambda: untyped.sum(np.float32(1), "e5m2", axis=0), ValueError, "axis=0, but x is a scalar"),
    "keepdims": (lambda: untyped.sum(X, "e5m2", keepdims=1), TypeError, "keepdims=1"),
    "no key": (lambda: untyped.sum(X, "e5m2:stochastic"), ValueError, "key=None"),
    "complex": (lambda: untyped.cumsum(X.astype(complex), "e5m2"), TypeError, "x has dtype complex128"),
    "where": (
        lambda: untyped.mean(X, "e5m2", where=X[0, :2] > 0),
        ValueError,
        r"where has shape \(2,\), which does not",
    ),
    "larger": (
        lambda: untyped.prod(X[0], "e5m2", where=X > 0),
        ValueError,
        r"where has shape \(2, 3\), which does not",
    ),
    "mask": (lambda: untyped.sum(X, "e5m2", where=X), TypeError, "where has dtype float32; it must be of booleans"),
    "initial": (
        lambda: untyped.prod(X, "e5m2", initial=X),
        ValueError,
        r"initial has shape \(2, 3\); it must be a scalar",
    ),
    "count": (lambda: untyped.mean(np.broadcast_to(X[0, :1], 1 << 25), "e5m2", where=True), ValueError, "cast x to"),
    "ord": (lambda: untyped.norm(X, "e5m2", ord=3), ValueError, "ord=3 must be one of"),
    "matrix norm": (lambda: untyped.norm(X, "e5m2", ord=2), ValueError, "is a norm of matrices"),
    "a sum's spec": (lambda: untyped.cumsum(X, MatmulSpec()), TypeError, "must be a Spec"),
    "no spec": (lambda: untyped.sum(X, 1.0), TypeError, "spec=1.0 must be a MatmulSpec"),
}


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


# -- explicit meshes ---------------------------------------------------------------------------------------------------

WEIGHT = normal(24, 4, seed=1)
PAIRWISE = MatmulSpec(accumulate="bfloat16", order="pairwise")
STOCHASTIC = "bfloat16:stochastic"
#: Functions of x, of shape (16, 24) and sharded along both axes, and the sharding of the results.
ON_A_MESH: dict[str, tuple[Callable[[Any], Any], P]] = {
    "softmax": (lambda x: jc.math.softmax(x, STOCHASTIC, KEY), P("a", "b")),
    "logsumexp": (lambda x: jc.math.logsumexp(x, "bfloat16", axis=-1, keepdims=True), P("a", None)),
    "sum": (lambda x: jc.math.sum(x, STOCHASTIC, KEY, axis=0, where=x > -1, initial=1.0), P("b")),
    "all": (lambda x: jc.math.sum(x, PAIRWISE), P()),
    "cumsum": (lambda x: jc.math.cumsum(x, STOCHASTIC, KEY, axis=0), P("a", "b")),
    "flat_cumsum": (lambda x: jc.math.cumsum(x, "bfloat16"), P(None)),
    "prod": (lambda x: jc.math.prod(x, "bfloat16", axis=1), P("a")),
    "masked_prod": (lambda x: jc.math.prod(x, STOCHASTIC, KEY, axis=0, where=x > -1, initial=1.0), P("b")),
    "var": (lambda x: jc.math.var(x, STOCHASTIC, KEY, axis=0), P("b")),
    "norm": (lambda x: jc.math.norm(x, STOCHASTIC, KEY, axis=0), P("b")),
    "matmul": (
        lambda x: jc.math.matmul(x, WEIGHT, MatmulSpec(accumulate="e5m2", order="matrix_unit(8)")),
        P("a", None),
    ),
    "einsum": (lambda x: jc.math.einsum("ij,jk->ki", x, WEIGHT, spec=PAIRWISE), P(None, "a")),
    "trace": (lambda x: jc.math.trace(x, "bfloat16"), P()),
    "conv": (lambda x: jc.math.conv(x[:, None], WEIGHT[None, None, :3, 0], "bfloat16"), P("a", None, None)),
    "emulate": (jc.emulate(lambda x: (x @ WEIGHT).sum(1), "bfloat16", accumulate=PAIRWISE), P("a")),
    "derivative": (jax.grad(lambda x: (x * jc.math.softmax(x, PAIRWISE)).max()), P("a", "b")),
    "vmap": (jax.vmap(lambda row: jc.math.softmax(row, PAIRWISE)), P("a", "b")),
}


MESHED = [name for name in ON_A_MESH if name != "prod"]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("names", ["prod", *(" ".join(MESHED[i::5]) for i in range(5))])
def test_sums_along_an_axis_of_an_explicit_mesh_have_the_same_bits(names: str) -> None:
    x, mesh = jnp.asarray(normal(16, 24)), jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def run(x: jax.Array) -> dict[str, jax.Array]:
        return {name: ON_A_MESH[name][0](x) for name in names.split()}

    with jax.set_mesh(mesh):
        found = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, P("a", "b"))))
    for name, wanted in jax.jit(run)(x).items():
        assert (name, found[name].sharding.spec) == (name, ON_A_MESH[name][1])
        same(found[name], wanted)


test_further = further.test()
