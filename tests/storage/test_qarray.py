"""QArray as an array (parts, permutations, shapes) and as a pytree (transforms, donation, export, checkpoints)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import export

import jchop as jc
from jchop import QArray

further = Further()

GROUPS = "int4(group=8,scale=bfloat16)"
ROWS = "int8(channel=0)"
#: One of each kind of grouping, all for arrays of 4 x 6 x 16 elements.
TEXTS = [
    GROUPS,
    ROWS,
    "int3(channel=(0,2))",
    "int8(group=tensor)",
    "int4(group=(2,8),zero_point=integer)",
    "uint4(group=8,zero_point=float)",
    "nvfp4(group=8)",
    "int4(group=8,scale=int8(channel=0))",
    "e3m2fn",
]


def numbers(shape: tuple[int, ...] = (4, 6, 16)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


def decoded(q: QArray) -> np.ndarray:
    """What is stored, by NumPy alone: bits of a row in little-endian order, values of the format, scales repeated."""
    fmt, size = q.spec.scaled, 1 if q.length is None else q.length
    element = q.spec.format if fmt is None else fmt.element
    assert isinstance(element, jc.formats.ElementFormat)
    rows = np.unpackbits(np.asarray(q.qvalue).view(np.uint8), axis=-1, bitorder="little")
    bits = rows[..., : size * element.bits].reshape(*q.shape, element.bits)
    elements = element.decode((bits << np.arange(element.bits, dtype=np.uint8)).sum(-1, dtype=np.uint8))
    if fmt is None:
        return elements.astype(np.float32)
    if fmt.zero_point == "float":
        product = elements * repeated(q.scale, fmt, q.shape)
        return (product + repeated(q.zero_point, fmt, q.shape)).astype(np.float32)
    if q.zero_point is not None:
        elements = elements - repeated(q.zero_point, fmt, q.shape)
    if fmt.rule == "two_level":
        blocks = fmt.scale.decode(np.asarray(q.scale[0]))  # type: ignore[union-attr]
        product = (elements * repeated(blocks, fmt, q.shape)).astype(np.float32)
        return product * np.asarray(q.scale[1])
    scale = q.scale
    if isinstance(fmt.scale, jc.formats.ScaledFormat):
        shape = fmt.scale_shape(q.shape)
        scale = decoded(QArray(q.scale[0], q.scale[1], None, jc.Spec(fmt.scale), shape[-1], q.dtype))
    return (elements * repeated(scale, fmt, q.shape)).astype(np.float32)


def repeated(scale: Any, fmt: jc.formats.ScaledFormat, shape: tuple[int, ...]) -> np.ndarray:
    scale = np.asarray(scale).astype(np.float64)
    assert scale.shape == fmt.scale_shape(shape)
    for axis, (group, n) in enumerate(zip(fmt.group_shape(shape), shape, strict=True)):
        scale = np.repeat(scale, group, axis).take(range(n), axis)
    return scale


class Stored(dict[str, tuple[QArray, np.ndarray]]):
    """Each format compiles once, when it is asked for; NumPy's leaves make indexing cheap."""

    def __missing__(self, text: str) -> tuple[QArray, np.ndarray]:
        q = jc.quantize(np.asarray(numbers()), text)
        return self.setdefault(text, (q, decoded(q)))


@pytest.fixture(scope="module")
def stored() -> Stored:
    return Stored()


def same(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(got, wanted)


def agrees(q: QArray, wanted: np.ndarray) -> None:
    """It is an array of its own that stores `wanted`."""
    assert (q.shape, q.ndim, len(q)) == (wanted.shape, wanted.ndim, wanted.shape[0])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(q))
    same(decoded(q), wanted)


