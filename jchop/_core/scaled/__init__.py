"""Groups that share a scale: the groups, their scales, elements and zero points."""
