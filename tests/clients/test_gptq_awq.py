"""Weights beside the layers of AutoGPTQ and AutoAWQ, whose own packing and unpacking they are.

Neither package is imported as a whole, since that needs an older transformers: only the modules with the layers are.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jchop as jc

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.clients

OUT, IN, GROUP = 64, 128, 32


def module_of(package: str, name: str) -> Any:
    """A module of a package that is not run itself; the test is skipped if it is not there."""
    found = importlib.util.find_spec(package) if package not in sys.modules else None
    if package not in sys.modules:
        if found is None:
            pytest.skip(f"could not import {package!r}")
        shell = types.ModuleType(package)
        shell.__path__ = list(found.submodule_search_locations or ())
        sys.modules[package] = shell
    return importlib.import_module(f"{package}.{name}")


def gptq_layer(bits: int) -> Any:
    module = module_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda")
    return module.QuantLinear(bits, GROUP, IN, OUT, False, weight_dtype=torch.float32)


def gptq_numbers(bits: int, tensors: dict[str, Any]) -> np.ndarray:
    """The weight (out, in): what the layer makes of the unit matrix."""
    layer = gptq_layer(bits)
    layer.load_state_dict({name: value.float() if name == "scales" else value for name, value in tensors.items()})
    return layer(torch.eye(IN)).numpy().T


def random_parts(bits: int) -> tuple[Any, Any, Any]:
    """A weight (out, in) of integers times scales, its scales and zero points (out, groups)."""
    rng = np.random.default_rng(bits)
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, (OUT, IN // GROUP)).astype(np.float16)).float()
    zero = torch.from_numpy(rng.integers(1, 1 << bits, (OUT, IN // GROUP)).astype(np.float32))
    codes = torch.from_numpy(rng.integers(0, 1 << bits, (OUT, IN)).astype(np.float32))
    index = torch.arange(IN) // GROUP
    return (codes - zero[:, index]) * scale[:, index], scale, zero


def linear_of(weight: Any) -> Any:
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = weight
    return linear


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Any:
    folder.mkdir()
    named = {f"w.{name}": value.contiguous() for name, value in tensors.items()}
    safetensors.save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return jc.load_checkpoint(folder)["w.weight"]


def tensors_in(folder: Path) -> dict[str, Any]:
    return {name[2:]: value for name, value in safetensors.load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, tmp_path: Path) -> None:
    weight, scale, zero = random_parts(bits)
    layer = gptq_layer(bits)
    layer.pack(linear_of(weight), scale, zero, torch.arange(IN) // GROUP)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "g_idx")} | {"scales": scale.T.half()}
    wanted = gptq_numbers(bits, tensors)
    np.testing.assert_array_equal(wanted, weight.numpy())
    q = write(tmp_path / "theirs", tensors, {"quant_method": "gptq", "bits": bits, "group_size": GROUP})
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), wanted)
    jc.save_checkpoint(tmp_path / "ours", {"w.weight": q}, "gptq")
    np.testing.assert_array_equal(gptq_numbers(bits, tensors_in(tmp_path / "ours")), wanted)


@pytest.mark.parametrize("text", ["int4(group=32,scale=float16)", "int4(group=32,scale=float16,zero_point=integer)"])
def test_gptq_with_columns_of_any_order(text: str, tmp_path: Path) -> None:
    """Columns in another order, as act-order leaves them."""
    order = np.random.default_rng(0).permutation(IN)
    q = jc.quantize(np.random.default_rng(1).standard_normal((OUT, IN)).astype(np.float32), text)
    jc.save_checkpoint(tmp_path / "m", {"w.weight": q}, "gptq_v2")
    tensors = tensors_in(tmp_path / "m")
    tensors["g_idx"] = torch.from_numpy((np.arange(IN) // GROUP)[order].astype(np.int32))
    config = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": GROUP, "desc_act": True}
    shuffled = write(tmp_path / "shuffled", tensors, config)
    jc.save_checkpoint(tmp_path / "v1", {"w.weight": shuffled}, "gptq")
    wanted = np.asarray(jc.dequantize(shuffled))
    np.testing.assert_array_equal(gptq_numbers(4, tensors_in(tmp_path / "v1")), wanted)


def test_awq(tmp_path: Path) -> None:
    gemm, packing = module_of("awq", "modules.linear.gemm"), module_of("awq", "utils.packing_utils")

    def numbers(tensors: dict[str, Any]) -> np.ndarray:
        parts = tensors["qweight"], tensors["qzeros"], tensors["scales"].float()
        return packing.dequantize_gemm(*parts, 4, GROUP).numpy().T

    weight, scale, zero = random_parts(4)
    layer = gemm.WQLinear_GEMM.from_linear(linear_of(weight), 4, GROUP, False, scale.T, zero.T)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    wanted = numbers(tensors)
    np.testing.assert_array_equal(wanted, weight.numpy())
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    q = write(tmp_path / "theirs", tensors, config)
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), wanted)
    jc.save_checkpoint(tmp_path / "ours", {"w.weight": q}, "awq")
    ours = tensors_in(tmp_path / "ours")
    assert all(torch.equal(ours[name], value) for name, value in tensors.items())
