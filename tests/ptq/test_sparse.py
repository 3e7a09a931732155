"""Pruning with data against SparseGPT and Wanda in NumPy, the least squares bound, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc

further = Further()

LOSS, MAGNITUDE, INPUTS = (jc.ptq.sparse(2, 4, by=by) for by in ("loss", "magnitude", "inputs"))


def dense(p: Any, x: Any) -> Any:
    return x @ p


def layer(inputs: int = 64, outputs: int = 64, rows: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """A weight (inputs, outputs), and inputs that depend on each other and are of different sizes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, inputs)) @ rng.normal(size=(inputs, inputs)) * np.exp(0.75 * rng.normal(size=inputs))
    return rng.normal(size=(outputs, inputs)).T, x


def pruned(w: Any, x: Any, steps: Any, weight: str = "binary32") -> tuple[np.ndarray, Any]:
    """The numbers of a rounded weight, and its row of the report."""
    packed, report = jc.quantize_fn(dense, jc.Rule(weight=weight)).pack(w, batches=[x], steps=steps, return_report=True)
    return np.asarray(jc.dequantize(packed)), report.weights[0]


def single(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def largest(score: np.ndarray, n: int, m: int) -> np.ndarray:
    """Which numbers are among the n largest of their group along the first axis, which has whole groups."""
    groups = score.reshape(-1, m, score.shape[1])
    rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1)
    return (rank < n).reshape(score.shape)


def most_in_groups(numbers: np.ndarray, m: int) -> int:
    padded = np.pad(numbers, [(0, -len(numbers) % m), (0, 0)])
    return int((padded.reshape(-1, m, padded.shape[1]) != 0).sum(1).max())


def sparse_gpt(w: np.ndarray, gram: np.ndarray, order: np.ndarray, n: int, m: int, step: float = 0.0) -> np.ndarray:
    """SparseGPT as its paper has it, in an order with whole groups; integers of 4 bits if there is a step."""
    gram, rest = gram[order][:, order], w[order].copy()
    upper = np.linalg.cholesky(np.linalg.inv(gram + 0.01 * np.diag(gram).mean() * np.eye(len(gram)))).T
    out, kept = np.zeros_like(w), np.zeros(0)
    for i in range(len(w)):
        if i % m == 0:
            kept = largest(rest[i : i + m] ** 2 / np.diag(upper)[i : i + m, None] ** 2, n, m)
        number = rest[i] if not step else step * np.clip(np.rint(rest[i] / step), -8, 7)
        number = np.where(kept[i % m], number, 0)
        rest[i:] -= np.outer(upper[i, i:], (rest[i] - number) / upper[i, i])
        out[order[i]] = number
    return out


def grouped_order(gram: np.ndarray, m: int) -> np.ndarray:
    groups = np.arange(len(gram)).reshape(-1, m)
    groups = np.array([sorted(group, key=lambda i: -gram[i, i]) for group in groups])
    return np.concatenate(sorted(groups.tolist(), key=lambda group: -max(gram[i, i] for i in group)))


@further
@pytest.mark.in_turn(30)
@pytest.mark.parametrize(
    ("order", "n", "m", "weight"),
    [
        ("activation", 2, 4, "int4"),
        ("plain", 2, 4, "binary64"),
        ("activation", 1, 8, "binary64"),
        ("plain", 1, 8, "int4"),
    ],
)
def a_textbook_in_numpy_gives_the_same_numbers(order: Any, n: int, m: int, weight: str) -> None:
    w, x = layer(32, 12, 256)
    with jax.enable_x64(True):
        found, _ = pruned(
            jnp.asarray(w), jnp.asarray(x), [jc.ptq.sparse(n, m), jc.ptq.gptq(order, block=12)], weight
        )  # fmt: skip
        step = 0.0 if weight == "binary64" else float(np.float64(jc.quantize(jnp.asarray(w), weight).scale[0, 0]))
    gram = x.T @ x / len(x)
    wanted = sparse_gpt(w, gram, np.arange(32) if order == "plain" else grouped_order(gram, m), n, m, step)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert most_in_groups(found, m) == n


