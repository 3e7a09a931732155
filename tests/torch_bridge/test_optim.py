"""`OptimLP`: the order of its roundings, its random bits, and its place among torch's optimizers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.optim import SGD, AdamW
from torch_bridge.tensors import array, same_bits, tensor

import jchop as jc

rounded = jc.torch.round_to_format
START = torch.tensor([1.0, -0.7, 0.3, 2.2])


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(START.to(dtype, copy=True))


def gradient(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(step)).to(dtype)


def run(optimizer: Any, p: torch.nn.Parameter, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        p.grad = gradient(step, p.dtype)
        optimizer.step()


def test_a_step_is_the_one_of_the_definition():
    """g = Qg(s g); v = 0.9 v + g; a = Qa(a - lr v); p = Qw(a); v = Qm(v), after its use; in float32 arithmetic."""
    p = parameter()
    options = {"weight": "e5m2", "gradient": "e5m3", "momentum": "e6m4", "accumulator": "e6m9"}
    optimizer = jc.torch.OptimLP(SGD([p], lr=0.1, momentum=0.9), **options, gradient_scale=0.5)
    a, v = START.clone(), torch.zeros(4)
    for step in range(3):
        p.grad = gradient(step)
        optimizer.step()
        g = rounded(0.5 * gradient(step), "e5m3")
        assert p.grad is not None and torch.equal(p.grad, g)
        v = v * 0.9 + g
        a = rounded(torch.add(a, v, alpha=-0.1), "e6m9")
        assert torch.equal(p.detach(), rounded(a, "e5m2"))
        v = rounded(v, "e6m4")
        assert torch.equal(optimizer.state[p]["momentum_buffer"], v)


def test_stochastic_roundings_draw_by_step_parameter_and_role():
    ps = [parameter(), parameter()]
    low = jc.torch.OptimLP(SGD(ps, lr=0.1), gradient="e5m2:stochastic", weight="e5m2:stochastic", seed=9)
    for step in range(2):
        before = [p.detach().clone() for p in ps]
        for p in ps:
            p.grad = gradient(step)
        low.step()
        for i, (p, old) in enumerate(zip(ps, before, strict=True)):
            keys = [jax.random.key(9)] * 2
            for number in (step, i):
                keys = [jax.random.fold_in(key, number) for key in keys]
            keys = [jax.random.fold_in(key, role) for key, role in zip(keys, (0, 2), strict=True)]
            g = jc.round_to_format(array(gradient(step)), "e5m2:stochastic", keys[0])
            assert p.grad is not None and same_bits(p.grad, g)
            moved = torch.add(old, tensor(np.asarray(g)), alpha=-0.1)
            assert same_bits(p, jc.round_to_format(array(moved), "e5m2:stochastic", keys[1]))


def test_parameters_of_16_bits_move_in_float32():
    """bfloat16 has steps of 2^-8 below 1: ten times 1e-4 is lost to nearest, and counts on average."""
    ends = {}
    for mode in ("nearest_even", "stochastic"):
        p = torch.nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        memory = p.data_ptr()
        low = jc.torch.OptimLP(SGD([p], lr=1e-4), weight=f"bfloat16:{mode}")
        for _ in range(10):
            p.grad = torch.ones_like(p)
            low.step()
        assert p.dtype == torch.bfloat16 and p.data_ptr() == memory
        ends[mode] = 1 - p.detach().float().mean().item()
    assert ends["nearest_even"] == 0 and ends["stochastic"] == pytest.approx(1e-3, rel=0.2)
    p = parameter(torch.bfloat16)
    low = jc.torch.OptimLP(AdamW([p], lr=0.01), accumulator="e8m15", weight="bfloat16")
    run(low, p, 2)
    assert low.accumulators[0].dtype == torch.float32 and low.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(p.detach(), rounded(low.accumulators[0], "bfloat16").bfloat16())


@pytest.mark.parametrize("accumulator", [None, pytest.param("e6m9", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["never trained", pytest.param("with a closure", marks=pytest.mark.slow)])
def test_frozen_parameters_are_not_rounded(accumulator: str | None, mode: str):
    """A parameter without a gradient keeps its numbers, and can be changed by hand before it trains."""
    ps = [parameter(), parameter()]
    ps[1].requires_grad_(False)
    low = jc.torch.OptimLP(SGD(ps, lr=0.1, momentum=0.9), weight="e5m2", momentum="e5m2", accumulator=accumulator)

    def closure() -> torch.Tensor:
        low.zero_grad()
        loss = (ps[0] * gradient(0)).sum()
        loss.backward()
        return loss

    for _ in range(2):
        low.step(closure) if mode == "with a closure" else (closure(), low.step())
    assert torch.equal(ps[1], START) and not torch.equal(ps[0], rounded(START, "e5m2"))
    assert list(low.accumulators) == ([] if accumulator is None else [0])
    with torch.no_grad():
        ps[1].fill_(3.3)
    ps[1].grad = torch.zeros(4)
    low.step()
    assert ps[1].tolist() == [3.5] * 4
    ps[0].grad, before = None, ps[0].detach().clone()
    with torch.no_grad():
        ps[0].add_(0.01)
    low.step()
    assert torch.equal(ps[0], before + 0.01)


def test_a_frozen_parameter_needs_no_dtype_for_the_results():
    ps = [parameter(), parameter(torch.float16)]
    low = jc.torch.OptimLP(SGD(ps, lr=0.1), weight="bfloat16")
    ps[0].grad = gradient(0)
    low.step()
    assert torch.equal(ps[1], START.half())
    ps[1].grad = gradient(0).half()
    with pytest.raises(ValueError, match="float16"):
        low.step()


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, lr=0.1, momentum=0.9), lambda ps: AdamW(ps, lr=0.1)])
def test_state_is_saved_loaded_and_copied(make: Callable[..., torch.optim.Optimizer]):
    options = {"weight": "bfloat16:stochastic", "momentum": "e6m9:stochastic", "accumulator": "e8m12:stochastic"}

    def fresh() -> tuple[torch.nn.Parameter, jc.torch.OptimLP]:
        p = parameter(torch.bfloat16)
        return p, jc.torch.OptimLP(make([p]), **options, seed=4)

    p, low = fresh()
    run(low, p, 4)
    q, other = fresh()
    run(other, q, 2)
    saved = pickle.loads(pickle.dumps({"p": q.detach(), "optimizer": other.state_dict()}))
    r, third = fresh()
    with torch.no_grad():
        r.copy_(saved["p"])
    third.load_state_dict(saved["optimizer"])
    run(third, r, 2, first=2)
    assert torch.equal(p, r)
    s, fourth = copy.deepcopy((q, other))
    run(fourth, s, 2, first=2)
    assert torch.equal(p, s)


def test_closures_are_evaluated_at_rounded_parameters():
    p = parameter()
    low = jc.torch.OptimLP(torch.optim.LBFGS([p], lr=0.5, max_iter=4), weight="e5m4", accumulator="e8m20")
    seen = []

    def closure() -> torch.Tensor:
        low.zero_grad()
        seen.append(p.detach().clone())
        loss = (p - 0.5).square().sum()
        loss.backward()
        return loss

    losses = [low.step(closure).item() for _ in range(3)]
    assert losses[-1] < 0.01 * losses[0] and len(seen) > 3
    assert all(torch.equal(at, rounded(at, "e5m4")) for at in seen[1:])


def test_it_is_an_optimizer_of_torch():
    p, q = parameter(), parameter()
    low = jc.torch.OptimLP(SGD([p], lr=1.0), weight="e5m2")
    schedule = torch.optim.lr_scheduler.StepLR(low, 1, gamma=0.5)
    run(low, p, 1)
    schedule.step()
    assert low.optimizer.param_groups[0]["lr"] == 0.5
    low.add_param_group({"params": [q]})
    q.grad = torch.ones(4)
    low.step()
    assert torch.equal(q.detach(), rounded(START - 1.0, "e5m2"))  # a new group starts from the first rate
    low.zero_grad()
    assert p.grad is None and q.grad is None
    plain, same = parameter(), parameter()
    run(SGD([plain], lr=0.1), plain, 2)
    run(jc.torch.OptimLP(SGD([same], lr=0.1)), same, 2)
    assert torch.equal(plain, same)


def test_errors():
    p = parameter()
    with pytest.raises(TypeError, match="must be an optimizer"):
        jc.torch.OptimLP([p])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight=.*rounds a gradient"):
        jc.torch.OptimLP(SGD([p], lr=1), weight="e5m2:gradient=e5m2")
    low = jc.torch.OptimLP(SGD([p], lr=1), momentum="e5m2")
    with pytest.raises(ValueError, match=r"momentum=.*SGD keeps none"):
        run(low, p, 1)
    half = parameter(torch.float16)
    with pytest.raises(ValueError, match="float32"):
        run(jc.torch.OptimLP(SGD([half], lr=1), weight="bfloat16"), half, 1)
