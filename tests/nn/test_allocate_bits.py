"""`jc.nn.allocate_bits`: formats of layers under a budget, against all choices and single formats on digits."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from layer_references import LAYERS, checked, each

import jchop as jc
from jchop._common.paths import matches_path

further = Further()

WHOLE = ["int4(group=all)", "int8(group=all)"]
MENU = ["int3", "int4", "int8"]


def squares(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum((model(x) - y) ** 2, -1))


def chain(sizes: list[int], seed: int, between: Any = nnx.tanh) -> nnx.Module:
    rngs = nnx.Rngs(seed)
    layers: list[Any] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nnx.Linear(a, b, rngs=rngs), between]
    return nnx.Sequential(*layers[:-1])


@pytest.fixture(scope="module")
def problem() -> tuple[nnx.Module, list[tuple[jax.Array, jax.Array]]]:
    model = chain([8, 8, 8, 4], 0)
    keys = jax.random.split(jax.random.key(1), 4)
    data = [(jax.random.normal(keys[i], (16, 8)), jax.random.normal(keys[i + 2], (16, 4))) for i in range(2)]
    return model, data


def fisher(model: Any, data: Any, number: int, text: str) -> float:
    """The score by its definition: the layers by hand, the gradient by the result of this layer."""
    kernels = [np.asarray(layer.kernel[...]) for layer in model.layers[::2]]
    biases = [np.asarray(layer.bias[...]) for layer in model.layers[::2]]
    rounded = np.asarray(jc.round_to_format(jnp.asarray(kernels[number]), text))
    total = 0.0
    for x, target in data:
        h = [np.asarray(x, np.float64)]
        for w, b in zip(kernels, biases, strict=True):
            z = h[-1] @ w + b
            h.append(np.tanh(z) if len(h) < len(kernels) else z)
        gradient = 2 * (h[-1] - np.asarray(target)) / len(x)
        for i in range(len(kernels) - 1, number, -1):
            gradient = (gradient @ kernels[i].T) * (1 - h[i] ** 2)
        error = h[number] @ (rounded - kernels[number])
        total += float(np.sum(gradient**2 * error**2))
    return total / len(data)


def by_definition(model: Any, data: Any) -> None:
    """Scores by their definition, and the choice among all."""
    found = jc.nn.allocate_bits(model, MENU, data, loss=squares, bits=4.7)
    sizes = [layer.kernel[...].size for layer in model.layers[::2]]
    scores = [[fisher(model, data, i, text) for text in MENU] for i in range(3)]
    costs = [
        [
            jc.nn.quantize(model, jc.Rule(weight=text), "ptq").layers[2 * i].kernel[...].nbytes  # type: ignore[attr-defined]
            for text in MENU
        ]
        for i in range(3)
    ]
    every = {
        chosen: sum(scores[i][j] for i, j in enumerate(chosen))
        for chosen in itertools.product(range(3), repeat=3)
        if 8 * sum(costs[i][j] for i, j in enumerate(chosen)) <= 4.7 * sum(sizes)
    }
    best = min(every, key=every.__getitem__)
    assert [MENU.index(row.option) for row in found.rows] == list(best)
    np.testing.assert_allclose([row.score for row in found.rows], [scores[i][j] for i, j in enumerate(best)], rtol=1e-3)
    assert found.bytes == sum(costs[i][j] for i, j in enumerate(best)) and found.bits == 8 * found.bytes / sum(sizes)
    assert found.loss == pytest.approx(
        float(np.mean([squares(jc.nn.quantize(model, found.rules), *batch) for batch in data]))
    )
    bits, totals = zip(*found.front, strict=True)
    assert list(bits) == sorted(bits) and list(totals) == sorted(totals, reverse=True)
    kernel = np.asarray(model.layers[0].kernel[...], np.float64)
    low = np.asarray(jc.round_to_format(model.layers[0].kernel[...], found.rows[0].option), np.float64)
    assert found.rows[0].weight_snr == pytest.approx(10 * np.log10(np.sum(kernel**2) / np.sum((low - kernel) ** 2)))
    assert all(np.isinf(row.activation_snr) and 5 < row.output_snr < 80 for row in found.rows)
    assert "layers/0" in str(found) and json.loads(json.dumps(found.as_dict(), allow_nan=False))["bytes"] == found.bytes


class Shifted(nnx.Module):
    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 2, rngs=nnx.Rngs(1))
        self.shift = nnx.Param(jnp.ones(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.up(x)) + self.shift


def test_scores_by_the_loss_and_ratios_of_inputs_are_those_of_one_layer_alone() -> None:
    model, draw = Shifted(), np.random.default_rng(0)
    x, y = (jnp.asarray(draw.normal(size=(5, size)), "float32") for size in (4, 2))
    menu = [None, jc.Rule(weight="int4(group=all)", activation="e4m3")]
    found = jc.nn.allocate_bits(model, menu, [(x, y)], loss=squares, bits=12, score="loss")
    before = {"down": model.up(x), "up": x}
    assert [row.path for row in found.rows] == [*before] and len(found.rules) == 2
    for row, rule in zip(found.rows, found.rules, strict=True):
        lost = float(squares(jc.nn.quantize(model, rule), x, y)) - float(squares(model, x, y))
        assert row.score == pytest.approx(lost, rel=1e-3, abs=1e-5)
        layer, inputs = getattr(model, row.path), before[row.path]
        result = np.asarray(layer(inputs), np.float64)
        noise = np.asarray(layer(jc.round_to_format(inputs, "e4m3")), np.float64) - result
        assert row.activation_snr == pytest.approx(10 * np.log10((result**2).sum() / (noise**2).sum()), abs=0.01)
    assert any("'' (Shifted)" in note for note in found.notes)  # its parameter has no format


def groups_agree_and_other_tensors_have_ratios(problem: Any) -> None:
    model, data = problem
    menu = [jc.Rule(weight="e2m1fn", activation="e4m3"), None]
    found = jc.nn.allocate_bits(model, menu, data[:1], loss=squares, bits=24, groups=["layers/{0,2}"])
    first, second, third = found.rows
    assert first.group == second.group != third.group and first.option == second.option
    assert found.bits <= 24 and {"carrier"} < {row.option for row in found.rows}
    low = next(row for row in found.rows if row.option != "carrier")
    assert low.output_snr < low.activation_snr < 60 and len(found.rules) < 3


class Net(nnx.Module):
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


def drawn(model: Any) -> Any:
    """The model with parameters that are not at the zero or one that layers start from."""
    draw = np.random.default_rng(0)
    shapes = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda v: jnp.asarray(draw.normal(0.25, 0.5, v.shape), v.dtype), shapes))
    return model


def packed_in(model: Any) -> set[str]:
    """The paths of the modules with parameters that `quantize` packs."""
    low = jc.nn.quantize(model, jc.Rule(weight="int8(group=all)"), "ptq")
    return {"/".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(nnx.state(low, jc.nn.QuantizedParam))}


def half_squares(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((model(x) - y) ** 2) / 2


#: One of each: a product of one axis and of more, its own operation, two weights, steps in Python and in a scan, none.
FEW = ["Linear", "Einsum", "Conv2d", "ConvTranspose", "Embed", "LayerNorm", "LoRALinear", "MultiHeadAttention"]


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("name", [*FEW, "LSTMCell", "RNN", "Network"])
def test_every_layer_that_is_packed_has_a_row_or_is_named(name: str) -> None:
    layer, draw = LAYERS[name], np.random.default_rng(1)
    model = drawn(Net(layer.make(nnx.Rngs(0))))
    x = jnp.asarray(draw.integers(0, 7, layer.shape) if name == "Embed" else draw.normal(size=layer.shape), "float32")
    x = x.astype("int32") if name == "Embed" else x

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jnp.sin(layer.run(model.layer, x)))

    if "Norm" in name:
        with pytest.raises(ValueError, match=rf"layers='\*' matches no layer .*, only 'layer' \({name}\)"):
            jc.nn.allocate_bits(model, WHOLE, [(x,)], loss=loss, bits=30)
        return
    if name == "RNN":
        with pytest.raises(ValueError, match=r"the calls of 'layer/cell/dense_h', 'layer/cell/dense_i' are within"):
            jc.nn.allocate_bits(model, WHOLE, [(x,)], loss=loss, bits=30)
    rows = jc.nn.allocate_bits(
        model, WHOLE, [(x,)], loss=loss, bits=30, score="loss" if name == "RNN" else "fisher"
    ).rows
    assert {row.path for row in rows} == packed_in(model)
    assert all(row.score if name == "RNN" else row.score > 0 for row in rows)
    assert all(np.isnan(row.output_snr) if name == "RNN" else 20 < row.output_snr < 80 for row in rows)


@further
@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda r: nnx.ConvTranspose(4, 8, (3,), (2,), rngs=r), (200, 5, 4)),
        (lambda r: nnx.LoRALinear(4, 8, lora_rank=3, rngs=r), (800, 4)),
        (lambda r: nnx.LoRA(4, 3, 8, base_module=nnx.Linear(4, 8, rngs=r), rngs=r), (800, 4)),
    ],
    ids=["ConvTranspose", "LoRALinear", "LoRA"],
)
def scores_of_the_last_layer_are_twice_its_part_in_a_divergence(make: Any, shape: tuple[int, ...]) -> None:
    """With labels y + n, n normal, the mean of (∂L/∂y)²·(ŷ - y)² is (ŷ - y)², and the divergence is half of it."""
    model = drawn(Net(make(nnx.Rngs(0))))
    x = jax.random.normal(jax.random.key(1), shape)
    y = model(x)
    labels = y + jax.random.normal(jax.random.key(2), y.shape)
    found = jc.nn.allocate_bits(model, WHOLE, [(x, labels)], loss=half_squares, bits=30)
    assert {row.path for row in found.rows} == packed_in(model)
    for row in found.rows:
        alone = jc.nn.quantize(model, jc.Rule(f"/{row.path}/", weight=row.option))
        assert row.score == pytest.approx(2 * float(half_squares(alone, x, y)), rel=0.15)
        noise = jnp.sum((alone(x) - y) ** 2)
        if row.path == "layer":  # others give a part of the result
            assert row.output_snr == pytest.approx(float(10 * jnp.log10(jnp.sum(y**2) / noise)), abs=0.05)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(jax.lax.stop_gradient(jnp.tanh(self.embed(x))))


class Mixed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.norm = nnx.ConvTranspose(4, 8, (3,), rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.head, self.spare = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.shift = nnx.Param(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.up(x))) + self.shift


def notes_name_what_has_no_format_and_what_is_not_called() -> None:
    model, data = Mixed(nnx.Rngs(0)), [(jnp.ones((2, 5, 4)), jnp.zeros((2, 5, 4)))]
    found = jc.nn.allocate_bits(model, WHOLE, data, loss=squares, bits=30)
    assert [row.path for row in found.rows] == ["head", "spare", "up"]
    assert found.notes[-2:] == (
        "without a format, and not in the budget: 'norm' (LayerNorm), '' (Mixed)",
        "not called by the loss, so without a ratio: 'spare'",
    )
    assert not jc.nn.allocate_bits(model, WHOLE, data, loss=squares, bits=30, layers="{head,up}").notes
    with pytest.raises(ValueError, match="the calls of 'head', 'up' are within a transformation of JAX"):
        jc.nn.allocate_bits(model, WHOLE, data, loss=jax.jit(lambda *args: squares(*args)), bits=30, layers="{head,up}")


def both_products_of_an_embedding_count() -> None:
    model, x, y = Tied(nnx.Rngs(0)), jnp.arange(7), jnp.zeros((7, 7))
    found = jc.nn.allocate_bits(model, WHOLE, [(x, y)], loss=half_squares, bits=16)
    table = model.embed.embedding[...]
    h = jnp.tanh(table)
    error = h @ (jc.round_to_format(table, found.rows[0].option) - table).T
    assert found.rows[0].score == pytest.approx(float(jnp.sum((h @ table.T) ** 2 * error**2)), rel=1e-3)


@further.first
@pytest.mark.parametrize(
    "check",
    [
        both_products_of_an_embedding_count,
        pytest.param(groups_agree_and_other_tensors_have_ratios, marks=pytest.mark.slow),
        pytest.param(notes_name_what_has_no_format_and_what_is_not_called, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def groups_and_notes(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each(
    ("changes", "error", "text"),
    [
        ({"menu": ["int4"]}, TypeError, "two formats"),
        ({"menu": ["int4", "int4"]}, ValueError, "twice"),
        ({"menu": ["int4", "int8:stochastic"]}, ValueError, r"menu\[1\]=int8:stochastic rounds stochastically"),
        ({"menu": ["int4", jc.Rule("head", weight="int8")]}, ValueError, r"menu\[1\]"),
        ({"bits": None}, ValueError, "give one of both"),
        ({"bytes": 10}, ValueError, "give one of both"),
        ({"bits": -1}, ValueError, "bits=-1"),
        ({"bits": 1}, ValueError, "the cheapest choice takes"),
        ({"score": "taylor"}, ValueError, "score='taylor'"),
        ({"groups": ["heads/*"]}, ValueError, "heads"),
        ({"layers": "heads"}, ValueError, "heads"),
        ({"loss": 3}, TypeError, "loss=3"),
        ({"data": []}, ValueError, "batches: there must be"),
        ({"model": {}}, TypeError, "model"),
    ],
)
def test_wrong_arguments_are_named(problem: Any, changes: dict, error: type[Exception], text: str) -> None:
    model, data = problem
    given = {"model": model, "data": data, "menu": MENU, "loss": squares, "bits": 4.7, **changes}
    with pytest.raises(error, match=text):
        jc.nn.allocate_bits(given.pop("model"), given.pop("menu"), given.pop("data"), **given)


def divergence(model: Any, x: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum(p * (jnp.log(p + 1e-30) - jax.nn.log_softmax(model(x))), -1))


def trained(between: Any) -> tuple[Any, jax.Array]:
    """A network of five layers that knows the digits, and their images."""
    optax, datasets = pytest.importorskip("optax"), pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
    graph, state = nnx.split(chain([64, 32, 32, 32, 32, 10], 2, between))
    optimizer = optax.adam(3e-3)

    def turn(carry: Any, key: jax.Array) -> Any:
        state, moments = carry
        some = jax.random.randint(key, (64,), 0, 1200)

        def entropy(state: Any) -> jax.Array:
            logits = nnx.merge(graph, state)(x[some])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y[some]).mean()

        updates, moments = optimizer.update(jax.grad(entropy)(state), moments, state)
        return (optax.apply_updates(state, updates), moments), None

    keys = jax.random.split(jax.random.key(2), 150)
    (state, _), _ = jax.jit(lambda state: jax.lax.scan(turn, (state, optimizer.init(state)), keys))(state)
    return nnx.merge(graph, state), x


def compare_with_all_choices(model: Any, x: jax.Array, p: jax.Array, chosen: list[int]) -> None:
    """All of 4.5 bits: each is farther from the network than int8 at both ends, and tune's is near the best."""
    kernels = [layer.kernel[...] for layer in model.layers[::2]]
    menu, bits = ["int3", "int4", "int5", "int6", "int8"], np.array([3, 4, 5, 6, 8])
    rounded = [jnp.stack([jc.round_to_format(kernel, text) for text in menu]) for kernel in kernels]
    sizes = np.array([kernel.size for kernel in kernels])

    def apart(mix: jax.Array, first: int, last: int) -> jax.Array:
        h = x[first:last]
        for i, layer in enumerate(model.layers[::2]):
            z = h @ rounded[i][mix[i]] + layer.bias[...]
            h = jnp.tanh(z) if i < len(sizes) - 1 else z
        return divergence(lambda _: h, x, p[first:last])

    every = np.array(list(itertools.product(range(5), repeat=5)), np.int32)
    every = every[(bits[every] * sizes).sum(1) <= 4.5 * sizes.sum()]
    run = jax.jit(lambda mixes: jax.lax.map(lambda mix: (apart(mix, 0, 600), apart(mix, 1200, 1797)), mixes))
    seen, unseen = map(np.asarray, run(jnp.asarray(every)))
    ends = run(jnp.array([[4, 1, 1, 1, 4]]))
    assert seen.min() > float(ends[0][0]) and unseen.min() > float(ends[1][0])
    assert seen[(every == chosen).all(1)][0] <= 1.1 * seen.min()


