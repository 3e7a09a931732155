"""The arithmetic of tensor cores as published: a table of units and data types, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jchop._common.checks import check_choice, close_names_hint
from jchop._spec.accumulation import MatmulSpec
from jchop._spec.spec import as_spec


@dataclass(frozen=True)
class TensorCore:
    """One unit and type of operands: its arithmetic with a float32 accumulator, and the source.

    Args:
        spec: the arithmetic.
        source: the publication that says so.
        narrow: whether the unit has a float16 accumulator too.

    Example:
        >>> import jchop as jc
        >>> row = jc.TENSOR_CORES["hopper"]["fp8"]
        >>> str(row.spec.order), row.source.split()[0]
        ('aligned(32, 13)', 'MMA-Sim')
    """

    spec: MatmulSpec
    source: str
    narrow: bool = False


_MMA_SIM = "MMA-Sim (github.com/microsoft/MMA-Sim, c785138; arXiv 2511.10909)"
_FASI_2021 = "Fasi, Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330, 2021; " + _MMA_SIM
_MMA_SIM_FDPA = "MMA-Sim (github.com/microsoft/MMA-Sim, 0cb7846, arithmetic/fdpa.py; arXiv 2511.10909)"
_CDNA1_SOURCE = _MMA_SIM + "; later revisions of MMA-Sim sum four products of CDNA1 and c exactly"
_TPU_SOURCE = (
    "cloud.google.com/tpu/docs/bfloat16: bfloat16 products, float32 sums; the order of the sums and their rounding "
    "are not published, so the order is that of the array's 128 rows, and a block's sum is the carrier's"
)
_TF32_TOWARD_ZERO = "tf32:toward_zero"


def _aligned_core(operands: str, block: int, bits: int, source: str = _MMA_SIM, narrow: bool = False) -> TensorCore:
    """An NVIDIA unit; with 13 bits the accumulator has no more either."""
    total = "e8m13:toward_zero" if bits == 13 else "binary32:toward_zero"
    return TensorCore(MatmulSpec(operands, accumulate=total, order=f"aligned({block}, {bits})"), source, narrow)


def _aligned_apart_core(operands: str, block: int) -> TensorCore:
    return TensorCore(MatmulSpec(operands, accumulate="binary32", order=f"aligned_apart({block}, 24)"), _MMA_SIM)


def _aligned_halves_core(operands: str) -> TensorCore:
    return TensorCore(MatmulSpec(operands, accumulate="binary32", order="aligned_halves(16, 24)"), _MMA_SIM_FDPA)


def _scaled_core(operands: str, order: str) -> TensorCore:
    return TensorCore(MatmulSpec(operands, accumulate="binary32:toward_zero", order=order), _MMA_SIM_FDPA)


def _pairwise_core(operands: str, block: int, source: str, flush: bool = False) -> TensorCore:
    end = ":flush" * flush
    spec = MatmulSpec(operands + end, "binary32" + end, "binary32" + end, f"blocked_pairwise({block})")
    return TensorCore(spec, source)


def _nvidia_cores(halves: int, bits: int, source: str = _MMA_SIM) -> dict[str, TensorCore]:
    return {
        "fp16": _aligned_core("binary16", halves, bits, source, narrow=True),
        "bf16": _aligned_core("bfloat16", halves, bits, source),
        "tf32": _aligned_core(_TF32_TOWARD_ZERO, halves // 2, bits, source),
    }


def _nvidia_fp8_cores(block: int, bits: int) -> dict[str, TensorCore]:
    return {
        name: _aligned_core(operands, block, bits, narrow=True)
        for name, operands in (("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"))
    }


#: Types that a unit has, but of which no model is published.
_TYPES_WITHOUT_MODEL = {
    "blackwell": ("fp6", "mxfp6", "fp6_e3m2", "fp6_e2m3", "fp4", "mxfp6_e3m2", "mxfp6_e2m3"),
    "tpu": ("fp8", "fp8_e5m2", "int8", "int4"),
}

#: The units by name, and of each the types of operands by name. Each has a `TensorCore`: its arithmetic and the source.
TENSOR_CORES: Mapping[str, Mapping[str, TensorCore]] = MappingProxyType(
    {
        unit: MappingProxyType(types)
        for unit, types in {
            "volta": {"fp16": _aligned_core("binary16", 4, 23, _FASI_2021, narrow=True)},
            "turing": {"fp16": _aligned_core("binary16", 8, 24, _FASI_2021, narrow=True)},
            "ampere": _nvidia_cores(8, 24, _FASI_2021),
            "ada": {**_nvidia_cores(8, 24), **_nvidia_fp8_cores(16, 13)},
            "hopper": {**_nvidia_cores(16, 25), **_nvidia_fp8_cores(32, 13)},
            "blackwell": {
                **_nvidia_cores(16, 25),
                **_nvidia_fp8_cores(32, 25),
                "mxfp8": _scaled_core("mxfp8_e4m3", "aligned(32, 25)"),
                "mxfp8_e5m2": _scaled_core("mxfp8_e5m2", "aligned(32, 25)"),
                "mxfp4": _scaled_core("mxfp4", "aligned_sums(64, 35)"),
                "nvfp4": _scaled_core("nvfp4", "aligned_sums(64, 35)"),
            },
            "cdna1": {
                "fp16": _pairwise_core("binary16", 4, _CDNA1_SOURCE),
                "bf16": _pairwise_core("bfloat16", 2, _CDNA1_SOURCE),
            },
            "cdna2": {
                "fp16": _pairwise_core("binary16", 4, _MMA_SIM, True),
                "bf16": _pairwise_core("bfloat16", 4, _MMA_SIM, True),
            },
            "cdna3": {
                "fp16": _aligned_apart_core("binary16", 8),
                "bf16": _aligned_apart_core("bfloat16", 8),
                "tf32": _aligned_apart_core(_TF32_TOWARD_ZERO, 4),
                "fp8": _aligned_halves_core("float8_e4m3fnuz"),
                "fp8_e5m2": _aligned_halves_core("float8_e5m2fnuz"),
            },
            "tpu": {"bf16": TensorCore(MatmulSpec("bfloat16", order="matrix_unit(128)"), _TPU_SOURCE)},
        }.items()
    }
)


def tensor_core(unit: str, dtype: str, *, out: str = "binary32", promote_every: int | None = None) -> MatmulSpec:
    """The arithmetic of a tensor core, for `jchop.math.matmul` and every other function that takes a `MatmulSpec`.

    NVIDIA's units add k products and the accumulator exactly on one grid of f fraction bits, ``aligned(k, f)``, and cut
    the sum to float32; fp8 on Ada and Hopper to 13 fraction bits. Hopper and later units need no other order than k
    ascending. The AMD units and the TPU follow other orders of `Order`.

    The operands are rounded to their type first. Of a block-scaled type (mxfp8, mxfp4, nvfp4) the elements are
    multiplied, and the scales of the blocks take part in the alignment; `jchop.math.matmul` alone takes such a spec.
    After the sums the result is multiplied by the product of both tensors' scales, if the format has them, each product
    rounded to nearest float32.

    In a `jchop.Rule` the rule rounds them, so take ``dataclasses.replace(spec, operands=None)`` of a type without
    scales; then subnormal operands are aligned as if they were normal, and scales are part of the operands.

    Args:
        unit: ``"volta"``, ``"turing"``, ``"ampere"``, ``"ada"``, ``"hopper"``, ``"blackwell"`` (datacenter, tcgen05),
            ``"cdna1"``, ``"cdna2"``, ``"cdna3"`` or ``"tpu"``.
        dtype: ``"fp16"``, ``"bf16"``, ``"tf32"`` (operands cut to 10 fraction bits), ``"fp8"`` (e4m3fn; e4m3fnuz on
            CDNA3), ``"fp8_e5m2"``, or on Blackwell ``"mxfp8"`` (e4m3fn), ``"mxfp8_e5m2"``, ``"mxfp4"`` and ``"nvfp4"``,
            if the unit has it. Or the format of the operands, which names the same row: ``"float16"``, ``"bfloat16"``,
            ``"float8_e4m3fn"``, ``"float8_e5m2"``. `TENSOR_CORES` has all rows, with the source of each.
        out: the accumulator: ``"binary32"`` (default), or ``"binary16"``, rounded to nearest, for fp16 and fp8 on
            NVIDIA's units.
        promote_every: a multiple of k: sums of so many products are added to a float32 total, as DeepSeek-V3 does with
            128 (arXiv 2412.19437, 3.3.2). Default None.

    Raises:
        TypeError, ValueError: for a unit, type or accumulator that is not in the table; the message names the ones that
            are. For a type whose sums are not published, such as mxfp6 on Blackwell, the message says so.

    Example:
        >>> import jchop as jc
        >>> str(jc.tensor_core("volta", "fp16"))
        'operands=binary16, accumulate=binary32:toward_zero, order=aligned(4, 23)'
        >>> str(jc.tensor_core("hopper", "fp8", promote_every=128).order)
        'aligned(32, 13, promote_every=128)'
        >>> jc.tensor_core("hopper", "float8_e4m3fn") == jc.tensor_core("hopper", "fp8")
        True
    """
    types = _core_entry(TENSOR_CORES, "unit", unit)
    names = dtype, *(_type_of_format(some, dtype) for some in TENSOR_CORES.values())
    if any(name in _TYPES_WITHOUT_MODEL.get(unit, ()) for name in names):
        raise ValueError(f"dtype={dtype!r}: how {unit} adds {dtype} is not published; known: {', '.join(types)}")
    row = _core_entry(types, "dtype", _type_of_format(types, dtype), f" of {unit}")
    check_choice("out", out, ("binary32", "binary16"))
    spec = row.spec
    if out == "binary16":
        if not row.narrow:
            raise ValueError(f"out='binary16': {dtype} on {unit} has no float16 accumulator; leave out='binary32'")
        spec = replace(spec, accumulate="binary16")  # type: ignore[arg-type]
    return spec if promote_every is None else replace(spec, order=replace(spec.order, promote_every=promote_every))


def _type_of_format(types: Mapping[str, TensorCore], dtype: str) -> str:
    """The type whose operands have the format that `dtype` names; else `dtype` itself."""
    try:
        fmt = str(as_spec(dtype, scaled=True))
    except (TypeError, ValueError):
        return dtype
    return next((name for name, row in types.items() if str(row.spec.operands).partition(":")[0] == fmt), dtype)


def _core_entry(table: Mapping, name: str, key: str, of: str = "") -> Any:
    if not isinstance(key, str):
        raise TypeError(f"{name}={key!r} must be one of {', '.join(map(repr, table))}")
    if key not in table:
        hint = close_names_hint(key, table) or f"; allowed: {', '.join(map(repr, table))}"
        raise ValueError(f"{name}={key!r} is not known{of}{hint}")
    return table[key]
