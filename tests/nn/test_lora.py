"""Adapters of low rank: first output, gradients, initial values, merging, files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from flax import linen, nnx
from further import Further
from layer_references import checked, products_of_size

import jchop as jc
from jchop import Rule
from jchop.nn import LoraRule, add_lora, load_lora, merge_lora, save_lora, split_lora

further = Further()


class Own(nnx.Module):
    """A product in the model's own code."""

    def __init__(self) -> None:
        self.up = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.own = nnx.Param(nnx.initializers.normal()(jax.random.key(1), (8, 2, 4)))
        self.gain = nnx.Param(jnp.ones(8))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("bd,dnh->bnh", self.up(x) * self.gain[...], self.own[...])


OWN, OWN_X = Rule(weight="int4(group=4)"), jnp.linspace(-1, 1, 24).reshape(3, 8)


def add_to_own(model: Any, **more: Any) -> Any:
    adapted = add_lora(model, LoraRule("{up,own}", rank=2, **more), rngs=nnx.Rngs(1), inputs=(OWN_X,))
    nnx.update(adapted, jax.tree.map(lambda v: v + 0.1, nnx.state(adapted, nnx.LoRAParam)))
    return adapted


def own_by_hand(adapted: Any, up: Any, own: Any) -> Any:
    """The result with weights in full precision that the adapters are added to."""
    ups, owns = (node.quantization_adapters for node in (adapted.up, adapted))
    up, own = (
        w + (a.lora_a[...] @ a.lora_b[...]).reshape(w.shape) for w, a in ((up, ups["kernel"]), (own, owns["own"]))
    )
    return jnp.einsum("bd,dnh->bnh", OWN_X @ up, own)


