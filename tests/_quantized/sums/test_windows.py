"""Convolutions of codes against integers, place by place: forward and both backward products."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import lax

import jchop as jc
from jchop._quantized.products.code_products import ConvGeometry, _ConvSums, convolve_codes, correlate_codes
from jchop._quantized.products.codes import CodedArray

further = Further()

ROW = "int8(group=all)"
ZERO = "uint8(group=all,zero_point=integer)"
#: Padding, strides, gaps of the image, gaps of the kernel, groups.
GEOMETRIES = [
    (((1, 2),), (2,), (1,), (2,), 1),
    (((-1, 3),), (1,), (3,), (1,), 2),
    (((1, 1), (0, 2)), (1, 2), (1, 1), (1, 2), 3),
]


def pairs(how: ConvGeometry, space: tuple, places: tuple, windows: tuple) -> Any:
    """For each window and place of the kernel the place of the image, if there is one: the definition."""
    for window in itertools.product(*map(range, windows)):
        for place in itertools.product(*map(range, places)):
            found = []
            for q, p, step, gap, (low, _), wide, n in zip(
                window, place, how.strides, how.kernel_gaps, how.padding, how.image_gaps, space, strict=True
            ):
                at = q * step + p * gap - low
                found.append(at // wide if at % wide == 0 and 0 <= at // wide < n else None)
            if None not in found:
                yield window, place, tuple(found)


def coded(rng: Any, shape: tuple[int, ...], zeros: tuple[int, ...]) -> tuple[CodedArray, np.ndarray]:
    """Elements with zero points, one for each index of the axes `zeros`; and the integers that they stand for."""
    elements = rng.integers(-128, 127, shape, endpoint=True).astype(np.int8)
    own = tuple(n if axis in zeros else 1 for axis, n in enumerate(shape))
    zero = np.broadcast_to(rng.integers(-128, 127, own), shape).astype(np.int32)
    return CodedArray(jnp.asarray(elements), None, jnp.asarray(zero)), elements.astype(int) - zero


@pytest.mark.parametrize("given", GEOMETRIES)
@pytest.mark.in_turn(3)
def test_sums_are_those_of_integers(given: Any) -> None:
    """All three products, with zero points on both sides, outside of the image and in its gaps too."""
    padding, strides, image_gaps, kernel_gaps, groups = given
    how, rank = ConvGeometry(strides, padding, image_gaps, kernel_gaps), len(strides)
    rng = np.random.default_rng(rank)
    n, rows, inner, space, places = 2, 2, 3, (5, 4)[:rank], (3, 2)[:rank]
    windows, last = how.windows(space, places), rank + 1
    image, a = coded(rng, (n, *space, groups, inner), (0,))
    gradient, d = coded(rng, (n, *windows, groups, rows), (0,))
    kernel, b = coded(rng, (*places, groups, rows, inner), (rank, last))
    turned, c = coded(rng, (*places, groups, inner, rows), (last,))  # the kernel as dx takes it
    flat, e = coded(rng, (groups * inner, n, *space), (0,))  # x and the gradient as dw takes them
    up, f = coded(rng, (groups * rows, n, *windows), (0,))
    e, f = (np.moveaxis(v.reshape(groups, -1, *v.shape[1:]), (0, 1), (-2, -1)) for v in (e, f))
    y, dx, dw = (np.zeros(v.shape, int) for v in (d, a, b))
    for window, place, at in pairs(how, space, places, windows):
        y[(slice(None), *window)] += np.einsum("ngc,grc->ngr", a[(slice(None), *at)], b[place])
        dx[(slice(None), *at)] += np.einsum("ngr,gcr->ngc", d[(slice(None), *window)], c[place])
        dw[place] += np.einsum("ngr,ngc->grc", f[(slice(None), *window)], e[(slice(None), *at)])

    def products(*operands: CodedArray) -> Any:
        image, kernel, gradient, turned, up, flat = operands
        yield convolve_codes(image, kernel, how, jnp.float32)
        yield convolve_codes(gradient, turned, how.backward(space, places), jnp.float32)
        yield correlate_codes(up, flat, how, places, groups, jnp.float32)

    got = jax.jit(lambda *operands: list(products(*operands)))(image, kernel, gradient, turned, up, flat)
    for name, have, want in zip(("y", "dx", "dw"), got, (y, dx, dw), strict=True):
        np.testing.assert_array_equal(have, want.astype(np.float32), err_msg=name)


@further.first
def matrices_of_windows_are_the_same_sums() -> None:
    """As GPUs compute them; and images with more channels than one panel has."""
    rng, how = np.random.default_rng(0), ConvGeometry((1,), ((1, 0),), (1,), (1,))
    image, _ = coded(rng, (1, 4, 1, 700), (0,))
    kernel, _ = coded(rng, (2, 1, 2, 700), (1, 2))
    sums = _ConvSums(how, (2,))
    whole = sums.integers(image.elements, kernel.elements)
    rows = sums._as_matrices(image.elements.astype(jnp.int32), kernel.elements.astype(jnp.int32), jnp.int32)
    np.testing.assert_array_equal(whole, rows)


RULES: dict[str, dict[str, Any]] = {
    "int8": {"weight": ROW, "activation": ROW, "gradient": ROW},
    "asymmetric": {"weight": "int4(group=all,zero_point=integer)", "activation": ZERO},
    "channels": {"weight": "int4(group=8)", "activation": "int8(group=2)"},
    "weight only": {"weight": "int4(group=all)"},
    "fp8": {"weight": "e4m3fn(group=all)", "activation": "e4m3fn(group=all)", "gradient": "e5m2(group=all)"},
}


@further
@pytest.mark.in_turn(50)
@pytest.mark.parametrize("name", RULES)
def convolutions_train_and_serve_the_same_numbers(name: str) -> None:
    """Beside the product of floats, whose roundings are the same; the axes of images and kernels as they come."""

    def net(w: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=2)

    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((6, 2, 3, 2), (2, 4, 6, 7))))
    low, floats = (jc.quantize_fn(net, jc.Rule(**RULES[name], product=p)) for p in ("codes", "float"))

    def run(f: Any) -> Any:
        y, back = jax.vjp(f, w, x)
        return y, back(jnp.cos(y))

    (y, got), (near, want) = (jax.jit(lambda f=f: run(f))() for f in (low, floats))
    np.testing.assert_array_equal(jax.jit(low)(low.pack(w, x), x), y)
    np.testing.assert_allclose(y, near, rtol=1e-5, atol=1e-5)
    for have, ref in zip(got, want, strict=True):
        np.testing.assert_allclose(have, ref, rtol=1e-4, atol=1e-4)


def test_blocks_that_are_none_along_a_sum_are_refused() -> None:
    conv = lambda w, x: lax.conv(x, w, (1, 1), "SAME")  # noqa: E731
    w, x = jnp.ones((4, 6, 3, 3)), jnp.ones((1, 6, 5, 5))
    with pytest.raises(ValueError, match="scales of 4 numbers are no blocks along 6 channels of an image"):
        jc.quantize_fn(conv, jc.Rule(activation="int8(group=4)", product="codes"))(w, x)
    rule = jc.Rule(weight=ROW, activation="int8(group=2)", gradient=ROW, product="codes")
    with pytest.raises(ValueError, match=r"images and places that dw sums over; .* weight_gradient= without groups"):
        jax.grad(lambda w: jc.quantize_fn(conv, rule)(w, x).sum())(w)


test_further = further.test()
