"""The paper's layers and optimizers, which take bits where version 0.6 takes a quantizer."""

from __future__ import annotations

from typing import Any

import exact
import numpy as np
import oracle
import pytest

torch: Any = pytest.importorskip("torch")

from jchop.compat import pychop  # noqa: E402
from jchop.compat.pychop import Chop, Chopf, Chopi, layers, optimizers  # noqa: E402

nn = torch.nn
E4M3, E5M2, FIXED = oracle.ieee(4, 3), oracle.ieee(5, 2), oracle.fixed(4, 4)


def of(x: Any) -> np.ndarray:
    return x.detach().numpy().astype(np.float64)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("make", "values", "mode"),
    [
        (lambda: layers.QuantizedLinear(5, 4, 4, 3, 3), E4M3, "down"),
        (lambda: layers.QuantizedLinear(5, 4, exp_bits=4, sig_bits=3), E4M3, "nearest_even"),
        (lambda: layers.FPQuantizedLinear(5, 4, ibits=4, fbits=4), FIXED, "nearest_even"),
        (lambda: layers.FPQuantizedLinear(5, 4, int_bits=4, frac_bits=4, rmode=2), FIXED, "up"),
    ],
    ids=["floating-by-place", "floating", "fixed", "fixed-by-other-names"],
)
def test_parameters_and_input_are_rounded(make: Any, values: Any, mode: str) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.rand(3, 5, requires_grad=True)
    weight, bias, inputs = (exact.rounded(of(part), values, mode) for part in (layer.weight, layer.bias, x))
    y = layer(x)
    exact.assert_same(of(y), inputs @ weight.T + bias)  # few enough bits that no sum is rounded
    y.sum().backward()
    np.testing.assert_allclose(of(layer.weight.grad)[0], inputs.sum(0))
    np.testing.assert_allclose(of(x.grad)[0], weight.sum(0), rtol=1e-6)


def test_integers_round_the_output_too() -> None:
    torch.manual_seed(0)
    layer, x, ch = layers.IntQuantizedLinear(5, 4, num_bits=6), torch.randn(3, 5), Chopi(6, symmetric=True)
    wanted = ch(nn.functional.linear(ch(x), ch(layer.weight), ch(layer.bias)))
    assert torch.equal(layer(x), wanted) and len(torch.unique(wanted)) > 4
    assert (layers.IntQuantizedReLU().chop.bits, layers.FPQuantizedReLU().chop.fbits) == (8, 8)
    once = layers.IntQuantizedLayer(num_bits=3)
    assert torch.equal(once(x), Chopi(3, symmetric=True)(x))


def test_bits_after_the_sizes() -> None:
    """Where torch has arguments in these places, ``rmode=`` says that they are bits."""
    image, line, volume = torch.rand(2, 3, 6, 6), torch.rand(2, 3, 6), torch.rand(2, 3, 4, 4, 4)
    cases = [
        ("Conv1d", (3, 2, 2), line, {}),
        ("Conv2d", (3, 2, 2), image, {"stride": 2, "padding": 1}),
        ("Conv3d", (3, 2, 2), volume, {}),
        ("BatchNorm1d", (3,), line, {}),
        ("BatchNorm2d", (3,), image, {}),
        ("BatchNorm3d", (3,), volume, {}),
        ("LayerNorm", (6,), line, {}),
        ("RNN", (6, 4), line, {"num_layers": 1, "nonlinearity": "relu"}),
        ("LSTM", (6, 4), line, {}),
        ("GRU", (6, 4), line, {}),
        ("MultiheadAttention", (6, 2), line, {}),
    ]
    ch = Chop(5, 2, rmode=4)
    for name, sizes, x, options in cases:
        inputs = (x, x, x) if name == "MultiheadAttention" else (x,)
        first = {"batch_first": True} if name in ("RNN", "LSTM", "GRU", "MultiheadAttention") else {}
        layer = getattr(layers, f"Quantized{name}")(*sizes, 5, 2, rmode=4, **options)
        plain = getattr(nn, name)(*sizes, **options, **first)
        plain.load_state_dict({key: ch(p) if p.is_floating_point() else p for key, p in layer.state_dict().items()})
        got, wanted = layer(*inputs), plain(*map(ch, inputs))
        if isinstance(got, tuple):
            got, wanted = got[0], wanted[0]
        torch.testing.assert_close(got, wanted, msg=name)
        got.square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters()), name
    kept = layers.QuantizedConv2d(3, 2, 2, 5, 2)
    assert (kept.stride, kept.padding, kept.chop) == ((5, 5), (2, 2), None)


