"""Quantized Flax models in files: one call each way, the same bits in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_references import drawn

import jchop as jc
from jchop._storage._files.safetensors import TensorFile

ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import sys
import jax, jax.numpy as jnp, numpy as np, jchop as jc
from flax import linen, nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)])
        self.conv = nnx.Conv(4, 3, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.conv(self.layers[1](self.drop(self.norm(self.layers[0](x)))))

class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=True)(linen.Conv(6, (3,))(x))
        return linen.Dense(4)(x)

rules = [jc.Rule(weight="int4(group=4,scale=bfloat16)", activation="int8(group=all)")]
x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), jnp.float32)

def model(seed=0):
    plain = Model(nnx.Rngs(seed))
    return jc.nn.quantize(plain, [jc.Rule("norm"), *rules], mode="ptq")

net = jc.nn.quantize(Net(), [jc.Rule("BatchNorm_0"), *rules])
"""
NEW = """
path, net_path, out = sys.argv[1:]
loaded = jc.load(path, nnx.eval_shape(model))
variables = jc.load(net_path)
np.savez(out, nnx=nnx.jit(lambda model, x: model(x))(loaded, x), linen=jax.jit(net.apply)(variables, x))
assert "equinox" not in sys.modules  # models of Flax do without
"""
HERE: dict[str, Any] = {}
exec(MODELS, HERE)  # the models that the new process makes, too
model, net, x = HERE["model"], HERE["net"], HERE["x"]


def same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def packed() -> Any:
    return net.pack(drawn(jax.eval_shape(net.init, jax.random.key(0), x)), x)


def in_a_new_process(tmp_path: Path) -> None:
    """It computes the same."""
    paths = [str(tmp_path / name) for name in ("nnx.safetensors", "linen.safetensors", "out.npz")]
    given, variables = model(seed=3), packed()
    jc.save(paths[0], given)
    jc.save(paths[1], variables)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MODELS + NEW, *paths], check=True, env=environment)
    out = np.load(paths[2])
    np.testing.assert_array_equal(out["nnx"], nnx.jit(lambda model, x: model(x))(given, x))
    np.testing.assert_array_equal(out["linen"], jax.jit(net.apply)(variables, x))


def test_a_pattern_is_made_of_a_model_that_exists(tmp_path: Path) -> None:
    plain, rule = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jc.Rule(weight="int8")
    given = jc.nn.quantize(plain, rule, "ptq")
    jc.save(tmp_path / "x.safetensors", given)
    like = nnx.eval_shape(lambda: jc.nn.quantize(plain, rule, "ptq"))
    same(nnx.state(jc.load(tmp_path / "x.safetensors", like)), nnx.state(given))


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modules_come_back_whole_and_the_pattern_stays(anew: bool, tmp_path: Path) -> None:
    if anew:
        return in_a_new_process(tmp_path)
    path, given = tmp_path / "x.safetensors", model(seed=3)
    jc.save(path, given, metadata={"step": "7"})
    like = model(seed=0)
    before = jax.tree.map(lambda leaf: leaf, nnx.state(like))
    loaded = jc.load(path, like)
    same(nnx.state(loaded), nnx.state(given))
    same(nnx.state(like), before)
    assert type(loaded.layers[0].kernel) is jc.nn.QuantizedParam
    assert jax.random.key_impl(loaded.drop.rngs.key[...]) == jax.random.key_impl(jax.random.key(0))
    with TensorFile(path) as file:
        assert file.metadata["step"] == "7" and file.entries["layers.0.kernel.qvalue"].nbytes == 24  # two codes a byte
        assert "drop.rngs.key" in file.entries and file.entries["norm.mean"].shape == (6,)
    plain = nnx.Linear(2, 3, rngs=nnx.Rngs(0))  # not quantized
    jc.save(path, plain)
    same(nnx.state(jc.load(path, nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1))))), nnx.state(plain))
    with pytest.raises(
        ValueError, match=r"'kernel' is float32\[2, 3\], and int8\(group=all,axis=-2\) of float32\[2, 3\]"
    ):
        jc.load(path, jc.nn.quantize(plain, jc.Rule(weight="int8(group=all)"), "ptq"))


def test_variables_need_no_pattern(tmp_path: Path) -> None:
    path, variables = tmp_path / "x.safetensors", packed()
    jc.save(path, variables)
    with TensorFile(path) as file:
        assert file.entries["params.Dense_0.kernel.qvalue"].nbytes == 12
    same(jc.load(path), variables)
    same(jc.load(path, jax.eval_shape(lambda: variables)), variables)
    other = jax.eval_shape(lambda: {**variables, "batch_stats": {"BatchNorm_0": {"mean": x, "var": x}}})
    with pytest.raises(ValueError, match=r"'batch_stats\.BatchNorm_0\.mean' is float32\[6\]"):
        jc.load(path, other)


def test_refused(tmp_path: Path) -> None:
    path, variables = tmp_path / "x.safetensors", packed()
    for value in (3, None, nnx.Linear, HERE["net"]):
        with pytest.raises(TypeError, match="is no container of arrays, and no module of Flax NNX or Equinox"):
            jc.save(path, value)
    with pytest.raises(ValueError, match="jchop's own"):
        jc.save(path, variables, metadata={"jchop.packed": "{}"})
    jc.save(path, variables)
    with pytest.raises(TypeError, match="a int is no container"):
        jc.load(path, 3)
    good = {"shape": [6, 4], "axes": 2}
    name = "params.Dense_0.kernel"
    for texts, said in (
        ({"nothing": good}, "no QArray has this name"),
        ({"params.Dense_0.bias": good}, "no QArray has this name"),
        ({name: good | {"axes": 3}}, "is no shape of a QArray"),
        ({name: good | {"axes": True}}, "is no shape of a QArray"),
        ({name: good | {"axes": 0}}, "is no shape of a QArray"),
        ({name: good | {"shape": [4, 7]}}, r"is no shape of a QArray of shape \[6, 4\]"),
        ({name: good | {"shape": 24}}, "a list of integers"),
        ({name: {"shape": [1]}}, "must be an object of"),
        ({name: []}, "must be an object of"),
    ):
        plain = {"params": {"Dense_0": {key: getattr(leaf, "stored", leaf) for key, leaf in _dense(variables).items()}}}
        jc.save(path, plain, metadata={"jchop.PACKED": json.dumps(texts)})
        path.write_bytes(path.read_bytes().replace(b"jchop.PACKED", b"jchop.packed"))
        with pytest.raises(ValueError, match=f"jchop.packed.*{said}"):
            jc.load(path)


def _dense(variables: Any) -> Any:
    return variables["params"]["Dense_0"]
