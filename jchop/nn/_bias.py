"""`correct_biases`: subtracts the mean errors of rounding from the biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jchop._common.checks import short_repr
from jchop._quantized.program.call import enumerate_batches
from jchop.nn._calibrate import check_run_arguments
from jchop.nn._folding import set_layer_bias
from jchop.nn._nnx.layers import QUANTIZED_CLASSES, nnx_layers
from jchop.nn._nnx.programs import is_nnx_program
from jchop.nn._nnx.variables import QuantizedParam
from jchop.nn._ratios import LayerCall, watch_layer_calls

T = TypeVar("T", bound=nnx.Module)

#: Layers with one bias for each channel, the last axis of their results.
_BIAS_LAYERS = (nnx.Linear, nnx.Conv, nnx.ConvTranspose)
_QUANTIZED_BIAS_LAYERS = tuple(QUANTIZED_CLASSES[base] for base in _BIAS_LAYERS)


def correct_biases(
    model: nnx.Module,
    quantized: T,
    batches: Iterable[Any],
    *,
    run: Callable[[Any, Any], Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> T:
    """A quantized model whose layers have, in the mean over data, the outputs of the exact model.

    Layer by layer, in the order of their calls, E[y'] - E[y] is subtracted from the bias: the means, over all axes but
    the channels, of the outputs of the quantized layer (after correction of those before it) and of the exact one.
    Quantized Linear, Conv and ConvTranspose layers are corrected; a layer without a bias gets one.

    Args:
        model: the original of `quantized`.
        quantized: a result of `quantize`, in any mode but ``"emulate"``; neither model is changed.
        batches: inputs of the models; they are kept in a list and used once for each layer.
        run: function that calls a model on a batch, not within `jax.jit`. Default ``model(batch)``.
        progress: function of the number of completed layers.

    Returns:
        The new model.

    Raises:
        TypeError: for invalid models or batches.
        ValueError: for no batch, a mean that is not finite, no such layer in `quantized`, or models of other layers;
            for layers that are called within `jax.jit`, scan or similar transformations, in which outputs cannot be
            recorded.
        NotImplementedError: for a packed bias; correct the model before it is packed, or leave biases unrounded.

    Source: Nagel et al., "Data-free quantization through weight equalization and bias correction", ICCV 2019,
    appendix D (empirical bias correction).

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> exact = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        >>> coarse = jc.nn.quantize(exact, jc.Rule(weight="int2(group=all)"))
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> better = jc.nn.correct_biases(exact, coarse, [x])
        >>> bool(jnp.allclose(better(x).mean(0), exact(x).mean(0), atol=1e-6))
        True
    """
    for name, value in (("model", model), ("quantized", quantized)):
        if not isinstance(value, nnx.Module):
            raise TypeError(f"{name}={short_repr(value)} must be a module of Flax NNX")
    if is_nnx_program(quantized):
        raise NotImplementedError(
            "quantized is a program, in which biases have no layers: correct a model that jchop.nn.quantize made "
            "without inputs, of layers of Flax alone, and quantize its program after that"
        )
    check_run_arguments(batches, run, progress)
    data = [batch for _, batch in enumerate_batches(batches)]
    call = (lambda model, batch: model(batch)) if run is None else run
    result: Any = nnx.merge(*nnx.split(quantized), copy=True)
    layers = {path: layer for path, layer, _ in nnx_layers(result) if isinstance(layer, _QUANTIZED_BIAS_LAYERS)}
    of_exact = {path: layer for path, layer, _ in nnx_layers(model) if path in layers}
    if not layers or of_exact.keys() != layers.keys():
        raise ValueError(
            f"quantized has the quantized layers {sorted(layers)}, and model {sorted(of_exact)}; they must be the same "
            "Linear, Conv and ConvTranspose, at least one"
        )
    for path, layer in layers.items():
        if layer.out_features != of_exact[path].out_features:
            raise ValueError(
                f"{type(layer).__name__} at {path!r} has {layer.out_features} output channels in quantized, and "
                f"{of_exact[path].out_features} in model"
            )
        if isinstance(layer.bias, QuantizedParam):
            raise NotImplementedError(f"{type(layer).__name__} at {path!r} has a packed bias; correct before packing")
    exact_means = _output_means(model, of_exact, data, call)
    for count, path in enumerate(exact_means, start=1):
        layer = layers[path]
        mean = _output_means(result, [path], data, call)[path]
        change = jnp.asarray(exact_means[path] - mean, layer.kernel.dtype if layer.bias is None else layer.bias.dtype)
        set_layer_bias(layer, change if layer.bias is None else layer.bias[...] + change)
        if progress is not None:
            progress(count)
    return result


def _output_means(
    model: Any, paths: Collection[str], data: list[Any], call: Callable[[Any, Any], Any]
) -> dict[str, np.ndarray]:
    """The mean output of each layer over data, in the order of the calls; the model is not changed."""
    sums: dict[str, Any] = {}
    counts: Counter[str] = Counter()

    def add(one: LayerCall) -> Any:
        values = np.asarray(one.result, np.float64).reshape(-1, one.result.shape[-1])
        sums[one.path] = sums.get(one.path, 0.0) + values.sum(0)
        counts[one.path] += len(values)
        return one.result

    copy, opaque_paths = watch_layer_calls(model, paths, add)
    for batch in data:
        _ = call(copy, batch)
        for path in opaque_paths:
            raise ValueError(f"the layer {path!r} is called within jax.jit, scan or the like; run must not be")
    if missing := [path for path in paths if path not in sums]:
        raise ValueError(f"batches reach no layer at {', '.join(map(repr, missing))}")
    means = {path: total / max(counts[path], 1) for path, total in sums.items()}
    for path, mean in means.items():
        if not counts[path] or not np.isfinite(mean).all():
            raise ValueError(f"batches give the layer at {path!r} no finite mean: {mean.tolist()}")
    return means
