"""Linear operators given as functions of vectors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jchop._common.bit_ops import enable_x64_for

Array = jax.Array


@dataclass(frozen=True)
class LinearOperator:
    """A function of a vector, traced; the arrays of its trace are operands beside it.

    Operators of equal programs are equal, so that functions which differ only in arrays are compiled once.

    Args:
        text: the program as text.
        values: the parts that the text does not show: the numbers in the program, and the arrays, by their identity.
        program: the program itself.
        constants: the number of arrays that are constants of the trace; the others are arguments before the vector.
    """

    text: str
    values: tuple[Hashable, ...]
    program: Any = field(compare=False)
    constants: int

    def __call__(self, arrays: Sequence[Array], v: Array) -> Array:
        """The image of a vector, in its dtype."""
        program = ClosedJaxpr(self.program, list(arrays[: self.constants]))
        (image,) = jaxpr_as_fun(program)(*arrays[self.constants :], v)
        return image.astype(v.dtype)


def as_linear_operator(name: str, function: Callable[..., Any], n: int, dtype: Any) -> tuple[LinearOperator, list[Any]]:
    """A function of vectors of n elements of a wide dtype, traced with the settings of the user, and its arrays.

    The arrays of a function that is a pytree, such as `jax.tree_util.Partial`, are arguments of it.
    """
    leaves, tree = jax.tree.flatten(function)
    if len(leaves) == 1 and leaves[0] is function:
        leaves = []

    def apply(leaves: Sequence[Any], v: Array) -> Any:
        return (jax.tree.unflatten(tree, leaves) if leaves else function)(v)

    with enable_x64_for(dtype):
        program, result = jax.make_jaxpr(apply, return_shape=True)(leaves, jax.ShapeDtypeStruct((n,), dtype))
    images, alone = program.out_avals, jax.tree_util.treedef_is_leaf(jax.tree.structure(result))
    if not alone or len(images) != 1 or images[0].shape != (n,) or not jnp.issubdtype(images[0].dtype, jnp.floating):
        got = ("" if alone else f"a {type(result).__name__} of ") + (", ".join(map(str, images)) or "nothing")
        raise ValueError(f"{name} gives {got} for a vector of shape {(n,)}; it must give one such vector, of floats")
    operator = LinearOperator(
        str(program.jaxpr), tuple(_values_of_program(program.jaxpr, consts=False)), program.jaxpr, len(program.consts)
    )
    return operator, [*program.consts, *leaves]


def _values_of_program(value: Any, *, consts: bool = True) -> Iterator[Hashable]:
    """The numbers of a program and its inner programs, and the identities of their arrays.

    If not `consts`, the arrays of the program itself are left out; newer versions of JAX have them in every jaxpr.
    """
    if hasattr(value, "eqns"):
        yield from map(id, getattr(value, "consts", ()) if consts else ())
        atoms = [atom for eqn in value.eqns for atom in eqn.invars]
        for atom in (*atoms, *getattr(value, "jaxpr", value).outvars):
            if isinstance(atom, Literal):
                yield id(atom.val) if np.ndim(atom.val) else np.asarray(atom.val).tobytes()
        for eqn in value.eqns:
            for param in eqn.params.values():
                yield from _values_of_program(param)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _values_of_program(item)
