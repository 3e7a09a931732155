"""Language models of Hugging Face in GGUF: keys, the tokenizer and the names of tensors, as llama.cpp reads them.

Definition: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py`, `gguf-py/gguf/constants.py` and
`gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jchop._checkpoints.gguf import GGUFKeys, gguf_keys_of
from jchop._checkpoints.row import fact_field
from jchop._common.checks import check, place_in_errors
from jchop._common.files import json_object, open_regular_file, short_text
from jchop._storage._array import QArray


class _Architecture(NamedTuple):
    """A model of llama.cpp.

    Args:
        name: in the keys.
        swapped: whether the rows of queries and keys of a head have the halves of a rotated pair beside each other.
        norm_offset: added to the weights of norms.
        act: the activation that it has.
    """

    name: str
    swapped: bool = False
    norm_offset: int = 0
    act: tuple[str, ...] = ("silu",)


#: The architectures by the ``model_type`` of a configuration.
_ARCHITECTURES = {
    "llama": _Architecture("llama", swapped=True),
    "mistral": _Architecture("llama", swapped=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma": _Architecture("gemma", norm_offset=1, act=("gelu_pytorch_tanh", "gelu")),
}
#: The names of modules in GGUF.
_MODULE_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
#: Changes an array before it is written.
_Change = Callable[[Any], Any]


class GGUFModel(NamedTuple):
    """A model in GGUF: its keys, the new names and changes of its arrays by their names, and further arrays."""

    keys: GGUFKeys
    arrays: dict[str, tuple[str, _Change]]
    more: dict[str, np.ndarray]


def gguf_model(config: Mapping[str, Any], files: Sequence[Path], names: Sequence[str]) -> GGUFModel | None:
    """A model of Hugging Face in GGUF; None for an architecture that is not known.

    Args:
        config: the fields of ``config.json``.
        files: beside it, such as ``tokenizer.json``.
        names: of its arrays.

    Raises:
        ValueError: for an array, a field or a tokenizer that has no form in GGUF.
    """
    architecture = _ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None:
        return None
    with place_in_errors("not written for llama.cpp (save_checkpoint without config= writes arrays alone)"):
        heads = _positive_int(config, "num_attention_heads")
        kv_heads = _positive_int(config, "num_key_value_heads", heads)
        width = _positive_int(config, "head_dim", _positive_int(config, "hidden_size") // heads)
        act = config.get("hidden_act", config.get("hidden_activation"))
        known = act is None or act in architecture.act
        check(known, f"hidden_act={short_text(act)} is not that of {architecture.name}")
        keys, more = _model_keys(config, architecture.name, heads, kv_heads, width)
        keys |= _tokenizer_keys({path.name: path for path in files}, config)
        arrays = {name: _gguf_array(name, architecture, {"q": heads, "k": kv_heads}) for name in names}
        return GGUFModel(gguf_keys_of(keys), arrays, more)


def _positive_int(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = fact_field(config, name, int, default)
    check(0 < value < 1 << 31, f"{name}={short_text(value)} must be an integer above zero")
    return value


def _positive_float(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fact_field(fields, name, (int, float), default)
    check(0 < value < 1e38, f"{name}={short_text(value)} must be a finite number above 0")
    return float(value)


def _model_keys(
    config: Mapping[str, Any], name: str, heads: int, kv_heads: int, width: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys of a model, and its arrays that checkpoints of Hugging Face do not have."""
    own: dict[str, Any] = {
        "context_length": _positive_int(config, "max_position_embeddings"),
        "embedding_length": _positive_int(config, "hidden_size"),
        "block_count": _positive_int(config, "num_hidden_layers"),
        "feed_forward_length": _positive_int(config, "intermediate_size"),
        "vocab_size": _positive_int(config, "vocab_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": _positive_float(config, "rms_norm_eps", 1e-6),
        "rope.dimension_count": width,
    }
    rope = fact_field(config, "rope_parameters", dict) or fact_field(config, "rope_scaling", dict, {})
    own["rope.freq_base"] = base = _positive_float(rope, "rope_theta", _positive_float(config, "rope_theta", 1e4))
    kind, more = rope.get("rope_type", rope.get("type", "default")), dict[str, np.ndarray]()
    if kind == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": _positive_float(rope, "factor", 1)}
    elif kind == "llama3":
        more["rope_freqs.weight"] = _rope_factors(rope, base, width)
    known = kind in ("default", "linear", "llama3") and rope.get("partial_rotary_factor", 1) == 1
    words = "are not written; those of rope_type default, linear and llama3 are"
    check(known, f"rotary embeddings {short_text(rope)} {words}")
    general = {"general.architecture": name, "general.quantization_version": 2}
    return general | {f"{name}.{key}": value for key, value in own.items()}, more


def _rope_factors(rope: Mapping[str, Any], base: float, width: int) -> np.ndarray:
    """The factors by which the wavelengths of a model of Llama 3 grow."""
    fields = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    factor, low, high, length = (_positive_float(rope, name, value) for name, value in fields.items())
    check(low < high, f"rotary embeddings {short_text(rope)} are not those of Llama 3")
    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    share = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _gguf_array(name: str, architecture: _Architecture, heads: Mapping[str, int]) -> tuple[str, _Change]:
    """The name of an array in GGUF, and its change."""
    module, _, end = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d{1,4})\.(.*)", module)
    new = _MODULE_NAMES.get(module) if layer is None else _LAYER_NAMES.get(layer[2])
    known = new is not None and end in ("weight", "bias")
    check(known, f"tensor {short_text(name)} has no name in {architecture.name}")
    new = f"{new if layer is None else f'blk.{layer[1]}.{new}'}.{end}"
    swaps = architecture.swapped and re.search(r"\.([qk])_proj$", module)
    offset = architecture.norm_offset if module.endswith("norm") else 0

    def change(value: Any) -> Any:
        if swaps:
            value = value[_swapped_rows(value.shape[0], heads[swaps[1]])]
        if not isinstance(value, QArray) and value.ndim == 1:  # llama.cpp has these in binary32 alone
            value = value.astype(np.float32) + np.float32(offset)
        return value

    return new, change


