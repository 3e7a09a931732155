"""Floats times packed weights: every layout of the codes, panels that do not divide the sum, and no copy as floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._quantized.products.code_products import (
    _fits_dequantize_kernel,
    _multiply_by_kernel,
    multiply_packed_weights,
    suits_panels,
)
from jchop._quantized.products.codes import encode_operand, expand_codes, multiply_codes
from jchop._spec.spec import as_spec

further = Further()

INTEGERS = [
    "uint8(group=16,zero_point=integer",
    "uint4(group=16,zero_point=integer",
    "uint2(group=all,zero_point=integer",
]
#: With a bit of every kind of element: bytes, several in a byte, several bytes for some, zero points, two scales.
FORMATS = [
    "int8(group=all", "int4(group=16", "uint8(group=all,zero_point=integer", "uint2(group=16,zero_point=integer",
    "nvfp4(", "e4m3fn(group=all", "int6(group=8", "nf4(group=16", "dynamic8(group=16",
]  # fmt: skip


#: Each format along one of the two axes, in turn; of several numbers in a byte along both.
PANELS = [*((at % 2, text) for at, text in enumerate(FORMATS)), (0, FORMATS[1]), (1, FORMATS[0])]


@pytest.mark.in_turn(11)
@pytest.mark.parametrize(("axis", "text"), PANELS)
def test_sums_of_panels(axis: int, text: str) -> None:
    """Small integers as floats, whose sums are exact before the scales: 272 numbers, two panels and a rest."""
    shape = (272, 12) if axis == 0 else (12, 272)
    stored = jc.quantize(jax.random.normal(jax.random.key(0), shape), f"{text},axis={axis})".replace("(,", "("))
    x = jax.random.randint(jax.random.key(1), (3, 272), -4, 5).astype(jnp.float32)
    letters = "bk,kn->bn" if axis == 0 else "bk,nk->bn"
    got = jax.jit(lambda x, w: jc.einsum(letters, x, w))(x, stored)
    want = np.einsum(letters, np.asarray(x, np.float64), np.asarray(jc.dequantize(stored), np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("text", ["int4(group=128", "int2(group=all", "uint8(group=64"])
def test_one_row_has_one_sum_however_its_matrix_is_stored(text: str) -> None:
    """In the bytes of the codes, or as elements of a byte each: sums of eight products."""
    stored = jc.quantize(jax.random.normal(jax.random.key(0), (400, 12)), f"{text},axis=0)")
    x = jax.random.normal(jax.random.key(1), (1, 400))
    parts = expand_codes(stored).map_arrays(jnp.transpose)
    block = text.rpartition("=")[2]
    apart = replace(parts, block=None if block == "all" else int(block))
    run = jax.jit(lambda x, w: multiply_packed_weights(encode_operand(x, None), w, True, jnp.float32))
    got = run(x, replace(apart, qarray=stored, shift=expand_codes(stored).shift))
    np.testing.assert_array_equal(got, run(x, apart))
    want = np.asarray(x, np.float64) @ np.asarray(jc.dequantize(stored), np.float64)
    np.testing.assert_allclose(got, want, atol=2e-5)


@further.first
@pytest.mark.parametrize(
    ("axis", "text", "rows"),
    [
        (0, "mxfp8_e4m3(", 3),
        (1, "mxfp8_e4m3(", 3),
        (1, "mxfp4(", 3),
        (0, "mxfp4(", 260),
        (1, "float8_e5m2(group=48,scale=float8_e8m0fnu,", 3),
    ],
)
def short_blocks_share_a_panel(axis: int, text: str, rows: int) -> None:
    """Small whole numbers times powers of two, whose sums are exact: 336 of them, panels and a rest."""
    rng = np.random.default_rng(0)
    w = rng.integers(-3, 4, (336, 12)) * 2.0 ** np.repeat(rng.integers(-3, 4, (21, 12)), 16, 0)
    stored = jc.quantize(jnp.asarray(w if axis == 0 else w.T, jnp.float32), f"{text}axis={axis})")
    x = rng.integers(-8, 9, (rows, 336)).astype(np.float32)
    letters = "bk,kn->bn" if axis == 0 else "bk,nk->bn"
    want = np.einsum(letters, x, np.asarray(jc.dequantize(stored), np.float64))
    np.testing.assert_array_equal(jax.jit(lambda x, w: jc.einsum(letters, x, w))(x, stored), want)


def test_codes_of_one_byte_along_the_sum() -> None:
    """Whole numbers, which are their own codes under scales of one."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-7, 8, shape).astype(np.float32) for shape in ((3, 32), (5, 32)))
    w[:, ::16] = 7
    got = jc.einsum("bk,nk->bn", x, jc.quantize(jnp.asarray(w), "int4(group=16)"))
    np.testing.assert_array_equal(got, x @ w.T)


LEFT = [
    "int8(group=all)",
    "uint8(group=all,zero_point=integer)",
    "int8(group=16)",
    "uint8(group=16,zero_point=integer)",
]


