"""`report`: the form, bytes and bits of each parameter of a module."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from jchop._common.checks import short_repr
from jchop._common.text import TableOrLine, Tables
from jchop.torch._packed import PackedTensor, packed_parameters
from jchop.torch._quantize import parameter_layers, parameter_names
from jchop.torch._round import Quantizer


@dataclass(frozen=True)
class ParameterRow:
    """One parameter.

    Args:
        path: its path in the module.
        layer: the class of its layer.
        stored: the spec of its codes if it is packed, else its dtype.
        rounds: the spec to which it is rounded at each use; empty if it is packed or not rounded.
        shape: its shape.
        nbytes: its bytes, with scales and zero points; 0 if an earlier row has the same memory (tied parameters).
    """

    path: str
    layer: str
    stored: str
    rounds: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits for each element; NaN if there are none."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else math.nan


@dataclass(frozen=True)
class ModuleReport(Tables):
    """The parameters of a module. Its text is a table.

    Args:
        rows: a `ParameterRow` for each parameter.
    """

    rows: tuple[ParameterRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(row.nbytes for row in self.rows)

    @property
    def bits(self) -> float:
        """Bits for each element of all parameters; NaN if there are none."""
        count = sum(math.prod(row.shape) for row in self.rows if row.nbytes)
        return 8 * self.nbytes / count if count else math.nan

    _align = "<<<<<>>"

    def _parts(self) -> list[TableOrLine]:
        head = ("path", "layer", "stored", "rounds", "shape", "bytes", "bits")
        body = [
            (
                row.path,
                row.layer,
                row.stored,
                row.rounds or "-",
                " x ".join(map(str, row.shape)) or "scalar",
                f"{row.nbytes:,}",
                f"{row.bits:.4g}",
            )
            for row in self.rows
        ]
        return [[head, *body, ("all", "", "", "", "", f"{self.nbytes:,}", f"{self.bits:.4g}")]]


def report(module: nn.Module) -> ModuleReport:
    """The form, bytes and bits of each parameter of a module, packed, rounded at each use, or neither.

    Args:
        module: any module, as from `jchop.torch.quantize`.

    Returns:
        A report whose text is a table. Buffers other than packed parameters are not in it.

    Raises:
        TypeError: if `module` is not a module.

    Example:
        >>> import torch, jchop as jc
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.LayerNorm(8))
        >>> print(jc.torch.report(jc.torch.quantize(model, {"0": dict(weight="nvfp4")}, mode="weight_only")))
        path      layer         stored   rounds  shape   bytes   bits
        0.weight  PackedLinear  nvfp4    -       8 x 64    292  4.562
        0.bias    PackedLinear  float32  -       8          32     32
        1.weight  LayerNorm     float32  -       8          32     32
        1.bias    LayerNorm     float32  -       8          32     32
        all                                                388  5.791
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={short_repr(module)} must be a torch.nn.Module")
    earlier_ids: set[int] = set()
    rows = []
    for path, layer, _ in parameter_layers(module):
        parameters = {**packed_parameters(layer), **{name: _parameter(layer, name) for name in parameter_names(layer)}}
        for name, value in parameters.items():
            full_path = f"{path}.{name}" if path else name
            nbytes = 0 if id(value) in earlier_ids else value.nbytes
            earlier_ids.add(id(value))
            rows.append(
                ParameterRow(full_path, type(layer).__name__, *_forms(layer, name, value), tuple(value.shape), nbytes)
            )
    return ModuleReport(tuple(rows))


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    """A parameter as it is kept; for a parametrization of several parts its value."""
    if parametrize.is_parametrized(layer, name) and hasattr(layer.parametrizations[name], "original"):  # type: ignore[index]
        return layer.parametrizations[name].original  # type: ignore[index]
    return getattr(layer, name)


def _forms(layer: nn.Module, name: str, value: PackedTensor | torch.Tensor) -> tuple[str, str]:
    """The stored form of a parameter, and the specs to which it is rounded at each use."""
    if isinstance(value, PackedTensor):
        return value.spec, ""
    chain = layer.parametrizations[name] if parametrize.is_parametrized(layer, name) else ()  # type: ignore[index]
    specs = (part.rounding for part in chain if isinstance(part, Quantizer))
    return str(value.dtype).removeprefix("torch."), ", ".join(plan.spec for plan in specs if plan is not None)
