"""JAX settings of a user's program that jchop's functions ignore.

``jax_disable_jit``, ``jax_numpy_dtype_promotion``, ``jax_numpy_rank_promotion`` and ``jax_threefry_partitionable``
change the meaning of code. jchop is written for the defaults, and is traced under them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.backend import get_backend, get_compile_options


@functools.lru_cache(maxsize=1)
def has_fast_math() -> bool:
    """Whether XLA's flags let it compute sums and products in another order on the CPU."""
    get_backend()  # reads the flags when it is first asked for
    options = get_compile_options(num_replicas=1, num_partitions=1).executable_build_options.debug_options
    return options.xla_cpu_enable_fast_math


@contextlib.contextmanager
def jax_default_settings() -> Iterator[None]:
    """A context with JAX's defaults for compilation and promotion, for code that calls no function of the user.

    Raises:
        RuntimeError: under a flag of XLA that changes arithmetic.
    """
    if has_fast_math():
        raise RuntimeError(
            "XLA_FLAGS: --xla_cpu_enable_fast_math=true lets XLA cancel the arithmetic of roundings, and jchop's "
            "numbers would be wrong; leave the flag out"
        )
    with jax.disable_jit(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def always_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a function of jchop, compiled also under ``jax_disable_jit``, like JAX's own primitives.

    Results of separate operations could differ, since XLA contracts products and sums. A primitive that compiles itself
    when it is called would recurse without end.

    Args:
        function: traced under `jax_default_settings`; it calls no function of the user.
        options: of `jax.jit`.

    Example:
        >>> with jax.disable_jit():
        ...     int(always_jit(lambda x: x + 1)(1))
        2
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # JAX traces the function with the flag off. With the flag on, it calls it with the arguments themselves.
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with jax.disable_jit(False):
                return jit_call(*args, **kwargs)
        with jax_default_settings():
            return function(*args, **kwargs)

    jit_call = jax.jit(call, **options)
    return jit_call


def split_prng_key(key: jax.Array, count: int = 2) -> jax.Array:
    """`jax.random.split`, with the same keys for every value of ``jax_threefry_partitionable``.

    Args:
        key: a typed key.
        count: number of keys. Default 2.

    Example:
        >>> with jax.threefry_partitionable(False):
        ...     keys = split_prng_key(jax.random.key(0))
        >>> bool((keys == jax.random.split(jax.random.key(0))).all())
        True
    """
    with jax.threefry_partitionable(True):
        return jax.random.split(key, count)
