"""`jc.emulate` on the programs that other people wrote: they run, give values of the format, and can be transformed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further

import jchop as jc
from programs import PROGRAMS, Program, equations, floats_of
from programs.numpy_interpreter import Carrier, Format, NotCovered, emulated
from programs.program import names

further = Further()

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore")]  # warnings of other packages

KEY = jax.random.key(11)
#: Every program runs in bfloat16, where another interpreter gives the bits, and in one of these.
SPECS = ("e5m10", "e5m10:stochastic", "e4m3:saturate")
#: Programs that the default run computes; the slow run computes all.
QUICK = ("jax.numpy.mean", "jax.lax.scan")
#: Arithmetic that is not finite where float32's is, and why.
POISONED = {
    "numpyro.Beta": "a test of a sum, 1 > 1 - 1e-6, fails where 1 - 1e-6 is 1",
    "numpyro.Dirichlet": "the same",
    "numpyro.LKJ": "the same",
}
#: Programs whose results come from Python; `emulate` leaves them as they are.
OF_PYTHON = ("jax.pure_callback",)
#: Programs that `emulate` refuses in a format, and its words.
REFUSED = {
    ("jax.numpy.bfloat16 inside", "e5m10"): "convert_element_type.*bfloat16, which cannot hold every result of .*cast x"
    " to .*float32"
}
#: Programs with a loop that never ends in a format, as its counter is rounded; they are stopped, which is a warning.
ENDLESS = {("jax.scipy.special.hyp2f1", "e4m3:saturate"): "16.0 < 240.0"}
slow = pytest.mark.slow
every = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else slow)
        for name in sorted(PROGRAMS, key=lambda x: x not in QUICK)
    ],
)


def one_of(choices: Sequence[str], name: str) -> str:
    """By a hash of the name: no line of jchop depends on which program meets which format."""
    return choices[zlib.crc32(name.encode()) % len(choices)]


def spec_of(name: str) -> str:
    return next((spec for known, spec in (*REFUSED, *ENDLESS) if known == name), one_of(SPECS, name))


def program(name: str) -> Program:
    found = PROGRAMS[name]
    if found.missing:
        pytest.skip(f"needs {', '.join(found.missing)}")
    return found


def check_values(name: str, got: Any, want: Any, spec: str) -> None:
    """The structure, shapes and dtypes of the function, and values of the format."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if hasattr(y, "dtype"):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for x in floats_of(got):
        if x.dtype.itemsize >= 4 and name not in OF_PYTHON:
            np.testing.assert_array_equal(jc.round_to_format(x, spec.split(":")[0]), x)


@every
def test_it_runs(name: str) -> None:
    """Compiled and as it is called."""
    fun, args = program(name).make()
    spec = spec_of(name)
    stopped = ENDLESS.get((name, spec))
    low: Callable[..., Any] = jc.emulate(fun, spec, key=KEY, max_turns=500 if stopped else None)
    want = jax.eval_shape(fun, *args)
    for call in (jax.jit(low), low):
        if refused := REFUSED.get((name, spec)):
            with pytest.raises(ValueError, match=refused):
                call(*args)
            continue
        with pytest.warns(RuntimeWarning, match=stopped) if stopped else nullcontext():
            got = jax.block_until_ready(call(*args))
            jax.effects_barrier()
        check_values(name, got, want, spec)


# -- transformations ---------------------------------------------------------------------------------------------------

Transformed = tuple[Callable[..., Any], Sequence[Any]]


def of_floats(found: Program) -> Transformed:
    """The function of its float arrays alone."""
    fun, args = found.make()
    leaves, tree = jax.tree.flatten(args)
    moved = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]

    def of_moved(*values: Any) -> Any:
        every = list(leaves)
        for i, value in zip(moved, values, strict=True):
            every[i] = value
        return fun(*jax.tree.unflatten(tree, every))

    return of_moved, [leaves[i] for i in moved]


def loss(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in floats_of(fun(*args)))


