"""Checkpoints of other programs: every layout read and written, against NumPy code from its definition."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_layouts import (
    CASES,
    F8,
    GGUF_COUNTS,
    GGUF_SIZES,
    Case,
    gguf_blocks,
    gguf_file,
    gguf_values,
    make_nvfp4,
    pack_file,
    read_file,
    values_nvfp4,
    write_folder,
)
from refusals import assert_refused

import jchop as jc
from jchop import QArray, load_checkpoint, save_checkpoint
from jchop._checkpoints.writer import convert_checkpoint


def numbers(q: QArray) -> np.ndarray:
    return np.asarray(jc.dequantize(q))


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Bit for bit, but for the sign of a zero."""
    assert got.dtype == wanted.dtype == np.float32 and got.shape == wanted.shape
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", CASES)
def test_read_as_the_definition_has_it(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tensors = case.make(np.random.default_rng(len(name)))
    write_folder(tmp_path, tensors | {"norm.weight": np.arange(3, dtype=np.float32)}, case)
    tree = load_checkpoint(tmp_path)
    assert set(tree) == {"w.weight", "norm.weight"}
    assert isinstance(tree["w.weight"], QArray)
    same(numbers(tree["w.weight"]), case.values(tensors))
    named = load_checkpoint(tmp_path, case.layout)["w.weight"]
    assert named.spec == tree["w.weight"].spec and named.nbytes == tree["w.weight"].nbytes


SHAPES = {"fp8": (130, 260), "bitsandbytes": (8, 128)}


@pytest.mark.in_turn(30)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.writes])
def test_written_and_read_by_the_definition(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    shape = SHAPES.get(
        case.layout, (32, 70) if "70" in str(case.writes) else (32, 96) if "48" in str(case.writes) else (32, 64)
    )
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    q = jc.quantize(x + (0.5 if "zero_point" in str(case.writes) else 0), case.writes)  # type: ignore[arg-type]
    folder = tmp_path / "model"
    save_checkpoint(folder, {"w": {"weight": q}, "norm": {"weight": x[0]}}, case.layout, config={"hidden_size": 64})
    tensors, _ = read_file(folder / "model.safetensors")
    packed = tensors.get("w.weight_packed", np.zeros(0)).dtype == np.int32
    meaning = CASES["int8 packed"] if packed and q.spec.element.bits == 8 else case
    same(meaning.values(tensors), numbers(q))
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 64 and config["quantization_config"]["quant_method"] in (case.layout, "gptq")
    again = load_checkpoint(folder)
    same(numbers(again["w.weight"]), numbers(q))
    np.testing.assert_array_equal(again["norm.weight"], x[0])


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "gptq_v2"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_groups_of_any_columns_are_written(tmp_path: Path, layout: str, asymmetric: bool) -> None:
    """The order of GPTQ: 96 columns in three groups, two of which have the same scales."""
    rng, name = np.random.default_rng(5), "gptq" if layout == "gptq" else "gptq_v2"
    index = rng.permutation(np.repeat([0, 1, 1], 32))
    scale = rng.integers(1, 99, (32, 2)).astype(np.float16)[:, index]
    zero = rng.integers(1, 15, (32, 2)).astype(np.int32)[:, index] if asymmetric else None
    codes = rng.integers(0, 16, (32, 96)).astype(np.uint8)
    spec = jc.Spec("uint4(group=1,scale=float16,zero_point=integer)" if asymmetric else "int4(group=1,scale=float16)")
    stored = codes if asymmetric else codes ^ np.uint8(8)
    packed = stored[:, ::2] | stored[:, 1::2] << 4
    q = QArray(
        jnp.asarray(packed),
        jnp.asarray(scale),
        None if zero is None else jnp.asarray(zero),
        spec,
        96,
        np.dtype(np.float32),
    )
    wanted = (codes - (np.float64(8) if zero is None else zero)) * scale.astype(np.float64)
    same(numbers(q), wanted.astype(np.float32))
    if layout == "compressed-tensors":
        with pytest.raises(ValueError, match="gptq and gptq_v2 hold them"):
            save_checkpoint(tmp_path / "m", {"w.weight": q}, layout)
        return
    save_checkpoint(tmp_path / "m", {"w.weight": q}, layout)
    tensors, _ = read_file(tmp_path / "m/model.safetensors")
    assert sorted(np.bincount(tensors["w.g_idx"])) == [32, 32, 32]
    same(CASES[name].values(tensors), numbers(q))
    same(numbers(load_checkpoint(tmp_path / "m")["w.weight"]), numbers(q))


def test_spec_and_bytes_of_what_is_read(tmp_path: Path) -> None:
    """The packed forms, not only the numbers: symmetric integers have no zero points, groups their own scales."""
    wanted = {
        "int8 packed": "uint8(group=48,scale=bfloat16,zero_point=integer)",
        "mxfp4": "mxfp4",
        "mxfp8": "mxfp8_e4m3",
        "nvfp4, power of two": "nvfp4(scale=float8_e4m3fn)",
        "nvfp4": "float4_e2m1fn(group=16)",
        "float-quantized tensor": "float8_e4m3fn(group=tensor,scale=bfloat16)",
        "float-quantized blocks": "float8_e4m3fn(group=(128,128))",
        "nf4 double": "nf4",
        "nf4 experts of odd rows": "nf4(group=7)",
        "nf4 blocks of rows": "nf4(group=(2,all),axis=(-2,-1))",
    }
    for name, text in wanted.items():
        case = CASES[name]
        tensors = case.make(np.random.default_rng(0))
        (path := tmp_path / "x.safetensors").write_bytes(pack_file(tensors, case.metadata))
        found = load_checkpoint(path)["w.weight"]
        assert found.spec == jc.Spec(text), (name, str(found.spec))
        assert found.shape == case.values(tensors).shape, name


def test_nvfp4_divides_and_says_when_it_cannot_be_exact(tmp_path: Path) -> None:
    tensors = make_nvfp4(np.random.default_rng(3))
    (path := tmp_path / "x.safetensors").write_bytes(pack_file(tensors, {}))
    close = load_checkpoint(path, exact=False)["w.weight"]
    assert close.spec == jc.Spec("nvfp4(scale=float8_e4m3fn)") and close.nbytes == 3 * 32 + 3 * 4 + 4
    np.testing.assert_allclose(numbers(close), values_nvfp4(tensors), rtol=2**-22)
    save_checkpoint(tmp_path / "same", {"w.weight": load_checkpoint(path)["w.weight"]}, "compressed-tensors")
    same(numbers(load_checkpoint(tmp_path / "same")["w.weight"]), values_nvfp4(tensors))
    with pytest.raises(ValueError, match=r"exact=False \(--inexact of the command line\) permits"):
        save_checkpoint(tmp_path / "a", {"w.weight": close}, "compressed-tensors")
    save_checkpoint(tmp_path / "b", {"w.weight": close}, "compressed-tensors", exact=False)
    again, _ = read_file(tmp_path / "b/model.safetensors")
    np.testing.assert_allclose(values_nvfp4(again), numbers(close), rtol=2**-22)
    q = load_checkpoint(tmp_path / "b", exact=False)["w.weight"]
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    scale, _ = jc.fit_scale(x, "nvfp4")
    power = jc.quantize(x, "nvfp4", scale=(scale[0], np.float32(2.0**-9)))
    save_checkpoint(tmp_path / "c", {"w.weight": power}, "compressed-tensors")
    same(values_nvfp4(read_file(tmp_path / "c/model.safetensors")[0]), numbers(power))
    assert q.spec == close.spec


HALF, OFFSET = "int{}(group=32,scale=float16)".format, "uint{}(group=32,scale=float16,zero_point=float)".format
GGUF_WRITTEN = {2: HALF(4), 3: OFFSET(4), 6: HALF(5), 7: OFFSET(5), 8: HALF(8), 39: "mxfp4"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param(kind, GGUF_WRITTEN.get(kind), marks=[pytest.mark.slow] * (kind not in (2, 6, 10, 12, 23, 34, 40)))
        for kind in GGUF_SIZES
    ],
)
def test_gguf(tmp_path: Path, kind: int, text: str | None) -> None:
    rng = np.random.default_rng(kind)
    raw, plain = gguf_blocks(kind, rng, 3, 2), rng.standard_normal((2, 5)).astype(np.float32)
    shape = (3, 2 * GGUF_COUNTS[kind])
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file({"a": (0, (2, 5), plain.tobytes()), "w": (kind, shape, raw.tobytes())}))
    tree = load_checkpoint(path)
    np.testing.assert_array_equal(tree["a"], plain)
    same(numbers(tree["w"]), gguf_values(kind, raw))
    if text is not None:
        q = jc.quantize(rng.standard_normal((3, 64)).astype(np.float32), text)
        for stored in (q, tree["w"]):
            save_checkpoint(tmp_path / "y.gguf", {"w": stored, "b": jnp.bfloat16([1, 2])}, "gguf")
            again = load_checkpoint(tmp_path / "y.gguf")
            same(numbers(again["w"]), numbers(stored))
            data, size = (tmp_path / "y.gguf").read_bytes(), GGUF_SIZES[kind]
            whole = 6 * size + -6 * size % 32
            blocks = np.frombuffer(data[-whole:], np.uint8)[: 6 * size].reshape(3, 2, size)
            same(gguf_values(kind, blocks), numbers(stored))


