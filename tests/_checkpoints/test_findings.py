"""`jchop inspect --check`: each fault of a folder is one row, a sound folder has none; the exit status says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jchop import quantize, save_checkpoint
from jchop.__main__ import main

HIDDEN, MLP, VOCAB = 32, 64, 48
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP, "vocab_size": VOCAB,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip


def model() -> dict[str, Any]:
    """A model of Llama's shapes, whose projections are packed."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    arrays |= {"model.embed_tokens.weight": np.ones((VOCAB, HIDDEN), np.float32), "model.norm.weight": np.ones(HIDDEN)}
    shapes = {"self_attn.q_proj": (32, HIDDEN), "self_attn.k_proj": (16, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
    for layer in range(2):
        for name, shape in shapes.items():
            numbers = rng.standard_normal(shape).astype(np.float32)
            arrays[f"model.layers.{layer}.{name}.weight"] = quantize(numbers, "nvfp4")
    return {name: value.astype("float32") if name == "model.norm.weight" else value for name, value in arrays.items()}


def findings(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, list[tuple[str, str]]]:
    status = main(["inspect", str(folder), "--check", "--json"])
    return status, [(row["array"], row["fault"]) for row in json.loads(capsys.readouterr().out)]


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, by its header."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    kinds = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    arrays = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + place for place in entry["data_offsets"])
            kind = np.dtype(kinds[entry["dtype"]])
            arrays[name] = np.frombuffer(data[start:end], kind).reshape(entry["shape"]).copy()
    return arrays


def test_each_fault_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "good"
    save_checkpoint(folder, model(), "compressed-tensors", config=CONFIG, exact=False)
    assert findings(capsys, folder) == (0, [])
    assert main(["inspect", str(folder), "--check"]) == 0 and capsys.readouterr().out == "no faults\n"

    tensors, config = stored(folder), json.loads((folder / "config.json").read_text())
    first, second = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj"))
    tensors[f"{first}.weight_global_scale"][:] = 1 / tensors[f"{first}.weight_global_scale"]
    tensors[f"{second}.weight_scale"][0, 0] = 0
    tensors["model.layers.0.mlp.down_proj.weight_scale"][3, 1] = np.nan
    tensors["model.embed_tokens.weight"][5, 6] = np.nan
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    del tensors["lm_head.weight"]
    bad = tmp_path / "bad"
    save_checkpoint(bad, tensors, "plain", config={name: config[name] for name in CONFIG} | {"num_hidden_layers": 3})
    written = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(written | {"quantization_config": config["quantization_config"]}))
    status, rows = findings(capsys, bad)
    by_name = dict(rows)
    assert status == 1 and len(rows) == 7
    assert "looks inverted" in by_name[f"{first}.weight"]
    assert by_name[f"{second}.weight"] == "1 of 32 scales in weight_scale are zero"
    assert by_name["model.layers.0.mlp.down_proj.weight"].endswith("a scale is NaN")
    assert by_name["model.embed_tokens.weight"] == f"1 of {VOCAB * HIDDEN} numbers are NaN or infinite"
    assert by_name["model.norm.weight"] == "its shape [31] is not the 32 of config.json"
    config_rows = [fault for name, fault in rows if name == "config.json"]
    assert config_rows == [
        "there is no lm_head.weight, and tie_word_embeddings is false",
        "1 of 3 layers have no tensor, the first is model.layers.2",
    ]
