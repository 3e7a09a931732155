"""Parameters rounded with data: gains on fresh data, layer after layer, loops, and what is reported or refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from tests.ptq.tables import case, some_of

further = Further()


def decibels(signal: Any, error: Any) -> float:
    signal, error = np.asarray(signal, np.float64), np.asarray(error, np.float64)
    return 10 * np.log10((signal**2).sum() / (error**2).sum())


def dense(p: Any, x: Any) -> Any:
    return x @ p["w"]


def outliers(seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """A layer of 256 inputs, of which 8 are ten times larger, and 128 outputs; data, and fresh data."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2048, 64)) @ rng.normal(size=(64, 256)) / 8 + 0.3 * rng.normal(size=(2048, 256))
    x[:, rng.choice(256, 8, replace=False)] *= 10
    w, x = (jnp.asarray(v, jnp.float32) for v in (rng.normal(size=(256, 128)) / 16, x))
    return {"w": w}, x[:1024], x[1024:]


#: Integers with the same gap everywhere, zero points, floats whose gaps grow, and few bits.
FORMATS = ["int4(group=128)", "uint4(group=32,zero_point=float)", "nvfp4", "int2(group=32)"]
SLOW_FORMATS = [pytest.param(text, marks=pytest.mark.slow) for text in FORMATS[1:]]


@further
@pytest.mark.parametrize("text", [FORMATS[0], *SLOW_FORMATS])
def gains_on_fresh_data(text: str) -> None:
    """And the result is what `pack` gives but for codes."""
    params, x, fresh = outliers()
    y, of_data = dense(params, fresh), dense(params, x)
    rule, found = jc.Rule(weight=text), []
    low = jc.quantize_fn(dense, rule)
    near = low.pack(params, x)["w"]
    before = decibels(of_data, low(params, x) - of_data)
    for steps in ([], [jc.ptq.gptq("plain")], [jc.ptq.gptq()]):
        packed, report = jc.quantize_fn(dense, rule).pack(params, batches=[x], steps=steps, return_report=True)
        found.append(decibels(y, low(packed, fresh) - y))
        assert packed["w"].spec == near.spec and packed["w"].shape == near.shape
        codes, *scales = jax.tree.leaves(packed["w"])
        for one, other in zip(scales, jax.tree.leaves(near)[1:], strict=True):
            np.testing.assert_array_equal(one, other)
        assert bool((codes == jax.tree.leaves(near)[0]).all()) != bool(steps)
        (row,) = report.weights
        assert row.rows == 1024 and row.bits == 8 * near.nbytes / near.size and (row.after != row.before) == bool(steps)
        after = decibels(of_data, low(packed, x) - of_data)
        np.testing.assert_allclose((row.before, row.after), (before, after), atol=0.01)
    nearest, plain, by_activation = found
    assert plain > nearest + 3 and by_activation > nearest + 5


@pytest.mark.parametrize("text", [FORMATS[0], *SLOW_FORMATS])
def test_sign_round_gains_on_fresh_data(text: str) -> None:
    """The prototype of this algorithm gained 1.65 dB on such a layer in int4(group=128)."""
    params, x, fresh = outliers()
    y, rule = dense(params, fresh), jc.Rule(weight=text)
    low = jc.quantize_fn(dense, rule)
    packed, report = jc.quantize_fn(dense, rule).pack(
        params, batches=[x], steps=jc.ptq.sign_round(), return_report=True
    )
    plain = low.pack(params, x)
    assert decibels(y, low(packed, fresh) - y) > decibels(y, low(plain, fresh) - y) + 1.65
    np.testing.assert_array_equal(jax.tree.leaves(packed)[1], jax.tree.leaves(plain)[1])  # scales
    (row,) = report.weights
    assert row.method == "sign_round" and row.after > row.before + 1.65 and row.damping == 0


