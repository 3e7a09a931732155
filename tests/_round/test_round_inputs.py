"""What round_to_format takes, what it gives back, and what it refuses, each refusal in words that help."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each_case import each
from further import Further

import jchop as jc

further = Further()

KEY = jax.random.key(0)
#: Values and what e4m3 makes of them: ties to even, an overflow, a subnormal.
VALUES, ROUNDED = [0.3, -1.0625, 1000.0, 0.0029, -0.0], [0.3125, -1.0, np.inf, 2.0**-9, -0.0]


class Duck:
    """Not an array, but says how to become one."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.values, dtype)


def check(out: Any, expected: Any, dtype: Any) -> None:
    """A NumPy array of this dtype, its own memory, with these bits."""
    expected = np.asarray(expected, dtype)
    assert out.dtype == expected.dtype and out.dtype.isnative and out.shape == expected.shape
    assert np.asarray(out).tobytes() == expected.tobytes()


# --- kinds of input -----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: VALUES,
    "tuple": lambda: tuple(VALUES),
    "list of numpy scalars": lambda: [np.float64(v) for v in VALUES],
    "memoryview": lambda: memoryview(np.array(VALUES).data),
    "memoryview of bytes": lambda: memoryview(np.array(VALUES).tobytes()).cast("d"),
    "bytearray, cast": lambda: memoryview(bytearray(np.array(VALUES).tobytes())).cast("d"),
    "array.array": lambda: array.array("d", VALUES),
    "frombuffer of bytes": lambda: np.frombuffer(np.array(VALUES).tobytes()),
    "__array__": lambda: Duck(VALUES),
    "float64": lambda: np.array(VALUES),
    "reversed": lambda: np.array(VALUES[::-1])[::-1],
    "strided": lambda: np.repeat(np.array(VALUES), 3)[::3],
    "column": lambda: np.stack([np.array(VALUES)] * 2, axis=1)[:, 1],
    "broadcast": lambda: np.broadcast_to(np.array(VALUES), (2, 5))[0],
    "big-endian": lambda: np.array(VALUES, ">f8"),
}


@each("kind", KINDS)
def test_float64_in_many_guises(kind):
    x = KINDS[kind]()
    before = np.asarray(x).copy()
    out = jc.round_to_format(x, "e4m3")
    assert type(out) is np.ndarray
    check(out, ROUNDED, np.float64)
    assert out.flags.writeable and not np.shares_memory(out, np.asarray(x))
    out[:] = 7
    assert np.asarray(x).tobytes() == before.tobytes()


