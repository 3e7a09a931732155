"""`jchop.math.round` to decimals: the exact multiple of a power of ten, rounded once by the oracle."""

from __future__ import annotations

import math
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_math
import pytest
from further import Further
from math_draws import result_words
from oracle import Fraction, Special, Value
from oracle_matmul import How, rounded

import jchop as jc

further = Further()

KEY = jax.random.key(0)
HOWS: dict[str, How] = {
    "bfloat16": How(oracle.ieee(8, 7)),
    "e5m10:up": How(oracle.ieee(5, 10), "up"),
    "e5m7:odd": How(oracle.ieee(5, 7), "odd"),
    "e5m5:stochastic": How(oracle.ieee(5, 5), "stochastic"),
    "e8m21:down": How(oracle.ieee(8, 21), "down"),
    "binary32": How(oracle.ieee(8, 23)),
}


def multiple(v: Value, decimals: int) -> Value:
    """The nearest multiple of 10^-decimals, the even one on a tie."""
    if isinstance(v, Special):
        return v
    ten = Fraction(10) ** decimals
    count = math.floor(v * ten)
    rest = v * ten - count
    count += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1)
    return Fraction(count) / ten or (Special.NEG_ZERO if v < 0 else Fraction(0))


def numbers(text: str, dtype: Any = np.float32) -> np.ndarray:
    """Of all sizes, multiples of 1/100 and 5 and 1/8, and the specials."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=200) * 10.0 ** rng.integers(-6, 7, 200)
    parts = [x, np.round(x, 2), rng.integers(-40, 40, 90) / 8, rng.integers(-200, 200, 90) * 5.0]
    parts.append(np.array([0, -0.0, np.inf, np.nan, -np.inf, 3e38, 1e-45, -1e-45, 2.0**23 - 0.5]))
    return np.asarray(jc.round_to_format(np.concatenate(parts).astype(dtype), text.replace(":stochastic", "")))


#: Each format with a fraction and a whole multiple, and each number of decimals.
DECIMALS = {
    "bfloat16": (1, -10),
    "e5m10:up": (2, -1),
    "e5m7:odd": (6, -2),
    "e5m5:stochastic": (1, -1),
    "e8m21:down": (2, 10, -10),
    "binary32": (6, 10, -2),
}


@further
@pytest.mark.parametrize("text", HOWS)
def the_exact_multiple_is_rounded_once(text: str) -> None:
    x = numbers(text)
    words = result_words(KEY, x.shape, 1)
    carrier = oracle.CARRIERS["float32"]
    for decimals in DECIMALS[text]:
        want = [
            rounded(multiple(v, decimals), HOWS[text], carrier, int(word))
            for v, word in zip(oracle_math.values(x), words, strict=True)
        ]
        expected = oracle_math.array(want)
        cases.assert_bits(expected, np.asarray(jc.math.round(x, text, KEY, decimals=decimals)), cases.bits(expected))


@further.first
@pytest.mark.parametrize("decimals", [2, 22, -3])
def float64(decimals: int) -> None:
    x, carrier = numbers("e11m40", np.float64), oracle.CARRIERS["float64"]
    how = How(oracle.ieee(11, 40), "up")
    want = [rounded(multiple(v, decimals), how, carrier, 0) for v in oracle_math.values(x)]
    expected = oracle_math.array(want, carrier)
    cases.assert_bits(expected, np.asarray(jc.math.round(x, "e11m40:up", decimals=decimals)), cases.bits(expected))


@pytest.mark.smoke
def test_without_decimals_and_where_the_carrier_is_wrong() -> None:
    np.testing.assert_array_equal(jc.math.round([2.5, -0.3], "bfloat16"), [2, -0.0])
    x = np.float32(0.015)  # 100 x is 1.4999999664723873, and 1.5 in float32
    assert jc.math.round(x, "binary32", decimals=2) == np.float32(0.01) != jnp.round(x, 2)
    assert jc.math.round(25, "binary32", decimals=-1) == 20


@further
def transforms() -> None:
    x = jnp.asarray(numbers("bfloat16")[:40]).reshape(4, 10)
    text, keys = "e5m3:stochastic", jax.random.split(KEY, 4)
    each = jax.jit(jax.vmap(lambda x, key: jc.math.round(x, text, key, decimals=-1)))(x, keys)
    np.testing.assert_array_equal(each[3], jc.math.round(x[3], text, keys[3], decimals=-1))
    assert not jax.grad(lambda x: jc.math.round(x, "e5m3", decimals=1).sum())(x[0]).any()


test_further = further.test()
