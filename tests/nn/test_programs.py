"""Models whose programs are quantized: NNX with its graph, state and methods, Linen with boxes and collections."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from further import Further
from layer_references import checked, each
from zoo import CASES

import jchop as jc

further = Further()

WEIGHT, ACTIVATION = "int4(group=32)", "int8(group=all)"
RULE = jc.Rule(weight=WEIGHT, activation=ACTIVATION)
TOKENS = jnp.arange(6).reshape(2, 3)


class Own(nnx.Module):
    """Products in the model's own code, a table that is read by hand and tied, state, and methods."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (64, 4, 8)))
        self.table = nnx.Embed(32, 64, rngs=rngs)
        self.tied = self.table
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens: Any, scale: float = 1.0) -> Any:
        x = self.dropout(self.norm(self.embed(tokens)))
        for block in self.blocks:
            x = x + jnp.tanh(block(x)) * scale
        return self.decode(x), jnp.einsum("btd,dhk->bthk", x, self.query[...])

    def embed(self, tokens: Any) -> Any:
        return self.table.embedding[...][tokens]

    def decode(self, x: Any) -> Any:
        return x @ self.tied.embedding[...].T


def own(train: bool = False) -> Own:
    model = Own(nnx.Rngs(0))
    (model.train if train else model.eval)()
    return model


def rounded(w: Any, axis: int) -> Any:
    return jnp.moveaxis(jc.round_to_format(jnp.moveaxis(w, axis, -1), WEIGHT), -1, axis)


def low_by_hand(model: Own) -> Own:
    """The model with its weights rounded."""
    low = nnx.clone(model)
    low.query[...] = rounded(model.query[...], 0)
    low.table.embedding[...] = rounded(model.table.embedding[...], 1)
    for block, before in zip(low.blocks, model.blocks, strict=True):
        block.kernel[...] = rounded(before.kernel[...], 0)
    return low


def every_product_of_a_model_is_rounded_whatever_holds_its_weight() -> None:
    model = own()
    expected = low_by_hand(model)(TOKENS)
    weight_only = jc.Rule(weight=RULE.weight)
    for mode in ("qat", "ptq", "weight_only"):
        low = jc.nn.quantize(model, weight_only, mode, inputs=(TOKENS,))
        # Packed weights alone are multiplied as stored, so their sums may have another order.
        same = partial(np.testing.assert_allclose, rtol=0, atol=5e-7 * (mode == "weight_only"))
        jax.tree.map(same, low(TOKENS), expected)
        np.testing.assert_array_equal(low.decode(jnp.ones((2, 64))), low_by_hand(model).decode(jnp.ones((2, 64))))
    assert type(model) is Own
    assert (model(TOKENS)[0] != expected[0]).any()


def packed_parameters_have_their_shapes_and_stay_shared() -> None:
    low = jc.nn.quantize(own(), RULE, "ptq", inputs=(TOKENS,))
    assert low.tied.embedding is low.table.embedding
    held = {"query": low.query, "embedding": low.table.embedding, "kernel": low.blocks[1].kernel}
    assert {name: (type(v).__name__, v[...].shape) for name, v in held.items()} == {
        "query": ("QuantizedParam", (64, 4, 8)),
        "embedding": ("QuantizedParam", (32, 64)),
        "kernel": ("QuantizedParam", (64, 64)),
    }
    assert low.query[...].nbytes == 64 * 32 // 2 + 2 * 32 * 4
    assert isinstance(low.norm.scale, nnx.Param)
    trained = jc.nn.quantize(own(), RULE)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.jit(lambda m: m(TOKENS))(low), nnx.jit(lambda m: m(TOKENS))(trained)
    )
    with pytest.raises(ValueError, match="packed already"):
        jc.nn.quantize(low, RULE, "ptq", inputs=(TOKENS,))


def training_updates_parameters_and_state() -> None:
    model = jc.nn.quantize(own(train=True), RULE)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS)[0], TOKENS).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    before = model.norm.mean[...]
    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    assert (model.norm.mean[...] != before).any()
    assert int(model.dropout.rngs.count[...]) == 12  # type: ignore[union-attr]


