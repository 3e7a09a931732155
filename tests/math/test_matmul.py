"""`jc.math.matmul`: shapes, dtypes, keys, derivatives, transforms and refusals; test_matmul.py of the reference has the
values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle_matmul import Arithmetic, How, Sum
from refusals import assert_refused

import jchop as jc
from jchop import MatmulSpec

further = Further()

KEY = jax.random.key(7)
HALF = MatmulSpec("e5m10", "e5m10", "e5m10")
#: With the blocks' sums exact in the carrier, and stochastic.
DRAWN = MatmulSpec("e4m3fn", None, "e5m5:stochastic", "matrix_unit(4)")
#: Cheap to compile, and exact for small integers.
UNIT = MatmulSpec(order="matrix_unit(64)")


def integers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(got: Any, expected: Any) -> None:
    """Equal in type, shape and every bit."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(cases.bits(got.ravel()), cases.bits(expected.ravel()))


# -- peers: hardware that rounds every operation -----------------------------------------------------------------------


def numpy_sum(products: np.ndarray) -> np.ndarray:
    """Along the last axis, one after the other, in the arithmetic of the dtype."""
    c = np.zeros(products.shape[:-1], products.dtype)
    for k in range(products.shape[-1]):
        c = c + products[..., k]
    return c


def half_operands(k: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return normal((16, k)).astype(np.float16), normal((k, 16), 1).astype(np.float16)


@further
def half_precision_is_that_of_numpy_in_two_orders_which_differ() -> None:
    """NumPy rounds every float16 operation. Of 256 sums of 64 products most depend on the order."""
    a, b = half_operands()
    products = a[:, None, :] * b.T
    one_by_one = jc.math.matmul(a, b, HALF)
    same(one_by_one, numpy_sum(products))
    in_blocks = jc.math.matmul(a, b, MatmulSpec("e5m10", "e5m10", "e5m10", "blocked(8)"))
    same(in_blocks, numpy_sum(numpy_sum(products.reshape(16, 16, 8, 8))))
    assert np.mean(one_by_one != in_blocks) > 0.6


@further
def single_precision_in_a_double_carrier_is_that_of_numpy() -> None:
    a, b = normal((8, 33)) * np.float32(2.0**-60), normal((33, 8), 1) * np.float32(2.0**-70)
    spec = MatmulSpec("binary32", "binary32", "binary32")
    got = jc.math.matmul(a.astype(np.float64), b.astype(np.float64), spec)
    same(got.astype(np.float32), numpy_sum(a[:, None, :] * b.T))
    assert np.count_nonzero(got) > 32  # subnormal numbers of float32


# -- shapes and dtypes -------------------------------------------------------------------------------------------------

SHAPES = [
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((5,), (5, 4)),
    ((3, 5), (5, 4)),
    ((2, 3, 5), (5, 4)),
    ((2, 3, 5), (5,)),
    ((3, 5), (2, 5, 4)),
    ((5,), (2, 5, 4)),
    ((6, 1, 3, 5), (2, 5, 4)),
    ((0, 5), (5, 4)),
    ((3, 0), (0, 4)),
    ((2, 3, 5), (0, 1, 5, 4)),
]


@further
def shapes_are_those_of_jnp_matmul() -> None:
    pairs = [(integers(left), integers(right, seed=1)) for left, right in SHAPES]
    found = jax.jit(lambda pairs: [jc.math.matmul(a, b, UNIT) for a, b in pairs])(pairs)
    for got, (a, b) in zip(found, pairs, strict=True):
        want = np.matmul(a, b)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (a.shape, b.shape)
        np.testing.assert_array_equal(got, want, err_msg=f"{a.shape} {b.shape}")


def test_an_empty_sum_is_plus_zero() -> None:
    for order in ("sequential", "blocked(2)", "pairwise", "matrix_unit(2)"):
        got = jc.math.matmul(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32), MatmulSpec(order=order))
        assert got.shape == (2, 3) and not np.any(cases.bits(got.ravel())), order