SHAPES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "two axes summed": (lambda p, x: jnp.einsum("tij,kji->tk", x.reshape(-1, 2, 16), p), (9, 16, 2), "int4(group=8)"),
    "group over axes": (lambda p, x: jnp.einsum("tij,ijk->tk", x.reshape(-1, 8, 4), p), (8, 4, 5), "int4(group=6)"),
    "heads": (lambda p, x: jnp.einsum("tk,khd->thd", x, p), (32, 3, 4), "mxfp4(group=16)"),
    "experts": (lambda p, x: jnp.einsum("etk,ekn->etn", x.reshape(4, -1, 32), p), (4, 32, 8), "nvfp4"),
    "left": (lambda p, x: p @ x.T, (16, 32), "uint4(group=16,zero_point=integer)"),
    "tiles": (dense, (32, 24), "int4(group=(8,8))"),
    "whole": (dense, (32, 24), "int4"),
    "no scale": (dense, (32, 24), "float4_e2m1fn"),
    "patches": (
        lambda p, x: lax.conv_general_dilated(
            x.reshape(4, -1, 8, 8), p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (3, 3, 8, 6),
        "int4(group=12)",
    ),
    "ragged": (
        lambda p, x: lax.ragged_dot(x, p, jnp.array([40, 0, 80])),
        (3, 32, 8),
        "int4(group=16)",
    ),
}  # fmt: skip


@further
@pytest.mark.in_turn(30)
@pytest.mark.parametrize("name", sorted(SHAPES, key=lambda name: name != "left"))  # first a quick one
def every_shape_of_weights(name: str) -> None:
    fun, shape, text = SHAPES[name]
    rng = np.random.default_rng(1)
    x = jnp.asarray(
        rng.normal(size=(256, 12)) @ rng.normal(size=(12, 32)) + 0.1 * rng.normal(size=(256, 32)), jnp.float32
    )
    params, rule = {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}, jc.Rule(weight=text)
    run = fun if fun is dense else lambda p, x: fun(p["w"], x)
    packed, report = jc.quantize_fn(run, rule).pack(params, batches=[x], return_report=True)
    y, low = run(params, x), jc.quantize_fn(run, rule)
    nearest, after = (decibels(y, low(p, x) - y) for p in (params, packed))
    assert after > nearest + (0.5 if name in ("patches", "two axes summed") else 2)
    (row,) = report.weights
    np.testing.assert_allclose((row.before, row.after), (nearest, after), atol=0.02)
    assert ("no input reached 1 of its 3 matrices" in row.note) == (name == "ragged")


# -- layers ------------------------------------------------------------------------------------------------------------


def chain(p: Any, x: Any) -> Any:
    for i, w in enumerate(p):
        x = x @ w if i == len(p) - 1 else jax.nn.relu(x @ w)
    return x


def network(seed: int, width: int = 128) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(width, width)) / width**0.5
    weights = [jnp.asarray(rng.normal(size=(width, width)) * (2 / width) ** 0.5, jnp.float32) for _ in range(4)]
    x, fresh = (jnp.asarray(rng.normal(size=(1024, width)) @ mix, jnp.float32) for _ in range(2))
    return weights, x, fresh


@further
@pytest.mark.parametrize(
    "width, bits, gain, seed",
    [
        (32, 3, 1.3, 0),
        *(pytest.param(128, *row, marks=pytest.mark.slow) for row in ((3, 1.3, 0), (3, 1.3, 1), (4, 0.9, 2))),
    ],
)
def correction_gains_over_inputs_in_full_precision(width: int, bits: int, gain: float, seed: int) -> None:
    weights, x, fresh = network(seed, width)
    rule, y = jc.Rule(weight=f"int{bits}(group=32)"), chain(weights, fresh)
    found = []
    for steps in ([jc.ptq.gptq()], [jc.ptq.correct_error(), jc.ptq.gptq()]):
        packed, report = jc.quantize_fn(chain, rule).pack(
            weights, batches=[x[:512], x[512:]], steps=steps, return_report=True
        )
        found.append(decibels(y, jc.quantize_fn(chain, rule)(packed, fresh) - y))
    assert found[1] > found[0] + gain
    assert report.passes == 4 and [row.path for row in report.weights] == ["0", "1", "2", "3"]