@pytest.mark.parametrize("kind", [12, 13, 14])
def test_k_types_are_written_as_they_were_read(tmp_path: Path, kind: int) -> None:
    """Every byte of blocks whose largest scale has the integer that llama.cpp gives it; numbers of other blocks."""
    rng, path, size = np.random.default_rng(kind), tmp_path / "x.gguf", GGUF_SIZES[kind]
    raw = gguf_blocks(kind, rng, 3, 2)
    for row, block in enumerate(raw[:, 1]):  # another block of each row has any integers, among them zeros
        if kind == 14:
            block[192:208] = rng.integers(1, 256, 16)
            block[192 + row] = 128  # -128, and +128 is no integer of 8 bits
        else:
            block[4:16] = rng.integers(1, 16, 12) * 17
            block[4 + row] = 63
            block[8 + row] |= 63
    path.write_bytes(gguf_file({"w": (kind, (3, 512), raw.tobytes())}))
    q = load_checkpoint(path)["w"]
    save_checkpoint(tmp_path / "y.gguf", {"w": q}, "gguf")
    same(numbers(load_checkpoint(tmp_path / "y.gguf")["w"]), numbers(q))
    data, whole = (tmp_path / "y.gguf").read_bytes(), 6 * size + -6 * size % 32
    found = np.frombuffer(data[-whole:], np.uint8)[: 6 * size].reshape(3, 2, size)
    np.testing.assert_array_equal(found[:, 1], raw[:, 1])
    same(gguf_values(kind, found), numbers(q))
    text = {12: "uint4(group=32,zero_point=float)", 13: "uint5(group=32,zero_point=float)", 14: "int6(group=16)"}
    fresh = jc.quantize(rng.standard_normal((2, 512)).astype(np.float32), text[kind])
    with pytest.raises(ValueError, match=r"are not integers times a number of binary16.* It has int4"):
        save_checkpoint(tmp_path / "z.gguf", {"w": fresh}, "gguf")


