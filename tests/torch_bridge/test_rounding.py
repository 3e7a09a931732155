"""`jchop.torch.round_to_format`: the bits that the exact oracle and JAX give, for tensors of every kind."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further
from oracle import CARRIERS, DETERMINISTIC, STOCHASTIC
from refusals import assert_refused

pytest.importorskip("torch")

import torch
from torch_bridge.tensors import array, same_bits, tensor

import jchop as jc

further = Further()

rounded = jc.torch.round_to_format

#: One text of every kind of format, with the oracle's set where the exact oracle has it for arrays.
KINDS: dict[str, Any] = {
    "bfloat16": cases.NAMED["bfloat16"],
    "binary16": cases.NAMED["binary16"],
    "float8_e4m3fn": cases.NAMED["float8_e4m3fn"],
    "float8_e5m2fnuz": cases.NAMED["float8_e5m2fnuz"],
    "float8_e8m0fnu": cases.NAMED["float8_e8m0fnu"],
    "float4_e2m1fn": cases.NAMED["float4_e2m1fn"],
    "binary8p3se": cases.P3109["binary8p3se"],
    "tf32": cases.WIDE["tf32"],
    "e9m40": cases.DOUBLE["e9m40"],
    "fixed4.4": cases.FIXED["fixed4.4"],
    "uinteger4": cases.FIXED["uinteger4"],
}
CODEBOOK = jc.formats.CodebookFormat((-3.0, -1.0, -0.25, 0.0, 0.5, 8.0))


@further
def bits_are_those_of_the_exact_oracle(rng):
    """Every kind of format on every dtype that holds it, the deterministic modes and overflow rules taking turns."""
    turns = itertools.cycle(itertools.product(DETERMINISTIC, cases.FLOAT_OVERFLOWS))
    for (text, fmt), carrier in itertools.product(KINDS.items(), cases.DTYPES):
        if not oracle.held(fmt, CARRIERS[carrier]):
            continue
        x = cases.adversarial(fmt, carrier, 600, rng)
        mode, overflow = next(turns)
        got = rounded(tensor(x), f"{text}:{mode}:{overflow}")
        assert got.dtype == getattr(torch, carrier)
        cases.assert_bits(x, array(got), cases.batch(x).round(fmt, mode, overflow), f"{text} {mode} {overflow}")


@further
def stochastic_bits_are_those_of_the_seed(rng):
    """The exact oracle, given the words of `jax.random.key(seed)`; and seeds of more than 32 bits."""
    fmt = KINDS["float8_e4m3fn"]
    turns = itertools.cycle(STOCHASTIC)
    for carrier, seed in zip(cases.DTYPES, (0, 2**31 + 5, 2**32 - 1, 1), strict=True):
        x = cases.adversarial(fmt, carrier, 512, rng)
        mode, width = next(turns), 64 if carrier == "float64" else 32
        with jax.enable_x64(True):
            words = np.asarray(jc.random_bits(jax.random.key(seed), x.shape, width=width)).astype(object)
        n = width - (mode in ("stochastic_b", "stochastic_c"))
        expected = cases.batch(x).round_drawn(fmt, mode, n, words >> (width - n), "saturate")
        got = rounded(tensor(x), f"float8_e4m3fn:{mode}:saturate", seed=seed)
        cases.assert_bits(x, array(got), expected, f"{carrier} {mode} {seed}")
    with jax.enable_x64(True):
        key = jax.random.key(2**40 + 3)
    x = tensor(cases.adversarial(fmt, "float32", 512, rng))
    assert same_bits(rounded(x, "bfloat16:stochastic", seed=2**40 + 3), jc.round_to_format(array(x), _drawn(), key))


def _drawn() -> jc.Spec:
    return jc.Spec("bfloat16", rounding="stochastic")


#: Floats, one that float64 alone holds, one without a sign, fixed point, two scales, groups, and a codebook.
OF_JAX = ["fixed4.4", "float8_e4m3fn", "e9m40", "float8_e8m0fnu", "nvfp4", "int4(group=8)", "int8(channel=0)", CODEBOOK]


@further
@pytest.mark.parametrize("spec", OF_JAX, ids=str)
def every_kind_and_mode_gives_the_bits_of_jax(spec, rng):
    """On the widest dtype and another one in turn; what JAX refuses on a dtype, the bridge refuses there too."""
    held, turn = 0, len(str(spec)) % 3
    for carrier in ("float64", ("float16", "bfloat16", "float32")[turn]):
        hows = [jc.Spec(spec, rounding=mode) for mode in (*DETERMINISTIC, *STOCHASTIC)]
        x = cases.adversarial(KINDS["float8_e4m3fn"], carrier, 256, rng).reshape(4, 64)
        expected = expected_of(x, hows)
        if not expected:
            with pytest.raises(ValueError, match=r"float32|float64"):
                rounded(tensor(x), hows[0])
            continue
        held += 1
        for how, values in zip(hows, expected, strict=True):
            got = array(rounded(tensor(x), how, seed=7))
            cases.assert_bits(x.ravel(), got.ravel(), cases.bits(values.ravel()), f"{how} {carrier}")
    assert held


def expected_of(x: np.ndarray, hows: list[jc.Spec]) -> list[np.ndarray]:
    """What JAX gives in each mode; nothing where the dtype does not hold the format."""
    with jax.enable_x64(True):
        every = jax.jit(lambda x, key: [jc.round_to_format(x, how, key) for how in hows])
        try:
            return [np.asarray(values) for values in every(jnp.asarray(x), jax.random.key(7))]
        except ValueError:
            return []


def test_scaled_formats_and_codebooks_give_the_bits_of_jax(rng):
    for text in ("mxfp4", "int8(channel=0)", CODEBOOK):
        x = rng.normal(size=(4, 64)).astype(np.float32)
        assert same_bits(rounded(tensor(x), text), jc.round_to_format(x, text)), text


@further.first
def shapes_and_strides_without_a_copy(rng):
    """Memory without gaps is read as it lies: results have its strides, and the bits of the C order."""
    x = tensor(rng.normal(size=(2, 3, 4, 5)).astype(np.float32))
    permuted, last = x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last)
    for view, spec in ((last, "e5m2:stochastic"), (permuted, "e5m2:stochastic"), (permuted, "int4(group=5,axis=0)")):
        got = rounded(view, spec, seed=3)
        assert got.stride() == view.stride()
        assert same_bits(got, jc.round_to_format(array(view), spec, jax.random.key(3)))
    for shape in ((), (0,), (0, 3), (1, 1)):
        assert same_bits(rounded(torch.full(shape, 1.1), "e5m2"), np.full(shape, 1.0, np.float32))


@further
def results_can_be_rounded_again():
    """Small ones, which are copies, and large ones, which are not, lie where JAX can read them in place."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (1,), (3,), (17,), (2, 0), (129, 1025)):
            x = torch.full(shape, 1.1, dtype=dtype)
            again = rounded(rounded(x, "e5m2"), "e4m3")
            assert again.dtype == dtype and again.shape == x.shape and bool((again == 1).all())
            assert again.is_contiguous() and again.data_ptr() % 64 == 0


