"""Rounding and products of tensors with their gradients, and `Quantizer`, a module that rounds input and gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import jax
import torch
from jax import Array
from torch import Tensor, nn

from jchop import math
from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check
from jchop._common.settings import always_jit
from jchop._spec.accumulation import MatmulSpec, SumSpecLike
from jchop._spec.spec import Gradient, SpecLike, as_spec
from jchop.torch import _operators as operators


def round_to_format(
    tensor: Tensor,
    spec: SpecLike,
    *,
    inplace: bool = False,
    seed: int | None = None,
    gradient_seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> Tensor:
    """Rounds a tensor once, exactly, to the values of a number format: `jchop.round_to_format` for torch.

    JAX reads the tensor in place, and torch reads the result in JAX's memory. On the CPU, results of at most 64 KiB are
    copied, which is faster. The result has the same bits as `jchop.round_to_format` for the same numbers, with
    ``jax.random.key(seed)`` for a stochastic spec.

    Works under `torch.compile` with ``fullgraph=True`` (as one operator), `torch.func.vmap` and `torch.func.grad`.
    Gradients are straight-through unless the spec has a ``gradient`` (``"clipped"``, or a format for the cotangent).
    Autocast does not change the dtype. Inside `vmap` each row is rounded separately.

    Args:
        tensor: float16, bfloat16, float32, float64, complex64 or complex128 (by parts). Any shape, on the CPU or a CUDA
            device.
        spec: a `jchop.Spec`, a format (rounded to nearest, ties to even), or a text as ``"e5m2:stochastic"``.
        inplace: whether the result is written into the tensor, a view too. Default False. Autograd must allow the
            write: use `torch.no_grad` for a leaf that requires a gradient.
        seed: an integer from 0 to 2^64 - 1. The stochastic modes need it, or `generator`.
        gradient_seed: the seed for a cotangent that is rounded stochastically.
        generator: a generator from which the words of a key are drawn, in place of both seeds.
        copy: whether the tensor may be copied if JAX cannot read it in place. It cannot read gaps or overlaps in memory
            (every second column, an expanded axis), nor an address that is not a multiple of 64 bytes. Default False:
            an error then. Transposed and channels-last tensors need no copy.

    Returns:
        A new tensor of the same shape and dtype, with the same strides if the memory of `tensor` has no gaps. With
        `inplace`, `tensor` itself.

    Raises:
        TypeError: if `tensor` is not a tensor, or has another dtype.
        ValueError: for an unknown text, a stochastic spec without a seed, or a tensor that would have to be copied. For
            a dtype that cannot hold every result of the spec.

    Example:
        >>> import torch, jchop as jc
        >>> jc.torch.round_to_format(torch.tensor([0.1, 1000.0]), "float8_e4m3fn:saturate")
        tensor([1.0156e-01, 4.4800e+02])
        >>> y = torch.tensor([1.1, 2.3])
        >>> jc.torch.round_to_format(y, "float8_e5m2", inplace=True) is y, y
        (True, tensor([1.0000, 2.5000]))
        >>> x = torch.tensor([0.3, 5.0], requires_grad=True)
        >>> jc.torch.round_to_format(x, jc.Spec("fixed1.3", gradient="clipped")).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """
    operators.check_carrier("tensor", tensor)
    plan = operators.plan_of(spec)
    words = operators.rounding_words(plan.spec, plan.draws, seed, generator)
    # A gradient may need the values that are overwritten.
    source = tensor.clone() if inplace and tensor.requires_grad and torch.is_grad_enabled() else tensor
    result = round_straight_through(source, plan.spec, words, copy)
    if plan.gradient is not None:
        draws, seed = plan.gradient_draws, gradient_seed
        words = operators.rounding_words(plan.gradient, draws, seed, generator, "gradient_seed")
        result = round_gradient(result, plan.gradient, words)
    return tensor.copy_(result) if inplace else result


# -- gradients ---------------------------------------------------------------------------------------------------------


def round_straight_through(tensor: Tensor, spec: str, words: Tensor, copy: bool) -> Tensor:
    """A rounded tensor with a straight-through gradient, clipped if the spec requires it."""
    if _is_eager_call(tensor) and not (tensor.requires_grad and torch.is_grad_enabled()):
        return operators.round_now(tensor, words, spec, 0, copy)
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
        rounds = operators.round_now if _is_eager_call(tensor) else operators.round_operator
        return rounds(tensor, words, spec, 0, copy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        tensor, words, ctx.spec, _ = inputs
        ctx.clips = operators.clips_gradient(ctx.spec)
        if ctx.clips:
            ctx.save_for_backward(tensor, words)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.clips:
            gradient = _ClipGradient.apply(gradient, *ctx.saved_tensors, ctx.spec)
        return gradient, None, None, None  # type: ignore[return-value]


class _FunctionOfSpec(torch.autograd.Function):
    """A function that keeps its spec, and all tensors after its first input, for its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs[1:] if isinstance(x, Tensor)))
        (ctx.spec,) = (x for x in inputs if isinstance(x, str))