def test_plain_arrays_keep_their_dtypes_in_gguf(tmp_path: Path) -> None:
    dtypes = (np.float64, np.float32, np.float16, np.int8, np.int16, np.int32, np.int64)
    arrays = {np.dtype(dtype).name: np.arange(-7, 7).reshape(2, 7).astype(dtype) for dtype in dtypes}
    save_checkpoint(tmp_path / "x.gguf", arrays, "gguf")
    for name, value in load_checkpoint(tmp_path / "x.gguf").items():
        assert value.dtype == name and np.array_equal(value, arrays[name])


def test_a_group_of_all_inputs_goes_with_groups_of_as_many(tmp_path: Path) -> None:
    """In the configuration of GPTQ; weights of several sizes have none, and nothing is left of their run."""
    rng = np.random.default_rng(0)
    a, b, c = (
        jc.quantize(rng.normal(size=(32, n)).astype(np.float32), f"int4(group={group},scale=float16)")
        for n, group in ((128, 128), (256, 128), (64, 64))
    )
    for tree, size in (({"a": a, "b": b}, 128), ({"a": a}, -1), ({"a": a, "c": c}, -1)):
        tree = {f"{name}.weight": q for name, q in tree.items()}
        target = tmp_path / "-".join(tree)
        save_checkpoint(target, tree, "gptq")
        config = json.loads((target / "config.json").read_text())["quantization_config"]
        assert config["group_size"] == size and "whole" not in config
        for name, q in load_checkpoint(target).items():
            same(numbers(q), numbers(tree[name]))
    with pytest.raises(ValueError, match="have one form, and these differ"):
        save_checkpoint(tmp_path / "new" / "odd", {"b.weight": b, "c.weight": c}, "gptq")
    assert not (tmp_path / "new").exists()


def test_layouts_convert_into_each_other(tmp_path: Path) -> None:
    """The same int4 weight through every layout that holds it, and the numbers stay."""
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    q = jc.quantize(x, "int4(group=32,scale=float16)")
    tree: dict[str, Any] = {"w.weight": q}
    for step, layout in enumerate(
        ("awq", "compressed-tensors", "gptq", "torchao", "gptq_v2", "jchop", "compressed-tensors")
    ):
        save_checkpoint(tmp_path / str(step), tree, layout)
        tree = load_checkpoint(tmp_path / str(step))
        assert tree["w.weight"].spec == q.spec
        jax.tree.map(np.testing.assert_array_equal, tree["w.weight"], q)
    save_checkpoint(tmp_path / "plain", tree, "plain")
    same(np.asarray(load_checkpoint(tmp_path / "plain")["w.weight"]), numbers(q))


UNHELD = [
    ("nf4", "gptq", "not integers of 2 or 3 or 4 or 8 bits.*; gptq holds, for example, int4.* multiples of 32$"),
    ("int4(group=32)", "gptq", "not exact in float16"),
    ("int4(group=32,axis=0,scale=float16)", "awq", "not groups along its last axis"),
    ("uint4(group=32,zero_point=float)", "compressed-tensors", "zero points are numbers"),
    ("nf4(group=32)", "gguf", "cannot be written to a GGUF file.*Q4_0"),
    ("int4(group=16,scale=float16)", "gguf", "not groups of 32"),
    ("float8_e4m3fn(group=(32,32))", "fp8", "not tiles of 128 x 128"),
    ("e3m2fn(group=32)", "compressed-tensors", "holds, for example, nvfp4, int4"),
    ("bfloat16", "gptq", "it has no scales"),
    ("int4(group=32)", "mlx", "the layout mlx is only read"),
    ("uint4(group=32,zero_point=float)", "hqq", "the layout hqq is only read"),
    ("nvfp4", "modelopt", "the layout modelopt is only read"),
]


