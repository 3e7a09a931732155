"""Quotients by prepared divisors against exact rationals: `jchop._core.arithmetic.double_word`."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further

from jchop._common.bit_ops import CARRIERS, low_mask
from jchop._core.arithmetic import double_word

further = Further()

COUNT = 300


pytestmark = pytest.mark.usefixtures("x64")


def magnitudes(name: str, rng: np.random.Generator) -> np.ndarray:
    """Bits of positive finite numbers: of every exponent, near 1, powers of two and the numbers next to them, ends."""
    carrier = CARRIERS[name]
    one = carrier.bias << carrier.fraction
    fields = rng.integers(0, 2 * carrier.bias + 1, COUNT) << carrier.fraction
    drawn = [
        rng.integers(1, carrier.inf, COUNT),
        one + rng.integers(-(3 << carrier.fraction), 3 << carrier.fraction, 2 * COUNT),
        np.clip(fields + rng.integers(-1, 2, COUNT), 1, carrier.inf - 1),
        np.array([1, 2, 3, (1 << carrier.fraction) - 1, 1 << carrier.fraction, carrier.inf - 1] * 10),
    ]
    return rng.permutation(np.concatenate(drawn)).astype(carrier.work)


def value(bits: int, name: str) -> Fraction:
    found = oracle.from_bits(bits, oracle.CARRIERS[name])
    assert isinstance(found, Fraction)
    return found


@pytest.mark.parametrize("name", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_quotients_are_exact(name: str, rng: np.random.Generator) -> None:
    """The leading bits, the word after them and whether more follow; and the same rounded to odd."""
    carrier, width = CARRIERS[name], CARRIERS[name].work_width
    x, d = magnitudes(name, rng), magnitudes(name, rng)
    assert len(x) == len(d)

    @jax.jit
    def run(x: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        divisor = double_word.divisor_of(d, carrier)
        v = double_word.exact_quotient(jnp.zeros_like(x), x, x == x, divisor, carrier)
        odd = [double_word.odd_quotient(x, divisor, carrier, ends) for ends in (False, True)]
        return v.magnitude, v.rest, v.sticky, v.inexact, *odd

    columns = [np.asarray(column).tolist() for column in run(x, d)]
    least, beyond = 1 << carrier.fraction, Fraction(2) ** (carrier.bias + 1)
    seen = set()
    for a, b, *got in zip(x.tolist(), d.tolist(), *columns, strict=True):
        exact = value(a, name) / value(b, name)
        kind = "small" if exact < value(least, name) else "large" if exact >= beyond else "plain"
        seen.add(kind)
        if kind == "large":
            assert got[0] >> carrier.fraction == got[4] >> carrier.fraction == 2 * carrier.bias
            assert got[5] == carrier.inf - 1
            continue
        low, nu = oracle.neighbours(oracle.ieee(*oracle_parts(name)), exact)
        assert got[5] == low | (nu > 0), (a, b)
        if kind == "small":
            assert got[0] == least and got[4] | 1 == least | 1
            continue
        rest, more = divmod(nu * 2**width, 1)
        assert got == [low, int(rest), more > 0, nu > 0, low | (nu > 0), low | (nu > 0)], (a, b)
    assert seen == {"small", "large", "plain"}


def oracle_parts(name: str) -> tuple[int, int]:
    return oracle.CARRIERS[name].e, oracle.CARRIERS[name].m


@pytest.mark.smoke
def test_what_is_not_plain_stays() -> None:
    carrier = CARRIERS["float32"]
    bits = np.array([0, carrier.inf, carrier.nan], np.int32)

    @jax.jit
    def run(bits, divisor):
        v = double_word.exact_quotient(bits, bits, bits < 0, double_word.divisor_of(divisor, carrier), carrier)
        return v.magnitude, v.rest.any() | v.inexact.any() | jnp.any(v.sticky)

    magnitude, rest = run(bits, np.full(3, 5, np.int32))
    assert magnitude.tolist() == bits.tolist() and not rest


@further.first
@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("name", "bits"), [("float32", 3), ("float64", 64), ("float32", 64), ("float64", 3)])
def divisors_that_are_products(name: str, bits: int, rng: np.random.Generator) -> None:
    """Integers of 3 bits times powers of two times numbers of a carrier, as a significand and an exponent."""
    carrier = CARRIERS[name]
    wide = double_word.divisor_bits(carrier)
    own = min(bits, carrier.fraction, wide - 3 - 1)
    count, exponent = rng.integers(4, 8, COUNT), rng.integers(-20, 20, COUNT)
    field = rng.integers(40, 2 * carrier.bias - 40, COUNT)
    other = (field << carrier.fraction) + (rng.integers(0, 1 << own, COUNT) << carrier.fraction - own)
    count, exponent, other = (jnp.asarray(part, carrier.work) for part in (count, exponent, other))
    made = double_word.divisor_of_product(count, 3, exponent, other, own, carrier)
    products = [
        n * Fraction(2) ** e * value(b, name)
        for n, e, b in zip(count.tolist(), exponent.tolist(), other.tolist(), strict=True)
    ]
    kept = low_mask(wide)
    for exact, n, f in zip(products, made.significand.tolist(), made.field.tolist(), strict=True):
        assert n >> wide - 1 == 1 and n <= kept
        assert n * Fraction(2) ** (f - carrier.bias - wide + 1) == exact


@pytest.mark.in_turn(64)
@pytest.mark.parametrize(("name", "count"), [("float32", 3), ("float32", 127), ("float64", 1023)])
def test_quotients_by_constants_are_exact(name: str, count: int, rng: np.random.Generator) -> None:
    carrier = CARRIERS[name]
    assert double_word.is_short_divisor(count, carrier) and not double_word.is_short_divisor(count << 10 | 1, carrier)
    # Multiples of the constant give quotients that are exact, and with half a unit in the last place ties.
    multiples = count * rng.integers(1, (1 << carrier.fraction + 1) // count, 100)
    x = np.concatenate([[0], magnitudes(name, rng)[:300], multiples]).astype(carrier.work)
    for exponent in (-9, 0, 8):
        nearest, odd = (
            np.asarray(
                jax.jit(double_word.quotient_by_constant, static_argnums=(1, 2, 3, 4))(x, count, exponent, carrier, o)
            )
            for o in (False, True)
        )
        assert nearest[0] == odd[0] == 0
        for a, *got in zip(x[1:].tolist(), nearest[1:].tolist(), odd[1:].tolist(), strict=True):
            exact = value(a, name) / count / Fraction(2) ** exponent
            if exact >= Fraction(2) ** (carrier.bias + 1):
                assert got == [carrier.inf, carrier.inf - 1]
                continue
            low, nu = oracle.neighbours(oracle.ieee(*oracle_parts(name)), exact)
            up = 2 * nu > 1 or (2 * nu == 1 and low & 1)
            assert got == [low + bool(up), low | (nu > 0)], (a, exponent)


test_further = further.test()
