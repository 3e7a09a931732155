"""Models that are pytrees: modules of Equinox under rules (`modules.py`), and LoRA of parameters of any function."""
