"""Where scripts written for the paper import ``LightChop`` from."""

from jchop.compat.pychop._quantizers import Chop

LightChop = Chop

__all__ = ["LightChop"]
