"""An emulated program beside a reference."""
