"""Post-training quantization by Pychop's names, for modules of torch and the weights of Flax models.

Differences from Pychop: ``"percentile"`` is a percentile of the magnitudes (Pychop cuts a share off the range).
``"kl_divergence"`` compares with the rounded distribution (Pychop with the clipped one). ``"mse"`` also tries small
ranges. A norm is folded only if no other layer reads the output of the convolution. Outputs of all layers are rounded
(Pychop: of convolutions, linear layers and three activations). Of several outputs, as of recurrent layers and
attention, only the first is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax

__all__ = ["dynamic_post_quantization", "mixed_post_quantization", "post_quantization", "static_post_quantization"]

_AnyModel = TypeVar("_AnyModel")
#: The leaves of a Flax model that are rounded, as in Pychop.
_FLAX_WEIGHT_NAMES = ("kernel", "weight", "bias", "scale")


def post_quantization(model: _AnyModel, chop: Any, eval_mode: bool = True, verbose: bool = False) -> _AnyModel:
    """A copy of a model with its weights and biases rounded.

    Args:
        model: a module of torch, or the variables of a Flax model: the leaves named ``kernel``, ``weight``, ``bias``
            and ``scale`` outside of ``batch_stats`` are rounded.
        chop: a quantizer.
        eval_mode: whether the copy is set to evaluation mode; for modules only.
        verbose: whether to print the names of the rounded parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from jchop.compat.pychop import Chop
        >>> from jchop.compat.pychop.ptq import post_quantization
        >>> variables = post_quantization({"params": {"kernel": jnp.array([1.1, 3.3])}}, Chop(4, 3))
        >>> variables["params"]["kernel"].tolist()
        [1.125, 3.25]
    """
    if _is_torch_module(model):
        from jchop.compat.pychop._ptq_torch import rounded_copy

        return rounded_copy(model, chop, eval_mode, verbose)

    def round_leaf(path: Any, leaf: Any) -> Any:
        names = [str(getattr(step, "key", step)) for step in path]
        if "batch_stats" in names or not set(names) & set(_FLAX_WEIGHT_NAMES):
            return leaf
        if verbose:
            print(f"rounded {'.'.join(names)}, {leaf.shape}")
        return chop(leaf)

    return jax.tree_util.tree_map_with_path(round_leaf, model)


def dynamic_post_quantization(model: _AnyModel, chop: Any, eval_mode: bool = True, verbose: bool = False) -> _AnyModel:
    """Like `post_quantization`; in addition the outputs of layers are rounded in every forward pass.

    Args:
        model: a module of torch.
        chop: a quantizer, of weights and outputs.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.

    Raises:
        TypeError: for variables of a Flax model, which have no layers; `jchop.nn` quantizes these.
    """
    return mixed_post_quantization(model, chop, chop, eval_mode=eval_mode, verbose=verbose)


def static_post_quantization(
    model: _AnyModel,
    chop: Any,
    calibration_data: Iterable[Any],
    calibration_method: str = "minmax",
    percentile: float = 99.99,
    fuse_bn: bool = True,
    eval_mode: bool = True,
    verbose: bool = False,
) -> _AnyModel:
    """Like `dynamic_post_quantization`, with outputs first clamped to a range that was found on data.

    A layer whose outputs no batch shows is not rounded; a `RuntimeWarning` names it.

    Args:
        model: a module of torch.
        chop: a quantizer, of weights and outputs.
        calibration_data: inputs, or tuples that begin with one.
        calibration_method: ``"minmax"``: the range of the outputs. ``"percentile"``: the range up to the percentile of
            the magnitudes. ``"mse"``: the fraction of the range with the least square error, or the whole range if
            `chop` has no scale. ``"kl_divergence"``: the range that loses the least information, for integers.
        percentile: for ``"percentile"``; more than 0, at most 100.
        fuse_bn: whether batch norms are first folded into the convolutions before them; in evaluation mode.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.

    Raises:
        TypeError: for variables of a Flax model, which have no layers; `jchop.nn` quantizes these.
        ValueError: for no data, another method, one that `chop` does not support, and with `fuse_bn` a model that
            `torch.fx` cannot trace.
    """
    model = _require_torch_module(model)
    from jchop.compat.pychop._ptq_torch import fuse_batch_norms

    model = fuse_batch_norms(model) if fuse_bn and eval_mode else model
    calibration = (calibration_data, calibration_method, percentile)
    return mixed_post_quantization(model, chop, chop, *calibration, dynamic=False, eval_mode=eval_mode, verbose=verbose)


def mixed_post_quantization(
    model: _AnyModel,
    weight_chop: Any,
    activation_chop: Any,
    calibration_data: Iterable[Any] | None = None,
    calibration_method: str = "minmax",
    percentile: float = 99.99,
    dynamic: bool = True,
    eval_mode: bool = True,
    verbose: bool = False,
) -> _AnyModel:
    """A copy of a model with weights and biases rounded by one quantizer, and the outputs of layers by another.

    Args:
        model: a module of torch.
        weight_chop: a quantizer, or None.
        activation_chop: a quantizer, or None.
        calibration_data: inputs, or tuples that begin with one; required without `dynamic`.
        calibration_method: as in `static_post_quantization`.
        percentile: as in `static_post_quantization`.
        dynamic: whether outputs are rounded without clamping; otherwise they are first clamped to their range on
            `calibration_data`.
        eval_mode: as in `post_quantization`.
        verbose: as in `post_quantization`.

    Raises:
        TypeError: for variables of a Flax model, which have no layers; `jchop.nn` quantizes these.
        ValueError: for clamping without data; for another method, and one that the quantizer does not support.
    """
    model = _require_torch_module(model)
    from jchop.compat.pychop._ptq_torch import round_layer_outputs

    if not dynamic and calibration_data is None and activation_chop is not None:
        raise ValueError("calibration_data=None, but dynamic=False clamps outputs to their range on it")
    round_weight = weight_chop or (lambda weight: weight)
    result: Any = post_quantization(model, round_weight, eval_mode, verbose and weight_chop is not None)
    if activation_chop is not None:
        data = None if dynamic else calibration_data
        round_layer_outputs(result, activation_chop, data, calibration_method, percentile)
    return result


def _is_torch_module(model: Any) -> bool:
    return hasattr(model, "named_parameters")


def _require_torch_module(model: _AnyModel) -> _AnyModel:
    if _is_torch_module(model):
        return model
    type_name = "variables of a Flax model" if isinstance(model, Mapping) else type(model).__name__
    raise TypeError(f"model must be a module of torch to round its outputs, not {type_name}: see jchop.nn")
