"""Packed weights: `quantize` of modules with mode="weight_only", `PackedTensor` and `report`."""

from __future__ import annotations

import copy
import io
import json
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

pytest.importorskip("torch")

import torch
from refusals import assert_refused
from torch import nn
from torch_bridge.tensors import array, same_bits

import jchop as jc

further = Further()

# Each spec with its bits: (element, scale, zero point, elements of a group), and the bytes of a tensor scale.
SPECS = {
    "int8(channel=0)": (8, 32, 0, 64, 0),
    "int4(group=32)": (4, 32, 0, 32, 0),
    "int4(group=32,scale=bfloat16)": (4, 16, 0, 32, 0),
    "uint4(group=32,zero_point=integer)": (4, 32, 32, 32, 0),
    "nf4": (4, 32, 0, 64, 0),
    "float8_e4m3fn(channel=0)": (8, 32, 0, 64, 0),
    "mxfp8_e4m3": (8, 8, 0, 32, 0),
    "mxfp4": (4, 8, 0, 32, 0),
    "nvfp4": (4, 8, 0, 16, 4),
    "float8_e5m2": (8, 0, 0, 64, 0),
    "e5m6": (16, 0, 0, 64, 0),
    "bfloat16": (16, 0, 0, 64, 0),
}
QUICK = ("int4(group=32)", "float8_e4m3fn(channel=0)", "nvfp4")
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))


def linear() -> nn.Sequential:
    layer = nn.Linear(64, 8)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
        layer.bias.copy_(torch.arange(8.0))
    return nn.Sequential(layer)


def packed(spec: Any, module: nn.Module | None = None, **more: Any) -> Any:
    rules = {"*": {"weight": spec}}
    return jc.torch.quantize(linear() if module is None else module, rules, mode="weight_only", **more)


def parts_in(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The codes and scales of a state dict."""
    prefix = "0.weight_packed."
    parts = {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
    return {name: part for name, part in parts.items() if name != "_extra_state"}


@pytest.mark.parametrize(
    "spec", [spec if spec in QUICK else pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS]
)
@pytest.mark.in_turn(3)
def test_every_format(spec: str) -> None:
    """Weights, outputs, state dicts and bytes, by JAX's results, by plain torch, and by the formula."""
    low, q = packed(spec), jc.quantize(jnp.asarray(WEIGHT.numpy()), spec)
    assert same_bits(low[0].weight, jc.dequantize(q))
    assert torch.equal(low(X), nn.functional.linear(X, low[0].weight, torch.arange(8.0)))
    assert torch.equal(low(X), jc.torch.quantize(linear(), {"*": {"weight": spec}})(X))
    state = low.state_dict()
    parts, leaves = parts_in(state), jax.tree.leaves(q)
    assert [part.view(torch.uint8).numpy().tobytes() for part in parts.values() if part.ndim] == [
        np.asarray(leaf).tobytes() for leaf in leaves if leaf.ndim
    ]
    element, scale, zero, group, whole = SPECS[spec]
    assert (
        sum(part.nbytes for part in parts.values()) == 512 * element // 8 + 512 // group * (scale + zero) // 8 + whole
    )
    description = json.loads(bytes(state["0.weight_packed._extra_state"].tolist()))
    assert jc.Spec(description.pop("spec")) == q.spec  # `bfloat16` and `e8m7` are one format
    assert description == {"size": 64, "dtype": "float32"}
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    other = packed(spec, nn.Sequential(nn.Linear(64, 8)))
    assert not torch.equal(other(X), low(X))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(X), low(X))


def test_jax_has_the_memory_of_the_buffers() -> None:
    low = packed("nvfp4")
    inner: jc.torch.PackedTensor = low[0].weight_packed
    q = inner.as_qarray()
    assert q.spec == jc.Spec(jc.formats.nvfp4) and q.shape == inner.shape == (8, 64) and q.nbytes == inner.nbytes
    pointers = [part.data_ptr() for part in inner.buffers()]
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(q)] == pointers
    back = jc.torch.PackedTensor(q)
    assert [part.data_ptr() for part in back.buffers()] == pointers
    before = np.asarray(q.qvalue).copy()
    back.load_state_dict(packed("nvfp4", nn.Sequential(nn.Linear(64, 8)))[0].weight_packed.state_dict())
    assert not torch.equal(back(), inner()) and (np.asarray(q.qvalue) == before).all()  # arrays of JAX stay
    low[0].weight_packed = back
    assert torch.equal(low[0].weight, back())
    with pytest.raises(AttributeError, match="weight is packed: set weight_packed"):
        low[0].weight = nn.Parameter(WEIGHT)
    for wrong, said in ((WEIGHT, "must be a jchop.QArray"), (jc.quantize(WEIGHT.numpy(), "nf4"), "JAX array")):
        with pytest.raises(TypeError, match=said):
            jc.torch.PackedTensor(wrong)  # type: ignore[arg-type]