@further
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def the_gates_of_a_layer(every: bool) -> None:
    """The gates are those of another such layer: magnitude .350, Wanda .232, SparseGPT .184, and .140 on its mask."""
    w, x = layer()
    y = x @ w
    made = {}
    for name, steps in {
        "magnitude": [MAGNITUDE],
        "inputs": [INPUTS],
        **({"inputs, gptq": [INPUTS, jc.ptq.gptq()], "loss, plain": [LOSS, jc.ptq.gptq("plain")]} if every else {}),
        "loss": [LOSS, jc.ptq.gptq()],
    }.items():
        numbers, row = pruned(single(w), single(x), steps)
        made[name] = np.linalg.norm(y - x @ numbers) / np.linalg.norm(y)
        assert most_in_groups(numbers, 4) == 2 and row.sparsity == 0.5
        assert row.before == np.inf and abs(row.after + 20 * np.log10(made[name])) < 1e-3
    assert abs(made["magnitude"] - 0.350) < 0.005 and made["inputs"] < 0.232
    assert made["loss"] < min(0.19, 0.184 / 0.232 * made["inputs"])
    if every:
        assert made["loss"] < made["loss, plain"] < 0.19 and made["inputs, gptq"] < made["inputs"]
        assert made["loss, plain"] < 0.184 / 0.232 * made["inputs"]
    gram, best = x.T @ x, np.zeros_like(w)
    for j, stays in enumerate(np.not_equal(numbers, 0).T):
        best[stays, j] = np.linalg.solve(gram[np.ix_(stays, stays)], gram[stays] @ w[:, j])
    bound = np.linalg.norm(y - x @ best) / np.linalg.norm(y)
    assert bound < made["loss"] < 1.35 * bound


@further
def masks_of_magnitudes_and_of_inputs() -> None:
    w, x = layer(32, 12, 256)
    norms = np.sqrt((x**2).mean(0))
    for step, score in ((MAGNITUDE, np.abs(w)), (INPUTS, np.abs(w) * norms[:, None])):
        numbers, _ = pruned(single(w), single(x), [step])
        np.testing.assert_array_equal(numbers, np.where(largest(score, 2, 4), w, 0).astype(np.float32))
        np.testing.assert_array_equal(numbers != 0, jc.sparsity.mask(score, 2, 4, axis=0))
        again, _ = pruned(single(w), single(x), [step, jc.ptq.gptq()])
        np.testing.assert_array_equal(again != 0, numbers != 0)


@further
@pytest.mark.parametrize(
    "weight",
    [
        "int4(group=16)",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("uint4(group=16,zero_point=integer)", "nf4(group=16)", "nvfp4", "float8_e5m2")
        ),
    ],
)
def every_format_is_pruned_in_the_sweep(weight: str) -> None:
    w, x = layer(32, 12, 256)
    w, x = single(w + 1), single(x)
    errors = []
    for steps in ([MAGNITUDE], [INPUTS, jc.ptq.sign_round(20)], [LOSS, jc.ptq.gptq()]):
        numbers, row = pruned(w, x, steps, weight)
        assert most_in_groups(numbers, 4) == 2 and row.sparsity >= 0.5
        errors.append(float(jnp.linalg.norm(x @ (w - numbers))))
    assert errors[2] < errors[1] < errors[0]
    assert (row.method, row.before > row.after) == ("sparse, gptq", True)


def test_scales_are_those_of_the_numbers_that_stay() -> None:
    w, x = layer(32, 12, 256)
    x[:, 0] = 1e-3  # so the first input is pruned, whose weights are the largest
    w[0] = 100
    packed = jc.quantize_fn(dense, jc.Rule(weight="int8(group=all)")).pack(
        single(w), batches=[single(x)], steps=[INPUTS]
    )
    assert float(packed.scale.max()) < 10 / 127


def test_a_last_group_that_is_shorter_and_columns_without_inputs() -> None:
    w, x = layer(30, 12, 256)
    x[:, :6] = 0  # a whole group, and half of another
    for steps in ([LOSS, jc.ptq.gptq()], [LOSS, jc.ptq.gptq("plain", block=1)], [INPUTS]):
        numbers, row = pruned(single(w), single(x), steps)
        stays = numbers != 0
        assert most_in_groups(numbers, 4) == 2 and row.dead == 6
        np.testing.assert_array_equal(stays[:4], largest(np.abs(w[:4]), 2, 4))  # nothing else to go by
        assert not stays[4:6].any() and stays[6:8].all() and stays[28:].all()