# -- as an array -----------------------------------------------------------------------------------------------------
@pytest.mark.in_turn(13)
@pytest.mark.parametrize("text", TEXTS)
def test_parts_along_axes_that_no_group_holds(stored: Stored, text: str) -> None:
    q, values = stored[text]
    tiles = "(2,8)" in text
    for index in (1, slice(1, 3), (slice(None, None, -2), Ellipsis), (-1, slice(None), slice(8, 16))):
        agrees(q[index], values[index])
    if not tiles:
        agrees(q[:, 2], values[:, 2])
        agrees(q[2, 1:5:2], values[2, 1:5:2])
    ids = np.array([3, 0, 3, -1])
    agrees(q[ids], values[ids])
    tokens = np.array([[3, 0, 3], [-1, 2, 1]])
    agrees(q[tokens], values[tokens])
    if not tiles:
        agrees(q[1:, tokens], values[1:, tokens])


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", TEXTS)
def test_dequantized_parts(stored: Stored, text: str) -> None:
    q, values = stored[text]
    same(jc.dequantize(q), values)
    if "(2,8)" not in text:
        same(jax.jit(lambda q, i: jc.dequantize(q[i]))(q, 2), values[2])


def test_parts_of_packed_rows() -> None:
    q = jc.quantize(np.asarray(numbers()), "int3(channel=0)")
    values = decoded(q)
    for index in (
        np.s_[..., 3:11],
        np.s_[..., 5],
        np.s_[1, 2, ::-3],
        np.s_[..., 16:],
        np.s_[..., np.eye(3, dtype=int)],
    ):
        same(decoded(q[index]), values[index])
    assert q[1, 2, 3].shape == () and float(jc.dequantize(q[1, 2, 3])) == values[1, 2, 3]
    with pytest.raises(TypeError, match="without axes"):
        len(q[1, 2, 3])


@further
@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    "text", ["int4(group=8)", "int8(group=8,scale=e8m0fnu)", "int4(group=(2,8),zero_point=integer)"]
)
def parts_with_a_last_group_that_is_shorter(text: str) -> None:
    q = jc.quantize(np.random.default_rng(6).standard_normal((3, 5, 21)).astype(np.float32), text)
    values = decoded(q)
    for index in (np.s_[..., 16:], np.s_[..., 8:21], np.s_[..., :16], np.s_[..., 8:16], np.s_[1, ..., 16:40]):
        agrees(q[index], values[index])
    for index in (np.s_[..., :20], np.s_[..., 17:], np.s_[..., 16:20]):
        with pytest.raises(ValueError, match="cuts groups of 8"):
            q[index]
    if "(2,8)" in text:
        agrees(q[:, 4:], values[:, 4:])
        agrees(q[:, 2:, 16:], values[:, 2:, 16:])
        with pytest.raises(ValueError, match="cuts groups of 2"):
            q[:, 3:]


def test_parts_that_cut_groups_or_do_not_exist(stored: Stored) -> None:
    q = stored[GROUPS][0]
    for error, said, index in (
        (ValueError, "cuts groups of 8", np.s_[..., 4:]),
        (ValueError, "cuts groups of 8", np.s_[..., 0]),
        (ValueError, "cuts groups of 8", np.s_[..., ::2]),
        (IndexError, "outside", 4),
        (IndexError, "4 indexes", (0, 0, 0, 0)),
        (IndexError, "one ellipsis", (..., ...)),
        (TypeError, "integer", 1.5),
        (TypeError, "integer", None),
        (TypeError, "integer", True),
        (TypeError, r"^index \w+ of a QArray must be an integer[^\n]*$", np.ones(64, bool)),
        (TypeError, "one array", (np.array([0]), 1)),
        (TypeError, "one array", (np.array([[0]]), np.array([[1]]))),
    ):
        with pytest.raises(error, match=said):
            q[index]


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("text", TEXTS)
def test_axes_in_another_order(stored: Stored, text: str) -> None:
    q, values = stored[text]
    agrees(q.T, values.T)
    agrees(q.transpose(1, 0, 2), values.transpose(1, 0, 2))
    agrees(q.transpose((2, 0, -2)), values.transpose(2, 0, 1))
    same(decoded(q.T.T), values)
    assert q.T.T.spec == q.spec and q.transpose(0, 1, 2) is q
    with pytest.raises(ValueError, match="each of the 3 axes"):
        q.transpose(0, 1, 1)
    with pytest.raises(ValueError, match="axes=3 must be an integer from -3 to 2"):
        q.transpose(0, 1, 3)