@pytest.mark.parametrize("order", ["pairwise", pytest.param("blocked(2)", marks=pytest.mark.slow)])
def test_the_sum_of_one_product_is_rounded(order: str) -> None:
    a, b = np.array([[1.3], [5.0]], np.float32), np.array([[1.7, -0.9]], np.float32)
    got = jc.math.matmul(a, b, MatmulSpec(None, "e5m7:down", "e5m2:up", order))
    same(got, jc.round_to_format(jc.round_to_format(a * b, "e5m7:down"), "e5m2:up"))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    ("order", "k"), [("matrix_unit(2)", 1), ("sequential", 1), ("sequential", 2), ("blocked(2)", 2)]
)
def test_a_sum_from_plus_zero_is_never_minus_zero(order: str, k: int) -> None:
    """IEEE 754-2019, 6.3: 0 + -0 is 0, and -0 when rounding down. XLA takes 0 + x for x where it sees the 0."""
    minus, ones = np.full((1, k), -0.0, np.float32), np.ones((k, 1), np.float32)
    for mode, negative in (("nearest_even", False), ("down", True))[: 1 if "unit" in order else 2]:
        got = jc.math.matmul(minus, ones, MatmulSpec("e4m3fn", None, f"e5m10:{mode}", order))
        assert got == 0 and np.signbit(got) == negative


@further
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def check_16_bit_operands_are_summed_in_float32(dtype: Any) -> None:
    a, b = normal((3, 40)).astype(dtype), normal((40, 5), 1).astype(dtype)
    wide = a.astype(np.float32), b.astype(np.float32)
    rounded = MatmulSpec(accumulate="e4m3:odd", order="matrix_unit(4)")
    same(jc.math.matmul(a, b, rounded), jc.math.matmul(*wide, rounded).astype(dtype))
    last = jc.math.matmul(a, b, MatmulSpec())
    assert last.dtype == dtype
    same(last, jc.math.matmul(*wide, MatmulSpec()).astype(dtype))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_number_passes_unchanged(dtype: Any) -> None:
    """Subnormals too, which a device may read as zero. The sum of a product with 1 is the number itself."""
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    x = x[np.isfinite(x.astype(np.float32)) & (x.astype(np.float32) != 0)]
    same(jc.math.matmul(x[:, None], np.ones((1, 1), dtype), MatmulSpec())[:, 0], x)


def test_the_kind_of_array_is_kept() -> None:
    a, b = integers((3, 5)), integers((5, 4), seed=1)
    assert isinstance(jc.math.matmul(a, b, UNIT), np.ndarray)
    assert isinstance(jc.math.matmul([[1.5, 2.0]], [[1.0], [3.0]], UNIT), np.ndarray)
    assert jc.math.matmul(a[0], b[:, 0], UNIT).shape == ()
    for left, right in ((jnp.asarray(a), b), (a, jnp.asarray(b))):
        assert isinstance(jc.math.matmul(left, right, UNIT), jax.Array)
    swapped = a.astype(a.dtype.newbyteorder())
    same(jc.math.matmul(swapped, b, UNIT), a @ b)


def test_float64_stays_so_without_the_flag() -> None:
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    third = np.array([[1 / 3]])
    same(jc.math.matmul(third, np.ones((1, 1)), MatmulSpec()), third)


def test_numpy_operands_are_constants_of_a_trace() -> None:
    a, b = integers((3, 5)), integers((5, 4), seed=1)

    def traced(x: jax.Array) -> jax.Array:
        inner = jc.math.matmul(a, b, UNIT)
        assert isinstance(inner, np.ndarray)
        return x + inner

    same(jax.jit(traced)(jnp.zeros((3, 4))), a @ b)


# -- randomness --------------------------------------------------------------------------------------------------------


