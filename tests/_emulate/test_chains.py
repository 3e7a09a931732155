"""Chains: elementwise operations that `jc.emulate` makes one operation of, tried among moderate numbers first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_matmul
import oracle_program
import pytest
from emulate_cases import KEY
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._core.matmul.operations import chain_body, fold_seeds, operation_words, try_chain
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules import interpret as chain_rules
from jchop._emulate.rules.rules import make_settings
from jchop._emulate.rules.trace import trace_program
from jchop._kernels.operation import MIN_CHAIN_ELEMENTS_TO_TRY

further = Further()

#: Those that make chains under a format with the carrier's exponents.
MODES = [mode for mode in (*oracle.DETERMINISTIC, *oracle.STOCHASTIC) if mode != "stochastic_c"]
SHAPE = (128, MIN_CHAIN_ELEMENTS_TO_TRY // 128)


def chain(x: Any, y: Any) -> Any:
    """Twelve operations, numbers among their operands."""
    x = jnp.abs((x + y) * y - x) * 0.5
    x = 1.5 - jnp.square(-x) * y
    return jnp.abs(x - y) + x


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of any size, in programs that nobody else has compiled."""
    monkeypatch.setattr(chain_rules, "MIN_CHAIN_ELEMENTS_TO_TRY", 1)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(chain_rules, "MIN_CHAIN_ELEMENTS_TO_TRY", 1 << 40)


def sizes_of(plan: Any) -> list[int | str]:
    """The lengths of chains, and the names of what stands alone."""
    parts: Any = chain_rules.with_chains(plan, plan.steps)
    return [len(part.steps) if isinstance(part, chain_rules.Chain) else part.name for part in parts]


