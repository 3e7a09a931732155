"""Checkpoints with arrays that cannot be read: they are named, and the others are given, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_layouts import CASES, F8, GGUF_COUNTS, gguf_blocks, gguf_file, gguf_values, write_folder

import jchop as jc
from jchop import QArray, load_checkpoint, save_checkpoint

RNG = np.random.default_rng(0)
BAD = np.full((4, 4), 3, np.int8)


def beside(path: Path, name: str, **other: np.ndarray) -> None:
    """A readable weight of a case, ``w.weight``, beside tensors of ``v``."""
    case = CASES[name]
    tensors = {f"v.{part}": array for part, array in other.items()} | {"norm.weight": np.ones(3, np.float32)}
    write_folder(path, case.make(np.random.default_rng(0)) | tensors, case)


def another_layout(path: Path) -> None:
    beside(path, "nf4", weight=BAD, SCB=np.ones(4, np.float32), bias=np.ones(4, np.float32))


def no_row(path: Path) -> None:
    beside(path, "gptq", qweight=BAD, bias=np.ones(4, np.float32))


def bad_shape(path: Path) -> None:
    packed = {"weight_packed": np.ones((4, 1), np.int32), "weight_scale": np.ones((4, 1), np.float32)}
    beside(path, "int4 symmetric", **packed, weight_shape=np.array([4, -1]), bias=np.ones(4, np.float32))


def bad_scale(path: Path) -> None:
    scale = np.full((1, 1), np.nan, np.float32)
    beside(path, "fp8", weight=np.ones((4, 4), F8), weight_scale_inv=scale, bias=np.ones(4, np.float32))


def pair(path: Path) -> None:
    beside(path, "awq", weight=BAD, qscale_weight=np.ones(4, np.float32), bias=np.ones(4, np.float32))


def no_record(path: Path) -> None:
    beside(path, "torchao float8", _weight_qdata=BAD, _weight_scale=np.ones(4, np.float32), bias=np.ones(4, np.float32))


def own(path: Path) -> None:
    zeros = QArray(
        np.zeros((2, 2), np.int8), np.ones((2, 1), np.float32), None, jc.Spec("int8(channel=-2)"), 2, np.dtype("f4")
    )
    file = path / "model.safetensors"
    path.mkdir(exist_ok=True)
    tree = {"w": {"weight": zeros}, "v": {"weight": zeros, "bias": jnp.ones(4)}, "norm": {"weight": jnp.ones(3)}}
    jc.save(file, tree)
    file.write_bytes(file.read_bytes().replace(b"int8(", b"intx(", 1))  # the spec of v, which comes first


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another layout": (another_layout, "llm_int8"),
    "no row": (no_row, "form no weight of the layout gptq"),
    "a bad shape": (bad_shape, "the shape must be two integers"),
    "a bad scale": (bad_scale, "a scale is infinite or NaN"),
    "a pair": (pair, "Mistral, which is not read"),
    "no record": (no_record, "no record of 'v.weight'"),
    "own": (own, "bad metadata"),
}


@pytest.mark.parametrize("name", FILES)
def test_one_weight_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    make, said = FILES[name]
    make(tmp_path)
    with pytest.raises(ValueError, match=rf"{said}.*; strict=False reads the other arrays") as error:
        load_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.warns(RuntimeWarning, match=rf"'v\.weight' is not read: .*{said}"):
        tree = load_checkpoint(tmp_path, strict=False)
    assert set(tree) == {"w.weight", "norm.weight", "v.bias"} and isinstance(tree["w.weight"], QArray)
    skipped = load_checkpoint(tmp_path, skip="v")
    assert set(skipped) == {"w.weight", "norm.weight"}
    np.testing.assert_array_equal(skipped["w.weight"].qvalue, tree["w.weight"].qvalue)


def test_codes_without_a_configuration_beside_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, {"l.weight": BAD, "l.qscale_weight": np.ones(4, "f4"), "n": np.ones(2)}, "plain")
    with pytest.warns(RuntimeWarning, match=r"'l\.weight' is not read: .*layout='plain' reads every tensor as it is"):
        assert set(load_checkpoint(path, strict=False)) == {"n"}


def test_types_of_gguf_that_are_not_read(tmp_path: Path) -> None:
    """A type without a reader, and one that is not known, of which not even the bytes are."""
    path = tmp_path / "x.gguf"
    plain = (0, (2, 4), np.arange(8, dtype=np.float32).tobytes())
    path.write_bytes(
        gguf_file({"a": plain, "b": (16, (2, 256), bytes(132)), "c": (77, (2, 32), bytes(64)), "d": plain})
    )
    with pytest.raises(ValueError, match=r"tensor 'b' is IQ2_XXS, which jchop does not read.*; strict=False"):
        load_checkpoint(path)
    with pytest.warns(RuntimeWarning, match="'b' is not read: .*, and 1 more: 'c'"):
        tree = load_checkpoint(path, strict=False)
    assert list(tree) == ["a", "d"]
    np.testing.assert_array_equal(tree["d"], np.arange(8, dtype=np.float32).reshape(2, 4))
    with pytest.raises(ValueError, match="tensor 'c' is type 77, which jchop does not read"):
        load_checkpoint(path, skip="b")
    assert set(load_checkpoint(path, skip="{b,c}")) == {"a", "d"}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (8, (2, 3)),
        *[
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((2, (2, 3)), (12, (2, 2, 3)), (14, (1, 3)), (39, (2, 3)))
        ],
    ],
)
def test_weights_of_any_number_of_axes_in_gguf(tmp_path: Path, kind: int, shape: tuple[int, ...]) -> None:
    """Experts, as (experts, out, in), are one QArray, and are written again."""
    count = 2 * GGUF_COUNTS[kind]
    raw = gguf_blocks(kind, RNG, int(np.prod(shape)), 2)
    path = tmp_path / "moe.gguf"
    path.write_bytes(gguf_file({"e": (kind, (*shape, count), raw.tobytes()), "n": (0, (3,), bytes(12))}))
    tree = load_checkpoint(path)
    assert tree["e"].shape == (*shape, count)
    np.testing.assert_array_equal(np.asarray(jc.dequantize(tree["e"])), gguf_values(kind, raw).reshape(*shape, count))
    if kind < 12:
        save_checkpoint(tmp_path / "again.gguf", tree, "gguf")
        again = load_checkpoint(tmp_path / "again.gguf")["e"]
        assert again.spec == tree["e"].spec
        np.testing.assert_array_equal(again.qvalue, tree["e"].qvalue)


def test_the_reason_for_8_bit_weights_of_bitsandbytes(tmp_path: Path) -> None:
    """Their configuration names a type of 4 bits, too, which says nothing about them."""
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    config |= {"bnb_4bit_quant_type": "fp4"}
    save_checkpoint(tmp_path / "model.safetensors", {"v.weight": BAD, "v.SCB": np.ones(4, "f4")}, "plain")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert str(load_checkpoint(tmp_path)["v.weight"].spec) == "int8(channel=-2)"
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": config | {"load_in_8bit": False, "load_in_4bit": True}})
    )
    with pytest.raises(ValueError, match="_type='fp4'"):
        load_checkpoint(tmp_path)
