"""Small modules that round in a layer, and that Flax's layers call in place of Flax's functions.

A module holds its specs, and if they are stochastic a stream of keys: state of the model like that of a dropout.
Other modules have no state, so a checkpoint fits the model with and without them; their layers hold them as static
attributes, which costs `flax.nnx.jit` less than modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jchop._common.settings import split_prng_key
from jchop._emulate.emulate import emulate
from jchop._quantized.products.codes import param_codes
from jchop._quantized.products.contraction import ProductRoundings, rounded_conv, rounded_dot_general, rounded_einsum
from jchop._quantized.products.operand_layout import OperandLayout, check_layout_axes, round_in_layout
from jchop._quantized.products.rule import Location, is_stochastic
from jchop._quantized.products.scales import round_in_range, round_in_range_with_codes
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop.nn._shared.scale_state import ActivationRange, ScaleSource
from jchop.storage import QArray, dequantize

Array = jax.Array
KeyStream = nnx.RngStream | None


class RoundingModule(nnx.Module):
    """A module that rounds, with its stream of keys; None if it is not stochastic."""

    stream: KeyStream = None

    def __init__(self, stream: KeyStream) -> None:
        self._set_data(stream=stream)

    def as_attribute(self) -> Any:
        """The attribute of a layer: the module itself if it has state, else a static wrapper."""
        return nnx.data(self) if jax.tree.leaves(self) else nnx.static(StaticRoundingModule(self))

    def _set_data(self, **values: Any) -> None:
        """Attributes for those that are there; the others stay the None of the class."""
        for name, value in values.items():
            if value is not None:
                setattr(self, name, nnx.data(value))

    def key(self) -> Array | None:
        """A key for one call."""
        return None if self.stream is None else self.stream()


class StaticRoundingModule:
    """A static wrapper of a module without state. Static attributes are compared, by the arguments of modules."""

    def __init__(self, module: RoundingModule) -> None:
        self.module = module
        arguments = ((name, value) for name, value in vars(module).items() if not name.startswith("_pytree"))
        self._arguments = (type(module), *sorted(arguments))
        self._hash = hash(self._arguments)  # computed once, because every call of `flax.nnx.jit` needs it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # attributes for copying and similar operations are not the module's
            raise AttributeError(name)
        return getattr(self.module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StaticRoundingModule, (self.module,)  # a hash holds in one process

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticRoundingModule) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return self._hash


def rounding_module_in(layer: Any, attribute: str) -> RoundingModule | None:
    """The rounding module that a layer has in an attribute, if it is one."""
    value = getattr(layer, attribute, None)
    value = value.module if isinstance(value, StaticRoundingModule) else value
    return value if isinstance(value, RoundingModule) else None


@dataclass(frozen=True, eq=False)
class PackedOperand:
    """A packed parameter from `RoundedPromotion` for a product of codes.

    Args:
        value: codes and scales.
        layout: of the codes, if that is not the parameter's own.
        shape: of the parameter.
        dtype: of its numbers in the product.
    """

    value: QArray
    layout: OperandLayout | None
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of axes of the parameter."""
        return len(self.shape)

    def numbers(self) -> Array:
        """The numbers."""
        numbers = dequantize(self.value, self.dtype)
        return numbers if self.layout is None else self.layout.back(numbers, self.shape)


def rounding_and_gradient_keys(spec: Spec | None, key: Array | None) -> tuple[Array | None, Array | None]:
    """A key of the rounding and one of its cotangent."""
    if not is_stochastic(spec) or key is None:
        return None, None
    forward, backward = split_prng_key(key)
    return forward, backward


