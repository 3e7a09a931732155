"""Random draws in an emulated function: one operation of the carrier, rounded once, never to an excluded end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further
from jax import lax, random

import jchop as jc

further = Further()

KEY, N = random.key(7), (3000,)
#: Results are those of the carrier, rounded once. Arguments are values of every format.
DRAWS: dict[str, Callable[[jax.Array], Any]] = {
    "normal": lambda key: random.normal(key, N),
    "exponential": lambda key: random.exponential(key, N),
    "gumbel": lambda key: random.gumbel(key, N),
    "laplace": lambda key: random.laplace(key, N),
    "cauchy": lambda key: random.cauchy(key, N),
    "logistic": lambda key: random.logistic(key, N),
    "rayleigh": lambda key: random.rayleigh(key, 1.5, N),
    "weibull": lambda key: random.weibull_min(key, 1.5, 2.0, N),
    "pareto": lambda key: random.pareto(key, 3.0, N),
    "lognormal": lambda key: random.lognormal(key, 0.5, N),
    "wald": lambda key: random.wald(key, 1.0, N),
    "triangular": lambda key: random.triangular(key, 0.0, 0.5, 1.0, N),
    "bernoulli": lambda key: random.bernoulli(key, 0.125, N),
    "categorical": lambda key: random.categorical(key, jnp.array([0.5, 1.5, 0.0]), shape=N),
    "choice": lambda key: random.choice(key, 3, N, p=jnp.array([0.5, 0.25, 0.25])),
    "permutation": lambda key: random.permutation(key, jnp.arange(8.0)),
    "multivariate": lambda key: random.multivariate_normal(key, jnp.ones(2), jnp.eye(2) * 1.5, N),
    "half": lambda key: random.normal(key, N, jnp.bfloat16),
}
SLOW: dict[str, Callable[[jax.Array], Any]] = {
    "gamma": lambda key: random.gamma(key, 1.5, N),
    "beta": lambda key: random.beta(key, 1.5, 3.0, N),
    "t": lambda key: random.t(key, 3.0, N),
    "dirichlet": lambda key: random.dirichlet(key, jnp.ones(3), N),
    "poisson": lambda key: random.poisson(key, 3.0, N),
    "binomial": lambda key: random.binomial(key, 10.0, 0.25, N),
    "ball": lambda key: random.ball(key, 3),
    "orthogonal": lambda key: random.orthogonal(key, 3),
    "geometric": lambda key: random.geometric(key, 0.25, N),
    "maxwell": lambda key: random.maxwell(key, N),
}


def check_rounded_once(draws: dict[str, Callable[[jax.Array], Any]], spec: str) -> None:
    fun = lambda key: {name: draw(key) for name, draw in draws.items()}  # noqa: E731
    got, want = jax.jit(jc.emulate(fun, spec))(KEY), jax.jit(fun)(KEY)
    for name, value in want.items():
        value = jc.round_to_format(value, spec) if jnp.issubdtype(value.dtype, jnp.floating) else value
        np.testing.assert_array_equal(got[name], value, name)


@further
@pytest.mark.parametrize(
    ("draws", "spec"),
    [
        ({name: DRAWS[name] for name in ("normal", "bernoulli", "half")}, "bfloat16"),
        pytest.param(DRAWS, "e4m3", marks=pytest.mark.slow),
        pytest.param(SLOW, "e5m2:toward_zero", marks=pytest.mark.slow),
    ],
    ids=["few", "all", "by loops"],
)
def draws_are_the_carriers_rounded_once(draws: dict[str, Callable[[jax.Array], Any]], spec: str) -> None:
    fun = lambda key: {name: draw(key) for name, draw in draws.items()}  # noqa: E731
    got, want = jax.jit(jc.emulate(fun, spec))(KEY), jax.jit(fun)(KEY)
    for name, value in want.items():
        value = jc.round_to_format(value, spec) if jnp.issubdtype(value.dtype, jnp.floating) else value
        np.testing.assert_array_equal(got[name], value, name)


@further
@pytest.mark.parametrize(
    ("spec", "below_one", "above"), [("bfloat16", 1 - 2**-8, 1 + 2**-7), ("e4m3", 1 - 2**-4, 1.125)]
)
@pytest.mark.in_turn(20)
def ends_that_are_excluded(spec: str, below_one: float, above: float) -> None:
    """What would be an end is the value next to it; all else is what rounding gives."""
    n = (20000,)

    def fun(key: jax.Array) -> Any:
        keys, rows = random.split(key), jnp.array([0.0, 0.5])
        return (
            random.uniform(key, n),
            random.truncated_normal(key, -1.0, 1.0, n),
            jax.vmap(lambda key, low: random.uniform(key, (9999,), minval=low))(keys, rows),
            random.uniform(key, n, minval=1.0, maxval=above),
            random.truncated_normal(key, 1.0, above, (50,)),  # no value lies between
        )

    uniform, normal, rows, one, none = jax.jit(jc.emulate(fun, spec))(KEY)
    plain = jax.jit(fun)(KEY)
    for got, want, least, largest in (
        (uniform, plain[0], 0, below_one),
        (normal, plain[1], -below_one, below_one),
        (rows, plain[2], 0, below_one),
    ):
        rounded = jc.round_to_format(want, spec)
        assert float(rounded.max()) == 1  # so the test can fail
        np.testing.assert_array_equal(got, jnp.clip(rounded, least, largest))
    assert set(np.unique(one)) == {1.0}
    assert set(np.unique(none)) == {1.0, above}


#: Draws of JAX, the distribution in `scipy.stats` and its arguments, and whether its ends are excluded, so that no draw
#: is rounded to one of them.
EXACT: dict[str, tuple[Callable[[jax.Array, tuple[int, ...]], Any], str, tuple[float, ...], bool]] = {
    "uniform": (random.uniform, "uniform", (), True),
    "normal": (random.normal, "norm", (), False),
    "truncated_normal": (lambda key, n: random.truncated_normal(key, -1.0, 1.0, n), "truncnorm", (-1, 1), True),
    "exponential": (random.exponential, "expon", (), False),
    "laplace": (random.laplace, "laplace", (), False),
    "logistic": (random.logistic, "logistic", (), False),
    "gumbel": (random.gumbel, "gumbel_r", (), False),
    "cauchy": (random.cauchy, "cauchy", (), False),
    "rayleigh": (lambda key, n: random.rayleigh(key, 1.5, n), "rayleigh", (0, 1.5), False),
    "weibull_min": (lambda key, n: random.weibull_min(key, 1.5, 2.0, n), "weibull_min", (2, 0, 1.5), False),
    "pareto": (lambda key, n: random.pareto(key, 3.0, n), "pareto", (3,), False),
    "lognormal": (lambda key, n: random.lognormal(key, 0.5, n), "lognorm", (0.5,), False),
    "wald": (lambda key, n: random.wald(key, 1.0, n), "invgauss", (1,), False),
    "triangular": (lambda key, n: random.triangular(key, 0.0, 0.5, 1.0, n), "triang", (0.5,), False),
    "maxwell": (random.maxwell, "maxwell", (), False),
    "gamma": (lambda key, n: random.gamma(key, 1.5, n), "gamma", (1.5,), False),
    "beta": (lambda key, n: random.beta(key, 1.5, 3.0, n), "beta", (1.5, 3), False),
    "t": (lambda key, n: random.t(key, 3.0, n), "t", (3,), False),
}
DTYPES = {"float8_e4m3": ml_dtypes.float8_e4m3, "bfloat16": ml_dtypes.bfloat16, "float8_e5m2": ml_dtypes.float8_e5m2}


def exact_distribution(law: Any, excluded: bool, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The values of a format, its infinities too, and the probability that a number of a law is rounded to each."""
    bits = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    with np.errstate(all="ignore"):  # NaN among the codes, and infinities within a distribution function
        codes = np.arange(2 ** (8 * bits.itemsize)).astype(bits).view(dtype).astype(np.float64)
        values = np.unique(codes[np.isfinite(codes)])
        overflow = values[-1] + (values[-1] - values[-2]) / 2
        below = law.cdf(np.concatenate([[-overflow], (values[1:] + values[:-1]) / 2, [overflow]]))
    values = np.concatenate([[-np.inf], values, [np.inf]])
    chance = np.diff(np.concatenate([[0], below, [1]]))
    if excluded:
        low, high = (np.searchsorted(values, end) for end in law.support())
        inside = np.clip(np.arange(len(values)), low if law.support()[0] == 0 else low + 1, high - 1)
        chance = np.bincount(inside, chance, len(values))
    return values, chance


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("float8_e4m3", ["uniform", "exponential"]),
        *(pytest.param(spec, [*EXACT], marks=pytest.mark.slow) for spec in DTYPES),
    ],
)
def test_moments_and_ends_of_the_exact_distributions(spec: str, names: list[str]) -> None:
    """Moments of x / (1 + |x|), as some laws have none of x, and both ends, within four standard deviations."""
    from scipy import stats  # which takes a second

    number = 100_000
    fun = lambda key: {name: EXACT[name][0](key, (number,)) for name in names}  # noqa: E731
    for name, draws in jax.jit(jc.emulate(fun, spec))(KEY).items():
        _, law, parameters, excluded = EXACT[name]
        values, chance = exact_distribution(getattr(stats, law)(*parameters), excluded, DTYPES[spec])
        place = np.searchsorted(values, np.asarray(draws, np.float64))
        np.testing.assert_array_equal(values[place], draws)
        squashed = np.where(
            np.isinf(values), np.sign(values), np.nan_to_num(values) / (1 + np.abs(np.nan_to_num(values)))
        )
        for power in (1, 2):
            numbers = squashed**power
            mean = numbers @ chance
            deviation = ((numbers - mean) ** 2 @ chance / number) ** 0.5
            assert abs(numbers[place].mean() - mean) < 4 * deviation, (name, power)
        for tail, reached in ((np.cumsum(chance), np.less_equal), (np.cumsum(chance[::-1])[::-1], np.greater_equal)):
            ends = np.flatnonzero(tail * number >= 25)
            end = ends[0] if reached is np.less_equal else ends[-1]
            count, p = np.sum(reached(place, end)), min(tail[end], 1.0)
            assert abs(count - number * p) <= 4 * (number * p * (1 - p)) ** 0.5, (name, values[end])


