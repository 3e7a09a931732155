"""Products of codes: exact sums of integers, the stated order of scaled sums, and the same numbers packed or not."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._quantized.products.codes import CodedArray, group_scales, multiply_codes
from jchop._quantized.products.product import DotProduct

further = Further()

KEY = jax.random.key(5)
ROW = "int8(group=all)"


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def f32(value: Fraction) -> Fraction:
    return Fraction(float(np.float32(float(value)))) if value == Fraction(float(value)) else _nearest(value)


def _nearest(value: Fraction) -> Fraction:
    low = np.float32(float(value))
    near = [np.nextafter(low, np.float32(d), dtype=np.float32) for d in (-np.inf, np.inf)]
    even = lambda v: int(np.float32(v).view(np.uint32)) & 1  # noqa: E731
    return Fraction(float(min((low, *near), key=lambda v: (abs(Fraction(float(v)) - value), even(v)))))


def stated(x: tuple, w: tuple, block: int, inner: tuple[bool, bool]) -> list[list[Fraction]]:
    """The docstring of `codes`, in integers and fractions; each operand is (elements, scales, zero points)."""
    (a, sa, za), (b, sb, zb) = ([np.asarray(v) for v in given] for given in (x, w))
    count = a.shape[1]
    rows = []
    for m in range(len(a)):
        row = []
        for n in range(len(b)):
            total: Fraction | None = None
            for start in range(0, count, block):
                span = range(start, min(start + block, count))
                term = f32(Fraction(sum((int(a[m, k]) - int(za[m, k])) * (int(b[n, k]) - int(zb[n, k])) for k in span)))
                for s, i, within in ((sa, m, inner[0]), (sb, n, inner[1])):
                    term = f32(term * Fraction(float(s[i, start]))) if within else term
                total = term if total is None else f32(total + term)
            assert total is not None
            for s, i, within in ((sa, m, inner[0]), (sb, n, inner[1])):
                total = total if within else f32(total * Fraction(float(s[i, 0])))
            row.append(total)
        rows.append(row)
    return rows


def drawn(rng: Any, rows: int, count: int, block: int, zeros: bool, low: int = -128, high: int = 127) -> tuple:
    elements = rng.integers(low, high, (rows, count), endpoint=True).astype(np.int8)
    over = lambda v: np.repeat(v, block, 1)[:, :count]  # noqa: E731
    groups = -(-count // block)
    scale = over(rng.uniform(0.5, 2, (rows, groups)).astype(np.float32))
    zero = (
        over(rng.integers(-128, 127, (rows, groups)).astype(np.int32)) if zeros else np.zeros((rows, count), np.int32)
    )
    return elements, scale, zero


@pytest.mark.parametrize(
    ("count", "left", "right", "zeros"),
    [(1, 1, 1, (False, False)), (37, 37, 37, (False, True)), (37, 37, 8, (False, False)), (40, 8, 16, (True, True)),
     (37, 5, 5, (True, True)), (1025, 1025, 1025, (False, False)), (2100, 2100, 1050, (True, False))],
)  # fmt: skip
@pytest.mark.in_turn(7)
def test_integers_are_summed_exactly_and_scaled_in_order(
    count: int, left: int, right: int, zeros: tuple[bool, bool]
) -> None:
    rng = np.random.default_rng(count)
    x, w = drawn(rng, 2, count, left, zeros[0]), drawn(rng, 3, count, right, zeros[1])
    given = [
        CodedArray(jnp.asarray(e)[None], jnp.asarray(s)[None], jnp.asarray(z)[None] if any_zero else None, block)
        for (e, s, z), block, any_zero in zip((x, w), (left, right), zeros, strict=True)
    ]
    got = np.asarray(jax.jit(lambda a, b: multiply_codes(a, b, jnp.float32))(*given))[0]
    block = min(left, right)
    want = stated(x, w, block, (left < count, right < count))
    assert [[Fraction(float(v)) for v in row] for row in got] == want


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("scale", ["binary32", "bfloat16", "binary16"])
def test_scales_are_the_numbers_of_elements_one(scale: str) -> None:
    """Subnormal ones and NaN too; all others of a stored array are above zero."""
    q = jc.quantize(normal(2, 16), f"int8(group=4,scale={scale})")
    scales = jnp.asarray([[1e-45, 1e-40, 6e-8, jnp.nan], [1.25, 3e4, 1e-4, 7.0]], jnp.float32).astype(q.scale.dtype)
    ones = replace(q, qvalue=jnp.ones_like(q.qvalue), scale=jnp.where(scales == 0, 1, scales))
    np.testing.assert_array_equal(group_scales(ones), jc.dequantize(ones)[:, ::4])


@pytest.mark.parametrize("zeros", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_long_sums_do_not_wrap(zeros: bool) -> None:
    """200,000 products of the largest codes are beyond int32."""
    count = 200_000
    ones = np.full((1, count), -128, np.int8)
    zero = np.full((1, count), 127 if zeros else 0, np.int32)
    given = CodedArray(jnp.asarray(ones)[None], jnp.ones((1, 1, count)), jnp.asarray(zero)[None] if zeros else None)
    exact = count * (255 if zeros else 128) ** 2
    assert exact > 2**31
    assert float(multiply_codes(given, given, jnp.float32)[0, 0, 0]) == float(np.float32(exact))
    odd = CodedArray(given.elements.at[0, 0, :7].set(jnp.arange(7, dtype=jnp.int8)), given.scale, given.zero)
    a, z = np.asarray(odd.elements, np.int64)[0, 0] - zero[0], np.int64(-128) - zero[0]
    assert float(multiply_codes(odd, given, jnp.float32)[0, 0, 0]) == float(np.float32(int((a * z).sum())))


def test_products_of_stored_arrays() -> None:
    x, w = normal(3, 37), normal(37, 5, seed=1)
    qx, qw = jc.quantize(x, ROW), jc.quantize(w, "int8(group=all,axis=0)")
    elements = np.asarray(qx.qvalue, np.int64) @ np.asarray(qw.qvalue, np.int64)
    want = np.float32(elements.astype(np.float32) * np.asarray(qx.scale)) * np.asarray(qw.scale)
    per_group = jc.quantize(w, "int4(group=8,axis=0)")

    @jax.jit
    def products(x: Any, qx: Any, qw: Any, per_group: Any) -> Any:
        dx = jax.grad(lambda x: jc.dot(x, per_group).sum())(x)
        return jc.dot(qx, qw), jc.einsum("bi,io->ob", qx, qw), jc.dot(qx, per_group), jc.dot(x, per_group), dx

    rows, turned, both, one, dx = products(x, qx, qw, per_group)
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(turned, want.T)
    x, low = np.asarray(x), np.asarray(jc.dequantize(per_group))
    np.testing.assert_allclose(both, np.asarray(jc.round_to_format(x, ROW)) @ low, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(one, x @ low, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(dx, np.broadcast_to(low.sum(1), x.shape), rtol=1e-5)


def test_a_stored_array_may_have_the_axes_of_the_sum_in_another_order() -> None:
    """Groups lie along the axis that moves fastest in the other operand, which is no multiple of the first one."""
    x, w = normal(2, 3, 4), normal(4, 3, 5, seed=1)
    q = jc.quantize(w, "int4(group=2,axis=0)")
    want = np.einsum("xab,ban->xn", x, np.asarray(jc.dequantize(q)))
    np.testing.assert_allclose(jc.einsum("xab,ban->xn", x, q), want, rtol=2e-6, atol=2e-6)


OTHERS = ["nvfp4(axis=0)", "mxfp8_e4m3(axis=0)", "uint4(group=8,axis=0,zero_point=integer)", "float6_e3m2fn"]


@pytest.mark.parametrize("spec", [OTHERS[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in OTHERS[1:])])
def test_products_of_other_stored_arrays(spec: str) -> None:
    x = normal(3, 37)

    @jax.jit
    def product(x: Any, w: Any) -> Any:
        q = jc.quantize(w, spec)
        return jc.dot(x, q), jc.dequantize(q)

    got, low = product(x, normal(37, 5, seed=1))
    np.testing.assert_allclose(got, x @ np.asarray(low), rtol=2e-6, atol=2e-6)


@further.first
def stored_products_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of `jax.jit`, too: later calls with the same shapes and specs trace nothing."""
    traced, by_codes = [], DotProduct.by_codes

    def counted(self: DotProduct, *args: Any) -> jax.Array:
        traced.append(self)
        return by_codes(self, *args)

    monkeypatch.setattr(DotProduct, "by_codes", counted)
    w = jc.quantize(normal(29, 3, seed=1), "int8(group=all,axis=0)")
    for seed in range(3):
        x = normal(2, 29, seed=seed)
        got = jc.dot(x, w)
    assert len(traced) == 1
    np.testing.assert_array_equal(got, jax.jit(jc.dot)(x, w))
    jc.dot(normal(4, 29), w)
    assert len(traced) == 2


