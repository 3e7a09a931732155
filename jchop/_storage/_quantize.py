"""`quantize`, `dequantize`, `requantize`, `fit_scale` and `fit_half_quadratic`; `StoredAs`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.core import Tracer

from jchop._common.bit_ops import CARRIERS, enable_x64_for, reshape
from jchop._common.checks import check, check_bool, check_choice, check_float, check_int
from jchop._common.on_demand import load_name
from jchop._common.settings import always_jit
from jchop._core.rounding.random_bits import StreamOffset, seed_words
from jchop._core.scaled.groups import Groups
from jchop._core.scaled_bodies import flatten_scales
from jchop._kernels.primitive import IMPLEMENTATIONS, Impl
from jchop._kernels.scaled import check_scales, dense_of, fit_scaled, quantize_scaled
from jchop._round import arguments
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Gradient, Spec, SpecLike, as_spec
from jchop._storage import _codes
from jchop._storage._array import QArray, check_qarray, qarray_of_scales, refuse_qarray_dicts
from jchop._storage._axis_groupings import axes_from_end, map_over_stack
from jchop.formats import ElementFormat, ScaledFormat, UniformFormat
from jchop.formats.rounding import Rounding


@overload
def quantize(x: Mapping[Any, Any] | list[Any] | tuple[Any, ...], spec: Any, key: Array | None = None) -> Any: ...
@overload
def quantize(
    x: Any,
    spec: SpecLike,
    key: Array | None = None,
    *,
    scale: _codes.Scale = None,
    zero_point: Any = None,
    offset: Any = 0,
    impl: Impl = "auto",
) -> QArray: ...
def quantize(
    x: Any,
    spec: Any,
    key: Array | None = None,
    *,
    scale: _codes.Scale = None,
    zero_point: Any = None,
    offset: Any = 0,
    impl: Impl = "auto",
) -> Any:
    """Rounds `x` to codes and scales. `dequantize` of them equals `round_to_format`, bit for bit.

    Works under jit (with `spec` static), vmap, scan and on sharded arrays. The codes have no derivative: use
    `round_to_format` for straight-through gradients. `dequantize` has a derivative in the scales.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. A JAX array gives JAX leaves, other arrays NumPy leaves.
        spec: a scaled format or a plain one, a `Spec` of one, or a text as ``"int4(group=128,scale=bfloat16)"``. Its
            gradient has no effect.

            For a pytree `x`: rules for the paths of its leaves ([](patterns.md)), a mapping ``{"kernel": "int8"}`` or
                several `jchop.Rule`. The first that matches applies. A text is for all leaves. A tree has no products,
                so a spec counts the axes of the arrays: a kernel (in, out) has blocks along the sum in
                ``"int4(group=32,axis=0)"``.
        key: a typed key, needed by the stochastic modes; it is split, one for each leaf.
        scale: scales to use in place of the format's rule, in the form of `fit_scale`. They are finite numbers above
            zero, which are stored unchanged. Within jit their values are not checked: NaN gives NaN, and under a scale
            of 0 or below codes and numbers have no meaning. Default: fitted to `x`.
        zero_point: zero points, together with `scale`, for a format that has them. Integers within the range of its
            codes, or finite floats.
        offset: the position of `x` in a larger array, for the random bits, as in `round_to_format`. Default 0.
        impl: as in `round_to_format`.

    Returns:
        A `QArray`. If the format has no NaN, a NaN becomes its largest value. For a tree, the tree with QArrays in
        place of arrays. Leaves that no rule matches stay the same arrays.

    Raises:
        TypeError: for a dtype that is not a carrier, or a key that is not a typed key.
        ValueError: for codes of more than 8 bits (16 under a plain format) or a stochastic spec without a key. Also for
            scales of another form or value, a carrier that cannot hold the results, or an axis that `x` does not have.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.array([1.0, 0.3, -7.5, 100.0]), jc.formats.mxfp4(group=2))
        >>> [hex(code) for code in q.qvalue.tolist()], q.scale.tolist()
        (['0x26', '0x79'], [125, 131])
        >>> jc.dequantize(q).tolist()
        [1.0, 0.25, -8.0, 96.0]
        >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}}
        >>> packed = jc.quantize(params, {"kernel": "int4(group=32,axis=0)"})
        >>> packed["dense"]["kernel"].nbytes, jc.dequantize(packed)["dense"]["kernel"].shape
        (320, (64, 8))
    """
    if isinstance(x, Mapping) or _are_rules(spec):
        alone = scale is None and zero_point is None and impl == "auto"
        check(alone, "scale=, zero_point= and impl= are for one array, and x is a tree of arrays")
        return load_name("jchop._quantized.quantize_tree", "quantize_tree")(x, spec, key)
    check_choice("impl", impl, IMPLEMENTATIONS)
    spec = replace(as_spec(spec, scaled=True), gradient=Gradient())
    array, numpy = arguments.as_array("x", x), not isinstance(x, Array)
    arguments.carrier_of_dtype(array.dtype, complex_too=False)
    if spec.scaled is not None:
        spec = replace(spec, format=axes_from_end(spec.scaled, array.ndim))
    draw_key = arguments.rounding_keys(spec, key)[0]
    with enable_x64_for(array.dtype), jax.named_scope(arguments.JCHOP_SCOPE):
        if not isinstance(spec.format, ElementFormat):
            place, starts = arguments.stream_offset(offset, array.shape)
            how = _QuantizeOptions(spec, place, impl)
            if check_scales(spec, array.shape, scale, zero_point):
                _check_scale_values(scale, spec, array.shape)
                _check_zero_point_values(zero_point, spec)
            *parts, places = _quantize_groups(array, draw_key, starts, scale, zero_point, how=how)
            parts = (*(parts if scale is None else (parts[0], scale, zero_point)), places)
        else:
            if scale is not None or zero_point is not None:
                raise ValueError(f"spec={str(spec)!r} is of a plain format, which has no scale and no zero_point")
            _codes.code_dtype(spec.format)
            values = round_to_format(jnp.asarray(lax.stop_gradient(array)), spec, draw_key, offset=offset, impl=impl)
            parts = (_encode_values(values, fmt=spec.format), None, None, None)
        qvalue, scale, zero_point, places = jax.tree.map(_leaf_to_numpy, parts) if numpy else parts
    size = array.shape[-1] if array.ndim else None
    return QArray(qvalue, scale, zero_point, spec, size, np.dtype(array.dtype), places)


def _are_rules(spec: Any) -> bool:
    """Whether a value is rules for the leaves of a tree, whose class is not imported for this."""
    loaded = sys.modules.get("jchop._quantized.products.rule")
    return isinstance(spec, Mapping | list | tuple) or (loaded is not None and isinstance(spec, loaded.Rule))


def dequantize(q: Any, dtype: Any = None, *, add_to: Any = None) -> Any:
    """Returns the numbers of a `QArray`, or of each in a pytree. They equal `round_to_format`, bit for bit.

    Differentiable in the leaves that are floats: scales, and codes of a float dtype.

    Args:
        q: the stored array, or a parameter that `jchop.quantize_fn(...).pack` stored in another shape. Or a pytree of
            them; other arrays in it stay as they are.
        dtype: float16, bfloat16, float32 or float64, to which scale times element is rounded once. Default: the dtype
            of each stored array.
        add_to: an array of the shape of the stored one. The result is its sum with the numbers, in its dtype, computed
            in one pass.

    Returns:
        A JAX array, or a NumPy array if the leaves are NumPy arrays. It has the shape of the parameter. For a pytree, a
        pytree of arrays.

    Raises:
        TypeError: if `q` is another array, or `dtype` not a carrier. For leaves of a QArray in a dict, as a checkpoint
            gives that was restored without a target.
        ValueError: for leaves that do not fit each other, or an `add_to` of another shape.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.array([0.1, 0.2, -0.4]), "int4(group=3)")
        >>> jc.dequantize(q, "bfloat16").tolist()
        [0.1142578125, 0.228515625, -0.400390625]
        >>> jc.dequantize(q, add_to=jnp.ones(3)).dtype
        dtype('float32')
        >>> jc.dequantize({"w": q, "b": jnp.zeros(4)})["w"].shape
        (3,)
    """
    if not isinstance(q, QArray | StoredAs):
        if q is None or jax.tree_util.all_leaves([q]):
            check_qarray("q", q)
        refuse_qarray_dicts("q", q)
        check(add_to is None, "add_to belongs to one array, and q is a pytree")
        return jax.tree.map(lambda leaf: dequantize(leaf, dtype) if _has_codes(leaf) else leaf, q, is_leaf=_has_codes)
    if add_to is not None:
        if dtype is not None and np.dtype(dtype) != add_to.dtype:
            raise ValueError(f"dtype={dtype!r} has no effect beside add_to, whose dtype is {add_to.dtype}")
        check(tuple(add_to.shape) == q.shape, f"add_to has shape {tuple(add_to.shape)}, and q {q.shape}")
        dtype = add_to.dtype
    if isinstance(q, StoredAs):
        numbers = q.dequantize(dtype)
        return numbers if add_to is None else add_to + numbers
    form = q.form(dtype)
    if form.dtype not in CARRIERS:
        raise TypeError(f"dtype={dtype!r} is not a carrier; allowed: {', '.join(CARRIERS)}")
    wide = any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(q) if hasattr(leaf, "dtype"))
    wide = wide or _codes.needs_float64(q.spec.element)
    dtype, leaves = np.dtype(np.float64) if wide else jnp.dtype(form.dtype), (q.qvalue, q.scale, q.zero_point, q.places)
    with enable_x64_for(dtype), jax.named_scope(arguments.JCHOP_SCOPE):
        numbers = arguments.mark_results(_dequantize_leaves(*leaves, add_to, form=form))
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((q, add_to))):
            return _leaf_to_numpy(numbers)
    return numbers


def requantize(q: Any, x: Any, key: Array | None = None) -> Any:
    """Other numbers packed like an array: under its spec, with scales of the same groups.

    Leading axes that vmap or scan added have scales of their own, so each array of a stack is packed by itself.

    Args:
        q: a QArray, or a parameter that is stored in another shape.
        x: numbers in the shape of `q`.
        key: as in `quantize`; an array of a stack has a key of its own.

    Returns:
        An array like `q`.
    """
    if isinstance(q, StoredAs):
        return q.requantize(x, key)
    spec = _codes.spec_of_part(q.spec, q.ndim)
    stack = 0 if q.spec.scaled is None else _codes.batch_axes(q.spec, q.shape, q.scale)
    return replace(map_over_stack(stack, lambda x, key: quantize(x, spec, key), x, key), spec=q.spec)


@partial(jax.tree_util.register_dataclass, data_fields=["stored", "input_factors"], meta_fields=["core", "ndim_stored"])
@dataclass(frozen=True, eq=False)
class StoredAs:
    """A packed parameter that is not stored as it is: its groups run over several axes, or its inputs have factors.

    Args:
        stored: the codes and scales, with the axes of a group as one.
        core: the shape of the parameter, without axes of a stack.
        ndim_stored: how many axes the stored array has for `core`.
        input_factors: factors of the other operand of its product, applied before it is rounded. The stored numbers are
            the parameter divided by them. Their shape has the axes of the parameter, with 1 for axes that the product
            keeps. Default None: none.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> patches = lambda w, x: jax.lax.conv(x, w, (4, 4), "VALID")
        >>> low = jc.quantize_fn(patches, jc.Rule(weight="int4(group=32)"))
        >>> w, x = jnp.ones((8, 3, 4, 4)), jnp.ones((1, 3, 8, 8))
        >>> packed = low.pack(w, x)
        >>> packed.shape, packed.stored.shape
        ((8, 3, 4, 4), (8, 48))
    """

    stored: QArray
    core: tuple[int, ...]
    ndim_stored: int
    input_factors: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return (*self.stored.shape[: self.stored.ndim - self.ndim_stored], *self.core)

    @property
    def ndim(self) -> int:
        """Number of axes of the parameter."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the parameter."""
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.stored.nbytes + (0 if self.input_factors is None else self.input_factors.nbytes)

    @property
    def spec(self) -> Spec:
        """The spec of the codes, with the axes of the stored array."""
        return self.stored.spec

    @property
    def without_factors(self) -> QArray | StoredAs:
        """The stored numbers, in the shape of the parameter."""
        return self.stored if self.stored.shape == self.shape else replace(self, input_factors=None)

    def __jax_array__(self) -> Any:
        """Returns the numbers, for functions of `jax.numpy`."""
        return self.dequantize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the numbers, for functions of NumPy, as a QArray does."""
        check(copy is not False, "the numbers of a packed parameter are a new array: copy=False cannot be had")
        return np.asarray(self.dequantize(), dtype)

    def dequantize(self, dtype: Any = None) -> Array:
        """Returns the numbers, in the shape of the parameter."""
        numbers = reshape(dequantize(self.stored, dtype), self.shape)
        return numbers if self.input_factors is None else multiply_in_own_dtype(numbers, self.input_factors)

    def requantize(self, x: Array, key: Array | None = None) -> StoredAs:
        """Packs other numbers of the parameter in the same way."""
        if self.input_factors is not None:
            x = multiply_in_own_dtype(x, 1 / self.input_factors)
        return replace(self, stored=requantize(self.stored, reshape(x, self.stored.shape), key))


def multiply_in_own_dtype(x: Array, factors: Array) -> Array:
    """An array times factors of a dtype that may be wider, rounded once to its own."""
    return (jnp.asarray(x).astype(jnp.promote_types(x.dtype, factors.dtype)) * factors).astype(x.dtype)


export.register_pytree_node_serialization(
    StoredAs,
    serialized_name="jchop.StoredAs",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: (tuple(json.loads(data)[0]), json.loads(data)[1]),
)


def fit_scale(x: Any, spec: SpecLike) -> tuple[_codes.Scale, Any]:
    """Returns the scales and zero points that `quantize` chooses, to be kept, averaged, or used for other arrays.

    Args:
        x: as in `quantize`.
        spec: of a scaled format.

    Returns:
        ``(scale, zero_point)`` in the form of `QArray`, for `quantize`. The second is None for a format without zero
        points.

    Raises:
        ValueError: for a plain format, which has no scale.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> scale, zero_point = jc.fit_scale(jnp.array([[1.0, -12.7], [2.54, 0.0]]), jc.formats.int8(channel=0))
        >>> scale.shape, zero_point
        ((2, 1), None)
    """
    spec = as_spec(spec, scaled=True)
    if spec.scaled is None:
        raise ValueError(f"spec={str(spec)!r} is of a plain format, which has no scale")
    array, numpy = arguments.as_array("x", x), not isinstance(x, Array)
    arguments.carrier_of_dtype(array.dtype, complex_too=False)
    spec = replace(spec, format=axes_from_end(spec.scaled, array.ndim), gradient=Gradient())
    with enable_x64_for(array.dtype), jax.named_scope(arguments.JCHOP_SCOPE):
        scales = _fit_group_scales(array, spec=spec)
        return jax.tree.map(_leaf_to_numpy, scales) if numpy else scales


def _has_codes(leaf: Any) -> bool:
    return isinstance(leaf, QArray | StoredAs)


# -- the traced part ---------------------------------------------------------------------------------------------------


class _QuantizeOptions(NamedTuple):
    """The static arguments of quantization to a scaled format."""

    spec: Spec
    place: StreamOffset
    impl: str


@partial(always_jit, static_argnames="how", inline=True)
def _quantize_groups(
    x: Any, key: Array | None, starts: tuple, scale: _codes.Scale, zero_point: Any, *, how: _QuantizeOptions
) -> tuple:
    """The codes, scales, zero points and places of an array's scaled format."""
    words = () if key is None else (*seed_words(key), *starts)
    x, scale = lax.stop_gradient((jnp.asarray(x), scale))
    assert how.spec.scaled is not None
    more = {"place": how.place, "impl": how.impl, "as_dtype": _codes.code_dtype(how.spec.scaled.element)}
    dense, x, mask = dense_of(how.spec, x)
    codes, *scales = quantize_scaled(x, *words, spec=dense, scale=scale, zero_point=zero_point, **more)
    if how.spec.scaled.sparse is None:
        return codes, *scales, None
    mask = jnp.ones(x.shape, bool) if mask is None else mask  # of no numbers
    codes, places = _codes.sparse_codes(codes, mask, how.spec)
    return codes, *scales, places