@pytest.mark.in_turn(1000)
@pytest.mark.parametrize("rows", [UNHELD[1:3], UNHELD[:1] + UNHELD[3:]], ids=["some", "others"])
def test_what_a_layout_cannot_hold(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    for spec, layout, said in rows:
        q = jc.quantize(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), spec)
        target = tmp_path / ("x.gguf" if layout == "gguf" else "x")
        with pytest.raises(ValueError, match=said) as error:
            save_checkpoint(target, {"w.weight": q}, layout)
        assert "\n" not in str(error.value)


def changed(name: str, **tensors: Any) -> tuple[dict[str, np.ndarray], Case]:
    case = CASES[name]
    made = case.make(np.random.default_rng(0))
    return {
        key: value for key, value in (made | {f"w.{k}": v for k, v in tensors.items()}).items() if value is not None
    }, case


DAMAGED: list[tuple[str, str, dict[str, Any]]] = [
    ("the shape must be two integers", "int4 symmetric", {"weight_shape": np.array([6, -1], np.int64)}),
    ("may be codes|no codes of 2 to 8", "int4 symmetric", {"weight_shape": np.array([6, 1000], np.int64)}),
    ("scale is infinite or NaN", "int4 symmetric", {"weight_scale": np.full((6, 3), np.nan, np.float16)}),
    ("form no weight", "int4 symmetric", {"weight_scale": None}),
    ("do not divide", "int4 symmetric", {"weight_scale": np.ones((6, 5), np.float16)}),
    ("weight_zero_point must be int32", "int4 asymmetric", {"weight_zero_point": np.ones((2, 3), np.int32)}),
    ("g_idx must be 96 integers from 0 to 2", "int4 with g_idx", {"weight_g_idx": np.full(96, 3, np.int32)}),
    ("must be float8_e4m3fn", "nvfp4", {"weight_scale": np.ones((3, 4), np.uint8)}),
    ("finite number above 0", "nvfp4", {"weight_global_scale": np.zeros(1, np.float32)}),
    ("the code of NaN", "mxfp4", {"weight_scale": np.full((3, 2), 255, np.uint8)}),
    ("bits=4 of the configuration", "gptq", {"qzeros": np.ones((2, 8), np.int32)}),
    ("weight_scale_inv has shape", "fp8", {"weight_scale_inv": np.ones((2, 2), np.float32)}),
    ("quant_map is not the table", "nf4", {"weight.quant_map": np.ones(16, np.float32)}),
    ("is not JSON", "nf4", {"weight.quant_state.bitsandbytes__nf4": np.full(9, 91, np.uint8)}),
    ("do not fit", "nf4", {"weight.absmax": np.ones(3, np.float32)}),
    ("no integer of 4 bits", "torchao int4 by 8", {"_weight_qdata": np.full((4, 64), 9, np.int8)}),
]


def refused_in_one_line(path: Path, said: str, *layout: str) -> str:
    """The message of the error that a checkpoint is refused with."""
    with pytest.raises(ValueError, match=said) as error:
        load_checkpoint(path, *layout)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_weights(tmp_path: Path) -> None:
    for number, (said, name, tensors) in enumerate(DAMAGED):
        made, case = changed(name, **tensors)
        (folder := tmp_path / f"{number} {name}").mkdir()
        write_folder(folder, made, case)
        assert str(folder) in refused_in_one_line(folder, said)


