"""`EmulatedFunction.blame`: parts of an error that add up to it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._emulate.emulate import round_on_entry
from jchop._emulate.paired import CarrierReference, PairedRun
from jchop._emulate.rules.trace import trace_program
from jchop._insight.reports.blame import _blame_notes
from jchop._insight.reports.tape import Tape
from jchop._program.control import as_jax_value
from jchop._program.lanes import with_vmap_collective
from jchop._program.run import interpret

further = Further()

Array = jax.Array
KEY = jax.random.key(3)


def normal(seed: int, *shape: int, scale: float = 1) -> Array:
    return jax.device_put((np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32))


def with_diagonal(seed: int, n: int, scale: float, diagonal: float) -> Array:
    """A symmetric positive definite matrix."""
    a = np.asarray(normal(seed, n, n))
    return jax.device_put(a @ a.T * np.float32(scale) + np.float32(diagonal) * np.eye(n, dtype=np.float32))


def one_pass(x: Array) -> Array:
    weights = jnp.full(len(x), 1 / len(x), x.dtype)
    return jnp.dot(weights, x * x) - jnp.square(jnp.dot(weights, x))


def part(found: jc.Blame, primitive: str) -> float:
    return sum(row.contribution for row in found.rows if row.primitive == primitive)


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "error"), [("bfloat16", 1.0), ("e8m16", 0.1)])
@pytest.mark.usefixtures("x64")
@pytest.mark.in_turn(100)
def test_a_difference_of_large_numbers_is_innocent(spec: str, error: float) -> None:
    """In float64 the parts of a quadratic program add up to the error to all digits, even if nothing is left."""
    x = jnp.asarray(100 + np.random.default_rng(0).standard_normal(256))
    low = jc.emulate(one_pass, spec)
    found = low.blame(x)
    assert found.value == float(low(x))
    assert found.reference == pytest.approx(float(np.var(x)), rel=1e-9)
    assert abs(found.error) < error * found.reference * 1.01
    assert sum(row.contribution for row in found.rows) == pytest.approx(found.error, rel=1e-9)
    assert part(found, "sub") == 0
    assert abs(part(found, "dot_general")) + abs(part(found, "square")) > 0.5 * abs(found.error)


def mlp(params: tuple[Array, Array], x: Array, labels: Array) -> Array:
    logits = jax.nn.relu(x @ params[0]) @ params[1]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(x)), labels])


def pendulum(y: Array) -> Array:
    def step(y: Array, _: None) -> tuple[Array, None]:
        return y + 0.05 * jnp.stack([y[1], -jnp.sin(y[0])]), None

    return jax.lax.scan(step, y, length=30)[0]


def conjugate_gradients(a: Array, b: Array, least: float = 1e-2, most: int = 9) -> Array:
    def body(state: Any) -> Any:
        x, r, p, old, count = state
        q = a @ p
        alpha = old / jnp.dot(p, q)
        r = r - alpha * q
        new = jnp.dot(r, r)
        return x + alpha * p, r, r + new / old * p, new, count + 1

    start = (jnp.zeros_like(b), b, b, jnp.dot(b, b), 0)
    return jax.lax.while_loop(lambda state: (state[3] > least) & (state[4] < most), body, start)[0]


def branches(x: Array) -> Array:
    return jax.lax.cond(x[0] > 0, lambda x: x / 3, lambda x: x * 7.1, x)


def long_pendulum(y: Array) -> Array:
    def step(y: Array, _: None) -> tuple[Array, None]:
        middle = y + 0.005 * jnp.stack([y[1], -jnp.sin(y[0])])
        return y + 0.01 * jnp.stack([middle[1], -jnp.sin(middle[0])]), None

    return jax.lax.scan(step, y, length=1000)[0]


def transformer_block() -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """A block with a normalization of Flax, and its arguments."""
    nnx = pytest.importorskip("flax.nnx")

    def block(params: dict[str, Array], x: Array) -> Array:
        y = nnx.LayerNorm(8, rngs=nnx.Rngs(0))(x)
        query, key, value = jnp.split(y @ params["in"], 3, -1)
        x = x + jax.nn.softmax(query @ key.T / 3) @ value
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    params = {"in": normal(1, 8, 24) / 3, "up": normal(2, 8, 16) / 3, "down": normal(3, 16, 8) / 4}
    return block, (params, normal(4, 4, 8))


def adaptive(spec: str) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    """The Lorenz system by Dormand and Prince's method: rejected steps, a scan of loops, a derivative of its own."""
    tolerance = {"tf32": 1e-3, "e8m20": 1e-5}[spec]

    def lorenz(y: Array, t: Array) -> Array:
        del t
        return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def solve(y: Array) -> Array:
        return odeint(lorenz, y, jnp.linspace(0.0, 0.6, 3), rtol=tolerance, atol=tolerance)[-1]

    return solve, (jnp.ones(3),)


SQUARE = with_diagonal(5, 5, 1, 3)
SYSTEM = (with_diagonal(6, 24, 0.1, 1), normal(7, 24, scale=0.1))
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp, ((normal(1, 8, 16, scale=1 / 3), normal(2, 16, 4, scale=1 / 4)), normal(3, 6, 8), np.arange(6) % 4)),
    "scan": (pendulum, (jnp.array([1.0, 0.0]),)),
    "while": (conjugate_gradients, (SQUARE, normal(6, 5))),
    "solve": (jnp.linalg.solve, (SQUARE, normal(6, 5))),
    "cond": (branches, (normal(7, 4),)),
    "complex": (lambda x: jnp.abs(jnp.fft.fft(x)), (normal(8, 8),)),
    "sort": (lambda x: jnp.sum(jnp.sort(x)[::2] / 3), (normal(9, 8),)),
    "far": (lambda x: jnp.sum(jnp.exp(jnp.tanh(x * 3) * 4)), (normal(10, 6),)),
    "long scan": (long_pendulum, (jnp.array([1.0, 0.0]),)),
    "long while": (partial(conjugate_gradients, least=1e-4, most=40), SYSTEM),
    "long solve": (jnp.linalg.solve, SYSTEM),
}


