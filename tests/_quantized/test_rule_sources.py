"""Rules of other libraries: configurations as they are in the wild, what they become, and the numbers of qwix."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from flax import nnx

import jchop as jc

INT8, E4M3 = "int8(group=all,rule=half_range)", "float8_e4m3fn(group=all)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule:
    """The fields of the rule of qwix for training, as an object."""

    module_path: str = ".*"
    op_names: tuple[str, ...] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: Any = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: tuple[int, ...] = (0,)
    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: Any = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: tuple[int, ...] = (0,)
    additional_qt_config: Any = None


def texts(rules: list[jc.Rule]) -> list[str]:
    return [str(rule).removeprefix("Rule(").removesuffix(")") for rule in rules]


MAXTEXT = {"module_path": "decoder/.*layers.*", "op_names": ("dot_general",)}
TUNIX = ".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj"
MAXTEXT_LORA = "decoder/layers/.*(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))"
FIXED = "e4m3(bias=8,infinities=false,nans=top):saturate:gradient=clipped"


@each(
    ("rules", "expected"),
    [
        # MaxText: its general rule, of one shard and of 256 rows, and its fp8_full with a static range
        (
            QtRule(**MAXTEXT, weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8,
                   bwd_weight_grad_tile_size=1 / 1),
            [f"'/decoder/**/*layers*', operation=dot_general, weight={INT8}, activation={INT8}, gradient={INT8}"],
        ),
        (
            [QtRule(**MAXTEXT, weight_qtype=jnp.int8, act_qtype="int8", bwd_qtype="int8",
                    bwd_weight_grad_tile_size=256)],
            [f"'/decoder/**/*layers*', operation=dot_general, weight={INT8}, activation={INT8}, gradient={INT8}, "
             "weight_gradient=int8(group=256,rule=half_range)"],
        ),
        (
            QtRule(op_names=("dot_general", "ragged_dot"), weight_qtype=jnp.float8_e4m3fn, act_qtype="float8_e4m3fn",
                   bwd_qtype=jnp.float8_e5m2, weight_calibration_method="fixed,-224,224",
                   act_calibration_method="fixed,224", additional_qt_config={"sparsity_rule": None}),
            ["'*', operation={dot_general,ragged_dot}, "
             f"weight={FIXED}, activation={FIXED}, gradient=float8_e5m2(group=all)"],
        ),
        (QtRule(weight_qtype="int8"),
         [f"'*', operation=!embedding, weight={INT8}, input_gradient=binary32, weight_gradient=binary32"]),
        # Tunix and MaxText: LoRA has nothing to round, QLoRA its weights
        ({"module_path": TUNIX, "rank": 16, "alpha": 2.0},
         ["'*q_einsum/ *kv_einsum/ *gate_proj/ *down_proj/ *up_proj/', operation=!embedding"]),
        ({"module_path": MAXTEXT_LORA, "rank": 16, "alpha": 2.0, "weight_qtype": "nf4", "tile_size": 256},
         ["'/decoder/layers/**/*self_attention/{query,key,value,out}/ /decoder/layers/**/*mlp/{wi_0,wi_1,wo}/', "
          "operation=!embedding, weight=nf4(group=256)"]),
        # tpu-inference: its YAML files and its own configurations
        ({"qwix": {"rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}]}},
         [f"'*', operation=!embedding, weight={E4M3}, activation={E4M3}"]),
        ([{"module_path": ".*attn.*", "weight_qtype": "int8"},
          {"module_path": ".*mlp.*", "weight_qtype": "int8", "act_qtype": "int8", "tile_size": None}],
         [f"'*attn*', operation=!embedding, weight={INT8}",
          f"'*mlp*', operation=!embedding, weight={INT8}, activation={INT8}"]),
        ({"qwix": {"use_abstract_model": True, "scale_dtype": "bfloat16", "rules": [
            {"module_path": ".*custom_module", "weight_qtype": "float4_e2m1fn", "act_qtype": None, "tile_size": 32}]}},
         ["'*custom_module/', operation=!embedding, weight=float4_e2m1fn(group=32,scale=bfloat16)"]),
        ({"module_path": "(?!.*head).*", "weight_qtype": "mxfp4", "tile_size": 32},
         ["'!*head*', operation=!embedding, weight=mxfp4(rule=rceil)"]),
        ({"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "disable_channelwise_axes": True,
          "bwd_stochastic_rounding": "low_bit_uniform"},
         ["'*', operation=!embedding, weight=int8(rule=half_range), activation=int8(rule=half_range), "
          "gradient=int8(rule=half_range):stochastic_b:random_bits=8"]),
    ],
)  # fmt: skip
def test_rules_of_qwix(rules: Any, expected: list[str]) -> None:
    assert texts(jc.Rule.from_qwix(rules)) == expected


@each(
    ("fields", "words"),
    [
        ({"module_path": "(a|b)+"}, r"module_path='\(a\|b\)\+' has no equal"),
        ({"op_names": ("dot_general", "gmm")}, "op_names='gmm'.*no kernels of Pallas"),
        ({"tile_size": 0.25}, r"tile_size=0.25.*give round\(0.25 \* size\)"),
        ({"weight_calibration_method": "absmax,0.8"}, r"nearest is 'int8\(group=all,rule=percentile\(99.9\)\)'"),
        ({"weight_calibration_method": "rms,7"}, r"method='rms,7'.*nearest is 'int8\(group=all,rule=mse\)'"),
        ({"weight_calibration_method": "fixed,-1,1"}, "nearest is 'fixed,-0.99609375,0.99609375'"),
        ({"weight_calibration_method": "fixed,-1,2"}, "fixed are powers of two"),
        ({"weight_qtype": "int6", "weight_calibration_method": "minmax"}, "int4 and int8 alone"),
        ({"weight_qtype": "bfloat16"}, "weight_qtype='bfloat16'.*floats of at most 8 bits"),
        ({"weight_qtype": "nvfp4"}, "needs tile_size=16"),
        ({"weight_qtype": None, "act_qtype": "int8"}, "nothing without a weight_qtype"),
        ({"act_qtype": "int8", "act_static_scale": True}, "nearest is Rule.*MovingAverage"),
        ({"bwd_qtype": "int8", "tile_size": 32}, "tile_size=32.*nearest is gradient='int8"),
        ({"bwd_qtype": "int8", "act_qtype": "int4", "bwd_weight_grad_tile_size": 8}, "the same act_qtype"),
        ({"bwd_qtype": "float8_e5m2", "bwd_stochastic_rounding": "uniform"}, ":stochastic'"),
        ({"disable_channelwise_axes": True, "tile_size": 8}, "leave one out"),
        ({"additional_qt_config": {"dlhs_grad_qtype": "int8"}}, "nearest are input_gradient="),
        ({"weight_qtpe": "int8"}, "weight_qtpe='int8' is no field.*close: weight_qtype"),
    ],
)
def test_what_rules_have_no_equal_for_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        jc.Rule.from_qwix({"weight_qtype": "int8", **fields})
    assert len(str(caught.value)) <= 240


# -- Hugging Face ------------------------------------------------------------------------------------------------------

INT4_ARGUMENTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
                  "dynamic": False, "observer": "minmax", "block_structure": None, "actorder": None}  # fmt: skip
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "global_compression_ratio": 1.2, "kv_cache_scheme": None, "version": "0.9", "ignore": ["lm_head"],
              "sparsity_config": {}}  # fmt: skip
LINEAR = "operation={dot_general,ragged_dot}"
FP8_TENSOR = "weight=float8_e4m3fn(group=tensor), activation=float8_e4m3fn(group=tensor)"


def compressed(weights: Any, activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {**COMPRESSED, "config_groups": {"group_0": group}, **more}


def torchao(name: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 1, "_data": data}}}


@each(
    ("config", "expected"),
    [
        ({"model_type": "llama", "quantization_config": compressed(INT4_ARGUMENTS)},
         [f"'!lm_head', {LINEAR}, weight=int4(group=128,rule=half_range)"]),
        (compressed({**TOKENS, "strategy": "channel", "dynamic": False}, TOKENS,
                    ignore=["re:.*lm_head", "re:.*mlp.gate$", r"re:^model\.layers\.0\.self_attn.q_proj$"]),
         [f"'!*lm_head* !*mlp/gate/ !layers/0/self_attn/q_proj/', {LINEAR}, weight={E4M3}, activation={E4M3}"]),
        (compressed(*[{**TOKENS, "strategy": "tensor", "dynamic": False}] * 2),
         [f"'!lm_head', {LINEAR}, {FP8_TENSOR}, scale_from=MovingAverage(decay=0.99)"]),
        (compressed(NVFP4, {**NVFP4, "dynamic": "local"}), [f"'!lm_head', {LINEAR}, weight=nvfp4, activation=nvfp4"]),
        ({**COMPRESSED, "config_groups": {
            "0": {"targets": ["Linear"], "weights": {**TOKENS, "strategy": "block", "block_structure": [128, 128]}},
            "1": {"targets": ["re:.*down_proj"], "weights": {**INT4_ARGUMENTS, "symmetric": False}}}},
         [f"'*down_proj* !lm_head', {LINEAR}, weight=int4(group=128,zero_point=integer)",
          f"'!lm_head', {LINEAR}, weight=float8_e4m3fn(group=(128,128),axis=(-2,-1))"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": True,
          "true_sequential": True, "model_file_base_name": "model"},
         [f"'!lm_head', {LINEAR}, weight=int4(group=128,scale=binary16,rule=half_range)"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "dynamic": {
            "-:.*attn.*": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}},
         [f"'*/down_proj*', {LINEAR}, weight=int8(group=64,scale=binary16,zero_point=integer)",
          f"'!lm_head !*attn*', {LINEAR}, weight=int4(group=all,scale=binary16,zero_point=integer)"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
          "modules_to_not_convert": ["visual"]},
         [f"'!visual !lm_head', {LINEAR}, weight=int4(group=128,scale=binary16,zero_point=integer)"]),
        ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
         [f"'!lm_head', {LINEAR}, weight=float8_e4m3fn(group=(128,128),axis=(-2,-1)), "
          "activation=float8_e4m3fn(group=128)"]),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
          "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["visual"]},
         [f"'!visual', {LINEAR}, weight=nf4(scale=uint8(group=256,zero_point=float))"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0},
         [f"'!lm_head', {LINEAR}, weight=int8(group=all), activation=int8(group=all)"]),
        (torchao("Int4WeightOnlyConfig", {"group_size": 64, "use_hqq": False, "layout": {"_type": "PlainLayout"}}),
         [f"'!lm_head', {LINEAR}, weight=int4(group=64,scale=bfloat16,zero_point=float)"]),
        (torchao("Float8DynamicActivationFloat8WeightConfig", {"granularity": [{"_type": "PerRow", "_data": {}}] * 2}),
         [f"'!lm_head', {LINEAR}, weight={E4M3}, activation={E4M3}"]),
        (torchao("FqnToConfig", {"fqn_to_config": {"re:.*q_proj": None, "_default": {
            "_type": "Int8DynamicActivationInt4WeightConfig", "_data": {"mapping_type": {"_data": "SYMMETRIC"}}}}}),
         ["'*q_proj/'", f"'!lm_head', {LINEAR}, weight=int4(group=32,rule=half_range), "
          "activation=int8(group=all,zero_point=integer)"]),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, [f"'!lm_head', {LINEAR}, weight={INT8}"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "producer": {"name": "modelopt"},
          "exclude_modules": ["lm_head", "model.layers.0*", "*.router"]},
         [f"'!lm_head !layers.0* !*.router', {LINEAR}, weight=nvfp4, activation=nvfp4"]),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
         [f"'!lm_head', {LINEAR}, {FP8_TENSOR}, scale_from=MovingAverage(decay=0.99)"]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
         [f"'!layers.*.self_attn !lm_head', {LINEAR}, weight=mxfp4"]),
    ],
)  # fmt: skip
def test_configurations_of_hugging_face(config: dict[str, Any], expected: list[str]) -> None:
    rules = jc.Rule.from_hf(config)
    assert texts(rules) == expected

    class Block(nnx.Module):
        """A linear layer of each name that the rules above have a pattern for."""

        def __init__(self) -> None:
            self.mlp = nnx.List([nnx.Dict(down_proj=nnx.Linear(128, 128, rngs=nnx.Rngs(0)))])
            self.q_proj, self.lm_head = (nnx.Linear(128, 128, rngs=nnx.Rngs(n)) for n in (1, 2))

        def __call__(self, x: Any) -> Any:
            return self.lm_head(self.q_proj(self.mlp[0].down_proj(x)))

    model = jc.nn.quantize(Block(), rules)
    assert np.isfinite(model(jnp.ones((2, 128)))).all()


def test_a_configuration_may_be_an_object() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": "awq"}

    assert jc.Rule.from_hf(Config()) == jc.Rule.from_hf({"quant_method": "awq"})


@each(
    ("config", "words"),
    [
        ({"quant_method": "exl3"}, "quant_method='exl3' is not read; known are compressed-tensors, gptq"),
        ({"quant_method": "awq", "new": 3}, "new=3 has no equal.*take it out"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "nearest is Rule.cache="),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'.*FP8"),
        ({"load_in_8bit": True}, r"llm_int8_threshold=6.0 has no equal.*weight='int8\(group=all\)'"),
        (compressed({**INT4_ARGUMENTS, "strategy": "attn_head"}), "weights.strategy='attn_head'"),
        (compressed({**INT4_ARGUMENTS, "type": "float"}), "weights.num_bits=4"),
        (compressed(None, {**TOKENS, "dynamic": False}), "input_activations.dynamic=False"),
        (compressed(INT4_ARGUMENTS, sparsity_config={"format": "sparse-24-bitmask"}), "sparse=2:4"),
        (torchao("Int4WeightOnlyConfig", {"mapping_type": "ASYMMETRIC"}), "mapping_type='ASYMMETRIC'"),
        (torchao("UIntXWeightOnlyConfig", {}), "quant_type='UIntXWeightOnly'.*close: IntxWeightOnly"),
        ({"quant_method": "torchao"}, "is not understood"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [8, 8]}, "nearest is 'dynamic'"),
    ],
)  # fmt: skip
def test_what_a_configuration_has_no_equal_for_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        jc.Rule.from_hf(config)
    assert len(str(caught.value)) <= 240


@each("given", [3, "int8", [3], None])
def test_what_is_no_rule_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="must be rules of qwix, or dicts"):
        jc.Rule.from_qwix(given)
    with pytest.raises(TypeError, match="must be a dict"):
        jc.Rule.from_hf(given)


# -- the numbers of qwix -----------------------------------------------------------------------------------------------


@each(
    ("qtype", "tile", "method"),
    [
        *((qtype, tile, "absmax") for qtype in ("int8", "int4", "int2", "int5", "nf4", "float8_e4m3fn", "float8_e5m2",
          "float4_e2m1fn", "float8_e4m3b11fnuz") for tile in (None, 32, 1.0)),
        ("mxfp8", 32, "absmax"), ("mxfp4", 32, "absmax"), ("nvfp4", 16, "absmax"),
        ("int8", None, "minmax"), ("int4", 32, "minmax,1"),
        ("int8", None, "fixed,-0.99609375,0.99609375"), ("int4", None, "fixed,3.75"),
        ("float8_e4m3fn", None, "fixed,-224,224"), ("float8_e4m3fn", None, "fixed,-3.5,3.5"),
        ("float8_e5m2", None, "fixed,-7,7"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_qwix_where_its_scales_are_right(qtype: str, tile: Any, method: str) -> None:
    qwix = pytest.importorskip("qwix")
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 256)) * np.exp(rng.standard_normal((64, 1)))).astype(np.float32)
    x[3] = 0
    rule = qwix.QuantizationRule(weight_qtype=qtype, tile_size=tile, weight_calibration_method=method)
    spec = jc.Rule.from_qwix(rule)[0].weight
    assert spec is not None
    theirs = qwix.quantize(
        jnp.asarray(x), qtype, channelwise_axes=[0], tiled_axes={1: tile} if tile else {}, calibration_method=method
    )
    numbers, ours = np.asarray(qwix.dequantize(theirs)), np.asarray(jc.round_to_format(x, spec))
    same = np.ones_like(x, bool)
    # XLA multiplies by the reciprocal of a divisor, so scales may be off by one bit; those of blocks are codes here.
    if method.startswith(("absmax", "minmax")) and qtype[:2] not in ("mx", "nv"):
        scale = np.asarray(jc.quantize(x, spec).scale, np.float32).reshape(theirs.scale.shape)
        wide = [np.repeat(each, x.shape[1] // scale.shape[1], 1) for each in (scale, np.asarray(theirs.scale))]
        quotient = x.astype(np.float64) / wide[0]  # qwix rounds it to binary32 first, which makes ties
        same = (wide[0] == wide[1]) & ((not qtype.startswith("int")) | (abs(quotient % 1 - 0.5) > 1e-4))
        np.testing.assert_allclose(scale, theirs.scale, 3e-7)
    assert same.mean() > 0.1
    np.testing.assert_array_equal(ours[same], numbers[same])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_packed_by_qwix_has_the_same_numbers() -> None:
    qwix = pytest.importorskip("qwix")

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.embed, self.norm = nnx.Embed(16, 64, rngs=rngs), nnx.LayerNorm(128, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            return self.down(nnx.relu(self.norm(self.up(self.embed(tokens)))))

    tokens = jnp.arange(32) % 16
    rules = [
        qwix.QuantizationRule(module_path="d.*", weight_qtype="nf4", tile_size=32),
        qwix.QuantizationRule(module_path=".*", weight_qtype="mxfp8", act_qtype="mxfp8", tile_size=32),
    ]
    theirs = qwix.quantize_model(Model(), qwix.PtqProvider(rules), tokens)(tokens)
    ours = jc.nn.quantize(Model(), jc.Rule.from_qwix(rules), mode="ptq")(tokens)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    assert abs(np.asarray(theirs - Model()(tokens))).max() > 0.05
