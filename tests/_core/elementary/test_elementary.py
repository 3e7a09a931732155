"""Elementary functions rounded once: every argument of 16-bit formats, in every mode, against integer arithmetic."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_elementary as exact
import oracle_math
import pytest
from elementary_table import NAMES, arguments, bits, words, wrong
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle_matmul import How, rounded

import jchop as jc
from jchop._core.elementary.functions import BINARY_FUNCTIONS, UNARY_FUNCTIONS, elementary_function

further = Further()

EVERY = 61  # of how many arguments the default run takes one
NONE_WRONG = dict.fromkeys(exact.MODES, 0)


#: Every function in both 16-bit formats, and some in one of 8 bits, whose numbers they have too; by default a part.
EVERY_CASE = [("exp", ("bfloat16",), EVERY)]
EVERY_CASE += [
    pytest.param(name, ("bfloat16", "binary16", *["float8_e5m2"] * (i % 9 == 0)), 1, marks=pytest.mark.slow)
    for i, name in enumerate(UNARY_FUNCTIONS)
]


@further
@pytest.mark.parametrize(("name", "texts", "step"), EVERY_CASE)
def every_result_is_the_true_one_rounded_once(name: str, texts: tuple[str, ...], step: int) -> None:
    for text in texts:
        assert wrong(name, text, step) == NONE_WRONG, text


def test_a_part_of_the_arguments_of_every_function() -> None:
    x = arguments("binary16")[::1601]
    row = partial(exact.round_array, exponent_bits=5, fraction_bits=10, mode="nearest_even", word=words(len(x)))
    different = {}
    for name in UNARY_FUNCTIONS:
        want = row(exact.values(NAMES[name], x.astype(float), lambda v: row(v)[None]))
        got = np.asarray(jax.jit(partial(elementary_function, name=name, spec=jc.Spec("binary16")))(x))
        different[name] = x[bits(got) != bits(want.astype(np.float32))].tolist()
    assert not any(different.values()), different


def test_explicit_sharding() -> None:
    """Tables are read at indexes that are sharded."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 3), np.float32), NamedSharding(mesh, P("rows", None)))
        for name in (*UNARY_FUNCTIONS, *BINARY_FUNCTIONS):
            operands = [x] * (2 if name in BINARY_FUNCTIONS else 1)
            out = jax.eval_shape(partial(elementary_function, name=name, spec=jc.Spec("bfloat16")), *operands)
            assert out.shape == (4, 3) and jax.typeof(out).sharding.spec == P("rows", None), name


def test_the_oracle_rounds_as_the_oracle_of_all_formats_does() -> None:
    rng = np.random.default_rng(1)
    y = np.ldexp(rng.uniform(-2, 2, 60), rng.integers(-150, 128, 60))
    y = np.concatenate([y, [0.0, -0.0, np.inf, -np.inf, 2.0**-134, 3 * 2.0**-134, 2.0**-133, 1 + 2.0**-8]])
    for mode in exact.MODES:
        word = words(len(y))
        want = [
            rounded(v, How(oracle.ieee(8, 7), mode), oracle.CARRIERS["float32"], int(w))
            for v, w in zip(oracle_math.values(y), word, strict=True)
        ]
        got = exact.round_array(y, 8, 7, mode, word).astype(np.float32)
        np.testing.assert_array_equal(bits(got), bits(oracle_math.array(want)), mode)


@further.first
def the_exact_values_are_near_those_of_numpy() -> None:
    """The integers' formulas, which decide only where float64 cannot, at arguments where it can."""
    for name in exact.EXACT:
        for x in (0.375, 0.8125, 1.0, 1.75, 5.5):
            with np.errstate(all="ignore"):
                near = float(exact.near(name)(x))
            if np.isfinite(near) and near:
                np.testing.assert_allclose(exact.odd_float(name, Fraction(x)), near, rtol=2.0**-46, err_msg=name)


