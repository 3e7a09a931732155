"""round_to_format under jit, vmap, control flow, remat and export: always the bits of the plain call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import Further
from jax import export, lax

import jchop as jc

further = Further()

KEY = jax.random.key(11)
OTHER = jax.random.key(12)
SHAPES = {"0-d": (), "empty": (0, 3), "odd": (17,), "3-d": (3, 5, 257)}

#: Formats, modes and gradient rules; carrier; shape. Each transform takes the whole table or some rows of it.
CASES: dict[str, tuple[str, Any, tuple[int, ...]]] = {
    "e4m3fn saturating, 0-d": ("e4m3fn:saturate", np.float32, SHAPES["0-d"]),
    "e5m2 up, clipped": ("e5m2:up:gradient=clipped", np.float16, SHAPES["odd"]),
    "fnuz odd, empty": ("e4m3fnuz:odd", cases.DTYPES["bfloat16"], SHAPES["empty"]),
    "e8m0 away": ("e8m0fnu:nearest_away", cases.DTYPES["bfloat16"], SHAPES["odd"]),
    "fixed wrapping, cotangent rounded": ("fixed4.4:wrap:gradient=[e4m3]", np.float32, SHAPES["3-d"]),
    "uinteger4": ("uinteger4:toward_zero:gradient=clipped", np.float32, SHAPES["odd"]),
    "codebook": ("codebook(-1,-0.25,0,0.5,1)", np.float32, SHAPES["odd"]),
    "bfloat16 stochastic, 3-d": ("bfloat16:stochastic", np.float32, SHAPES["3-d"]),
    "e4m3 stochastic on float16": ("e4m3:stochastic:flush", np.float16, SHAPES["odd"]),
    "int8 few bits": ("integer8:stochastic_b:random_bits=5", np.float32, SHAPES["odd"]),
    "codebook by halves": ("codebook(-1,-0.25,0,0.5,1):stochastic_equal", np.float32, SHAPES["odd"]),
    "p3109, stochastic cotangent": (
        "binary8p3se:stochastic_c:random_bits=3:gradient=clipped+[e5m2:stochastic]", np.float32, SHAPES["odd"],
    ),
    "stochastic, empty": ("e5m2:stochastic", np.float32, SHAPES["empty"]),
    "complex": ("e5m2:stochastic", np.complex64, SHAPES["odd"]),
}  # fmt: skip
STOCHASTIC = {name: row for name, row in CASES.items() if "stochastic" in row[0]}


def numbers(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values of many magnitudes, both signs; most lie between two values of a small format."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 6, shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return np.asarray(x).astype(dtype)


def rounded(x: Any, spec: str | jc.Spec, key: jax.Array = KEY, **more: Any) -> jax.Array:
    """With a key for the cotangent too, whether or not the spec draws; jit keeps what is drawn in one program."""
    return jc.round_to_format(x, spec, key, gradient_key=OTHER, **more)


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert got.tobytes() == expected.tobytes(), f"{int((got != expected).sum())} of {got.size} differ"


# --- jit ----------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("case", CASES)
def test_jit_equals_eager_and_keeps_one_entry_for_equal_specs(case):
    text, dtype, shape = CASES[case]
    x = jnp.asarray(numbers(dtype, shape))
    jitted = jax.jit(lambda x, spec: rounded(x, spec), static_argnames="spec")
    eager = rounded(x, text)
    assert isinstance(eager, jax.Array) and eager.dtype == dtype and eager.shape == shape
    for _ in range(2):
        spec = jc.Spec(*vars(jc.Spec(text)).values())
        same(jitted(x, spec=spec), eager)
    assert jitted._cache_size() == 1  # type: ignore[attr-defined]


def test_names_of_formats_make_no_second_entry():
    jitted = jax.jit(lambda x, spec: rounded(x, spec), static_argnames="spec")
    for fmt in (
        jc.formats.binary16,
        jc.formats.FloatFormat(5, 10),
        jc.formats.FloatFormat(5, 10).named("mine"),
        jc.Spec("half").format,
    ):
        jitted(jnp.ones(3), spec=jc.Spec(fmt))
    assert jitted._cache_size() == 1  # type: ignore[attr-defined]
    jitted(jnp.ones(3), spec=jc.Spec(jc.formats.binary16, "up"))
    assert jitted._cache_size() == 2  # type: ignore[attr-defined]


def traced_offsets_make_one_entry():
    x = jnp.asarray(numbers(np.float32, (24,)))
    chunk = jax.jit(lambda part, offset: rounded(part, "e5m2:stochastic", offset=offset))
    same(jnp.concatenate([chunk(x[i : i + 8], i) for i in range(0, 24, 8)]), rounded(x, "e5m2:stochastic"))
    assert chunk._cache_size() == 1  # type: ignore[attr-defined]


def weak_types():
    """A Python number under jit is a weak float32; its bits are those of a strong one."""
    for spec in ("e4m3fn:up", "e4m3fn:stochastic"):
        got = jax.jit(partial(rounded, spec=spec))(0.3)
        same(got, rounded(jnp.float32(0.3), spec))
        assert isinstance(got, jax.Array)


def donated_buffers_are_used():
    x = jnp.asarray(numbers(np.float32, (1000,)))
    expected = np.asarray(rounded(x, "e4m3:stochastic"))
    donating = jax.jit(partial(rounded, spec="e4m3:stochastic"), donate_argnums=0)
    assert "input_output_alias={" in str(donating.lower(x).compile().as_text())
    same(donating(x), expected)
    assert x.is_deleted()


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("check", [weak_types, donated_buffers_are_used], ids=lambda check: check.__name__)
def test_jit_of_another_kind(check: Callable[[], None]) -> None:
    check()


def test_pytrees():
    tree = {"w": jnp.asarray(numbers(np.float32, (5, 3))), "b": (jnp.ones((), jnp.bfloat16), numbers(np.float16, (4,)))}
    out = jax.tree.map(partial(jc.round_to_format, spec="e4m3"), tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for got, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        same(got, jc.round_to_format(np.asarray(leaf), "e4m3"))
    assert type(out["b"][1]) is np.ndarray


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["e5m2", "e5m2:stochastic"])
def test_numpy_values_inside_a_trace_stay_constants(text):
    x = numbers(np.float64, (6,))
    seen = []

    @jax.jit
    def traced(y: jax.Array) -> jax.Array:
        seen.append(jc.round_to_format(x, text, KEY))
        return y + seen[0].astype(np.float32)

    traced(jnp.ones(6))
    assert type(seen[0]) is np.ndarray and seen[0].dtype == np.float64
    same(seen[0], jc.round_to_format(x, text, KEY))


# --- 64-bit mode --------------------------------------------------------------------------------------------------


@further
@pytest.mark.in_turn(6)
@pytest.mark.parametrize("text", ["e4m3:odd", "e5m2:stochastic", "integer8:stochastic_b:random_bits=5"])
def the_x64_flag_changes_no_bit(text):
    x, wide = numbers(np.float32, (33,)), numbers(np.float64, (33,))
    results = []
    for flag in (False, True):
        with jax.enable_x64(flag):
            key = jax.random.key(11)
            jitted = jax.jit(lambda x, offset, key=key: jc.round_to_format(x, text, key, offset=offset))
            narrow = jc.round_to_format(jnp.asarray(x), text, key, offset=9)
            same(jitted(jnp.asarray(x), 9), narrow)
            results.append((narrow, jc.round_to_format(x, text, key, offset=9), jc.round_to_format(wide, text, key)))
    (narrow, numpy, double), (narrow64, numpy64, double64) = results
    same(narrow, narrow64)
    same(numpy, narrow)
    same(numpy64, narrow)
    same(double, double64)
    assert double.dtype == np.float64


@further.first
def jax_float64_equals_numpy():
    wide = numbers(np.float64, (33,))
    for text in ("e4m3", "e4m3:stochastic"):
        with jax.enable_x64(True):
            got = jc.round_to_format(jnp.asarray(wide), text, KEY)
            assert got.dtype == jnp.float64
        same(got, jc.round_to_format(wide, text, KEY))
        # An array made under the flag can be rounded after it is off.
        with jax.enable_x64(True):
            kept = jnp.asarray(wide)
        same(jc.round_to_format(kept, text, KEY), got)


# --- vmap ---------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("case", CASES)
def test_vmap_equals_the_loop(case):
    """With one key shared the draws are the loop's, and so they are over split keys, where equal rows then differ."""
    text, dtype, shape = CASES[case]
    one = numbers(dtype, shape)
    x, keys = jnp.asarray(np.stack([one] * 3)), jax.random.split(KEY, 3)
    same(jax.vmap(lambda x: rounded(x, text))(x), jnp.stack([rounded(row, text) for row in x]))
    split = jax.vmap(lambda x, key: rounded(x, text, key))(x, keys)
    same(split, jnp.stack([rounded(row, text, key) for row, key in zip(x, keys, strict=True)]))
    if case in STOCHASTIC and one.size:
        rows = {np.asarray(row).tobytes() for row in split}
        assert len(rows) == 3, "rows of equal values must get draws of their own"


