"""The random words of a function of `jchop.math`: those of `emulate`, by the number of the draw."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop as jc
from jchop._core.matmul.operations import fold_seeds, operation_words
from jchop._core.rounding.random_bits import seed_words
from jchop._emulate.rules.run_task import round_value


def result_words(key: jax.Array, shape: tuple[int, ...], number: int) -> np.ndarray:
    """The words of the draw of an operation; that of a single operation has the number of its operands."""
    return np.asarray(operation_words(fold_seeds(seed_words(key), 1), jnp.zeros(shape, jnp.float32), number))


def rounded_operand(x: Any, text: str, key: jax.Array, place: int) -> np.ndarray:
    """The operand at a place, rounded."""
    array = jnp.asarray(x)
    words = operation_words(fold_seeds(seed_words(key), 0), array, place)
    return np.asarray(round_value(array, jc.Spec(text), words))
