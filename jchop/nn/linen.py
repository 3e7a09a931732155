"""Modules of Flax Linen, quantized by the same rules and the same products as those of NNX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jchop.nn._contraction import Roundings
from jchop.nn._equip import pack
from jchop.nn._kinds import PRODUCT_FIELDS
from jchop.nn._layout import Layout, round_in
from jchop.nn._linen_kinds import KINDS, Kind
from jchop.nn._rule import FIELDS, Rule, as_rules, is_stochastic, rule_of
from jchop.spec import Spec
from jchop.storage import QArray, dequantize

Array = jax.Array

__all__ = ["Packed", "Quantized", "quantize"]


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["layout", "shape"])
@dataclass(frozen=True)
class Packed:
    """A packed parameter among the variables of a Linen module.

    Args:
        stored: the `jchop.QArray`, laid out so that the axes that a product sums over come last.
        layout: how it is laid out.
        shape: of the parameter.
    """

    stored: QArray
    layout: Layout
    shape: tuple[int, ...]

    def unpack(self) -> Array:
        """The parameter, as the module expects it."""
        return self.layout.back(dequantize(self.stored), self.shape)


def quantize(module: nn.Module, rules: Rule | Iterable[Rule]) -> Quantized:
    """A module of Flax Linen that rounds as rules say, with the same variables.

    Linen makes its layers while it runs, so the rules are applied in each call: parameters are rounded on their way in,
    with gradients straight through, and layers get products with rounded operands where they have a field for that
    (`dot_general`, `conv_general_dilated`, `attention_fn`). Paths are those of the variables (``"Dense_0"``,
    ``"block/attention/query"``).

    Args:
        module: any module; the layers that rules match must be Dense, DenseGeneral, Einsum, Conv, ConvTranspose,
            Embed, a norm, or attention. Cells of recurrent networks made of Dense (LSTMCell, GRUCell, SimpleCell) are
            found by those.
        rules: as in `jchop.nn.quantize`.

    Returns:
        A `Quantized` module, with the `init` and `apply` of Linen, and `pack`.

    Raises:
        TypeError: for rules that are none, or no module.
        NotImplementedError: for a rule with `scale_from` or `cache`.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> from flax import linen
        >>> dense = jc.nn.linen.quantize(linen.Dense(2), jc.nn.Rule(weight="e4m3", activation="e5m2"))
        >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 4)))
        >>> dense.apply(variables, jnp.ones((1, 4))).shape
        (1, 2)
    """
    given = as_rules(rules)
    kept = next((rule for rule in given if rule.scale_from is not None or rule.cache is not None), None)
    if kept is not None:
        raise NotImplementedError(f"{kept}: scale_from and cache are for Flax NNX, whose layers can hold them")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a module of Flax Linen; for NNX use jchop.nn.quantize")
    return Quantized(module, given)


@dataclass(frozen=True)
class Quantized:
    """A module of Linen, and the rules by which its layers round; `quantize` makes it.

    Args:
        module: the module.
        rules: the rules.
    """

    module: nn.Module
    rules: tuple[Rule, ...]

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables that the module itself has."""
        return self.module.init(rngs, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """What the rounded module computes, with the arguments of Linen's `apply`.

        Args:
            variables: as those of the module, or packed.
            args: of the module.
            rngs: streams of keys by name, with that which a stochastic rule names.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: for a rule that matches no layer, or a stochastic one without its stream.
            NotImplementedError: for a module with parameters that is no known layer, or a product out of reach.
        """
        plain, layers = self._layers(variables, args, rngs, kwargs)
        packed = {path[:-1] for path, leaf in _flat(variables).items() if isinstance(leaf, Packed)}
        keys = _Keys(rngs)
        weights = dict(_flat(plain))
        for path, (layer, rule) in layers.items():
            kind = KINDS[type(layer)]
            for name, role in kind.parameters.items():
                spec = getattr(rule, role)
                inside = kind.hook is not None and role == "weight"  # the product rounds it
                if spec is None or inside or path in packed or (*path, name) not in weights:
                    continue
                value = weights[(*path, name)]
                layout = kind.layout(layer, value.ndim) if kind.layout is not None and role == "weight" else None
                weights[(*path, name)] = round_in(layout, value, spec, *keys.of(rule, spec))
        variables = {**variables, "params": unflatten_dict(weights)}
        with nn.intercept_methods(partial(_intercept, self.rules, packed)):
            return self.module.apply(variables, *args, rngs=rngs, **kwargs)

    def pack(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The variables with the weights and biases that rules round stored packed; `apply` takes them.

        Args:
            variables: as those of the module.
            args: example arguments, of which only shapes count.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        plain, layers = self._layers(variables, args, rngs, kwargs)
        keys, leaves = _Keys(rngs), dict(_flat(plain))
        for path, (layer, rule) in layers.items():
            kind = KINDS[type(layer)]
            for name, role in kind.parameters.items():
                spec, value = getattr(rule, role), leaves.get((*path, name))
                if spec is None or value is None:
                    continue
                laid = kind.layout(layer, value.ndim) if kind.layout is not None and role == "weight" else None
                layout = laid or Layout(tuple(range(value.ndim - 1)), (value.ndim - 1,))
                leaves[(*path, name)] = Packed(
                    pack(value, layout, 0, spec, keys.of(rule, spec)[0]), layout, value.shape
                )
        return {**variables, "params": unflatten_dict(leaves)}

    def _layers(self, variables: Any, args: Any, rngs: Any, kwargs: Any) -> tuple[Any, dict[tuple[str, ...], Any]]:
        """The variables unpacked, and the layers that rules match, each with its rule."""
        plain = jax.tree.map(
            lambda leaf: leaf.unpack() if isinstance(leaf, Packed) else leaf,
            variables,
            is_leaf=lambda leaf: isinstance(leaf, Packed),
        )
        seen: dict[tuple[str, ...], nn.Module] = {}

        def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            seen[context.module.path] = context.module
            return call(*args, **kwargs)

        def run(plain: Any, rngs: Any, args: Any) -> Any:
            return self.module.apply(plain, *args, rngs=rngs, **kwargs)

        with nn.intercept_methods(note):
            jax.eval_shape(run, plain, rngs, args)
        return plain, self._matched(seen, _flat(plain))

    def _matched(self, seen: Mapping[tuple[str, ...], nn.Module], leaves: Mapping[Any, Any]) -> dict[Any, Any]:
        owners = dict.fromkeys([path[:-1] for path in leaves] + [path for path, m in seen.items() if type(m) in KINDS])
        found = {}
        for path in owners:
            number = rule_of("/".join(path), self.rules)
            if number is not None:
                found[path] = (seen.get(path), self.rules[number])
        idle = [str(rule) for rule in self.rules if not any(rule is chosen for _, chosen in found.values())]
        if idle:
            raise ValueError(f"{', '.join(idle)} matches no layer, or only such as an earlier rule matches; layers: "
                             f"{['/'.join(path) for path in owners]}")  # fmt: skip
        found = {path: pair for path, pair in found.items() if _fields(pair[1])}
        for path, (layer, rule) in found.items():
            _check(path, layer, rule)
        return found


def _flat(variables: Any) -> dict[tuple[str, ...], Any]:
    return flatten_dict(dict(variables).get("params", {}))


def _fields(rule: Rule) -> list[str]:
    return [name for name in FIELDS if getattr(rule, name) is not None]


def _check(path: tuple[str, ...], layer: Any, rule: Rule) -> None:
    what = f"{type(layer).__name__} at {'/'.join(path)!r}"
    kind = KINDS.get(type(layer))
    if kind is None:
        raise NotImplementedError(
            f"{what} has parameters and is none of the layers that can be quantized: "
            f"{', '.join(cls.__name__ for cls in KINDS)}. Give it a rule of its own that rounds nothing"
        )
    wrong = [name for name in PRODUCT_FIELDS if getattr(rule, name) is not None]
    if kind.multiplies and kind.hook is None and wrong:
        raise NotImplementedError(
            f"{what}: {', '.join(wrong)} cannot be had, since Flax gives no access to its product; give it a rule "
            "of its own without that"
        )
    hooks = (kind.hook[0], f"{kind.hook[0]}_cls") if kind.hook is not None else ()
    usual = (None, nn.dot_product_attention)
    own = [name for name in hooks if not any(getattr(layer, name, None) is function for function in usual)]
    if own:
        raise ValueError(f"{what} has a {own[0]} of its own, in whose place the rounding would stand")


# -- in a call ---------------------------------------------------------------------------------------------------------


class _Keys:
    """Keys of parameters, one after the other, from the streams of a call."""

    def __init__(self, rngs: Any) -> None:
        self.rngs, self.count = rngs, 0

    def of(self, rule: Rule, spec: Spec) -> tuple[Array | None, Array | None]:
        if not is_stochastic(spec):
            return None, None
        name = rule.stochastic_stream
        if not isinstance(self.rngs, Mapping) or name not in self.rngs:
            raise ValueError(f"{rule} rounds stochastically: pass rngs={{{name!r}: a key}}")
        self.count += 1
        forward, backward = jax.random.split(jax.random.fold_in(self.rngs[name], self.count))
        return forward, backward


def _intercept(rules: tuple[Rule, ...], packed: set, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """A method of a layer that a rule matches, its inputs, product and result rounded."""
    layer, kind = context.module, KINDS.get(type(context.module))
    number = rule_of("/".join(layer.path), rules)
    if kind is None or number is None or context.method_name not in ("__call__", "attend"):
        return call(*args, **kwargs)
    rule = rules[number]

    def keys(spec: Spec | None) -> tuple[Array | None, Array | None]:
        if not is_stochastic(spec):
            return None, None
        forward, backward = jax.random.split(layer.make_rng(rule.stochastic_stream))
        return forward, backward

    if kind.hook is not None:
        _set_product(layer, kind, rule, layer.path in packed)
    elif rule.activation is not None and not _is_lookup(layer, context.method_name):
        layout = None if kind.inputs is None else kind.inputs(layer, args[0].ndim)
        args = (round_in(layout, args[0], rule.activation, *keys(rule.activation)), *args[1:])
    y = call(*args, **kwargs)
    return y if rule.output is None or not kind.parameters else round_in(None, y, rule.output, *keys(rule.output))


def _is_lookup(layer: nn.Module, method: str) -> bool:
    return isinstance(layer, nn.Embed) and method == "__call__"


def _set_product(layer: Any, kind: Kind, rule: Rule, packed: bool) -> None:
    """The product of this one call; a layer of Linen is made anew for each."""
    assert kind.hook is not None
    name, product = kind.hook
    right = rule.activation if not kind.parameters else None if packed else rule.weight
    how = Roundings(rule.activation, right, *(getattr(rule, field) for field in PRODUCT_FIELDS))

    def key() -> Array | None:
        return layer.make_rng(rule.stochastic_stream) if how.stochastic else None

    def attend(*args: Any, module: Any = None, **kwargs: Any) -> Array:
        if module is not None:
            raise NotImplementedError("sow_weights=True: weights of a rounded attention are not sown")
        return product(*args, **kwargs, how=how, keys=(key(), key()))[0]

    def multiply(*args: Any, **kwargs: Any) -> Array:
        return product(*args, **kwargs, how=how, key=key())

    object.__setattr__(layer, name, attend if name == "attention_fn" else multiply)
