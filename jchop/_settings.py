"""JAX settings that a user chooses for a program, and that jchop's own functions do not follow.

``jax_disable_jit``, ``jax_numpy_dtype_promotion``, ``jax_numpy_rank_promotion`` and ``jax_threefry_partitionable``
change the meaning of a line of code. The lines of jchop are written for the defaults, and are traced under those.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """JAX's defaults for compilation and promotion; for code of jchop that calls no function of the user."""
    with jax.disable_jit(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a function of jchop: compiled under ``jax_disable_jit`` too, as JAX's own primitives are.

    Op by op its results could differ, since XLA contracts products and sums. And a primitive that compiles itself when
    it is called would call itself for ever.

    Args:
        function: traced under `own_settings`; it calls no function of the user.
        options: of `jax.jit`.

    Example:
        >>> with jax.disable_jit():
        ...     int(compiled(lambda x: x + 1)(1))
        2
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # JAX traces it with the flag off. With the flag on, it calls it with the arguments themselves.
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with jax.disable_jit(False):
                return jitted(*args, **kwargs)
        with own_settings():
            return function(*args, **kwargs)

    jitted = jax.jit(call, **options)
    return jitted


def split(key: jax.Array, count: int = 2) -> jax.Array:
    """`jax.random.split`, with the same keys whatever ``jax_threefry_partitionable`` says.

    Args:
        key: a typed key.
        count: how many keys. Default 2.

    Example:
        >>> with jax.threefry_partitionable(False):
        ...     keys = split(jax.random.key(0))
        >>> bool((keys == jax.random.split(jax.random.key(0))).all())
        True
    """
    with jax.threefry_partitionable(True):
        return jax.random.split(key, count)
