"""A program run with the operands of its products rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jchop._paths import pattern_of_all
from jchop._products.adapters import beside
from jchop._products.codes import Coded, block_of
from jchop._products.contraction import Roundings, contract
from jchop._products.product import Flipped
from jchop._products.traced.analysis import ProductStep
from jchop._products.traced.origins import MOVES
from jchop._products.weights import Held, Keys, Twin, is_packed, rounded
from jchop._program.bind import bind
from jchop._program.control import Interpret
from jchop._program.run import Runner, interpret
from jchop._program.step import CUSTOM_CALLS, HIGH_CALLS, PLAIN_CALLS, REMAT_CALLS, carry_count

Array = jax.Array

__all__ = ["Quantization"]

#: Moves of one array, under which elements, scales and zero points stay beside each other.
_ALONE = MOVES - {"concatenate", "dynamic_update_slice", "optimization_barrier", "pad", "stack"}
#: Moves after which a product takes a parameter with an adapter still as a whole; of a stack, casts alone.
_CASTS = frozenset({"convert_element_type", "copy", "optimization_barrier"})
_KEEPS_ADAPTER = _CASTS | {"transpose", "reshape", "squeeze", "expand_dims"}
_ENTERED = frozenset((*PLAIN_CALLS, *HIGH_CALLS, *REMAT_CALLS))


class Quantization(Runner):
    """Products under rules.

    Args:
        roundings: of each product that has any but those of its weights, by the identity of its step.
        paths: of the parameters, for messages.
    """

    def __init__(self, roundings: dict[int, tuple[Roundings, int]], paths: Sequence[str] = ()) -> None:
        self.roundings, self.paths = roundings, paths
        self._busy: dict[int, bool] = {}
        #: Products of codes whose weight has none, by the path of the weight, in a run that has not ended.
        self.without_codes: dict[str, tuple[ProductStep, int, Roundings]] = {}
        #: Whether a run may find a weight without codes; False after one that did not.
        self.is_doubtful = any(how.codes and weight >= 0 for how, weight in roundings.values())

    def prepare(self, part: ProductStep, env: dict[Any, Any], seeds: Keys | None) -> None:
        """Parameters are rounded once, before the first equation that computes with them."""
        for i, v in enumerate(part.operands):
            param = None if isinstance(v, Literal) else env[v]
            if isinstance(param, Held) and not self._passes(part, i, param):
                env[v] = param.numbers(seeds)

    def finish(self, value: Any, seeds: Keys | None) -> Any:
        """A result, which is an array."""
        return rounded(value.numbers(seeds) if isinstance(value, Held) else value)

    def _passes(self, step: ProductStep, i: int, param: Held) -> bool:
        """Whether a program within a step takes a parameter before it is rounded."""
        if step.kind != "control":
            return False
        if i < _shared(step):  # its codes are multiplied as they are stored: nothing is computed again in each turn
            return param.codes and is_packed(param.value)
        if step.name == "scan":
            return i >= sum(carry_count(step.eqn.params)) and param.stack > 0
        return step.name in _ENTERED or (step.name == "cond" and i > 0)

    def control(self, step: ProductStep, seeds: Keys | None, args: list[Any]) -> list[Any]:
        """Programs without a rounding are left whole, with their own derivatives."""
        if not any(isinstance(x, Held | Twin) for x in args) and not self._is_busy(step):
            return bind(step.eqn.primitive, step.eqn.params, *args)
        if step.name in CUSTOM_CALLS and not self._is_busy(step):
            return bind(step.eqn.primitive, step.eqn.params, *map(rounded, args))
        if step.name == "scan":
            fixed, stacks = _shared(step), sum(carry_count(step.eqn.params))
            args = [
                x if isinstance(x, Held) or i < fixed else _stacked(x) if i >= stacks else rounded(x)
                for i, x in enumerate(args)
            ]
        elif step.name == "while":
            args = [x if i < _shared(step) else rounded(x) for i, x in enumerate(args)]
        elif step.name not in _ENTERED and step.name != "cond":
            args = [rounded(x) for x in args]
        return super().control(step, seeds, args)

    def _is_busy(self, step: ProductStep) -> bool:
        busy = self._busy.get(id(step))
        if busy is None:
            busy = any(id(inner) in self.roundings for plan in step.inner for inner in plan.walk())
            self._busy[id(step)] = busy
        return busy

    def run(self, part: ProductStep, seeds: Keys | None, args: list[Any]) -> list[Any]:
        """One equation."""
        if part.moves and any(isinstance(x, Twin) for x in args):
            return self._move_param(part, args)
        if part.product is not None and any(map(_adapter_of, args)):
            return [self._adapter_product(part, seeds, args)]
        if id(part) in self.roundings:
            return [self._product(part, seeds, args)]
        return bind(part.eqn.primitive, part.eqn.params, *map(rounded, args))

    def check_codes(self) -> None:
        """Refuse a run, at its end, in which weights had no codes.

        Raises:
            ValueError: that names all of them, and the rule that leaves them in floats.
        """
        failures, self.without_codes = self.without_codes, {}
        if failures:
            raise ValueError(_without_codes(failures, self.paths))

    def _adapter_product(self, part: ProductStep, seeds: Keys | None, args: list[Any]) -> Array:
        """A product of a parameter that has an adapter."""
        side = next(i for i, x in enumerate(args) if _adapter_of(x) is not None)
        adapter, x = _adapter_of(args[side]), rounded(args[1 - side])
        (y,) = self.run(part, seeds, [replace(x, adapter=None) if i == side else x for i, x in enumerate(args)])
        assert adapter is not None
        return beside(adapter, part, side, x, y, None if seeds is None else seeds.turn(part.number, 1).key)

    def enter(self, step: ProductStep, seeds: Keys | None, args: list[Any], inner: Interpret) -> list[Any]:
        """The results of a step that holds programs; those of a plain call may be parameters that have moved."""
        if step.name in PLAIN_CALLS:
            inner = partial(interpret, _Inlined(self))
        return super().enter(step, seeds, args, inner)

    def operand(self, step: ProductStep, x: Array, roundings: Roundings, key: Any) -> tuple[Array, Roundings, Any]:
        """The operand of data, the roundings that remain, and their key."""
        return x, roundings, key

    def _move_param(self, part: ProductStep, args: list[Any]) -> list[Any]:
        """Numbers that move with those before their rounding; codes move alone, and a cast leaves them as they are."""
        run = partial(bind, part.eqn.primitive, part.eqn.params)
        adapters = [_adapter_of(x) for x in args]
        has_stack = any(adapter is not None and adapter.stack for adapter in adapters)
        if any(adapters) and part.name in _KEEPS_ADAPTER and (not has_stack or part.name in _CASTS):
            outs = self._move_param(part, [replace(x, adapter=None) if isinstance(x, Twin) else x for x in args])
            return [replace(out, adapter=adapter) for out, adapter in zip(outs, adapters, strict=True)]
        low, full = run(*map(rounded, args)), run(*(x.full if isinstance(x, Twin) else x for x in args))
        first, *rest = args
        codes: list[Coded | None] = [None] * len(low)
        if isinstance(first, Twin) and first.codes is not None and not any(isinstance(x, Twin) for x in rest):
            if part.name == "convert_element_type":
                codes = [first.codes]
            elif part.name in _ALONE and not _fills(part):
                codes = [first.codes.map_parts(lambda v, i=i: _run_alone(part, v, rest)[i]) for i in range(len(low))]
        return [Twin(*each) for each in zip(low, full, codes, strict=True)]

    def _product(self, step: ProductStep, seeds: Keys | None, args: list[Any]) -> Array:
        roundings, weight = self.roundings[id(step)]
        assert step.product is not None
        key = None if seeds is None or not roundings.stochastic else seeds.turn(step.number).key
        product = Flipped(step.product) if weight == 0 else step.product
        x, w = (args[1], args[0]) if weight == 0 else (args[0], args[1])
        x, w = _as_floats(x, w), _as_floats(w, x)
        extra = tuple(map(rounded, args[2:]))
        x, roundings, key = self.operand(step, rounded(x), roundings, key)
        if weight < 0:  # both operands are data
            return contract(product, x, rounded(w), roundings, key, extra=extra)
        full = w.full if isinstance(w, Twin) else w
        codes = w.codes if isinstance(w, Twin) and roundings.codes else None
        if roundings.codes and roundings.right is not None and codes is None:  # an error, when all of them are known
            path = next((self.paths[use.leaf] for use in step.uses[weight] if use.leaf < len(self.paths)), "*")
            self.without_codes.setdefault(path, (step, weight, roundings))
            roundings = replace(roundings, codes=False)
        group = (
            None if codes is None or roundings.right is None else block_of(roundings.right, product.forward.right.ndim)
        )
        if codes is not None and group is not None:
            codes = replace(codes, block=math.gcd(group, *(use.block_of(group) for use in step.uses[weight])))
        return contract(product, x, full, roundings, key, rounded=rounded(w), codes=codes, extra=extra)


class _Inlined(Runner):
    """Another runner, for a program whose results stay what they are."""

    def __init__(self, runner: Quantization) -> None:
        self.prepare, self.run, self.control = runner.prepare, runner.run, runner.control

    def finish(self, value: Any, seeds: Keys | None) -> Any:
        """A result: an array, or a parameter that has moved."""
        return value.numbers(seeds) if isinstance(value, Held) else value


def _adapter_of(x: Any) -> Any:
    return x.adapter if isinstance(x, Twin) else None


def _without_codes(failures: dict[str, tuple[ProductStep, int, Roundings]], paths: Sequence[str]) -> str:
    """Why weights have no codes, and what to do."""
    path, *others = failures
    step, weight, roundings = failures[path]
    why = "computed with before the product, or put in another order, or sent between devices"
    if all(use.is_intact for use in step.uses[weight]):
        why = (
            "joined with others, padded, chosen by a branch, carried by a loop, or an argument of shard_map or of a "
            "function with a derivative of its own"
        )
    rest = f", like {len(others)} other{'s' * (len(others) > 1)}, such as {others[0]!r}," if others else ""
    pattern = path if path == "*" else pattern_of_all(failures, (path for path in paths if path not in failures))
    return (
        f"product='codes': the weight {path!r}{rest} of {step.name} at {step.source or 'an unknown line'} is {why}, so "
        f"it has no codes there; put Rule({pattern!r}, ...) without product before {roundings.place.rule}"
    )


def _fills(part: ProductStep) -> bool:
    """Whether numbers of its own, and not NaN, stand beyond the end of what a gather reads."""
    fill = part.eqn.params.get("fill_value")
    return fill is not None and fill == fill


def _run_alone(part: ProductStep, v: Array, rest: list[Any]) -> list[Any]:
    """A move of elements, scales or zero points; where scales are NaN beyond the end, integers are 0."""
    params = part.eqn.params
    if part.name == "gather" and params["fill_value"] is not None and not jnp.issubdtype(v.dtype, jnp.inexact):
        params = {**params, "fill_value": 0}
    return bind(part.eqn.primitive, params, v, *rest)


def _shared(step: ProductStep) -> int:
    """How many operands of a loop, the first ones, are the same in all its turns."""
    params = step.eqn.params
    if step.name == "while":
        return params["cond_nconsts"] + params["body_nconsts"]
    return carry_count(params)[0] if step.name == "scan" else 0


def _stacked(x: Any) -> Any:
    """A stack of which each turn of a loop takes one."""
    if not isinstance(x, Twin) or x.codes is None:
        return x
    if x.stack:
        return replace(x, stack=x.stack - 1)
    return replace(x, codes=replace(x.codes, qarray=None))  # the scales of the stored array have no axis of turns


def _as_floats(x: Any, other: Any) -> Any:
    """An operand; integers as floats of the other's type, as the product itself takes them."""
    if isinstance(x, Twin) or jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(rounded(other).dtype)
