"""`calibrate`: ranges of activations, from data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jchop._checks import check_choice
from jchop.nn._sites import Product
from jchop.nn._static import ActivationRange, is_tensor_scaled
from jchop.spec import Gradient

Array = jax.Array
Model = TypeVar("Model", bound=nnx.Module)

__all__ = ["calibrate"]

_PERCENTILE = re.compile(r"percentile\((\d{1,3}(?:\.\d+)?)\)")


def calibrate(
    model: Model,
    batches: Iterable[Any],
    *,
    method: str = "minmax",
    combine: Literal["widest", "mean"] = "widest",
    run: Callable[[Any, Any], Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Model:
    """A quantized model whose activations have fixed scales, found by running it on data.

    It concerns the layers with a product and an activation of one scale for the whole array, as
    ``"int8(group=tensor)"``: a range of the layer's input is noted for each batch, unrounded in that layer, and becomes
    its `ActivationRange`. Other roundings stay as they are, and so does a layer that no batch reaches.

    Args:
        model: what `quantize` returned, for ``"qat"`` or ``"ptq"``; it stays as it is.
        batches: inputs of the model, one after the other.
        method: the range of a batch: ``"minmax"``, from the least to the largest number (default);
            ``"percentile(99.9)"``, that range within the magnitude that so many per cent of the numbers do not exceed.
        combine: the range of all batches: ``"widest"`` (default), or the ``"mean"`` of both ends.
        run: calls the model on a batch. Default ``model(batch)``.
        progress: is told the number of each batch that is done.

    Returns:
        The new model.

    Raises:
        TypeError, ValueError: for another method, no batch, or a model without such a layer.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> layer = jc.nn.Linear(4, 2, rule=jc.nn.Rule(activation="int8(group=tensor)"), rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.linspace(-1, 2, 8).reshape(2, 4)], method="percentile(100)")
        >>> static.dot_general.range[...].tolist()
        [-1.0, 2.0]
    """
    check_choice("combine", combine, ("widest", "mean"))
    find = _method(method)
    result: Any = nnx.merge(*nnx.split(model), copy=True)
    sites: list[Any] = [site for _, site in nnx.iter_modules(result) if _concerned(site)]
    if not sites:
        raise ValueError(
            "model has no layer whose activation has one scale for the whole array, such as 'int8(group=tensor)', "
            "without a gradient of its own or backward roundings"
        )
    ranges: list[list[Array]] = [[] for _ in sites]
    for site, found in zip(sites, ranges, strict=True):
        site.range = nnx.data(None)
        site.observe = nnx.static(lambda x, found=found: found.append(find(x)))
    count = 0
    for count, batch in enumerate(batches, start=1):
        _ = result(batch) if run is None else run(result, batch)
        if progress is not None:
            progress(count)
    if not count:
        raise ValueError("batches has no batch")
    for site, found in zip(sites, ranges, strict=True):
        site.observe = nnx.static(None)
        if found:
            site.range = nnx.data(ActivationRange(_combined(jnp.stack(found), combine)))
    return result


def _concerned(site: Any) -> bool:
    if not isinstance(site, Product) or not site.calibrates:
        return False
    how = site.how
    backward = how.gradient is not None or how.weight_gradient is not None
    return is_tensor_scaled(how.left) and not backward and how.left is not None and how.left.gradient == Gradient()


def _method(method: str) -> Callable[[Array], Array]:
    if method == "minmax":
        return lambda x: jnp.stack([x.min(), x.max()])
    found = _PERCENTILE.fullmatch(method) if isinstance(method, str) else None
    if found is None or not 0 < float(found[1]) <= 100:
        raise ValueError(f"method={method!r} must be 'minmax', or 'percentile(q)' with 0 < q <= 100")
    share = float(found[1])

    def within(x: Array) -> Array:
        most = jnp.percentile(jnp.abs(x), share)
        return jnp.clip(jnp.stack([x.min(), x.max()]), -most, most)

    return within


def _combined(ranges: Array, combine: str) -> Array:
    if combine == "mean":
        return ranges.mean(0)
    return jnp.stack([ranges[:, 0].min(), ranges[:, 1].max()])
