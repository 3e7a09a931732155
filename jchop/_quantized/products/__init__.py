"""Sums of products of codes: of convolutions, of experts, of weights alone."""
