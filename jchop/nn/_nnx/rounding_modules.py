"""Small modules that round in a layer, and that Flax's layers call in place of Flax's functions; scales that are state.

A module holds its specs, and if they are stochastic a stream of keys: state of the model, as in a dropout layer.
Other modules have no state, so a checkpoint fits the model with and without them. Their layers hold them as static
attributes, which costs `flax.nnx.jit` less than modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.attention import dot_product_attention_weights
from flax.nnx.nn import dtypes
from jax import Array

from jchop._common.settings import split_prng_key
from jchop._emulate.emulate import emulate
from jchop._quantized.products.codes import param_codes
from jchop._quantized.products.contraction import (
    OperandForms,
    ProductRoundings,
    rounded_conv,
    rounded_dot_general,
    rounded_einsum,
)
from jchop._quantized.products.operand_layout import OperandLayout, check_layout_axes, round_in_layout
from jchop._quantized.products.rule import Location, is_stochastic
from jchop._quantized.products.scale_from import ScaleFrom
from jchop._quantized.products.scales import (
    HISTORY,
    RANGE,
    SCALE,
    STATE_KINDS,
    initial_scale,
    round_in_range,
    round_in_range_with_codes,
    round_under_state,
    state_shape,
)
from jchop._quantized.program.scale_slots import Scales, state_kind
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import Spec
from jchop._storage import QArray, dequantize

KeyStream = nnx.RngStream | None
T = TypeVar("T")


# -- scales that are state or parameters -------------------------------------------------------------------------------


class ActivationRange(nnx.Variable):
    """The range (least, largest) of a layer's input, from which its scale is computed; `calibrate` finds it.

    It is state of the model, saved and restored with it, and may be set by hand.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(activation="int8")
        >>> layer = jc.nn.Linear(2, 2, rule=rule, rngs=nnx.Rngs(0))
        >>> static = jc.nn.calibrate(layer, [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])])
        >>> static.dot_general.range[...].tolist()
        [-3.0, 2.0]
    """


class AmaxHistory(nnx.Variable):
    """The largest magnitudes of an operand in earlier steps, the most recent first; zeros for missing steps.

    It is state of the model, as the averages of a batch norm.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> from flax import nnx
        >>> layer = jc.nn.Linear(2, 2, rule=jc.nn.recipe("float8_delayed"), rngs=nnx.Rngs(0))
        >>> _ = layer(jnp.array([[0.5, -2.0]]))
        >>> layer.dot_general.left.history[...].shape, float(layer.dot_general.left.history[...].max())
        ((1024,), 2.0)
    """


class LearnedScale(nnx.Param):
    """A scale that is trained, in the form of `jchop.fit_scale`; it must stay above zero.

    Filters tell it from other parameters, for example to give it a learning rate of its own.

    Example:
        >>> import jchop as jc
        >>> from flax import nnx
        >>> rule = jc.Rule(weight="int8(group=all)", scale_from=jc.LSQ())
        >>> layer = jc.nn.Linear(4, 3, rule=rule, rngs=nnx.Rngs(0))
        >>> [path for path, _ in nnx.to_flat_state(nnx.state(layer, jc.nn.LearnedScale))]
        [('dot_general', 'right', 'scale')]
    """


#: The variable of each kind of state.
_STATE_VARIABLES: Mapping[str, type[nnx.Variable]] = MappingProxyType(
    {RANGE: ActivationRange, HISTORY: AmaxHistory, SCALE: LearnedScale}
)


class ScaleState(nnx.Module):
    """Scales that follow the data in training mode, and stay in evaluation mode."""

    use_running_average = False

    def set_view(self, use_running_average: bool | None = None) -> None:
        """The hook of `flax.nnx.view`."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


class ProgramScales(ScaleState):
    """The kept scales of a model whose program is quantized.

    Args:
        scales: as `jchop.quantize_fn` has them.
    """

    observer: Any = None  # the data that `calibrate` has seen, while it runs the model

    def __init__(self, scales: Scales) -> None:
        self.use_running_average = False
        self.learned, self.stats = (
            nnx.data({name: _STATE_VARIABLES[state_kind(name)](v) for name, v in entries.items()}) for entries in scales
        )

    @property
    def scales(self) -> Scales:
        """The kept scales as arrays, learned ones and statistics."""
        return Scales(
            *({name: v.get_value() for name, v in variables.items()} for variables in (self.learned, self.stats))
        )

    def take(self, stats: Mapping[str, Array]) -> None:
        """The ranges and histories after a call."""
        for name, value in stats.items():
            self.stats[name][...] = value


