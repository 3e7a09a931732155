"""Rules that reach the operands of kernels and other named calls, whose sums they declare."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jchop as jc

RULE = jc.Rule(weight="int4(group=32)", activation="int8(group=all)", operation="gmm(-1,-2)")
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (64, 64))
PARAMS = {"experts": jax.random.normal(KEYS[1], (2, 64, 32)), "gain": jnp.linspace(0.5, 2, 64)}
SIZES = jnp.array([16, 48], jnp.int32)


def rounded(x, spec, axis):
    """An array rounded along an axis, as a user writes it."""
    return jnp.moveaxis(jc.round_to_format(jnp.moveaxis(x, axis, -1), spec), -1, axis)


def kernel_of_experts(sizes, x, w, out):
    """Rows of the first group times the first matrix, the others times the second."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    out[...] = jnp.where(rows < sizes[0], x[...] @ w[0], x[...] @ w[1])


def gmm(x, w, sizes, name="gmm"):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype)
    return pl.pallas_call(kernel_of_experts, out_shape=shape, interpret=True, name=name)(sizes, x, w)


def product_with_derivative():
    """A function named gmm with a rule of its own for derivatives, around a kernel of another name."""

    def backward(residuals, g):
        x, w, sizes = residuals
        expert = jnp.repeat(jnp.arange(2), sizes, total_repeat_length=x.shape[0])
        dx = jnp.einsum("mn,mkn->mk", g, w[expert])
        return dx, jnp.einsum("mk,mn,mg->gkn", x, g, jax.nn.one_hot(expert, 2)), None

    def run(x, w, sizes):
        return call_kernel(x, w, sizes, name="experts")

    call_kernel, run.__name__ = gmm, "gmm"
    call = jax.custom_vjp(run)
    call.defvjp(lambda *args: (call(*args), args), backward)
    return call


def plain(gmm, params, x, round_x=lambda x: x, round_w=lambda w: w):
    return gmm(round_x(x * params["gain"]), round_w(params["experts"]), SIZES)


BY_HAND = {"round_x": partial(rounded, spec="int8(group=all)", axis=-1),
           "round_w": partial(rounded, spec="int4(group=32)", axis=-2)}  # fmt: skip


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_operands_of_a_kernel_are_rounded_and_packed():
    low = jc.quantize_fn(partial(plain, gmm), RULE)
    expected = plain(gmm, PARAMS, X, **BY_HAND)
    assert same(low(PARAMS, X), expected)
    assert not same(expected, plain(gmm, PARAMS, X))
    packed = low.pack(PARAMS, X)
    assert packed["experts"].nbytes * 6 < PARAMS["experts"].nbytes
    assert same(low(packed, X), expected)
    assert same(packed["gain"], PARAMS["gain"])
    report = low.report(PARAMS, X)
    assert report.parameters[0].spec == "int4(group=32,axis=-2)"
    assert [(row.primitive, dict(row.roundings)) for row in report.products] == [
        ("gmm", {"activation": "int8(group=all)"})
    ]


def loss(fun, params, x):
    return jnp.sum(jnp.sin(fun(params, x)))


def layers(gmm, params, x, **how):
    """A scan of layers, each computed again in the backward pass."""

    @jax.checkpoint
    def turn(x, layer):
        return x + jnp.tile(plain(gmm, layer, x, **how), 2), None

    return jax.lax.scan(turn, x, params)[0]


STACK = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x + 1]), PARAMS)


@pytest.mark.parametrize(
    "call", [product_with_derivative(), jax.jit(product_with_derivative())], ids=["custom_vjp", "jit"]
)
@pytest.mark.parametrize(("model", "params"), [(plain, PARAMS), (layers, STACK)], ids=["plain", "scan"])
def test_gradients_are_straight_through(call, model, params):
    low, by_hand = jc.quantize_fn(partial(model, call), RULE), partial(model, call, **BY_HAND)
    expected = jax.jit(jax.value_and_grad(partial(loss, by_hand)))(params, X)
    assert same(jax.jit(jax.value_and_grad(partial(loss, low)))(params, X), expected)
    assert not same(jax.jit(jax.value_and_grad(partial(loss, partial(model, call))))(params, X), expected)
    assert same(jax.jit(low)(low.pack(params, X), X), jax.jit(by_hand)(params, X))


def test_a_batch_of_calls():
    def batch(params, x):
        return jax.vmap(partial(plain, gmm, params))(x)

    def by_hand(params, x):
        return jax.vmap(partial(plain, gmm, params, **BY_HAND))(x)

    low, x = jc.quantize_fn(batch, RULE), jnp.stack([X, 2 * X])
    assert same(low(PARAMS, x), by_hand(PARAMS, x))
    assert same(jax.vmap(jc.quantize_fn(partial(plain, gmm), RULE), (None, 0))(PARAMS, x), by_hand(PARAMS, x))
    each = jc.quantize_fn(lambda params, x: jax.vmap(partial(plain, gmm))(params, x), RULE)
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    assert same(each(each.pack(stack, x), x), jax.vmap(partial(plain, gmm, **BY_HAND))(stack, x))


def test_within_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        partial(gmm, sizes=SIZES),
        mesh=mesh,
        in_specs=(jax.P("rows"), jax.P()),
        out_specs=jax.P("rows"),
        check_vma=False,
    )
    low = jc.quantize_fn(lambda params, x: run(x, params["experts"]), RULE)
    params = {"experts": PARAMS["experts"]}
    expected = run(rounded(X, "int8(group=all)", -1), rounded(params["experts"], "int4(group=32)", -2))
    assert same(low(params, X), expected)
    assert same(low(low.pack(params, X), X), expected)


