"""What a program of the suite is: a function that somebody wrote, and operands of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Program", "equations", "floats_of", "named", "names", "normal", "positive", "unit"]


@dataclass(frozen=True)
class Program:
    """A function of JAX or of a package.

    Attributes:
        name: the module and function, and what tells it from others with that name.
        make: gives the function and its arguments; it imports the package.
        packages: those that it needs beside JAX.
        smooth: whether derivatives by the first argument are of interest.
        backward: whether the function has derivatives of reverse mode in JAX.
        twice: whether second derivatives exist in JAX.
        forward: whether the function has derivatives of forward mode in JAX.
        batched: whether JAX has rules for a batch of it.
        alone: why vmap of the function itself is not possible in JAX, if so, though it is possible after `emulate`.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    packages: tuple[str, ...] = ()
    smooth: bool = True
    twice: bool = True
    forward: bool = True
    backward: bool = True
    batched: bool = True
    alone: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)


def _draw(shape: tuple[int, ...], seed: int) -> np.random.Generator:
    return np.random.default_rng((20261123, seed, *shape))


def normal(*shape: int, seed: int = 0) -> Any:
    """Numbers of a normal distribution, in float32."""
    return jax.device_put(np.asarray(_draw(shape, seed).normal(size=shape), np.float32))


def unit(*shape: int, seed: int = 0) -> Any:
    """Numbers from 0.1 to 0.9."""
    return jax.device_put(np.asarray(_draw(shape, seed).uniform(0.1, 0.9, shape), np.float32))


def positive(n: int, seed: int = 0) -> Any:
    """A well conditioned symmetric positive definite matrix."""
    a = _draw((n, n), seed).normal(size=(n, n))
    return jax.device_put((a @ a.T / n + np.eye(n)).astype(np.float32))


def floats_of(tree: Any) -> list[Any]:
    """The arrays of a tree that have a float dtype, or the parts of complex ones."""
    found = []
    for leaf in jax.tree.leaves(tree):
        if not hasattr(leaf, "dtype"):
            continue
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            found.append(leaf)
        elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            found += [jnp.real(leaf), jnp.imag(leaf)]
    return found


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those within it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def named(programs: list[Program]) -> dict[str, Program]:
    """The programs by their names, of which none stands twice."""
    table = {program.name: program for program in programs}
    assert len(table) == len(programs), "a name stands twice"
    return table
