"""Small models as strangers write them: the structure of public architectures at a width of 32.

No model of the zoo knows jchop. Each is written from its architecture, with the products in the places where people put
them: in layers of a library, in modules of their own, in the middle of a function.
"""

import importlib
import importlib.util

from zoo import (
    dict_models,
    dict_odd,
    linen_models,
    nnx_experts,
    nnx_gemma,
    nnx_llama,
    nnx_mamba,
    nnx_recurrent,
    nnx_structure,
    nnx_unet,
    nnx_vision,
    nnx_whisper,
)
from zoo.case import Case, draw, expand, paths

__all__ = ["CASES", "MISSING", "Case", "draw", "expand", "paths"]

_MODULES = (
    nnx_llama,
    nnx_gemma,
    nnx_experts,
    nnx_mamba,
    nnx_vision,
    nnx_whisper,
    nnx_recurrent,
    nnx_unet,
    nnx_structure,
    linen_models,
    dict_models,
    dict_odd,
)

#: Models that need a package that JAX and Flax do not bring: the package, and the file.
_OPTIONAL = {"equinox": "zoo.equinox_models", "haiku": "zoo.haiku_models"}

#: The packages of `_OPTIONAL` that are not installed: their models are absent from `CASES`.
MISSING = tuple(package for package in _OPTIONAL if importlib.util.find_spec(package) is None)

#: Every model, by its name.
CASES: dict[str, Case] = {case.name: case for module in _MODULES for case in module.CASES}
for _package in _OPTIONAL:
    if _package not in MISSING:
        CASES |= {case.name: case for case in importlib.import_module(_OPTIONAL[_package]).CASES}
