"""`encode_checkpoint`: the bits of the file in memory, on the devices of the weights, under jit, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_layouts import read_file
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jchop as jc

INT4, ASYMMETRIC = "int4(group=32,scale=float16)", "uint4(group=32,scale=float16,zero_point=integer)"
#: A layout, a spec, and whether the spec alone decides its form.
FORMS = [
    ("compressed-tensors", "int3(group=32)", True), ("compressed-tensors", ASYMMETRIC, False),
    ("compressed-tensors", "float4_e2m1fn(group=16)", False), ("gptq", INT4, True), ("gptq", "int4(group=32)", False),
    ("mxfp4", "mxfp4", True), ("jchop", "nf4(scale=uint8(group=256,zero_point=float))", True),
]  # fmt: skip
SLOW = [
    *(("compressed-tensors", f"int{bits}(group=32)", True) for bits in (2, 4, 5, 6, 7, 8)),
    ("compressed-tensors", "float8_e4m3fn(channel=0)", True), ("compressed-tensors", "nvfp4", False),
    ("compressed-tensors", "mxfp4", True), ("compressed-tensors", "mxfp8_e4m3", True),
    ("gptq_v2", "int3(group=32,scale=float16)", True), ("awq", INT4, True), ("awq", ASYMMETRIC, False),
    ("fp8", "float8_e4m3fn(group=(128,128))", True), ("bitsandbytes", "nf4(group=64)", True),
    ("torchao", "int4(group=32)", True), ("torchao", "int4(group=32,scale=bfloat16,zero_point=float)", True),
    ("torchao", "float8_e4m3fn(channel=0)", True), ("plain", "mxfp4", True),
]  # fmt: skip


def weight(spec: str) -> jc.QArray:
    x = np.random.default_rng(3).standard_normal((160, 256)).astype(np.float32)
    if "float4" in spec:  # scales of e4m3 over one divisor, as files have them
        scale = (np.arange(1, 17, dtype=np.float32) * np.float32(0.125) / np.float32(0.3)).reshape(1, 16)
        q = jc.quantize(x, spec)
        return jc.QArray(q.qvalue, jnp.broadcast_to(scale, (160, 16)), None, q.spec, q.length, q.dtype)
    q = jc.quantize(jnp.asarray(x), spec)
    if spec == "nvfp4":  # a divisor has exact products only under a power of two
        q = jc.QArray(q.qvalue, (q.scale[0], jnp.float32(2.0**-9)), None, q.spec, q.length, q.dtype)
    if "scale" not in spec and spec.startswith("int4(group=32)"):  # scales of float32 that float16 has
        q = jc.QArray(q.qvalue, q.scale.astype(jnp.float16).astype(jnp.float32), None, q.spec, q.length, q.dtype)
    return q


def same_bits(got: Any, wanted: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize(
    "layout, spec, of_spec", [*FORMS, *(pytest.param(*form, marks=pytest.mark.slow) for form in SLOW)], ids=str
)
def test_the_bits_are_those_of_the_file(tmp_path: Path, layout: str, spec: str, of_spec: bool) -> None:
    tree = {"a": {"weight": weight(spec)}, "norm.weight": jnp.arange(3.0)}
    jc.save_checkpoint(tmp_path / "m", tree, layout, config={"hidden_size": 4})
    wanted, metadata = read_file(tmp_path / "m/model.safetensors")
    encode = lambda tree: jc.encode_checkpoint(tree, layout, config={"hidden_size": 4})  # noqa: E731
    ways = [encode(tree), encode(jax.tree.map(np.asarray, tree))]
    if of_spec:
        ways.append(jax.jit(encode)(tree))
    else:
        with pytest.raises(ValueError, match=r"'a\.weight': its numbers decide .* outside of transformations"):
            jax.jit(encode)(tree)
    for encoded in ways:
        assert set(encoded.tensors) == set(wanted) and encoded.metadata == metadata
        assert all(isinstance(array, jax.Array) for array in encoded.tensors.values())
        for name, array in wanted.items():
            same_bits(encoded.tensors[name], array)
    again, file = jc.load_checkpoint(ways[-1]), jc.load_checkpoint(tmp_path / "m")
    assert jax.tree.structure(again) == jax.tree.structure(file)
    for got, one in zip(jax.tree.leaves(again), jax.tree.leaves(file), strict=True):
        same_bits(got, np.asarray(one))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="shards need devices")
@pytest.mark.parametrize(
    "layout, spec",
    [
        ("compressed-tensors", INT4), pytest.param("awq", INT4, marks=pytest.mark.slow),
        pytest.param("mxfp4", "mxfp4", marks=pytest.mark.slow),
        pytest.param("fp8", "float8_e4m3fn(group=(128,128))", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_shards_stay_where_they_are(layout: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((4,), ("out",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (512, 256))
    q = jc.quantize(x, spec)
    placed = jax.device_put(q, q.shardings(NamedSharding(mesh, PartitionSpec("out"))))
    whole = jc.encode_checkpoint({"a.weight": q}, layout).tensors
    encode = lambda q: jc.encode_checkpoint({"a.weight": q}, layout)  # noqa: E731
    for encoded in (encode(placed), jax.jit(encode)(placed)):
        for name, array in encoded.tensors.items():
            if array.nbytes >= q.size // 16:
                assert len({str(shard.index) for shard in array.addressable_shards}) == 4, name
            same_bits(array, np.asarray(whole[name]))


def test_a_model_of_flax_and_arrays_of_others() -> None:
    model = nnx.Dict(up=nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    packed = jc.nn.quantize(model, jc.Rule("up", weight=INT4), mode="ptq")
    encoded = jc.encode_checkpoint(packed, "compressed-tensors", names=lambda name: f"m.{name}")
    assert sorted(encoded.tensors)[0] == "m.up.bias" and "config_groups" in encoded.config["quantization_config"]
    like = nnx.eval_shape(lambda: nnx.Dict(up=nnx.Linear(64, 32, rngs=nnx.Rngs(0))))
    again = jc.load_checkpoint(encoded, like=like, names=lambda name: f"m.{name}")
    x = jnp.ones((1, 64))
    assert (again["up"](x) == packed["up"](x)).all()
    own = {"w.weight_scale_inv": np.ones((2, 2), np.float32), "w.weight": jnp.ones((130, 256), jnp.float8_e4m3fn)}
    assert str(jc.load_checkpoint(own)["w.weight"].spec) == "float8_e4m3fn(group=(128,128),axis=(-2,-1))"
    with pytest.raises(ValueError, match=r"\['w'\], which is no array"):
        jc.load_checkpoint({"w": [1, 2]})
    with pytest.raises(ValueError, match="layout='gguf'"):
        jc.encode_checkpoint({"w": jnp.ones(2)}, "gguf")