@pytest.mark.smoke
def test_moments() -> None:
    """Of dropout, and of rare events: a uniform number rounded to 0 or 1 would show."""
    rate = jax.jit(jc.emulate(lambda key: random.bernoulli(key, 0.001, (10**6,)), "bfloat16"))(KEY).mean()
    assert abs(float(rate) - 0.001) < 4 * (0.001 / 10**6) ** 0.5
    low = jax.jit(jc.emulate(lambda key: random.uniform(key, (10**5,)), "e4m3:stochastic"))(KEY, key=KEY)
    assert abs(float(low.mean()) - (0.5 - 2**-10)) < 4 / (12 * 10**5) ** 0.5
    assert np.isfinite(jc.emulate(lambda key: random.normal(key, (10**5,)), "e4m3")(KEY)).all()


def draw(key: jax.Array) -> jax.Array:
    return random.uniform(key, (40,))


@further
@pytest.mark.parametrize(
    "fun",
    [
        jax.jit(draw),
        pytest.param(lambda key: lax.cond(True, draw, draw, key), marks=pytest.mark.slow),
        pytest.param(lambda key: lax.map(draw, key[None])[0], marks=pytest.mark.slow),
    ],
    ids=["call", "branch", "loop"],
)
def keys_within_other_functions(fun: Callable[[jax.Array], jax.Array]) -> None:
    """Given and closed over."""
    got = jax.jit(lambda: (jc.emulate(fun, "e4m3")(KEY), jc.emulate(lambda: fun(KEY), "e4m3")()))()
    want = jc.emulate(draw, "e4m3")(KEY)
    for one in got:
        np.testing.assert_array_equal(one, want)


