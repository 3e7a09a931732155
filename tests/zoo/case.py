"""What a model of the zoo is: how to make it, how to run it, and which of its parameters are weights of products."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["Case", "Kind", "draw", "expand", "floats", "mean_square", "nnx_case", "paths", "tokens"]

Kind = Literal["nnx", "linen", "dict", "equinox", "haiku"]


def mean_square(out: Any) -> Any:
    """The default loss: the mean square of every float of an output, in float32."""
    parts = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(jnp.mean(part**2) for part in parts)


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        name: the key in `CASES`.
        kind: the library that it is written with; ``"dict"`` is plain JAX.
        build: the arguments of `apply`: a model of NNX and its arguments, or parameters and their arguments. The model
            is new in each call.
        apply: a pure function of parameters and arguments. The parameters of NNX are
            ``nnx.split(model, nnx.Param, ...)[1]``; the other state is that of a new model.
        products: paths of the parameters that a product reads: a dot, an einsum, a convolution, a gather of rows.
        others: paths of all other parameters.
        derived: those of `products` that arithmetic changes before the product: ``w + a @ b``, ``w - mean(w)``. All
            other weights reach their products as they are: transposed, reshaped, sliced, joined, chosen or cast.
        loss: a number of the output.
        methods: NNX: methods beside ``__call__``, each with a function that makes its arguments.
        module: Linen: the module; ``None`` for the others.
        method: Linen: the method of the module that `apply` calls.
        rest: Linen: the variables beside the parameters, by collection.
        run: Linen: ``run(module, params, *args)``, which `apply` is for `module`.
    """

    name: str
    kind: Kind
    build: Callable[[], tuple[Any, tuple[Any, ...]]]
    apply: Callable[..., Any]
    products: tuple[str, ...]
    others: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    loss: Callable[[Any], Any] = mean_square
    methods: Mapping[str, Callable[[], tuple[Any, ...]]] = field(default_factory=dict)
    module: Any = None
    method: str = "__call__"
    rest: Callable[[], Mapping[str, Any]] = dict
    run: Callable[..., Any] | None = None

    def params(self) -> tuple[Any, tuple[Any, ...]]:
        """Parameters and arguments of `apply`, of every kind."""
        model, args = self.build()
        return (nnx.state(model, nnx.Param) if self.kind == "nnx" else model), args


def paths(params: Any) -> dict[str, Any]:
    """The arrays of a tree of parameters by path, joined by ``/``; of a state of NNX without ``value`` at the end."""
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def expand(*patterns: str) -> tuple[str, ...]:
    """Paths by the braces of a shell: ``"layers/{0,1}/{up,down}"`` are four."""
    found: list[str] = []
    for pattern in patterns:
        pieces = re.split(r"\{([^}]*)\}", pattern)
        choices = [piece.split(",") if place % 2 else [piece] for place, piece in enumerate(pieces)]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(found)


def draw(tree: Any, seed: int = 0) -> Any:
    """Random numbers for a tree of shapes: a model is made without a compiler, and no bias or gain is trivial.

    Arrays of two axes or more have a variance of one over their size per column; gains and variances are near one; the
    other vectors are small. Integers are zeros, and keys are those of the seed.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.zeros(shape.shape, shape.dtype)
        numbers = rng.standard_normal(shape.shape)
        if len(shape.shape) >= 2:
            numbers *= (shape.shape[-1] / np.prod(shape.shape)) ** 0.5
        else:
            numbers = 0.1 * numbers + bool(re.search(r"(scale|var|gain)(/value)?$", name))
        return jnp.asarray(numbers, shape.dtype)

    with jax.ensure_compile_time_eval():
        return jax.tree_util.tree_map_with_path(leaf, tree)


def floats(*shape: int, seed: int = 1) -> jax.Array:
    """An input of normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def tokens(*shape: int, letters: int = 64, seed: int = 1) -> jax.Array:
    """An input of tokens."""
    return jnp.asarray(np.random.default_rng(seed).integers(letters, size=shape), jnp.int32)


def nnx_case(
    name: str,
    make: Callable[[nnx.Rngs], Any],
    args: Callable[[], tuple[Any, ...]],
    products: tuple[str, ...],
    others: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """A model of NNX from its constructor."""

    @functools.cache
    def parts() -> tuple[Any, Any, Any]:
        graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
        return graph, draw(params), draw(rest)

    def build() -> tuple[Any, tuple[Any, ...]]:
        return nnx.merge(*parts(), copy=True), args()

    def apply(params: Any, *args: Any) -> Any:
        graph, _, rest = parts()
        return nnx.merge(graph, params, rest, copy=True)(*args)

    return Case(name, "nnx", build, apply, products, others, **more)
