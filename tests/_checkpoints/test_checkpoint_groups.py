"""Groups that do not divide an axis, words with spare bits, scales that are powers of two: in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_layouts import F8, Tensors, bytes8, pack_file, read_file, words

import jchop as jc
from jchop import QArray, load_checkpoint, save_checkpoint

E8M0 = ml_dtypes.float8_e8m0fnu
RNG = np.random.default_rng(0)


def folder_of(path: Path, tensors: Tensors, config: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    jc.save_checkpoint(path / "model.safetensors", tensors, layout="plain")
    if metadata:
        (path / "model.safetensors").write_bytes(pack_file(tensors, metadata))
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return path


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def repeated(scale: np.ndarray, sizes: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of each element, by the sizes of the groups."""
    for axis, (size, n) in enumerate(zip(sizes, shape, strict=True)):
        scale = np.repeat(scale, size, axis).take(range(n), axis)
    return scale.astype(np.float32)


# -- groups ------------------------------------------------------------------------------------------------------------

Stored = tuple[Tensors, dict[str, Any], np.ndarray]


def packed(size: int) -> Stored:
    codes, scale = RNG.integers(0, 16, (4, 20)), RNG.uniform(1, 2, (4, 2)).astype(np.float32)
    tensors = {"m.weight_packed": words(codes, 4), "m.weight_scale": scale, "m.weight_shape": np.array(codes.shape)}
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=size)
    return tensors, config, (codes - 8).astype(np.float32) * repeated(scale, (1, size), codes.shape)


def integers(size: int) -> Stored:
    codes, scale = RNG.integers(-128, 128, (4, 20), np.int8), RNG.uniform(1, 2, (4, 2)).astype(np.float32)
    config = compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=size)
    values = codes.astype(np.float32) * repeated(scale, (1, size), codes.shape)
    return {"m.weight": codes, "m.weight_scale": scale}, config, values


def blocks(rows: int, text: bool = False) -> Stored:
    codes, scale = bytes8(RNG, (8, 20)), RNG.uniform(1, 2, (2, 2)).astype(np.float32)
    structure = f"{rows}x12" if text else [rows, 12]
    config = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=structure)
    values = codes.astype(np.float32) * repeated(scale, (rows, 12), codes.shape)
    return {"m.weight": codes, "m.weight_scale": scale}, config, values


def gptq(size: int, index: bool = False) -> Stored:
    codes, scale = RNG.integers(0, 16, (8, 32)), RNG.uniform(1, 2, (2, 8)).astype(np.float16)
    tensors = {"m.qweight": np.ascontiguousarray(words(codes, 4).T), "m.scales": scale}
    tensors["m.qzeros"] = words(np.full((2, 8), 7), 4)
    if index:
        tensors["m.g_idx"] = (np.arange(32) // size).astype(np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1 if index else size}
    return tensors, config, (codes - 8).astype(np.float32) * repeated(scale.T, (1, size), codes.shape)


def awq(size: int) -> Stored:
    codes, scale = RNG.integers(0, 16, (8, 20)), RNG.uniform(1, 2, (2, 8)).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"m.qweight": words(codes.T[:, order], 4), "m.qzeros": words(np.full((2, 8), 8), 4), "m.scales": scale}
    config = {"quant_method": "awq", "bits": 4, "group_size": size}
    return tensors, config, (codes - 8).astype(np.float32) * repeated(scale.T, (1, size), codes.shape)


def torchao(size: int) -> Stored:
    codes = RNG.integers(0, 8, (4, 20))
    scale, zero = (RNG.integers(1, 9, (2, 4)).astype(ml_dtypes.bfloat16) for _ in range(2))
    tensors = {"m._weight_qdata": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.int8)}
    tensors |= {"m._weight_scale": scale, "m._weight_zero_point": zero}
    spread = [repeated(part.T, (1, size), codes.shape) for part in (scale, zero)]
    return tensors, {}, codes.astype(np.float32) * spread[0] + spread[1]


RECORD = json.dumps({"_type": "Int4Tensor", "_data": {"block_size": [1, 12]}, "_tensor_data_names": []})
CASES: dict[str, tuple[Callable[[], Stored], str]] = {
    "packed": (lambda: packed(12), "int4(group=12)"),
    "integers": (lambda: integers(15), "int8(group=15)"),
    "blocks": (lambda: blocks(5), "float8_e4m3fn(group=(5,12))"),
    "blocks as text": (lambda: blocks(7, text=True), "float8_e4m3fn(group=(7,12))"),
    "gptq": (lambda: gptq(24), "int4(group=24,scale=float16)"),
    "gptq with g_idx": (lambda: gptq(20, index=True), "int4(group=20,scale=float16)"),
    "awq": (lambda: awq(12), "int4(group=12,scale=float16)"),
    "torchao": (lambda: torchao(12), "int4(group=12,scale=bfloat16,zero_point=float)"),
}
DEFAULT = ("packed", "blocks")


