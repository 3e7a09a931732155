"""SignRound against all choices of neighbours, the neighbours of formats against their values."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from jchop.ptq._steps.round import element_scales, neighbours, sign_descent

further = Further()


def test_small_matrices_are_close_to_the_best_choice() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)) @ rng.normal(size=(8, 8))
    w, gram = rng.normal(size=(8, 40)), x.T @ x / 256
    below, above = np.floor(w), np.ceil(w)
    up, loss = map(
        np.asarray, sign_descent(*map(_single, (w, gram, below, above)), iterations=200, rate=0.5, momentum=0.9)
    )
    choices = np.array(list(itertools.product((False, True), repeat=8)))

    def error(rounded: np.ndarray) -> np.ndarray:
        return np.einsum("...k,kl,...l->...", w.T - rounded, gram, w.T - rounded)

    every = np.stack([error(np.where(choice[:, None], above, below).T) for choice in choices])
    best, nearest, found = every.min(0), error(np.rint(w).T), error(np.where(up, above, below).T)
    np.testing.assert_allclose(loss, found, rtol=1e-4)
    assert (found <= nearest * (1 + 1e-5)).all() and found.sum() < 0.5 * nearest.sum()
    assert found.sum() < 1.25 * best.sum()


def _single(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def test_independent_inputs_are_rounded_to_nearest() -> None:
    rng = np.random.default_rng(1)
    w, gram = rng.normal(size=(8, 40)), np.diag(rng.uniform(0.1, 3, 8))
    given = map(_single, (w, gram, np.floor(w), np.ceil(w)))
    up, _ = sign_descent(*given, iterations=50, rate=0.5, momentum=0.9)
    np.testing.assert_array_equal(np.where(up, np.ceil(w), np.floor(w)), np.rint(w))


def test_a_block_is_rounded_as_written_out() -> None:
    """Descent for the results of tanh(x a) b, with derivatives by hand; a grid of halves, so that scales are known."""
    rng = np.random.default_rng(3)
    x, a, b = (rng.normal(size=size) / 2 for size in ((40, 6), (6, 7), (7, 5)))
    params = {"a": _single(a), "b": _single(b)}
    low = jc.quantize_fn(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], "fixed3.1")
    step = jc.ptq.sign_round(30, rate=1.0, momentum=0.5, loss="results")
    packed, report = low.pack(params, batches=[_single(x[:24]), _single(x[24:])], steps=step, return_report=True)

    wanted, offsets = np.tanh(x @ a) @ b, [np.zeros_like(a), np.zeros_like(b)]
    least, best, sums = np.inf, [a, b], [0.0, 0.0]
    for i in range(31):
        up = [2 * w - np.floor(2 * w) + v > 0.5 for w, v in zip((a, b), offsets, strict=True)]
        p, q = (np.where(u, np.ceil(2 * w), np.floor(2 * w)) / 2 for w, u in zip((a, b), up, strict=True))
        h = np.tanh(x @ p)
        error = h @ q - wanted
        if (error**2).sum() < least:
            least, best = (error**2).sum(), [p, q]
        slopes = [x.T @ ((2 * error @ q.T) * (1 - h * h)), h.T @ (2 * error)]
        sums = [0.5 * total + slope for total, slope in zip(sums, slopes, strict=True)]
        rate = (1 - i / 30) / 30
        offsets = [np.clip(v - rate * np.sign(total), -0.5, 0.5) for v, total in zip(offsets, sums, strict=True)]
    nearest = ((np.tanh(x @ (np.rint(2 * a) / 2)) @ (np.rint(2 * b) / 2) - wanted) ** 2).sum()
    assert least < 0.7 * nearest
    for name, numbers in zip("ab", best, strict=True):
        np.testing.assert_array_equal(np.asarray(jc.dequantize(packed[name])), numbers)
    assert report.passes == 32 and {row.method for row in report.weights} == {"sign_round"}


def test_a_stack_is_rounded_as_its_layers() -> None:
    """Turns of a loop, under rounded activations and clipped scales, beside the same layers with names."""
    keys = jax.random.split(jax.random.key(4), 2)
    stack, x = jax.random.normal(keys[0], (2, 16, 16)) / 4, jax.random.normal(keys[1], (64, 16))

    def by_names(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ p["0"]) @ p["1"])

    def by_turns(p: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]

    rule = jc.Rule(weight="int2(group=8)", activation="int8", gradient="e5m2:stochastic")
    steps = [jc.ptq.clip(), jc.ptq.sign_round(10, loss="results")]
    named = {"0": stack[0], "1": stack[1]}
    one = jc.quantize_fn(by_names, rule).pack(named, batches=[x], steps=steps, key=keys[0])
    two = jc.quantize_fn(by_turns, rule).pack(stack, batches=[x], steps=steps, key=keys[0])
    np.testing.assert_array_equal(np.stack([jc.dequantize(one[name]) for name in "01"]), jc.dequantize(two))


@further
@pytest.mark.parametrize(
    ("spec", "steps", "message"),
    [
        ("int4", [jc.ptq.sequential()], "cannot stand beside sequential"),
        ("int4", [jc.ptq.sparse(2, 4, by="magnitude")], "rounds no weight that is pruned, as ''"),
    ],
)
def steps_that_results_exclude(spec: str, steps: list[object], message: str) -> None:
    low, x = jc.quantize_fn(lambda p, x: x @ p, spec), jnp.ones((4, 8))
    with pytest.raises(ValueError, match=message):
        low.pack(jnp.ones((8, 8)), batches=[x], steps=[*steps, jc.ptq.sign_round(loss="results")])


@further
def results_that_are_not_finite() -> None:
    low, x = jc.quantize_fn(lambda p, x: jnp.log(x @ p - 1e3), "int4"), jnp.ones((4, 8))
    with pytest.raises(ValueError, match="batches give results, or errors of them, that are not finite"):
        low.pack(jnp.ones((8, 8)), batches=[x], steps=[jc.ptq.sign_round(loss="results")])


VALUES = ["int4(group=16)", "nf4(group=16)", "float8_e4m3fn(group=all)", "mxfp4", "nvfp4", "float8_e5m2"]


@further
@pytest.mark.in_turn(30)
@pytest.mark.parametrize("text", VALUES)
def neighbours_are_those_values_of_the_format(text: str) -> None:
    w = np.random.default_rng(2).normal(size=(6, 32)).astype(np.float32)
    if text == "float8_e5m2":
        w[0, 0] = 1e6  # beyond the format: its largest value on both sides, no infinity
    q = jc.quantize(jnp.asarray(w), text)
    scales = element_scales(q)
    parts = tuple(part.T for part in scales.by_element)
    below, above = neighbours(jnp.asarray(w.T), scales.with_elements(parts))
    step = np.ones(w.shape)
    if parts:
        stored, fmt = np.asarray(parts[0].T), q.spec.scaled
        assert fmt is not None and isinstance(fmt.scale, jc.formats.ElementFormat)
        step = fmt.scale.decode(stored).astype(np.float64) if stored.dtype.kind == "u" else stored.astype(np.float64)
    if len(scales.scale) > 1:
        step = step * np.asarray(scales.scale[1], np.float64)
    values = np.array(sorted({float(v) for v in q.spec.element.values()}))
    at = w.astype(np.float64) / step
    least = values[np.clip(np.searchsorted(values, at, side="right") - 1, 0, None)]
    most = values[np.clip(np.searchsorted(values, at, side="left"), None, len(values) - 1)]
    inside = (at >= values[0]) & (at <= values[-1])
    assert inside.mean() > 0.9
    near = np.abs(at[..., None] - values).min(-1) < 1e-5  # within the last bits of a quotient
    for found, wanted in ((below, least), (above, most)):
        np.testing.assert_allclose((np.asarray(found[1]).T / step)[~near], wanted[~near], rtol=1e-5, atol=1e-6)


@further.first
def bad_arguments() -> None:
    with pytest.raises(ValueError, match="iterations=0 must be"):
        jc.ptq.sign_round(0)
    with pytest.raises(ValueError, match="rate=0 must be a finite number > 0"):
        jc.ptq.sign_round(rate=0)
    with pytest.raises(ValueError, match="momentum=1 must be a finite number >= 0 and < 1"):
        jc.ptq.sign_round(momentum=1)
    with pytest.raises(ValueError, match="loss='outputs' must be one of 'product', 'results'"):
        jc.ptq.sign_round(loss="outputs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="then one gptq or sign_round, then"):
        jc.quantize_fn(lambda p, x: x @ p, jc.Rule(weight="int4")).pack(
            {}, batches=[], steps=[jc.ptq.gptq(), jc.ptq.sign_round()], return_report=True
        )


test_further = further.test()
