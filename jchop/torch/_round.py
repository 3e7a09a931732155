"""`round_to_format` for tensors, with its gradients."""

from __future__ import annotations

from typing import Any

import torch

from jchop.torch._operators import check_carrier, round_now, round_operator, within_range_operator
from jchop.torch._plan import TorchSpecLike, clips_gradient, plan_of
from jchop.torch._words import rounding_words

__all__ = ["round_gradient", "round_straight_through", "round_to_format", "round_to_format_"]

Tensor = torch.Tensor


def round_to_format(
    tensor: Tensor,
    spec: TorchSpecLike,
    *,
    seed: int | None = None,
    gradient_seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> Tensor:
    """A tensor rounded once, exactly, to the values of a number format: `jchop.round_to_format` for torch.

    JAX reads the tensor in place, and torch reads the result in JAX's memory; on the CPU, results of at most 64 KiB are
    copied, which is faster. The result has the same bits as the result of `jchop.round_to_format` for the same numbers,
    with ``jax.random.key(seed)`` for a stochastic spec.

    Works under `torch.compile` with ``fullgraph=True`` (as one operator), `torch.func.vmap` and `torch.func.grad`.
    Gradients are straight-through unless the spec has a ``gradient`` (``"clipped"``, or a format for the cotangent).
    Autocast does not change the dtype. Inside `vmap` each row is rounded separately.

    Args:
        tensor: float16, bfloat16, float32, float64, complex64 or complex128 (by parts), any shape, on the CPU or a CUDA
            device.
        spec: a `jchop.Spec`, a format (rounded to nearest, ties to even), or text such as ``"e5m2:stochastic"``.
        seed: an integer from 0 to 2^64 - 1, for the stochastic modes; they need it, or `generator`.
        gradient_seed: the seed for a cotangent that is rounded stochastically.
        generator: a generator from which the words of a key are drawn, in place of both seeds.
        copy: whether the tensor may be copied if JAX cannot read it in place: if it has gaps or overlaps in memory
            (every second column, an expanded axis) or starts at an address that is not a multiple of 64 bytes. Default
            False: such a tensor is an error. Transposed and channels-last tensors need no copy.

    Returns:
        A new tensor of the same shape and dtype, with the same strides if the memory of `tensor` has no gaps.

    Raises:
        TypeError: if `tensor` is not a tensor, or has another dtype.
        ValueError: for an unknown text, a stochastic spec without a seed, a dtype that cannot hold every result of the
            spec, or a tensor that would have to be copied.

    Example:
        >>> import torch, jchop as jc
        >>> jc.torch.round_to_format(torch.tensor([0.1, 1000.0]), "float8_e4m3fn:saturate")
        tensor([1.0156e-01, 4.4800e+02])
        >>> x = torch.tensor([0.3, 5.0], requires_grad=True)
        >>> jc.torch.round_to_format(x, jc.Spec("fixed1.3", gradient="clipped")).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """
    check_carrier("tensor", tensor)
    plan = plan_of(spec)
    words = rounding_words(plan.spec, plan.draws, seed, generator)
    result = round_straight_through(tensor, plan.spec, words, copy)
    if plan.gradient is None:
        return result
    return round_gradient(
        result,
        plan.gradient,
        rounding_words(plan.gradient, plan.gradient_draws, gradient_seed, generator, _GRADIENT_SEED),
    )


def round_to_format_(
    tensor: Tensor,
    spec: TorchSpecLike,
    *,
    seed: int | None = None,
    gradient_seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> Tensor:
    """`round_to_format` in place: the result is written into the tensor.

    Args:
        tensor: as in `round_to_format`; autograd must allow writing to it.
        spec: as in `round_to_format`.
        seed: as in `round_to_format`.
        gradient_seed: as in `round_to_format`.
        generator: as in `round_to_format`.
        copy: as in `round_to_format`.

    Returns:
        `tensor`.

    Raises:
        TypeError, ValueError: as `round_to_format`.

    Example:
        >>> import torch, jchop as jc
        >>> x = torch.tensor([1.1, 2.3])
        >>> jc.torch.round_to_format_(x, "float8_e5m2") is x, x
        (True, tensor([1.0000, 2.5000]))
    """
    check_carrier("tensor", tensor)
    # A gradient may need the overwritten values.
    source = tensor.clone() if tensor.requires_grad and torch.is_grad_enabled() else tensor
    return tensor.copy_(
        round_to_format(source, spec, seed=seed, gradient_seed=gradient_seed, generator=generator, copy=copy)
    )


_GRADIENT_SEED = "gradient_seed"


# -- gradients ---------------------------------------------------------------------------------------------------------


def round_straight_through(tensor: Tensor, spec: str, words: Tensor, copy: bool) -> Tensor:
    """A rounded tensor with a straight-through gradient, clipped if the spec requires it."""
    if _is_eager_call(tensor) and not (tensor.requires_grad and torch.is_grad_enabled()):
        return round_now(tensor, words, spec, 0, copy)
    return _StraightThrough.apply(tensor, words, spec, copy)  # type: ignore[return-value]


def _is_eager_call(tensor: Tensor) -> bool:
    """Whether the call is plain eager code: without a compiler, a transform of `torch.func` or a mode.

    They need the operator; without it a call takes half of the time. A tensor does not show that `torch.func` wraps it,
    so this uses the test of `torch.autograd.Function`.
    """
    return not (
        torch.compiler.is_compiling()
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def round_gradient(tensor: Tensor, spec: str, words: Tensor) -> Tensor:
    """The tensor itself; its gradient is rounded."""
    return _RoundGradient.apply(tensor, words, spec)  # type: ignore[return-value]


class _StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes, or is zero for values that overflowed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, words: Tensor, spec: str, copy: bool) -> Tensor:
        return (round_now if _is_eager_call(tensor) else round_operator)(tensor, words, spec, 0, copy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        del output
        tensor, words, ctx.spec, _ = inputs
        ctx.clips = clips_gradient(ctx.spec)
        if ctx.clips:
            ctx.save_for_backward(tensor, words)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.clips:
            gradient = _ClipGradient.apply(gradient, *ctx.saved_tensors, ctx.spec)
        return gradient, None, None, None  # type: ignore[return-value]


class _ClipGradient(torch.autograd.Function):
    """A gradient, zero for values that overflow: linear in the gradient, and its own transpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, tensor: Tensor, words: Tensor, spec: str) -> Tensor:
        return within_range_operator(gradient, tensor, words, spec, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs[1:3])
        ctx.spec = inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _ClipGradient.apply(gradients[0], *ctx.saved_tensors, ctx.spec), None, None, None  # type: ignore[return-value]


class _RoundGradient(torch.autograd.Function):
    """The identity; its gradient is rounded, straight-through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, words: Tensor, spec: str) -> Tensor:
        del words, spec
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        del output
        ctx.save_for_backward(inputs[1])
        ctx.spec = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        return round_straight_through(gradients[0], ctx.spec, words, True), None, None