@further.first
def a_layer_of_flax_has_the_same_numbers() -> None:
    """With integers every sum is exact, so the outputs are equal, too."""
    nnx = pytest.importorskip("flax.nnx")
    weight = np.random.default_rng(0).integers(-7, 8, (8, 64)).astype(np.float32)
    weight[:, ::32] = 7  # so that every scale is 1
    model: Any = linear()
    ours = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(weight))
    ours.kernel[...], ours.bias[...] = jnp.asarray(weight.T), jnp.arange(8.0)
    theirs = jc.nn.quantize(ours, jc.Rule(weight="int4(group=32)"), mode="weight_only")
    x = torch.arange(-32.0, 32.0).repeat(3, 1)
    low = packed("int4(group=32)", model)
    assert same_bits(low(x), theirs(jnp.asarray(x.numpy())))
    assert torch.equal(low(x), model(x))


def test_dtypes_devices_and_copies() -> None:
    low = packed("float8_e4m3fn(channel=0)")
    parts = {name: part.clone() for name, part in parts_in(low.state_dict()).items()}
    half = copy.deepcopy(low).to(torch.float16)
    assert half[0].weight.dtype is half(X.half()).dtype is torch.float16 and half[0].bias.dtype is torch.float16
    q = jc.quantize(jnp.asarray(WEIGHT.numpy()), "float8_e4m3fn(channel=0)")
    assert same_bits(half[0].weight, jc.dequantize(q, "float16"))
    assert torch.equal(half.float()[0].weight, low[0].weight)  # nothing was lost
    for name, part in parts_in(half.state_dict()).items():
        assert part.dtype is parts[name].dtype and torch.equal(part.view(torch.uint8), parts[name].view(torch.uint8))
        assert part.data_ptr() != low[0].weight_packed.get_buffer(name).data_ptr()
    empty = copy.deepcopy(low).to("meta")
    assert empty[0].weight_packed.qvalue.is_meta
    empty.load_state_dict(low.state_dict(), assign=True)
    assert torch.equal(empty(X), low(X))
    torch.save(low, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), low(X))
    for change in (lambda: low.type(torch.float16), lambda: low[0].weight_packed.to(torch.float8_e5m2)):
        with pytest.raises(TypeError, match=r"cannot be|have no other dtype"):
            change()


@further
@pytest.mark.filterwarnings("ignore:.*`torch.jit.script` is deprecated:DeprecationWarning")
def other_layers_compiled_exported_and_in_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 32)
            self.line, self.image = nn.Conv1d(6, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, (2, 3)))
            self.head = nn.Linear(27, 10)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.line(self.table(ids))
            return self.head(self.image(x[:, :, None].repeat(1, 1, 2, 1))[:, :, 0, :27])

    rules = {"table": {"weight": "nf4"}, "line": {"weight": "int4(group=3)"}, "*": {"weight": "int8(channel=0)"}}
    net, ids = Net(), torch.arange(12).reshape(2, 6) % 10
    low, simulated = jc.torch.quantize(net, rules, mode="weight_only"), jc.torch.quantize(net, rules)
    assert torch.equal(low(ids), simulated(ids))
    low(ids).sum().backward()
    assert {name for name, value in low.named_parameters() if value.grad is not None} == {
        "line.bias", "image.bias", "head.bias"
    }  # fmt: skip
    safetensors.save_file(low.state_dict(), tmp_path / "a.safetensors")
    other = jc.torch.quantize(Net(), rules, mode="weight_only")
    other.load_state_dict(safetensors.load_file(tmp_path / "a.safetensors"))
    assert torch.equal(other(ids), low(ids))
    assert torch.equal(torch.compile(low, fullgraph=True, backend="aot_eager")(ids), low(ids))
    assert torch.equal(torch.export.export(low, (ids,)).module()(ids), low(ids))


@further
def draws_tied_weights_and_rounded_activations() -> None:
    q = packed("e5m1:stochastic", seed=3)[0].weight_packed.as_qarray()
    key = jax.random.key(3)
    for number in (0, 2, 0, 0):  # the layer, the weight, the first call, the forward pass
        key = jax.random.fold_in(key, number)
    assert (jc.dequantize(q) == jc.round_to_format(jnp.asarray(WEIGHT.numpy()), "e5m1:stochastic", key)).all()

    tied = nn.ModuleDict({"a": nn.Embedding(8, 64), "b": nn.Linear(64, 8, bias=False)})
    tied["b"].weight = tied["a"].weight
    low = packed("mxfp4", tied)
    assert low["a"].weight_packed is low["b"].weight_packed
    assert [row.nbytes for row in jc.torch.report(low).rows] == [272, 0] and jc.torch.report(low).bits == 4.25

    rule = {"weight": "int8(channel=0)", "bias": "bfloat16", "activation": "e4m3", "output": "e5m3"}
    both = [jc.torch.quantize(linear(), {"0": rule}, mode=mode) for mode in ("qat", "ptq")]
    assert torch.equal(both[0](X), both[1](X))
    bias = both[1][0].bias_packed
    spec = str(bias.as_qarray().spec)  # an equal format may have been named first, as e8m7
    assert str(bias) == f"PackedTensor({spec!r}, shape=(8,), dtype=torch.float32)"
    assert jc.Spec(spec) == jc.Spec("bfloat16")