def test_a_stored_product_takes_lists_and_variables() -> None:
    x, q = normal(3, 32), jc.quantize(normal(32, 4, seed=1), "int8(group=all,axis=0)")
    want = jc.dot(x, q)
    np.testing.assert_array_equal(jc.dot(x.tolist(), q), want)
    np.testing.assert_array_equal(nnx.jit(lambda p: jc.dot(p, q))(nnx.Param(x)), want)


def test_stored_products_refuse() -> None:
    x, w = normal(3, 32), normal(32, 4, seed=1)
    q = jc.quantize(w, "int8(group=all,axis=0)")
    with pytest.raises(TypeError, match="one of them must be a QArray"):
        jc.dot(x, w)
    for other in (None, "a", x.astype(jnp.float8_e5m2)):
        with pytest.raises(TypeError, match=r"^x has dtype .* is not a carrier; [^\n]*$"):
            jc.dot(other, q)
    with pytest.raises(TypeError, match=r"jchop\.math\.einsum\(subscripts, x, w, spec=spec\)"):
        jc.einsum("ab,bc->ac", x)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="sums over no axis"):
        jc.einsum("a,bc->abc", jnp.ones(2), q)
    with pytest.raises(ValueError, match=r"w: the groups of .* are no blocks along the sum"):
        jc.dot(x, jc.quantize(w, "int8(group=all)"))
    with pytest.raises(ValueError, match="or are no numbers of float32"), jax.enable_x64(True):
        jc.dot(x, jc.quantize(np.asarray(w, np.float64), jc.formats.CodebookFormat((0.1, 1.0))))
    sparse = jc.quantize(w, "int8(group=all,axis=0,sparse=2:4)")
    with pytest.raises(
        ValueError, match=r"cannot be multiplied; multiply jchop\.dequantize\(w\) with JAX, as x @ w does"
    ):
        jc.dot(x, sparse)
    np.testing.assert_array_equal(x @ sparse, x @ jc.dequantize(sparse))  # type: ignore[operator]
    with pytest.raises(ValueError, match="'y' is 31 in x and 32 in w"):
        jc.dot(x[:, 1:], q)
    with pytest.raises(ValueError, match=r"w has shape \(32,\)"):
        jc.dot(x, q[:, 0])