def hessian(fun: Callable[..., Any], forward: bool) -> Callable[..., Any]:
    return (jax.jacfwd if forward else jax.jacrev)(jax.jacrev(loss(fun)))


def transformed(found: Program, low: Callable[[Any], Any]) -> dict[str, Transformed]:
    """The function transformed after it is emulated, and before."""
    fun, args = of_floats(found)
    if not args:
        return {}
    pairs, every = [jnp.stack([x, x * 0.75]) for x in args], tuple(range(len(args)))
    out: dict[str, Transformed] = {}
    if found.batched:
        out["vmap(emulate)"] = jax.vmap(low(fun)), pairs
    if found.batched and not found.alone:
        out["emulate(vmap)"] = low(jax.vmap(fun)), pairs
    if found.smooth and found.backward:
        out["grad(emulate)"] = jax.grad(loss(low(fun)), every), args
        out["emulate(grad)"] = low(jax.grad(loss(fun), every)), args
    if found.smooth and found.forward:
        out["jvp(emulate)"] = (lambda *x: jax.jvp(low(fun), x, x)), args
        out["emulate(jvp)"] = low(lambda *x: jax.jvp(fun, x, x)), args
    if found.smooth and found.backward and found.twice:
        out["hessian"] = hessian(low(fun), found.forward), args
        out["emulate(hessian)"] = low(hessian(fun, found.forward)), args
    return out


@further.first
@every
def it_can_be_transformed(name: str) -> None:
    """Traced only: so every rule for a transformation is found. The shapes are those of the plain function."""
    found, spec = program(name), spec_of(name)
    for kind, (fun, args) in transformed(found, lambda f: jc.emulate(f, spec, key=KEY)).items():
        plain, _ = transformed(found, lambda f: f)[kind]
        want = jax.eval_shape(plain, *args)
        if refused := REFUSED.get((name, spec)):
            with pytest.raises(ValueError, match=refused):
                jax.eval_shape(fun, *args)
            continue
        got = jax.eval_shape(fun, *args)
        assert list(map(jnp.shape, jax.tree.leaves(got))) == list(map(jnp.shape, jax.tree.leaves(want))), kind


@further
@pytest.mark.parametrize("spec", ["bfloat16", pytest.param("binary32", marks=slow)])
def second_derivatives_through_loops(spec: str) -> None:
    """JAX takes a loop apart when it differentiates it by reverse mode; so it drops the rule of a `custom_jvp`."""

    def turn(c: Any, v: Any) -> Any:
        return c * jnp.sin(c * v)

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, v: (turn(c, v), None), x, jnp.arange(1.0, 4.0))[0]

    x = jnp.float32(0.5)
    want = float(jax.hessian(loop)(x))
    low, error = jc.emulate(loop, spec), {"binary32": 1e-5, "bfloat16": 0.01}[spec]
    orders = [jax.hessian(low), jax.jacrev(jax.jacrev(low)), jax.jacfwd(jax.jacfwd(low))]
    for number, found in enumerate(jax.jit(lambda x: [order(x) for order in orders])(x)):
        assert abs(float(found) - want) < error * want, number


# -- values ------------------------------------------------------------------------------------------------------------