def on_digits(score: Any, between: Any, bits: float) -> None:
    """The mix is nearer to the network than int4 alone, and than int4 with int8 at both ends.

    Those ends hold 44 % of the weights, so that choice takes 5.77 bits. A relu network needs 4.5 bits to beat it; a
    tanh network, whose first layer is the most sensitive, needs as many, as all choices of 4.5 bits show.
    """
    model, x = trained(between)
    p = jax.nn.softmax(model(x))
    # The square of a gradient is the curvature of the divergence for labels that the model itself draws.
    drawn = jax.nn.one_hot(jax.random.categorical(jax.random.key(5), model(x)), 10)
    labels = drawn if score == "fisher" else p
    menu = ["int3", "int4", "int5", "int6", "int8"]
    mixes = {
        budget: jc.nn.allocate_bits(model, menu, [(x[:600], labels[:600])], loss=divergence, bits=budget, score=score)
        for budget in {4.5, bits}
    }
    found = mixes[bits]
    paths = [row.path for row in found.rows]
    ends = [jc.Rule(f"/{path}/", weight="int8" if path in (paths[0], paths[-1]) else "int4") for path in paths]

    def apart(rules: Any) -> float:
        return float(divergence(jc.nn.quantize(model, rules), x[1200:], p[1200:]))

    assert found.bits <= bits and mixes[4.5].bits <= 4.5
    assert apart(mixes[4.5].rules) < apart(jc.Rule(weight="int4"))
    assert apart(found.rules) < apart(ends)
    assert all(any(matches_path(rule.path, path) for rule in found.rules) for path in paths)
    if between is nnx.tanh:
        compare_with_all_choices(model, x, p, [menu.index(row.option) for row in mixes[4.5].rows])


@pytest.mark.parametrize(
    "digits",
    [
        None,
        pytest.param(("fisher", nnx.relu, 4.5), marks=pytest.mark.slow, id="fisher, relu"),
        pytest.param(("loss", nnx.tanh, 5.8), marks=pytest.mark.slow, id="loss, tanh"),
    ],
)
def test_the_choice_is_the_best(digits: Any, problem: Any) -> None:
    if digits is None:
        by_definition(*problem)
    else:
        on_digits(*digits)


test_further = further.test()