class _ClipGradient(_FunctionOfSpec):
    """A gradient, zero for values that overflow: linear in the gradient, and its own transpose."""

    @staticmethod
    def forward(gradient: Tensor, tensor: Tensor, words: Tensor, spec: str) -> Tensor:
        return operators.within_range_operator(gradient, tensor, words, spec, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _ClipGradient.apply(gradients[0], *ctx.saved_tensors, ctx.spec), None, None, None  # type: ignore[return-value]


class _RoundGradient(_FunctionOfSpec):
    """The identity; its gradient is rounded, straight-through."""

    @staticmethod
    def forward(tensor: Tensor, words: Tensor, spec: str) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        return round_straight_through(gradients[0], ctx.spec, words, True), None, None


# -- a module ----------------------------------------------------------------------------------------------------------

_FORWARD_DRAW, _BACKWARD_DRAW = 0, 1


class Quantizer(nn.Module):
    """Rounds a tensor in the forward pass, and its gradient in the backward pass, like QPyTorch's module.

    The gradient passes straight through the forward rounding, or is clipped if ``forward`` has ``gradient=clipped``. It
    is then rounded to ``backward``. Integers and booleans are unchanged. A tensor that JAX cannot read in place is
    copied.

    A stochastic module counts its calls in a buffer, ``calls``. Call n draws the same bits as `jchop.round_to_format`
    with ``fold_in(fold_in(key(seed), n), 0)``, in functions of `jax.random`. Its gradient draws with
    ``fold_in(fold_in(key(seed), n), 1)``.

    Args:
        forward: a `jchop.Spec`, a format, or text. Default None: not rounded.
        backward: the spec of the gradient. Default None: not rounded.
        seed: an integer from 0 to 2^64 - 1. Or several integers: the first is the seed, and the others, below 2^32, are
            folded into its key. Default 0. Modules with the same seed draw the same bits in the same call. None: each
            call draws a key from torch's global generator, and there is no buffer.

    Raises:
        TypeError, ValueError: for an invalid spec or seed.

    References:
        Zhang et al., QPyTorch: A Low-Precision Arithmetic Simulation Framework, arXiv 1910.04540.

    Example:
        >>> import torch, jchop as jc
        >>> quantizer = jc.torch.Quantizer("float8_e4m3fn", "float8_e5m2")
        >>> x = torch.tensor([1.1, 2.3], requires_grad=True)
        >>> quantizer(x).detach()
        tensor([1.1250, 2.2500])
        >>> (quantizer(x) * torch.tensor([1.1, 2.3])).sum().backward()
        >>> x.grad
        tensor([1.0000, 2.5000])
    """

    calls: Tensor

    def __init__(
        self,
        forward: SpecLike | None = None,
        backward: SpecLike | None = None,
        *,
        seed: int | tuple[int, ...] | None = 0,
    ) -> None:
        super().__init__()
        self.rounding = None if forward is None else operators.plan_of(as_spec(forward, "forward", scaled=True))
        if self.rounding is not None and self.rounding.gradient is not None:
            check(backward is None, f"forward={str(forward)!r} rounds the gradient, but so does backward={backward!r}")
            backward = self.rounding.gradient
        gradient = None if backward is None else as_spec(backward, "backward", scaled=True)
        if gradient is not None and gradient.gradient != Gradient():
            raise ValueError(f"backward={str(gradient)!r} is for a gradient, and cannot have a gradient itself")
        self.gradient = None if gradient is None else operators.plan_of(gradient)
        self.words = None if seed is None else operators.seed_numbers(seed)
        if self._counts_calls:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    @property
    def stochastic(self) -> bool:
        """Whether either rounding draws random bits."""
        return any(plan is not None and plan.draws for plan in (self.rounding, self.gradient))

    def forward(self, x: Tensor) -> Tensor:
        """Rounds `x`.

        Args:
            x: a tensor of any shape and dtype; integers and booleans are unchanged.
        """
        if not (x.is_floating_point() or x.is_complex()):
            return x
        call = None
        if self._counts_calls:
            call = self.calls.clone()
            self.calls += 1
        if self.rounding is not None:
            words = self._words(self.rounding.draws, call, _FORWARD_DRAW)
            x = round_straight_through(x, self.rounding.spec, words, True)
        if self.gradient is not None:
            x = round_gradient(x, self.gradient.spec, self._words(self.gradient.draws, call, _BACKWARD_DRAW))
        return x

    def right_inverse(self, x: Tensor) -> Tensor:
        """Returns `x` itself: an assigned parametrized weight is kept unrounded, and rounded at each use."""
        return x

    def extra_repr(self) -> str:
        """Returns the specs, for the representation of the module."""
        plans = {"forward": self.rounding, "backward": self.gradient}
        return ", ".join(f"{name}={plan.spec}" for name, plan in plans.items() if plan is not None)

    @property
    def _counts_calls(self) -> bool:
        return self.stochastic and self.words is not None

    def _words(self, draws: bool, call: Tensor | None, draw: int) -> Tensor:
        if not draws:
            return operators.key_words(())
        if self.words is None or call is None:
            return operators.generator_words()
        draw_word = torch.full((1,), draw, dtype=torch.int32, device=call.device)
        return torch.cat([operators.key_words(self.words).to(call.device), call.reshape(1), draw_word])


def first_words(seed: tuple[int, ...], draws: bool) -> Tensor:
    """The words of the forward rounding in the first call of a `Quantizer` with this seed; none without draws."""
    return operators.key_words((*operators.seed_numbers(seed), 0, _FORWARD_DRAW) if draws else ())


def matmul(
    a: Tensor,
    b: Tensor,
    spec: SumSpecLike,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> Tensor:
    """Multiplies matrices in an emulated arithmetic: `jchop.math.matmul` for torch, with the same bits.

    Works under `torch.compile`, `torch.func.vmap` and `torch.func.grad`. Gradients are the gradients of the product of
    the rounded operands. Autocast does not change the dtype.

    Args:
        a: the left factor, float16, bfloat16, float32 or float64, of shape (..., m, k) or (k,).
        b: the right factor, of the same dtype and device, of shape (..., k, n) or (k,).
        spec: a `jchop.MatmulSpec`: the roundings and the order of the sums. Or a spec, a format or text for the
            operands, every product and every sum, in sequential order.
        seed: an integer from 0 to 2^64 - 1, required if a rounding is stochastic. The bits come from
            ``jax.random.key(seed)``.
        generator: a generator from which the key is drawn, in place of the seed.
        copy: whether factors with gaps in memory, or not aligned, may be copied. Default False: they are an error.
            Transposed factors are read in place.

    Returns:
        The product, of the dtype of the factors.

    Raises:
        TypeError, ValueError: as `jchop.math.matmul`, and for a factor that would have to be copied.

    Example:
        >>> import torch, jchop as jc
        >>> ones = torch.ones(100)
        >>> jc.torch.matmul(ones, ones, jc.MatmulSpec(accumulate="e5m2"))
        tensor(8.)
    """
    for name, value in (("a", a), ("b", b)):
        operators.check_carrier(name, value, complex_too=False)
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype} and b has dtype {b.dtype}; they must be the same: cast one of them")
    check(a.device == b.device, f"a is on {a.device} and b on {b.device}; they must be on one device")
    text, draws = _matmul_text(spec)
    words = operators.rounding_words(text, draws, seed, generator)
    if torch.is_grad_enabled():
        return _MatmulFunction.apply(copy, a, b, words, text)  # type: ignore[return-value]
    return matmul_operator(a, b, words, text, 0, copy)


# -- specs as arguments of operators -----------------------------------------------------------------------------------


@operators.compile_constant
def _matmul_text(spec: Any) -> tuple[str, bool]:
    """A text of a spec for `_matmul_spec`, and whether it is stochastic."""
    if not isinstance(spec, MatmulSpec):
        same_spec = as_spec(spec)
        spec = MatmulSpec(same_spec, same_spec, same_spec)
    arguments = {field.name: getattr(spec, field.name) for field in fields(spec)}
    texts = {name: value if isinstance(value, bool | None) else str(value) for name, value in arguments.items()}
    return json.dumps(texts), spec.stochastic


@lru_cache(maxsize=256)
def _matmul_spec(text: str) -> MatmulSpec:
    return MatmulSpec(**json.loads(text))


# -- operators ---------------------------------------------------------------------------------------------------------


def _fake_matmul(a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    _require_product(a.dtype, spec)
    return a.new_empty(_product_shape(a.shape, b.shape, batch))


@operators.define_operator(
    "matmul(Tensor a, Tensor b, Tensor words, str spec, int batch, bool copy) -> Tensor", _fake_matmul
)
def matmul_operator(a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    """The product of batches of factors."""
    (a, order_a), (b, order_b) = (operators.dense(x.detach(), copy) for x in (a, b))
    return operators.run_on_tensors(_matmul_rows, [a, b], words, spec=spec, batch=batch, orders=(order_a, order_b))


@operators.define_operator(
    "matmul_gradients(Tensor gradient, Tensor a, Tensor b, Tensor words, str spec, int batch) -> (Tensor, Tensor)",
    lambda _, a, b, *__: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b)),
)
def matmul_gradients_operator(
    gradient: Tensor, a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int
) -> tuple[Tensor, Tensor]:
    """The gradients of both factors."""
    tensors = [operators.contiguous(x, True) for x in (gradient, a, b)]
    return operators.run_on_tensors(_matmul_gradients, tensors, words, spec=spec, batch=batch)


def _product_shape(a: Sequence[int], b: Sequence[int], batch: int) -> tuple[int, ...]:
    """The shape of a batch of products."""
    batch_shape, a_shape, b_shape = a[:batch], a[batch:], b[batch:]
    if len(a_shape) == 0 or len(b_shape) == 0 or a_shape[-1] != b_shape[-2:][0]:
        raise ValueError(f"a has shape {tuple(a_shape)} and b has shape {tuple(b_shape)}, which cannot be multiplied")
    return (*batch_shape, *torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]), *a_shape[:-1][-1:], *b_shape[1:][-1:])