def stacked(p: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"] + h, None), x, p)[0]


def unrolled(p: Any, x: Any) -> Any:
    for w in p:
        x = jnp.tanh(x @ w["a"]) @ w["b"] + x
    return x


def by_sort(score: Any, x: Any) -> Any:
    columns = lax.sort((jnp.broadcast_to(score[:, None], x.shape), x), dimension=0, num_keys=1)
    return columns[1][:9]


#: Rows in an order that scores choose.
ORDERS: dict[str, Any] = {
    "top_k": lambda score, x: x[lax.top_k(score, 9)[1]],
    "sort": by_sort,
    "approx_max_k": lambda score, x: x[lax.approx_max_k(score, 9)[1]],
    "argsort": lambda score, x: x[jnp.argsort(score)[:9]],
    "jit": jax.jit(lambda score, x: x[jnp.argsort(-score)[:9]]),
    "nonzero": lambda score, x: x[jnp.nonzero(score > 0.4, size=9)[0]],
    "argmax": lambda score, x: x.reshape(40, 6, 8)[jnp.arange(40), jnp.argmax(score.reshape(40, 6), 1)],
    "floor": lambda score, x: x[jnp.floor(score * 100).astype(jnp.int32) % 240],
    "counts": lambda score, x: x[(score[:, None] > score).sum(1)],
    "one-hot": lambda score, x: jax.nn.one_hot(lax.top_k(score, 9)[1], 240) @ x,
    "loop": lambda score, x: lax.map(lambda some: x[jnp.argmin(some)], score.reshape(60, 4)),
}


def check_rows_are_compared_in_one_order(name: str) -> None:
    """Rounding changes the order and nothing else, so there is no error to correct."""
    rng, order = np.random.default_rng(0), ORDERS[name]
    score, w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (8, (8, 5), (240, 8)))
    params = {"score": score, "w": w}
    fun = lambda p, x: order(x @ p["score"], x) @ p["w"]  # noqa: E731
    rule = jc.Rule(weight="int2(group=all)")
    low = jc.round_to_format(score, "int2(group=all)")
    assert not jnp.array_equal(order(x @ score, x), order(x @ low, x))
    packed = jc.quantize_fn(fun, rule).pack(params, batches=[x], steps=[jc.ptq.correct_error(1.0)])
    expected = jc.quantize_fn(fun, rule).pack(params, x)
    np.testing.assert_array_equal(jc.dequantize(packed["w"]), jc.dequantize(expected["w"]))


@some_of(ORDERS, 3, 2)
def test_rows_are_compared_in_one_order(names: list[str]) -> None:
    for name in names:
        with case(name):
            check_rows_are_compared_in_one_order(name)


@further
@pytest.mark.parametrize(
    "steps, depth",
    [([jc.ptq.gptq()], 2), pytest.param([jc.ptq.correct_error(1.0), jc.ptq.gptq("plain")], 3, marks=pytest.mark.slow)],
    ids=["inputs in full precision", "layer after layer"],
)
def a_loop_is_rounded_as_its_layers_are(steps: Any, depth: int) -> None:
    rng = np.random.default_rng(0)
    layers = [
        {
            name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
            for name, shape in (("a", (16, 24)), ("b", (24, 16)))
        }
        for _ in range(depth)
    ]
    x = jnp.asarray(rng.normal(size=(200, 16)) @ rng.normal(size=(16, 16)) / 4, jnp.float32)
    rule = jc.Rule(weight="int4(group=8)", activation="int8(group=all)")
    together = jax.tree.map(lambda *v: jnp.stack(v), *layers)
    each, one = jc.quantize_fn(unrolled, rule).pack(layers, batches=[x], steps=steps, return_report=True)
    loop, two = jc.quantize_fn(stacked, rule).pack(together, batches=[x], steps=steps, return_report=True)
    same = [
        np.mean(np.asarray(loop[name][i].qvalue) == np.asarray(each[i][name].qvalue))
        for i in range(depth)
        for name in "ab"
    ]
    assert np.mean(same) > 0.99  # sums of another program have other last bits
    assert [row.path for row in two.weights] == [f"{name}[{i}]" for i in range(depth) for name in "ab"]
    np.testing.assert_allclose([r.after for r in one.weights], [r.after for r in two.weights], atol=0.1)


