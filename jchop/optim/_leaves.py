"""Helpers that the transformations share: checks of arguments, keys for leaves, rounding of leaves, sums rounded once.

Numbers may be traced, as by `optax.inject_hyperparams`; then their values are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jchop._common.bit_ops import CARRIERS, FLOAT32
from jchop._common.checks import check, check_float, check_int
from jchop._common.settings import split_prng_key
from jchop._core.arithmetic.exact import carrier_range, range_of, supports_operation
from jchop._core.matmul.operations import operation_words, round_operation
from jchop._core.rounding.random_bits import seed_words
from jchop._round.arguments import has_tracer, rounding_keys
from jchop._round.round_to_format import round_to_format
from jchop._spec.spec import Spec
from jchop._storage import QArray
from jchop._storage._quantize import StoredAs


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, ends: str = "[)", *, schedule: bool = False
) -> Any:
    """`value`, checked to be one finite real number of an interval, as in `check_float`; a function if `schedule`.

    If it is traced, only dtype and shape are checked. With a finite upper end an array needs 32 bits:
    `optax.inject_hyperparams` makes one in the dtype of the parameters, and 0.999 in bfloat16 is 1.
    """
    if schedule and callable(value):
        return value
    if hasattr(value, "dtype"):
        _check_scalar(name, value, jnp.number, "a real number")
        check(
            math.isinf(high) or value.dtype.itemsize > 2 or not jnp.issubdtype(value.dtype, jnp.floating),
            f"{name} has the dtype {value.dtype}, in which it is rounded, as 0.999 to 1; pass "
            "hyperparam_dtype=jnp.float32 to optax.inject_hyperparams",
        )
    if not has_tracer(value):
        check_float(name, value, low, high, ends)
    return value


def check_count(name: str, value: Any, low: int) -> Any:
    """`value`, checked to be an integer from `low` to 2^31 - 1, the most that a state counts.

    If it is traced, only dtype and shape are checked.
    """
    if has_tracer(value):
        return _check_scalar(name, value, jnp.integer, f"an integer >= {low}")
    return check_int(name, value, low, (1 << 31) - 1)


def _check_scalar(name: str, value: Any, kind: Any, words: str) -> Any:
    if np.shape(value) or not jnp.issubdtype(value.dtype, kind) or jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise TypeError(f"{name}={value!r} must be {words}")
    return value


def check_static_size(name: str, value: Any, default: int) -> int:
    """`value`, checked to be an integer >= 1; `default` for None. It shapes the program, so it cannot be traced.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if has_tracer(value):
        raise TypeError(
            f"{name}={value!r} is traced, and must be an integer >= 1 that is known beforehand: say "
            f"static_args={name!r} to optax.inject_hyperparams"
        )
    return default if value is None else check_int(name, value, 1)


def check_carrier_dtype(name: str, value: Any) -> Any:
    """`value` as the dtype of a carrier, or None."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in CARRIERS:
        raise TypeError(f"{name}={value!r} must be one of {', '.join(CARRIERS)}")
    return dtype


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner` with support for extra arguments.

    Raises:
        TypeError: for a value that is not an Optax transformation.
    """
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(f"inner={inner!r} must be an Optax transformation, such as optax.sgd(0.1)")
    return optax.with_extra_args_support(inner)