@lru_cache(maxsize=256)
def _require_product(dtype: torch.dtype, spec: str) -> None:
    """Raise the errors of the product for this dtype before anything is computed."""
    x = jax.ShapeDtypeStruct((1, 1), operators.CARRIER_NAMES[dtype])
    with enable_x64_for(x.dtype):
        jax.eval_shape(lambda x: math.matmul(x, x, _matmul_spec(spec), jax.random.key(0)), x)


@partial(always_jit, static_argnames=("spec", "batch", "orders"))
def _matmul_rows(
    a: Array, b: Array, words: Array | None, *, spec: str, batch: int, orders: tuple[tuple[int, ...], tuple[int, ...]]
) -> Array:
    a, b = (x.transpose(operators.inverse_order(order)) for x, order in zip((a, b), orders, strict=True))
    return operators.vmap_rows(partial(_matmul_by_words, spec), batch)(a, b, words)


@partial(always_jit, static_argnames=("spec", "batch"))
def _matmul_gradients(
    g: Array, a: Array, b: Array, words: Array | None, *, spec: str, batch: int
) -> tuple[Array, Array]:
    return operators.gradient_rows(partial(_matmul_by_words, spec), batch, g, words, a, b)


def _matmul_by_words(spec: str, a: Array, b: Array, words: Array | None) -> Array:
    return math.matmul(a, b, _matmul_spec(spec), operators.key_of_words(words))


class _MatmulFunction(_FunctionOfSpec):
    """The product, with the gradients of the product of the rounded factors."""

    @staticmethod
    def forward(copy: bool, a: Tensor, b: Tensor, words: Tensor, spec: str) -> Tensor:
        return matmul_operator(a, b, words, spec, 0, copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_MatmulGradients.apply(gradients[0], *ctx.saved_tensors, ctx.spec), None, None  # type: ignore[misc]


class _MatmulGradients(_FunctionOfSpec):
    """The gradients of both factors, without second derivatives."""

    @staticmethod
    def forward(gradient: Tensor, a: Tensor, b: Tensor, words: Tensor, spec: str) -> tuple[Tensor, Tensor]:
        return matmul_gradients_operator(gradient, a, b, words, spec, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("jchop.torch.matmul has first derivatives only; jchop.math.matmul has all, in JAX")
