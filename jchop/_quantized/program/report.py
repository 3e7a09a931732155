"""The report of a program under rules: a row for every parameter and every product."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jchop._common.checks import check_choice
from jchop._common.text import RowReport, TableOrLine
from jchop._quantized.products.codes import float8_operand_dtype
from jchop._quantized.products.rule import Rule
from jchop._spec.spec import Spec
from jchop.formats import FloatFormat, IntegerFormat

# -- operands of chips -------------------------------------------------------------------------------------------------
#
# Which types of operands reach the units of a chip, for each product of codes.
#
# Read from the modules of the compilers (`tests/_kernels/compile_codes.py`).


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
    zero_points = any(spec and spec.scaled and spec.scaled.zero_point is not None for spec in (left, right))
    if kinds in ({"int8"}, {"float8"}):
        kind = min(kinds)
        return operands[kind] if matrices else operands.get(f"{kind} windows", operands[kind])
    if kinds == {"int8", "float8"} and platform != "cpu" and not zero_points:
        return "bfloat16 x bfloat16 -> float32"
    if left is None and matrices:
        return operands["alone"]
    return _WIDE_OPERANDS


def _operand_kind(spec: Spec | None) -> str:
    """The type with which an operand under a spec reaches units: int8, float8, or a wide float."""
    if spec is None:
        return "wide"
    fmt = spec.element
    if isinstance(fmt, IntegerFormat) and fmt.bits <= 8:
        return "int8"
    shifted = spec.scaled is not None and spec.scaled.zero_point is not None
    return (
        "float8" if isinstance(fmt, FloatFormat) and not shifted and float8_operand_dtype(fmt) is not None else "wide"
    )


@dataclass(frozen=True)
class ParameterRow:
    """A parameter of a program: its rule, its use and its rounding.

    Args:
        path: its path, joined by slashes.
        shape: its shape.
        rule: the rule that matches it, as text; empty for none.
        primitive: the first product or look-up that reads it; else the first operation that computes with it and data.
        use: ``"product"``, ``"rows"`` (look-ups), ``"sum"`` (a bias), ``"other"``; empty if nothing reads it.
        spec: the spec of its rounding, with the groups along its own axes; empty if it is not rounded.
        source: file and line of the primitive.
        reason: why it is not rounded although its rule would round it; empty if nothing prevents it.
    """

    path: str
    shape: tuple[int, ...]
    rule: str
    primitive: str
    use: str
    spec: str
    source: str
    reason: str = ""

    @property
    def size(self) -> int:
        """The count of its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ProductRow:
    """A product of a program: its rule and the roundings of its operands.

    Args:
        scope: the path of its `jax.named_scope` and `jax.jit` names.
        primitive: its name, with the reason if its operands cannot be rounded.
        parameters: the paths of the parameters that reach it.
        rule: its rule, as text; empty for none.
        roundings: the fields of the rule that have an effect, the weight's apart, as text.
        source: file and line.
        operands: the types of the operands that reach the units of the report's platform. Empty without a platform, and
            for a product without a rule.
        note: a remark if a constant of the program is rounded, with the rule that would leave it as it is; else empty.
    """

    scope: str
    primitive: str
    parameters: tuple[str, ...]
    rule: str
    roundings: Mapping[str, str]
    source: str
    operands: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roundings", MappingProxyType(dict(self.roundings)))


@dataclass(frozen=True)
class ProgramReport(RowReport):
    """The rows of a program; as text, two tables.

    Args:
        parameters: a `ParameterRow` for each.
        products: a `ProductRow` for each, in the order of the program.
    """

    parameters: tuple[ParameterRow, ...]
    products: tuple[ProductRow, ...]

    _rows_field, _optional = "parameters", ("scope", "shape")

    @property
    def rounded_share(self) -> float:
        """The share of the numbers in parameters of products that are rounded; NaN if there are none."""
        own = [row for row in self.parameters if row.use in ("product", "rows")]
        total = sum(row.size for row in own)
        return sum(row.size for row in own if row.spec) / total if total else math.nan

    def _parts(self) -> list[TableOrLine]:
        parameters = [("parameter", "shape", "used by", "rounded to", "source")]
        for row in self.parameters:
            how = row.spec or (f"as it is: {row.reason}" if row.reason else "as it is")
            shape = "×".join(map(str, row.shape))
            parameters.append((row.path, shape, row.primitive, how, os.path.basename(row.source)))
        has_operands = any(row.operands for row in self.products)
        products = [("product", "of", "rounds", "scope", "source", *(["multiplies"] if has_operands else []))]
        for row in self.products:
            of = ", ".join(path or "params" for path in row.parameters) or "data"
            rounds = ", ".join(f"{name}={value}" for name, value in row.roundings.items()) or "nothing more"
            own = [row.operands] if has_operands else []
            products.append((row.primitive, of, rounds, row.scope, os.path.basename(row.source), *own))
        notes = list(dict.fromkeys(row.note for row in self.products if row.note))
        return [parameters, "", products, *(["", *notes] if notes else [])]
