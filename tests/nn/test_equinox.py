"""Modules of Equinox under rules: packed, trained, saved, loaded; adapters, also of parameters of a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layer_references import checked, each, products_of_size

import jchop as jc
from jchop import Rule
from jchop.nn import LoraRule, add_lora, load_lora, lora_mask, merge_lora, save_lora, split_lora

eqx = pytest.importorskip("equinox")

RULE = Rule(weight="int4(group=16)")
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (5, 32))


def mlp() -> Any:
    return eqx.nn.MLP(32, 16, 48, 1, key=KEY)


def scanned() -> Any:
    """Three layers in one stack, which a scan runs over, in the style of Equinox's documentation."""

    class Scanned(eqx.Module):
        layers: Any
        head: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, False, key=key))(keys)
            self.head = eqx.nn.Linear(32, 4, key=key)

        def hidden(self, x: Any) -> Any:
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            step = lambda x, own: (x + jnp.tanh(eqx.combine(own, rest)(x)), None)  # noqa: E731
            return jax.lax.scan(step, x, arrays)[0]

        def __call__(self, x: Any) -> Any:
            return self.head(self.hidden(x))

    return Scanned(KEY)


def size_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


@eqx.filter_jit
def run(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def case(name: str) -> tuple[Any, Any, Any, Any, Any]:
    """A model, its inputs (a batch), one example, what it is trained to give, and a loss of both."""
    from zoo.equinox_models import Cnn

    squares = lambda y, wanted: ((y - wanted) ** 2).mean()  # noqa: E731
    if name == "cnn":
        x = jax.random.normal(KEY, (4, 3, 8, 8))
        return Cnn(KEY), x, x[0], jnp.ones((4, 10)), squares
    if name == "scan":
        return scanned(), X, X[0], jnp.ones((5, 4)), squares
    return mlp(), X, X[0], jnp.ones((5, 16)), squares


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("name", ["mlp", "cnn", "scan"])
def test_quantized_trained_saved_loaded(name: str, tmp_path: Path) -> None:
    model, x, one, wanted, measure = case(name)
    low = jc.nn.quantize(model, RULE, inputs=(one,))
    assert isinstance(low, type(model)) and type(low) is not type(model)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(low, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(low: Any, state: Any) -> tuple[Any, Any, Any]:
        loss, gradient = eqx.filter_value_and_grad(lambda low: measure(jax.vmap(low)(x), wanted))(low)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(low, updates), state, loss

    losses = []
    for _ in range(10):
        low, state, loss = step(low, state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]

    packed = jc.nn.quantize(low, RULE, "ptq", inputs=(jax.ShapeDtypeStruct(one.shape, one.dtype),))
    y = run(packed, x)
    np.testing.assert_array_equal(y, run(low, x))
    assert size_of(packed) < 0.55 * size_of(low)

    jc.save(tmp_path / "model.safetensors", packed)
    like = eqx.filter_eval_shape(lambda: jc.nn.quantize(case(name)[0], RULE, "ptq", inputs=(one,)))
    np.testing.assert_array_equal(run(jc.load(tmp_path / "model.safetensors", like), x), y)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", packed)
    again = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", packed)
    np.testing.assert_array_equal(run(again, x), y)


def methods_and_scales() -> None:
    """Each method runs under rules; calibrated ranges and learned scales are fields of the module."""
    model, both = scanned(), {"__call__": (X[0],), "hidden": (X[0],)}
    packed = jc.nn.quantize(model, Rule("layers", weight="int4(group=16)"), "ptq", inputs=both)
    assert type(packed.layers.weight).__name__ == "QArray" and packed.layers.weight.shape == (3, 32, 32)
    direct = jax.vmap(model.head)(jax.vmap(packed.hidden)(X))
    np.testing.assert_allclose(direct, run(packed, X), rtol=1e-5, atol=1e-6)
    assert sorted(jc.nn.report(model, RULE, inputs=both)) == ["__call__", "hidden"]

    low = jc.nn.quantize(mlp(), Rule(weight="int8(group=all)", activation="int8"), "ptq", inputs=(X[0],))
    fixed = jc.nn.calibrate(low, [X[:2], X[2:]], call=lambda model, x: jax.vmap(model)(x))
    span = fixed.quantization_scales.stats["layers/0/weight_activation_range"]
    assert span.tolist() == [float(X.min()), float(X.max())]
    assert not bool((run(fixed, 2 * X) == run(low, 2 * X)).all())
    gradient = eqx.filter_grad(lambda model: run(model, X).sum())(fixed)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.quantization_scales))

    learned = jc.nn.quantize(mlp(), Rule(weight="int4(group=all)", scale_from=jc.LSQ()), inputs=(X[0],))
    gradient = eqx.filter_grad(lambda model: (run(model, X) ** 2).sum())(learned)
    scales = gradient.quantization_scales.learned
    assert sorted(scales) == ["layers/0/weight_weight_scale", "layers/1/weight_weight_scale"]
    assert all(bool(leaf.any()) for leaf in scales.values())
    packed = jc.nn.quantize(learned, Rule(weight="int4(group=all)", scale_from=jc.LSQ()), "ptq", inputs=(X[0],))
    np.testing.assert_array_equal(run(packed, X), run(learned, X))


