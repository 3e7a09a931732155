"""Pychop's listings for torch: tensors, layers, networks, optimizers, and quantization after training."""

from __future__ import annotations

from typing import Any

import exact
import jax
import numpy as np
import oracle
import pytest
from further import Further

torch: Any = pytest.importorskip("torch")

from jchop.compat import pychop  # noqa: E402
from jchop.compat.pychop import Chop, Chopf, ChopfSTE, Chopi, ChopiSTE, ChopSTE, FaultChop, layers, optimizers  # noqa: E402

further = Further()

nn = torch.nn
E4M3 = oracle.ieee(4, 3)


def of(x: Any) -> np.ndarray:
    return x.detach().numpy().astype(np.float64)


@further
def tensors() -> None:
    x = torch.tensor([1.1, -2.3, 3.7, 300.0], requires_grad=True)
    for ch, values in ((Chop(4, 3), E4M3), (FaultChop("q43"), E4M3), (Chopf(4, 4), oracle.fixed(4, 4))):
        rounded = ch(x)
        exact.assert_same(of(rounded), exact.rounded(of(x), values))
        (gradient,) = torch.autograd.grad(rounded.sum(), x)
        assert gradient.tolist() == [1, 1, 1, 1]
    random = Chop(4, 3, rmode=5, random_state=3), Chop(4, 3, rmode=5, random_state=3)
    wide = torch.full((500,), 1.0625)
    np.testing.assert_array_equal(random[0](wide).numpy(), random[1](wide.numpy()))
    codes = (ch := Chopi(8, symmetric=True)).quantize(x)
    assert codes.dtype == torch.int8 and codes.tolist() == [0, -1, 2, 127]
    np.testing.assert_array_equal(ch.dequantize(codes).numpy(), of(ch(x)).astype(np.float32))
    for symmetric in (False, True):
        kept, alike = Chopi(8, symmetric=symmetric), Chopi(8, symmetric=symmetric)
        kept.calibrate(torch.tensor([-1.0, 1.55]))
        alike.calibrate(np.array([-1.0, 1.55], np.float32))
        assert torch.equal(kept(x), alike(x)) and torch.equal(kept.quantize(x), alike.quantize(x))
        assert torch.equal(kept.dequantize(kept.quantize(x)), kept(x)) and abs(kept(x)[3].item() - 1.55) < 0.01
    assert pychop.add(torch.ones(2), torch.ones(2) / 64, Chop(4, 3)).tolist() == [1, 1]
    assert Chop(4, 3).sum(torch.ones(40)).item() == 16
    flipped = FaultChop("q43", flip=True, p=1)(torch.ones(8))
    assert set(flipped.tolist()) <= {1.125, 1.25, 1.5}
    with pytest.raises(ValueError, match="no gradient"):
        FaultChop("q43", flip=True)(x)


def test_tensors_draw_the_bits_of_arrays_also_of_parts_of_others() -> None:
    x = torch.full((40, 3), 1.0625)[:, ::2]
    for make in (lambda seed: Chop(4, 3, rmode=5, random_state=seed), lambda s: Chopf(4, 3, rmode=5, random_state=s)):
        tensors, arrays, others = make(3), make(3), make(4)
        first, second = (tensors(x) for _ in range(2))
        for drawn in (first, second):
            np.testing.assert_array_equal(drawn.numpy(), arrays(x.numpy()))
        assert not torch.equal(first, second) and not torch.equal(first, others(x))
    assert pychop.add(x, x, Chop(4, 3)).unique().tolist() == [2.0]


def test_a_key_of_jax_is_refused_for_tensors() -> None:
    """And not passed over: the object's own numbers would be drawn."""
    for ch in (Chop(5, 2, rmode=5), Chop(10, 9, rmode=5), FaultChop("h", rmode=5), FaultChop("h", explim=0, rmode=5),
               Chopf(4, 4, rmode=5)):  # fmt: skip
        for call in (ch, ch.quantize):
            with pytest.raises(TypeError, match="key is for arrays of JAX and NumPy"):
                call(torch.ones(2), key=jax.random.key(0))


