"""Pychop's listings on NumPy and JAX, with the import changed, against exact arithmetic."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from fractions import Fraction
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from further import Further

import jchop as jc
from jchop.compat import pychop
from jchop.compat.pychop import Chop, Chopf, Chopi, ChopSTE, Customs, FaultChop, LightChop, float_params, ptq

further = Further()

RMODES = {1: "nearest_even", 2: "up", 3: "down", 4: "toward_zero", 7: "nearest_zero", 8: "nearest_away", 9: "odd"}
E5M2 = oracle.ieee(5, 2)


def numbers() -> np.ndarray:
    """Values, ties of both signs, neighbours of powers of two, subnormals, and what overflows."""
    x = exact.numbers(160, -20, 17)
    x[2:14] = [1.125, -1.125, 1.375, -1.375, 70000.0, -131072.0, 61440.0, 1e-8, np.inf, -np.inf, np.nan, 2.0 - 2.0**-40]
    return x


def test_floating_point() -> None:
    pychop.backend("numpy", 1)
    x = numbers()
    for rmode, mode in RMODES.items():
        ch = Chop(exp_bits=5, sig_bits=2, rmode=rmode)
        exact.assert_same(ch(x), exact.rounded(x, E5M2, mode))
    assert ch.u == 0.125 and pychop.get_backend() == "auto"
    exact.assert_same(
        Chop(5, 2, subnormal=False)(x), exact.rounded(np.where(abs(x) < 2.0**-14, np.copysign(0, x), x), E5M2)
    )
    assert ChopSTE is LightChop is Chop
    on_jax = Chop(5, 2, rmode=4)(jnp.asarray(x, jnp.float32))
    assert isinstance(on_jax, jax.Array)
    exact.assert_same(on_jax, exact.rounded(x.astype(np.float32), E5M2, "toward_zero"))
    slopes = jax.grad(lambda v: Chop(5, 2)(v).sum())(jnp.array([1.1, 2.2]))
    assert slopes.tolist() == [1.0, 1.0]


@pytest.mark.smoke
def test_the_chop_of_the_paper() -> None:
    x = numbers()
    half = oracle.ieee(5, 10)
    for ch in (FaultChop("h"), Chop("h"), Chop(prec="h", rmode="nearest"), FaultChop(customs=Customs(emax=15, t=11))):
        assert isinstance(ch, FaultChop) and (ch.t, ch.emax, ch.u) == (11, 15, 2.0**-11)
        exact.assert_same(ch(x), exact.rounded(x, half))
    down = exact.rounded(x, half, "down")
    for customs in (Customs(exp_bits=5, sig_bits=10), Customs(emax=15, t=11)):
        exact.assert_same(Chop(customs=customs, rmode=3)(x), down)
    coarse = Chop(customs=Customs(t=2, emax=10), rmode=3)
    exact.assert_same(coarse(x), exact.rounded(x, oracle.FloatSet(5, 1, 10, emax=10), "down"))
    assert float(coarse.sqrt(3.0)) == 1.5 and float(coarse.multiply(96.0, 32.0)) == 1536.0
    tiny = exact.numbers(60, -136, -124, seed=1)
    exact.assert_same(FaultChop("b")(tiny), exact.rounded(tiny, oracle.ieee(8, 7, subnormals=False)))
    exact.assert_same(FaultChop("bf16")(tiny), exact.rounded(tiny, oracle.ieee(8, 7)))
    exact.assert_same(FaultChop("q52", explim=0)(tiny), exact.rounded(tiny, oracle.ieee(11, 2)))
    drawn = FaultChop("q52", rmode=5, randfunc=lambda n: np.full(n, 0.3))(np.array([1.0625, 1.125]))
    assert drawn.tolist() == [1.0, 1.25]
    flipped = FaultChop("h", flip=True, p=0.25)(np.ones(400))
    assert 60 < (flipped != 1).sum() < 140 and set(flipped[flipped != 1]) <= {1 + 2.0**-i for i in range(1, 11)}


def test_fixed_point() -> None:
    x = numbers()[14:] / 1000
    for rmode in (1, 2, 3, 4):
        exact.assert_same(Chopf(ibits=4, fbits=4, rmode=rmode)(x), exact.rounded(x, oracle.fixed(4, 4), RMODES[rmode]))
    ch = Chopf(4, 4)
    np.testing.assert_array_equal(ch.quantize(x), ch(x))


def test_integers() -> None:
    x = np.array([[0.1, -0.2], [0.3, 0.4]], np.float32)
    for symmetric in (True, False):
        ch = Chopi(bits=8, symmetric=symmetric)
        codes = ch.quantize(x)
        low, high = (0.0, float(np.abs(x).max())) if symmetric else (float(x.min()), float(x.max()))
        steps = 127 if symmetric else 255
        scale = np.float32(float((Fraction(high) - Fraction(low)) / steps))
        zero = 0 if symmetric else oracle.rne(-Fraction(low) / Fraction(float(scale)))
        wanted = [oracle.rne(Fraction(float(v)) / Fraction(float(scale)) + zero) for v in x.ravel()]
        assert codes.ravel().tolist() == wanted and codes.dtype == (np.int8 if symmetric else np.uint8)
        assert (ch.qmin, ch.qmax) == ((-128, 127) if symmetric else (0, 255))
        np.testing.assert_array_equal(ch.dequantize(codes), ch(x))
        np.testing.assert_array_equal(
            ch(x).ravel(), [np.float32(float((c - zero) * Fraction(float(scale)))) for c in wanted]
        )


@further
def integers_by_earlier_names() -> None:
    x = np.array([-3.5, -1.0, 0.0, 0.3, 3.5, 1.75])
    for bits in (3, 7):
        most = 2 ** (bits - 1) - 1
        ch = Chopi(num_bits=bits, symmetric=True)
        codes = ch.quantize(x)
        assert codes.dtype == np.int8
        scale = Fraction(ch.scale.item())
        assert abs(scale * most / Fraction(3.5) - 1) < 2.0**-24
        assert codes.tolist() == [oracle.rne(Fraction(v) / scale) for v in x.tolist()]
        assert (ch.qmin, ch.qmax, ch.bits) == (-most - 1, most, bits)
        np.testing.assert_array_equal(ch.dequantize(codes), codes * float(scale))
    shifted = Chopi(5)
    codes = shifted.quantize(x)
    assert (shifted.qmin, shifted.qmax) == (0, 31) == (codes.min(), codes.max()) and codes.dtype == np.uint8
    np.testing.assert_array_equal(shifted.dequantize(codes), shifted(x))
    rows = np.array([[1.0, 10.0], [-2.0, 20.0]])
    assert Chopi(8, True, True, channel_dim=1).quantize(rows).tolist() == [[64, 64], [-127, 127]]
    with pytest.raises(ValueError, match="bits=16"):
        Chopi(num_bits=16)


@further.first
def integers_by_channel_and_calibrated() -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32) * [[1], [10], [100]]
    x = x.astype(np.float32)
    ch = Chopi(bits=4, symmetric=True, per_channel=True, axis=0)
    codes = ch.quantize(x)
    assert codes.shape == x.shape and np.abs(codes).max(axis=1).tolist() == [7, 7, 7] and codes.min() < 0
    np.testing.assert_array_equal(ch.dequantize(codes), jc.round_to_format(x, "int4(channel=0)"))
    kept = Chopi(bits=8)
    kept.calibrate(np.array([0.0, 2.55], np.float32))
    assert kept.quantize(np.array([0.1, 5.0, -1.0], np.float32)).tolist() == [10, 255, 0]
    assert kept(np.array([5.0], np.float32)).tolist() == [np.float32(2.55)]
    with pytest.raises(ValueError, match="no array was quantized"):
        Chopi().dequantize(codes)


@further
def functions() -> None:
    ch = Chop(5, 2)
    x = np.linspace(-3, 3, 25)
    for name in ("sin", "tanh", "exp"):
        wanted = exact.rounded(getattr(np, name)(exact.rounded(x, E5M2)), E5M2)
        exact.assert_same(getattr(ch, name)(x), wanted)
        exact.assert_same(getattr(pychop, name)(x, ch), wanted)
    ones = np.ones(100)
    assert ch.sum(ones) == 8 == pychop.sum(ones, chop=ch)  # Pychop adds in full precision and gives 96
    assert ch.sum(np.ones((3, 2)), 0).tolist() == [3, 3] and ch.mean(np.ones((3, 2)), axis=1).tolist() == [1, 1, 1]
    a = np.array([[1.0, 0.25], [3.0, 8.0]])
    assert ch.matmul(a, a).tolist() == [[1.75, 2], [28, 64]]  # 0.25 + 2, 3 + 24 and 0.75 + 64, to three bits
    assert ch.add(1, 0.125) == 1 and pychop.divide(1.0, 3.0, ch) == 0.3125
    assert ch.clip(np.array([0.1, 9.0]), 1.0, 2.0).tolist() == [1, 2]
    low, high = FaultChop("q52", rmode=3).sqrt(2.0), FaultChop("q52", rmode=2).sqrt(2.0)
    assert (low, high) == (1.25, 1.5)
    for error, said, call in (
        (TypeError, "sum takes 1 operand and axis", lambda: ch.sum(ones, 0, 1)),
        (TypeError, "add takes 2 operands", lambda: ch.add(ones)),
        (TypeError, "sin needs a quantizer", lambda: pychop.sin(ones)),
        (ValueError, "decimals must be 0", lambda: ch.round(ones, 2)),
        (AttributeError, "no attribute 'fft'", lambda: ch.fft(ones)),
        (AttributeError, "no attribute 'fft'", lambda: pychop.fft),
    ):
        with pytest.raises(error, match=said):
            call()


def test_functions_take_complex_numbers() -> None:
    ch, z = Chop(5, 2), np.array([1.1 + 2.3j], np.complex64)
    assert (ch.conj(z).tolist(), ch.real(z).tolist(), ch.imag(z).tolist()) == ([1 - 2.5j], [1.0], [2.5])


def test_exponents_of_ldexp_are_whole_numbers() -> None:
    ch = Chop(5, 2)
    calls: list[Any] = [
        (1.1, 2), (np.array([1.1]), np.array([2])), ([1.1], [2]), (np.array([1.1]).data, np.array([2.0]).data),
        (jnp.array([1.1]), 2), (np.array([1.1], np.float32), np.uint8(2)),
    ]  # fmt: skip
    for x, n in calls:
        assert ch.ldexp(x, n) == 4
    assert FaultChop("h", explim=0).ldexp(np.array([1.5], np.float32), [3]).dtype == np.float32
    assert ch.ldexp(1.0, [1e300, -np.inf]).tolist() == [np.inf, 0]
    with pytest.raises(TypeError, match="n has dtype float64"):
        ch.ldexp(1.1, 0.5)


def test_operands_of_several_dtypes() -> None:
    bound = FaultChop("h", explim=0)
    for product in (bound.multiply(3.0, jnp.ones(2)), bound.multiply(jnp.ones(2), 3.0)):
        assert product.dtype == np.float32 and product.tolist() == [3, 3]
    assert bound.multiply(np.array([1.5], np.float32), np.float64(2.0)).dtype == np.float64
    with pytest.raises(ValueError, match="pass key="):
        jax.jit(lambda v: Chop(5, 2, rmode=5).add(1.06, v))(jnp.ones(3))


def test_functions_in_a_wider_range_than_the_dtype() -> None:
    ch = Chop(11, 20)
    for dtype in (np.float16, np.float32):
        x = np.array([0.3, 1.0], dtype)
        got = ch.sin(x)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, jc.math.sin(x.astype(np.float64), "e11m20").astype(dtype))
    mantissa, exponent = ch.frexp(np.array([48.0], np.float32))
    assert (mantissa.dtype, mantissa, exponent) == (np.float32, 0.75, 6) and exponent.dtype.kind == "i"
    assert ch.exp(np.float32(100.0)) == np.inf
    with pytest.raises(ValueError, match="jax_enable_x64"):
        ch.sin(jnp.ones(2))


def test_every_function_of_the_original_runs() -> None:
    """All 65 methods of the classes, on one number each; their values are proved where `jchop.math` is."""
    from jchop.compat.pychop.math_func import PYCHOP_FUNCTIONS, PYCHOP_METHODS

    assert len(PYCHOP_METHODS) == 65 and set(PYCHOP_FUNCTIONS) < set(PYCHOP_METHODS) and len(PYCHOP_FUNCTIONS) == 40
    assert all(hasattr(jc.math, name) for name in PYCHOP_METHODS)
    for name, count in PYCHOP_METHODS.items():
        takes = list(inspect.signature(getattr(jc.math, name)).parameters)
        assert takes[count] == "spec", name


def test_random_numbers() -> None:
    x = np.full(2000, 1.0625)
    ch = Chop(5, 2, rmode=5, random_state=7)
    first, second = ch(x), ch(x)
    assert set(first) == {1.0, 1.25} and 400 < (first == 1.25).sum() < 600 and (first != second).any()
    again = Chop(5, 2, rmode=5, random_state=7)
    np.testing.assert_array_equal(again(x), first)
    np.testing.assert_array_equal(again(jnp.asarray(x, jnp.float32)), ch_in_float32(x))
    key = jax.random.wrap_key_data(jnp.array([7, 0], jnp.uint32))
    np.testing.assert_array_equal(first, jc.round_to_format(x, "e5m2:stochastic", key))
    for rmode in (6, 10):
        assert 900 < (Chop(5, 2, rmode=rmode)(x) == 1.25).sum() < 1100
    with pytest.raises(ValueError, match="pass key="):
        jax.jit(ch)(jnp.ones(3))
    traced = jax.jit(lambda v, k: ch(v, key=k))(jnp.asarray(x, jnp.float32), key)
    np.testing.assert_array_equal(traced, jc.round_to_format(x.astype(np.float32), "e5m2:stochastic", key))


def test_a_key_is_drawn_from_in_place_of_the_objects_numbers() -> None:
    """Also where numbers are rounded in a wider dtype, in `quantize`, in functions, and for flips."""
    x, keys = np.full(40, 1 + 2.0**-4, np.float32), [jax.random.key(seed) for seed in (1, 2)]
    for ch, spec in (
        (Chop(5, 3, rmode=5), "e5m3:stochastic"),
        (Chop(9, 3, rmode=5), "e9m3:stochastic"),
        (FaultChop(customs=Customs(exp_bits=5, sig_bits=3), rmode=5), "e5m3:stochastic"),
        (Chopf(4, 3, rmode=5), "fixed4.3:stochastic"),
    ):
        wide = x.astype(np.float64) if spec[:2] == "e9" else x
        for key in keys:
            wanted = jc.round_to_format(wide, spec, key)
            for got in (ch(x, key=key), ch.quantize(x, key=key)):
                np.testing.assert_array_equal(got, wanted)
    first, again, other = (Chop(5, 3, rmode=5).square(x, key=key) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first, again)
    flips = FaultChop("h", flip=True)
    first_flips, again, other_flips = (flips(x, key=key) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first_flips, again)
    assert (first != other).any() and (first_flips != other_flips).any()


def ch_in_float32(x: np.ndarray) -> np.ndarray:
    """What the second call of an object with the seed 7 gives."""
    key = jax.random.wrap_key_data(jnp.array([7, 1], jnp.uint32))
    return jc.round_to_format(x.astype(np.float32), "e5m2:stochastic", key)


def test_float_params() -> None:
    assert float_params("h") == (2.0**-11, 2.0**-24, 2.0**-14, 65504.0, 11, -24, -14, 15)
    assert tuple(float_params("tf32"))[:4] == (2.0**-11, 2.0**-136, 2.0**-126, 2.0**128 - 2.0**117)
    table: Any = float_params()
    assert table["d"][3] == np.finfo(np.float64).max and table["q52"] == table["fp8-e5m2"]
    assert float_params("h", binary=True) == float_params("h")
    powers: Any = float_params(binary=True)
    assert powers["h"] == ("2^-11", "2^-24", "2^-14", "2^16", 11, -24, -14, 15) and powers.keys() == table.keys()


def test_weights_of_flax_models(capsys: pytest.CaptureFixture[str]) -> None:
    x = jnp.asarray(numbers()[:14], jnp.float32)
    variables = {
        "params": {"Dense_0": {"kernel": x, "bias": x[:3]}, "Norm_0": {"scale": x}, "Embed_0": {"embedding": x}},
        "batch_stats": {"Norm_0": {"scale": x}},
    }
    got = ptq.post_quantization(variables, Chop(5, 2), verbose=True)
    wanted = exact.rounded(np.asarray(x), E5M2)
    exact.assert_same(got["params"]["Dense_0"]["kernel"], wanted)
    exact.assert_same(got["params"]["Dense_0"]["bias"], wanted[:3])
    exact.assert_same(got["params"]["Norm_0"]["scale"], wanted)
    assert got["params"]["Embed_0"]["embedding"] is x and got["batch_stats"]["Norm_0"]["scale"] is x
    assert "rounded params.Dense_0.kernel, (14,)" in capsys.readouterr().out.splitlines()
    assert pychop.post_quantization is ptq.post_quantization
    for call in (ptq.dynamic_post_quantization, lambda v, ch: ptq.static_post_quantization(v, ch, [x])):
        with pytest.raises(TypeError, match=r"not variables of a Flax model: see jchop\.nn"):
            call(variables, Chop(5, 2))


def test_the_modules_that_scripts_import_from() -> None:
    from jchop.compat.pychop import math_func as mf
    from jchop.compat.pychop.chop import Chop as PapersChop
    from jchop.compat.pychop.lightchop import LightChop as PapersLightChop

    assert PapersChop is Chop and PapersLightChop is LightChop
    ch, x = LightChop(5, 10, rmode=3), np.random.default_rng(0).standard_normal((3, 3))
    half = oracle.ieee(5, 10)
    assert mf.sin(3.2, ch) == float(exact.rounded(np.sin(exact.rounded(3.2, half, "down")), half, "down"))
    np.testing.assert_array_equal(mf.dot(x, x, ch), mf.matmul(x, x, chop=ch))
    with pytest.raises(AttributeError, match="no attribute 'fft'"):
        _ = mf.fft


def test_more_exponents_than_the_array_has() -> None:
    x = exact.numbers(100, -149, 127).astype(np.float32)
    for rmode in (1, 4, 9):
        exact.assert_same(Chop(10, 9, rmode=rmode)(x), exact.rounded(x, oracle.ieee(10, 9), RMODES[rmode]))
    assert Chop(10, 9)(x).dtype == np.float32
    assert Chop(10, 9)(np.array([3.402e38], np.float32)).tolist() == [np.inf]
    with pytest.raises(ValueError, match="cannot hold every result of spec='e10m9'"):
        Chop(10, 9)(jnp.asarray(x))


def test_what_matlab_hands_over() -> None:
    """Doubles for every number, and the memory of matrices, by columns."""
    x = numbers().reshape(4, 40)
    matrix = np.asfortranarray(x).data
    ch = Chop(exp_bits=5.0, sig_bits=2.0, rmode=1.0)  # type: ignore[arg-type]
    exact.assert_same(ch(matrix), exact.rounded(x, E5M2))
    assert (ch.exp_bits, ch.sig_bits, float(ch(1.1))) == (5, 2, 1.0)
    half: list[Any] = [Customs(exp_bits=5.0, sig_bits=10.0), Customs(15.0, 11.0)]  # type: ignore[arg-type]
    for customs in half:
        assert float(FaultChop(customs=customs, rmode=3.0)(0.1)) == 0.0999755859375
    assert float(FaultChop("h", rmode=2.0, explim=1.0)(1e-9)) == 2.0**-24  # type: ignore[arg-type]
    fixed = x / 1000
    exact.assert_same(Chopf(4.0, 4.0)(fixed.data), exact.rounded(fixed, oracle.fixed(4, 4)))  # type: ignore[arg-type]
    codes = Chopi(bits=8.0, symmetric=True).quantize(np.array([[0.5, -1.0]]).data)  # type: ignore[arg-type]
    assert codes.tolist() == [[64, -127]]
    with pytest.raises(TypeError, match=r"exp_bits=5\.5"):
        Chop(exp_bits=5.5, sig_bits=2)  # type: ignore[arg-type]


def test_copies() -> None:
    x = np.full(50, 1.0625)
    for ch in (Chop(5, 2, rmode=5), FaultChop("q52", rmode=5), Chopf(2, 2, rmode=5)):
        ch(x)
        others = copy.deepcopy(ch), pickle.loads(pickle.dumps(ch))
        following = ch(x)
        for other in others:
            assert type(other) is type(ch)
            np.testing.assert_array_equal(other(x), following)


def test_refused() -> None:
    for error, said, call in (
        (ValueError, "rmode=11", lambda: Chop(5, 2, rmode=11)),
        (ValueError, "rmode=7 must be an integer from 1 to 6", lambda: FaultChop("h", rmode=7)),
        (ValueError, "rmode='odd'", lambda: FaultChop("h", rmode="odd")),
        (ValueError, "prec='x' must be one of .*'fp64'; customs=", lambda: FaultChop("x")),
        (ValueError, "prec='custom' must be one of", lambda: FaultChop("custom")),
        (ValueError, "must have emax or exp_bits", lambda: FaultChop(customs=Customs(t=11))),
        (ValueError, "exp_bits=5 is emax=15, not 31", lambda: FaultChop(customs=Customs(emax=31, exp_bits=5, t=11))),
        (ValueError, "sig_bits=10 is t=11, not 12", lambda: FaultChop(customs=Customs(emax=15, sig_bits=10, t=12))),
        (ValueError, "t=54 must be an integer from 1 to 53", lambda: FaultChop(customs=Customs(emax=15, t=54))),
        (ValueError, "exp_bits=1 must be", lambda: FaultChop(customs=Customs(exp_bits=1, t=5))),
        (ValueError, "lib='tensorflow'", lambda: pychop.backend("tensorflow")),
        (ValueError, "prec='q'", lambda: float_params("q")),
        (TypeError, "randfunc is for NumPy", lambda: FaultChop(rmode=5, randfunc=np.ones)(jnp.ones(2))),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_name_that_is_absent_says_what_there_is_instead() -> None:
    for name, instead in (
        ("P3109", "binary8p4se"),
        ("p3109_encode", "binary8p4se"),
        ("mx_quantize", "mxfp8_e4m3"),
        ("MXTensor", "mxfp8_e4m3"),
        ("BFP_FORMATS", "block floating point"),
        ("builtin", "jchop.emulate"),
        ("Simulate", "values()"),
    ):
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(pychop, name)
        assert not hasattr(pychop, name)


test_further = further.test()
