"""Models of Flax and Equinox: layers, rules, recipes, calibration, adapters, files, reports; NNX and Linen."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jchop
from digests import Call
from digests.common import KEY, coarse, f32, files_of, folder, jc
from digests.emulated import whole
from digests.face import facts
from digests.training import meshed
from jchop._quantized.program.adapters import AdaptedParam

RECIPES = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_delayed", "mxfp8", "mxfp4",
           "mxfp4_quartet", "nvfp4", "deepseek_fp8", "int8", "int8_stochastic", "ibm_fp8", "ibm_hybrid_fp8", "wage")


def rngs(seed: int = 0) -> Any:
    from flax import nnx

    return nnx.Rngs(seed, rounding=7)


def rules() -> dict[str, Any]:
    """The rules of layers that are no recipe."""
    return {
        "w4": jc.Rule(weight="int4(group=16)"), "w8a8": jc.Rule(weight="int8(group=all)", activation="int8(group=all)"),
        "bf16": jc.Rule(weight="bfloat16", activation="bfloat16", output="bfloat16", bias="bfloat16"),
        "matmul": jc.Rule(weight="e5m2", matmul=jchop.MatmulSpec(accumulate="e6m9", order="pairwise")),
        "lsq": jc.Rule(weight="int4(group=16)", scale_from=jchop.LSQ()),
        "moving": jc.Rule(activation="int8", scale_from=jchop.MovingAverage(0.9)),
        "delayed": jc.Rule(weight="e4m3fn(group=tensor)", activation="e4m3fn(group=tensor)", scale_from=jchop.DelayedScaling(2)),
        "noisy": jc.Rule(weight="int4(group=16):stochastic", activation="e5m2:stochastic"),
    }


def kinds() -> dict[str, tuple[str, dict[str, Any], tuple[int, ...]]]:
    return {
        "Linear": ("Linear", {"in_features": 32, "out_features": 8}, (4, 32)),
        "LinearGeneral": ("LinearGeneral", {"in_features": (4, 8), "out_features": (2, 8), "axis": (-2, -1)}, (3, 4, 8)),
        "Einsum": ("Einsum", {"einsum_str": "abc,cd->abd", "kernel_shape": (32, 16), "bias_shape": (16,)}, (2, 3, 32)),
        "Conv": ("Conv", {"in_features": 16, "out_features": 8, "kernel_size": (3, 3)}, (2, 4, 4, 16)),
        "ConvTranspose": ("ConvTranspose", {"in_features": 16, "out_features": 8, "kernel_size": (3,)}, (2, 5, 16)),
        "Embed": ("Embed", {"num_embeddings": 16, "features": 32}, (3, 4)),
        "BatchNorm": ("BatchNorm", {"num_features": 32}, (4, 32)), "LayerNorm": ("LayerNorm", {"num_features": 32}, (4, 32)),
        "RMSNorm": ("RMSNorm", {"num_features": 32}, (4, 32)), "GroupNorm": ("GroupNorm", {"num_features": 32, "num_groups": 4}, (4, 32)),
        "InstanceNorm": ("InstanceNorm", {"num_features": 32}, (4, 6, 32)), "LoRA": ("LoRA", {"in_features": 32, "lora_rank": 4, "out_features": 8}, (4, 32)),
        "LoRALinear": ("LoRALinear", {"in_features": 32, "out_features": 8, "lora_rank": 4}, (4, 32)),
        "MultiHeadAttention": ("MultiHeadAttention", {"num_heads": 2, "in_features": 32, "decode": False}, (2, 3, 32)),
    }


def layer(kind: str, rule: Any = None, own: bool = True) -> Any:
    from flax import nnx

    name, options, _ = kinds()[kind]
    return getattr(jc.nn, name)(**options, rule=rule, rngs=rngs()) if own else getattr(nnx, name)(**options, rngs=rngs())


def data(kind: str) -> Any:
    shape = kinds()[kind][2]
    return jnp.arange(12).reshape(shape) if kind == "Embed" else f32(coarse(kind, shape))


def norm_rule(kind: str) -> Any:
    return {"weight": "e4m3", "activation": "bfloat16", "output": "e5m10"} if "Norm" in kind else {"weight": "int4(group=16)", "output": "bfloat16"}


def ran(kind: str, rule: Any, mode: str) -> Any:
    from flax import nnx

    model = jc.nn.quantize(model=layer(kind, own=False), rules=rule, mode=mode, rngs=rngs())
    x = data(kind)
    grads = nnx.grad(lambda model, x: (model(x) ** 2).sum(), argnums=(0, 1))(model, x) if mode == "qat" else ()
    return model(x), jax.tree.leaves(grads), model


class Net:
    """A small model of NNX, made where Flax is loaded."""

    def __new__(cls, norm: bool = False) -> Any:
        from flax import nnx

        middle = [nnx.BatchNorm(16, rngs=rngs(1), use_running_average=True)] if norm else []
        return nnx.Sequential(nnx.Linear(32, 16, rngs=rngs(2)), *middle, nnx.relu, nnx.Linear(16, 4, rngs=rngs(3)))


X = coarse("net", (8, 32))
W4 = {"weight": "int4(group=16)"}


def layers() -> Iterator[Call]:
    every = [*rules(), *RECIPES]
    for i, (kind, name) in enumerate(itertools.product(("Linear", "LinearGeneral", "Einsum", "Conv"), every)):
        if kind == "Linear" or i % 4 == 0:
            rule = lambda name=name: rules()[name] if name in rules() else jc.nn.recipe(name=name)
            yield Call(f"nn.quantize {kind} {name} qat", lambda k=kind, r=rule: ran(k, r(), "qat"), loose=True)
            if i % 3 == 0:
                yield Call(f"nn.quantize {kind} {name} ptq", lambda k=kind, r=rule: ran(k, r(), "ptq"), loose=True)
    for kind in kinds():
        yield Call(f"nn.{kind}", lambda k=kind: (lambda m: (m(data(k)), m))(layer(k, jc.Rule(**norm_rule(k)))), loose=True)
        for mode in ("ptq", "weight_only", "emulate"):
            rule = {"weight": "bfloat16"} if mode == "weight_only" else {"activation": "e5m10"} if mode == "emulate" else norm_rule(kind)
            if mode != "emulate" or kind in ("Linear", "LayerNorm", "Embed", "Conv"):
                yield Call(f"nn.quantize {kind} {mode} all", lambda k=kind, m=mode, r=rule: ran(k, jc.Rule(**r), m), loose=True)
    for cell in ("GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell"):

        def recur(cell: str = cell) -> Any:
            model = getattr(jc.nn, cell)(in_features=8, hidden_features=4, rule=jc.Rule(weight="e4m3"), rngs=rngs())
            carry = model.initialize_carry((2, 8), rngs=rngs())
            return model(carry, f32(coarse("cell", (2, 8))))

        yield Call(f"nn.{cell}", recur, loose=True)
    yield Call("nn.Embed.attend", lambda: layer("Embed", jc.Rule(**W4)).attend(query=f32(coarse("attend", (3, 32)))), loose=True)

    def decoding(dtype: Any) -> Any:
        model = jc.nn.MultiHeadAttention(num_heads=2, in_features=32, decode=True, rule=jc.Rule(cache="int8(group=all)"), rngs=rngs())
        model.init_cache(input_shape=(2, 6, 32), dtype=dtype)
        return model(f32(coarse("token", (2, 1, 32)))), model.cached_key.get_value()

    yield Call("nn.MultiHeadAttention.init_cache", lambda: decoding(jnp.float32), loose=True)
    yield Call("nn.MultiHeadAttention.init_cache dtype", lambda: decoding(jnp.bfloat16), loose=True)


def whole_models() -> Iterator[Call]:
    n, x = jc.nn, f32(X)
    random = jc.Hadamard(16, "random", products="both")
    yield Call("nn.quantize Linear nvfp4_quartet2 qat", lambda: ran("Linear", jc.nn.recipe("nvfp4_quartet2", rotation=random), "qat"), loose=True)
    for name in (*RECIPES, "nvfp4_quartet2"):
        yield Call(f"nn.recipe {name}", lambda name=name: (str(n.recipe(name)), str(n.recipe(name, path="block", output="bfloat16"))))
    yield Call("nn.keep_wide", lambda: list(map(str, n.keep_wide(blocks="blocks", count=12))))
    yield Call("nn.keep_wide options", lambda: list(map(str, n.keep_wide("blocks", 12, first=1, last=2, others="{embed}"))))
    by_inputs = {"inputs": (x,), "rngs": None, "key": KEY}
    yield Call("nn.quantize inputs", lambda: (lambda m: (m(x), m))(n.quantize(Net(), jc.Rule(**W4), "ptq", inputs=(x,), rngs=rngs(5))), loose=True)
    yield Call("nn.quantize list", lambda: n.quantize(Net(), [jc.Rule("layers/0", **W4), jc.Rule(weight="nf4(group=8)")], mode="ptq"), loose=True)
    yield Call("nn.quantize donate", lambda: n.quantize(Net(), jc.Rule(**W4), "ptq", donate=True), loose=True)

    def equinox(mode: str) -> Any:
        import equinox as eqx

        model = eqx.nn.MLP(32, 4, width_size=16, depth=1, key=KEY)
        low = n.quantize(model, jc.Rule(weight="int4(group=8):stochastic"), mode, **(by_inputs | {"inputs": (x[0],)}))
        return jax.vmap(lambda v: low(v, rounding_key=KEY))(x) if mode == "qat" else jax.tree.leaves(low), whole(n.report(model, jc.Rule(weight="int4(group=8)"), inputs=(x[0],)))

    for mode in ("qat", "ptq"):
        yield Call(f"nn.quantize equinox {mode}", lambda m=mode: equinox(m), loose=True)
    a8 = {"weight": "int4(group=16)", "activation": "int8"}
    for method, combine in (("minmax", "widest"), ("percentile(90)", "mean"), ("mse", "widest"), ("entropy", "widest")):
        options = {"method": method, "combine": combine, "call": lambda m, x: m(x * 2), "progress": lambda done: None}
        yield Call(f"nn.calibrate {method}", lambda o=options: (lambda m: (m(x), m))(n.calibrate(model=n.quantize(Net(), jc.Rule(**a8)), batches=[x, 2 * x], **o)), loose=True)
    yield Call("nn.calibrate plain", lambda: n.calibrate(n.quantize(Net(), jc.Rule(**a8)), [x]), loose=True)
    fold = lambda: n.fold_batch_norms(model=Net(norm=True), pairs={"layers/0": "layers/1"})
    yield Call("nn.fold_batch_norms", lambda: (lambda m: (m(x), m))(fold()), loose=True)
    yield Call("nn.Folded", lambda: [type(layer).__name__ for layer in fold().layers[:2]])
    yield Call("nn.Folded layer", lambda: (lambda layer: (layer(x, use_running_average=True), facts(layer)))(fold().layers[1]))
    yield Call("nn.quantize_with_data", lambda: (lambda r: (r[0], whole(r[1])))(jc.nn.quantize(Net(), jc.Rule(**W4), "ptq", batches=[x], steps=jc.ptq.gptq(), return_report=True)), loose=True)
    yield Call("nn.quantize_with_data options", lambda: n.quantize(Net(), jc.Rule(**W4), "ptq", batches=[x], steps=[jc.ptq.sequential(), jc.ptq.gptq(block=8)], rngs=rngs()), loose=True)
    yield Call("ptq.sparse step", lambda: jc.ptq.sparse(2, 4))
    yield Call("nn.report", lambda: (lambda r: (whole(r), facts(r), [facts(row) for row in r.rows]))(n.report(model=Net(), rules=jc.Rule("layers/0", **a8))))
    for case, options in {"batches": {"batches": [x]}, "inputs": {"inputs": (x,)}, "platform": {"platform": "h200"}}.items():
        yield Call(f"nn.report {case}", lambda o=options: whole(n.report(Net(), jc.Rule(**a8), **o)), loose=True)
    seen = lambda **o: n.sensitivity(model=Net(), batches=[x], formats=["e4m3fn", "int4(group=16)"], **o)
    yield Call("nn.sensitivity", lambda: (lambda r: (whole(r), r.plot(title="mine")))(seen()), loose=True)
    yield Call("nn.sensitivity options", lambda: whole(seen(tensors=("weight", "activation"), call=lambda m, x: m(x), rngs=rngs(), progress=lambda a, b: None)), loose=True)
    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    tune = lambda **o: whole(n.allocate_bits(model=Net(), batches=[(x, x[:, :4])], menu=["e2m1fn", "e4m3", "int8(group=all)"], loss=loss, **o))
    for case, options in {"bits": {"bits": 6.0}, "bytes": {"bytes": 600}, "loss": {"bits": 6.0, "score": "loss"},
                          "groups": {"bits": 6.0, "groups": ("layers/*",), "layers": "layers/*"}}.items():
        yield Call(f"nn.allocate_bits {case}", lambda o=options: tune(**o), loose=True)
    params = {"dense": {"kernel": f32(coarse("kernel", (32, 8))), "bias": jnp.zeros(8)}}
    yield Call("nn.quantize_params", lambda: jc.quantize(params, jc.Rule("kernel", weight="int4(group=8,axis=0)")))
    yield Call("nn.quantize_params key", lambda: jc.quantize(params, jc.Rule("kernel", weight="int4(group=8,axis=0):stochastic"), key=KEY))
    yield Call("nn.shard", lambda: [str(leaf.sharding.spec) for leaf in jax.tree.leaves(n.shard(params, {"dense/kernel": P("data")}, meshed(4)))])


def states() -> Iterator[Call]:
    """The kinds of variables that quantized models have."""
    from flax import nnx

    x = f32(X)
    for kind, rule in {"QuantizedParam": W4, "ActivationRange": {"activation": "int8", "scale_from": jchop.MovingAverage(0.5)},
                       "AmaxHistory": {"activation": "e4m3fn(group=tensor)", "scale_from": jchop.DelayedScaling(2)},
                       "LearnedScale": {"weight": "int4(group=16)", "scale_from": jchop.LSQ()}}.items():

        def state(kind: str = kind, rule: Any = rule) -> Any:
            model = jc.nn.quantize(Net(), jc.Rule(**rule), "ptq" if kind == "QuantizedParam" else "qat")
            model(x)
            return jax.tree.leaves(nnx.state(model, getattr(jc.nn, kind)))

        yield Call(f"nn.{kind} state", state, loose=True)
        yield Call(f"nn.{kind}", lambda k=kind: getattr(jc.nn, k)(jnp.ones(2)).get_value())
    variable = lambda: jc.nn.QuantizedParam(jc.quantize(f32(coarse("kernel", (32, 8))), "int4(group=8)"))
    where = jax.sharding.NamedSharding(meshed(4), P("data"))
    yield Call("nn.QuantizedParam.copy", lambda: [str(leaf.spec) for leaf in jax.tree.leaves(variable().copy(where).get_raw_value())])

    def given() -> Any:
        changed = variable()
        changed.set_value(jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=where))
        return [(str(leaf.shape), str(leaf.sharding)) for leaf in jax.tree.leaves(changed.get_raw_value())]

    yield Call("nn.QuantizedParam.set_value", given)


def saved(save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    with folder() as where:
        save(where / "file.safetensors")
        return files_of(where), load(where / "file.safetensors")


def files() -> Iterator[Call]:
    n = jc.nn
    packed = lambda spec="int4(group=16)": n.quantize(Net(), jc.Rule(weight=spec), "ptq")
    for spec in ("int4(group=16)", "nf4(group=8)", "mxfp4(group=16)", "bfloat16"):
        yield Call(f"nn.save {spec}", lambda s=spec: saved(lambda f: jc.save(path=f, tree=packed(s), metadata={"who": "me"}), lambda f: jc.load(path=f, like=packed(s))), loose=True)
    yield Call("nn.load tree", lambda: saved(lambda f: jc.save(f, packed()), lambda f: jc.load(f)), loose=True)
    for layout, spec in (("compressed-tensors", "int4(group=16)"), ("gptq", "int4(group=32,scale=float16)"), ("torchao", "int8(group=all)"), ("plain", "int8(group=all)")):
        net = lambda: __import__("flax.nnx").nnx.Sequential(__import__("flax.nnx").nnx.Linear(64, 32, rngs=rngs()))

        def written(layout: str = layout, spec: str = spec, net: Any = net) -> Any:
            low = n.quantize(net(), jc.Rule(weight=spec), "ptq")
            with folder() as where:
                jc.save_checkpoint(path=where, tree=low, layout=layout, names=lambda s: f"m.{s}", config={"a": 1}, exact=False, shard_bytes=4096)
                again = jc.load_checkpoint(path=where, like=net(), layout=layout, names=lambda s: f"m.{s}", skip="*.none", exact=False)
                return files_of(where), again

        yield Call(f"nn.save_checkpoint {layout}", written, loose=True)
    yield from adapters()


def adapters() -> Iterator[Call]:
    n, x = jc.nn, f32(X)
    base = lambda: n.quantize(Net(), jc.Rule(**W4), "ptq")
    lora = {"plain": {"rank": 2}, "options": {"rank": 4, "alpha": 8.0, "dropout": 0.25}, "loftq": {"rank": 2, "init": "loftq"}}
    added = lambda case="plain", **o: n.add_lora(model=base(), rules=n.LoraRule(path="layers/0", **lora[case]), rngs=rngs(4), **o)
    qwix = {"module_path": ".*attn.*", "rank": 4, "alpha": 8.0, "dropout": 0.1}
    yield Call("nn.LoraRule.from_qwix", lambda: [str(rule) for rule in n.LoraRule.from_qwix(rules=qwix)])
    for case in lora:
        yield Call(f"nn.add_lora {case}", lambda c=case: added(c, **({"original": Net()} if c == "loftq" else {})), loose=True)
        yield Call(f"nn.LoraRule {case}", lambda c=case: (lambda rule: (str(rule), facts(rule)))(n.LoraRule("layers/0", **lora[c])))
    yield Call("nn.merge_lora", lambda: (n.merge_lora(model=added()), n.merge_lora(added(), requantize=True)), loose=True)
    yield Call("nn.split_lora", lambda: (lambda r: (r[0], r[1]))(n.split_lora(model=added())), loose=True)
    yield Call("nn.Adapted", lambda: added().layers[0](x), loose=True)

    def kept() -> Any:
        with folder() as where:
            n.save_lora(path=where, model=added())
            return files_of(where), n.load_lora(path=where, model=base(), rngs=rngs(5))

    yield Call("nn.save_lora", kept, loose=True)

    def function() -> Any:
        params, fun = {"w": f32(coarse("w", (32, 8)))}, lambda p, x: x @ p["w"]
        low = jc.quantize_fn(fun, jc.Rule(weight="nf4(group=8)"))
        adapted = n.add_lora(low.pack(params, x), n.LoraRule("*", rank=2), fun=low, inputs=(x,), key=KEY)
        with folder() as where:
            n.save_lora(where, adapted)
            again = n.load_lora(where, low.pack(params, x), fun=low, inputs=(x,))
        one = adapted["w"]
        return low(adapted, x), jax.tree.leaves(again), jax.tree.leaves(n.lora_mask(model=adapted)), n.merge_lora(adapted), [str(k) for k in facts(one)], jax.tree.leaves(one)

    yield Call("nn.lora function", function, loose=True)
    yield Call("nn.AdaptedParam", lambda: jax.tree.leaves(AdaptedParam(base=jnp.ones((2, 2)), adapter=None)))  # type: ignore[arg-type]
    yield from linen()


def linen() -> Iterator[Call]:
    from flax import linen as nn

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))

    n, x, keys = jc.nn, f32(X), {"rounding": KEY}
    for name, rule in {"w4": W4, "w8a8": {"weight": "int8(group=all)", "activation": "int8(group=all)"}, "noisy": {"weight": "e4m3:stochastic"},
                       "lsq": {"weight": "int4(group=16)", "scale_from": jchop.LSQ()}}.items():

        def used(rule: Any = rule) -> Any:
            low = jc.nn.quantize(model=Tower(), rules=jc.Rule(**rule))
            variables = low.init({"params": KEY, **keys}, x)
            packed = low.pack(variables, x, rngs=keys)
            return variables, packed, low.apply(packed, x, rngs=keys), low.start(Tower().init(KEY, x), x, rngs=keys), whole(low.report(variables, x, rngs=keys, platform=None))

        yield Call(f"linen.quantize {name}", used, loose=True)
    program = lambda rule: jc.nn.quantize(Tower(), jc.Rule(**rule))
    v = lambda: Tower().init(KEY, x)
    a8 = {"weight": "int4(group=16)", "activation": "int8"}
    yield Call("linen.Quantized.calibrate", lambda: program(a8).calibrate(v(), [x], method="percentile(90)", combine="mean", rngs=keys), loose=True)
    yield Call("linen.Quantized.quantize_with_data", lambda: program(W4).pack(v(), batches=[x], steps=[jc.ptq.sequential(), jc.ptq.gptq(block=8)], rngs=keys), loose=True)
    yield Call("linen.Quantized.report", lambda: str(program(a8).report(v(), x, platform="h200")))
    yield Call("linen.constructors", lambda: (str(type(program(W4)).__name__), program(W4).apply(v(), x)), loose=True)

    noisy = program({"weight": "e4m3:stochastic"})
    yield Call("linen.Quantized.key", lambda: [noisy.key(keys), program(W4).key(None)])
    yield Call("linen.Quantized.apply stochastic", lambda: noisy.apply(v(), x, rngs=keys), loose=True)
    yield Call("linen.Quantized.traced", lambda: program(W4).traced(v(), (x,), None, {})[0].paths)

    def packed() -> Any:
        low = n.quantize(Tower(), jc.Rule(**W4))
        one = low.pack(v(), x)["params"]["Dense_0"]["kernel"]
        return jax.tree.leaves(one), facts(one), jc.dequantize(one, dtype="bfloat16")

    yield Call("linen.pack", packed)

    def adapted() -> Any:
        low = n.quantize(Tower(), jc.Rule(**W4))
        plain = v()
        packed = low.pack(plain, x)
        variables = n.add_lora(packed, n.LoraRule("*", rank=2, init="loftq"), fun=low, inputs=(x,), key=KEY, original=plain)
        with folder() as where:
            n.save_lora(where, variables)
            kept = files_of(where)
            again = n.load_lora(where, packed, fun=low, inputs=(x,))
        merged, split = n.merge_lora(variables, requantize=True), n.split_lora(variables)
        arrays = lambda v: {**v, "lora": {name: {"lora_a": own["kernel"].lora_a, "lora_b": own["kernel"].lora_b} for name, own in v["lora"].items()}}
        return arrays(variables), low.apply(variables, x, rngs=keys), kept, arrays(again), merged, "Adapted", split

    yield Call("linen.lora", adapted, loose=True)


def calls() -> Iterator[Call]:
    yield from layers()
    yield from whole_models()
    yield from states()
    yield from files()
