"""`emulate(stop_at=)`: a call ends at the first overflow, NaN or invalid operation, with its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jchop as jc
from jchop._program import control

Array = jax.Array
KEY = jax.random.key(2)


def late(x: Array) -> Array:
    with jax.named_scope("head"):
        y = jnp.exp(x)
    return y - y


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ("overflow", r"first overflow: exp of 8.0 is inf .*test_stop.py:\d+ in scope 'head'"),
        ("nan", r"first nan: sub of inf, inf is nan .*test_stop.py:\d+"),
        ("invalid", r"first invalid: sub of inf, inf is nan"),
    ],
)
def test_a_call_stops_at_the_first_event_and_names_its_line(event: Any, text: str) -> None:
    low = jc.emulate(late, "e4m3", stop_at=event)
    with pytest.raises(FloatingPointError, match=text):
        low(jnp.array([1.0, 8.0]))
    np.testing.assert_array_equal(low(jnp.array([1.0, 2.0])), [0, 0])


def test_the_place_has_the_turn_and_the_index() -> None:
    def grow(x: Array) -> Array:
        return jax.lax.scan(lambda c, _: (c * 4, None), x, length=10)[0]

    with pytest.raises(FloatingPointError, match=r"mul of 64.0, 4.0 is inf \(.*turn 3.*\[1\]"):
        jc.emulate(grow, "e4m3", stop_at="overflow")(jnp.array([2**-6, 1.0]))


def test_arguments_count() -> None:
    with pytest.raises(FloatingPointError, match=r"overflow: argument \[0\], 70000.0, is inf"):
        jc.emulate(lambda x: x, "binary16", stop_at="overflow")(jnp.float32(7e4))
    with pytest.raises(FloatingPointError, match=r"nan: argument \[1\]\['w'\]"):
        jc.emulate(lambda x, p: x * p["w"], "binary16", stop_at="nan")(1.0, {"w": jnp.float32(jnp.nan)})


def test_infinities_of_the_carrier_are_no_overflow() -> None:
    assert float(jc.emulate(lambda x: 1 / x, "e4m3", stop_at="overflow")(0.0)) == np.inf


def walk(x: Array) -> tuple[Array, Array]:
    last = jax.lax.while_loop(lambda c: c > 0.3, lambda c: c * 0.7, x)
    return last, jax.lax.cond(x > 0.5, jnp.sin, jnp.cos, x)


@pytest.mark.parametrize(
    ("fun", "spec"),
    [
        (lambda x: {"y": jnp.sum(x * x) / 3}, "bfloat16"),
        (walk, "e5m7:stochastic"),
        (walk, "e4m3:saturate"),
        (lambda x: jax.jit(jnp.tanh)(x) + 1, "e5m7:stochastic"),
    ],
)
@pytest.mark.in_turn(12)
def test_without_the_event_results_are_those_of_a_plain_call(fun: Callable[..., Any], spec: str) -> None:
    x = jnp.float32(1.3)
    got, want = (jc.emulate(fun, spec, stop_at=event, key=KEY)(x) for event in ("nan", None))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(want)]
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("spec", "x", "text"),
    [
        ("e4m3:saturate", 8.0, r"mul of 8\.0, 32\.0 is 240\.0"),
        ("e4m3:toward_zero", 8.0, r"mul of 8\.0, 32\.0 is 240\.0"),
        ("fixed8.4", 4.0, r"mul of 4\.0, 32\.0 is 127\.9375"),
        ("fixed8.4:wrap", 4.0, r"mul of 4\.0, 32\.0 is -128\.0"),
        ("ufixed8.4", -1.0, r"argument \[0\], -1\.0, is 0\.0"),
    ],
)
def test_results_that_saturate_or_wrap_overflow(spec: str, x: float, text: str) -> None:
    low = jc.emulate(lambda x: x * 32, spec, stop_at="overflow")
    with pytest.raises(FloatingPointError, match="first overflow: " + text):
        low(x)
    assert float(low(2.0)) == 64


def test_the_ends_of_a_format_are_no_overflow() -> None:
    """The step of e4m3 at 240 is 16: up to 248 a number is rounded to 240. An infinity of the carrier has no place."""
    low = jc.emulate(lambda x: x * 4, "e4m3:saturate", stop_at="overflow")
    assert [float(low(x)) for x in (60.0, -60.0)] == [240, -240]
    low = jc.emulate(lambda x, y: x + y, "e4m3:saturate", stop_at="overflow")
    assert [float(low(x, y)) for x, y in ((240.0, 8.0), (-240.0, -8.0))] == [240, -240]
    assert float(jc.emulate(lambda x: jnp.exp(x), "e4m3:saturate", stop_at="overflow")(100.0)) == 240


def test_a_stopped_loop_warns() -> None:
    low = jc.emulate(
        lambda x: jax.lax.while_loop(lambda t: t < 10, lambda t: t + 1, x), "e5m2", max_turns=3, stop_at="nan"
    )
    with pytest.warns(RuntimeWarning, match="max_turns=3"):
        assert float(low(0.0)) == 3


def test_methods_and_decorators() -> None:
    class Model:
        @jc.emulate("e4m3", stop_at="overflow")
        def grow(self, x: Array) -> Array:
            return x * 100

    assert float(Model().grow(1.0)) == 96
    with pytest.raises(FloatingPointError, match=r"mul of 8\.0"):
        Model().grow(8.0)


@pytest.mark.parametrize("outer", [jax.jit, jax.grad, jax.vmap])
def test_traced_arguments_are_refused(outer: Any) -> None:
    low = jc.emulate(jnp.sin, "e4m3", stop_at="nan")
    with pytest.raises(TypeError, match="stop_at='nan' needs arguments that are not traced"):
        outer(low)(jnp.ones(3) if outer is jax.vmap else 1.0)


def test_another_event_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_at='underflow'"):
        jc.emulate(jnp.sin, "e4m3", stop_at="underflow")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("step", "limit", "spec", "stays"),
    [
        (0.01, 10, "bfloat16", 9.9375), (0.5, 10, "bfloat16", None), (0.01, 10, "binary32", None),
        (1, 1000, "e4m3", 240), (16, 1000, "e4m3", None), (0.001, 3, "fixed4.4", 2.9375), (1, 256, "bfloat16", None),
    ],
)  # fmt: skip
def test_a_loop_whose_steps_are_rounded_away_warns_when_it_is_traced(
    step: float, limit: float, spec: str, stays: float | None
) -> None:
    def wait(t: Array, limit: float) -> Array:
        return jax.lax.while_loop(lambda c: limit > c[1], lambda c: (c[0] + 1, c[1] + step), (0, t))[1]

    low = jax.jit(jc.emulate(wait, spec), static_argnums=1)
    if stays is None:
        assert low(jnp.float32(0), limit) >= limit
        return
    with pytest.warns(RuntimeWarning, match=rf"test_stop.py:\d+ stays at {stays}.* below {limit}, as") as found:
        low.lower(jnp.float32(0), limit)
    assert len(found) == 1
    with pytest.warns(RuntimeWarning, match="after max_turns=2000 turns"):
        jax.block_until_ready(jax.jit(jc.emulate(wait, spec, max_turns=2000), static_argnums=1)(0.0, limit))
        jax.effects_barrier()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.jacfwd], ids=["eager", "jit", "vmap", "jvp"])
def test_a_loop_that_keeps_its_bits_stops(wrap: Any) -> None:
    """A count that is compared with infinity alone does not hide it; a traced loop says nothing, as its export."""

    def wait(t: Any) -> Any:
        step = 0.01 + 0 * t

        def body(c: Any) -> Any:
            return c[0] + step, c[1] + 1, -c[2]

        return jax.lax.while_loop(lambda c: (c[0] < 10) & (c[1] < jnp.inf), body, (t, 0, t))[::2]

    low, t = jc.emulate(wait, "bfloat16"), jnp.zeros(2 if wrap is jax.vmap else ())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        last = wrap(low)(t)
    assert np.isnan(np.asarray(last)).all() or wrap is jax.jacfwd
    assert len(found) == (wrap not in (jax.jit, jax.vmap, jax.jacfwd))
    assert all("would never end" in str(one.message) and "4.0 < 10.0" in str(one.message) for one in found)
    jax.export.export(jax.jit(low))(t[..., 0] if t.shape else t)
    assert np.all(np.asarray(wrap(jc.emulate(wait, "binary32"))(t + 9.9)[0]) > 0)


def test_a_loop_that_counts_its_turns_compiles_as_before() -> None:
    def newton(x: Array) -> Array:
        y = jax.lax.while_loop(lambda c: c[0] < 20, lambda c: (c[0] + 1, (c[1] + x / c[1]) / 2), (0, x))[1]
        return jax.lax.fori_loop(0, jnp.int32(y), lambda i, y: y * 0.5, y)

    low, real = jc.emulate(newton, "bfloat16"), control.deciding_places
    texts = []
    for places in (real, lambda step: ()):
        with mock.patch.object(control, "deciding_places", places):
            texts.append(jax.jit(lambda x: low(x)).lower(2.0).as_text())
    assert texts[0] == texts[1]