@further
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("cond", "bfloat16"),
        ("sort", "tf32"),
        *(
            pytest.param(name, spec, marks=pytest.mark.slow)
            for name, spec in (
                ("mlp", "e4m3:saturate"),
                ("scan", "tf32"),
                ("while", "tf32"),  # in e4m3 its residual falls below the smallest number
                ("solve", "e4m3:saturate"),
                ("complex", "bfloat16"),
                ("far", "e4m3:saturate"),
                ("long scan", "bfloat16"),
                ("long while", "tf32"),
                ("long solve", "e4m3:saturate"),
                ("block", "e4m3"),
                ("adaptive", "tf32"),
                ("adaptive", "e8m20"),
            )
        ),
    ],
)
def parts_add_up(name: str, spec: str) -> None:
    """Also of a thousand steps of an ODE, of loops with their own stopping rules, and of an LU solve."""
    with jax.enable_x64(name == "adaptive"):
        made = {"block": transformer_block, "adaptive": partial(adaptive, spec)}
        fun, args = made[name]() if name in made else PROGRAMS[name]
        low = jc.emulate(fun, spec)
        found = low.blame(*args)
        want, got = (np.asarray(f(*args), np.float64) for f in (fun, low))
    if not name.endswith("while") and name != "adaptive":  # there the reference follows the emulated turns
        error = got - want if got.size == 1 else np.linalg.norm(got - want)
        assert found.error == pytest.approx(float(error), rel=1e-3, abs=1e-5)
    assert found.error != 0
    assert sum(row.contribution for row in found.rows) + found.unexplained == pytest.approx(found.error, rel=1e-9)
    rest = 0.02 if name == "adaptive" else 0.05 if spec.startswith("e4m3") else 0.01
    assert abs(found.unexplained) <= rest * abs(found.error)
    some = {"block": {"dot_general", "tanh", "argument [0]['in']", "exp"}, "adaptive": {"dot_general", "add", "pow"}}
    assert {row.primitive for row in found.rows} >= some.get(name, set())


def test_stochastic_errors_are_those_of_the_key() -> None:
    x = normal(1, 16)
    low = jc.emulate(lambda x: jnp.sum(x * x / 3), "bfloat16:stochastic")
    one, two = (low.blame(x, key=jax.random.key(i)) for i in (0, 1))
    assert one.value == float(low(x, key=jax.random.key(0)))
    assert [row.rms for row in one.rows] != [row.rms for row in two.rows]
    for found in (one, two):
        assert abs(found.unexplained) <= 0.01 * abs(found.error)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_errors_fed_back_give_the_emulated_result() -> None:
    """One operation after the other: the carrier's result of the emulated operands plus the error made."""
    x = normal(2, 64)
    found = jc.emulate(lambda x: x / 3, "e4m3").blame(x, output=jnp.sum)
    rounded = jc.round_to_format(x, "e4m3")
    made = np.asarray(jc.round_to_format(rounded / 3, "e4m3"), np.float64) - np.asarray(rounded / 3, np.float64)
    by_name = {row.primitive: row for row in found.rows}
    assert by_name["div"].contribution == pytest.approx(made.sum(), rel=1e-6)
    assert by_name["div"].rms == pytest.approx(np.sqrt(np.mean(made**2)), rel=1e-6)
    assert by_name["argument [0]"].contribution == pytest.approx(float(jnp.sum(rounded - x)) / 3, rel=1e-4)


def test_the_derivative_of_the_output_is_the_mean_of_those_at_both_results() -> None:
    """The error of a square is (low + wide) (low - wide), so that the parts of a linear program explain all of it."""
    found = jc.emulate(lambda x: x / 3, "e4m3").blame(normal(2, 64), output=lambda y: jnp.sum(y * y))
    assert abs(found.error) > 0.05 and abs(found.unexplained) < 1e-4 * abs(found.error)


@further
def turns_add_up_to_their_row() -> None:
    found = jc.emulate(pendulum, "bfloat16").blame(jnp.array([1.0, 0.0]))
    row = next(row for row in found.rows if row.primitive == "add")
    assert len(row.turns) == 30
    assert sum(row.turns) == pytest.approx(row.contribution)


def test_scopes_and_lines() -> None:
    def fun(x: Array) -> Array:
        with jax.named_scope("first"):
            y = x * x
        return jnp.sum(y / 3)

    found = jc.emulate(fun, "e4m3").blame(normal(1, 4))
    row = next(row for row in found.rows if row.primitive == "mul")
    assert row.scope == "first"
    assert row.place.startswith("test_blame.py:")
    assert row.spec == "float8_e4m3"
    assert str(found).splitlines()[0].split()[:3] == ["scope", "primitive", "spec"]
    assert "<table" in found._repr_html_()
    assert found.columns()["primitive"] == [row.primitive for row in found.rows]
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["primitive"] == found.rows[0].primitive
    assert [abs(row.contribution) for row in found.rows] == sorted(
        (abs(r.contribution) for r in found.rows), reverse=True
    )


def test_a_rule_moves_the_blame() -> None:
    x = normal(1, 32)

    def fun(x: Array) -> Array:
        return jnp.sum(jnp.exp(x) / 3)

    low = jc.emulate(fun, "e4m3").blame(x)
    wide = jc.emulate(fun, "e4m3", rules={"reduce_sum": None}).blame(x)
    assert part(low, "reduce_sum") != 0
    assert part(wide, "reduce_sum") == 0
    assert abs(wide.unexplained) < 0.05 * abs(wide.error)


