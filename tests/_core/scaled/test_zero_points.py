"""Differences over prepared divisors against exact rationals: `jchop._core.scaled.zero_points`."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jchop as jc
from jchop._common.bit_ops import CARRIERS
from jchop._core.arithmetic.double_word import divisor_of
from jchop._core.scaled.zero_points import _quotient_of_difference

COUNT, NAME = 600, "float32"


def test_quotients_of_differences_are_exact(rng: np.random.Generator) -> None:
    """The leading bits, the word after them and whether more follow, of terms whose difference two words hold."""
    carrier, width = CARRIERS[NAME], CARRIERS[NAME].work_width
    exponent = rng.integers(-60, 60, COUNT)
    near = exponent + rng.integers(-30, 31, COUNT)
    x, y, d = (
        (np.ldexp(rng.integers(1 << 23, 1 << 24, COUNT), e - 23) * rng.choice([-1, 1], COUNT)).astype(NAME)
        for e in (exponent, near, rng.integers(-30, 30, COUNT))
    )
    d = np.abs(d)
    y[:50] = x[:50]
    y[50:150] = np.nextafter(x[50:150], np.float32(0))
    x[150:200], y[200:250] = 0, 0
    d[250:350] = np.ldexp(1.0, rng.integers(-30, 30, 100)).astype(NAME)

    @jax.jit
    def run(x: jax.Array, y: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        v, some = _quotient_of_difference(x, y, divisor_of(d.view(carrier.work), carrier), carrier)
        return v.sign, v.magnitude, v.rest, v.sticky, v.inexact, some

    columns = [np.asarray(column).tolist() for column in run(x, y, d)]
    terms = zip(*(map(Fraction, part.tolist()) for part in (x, y, d)), strict=True)
    for (a, b, c), sign, *got, some in zip(terms, *columns, strict=True):
        exact = (a - b) / c
        assert some is (exact != 0)
        if not exact:
            continue
        low, nu = oracle.neighbours(oracle.ieee(8, 23), abs(exact))
        rest, more = divmod(nu * 2**width, 1)
        assert (sign != 0) is (exact < 0)
        assert got == [low, int(rest), more > 0, nu > 0], (a, b, c)


def test_a_fit_has_stages() -> None:
    """As one loop the compiler of JAX 0.12 takes a minute for it. The ends and steps of a quotient are apart."""
    lowered = jax.jit(lambda x: jc.fit_scale(x, "uint8(group=4,zero_point=float)")).lower(jnp.zeros((64, 4)))
    assert lowered.as_text().count("optimization_barrier") >= 6