def test_a_layer_is_what_it_says() -> None:
    torch.manual_seed(0)
    layer, x = layers.QuantizedLinear(5, 4, chop=ChopSTE(4, 3)), torch.rand(3, 5)
    plain = nn.Linear(5, 4)
    plain.load_state_dict(layer.state_dict())
    weight, bias = (exact.rounded(of(p), E4M3) for p in (plain.weight, plain.bias))
    wanted = exact.rounded((of(x) @ weight.T + bias).astype(np.float32), E4M3)
    y = layer(x)
    exact.assert_same(of(y), wanted)
    y.sum().backward()
    np.testing.assert_allclose(layer.weight.grad[0], x.sum(0))
    assert isinstance(layer.weight, nn.Parameter)
    layer.chop = None
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize(
    ("prefix", "chop"), [("Quantized", ChopSTE(5, 4)), ("IQuantized", ChopiSTE(8, symmetric=True))]
)
def test_activations_round_their_input_too(prefix: str, chop: Any) -> None:
    """The forward passes of Pychop 0.6.2: round(f(round(x))); other layers compute round(f(x))."""
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    both = {
        "ELU": nn.ELU(), "GELU": nn.GELU(), "LeakyReLU": nn.LeakyReLU(), "ReLU": nn.ReLU(), "SiLU": nn.SiLU(),
        "Sigmoid": nn.Sigmoid(), "Softmax": nn.Softmax(-1), "Tanh": nn.Tanh(), "Dropout": nn.Dropout(),
        "PReLU": nn.PReLU(1, chop(torch.tensor([0.3])).item()),
    }  # fmt: skip
    for name, plain in (both | {"AvgPool1d": nn.AvgPool1d(2), "LayerNorm": nn.LayerNorm(64)}).items():
        args = {"AvgPool1d": (2,), "LayerNorm": (64,), "PReLU": (1, 0.3)}.get(name, ())
        for training in (True, False):
            layer = getattr(layers, prefix + name)(*args, chop).train(training)  # Pychop's last argument is the chop
            plain.train(training)
            torch.manual_seed(1)
            y = layer(x)
            torch.manual_seed(1)
            wanted = chop(plain(chop(x) if name in both else x))
            assert torch.equal(y, wanted), name
            torch.manual_seed(1)
            other = chop(plain(x if name in both else chop(x)))
            assert name in ("ReLU", "Dropout") or not torch.equal(y, other), name
    softmax = getattr(layers, prefix + "Softmax")(0, chop)
    assert torch.equal(softmax(x), chop(nn.Softmax(0)(chop(x))))


@further
def every_layer_runs_and_trains() -> None:
    """Each class of the original, with the layer's own arguments; parameters stay what they are and get gradients."""
    image, line, volume = torch.rand(2, 2, 6, 6), torch.rand(2, 2, 6), torch.rand(2, 2, 4, 4, 4)
    arguments = {
        "Linear": ((6, 3), image), "Embedding": ((5, 3), torch.tensor([1, 2])), "LayerNorm": ((6,), image),
        "GroupNorm": ((1, 2), image), "Softmax": ((-1,), image), "PReLU": ((), image),
        "RNN": ((6, 3), line), "LSTM": ((6, 3), line), "GRU": ((6, 3), line),
        "MultiheadAttention": ((6, 2), line),
    }  # fmt: skip
    inputs = {"1d": line, "2d": image, "3d": volume}
    ch = Chop(5, 10)
    names = [name.removeprefix("Quantized") for name in layers.__all__ if name.startswith("Quantized")]
    names = [name for name in names if name not in ("Attention", "AvgPool", "Flatten", "Layer")]
    assert len(names) >= 38
    for name in names:
        args, x = arguments.get(name, ((), inputs.get(name[-2:], image)))
        if name[-2:] in inputs:
            conv = name.startswith("Conv")
            args = (2, 3, 2) if conv else (2,)
        layer = getattr(layers, f"Quantized{name}")(*args, chop=ch)
        assert isinstance(layer, getattr(nn, name))
        held = list(layer.parameters())
        outputs = layer(x, x, x) if name == "MultiheadAttention" else layer(x)
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        assert torch.equal(y, ch(y)), name
        assert all(one is other for one, other in zip(held, layer.parameters(), strict=True)), name
        if held:
            y.square().sum().backward()
            assert all(p.grad is not None for p in held), name
    assert (
        layers.IQuantizedSiLU().__class__.__name__ == "IQuantizedSiLU"
        and pychop.QuantizedLinear is layers.QuantizedLinear
    )
    with pytest.raises(AttributeError, match="QuantizedNothing"):
        _ = layers.QuantizedNothing