def stochastic_rules_take_keys() -> None:
    rule = Rule(weight="int4(group=16):stochastic")
    low = jc.nn.quantize(mlp(), rule)
    one, other = (low(X[0], rounding_key=jax.random.key(i)) for i in (1, 2))
    assert bool((one != other).any()) and bool((one == low(X[0], rounding_key=jax.random.key(1))).all())
    with pytest.raises(ValueError, match="rounding_key=None, but Rule"):
        low(X[0])
    with pytest.raises(ValueError, match="key=None"):
        jc.nn.quantize(mlp(), rule, "ptq", inputs=(X[0],))
    packed = jc.nn.quantize(mlp(), rule, "ptq", inputs=(X[0],), key=KEY)
    assert type(packed.layers[0].weight).__name__ == "QArray"


def rounding_with_data_gives_the_codes_of_the_plain_function() -> None:
    with pytest.raises(TypeError, match=r"^model=MLP must be a module of Flax [^\n]*$"):
        jc.nn.sensitivity(mlp(), RULE, [[X]])
    call: Any = lambda m, x: jax.vmap(m)(x)  # noqa: E731
    rounded, report = jc.nn.quantize(
        mlp(), RULE, "ptq", call=call, batches=[X], steps=[jc.ptq.gptq()], return_report=True
    )
    assert [row.path for row in report.weights] == ["layers/0/weight", "layers/1/weight"]
    of_inputs = jc.nn.quantize(mlp(), RULE, "ptq", call=call, inputs=(X,))
    want = jc.nn.quantize(mlp(), RULE, "ptq", inputs=(X[0],))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(of_inputs), jax.tree.leaves(want))
    low = jc.quantize_fn(call, RULE)
    np.testing.assert_array_equal(jax.vmap(rounded)(X), low(low.pack(mlp(), batches=[X], steps=[jc.ptq.gptq()]), X))

    def plain(p: Any, x: Any) -> Any:
        return jax.nn.relu(x @ p["a"].T + p["c"]) @ p["b"].T

    first, last = mlp().layers
    want = jc.quantize_fn(plain, RULE).pack(
        {"a": first.weight, "b": last.weight, "c": first.bias}, batches=[X], steps=[jc.ptq.gptq()]
    )
    for got, own in ((rounded.layers[0].weight, want["a"]), (rounded.layers[1].weight, want["b"])):
        np.testing.assert_array_equal(jc.dequantize(got), jc.dequantize(own))


# -- adapters ----------------------------------------------------------------------------------------------------------


