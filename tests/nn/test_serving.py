"""A quantized model is served as any other: split and merged, placed on many devices, saved, exported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from further import Further
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_references import checked

import jchop as jc

further = Further()

RULES = [jc.Rule("norm"), jc.Rule(weight="int4(group=8)", activation="int8(group=all)")]
X = jnp.asarray(np.random.default_rng(5).normal(size=(16, 16)), "float32")


class Model(nnx.Module):
    def __init__(self, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        more = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.up, self.down = nnx.Linear(16, 32, **more), nnx.Linear(32, 16, **more)
        self.norm = nnx.RMSNorm(16, **more)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.down(nnx.relu(self.up(x))))


def compile_as_users() -> None:
    """The bits are those of the code that users run, which XLA has optimized."""
    jax.config.update("jax_disable_most_optimizations", False)


def packed() -> Any:
    return jc.nn.quantize(Model(rngs=nnx.Rngs(0)), RULES, mode="ptq")


def forward(graph: Any, state: Any, x: Any) -> Any:
    return nnx.merge(graph, state)(x)


run = jax.jit(forward, static_argnums=0)


def packed_models_are_split_and_exported() -> None:
    graph, state = nnx.split(packed())
    again, _ = nnx.split(packed())
    assert again == graph and hash(again) == hash(graph)  # compiled once
    y = run(graph, state, X)
    assert (y != 0).all()

    # The leaves are plain arrays, so their flat list is what a serving program takes.
    leaves, tree = jax.tree.flatten(state)
    exported = export.export(jax.jit(lambda leaves, x: forward(graph, jax.tree.unflatten(tree, leaves), x)))(leaves, X)
    np.testing.assert_array_equal(export.deserialize(exported.serialize()).call(leaves, X), y)
    assert sum(leaf.nbytes for leaf in leaves) < 0.35 * 4 * (2 * 16 * 32)


def checkpoints_bring_packed_models_back(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    graph, state = nnx.split(packed())
    pure = nnx.to_pure_dict(state)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", pure)
        checkpointer.wait_until_finished()
        blank = nnx.to_pure_dict(nnx.split(nnx.eval_shape(packed))[1])
        back = checkpointer.restore(tmp_path / "model", blank)
    assert jax.tree.structure(back) == jax.tree.structure(pure)
    jax.tree.map(np.testing.assert_array_equal, back, pure)
    _, fresh = nnx.split(jc.nn.quantize(Model(rngs=nnx.Rngs(1)), RULES, mode="ptq"))
    nnx.replace_by_pure_dict(fresh, back)
    np.testing.assert_array_equal(run(graph, fresh, X), run(graph, state, X))


def packed_models_are_placed_on_eight_devices() -> None:
    if jax.device_count() < 8:
        pytest.skip("needs eight (forced host) devices")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    graph, state = nnx.split(packed())

    def place(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        # The outputs of the first layer are split, and the sums of the second.
        where = P()
        if "kernel" in name:
            where = P(None, "model") if "up" in name else P("model", None)
        return jax.device_put(leaf, NamedSharding(mesh, where))

    placed = jax.tree_util.tree_map_with_path(place, state)
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    y = run(graph, placed, x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    np.testing.assert_allclose(y, run(graph, state, X), rtol=1e-5, atol=1e-6)
    held = jax.tree.leaves(placed["up"]["kernel"])
    assert [leaf.addressable_shards[0].data.shape[1] for leaf in held] == [8, 16]


@further
@pytest.mark.parametrize(
    "check",
    [
        packed_models_are_split_and_exported,
        pytest.param(checkpoints_bring_packed_models_back, marks=pytest.mark.slow),
        pytest.param(packed_models_are_placed_on_eight_devices, marks=pytest.mark.slow),
    ],
    ids=lambda check: check.__name__,
)
def packed_models_are_models(check: Any, request: Any) -> None:
    """Split, saved, placed on devices; the first of these checks runs by default."""
    checked(check, request)


def training_packing_and_plain_arrays_agree_bit_for_bit(dtype: str) -> None:
    """A hundred models, each with numbers of its own: QAT, PTQ, and Flax's layers with the numbers that are stored."""
    graph, params = nnx.split(Model(dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))

    def plain(model: Any, packed: Any, x: Any) -> Any:
        """The packed numbers in Flax's own layers, their inputs rounded by hand."""
        for name in ("up", "down"):
            getattr(model, name).kernel[...] = jc.dequantize(getattr(packed, name).kernel.get_value())
        hidden = nnx.relu(model.up(jc.round_to_format(x, "int8(group=all)")))
        return model.norm(model.down(jc.round_to_format(hidden, "int8(group=all)")))

    def of_seed(seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)) + 1)
        leaves = [jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, jax.tree.leaves(params), strict=False)]
        x = jax.random.normal(keys[-1], (4, 16), dtype)
        model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(params), leaves))
        trained, stored = jc.nn.quantize(model, RULES), jc.nn.quantize(model, RULES, mode="ptq")
        return trained(x), stored(x), plain(model, stored, x)

    trained, stored, expected = jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))(jnp.arange(100))
    assert trained.dtype == dtype and len(np.unique(np.asarray(trained, np.float32))) > 500
    np.testing.assert_array_equal(stored, trained)
    np.testing.assert_array_equal(expected, trained)