def test_a_part_of_nothing_has_no_sign() -> None:
    found = jc.emulate(lambda x: x * 2, "bfloat16").blame(jnp.float32(0.7))
    assert found.error < 0 and part(found, "mul") == 0
    assert "-100.0%" not in str(found) and "-0.0%" not in str(found) and " 0.0%" in str(found)


def test_an_exact_program_has_no_error() -> None:
    found = jc.emulate(lambda x: x + 1, "bfloat16").blame(jnp.ones(3))
    assert found.error == 0
    assert all(row.contribution == 0 and np.isnan(row.share) for row in found.rows)


def test_a_method_is_a_function() -> None:
    class Model:
        @jc.emulate("e4m3")
        def __call__(self, x: Array) -> Array:
            return jnp.sum(x / 3)

    assert Model.__call__.blame(Model(), jnp.arange(3.0)).rows


# -- plot --------------------------------------------------------------------------------------------------------------


def test_plot_has_a_bar_for_each_row_and_the_rest() -> None:
    pytest.importorskip("matplotlib")
    found = jc.emulate(pendulum, "bfloat16").blame(jnp.array([1.0, 0.0]))
    bars, lines = found.plot(title="Drift").axes
    assert len(bars.patches) == len(found.rows)
    largest = sorted((row.contribution for row in found.rows), key=abs, reverse=True)
    assert [patch.get_width() for patch in bars.patches] == pytest.approx(largest)
    assert [text.get_text() for text in bars.texts] == [f"{part:.2g}" for part in largest]
    assert len(lines.lines) == 1 + sum(len(row.turns) > 1 for row in found.rows)
    many = dataclasses.replace(found, rows=tuple(found.rows) * 9).plot().axes[0]
    rest = sorted(largest * 9, key=abs, reverse=True)[16:]
    assert many.patches[16].get_width() == pytest.approx(sum(rest))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    low = jc.emulate(jnp.sin, "e4m3")
    with pytest.raises(TypeError, match=r"low=.* must be a function that jchop\.emulate returned"):
        jc.EmulatedFunction.blame(jnp.sin, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="output='sum' must be a function of the result, or None"):
        low.blame(1.0, output="sum")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must give a real number"):
        low.blame(jnp.ones(3), output=jnp.cos)
    with pytest.raises(ValueError, match="max_turns=0"):
        low.blame(1.0, max_turns=0)
    with pytest.raises(TypeError, match="call it outside of"):
        jax.jit(lambda x: low.blame(x))(1.0)
    with pytest.raises(ValueError, match="key=None"):
        jc.emulate(jnp.sin, "e4m3:stochastic").blame(1.0)
    with pytest.raises(ValueError, match="no floating-point number"):
        jc.emulate(lambda x: x > 1, "e4m3").blame(1.0)


@pytest.mark.parametrize("output", [None, jnp.sum])
def test_an_overflow_has_no_parts(output: Any) -> None:
    with pytest.raises(ValueError, match=r"the output is not finite.*stop_at='overflow'"):
        jc.emulate(lambda x: x * 200, "e4m3").blame(jnp.array([1.0, 2.0]), output=output)


def test_a_nan_has_no_parts() -> None:
    with pytest.raises(ValueError, match=r"the output is NaN.*stop_at='nan'"):
        jc.emulate(jnp.log, "bfloat16").blame(jnp.array([-1.0, 2.0]))


def test_callbacks_have_no_derivative() -> None:
    def fun(x: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(a) * np.float32(1.1), jax.typeof(x), x) * 1.3

    with pytest.raises(ValueError, match=r"blame needs the derivative of pure_callback \(.*test_blame.py:\d+\)"):
        jc.emulate(fun, "bfloat16").blame(jnp.ones(3))


def test_infinities_inside_have_no_parts_but_those_that_do_not_count() -> None:
    """As the bias correction of Adam in bfloat16: 1 - 0.999 is 0 there, and the update is 0."""
    x = jnp.array([1.5, 2.5])
    with pytest.raises(ValueError, match=r"result of div \(.*test_blame.py:\d+\) is not finite although the output is"):
        jc.emulate(lambda x: jnp.sum(x / (x / (1 - 0.999 * x / x))), "bfloat16").blame(x)
    found = jc.emulate(lambda x: jnp.sum(jnp.where(x > 2, jnp.log(x - x), x / 3)[:1]), "bfloat16").blame(x)
    assert found.error == pytest.approx(0, abs=0.01) and np.isfinite(found.unexplained)
    want = jnp.sin(x)
    with pytest.raises(ValueError, match=r"output=.* has no finite derivative at both results"):
        jc.emulate(jnp.sin, "bfloat16").blame(x, output=lambda y: jnp.linalg.norm(y - want))


# -- infinite derivatives ----------------------------------------------------------------------------------------------

