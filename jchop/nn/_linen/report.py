"""The effect of rules on each layer of a Linen module: the rows of `jchop.nn.report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jchop._products.rule import FIELDS, Rule
from jchop._products.units import operands_on
from jchop.nn._linen.kinds import KINDS
from jchop.nn._linen.layers import Decided, Found, Path, Seen, decided_layers
from jchop.nn._report import LayerRow, ModelReport, bytes_of, why_wide

__all__ = ["report_of"]


def report_of(seen: Seen, rules: Sequence[Rule], variables: Any, platform: str | None) -> ModelReport:
    """A row for everything with parameters and for every layer that ran.

    Args:
        seen: the layers that ran.
        rules: the rules.
        variables: unpacked.
        platform: of the operands that reach its units; None for none.
    """
    every = decided_layers(seen, rules, variables)
    return ModelReport(tuple(_row(path, every[path], seen, rules, platform) for path in sorted(every)))


def _row(path: Path, one: Decided, seen: Seen, rules: Sequence[Rule], platform: str | None) -> LayerRow:
    layer, shapes = seen.get(path, (None, {}))
    (own, number, rule), kind = one, KINDS.get(type(layer))
    given = None if number is None else rules[number]
    name = "parameters" if layer is None else type(layer).__name__
    wide = []
    for key, value in own.items():
        why = why_wide(name, kind is not None, given, None if kind is None else kind.parameters.get(key), rule)
        if why is not None:
            wide.append(("/".join((*path, key)), tuple(value.shape), why))
    before = after = sum(map(bytes_of, own.values()))
    specs: tuple[tuple[str, str], ...] = ()
    operands = ""
    if kind is not None and rule is not None:
        fields = kind.fields(own)
        specs = tuple((f, str(getattr(rule, f))) for f in FIELDS if f in fields and getattr(rule, f) is not None)
        found = Found(layer, rule, shapes)
        for key in [key for key in kind.parameters if key in own and found.spec(key) is not None]:
            after += bytes_of(_packed(found, key, own[key])) - bytes_of(own[key])
        if platform is not None and kind.hook is not None:
            carrier = jnp.dtype(getattr(layer, "dtype", None) or jnp.result_type(*own.values())).name
            operands = operands_on(platform, rule, carrier, bool(own), kind.operation == "dot_general")
    shown = "" if given is None else str(given)
    return LayerRow(
        "/".join(path), name, shown, specs, before, after, kind is not None, operands=operands, wide=tuple(wide)
    )


def _packed(found: Found, name: str, value: Any) -> Any:
    found.check_axes()
    return jax.eval_shape(lambda value: found.packed(name, value, jax.random.key(0))[0], value)