@further
@pytest.mark.parametrize(
    "steps, memory",
    [
        ([jc.ptq.gptq()], None),
        pytest.param([jc.ptq.gptq()], "3KiB", marks=pytest.mark.slow),  # one layer at a time
        pytest.param([jc.ptq.correct_error(1.0), jc.ptq.gptq()], None, marks=pytest.mark.slow),
        pytest.param([jc.ptq.correct_error(1.0), jc.ptq.gptq()], "6KiB", marks=pytest.mark.slow),
    ],
)
def layers_by_a_constant_index_are_rounded_as_a_list(steps: Any, memory: Any) -> None:
    """Beside the layer that no product takes, which is rounded to nearest."""
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.normal(size=(3, 12, 12)) / 4, jnp.float32)
    x = jnp.asarray(rng.normal(size=(100, 12)) @ rng.normal(size=(12, 12)) / 4, jnp.float32)
    rule = jc.Rule(weight="int4(group=4)", activation="int8(group=all)")
    run = lambda layers, x: x + jnp.tanh(x @ layers[0]) @ layers[1]  # noqa: E731
    fun = lambda p, x: run([p[0], p[2]], x)  # noqa: E731
    each, one = jc.quantize_fn(run, rule).pack(
        [stack[0], stack[2]], batches=[x[:60], x[60:]], steps=steps, return_report=True
    )
    by_index, two = jc.quantize_fn(fun, rule).pack(
        stack, batches=[x[:60], x[60:]], steps=steps, memory=memory, return_report=True
    )
    rows = {row.path: row for row in two.weights}
    nearest = jc.quantize_fn(fun, rule).pack(stack, x)
    for number, layer in enumerate((0, 2)):
        np.testing.assert_array_equal(by_index.qvalue[layer], each[number].qvalue)
        assert rows.pop(f"[{layer}]").after == pytest.approx(one.weights[number].after)
    np.testing.assert_array_equal(by_index.qvalue[1], nearest.qvalue[1])
    assert {path: row.note for path, row in rows.items()} == {"[1]": "no input reached it"}


@pytest.mark.parametrize("sequential", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_whose_rows_are_looked_up_are_rounded_as_tables(sequential: bool) -> None:
    def apart(p: Any, tokens: Any) -> Any:
        return jnp.tanh(p["a"][tokens] + p["b"][tokens + 1]) @ p["head"].T

    def fun(p: Any, tokens: Any) -> Any:
        return apart({"a": p[0], "b": p[1], "head": p[2]}, tokens)

    stack = jnp.asarray(np.random.default_rng(0).normal(size=(3, 20, 16)), jnp.float32)
    layers = dict(zip(("a", "b", "head"), stack, strict=True))
    rule, tokens = jc.Rule(weight="int4(group=8)"), jnp.arange(19)
    steps = [*[jc.ptq.sequential()] * sequential, jc.ptq.sparse(2, 4), jc.ptq.gptq()]
    packed, report = jc.quantize_fn(fun, rule).pack(stack, batches=[tokens], steps=steps, return_report=True)
    each, one = jc.quantize_fn(apart, rule).pack(layers, batches=[tokens], steps=steps, return_report=True)
    for number, name in enumerate(layers):
        np.testing.assert_array_equal(packed.qvalue[number], each[name].qvalue)
    rows = {row.path: row for row in report.weights}
    assert list(rows) == ["[2]", "[0]", "[1]"] and report.passes == one.passes == 1
    for row in (rows["[0]"], rows["[1]"]):
        assert (row.method, row.dead, row.note, row.shape) == ("nearest", 0, "it is looked up", (20, 16))
    assert rows["[2]"].method == "sparse, gptq" and not rows["[2]"].note


@further
def inputs_that_are_shared_are_one_stage() -> None:
    def attend(p: Any, x: Any) -> Any:
        q, k, v = (x @ p[name] for name in "qkv")
        return jax.nn.softmax(q @ k.T) @ v @ p["o"]

    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(16, 16)), jnp.float32) for name in "qkvo"}
    x = jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)
    _, report = jc.quantize_fn(attend, jc.Rule(weight="int4(group=8)")).pack(
        params, batches=[x], steps=[jc.ptq.sequential(), jc.ptq.gptq()], return_report=True
    )
    assert report.passes == 2 and [row.path for row in report.weights] == ["q", "k", "v", "o"]


