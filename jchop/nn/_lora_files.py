"""`save_lora` and `load_lora`: adapters alone, in files of the layout of PEFT."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._checks import brief
from jchop._files import open_regular, write_atomically
from jchop.nn._lora_rule import LoraRule
from jchop.nn._nnx.classes import Inputs
from jchop.nn._nnx.layers import placed_layers
from jchop.nn._nnx.lora import Adapted, adaptable, is_linear, put, split_lora, weight_of
from jchop.nn._nnx.programs import adapted_params, is_program, put_params, rules_of
from jchop.nn._trees.lora import load_to_tree, with_loaded
from jchop.nn._trees.modules import is_module
from jchop.storage import load_safetensors, save_safetensors
from jchop.storage._files.json import document, shown

__all__ = ["load_lora", "read_adapters", "save_lora", "write_adapters"]

_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FRONT, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
#: The longest configuration, in bytes.
_LONGEST = 1 << 20


def save_lora(folder: str | os.PathLike[str], model: Any) -> None:
    """Writes the adapters of a model alone to a folder: ``adapter_model.safetensors`` and ``adapter_config.json``.

    The layout is PEFT's: ``base_model.model.PATH.lora_A.weight`` has the shape (rank, in), ``lora_B``
    (out, rank), and ``adapter_config.json`` has ranks, alphas and the rate of dropout.

    Args:
        folder: a folder, which is created.
        model: as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for a model without adapters, or with several rates of dropout or stacks of layers, which PEFT does
            not have.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile, pathlib, jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> adapted = jc.nn.add_lora(model, jc.nn.LoraRule("*", rank=2), rngs=nnx.Rngs(1))
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> jc.nn.save_lora(folder, adapted)
        >>> again = jc.nn.load_lora(folder, model)
        >>> bool((again(jnp.ones((1, 8))) == adapted(jnp.ones((1, 8)))).all())
        True
    """
    write_adapters(folder, split_lora(model)[1])


def write_adapters(folder: str | os.PathLike[str], adapters: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the adapters that `split_lora` gives, by path."""
    tensors: dict[str, Any] = {}
    rules: dict[str, LoraRule] = {}
    for path, adapter in adapters.items():
        if adapter["lora_a"].ndim != 2:
            raise ValueError(
                f"the adapter of {path!r} is one of a stack, {list(adapter['lora_a'].shape)}, which a file of PEFT has "
                "not; save split_lora(model)[1] with jchop.save_safetensors"
            )
        name = path.replace("/", ".")
        tensors |= {f"{_FRONT}{name}{_A}": adapter["lora_a"].T, f"{_FRONT}{name}{_B}": adapter["lora_b"].T}
        rules[name] = adapter["rule"]
    rates = {rule.dropout for rule in rules.values()}
    if len(rates) > 1:
        raise ValueError(f"the adapters have dropout of {sorted(rates)}, and a file of PEFT has one rate")
    rank = Counter(rule.rank for rule in rules.values()).most_common(1)[0][0]
    alphas = {name: rule.factor * rule.rank for name, rule in rules.items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    config = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "bias": "none"}
    config |= {"r": rank, "lora_alpha": alpha, "lora_dropout": rates.pop(), "target_modules": sorted(rules)}
    config["rank_pattern"] = {name: rule.rank for name, rule in rules.items() if rule.rank != rank}
    config["alpha_pattern"] = {name: value for name, value in alphas.items() if value != alpha}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_safetensors(target / _TENSORS, tensors, metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(target / _CONFIG, lambda file: file.write(text.encode()))


def load_lora(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    rngs: nnx.Rngs | None = None,
    inputs: Inputs | None = None,
    fun: Any = None,
) -> Any:
    """A copy of a model with the adapters of a folder of `save_lora` or PEFT.

    Args:
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        model: of Flax NNX or Equinox, or parameters of `fun`, packed or not, without adapters; names in the file are
            paths of its layers.
        rngs: NNX: `flax.nnx.Rngs` for dropout. Default None: adapters have no dropout.
        inputs: Equinox and parameters: as in `add_lora`.
        fun: parameters: as in `add_lora`.

    Returns:
        The model, as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for damaged files, names that are no linear layer of the model, or other shapes.
        OSError: if a file cannot be read.

    Example:
        >>> import jchop as jc
        >>> jc.nn.load_lora("no folder", None)
        Traceback (most recent call last):
        TypeError: model=None must be a module of Flax NNX or Equinox; parameters need fun=
    """
    if not isinstance(model, nnx.Module):
        if fun is None and not is_module(model):
            raise TypeError(f"model={brief(model)} must be a module of Flax NNX or Equinox; parameters need fun=")
        return load_to_tree(folder, model, inputs, fun, read_adapters)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if inputs is not None or is_program(result):
        params = with_loaded(folder, adapted_params(result), adaptable(result, inputs), read_adapters)
        put_params(result, params, rules_of(result), rngs)
        return result
    layers = {path: placed.module for placed, _ in placed_layers(result) for path in placed.paths}
    linear = {path: layer for path, layer in layers.items() if is_linear(layer)}
    made: dict[int, Adapted] = {}
    for path, (a, b, rule) in read_adapters(folder, linear, lambda path: weight_of(linear[path]).shape[-2:]).items():
        if weight_of(linear[path]).ndim > 2:
            raise ValueError(f"{folder}: the layer {path!r} is a stack, which a file of PEFT has not")
        rule = rule if rngs is not None else replace(rule, dropout=0.0)
        dropout = nnx.Dropout(rule.dropout, rngs=rngs) if rule.dropout and rngs is not None else None
        made[id(linear[path])] = Adapted(linear[path], a, b, rule, dropout)
    return put(result, made)


def read_adapters(
    folder: str | os.PathLike[str], paths: Collection[str], shape_of: Callable[[str], tuple[int, ...]]
) -> dict[str, tuple[jax.Array, jax.Array, LoraRule]]:
    """A, B and the rule of each adapter in a folder, by the path of its layer.

    Args:
        folder: of `save_lora` or PEFT.
        paths: of the layers that may have one.
        shape_of: the shape of the weight of such a layer, of axes of inputs and then of outputs.
    """
    source = Path(folder)
    config, tensors = _config(source / _CONFIG), load_safetensors(source / _TENSORS)
    known = {path.replace("/", "."): path for path in paths}
    made = {}
    for name in sorted({name.removeprefix(_FRONT).removesuffix(_A).removesuffix(_B) for name in tensors}):
        a, b = (tensors.get(f"{_FRONT}{name}{end}") for end in (_A, _B))
        if a is None or b is None or name not in known:
            raise ValueError(f"{source / _TENSORS}: {shown(name)} has no A and B, or is no linear layer of the model")
        a, b = jnp.asarray(a).T, jnp.asarray(b).T
        made[known[name]] = a, b, _rule(source, name, shape_of(known[name]), a, b, config)
    return made


def _rule(source: Path, name: str, shape: tuple[int, ...], a: Any, b: Any, config: dict[str, Any]) -> LoraRule:
    sides = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) not in sides:
        raise ValueError(
            f"{source / _TENSORS}: A and B of {shown(name)} have shapes {list(a.shape)} and {list(b.shape)} "
            f"(transposed), and its weight {list(shape)}"
        )
    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(name, config.get("lora_alpha", a.shape[1])) if isinstance(patterns, dict) else None
    try:
        return LoraRule(name or "*", a.shape[1], alpha, config.get("lora_dropout") or 0.0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source / _CONFIG}: {error}") from None


def _config(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        data = file.read(_LONGEST)
    try:
        config = document(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a configuration: {error}") from None
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise ValueError(f"{path} is not of plain LoRA: peft_type={shown(config.get('peft_type'))}, or DoRA or rsLoRA")
    return config
