"""The size of the public face: names, ways to do one thing, parameters and their order."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from test_public_names import MODULES, loads

from jchop.formats import ElementFormat, ScaledFormat

#: Those below `jchop.compat` repeat the names of other libraries.
PUBLIC_MODULES = ["jchop", *(m for m in MODULES if "._" not in m and not m.endswith("__main__") and m.count(".") < 3)]
#: The names of `jchop.math` that these have are known to their readers.
OF_JAX = (jnp, jax.nn, jnp.linalg, jax.lax, jax.scipy.special)
#: Where a name of a parameter stands: what a function works on, then how, then data, then the key.
PLACES = {
    **dict.fromkeys(("spec", "rules", "menu", "formats", "layout", "mode", "algorithm"), 1),
    **dict.fromkeys(("batches", "inputs", "steps", "like"), 2),
    "key": 3,
}  # fmt: skip
#: The functions that README, pages and examples call most.
MAIN = (
    "round_to_format", "nn.quantize", "emulate", "quantize", "quantize_fn", "dequantize", "ptq.gptq", "tensor_core",
    "load_checkpoint", "optim.adamw8bit", "nn.report", "optim.round_params", "torch.round_to_format", "save", "load",
    "nn.recipe", "save_checkpoint", "torch.quantize", "significant_digits", "ptq.rotate",
)  # fmt: skip
#: Words of other functions for what has one here.
OTHER_WORDS = {"run", "data", "folder", "filename", "directory", "example_inputs", "samples_data", "rng"}


def public() -> dict[str, Any]:
    """Every public name, without the formats and the names of JAX."""
    found = {}
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            value = getattr(module, attribute)
            known = name.startswith("jchop.math") and any(hasattr(other, attribute) for other in OF_JAX)
            if not known and not isinstance(value, ElementFormat | ScaledFormat):
                found[f"{name}.{attribute}".removeprefix("jchop.")] = value
    return found


FACE = public()
FUNCTIONS = {name: value for name, value in FACE.items() if inspect.isfunction(value)}


def ways(*words: str) -> set[str]:
    """The functions whose names have one of the words, those of twins of other libraries apart."""
    return {
        name
        for name in FUNCTIONS
        if not name.startswith(("compat.", "matlab.")) and set(re.split(r"[._]", name)) & set(words)
    }


def here(names: Iterable[str]) -> set[str]:
    """The names without those of torch, where it is missing."""
    return {name for name in names if loads("jchop.torch") or not name.startswith("torch.")}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, without those that pass arguments on (``*args``, ``**kwargs``)."""
    passed_on = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [each for each in inspect.signature(function).parameters.values() if each.kind not in passed_on]


def test_a_stranger_meets_few_names() -> None:
    assert len(FACE) <= 220, sorted(FACE)


def test_one_thing_has_few_ways() -> None:
    weights = ways("quantize") - {"optim.quantize_state"}  # states of optimizers are no weights
    listed = {"quantize", "quantize_fn", "nn.quantize", "torch.quantize", "distributed.quantize_parts"}
    assert weights == here(listed)
    rounds = ways("round") - {"ptq.sign_round", "plot.rounding_error"}
    assert rounds == here({
        "round_to_format", "round_file", "torch.round_to_format", "optim.round_updates", "optim.round_params",
    })  # fmt: skip
    # For functions `quantize_fn(...).calibrate`, for modules of Linen the method of the same name.
    assert ways("calibrate") == {"nn.calibrate"}


def test_the_main_functions_have_few_parameters() -> None:
    counts = {name: len(parameters(FUNCTIONS[name])) for name in here(MAIN)}
    assert sum(counts.values()) <= 110, counts


def test_parameters_stand_in_one_order_and_have_one_word() -> None:
    wrong = []
    for name, function in FUNCTIONS.items():
        if name.startswith(("compat.", "matlab.", "math.")) or name == "random_bits":  # in the order of jax.random
            continue
        positional = [p.name for p in parameters(function) if p.kind is p.POSITIONAL_OR_KEYWORD]
        places = [PLACES.get(parameter, 0) for parameter in positional]
        first = next((i for i, place in enumerate(places) if place), len(places))
        after = [place for place in places[first:] if place]
        if after != sorted(after) or "key" in positional[:-1]:
            wrong.append(f"{name}({', '.join(positional)})")
        wrong += [f"{name}: {p.name}=" for p in parameters(function) if p.name in OTHER_WORDS]
    assert not wrong
