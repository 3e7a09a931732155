"""einsum and its kin: the shapes of NumPy, the order of the sums, and that of the contractions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_math
import pytest
from further import Further
from math_draws import rounded_operand
from oracle_matmul import Arithmetic, How, Sum
from refusals import assert_refused

import jchop as jc
from jchop import MatmulSpec

further = Further()

KEY = jax.random.key(3)
PLAIN = MatmulSpec()
F32 = oracle.CARRIERS["float32"]


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(*shape: int, seed: int = 0, text: str = "e5m5") -> np.ndarray:
    return np.asarray(jc.round_to_format(normal(*shape, seed=seed), text))


HOWS = {
    "e5m5": (How(oracle.ieee(5, 5)),) * 2,
    "e5m5:up": (How(oracle.ieee(5, 5), "up"),) * 2,
    "operands=e5m5, product=e5m7:down, accumulate=e5m6": (How(oracle.ieee(5, 7), "down"), How(oracle.ieee(5, 6))),
}
SPECS: dict[str, Any] = {text: text for text in list(HOWS)[:2]} | {
    list(HOWS)[2]: MatmulSpec("e5m5", product="e5m7:down", accumulate="e5m6")
}


def in_order(a: np.ndarray, b: np.ndarray, text: str = "e5m5") -> np.float32:
    """The sum of products of rows that are rounded already, one after the other."""
    product, accumulate = HOWS[text]
    arithmetic = Arithmetic(product, accumulate, F32)
    total = Sum(oracle_math.values(a), oracle_math.values(b), arithmetic, lambda which, step: 0)
    return oracle_math.array([total.result()])[0]


EINSUMS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "ij,jk": ((2, 3), (3, 4)),
    "bij,bjk->kib": ((5, 2, 3), (5, 3, 4)),
    "ijk,klj->il": ((2, 3, 4), (4, 5, 3)),
    "ijk,lmk->jl": ((2, 3, 4), (5, 2, 4)),
    "i,j->ji": ((2,), (3,)),
    ",ij->ij": ((), (2, 3)),
    "iij,jk->ik": ((3, 3, 2), (2, 4)),
    "iji->j": ((3, 2, 3),),
    "ijk->kj": ((2, 3, 4),),
    "ij->": ((2, 3),),
    "ii": ((3, 3),),
}


@pytest.mark.smoke
def test_einsum_is_that_of_numpy() -> None:
    given = {text: [integers(*shape, seed=i) for i, shape in enumerate(shapes)] for text, shapes in EINSUMS.items()}
    found = jax.jit(lambda given: {text: jc.math.einsum(text, *own, spec=PLAIN) for text, own in given.items()})(given)
    for text, own in given.items():
        np.testing.assert_array_equal(found[text], np.einsum(text, *own), err_msg=text)


def test_the_order_of_an_einsum_is_that_of_its_indices() -> None:
    a, b = (np.asarray(jc.round_to_format(normal(*shape), "e5m5")) for shape in ((3, 4), (4, 3)))
    assert jc.math.einsum("ij,ji->", a, b, spec="e5m5") == in_order(a.ravel(), b.T.ravel())
    assert jc.math.einsum("ji,ij->", b, a, spec="e5m5") == in_order(b.ravel(), a.T.ravel())


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", HOWS)
def test_three_arrays_are_contracted_from_left_to_right(text: str) -> None:
    """Each pair as an einsum of its own, whose result is rounded to the operands again."""
    a, b, c = rounded(2, 3), rounded(3, 4, seed=1), rounded(4, 2, seed=2)
    first = np.array([[in_order(row, column, text) for column in b.T] for row in a])
    again = np.asarray(jc.round_to_format(first, "e5m5:up" if text.endswith("up") else "e5m5"))
    want = np.array([[in_order(row, column, text) for column in c.T] for row in again])
    np.testing.assert_array_equal(jc.math.einsum("ij,jk,kl->il", a, b, c, spec=SPECS[text]), want)


@further
def another_order_of_contractions_is_another_result() -> None:
    a, b, c = rounded(2, 3), rounded(3, 4, seed=1), rounded(4, 1, seed=2)
    right = jc.math.einsum("ij,jl->il", a, jc.math.einsum("jk,kl->jl", b, c, spec="e5m5"), spec="e5m5")
    left = jc.math.einsum("ij,jk,kl->il", a, b, c, spec="e5m5")
    assert np.any(left != right)
    for optimize in ([(1, 2), (0, 1)], ["einsum_path", (1, 2), (0, 1)]):
        np.testing.assert_array_equal(jc.math.einsum("ij,jk,kl->il", a, b, c, spec="e5m5", optimize=optimize), right)
    # The path of JAX begins with the pair of fewer operations.
    a, c = np.tile(a, (20, 1)), c
    np.testing.assert_array_equal(
        jc.math.einsum("ij,jk,kl->il", a, b, c, spec="e5m5", optimize="optimal"), np.tile(right, (20, 1))
    )


MANY = {
    "i,j,k->kij": ((2,), (3,), (4,)),
    "ij,jk,kl,lm->im": ((2, 3), (3, 4), (4, 2), (2, 3)),
    "bi,bj,ij->b": ((4, 2), (4, 3), (2, 3)),
    "ii,ij,jjk,->k": ((2, 2), (2, 3), (3, 3, 2), ()),
    "ab,ab,ab": ((2, 3),) * 3,
}


@further.first
@pytest.mark.parametrize("subscripts", MANY)
def many_arrays_give_what_numpy_gives(subscripts: str) -> None:
    operands = [integers(*shape, seed=i) for i, shape in enumerate(MANY[subscripts])]
    for optimize in (False, True, "greedy"):
        got = jc.math.einsum(subscripts, *operands, spec=PLAIN, optimize=optimize)
        np.testing.assert_array_equal(got, np.einsum(subscripts, *operands), err_msg=str(optimize))


@further
def each_contraction_draws_words_of_its_own() -> None:
    """The first product is rounded as an operand of the second one, with other words than the first operand."""
    one, many = np.ones((1, 1), np.float32), np.full((400, 1), 1.0625, np.float32)
    spec = MatmulSpec("e5m3:stochastic")  # operands alone draw: sums in the carrier are compiled fast
    first = rounded_operand(many, "e5m3:stochastic", KEY, 0)
    got = jc.math.einsum("ij,jk,kl->il", many, one * 1.5, one, spec=spec, key=KEY)
    assert set(np.unique(first)) == {1, 1.125}
    np.testing.assert_array_equal(got[first == 1], 1.5)
    assert set(np.unique(got[first != 1])) == {1.625, 1.75}


def test_an_element_that_is_repeated_is_rounded_once() -> None:
    """Its random word is its own, not that of a copy: k stands in the second array alone."""
    got = jc.math.einsum(
        "i,ik->ki", normal(3), np.ones((3, 50), np.float32), spec=MatmulSpec("e4m2:stochastic"), key=KEY
    )
    assert (got == got[0]).all()


# -- the others --------------------------------------------------------------------------------------------------------

TENSORDOTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "two": ((2, 3, 4), (3, 4, 5), 2),
    "none": ((2,), (3, 2), 0),
    "pair": ((2, 3, 4), (5, 2), (0, 1)),
    "sequences": ((2, 3, 4), (4, 5, 2), ((0, -1), (2, 0))),
    "all": ((2, 3), (2, 3), 2),
}


@further
def tensordot_is_that_of_numpy() -> None:
    pairs = {name: (integers(*left), integers(*right, seed=1)) for name, (left, right, _) in TENSORDOTS.items()}

    def products(pairs: Any) -> Any:
        return {name: jc.math.tensordot(a, b, PLAIN, axes=TENSORDOTS[name][2]) for name, (a, b) in pairs.items()}

    for name, got in jax.jit(products)(pairs).items():
        np.testing.assert_array_equal(got, np.tensordot(*pairs[name], TENSORDOTS[name][2]), err_msg=name)


@further
def inner_is_that_of_numpy() -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((3,), (3,)), ((2, 3), (4, 3)), ((), (2, 3)), ((2,), ()), ((2, 0), (0,))
    ]  # fmt: skip
    pairs = [(integers(*left), integers(*right, seed=1)) for left, right in shapes]
    found = jax.jit(lambda pairs: [jc.math.inner(a, b, PLAIN) for a, b in pairs])(pairs)
    for got, (a, b) in zip(found, pairs, strict=True):
        np.testing.assert_array_equal(got, np.inner(a, b), err_msg=f"{a.shape} {b.shape}")


@further
def every_operation_is_rounded_in_the_order_of_the_first_array() -> None:
    a, b = rounded(4, 5), rounded(5, 4, seed=1)
    text = list(HOWS)[2]
    assert jc.math.tensordot(a, b, SPECS[text], axes=((1, 0), (0, 1))) == in_order(a.ravel(), b.T.ravel(), text)
    assert jc.math.tensordot(b, a, SPECS[text], axes=((1, 0), (0, 1))) == in_order(b.ravel(), a.T.ravel(), text)
    assert jc.math.inner(a[0], b[:, 0], SPECS[text]) == in_order(a[0], b[:, 0], text)
    assert jc.math.vdot(a, b, SPECS[text]) == in_order(a.ravel(), b.ravel(), text)
    assert jc.math.vdot(a, b, "e5m5") != np.vdot(a, b)
    ones = np.ones(4, np.float32)
    assert jc.math.trace(a, "e5m5") == in_order(np.diagonal(a).copy(), ones)
    first, second = (jc.math.add(a[i, i], a[i + 1, i + 1], "e5m5") for i in (0, 2))
    spec = MatmulSpec("e5m5", accumulate="e5m5", order="pairwise")
    assert jc.math.trace(a, spec) == jc.math.add(first, second, "e5m5")


@further
def traces_have_the_axes_of_numpy() -> None:
    x = integers(3, 4, 5)
    many: list[dict[str, Any]] = [
        {},
        {"offset": 1},
        {"offset": -2, "axis1": 2, "axis2": 0},
        {"axis1": -1},
        {"offset": 9},
    ]
    traces = jax.jit(lambda x: [jc.math.trace(x, PLAIN, **more) for more in many])(x)
    for got, more in zip(traces, many, strict=True):
        np.testing.assert_array_equal(got, np.trace(x, **more), err_msg=str(more))


@further
def outer_rounds_each_product_once() -> None:
    a, b = normal(2, 3), normal(4, seed=1)
    want = jc.math.multiply(a.reshape(6, 1), b, "e5m4:up")
    np.testing.assert_array_equal(jc.math.outer(a, b, "e5m4:up"), want)
    drawn = jc.math.outer(np.full(3, 1.1, np.float32), np.ones(50, np.float32), "e4m1:stochastic", KEY)
    assert (drawn == drawn[:, :1]).all()  # an operand is rounded once
    assert jc.math.outer(2, [1, 2], "e5m2").tolist() == [[2, 4]]


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "outer": (lambda x, *spec: jc.math.outer(x[0], x[1], *spec), lambda x: jnp.outer(x[0], x[1])),
    "einsum": (
        lambda x, *spec: jc.math.einsum("ij,kj,kl->l", x, x, x, spec=spec[0], key=(*spec, None)[1]),
        lambda x: jnp.einsum("ij,kj,kl->l", x, x, x),
    ),
    "tensordot": (lambda x, *spec: jc.math.tensordot(x, x, *spec, axes=((0,), (0,))), lambda x: x.T @ x),
    "vdot": (lambda x, *spec: jc.math.vdot(x, x, *spec), lambda x: (x * x).sum()),
    "trace": (lambda x, *spec: jc.math.trace(x, *spec, offset=1), lambda x: jnp.trace(x, offset=1)),
}


@further
@pytest.mark.parametrize("name", FUNCTIONS)
def transforms_and_derivatives(name: str) -> None:
    function, exact = FUNCTIONS[name]
    x, keys, text = jnp.asarray(normal(3, 2, 3)), jax.random.split(KEY, 3), "e5m4:stochastic"
    each = jax.jit(jax.vmap(lambda x, key: function(x, text, key)))(x, keys)
    np.testing.assert_array_equal(each[1], function(x[1], text, keys[1]))
    slope = jax.grad(lambda x: function(x, "e6m11").sum())(x[0])
    own = jc.round_to_format(x[0], "e6m11")
    np.testing.assert_allclose(slope, jax.grad(lambda x: exact(x).sum())(own), rtol=5e-3, atol=5e-3)


untyped: Any = jc.math
A = np.ones((2, 3), np.float32)


def three(*path: tuple[int, ...]) -> Any:
    return jc.math.einsum("ij,ij,ij->", A, A, A, spec="e5m2", optimize=path)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "text": (lambda: untyped.einsum(3, A, spec="e5m2"), TypeError, "subscripts=3 must be text"),
    "ellipsis": (lambda: untyped.einsum("...i", A, spec="e5m2"), ValueError, "no ellipsis"),
    "arrays": (lambda: untyped.einsum("ij,ij->", A, spec="e5m2"), ValueError, "it names 2 arrays, and 1 are given"),
    "index twice": (lambda: untyped.einsum("ij->ii", A, spec="e5m2"), ValueError, "the result has an index twice"),
    "unknown index": (lambda: untyped.einsum("ij->k", A, spec="e5m2"), ValueError, "that no array has"),
    "axes": (lambda: untyped.einsum("ijk->k", A, spec="e5m2"), ValueError, r"does not fit an array of shape \(2, 3\)"),
    "lengths": (lambda: untyped.einsum("ii->i", A, spec="e5m2"), ValueError, "index 'i' has the lengths 2, 3"),
    "short path": (lambda: three((0, 1)), ValueError, "leaves 2 arrays; 2 pairs are needed"),
    "path": (lambda: three((0, 1, 2)), ValueError, r"\(0, 1, 2\) is not a pair of the 3 arrays"),
    "same place": (lambda: three((1, 1), (0, 1)), ValueError, r"\(1, 1\) is not a pair"),
    "place": (lambda: three((0, 3), (0, 1)), ValueError, "optimize=3 must be"),
    "count of axes": (lambda: untyped.tensordot(A, A, "e5m2", axes=3), ValueError, "axes=3 must be an integer"),
    "axes of one": (lambda: untyped.tensordot(A, A, "e5m2", axes=((0,), (0, 1))), ValueError, "of as many axes"),
    "one axis twice": (lambda: untyped.tensordot(A, A, "e5m2", axes=((0, 0), (0, 1))), ValueError, "of as many axes"),
    "length of axes": (lambda: untyped.tensordot(A, A, "e5m2", axes=1), ValueError, "axis 1 of a has length 3"),
    "inner": (lambda: untyped.inner(A, A.T, "e5m2"), ValueError, "axis 1 of a has length 3, axis 1 of b 2"),
    "vdot": (lambda: untyped.vdot(A, A[0], "e5m2"), ValueError, "must have as many elements"),
    "trace": (lambda: untyped.trace(A, "e5m2", axis2=-2), ValueError, "axis1=0 and axis2=-2 are the same axis"),
    "trace of a vector": (lambda: untyped.trace(A[0], "e5m2"), ValueError, "axis2=1 must be"),
    "key": (lambda: untyped.outer(A, A, "e5m2:stochastic"), ValueError, "key=None"),
}  # fmt: skip


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    assert_refused(REFUSED)


test_further = further.test()