WHOLE: dict[str, list[tuple[int, ...]]] = {
    GROUPS: [(24, 16), (2, 2, 6, 16), (4, 6, 2, 8), (-1, 2, 8), (4, 1, 6, 16), (384,), (48, 8), (2, 192), (8, 48)],
    ROWS: [(4, 96), (2, 2, 6, 16), (4, 3, 2, 4, 4), (384,), (2, 192)],
    "int4(group=(2,8),zero_point=integer)": [(24, 16), (2, 12, 16), (4, 3, 2, 2, 8)],
    "uint4(group=8,zero_point=float)": [(384,), (16, 24), (2, 1, 192, 1)],
    "int3(channel=(0,2))": [(2, 2, 6, 16), (4, 2, 3, 16), (4, 6, 2, 8)],
    "int8(group=tensor)": [(384,), (6, 64), (2, 2, 2, 48)],
    "nvfp4(group=8)": [(24, 16), (4, 6, 2, 8), (384,), (16, 24)],
    "int4(group=8,scale=int8(channel=0))": [(2, 2, 6, 16), (384,), (2, 192)],
    "e3m2fn": [(384,), (3, 128), (4, 96)],
}
TORN: dict[str, list[tuple[int, ...]]] = {
    GROUPS: [(4, 6, 4, 4), (96, 4), (32, 12)],
    ROWS: [(6, 4, 16), (8, 48)],
    "int4(group=(2,8),zero_point=integer)": [(384,), (4, 2, 3, 16), (8, 3, 16)],
    "int4(group=8,scale=int8(channel=0))": [(24, 16)],
}


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", TEXTS)
def test_shapes_that_leave_groups_whole_and_that_tear_them(stored: Stored, text: str) -> None:
    q, values = stored[text]
    for shape in WHOLE[text]:
        agrees(q.reshape(shape), values.reshape(shape))
    for shape in TORN.get(text, []):
        with pytest.raises(ValueError, match="split groups"):
            q.reshape(*shape)
    for shape in ((5, 77), (-1, -1), (7, -1)):
        with pytest.raises(ValueError, match="384 elements"):
            q.reshape(shape)
    assert q.reshape(4, 6, 16) is q


@further
@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", ["int3(group=8)", "nf4(group=8,scale=int8(group=256))", "int4(group=8,sparse=2:4)"])
def rows_are_joined_and_split_between_groups(text: str) -> None:
    q = jc.quantize(np.asarray(numbers((4, 32))), text)
    values = np.asarray(jc.dequantize(q))
    for shape in ((128,), (2, 64), (16, 8), (2, 8, 8)):
        moved = q.reshape(shape)
        same(jc.dequantize(moved), values.reshape(shape))
        same(jc.dequantize(moved.reshape(4, 32)), values)
    for shape in ((32, 4), (4, 8, 4)):
        with pytest.raises(ValueError, match="would split groups of"):
            q.reshape(shape)


def test_axes_behind_groups_are_not_joined_to_them() -> None:
    q = jc.quantize(np.asarray(numbers((3, 8, 5))), "int4(group=4,axis=1)")
    values = np.asarray(jc.dequantize(q))
    same(jc.dequantize(q.reshape(24, 5)), values.reshape(24, 5))
    ragged = jc.quantize(np.asarray(numbers((3, 6))), "int4(group=4)")
    for array, shape in ((q, (3, 40)), (q, (120,)), (ragged, (18,))):
        with pytest.raises(ValueError, match="or leave them along several axes"):
            array.reshape(shape)


def test_functions_of_numpy_that_index_or_transpose(stored: Stored) -> None:
    q, values = stored[GROUPS]
    for function in (np.flip, np.transpose, lambda v: np.moveaxis(v, 0, 2), lambda v: np.concatenate([v, v], axis=-1)):
        found = function(q)
        assert isinstance(found, np.ndarray)
        same(found, function(values))
    same(np.flip(m=q, axis=0), values[::-1])
    same(jnp.flip(q), values[::-1, ::-1, ::-1])  # type: ignore[arg-type]
    shapes = jax.jit(lambda q: [jnp.zeros(np.shape(q)), jnp.zeros(np.size(q))])(q)
    assert [v.shape for v in shapes] == [(4, 6, 16), (384,)]


