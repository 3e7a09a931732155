"""Scaled formats: rounding, codes, scales; rules, groups, scale formats and modes cross one another."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from digests import Call
from digests.common import KEY, MODES, blocks, coarse, f32, jc, key_for, normal, several
from digests.face import facts
from digests.formats import SCALED, attempt
from jchop._storage import fit_half_quadratic

# A new format comes last, so that the modes of the other calls stay.
NAMES, NEW = (*SCALED[:20], "bfp8(group=16)", "bfp4(group=tensor)", "nf4(scale=int8(group=4))",
              "nf4(scale=uint8(group=4,zero_point=float))"), SCALED[20:]
ELEMENTS = ("int8", "int4", "int2", "uint8", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "fixed4.4",
            "float6_e2m3fn", "e3m2", "codebook(-1,-0.5,0,0.25,1)")
GROUPS = ("group=32", "group=7", "group=all", "channel=0", "channel=-1", "group=tensor", "group=16,axis=0",
          "group=(2,16)", "group=(all,8)")
SCALES = ("binary32", "bfloat16", "binary16", "float8_e8m0fnu", "float8_e4m3fn", "e5m3")
RULES = ("absmax", "max_abs", "floor", "floor_unclipped", "ceil", "even", "rceil", "half_range", "no_clip", "two_level",
         "mse", "percentile(99)")


def scaled(element: str, options: str) -> str:
    return element.replace(")", f",{options})") if element.endswith(")") else f"{element}({options})"


def texts() -> Iterator[str]:
    yield from NAMES
    for i, (element, rule) in enumerate(itertools.product(ELEMENTS, RULES)):
        if (i + i // 12) % 2 == 0 or element in ("int8", "float4_e2m1fn"):
            grouping, scale = GROUPS[(3 * i + i // 7) % len(GROUPS)], SCALES[(i + i // 11) % len(SCALES)]
            yield scaled(element, f"{grouping},scale={scale},rule={rule}")
    for i, rule in enumerate(("two_level", "four_over_six", "quest", "levels")):
        yield f"float4_e2m1fn(group=16,scale=float8_e4m3fn,rule={rule})"
        yield f"nf4({GROUPS[i]},scale={SCALES[i % 3]},rule=rms)"
        yield f"{('int4', 'uint4', 'uint8', 'int2')[i]}({GROUPS[i]},rule=minmax,zero_point=integer)"
    for i, (element, grouping) in enumerate(itertools.product(("int8", "uint4", "int3", "uint8"), GROUPS)):
        if (i + i // 9) % 2:
            yield f"{element}({grouping},scale={SCALES[i % 3]},zero_point={'float' if i % 3 == 0 else 'integer'})"
    for i, (element, grouping) in enumerate(itertools.product(ELEMENTS, GROUPS)):
        if (i + i // 9) % 4 == 0:
            yield scaled(element, grouping)
    yield from ("mxfp4(nan_block=true)", "int8(group=16,nan_block=true)", "int4(group=16,sparse=2:4)", "nf4(group=64,scale=bfloat16)", *NEW)


def rounded(spec: str, carrier: str) -> Any:
    return jc.round_to_format(blocks(carrier), spec, key_for(spec))


def stored(spec: str, carrier: str) -> Any:
    q = jc.quantize(x=jnp.asarray(blocks(carrier), carrier), spec=spec, key=key_for(spec))
    return q, jc.dequantize(q)


def fused(text: str) -> Any:
    x = f32(normal(text, (32, 512)))
    return jax.jit(lambda x: jc.dequantize(jc.quantize(x, text)) + x)(x), jc.fit_scale(x=x, spec=text)


def moved(text: str) -> Any:
    """What a QArray can do, each method once."""
    q = jc.quantize(f32(coarse("moved", (4, 6, 32))), text)
    return {
        "facts": facts(q), "astype": attempt(lambda: q.astype(dtype="bfloat16")),
        "reshape": attempt(lambda: q.reshape(24, 32)), "again": attempt(lambda: q.reshape((4, 6, 32))),
        "transpose": attempt(lambda: q.transpose(1, 0, 2)), "T": attempt(lambda: q.T), "part": attempt(lambda: q[1]),
        "form": attempt(lambda: str(type(q.form(dtype="float32")).__name__)),
    }


def calls() -> Iterator[Call]:
    carriers = itertools.cycle(["float32", "float32", "float64", "bfloat16"])
    modes = itertools.cycle(["", *(f":{mode}" for mode in MODES), "", ":saturate"])
    for i, text in enumerate(texts()):
        carrier, spec = next(carriers), text + next(modes)
        if i % 2 == 0 or text in (*NAMES, *NEW):
            yield Call(f"scaled {spec} {carrier}", lambda s=spec, c=carrier: rounded(s, c))
        carrier = "float32" if carrier == "float64" else carrier
        yield Call(f"quantize {spec} {carrier}", lambda s=spec, c=carrier: stored(s, c))
    for text in (*NAMES, *NEW):
        yield Call(f"fused {text}", lambda text=text: fused(text))
    for text in ("int8(group=32)", "nf4", "nvfp4", "int4(channel=0)", "uint4(group=8)", "mxfp4", "bfloat16", "int4(group=16,sparse=2:4)"):
        yield Call(f"QArray {text}", lambda text=text: moved(text))
    for text in ("nvfp4(rule=eden):stochastic", "nvfp4(rule=int_or_float)", "nvfp4(axis=0,rule=int_or_float):stochastic"):
        yield Call(f"quantize {text} float32", lambda text=text: stored(text, "float32"))
    x = f32(coarse("options", (8, 64)))
    noisy = "int4(group=16):stochastic"
    yield from several(
        "quantize", jc.quantize, x, noisy, KEY, offset={"offset": 7}, place={"offset": ((8, 0), (32, 64))},
        xla={"impl": "xla"}, pallas={"impl": "pallas"}, scale={"scale": jnp.full((8, 4), 0.25)},
    )
    zero = {"scale": jnp.full((8, 4), 0.125), "zero_point": jnp.full((8, 4), 3.0)}
    yield from several("quantize", jc.quantize, x, "uint4(group=16,zero_point=float)", zero_point=zero)
    q = lambda: jc.quantize(x, "int8(group=16)")
    yield Call("dequantize dtype", lambda: jc.dequantize(q=q(), dtype="bfloat16"))
    yield Call("dequantize add_to", lambda: jc.dequantize(q(), add_to=x))
    yield Call("dequantize float64", lambda: jc.dequantize(q(), "float64"))
    for text in ("int8(group=16)", "mxfp4", "nvfp4", "uint4(group=16)", "int4(group=all,rule=mse)", "nf4(scale=int8(group=4))", "bfloat16"):
        yield Call(f"fit_scale {text}", lambda t=text: jc.fit_scale(x, t))
        yield Call(f"vmap {text}", lambda t=text: jax.vmap(lambda v: jc.dequantize(jc.quantize(v, t)))(x.reshape(2, 4, 64)))
    parts = {"qvalue": jnp.arange(32, dtype=jnp.int8).reshape(2, 16), "scale": jnp.ones((2, 1)), "zero_point": None}
    yield Call("QArray constructor", lambda: (r := jc.QArray(**parts, spec=jc.Spec("int8(group=all)"), length=16, dtype=jnp.dtype("float32")), jc.dequantize(r)))
    q3 = lambda: jc.quantize(x, "int8(group=all,axis=0)")
    yield Call("QArray.thinned", lambda: q3().thinned(kept=jnp.ones((8, 64), bool), spec=jc.Spec("int8(group=all)"), axis=0))
    for text in ("int4(group=16)", "uint4(group=16)", "nf4(group=16)", "int8(group=all)", "uint4(group=16,zero_point=float)"):
        yield from several(f"fit_half_quadratic {text}", fit_half_quadratic, f32(normal("hqq", (8, 64))), text, loose=True,
                           plain={}, options={"iterations": 5, "norm": 0.5, "weight": 4.0, "growth": 1.1, "whole_start": True})
    for n, m in ((2, 4), (1, 4), (4, 8)):
        yield Call(f"sparsity.mask {n}:{m}", lambda n=n, m=m: jc.sparsity.mask(x=x, n=n, m=m))
        yield Call(f"sparsity.mask {n}:{m} axis", lambda n=n, m=m: jc.sparsity.mask(x, n, m, axis=0))
    yield Call("sparsity.mask tiles", lambda: jc.sparsity.mask(x, 2, 4, axis=(-2, -1)))
    w = f32(coarse("sparse", (32, 24)))
    for text in ("int8(group=all,axis=0)", "int4(group=16,axis=0)", "bfloat16", "nf4(group=8,axis=0)", "e4m3fn(group=tensor)"):
        yield Call(f"sparsity.pack {text}", lambda t=text: jc.sparsity.pack(q=jc.quantize(jnp.where(jc.sparsity.mask(w, 2, 4, axis=0), w, 0), t), n=2, m=4))
        yield Call(f"sparsity.pack {text} axis", lambda t=text: jc.sparsity.pack(jc.quantize(jnp.where(jc.sparsity.mask(w, 2, 4), w, 0), t), 2, 4, axis=-1))
