"""Scales of activations that are state or parameters."""