def test_equality_is_no_silent_bool(stored: Stored) -> None:
    q, values = stored[GROUPS]
    for other in (0, 0.5, True, [1.0]):
        for compare in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: b == a):
            with pytest.raises(TypeError, match=r"not supported between a QArray and .*; compare its numbers"):
                compare(q, other)
    same(q == jnp.float32(values[0, 0, 0]), values == values[0, 0, 0])  # type: ignore[arg-type]
    same(q != values, np.zeros_like(values, bool))  # type: ignore[arg-type]
    same(q == np.float32(0), values == 0)  # type: ignore[arg-type]
    assert q in [None, "text", q] and q != None and {q: 1}[q] == 1  # noqa: E711


def test_static_arguments_are_compared_by_identity(stored: Stored) -> None:
    q, other = stored[GROUPS][0], stored[ROWS][0]
    assert q == q and q != other and q != jax.tree.map(np.copy, q)
    traced = []
    once = jax.jit(lambda q: traced.append(q) or jnp.zeros(q.shape), static_argnums=0)
    for given in (q, other, q):
        once(given)
    assert traced == [q, other]


def test_repr(stored: Stored) -> None:
    small = jc.quantize(np.array([[1.0, -2.0]], np.float32), "int8(channel=0)")
    assert repr(small) == "QArray([[ 1.007874, -2.      ]], dtype=float32, spec='int8(channel=-2)')"
    q = jc.quantize(jnp.ones((40, 50)), "mxfp4")
    assert repr(q) == "QArray(shape=(40, 50), dtype=float32, spec='mxfp4')"
    jax.jit(lambda q: repr(q) and q.qvalue)(q)
    gradient = jax.grad(lambda q: jc.dequantize(q).sum(), allow_int=True)(small)
    assert "QArray int8(channel=-2) [1, 2]" in gradient._repr_html_()
    assert "scale=" in repr(gradient) and "spec='int8(channel=-2)'" in repr(gradient)
    with pytest.raises(ValueError, match="the QArray is a gradient, in which integer codes have none"):
        jc.dequantize(gradient)
    thin = jc.quantize(jnp.ones((1, 8)), "int4(group=4,sparse=2:4)")
    with pytest.raises(ValueError, match="the QArray is a gradient, in which integer codes have none"):
        jc.dequantize(jax.grad(lambda q: jc.dequantize(q).sum(), allow_int=True)(thin))
    assert "qvalue=(40, 25)" in repr(jax.tree.map(lambda leaf: leaf.shape, q))


# -- as a pytree -----------------------------------------------------------------------------------------------------
@further.first
def leaves_have_names(stored: Stored) -> None:
    q = stored["int4(group=(2,8),zero_point=integer)"][0]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".qvalue", ".scale", ".zero_point"]
    again = jax.tree.map(lambda leaf: leaf, q)
    assert isinstance(again, QArray) and jax.tree.structure(again) == jax.tree.structure(q)
    assert hash(jax.tree.structure(q)) == hash(jax.tree.structure(again))


@further
@pytest.mark.parametrize("text", ["int8(channel=-1)", "nvfp4"])
def vmap_puts_an_axis_in_front(text: str) -> None:
    x = numbers()
    q = jax.jit(jax.vmap(lambda x: jc.quantize(x, text)))(x)
    one = jc.quantize(x[1], text)
    values = np.asarray(jax.vmap(lambda x: jc.round_to_format(x, text))(x))
    same(jc.dequantize(q), values)
    jax.tree.map(same, q[1], one)
    assert jax.tree.structure(q[1]) == jax.tree.structure(one)
    same(jax.vmap(jc.dequantize)(q), values)
    same(jax.vmap(lambda q: jc.dequantize(q[2]))(q), values[:, 2])


