"""Scaled formats beside what others publish: torchao's codes, dynamic maps, microxcaling's vectors."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import cases
import jax
import ml_dtypes
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._core.rounding.codes import unpack_codes
from jchop._kernels.scaled import dequantize_scaled, quantize_scaled
from jchop._spec.spec import Spec, as_spec
from jchop.formats import CodebookFormat

further = Further()


@functools.cache
def compiled(text: str) -> Any:
    return jax.jit(lambda x: jc.round_to_format(x, text))


# -- published figures -------------------------------------------------------------------------------------------------


@functools.cache
def weights() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((512, 1024)) * 0.02).astype(np.float32)


def decibels(x: np.ndarray, rounded: np.ndarray) -> float:
    return 20 * float(np.log10(np.linalg.norm(x) / np.linalg.norm(x - rounded)))


#: The levels of NF4 as torchao has them.
FOUR_DIGITS = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
    0.723, 1.0,
)  # fmt: skip
TORCHAO_NF4 = f"codebook({','.join(repr(float(np.float32(level))) for level in FOUR_DIGITS)},group=64)"

#: Formats and torchao's signal-to-noise ratios of `weights()` in dB.
TORCHAO = [
    ("int8(channel=0,rule=half_range)", 42.09),
    ("int8(group=tensor,rule=half_range)", 39.41),
    ("int4(group=32,zero_point=integer)", 21.86),
    ("int4(group=32,rule=no_clip)", 20.73),
    ("int2(group=32,rule=half_range)", 6.52),
    ("e4m3fn(channel=0)", 31.55),
    ("e3m2fn(channel=0)", 25.59),
    ("e2m3fn(channel=0)", 31.06),
    ("mxfp8_e4m3(rule=rceil)", 31.53),
    ("mxfp4(rule=ceil)", 17.26),
    ("nvfp4", 20.43),
    (TORCHAO_NF4, 20.73),
]


def codes_of(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The codes of `weights()`, integers as such, and the numbers that they stand for."""
    spec = as_spec(text, scaled=True)
    bits = spec.element.bits

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scale, zero = quantize_scaled(x, spec=spec)
        back = dequantize_scaled(codes, scale, zero, spec=spec, shape=x.shape, dtype="float32")
        return unpack_codes(codes, bits, x.shape[-1]), back

    codes, back = map(np.asarray, run(weights()))
    if text.startswith("int"):
        codes = (codes.astype(np.int8) << 8 - bits).astype(np.int8) >> 8 - bits
    return codes, back


def digest(codes: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(codes).tobytes()).hexdigest()[:12]


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(("text", "ratio"), TORCHAO)
def test_signal_to_noise_of_torchao(text, ratio):
    assert decibels(weights(), codes_of(text)[1]) == pytest.approx(ratio, abs=0.005)


def codes_of_torchao():
    """Digests of its codes, where it rounds the quotient itself, or no rounded one crosses a tie."""
    assert digest(codes_of("int8(group=tensor,rule=half_range)")[0]) == "fd6cb85665fd"
    assert digest(codes_of("int4(group=32,zero_point=integer)")[0]) == "f05b0cd0f009"
    nf4 = codes_of(TORCHAO_NF4)[0]
    assert digest(nf4[:, ::2] << 4 | nf4[:, 1::2]) == "9439be8080e3"


def where_torchao_differs():
    """Its quotients are rounded to binary32 first, those of int8 rows products with a rounded reciprocal.

    Its codes are reproduced by its formulas, and ours differ only where the exact quotient is within that error of a
    tie.
    """
    x = weights()
    largest = np.abs(x).max(1, keepdims=True)
    scale = largest / np.float32(127.5)
    theirs = np.clip(np.rint(x * (np.float32(1) / scale)), -128, 127).astype(np.int8)
    assert digest(theirs) == "399c56139f09"
    differs = theirs != codes_of("int8(channel=0,rule=half_range)")[0]
    assert differs.sum() == 62
    quotient = x.astype(np.float64) / scale
    assert np.all(np.abs(np.abs(quotient - np.floor(quotient)) - 0.5)[differs] < 2.0**-22 * 128)
    for text, kind, published in (
        ("e4m3fn(channel=0)", ml_dtypes.float8_e4m3fn, "5d3f21eb3de4"),
        ("e3m2fn(channel=0)", ml_dtypes.float6_e3m2fn, "0b6e27810e3e"),
    ):
        most = np.float32(ml_dtypes.finfo(kind).max)
        theirs = np.clip(x / (largest / most), -most, most).astype(kind).view(np.uint8)
        assert digest(theirs) == published
        assert np.sum(theirs != codes_of(text)[0]) == 1


