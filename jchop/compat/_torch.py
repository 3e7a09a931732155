"""PyTorch for the modules that need it; without it, their import names the extra that installs it."""

from jchop._common.files import require_extra

require_extra("jchop.compat for torch", "torch", ("torch",))

import torch  # noqa: E402
from torch import fx, nn  # noqa: E402

__all__ = ["fx", "nn", "torch"]