ALONE = [jc.ptq.gptq(), jc.ptq.correct_biases()]


@further
@pytest.mark.parametrize(
    "groups, rows, steps",
    [(2, 4, ALONE), *(pytest.param(*n, [jc.ptq.clip(), *ALONE], marks=pytest.mark.slow) for n in ((2, 6), (4, 4)))],
)
def a_group_of_a_convolution_is_rounded_as_a_convolution_of_its_own(groups: int, rows: int, steps: Any) -> None:
    def fun(p: Any, x: Any) -> Any:
        numbers, count = ("NHWC", "HWIO", "NHWC"), x.shape[-1] // p["w"].shape[2]
        y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=count)
        return y + p["b"]

    rng = np.random.default_rng(0)
    shapes = {"w": (3, 3, 4 // groups, rows), "b": (rows,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(3, 5, 5, 4)) + rng.normal(size=(3, 5, 5, 1)), jnp.float32)
    rule = jc.Rule(weight="int4(group=all)")
    packed, report = jc.quantize_fn(fun, rule).pack(params, batches=[x], steps=steps, return_report=True)
    for group, own in enumerate(np.split(np.arange(rows), groups)):
        part = {"w": params["w"][..., own], "b": params["b"][own]}
        alone = jc.quantize_fn(fun, rule).pack(
            part, batches=[x[..., group * (4 // groups) :][..., : 4 // groups]], steps=steps
        )
        np.testing.assert_array_equal(np.asarray(packed["w"])[..., own], alone["w"])
        np.testing.assert_array_equal(packed["b"][own], alone["b"])
    (row,) = report.weights
    low = jc.quantize_fn(fun, rule)
    y = fun({**params, "b": 0}, x)
    errors = [np.asarray(fun(params, x) - low(some, x)) for some in (params, packed)]
    np.testing.assert_allclose([row.before, row.after], [decibels(y, e) for e in errors], atol=1e-3)
    if steps is ALONE:
        return
    _, mapped = jc.quantize_fn(fun, rule).pack(
        params, batches=[x], steps=[jc.ptq.smooth(), jc.ptq.gptq()], return_report=True
    )
    assert mapped.weights[0].note == f"not by smooth: a convolution of feature_group_count={groups}"
    assert mapped.weights[0].method == "gptq"


@further
@pytest.mark.parametrize("axes", [(0, 1), pytest.param((0,), marks=pytest.mark.slow)])
def a_kernel_that_a_convolution_takes_reversed_is_rounded_as_one_in_order(axes: tuple[int, ...]) -> None:
    def fun(p: Any, x: Any, swaps: bool = False) -> Any:
        w = p["w"]
        for axis in axes:  # one by one, as `lax.conv_transpose` does
            w = jnp.flip(w, axis) if swaps else w
        return lax.conv_transpose(x, w.swapaxes(2, 3) if swaps else w, (2, 1), "SAME") + p["b"]

    rng = np.random.default_rng(0)
    w, b, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, 4, 6), (6,), (3, 5, 4, 4)))
    steps, rule = [jc.ptq.gptq(), jc.ptq.correct_biases()], jc.Rule(weight="int3(group=all)")
    wanted = jc.quantize_fn(fun, rule).pack({"w": w, "b": b}, batches=[x], steps=steps)
    reversed_params = {"w": jnp.flip(w, axes).swapaxes(2, 3), "b": b}
    low = jc.quantize_fn(lambda p, x: fun(p, x, True), rule)
    packed, report = low.pack(reversed_params, batches=[x], steps=steps, return_report=True)
    (row,) = report.weights
    if len(axes) == 1:  # of two axes of the space
        assert row.method == "nearest" and "computed with before the product" in row.note
        return
    assert row.method == "gptq" and row.after > row.before
    np.testing.assert_array_equal(np.flip(np.asarray(packed["w"]), axes).swapaxes(2, 3), wanted["w"])
    np.testing.assert_allclose(packed["b"], wanted["b"], rtol=1e-5, atol=1e-6)


# -- reports and errors ------------------------------------------------------------------------------------------------


def test_all_that_is_left_out_is_in_the_report() -> None:
    def fun(p: Any, x: Any, tokens: Any) -> Any:
        h = x @ p["w"] + p["bias"] + p["table"][tokens]
        h = h @ (p["computed"] * 2)
        h = lax.cond(x[0, 0] > 1e9, lambda: h @ p["never"], lambda: h)
        return h @ p["without"]

    rng = np.random.default_rng(0)
    shapes = {"w": (8, 8), "bias": (8,), "table": (5, 8), "computed": (8, 8), "never": (8, 8), "without": (8, 3)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    batch = jnp.asarray(rng.normal(size=(20, 8)), jnp.float32), jnp.arange(20) % 5
    rules = [jc.Rule("without"), jc.Rule(weight="int4(group=4)", bias="bfloat16")]
    packed, report = jc.quantize_fn(fun, rules).pack(params, batches=[batch, batch], return_report=True)
    rows = {row.path: row for row in report.weights}
    notes = {path: row.note for path, row in rows.items()}
    assert notes == {
        "w": "",
        "never": "no input reached it",
        "bias": "it is added",
        "table": "it is looked up",
        "computed": "its numbers are computed with before the product",
        "without": "no rule rounds it",
    }
    assert rows["w"].rows == 40 and rows["w"].method == "clip, gptq" and rows["table"].method == "nearest"
    assert rows["never"].dead == 8
    text = str(report)
    assert all(note in text for note in notes.values())
    low = jc.quantize_fn(fun, rules)
    plain = low.pack(params, *batch)
    np.testing.assert_array_equal(packed["never"].qvalue, plain["never"].qvalue)
    assert packed["without"] is params["without"] and np.isfinite(low(packed, *batch)).all()


@further
def inputs_of_low_rank_are_damped() -> None:
    """And the columns without inputs are counted."""
    params, x, _ = outliers()
    few = x[:3].at[:, 5:12].set(0)
    for damping in (0.0, 0.01):
        packed, report = jc.quantize_fn(dense, jc.Rule(weight="int4(group=128)")).pack(
            params, batches=[few], steps=jc.ptq.gptq(damping=damping), return_report=True
        )
        (row,) = report.weights
        assert row.after > row.before + 10 and row.damping >= 0.999 * damping and row.dead == 7
        assert np.isfinite(jc.dequantize(packed["w"])).all()
        if not damping:
            assert row.tries > 1 and row.damping > 0


@further
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def fewer_rows_than_inputs_are_noted(every: bool) -> None:
    few = "fewer rows than inputs"
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4), (8, 8)))

    def note(steps: Any, *batches: Any, fun: Any = dense, w: Any = w) -> str:
        _, report = jc.quantize_fn(fun, jc.Rule(weight="int8(group=8)")).pack(
            {"w": w}, batches=batches, steps=steps, return_report=True
        )
        return report.weights[0].note

    assert note([jc.ptq.gptq()], x[:4], x[4:7]) == few and note([jc.ptq.gptq()], x[:4], x[4:]) == ""
    if not every:
        assert note([], x[:7]) == ""
        return
    assert note([jc.ptq.correct_error()], x[:7]) == few and note([jc.ptq.clip()], x[:7]) == ""
    ragged = lambda p, x: lax.ragged_dot(x, p["w"], jnp.array([3, 0, 8]))  # noqa: E731
    text = note([jc.ptq.gptq()], jnp.concatenate([x, x[:3]]), fun=ragged, w=jnp.stack([w] * 3))
    assert text == f"no input reached 1 of its 3 matrices; {few} in 1 of its 3 matrices"


