"""What `quantize` does to a model, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from layer_references import checked, each

import jchop as jc

further = Further()

BLOCKS = jc.Rule(weight="mxfp8_e4m3(group=4)", activation="e4m3")


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.down = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs=rngs), Block(rngs=rngs)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bare(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 3)))
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x @ self.kernel[...])


X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), "float32")


def bias_of(layer: nnx.Linear) -> Any:
    assert layer.bias is not None
    return layer.bias[...]


def model() -> Model:
    return Model(rngs=nnx.Rngs(0))


def the_given_model_stays_and_shares_what_did_not_change() -> None:
    plain = model()
    before = jax.tree.map(np.array, nnx.state(plain))
    packed = jc.nn.quantize(plain, jc.Rule("head", weight="int4(group=all)"), mode="ptq")
    assert type(plain.head) is nnx.Linear and isinstance(packed.head, nnx.Linear)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(plain))
    assert packed.blocks[0].up.kernel.get_value() is plain.blocks[0].up.kernel.get_value()
    assert type(packed.blocks[0].up) is nnx.Linear
    packed.blocks[0].up.kernel[...] = jnp.zeros((4, 6))
    packed.blocks[0].norm(X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(plain))


@further
def the_first_rule_that_matches_counts() -> None:
    plain = model()
    rules = [jc.Rule("blocks/1"), jc.Rule("*norm*"), jc.Rule("blocks", weight="fixed2.2"), jc.Rule(output="e4m3")]
    rounded = jc.nn.quantize(plain, rules)
    for layer, expected in (
        (rounded.blocks[1].up, plain.blocks[1].up(X)),
        (rounded.blocks[0].norm, None),
        (rounded.blocks[0].up, X @ jc.round_to_format(plain.blocks[0].up.kernel[...], "fixed2.2")),
        (rounded.head, jc.round_to_format(plain.head(X), "e4m3")),
    ):
        if expected is None:
            assert type(layer) is nnx.BatchNorm
        else:
            np.testing.assert_array_equal(layer(X), expected)


@further
def the_state_of_a_model_that_draws_nothing_is_that_of_the_plain_one() -> None:
    plain, rounded = model(), jc.nn.quantize(model(), BLOCKS)
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(nnx.state(rounded))
    graph = nnx.graphdef(rounded)
    again = nnx.merge(graph, nnx.state(plain))
    np.testing.assert_array_equal(again(X), rounded(X))
    assert nnx.graphdef(jc.nn.quantize(model(), BLOCKS)) == graph  # so jit compiles equal models once
    assert pickle.loads(pickle.dumps(jc.nn.Linear)) is jc.nn.Linear


def a_trained_model_is_packed_as_it_computed() -> None:
    rounded = jc.nn.quantize(model(), BLOCKS)

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient))
        return loss

    losses = [float(step(rounded, X)) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    rounded.eval()
    packed = jc.nn.quantize(rounded, BLOCKS, mode="ptq")
    assert type(packed.head.kernel) is jc.nn.QuantizedParam
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(packed, X), run(rounded, X))
    with pytest.raises(ValueError, match="Linear at 'blocks/0/up' is packed already"):
        jc.nn.quantize(packed, jc.Rule("*up*", weight="e4m3"))


def test_weight_only_rounds_no_more_than_weights() -> None:
    plain = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    packed = jc.nn.quantize(plain, jc.Rule(weight="e4m3", bias="e4m3"), mode="weight_only")
    kernel = jc.round_to_format(plain.kernel[...], "e4m3")
    np.testing.assert_array_equal(packed(X), X @ kernel + jc.round_to_format(bias_of(plain), "e4m3"))
    assert packed.kernel[...].nbytes == 12
    with pytest.raises(ValueError, match=r"activation.*mode='weight_only'"):
        jc.nn.quantize(plain, BLOCKS, mode="weight_only")


def test_sites_without_state_are_no_part_of_the_model() -> None:
    traced = []

    @nnx.jit
    def run(layer: Any, x: Any) -> Any:
        traced.append(layer)
        return layer(x)

    one, two = (jc.nn.quantize(model(), BLOCKS) for _ in range(2))
    modules = [type(module) for _, module in nnx.iter_modules(one)]
    assert len(modules) == len([*nnx.iter_modules(model())])
    assert one.head.dot_general == two.head.dot_general and one.head.dot_general is not two.head.dot_general
    assert one.head.dot_general != jc.nn.quantize(model(), jc.Rule(weight="e4m3")).head.dot_general
    assert one.head.dot_general != one.head.promote_dtype
    np.testing.assert_array_equal(run(one, X), run(two, X))
    assert len(traced) == 1  # they are equal, so nothing is compiled again
    run(jc.nn.quantize(model(), jc.Rule(weight="e4m3")), X)
    assert len(traced) == 2
    for again in (pickle.loads(pickle.dumps(one.head.dot_general)), copy.deepcopy(one.head.dot_general)):
        assert again == one.head.dot_general and hash(again) == hash(one.head.dot_general)


def test_stochastic_sites_have_streams_of_their_own() -> None:
    rule = jc.Rule("blocks/*/up", weight="e4m1:stochastic", output="bfloat16:stochastic")
    noisy = jc.nn.quantize(model(), rule, rngs=nnx.Rngs(rounding=1))
    run = nnx.jit(lambda layer, x: layer(x))
    up, other = noisy.blocks[0].up, noisy.blocks[1].up
    nnx.update(other, nnx.state(up, nnx.Param))
    first, second = run(up, X), run(up, X)
    assert (first != second).mean() > 0.5 and (first != run(other, X)).mean() > 0.5
    again = jc.nn.quantize(model(), rule, rngs=nnx.Rngs(rounding=1)).blocks[0].up
    np.testing.assert_array_equal(run(again, X), first)
    with pytest.raises(ValueError, match=r"rngs=None.*blocks/0/up.*nnx.Rngs\(rounding=0\)"):
        jc.nn.quantize(model(), rule)


def test_a_result_and_its_cotangent_are_rounded_by_draws_of_their_own() -> None:
    layer = nnx.Linear(64, 64, use_bias=False, kernel_init=lambda *_: jnp.eye(64), rngs=nnx.Rngs(0))
    rule = jc.Rule(output="fixed8.0:stochastic:gradient=[fixed8.0:stochastic]")
    graph, state = nnx.split(jc.nn.quantize(layer, rule, rngs=nnx.Rngs(rounding=1)))
    half = jnp.full((1, 64), 0.5)
    y, pull = jax.vjp(lambda x: nnx.merge(graph, state, copy=True)(x), half)
    (dx,) = pull(half)
    assert {*y.ravel().tolist()} == {*dx.ravel().tolist()} == {0.0, 1.0}
    assert (y != dx).any()


def test_the_parameters_of_a_layer_and_their_cotangents_draw_each_for_itself() -> None:
    """Scale s and bias b of a norm, whose results for inputs of 1 and -1 are b + s and b - s."""
    half, signs = "fixed8.0:stochastic:gradient=[fixed8.0:stochastic]", jnp.asarray([1.0, -1.0] * 32)
    layer: Any = nnx.LayerNorm(64, epsilon=0, rngs=nnx.Rngs(0))
    layer.scale[...] = layer.bias[...] = jnp.full(64, 0.5)
    low = jc.nn.quantize(layer, jc.Rule(weight=half, bias=half), rngs=nnx.Rngs(rounding=1))
    graph, params, rest = nnx.split(low, nnx.Param, ...)
    x = jnp.stack([signs, -signs])
    y, pull = jax.vjp(lambda params: nnx.merge(graph, params, rest, copy=True)(x), params)
    (slopes,) = pull(jnp.stack([jnp.full(64, 0.5), jnp.zeros(64)]))
    drawn = [y.sum(0) / 2, signs * (y[0] - y[1]) / 2, slopes.bias[...], signs * slopes.scale[...]]
    assert all(set(v.tolist()) == {0, 1} for v in drawn)
    assert len({np.asarray(v + 0.0).tobytes() for v in drawn}) == 4
    assert (low(x) != low(x)).any()


@further
def layers_built_by_hand_are_those_that_quantize_makes() -> None:
    by_hand = jc.nn.MultiHeadAttention(2, 4, decode=False, rule=BLOCKS, rngs=nnx.Rngs(3))
    made = jc.nn.quantize(nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(3)), BLOCKS)
    assert type(by_hand) is type(made) and nnx.graphdef(by_hand) == nnx.graphdef(made)
    x = X[None]
    np.testing.assert_array_equal(by_hand(x), made(x))


def every_operation_of_a_layer_can_be_emulated() -> None:
    plain = model()
    plain.blocks[0].norm.mean[...] = jnp.array([0.1, 0.2, 0.3, 0.4])
    low = jc.nn.quantize(plain, jc.Rule("head", activation="e5m3"), mode="emulate")
    emulated = jc.emulate(lambda w, b, x: x @ w + b, "e5m3")
    np.testing.assert_array_equal(low.head(X), emulated(plain.head.kernel[...], bias_of(plain.head), X))
    norm = jc.nn.quantize(plain, jc.Rule("*norm", activation="e5m3"), mode="emulate").blocks[0].norm
    norm.eval()
    before = jax.tree.map(np.array, nnx.state(norm))
    y = norm(X)
    np.testing.assert_array_equal(y, jc.round_to_format(y, "e5m3"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(norm), before)
    norm.train()
    norm(X)
    assert (norm.mean[...] != before["mean"][...]).all() and (norm.scale[...] == before["scale"][...]).all()
    with pytest.raises(ValueError, match="weight"):
        jc.nn.quantize(plain, BLOCKS, mode="emulate")


@pytest.mark.parametrize(
    "check",
    [
        the_given_model_stays_and_shares_what_did_not_change,
        pytest.param(a_trained_model_is_packed_as_it_computed, marks=pytest.mark.slow),
        pytest.param(every_operation_of_a_layer_can_be_emulated, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_models_in_use(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each(
    ("rules", "error", "words"),
    [
        (jc.Rule("tail", weight="e4m3"), ValueError, "matches no layer"),
        ([jc.Rule(weight="e4m3"), jc.Rule("head", weight="e4m3")], ValueError, "an earlier rule"),
        (jc.Rule("*norm", gradient="e5m2"), ValueError, "gradient has no effect .* BatchNorm"),
        ([], TypeError, "rules="),
        (3, TypeError, "rules=3"),
    ],
)
def test_rules_that_say_nothing_are_errors(rules: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jc.nn.quantize(model(), rules)


def test_what_cannot_be_quantized_is_named() -> None:
    bare = Bare(rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="Bare at '' has parameters"):
        jc.nn.quantize(bare, jc.Rule(activation="e4m3"), mode="emulate")
    jc.nn.quantize(bare, jc.Rule("linear", weight="e4m3"))
    with pytest.raises(NotImplementedError, match=r"ConvTranspose.*gradient"):
        both = [nnx.ConvTranspose(2, 2, (3,), rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))]
        jc.nn.quantize(nnx.Sequential(*both), jc.Rule(gradient="e5m2"))
    own = nnx.Linear(2, 2, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dot_general of its own"):
        jc.nn.quantize(own, jc.Rule(weight="e4m3"))
    with pytest.raises(ValueError, match="mode='lora'"):
        jc.nn.quantize(bare, jc.Rule("linear", weight="e4m3"), mode="lora")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module of Flax NNX"):
        jc.nn.quantize({"kernel": X}, jc.Rule(weight="e4m3"))  # type: ignore[type-var]


class Normed(nnx.Module):
    def __init__(self, shift: bool, kind: Any = nnx.RMSNorm) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.norm, self.down = nnx.Linear(8, 8, rngs=rngs), kind(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm.scale[...] = jnp.linspace(0.3, 1.7, 8)
        self.shift = nnx.Param(jnp.zeros(3)) if shift else None

    def __call__(self, x: Any) -> Any:
        y = self.down(self.norm(self.up(x)))
        return y if self.shift is None else y + self.shift[...]


@further
@pytest.mark.parametrize("fields", [{"weight": "int4(group=4)"}, {"activation": "e2m1"}])
def one_rule_is_one_model_in_layers_and_in_a_program(fields: Any) -> None:
    """Under a rule for products, too, a norm is as it is; a parameter more, which is zero, changes nothing."""
    x, rule = jax.random.normal(jax.random.key(3), (5, 8)), jc.Rule(**fields)
    layers, program, more = (
        jc.nn.quantize(Normed(shift), rule, inputs=inputs)
        for shift, inputs in ((False, None), (False, (x,)), (True, None))
    )
    assert type(layers.norm) is nnx.RMSNorm and type(layers.up) is jc.nn.Linear
    np.testing.assert_array_equal(layers(x), program(x))
    np.testing.assert_array_equal(layers(x), more(x))
    by_name = jc.nn.quantize(Normed(False), [jc.Rule("norm"), rule])
    np.testing.assert_array_equal(layers(x), by_name(x))
    row = next(row for row in jc.nn.report(Normed(False), rule, batches=[x]).rows if row.path == "norm")
    assert row.specs == () and row.bytes_after == row.bytes_before and row.output_snr is None


@pytest.mark.parametrize("select", [{"path": "*norm*"}, {"layer": "RMSNorm"}])
def test_a_rule_for_norms_alone_rounds_them(select: Any) -> None:
    x, plain = jax.random.normal(jax.random.key(3), (5, 8)), Normed(False)
    rules = [jc.Rule(**select, weight="e4m3", activation="e4m3"), jc.Rule(weight="e4m3")]
    packed = jc.nn.quantize(plain, rules, mode="ptq")
    assert isinstance(packed.norm.scale, jc.nn.QuantizedParam)
    np.testing.assert_array_equal(packed(x), jc.nn.quantize(plain, rules)(x))
    inside = plain.norm(jc.round_to_format(x, "e4m3")) / plain.norm.scale[...]
    np.testing.assert_allclose(packed.norm(x), inside * jc.round_to_format(plain.norm.scale[...], "e4m3"), rtol=1e-6)
    row = next(row for row in jc.nn.report(plain, rules, batches=[x]).rows if row.path == "norm")
    assert row.specs == (("weight", "float8_e4m3"), ("activation", "float8_e4m3"))
    assert row.activation_snr is not None and row.weight_snr is not None and row.activation_snr < 40


def test_a_rule_for_products_too_has_outputs_and_biases_of_norms() -> None:
    x, plain = jax.random.normal(jax.random.key(3), (5, 8)), Normed(False, nnx.LayerNorm)
    plain.norm.bias[...] = jnp.linspace(-1, 1, 8)  # type: ignore[index]
    rounded = jc.nn.quantize(plain, jc.Rule(weight="e4m3", activation="e4m3", output="e5m2", bias="e5m2")).norm
    assert isinstance(rounded, jc.nn.LayerNorm)
    plain.norm.bias[...] = jc.round_to_format(plain.norm.bias[...], "e5m2")  # type: ignore[index]
    np.testing.assert_array_equal(rounded(x), jc.round_to_format(plain.norm(x), "e5m2"))
    emulated = jc.nn.quantize(plain, jc.Rule(activation="e4m3"), mode="emulate").norm
    assert (emulated(x) == jc.round_to_format(emulated(x), "e4m3")).all() and (emulated(x) != plain.norm(x)).any()


@further.first
def fields_that_no_layer_under_a_rule_would_take_have_no_effect() -> None:
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="output has no effect on any of its layers: MultiHeadAttention"):
        jc.nn.quantize(attention, jc.Rule("!{query,key,value,out}", output="e4m3"))  # its layer `out` gives it
    attention = nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="weight has no effect on any of its layers: LayerNorm, MultiHeadAttention"):
        jc.nn.quantize(attention, jc.Rule("!{query,key,value,out}", weight="e4m3", activation="e4m3"))


test_further = further.test()