def numbers(kind: str, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(SHAPE)
    if kind == "wild":
        x = x * 2.0 ** draw.integers(-140, 120, SHAPE)
    if kind == "odd":
        x[3, :6] = [np.nan, np.inf, -np.inf, -0.0, 2.0**-130, -(2.0**-149)]
    if kind == "zeros":
        x[draw.random(SHAPE) < 0.25] = 0
    return (x * {"tiny": 2.0**-100, "huge": 2.0**120}.get(kind, 1)).astype(np.float32)


def bits(tree: Any) -> list[np.ndarray]:
    """The bits of numbers; one pattern for all NaN, whose signs are those of the processor."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32) for x in leaves]


@further
@pytest.mark.in_turn(20)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mode", MODES)
def every_mode_against_exact_rationals(mode: str) -> None:
    """Of moderate numbers, which the try keeps, and of others in a program of the same shape."""
    spec = jc.Spec("bfloat16", rounding=mode)
    low = jax.jit(jc.emulate(chain, spec, key=KEY))
    for kind in ("plain", "wild"):
        x, y = (numbers(kind, seed).ravel()[:40] for seed in (1, 2))
        x[:2], y[:2] = [2.0**-126, 3.0], [-(2.0**-127), 0.0]
        np.testing.assert_array_equal(low(x, y), by_the_oracle(spec, mode, x, y), kind)


def by_the_oracle(spec: jc.Spec, mode: str, x: np.ndarray, y: np.ndarray) -> Any:
    machine = oracle_program.Machine(
        oracle_matmul.How(oracle.ieee(8, 7), mode),
        lambda seeds, shape, number: np.asarray(operation_words(seeds, jnp.zeros(shape, jnp.float32), number)),
        fold_seeds,
    )
    program = trace_program(chain, make_settings(spec, None, None, "raise"), (x, y), {})
    assert sizes_of(program.plan) == [12]
    entry = fold_seeds(seed_words(KEY), 0)
    entered = [machine.rounded(oracle_program.values(v), v.shape, entry, i) for i, v in enumerate(program.values)]
    return machine.run(program.plan, fold_seeds(seed_words(KEY), 1), entered)[0]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("text", ["bfloat16", "e8m10:up", "bfloat16:stochastic", "e8m4:saturate:odd", "bfloat16:down"])
def test_what_is_tried_is_what_stands_alone(text: str, never: Callable[[], None]) -> None:
    """Where all numbers are moderate, and where one is not: in each case the bits of the operations one by one."""
    kinds = ["plain", "zeros", "odd", "tiny", "huge", "wild"]
    run = lambda: jax.jit(jc.emulate(chain, text, key=KEY))  # noqa: E731
    tried = run()
    assert "conditional(" in str(tried.lower(numbers("plain"), numbers("plain")).compile().as_text())
    got = {kind: bits(tried(numbers(kind, 1), numbers("plain", 2))) for kind in kinds}
    never()
    alone = run()
    for kind in kinds:
        want = bits(alone(numbers(kind, 1), numbers("plain", 2)))
        for one, other in zip(got[kind], want, strict=True):
            np.testing.assert_array_equal(one, other, kind)


@pytest.mark.usefixtures("always")
def test_a_chain_has_one_result() -> None:
    """Where several values are wanted later every operation stands alone."""

    def fun(x: Any, y: Any) -> Any:
        a = jnp.exp((x + y) * y - x)
        b = a * y - 0.5 * x
        c = b + y
        return c, jnp.exp(b), y * y

    program = trace_program(
        fun, make_settings("bfloat16", None, None, "raise"), (numbers("plain"), numbers("plain")), {}
    )
    assert sizes_of(program.plan) == [3, "exp", "mul", "mul", "sub", "add", "exp", "mul"]
    vain = trace_program(
        lambda x: (x + 1e-30) * x - x, make_settings("bfloat16", None, None, "raise"), (numbers("plain"),), {}
    )
    assert sizes_of(vain.plan) == ["add", "mul", "sub"]
    x, y = numbers("plain", 1), numbers("plain", 2)
    low = lambda v: jc.round_to_format(v, "bfloat16")  # noqa: E731
    x, y = low(x), low(y)
    a = jc.math.exp(low(low(low(x + y) * y) - x), "bfloat16")
    b = low(low(a * y) - low(x * 0.5))
    got = jax.jit(jc.emulate(fun, "bfloat16"))(x, y)
    for one, other in zip(got, (low(b + y), jc.math.exp(b, "bfloat16"), low(y * y)), strict=True):
        np.testing.assert_array_equal(one, other)


DERIVATIVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "forward": lambda low, x, y: jax.jvp(low, (x, y), (y, x)),
    "reverse": lambda low, x, y: jax.value_and_grad(lambda x: jnp.sum(low(x, y) * y))(x),
    "batch": lambda low, x, y: jax.vmap(low, (0, None))(jnp.stack([x, y]), y),
    "second": lambda low, x, y: jax.grad(lambda x: jnp.sum(low(jax.grad(lambda x: jnp.sum(low(x, y) * y))(x), y) * y))(
        x
    ),
}


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_are_those_of_the_operations(kind: str, never: Callable[[], None]) -> None:
    x, y = numbers("plain", 1), numbers("plain", 2)
    run = lambda: bits(jax.jit(partial(DERIVATIVES[kind], jc.emulate(chain, "bfloat16")))(x, y))  # noqa: E731
    got = run()
    never()
    for one, other in zip(got, run(), strict=True):
        np.testing.assert_allclose(one.view(np.float32), other.view(np.float32), rtol=1e-5, atol=1e-4)


@further.first
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
@pytest.mark.parametrize("text", ["bfloat16", pytest.param("bfloat16:stochastic", marks=pytest.mark.slow)])
@pytest.mark.in_turn(20)
def partitioned_programs_do_not_try(text: str) -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    x, y = numbers("wild", 1), numbers("plain", 2)
    run = jax.jit(jc.emulate(chain, text, key=KEY))
    split = [jax.device_put(v, NamedSharding(mesh, P("rows"))) for v in (x, y)]
    program = str(run.lower(*split).compile().as_text())
    assert "conditional(" not in program and "all-" not in program
    got, want = run(*split), run(x, y)
    assert got.sharding.is_equivalent_to(split[0].sharding, 2)
    jax.tree.map(np.testing.assert_array_equal, bits(got), bits(want))
    # Where every axis is manual each device tries its own part; stochastic ones draw otherwise there.
    if ":" not in text:
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
        jax.tree.map(np.testing.assert_array_equal, bits(jax.jit(mapped)(*split)), bits(want))


@further
def a_try_says_where_it_may_be_wrong() -> None:
    """NaN where what enters or a product is neither zero nor moderate, and nowhere else."""
    spec = jc.Spec("bfloat16")
    x = np.asarray(jc.round_to_format(numbers("wild", 1), spec)).copy()
    y = np.asarray(jc.round_to_format(numbers("zeros", 2), spec))
    x[0, :4], y[0, :4] = [2.0**-56, 2.0**-57, 2.0**45, 2.0**44], [1.0, 1.0, 1.0, 1.0]
    known = (spec, spec)
    links = (
        ("mul", (0, 1), known, 0),
        ("sub", (2, 1), known, 0),
        ("neg", (3,), known[:1], 0),
        ("add", (1, 1), known, 0),
        *(("add", (5 + i, 5 + i), known, 0) for i in range(60)),
    )

    def run(way: Any, *results: int) -> list[Any]:
        each = [partial(way, links=links, shape=SHAPE, result=result, spec=spec) for result in results]
        return [jax.jit(f)(x, y) for f in each]

    one, two, three = run(try_chain, 4, 5, 65)
    product, exact, double, many = run(chain_body, 2, 4, 5, 65)

    def moderate(*values: Any) -> np.ndarray:
        sizes = [np.abs(np.asarray(v, np.float64)) for v in values]
        return np.all([(v == 0) | ((v >= 2.0**-56) & (v < 2.0**45)) for v in sizes], axis=0)

    expected = np.where(moderate(x, y, product), exact, np.float32(np.nan))
    assert np.isnan(expected[0, :4]).tolist() == [False, True, True, False]
    assert 0.05 < np.isnan(expected).mean() < 0.95 and not np.isnan(exact).any()
    np.testing.assert_array_equal(one, expected)
    np.testing.assert_array_equal(two, np.where(moderate(y), double, np.nan))
    # Sixty sums lead beyond: on the way there it is looked at again.
    many, three = np.abs(np.asarray(many)), np.asarray(three)
    assert (many >= 2.0**56).mean() > 0.5 and np.isnan(three[many >= 2.0**56]).all() and (three[many == 0] == 0).all()


@further
def a_sum_is_as_deep_as_the_deeper_of_its_terms() -> None:
    """Twice a number and one more, again and again: of sums of so many turns one is looked at."""
    spec, links, last = jc.Spec("bfloat16"), [], 0
    for turn in range(6):
        links += [("add", (last, last), (spec, spec), 0), ("add", (2 + 2 * turn, 1), (spec, spec), 0)]
        last = 3 + 2 * turn
    x, y = jnp.array([1, 2.0**44], jnp.float32), jnp.ones(2, jnp.float32)
    run = partial(chain_body, x, y, links=tuple(links), shape=(2,), result=last, spec=spec)
    got = try_chain(*run.args, **run.keywords)
    assert got.tolist()[0] == run().tolist()[0] == 127 and np.isnan(got[1])


test_further = further.test()
