"""QPyTorch's names (arXiv 1910.04540) for torch; the functions also take NumPy and JAX arrays.

``from jchop.compat.qtorch.quant import float_quantize`` replaces ``from qtorch.quant import float_quantize``; the
submodules are `quant`, `optim` and `auto_low`. Differences from QPyTorch:

* Every result is the exact value rounded once. QPyTorch rounds twice below the smallest normal number, changes the sign
  under ``FloatingPoint(8, 23)``, moves large odd integers in fixed point, and blocks beyond 2^126.
* NaN stays NaN (QPyTorch: the largest value, or 0), and -0 stays -0 in formats that have it.
* Large numbers and infinities saturate also with 8 bits of the exponent (QPyTorch: infinity).
* Ties of ``"nearest"`` go away from zero in floating point, as in QPyTorch; to even in fixed point, as on its CPU (its
  CUDA goes away from zero); away from zero in blocks (QPyTorch: up).
* Random bits of tensors come from torch's global generator, so that ``torch.manual_seed`` determines them, or from
  ``generator=`` or ``seed=``; NumPy and JAX arrays need ``key=``. Numbers far below the smallest one round up with the
  right probability.
* ``FixedPoint`` and ``FloatingPoint`` may have no fraction bits, and half, bfloat16 and double tensors are allowed.
* The functions pass gradients straight through (QPyTorch's have no gradients). ``backward_hooks`` run with and without
  ``clamping_grad_zero``, which also works without ``backward_number``.
* ``OptimLP`` is `jchop.torch.OptimLP`: any optimizer of torch, with ``closure``, and its state in ``state_dict``. Its
  quantizers must be results of ``quantizer``.
* ``sequential_lower`` and ``lower`` round the output of layers in place: names of parameters do not change. GELU and
  SiLU count as activations, MultiheadAttention as a linear layer. A type of layers that the model does not have is an
  error.
"""

from jchop.compat.qtorch._numbers import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number"]
