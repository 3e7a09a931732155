"""Weights in parts as codes under scales of the whole: one all-reduce of maxima, and the codes of the whole array."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from distributed.hlo import wire_bytes
from further import Further
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

further = Further()

RANKS = 4
FP8 = "e4m3fn(group=tensor)"


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Three arrays; one is of subnormal numbers, one has an infinity, which does not count."""
    found = {"a": (16, 64), "b": (8, 64), "c": (4, 64)}
    tree = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in found.items()}
    tree["b"] = (tree["b"] * 1e-42).astype(np.float32)
    tree["c"][3, 5] = np.inf
    return tree


def gathered(tree: Any, spec: str, key: Any = None, axis: int = 0) -> tuple[Any, str]:
    """The whole arrays, as every rank has them, and the compiled program."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("d",), axis_types=(AxisType.Auto,))

    def local(x: Any) -> Any:
        parts = jc.distributed.quantize_parts(x, "d", spec, key, axis=axis)
        return jax.tree.map(lambda leaf: leaf[None], jc.distributed.unshard(parts, "d", axis=axis))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(*[None] * axis, "d"), out_specs=P("d"))
    compiled = jax.jit(mapped).lower(tree).compile()
    found = jax.tree.map(np.asarray, compiled(tree))
    for rank in range(1, RANKS):
        jax.tree.map(lambda leaf, rank=rank: np.testing.assert_array_equal(leaf[rank], leaf[0]), found)
    return jax.tree.map(lambda leaf: leaf[0], found), compiled.as_text() or ""


def test_fp8_weights_are_gathered_with_one_all_reduce(rng: np.random.Generator) -> None:
    tree = weights(rng)
    found, text = gathered(tree, FP8)
    for name, x in tree.items():
        wide = np.where(np.isfinite(x), x, 0).astype(np.float64)
        scale = np.float32(np.abs(wide).max() / 448)
        codes = (wide / np.float64(scale)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        kept = np.isfinite(x)
        np.testing.assert_array_equal(found[name].qvalue.view(np.uint8)[kept], codes.view(np.uint8)[kept], name)
        assert found[name].scale.view(np.uint32).item() == scale.view(np.uint32).item()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    share, size = (RANKS - 1) / RANKS, sum(x.size for x in tree.values())
    assert wire_bytes(text, RANKS) == {"u8": share * size, "s32": 2 * share * 4 * 2 * len(tree)}


PARTS = [
    (FP8 + ":stochastic", 0),
    ("float8_e5m2:stochastic", 0),
    ("nvfp4:stochastic", 0),
    ("nvfp4", 1),
    ("int8(channel=1)", 0),
    ("int4(group=tensor,scale=bfloat16,rule=ceil)", 1),
    ("uint4(channel=1,zero_point=integer)", 0),
    ("int8(channel=0)", 0),
    ("int4(group=(all,16))", 0),
    ("nf4(group=16,scale=uint8(group=2,zero_point=float))", 0),
]


@pytest.mark.parametrize(
    ("spec", "axis"), [PARTS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in PARTS[1:])]
)
def test_parts_are_the_whole(spec: str, axis: int, rng: np.random.Generator) -> None:
    tree = weights(rng)
    key = jax.random.key(5) if "stochastic" in spec else None
    found, text = gathered(tree, spec, key, axis)
    assert text.count(" all-reduce(") <= 1
    for number, (name, x) in enumerate(tree.items()):
        wanted = jc.quantize(x, spec, None if key is None else jax.random.fold_in(key, number))
        assert found[name].spec == wanted.spec
        for got, want in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.atleast_1d(got).view(np.uint8), np.atleast_1d(want).view(np.uint8), name)


def test_parts_of_one_number_under_a_common_scale_and_zero_point() -> None:
    x = np.array([[1.0], [4.0], [2.3]], np.float32)

    def whole(x: Any) -> Any:
        spec = "uint4(channel=1,zero_point=integer)"
        return jc.dequantize(jc.distributed.unshard(jc.distributed.quantize_parts(x, "i", spec), "i"))

    found = np.asarray(jax.jit(jax.vmap(whole, axis_name="i"))(x[:, None]))
    for rank in range(3):
        np.testing.assert_array_equal(found[rank], jc.round_to_format(x, "uint4(channel=1,zero_point=integer)"))


@further
def an_infinity_reaches_the_parts_of_others(rng: np.random.Generator) -> None:
    tree = weights(rng)
    found, _ = gathered(tree, "e4m3fn(group=tensor,nan_block=true)")
    assert np.isnan(jc.dequantize(found["c"])).all() and np.isfinite(jc.dequantize(found["a"])).all()


@further.first
def parts_that_are_refused() -> None:
    x = jnp.ones((2, 4, 24))

    def parts(spec: str, axis: int = 0, x: Any = x) -> Any:
        return jax.vmap(lambda x: jc.distributed.quantize_parts(x, "i", spec, axis=axis), axis_name="i")(x)

    for error, said, call in (
        (ValueError, "cut groups of 16", lambda: parts("int4(group=16)", 1)),
        (ValueError, "do not fill bytes", lambda: parts("int4(channel=0)", 1, jnp.ones((2, 4, 7)))),
        (ValueError, "rule reads all numbers", lambda: parts("int8(group=tensor,rule=mse)")),
        (ValueError, "share a scale along it", lambda: parts("int4(group=8,scale=int8(channel=1))")),
        (ValueError, "axis=2", lambda: parts(FP8, 2)),
        (ValueError, "without axes", lambda: parts(FP8, x=jnp.ones(2))),
        (ValueError, "rounds stochastically", lambda: parts(FP8 + ":stochastic")),
    ):
        with pytest.raises(error, match=said):
            call()


test_further = further.test()
