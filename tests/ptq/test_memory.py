"""Statistics of some weights at a time: the same codes, no more bytes than are allowed, and the passes that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from jchop.ptq._data.passes import BatchData, split_stages
from jchop.ptq._data.sites import Stage

further = Further()

RULE = jc.Rule(weight="int4(group=8)", activation="int8(group=all)")


def network(p: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ p["a"])
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["s"], reverse=True)
    return h @ p["b"]


def problem() -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    shapes = {"a": (32, 24), "s": (5, 24, 24), "b": (24, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 5, jnp.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(512, 32)) @ rng.normal(size=(32, 32)) / 5
    return params, [jnp.asarray(v, jnp.float32) for v in np.split(x, 2)]


def held_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of the statistics of each pass, collected as they are made."""
    found: list[int] = []
    plain = BatchData.sums

    def told(self: BatchData, *args: Any, **more: Any) -> Any:
        sums, last = plain(self, *args, **more)
        found.append(sum(v.nbytes for v in jax.tree.leaves(sums)))
        return sums, last

    monkeypatch.setattr(BatchData, "sums", told)
    return found


@further
@pytest.mark.parametrize(
    ("steps", "memory", "passes"),
    [
        ([jc.ptq.gptq()], "60 KiB", 2),
        pytest.param([jc.ptq.gptq()], "20KiB", 5, marks=pytest.mark.slow),  # a; two turns, two, one; b
        pytest.param([jc.ptq.gptq()], 10**6, 1, marks=pytest.mark.slow),
        pytest.param([jc.ptq.correct_error(), jc.ptq.gptq()], "40KiB", 7, marks=pytest.mark.slow),
    ],
)
def the_codes_are_those_of_one_pass(steps: Any, memory: Any, passes: int, monkeypatch: Any) -> None:
    params, batches = problem()
    whole, one = jc.quantize_fn(network, RULE).pack(params, batches=batches, steps=steps, return_report=True)
    found = held_bytes(monkeypatch)
    parts, several = jc.quantize_fn(network, RULE).pack(
        params, batches=batches, steps=steps, memory=memory, return_report=True
    )
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    rows = {row.path: row for row in one.weights}
    assert {row.path: row for row in several.weights} == rows and several.passes == passes == len(found)
    most = memory if isinstance(memory, int) else int(memory.removesuffix("KiB")) * 1024
    assert 2 * max(found) <= most and sum(found) > 0


def test_windows_of_nested_loops_and_of_weights_that_share_an_input() -> None:
    def nested(p: Any, x: Any) -> Any:
        def outer(h: Any, own: Any) -> Any:
            def inner(h: Any, w: Any) -> Any:
                return jnp.tanh(h @ w["q"]) * jnp.tanh(h @ w["k"]) + h, None

            h, _ = lax.scan(inner, h, own)
            return jnp.tanh(h @ p["shared"]), None

        return lax.scan(outer, x, p["stack"])[0]

    rng = np.random.default_rng(0)
    params = {
        "shared": jnp.asarray(rng.normal(size=(16, 16)), jnp.float32),
        "stack": {name: jnp.asarray(rng.normal(size=(3, 2, 16, 16)) / 4, jnp.float32) for name in "qk"},
    }
    x = jnp.asarray(rng.normal(size=(100, 16)), jnp.float32)
    whole = jc.quantize_fn(nested, RULE).pack(params, batches=[x])
    parts, report = jc.quantize_fn(nested, RULE).pack(params, batches=[x], memory="20KiB", return_report=True)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert report.passes == 4  # a turn of the outer loop at a time, and the weight that all turns share


MAPPED = [jc.ptq.smooth(), jc.ptq.awq(3), jc.ptq.gptq()]


