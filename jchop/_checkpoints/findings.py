"""Faults of checkpoints: numbers, scales, shapes that contradict the configuration, missing heads and layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jchop._checkpoints.checkpoint import Checkpoint
from jchop._checkpoints.row import fact_field
from jchop._checkpoints.table import CONFIG_FIELD
from jchop._storage._array import QArray
from jchop._storage._quantize import dequantize


class Finding(NamedTuple):
    """A fault of a checkpoint: the array or the file that has it, and a sentence."""

    array: str
    fault: str


#: Models of Hugging Face whose matrices have the shapes below.
_KNOWN_MODELS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gpt_oss",
)  # fmt: skip
#: The axes of their matrices (out, in), as sizes of `_model_sizes`; an empty text is any size.
_MODEL_SHAPES: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": ("vocab", "hidden"), "lm_head": ("vocab", "hidden"), "q_proj": ("heads", "hidden"),
    "k_proj": ("kv_heads", "hidden"), "v_proj": ("kv_heads", "hidden"), "o_proj": ("hidden", "heads"),
    "gate_proj": ("mlp", "hidden"), "up_proj": ("mlp", "hidden"), "down_proj": ("hidden", "mlp"),
    "input_layernorm": ("hidden",), "post_attention_layernorm": ("hidden",), "model.norm": ("hidden",),
}  # fmt: skip
#: The lists of a configuration that name weights which are not quantized.
_SKIP_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")
#: Scales of activations and caches, which are arrays of their own.
_SCALE_NAME = re.compile(r"(^|[._])(input|output|weight|k|v|q)_scale$")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def checkpoint_findings(source: Checkpoint) -> Iterator[Finding]:
    """The faults of a checkpoint, array by array, each held in memory alone."""
    sizes = _model_sizes(source.config)
    for name, item in source.items.items():
        try:
            value = source.read(name)
            faults = [*_value_faults(name, value), *_scale_faults(source.scales(name))]
        except ValueError as error:
            yield Finding(name, str(error).removeprefix(f"{source.path}: "))
            continue
        expected = _expected_shape(name, sizes)
        differs = any(size not in (None, n) for size, n in zip(expected, item.shape, strict=False))
        if differs and len(expected) == len(item.shape):
            wanted = " x ".join("any" if size is None else str(size) for size in expected)
            faults.append(f"its shape {list(item.shape)} is not the {wanted} of config.json")
        for fault in faults:
            yield Finding(name, fault)
    for fault in [*_head_faults(source), *_layer_faults(source)]:
        yield Finding("config.json", fault)


def _value_faults(name: str, value: QArray | np.ndarray) -> Iterator[str]:
    numbers = np.asarray(dequantize(value)) if isinstance(value, QArray) else value
    if not np.issubdtype(numbers.dtype, np.integer) and numbers.dtype not in (np.bool_, np.dtype("O")):
        numbers = numbers if np.issubdtype(numbers.dtype, np.inexact) else numbers.astype(np.float32)
        if wrong := int(numbers.size - np.isfinite(numbers).sum()):
            yield f"{wrong} of {numbers.size} numbers are NaN or infinite"
        if _SCALE_NAME.search(name) and (nothing := int((numbers == 0).sum())):
            yield f"{nothing} of {numbers.size} scales are zero"


def _scale_faults(scales: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Scales of zero, which lose the numbers of their groups; a scale of an NVFP4 tensor that looks inverted."""
    for part, scale in scales.items():
        numbers = scale.astype(np.float32)
        if nothing := int((numbers == 0).sum()):
            yield f"{nothing} of {numbers.size} scales in {part} are zero"
    divisor, factor = scales.get("weight_global_scale"), scales.get("weight_scale_2")
    whole = factor if divisor is None else divisor
    if whole is not None and "weight_scale" in scales:
        # A tensor's scale is its largest number over 6 * 448, so it is above 1 only for weights beyond 2,688.
        number = float(whole.astype(np.float32).reshape(-1)[0])
        if (number < 1) if divisor is not None else (number > 1):
            role, part = ("divisor", "weight_global_scale") if divisor is not None else ("factor", "weight_scale_2")
            yield f"{part} {number:.4g} is a {role}, and looks inverted: 1 / {part} is usual"


def _model_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of axes that a configuration has, for the models whose shapes are known."""
    if config.get("model_type") not in _KNOWN_MODELS:
        return {}

    def field(name: str, default: int | None = None) -> int | None:
        return fact_field(config, name, int, default)

    hidden, heads = field("hidden_size"), field("num_attention_heads")
    head = field("head_dim", hidden // heads if hidden and heads else None)
    kv_heads = field("num_key_value_heads", heads)
    sizes = {
        "vocab": field("vocab_size"), "hidden": hidden, "heads": heads and head and heads * head,
        "kv_heads": kv_heads and head and kv_heads * head, "mlp": field("intermediate_size"),
    }  # fmt: skip
    return {name: size for name, size in sizes.items() if size}


def _expected_shape(name: str, sizes: Mapping[str, int]) -> Sequence[int | None]:
    module = name.removesuffix(".weight")
    end = next((end for end in _MODEL_SHAPES if f".{module}".endswith(f".{end}")), None)
    if end is None or module == name or not sizes:
        return ()
    # Experts may have sizes of their own.
    return [None if axis == "mlp" and "expert" in name else sizes.get(axis) for axis in _MODEL_SHAPES[end]]


def _head_faults(source: Checkpoint) -> Iterator[str]:
    """What is wrong with the output head of a model, if its config does not tie it to the embedding."""
    names = [name for name in source.items if f".{name}".endswith(f".{_EMBEDDING}")]
    if not names or any(f".{name}".endswith(f".{_HEAD}") for name in source.items):
        return
    if source.config.get("tie_word_embeddings") is False:
        yield f"there is no {_HEAD}, and tie_word_embeddings is false"
        return
    quantization = fact_field(source.config, CONFIG_FIELD, dict, {})
    for field in _SKIP_LISTS:
        listed = quantization.get(field)
        if isinstance(listed, list) and listed and not any("lm_head" in str(name) for name in listed):
            yield f"{field} lacks lm_head, which has no tensor: a loader would expect a quantized one"


def _layer_faults(source: Checkpoint) -> Iterator[str]:
    count = source.config.get("num_hidden_layers")
    numbers = {int(found[1]) for name in source.items if (found := re.match(r"model\.layers\.(\d{1,6})\.", name))}
    if type(count) is int and 0 < count < 1 << 20 and numbers:
        missing = [number for number in range(count) if number not in numbers]
        if missing:
            yield f"{len(missing)} of {count} layers have no tensor, the first is model.layers.{missing[0]}"
