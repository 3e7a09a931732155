"""Models of NNX in checkpoints: names, orientations, packed layers, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_references import checked, each

import jchop as jc
from jchop import Rule, load_checkpoint, save_checkpoint
from jchop.nn import LoraRule

INT4 = "int4(group=16,scale=float16)"
TOKENS = np.arange(6)


class Net(nnx.Module):
    """An embedding that is the head, too, a layer at two paths, a norm, and a parameter of its own."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.embed = nnx.Embed(16, 32, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, param_dtype=dtype, rngs=rngs)])
        self.again = self.layers[0]
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.gain = nnx.Param(jnp.linspace(1, 2, 3 * 32).reshape(3, 32))

    def __call__(self, x: Any) -> Any:
        x = self.norm(self.again(self.layers[0](self.embed(x)))) * self.gain[...].sum(0)
        return self.embed.attend(x)


@pytest.fixture(scope="module")
def model() -> Any:
    return Net(nnx.Rngs(0))


def like() -> Any:
    return nnx.eval_shape(lambda: Net(nnx.Rngs(0)))


def names_and_axes_are_those_of_other_programs(model: Any, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", model, "plain", config={"model_type": "net"})
    tensors = jc.load_checkpoint(tmp_path / "plain")
    kernel, bias = model.layers[0].kernel[...], model.layers[0].bias
    wanted = {
        "embed.weight": model.embed.embedding[...], "again.weight": kernel.T, "again.bias": bias[...],
        "norm.weight": model.norm.scale[...], "gain": model.gain[...],
    }  # fmt: skip
    assert sorted(tensors) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(tensors[name], value)
    loaded = load_checkpoint(tmp_path / "plain", like=like())
    assert type(loaded.again) is nnx.Linear and loaded.again is loaded.layers[0]
    np.testing.assert_array_equal(loaded(TOKENS), model(TOKENS))
    # A file may have any path of a layer, other names, and more than the model needs.
    renamed = {name.replace("again", "layers.0"): value for name, value in tensors.items()} | {"freq": jnp.ones(3)}
    jc.save_checkpoint(tmp_path / "m", {f"m.{k}": v for k, v in renamed.items()}, "plain")
    other = load_checkpoint(tmp_path / "m", like=like(), names=lambda name: f"m.{name}", skip="freq")
    np.testing.assert_array_equal(other(TOKENS), model(TOKENS))


def every_parameter_of_a_layer_may_be_packed(model: Any, tmp_path: Path) -> None:
    """Also if scales have groups, too."""
    double = "nf4(group=16,scale=uint8(group=256,zero_point=float))"
    rules = [Rule("norm", weight="bfloat16"), Rule("again", weight=double, bias="bfloat16")]
    packed = jc.nn.quantize(model, [*rules, Rule("embed", weight="int8(group=all)")], "ptq")
    save_checkpoint(tmp_path / "own", packed, "jchop")
    loaded = load_checkpoint(tmp_path / "own", like=like())
    np.testing.assert_array_equal(loaded(TOKENS), packed(TOKENS))
    assert isinstance(loaded.again.bias, jc.nn.QuantizedParam) and isinstance(loaded.norm.scale, jc.nn.QuantizedParam)


class Projection(nnx.Module):
    """A product of its own, over the first of three axes, and a layer of Flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Param(nnx.initializers.normal()(rngs.params(), (64, 4, 16)))
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jnp.einsum("bd,dhk->bhk", x, self.query[...]).reshape(-1, 64))


@pytest.mark.parametrize("mode", ["qat", "ptq", "weight_only"])
@pytest.mark.parametrize("traced", [True, False], ids=["program", "layers"])
def test_abstract_models_are_quantized_then_loaded(traced: bool, mode: Any, tmp_path: Path) -> None:
    def make() -> Any:
        return Projection(nnx.Rngs(0)) if traced else nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))

    x, rule = jnp.linspace(-1, 1, 128).reshape(2, 64), "int4(group=32)"
    inputs = (jax.ShapeDtypeStruct(x.shape, x.dtype),) if traced else None
    model = jc.nn.quantize(make(), rule, mode, inputs=inputs)
    save_checkpoint(tmp_path, model, "jchop")
    abstract = jc.nn.quantize(nnx.eval_shape(make), rule, mode, inputs=inputs)
    shapes, given = ([v.shape for v in jax.tree.leaves(nnx.state(one))] for one in (abstract, model))
    assert shapes == given
    np.testing.assert_array_equal(load_checkpoint(tmp_path, like=abstract)(x), model(x))
    if mode == "ptq":
        other = jc.nn.quantize(nnx.eval_shape(make), "int4(group=16)", mode, inputs=inputs)
        with pytest.raises(ValueError, match=r"in the checkpoint, and .*group=16.* in like"):
            load_checkpoint(tmp_path, like=other)


def test_nan_comes_back(tmp_path: Path) -> None:
    def model() -> Any:
        return nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))

    plain = model()
    plain.layers[0].bias[...] = jnp.asarray([1.0, jnp.nan, -2.0])
    save_checkpoint(tmp_path, plain, "plain")
    loaded = load_checkpoint(tmp_path, like=nnx.eval_shape(model))
    np.testing.assert_array_equal(loaded.layers[0].bias[...], [1.0, np.nan, -2.0])


def test_trees_and_modules_of_equinox_are_filled(tmp_path: Path) -> None:
    q = jc.quantize(jnp.linspace(-1, 1, 256).reshape(8, 32), INT4)
    save_checkpoint(
        tmp_path / "t", {"up": {"weight": q}, "bias": jnp.ones(8), "more": jnp.ones(1)}, "compressed-tensors"
    )
    where = NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), P("x", None))
    tree = {"up": [jax.ShapeDtypeStruct((8, 32), jnp.bfloat16, sharding=where)], "bias": np.zeros(8, np.float16)}
    names = {"up.0": "up.weight", "bias": "bias"}
    filled = load_checkpoint(tmp_path / "t", like=tree, names=names.__getitem__, skip="more")
    np.testing.assert_array_equal(jc.dequantize(filled["up"][0], "float32"), jc.dequantize(q))
    assert (filled["up"][0].dtype, filled["bias"].dtype) == (jnp.bfloat16, jnp.float16)
    assert filled["up"][0].qvalue.sharding == where
    for wrong, said in (({"up": {"weight": q}}, "no parameter for 'bias'"), ({"low": q}, "has no 'low'")):
        with pytest.raises(ValueError, match=said):
            load_checkpoint(tmp_path / "t", like=wrong, skip="more")
    eqx = pytest.importorskip("equinox")
    make = lambda seed: eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(seed))  # noqa: E731
    save_checkpoint(tmp_path / "e", make(0), "plain")
    assert load_checkpoint(tmp_path / "e")["layers.0.weight"].shape == (8, 4)
    loaded = load_checkpoint(tmp_path / "e", like=eqx.filter_eval_shape(make, 1))
    np.testing.assert_array_equal(loaded(jnp.ones(4)), make(0)(jnp.ones(4)))


def test_numbers_beyond_the_range_of_the_model_are_refused(tmp_path: Path) -> None:
    """With that error alone, and no warning of an overflow."""
    tensors = {"layers.0.weight": jnp.eye(2), "layers.0.bias": jnp.asarray([1e6, 0.0])}
    jc.save_checkpoint(tmp_path, tensors, "plain")
    half = nnx.Sequential(nnx.Linear(2, 2, param_dtype=jnp.float16, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' in float32 has numbers that float16"):
        load_checkpoint(tmp_path, like=half)


def a_model_that_was_rounded_with_data(model: Any, tmp_path: Path) -> None:
    rounded = jc.nn.quantize(model, Rule("again", weight=INT4), "ptq", batches=[TOKENS])
    save_checkpoint(tmp_path / "gptq", rounded, "compressed-tensors")
    loaded = load_checkpoint(tmp_path / "gptq", like=like())
    np.testing.assert_array_equal(jc.dequantize(loaded.again.kernel[...]), jc.dequantize(rounded.again.kernel[...]))


def refusals(model: Any, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", model, "plain")
    conv = nnx.Sequential(nnx.Conv(3, 4, (2, 2), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"Conv at 'layers/0': kernel of shape \[2, 2, 3, 4\] has no form"):
        save_checkpoint(tmp_path / "conv", conv, "plain")
    with pytest.raises(ValueError, match="model has adapters"):
        save_checkpoint(tmp_path / "a", jc.nn.add_lora(model, LoraRule("again", rank=2), rngs=nnx.Rngs(0)), "plain")
    with pytest.raises(ValueError, match="names gives 'x' to two"):
        save_checkpoint(tmp_path / "x", model, "plain", names=lambda name: "x")
    with pytest.raises(TypeError, match="a NoneType is no container of arrays"):
        save_checkpoint(tmp_path / "x", None, "plain")  # type: ignore[arg-type]
    wide = nnx.Sequential(nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"has no 'layers\.0\.bias', and 2 are missing"):
        load_checkpoint(tmp_path / "plain", like=wide)
    names = {"layers.0.bias": "again.bias", "layers.0.kernel": "", "layers.0.weight": "again.weight"}
    with pytest.raises(ValueError, match=r"no parameter for 'embed\.weight' and 2 more"):
        load_checkpoint(tmp_path / "plain", like=wide, names=names.__getitem__)
    with pytest.raises(ValueError, match=r"'again\.bias' has shape \[32\], and the model has \[8\] for it"):
        load_checkpoint(tmp_path / "plain", like=wide, names=names.__getitem__, skip="{embed,norm,gain}")
    with pytest.raises(ValueError, match=r"in float32 has numbers that bfloat16 .* param_dtype=float32"):
        load_checkpoint(tmp_path / "plain", like=Net(nnx.Rngs(0), jnp.bfloat16))
    tree = jc.load_checkpoint(tmp_path / "plain")
    tree["gain"] = jc.quantize(tree["gain"], "int8(group=all)")
    jc.save_checkpoint(tmp_path / "own", tree, "jchop")
    gain = load_checkpoint(tmp_path / "own", like=like()).gain[...]  # of a module of your own
    np.testing.assert_array_equal(jc.dequantize(gain), jc.dequantize(tree["gain"]))
    for options in ({"like": like(), "strict": False}, {"names": str.lower}):
        with pytest.raises(ValueError, match="has no effect"):
            load_checkpoint(tmp_path / "plain", **options)  # type: ignore[arg-type]


@each("layout", ["jchop", "compressed-tensors", "gptq", "awq"])
def packed_layers_stay_packed(model: Any, layout: str, tmp_path: Path) -> None:
    packed = jc.nn.quantize(model, Rule("layers", weight=INT4), "ptq")
    save_checkpoint(tmp_path / layout, packed, layout)
    stored = jc.load_checkpoint(tmp_path / layout)["again.weight"]
    assert str(stored.spec) == "int4(group=16,scale=binary16)"  # groups along the inputs, the last axis
    np.testing.assert_array_equal(jc.dequantize(stored), jc.dequantize(packed.again.kernel[...]).T)
    loaded = load_checkpoint(tmp_path / layout, like=like())
    assert isinstance(loaded.again.kernel, jc.nn.QuantizedParam) and loaded.again is loaded.layers[0]
    np.testing.assert_array_equal(loaded(TOKENS), packed(TOKENS))
    adapted = jc.nn.add_lora(loaded, LoraRule("layers", rank=2), rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(adapted(TOKENS), packed(TOKENS))
    merged = jc.nn.merge_lora(adapted, requantize=True)  # the spec of the file is its rule
    np.testing.assert_array_equal(jc.dequantize(merged.again.kernel[...]), jc.dequantize(packed.again.kernel[...]))


@pytest.mark.parametrize(
    "check",
    [
        names_and_axes_are_those_of_other_programs,
        pytest.param(packed_layers_stay_packed, marks=pytest.mark.slow),
        pytest.param(refusals, marks=pytest.mark.slow),
        pytest.param(every_parameter_of_a_layer_may_be_packed, marks=pytest.mark.slow),
        pytest.param(a_model_that_was_rounded_with_data, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def test_models_come_back(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@pytest.mark.parametrize("layout", ["plain", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
@pytest.mark.parametrize("abstract", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four (forced host) devices")
def test_arrays_land_where_those_of_like_lie(layout: str, abstract: bool, tmp_path: Path) -> None:
    def make() -> Any:
        return nnx.Sequential(nnx.Linear(32, 8, rngs=nnx.Rngs(0)))

    model = make()
    wanted = make() if layout == "plain" else jc.nn.quantize(model, Rule(weight=INT4), "ptq")
    save_checkpoint(tmp_path / "model", wanted, layout)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    where = NamedSharding(mesh, P("x", "y"))
    kernel = jax.device_put(model.layers[0].kernel[...], where)
    model.layers[0].kernel.set_value(
        jax.ShapeDtypeStruct((32, 8), kernel.dtype, sharding=where) if abstract else kernel
    )
    loaded = load_checkpoint(tmp_path / "model", like=model)
    for leaf in jax.tree.leaves(loaded.layers[0].kernel.get_value()):
        assert leaf.sharding.is_equivalent_to(where, 2)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (loaded, wanted)))


class Heads(nnx.Module):
    """Kernels of more than two axes, and biases of two."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn = nnx.MultiHeadAttention(
            num_heads=2, in_features=32, qkv_features=64, normalize_qk=True, decode=False,
            bias_init=nnx.initializers.normal(), rngs=rngs,
        )  # fmt: skip
        self.split = nnx.Einsum("...i,ioh->...oh", (32, 2, 32), (2, 32), rngs=rngs)
        self.join = nnx.LinearGeneral((2, 32), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.join(self.split(self.attn(x)))


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("plain", None),
        ("compressed-tensors", "int4(group=16)"),
        pytest.param("compressed-tensors", "int8(channel=0)", marks=pytest.mark.slow),
        pytest.param("compressed-tensors", "float8_e4m3fn(group=all)", marks=pytest.mark.slow),
        pytest.param("gptq", "int4(group=32,scale=float16)", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_several_axes_are_matrices(layout: str, spec: str | None, tmp_path: Path) -> None:
    """All axes of outputs and all of inputs are one each, and attention has the names of Hugging Face."""
    model, x = Heads(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 3, 32))
    packed = model if spec is None else jc.nn.quantize(model, Rule("*", weight=spec), mode="ptq")
    save_checkpoint(tmp_path / "m", packed, layout)
    tree = load_checkpoint(tmp_path / "m")
    assert {name for name in tree if name.startswith("attn.")} == {
        *(f"attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")),
        "attn.q_norm.weight", "attn.k_norm.weight",
    }  # fmt: skip
    matrices = {
        name: np.asarray(jc.dequantize(value) if spec else value) for name, value in tree.items() if value.ndim > 1
    }
    assert matrices["attn.q_proj.weight"].shape == (64, 32) and matrices["attn.o_proj.weight"].shape == (32, 64)
    inputs = np.asarray(x[0])
    for layer, name in ((packed.attn.query, "attn.q_proj"), (packed.split, "split")):
        y = inputs @ matrices[f"{name}.weight"].T + np.asarray(tree[f"{name}.bias"])
        np.testing.assert_allclose(layer(jnp.asarray(inputs)), y.reshape(3, 2, 32), atol=1e-5)
    y = inputs.repeat(2, 1) @ matrices["join.weight"].T
    np.testing.assert_allclose(packed.join(jnp.asarray(inputs.repeat(2, 1).reshape(3, 2, 32))), y, atol=1e-5)
    loaded = load_checkpoint(tmp_path / "m", like=nnx.eval_shape(lambda: Heads(nnx.Rngs(0))))
    np.testing.assert_allclose(loaded(x), packed(x), atol=1e-6)  # sums may have another order
    save_checkpoint(tmp_path / "again", loaded, layout)
    again = load_checkpoint(tmp_path / "again")
    for name, value in tree.items():
        found, wanted = (jc.dequantize(v) if isinstance(v, jc.QArray) else v for v in (again[name], value))
        np.testing.assert_array_equal(found, wanted, name)


