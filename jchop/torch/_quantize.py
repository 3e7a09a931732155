"""`quantize` for tensors and for modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import nn

from jchop.storage import QArray
from jchop.torch._modules import QuantizeMode, convert_module
from jchop.torch._operators import check_carrier
from jchop.torch._packed import tensor_codes
from jchop.torch._plan import TorchSpecLike, outside_graphs, plan_of
from jchop.torch._words import rounding_words

__all__ = ["quantize"]

Tensor = torch.Tensor
ModuleRules = Mapping[str, Mapping[str, Any]]


@overload
def quantize(
    x: Tensor,
    how: TorchSpecLike,
    *,
    seed: int | None = ...,
    generator: torch.Generator | None = ...,
    copy: bool = ...,
) -> QArray: ...


@overload
def quantize(x: nn.Module, how: ModuleRules, *, mode: QuantizeMode = ..., seed: int | None = ...) -> nn.Module: ...


@outside_graphs
def quantize(
    x: Tensor | nn.Module,
    how: TorchSpecLike | ModuleRules,
    *,
    mode: QuantizeMode = "qat",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> QArray | nn.Module:
    """A tensor as codes and scales, or a module that rounds.

    **For a tensor** the result is the same as from `jchop.quantize`: a `jchop.QArray` of JAX arrays on the tensor's
    device. `jchop.torch.as_tensor` converts its leaves to tensors, and `dequantize` returns the rounded numbers.

    **For a module** the result is a copy whose layers (modules with their own parameters) round by rules. Rules are a
    dict. A key is a pattern ([](patterns.md)) for part of a layer's path, ``"head"``, ``"blocks.*.mlp"``,
    ``"*norm*"``; submodules match too, and ``"*"`` matches every layer. The first pattern that matches applies. A value
    is a dict of specs, with some of these keys:

    * ``weight``, ``bias``: the parameters, rounded at each use, as parametrizations (`torch.nn.utils.parametrize`):
      ``layer.parametrizations.weight.original`` is trained. A weight is what a product takes as a matrix, or a table
      that is looked up: no gain of a norm, no vector, and, but in linear layers, convolutions and embeddings, no
      parameter with an axis of one element. A bias has a name that ends with "bias".
    * ``activation``: the inputs of the layer; ``output``: its outputs.
    * ``gradient``: the gradient with respect to the outputs, an operand of both products of the backward pass.

    As in `jchop.nn.quantize`, layers without a weight, as norms, take only ``bias`` and ``output`` of a rule that
    matches layers with one. A rule for such layers alone rounds all of their parameters, inputs and gradients.

    Axes of scaled formats are axes of torch's tensors: ``"mxfp8_e4m3"`` has blocks along the contracted axis of a
    linear layer, and a convolution has its channels on axis 1. Gradients pass straight through the roundings. The
    layers' seeds are ``seed`` with the number of the layer and of the rounding in the layer folded in.

    ``mode`` says how parameters are kept. ``"qat"`` trains them in full precision and rounds them at each use.
    ``"ptq"`` rounds them once and stores them packed: in place of the parameter ``weight`` the layer has a submodule
    ``weight_packed``, a `PackedTensor`, whose buffers are the codes and scales. ``layer.weight`` returns the numbers,
    which are unpacked at each use and equal those of "qat", bit for bit; a stochastic rounding draws once, the bits of
    call 0 of the `Quantizer` of "qat". ``"weight_only"`` is "ptq" with rules for ``weight`` and ``bias`` alone.

    Args:
        x: a float tensor as in `round_to_format`, but not complex; or a module.
        how: for a tensor, a `jchop.Spec`, a format, a scaled format, or text; for a module, the rules.
        mode: ``"qat"``, ``"ptq"`` or ``"weight_only"``, for modules. Default ``"qat"``.
        seed: an integer from 0 to 2^64 - 1. The stochastic modes need it for a tensor; for a module the default is 0.
        generator: a generator in place of the seed, for tensors.
        copy: whether a tensor may be copied if JAX cannot read it in place. Default False: such a tensor is an error.

    Returns:
        A `jchop.QArray`, or a module.

    Raises:
        TypeError, ValueError: as `jchop.quantize`, and for a tensor that would have to be copied; for rules that are
            invalid, match no layer, or round a weight or bias that no matched layer has.
        NotImplementedError: for a layer that does not access its parameters by name (`torch.nn.LSTM` and similar ones),
            or computes within one function (activations in `torch.nn.MultiheadAttention`).

    Example:
        >>> import torch, jchop as jc
        >>> q = jc.torch.quantize(torch.tensor([1.0, 0.3, -7.5, 100.0]), jc.mxfp4(group=2))
        >>> jc.torch.dequantize(q)
        tensor([ 1.0000,  0.2500, -8.0000, 96.0000])
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> low = jc.torch.quantize(model, {"2": {}, "*": dict(weight="int4(group=all)", gradient="float8_e5m2")})
        >>> low[0].weight.unique().numel() <= 15 * 4, low[2].weight is low[2].weight
        (True, True)
        >>> small = jc.torch.quantize(model, {"*": dict(weight="int4(group=4)")}, mode="weight_only")
        >>> [f"{name} {part.dtype}" for name, part in small.state_dict().items() if name.startswith("0")]
        ['0.bias torch.float32', '0.weight_packed.qvalue torch.uint8', '0.weight_packed.scale torch.float32',
         '0.weight_packed._extra_state torch.uint8']
    """
    if isinstance(x, nn.Module):
        if generator is not None or copy:
            raise ValueError("generator= and copy= are for tensors; the roundings of a module are seeded by seed=")
        return convert_module(x, how, 0 if seed is None else seed, mode)  # type: ignore[arg-type]
    if mode != "qat":
        raise ValueError(f"mode={mode!r} is for modules; a tensor becomes a QArray")
    check_carrier("x", x, complex_too=False)
    plan = plan_of(how)  # type: ignore[arg-type]
    return tensor_codes(x, plan.spec, rounding_words(plan.spec, plan.draws, seed, generator), copy=copy)
