"""`jchop.math`: every function in a few arithmetics, every argument of the reductions, products, linear algebra."""

# Tables of calls, one a line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import jchop
from digests import Call
from digests.common import KEY, MODES, coarse, hard, jc, key_for, normal, several
from digests.face import names, parameters

EXACT = ("add", "subtract", "multiply", "divide", "sqrt", "fma")
SPECS = tuple(f"{text}:{mode}" for text, mode in zip(["bfloat16", "e5m10", "e4m3fn", "tf32", "e8m3"] * 3, MODES, strict=False))
SUMS = ("bfloat16", "e5m10:up", "e5m2:stochastic")


def elementwise() -> dict[str, int]:
    """The elementwise functions of `jchop.math` and their numbers of operands."""
    found = {}
    for name in names():
        if name.startswith("math.") and name.count(".") == 1:
            arguments = list(parameters(name))
            if arguments[-2:] == ["spec", "key"] and "condition" not in arguments and name[5:] not in OTHER:
                found[name[5:]] = len(arguments) - 2
    return found


OTHER = ("axpy", "interp", "cross", "dot", "inner", "outer", "vdot", "frexp", "modf", "ldexp", "clip")


def applied(name: str, operands: int, spec: str) -> Any:
    x = (hard("bfloat16", count=512), hard("e5m10", count=512), hard("float8_e4m3fn", count=512))[:operands]
    return getattr(jc.math, name)(*x, spec=spec, key=key_for(spec))


def product(order: str, pair: Any, fused: bool) -> Any:
    exact = fused or order.startswith(("aligned", "matrix_unit"))
    spec = jc.MatmulSpec(product=None if exact else pair[0], accumulate=pair[1], order=order, fused=fused)
    return jc.math.matmul(a=normal("a", (5, 37), scale=4), b=normal("b", (37, 6), scale=4), spec=spec, key=KEY)


