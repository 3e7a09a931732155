"""Bad arguments of the collectives: errors at trace time that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jchop as jc

d = jc.distributed
X = jax.ShapeDtypeStruct((4, 8, 12), jnp.float32)
KEY = jax.random.key(0)
SIX = jnp.ones((6, 2))


def traced(fun: Callable[..., Any]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: fun(x[0]), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=True)
    jax.eval_shape(mapped, X)


WRONG: list[tuple[str, type[Exception], str, Callable[..., Any]]] = [
    ("axis", ValueError, "'rows' is not an axis here; axes of the mesh: 'd'", lambda x: d.psum(x, "rows", "int8")),
    ("axis twice", ValueError, "several different", lambda x: d.psum(x, ("d", "d"), "int8")),
    ("no key", ValueError, "key=None, but spec='int8:stochastic'", lambda x: d.psum(x, "d", "int8:stochastic")),
    ("no key for sums", ValueError, "key=None", lambda x: d.psum(x, "d", "int8", accumulate="bfloat16:stochastic")),
    ("no key for cotangents", ValueError, "key=None", lambda x: d.psum(x, "d", "int8:gradient=[int8:stochastic]")),
    ("a key of its own", ValueError, "key differs along", lambda x: d.psum(
        x, "d", "int8:stochastic", jax.random.fold_in(KEY, jax.lax.axis_index("d")))),
    ("raw key", TypeError, "typed key", lambda x: d.psum(x, "d", "int8:stochastic", jnp.zeros(2, "uint32"))),
    ("algorithm", ValueError, "algorithm='tree' must be 'two_shot', 'ring'", lambda x: d.psum(
        x, "d", "int8", algorithm="tree")),
    ("hierarchy", ValueError, "pass axis_name=", lambda x: d.psum(x, "d", "int8", algorithm=d.Hierarchical("a", "b"))),
    ("product", ValueError, "a sum has no products", lambda x: d.psum(
        x, "d", "int8", accumulate=jc.MatmulSpec(product="bfloat16"))),
    ("accumulator", ValueError, "accumulate", lambda x: d.psum(x, "d", "int8", accumulate="binary64")),
    ("clipped", ValueError, "clipped gradient", lambda x: d.psum(x, "d", "e4m3:gradient=clipped")),
    ("integers", TypeError, r"x\['n'\] has dtype int32", lambda x: d.psum({"n": x.astype(int)}, "d", "int8")),
    ("no axis of the format", ValueError, "axis 3", lambda x: d.psum(x, "d", "int8(channel=3)")),
    ("all in one group", ValueError, "groups that span every axis", lambda x: d.psum(x, "d", "int8(group=(all,all))")),
    ("parts", ValueError, "multiple of 4", lambda x: d.psum_scatter(x[:6], "d", "int8", tiled=True)),
    ("entries", ValueError, "length of 4, or tiled=True", lambda x: d.psum_scatter(x, "d", "int8")),
    ("cut group", ValueError, "parts that fit a length of 12: 1, 3", lambda x: d.psum_scatter(
        x, "d", "int4(group=4)", scatter_dimension=1, tiled=True)),
    ("cut group in gather", ValueError, "cut groups of 8", lambda x: d.all_gather(
        x, "d", "int4(group=8)", axis=1, tiled=True)),
    ("dimension", ValueError, "scatter_dimension=2", lambda x: d.psum_scatter(x, "d", "int8", scatter_dimension=2)),
    ("tiled", TypeError, "tiled=1", lambda x: d.all_gather(x, "d", "int8", tiled=1)),
    ("rank", ValueError, "perm=4", lambda x: d.ppermute(x, "d", "int8", perm=[(0, 4)])),
    ("rank twice", ValueError, "twice", lambda x: d.ppermute(x, "d", "int8", perm=[(0, 1), (2, 1)])),
    ("bucket", ValueError, "bucket=-1", lambda x: d.psum(x, "d", "int8", bucket=-1)),
]  # fmt: skip


def test_errors_name_the_argument() -> None:
    for name, error, text, fun in WRONG:
        try:
            with pytest.raises(error, match=text):
                traced(fun)
        except BaseException as wrong:
            wrong.add_note(f"the case {name!r}")
            raise


def test_outside_of_a_mesh() -> None:
    with pytest.raises(ValueError, match="'d' is not an axis here; axes of the mesh: none"):
        d.psum(SIX, "d", "int8")
    for name, answer in (("sharded_psum", r"write jax.shard_map\(lambda"), ("hierarchical", "write Hierarchical")):
        with pytest.raises(AttributeError, match=answer):
            getattr(d, name)
    with pytest.raises(ValueError, match="two different mesh axes"):
        d.Hierarchical("a", "a")
