"""Tensors as JAX arrays and back: whose memory, and what is refused."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

pytest.importorskip("torch")

import torch

import jchop as jc

further = Further()

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int64,
]


def test_memory_is_shared_both_ways():
    for dtype in DTYPES:
        for shape in ((3, 5), (1,), (), (2, 3, 4)):
            x = torch.ones(shape).to(dtype)
            there = jc.torch.as_jax(x)
            assert there.shape == shape and there.dtype.name == str(dtype).removeprefix("torch.")
            assert there.unsafe_buffer_pointer() == x.data_ptr()
            back = jc.torch.as_tensor(there)
            assert back.data_ptr() == x.data_ptr() and back.dtype == dtype and back.shape == shape
    for shape in ((0,), (0, 3), (3, 0)):
        assert jc.torch.as_tensor(jc.torch.as_jax(torch.empty(shape))).shape == shape


@further.first
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def a_call_takes_memory_for_its_result_alone() -> None:
    """JAX shows no pointer of what it reads inside a jitted function; a copy would show in the peak of the process."""

    def kibibytes(name: str) -> int:
        found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    results = []  # all stay alive: memory that is given back later would be taken for this call's
    base = torch.ones(1 << 12, 1 << 12)  # of 64 MiB: glibc may keep smaller blocks that were freed
    for transposed, spec in ((False, "float8_e5m2"), (True, "float8_e5m2"), (True, "float8_e5m2:stochastic")):
        x = base.T if transposed else base
        results.append(jc.torch.round_to_format(x, spec, seed=1))  # compiles
        gc.collect()
        before = kibibytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        results.append(jc.torch.round_to_format(x, spec, seed=1))
        assert results[-1].stride() == x.stride()
        taken = (kibibytes("VmHWM") - before) / (x.nbytes >> 10)
        assert 0.8 < taken < 1.3, (transposed, spec)


def test_what_would_be_copied_is_refused_and_copied_on_demand():
    x = torch.arange(40.0).reshape(5, 8)
    z = torch.tensor([1 + 2j, 3 - 1j])
    for view, why in (
        (x.t(), "strides"),
        (x[:, ::2], "strides"),
        (x[0].expand(3, 8), "strides"),
        (x.flatten()[1:], "not a multiple of 64 bytes"),
        (z.conj(), "conjugate"),
        (z.conj().imag, "conjugate or negative"),
    ):
        with pytest.raises(ValueError, match=f"{why}.*copy=True"):
            jc.torch.as_jax(view)
        np.testing.assert_array_equal(np.asarray(jc.torch.as_jax(view, copy=True)), view.resolve_conj().resolve_neg())


def test_gradients_stay_behind():
    assert jc.torch.as_jax(torch.ones(3, requires_grad=True)).tolist() == [1, 1, 1]


def test_other_things_are_refused():
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        jc.torch.as_jax(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo"):
        jc.torch.as_jax(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="device meta"):
        jc.torch.as_jax(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="must be a JAX array"):
        jc.torch.as_tensor(np.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "convert"), [("array", jc.torch.as_tensor), ("q", jc.torch.dequantize), ("q", jc.torch.PackedTensor)]
)
def test_arrays_that_jax_traces_are_refused(name, convert):
    given = jnp.ones((2, 4)) if name == "array" else jc.quantize(jnp.ones((2, 4)), "int4(group=4)")
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match=f"^{name} is traced by JAX, and torch needs its numbers"):
            transform(convert)(given)


def test_codes_are_tensors_of_their_words():
    q = jc.quantize(jnp.linspace(-7, 7, 12).reshape(2, 6), "int4(group=all)")
    codes = jc.torch.as_tensor(q.qvalue)
    assert codes.dtype == torch.uint8 and codes.data_ptr() == q.qvalue.unsafe_buffer_pointer()
    assert codes.tolist() == np.asarray(q.qvalue).tolist()


def test_without_torch_the_extra_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
    )
    monkeypatch.delitem(sys.modules, "jchop.torch")
    with pytest.raises(ModuleNotFoundError, match=r'needs torch: pip install "\.\[torch\]"'):
        importlib.import_module("jchop.torch")


@further
def nothing_is_kept_after_calls():
    """Neither arrays nor tensors: as many live after 1,000 calls, some of them with gradients, as before."""
    x = torch.randn(64)
    spec = jc.Spec("e5m2", gradient="clipped")

    def call(number: int) -> None:
        leaf = x.clone().requires_grad_(number % 8 == 0)
        result = jc.torch.round_to_format(leaf, spec)
        if leaf.requires_grad:
            result.sum().backward()

    def alive() -> tuple[int, int]:
        gc.collect()
        return len(jax.live_arrays()), sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    for number in range(16):
        call(number)
    before = alive()
    for number in range(1000):
        call(number)
    assert alive() == before


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
def test_dtypes_that_torch_cannot_read(dtype):
    with pytest.raises(TypeError, match=f"array has dtype {dtype}, which torch cannot read"):
        jc.torch.as_tensor(jnp.ones(3, dtype))


test_further = further.test()
