"""`sensitivity` against models whose weights are rounded by hand, one layer at a time."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from layer_references import checked, each

import jchop as jc

further = Further()

X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
FORMATS = ("e4m3fn", "integer8:saturate", "int4(channel=1)")


def model() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 8, rngs=nnx.Rngs(1)))


def by_hand(rounded: tuple[int, ...], fmt: str) -> float:
    """Decibels of the output, the network written out, with the weights of some layers rounded."""
    layers = [model().layers[i] for i in (0, 2)]
    weights = [(np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])) for layer in layers]

    def run(weights: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        hidden = np.maximum(X @ weights[0][0] + weights[0][1], 0)
        return (hidden @ weights[1][0] + weights[1][1]).astype(np.float64)

    low = [(np.asarray(jc.round_to_format(w, fmt)) if i in rounded else w, b) for i, (w, b) in enumerate(weights)]
    y, z = run(weights), run(low)
    return 10 * math.log10((y**2).sum() / ((y - z) ** 2).sum())


@pytest.fixture(scope="module")
def found() -> jc.nn.Sensitivity:
    return jc.nn.sensitivity(model(), ["e4m3fn", "integer8:saturate", "int4(group=all)"], [X[:8], X[8:]])


@further
def each_row_is_the_ratio_of_one_rounded_layer(found: jc.nn.Sensitivity) -> None:
    assert [(row.path, row.layer) for row in found.rows[::3]] == [
        ("layers/0", "Linear"),
        ("layers/2", "Linear"),
        ("all", ""),
    ]
    for rows, rounded in zip((found.rows[:3], found.rows[3:6], found.rows[6:]), ((0,), (1,), (0, 1)), strict=True):
        for row, fmt in zip(rows, FORMATS, strict=True):
            if fmt != "integer8:saturate":  # weights below 1/2 become zero in an integer: only the bias is left
                assert row.snr == pytest.approx(by_hand(rounded, fmt), abs=0.05), (row, fmt)
    assert found.rows[2].snr < found.rows[0].snr


@further.first
def it_is_a_table_a_dict_and_a_picture(found: jc.nn.Sensitivity) -> None:
    lines = str(found).splitlines()
    assert lines[0].split() == ["path", "layer", "float8_e4m3fn", "integer8:saturate", "int4(group=all)"]
    read = json.loads(found.to_json())
    assert read["rows"][0] == {
        "path": "layers/0",
        "layer": "Linear",
        "format": "float8_e4m3fn",
        "snr": found.rows[0].snr,
    }
    lines_drawn = found.plot().axes[0].lines
    assert [float(x) for x in lines_drawn[0].get_xdata()] == [row.snr for row in found.rows[::3]]


def what_is_exact_or_lost_is_said() -> None:
    same = jc.nn.sensitivity(model(), ["binary32", "e5m2"], [X], tensors=("activation",))
    assert same.rows[0].snr == math.inf and "exact" in str(same)
    assert json.loads(same.to_json())["rows"][0]["snr"] == "inf"
    big = [jnp.asarray(X) * 1e4]
    lost = jc.nn.sensitivity(model(), ["e4m3fn"], big, tensors=("activation", "weight"))
    assert lost.rows[0].snr == -math.inf and "lost" in str(lost)


@further
def the_last_row_is_the_model_under_one_rule_which_leaves_norms() -> None:
    norm: Any = nnx.RMSNorm(8, rngs=nnx.Rngs(2))
    whole = nnx.Sequential(norm, nnx.Linear(8, 8, rngs=nnx.Rngs(3)))
    norm.scale[...] = jnp.exp(jax.random.normal(jax.random.key(5), (8,)))
    x = jax.random.normal(jax.random.key(4), (16, 8))
    found = jc.nn.sensitivity(whole, "int4(group=all)", [x])
    y, z = whole(x), jc.nn.quantize(whole, jc.Rule(weight="int4(group=all)"))(x)
    wanted = 10 * math.log10(float((y**2).sum() / ((y - z) ** 2).sum()))
    rows = {row.path: row.snr for row in found.rows}
    assert rows["all"] == pytest.approx(wanted, abs=0.01) == rows["layers/1"]
    assert rows["layers/0"] < 30


def one_format_is_a_list_of_it() -> None:
    one = jc.nn.sensitivity(model(), "e5m2", [X])
    assert one.formats == ("float8_e5m2",) and one == jc.nn.sensitivity(model(), ["e5m2"], [X])


@pytest.mark.parametrize(
    "check",
    [one_format_is_a_list_of_it, pytest.param(what_is_exact_or_lost_is_said, marks=pytest.mark.slow)],
    ids=lambda check: check.__name__,
)
def test_other_formats(check: Any, request: Any) -> None:
    """A case for each of these checks; the first runs by default."""
    checked(check, request)


@each(
    ("given", "error", "said"),
    [
        ({"batches": []}, ValueError, "batches: there must be at least one"),
        ({"formats": []}, ValueError, "formats: there must be at least one"),
        ({"tensors": ("bias",)}, ValueError, "tensors='bias' must be one of 'weight', 'activation'"),
        ({"model": nnx.Sequential(nnx.relu)}, ValueError, "model: there must be at least one layer to round"),
        ({"model": 3}, TypeError, "model=3 must be a module"),
        ({"batches": [X * np.nan]}, ValueError, "an output of the model is not finite"),
    ],
)
def test_bad_arguments_are_named(given: dict, error: type[Exception], said: str) -> None:
    arguments = {"model": model(), "batches": [X], "formats": ["e4m3fn"]} | given
    with pytest.raises(error, match=said):
        jc.nn.sensitivity(**arguments)


test_further = further.test()