SAME = {
    "linear": (lambda rngs: nnx.Linear(784, 500, rngs=rngs), (8, 784)),
    "row": (lambda rngs: nnx.Linear(64, 48, rngs=rngs), (1, 64)),
    "square": (lambda rngs: nnx.Linear(64, 64, rngs=rngs), (64,)),
    "column": (lambda rngs: nnx.Linear(64, 1, rngs=rngs), (16, 64)),
    "heads": (lambda rngs: nnx.LinearGeneral(64, (4, 16), rngs=rngs), (2, 8, 64)),
    "joined": (lambda rngs: nnx.LinearGeneral((4, 16), 64, axis=(-2, -1), rngs=rngs), (2, 8, 4, 16)),
    "einsum": (lambda rngs: nnx.Einsum("btd,dhk->bthk", (64, 4, 16), (4, 16), rngs=rngs), (2, 8, 64)),
    "convolution": (lambda rngs: nnx.Conv(32, 16, (3, 3), rngs=rngs), (2, 8, 8, 32)),
}


#: Each shape, and one row or column with two weights. A compiler fuses the arithmetic that unpacks a matrix with its
#: product by a vector (`sums_ordered_by_fusion`).
PAIRS = [
    ("square", "e4m3"),
    ("square", "int8(group=all)"),
    ("a whole model", "float32"),
    ("a whole model", "bfloat16"),
    ("row", "e4m3"),
    ("row", "nvfp4"),
    ("column", "e4m3"),
    ("linear", "int4(group=32)"),
    ("linear", "mxfp8_e4m3"),
    ("heads", "nvfp4"),
    ("joined", "nf4(group=32)"),
    ("einsum", "nf4(group=32)"),
    ("convolution", "mxfp8_e4m3"),
]


def a_hundred_layers_train_and_serve_the_same_numbers_under_jit(name: str, weight: str) -> None:
    if name == "a whole model":
        return training_packing_and_plain_arrays_agree_bit_for_bit(weight)
    make, shape = SAME[name]
    graph, params = nnx.split(make(nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)

    def of_seed(seed: Any, mode: Any, inputs: Any) -> Any:
        *keys, last = jax.random.split(jax.random.key(seed), len(leaves) + 1)
        drawn = [jax.random.normal(key, v.shape) for key, v in zip(keys, leaves, strict=True)]
        layer = nnx.merge(graph, jax.tree.unflatten(tree, drawn))
        x = jax.random.normal(last, shape)
        rule = jc.Rule(weight=weight, activation=None if mode == "weight_only" else "int8(group=all)")
        return jc.nn.quantize(layer, rule, mode, inputs=inputs)(x)

    # As a program, too, where the products are those of matrices; the axes of others are those of the layer.
    programs = (None, (jax.ShapeDtypeStruct(shape, jnp.float32),))
    for inputs in programs if name in ("square", "row", "column", "joined") else (None,):
        trained, packed = (
            jax.jit(lambda seeds, mode=mode, inputs=inputs: jax.lax.map(lambda s: of_seed(s, mode, inputs), seeds))(
                jnp.arange(100)
            )
            for mode in ("qat", "ptq")
        )
        np.testing.assert_array_equal(trained, packed)


LAYERS = {
    "BatchNorm": lambda rngs: nnx.BatchNorm(64, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(64, rngs=rngs),
    "GroupNorm": lambda rngs: nnx.GroupNorm(64, num_groups=4, rngs=rngs),
    "Linear": lambda rngs: nnx.Linear(64, 64, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(64, 64, (3,), rngs=rngs),
}
FORMATS = ["int8(group=all)", "int8(group=tensor)", "nf4(group=all)"]


@further.first
@pytest.mark.in_turn(400)
@pytest.mark.parametrize(
    ("name", "text"),
    [("GroupNorm", FORMATS[0]), *zip(LAYERS, itertools.cycle(FORMATS), strict=False), ("Linear", FORMATS[1]), *PAIRS],
)
def training_and_serving_give_the_same_bits(name: str, text: str) -> None:
    """As arguments of a compiled function, a product of a bias and its scale might be contracted with the sum."""
    compile_as_users()
    if name not in LAYERS:
        return a_hundred_layers_train_and_serve_the_same_numbers_under_jit(name, text)
    rule, compiled = jc.Rule(weight=text, bias=text), nnx.jit(lambda layer, x: layer(x))
    for seed in range(12):
        draw = np.random.default_rng(seed)
        layer = LAYERS[name](nnx.Rngs(0))
        for _, value in nnx.iter_graph(layer):
            if isinstance(value, nnx.Param):
                value[...] = jnp.asarray(draw.normal(size=value[...].shape), "float32")
        x = jnp.asarray(draw.normal(size=(2, 16, 64)), "float32")
        trained = compiled(jc.nn.quantize(layer, rule), x)
        np.testing.assert_array_equal(compiled(jc.nn.quantize(layer, rule, mode="ptq"), x), trained)
        assert not np.array_equal(trained, compiled(layer, x))


test_further = further.test()
