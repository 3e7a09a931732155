"""Sums of products: the orders of sums, the exact sums of tensor cores, chains of operations."""
