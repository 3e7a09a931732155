"""Checkpoints of other programs: a row for each way to store a weight, and files and folders of such weights."""
