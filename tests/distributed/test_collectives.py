"""The quantized collectives against their replay in NumPy, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from distributed import replay
from distributed.replay import NEAREST, STOCHASTIC
from further import Further
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc
from jchop._spec.spec import parse
from jchop.distributed._messages import plan_piece_cut

further = Further()

KEY = jax.random.key(7)


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("outer", "d")[-len(sizes) :], axis_types=(AxisType.Auto,) * len(sizes))


def over(mesh: Mesh, fun: Callable[..., Any], *xs: Any, out: Any = None) -> Any:
    """`fun` of the entries along the first axis, one for each rank; results of all ranks along the first axis."""
    names = P(mesh.axis_names)

    def local(*xs: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], fun(*jax.tree.map(lambda leaf: leaf[0], xs)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=names, out_specs=names)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*xs))


def same(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.view(f"u{found.dtype.itemsize}"), wanted.view(f"u{wanted.dtype.itemsize}"))


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4, 8))])
def test_two_shot(ranks: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((ranks, 5, 37)).astype(np.float32)
    found = over(
        mesh_of(ranks),
        lambda x: (jc.distributed.psum(x, "d", NEAREST), jc.distributed.psum(x, "d", STOCHASTIC, KEY)),
        x,
    )
    for each, key in zip(found, (None, KEY), strict=True):
        same(each, np.stack([replay.psum(list(x), key)] * ranks))


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_ring(ranks: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((ranks, 150)).astype(np.float32)
    found = over(mesh_of(ranks), lambda x: jc.distributed.psum(x, "d", STOCHASTIC, KEY, algorithm="ring"), x)
    same(found, np.stack([replay.psum(list(x), KEY, replay.ring)] * ranks))


def test_operands_of_a_ring_draw_anew_in_each_turn(rng: np.random.Generator) -> None:
    operands = "bfloat16:stochastic"

    def add(total: np.ndarray, own: np.ndarray, key: Any, owner: int) -> np.ndarray:
        return jc.round_to_format(np.stack([total, own]), operands, replay.fold(key, owner, 0)).sum(0)

    x = rng.standard_normal((3, 48)).astype(np.float32)
    accumulate = jc.MatmulSpec(operands=operands, accumulate="float32")
    found = jax.vmap(
        lambda x: jc.distributed.psum(x, "d", STOCHASTIC, KEY, algorithm="ring", accumulate=accumulate), axis_name="d"
    )(x)
    same(found, np.stack([replay.psum(list(x), KEY, replay.ring, add)] * 3))


@pytest.mark.parametrize(
    ("inner", "spec", "key"), [(2, NEAREST, None), pytest.param(4, STOCHASTIC, KEY, marks=pytest.mark.slow)], ids=str
)
def test_hierarchical(inner: int, spec: str, key: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2 * inner, 150)).astype(np.float32)
    algorithm = jc.distributed.Hierarchical("d", "outer")
    found = over(mesh_of(2, inner), lambda x: jc.distributed.psum(x, ("outer", "d"), spec, key, algorithm=algorithm), x)
    same(found, np.stack([replay.psum(list(x), key, replay.two_stages, 2, inner)] * 2 * inner))


def test_the_inner_axis_of_a_hierarchy_may_be_named_first() -> None:
    def summed(x: Any) -> Any:
        algorithm = jc.distributed.Hierarchical("d", "outer")
        return jc.distributed.psum(x, ("d", "outer"), "binary32", algorithm=algorithm)

    x = np.arange(2 * 3 * 7, dtype=np.float32).reshape(2, 3, 7)
    found = jax.jit(jax.vmap(jax.vmap(summed, axis_name="outer"), axis_name="d"))(x)
    same(found, np.broadcast_to(x.sum((0, 1)), x.shape))


@further
@pytest.mark.parametrize(
    ("spec", "key"), [(NEAREST, None), pytest.param(STOCHASTIC, KEY, marks=pytest.mark.slow)], ids=str
)
def a_process_with_one_device_replays_with_vmap(spec: str, key: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 60)).astype(np.float32)
    found = jax.jit(jax.vmap(lambda x: jc.distributed.psum(x, "d", spec, key), axis_name="d"))(x)
    same(found, np.stack([replay.psum(list(x), key)] * 4))


def test_accumulators_in_rank_order(rng: np.random.Generator) -> None:
    def rounded(c: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (c.astype(np.float64) + x).astype(ml_dtypes.bfloat16).astype(np.float32)

    def from_zero(pieces: np.ndarray, key: Any) -> np.ndarray:
        totals = [np.zeros(pieces.shape[2], np.float32) for _ in pieces]
        for owner in range(len(pieces)):
            for rank in range(len(pieces)):
                totals[owner] = rounded(totals[owner], replay.sent(pieces[rank, owner]))
        return np.stack(totals)

    x = rng.standard_normal((4, 64)).astype(np.float32)
    found = over(mesh_of(4), lambda x: jc.distributed.psum(x, "d", NEAREST, accumulate="bfloat16"), x)
    same(found, np.stack([replay.psum(list(x), None, from_zero)] * 4))


OTHERS = ["scatter tiled", "permute", "scatter", "gather", "gather tiled", "exchange"]


@pytest.mark.parametrize("kinds", [OTHERS[:2], pytest.param(OTHERS[2:], marks=pytest.mark.slow)], ids=",".join)
def test_the_other_collectives(kinds: list[str], rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4, 16)).astype(np.float32)
    perm = [(0, 1), (1, 3), (3, 0)]

    def all_of(x: Any) -> dict[str, Any]:
        d = jc.distributed
        made = {
            "scatter": lambda: d.psum_scatter(x, "d", STOCHASTIC, KEY),
            "scatter tiled": lambda: d.psum_scatter(
                x[:, :2].repeat(16, 1), "d", NEAREST, scatter_dimension=1, tiled=True
            ),
            "gather": lambda: d.all_gather(x, "d", STOCHASTIC, KEY, axis=1),
            "gather tiled": lambda: d.all_gather(x, "d", NEAREST, axis=1, tiled=True),
            "exchange": lambda: d.all_to_all(x, "d", STOCHASTIC, KEY, concat_axis=1),
            "permute": lambda: d.ppermute(x, "d", STOCHASTIC, KEY, perm=perm),
        }
        return {kind: made[kind]() for kind in kinds}

    found = over(mesh_of(4), all_of, x)
    key = replay.fold(KEY, 0)
    wide = np.ascontiguousarray(np.moveaxis(x[:, :, :2].repeat(16, 2).reshape(4, 4, 4, 8), 2, 1))
    tiled = np.concatenate([replay.sent(each) for each in x], 1)
    pieces = [
        [replay.sent(x[rank, p], replay.fold(key, replay.SEND, 0, rank), p) for rank in range(4)] for p in range(4)
    ]
    moved = np.zeros_like(x)
    for source, target in perm:
        moved[target] = replay.sent(x[source], replay.fold(key, replay.SEND, 0), source)
    wanted = {
        "scatter": lambda: replay.exchange(x, key),
        "scatter tiled": lambda: replay.exchange(wide, None),
        "gather": lambda: np.stack([np.moveaxis(replay.gather(x, key), 0, 1)] * 4),
        "gather tiled": lambda: np.stack([tiled] * 4),
        "exchange": lambda: np.stack([np.stack(each, 1) for each in pieces]),
        "permute": lambda: moved,
    }
    for kind in kinds:
        same(found[kind], wanted[kind]())


@pytest.mark.parametrize(
    "spec", ["int4(group=(2,8)):stochastic", pytest.param("nf4(group=16):stochastic", marks=pytest.mark.slow)]
)
def test_gathered_is_the_whole_rounded(spec: str, rng: np.random.Generator) -> None:
    """Groups that lie within a shard, and words by the place in the whole array."""
    x = rng.standard_normal((4, 2, 32)).astype(np.float32)
    key = replay.fold(KEY, 0, replay.GATHER)
    found = over(mesh_of(4), lambda x: jc.distributed.all_gather(x, "d", spec, KEY, tiled=True), x)
    same(found[3], jc.round_to_format(x.reshape(8, 32), spec, key))


@further
def tiles_and_channels_move(rng: np.random.Generator) -> None:
    """Messages of arrays that keep their shape: the sum over ranks of one piece is that of the dequantized messages."""
    x = rng.standard_normal((2, 2, 8, 16)).astype(np.float32)
    specs = ["int8(group=(4,8))", "int8(channel=0)"]
    found = over(mesh_of(2), lambda x: [jc.distributed.psum_scatter(x, "d", spec) for spec in specs], x)
    for spec, each in zip(specs, found, strict=True):
        own = [[np.asarray(jc.round_to_format(x[rank, owner], spec)) for rank in range(2)] for owner in range(2)]
        same(each, np.stack([a + b for a, b in own]))


#: Every way to store numbers: codes of a byte, of several, several codes in one; floats, tables and integers; scales of
#: groups, of tensors and of scales; zero points. Some at a time, in one program.
SENT = {
    "default": ["uint4(group=16,zero_point=integer)", "bfloat16"],
    "bits": ["int3(group=all)", "mxfp6_e2m3", "int4(group=32,scale=bfloat16)", "integer8", "mxint8"],
    "scales": ["mxfp4", "nf4(group=16,scale=uint8(group=4,zero_point=float))", "int8", "nvfp4", "mxfp8_e5m2"],
    "plain": ["e5m2", "binary32", "binary16", "posit8", "posit16", "float8_e8m0fnu"],
}


@further
@pytest.mark.parametrize(
    "name", ["default", *(pytest.param(n, marks=pytest.mark.slow) for n in SENT if n != "default")]
)
def every_format_and_collective(name: str, rng: np.random.Generator) -> None:
    """What arrives is what `jc.round_to_format` gives, summed in rank order."""
    ranks, perm = (2, [(0, 1)]) if name == "default" else (4, [(0, 1), (1, 3), (3, 0)])
    x = rng.standard_normal((ranks, ranks, 64)).astype(np.float32)

    def all_of(x: Any, spec: str) -> dict[str, Any]:
        d = jc.distributed
        return {
            "psum": d.psum(x, "d", spec),
            "psum_scatter": d.psum_scatter(x, "d", spec),
            "all_gather": d.all_gather(x[0], "d", spec),
            "all_to_all": d.all_to_all(x, "d", spec),
            "ppermute": d.ppermute(x[0], "d", spec, perm=perm),
        }

    every = over(mesh_of(ranks), lambda x: {spec: all_of(x, spec) for spec in SENT[name]}, x)
    for spec, found in every.items():
        sent = np.stack([[np.asarray(jc.round_to_format(piece, spec)) for piece in rank] for rank in x])
        sums = [sum(sent[1:, owner], sent[0, owner]) for owner in range(ranks)]
        moved = np.zeros_like(x[:, 0])
        for source, target in perm:
            moved[target] = sent[source, 0]
        wanted = {
            "psum": [[np.asarray(jc.round_to_format(total, spec)) for total in sums]] * ranks,
            "psum_scatter": sums,
            "all_gather": [sent[:, 0]] * ranks,
            "all_to_all": sent.swapaxes(0, 1),
            "ppermute": moved,
        }
        for kind, values in wanted.items():
            np.testing.assert_array_equal(found[kind], values, f"{kind} of {spec}")


def test_a_short_last_piece_repeats_the_last_number() -> None:
    """So it adds no number, as 0, to the range of a group."""
    x = np.arange(5.0, 16.0, dtype=np.float32)
    found = plan_piece_cut(x.shape, parse(NEAREST), 2).pieces(jnp.asarray(x))
    same(found, replay.cut(x, 2))


#: The axis of a piece: 6 rows in 4 pieces of 2; 16 channels; 16 columns beside one block of 6 rows.
SHAPED = [("int8(group=(2,8))", 0), ("int8(channel=-1)", 1), ("int4(group=8,axis=0)", 1)]


@pytest.mark.parametrize(
    ("spec", "axis"), [SHAPED[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in SHAPED[1:])]
)
def test_psum_of_channels_and_tiles_keeps_shapes(spec: str, axis: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6, 16)).astype(np.float32)
    found = over(mesh_of(4), lambda x: jc.distributed.psum(x, "d", spec), x)
    padded = np.pad(x, [(0, 0), (0, 2 if axis == 0 else 0), (0, 0)], mode="edge")
    pieces = [np.split(own, 4, axis) for own in padded]
    sums = []
    for owner in range(4):
        total = np.asarray(jc.round_to_format(pieces[0][owner], spec))
        for rank in range(1, 4):
            total = total + np.asarray(jc.round_to_format(pieces[rank][owner], spec))
        sums.append(np.asarray(jc.round_to_format(total, spec)))
    same(found, np.stack([np.concatenate(sums, axis)[:6]] * 4))


@further
def trees_are_joined(rng: np.random.Generator) -> None:
    tree = {"a": rng.standard_normal((2, 5)), "b": rng.standard_normal((2, 40)), "c": rng.standard_normal((2,)),
            "d": rng.standard_normal((2, 0)), "e": rng.standard_normal((2, 3))}  # fmt: skip
    tree = jax.tree.map(lambda leaf: leaf.astype(np.float32), tree)
    found = over(mesh_of(2), lambda x: jc.distributed.psum(x, "d", STOCHASTIC, KEY, bucket=16), tree)
    joined = [np.concatenate([tree["a"][r], tree["c"][r : r + 1], tree["e"][r]]) for r in range(2)]
    small = replay.psum(joined, KEY)  # the first vector
    key = replay.fold(KEY, 1)
    pieces = np.stack([replay.cut(tree["b"][r], 2) for r in range(2)])
    large = replay.gather(replay.exchange(pieces, key), key).reshape(-1)[:40]
    for name, wanted in {"a": small[:5], "b": large, "c": small[5], "d": np.zeros(0, "f4"), "e": small[6:]}.items():
        same(found[name][1], wanted)


def test_sums_of_short_floats_are_float32(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    found = over(mesh_of(4), lambda x: jc.distributed.psum(x, "d", NEAREST), x)
    wanted = replay.psum(list(x.astype(np.float32)))
    same(found, np.stack([wanted.astype(ml_dtypes.bfloat16)] * 4))


def test_nonfinite_numbers_stay_in_their_group(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 128)).astype(np.float32)
    x[2, 17], x[1, 100] = np.nan, np.inf
    found = over(mesh_of(4), lambda x: jc.distributed.psum(x, "d", f"int8(group={replay.GROUP},nan_block=true)"), x)
    wrong = np.zeros(128, bool)
    wrong[16:24] = wrong[96:104] = True
    assert (np.isnan(found) == wrong).all()


@further
def scan_and_vmap(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3, 24)).astype(np.float32)

    def both(x: Any) -> Any:
        scanned = jax.lax.scan(lambda c, v: (c, jc.distributed.psum(v, "d", NEAREST)), 0, x)[1]
        return scanned, jax.vmap(lambda v: jc.distributed.psum(v, "d", NEAREST))(x)

    for found in over(mesh_of(4), both, x):
        for at in range(3):
            same(found[0, at], replay.psum(list(x[:, at])))


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_derivatives(checked: bool, rng: np.random.Generator) -> None:
    """psum and a broadcast, all_gather and psum_scatter, all_to_all and ppermute and their inverses."""
    x = rng.standard_normal((4, 4, 8)).astype(np.float32)
    g = rng.standard_normal((4, 4, 4, 8)).astype(np.float32)
    spec = f"e4m3fn:gradient=[{NEAREST}]"
    plain = "e4m3fn"
    d = jc.distributed

    def pulled(x: Any, g: Any) -> Any:
        def back(fun: Any, ct: Any) -> Any:
            out, pull = jax.vjp(fun, x)
            return pull(jnp.broadcast_to(ct, out.shape))[0]

        return {
            "scatter": back(lambda x: d.psum_scatter(x, "d", spec), g[0, 0]),
            "gather": back(lambda x: d.all_gather(x, "d", spec), g),
            "gather, floats": back(lambda x: d.all_gather(x, "d", plain), g),
            "exchange": back(lambda x: d.all_to_all(x, "d", spec), g[0]),
            "permute": back(lambda x: d.ppermute(x, "d", spec, perm=[(0, 1), (1, 2)]), g[0]),
        }

    names = P("d")
    mapped = jax.shard_map(
        lambda x, g: jax.tree.map(lambda leaf: leaf[None], pulled(x[0], g[0])),
        mesh=mesh_of(4),
        in_specs=names,
        out_specs=names,
        check_vma=checked,
    )
    found = jax.tree.map(np.asarray, jax.jit(mapped)(x, g))
    same(found["scatter"], np.stack([np.stack([replay.sent(g[r, 0, 0]) for r in range(4)])] * 4))
    same(found["gather"], replay.exchange(g, None))
    np.testing.assert_allclose(found["gather, floats"], g.sum(0), rtol=1e-5, atol=1e-5)
    same(found["exchange"], np.stack([np.stack([replay.sent(g[r, 0, p]) for r in range(4)]) for p in range(4)]))
    wanted = np.zeros_like(x)
    wanted[0], wanted[1] = replay.sent(g[1, 0]), replay.sent(g[2, 0])
    same(found["permute"], wanted)


@further.first
def gradient_of_a_loss_that_is_summed(rng: np.random.Generator) -> None:
    """The derivative of psum is that of jax.lax.psum, inside of shard_map and through it."""
    w, x = rng.standard_normal(8).astype(np.float32), rng.standard_normal((4, 8)).astype(np.float32)
    mesh = mesh_of(4)

    def loss(psum: Any, w: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            return psum(jnp.sin(w * x[0]).sum())

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)

    ours = jax.jit(jax.grad(lambda w: loss(lambda v: jc.distributed.psum(v, "d", NEAREST), w)))(w)
    theirs = jax.jit(jax.grad(lambda w: loss(lambda v: jax.lax.psum(v, "d"), w)))(w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


test_further = further.test()
