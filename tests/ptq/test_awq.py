"""AWQ: the search against NumPy on the data themselves, gains on fresh data, and turns of a loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from tests.ptq.test_fold import rms
from tests.ptq.test_quantize import decibels, outliers
from tests.ptq.test_smooth import arrays, mapped, scaled

further = Further()

RULE = jc.Rule(weight="int3(group=4)")


def searched(x: np.ndarray, weights: list[np.ndarray], duo: bool, group: int, points: int = 20) -> tuple[Any, Any]:
    """The factors with the least error of the outputs on the data, by the definition; and the exponent."""
    size = np.abs(x).mean(0)
    best: Any = (np.inf, None, None)
    for ratio in [None, *(i / points for i in range(points))]:
        if ratio is None:
            s = np.ones(len(size))
        elif duo:
            per = [np.abs(w).reshape(-1, group, w.shape[1]) for w in weights]
            units = [(v / v.max(1, keepdims=True)).reshape(len(size), -1) for v in per]
            s = size**ratio / (np.mean([u.mean(1) for u in units], 0) ** (1 - ratio) + 1e-4)
        else:
            s = size**ratio
        s = s / np.sqrt(s.max() * s.min())
        error = 0.0
        for w in weights:
            low = jc.round_to_format(jnp.asarray(w * s[:, None], jnp.float32), f"int3(group={group},axis=-2)")
            error += (((x / s) @ np.asarray(low, np.float64) - x @ w) ** 2).sum()
        best = min(best, (error, ratio, s), key=lambda v: v[0])
    return best[2], best[1]


@pytest.mark.parametrize("duo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_search_is_that_over_outputs(duo: bool) -> None:
    def fun(p: Any, x: Any) -> Any:
        y = x * p["scale"]
        return (y @ p["a"]) * jax.nn.silu(y @ p["b"])

    params = arrays({"scale": (8,), "a": (8, 6), "b": (8, 6)})
    x = arrays({"x": (40, 8)}, 1)["x"].at[:, 3].multiply(20)
    found, notes = mapped(fun, params, [x[:10], x[10:]], jc.ptq.awq(duo=duo), rule=RULE)
    wide = {name: np.asarray(v, np.float64) for name, v in params.items()}
    s, ratio = searched(np.asarray(x, np.float64) * wide["scale"], [wide["a"], wide["b"]], duo, 4)
    assert ratio and f"r={ratio:g}" in notes.note(1, ())
    np.testing.assert_allclose(found["scale"], wide["scale"] / s, rtol=1e-4)
    for name in "ab":
        np.testing.assert_allclose(found[name], wide[name] * s[:, None], rtol=1e-4)


@further
@pytest.mark.parametrize("duo, least", [(False, 20.46), pytest.param(True, 20.57, marks=pytest.mark.slow)])
def gains_on_fresh_data(duo: bool, least: float) -> None:
    params, x, fresh = outliers()
    params |= {"scale": jnp.ones(256)}
    rule = jc.Rule(weight="int4(group=128)")
    packed, report = jc.quantize_fn(scaled, rule).pack(
        params, batches=[x], steps=jc.ptq.awq(duo=duo), return_report=True
    )
    y = scaled(params, fresh)
    assert decibels(y, jc.quantize_fn(scaled, rule)(packed, fresh) - y) > least
    (row,) = report.weights
    assert row.method == "awq" and row.after > row.before + 1.9


@pytest.mark.parametrize(
    "text, steps",
    [
        ("mxfp4(rule=rceil)", [jc.ptq.awq(5)]),
        pytest.param("uint4(group=32,zero_point=integer)", [jc.ptq.awq(5, duo=False)], marks=pytest.mark.slow),
        pytest.param("nvfp4", [jc.ptq.awq(5, duo=False), jc.ptq.awq(5)], marks=pytest.mark.slow),
    ],
)
def test_no_format_loses_on_the_data(text: str, steps: Any) -> None:
    params, x, _ = outliers()
    params |= {"scale": jnp.ones(256)}
    for step in steps:
        _, report = jc.quantize_fn(scaled, jc.Rule(weight=text)).pack(
            params, batches=[x], steps=step, return_report=True
        )
        assert report.weights[0].after > report.weights[0].before


@further
def each_turn_has_an_exponent_of_its_own() -> None:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(rms(h, w["scale"]) @ w["a"]), None

    def unrolled(p: Any, x: Any) -> Any:
        for w in p:
            x, _ = layer(x, w)
        return x

    params = arrays({"scale": (3, 8), "a": (3, 8, 8)})
    x = arrays({"x": (40, 8)}, 1)["x"].at[:, 3].multiply(20)
    found, notes = mapped(lambda p, x: lax.scan(layer, x, p)[0], params, [x], jc.ptq.awq(), rule=RULE)
    apart = [{name: v[i] for name, v in params.items()} for i in range(3)]
    each, own = mapped(unrolled, apart, [x], jc.ptq.awq(), rule=RULE)
    for i in range(3):
        for name in params:
            np.testing.assert_allclose(found[name][i], each[i][name], rtol=1e-4)
        assert notes.note(0, (i,)) == f"awq folded into scale; {own.note(2 * i, ()).partition('; ')[2]}"


@further
def experts_have_factors_of_their_own() -> None:
    def fun(p: Any, x: Any) -> Any:
        h = jax.nn.relu(jnp.einsum("tk,ekn->etn", x, p["a"]))
        return jnp.einsum("etn,enk->tk", h, p["b"])

    params = arrays({"a": (2, 6, 8), "b": (2, 8, 5)})
    params["a"] = params["a"].at[0, :, 2].multiply(20).at[1, :, 5].multiply(30)
    x = arrays({"x": (40, 6)}, 1)["x"]
    found, _ = mapped(fun, params, [x], jc.ptq.smooth())
    h = np.maximum(np.einsum("tk,ekn->etn", np.asarray(x, np.float64), np.asarray(params["a"], np.float64)), 0)
    s = np.sqrt(h.max(1) / np.abs(np.asarray(params["b"], np.float64)).max(2))
    np.testing.assert_allclose(found["b"], params["b"] * s[:, :, None], rtol=1e-5)
    np.testing.assert_allclose(found["a"], params["a"] / s[:, None, :], rtol=1e-5)


@further.first
def bad_arguments() -> None:
    with pytest.raises(ValueError, match="points=0 must be"):
        jc.ptq.awq(0)
    with pytest.raises(TypeError, match="duo=1 must be True or False"):
        jc.ptq.awq(duo=1)  # type: ignore[arg-type]


test_further = further.test()
