"""What the public functions do with their arguments; test_misuse holds the errors that a user sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from each_case import each

import jchop as jc
from jchop._core.rounding.random_bits import STREAM_START
from jchop._round.arguments import (
    as_operands,
    carrier_of_dtype,
    mark_results,
    rounding_keys,
    run_numpy,
    run_on_operands,
    stream_offset,
)
from jchop._spec.spec import parse

KEY, OTHER = jax.random.split(jax.random.key(3))
BOTH_DRAW = parse("e5m2:stochastic:gradient=[e5m2:stochastic]")


@each("name", ["float16", "bfloat16", "float32", "float64"])
def test_carriers(name: str) -> None:
    assert carrier_of_dtype(jnp.dtype(name)).name == name


def test_complex_numbers_have_the_carrier_of_their_parts() -> None:
    assert [carrier_of_dtype(np.dtype(name)).name for name in ("complex64", "complex128")] == ["float32", "float64"]
    with pytest.raises(TypeError, match=r"b has dtype complex64, .* allowed: float16, bfloat16, float32, float64\."):
        carrier_of_dtype(np.dtype("complex64"), "b", complex_too=False)


def test_numbers_take_the_dtype_beside_them() -> None:
    arrays = as_operands("abc", (2, jnp.ones(3, jnp.bfloat16), 0.5))
    assert [array.dtype for array in arrays] == [jnp.bfloat16] * 3
    assert as_operands("a", (1.5,))[0].dtype == np.float64
    with pytest.raises(ValueError, match=r"b=1e\+39 is beyond the range of float32"):
        as_operands("ab", (np.ones(3, np.float32), 1e39))


def test_keys_that_nothing_draws_from_are_dropped() -> None:
    assert rounding_keys(parse("e5m2"), KEY, OTHER) == (None, None)
    assert rounding_keys(parse("e5m2:stochastic"), KEY, OTHER) == (KEY, None)
    assert rounding_keys(BOTH_DRAW, KEY, OTHER) == (KEY, OTHER)
    with pytest.raises(ValueError, match=r"gradient_key=None, .* rounds cotangents stochastically"):
        rounding_keys(BOTH_DRAW, KEY)


def test_equal_traced_keys_are_told_by_the_object() -> None:
    jax.eval_shape(lambda a, b: rounding_keys(BOTH_DRAW, a, b)[0], KEY, KEY)
    with pytest.raises(ValueError, match="gradient_key is the same as key"):
        jax.eval_shape(lambda a: rounding_keys(BOTH_DRAW, a, a)[0], KEY)


def test_offsets_are_traced_and_their_high_words_static() -> None:
    assert stream_offset(0, (4,)) == (STREAM_START, ())
    place, (start,) = stream_offset((5 << 32) + 7, (4,))
    assert (place.base, int(start), start.dtype) == (5 << 32, 7, np.int32)
    assert [stream_offset((1 << 31) - i, (4,))[1][0].dtype for i in (0, 1)] == [np.uint32, np.int32]
    place, starts = stream_offset(((1, jnp.int32(2)), (4, 6)), (3, 4))
    assert (place.whole, [int(start) for start in starts]) == ((4, 6), [1, 2])
    with pytest.raises(ValueError, match="the last element would have index 18446744073709551616"):
        stream_offset((1 << 64) - 1, (2,))
    with pytest.raises(ValueError, match="offset=18446744073709551616"):
        stream_offset(1 << 64, (0,))
    with pytest.raises(ValueError, match="random bits end at index 9223372036854775807"):
        stream_offset(1 << 63, (2,), words=2)


def test_results_are_numpy_if_all_operands_are() -> None:
    wide = np.linspace(0, 1, 3)
    result = run_on_operands(lambda x, y, key: x + y, [wide, wide], None)
    assert type(result) is np.ndarray and result.dtype == np.float64
    assert isinstance(run_on_operands(lambda x, key: x[0], [wide], None), np.float64)
    assert isinstance(run_on_operands(lambda x, y, key: x + y, [jnp.ones(3), np.ones(3, np.float32)], None), jax.Array)


def test_linear_functions_with_results_can_be_transposed() -> None:
    (back,) = jax.linear_transpose(lambda x: mark_results(2 * x), jnp.ones(3))(jnp.arange(3.0))
    np.testing.assert_array_equal(back, [0, 2, 4])


def test_numpy_operands_are_constants_within_a_trace() -> None:
    seen = []

    def traced(x: jax.Array) -> jax.Array:
        seen.append(run_numpy(lambda: jnp.sqrt(np.float32(4))))
        return x

    jax.jit(traced)(1.0)
    assert type(seen[0]) is np.ndarray and seen[0] == 2
    with pytest.raises(TypeError, match="offset is traced but the operands are NumPy values"):
        jax.jit(lambda start: run_numpy(lambda: start, offset=((0, start), (4, 4))))(1)


SGD, EYE, LONG = optax.sgd(1.0), np.eye(2, dtype=np.float32), 1 << 31


@each(
    "name, call",
    [
        ("growth_interval", lambda: jc.optim.dynamic_loss_scale(SGD, growth_interval=LONG)),
        ("start", lambda: jc.optim.average_params(start=LONG)),
        ("every", lambda: jc.optim.average_params(every=LONG)),
        ("every", lambda: jc.optim.sparse_params(2, 4, every=LONG)),
        ("every", lambda: jc.distributed.diloco(SGD, SGD, every=LONG)),
        ("maxiter", lambda: jc.math.linalg.cg(EYE, EYE[0], "bfloat16", maxiter=LONG)),
        ("maxiter", lambda: jc.math.linalg.gmres(EYE, EYE[0], "bfloat16", maxiter=LONG)),
        ("iterations", lambda: jc.ptq.sign_round(iterations=LONG)),
        ("iterations", lambda: jc.ptq.hqq(iterations=LONG)),
        ("window", lambda: jc.KVCache.full((1, 4, 1, 2), dtype="float32").mask(window=LONG)),
    ],
)
def test_counts_fit_in_32_bits(name: str, call: Callable[[], Any]) -> None:
    """A program counts in int32, and a longer count is refused before it is traced."""
    with pytest.raises(ValueError, match=rf"{name}=2147483648 must be an integer from [01] to 2147483647"):
        call()