@partial(always_jit, static_argnames="fmt", inline=True)
def _encode_values(values: Array, *, fmt: ElementFormat) -> Array:
    return _codes.encode_unscaled(values.reshape(values.shape or (1,)), fmt)


@partial(always_jit, static_argnames="spec", inline=True)
def _fit_group_scales(x: Any, *, spec: Spec) -> tuple[_codes.Scale, Any]:
    return fit_scaled(lax.stop_gradient(jnp.asarray(x)), spec=spec)


@partial(always_jit, static_argnames="form", inline=True)
def _dequantize_leaves(
    qvalue: Any, scale: _codes.Scale, zero_point: Any, places: Any, add_to: Any, *, form: _codes.QArrayForm
) -> Array:
    qvalue, scale, zero_point, places = jax.tree.map(jnp.asarray, (qvalue, scale, zero_point, places))
    numbers = _codes.decode_qarray(form, qvalue, scale, zero_point, places)
    return numbers if add_to is None else add_to + numbers


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_scale_values(scale: _codes.Scale, spec: Spec, shape: tuple[int, ...]) -> None:
    """Refuses scales that `fit_scale` cannot return. Traced values are not known and not checked."""
    if arguments.has_tracer(scale):
        return
    fmt = spec.scaled
    assert fmt is not None
    values = []
    while isinstance(fmt.scale, ScaledFormat):
        q = qarray_of_scales(scale, fmt.scale, fmt.scale_shape(shape))
        values.append(dequantize(q))
        fmt, scale, shape = fmt.scale, q.scale, q.shape
    for part in [*values, *flatten_scales(scale, None)]:
        assert isinstance(fmt.scale, ElementFormat)
        numbers = _distinct_values(part, fmt.scale)
        if fmt.scale_rule.second is not None and part is scale[0]:
            numbers = abs(numbers)  # a sign says which levels
        wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))]
        _refuse_numbers("scale", wrong, spec, "scales must be finite and above zero")


