"""Mappings: parameters changed before they are rounded so that the function stays the same."""