def test_programs_have_adapters_beside_their_parameters() -> None:
    plain = Own()
    packed = jc.nn.quantize(plain, OWN, "ptq", inputs=(OWN_X,))
    low = [jc.dequantize(packed.up.kernel.get_value()), jc.dequantize(packed.own.get_value())]
    for model, weights in (
        (packed, low),
        (jc.nn.quantize(plain, OWN), low),
        (plain, [plain.up.kernel[...], plain.own[...]]),
    ):
        adapted = add_to_own(model)
        np.testing.assert_allclose(adapted(OWN_X), own_by_hand(adapted, *weights), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(split_lora(adapted)[0](OWN_X), model(OWN_X))
        grads = nnx.grad(lambda m: jnp.sum(m(OWN_X) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(adapted)
        assert all(grad.any() for grad in jax.tree.leaves(grads)) and len(jax.tree.leaves(grads)) == 4


def test_adapters_of_programs_are_merged_saved_and_loaded(tmp_path: Path) -> None:
    packed = jc.nn.quantize(Own(), OWN, "ptq", inputs={"x": OWN_X})
    adapted = add_to_own(packed)
    merged, again = merge_lora(adapted), merge_lora(adapted, requantize=True)
    np.testing.assert_allclose(merged(OWN_X), adapted(OWN_X), rtol=1e-4, atol=1e-5)
    assert isinstance(merged.own, nnx.Param) and isinstance(again.own.get_value(), jc.QArray)
    np.testing.assert_array_equal(
        jc.dequantize(again.up.kernel.get_value()), jc.round_to_format(merged.up.kernel[...].T, "int4(group=4)").T
    )
    jc.nn.save_lora(tmp_path, adapted)
    np.testing.assert_array_equal(jc.nn.load_lora(tmp_path, packed, inputs=(OWN_X,))(OWN_X), adapted(OWN_X))


def test_adapters_of_programs_have_dropout_in_training() -> None:
    adapted = add_to_own(Own(), dropout=0.5)
    assert (adapted(OWN_X) != adapted(OWN_X)).any()
    adapted.eval()
    np.testing.assert_array_equal(adapted(OWN_X), adapted(OWN_X))


class Mixed(Own):
    """A program with layers of both linear classes, one of them held twice, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.general = nnx.LinearGeneral((2, 4), (2, 4), axis=(-2, -1), rngs=nnx.Rngs(2))
        self.rest = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(3)), self.up])
        self.table = nnx.Embed(3, 8, rngs=nnx.Rngs(4))

    def __call__(self, x: Any) -> Any:
        x = x + self.table(jnp.arange(3))
        return self.rest[0](self.rest[1](self.general(super().__call__(x)).reshape(3, 8)))


#: Arguments of `add_lora` and modes of a packed program.
WITHOUT = [
    (Own, "up", "ptq", "zeros"),
    pytest.param(Mixed, "{up,general,rest}", "ptq", "zeros", marks=pytest.mark.slow),
    pytest.param(Mixed, "general", "qat", "pissa", marks=pytest.mark.slow),
    pytest.param(Mixed, "rest/0/kernel", "weight_only", "loftq", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cls", "path", "mode", "init"), WITHOUT)
def test_linear_layers_of_programs_have_adapters_without_inputs(
    cls: Any, path: str, mode: Any, init: Any, tmp_path: Path
) -> None:
    """The model is the one that inputs give, in every bit; so it merges and loads alike."""
    packed = jc.nn.quantize(cls(), OWN, mode, inputs=(OWN_X,))
    make = lambda **more: add_lora(  # noqa: E731
        packed, LoraRule(path, rank=2, init=init), rngs=nnx.Rngs(1), original=cls(), **more
    )
    without, given = make(), make(inputs=(OWN_X,))
    same = lambda one, other: jax.tree.map(  # noqa: E731
        np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(model)) for model in (one, other))
    )
    same(without, given)
    np.testing.assert_array_equal(without(OWN_X), given(OWN_X))
    same(merge_lora(without, requantize=True), merge_lora(given, requantize=True))
    if init == "zeros":
        jc.nn.save_lora(tmp_path, without)
        np.testing.assert_array_equal(jc.nn.load_lora(tmp_path, packed)(OWN_X), without(OWN_X))


def test_other_parameters_of_programs_need_inputs_for_adapters() -> None:
    """What the program alone says is asked for, and what a call cannot take is refused there."""
    packed = jc.nn.quantize(Mixed(), OWN, "ptq", inputs=(OWN_X,))
    add = lambda path: add_lora(packed, LoraRule(path, rank=1), rngs=nnx.Rngs(0))  # noqa: E731
    for path in ("own", "*"):
        with pytest.raises(ValueError, match=r"the parameter 'own'.*inputs=\(x,\); exclude it with '!own'"):
            add(path)
    for path in ("table", "gain", "up/bias", "ap"):
        with pytest.raises(ValueError, match="matches no linear layer"):
            add(path)
    with pytest.raises(ValueError, match="nearest paths"):
        add_lora(packed, LoraRule("ap", rank=1), rngs=nnx.Rngs(0), inputs=(OWN_X,))


def test_a_call_refuses_adapters_of_weights_that_other_operations_take() -> None:
    """Without inputs the first call says so."""

    class Tied(Own):
        def __call__(self, x: Any) -> Any:
            return self.up(x) * self.gain[...] @ self.up.kernel[...].T

    adapted = add_lora(jc.nn.quantize(Tied(), OWN), LoraRule("up", rank=1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'up/kernel' has an adapter, which this call cannot take"):
        adapted(OWN_X)


def test_rules_are_a_mapping_one_or_several() -> None:
    """A pattern with a rule or its fields, one rule for all layers, or a list."""
    rule = LoraRule("up", rank=2, alpha=4)
    forms = [rule, [rule], {"up": LoraRule(rank=2, alpha=4)}, {"up": {"rank": 2, "alpha": 4}}]
    found = [split_lora(add_lora(Own(), rules, rngs=nnx.Rngs(1)))[1]["up"]["rule"] for rules in forms]
    assert found == [rule] * 4
    assert list(split_lora(add_lora(Own(), LoraRule(rank=2), rngs=nnx.Rngs(1)))[1]) == ["up"]
    both = add_lora(Mixed(), {"rest": {"rank": 1}, "*": {"rank": 2}}, rngs=nnx.Rngs(1))
    assert {path: one["rule"].rank for path, one in split_lora(both)[1].items()} == {
        "general": 2,
        "rest/0": 1,
        "rest/1": 1,
    }


def test_rules_of_qwix_give_their_rank_factor_and_dropout() -> None:
    yaml = {"qwix": {"rules": [{"module_path": ".*(query|value)", "rank": 8, "alpha": 16.0, "weight_qtype": "nf4"}]}}
    assert LoraRule.from_qwix(yaml) == [LoraRule("*{query,value}/", rank=8, alpha=16.0)]
    assert LoraRule.from_qwix({"rank": 4, "dropout": 0.1}) == [LoraRule("*", rank=4, dropout=0.1)]
    normal = jax.nn.initializers.normal()
    for said, fields in (
        ("rank=None", {"module_path": ".*mlp.*", "weight_qtype": "nf4"}),
        ("module_path='.a.b.+' has no equal", {"module_path": "(a|b)+", "rank": 2}),
        ("op_names=", {"op_names": ("conv_general_dilated",), "rank": 2}),
        ("lora_a_initializer=.* has no equal", {"lora_a_initializer": normal, "rank": 2}),
        ("lora_b_initializer=.* has no equal", {"lora_b_initializer": normal, "rank": 2}),
        ("ranks=2 is no field of a rule of qwix", {"ranks": 2, "rank": 2}),
    ):
        with pytest.raises(ValueError, match=said):
            LoraRule.from_qwix(fields)


def test_a_rule_of_qwix_itself_is_read() -> None:
    qwix = pytest.importorskip("qwix")
    rule = qwix.LoraRule(module_path=".*mlp.*", rank=4, alpha=2.0, dropout=0.1, weight_qtype="int4", tile_size=32)
    assert LoraRule.from_qwix([rule]) == [LoraRule("*mlp*", rank=4, alpha=2.0, dropout=0.1)]
    assert str(jc.Rule.from_qwix(rule)[0].weight) == "int4(group=32,rule=half_range)"


DOUBLE = "nf4(scale=uint8(group=256,zero_point=float))"
X = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)


class Net(nnx.Module):
    """Two layers, the second one used twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(128, 128, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(128, 128, use_bias=False, rngs=rngs)])
        self.again = self.rest[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.again(nnx.relu(self.rest[0](nnx.relu(self.up(x)))))


@pytest.fixture(scope="module")
def model() -> Net:
    return Net(nnx.Rngs(0))


@pytest.fixture(scope="module")
def packed(model: Any) -> Net:
    return jc.nn.quantize(model, Rule(weight=DOUBLE), "ptq")


def noised(model: Any) -> Any:
    """B of small random numbers in place of zeros."""
    found: Any = enumerate(sorted(nnx.iter_modules(model), key=lambda item: str(item[0])))
    for number, (_, layer) in found:
        if hasattr(layer, "lora_b"):
            layer.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(number), layer.lora_b.shape)
    return model


def first_output_and_gradients(packed: Any) -> None:
    adapted = add_lora(
        packed, [LoraRule("up", rank=4, alpha=8, dropout=0.5), LoraRule("rest", rank=2)], rngs=nnx.Rngs(1)
    )
    adapted.eval()
    np.testing.assert_array_equal(adapted(X), packed(X))
    assert type(packed.up).__name__ == "Linear" and adapted.again is adapted.rest[0]
    found = {
        "/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam))
    }
    assert sorted(found.values()) == [(2, 128), (4, 128), (128, 2), (128, 4)]

    graph, lora, others = nnx.split(adapted, nnx.LoRAParam, ...)

    def loss(lora: Any) -> jax.Array:
        return (nnx.merge(graph, lora, others)(X) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))(lora)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(gradient)) == sorted(found.values())
    assert any(bool(leaf.any()) for leaf in jax.tree.leaves(gradient))
    sizes = {128 * 128}
    forward, backward = (products_of_size(jax.make_jaxpr(f)(lora).jaxpr, sizes) for f in (loss, jax.grad(loss)))
    assert forward == backward == 0  # no product has the shape of a weight
    other = jax.grad(lambda kernel: ((jax.nn.relu(X @ kernel)) ** 2).mean())
    assert products_of_size(jax.make_jaxpr(other)(jnp.ones((128, 128))).jaxpr, sizes) == 1  # as it would be


