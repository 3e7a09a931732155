"""The fused dot-add of tensor cores against Python integers, bit for bit, and the digests of published runs."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_cores
import pytest
from further import Further
from oracle_cores import Core, Target

import jchop as jc
from jchop import MatmulSpec
from jchop._core.matmul import aligned
from jchop._core.matmul.aligned import TensorCoreUnit

further = Further()

F16, BF16, E4M3, E5M2 = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E4M3Z, E5M2Z = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz
E2M1, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
TF32, F32 = "tf32", np.float32
#: The least exponent and the largest exponent of operands.
ENDS = {
    E4M3Z: (-7, 7),
    E5M2Z: (-15, 15),
    F16: (-14, 15),
    BF16: (-126, 127),
    E4M3: (-6, 8),
    E5M2: (-14, 15),
    TF32: (-126, 127),
    F32: (-126, 127),
}
CUT, CUT13 = oracle_cores.BINARY32, oracle_cores.E8M13


@dataclass(frozen=True)
class Row:
    """A unit: its name in the table, its operands, and the numbers of the definition, written here a second time."""

    unit: str
    dtype: str
    operands: Any
    k: int
    bits: int
    target: Target = CUT
    apart: bool = False
    out: str = "binary32"
    halves: bool = False

    @property
    def spec(self) -> MatmulSpec:
        if self.unit == "none":  # operands of which nothing is known
            return MatmulSpec(None, accumulate="binary32:toward_zero", order=f"aligned({self.k}, {self.bits})")
        if self.unit == "any":
            return MatmulSpec(self.dtype, accumulate="binary32:toward_zero", order=f"aligned({self.k}, {self.bits})")
        return jc.tensor_core(self.unit, self.dtype, out=self.out)

    @property
    def core(self) -> Core:
        return Core(self.k, self.bits, ENDS[self.operands][0], self.target, self.apart, self.halves)

    def __str__(self) -> str:
        return f"{self.unit}-{self.dtype}-{self.k}" + "-half" * (self.out == "binary16")


HALF = {"target": oracle_cores.HALF, "out": "binary16"}
NEAREST = {"target": oracle_cores.NEAREST32, "apart": True}
ROWS = [
    Row("volta", "fp16", F16, 4, 23),
    Row("turing", "fp16", F16, 8, 24),
    Row("ampere", "bf16", BF16, 8, 24),
    Row("ada", "fp8", E4M3, 16, 13, CUT13),
    Row("hopper", "fp16", F16, 16, 25),
    Row("hopper", "fp16", F16, 16, 25, **HALF),
    Row("hopper", "tf32", TF32, 8, 25),
    Row("cdna3", "fp16", F16, 8, 24, **NEAREST),
    Row("cdna3", "fp8", E4M3Z, 16, 24, oracle_cores.NEAREST32, halves=True),
    Row("none", "fp32", F32, 4, 25),
]
MORE = [
    Row("volta", "fp16", F16, 4, 23, **HALF),
    Row("turing", "fp16", F16, 8, 24, **HALF),
    Row("ampere", "fp16", F16, 8, 24),
    Row("ampere", "tf32", TF32, 4, 24),
    Row("ada", "fp8_e5m2", E5M2, 16, 13, CUT13),
    Row("hopper", "bf16", BF16, 16, 25),
    Row("hopper", "fp8", E4M3, 32, 13, CUT13),
    Row("hopper", "fp8", E4M3, 32, 13, **HALF),
    Row("hopper", "fp8_e5m2", E5M2, 32, 13, CUT13),
    Row("blackwell", "fp8", E4M3, 32, 25),
    Row("blackwell", "fp8_e5m2", E5M2, 32, 25),
    Row("cdna3", "bf16", BF16, 8, 24, **NEAREST),
    Row("cdna3", "tf32", TF32, 4, 24, **NEAREST),
    Row("cdna3", "fp8_e5m2", E5M2Z, 16, 24, oracle_cores.NEAREST32, halves=True),
    Row("none", "fp32", F32, 8, 40),
]
#: Units that add some types as another one does.
ALIKE = {"ada": ("ampere", {"fp16", "bf16", "tf32"}), "blackwell": ("hopper", {"fp16", "bf16", "tf32"})}


# -- numbers that are hard to add --------------------------------------------------------------------------------------


def near(x: np.ndarray, operands: Any) -> np.ndarray:
    """Numbers of the operands' format, none of them infinite or NaN, as float32."""
    top = ENDS[operands][1]
    x = np.clip(x, -(2.0**top), 2.0**top)
    if operands == TF32:
        return (x.astype(F32).view(np.uint32) & 0xFFFFE000).view(F32)
    return x.astype(F32).astype(operands).astype(F32)


