"""Packed models with sharding annotations on a mesh: the codes of one device, and shardings that fit every leaf."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight (forced host) devices")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 16)), "float32")


def mesh(shape: tuple[int, int], kind: AxisType = AUTO) -> Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind), devices=devices)


def whole(ndim: int) -> dict[str, Any]:
    """The `out_sharding` of a product, which an explicit mesh may ask for."""
    return {"out_sharding": P(*[None] * ndim)} if jax.sharding.get_abstract_mesh().explicit_axes else {}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 8, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("x", "y")})


class Layers(nnx.Module):
    """Layers of Flax; the kernel of `split` is stored in another layout if groups run over several axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata={"out_sharding": ("x", "y")})
        split = {"out_sharding": (None, "x", "y", None)}
        self.split = nnx.LinearGeneral((4, 8), (2, 4), axis=(-2, -1), rngs=rngs, kernel_metadata=split)

    def __call__(self, x: Any) -> Any:
        return self.split(self.up(x, **whole(2)).reshape(-1, 4, 8), **whole(3))


class Program(nnx.Module):
    """A parameter of its own, which only the program of the model leads to its product."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata={"out_sharding": ("x", "y")})
        self.down = nnx.Param(jax.random.normal(rngs.params(), (32, 16)), out_sharding=("y", "x"))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("bi,io->bo", self.up(x, **whole(2)), self.down[...], **whole(2))


def quantized(cls: Any, text: str, mode: Any = "ptq") -> Any:
    inputs = {"inputs": (X,)} if cls is Program else {}
    return jc.nn.quantize(cls(nnx.Rngs(0)), jc.Rule(weight=text), mode, **inputs)


def on_one_device(cls: Any, text: str) -> Any:
    with nnx.use_eager_sharding(False):
        return quantized(cls, text)


def kernels(model: Any) -> dict[Any, Any]:
    return {path: v for path, v in nnx.to_flat_state(nnx.state(model, jc.nn.QuantizedParam)) if path[-1] != "bias"}


def check(model: Any, on: Mesh) -> None:
    """Each leaf lies as `flax.nnx.get_partition_spec` says; codes are cut along every axis of the annotation."""
    found = kernels(model)
    assert found
    for variable in found.values():
        specs = nnx.get_partition_spec(variable).get_value()
        assert jax.tree.structure(specs) == jax.tree.structure(variable.get_value())
        leaves = jax.tree.leaves(variable.get_value())
        for leaf, spec in zip(leaves, jax.tree.leaves(specs), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(on, spec), leaf.ndim)
        assert tuple(jax.tree.leaves(specs)[0]) == tuple(variable.get_metadata("out_sharding"))


def same(got: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(got)), nnx.to_pure_dict(nnx.state(wanted)))


FORMATS = ["int8", "int8(group=all)", "e4m3fn(group=tensor)", "nvfp4", "uint4(group=8,zero_point=float)", "e2m1"]
MESHES = [(2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("cls", "text", "shape", "kind"),
    [
        pytest.param(Layer, "e4m3fn(group=tensor)", (2, 1), AUTO, id="one layer"),
        *(
            pytest.param(cls, text, shape, kind, marks=pytest.mark.slow)
            for (cls, text, kind), shape in zip(
                itertools.product((Layers, Program), FORMATS, (AUTO, EXPLICIT)), itertools.cycle(MESHES), strict=False
            )
        ),
    ],
)
def test_annotated_models_are_packed_as_on_one_device(cls: Any, text: str, shape: Any, kind: AxisType) -> None:
    with jax.set_mesh(on := mesh(shape, kind)):
        model = quantized(cls, text)
        check(model, on)
        if cls is not Layer:
            np.testing.assert_allclose(model(X), on_one_device(cls, text)(X), rtol=1e-4, atol=1e-5)
    same(model, on_one_device(cls, text))


def codes(text: str = "int4(group=8)", shape: tuple[int, ...] = (16, 8), **more: Any) -> Any:
    q = jc.quantize(jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32"), text)
    return jc.nn.QuantizedParam(q, out_sharding=("x", "y"), **more)


def test_shardings_of_a_packed_variable_fit_each_of_its_leaves() -> None:
    """Scales are cut where the mesh is known, and in any case so that their shape allows it."""
    variable = codes("int4(group=8,axis=0)", eager_sharding=False)
    specs = nnx.get_partition_spec(variable).get_value()
    assert (specs.qvalue, specs.scale) == (P("x", "y"), P(None, "y"))  # no mesh: as fits every one
    with jax.set_mesh(on := mesh((2, 2))):
        assert nnx.get_partition_spec(variable).get_value().scale == P("x", "y")
        assert codes("int4(group=8,axis=0)").get_value().scale.sharding.spec == P("x", "y")
    abstract = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(on, P("x", "y")))
    made = variable.replace(abstract).get_value()
    assert [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(made)] == [
        ((16, 4), P("x", "y")),
        ((2, 8), P("x", "y")),
    ]
    with jax.set_mesh(mesh((1, 8))):  # four bytes cannot be cut in eight parts
        assert nnx.get_partition_spec(variable).get_value().qvalue == P("x", None)


def written_by_orbax(model: Any, make: Any, on: Mesh, folder: Path) -> Any:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", nnx.state(model))
        checkpointer.wait_until_finished()
        graph, state = nnx.get_abstract_model(make, on)
        return nnx.merge(graph, checkpointer.restore(folder / "state", state))


def written_by_save(model: Any, make: Any, on: Mesh, folder: Path) -> Any:
    jc.save(folder / "model.safetensors", model)
    return jc.load(folder / "model.safetensors", nnx.eval_shape(make))


def placed_again(model: Any, make: Any, on: Mesh, folder: Path) -> Any:
    graph, state = nnx.split(model)
    moved = jax.device_put(state, nnx.get_named_sharding(state, mesh((1, 2))))
    return nnx.merge(graph, jax.device_put(moved, nnx.get_named_sharding(state, on)))


def made_in_one_program(model: Any, make: Any, on: Mesh, folder: Path) -> Any:
    return nnx.jit(make)()


WAYS = (written_by_save, placed_again, written_by_orbax, made_in_one_program)


@pytest.mark.parametrize(
    ("way", "cls", "kind"),
    [
        pytest.param(written_by_save, Layer, AUTO, id="one layer"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(WAYS, (Layers, Program), (AUTO, EXPLICIT))
        ),
    ],
)
def test_annotations_guide_what_restores_a_packed_model(way: Any, cls: Any, kind: AxisType, tmp_path: Path) -> None:
    with jax.set_mesh(on := mesh((2, 2), kind)):
        model = quantized(cls, text := "int8(group=all)")
        got = way(model, lambda: quantized(cls, text), on, tmp_path)
        check(got, on)
    same(got, model)


def test_shardings_of_an_abstract_mesh_need_the_mesh_itself(tmp_path: Path) -> None:
    def make() -> Any:
        return nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    jc.save(tmp_path / "a.safetensors", make())
    with jax.set_mesh(mesh((2, 1))):
        like = nnx.eval_shape(make)
    with pytest.raises(ValueError, match=r"under jax.set_mesh\(mesh\)"):
        jc.load(tmp_path / "a.safetensors", like)
