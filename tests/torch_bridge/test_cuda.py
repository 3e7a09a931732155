"""The bridge on an NVIDIA GPU: shared memory, and the bits that the CPU gives. Skipped where there is none."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch_bridge.tensors import same_bits, tensor

import jchop as jc

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or jax.default_backend() != "gpu", reason="needs a GPU that torch and JAX see"
)

SPECS = ["float8_e4m3fn", "bfloat16:stochastic", "mxfp8_e4m3", "int8(channel=0)", "nvfp4:stochastic", "posit16"]


def numbers(*shape: int) -> torch.Tensor:
    return tensor(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


def test_memory_is_shared_both_ways():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8):
        x = torch.ones(3, 5, device="cuda").to(dtype)
        there = jc.torch.as_jax(x)
        assert {d.platform for d in there.devices()} == {"gpu"} and there.unsafe_buffer_pointer() == x.data_ptr()
        assert jc.torch.as_tensor(there).data_ptr() == x.data_ptr()


def test_a_rounding_has_the_bits_of_the_cpu() -> None:
    for spec, x in itertools.product(SPECS, (numbers(64, 96), numbers(64, 96).bfloat16())):
        given = {"seed": 5} if "stochastic" in spec else {}
        there = jc.torch.round_to_format(x.cuda(), spec, **given)
        here = jc.torch.round_to_format(x, spec, **given)
        assert there.is_cuda and torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8)), (spec, x.dtype)


def test_work_before_and_after_is_in_order():
    """A chain on torch's stream, with a call of JAX in it that starts before the first part has ended."""
    x = numbers(2048, 2048).cuda()
    for _ in range(10):
        y = x
        for _ in range(8):
            y = y @ x / 64
        rounded = jc.torch.round_to_format(y, "bfloat16")
        z = rounded + 1
        torch.cuda.synchronize()
        assert torch.equal(z, y.bfloat16().float() + 1)


def test_a_product_and_packed_weights():
    x, w = numbers(32, 64), numbers(16, 64)
    spec = jc.MatmulSpec("e4m3", accumulate="e8m13:toward_zero", order="aligned(32, 13)")
    there = jc.torch.matmul(x.cuda(), w.T.contiguous().cuda(), spec)
    assert torch.equal(there.cpu(), jc.torch.matmul(x, w.T.contiguous(), spec))
    layer = torch.nn.Linear(64, 16)
    with torch.no_grad():
        layer.weight.copy_(w)
    rules = {"*": {"weight": "int4(group=32)"}}
    here = jc.torch.quantize(layer, rules, mode="weight_only")(x)
    there = jc.torch.quantize(layer.cuda(), rules, mode="weight_only")(x.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-5)


def test_a_step_of_the_optimizer():
    steps = []
    for device in ("cpu", "cuda"):
        w = torch.nn.Parameter(numbers(40, 3).to(device))
        base = torch.optim.SGD([w], lr=0.125)
        optimizer = jc.torch.OptimLP(base, weight="bfloat16", gradient="float8_e5m2")
        w.grad = numbers(40, 3).to(device)
        optimizer.step()
        steps.append(w.detach().cpu())
    assert torch.equal(*steps)


def test_bits_are_those_of_a_jax_array():
    x = numbers(257, 33)
    wanted = jc.round_to_format(jax.device_put(x.numpy()), "float8_e5m2")
    assert same_bits(jc.torch.round_to_format(x.cuda(), "float8_e5m2").cpu(), wanted)
