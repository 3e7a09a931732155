"""Repeated equations of a program, such as unrolled layers, which `jc.emulate` runs as a loop: the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_matmul
import oracle_program
import pytest
from emulate_cases import KEY
from further import Further
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._core.matmul.operations import fold_seeds, operation_words
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules import interpret
from jchop._emulate.rules.rules import make_settings
from jchop._emulate.rules.trace import trace_program
from jchop._program.repeats import Turns, with_turns

further = Further()

X = np.linspace(0.5, 1.5, 12, dtype=np.float32).reshape(3, 4)
WEIGHTS = [np.float32(np.random.default_rng(i).normal(size=(4, 4)) / 3) for i in range(12)]


def loops_of(fun: Callable[..., Any], *args: Any, spec: str = "bfloat16") -> list[tuple[int, int]]:
    """The turns, and the steps of a turn, of the loops of a program."""
    plan = trace_program(fun, make_settings(jc.Spec(spec), None, None, "raise"), args, {}).plan
    return [(part.length, len(part.body.steps)) for part in with_turns(plan) if isinstance(part, Turns)]


def bits(tree: Any) -> list[np.ndarray]:
    return [np.ascontiguousarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(jax.tree.map(np.asarray, tree))]


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(bits(one), bits(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function, compiled with every equation where it stands."""

    def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(interpret, "with_turns", lambda plan: list(plan.steps))
                return fun(*args)

        return jax.jit(run)

    return compiled


# -- what is found -----------------------------------------------------------------------------------------------------


def layer(x: Any, w: Any) -> Any:
    """Twelve equations and more."""
    y = x - jnp.mean(x, axis=-1, keepdims=True)
    y = jnp.tanh(y @ w) * jax.nn.sigmoid(x) + 0.5
    return x + y / (1 + jnp.abs(y)) * jnp.sqrt(y * y + 1)


def layers(x: Any, weights: Any) -> Any:
    for w in weights:
        x = layer(x, w)
    return x


def test_layers_are_one_loop() -> None:
    ((length, steps),) = loops_of(layers, X, WEIGHTS)
    assert length == 12 and length * steps == len(jax.make_jaxpr(layers)(X, WEIGHTS).eqns)


def shared(x: Any, w: Any) -> Any:
    """One weight for all, and a number that differs."""
    for i in range(8):
        x = layer(x, w) * (0.5 + i)
    return x


def from_a_number(x: Any) -> Any:
    """A carried value that begins as a constant."""
    total = 0.0
    for i in range(8):
        x = layer(x, jnp.float32(WEIGHTS[i]))
        total = total + jnp.max(x)
    return total, x


def all_results(x: Any, weights: Any) -> Any:
    """Results of each layer are read after the loop."""
    seen = []
    for w in weights[:8]:
        x = layer(x, w)
        seen.append(jnp.sum(x))
    return jnp.stack(seen), seen[2], x


def first_is_kept(x: Any, weights: Any) -> Any:
    """A result of the first layer is an operand of all others, so the loop begins with the second."""
    first = x = layer(x, weights[0])
    for w in weights[1:9]:
        x = layer(x, w) + first
    return x


def two_back(x: Any, weights: Any) -> Any:
    """A layer reads the two before it: a turn has two layers."""
    before = x
    for w in weights:
        x, before = layer(x, w) + before, x
    return x


def a_third_back(x: Any, weights: Any) -> Any:
    """A layer reads the third before it: a turn has three layers."""
    seen = [x, x, x]
    for w in weights:
        seen.append(layer(seen[-1], w) * seen[-3])
    return seen[-1]


def mirrored(x: Any, weights: Any) -> Any:
    """Down, and up with the results of the way down in reverse order."""
    seen = []
    for w in weights[:6]:
        x = layer(x, w)
        seen.append(x)
    for w, y in zip(weights[6:], reversed(seen), strict=True):
        x = layer(x * y, w) - y
    return x


def inner_programs(x: Any, weights: Any) -> Any:
    """Calls, loops and branches in each turn."""
    call = jax.jit(layer)
    for w in weights[:6]:
        x = call(x, w)
        x = lax.fori_loop(0, 3, lambda i, y: y * 0.5 + jnp.sin(y), x)
        x = lax.cond(x[0, 0] > 0, jnp.cos, lambda y: y * y, x)
        x = jax.checkpoint(lambda y: y / (1 + y * y))(x)
    return x