ROOTS = np.array([0.0, 0.1, 0.7], np.float32)
STEEP: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "sqrt": (lambda x: jnp.sqrt(x).sum(), (ROOTS,), "bfloat16"),
    "norm": (lambda x: jnp.linalg.norm(x, axis=1).sum(), (np.outer(ROOTS, ROOTS + 1),), "bfloat16"),
    "distances": (lambda x: jnp.sqrt((x[:, None] - x[None]) ** 2).sum(), (ROOTS,), "bfloat16"),
    "std": (lambda x: jnp.std(jnp.full(3, 2.0) * x[0]) + x[1], (ROOTS,), "bfloat16"),
    # Both errors of the difference cancel, so neither counts.
    "cancellation": (lambda x: jnp.sqrt((x / 3 + 1) - (x / 3 + 1)).sum() + x[1], (ROOTS,), "e4m3"),
    "power": (lambda x, y: (x**y).sum(), (ROOTS, ROOTS[::-1] + 0.1), "bfloat16"),
    "complex": (lambda x: jnp.sqrt(x * (1 + 1j)), (ROOTS,), "bfloat16"),
    "scan": (lambda x: lax.scan(lambda c, _: (jnp.sqrt(c * 0.3), c), x, length=3)[0].sum(), (ROOTS,), "bfloat16"),
    # Equal eigenvalues and singular values: their vectors have no derivative, and do not count.
    "eigvalsh": (lambda x: jnp.linalg.eigvalsh(x * jnp.eye(3)), (np.float32(1.1),), "bfloat16"),
    "svd": (lambda x: jnp.linalg.svd(x * jnp.eye(3))[1], (np.float32(1.1),), "bfloat16"),
    # One end alone has an infinite derivative.
    "acos": (lambda x: jnp.arccos(x), (np.array([0.9999, 0.3], np.float32),), "bfloat16"),
    "underflow": (lambda x, y: x**y, (np.array([1e-5, 0.2], np.float32), np.array([0.3, 0.7], np.float32)), "e4m3"),
    "angle": (jnp.arctan2, (np.array([1e-5, 0.2], np.float32), np.array([2e-5, 0.7], np.float32)), "e4m3"),
}


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("name", STEEP)
def test_parts_at_infinite_derivatives(name: str) -> None:
    """Without an error at the operands they have no part; with one they have the secant."""
    fun, args, spec = STEEP[name]
    low = jc.emulate(fun, spec)
    found = low.blame(*args)
    want, got = (
        np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(jax.jit(f)(*args))]) for f in (fun, low)
    )
    assert abs(found.error) == pytest.approx(float(np.linalg.norm(got - want)), rel=1e-3) and found.error != 0
    assert sum(row.contribution for row in found.rows) + found.unexplained == pytest.approx(found.error, rel=1e-9)
    assert abs(found.unexplained) <= 1e-3 * abs(found.error)


def test_operands_that_do_not_differ_have_no_part() -> None:
    """The root of 0 adds nothing to the parts of the others."""
    one, two = (jc.emulate(lambda x: jnp.sqrt(x).sum(), "bfloat16").blame(x) for x in (ROOTS, ROOTS[1:]))
    assert part(one, "sqrt") == pytest.approx(part(two, "sqrt"), rel=1e-6)
    assert part(one, "argument [0]") == pytest.approx(part(two, "argument [0]"), rel=1e-6)
    found = jc.emulate(lambda x: x * 3, "bfloat16").blame(ROOTS, output=lambda y: jnp.sqrt(y).sum())
    assert abs(found.unexplained) <= 1e-3 * abs(found.error)


def test_nan_that_the_output_does_not_use_has_no_part() -> None:
    """The logarithms of the second row are NaN in both programs, and so are derivatives of their product."""
    x = np.array([[3.3, 5.7], [-1.1, -2.3]], np.float32)
    one, two = (jc.emulate(lambda x: jnp.prod(jnp.log(x), 1)[0], "bfloat16").blame(y) for y in (x, x[:1]))
    assert one.error == pytest.approx(two.error, rel=1e-4) and one.error != 0
    parts = [{row.primitive: row.contribution for row in found.rows} for found in (one, two)]
    assert parts[0] == pytest.approx(parts[1], rel=1e-4, abs=1e-6)


SINGULAR = np.diag(np.array([1, 2, 0], np.float32))


@pytest.mark.in_turn(10)
@pytest.mark.parametrize(
    ("fun", "spec", "x", "words"),
    [
        # The slope of 1 / x at 1e-26 is beyond float32.
        (
            lambda x: 1 / jnp.exp(x),
            "bfloat16",
            -60.1,
            r"derivative of div \(.*\) is not finite at \d\S*e-27 although its result is",
        ),
        (
            lambda x: jnp.linalg.qr(x * SINGULAR)[1].sum(),
            "bfloat16",
            1.1,
            r"derivative of qr \(.*test_blame.py:\d+\) is not finite although its result",
        ),
        # In the carrier.
        (lambda x: 2 / jnp.exp(x), "e4m3:saturate", 100, r"part of exp \(.*\) is not finite although the output is"),
    ],
)
def test_an_infinite_derivative_is_named(fun: Callable[[Array], Any], spec: str, x: float, words: str) -> None:
    """It is no infinite value, so that more range would not help."""
    with pytest.raises(ValueError, match=words):
        jc.emulate(fun, spec).blame(np.float32(x))


def test_a_derivative_of_the_output_that_overflows_is_named() -> None:
    """Each factor has a finite derivative; their product is beyond float32. Adjoints of sums overflow too."""

    def product(x: Array) -> Array:
        return x / np.float32(3) * np.float32(1e20) * np.float32(1e20) * np.float32(1e18)

    def total(x: Array) -> Array:
        y = x / np.float32(3)
        return y * np.float32(3e38) + y * np.float32(3e38)

    said = r"derivative of the output by the result of div \(.*\) overflows float32, .* float64 arrays .* fewer turns"
    for fun in (product, total):
        with pytest.raises(ValueError, match=said):
            jc.emulate(fun, "bfloat16").blame(np.float32(1e-25))
    with jax.enable_x64(True):
        found = jc.emulate(product, "bfloat16").blame(np.float64(1e-25))
    assert abs(found.unexplained) <= 1e-9 * abs(found.error)


# -- choices -----------------------------------------------------------------------------------------------------------