def double_quantized_nf4_is_nearly_nf4():
    x = weights().reshape(-1)[: 1 << 16]
    plain, twice = (np.asarray(compiled(text)(x)) for text in ("nf4", "nf4(scale=uint8(group=256))"))
    assert decibels(x, twice) == pytest.approx(decibels(x, plain), abs=0.05)
    assert jc.formats.nf4(scale=jc.formats.int8(group=256)).bits_per_element() == pytest.approx(4.127, abs=0.001)


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "check",
    [double_quantized_nf4_is_nearly_nf4, codes_of_torchao, where_torchao_differs],
    ids=lambda check: check.__name__,
)
def test_figures_of_others(check: Callable[[], None]) -> None:
    check()


@further.first
def dynamic_map():
    """The table of 8-bit optimizers: a signed decade has 2^i means of 0.1 to 1, spaced equally; 0 and 1 beside them."""
    fmt = jc.formats.dynamic8.element
    assert isinstance(fmt, CodebookFormat)
    levels = np.array(fmt.levels)
    assert len(levels) == 256 and levels[-1] == 1 and levels[127] == 0
    np.testing.assert_array_equal(levels.astype(np.float32), levels)
    positive = levels[128:-1]
    np.testing.assert_array_equal(levels[:127], -positive[::-1])
    for i in range(7):
        decade = positive[2**i - 1 : 2 ** (i + 1) - 1] * 10.0 ** (6 - i)
        bounds = np.linspace(0.1, 1, 2**i + 1)
        np.testing.assert_allclose(decade, (bounds[1:] + bounds[:-1]) / 2, rtol=2e-7)
    x = np.random.default_rng(1).standard_normal(1 << 14).astype(np.float32)
    assert decibels(x, np.asarray(compiled("dynamic8")(x))) == pytest.approx(39.27, abs=0.1)


# -- conformance -------------------------------------------------------------------------------------------------------

DATA = pathlib.Path(__file__).parents[1] / "data"
CONFORMANCE = [case for case in json.loads((DATA / "exact_cases.json").read_text()) if "mx" in case["spec"]]
ELEMENTS = {
    "e4m3fn": jc.formats.mxfp8_e4m3,
    "e5m2": jc.formats.mxfp8_e5m2,
    "e3m2fn": jc.formats.mxfp6_e3m2,
    "e2m3fn": jc.formats.mxfp6_e2m3,
    "e2m1fn": jc.formats.mxfp4,
    "int8": jc.formats.mxint8,
}
#: A scale of five bits stands for exponents -15 to 15; a block that needs a larger one is NaN as a whole.
FIVE_BITS = jc.formats.FloatFormat(5, 0, infinities=False, nans="top", signed=False, zero=False)


def conformance_spec(block: int, mx: str, round: str, scale_bits: int | None = None) -> Spec:
    """A case's spec; narrower integers than MXINT8 are its kin, two's complement without the minimum."""
    fmt = ELEMENTS.get(mx) or jc.formats.mxint8(element=jc.formats.FixedFormat(2, int(mx[3:]) - 2, symmetric=True))
    fmt = fmt(group=block)
    return Spec(fmt if scale_bits is None else fmt(scale=FIVE_BITS, nan_block=True), round)


@further
def conformance():
    """microxcaling's vectors, and largest magnitudes just below powers of two."""
    assert len(CONFORMANCE) == 75
    batches: dict[tuple[Spec, int], list[dict[str, Any]]] = {}
    for case in CONFORMANCE:
        batches.setdefault((conformance_spec(**case["spec"]), len(case["input"])), []).append(case)
    for (spec, _), batch in batches.items():
        x, expected = (
            np.array([[int(word, 16) for word in case[k]] for case in batch], np.uint32).view(np.float32)
            for k in ("input", "expected")
        )
        cases.assert_bits(x.ravel(), jc.round_to_format(x, spec).ravel(), cases.bits(expected.ravel()), str(spec))


test_further = further.test()
