"""Scaled elements in float32 arithmetic that is exact; for XLA, which makes few vectors of integer arithmetic."""
