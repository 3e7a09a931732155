"""Which types of operands reach the units of a chip, for each product of codes.

Read from the modules of the compilers (`tests/_kernels/compile_codes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jchop._common.checks import check_choice
from jchop._quantized.products.codes import float8_operand_dtype
from jchop._quantized.products.rule import Rule
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, IntegerFormat

_TPU_OPERANDS = {
    "int8": "int8 x int8 -> int32",
    "float8": "float8 x float8 -> float32",
    "alone": "codes, decoded in a kernel",
}
_WIDE_OPERANDS = "float32 x float32"
#: By platform, for operands of int8, of float8, and for weights alone; of convolutions, where these differ.
OPERANDS_BY_PLATFORM: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            "int8": _TPU_OPERANDS["int8"],
            "int8 windows": f"{_WIDE_OPERANDS}, exact",
            "float8": _WIDE_OPERANDS,
            "alone": f"{_WIDE_OPERANDS}, panel by panel",
        },
        "v5e": _TPU_OPERANDS,
        "v6e": _TPU_OPERANDS,
        "v7x": _TPU_OPERANDS,
        "a100": {**_TPU_OPERANDS, "float8": "float16 x float16 -> float32, widened: no units for float8"},
        "h200": _TPU_OPERANDS,
        "b200": _TPU_OPERANDS,
    }
)


def operand_types_on(platform: str, rule: Rule, carrier: str, has_weight: bool, matrices: bool = True) -> str:
    """The types of the operands of a forward product under a rule, on a platform.

    Args:
        platform: a name of `OPERANDS_BY_PLATFORM`.
        rule: the rule.
        carrier: the dtype that its layer computes in.
        has_weight: whether one operand is a weight; else both are activations.
        matrices: whether it is no convolution.

    Raises:
        TypeError, ValueError: for another platform.
    """
    check_choice("platform", platform, tuple(OPERANDS_BY_PLATFORM))
    left, right = rule.activation, rule.weight if has_weight else rule.activation
    by_codes = rule.product == "codes" or (rule.product == "auto" and left is None and has_weight and matrices)
    if not by_codes or (left is None and right is None):
        return f"{carrier} x {carrier}"
    kinds, operands = {_operand_kind(left), _operand_kind(right)}, OPERANDS_BY_PLATFORM[platform]
    if kinds in ({"int8"}, {"float8"}):
        kind = min(kinds)
        return operands[kind] if matrices else operands.get(f"{kind} windows", operands[kind])
    if kinds == {"int8", "float8"} and platform != "cpu" and not (_has_zero_point(left) or _has_zero_point(right)):
        return "bfloat16 x bfloat16 -> float32"
    if left is None and matrices:
        return operands["alone"]
    return _WIDE_OPERANDS


def _operand_kind(spec: Spec | None) -> str:
    if spec is None:
        return "wide"
    fmt = spec.element
    if isinstance(fmt, IntegerFormat) and fmt.bits <= 8:
        return "int8"
    return (
        "float8"
        if isinstance(fmt, FloatFormat) and not _has_zero_point(spec) and float8_operand_dtype(fmt) is not None
        else "wide"
    )


def _has_zero_point(spec: Spec | None) -> bool:
    return spec is not None and spec.scaled is not None and spec.scaled.zero_point is not None