def stored(path: Path, name: str) -> tuple[Path, np.ndarray]:
    tensors, config, values = CASES[name][0]()
    metadata = {"tensor_names": json.dumps(["m.weight"]), "m.weight": RECORD} if name == "torchao" else None
    return folder_of(path, tensors, config, metadata), values


def test_the_size_of_groups_is_that_of_the_file(tmp_path: Path) -> None:
    for name, (_, text) in CASES.items():
        q = load_checkpoint(stored(tmp_path / name, name)[0])["m.weight"]
        assert q.spec == jc.Spec(text), (name, str(q.spec))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in CASES])
def test_numbers_of_groups_that_do_not_divide(tmp_path: Path, name: str) -> None:
    """Read, and written by each layout: the same numbers, or an error when it is saved."""
    folder, values = stored(tmp_path / "m", name)
    q = load_checkpoint(folder)["m.weight"]
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), values)
    for layout in ("compressed-tensors", "gptq", "awq", "torchao", "fp8", "jchop"):
        target = tmp_path / layout
        try:
            save_checkpoint(target, {"m.weight": q}, layout)
        except ValueError as error:
            assert "\n" not in str(error) and "cannot be written in the layout" in str(error)
            continue
        again = load_checkpoint(target)["m.weight"]
        assert (again.spec, again.nbytes) == (q.spec, q.nbytes)
        jax.tree.map(np.testing.assert_array_equal, again, q)
    refused = {"packed": "12 do not divide its last axis of 20", "integers": "15 do not divide its last axis of 20"}
    if name in refused:
        with pytest.raises(ValueError, match=refused[name]):
            save_checkpoint(tmp_path / "other", {"m.weight": q}, "compressed-tensors")


def test_scales_that_contradict_the_configuration(tmp_path: Path) -> None:
    rows = ((4, r"\[4, 2\] do not divide .* \[4, 20\] into groups of \[1, 4\]"), (0, "must be an integer above zero"))
    for number, (size, said) in enumerate(rows):
        tensors, config, _ = packed(10)
        config["config_groups"]["group_0"]["weights"]["group_size"] = size
        with pytest.raises(ValueError, match=said):
            load_checkpoint(folder_of(tmp_path / str(number), tensors, config))
    tensors, config, _ = packed(10)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = group | {"weights": group["weights"] | {"group_size": 12}}
    with pytest.raises(ValueError, match=r"groups of \[\(1, 10\), \(1, 12\)\] fit; a group with the module's name"):
        load_checkpoint(folder_of(tmp_path, tensors, config))
    group["targets"] = ["m"]
    assert str(load_checkpoint(folder_of(tmp_path, tensors, config))["m.weight"].spec) == "int4(group=10)"


def test_one_group_of_more_columns_than_there_are(tmp_path: Path) -> None:
    """It is a scale for each row, which every layout holds."""
    codes = np.arange(64, dtype=np.uint8).reshape(32, 2) * 3  # four codes of two bits
    q = QArray(codes, np.ones((32, 1), np.float16), None, jc.Spec("int4(group=128,scale=float16)"), 4, np.dtype("f4"))
    for layout in ("compressed-tensors", "awq", "torchao"):
        save_checkpoint(tmp_path / layout, {"m.weight": q}, layout)
        again = load_checkpoint(tmp_path / layout)["m.weight"]
        np.testing.assert_array_equal(again.qvalue, q.qvalue)
        assert again.spec == jc.Spec("int4(channel=-2,scale=float16)")


def test_a_file_without_a_configuration_holds_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tree = load_checkpoint(stored(tmp_path / "m", "blocks")[0])
    with pytest.raises(ValueError, match=r"into blocks of a known size; a folder has a configuration"):
        save_checkpoint(path, tree, "compressed-tensors")
    path.write_bytes(pack_file(blocks(5)[0], {}))
    with pytest.raises(ValueError, match="into blocks of a known size"):
        load_checkpoint(path)
    codes = np.frombuffer(sum(16 << 5 * i for i in range(6)).to_bytes(4, "little"), np.uint8)  # a word of zeros
    one = QArray(codes[None], np.ones((1, 1), np.float32), None, jc.Spec("int5(channel=-2)"), 6, np.dtype("f4"))
    with pytest.raises(ValueError, match=r"may be codes of \[2, 3, 4, 5\] bits.*a folder has a configuration"):
        save_checkpoint(path, {"m.weight": one}, "compressed-tensors")
    save_checkpoint(tmp_path / "one", {"m.weight": one}, "compressed-tensors")
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "one")["m.weight"].qvalue, one.qvalue)


