"""Formats, their text, properties and codes."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import jchop
from digests import Call
from digests.common import cases, jc
from digests.face import facts

TEXTS = (*cases.NAMED, *cases.P3109, "e5m10(bias=20)", "e4m3(subnormals=false)", "e4m3(infinities=false)", "e3m2fn",
         "fixed4.4", "ufixed3.5", "fixed1.7(symmetric=true)", "integer8", "uinteger4",
         "integer4(narrow=true)", "posit8", "posit16", "takum8", "takum_linear12", "takum_linear8", "hif8",
         "codebook(-3,-1,0,0.5,8)")
SCALED = tuple(name for name in jchop.formats.__all__ if isinstance(getattr(jchop.formats, name), jchop.formats.ScaledFormat))
SPECS = ("bfloat16", "e5m2:up", "e4m3fn:saturate", "e5m10:flush", "fixed4.4:wrap", "e5m2:stochastic:bits=8",
         "bfloat16:gradient=clipped", "bfloat16:gradient=e5m2", "int8(group=32,axis=0):stochastic", "nf4", "e9m99",
         "int4(group=16,scale=bfloat16,zero_point=float)", "mxfp4(group=16,nan_block=true)", "e4m3:sideways", "x7",
         "int8(sparse=2:4,sparse_axis=0)", "bfp8(group=16)", "int8(group=8,rule=mse)", "nf4(scale=int8(group=4))",
         "float32", "half", "fp8", "e4m3fn(group=(2,16))")


def made() -> dict[str, Callable[[], Any]]:
    """Formats by their constructors, each argument once."""
    tables: dict[str, tuple[Any, ...]] = {
        "FloatFormat": (
            {"exp_bits": 5, "frac_bits": 3}, {"bias": 10}, {"subnormals": False}, {"infinities": False, "nans": "top"},
            {"nans": "negative_zero"}, {"signed": False}, {"zero": False, "infinities": False, "nans": "top"},
            {"max_exponent": 2}, {"p3109": True, "nans": "negative_zero"}, {"nans": "none", "infinities": False},
            {"infinities": False},
        ),
        "FixedFormat": ({"int_bits": 3}, {"frac_bits": 4}, {"signed": False}, {"symmetric": True}),
        "IntegerFormat": ({"bits": 6}, {"signed": False}, {"narrow": True}),
        "CodebookFormat": ({"levels": (-2.0, 0.0, 0.25, 3.0)}, {"levels": (1.0, 0.5)}),
        "PositFormat": ({"bits": 10}, {"bits": 1}), "TakumFormat": ({"bits": 9},), "LogTakumFormat": ({"bits": 9},),
        "HiFloat8Format": ({},),
        "p3109": ({"bits": 6, "precision": 3}, {"signed": False}, {"extended": False}),
        "bfp": ({"bits": 8}, {"bits": 4, "group": 16}, {"group": "all", "axis": 0}),
        "ScaledFormat": (
            {"element": jchop.formats.float8_e4m3fn, "group": 16}, {"axis": 0}, {"group": None, "channel": 0},
            {"scale": jchop.formats.bfloat16}, {"rule": "mse"}, {"element": jchop.formats.IntegerFormat(4, signed=False),
                                                        "zero_point": "integer"},
            {"scale": jchop.formats.float8_e8m0fnu, "rule": "floor", "nan_block": True},
            {"element": jchop.formats.IntegerFormat(8), "sparse": (2, 4)},
            {"element": jchop.formats.IntegerFormat(8), "sparse": (2, 4), "sparse_axis": 0}, {"group": (2, 16), "axis": (0, 1)},
        ),
    }
    return {
        f"{name} {', '.join(f'{k}={v}' for k, v in changes.items())}": (
            lambda name=name, options=rows[0] | changes: getattr(jc.formats, name)(**options)
        )
        for name, rows in tables.items()
        for changes in rows
    }


def made_of(text: str) -> Any:
    return jchop.Spec(text).format


def facts_of(make: Any) -> Any:
    value = make()
    return str(value), repr(value), hash(value) == hash(make()), facts(value)


def codes(fmt: Any) -> Any:
    every = np.arange(2 ** min(fmt.bits, 12))
    values = fmt.decode(codes=every)
    some = [fmt.value_of(code=int(code)) for code in every[:: max(1, every.size // 32)]]
    back = [None if value is None else fmt.code_of(value=value) for value in some]
    return values, fmt.encode(values=values[values == values]), fmt.values() if fmt.bits <= 12 else None, list(map(str, some)), back


def shapes(fmt: Any) -> Any:
    shape = (32, 48)
    return fmt.bits_per_element(shape=shape), fmt.group_shape(shape=shape), fmt.kept_shape(shape=shape), fmt.scale_shape(
        shape=shape
    )


def attempt(function: Any) -> Any:
    try:
        return function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return type(error).__name__


def calls() -> Iterator[Call]:
    for name in (*jchop.formats.CATALOGUE, *SCALED):
        yield Call(f"format {name}", lambda name=name: facts_of(lambda: getattr(jc.formats, name)))
    for text in TEXTS:
        yield Call(f"parse_format {text}", lambda text=text: facts_of(lambda: jc.formats.parse_format(text)))
        yield Call(f"codes {text}", lambda text=text: codes(jchop.formats.parse_format(text)))
    for name in jchop.formats.ALIASES:
        yield Call(f"alias {name}", lambda name=name: (jc.formats.ALIASES[name], str(jc.Spec(name))))
    for text in SPECS:
        yield Call(f"parse {text}", lambda text=text: facts_of(lambda: jc.Spec(text)))
    for name, make in made().items():
        yield Call(f"made {name}", lambda make=make: facts_of(make))
        yield Call(f"named {name}", lambda make=make: facts_of(lambda: make().named(name="mine")))
    for name in ("posit8", "posit16", "takum8", "takum_linear12", "takum_linear8", "hif8"):
        fmt: Any = jchop.Spec(name).format
        yield Call(f"fraction_bits {name}", lambda fmt=fmt: [attempt(lambda e=e: fmt.fraction_bits(exponent=e)) for e in range(-20, 21)])
        if hasattr(fmt, "magnitude_of"):
            yield Call(f"magnitude_of {name}", lambda fmt=fmt: [str(attempt(lambda c=c: fmt.magnitude_of(code=c))) for c in range(1, 100)])
    yield Call("FloatFormat.default_bias", lambda: [jc.formats.FloatFormat.default_bias(exp_bits=n) for n in range(2, 12)])
    for text in (*SCALED, "int8(group=7)", "int4(group=(2,16))", "int8(channel=0)", "int8(group=all,sparse=2:4)"):
        yield Call(f"shapes {text}", lambda text=text: shapes(jchop.Spec(text).format))
    for text in ("int4(group=128)", "nf4(group=32,scale=bfloat16)", "mxfp4(axis=0)"):
        yield Call(f"replaced {text}", lambda text=text: str(made_of(text)(group=8, axis=1)))
    for name in (*jchop.formats.CATALOGUE, "e5m5", "fixed4.4", "posit16", "integer8"):
        yield Call(f"finfo {name}", lambda name=name: facts(jc.finfo(format=name)))
    for name in jchop.formats.SCALE_RULES:
        yield Call(f"rule {name}", lambda name=name: str(jc.formats.SCALE_RULES[name].name))
    yield Call("CATALOGUE", lambda: {k: str(v) for k, v in jc.formats.CATALOGUE.items()})
    yield Call("SCALED_CATALOGUE", lambda: {k: str(v) for k, v in jc.formats.SCALED_CATALOGUE.items()})
    yield from specs()


def specs() -> Iterator[Call]:
    for name, make in {
        "plain": lambda: jc.Spec(jchop.formats.bfloat16),
        "options": lambda: jc.Spec(format=jchop.formats.float8_e5m2, rounding="stochastic", overflow="saturate", random_bits=8),
        "flush": lambda: jc.Spec(jchop.formats.binary16, jc.Rounding.UP, flush=True),
        "clipped": lambda: jc.Spec(jchop.formats.bfloat16, overflow=jc.Overflow.SATURATE, gradient=jc.Gradient(clipped=True)),
        "rounded": lambda: jc.Spec(jchop.formats.bfloat16, gradient=jc.Gradient(round=jchop.Spec("e5m2"))),
        "no bits": lambda: jc.Spec(jchop.formats.bfloat16, random_bits=3),
        "wrap": lambda: jc.Spec(jchop.formats.bfloat16, overflow="wrap"),
    }.items():
        yield Call(f"Spec {name}", lambda make=make: facts_of(make))
    for name, make in {
        "plain": lambda: jc.MatmulSpec(),
        "options": lambda: jc.MatmulSpec(operands="e4m3fn", product="bfloat16", accumulate="e6m9", order="blocked(8)"),
        "fused": lambda: jc.MatmulSpec(accumulate="binary32", order=jc.Order("pairwise"), fused=True),
        "both": lambda: jc.MatmulSpec(product="bfloat16", fused=True),
        "stochastic": lambda: jc.MatmulSpec(accumulate="e6m9:stochastic"),
        "unit": lambda: jc.MatmulSpec(accumulate="binary32", order="matrix_unit(16)"),
    }.items():
        yield Call(f"MatmulSpec {name}", lambda make=make: facts_of(make))
    for text in ("sequential", "pairwise", "blocked(8)", "matrix_unit(16)", "aligned(16,25)", "aligned_apart(4,24)", "aligned_halves(8,23)", "blocked_pairwise(4)", "aligned(8,24,promote_every=32)",
                 "aligned_sums(16,25)", "fused(4)"):
        yield Call(f"Order.parse {text}", lambda text=text: facts_of(lambda: jc.Order.parse(text=text)))
    yield Call("Order options", lambda: facts_of(lambda: jc.Order(kind="aligned", block=16, bits=25, promote_every=64)))
    for unit in jchop.TENSOR_CORES:
        yield Call(f"TENSOR_CORES {unit}", lambda unit=unit: str(jc.TENSOR_CORES[unit]))
    for unit in jchop.TENSOR_CORES:
        for dtype in ("float16", "bfloat16", "tf32", "float8_e4m3fn", "float8_e5m2"):
            yield Call(f"tensor_core {unit} {dtype}", lambda u=unit, d=dtype: str(jc.tensor_core(unit=u, dtype=d)))
    yield Call("tensor_core out", lambda: str(jc.tensor_core("ampere", "float16", out="binary16")))
    yield Call("tensor_core promote", lambda: str(jc.tensor_core("hopper", "float8_e4m3fn", promote_every=128)))
    yield Call("TensorCore", lambda: str(jc.TensorCore(spec=jchop.MatmulSpec(), source="a page", narrow=True)))
    for name in ("LSQ", "DelayedScaling", "MovingAverage", "Hadamard"):
        for case, kwargs in {
            "plain": {},
            "options": {"LSQ": {"factor": False}, "DelayedScaling": {"length": 8, "take": "last"}, "MovingAverage": {"decay": 0.5},
                        "Hadamard": {"size": 4, "signs": (1, -1, 1, 1), "products": "both"}}[name],
        }.items():
            yield Call(f"{name} {case}", lambda n=name, k=kwargs: facts_of(lambda: getattr(jc, n)(**k)))
    yield Call("Hadamard.rotate random", lambda: jc.Hadamard(8, "random").rotate(np.arange(32, dtype=np.float32).reshape(2, 16), key=jax.random.key(3)))
    yield Call("Hadamard.rotate", lambda: jc.Hadamard(8, products="all").rotate(laid=np.arange(32, dtype=np.float32).reshape(2, 16)))
    qwix = {"module_path": ".*mlp.*", "weight_qtype": "int4", "act_qtype": "int8", "tile_size": 32}
    yield Call("Rule.from_qwix", lambda: [str(rule) for rule in jc.Rule.from_qwix(rules=qwix)])
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    yield Call("Rule.from_hf", lambda: [str(rule) for rule in jc.Rule.from_hf(quantization_config=config)])
    rule = {"layer": "Linear", "operation": "dot_general", "weight": "int8(group=all)", "activation": "e4m3fn", "output": "bfloat16", "bias": "bfloat16"}
    backward = {"gradient": "e5m2:stochastic", "input_gradient": "e5m3", "weight_gradient": "binary32", "stochastic_stream": "noise"}
    more = {"cache": "int8(group=all)", "rotation": jchop.Hadamard(16), "gradient": "e5m2", "weight": "e4m3", "matmul": jchop.MatmulSpec(accumulate="e6m9")}
    for name, kwargs in {"plain": {}, "forward": rule, "backward": backward, "matmul": {**more}, "scales": {"weight": "int8", "scale_from": jchop.LSQ()},
                         "codes": {"weight": "int8(group=all)", "activation": "int8(group=all)", "product": "codes"},
                         "wrong": {"product": "both"}}.items():
        yield Call(f"Rule {name}", lambda kwargs=kwargs: facts_of(lambda: jc.Rule("block/*", **kwargs)))
    for pattern in ("*", "block", "block/", "!block", "blocks/{0,2}", "/", "b*/mlp", "[ab]"):
        for path in ("block/mlp", "blocks/2", "head", "a"):
            yield Call(f"Rule.matches {pattern} {path}", lambda p=pattern, q=path: (
                (r := jc.Rule(p, layer="Linear", operation="dot_general")).matches(path=q, layer="Linear", operation="dot_general"),
                r.selects(paths=[q, "head"], layer="Linear", operation="dot_general")))
    yield Call("Rule replaced", lambda: str(replace(jc.Rule("a", weight="nf4"), weight=None)))
