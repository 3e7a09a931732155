"""Calls of people who have not read the pages: each works, or is answered in two lines with the call that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each_case import each
from flax import linen, nnx

import jchop as jc

untyped: Any = jc
KEY = jax.random.key(0)
X, W = jnp.ones((4, 8)), jnp.ones((8, 4))


def model() -> nnx.Linear:
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0))


def quantized(model: Any, **options: Any) -> Any:
    return jc.nn.quantize(model, "int8", "ptq", **options)


class Scores(nnx.Module):
    """A model with a matrix of its own, and a method that is not its call."""

    def __init__(self) -> None:
        self.w = nnx.Param(W)

    def score(self, x: Any) -> Any:
        return x @ self.w[...]


def product(params: Any, x: Any) -> Any:
    return x @ params["w"]


WORKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "a spec is its text": (lambda: repr(jc.Spec("e4m3fn:sr")), "Spec('float8_e4m3fn:stochastic')"),
    "its repr reads back": (lambda: eval(repr(jc.Spec("mxfp4:sr")), {"Spec": jc.Spec}), jc.Spec("mxfp4:stochastic")),
    "a rule is short": (lambda: repr(jc.Rule(weight="int4(group=32)")), "Rule(weight=Spec('int4(group=32)'))"),
    "upper case": (lambda: str(jc.Spec("BF16")), "bfloat16"),
    "rtz": (lambda: str(jc.Spec("bf16:rtz")), "bfloat16:toward_zero"),
    "fp4": (lambda: str(jc.Spec("fp4")), "float4_e2m1fn"),
    "a dtype of JAX": (lambda: float(jc.emulate(lambda x: x * x, jnp.bfloat16)(jnp.float32(1.1))), 1.2109375),
    "a dtype of NumPy": (lambda: float(jc.round_to_format(1.1, np.float16)), 1.099609375),
    "finfo of a dtype": (lambda: jc.finfo(jnp.bfloat16).bits, 16),
    "an integer dtype": (lambda: str(jc.quantize(X, jnp.int8).spec), "int8"),
    "rules as one text": (lambda: jc.quantize_fn(product, "int8")({"w": W}, X).shape, (4, 4)),
    "rules as a dict": (lambda: jc.quantize_fn(product, {"w": "int8"})({"w": W}, X).shape, (4, 4)),
    "a model and a text": (lambda: jc.nn.quantize(model(), "int8")(X).shape, (4, 4)),
    "a model and a dict": (lambda: jc.nn.quantize(model(), {"*": {"weight": jnp.int8}})(X).shape, (4, 4)),
    "LoRA by a dict": (lambda: jc.nn.add_lora(model(), {"*": {"rank": 2}}, rngs=nnx.Rngs(1))(X).shape, (4, 4)),
    "a model and data": (lambda: quantized(model(), batches=[X])(X).shape, (4, 4)),
    "a method and data": (
        lambda: jc.nn.quantize(Scores(), "int8", "ptq", call=Scores.score, batches=[X]).w.shape,
        (8, 4),
    ),
    "a module of Linen": (lambda: type(jc.nn.quantize(linen.Dense(4), "int8")).__name__, "Quantized"),
    "options by position": (lambda: str(jc.Spec("e4m3fn", "stochastic")), "float8_e4m3fn:stochastic"),
}

ANSWERED: dict[str, tuple[Callable[[], Any], str]] = {
    "LoRA by qwix's words": (
        lambda: untyped.nn.add_lora(model(), {"module_path": ".*", "rank": 2}, rngs=nnx.Rngs(1)),
        r"jc.nn.LoraRule.from_qwix\(rules\)",
    ),
    "LoRA by a rank": (
        lambda: untyped.nn.add_lora(model(), 8, rngs=nnx.Rngs(1)),
        r"rules=8 must be .* \{'\*': \{'rank': 8\}\}",
    ),
    "LoRA on a module of Linen": (
        lambda: untyped.nn.add_lora({}, {"*": {"rank": 2}}, fun=linen.Dense(4), inputs=(X,), key=KEY),
        r"jchop.nn.quantize\(module, jchop.Rule\(\)\)",
    ),
    "fp8": (lambda: jc.Spec("fp8"), "did you mean float8_e4m3fn"),
    "mxfp8": (lambda: jc.Spec("mxfp8"), "did you mean mxfp8_e4m3 or mxfp8_e5m2"),
    "w8a8": (lambda: jc.Spec("w8a8"), r"Rule\(weight='int8\(channel=0\)', activation='int8'\)"),
    "a rounding alone": (lambda: jc.Spec("rtz"), "belongs after a format, as in e5m2:rtz"),
    "tile_size": (lambda: jc.Spec("int4(tile_size=32)"), "did you mean group"),
    "per_channel": (lambda: jc.Spec("int8(per_channel)"), "did you mean channel=0"),
    "saturating": (lambda: jc.Spec("e4m3fn:saturating"), "did you mean saturate"),
    "a format as a name": (lambda: untyped.bf16, "write jchop.formats.bfloat16, or its text 'bf16'"),
    "a class of formats": (lambda: untyped.FloatFormat, "write jchop.formats.FloatFormat"),
    "round": (lambda: untyped.round, "write jchop.round_to_format"),
    "a misspelt name": (lambda: untyped.quantise, "did you mean quantize"),
    "rounding=": (lambda: untyped.round_to_format(X, "bf16", rounding="stochastic"), "has no rounding=; write"),
    "seed=": (lambda: untyped.round_to_format(X, "bf16:sr", seed=0), r"write key=jax.random.key\(0\)"),
    "a number as a key": (lambda: untyped.round_to_format(X, "bf16:sr", 0), r"as jax.random.key\(0\) gives"),
    "no key": (lambda: jc.round_to_format(X, "bf16:sr"), "key"),
    "accumulate=": (lambda: untyped.math.matmul(X, W, "e4m3", accumulate="e8m9"), "write MatmulSpec"),
    "qwix's words": (lambda: untyped.Rule(weight_qtype="int4"), "write Rule.from_qwix"),
    "the function second": (lambda: untyped.emulate("bf16", jnp.sin), "the function comes first"),
    "values of a scaled format": (lambda: untyped.formats.mxfp4.values(), "see those of mxfp4.element"),
    "a model as an array": (lambda: jc.quantize(model(), "int4"), "jchop.nn.quantize takes models"),
    "a tree as an array": (lambda: jc.quantize({"w": W}, "int4"), "jax.tree.map"),
    "an unknown mode": (lambda: untyped.nn.quantize(model(), "int8", mode="int8"), "must be one of 'qat', 'ptq'"),
    "Linen and data": (lambda: quantized(linen.Dense(4), batches=[X]), r"\.pack\(variables,"),
    "data in training": (lambda: jc.nn.quantize(model(), "int8", batches=[X]), "use mode='ptq' or 'weight_only'"),
    "steps without data": (lambda: quantized(model(), steps=[]), "pass batches="),
    "a report without data": (lambda: jc.quantize_fn(product, "int8").pack(W, return_report=True), "pass batches="),
    "a call without data": (
        lambda: jc.nn.quantize(model(), "int8", call=print),
        r"pass what it takes, as inputs=\(x,\)",
    ),
    "ptq.quantize": (lambda: untyped.ptq.quantize, r"write jchop.quantize_fn\(fun, rules\).pack\(params, batches="),
    "nn.quantize_with_data": (
        lambda: untyped.nn.quantize_with_data,
        r"jchop.nn.quantize\(model, rules, 'ptq', batches",
    ),
    "nn.correct_biases": (lambda: untyped.nn.correct_biases, r"steps=\[jchop.ptq.correct_biases\(\)\]"),
    "a program to pack": (lambda: jc.nn.quantize(Scores(), "int8", "ptq"), r"^inputs=None: pass inputs=\(x,\)"),
    "integers": (lambda: jc.round_to_format(jnp.arange(3), "bf16"), r"x.astype\('float32'\)"),
}


@each("name", WORKS)
def test_it_works(name: str) -> None:
    call, result = WORKS[name]
    assert call() == result


@each("name", ANSWERED)
def test_it_is_answered(name: str) -> None:
    call, answer = ANSWERED[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=answer) as caught:
        call()
    text = str(caught.value)
    assert text.count("\n") < 2 and len(text) <= 240, text