class RoundedProduct(RoundingModule):
    """A product with rounded operands.

    Args:
        how: the roundings.
        stream: of keys.
        left: the source of scales of the left operand; None: from each array.
        right: of the right operand.
    """

    #: Whether the left operand is the input of a layer, whose range can be fixed.
    calibrates: ClassVar[bool] = True
    left: ScaleSource | None = None
    right: ScaleSource | None = None
    range: ActivationRange | None = None
    observe: Callable[[Array], None] | None = None

    def __init__(
        self,
        how: ProductRoundings,
        stream: KeyStream,
        left: ScaleSource | None = None,
        right: ScaleSource | None = None,
    ) -> None:
        super().__init__(stream)
        self.how = how
        self._set_data(left=left, right=right)

    def keep(self, span: ActivationRange | None) -> None:
        """Go on with a range that was found, if one was."""
        self._set_data(range=span)

    def start(self, span: Array) -> None:
        """Take a range that was found, to keep or to start from."""
        assert self.how.left is not None
        if self.left is None:
            self.range = nnx.data(ActivationRange(span))
        else:
            self.left.start(span, self.how.left)

    def round_operands(self, x: Array, w: Array | PackedOperand) -> tuple[Array, Array, dict[str, Any]]:
        """The operands, rounded if their scales have a source, and the arguments of the product."""
        self._check_state()
        key, how = self.key(), self.how
        code_arguments: dict[str, Any] = {}
        if isinstance(w, PackedOperand):
            code_arguments["codes"] = param_codes(w.value, w.layout, w.shape)
            w = code_arguments["rounded"] = w.numbers()
        if self.observe is not None:
            self.observe(x)
            how = replace(how, left=None)
        elif self.range is not None or self.left is not None:
            assert how.left is not None
            operand_key, key = (None, None) if key is None else split_prng_key(key)
            if self.range is not None and how.codes:
                x, code_arguments["left_codes"] = round_in_range_with_codes(x, how.left, self.range[...], operand_key)
            elif self.range is not None:
                x = round_in_range(x, how.left, self.range[...], operand_key)
            elif self.left is not None:
                x = self.left(x, how.left, operand_key)
            how = replace(how, left=None)
        if self.right is not None:
            assert how.right is not None
            operand_key, key = (None, None) if key is None else split_prng_key(key)
            w, how = self.right(w, how.right, operand_key), replace(how, right=None)
        return x, w, {"how": how, "key": key, **code_arguments}

    def _check_state(self) -> None:
        """Refuse state of another rule, for example from a checkpoint of another model."""
        states = [(self.range, (2,))] + [source.state() for source in (self.left, self.right) if source is not None]
        for variable, shape in states:
            if variable is not None and variable.shape != shape:
                raise ValueError(
                    f"{type(variable).__name__} of the {self.how.place} has shape {variable.shape}, and that rule "
                    f"needs {shape}: it belongs to a model with another rule"
                )