@further.first
def a_weight_worse_than_nearest_is_noted() -> None:
    """By itself: with what `correct_error` makes up for, the output is better."""
    weights, x, _ = network(0, 32)
    rule, steps = jc.Rule(weight="int3(group=32)"), [jc.ptq.correct_error(1.0)]
    packed, report = jc.quantize_fn(chain, rule).pack(weights, batches=[x], steps=steps, return_report=True)
    low, y = jc.quantize_fn(chain, rule), chain(weights, x)
    assert decibels(y, low(packed, x) - y) > decibels(y, low(weights, x) - y)
    notes = ["worse than nearest, not counting the errors that correct_error makes up for" * (row.after < row.before)
             for row in report.weights]  # fmt: skip
    assert [row.note for row in report.weights] == notes and not notes[0] and notes[-1]


@further
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
def half_precision_and_float64(dtype: str) -> None:
    params, x, _ = outliers()
    with jax.enable_x64(dtype == "float64"):
        low = {"w": jnp.asarray(params["w"], dtype)}
        packed, report = jc.quantize_fn(dense, jc.Rule(weight="int4(group=32)")).pack(
            low, batches=[jnp.asarray(x, dtype)], return_report=True
        )
    assert packed["w"].dtype == dtype and report.weights[0].after > report.weights[0].before + 5


