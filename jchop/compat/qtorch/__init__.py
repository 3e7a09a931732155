"""QPyTorch's names (arXiv 1910.04540) for torch; its functions take NumPy and JAX arrays too.

``from jchop.compat.qtorch.quant import float_quantize`` in place of ``from qtorch.quant import float_quantize``, and so
on: `quant`, `optim` and `auto_low` are modules of this one. What differs from QPyTorch:

* Every result is the exact value rounded once. QPyTorch rounds twice below the smallest normal number, changes the sign
  under ``FloatingPoint(8, 23)``, moves large odd integers in fixed point, and blocks beyond 2^126.
* NaN stays NaN (QPyTorch: the largest value, or 0), and -0 stays -0 in formats that have it.
* Ties of ``"nearest"`` go away from zero in floating point, as in QPyTorch; to even in fixed point, as on its CPU (its
  CUDA goes away from zero); away from zero in blocks, where QPyTorch goes up.
* Random bits of tensors come from torch's own generator, or the ``generator=`` or ``seed=`` that is passed, so that
  ``torch.manual_seed`` governs them; NumPy and JAX arrays need ``key=``. Numbers far below the smallest one round up as
  often as they should.
* Fixed point may have no fraction bits, and half, bfloat16 and double tensors are taken.
* The functions pass gradients straight through, where QPyTorch's have none. ``backward_hooks`` run with and without
  ``clamping_grad_zero``, which holds without ``backward_number`` too.
* ``OptimLP`` is `jchop.torch.OptimLP`: any optimizer of torch, with ``closure``, its state in ``state_dict``, and
  gradients scaled whether they are rounded or not. Its quantizers are those that ``quantizer`` makes.
* ``sequential_lower`` and ``lower`` round the output of layers where they stand: names of parameters stay, and GELU,
  SiLU and MultiheadAttention are activations and linear layers. A type of layers that the model does not have is an
  error.
"""

from jchop.compat.qtorch._numbers import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number"]