def test_products_that_keep_an_axis_of_both_operands_have_no_matrix(tmp_path: Path) -> None:
    experts = nnx.Dict(experts=nnx.Einsum("bei,eio->beo", (3, 4, 5), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"Einsum at 'experts': kernel of shape \[3, 4, 5\] has no form"):
        save_checkpoint(tmp_path / "m", experts, "plain")


@pytest.mark.parametrize(
    ("weight", "activation", "wanted", "form"),
    [
        ("int8(channel=0)", "int8(group=all)", {"num_bits": 8, "type": "int", "strategy": "token"}, "int-quantized"),
        ("float8_e4m3fn(channel=0)", "e4m3fn(group=all)", {"type": "float", "strategy": "token"}, "float-quantized"),
        ("float8_e4m3fn(group=all)", "e4m3fn(group=tensor)", {"strategy": "tensor"}, "float-quantized"),
        ("mxfp8_e4m3", "mxfp8_e4m3", {"strategy": "group", "group_size": 32}, "mxfp8-quantized"),
        ("int4(group=16)", "int8(group=all)", {"num_bits": 8, "strategy": "token"}, "pack-quantized"),
        (
            "int4(group=16)",
            "e4m3fn(group=all)",
            {"num_bits": 8, "type": "float", "strategy": "token"},
            "pack-quantized",
        ),
        ("int8(channel=0)", "bfloat16", None, "pack-quantized"),
        ("int8(channel=0)", None, None, "pack-quantized"),
    ],
)
def test_inputs_of_a_rule_are_in_the_configuration(
    weight: str, activation: str | None, wanted: dict[str, Any] | None, form: str, tmp_path: Path
) -> None:
    model = nnx.Dict(up=nnx.Linear(32, 16, rngs=nnx.Rngs(0)))
    packed = jc.nn.quantize(model, Rule("*", weight=weight, activation=activation), mode="ptq")
    save_checkpoint(tmp_path / "m", packed, "compressed-tensors", config={"model_type": "x"})
    config = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["format"] == form and "input_activations" not in group["weights"]
    if wanted is None:
        assert group["input_activations"] is None
    else:
        assert group["input_activations"].items() >= ({"dynamic": True, "symmetric": True} | wanted).items()
    np.testing.assert_array_equal(
        jc.dequantize(load_checkpoint(tmp_path / "m")["up.weight"]), jc.dequantize(packed["up"].kernel[...]).T
    )