_OTHER_SCALES = [pytest.param(scale, marks=pytest.mark.slow) for scale in (1.0, 1e-15, 1e-18, 1e-25)]


@pytest.mark.parametrize("scale", [1e-22, *_OTHER_SCALES])
def test_inputs_whose_squares_underflow_are_noted(scale: float) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4), (40, 8)))
    rule = jc.Rule(weight="int4(group=4)")
    _, report = jc.quantize_fn(dense, rule).pack(
        {"w": w}, batches=[x * jnp.float32(scale)], steps=[], return_report=True
    )
    assert ("their squares underflow" in report.weights[0].note) == (scale < 1e-15)


def test_stochastic_rounding_takes_a_key() -> None:
    params, x, _ = outliers()
    rule = jc.Rule(weight=jc.Spec(jc.formats.int4(group=32), rounding="stochastic"))
    with pytest.raises(ValueError, match="key=None"):
        jc.quantize_fn(dense, rule).pack(params, batches=[x], return_report=True)
    keys = jax.random.key(0), jax.random.key(0), jax.random.key(1)
    one, again, other = (jc.quantize_fn(dense, rule).pack(params, batches=[x], key=key)["w"].qvalue for key in keys)
    assert bool((one == again).all()) and not bool((one == other).all())


def test_equal_layers_of_a_stack_draw_different_words() -> None:
    rng = np.random.default_rng(0)
    w, x = np.tile(rng.normal(size=(8, 8)).astype(np.float32), (2, 1, 1)), np.ones((4, 8), np.float32)
    rule = jc.Rule(weight=jc.Spec(jc.formats.int4(group=8), rounding="stochastic"))
    packed = jc.quantize_fn(lambda p, x: x @ p[0] @ p[1], rule).pack(w, batches=[x], steps=[], key=jax.random.key(0))
    codes = np.asarray(packed.qvalue)
    assert (codes[0] != codes[1]).any()


def test_every_row_of_equal_parameters_draws_words_of_its_own() -> None:
    """Weights of two experts, whose inputs have no correlations, and biases that are corrected by nothing."""
    w, b = np.full((2, 3, 64), 0.5, np.float32), np.full((2, 1, 64), 0.5, np.float32)
    x = np.tile(np.concatenate([np.eye(3), -np.eye(3)]).astype(np.float32), (2, 1, 1))
    fun = lambda p, x: [x @ p[w] + p[b] for w, b in (("w", "b"), ("v", "a"))]  # noqa: E731
    half, steps = "fixed4.0:stochastic", [jc.ptq.gptq(), jc.ptq.correct_biases()]
    params = {"w": w, "v": w, "a": b, "b": b}
    packed = jc.quantize_fn(fun, jc.Rule(weight=half, bias=half)).pack(
        params, batches=[x], steps=steps, key=jax.random.key(0)
    )
    rows = np.concatenate([np.reshape(jc.dequantize(q), (-1, 64)) for q in packed.values()])
    assert {*rows.ravel().tolist()} == {0, 1} and len(np.unique(rows, axis=0)) == len(rows) == 16