def bits(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x


def differing(got: Any, want: Any) -> int:
    """The number of elements that differ."""
    pairs = zip(map(bits, jax.tree.leaves(got)), map(bits, jax.tree.leaves(want)), strict=True)
    return sum(int(np.sum(~np.isclose(np.asarray(x), np.asarray(y), 0, 0, equal_nan=True))) for x, y in pairs)


#: The numbers that may differ: gamma is one operation of jchop, and of the other interpreter many.
INEXACT: dict[str, int] = {"jax.scipy.special.gamma": 2}


@every
def test_another_interpreter_gives_the_same_bits(name: str) -> None:
    """In bfloat16, whose range is float32's, so that nothing becomes an infinity or a NaN."""
    fun, args = program(name).make()
    got, want = jax.jit(jc.emulate(fun, "bfloat16", key=KEY))(*args), jax.jit(fun)(*args)
    check_values(name, got, want, "bfloat16")
    if name not in POISONED:
        for x, y in zip(floats_of(got), floats_of(want), strict=True):
            assert not np.any(np.isfinite(y) & ~np.isfinite(np.asarray(x, np.float64)))
    try:
        want = emulated(fun, Format(8, 7), args)
    except NotCovered as why:
        pytest.skip(f"no line for {why}, so its bits are not compared")
    assert differing(got, want) <= INEXACT.get(name, 0)


#: Primitives whose last bits in the carrier's own format may be others than those of a program of XLA, and why.
OTHERWISE = {
    "div": "XLA multiplies by the inverse of a number that divides an array",
    "complex mul": "XLA joins its products with its sums",
    **dict.fromkeys(names("cholesky custom_linear_solve linear_solve lu qr triangular_solve"), "an algorithm of jchop"),
    **dict.fromkeys(
        names("conv_general_dilated cumsum dot_general reduce_sum reduce_window_sum scatter-add"),
        "the order of a sum depends on the operations beside it",
    ),
    **dict.fromkeys(
        names("""acosh asinh atanh bessel_i0e bessel_i1e cbrt cosh digamma erf erf_inv erfc exp expm1 igamma igammac
        lgamma log log1p logistic polygamma pow regularized_incomplete_beta sinh tan tanh zeta"""),
        "XLA computes it by several operations, and joins products and sums of them as their neighbours allow",
    ),
}
#: Formats and dtypes that are each other's, and the largest difference of results, relative to the largest of them.
OWN = {"binary32": (np.float32, 1e-4), "binary64": (np.float64, 1e-12)}


def avals_of(eqn: Any) -> list[Any]:
    """The types of its results that are arrays."""
    return [v.aval for v in eqn.outvars if hasattr(v.aval, "dtype")]


def is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def wide(x: Any) -> Any:
    """An argument in float64 if it is in float32."""
    return jnp.asarray(x, jnp.float64) if isinstance(x, jax.Array) and x.dtype == np.float32 else x


def in_own_format(name: str, spec: str) -> tuple[Callable[..., Any], Any, Any, list[Any]] | None:
    """A program, its arguments, its values and equations; None if JAX refuses it in that dtype, or it has another."""
    fun, args = program(name).make()
    args = jax.tree.map(wide, args) if spec == "binary64" else args
    try:
        want = jax.jit(fun)(*args)
    except (TypeError, ValueError):
        return None
    inside = list(equations(jax.make_jaxpr(fun)(*args)))
    floats = [aval.dtype for eqn in inside for aval in avals_of(eqn) if jnp.issubdtype(aval.dtype, jnp.floating)]
    return (fun, args, want, inside) if all(own == OWN[spec][0] for own in floats) else None


def check_own_format(name: str, spec: str) -> bool:
    """Whether the program runs in the dtype."""
    dtype, most = OWN[spec]
    with jax.enable_x64(spec == "binary64"):
        found = in_own_format(name, spec)
        if found is None:
            return False
        fun, args, want, inside = found
        got = jax.jit(jc.emulate(fun, spec, key=KEY))(*args)
        if differing(got, want) == 0:
            return True
        try:
            if differing(got, emulated(fun, Carrier(dtype), args)) == 0:
                return True
        except NotCovered:
            pass
    named = {eqn.primitive.name for eqn in inside}
    named |= {f"complex {eqn.primitive.name}" for eqn in inside if any(map(is_complex, avals_of(eqn)))}
    assert OTHERWISE.keys() & named
    for x, y in zip(floats_of(got), floats_of(want), strict=True):
        scale = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=most, atol=most * scale)
    return True


@every
def test_the_format_of_the_carrier_changes_nothing(name: str) -> None:
    """The bits are those of the compiled function, or of its operations one by one; others have a cause with a name."""
    first = one_of(list(OWN), name)
    if not any(check_own_format(name, spec) for spec in sorted(OWN, key=lambda spec: spec != first)):
        pytest.skip("it has dtypes of its own")


test_further = further.test()