class ScaleSource(ScaleState):
    """Rounds one operand under scales of its own. Its attribute `range`, `history` or `scale` has their state.

    Args:
        how: the source of the scales, a value of the rule.
        stack: how many layers it is of, as axes in front.
        layout: of a kernel under learned scales; None of an activation, which has one scale, and none before `start`.
        scale: of a kernel under learned scales.
    """

    def __init__(
        self, how: ScaleFrom, stack: tuple[int, ...], layout: OperandLayout | None = None, scale: Array | None = None
    ) -> None:
        self.use_running_average = False
        self.how, self.layout, self.kind = how, layout, STATE_KINDS[type(how)]
        if self.kind != SCALE:
            scale = jnp.full((*stack, *state_shape(how)), jnp.nan if self.kind == RANGE else 0.0)
        self._set(scale)

    def _set(self, value: Array | None) -> None:
        setattr(self, self.kind, nnx.data(None if value is None else _STATE_VARIABLES[self.kind](value)))

    @property
    def variable(self) -> nnx.Variable | None:
        """The state; None before the first learned scale."""
        return getattr(self, self.kind)

    def start(self, span: Array, spec: Spec) -> None:
        """Begin with the least and the largest number of an array, as `calibrate` found them."""
        self._set(initial_scale(span, spec) if self.kind == SCALE else span.astype(jnp.float32))

    def __call__(self, x: Array, spec: Spec, key: Array | None) -> Array:
        """`x` rounded under the scale of the state, which follows `x` in training."""
        variable, stays = self.variable, self.use_running_average
        if variable is None:
            raise ValueError(
                f"activation={str(spec)!r} with scale_from={self.how!r} has no scale yet: run jchop.nn.calibrate, "
                "which gives it the one to start from"
            )
        y, after = round_under_state(self.how, variable[...], x, spec, key, stays, self.layout)
        if not stays and self.kind != SCALE:
            variable[...] = after
        return y


# -- modules in layers -------------------------------------------------------------------------------------------------


class RoundingModule(nnx.Module):
    """A module that rounds, with its stream of keys; None if it is not stochastic."""

    stream: KeyStream = None

    def __init__(self, stream: KeyStream) -> None:
        self.set_data(stream=stream)

    def as_attribute(self) -> Any:
        """The attribute of a layer: the module itself if it has state, else a static wrapper."""
        return nnx.data(self) if jax.tree.leaves(self) else nnx.static(StaticRoundingModule(self))

    def set_data(self, **values: Any) -> None:
        """Sets the attributes that are given; the others stay the None of the class."""
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


def rounding_module_in(layer: Any, attribute: str, cls: type[T]) -> T | None:
    """The rounding module of a class that a layer has in an attribute."""
    value = getattr(layer, attribute, None)
    value = value.module if isinstance(value, StaticRoundingModule) else value
    return value if isinstance(value, cls) else None


@dataclass(frozen=True)
class PackedForm:
    """How a parameter is packed.

    Args:
        spec: of its codes.
        layout: of the codes, if that is not the parameter's own.
        shape: of the parameter.
    """

    spec: Spec
    layout: OperandLayout | None
    shape: tuple[int, ...]

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the codes."""
        return self.shape if self.layout is None else self.layout.shape(self.shape)

    def numbers(self, codes: QArray, dtype: Any) -> Array:
        """The numbers of the parameter."""
        numbers = dequantize(codes, dtype)
        return numbers if self.layout is None else self.layout.back(numbers, self.shape)


class PackedOperand(NamedTuple):
    """Codes from `RoundedPromotion` for a product of codes, and the dtype that their numbers have in it."""

    codes: QArray
    form: PackedForm
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of axes of the parameter."""
        return len(self.form.shape)


