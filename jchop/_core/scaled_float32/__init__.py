"""Scaled elements in exact float32 arithmetic; for XLA, which makes few vectors of integer arithmetic, and for GPUs."""