def in_bytes(packed: Any) -> None:
    """4 bits, 8 for each group of 64, and a scale and an offset of 32 for each 256 of these (or a shorter row)."""
    q = packed.rest[0].kernel[...]
    scales = 128 * 128 // 64
    assert q.nbytes == 128 * 128 // 2 + scales + sum(leaf.nbytes for leaf in q.scale[1:])
    wide: Any = nnx.Linear(16384, 2, use_bias=False, rngs=nnx.Rngs(0))
    big = jc.nn.quantize(wide, Rule(weight=DOUBLE), "ptq").kernel[...]
    assert big.bits_per_element == 4 + 8 / 64 + 64 / (64 * 256)


@further
@pytest.mark.parametrize("init", ["loftq", pytest.param("pissa", marks=pytest.mark.slow)])
def best_approximations(model: Any, packed: Any, init: str) -> None:
    rule = LoraRule("up", rank=5, alpha=2.5, init=init)
    layer = add_lora(packed, rule, rngs=nnx.Rngs(1), original=model).up
    w = np.asarray(model.up.kernel[...], np.float64)
    product = 0.5 * np.asarray(layer.lora_a[...], np.float64) @ np.asarray(layer.lora_b[...], np.float64)
    held = np.asarray(jc.dequantize(layer.base.kernel[...]), np.float64)
    if init == "loftq":
        np.testing.assert_array_equal(held, jc.dequantize(packed.up.kernel[...]))
        tail = np.linalg.svd(w - held, compute_uv=False)[5:]
        assert np.linalg.norm(w - held - product) == pytest.approx(np.linalg.norm(tail), rel=1e-5)
        assert np.linalg.norm(tail) < np.linalg.norm(w - held)
    else:
        tail = np.linalg.svd(w, compute_uv=False)[5:]
        assert np.linalg.norm(w - product) == pytest.approx(np.linalg.norm(tail), rel=1e-5)
        assert layer.base.kernel[...].spec == packed.up.kernel[...].spec
        wanted = jc.quantize(jnp.asarray((w - product).T, jnp.float32), DOUBLE)
        np.testing.assert_allclose(held, np.asarray(jc.dequantize(wanted)).T, atol=np.abs(w).max() / 8)
        assert np.linalg.norm(w - product - held) < np.linalg.norm(w - np.asarray(jc.dequantize(packed.up.kernel[...])))