def make_transformation(
    init: Callable[..., Any], update: Callable[..., Any], *, needs_params: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The pair as an Optax transformation, whose state begins from numbers: packed parameters are refused.

    A state that is a dict has lost its class, as in a checkpoint of orbax that was restored without a target.
    """

    def begin(params: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=holds_codes):
            if holds_codes(leaf):
                raise TypeError(
                    f"params{jax.tree_util.keystr(path)} is packed, and a state is that of numbers: "
                    "tx.init(jc.dequantize(params)), and jc.optim.apply_updates for the packed ones"
                )
        return init(_as_arrays(params))

    def go_on(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if isinstance(state, dict):
            raise TypeError(
                f"state is a dict of {', '.join(map(str, state))}, as of a checkpoint that was restored without a "
                "target: restore(path, jax.eval_shape(tx.init, params))"
            )
        if needs_params and params is None:
            raise ValueError(
                "params=None, but this transformation needs the parameters: call tx.update(updates, state, params)"
            )
        return update(_as_arrays(updates), state, _as_arrays(params), **extra)

    return optax.GradientTransformationExtraArgs(begin, go_on)


def _as_arrays(tree: Any) -> Any:
    """A tree whose Python floats are arrays."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, float) else leaf, tree)


def make_link(
    init: Callable[..., Any], update: Callable[..., Any], *, needs_params: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`make_transformation` for one that wraps no other, so that its update takes no further arguments."""
    return make_transformation(
        init, lambda updates, state, params, **extra: update(updates, state, params), needs_params=needs_params
    )


def holds_codes(leaf: Any) -> bool:
    """Whether a parameter is packed; not if its parts are placeholders, as beside adapters that train alone."""
    return isinstance(leaf, QArray | StoredAs) and bool(jax.tree.leaves(leaf))


def first_state_key(key: Array | None, *specs: Spec | None) -> Array | None:
    """The first key of a state: `key`, checked, if one of the specs draws; else None."""
    keys = [rounding_keys(spec, key)[0] for spec in specs if spec is not None]
    return next((drawing_key for drawing_key in keys if drawing_key is not None), None)


def split_key(key: Array | None, count: int) -> tuple[Array | None, list[Array | None]]:
    """The key of the next step, and `count` keys for this one; all None for None."""
    if key is None:
        return None, [None] * count
    each = split_prng_key(key, count + 1)
    return each[0], [each[i + 1] for i in range(count)]


def map_with_keys(
    function: Callable[..., Any], key: Array | None, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[Array | None, Any]:
    """The next step's key, and `function(key, leaf, ...)` for every leaf, each with a separate key.

    Raises:
        TypeError, ValueError: as `function` raises it, after the path of the leaf.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    others = [structure.flatten_up_to(other) for other in rest]
    following, keys = split_key(key, len(leaves))
    results = []
    for own, (path, leaf), *parts in zip(keys, leaves, *others, strict=True):
        try:
            results.append(function(own, leaf, *parts))
        except (TypeError, ValueError) as error:
            kind = type(error)
            if kind not in (TypeError, ValueError):  # errors of JAX have arguments of their own
                raise
            raise kind(
                f"{path_text(path) or 'the array'}: {error}; to leave it out, use optax.masked, or for an array of a "
                "packed state a rule of None"
            ) from error
    return following, structure.unflatten(results)


def split_pairs(tree: Any, pairs: Any) -> tuple[Any, Any]:
    """The first and the second of the pairs in the places of the leaves of a tree, which may be empty."""
    structure = jax.tree.structure(tree)
    leaves = structure.flatten_up_to(pairs)
    return structure.unflatten(first for first, _ in leaves), structure.unflatten(second for _, second in leaves)


def round_leaf(key: Array | None, x: Any, spec: Spec) -> Array:
    """`x` rounded to `spec`."""
    return round_to_format(jnp.asarray(x), spec, key)


def sum_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype of sums of arrays: the widest of their dtypes, and at least float32."""
    return jnp.dtype(jnp.promote_types(jnp.result_type(*(jnp.asarray(x).dtype for x in arrays)), jnp.float32))


@lru_cache(maxsize=256)
def _rounds_sums(spec: Spec, dtype: str) -> bool:
    return spec.scaled is None and spec.overflow.value != "wrap" and supports_operation(spec, CARRIERS[dtype])


def in_sum_dtype(p: Any) -> Array:
    """A parameter in the dtype of its sums."""
    return jnp.asarray(p).astype(sum_dtype(p))


def rounded_sum(key: Array | None, p: Any, u: Any, spec: Spec) -> Array:
    """The sum p + u rounded under `spec`, in the dtype of `p`.

    The exact sum is rounded once. Some formats first round the sum to the wider dtype of the two and float32, as in an
    addition. They are scaled formats, codebooks, and formats as fine as this dtype.

    Raises:
        ValueError: if the dtype of `p` cannot hold the results.
    """
    p, u = jnp.asarray(p), jnp.asarray(u)
    require_representable("spec", spec, "params", p)
    dtype = sum_dtype(p, u)
    terms = [p.astype(dtype), u.astype(dtype)]
    if not _rounds_sums(spec, dtype.name):
        return round_to_format(terms[0] + terms[1], spec, key).astype(p.dtype)
    whole = carrier_range(CARRIERS[dtype.name])
    word = None if key is None else operation_words(seed_words(key), terms[0])
    return round_operation("add", terms, spec, word, ranges=(whole, whole)).astype(p.dtype)


def require_representable(name: str, spec: Spec, whose: str, x: Any) -> None:
    """Refuses a spec whose results would be rounded once more, to the dtype of an array.

    Raises:
        TypeError, ValueError: for an array whose dtype is not floating-point, or has too few bits.
    """
    carrier = CARRIERS.get(x.dtype.name)
    if carrier is None:
        raise TypeError(f"{whose} have a leaf of dtype {x.dtype}; allowed: {', '.join(CARRIERS)}")
    if carrier.width == 16 and spec.scaled is None:
        own, most = range_of(spec, FLOAT32), carrier_range(carrier)
        if own.precision > most.precision or own.quantum < most.quantum or own.top > most.top:
            raise ValueError(f"{name}={str(spec)!r} has values that {whose} of dtype {carrier.name} cannot hold")


def update_to_target(p: Any, target: Array, dtype: Any = None) -> Array:
    """The update u for which Optax's ``(p + u).astype(p.dtype)`` is `target`. `p.dtype` must hold the target.

    u is the difference t - p, rounded once. It is exact, and so is p + u, if t / 2 <= p <= 2 t (Sterbenz 1974). For `p`
    of 16 bits and u of 32 bits the sum is always t. If |t| >= 2^-16 |p|, its error is below 2^-6 of half a gap at t.
    For smaller t, t and p are multiples of one power of two, and t - p is less than 2^24 times this power. If `p` has
    the dtype of u, steps over many binades or changes of sign can miss t by a unit in its last place. Then no u of
    that dtype gives t.

    Args:
        p: the parameter.
        target: the new parameter, t.
        dtype: dtype of the update. Default: the wider of the dtype of `p` and float32.
    """
    p = jnp.asarray(p)
    dtype = sum_dtype(p) if dtype is None else jnp.dtype(dtype)
    wide = jnp.promote_types(sum_dtype(p), dtype)
    # The barrier keeps the compiler from contracting a product in the target (a scale times a code) with the
    # subtraction.
    before, after = p.astype(wide), jax.lax.optimization_barrier(target).astype(wide)
    same = before == after  # also for infinities, whose difference is NaN
    return jnp.where(same, 0, after - before).astype(dtype)


def finite_or(new: Array, old: Array) -> Array:
    """The new error of a rounding; the old one where that is not finite, which all later steps would else add."""
    return jnp.where(jnp.isfinite(new), new, old)


def require_shapes(name: str, tree: Any, whose: str, like: Any) -> None:
    """Refuses arrays whose shapes differ from the arrays of another tree, because they would be broadcast.

    Raises:
        ValueError: names the first of these arrays, as `name`, and the other tree, as `whose`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: hasattr(x, "shape"))
    for (path, leaf), other in zip(leaves, structure.flatten_up_to(tree), strict=True):
        if other is not None and jnp.shape(other) != tuple(leaf.shape):
            raise ValueError(
                f"{name}: {path_text(path) or 'the array'} has shape {jnp.shape(other)}, and {whose} "
                f"{tuple(leaf.shape)}"
            )


def is_float_leaf(leaf: Any) -> bool:
    """Whether a leaf is an array of floating-point numbers, and not a typed key, integers or a placeholder."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and jnp.issubdtype(leaf.dtype, jnp.floating)


def owner_index(path: tuple[Any, ...], leaf: Any, owners: list[tuple[Any, Any]]) -> int | None:
    """The index of the owner of a leaf of a state, among leaves with their paths; None if it has none.

    An owner has the shape of the leaf, and its path is the end of the leaf's path; of several, the longest.
    """
    fitting = [
        (len(name), place)
        for place, (name, owner) in enumerate(owners)
        if path[len(path) - len(name) :] == name and tuple(getattr(leaf, "shape", ())) == tuple(owner.shape)
    ]
    return max(fitting)[1] if fitting else None


def path_text(path: tuple[Any, ...]) -> str:
    """A path of a pytree as text with dots: ``0.mu.layer.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def only_state(state: Any, kind: type, name: str) -> Any:
    """The one state of a kind.

    Raises:
        ValueError: if there is none, or several; `name` is the name of their transformation.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    states = [node for node in nodes if isinstance(node, kind)]
    if len(states) != 1:
        raise ValueError(f"state holds {len(states)} states of jchop.optim.{name}; there must be one")
    return states[0]
