"""The module from which scripts for the paper import ``LightChop``."""

from jchop.compat.pychop._quantizers import Chop

LightChop = Chop

__all__ = ["LightChop"]
