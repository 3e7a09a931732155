"""Equations that hold programs: calls, loops and branches are taken apart and put together again around the plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jchop._emulate._perform import bind, straight_through
from jchop._emulate._rules import CUSTOM_CALLS, HIGH_CALLS, PLAIN_CALLS, REMAT_CALLS
from jchop._emulate._seeds import Seeds
from jchop._emulate._step import Step, carry_count

Array = jax.Array
Interpret = Callable[..., list[Any]]

__all__ = ["RUNS"]


def _folded(seeds: Seeds | None, number: int, step: Array | int = 0) -> Seeds | None:
    return None if seeds is None else seeds.turn(number, step)


def _strong(values: Sequence[Any]) -> list[Any]:
    """Values whose types are not weak, as those of carried values must stay what they are."""
    return [lax.convert_element_type(x, x.dtype) if _is_number(x) else x for x in map(_array, values)]


def _array(x: Any) -> Any:
    return x if isinstance(x, Array) else jnp.asarray(x)


def _is_number(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _call(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    return interpret(step.inner[0], _folded(seeds, step.number), args)


def _remat(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    params = step.eqn.params
    inner = partial(interpret, step.inner[0], _folded(seeds, step.number))
    return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(args)


def _custom(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """The function's own derivative rule, in the carrier."""
    own = partial(bind, step.eqn.primitive, step.eqn.params)
    return straight_through(
        lambda values, seeds: interpret(step.inner[0], seeds, values), own, _strong(args), _folded(seeds, step.number)
    )


def _solve(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """The solver is emulated; derivatives are those of the linear system, in the carrier."""
    lengths = step.eqn.params["const_lengths"]
    first, last = lengths.matvec + lengths.vecmat, sum(lengths)
    own = partial(bind, step.eqn.primitive, step.eqn.params)

    def run(values: list[Any], seeds: Seeds | None) -> list[Any]:
        return interpret(step.inner[0], seeds, [*values[first : first + lengths.solve], *values[last:]])

    return straight_through(run, own, _strong(args), _folded(seeds, step.number))


def _cond(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    index, *operands = args

    def branch(i: int, values: list[Any]) -> list[Any]:
        return _strong(interpret(step.inner[i], _folded(seeds, step.number + i), values))

    return lax.switch(index, [partial(branch, i) for i in range(len(step.inner))], operands)


def _scan(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    params = step.eqn.params
    consts, carried = carry_count(params)
    fixed, start, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]

    def turn(carry: tuple[list[Any], Array], x: list[Any]) -> tuple[tuple[list[Any], Array], list[Any]]:
        values, count = carry
        out = _strong(interpret(step.inner[0], _folded(seeds, step.number, count), [*fixed, *values, *x]))
        return (out[:carried], count + jnp.uint32(1)), out[carried:]

    (last, _), ys = lax.scan(
        turn,
        (_strong(start), jnp.uint32(0)),
        list(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *ys]


def _while(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    test, body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    first, fixed, start = args[:test], args[test : test + body], args[test + body :]

    def go_on(carry: tuple[list[Any], Array]) -> Any:
        values, count = carry
        return interpret(step.inner[0], _folded(seeds, step.number, count), [*first, *values])[0]

    def turn(carry: tuple[list[Any], Array]) -> tuple[list[Any], Array]:
        values, count = carry
        out = interpret(step.inner[1], _folded(seeds, step.number + 1, count), [*fixed, *values])
        return _strong(out), count + jnp.uint32(1)

    return lax.while_loop(go_on, turn, (_strong(start), jnp.uint32(0)))[0]


def _shard_map(step: Step, seeds: Seeds | None, args: list[Any], interpret: Interpret) -> list[Any]:
    """Each shard counts its own elements, so what varies over shards has seeds of its own there."""
    params = step.eqn.params
    axes = tuple(sorted(params.get("newly_manual_axes", params.get("manual_axes"))))
    six = () if seeds is None else _folded(seeds, step.number).six  # type: ignore[union-attr]
    typed = params["check_vma"]

    def shard(six: tuple[Array, ...], *values: Any) -> tuple[Any, ...]:
        own = Seeds(six, (*seeds.axes, *axes) if typed else seeds.axes) if seeds is not None else None
        if own is not None and not typed:  # nothing says what varies: everything draws otherwise
            own = own.turn(0, lax.axis_index(axes))
        return tuple(interpret(step.inner[0], own, list(values)))

    return list(
        jax.shard_map(
            shard,
            mesh=params["mesh"],
            in_specs=((PartitionSpec(),) * len(six), *params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(axes),
            check_vma=typed,
        )(six, *args)
    )


RUNS: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys((*PLAIN_CALLS, *HIGH_CALLS), _call),
    **dict.fromkeys(REMAT_CALLS, _remat),
    **dict.fromkeys(CUSTOM_CALLS, _custom),
    "custom_linear_solve": _solve,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
}