def _refuse_numbers(name: str, wrong: np.ndarray, spec: Spec, requirement: str) -> None:
    if wrong.size:
        raise ValueError(f"{name} has {wrong.flat[0]}; for spec={str(spec)!r} {requirement}")


def _check_zero_point_values(zero_point: Any, spec: Spec) -> None:
    """Refuses zero points that `fit_scale` cannot return. Traced values are not known and not checked."""
    fmt = spec.element
    if spec.scaled is None or not spec.scaled.zero_point or arguments.has_tracer(zero_point):
        return
    if spec.scaled.zero_point == "float":
        assert isinstance(spec.scaled.scale, ElementFormat)
        numbers = _distinct_values(zero_point, spec.scaled.scale)
        _refuse_numbers("zero_point", numbers[~np.isfinite(numbers)], spec, "zero points must be finite")
        return
    values = np.asarray(zero_point)
    assert isinstance(fmt, UniformFormat)
    outside = values[(values < fmt.min_code) | (values > fmt.max_code)]
    _refuse_numbers("zero_point", outside, spec, f"it must lie between {fmt.min_code} and {fmt.max_code}")


def _distinct_values(scales: Any, fmt: ElementFormat) -> np.ndarray:
    """The distinct values of stored scales: the numbers themselves if of a float dtype, else the decoded codes."""
    distinct = np.unique(np.asarray(scales).astype(np.float64))
    if jnp.issubdtype(scales.dtype, jnp.floating):
        return distinct
    values = (fmt.value_of(int(code) % (1 << fmt.bits)) for code in distinct)
    return np.array([math.nan if value is None else float(value) for value in values])