@further
def vmapped_tensors_scales_do_not_mix() -> None:
    q = jax.vmap(lambda x: jc.quantize(x, "nvfp4"))(numbers())
    with pytest.raises(ValueError, match="cannot be moved"):
        q.transpose(1, 0, 2)
    values = np.asarray(jc.dequantize(q))
    same(jc.dequantize(q.transpose(0, 2, 1)), values.transpose(0, 2, 1))
    same(jc.dequantize(q.reshape(4, 2, 3, 16)), values.reshape(4, 2, 3, 16))


@pytest.mark.smoke
def test_scan_takes_a_layer_at_a_time() -> None:
    weights = jax.vmap(lambda w: jc.quantize(w, ROWS))(numbers((3, 8, 8)))
    x = numbers((8,))

    def layer(x: jax.Array, w: QArray) -> tuple[jax.Array, QArray]:
        assert w.shape == (8, 8)
        return jnp.tanh(jc.dequantize(w) @ x), w

    out, again = jax.lax.scan(layer, x, weights)
    for w in np.asarray(jc.dequantize(weights)):
        x = jnp.tanh(w @ x)
    np.testing.assert_allclose(out, x, rtol=1e-6)
    jax.tree.map(same, again, weights)


@further
@pytest.mark.parametrize(
    "text",
    [
        "int8(channel=(0,-1))",
        pytest.param("int3(channel=0)", marks=pytest.mark.slow),
        pytest.param("int4(channel=(0,1,-1))", marks=pytest.mark.slow),
        pytest.param("uint4(channel=(0,-1),zero_point=integer)", marks=pytest.mark.slow),
        pytest.param("uint4(channel=(0,-1),zero_point=float)", marks=pytest.mark.slow),
        pytest.param("int4(channel=(0,1,-1),scale=int8(channel=(0,-1)))", marks=pytest.mark.slow),
        pytest.param("int4(channel=(0,-1),scale=int8(group=8))", marks=pytest.mark.slow),
    ],
)
def scan_takes_an_axis_with_own_scales_away(text: str) -> None:
    """The spec names that axis, and a slice has it no more."""
    whole = jc.quantize(numbers((3, 4, 6, 16)), text)
    values = decoded(whole)

    @jax.jit
    def slices(q: QArray) -> Any:
        return jax.lax.scan(lambda i, q: (i, (jc.dequantize(q), q, q[1:3, 8:], q.transpose(1, 0, 2))), 0, q)[1]

    all_numbers, again, part, moved = slices(whole)
    same(all_numbers, values)
    same(jc.dequantize(part), values[:, 1:3, 8:])
    same(jc.dequantize(moved), values.swapaxes(1, 2))
    assert again.spec == whole.spec
    jax.tree.map(same, again, whole)
    one = jax.tree.map(lambda leaf: leaf[1], whole)
    same(jc.dequantize(one), values[1])
    same(jc.dequantize(jax.tree.map(lambda leaf: leaf[None], one)), values[1:2])
    assert one[1:].spec == whole[1, 1:].spec


def test_files_keep_an_array_whose_axis_was_taken_away(tmp_path: Path) -> None:
    whole = jc.quantize(numbers(), "int8(channel=(0,-1))")
    one = jax.tree.map(lambda leaf: leaf[1], whole)
    jc.save(tmp_path / "x.safetensors", {"whole": whole, "one": one})
    loaded = jc.load(tmp_path / "x.safetensors")
    jax.tree.map(same, loaded, {"whole": whole, "one": one})
    same(jc.dequantize(loaded["one"]), decoded(whole)[1])