# -- products of programs ----------------------------------------------------------------------------------------------


def block(p: Any, x: Any) -> Any:
    """A product with a transposed weight, one with two kept axes, and two of data."""
    h = jax.nn.gelu(x @ p["up"].T + p["bias"])
    q = jnp.einsum("bth,hnd->btnd", h, p["heads"])
    scores = jnp.einsum("btnd,bsnd->bnts", q, q)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), q)


PARAMS = {"up": normal(64, 32), "bias": normal(64, seed=1), "heads": normal(64, 2, 8, seed=2) / 8}
X = normal(2, 5, 32, seed=3)
RULES: dict[str, dict[str, Any]] = {
    "int8": {"weight": ROW, "activation": ROW},
    "int4": {"weight": "int4(group=32)", "activation": ROW},
    "weight only": {"weight": "int4(group=16)"},
    "asymmetric": {"weight": "uint4(group=32,zero_point=integer)", "activation": "uint8(group=all,zero_point=integer)"},
    "tensor": {"weight": "int8", "activation": "int8", "gradient": "int8"},
    "fp8": {"weight": "e4m3fn(group=all)", "activation": "e4m3fn(group=all)"},
    "mxfp8": {"weight": "mxfp8_e4m3", "activation": "mxfp8_e4m3", "gradient": "mxfp8_e5m2"},
    "nvfp4": {"weight": "nvfp4", "activation": "nvfp4"},
}


@further
@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in RULES if name != "int8")]
)
def codes_train_and_serve_the_same_numbers(name: str) -> None:
    rule = jc.Rule(**RULES[name], product="codes")
    low, floats = jc.quantize_fn(block, rule), jc.quantize_fn(block, jc.Rule(**RULES[name]))
    packed = low.pack(PARAMS, X)
    trained = jax.jit(low)(PARAMS, X)
    np.testing.assert_array_equal(trained, jax.jit(low)(packed, X))
    np.testing.assert_allclose(trained, jax.jit(floats)(PARAMS, X), rtol=2e-4, atol=2e-5)
    got, want = (jax.jit(jax.grad(lambda p, f=f: jnp.sum(f(p, X) ** 2)))(PARAMS) for f in (low, floats))
    limit = 0.05 if "gradient" in RULES[name] else 1e-4
    for key in PARAMS:
        assert jnp.linalg.norm(got[key] - want[key]) <= limit * jnp.linalg.norm(want[key]), key
    for row in low.report(PARAMS, X).products:  # of a product without a rounded operand nothing changes
        rounds = row.parameters or "activation" in RULES[name]
        assert dict(row.roundings).get("product") == ("codes" if rounds else None)