def test_merge_and_split(model: Any, packed: Any) -> None:
    for base in (model, packed):
        adapted = noised(add_lora(base, LoraRule("*", rank=3, alpha=6), rngs=nnx.Rngs(1)))
        merged = merge_lora(adapted)
        assert type(merged.up) is nnx.Linear and merged.again is merged.rest[0]
        np.testing.assert_allclose(merged(X), adapted(X), rtol=1e-4, atol=1e-5)
        w = np.asarray(jc.nn.merge_lora(adapted).up.kernel[...], np.float64)
        held = adapted.up.base.kernel[...]
        held = np.asarray(jc.dequantize(held) if isinstance(held, jc.QArray) else held, np.float64)
        exact = held + 2.0 * np.asarray(adapted.up.lora_a[...], np.float64) @ np.asarray(
            adapted.up.lora_b[...], np.float64
        )
        np.testing.assert_allclose(w, exact, rtol=0, atol=2**-23 * np.abs(exact).max() * 4)
        plain, adapters = split_lora(adapted)
        np.testing.assert_array_equal(plain(X), base(X))
        assert sorted(adapters) == ["again", "up"]
    again = merge_lora(noised(add_lora(packed, LoraRule("up", rank=3), rngs=nnx.Rngs(1))), requantize=True)
    assert again.up.kernel[...].spec == packed.up.kernel[...].spec
    with pytest.raises(ValueError, match="has no adapters"):
        merge_lora(again)


def in_files(packed: Any, tmp_path: Path) -> None:
    rules = [LoraRule("up", rank=4, alpha=8), LoraRule("*", rank=2)]
    adapted = noised(add_lora(packed, rules, rngs=nnx.Rngs(1)))
    base = tmp_path / "base.safetensors"
    jc.save(base, packed)
    before = hashlib.sha256(base.read_bytes()).hexdigest()
    save_lora(tmp_path / "adapter", adapted)
    tensors = jc.load(tmp_path / "adapter/adapter_model.safetensors")
    assert tensors["base_model.model.up.lora_A.weight"].shape == (4, 128) and len(tensors) == 4
    assert tensors["base_model.model.up.lora_B.weight"].shape == (128, 4)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], len(config["target_modules"])) == ("LORA", 2)
    assert {config["r"], *config["rank_pattern"].values()} == {2, 4}
    again = load_lora(tmp_path / "adapter", packed)
    np.testing.assert_array_equal(again(X), adapted(X))
    assert hashlib.sha256(base.read_bytes()).hexdigest() == before
    with pytest.raises(ValueError, match="no linear layer of the model"):
        load_lora(tmp_path / "adapter", nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ValueError, match="not of plain LoRA"):
        load_lora(tmp_path / "adapter", packed)


