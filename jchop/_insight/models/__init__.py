"""Searches over the layers of a model, and their scores."""