@pytest.mark.smoke
def test_other_names_of_layers() -> None:
    x = torch.tensor([1.1, -2.7, 1e5])
    exact.assert_same(of(layers.QuantizedLayer(5, 2, rmode=1)(x)), exact.rounded(of(x), E5M2))
    exact.assert_same(of(layers.QuantizedLayer(chop=Chop(5, 2))(x)), exact.rounded(of(x), E5M2))
    assert isinstance(layers.QuantizedAvgPool(2, chop=Chop(5, 2)), nn.AvgPool2d)
    assert layers.FPQuantizedFlatten()(torch.full((2, 3, 4), 1 / 3)).tolist() == [[85 / 256] * 12] * 2
    attention, x = layers.FPQuantizedAttention(6, 2, fbits=3), torch.rand(4, 2, 6)
    by_place, _ = attention(x, x, x, attn_mask=torch.full((4, 4), 0.01))
    by_name, _ = attention(x, key=Chopf(8, 3)(x), value=x, attn_mask=torch.full((4, 4), 0.01))
    assert torch.equal(by_place, by_name) and not attention.batch_first
    assert layers.QuantizedEmbedding(4, 2, exp_bits=5, sig_bits=2)(torch.tensor([1])).shape == (1, 2)
    assert pychop.IntQuantizedGRU is layers.IntQuantizedGRU
    starred: dict[str, Any] = {}
    exec("from jchop.compat.pychop.layers import *", starred)
    assert starred["nn"] is nn and starred["FPQuantizedConv2d"] is layers.FPQuantizedConv2d


def test_optimizers() -> None:
    names = ["SGD", "RMSprop", "RMSProp", "Adagrad", "Adam", "AdamW", "Adadelta"]
    for name in names:
        weights = [nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
        for weight, words in zip(weights, ({"exp_bits": 4, "sig_bits": 3}, {"chop": Chop(4, 3)}), strict=True):
            momentum = {"momentum": 0.9} if name == "SGD" else {}
            optimizer = getattr(optimizers, f"Quantized{name}")([weight], lr=0.01, **momentum, **words)
            weight.grad = torch.linspace(0.1, 0.7, 5)
            optimizer.step()
            moments = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.ndim]
            assert moments and all(torch.equal(v, Chop(4, 3)(v)) for v in moments), name
        assert torch.equal(*weights) and not torch.equal(weights[0], torch.linspace(-1, 1, 5))


def test_more_exponents_than_the_tensor_has() -> None:
    x = exact.numbers(200, -149, 127).astype(np.float32)
    x[2:5] = [2.0**-149, np.inf, np.nan]
    wanted = exact.rounded(x, oracle.ieee(10, 9))
    tensor = torch.tensor(x, requires_grad=True)
    rounded = Chop(10, 9)(tensor)
    assert rounded.dtype == torch.float32
    exact.assert_same(of(rounded), wanted.astype(np.float32))
    assert torch.autograd.grad(rounded[5:].sum(), tensor)[0][5:].tolist() == [1.0] * 195
    assert Chop(10, 9)(torch.tensor([3.402e38])).tolist() == [float("inf")]


def test_refused() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    for said, call in (
        ("chop= and exp_bits= both define the quantizer", lambda: layers.QuantizedLinear(2, 2, 5, 2, chop=Chop(5, 2))),
        ("ibits and int_bits set an argument of Chopf twice", lambda: layers.FPQuantizedReLU(ibits=2, int_bits=3)),
        ("sig_bits", lambda: optimizers.QuantizedSGD(weight, lr=0.1, exp_bits=5)),
        ("num_bits", lambda: layers.IQuantizedReLU(num_bits=8)),
    ):
        with pytest.raises(TypeError, match=said):
            call()
    with pytest.raises(AttributeError, match="FPQuantizedNothing"):
        _ = layers.FPQuantizedNothing