def _leaf_to_numpy(leaf: Any) -> Any:
    """A leaf as NumPy; a traced leaf is returned unchanged."""
    return leaf if isinstance(leaf, Tracer) else np.asarray(leaf)


# -- scales and zero points by half-quadratic quantization: a search over the data, not a rule of a format -------------


def fit_half_quadratic(
    x: Any,
    spec: Spec | ScaledFormat | str,
    *,
    iterations: int = 20,
    norm: float = 0.7,
    weight: float = 10.0,
    growth: float = 1.01,
    whole_start: bool = False,
) -> tuple[Any, Any]:
    """Zero points that minimize the p-th powers of the errors, p < 1, in which outliers have little weight (HQQ).

    The scales come from `fit_scale`. Each iteration updates sparse errors E, which are subtracted from x, and then the
    zero points. With r = x - s e - z they are ``E = sign(r) max(abs(r) - abs(r)^(p - 1) / b, 0)``. Then z is the mean
    of x - E - s e of a group. The number b grows with each iteration. The search ends when the mean absolute error no
    longer falls, and returns the best zero points. Sums and powers are computed in the device's float32 (float64 for
    float64 data), so the last bits may differ between devices. `quantize` with given zero points is the same on all
    devices.

    Args:
        x: the array, as in `quantize`.
        spec: of a format with ``zero_point="float"`` whose scales are float16, bfloat16, float32 or float64, as
            ``"uint4(group=64,zero_point=float)"``. A stochastic rounding counts as one to nearest in the search.
        iterations: number of iterations, at least 1. Default 20.
        norm: p, between 0 and 1, both excluded. Default 0.7.
        weight: b in the first iteration, above 0. Default 10.
        growth: factor of b after each iteration, above 0. Default 1.01.
        whole_start: whether to start with zero points that are whole multiples of the scales, as the authors do for 4
            bits. Default False, which gives smaller errors on normally distributed numbers.

    Returns:
        ``(scale, zero_point)`` in the form of `fit_scale`, for `quantize`.

    Raises:
        TypeError, ValueError: for another format, or a number out of range.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Example:
        >>> import numpy as np, jchop as jc
        >>> from jchop._storage._quantize import fit_half_quadratic
        >>> x = np.array([[0.0, 0.4, 0.4, 0.4, 1.4, 15.0]], np.float32)
        >>> scale, zero_point = fit_half_quadratic(x, jc.formats.uint4(channel=0, zero_point="float"))
        >>> scale.tolist(), round(float(zero_point[0, 0]), 2)  # four of six errors become smaller
        ([[1.0]], 0.34)
    """
    spec = as_spec(spec, scaled=True)
    fmt = check_float_zero_points(spec)
    settings = check_hqq_search(iterations, norm, weight, growth, whole_start)
    array = arguments.as_array("x", x)
    nearest = Rounding.NEAREST_EVEN if spec.rounding.stochastic else spec.rounding  # the search has no key
    spec = replace(spec, format=axes_from_end(fmt, array.ndim), rounding=nearest, gradient=Gradient())
    scale, zero_point = fit_scale(array, spec)
    with enable_x64_for(array.dtype), jax.named_scope(arguments.JCHOP_SCOPE):
        if whole_start:
            zero_point = ((zero_point / scale).round() * scale).astype(scale.dtype)
        if array.size:
            zero_point = _search_zero_points(
                jnp.asarray(array), scale, zero_point, settings, spec=spec, iterations=iterations
            )
        return scale, zero_point if isinstance(x, Array) else np.asarray(zero_point)