def test_the_kernel_of_megablox():
    """The function of JAX, whose rule of derivatives calls two kernels."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox

    keys = jax.random.split(jax.random.key(1), 2)
    x, params = jax.random.normal(keys[0], (256, 128)), {"experts": jax.random.normal(keys[1], (2, 128, 128))}
    sizes = jnp.array([100, 156], jnp.int32)
    for transpose, axis in ((False, -2), (True, -1)):

        def call(x, w, t=transpose):
            return megablox(x, w, sizes, jnp.float32, (128,) * 3, transpose_rhs=t, interpret=True)

        low = jc.quantize_fn(
            lambda p, x, call=call: call(x, p["experts"]),
            jc.Rule(weight="int4(group=32)", activation="int8(group=all)", operation=f"gmm(-1,{axis})"),
        )

        def by_hand(p, x, call=call, axis=axis):
            return call(rounded(x, "int8(group=all)", -1), rounded(p["experts"], "int4(group=32)", axis))

        expected = jax.value_and_grad(partial(loss, by_hand))(params, x)
        assert same(jax.value_and_grad(partial(loss, low))(params, x), expected)
        assert same(low(low.pack(params, x), x), by_hand(params, x))


def test_several_operands_that_hold_parameters():
    """A kernel of two matrices beside one that stays; a stochastic rule draws for each number of the data."""

    def gated(scale, gate, up, x, out):
        out[...] = (x[...] @ gate[...]) * (x[...] @ up[...]) * scale[...]

    def model(p, x):
        shape = jax.ShapeDtypeStruct((64, 32), x.dtype)
        return pl.pallas_call(gated, out_shape=shape, interpret=True, name="gated")(p["scale"], p["gate"], p["up"], x)

    params = {"gate": PARAMS["experts"][0], "scale": jnp.linspace(1, 2, 32), "up": PARAMS["experts"][1]}
    low = jc.quantize_fn(model, {"*": {"weight": "int4(group=32)", "operation": "dot_general gated(_, -2, -2, -1)"}})
    by_hand = {name: rounded(w, "int4(group=32)", -2) if w.ndim == 2 else w for name, w in params.items()}
    assert same(low(params, X), model(by_hand, X))
    packed = low.pack(params, X)
    assert same(low(packed, X), model(by_hand, X)) and packed["scale"] is params["scale"]
    drawn = jc.quantize_fn(model, jc.Rule(activation="float8_e4m3fn:stochastic", operation="gated(_,-2,-2,-1)"))
    a, b = (drawn(params, X, key=jax.random.key(i)) for i in range(2))
    assert not same(a, b) and jnp.abs(a - model(params, X)).mean() < 0.1 * jnp.abs(a).mean()


def test_a_kernel_without_declared_sums():
    params = {**PARAMS, "head": jnp.ones((32, 4))}

    def model(params, x):
        return plain(gmm, params, x) @ params["head"]

    low = jc.quantize_fn(model, "int4(group=32)")
    row = low.report(params, X).parameters[0]
    assert (row.path, row.spec) == ("experts", "") and "operation='gmm(-1,-2)'" in row.reason
    with pytest.raises(ValueError, match=r"'experts'.*operation='gmm\(-1,-2\)'.*pallas_call at") as error:
        jc.quantize_fn(model, {"experts": "int4(group=32)"})(params, X)
    assert len(str(error.value).splitlines()) <= 2
    with pytest.raises(ValueError, match=re.escape("operation='gmm(-1,-2)'")):
        jc.quantize_fn(partial(plain, gmm), "int4(group=32)")(PARAMS, X)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"operation": "gmm(-1,-1)"},
            r"gmm\(-1,-1\) at .* does not fit its operands, of shapes \[64, 64\], \[2, 64, 32\]",
        ),
        ({"operation": "gmm(-1,3)"}, "does not fit its operands"),
        ({"operation": "gmm(-1,-2,-1)"}, "names 3 operands of floats; it has 2"),
        ({"operation": "gmm(k)"}, "must give the axis of each operand as a number or _"),
        ({"operation": "gnm"}, "must match one of dot_general"),
        ({"operation": "gnm(-1,-2)"}, "matches no parameter and no product.* calls: gmm"),
        ({"gradient": "int8"}, "gradient of gmm .* has sums and derivatives of its own"),
        ({"product": "codes"}, "product of gmm"),
    ],
)
def test_declarations_that_do_not_fit(fields, message):
    rule = {"weight": "int4(group=32)", "activation": "int8", "operation": "gmm(-1,-2)"} | fields
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        jc.quantize_fn(partial(plain, gmm), jc.Rule(**rule))(PARAMS, X)
    assert len(str(error.value).splitlines()) <= 2


def test_rounding_with_data_leaves_a_kernel_to_its_own_rounding():
    params = {**PARAMS, "head": jax.random.normal(KEYS[2], (32, 4))}
    rules = [RULE, jc.Rule(weight="int4(group=32)")]
    low = jc.quantize_fn(lambda params, x: plain(gmm, params, x) @ params["head"], rules)
    (with_data, report), alone = low.pack(params, batches=[X], return_report=True), low.pack(params, X)
    assert "gmm has sums of its own" in str(report)
    assert same(with_data["experts"], alone["experts"]) and not same(with_data["head"], alone["head"])
