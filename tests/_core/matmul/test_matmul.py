"""The body of the matrix product against exact fractions, element for element and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further
from oracle_matmul import Arithmetic, How, Sum

import jchop as jc
from jchop import MatmulSpec
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.exact import ValueRange, carrier_range
from jchop._core.matmul.matmul import MatmulPlan, matmul_body
from jchop._core.rounding.random_bits import seed_words

further = Further()

KEYS = (jax.random.key(1), jax.random.key(2))

#: Formats by their text, as the other value tests know them, and some that only sums need.
SETS: dict[str, oracle.Set] = {
    **cases.NAMED,
    **cases.CUSTOM,
    **cases.WIDE,
    **cases.DOUBLE,
    **cases.P3109,
    **cases.FIXED,
    "e5m10(subnormals=false)": oracle.ieee(5, 10, subnormals=False),
    "e8m20": oracle.ieee(8, 20),
    "fixed8.8": oracle.fixed(8, 8),
    "integer16": oracle.integer(16),
}


@dataclass(frozen=True)
class Row:
    """One combination of formats, modes and order, at one length k."""

    operands: str | None
    product: str | None
    accumulate: str | None
    order: str
    k: int
    fused: bool = False
    carrier: str = "float32"

    @property
    def spec(self) -> MatmulSpec:
        return MatmulSpec(self.operands, self.product, self.accumulate, self.order, self.fused)

    @property
    def arithmetic(self) -> Arithmetic:
        kind, _, block = self.order.rstrip(")").partition("(")
        carrier = oracle.CARRIERS[self.carrier]
        return Arithmetic(how(self.product), how(self.accumulate), carrier, kind, int(block or 0), self.fused)

    def __str__(self) -> str:
        parts = [self.operands, self.product, self.accumulate, self.order, self.k]
        return "-".join(map(str, parts)) + "-fused" * self.fused + "-float64" * (self.carrier == "float64")


def how(text: str | None) -> How | None:
    """A rounding from its text, which is read here a second time."""
    if text is None:
        return None
    name, *parts = text.split(":")
    fields: dict = {}
    for part in parts:
        if part.startswith("random_bits="):
            fields["random_bits"] = int(part.partition("=")[2])
        elif part == "flush":
            fields["flush"] = True
        else:
            fields["mode" if part in (*oracle.DETERMINISTIC, *oracle.STOCHASTIC) else "overflow"] = part
    return How(SETS[name], **fields)


# -- operands that are hard to sum -------------------------------------------------------------------------------------


@lru_cache
def values(name: str) -> np.ndarray:
    return np.array([float(v) for v in oracle.values(SETS[name])])


#: Formats of too many values to list: numbers that are not far from given ones.
WIDE: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda x: x,
    "binary32": lambda x: x.astype(np.float32),
    "tf32": lambda x: (x.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32),
}


def near(x: np.ndarray, row: Row) -> np.ndarray:
    """Values of the operands' format not far from `x`."""
    if row.operands in WIDE:
        return WIDE[row.operands](x).astype(row.carrier)
    some = values(row.operands)
    return some[np.clip(np.searchsorted(some, x), 0, len(some) - 1)].astype(row.carrier)


def alike(row: Row, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers of one magnitude."""
    return near(rng.normal(size=shape), row)


def cancelling(row: Row, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Along k the second half is the first one negated, some of it moved by a little."""
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, shape))
    half = shape[-1] // 2
    x[..., shape[-1] - half :] = -x[..., :half] * rng.choice([1, 1, 1 + 2.0**-9], (*shape[:-1], half))
    return near(x, row)