def test_axes_that_never_were_are_refused() -> None:
    with pytest.raises(ValueError, match="names axis -4, which an array of 3 axes does not have"):
        jc.quantize(numbers(), "int8(channel=(-4,-1))")
    q = jc.quantize(numbers(), "int8(channel=(0,-1))")
    wrong = QArray(q.qvalue[0], q.scale[0, :, :1], None, q.spec, q.length, q.dtype)
    with pytest.raises(ValueError, match="does not fit an array of shape"):
        jc.dequantize(wrong)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("text", "batched"),
    [
        (ROWS, False),
        (GROUPS, True),
        pytest.param("nvfp4", False, marks=pytest.mark.slow),
        pytest.param("int4(group=8,scale=int8(channel=0))", True, marks=pytest.mark.slow),
    ],
)
def test_derivative_in_the_leaves_that_are_floats(text: str, batched: bool) -> None:
    x, weight = numbers((4, 16)), numbers((4, 16)) + 3
    q = jax.vmap(lambda x: jc.quantize(x, text))(x[None]) if batched else jc.quantize(x, text)
    got = jax.grad(lambda q: (jc.dequantize(q) * weight).sum(), allow_int=True)(q)
    assert got.qvalue.dtype == jax.dtypes.float0
    # x = e s, so that s d/ds of the sum is the sum over the elements that s scales, whatever the format.
    scale = q.scale[1] if isinstance(q.scale, tuple) else q.scale
    slope = got.scale[1] if isinstance(q.scale, tuple) else got.scale
    assert slope.shape == scale.shape and slope.dtype == scale.dtype
    total = np.asarray(slope, np.float64) * np.asarray(scale, np.float64)
    terms = np.asarray(jc.dequantize(q) * weight, np.float64).reshape(4, 16)
    wanted = {GROUPS: terms.reshape(4, 2, 8).sum(-1), "nvfp4": terms.sum()}.get(text, terms.sum(-1))
    np.testing.assert_allclose(total.ravel(), np.ravel(wanted), rtol=1e-2 if text == GROUPS else 1e-5)


def derivative_in_what_is_added() -> None:
    """x = s e + z: in z the sum of the weights, in s that of weights times elements."""
    x, weight = numbers((4, 16)), numbers((4, 16)) + 3
    q = jc.quantize(x, "uint4(group=8,zero_point=float)")
    got = jax.grad(lambda q: (jc.dequantize(q) * weight).sum(), allow_int=True)(q)
    np.testing.assert_allclose(got.zero_point, weight.reshape(4, 2, 8).sum(-1), rtol=1e-6)
    elements = q.codes.reshape(4, 2, 8)
    np.testing.assert_allclose(got.scale, (elements * np.asarray(weight).reshape(4, 2, 8)).sum(-1), rtol=1e-6)