def vmap_over_other_axes():
    x = jnp.asarray(numbers(np.float32, (4, 3, 5)))
    got = jax.vmap(lambda x: rounded(x, "e5m2:stochastic"), in_axes=1, out_axes=2)(x)
    same(got, jnp.stack([rounded(x[:, k], "e5m2:stochastic") for k in range(3)], axis=2))


def vmap_over_keys_alone():
    x, keys = jnp.asarray(numbers(np.float32, (257,))), jax.random.split(KEY, 3)
    got = jax.vmap(lambda key: rounded(x, "e5m2:stochastic", key))(keys)
    same(got, jnp.stack([rounded(x, "e5m2:stochastic", key) for key in keys]))


def nested_vmap():
    x, keys = jnp.asarray(numbers(np.float32, (2, 3, 17))), jax.random.split(KEY, 6).reshape(2, 3)
    call = partial(rounded, spec="e4m3fn:stochastic")
    got = jax.vmap(jax.vmap(lambda x, key: call(x, key=key)))(x, keys)
    same(got, jnp.stack([jnp.stack([call(x[i, j], key=keys[i, j]) for j in range(3)]) for i in range(2)]))
    mixed = jax.vmap(jax.vmap(lambda x, key: call(x, key=key), in_axes=(0, None)), in_axes=(0, 0))(x, keys[:, 0])
    same(mixed, jnp.stack([jnp.stack([call(x[i, j], key=keys[i, 0]) for j in range(3)]) for i in range(2)]))


