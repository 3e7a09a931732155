"""The arithmetic of any matrix product, found from its results."""

from jchop._insight.probe.probe import Probe, probe

__all__ = ["Probe", "probe"]
