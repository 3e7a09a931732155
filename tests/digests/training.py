"""Optimizers in low precision, and several devices: every function of `jchop.optim` and `jchop.distributed`."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jchop
from digests import Call
from digests.common import KEY, coarse, f32, jc, key_for
from digests.emulated import whole
from digests.face import facts, note_types

NAMED = ("adam8bit", "adamw8bit", "adamw4bit", "adamw_fp8", "lion8bit", "sgd8bit", "muon8bit", "adamw_split")


def start(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"w": jnp.asarray(coarse("w", (16, 256)), dtype), "b": jnp.full(8, 0.5, dtype)}


def steps(make: Callable[[], Any], dtype: Any = jnp.float32, count: int = 2, bad: bool = False) -> Any:
    import optax

    params: Any = start(dtype)
    tx, updates = make(), None
    state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(count):
        grads = {"w": params["w"] / 8 + i / 16, "b": params["b"] * 0 + 0.25}
        if bad and i == 1:
            grads["b"] = grads["b"].at[0].set(jnp.nan)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, jax.tree.leaves(state), [attribute(state, name) for name in ("skipped", "skips", "inner_state")]


def attribute(state: Any, name: str) -> Any:
    value = getattr(state, name, None)
    return jax.tree.leaves(value) if name == "inner_state" else value


def chains() -> dict[str, Callable[[], Any]]:
    import optax

    o, sgd, adam = jc.optim, optax.sgd(0.125), optax.adam(0.125)
    noisy = "bfloat16:stochastic"
    everything = {"weight": "e5m2", "gradient": "e5m2", "momentum": noisy, "accumulator": "e6m9:stochastic", "gradient_scale": 0.5, "key": KEY}
    return {
        "round_gradients": lambda: optax.chain(o.round_updates(spec="e5m2"), sgd),
        "round_gradients options": lambda: optax.chain(o.round_updates("e5m2:stochastic", key=KEY, scale=4.0), sgd),
        "round_updates": lambda: optax.chain(sgd, o.round_updates(spec="bfloat16")),
        "round_updates key": lambda: optax.chain(sgd, o.round_updates(noisy, key=KEY)),
        "round_params": lambda: optax.chain(sgd, o.round_params(spec="bfloat16")),
        "round_params options": lambda: optax.chain(sgd, o.round_params(noisy, key=KEY, dtype="bfloat16")),
        "sparse_params": lambda: optax.chain(sgd, o.sparse_params(n=2, m=4)),
        "sparse_params tiles": lambda: optax.chain(sgd, o.sparse_params(2, 4, axis=(-2, -1), start=1)),
        "sparse_params every": lambda: optax.chain(sgd, o.sparse_params(2, 4, every=2, decay=0.01)),
        "error_feedback": lambda: optax.chain(o.error_feedback(spec="int4(group=32)"), sgd),
        "error_feedback key": lambda: optax.chain(o.error_feedback("int4(group=32):stochastic", key=KEY), sgd),
        "compensate": lambda: optax.chain(sgd, o.compensate(spec="bfloat16")),
        "compensate options": lambda: optax.chain(sgd, o.compensate(noisy, key=KEY, compensation="e5m10")),
        "compensate byte": lambda: optax.chain(sgd, o.compensate(noisy, key=KEY, bits=8)),
        "average_params": lambda: optax.chain(sgd, o.average_params()),
        "average_params options": lambda: optax.chain(sgd, o.average_params(start=1, every=2, spec=noisy, key=KEY)),
        "scale_gradients": lambda: optax.chain(optax.scale(0.5), sgd),
        "skip_nonfinite": lambda: o.skip_nonfinite(inner=adam),
        "dynamic_loss_scale": lambda: o.dynamic_loss_scale(inner=sgd),
        "dynamic_loss_scale options": lambda: o.dynamic_loss_scale(sgd, initial=8.0, growth_interval=1, factor=4.0, smallest=2.0, largest=16.0),
        "low_precision": lambda: o.low_precision(inner=optax.sgd(0.125, momentum=0.5), weight="bfloat16"),
        "low_precision options": lambda: o.low_precision(optax.sgd(0.125, momentum=0.5), **everything),
        "quantize_state": lambda: o.quantize_state(inner=adam, spec="dynamic8"),
        "quantize_state options": lambda: o.quantize_state(adam, {"0.mu": "int8(group=64)", "0.nu": noisy}, key=KEY, min_size=16, nonfinite="propagate", chunks=2),
        "offload_state": lambda: o.offload_state(inner=adam, memory_kind="unpinned_host", min_size=8),
        "QuantizedState flat": lambda: o.quantize_state(adam, "float8_e4m3fn(group=256)", min_size=2),
    }


def named() -> Iterator[Call]:
    common = {"min_size": {"min_size": 4}, "nonfinite": {"nonfinite": "propagate"}, "chunks": {"chunks": 2}}
    moments = {"moments": {"b1": 0.5, "b2": 0.75}, "mu_dtype": {"mu_dtype": "bfloat16"}}
    adam = {"eps": {"eps": 1e-4, "eps_root": 1e-6}, "nesterov": {"nesterov": True}}
    decay = {"decay": {"weight_decay": 0.125, "mask": {"w": True, "b": False}}}
    options = {"adam8bit": moments | adam, "lion8bit": moments | decay,
               "muon8bit": {"moments": {"beta": 0.5, "adam_b1": 0.5, "adam_b2": 0.75}, "decay": {"weight_decay": 0.125}},
               "sgd8bit": {"momentum": {"momentum": 0.5, "nesterov": True}, "dtype": {"accumulator_dtype": "bfloat16"}}}
    for name in NAMED:
        for case, more in {"plain": {}, **options.get(name, moments | adam | decay), **common}.items():
            if (name, case) == ("muon8bit", "chunks"):
                continue
            bad = case == "nonfinite"
            yield Call(f"optim.{name} {case}", lambda n=name, m=more, b=bad: steps(lambda: getattr(jc.optim, n)(learning_rate=0.125, **m), bad=b), loose=True)
        yield Call(f"optim.{name} bfloat16", lambda n=name: steps(lambda: getattr(jc.optim, n)(0.125), jnp.bfloat16), loose=True)


def others() -> Iterator[Call]:
    import optax

    def state_of(name: str) -> Any:
        tx = chains()[name]()
        state = tx.init(start())
        return tx, tx.update(jax.tree.map(lambda p: p / 8, start()), state, start())[1]

    yield Call("optim.loss_scale", lambda: jc.optim.loss_scale(state=state_of("dynamic_loss_scale options")[1]))
    yield Call("optim.averaged_params", lambda: jc.optim.averaged_params(state=state_of("average_params")[1], params=start()))
    for name in ("quantize_state", "quantize_state options"):
        yield Call(f"optim.state_report {name}", lambda n=name: (lambda r: (whole(r), facts(r), [facts(row) for row in r.rows]))(jc.optim.state_report(state=state_of(n)[1])))
    yield Call("QuantizedState facts", lambda: (lambda s: [str(type(v).__name__) for v in facts(s)])(state_of("quantize_state")[1]))

    def short() -> Any:
        tx = jc.optim.quantize_state(optax.trace(0.5), "int8(group=64)", min_size=4)
        view = tx.init(jnp.ones((3, 3, 4, 8))).inner_state
        rows = jax.tree.leaves(view, is_leaf=lambda v: hasattr(v, "rows"))
        return rows, [facts(row) for row in rows]

    yield Call("PackedRows", short)
    yield Call("optim.PackedRows", lambda: facts(__import__("jchop.optim._pack", fromlist=["PackedRows"]).PackedRows(rows=jc.quantize(jnp.ones((2, 8)), "int8(group=8)"), shape=(4, 4))))

    def sharded() -> Any:
        mesh = meshed(4)
        params = jax.device_put(start(), NamedSharding(mesh, P("data")))
        tx = jc.optim.adamw8bit(0.125)
        return [str(s.spec) for s in jax.tree.leaves(jc.optim.state_shardings(tx=tx, params=params))]

    yield Call("optim.state_shardings", sharded)
    change = {"w": f32(coarse("u", (8, 64)) / 8), "b": jnp.full(3, 0.25)}
    for spec in ("int8(channel=0)", "int8(channel=0):stochastic", "nf4", "mxfp8_e4m3", "int4(group=16)"):
        packed = lambda spec=spec: {"w": jc.quantize(f32(coarse("p", (8, 64))), spec, key_for(spec)), "b": jnp.ones(3)}
        yield Call(f"optim.apply_updates {spec}", lambda p=packed, s=spec: jc.optim.apply_updates(params=p(), updates=change, key=key_for(s)))
        yield Call(f"storage.dequantize_params {spec}", lambda p=packed: jc.dequantize(q=p()))


def meshed(count: int, *names: str) -> Mesh:
    shape = (count,) if len(names) < 2 else (2, count // 2)
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), names or ("data",), axis_types=(AxisType.Auto,) * len(shape))


def shared(function: Callable[[Any], Any], *, vmapped: bool = False) -> Any:
    """A collective of four ranks: on four devices, or on one by `vmap`."""
    x = f32(coarse("ranks", (4, 8, 64)))
    if vmapped:
        return jax.vmap(function, axis_name="data")(x)
    run = jax.shard_map(lambda x: jax.tree.map(lambda y: y[None], function(x[0])), mesh=meshed(4), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.jit(run)(x)


def collectives() -> Iterator[Call]:
    d = jc.distributed
    own = jchop.MatmulSpec(accumulate="bfloat16")
    perm = [(0, 1), (1, 2), (2, 3), (3, 0)]
    tables: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
        "psum": ({}, {"ring": {"algorithm": "ring"}, "accumulate": {"accumulate": own}, "bucket": {"bucket": 16}}),
        "psum_scatter": ({}, {"ring": {"algorithm": "ring"}, "tiled": {"tiled": True, "scatter_dimension": 1}, "accumulate": {"accumulate": own}}),
        "all_gather": ({}, {"axis": {"axis": 1, "tiled": True}}),
        "all_to_all": ({}, {"axes": {"split_axis": 1, "concat_axis": 0, "tiled": True}, "split": {"split_axis": 0, "concat_axis": 1, "tiled": True}}),
        "ppermute": ({"perm": perm}, {}),
        "quantize_parts": ({}, {"axis": {"axis": 1}}),
    }
    for name, (needed, cases) in tables.items():
        for case, options in {"plain": {}, **cases}.items():
            yield Call(f"distributed.{name} {case}", lambda n=name, o=needed | options: shared(lambda x: fitting(n, x, spec="int8(group=16)", **o)))
        specs = ("int4(group=16,scale=bfloat16)", "int8(group=16):stochastic", "bfloat16", "nf4(group=16)", "mxfp8_e4m3", "int8(group=all)")
        for spec in specs[: 6 if name == "psum" else 2]:
            yield Call(f"distributed.{name} vmap {spec}", lambda n=name, s=spec, o=needed: shared(lambda x: fitting(n, x, spec=s, key=key_for(s), **o), vmapped=True))
    yield Call("distributed.psum tree", lambda: shared(lambda x: d.psum({"a": x, "b": x[0]}, "data", "int8(group=16)"), vmapped=True))
    yield Call("distributed.psum gradient", lambda: shared(jax.grad(lambda x: jnp.sum(d.psum(x, "data", "int8(group=16)") ** 2)), vmapped=True))
    x = f32(coarse("ranks", (4, 8, 64)))
    for case, options in {"plain": {}, "options": {"algorithm": "ring", "accumulate": own, "bucket": 8, "key": KEY, "spec": "int8(group=16):stochastic"}}.items():
        given = {"axis_name": "data", "spec": "int8(group=32)"} | options
        yield Call(f"distributed.sharded_psum {case}", lambda g=given: jax.shard_map(lambda x: d.psum(x[0], **g), mesh=meshed(4), in_specs=P("data"), out_specs=P())(x))

    def in_hierarchy() -> Any:
        two = d.Hierarchical("chip", "node")
        run = jax.shard_map(lambda x: d.psum(x[0, 0], ("node", "chip"), "int8(group=32)", algorithm=two), mesh=meshed(4, "node", "chip"),
                            in_specs=P("node", "chip"), out_specs=P(), check_vma=False)
        return jax.jit(run)(x.reshape(2, 2, 8, 64)), facts(two)

    yield Call("distributed.hierarchical", in_hierarchy)
    yield Call("distributed.Hierarchical", lambda: facts(d.Hierarchical(inner="a", outer="b")))

    def feedback(make: Any, dense: bool = False) -> Any:
        def run(x: Any) -> Any:
            tx = make()
            params = x[0] * 0
            state = tx.init(params)
            note_types({type(state), *(type(part) for part in state)})
            for i in range(3):
                updates, state = tx.update(x[i], state, params)
                params = params + updates
            return params, jax.tree.leaves(state)

        return shared(run, vmapped=True)

    noisy = {"spec": "int8(group=16):stochastic", "key": KEY, "accumulate": own, "bucket": 16}
    yield Call("distributed.psum_with_feedback", lambda: feedback(lambda: d.psum_with_feedback(axis_name="data", spec="int4(group=16)")))
    yield Call("distributed.psum_with_feedback options", lambda: feedback(lambda: d.psum_with_feedback("data", **noisy)))

    def loop() -> Any:
        import optax

        outer = optax.chain(d.psum_with_feedback("data", "int8(group=16)"), optax.scale(1 / 4), optax.sgd(0.5))
        return d.diloco(inner=optax.sgd(0.125), outer=outer, every=2)

    yield Call("distributed.diloco", lambda: feedback(loop))
    yield Call("distributed.unshard", lambda: shared(lambda x: jc.dequantize(d.unshard(tree=d.quantize_parts(x, "data", "int8(group=16)"), axis_name="data"))))
    yield Call("distributed.unshard options", lambda: shared(lambda x: jc.dequantize(d.unshard(d.quantize_parts(x, "data", "int8(group=16)", axis=1), "data", axis=1, after=x[0, 0]))))
    yield Call("distributed.unshard entry", lambda: shared(lambda x: jc.dequantize(d.unshard(d.quantize_parts(x.reshape(2, 4, 64), "data", "int8(group=16)", axis=1), "data", axis=0, entry=1))))

    def placed() -> Any:
        mesh, w = meshed(4), {"kernel": jc.quantize(x[0], "int4(group=16)")}
        at = jc.nn.shard(model=w, rules={"kernel": P("data")}, mesh=mesh)
        spec = w["kernel"].shardings(sharding=NamedSharding(mesh, P("data")))
        with jax.set_mesh(mesh):
            return jc.dequantize(jax.jit(d.unshard)(at)["kernel"]), [str(s.spec) for s in jax.tree.leaves(spec)]

    yield Call("distributed.unshard placed", placed)


def fitting(name: str, x: Any, **options: Any) -> Any:
    """With four leading rows where a collective cuts the first axis into one row for each rank."""
    if name in ("psum_scatter", "all_to_all") and not options.get("tiled"):
        x = x.reshape(4, 2, 64)
    result = getattr(jc.distributed, name)(x=x, axis_name="data", **options)
    return jc.dequantize(result) if name == "quantize_parts" else result


def calls() -> Iterator[Call]:
    for name in chains():
        yield Call(f"optim.{name}", lambda n=name: steps(chains()[n], count=3, bad="dynamic" in n or "skip" in n), loose=True)
    yield from named()
    yield from others()
    yield from collectives()
