"""An emulated program beside a reference, and reports about it."""