def test_all_three_products_of_numpy() -> None:
    """Scales, codes, integer sums and the order of roundings, written in NumPy.

    The products dx and dw are sums of codes, too, if a rule has a gradient: each along its own sum.
    """

    def of(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = np.abs(v).max(1, keepdims=True) / np.float32(127)
        return np.rint(v.astype(np.float64) / scale).astype(np.int64), scale

    def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        (a, sa), (b, sb) = of(left), of(right)
        return (a @ b.T).astype(np.float32) * sa * sb.T

    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=ROW, activation=ROW, gradient=ROW, product="codes"))

    @jax.jit
    def all_three(w: Any, x: Any, g: Any) -> Any:
        y, back = jax.vjp(low, w, x)
        return y, *back(g)

    for seed in range(5):
        w, x, g = (np.asarray(normal(*shape, seed=3 * seed + i)) for i, shape in enumerate(((33, 6), (7, 33), (7, 6))))
        y, dw, dx = all_three(w, x, g)
        np.testing.assert_array_equal(y, product(x, w.T))
        np.testing.assert_array_equal(dx, product(g, w))
        np.testing.assert_array_equal(dw, product(g.T, x.T).T)


@further
@pytest.mark.in_turn(50)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8", "float32"),
        ("int4", "bfloat16"),
        ("weight only", "float32"),
        ("asymmetric", "bfloat16"),
        ("nf4", "float32"),
    ],
)
def a_hundred_models_train_and_serve_the_same_numbers(name: str, dtype: str) -> None:
    keywords: dict[str, Any] = (RULES | {"nf4": {"weight": "nf4(group=16)"}})[name]
    rule = jc.Rule(**keywords, product="codes")
    low = jc.quantize_fn(lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"].T, rule)

    def of_seed(seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), 3)
        w = {"up": jax.random.normal(keys[0], (32, 64), dtype), "down": jax.random.normal(keys[1], (8, 64), dtype)}
        x = jax.random.normal(keys[2], (3, 32), dtype)
        return low(w, x), low(low.pack(w, x), x)

    trained, packed = jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))(jnp.arange(100))
    assert trained.dtype == dtype and len(np.unique(np.asarray(trained, np.float32))) > 300
    np.testing.assert_array_equal(trained, packed)


@further
def stochastic_codes() -> None:
    rule = jc.Rule(weight="int8(group=all):stochastic", activation="int8(group=all):stochastic", product="codes")
    low, floats = (jc.quantize_fn(lambda w, x: x @ w, one) for one in (rule, replace(rule, product="float")))
    w, x = normal(32, 4), normal(3, 32, seed=1)
    for params in (low.pack(w, x, key=KEY), w):
        np.testing.assert_allclose(low(params, x, key=KEY), floats(params, x, key=KEY), rtol=1e-5, atol=1e-6)
    assert (low(w, x, key=KEY) != low(w, x, key=jax.random.key(6))).any()


@further
def codes_under_transformations() -> None:
    rule = jc.Rule(weight="int4(group=16)", activation=ROW, product="codes")

    def layers(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]

    stack, x = normal(3, 32, 32), normal(4, 32, seed=1)
    low = jc.quantize_fn(layers, rule)
    packed = low.pack(stack, x)
    one, single = x, jax.jit(jc.quantize_fn(lambda w, x: x @ w, rule))
    for i in range(3):
        one = jnp.tanh(single(stack[i], one))
    np.testing.assert_array_equal(jax.jit(low)(packed, x), jax.jit(low)(stack, x))
    np.testing.assert_allclose(jax.jit(low)(stack, x), one, rtol=1e-6, atol=1e-6)
    many = jax.jit(jax.vmap(single, (None, 0)))(stack[0], x[:, None])
    np.testing.assert_array_equal(many[:, 0], single(stack[0], x))
    assert jnp.isfinite(jax.jit(jax.grad(lambda p: low(p, x).sum()))(stack)).all()


@further
def a_model_of_flax() -> None:
    model, x = nnx.Linear(32, 16, rngs=nnx.Rngs(0)), normal(3, 32)
    rule = jc.Rule(weight=ROW, activation=ROW, product="codes")
    trained, served = jc.nn.quantize(model, rule), jc.nn.quantize(model, rule, mode="ptq", inputs=(x,))
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(trained, x), run(served, x))
    assert served.kernel[...].nbytes < 32 * 16 * 2
    # Within an emulated function they are one operation, and no scale is rounded.
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="int4(group=16)", activation=ROW, product="codes"))
    w, x = (jc.round_to_format(v, "bfloat16") for v in (normal(32, 4), normal(3, 32, seed=1)))
    want = jc.round_to_format(low(w, x), "bfloat16")
    np.testing.assert_array_equal(jc.emulate(low, "bfloat16")(w, x), want)


