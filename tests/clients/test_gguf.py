"""Types of GGUF beside the package gguf of llama.cpp: it writes and decodes, jchop reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import jchop as jc

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.clients

#: The bytes of a block that are scales of binary16.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
POSITIVE = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")


def blocks_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random bytes, with finite scales of both signs and a zero."""
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
    count, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // count, size), dtype=np.uint8)
    for at in HALVES[name]:
        scale = rng.standard_normal(blocks.shape[:-1]).astype(np.float16)
        scale.flat[1] = 0
        blocks[..., at : at + 2] = (abs(scale) if name in POSITIVE else scale)[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = np.where(blocks[..., 0] > 250, 0, blocks[..., 0])
    if name == "NVFP4":
        blocks[..., :4] %= 127
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("shape", [(6, 512), (2, 3, 256)])
@pytest.mark.parametrize("name", HALVES)
def test_jchop_reads_every_type_as_gguf_does(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = blocks_of(name, shape)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    q = jc.load_checkpoint(tmp_path / "m.gguf")["w"]
    assert isinstance(q, jc.QArray) and q.shape == shape
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), gguf.dequantize(blocks, kind))


@pytest.mark.parametrize("spec", ["int4(group=32,scale=float16)", "int8(group=32,scale=float16)", None])
def test_gguf_reads_what_jchop_writes(spec: str | None, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    w = x if spec is None else jc.quantize(x, spec)
    jc.save_checkpoint(tmp_path / "m.gguf", {"w": w, "norm": x[0]}, "gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = gguf.dequantize(tensors["w"].data, tensors["w"].tensor_type)
    np.testing.assert_array_equal(found, x if spec is None else np.asarray(jc.dequantize(w)))
    np.testing.assert_array_equal(tensors["norm"].data, x[0])