def parts_of_stacks(x: Any, stacked: Any, tables: Any) -> Any:
    """The weights of all layers in one array, of which each layer takes a part."""
    for i in range(8):
        x = layer(x, stacked[i]) + tables[0, 4 * i : 4 * i + 4]
    return x


def random_draws(x: Any, weights: Any, key: Any) -> Any:
    """Dropout with a key for each layer."""
    for w, own in zip(weights[:6], jax.random.split(key, 6), strict=True):
        x = layer(x, w) * jax.random.bernoulli(own, 0.75, x.shape) + jax.random.normal(own, x.shape)
    return x


def of_integers(x: Any, weights: Any) -> Any:
    """Carried integers, conditions, and a sort. The first layer has a condition that is a constant."""
    count, on = jnp.int32(0), True
    for w in weights[:8]:
        x = jnp.sort(layer(x, w), axis=-1)
        on = on & (x > -4)
        count = count + jnp.argmax(x[0]).astype(jnp.int32)
    return x, count, on


def algebra(x: Any, weights: Any) -> Any:
    """Factorizations, cumulative sums, powers, convolutions, complex numbers, functions of jchop."""
    for w in weights[:5]:
        a = x.T @ x + 2 * jnp.eye(4)
        x = jnp.linalg.solve(a, x.T).T @ w + jnp.cumsum(x, axis=0) ** 3
        x = x / (1 + jnp.abs(x)) + jnp.convolve(x[0], w[0], mode="same")
        z = lax.complex(x, x * 0.5)
        x = jc.math.exp(-jnp.abs((z * z).real), "e5m6") + jnp.prod(x, axis=-1, keepdims=True)
    return x


def short(x: Any, weights: Any) -> Any:
    """Few and cheap equations."""
    for w in weights[:8]:
        x = (x * w[0] + 0.5) * 0.75 - w[1] * x
        x = jnp.maximum(x, 0.25 - x) * 0.5 + w[2]
    return x


FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[int]]] = {
    "short": (short, (X, WEIGHTS), [4]),
    "shared": (shared, (X, WEIGHTS[0]), [8]),
    "from a number": (from_a_number, (X,), [8]),
    "all results": (all_results, (X, WEIGHTS), [8]),
    "the first is kept": (first_is_kept, (X, WEIGHTS), [8]),
    "two back": (two_back, (X, WEIGHTS), [6]),
    "mirrored": (mirrored, (X, WEIGHTS), [6, 6]),
    "inner programs": (inner_programs, (X, WEIGHTS), [6]),
    "parts of stacks": (parts_of_stacks, (X, np.stack(WEIGHTS), np.linspace(0, 1, 32)[None].astype(np.float32)), [8]),
    "random draws": (random_draws, (X, WEIGHTS, KEY), [6]),
    "integers": (of_integers, (X, WEIGHTS), [7]),
    "algebra": (algebra, (X, WEIGHTS), [5]),
    "a third back": (a_third_back, (X, WEIGHTS), [4]),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", FOUND)
def test_turns_of_loops(name: str) -> None:
    fun, args, lengths = FOUND[name]
    assert [length for length, _ in loops_of(fun, *args)] == lengths


def test_short_programs_stay_as_they_are() -> None:
    assert loops_of(layers, X, WEIGHTS[:3]) == []
    assert loops_of(lambda x: [x * i for i in range(60)], X) == []


def test_turns_of_one_equation_are_joined() -> None:
    def steps(x: Any) -> Any:
        for _ in range(100):
            x = x * 1.25
        return x

    assert loops_of(steps, X) == [(6, 16)]


def test_rules_tell_layers_apart() -> None:
    def named(x: Any, weights: Any) -> Any:
        for i, w in enumerate([*weights, *weights]):
            with jax.named_scope(f"layer_{i}"):
                x = layer(x, w)
        return x

    def lengths(rules: Any) -> list[int]:
        plan = trace_program(named, make_settings(jc.Spec("bfloat16"), rules, None, "raise"), (X, WEIGHTS), {}).plan
        return [part.length for part in with_turns(plan) if isinstance(part, Turns)]

    assert lengths(None) == [24]
    assert lengths({"layer_12": "binary16"}) == [12, 10]  # the layer after it takes binary16


def test_large_weights_are_not_copied() -> None:
    def lengths(count: int) -> list[int]:
        """Of layers whose eight weights have `count` numbers each."""
        found: list[int] = []

        def look(x: Any, weights: Any) -> Any:
            found.extend(length for length, _ in loops_of(reduced, x, weights))
            return x

        jax.eval_shape(look, X, [jax.ShapeDtypeStruct((4, count // 4), jnp.float32)] * 8)
        return found

    def reduced(x: Any, weights: Any) -> Any:
        for w in weights:
            x = layer(x, WEIGHTS[0] * jnp.max(w))
        return x

    assert lengths(1 << 24) == [8] and lengths(1 << 26) == []


@further.first
def effects_and_their_order_stay() -> None:
    def printing(x: Any, weights: Any) -> Any:
        for w in weights:
            x = layer(x, w)
            jax.debug.print("{}", x[0, 0])
        return x

    assert loops_of(printing, X, WEIGHTS) == []


# -- their numbers -----------------------------------------------------------------------------------------------------

SPECS = ["bfloat16", "e4m3:saturate", "e5m10:stochastic", "bfloat16:stochastic"]
LAYERS = (layers, (X, WEIGHTS[:6]), [6])  # enough for a loop; compiling them one by one takes seconds
HOWS = [
    jc.MatmulSpec(accumulate="bfloat16:stochastic", order="sequential"),
    jc.MatmulSpec(accumulate="e8m9:stochastic", product="bfloat16:stochastic", order="pairwise"),
]
#: All formats for one program, one for each of the others, and two rules of sums that draw.
NUMBERS = [
    *(("layers", spec, None) for spec in SPECS),
    *((name, SPECS[i % 4], None) for i, name in enumerate(FOUND) if name != "short"),
    *(("layers", "bfloat16:stochastic", how) for how in HOWS),
]


@further
@pytest.mark.parametrize(
    ("name", "spec", "how"),
    [("short", "bfloat16", None), *(pytest.param(*row, marks=pytest.mark.slow) for row in NUMBERS)],
)
def the_same_numbers_as_one_by_one(name: str, spec: str, how: jc.MatmulSpec | None) -> None:
    fun, args, _ = FOUND.get(name, LAYERS)
    low = jc.emulate(fun, spec, accumulate=how, key=KEY)
    assert_same(jax.jit(low)(*args), low(*args))


def test_numbers_that_differ_from_turn_to_turn_are_kept() -> None:
    def steps(x: Any, np: Any) -> Any:
        for i in range(8):
            for at in range(8):
                x = np.maximum(x - (i + 1) * (at + 1), -x)
        return x

    assert loops_of(lambda x: steps(x, jnp), X, spec="e8m23")
    np.testing.assert_array_equal(jax.jit(jc.emulate(lambda x: steps(x, jnp), "e8m23"))(X), steps(X, np))


@further
def against_exact_rationals() -> None:
    """The oracle's interpreter walks the plan equation by equation, and draws under the number of each."""

    def steps(x: Any, ys: Any) -> Any:
        for y in ys:
            x = (x * y + 0.75) / (x - 3.0) + jnp.sqrt(x * x + y)
            x = x * 0.5 - y / (x + 1.5) + jnp.square(x - y) * 0.25
        return x

    x, ys = (
        np.linspace(0.5, 1.0, 5, dtype=np.float32),
        list(np.linspace(0.25, 0.75, 40, dtype=np.float32).reshape(8, 5)),
    )
    mode = "stochastic"
    spec = jc.Spec("bfloat16", rounding=mode)
    machine = oracle_program.Machine(
        oracle_matmul.How(oracle_program.oracle.ieee(8, 7), mode),
        lambda seeds, shape, number: np.asarray(operation_words(seeds, jnp.zeros(shape, jnp.float32), number)),
        fold_seeds,
    )
    program = trace_program(steps, make_settings(spec, None, None, "raise"), (x, ys), {})
    assert any(isinstance(part, Turns) for part in with_turns(program.plan))
    entry = fold_seeds(seed_words(KEY), 0)
    entered = [machine.rounded(oracle_program.values(v), v.shape, entry, i) for i, v in enumerate(program.values)]
    want = machine.run(program.plan, fold_seeds(seed_words(KEY), 1), entered)
    np.testing.assert_array_equal(jax.jit(jc.emulate(steps, spec, key=KEY))(x, ys), want[0])


@further
def chains_of_a_loop_draw_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "MIN_CHAIN_ELEMENTS_TO_TRY", 1)

    def chained(x: Any, ys: Any) -> Any:
        for y in ys:
            for _ in range(9):
                x = x * y + 0.5
            x = jnp.max(x) - x
        return x

    low = jc.emulate(chained, "bfloat16:stochastic", key=KEY)
    ys = list(np.linspace(0.5, 0.9, 6, dtype=np.float32))
    assert loops_of(chained, X, ys) == [(6, 20)]
    got = jax.jit(low)(X, ys)
    monkeypatch.setattr(interpret, "MIN_CHAIN_ELEMENTS_TO_TRY", 1 << 40)
    assert_same(got, jc.emulate(chained, "bfloat16:stochastic", key=KEY)(X, ys))


def loss_of(name: str, spec: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fun, args, _ = FOUND.get(name, LAYERS)

    def loss(*args: Any) -> Any:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(jc.emulate(fun, spec, key=KEY)(*args)))

    return loss, args


Unrolled = Callable[[Callable[..., Any]], Callable[..., Any]]


def derivatives(name: str, spec: str, unrolled: Unrolled) -> None:
    """Within the roundings of float32: the straight-through derivative is computed in the carrier."""
    loss, args = loss_of(name, spec)
    tangents = jax.tree.map(np.ones_like, args)
    both = lambda *args: (  # noqa: E731
        *jax.value_and_grad(loss, argnums=(0, 1))(*args),
        jax.jvp(loss, args, tangents),
    )
    got, want = jax.jit(both)(*args), unrolled(both)(*args)
    assert_same(got[0], want[0])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got[1], want[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), got[2], want[2])


def emulated_derivatives(name: str, spec: str, unrolled: Unrolled) -> None:
    """The way back reads the results of the way forward in reverse order."""
    fun, args, _ = FOUND.get(name, LAYERS)
    slopes = jax.grad(lambda x, weights: jnp.sum(fun(x, weights)), argnums=(0, 1))
    low = jc.emulate(slopes, spec, key=KEY)
    assert loops_of(slopes, *args) != []
    assert_same(jax.jit(low)(*args), unrolled(low)(*args))


def batches(name: str, spec: str, unrolled: Unrolled) -> None:
    fun, (x, weights), _ = FOUND.get(name, LAYERS)
    xs, keys = np.stack([x, x * 2, -x]), jax.random.split(KEY, 3)
    low = jc.emulate(fun, spec, key=KEY)
    many = jax.vmap(low, in_axes=(0, None))
    got = jax.jit(many)(xs, weights)
    assert_same(got, unrolled(many)(xs, weights))
    assert_same(got[1], low(xs[1], weights))
    keyed = jax.vmap(lambda x, key: low(x, weights, key=key))
    assert_same(jax.jit(keyed)(xs, keys)[2], low(xs[2], weights, key=keys[2]))
    inside = jc.emulate(jax.vmap(fun, in_axes=(0, None)), spec, key=KEY)
    assert_same(jax.jit(inside)(xs, weights), inside(xs, weights))


@further
@pytest.mark.parametrize(
    ("check", "name", "spec"),
    [
        (derivatives, "short", "bfloat16"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (derivatives, "layers", "bfloat16"),
                (derivatives, "all results", "bfloat16:stochastic"),
                (derivatives, "mirrored", "bfloat16"),
                (derivatives, "inner programs", "bfloat16:stochastic"),
                (derivatives, "two back", "bfloat16"),
                (emulated_derivatives, "layers", "e4m3:saturate"),
                (emulated_derivatives, "layers", "bfloat16:stochastic"),
                (batches, "layers", "bfloat16:stochastic"),
            )
        ),
    ],
)
def transformed_loops(check: Callable[..., None], name: str, spec: str, unrolled: Unrolled) -> None:
    check(name, spec, unrolled)


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("spec", ["bfloat16", "bfloat16:stochastic"])
def test_explicit_sharding(spec: str) -> None:
    """A result of the last layer that no other reads has no value before the loop."""

    def last(x: Any, weights: Any) -> Any:
        y = x
        for w in weights:
            y = layer(x, w)
            x = jnp.tanh(y) - 0.5
        return x, y

    mesh, low = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,)), jc.emulate(last, spec, key=KEY)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("rows", None)))
        traced = jax.jit(low).trace(x, [jax.device_put(w, NamedSharding(mesh, P())) for w in WEIGHTS])
    assert [v.sharding.spec for v in jax.tree.leaves(traced.jaxpr.out_avals)] == [P("rows", None)] * 2
    assert any(eqn.primitive.name == "scan" for eqn in traced.jaxpr.eqns)