@pytest.mark.parametrize(
    "check", [in_files, pytest.param(in_bytes, marks=pytest.mark.slow)], ids=lambda check: check.__name__
)
def test_files_and_their_size(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


class Small(nnx.Module):
    """Four layers, two of them of one name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.gate_up = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2))
        self.layers = nnx.List([nnx.Dict({name: nnx.Linear(8, 8, rngs=rngs) for name in ("up", "q_proj")})])


SMALL = ("up", "gate_up", "layers/0/up", "layers/0/q_proj")


def written(folder: Path, ranks: Any, **fields: Any) -> Path:
    """A folder as PEFT writes it, with adapters of `Small`."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for path, rank in zip(SMALL, ranks, strict=True):
        name = "base_model.model." + path.replace("/", ".")
        tensors |= {
            f"{name}.lora_A.weight": np.ones((rank, 8), "f4"),
            f"{name}.lora_B.weight": np.ones((8, rank), "f4"),
        }
    jc.save(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True, "bias": "none"} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def factors(folder: Path) -> list[float]:
    adapters = split_lora(load_lora(folder, Small(nnx.Rngs(0))))[1]
    return [adapters[path]["rule"].factor for path in SMALL]


@each(
    "wanted, ranks, fields",
    [  # the factors of PEFT 0.21 (`get_pattern_key`, and the scaling of its layers)
        ([2, 2, 2, 16], [4, 4, 4, 4], {"alpha_pattern": {"q_proj": 64}}),
        ([1, 2, 1, 2], [4, 4, 4, 4], {"alpha_pattern": {"up": 4}}),
        ([1, 2, 2, 2], [4, 4, 4, 4], {"alpha_pattern": {"^up": 4}}),
        ([4, 4, 1, 4], [4, 4, 4, 4], {"alpha_pattern": {"layers.0.up": 4, ".*": 16}}),
        ([4, 2, 4, 3], [4, 4, 4, 4], {"alpha_pattern": {r"(layers\.\d+\.)?up": 16, "[a-q]_pro(j|k)": 12}}),
        ([2, 8, 2, 2], [4, 1, 4, 4], {"rank_pattern": {"(?!layers).*gate_up": 1}}),
        ([8, 8, 8, 4], [1, 1, 1, 2], {"rank_pattern": {"q_proj": 2}, "r": 1}),
        ([4, 4, 4, 8 / 3], [4, 4, 4, 9], {"use_rslora": True, "rank_pattern": {"q_proj": 9}}),
        ([4, 4, 4, 32], [4, 4, 4, 4], {"use_rslora": True, "alpha_pattern": {"q_proj": 64}}),
        ([2, 2, 2, 2], [4, 4, 4, 4], {"init_lora_weights": "gaussian", "target_modules": ["up"]}),
    ],
)  # fmt: skip
def test_ranks_and_alphas_of_a_file_of_peft(wanted: Any, ranks: Any, fields: Any, tmp_path: Path) -> None:
    """A key is a regular expression of the end of a path; what is written again is for PEFT the same."""
    folder = written(tmp_path / "peft", ranks, **fields)
    np.testing.assert_allclose(factors(folder), wanted, rtol=1e-15)
    save_lora(tmp_path / "own", load_lora(folder, Small(nnx.Rngs(0))))
    config = json.loads((tmp_path / "own/adapter_config.json").read_text())
    for path, factor, rank in zip(SMALL, wanted, ranks, strict=True):
        found = []
        for field in ("rank", "alpha"):
            keys = [key for key in config[f"{field}_pattern"] if re.match(rf"(.*\.)?({key})$", path.replace("/", "."))]
            assert len(keys) < 2
            found.append(
                config[f"{field}_pattern"][keys[0]] if keys else config[{"rank": "r"}.get(field, "lora_alpha")]
            )
        assert found[0] == rank and found[1] / found[0] == pytest.approx(factor, rel=1e-15)


class Chain(linen.Module):
    """Layers of Linen with given names, each with those in it."""

    parts: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for name, parts in self.parts:
            x = (Chain(parts, name=name) if parts else linen.Dense(8, use_bias=False, name=name))(x)
        return x


def test_patterns_of_a_file_of_peft_in_other_faces(tmp_path: Path) -> None:
    """Modules of Linen and parameters of a function get the same factors."""
    folder, w, x = written(tmp_path / "peft", [4] * 4, alpha_pattern={"q_proj": 64}), jnp.ones((8, 8)), jnp.ones((1, 8))
    products = lambda p, x: x @ p["up"] @ p["gate_up"] @ p["layers"][0]["up"] @ p["layers"][0]["q_proj"]  # noqa: E731
    run = jc.quantize_fn(products, Rule(weight="int8"))
    params = {"up": w, "gate_up": w, "layers": [{"up": w, "q_proj": w}]}
    found = split_lora(load_lora(folder, params, fun=run, inputs=(x,)))[1]
    assert [found[path]["rule"].factor for path in SMALL] == [2, 2, 2, 16]
    inner = ("0", (("up", ()), ("q_proj", ())))
    low = jc.nn.quantize(Chain((("up", ()), ("gate_up", ()), ("layers", (inner,)))), Rule(weight="int8"))
    variables = low.init(jax.random.key(0), x)
    found = split_lora(load_lora(folder, variables, fun=low, inputs=(x,)))[1]
    assert [found[path]["rule"].factor for path in SMALL] == [2, 2, 2, 16]


@each(
    "said, fields",
    [
        ("init_lora_weights='pissa', which changes the base", {"init_lora_weights": "pissa"}),
        ("init_lora_weights='pissa_niter_16'", {"init_lora_weights": "pissa_niter_16"}),
        ("init_lora_weights='OLoRA'", {"init_lora_weights": "OLoRA"}),
        ("init_lora_weights='corda'", {"init_lora_weights": "corda", "corda_config": {"corda_method": "ipm"}}),
        ("init_lora_weights='loftq'", {"init_lora_weights": "loftq"}),
        ("init_lora_weights='lora_ga'", {"init_lora_weights": "lora_ga"}),
        ("init_lora_weights='new'", {"init_lora_weights": "new"}),
        ("use_dora=True; merge the adapters in PEFT", {"use_dora": True}),
        ("lora_bias=True", {"lora_bias": True}),
        (r"modules_to_save=\['up'\]", {"modules_to_save": ["up"]}),
        ("bias='all'", {"bias": "all"}),
        ("alora_invocation_tokens", {"alora_invocation_tokens": [1]}),
        ("use_something_new=True", {"use_something_new": True}),
        ("the rank of 'gate_up' is 2, and A of it has 4", {"rank_pattern": {"gate_up": 2}}),
        ("no regular expression", {"alpha_pattern": {"(up": 2}}),
        (r"alpha_pattern=\['up'\] is no object", {"alpha_pattern": ["up"]}),
        ("alpha of 'gate_up' is null", {"lora_alpha": None}),
        ("alpha=int must be a finite number > 0", {"lora_alpha": 10**400}),
        ("too large", {"lora_alpha": 10**400, "use_rslora": True}),
        ("takes too long to match", {"alpha_pattern": {"(u+)+!": 2}}),
        ("takes too long to match", {"alpha_pattern": {"(u|u)(?#)*!": 2}}),
        ("takes too long to match", {"alpha_pattern": {"(u|u)" * 40: 2}}),
        ("takes too long to match", {"alpha_pattern": {".*" * 20 + "!": 2}}),
        ("takes too long to match", {"alpha_pattern": {f"{i}": 2 for i in range(20000)}}),
    ],
)
def test_files_of_peft_that_are_not_read(said: str, fields: Any, tmp_path: Path) -> None:
    """Whatever else PEFT computes, or changes in the base, is an error; so are patterns that take long."""
    with pytest.raises(ValueError, match=said):
        load_lora(written(tmp_path / "peft", [4] * 4, **fields), Small(nnx.Rngs(0)))


@further
@pytest.mark.parametrize("weight", [None, pytest.param("nf4", marks=pytest.mark.slow)])
def the_projections_of_attention(weight: str | None, tmp_path: Path) -> None:
    """They sum over one axis to two, and over two to one; A and B are matrices, as in PEFT."""
    plain: Any = nnx.MultiHeadAttention(4, 32, qkv_features=64, decode=False, rngs=nnx.Rngs(0))
    base = plain if weight is None else jc.nn.quantize(plain, Rule("{query,out}", weight=weight), "ptq")
    adapted = add_lora(base, LoraRule("{query,out}", rank=3, alpha=6), rngs=nnx.Rngs(1))
    x = np.random.default_rng(1).standard_normal((2, 5, 32)).astype(np.float32)
    np.testing.assert_array_equal(adapted(x), base(x))
    adapted = noised(adapted)
    unpacked, adapters = merge_lora(add_lora(base, LoraRule("*", rank=1), rngs=nnx.Rngs(0))), split_lora(adapted)[1]
    shapes = {path: (found["lora_a"].shape, found["lora_b"].shape) for path, found in adapters.items()}
    assert shapes == {"query": ((32, 3), (3, 64)), "out": ((64, 3), (3, 32))}
    wanted = nnx.merge(*nnx.split(unpacked), copy=True)
    for path, found in adapters.items():
        kernel = getattr(wanted, path).kernel
        a, b = (np.asarray(found[name], np.float64) for name in ("lora_a", "lora_b"))
        kernel[...] = jnp.asarray(np.asarray(kernel[...], np.float64) + 2 * (a @ b).reshape(kernel.shape), jnp.float32)
    np.testing.assert_allclose(adapted(x), wanted(x), rtol=1e-4, atol=1e-5)
    merged = merge_lora(adapted)
    assert type(merged.query) is nnx.LinearGeneral
    np.testing.assert_allclose(merged(x), wanted(x), rtol=1e-4, atol=1e-5)
    again = merge_lora(adapted, requantize=True).out.kernel[...]
    assert weight is None or again.spec == base.out.kernel[...].spec
    save_lora(tmp_path, adapted)
    tensors = jc.load(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.query.lora_B.weight"].shape == (64, 3)
    np.testing.assert_array_equal(load_lora(tmp_path, base)(x), adapted(x))
    best = add_lora(base, LoraRule("out", rank=32, init="pissa"), rngs=nnx.Rngs(1), original=plain)
    np.testing.assert_allclose(best(x), (base if weight is None else merge_lora(best))(x), rtol=1e-3, atol=1e-4)


def a_model_that_is_the_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    model: Any = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    adapted = noised(add_lora(model, LoraRule("*", rank=2), rngs=nnx.Rngs(1)))
    save_lora(tmp_path, adapted)
    np.testing.assert_array_equal(load_lora(tmp_path, model)(np.eye(8)), adapted(np.eye(8)))


@further
def a_general_layer_sums_over_its_own_axes() -> None:
    layer: Any = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), use_bias=False, rngs=nnx.Rngs(0))
    adapted = noised(add_lora(layer, LoraRule("*", rank=2), rngs=nnx.Rngs(1)))
    x = np.random.default_rng(1).standard_normal((7, 2, 6, 3))
    a, b = np.asarray(adapted.lora_a[...]).reshape(2, 3, 2), np.asarray(adapted.lora_b[...]).reshape(2, 4, 5)
    kernel = np.asarray(layer.kernel[...]) + np.einsum("ijr,rkl->ijkl", a, b)
    np.testing.assert_allclose(adapted(x), np.einsum("bisj,ijkl->bskl", x, kernel), rtol=1e-4, atol=1e-5)
    layer = nnx.LinearGeneral((3, 3), 8, axis=(2, 0), rngs=nnx.Rngs(0))  # Flax sums over them in ascending order
    adapted = noised(add_lora(layer, LoraRule("*", rank=2), rngs=nnx.Rngs(1)))
    x, merged = np.random.default_rng(1).standard_normal((3, 3, 3)), merge_lora(adapted)
    np.testing.assert_allclose(adapted(x), merged(x), rtol=1e-4, atol=1e-5)
    batched = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"LinearGeneral \(without batch_axis\); exclude it"):
        add_lora(batched, LoraRule("*", rank=2), rngs=nnx.Rngs(1))