class RoundedDotGeneral(RoundedProduct):
    """In place of `jax.lax.dot_general`."""

    def __call__(self, x: Array, w: Array, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        x, w, more = self.round_operands(x, w)
        return rounded_dot_general(x, w, dimension_numbers, *args, **kwargs, **more)


class RoundedConvolution(RoundedProduct):
    """In place of `jax.lax.conv_general_dilated`."""

    def __call__(self, x: Array, w: Array, *args: Any, **kwargs: Any) -> Array:
        x, w, more = self.round_operands(x, w)
        return rounded_conv(x, w, *args, **kwargs, **more)


class RoundedEinsum(RoundedProduct):
    """In place of `jax.numpy.einsum`."""

    def __call__(self, subscripts: str, x: Array, w: Array, **kwargs: Any) -> Array:
        x, w, more = self.round_operands(x, w)
        return rounded_einsum(subscripts, x, w, **kwargs, **more)


class RoundedOutput(RoundingModule):
    """Rounds the result of a layer."""

    def __init__(self, spec: Spec, stream: KeyStream, place: Location) -> None:
        super().__init__(stream)
        self.spec, self.place = spec, place

    def __call__(self, y: Array) -> Array:
        check_layout_axes("output", self.spec, y.ndim, self.place)
        key, gradient_key = rounding_and_gradient_keys(self.spec, self.key())
        return round_in_layout(None, y, self.spec, key, gradient_key)


class RoundedPromotion(RoundingModule):
    """In place of `promote_dtype`: it is given every array that the layer computes with.

    Args:
        base: the replaced function.
        slots: the names of the arrays, as in a `NnxKind`.
        specs: the specs of arrays, and their layouts.
        packed_params: names, specs, layouts (None: the parameter's own) and shapes of those that are stored.
        stream: of keys.
        place: for errors.
        codes: whether a product takes the codes of what is stored.
    """

    def __init__(
        self,
        base: Callable[..., Any],
        slots: tuple[tuple[str, ...], ...],
        specs: tuple[tuple[str, Spec, OperandLayout | None], ...],
        packed_params: tuple[tuple[str, Spec, OperandLayout | None, tuple[int, ...]], ...],
        stream: KeyStream,
        place: Location,
        codes: bool = False,
    ) -> None:
        super().__init__(stream)
        self.base, self.slots, self.specs, self.packed_params, self.place = base, slots, specs, packed_params, place
        self.codes = codes

    def __call__(self, args: tuple[Any, ...], /, **kwargs: Any) -> tuple[Any, ...]:
        names = next(names for names in self.slots if len(names) == len(args))
        for name, arg in zip(names, args, strict=True):
            self._check_packing(name.strip("*"), arg)
        plain = tuple(jnp.zeros((), arg.dtype) if isinstance(arg, QArray) else arg for arg in args)
        arrays: list[Any] = [
            self._unpack(name, arg, new.dtype) if isinstance(arg, QArray) else new
            for name, arg, new in zip(names, args, self.base(plain, **kwargs), strict=True)
        ]
        key = self.key()
        for i, (name, spec, layout) in enumerate(self.specs):
            if name in names and (x := arrays[names.index(name)]) is not None:
                field = "activation" if name == "inputs" else "bias" if name == "bias" else "weight"
                check_layout_axes(field, spec, x.ndim if layout is None else layout.ndim, self.place)
                keys = rounding_and_gradient_keys(spec, None if key is None else jax.random.fold_in(key, i))
                arrays[names.index(name)] = round_in_layout(layout, x, spec, *keys)
        return tuple(arrays)

    def _check_packing(self, name: str, arg: Any) -> None:
        """Refuse a parameter that is not packed as here, as a checkpoint of another model brings it."""
        expected_packing = next(
            ((spec, layout, shape) for packed_name, spec, layout, shape in self.packed_params if packed_name == name),
            None,
        )
        if arg is None or (expected_packing is None and not isinstance(arg, QArray)):
            return
        description = f"{arg.spec} of {arg.shape}" if isinstance(arg, QArray) else f"an array of {arg.shape}"
        if expected_packing is None:
            raise ValueError(f"{name} of the {self.place} is packed as {description}, and this model packs none there")
        spec, layout, shape = expected_packing
        codes_shape = shape if layout is None else layout.shape(shape)
        if not isinstance(arg, QArray) or (arg.spec, arg.shape) != (spec, codes_shape):
            raise ValueError(
                f"{name} of the {self.place} is {description}, and this model holds it packed as {spec} of "
                f"{codes_shape}: it belongs to a model with another rule or shape"
            )

    def _unpack(self, name: str, codes: QArray, dtype: Any) -> Array | PackedOperand:
        layout, shape = next(
            (layout, shape) for packed_name, _, layout, shape in self.packed_params if packed_name == name.strip("*")
        )
        operand = PackedOperand(codes, layout, shape, dtype)
        return operand if self.codes and name.startswith("*") else operand.numbers()


# -- attention ---------------------------------------------------------------------------------------------------------


class RoundedAttention(RoundedProduct):
    """In place of `flax.nnx.dot_product_attention`: both products with rounded operands."""

    calibrates: ClassVar[bool] = False

    def __call__(self, *args: Any, module: nnx.Module | None = None, **kwargs: Any) -> Array:
        y, weights = _rounded_attention(*args, **kwargs, how=self.how, keys=(self.key(), self.key()))
        if module is not None:
            module.sow(nnx.Intermediate, "attention_weights", weights)
        return y


def _rounded_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    how: ProductRoundings,
    keys: tuple[Array | None, Array | None],
) -> tuple[Array, Array]:
    """`flax.nnx.dot_product_attention`, with its arguments, and the attention weights before a dropout.

    Args:
        query: shape (..., queries, heads, depth).
        key: shape (..., keys, heads or a divisor of them, depth).
        value: as `key`.
        bias: added to the scores.
        mask: the positions to which a query may attend.
        broadcast_dropout: one dropout for all heads and sequences.
        dropout_rng: its key.
        dropout_rate: of the attention weights.
        deterministic: no dropout.
        dtype: of the computation.
        precision: of the products.
        promote_dtype: function that casts arrays to one dtype.
        is_causal: no query attends to later keys.
        how: the roundings of both products.
        keys: a key for each product, if it is stochastic.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    groups = query.shape[-2] // key.shape[-2]  # of queries that share a key and a value
    key, value = (jnp.repeat(v, groups, axis=-2) if groups > 1 else v for v in (key, value))
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    scores = rounded_einsum("...qhd,...khd->...hqk", query, key, precision=precision, how=how, key=keys[0])
    scores = scores if bias is None else scores + bias
    weights = dropout_weights = jax.nn.softmax(_mask_scores(scores, mask, is_causal)).astype(query.dtype)
    if not deterministic and dropout_rate > 0.0:
        shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast_dropout else weights.shape
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)  # type: ignore[arg-type]
        dropout_weights = weights * (keep.astype(weights.dtype) / (1.0 - dropout_rate))
    return rounded_einsum(
        "...hqk,...khd->...qhd", dropout_weights, value, precision=precision, how=how, key=keys[1]
    ), weights


def _mask_scores(scores: Array, mask: Array | None, is_causal: bool) -> Array:
    masks = [] if mask is None else [mask.astype(bool)]
    if is_causal:
        masks.append(jnp.tril(jnp.ones(scores.shape[-2:], bool)))
    return jnp.where(math.prod(masks), scores, jnp.finfo(scores.dtype).min) if masks else scores


# -- emulated arithmetic -----------------------------------------------------------------------------------------------


class LayerEmulation(RoundingModule):
    """Runs a layer in an emulated arithmetic.

    Args:
        spec: the rounding of every operation, and of arguments and parameters on entry.
        accumulate: how sums are formed.
        stream: of keys.
    """

    def __init__(self, spec: Spec, accumulate: MatmulSpec | None, stream: KeyStream) -> None:
        super().__init__(stream)
        self.spec, self.accumulate = spec, accumulate

    def __call__(self, call: Callable[..., Any], layer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = self.key()
        graph, state = nnx.split(layer)
        update_paths: list[Any] = []

        def pure(state: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
            copy = nnx.merge(graph, state)
            before = _variable_values(copy)
            result = call(copy, *args, **kwargs)
            after = _variable_values(copy)
            # Parameters are rounded on entry; only attributes set by the layer itself are written back.
            update_paths[:] = [path for path, value in after.items() if value is not before[path]]
            return result, [after[path] for path in update_paths]

        emulated_call = emulate(pure, self.spec, accumulate=self.accumulate, key=key)
        result, values = emulated_call(state, args, kwargs)
        variables = dict(nnx.to_flat_state(nnx.state(layer)))
        updates = [(path, variables[path].replace(value)) for path, value in zip(update_paths, values, strict=True)]
        nnx.update(layer, nnx.from_flat_state(updates))
        return result


def _variable_values(module: nnx.Module) -> dict[Any, Any]:
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


class EmulatedAttention(RoundingModule):
    """In place of `flax.nnx.dot_product_attention`, in an emulated arithmetic."""

    def __init__(self, spec: Spec, accumulate: MatmulSpec | None, stream: KeyStream) -> None:
        super().__init__(stream)
        self.spec, self.accumulate = spec, accumulate

    def __call__(self, *args: Any, module: Any = None, **kwargs: Any) -> Array:
        if module is not None:
            raise NotImplementedError("sow_weights=True: weights of an emulated attention cannot be sown")
        emulated_attention = emulate(nnx.dot_product_attention, self.spec, accumulate=self.accumulate, key=self.key())
        return emulated_attention(*args, **kwargs)
