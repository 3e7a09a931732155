"""Optimizers with packed state, by name: Optax's own inside `quantize_state`."""

from __future__ import annotations

from typing import Any

import optax

from jchop.formats import CodebookFormat, FloatFormat, ScaledFormat, dynamic4, dynamic8, parse_format, udynamic8nz
from jchop.optim._arguments import BELOW_ONE, FROM_ZERO, check_number
from jchop.optim._state import quantize_state

#: Patterns of the paths of moments in the states of Optax's optimizers.
_FIRST_MOMENT_PATH, _SECOND_MOMENT_PATH, _TRACE_PATH = "/0/mu", "/0/nu", "/0/trace"
#: Second moments are divisors, so their formats have no zero: if one is rounded to zero, the update is m / eps, which
#: may be 10^8 times too large. These are the multiples of 1/16 from 1/16 to 1 (Li et al., arXiv 2309.01507, section
#: 4.1) and floats of 8 bits without a sign.
_LINEAR4_WITHOUT_ZERO = ScaledFormat(CodebookFormat(tuple(i / 16 for i in range(1, 17))), 64, scale="bfloat16")
_FLOAT8_WITHOUT_ZERO = ScaledFormat(FloatFormat(4, 4, infinities=False, nans="none", signed=False, zero=False), 256)


def _moment_formats(first: Any, second: Any) -> dict[str, Any]:
    return {_FIRST_MOMENT_PATH: first, _SECOND_MOMENT_PATH: second}


def _check_hyperparameters(learning_rate: Any, b1: Any, b2: Any, weight_decay: Any = 0.0, **roots: Any) -> None:
    """Refuses numbers that make no sense in training; with them every step would be skipped as not finite."""
    check_number("learning_rate", learning_rate, FROM_ZERO, schedule=True)
    check_number("b1", b1, BELOW_ONE)
    check_number("b2", b2, BELOW_ONE)
    check_number("weight_decay", weight_decay, FROM_ZERO, schedule=True)
    for name, value in roots.items():
        check_number(name, value, FROM_ZERO)


def _optax_adamw(
    learning_rate: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: Any,
    weight_decay: Any,
    mask: Any,
    nesterov: Any,
) -> optax.GradientTransformationExtraArgs:
    _check_hyperparameters(learning_rate, b1, b2, weight_decay, eps=eps, eps_root=eps_root)
    return optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)


def adamw8bit(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments in 8 bits: dynamic maps, signed and unsigned, in groups of 256.

    The unsigned map, `jchop.udynamic8nz`, has no zero, because updates are divided by the root of the second moment.
    2.04 bytes of state for each parameter; `optax.adamw` takes 8.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment. Default 0.9.
        b2: decay of the second moment. Default 0.999.
        eps: added to the root of the second moment. Default 1e-8.
        eps_root: added within the root. Default 0.
        mu_dtype: dtype of the unpacked first moment. Default (None): the dtype of the parameter.
        weight_decay: weight decay of AdamW. Default 1e-4.
        mask: the parameters that `weight_decay` is for: a pytree of booleans, or a function of the parameters that
            gives one. Default (None): all of them.
        nesterov: whether to use Nesterov's momentum. Default False.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`; a mask must not depend on the lengths of axes.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw8bit(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].mu["w"].nbytes / (64 * 256)
        1.015625
    """
    tx = _optax_adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)
    return quantize_state(
        tx, _moment_formats(dynamic8, udynamic8nz), min_size=min_size, nonfinite=nonfinite, chunks=chunks
    )


def adamw4bit(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments in 4 bits, in groups of 64: a signed dynamic map, and 1/16 to 1, which has no zero.

    Groups of 64 with scales in bfloat16 take no more than groups of 128 with scales in binary32:
    1.06 bytes of state for each parameter.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment. Default 0.9.
        b2: decay of the second moment. Default 0.999.
        eps: added to the root of the second moment. Default 1e-8.
        eps_root: added within the root. Default 0.
        mu_dtype: dtype of the unpacked first moment. Default (None): the dtype of the parameter.
        weight_decay: weight decay of AdamW. Default 1e-4.
        mask: the parameters that `weight_decay` is for: a pytree of booleans, or a function of the parameters that
            gives one. Default (None): all of them.
        nesterov: whether to use Nesterov's momentum. Default False.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`; a mask must not depend on the lengths of axes.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    References:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv 2309.01507.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw4bit(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].nu["w"].nbytes / (64 * 256)
        0.53125
    """
    tx = _optax_adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)
    return quantize_state(
        tx,
        _moment_formats(dynamic4(group=64, scale="bfloat16"), _LINEAR4_WITHOUT_ZERO),
        min_size=min_size,
        nonfinite=nonfinite,
        chunks=chunks,
    )