@each("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@each("shape", [(5,), (5, 1), (0,), (2, 0)])
def test_dtypes_and_shapes(shape, dtype):
    values, expected = (np.array(v, dtype)[: int(np.prod(shape))].reshape(shape) for v in (VALUES, ROUNDED))
    check(jc.round_to_format(values, "e4m3"), expected, dtype)
    if dtype is not np.float64:
        out = jc.round_to_format(jnp.asarray(values), "e4m3")
        assert isinstance(out, jax.Array)
        check(out, expected, dtype)


@each(
    ("scalar", "kind"),
    [
        (0.3, np.float64),
        (np.float64(0.3), np.float64),
        (np.float32(0.3), np.float32),
        (np.float16(0.3), np.float16),
        (ml_dtypes.bfloat16(0.3), ml_dtypes.bfloat16),
        (0.3 - 1.0625j, np.complex128),
        (np.complex64(0.3 - 1.0625j), np.complex64),
    ],
)
def test_scalars(scalar, kind):
    out = jc.round_to_format(scalar, "e4m3")
    assert type(out) is kind
    assert out == (0.3125 - 1j if isinstance(scalar, complex | np.complexfloating) else 0.3125)


def test_zero_dimensional_arrays_stay_arrays():
    out = jc.round_to_format(np.array(0.3), "e4m3")
    assert type(out) is np.ndarray and out.shape == () and out == 0.3125 and out.flags.writeable
    out = jc.round_to_format(jnp.array(0.3), "e4m3")
    assert isinstance(out, jax.Array) and out.shape == () and out == 0.3125


def test_nested_and_empty_lists():
    check(jc.round_to_format([[0.3, 0.3], [1000.0, -1.0625]], "e4m3"), [[0.3125, 0.3125], [np.inf, -1]], np.float64)
    check(jc.round_to_format([], "e4m3"), [], np.float64)
    check(jc.round_to_format([[]], "e4m3"), [[]], np.float64)


@pytest.mark.smoke
def test_float64_is_rounded_from_float64():
    """Through float32 these would become a tie, and the other neighbour."""
    x = np.array([1.0625 + 2.0**-40, 1.0625 - 2.0**-40, 1e300, 2.0**-1074])
    for flag in (False, True):
        with jax.enable_x64(flag):
            check(jc.round_to_format(x, "e4m3"), [1.125, 1.0, np.inf, 0], np.float64)
            check(jc.round_to_format(x, "e4m3:up"), [1.125, 1.125, np.inf, 2.0**-9], np.float64)
            check(jc.round_to_format(x, "binary64"), x, np.float64)
            expected = [1.0625, 1.0625 - 2.0**-23, jc.formats.binary32.max, 0]
            check(jc.round_to_format(list(x), "binary32:toward_zero"), expected, np.float64)


@each("text", ["e4m3", "e4m3:stochastic"])
@each("order", ["C", "F", "transposed", "strided", "reversed", "read-only"])
def test_the_layout_in_memory_changes_nothing(order, text):
    """The flat index of an element counts in C order, whatever lies where."""
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    laid = {
        "C": x,
        "F": np.asfortranarray(x),
        "transposed": np.ascontiguousarray(x.T).T,
        "strided": np.repeat(x, 2, axis=1)[:, ::2],
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
        "read-only": x.copy(),
    }[order]
    if order == "read-only":
        laid.flags.writeable = False
    out = jc.round_to_format(laid, text, KEY)
    check(out, jc.round_to_format(jnp.asarray(x), text, KEY), np.float32)
    assert out.flags.writeable and not np.shares_memory(out, laid)


def test_complex_numbers_are_rounded_by_parts():
    z = np.array([0.3 - 1.0625j, complex(1000, -0.0), complex(np.nan, 0.3)], np.complex64)
    check(jc.round_to_format(z, "e4m3"), [0.3125 - 1j, complex(np.inf, -0.0), complex(np.nan, 0.3125)], np.complex64)
    out = jc.round_to_format(jnp.asarray(z[:1]), "e4m3")
    assert isinstance(out, jax.Array) and out.dtype == jnp.complex64 and out[0] == 0.3125 - 1j
    check(jc.round_to_format([0.3 - 1.0625j], "e4m3"), [0.3125 - 1j], np.complex128)
    equal = jc.round_to_format(np.full(200, 0.3 + 0.3j, np.complex64), "e4m3:stochastic", KEY)
    assert (equal.real != equal.imag).any()  # the parts draw independently


def test_jax_arrays_are_not_changed():
    x = jnp.asarray(VALUES)
    out = jc.round_to_format(x, "e4m3")
    assert isinstance(out, jax.Array) and not x.is_deleted()
    check(x, VALUES, np.float32)


# --- what is refused ----------------------------------------------------------------------------------------------

X = np.array([1.1, 2.2, 3.3], np.float32)
F16, F32 = np.float16, np.float32
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], list[str]]] = {
    "stochastic without key": (
        lambda x: jc.round_to_format(x, "e5m2:stochastic"),
        ValueError,
        ["key=None", "e5m2:stochastic", "key=jax.random.key(0)"],
    ),
    "by halves without key": (
        lambda x: jc.round_to_format(x, "e5m2:stochastic_equal"),
        ValueError,
        ["key=None", "stochastic_equal", "key=jax.random.key(0)"],
    ),
    "stochastic cotangent without key": (
        lambda x: jc.round_to_format(x, "e5m2:gradient=[e4m3:sr]"),
        ValueError,
        ["gradient_key=None", "cotangents", "gradient_key=jax.random.key(0)"],
    ),
    "key for the wrong end": (
        lambda x: jc.round_to_format(x, "e5m2:gradient=[e4m3:sr]", KEY),
        ValueError,
        ["gradient_key=None", "gradient_key=jax.random.key(0)"],
    ),
    "raw key": (
        lambda x: jc.round_to_format(x, "e5m2:sr", jnp.zeros(2, jnp.uint32)),
        TypeError,
        ["key=", "uint32", "typed key", "jax.random.key(0)", "wrap_key_data"],
    ),
    "seed": (
        lambda x: jc.round_to_format(x, "e5m2:sr", 0),  # type: ignore[arg-type]
        TypeError,
        ["key=0", "typed key", "jax.random.key(0)"],
    ),
    "raw gradient key": (
        lambda x: jc.round_to_format(x, "e5m2:gradient=[e4m3:sr]", gradient_key=np.zeros(2, np.uint32)),  # type: ignore[arg-type]
        TypeError,
        ["gradient_key=", "uint32", "typed key", "jax.random.key(0)"],
    ),
    "batched key": (
        lambda x: jc.round_to_format(x, "e5m2:sr", jax.random.split(KEY, 3)),
        ValueError,
        ["key", "(3,)", "jax.vmap"],
    ),
    "unknown format": (lambda x: jc.round_to_format(x, "bloat16"), ValueError, ["'bloat16'", "not known", "bfloat16"]),
    "unknown mode": (
        lambda x: jc.round_to_format(x, "e5m2:stochstic"),
        ValueError,
        ["'stochstic'", "not known", "stochastic"],
    ),
    "no spec": (
        lambda x: jc.round_to_format(x, None),  # type: ignore[arg-type]
        TypeError,
        ["spec=None", "Spec", "format", "text"],
    ),
    "range of bfloat16 in float16": (
        lambda x: jc.round_to_format(x.astype(F16), "bfloat16"),
        ValueError,
        ["x has dtype float16", "spec='bfloat16'", "cast x to float32 or float64 first"],  # a cast to bfloat16 rounds
    ),
    "ragged lists": (
        lambda x: jc.round_to_format([[1.1], [2.2, 3.0]], "e5m2"),
        ValueError,
        ["x is no array", "lists have different lengths"],
    ),
    "range of binary64 in float32": (
        lambda x: jc.round_to_format(x, "binary64:saturate"),
        ValueError,
        ["x has dtype float32", "binary64", "cast x to float64 first; JAX arrays are float64 only with jax_enable_x64"],
    ),
    "precision of fixed point in float16": (
        lambda x: jc.round_to_format(x.astype(F16), "fixed8.8"),
        ValueError,
        ["x has dtype float16", "fixed8.8", "float32"],
    ),
    "levels in float16": (
        lambda x: jc.round_to_format(x.astype(F16), "codebook(0,0.1)"),
        ValueError,
        ["x has dtype float16", "codebook", "cast x to float64"],
    ),
    "a format for no carrier": (
        lambda x: jc.round_to_format(x, "integer64"),
        ValueError,
        ["x has dtype float32", "integer64", "no carrier"],
    ),
    "range of the cotangent's format": (
        lambda x: jc.round_to_format(x.astype(F16), "e4m3:gradient=[bfloat16:saturate]"),
        ValueError,
        ["float16", "bfloat16", "float32"],
    ),
    "64 bits in float32": (
        lambda x: jc.round_to_format(x, "e5m2:sr:random_bits=64", KEY),
        ValueError,
        ["float32", "random_bits=64", "32"],
    ),
    "offset in quarters": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=1.5),
        TypeError,
        ["offset=1.5", "integer"],
    ),
    "offset below zero": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=-1),
        ValueError,
        ["offset=-1", "integer from 0"],
    ),
    "offset too large": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=1 << 64),
        ValueError,
        ["offset=18446744073709551616", "integer from 0 to 18446744073709551615"],
    ),
    "offset whose last index is too large": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=(1 << 64) - 2),
        ValueError,
        ["offset=18446744073709551614", "index 18446744073709551616", "end at index 18446744073709551615"],
    ),
    "offset of complex numbers, which draw twice": (
        lambda x: jc.round_to_format(x + 1j, "e5m2:sr", KEY, offset=(1 << 63) - 2),
        ValueError,
        ["offset=9223372036854775806", "end at index 9223372036854775807"],
    ),
    "offset of words beyond the last": (
        lambda x: jc.random_bits(KEY, (3,), offset=(1 << 64) - 1),
        ValueError,
        ["offset=18446744073709551615", "index 18446744073709551617"],
    ),
    "offset of codes beyond the last": (
        lambda x: jc.quantize(x, "e5m2:sr", KEY, offset=(1 << 64) - 1),
        ValueError,
        ["offset=18446744073709551615", "index 18446744073709551617"],
    ),
    "whole of too many elements": (
        lambda x: jc.random_bits(KEY, (1, 1, 1), offset=((0, 0, 0), (1 << 32, 1 << 32, 2))),
        ValueError,
        ["offset=((0, 0, 0)", "end at index 18446744073709551615"],
    ),
    "offset as text": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset="0"),
        TypeError,
        ["offset='0'", "integer"],
    ),
    "offset absent": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=None),
        TypeError,
        ["offset=None", "integer"],
    ),
    "several offsets": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=jnp.arange(3)),
        TypeError,
        ["offset", "(3,)", "integer scalar"],
    ),
    "offset of the wrong dtype": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=jnp.float32(3)),
        TypeError,
        ["offset", "float32", "integer scalar"],
    ),
    "starts without a shape": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=((0,),)),
        ValueError,
        ["offset=((0,),)", "(starts, shape)"],
    ),
    "two numbers": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=(0, 4)),
        (ValueError, TypeError),  # type: ignore[dict-item]
        ["offset=(0, 4)", "(starts, shape)"],
    ),
    "tile of another rank": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=((0, 0), (8, 8))),
        ValueError,
        ["offset=((0, 0), (8, 8))", "(starts, shape)", "1"],
    ),
    "tile larger than the whole": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=((0,), (2,))),
        ValueError,
        ["offset=((0,), (2,))", "(3,)"],
    ),
    "tile that sticks out": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=((2,), (4,))),
        ValueError,
        ["offset=((2,), (4,))", "(3,)"],
    ),
    "start in quarters": (
        lambda x: jc.round_to_format(x, "e5m2:sr", KEY, offset=((0.5,), (8,))),
        TypeError,
        ["offset=0.5", "integer"],
    ),
}


