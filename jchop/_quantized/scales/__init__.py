"""Scales that are kept: their formulas, and the observers of calibration."""
