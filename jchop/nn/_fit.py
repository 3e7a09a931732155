"""Numbers of a model found anew: ranges by `calibrate`, kernels and biases by `fold_batch_norms`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jchop._common.checks import check, check_instance
from jchop._quantized.products.rule import Location
from jchop._quantized.products.scale_from import has_tensor_scale
from jchop._quantized.products.scales import HISTORY, RangeObserver, check_calibration_data, range_observer_for
from jchop._quantized.program.call import batch_arguments, enumerate_batches
from jchop._spec.spec import Gradient, Spec
from jchop.nn._nnx.layers import nnx_layers, set_layer_bias
from jchop.nn._nnx.nodes import Keys, ModuleEntry, keys_as_path, module_entries
from jchop.nn._nnx.programs import calibrate_program, is_nnx_program
from jchop.nn._nnx.rounding_modules import RoundedProduct, rounding_module_in
from jchop.nn._trees.equinox_modules import calibrate_equinox_module, check_flax_or_equinox, is_equinox_module

T = TypeVar("T")
M = TypeVar("M", bound=nnx.Module)


def calibrate(
    model: T,
    batches: Iterable[Any],
    *,
    method: str = "minmax",
    combine: Literal["widest", "mean"] = "widest",
    call: Callable[..., Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> T:
    """Runs a quantized model on data and returns it with fixed scales of activations.

    This applies to layers with a product whose activation has one scale for the whole array, as ``"int8"``. The range
    of the layer's input, before rounding, is recorded for each batch and becomes its `ActivationRange`. Other
    roundings, and layers that no batch reaches, do not change.

    Args:
        model: a result of `quantize`, for ``"qat"`` or ``"ptq"``, of layers or of a program. It is not changed.
        batches: the arguments of each call: a tuple of several, or the only one.
        method: the range of a batch. ``"minmax"`` (default): from the least to the largest number.
            ``"percentile(99.9)"``: that range up to the magnitude that 99.9 % of the numbers do not exceed. ``"mse"``:
            the fraction of that range, in hundredths, with the least square error of rounding to nearest. Or the range
            of all batches, ``"entropy"``, as in TensorRT: a histogram of 2048 bins is rounded to the integers of the
            format. The range ends at the magnitude where the histogram loses the least information (Kullback-Leibler).
            Numbers that are not finite are ignored, with a `RuntimeWarning`.
        combine: the combined range of all batches: the ``"widest"`` (default), or the ``"mean"`` of both ends (not for
            entropy).
        call: a function of the model and of a batch that is run in place of the model's call:
            ``lambda m, *batch: m.decode(*batch)``. For a module of Equinox whose call is for one example,
            ``lambda m, x: jax.vmap(m)(x)``. Default None.
        progress: function of the number of completed batches.

    Returns:
        The new model.

    Raises:
        TypeError, ValueError: for another method, no batch, an input without a finite number, or a model without a
            layer of this kind.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> layer = jc.nn.Linear(4, 2, rule=jc.Rule(activation="int8"), rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.linspace(-1, 2, 8).reshape(2, 4)], method="percentile(100)")
        >>> static.dot_general.range[...].tolist()
        [-1.0, 2.0]
    """
    check_flax_or_equinox("model", model, " that jchop.nn.quantize returned")
    check_instance("batches", batches, Iterable, "inputs of the model, one after the other, as in a list")
    for name, value in (("call", call), ("progress", progress)):
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} must be a function, or None")
    if is_equinox_module(model):
        return calibrate_equinox_module(model, batches, method, combine, call, progress)
    make_observer = range_observer_for(method, combine)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    finish = calibrate_program(result, method, combine) if is_nnx_program(result) else None
    products = [] if finish is not None else [*_products_to_calibrate(result)]
    if not products and finish is None:
        raise ValueError(
            "model has no layer whose activation has one scale for the whole array, such as 'int8', "
            "without a gradient of its own, backward roundings or a history"
        )
    observers = [(product, make_observer(spec)) for product, spec in products]
    for product, observer in observers:
        product.range = nnx.data(None)
        product.observe = nnx.static(partial(_observe_input, observer, product.how.place))
    for count, batch in enumerate_batches(batches):
        args = batch_arguments(batch)
        _ = result(*args) if call is None else call(result, *args)
        if progress is not None:
            progress(count)
    if finish is not None:
        finish()
    for product, observer in observers:
        product.observe = nnx.static(None)
        value_range = observer.range()
        if value_range is not None:
            product.start(value_range)
    return result


def _observe_input(observer: RangeObserver, place: Location, x: Any) -> None:
    check_calibration_data(x, str(place))
    observer.see(x)


def _products_to_calibrate(model: Any) -> Iterator[tuple[RoundedProduct, Spec]]:
    """The products whose range is to be found, for a spec; a static one becomes a part of the model, of its own."""
    for _, layer, kind in nnx_layers(model):
        if kind is None or kind.product is None:
            continue
        product = rounding_module_in(layer, kind.product[0], RoundedProduct)
        if product is None or not product.calibrates or not product.how.keeps_left:
            continue
        spec = product.how.left
        if spec is None or not has_tensor_scale(spec) or spec.gradient != Gradient():
            continue
        if product.left is not None and product.left.kind == HISTORY:
            continue
        if product is not getattr(layer, kind.product[0]):
            product = nnx.clone(product)
            setattr(layer, kind.product[0], nnx.data(product))
        yield product, spec


# -- batch norms -------------------------------------------------------------------------------------------------------


class Folded(nnx.Module):
    """The replacement of a folded batch norm: the identity.

    Example:
        >>> import jax.numpy as jnp
        >>> Folded()(jnp.ones(2), use_running_average=True).tolist()
        [1.0, 1.0]
    """

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        """The argument `x`; other arguments of a batch norm have no effect."""
        return x


#: The axis of output channels of the kernel.
_KERNEL_CHANNEL_AXIS: Mapping[type, Callable[[Any], int]] = MappingProxyType(
    {
        nnx.Linear: lambda layer: -1,
        nnx.Conv: lambda layer: -1,
        nnx.ConvTranspose: lambda layer: -2 if layer.transpose_kernel else -1,
    }
)


def fold_batch_norms(model: M, pairs: Mapping[str, str]) -> M:
    """Folds batch norms into the layers before them, as in evaluation mode.

    Let y = x w + b, and let the norm have mean m, variance v, gain g and offset c. The layer gets the kernel w a and
    the bias (b - m) a + c, where a = g / sqrt(v + epsilon), computed in float32. `Folded` replaces the norm. Use it on
    a trained model before quantization, so that the final kernel is rounded.

    Args:
        model: a module of Flax NNX; it is not changed.
        pairs: maps the path of a Linear, Conv or ConvTranspose to the path of the batch norm that reads its result.
            Nothing else reads or changes the result: ``{"blocks/0/conv": "blocks/0/norm"}``. The caller must know this,
            because a module does not expose the order of its calls.

    Returns:
        The new model. Arrays that did not change are shared with the given one.

    Raises:
        TypeError: if `model` is not a module, or `pairs` not a mapping.
        ValueError: for an unknown or repeated path, a layer that several modules hold, a norm of other axes or another
            number of channels.
        NotImplementedError: for another layer, or a quantized one.

    Source: Jacob et al., "Quantization and training of neural networks", 2018, section 3.2.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> r = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=r), nnx.BatchNorm(2, use_running_average=True, rngs=r))
        >>> model.layers[1].mean[...] = jnp.array([1.0, -2.0])
        >>> folded = jc.nn.fold_batch_norms(model, {"layers/0": "layers/1"})
        >>> bool(jnp.allclose(folded(jnp.ones((1, 3))), model(jnp.ones((1, 3))), atol=1e-6))
        True
    """
    check_instance("model", model, nnx.Module, "a module of Flax NNX")
    check_instance("pairs", pairs, Mapping, "a dict of the path of a layer and that of the batch norm behind it")
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    modules = {keys_as_path(keys): (keys, entry) for entry in module_entries(result) for keys in entry.keys}
    pair_paths = [*pairs, *pairs.values()]
    for path in pair_paths:
        if path not in modules:
            raise ValueError(f"pairs has {path!r}, and model has no module there; it has {', '.join(modules)}")
        check(pair_paths.count(path) == 1, f"pairs has {path!r} {pair_paths.count(path)} times")
    for layer, norm in pairs.items():
        _check_single_place(pairs, layer, modules)
        _fold_norm(layer, modules[layer][1].module, norm, modules[norm][1].module)
        *parent, key = modules[norm][0]
        _replace_norm(modules, parent, key)
    return result


def _check_single_place(pairs: Mapping[str, str], path: str, modules: Mapping[str, tuple[Keys, ModuleEntry]]) -> None:
    """Refuse a layer that stands twice in `pairs`, or in several places of which some have no norm behind it."""
    entry = modules[path][1]
    holders = [modules.get(keys_as_path(keys[:-1]), (keys, None))[1] for keys in entry.keys]
    slots = {(id(holder), keys[-1:]) for holder, keys in zip(holders, entry.keys, strict=True)}
    if len(slots) > 1 or sum(modules[layer][1] is entry for layer in pairs) > 1:
        raise ValueError(
            f"pairs has {path!r}, a layer that is reached as {', '.join(map(repr, entry.paths))}: folded, it would "
            "change in all of these places; name a layer that stands in one, once"
        )


def _replace_norm(modules: Mapping[str, Any], parent: list[Any], key: Any) -> None:
    if (path := keys_as_path(parent)) not in modules:
        raise NotImplementedError(f"the batch norm at {keys_as_path([*parent, key])!r} is held by no module")
    holder = modules[path][1].module
    if isinstance(key, int):
        holder[key] = Folded()
    else:
        setattr(holder, key, Folded())


def _fold_norm(path: str, layer: Any, norm_path: str, norm: Any) -> None:
    what = f"{type(layer).__name__} at {path!r}"
    if type(layer) not in _KERNEL_CHANNEL_AXIS:
        class_names = ", ".join(kind.__name__ for kind in _KERNEL_CHANNEL_AXIS)
        raise NotImplementedError(
            f"{what} takes no batch norm in; that can be a {class_names} that is not quantized yet"
        )
    if type(norm) is not nnx.BatchNorm:
        raise NotImplementedError(f"{type(norm).__name__} at {norm_path!r} must be a BatchNorm that is not quantized")
    kernel = layer.kernel[...]
    axis = _KERNEL_CHANNEL_AXIS[type(layer)](layer)
    if norm.axis != -1 or norm.num_features != kernel.shape[axis]:
        raise ValueError(
            f"the BatchNorm at {norm_path!r} has axis={norm.axis} and num_features={norm.num_features}; behind {what} "
            f"they must be -1 and {kernel.shape[axis]}"
        )
    gain = lax.rsqrt(norm.var[...].astype(jnp.float32) + norm.epsilon)
    gain = gain if norm.scale is None else gain * norm.scale[...].astype(jnp.float32)
    bias = 0.0 if layer.bias is None else layer.bias[...].astype(jnp.float32)
    bias = (bias - norm.mean[...].astype(jnp.float32)) * gain
    bias = bias if norm.bias is None else bias + norm.bias[...].astype(jnp.float32)
    gain_of_axis = gain.reshape([-1 if i == axis % kernel.ndim else 1 for i in range(kernel.ndim)])
    layer.kernel[...] = (kernel.astype(jnp.float32) * gain_of_axis).astype(kernel.dtype)
    set_layer_bias(layer, bias.astype(kernel.dtype))