@pytest.mark.in_turn(1000)
@pytest.mark.smoke
@pytest.mark.parametrize(
    "check", [nested_vmap, vmap_over_other_axes, vmap_over_keys_alone], ids=lambda check: check.__name__
)
def test_vmap_of_another_kind(check: Callable[[], None]) -> None:
    check()


def vmap_over_offsets():
    """Rows of one array, each told where it lies, get the draws of the whole: by flat index and by tile."""
    x = jnp.asarray(numbers(np.float32, (6, 35)))
    whole = rounded(x, "bfloat16:stochastic")
    flat = jax.vmap(lambda row, start: rounded(row, "bfloat16:stochastic", offset=start))
    same(flat(x, 35 * jnp.arange(6)), whole)
    tile = jax.vmap(lambda row, start: rounded(row[None], "bfloat16:stochastic", offset=((start, 0), (6, 35)))[0])
    same(tile(x, jnp.arange(6)), whole)


def offsets_give_the_draws_of_the_whole():
    x = jnp.asarray(numbers(np.float32, (6, 35)))
    whole = rounded(x, "e4m3:stochastic")
    same(rounded(x[2:4], "e4m3:stochastic", offset=70), whole[2:4])
    same(rounded(x[1:4, 7:21], "e4m3:stochastic", offset=((1, 7), (6, 35))), whole[1:4, 7:21])
    z = lax.complex(x, -x)
    whole = rounded(z, "e4m3:stochastic")
    same(rounded(z[2:4], "e4m3:stochastic", offset=70), whole[2:4])
    same(rounded(z[1:4, 7:21], "e4m3:stochastic", offset=((1, jnp.int32(7)), (6, 35))), whole[1:4, 7:21])
    same(jax.jit(lambda z, o: rounded(z, "e4m3:stochastic", offset=o))(z[2:4], 70), whole[2:4])