def check_float_zero_points(spec: Spec) -> ScaledFormat:
    """The format of a spec, whose zero points the search can move.

    Raises:
        ValueError: for another one.
    """
    fmt = spec.scaled
    if fmt is None or fmt.zero_point != "float":
        raise ValueError(
            f"spec={str(spec)!r} has zero_point={fmt.zero_point if fmt else None}; the search moves zero points that "
            "are numbers: zero_point='float', in text 'uint4(group=64,zero_point=float)'"
        )
    check(fmt.sparse is None, f"spec={str(spec)!r} drops numbers, which the search does not; leave sparse out")
    is_carrier, needs = fmt.scale in _codes.CARRIER_FORMATS.values(), "one of float16, bfloat16, float32 and float64"
    check(is_carrier, f"spec={str(spec)!r} has scale={str(fmt.scale)!r}; the search needs {needs}")
    return fmt


def check_hqq_search(iterations: Any, norm: Any, weight: Any, growth: Any, whole_start: Any) -> tuple[float, ...]:
    """The numbers of a search.

    Raises:
        TypeError, ValueError: for one out of range.
    """
    check_int("iterations", iterations, 1, (1 << 31) - 1)
    check_bool("whole_start", whole_start)
    limits = {"norm": (norm, 1.0), "weight": (weight, math.inf), "growth": (growth, math.inf)}
    return tuple(check_float(name, value, 0, high, "()") for name, (value, high) in limits.items())


