"""Quantization after training on data: how ranges are found, and which batch norms go into convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from jchop.compat.pychop import Chop, Chopi  # noqa: E402
from jchop.compat.pychop.ptq import dynamic_post_quantization, mixed_post_quantization, static_post_quantization  # noqa: E402

nn = torch.nn
SINGLE = Chop(8, 23)


def ends(method: str, chop: Any, data: Any, **options: Any) -> list[float]:
    """To which numbers the outputs are clamped after calibration on `data`."""
    model = nn.Sequential(nn.Identity())
    static = static_post_quantization(model, chop, data, calibration_method=method, **options)
    return [static(torch.tensor([[end]])).item() for end in (-1e6, 1e6)]


@pytest.mark.smoke
def test_ranges() -> None:
    x = np.random.default_rng(0).standard_normal((2, 4000)).astype(np.float32)
    x[:, :3] = [8.0, -9.5, 0.0]
    data = [(torch.tensor(row)[None], "a label") for row in x]
    assert ends("minmax", SINGLE, data) == [-9.5, 8.0] == ends("mse", SINGLE, data)
    share = max(np.percentile(np.abs(row), 99.0) for row in x)
    np.testing.assert_allclose(ends("percentile", SINGLE, data, percentile=99.0), [-share, share], rtol=1e-5)
    np.testing.assert_allclose(ends("percentile", SINGLE, data, percentile=100), [-9.5, 8.0])

    def error(span: list[float], bits: int) -> float:
        clamped = np.clip(x[0].astype(np.float64), span[0], span[1])
        step = max(np.abs(span)) / (2 ** (bits - 1) - 1)
        return float(np.square(np.round(clamped / step) * step - x[0]).sum())

    least = ends("mse", Chopi(4, symmetric=True), data[:1])
    shares = [error([-9.5 * i / 100, 8.0 * i / 100], 4) for i in range(1, 101)]
    assert error(least, 4) <= 1.01 * min(shares)
    assert min(shares) < 0.7 * error([-9.5, 8.0], 4)
    kept = ends("kl_divergence", Chopi(4, symmetric=True), data)
    assert -9.5 < kept[0] < -1 and 1 < kept[1] < 8


def test_ranges_in_the_precision_of_the_tensor() -> None:
    x = torch.tensor([[1 / 3, -1 / 7]], dtype=torch.float64)
    model = nn.Sequential(nn.Identity()).double()
    static = static_post_quantization(model, Chop(11, 52), [x])
    assert static(10 * x).tolist() == x.tolist()


class Net(nn.Module):
    """Norms after convolutions: to be fused; behind another reader; after a linear layer; used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_of_first = nn.BatchNorm2d(3)
        self.first = nn.Conv2d(2, 3, 3)
        self.block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.second, self.norm_of_second = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Any) -> Any:
        x = self.block(self.norm_of_first(self.first(x)))
        y = self.second(x)
        return self.twice(self.twice(self.norm_of_second(y) + y))


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 2, 6, 6) * 3 + 1)
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
    return model


def test_fused_norms(net: Any) -> None:
    x = torch.randn(4, 2, 6, 6)
    norms = ("norm_of_first", "block.1", "norm_of_second", "twice.1")

    def gone(model: Any) -> list[str]:
        return [name for name in norms if isinstance(model.get_submodule(name), nn.Identity)]

    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fused = static_post_quantization(net, SINGLE, [x])
    assert gone(fused) == ["norm_of_first", "block.1"]
    scale = net.norm_of_first.weight / (net.norm_of_first.running_var + net.norm_of_first.eps).sqrt()
    torch.testing.assert_close(fused.first.weight, net.first.weight * scale[:, None, None, None])
    assert net.training and all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    plain = static_post_quantization(net, SINGLE, [x], fuse_bn=False)
    assert not gone(plain) and not gone(static_post_quantization(net, SINGLE, [x], eval_mode=False))
    wanted = net.eval()(x)
    torch.testing.assert_close(fused(x), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(plain(x), wanted)


def test_mixed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(6, 4)
    ch = Chopi(4, symmetric=True)
    static = mixed_post_quantization(model, ch, SINGLE, [x], "percentile", 50.0, dynamic=False)
    assert torch.equal(static[0].weight, ch(model[0].weight))
    inner = nn.functional.linear(x, static[0].weight, static[0].bias)
    np.testing.assert_allclose(static[0](x).abs().max().item(), np.percentile(inner.detach().abs(), 50), rtol=1e-5)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Any) -> Any:
        return self.norm(x) if x.sum() > 0 else x


class Inner(nn.Module):
    """A recurrent layer or an attention, then a layer; one layer is not called."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.spare = inner, nn.Linear(4, 2), nn.Linear(4, 2)
        self.several = nn.ModuleList([self.outer])  # which has no outputs of its own

    def forward(self, x: Any) -> Any:
        out = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        self.seen = out[0]
        return self.outer(out[0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "MultiheadAttention"])
def test_first_of_several_outputs(kind: str) -> None:
    torch.manual_seed(0)
    width = 2 if kind == "MultiheadAttention" else 4  # heads, or numbers of the state
    model, x = Inner(getattr(nn, kind)(4, width)), torch.randn(5, 2, 4)
    chop = Chopi(4, symmetric=True)
    with pytest.warns(RuntimeWarning, match="outputs of the layers 'spare' are not rounded"):
        static = static_post_quantization(model, chop, [x], fuse_bn=False)
    for low in (static, dynamic_post_quantization(model, chop)):
        low(100 * x)
        assert torch.equal(low.seen, chop(low.seen)) and len(low.seen.unique()) <= 15
    with torch.no_grad():
        static(x)
        most = static.seen.abs().max()
        static(100 * x)
    assert static.seen.abs().max() <= most


def test_sequences_of_several_lengths() -> None:
    chop, parts = Chopi(4, symmetric=True), [torch.ones(3, 4), torch.ones(2, 4)]
    packed = nn.utils.rnn.pack_sequence(parts)
    model = nn.LSTM(4, 4)
    for low in (dynamic_post_quantization(model, chop), static_post_quantization(model, chop, [packed])):
        y = low(packed)[0]
        assert torch.equal(y.data, chop(y.data)) and torch.equal(y.batch_sizes, packed.batch_sizes)


def test_refused() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("calibration_method='median'", lambda: static_post_quantization(model, SINGLE, [x], "median")),
        ("kl_divergence' needs equally", lambda: static_post_quantization(model, SINGLE, [x], "kl_divergence")),
        ("calibration_data has no batch", lambda: static_post_quantization(model, SINGLE, [])),
        ("calibration_data has no batch", lambda: static_post_quantization(model, SINGLE, iter(()))),
        ("percentile=0 must", lambda: static_post_quantization(model, SINGLE, [x], "percentile", 0)),
        ("pass fuse_bn=False", lambda: static_post_quantization(Branching(), SINGLE, [torch.ones(2, 1)])),
    ]
    for said, call in cases:
        with pytest.raises(ValueError, match=said):
            call()
    static_post_quantization(Branching(), SINGLE, [torch.ones(2, 1)], fuse_bn=False)
