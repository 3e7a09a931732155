"""Words of keys for operators, from seeds and generators of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jchop._common.checks import check_int

__all__ = ["generator_words", "key_words", "rounding_words", "words_of_seed"]

Tensor = torch.Tensor


def key_words(numbers: Sequence[int]) -> Tensor:
    """Words of 32 bits as an int32 tensor of the same bits."""
    return torch.tensor([number - (1 << 32) if number >> 31 else number for number in numbers], dtype=torch.int32)


def words_of_seed(seed: int, *fold_ins: int, name: str = "seed") -> Tensor:
    """The words of ``jax.random.key(seed)``, with numbers folded in."""
    seed = check_int(name, seed, 0, (1 << 64) - 1)
    return key_words((seed >> 32, seed & 0xFFFF_FFFF, *fold_ins))


def rounding_words(
    spec: str, draws: bool, seed: int | None, generator: torch.Generator | None, name: str = "seed"
) -> Tensor:
    """The words of one rounding; none if the spec is not stochastic.

    Raises:
        TypeError, ValueError: for an invalid seed, or if neither seed nor generator is given.
    """
    if seed is not None and generator is not None:
        raise ValueError(f"{name}={seed!r} and generator= are given; pass one of them")
    if not draws:
        return key_words(())
    if seed is not None:
        return words_of_seed(seed, name=name)
    if generator is None:
        raise ValueError(f"spec={spec!r} rounds stochastically: pass {name}=, an integer, or generator=")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator={generator!r} must be a torch.Generator")
    return generator_words(generator)


def generator_words(generator: torch.Generator | None = None) -> Tensor:
    """The words of a key, from a generator; None: torch's global one of the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, generator=generator, device=device)
