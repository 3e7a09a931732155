"""QPyTorch's documented examples on torch: quantizers and their gradients, OptimLP, lowered models."""

from __future__ import annotations

from functools import partial
from typing import Any

import exact
import numpy as np
import oracle
import pytest

torch: Any = pytest.importorskip("torch")

from jchop.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint  # noqa: E402
from jchop.compat.qtorch.auto_low import lower, sequential_lower  # noqa: E402
from jchop.compat.qtorch.optim import OptimLP  # noqa: E402
from jchop.compat.qtorch.quant import Quantizer, block_quantize, fixed_point_quantize, float_quantize, quantizer  # noqa: E402

nn = torch.nn
FIXED = FixedPoint(wl=5, fl=4)


def of(x: Any) -> np.ndarray:
    return x.detach().numpy().astype(np.float64)


def gradient(function: Any, x: Any) -> list[float]:
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad.tolist()


def test_functions() -> None:
    x = torch.linspace(-2, 2, 33)
    exact.assert_same(of(fixed_point_quantize(x, 5, 4, rounding="nearest")), exact.rounded(of(x), oracle.fixed(1, 4)))
    e5m2 = oracle.FloatSet(5, 2, 15, inf=False, nan="none")
    exact.assert_same(of(float_quantize(x, 5, 2, "nearest")), exact.rounded(of(x), e5m2, "nearest_away", "saturate"))
    assert block_quantize(torch.tensor([[16.0, 3.1]]), 4, rounding="nearest").tolist() == [[16, 4]]
    assert fixed_point_quantize(torch.tensor([100.3]), 5, 4, clamp=False, rounding="nearest").tolist() == [100.3125]
    for function in (
        lambda: float_quantize(x, 5, 2),
        lambda: fixed_point_quantize(x, 5, 2),
        lambda: block_quantize(x, 4),
    ):
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(function())
        assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(float_quantize(x, 5, 2, seed=3), float_quantize(x, 5, 2, seed=3))
    assert gradient(lambda v: float_quantize(v, 5, 2, "nearest"), x) == [1] * 33


def test_functions_take_parts_of_other_tensors() -> None:
    x = torch.linspace(-2, 2, 33).reshape(3, 11)[:, ::2]
    assert torch.equal(float_quantize(x, 5, 2, "nearest"), float_quantize(x.contiguous(), 5, 2, "nearest"))


def test_gradients() -> None:
    x = torch.tensor([-1, -0.6, 0, 1])
    assert gradient(quantizer(FIXED, FIXED, "nearest", "nearest"), x) == [0.9375] * 4
    masked = quantizer(FIXED, FIXED, "nearest", "nearest", clamping_grad_zero=True)
    assert gradient(masked, x) == [0.9375, 0.9375, 0.9375, 0]
    assert gradient(quantizer(FIXED, None, "nearest", clamping_grad_zero=True), x) == [1, 1, 1, 0]
    assert gradient(quantizer(None, FloatingPoint(5, 2), backward_rounding="nearest"), x) == [1] * 4
    hooked = quantizer(None, FIXED, backward_rounding="nearest", backward_hooks=[lambda g: g / 4, lambda g: g + 0.1])
    assert gradient(hooked, x) == [0.375] * 4  # 0.35, rounded
    module = Quantizer(BlockFloatingPoint(4), BlockFloatingPoint(4), "nearest", "nearest")
    assert isinstance(module, nn.Module) and module(torch.tensor([16.0, 3.1])).tolist() == [16, 4]


def test_fixed_point_without_a_range() -> None:
    """The multiples of 2^-4 of all magnitudes, in the forward and the backward pass."""
    number = FixedPoint(5, 4, clamp=False, symmetric=True)
    x = torch.tensor([1000.03, -0.04, 8388609.0, float("inf"), 1e-9], requires_grad=True)
    y = quantizer(number, number, "nearest", "nearest")(x)
    assert y.tolist() == [1000, -0.0625, 8388609, float("inf"), 0]
    (y * torch.tensor([1000.03, 1, 1, 1, 1])).sum().backward()
    assert x.grad.tolist() == [1000, 1, 1, 1, 1]
    drawn = quantizer(number)(torch.full((400,), 100.03125))
    assert set(drawn.tolist()) == {100.0, 100.0625}


def test_attention_is_one_linear_layer() -> None:
    """Its last product is computed without a call of `out_proj`."""
    model, x = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    y = sequential_lower(model, ["linear"], FIXED, None, "nearest")(x, x, x)[0]
    assert torch.equal(y, fixed_point_quantize(y, 5, 4, rounding="nearest"))
    with pytest.raises(ValueError, match="no layer of type 'activation'"):
        sequential_lower(model, ["activation"], FIXED)


def test_random_quantizers() -> None:
    torch.manual_seed(5)
    one, other = (Quantizer(FloatingPoint(5, 2)) for _ in range(2))
    x = torch.full((300,), 1.0625)
    first = one(x)
    assert not torch.equal(first, one(x)) and not torch.equal(first, other(x))
    torch.manual_seed(5)
    assert torch.equal(Quantizer(FloatingPoint(5, 2))(x), first)


def test_torch_generator_is_drawn_from_by_stochastic_roundings_alone() -> None:
    """As by QPyTorch's functions, so that a script has the same data and initial weights."""
    for rounding in ("nearest", "stochastic"):
        number, weight = FloatingPoint(5, 2), nn.Parameter(torch.ones(3))
        torch.manual_seed(0)
        before = torch.get_rng_state()
        rounds = quantizer(number, number, rounding, rounding)
        module = Quantizer(number, number, rounding, rounding)
        inner = torch.optim.SGD([weight], lr=0.125)
        optimizer = OptimLP(inner, weight_quant=rounds, grad_quant=rounds, acc_quant=rounds)
        assert torch.equal(torch.get_rng_state(), before) and not list(module.state_dict())
        weight.grad = torch.ones(3)
        for call in (partial(gradient, rounds, torch.ones(3)), partial(module, torch.ones(3)), optimizer.step):
            before = torch.get_rng_state()
            call()
            assert torch.equal(torch.get_rng_state(), before) == (rounding == "nearest"), rounding