#: Rounding makes operands equal, or changes their order.
CHOICES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, float]]] = {
    "max": (jnp.max, (np.array([0.51, 0.5], np.float32),), {"argument [0]": -0.01}),
    "min": (jnp.min, (np.array([0.51, 0.5], np.float32),), {"argument [0]": 0}),
    "sort": (lambda x: jnp.sort(x)[0], (np.array([0.51, 0.5], np.float32),), {"argument [0]": 0}),
    "equal": (lambda a, b: jnp.maximum(a * 1.1, b), (2.0, 2.1), {"mul": -0.2, "argument [1]": 0}),
    # 2.52 becomes 2 and 2.5 stays, so the maximum moves by -0.02: 1/26 of the first operand's error.
    "order": (lambda a, b: jnp.maximum(a * 1.12, b), (2.25, 2.5), {"mul": -0.24 / 26, "argument [0]": -0.28 / 26}),
    # The emulated a is not above 0.6, which becomes 0.625 too; there a + 0.6 is 1.25, as is 2 * a.
    "where": (lambda a: jnp.where(a > 0.6, 2 * a, a + 0.6), (0.655,), {"add": 0, "argument [0]": -0.06}),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", CHOICES)
def test_parts_of_choices(name: str) -> None:
    """By hand, in two bits."""
    fun, args, want = CHOICES[name]
    found = jc.emulate(fun, "e5m2").blame(*map(np.float32, args))
    assert {row.primitive: row.contribution for row in found.rows if row.primitive in want} == pytest.approx(
        want, rel=1e-4, abs=1e-7
    )
    assert abs(found.unexplained) < 1e-6


def piecewise_linear(seed: int, n: int = 6) -> tuple[Callable[[Array], Array], Array]:
    """A random program, and its argument."""
    rng = np.random.default_rng(seed)
    choices: list[Callable[..., Array]] = [
        lambda y, z, c: jnp.maximum(y * c, z),
        lambda y, z, c: jnp.minimum(y, z * c),
        lambda y, z, c: jnp.sort(y * c)[::-1],
        lambda y, z, c: y - jnp.median(z) * c,
        lambda y, z, c: jnp.clip(y, 0.1, c),
        lambda y, z, c: jnp.where(y > z, y * c, z * c),
        lambda y, z, c: lax.cummax(y * c),
        lambda y, z, c: y + jnp.tile(lax.top_k(z * c, n // 2)[0], 2),
        lambda y, z, c: y * c - y.max() + z[jnp.argmin(z)],
    ]
    steps = [(choices[i], float(rng.uniform(0.6, 1.6))) for i in rng.choice(len(choices), 5)]

    def fun(x: Array) -> Array:
        for choice, c in steps:
            x = choice(x, x[::-1], c)
        return jnp.sum(x * jnp.arange(1.0, n + 1))

    return fun, normal(seed, n)


@further
@pytest.mark.in_turn(100)
@pytest.mark.parametrize("seed", [1, 2, 3, 6])
def parts_of_piecewise_linear_programs_add_up(seed: int) -> None:
    fun, x = piecewise_linear(seed)
    found = jc.emulate(fun, "e5m2").blame(x)
    assert abs(found.unexplained) < 1e-5 * sum(abs(row.contribution) for row in found.rows)


@further
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("top", [False, True])
def parts_of_sorts_add_up(top: bool) -> None:
    """In one bit numbers change many places, and the operands at one place in the two programs may both grow."""
    fun = (lambda x: lax.top_k(x[0] * x[1] + x[2], 9)[0].T) if top else lambda x: jnp.sort(x[0] * x[1] + x[2], axis=0)
    found = jc.emulate(fun, "e5m1").blame(normal(5, 3, 12, 12), output=lambda y: jnp.sum(y[1:9:2]))
    assert {row.primitive for row in found.rows} == {"argument [0]", "mul", "add"}
    assert abs(found.unexplained) < 1e-5 * sum(abs(row.contribution) for row in found.rows)


@pytest.mark.parametrize(
    ("turns", "start", "part"),
    [(4, 0.7, ""), (8, 1.3, ""), (10, 1.3, "29% of the error"), (20, 0.7, "a part larger than the error")],
)
def test_a_rest_of_a_fifth_of_the_error_has_a_note(turns: int, start: float, part: str) -> None:
    """Newton's method for the roots of x² + 1 is chaotic on the real axis: derivatives grow twofold in each turn."""

    def newton(x: Array) -> Array:
        return lax.scan(lambda x, _: ((x * x - 1) / (x + x), None), x, length=turns)[0]

    found = jc.emulate(newton, "bfloat16").blame(jnp.float32(start))
    assert (abs(found.unexplained) > 0.2 * abs(found.error)) == bool(part)
    assert [note[: note.index(":")] for note in found.notes] == [f"no row explains {part}"] * bool(part)
    assert not part or "blame fewer turns of loops, or take a format with more digits" in found.notes[0]


def test_parts_that_cancel_have_no_note() -> None:
    """No error is left, but the carrier's own rounding errors."""
    programs: list[tuple[Callable[[Array], Array], Array]] = [
        (lambda x: jnp.sum(x / 3), jnp.array([1.0, 2.0])),
        (lambda x: jnp.sum(jnp.exp(x)) / jnp.sum(jnp.exp(x)), jnp.arange(4.0) / 3),
    ]
    for fun, x in programs:
        found = jc.emulate(fun, "e4m3").blame(x)
        assert found.error == 0 < abs(found.unexplained) and not found.notes


@pytest.mark.parametrize(
    ("diverges", "value", "parts", "why"),
    [
        (False, math.nan, (1.0, -0.5), "far from linear"), (False, math.nan, (100.0, -99.5), "100 times the error"),
        (True, math.nan, (100.0, -99.5), "would make other turns"), (False, 1e8, (1.0, -0.5), "a step of the carrier"),
    ],
)  # fmt: skip
def test_a_rest_has_a_reason(diverges: bool, value: float, parts: Sequence[float], why: str) -> None:
    found = jc.emulate(lambda x: x / 3, "bfloat16").blame(jnp.float32(1), gains=0)
    rows = [dataclasses.replace(found.rows[0], contribution=part) for part in parts]
    notes = list(_blame_notes(diverges, 1.0, value, 0.5, rows))
    assert (
        len(notes) == 1 + diverges and notes[-1].startswith("no row explains 50% of the error: ") and why in notes[-1]
    )
    assert len(list(_blame_notes(diverges, 1.0, value, 0.19, rows))) == diverges


def test_a_matrix_is_factored_by_code_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    a, x = with_diagonal(5, 3, 1, 3), normal(6, 3)

    def compiled(turns: int) -> int:
        low = jc.emulate(
            lambda x: lax.scan(lambda c, _: (jnp.linalg.solve(a, c) + x, None), x, length=turns)[0], "e5m5"
        )
        with jax.log_compiles():
            caplog.clear()
            assert len(low.blame(x, gains=0).rows[0].turns) == turns
        return sum("Finished XLA compilation" in record.message for record in caplog.records)

    compiled(2)
    assert compiled(3) == compiled(5) <= 3  # the factors and two triangular systems


# -- loops ------------------------------------------------------------------------------------------------------------


def test_a_choice_in_a_loop_is_that_of_the_emulated_program() -> None:
    """In two bits 1.4 rounds to 1.5, which is kept; in the carrier's own run it would be replaced by 100."""

    def fun(x: Array) -> Array:
        return jax.lax.while_loop(
            lambda c: c[1] < 2, lambda c: (jnp.where(c[0] < 1.45, 100.0, c[0]), c[1] + 1), (x, 0)
        )[0]

    found = jc.emulate(fun, "e5m1").blame(jnp.float32(1.4))
    assert (found.value, found.reference) == (1.5, pytest.approx(1.4))
    assert abs(found.unexplained) < 1e-6


PATHS: dict[str, Callable[[Array], Array]] = {
    "while": lambda x: lax.while_loop(lambda c: c < 1, lambda c: c + c, x),
    "cond": lambda x: lax.cond(x < 1, lambda x: x * 2, lambda x: x / 4, x),
    "where": lambda x: lax.while_loop(
        lambda c: c[1] < 2, lambda c: (jnp.where(c[0] < 1, c[0] * 2, c[0]), c[1] + 1), (x, 0)
    )[0],
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_the_carrier_would_not_take_has_a_note(name: str) -> None:
    """In two bits 0.99 rounds to 1, and 0.3 to 0.3125, which is on the same side of 1."""
    low = jc.emulate(PATHS[name], "e5m2")
    for x, other in ((jnp.float32(0.99), True), (jnp.float32(0.3), False)):
        found = low.blame(x)
        assert (abs(found.error - float(low(x) - PATHS[name](x))) > 0.1) == other
        assert ("the carrier alone would make other turns" in str(found)) == other == bool(found.notes)


@further.first
def a_loop_without_end_is_refused_early() -> None:
    def fun(x: Array) -> Array:
        return jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] * -1, c[1] + 1), (x, 0))[0]

    low = jc.emulate(fun, "bfloat16")
    with pytest.raises(ValueError, match=r"stopped after max_turns=1000 turns; its condition at .*max_turns=100 gives"):
        low.blame(jnp.float32(1.0))
    with pytest.warns(RuntimeWarning, match="after max_turns=3 turns"):
        assert low.blame(jnp.float32(1.0), max_turns=3).rows


def test_constants_of_moves_have_rows() -> None:
    x = normal(1, 8)
    found = jc.emulate(lambda x: jnp.sum(jnp.maximum(x, 0.13) * jnp.full(8, 1.1)), "e4m3").blame(x)
    (row,) = (row for row in found.rows if row.primitive == "constant")
    assert row.contribution and row.equations == 2
    assert abs(found.unexplained) < 1e-5 * abs(found.error)


ENTERED: dict[str, Callable[[Array], Any]] = {
    "result": lambda x: jnp.float32(0.1),
    "result of a call": lambda x: jax.jit(lambda y: jnp.float32(0.1))(x),
    "jit": lambda x: jax.jit(lambda y, c: c + 0 * y)(x[0], 0.1),
    "where": lambda x: jnp.where(x < 2, x, 0.1)[1],
    "cond": lambda x: lax.cond(x[0] > 0, lambda c: c, lambda c: -c, 0.1),
    "scan": lambda x: lax.scan(lambda c, y: (c + 0 * y, None), 0.1, x)[0],
}


@pytest.mark.in_turn(7)
@pytest.mark.parametrize("name", ENTERED)
def test_constants_of_calls_and_results_have_rows(name: str) -> None:
    """In bfloat16 0.1 is 0.10009765625."""
    fun = ENTERED[name]
    found = jc.emulate(fun, "bfloat16").blame(np.array([1, 2], np.float32))
    assert {row.primitive for row in found.rows} <= {"constant", "add", "sub", "mul", "rem"}
    (row,) = (row for row in found.rows if row.primitive == "constant")
    made = 0.10009765625 - float(np.float32(0.1))
    assert row.contribution == pytest.approx(made, rel=1e-4)
    assert row.source == f"{__file__}:{fun.__code__.co_firstlineno}"
    assert abs(found.unexplained) < 1e-6


# -- shards ------------------------------------------------------------------------------------------------------------


def data_parallel(check_vma: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of training with eight shards of a batch, and its arguments."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(w: tuple[Array, Array], x: Array, y: Array) -> Array:
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2)

    def local(w: tuple[Array, Array], x: Array, y: Array) -> Any:
        grads = lax.pmean(jax.grad(loss)(w, x, y), "data")
        return jax.tree.map(lambda one, two: one - 0.1 * two, w, grads)

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma)
    return step, ((normal(1, 8, 16) / 3, normal(2, 16, 4) / 4), normal(3, 16, 8), normal(4, 16, 4))


