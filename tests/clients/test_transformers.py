"""Checkpoints of jchop in transformers, and its checkpoints in jchop: tiny random models in every layout that it loads.

The packages are installed by hand (see `docs/checkpoints.md`, Limits); without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest

import jchop as jc
from jchop._checkpoints.writer import convert_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.clients

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2, tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phi-3, fused": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
}
GPT_OSS = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
READ_CONFIGS = CONFIGS | {"gpt-oss": lambda: transformers.GptOssConfig(**SIZES, **GPT_OSS)}
#: Layout, spec, dtype of the model, and whether transformers loads experts of it, which it has in one parameter.
CASES = {
    "ct int4": ("compressed-tensors", "int4(group=32)", "float32", True),
    "ct int4 of bfloat16": ("compressed-tensors", "int4(group=32,scale=bfloat16)", "bfloat16", False),
    "ct int4 of float16": ("compressed-tensors", "int4(group=32,scale=float16)", "float16", False),
    "ct int4, rows": ("compressed-tensors", "int4(channel=0)", "float32", False),
    "ct int3": ("compressed-tensors", "int3(group=32)", "float32", False),
    "ct int8": ("compressed-tensors", "int8(channel=0)", "float32", False),
    "ct fp8": ("compressed-tensors", "float8_e4m3fn(channel=0)", "float32", True),
    "ct fp8 in blocks": ("compressed-tensors", "float8_e4m3fn(group=(128,128))", "float32", False),
    "ct nvfp4": ("compressed-tensors", "nvfp4", "bfloat16", False),
    "ct mxfp4": ("compressed-tensors", "mxfp4", "bfloat16", False),
    "ct mxfp8": ("compressed-tensors", "mxfp8_e4m3", "bfloat16", False),
    "fp8": ("fp8", "float8_e4m3fn(group=(128,128))", "float32", True),
    "nf4": ("bitsandbytes", "nf4", "float32", False),
    "nf4 of bfloat16": ("bitsandbytes", "nf4", "bfloat16", False),
    "nf4 of float16": ("bitsandbytes", "nf4", "float16", False),
    "torchao int8": ("torchao", "int8(channel=0)", "float32", False),
    "torchao int4": ("torchao", "int4(group=32,scale=bfloat16)", "bfloat16", False),
    "torchao int4 with zero points": ("torchao", "int4(group=32,zero_point=integer)", "float32", False),
    "torchao fp8": ("torchao", "float8_e4m3fn(channel=0)", "float32", False),
}
PACKAGES = {
    "compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes", "torchao": "torchao", "fp8": "torch",
}  # fmt: skip
IDS = torch.arange(12)[None] * 7 % SIZES["vocab_size"]


def new_model(name: str, dtype: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(READ_CONFIGS[name](), dtype=getattr(torch, dtype)).eval()


def load(folder: Path, dtype: str) -> Any:
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    options = {}
    if config.get("quant_method") == "fp8":  # its products need a GPU
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=getattr(torch, dtype), **options).eval()


def numbers(module: Any) -> np.ndarray:
    """The weight of a Linear of any of the libraries, by its own arithmetic."""
    weight = module.weight
    if type(weight).__name__ == "Params4bit":
        import bitsandbytes

        weight = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    elif hasattr(weight, "dequantize") and type(weight).__name__ not in ("Parameter", "Tensor"):
        weight = weight.dequantize()
    return weight.detach().float().numpy()


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.float().numpy()


def modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if name.endswith("_proj") and "self_attn" in name}


#: Models and dtypes of what a library writes.
MADE = [
    *(("llama", dtype) for dtype in ("float32", "bfloat16", "float16")), ("qwen2, tied", "float16"),
    ("qwen2, tied", "float32"), ("mixtral", "bfloat16"), ("phi-3, fused", "float32"), ("gpt-oss", "float32"),
]  # fmt: skip


#: With experts that are not quantized transformers loads no model of compressed-tensors.
PAIRS = [
    (case, model)
    for case, (layout, _, _, experts) in CASES.items()
    for model in CONFIGS
    if model != "mixtral" or experts or layout != "compressed-tensors"
]


@pytest.mark.parametrize(("case", "model"), PAIRS)
def test_transformers_loads_what_jchop_writes(case: str, model: str, tmp_path: Path) -> None:
    layout, spec, dtype, experts = CASES[case]
    pytest.importorskip(PACKAGES[layout])
    new_model(model, dtype).save_pretrained(tmp_path / "source", max_shard_size="200KB")
    tree = jc.load_checkpoint(tmp_path / "source")
    for name, value in tree.items():
        if "_proj.weight" in name or (experts and ".experts." in name):
            tree[name] = jc.quantize(value.astype("float32"), spec)
    config = json.loads((tmp_path / "source/config.json").read_text())
    jc.save_checkpoint(tmp_path / "plain", tree, "plain", config=config)
    jc.save_checkpoint(tmp_path / "packed", tree, layout, config=config, exact=False, shard_bytes=1 << 17)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    expected, got = (load(tmp_path / name, dtype) for name in ("plain", "packed"))
    nf4 = {name: numbers(module) for name, module in modules(got).items() if layout == "bitsandbytes"}
    wanted, found = logits(expected), logits(got)  # the first call unpacks weights, and puts those of NF4 in order
    stored = jc.load_checkpoint(tmp_path / "packed")
    for name, module in modules(got).items():
        same = torch.from_numpy(np.array(jc.dequantize(stored[f"{name}.weight"]))).to(getattr(torch, dtype))
        np.testing.assert_array_equal(nf4[name] if nf4 else numbers(module), same.float().numpy(), name)
    error = 2.0**-6 if layout == "bitsandbytes" else 2.0**-20 if dtype == "float32" else 0  # products of its own
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_experts_of_gpt_oss_that_jchop_writes(dtype: str, tmp_path: Path) -> None:
    """The layout has the experts as (experts, out, in), and the model as (experts, in, out)."""
    new_model("gpt-oss", dtype).save_pretrained(tmp_path / "source")
    tree = jc.load_checkpoint(tmp_path / "source")
    fields = json.loads((tmp_path / "source/config.json").read_text())
    experts = [name for name in tree if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 4
    packed = {name: jc.quantize(tree[name].astype("float32").swapaxes(1, 2), "mxfp4") for name in experts}
    numbers_of = {name: jc.dequantize(q).swapaxes(1, 2).astype(dtype) for name, q in packed.items()}
    jc.save_checkpoint(tmp_path / "plain", tree | numbers_of, "plain", config=fields)
    jc.save_checkpoint(tmp_path / "packed", tree | packed, "mxfp4", config=fields)
    auto, options = transformers.AutoModelForCausalLM, {"dtype": getattr(torch, dtype)}
    found = auto.from_pretrained(
        tmp_path / "packed", quantization_config=transformers.Mxfp4Config(dequantize=True), **options
    ).eval()
    wanted = auto.from_pretrained(tmp_path / "plain", **options).eval()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name].to(value.dtype), value, rtol=0, atol=0, msg=name)
    np.testing.assert_array_equal(logits(found), logits(wanted))


def _nf4(double: bool) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )


def _torchao(make: str, **options: Any) -> Any:
    import torchao.quantization as ao

    made = {key: value(ao) if callable(value) else value for key, value in options.items()}
    return transformers.TorchAoConfig(getattr(ao, make)(**made))


_GROUPS = {"weight_dtype": lambda _: torch.int4, "granularity": lambda ao: ao.PerGroup(32)}
LIBRARY_CONFIGS = {
    "nf4": ("bitsandbytes", lambda: _nf4(False)),
    "nf4, double": ("bitsandbytes", lambda: _nf4(True)),
    "torchao int8": ("torchao", lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao int4": ("torchao", lambda: _torchao("IntxWeightOnlyConfig", **_GROUPS)),
    "torchao int4 with zero points": (
        "torchao",
        lambda: _torchao("IntxWeightOnlyConfig", mapping_type=lambda ao: ao.MappingType.ASYMMETRIC, **_GROUPS),
    ),
    "torchao fp8": ("torchao", lambda: _torchao("Float8WeightOnlyConfig")),
}


@pytest.mark.parametrize(("model", "dtype"), MADE)
@pytest.mark.parametrize("case", LIBRARY_CONFIGS)
def test_jchop_reads_what_transformers_writes(case: str, model: str, dtype: str, tmp_path: Path) -> None:
    package, config = LIBRARY_CONFIGS[case]
    pytest.importorskip(package)
    new_model(model, dtype).save_pretrained(tmp_path / "source")
    auto = transformers.AutoModelForCausalLM
    made = auto.from_pretrained(tmp_path / "source", dtype=getattr(torch, dtype), quantization_config=config())
    made.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    tree = jc.load_checkpoint(tmp_path / "theirs")
    for name, module in modules(made).items():
        q = tree[f"{name}.weight"]
        assert isinstance(q, jc.QArray)
        found = torch.from_numpy(np.array(jc.dequantize(q))).to(getattr(torch, dtype))
        np.testing.assert_array_equal(found.float().numpy(), numbers(module), name)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    jc.save_checkpoint(tmp_path / "plain", tree, "plain", config=config)
    expected = load(tmp_path / "plain", dtype)
    error = 2.0**-6  # products in the packages' own ways
    np.testing.assert_allclose(logits(made), wanted := logits(expected), rtol=0, atol=error * np.abs(wanted).max())


#: Schemes of compressed-tensors, and dtypes of the models: transformers runs floats in small groups in bfloat16 alone.
PRESETS = {
    "W4A16": "float16", "W8A16": "float32", "W8A8": "float32", "W4A8": "float16", "W4AFP8": "bfloat16",
    "FP8": "float16", "FP8_DYNAMIC": "float32", "FP8_BLOCK": "bfloat16", "NVFP4": "bfloat16", "NVFP4A16": "bfloat16",
    "MXFP4": "bfloat16", "MXFP4A16": "bfloat16", "MXFP8": "bfloat16",
}  # fmt: skip


def compress(model: Any, preset: str, folder: Path) -> None:
    """Writes a model by compressed-tensors, with scales of its weights."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    args.group_size = 32 if args.group_size == 128 else args.group_size
    ignore = ["lm_head", "re:.*gate$", "re:.*router.*"]
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        own = getattr(module, "quantization_scheme", None)
        for name, value in module.named_parameters(recurse=False) if own else ():
            if name.endswith("_scale") and not name.startswith("weight"):
                value.data.fill_(0.25)
        if own is None or own.weights is None:
            continue
        weight, options = module.weight.data, {}
        rows, columns = args.block_structure or (1, args.group_size or weight.shape[1])
        rows = weight.shape[0] if args.strategy == "tensor" else rows
        tail = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        groups = torch.nn.functional.pad(weight, tail).unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        if args.strategy == "tensor_group":
            options["global_scale"] = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data = options["global_scale"].reshape(1).float()
        scale, _ = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), args, **options)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size="60KB")
    compressor.update_config(folder)
    compressor.decompress_model(model)


