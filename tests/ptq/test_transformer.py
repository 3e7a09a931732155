"""Perplexity of a small transformer: the shares of the loss by rounding to nearest that data avoid."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_half_of_the_loss_is_avoided() -> None:
    """By GPTQ of weights in 4 bits, and by rotations and GPTQ of weights and activations in 4 bits.

    77 % and 56 % were measured; the text is of docstrings of NumPy, so other versions give other numbers.
    """
    path = Path(__file__).parents[2] / "examples" / "perplexity.py"
    spec = importlib.util.spec_from_file_location("perplexity_example", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    given = example.trained(400, 96)
    for fmt, methods, last, low in (
        ("int4(group=32)", example.METHODS, "gptq", False),
        ("int4(group=all)", example.LOW_METHODS, "rotate, gptq", True),
    ):
        some = {name: methods[name] for name in ("nearest", last)}
        table = example.run(*given, (fmt,), some, low)
        assert example.closed(table, fmt, last) > 0.5
        assert table["float32"]["nearest"] < table[fmt][last] < table[fmt]["nearest"]