def adamw_fp8(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments in floats of 8 bits, in groups of 256 under a binary32 scale.

    The first moment is in float8_e4m3fn. The second has four exponent and four fraction bits, no sign and no zero,
    because updates are divided by its root: a moment below 1.6e-5 of the largest of its group is stored as that.
    2.03 bytes of state for each parameter.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment. Default 0.9.
        b2: decay of the second moment. Default 0.999.
        eps: added to the root of the second moment. Default 1e-8.
        eps_root: added within the root. Default 0.
        mu_dtype: dtype of the unpacked first moment. Default (None): the dtype of the parameter.
        weight_decay: weight decay of AdamW. Default 1e-4.
        mask: the parameters that `weight_decay` is for: a pytree of booleans, or a function of the parameters that
            gives one. Default (None): all of them.
        nesterov: whether to use Nesterov's momentum. Default False.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`; a mask must not depend on the lengths of axes.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw_fp8(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].mu["w"].qvalue.dtype
        dtype(float8_e4m3fn)
    """
    tx = _optax_adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)
    first = parse_format("float8_e4m3fn(group=256)")
    return quantize_state(
        tx, _moment_formats(first, _FLOAT8_WITHOUT_ZERO), min_size=min_size, nonfinite=nonfinite, chunks=chunks
    )


def adam8bit(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with both moments in 8 bits, as `adamw8bit` without weight decay.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment. Default 0.9.
        b2: decay of the second moment. Default 0.999.
        eps: added to the root of the second moment. Default 1e-8.
        eps_root: added within the root. Default 0.
        mu_dtype: dtype of the unpacked first moment. Default (None): the dtype of the parameter.
        nesterov: whether to use Nesterov's momentum. Default False.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`; a mask must not depend on the lengths of axes.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.adam8bit(1e-3).init(jnp.zeros((64, 256)))).nbytes
        33288
    """
    _check_hyperparameters(learning_rate, b1, b2, eps=eps, eps_root=eps_root)
    tx = optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return quantize_state(
        tx, _moment_formats(dynamic8, udynamic8nz), min_size=min_size, nonfinite=nonfinite, chunks=chunks
    )


def lion8bit(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion with its moment in 8 bits: the signed dynamic map in groups of 256.

    Args:
        learning_rate: a number or a schedule.
        b1: weight of the moment in the update. Default 0.9.
        b2: decay of the moment. Default 0.99.
        mu_dtype: dtype of the unpacked moment. Default (None): the dtype of the parameter.
        weight_decay: as in `optax.lion`. Default 1e-3.
        mask: the parameters that `weight_decay` is for: a pytree of booleans, or a function of the parameters that
            gives one. Default (None): all of them.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`; a mask must not depend on the lengths of axes.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.lion8bit(1e-4).init(jnp.zeros((64, 256)))).nbytes
        16648
    """
    _check_hyperparameters(learning_rate, b1, b2, weight_decay)
    tx = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return quantize_state(tx, {_FIRST_MOMENT_PATH: dynamic8}, min_size=min_size, nonfinite=nonfinite, chunks=chunks)


def sgd8bit(
    learning_rate: Any,
    momentum: Any = 0.9,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    min_size: int | None = None,
    nonfinite: str = "skip",
    chunks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent with its momentum in 8 bits: the signed dynamic map in groups of 256.

    Args:
        learning_rate: a number or a schedule.
        momentum: decay of the trace of gradients. Default 0.9.
        nesterov: whether to use Nesterov's momentum. Default False.
        accumulator_dtype: dtype of the unpacked trace. Default (None): the dtype of the parameter.
        min_size: as in `quantize_state`.
        nonfinite: as in `quantize_state`.
        chunks: as in `quantize_state`.

    Returns:
        An Optax transformation. Its state is a `QuantizedState`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.sgd8bit(0.1).init(jnp.zeros((64, 256)))).nbytes
        16644
    """
    check_number("learning_rate", learning_rate, FROM_ZERO, schedule=True)
    check_number("momentum", momentum, BELOW_ONE)
    tx = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    return quantize_state(tx, {_TRACE_PATH: dynamic8}, min_size=min_size, nonfinite=nonfinite, chunks=chunks)