# -- words with spare bits ---------------------------------------------------------------------------------------------


def with_spare_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words of int32 with as many whole codes as fit in each."""
    each = 32 // bits
    full = np.zeros((codes.shape[0], -(-codes.shape[1] // each) * each), np.uint32)
    full[:, : codes.shape[1]] = codes
    shifts = np.arange(each, dtype=np.uint32) * np.uint32(bits)
    return (full.reshape(codes.shape[0], -1, each) << shifts).sum(-1, dtype=np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("bits", "columns"),
    [
        pytest.param(bits, columns, marks=[pytest.mark.slow] * ((bits, columns) not in ((7, 64), (3, 20), (5, 4))))
        for bits in (3, 5, 6, 7)
        for columns in (64, 20, 4)
    ],
)
def test_words_with_spare_bits(tmp_path: Path, bits: int, columns: int) -> None:
    """The forms before and after version 0.18 hold the same codes and zero points, also where lengths do not tell."""
    rng, found = np.random.default_rng(bits), []
    codes, zero = rng.integers(0, 1 << bits, (40, columns)), rng.integers(0, 1 << bits, (40, 1))
    for version, pack in (("0.17.1", with_spare_bits), ("0.18.0", words)):
        tensors = {"m.weight_packed": pack(codes, bits), "m.weight_shape": np.array(codes.shape)}
        tensors |= {"m.weight_scale": np.ones((40, 1), np.float32)}
        tensors["m.weight_zero_point"] = np.ascontiguousarray(pack(zero.T, bits).T)
        config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=False, strategy="channel")
        found.append(load_checkpoint(folder_of(tmp_path, tensors, config | {"version": version}))["m.weight"])
        if columns == 64:  # the number of words tells
            found.append(load_checkpoint(folder_of(tmp_path, tensors, config))["m.weight"])
    for q in found:
        np.testing.assert_array_equal(q.zero_point, zero)
        assert q.spec == jc.Spec(f"uint{bits}(channel=-2,zero_point=integer)")
        bitstream = sum(codes[0].astype(object) << bits * np.arange(columns).astype(object))
        assert int.from_bytes(np.asarray(q.qvalue)[0].tobytes(), "little") == bitstream
        jax.tree.map(np.testing.assert_array_equal, q, found[0])
    save_checkpoint(tmp_path / "new", {"m.weight": q}, "compressed-tensors")
    np.testing.assert_array_equal(
        read_file(tmp_path / "new/model.safetensors")[0]["m.weight_packed"], words(codes, bits)
    )


def test_widths_that_words_do_not_have(tmp_path: Path) -> None:
    codes = RNG.integers(0, 256, (4, 64))
    tensors = {"m.weight_packed": words(codes, 8), "m.weight_scale": np.ones((4, 1), np.float32)}
    tensors["m.weight_shape"] = np.array(codes.shape)
    for bits in (1, 4, 6, 9):
        config = compressed("pack-quantized", num_bits=bits, type="int", strategy="channel")
        with pytest.raises(ValueError, match=f"16 words for 64 columns are no codes .* names {bits}$"):
            load_checkpoint(folder_of(tmp_path, tensors, config))
    path = tmp_path / "alone.safetensors"
    path.write_bytes(pack_file(tensors, {}))
    assert load_checkpoint(path)["m.weight"].spec == jc.Spec("int8(channel=-2)")  # no word has spare bits
    path.write_bytes(pack_file(tensors | {"m.weight_packed": with_spare_bits(codes % 128, 7)}, {}))
    with pytest.raises(ValueError, match=r"may be codes of \[7, 8\] bits"):
        load_checkpoint(path)


@pytest.mark.parametrize("bits", [pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_zero_point_for_the_whole_tensor(tmp_path: Path, bits: int) -> None:
    """It is one int8 number, not packed; the numbers are s (c - z) of signed codes c."""
    codes = RNG.integers(0, 1 << bits, (6, 16))
    tensors = {"m.weight_packed": words(codes, bits), "m.weight_shape": np.array(codes.shape)}
    tensors |= {"m.weight_scale": np.full(1, 0.5, np.float32), "m.weight_zero_point": np.array([-3], np.int8)}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=False, strategy="tensor")
    q = load_checkpoint(folder_of(tmp_path / "m", tensors, config))["m.weight"]
    wanted = ((codes - (1 << bits - 1)) + 3).astype(np.float32) / 2
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), wanted)
    save_checkpoint(tmp_path / "again", {"m.weight": q}, "compressed-tensors")
    again, _ = read_file(tmp_path / "again/model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)


# -- scales that are powers of two -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["e8m0", pytest.param("bytes", marks=pytest.mark.slow), "compressed-tensors"])
def test_scales_that_are_powers_of_two(tmp_path: Path, form: str) -> None:
    """e8m0 in the file stays e8m0 in the QArray, and is written so again."""
    weight, powers = bytes8(RNG, (130, 4)), np.array([[-3], [2]])
    scale = (powers + 127).astype(np.uint8)
    config: dict[str, Any] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    name = "m.weight_scale" if form == "compressed-tensors" else "m.weight_scale_inv"
    if form == "compressed-tensors":
        config = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    tensors = {"m.weight": weight, name: scale if form == "bytes" else scale.view(E8M0)}
    q = load_checkpoint(folder_of(tmp_path / "m", tensors, config))["m.weight"]
    wanted = np.ldexp(weight.astype(np.float32), np.repeat(powers, 128, 0)[:130])
    np.testing.assert_array_equal(np.asarray(jc.dequantize(q)), wanted)
    assert q.spec.scaled.scale == jc.formats.float8_e8m0fnu  # type: ignore[union-attr]
    save_checkpoint(tmp_path / "again", {"m.weight": q}, "fp8")
    config = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0"
    again = load_checkpoint(tmp_path / "again")["m.weight"]
    assert again.spec == q.spec
    jax.tree.map(np.testing.assert_array_equal, again, q)
    nan = {"m.weight": weight, name: np.full((2, 1), 255, np.uint8).view(E8M0)}
    with pytest.raises(ValueError, match="a scale is infinite or NaN"):
        load_checkpoint(folder_of(tmp_path / "m", nan, config if form != "compressed-tensors" else {}))
    assert np.dtype(F8).itemsize == 1


# -- fields of modules: AutoRound's extra_config, GPTQModel's dynamic --------------------------------------------------


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("key", ["m", r".*m.*", "+:^m$"])
def test_fields_of_a_module(tmp_path: Path, layout: str, key: str) -> None:
    """A module with other bits, and groups whose last is smaller, without the groups of columns in a tensor."""
    bits = 4 if layout == "awq" else 8
    tensors: Tensors = {}
    expected = {}
    for name, width, size, columns in (("a", 4, 64, 128), ("m", bits, 96, 160)):
        shape, count = (32, columns), -(-columns // size)
        codes, zero = RNG.integers(0, 1 << width, shape), RNG.integers(1, 1 << width, (count, 32))
        scale = RNG.uniform(1, 2, (count, 32)).astype(np.float16)
        rows = [repeated(part.T, (1, size), shape) for part in (scale, zero)]
        expected[name] = (codes - rows[1]) * rows[0]
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7]) if layout == "awq" else None
        stored = zero - (layout == "gptq")
        if order is not None:
            codes, stored = (part.reshape(-1, 8)[:, order].reshape(part.shape) for part in (codes.T, stored))
        parts = {"qweight": words(codes, width) if layout == "awq" else words(codes.T.T, width).T}
        parts |= {"qzeros": words(stored, width), "scales": scale}
        tensors |= {f"{name}.{end}": np.ascontiguousarray(part) for end, part in parts.items()}
    form = {"gptq": "auto_gptq", "gptq_v2": "gptqmodel", "awq": "auto_awq"}[layout]
    fields = {key: {"bits": bits, "group_size": 96}, "z": {"bits": 2, "group_size": 32}, r"-:b.*": {}}
    config = {"quant_method": "auto-round", "packing_format": f"auto_round:{form}", "bits": 4, "group_size": 64}
    tree = jc.load_checkpoint(folder_of(tmp_path / "m", tensors, config | {"extra_config": fields}))
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(jc.dequantize(tree[f"{name}.weight"])), values)
    if layout != "awq":
        config |= {"quant_method": "gptq", "checkpoint_format": layout, "dynamic": fields}
        tree = jc.load_checkpoint(folder_of(tmp_path / "dynamic", tensors, config))
        np.testing.assert_array_equal(np.asarray(jc.dequantize(tree["m.weight"])), expected["m"])
    wrong = config | {"extra_config": {"m": {"bits": bits, "group_size": 32}}, "dynamic": {}}
    with pytest.raises(ValueError, match="groups of"):
        jc.load_checkpoint(folder_of(tmp_path / "wrong", tensors, wrong))
