"""Stacks of layers and experts, models that are packed already, and `dtype=`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jchop as jc

INT4 = "int4(group=32,scale=float16)"
RULE = jc.Rule("**/{up,down}", weight=INT4)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.up = nnx.RMSNorm(64, rngs=rngs), nnx.Linear(64, 96, rngs=rngs)
        self.down = nnx.Linear(96, 64, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(Block)(rngs.split(3))

    def __call__(self, x: Any) -> Any:
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Loop(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for block in self.layers:
            x = block(x)
        return x


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w1 = nnx.Param(jnp.zeros((4, 32, 64)))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("bi,eoi->beo", x, self.w1[...])


def like(cls: type) -> Any:
    return nnx.eval_shape(lambda: cls(nnx.Rngs(0)))


def same(got: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


X = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64)), jnp.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("stacks") / "m"
    jc.save_checkpoint(path, jc.nn.quantize(Loop(nnx.Rngs(0)), RULE, mode="ptq"), "compressed-tensors")
    return path


def test_a_stack_has_the_layers_of_the_file_and_is_written_as_them(folder: Path, tmp_path: Path) -> None:
    loop, stack = (jc.load_checkpoint(folder, like=like(cls)) for cls in (Loop, Stack))
    assert stack.layers.up.kernel[...].shape == (3, 64, 96)
    same(stack(X), loop(X))
    names = lambda name: name.replace("layers.", "layers.*.")  # noqa: E731
    same(jc.load_checkpoint(folder, like=like(Stack), names=names)(X), loop(X))
    with pytest.raises(ValueError, match=r"is a stack of 1 axes: names= must give a name with 1 '\*'"):
        jc.save_checkpoint(tmp_path / "m", stack, "compressed-tensors")
    jc.save_checkpoint(tmp_path / "m", stack, "compressed-tensors", names=names)
    wanted, found = jc.load_checkpoint(folder), jc.load_checkpoint(tmp_path / "m")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        same(found[name], value)
    odd = dict(wanted)
    odd["layers.1.up.weight"] = jc.quantize(jnp.ones((96, 64)), "int8(group=32)")
    with pytest.raises(ValueError, match=r"layers of 'layers\.\*\.up\.weight' differ.*int4.*int8"):
        jc.load_checkpoint(jc.encode_checkpoint(odd, "compressed-tensors"), like=like(Stack))
    del odd["layers.2.up.bias"]
    with pytest.raises(ValueError, match=r"no 'layers\.2\.up\.bias'"):
        jc.load_checkpoint(jc.encode_checkpoint(odd, "jchop"), like=like(Stack))


def test_a_packed_model_is_filled_in_place(folder: Path) -> None:
    loop = jc.load_checkpoint(folder, like=like(Loop))
    packed = nnx.eval_shape(lambda: jc.nn.quantize(Loop(nnx.Rngs(0)), RULE, mode="ptq"))
    for one in (loop, packed, jc.load_checkpoint(folder, like=like(Stack))):
        same(jc.load_checkpoint(folder, like=one)(X), loop(X))
    other = jc.nn.quantize(Loop(nnx.Rngs(0)), jc.Rule("**/{up,down}", weight="int8"), mode="ptq")
    with pytest.raises(ValueError, match=r"is int4.* in the checkpoint, and int8.* in like: quantize"):
        jc.load_checkpoint(folder, like=other)
    plain = jc.encode_checkpoint(loop, "plain")
    with pytest.raises(ValueError, match="is not packed in the checkpoint, and packed in like"):
        jc.load_checkpoint(plain, like=loop)


def test_experts_are_one_array_of_a_module_or_a_tree() -> None:
    rng = np.random.default_rng(2)
    each = [jc.quantize(jnp.asarray(rng.standard_normal((32, 64)), jnp.float32), "mxfp4") for _ in range(4)]
    tree = {f"experts.{index}.w1.weight": q for index, q in enumerate(each)}
    wanted = jnp.stack([jc.dequantize(q) for q in each])
    encoded = jc.encode_checkpoint(tree, "compressed-tensors")
    model = jc.load_checkpoint(encoded, like=like(Experts), names=lambda _: "experts.*.w1.weight")
    same(model(X), jnp.einsum("bi,eoi->beo", X, wanted))
    fused = jc.encode_checkpoint({"w1": jc.quantize(wanted, "mxfp4")}, "mxfp4")  # as gpt-oss has them
    same(jc.load_checkpoint(fused, like=like(Experts))(X), model(X))
    mesh = jax.make_mesh((4,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec("e"))
    shape = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=where)
    filled = jc.load_checkpoint(encoded, like={"experts": {"w1": {"weight": shape}}})["experts"]["w1"]["weight"]
    same(jc.dequantize(filled), wanted)
    assert len({shard.device for shard in filled.qvalue.addressable_shards}) == 4
    assert filled.qvalue.addressable_shards[0].data.shape[0] == 1


def test_floats_are_rounded_once_to_a_dtype() -> None:
    near = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, -3.0], np.float64)  # float32 would make a tie of the first
    tree = {"a": near, "b": np.arange(3), "w.weight": jc.quantize(np.ones((8, 32), np.float32), INT4)}
    encoded = jc.encode_checkpoint(tree, "compressed-tensors")
    found = jc.load_checkpoint(encoded, dtype="bfloat16")
    assert found["a"].dtype == found["w.weight"].dtype == jnp.bfloat16 and found["b"].dtype == np.int64
    same(found["a"], np.array([1 + 2.0**-7, 1, -3], ml_dtypes.bfloat16))
    shapes = {"a": jax.ShapeDtypeStruct((3,), "float32"), "b": jax.ShapeDtypeStruct((3,), "int64")}
    filled = jc.load_checkpoint(encoded, like=shapes, skip="w/weight", dtype=jnp.float16)
    assert filled["a"].dtype == jnp.float16 and filled["b"].dtype == np.int64
    with pytest.raises(ValueError, match=r"70000.* is beyond the largest number of dtype=float16"):
        jc.load_checkpoint({"a": np.array([1, 70000], np.float32)}, dtype=np.float16)
    with pytest.raises(ValueError, match="dtype='int8'"):
        jc.load_checkpoint(encoded, dtype="int8")