# -- other formats, and other dtypes -----------------------------------------------------------------------------------


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(
    ("sizes", "name"),
    [((8, 15), "exp"), ((8, 15), "log"), ((4, 11), "exp"), ((4, 11), "sin"), ((6, 9), "log"), ((2, 13), "sin"),
     ((2, 13), "erfc"), ((8, 10), "tanh")],
)  # fmt: skip
def test_formats_of_other_sizes(sizes: tuple[int, int], name: str) -> None:
    """Of 16 bits and, to nearest, of more."""
    rng = np.random.default_rng(sum(sizes))
    some = np.ldexp(rng.uniform(-2, 2, 4000), rng.integers(-12, 7, 4000)).astype(np.float32)
    text, word = f"e{sizes[0]}m{sizes[1]}", np.zeros(4000, np.uint32)
    x = np.asarray(jc.round_to_format(some, text))
    x = x[np.isfinite(x)]
    modes = ("nearest_even", "up", "down", "odd") if sum(sizes) < 16 else ("nearest_even",)
    rows = [partial(exact.round_array, exponent_bits=sizes[0], fraction_bits=sizes[1], mode=mode, word=word[: len(x)])
            for mode in modes]  # fmt: skip
    y = exact.values(NAMES[name], x.astype(float), lambda v: np.stack([row(v) for row in rows]))
    for mode, row in zip(modes, rows, strict=True):
        got = np.asarray(jax.jit(partial(elementary_function, name=name, spec=jc.Spec(f"{text}:{mode}")))(x))
        np.testing.assert_array_equal(bits(got), bits(row(y).astype(np.float32)), f"{text} {mode}")


def test_fixed_point_and_codebooks() -> None:
    x = np.linspace(-4, 4, 65, dtype=np.float32)
    exp = np.exp(x.astype(float))
    up = jc.math.exp(x, "fixed8.8:up:saturate")
    np.testing.assert_array_equal(up, np.minimum(np.where(x == 0, 1, np.floor(exp * 256 + 1) / 256), 128 - 2.0**-8))
    nearest = jc.math.exp(x[x <= 0], jc.formats.CodebookFormat((0.0, 0.25, 0.5, 1.0)))
    assert set(nearest) <= {0.0, 0.25, 0.5, 1.0}


@further
@pytest.mark.parametrize("name", ["exp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("arcsin", "log"))])
def float64_data_is_rounded_alike(name: str) -> None:
    """Subnormal numbers of float32 too, which a conversion would lose."""
    x = arguments("bfloat16")[::131]
    key = jax.random.key(3)
    for text in ("bfloat16:up", "bfloat16:stochastic"):
        narrow, wide = (getattr(jc.math, name)(x.astype(t), text, key) for t in (np.float32, np.float64))
        assert wide.dtype == np.float64
        if "up" in text:
            np.testing.assert_array_equal(bits(wide.astype(np.float32)), bits(narrow))
        else:
            neighbours = [getattr(jc.math, name)(x, f"bfloat16:{mode}") for mode in ("down", "up")]
            held = (neighbours[0] == wide) | (neighbours[1] == wide) | np.isnan(wide)
            assert held.all()


@further
def ends_of_the_range_do_not_vanish() -> None:
    assert jc.math.exp2(np.float32(-126), "bfloat16") == 2.0**-126
    assert jc.math.exp2(np.float32(-133), "bfloat16") == 2.0**-133
    assert jc.math.arcsin(np.float32(2.0**-126), "bfloat16") == 2.0**-126
    assert jc.math.exp(np.float32(-87.5), "bfloat16") == jc.round_to_format(np.exp(-87.5), "bfloat16")
    assert jc.math.log(np.float32(2.0**-133), "bfloat16") == -92.0


@pytest.mark.parametrize(("name", "mode"), [("logistic", "up"), pytest.param("expm1", "down", marks=pytest.mark.slow)])
def test_emulate_and_the_functions_have_the_same_bits(name: str, mode: str) -> None:
    x = jnp.asarray(arguments("bfloat16")[::97])
    spec, fun = jc.Spec(f"bfloat16:{mode}"), {"logistic": jax.nn.sigmoid, "expm1": jnp.expm1}[name]
    want = jax.jit(partial(elementary_function, name=name, spec=spec))(x)
    np.testing.assert_array_equal(bits(np.asarray(jax.jit(jc.emulate(fun, spec))(x))), bits(np.asarray(want)))
    if mode == "down":
        slope = jax.grad(lambda x: jc.emulate(jnp.tanh, f"bfloat16:{mode}")(x))(jnp.float32(0.5))
        np.testing.assert_allclose(slope, 1 - np.tanh(0.5) ** 2, rtol=1e-6)


def test_one_function_for_each_shape() -> None:
    def many(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jc.math.tanh(x, "bfloat16")
        return x

    def lines(fun: object) -> int:
        return len(jax.jit(fun).lower(jnp.ones(5)).as_text().splitlines())  # type: ignore[arg-type]

    assert lines(many) < 1.5 * lines(lambda x: jc.math.tanh(x, "bfloat16"))


test_further = further.test()
