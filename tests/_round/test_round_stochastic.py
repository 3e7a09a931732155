"""Stochastic rounding: the draws decide exactly as defined, and the observed frequencies are the exact ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from _round.test_round_values import build, by_itself, round_as
from each_case import each
from further import Further
from oracle import CARRIERS, PROPORTIONAL, STOCHASTIC

import jchop as jc

further = Further()

DRAWS = 1 << 13
POSITIONS = 64
NO_SUBNORMALS = dataclasses.replace(cases.NAMED["float8_e4m3"], subnormals=False)

#: Formats that tell an overflow from the largest finite value, so that the overflow step can be observed.
OBSERVED: dict[str, oracle.FloatSet] = {
    "float8_e4m3fn": cases.NAMED["float8_e4m3fn"],
    "float8_e5m2": cases.NAMED["float8_e5m2"],
    "bfloat16": cases.NAMED["bfloat16"],
    "binary16": cases.NAMED["binary16"],
    "binary8p3se": cases.P3109["binary8p3se"],
    "e4m3 without subnormals": NO_SUBNORMALS,
}


def words_of(key: jax.Array, shape: tuple[int, ...], carrier: str) -> np.ndarray:
    """The random words of a call on an array of this shape, as uint64 numbers, and their width: 64 for float64."""
    if carrier != "float64":
        return np.asarray(jc.random_bits(key, shape, width=32)).astype(np.uint64)
    with jax.enable_x64(True):
        return np.asarray(jc.random_bits(key, shape, width=64)).astype(np.uint64)


def width_of(carrier: str) -> int:
    return 64 if carrier == "float64" else 32


def most_bits(mode: str, carrier: str) -> int:
    """The random bits of a call that does not say how many: B and C look one bit further than they draw."""
    return width_of(carrier) - (mode in ("stochastic_b", "stochastic_c"))


def positions(fmt: oracle.FloatSet, carrier: str, rng: np.random.Generator) -> tuple[np.ndarray, list[Fraction]]:
    """64 numbers of the carrier and their discarded fractions.

    12 subnormals of the format (or numbers below its smallest normal), 10 in the step above the largest finite value,
    4 values of the format itself, and 38 anywhere; signs alternate.
    """
    top, fine = fmt.top(False), 10
    first_normal = 2**fmt.m if fmt.subnormals else 1
    index = np.concatenate(
        [
            rng.integers(0, first_normal, 12),
            np.full(10, top),
            rng.integers(0, top, 4),
            rng.integers(first_normal, top, POSITIONS - 26),
        ]
    )
    part = rng.integers(1, 2**fine, POSITIONS)
    part[:4] = part[12:16] = [1, 2**fine - 1, 2 ** (fine - 1), 3]  # rare, frequent, even, rare
    part[22:26] = 0
    numbers, fractions = [], []
    for k, (i, p) in enumerate(zip(index.tolist(), part.tolist(), strict=True)):
        low, high = fmt.value(i), fmt.value(i + 1)
        nu = Fraction(p, 2**fine)
        magnitude = low + nu * (high - low)
        word = oracle.to_bits(magnitude, CARRIERS[carrier])
        numbers.append(word | (CARRIERS[carrier].sign if k % 2 else 0))
        fractions.append(nu)
    return np.array(numbers, CARRIERS[carrier].words).view(cases.DTYPES[carrier]), fractions


#: With all random bits B and C differ from A by less than can be seen, so two formats are enough for them.
FREQUENCIES = [
    (name, mode)
    for name in OBSERVED
    for mode in STOCHASTIC
    if mode == "stochastic" or name == "float8_e4m3fn" or (mode, name) == ("stochastic_equal", "bfloat16")
]


@pytest.mark.in_turn(40)
@pytest.mark.parametrize(("name", "mode"), FREQUENCIES)
@pytest.mark.parametrize("carrier", ["float32", "float64"])
def test_observed_frequencies_are_exact(name, carrier, mode):
    fmt = OBSERVED[name]
    x, fractions = positions(fmt, carrier, np.random.default_rng(sum(map(ord, name))))
    many = np.repeat(x, DRAWS)
    key = jax.random.key(1 + sum(map(ord, name + carrier + mode)))
    kind = "jax" if carrier == "float32" else "numpy"
    spec = jc.Spec(build(fmt), rounding=mode)
    out = jc.round_to_format(many if kind == "numpy" else jnp.asarray(many), spec, key)
    got = cases.bits(np.asarray(out)).reshape(POSITIONS, DRAWS)
    exact, n = cases.batch(x), most_bits(mode, carrier)
    never = exact.round_drawn(fmt, "stochastic_equal", 1, np.zeros(POSITIONS, np.uint64))
    always = exact.round_drawn(fmt, "stochastic_equal", 1, np.ones(POSITIONS, np.uint64))
    for k, nu in enumerate(fractions):
        p = oracle.probability_away(mode, nu, n)
        away = same_bits(got[k], always[k], carrier)
        if nu == 0:
            assert always[k] == never[k] and away.all(), f"{x[k]} is in the format and moved"
            continue
        assert always[k] != never[k]
        assert (away | same_bits(got[k], never[k], carrier)).all(), f"{x[k]} became something but its two neighbours"
        count, mean, sigma = int(away.sum()), float(DRAWS * p), math.sqrt(DRAWS * p * (1 - p))
        assert abs(count - mean) <= 4 * sigma, f"{x[k]}: {count} of {DRAWS} draws away, expected {mean} +- {sigma}"


def same_bits(got: np.ndarray, expected: np.integer, carrier: str) -> np.ndarray:
    """Where the bits are those expected; every NaN is every other."""
    differ = np.ones(len(got), bool)
    where = cases.differences(got.view(cases.DTYPES[carrier]), np.full(len(got), expected), CARRIERS[carrier])
    differ[where] = False
    return differ


# --- the definitions, given the words -----------------------------------------------------------------------------

GIVEN: dict[str, oracle.FloatSet | oracle.FixedSet] = {
    "float8_e4m3fn": cases.NAMED["float8_e4m3fn"],
    "float8_e5m2": cases.NAMED["float8_e5m2"],
    "float4_e2m1fn": cases.NAMED["float4_e2m1fn"],
    "e4m3 without subnormals": NO_SUBNORMALS,
    "binary8p1ue": cases.P3109["binary8p1ue"],
    "fixed4.4": cases.FIXED["fixed4.4"],
}


def check_given_words(
    fmt: oracle.FloatSet | oracle.FixedSet,
    carrier: str,
    mode: str,
    n: int | None,
    *,
    overflow: str = "ieee",
    flush: bool = False,
    size: int = 2_000,
    public: bool = False,
) -> None:
    """Compares bit for bit with the oracle, R being the top n bits of the words of the stream.

    The body of the rounding is given the words; the `public` function draws them itself.
    """
    x = cases.adversarial(fmt, carrier, size, np.random.default_rng(size + (n or 0)))
    key = jax.random.key(1000 + (n or 0))
    drawn = n or most_bits(mode, carrier)
    words = words_of(key, x.shape, carrier)
    expected = cases.batch(x).round_drawn(
        fmt, mode, drawn, words >> np.uint64(width_of(carrier) - drawn), overflow, flush
    )
    spec = jc.Spec(build(fmt), rounding=mode, random_bits=n, overflow=overflow, flush=flush)
    if public:
        got = np.asarray(jc.round_to_format(x, spec, key))
        own = jc.round_to_format(x, spec, bits=words >> np.uint64(width_of(carrier) - drawn))
        cases.assert_bits(x, np.asarray(own), expected, f"{spec} on {carrier}, with bits")
    else:
        got = by_itself(x, spec, words.astype(f"uint{width_of(carrier)}"))
    cases.assert_bits(x, got, expected, f"{spec} on {carrier}")


@further
@each(("name", "mode"), itertools.product(["float8_e4m3fn", "e4m3 without subnormals", "fixed4.4"], PROPORTIONAL))
def few_bits_as_defined(name, mode):
    for n in range(1, 9):
        overflow = cases.FLOAT_OVERFLOWS[n % 3]
        flush = name == "float8_e4m3fn" and n % 4 == 0
        check_given_words(GIVEN[name], "float32", mode, n, overflow=overflow, flush=flush)


@pytest.mark.in_turn(60)
@pytest.mark.parametrize(
    ("name", "carrier", "mode"),
    [
        (name, carrier, STOCHASTIC[(i + k) % 4])
        for i, (name, fmt) in enumerate(GIVEN.items())
        for k, carrier in enumerate(CARRIERS)
        if oracle.held(fmt, CARRIERS[carrier])
    ],
)
def test_all_bits_as_defined(name, mode, carrier):
    """One mode as a call of the public function, which draws the words; the others by the body, given them."""
    for one in STOCHASTIC:
        check_given_words(GIVEN[name], carrier, one, None, public=one == mode)


@further
@each("mode", PROPORTIONAL)
def any_number_of_bits_on_float64(mode):
    for n in (1, 5, 11, 23, 24, 25, 31, 32, 33, 52, 53, 62, 63, 64):
        if n <= most_bits(mode, "float64"):
            check_given_words(GIVEN["float8_e5m2"], "float64", mode, n)


@each("spec", ["e4m3:stochastic_c", "int8(channel=0):stochastic", "mxfp4:stochastic_b:random_bits=8"])
def test_bits_take_the_place_of_a_key(spec: str) -> None:
    """The words of a key, given by hand: eager, compiled and batched, of JAX and of NumPy; higher bits are ignored."""
    x, key = jnp.linspace(-3, 300, 35).reshape(5, 7), jax.random.key(3)
    count = jc.Spec(spec).random_bits or most_bits(jc.Spec(spec).rounding.value, "float32")
    bits = jc.random_bits(key, x.shape) >> (32 - count)
    expected = np.asarray(jc.round_to_format(x, spec, key))
    rounded = functools.partial(jc.round_to_format, spec=spec)
    for got in (
        rounded(x, bits=bits | jnp.uint32(1 << count if count < 32 else 0)),
        jax.jit(rounded)(x, bits=bits),
        jax.vmap(lambda x, bits: rounded(x, bits=bits))(x[None], bits[None])[0],
        rounded(np.asarray(x), bits=np.asarray(bits)),
    ):
        assert np.array_equal(got, expected)


@each(
    ("spec", "arguments", "message"),
    [
        ("e4m3", {}, "bits have no effect under rounding='nearest_even'"),
        ("e4m3:sr", {"key": jax.random.key(0)}, "bits take the place of key"),
        ("e4m3:sr", {"offset": 3}, "bits have no offset"),
        ("e4m3:sr", {"bits": np.ones(2, np.uint32)}, r"bits has shape \(2,\) and dtype uint32; it must be integers"),
        ("e4m3:sr", {"bits": np.ones(4, np.float32)}, "and dtype float32; it must be integers of shape"),
        ("int4(group=4,sparse=2:4):sr", {}, "bits are not for the sparse spec"),
        ("e4m3:sr", {"x": np.ones(4, np.complex64)}, "bits are for real numbers"),
        (
            "e4m3:sr:gradient=bfloat16",
            {"x": np.ones(4, np.float16)},
            "x has dtype float16, which cannot hold every result of spec='bfloat16'",
        ),
    ],
)
def test_bits_are_refused(spec: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jc.round_to_format(**({"x": np.ones(4, np.float32), "spec": spec, "bits": np.ones(4, np.uint32)} | arguments))


@each("carrier", ["bfloat16", "float32", "float64"])
@each("mode", PROPORTIONAL)
def test_more_bits_than_there_are_is_refused(mode, carrier):
    n = most_bits(mode, carrier) + 1
    with pytest.raises(ValueError, match=f"random_bits.*{n}"):
        x = np.zeros(3, cases.DTYPES[carrier])
        jc.round_to_format(x, jc.Spec("float8_e5m2", rounding=mode, random_bits=n), jax.random.key(0))


@pytest.mark.parametrize(
    ("mode", "most", "size"),
    [("stochastic", 4, 2_000), *(pytest.param(mode, 32, 20_000, marks=pytest.mark.slow) for mode in PROPORTIONAL)],
)
def test_every_number_of_bits_as_defined(mode, most, size):
    for n, carrier in zip(range(1, most + 1), itertools.cycle(CARRIERS), strict=False):
        n = min(n, most_bits(mode, carrier))
        names = [name for name, fmt in GIVEN.items() if oracle.held(fmt, CARRIERS[carrier])]
        for name in (names[n % len(names)], names[(n + 2) % len(names)]):
            flush = name == "float8_e5m2" and n % 2 == 0
            overflow = cases.FLOAT_OVERFLOWS[n % 3]
            check_given_words(GIVEN[name], carrier, mode, n, overflow=overflow, flush=flush, size=size)


@each("carrier", ["float32", "float64"])
def test_a_half_with_bits_below_the_word_is_more_than_a_half(carrier: str) -> None:
    """rne(nu 2^N) of mode C below the smallest value, where nu has more bits than a word.

    Only the largest R tells it from a tie; a stream would have to be drawn from 2^N times to meet it.
    """
    fmt, width = cases.NAMED["float8_e4m3fn"], width_of(carrier)
    kind, n = cases.DTYPES[carrier], width - 8
    least = float(fmt.value(1))
    tie, last = least * 2.0 ** -(n + 1), np.finfo(kind).eps
    x = np.array([tie, tie * (1 + last), tie * (1 - last / 2), 3 * tie, 5 * tie, 2 * tie * (1 + last), tie / 2], kind)
    words = np.array([*((1 << width) - (r << 8) | 255 for r in (1, 2, 3)), 0], f"uint{width}")
    spec = jc.Spec(build(fmt), "stochastic_c", random_bits=n)
    for word in words:
        drawn = np.full(x.shape, word >> np.uint64(8))
        got = by_itself(x, spec, np.full(x.shape, word))
        cases.assert_bits(x, got, cases.batch(x).round_drawn(fmt, "stochastic_c", n, drawn))


@further
@each("mode", PROPORTIONAL)
def every_draw_of_a_few_bits(mode: str) -> None:
    """As many random bits as are dropped, more and fewer: each number meets every R, where one alone may decide."""
    fmt, n = oracle.ieee(4, 6), 5
    some = np.random.default_rng(3).integers(3 << 10, 17 << 10, 1500).astype(np.uint16).view(np.float16)
    x, drawn = np.repeat(some, 1 << n), np.tile(np.arange(1 << n, dtype=np.uint32), len(some))
    spec = jc.Spec(build(fmt), mode, random_bits=n)
    got = by_itself(x, spec, drawn << 32 - n | 1)
    cases.assert_bits(x, got, cases.batch(x).round_drawn(fmt, mode, n, drawn))


@further
@each(("name", "mode"), itertools.product(["ternary", "uneven"], STOCHASTIC))
def codebooks_given_the_words(name, mode):
    levels = cases.CODEBOOKS[name]
    fmt, c = oracle.codebook(levels), CARRIERS["float32"]
    # Multiples of 2^-10 a little beyond the ends: nu is exact in the carrier, whose arithmetic decides between levels.
    low, high = int(levels[0] * 1024) - 300, int(levels[-1] * 1024) + 300
    x = (np.random.default_rng(7).integers(low, high, 160) * 2.0**-10).astype(np.float32)
    most = most_bits(mode, "float32")
    for n in (most,) if mode == "stochastic_equal" else (1, 4, most):
        key = jax.random.key(n)
        words = words_of(key, x.shape, "float32").astype(np.uint32)
        r = (words >> np.uint32(32 - n)).tolist()
        truth = [
            oracle.round_exact(fmt, oracle.from_bits(int(p), c), mode, n=n, r=word)
            for p, word in zip(cases.bits(x), r, strict=True)
        ]
        expected = np.array([oracle.to_bits(v, c) for v in truth], c.words)
        spec = jc.Spec(jc.formats.CodebookFormat(levels), mode, random_bits=None if n == most else n)
        cases.assert_bits(x, by_itself(x, spec, words), expected, f"{name} {mode} {n} bits")


@each(("x", "word", "want"), [(0.75, 0, 1.0), (0.25, 1, 0.0), (0.8, 0, 1.0), (0.7, 0, 0.0)])
def test_a_tie_of_codebooks_goes_by_the_word(x: float, word: int, want: float) -> None:
    """Mode C rounds nu 2^N to nearest, a tie to even, and adds R: one random bit, levels 0 and 1."""
    assert (
        oracle.round_exact(oracle.codebook([0, 1]), Fraction(np.float32(x).item()), "stochastic_c", n=1, r=word) == want
    )
    spec = jc.Spec(jc.formats.CodebookFormat((0.0, 1.0)), "stochastic_c", random_bits=1)
    assert by_itself(np.array([x], np.float32), spec, np.array([word << 31], np.uint32)).item() == want


@further.first
def the_smallest_negative_level_has_its_sign():
    spec = jc.Spec(jc.formats.CodebookFormat((-(2.0**-149), 0.0, 1.0)))
    got = jc.round_to_format(np.array([-1.0, 0.0, 1.0], np.float32), spec)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), [0x80000001, 0, 0x3F800000])


def test_unbiased_mean_of_a_sum():
    """The mean of 2^20 roundings of numbers far below one step of the format is theirs, within 4 sigma."""
    x = np.full(1 << 20, 1 + 3 * 2.0**-12, np.float32)
    out = round_as_mean(x)
    nu = 3 * 2.0**-12 / 2.0**-3
    sigma = 2.0**-3 * math.sqrt(nu * (1 - nu) / len(x))
    assert abs(out - float(x[0])) <= 4 * sigma


def round_as_mean(x: np.ndarray) -> float:
    out = jc.round_to_format(x, "float8_e4m3fn:stochastic", jax.random.key(3))
    return float(np.asarray(out).astype(np.float64).mean())


@pytest.mark.smoke
def test_values_of_the_format_never_move():
    fmt = cases.NAMED["float8_e5m2"]
    x = np.tile(np.array([float(v) for v in oracle.values(fmt)], np.float32), 8)
    word = np.random.default_rng(0).integers(0, 1 << 32, x.shape, dtype=np.uint32)
    for mode in STOCHASTIC:
        cases.assert_bits(x, by_itself(x, jc.Spec(build(fmt), rounding=mode), word), cases.bits(x), mode)


def test_deterministic_modes_need_no_key_and_ignore_none():
    x = np.linspace(-2, 2, 33, dtype=np.float32)
    a = round_as("numpy", x, jc.Spec("float8_e4m3fn"))
    b = np.asarray(jc.round_to_format(x, "float8_e4m3fn", jax.random.key(0)))
    cases.assert_bits(x, b, cases.bits(a), "a key changes nothing")


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("carrier", ["float32", "float64"])
def test_observed_frequencies_of_a_codebook(carrier):
    levels = cases.CODEBOOKS["nf4"]
    fmt, c = oracle.codebook(levels), CARRIERS[carrier]
    x = np.random.default_rng(3).uniform(-1, 1, 24).astype(cases.DTYPES[carrier])
    many = np.repeat(x, DRAWS)
    out = jc.round_to_format(many, jc.Spec(jc.formats.CodebookFormat(levels), rounding="stochastic"), jax.random.key(5))
    for got, number in zip(np.asarray(out).reshape(-1, DRAWS), x, strict=True):
        exact = oracle.from_bits(int(cases.bits(np.array([number]))[0]), c)
        low, high = (oracle.round_exact(fmt, exact, mode) for mode in ("down", "up"))
        assert isinstance(exact, Fraction) and isinstance(low, Fraction) and isinstance(high, Fraction)
        p = (exact - low) / (high - low)
        count, sigma = int((got == float(high)).sum()), math.sqrt(DRAWS * p * (1 - p))
        assert count + int((got == float(low)).sum()) == DRAWS
        assert abs(count - DRAWS * p) <= 4 * sigma


test_further = further.test()
