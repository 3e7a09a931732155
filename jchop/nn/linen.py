"""Adapters of modules of Flax Linen."""

from __future__ import annotations

from jchop.nn._linen.lora import Adapted, add_lora, load_lora, merge_lora, save_lora, split_lora

__all__ = ["Adapted", "add_lora", "load_lora", "merge_lora", "save_lora", "split_lora"]