@further
@pytest.mark.parametrize(
    ("product", "backward"),
    [("codes", False), *(pytest.param(product, True, marks=pytest.mark.slow) for product in ("codes", "float"))],
)
def a_call_without_jit_compiles_a_product_once(product: Any, backward: bool, caplog: pytest.LogCaptureFixture) -> None:
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", gradient="int8(group=all)", product=product)
    low = jc.quantize_fn(lambda w, x: x @ w, rule)
    w = jnp.linspace(-1, 2, 11 * 7).reshape(11, 7)

    def run(fun: Any, rows: int) -> int:
        x = jnp.linspace(-3, 1, rows * 11).reshape(rows, 11)
        caplog.clear()
        with jax.log_compiles():
            y = fun(w, x)
        found = [record.message for record in caplog.records if record.message.startswith("Compiling")]
        np.testing.assert_array_equal(y, jax.jit(fun)(w, x))
        return len(found)

    run(low, 5)
    assert run(low, 6) == 1
    if backward:
        gradient = jax.grad(lambda w, x: low(w, x).sum())
        run(gradient, 5)
        assert run(gradient, 6) <= 7


@further
def codes_in_loops_of_unknown_length() -> None:
    """What the turns of a `while` share keeps its codes, also what they carry unchanged; what changes does not."""

    def loop(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ p["w"] + x @ p["u"]), jnp.zeros_like(x))

    def carried(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        def turn(_: Any, s: Any) -> Any:
            return s[0], jnp.tanh(s[1] @ s[0]["w"] + x @ s[0]["u"])

        return jax.lax.fori_loop(0, turns, turn, (p, jnp.zeros_like(x)))[1]

    def changed(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, s: (-s[0], jnp.tanh(s[1] @ s[0])), (p["w"], x))[1]

    p, x = {"w": normal(16, 16), "u": normal(16, 16, seed=1)}, normal(2, 16, seed=2)
    rule = jc.Rule(weight="int8(group=all)", activation=ROW, product="codes")
    want = jax.jit(lambda p, x: jc.quantize_fn(loop, rule)(p, x, 3))(p, x)  # a scan
    for fun in (loop, carried):
        low = jc.quantize_fn(fun, rule)
        run = jax.jit(lambda p, x, turns, low=low: low(p, x, turns))
        for given in (p, low.pack(p, x, jnp.int32(0))):
            np.testing.assert_array_equal(run(given, x, jnp.int32(3)), want)
    with pytest.raises(ValueError, match=r"the weight 'w' of dot_general at .* is computed with before"):
        jc.quantize_fn(changed, rule)(p, x, jnp.int32(3))


@further
@pytest.mark.parametrize(
    "rule",
    [
        jc.Rule(weight="int4(group=8)", product="codes"),
        pytest.param(jc.Rule(weight=ROW, activation=ROW, gradient=ROW, product="codes"), marks=pytest.mark.slow),
    ],
    ids=["weights alone", "all"],
)
def codes_of_stacks_in_loops_within_loops(rule: jc.Rule) -> None:
    """As text is generated: a loop over tokens, and in it one over layers."""

    def layers(p: Any, h: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, p)[0]

    def tokens(p: Any, x: jax.Array) -> jax.Array:
        def token(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return (after := layers(p, h)), after

        return jax.lax.scan(token, x, length=2)[1]

    def until(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layers(p, s[1])), (0, x))[1]

    p, x = jnp.stack([normal(16, 16, seed=i) for i in range(2)]), normal(2, 16, seed=3)
    low = jc.quantize_fn(tokens, rule)
    packed, run = low.pack(p, x), jax.jit(lambda p, x: low(p, x))
    want = run(p, x)
    np.testing.assert_array_equal(run(packed, x), want)
    np.testing.assert_array_equal(jax.jit(lambda p, x: jc.quantize_fn(until, rule)(p, x))(packed, x), want[-1])
    gradient = jax.jit(jax.grad(lambda p: low(p, x).sum()))(p)
    assert bool(jnp.isfinite(gradient).all()) and bool((gradient != 0).any((1, 2)).all())


def test_slices_of_a_stack_with_a_channel_for_each_layer(rng) -> None:
    """A scan takes the axis of the stack away, which the format names."""
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 16), (3, 16, 4)))
    stack, rows = jc.quantize(w, "int8(channel=(0,-1))"), jc.quantize(x, ROW)
    _, y = jax.lax.scan(lambda c, one: (c, jc.einsum("bk,kn->bn", rows, one)), 0, stack)
    each = [jc.einsum("bk,kn->bn", rows, jc.quantize(one, "int8(channel=-1)")) for one in w]
    np.testing.assert_array_equal(y, jnp.stack(each), strict=True)


