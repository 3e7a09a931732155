"""round_to_format to scaled formats: kinds of input, transforms, gradients, sharding, properties."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._spec.spec import Spec

KEY = jax.random.key(3)
TEXTS = ("mxfp4(group=8)", "int8(channel=0)", "nvfp4", "uint4(group=8,zero_point=integer)", "e4m3fn(group=(2,8))")


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(dtype)


# -- kinds of input ----------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_numpy_gives_numpy_of_its_dtype(dtype):
    x = numbers((4, 24), dtype=dtype)
    rounded = jc.round_to_format(x, "int8(channel=0)")
    assert type(rounded) is np.ndarray
    assert rounded.dtype == x.dtype and rounded.shape == x.shape
    exact, scale = x.astype(np.float64), np.abs(x.astype(np.float64)).max(1, keepdims=True) / 127
    ulp = float(jnp.finfo(dtype).eps) * np.abs(exact)
    assert np.all(np.abs(rounded.astype(np.float64) - exact) <= 0.51 * scale + ulp)
    # rounded once from x: 64-bit data keeps what binary32 has not
    with jax.enable_x64(dtype == np.float64):
        again = np.asarray(jc.round_to_format(jnp.asarray(x), "int8(channel=0)"))
    np.testing.assert_array_equal(again, rounded)


@pytest.mark.smoke
def test_scalars_and_lists():
    assert jc.round_to_format(-127.0, "int8(group=tensor)") == -127.0
    assert type(jc.round_to_format(0.0, jc.formats.int8)) is np.float64
    assert jc.round_to_format([7.0, 1.2, -0.4], jc.formats.int4).tolist() == [7.0, 1.0, 0.0]
    assert jc.round_to_format(np.zeros((0, 3), np.float32), jc.formats.mxfp4).shape == (0, 3)


def test_inf_and_nan_are_no_part_of_a_scale():
    x = [np.inf, -np.inf, np.nan, 7.0, 1.4]
    assert jc.round_to_format(x, jc.formats.int4).tolist() == [7.0, -8.0, 7.0, 7.0, 1.0]
    rounded = jc.round_to_format(x, jc.Spec("e5m2(group=tensor)", overflow="ieee"))
    np.testing.assert_array_equal(rounded[:4], [np.inf, -np.inf, np.nan, 7.0])
    assert jc.round_to_format(x, "mxfp8_e5m2(nan_block=true)").tolist() == pytest.approx([np.nan] * 5, nan_ok=True)


@each(
    ("x", "spec", "error", "message"),
    [
        (np.ones(3, np.complex64), "mxfp4", TypeError, "takes real numbers"),
        (1.5, "mxfp4", ValueError, "axis=-1 is not an axis of an array of 0 dimensions"),
        (np.ones((2, 2)), "int8(channel=2)", ValueError, "channel=2 is not an axis of an array of 2 dimensions"),
        (np.ones((2, 2)), "int4(group=(2,2),axis=(0,-2))", ValueError, "names an axis twice"),
        (np.ones(3, np.float32), "binary32(group=tensor)", ValueError, "element=binary32:saturate"),
        (np.ones(3), "mxfp4:stochastic", ValueError, "key=None"),
    ],
)
def test_what_is_refused(x, spec, error, message):
    with pytest.raises(error, match=message.replace("(", "\\(")):
        jc.round_to_format(x, spec)


def test_other_refusals():
    with pytest.raises(ValueError, match="is not for scaled formats"):
        jc.round_to_format(np.ones(3), "mxfp4:stochastic", KEY, generator="hardware")
    with pytest.raises(NotImplementedError, match="impl='pallas'"):
        jc.round_to_format(np.ones(3), jc.formats.int8, impl="pallas")
    with pytest.raises(ValueError, match="operands='mxfp4' is a scaled format"):
        jc.MatmulSpec(operands="mxfp4")


def test_a_format_its_call_and_its_text_are_one():
    x = numbers((3, 40))
    ways = [
        "int4(group=16,scale=bfloat16)",
        jc.formats.int4(group=16, scale="bfloat16"),
        Spec(jc.formats.int4(group=16, scale=jc.formats.bfloat16)),
    ]
    first, *rest = [jc.round_to_format(x, way) for way in ways]
    for other in rest:
        np.testing.assert_array_equal(other, first)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 4, 5), (2, 3, 4, 5)])
def test_every_axis_is_the_last_one_of_the_array_turned(shape):
    """Blocks with a ragged tail, along each axis counted from either end."""
    x, axes = numbers(shape), range(-len(shape), len(shape))

    @jax.jit
    def run(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        turned = [jc.round_to_format(jnp.moveaxis(x, axis, -1), "mxfp4(group=3)") for axis in axes]
        along = [jc.round_to_format(x, jc.formats.mxfp4(group=3, axis=axis)) for axis in axes]
        return [(jnp.moveaxis(back, -1, axis), one) for axis, back, one in zip(axes, turned, along, strict=True)]

    for turned, along in run(x):
        np.testing.assert_array_equal(along, turned)


# -- transforms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "mode"), list(itertools.product(TEXTS, [":stochastic", ""])))
@pytest.mark.in_turn(1000)
def test_vmap_is_the_loop_and_jit_is_eager(text, mode):
    x = jnp.asarray(numbers((3, 4, 20)))
    keys = jax.random.split(KEY, 3)

    def call(x: jax.Array, key: jax.Array) -> jax.Array:
        return jc.round_to_format(x, text + mode, key)

    loop = jnp.stack([call(part, key) for part, key in zip(x, keys, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(x, keys), loop)
    moved = jax.vmap(call, in_axes=(1, 0), out_axes=1)(jnp.moveaxis(x, 0, 1), keys)
    np.testing.assert_array_equal(jnp.moveaxis(moved, 1, 0), loop)


def stochastic_words_are_those_of_plain_formats():
    x = np.clip(numbers((6, 16)), -127, 127)
    x[:, 0] = 127
    plain = jc.round_to_format(x, "integer8:stochastic", KEY)
    np.testing.assert_array_equal(jc.round_to_format(x, "int8(channel=0):stochastic", KEY), plain)
    part = jc.round_to_format(x[2:4], "int8(channel=0):stochastic", KEY, offset=32)
    np.testing.assert_array_equal(part, plain[2:4])
    tile = jc.round_to_format(x[2:4, :8], "int8(channel=0):stochastic", KEY, offset=((2, 0), (6, 16)))
    np.testing.assert_array_equal(tile, plain[2:4, :8])


def stochastic_rounding_is_unbiased():
    x = np.full((1, 4096), 0.3, np.float32)
    x[0, 0] = 7
    rounded = jc.round_to_format(x, "int4(channel=0):stochastic", KEY)
    assert set(rounded[0, 1:].tolist()) == {0.0, 1.0}
    assert abs(rounded[0, 1:].mean() - 0.3) < 5 * (0.21 / 4095) ** 0.5


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "check",
    [stochastic_words_are_those_of_plain_formats, stochastic_rounding_is_unbiased],
    ids=lambda check: check.__name__,
)
def test_draws(check: Callable[[], None]) -> None:
    check()


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", TEXTS)
def test_straight_through(text):
    x, g = jnp.asarray(numbers((4, 20))), jnp.asarray(numbers((4, 20), 1))
    out, pull = jax.vjp(lambda x: jc.round_to_format(x, text), x)
    np.testing.assert_array_equal(pull(g)[0], g)
    np.testing.assert_array_equal(jax.jvp(lambda x: jc.round_to_format(x, text), (x,), (g,))[1], g)
    np.testing.assert_array_equal(out, jc.round_to_format(x, text))
    second = jax.grad(lambda x: jax.grad(lambda y: jc.round_to_format(y, text).sum())(x).sum())(x)
    np.testing.assert_array_equal(second, jnp.zeros_like(x))


def test_clipped_where_an_element_overflows():
    """With a scale of half the range, 7.5 of 7 is a tie that goes up to 8, and -7.5 goes to -8, which there is."""
    x = jnp.array([[7.5, -7.5, 7.0, jnp.inf], [7.5, 1.0, 7.25, jnp.nan]])
    expected = [[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
    spec = jc.Spec("int4(channel=0,rule=half_range)", gradient="clipped")
    pull = jax.jit(lambda x, g: jax.vjp(lambda x: jc.round_to_format(x, spec), x)[1](g)[0])
    np.testing.assert_array_equal(pull(x, jnp.ones_like(x)), expected)


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    ("text", "x", "expected"),
    [
        ("e2m1fn(group=4,scale=e8m0fnu,rule=floor)", [7.5, -6.9, 7.0, 1.0], [0, 1, 0, 1]),
        ("uint4(group=tensor,rule=percentile(50))", [1.0, 15.0, 20.0, -3.0, 15.4], [1, 1, 0, 0, 1]),
        ("codebook(-1,0,1,group=tensor,rule=percentile(50))", [1.0, -1.0, 1.5, -1.01], [1, 1, 0, 0]),
        ("codebook(-0.5,0,0.5,group=tensor,rule=percentile(50))", [1.0, -1.0, 1.5, -1.01], [1, 1, 0, 0]),
        ("codebook(-0.5,0,0.25,group=tensor,rule=percentile(50))", [1.0, -1.0, 1.5, -1.5], [1, 1, 0, 1]),
        ("uint4(group=tensor,zero_point=integer)", [0.0, 15.0, 3.0], [1, 1, 1]),
    ],
)
def test_clipped_by_kind_of_element(text, x, expected):
    spec = jc.Spec(text, gradient="clipped")
    grad = jax.grad(lambda x: jc.round_to_format(x, spec).sum())(jnp.asarray(x, jnp.float32))
    assert grad.tolist() == expected


def test_clipped_below_a_least_element_above_zero():
    """Numbers below it are beyond the ends; what `sparse` drops, however, gets its cotangent."""
    x = jnp.array([[0.25, 0.5, 1.5, 2.0]])
    kinds = {"": [0, 0, 1, 1], ",scale=e8m0fnu": [0, 0, 1, 1], ",sparse=2:4": [1, 1, 1, 1]}
    kinds |= {",scale=e8m0fnu,sparse=2:4": [1, 1, 1, 1]}

    def total(x):
        return sum(jc.round_to_format(v, f"codebook(1,2,group=4{kind}):gradient=clipped").sum()
                   for v, kind in zip(x, kinds, strict=True))  # fmt: skip

    np.testing.assert_array_equal(jax.jit(jax.grad(total))([x] * len(kinds)), [[row] for row in kinds.values()])


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("gradient", ["int8(channel=0):stochastic", "mxfp4(group=8)"])
def test_cotangents_are_rounded_to_scaled_formats(gradient):
    x, g = jnp.asarray(numbers((4, 16))), jnp.asarray(numbers((4, 16), 1))
    spec = jc.Spec("e4m3fn", gradient=f"[{gradient}]")
    pulled = jax.vjp(lambda x: jc.round_to_format(x, spec, gradient_key=KEY), x)[1](g)[0]
    np.testing.assert_array_equal(pulled, jc.round_to_format(g, gradient, KEY))


# -- percentiles -------------------------------------------------------------------------------------------------------


def test_a_percentile_is_the_least_magnitude_that_so_many_do_not_exceed():
    """Of 8 numbers three quarters are 6, of 7 finite ones 5.25, so 6; of a percentile of zero the largest is taken."""
    x = np.array([[-3, 8, 1, 6, -7, 2, 5, 4], [-3, 8, np.nan, 6, -7, 2, 5, 4], [0, 0, 0, 0, 0, 0, -9, 1]], np.float32)
    scales = jc.quantize(jnp.asarray(x), "int8(group=8,rule=percentile(75))").scale
    np.testing.assert_array_equal(np.ravel(scales), np.array([6, 7, 9], np.float32) / np.float32(127))


# -- sharding ----------------------------------------------------------------------------------------------------------

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


#: Along which axes an array may be sharded without cutting a group; those whose groups are cut reduce, and no more.
ALIGNED = [
    ("mxfp4(group=8)", P("a", "b"), False),
    ("mxfp4(group=8)", P(None, ("a", "b")), False),
    ("int4(group=8,axis=0)", P("b", "a"), False),
    ("uint4(group=8,zero_point=integer)", P("a", "b"), False),
    ("e4m3fn(group=(2,8)):stochastic", P("a", "b"), False),
    ("int8(channel=0)", P("a", None), False),
    ("int8(channel=0)", P("a", "b"), True),
    ("int8(group=tensor)", P("a", "b"), True),
    ("nvfp4", P("a", "b"), True),
]


@pytest.mark.in_turn(12)
@needs_eight
@pytest.mark.parametrize(("text", "layout", "reduces"), ALIGNED)
def test_groups_are_rounded_where_they_are(text, layout, reduces):
    x = jnp.asarray(numbers((32, 128)))
    placed = jax.device_put(x, NamedSharding(mesh(), layout))
    compiled = jax.jit(lambda x: jc.round_to_format(x, text, KEY)).lower(placed).compile()
    program = str(compiled.as_text())
    assert not [word for word in MOVES if word in program]
    assert ("all-reduce" in program) == reduces
    out = compiled(placed)
    assert out.sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_array_equal(out, jc.round_to_format(x, text, KEY))


SHARDED = (
    "mxfp4(group=8)",
    "e4m3fn(group=(2,8))",
    "uint4(group=8,zero_point=integer)",
    "int8(channel=0,rule=percentile(90))",
)


@pytest.mark.in_turn(1000)
@needs_eight
@pytest.mark.parametrize("text", SHARDED)
def test_explicit_sharding_and_shard_map(text):
    x = jnp.asarray(numbers((32, 128)))
    expected = jc.round_to_format(x, text)
    placed = jax.device_put(x, NamedSharding(mesh(AxisType.Explicit), P("a", "b")))
    out = jc.round_to_format(placed, text)
    assert out.sharding.spec == P("a", "b")  # type: ignore[attr-defined]
    np.testing.assert_array_equal(out, expected)
    part = jax.shard_map(lambda x: jc.round_to_format(x, text), mesh=mesh(), in_specs=P("a"), out_specs=P("a"))
    np.testing.assert_array_equal(part(x), expected)


@needs_eight
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", ["mxfp4(group=8):stochastic", "uint4(group=7,zero_point=integer)", "int8(sparse=1:8)"])
def test_explicit_sharding_may_cut_groups(text):
    x, key = jnp.asarray(numbers((32, 24))), KEY if "stochastic" in text else None
    placed = jax.device_put(x, NamedSharding(mesh(AxisType.Explicit), P("a", "b")))
    out = jc.round_to_format(placed, text, key)
    assert out.sharding.spec == P("a", "b")  # type: ignore[attr-defined]
    np.testing.assert_array_equal(out, jc.round_to_format(x, text, key))
    for got, expected in zip(*map(jax.tree.leaves, (jc.quantize(v, text, key) for v in (placed, x))), strict=True):
        np.testing.assert_array_equal(got, expected)


# -- properties --------------------------------------------------------------------------------------------------------

FLOATS = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
ROWS = st.lists(st.lists(FLOATS, min_size=8, max_size=8), min_size=2, max_size=2)
PROPERTIES = ("mxfp4(group=4)", "int8(group=4)", "nf4(group=4)", "uint4(group=4,zero_point=integer)", "bfp8(group=4)")


@functools.cache
def compiled(text: str) -> Any:
    return jax.jit(lambda x: jc.round_to_format(x, text))


def apply(text: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(text)(x.astype(np.float32)))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", PROPERTIES)
@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(-20, 20), st.permutations(range(4)))
def test_properties(text, rows, power, order):
    """Powers of two scale the result, groups keep their order and do not see each other."""
    x = np.array(rows, np.float32)
    rounded = apply(text, x)
    for group, result in zip(x.reshape(-1, 4), rounded.reshape(-1, 4), strict=True):
        assert np.all(np.diff(result[np.argsort(group)]) >= 0)
    shuffled = apply(text, x.reshape(4, 4)[order].reshape(2, 8)).reshape(4, 4)
    np.testing.assert_array_equal(shuffled, rounded.reshape(4, 4)[order])
    x = np.where(np.abs(x) < 2.0**-40, 0, x).astype(np.float32)
    if not np.any(x[:, :4], 1).all() or not np.any(x[:, 4:], 1).all():
        return  # a group of zeros has scale 1
    np.testing.assert_array_equal(apply(text, np.ldexp(x, power)), np.ldexp(apply(text, x), power))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "text", ["mxfp4(group=4)", "mxint8(group=4)", "bfp8(group=4)", "mxfp8_e5m2(group=4,rule=ceil)"]
)
@settings(deadline=None, max_examples=60)
@given(ROWS)
def test_powers_of_two_as_scales_are_idempotent(text, rows):
    """Rounded once more under the scale that the result asks for, a power of two at most as large, nothing moves."""
    rounded = apply(text, np.array(rows, np.float32))
    np.testing.assert_array_equal(apply(text, rounded), rounded)


@settings(deadline=None, max_examples=40)
@given(ROWS)
def test_an_absmax_scale_is_kept_by_the_result(rows):
    """int8 absmax: the largest element is 127, whose product with the scale is the largest number of the result."""
    x = np.array(rows, np.float32)
    once = apply("int8(group=4)", x)
    twice = apply("int8(group=4)", once)
    np.testing.assert_allclose(twice, once, rtol=2.0**-22)


@pytest.mark.parametrize("kind", ["integer", "float"])
@pytest.mark.in_turn(1000)
def test_odd_leaves_whole_numbers(kind: str) -> None:
    """Even ones too: only what lies between two whole numbers goes to the odd one."""
    x = np.arange(16, dtype=np.float32)
    spec = jc.Spec(f"uint4(group=16,zero_point={kind}):odd")
    np.testing.assert_array_equal(jc.round_to_format(x, spec), x)
    x[3:5] = 2.25, 4.75
    np.testing.assert_array_equal(jc.round_to_format(x, spec)[3:5], [3.0, 5.0])


def test_nvfp4_under_scales_without_a_scale_of_the_tensor() -> None:
    """Against the definition in exact fractions: the scale is a / 6 in ue5m3, then each number over it in e2m1."""
    x = np.random.default_rng(9).standard_normal((6, 16)).astype(np.float32)
    x *= (2.0 ** np.arange(-18, 18, 6))[:, None].astype(np.float32)
    scales, elements = oracle.FloatSet(5, 3, 15, inf=False, nan="top", signed=False), oracle.fn(2, 1, "none")
    for row, got in zip(x, jc.round_to_format(x, "nvfp4_e5m3"), strict=True):
        scale = oracle.round_exact(scales, Fraction(float(abs(row).max())) / 6, "nearest_even", "saturate")
        assert isinstance(scale, Fraction)
        scale = max(scale, scales.value(1))
        for value, result in zip(row, got, strict=True):
            element = oracle.round_exact(elements, Fraction(float(value)) / scale, "nearest_even", "saturate")
            number = element if isinstance(element, Fraction) else Fraction(0)  # -0
            assert Fraction(float(result)) == number * scale
    assert jc.formats.nvfp4_e5m3.bits_per_element() == 4.5 and jc.formats.nvfp4_e5m3.scale_format.max == 114688.0