@further
def other_layouts() -> None:
    w, x = map(single, layer(32, 12, 256))
    wanted, _ = pruned(w, x, [LOSS, jc.ptq.gptq()])

    def experts(p: Any, x: Any) -> Any:
        return jnp.einsum("ebk,enk->ebn", x, p)

    found = jc.quantize_fn(experts, jc.Rule(weight="binary32")).pack(
        jnp.stack([w.T, 2 * w.T]), batches=[jnp.stack([x, x])], steps=[LOSS, jc.ptq.gptq()]
    )
    np.testing.assert_allclose(jc.dequantize(found), np.stack([wanted.T, 2 * wanted.T]), rtol=1e-4, atol=1e-5)

    def stack(p: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (h, h @ w), x, p)[1]

    found, report = jc.quantize_fn(stack, "binary32").pack(
        jnp.stack([w, -w]), batches=[x], steps=[LOSS, jc.ptq.gptq()], return_report=True
    )
    np.testing.assert_allclose(jc.dequantize(found), np.stack([wanted, -wanted]), rtol=1e-4, atol=1e-5)
    assert [row.sparsity for row in report.weights] == [0.5, 0.5]


def test_a_convolution_is_pruned_along_its_channels() -> None:
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 8, 5))  # HWIO
    image = jax.random.normal(jax.random.key(1), (4, 9, 9, 8))

    def conv(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    rule = jc.Rule(weight="binary32")
    packed = jc.quantize_fn(conv, rule).pack(kernel, batches=[image], steps=[MAGNITUDE])
    wanted = conv(kernel * jc.sparsity.mask(kernel, 2, 4, axis=2), image)
    np.testing.assert_allclose(jc.quantize_fn(conv, rule)(packed, image), wanted, rtol=1e-4, atol=1e-4)


@further
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def it_composes_with_the_other_steps(every: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"first": jax.random.normal(keys[0], (32, 48)) / 6, "second": jax.random.normal(keys[1], (48, 8)) / 7}
    x = jax.random.normal(keys[2], (256, 8)) @ jax.random.normal(keys[0], (8, 32))

    def network(p: Any, x: Any) -> Any:
        return jax.nn.relu(x @ p["first"]) @ p["second"]

    rule = jc.Rule(weight="int4(group=16)")
    low, y = jc.quantize_fn(network, rule), network(params, x)
    errors = []
    both = [LOSS, jc.ptq.gptq()]
    for steps in ([MAGNITUDE], both, [jc.ptq.correct_error(), *both])[: 2 + every]:
        packed, report = jc.quantize_fn(network, rule).pack(params, batches=[x], steps=steps, return_report=True)
        assert all(most_in_groups(np.asarray(jc.dequantize(q)), 4) == 2 for q in packed.values())
        errors.append(float(jnp.linalg.norm(low(packed, x) - y)))
    assert errors[1] < 0.6 * errors[0]
    if every:
        assert errors[2] < errors[1]
    assert [row.method for row in report.weights] == ["correct_error, " * every + "sparse, gptq"] * 2
    assert "zeros" in str(report) and report.as_dict()["weights"][0]["sparsity"] >= 0.5


@further
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def a_format_that_drops_numbers_is_pruned_in_the_sweep(every: bool) -> None:
    """The text sparse=2:4 is the step and the packed form in one: SparseGPT, Wanda, or magnitudes without data."""
    w, x = layer()
    y, made = x @ w, {}
    text = "int4(group=32,scale=bfloat16,sparse=2:4)"
    rule, dense_rule = jc.Rule(weight=text), jc.Rule(weight="int4(group=32,scale=bfloat16)")
    for name, steps in {
        "nearest": [],
        "loss": [jc.ptq.gptq()],
        **({"inputs": [INPUTS], "plain": [jc.ptq.gptq("plain")], "sign": [jc.ptq.sign_round(20)]} if every else {}),
    }.items():
        packed, report = jc.quantize_fn(dense, rule).pack(
            single(w), batches=[single(x)], steps=steps, return_report=True
        )
        numbers = np.asarray(jc.dequantize(packed))
        assert isinstance(packed, jc.QArray) and 8 * packed.nbytes == (3 + 16 / 32) * w.size
        assert most_in_groups(numbers, 4) == 2 and report.weights[0].bits == 3.5
        np.testing.assert_allclose(jc.quantize_fn(dense, rule)(packed, single(x)), x @ numbers, rtol=1e-3, atol=1e-2)
        made[name] = np.linalg.norm(y - x @ numbers) / np.linalg.norm(y)
        if name in ("plain", "loss"):  # the codes of the step and the dense format
            same = jc.quantize_fn(dense, dense_rule).pack(single(w), batches=[single(x)], steps=[LOSS, *steps])
            np.testing.assert_array_equal(jc.dequantize(same), numbers)
    assert made["loss"] < 0.19 < 0.24 < made["nearest"] < 0.37
    if every:
        assert made["loss"] < made["plain"] < 0.19 < made["inputs"] < 0.24 and made["sign"] < made["nearest"]
    np.testing.assert_array_equal(
        jc.dequantize(jc.quantize_fn(dense, rule).pack(single(w), batches=[single(x)], steps=[])),
        jc.round_to_format(single(w.T), text).T,
    )


def check_stack() -> None:
    w, x = map(single, layer(32, 12, 256))
    rule = jc.Rule(weight="int4(group=16,sparse=2:4)")
    wanted = jc.quantize_fn(dense, rule).pack(w, batches=[x])

    def stack(p: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (h, h @ w), x, p)[1]

    found = jc.quantize_fn(stack, rule).pack(jnp.stack([w, -w]), batches=[x])
    np.testing.assert_array_equal(jc.dequantize(found[0]), jc.dequantize(wanted))
    assert found.nbytes == 2 * wanted.nbytes


def check_convolution() -> None:
    kernel, image = (jax.random.normal(jax.random.key(i), v) for i, v in enumerate([(3, 3, 3, 5), (4, 7, 7, 3)]))

    def conv(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    packed, report = jc.quantize_fn(conv, jc.Rule(weight="int8(channel=0,sparse=2:4)")).pack(
        kernel, batches=[image], return_report=True
    )
    numbers = np.asarray(packed.dequantize())
    assert most_in_groups(numbers.reshape(27, 5), 4) == 2 and report.weights[0].after > report.weights[0].before


@pytest.mark.parametrize("check", [check_stack, pytest.param(check_convolution, marks=pytest.mark.slow)])
def test_formats_that_drop_numbers_in_other_layouts(check: Any) -> None:
    check()


@further.first
def bad_arguments() -> None:
    rule, w, x = jc.Rule(weight="int4"), jnp.ones((8, 2)), jnp.ones((4, 8))
    with pytest.raises(ValueError, match="n=4 must be an integer from 1 to 3"):
        jc.ptq.sparse(4, 4)
    with pytest.raises(ValueError, match="by='wanda' must be one of 'loss', 'inputs', 'magnitude'"):
        jc.ptq.sparse(2, 4, by="wanda")  # type: ignore[arg-type]
    for steps in ([LOSS], [LOSS, jc.ptq.sign_round()]):
        with pytest.raises(ValueError, match="prunes in the sweep of gptq: add it, or choose by='inputs'"):
            jc.quantize_fn(dense, rule).pack(w, batches=[x], steps=steps, return_report=True)
    with pytest.raises(ValueError, match="then one sparse, then one clip"):
        jc.quantize_fn(dense, rule).pack(w, batches=[x], steps=[jc.ptq.gptq(), LOSS], return_report=True)
    for weight, why in (
        ("int4(sparse=1:4)", "which 'int4.*' does otherwise; leave one of them out"),
        ("int4(group=all,sparse=2:4,sparse_axis=0)", "counts along another axis than the sum"),
    ):
        with pytest.raises(ValueError, match=why):
            jc.quantize_fn(dense, jc.Rule(weight=weight)).pack(w, batches=[x], steps=[MAGNITUDE], return_report=True)
    for weight in ("uint4(group=4,zero_point=float)", "codebook(-1,-0.5,0.5,1,group=4)"):
        with pytest.raises(ValueError, match=r"makes numbers of '' zero, which .* does not have"):
            jc.quantize_fn(dense, jc.Rule(weight=weight)).pack(w, batches=[x], steps=[MAGNITUDE], return_report=True)


test_further = further.test()