def test_report() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4, bias=False), nn.LayerNorm(4))
    low = jc.torch.quantize(model, {"0": {"weight": "int4(group=32)"}, "*": {}}, mode="weight_only")
    rows = jc.torch.report(low).rows
    assert [(row.path, row.stored, row.rounds, row.shape, row.nbytes, row.bits) for row in rows] == [
        ("0.weight", "int4(group=32)", "", (8, 64), 320, 5.0),
        ("0.bias", "float32", "", (8,), 32, 32.0),
        ("1.weight", "float32", "", (4, 8), 128, 32.0),
        ("2.weight", "float32", "", (4,), 16, 32.0),
        ("2.bias", "float32", "", (4,), 16, 32.0),
    ]
    assert jc.torch.report(low).nbytes == sum(row.nbytes for row in rows)
    simulated = jc.torch.quantize(model, {"0": {"weight": "e4m3:stochastic"}, "*": {}})
    calls = int(simulated[0].parametrizations.weight[0].calls)  # type: ignore[index]
    first = next(row for row in jc.torch.report(simulated).rows if row.path == "0.weight")
    assert (first.stored, jc.Spec(first.rounds), first.nbytes) == ("float32", jc.Spec("e4m3:stochastic"), 2048)
    assert calls == int(simulated[0].parametrizations.weight[0].calls)  # type: ignore[index]
    assert math.isnan(jc.torch.report(nn.ReLU()).bits)
    with pytest.raises(TypeError, match="must be a torch"):
        jc.torch.report(WEIGHT)  # type: ignore[arg-type]


OTHER_STATES: list[tuple[Any, str]] = [
        ("int4(group=16)", r"0.weight_packed: the state has spec='int4\(group=16\)'.*has spec='int4\(group=32\)'"),
        ({"0.weight": WEIGHT}, "Missing key"),
        ({"0.weight_packed.qvalue": torch.zeros(8, 16, dtype=torch.uint8)}, r"qvalue is torch.uint8\[8, 16\] in the"),
        ({"0.weight_packed.qvalue": torch.zeros(8, 32, dtype=torch.int8)}, r"qvalue is torch.int8\[8, 32\] in the"),
        ({"0.weight_packed.scale": torch.ones(8, 2).half()}, r"scale is torch.float16\[8, 2\] in the"),
        ({"0.weight_packed._extra_state": torch.zeros(3)}, "is not the description of a PackedTensor"),
        ({"0.weight_packed.more": torch.zeros(3)}, "Unexpected key"),
]  # fmt: skip


def test_a_state_of_another_form() -> None:
    for other, said in OTHER_STATES:
        low = packed("int4(group=32)")
        before = low[0].weight.clone()
        if isinstance(other, str):
            state = packed(other).state_dict()
        else:
            state = {} if "0.weight" in other else low.state_dict()
            state |= other | {"0.bias": torch.zeros(8)}
        with pytest.raises(RuntimeError, match=said):
            low.load_state_dict(state)
        assert torch.equal(low[0].weight, before), said
    with pytest.raises(RuntimeError, match="the state has scale, but not qvalue"):
        packed("int4(group=32)").load_state_dict({"0.weight_packed.scale": torch.ones(8, 2)}, strict=False)


def test_errors() -> None:
    table: Any = [
        (None, {"*": {"weight": "nf4", "activation": "e4m3"}}, "weight_only", ValueError, "use mode='ptq'"),
        (None, {"*": {"weight": "nf4"}}, "packed", ValueError, "mode='packed'"),
        (None, {"*": {"weight": "e8m20"}}, "ptq", ValueError, r"weight of the layer '0' \(Linear\)"),
        (nn.LSTM(2, 2), {"*": {"weight": "nf4"}}, "weight_only", NotImplementedError, "LSTMCell"),
        (nn.Linear(2, 2, dtype=torch.complex64), {"*": {"weight": "nf4"}}, "ptq", TypeError, "weight of the layer ''"),
    ]

    def quantized(module: Any, rules: Any, mode: Any) -> Any:
        return jc.torch.quantize(linear() if module is None else module, rules, mode=mode)

    assert_refused({said: (partial(quantized, *given), error, said) for *given, error, said in table})


def test_errors_of_arguments() -> None:
    low = packed("nf4", nn.Linear(64, 8, bias=False))
    with pytest.raises(ValueError, match="quantized already"):
        packed("nf4", low)
    with pytest.raises(ValueError, match="is for modules"):
        jc.torch.quantize(WEIGHT, "nf4", mode="ptq")  # type: ignore[call-overload]
    assert same_bits(low.weight, array(jc.torch.dequantize(jc.torch.quantize(WEIGHT, "nf4")))) is False


test_further = further.test()