def derivative_in_scales_that_are_added_to() -> None:
    """x = e (t c + z): in t the sum of e c times weights, in z that of e times weights."""
    x, weight = numbers((4, 16)), numbers((4, 16)) + 3
    q = jc.quantize(x, "nf4(group=8,scale=uint8(group=2,zero_point=float))")
    got = jax.grad(lambda q: (jc.dequantize(q) * weight).sum(), allow_int=True)(q)
    levels = q.spec.element.values()[q.codes].reshape(4, 2, 8)
    own = (levels * np.asarray(weight).reshape(4, 2, 8)).sum(-1)
    np.testing.assert_allclose(np.ravel(got.scale[2]), own.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(np.ravel(got.scale[1]), (own * np.asarray(q.scale[0])).sum(-1), rtol=1e-5, atol=1e-5)


@further
@pytest.mark.parametrize("check", [derivative_in_what_is_added, derivative_in_scales_that_are_added_to])
def derivative_in_zero_points(check: Any) -> None:
    check()


@further
def derivative_in_float_codes() -> None:
    q = jc.quantize(numbers((4, 16)), "float8_e4m3fn(channel=0)")

    def of_codes(codes: jax.Array) -> jax.Array:
        return jc.dequantize(QArray(codes, q.scale, None, q.spec, q.length, q.dtype))

    values, tangent = jax.jvp(of_codes, (q.qvalue,), (jnp.ones_like(q.qvalue),))
    same(values, jc.dequantize(q))
    same(tangent, jnp.broadcast_to(q.scale, (4, 16)))


def test_codes_pass_no_derivative() -> None:
    x = numbers((4, 16))
    slope = jax.jit(jax.grad(lambda x: jc.dequantize(jc.quantize(x, ROWS)).sum()))(x)
    same(slope, jnp.zeros_like(x))


def test_donated_leaves_are_used() -> None:
    q = jc.quantize(numbers(), GROUPS)
    wanted = np.asarray(jc.dequantize(q))
    moved = jax.jit(lambda q: jax.tree.map(lambda leaf: leaf + 0, q), donate_argnums=0)(q)
    assert q.qvalue.is_deleted() and q.scale.is_deleted()
    same(jc.dequantize(moved), wanted)


@further
def check_export() -> None:
    q = jc.quantize(numbers((4, 16)), "nvfp4")
    exported = export.export(jax.jit(jc.dequantize))(q)
    same(exported.call(q), jc.dequantize(q))
    assert exported.in_tree == jax.tree.structure(((q,), {}))
    pytest.importorskip("flatbuffers")
    again = export.deserialize(exported.serialize())
    same(again.call(q), jc.dequantize(q))


@further
def export_of_what_takes_and_returns_stored_arrays() -> None:
    pytest.importorskip("flatbuffers")
    q = jc.quantize(numbers((4, 16)), "uint4(group=8,zero_point=integer)")

    @jax.jit
    def part(q: QArray, by: jax.Array) -> dict[str, Any]:
        return {"part": q[1:3, 8:], "scaled": QArray(q.qvalue, q.scale * by, q.zero_point, q.spec, q.length, q.dtype)}

    again = export.deserialize(export.export(part)(q, jnp.float32(2)).serialize())
    got, wanted = again.call(q, jnp.float32(2)), part(q, jnp.float32(2))
    assert jax.tree.structure(got) == jax.tree.structure(wanted) and got["part"].shape == (2, 8)
    jax.tree.map(same, got, wanted)


@further
def checkpoints_of_orbax(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    texts = ("mxfp8_e4m3(group=8)", "nvfp4", "int4(group=8,zero_point=float,scale=bfloat16)")
    tree = {"layers": [jc.quantize(numbers((4, 16)), text) for text in texts], "step": jnp.int32(7)}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    jax.tree.map(same, restored, tree)


@further
def functions_of_numpy_take_the_numbers() -> None:
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    for spec in ("int4(group=32)", "e4m3"):
        q = jc.quantize(x, spec)
        numbers = np.asarray(jc.dequantize(q))
        for found in (np.asarray(q), np.array(q), x * 0 + q, np.asarray(q, np.float64)):
            np.testing.assert_array_equal(found, numbers)
        assert q.size == np.size(q) == jnp.size(q) == numbers.size
        assert np.asarray(q).dtype == np.float32 and np.asarray(q, np.float64).dtype == np.float64
        np.testing.assert_array_equal(x @ q.T, x @ numbers.T)
    with pytest.raises(ValueError, match="copy=False cannot be had"):
        np.array(q, copy=False)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(np.asarray)(q)


def test_a_spec_that_is_a_text_is_named() -> None:
    with pytest.raises(TypeError, match=r"^spec='int4' must be a Spec, under which the codes were made"):
        replace(jc.quantize(jnp.ones((2, 8)), "int8"), spec="int4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^spec='bfloat16' must be a Spec"):
        replace(jc.quantize(jnp.ones((2, 8)), "int8"), spec=jc.formats.bfloat16)  # type: ignore[arg-type]


def test_arithmetic_on_leaves_is_an_error_that_says_what_to_do() -> None:
    """An average of codes under an average of scales is no average of the numbers."""
    x, rule = jnp.arange(-32.0, 32).reshape(16, 4), jc.Rule(weight="int8(group=all)", product="codes")
    for spec in ("int8(group=all,axis=0)", "int4(group=4,axis=0)", "nf4(group=4,axis=0)", "int8"):
        q = jc.quantize(x, spec)
        mean = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, q, q)
        takes: list[Any] = [jc.dequantize, lambda q: jc.dot(x.T, q)]
        takes += [lambda q: jc.quantize_fn(lambda p, x: x @ p, rule)(q, x.T)] if "all" in spec else []
        for take in takes:
            with pytest.raises(ValueError, match=r"qvalue is float32, and the codes .* (uint8|int8): .*apply_updates"):
                take(mean)


test_further = further.test()