def test_a_limit_of_turns_keeps_each_line() -> None:
    """With `max_turns` a warning names the line of the loop that was ended, so each has its own place."""

    def rising(x: Any) -> Any:
        for _ in range(6):
            x = lax.while_loop(lambda y: jnp.max(y) < 4, lambda y: y + 0.001, x * 0.5)
        return x

    with pytest.warns(RuntimeWarning, match=r"test_repeats\.py"):
        jax.jit(jc.emulate(rising, "bfloat16", max_turns=3))(X)
        jax.effects_barrier()
    assert "while" in jax.jit(jc.emulate(short, "bfloat16")).lower(X, WEIGHTS).as_text()
    assert "while" not in jax.jit(jc.emulate(short, "bfloat16", max_turns=3)).lower(X, WEIGHTS).as_text()


@further
def layers_cost_nothing_more_to_compile() -> None:
    def lines(count: int, spec: str) -> int:
        low = jc.emulate(layers, spec, key=KEY)
        return str(jax.jit(low).lower(X, [WEIGHTS[0]] * count).compile().as_text()).count("\n")

    assert lines(24, "e4m3") <= 1.5 * lines(8, "e4m3")


# -- any program -------------------------------------------------------------------------------------------------------

OPERATIONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a / (2 + jnp.abs(b)),
    lambda a, b: jnp.tanh(a) + b,
    lambda a, b: jnp.maximum(a, b),
    lambda a, b: jnp.where(a > b, a, b * 0.5),
    lambda a, b: a @ b.T @ b / 64,
    lambda a, b: a - jnp.mean(b, axis=-1, keepdims=True),
]