def keys_of_every_kind_and_rules() -> None:
    """Old keys and other generators; rules find a draw."""
    want = jc.emulate(draw, "e4m3")(KEY)
    assert float(want.max()) < 1 and float(want.min()) > 0.01
    old = random.key_data(KEY)
    np.testing.assert_array_equal(jc.emulate(draw, "e4m3")(old), want)
    rbg = random.key(1, impl="rbg")
    np.testing.assert_array_equal(
        jc.emulate(draw, "e4m3")(rbg), jnp.minimum(jc.round_to_format(draw(rbg), "e4m3"), 0.9375)
    )
    np.testing.assert_array_equal(jc.emulate(draw, "e4m3", rules={"_uniform": None})(KEY), draw(KEY))
    (row,) = jc.emulate(draw, "e4m3").report(KEY, trace_values=True).rows
    assert (row.scope, row.spec, row.results) == ("_uniform", "float8_e4m3", 40)


def arguments_and_results_of_draws_are_rounded() -> None:
    """So are those of a draw from a draw, and of a function that JAX traced within a draw before."""
    scale = jnp.float32(0.3)
    fun = lambda key, scale: random.rayleigh(key, random.rayleigh(key, scale, N), N)  # noqa: E731
    inner = jc.round_to_format(random.rayleigh(KEY, jc.round_to_format(scale, "e4m3"), N), "e4m3")
    want = jc.round_to_format(random.rayleigh(KEY, inner, N), "e4m3")
    np.testing.assert_array_equal(jc.emulate(fun, "e4m3")(KEY, scale), want)
    np.testing.assert_array_equal(jc.emulate(lambda key: random.rayleigh(key, 0.3, N), "e4m3")(KEY), inner)
    logits = jnp.array([0.3, 0.9, 0.1])
    got = jc.emulate(lambda key, x: (random.categorical(key, x, shape=N), jnp.argmax(x * 1.1)), "e4m3")(KEY, logits)
    np.testing.assert_array_equal(got[0], random.categorical(KEY, jc.round_to_format(logits, "e4m3"), shape=N))