def test_what_needs_a_copy_says_so(rng):
    x = tensor(rng.normal(size=(8, 6)).astype(np.float32))
    for view, why in ((x[:, ::2], "gaps"), (x[0].expand(4, 6), "overlaps"), (x.flatten()[1:], "64 bytes")):
        with pytest.raises(ValueError, match=f"{why}.*copy=True"):
            rounded(view, "e5m2")
        assert same_bits(rounded(view, "e5m2", copy=True), jc.round_to_format(view.numpy(), "e5m2"))


def test_complex_numbers_by_parts():
    z = torch.tensor([1.1 + 2.3j, -0.3 - 9.9j])
    assert same_bits(rounded(z, "e5m2"), jc.round_to_format(z.numpy(), "e5m2"))
    with pytest.raises(ValueError, match="lazy conjugate"):
        rounded(z.conj(), "e5m2")
    assert same_bits(rounded(z.conj(), "e5m2", copy=True), jc.round_to_format(z.conj().resolve_conj().numpy(), "e5m2"))


def test_the_result_has_memory_of_its_own():
    x = torch.arange(16.0)
    got = rounded(x, "binary32")  # nothing changes
    assert got.data_ptr() != x.data_ptr()
    x.zero_()
    assert got.tolist() == list(range(16))


def test_in_place(rng):
    x = tensor(rng.normal(size=(3, 8)).astype(np.float32))
    for view in (x, x.t()):
        expected = rounded(view, "e5m2:stochastic", seed=9)
        address = view.data_ptr()
        assert jc.torch.round_to_format(view, "e5m2:stochastic", seed=9, inplace=True) is view
        assert view.data_ptr() == address and torch.equal(view, expected)
    leaf = torch.tensor([0.3, 1.0, 9.0], requires_grad=True)
    jc.torch.round_to_format(leaf * 1, "fixed2.3:gradient=clipped", inplace=True).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [1, 1, 0]
    with pytest.raises(RuntimeError, match="leaf Variable"):
        jc.torch.round_to_format(leaf, "e5m2", inplace=True)
    with torch.no_grad():
        assert jc.torch.round_to_format(leaf, "e5m2", inplace=True) is leaf and leaf[0] == 0.3125


