"""Quantized functions: `quantize_fn` and its methods, products of packed arrays, caches and attention, `jc.ptq`."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jchop
from digests import Call
from digests.common import KEY, coarse, f32, folder, jc, normal
from digests.emulated import whole
from digests.face import facts, note_types


def attend(params: Any, x: jax.Array) -> jax.Array:
    x = x * params["norm"]["scale"]
    query = jnp.einsum("btd,dhk->bthk", x, params["query"]) + params["bias"]
    key = jnp.einsum("btd,dhk->bthk", x, params["key"])
    with jax.named_scope("scores"):
        return jnp.einsum("bthk,bshk->bhts", query, key)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["first"] + params["bias"]) @ params["second"]


def inputs() -> tuple[Any, jax.Array]:
    params = {"norm": {"scale": jnp.ones(16)}, "bias": jnp.full((2, 8), 0.125), "query": f32(coarse("query", (16, 2, 8))),
              "key": f32(coarse("key", (16, 2, 8)))}
    return params, f32(coarse("x", (2, 4, 16)))


def layers(rows: int = 64) -> tuple[Any, jax.Array]:
    params = {"first": f32(normal("first", (16, 24), scale=0.25)), "bias": jnp.full((24,), 0.1), "second": f32(normal("second", (24, 8), scale=0.25))}
    return params, f32(normal("mixed", (rows, 8)) @ normal("mix", (8, 16)))


RULES: dict[str, dict[str, Any]] = {
    "w4": {"weight": "int4(group=8)"}, "w8a8": {"weight": "int8(group=all)", "activation": "int8(group=all)"},
    "codes": {"weight": "int8(group=all)", "activation": "int8(group=all)", "product": "codes"},
    "bias": {"weight": "nf4(group=8)", "bias": "bfloat16"}, "plain": {"weight": "e5m2", "activation": "bfloat16"},
    "gradient": {"weight": "e4m3fn(group=tensor)", "activation": "e4m3fn(group=tensor)", "gradient": "e5m2"},
    "input_gradient": {"weight": "e4m3", "gradient": "e5m2", "input_gradient": "bfloat16", "weight_gradient": "binary32"},
    "matmul": {"weight": "e5m2", "matmul": jchop.MatmulSpec(accumulate="e6m9", order="pairwise")},
    "rotation": {"weight": "int4(group=8)", "gradient": "e5m2", "rotation": jchop.Hadamard(8)},
    "forward": {"weight": "int4(group=8)", "activation": "int4(group=8)", "rotation": jchop.Hadamard(8, products="forward")},
    "stochastic": {"weight": "int4(group=8):stochastic", "activation": "e5m2:stochastic"},
    "lsq": {"weight": "int4(group=8)", "activation": "int8", "scale_from": jchop.LSQ()},
    "moving": {"activation": "int8", "scale_from": jchop.MovingAverage(0.9)},
    "delayed": {"weight": "e4m3fn(group=tensor)", "activation": "e4m3fn(group=tensor)", "scale_from": jchop.DelayedScaling(2)},
    "operation": {"weight": "mxfp4(group=8)", "operation": "dot_general"}, "nothing": {"output": "bfloat16"},
}


def made(name: str, fun: Any = attend, **options: Any) -> Any:
    return jc.quantize_fn(fun=fun, rules=[jc.Rule("norm"), jc.Rule(**RULES[name])] if fun is attend else jc.Rule(**RULES[name]), **options)


def used(name: str, what: str) -> Any:
    params, x = inputs()
    low = made(name)
    scales = {"scales": low.start(params, x)} if "scale_from" in RULES[name] else {}
    drawn = {"key": KEY} if name == "stochastic" else {}
    match what:
        case "call":
            return low(params, x, **scales, **drawn)
        case "grad":
            return jax.grad(lambda p: jnp.sum(low(p, x, **scales, **drawn) ** 2))(params)
        case "pack":
            packed = low.pack(params, x, **scales, **drawn)
            return packed, low(packed, x, **scales, **drawn)
        case "update":
            return low.update(params, x, **scales) if scales else None
        case _:
            report = low.report(params, x)
            return whole(report), facts(report), [facts(row) for row in report.parameters]


def stored() -> Any:
    """A weight whose packed form has other axes than the parameter."""
    w, x = f32(normal("stored", (8, 3, 4, 4))), f32(normal("image", (1, 3, 8, 8)))
    low = jc.quantize_fn(lambda w, x: jax.lax.conv(x, w, (4, 4), "VALID"), jc.Rule(weight="int4(group=32)"))
    packed = low.pack(w, x)
    note_types({type(low), type(packed)})
    return facts(packed), packed.dequantize(), packed.requantize(packed.dequantize())


def methods() -> Iterator[Call]:
    params, x = inputs()
    yield Call("StoredAs", stored)
    lsq = lambda: made("lsq")
    yield Call("QuantizedFunction.start", lambda: lsq().start(params, x, key=KEY, from_data=False), loose=True)
    yield Call("QuantizedFunction.update", lambda: lsq().update(params, x, scales=lsq().start(params, x), key=KEY), loose=True)
    yield Call("QuantizedFunction.pack key", lambda: made("stochastic").pack(params, x, key=KEY, scales=None))
    yield Call("QuantizedFunction.pack donate", lambda: made("w4").pack(jax.tree.map(jnp.array, params), x, donate=True))
    call = jax.jit(lambda lhs, rhs: lhs @ rhs)
    named = lambda: jc.quantize_fn(lambda w, x: call(x, w), jc.Rule(weight="int4(group=32)", activation="int8(group=all)", operation="<lambda>(-1,-2)"))
    yield Call("quantize_fn declared call", lambda: named()(f32(normal("declared", (64, 8))), f32(normal("data", (4, 64)))), loose=True)
    yield Call("QuantizedFunction.pack scales", lambda: lsq().pack(params, x, scales=lsq().start(params, x)), loose=True)
    yield Call("QuantizedFunction.pack_more", lambda: made("w4").pack_more(params, x, scales=None, key=KEY))
    yield Call("QuantizedFunction.report h200", lambda: str(made("codes").report(params, x, platform="h200")))
    for method, combine in (("minmax", "widest"), ("percentile(90)", "mean"), ("mse", "widest"), ("entropy", "widest")):
        options = {"method": method, "combine": combine, "key": KEY, "progress": lambda done: None}
        yield Call(f"QuantizedFunction.calibrate {method}", lambda o=options: jc.quantize_fn(mlp, jc.Rule(weight="int8", activation="int8")).calibrate(
            layers()[0], [layers()[1], 2 * layers()[1]], **o), loose=True)
    yield Call("QuantizedFunction.calibrate scales", lambda: lsq().calibrate(params, [x], scales=lsq().start(params, x)), loose=True)
    yield Call("QuantizedFunction.observe", lambda: [str(k) for k in jax.tree.leaves(made("w8a8").observe(params, x))], loose=True)
    yield Call("QuantizedFunction.resolved", lambda: type(made("w4").resolved(params, x)).__name__ != "")
    yield Call("QuantizedFunction.traced", lambda: len(made("w4").traced(params, x)))
    saving = lambda: jax.checkpoint(made("gradient"), policy=jc.save_codes)
    yield Call("save_codes", lambda: jax.grad(lambda p: jnp.sum(saving()(p, x) ** 2))(params), loose=True)
    yield Call("Scales", lambda: facts(jc.Scales(learned={"a_scale": jnp.ones(2)}, stats={"b_range": jnp.zeros(2)})))
    for name, kernel in {"conv": (3, 3, 2, 4), "depthwise": (3, 3, 1, 2)}.items():

        def run(p: Any, x: Any, name: str = name) -> Any:
            return jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                                feature_group_count=2 if name == "depthwise" else 1)

        def packed(run: Any = run, kernel: Any = kernel) -> Any:
            w, x = f32(coarse("kernel", kernel)), f32(coarse("image", (2, 5, 5, 2)))
            low = jc.quantize_fn(run, jc.Rule(weight="int8(group=all)"))
            stored = low.pack(w, x)
            again = stored.requantize(w * 2, KEY) if hasattr(stored, "requantize") else None
            return stored, low(stored, x), facts(stored), stored.dequantize(dtype="float32") if again is not None else None, again

        yield Call(f"quantize_fn {name}", packed)
    stack = f32(coarse("stack", (3, 16, 16)) / 8)
    scan = lambda p, x: jax.lax.scan(lambda h, w: (h @ w, None), x, p)[0]
    yield Call("quantize_fn scan", lambda: jc.quantize_fn(scan, jc.Rule(weight="int4(group=8)")).pack(stack, f32(coarse("h", (2, 16)))))
    look = lambda p, i: p[i] @ p.T
    yield Call("quantize_fn embedding", lambda: jc.quantize_fn(look, jc.Rule(weight="int8(group=all)")).pack(stack[0], jnp.arange(3)))


def products() -> Iterator[Call]:
    x, w = f32(coarse("x", (4, 32))), f32(coarse("w", (32, 8)))
    for text in ("int8(group=all,axis=0)", "int4(group=8,axis=0)", "nf4(group=16,axis=0)", "mxfp4(axis=0)", "bfloat16", "nvfp4(axis=0)"):
        packed = lambda w=w, text=text: jc.quantize(w, text)
        yield Call(f"dot {text}", lambda packed=packed: jc.dot(x=x, w=packed()))
        yield Call(f"dot {text} dtype", lambda packed=packed: jc.dot(x, packed(), dtype="bfloat16"))
        yield Call(f"einsum {text}", lambda packed=packed: jc.einsum(subscripts="bi,io->ob", x=x, w=packed()))
        yield Call(f"ragged_dot {text}", lambda t=text: jc.ragged_dot(x=x, w=jc.quantize(w.reshape(1, 32, 8), t.replace("axis=0", "axis=1")), group_sizes=jnp.array([4])))
    both = lambda: (jc.quantize(x, "int8(group=all)"), jc.quantize(w, "int8(group=all,axis=0)"))
    yield Call("dot codes", lambda: jc.dot(*both()))
    yield Call("einsum codes", lambda: jc.einsum("bi,io->bo", *both(), dtype="float32"))
    yield Call("ragged_dot dtype", lambda: jc.ragged_dot(x, jc.quantize(w.reshape(1, 32, 8), "int8(group=all,axis=1)"), jnp.array([4]), dtype="bfloat16"))


SHAPE = (2, 16, 2, 8)
CACHES: dict[str, dict[str, Any]] = {"full": {}, "rolling": {"chunk": 4}, "paged": {"pages": 8, "page_size": 4}}


def cache(kind: str, **options: Any) -> Any:
    return getattr(jc.KVCache, kind)(shape=SHAPE, **CACHES[kind], **options)


def caches() -> Iterator[Call]:
    k, v, q = (f32(coarse(n, (2, 4, h, 8))) for n, h in (("k", 2), ("v", 2), ("q", 4)))
    specs = {"float": {}, "int8": {"keys": "int8(group=all)", "values": "int8(group=all)"}, "e4m3": {"keys": "e4m3fn", "values": "e4m3fn", "dtype": jnp.bfloat16},
             "rotated": {"keys": "normal3", "values": "normal3", "rotation": jc.Hadamard(size=4), "recent": 2},
             "int4": {"keys": "int4(group=4)", "values": "int4(group=4)"}}
    for kind, (name, options) in itertools.product(CACHES, specs.items()):

        def used(kind: str = kind, options: Any = options) -> Any:
            one = cache(kind, **options).update(k=k, v=v)
            two = one.update(k[:, :1], v[:, :1], positions=jnp.array([[4], [-1]]))
            return one, two, facts(one), jc.dot_product_attention(query=q[:, :1], cache=two, positions=jnp.array([[4], [3]]))

        yield Call(f"KVCache.{kind} {name}", used, loose=True)

        def later(kind: str = kind, options: Any = options) -> Any:
            one = cache(kind, **options).update(k, v)
            return [one.take(sequences=jnp.array([1, 0])), one.truncate(lengths=jnp.array([3, 2])), one.release(ended=jnp.array([True, False])),
                    one.mask(positions=jnp.array([[3], [2]]), is_causal=True, window=2), one.mask(tokens=2), one.mask(is_causal=False, tokens=2),
                    one.incomplete(query=jnp.array([[3], [2]]), window=2), one.query_positions(positions=None, tokens=2),
                    one.part(start=0, count=4)]

        yield Call(f"KVCache.{kind} {name} methods", later)
    for kind in ("full", "paged"):
        grouped = lambda kind=kind: cache(kind, keys="int4(group=4,axis=1)", recent=4).update(k, v).update(k[:, :2], v[:, :2])
        yield Call(f"KVCache.{kind} groups of tokens", lambda grouped=grouped: (grouped(), grouped().keys))
    rotated = lambda: cache("full", **specs["rotated"]).update(k, v)
    yield Call("KVCache numbers by place", lambda: (rotated().is_recent(positions=jnp.array([[0, 3], [2, -1]])), rotated().rotate_back(x=k)), loose=True)
    for case, options in {"scale": {"scale": 0.5}, "not causal": {"is_causal": False}, "window": {"window": 2}, "blocks": {"block_size": 4},
                          "precision": {"precision": "highest"}}.items():
        yield Call(f"dot_product_attention {case}", lambda o=options: jc.dot_product_attention(q, cache("full", keys="int8(group=all)").update(k, v), **o), loose=True)
    yield Call("KVCache constructor", lambda: jc.KVCache(key_slots=k, value_slots=v, slot_positions=jnp.zeros((2, 4), int), lengths=jnp.array([1, 1]),
                                                         overflowed=jnp.zeros(2, bool), table=None, window=3))


def ptq() -> Iterator[Call]:
    steps: dict[str, Any] = {
        "default": None, "nothing": lambda p: [], "gptq": lambda p: p.gptq(order="plain", damping=0.02, block=8), "clip": lambda p: [p.clip(points=4, least=0.6), p.gptq()],
        "sign_round": lambda p: p.sign_round(iterations=5, rate=0.25, momentum=0.5), "sparse": lambda p: [p.sparse(n=2, m=4, by="inputs"), p.gptq()],
        "sign_round results": lambda p: p.sign_round(5, loss="results"),
        "sparse loss": lambda p: [p.sparse(1, 4), p.gptq()], "correct_error": lambda p: [p.correct_error(strength=0.25, damping=0.02), p.gptq()],
        "biases": lambda p: [p.gptq(), p.correct_biases()], "smooth": lambda p: [p.smooth(alpha=0.25)], "awq": lambda p: [p.awq(points=4, duo=False), p.gptq()],
        "rotate": lambda p: [p.rotate(seed=3)],
    }
    rule = {"weight": "int4(group=8)"}

    def run(make: Any = None, rule: Any = rule, **options: Any) -> Any:
        params, x = layers()
        given = {"steps": make(jc.ptq)} if make else {}
        packed, report = jc.quantize_fn(mlp, jc.Rule(**rule)).pack(params=params, batches=[x[:32], x[32:]], return_report=True, **given, **options)
        return packed, whole(report)

    swept = lambda p: p.gptq()
    for name, make in steps.items():
        yield Call(f"ptq.quantize {name}", lambda m=make: run(m), loose=True)
    hqq = {"weight": "uint4(group=8,zero_point=float)"}
    yield Call("ptq.quantize hqq", lambda: run(lambda p: [p.hqq(iterations=5, norm=0.5, weight=4.0, growth=1.1, whole_start=True), p.gptq()], hqq), loose=True)
    for weight in ("nvfp4", "e4m3fn(group=all)", "nf4(group=8)", "int4(group=8,sparse=2:4)", "int4(group=8):stochastic"):
        yield Call(f"ptq.quantize {weight}", lambda w=weight: run(swept, {"weight": w}, **({"key": KEY} if "stochastic" in w else {})), loose=True)
    yield Call("ptq.quantize sequential", lambda: run(lambda p: [p.sequential(), p.gptq()], {"weight": "int4(group=8)", "activation": "int8(group=all)"}), loose=True)
    for case, options in {"memory": {"memory": "40KiB"}, "progress": {"progress": lambda n: None}}.items():
        yield Call(f"ptq.quantize {case}", lambda o=options: run(swept, {"weight": "int4(group=8)", "activation": "int8(group=all)"}, **o), loose=True)

    def resumed() -> Any:
        with folder() as where:
            return run(swept, rule, resume=where / "run"), run(swept, rule, resume=where / "run")

    yield Call("ptq.quantize resume", resumed, loose=True)
    yield Call("ptq.statistics", lambda: {name: (found.gram, found.mean_abs, found.max_abs, found.count) for name, found in jc.ptq.statistics(
        fun=mlp, params=layers()[0], batches=[layers()[1]], progress=lambda n: None).items()}, loose=True)
    yield Call("Statistics", lambda: dict(jc.ptq.Statistics(found={}, left_out={"a": "why"})))
    yield Call("InputStatistics", lambda: facts(jc.ptq.statistics(mlp, layers()[0], [layers()[1]])["first"]), loose=True)
    for name in ("gptq", "sequential", "sign_round", "clip", "hqq", "correct_error", "correct_biases", "smooth", "awq", "rotate"):
        yield Call(f"ptq.{name}", lambda n=name: getattr(jc.ptq, n)())
    yield Call("PtqReport.plot", lambda: jc.quantize_fn(mlp, jc.Rule(**rule)).pack(layers()[0], batches=[layers()[1]], steps=jc.ptq.gptq(), return_report=True)[1].plot(title="mine"), loose=True)


def calls() -> Iterator[Call]:
    for name in RULES:
        for what in ("call", "grad", "pack", "update", "report"):
            if (what != "update" or "scale_from" in RULES[name]) and (name != "nothing" or what == "call"):
                yield Call(f"quantize_fn {name} {what}", lambda n=name, w=what: used(n, w), loose=True)
    yield from methods()
    yield from products()
    yield from caches()
    yield from ptq()