@further
@pytest.mark.parametrize(
    ("prefix", "chop"),
    [
        ("Quantized", ChopSTE(5, 10, rmode=5)),
        ("Quantized", ChopfSTE(8, 8)),
        ("IQuantized", ChopiSTE(8, symmetric=True)),
    ],
    ids=["float", "fixed", "integer"],
)
def the_network_in_its_three_variants(prefix: str, chop: Any) -> None:
    def layer(name: str, *args: Any) -> Any:
        return getattr(layers, prefix + name)(*args, chop=chop)

    torch.manual_seed(0)
    model = nn.Sequential(
        layer("Conv2d", 1, 4, 3), layer("BatchNorm2d", 4), layer("ReLU"), layer("MaxPool2d", 2), nn.Flatten(),
        layer("Dropout", 0.1), layer("Linear", 36, 3),
    )  # fmt: skip
    x, y = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    optimizer = optimizers.QuantizedSGD(model.parameters(), lr=0.1, momentum=0.9, chop=Chop(8, 7))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    for state in optimizer.state.values():
        moment = state["momentum_buffer"]
        assert torch.equal(moment, moment.bfloat16().float()) and moment.any()


def test_optimizers() -> None:
    for name in optimizers.__all__:
        weight = nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = getattr(optimizers, name)([weight], lr=0.01, chop=Chop(4, 3))
        assert isinstance(optimizer, getattr(torch.optim, name.split("Quantized")[1].replace("Prop", "prop")))
        weight.grad = torch.full((5,), 0.3)
        assert optimizer.step(lambda: 5.0) == 5.0
        for value in optimizer.state[weight].values():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert torch.equal(value, Chop(4, 3)(value))


def test_each_way_after_training_keeps_the_mode_and_prints_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    model, ch = nn.Sequential(nn.Linear(4, 3)), Chop(4, 3)
    ways: tuple[Any, ...] = (
        layers.post_quantization,
        layers.dynamic_post_quantization,
        lambda model, ch, **how: layers.static_post_quantization(model, ch, [torch.ones(2, 4)], **how),
        lambda model, ch, **how: layers.mixed_post_quantization(model, ch, None, **how),
    )
    for quantize in ways:
        assert quantize(model, ch, eval_mode=False, verbose=True).training
        assert "rounded 0.weight, (3, 4)" in capsys.readouterr().out
        assert not quantize(model, ch).training and not capsys.readouterr().out


@further.first
def after_training(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(6, 4)
    rounded = layers.post_quantization(model, Chop(4, 3), verbose=True)
    assert capsys.readouterr().out.splitlines()[0] == "rounded 0.weight, (3, 4)"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and not rounded.training
    exact.assert_same(of(rounded[0].weight), exact.rounded(of(model[0].weight), E4M3))
    assert torch.equal(rounded[1].running_var, model[1].running_var)
    ch = Chop(4, 3)
    dynamic = layers.dynamic_post_quantization(model, ch)
    wanted = ch(rounded[2](ch(rounded[1](ch(rounded[0](x))))))
    assert torch.equal(dynamic(x), wanted)
    static = layers.static_post_quantization(model, ch, [(x[:2],)])
    seen = layers.post_quantization(model, ch)[0](x[:2])
    assert torch.equal(static[0](x), ch(rounded[0](x).clamp(seen.min(), seen.max())))
    mixed = layers.mixed_post_quantization(model, None, Chopf(8, 2))
    assert torch.equal(mixed[0].weight, model[0].weight) and torch.equal(mixed(x) * 4, (mixed(x) * 4).round())
    assert torch.equal(layers.mixed_post_quantization(model, Chopi(8), None)[0].weight, Chopi(8)(model[0].weight))
    with pytest.raises(ValueError, match="calibration_data=None"):
        layers.mixed_post_quantization(model, None, ch, dynamic=False)


test_further = further.test()
