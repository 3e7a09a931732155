"""Interfaces of other programs on NumPy and JAX: MATLAB's chop, Pychop, QPyTorch, pi-quant."""

# Tables of calls, one a line.
# ruff: noqa: E501, E731
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jchop
from digests import Call
from digests.common import KEY, coarse, hard, jc
from digests.emulated import attempt
from digests.face import names

X = hard("float8_e5m2", "float64", 256)


def matlab() -> Iterator[Call]:
    chop = jc.matlab.chop
    for fmt, mode in itertools.product(("h", "b", "t", "s", "d", "q43", "q52", "fp8-e4m3"), range(1, 7)):
        yield Call(f"matlab.chop {fmt} {mode}", lambda f=fmt, m=mode: chop(X, {"format": f, "round": m, "seed": 5}))
    for case, options in {
        "params": {"format": "c", "params": [5, 9]}, "subnormal": {"subnormal": 0}, "explim": {"format": "q52", "explim": 0},
        "flip": {"flip": 1, "p": 0.25, "seed": 3}, "randfunc": {"round": 5, "randfunc": lambda n: np.arange(n) % 8 / 8}, "bad": {"format": "z"}, "seedless": {"round": 5},
    }.items():
        yield Call(f"matlab.chop {case}", lambda o=options: chop(X, **o))
    yield Call("matlab.chop single F", lambda: chop(np.asfortranarray(X.reshape(16, 16).astype(np.float32)), {"format": "q43"}, round=2))


def pychop() -> Iterator[Call]:
    p = jc.compat.pychop
    for prec, mode in itertools.product(((5, 2), (4, 3), (8, 7), (5, 10)), range(1, 11)):
        yield Call(f"pychop.Chop {prec} {mode}", lambda a=prec, m=mode: p.Chop(*a, rmode=m)(X))
    every = {"exp_bits": 5, "sig_bits": 3, "rmode": 5, "subnormal": False, "chunk_size": 8, "random_state": 7, "verbose": 0}
    yield Call("pychop.Chop options", lambda: [p.Chop(**every)(X) for _ in range(2)])
    yield Call("pychop.Chop verbose", lambda: p.Chop(5, 3, verbose=1)(X))
    yield Call("pychop.Chop jax", lambda: p.Chop(5, 2, rmode=5)(jnp.asarray(X, jnp.float32), key=KEY))
    yield Call("pychop.Chop gradient", lambda: jax.grad(lambda x: p.ChopSTE(5, 2)(x).sum())(jnp.asarray(coarse("g", (8,)))))
    operands = (coarse("o", (4, 8)), coarse("p", (4, 8)))
    for name, make in {"Chop": lambda: p.Chop(5, 4), "Chopf": lambda: p.Chopf(4, 4), "FaultChop": lambda: p.FaultChop("q52")}.items():
        yield Call(f"pychop.{name} methods", lambda make=make: (
            make().quantize(x=operands[0], key=KEY), str(make().spec_for(dtype="float32")),
            make().compute(function=jchop.math.ldexp, operands=operands[:1], key=KEY, exponents=(np.full((4, 8), 2),)),
            make().compute(jchop.math.add, operands)))
    for prec, mode in itertools.product(("h", "b", "s", "q43", "q52"), ("nearest", "plus_inf", "stoc_prop", 4)):
        yield Call(f"pychop.FaultChop {prec} {mode}", lambda a=prec, m=mode: p.FaultChop(prec=a, rmode=m)(X))
    for case, given in {
        "flip": {"flip": True, "p": 0.25, "random_state": 3}, "explim": {"prec": "q52", "explim": 0}, "subnormal": {"subnormal": False},
        "customs": {"customs": p.Customs(emax=15, t=11)}, "bits": {"customs": p.Customs(exp_bits=4, sig_bits=3)}, "verbose": {"verbose": 1},
        "randfunc": {"rmode": 5, "randfunc": lambda n: np.arange(n) % 8 / 8},
    }.items():
        yield Call(f"pychop.FaultChop options {case}", lambda g=given: p.FaultChop(**g)(X))
    yield Call("pychop.Customs", lambda: [p.Customs(emax=15, t=11).params(), p.Customs(exp_bits=5, sig_bits=4).params()])
    for bits, mode in itertools.product(((4, 4), (2, 6)), (1, 2, 4, 5)):
        yield Call(f"pychop.Chopf {bits} {mode}", lambda b=bits, m=mode: p.Chopf(ibits=b[0], fbits=b[1], rmode=m, random_state=3)(X))
    for case, given in {"plain": {}, "symmetric": {"bits": 4, "symmetric": True}, "channels": {"per_channel": True, "axis": 1}, "names": {"num_bits": 6, "per_channel": True, "channel_dim": 1}}.items():

        def integers(given: Any = given) -> Any:
            make = p.Chopi(**given)
            found = [make(operands[0]), make.dequantize(codes=make.quantize(x=operands[0])), str(make.spec_for(x=operands[0]))]
            found.append(attempt(make.calibrate, operands[0] * 2))
            return [*found, make(operands[0])]

        yield Call(f"pychop.Chopi {case}", integers)
    for prec in (None, "h", "b", "q43", "d"):
        yield Call(f"pychop.float_params {prec}", lambda a=prec: str(p.float_params(prec=a)))
        yield Call(f"pychop.float_params {prec} binary", lambda a=prec: str(p.float_params(a, binary=True)))
    yield Call("pychop.backend", lambda: (p.get_backend(), p.backend(lib="numpy", verbose=1), p.get_backend(), p.backend("auto")))
    positive = np.abs(operands[0]) + 0.25
    inside = {"arcsin", "arccos", "arctanh"}
    for name in (n.rpartition(".")[2] for n in names() if n.startswith("compat.pychop.math_func.")):
        two = name in ("power", "add", "subtract", "multiply", "divide", "floor_divide", "mod", "dot", "matmul")
        args = (positive / 8 if name in inside else positive + (name == "arccosh"), *((positive.T if name in ("dot", "matmul") else positive,) if two else ()))
        yield Call(f"math_func.{name}", lambda n=name, a=args: getattr(jc.compat.pychop.math_func, n)(*a, p.Chop(5, 4)))
    yield Call("math_func.sum axis", lambda: jc.compat.pychop.math_func.sum(positive, chop=p.Chop(5, 2), axis=1))
    model = lambda: {"dense": {"kernel": jnp.asarray(coarse("k", (8, 4))), "bias": jnp.ones(4)}}
    for case, options in {"plain": {}, "options": {"eval_mode": False, "verbose": True}}.items():
        yield Call(f"pychop.post_quantization {case}", lambda o=options: jc.compat.pychop.ptq.post_quantization(model=model(), chop=p.Chop(5, 2), **o))


