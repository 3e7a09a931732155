"""`tune`: the cheapest formats for the operations of a program within a tolerance."""

from jchop._insight.tune._tune import TunedSite, Tuning, TuningPoint, tune

__all__ = ["TunedSite", "Tuning", "TuningPoint", "tune"]