# --- control flow -------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["e4m3:nearest_away", "e4m3:stochastic"])
def test_scan_equals_the_python_loop(text):
    x, keys = jnp.asarray(numbers(np.float32, (257,))), jax.random.split(KEY, 4)

    def step(total: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = rounded(x, text, key)
        return rounded(total * 0.75 + out, text, key), out

    (total, outs), expected, rows = lax.scan(step, x, keys), x, []
    for key in keys:
        expected, out = jax.jit(step)(expected, key)
        rows.append(out)
    same(total, expected)
    same(outs, jnp.stack(rows))
    assert len({np.asarray(row).tobytes() for row in outs}) == (4 if "stochastic" in text else 1)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("text", ["e4m3:up", "e4m3:stochastic"])
def test_while_and_cond(text):
    x, keys = jnp.asarray(numbers(np.float32, (17,))), jax.random.split(KEY, 3)
    loop = jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: rounded(x * 1.5, text, keys[i]), x))
    expected = x
    for key in keys:
        expected = rounded(expected * 1.5, text, key)
    same(loop(x), expected)
    branch = jax.jit(lambda x, p: lax.cond(p, lambda x: rounded(x, text), lambda x: rounded(x, "integer4"), x))
    same(branch(x, True), rounded(x, text))
    same(branch(x, False), rounded(x, "integer4"))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("text", ["e5m2:gradient=clipped", "e5m2:stochastic:gradient=clipped+[e4m3:stochastic]"])
def test_remat_changes_no_bit(text):
    x = jnp.asarray(numbers(np.float32, (257,)) * 1e4)

    def loss(x: jax.Array) -> jax.Array:
        return (rounded(jnp.sin(x) + x, text) * jnp.cos(x)).sum()

    plain, again = jax.jit(jax.grad(loss))(x), jax.jit(jax.grad(jax.checkpoint(loss)))(x)
    np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6)  # the cosines around it may be compiled differently
    exact = jax.jit(jax.grad(jax.checkpoint(lambda x: rounded(x, text).sum())))(x)
    same(exact, jax.jit(jax.grad(lambda x: rounded(x, text).sum()))(x))


# --- export -------------------------------------------------------------------------------------------------------

EXPORTED: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "deterministic": lambda x, key: rounded(x, "e4m3fn:saturate"),
    "stochastic": lambda x, key: rounded(x, "e5m2:stochastic", key),
    "vjp": lambda x, key: jax.vjp(lambda x: rounded(x, "e5m2:gradient=clipped+[e4m3:stochastic]"), x)[1](x)[0],
    "jvp": lambda x, key: jax.jvp(lambda x: rounded(x, "e5m2:gradient=[e4m3]"), (x,), (x,)),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", EXPORTED)
def test_export(name):
    """Lowers for every platform, and the exported program gives the same bits."""
    x = jnp.asarray(numbers(np.float32, (3, 17)) * 1e3)

    def call(x: jax.Array, words: jax.Array) -> Any:  # key data, since a typed key is no array of the format
        return EXPORTED[name](x, jax.random.wrap_key_data(words))

    words = jax.random.key_data(KEY)
    everywhere = export.export(jax.jit(call), platforms=["cpu", "tpu", "cuda"])(x, words)
    assert everywhere.platforms == ("cpu", "tpu", "cuda")
    expected = jax.jit(call)(x, words)
    jax.tree.map(same, everywhere.call(x, words), expected)
    if importlib.util.find_spec("flatbuffers") is None:
        print("flatbuffers is not installed: the exported program was not serialized")
        return
    again = export.deserialize(everywhere.serialize())
    jax.tree.map(same, again.call(x, words), expected)


def export_of_a_symbolic_shape():
    (n,) = export.symbolic_shape("n")
    exported = export.export(jax.jit(partial(rounded, spec="e4m3")))(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    for rows in (1, 5):
        x = jnp.asarray(numbers(np.float32, (rows, 3)))
        same(exported.call(x), rounded(x, "e4m3"))


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize(
    "check",
    [traced_offsets_make_one_entry, vmap_over_offsets, offsets_give_the_draws_of_the_whole, export_of_a_symbolic_shape],
    ids=lambda check: check.__name__,
)
def test_offsets_of_another_kind(check: Callable[[], None]) -> None:
    check()


test_further = further.test()
