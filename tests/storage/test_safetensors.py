"""Trees of arrays and QArrays in safetensors files: the same after loading, whole or not at all, and open to others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from further import Further
from refusals import assert_refused

import jchop as jc
from jchop import QArray
from jchop._checkpoints.writer import convert_checkpoint
from jchop._storage import _save as save
from jchop._storage._chunks import TensorRule, quantize_file
from jchop._storage._files.safetensors import (
    DTYPES,
    TensorEntry,
    TensorFile,
    TensorWriter,
    place_tensors,
    write_together,
)

further = Further()

ROOT = Path(__file__).resolve().parents[2]


def same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def tree() -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    texts = ["mxfp4", "nvfp4", "int4(group=8,scale=int8(channel=0))", "uint4(group=8,zero_point=integer)", "e3m2fn"]
    quantized = [jax.tree.map(jnp.asarray, jc.quantize(x, text)) for text in texts]
    quantized.append(jax.tree.map(jnp.asarray, jc.quantize(x[0, 0], "int8(group=tensor)")))
    return {
        "layers": [{"kernel": q, "bias": jnp.arange(3.0)} for q in quantized],
        "step": jnp.int32(7),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "flags": np.array([True, False]),
        "wide": np.array([1.0 + 2**-52]),
    }


@further
def loaded_is_saved(tmp_path: Path) -> None:
    path, saved = tmp_path / "model.safetensors", tree()
    jc.save(path, saved, metadata={"format": "pt"})
    same(jc.load(path, like=saved), saved)
    flat = jc.load_checkpoint(path)
    assert isinstance(flat["layers.0.kernel"], QArray) and flat["layers.0.kernel"].spec == jc.Spec("mxfp4")
    assert flat["wide"].dtype == np.float64 and set(flat) == {
        *(f"layers.{i}.{name}" for i in range(6) for name in ("kernel", "bias")),
        *("step", "empty", "flags", "wide"),
    }
    with TensorFile(path) as file:
        assert file.metadata["format"] == "pt"
        assert {name for name in file.entries if name.startswith("layers.1.kernel")} == {
            "layers.1.kernel.qvalue",
            "layers.1.kernel.scale",
            "layers.1.kernel.tensor_scale",
        }
        assert "layers.2.kernel.scale_scale" in file.entries and "layers.3.kernel.zero_point" in file.entries
        assert file.entries["layers.0.kernel.qvalue"].nbytes == 64


@pytest.mark.smoke
def test_names_of_parts() -> None:
    """A quantized scale with zero points has the most parts; nothing is computed for their names."""
    text = "nf4(group=8,scale=uint8(group=2,zero_point=float))"
    q = jax.eval_shape(lambda x: jc.quantize(x, text), jax.ShapeDtypeStruct((4, 32), np.float32))
    assert list(save.qarray_tensors("w", q)) == ["w.qvalue", "w.scale", "w.scale_scale", "w.scale_zero_point"]
    joined = save.join_qarray(list(save.qarray_tensors("w", q).values()), save.qarray_description(q))
    assert jax.tree.structure(joined) == jax.tree.structure(q) and joined.scale == q.scale


def test_other_libraries_read_it(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    saved = {"a": np.arange(6.0).reshape(2, 3), "b": jc.quantize(np.ones((2, 8), np.float32), "mxfp4")}
    jc.save(path, saved)
    found = numpy.load_file(path)
    np.testing.assert_array_equal(found["a"], saved["a"])
    np.testing.assert_array_equal(found["b.qvalue"], saved["b"].qvalue)
    numpy.save_file({"x": np.arange(5, dtype=np.int16)}, path)
    np.testing.assert_array_equal(jc.load(path)["x"], np.arange(5))


def test_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    saved = {name: np.array([[0, 1, 2, 1]]).astype(dtype) for name, dtype in DTYPES.items() if name != "F8_E8M0"}
    saved["F8_E8M0"] = np.array([1.0, 4.0]).astype(ml_dtypes.float8_e8m0fnu)
    jc.save(path, saved)
    same(jc.load(path), saved)
    with TensorFile(path) as file:
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())


def test_two_numbers_of_four_bits_are_in_a_byte(tmp_path: Path) -> None:
    path, codes = tmp_path / "a.safetensors", np.random.default_rng(0).integers(0, 16, (6, 5, 3), np.uint8)
    flat = codes.reshape(-1)

    def write(data: bytes, **header: Any) -> None:
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    def stored_in(name: str) -> bytes:
        data = (tmp_path / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        start, end = json.loads(data[8 : 8 + length])["w"]["data_offsets"]
        return data[8 + length + start : 8 + length + end]

    data = bytes(flat[i] + 16 * flat[i + 1] for i in range(0, 90, 2))
    more = {"dtype": "F32", "shape": [2, 32], "data_offsets": [45, 301]}
    write(data + np.ones(64, "<f4").tobytes(), w={"dtype": "F4", "shape": [6, 5, 3], "data_offsets": [0, 45]}, x=more)
    wanted = codes.view(ml_dtypes.float4_e2m1fn)
    found = jc.load(path)["w"]
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), codes)
    with TensorFile(path) as file:
        np.testing.assert_array_equal(file.read("w", 7, 6).view(np.uint8), flat[7:13])
    jc.save(tmp_path / "b.safetensors", {"w": wanted})
    assert stored_in("b.safetensors") == data
    quantize_file(path, tmp_path / "c.safetensors", [TensorRule("x", jc.Spec("int8"))], chunk=7)
    assert stored_in("c.safetensors") == data
    convert_checkpoint(path, tmp_path / "d", "plain", shard_bytes=50)  # w waits in a file
    np.testing.assert_array_equal(np.asarray(jc.load_checkpoint(tmp_path / "d")["w"]).view(np.uint8), codes)
    with pytest.raises(TypeError, match="leaf 'w' of float4_e2m1fn: several processes write whole bytes"):
        write_together(path, {"w": wanted}, {"w": TensorEntry(wanted.dtype, wanted.shape)}, {})
    with pytest.raises(ValueError, match=r"'w' of float4_e2m1fn\[3\] fills no whole bytes"):
        jc.save(path, {"w": wanted[0, 0]})
    write(bytes(2), w={"dtype": "F4", "shape": [3], "data_offsets": [0, 2]})
    with pytest.raises(ValueError, match="do not fit shape"):
        jc.load(path)
    write(bytes(3), w={"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]})
    with pytest.raises(ValueError, match=r"file that jchop reads: .* dtype 'F6_E2M3' is not known; read are F4, BOOL"):
        jc.load(path)


def test_a_path_of_another_type() -> None:
    three: Any = 3
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("path", lambda: jc.save(three, {})),
        ("path", lambda: jc.load(three)),
        ("path", lambda: jc.load_checkpoint(three)),
        ("path", lambda: jc.save_checkpoint(three, {}, layout="plain")),
        ("src", lambda: jc.round_file(three, "b.npy", "e4m3")),
        ("dst", lambda: jc.round_file("a.npy", three, "e4m3")),
    ]
    said = "=3 must be a path.*: a text or a pathlib.Path$"
    assert_refused({f"call {i}": (call, TypeError, f"^{name}{said}") for i, (name, call) in enumerate(calls)})


@further.first
def a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    jc.save(path, {"x": jnp.ones(3)})
    old = path.read_bytes()

    def broken(self: TensorWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorWriter, "finish", broken)
    with pytest.raises(OSError, match="space"):
        jc.save(path, {"x": jnp.zeros(3)})
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_random_keys(tmp_path: Path) -> None:
    """Of optimizers that round stochastically, for example."""
    path = tmp_path / "state.safetensors"
    for kind in ("threefry2x32", "rbg"):
        words = jnp.arange(8, dtype=jnp.uint32).reshape(2, 4)[:, : 2 + 2 * (kind == "rbg")]
        keys = jax.random.wrap_key_data(words, impl=kind)
        jc.save(path, {"keys": keys, "x": jnp.ones(3)})
        for like in (
            None,
            {"keys": keys, "x": jnp.ones(3)},
            jax.eval_shape(lambda k: {"keys": k, "x": jnp.ones(3)}, keys),
        ):
            found = jc.load(path, like=like)["keys"]
            assert found.dtype == keys.dtype
            np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
        with pytest.raises(ValueError, match=r"'keys' is key<.*>\[2\], and uint32"):
            jc.load(path, like={"keys": jax.random.key_data(keys), "x": jnp.ones(3)})


def test_damaged_names_of_random_keys(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def loaded(text: str) -> Any:
        header = {
            "__metadata__": {save.RANDOM_KEYS_KEY: text},
            "keys": {"dtype": "U32", "shape": [2, 2], "data_offsets": [0, 16]},
            "x": {"dtype": "F32", "shape": [3], "data_offsets": [16, 28]},
        }
        written = json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + bytes(28))
        return jc.load(path)

    texts = ['{"x": "threefry2x32"}', '{"keys": "new"}', '{"keys": 3}', '{"lost": "rbg"}', "[]"]
    assert_refused({text: (partial(loaded, text), ValueError, r"bad metadata 'jchop\.keys'") for text in texts})


def test_refused_trees(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for error, said, value in (
        (TypeError, "'a.0' is 1.5", {"a": [1.5]}),
        (TypeError, "'a': dtype int4.*complex64$", {"a": jnp.ones(3, jnp.int4)}),
        (TypeError, r"'a': dtype >f4.*Convert it, for example by x\.astype\('<f4'\)", {"a": np.ones(3, ">f4")}),
        (ValueError, "two leaves of the name 'a.b'", {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}),
        (ValueError, "no name", jnp.ones(2)),
        (ValueError, "__metadata__", {"__metadata__": jnp.ones(2)}),
    ):
        with pytest.raises(error, match=said):
            jc.save(path, value)
    assert not path.exists()
    with pytest.raises(ValueError, match="jchop's own"):
        jc.save(path, {}, metadata={save.QARRAYS_KEY: ""})


def test_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def write(header: Any, data: bytes = b"") -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    def loaded(said: str) -> None:
        with pytest.raises(ValueError, match=said):
            jc.load(path)

    path.write_bytes(b"PK")
    loaded("not a safetensors file")
    path.write_bytes(b"")
    loaded("not a safetensors file: it is empty")
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    loaded("not a safetensors file")
    write(b"{nonsense")
    loaded("bad header")
    write({"x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    loaded("'F7' is not known")
    for offsets in ([0, 4], [4, 12], [-8, 0]):
        write({"x": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}, bytes(8))
        loaded("do not fit")
    jc.save(path, {"a": jnp.ones(2)})
    for like, said in (({"b": 0}, r"\['b'\].*\['a'\]"), ({"a": 0, "b": 0}, r"not in the file \['b'\]")):
        with pytest.raises(ValueError, match=said):
            jc.load(path, like=like)
    jc.save(path, {"w": jc.quantize(np.ones((2, 8), np.float32), "mxfp4")})
    with TensorFile(path) as file:
        entries, metadata = {"w.qvalue": file.entries["w.qvalue"]}, file.metadata
    with path.open("wb") as out:
        TensorWriter(out, place_tensors(entries), metadata).write("w.qvalue", np.zeros((2, 4), np.uint8))
    loaded("lacks tensors of its QArrays: w.scale")


def test_like_says_which_leaf_differs(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    q = jc.quantize(jnp.ones((2, 32)), "mxfp4")
    saved = {"a": {"kernel": q, "bias": jnp.ones(3)}, "b": jnp.zeros((2, 2), jnp.int32)}
    jc.save(path, saved)
    same(jc.load(path, like=jax.eval_shape(lambda: saved)), saved)
    same(jc.load(path, like={"a": {"kernel": 0, "bias": 0}, "b": 0}), saved)
    other = jax.eval_shape(lambda: jc.quantize(jnp.ones((2, 32)), "mxfp4(group=16)"))
    short = jax.eval_shape(lambda: jc.quantize(jnp.ones((1, 32)), "mxfp4"))
    half = jax.eval_shape(lambda: jc.quantize(jnp.ones((2, 32), jnp.bfloat16), "mxfp4"))
    for name, leaf, said in (
        ("kernel", other, r"'a\.kernel' is mxfp4 of float32\[2, 32\].*, and mxfp4\(group=16\)"),
        ("kernel", short, r"'a\.kernel' is .*, and mxfp4 of float32\[1, 32\]"),
        ("kernel", half, r"'a\.kernel' is .*, and mxfp4 of bfloat16\[2, 32\]"),
        ("kernel", jnp.ones((2, 32)), r"'a\.kernel' is mxfp4 .*, and float32\[2, 32\] in like"),
        ("bias", q, r"'a\.bias' is float32\[3\], and mxfp4"),
        ("bias", jax.ShapeDtypeStruct((4,), jnp.float32), r"'a\.bias' is float32\[3\], and float32\[4\] in like"),
        ("bias", np.ones(3, np.float16), r"'a\.bias' is float32\[3\], and float16\[3\] in like"),
    ):
        with pytest.raises(ValueError, match=said):
            jc.load(path, like={"a": saved["a"] | {name: leaf}, "b": saved["b"]})
    many = {str(i): jnp.zeros(i) for i in range(1, 6)}
    jc.save(path, many)
    with pytest.raises(ValueError, match=r"'3' is float32\[3\].*; and 2 more"):
        jc.load(path, like={name: jnp.zeros(9) for name in many})


def test_dicts_and_lists_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    q = jc.quantize(jnp.ones((2, 32)), "nvfp4")
    saved = {
        "layers": [{"kernel": q}, {"kernel": jnp.ones(2), "with.dots": jnp.ones(3)}],
        "blocks": {0: jnp.ones(1), 10: {"": jnp.zeros(2)}},
        "0": [[jnp.ones(1)], [jnp.ones(2), jnp.ones(3)]],
        'ä \n"': jnp.ones(4),
    }
    jc.save(path, saved)
    same(jc.load(path), saved)
    jc.save(path, {"pair": (jnp.ones(1), jnp.ones(2))})
    same(jc.load(path), {"pair": [jnp.ones(1), jnp.ones(2)]})
    jc.save(path, {})
    assert jc.load(path) == {}
    for unsaid in ({"a": [None, jnp.ones(1)]}, {(1, 2): jnp.ones(1)}, {True: jnp.ones(1)}):
        jc.save(path, unsaid)
        same(jc.load(path, like=unsaid), unsaid)
        assert set(jc.load(path)) <= {"a.1", "(1, 2)", "True"}  # by name


def test_the_record_stays_when_a_file_is_quantized(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    x = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    jc.save(source, {"layers": [{"kernel": x}, {"bias": x[0]}]})
    quantize_file(source, target, [TensorRule(".*kernel", jc.Spec("mxfp4"))])
    wanted = {"layers": [{"kernel": jax.tree.map(jnp.asarray, jc.quantize(x, "mxfp4"))}, {"bias": x[0]}]}
    same(jc.load(target), wanted)


def test_metadata_must_be_texts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for metadata in ({"step": 3}, {3: "step"}, {"step": None}, {"step": b"3"}, [("step", "3")]):
        with pytest.raises(TypeError, match="metadata"):
            jc.save(path, {"x": jnp.ones(1)}, metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="jchop's own"):
        jc.save(path, {"x": jnp.ones(1)}, metadata={"jchop.tree": "{}"})
    with pytest.raises(ValueError, match="make a header of"):
        jc.save(path, {"x": jnp.ones(1)}, metadata={"long": "x" * (1 << 24)})
    assert not path.exists()


def test_the_writer_counts_bytes(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as out:
        writer = TensorWriter(out, {"x": TensorEntry(np.dtype(np.uint8), (3,))}, {})
        writer.write("x", np.zeros(2, np.uint8))
        with pytest.raises(ValueError, match="not wholly written: x"):
            writer.finish()
        with pytest.raises(ValueError, match="takes 3 bytes, and 4"):
            writer.write("x", np.zeros(2, np.uint8))


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    jc.save(path, {"x": jnp.ones(100_000)})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(ValueError, match="ends within tensor 'x'"):
            file.read("x")


test_further = further.test()
