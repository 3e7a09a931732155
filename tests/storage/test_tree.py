"""Parameters that `quantize_fn(...).pack` stores in another shape, or in stacks, as other functions take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jchop as jc
from jchop import load_checkpoint, save_checkpoint

Array = jax.Array


def convolved(params: Any, x: Array) -> Array:
    return jax.lax.conv_general_dilated(
        x, params["c.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


X = np.linspace(-1, 1, 2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3)
W = np.sin(np.arange(3 * 3 * 3 * 8, dtype=np.float32)).reshape(3, 3, 3, 8)
LOW = jc.quantize_fn(convolved, jc.Rule(weight="int4(group=8)"))


@pytest.fixture(scope="module")
def packed() -> Any:
    """Groups of 8 inputs run over the axes of the window: 27 inputs are one axis, in which 8 outputs come last."""
    params = LOW.pack({"c.weight": jnp.asarray(W)}, jnp.asarray(X))
    assert params["c.weight"].stored.shape == (27, 8) and params["c.weight"].shape == W.shape
    return params


@pytest.fixture(scope="module")
def rounded() -> np.ndarray:
    return np.asarray(jc.round_to_format(W.reshape(27, 8), "int4(group=8,axis=0)").reshape(W.shape))


def test_numbers_have_the_shape_of_the_parameter(packed: Any, rounded: np.ndarray) -> None:
    weight = packed["c.weight"]
    np.testing.assert_array_equal(jc.dequantize(packed)["c.weight"], rounded)
    np.testing.assert_array_equal(jc.dequantize(weight), rounded)
    np.testing.assert_array_equal(jc.dequantize(weight, add_to=jnp.asarray(W)), W + rounded)
    assert jc.dequantize(weight, "bfloat16").dtype == jnp.bfloat16
    held = jax.tree.map(np.asarray, weight)
    assert isinstance(jc.dequantize(held), np.ndarray)
    np.testing.assert_array_equal(np.asarray(held), rounded)
    with pytest.raises(ValueError, match=r"add_to has shape \(27, 8\), and q \(3, 3, 3, 8\)"):
        jc.dequantize(weight, add_to=jnp.ones((27, 8)))
    with pytest.raises(ValueError, match="copy=False cannot be had"):
        weight.__array__(copy=False)


def test_layouts_hold_it_in_its_own_shape_or_refuse_it(packed: Any, rounded: np.ndarray, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", packed, "plain")
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "plain")["c.weight"], rounded)
    for layout, name in (("compressed-tensors", "folder"), ("gguf", "file.gguf")):
        said = (
            r"'c.weight' of shape \[3, 3, 3, 8\] is stored in the shape \[27, 8\].*; the layouts jchop and plain hold"
        )
        with pytest.raises(ValueError, match=said):
            save_checkpoint(tmp_path / name, packed, layout)
        assert not (tmp_path / name).exists()
    jc.save(tmp_path / "own.safetensors", packed)
    again = jc.load(tmp_path / "own.safetensors", like=packed)
    np.testing.assert_array_equal(jc.dequantize(again["c.weight"]), rounded)
    save_checkpoint(tmp_path / "own", packed, "jchop")
    assert load_checkpoint(tmp_path / "own")["c.weight.stored"].shape == (27, 8)


def test_programs_that_take_it_are_exported(packed: Any) -> None:
    run = jax.jit(lambda params: params["c.weight"].dequantize().sum())
    blob = export.export(run)(packed).serialize()
    assert export.deserialize(blob).call(packed) == run(packed)
