"""A small transformer: the shares of the loss by rounding to nearest that data avoid."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from further import Further

import jchop as jc

further = Further()


@pytest.fixture
def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "perplexity.py"
    spec = importlib.util.spec_from_file_location("perplexity_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_scores(example: Any) -> None:
    """Of a narrow network that is not trained, on letters that the rounding has not seen."""
    params, rule = example.make(8, 16), jc.Rule("blocks/{q,k,v}", weight="int3(group=16)")
    seen, fresh = jax.random.randint(jax.random.key(0), (2, 16, 24), 0, 8)
    low = jc.quantize_fn(example.network, rule)
    packed = jc.quantize_fn(example.network, rule).pack(params, batches=[seen], steps=[jc.ptq.gptq()])
    plain, near, found = (
        np.asarray(jax.jit(run)(p, fresh))
        for run, p in ((example.network, params), (low, low.pack(params, seen)), (low, packed))
    )
    assert np.linalg.norm(found - plain) < 0.7 * np.linalg.norm(near - plain)


def check_perplexity(example: Any) -> None:
    """By GPTQ of weights in 4 bits, and by rotations and GPTQ of weights and activations in 4 bits.

    77 %, and 50 to 56 % by the roundings of the training, were measured; the text is of docstrings of NumPy, so other
    versions give other numbers.
    """
    given = example.trained(400, 96)
    for fmt, methods, last, low, least in (
        ("int4(group=32)", example.METHODS, "gptq", False, 0.6),
        ("int4(group=all)", example.LOW_METHODS, "rotate, gptq", True, 0.4),
    ):
        some = {name: methods[name] for name in ("nearest", last)}
        table = example.run(*given, (fmt,), some, low)
        assert example.closed(table, fmt, last) > least
        assert table["float32"]["nearest"] < table[fmt][last] < table[fmt]["nearest"]


@further.first
@pytest.mark.parametrize("check", [check_scores, pytest.param(check_perplexity, marks=pytest.mark.slow)])
def much_of_the_loss_is_avoided(check: Any, example: Any) -> None:
    check(example)


test_further = further.test()