@further
@pytest.mark.parametrize("kind", ["numpy", "jax", "jit", "vmap", "grad"])
@each("name", CALLS)
def refusals_name_argument_value_and_remedy(name, kind):
    """The same words whether the call runs at once or is being traced."""
    call, error, words = CALLS[name]
    with pytest.raises(error) as caught:
        if kind == "numpy":
            call(X)
        elif kind == "jax":
            call(jnp.asarray(X))
        elif kind == "jit":
            jax.jit(call)(jnp.asarray(X))
        elif kind == "vmap":
            jax.vmap(call)(jnp.asarray(X)[None])
        else:
            jax.grad(lambda x: call(x).sum())(jnp.asarray(X))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} is not said: {caught.value}"


@each(
    ("x", "word"),
    [
        (np.int64(3), "int64"),
        (np.array([1, 2]), "int64"),
        (True, "bool"),
        (np.arange(3, dtype=np.uint8), "uint8"),
        (np.zeros(2, bool), "bool"),
        (jnp.arange(3), "int32"),
        (jnp.zeros(2, bool), "bool"),
        (jnp.ones(2, jnp.float8_e4m3fn), "float8_e4m3fn"),
        (np.ones(2, ml_dtypes.float8_e5m2), "float8_e5m2"),
        (jnp.ones(2, jnp.float4_e2m1fn), "float4_e2m1fn"),
        (np.ones(2, ml_dtypes.int4), "int4"),
        (np.ones(2, object), "object"),
        (None, "object"),
        ("0.3", "<U3"),
        (b"abcdefgh", "|S8"),
        (bytearray(8), "uint8"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.zeros(2, [("a", "f4")]), "[('a', '<f4')]"),
    ],
)
def test_other_dtypes_are_refused(x, word):
    with pytest.raises(TypeError) as caught:
        jc.round_to_format(x, "e5m2")
    advice = (
        "astype" if word.lstrip("u").startswith(("int", "bool", "float")) else "Pass a number or an array of floats"
    )
    for part in ("x has dtype", word, "float16, bfloat16, float32, float64", advice):
        assert part in str(caught.value), caught.value


