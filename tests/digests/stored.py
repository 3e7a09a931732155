"""Files of arrays: `.safetensors`, checkpoints of other programs, and qwix."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from digests import Call
from digests.common import coarse, f32, files_of, folder, jc
from digests.face import facts

TREES: dict[str, Any] = {
    "plain": lambda: {"a": jnp.arange(5.0), "b": [jnp.ones((2, 3), jnp.bfloat16), jnp.arange(4, dtype=jnp.int8)]},
    "packed": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "nf4"), "b": jnp.zeros(3)},
    "int4": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "int4(group=32)")},
    "nvfp4": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "nvfp4")},
    "zero points": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "uint4(group=32)")},
    "sparse": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "int8(group=all,sparse=2:4)")},
    "plain format": lambda: {"w": jc.quantize(f32(coarse("w", (4, 128))), "e4m3fn")},
    "nested": lambda: {"a": {"b": [jnp.ones(2), {"c": jnp.zeros(1)}]}},
}
LAYOUTS = {
    "compressed-tensors": ("int4(group=32,scale=bfloat16)", "int8(channel=0)", "mxfp4", "mxfp8_e4m3", "nvfp4", "uint4(group=32,scale=bfloat16)"),
    "gptq": ("int4(group=32,scale=float16)", "int8(group=32,scale=float16)"), "gptq_v2": ("int4(group=32,scale=float16)",),
    "awq": ("int4(group=32,scale=float16)", "uint4(group=32,scale=float16)"), "fp8": ("float8_e4m3fn(group=(128,128))",),
    "bitsandbytes": ("nf4(group=64)",), "torchao": ("int8(group=all)", "int4(group=32,scale=bfloat16)", "float8_e4m3fn(group=all)"),
    "plain": ("int4(group=32)", "bfloat16"), "mxfp4": ("mxfp4",), "jchop": ("nvfp4", "int8(group=32)"), "other": ("mxfp4",),
}
GGUF = ("int8(group=32,scale=float16)", "int4(group=32,scale=float16)", "uint4(group=32,zero_point=float)", "mxfp4", "bfloat16")


def saved(tree: Any, **options: Any) -> Any:
    with folder() as where:
        path = where / "x.safetensors"
        jc.save(path=path, tree=tree, **options)
        found = [jc.load_checkpoint(path=path), jc.load(path)]
        try:
            found.append(jc.load(path, like=tree))
        except (ValueError, TypeError) as error:
            found.append(type(error).__name__)
        return files_of(where), found


def checkpoint(layout: str, spec: str, **options: Any) -> Any:
    x = f32(coarse("layout", (130, 256) if layout == "fp8" else (32, 128)))
    tree = {"w.weight": jc.quantize(x, spec), "norm.weight": jnp.arange(8.0)}
    with folder() as where:
        path = where / ("m.gguf" if layout == "gguf" else "model")
        jc.save_checkpoint(tree=tree, path=path, layout=layout, **options)
        exact = {"exact": options.get("exact", True)}
        return files_of(where), jc.load_checkpoint(path=path), jc.load_checkpoint(path, layout=layout, **exact)


def encoded(layout: str, spec: str) -> Any:
    tree = {"w": {"weight": jc.quantize(f32(coarse("layout", (32, 128))), spec)}, "norm": jnp.arange(8.0)}
    found = jc.encode_checkpoint(tree, layout, names=lambda name: f"m.{name}", config={"a": 1}, exact=False)
    return facts(found), dict(found.tensors), found.config, found.metadata, jc.load_checkpoint(found)


def damaged(cut: int) -> Any:
    with folder() as where:
        path = where / "x.safetensors"
        jc.save(path, TREES["plain"]())
        path.write_bytes(path.read_bytes()[:cut])
        return jc.load(path)


def mxfp4_file() -> Any:
    stored = {"down_blocks": jnp.full((2, 8, 3, 16), 0x52, "uint8"), "down_scales": jnp.full((2, 8, 3), 126, "uint8")}
    with folder() as where:
        jc.save_checkpoint(where / "o.safetensors", stored, "plain")
        return jc.load_checkpoint(where / "o.safetensors")


def sharded() -> Any:
    tree = {f"w{i}.weight": jc.quantize(f32(coarse(f"w{i}", (32, 64))), "int4(group=32,scale=bfloat16)") for i in range(3)}
    with folder() as where:
        jc.save_checkpoint(where / "m", tree, "compressed-tensors", config={"model_type": "mlp"}, shard_bytes=1500)
        config = json.loads((where / "m/config.json").read_text())
        return files_of(where), sorted(config), jc.load_checkpoint(where / "m")


def calls() -> Iterator[Call]:
    for name, tree in TREES.items():
        yield Call(f"save_safetensors {name}", lambda tree=tree: saved(tree()))
    yield Call("save_safetensors metadata", lambda: saved(TREES["packed"](), metadata={"who": "me", "when": "now"}))
    for cut in (0, 4, 40, 200):
        yield Call(f"load_safetensors cut at {cut}", lambda cut=cut: damaged(cut))
    for layout, specs in LAYOUTS.items():
        for spec in specs:
            yield Call(f"save_checkpoint {layout} {spec}", lambda a=layout, b=spec: checkpoint(a, b))
    for layout, spec in (("gptq", "int4(group=32)"), ("compressed-tensors", "nvfp4"), ("gguf", "int4(group=32)")):
        yield Call(f"save_checkpoint inexact {layout}", lambda a=layout, b=spec: checkpoint(a, b, exact=False))
    for spec in GGUF:
        yield Call(f"save_checkpoint gguf {spec}", lambda spec=spec: checkpoint("gguf", spec))
    for layout, spec in (("compressed-tensors", "int4(group=32)"), ("awq", "int4(group=32,scale=float16)"), ("torchao", "int8(group=all)")):
        yield Call(f"encode_checkpoint {layout}", lambda a=layout, b=spec: encoded(a, b))
    yield Call("save_checkpoint shards", sharded)
    yield Call("load_checkpoint blocks", mxfp4_file)
    yield Call("load_checkpoint missing", lambda: jc.load_checkpoint("no such folder"))
    for spec in ("int8(group=32)", "nf4(group=32)", "float8_e4m3fn(group=32)"):
        yield Call(f"to_qwix {spec}", lambda spec=spec: jc.from_qwix(q=jc.to_qwix(q=jc.quantize(f32(coarse("q", (4, 64))), spec))))
    yield Call("from_qwix of another", lambda: jc.from_qwix(np.ones(3)))