def alternating(row: Row, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Along k huge and small numbers in turn, of either sign."""
    if row.operands in WIDE:
        e = 400 if row.carrier == "float64" and row.operands is None else 50
    else:
        e = np.log2(values(row.operands)[-1]) / 2
    scale = np.exp2(np.where(np.arange(shape[-1]) % 2, e, -e))
    return near(rng.normal(size=shape) * scale * rng.choice([1.0, 0.25], shape), row)


def anything(row: Row, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers of every exponent there is, subnormals and both zeros among them; infinity or NaN in the first row."""
    if row.operands in WIDE:
        e = 1 - oracle.CARRIERS["float32" if row.operands else row.carrier].bias
        x = near(np.ldexp(rng.uniform(-2, 2, shape), rng.integers(e - 30, -e, shape)), row)
    else:
        x = rng.choice(values(row.operands), shape).astype(row.carrier)
    x = np.where(rng.random(shape) < 0.2, rng.choice([0.0, -0.0], shape), x).astype(row.carrier)
    if row.operands is None and shape[-1]:
        x[0, rng.integers(shape[-1])] = rng.choice([np.inf, -np.inf, np.nan])
    return x


def exact(row: Row, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers that a carrier sums exactly in any order."""
    return near(rng.integers(-16, 17, shape) / 4, row)


KINDS = (alike, cancelling, alternating, anything)


def operands(row: Row, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(4, m, k) and (4, k, n), a kind of numbers each; the longer k, the fewer they are."""
    m, n = (3, 5) if row.k < 30 else (2, 3) if row.k < 100 else (1, 2)
    kinds = (exact,) * 4 if "matrix_unit" in row.order else KINDS
    a = np.stack([kind(row, (m, row.k), rng) for kind in kinds])
    b = np.stack([kind(row, (n, row.k), rng) for kind in (alike, *kinds[2:], alternating)])
    return a, b.swapaxes(1, 2)


# -- the comparison ----------------------------------------------------------------------------------------------------


def drawn(row: Row, size: int) -> Callable[[str, int, int], int]:
    """The word of a kind of operation, step and output element, from the public random stream."""
    width = 64 if row.carrier == "float64" else 32
    tables = {}
    with jax.enable_x64(width == 64):
        for name, key in zip(("product", "accumulate"), KEYS, strict=True):
            text = getattr(row, name)
            if text is not None and "stochastic" in text:
                steps = range(2 * row.k)
                rows = [jc.random_bits(key, (size,), width=width, offset=step << 32) for step in steps]
                tables[name] = np.array(rows)
    return lambda name, step, element: int(tables[name][step, element]) if name in tables else 0


def expected(row: Row, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The exact sums' bit patterns."""
    carrier = oracle.CARRIERS[row.carrier]
    out = np.empty((*a.shape[:2], b.shape[2]), carrier.words)
    word = drawn(row, out.size)
    left, right = ([oracle.from_bits(v, carrier) for v in cases.bits(x).ravel().tolist()] for x in (a, b))
    m, k, n = *a.shape[1:], b.shape[2]
    for element, (batch, i, j) in enumerate(np.ndindex(*out.shape)):
        x = left[(batch * m + i) * k : (batch * m + i + 1) * k]
        y = right[batch * k * n + j : (batch + 1) * k * n : n]
        words = partial(lambda element, name, step: word(name, step, element), element)
        out[batch, i, j] = oracle.to_bits(Sum(x, y, row.arithmetic, words).result(), carrier)
    return out


def compute(row: Row, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with jax.enable_x64(row.carrier == "float64"):
        draws = MatmulPlan(row.spec, CARRIERS[row.carrier], row.k).draws
        seeds = jnp.stack([word for key in KEYS for word in seed_words(key)]) if draws else None
        return np.asarray(jax.jit(partial(matmul_body, spec=row.spec))(a, b, seeds))


def check(row: Row) -> None:
    a, b = operands(row, np.random.default_rng(row.k))
    got, want = compute(row, a, b), expected(row, a, b)
    assert got.shape == want.shape
    wrong = cases.differences(got.ravel(), want.ravel(), oracle.CARRIERS[row.carrier])
    shown = [(i, got.ravel()[i], want.ravel().view(got.dtype)[i]) for i in wrong[:5]]
    assert not len(wrong), f"{row}: {len(wrong)} of {want.size} differ (element, got, expected): {shown}"


def rows(*texts: str) -> list[Row]:
    """Rows of: operands, product, accumulate, order, k [, fused] [, float64]; - is None, = the operands' format."""
    out = []
    for text in texts:
        first, product, accumulate, order, k, *flags = text.split()
        formats = [
            None if name == "-" else first + name[1:] if name[0] == "=" else name
            for name in (first, product, accumulate)
        ]
        carrier = "float64" if "float64" in flags else "float32"
        out.append(Row(formats[0], formats[1], formats[2], order, int(k), "fused" in flags, carrier))
    return out


ROWS = rows(
    "float8_e4m3fn - e5m10 matrix_unit(4) 1",  # by default
    # Orders at lengths that leave rests, beside those of `AT_LENGTHS`.
    "e5m10 - =:stochastic:random_bits=5 pairwise 7",
    "e5m10 = =:odd blocked(100) 31",
    "e5m10 = = blocked(1) 3",
    "e5m10 = =:down pairwise 2",
    "e5m10 - =:toward_zero pairwise 1",
    "e5m10 = =:down sequential 2",
    # Products that are not rounded.
    "e5m10 - e5m10 sequential 9 fused",
    "e5m10 - e5m10:up blocked(8) 31 fused",
    "bfloat16 - tf32:stochastic sequential 8 fused",
    "bfloat16 - - sequential 31",
    "float8_e4m3fn - e5m10 sequential 64",
    "float8_e5m2 - e5m10 pairwise 31",
    "float8_e4m3fn - e5m10:odd matrix_unit(4) 31",
    "float8_e4m3fn - bfloat16 matrix_unit(8) 64",
    "float8_e4m3fn - e8m4:stochastic matrix_unit(32) 129",
    "integer8 - float8_e5m2:down matrix_unit(7) 8",
    # Formats of every kind.
    "float8_e4m3fn float8_e5m2 bfloat16 sequential 31",
    "bfloat16 = = pairwise 31",
    "bfloat16 =:down =:up sequential 9",
    "float8_e5m2 =:propagate =:propagate sequential 31",
    "float8_e4m3fn =:saturate =:saturate:up blocked(8) 31",
    "float8_e4m3fnuz = = sequential 8",
    "float4_e2m1fn float6_e2m3fn float6_e3m2fn:stochastic sequential 31",
    "float8_e5m2 e5m10(subnormals=false) e5m10(subnormals=false):odd sequential 9",
    "e5m5 =:flush =:flush sequential 9",
    "binary8p3se = = pairwise 9",
    "binary8p4sf =:toward_zero =:stochastic blocked(3) 8",
    "fixed4.4 = fixed8.8 sequential 31",
    "fixed4.4 =:stochastic fixed8.8:odd pairwise 9",
    "integer8 - integer16:wrap sequential 31",
    "integer4(narrow=true) integer8 integer8:up sequential 9",
    # Operands of any exponent, and formats as wide as the carrier lets them be.
    "- - - sequential 9",
    "- tf32 tf32 sequential 8",
    "- bfloat16:up bfloat16:up pairwise 8",
    "- - e8m20:odd sequential 7 fused",
    "tf32 = =:stochastic blocked(3) 7",
    # float64
    "- binary32 binary32 sequential 9 float64",
    "- - - pairwise 7 float64",
    "binary32 - e9m40:stochastic sequential 8 fused float64",
    "bfloat16 = =:down blocked(3) 8 float64",
)


#: By default one row; else two at a time.
IN_TWOS = [[ROWS[0]]]
IN_TWOS += [pytest.param(ROWS[i : i + 2], marks=pytest.mark.slow) for i in range(1, len(ROWS), 2)]


@pytest.mark.parametrize("some", IN_TWOS, ids=lambda some: "+".join(map(str, some)))
def test_every_element_is_the_exact_sum(some: list[Row]) -> None:
    for row in some:
        check(row)


MODES = [*oracle.DETERMINISTIC, *oracle.STOCHASTIC]
ORDERS = ("sequential", "blocked(8)", "blocked(64)", "pairwise", "matrix_unit(8)")
#: Each order in five of the modes, and so each mode in two or three orders; by default one.
IN_MODES = [("sequential", 9, ["stochastic"])]
IN_MODES += [
    pytest.param(order, 31, [MODES[(2 * i + 5 * j) % len(MODES)] for j in range(5)], marks=pytest.mark.slow)
    for i, order in enumerate(ORDERS)
]


@further
@pytest.mark.parametrize(
    ("order", "k", "modes"), IN_MODES, ids=lambda value: "" if isinstance(value, list) else str(value)
)
def every_order_in_every_mode(order: str, k: int, modes: list[str]) -> None:
    for mode in modes:
        first, product = ("float8_e4m3fn", None) if "unit" in order else ("e5m10", f"e5m10:{mode}")
        check(Row(first, product, f"e5m10:{mode}", order, k))


#: Lengths of one step, of whole blocks, of rests, of powers of two and beside them; the first one by default.
AT_LENGTHS = {
    "pairwise": (3, 1, 7, 8, 9, 31, 64, 129, 257),
    "sequential": (1, 2, 31, 129),
    "blocked(8)": (7, 8, 9, 31, 64, 257),
    "blocked(64)": (31, 64, 129, 257),
    "matrix_unit(8)": (7, 8, 9, 64, 129),
}
LENGTHS = [pytest.param("pairwise", AT_LENGTHS["pairwise"][:1])]
LENGTHS += [pytest.param(order, lengths, marks=pytest.mark.slow) for order, lengths in AT_LENGTHS.items()]


@pytest.mark.parametrize(
    ("order", "lengths"), LENGTHS, ids=lambda value: value if isinstance(value, str) else str(len(value))
)
def test_every_order_at_every_length(order: str, lengths: tuple[int, ...]) -> None:
    for k in lengths:
        first, product = ("float8_e4m3fn", None) if "unit" in order else ("e5m7", "e5m7:stochastic")
        check(Row(first, product, "e6m9:stochastic", order, k))


# -- what a plan claims to know ----------------------------------------------------------------------------------------


def within(values: np.ndarray, r: ValueRange) -> bool:
    """Whether every finite value is one that the range allows."""
    finite = values[np.isfinite(values) & (values != 0)]
    odd = [oracle.from_bits(v, oracle.CARRIERS["float64"]) for v in cases.bits(finite.astype(np.float64))]
    for value in odd:
        assert isinstance(value, Fraction)
        count = abs(value) / oracle.pow2(r.quantum)
        if count.denominator != 1 or abs(value) >= oracle.pow2(r.top):
            return False
        whole = count.numerator
        if (whole // (whole & -whole)).bit_length() > r.precision:
            return False
    return True


@pytest.mark.parametrize("name", ["e5m10", "float8_e4m3fn", "e3m2", "fixed4.4"])
def test_products_and_dots_lie_in_their_ranges(name: str, rng: np.random.Generator) -> None:
    for block in (1, 3, 16):
        check_ranges(name, block, rng)


def check_ranges(name: str, block: int, rng: np.random.Generator) -> None:
    """The exact products of the ends and of random values, and their sums by the carrier in any order."""
    plan = MatmulPlan(MatmulSpec(name, None, "e8m10", f"matrix_unit({block})"), CARRIERS["float32"], 64)
    some = values(name)
    smallest, largest = np.min(np.abs(some[some != 0])), np.max(np.abs(some))
    assert within(np.array([smallest**2, largest**2, smallest * largest]), plan.product)
    a, b = (rng.choice(some, (200, block)).astype(np.float32) for _ in range(2))
    a[0], b[0] = largest, largest
    dots = np.zeros(200, np.float32)
    for k in rng.permutation(block):
        dots = dots + a[:, k] * b[:, k]
    assert within(a.astype(np.float64) * b, plan.product)
    assert within(dots, plan.dot)


@further.first
def products_that_the_carrier_rounds_may_be_anything() -> None:
    plan = MatmulPlan(MatmulSpec("e8m12"), CARRIERS["float32"], 1)
    assert plan.product == plan.dot == carrier_range(CARRIERS["float32"])
    assert MatmulPlan(MatmulSpec("e8m12", "e5m10"), CARRIERS["float32"], 1).product == ValueRange(-24, 11, 16)


test_further = further.test()
