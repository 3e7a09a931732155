"""The short way of kernels under any scales: against exact quotients, next to the numbers that decide."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.scaled import elements, tiles
from jchop._core.scaled.elements import ScaledPlan, make_scaled_plan, scale_magnitude

further = Further()

SHORT = [
    "int8(group=16)", "int8(group=all,axis=-1)", "int4(group=16,scale=bfloat16)", "uint4(group=16)",
    "int3(group=16,scale=e4m3fn)", "int8(group=16,rule=half_range)", "fixed2.4(group=16)", "e4m3fn(group=16)",
    "e5m2(group=16,scale=bfloat16)", "e3m2fn(group=16)", "e2m1fn(group=16)", "e2m1fn(group=16,scale=e4m3fn)",
    "nvfp4", "int8(group=16,scale=e8m0fnu)", "uint8(group=16,scale=e8m0fnu)", "e4m3fn(group=16,scale=e5m2)",
]  # fmt: skip


def plan_of(text: str) -> ScaledPlan:
    return make_scaled_plan(jc.Spec(text), CARRIERS["float32"])


@further.first
def the_short_way_is_taken_where_it_may_be():
    for text in SHORT:
        assert tiles.supports_plain_tiles(plan_of(text)), text
    for text in ("mxfp8_e4m3", "mxint8", "nf4(group=16)", "int8(group=16):up", "int8(group=16):stochastic",
                 "e5m2(group=16):ieee", "e4m3fn(group=16):flush"):  # fmt: skip
        assert not tiles.supports_plain_tiles(plan_of(text)), text
    assert not tiles.supports_plain_tiles(make_scaled_plan(jc.Spec("int8(group=16)"), CARRIERS["float64"]))


def next_to_middles(plan: ScaledPlan, rng: np.random.Generator) -> np.ndarray:
    """Blocks of values of the format and the middles of two, times the scale, and one unit in the last place about."""
    fmt, count = plan.element.format, 300
    values = np.array(fmt.values(), np.float64)
    grid = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    first = (rng.uniform(1, 2, count) * 2.0 ** rng.integers(-28, 40, count)).astype(np.float32)
    first[::3] = np.float32(float(fmt.max)) * 2.0 ** rng.integers(-40, 40, first[::3].size).astype(np.float32)
    scales = tiles.choose_scales(jnp.asarray(first[:, None]), 1, plan, tensor_of(plan))
    whole = np.asarray(scale_magnitude(scales, plan)).view(np.float32).astype(np.float64)
    x = (rng.choice(grid, (count, 16)) * whole * (1 if scales.tensor is None else TENSOR)).astype(np.float32)
    x = (cases.bits(x).astype(np.int64) + rng.integers(-1, 2, x.shape) * (x != 0)).astype(np.uint32).view(np.float32)
    x[:, 0] = first
    x[::17] = 0
    x[:, 1] = -0.0
    return np.where(np.abs(x) > np.abs(x[:, :1]), x[:, :1], x)


#: A scale of a tensor that is no power of two.
TENSOR = np.float32(0.7)


def tensor_of(plan: ScaledPlan) -> jax.Array | None:
    return jnp.int32(TENSOR.view(np.int32)) if plan.rule.tensor_scale else None


@further
@pytest.mark.in_turn(5)
@pytest.mark.parametrize("text", [SHORT[0], *SHORT[2:5], SHORT[8], *SHORT[11:15]])
def the_same_bits_next_to_middles(text, rng):
    plan = plan_of(text)
    x = next_to_middles(plan, rng)

    @jax.jit
    def both(x):
        scales, largest, plain = tiles.plain_tile_scales(x, 1, plan, tensor_of(plan))
        short = scales.value, tiles.encode_plain_tile(x, scales, largest, plan)
        exact = tiles.choose_scales(x, 1, plan, tensor_of(plan))
        return plain, short, (exact.value, elements.quantize_block_tile(x, 1, plan, None, tensor_of(plan))[0])

    plain, short, exact = both(x)
    assert plain
    for name, one, other in zip(("scales", "codes"), short, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), name)


@pytest.mark.parametrize("text", ["int8(group=2)", "int4(group=2,rule=half_range)", "e4m3fn(group=2)"])
def test_scales_are_rounded_once(text, rng):
    """Against float64, whose own rounding has no effect: no quotient by few bits is so close to a middle."""
    plan = plan_of(text)
    x = (rng.uniform(1, 2, (4096, 1)) * 2.0 ** rng.integers(-30, 30, (4096, 1))).astype(np.float32)
    x[::2] = (x[::2] * np.float32(float(plan.divisors[0]))).astype(np.float32)
    scales, _, plain = tiles.plain_tile_scales(jnp.asarray(x), 1, plan)
    assert plain
    expected = (x.astype(np.float64) / float(plan.divisors[0])).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scales.value).view(np.float32), expected)


@further
def one_block_decides_for_a_tile():
    blocks = {
        True: ((1.0, 0.0), (0.0, -0.0), (2.0**40, 1e-42)),
        False: ((np.nan, 1.0), (np.inf, 1.0), (1e-42, 0.0), (2.0**70, 1.0), (2.0**-70, 0.0)),
    }
    for text in ("int8(group=2)", "int8(group=2,scale=bfloat16)"):
        for plain, values in [(plain, block) for plain, some in blocks.items() for block in some]:
            x = np.ones((5, 2), np.float32)
            x[3] = values
            assert bool(tiles.plain_tile_scales(jnp.asarray(x), 1, plan_of(text))[2]) is plain, (text, values)


test_further = further.test()