@pytest.mark.parametrize("model", ["llama", "phi-3, fused", "gpt-oss"])
@pytest.mark.parametrize("preset", PRESETS)
def test_jchop_reads_and_writes_a_model_of_a_compressor(preset: str, model: str, tmp_path: Path) -> None:
    """Weights are equal, and logits of the model that jchop writes again, whose inputs are rounded as before."""
    pytest.importorskip("compressed_tensors")
    dtype = PRESETS[preset]
    made = new_model(model, dtype)
    compress(made, preset, tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    tree = jc.load_checkpoint(tmp_path / "theirs")
    for name, module in modules(made).items():
        found = torch.from_numpy(np.array(jc.dequantize(tree[f"{name}.weight"]))).to(getattr(torch, dtype))
        torch.testing.assert_close(found, module.weight.data, rtol=0, atol=0, msg=name)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", "compressed-tensors")
    expected, got = (load(tmp_path / name, dtype) for name in ("theirs", "ours"))
    np.testing.assert_array_equal(logits(got), logits(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jchop_reads_llm_int8(dtype: str, tmp_path: Path) -> None:
    """The numbers are those of bitsandbytes, which rounds once more."""
    functional = pytest.importorskip("bitsandbytes").functional
    new_model("llama", dtype).save_pretrained(tmp_path / "source")
    options = {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}
    auto = transformers.AutoModelForCausalLM
    made = auto.from_pretrained(tmp_path / "source", dtype=getattr(torch, dtype), **options)
    made.save_pretrained(tmp_path / "theirs")
    tree = jc.load_checkpoint(tmp_path / "theirs")
    for name, module in modules(made).items():
        wanted = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).float().numpy()
        np.testing.assert_allclose(np.asarray(jc.dequantize(tree[f"{name}.weight"])), wanted, rtol=2.0**-22, atol=0)
