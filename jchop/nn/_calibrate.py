"""`calibrate`: ranges of activations, from data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

from flax import nnx

from jchop._common.checks import short_repr
from jchop._quantized.products.rule import Location
from jchop._quantized.products.scale_from import has_tensor_scale
from jchop._quantized.program.call import enumerate_batches
from jchop._quantized.scales.observers import RangeObserver, check_calibration_data, range_observer_for
from jchop._spec.spec import Gradient
from jchop.nn._nnx.layers import nnx_layers
from jchop.nn._nnx.programs import calibrate_program, is_nnx_program
from jchop.nn._nnx.rounding_modules import RoundedProduct, rounding_module_in
from jchop.nn._shared.scale_state import PastMagnitudes
from jchop.nn._trees.equinox_modules import calibrate_equinox_module, is_equinox_module

T = TypeVar("T")


def calibrate(
    model: T,
    batches: Iterable[Any],
    *,
    method: str = "minmax",
    combine: Literal["widest", "mean"] = "widest",
    run: Callable[[Any, Any], Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> T:
    """A quantized model with fixed scales of activations, found by running it on data.

    This applies to layers with a product and an activation with one scale for the whole array, such as
    ``"int8"``: the range of the layer's input, before rounding, is recorded for each batch and becomes
    its `ActivationRange`. Other roundings, and layers that no batch reaches, do not change.

    Args:
        model: a result of `quantize`, for ``"qat"`` or ``"ptq"``, of layers or of a program; it is not changed.
        batches: inputs of the model.
        method: the range of a batch: ``"minmax"``, from the least to the largest number (default);
            ``"percentile(99.9)"``, that range up to the magnitude that 99.9 % of the numbers do not exceed; ``"mse"``,
            the fraction of that range, in hundredths, with the least square error of rounding to nearest. Or the range
            of all batches: ``"entropy"``, up to the magnitude at which a histogram of 2048 bins loses the least
            information (Kullback-Leibler) when it is rounded to the integers of the format, as in TensorRT. Numbers
            that are not finite are ignored, with a `RuntimeWarning`.
        combine: the combined range of all batches: ``"widest"`` (default), or the ``"mean"`` of both ends (not for
            entropy).
        run: function that calls the model on a batch. Default ``model(batch)``; for a module of Equinox that takes one
            example, ``lambda model, batch: jax.vmap(model)(batch)``.
        progress: function of the number of completed batches.

    Returns:
        The new model.

    Raises:
        TypeError, ValueError: for another method, no batch, an input without a finite number, or a model without such a
            layer.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> layer = jc.nn.Linear(4, 2, rule=jc.Rule(activation="int8"), rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.linspace(-1, 2, 8).reshape(2, 4)], method="percentile(100)")
        >>> static.dot_general.range[...].tolist()
        [-1.0, 2.0]
    """
    if not (is_equinox_module(model) or isinstance(model, nnx.Module)):
        raise TypeError(
            f"model={short_repr(model)} must be a module of Flax NNX or Equinox that jchop.nn.quantize returned"
        )
    check_run_arguments(batches, run, progress)
    if is_equinox_module(model):
        return calibrate_equinox_module(model, batches, method, combine, run, progress)
    make_observer = range_observer_for(method, combine)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    finish = None
    if is_nnx_program(result):
        finish = calibrate_program(result, method, combine)
    products = [] if finish is not None else [*_products_to_calibrate(result)]
    if not products and finish is None:
        raise ValueError(
            "model has no layer whose activation has one scale for the whole array, such as 'int8', "
            "without a gradient of its own, backward roundings or a history"
        )
    observers: list[RangeObserver] = [make_observer(product.how.left) for product in products]
    for product, observer in zip(products, observers, strict=True):
        product.range = nnx.data(None)
        product.observe = nnx.static(partial(_observe_input, observer, product.how.place))
    for count, batch in enumerate_batches(batches):
        _ = result(batch) if run is None else run(result, batch)
        if progress is not None:
            progress(count)
    if finish is not None:
        finish()
    for product, observer in zip(products, observers, strict=True):
        product.observe = nnx.static(None)
        value_range = observer.range()
        if value_range is not None:
            product.start(value_range)
    return result


def check_run_arguments(batches: Any, run: Any, progress: Any) -> None:
    """Refuse arguments with which no model can be run."""
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches={batches!r} must be inputs of the model, one after the other, as in a list")
    for name, value in (("run", run), ("progress", progress)):
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} must be a function, or None")


def _observe_input(observer: RangeObserver, place: Location, x: Any) -> None:
    """Note an input of a layer that has a range."""
    check_calibration_data(x, str(place))
    observer.see(x)


def _products_to_calibrate(model: Any) -> Iterator[Any]:
    """The products whose range is to be found; a static one becomes a part of the model, of its own."""
    for _, layer, kind in nnx_layers(model):
        product = None if kind is None or kind.product is None else rounding_module_in(layer, kind.product[0])
        if kind is None or kind.product is None or not isinstance(product, RoundedProduct) or not _needs_range(product):
            continue
        if product is not getattr(layer, kind.product[0]):
            product = nnx.clone(product)
            setattr(layer, kind.product[0], nnx.data(product))
        yield product


def _needs_range(product: RoundedProduct) -> bool:
    if not product.calibrates or isinstance(product.left, PastMagnitudes):
        return False
    roundings = product.how
    return (
        has_tensor_scale(roundings.left)
        and roundings.keeps_left
        and roundings.left is not None
        and roundings.left.gradient == Gradient()
    )
