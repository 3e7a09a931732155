"""The module from which scripts for the paper import ``Chop``: ``from jchop.compat.pychop.chop import Chop``."""

from jchop.compat.pychop._quantizers import Chop, Customs

__all__ = ["Chop", "Customs"]
