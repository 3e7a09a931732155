"""`matmul` for tensors, as an operator of torch with gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import jax
import torch

from jchop import math
from jchop._common.bit_ops import enable_x64_for
from jchop._common.settings import always_jit
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec, as_spec
from jchop.formats import ElementFormat
from jchop.torch._bridge import contiguous, dense, inverse_order
from jchop.torch._operators import CARRIER_NAMES, add_vmap_rule, check_carrier, key_of_words, run_on_tensors, vmap_rows
from jchop.torch._plan import compile_constant, rounding_words

Array = jax.Array
Tensor = torch.Tensor


def matmul(
    a: Tensor,
    b: Tensor,
    spec: MatmulSpec | Spec | ElementFormat | str,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    copy: bool = False,
) -> Tensor:
    """The matrix product in an emulated arithmetic: `jchop.math.matmul` for torch, with the same bits.

    Works under `torch.compile`, `torch.func.vmap` and `torch.func.grad`; gradients are the gradients of the product of
    the rounded operands. Autocast does not change the dtype.

    Args:
        a: the left factor, float16, bfloat16, float32 or float64, of shape (..., m, k) or (k,).
        b: the right factor, of the same dtype and device, of shape (..., k, n) or (k,).
        spec: a `jchop.MatmulSpec`: the roundings and the order of the sums; or a spec, a format or text for the
            operands, every product and every sum, in sequential order.
        seed: an integer from 0 to 2^64 - 1, required if a rounding is stochastic; the bits come from
            ``jax.random.key(seed)``.
        generator: a generator from which the key is drawn, in place of the seed.
        copy: whether factors with gaps in memory, or not aligned, may be copied. Default False: such a factor is an
            error. Transposed factors are read in place.

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
        check_carrier(name, value, complex_too=False)
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype} and b has dtype {b.dtype}; they must be the same: cast one of them")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}; they must be on one device")
    text, draws = _matmul_text(spec)
    words = rounding_words(text, draws, seed, generator)
    if torch.is_grad_enabled():
        return _MatmulFunction.apply(a, b, words, text, copy)  # type: ignore[return-value]
    return matmul_operator(a, b, words, text, 0, copy)


# -- specs as arguments of operators -----------------------------------------------------------------------------------


@compile_constant
def _matmul_text(spec: Any) -> tuple[str, bool]:
    """A text of a spec for `_matmul_spec`, and whether it is stochastic."""
    if not isinstance(spec, MatmulSpec):
        same_spec = as_spec(spec)
        spec = MatmulSpec(same_spec, same_spec, same_spec)
    arguments = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return json.dumps(
        {name: v if isinstance(v, bool | None) else str(v) for name, v in arguments.items()}
    ), spec.stochastic


@lru_cache(maxsize=256)
def _matmul_spec(text: str) -> MatmulSpec:
    return MatmulSpec(**json.loads(text))


# -- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "jchop::matmul",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor words, str spec, int batch, bool copy) -> Tensor",
)
def matmul_operator(a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    """The product of batches of factors."""
    (a, order_a), (b, order_b) = (dense(x.detach(), copy) for x in (a, b))
    return run_on_tensors(_matmul_rows, [a, b], words, spec=spec, batch=batch, orders=(order_a, order_b))


@torch.library.custom_op(
    "jchop::matmul_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor a, Tensor b, Tensor words, str spec, int batch) -> (Tensor, Tensor)",
)
def matmul_gradients_operator(
    gradient: Tensor, a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int
) -> tuple[Tensor, Tensor]:
    """The gradients of both factors."""
    return run_on_tensors(
        _matmul_gradients, [contiguous(x, True) for x in (gradient, a, b)], words, spec=spec, batch=batch
    )


@matmul_operator.register_fake
def _fake_matmul(a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int, copy: bool) -> Tensor:
    del words, copy
    _require_product(a.dtype, spec)
    return a.new_empty(_product_shape(a.shape, b.shape, batch))


@matmul_gradients_operator.register_fake
def _fake_matmul_gradients(
    gradient: Tensor, a: Tensor, b: Tensor, words: Tensor, spec: str, batch: int
) -> tuple[Tensor, Tensor]:
    del gradient, words, spec, batch
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b))  # type: ignore[return-value]


add_vmap_rule(matmul_operator)
add_vmap_rule(matmul_gradients_operator)


def _product_shape(a: Sequence[int], b: Sequence[int], batch: int) -> tuple[int, ...]:
    """The shape of a batch of products."""
    batch_shape, a_shape, b_shape = a[:batch], a[batch:], b[batch:]
    if len(a_shape) == 0 or len(b_shape) == 0 or a_shape[-1] != b_shape[-2:][0]:
        raise ValueError(f"a has shape {tuple(a_shape)} and b has shape {tuple(b_shape)}, which cannot be multiplied")
    return (*batch_shape, *torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]), *a_shape[:-1][-1:], *b_shape[1:][-1:])


@lru_cache(maxsize=256)
def _require_product(dtype: torch.dtype, spec: str) -> None:
    """Raise the errors of the product for this dtype before anything is computed."""
    x = jax.ShapeDtypeStruct((1, 1), CARRIER_NAMES[dtype])
    with enable_x64_for(x.dtype):
        jax.eval_shape(lambda x: math.matmul(x, x, _matmul_spec(spec), jax.random.key(0)), x)


@partial(always_jit, static_argnames=("spec", "batch", "orders"))
def _matmul_rows(
    a: Array, b: Array, words: Array | None, *, spec: str, batch: int, orders: tuple[tuple[int, ...], tuple[int, ...]]
) -> Array:
    a, b = (x.transpose(inverse_order(order)) for x, order in zip((a, b), orders, strict=True))
    return vmap_rows(lambda a, b, words: math.matmul(a, b, _matmul_spec(spec), key_of_words(words)), batch)(a, b, words)


@partial(always_jit, static_argnames=("spec", "batch"))
def _matmul_gradients(
    g: Array, a: Array, b: Array, words: Array | None, *, spec: str, batch: int
) -> tuple[Array, Array]:
    def pull_back(g: Array, a: Array, b: Array, words: Array | None) -> tuple[Array, Array]:
        return jax.vjp(lambda a, b: math.matmul(a, b, _matmul_spec(spec), key_of_words(words)), a, b)[1](g)

    return vmap_rows(pull_back, batch)(g, a, b, words)


class _MatmulFunction(torch.autograd.Function):
    """The product, with the gradients of the product of the rounded factors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, words: Tensor, spec: str, copy: bool) -> Tensor:
        return matmul_operator(a, b, words, spec, 0, copy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs[:3])
        ctx.spec = inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_MatmulGradients.apply(gradients[0], *ctx.saved_tensors, ctx.spec), None, None, None  # type: ignore[misc]


class _MatmulGradients(torch.autograd.Function):
    """The gradients of both factors, without second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, a: Tensor, b: Tensor, words: Tensor, spec: str) -> tuple[Tensor, Tensor]:
        return matmul_gradients_operator(gradient, a, b, words, spec, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del ctx, gradients
        raise NotImplementedError("jchop.torch.matmul has first derivatives only; jchop.math.matmul has all, in JAX")
