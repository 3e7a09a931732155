"""Arrays stored as packed codes and scales, in memory and in files. The names of users are in `jchop`."""

from jchop._storage._array import QArray
from jchop._storage._quantize import dequantize, fit_half_quadratic, fit_scale, quantize
from jchop._storage._qwix import from_qwix, to_qwix
from jchop._storage._save import load, save

__all__ = [
    "QArray",
    "dequantize",
    "fit_half_quadratic",
    "fit_scale",
    "from_qwix",
    "load",
    "quantize",
    "save",
    "to_qwix",
]
