"""How inputs and caches are rounded: scales in files, and the configuration of what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jchop as jc
from jchop._checkpoints.writer import convert_checkpoint

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
ATTENTION = "model.layers.0.self_attn."
WEIGHT, SCALE = np.ones((64, 32), ml_dtypes.float8_e4m3fn), np.float32(2).reshape(())


def scheme_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def stored(layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and configuration as programs write them, with scales of a cache."""
    weight = {"k_proj.weight": WEIGHT, "k_proj.weight_scale": SCALE, "k_proj.input_scale": SCALE}
    if layout == "modelopt":  # of ModelOpt's export; its configuration has fields of compressed-tensors
        scales = {"k_proj.k_scale": SCALE, "v_proj.v_scale": SCALE}
        return weight | scales, {"quant_algo": "FP8", "kv_cache_scheme": dict.fromkeys(["group_size"]) | FLOAT8}
    if layout == "fp8":  # of AutoFP8
        return weight | {"kv_scale": SCALE}, {"activation_scheme": "static", "kv_cache_scheme": "static"}
    scales = {f"{part}_scale": np.array([[[0.5]], [[0.25]]], ml_dtypes.bfloat16) for part in "kv"}
    weight = {"k_proj.weight_packed": np.zeros((64, 16), np.uint8), "k_proj.weight_scale": WEIGHT[:, :2]}
    weight |= {
        "k_proj.weight_global_scale": np.ones(1, np.float32),
        "k_proj.input_global_scale": np.ones(1, np.float32),
    }
    group = {"targets": ["Linear"], "weights": FLOAT4 | {"dynamic": False}, "format": "nvfp4-pack-quantized"}
    cache = FLOAT8 | {"strategy": "attn_head"}
    return weight | scales, {"config_groups": {"group_0": group}, "kv_cache_scheme": cache}


@pytest.mark.parametrize("layout", ["modelopt", "fp8", "compressed-tensors"])
def test_scales_of_a_cache_are_arrays_and_its_scheme_is_written_again(layout: str, tmp_path: Path) -> None:
    tensors, config = stored(layout)
    named = {ATTENTION + name: array for name, array in tensors.items()}
    jc.save_checkpoint(tmp_path / "in", named, "plain", config={"model_type": "llama"})
    fields = {"quantization_config": {"quant_method": layout, **config}}
    (tmp_path / "in/config.json").write_text(json.dumps(fields))
    tree = jc.load_checkpoint(tmp_path / "in")
    scales = [name for name, array in tree.items() if not isinstance(array, jc.QArray)]
    assert len(scales) == len(tensors) - (3 if layout == "compressed-tensors" else 2)
    for name in scales:
        np.testing.assert_array_equal(tree[name], named[name], strict=True)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    again, result = jc.load_checkpoint(tmp_path / "out"), scheme_of(tmp_path / "out")
    assert set(again) == set(tree) and {name: str(again[name].dtype) for name in scales} == {
        name: str(tree[name].dtype) for name in scales
    }
    expected = config["kv_cache_scheme"] if layout == "compressed-tensors" else FLOAT8
    assert result["kv_cache_scheme"] == expected
    dynamic = {"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    inputs = result["config_groups"]["group_0"]["input_activations"]
    assert inputs == (FLOAT4 | dynamic if layout == "compressed-tensors" else FLOAT8)


def test_inputs_of_groups_are_written_again(tmp_path: Path) -> None:
    """Of modules that a group names; int8 with rounded inputs are not packed, and one scale is a vector."""
    dynamic = FLOAT8 | {"type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {
        "a": {"targets": ["a"], "weights": weights, "input_activations": dynamic},
        "b": {"targets": ["b"], "weights": weights, "input_activations": None},
    }
    tensors: dict[str, Any] = {f"{name}.weight": WEIGHT.view(np.int8) for name in "ab"}
    tensors |= {f"{name}.weight_scale": np.ones((64, 1), np.float32) for name in "ab"}
    jc.save_checkpoint(tmp_path / "in", tensors, "plain", config={"model_type": "x"})
    fields = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    (tmp_path / "in/config.json").write_text(json.dumps({"quantization_config": fields}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    found = {group["targets"][0]: group for group in scheme_of(tmp_path / "out")["config_groups"].values()}
    assert (found["a"]["format"], found["a"]["input_activations"]) == ("int-quantized", dynamic)
    assert (found["b"]["format"], found["b"]["input_activations"]) == ("pack-quantized", None)
    for spec in ("float8_e4m3fn(group=tensor)", "int8(group=tensor)"):
        q = jc.quantize(np.ones((64, 32), np.float32), spec)
        encoded = jc.encode_checkpoint({"w.weight": q}, "compressed-tensors")
        assert encoded.tensors["w.weight_scale"].shape == (1,)


@pytest.mark.parametrize(
    ("cache", "said"), [("float8_e4m3fn", FLOAT8), ("float8_e4m3fn(group=all)", None), (None, None)]
)
def test_a_cache_of_a_rule_is_in_the_configuration(cache: str | None, said: Any, tmp_path: Path) -> None:
    """If the scheme says the same: e4m3 under a scale of one, which vLLM and SGLang take without a tensor."""
    nnx = pytest.importorskip("flax.nnx")

    def model() -> Any:
        return nnx.Dict(
            attention=nnx.MultiHeadAttention(2, 32, decode=True, rngs=nnx.Rngs(0)),
            up=nnx.Linear(32, 64, rngs=nnx.Rngs(0)),
        )

    rule = jc.Rule(weight="float8_e4m3fn(channel=0)", cache=cache)
    packed = jc.nn.quantize(model(), [rule], mode="ptq")
    jc.save_checkpoint(tmp_path / "m", packed, "compressed-tensors", config={"model_type": "x"})
    encoded = jc.encode_checkpoint(packed, "compressed-tensors").config["quantization_config"]
    assert encoded == scheme_of(tmp_path / "m") and encoded.get("kv_cache_scheme") == said
    assert set(jc.load_checkpoint(tmp_path / "m")) >= {"attention.k_proj.weight", "up.weight"}
    jc.load_checkpoint(tmp_path / "m", like=nnx.eval_shape(model))