def an_mlp_in_numpy() -> None:
    """Groups of 16 inputs, a scale of their largest magnitude over 7, ties to even; a bias as it is."""
    model = mlp()
    packed = jc.nn.quantize(model, RULE, "weight_only", inputs=(X[0],))
    h = np.asarray(X, np.float64)
    for layer in model.layers:
        groups = np.asarray(layer.weight, np.float32).reshape(layer.out_features, -1, 16)
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
        weight = (np.rint(np.clip(groups / scale, -8, 7)) * scale).reshape(layer.weight.shape)
        h = h @ weight.T.astype(np.float64) + np.asarray(layer.bias, np.float64)
        h = h if layer is model.layers[-1] else np.maximum(h, 0)
    np.testing.assert_allclose(run(packed, X), h, rtol=1e-4, atol=1e-5)
    assert packed.layers[0].weight.nbytes == 48 * 32 // 2 + 48 * 2 * 4
    rows = jc.nn.report(model, RULE, inputs=(X[0],)).parameters
    assert {row.path: row.spec for row in rows if row.spec} == dict.fromkeys(
        ("layers/0/weight", "layers/1/weight"), "int4(group=16)"
    )


@pytest.mark.parametrize(
    "check",
    [
        an_mlp_in_numpy,
        pytest.param(stochastic_rules_take_keys, marks=pytest.mark.slow),
        pytest.param(rounding_with_data_gives_the_codes_of_the_plain_function, marks=pytest.mark.slow),
        pytest.param(methods_and_scales, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_rules_of_modules(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


class Two(eqx.Module):
    first: Any
    second: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.first(x)

    def other(self, x: jax.Array) -> jax.Array:
        return self.second(x)


def test_a_weight_that_no_method_with_examples_reaches_is_an_error() -> None:
    model, rule, x = Two(*(eqx.nn.Linear(8, 4, key=KEY) for _ in "12")), Rule("second", weight="int8"), jnp.ones(8)
    for mode in ("qat", "ptq"):
        with pytest.raises(ValueError, match="weight rounds no parameter of the methods"):
            jc.nn.quantize(model, rule, mode, inputs=(x,))
    packed = jc.nn.quantize(model, rule, "ptq", inputs={"__call__": (x,), "other": (x,)})
    assert isinstance(packed.second.weight, jc.QArray) and not isinstance(packed.first.weight, jc.QArray)


def test_misuse() -> None:
    model = mlp()
    packed = jc.nn.quantize(model, RULE, "ptq", inputs=(X[0],))
    for call, error, text in [
        (lambda: jc.nn.quantize(model, RULE, "ptq"), ValueError, "inputs=None"),
        (lambda: jc.nn.quantize(packed, RULE, "ptq", inputs=(X[0],)), ValueError, "packed already"),
        (lambda: jc.nn.quantize(model, RULE, "emulate"), ValueError, "jchop.emulate"),
        (lambda: jc.nn.quantize(model, RULE, "ptq", inputs={"predict": (X[0],)}), ValueError, "no method 'predict'"),
        (lambda: jc.nn.quantize(model, Rule("layer", weight="e4m3"), inputs=(X[0],)), ValueError, "nearest paths"),
        (lambda: jc.nn.quantize(model, Rule(output="e4m3")), NotImplementedError, "output needs layers"),
        (lambda: jc.nn.quantize(model, RULE, rngs=3), TypeError, "takes key="),  # type: ignore[arg-type]
        (
            lambda: jc.nn.quantize(model, Rule(activation="int8", scale_from=jc.MovingAverage(0.9))),
            NotImplementedError,
            "cannot follow the data",
        ),
        (lambda: jc.nn.report(model, RULE), ValueError, "inputs=None"),
        (lambda: jc.nn.calibrate(model, [X[0]]), ValueError, "is not quantized"),
        (lambda: add_lora(packed, LoraRule("*", rank=2)), ValueError, "key=None"),
        (lambda: add_lora(packed, LoraRule("*", rank=2), key=KEY), ValueError, "inputs=None"),
        (lambda: add_lora({}, LoraRule("*", rank=2), key=KEY), TypeError, "need fun="),
        (lambda: add_lora(packed, LoraRule("layer", rank=2), key=KEY, inputs=(X[0],)), ValueError, "nearest paths"),
        (lambda: merge_lora(packed), ValueError, "no adapters"),
        (lambda: lora_mask(packed), ValueError, "no adapters"),
    ]:
        with pytest.raises(error, match=text):
            call()


def noised(model: Any) -> Any:
    """B of small random numbers in place of zeros."""
    mask = lora_mask(model)
    noise = lambda leaf, own: 0.1 * jax.random.normal(KEY, leaf.shape) if own else leaf  # noqa: E731
    return jax.tree.map(noise, model, mask)


def adapters_of_modules(make: Any, tmp_path: Path) -> None:
    model = make()
    rules = [LoraRule("layers/0" if make is mlp else "layers", rank=4, alpha=8), LoraRule("*", rank=2)]
    packed = jc.nn.quantize(model, Rule(weight="nf4(group=16)"), "ptq", inputs=(X[0],))
    adapted = add_lora(packed, rules, key=KEY, inputs=(X[0],))
    # Compiled whole, XLA's CPU backend sums a product that a bias follows in another order.
    np.testing.assert_array_equal(jax.vmap(adapted)(X), jax.vmap(packed)(X))

    adapters, rest = eqx.partition(adapted, lora_mask(adapted))

    def loss(adapters: Any) -> Any:
        return (jax.vmap(eqx.combine(adapters, rest))(X) ** 2).mean()

    gradient = jax.tree.leaves(jax.grad(loss)(adapters))
    assert len(gradient) == 4 and any(bool(leaf.any()) for leaf in gradient)
    sizes = {32 * 48, 48 * 16} if make is mlp else {32 * 32, 3 * 32 * 32}
    found = [products_of_size(jax.make_jaxpr(f)(adapters).jaxpr, sizes) for f in (loss, jax.grad(loss))]
    assert found == [0, 0]  # no product has the shape of a weight
    arrays, static = eqx.partition(model, eqx.is_array)
    full = jax.grad(lambda arrays: (jax.vmap(eqx.combine(arrays, static))(X) ** 2).mean())
    whole = products_of_size(jax.make_jaxpr(full)(arrays).jaxpr, sizes)
    assert whole >= 1  # as it is with all parameters

    adapted = noised(adapted)
    merged = merge_lora(adapted)
    assert type(merged) is type(model)
    np.testing.assert_allclose(run(merged, X), run(adapted, X), rtol=1e-4, atol=1e-5)
    again = merge_lora(adapted, requantize=True)
    assert type(again) is type(packed) and size_of(again) == size_of(packed)
    bare, parts = split_lora(adapted)
    np.testing.assert_array_equal(run(bare, X), run(packed, X))
    if make is scanned:
        assert parts["layers"]["lora_a"].shape == (3, 32, 4)
        with pytest.raises(ValueError, match="one of a stack"):
            save_lora(tmp_path, adapted)
        return
    weight = jc.dequantize(packed.layers[0].weight)
    own = parts["layers/0"]
    exact = (
        np.asarray(weight, np.float64)
        + 2.0 * (np.asarray(own["lora_a"], np.float64) @ np.asarray(own["lora_b"], np.float64)).T
    )
    np.testing.assert_allclose(merged.layers[0].weight, exact, rtol=0, atol=2**-22 * np.abs(exact).max())
    save_lora(tmp_path, adapted)
    tensors = jc.load(tmp_path / "adapter_model.safetensors")
    assert {name: leaf.shape for name, leaf in tensors.items()} == {
        "base_model.model.layers.0.lora_A.weight": (4, 32),
        "base_model.model.layers.0.lora_B.weight": (48, 4),
        "base_model.model.layers.1.lora_A.weight": (2, 48),
        "base_model.model.layers.1.lora_B.weight": (16, 2),
    }
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    np.testing.assert_array_equal(run(load_lora(tmp_path, packed, inputs=(X[0],)), X), run(adapted, X))


def network(p: Any, x: Any) -> Any:
    """Products whose weights are moved: heads, the other side, a transpose, and one weight used twice."""
    q = jnp.einsum("td,dhk->thk", x, p["heads"])
    y = jnp.einsum("thk,hkd->td", q, p["out"])
    y = (p["left"] @ y.T).T @ p["twice"].T
    return jnp.tanh(y) @ p["twice"].astype(jnp.float32).T


PARAMS = {
    name: jnp.asarray(np.random.default_rng(i).normal(size=shape) / 6, jnp.float32)
    for i, (name, shape) in enumerate(
        {"heads": (32, 2, 16), "out": (2, 16, 32), "left": (32, 32), "twice": (32, 32)}.items()
    )
}


def adapters_of_an_mlp(tmp_path: Path) -> None:
    adapters_of_modules(mlp, tmp_path)


def adapters_of_a_stack(tmp_path: Path) -> None:
    adapters_of_modules(scanned, tmp_path)


def adapters_of_parameters() -> None:
    """The adapters of a pytree, against the function with the merged weights in float64."""
    for rounds in (True, False):
        of_parameters(rounds)


def of_parameters(rounds: bool) -> None:
    low = jc.quantize_fn(network, Rule(weight="int4(group=16)") if rounds else Rule())
    packed = low.pack(PARAMS, X)
    rules = [LoraRule("{heads,out}", rank=3, alpha=6), LoraRule("*", rank=2)]
    adapted = add_lora(packed, rules, fun=low, inputs=(X,), key=KEY)
    np.testing.assert_array_equal(low(adapted, X), low(packed, X))
    assert adapted["out"].adapter.lora_a.shape == (32, 3) and adapted["heads"].adapter.lora_b.shape == (3, 32)
    adapted = noised(adapted)
    assert float(jnp.abs(low(adapted, X) - low(packed, X)).max()) > 0.05
    base = {name: np.asarray(jc.dequantize(v) if rounds else v, np.float64) for name, v in packed.items()}
    for name, leaf in adapted.items():
        a, b = (np.asarray(v, np.float64) for v in (leaf.adapter.lora_a, leaf.adapter.lora_b))
        more = leaf.adapter.rule.factor * (a @ b)
        rows = name in ("heads", "out")  # (in, out); the others sum over their last axis
        base[name] = base[name] + (more if rows else more.T).reshape(base[name].shape)
    x = np.asarray(X, np.float64)
    y = np.einsum("td,dhk->thk", x, base["heads"])
    y = np.einsum("thk,hkd->td", y, base["out"])
    y = (base["left"] @ y.T).T @ base["twice"].T
    np.testing.assert_allclose(low(adapted, X), np.tanh(y) @ base["twice"].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(network(merge_lora(adapted), X), low(adapted, X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(low)(adapted, X), low(adapted, X), rtol=1e-5, atol=1e-6)


def parameters_without_adapters_stay_packed_in_a_merge() -> None:
    def model(p: Any, tokens: Any) -> Any:
        return jnp.asarray(p["table"][tokens]) @ p["w"]

    params, tokens = {"table": jnp.linspace(-1, 1, 128).reshape(8, 16), "w": jnp.ones((16, 4))}, jnp.array([[0, 7, 2]])
    low = jc.quantize_fn(model, Rule(weight="int8(channel=0)"))
    packed = low.pack(params, tokens)
    merged = merge_lora(noised(add_lora(packed, LoraRule("w", rank=2), fun=low, inputs=(tokens,), key=KEY)))
    assert isinstance(merged["table"], jc.QArray) and merged["table"].spec == packed["table"].spec
    plain = model(jc.dequantize(merged), tokens)
    assert plain.shape == (1, 3, 4) and bool((model(merged, tokens) == plain).all())


def dropout_needs_a_key() -> None:
    low = jc.quantize_fn(network, Rule())
    adapted = noised(add_lora(PARAMS, LoraRule("heads", rank=2, dropout=0.5), fun=low, inputs=(X,), key=KEY))
    kept = low(adapted, X)
    one, other = (low(adapted, X, key=jax.random.key(i)) for i in (1, 2))
    assert bool((one != other).any()) and bool((one != kept).any())
    many = jax.vmap(lambda key: low(adapted, X, key=key))(jax.random.split(KEY, 64))
    assert np.isfinite(many).all()


@each("init", ["loftq", "pissa"])
def first_values(init: str) -> None:
    """The best approximations of the residual, and of the weight (Eckart and Young)."""
    low = jc.quantize_fn(
        lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0], Rule(weight="nf4(group=16)")
    )
    params = {"w": jax.random.normal(KEY, (2, 32, 32))}
    packed = low.pack(params, X)
    rule = LoraRule("w", rank=5, init=init)
    adapted = add_lora(packed, rule, fun=low, inputs=(X,), key=KEY, original=params)["w"]
    for i in range(2):
        w, held = np.asarray(params["w"][i], np.float64), np.asarray(jc.dequantize(adapted.base)[i], np.float64)
        product = np.asarray(adapted.adapter.lora_a[i], np.float64) @ np.asarray(adapted.adapter.lora_b[i], np.float64)
        of = w - held if init == "loftq" else w
        tail = np.linalg.svd(of, compute_uv=False)[5:]
        assert np.linalg.norm(of - product) == pytest.approx(np.linalg.norm(tail), rel=1e-5)
        assert np.linalg.norm(w - product - held) < np.linalg.norm(w - np.asarray(jc.dequantize(packed["w"])[i]))
    with pytest.raises(ValueError, match="needs original="):
        add_lora(packed, rule, fun=low, inputs=(X,), key=KEY)


def test_each_adapter_begins_with_numbers_of_its_own() -> None:
    """Of two parameters, one of which is a stack."""
    params = {"one": jnp.ones((8, 8)), "stack": jnp.ones((2, 8, 8))}
    fun = jc.quantize_fn(lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x @ p["one"], p["stack"])[0], Rule())
    adapted = add_lora(params, LoraRule("*", rank=2), fun=fun, inputs=(X[:, :8],), key=KEY)
    first = [adapted["one"].adapter.lora_a, *adapted["stack"].adapter.lora_a]
    assert len({np.asarray(a).tobytes() for a in first}) == 3


@pytest.mark.parametrize(
    "check",
    [
        dropout_needs_a_key,
        pytest.param(first_values, marks=pytest.mark.slow),
        pytest.param(adapters_of_an_mlp, marks=pytest.mark.slow),
        pytest.param(adapters_of_a_stack, marks=pytest.mark.slow),
        pytest.param(adapters_of_parameters, marks=pytest.mark.slow),
        pytest.param(parameters_without_adapters_stay_packed_in_a_merge, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_adapters_in_use(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each(
    ("fun", "text"),
    [
        (lambda w, x: x @ w + w[0], "takes it, which is no product"),
        (lambda w, x: x @ (2 * w), "it is computed with"),
        (lambda w, x: (x @ w) @ w.T, "sums over other axes"),
        (lambda w, x: x @ w[:, :16], "takes a part of an axis"),
        (lambda w, x: (x @ w, w), "returns it"),
        (lambda w, x: jnp.einsum("bi,ij->bij", x, w), "matches no linear layer"),
        (lambda w, x: jnp.einsum("bi,ij->ib", x, w), "matches no linear layer"),
        (lambda w, x: jnp.einsum("bi,bij->bj", x[:2, :16], w.reshape(2, 16, 32)), "batched over an axis"),
    ],
)
def test_parameters_that_can_have_none(fun: Any, text: str) -> None:
    low = jc.quantize_fn(lambda p, x: fun(p["w"], x), Rule())
    with pytest.raises(ValueError, match=text):
        add_lora({"w": jnp.ones((32, 32))}, LoraRule("w", rank=2), fun=low, inputs=(X,), key=KEY)
    if text == "matches no linear layer":
        return
    adapted = add_lora(
        {"w": jnp.ones((32, 32))}, LoraRule("w", rank=2), fun=jc.quantize_fn(lambda p, x: x @ p["w"], Rule()),
        inputs=(X,), key=KEY,
    )  # fmt: skip
    with pytest.raises(ValueError, match="'w' has an adapter"):
        low(adapted, X)