def _round_by_field(
    place: Location, field: str, spec: Spec, x: Array, key: Array | None, layout: OperandLayout | None = None
) -> Array:
    """An array that a field of the rule of a layer rounds."""
    check_layout_axes(field, spec, x.ndim if layout is None else layout.ndim, place)
    keys = (None, None) if key is None or not is_stochastic(spec) else split_prng_key(key)
    return round_in_layout(layout, x, spec, *keys)


class RoundedProduct(RoundingModule):
    """A product with rounded operands.

    Args:
        how: the roundings.
        stream: of keys.
        left: the source of scales of the left operand; None: from each array.
        right: of the right operand.
    """

    #: Whether the left operand is the input of a layer, whose range can be fixed; and the product.
    calibrates: ClassVar[bool] = True
    product: ClassVar[Callable[..., Array]]
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
        self.set_data(left=left, right=right)

    def __call__(self, x: Array, w: Any, *args: Any, **kwargs: Any) -> Array:
        x, w, more = self.round_operands(x, w)
        return self.product(x, w, *args, **kwargs, **more)

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
        codes = left_codes = rounded = None
        if isinstance(w, PackedOperand):
            codes = param_codes(w.codes, w.form.layout, w.form.shape)
            w = rounded = w.form.numbers(w.codes, w.dtype)
        if self.observe is not None:
            self.observe(x)
            how = replace(how, left=None)
        elif self.range is not None or self.left is not None:
            assert how.left is not None
            operand_key, key = (None, None) if key is None else split_prng_key(key)
            if self.range is not None and how.codes:
                x, left_codes = round_in_range_with_codes(x, how.left, self.range[...], operand_key)
            elif self.range is not None:
                x = round_in_range(x, how.left, self.range[...], operand_key)
            elif self.left is not None:
                x = self.left(x, how.left, operand_key)
            how = replace(how, left=None)
        if self.right is not None:
            assert how.right is not None
            operand_key, key = (None, None) if key is None else split_prng_key(key)
            w, how = self.right(w, how.right, operand_key), replace(how, right=None)
        return x, w, {"how": how, "forms": OperandForms(key, rounded, codes, left_codes)}

    def _check_state(self) -> None:
        """Refuse state of another rule, for example from a checkpoint of another model."""
        sources = [source for source in (self.left, self.right) if source is not None and source.layout is None]
        states = [(self.range, (2,)), *((source.variable, state_shape(source.how)) for source in sources)]
        for variable, shape in states:
            if variable is not None and variable.shape != shape:
                raise ValueError(
                    f"{type(variable).__name__} of the {self.how.place} has shape {variable.shape}, and that rule "
                    f"needs {shape}: it belongs to a model with another rule"
                )


class RoundedDotGeneral(RoundedProduct):
    """In place of `jax.lax.dot_general`."""

    product = staticmethod(rounded_dot_general)


class RoundedConvolution(RoundedProduct):
    """In place of `jax.lax.conv_general_dilated`."""

    product = staticmethod(rounded_conv)


class RoundedEinsum(RoundedProduct):
    """In place of `jax.numpy.einsum`."""

    def __call__(self, subscripts: str, *operands: Array, **kwargs: Any) -> Array:
        x, w, more = self.round_operands(*operands)
        return rounded_einsum(subscripts, x, w, **kwargs, **more)


class RoundedOutput(RoundingModule):
    """Rounds the result of a layer."""

    def __init__(self, spec: Spec, stream: KeyStream, place: Location) -> None:
        super().__init__(stream)
        self.spec, self.place = spec, place

    def __call__(self, y: Array) -> Array:
        return _round_by_field(self.place, "output", self.spec, y, self.key())


