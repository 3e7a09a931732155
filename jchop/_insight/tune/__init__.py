"""`tune`: the cheapest formats for the operations of a program within a tolerance."""

from jchop._insight.tune._result import TunedSite, Tuning, TuningPoint
from jchop._insight.tune._tune import tune

__all__ = ["TunedSite", "Tuning", "TuningPoint", "tune"]