@pytest.mark.parametrize(
    "sequential, steps",
    [(False, MAPPED[:1]), *(pytest.param(n, MAPPED, marks=pytest.mark.slow) for n in (False, True))],
)
def test_mappings_look_at_weights_that_share_an_input(sequential: bool, steps: Any, monkeypatch: Any) -> None:
    def fun(p: Any, x: Any) -> Any:
        h = (x * p["scale"]) @ p["q"] * jax.nn.sigmoid((x * p["scale"]) @ p["k"])
        return jax.nn.relu(h @ p["v"]) @ p["o"]

    rng = np.random.default_rng(0)
    shapes = {"q": (16, 12), "k": (16, 12), "v": (12, 8), "o": (8, 4)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    params["scale"] = jnp.asarray(rng.uniform(0.5, 8, 16), jnp.float32)
    batches = [jnp.asarray(rng.normal(size=(40, 16)), jnp.float32) for _ in range(2)]
    low = jc.quantize_fn(fun, RULE)
    all_steps = [*[jc.ptq.sequential()] * sequential, *steps]
    whole, one = low.pack(params, batches=batches, steps=all_steps, return_report=True)
    found = held_bytes(monkeypatch)
    parts, several = low.pack(params, batches=batches, steps=all_steps, memory=9600, return_report=True)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert sorted(several.weights, key=str) == sorted(one.weights, key=str)
    assert several.passes == len(found) > one.passes and 2 * max(found) <= 9600
    with pytest.raises(ValueError, match=r"memory=9000 bytes is less than .* of 'q', 'k' need, all of which smooth"):
        jc.quantize_fn(fun, RULE).pack(params, batches=batches, steps=steps, memory=9000, return_report=True)


def test_stages_are_cut_by_their_bytes() -> None:
    def cut(stages: Sequence[Stage], sizes: Any, memory: int) -> list[Any]:
        found = split_stages(stages, sizes, memory, "abcd".__getitem__)
        assert {stage for part in found for stage in part.stages} == {*stages}
        return [(part.leaves, part.window, len(part.stages)) for part in found]

    flat = [Stage((0, 1)), Stage((2,)), Stage((3,))]
    sizes = {0: (10, 1), 1: (10, 1), 2: (5, 1), 3: (20, 1)}
    assert cut(flat, sizes, 45) == [((0, 1, 2, 3), None, 3)]
    assert cut(flat, sizes, 25) == [((0, 1, 2), None, 2), ((3,), None, 1)]
    with pytest.raises(
        ValueError, match="memory=19 bytes is less than the 20 bytes that the statistics of 'a', 'b' need"
    ):
        cut(flat, sizes, 19)
    loop = [Stage((0,), (turn,)) for turn in range(5)]
    assert cut(loop, {0: (10, 5)}, 25) == [((0,), (0, 2), 2), ((0,), (2, 2), 2), ((0,), (3, 2), 1)]


@further.first
def bad_arguments() -> None:
    params, batches = problem()
    for memory, kind in (
        ("4 giga", ValueError),
        (0, ValueError),
        ("0B", ValueError),
        (True, TypeError),
        (2.5, TypeError),
    ):
        with pytest.raises(kind, match=r"memory=.* must be a number of bytes above 0, or text such as '4GiB'"):
            jc.quantize_fn(network, RULE).pack(params, batches=batches, memory=memory, return_report=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can be run through once"):
        jc.quantize_fn(network, RULE).pack(params, batches=iter(batches), memory="4GiB", return_report=True)
    with pytest.raises(
        ValueError, match="memory=3000 bytes is less than the 17680 bytes that the statistics of 'a' need"
    ):
        jc.quantize_fn(network, RULE).pack(params, batches=batches, memory=3000, return_report=True)


@further
def an_error_names_the_weight_that_needs_the_most() -> None:
    """The first one that does not fit is another."""
    params = {"a": jnp.ones((16, 48)), "b": jnp.ones((48, 8))}
    fun = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]  # noqa: E731
    n = 48
    for steps, need in (
        ([jc.ptq.gptq()], 8 * (2 * n**2 + 5 * n + 2)),
        ([jc.ptq.correct_error(), jc.ptq.gptq()], 8 * (4 * n**2 + 7 * n + 2)),
    ):
        with pytest.raises(ValueError, match=f"less than the {need} bytes .* of 'b' need, the most of all"):
            jc.quantize_fn(fun, RULE).pack(
                params, batches=[jnp.ones((4, 16))], steps=steps, memory=100, return_report=True
            )


test_further = further.test()
