"""Weights beside the compressors of compressed-tensors: it writes and jchop reads, jchop writes and it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jchop as jc

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
safetensors = pytest.importorskip("safetensors.torch")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

pytestmark = pytest.mark.clients

SHAPE = (64, 128)


def arguments(bits: int, kind: str, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size} | more


_E4M3, _E8M0 = {"scale_dtype": torch.float8_e4m3fn}, {"scale_dtype": torch.uint8}
_INT4 = arguments(4, "int", "group", 32, symmetric=False), "int4(group=32,zero_point=integer)"
_ROWS = arguments(4, "int", "channel", symmetric=False), "int4(channel=0,zero_point=integer)"
#: Format, arguments of the weights, and a spec of jchop that has such groups.
FORMATS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    f"int{bits}": ("pack-quantized", arguments(bits, "int", "group", 32), f"int{bits}(group=32)")
    for bits in range(2, 9)
} | {
    "int4 with zero points": ("pack-quantized", *_INT4),
    "int4 rows with zero points": ("pack-quantized", *_ROWS),
    "int4 tensor with zero points": (
        "pack-quantized",
        arguments(4, "int", "tensor", symmetric=False),
        "int4(group=tensor,zero_point=integer)",
    ),
    "int8 tensor": ("int-quantized", arguments(8, "int", "tensor"), None),
    "int8 rows": ("int-quantized", arguments(8, "int", "channel"), None),
    "fp8 rows": ("float-quantized", arguments(8, "float", "channel"), "float8_e4m3fn(channel=0)"),
    "fp8 tensor": ("float-quantized", arguments(8, "float", "tensor"), "float8_e4m3fn(group=tensor)"),
    "nvfp4": ("nvfp4-pack-quantized", arguments(4, "float", "tensor_group", 16, **_E4M3), "nvfp4"),
    "mxfp4": ("mxfp4-pack-quantized", arguments(4, "float", "group", 32, **_E8M0), "mxfp4"),
    "mxfp8": ("mxfp8-quantized", arguments(8, "float", "group", 32, **_E8M0), "mxfp8_e4m3"),
}


def scheme_of(name: str) -> Any:
    args = QuantizationArgs(**FORMATS[name][1])
    return QuantizationScheme(targets=["Linear"], weights=args, format=FORMATS[name][0])


def decompressed(tensors: dict[str, Any], scheme: Any) -> np.ndarray:
    """The numbers of a weight by the compressor, in the dtype of its scales."""
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(tensors, scheme)["weight"]


def matrix() -> Any:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32))


def compressed(name: str) -> tuple[dict[str, Any], Any]:
    scheme, weight = scheme_of(name), matrix()
    args, size = scheme.weights, scheme.weights.group_size or SHAPE[1]
    groups = weight.reshape(1, -1) if args.strategy == "tensor" else weight.reshape(SHAPE[0], -1, size)
    low, high = groups.amin(-1), groups.amax(-1)
    more = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, **more)
    state = {"weight": weight, "weight_scale": scale}
    state |= {f"weight_{key}": value for key, value in more.items()}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme), scheme


@pytest.mark.parametrize("name", FORMATS)
def test_jchop_reads_what_a_compressor_writes(name: str, tmp_path: Path) -> None:
    tensors, scheme = compressed(name)
    named = {f"w.{key}": value.contiguous() for key, value in tensors.items()}
    safetensors.save_file(named, tmp_path / "model.safetensors")
    config = {"quant_method": "compressed-tensors", "format": scheme.format, "version": "0.20.1"}
    config["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    q = jc.load_checkpoint(tmp_path)["w.weight"]
    wanted = decompressed(tensors, scheme)
    found = torch.from_numpy(np.array(jc.dequantize(q))).to(wanted.dtype)
    assert torch.equal(found, wanted), (found - wanted).abs().max()
    jc.save_checkpoint(tmp_path / "again", {"w.weight": q}, "compressed-tensors")
    again = {key[2:]: value for key, value in safetensors.load_file(tmp_path / "again/model.safetensors").items()}
    fmt = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]["format"]
    if fmt == scheme.format:
        assert torch.equal(decompressed(again, scheme), wanted)


@pytest.mark.parametrize("name", [name for name, (_, _, spec) in FORMATS.items() if spec])
def test_a_compressor_reads_what_jchop_writes(name: str, tmp_path: Path) -> None:
    spec = FORMATS[name][2]
    assert spec is not None
    q = jc.quantize(matrix().numpy(), spec)
    jc.save_checkpoint(tmp_path / "m", {"w.weight": q}, "compressed-tensors", exact=False)
    tensors = {key[2:]: value for key, value in safetensors.load_file(tmp_path / "m/model.safetensors").items()}
    config = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**config)
    wanted = decompressed(tensors, scheme)
    found = torch.from_numpy(np.array(jc.dequantize(jc.load_checkpoint(tmp_path / "m")["w.weight"]))).to(wanted.dtype)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("int8(channel=0)", "int8(group=all)"),
        ("float8_e4m3fn(channel=0)", "e4m3fn(group=all)"),
        ("float8_e4m3fn(group=all)", "e4m3fn(group=tensor)"),
        ("mxfp8_e4m3", "mxfp8_e4m3"),
        ("int4(group=32)", "int8(group=all)"),
    ],
)
def test_inputs_of_a_rule_are_a_scheme(weight: str, activation: str, tmp_path: Path) -> None:
    """A layer of Flax NNX whose inputs are rounded: its product is that of the compressor's layer."""
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from flax import nnx

    model = nnx.Dict(up=nnx.Linear(SHAPE[1], SHAPE[0], use_bias=False, rngs=nnx.Rngs(0)))
    packed = jc.nn.quantize(model, jc.Rule("*", weight=weight, activation=activation), mode="ptq")
    jc.save_checkpoint(tmp_path / "m", packed, "compressed-tensors", config={"model_type": "x"})
    config = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**config)
    assert scheme.input_activations is not None and scheme.input_activations.dynamic
    tensors = {key[3:]: value for key, value in safetensors.load_file(tmp_path / "m/model.safetensors").items()}
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((4, SHAPE[1])).astype(np.float32))
    layer = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.quantization_scheme, layer.quantization_status = scheme, QuantizationStatus.INITIALIZED
    rounded = forward_quantize(layer, x, "input", scheme.input_activations)
    theirs = rounded @ decompressed(tensors, scheme).float().T
    np.testing.assert_allclose(theirs, packed["up"](x.numpy()), atol=5e-2 * np.abs(theirs.numpy()).max())
    plain = x @ decompressed(tensors, scheme).float().T
    assert not np.allclose(theirs, plain)