def the_gradient_is_that_of_the_rounded_weights() -> None:
    model, x = own(), TOKENS
    low = jc.nn.quantize(model, jc.Rule(weight=RULE.weight))

    def loss(model: Any) -> Any:
        return jnp.sum(jnp.sin(model(x)[0]))

    ours, theirs = nnx.grad(loss)(low), nnx.grad(loss)(low_by_hand(model))
    for (path, a), (_, b) in zip(nnx.to_flat_state(ours), nnx.to_flat_state(theirs), strict=True):
        np.testing.assert_allclose(a[...], b[...], rtol=1e-5, atol=1e-5, err_msg=str(path))


def test_a_report_has_a_row_for_every_parameter() -> None:
    rows = {row.path: row for row in jc.nn.report(own(), RULE, inputs=(TOKENS,)).parameters}
    assert rows["query"].spec == "int4(group=32,axis=-3)" and rows["table/embedding"].spec == "int4(group=32)"
    assert (rows["norm/scale"].use, rows["norm/scale"].spec) == ("other", "")
    assert "test_programs.py:" in rows["query"].source
    by_method = jc.nn.report(own(), RULE, inputs={"decode": (jnp.ones((2, 64)),)})
    assert [row.parameters for row in by_method["decode"].products] == [("table/embedding",)]
    with pytest.raises(ValueError, match="rules=None"):
        jc.nn.report(own(), inputs=(TOKENS,))  # type: ignore[call-overload]


