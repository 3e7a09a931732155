"""Modules of Linen whose programs are quantized, whatever the classes of their layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax.core.scope import in_filter
from flax.traverse_util import flatten_dict, unflatten_dict

from jchop._common.on_demand import load_name
from jchop._quantized.products.rule import Rule
from jchop._quantized.products.scale_from import LSQ
from jchop._quantized.program.call import batch_arguments, enumerate_batches
from jchop._quantized.program.lazy_params import is_packed_param, unpack_param
from jchop._quantized.program.quantized_program import check_weight_rules
from jchop._quantized.program.report import ProgramReport
from jchop._quantized.program.scale_slots import Scales
from jchop._quantized.quantize_fn import QuantizedFunction
from jchop.nn._linen.layers import module_calls
from jchop.nn._linen.scales import SCALE_COLLECTION

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
        """The variables of the module, and those that rules with `scale_from` keep (`start`)."""
        variables = self.module.init(rngs, *args, **kwargs)
        return self.start(variables, *args, rngs=rngs, **kwargs) if self._keeps else variables

    def start(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Variables of the module, for example trained ones, with the scales that rules keep (`scale_from`).

        Learned scales are parameters beside those that they are for (``kernel_weight_scale``); ranges and histories
        are in the collection ``"scale_stats"``, as `jchop.quantize_fn` names them.

        Args:
            variables: variables of the module, not packed; scales among them are kept.
            args: arguments of the module: data, if activations have learned scales.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        params, state, old_scales = self._split_variables(variables)
        function = self._function(variables, args, rngs, kwargs)
        new_scales = function.start(params, state, args, rngs, kwargs, key=self._key(rngs))
        scales = (new | old for new, old in zip(new_scales, old_scales, strict=True))
        return {**variables, **_param_and_scale_collections(params, Scales(*scales))}

    def calibrate(
        self, variables: Any, batches: Iterable[Any], *, method: str = "minmax", combine: str = "widest",
        rngs: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Variables with fixed ranges of activations, found by running the module on data; as `jchop.nn.calibrate`.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            batches: inputs of the module, a tuple of several or one each.
            method: as of `jchop.nn.calibrate`.
            combine: as of `jchop.nn.calibrate`.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        params, state, old_scales = self._split_variables(variables)
        calls = [batch_arguments(batch) for _, batch in enumerate_batches(batches)]
        function = self._function(variables, calls[0], rngs, kwargs)
        scales = function.calibrate(
            params, [(state, args, rngs, kwargs) for args in calls], method=method, combine=combine, scales=old_scales,
            key=self._key(rngs),
        )  # fmt: skip
        return {**variables, **_param_and_scale_collections(params, scales)}

    def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The result of the module under the rules, with the arguments of Linen's `apply`, ``method`` too.

        A call with ``mutable=["scale_stats"]`` updates ranges and histories, and returns them with the result.
        A rule whose weight rounds nothing in this call is no error, since another method may use the parameter;
        `pack` refuses it.

        Args:
            variables: variables of the module, packed or not, with the scales that rules keep.
            args: arguments of the module.
            rngs: streams of keys by name, with that which a stochastic rule names.
            kwargs: of the module and of Linen's `apply`.

        Raises:
            ValueError: as `jchop.quantize_fn`.
        """
        params, state, scales = self._split_variables(variables)
        function, key = self._function(variables, args, rngs, kwargs), self._key(rngs)
        if not scales.stats or not in_filter(kwargs.get("mutable", False), SCALE_COLLECTION):
            call_scales = scales if self._keeps or scales.stats else None
            return function(params, state, args, rngs, kwargs, scales=call_scales, key=key)
        (y, mutated), scales = function.update(params, state, args, rngs, kwargs, scales=scales, key=key)
        return y, {**mutated, SCALE_COLLECTION: _nest_params(scales.stats)}

    def pack(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """The variables with the rounded parameters stored packed, in their own shapes and boxes, for `apply`.

        The learned scale of a parameter becomes a part of it.

        Args:
            variables: variables of the module, with the scales that rules keep.
            args: example arguments, of which only shapes are used.
            rngs: streams of keys by name.
            kwargs: as of `apply`.
        """
        params, state, scales = self._split_variables(variables)
        function = self._function(variables, args, rngs, kwargs)
        check_weight_rules([function.resolved(params, state, args, rngs, kwargs)])
        packed_params = function.pack(params, state, args, rngs, kwargs, scales=scales, key=self._key(rngs))
        activation_scales = {
            name: value for name, value in scales.learned.items() if not name.endswith("_weight_scale")
        }
        return {**variables, **_param_and_scale_collections(packed_params, scales._replace(learned=activation_scales))}

    def quantize_with_data(
        self,
        variables: Any,
        batches: Iterable[Any],
        steps: Any = None,
        *,
        sequential: bool | None = None,
        rngs: Any = None,
        progress: Callable[[int], object] | None = None,
    ) -> tuple[Any, Any]:
        """The packed variables, rounded with data, and a report, as `jchop.ptq.quantize` gives them.

        Args:
            variables: variables of the module.
            batches: arguments of the module: tuples, or the only argument.
            steps: as of `jchop.ptq.quantize`.
            sequential: as of `jchop.ptq.quantize`.
            rngs: streams of keys by name.
            progress: called with the number of batches that were run.
        """
        data = load_name("jchop.ptq._models", "ModelData")(batches, steps, sequential, progress)
        params, state, _ = self._split_variables(variables)
        by_layer = any(rule.layer is not None for rule in self.rules)  # a call shows the classes of layers
        function = self._function(variables, data.first() if by_layer else (), rngs, {})
        packed_params, report = data.round(function, params, lambda args: (state, args, rngs, {}), self._key(rngs))
        return {**state, "params": packed_params}, report

    def report(
        self, variables: Any, *args: Any, rngs: Any = None, platform: str | None = None, **kwargs: Any
    ) -> ProgramReport:
        """What happens to each parameter and each product; arguments as those of `pack`, and a platform."""
        params, state, _ = self._split_variables(variables)
        function = self._function(variables, args, rngs, kwargs)
        return function.report(params, state, args, rngs, kwargs, platform=platform)

    @property
    def _keeps(self) -> bool:
        return any(rule.scale_from is not None for rule in self.rules)

    def _split_variables(self, variables: Any) -> tuple[Any, dict[str, Any], Scales]:
        """The parameters, the other collections, and the kept scales."""
        collections = dict(variables)
        params = collections.pop("params", {})
        stats: dict[str, Any] = flatten_dict(dict(collections.pop(SCALE_COLLECTION, {})), sep="/")  # type: ignore[assignment]
        if not any(isinstance(rule.scale_from, LSQ) for rule in self.rules):
            return params, collections, Scales({}, stats)
        leaves = _flatten_params(params)
        learned_scales = {
            name: value
            for name, value in leaves.items()
            if (match := _LEARNED_SCALE_NAME.fullmatch(name)) and match[1] in leaves
        }
        return (
            _nest_params({name: v for name, v in leaves.items() if name not in learned_scales}),
            collections,
            Scales(learned_scales, stats),
        )

    def _function(self, variables: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]) -> QuantizedFunction:
        def pure(params: Any, state: Any, args: tuple[Any, ...], rngs: Any, kwargs: dict[str, Any]) -> Any:
            return self.module.apply({**state, "params": params}, *args, rngs=rngs, **kwargs)

        classes = {}
        if any(rule.layer is not None for rule in self.rules):
            calls = module_calls(
                self.module, jax.tree.map(_unpack_param, variables, is_leaf=is_packed_param), args, rngs, kwargs
            )
            classes = {
                "/".join((*path, name)): type(layer).__name__ for path, (layer, own) in calls.items() for name in own
            }
        return QuantizedFunction(pure, self.rules, classes=classes)

    def _key(self, rngs: Any) -> jax.Array | None:
        name = next((rule.stochastic_stream for rule in self.rules if rule.stochastic), None)
        if name is None:
            return None
        if not isinstance(rngs, Mapping) or name not in rngs:
            rule = next(rule for rule in self.rules if rule.stochastic)
            raise ValueError(f"{rule} rounds stochastically: pass rngs={{{name!r}: a key}}")
        return rngs[name]


def _unpack_param(leaf: Any) -> Any:
    return unpack_param(leaf) if is_packed_param(leaf) else leaf


def _flatten_params(params: Any) -> dict[str, Any]:
    """Parameters by path, with their boxes."""
    is_box = lambda _, x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    return flatten_dict(dict(params), sep="/", is_leaf=is_box)  # type: ignore[return-value]


def _nest_params(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten_dict(dict(leaves), sep="/")


def _param_and_scale_collections(params: Any, scales: Scales) -> dict[str, Any]:
    """The collections that hold parameters and kept scales."""
    if scales.learned:
        params = _nest_params({**_flatten_params(params), **scales.learned})
    return {"params": params, **({SCALE_COLLECTION: _nest_params(scales.stats)} if scales.stats else {})}


#: The name of a learned scale, and that of its parameter.
_LEARNED_SCALE_NAME = re.compile(r"(.+)_(?:weight|activation)_scale(?:_[0-9]+)?")
