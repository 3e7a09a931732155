"""NumPy arrays as tensors and back, by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import DTYPES

NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
_WORDS: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor(x: np.ndarray) -> torch.Tensor:
    """A tensor with the bits of an array of a carrier, in memory of torch's, which is aligned."""
    words = np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}").reshape(x.shape)
    return torch.from_numpy(words).clone().view(getattr(torch, x.dtype.name))


def array(x: torch.Tensor) -> np.ndarray:
    """The array with the bits of a tensor."""
    if x.is_complex():
        return x.detach().resolve_conj().numpy()
    words = x.detach().contiguous().view(_WORDS[x.element_size()]).numpy()
    return words.view(DTYPES[NAMES[x.dtype]])


def same_bits(x: torch.Tensor, expected: Any) -> bool:
    """Whether a tensor has the dtype, shape and bits of an array."""
    y = np.asarray(expected)
    return array(x).dtype == y.dtype and array(x).shape == y.shape and array(x).tobytes() == y.tobytes()