def the_derivative_of_a_draw_is_the_carriers() -> None:
    fun = lambda scale: random.rayleigh(KEY, scale, (4,)).sum()  # noqa: E731
    bound = lambda top: random.uniform(KEY, (4,), maxval=top).sum()  # noqa: E731

    @jax.jit
    def slopes(x: Any, top: Any) -> Any:
        of_draws = [jax.grad(f)(x) for f in (fun, jc.emulate(fun, "bfloat16"))]
        of_bounds = [jax.grad(f)(top) for f in (bound, jc.emulate(bound, "bfloat16"))]
        return of_draws, of_bounds, jc.emulate(jax.grad(fun), "bfloat16")(x)

    (plain, outside), (plain_bound, outside_bound), inside = slopes(1.5, 2.0)
    np.testing.assert_allclose(outside, plain, rtol=1e-6)
    np.testing.assert_allclose(outside_bound, plain_bound, rtol=1e-6)
    np.testing.assert_array_equal(inside, jc.round_to_format(inside, "bfloat16"))
    np.testing.assert_allclose(inside, plain, rtol=0.02)


# -- other primitives that draw, and neighbours ------------------------------------------------------------------------


def test_generators_of_the_device() -> None:
    low = jax.jit(jc.emulate(lambda: lax.rng_uniform(0.0, 1.0, (10**4,)), "e4m3"))()
    assert float(low.max()) == 1 - 2**-4
    state = jnp.zeros(4, jnp.uint32)
    bits = lambda: lax.rng_bit_generator(state, (8,))  # noqa: E731
    np.testing.assert_array_equal(jc.emulate(bits, "e4m3")()[1], bits()[1])


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("spec", ["e4m3", "float8_e4m3fn:saturate", "e5m2:stochastic"])
def test_neighbours_are_those_of_the_format(spec: str) -> None:
    values = np.asarray(jc.Spec(spec).format.values(), np.float64)
    values = np.unique(values[np.isfinite(values)]).astype(np.float32)
    low = jax.jit(jc.emulate(jnp.nextafter, spec, key=KEY))
    np.testing.assert_array_equal(low(values[:-1], np.float32(np.inf)), values[1:])
    np.testing.assert_array_equal(low(values[1:], values[0]), values[:-1])
    np.testing.assert_array_equal(low(values, values), values)
    assert np.isnan(low(np.float32(np.nan), 1.0))


@further.first
def neighbours_of_numbers_that_a_device_takes_for_zero() -> None:
    low = jc.emulate(jnp.nextafter, "bfloat16")
    assert low(jnp.float32(2.0**-133), 0.0).view(jnp.int32) == 0
    assert low(jnp.float32(0.0), -1.0).view(jnp.int32) == jnp.float32(-(2.0**-133)).view(jnp.int32)


@further
@pytest.mark.parametrize(
    "check",
    [
        keys_of_every_kind_and_rules,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (arguments_and_results_of_draws_are_rounded, the_derivative_of_a_draw_is_the_carriers)
        ),
    ],
)
def more_of_draws(check: Callable[[], None]) -> None:
    check()


test_further = further.test()


#: Draws in the body of a loop whose derivative splits their calls.
IN_LOOPS = {
    "uniform": lambda key, w: random.uniform(key),
    "uniform with an end": lambda key, w: random.uniform(key, minval=w),
    "truncated normal": lambda key, w: random.truncated_normal(key, -w, w),
    "normal": lambda key, w: random.normal(key) + 1,
}


@pytest.mark.parametrize(
    "name", [name if name == "uniform" else pytest.param(name, marks=pytest.mark.slow) for name in IN_LOOPS]
)
def test_derivatives_of_loops_that_draw(name: str) -> None:
    """Also if the parts of a draw before and after its bits are calls of their own."""

    def fun(w: jax.Array) -> jax.Array:
        step = lambda s, key: (s * w * IN_LOOPS[name](key, w), s)  # noqa: E731
        return lax.scan(step, jnp.ones(()), random.split(random.key(0), 2))[0]

    w = jnp.float32(0.4)
    np.testing.assert_allclose(jc.emulate(jax.grad(fun), "bfloat16")(w), jax.grad(fun)(w), rtol=0.02)