def _swapped_rows(rows: int, heads: int) -> np.ndarray:
    """The rows of heads whose numbers i and i + n / 2 are rotated together, as pairs."""
    check(rows % (2 * heads) == 0, f"{rows} rows are no pairs of {heads} heads")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


# -- the tokenizer -----------------------------------------------------------------------------------------------------

#: The longest file of a tokenizer, in bytes.
_LONGEST_TOKENIZER = 1 << 26
#: The kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_MIXED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
#: The names of the patterns by which texts are split before merges.
_SPLIT_NAMES = {
    rf"{_ENGLISH}{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_ENGLISH}{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_MIXED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}


def _tokenizer_keys(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the tokenizer; of a model without one, that it has none."""
    if "tokenizer.json" not in files:
        return {"tokenizer.ggml.model": "no_vocab"}
    data = json_object(_text_of_file(files["tokenizer.json"]))
    options = json_object(_text_of_file(files["tokenizer_config.json"])) if "tokenizer_config.json" in files else {}
    with place_in_errors("tokenizer.json"):
        keys = _vocabulary(data, _positive_int(config, "vocab_size"))
        first, last = _template_ends(fact_field(data, "post_processor", dict, {}))
    for name, end in (("add_bos_token", first), ("add_eos_token", last)):
        keys[f"tokenizer.ggml.{name}"] = fact_field(options, name, bool, end)
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = config.get(name)
        value = value[0] if isinstance(value, list) and value else value  # the others end a text, too
        if value is not None:
            check(type(value) is int and 0 <= value < len(keys["tokenizer.ggml.tokens"]), f"{name}={value} is no token")
            keys[f"tokenizer.ggml.{key}_token_id"] = value
    template = options.get("chat_template")
    template = _text_of_file(files["chat_template.jinja"]) if "chat_template.jinja" in files else template
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _text_of_file(path: Path) -> str:
    with open_regular_file(path) as file:
        data = file.read(_LONGEST_TOKENIZER + 1)
    check(len(data) <= _LONGEST_TOKENIZER, f"{path} is longer than {_LONGEST_TOKENIZER} bytes")
    with place_in_errors(f"{path} is not text"):
        return data.decode("utf-8")


def _vocabulary(data: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The keys of tokens and merges."""
    model = fact_field(data, "model", dict, {})
    vocabulary, merges = fact_field(model, "vocab", dict, {}), fact_field(model, "merges", list, [])
    check(model.get("type") == "BPE", f"a model of type {short_text(model.get('type'))} is not written; BPE is")
    check(size <= 1 << 20, f"vocab_size={size} is above 2^20")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    ok = all(isinstance(pair, list) and len(pair) == 2 and all(type(part) is str for part in pair) for pair in pairs)
    check(ok, "a merge is no pair of texts")
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], np.full(size, _UNUSED, np.int32)

    def add(text: Any, number: Any, kind: int) -> None:
        ok = type(text) is str and type(number) is int and 0 <= number < size
        check(ok, f"the token {short_text(text)} has the number {short_text(number)}, and vocab_size={size}")
        tokens[number], kinds[number] = text, kind

    bytes_too = fact_field(model, "byte_fallback", bool, False)  # of SentencePiece
    for text, number in vocabulary.items():
        add(text, number, _BYTE if bytes_too and re.fullmatch(r"<0x[0-9A-F]{2}>", text) else _NORMAL)
    for entry in fact_field(data, "added_tokens", list, []):
        check(isinstance(entry, dict), "an added token is no object")
        add(entry.get("content"), entry.get("id"), _CONTROL if entry.get("special") else _USER_DEFINED)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if not bytes_too:
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _split_name(data.get("pre_tokenizer"))}
        return keys | {"tokenizer.ggml.merges": [" ".join(pair) for pair in pairs]}
    unknown = vocabulary.get(fact_field(model, "unk_token", str))
    if type(unknown) is int:
        kinds[unknown] = _UNKNOWN
        keys["tokenizer.ggml.unknown_token_id"] = unknown
    places = {text: place for place, text in reversed([*enumerate(map("".join, pairs))])}
    scores = np.array([-places.get(text, len(pairs)) for text in tokens], np.float32)
    parts = ("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")
    before = [step for name, field in parts for step in _tokenizer_steps(data.get(name), field)]
    metaspaces = [step.get("prepend_scheme", "always") for step in before if step.get("type") == "Metaspace"]
    space = any(step.get("type") == "Prepend" for step in before) or any(scheme != "never" for scheme in metaspaces)
    keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}
    return keys | {"tokenizer.ggml.add_space_prefix": space}


def _tokenizer_steps(part: Any, field: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer."""
    part = part if isinstance(part, dict) else {}
    steps = fact_field(part, field, list, []) if part.get("type") == "Sequence" else [part]
    return [step for step in steps if isinstance(step, dict)]


def _split_name(part: Any) -> str:
    """The name of the pattern by which texts are split."""
    steps = _tokenizer_steps(part, "pretokenizers")
    patterns = [fact_field(step, "pattern", dict, {}).get("Regex") for step in steps if step.get("type") == "Split"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    name = _SPLIT_NAMES.get(patterns[0]) if kinds == ["Split", "ByteLevel"] and type(patterns[0]) is str else None
    known = ", ".join(["gpt-2", *_SPLIT_NAMES.values()])
    check(name is not None, f"its pre_tokenizer {short_text(part)} is not known; known are those of {known}")
    assert name is not None
    return name


def _template_ends(part: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a special token is before a text, and after it."""
    steps = [step for step in _tokenizer_steps(part, "processors") if step.get("type") == "TemplateProcessing"]
    pieces = fact_field(steps[0], "single", list, []) if steps else []
    special = [isinstance(piece, dict) and "SpecialToken" in piece for piece in pieces]
    return (special[0], special[-1]) if special else (False, False)