RIGHT = [*FORMATS[1::-1], *INTEGERS, *FORMATS[2:4]]
#: Each format of weights along both axes, with rows under one scale and with rows in groups, with zero points or not.
INTEGER_PANELS = [
    (axis, LEFT[2 * ((at + axis) % 2) + (at // 2 + axis) % 2], text) for axis in (0, 1) for at, text in enumerate(RIGHT)
]


@pytest.mark.in_turn(14)
@pytest.mark.parametrize(("axis", "left", "text"), INTEGER_PANELS)
def test_integers_by_panels(axis: int, left: str, text: str) -> None:
    """The numbers of the plain product of codes, bit for bit, whose sums are checked in fractions elsewhere."""
    shape = (272, 12) if axis == 0 else (12, 272)
    stored = jc.quantize(jax.random.normal(jax.random.key(0), shape), f"{text},axis={axis})")
    x = jc.quantize(jax.random.normal(jax.random.key(1), (3, 272)), left)

    @jax.jit
    def both(x: jc.QArray, w: jc.QArray) -> tuple[jax.Array, jax.Array]:
        rows, parts = (expand_codes(v).map_arrays(lambda u: u[None]) for v in (x, w))
        rows = replace(rows, block=None if "all" in left else 16)
        turned = parts.map_arrays(lambda u: u.swapaxes(1, 2)) if axis == 0 else parts
        plain = multiply_codes(rows, replace(turned, block=None if "all" in text else 16), jnp.float32)[0]
        return jc.einsum("bk,kn->bn" if axis == 0 else "bk,nk->bn", x, w), plain

    np.testing.assert_array_equal(*both(x, stored))


@further
def which_integers_are_multiplied_by_panels() -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 64), (64, 8)))

    def chosen(left: str, right: str, stored: bool = True) -> bool:
        found = []

        def choose(x: Any, w: Any) -> None:
            rows, parts = encode_operand(x, as_spec(left, "", scaled=True)), expand_codes(jc.quantize(w, right))
            block, parts = None if "all" in right else 16, parts if stored else replace(parts, qarray=None)
            found.append(
                suits_panels(rows, replace(parts.map_arrays(jnp.transpose), block=block, qarray=parts.qarray), True)
            )

        jax.eval_shape(choose, x, w)
        return found[0]

    row, groups = "int8(group=all)", "int4(group=16,axis=0)"
    assert chosen(row, groups) and chosen(row, "int4(group=all,axis=0)") and chosen(row, "int8(group=16,axis=0)")
    assert chosen("int8(group=16)", groups) and chosen("int8(group=16)", "int8(group=all,axis=0)")
    assert not chosen(row, "int8(group=all,axis=0)") and not chosen("int8(group=32)", groups)
    assert not chosen(row, groups, stored=False) and not chosen("e4m3fn(group=all)", groups)


FITTING = [
    "int4(group=16,axis=0)",
    "mxfp8_e4m3(axis=0)",
    "int8(group=all,axis=0)",
    "nvfp4(axis=0)",
    "nf4(group=16,axis=0)",
    "int4(group=16,axis=0,scale=bfloat16)",
]


@further
@pytest.mark.parametrize("texts", [FITTING[:2], pytest.param(FITTING[2:], marks=pytest.mark.slow)], ids=len)
def the_kernel_takes_stored_codes(texts: list[str]) -> None:
    """As other devices multiply them, from the same bytes."""
    x = jax.random.normal(jax.random.key(1), (3, 64))
    for text in texts:
        stored = jc.quantize(jax.random.normal(jax.random.key(0), (64, 12)), text)
        block = None if "all" in text else 32 if "mx" in text else 16
        w = expand_codes(stored)
        laid = replace(w.map_arrays(jnp.transpose), block=block, qarray=stored, shift=w.shift)
        assert _fits_dequantize_kernel(x, laid, jnp.float32)
        np.testing.assert_allclose(
            _multiply_by_kernel(x, laid, jnp.float32), x @ jc.dequantize(stored), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "text",
    [
        "int4(group=128,axis=0)",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("int8(group=all,axis=0)", "nf4(group=128,axis=0)", "mxfp8_e4m3(axis=0)")
        ),
    ],
)
def test_weights_are_never_written_as_floats(text: str) -> None:
    w = jax.eval_shape(lambda v: jc.quantize(v, text), jax.ShapeDtypeStruct((4096, 1024), jnp.float32))
    x = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    for of in (lambda x: x, lambda x: jc.quantize(x, "int8(group=all)"))[: 2 if "int" in text else 1]:
        compiled = jax.jit(lambda x, w, of=of: jc.dot(of(x), w)).lower(x, w).compile()
        sizes = compiled.memory_analysis()
        most = 0.1 if "mx" in text else 0.05  # with the scales as floats
        assert sizes is not None and sizes.temp_size_in_bytes <= most * 4096 * 1024 * 4


OPERANDS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda w, x: x @ w, (160, 6)),
    (lambda w, x: x @ w.T, (6, 160)),
    (lambda w, x: jnp.einsum("bk,khd->bhd", x, w), (160, 3, 2)),
]


@further
@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("int4(group=32)", OPERANDS[:2]),
        pytest.param("int4(group=32)", OPERANDS[2:], marks=pytest.mark.slow),
        pytest.param("nf4(group=32)", OPERANDS, marks=pytest.mark.slow),
    ],
    ids=["int4", "int4, two axes", "nf4"],
)
def training_and_packed_weights_alone_are_equal(text: str, operands: Any) -> None:
    """In both layouts, and with two axes that are kept."""
    x = jax.random.normal(jax.random.key(1), (3, 160))
    for fun, shape in operands:
        w = jax.random.normal(jax.random.key(0), shape)
        low = jc.quantize_fn(fun, jc.Rule(weight=text, product="codes"))
        packed = low.pack(w, x)
        np.testing.assert_array_equal(jax.jit(low)(packed, x), jax.jit(low)(w, x), str(shape))


test_further = further.test()