def others() -> Iterator[Call]:
    q, number = jc.compat.qtorch.quant, jc.compat.qtorch
    for rounding in ("nearest", "stochastic"):
        yield Call(f"qtorch.float_quantize {rounding}", lambda r=rounding: q.float_quantize(x=X, exp=5, man=2, rounding=r, key=KEY))
        for case, options in {"plain": {}, "options": {"clamp": False, "symmetric": True}, "symmetric": {"symmetric": True}}.items():
            yield Call(f"qtorch.fixed_point_quantize {rounding} {case}", lambda r=rounding, o=options: q.fixed_point_quantize(x=X, wl=6, fl=3, rounding=r, key=KEY, **o))
        for dim in (-1, 0):
            yield Call(f"qtorch.block_quantize {rounding} {dim}", lambda r=rounding, d=dim: q.block_quantize(x=coarse("b", (4, 8)), wl=5, dim=d, rounding=r, key=KEY))
        for name, make in {
            "FloatingPoint": lambda: number.FloatingPoint(exp=5, man=2), "FixedPoint": lambda: number.FixedPoint(wl=5, fl=2, symmetric=True),
            "FixedPoint unclamped": lambda: number.FixedPoint(wl=5, fl=2, clamp=False),
            "BlockFloatingPoint": lambda: number.BlockFloatingPoint(wl=5, dim=0),
        }.items():
            for clipped in (False, True):
                yield Call(f"qtorch.{name} {rounding} {clipped}", lambda make=make, r=rounding, c=clipped: str(make().spec(rounding=r, clipped=c)))
    i, x = jc.compat.piquant, coarse("piquant", (40,))
    for dtype in ("uint2", "uint4", "uint8", "int8"):
        yield Call(f"piquant.compute_quant_params {dtype}", lambda d=dtype: i.compute_quant_params(array=x, quant_dtype=d))
        for mode in ("NEAREST", "STOCHASTIC"):
            given = {"scale": 0.25, "zero_point": 2, "quant_dtype": dtype}

            def there(mode: str = mode, given: Any = given) -> Any:
                codes = i.quantize(array=x, **given, round_mode=getattr(i.RoundMode, mode), key=KEY)
                total = np.ones(40, np.float32)
                back = [i.dequantize(codes=codes, **given, shape=(40,)), i.dequantize(codes, "bfloat16", **given, shape=(40,))]
                return codes, back, i.dequantize(codes, **given, shape=(40,), reduce_op=i.ReduceOp.ADD, out=total), total

            yield Call(f"piquant.quantize {dtype} {mode}", there)


def calls() -> Iterator[Call]:
    yield from matlab()
    yield from pychop()
    yield from others()
