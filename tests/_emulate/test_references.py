"""`jc.emulate` of functions that write to mutable references (`jax.new_ref`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jchop as jc

Array = jax.Array
X = jnp.array([1.0, 0.7, 1.3])


def listed(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x).tolist(), tree)


def one_by_one(x: Array) -> Any:
    ref = jax.new_ref(jnp.zeros(3))
    ref[0] = x[0] / 3
    ref[1] = ref[0] + x[1]
    return ref[...]


def in_a_loop(x: Array) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    def turn(i: Any, count: Any) -> Any:
        ref[i] = x[i] / 3 + ref[i - 1]
        return count

    lax.fori_loop(0, 3, turn, 0)
    return ref[...]


def in_a_while_loop(x: Array) -> Any:
    ref = jax.new_ref(x[1])

    def turn(s: Any) -> Any:
        ref[...] = ref[...] + s / 3
        return s + 1

    return lax.while_loop(lambda s: s < 3, turn, x[0]), ref[...]


def in_a_branch(x: Array) -> Any:
    ref = jax.new_ref(x)
    lax.cond(x[0] > 0, lambda: ref.__setitem__(0, ref[0] / 3), lambda: None)
    return ref[...]


def in_a_call(x: Array) -> Any:
    ref = jax.new_ref(x)
    jax.jit(lambda r, t: r.__setitem__(0, r[0] + t / 3))(ref, x[1])
    return ref[...]


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        pytest.param(one_by_one, [0.3125, 1.0, 0.0], marks=pytest.mark.smoke),
        (in_a_loop, [0.3125, 0.5, 1.0]),
        (in_a_while_loop, [3.0, 1.5]),
        (in_a_branch, [0.3125, 0.75, 1.25]),
        (in_a_call, [1.25, 0.75, 1.25]),
    ],
)
def test_what_is_written_is_rounded(fun: Callable[[Array], Any], want: list[Any]) -> None:
    """Numbers of e5m2: 1/3 is 0.3125, 0.7 is 0.75, 1.3 is 1.25. Beside the carrier, too, each program has its own."""
    low = jc.emulate(fun, "e5m2")
    stopping = jc.emulate(fun, "e5m2", stop_at="nan")
    assert listed(low(X)) == listed(jax.jit(low)(X)) == listed(stopping(X))
    assert jax.tree.leaves(listed(low(X))) == want


def test_a_constant_that_is_written_is_rounded() -> None:
    def fun(x: Array) -> Any:
        ref = jax.new_ref(x)
        ref[0] = 0.1
        return ref[...]

    assert jc.emulate(fun, "e4m3")(X)[0] == jc.round_to_format(jnp.float32(0.1), "e4m3")


def divide(ref: Any, x: Array) -> Any:
    ref[0] = x[0] / 3
    ref[1] = ref[0] + x[1]
    return ref[...] * 3


def test_references_from_outside() -> None:
    """As arguments and captured, twice; a report runs its reference program on copies."""
    ref = jax.new_ref(jnp.full(3, 0.5))
    given, captured = jc.emulate(divide, "e5m2"), jc.emulate(lambda x: divide(ref, x), "e5m2")
    for call in (lambda: given(ref, X), lambda: captured(X), lambda: jc.emulate(divide, "e5m2", stop_at="nan")(ref, X)):
        ref[...] = jnp.full(3, 0.5)
        assert call().tolist() == call().tolist() == [1.0, 3.0, 1.5]
        assert ref[...].tolist() == [0.3125, 1.0, 0.5]
    report = given.report(ref, X, reference="binary64")
    assert {row.primitive: row.deviation for row in report.rows}["mul"] == pytest.approx(0.1 / 3.1, rel=1e-6)


def test_samples_write_to_their_own() -> None:
    ref = jax.new_ref(jnp.float32(0.5))

    def add(x: Array) -> Any:
        ref[...] = ref[...] + x
        return ref[...]

    found = jc.significant_digits(jc.emulate(add, "e5m10:stochastic"), jnp.float32(0.25), key=jax.random.key(0))
    assert (float(found.mean), float(found.spread), float(ref[...])) == (0.75, 0, 0.5)


def test_blame_refuses_them() -> None:
    with pytest.raises(
        NotImplementedError, match=r"derivative of get \(.*references.py:\d+\), which reads a mutable ref"
    ):
        jc.emulate(lambda x: one_by_one(x).sum(), "e5m2").blame(X)