def files_of_packed_programs(tmp_path: Any) -> None:
    class Patches(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stem = nnx.Conv(3, 8, (4, 4), strides=4, rngs=rngs)
            self.head = nnx.Param(jax.random.normal(rngs.params(), (32, 5)))

        def __call__(self, x: Any) -> Any:
            return self.stem(x).reshape(x.shape[0], -1) @ self.head[...]

    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    rule = jc.Rule(weight="int4(group=32)")
    packed = jc.nn.quantize(Patches(nnx.Rngs(0)), rule, "ptq", inputs=(x,))
    jc.save(tmp_path / "model.safetensors", packed)
    other = jc.nn.quantize(Patches(nnx.Rngs(1)), rule, "ptq", inputs=(x,))
    assert (other(x) != packed(x)).any()
    loaded = jc.load(tmp_path / "model.safetensors", other)
    np.testing.assert_array_equal((other if loaded is None else loaded)(x), packed(x))


def stochastic_rules_draw_from_a_stream_of_the_model() -> None:
    rule = jc.Rule(weight="int2(group=32):stochastic")
    with pytest.raises(ValueError, match="rngs=None"):
        jc.nn.quantize(own(), rule)
    low = jc.nn.quantize(own(), rule, rngs=nnx.Rngs(rounding=3))
    again = jc.nn.quantize(own(), rule, rngs=nnx.Rngs(rounding=3))
    first = low(TOKENS)[0]
    assert (low(TOKENS)[0] != first).any()
    np.testing.assert_array_equal(again(TOKENS)[0], first)
    packed = jc.nn.quantize(own(), rule, "ptq", inputs=(TOKENS,), rngs=nnx.Rngs(rounding=3))
    np.testing.assert_array_equal(packed(TOKENS)[0], packed(TOKENS)[0])


def test_the_state_of_a_program_is_updated() -> None:
    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.w, self.count = nnx.Param(jnp.ones((32, 4))), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            return x @ self.w[...]

    x = jnp.ones((1, 32))
    for mode in ("qat", "ptq"):
        low = jc.nn.quantize(Counting(), RULE, mode, inputs=(x,))
        low(x)
        assert float(low.count[...]) == 1, mode
        assert isinstance(low.w, jc.nn.QuantizedParam if mode == "ptq" else nnx.Param)


def test_modules_among_the_arguments_keep_their_state() -> None:
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w = nnx.Param(jnp.ones((32, 4)))

        @nnx.jit
        def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
            return (x + jax.random.normal(rngs.noise(), x.shape)) @ self.w[...]

    low, rngs, plain = jc.nn.quantize(Noisy(nnx.Rngs(0)), RULE), nnx.Rngs(noise=1), nnx.Rngs(noise=1)
    x = jnp.zeros((2, 32))
    first, second = low(x, rngs), low(x, rngs=rngs)
    assert (first != second).any() and int(rngs.noise.count[...]) == 2
    noise = jax.random.normal(plain.noise(), x.shape)
    np.testing.assert_array_equal(first, jc.round_to_format(noise, ACTIVATION) @ jnp.ones((32, 4)))


class Gain(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.ones(4))


def test_modules_that_need_a_program_are_counted() -> None:
    model = nnx.Sequential(*(Gain() for _ in range(9)))
    with pytest.raises(ValueError, match=r"'layers/2' \(Gain\) and 6 more, ") as error:
        jc.nn.quantize(model, jc.Rule(weight="int8"), "ptq")
    assert len(str(error.value)) < 240


class Positions(nnx.Module):
    """A table of the model's own beside plain layers of Flax, tied ones too, and a vector."""

    def __init__(self, table: Any = (6, 8)) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.up = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.position, self.gain = nnx.Param(jnp.ones(table)), nnx.Param(jnp.ones(16))

    def __call__(self, tokens: Any) -> Any:
        x = self.up(self.embed(tokens) + self.position[...]) * self.gain[...]
        return self.embed.attend(self.attend(x)[..., :8])


@pytest.mark.parametrize("table", [(8,), (6, 8)])
@pytest.mark.parametrize("mode", ["ptq", pytest.param("weight_only", marks=pytest.mark.slow)])
def test_a_parameter_of_the_models_own_does_not_stop_packing(table: Any, mode: Any) -> None:
    model, tokens = Positions(table), jnp.asarray([[3, 1, 4, 1, 5, 9]])
    rules = jc.Rule(weight="int4(group=4)", activation="int8(group=all)" if mode == "ptq" else None)
    traced = jc.nn.quantize(model, rules, mode, inputs=(tokens,))
    if len(table) > 1:
        with pytest.warns(RuntimeWarning, match="'position' of modules that are no layers of Flax are not packed"):
            packed = jc.nn.quantize(model, rules, mode)
    else:
        packed = jc.nn.quantize(model, rules, mode)
    for one, other in zip(jax.tree.leaves(nnx.state(packed)), jax.tree.leaves(nnx.state(traced)), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(packed(tokens), traced(tokens))
    assert type(packed.position) is nnx.Param and type(packed.up.kernel).__name__ == "QuantizedParam"
    rows = jc.nn.report(model, rules)
    assert {"position", "gain"} <= {path for path, _, _ in rows.wide}


@each(
    ("call", "message"),
    [
        (lambda m: jc.nn.quantize(m, RULE, "ptq", inputs={"encode": (TOKENS,)}), "Own has no method 'encode'"),
        (lambda m: jc.nn.quantize(m, jc.Rule("quary", weight="int8"), inputs=(TOKENS,)), "nearest paths are 'query'"),
        (lambda m: jc.nn.quantize(m, RULE, "emulate", inputs=(TOKENS,)), "mode='emulate' is for layers"),
        (lambda m: jc.nn.quantize(m, RULE, "weight_only", inputs=(TOKENS,)), "weight_only.*use mode='ptq'"),
    ],
)
def test_errors_come_when_the_model_is_quantized(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(own())


class Masked(nnx.Module):
    """A weight under a mask that is no parameter, so data."""

    def __init__(self) -> None:
        self.kernel, self.mask = nnx.Param(jnp.ones((32, 8))), nnx.Variable(jnp.ones((32, 8)))

    def __call__(self, x: Any) -> Any:
        return x @ (self.kernel[...] * self.mask[...])

    def decode(self, x: Any) -> Any:
        return x @ self.kernel[...].T


@pytest.mark.parametrize("mode", ["qat", "ptq"])
def test_a_weight_that_rounds_no_parameter_is_refused(mode: Any) -> None:
    x, rule = jnp.ones((4, 32)), jc.Rule(weight="int4(group=all)")
    with pytest.raises(ValueError, match=r"weight rounds no parameter .*'kernel' reaches mul at .*no parameter"):
        jc.nn.quantize(Masked(), rule, mode, inputs=(x,))
    both = {"__call__": (x,), "decode": (jnp.ones((4, 8)),)}  # of which one is enough
    assert jc.nn.quantize(Masked(), rule, mode, inputs=both).decode(jnp.ones((4, 8))).shape == (4, 32)

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            kernel = self.param("kernel", lambda key: jnp.ones((32, 8)))
            return x @ (kernel * self.variable("masks", "mask", lambda: jnp.ones((32, 8))).value)

    variables = Linen().init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"weight rounds no parameter .*'kernel' reaches mul"):
        jc.nn.quantize(Linen(), rule).pack(variables, x)


@further.first
def inputs_that_are_no_tuple_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a tuple of arguments of '__call__'"):
        jc.nn.quantize(own(), RULE, inputs=TOKENS)  # type: ignore[arg-type]


def a_model_of_layers_gives_the_same_numbers_both_ways() -> None:
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(0), (16, 16))
    rule = jc.Rule(weight="int4(group=8)", activation="int8(group=all)", gradient="e5m2")
    layers, program = jc.nn.quantize(model, rule), jc.nn.quantize(model, rule, inputs=(x,))
    assert type(layers.layers[0]) is jc.nn.Linear
    assert isinstance(program.layers[0], nnx.Linear) and not isinstance(program.layers[0], jc.nn.Linear)
    np.testing.assert_array_equal(layers(x), program(x))
    ours, theirs = (nnx.grad(lambda m: jnp.sum(jnp.cos(m(x))))(m) for m in (layers, program))
    for (path, a), (_, b) in zip(nnx.to_flat_state(ours), nnx.to_flat_state(theirs), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


#: Methods, branches that are scanned, ragged products, own products, derived and shared weights, stacks.


def a_method_is_traced_once_for_equal_graphs_and_shapes() -> None:
    count = 0

    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((32, 4)))

        def __call__(self, x: Any) -> Any:
            nonlocal count
            count += 1
            return x @ self.w[...]

    low = jc.nn.quantize(Counted(), RULE)
    first = low(jnp.ones((2, 32)))
    low.w[...] = 2 * low.w[...]
    np.testing.assert_array_equal(low(jnp.ones((2, 32))), 2 * first)
    assert count == 1
    low(jnp.ones((3, 32)))
    assert count == 2


def a_submodule_that_is_called_from_outside_has_the_stored_numbers() -> None:
    model = own()
    low, by_hand = jc.nn.quantize(model, RULE, "ptq", inputs=(TOKENS,)), low_by_hand(model)
    x = jnp.linspace(-1, 1, 128).reshape(2, 64)
    np.testing.assert_allclose(low.blocks[0](x), by_hand.blocks[0](x), 2e-6, 2e-6)  # the weight's bytes, in panels
    q, w = low.blocks[0].kernel[...], by_hand.blocks[0].kernel[...]
    for found, expected in ((x @ q, x @ w), (q @ x.T, w @ x.T), (jnp.einsum("bi,ij->bj", x, q), x @ w)):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(q.astype(jnp.float32), w)


def values_of_keyword_arguments_are_data() -> None:
    low = jc.nn.quantize(own(), RULE)
    assert (low(TOKENS, scale=2.0)[0] != low(TOKENS)[0]).any()
    np.testing.assert_array_equal(low(tokens=TOKENS)[0], low(TOKENS)[0])


def abstract_models_are_packed_abstractly() -> None:
    abstract = nnx.eval_shape(lambda: Own(nnx.Rngs(0)))
    low = jc.nn.quantize(abstract, RULE, "ptq", inputs=(jax.ShapeDtypeStruct((2, 3), jnp.int32),))
    real = jc.nn.quantize(own(), RULE, "ptq", inputs=(TOKENS,))
    shapes = [[(v.shape, v.dtype) for v in jax.tree.leaves(nnx.state(m, jc.nn.QuantizedParam))] for m in (low, real)]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 8


@each("name", ["linen_cnn", "linen_two_towers", "linen_boxed"])
def modules_of_linen(name: str) -> None:
    case = CASES[name]
    params, args = case.build()
    variables = {"params": params, **case.rest()}
    low = jc.nn.quantize(case.module, jc.Rule(weight="int8(group=all)"))
    more: dict[str, Any] = {} if case.method == "__call__" else {"method": case.method}
    more |= {"mutable": ["batch_stats"]} if "batch_stats" in variables else {}
    packed = low.pack(variables, *args, **more)
    boxes = jax.tree.structure(jax.tree.map(lambda _: 0, packed["params"], is_leaf=lambda v: isinstance(v, jc.QArray)))
    assert boxes == jax.tree.structure(jax.tree.map(lambda _: 0, params))
    trained, served = (jax.tree.leaves(low.apply(v, *args, **more)) for v in (variables, packed))
    for a, b in zip(trained, served, strict=True):
        np.testing.assert_array_equal(a, b)
    assert low.report(variables, *args, **more).rounded_share == 1.0


@pytest.mark.parametrize(
    "check",
    [
        a_method_is_traced_once_for_equal_graphs_and_shapes,
        pytest.param(modules_of_linen, marks=pytest.mark.slow),
        pytest.param(abstract_models_are_packed_abstractly, marks=pytest.mark.slow),
        pytest.param(values_of_keyword_arguments_are_data, marks=pytest.mark.slow),
        pytest.param(a_submodule_that_is_called_from_outside_has_the_stored_numbers, marks=pytest.mark.slow),
        pytest.param(packed_parameters_have_their_shapes_and_stay_shared, marks=pytest.mark.slow),
        pytest.param(every_product_of_a_model_is_rounded_whatever_holds_its_weight, marks=pytest.mark.slow),
        pytest.param(training_updates_parameters_and_state, marks=pytest.mark.slow),
        pytest.param(the_gradient_is_that_of_the_rounded_weights, marks=pytest.mark.slow),
        pytest.param(files_of_packed_programs, marks=pytest.mark.slow),
        pytest.param(stochastic_rules_draw_from_a_stream_of_the_model, marks=pytest.mark.slow),
        pytest.param(a_model_of_layers_gives_the_same_numbers_both_ways, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_programs_in_use(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


OF_NNX = [
    "linear_with_own_product",
    "shared_block",
    "lora_by_hand",
    "nnx_scan",
    "ensemble",
    "mixtral_ragged",
    "mamba_scan",
    "whisper",
]


@further
@pytest.mark.in_turn(20)
@pytest.mark.parametrize("name", OF_NNX)
def models_of_nnx_and_their_methods(name: str) -> None:
    case = CASES[name]
    model, args = case.build()
    calls = {"__call__": args, **{method: make() for method, make in case.methods.items()}}
    rule = jc.Rule(weight="int8(group=all)")
    for method, values in calls.items():
        trained = jc.nn.quantize(model, rule, inputs={method: values})
        packed = jc.nn.quantize(model, rule, "weight_only", inputs={method: values})
        results = [jax.tree.leaves(getattr(m, method)(*values)) for m in (trained, packed)]
        assert results[0]
        for a, b in zip(*results, strict=True):
            if jnp.issubdtype(a.dtype, jnp.inexact):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
                assert bool(jnp.isfinite(a).all())


def test_boxed_parameters_of_linen_stay_in_their_boxes() -> None:
    dense = linen.Dense(4, kernel_init=linen.with_partitioning(linen.initializers.ones, ("in", "out")))
    low, x = jc.nn.quantize(dense, RULE), jnp.ones((1, 32))
    variables = dense.init(jax.random.key(0), x)
    packed = low.pack(variables, x)
    assert isinstance(packed["params"]["kernel"], linen.Partitioned)
    np.testing.assert_array_equal(low.apply(packed, x), low.apply(variables, x))


def test_rules_for_classes_of_layers_count_beside_others_in_rounding_with_data() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2, name="down")(linen.DenseGeneral(4, name="up")(x))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), "float32")
    variables = {"params": {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)},
                            "down": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}}  # fmt: skip
    rules = [jc.Rule(layer="DenseGeneral"), jc.Rule(weight="int4(group=all)")]
    packed = jc.nn.quantize(Net(), rules).pack(variables, batches=[x], steps=[])
    kernels = {name: type(packed["params"][name]["kernel"]) for name in ("up", "down")}
    assert issubclass(kernels["up"], jax.Array) and kernels["down"] is jc.QArray


def test_parameters_of_a_module_of_linen_of_its_own_are_rounded() -> None:
    class Heads(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return x @ self.param("w", linen.initializers.ones, (64, 8))

    x = jnp.ones((1, 64))
    low = jc.nn.quantize(Heads(), RULE)
    assert isinstance(low.pack(Heads().init(jax.random.key(0), x), x)["params"]["w"], jc.QArray)
    draws = jc.nn.quantize(Heads(), jc.Rule(weight="int2(group=32):stochastic"))
    with pytest.raises(ValueError, match=r"rngs=\{'rounding': a key\}"):
        draws.apply(draws.init(jax.random.key(0), x), x)


test_further = further.test()
