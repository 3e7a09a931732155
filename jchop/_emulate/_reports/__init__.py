"""An emulated program beside a reference, and the reports of it."""