class Stack(nnx.Module):
    def __init__(self) -> None:
        make = lambda key: nnx.LinearGeneral((2, 8), (2, 8), axis=(-2, -1), rngs=nnx.Rngs(key))  # noqa: E731
        self.blocks = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x: Any) -> Any:
        scanned = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scanned(x, self.blocks)


@pytest.mark.parametrize("weight", ["int4(group=4)", pytest.param(None, marks=pytest.mark.slow)])
def test_a_stack_has_an_adapter_for_each_layer(weight: str | None, tmp_path: Path) -> None:
    plain: Any = Stack()
    model: Any = plain if weight is None else jc.nn.quantize(plain, Rule(weight=weight), "ptq")
    x = np.random.default_rng(2).standard_normal((5, 2, 8)).astype(np.float32)
    adapted = noised(add_lora(model, LoraRule("blocks", rank=2, alpha=4), rngs=nnx.Rngs(1)))
    a, b = (np.asarray(p[...], np.float64) for p in (adapted.blocks.lora_a, adapted.blocks.lora_b))
    assert (a.shape, b.shape) == ((3, 16, 2), (3, 2, 16)) and (a[0] != a[1]).any()
    kernel, bias = plain.blocks.kernel[...], np.asarray(plain.blocks.bias[...])
    if weight is not None:  # (3, 2, 8, 2, 8), the axes of inputs first
        kernel = jax.vmap(lambda w: jc.round_to_format(w.reshape(16, 16).T, weight).T.reshape(w.shape))(kernel)
    merged = np.asarray(kernel, np.float64) + 2 * np.einsum("lir,lro->lio", a, b).reshape(kernel.shape)
    wanted = np.asarray(x, np.float64)
    for w, offset in zip(merged, bias, strict=True):
        wanted = wanted + np.einsum("nij,ijkl->nkl", wanted, w) + offset
    np.testing.assert_allclose(adapted(x), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(merge_lora(adapted).blocks.kernel[...], merged, rtol=1e-5, atol=1e-6)
    again, adapters = split_lora(adapted)
    np.testing.assert_array_equal(again(x), model(x))
    assert adapters["blocks"]["lora_a"].shape == (3, 16, 2)
    with pytest.raises(ValueError, match="is one of a stack"):
        save_lora(tmp_path, adapted)
    save_lora(
        tmp_path,
        add_lora(nnx.Dict(blocks=nnx.Linear(16, 16, rngs=nnx.Rngs(0))), LoraRule("*", rank=2), rngs=nnx.Rngs(1)),
    )
    with pytest.raises(ValueError, match="'blocks' is a stack, which a file of PEFT has not"):
        load_lora(tmp_path, model)


def test_a_stack_begins_with_the_best_approximations_and_has_dropout() -> None:
    plain, rate = Stack(), 0.5
    model = jc.nn.quantize(plain, Rule(weight="int4(group=4)"), "ptq")
    rule = LoraRule("*", rank=2, init="loftq", dropout=rate)
    adapted: Any = add_lora(model, rule, rngs=nnx.Rngs(params=1, dropout=2), original=plain)
    alone: Any = add_lora(model, LoraRule("*", rank=16, init="loftq"), rngs=nnx.Rngs(1), original=plain)
    np.testing.assert_allclose(merge_lora(alone).blocks.kernel[...], plain.blocks.kernel[...], atol=1e-5)
    x = jnp.ones((4, 2, 8))
    first, second = adapted(x), adapted(x)
    assert (first != second).any()
    adapted.eval()
    np.testing.assert_array_equal(adapted(x), adapted(x))
    np.testing.assert_allclose(adapted(x), merge_lora(adapted)(x), rtol=1e-4, atol=1e-5)


def training_with_8_bit_moments(packed: Any) -> None:
    adapted = add_lora(packed, LoraRule("*", rank=2), rngs=nnx.Rngs(1))
    codes = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(adapted, jc.nn.QuantizedParam))]
    optimizer = nnx.Optimizer(adapted, jc.optim.adamw8bit(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, gradient = nnx.value_and_grad(
            lambda m: ((m(X) - 1) ** 2).mean(), argnums=nnx.DiffState(0, nnx.LoRAParam)
        )(model)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(adapted, optimizer)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, codes, jax.tree.leaves(nnx.state(adapted, jc.nn.QuantizedParam)))


@pytest.mark.parametrize(
    "check",
    [
        a_model_that_is_the_layer_is_saved_and_loaded,
        pytest.param(first_output_and_gradients, marks=pytest.mark.slow),
        pytest.param(training_with_8_bit_moments, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_adapters_in_use(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@further.first
def errors(model: Any, packed: Any) -> None:
    for said, rules, more in (
        ("matches no linear layer", LoraRule("down", rank=2), {}),
        ("needs original=", LoraRule("up", rank=2, init="loftq"), {}),
        ("rank is above the sizes", LoraRule("up", rank=129, init="loftq"), {"original": model}),
    ):
        with pytest.raises(ValueError, match=said):
            add_lora(packed, rules, rngs=nnx.Rngs(0), **more)
    conv = nnx.Sequential(nnx.Conv(3, 4, (2, 2), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'layers/0'.*it is of a Conv, and adapters are for flax.nnx.Linear"):
        add_lora(conv, LoraRule("*", rank=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rank=0"):
        LoraRule("up", rank=0)
    with pytest.raises(ValueError, match=r"dropout=1\.0 must be a finite number >= 0"):
        LoraRule("up", rank=1, dropout=1.0)
    with pytest.raises(ValueError, match="init='x' must be one of"):
        LoraRule("up", rank=1, init="x")
    with pytest.raises(TypeError, match="rngs=None must be"):
        add_lora(packed, LoraRule("up", rank=1), rngs=None)  # type: ignore[arg-type]


test_further = further.test()