def tensor_parallel() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two layers, their weights cut over one axis of a mesh and the batch over the other."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(w: tuple[Array, Array], x: Array) -> Array:
        return lax.psum(jnp.tanh(x @ w[0]) @ w[1], "model")

    specs = ((P(None, "model"), P("model", None)), P("data"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    return step, ((normal(1, 8, 16) / 3, normal(2, 16, 4) / 4), normal(3, 16, 8))


def test_a_sum_over_shards_has_a_row() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    fun = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    x = np.array([1.0, 3.0, 0.3125, 0.625], np.float32)
    found = jc.emulate(fun, "e5m2").blame(x, output=jnp.sum)
    rows = {row.primitive: row for row in found.rows}
    assert rows["psum_invariant"].contribution == found.error == 1.25 - 1.3125 + 3.5 - 3.625
    assert rows["psum_invariant"].results == 4 and "argument [0]" not in rows  # the numbers are those of the format


def test_rows_of_a_loop_in_shards_of_columns_have_the_parts_of_their_weights() -> None:
    """Horner's rule in every column: the errors of the rows count 9, 3 and 1 times, all else is exact."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def local(x: Array) -> Array:
        return lax.scan(lambda c, row: (c * 3 + row, None), jnp.zeros_like(x[0]), x)[0]

    fun = jax.shard_map(local, mesh=mesh, in_specs=P(None, "x"), out_specs=P("x"))
    x = np.array([[1.01, 2.02], [1.03, 3.01], [2.01, 1.02]], np.float32)
    found = jc.emulate(fun, "e5m8").blame(x, output=lambda y: y @ jnp.array([1.0, 100.0]))
    made = np.asarray(jc.round_to_format(x, "e5m8"), np.float64) - x
    (row,) = (row for row in found.rows if row.primitive == "argument [0]")
    assert row.contribution == pytest.approx([9, 3, 1] @ made @ [1, 100], rel=1e-5)


@further
@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    ("program", "spec"),
    [(tensor_parallel, "bfloat16"), (data_parallel, "e5m5:stochastic"), (partial(data_parallel, True), "e4m3")],
)
def parts_of_sharded_programs_add_up(program: Any, spec: str) -> None:
    """The error is that of the run on eight devices, with the draws of each shard."""
    fun, args = program()
    low = jc.emulate(fun, spec, key=KEY)
    found = low.blame(*args)
    got, want = (jax.tree.leaves(jax.jit(f)(*args)) for f in (low, fun))
    error = math.sqrt(sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(got, want, strict=True)))
    assert found.error == pytest.approx(error, rel=1e-4)
    assert abs(found.unexplained) <= 0.01 * found.error
    assert any(row.primitive.startswith("psum") and row.contribution for row in found.rows)


RING = [(i, (i + 1) % 4) for i in range(4)]
COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "ppermute": lambda x: lax.scan(
        lambda c, _: ((c[0] + c[1] / 3, lax.ppermute(c[1], "x", RING)), jnp.sum(c[1] / 7)), (x, x), length=3
    )[0][0],
    "rows": lambda x: lax.scan(lambda c, y: (c / 3 + y, jnp.sum(c / 7)), x[:2], x.reshape(2, 2))[1],
    "while": lambda x: lax.while_loop(lambda c: jnp.max(jnp.abs(c)) < 20, lambda c: c * 1.7, x + 0.1),
    "cond": lambda x: lax.cond(lax.axis_index("x") % 2 == 0, lambda y: y / 7, lambda y: y * 1.3, x),
    "gather": lambda x: jnp.tanh(lax.all_gather(x / 3, "x", tiled=True)[:4]),
    "all_to_all": lambda x: lax.all_to_all(x.reshape(4, 1) / 3, "x", 0, 0)[:, 0] * 1.1,
    "scatter": lambda x: lax.psum_scatter(jnp.tile(x / 3, 2), "x", tiled=True) * 1.1,
    "pmax": lambda x: x / (lax.pmax(jnp.max(x), "x") + 7),
}


@pytest.mark.in_turn(100)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_and_loops_of_shards(name: str) -> None:
    """Each shard has its own branches and turns of loops."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    fun = jax.shard_map(COLLECTIVES[name], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x, low = normal(5, 16), jc.emulate(fun, "e5m4")  # the two largest numbers are equal
    found = low.blame(x)
    assert found.error > 0
    assert abs(found.unexplained) <= 0.01 * found.error
    if name != "while":
        assert found.error == pytest.approx(float(jnp.linalg.norm(jax.jit(low)(x) - jax.jit(fun)(x))), rel=1e-4)


def nested_meshes() -> tuple[Callable[..., Array], tuple[Array, ...]]:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def inner(x: Array) -> Array:
        return lax.psum(x / 3, "y")

    def outer(x: Array) -> Array:
        return jax.shard_map(inner, in_specs=P("y"), out_specs=P(), axis_names={"y"})(x * 1.1)

    nested = jax.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    return jax.jit(nested), (normal(5, 8),)


def axes_in_one_dimension() -> tuple[Callable[..., Array], tuple[Array, ...]]:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    both = jax.shard_map(lambda x: lax.psum(x / 3, ("x", "y")), mesh=mesh, in_specs=P(("y", "x")), out_specs=P())
    return both, (normal(5, 8),)


def partitioned() -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """By the compiler: arguments on the devices of a mesh, and constraints in the program."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))

    @jax.jit
    def fun(w: Array, x: Array) -> Array:
        return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, rows)) / 3

    return fun, (normal(1, 8, 8), jax.device_put(normal(2, 8, 8), rows))


def explicit_axes() -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """Types hold the sharding, and JAX compares those of cotangents."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))

    def fun(w: Array, x: Array) -> Array:
        both = jax.shard_map(lambda x: x / 3 + lax.psum(jnp.tanh(x), "x"), mesh=mesh, out_specs=P("x"))(x) + x / 7
        return jax.sharding.reshard(both, P()) @ w

    return fun, (
        jax.device_put(normal(1, 8, 8), NamedSharding(mesh, P())),
        jax.device_put(normal(2, 8, 8), NamedSharding(mesh, P("x"))),
    )


@further
@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    ("make", "spec", "rest"),
    [
        (axes_in_one_dimension, "e5m4", 1e-5),
        (nested_meshes, "e5m4", 1e-5),
        (partitioned, "bfloat16", 0.01),
        (explicit_axes, "bfloat16", 0.01),
    ],
)
def parts_of_programs_on_meshes_add_up(make: Callable[[], Any], spec: str, rest: float) -> None:
    fun, args = make()
    mesh = args[1].sharding.mesh if make is explicit_axes else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        low = jc.emulate(fun, spec)
        found = low.blame(*args)
        want = float(jnp.linalg.norm(jax.jit(low)(*args) - fun(*args)))
    assert found.error == pytest.approx(want, rel=1e-3 if rest == 0.01 else 1e-4)
    assert abs(found.unexplained) <= rest * found.error


# -- replay ------------------------------------------------------------------------------------------------------------


class Replay(PairedRun):
    """The program in the carrier; the errors that a tape recorded are added, and nothing is rounded."""

    def errors_of(self, tape: Tape) -> None:
        self.errors: dict[Any, deque[list[Any]]] = {}
        steps = (entry.step for entry in tape.entries if not isinstance(entry.step, str | None))
        self.lost_constants = {id(step.eqn): id(step) for step in steps if step.kind == "constant"}
        for entry in tape.entries:
            made = [node.rounding_error for node in entry.results]
            if any(x is not None for x in made):
                key = entry.step if isinstance(entry.step, str) else (id(entry.step), entry.turn)
                self.errors.setdefault(key, deque()).append(made)

    def added(self, key: Any, values: list[Any]) -> list[Any]:
        errors = self.errors[key].popleft()
        return [
            x if made is None else jnp.asarray((np.asarray(x, np.float64) + made).astype(x.dtype))
            for x, made in zip(values, errors, strict=True)
        ]

    def run(self, part: Any, seeds: Any, args: list[Any]) -> list[Any]:
        step, values = part, [pair[0] for pair in args]
        lost = self.lost_constants.get(id(step.eqn))
        if lost is not None and self.errors.get((lost, self.turn)):  # such as 1e-5 in e4m3, which adds nothing
            values = [
                self.added((lost, self.turn), [x])[0] if r else x for r, x in zip(step.rounds, values, strict=True)
            ]
        out = self.reference.bind(with_vmap_collective(step, self.axes), values, self.axes, rounds=False)
        key = (id(step), self.turn)
        return [(x, x) for x in (self.added(key, out) if self.errors.get(key) else out)]

    def rounded_operands(self, step: Any, seeds: Any, args: list[Any]) -> list[Any]:
        rounds = step.rounds if step.choice.spec is not None and step.rounds else [False] * len(args)
        key = (id(step), self.turn)
        return [(x := self.added(key, [pair[0]])[0], x) if r else pair for r, pair in zip(rounds, args, strict=True)]


@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("scan", "bfloat16"),
        ("long scan", "bfloat16"),
        ("long while", "e4m3:saturate"),
        ("long solve", "e4m3:saturate"),
        ("block", "e4m3"),
        ("data parallel", "e4m3"),
        ("tensor parallel", "bfloat16"),
    ],
)
def test_recorded_errors_fed_back_give_the_emulated_result(name: str, spec: str) -> None:
    """Bit for bit, with the emulated turns of loops: a thousand steps of an ODE, conjugate gradients, LU, a block."""
    fun, args = {
        **{name: lambda name=name: PROGRAMS[name] for name in PROGRAMS},
        "block": transformer_block,
        "data parallel": data_parallel,
        "tensor parallel": tensor_parallel,
    }[name]()
    low = jc.emulate(fun, spec)
    program = trace_program(low.fun, low.settings, args, {})
    values, constants, _ = round_on_entry(program, low.settings.spec, None)
    every = [*program.values, *program.plan.consts]
    tape, replay = Tape(CarrierReference(), 1000), Replay(CarrierReference(), 1000)
    pairs = [
        tape.argument(str(i), x, as_jax_value(whole))
        for i, (x, whole) in enumerate(zip([*values, *constants], every, strict=True))
    ]
    interpret(tape, program.plan, [None], pairs[: len(values)], pairs[len(values) :])
    replay.errors_of(tape)
    given = [as_jax_value(x) for x in every]
    given = [replay.added(str(i), [x])[0] if str(i) in replay.errors else x for i, x in enumerate(given)]
    twice = [(x, x) for x in given]
    out = interpret(replay, program.plan, [None], twice[: len(values)], twice[len(values) :])
    assert not any(replay.errors.values()) and len(replay.errors) >= 5
    want = jax.tree.leaves(jax.jit(low)(*args))
    for (got, _), x in zip(out, want, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)


test_further = further.test()