CUTS = {
    "split": lambda w, x: x[:, 4:12] @ jax.lax.split(w, (4, 8, 4))[1],
    "split columns": lambda w, x: x @ jnp.split(w, 3, axis=1)[1],
    "split within a group": lambda w, x: x[:, 6:] @ jax.lax.split(w, (6, 10))[1],
    "within a group": lambda w, x: x[:, 2:12] @ w[2:12],
    "every second": lambda w, x: x[:, ::2] @ w[::2],
    "reversed": lambda w, x: x[:, :10] @ w[:10][::-1],
    "from an unknown place": lambda w, x: x[:, :8] @ jax.lax.dynamic_slice_in_dim(w, jnp.argmax(x[0]) * 0 + 3, 8, 0),
    "the faster of two axes": lambda w, x: jnp.einsum(
        "bhk,hkd->bd", x.reshape(5, 4, 4)[..., :3], w.reshape(4, 4, 12)[:, :3]
    ),
    "the slower of two axes": lambda w, x: jnp.einsum(
        "bhk,hkd->bd", x.reshape(5, 4, 4)[:, 1:], w.reshape(4, 4, 12)[1:]
    ),
    "of a flat one": lambda w, x: x[:, :14] @ w.reshape(-1)[24:].reshape(14, 12),
    "channels": lambda w, x: jax.lax.conv_general_dilated(
        x.reshape(5, 2, 8)[..., 2:], w.reshape(2, 8, 12)[:, 2:], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    ),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", CUTS)
def test_the_codes_of_a_slice_have_the_scales_of_its_numbers(name: str) -> None:
    """Also where it begins within a group along the sum."""
    w, x = normal(16, 12), normal(5, 16, seed=1)
    low = jc.quantize_fn(CUTS[name], jc.Rule(weight="int4(group=4)", product="codes"))
    y = jax.jit(low)(w, x)
    np.testing.assert_allclose(y, CUTS[name](jc.round_to_format(w, "int4(group=4,axis=0)"), x), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(low)(low.pack(w, x), x), y)


WINDOWS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "by vmap": (
        (12, 3), 4, lambda w, x: jax.vmap(lambda i: x @ jax.lax.dynamic_slice_in_dim(w, i, 8, 0))(jnp.array([0, 3]))
    ),
    "of two axes, the slower one in front": (
        (4, 8, 3), 8, lambda w, x: jnp.concatenate([x, x], 1) @ w.transpose(1, 0, 2).reshape(32, 3)[4:20]
    ),
}  # fmt: skip


def test_the_codes_of_windows_have_the_scales_of_their_numbers() -> None:
    weights = {name: normal(*shape) for name, (shape, _, _) in WINDOWS.items()}

    @jax.jit
    def products(weights: Any, x: Any) -> Any:
        rules = {name: (jc.Rule(weight=f"int4(group={group})"), fun) for name, (_, group, fun) in WINDOWS.items()}
        return {
            name: [jc.quantize_fn(fun, each)(weights[name], x) for each in (rule, replace(rule, product="codes"))]
            for name, (rule, fun) in rules.items()
        }

    for name, (want, got) in products(weights, normal(2, 8, seed=1)).items():
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


#: The axis that is summed over split between devices, and the sharding of the result given; or rows and columns.
SPLIT = [(P("m"), P("d", "m"), P("d", None)), (P(None, "m"), P("d"), P("d", "m"))]


@further
@pytest.mark.parametrize(
    ("weight", "activation", "splits"),
    [
        ("int4(group=4)", "int8(group=8)", SPLIT[:1]),
        pytest.param("int8(group=all)", "int8(group=8)", SPLIT, marks=pytest.mark.slow),
        pytest.param("int4(group=4)", None, SPLIT, marks=pytest.mark.slow),
    ],
)
def codes_in_explicit_meshes(weight: str, activation: str | None, splits: Any) -> None:
    rule = jc.Rule(weight=weight, activation=activation, product="codes")
    w, x = normal(32, 8), normal(16, 32, seed=1)
    want = jax.jit(jc.quantize_fn(lambda w, x: x @ w, rule))(w, x)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    if len(splits) > 1:
        mixed = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
        with jax.set_mesh(mixed):
            y = jax.jit(jc.quantize_fn(lambda w, x: x @ w, rule))(jax.device_put(w, P()), jax.device_put(x, P("d")))
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh):
        for of_w, of_x, out in splits:
            low = jc.quantize_fn(lambda w, x, out=out: jnp.dot(x, w, out_sharding=out), rule)
            placed = jax.device_put(w, of_w), jax.device_put(x, of_x)
            y = jax.jit(low)(*placed)
            assert jax.typeof(y).sharding.spec == out
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
            packed = jax.jit(low.pack)(*placed)
            np.testing.assert_array_equal(jax.jit(low)(packed, placed[1]), y)
            assert jax.eval_shape(jax.grad(lambda w, x, low=low: low(w, x).sum()), *placed).shape == w.shape
            if len(splits) > 1:
                assert jax.jit(jax.grad(lambda w, x, low=low: low(w, x).sum()))(*placed).shape == w.shape