def calls() -> Iterator[Call]:
    specs = itertools.cycle(SPECS)
    for name, operands in elementwise().items():
        for spec in [*(next(specs) for _ in range(8 if name in EXACT else 2)), "e6m6:stochastic"]:
            yield Call(f"math.{name} {spec}", lambda n=name, o=operands, s=spec: applied(n, o, s))
    x = normal("x", (3, 50))
    e5 = "e5m10"
    for name, spec in itertools.product(("sum", "mean", "prod", "var", "std", "cumsum", "cumprod", "norm", "max", "min",
                                         "argmax", "argmin", "logsumexp", "softmax"), SUMS):
        yield Call(f"math.{name} {spec}", lambda n=name, s=spec: getattr(jc.math, n)(x=x, spec=s, key=key_for(s)))
    mask = normal("where", (3, 50)) > 0
    axes = {"axis": {"axis": 1}, "keepdims": {"keepdims": True, "axis": 0}}
    where = {"where": {"where": mask, "axis": 1}}
    initial = {"initial": {"initial": 1.5, "axis": -1}}
    for name, more in {
        "sum": axes | where | initial, "prod": axes | where | initial, "max": axes | {"where": {"where": mask, "initial": -9.0}},
        "min": axes | {"where": {"where": mask, "initial": 9.0}}, "mean": axes | where, "var": axes | where | {"ddof": {"ddof": 1}},
        "std": axes | where | {"ddof": {"ddof": 1, "axis": 1}}, "cumsum": {"axis": {"axis": 1}}, "cumprod": {"axis": {"axis": 0}},
        "norm": axes | {"ord": {"ord": 1, "axis": 1}, "ord inf": {"ord": np.inf, "axis": 1}, "ord 2": {"ord": 2, "axis": 1}},
        "logsumexp": axes | where, "softmax": {"axis": {"axis": 0}} | where, "argmax": axes, "argmin": axes,
    }.items():
        yield from several(f"math.{name}", getattr(jc.math, name), x, e5, **more)
    for name, spec in itertools.product(("sum", "mean", "norm"), ("pairwise", "blocked(8)")):
        order = jchop.MatmulSpec(accumulate="e6m9", order=spec)
        yield Call(f"math.{name} {spec}", lambda n=name, o=order: getattr(jc.math, n)(x, o, axis=1))
    yield from others(x)
    orders = ("sequential", "blocked(8)", "pairwise", "matrix_unit(16)", "aligned(8,25)", "aligned_apart(8,24)",
              "aligned_halves(8,24)", "blocked_pairwise(8)")
    pairs = (("bfloat16", "e6m9"), ("e5m2", "e5m10:stochastic"), (None, "bfloat16:toward_zero"), ("e4m3:up", "e5m7:odd"),
             ("fixed4.4", "fixed8.4"), ("binary32", "binary32"))
    for i, (order, pair, fused) in enumerate(itertools.product(orders, pairs, (False, True))):
        if i % 3 != 1 and not (fused and order not in orders[:2] and pair[1] != "e6m9"):
            loose = order.startswith("matrix")
            yield Call(f"matmul {order} {pair[0]} {pair[1]} fused={fused}", lambda o=order, p=pair, f=fused: product(o, p, f), loose)
    a, b = coarse("a", (5, 32)), coarse("b", (32, 6))
    for operands in ("e4m3fn", "mxfp8_e4m3", "mxfp4", "bfloat16:stochastic"):
        how: dict[str, Any] = {"operands": operands, "accumulate": "e8m13"} | ({} if operands in ("e4m3fn", "bfloat16:stochastic") else {"order": "aligned(16,25)"})
        yield Call(f"matmul operands {operands}", lambda s=how, o=operands: jc.math.matmul(a, b, jchop.MatmulSpec(**s), key_for(o)))
    for unit, dtype in (("volta", "float16"), ("hopper", "float8_e4m3fn"), ("cdna3", "bfloat16"), ("ampere", "tf32"), ("blackwell", "mxfp4")):
        yield Call(f"matmul tensor_core {unit}", lambda u=unit, d=dtype: jc.math.matmul(a, b, jc.tensor_core(u, d)))
    yield from several("matmul", jc.math.matmul, a, b, "bfloat16", xla={"impl": "xla"}, pallas={"impl": "pallas"})
    yield Call("matmul trace", lambda: jc.math.matmul(a, b, jc.MatmulSpec(accumulate="e8m7", order="blocked(8)"), trace=True))
    yield Call("matmul promoted", lambda: jc.math.matmul(a, b, jc.MatmulSpec(accumulate="e8m13", order="aligned(8,25,promote_every=16)")))
    wide = normal("wide", (6, 7), np.float64), normal("wide b", (7, 5), np.float64)
    yield from several("matmul_double", jc.math.matmul_double, *wide, plain={}, tolerance={"tolerance": 1e-9})
    yield from linalg()