def any_program(seed: int, least: int = 14, most: int = 22) -> Callable[..., Any]:
    """Repeated blocks, whose operands are of the same block, of those before, weights, numbers, or the argument."""
    draw = random.Random(seed)
    count, size, back = draw.randint(6, 9), draw.randint(least, most), draw.choice([1, 1, 1, 2, 3])
    block = []
    for j in range(size):
        block.append((draw.choice(OPERATIONS), [_source(draw, j, size, back) for _ in range(2)]))
    wanted = [(draw.randrange(count), draw.randrange(size)) for _ in range(4)]

    def run(x: Any, weights: Any) -> Any:
        blocks: list[list[Any]] = []
        for t in range(count):
            made: list[Any] = []

            def read(source: tuple[str, int, int], t: int = t, made: list[Any] = made) -> Any:
                kind, i, age = source
                if kind == "own":
                    return made[i]
                if kind == "before":
                    return blocks[t - age][i] if t >= age else x
                return {"weight": weights[(t + i) % len(weights)][:3], "start": x * 1, "number": jnp.float32(i + t)}[
                    kind
                ]

            for operation, sources in block:
                a, b = map(read, sources)
                made.append(jnp.clip(operation(jnp.broadcast_to(a, (3, 4)), jnp.broadcast_to(b, (3, 4))), -8.0, 8.0))
            blocks.append(made)
        return blocks[-1][-1], [blocks[t][j] for t, j in wanted]

    return run


def _source(draw: random.Random, j: int, size: int, back: int) -> tuple[str, int, int]:
    kind = draw.choice(["own", "own", "own", "before", "before", "weight", "start", "number"])
    if kind == "own" and not j:
        kind = "before"
    return kind, draw.randrange(j if kind == "own" else size), draw.randint(1, back)


@further
@pytest.mark.parametrize(
    ("seed", "least", "most"), [(0, 5, 6), *(pytest.param(seed, 14, 22, marks=pytest.mark.slow) for seed in range(12))]
)
def any_repeated_program(seed: int, least: int, most: int, unrolled: Unrolled) -> None:
    fun, spec = any_program(seed, least, most), ("bfloat16:stochastic", "e4m3")[seed % 2]
    low = jc.emulate(fun, spec, key=KEY)
    assert_same(jax.jit(low)(X, WEIGHTS), unrolled(low)(X, WEIGHTS))


@pytest.mark.parametrize(
    ("seeds", "least", "most"), [(range(3), 5, 6), pytest.param(range(12), 14, 22, marks=pytest.mark.slow)]
)
def test_most_such_programs_are_loops(seeds: range, least: int, most: int) -> None:
    found = [bool(loops_of(any_program(seed, least, most), X, WEIGHTS)) for seed in seeds]
    assert sum(found) >= 0.6 * len(seeds), found


test_further = further.test()
