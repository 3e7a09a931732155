"""Runs of a program for the statistics of its products."""
