"""Mappings: parameters changed before they are rounded so that the function stays what it is."""
