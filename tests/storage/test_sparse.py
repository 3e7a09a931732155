"""Formats that keep n of every m numbers: rounding, codes, shapes, files, against NumPy."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._checkpoints.row import pieces
from jchop._storage import fit_half_quadratic
from jchop._storage._array import check_group_sharding
from jchop._storage._chunks import TensorRule, quantize_file
from jchop._storage._codes import check_qarray_leaves
from jchop._storage._save import join_qarray, qarray_description, qarray_tensors
from jchop.optim._pack import as_state_rules

further = Further()

X = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
FORMATS = [
    "int4(group=32,axis=0,scale=bfloat16,sparse=2:4)",
    "nf4(group=16,sparse=2:4)",
    "nvfp4(axis=0,sparse=2:4)",
    "nvfp4(rule=four_over_six,sparse=1:4)",
    "mxfp4(group=16,sparse=4:8)",
    "float8_e4m3fn(channel=0,sparse=2:4)",
    "codebook(-1,1,group=8,sparse=2:4)",
    "uint4(group=16,zero_point=integer,sparse=2:4)",
    "uint4(group=16,axis=0,zero_point=float,sparse=1:2)",
    "int3(group=12,rule=mse,sparse=2:3)",
    "codebook(-1,1,group=12,rule=mse,sparse=1:3)",
    "int8(group=all,rule=percentile(90),sparse=3:4)",
    "int4(group=16,scale=uint8(group=2,zero_point=float),sparse=2:4)",
    "int8(sparse=2:4)",
]


def largest(x: np.ndarray, n: int, m: int, axis: int) -> np.ndarray:
    """Which numbers are the n largest of every m along an axis of whole groups; of equal ones the first."""
    lines = np.moveaxis(np.abs(x), axis, -1)
    groups = lines.reshape(*lines.shape[:-1], -1, m)
    rank = np.argsort(np.argsort(-groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.moveaxis((rank < n).reshape(lines.shape), -1, axis)


def compact(x: np.ndarray, kept: np.ndarray, axis: int) -> np.ndarray:
    lines, which = np.moveaxis(x, axis, -1), np.moveaxis(kept, axis, -1)
    return np.moveaxis(lines[which].reshape(*lines.shape[:-1], -1), -1, axis)


def test_int4_is_that_of_a_loop() -> None:
    """Magnitudes, the scale of what is kept, codes rounded to nearest, and bytes, by the definition."""
    q = jc.quantize(X, "int4(group=32,axis=0,sparse=2:4)")
    kept, out = largest(X, 2, 4, 0), np.zeros_like(X)
    for j in range(X.shape[1]):
        for start in (0, 32):
            own = np.where(kept[start : start + 32, j], X[start : start + 32, j], 0)
            scale = np.float32(np.abs(own).max() / np.float32(7))
            codes = np.clip(np.rint(own.astype(np.float64) / np.float64(scale)), -8, 7)
            out[start : start + 32, j] = codes.astype(np.float32) * scale
            assert q.scale[start // 32, j] == scale
    np.testing.assert_array_equal(jc.round_to_format(X, "int4(group=32,axis=0,sparse=2:4)"), out)
    np.testing.assert_array_equal(jc.dequantize(q), out)
    assert isinstance(q.places, np.ndarray) and q.places.shape == (64, 6) and q.qvalue.shape == (32, 24)
    np.testing.assert_array_equal(np.unpackbits(q.places, axis=1, bitorder="little"), kept)
    assert 8 * (q.qvalue.nbytes + q.places.nbytes) == 3 * X.size and not np.signbit(out[~kept]).any()


@further.first
@pytest.mark.parametrize("text", FORMATS)
def scales_are_those_of_the_kept_numbers(text: str) -> None:
    """Rounding is that of the array of the kept numbers alone, in groups as much shorter."""
    fmt = jc.Spec(text).scaled
    assert fmt is not None and fmt.sparse is not None
    (n, m), axis = fmt.sparse, fmt.axis_of_sparse
    kept = largest(X, n, m, axis)
    group = fmt.group * n // m if isinstance(fmt.group, int) else fmt.group
    alone = fmt.dense if fmt.group is None else fmt.dense(group=group)
    wanted = np.zeros_like(X)
    np.moveaxis(wanted, axis, -1)[np.moveaxis(kept, axis, -1)] = np.moveaxis(
        np.asarray(jc.round_to_format(jnp.asarray(compact(X, kept, axis)), alone)), axis, -1
    ).ravel()
    np.testing.assert_array_equal(jc.round_to_format(jnp.asarray(X), text), wanted)
    q = jax.jit(lambda x: jc.quantize(x, text))(X)
    np.testing.assert_array_equal(jc.dequantize(q), wanted)
    assert q.shape == X.shape and q.bits_per_element == pytest.approx(
        q.spec.scaled.bits_per_element(X.shape), rel=1e-12
    )
    np.testing.assert_array_equal(jc.fit_scale(jnp.asarray(X), text)[0][0] if isinstance(q.scale, tuple) else
                                  jc.fit_scale(jnp.asarray(X), text)[0],
                                  q.scale[0] if isinstance(q.scale, tuple) else q.scale)  # fmt: skip


@further
def energy_and_bits_of_a_large_array() -> None:
    w = np.random.default_rng(0).normal(size=(512, 512))
    kept = np.asarray(jc.round_to_format(w, "integer32(group=all,scale=binary64,sparse=2:4)"))
    assert abs((kept**2).sum() / (w**2).sum() - 0.8676) < 5e-5
    q = jc.quantize(w.astype(np.float32), "int4(group=128,scale=bfloat16,sparse=2:4)")
    assert q.bits_per_element == 3 + 16 / 128


@further
def zeros_ties_nan_and_short_groups() -> None:
    text = "float8_e4m3fn(group=all,scale=e8m0,rule=ceil,sparse=2:4)"
    x = np.array([1, -1, 1, 1, -0.0, -0.0, -0.0, 0.0, np.nan, np.inf, 1, 2, 3, -3, 3], np.float32)
    y = np.asarray(jc.round_to_format(x, text))
    np.testing.assert_array_equal(y[[0, 1, 2, 3]], [1, -1, 0, 0])
    assert np.signbit(y[[4, 5, 6, 7]]).tolist() == [True, True, False, False]
    assert np.isnan(y[8]) and y[9] >= 2 and not y[10:12].any()
    np.testing.assert_array_equal(y[12:], [3, -3, 0])
    q = jc.quantize(x, text)
    np.testing.assert_array_equal(jc.dequantize(q), y)
    assert q.qvalue.shape == (8,) and q.places.shape == (2,)
    one = jc.quantize(np.array([2.0], np.float32), "int4(sparse=1:4)")
    assert one.qvalue.shape == (1,) and jc.dequantize(one).tolist() == [2.0]
    none = jc.quantize(jnp.zeros((0, 8)), "int4(group=4,sparse=2:4)")
    assert none.shape == (0, 8) and jc.dequantize(none).shape == (0, 8)
    lost = jc.round_to_format(np.array([np.inf, 1, 2, 3], np.float32), "mxfp4(nan_block=True,sparse=2:4)")
    assert np.isnan(lost[[0, 3]]).all() and lost[1] == lost[2] == 0


@further
def gradients_pass_straight_through() -> None:
    text, x = "int4(group=16,sparse=2:4)", jnp.asarray(X)
    np.testing.assert_array_equal(jax.grad(lambda x: (jc.round_to_format(x, text) * X).sum())(x), X)
    clipped = jax.grad(lambda x: jc.round_to_format(x, f"{text}:gradient=clipped").sum())(x)
    np.testing.assert_array_equal(clipped, np.ones_like(X))
    q = jc.quantize(x, "float8_e4m3fn(group=16,sparse=2:4)")
    moved = jax.grad(lambda q: (jc.dequantize(q) * X).sum(), allow_int=True)(q)
    element = np.asarray(jc.dequantize(q)) / np.repeat(np.asarray(q.scale), 16, 1)
    np.testing.assert_allclose(moved.scale, (element * X).reshape(64, 3, 16).sum(-1), rtol=1e-4)
    codes = compact(X * np.repeat(np.asarray(q.scale), 16, 1), largest(X, 2, 4, 1), 1)
    np.testing.assert_allclose(moved.qvalue.astype(jnp.float32), codes, rtol=0.07, atol=1e-2)


@further
def stochastic_bits_are_those_of_the_place() -> None:
    text, key = "int4(group=16,sparse=2:4):stochastic", jax.random.key(0)
    x = jnp.asarray(X)
    whole = jc.round_to_format(x, text, key)
    np.testing.assert_array_equal(jc.dequantize(jc.quantize(x, text, key)), whole)
    part = jc.round_to_format(x[16:32], text, key, offset=((16, 0), X.shape))
    np.testing.assert_array_equal(part, whole[16:32])


@further
@pytest.mark.parametrize("text", [FORMATS[0], "int8(channel=-1,sparse=2:4,sparse_axis=0)", "nvfp4(axis=-2,sparse=2:4)"])
@pytest.mark.parametrize("numpy", [False, True])
def axes_are_moved_and_cut_between_groups(text: str, numpy: bool) -> None:
    q = jc.quantize(X if numpy else jnp.asarray(X), text)
    y = np.asarray(jc.dequantize(q))
    moves: list[Any] = [
        lambda v: v.T,
        lambda v: v[32:],
        lambda v: v[:, 5],
        lambda v: v[:32, 3:30:2],
        lambda v: v[..., [7, 1]],
    ]
    moves += [lambda v: v.T.T, lambda v: v.T[4, 32:]]
    if "channel" not in text:
        moves += [lambda v: v.reshape(2, 32, 48), lambda v: v.reshape(64, 6, 8)]
    for move in moves:
        found = move(q)
        assert isinstance(found, jc.QArray) and type(found.places) is type(q.places)
        np.testing.assert_array_equal(jc.dequantize(found), move(y))
        assert jc.quantize(np.zeros(found.shape, np.float32), found.spec).spec == found.spec
    for cut in (lambda v: v[2:], lambda v: v[5], lambda v: v[::2], lambda v: v[jnp.arange(4)]):
        with pytest.raises(ValueError, match=r"cuts groups of|along axis 0"):
            cut(q)
    with pytest.raises(ValueError, match="would split groups"):
        q.T.reshape(-1, 2)


@further
def transformations() -> None:
    text = "int4(group=16,sparse=2:4)"
    stack = jnp.asarray(np.stack([X, 2 * X, X[::-1]]))
    many = jax.vmap(lambda x: jc.quantize(x, text))(stack)
    assert many.shape == stack.shape
    wanted = jnp.stack([jc.round_to_format(x, text) for x in stack])
    np.testing.assert_array_equal(jc.dequantize(many), wanted)
    np.testing.assert_array_equal(jax.vmap(jc.dequantize)(many), wanted)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, q: (c, jc.dequantize(q)), 0, many)[1], wanted)
    np.testing.assert_array_equal(jc.dequantize(many[1]), wanted[1])
    q = many[0]
    exported = jax.export.export(jax.jit(lambda q: jc.dequantize(q)))(q)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(q), wanted[0])
    np.testing.assert_array_equal(jnp.matmul(jnp.ones((2, 64)), q.astype("float32")), jnp.ones((2, 64)) @ wanted[0])
    np.testing.assert_array_equal(jc.dequantize(q, add_to=jnp.ones_like(wanted[0])), 1 + wanted[0])


@further
def files_and_what_is_shown(tmp_path: pathlib.Path) -> None:
    tree = {"w": jc.quantize(jnp.asarray(X), FORMATS[0]), "u": jc.quantize(X, FORMATS[6]), "b": jnp.ones(3)}
    jc.save(tmp_path / "m.safetensors", tree)
    found = jc.load(tmp_path / "m.safetensors", like=tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "sparse=2:4" in repr(found["w"]) and "sparse=2:4" in found["w"]._repr_html_()
    assert "2 of every 4 numbers along axis -2" in found["w"].spec._repr_html_()
    wrong = qarray_description(tree["w"]) | {"spec": "int4(group=32,axis=-2,scale=bfloat16)"}
    leaves = list(qarray_tensors("w", tree["w"]).values())
    for parts, fields in ((leaves[:2], wrong), ([*leaves[:2], leaves[2][:-4]], qarray_description(tree["w"]))):
        with pytest.raises(ValueError, match=r"the leaves are|does not fit"):
            check_qarray_leaves(join_qarray(parts, fields))
    with pytest.raises(ValueError, match="has places, which are missing"):
        check_qarray_leaves(replace(tree["w"], places=None))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", [FORMATS[0], "int4(group=8,sparse=2:4)", "nf4(channel=0,sparse=2:4)"])
def test_a_file_in_chunks_is_the_whole(tmp_path: pathlib.Path, text: str) -> None:
    jc.save(tmp_path / "a.safetensors", {"w": X})
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    quantize_file(source, target, [TensorRule("w", jc.Spec(text))], chunk=1 << 11)
    found, wanted = jc.load(target)["w"], jc.quantize(X, text)
    assert found.spec == wanted.spec
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@further
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")
@pytest.mark.parametrize("text", [FORMATS[0], "int4(group=8,sparse=2:4)"])
def placed_on_devices(text: str) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    q = jc.quantize(jnp.asarray(X), text)
    rows = NamedSharding(mesh, P("a", None))
    placed = jax.device_put(q, q.shardings(rows))
    assert placed.places.sharding.spec == placed.qvalue.sharding.spec == P("a", None)
    np.testing.assert_array_equal(jax.jit(jc.dequantize)(placed), jc.dequantize(q))

    def whole(q: Any) -> Any:
        return jc.dequantize(jc.distributed.unshard(q, "a"))

    gather = jax.shard_map(whole, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)
    np.testing.assert_array_equal(jax.jit(gather)(placed), jc.dequantize(q))
    cut = P(("a", "b"), None) if "axis=0" in text else P(None, ("a", "b"))
    with pytest.raises(ValueError, match="whole groups of"):
        check_group_sharding(q, NamedSharding(mesh, cut), "w")


def test_what_is_refused() -> None:
    q = jc.quantize(jnp.asarray(X), "int4(group=16,scale=bfloat16,sparse=2:4)")
    with pytest.raises(ValueError, match="sparse_axis=-1 is not an axis of an array of 0 dimensions"):
        jc.round_to_format(1.0, "int4(sparse=2:4)")
    with pytest.raises(ValueError, match="sparse_axis=3 is not an axis of an array of 2 dimensions"):
        jc.quantize(X, "int4(group=16,sparse=2:4,sparse_axis=3)")
    with pytest.raises(ValueError, match=r"messages hold codes of all; leave sparse out"):
        jc.distributed.psum(jnp.ones(4), "i", "int4(group=4,sparse=2:4)")
    with pytest.raises(ValueError, match="drops numbers, which a state needs"):
        as_state_rules({"*": "int8(group=64,sparse=2:4)"})
    with pytest.raises(ValueError, match="it stores no codes of the numbers that sparse drops"):
        jc.dot(jnp.ones((2, 64)), q)
    with pytest.raises(ValueError, match="keep all numbers: leave sparse out"):
        jc.Rule(weight="int4(group=16,sparse=2:4)", scale_from=jc.LSQ())
    with pytest.raises(ValueError, match="drops numbers, which the search does not"):
        fit_half_quadratic(X, "uint4(group=16,zero_point=float,sparse=2:4)")
    with pytest.raises(ValueError, match="codes of some numbers alone"):
        pieces(q)


test_further = further.test()