def problems(row: Row, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands (count, k) and accumulators: of one magnitude, cancelling, of every exponent, near both ends; a few are
    infinite or NaN."""
    rng = np.random.default_rng(row.k + row.bits)
    low, top = ENDS[row.operands]
    shape = (count, row.k)
    kind = np.arange(count)[:, None] % 5
    center = np.select([kind == 3, kind == 4], [rng.integers(low, top, (count, 1)), np.full((count, 1), low)], 0)
    spread = np.where(kind == 0, 0, rng.integers(-12, 13, shape))
    a, b = (near(rng.normal(size=shape) * np.exp2((center + spread).astype(float)), row.operands) for _ in range(2))
    b = np.where((kind == 4) & (low < -100), near(rng.normal(size=shape), row.operands), b)
    half = row.k // 2
    mirrored = (kind == 1)[:, :1]
    a[:, half:] = np.where(mirrored, -a[:, :half], a[:, half:])
    b[:, half:] = np.where(mirrored & (rng.random((count, half)) < 0.7), b[:, :half], b[:, half:])
    a = np.where(rng.random(shape) < 0.05, rng.choice(np.array([0.0, -0.0], F32), shape), a)
    exact = np.sum(a.astype(np.float64) * b.astype(np.float64), 1)
    scale = np.exp2(rng.integers(-20, 21, count).astype(float))
    with np.errstate(over="ignore"):
        c = np.where(rng.random(count) < 0.4, -exact, exact * scale * rng.normal(size=count)).astype(F32)
    c = np.where(rng.random(count) < 0.1, F32(0), c)
    c = np.where(rng.random(count) < 0.05, rng.integers(1, 1 << 23, count).astype(np.uint32).view(F32), c)
    if row.out == "binary16":
        with np.errstate(over="ignore"):
            c = c.astype(F16).astype(F32)
    odd = rng.random(count) < 0.04
    a[odd, 0] = rng.choice(np.array([np.inf, -np.inf, np.nan, 1], F32), odd.sum())
    c[odd] = rng.choice(np.array([np.inf, -np.inf, np.nan, 1], F32), odd.sum())
    return a, b, c


def bits(x: Any) -> np.ndarray:
    """Words, with one for every NaN."""
    x = np.asarray(x, F32)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


def each(factors: Any) -> list[Any]:
    """The factors of each product of a block, from trees of arrays of shape (products, sums)."""
    return [jax.tree.map(operator.itemgetter(i), factors) for i in range(factors.exponent.shape[0])]


def computed(
    row: Row, a: np.ndarray, b: np.ndarray, c: np.ndarray, spec: MatmulSpec | None = None
) -> dict[str, np.ndarray]:
    """A step in words of 32 bits, and in float64."""
    unit = TensorCoreUnit(spec or row.spec, row.k)

    @jax.jit
    def step(a: jax.Array, b: jax.Array, c: jax.Array) -> dict[str, jax.Array]:
        pairs = [v.T for v in (a, b)]
        x, y = (aligned.limb_factors(v, unit) for v in pairs)
        u, v = (aligned.double_factors(v, unit) for v in pairs)
        in_words = aligned.fused_add_limbs(c, each(x), each(y), unit, None)
        in_doubles = aligned.fused_add_doubles(near_float64(c), each(u), each(v), unit)
        return {"limbs": in_words, "doubles": aligned.narrow_doubles(in_doubles)}

    with jax.enable_x64(True):
        return {name: np.asarray(value) for name, value in step(a, b, c).items()}


def near_float64(c: jax.Array) -> jax.Array:
    """Float32 numbers in float64; XLA on a CPU would convert subnormal ones to zero."""
    bits = jax.lax.bitcast_convert_type(c, jnp.int32)
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int64)
    normal = jax.lax.bitcast_convert_type((magnitude << 29) + (896 << 52), jnp.float64)
    small = magnitude.astype(jnp.float64) * 2.0**-149
    value = jnp.where(magnitude < 1 << 23, small, jnp.where(magnitude >= 0x7F800000, jnp.abs(c) * 1.0, normal))
    return jnp.where(bits < 0, -value, value)


def check(row: Row, count: int) -> None:
    a, b, c = problems(row, count)
    core = row.core
    want = bits([core.step(*args) for args in zip(c.tolist(), a.tolist(), b.tolist(), strict=True)])
    for name, value in computed(row, a, b, c).items():
        got = bits(value)
        wrong = np.flatnonzero(got != want)
        shown = [(c[i], a[i], b[i], hex(got[i]), hex(want[i])) for i in wrong[:3]]
        assert not len(wrong), f"{row}, {name}: {len(wrong)} of {count} differ (c, a, b, got, expected): {shown}"
    finite = np.isfinite(want.view(F32))
    assert 0.5 < finite.mean() < 1  # the problems are no others


#: Sums of more bits than one word has.
LONG = Row("any", "float8_e4m3fn", E4M3, 16, 33)
#: By default one row of the table, and the long one; else two at a time.
EVERY = [([ROWS[0], LONG], 300)]
EVERY += [
    pytest.param([*ROWS, *MORE, LONG][i : i + 2], 20_000, marks=pytest.mark.slow)
    for i in range(0, len(ROWS + MORE) + 1, 2)
]


@pytest.mark.parametrize(
    ("rows", "count"), EVERY, ids=lambda value: "+".join(map(str, value)) if isinstance(value, list) else None
)
def test_every_sum_is_that_of_integers(rows: list[Row], count: int) -> None:
    for row in rows:
        check(row, count)


@further.first
def every_row_of_the_table_has_a_test() -> None:
    tested = {(row.unit, row.dtype) for row in (*ROWS, *MORE)} | {("tpu", "bf16")}
    tested |= {("blackwell", row.dtype) for row in SCALED}
    tested |= {(unit, dtype) for unit in ("cdna1", "cdna2") for dtype in ("fp16", "bf16")}
    for unit, (other, types) in ALIKE.items():
        for dtype in types:
            assert jc.tensor_core(unit, dtype) == jc.tensor_core(other, dtype), (unit, dtype)
            tested.add((unit, dtype))
    assert tested - {("none", "fp32")} == {(unit, dtype) for unit in jc.TENSOR_CORES for dtype in jc.TENSOR_CORES[unit]}


# -- elements with scales ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledRow:
    """A type of Blackwell with block scales, and the numbers of the definition."""

    dtype: str
    elements: Any
    scales: Any
    group: int
    core: Core

    def __str__(self) -> str:
        return self.dtype


SCALED = [
    ScaledRow("mxfp8", E4M3, E8M0, 32, Core(32, 25, -6, CUT, scale_emin=-127)),
    ScaledRow("nvfp4", E2M1, E4M3, 16, Core(64, 35, 0, CUT, scale_emin=-6, merged=16)),
    ScaledRow("mxfp8_e5m2", E5M2, E8M0, 32, Core(32, 25, -14, CUT, scale_emin=-127)),
    ScaledRow("mxfp4", E2M1, E8M0, 32, Core(64, 35, 0, CUT, scale_emin=-127, merged=16)),
]


def scaled_problems(row: ScaledRow, count: int) -> list[np.ndarray]:
    """Accumulators, and elements and scales of all codes; scales of E8M0 mostly near each other."""
    rng = np.random.default_rng(row.core.k + row.group)
    shape = (count, row.core.k)
    codes = rng.integers(0, 16 if row.elements is E2M1 else 256, (2, *shape)).astype(np.uint8)
    elements = codes.view(row.elements).astype(F32)
    quiet = np.nan_to_num(elements, nan=1, posinf=1, neginf=-1)
    elements = np.where(rng.random((2, count, 1)) < 0.1, elements, quiet)  # else few sums are finite
    near_one = rng.integers(0 if row.scales is E4M3 else 120, 127 if row.scales is E4M3 else 135, (2, count, 4))
    every = rng.integers(0, 128 if row.scales is E4M3 else 256, (2, count, 4))
    scales = np.where(rng.random((2, count, 1)) < 0.7, near_one, every).astype(np.uint8).view(row.scales)
    scales = np.repeat(scales.astype(F32), row.group, 2)[:, :, : row.core.k]
    mirrored = rng.random(count) < 0.3
    half = row.core.k // 2
    quiet_pair = np.where(mirrored[:, None], -elements[0][:, :half], elements[0][:, half:])
    elements[0][:, half:] = quiet_pair
    with np.errstate(over="ignore", invalid="ignore"):
        values = elements.astype(np.float64) * scales
        exact = np.sum(values[0] * values[1], 1)
        spread = np.exp2(rng.integers(-20, 21, count)) * rng.normal(size=count)
        c = np.where(rng.random(count) < 0.4, -exact, exact * spread).astype(F32)
    c = np.where(rng.random(count) < 0.1, F32(0), c)
    return [np.where(np.isfinite(c), c, F32(1)), *elements, *scales]


def check_scaled(row: ScaledRow, count: int) -> None:
    c, *operands = scaled_problems(row, count)
    unit = TensorCoreUnit(jc.tensor_core("blackwell", row.dtype), row.core.k)

    @jax.jit
    def step(c: jax.Array, *operands: jax.Array) -> dict[str, jax.Array]:
        a, b, sa, sb = (v.T for v in operands)
        x, y = (aligned.limb_factors(*v) for v in ((a, unit, sa), (b, unit, sb)))
        u, v = (aligned.double_factors(*v) for v in ((a, unit, sa), (b, unit, sb)))
        in_words = aligned.fused_add_limbs(c, each(x), each(y), unit, None)
        in_doubles = aligned.fused_add_doubles(near_float64(c), each(u), each(v), unit)
        return {"limbs": in_words, "doubles": aligned.narrow_doubles(in_doubles)}

    want = bits([row.core.step(*args) for args in zip(c.tolist(), *(v.tolist() for v in operands), strict=True)])
    with jax.enable_x64(True):
        for name, value in step(c, *operands).items():
            wrong = np.flatnonzero(bits(value) != want)
            assert not len(wrong), (name, len(wrong), [(c[i], *(v[i] for v in operands)) for i in wrong[:2]])
    assert 0.5 < np.isfinite(want.view(F32)).mean() < 1


@further
@pytest.mark.parametrize(
    ("row", "count"),
    [(SCALED[0], 200), *(pytest.param(row, 20_000, marks=pytest.mark.slow) for row in SCALED)],
    ids=str,
)
def every_sum_of_scaled_elements_is_that_of_integers(row: ScaledRow, count: int) -> None:
    check_scaled(row, count)


def decoded(x: np.ndarray, row: ScaledRow) -> tuple[np.ndarray, np.ndarray, F32]:
    """Elements, the scale of each, and the scale of the tensor, from the codes of `x`."""
    spec = jc.tensor_core("blackwell", row.dtype).operands
    assert spec is not None
    q = jc.quantize(x, spec)
    codes = np.asarray(q.qvalue).view(np.uint8)
    codes = codes if row.elements is not E2M1 else np.stack([codes & 15, codes >> 4], -1).reshape(len(x), -1)
    scale, tensor = q.scale if isinstance(q.scale, tuple) else (q.scale, F32(1))
    scale = np.asarray(scale).view(np.uint8)
    if row.dtype == "nvfp4":  # its scales have no subnormal numbers
        assert (scale >= 8).all()
    each = np.repeat(scale.view(row.scales).astype(F32), row.group, 1)[:, : x.shape[1]]
    return codes.view(row.elements).astype(F32)[:, : x.shape[1]], each, F32(tensor)


#: By default the product alone; then in a batch and with its gradient, too.
WHOLE = [(SCALED[0], False), *(pytest.param(row, True, marks=pytest.mark.slow) for row in SCALED[:2])]


@pytest.mark.parametrize(("row", "more"), WHOLE, ids=str)
def test_products_of_scaled_operands(row: ScaledRow, more: bool) -> None:
    """Three blocks, the last one shorter, as is its last group; then the scales of the tensors, if there are any."""
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=s).astype(F32) * np.exp2(rng.integers(-9, 9, s)).astype(F32) for s in ((2, 138), (138, 3)))
    (x, sx, tx), (y, sy, ty) = decoded(a, row), decoded(b.T.copy(), row)
    want = np.zeros((2, 3), F32)
    for i, j in np.ndindex(2, 3):
        c = 0.0
        for k in range(0, 138, row.core.k):
            c = row.core.step(c, *(v[n][k : k + row.core.k].tolist() for v, n in ((x, i), (y, j), (sx, i), (sy, j))))
        want[i, j] = F32(c) * (tx * ty)
    product = partial(jc.math.matmul, spec=jc.tensor_core("blackwell", row.dtype))
    np.testing.assert_array_equal(bits(product(a, b)), bits(want))
    if not more:
        return
    batched = product(np.stack([a, a]), np.stack([b, b]))
    np.testing.assert_array_equal(bits(batched[1]), bits(want))
    gradient = jax.grad(lambda a: product(a, b).sum())(jnp.asarray(a))
    rounded = (y * sy * ty).sum(0)
    np.testing.assert_allclose(gradient, np.broadcast_to(rounded, a.shape), rtol=1e-5, atol=1e-6 * abs(rounded).max())


# -- whole products ----------------------------------------------------------------------------------------------------


def digest(x: Any) -> str:
    return hashlib.sha256(np.asarray(x, F32).tobytes()).hexdigest()[:12]


@further
@pytest.mark.parametrize(
    ("unit", "expected"), [("volta", "4d529eb8c2cf"), pytest.param("ampere", "6bd842b2e484", marks=pytest.mark.slow)]
)
def published_digests(unit: str, expected: str) -> None:
    """The digests of runs of MMA-Sim, 16 x 256 x 16."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(F16).astype(F32) for shape in ((16, 256), (256, 16)))
    got = jc.math.matmul(a, b, jc.tensor_core(unit, "fp16"))
    assert digest(got) == expected
    plain = jc.math.matmul(a, b, MatmulSpec())
    assert np.count_nonzero(got != plain) >= 230


def dots(row: Row, a: np.ndarray, b: np.ndarray, promote: int | None = None) -> np.ndarray:
    core = row.core
    return np.array([[core.dot(x.tolist(), y.tolist(), promote) for y in b.T] for x in a], F32)


def chained(row: Row, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return near(rng.normal(size=(3, k)) * 4, row.operands), near(rng.normal(size=(k, 5)), row.operands)


@further
def blocks_follow_each_other_and_are_promoted() -> None:
    """With a rest that is no whole block, and no whole part."""
    row, promote = Row("ada", "fp8", E4M3, 16, 13, CUT13), 32
    a, b = chained(row, 105)
    spec = jc.tensor_core("ada", "fp8", promote_every=promote)
    np.testing.assert_array_equal(bits(jc.math.matmul(a, b, spec)), bits(dots(row, a, b, promote)))


@further
@pytest.mark.parametrize(("unit", "block", "flush"), [("cdna1", 2, False), ("cdna2", 4, True)])
def pairwise_blocks(unit: str, block: int, flush: bool) -> None:
    """bfloat16 numbers around the smallest normal ones, whose products are subnormal."""
    rng = np.random.default_rng(1)
    a = near(rng.normal(size=(4, 30)) * 2.0 ** rng.integers(-70, -60, (4, 30)), BF16)
    b = near(rng.normal(size=(30, 6)) * 2.0 ** rng.integers(-70, -60, (30, 6)), BF16)
    a[:, 3] *= F32(2.0**-62)
    want = [[oracle_cores.pairs_dot(x.tolist(), y.tolist(), block, flush, -126) for y in b.T] for x in a]
    np.testing.assert_array_equal(bits(jc.math.matmul(a, b, jc.tensor_core(unit, "bf16"))), bits(want))


MODES = ("nearest_even", "nearest_away", "nearest_zero", "up", "down", "odd", "toward_zero")


@pytest.mark.parametrize("modes", [("odd",), pytest.param(MODES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_other_modes_round_the_exact_sum(modes: tuple[str, ...]) -> None:
    """Two products on a wide grid: the sum is a fraction, rounded by hand to the neighbours in every mode."""
    a = np.array([[1, 2**-24], [1, 3 * 2**-24], [1, 5 * 2**-25], [-1, -(2**-24)], [2**100, 2**100]], F32)
    b = np.array([[1], [1]], F32)
    ulp = 2.0**-23
    halves = np.array([0.5, 1.5, 1.25])
    even, down = np.array([0, 2, 1]), np.floor(halves)
    wants = {"nearest_even": even, "nearest_away": [1, 2, 1], "nearest_zero": [0, 1, 1], "up": down + 1,
             "down": down, "toward_zero": down, "odd": [1, 1, 1]}  # fmt: skip
    for mode in modes:
        spec = MatmulSpec(None, accumulate=f"binary32:{mode}", order="aligned(2, 40)")
        product = partial(jc.math.matmul, spec=spec)
        away = mode in ("nearest_away", "down", "odd")
        want = np.concatenate([1 + np.asarray(wants[mode]) * ulp, [-1 - away * ulp, 2**101.0]])
        in_doubles, in_limbs = product(a, b), jax.vmap(product, (0, None))(a[None], b)[0]
        for got in (in_doubles, in_limbs):
            np.testing.assert_array_equal(np.asarray(got, np.float64)[:, 0], want, mode)


#: Every format, mode and rule of overflow.
ACCUMULATORS = ["e5m10", "e8m13:odd:flush", "binary32:down:saturate", "binary32:odd", "e8m13:up:propagate",
                "e5m10:down:saturate"]  # fmt: skip


@further
@pytest.mark.in_turn(32)
@pytest.mark.parametrize("accumulate", ACCUMULATORS)
def float64_has_the_bits_of_two_words(accumulate: str) -> None:
    turn = ACCUMULATORS.index(accumulate) % 2
    row = (Row("none", "fp32", F32, 4, 25), Row("cdna3", "fp16", F16, 8, 24))[turn]
    made = computed(row, *problems(row, 2000), replace(row.spec, accumulate=accumulate))
    np.testing.assert_array_equal(bits(made["doubles"]), bits(made["limbs"]), accumulate)


def test_sums_beyond_the_range_are_infinite_or_saturate() -> None:
    a, b = np.full((1, 2), 2.0**64, F32), np.full((2, 1), 2.0**63, F32)
    cut = MatmulSpec("bfloat16", accumulate="binary32:toward_zero", order="aligned(2, 24)")
    assert jc.math.matmul(a, b, cut)[0, 0] == np.inf
    kept = replace(cut, accumulate=jc.Spec("binary32:toward_zero:saturate"))
    assert jc.math.matmul(-a, b, kept)[0, 0] == -np.finfo(F32).max


@further
def a_stochastic_accumulator_is_right_on_average() -> None:
    a, b = np.ones((4096, 2), F32), np.array([[1], [2.0**-12]], F32)
    spec = MatmulSpec("binary16", accumulate="e8m10:stochastic", order="aligned(2, 25)")
    got = np.asarray(jc.math.matmul(a, b, spec, jax.random.key(0)), np.float64)
    assert set(np.unique(got)) == {1, 1 + 2.0**-10}
    assert abs(got.mean() - (1 + 2.0**-12)) < 4 * 2.0**-10 * np.sqrt(3 / 16 / 4096)


# -- transforms and refusals -------------------------------------------------------------------------------------------


@further
def vmap_grad_and_float64() -> None:
    row = Row("volta", "fp16", F16, 4, 23)
    a, b = chained(row, 4)
    product = partial(jc.math.matmul, spec=row.spec)
    one = product(a, b)
    np.testing.assert_array_equal(jax.vmap(product, (0, None))(jnp.stack([a, a]), b)[1], one)
    gradient = jax.grad(lambda a: product(a, b).sum())(jnp.asarray(a))
    np.testing.assert_allclose(gradient, np.broadcast_to(b.sum(1), a.shape), rtol=1e-6)
    with jax.enable_x64(True):
        wide = product(a.astype(np.float64), b.astype(np.float64))
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, one)


SQUARE = np.ones((2, 2), F32)
REFUSED: dict[str, tuple[Any, str]] = {
    "block": (lambda: jc.Order("aligned", 65, 25), "block of aligned=65 must be an integer"),
    "no bits": (lambda: jc.Order("aligned", 8), "order='aligned' needs a number of fraction bits"),
    "bits of another": (lambda: jc.Order("blocked", 8, 3), "order='blocked' has no grid, but bits=3"),
    "promotion": (lambda: jc.Order("aligned", 8, 24, 12), "promote_every=12 must be a multiple of the block length 8"),
    "promoted": (lambda: jc.Order("pairwise", promote_every=8), "order='pairwise' is never promoted"),
    "product": (lambda: MatmulSpec(product="e5m2", order="aligned(4, 23)"), "aligns the exact products"),
    "float64": (
        lambda: jc.math.matmul(np.ones((2, 2)), np.ones((2, 2)), MatmulSpec(order="aligned(4, 23)")),
        "operands=None of float64 may not be numbers of float32",
    ),
    "accumulate": (
        lambda: jc.math.matmul(SQUARE, SQUARE, MatmulSpec(accumulate="e8m22", order="aligned(4, 23)")),
        "accumulate='e8m22': order='aligned",
    ),
    "scaled order": (
        lambda: MatmulSpec("mxfp4", order="pairwise"),
        "with jchop.round_to_format, or take order='aligned(b, f)' or 'aligned_sums(b, f)'",
    ),
    "scaled integers": (
        lambda: MatmulSpec("int8(channel=0)"),
        "is a scaled format, and order='sequential' adds numbers without scales; round both arrays before, along the "
        "axis of the sum, with jchop.round_to_format",
    ),
    "plain sums": (lambda: MatmulSpec("e4m3", order="aligned_sums(64, 35)"), "needs operands of a scaled format"),
    "sums of groups": (
        lambda: MatmulSpec("mxfp4(group=24)", order="aligned_sums(64, 35)"),
        "operands='mxfp4(group=24)': order='aligned_sums(64, 35)' needs groups of a multiple of 16",
    ),
    "scales": (lambda: MatmulSpec("nvfp4", order="aligned(32, 25)"), "order='aligned(32, 25)' needs powers of two"),
    "whole": (lambda: MatmulSpec("mxfp8_e4m3(group=all)", order="aligned(32, 25)"), "in groups along the last axis"),
    "scaled sum": (
        lambda: jc.math.sum(SQUARE, jc.tensor_core("blackwell", "mxfp8")),
        "operands='mxfp8_e4m3' is a scaled format, and each number has to be rounded by itself",
    ),
    "scaled emulate": (
        lambda: jc.emulate(jnp.dot, "binary32", accumulate=jc.tensor_core("blackwell", "mxfp8"))(SQUARE, SQUARE),
        "operands='mxfp8_e4m3' is a scaled format, and each number has to be rounded by itself",
    ),
    "unpublished format": (
        lambda: jc.tensor_core("tpu", "float8_e4m3fn"),
        "how tpu adds float8_e4m3fn is not published",
    ),
    "unpublished": (
        lambda: jc.tensor_core("blackwell", "mxfp6_e3m2"),
        "how blackwell adds mxfp6_e3m2 is not published",
    ),
    "unpublished, without its bits": (lambda: jc.tensor_core("blackwell", "fp6"), "how blackwell adds fp6 is not publ"),
    "scaled and unpublished": (lambda: jc.tensor_core("blackwell", "mxfp6"), "how blackwell adds mxfp6 is not publ"),
    "unit": (lambda: jc.tensor_core("hoper", "fp8"), "unit='hoper' is not known; did you mean hopper"),
    "dtype": (lambda: jc.tensor_core("volta", "fp8"), "dtype='fp8' is not known of volta; allowed: 'fp16'"),
    "format of another": (
        lambda: jc.tensor_core("cdna3", "float8_e4m3fn"),
        "dtype='float8_e4m3fn' is not known of cdna3",
    ),
    "rounding": (lambda: jc.tensor_core("hopper", "float16:up"), "dtype='float16:up' is not known of hopper"),
    "out": (lambda: jc.tensor_core("hopper", "bf16", out="binary16"), "out='binary16': bf16 on hopper has no float16"),
}


def test_refusals() -> None:
    for name, (make, message) in REFUSED.items():
        with jax.enable_x64(name == "float64"), pytest.raises(ValueError) as caught:
            make()
        assert message in str(caught.value), name


def test_formats_name_the_types() -> None:
    for unit, types in jc.TENSOR_CORES.items():
        for dtype, row in types.items():
            named = str(row.spec.operands).partition(":")[0]
            assert jc.tensor_core(unit, dtype) == jc.tensor_core(unit, named) == row.spec
    for given, dtype in (("float16", "fp16"), ("bfloat16", "bf16"), ("float8_e5m2", "fp8_e5m2")):
        assert jc.tensor_core("hopper", given, promote_every=128) == jc.tensor_core("hopper", dtype, promote_every=128)


# -- every road to a sum -----------------------------------------------------------------------------------------------


#: Functions of a matrix, its transpose's columns and an accumulation, each of which sums rows times columns.
ROADS: dict[str, Any] = {
    "einsum": lambda a, b, spec: jc.math.einsum("ij,jk->ik", a, b, spec=spec),
    "conv": lambda a, b, spec: jc.math.conv(a[:, :, None], b.T[:, :, None], spec)[:, :, 0],
    "emulate": lambda a, b, spec: jc.emulate(jnp.dot, "binary32", accumulate=spec)(a, b),
    "rule": lambda a, b, spec: jc.quantize_fn(lambda w, x: x @ w, rule_of(spec))(jnp.asarray(b), jnp.asarray(a)),
    "sum": lambda a, b, spec: jc.math.sum(a, spec, axis=1)[:, None],
}


def rule_of(spec: MatmulSpec) -> Any:
    return jc.Rule(weight="bfloat16", activation="bfloat16", matmul=replace(spec, operands=None))


@further
@pytest.mark.in_turn(64)
@pytest.mark.parametrize("name", ["conv", "sum", "einsum", "emulate", "rule"])
def other_functions_sum_in_the_same_way(name: str) -> None:
    row = Row("ampere", "bf16", BF16, 8, 24)
    a, b = chained(row, 37)
    want = dots(row, a, np.ones((37, 1), F32) if name == "sum" else b)
    np.testing.assert_array_equal(bits(ROADS[name](a, b, row.spec)), bits(want), name)


def test_a_mean_under_the_accumulator_of_a_core_divides_toward_zero() -> None:
    x = np.asarray([1, 2**-8, 2**-9], F32)
    exact = sum(map(Fraction, x.tolist())) / 3
    got = float(jc.math.mean(x, jc.tensor_core("ampere", "bf16")))
    assert Fraction(got) <= exact < Fraction(float(np.nextafter(F32(got), F32(2)))) and got != np.float32(x.sum() / 3)


test_further = further.test()