class RoundedPromotion(RoundingModule):
    """In place of `promote_dtype`: it is given every array that the layer computes with.

    Args:
        base: the replaced function.
        slots: the names of the arrays, as in a `NnxKind`.
        specs: the specs of arrays, and their layouts.
        packed_params: names of the stored arrays, and their forms.
        stream: of keys.
        place: for errors.
        codes: whether a product takes the codes of stored parameters.
    """

    def __init__(
        self,
        base: Callable[..., Any],
        slots: tuple[tuple[str, ...], ...],
        specs: tuple[tuple[str, Spec, OperandLayout | None], ...],
        packed_params: tuple[tuple[str, PackedForm], ...],
        stream: KeyStream,
        place: Location,
        codes: bool = False,
    ) -> None:
        super().__init__(stream)
        self.base, self.slots, self.specs, self.packed_params, self.place = base, slots, specs, packed_params, place
        self.codes = codes

    def __call__(self, args: tuple[Any, ...], /, **kwargs: Any) -> tuple[Any, ...]:
        """The arrays in the dtype that Flax promotes to, packed ones unpacked, and those with a spec rounded."""
        names = next(names for names in self.slots if len(names) == len(args))
        forms = dict(self.packed_params)
        for name, arg in zip(names, args, strict=True):
            self._check_packing(name.strip("*"), arg, forms.get(name.strip("*")))
        plain = tuple(jnp.zeros((), arg.dtype) if isinstance(arg, QArray) else arg for arg in args)
        arrays: list[Any] = list(self.base(plain, **kwargs))
        for i, (name, arg) in enumerate(zip(names, args, strict=True)):
            if isinstance(arg, QArray):
                form, dtype = forms[name.strip("*")], arrays[i].dtype
                stays = self.codes and name.startswith("*")
                arrays[i] = PackedOperand(arg, form, dtype) if stays else form.numbers(arg, dtype)
        key = self.key()
        for i, (name, spec, layout) in enumerate(self.specs):
            if name in names and (x := arrays[names.index(name)]) is not None:
                field = "activation" if name == "inputs" else "bias" if name == "bias" else "weight"
                own_key = None if key is None else jax.random.fold_in(key, i)
                arrays[names.index(name)] = _round_by_field(self.place, field, spec, x, own_key, layout)
        return tuple(arrays)

    def _check_packing(self, name: str, arg: Any, form: PackedForm | None) -> None:
        """Refuse a parameter that is not packed as here, as a checkpoint of another model brings it."""
        if arg is None or (form is None and not isinstance(arg, QArray)):
            return
        description = f"{arg.spec} of {arg.shape}" if isinstance(arg, QArray) else f"an array of {arg.shape}"
        if form is None:
            raise ValueError(f"{name} of the {self.place} is packed as {description}, and this model packs none there")
        if not isinstance(arg, QArray) or (arg.spec, arg.shape) != (form.spec, form.codes_shape):
            raise ValueError(
                f"{name} of the {self.place} is {description}, and this model holds it packed as {form.spec} of "
                f"{form.codes_shape}: it belongs to a model with another rule or shape"
            )


# -- attention ---------------------------------------------------------------------------------------------------------


class RoundedAttention(RoundedProduct):
    """In place of `flax.nnx.dot_product_attention`: both products with rounded operands."""

    calibrates: ClassVar[bool] = False

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Array:
        if dtype is not None or not query.dtype == key.dtype == value.dtype:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        groups = query.shape[-2] // key.shape[-2]  # of queries that share a key and a value
        key, value = (jnp.repeat(v, groups, axis=-2) if groups > 1 else v for v in (key, value))
        if is_causal:
            causal = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
            mask = causal if mask is None else mask.astype(bool) & causal
        forms = OperandForms(self.key()), OperandForms(self.key())
        scores, sums = (partial(rounded_einsum, precision=precision, how=self.how, forms=one) for one in forms)
        sower = None if module is None else SimpleNamespace(sow=lambda _, *named: module.sow(nnx.Intermediate, *named))
        # Linen's function is the one of NNX, with an einsum as an argument.
        weights = dot_product_attention_weights(query, key, bias, mask, module=sower, einsum=scores, **kwargs)  # type: ignore[arg-type]
        return sums("...hqk,...khd->...qhd", weights, value)


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
        """The result of a layer's call in emulated arithmetic; variables that the call sets are set in the layer."""
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


class EmulatedAttention(LayerEmulation):
    """In place of `flax.nnx.dot_product_attention`, in an emulated arithmetic."""

    def __call__(self, *args: Any, module: Any = None, **kwargs: Any) -> Array:
        if module is not None:
            raise NotImplementedError("sow_weights=True: weights of an emulated attention cannot be sown")
        emulated_attention = emulate(nnx.dot_product_attention, self.spec, accumulate=self.accumulate, key=self.key())
        return emulated_attention(*args, **kwargs)