def test_generators_are_drawn_from():
    x = torch.full((512,), 1.1)
    spec = "e5m2:stochastic"

    def draw(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [rounded(x, spec, generator=generator) for _ in range(2)]

    (a, b), (c, d) = draw(1), draw(1)
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
    words = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    key = jax.random.wrap_key_data(jnp.asarray(words.numpy().view(np.uint32)), impl="threefry2x32")
    assert same_bits(a, jc.round_to_format(x.numpy(), spec, key))


def test_a_cotangent_draws_for_itself():
    """From its own seed, or from the generator; and in place, too."""
    half, halves = "fixed8.0:stochastic:gradient=[fixed8.0:stochastic]", torch.full((64,), 0.5)

    def run(function, **how):
        x = halves.clone().requires_grad_()
        y = function(x * 1, half, **how)
        y.backward(halves)
        assert x.grad is not None and {*y.tolist()} == {*x.grad.tolist()} == {0, 1}
        return y.tolist(), x.grad.tolist()

    for function in (rounded, partial(rounded, inplace=True)):
        y, slope = run(function, seed=1, gradient_seed=2)
        assert y != slope and run(function, seed=1, gradient_seed=2) == (y, slope)
        other = run(function, seed=3, gradient_seed=2)
        assert other[0] != y and other[1] == slope
        other = run(function, seed=1, gradient_seed=3)
        assert other[0] == y and other[1] != slope
        y, slope = run(function, generator=torch.Generator().manual_seed(1))
        assert y != slope and run(function, generator=torch.Generator().manual_seed(1)) == (y, slope)


def test_errors():
    table: Any = [
        ((torch.ones(2), "e5m2:stochastic"), ValueError, "seed=, an integer, or generator="),
        ((torch.ones(2, dtype=torch.int32), "e5m2"), TypeError, r"torch\.int32, which is not a carrier"),
        ((torch.ones(2, dtype=torch.float16), "bfloat16"), ValueError, "float32"),
        ((torch.ones(2), "e5m2x"), ValueError, "e5m2x"),
        ((torch.ones(2), 3), TypeError, "spec=3"),
        ((np.ones(2), "e5m2"), TypeError, r"must be a torch\.Tensor"),
    ]
    assert_refused({text: (partial(rounded, *given), error, text) for given, error, text in table})


def test_emulated_functions_and_comparisons_name_the_array_of_a_tensor() -> None:
    x = torch.ones(2)
    low = jc.emulate(lambda v, more=None: v, "bfloat16")
    for call in (low, low.blame):
        with pytest.raises(TypeError, match=r"^args\[0\] is a torch.Tensor; pass .*jchop.torch.as_jax\(args\[0\]\)$"):
            call(x)
    with pytest.raises(TypeError, match=r"^kwargs\['more'\]\['a'\] is a torch.Tensor"):
        low(1.0, more={"a": x})
    with pytest.raises(TypeError, match=r"^x is a torch.Tensor"):
        jc.compare(x)  # type: ignore[arg-type]


def test_functions_of_arrays_name_those_of_tensors() -> None:
    said = r"^x is a torch.Tensor; jchop.torch.round_to_format and jchop.torch.quantize .*jchop.torch.as_jax\(x\)$"
    for x in (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(2))):
        for function in (jc.round_to_format, jc.quantize, jc.math.sqrt):
            with pytest.raises(TypeError, match=said):
                function(x, "e5m2")
        with pytest.raises(TypeError, match=r"^y is a torch\.Tensor"):
            jc.math.add(1.0, x, "e5m2")


def test_errors_of_seeds():
    x = torch.ones(2)
    for seed, error in ((-1, ValueError), (2**64, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="seed="):
            rounded(x, "e5m2:stochastic", seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass one of them"):
        rounded(x, "e5m2:stochastic", seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"torch\.Generator"):
        rounded(x, "e5m2:stochastic", generator=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_seed="):
        rounded(x, jc.Spec("e5m2", gradient="e5m2:stochastic"))


test_further = further.test()
