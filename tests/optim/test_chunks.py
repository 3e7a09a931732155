"""Steps taken chunk by chunk beside those of whole arrays."""

# Optax types every state as a tree of arrays, which has no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import Further

import jchop as jc
from jchop.optim import _join
from jchop.optim._join import plan_joining
from jchop.optim._pack import is_packed_leaf
from jchop.optim._state import plan_chunks

further = Further()

KEY = jax.random.key(5)


def params_of(rng: np.random.Generator) -> dict[str, Any]:
    """Leaves that can be cut in four, among them two whose paths end alike; and others."""
    shapes = {"w": (8, 64), "v": (1024,), "odd": (3, 64), "joined": (4, 4, 8), "b": (8,), "s": ()}
    some = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return some | {"inner": {"w": jnp.asarray(rng.standard_normal((4, 64)), jnp.float32)}}


def run(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    step = jax.jit(lambda g, s, p: (lambda made: (optax.apply_updates(p, made[0]), made[1]))(tx.update(g, s, p)))
    state = jax.jit(tx.init)(params)
    for g in grads:
        params, state = step(g, state, params)
    return params, state


def assert_same(got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """The same codes and scales; parameters but for how a product and a sum are contracted."""
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert jax.tree.structure(got[1]) == jax.tree.structure(expected[1])
    states = ((s.arrays, s.scales, s.skipped) for s in (got[1], expected[1]))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@further
def a_step_in_chunks_is_that_of_whole_arrays(rng: np.random.Generator) -> None:
    params = {"w": params_of(rng)["w"], "odd": jnp.ones((3, 32))}
    grads = [jax.tree.map(lambda p, k=k: jnp.sin(k * p), params) for k in (1, 2, 3)]
    grads[1]["w"] = grads[1]["w"].at[5, 0].set(jnp.nan)  # in a chunk: the whole step is left out
    rules = {"0.mu": "mxfp8_e4m3", "0.nu": "bfloat16:stochastic"}
    results = [
        run(jc.optim.quantize_state(optax.adamw(1e-2), rules, KEY, min_size=32, chunks=n), params, grads)
        for n in (1, 4)
    ]
    assert int(results[1][1].skipped) == 1
    assert_same(*results)


@further
def numbers_that_are_not_finite_may_pass_in_chunks(rng: np.random.Generator) -> None:
    params = {name: params_of(rng)[name] for name in ("v", "b")}
    bad = jax.tree.map(jnp.ones_like, params)
    bad["v"] = bad["v"].at[600].set(jnp.inf)
    made = [
        run(
            jc.optim.quantize_state(optax.sgd(0.1, 0.9), "mxfp8_e4m3", min_size=32, nonfinite="propagate", chunks=n),
            params,
            [bad, bad],
        )
        for n in (1, 4)
    ]
    assert np.isnan(jc.dequantize(made[1][1].inner_state[0].trace["v"])).sum() == 32
    assert_same(*made)


@further
def adamw8bit_in_chunks(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.standard_normal((16, 512)), jnp.float32)}
    grads = [jax.tree.map(lambda p, k=k: jnp.sin(k * p), params) for k in range(4)]
    assert_same(*(run(jc.optim.adamw8bit(1e-2, chunks=n), params, grads) for n in (1, 4)))


def cut_leaves(params: Any, spec: Any, count: int, **options: Any) -> list[bool]:
    """For each parameter whether it would be cut."""
    tx = jc.optim.quantize_state(optax.adam(1e-3), spec, min_size=32, **options)
    state = jax.eval_shape(tx.init, params)
    found = plan_chunks(params, state.inner_state, count)
    return [] if found is None else list(found.update_is_cut)


def test_which_arrays_are_cut(rng: np.random.Generator) -> None:
    params = params_of(rng)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    assert names == ["b", "innerw", "joined", "odd", "s", "v", "w"]
    assert cut_leaves(params, "mxfp8_e4m3", 4) == [name in ("innerw", "v", "w") for name in names]
    assert cut_leaves(params, "mxfp8_e4m3", 3) == [name == "odd" for name in names]
    assert cut_leaves(params, "bfloat16", 4) == [name in ("innerw", "joined", "w") for name in names]
    # A group of whole columns, or of the tensor, is left whole; and so is a vector between its groups.
    assert cut_leaves({"w": jnp.ones((8, 64))}, "int8(group=tensor)", 4) == []
    assert cut_leaves({"w": jnp.ones((8, 64))}, "int8(channel=1)", 4) == []
    assert cut_leaves({"w": jnp.ones((8, 64))}, "int8(channel=0)", 4) == [True]
    assert cut_leaves({"w": jnp.ones(1024)}, "int8(group=512)", 4) == []
    assert cut_leaves(params, "mxfp8_e4m3", 5) == []


@further.first
def nothing_is_left_of_a_cut_leaf(rng: np.random.Generator) -> None:
    params = params_of(rng)
    state = jax.jit(jc.optim.quantize_state(optax.adam(1e-3), "mxfp8_e4m3", min_size=32).init)(params)
    cut = plan_chunks(params, state.inner_state, 4)
    assert cut is not None
    leaves, structure = jax.tree.flatten(state.inner_state, is_leaf=is_packed_leaf)
    updates, rest, none = cut.part(params, leaves, None)
    inner = structure.unflatten(rest)
    assert none is None and updates["w"].shape == (0, 64) and updates["odd"].shape == (3, 64)
    assert inner[0].mu["w"].shape == (0, 64) and is_packed_leaf(inner[0].mu["odd"]) and inner[0].count.shape == ()
    updates, chunk, _ = cut.part(params, leaves, params, jnp.asarray(1))
    inner = structure.unflatten(chunk)
    np.testing.assert_array_equal(updates["v"], params["v"][256:512])
    assert inner[0].nu["v"].shape == (256,) and updates["s"].shape == (0,) and inner[0].count.shape == ()


# -- leaves as one array of rows, in programs for one CPU --------------------------------------------------------------


def joined_params(rng: np.random.Generator, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Equal leaves; one whose last axes are joined; one with a part of a group; small ones."""
    shapes = {"a": (64, 256), "b": (64, 256), "c": (4, 8, 128), "d": (50, 77), "e": (9,), "f": (4096,), "g": (3, 5)}
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


PRESETS = ["adamw8bit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adamw_fp8", "adamw4bit", "lion8bit"))]


@pytest.mark.parametrize("chunk", [1 << 18, 13_000])
@pytest.mark.parametrize("name", PRESETS)
def test_joined_leaves_have_the_bits_of_single_ones(
    name: str, chunk: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a step that is left out, and in chunks that do not divide the rows."""
    make, params = lambda: getattr(jc.optim, name)(optax.linear_schedule(1e-2, 1e-3, 3)), joined_params(rng)
    for name_of_limit in ("_FASTEST_CHUNK", "_FEWEST_CUT"):
        monkeypatch.setattr(_join, name_of_limit, chunk)
    grads = [jax.tree.map(lambda p, k=k: jnp.sin(k * p), params) for k in (1, 2, 3)]
    grads[1]["b"] = grads[1]["b"].at[5, 0].set(jnp.nan)
    single = run(make(), params, grads)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    joined = run(make(), params, grads)
    assert int(joined[1].skipped) == 1
    assert_same(joined, single)


def test_a_step_has_one_program_for_leaves_of_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tx = jc.optim.adamw8bit(1e-3)

    def lines(shapes: list[tuple[int, ...]]) -> int:
        params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params)
        return len(str(lowered.compile().as_text()).splitlines())

    two, five = lines([(16, 256)] * 2), lines([(16, 256)] * 3 + [(32, 256), (8, 4, 256)])
    assert five - two < 3 * 200


def test_chunks_save_the_memory_of_joined_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    params = [jax.ShapeDtypeStruct((64, 1024), jnp.float32)] * 4

    def bytes_of(chunks: int | None) -> int:
        tx = jc.optim.adamw8bit(1e-3, chunks=chunks)
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params)
        return lowered.compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    assert 5 * bytes_of(8) < 4 * bytes_of(None)


def test_leaves_of_one_kind_are_joined(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if the state has packed arrays in a tree of another structure, as beside a mask."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    found = []

    def plan(tx: Any, params: Any) -> None:
        state = jc.optim.quantize_state(tx, "dynamic8", min_size=64).init(params).inner_state
        found.append(plan_joining(params, state, params))

    masked = optax.masked(optax.adam(1e-3), {name: name < "c" for name in "abcdefg"})
    for tx in (optax.adam(1e-3), masked):
        jax.eval_shape(partial(plan, tx), joined_params(rng))
    assert ["".join("abcdefg"[k] for k in group) for group in found[0].groups] == ["abcf", "d", "eg"]
    assert found[1] is None


def test_chunks_is_a_count() -> None:
    with pytest.raises(ValueError, match="chunks=0 must be an integer >= 1"):
        jc.optim.adamw8bit(1e-3, chunks=0)


test_further = further.test()
