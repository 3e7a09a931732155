"""`save_lora` and `load_lora`: adapters alone, in files of the layout of PEFT."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from flax import nnx

from jchop._common.checks import short_repr
from jchop.nn._nnx.layers import layer_entries
from jchop.nn._nnx.lora import (
    Adapted,
    is_linear_layer,
    linear_weight,
    nnx_adapter_targets,
    replace_with_adapters,
    split_lora,
)
from jchop.nn._nnx.programs import is_nnx_program, params_with_adapters, program_rules, set_program_params
from jchop.nn._shared.peft_files import read_adapters, write_adapters
from jchop.nn._shared.program_classes import ExampleInputs
from jchop.nn._trees.equinox_modules import is_equinox_module
from jchop.nn._trees.lora import load_lora_to_tree, tree_with_file_adapters

__all__ = ["load_lora", "save_lora"]


def save_lora(folder: str | os.PathLike[str], model: Any) -> None:
    """Writes the adapters of a model alone to a folder: ``adapter_model.safetensors`` and ``adapter_config.json``.

    The layout is PEFT's: ``base_model.model.PATH.lora_A.weight`` has the shape (rank, in), ``lora_B``
    (out, rank), and ``adapter_config.json`` has ranks, alphas and the rate of dropout. PEFT computes the same factors.

    Args:
        folder: a folder, which is created.
        model: as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for a model without adapters, or with several rates of dropout or stacks of layers, which PEFT does
            not have. For a folder that another call writes to.
        OSError: if a file cannot be written; the old files stay.

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


def load_lora(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    rngs: nnx.Rngs | None = None,
    inputs: ExampleInputs | None = None,
    fun: Any = None,
) -> Any:
    """A copy of a model with the adapters of a folder of `save_lora` or PEFT: LoRA and rank-stabilized LoRA.

    As in PEFT, a key of ``rank_pattern`` or ``alpha_pattern`` is a regular expression of the end of a path, and the
    first one that matches decides.

    Args:
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        model: of Flax NNX or Equinox, or parameters of `fun`, packed or not, without adapters; names in the file are
            paths of its layers.
        rngs: NNX: `flax.nnx.Rngs` for dropout. Default None: adapters have no dropout.
        inputs: as in `add_lora`.
        fun: parameters: as in `add_lora`.

    Returns:
        The model, as from `jchop.nn.add_lora`.

    Raises:
        ValueError: for damaged files, names that are no linear layer of the model, or other shapes; for adapters that
            compute something else, such as DoRA, or belong to a base that PEFT changes, such as PiSSA.
        OSError: if a file cannot be read.

    Example:
        >>> import jchop as jc
        >>> jc.nn.load_lora("no folder", None)
        Traceback (most recent call last):
        TypeError: model=None must be a module of Flax NNX or Equinox; parameters need fun=
    """
    if not isinstance(model, nnx.Module):
        if fun is None and not is_equinox_module(model):
            raise TypeError(f"model={short_repr(model)} must be a module of Flax NNX or Equinox; parameters need fun=")
        return load_lora_to_tree(folder, model, inputs, fun, read_adapters)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    if inputs is not None or is_nnx_program(result):
        params = tree_with_file_adapters(
            folder, params_with_adapters(result), nnx_adapter_targets(result, inputs), read_adapters
        )
        set_program_params(result, params, program_rules(result), rngs)
        return result
    layers = {path: entry.module for entry, _ in layer_entries(result) for path in entry.paths}
    linear_layers = {path: layer for path, layer in layers.items() if is_linear_layer(layer)}
    adapters: dict[int, Adapted] = {}
    for path, (a, b, rule) in read_adapters(
        folder, linear_layers, lambda path: linear_weight(linear_layers[path]).shape[-2:]
    ).items():
        if linear_weight(linear_layers[path]).ndim > 2:
            raise ValueError(f"{folder}: the layer {path!r} is a stack, which a file of PEFT has not")
        rule = rule if rngs is not None else replace(rule, dropout=0.0)
        dropout = nnx.Dropout(rule.dropout, rngs=rngs) if rule.dropout and rngs is not None else None
        adapters[id(linear_layers[path])] = Adapted(linear_layers[path], a, b, rule, dropout)
    return replace_with_adapters(result, adapters)
