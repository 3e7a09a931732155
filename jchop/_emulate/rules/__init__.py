"""Emulated arithmetic: the rule of each primitive, and the runs of a program under these rules."""
