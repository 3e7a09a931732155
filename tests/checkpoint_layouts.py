"""The layouts of checkpoints in NumPy, from their definitions: random tensors of each, and the numbers they mean.

Nothing of jchop is imported. Every number is a product (and a sum) in float32, as the definitions have it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
F8, E8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
DTYPES = {
    "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F16": np.float16,
    "U32": np.uint32, "BF16": BF16, "F32": np.float32, "F8_E4M3": F8, "F8_E8M0": E8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout: random tensors of a weight ``w.weight``, their numbers, and what stands beside them."""

    layout: str
    make: Callable[[np.random.Generator], Tensors]
    values: Callable[[Tensors], np.ndarray]
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    writes: str | None = None  # a spec of jchop that can be written


# -- files -------------------------------------------------------------------------------------------------------------


def pack_file(tensors: Tensors, metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read_file(path: Path) -> tuple[Tensors, dict[str, str]]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, end = (8 + length + at for at in entry["data_offsets"])
        found[name] = np.frombuffer(data[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found, metadata


def write_folder(folder: Path, tensors: Tensors, case: Case) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(pack_file(tensors, case.metadata))
    if case.config:
        (folder / "config.json").write_text(json.dumps({"quantization_config": case.config}))


# -- bits --------------------------------------------------------------------------------------------------------------


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as rows of int32: one big integer a row, lowest bits first."""
    count = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << bits * i for i, code in enumerate(row)) for row in codes]
    return np.array([[row >> 32 * i & 0xFFFFFFFF for i in range(count)] for row in rows], np.uint32).view(np.int32)


def codes_of(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    rows = [
        sum(int(word) << 32 * i for i, word in enumerate(row)) for row in np.ascontiguousarray(packed).view(np.uint32)
    ]
    return np.array([[row >> bits * i & (1 << bits) - 1 for i in range(count)] for row in rows], np.int64)


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, n in enumerate(shape):
        scale = np.repeat(scale, -(-n // scale.shape[axis]), axis).take(range(n), axis)
    return scale


def halves(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float16) -> np.ndarray:
    """Scales of both signs, and a zero."""
    scale = (rng.standard_normal(shape) * 0.1).astype(dtype)
    scale.flat[1] = 0
    return scale


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def packed_case(bits: int, group: int, symmetric: bool, order: bool = False, dtype: Any = BF16) -> Case:
    out, columns = 6, 70 if group == 70 else 96

    def make(rng: np.random.Generator) -> Tensors:
        codes = rng.integers(0, 1 << bits, (out, columns))
        tensors = {
            "w.weight_packed": words(codes, bits),
            "w.weight_scale": halves(rng, (out, columns // group), dtype),
            "w.weight_shape": np.array([out, columns], np.int64),
        }
        if not symmetric:
            zero = rng.integers(0, 1 << bits, (out, columns // group))
            tensors["w.weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        if order:
            tensors["w.weight_g_idx"] = rng.permutation(np.arange(columns) // group).astype(np.int32)
        return tensors

    def values(t: Tensors) -> np.ndarray:
        rows, count = (int(n) for n in t["w.weight_shape"])
        half, scale = 1 << bits - 1, t["w.weight_scale"].astype(np.float32)
        codes, zero = codes_of(t["w.weight_packed"], bits, count) - half, np.zeros(scale.shape)
        if "w.weight_zero_point" in t:
            zero = codes_of(t["w.weight_zero_point"].T, bits, rows).T - half
        index = t.get("w.weight_g_idx", np.arange(count) // (count // scale.shape[1]))
        return (codes - zero[:, index]).astype(np.float32) * scale[:, index]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    zero = "" if symmetric else ",zero_point=integer"
    spec = f"{'' if symmetric else 'u'}int{bits}(group={group},scale=bfloat16{zero})"
    return Case("compressed-tensors", make, values, config, writes=None if order else spec)


def values_nvfp4(t: Tensors) -> np.ndarray:
    scale = t["w.weight_scale"].astype(np.float32) / t["w.weight_global_scale"].astype(np.float32)
    elements = E2M1[nibbles(t["w.weight_packed"])]
    return elements * spread(scale, elements.shape)


def make_nvfp4(rng: np.random.Generator, whole: float = 517.25) -> Tensors:
    scale = np.abs(rng.standard_normal((3, 4)) * 50).astype(F8)
    scale.view(np.uint8)[0, :3] = (0, 3, 0x7E)
    return {
        "w.weight_packed": rng.integers(0, 256, (3, 32), np.uint8),
        "w.weight_scale": scale,
        "w.weight_global_scale": np.array([whole], np.float32),
    }


def make_mxfp4(rng: np.random.Generator) -> Tensors:
    return {
        "w.weight_packed": rng.integers(0, 256, (3, 32), np.uint8),
        "w.weight_scale": np.array([[120, 130], [0, 1], [250, 127]], np.uint8),
    }


def values_mx(t: Tensors) -> np.ndarray:
    elements = E2M1[nibbles(t["w.weight_packed"])] if "w.weight_packed" in t else t["w.weight"].astype(np.float32)
    return elements * spread(np.ldexp(np.float32(1), t["w.weight_scale"].astype(np.int32) - 127), elements.shape)


def bytes8(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, codes & 254, codes).astype(np.uint8).view(F8)


def float8_case(
    scales: tuple[int, int], shape: tuple[int, int], layout: str, spec: str | None, block: int | None = None
) -> Case:
    name = "w.weight_scale_inv" if layout == "fp8" else "w.weight_scale"

    def make(rng: np.random.Generator) -> Tensors:
        return {
            "w.weight": bytes8(rng, shape),
            name: halves(rng, scales, np.float32) if scales != (1, 1) else np.array([0.3], BF16),
        }

    def values(t: Tensors) -> np.ndarray:
        scale, codes = t[name].astype(np.float32), t["w.weight"].astype(np.float32)
        scale = scale.reshape(1, 1) if scale.size == 1 else scale
        for axis, n in enumerate(codes.shape):
            size = block or -(-n // scale.shape[axis])
            scale = np.repeat(scale, size, axis).take(range(n), axis)
        return codes * scale

    return Case(layout, make, values, {"quant_method": layout} if layout == "fp8" else {}, writes=spec)


def make_int8(rng: np.random.Generator) -> Tensors:
    return {
        "w.weight": rng.integers(-128, 128, (4, 10), np.int8),
        "w.weight_scale": halves(rng, (4, 1), np.float32),
        "w.weight_zero_point": rng.integers(-128, 128, (4, 1), np.int8),
    }


def values_int8(t: Tensors) -> np.ndarray:
    zero = t.get("w.weight_zero_point", np.zeros((1, 1))).astype(np.float32)
    return (t["w.weight"].astype(np.float32) - zero) * t["w.weight_scale"].astype(np.float32)


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------


def gptq_case(bits: int, version: int, order: bool = False) -> Case:
    rows, out, group = 64, 32, 32

    def make(rng: np.random.Generator) -> Tensors:
        index = np.arange(rows) // group
        return {
            "w.qweight": np.ascontiguousarray(words(rng.integers(0, 1 << bits, (out, rows)), bits).T),
            "w.qzeros": words(rng.integers(0, 1 << bits, (rows // group, out)), bits),
            "w.scales": halves(rng, (rows // group, out)),
            "w.g_idx": (rng.permutation(index) if order else index).astype(np.int32),
        }

    def values(t: Tensors) -> np.ndarray:
        codes = codes_of(t["w.qweight"].T, bits, t["w.g_idx"].size).T
        zero = codes_of(t["w.qzeros"], bits, out) + (version == 1)
        index = t["w.g_idx"]
        return ((codes - zero[index]).astype(np.float32) * t["w.scales"].astype(np.float32)[index]).T

    name = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "checkpoint_format": name}
    return Case(name, make, values, config, writes=None if order else f"int{bits}(group=32,scale=float16)")


def make_awq(rng: np.random.Generator) -> Tensors:
    whole = np.iinfo(np.int32)
    return {
        "w.qweight": rng.integers(whole.min, whole.max, (64, 2), np.int32, endpoint=True),
        "w.qzeros": rng.integers(whole.min, whole.max, (2, 2), np.int32, endpoint=True),
        "w.scales": halves(rng, (2, 16)),
    }


def values_awq(t: Tensors) -> np.ndarray:
    def unpacked(packed: np.ndarray) -> np.ndarray:
        codes = np.zeros((packed.shape[0], packed.shape[1] * 8), np.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            codes[:, column::8] = packed.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
        return codes

    size = t["w.qweight"].shape[0] // t["w.scales"].shape[0]
    zero, scale = (np.repeat(x, size, 0) for x in (unpacked(t["w.qzeros"]), t["w.scales"].astype(np.float32)))
    return ((unpacked(t["w.qweight"]) - zero).astype(np.float32) * scale).T


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def bnb_case(shape: tuple[int, ...], size: int, nested: bool, spec: str | None = None) -> Case:
    state_name, blocks = "w.weight.quant_state.bitsandbytes__nf4", -(-math.prod(shape) // size)

    def make(rng: np.random.Generator) -> Tensors:
        state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": list(shape)}
        tensors = {
            "w.weight": rng.integers(0, 256, (-(-math.prod(shape) // 2), 1), np.uint8),
            "w.weight.absmax": np.abs(rng.standard_normal(blocks)).astype(np.float32),
            "w.weight.quant_map": NF4,
        }
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7390625}
            table = np.sort(rng.standard_normal(256) * 0.2).astype(np.float32)
            tensors |= {"w.weight.absmax": rng.integers(0, 256, blocks, np.uint8), "w.weight.nested_quant_map": table}
            tensors["w.weight.nested_absmax"] = np.array([0.4], np.float32)
        return tensors | {state_name: np.frombuffer(json.dumps(state).encode(), np.uint8)}

    def values(t: Tensors) -> np.ndarray:
        state = json.loads(t[state_name].tobytes())
        absmax = t["w.weight.absmax"]
        if "w.weight.nested_absmax" in t:
            absmax = t["w.weight.nested_quant_map"][absmax] * t["w.weight.nested_absmax"][0] + np.float32(
                state["nested_offset"]
            )
        flat = t["w.weight"].reshape(-1)
        levels = t["w.weight.quant_map"][np.stack([flat >> 4, flat & 15], -1).reshape(-1)[: math.prod(state["shape"])]]
        return (levels * absmax.reshape(-1)[np.arange(levels.size) // state["blocksize"]]).reshape(state["shape"])

    return Case("bitsandbytes", make, values, {"quant_method": "bitsandbytes", "load_in_4bit": True}, writes=spec)


# -- torchao -----------------------------------------------------------------------------------------------------------


def torchao_case(kind: str, data: dict[str, Any], make: Callable[..., Tensors], values: Any, spec: str) -> Case:
    record = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]})
    return Case("torchao", make, values, {}, {"tensor_names": json.dumps(["w.weight"]), "w.weight": record}, spec)


def make_intx(rng: np.random.Generator) -> Tensors:
    return {
        "w._weight_qdata": rng.integers(-8, 8, (4, 64), np.int8),
        "w._weight_scale": halves(rng, (4, 2), np.float32),
        "w._weight_zero_point": rng.integers(-8, 8, (4, 2), np.int8),
    }


def values_intx(t: Tensors) -> np.ndarray:
    codes, scale = t["w._weight_qdata"].astype(np.float32), t["w._weight_scale"].astype(np.float32)
    zero = t.get("w._weight_zero_point", np.zeros(scale.shape)).astype(np.float32)
    return (codes - spread(zero, codes.shape)) * spread(scale, codes.shape)


def make_ao8(rng: np.random.Generator) -> Tensors:
    return {"w._weight_qdata": bytes8(rng, (4, 64)), "w._weight_scale": halves(rng, (4, 1), np.float32)}


def make_int4(rng: np.random.Generator) -> Tensors:
    return {
        "w._weight_qdata": rng.integers(-128, 128, (4, 32), np.int8),
        "w._weight_scale": np.abs(halves(rng, (2, 4), BF16)),
        "w._weight_zero_point": halves(rng, (2, 4), BF16),
    }


def values_int4(t: Tensors) -> np.ndarray:
    codes = nibbles(t["w._weight_qdata"].view(np.uint8)).astype(np.int8)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.float64)
    scale, zero = (spread(t[f"w._weight_{part}"].T.astype(np.float64), codes.shape) for part in ("scale", "zero_point"))
    return (codes * scale + zero).astype(np.float32)  # exact in float64, rounded once


def make_modelopt_nvfp4(rng: np.random.Generator, whole: float = 0.0123) -> Tensors:
    parts = make_nvfp4(rng, whole)
    return {
        "w.weight": parts["w.weight_packed"],
        "w.weight_scale": parts["w.weight_scale"],
        "w.weight_scale_2": parts["w.weight_global_scale"].reshape(()),
    }


def values_modelopt_nvfp4(t: Tensors) -> np.ndarray:
    scale = t["w.weight_scale"].astype(np.float32) * t["w.weight_scale_2"]
    return E2M1[nibbles(t["w.weight"])] * spread(scale, (3, 64))


def make_modelopt_blocks(rng: np.random.Generator) -> Tensors:
    scale = np.abs(halves(rng, (2, 1, 3, 1), np.float32))
    return {"w.weight": bytes8(rng, (130, 300)), "w.weight_scale": scale}


def values_modelopt_blocks(t: Tensors) -> np.ndarray:
    scale = t["w.weight_scale"].reshape(2, 3).repeat(128, 0)[:130].repeat(128, 1)[:, :300]
    return t["w.weight"].astype(np.float32) * scale


def mlx_case(bits: int, group: int, dtype: Any = np.float16) -> Case:
    out, columns = 3, 2 * group

    def make(rng: np.random.Generator) -> Tensors:
        codes = rng.integers(0, 1 << bits, (out, columns))
        scales = halves(rng, (out, 2), dtype)
        edges = scales.astype(np.float32) * rng.integers(1 - (1 << bits), 2, (out, 2))  # as its own scales have them
        return {
            "w.weight": words(codes, bits).view(np.uint32), "w.scales": scales, "w.biases": edges.astype(dtype),
        }  # fmt: skip

    def values(t: Tensors) -> np.ndarray:
        scale, bias = (spread(t[name].astype(np.float32), (out, columns)) for name in ("w.scales", "w.biases"))
        return codes_of(t["w.weight"], bits, columns).astype(np.float32) * scale + bias

    return Case("mlx", make, values, {"bits": bits, "group_size": group})


def mlx_mode_case(mode: str) -> Case:
    bits, group = (8 if mode == "mxfp8" else 4), (16 if mode == "nvfp4" else 32)

    def make(rng: np.random.Generator) -> Tensors:
        codes = rng.integers(0, 16, (3, 64)).astype(np.uint8)
        codes = bytes8(rng, (3, 64)).view(np.uint8) if bits == 8 else codes
        scales = rng.integers(0, 127, (3, 64 // group)).astype(np.uint8)
        return {"w.weight": words(codes, bits).view(np.uint32), "w.scales": scales}

    def values(t: Tensors) -> np.ndarray:
        codes, stored = codes_of(t["w.weight"], bits, 64).astype(np.uint8), t["w.scales"]
        scale = (
            stored.view(F8).astype(np.float32) if mode == "nvfp4" else np.ldexp(np.float32(1), stored.astype(int) - 127)
        )
        return (codes.view(F8).astype(np.float32) if bits == 8 else E2M1[codes]) * spread(scale, (3, 64))

    return Case("mlx", make, values, {"bits": bits, "group_size": group, "mode": mode})


def deepseek_v4_case(scale: str, expert: bool) -> Case:
    shape = (3, 64) if expert else (130, 260)

    def make(rng: np.random.Generator) -> Tensors:
        exponents = rng.integers(100, 150, (3, 2) if expert else (2, 3)).astype(np.uint8).view(E8)
        weight = rng.integers(-128, 128, (3, 32)).astype(np.int8) if expert else bytes8(rng, shape)
        return {"w.weight": weight, f"w.{scale}": exponents}

    def values(t: Tensors) -> np.ndarray:
        weight, factors = t["w.weight"], t[f"w.{scale}"].astype(np.float32)
        if expert:
            return E2M1[nibbles(weight.view(np.uint8))] * np.repeat(factors, 32, 1)
        return weight.astype(np.float32) * np.repeat(np.repeat(factors, 128, 0)[:130], 128, 1)[:, :260]

    return Case("fp8", make, values, {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})


def make_llm_int8(rng: np.random.Generator) -> Tensors:
    most = np.abs(rng.standard_normal(4)).astype(np.float32)
    codes = rng.integers(-127, 128, (4, 6)).astype(np.int8)
    return {"w.weight": codes, "w.SCB": most, "w.weight_format": np.zeros((), np.uint8)}


def values_llm_int8(t: Tensors) -> np.ndarray:
    return t["w.weight"].astype(np.float32) * (t["w.SCB"] * np.float32(1 / 127))[:, None]


HQQ_PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def hqq_case(bits: int, axis: int, size: int | None, dtype: Any = np.float16) -> Case:
    """By the loops of `hqq/core/bitpack.py`: parts of the rows of groups, the first in the highest bits."""
    out, columns = 12, 64
    whole = size or (out, columns)[axis]
    rows = (whole, out * columns // whole) if axis == 0 else (out * columns // whole, whole)
    parts = 10 if bits == 3 else 8 // bits

    def make(rng: np.random.Generator) -> Tensors:
        codes = rng.integers(0, 1 << bits, rows).astype(np.uint32)
        codes = np.pad(codes, ((0, -rows[0] % parts), (0, 0))).reshape(parts, -1, rows[1])
        packed: Any = sum(part << np.uint32((parts - 1 - i) * bits) for i, part in enumerate(codes))
        stored = packed.view(np.int32) if bits == 3 else packed.astype(np.uint8)
        shape = (1, rows[1]) if axis == 0 else (rows[0], 1)
        facts = {"axis": axis, "nbits": bits} | ({"group_size": size} if size else {})
        tensors = {f"w.{name}": np.array(value, np.int32) for name, value in facts.items()}
        tensors |= {
            "w.packing": np.frombuffer(HQQ_PACKINGS[bits].encode(), np.uint8),
            "w.view_as_float": np.zeros((), np.uint8),
        }
        tensors |= {
            "w.scale": rng.uniform(0.01, 0.1, shape).astype(dtype),
            "w.zero": rng.normal(3, 2, shape).astype(dtype),
        }
        return tensors | {"w.W_q": stored, "w.shape": np.array([out, columns])}

    def values(t: Tensors) -> np.ndarray:
        words = t["w.W_q"].view(np.uint32 if bits == 3 else np.uint8)
        codes = np.concatenate([words >> (parts - 1 - i) * bits & ((1 << bits) - 1) for i in range(parts)])[: rows[0]]
        scale, zero = (t[f"w.{name}"].astype(np.float64) for name in ("scale", "zero"))
        return ((codes - zero) * scale).reshape(out, columns).astype(np.float32)

    return Case("hqq", make, values, {"quant_method": "hqq"})


_LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

CASES: dict[str, Case] = {
    "modelopt nvfp4": Case("modelopt", make_modelopt_nvfp4, values_modelopt_nvfp4, _MODELOPT),
    "modelopt nvfp4, power of two": Case(
        "modelopt", lambda rng: make_modelopt_nvfp4(rng, 2.0**-9), values_modelopt_nvfp4, _MODELOPT
    ),
    "modelopt nvfp4 without a configuration": Case("modelopt", make_modelopt_nvfp4, values_modelopt_nvfp4),
    "modelopt fp8 in blocks": Case(
        "modelopt", make_modelopt_blocks, values_modelopt_blocks, _MODELOPT | {"quant_algo": "FP8_PB_WO"}
    ),
    **{f"mlx {bits} bits": mlx_case(bits, 32) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx of bfloat16": mlx_case(4, 64, BF16),
    **{f"mlx {mode}": mlx_mode_case(mode) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "DeepSeek-V4 tiles": deepseek_v4_case("scale", False),
    "DeepSeek-V4 experts": deepseek_v4_case("scale", True),
    "DeepSeek experts": deepseek_v4_case("weight_scale_inv", True),
    "DeepSeek tiles of e8m0": deepseek_v4_case("weight_scale_inv", False),
    "hqq": hqq_case(4, 1, 32),
    "hqq of bfloat16": hqq_case(8, 1, None, BF16),
    "hqq in words": hqq_case(3, 1, 16),
    "hqq of columns": hqq_case(1, 0, 16),
    "hqq of whole columns": hqq_case(2, 0, None),
    "hqq in groups that cross rows": hqq_case(4, 1, 48),
    "LLM.int8": Case("llm_int8", make_llm_int8, values_llm_int8, _LLM_INT8),
    "int4 symmetric": packed_case(4, 32, True),
    "int4 asymmetric": packed_case(4, 32, False),
    "int4 asymmetric, one group": packed_case(4, 70, False),
    "int4 with g_idx": packed_case(4, 32, False, order=True),
    "int8 packed": packed_case(8, 48, True),
    "int8 packed asymmetric": packed_case(8, 48, False),
    "int3 packed": packed_case(3, 32, True, dtype=np.float32),
    "int-quantized": Case("compressed-tensors", make_int8, values_int8, writes="int8(channel=0)"),
    "float-quantized tensor": float8_case((1, 1), (4, 6), "compressed-tensors", "float8_e4m3fn(group=tensor)"),
    "float-quantized channel": float8_case((4, 1), (4, 6), "compressed-tensors", "float8_e4m3fn(channel=0)"),
    "float-quantized group": float8_case((4, 3), (4, 6), "compressed-tensors", "float8_e4m3fn(group=2)"),
    "float-quantized blocks": float8_case((3, 2), (300, 130), "compressed-tensors", None, 128),
    "nvfp4": Case("compressed-tensors", make_nvfp4, values_nvfp4),
    "nvfp4, power of two": Case("compressed-tensors", lambda rng: make_nvfp4(rng, 512.0), values_nvfp4),
    "mxfp4": Case("compressed-tensors", make_mxfp4, values_mx, writes="mxfp4"),
    "mxfp8": Case(
        "compressed-tensors",
        lambda rng: {"w.weight": bytes8(rng, (3, 64)), "w.weight_scale": make_mxfp4(rng)["w.weight_scale"] // 2},
        values_mx,
        writes="mxfp8_e4m3",
    ),
    "gptq": gptq_case(4, 1),
    "gptq 3 bits": gptq_case(3, 1),
    "gptq 8 bits": gptq_case(8, 1),
    "gptq act order": gptq_case(2, 1, order=True),
    "gptq_v2": gptq_case(4, 2),
    **{
        f"auto-round {number}": replace(
            case := gptq_case(4, number), writes=None,
            config=case.config | {"quant_method": "auto-round", "packing_format": f"auto_round:{form}"},
        )
        for number, form in ((1, "auto_gptq"), (2, "gptqmodel"))
    },
    "auto-round mxfp4": Case(
        "compressed-tensors", make_mxfp4, values_mx,
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "data_type": "mx_fp"},
    ),
    "awq": Case("awq", make_awq, values_awq, {"quant_method": "awq", "bits": 4}, writes="int4(group=32,scale=float16)"),
    "fp8": float8_case((2, 3), (130, 300), "fp8", "float8_e4m3fn(group=(128,128))", 128),
    "nf4": bnb_case((4, 128), 64, False, "nf4(group=64)"),
    "nf4 double": bnb_case((4, 128), 64, True),
    "nf4 blocks of rows": bnb_case((8, 32), 64, True),
    "nf4 blocks that cross rows": bnb_case((5, 96), 64, True),
    "nf4 less than a block": bnb_case((3, 7), 64, False),
    "nf4 odd rows": bnb_case((11, 7), 64, False),
    "nf4 experts": bnb_case((2, 4, 96), 32, True),
    "nf4 experts in blocks of rows": bnb_case((2, 4, 32), 64, False),
    "nf4 experts of odd rows": bnb_case((2, 4, 7), 64, False),
    "torchao int4 by 8": torchao_case(
        "IntxUnpackedToInt8Tensor",
        {"block_size": [1, 32], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}},
        make_intx, values_intx, "int4(group=32)",
    ),
    "torchao int4": torchao_case(
        "Int4Tensor", {"block_size": [1, 32]}, make_int4, values_int4, "int4(group=32,scale=bfloat16,zero_point=float)"
    ),
    "torchao float8": torchao_case(
        "Float8Tensor", {"block_size": [1, 64]}, make_ao8, values_intx, "float8_e4m3fn(channel=0)"
    ),
}  # fmt: skip


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_file(tensors: dict[str, tuple[int, tuple[int, ...], bytes]], keys: bytes = b"", count: int = 0) -> bytes:
    """A file of version 3: (type, shape, bytes) of each tensor."""

    def text(name: str) -> bytes:
        return len(name).to_bytes(8, "little") + name.encode()

    header, data = (
        b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little") + count.to_bytes(8, "little") + keys,
        b"",
    )
    for name, (kind, shape, raw) in tensors.items():
        header += text(name) + len(shape).to_bytes(4, "little") + b"".join(n.to_bytes(8, "little") for n in shape[::-1])
        header += kind.to_bytes(4, "little") + len(data).to_bytes(8, "little")
        data += raw + bytes(-len(raw) % 32)
    return header + bytes(-len(header) % 32) + data


def half_bytes(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16)[..., None].view(np.uint8)


#: Bytes of a block by type.
GGUF_SIZES = {
    2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 20: 18, 23: 136, 34: 54, 35: 66,
    39: 17, 40: 36,
}  # fmt: skip
#: Numbers of a block by type.
GGUF_COUNTS = {kind: 64 if kind == 40 else 32 if kind < 10 or kind in (20, 39) else 256 for kind in GGUF_SIZES}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def gguf_blocks(kind: int, rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (rows, count, GGUF_SIZES[kind]), np.uint8)
    scale, low = (rng.standard_normal((rows, count)) * 0.01 for _ in range(2))
    scale[0, 0] = 0
    shifted = kind in (3, 7, 10, 12, 13)
    at = {10: 80, 11: 108, 14: 208, 34: 52, 35: 64}.get(kind, 0)
    if kind in (39, 40):  # exponents, or numbers of e4m3 of which one is zero
        scales = slice(0, 1 if kind == 39 else 4)
        blocks[..., scales] = blocks[..., scales] % 8 + 120 if kind == 39 else blocks[..., scales] % 127
        blocks[0, 0, 0] = 0
        return blocks
    blocks[..., at : at + 2] = half_bytes(np.abs(scale) if shifted else scale)
    if shifted:
        blocks[..., at + 2 : at + 4] = half_bytes(low)
    return blocks


def gguf_values(kind: int, raw: np.ndarray) -> np.ndarray:
    """Number by number, as the loops of ggml-quants.c run."""
    result = []
    for block in raw.reshape(-1, raw.shape[-1]):
        half = lambda at, block=block: np.float32(block[at : at + 2].view(np.float16)[0])  # noqa: E731
        if kind in (2, 3, 6, 7):
            q = [int(block[i % 16 - 16]) >> 4 * (i // 16) & 15 for i in range(32)]
            if kind > 3:
                q = [code | (int(block[i // 8 - 20]) >> i % 8 & 1) << 4 for i, code in enumerate(q)]
            if kind in (2, 6):
                result += [np.float32(code - (8 if kind == 2 else 16)) * half(0) for code in q]
            else:
                result += [np.float32(code) * half(0) + half(2) for code in q]
        elif kind == 8:
            result += [np.float32(block[2 + i].view(np.int8)) * half(0) for i in range(32)]
        elif kind in (12, 13):
            for i in range(256):
                j, sc = i // 32, [int(byte) for byte in block[4:16]]
                s, m = (sc[j] & 63, sc[j + 4] & 63) if j < 4 else (
                    sc[j + 4] & 15 | sc[j - 4] >> 6 << 4, sc[j + 4] >> 4 | sc[j] >> 6 << 4)  # fmt: skip
                q = int(block[j // 2 * 32 + i % 32 - 128]) >> 4 * (j % 2) & 15
                q |= (int(block[16 + i % 32]) >> j & 1) << 4 if kind == 13 else 0
                result.append(half(0) * np.float32(s) * np.float32(q) - half(2) * np.float32(m))
        elif kind in (20, 39):
            for i in range(32):
                q = int(block[i % 16 - 16]) >> 4 * (i // 16) & 15
                power = np.float32(2.0 ** (int(block[0]) - 127))
                result.append(half(0) * np.float32(IQ4[q]) if kind == 20 else power * E2M1[q])
        elif kind == 40:
            for i in range(64):
                q = int(block[4 + 8 * (i // 16) + i % 8]) >> 4 * (i % 16 // 8) & 15
                result.append(np.float32(block[i // 16].view(F8)) * E2M1[q])
        elif kind == 23:
            for i in range(256):
                g = i // 32
                s = int(block[4 + g // 2]) >> 4 * (g % 2) & 15 | (int(block[2:4].view(np.uint16)[0]) >> 2 * g & 3) << 4
                q = int(block[8 + 16 * g + i % 16]) >> 4 * (i % 32 // 16) & 15
                result.append(half(0) * np.float32(s - 32) * np.float32(IQ4[q]))
        elif kind == 34:
            places = [(m, n) for n in range(5) for m in range(32)] + [(32 + m, n) for n in range(5) for m in range(16)]
            places += [(48 + m, n) for n in range(4) for m in range(4)]
            for m, n in places:
                result.append(half(52) * np.float32((int(block[m]) * 3**n % 256 * 3 >> 8) - 1))
        elif kind in (10, 11, 35):
            for i in range(256):
                h, j, k, s = i // 128, i % 128 // 32, i % 32, i // 16
                q = int(block[{10: 16, 11: 32, 35: 0}[kind] + 32 * h + k]) >> 2 * j & 3
                if kind == 10:
                    step = half(80) * np.float32(block[s] & 15)
                    result.append(step * np.float32(q) - half(82) * np.float32(block[s] >> 4))
                elif kind == 11:
                    scale = int(block[96 + s % 8]) >> 4 * (s // 8) & 15
                    scale |= (int(block[104 + s % 4]) >> 2 * (s // 4) & 3) << 4
                    q -= 0 if int(block[k]) >> 4 * h + j & 1 else 4
                    result.append(half(108) * np.float32(scale - 32) * np.float32(q))
                else:
                    result.append(half(64) * np.float32(q - 1))
        else:
            for i in range(256):
                h, j, k = i // 128, i % 128 // 32, i % 32
                low = int(block[64 * h + 32 * (j % 2) + k]) >> 4 * (j // 2) & 15
                q = low | (int(block[128 + 32 * h + k]) >> 2 * j & 3) << 4
                scale = np.float32(block[192 + i // 16].view(np.int8))
                result.append(half(208) * scale * np.float32(q - 32))
    return np.array(result, np.float32).reshape(raw.shape[0], -1)
