"""Scales of clipped groups: the search against NumPy, groups of every shape, gains on fresh data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from tests.ptq.test_quantize import decibels, dense, outliers

further = Further()


def problem(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, inputs)) @ rng.normal(size=(inputs, inputs))
    return rng.standard_t(4, size=(inputs, outputs)).astype(np.float32), x.astype(np.float32)


def searched(w: np.ndarray, gram: np.ndarray, groups: np.ndarray, points: int, least: float) -> tuple[Any, Any]:
    """Scales and codes of int4 by the definition: the shares of the range of each group one by one.

    Args:
        w: the weight, (inputs, outputs).
        gram: the mean of x x^T.
        groups: the number of the group of each element.
        points: how many shares below 1.
        least: the smallest.
    """
    scale, codes = np.zeros(groups.max() + 1), np.zeros_like(w)
    for number in range(groups.max() + 1):
        own, best = groups == number, np.inf
        for i in range(points + 1):
            share = 1 - i * (1 - least) / points
            step = np.float64(np.float32(np.abs(np.clip(w[own], share * w[own].min(), share * w[own].max())).max() / 7))
            made = np.clip(np.rint(w / step), -8, 7)
            error = np.where(own, w - made * step, 0).astype(np.float64)
            loss = np.einsum("in,ij,jn->", error, gram, error)
            if loss < best * (1 - 1e-6):
                best, scale[number] = loss, step
                codes[own] = made[own]
    return scale, codes


def numbered(shape: tuple[int, ...], group: tuple[int, ...]) -> np.ndarray:
    counts = [-(-n // g) for n, g in zip(shape, group, strict=True)]
    return np.asarray(np.ravel_multi_index([i // g for i, g in zip(np.indices(shape), group, strict=True)], counts))


SHAPES: dict[str, tuple[str, tuple[int, int]]] = {
    "groups, the last one shorter": ("int4(group=8)", (8, 1)),
    "whole columns": ("int4(group=all)", (20, 1)),
    "tiles": ("int4(group=(5,3))", (3, 5)),
}


@further
@pytest.mark.in_turn(9)
@pytest.mark.parametrize("name", SHAPES)
def each_group_takes_the_best_share(name: str) -> None:
    text, group = SHAPES[name]
    w, x = problem(20, 6)
    rule, gram = jc.Rule(weight=text), (x.T.astype(np.float64) @ x) / len(x)
    packed, report = jc.quantize_fn(dense, rule).pack(
        {"w": jnp.asarray(w)}, batches=[x], steps=jc.ptq.clip(10, least=0.4), return_report=True
    )
    groups = numbered(w.shape, group)
    scale, codes = searched(w, gram, groups, 10, 0.4)
    found = np.asarray(packed["w"].scale, np.float64).reshape(-1)
    np.testing.assert_allclose(found, scale, rtol=1e-6)
    np.testing.assert_allclose(jc.dequantize(packed["w"]), codes * scale[groups], rtol=1e-5)
    plain = np.asarray(jc.quantize(jnp.asarray(w), packed["w"].spec).scale, np.float64).reshape(-1)
    assert (scale < 0.99 * plain).mean() > 0.1 and report.weights[0].after > report.weights[0].before


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_groups_across_the_axes_of_a_product(every: bool) -> None:
    """Groups of 6 over (summed, kept) axes of 4 and 8: columns are cut in different ways; experts share no inputs."""

    def fun(p: Any, x: Any) -> Any:
        return jnp.einsum("tij,ikj->tk", x.reshape(-1, 4, 8), p["w"])

    def laid(p: Any, x: Any) -> Any:
        return x @ p["w"].transpose(0, 2, 1).reshape(32, 3)

    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.standard_t(4, size=(4, 3, 8)), jnp.float32), problem(32, 1)[1]
    for text in ("int4(group=6)", "int4(group=8)")[: 1 + every]:
        packed = jc.quantize_fn(fun, jc.Rule(weight=text)).pack({"w": w}, batches=[x], steps=jc.ptq.clip())
        y, low = fun({"w": w}, x), jc.quantize_fn(fun, jc.Rule(weight=text))
        assert decibels(y, low(packed, x) - y) > decibels(y, low({"w": w}, x) - y) + 0.5

    if not every:
        return

    def experts(p: Any, x: Any) -> Any:
        return jnp.einsum("etk,ekn->etn", x, p["w"])

    v, z = problem(20, 12)
    rule, pair = jc.Rule(weight="int4(group=5)"), jnp.stack([v[:, :6], v[:, 6:]])
    both = jc.quantize_fn(experts, rule).pack({"w": pair}, batches=[jnp.stack([z, z[:, ::-1]])], steps=jc.ptq.clip())
    for i, own in enumerate((z, z[:, ::-1])):
        one = jc.quantize_fn(dense, rule).pack({"w": pair[i]}, batches=[own], steps=jc.ptq.clip())
        np.testing.assert_array_equal(both["w"].scale[i], one["w"].scale)


FORMATS = ["int4(group=128)", "uint4(group=32,zero_point=integer)", "nvfp4", "int4(group=16,scale=uint8(group=2))"]


@further
@pytest.mark.in_turn(30)
@pytest.mark.parametrize("text", FORMATS)
def gains_on_fresh_data(text: str) -> None:
    """With nothing after it, and before the sweep."""
    params, x, fresh = outliers()
    y, rule, found = dense(params, fresh), jc.Rule(weight=text), []
    for steps in ([], [jc.ptq.clip()], [jc.ptq.gptq()], [jc.ptq.clip(), jc.ptq.gptq()]):
        packed, report = jc.quantize_fn(dense, rule).pack(params, batches=[x], steps=steps, return_report=True)
        found.append(decibels(y, jc.quantize_fn(dense, rule)(packed, fresh) - y))
    nearest, clipped, swept, both = found
    assert clipped > nearest + 2 and both > swept + 1
    assert report.weights[0].method == "clip, gptq"


#: Powers of two, stochastic rounding and sparsity: what the steps gain at least.
OTHERS: list[tuple[Any, list[Any], float]] = [
    ("mxfp4(rule=rceil)", [jc.ptq.clip()], 0.2),
    (jc.Spec(jc.formats.int4(group=32), rounding="stochastic"), [jc.ptq.clip()], 1.0),
    ("int4(group=32)", [jc.ptq.sparse(2, 4, by="inputs"), jc.ptq.clip(), jc.ptq.sign_round(20)], -np.inf),
    ("float8_e5m2", [jc.ptq.clip(2)], 0.0),  # no scales: nothing changes
]


@pytest.mark.parametrize(
    "text, steps, gain", [OTHERS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHERS[1:])], ids=str
)
def test_powers_of_two_stochastic_rounding_and_sparsity(text: Any, steps: Any, gain: float) -> None:
    params, x, _ = outliers()
    packed, report = jc.quantize_fn(dense, jc.Rule(weight=text)).pack(
        params, batches=[x], steps=steps, key=jax.random.key(0), return_report=True
    )
    (row,) = report.weights
    assert row.after > row.before + gain if gain else row.after == row.before
    if len(steps) > 1:
        groups = np.asarray(jc.dequantize(packed["w"])).reshape(64, 4, 128)
        assert int((groups != 0).sum(1).max()) == 2 and row.sparsity >= 0.5


@further.first
def bad_arguments() -> None:
    with pytest.raises(ValueError, match="points=0 must be"):
        jc.ptq.clip(0)
    for least in (0, 1):
        with pytest.raises(ValueError, match=f"least={least} must be a finite number > 0 and < 1"):
            jc.ptq.clip(least=least)
    with pytest.raises(TypeError, match="least='a' must be"):
        jc.ptq.clip(least="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="then one sparse, then one clip or hqq, then one gptq"):
        jc.quantize_fn(dense, jc.Rule(weight="int4")).pack(
            {}, batches=[], steps=[jc.ptq.gptq(), jc.ptq.clip()], return_report=True
        )


test_further = further.test()
