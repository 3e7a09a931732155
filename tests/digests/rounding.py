"""Rounding: formats, modes, overflow rules, carriers, gradients, random bits, files and flips."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from digests import Call
from digests.common import KEY, MODES, STOCHASTIC, cases, files_of, folder, hard, jc, key_for, normal, rng_for, several

NARROW = ("float4", "float6", "float8_e4m3")
FINE = ("binary16", "e5m10", "e6m9", "fixed3.12")


def rounded(spec: str, text: str, carrier: str) -> Any:
    return jc.round_to_format(x=hard(text, carrier), spec=spec, key=key_for(spec))


def jitted(spec: str, text: str) -> Any:
    return jax.jit(lambda x: jc.round_to_format(x, spec, key_for(spec)))(jnp.asarray(hard(text)))


def derivatives(text: str) -> Any:
    x = jnp.asarray(normal(text, (4, 64), scale=30))
    y, vjp = jax.vjp(lambda x: jc.round_to_format(x, text), x)
    return y, vjp(x * 0.375), jax.jvp(lambda x: jc.round_to_format(x, text), (x,), (x,))


def file(spec: str, x: np.ndarray, **options: Any) -> Any:
    with folder() as where:
        np.save(where / "x.npy", x)
        told: list[Any] = []
        if options.get("progress") is list:
            options["progress"] = lambda done, of: told.append((done, of))
        jc.round_file(where / "x.npy", where / "y.npy", spec, key_for(spec), **options)
        return files_of(where), told


def words(shape: Any, offset: Any, width: int) -> Any:
    with jax.enable_x64(True):
        return jc.random_bits(key=KEY, shape=shape, width=width, offset=offset)


def calls() -> Iterator[Call]:
    texts = [*cases.NAMED, *cases.CUSTOM, *cases.P3109, *cases.WIDE, *cases.FIXED, "codebook(-3,-1,0,0.5,8)",
             "posit8", "takum12", "hif8"]
    carriers = itertools.cycle(["float32", "float32", "float64", "bfloat16", "float32", "float16"])
    overflows = itertools.cycle(["ieee", "saturate", "propagate", "ieee"])
    for text, mode in itertools.product(texts, MODES):
        carrier, spec = next(carriers), f"{text}:{mode}:{next(overflows)}"
        if carrier == "bfloat16" and text in FINE:
            carrier = "float32"
        if text in (*cases.WIDE, "takum12") or (carrier == "float16" and not text.startswith(NARROW)):
            carrier = "float64"
        yield Call(f"round {spec} {carrier}", lambda s=spec, t=text, c=carrier: rounded(s, t, c))
    for i, text in enumerate(texts):
        spec = f"{text}:{('nearest_even', 'odd', 'stochastic')[i % 3]}"
        yield Call(f"round {spec} jit", lambda s=spec, t=text: jitted(s, t))
    for text, mode in itertools.product(cases.DOUBLE, MODES):
        yield Call(f"round {text}:{mode} float64", lambda s=f"{text}:{mode}", t=text: rounded(s, t, "float64"))
    for text in ("bfloat16:flush", "e5m10:flush:up", "fixed4.4:wrap", "fixed4.4:stochastic:wrap"):
        yield Call(f"round {text}", lambda s=text: rounded(s, s.split(":")[0], "float32"))
    for text, bits, mode in itertools.product(("bfloat16", "float8_e4m3fn", "fixed4.4"), (1, 4, 11, 24), STOCHASTIC[:3]):
        spec = jc.Spec(text, rounding=mode, random_bits=bits)
        yield Call(f"round {spec} jax", lambda s=spec, t=text: jc.round_to_format(jnp.asarray(hard(t)), s, KEY))
    x = normal("x", (4, 48), scale=8)
    for carrier in ("int32", "bool", "complex64", "complex128", "float8_e5m2"):
        yield Call(f"round dtype {carrier}", lambda c=carrier: jc.round_to_format(x.astype(c), "bfloat16"))
    for kind, value in {"float": 1.1, "int": 3, "list": [1.1, 2.2], "numpy": np.float32(1.1), "empty": x[:0], "text": "1.1"}.items():
        yield Call(f"round a {kind}", lambda v=value: jc.round_to_format(v, "e5m2"))
    noisy = "e4m3fn:stochastic"
    yield from several(
        f"round {noisy}", jc.round_to_format, jnp.asarray(x), noisy, KEY,
        offset={"offset": 17}, far={"offset": 2**33 + 5}, place={"offset": ((2, 16), (8, 64))}, xla={"impl": "xla"},
        pallas={"impl": "pallas"}, hardware={"generator": "hardware"}, wrong_place={"offset": ((7, 60), (8, 64))},
    )
    yield Call("round without a key", lambda: jc.round_to_format(x, noisy))
    yield Call("round bits", lambda: jc.round_to_format(x, "e4m3:stochastic:random_bits=8", bits=np.arange(np.size(x)).reshape(np.shape(x))))
    yield Call("round gradient_key", lambda: jax.vjp(lambda x: jc.round_to_format(x, "bfloat16:gradient=[e5m2:stochastic]", gradient_key=KEY), jnp.asarray(x))[1](jnp.asarray(x)))
    yield Call("round vmap", lambda: jax.vmap(lambda x, k: jc.round_to_format(x, noisy, k))(jnp.asarray(x), jax.random.split(KEY, 4)))
    specs = ("bfloat16", "e4m3fn:saturate", "fixed4.4", "mxfp8_e4m3", "int4(group=32)", "nf4", "nvfp4")
    for text, gradient in itertools.product(specs, ("", ":gradient=clipped", ":gradient=e5m2")):
        yield Call(f"gradient {text}{gradient}", lambda t=text + gradient: derivatives(t))
    for shape, offset, width in itertools.product(((7,), (3, 5)), (0, 11, 2**33 + 1), (32, 64)):
        yield Call(f"random_bits {shape} {offset} {width}", lambda a=shape, b=offset, c=width: words(a, b, c))
    yield Call("random_bits place", lambda: words((3, 5), ((1, 2), (7, 8)), 32))
    yield Call("random_bits 16", lambda: words((3,), 0, 16))
    for text, where in itertools.product(("bfloat16", "float8_e4m3fn", "binary32", "fixed4.4", "posit8"), ("significand", "code")):
        yield Call(f"flip_bits {text} {where}", lambda t=text, w=where: jc.flip_bits(x=hard(t, count=64), spec=t, p=0.05, key=KEY, where=w))
    y = rng_for("file").standard_normal((40, 64))
    for spec in ("bfloat16", "e5m2:stochastic", "int8", "int4(group=16)", "nvfp4", "fixed4.4:up"):
        for case, options in {"": {}, "chunk": {"chunk": 1000}, "progress": {"progress": list, "chunk": 4096}}.items():
            yield Call(f"round_file {spec} {case}", lambda s=spec, o=options: file(s, y.astype("float32"), **o))
    yield Call("round_file float64 F", lambda: file("tf32", np.asfortranarray(y), chunk=640))
    yield Call("round_file int", lambda: file("tf32", y.astype(int)))
