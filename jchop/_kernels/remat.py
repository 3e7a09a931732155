"""Codes as residuals: roundings under a policy of `jax.checkpoint` that saves their name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Recompute, Saveable, checkpoint_policies
from jax.extend.core import JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.extend.core.primitives import name_p
from jax.interpreters import partial_eval

from jchop._common.gradients import with_rule, with_rule_p
from jchop._common.settings import always_jit

#: The name of codes and scales for policies.
CODES_NAME = "jchop_codes"

#: Functions from the operands of an operation to its codes and scales, and from these to its results, after so many
#: first operands.
Coder = tuple[Callable[..., Sequence[Any]], Callable[..., Any], int]


def save_codes(primitive: Any, *avals: Any, **params: Any) -> Any:
    """A policy of `jax.checkpoint`: saves the codes and scales of roundings, and no other array.

    The backward pass reads the numbers of a rounding from its codes, so each operand is rounded once. Saved are formats
    of up to 8 bits, and wider floats of at most 16 bits that are narrower than their array. Everything else is computed
    again. Programs under other policies do not change. There is no second derivative.

    Pass it to `jax.checkpoint`, `flax.nnx.remat` or `flax.linen.remat` as `policy`, around or within a quantized
    function. ``jax.checkpoint_policies.save_from_both_policies`` joins it with another policy. The codes have the name
    ``"jchop_codes"``, for policies of JAX that select by names.

    Args:
        primitive: of JAX.
        *avals: the types of its arguments.
        **params: its parameters.

    Returns:
        Whether JAX may save the results of the primitive.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low = jc.quantize_fn(lambda w, x: jnp.tanh(x @ w) @ w, "float8_e4m3fn(group=tensor)")
        >>> step = jax.checkpoint(low, policy=jc.save_codes)
        >>> jax.grad(lambda w: step(w, jnp.ones((2, 4))).sum())(jnp.eye(4)).shape
        (4, 4)
    """
    return _SAVE_NAMED(primitive, *avals, **params)


_SAVE_NAMED = checkpoint_policies.save_only_these_names(CODES_NAME)


def save_codes_of(primitive: Primitive, make_coder: Callable[..., Coder | None]) -> None:
    """Lets an operation leave codes as residuals where a policy saves them; other programs stay as they are.

    Args:
        primitive: a rounding; or, with `stores`, an operation whose results are codes.
        make_coder: of the types of the operands and the parameters, gives the two halves of a rounding, or None.
    """

    def leave_codes(saveable: Any, there: Any, eqn: JaxprEqn) -> tuple | None:
        del saveable
        stores = eqn.primitive.stores  # type: ignore[attr-defined]
        coder = _coder_of_bytes(eqn) if stores else make_coder([atom.aval for atom in eqn.invars], **eqn.params)
        return coder and _leave_codes(*coder, there, eqn)

    _define_residuals(primitive, leave_codes)


def _define_residuals(primitive: Primitive, leave_codes: Callable[..., tuple | None]) -> None:
    """Where a policy saves codes, the parts of an operation are from `leave_codes`, else from JAX."""

    def rule(saveable: Callable[..., Any], unknown: Sequence[bool], there: Sequence[bool], eqn: JaxprEqn) -> tuple:
        needed = [atom for atom, known in zip(eqn.invars, there, strict=True) if type(atom) is Var and not known]
        avals, every, none = [atom.aval for atom in eqn.invars], *([b] * len(eqn.outvars) for b in (True, False))
        if any(unknown):
            return None, eqn, every, every, needed
        if _saves(saveable(primitive, *avals, **eqn.params)):
            return eqn, None, none, none, []
        saves = bool(avals) and _saves(saveable(name_p, avals[0], name=CODES_NAME))
        return (saves and leave_codes(saveable, there, eqn)) or (eqn, eqn, none, every, needed)

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def _saves(answer: Any) -> bool:
    """Whether a policy saves, by its answer."""
    if type(answer) is not bool and answer is not Recompute and answer is not Saveable:
        raise NotImplementedError(
            f"a policy of jax.checkpoint moves codes to another memory ({answer}), and jchop can only save them: "
            "jax.checkpoint(fun, policy=jchop.save_codes)"
        )
    return answer is True or answer is Saveable


def _coder_of_bytes(eqn: JaxprEqn) -> Coder:
    """The two halves of an operation that makes codes: `jax.checkpoint` would narrow residuals of float8 dtypes."""
    avals: list[Any] = [var.aval for var in eqn.outvars]
    dtypes = [aval.dtype for aval in avals]

    def encode(*operands: Any) -> list[Any]:
        return [
            lax.bitcast_convert_type(out, jnp.uint8) if dtype.itemsize == 1 else out
            for out, dtype in zip(eqn.primitive.bind(*operands, **eqn.params), dtypes, strict=True)
        ]

    return encode, lambda *codes: [lax.bitcast_convert_type(*pair) for pair in zip(codes, dtypes, strict=True)], 0


def _leave_codes(
    encode: Callable[..., Sequence[Any]], decode: Callable[..., Any], reads: int, there: Sequence[bool], eqn: JaxprEqn
) -> tuple:
    """An operation in two parts: the known one gives its codes, too, and the other one decodes these."""

    def numbers_of_codes(*operands_and_codes: Any) -> list[Any]:
        return jax.tree.leaves(decode(*operands_and_codes))

    def round_to_codes(*operands: Any) -> list[Any]:
        codes = encode(*operands)
        return [*numbers_of_codes(*operands[:reads], *codes), *codes]

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("jchop.save_codes keeps no second derivative: leave out policy= of jax.checkpoint")

    with eqn.ctx.manager, jax.enable_x64(eqn.params["wide"] or jax.config.jax_enable_x64):  # type: ignore[attr-defined]
        known = _call_of(lambda *operands: with_rule(round_to_codes, operands, refuse), eqn.invars)
        codes = [Var(var.aval) for var in known.outvars[len(eqn.outvars) :]]
        later = _call_of(numbers_of_codes, [*eqn.invars[:reads], *codes])
    known = known.replace(invars=eqn.invars, outvars=[*eqn.outvars, *codes], source_info=eqn.source_info)
    later = later.replace(invars=[*eqn.invars[:reads], *codes], outvars=eqn.outvars, source_info=eqn.source_info)
    outs, needed = len(eqn.outvars), [x for x, known in zip(eqn.invars[:reads], there, strict=False) if not known]
    return known, later, [False] * outs, [True] * outs, [*codes, *needed]


def _call_of(fun: Callable[..., Any], atoms: Sequence[Any]) -> JaxprEqn:
    """The equation of a call of a compiled function."""
    (call,) = jax.make_jaxpr(always_jit(fun))(*(atom.aval for atom in atoms)).eqns
    return call


def _open_program(saveable: Any, there: Sequence[bool], eqn: JaxprEqn) -> tuple | None:
    """The parts of a function with a derivative rule, if roundings in it leave codes."""
    with eqn.ctx.manager:
        call = _call_of(jaxpr_as_fun(eqn.params["program"]), eqn.invars)
    atoms = dict(zip(call.invars, eqn.invars, strict=True))
    call = call.replace(outvars=eqn.outvars, source_info=eqn.source_info)
    rule: Any = partial_eval.partial_eval_jaxpr_custom_rules[call.primitive]
    known, later, *outs, residuals = rule(saveable, [False] * len(there), there, call)
    if all(residual in atoms for residual in residuals):
        return None
    known, later = (part.replace(invars=[atoms.get(atom, atom) for atom in part.invars]) for part in (known, later))
    return known, later, *outs, [atoms.get(residual, residual) for residual in residuals]


_define_residuals(with_rule_p, _open_program)