class _HqqState(NamedTuple):
    turn: Array
    zero: Array  # the next candidate
    best: Array  # the zero points with the least error so far
    error: Array  # their mean of |x - s e - z|
    improves: Array


@partial(always_jit, static_argnames=("spec", "iterations"))
def _search_zero_points(
    x: Array, scale: Array, zero: Array, settings: tuple[float, ...], *, spec: Spec, iterations: int
) -> Array:
    """The zero points of least error in HQQ's iteration, under fixed scales."""
    fmt = spec.scaled
    assert fmt is not None
    groups, wide = Groups(x.shape, fmt.group_shape(x.shape)), jnp.promote_types(x.dtype, jnp.float32)
    finite = jnp.isfinite(x)
    numbers = jnp.where(finite, x, 0).astype(wide)
    norm, weight, growth = (jnp.asarray(value, wide) for value in settings)

    def total(values: Array) -> Array:
        return jnp.sum(groups.view(values), axis=groups.axes, keepdims=True)

    def spread(values: Array) -> Array:
        return groups.back(jnp.broadcast_to(groups.expand(values).astype(wide), groups.view(numbers).shape))

    count = jnp.maximum(total(finite.astype(wide)), 1)

    def turn(state: _HqqState) -> _HqqState:
        q = quantize(x, spec, scale=scale, zero_point=state.zero)
        whole = dequantize(replace(q, zero_point=jnp.zeros_like(zero)), wide)  # s e
        rest = jnp.where(finite, numbers - whole - spread(state.zero), 0)
        size = jnp.abs(rest)
        error = jnp.mean(size)
        better = error < state.error
        power = weight * growth ** state.turn.astype(wide)
        sparse = jnp.sign(rest) * jnp.maximum(size - size ** (norm - 1) / power, 0)
        means = total(jnp.where(finite, numbers - sparse - whole, 0)) / count
        best = jnp.where(better, state.zero, state.best)
        following = groups.squeeze(means).astype(zero.dtype)
        return _HqqState(state.turn + 1, following, best, jnp.minimum(error, state.error), better)

    first = _HqqState(jnp.zeros((), jnp.int32), zero, zero, jnp.full((), jnp.inf, wide), jnp.ones((), bool))
    return lax.while_loop(lambda state: (state.turn <= iterations) & state.improves, turn, first).best
