"""Modules of Linen whose programs are quantized, whatever the classes of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from jchop._products.program_report import ProgramReport
from jchop._products.quantize_fn import QuantizedFunction
from jchop._products.rule import Rule
from jchop.ptq._quantize import calibrated
from jchop.ptq._report import PtqReport
from jchop.ptq._run import changed_batches

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """A module of Linen whose program runs under rules; a result of `jchop.nn.linen.quantize` with ``program=True``.

    Args:
        module: the module.
        rules: the rules.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> class Heads(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         w = self.param("w", linen.initializers.ones, (64, 4, 8))
        ...         return jnp.einsum("bd,dhk->bhk", x, w)
        >>> heads = jc.nn.linen.quantize(Heads(), jc.Rule(weight="int4(group=32)"), program=True)
        >>> variables = heads.init(jax.random.key(0), jnp.ones((1, 64)))
        >>> packed = heads.pack(variables, jnp.ones((1, 64)))
        >>> packed["params"]["w"].nbytes, heads.apply(packed, jnp.ones((1, 64))).shape
        (1280, (1, 4, 8))
    """

    module: nn.Module
    rules: tuple[Rule, ...]

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables of the module."""
        return self.module.init(rngs, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the module under the rules, with the arguments of Linen's `apply`, ``method`` too.

        Args:
            variables: variables of the module, packed or not.
            args: arguments of the module.
            rngs: streams of keys by name, with that which a stochastic rule names.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: as `jchop.quantize_fn`.
        """
        return self._function()(*_parts(variables), args, rngs, kwargs, key=self._key(rngs))

    def pack(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The variables with the rounded parameters stored packed, in their own shapes and boxes, for `apply`.

        Args:
            variables: variables of the module.
            args: example arguments, of which only shapes are used.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        parts = _parts(variables)
        packed = self._function().pack(*parts, args, rngs, kwargs, key=self._key(rngs))
        return {**parts[1], "params": packed}

    def calibrate(
        self,
        variables: Any,
        batches: Iterable[Any],
        steps: Any = None,
        *,
        sequential: bool | None = None,
        rngs: Any = None,
        progress: Callable[[int], object] | None = None,
    ) -> tuple[Any, PtqReport]:
        """The packed variables, rounded with data, and a report, as `jchop.ptq.quantize` gives them.

        Args:
            variables: variables of the module.
            batches: arguments of the module: tuples, or the only argument.
            steps: as of `jchop.ptq.quantize`.
            sequential: as of `jchop.ptq.quantize`.
            rngs: streams of keys by name.
            progress: called with the number of batches that were run.
        """
        params, rest = _parts(variables)
        given = changed_batches(batches, lambda args: (rest, args, rngs, {}))
        packed, report = calibrated(self._function(), params, given, steps, sequential, self._key(rngs), progress)
        return {**rest, "params": packed}, report

    def report(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> ProgramReport:
        """What happens to each parameter and each product; arguments as those of `pack`."""
        return self._function().report(*_parts(variables), args, rngs, kwargs)

    def _function(self) -> QuantizedFunction:
        def pure(params: Any, rest: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]) -> Any:
            return self.module.apply({**rest, "params": params}, *args, rngs=rngs, **kwargs)

        return QuantizedFunction(pure, self.rules)

    def _key(self, rngs: Any) -> jax.Array | None:
        name = next((rule.stochastic_stream for rule in self.rules if rule.stochastic), None)
        if name is None:
            return None
        if not isinstance(rngs, Mapping) or name not in rngs:
            rule = next(rule for rule in self.rules if rule.stochastic)
            raise ValueError(f"{rule} rounds stochastically: pass rngs={{{name!r}: a key}}")
        return rngs[name]


def _parts(variables: Any) -> tuple[Any, dict[str, Any]]:
    """The parameters, and the other collections."""
    given = dict(variables)
    return given.pop("params", {}), given