@further
@pytest.mark.parametrize("batched", [False, True])
def draws_are_those_of_the_split_key(batched: bool) -> None:
    """Operands by the first two keys; products and sums by the others, at step 2^32 + element."""
    k = 5
    a, b = normal((2, 3, k)), normal((2, k, 4) if batched else (k, 4), 1)
    spec = MatmulSpec("e5m10:stochastic", "e5m5:stochastic", "e5m7:stochastic_b", "blocked(2)")
    got = jc.math.matmul(a, b, spec, KEY)
    keys = jax.random.split(KEY, 4)
    x, y = (jc.round_to_format(v, "e5m10:stochastic", key) for v, key in zip((a, b), keys[:2], strict=True))
    y = np.broadcast_to(y, (2, k, 4))
    words = {
        name: np.array([jc.random_bits(key, (24,), offset=step << 32) for step in range(2 * k)])
        for name, key in zip(("product", "accumulate"), keys[2:], strict=True)
    }
    carrier = oracle.CARRIERS["float32"]
    arithmetic = Arithmetic(
        How(oracle.ieee(5, 5), "stochastic"), How(oracle.ieee(5, 7), "stochastic_b"), carrier, "blocked", 2
    )
    for element, (i, j, n) in enumerate(np.ndindex(2, 3, 4)):
        left, right = ([oracle.from_bits(v, carrier) for v in cases.bits(r)] for r in (x[i, j], y[i, :, n]))

        def word(name: str, step: int, element: int = element) -> int:
            return int(words[name][step, element])

        want = oracle.to_bits(Sum(left, right, arithmetic, word).result(), carrier)
        assert cases.bits(got[i, j, n].reshape(1))[0] == want


@further.first
def a_key_that_is_not_needed_changes_nothing() -> None:
    a, b = half_operands(8)
    same(jc.math.matmul(a, b, HALF, KEY), jc.math.matmul(a, b, HALF))


# -- transforms --------------------------------------------------------------------------------------------------------


def drawn(a: jax.Array, b: jax.Array, key: jax.Array) -> jax.Array:
    return jc.math.matmul(a, b, DRAWN, key)


#: How several products are made of one.
EACH: dict[str, Callable[..., Any]] = {
    "vmap of remat": jax.jit(jax.vmap(jax.remat(drawn))),
    "vmap": jax.vmap(drawn),
    "scan": lambda a, b, keys: jax.lax.scan(lambda c, row: (c, drawn(*row)), 0, (a, b, keys))[1],
    "shared": lambda a, b, keys: jax.vmap(drawn, (0, None, None), 1)(a, b[1], keys[1]).swapaxes(0, 1),
}


@further
@pytest.mark.parametrize("name", EACH)
def jit_scan_remat_and_vmap_give_the_same_bits(name: str) -> None:
    a, b, keys = jnp.asarray(normal((4, 3, 8))), jnp.asarray(normal((4, 8, 5), 1)), jax.random.split(KEY, 4)
    same(EACH[name](a, b, keys)[1], drawn(a[1], b[1], keys[1]))


@further
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def a_sharded_product_has_the_same_bits(kind: AxisType) -> None:
    a, b = jnp.asarray(normal((16, 8))), jnp.asarray(normal((8, 8), 1))
    expected = drawn(a, b, KEY)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        left = jax.device_put(a, NamedSharding(mesh, P("x", None)))
        right = jax.device_put(b, NamedSharding(mesh, P(None, "y")))
        result = jax.jit(drawn)(left, right, KEY)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
        rows = jax.device_put(a.reshape(4, 4, 8), NamedSharding(mesh, P("x", None, None)))
        in_batches = jax.jit(drawn)(rows, b, KEY)
        assert in_batches.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, None)), 3)
    same(result, expected)
    same(in_batches.reshape(16, 8), expected)


