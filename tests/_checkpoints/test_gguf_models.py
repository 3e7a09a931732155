"""Keys and names of llama.cpp in GGUF files; tests/clients/test_gguf.py has its library load them."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import altered

import jchop as jc
from jchop._checkpoints.gguf import GGUFFile
from jchop._checkpoints.gguf_models import gguf_model

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 8, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": [2, 3],
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "added_tokens": [{"id": 0, "content": "<unk>", "special": True}, {"id": 1, "content": "<s>", "special": True}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}]},
    "model": {
        "type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": [["a", "b"], ["ab", "▁"]],
        "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "<0x41>": 5, "ab▁": 6},
    },
}  # fmt: skip
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def test_a_model_has_names_and_rows_of_llama_cpp(tmp_path: Path) -> None:
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {QUERY: rows, NORM: np.ones(8, np.float16)}
    jc.save_checkpoint(tmp_path / "m.gguf", tree, "gguf", config=CONFIG)
    found = jc.load_checkpoint(tmp_path / "m.gguf")
    assert sorted(found) == ["blk.0.attn_q.weight", "output_norm.weight", "rope_freqs.weight"]
    order = [0, 2, 1, 3, 4, 6, 5, 7]  # numbers i and i + 2 of each head of 4 are a pair
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"], rows[order])
    assert found["output_norm.weight"].dtype == np.float32
    np.testing.assert_array_equal(found["rope_freqs.weight"], [1, 8])  # of wavelengths 6 and 628
    packed = jc.quantize(np.tile(rows, (1, 4)), "int8(group=32,scale=float16)")
    jc.save_checkpoint(tmp_path / "q.gguf", {QUERY: packed}, "gguf", config=CONFIG)
    again = jc.load_checkpoint(tmp_path / "q.gguf")["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(jc.dequantize(again), jc.dequantize(packed)[np.array(order)])


def test_norms_of_gemma_are_plus_one(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "gemma", "rope_parameters": None, "hidden_act": "gelu_pytorch_tanh"}
    jc.save_checkpoint(tmp_path / "m.gguf", {NORM: np.full(8, 0.5, np.float16)}, "gguf", config=config)
    np.testing.assert_array_equal(jc.load_checkpoint(tmp_path / "m.gguf")["output_norm.weight"], np.full(8, 1.5))


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, QUERY, "rotary embeddings"),
        ({"hidden_act": "relu"}, QUERY, "hidden_act='relu'"),
        ({"vocab_size": 0}, QUERY, "vocab_size=0"),
        ({}, "model.layers.0.mlp.experts.0.up.weight", "has no name in llama"),
    ],
)
def test_what_llama_cpp_does_not_have_is_an_error(change: dict[str, Any], name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        jc.save_checkpoint(tmp_path / "m.gguf", {name: np.ones((8, 8))}, "gguf", config=CONFIG | change)
    assert not list(tmp_path.iterdir())


def test_damaged_tokenizers_are_errors_of_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    good = 0
    for seed in range(400):
        draw = random.Random(seed)
        config, tokenizer = copy.deepcopy(CONFIG), copy.deepcopy(TOKENIZER)
        for _ in range(seed % 3):
            altered(draw, draw.choice((config, tokenizer)))
        file.write_text(json.dumps(tokenizer), "utf-8", "surrogatepass")
        try:
            good += gguf_model(config, [file], [QUERY, NORM]) is not None
        except ValueError as error:
            assert "\n" not in str(error)
    assert good > 133


def test_a_tokenizer_of_sentencepiece_has_scores(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    model = gguf_model(CONFIG, [tmp_path / "tokenizer.json"], [])
    assert model is not None
    for text in (b"tokenizer.ggml.scores", b"llama.block_count", "ab▁".encode(), b"[PAD7]"):
        assert text in model.keys.data
    scores = np.array([-2, -2, -2, -2, 0, -2, -1, -2], "<f4").tobytes()  # the first merge has the highest
    kinds = np.array([2, 3, 1, 1, 1, 6, 1, 5], "<i4").tobytes()
    assert scores in model.keys.data and kinds in model.keys.data
    jc.save_checkpoint(tmp_path / "m.gguf", {NORM: np.ones(8, np.float32)}, "gguf", config=CONFIG)
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert b"no_vocab" in file.read_keys().data