def test_errors_of_inputs_are_made_up_for_by_damped_least_squares() -> None:
    """(H + d mean(diag H) I)^-1 H' w is added: H is the mean of z z^T over rounded inputs z, H' that of z (x - z)^T."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("a", "b")}
    x = rng.normal(size=(16, 4)).astype(np.float32)
    rules = [jc.Rule("a", weight="int2(group=all)"), jc.Rule("b", weight="binary32")]
    step = jc.ptq.correct_error(0.5, damping=2.0)
    packed = jc.quantize_fn(lambda p, x: (x @ p["a"]) @ p["b"], rules).pack(params, batches=[x], steps=[step])
    z, exact = (x @ np.asarray(a, np.float64) for a in (jc.dequantize(packed["a"]), params["a"]))
    gram, cross = z.T @ z / len(x), z.T @ (exact - z) / len(x)
    damped = gram + 2.0 * np.diag(gram).mean() * np.eye(4)
    wanted = params["b"] + 0.5 * np.linalg.solve(damped, cross @ params["b"])
    np.testing.assert_allclose(jc.dequantize(packed["b"]), wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(wanted - params["b"]).max() > 0.01


def test_bad_arguments() -> None:
    params, x, _ = outliers()
    rule = jc.Rule(weight="int4(group=32)")
    with pytest.raises(ValueError, match="cannot be part of a traced function"):
        jax.eval_shape(lambda: jc.quantize_fn(dense, rule).pack(params, batches=[x], return_report=True))
    with pytest.raises(ValueError, match="batches has no batch"):
        jc.quantize_fn(dense, rule).pack(params, batches=[], return_report=True)
    with pytest.raises(ValueError, match="batches has no batch"):
        jc.quantize_fn(dense, rule).pack(
            params, batches=[], steps=[jc.ptq.sequential(), jc.ptq.gptq()], return_report=True
        )
    with pytest.raises(ValueError, match=r"one has an argument of shape \(0, 32\), which holds no number"):
        jc.quantize_fn(dense, rule).pack(params, batches=[x, jnp.zeros((0, 32))], return_report=True)
    with pytest.raises(TypeError, match="can be run through once"):
        jc.quantize_fn(dense, rule).pack(params, batches=iter([x]), steps=jc.ptq.correct_error(), return_report=True)
    with pytest.raises(ValueError, match=r"'w' at .* an input with NaN"):
        jc.quantize_fn(dense, rule).pack(params, batches=[x.at[0, 0].set(jnp.inf)], return_report=True)
    with pytest.raises(ValueError, match="params: 'w' holds 1 NaN"):
        jc.quantize_fn(dense, rule).pack({"w": params["w"].at[0, 0].set(jnp.nan)}, batches=[x], return_report=True)
    for name, value in {"steps": [], "memory": 3, "resume": "run", "progress": print, "return_report": True}.items():
        with pytest.raises(ValueError, match=f"{name}=.* needs data: pass batches="):
            jc.quantize_fn(dense, rule).pack(params, x, **{name: value})
    with pytest.raises(TypeError, match="steps=3 must be a list of steps"):
        jc.quantize_fn(dense, rule).pack(params, batches=[x], steps=3, return_report=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="then one correct_error, then one sparse, then one clip"):
        jc.quantize_fn(dense, rule).pack(
            params, batches=[x], steps=[jc.ptq.gptq(), jc.ptq.correct_error()], return_report=True
        )
    with pytest.raises(ValueError, match="order='up' must be one of"):
        jc.ptq.gptq("up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damping=-1 must be"):
        jc.ptq.gptq(damping=-1)
    with pytest.raises(TypeError, match="damping='a' must be"):
        jc.ptq.gptq(damping="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"strength=1\.5 must be"):
        jc.ptq.correct_error(1.5)
    with pytest.raises(ValueError, match="damping=0 must be a finite number > 0"):
        jc.ptq.correct_error(damping=0)
    with pytest.raises(ValueError, match="block=0 must be"):
        jc.ptq.gptq(block=0)


test_further = further.test()
