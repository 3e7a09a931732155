"""Where scripts written for the paper import ``Chop`` from: ``from jchop.compat.pychop.chop import Chop``."""

from jchop.compat.pychop._quantizers import Chop, Customs

__all__ = ["Chop", "Customs"]