@further
@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("int8(group=8)", "int8(group=8)"),
        pytest.param("int4(group=4)", None, marks=pytest.mark.slow),
        pytest.param("mxfp8_e4m3", "mxfp8_e4m3", marks=pytest.mark.slow),
    ],
)
def codes_within_a_shard_map_of_the_user(weight: str, activation: str | None) -> None:
    """Loops over blocks and panels begin with constants, whose types have to vary as those of the operands do."""
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, activation=activation, product="codes"))
    w, x = normal(64, 8), normal(16, 64, seed=1)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(low, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    for given in (w, low.pack(w, x)):
        np.testing.assert_allclose(jax.jit(mapped)(given, x), jax.jit(low)(given, x), rtol=1e-5, atol=1e-5)
    own, whole = (jax.jit(jax.grad(lambda w, f=f: (f(w, x) ** 2).sum()))(w) for f in (mapped, low))
    np.testing.assert_allclose(own, whole, rtol=1e-4, atol=1e-4)


@further
@pytest.mark.parametrize("name", ["cache", pytest.param("experts", marks=pytest.mark.slow)])
def other_loops_within_a_shard_map_of_the_user(name: str) -> None:
    """Over experts, and over blocks of a cache."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    experts = jc.quantize_fn(
        lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([1, 0, 1])),
        jc.Rule(weight="int8(group=8)", activation="int8(group=8)", product="codes"),
    )
    tokens = normal(8, 20, 2, 16)
    cache = jc.KVCache.full((8, 20, 2, 16), keys="int8(group=16)", values="int8(group=16)").update(tokens, tokens)
    functions = {
        "experts": (lambda x: experts(normal(3, 16, 4, seed=1), x), normal(16, 16)),
        "cache": (lambda c: jc.dot_product_attention(normal(1, 1, 2, 16), c, block_size=8), cache),
    }
    fun, x = functions[name]
    mapped, one = jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d")), jax.jit(fun)
    whole = np.concatenate([one(jax.tree.map(lambda v, i=i: np.split(v, 8)[i], x)) for i in range(8)])
    np.testing.assert_allclose(jax.jit(mapped)(x), whole, rtol=1e-5, atol=1e-5)


def test_codes_refuse() -> None:
    w, x = normal(32, 4), normal(3, 32, seed=1)
    with pytest.raises(ValueError, match="product='native'"):
        jc.Rule(weight=ROW, product="native")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both say how a sum is computed"):
        jc.Rule(weight=ROW, matmul=jc.MatmulSpec(accumulate="e5m10"), product="codes")
    with pytest.raises(ValueError, match=r"weight='int16\(group=32\)' of the dot_general.*product='codes'"):
        jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="int16(group=32)", product="codes"))(w, x)
    with pytest.raises(ValueError, match="its elements have no 1"):
        small = jc.formats.FloatFormat(2, 1, bias=5, infinities=False, nans="none")
        jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=jc.formats.ScaledFormat(small, group=8), product="codes"))(
            w, x
        )
    with pytest.raises(ValueError, match="one length must divide the other") as error:
        jc.quantize_fn(
            lambda w, x: x @ w, jc.Rule(weight="int4(group=8)", activation="int8(group=12)", product="codes")
        )(w, x)
    assert any("the dot_general at" in note and "test_codes.py" in note for note in error.value.__notes__)
    with pytest.raises(
        ValueError, match=r"the weight '.*' of dot_general at .*test_codes.py.* is computed with before"
    ):
        jc.quantize_fn(lambda w, x: x @ (w * 2), jc.Rule(weight=ROW, product="codes"))(w, x)
    both = lambda w, x: (x @ w) @ w.T  # noqa: E731
    with pytest.raises(
        ValueError,
        match=r"first product, which sums over axis 0 of it \(dot.*test_codes.py:\d+\), .* over axis 1 of .*tensor\)$",
    ):
        jc.quantize_fn(both, jc.Rule(weight=ROW, product="codes"))(w, x)
    advised = jc.Rule(weight="int8(group=tensor)", product="codes")
    low = np.asarray(jc.round_to_format(w, "int8(group=tensor)"))
    np.testing.assert_allclose(jc.quantize_fn(both, advised)(w, x), x @ low @ low.T, rtol=1e-5, atol=1e-5)
    stack = lambda w, x: (x @ w[0], jnp.einsum("bd,ldk->lbk", x, w))  # noqa: E731
    with pytest.raises(ValueError, match=r"leave product out of [^;]*product=codes\)$"):  # one scale would not do
        jc.quantize_fn(stack, advised)(jnp.stack([w, w]), x)
    conv = lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"no blocks along the sum of .*: blocks of 32 numbers do not fit .*3 × 3 × 16"
    ):
        rule = jc.Rule(weight="int4(group=32)", product="codes")
        jc.quantize_fn(conv, rule)(jnp.ones((3, 3, 16, 8)), jnp.ones((1, 8, 8, 16)))


#: Rules whose elements have no NaN; `groups` says of how many of the five rows and four columns one NaN is.
NO_NAN = {
    "rows": ({"weight": ROW, "activation": ROW}, 4, 5),
    "blocks": ({"weight": "int4(group=8)", "activation": "int8(group=8)"}, 4, 5),
    "zero points": ({"weight": ROW, "activation": "uint8(group=all,zero_point=integer)"}, 4, 5),
    "mxfp4": ({"weight": "mxfp4", "activation": "mxfp4"}, 4, 5),
    "tensors": ({"weight": "int8(group=tensor)", "activation": "int8(group=tensor)"}, 20, 20),
    "integers": ({"weight": "integer8", "activation": "integer8"}, 20, 20),
    "weights alone": ({"weight": ROW}, 4, 5),
}


@further
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", NO_NAN)
def a_nan_stays_nan(name: str) -> None:
    """One of an activation reaches its row, one of a weight its column, or all that has its scale."""
    rule, of_row, of_column = NO_NAN[name]
    low = jax.jit(jc.quantize_fn(lambda w, x: x @ w, jc.Rule(**rule, product="codes")))  # type: ignore[arg-type]
    w, x = normal(36, 4), normal(5, 36, seed=1)
    assert np.isfinite(low(w, x)).all()
    in_row, in_column = np.isnan(low(w, x.at[3, 33].set(jnp.nan))), np.isnan(low(w.at[20, 1].set(jnp.nan), x))
    assert in_row[3].all() and in_row.sum() == of_row and in_column[:, 1].all() and in_column.sum() == of_column


@further
def a_nan_of_a_gradient_stays_nan() -> None:
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=ROW, activation=ROW, gradient=ROW, product="codes"))
    w, x, weights = normal(16, 4), normal(5, 16, seed=1), jnp.ones((5, 4)).at[2, 1].set(jnp.nan)
    dw, dx = jax.grad(lambda w, x: (low(w, x) * weights).sum(), (0, 1))(w, x)
    assert np.isnan(dw).any(0).tolist() == [False, True, False, False]
    assert np.isnan(dx).any(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("spec", [ROW, pytest.param("int8(group=8)", marks=pytest.mark.slow)])
def test_a_nan_of_an_image_stays_nan(spec: str) -> None:
    """In the windows that have its block; in all of its image if that has one scale."""

    def conv(w: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    low = jax.jit(jc.quantize_fn(conv, jc.Rule(weight=ROW, activation=spec, product="codes")))
    w, x = normal(3, 3, 16, 4), normal(2, 6, 6, 16, seed=1)
    found = np.isnan(low(w, x.at[1, 2, 2, 3].set(jnp.nan)))
    assert not found[0].any() and found[1].sum() == (6 * 6 * 4 if spec == ROW else 3 * 3 * 4)
    assert found[1, 1:4, 1:4].all()
    found = np.isnan(low(w.at[0, 1, 3, 2].set(jnp.nan), x))
    assert found.all((0, 1, 2)).tolist() == [False, False, True, False] and found.sum() == 2 * 6 * 6


@further
@pytest.mark.parametrize("rows", [1, 2])
def one_row_of_a_packed_matrix_is_multiplied_without_a_dot(rows: int) -> None:
    """On a CPU; all scales are 1, so the result is that of integers."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, shape).astype(np.float32) for shape in ((rows, 1000), (1000, 24)))
    x[:, 0], w[0] = -127, 127
    spec = "int8(group=all)"
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=spec, activation=spec, product="codes"))
    packed = low.pack(w, x)
    np.testing.assert_array_equal(jax.jit(low)(packed, x), (x.astype(int) @ w.astype(int)).astype(np.float32))
    assert ("dot_general" in jax.jit(low).lower(packed, x).as_text()) == (rows > 1)


test_further = further.test()
