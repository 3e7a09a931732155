"""`sensitivity`: the error of a model's output when one layer at a time is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jchop._common.checks import as_iterable, check_choice, short_repr
from jchop._common.decibels import decibels, format_decibels
from jchop._common.text import RowReport, TableOrLine
from jchop._quantized.products.rule import Rule
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat, ScaledFormat
from jchop.nn._nnx.layers import nnx_layers
from jchop.nn._nnx.quantize import quantize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Sensitivity", "SensitivityRow", "sensitivity"]

_SENSITIVITY_TENSORS = ("weight", "activation")
_ALL_LAYERS = "all"


@dataclass(frozen=True)
class SensitivityRow:
    """One layer in one format.

    Args:
        path: its path in the model; ``"all"`` for one rule that has all layers.
        layer: its class; empty for all layers.
        format: the spec, as text.
        snr: signal-to-noise ratio of the model's output in dB; infinite without an error, -infinite if an output of the
            rounded model is not finite.
    """

    path: str
    layer: str
    format: str
    snr: float


@dataclass(frozen=True)
class Sensitivity(RowReport):
    """The layers of a model by formats. Its text is a table of decibels: the lowest layer of a column matters most.

    Args:
        rows: a `SensitivityRow` for each layer and format, layer by layer, and for one rule that has all layers.
        formats: the formats, as texts, in their order.
    """

    rows: tuple[SensitivityRow, ...]
    formats: tuple[str, ...]

    _infinities_as_text = True

    def plot(self, *, title: str = "Layers rounded one at a time") -> Figure:
        """`jchop.plot.sensitivity` of it; needs matplotlib."""
        from jchop.plot import sensitivity as draw

        return draw(self, title=title)

    @property
    def _align(self) -> str:
        return "<<" + ">" * len(self.formats)

    def _parts(self) -> list[TableOrLine]:
        snr_by_layer: dict[tuple[str, str], dict[str, float]] = {}
        for row in self.rows:
            snr_by_layer.setdefault((row.path, row.layer), {})[row.format] = row.snr
        head = ("path", "layer", *self.formats)
        body = [(*name, *(format_decibels(snr[fmt]) for fmt in self.formats)) for name, snr in snr_by_layer.items()]
        return [[head, *body], "decibels of the output, one layer rounded; the last line has one rule for all layers"]


def sensitivity(
    model: nnx.Module,
    batches: Iterable[Any],
    formats: Sequence[Spec | ElementFormat | ScaledFormat | str] | Spec | ElementFormat | ScaledFormat,
    *,
    tensors: Sequence[str] = ("weight",),
    run: Callable[[Any, Any], Any] | None = None,
    rngs: nnx.Rngs | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """How much the output of a model suffers when one layer is rounded: for each layer, and each format.

    The signal-to-noise ratio is 10 log10(Σ y² / Σ (y - z)²) in dB over all batches: y are the outputs of the model, z
    those of the model with a rule for one layer alone. A last row for each format has one rule for all layers, which
    leaves norms as they are (`jchop.Rule`). Layers with a low ratio should keep more bits.

    Args:
        model: a module of Flax NNX that is not quantized; it is not changed.
        batches: inputs of the model, as of `calibrate`.
        formats: what the layer is rounded to, one or several; scaled formats have their scales along the inputs of a
            layer.
        tensors: the tensors of the layer that are rounded: ``"weight"``, ``"activation"``, or both. Default
            ``("weight",)``.
        run: function that calls the model on a batch and returns arrays. Default ``model(batch)``.
        rngs: with a stream ``"rounding"``, for stochastic formats. Default None.
        progress: function of the number of completed layers and formats, and of all.

    Returns:
        A `Sensitivity`: its `str` is a table; `as_dict`, `to_json` and `plot` show it in other ways.

    Raises:
        TypeError: for a model that is no module of Flax NNX.
        ValueError: without batches, formats, tensors or layers that can be rounded, and for a batch with an output that
            is not finite.

    Example:
        >>> import jax, jchop as jc
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
        >>> found = jc.nn.sensitivity(model, [jax.random.normal(jax.random.key(2), (16, 8))], ["int8", "int4"])
        >>> [(row.path, row.format) for row in found.rows if row.snr < 30]
        [('layers/0', 'int4'), ('layers/2', 'int4'), ('all', 'int4')]
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model={short_repr(model)} must be a module of Flax NNX")
    tensor_names = tuple(check_choice("tensors", name, _SENSITIVITY_TENSORS) for name in tensors)
    specs = [as_spec(fmt, scaled=True) for fmt in as_iterable(formats)]
    data = list(batches)
    layers = _layer_classes(model, tensor_names)
    for name, value in (("tensors", tensor_names), ("formats", specs), ("batches", data), ("model", layers)):
        if not value:
            raise ValueError(f"{name}: there must be at least one" + (" layer to round" if value is layers else ""))
    call = nnx.jit(run if run is not None else lambda model, batch: model(batch))
    exact = [_flat_outputs(call(model, batch)) for batch in data]
    if not all(np.isfinite(y).all() for y in exact):
        raise ValueError("batches: an output of the model is not finite")
    rows, total = [], (len(layers) + 1) * len(specs)
    for path, name in [*layers.items(), (_ALL_LAYERS, "")]:
        pattern = " ".join(layers) if path == _ALL_LAYERS else path
        for spec in specs:
            rounded_model = quantize(model, _tensor_rule(pattern, tensor_names, spec), rngs=rngs)
            outputs = [_flat_outputs(call(rounded_model, batch)) for batch in data]
            rows.append(SensitivityRow(path, name, str(spec), _output_snr(exact, outputs)))
            if progress is not None:
                progress(len(rows), total)
    return Sensitivity(tuple(rows), tuple(dict.fromkeys(map(str, specs))))


def _tensor_rule(path: str, tensors: Sequence[str], spec: Spec) -> Rule:
    return Rule(
        path, weight=spec if "weight" in tensors else None, activation=spec if "activation" in tensors else None
    )


def _layer_classes(model: nnx.Module, tensors: Sequence[str]) -> dict[str, str]:
    """The classes of the layers that have one of the tensors, by path."""
    candidates = {path: (layer, kind) for path, layer, kind in nnx_layers(model) if kind is not None}
    return {
        path: type(layer).__name__
        for path, (layer, kind) in candidates.items()
        if set(tensors) <= set(kind.fields(layer))
    }


def _flat_outputs(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def _output_snr(exact: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    if not all(np.isfinite(z).all() for z in outputs):
        return -math.inf
    noise = math.fsum(float(np.sum((y - z) ** 2)) for y, z in zip(exact, outputs, strict=True))
    signal = math.fsum(float(np.sum(y**2)) for y in exact)
    return decibels(signal, noise)