def test_folders(tmp_path: Path) -> None:
    tree = {f"layers.{i}.weight": jc.quantize(np.eye(32, 64, dtype=np.float32), "int8(channel=0)") for i in range(5)}
    save_checkpoint(folder := tmp_path / "m", tree, "compressed-tensors", shard_bytes=5000)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    again = load_checkpoint(folder)
    jax.tree.map(np.testing.assert_array_equal, again, tree)
    with pytest.raises(ValueError, match="has tensors already"):
        save_checkpoint(folder, tree, "compressed-tensors")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for said, homes in (
        ("is no name of a safetensors file", {"a": "../x.safetensors"}),
        ("is not in", good["weight_map"] | {"layers.9.weight": names[1]}),
        ("has no weight_map", {}),
        ("must be an object of texts", {"a": 3}),
    ):
        index.write_text(json.dumps({"weight_map": homes}))
        with pytest.raises(ValueError, match=said):
            load_checkpoint(folder)
    index.write_text(json.dumps(good))
    for said, config in (
        ("is not a configuration", "[" * 50_000),
        ("quant_method='exl2'; known are", json.dumps({"quantization_config": {"quant_method": "exl2"}})),
        (
            "has the format 'marlin-24'",
            json.dumps({"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}),
        ),
        ("has a type that is not allowed", json.dumps({"quantization_config": 3})),
    ):
        (folder / "config.json").write_text(config)
        with pytest.raises(ValueError, match=said):
            load_checkpoint(folder)


DAMAGED_GGUF = [
    ("x.gguf is not a GGUF file: it ends within its header", b""),
    ("x.gguf is not a GGUF file: it ends within its header", b"GGU"),
    ("x.gguf is not a GGUF file: it does not begin with GGUF", bytes(64)),
    ("version 1 is not 2 or 3", b"GGUF" + (1).to_bytes(4, "little") + bytes(16)),
    ("ends within its header", gguf_file({"a": (0, (4,), bytes(16))})[:40]),
    ("more than its bytes", b"GGUF" + (3).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little") + bytes(8)),
    ("is not a GGUF file: tensor 'a' has type 4; known are", gguf_file({"a": (4, (256,), bytes(176))})),
    (
        "x.gguf: tensor 'a' is IQ2_XXS, which jchop does not read; it reads F32,",
        gguf_file({"a": (16, (256,), bytes(66))}),
    ),
    ("'a': a scale is below zero", gguf_file({"a": (3, (1, 32), b"\0\xbc" + bytes(18))})),
    ("overlaps another or the end", gguf_file({"a": (0, (1 << 40,), bytes(16))})),
    ("no whole blocks of 32", gguf_file({"a": (2, (33,), bytes(36))})),
    ("not two axes", gguf_file({"a": (2, (32,), bytes(18))})),
    ("a name of .* is longer", gguf_file({"a": (0, (1,), bytes(4))}, (1 << 50).to_bytes(8, "little"), 1)),
]


def test_damaged_gguf(tmp_path: Path) -> None:
    for said, data in DAMAGED_GGUF:
        (path := tmp_path / "x.gguf").write_bytes(data)
        refused_in_one_line(path, said)


def test_arguments(tmp_path: Path) -> None:
    q = jc.quantize(np.ones((32, 32), np.float32), "int8(channel=0)")
    with pytest.raises(ValueError, match="layout='x' must be one of"):
        load_checkpoint(tmp_path, "x")
    with pytest.raises(ValueError, match="layout='auto' must be one of"):
        save_checkpoint(tmp_path / "m", {"w.weight": q}, "auto")
    with pytest.raises(ValueError, match="has quantized arrays named"):
        save_checkpoint(tmp_path / "m2", {"kernel": q}, "compressed-tensors")
    with pytest.raises(ValueError, match="and only these, have the layout"):
        save_checkpoint(tmp_path / "m3", {"w": q}, "gguf")
    (taken := tmp_path / "m5").write_bytes(b"old")
    with pytest.raises(ValueError, match=r"m5 is a file; tensors are written to a folder, or to a file that ends in"):
        save_checkpoint(taken, {"w.weight": q}, "plain")
    assert taken.read_bytes() == b"old"
    with pytest.raises(TypeError, match="only arrays"):
        save_checkpoint(tmp_path / "m4", {"w": "text"}, "plain")
    (path := tmp_path / "x.safetensors").write_bytes(pack_file(CASES["gptq"].make(np.random.default_rng(0)), {}))
    with pytest.raises(ValueError, match="pass layout='gptq', 'gptq_v2' or 'awq'"):
        load_checkpoint(path)
    assert load_checkpoint(path, "gptq")["w.weight"].shape == (32, 64)
    assert np.dtype(F8).itemsize == 1


def folder_of(path: Path, name: str, config: dict[str, Any] | None, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Writes a folder with the weight of a case, another configuration, and other tensors; its tensors."""
    case = CASES[name]
    tensors = case.make(np.random.default_rng(0))
    write_folder(path, tensors | {key.replace("_", ".", 1): value for key, value in more.items()}, case)
    (path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    return tensors


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}


MISREAD: list[tuple[str, str, Any, str]] = [
    (r"'v.weight_packed' is of the layout compressed-tensors, not gptq", "gptq", GPTQ, "weight_packed"),
    (r"of several layouts: compressed-tensors, gptq; layout='plain'", "gptq", None, "weight_packed"),
    (r"'v.SCB' is of the layout llm_int8", "int4 symmetric", {"quant_method": "compressed-tensors"}, "SCB"),
    (r"are of ExLlamaV2, which is not read; layout='plain' reads every", "int4 symmetric", None, "q_weight"),
    (r"'v.W_q' is of the layout hqq", "int4 symmetric", {"quant_method": "compressed-tensors"}, "W_q"),
    (r"has checkpoint_format='marlin', and read are gptq", "gptq", GPTQ | {"checkpoint_format": "marlin"}, ""),
    (r"has version='gemv', and read are gemm", "awq", {"quant_method": "awq", "version": "gemv"}, ""),
    (r"is of the layout bitsandbytes, not llm_int8", "nf4", {"quant_method": "bitsandbytes", "load_in_8bit": True}, ""),
    (r"sparse-24-bitmask", "int4 symmetric", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ""),
]


def test_what_would_be_misread_is_refused(tmp_path: Path) -> None:
    for number, (said, name, config, more) in enumerate(MISREAD):
        others = {f"v_{more}": np.zeros((2, 2), np.int32)} if more else {}
        if config is not None and "sparsity_config" in config:
            config = CASES[name].config | config
        (folder := tmp_path / str(number)).mkdir()
        folder_of(folder, name, config, **others)
        refused_in_one_line(folder, said)
        assert "v." + more in {*load_checkpoint(folder, "plain"), "v."}


#: Codes and what belongs to them in layouts that are not read.
UNREAD = {
    "MLX": ("l.weight", "l.scales", np.uint32),
    "MLX, one tensor": ("weight", "scales", np.uint32),
    "HIGGS": ("l.weight", "l.scales", np.int16),
    "gpt-fast": ("l.weight", "l.scales_and_zeros", np.int32),
    "DeepSeek's inference": ("l.weight", "l.scale", F8),
    "DeepSeek's experts": ("experts.gate_up_proj", "experts.gate_up_proj_scale_inv", F8),
    "ComfyUI": ("l.weight", "l.scale_weight", F8),
    "Mistral": ("l.weight", "l.qscale_weight", F8),
    "TensorRT-LLM": ("l.weight", "l.weights_scaling_factor", np.int8),
    "EETQ": ("l.weight", "l.weight_scales", np.int8),
    "FBGEMM's experts": ("experts.gate_up_proj", "experts.gate_up_proj_scale", F8),
    "modelopt's experts": ("experts.gate_up_proj", "experts.gate_up_proj_weight_scale", np.uint8),
    "quanto": ("l.weight._data", "l.weight._scale", np.int8),
    "quanto, packed": ("l.weight._data._data", "l.weight._scale", np.uint8),
    "torchao without records": ("l._weight_qdata", "l._weight_scale", np.int8),
    "jchop without its record": ("l.weight.qvalue", "l.weight.scale", np.uint8),
    "AQLM": ("l.codes", "l.codebooks", np.int8),
    "VPTQ": ("l.indices", "l.centroids.weight", np.int32),
    "QuIP#": ("l.Qidxs", "l.SU", np.int64),
    "ExLlamaV3": ("l.trellis", "l.suh", np.int16),
    "SpQR": ("l.dense_weights", "l.row_offsets", np.int64),
    "DFloat11": ("l.encoded_exponent", "l.sign_mantissa", np.uint8),
    "Marlin": ("l.B", "l.s", np.int32),
    "BitNet": ("l.weight", "l.weight_scale", np.uint8),
}


def test_codes_without_a_configuration_are_not_plain_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"

    def read(codes: str, scales: str, dtype: Any) -> None:
        tensors = {codes: np.zeros((2, 4), dtype), scales: np.ones((2, 1), np.float32), "norm.weight": np.ones(3, "f4")}
        jc.save(path, tensors)
        plain = load_checkpoint(path, "plain")
        assert {name: array.dtype for name, array in plain.items()} == {
            name: array.dtype for name, array in tensors.items()
        }
        load_checkpoint(path)

    said = r"^[^\n]*layout='plain' reads every tensor as it is[^\n]*$"
    assert_refused({name: (partial(read, *row), ValueError, said) for name, row in UNREAD.items()})


def test_codes_of_another_layout_beside_those_of_the_configuration(tmp_path: Path) -> None:
    folder_of(tmp_path, "gptq", GPTQ, v_blocks=np.zeros((2, 16), np.uint8), v_scales=np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match=r"'v\.blocks' and 'v\.scales' are of the layout mxfp4, not gptq"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("ends", [("_blocks", "_scales"), (".blocks", ".scales")])
@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "mxfp4"}}])
def test_experts_of_gpt_oss(tmp_path: Path, ends: tuple[str, str], config: dict[str, Any]) -> None:
    """Two weights of one module, each in two tensors: the lower half of a byte first, groups of 32, exponents + 127."""
    rng = np.random.default_rng(4)
    tensors: dict[str, np.ndarray] = {"experts.down_proj_bias": np.ones((2, 5), np.float32)}
    for name, shape in (("experts.down_proj", (2, 5, 3)), ("experts.gate_up_proj", (2, 7, 1)), ("mlp1_weight", (4, 2))):
        tensors[name + ends[0]] = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors[name + ends[1]] = rng.integers(0, 254, shape, np.uint8)
    (tmp_path / "model.safetensors").write_bytes(pack_file(tensors, {}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tree = load_checkpoint(tmp_path)
    assert set(tree) == {"experts.down_proj_bias", "experts.down_proj", "experts.gate_up_proj", "mlp1_weight"}
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    for name in tree.keys() - {"experts.down_proj_bias"}:
        blocks, scales = tensors[name + ends[0]], tensors[name + ends[1]]
        elements = levels[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*scales.shape, 32)
        wanted = np.ldexp(elements, scales[..., None].astype(np.int32) - 127)
        assert tree[name].spec == jc.Spec(jc.formats.mxfp4)
        same(numbers(tree[name]), wanted.reshape(*scales.shape[:-1], -1))
    save_checkpoint(tmp_path / "again", tree, "mxfp4", config={"model_type": "gpt_oss"})
    again, _ = read_file(tmp_path / "again/model.safetensors")
    for name, tensor in tensors.items():
        written = name.removesuffix(ends[0]) + "_blocks" if name.endswith(ends[0]) else name
        written = name.removesuffix(ends[1]) + "_scales" if name.endswith(ends[1]) else written
        np.testing.assert_array_equal(again[written], tensor)
    said = json.loads((tmp_path / "again/config.json").read_text())
    assert said["model_type"] == "gpt_oss" and said["quantization_config"]["quant_method"] == "mxfp4"


def test_blocks_that_are_no_weight_of_gpt_oss(tmp_path: Path) -> None:
    right = {"a_blocks": np.zeros((2, 3, 16), np.uint8), "a_scales": np.zeros((2, 3), np.uint8)}
    for said, change in (
        ("form no weight of the layout mxfp4", {"a_scales": np.zeros((2, 2), np.uint8)}),
        ("form no weight of the layout mxfp4", {"a_scales": np.zeros((2, 3), np.float32)}),
        ("form no weight of the layout mxfp4", {"a_blocks": np.zeros((2, 3, 8), np.uint8)}),
        ("a scale is 255, the code of NaN", {"a_scales": np.full((2, 3), 255, np.uint8)}),
        ("form no weight of the layout mxfp4", {"b_blocks": np.zeros((2, 3, 16), np.uint8)}),
        ("the layout gptq, not mxfp4", {"c.qzeros": np.zeros((2, 3), np.int32), "c.qweight": np.zeros(2, np.int32)}),
        (
            "of quanto, which is not read",
            {"c.w._data": np.zeros((2, 3), np.int8), "c.w._scale": np.zeros(2, np.float32)},
        ),
    ):
        (path := tmp_path / "x.safetensors").write_bytes(pack_file(right | change, {}))
        with pytest.raises(ValueError, match=said) as error:
            load_checkpoint(path, "mxfp4")
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    (path := tmp_path / "x.safetensors").write_bytes(pack_file({"b_blocks": np.zeros((2, 3, 16), np.uint8)}, {}))
    assert not isinstance(load_checkpoint(path)["b_blocks"], QArray)  # nothing shows that these are codes
    x = np.random.default_rng(0).standard_normal((4, 48)).astype(np.float32)
    for said, spec in (("is no multiple of 32", "mxfp4"), ("not mxfp4 along the last", "mxfp4(group=16)")):
        with pytest.raises(ValueError, match=said):
            save_checkpoint(tmp_path / "m", {"w": jc.quantize(x, spec)}, "mxfp4")


def test_what_only_looks_like_codes_is_read(tmp_path: Path) -> None:
    names = ("norm.weight", "norm.scale", "up_blocks", "up_scales", "a.mask_scale", "position_ids")
    tensors = {name: np.ones((2, 4), np.float32) for name in names}
    tensors |= {"a.mask": np.ones((2, 4), np.bool_), "ids": np.arange(4), "scales": np.ones(4, np.float32)}
    (path := tmp_path / "x.safetensors").write_bytes(pack_file(tensors, {}))
    assert set(load_checkpoint(path)) == set(tensors)


@pytest.mark.parametrize("config", [True, False])
def test_nf4_under_a_name_that_is_not_weight(tmp_path: Path, config: bool) -> None:
    case, name = CASES["nf4 experts"], "mlp.experts.up_proj"
    tensors = case.make(np.random.default_rng(0))
    renamed = {key.replace("w.weight", name): value for key, value in tensors.items()}
    more = {"norm.weight": np.ones(3, np.float32)}
    write_folder(tmp_path, renamed | more, case if config else replace(case, config={}))
    tree = load_checkpoint(tmp_path)
    assert set(tree) == {name, "norm.weight"} and str(tree[name].spec) == "nf4(group=32)"
    same(numbers(tree[name]), case.values(tensors))
    write_folder(tmp_path, {key: value for key, value in renamed.items() if "quant_map" not in key}, case)
    with pytest.raises(ValueError, match="form no weight of the layout bitsandbytes"):
        load_checkpoint(tmp_path)
    assert f"{name}.absmax" in load_checkpoint(tmp_path, "plain")


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("torchao int4 by 8", "w._weight", "w._up", "tensor 'w._up_qdata' is of no weight named"),
        (
            "int4 symmetric",
            "w.weight",
            "w.up",
            "are of compressed-tensors under another name than weight, which is not",
        ),
    ],
)
def test_other_layouts_under_another_name(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    case = CASES[name]
    tensors = {key.replace(old, new): value for key, value in case.make(np.random.default_rng(0)).items()}
    metadata = {key.replace("w.weight", "w.up"): text for key, text in case.metadata.items()}
    write_folder(tmp_path, tensors, replace(case, metadata=metadata))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(tmp_path)


def test_a_folder_with_files_of_other_models_names_some(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"{name}.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"files: 'a.safetensors', 'b.safetensors', 'c.safetensors' and 2 more"):
        load_checkpoint(tmp_path)


def test_modules_with_their_own_bits_and_one_scale(tmp_path: Path) -> None:
    """Configurations whose facts about all modules do not hold for the one that is read."""
    tensors = folder_of(tmp_path, "gptq", GPTQ | {"bits": 8, "dynamic": {"+:w": {"bits": 4}}})
    same(numbers(load_checkpoint(tmp_path)["w.weight"]), CASES["gptq"].values(tensors))
    codes = np.arange(24).reshape(4, 6) % 8
    words = np.array([[sum(int(c) << 3 * i for i, c in enumerate(row))] for row in codes], np.int32)
    packed = {"a.weight_packed": words, "a.weight_scale": np.ones((4, 1), np.float16)}
    packed["a.weight_shape"] = np.array([4, 6], np.int64)
    groups = {str(bits): {"targets": [name], "weights": {"num_bits": bits}} for bits, name in ((4, "b"), (3, "a"))}
    for targets, wanted in (("a", codes - 4.0), ("Linear", None)):
        groups["3"]["targets"] = [targets]
        (tmp_path / "model.safetensors").write_bytes(pack_file(packed, {}))
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        if wanted is None:
            with pytest.raises(ValueError, match="a group with the module's name in its targets says which"):
                load_checkpoint(tmp_path)
        else:
            same(numbers(load_checkpoint(tmp_path)["a.weight"]), wanted.astype(np.float32))
    weight = np.arange(32, dtype=np.float32).reshape(4, 8).astype(F8)
    for name in ("weight_scale", "weight_scale_inv"):
        whole = {"a.weight": weight, f"a.{name}": np.array(0.5, np.float32), "a.input_scale": np.array(1, np.float32)}
        (tmp_path / "model.safetensors").write_bytes(pack_file(whole, {}))
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
        same(numbers(load_checkpoint(tmp_path)["a.weight"]), weight.astype(np.float32) * np.float32(0.5))


def test_folders_with_files_that_are_missing(tmp_path: Path) -> None:
    files = [f"x-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for number, name in enumerate(files):
        (tmp_path / name).write_bytes(pack_file({f"a{number}": np.full(2, number, np.float32)}, {}))
    assert set(load_checkpoint(tmp_path)) == {"a0", "a1"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a0": files[0], "a1": files[1], "tied": files[0]}}))
    with pytest.raises(ValueError, match="if it is tied to another, remove its line"):
        load_checkpoint(tmp_path)
    (tmp_path / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"which model.safetensors.index.json names; is the download complete"):
        load_checkpoint(tmp_path)
    index.unlink()
    for said, name in (
        ("not all of 2 numbered files are there, number 2 first", "none"),
        ("of an unfinished run of jchop: repeat its command", ".jchop-unfinished.json"),
        ("pass the path of one of its files: 'b.safetensors'", "b.safetensors"),
        ("pass the path of one of its files: 'c.gguf'", "c.gguf"),
        ("'pytorch_model.bin' is a pickle of torch", "pytorch_model.bin"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(FileNotFoundError, match=said):
            load_checkpoint(tmp_path)
        (tmp_path / name).unlink()
        if name == ".jchop-unfinished.json":
            (tmp_path / files[0]).unlink()


@pytest.mark.parametrize("alignment", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_a_conversion_keeps_the_keys_of_gguf(tmp_path: Path, alignment: int) -> None:
    def number(name: str, value: int) -> bytes:
        return len(name).to_bytes(8, "little") + name.encode() + (4).to_bytes(4, "little") + value.to_bytes(4, "little")

    keys = number("llama.block_count", 2) + number("general.alignment", 32) + number("x", 7)
    blocks = gguf_blocks(8, np.random.default_rng(0), 3, 2)
    blocks[..., 1] &= 127  # scales above zero come back as they are
    blocks[0, 0, :2] = (0, 0x3C)
    data = gguf_file({"w": (8, (3, 64), blocks.tobytes())}, keys, 3)
    (tmp_path / "a.gguf").write_bytes(data)
    convert_checkpoint(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf")
    assert (tmp_path / "b.gguf").read_bytes() == data
    changed = keys.replace(number("general.alignment", 32), number("general.alignment", alignment))
    padded = gguf_file({"w": (8, (3, 64), blocks.tobytes())}, changed, 3)
    header = len(padded) - 6 * 34 - -6 * 34 % 32
    assert padded.find(blocks.tobytes()) == header
    (tmp_path / "c.gguf").write_bytes(padded[:header] + bytes(-header % alignment) + padded[header:])
    convert_checkpoint(tmp_path / "c.gguf", tmp_path / "d.gguf", "gguf")
    assert changed in (tmp_path / "d.gguf").read_bytes()
    same(numbers(load_checkpoint(tmp_path / "d.gguf")["w"]), gguf_values(8, blocks))