def test_integers_are_refused_under_jit():
    with pytest.raises(TypeError, match=r"x has dtype int32.*float32.*astype"):
        jax.jit(lambda x: jc.round_to_format(x, "e5m2"))(jnp.arange(3))


@further.first
def extended_precision_is_refused():
    if np.dtype(np.longdouble) == np.dtype(np.float64):
        pytest.skip("long double is float64 here")
    with pytest.raises(TypeError, match=r"x has dtype float\d+, which is not a carrier.*astype"):
        jc.round_to_format(np.ones(2, np.longdouble), "e5m2")


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match="inhomogeneous"):
        jc.round_to_format([[1.0], [1.0, 2.0]], "e5m2")


@each("name", ["key", "gradient_key", "offset"])
def test_traced_arguments_beside_numpy_values(name):
    """The result of NumPy input is NumPy, which nothing traced can give."""
    spec = "e5m2:sr:gradient=[e5m2:sr]"
    keys: dict[str, Any] = {"key": KEY, "gradient_key": KEY}
    call = lambda value: jc.round_to_format(X, spec, **(keys | {name: value}))  # noqa: E731
    with pytest.raises(TypeError) as caught:
        jax.jit(call)(3 if name == "offset" else KEY)
    for part in (name, "traced", "NumPy", "jax.numpy.asarray(x)"):
        assert part in str(caught.value), caught.value


def test_float64_tracers_need_the_flag_no_more_than_numpy():
    """Under the flag, float64 goes through jit; without it, NumPy does."""
    with jax.enable_x64(True):
        out = jax.jit(lambda x: jc.round_to_format(x, "e4m3"))(jnp.asarray(VALUES, jnp.float64))
        check(out, ROUNDED, np.float64)


@each("key", [None, KEY])
def test_deterministic_modes_take_a_key_or_none(key):
    check(jc.round_to_format(np.array(VALUES), "e4m3", key, gradient_key=key), ROUNDED, np.float64)


test_further = further.test()
