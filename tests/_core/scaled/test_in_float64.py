"""Rounding in float64, the way of small arrays in programs of one CPU, beside the ways of all other programs."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core import scaled_bodies
from jchop._core.rounding.random_bits import seed_words
from jchop._core.scaled.elements import make_scaled_plan
from jchop._core.scaled_bodies import quantize_body, round_body
from jchop._core.xla.backend import ONE_CPU, PORTABLE

further = Further()

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only programs for CPUs round in float64")

FORMATS = [
    "int8(channel=0)", "int4(group=16,scale=bfloat16)", "int8(group=32,scale=e8m0)", "int8(group=16,scale=e4m3)",
    "mxint8", "int4(group=32,zero_point=integer)", "uint8(group=16,zero_point=integer)", "mxfp8_e4m3", "mxfp8_e5m2",
    "mxfp6_e3m2", "mxfp4", "nvfp4", "e4m3(group=16)", "e2m1(group=16,scale=binary16)", "nf4", "dynamic8",
]  # fmt: skip
MODES = ["", ":nearest_away", ":nearest_zero", ":up", ":down", ":toward_zero", ":odd", ":stochastic", ":stochastic_b",
         ":stochastic_equal"]  # fmt: skip


def hard_numbers() -> np.ndarray:
    """Rows of every size, of random bits, of ties under a scale that is exact, of zeros and of subnormal numbers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((48, 64))
    x[::2] *= np.exp2(rng.integers(-150, 126, (24, 1)))
    x = np.clip(x, -3e38, 3e38).astype(np.float32)
    x[:8] = rng.integers(0, 2**32, (8, 64), dtype=np.uint32).view(np.float32)
    sizes = np.exp2(rng.integers(-149, 100, (8, 1)))
    x[8:16] = rng.integers(-254, 255, (8, 64)) * 0.5 * sizes
    x[8:16, ::16] = 127 * sizes
    x[16] = 0
    x[17] = -0.0
    x[18, 3], x[19, 5], x[20, 7] = 1e-45, np.nan, -np.inf
    x[21:25] = rng.standard_normal((4, 64)) * np.exp2([[-118], [-126], [-135], [-146]])
    return x


def moderate_numbers() -> np.ndarray:
    """Rows under moderate scales, with ties, zeros, subnormal numbers, NaN and infinities among their numbers."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((48, 64)) * np.exp2(rng.integers(-30, 30, (48, 1)))
    x[8:16] = rng.integers(-254, 255, (8, 64)) * 0.5
    x[:, 1::16] = 127
    x[:, 5::16] = rng.choice([0.0, -0.0, 1e-45, -1e-45, 1e-39, -1.1e-38, 1.2e-38, np.nan, np.inf], (48, 4))
    return x.astype(np.float32)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


#: Formats, modes and dtypes. By default a few; each format has one mode, and so many have a
#: second one that integers and floats have all modes, and both dtypes.
EACH = [
    pytest.param("int8(channel=0)", ":odd", "bfloat16", marks=pytest.mark.slow),
    ("int4(group=32,zero_point=integer)", ":nearest_away", "float32"),
    ("nvfp4", ":stochastic", "bfloat16"),
    pytest.param("uint8(group=16,zero_point=integer)", ":nearest_zero", "bfloat16", marks=pytest.mark.slow),
    pytest.param("uint8(group=16,zero_point=integer)", ":odd", "float32", marks=pytest.mark.slow),
    pytest.param("int4(group=32,zero_point=integer)", ":stochastic_equal", "bfloat16", marks=pytest.mark.slow),
    *(
        pytest.param(
            text,
            MODES[(3 * i + 5 * turn) % len(MODES)],
            ("float32", "bfloat16")[(i + turn) % 2],
            marks=pytest.mark.slow,
        )
        for turn, (i, text) in itertools.product(range(2), enumerate(FORMATS))
        if turn == 0 or i in (0, 2, 3, 4, 6, 8, 11, 12, 14)
    ),
]


@further
@pytest.mark.parametrize(("text", "mode", "dtype"), EACH)
def every_bit(text, mode, dtype, monkeypatch):
    """Under scales of every size, and on the other side of a branch on these."""
    monkeypatch.setattr(scaled_bodies, "LEAST_BRANCH_IN_FLOAT64", 1)
    spec, x = jc.Spec(text + mode), jnp.asarray(hard_numbers()).astype(dtype)
    if spec.rounding.stochastic and text in ("nf4", "dynamic8") and dtype == "bfloat16":
        pytest.skip("the same numbers as in float32, by the exact way on both sides")
    plan = make_scaled_plan(spec, CARRIERS[dtype])
    drawn = seed_words(jax.random.key(1)) if spec.rounding.stochastic else ()
    assert scaled_bodies.plan_to_encode(x, plan, ONE_CPU).float64
    for body in (round_body, quantize_body):
        one, other = (jax.jit(partial(body, plan=plan, backend=backend)) for backend in (ONE_CPU, PORTABLE))
        for numbers in (x, jnp.asarray(moderate_numbers()).astype(dtype)):
            for a, b in zip(*(jax.tree.leaves(run(numbers, *drawn)) for run in (one, other)), strict=True):
                np.testing.assert_array_equal(bits(a), bits(b))


@further.first
def the_program_is_short():
    """A third of the lines of the program of a large array."""
    x, large = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 64), (4096, 256)))
    lines = [
        jax.jit(lambda x: jc.round_to_format(x, "int8(group=all)")).lower(x).as_text().count("\n") for x in (x, large)
    ]
    assert large.size > scaled_bodies.MOST_IN_FLOAT64[False] and lines[0] <= 160
    assert lines[0] < lines[1] / 3


test_further = further.test()
