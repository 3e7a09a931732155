"""Optimizers with packed state, by name: Optax's own inside `quantize_state`."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import optax

from jchop._spec.spec import as_spec
from jchop.formats import CodebookFormat, FloatFormat, ScaledFormat, parse_format
from jchop.formats.scaled.catalogue import dynamic4, dynamic8, softsign8, udynamic8nz, usquare8nz
from jchop.optim._chain import compensate, join_master
from jchop.optim._leaves import check_number, in_sum_dtype, make_transformation
from jchop.optim._pack import PresetRules
from jchop.optim._state import pack_state, quantize_state

#: Second moments are divisors, so their formats have no zero: if one is rounded to zero, the update is m / eps, which
#: may be 10^8 times too large. These are the multiples of 1/16 from 1/16 to 1 (Li et al., arXiv 2309.01507, section
#: 4.1) and floats of 8 bits without a sign.
_LINEAR4_WITHOUT_ZERO = ScaledFormat(CodebookFormat(tuple(i / 16 for i in range(1, 17))), 64, scale="bfloat16")
_FLOAT8_WITHOUT_ZERO = ScaledFormat(FloatFormat(4, 4, infinities=False, nans="none", signed=False, zero=False), 256)

#: Arguments that every preset refuses: numbers that make no sense in training, with which every step would be skipped.
#: They are below these bounds, and not below 0.
_HYPERPARAMETER_BOUNDS = {
    **dict.fromkeys(("b1", "b2", "momentum", "beta", "adam_b1", "adam_b2"), 1.0),
    **dict.fromkeys(("learning_rate", "weight_decay", "eps", "eps_root"), math.inf),
    **dict.fromkeys(("adam_learning_rate", "adam_weight_decay", "adam_eps_root"), math.inf),
}
_SCHEDULES = ("learning_rate", "weight_decay", "adam_learning_rate")
#: The documentation of an argument of a preset.
_ARGUMENT_TEXTS = {
    "learning_rate": "a number or a schedule.",
    "b1": "decay of the first moment; of Lion, its weight in the update.",
    "b2": "decay of the second moment; of Lion, of the moment.",
    "eps": "added to the root of the second moment.",
    "eps_root": "added within the root.",
    "mu_dtype": "dtype of the unpacked first moment. None: the dtype of the parameter.",
    "weight_decay": "as in Optax: a number or a schedule.",
    "mask": "the parameters that `weight_decay` is for, as in Optax. None: all of them.",
    "nesterov": "whether to use Nesterov's momentum.",
    "momentum": "decay of the trace of gradients.",
    "accumulator_dtype": "dtype of the unpacked trace. None: the dtype of the parameter.",
    "min_size": "as in `quantize_state`.",
    "nonfinite": "as in `quantize_state`.",
    "chunks": "as in `quantize_state`; a mask must not depend on the lengths of axes.",
}

_PackedOptimizer = Callable[..., optax.GradientTransformationExtraArgs]


def _packed(
    optimizer: Callable[..., optax.GradientTransformation],
    formats: dict[str, Any],
    wrap: Any = lambda tx: tx,
    whole: bool = False,
    **defaults: Any,
) -> Callable[[Callable[[], None]], _PackedOptimizer]:
    """A preset: an optimizer of Optax inside `quantize_state`, by the name and documentation of the decorated function.

    It takes the arguments of Optax and of `quantize_state`, in this order. Its docstring gets sections on arguments
    before its last ones.

    Args:
        optimizer: the function of Optax.
        formats: the format of each array of its state, by a pattern of its path there.
        wrap: of the packed transformation. Default: itself.
        whole: whether a step needs whole arrays, so that there are no chunks. Default False.
        defaults: of arguments that differ from Optax.
    """
    rules = PresetRules((pattern, as_spec(fmt, scaled=True)) for pattern, fmt in formats.items())
    own = [p for p in inspect.signature(quantize_state).parameters.values() if p.kind is p.KEYWORD_ONLY]
    own = [p for p in own if not (whole and p.name == "chunks")]
    theirs = inspect.signature(optimizer).parameters.values()
    theirs = [p.replace(default=defaults.get(p.name, p.default), annotation=p.empty) for p in theirs]
    signature = inspect.Signature([*theirs, *own], return_annotation="optax.GradientTransformationExtraArgs")

    def with_name_of(described: Callable[[], None]) -> _PackedOptimizer:
        def preset(*args: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:  # Python names no function here
                raise TypeError(f"{described.__name__}() {error}") from None
            bound.apply_defaults()
            packing = {p.name: bound.arguments.pop(p.name) for p in own}
            for name, value in bound.arguments.items():
                left_out = value is None and signature.parameters[name].default is None
                if name in _HYPERPARAMETER_BOUNDS and not left_out:
                    check_number(name, value, 0, _HYPERPARAMETER_BOUNDS[name], schedule=name in _SCHEDULES)
            may_join = not whole and bound.arguments.get("mask") is None
            inner = optimizer(*bound.args, **bound.kwargs)
            return wrap(
                pack_state(inner, rules, None, chunks=packing.pop("chunks", None), may_join=may_join, **packing)
            )

        preset.__name__ = preset.__qualname__ = described.__name__
        preset.__signature__ = signature  # type: ignore[attr-defined]
        preset.__doc__ = _with_arguments(described.__doc__ or "", signature)
        return preset

    return with_name_of


def _with_arguments(text: str, signature: inspect.Signature) -> str:
    """A docstring with the sections that all presets have, before its own ones."""
    entries = []
    for name, parameter in signature.parameters.items():
        default = "" if parameter.default is parameter.empty else f" Default {parameter.default!r}."
        entry = f"{name}: {_ARGUMENT_TEXTS.get(name, 'as in Optax.')}{default}"
        entries.append(textwrap.indent(textwrap.fill(entry, 104, subsequent_indent="    "), 8 * " "))
    own_sections = re.search(r"\n\n    (References|Example):", text)
    end = len(text) if own_sections is None else own_sections.start()
    return text[:end] + _SECTIONS.format("\n".join(entries)) + text[end:]


_SECTIONS = """

    Args:
{}

    Returns:
        An Optax transformation. Its state is that of `quantize_state`.

    Raises:
        TypeError, ValueError: for a number out of range: decays are in [0, 1), the others are finite and >= 0."""


@_packed(optax.adamw, {"/0/mu": dynamic8, "/0/nu": udynamic8nz})
def adamw8bit() -> None:
    """AdamW with both moments in 8 bits: dynamic maps, signed and unsigned, in groups of 256.

    The unsigned map, `jchop.formats.udynamic8nz`, has no zero, because updates are divided by the root of the second
    moment. The state has 2.04 bytes for each parameter; `optax.adamw` has 8.

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw8bit(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].mu["w"].nbytes / (64 * 256)
        1.015625
    """


@_packed(optax.adamw, {"/0/mu": dynamic4(group=64, scale="bfloat16"), "/0/nu": _LINEAR4_WITHOUT_ZERO})
def adamw4bit() -> None:
    """AdamW with both moments in 4 bits, in groups of 64: a signed dynamic map, and 1/16 to 1, which has no zero.

    Groups of 64 with scales in bfloat16 need no more bytes than groups of 128 with scales in binary32. The state has
    1.06 bytes for each parameter.

    References:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv 2309.01507.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw4bit(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].nu["w"].nbytes / (64 * 256)
        0.53125
    """


@_packed(optax.adamw, {"/0/mu": parse_format("float8_e4m3fn(group=256)"), "/0/nu": _FLOAT8_WITHOUT_ZERO})
def adamw_fp8() -> None:
    """AdamW with both moments in floats of 8 bits, in groups of 256 under a binary32 scale.

    The first moment is in float8_e4m3fn. The second has four exponent and four fraction bits, no sign and no zero,
    because updates are divided by its root. A moment below 1.6e-5 of the largest of its group is stored as this share.
    The state has 2.03 bytes for each parameter.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw_fp8(1e-3).init({"w": jnp.zeros((64, 256))})
        >>> state.inner_state[0].mu["w"].qvalue.dtype
        dtype(float8_e4m3fn)
    """


@_packed(optax.adam, {"/0/mu": dynamic8, "/0/nu": udynamic8nz})
def adam8bit() -> None:
    """Adam with both moments in 8 bits, as `adamw8bit` without weight decay.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.adam8bit(1e-3).init(jnp.zeros((64, 256)))).nbytes
        33288
    """


@_packed(optax.lion, {"/0/mu": dynamic8})
def lion8bit() -> None:
    """Lion with its moment in 8 bits: the signed dynamic map in groups of 256.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.lion8bit(1e-4).init(jnp.zeros((64, 256)))).nbytes
        16648
    """


# Optax has no momentum by default, and so no state to pack.
@_packed(optax.sgd, {"/0/trace": dynamic8}, momentum=0.9)
def sgd8bit() -> None:
    """Stochastic gradient descent with its momentum in 8 bits: the signed dynamic map in groups of 256.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.sgd8bit(0.1).init(jnp.zeros((64, 256)))).nbytes
        16644
    """


@_packed(optax.contrib.muon, {"mu": dynamic8, "nu": udynamic8nz}, whole=True)
def muon8bit() -> None:
    """Muon with its momentum in 8 bits: the signed dynamic map in groups of 256.

    Optax gives parameters that are no matrices to AdamW, whose moments are packed as in `adamw8bit`. A step needs whole
    matrices, so there are no chunks.

    References:
        Effective Quantization of Muon Optimizer States, arXiv 2509.23106.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> jc.optim.state_report(jc.optim.muon8bit(1e-3).init({"w": jnp.zeros((64, 256))})).nbytes
        16664
    """


def _on_masters(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """A transformation that computes in float32, from parameters with their bytes (`compensate`)."""
    link = compensate("bfloat16", bits=8)

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map(in_sum_dtype, params)), link.init(params)

    def update(updates: Any, state: Any, params: Any, **extra: Any) -> Any:
        masters = jax.tree.map(join_master, params, state[1].lost)
        updates, inner_state = inner.update(jax.tree.map(in_sum_dtype, updates), state[0], masters, **extra)
        updates, correction = link.update(updates, state[1], params)
        return updates, (inner_state, correction)

    return make_transformation(init, update, needs_params=True)


@_packed(
    optax.adamw,
    {"/0/mu": softsign8(group=32, scale="bfloat16"), "/0/nu": usquare8nz(group=32, scale="bfloat16")},
    wrap=_on_masters,
)
def adamw_split() -> None:
    """AdamW for bfloat16 parameters, with a byte for each in place of a master copy, and companded 8-bit moments.

    A parameter and its byte are a number of 24 bits, as `compensate` with ``bits=8`` has it. The step is computed in
    float32, from these numbers. The moments have the levels `jchop.formats.softsign8` and `jchop.formats.usquare8nz`,
    in groups of 32. The state has 3.13 bytes for each parameter, so training needs 7.13 with bfloat16 gradients. With
    a float32 master copy and float32 moments it needs 16. Parameters of other dtypes train without a byte. A step below
    2^-17 of its parameter has no effect.

    The state is a pair: the states of `quantize_state` and of `compensate`.

    References:
        FlashOptim, arXiv 2602.23349.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> state = jc.optim.adamw_split(1e-3).init({"w": jnp.zeros((64, 256), "bfloat16")})
        >>> jc.optim.state_report(state).nbytes / (64 * 256)
        3.12548828125
    """
