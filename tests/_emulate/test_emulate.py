"""`jc.emulate`: values against exact rationals, NumPy and ml_dtypes; sums in their orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import oracle_elementary as exact
import oracle_matmul
import oracle_program
import pytest
from emulate_cases import KEY, X, Y, loops, low, straight, sums
from further import Further
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jchop as jc
from jchop._core.matmul.operations import fold_seeds, operation_words
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules.rules import make_settings
from jchop._emulate.rules.trace import trace_program

further = Further()

MODES = (*oracle.DETERMINISTIC, *oracle.STOCHASTIC)


pytestmark = pytest.mark.usefixtures("neighbours_kept")


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("mode", MODES)
def test_programs_in_every_mode(mode: str) -> None:
    """Straight lines, loops, branches and sums: every operation is the exact one rounded once, at draws of its own."""
    spec = jc.Spec("e5m3", rounding=mode)
    accumulate = jc.MatmulSpec(accumulate=spec)
    seeds = seed_words(KEY)
    machine = oracle_program.Machine(
        oracle_matmul.How(oracle.ieee(5, 3), mode),
        lambda seeds, shape, number: np.asarray(operation_words(seeds, jnp.zeros(shape, jnp.float32), number)),
        fold_seeds,
    )
    fun = lambda x, y: (straight(x, y), loops(x, y), sums(x, y))  # noqa: E731
    got = jax.jit(jc.emulate(fun, spec, accumulate=accumulate, key=KEY))(X, Y)
    program = trace_program(fun, make_settings(spec, None, accumulate, "raise"), (X, Y), {})
    entry = fold_seeds(seeds, 0)
    entered = [machine.rounded(oracle_program.values(v), v.shape, entry, i) for i, v in enumerate(program.values)]
    want = machine.run(program.plan, fold_seeds(seeds, 1), entered)
    for one, other in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_array_equal(one, other)


TREES = st.recursive(
    st.one_of(st.sampled_from(["x", "y"]), st.floats(-4, 4, width=16)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/"]), inner, inner), st.tuples(st.just("sqrt"), inner)
    ),
    max_leaves=8,
)


def evaluate(tree: Any, x: Any, y: Any, constant: Callable[[float], Any], root: Callable[..., Any]) -> Any:
    if isinstance(tree, float):
        return constant(tree)
    if isinstance(tree, str):
        return {"x": x, "y": y}[tree]
    name, *parts = tree
    a, *rest = (evaluate(part, x, y, constant, root) for part in parts)
    if name == "sqrt":
        return root(a)
    return {"+": lambda: a + rest[0], "-": lambda: a - rest[0], "*": lambda: a * rest[0], "/": lambda: a / rest[0]}[
        name
    ]()


def hard(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Patterns of a 16-bit dtype: any, small ones, and ordinary numbers."""
    rng = np.random.default_rng(5)
    word = rng.integers(0, 2**16, (2, 300), dtype=np.uint16)
    word[:, 100:200] = rng.integers(0, 300, (2, 100))
    x, y = word.view(dtype)
    x[200:], y[200:] = (rng.standard_normal((2, 100)) * 3).astype(dtype)
    return x, y


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize(("text", "dtype"), [("binary16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(tree=TREES)
def expressions_are_those_of_numpy(text: str, dtype: Any, tree: Any) -> None:
    x, y = hard(dtype)
    zero = np.zeros_like(x)
    with np.errstate(all="ignore"):
        want = evaluate(tree, x, y, dtype, np.sqrt) + zero
    fun = lambda x, y: evaluate(tree, x, y, jnp.float32, jnp.sqrt) + jnp.zeros_like(x)  # noqa: E731
    with np.errstate(all="ignore"):
        got = np.asarray(jc.emulate(fun, text)(*(jnp.asarray(v.astype(np.float32)) for v in (x, y)))).astype(dtype)
    same = (got.view(np.uint16) == want.view(np.uint16)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), [(x[i], y[i], got[i], want[i]) for i in np.flatnonzero(~same)[:3]]


def a_hundred_ones() -> None:
    fmt, ones = jc.formats.FloatFormat(5, 2), jnp.ones(100)
    total = lambda order: jc.emulate(jnp.sum, fmt, accumulate=jc.MatmulSpec(accumulate=fmt, order=order))(ones)  # noqa: E731
    assert float(total("sequential")) == 8
    assert float(total("pairwise")) == 96
    assert float(jc.emulate(jnp.sum, fmt)(ones)) == 96  # the carrier's sum


@pytest.mark.parametrize("mode", ["up", pytest.param("nearest_even", marks=pytest.mark.slow)])
def test_elementary_functions_are_rounded_once(mode: str) -> None:
    given = np.asarray(jc.round_to_format(X, "e5m3"))
    functions = {"exp": jnp.exp, "tanh": jnp.tanh, "sin": jnp.sin, "logistic": jax.nn.sigmoid}
    got = jax.jit(jc.emulate(lambda x: {name: fun(x) for name, fun in functions.items()}, f"e5m3:{mode}"))(given)
    for name in functions:
        rounding = partial(exact.round_array, exponent_bits=5, fraction_bits=3, mode=mode, word=np.zeros(given.shape))
        want = rounding(exact.values(name, given.astype(float), lambda y: rounding(y)[None]))  # noqa: B023
        np.testing.assert_array_equal(got[name], want, name)


def test_other_functions_are_the_carriers_rounded_once() -> None:
    for fun in (lambda x: jnp.abs(x) ** 1.5, jnp.floor, jax.scipy.special.digamma):
        low = jc.round_to_format(X, "e5m3")
        np.testing.assert_array_equal(jc.emulate(fun, "e5m3")(X), jc.round_to_format(fun(low), "e5m3"))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("exponents", [(0, 2), (1, 3, 5, 7, -1, -3)])
def test_powers_are_made_of_products(exponents: tuple[int, ...]) -> None:
    low = jc.round_to_format(X, "e5m3:up")
    mul = lambda a, b: jc.emulate(lambda a, b: a * b, "e5m3:up")(a, b)  # noqa: E731
    square = mul(low, low)
    powers = {0: jnp.ones(4), 1: low, 2: square, 3: mul(low, square), 5: mul(low, mul(square, square))}
    powers[7] = mul(mul(low, square), mul(square, square))
    got = jc.emulate(lambda x: [lax.integer_pow(x, exponent) for exponent in exponents], "e5m3:up")(X)
    for exponent, value in zip(exponents, got, strict=True):
        want = powers[abs(exponent)]
        if exponent < 0:
            want = jc.emulate(lambda v: 1 / v, "e5m3:up")(want)
        np.testing.assert_array_equal(value, want, str(exponent))


def test_integers_become_floats_once() -> None:
    """2^24 + 1 is no float32, but it is the sum of two."""
    n = jnp.array([2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31), 5, 0], jnp.int32)
    got = jc.emulate(lambda n: n.astype(jnp.float32), "e6m9:up")(n)
    assert got.tolist() == [2**24 + 2**15, -(2.0**24), 2.0**31, -(2.0**31), 5, 0]
    assert jc.emulate(lambda n: n * 3 + 1, "e5m2")(n[4:]).tolist() == [16, 1]  # integers are untouched
    assert jc.emulate(lambda x: x > 1.0, "e5m2")(jnp.array([1.1, 1.2])).tolist() == [False, True]


@further.first
def constants_are_rounded_where_they_are_moved() -> None:
    """But not the infinity that a maximum starts from, in a format that has none."""
    fun = lambda x: jnp.where(x > 1, x, 0.3).at[0].set(1.1)  # noqa: E731
    assert jc.emulate(fun, "e5m2")(X).tolist() == [1.0, 0.3125, 2.0, 5.0]
    assert float(jc.emulate(lambda x: jnp.maximum(-jnp.inf, x).max(), "float8_e4m3fn")(X)) == 5.0
    assert jc.emulate(lambda x: jnp.maximum(x, 1.1), "e5m2")(X).tolist() == [1.0, 1.0, 2.0, 5.0]


@pytest.mark.smoke
def test_16_bit_dtypes_carry_narrower_formats() -> None:
    for dtype in (jnp.float16, jnp.bfloat16):
        got = jc.emulate(lambda x: (x @ x) * x, "e5m2", accumulate=jc.MatmulSpec(accumulate="e5m2"))(X.astype(dtype))
        want = jc.emulate(lambda x: (x @ x) * x, "e5m2", accumulate=jc.MatmulSpec(accumulate="e5m2"))(X)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(jnp.float32), want)


# -- sums --------------------------------------------------------------------------------------------------------------

SUM = jc.MatmulSpec("e5m3", "e5m3", "e5m3")


def products_of_matrices_are_those_of_math() -> None:
    a, b = low((2, 3, 5), 0), low((2, 5, 4), 1)
    got = jc.emulate(lambda a, b: jnp.einsum("bik,bkj->bji", a, b), "e5m3", accumulate=SUM)(a, b)
    np.testing.assert_array_equal(got, jnp.swapaxes(jc.math.matmul(a, b, SUM), 1, 2))


@pytest.mark.parametrize(
    ("features", "batches", "options"),
    [
        (2, 1, {"window_strides": (2, 1), "lhs_dilation": (2, 3)}),
        (1, 2, {"window_strides": (1, 2), "rhs_dilation": (1, 2)}),
        (1, 1, {}),
    ],
)
@pytest.mark.in_turn(20)
def test_convolutions(features: int, batches: int, options: dict[str, Any]) -> None:
    """In the carrier they are the carrier's but for the order; of small integers exactly so."""
    image = jnp.round(4 * low((4, 7, 6, 4), 0))
    kernel = jnp.round(4 * low((3, 2, 4 // features, 6), 1))
    options = {"window_strides": (1, 1), "padding": [(1, 2), (-1, 3)], **options}
    fun = lambda x, w: lax.conv_general_dilated(  # noqa: E731
        x, w, **options, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=features,
        batch_group_count=batches,
    )  # fmt: skip
    np.testing.assert_array_equal(jc.emulate(fun, None, accumulate=jc.MatmulSpec())(image, kernel), fun(image, kernel))


def a_convolution_is_a_product_of_its_windows() -> None:
    image, kernel = low((2, 5, 3), 0), low((2, 3, 4), 1)
    fun = lambda x, w: lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))  # noqa: E731
    got = jc.emulate(fun, "e5m3", accumulate=SUM)(image, kernel)
    windows = jnp.stack([image[:, :4], image[:, 1:]], -1).reshape(2, 4, 6)  # channels before places
    np.testing.assert_array_equal(got, jc.math.matmul(windows, jnp.swapaxes(kernel, 0, 1).reshape(6, 4), SUM))


def windows_and_running_sums() -> None:
    x = jnp.abs(low((1, 6), 2))
    total = lambda v: lax.reduce_window(v, 0.0, lax.add, (1, 3), (1, 2), "VALID")  # noqa: E731
    got = jc.emulate(total, "e5m3", accumulate=SUM)(x)
    want = [float(jc.emulate(jnp.sum, "e5m3", accumulate=SUM)(x[0, i : i + 3])) for i in (0, 2)]
    assert got.tolist() == [want]
    ones = jnp.ones(20)
    assert jc.emulate(jnp.cumsum, "e5m2", accumulate=jc.MatmulSpec(accumulate="e5m2"))(ones).max() == 8
    assert jc.emulate(jnp.cumsum, "e5m2")(ones).max() == 20
    twos = jnp.array([1.5, 1.5, 1.5])
    assert float(jc.emulate(jnp.prod, "e5m1", accumulate=jc.MatmulSpec(accumulate="e5m1:down"))(twos)) == 3.0
    assert jc.emulate(jnp.cumprod, "e5m1", accumulate=jc.MatmulSpec(accumulate="e5m1:down"))(twos).tolist() == [
        1.5, 2.0, 3.0
    ]  # fmt: skip


def an_accumulator_of_its_own_is_rounded_to_the_format_at_the_end() -> None:
    wide = jc.emulate(jnp.sum, "e5m2", accumulate=jc.MatmulSpec(accumulate="e6m9"))
    assert float(wide(jnp.ones(100))) == 96
    assert float(jc.emulate(jnp.sum, None, accumulate=jc.MatmulSpec(accumulate="e6m9"))(jnp.ones(100))) == 100


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("spec", ["e5m2:up", "posit16:up"])
def test_roots_and_quotients_with_results_that_meet_again_are_compiled(spec: str) -> None:
    """Quirk `long_fusion_compiled_for_minutes`: of directed modes, on JAX 0.12."""

    def scene(p: Any) -> Any:
        found = jnp.linalg.norm(p) if spec == "e5m2:up" else p[0] / jnp.sum(p * p)
        return jnp.minimum(found - 1, p[1] + 1)

    points = jnp.array([[0, 0, -3.0], [0.3, 0.2, -4], [2, 0.5, -2]])
    low = jc.emulate(jax.vmap(lambda o: scene(o + jnp.array([0.1, -0.2, 1.0]))), spec)
    np.testing.assert_array_equal(jax.jit(low)(points), low(points))


@pytest.mark.parametrize(
    "check",
    [
        a_hundred_ones,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (
                products_of_matrices_are_those_of_math,
                a_convolution_is_a_product_of_its_windows,
                windows_and_running_sums,
                an_accumulator_of_its_own_is_rounded_to_the_format_at_the_end,
            )
        ),
    ],
)
def test_sums(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
