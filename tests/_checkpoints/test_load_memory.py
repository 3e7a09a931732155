"""Arrays of a checkpoint go to devices shard by shard: none holds more than 1.2 times its part of the packed model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop as jc


def bytes_by_device() -> Counter[int]:
    """The bytes of all arrays of JAX, by device."""
    found: Counter[int] = Counter()
    for array in jax.live_arrays():
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        found.update({device.id: size for device in array.sharding.addressable_devices})
    return found


def peaks(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> tuple[Any, Counter[int], Counter[int]]:
    """What a load gives, and by device the most bytes beyond those before, and those at the end."""
    before, most, put, make = bytes_by_device(), Counter[int](), jax.device_put, jnp.asarray

    def sampled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            most.update({key: max(0, n - before[key] - most[key]) for key, n in bytes_by_device().items()})
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", sampled(put))
        patch.setattr(jnp, "asarray", sampled(make))
        result = load()
    end = bytes_by_device()
    return result, most, Counter({key: n - before[key] for key, n in end.items()})


@pytest.mark.skipif(len(jax.devices()) < 4, reason="shards need devices")
@pytest.mark.parametrize("kind", ["nnx", "tree"])
def test_each_device_holds_its_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    q = jc.quantize(np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32), "int4(group=32)")
    embedding = np.ones((256, 128), np.float32)
    stored = {"up.weight": q, "embed.weight": embedding, "up.bias": np.ones(512, np.float32)}
    jc.save_checkpoint(folder := tmp_path / "m", stored, "compressed-tensors")
    devices = jax.devices()[1:4:2]  # the first holds arrays of the host
    mesh = Mesh(np.asarray(devices), ("m",))

    def of(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    if kind == "tree":
        like: Any = {"up.weight": of((512, 256), "m"), "embed.weight": of((256, 128), "m"), "up.bias": of((512,), "m")}
    else:
        like = nnx.eval_shape(
            lambda: nnx.Dict(up=nnx.Linear(256, 512, rngs=nnx.Rngs(0)), embed=nnx.Embed(256, 128, rngs=nnx.Rngs(0)))
        )
        like["up"].kernel.set_value(of((256, 512), None, "m"))
        like["up"].bias.set_value(of((512,), "m"))
        like["embed"].embedding.set_value(of((256, 128), "m"))
    with jax.default_device(devices[0]):  # as on a machine with accelerators
        loaded, most, end = peaks(monkeypatch, lambda: jc.load_checkpoint(folder, like=like))
    codes = loaded["up.weight"] if kind == "tree" else loaded["up"].kernel.get_value()
    numbers = jc.dequantize(codes)
    assert (numbers == (jc.dequantize(q) if kind == "tree" else jc.dequantize(q).T)).all()
    packed = q.nbytes + embedding.nbytes + 512 * 4
    for device in devices:
        assert end[device.id] == packed // 2 and most[device.id] <= 1.2 * packed / 2, (most, end, packed)
    assert not [device for device, n in end.items() if n and device not in {each.id for each in devices}]


def test_arrays_without_a_sharding_are_on_the_default_device(tmp_path: Path) -> None:
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    packed = jc.nn.quantize(model, jc.Rule(weight="int4(group=32)"), mode="ptq")
    jc.save_checkpoint(folder := tmp_path / "m", packed, "compressed-tensors")
    device = jax.devices()[-1]
    with jax.default_device(device):
        loaded = jc.load_checkpoint(folder, like=model)
    leaves = jax.tree.leaves(nnx.state(loaded))
    assert len(leaves) == 3 and all(leaf.devices() == {device} for leaf in leaves)