def test_random_steps_follow_the_seed_of_torch() -> None:
    def stepped(seed: int) -> list[float]:
        weight = nn.Parameter(torch.ones(300))
        optimizer = OptimLP(torch.optim.SGD([weight], lr=1.0), weight_quant=quantizer(FloatingPoint(5, 2)))
        torch.manual_seed(seed)
        for _ in range(2):
            weight.grad = torch.full((300,), 0.05)
            optimizer.step()
        return weight.tolist()

    assert stepped(1) == stepped(1) != stepped(2)


def test_frozen_parameters_keep_their_numbers() -> None:
    trained, frozen = nn.Parameter(torch.full((2,), 0.7)), nn.Parameter(torch.full((2,), 0.7), requires_grad=False)
    rounds = quantizer(FIXED, forward_rounding="nearest")
    optimizer = OptimLP(torch.optim.SGD([trained, frozen], lr=0.0), weight_quant=rounds, acc_quant=rounds)
    trained.sum().backward()
    optimizer.step()
    assert of(trained).tolist() == [0.6875] * 2 and torch.equal(frozen, torch.full((2,), 0.7))


def test_gradients_are_scaled_if_they_are_rounded() -> None:
    for rounded in (False, True):
        weight = nn.Parameter(torch.ones(1))
        quant = quantizer(FloatingPoint(8, 7), forward_rounding="nearest") if rounded else None
        optimizer = OptimLP(torch.optim.SGD([weight], lr=1.0), grad_scaling=0.25, grad_quant=quant)
        weight.grad = torch.tensor([2.0])
        optimizer.step()
        assert weight.item() == (0.5 if rounded else -1.0)


def test_the_optimizer() -> None:
    """Two steps of the recipe with e5m2 weights, gradients and an accumulator, by hand."""
    number, rounding = oracle.FloatSet(5, 2, 15, inf=False, nan="none"), ("nearest_away", "saturate")
    wide, coarse = (oracle.FloatSet(6, man, 31, inf=False, nan="none") for man in (9, 1))
    weight = nn.Parameter(torch.tensor([1.0, -0.3, 0.7]))
    low, high, rough = (
        quantizer(forward_number=FloatingPoint(*n), forward_rounding="nearest") for n in ((5, 2), (6, 9), (6, 1))
    )
    inner = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    optimizer = OptimLP(
        inner, weight_quant=low, grad_scaling=1 / 16, grad_quant=low, momentum_quant=rough, acc_quant=high
    )
    accumulator, momentum = of(weight), np.zeros(3)
    for step in range(2):
        weight.grad = torch.tensor([17.0, -33.0, 5.0]) * (step + 1)
        g = exact.rounded(of(weight.grad) / 16, number, *rounding)
        momentum = momentum * 0.5 * (step > 0) + g
        accumulator = exact.rounded((accumulator - 0.125 * momentum).astype(np.float32), wide, *rounding)
        momentum = exact.rounded(momentum, coarse, *rounding)
        optimizer.step()
        np.testing.assert_array_equal(of(weight), exact.rounded(accumulator, number, *rounding))
    assert optimizer.step(lambda: 3.0) == 3.0
    wrong: Any = (
        (TypeError, "weight_quant=.* must be a result of quantizer", {"weight_quant": lambda v: v}),
        (TypeError, "acc_quant=.* must be a result of quantizer", {"acc_quant": quantizer()}),
        (ValueError, "grad_scaling=0", {"grad_scaling": 0}),
    )
    for error, said, options in wrong:
        with pytest.raises(error, match=said):
            OptimLP(inner, **options)


def test_lowered_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    number = FloatingPoint(5, 2)
    low = sequential_lower(model, ["linear", "activation"], number, number, "nearest", "nearest")
    x = torch.randn(5, 4)
    rounds = quantizer(number, forward_rounding="nearest")
    y = x
    for layer in (model[0], model[1], *model[2]):
        y = rounds(layer(y))
    assert torch.equal(low(x), y) and list(low.state_dict()) == list(model.state_dict())
    assert not torch.equal(model(x), y)
    (low(x) * 1.1).sum().backward()  # 1.1 comes back to the last activation as 1
    assert low[2][0].bias.grad.tolist() == (y > 0).sum(0).tolist()
    assert lower(model, ["activation"], number, forward_rounding="nearest") is None
    assert torch.equal(model[1](x), rounds(nn.GELU()(x)))
    for said, kinds in (("no layer of type 'conv'", ["conv"]), ("layer_types='lstm'", ["lstm"])):
        with pytest.raises(ValueError, match=said):
            sequential_lower(model, kinds, number)


def test_refused() -> None:
    for error, said, call in (
        (TypeError, "forward_number='e5m2'", lambda: quantizer("e5m2")),  # type: ignore[arg-type]
        (
            ValueError,
            "clamping_grad_zero=True needs clamp=True",
            lambda: quantizer(FixedPoint(5, 4, clamp=False), clamping_grad_zero=True),
        ),
        (ValueError, "is for fixed point", lambda: quantizer(FloatingPoint(5, 2), clamping_grad_zero=True)),
    ):
        with pytest.raises(error, match=said):
            call()
