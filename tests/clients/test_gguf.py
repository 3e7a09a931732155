"""GGUF beside llama.cpp: its package gguf writes and decodes, and its library loads models and generates."""

from __future__ import annotations

import ctypes
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jchop as jc
from jchop._checkpoints.gguf_models import _SPLIT_NAMES
from jchop._checkpoints.writer import convert_checkpoint

gguf = pytest.importorskip("gguf")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of other packages

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


def write_blocks(path: Path, blocks: np.ndarray, kind: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("shape", [(6, 512), (2, 3, 256)])
@pytest.mark.parametrize("name", HALVES)
def test_jchop_reads_every_type_as_gguf_does(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = blocks_of(name, shape)
    write_blocks(tmp_path / "m.gguf", blocks, kind)
    q = jc.load_checkpoint(tmp_path / "m.gguf")["w"]
    assert isinstance(q, jc.QArray) and q.shape == shape
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), gguf.dequantize(blocks, kind))


_OFFSET = "uint{}(group=32,scale=float16,zero_point=float)".format
_WRITTEN = [*(f"int{bits}(group=32,scale=float16)" for bits in (4, 5, 8)), _OFFSET(4), _OFFSET(5), "mxfp4", None]


@pytest.mark.parametrize("spec", _WRITTEN)
def test_gguf_reads_what_jchop_writes(spec: str | None, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    w = x if spec is None else jc.quantize(x, spec)
    jc.save_checkpoint(tmp_path / "m.gguf", {"w": w, "norm": x[0]}, "gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = gguf.dequantize(tensors["w"].data, tensors["w"].tensor_type)
    np.testing.assert_array_equal(found, x if spec is None else np.asarray(jc.dequantize(w)))
    np.testing.assert_array_equal(tensors["norm"].data, x[0])


DRAWS = {
    "normal": lambda rng: rng.standard_normal((64, 1024)),
    "heavy": lambda rng: rng.standard_t(2, (64, 1024)),
    "groups of zeros": lambda rng: rng.standard_normal((64, 1024)) * (np.arange(1024) // 32 % 3 != 0),
    "blocks of zeros": lambda rng: rng.standard_normal((64, 1024)) * (np.arange(1024) // 256 % 2),
    "positive": lambda rng: rng.random((64, 1024)),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_jchop_writes_the_bytes_that_llama_cpp_quantized(name: str, draw: str, weighted: bool, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    library = ctypes.CDLL(str(Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so"))
    quantize, pointer, size = library.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes, quantize.restype = [ctypes.c_int, pointer, pointer, size, size, size, pointer], ctypes.c_size_t
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
    x, importance = DRAWS[draw](rng).astype(np.float32), rng.uniform(0.1, 1.1, 1024).astype(np.float32)
    blocks = np.zeros((64, 4 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    weights = importance.ctypes.data if weighted else None
    assert quantize(kind, x.ctypes.data, blocks.ctypes.data, 0, 64, 1024, weights) == blocks.size
    write_blocks(tmp_path / "m.gguf", blocks, kind)
    q = jc.load_checkpoint(tmp_path / "m.gguf")["w"]
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), gguf.dequantize(blocks, kind))
    jc.save_checkpoint(tmp_path / "again.gguf", {"w": q}, "gguf")
    found = gguf.GGUFReader(tmp_path / "again.gguf").tensors[0]
    assert found.tensor_type == kind
    np.testing.assert_array_equal(found.data, blocks)


# -- whole models: transformers generates, llama.cpp generates from what jchop makes of the folder --------------------

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
#: The configuration of a model, and how its tokenizer splits texts; None for one of SentencePiece.
MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}, None),
    "llama 3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "attention_bias": True}, "llama-bpe"),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "gpt-2"),
    "mistral": ("MistralConfig", {}, "tekken"),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("Qwen3Config", {"head_dim": 64}, "qwen2"),
    "gemma": ("GemmaConfig", {"head_dim": 64}, None),
}
IDS = [1, 5, 77, 200, 31, 260, 270, 9, 150, 40, 41, 42] * 2
TEXT = "the cat isn't on the mat 1234 日"


def tokenizer_of(split: str | None, path: Path) -> Any:
    """A tokenizer with byte tokens, trained on a sentence."""
    tokenizers = pytest.importorskip("tokenizers")
    before, special = tokenizers.pre_tokenizers, ["<unk>", "<s>", "</s>"]
    if split is None:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(steps)
        first = {"special_tokens": special + [f"<0x{byte:02X}>" for byte in range(256)]}
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        pattern = {name: pattern for pattern, name in _SPLIT_NAMES.items()}.get(split)
        steps = [before.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
        if pattern is not None:
            steps.insert(0, before.Split(tokenizers.Regex(pattern), "isolated"))
        made.pre_tokenizer = before.Sequence(steps) if pattern is not None else steps[0]
        first = {"special_tokens": special, "initial_alphabet": before.ByteLevel.alphabet()}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, show_progress=False, **first)
    made.train_from_iterator(["the cat sat on the mat 1234 and the dog isn't in the house"] * 20, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # bytes are tokens like others
    path.write_text(json.dumps(data))
    return tokenizers.Tokenizer.from_file(str(path))


class Llama:
    """The server of llama.cpp for a file."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.warmup, options.n_gpu_layers = str(path), 128, False, 0
        options.cpuparams.n_threads, options.verbosity = 1, 0
        self.server = xllamacpp.Server(options)

    def ask(self, what: str, **fields: Any) -> list[int]:
        url, data = f"{self.server.listening_address}/{what}", json.dumps(fields).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    def ten_tokens(self) -> list[int]:
        return self.ask("completion", prompt=IDS, n_predict=10, top_k=1, return_tokens=True, ignore_eos=True)


def model_in(folder: Path, name: str, dtype: str = "float32") -> Any:
    """A random model of transformers, in a folder with a tokenizer; norms and biases are not those of the start."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, more, split = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.05)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model, tokenizer_of(split, folder / "tokenizer.json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_generates_from_what_jchop_makes_of_a_folder(name: str, dtype: str, tmp_path: Path) -> None:
    import torch

    model, tokenizer = model_in(tmp_path / "hf", name, dtype)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "gguf")
    llama = Llama(tmp_path / "m.gguf")
    assert llama.ask("tokenize", content=TEXT, add_special=False) == tokenizer.encode(TEXT).ids
    if dtype == "float32":
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        wanted = model.generate(torch.tensor([IDS]), **options, suppress_tokens=[2])[0, len(IDS) :].tolist()
        assert llama.ten_tokens() == wanted
    else:
        assert len(llama.ten_tokens()) == 10


@pytest.mark.parametrize("spec", ["int8(group=32,scale=float16)", "int4(group=32,scale=float16)"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_ten_tokens_are_the_same_after_a_conversion(name: str, spec: str, tmp_path: Path) -> None:
    """A folder with packed weights, a file of llama.cpp, and a file made of that."""
    model_in(tmp_path / "hf", name)
    pack = lambda name, x: jc.quantize(x, spec) if name.endswith("_proj.weight") else x  # noqa: E731
    convert_checkpoint(tmp_path / "hf", tmp_path / "packed", "jchop", change=pack)
    convert_checkpoint(tmp_path / "packed", tmp_path / "m.gguf", "gguf")
    convert_checkpoint(tmp_path / "m.gguf", tmp_path / "again.gguf", "gguf")
    assert Llama(tmp_path / "m.gguf").ten_tokens() == Llama(tmp_path / "again.gguf").ten_tokens()
    wanted = jc.load_checkpoint(tmp_path / "packed")["model.layers.1.self_attn.q_proj.weight"]
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = reader["blk.1.attn_q.weight"]
    rows = np.asarray(jc.dequantize(wanted))
    if name == "llama":  # the halves of each head beside each other
        rows = rows.reshape(4, 2, 16, 128).swapaxes(1, 2).reshape(128, 128)
    np.testing.assert_array_equal(gguf.dequantize(found.data, found.tensor_type), rows)
