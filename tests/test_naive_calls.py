"""Calls of people who have not read the pages: each works, or is answered in two lines with the call that works."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def restored(tree: Any, like: Any = None) -> Any:
    """What `load` gives of what `save` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        jc.save(path := Path(folder) / "x.safetensors", tree)
        return jc.load(path, like)


def decoded(spec: str) -> float:
    """The largest error of numbers that are decoded by hand: codes times scales."""
    q = jc.quantize(jnp.linspace(-1, 1, 32), spec)
    scales = jc.Spec(spec).scaled.scale.decode(q.scale[0] if isinstance(q.scale, tuple) else q.scale)  # type: ignore
    scales = scales * np.float64(q.scale[1]) if isinstance(q.scale, tuple) else scales
    numbers = q.spec.element.decode(q.codes).reshape(scales.size, -1) * scales[:, None]
    return float(np.abs(numbers.ravel().astype(np.float32) - np.asarray(jc.dequantize(q))).max())


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
    "a tree in a file": (lambda: restored({"a": [W]})["a"][0].shape, (8, 4)),
    "a model in a file": (lambda: restored(model(), like=model()).kernel.shape, (8, 4)),
    "a packed model in a file": (lambda: restored(jc.nn.quantize(model(), "int8", "ptq"))["kernel"].shape, (8, 4)),
    "numbers of a tree": (lambda: jc.dequantize({"w": jc.quantize(W, "int8"), "b": X})["w"].shape, (8, 4)),
    "mxfp4 by hand": (lambda: decoded("mxfp4"), 0.0),
    "nvfp4 by hand": (lambda: decoded("nvfp4"), 0.0),
    "a state and a dict": (lambda: jc.optim.quantize_state(optax.adam(0.1), {"*": jnp.int8}).init(X).skipped.shape, ()),
    "rounded gradients": (lambda: str(jc.optim.round_updates("bf16", scale=0.5).init(X).key), "None"),
    "a list of integers": (lambda: jc.round_to_format([1, 2], "bf16").tolist(), [1.0, 2.0]),
    "inputs of one argument": (lambda: jc.tune(jnp.sin, ["bf16", "tf32"], [1.0, 2.0], 0.1).rows[0].spec, "bfloat16"),
    "a tree as an array": (lambda: jc.quantize({"w": W}, {"w": "int8"})["w"].nbytes, 36),
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
    "quantize_params": (lambda: untyped.nn.quantize_params, r"write jchop.quantize\(params, rules\)"),
    "scales of a tree": (lambda: untyped.quantize({"w": W}, "int8", scale=1.0), "are for one array"),
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
    "save_safetensors": (lambda: untyped.save_safetensors("x", {"w": W}), r"write jchop.save\(path, tree\)"),
    "load_safetensors": (lambda: untyped.load_safetensors("x"), r"write jchop.load\(path\)"),
    "a file of a model": (lambda: untyped.nn.save("x", model()), r"write jchop.save\(path, model\)"),
    "a checkpoint of a model": (lambda: untyped.nn.load_checkpoint("x", model()), r"write jchop.load_checkpoint\(path"),
    "the tree before the path": (lambda: untyped.save({"w": W}, "x.safetensors"), "must be a path, which comes first"),
    "a checkpoint before its path": (
        lambda: untyped.save_checkpoint({"w": W}, "x", "gptq"),
        "must be a path, which comes first",
    ),
    "like= by position": (lambda: untyped.load_checkpoint("x", model()), "what is to be filled is like="),
    "nested=": (lambda: untyped.load("x", nested=True), "load gives the saved dicts and lists"),
    "a model of Linen in a file": (lambda: jc.save("x", linen.Dense(4)), "of a module of Linen, pass the variables"),
    "a name of storage": (lambda: untyped.storage.quantize(W, "int8"), "write its names in jchop: jchop.quantize"),
    "dequantize_params": (lambda: untyped.dequantize_params({}), r"write jchop.dequantize\(params\)"),
    "a state and a list": (lambda: untyped.optim.quantize_state(optax.adam(0.1), [jc.Rule(weight="int8")]), "spec="),
    "a state and a pattern of no array": (
        lambda: jc.optim.quantize_state(optax.adam(0.1), {"moments": "int8"}).init(X),
        "spec: 'moments' matches no array, or only such as an earlier pattern matches; the nearest paths are",
    ),
    "round_gradients": (lambda: untyped.optim.round_gradients, "write round_updates"),
    "scale_gradients": (lambda: untyped.optim.scale_gradients, "write optax.scale"),
    "AdamW8bit": (lambda: untyped.optim.AdamW8bit, "write adamw8bit"),
    "decays of 16 bits": (
        lambda: optax.inject_hyperparams(jc.optim.adamw8bit)(learning_rate=1e-3).init(X.astype("bfloat16")),
        "hyperparam_dtype=jnp.float32",
    ),
    "a mesh second": (
        lambda: untyped.nn.shard({"w": W}, jax.make_mesh((1,), ("a",)), {}),
        "must map patterns of paths",
    ),
    "rules of emulate in a list": (lambda: untyped.emulate(jnp.sin, "bf16", rules=[jc.Rule()]), "a Rule is for jc.nn"),
    "tune without inputs": (
        lambda: untyped.tune(jnp.sin),
        r"write jchop.tune\(fun, \['bfloat16', 'tf32'\], \[\(x,\)\]",
    ),
    "tune of layers": (lambda: untyped.nn.tune, r"write jchop.nn.allocate_bits\(model, menu, batches"),
    "layers without data": (
        lambda: untyped.nn.sensitivity(model(), ["int8"]),
        r"write jchop.nn.sensitivity\(model, \[",
    ),
    "digits without a key": (lambda: untyped.significant_digits(jnp.sin, 1.0), r"fun, x, key=jax.random.key\(0\)"),
    "blame without arguments": (
        lambda: jc.emulate(jnp.sin, "bf16").blame(),
        r"write low.report\(x\), as low.blame\(x\)",
    ),
    "blame drawn by a function": (lambda: untyped.plot.blame, r"write found.plot\(\)"),
    "a study saved by a function": (lambda: untyped.study.save, r"write result.save\(folder\)"),
    "solve": (lambda: untyped.math.linalg.solve, r"write lu_solve\(lu\(a, spec\), b, spec\)"),
    "bicgstab": (lambda: untyped.math.linalg.bicgstab, r"write gmres\(a, b, spec\)"),
    "formats by position": (lambda: untyped.math.linalg.refine(W, W, "bf16", "tf32", "tf32"), "factor='binary16', wor"),
    "codes in an arithmetic": (lambda: jc.math.dot(jc.quantize(X, "int8"), W, "bf16"), "jchop.dot and jchop.einsum"),
    "an arithmetic for codes": (lambda: untyped.dot(X, W, "bf16"), r"jchop.math.dot\(x, w, 'bfloat16'\)"),
    "a raw key": (lambda: jc.round_to_format(X, "bf16:sr", jax.random.PRNGKey(0)), r"as jax.random.key\(0\) gives"),
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