def others(x: np.ndarray) -> Iterator[Call]:
    m, v, w = jc.math, normal("v", (12,)), normal("w", (12,))
    three = normal("three", (4, 3)), normal("other", (4, 3))
    for spec in ("bfloat16", "e5m7:stochastic"):
        k = key_for(spec)
        for name, args, options in (
            ("axpy", (2.5, v, w), {}), ("axpy", (2.5, v, w), {"fused": True}), ("clip", (v, -0.3, 0.55), {}),
            ("cross", three, {}), ("dot", (v, w), {}), ("inner", (x[:, :12], v), {}), ("outer", (v[:3], w), {}),
            ("vdot", (v, w), {}), ("trace", (x[:, :3],), {}), ("trace", (x[:, :4],), {"offset": 1, "axis1": 1, "axis2": 0}),
            ("diff", (v,), {}), ("diff", (x,), {"n": 2, "axis": 0}), ("frexp", (v,), {}), ("modf", (v * 9,), {}),
            ("ldexp", (v, np.arange(12) - 6), {}), ("round", (v * 9,), {}), ("round", (v,), {"decimals": 1}),
            ("interp", (v, np.sort(w), v), {}), ("interp", (v * 3, np.sort(w), v), {"left": -9.0, "right": 9.0}),
            ("linspace", (0.1, 2.3), {}), ("linspace", (v[:2], w[:2]), {"num": 5, "endpoint": False, "axis": 1}),
            ("where", (v > 0, v, w), {}), ("tensordot", (x[:, :4], x[:, :4]), {}),
            ("tensordot", (x[:, :4], x.T[:4]), {"axes": 1}),
        ):
            case = " ".join([spec, *options])
            yield Call(f"math.{name} {case}", lambda n=name, a=args, o=options, s=spec, k=k: getattr(m, n)(*a, spec=s, key=k, **o))
    yield Call("math.cross axes", lambda: m.cross(three[0].T, three[1], "bfloat16", axisa=0, axisb=1, axisc=0))
    yield Call("math.cross axis", lambda: m.cross(three[0].T, three[1].T, "bfloat16", axis=0))
    image, kernel = normal("image", (2, 3, 5, 6)), normal("kernel", (4, 3, 3, 2))
    yield from several(
        "math.conv", m.conv, image, kernel, "e5m7", plain={}, stride={"stride": 2}, same={"padding": "SAME"},
        padding={"padding": ((1, 0), (0, 2))}, dilation={"dilation": (1, 2)}, key={"key": KEY},
    )
    for text, shapes in {"ij,jk->ik": ((3, 4), (4, 2)), "bij,bjk->bk": ((2, 3, 4), (2, 4, 2)), "i,i->": ((7,), (7,)), "ij->ji": ((3, 4),)}.items():
        operands = [normal(text + str(i), shape) for i, shape in enumerate(shapes)]
        yield Call(f"math.einsum {text}", lambda t=text, o=operands: m.einsum(t, *o, spec="bfloat16"))
        yield Call(f"math.einsum {text} stochastic", lambda t=text, o=operands: m.einsum(t, *o, spec="e5m7:stochastic", key=KEY))
    chain = [normal(f"chain{i}", s) for i, s in enumerate(((3, 4), (4, 5), (5, 2)))]
    yield Call("math.einsum optimize", lambda: m.einsum("ij,jk,kl->il", *chain, spec="bfloat16", optimize=True))
    z = (x[:1] + 1j * x[1:2]).astype(np.complex64)
    for name in ("abs", "angle", "conj", "imag", "real", "multiply"):
        operands = (z, z) if name in ("multiply", "add") else (z,)
        yield Call(f"math.{name} complex", lambda n=name, o=operands: getattr(m, n)(*o, "bfloat16"))


def linalg() -> Iterator[Call]:
    la, n = jc.math.linalg, 6
    a = coarse("spd", (n, n))
    a, b = a @ a.T + 8 * np.eye(n, dtype=np.float32), coarse("b", (n,))
    for spec in ("bfloat16", "e5m10:up", "e8m12:stochastic"):
        k = key_for(spec)
        for name in ("cholesky", "lu", "qr"):
            yield Call(f"linalg.{name} {spec}", lambda n=name, s=spec, k=k: getattr(la, n)(a=a, spec=s, key=k))
        yield Call(f"linalg.lu_solve {spec}", lambda s=spec, k=k: la.lu_solve(factors=la.lu(a, "tf32"), b=b, spec=s, key=k))
        yield Call(f"linalg.solve_triangular {spec}", lambda s=spec, k=k: la.solve_triangular(a=a, b=b, spec=s, key=k))
        yield Call(f"linalg.cg {spec}", lambda s=spec, k=k: la.cg(a=a, b=b, spec=s, key=k, maxiter=5))
        yield Call(f"linalg.gmres {spec}", lambda s=spec, k=k: la.gmres(a=a, b=b, spec=s, key=k, maxiter=1, restart=4))
    yield Call("linalg.solve_triangular options", lambda: la.solve_triangular(a, b, "bfloat16", lower=True, unit_diagonal=True))
    more = {"x0": np.ones(n, np.float32), "tol": 1e-2, "atol": 1e-3, "M": np.eye(n, dtype=np.float32) / 16}
    yield Call("linalg.cg options", lambda: la.cg(a, b, "tf32", maxiter=4, **more))
    yield Call("linalg.gmres options", lambda: la.gmres(a, b, "tf32", maxiter=2, restart=3, **more))
    with_ = {"factor": "bfloat16", "working": "binary32", "residual": "binary32"}
    yield Call("linalg.refine", lambda: la.refine(a=a, b=b, **with_))
    yield Call("linalg.refine options", lambda: la.refine(a, b, factor="e5m10:stochastic", working="tf32", residual="binary32",
                                                          key=KEY, method="gmres", steps=2, inner=4))
