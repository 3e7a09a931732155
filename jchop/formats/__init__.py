"""Which values exist: number formats as frozen, hashable values that know nothing of JAX."""

from jchop.formats import _catalogue
from jchop.formats._base import ElementFormat
from jchop.formats._binary import FixedFormat, FloatFormat, IntegerFormat, UniformFormat
from jchop.formats._catalogue import *  # noqa: F403
from jchop.formats._catalogue import ALIASES, CATALOGUE
from jchop.formats._codebook import CodebookFormat
from jchop.formats._tapered import HiFloat8Format, LogTakumFormat, PositFormat, StringFormat, TakumFormat, TaperedFormat
from jchop.formats.scaled import catalogue as _scaled_catalogue
from jchop.formats.scaled.catalogue import *  # noqa: F403
from jchop.formats.scaled.scale_rules import SCALE_RULES
from jchop.formats.scaled.scaled import SCALED_CATALOGUE, ScaledFormat, bfp, parse_format

__all__ = ["ALIASES", "CATALOGUE", "SCALED_CATALOGUE", "SCALE_RULES", "CodebookFormat", "ElementFormat", "FixedFormat"]
__all__ += ["FloatFormat", "HiFloat8Format", "IntegerFormat", "LogTakumFormat", "PositFormat", "ScaledFormat"]
__all__ += ["StringFormat", "TakumFormat", "TaperedFormat", "UniformFormat", "bfp", "parse_format"]
__all__ += _catalogue.__all__
__all__ += _scaled_catalogue.__all__