@further
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
def shard_map_counts_the_elements_of_a_shard() -> None:
    a, b = jnp.asarray(normal((16, 8))), jnp.asarray(normal((8, 8), 1))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(partial(drawn, key=KEY), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    same(jax.jit(run)(a, b)[2:4], drawn(a[2:4], b, KEY))


# -- derivatives -------------------------------------------------------------------------------------------------------


def cotangent(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(normal(shape, 3))


@further
def derivatives_are_those_of_the_product_of_the_rounded_operands() -> None:
    a, b = jnp.asarray(normal((2, 3, 9))), jnp.asarray(normal((9, 4), 1))
    x, y = jc.round_to_format(a, "e5m10"), jc.round_to_format(b, "e5m10")
    exact = partial(jnp.matmul, precision="highest")
    out, pull = jax.vjp(lambda a, b: jc.math.matmul(a, b, HALF), a, b)
    same(out, jc.math.matmul(a, b, HALF))
    for got, want in zip(pull(cotangent(out.shape)), jax.vjp(exact, x, y)[1](cotangent(out.shape)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    tangents = cotangent(a.shape), cotangent(b.shape)
    _, push = jax.jvp(lambda a, b: jc.math.matmul(a, b, HALF), (a, b), tangents)
    np.testing.assert_allclose(push, jax.jvp(exact, (x, y), tangents)[1], rtol=1e-6, atol=1e-6)


def test_derivatives_by_one_operand_with_a_key_and_16_bits() -> None:
    a, b = jnp.asarray(normal((3, 9)), jnp.bfloat16), jnp.asarray(normal((9,), 1), jnp.bfloat16)
    grad = jax.jit(
        jax.grad(lambda a: jc.math.matmul(a, b, MatmulSpec("e4m3", accumulate="e5m2:stochastic"), KEY).sum())
    )
    row = jc.round_to_format(b, "e4m3").astype(jnp.bfloat16)
    same(grad(a), jnp.broadcast_to(row, (3, 9)))


@further
def the_gradient_of_the_operands_spec_holds() -> None:
    clipped = MatmulSpec("float8_e4m3fn:saturate:gradient=clipped")
    grad = jax.grad(lambda a: jc.math.matmul(a, jnp.ones((2, 1)), clipped).sum())
    same(grad(jnp.array([[1000.0, 1.0]])), np.array([[0.0, 1.0]], np.float32))


@pytest.mark.smoke
def test_second_derivatives_are_those_of_a_product() -> None:
    a, b = jnp.ones((1, 2)), jnp.ones((2, 1))
    mixed = jax.jacfwd(jax.grad(lambda a, b: jc.math.matmul(a, b, UNIT).sum()), 1)(a, b)
    same(mixed[0, :, :, 0], np.eye(2, dtype=np.float32))


TRACED = {
    "sequential": 1,
    "blocked(4)": 4,
    "matrix_unit(4)": 4,
    "blocked_pairwise(4)": 4,
    "aligned(4, 20)": 4,
    "aligned(4, 20, promote_every=8)": 8,
    "aligned_halves(4, 20)": 4,
}


def test_a_trace_has_the_accumulator_after_each_step() -> None:
    """After i steps it is the product of the first i steps; the last is the product, with the same draws."""
    a, b = normal((2, 3, 10)), normal((10, 2), 1)
    for order, step in TRACED.items():
        spec = MatmulSpec(operands="e4m3", accumulate="e8m7", order=order)
        trace = jc.math.matmul(a, b, spec, trace=True)
        ends = [min(end, 10) for end in range(step, 10 + step, step)]
        same(trace, np.stack([jc.math.matmul(a[..., :end], b[:end], spec) for end in ends]))
    for order in ("sequential", "blocked(4)"):
        spec = MatmulSpec(accumulate="e8m7:stochastic", order=order)
        trace = jax.jit(partial(jc.math.matmul, spec=spec, trace=True))(a[0, 0], b[:, 0], key=KEY)
        same(trace[-1], jc.math.matmul(a[0, 0], b[:, 0], spec, KEY))


# -- refusals ----------------------------------------------------------------------------------------------------------

A, B = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
#: `matmul` as one calls it who does not read types.
untyped: Any = jc.math.matmul
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no spec": (lambda: untyped(A, B, 3), TypeError, "spec=3 must be a MatmulSpec.* or a Spec, a format or text"),
    "complex": (lambda: untyped(A, B + 1j, UNIT), TypeError, "b has dtype complex64, which is not a carrier"),
    "scalar": (lambda: untyped(np.float32(2), B, UNIT), ValueError, "a is a scalar"),
    "inner": (lambda: untyped(A, A, UNIT), ValueError, r"a has shape \(2, 3\) and b has shape \(2, 3\): the last"),
    "inner, 1-D": (lambda: untyped(A, A[0, :2], UNIT), ValueError, "and the only axis of b must be"),
    "batch": (lambda: untyped(np.stack([A] * 2), np.stack([B] * 3), UNIT), ValueError, "leading axes do not broad"),
    "no key": (lambda: untyped(A, B, DRAWN), ValueError, "key=None, but spec=.*rounds stochastically"),
    "no key for operands": (lambda: untyped(A, B, MatmulSpec("e5m2:stochastic")), ValueError, "key=None"),
    "raw key": (lambda: untyped(A, B, DRAWN, jax.random.PRNGKey(0)), TypeError, "key=.*must be a typed key"),
    "raw key unused": (lambda: untyped(A, B, HALF, 3), TypeError, "key=3 must be a typed key"),
    "keys": (lambda: untyped(A, B, DRAWN, jax.random.split(KEY)), ValueError, r"key has shape \(2,\)"),
    "impl": (lambda: untyped(A, B, HALF, impl="cuda"), ValueError, "impl='cuda' must be one of"),
    "no kernel": (lambda: untyped(A, B, HALF, impl="pallas"), NotImplementedError, "impl='pallas' cannot be had"),
    "close to the carrier": (
        lambda: untyped(A, B, MatmulSpec(accumulate="e8m22:up")),
        ValueError,
        "accumulate='e8m22:up'.*float64",
    ),
    "trace": (
        lambda: untyped(A, B, MatmulSpec(order="pairwise"), trace=True),
        ValueError,
        "trace=True has no accumulator for order='pairwise'",
    ),
    "keyword": (lambda: untyped(A, B, "e5m2", accumulate="e5m10"), TypeError, "matmul has no accumulate=; write Matm"),
    "product": (lambda: untyped(A, B, MatmulSpec(product="binary64")), ValueError, "product='binary64'"),
    "operands": (lambda: untyped(A, B, MatmulSpec("binary64:saturate")), ValueError, "cannot hold every result"),
    "codebook": (
        lambda: untyped(A, B, MatmulSpec(accumulate="codebook(-1,0,1)")),
        ValueError,
        "cannot be rounded to a codebook",
    ),
    "16 bits": (
        lambda: untyped(A.astype(np.float16), B.astype(np.float16), MatmulSpec(accumulate="bfloat16")),
        ValueError,
        "accumulate='bfloat16' has values that float16 cannot hold; cast the operands to float32",
    ),
}


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


def test_too_many_elements_or_steps_to_draw_for() -> None:
    wide = jax.ShapeDtypeStruct((1 << 17, 1), jnp.float32)
    flat = jax.ShapeDtypeStruct((1, 1 << 17), jnp.float32)
    with pytest.raises(ValueError, match=r"17179869184 elements in the product are more than the 2\^32"):
        jax.eval_shape(partial(drawn, key=KEY), wide, flat)
    assert jax.eval_shape(partial(jc.math.matmul, spec=HALF), wide, flat).shape == (1 << 17, 1 << 17)


def test_a_traced_key_with_numpy_operands_is_refused() -> None:
    with pytest.raises(TypeError, match="key is traced but the operands are NumPy values"):
        jax.jit(lambda key: jc.math.matmul(A, B, DRAWN, key))(KEY)


def test_one_spec_is_that_of_every_rounding() -> None:
    same(jc.math.matmul(A, B, "e5m10"), jc.math.matmul(A, B, HALF))


def test_the_portable_body_can_be_asked_for() -> None:
    same(jc.math.matmul(A, B, UNIT, impl="xla"), A @ B)


test_further = further.test()
