"""Seeds and generators of torch as keys: the words that operators draw from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jchop._checks import check_int

__all__ = ["drawn_words", "key_words", "seed_words"]

Tensor = torch.Tensor


def key_words(numbers: Sequence[int]) -> Tensor:
    """Words of 32 bits as the int32 tensor that holds their bits."""
    return torch.tensor([number - (1 << 32) if number >> 31 else number for number in numbers], dtype=torch.int32)


def seed_words(seed: int, *folded: int, name: str = "seed") -> Tensor:
    """The words of ``jax.random.key(seed)``, with numbers folded in."""
    seed = check_int(name, seed, 0, (1 << 64) - 1)
    return key_words((seed >> 32, seed & 0xFFFF_FFFF, *folded))


def drawn_words(
    spec: str, draws: bool, seed: int | None, generator: torch.Generator | None, name: str = "seed"
) -> Tensor:
    """The words of one rounding; none where the spec draws nothing.

    Raises:
        TypeError, ValueError: for a seed that is none, or where there is nothing to draw from.
    """
    if seed is not None and generator is not None:
        raise ValueError(f"{name}={seed!r} and generator= are given; give one of them")
    if not draws:
        return key_words(())
    if seed is not None:
        return seed_words(seed, name=name)
    if generator is None:
        raise ValueError(f"spec={spec!r} rounds stochastically: pass {name}=, an integer, or generator=")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator={generator!r} must be a torch.Generator")
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, generator=generator, device=generator.device)
