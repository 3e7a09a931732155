"""A mutation run: would the tests notice a small fault in the core?

Run it in a clone, by hand; pytest does not collect it::

    python tests/mutate.py                                   # a sample of every file of `TESTS`: about an hour
    python tests/mutate.py jchop/_core/arithmetic/round_with_error.py --each 40 # more of one file
    python tests/mutate.py --again mutants.jsonl             # those that survived, after tests were added
    python tests/mutate.py --again mutants.jsonl --slow      # those, by the slow tests alone

A mutant is one file with one expression changed: a comparison, an operator, a constant, a branch, a term left out. It
runs in a process of its own, forked from one that has imported JAX, against the tests that `TESTS` names for the file,
until one of them fails: first the default ones, then the slow ones. Nothing is written to the clone: tests and package
are copied, and an import hook puts the changed file in place. Compiled programs are kept between the runs (`--work`),
and tests that have killed before come first. Mutants are drawn with a fixed seed, one for a line at most. At the end
every test that has killed one has to pass on the original.

Every result is a line of `--out` at once. The exit status is 1 where fewer than 95 % of the mutants die. Mutants that
change no result stand in `EQUIVALENT`, with the reason; they are listed and not run.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The share of mutants that has to die.
ENOUGH = 0.95
#: The exit code of a run that was none.
_BROKEN = 99

_FEW_BITS = (
    "test_round_stochastic.py::test_few_bits_as_defined",
    "test_round_stochastic.py::test_all_bits_as_defined",
)
_ROUNDED = ("_core/arithmetic/test_nearest.py", "test_round_values.py", *_FEW_BITS)
_EXACT = (
    "_core/arithmetic/test_nearest.py",
    "_core/arithmetic/test_operations.py::test_operations_of_values_of_the_format",
    "_core/arithmetic/test_operations.py",
    "_core/arithmetic/test_basic.py",
)
_SCALED = ("_core/scaled_float32/test_select.py", "_core/scaled/test_elements.py")
_BY_QUANTA = (
    "_core/scaled_float32/test_select.py::test_zero_points",
    "_core/scaled_float32/test_select.py::test_uniform",
)
_BY_TABLES = (
    "_core/scaled_float32/test_select.py::test_ties_of_many_levels",
    "_core/scaled_float32/test_select.py::test_many_levels_that_take_the_exact_way",
    "_core/scaled_float32/test_select.py::test_many_levels_beside_rationals",
    "_core/scaled_float32/test_select.py::test_many_levels",
)
_SCALES = (
    "_core/scaled/test_scales.py",
    "_core/scaled/test_elements.py::test_scales_are_read_back",
    "_core/scaled/test_elements.py",
)
_GROUPED = ("_kernels/test_scaled_formats.py", "storage/test_quantize.py")
_STORED = ("storage/test_layout.py", "storage/test_qarray.py", "storage/test_properties.py")
_OF_TWO = ("_core/elementary/test_functions_of_two.py",)
_ELEMENTARY = ("_core/elementary/test_elementary.py", "math/test_elementwise.py")
_EMULATED = ("test_emulate_rules.py", "test_emulate_transforms.py", "test_emulate.py")

#: The tests of each file of the core, in tests/.
TESTS: dict[str, tuple[str, ...]] = {
    "jchop/formats/_base.py": ("formats/test_fixed.py", "formats/test_tables.py", "formats/test_float.py"),
    "jchop/formats/_codebook.py": ("formats/test_codebook.py",),
    "jchop/formats/_combinations.py": ("formats/test_scaled.py", "formats/test_catalogue.py"),
    "jchop/formats/_fixed.py": ("formats/test_fixed.py", "formats/test_catalogue.py"),
    "jchop/formats/_float.py": ("formats/test_tables.py", "formats/test_float.py", "formats/test_catalogue.py"),
    "jchop/formats/_grouping.py": ("formats/test_scaled.py",),
    "jchop/formats/scale_rules.py": ("formats/test_scale_rules.py", *_SCALED),
    "jchop/formats/_named.py": ("formats/test_scaled.py", "formats/test_text.py"),
    "jchop/formats/_scaled.py": (
        "formats/test_scaled.py",
        "formats/test_text.py",
        "storage/test_quantize.py::test_sizes_are_those_of_the_arrays",
    ),
    "jchop/formats/_scaled_text.py": ("formats/test_text.py", "formats/test_scaled.py"),
    "jchop/formats/_tables.py": ("formats/test_tables.py", "formats/test_catalogue.py"),
    "jchop/formats/_text.py": ("formats/test_text.py", "formats/test_scaled.py"),
    "jchop/_core/rounding/random_bits.py": (
        "_core/rounding/test_random_bits.py",
        "_core/arithmetic/test_operations.py::test_words_are_the_streams",
        "test_round_sharding.py",
    ),
    "jchop/_core/rounding/stream_offset.py": (
        "_core/arithmetic/test_operations.py::test_words_are_the_streams",
        "test_round_sharding.py",
        *_FEW_BITS,
    ),
    "jchop/storage/_codes.py": _STORED,
    "jchop/storage/_layout.py": _STORED,
    "jchop/storage/_index.py": _STORED,
    "jchop/_bits.py": ("test_bits.py",),
    "jchop/_core/arithmetic/basic.py": (
        "_core/arithmetic/test_exact.py",
        "_core/arithmetic/test_basic.py::test_known_ranges",
        *_EXACT,
    ),
    "jchop/_core/arithmetic/round_with_error.py": (
        "_core/arithmetic/test_round_with_error.py",
        "_core/arithmetic/test_operations.py",
    ),
    "jchop/_core/arithmetic/exact.py": (
        "_core/arithmetic/test_exact.py",
        *_EXACT,
        "test_round_scaled.py::test_clipped_by_kind_of_element",
    ),
    "jchop/_core/arithmetic/subnormal_scaling.py": _EXACT,
    "jchop/_core/arithmetic/nearest.py": _EXACT,
    "jchop/_core/arithmetic/operations.py": _EXACT,
    "jchop/_core/arithmetic/quotient.py": ("_core/arithmetic/test_quotient.py", *_SCALED),
    "jchop/_core/arithmetic/ranges.py": (
        "_core/arithmetic/test_basic.py::test_require_operation",
        *_EXACT,
        "_core/arithmetic/test_matmul.py",
    ),
    "jchop/_core/arithmetic/root.py": ("_core/arithmetic/test_operations.py::test_every_bit_of_a_root", *_EXACT),
    "jchop/_core/arithmetic/double_word.py": ("_core/arithmetic/test_basic.py::test_exact_form", *_EXACT),
    "jchop/_core/rounding/elements.py": (*_ROUNDED, "test_round_derivatives.py"),
    "jchop/_core/rounding/grid.py": ("_core/rounding/test_grid.py", *_ROUNDED),
    "jchop/_core/rounding/modes.py": (
        "_core/rounding/test_grid.py",
        "_core/arithmetic/test_exact.py",
        "test_round_scaled.py::test_odd_leaves_whole_numbers",
        "test_round_stochastic.py::test_every_draw_of_a_few_bits",
        "_core/scaled_float32/test_select.py::test_zero_points",
        *_ROUNDED,
    ),
    "jchop/_core/rounding/log_takum.py": ("_core/rounding/test_log_takum.py",),
    "jchop/_core/rounding/takum_powers.py": ("_core/rounding/test_log_takum.py",),
    "jchop/_core/scaled/levels.py": ("_core/scaled/test_levels.py",),
    "jchop/_core/scaled/sparse.py": ("_core/scaled/test_sparse.py", "sparsity/test_masks.py"),
    "jchop/_core/rounding/tapered.py": ("_core/rounding/test_tapered.py", "formats/test_tapered.py"),
    "jchop/_core/arithmetic/aligned/unit.py": ("_core/arithmetic/test_aligned.py",),
    "jchop/_core/arithmetic/aligned/limbs.py": ("_core/arithmetic/test_aligned.py",),
    "jchop/_core/arithmetic/aligned/doubles.py": ("_core/arithmetic/test_aligned.py",),
    "jchop/_core/rounding/bins.py": ("_core/rounding/test_bins.py", "_core/scaled_float32/test_select.py"),
    "jchop/_core/rounding/codes.py": ("_core/rounding/test_codes.py", *_STORED),
    "jchop/_core/rounding/codebooks.py": (
        "test_round_values.py::test_codebooks",
        "test_round_stochastic.py::test_a_tie_of_codebooks_goes_by_the_word",
        "test_round_stochastic.py::test_the_smallest_negative_level_has_its_sign",
        "test_round_stochastic.py::test_codebooks_given_the_words",
        *_SCALED,
    ),
    "jchop/_core/scaled/groups.py": (
        "_core/scaled_float32/test_select.py::test_codes_are_packed_beside_their_groups",
        *_GROUPED,
    ),
    "jchop/_core/sizes.py": ("_core/test_sizes.py",),
    "jchop/_core/xla_gpu.py": ("_core/test_xla_gpu.py",),
    "jchop/_core/xla_cpu.py": ("_core/test_xla_cpu.py::test_maximum_in_steps", *_GROUPED),
    "jchop/_core/arithmetic/levels.py": ("_core/scaled_float32/test_select.py::test_levels", *_BY_TABLES, *_SCALED),
    "jchop/_core/scaled_float32/codebooks.py": _BY_TABLES,
    "jchop/_core/arithmetic/float64.py": (
        "_core/arithmetic/test_float64.py",
        "_core/scaled_float32/test_in_float64.py",
        *_ROUNDED,
    ),
    "jchop/_core/scaled_float32/in_float64.py": ("_core/scaled_float32/test_in_float64.py", *_ROUNDED),
    "jchop/_core/scaled_float32/floats.py": ("_core/scaled_float32/test_select.py::test_minifloats", *_SCALED),
    "jchop/_core/scaled_float32/integers.py": (*_BY_QUANTA, *_SCALED),
    "jchop/_core/scaled/elements.py": _SCALES,
    "jchop/_core/scaled/scales.py": _SCALES,
    "jchop/_core/scaled/zero_points.py": ("_core/scaled/test_scales.py", *_BY_QUANTA, *_GROUPED),
    "jchop/_core/scaled_float32/thresholds.py": (
        "_core/scaled_float32/test_select.py::test_the_largest_number_reaches_thresholds_beyond_it",
        "_core/scaled_float32/test_select.py::test_levels",
        *_SCALED,
    ),
    "jchop/_core/scaled_float32/select.py": (
        "_core/scaled_float32/test_select.py",
        "_kernels/test_scaled_formats.py::test_against_exact_rationals",
        "_kernels/test_scaled_formats.py::test_asking_changes_no_bit",
    ),
    "jchop/_core/scaled_float32/tiles.py": ("_core/scaled_float32/test_tiles.py", "_kernels/test_scaled.py"),
    "jchop/_core/scaled_float32/products.py": ("_core/scaled_float32/test_select.py::test_minifloats", *_BY_TABLES),
    "jchop/_core/scaled/fitting.py": ("_core/scaled/test_scales.py::test_a_percentile_counts_exactly", *_GROUPED),
    "jchop/_core/scaled_bodies.py": (*_SCALED, *_GROUPED),
    "jchop/_core/scaled/float_zero_points.py": ("_core/scaled/test_float_zero_points.py", *_GROUPED),
    "jchop/_core/scaled/power_of_two_scales.py": ("_kernels/test_scaled.py",),
    "jchop/_core/arithmetic/matmul.py": ("_core/arithmetic/test_matmul.py", "_kernels/test_matmul.py"),
    "jchop/_core/arithmetic/dequantize_matmul.py": ("_core/arithmetic/test_dequantize_matmul.py",),
    "jchop/_core/elementary/functions.py": _ELEMENTARY,
    "jchop/_core/elementary/functions_of_two.py": _OF_TWO,
    "jchop/_core/elementary/numbers.py": _ELEMENTARY,
    "jchop/_core/elementary/pairs.py": _ELEMENTARY,
    "jchop/_core/elementary/parts.py": _ELEMENTARY,
    "jchop/_core/elementary/rounded.py": _ELEMENTARY,
    "jchop/_core/arithmetic/chain.py": ("test_emulate_chains.py",),
    "jchop/_round/round_to_format.py": (
        "test_round_inputs.py",
        "test_round_scaled.py",
        "test_round_transforms.py",
        "test_round_sharding.py",
    ),
    "jchop/math/_sums.py": ("math/test_sums.py",),
    "jchop/math/_running.py": ("math/test_sums.py",),
    "jchop/_core/arithmetic/sums.py": ("math/test_sums.py",),
    "jchop/_emulate/_known.py": ("test_emulate_known.py", *_EMULATED),
    "jchop/_emulate/_outcome.py": ("test_emulate_plan.py", *_EMULATED),
    "jchop/_emulate/_perform.py": _EMULATED,
    "jchop/_emulate/_plan.py": ("test_emulate_plan.py", *_EMULATED),
    "jchop/_emulate/_rules.py": _EMULATED,
    "jchop/_program/seeds.py": _EMULATED,
}

#: Mutants with the results of the original: (file, the line, what stands in it, what the mutant has) and why.
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "jchop/formats/_grouping.py",
        "count = len(group) if isinstance(group, tuple | list) and len(group) > 1 else 1",
        "1",
        "(0)",
    ): "a tuple of one counts one either way, and none is empty",
    (
        "jchop/formats/_grouping.py",
        "count = len(group) if isinstance(group, tuple | list) and len(group) > 1 else 1",
        "len(group) > 1",
        "(len(group) >= 1)",
    ): "a tuple of one counts one either way, and none is empty",
    (
        "jchop/_core/arithmetic/double_word.py",
        "up = carrier.fraction - _bits.floor_log2(jnp.maximum(count, 1), carrier).astype(magnitude.dtype)",
        "1",
        "(0)",
    ): "the logarithm of 0 has no effect: 0 moved by any number of places is 0, and its exponent is replaced",
    (
        "jchop/_core/rounding/bins.py",
        "first, last = max((min(sizes) - margin >> shift) - 1, 0), (max(sizes) + margin >> shift) + 1",
        "max(sizes) + margin",
        "(max(sizes))",
    ): "a bin fewer: the threshold of every bin is looked for from the margin below its start",
    ("jchop/_core/rounding/grid.py", "deep = drop > 0 and fmt.emin < 1 - carrier.bias", "drop > 0", "(drop >= 0)"): (
        "no carrier holds normal numbers below its own of a format with as many bits"
    ),
    (
        "jchop/_core/arithmetic/basic.py",
        "return _bits.join(_bits.where((bits == 0) & ((xs ^ ys) < 0), zero_sign, jnp.zeros_like(bits)), bits, carrier)",
        "xs ^ ys",
        "(xs | ys)",
    ): "of two negative terms the sum is no +0",
    (
        "jchop/storage/_layout.py",
        "return items[0] if len(items) == 1 else items",
        "0",
        "(0 - 1)",
    ): "the first of one is the last",
    (
        "jchop/_core/arithmetic/dequantize_matmul.py",
        "if groups % together or group % rows:",
        "group % rows",
        "(group // rows)",
    ): "of steps that overlap nothing, nothing is left out",
    (
        "jchop/_emulate/_perform.py",
        "return _round(out, task.spec, drawn[0] if drawn else None)",
        "0",
        "(0 - 1)",
    ): "a sum has one result, which draws once",
    (
        "jchop/_core/scaled_float32/floats.py",
        "other = plan.scale.frac_bits + 1 if tensor_scale else 0",
        "1",
        "(0)",
    ): "of two levels the largest element and the scales have at most four bits each, which leaves two to spare",
    (
        "jchop/_core/rounding/stream_offset.py",
        "word = draw(drawn[:SEEDS], x.shape, place, drawn[SEEDS:], 64 if x.dtype.itemsize == 8 else 32)",
        "64",
        "(63)",
    ): "every width but 32 is that of pairs",
    ("jchop/_core/arithmetic/round_with_error.py", "scaled_down: bool = False,", "False", "(True)"): (
        "bits of finite numbers of other callers are at most those of infinity, which the minimum leaves"
    ),
    (
        "jchop/_core/arithmetic/exact.py",
        "keep = max(grid.tiny_bits, grid.normal_bits if spec.flush else 0)",
        "0",
        "(0 - 1)",
    ): "bits of the smallest value are no negative number",
    (
        "jchop/_core/rounding/grid.py",
        "deep = drop > 0 and fmt.emin < 1 - carrier.bias",
        "1",
        "(2)",
    ): "with the carrier's own smallest exponent, the depths of subnormals are the same numbers either way",
    (
        "jchop/_core/xla_cpu.py",
        "x = jnp.max(x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts), axis=-2)",
        "2",
        "(1)",
    ): "the largest of largest numbers, whichever axis comes first; which one is a matter of speed",
    ("jchop/_core/scaled_bodies.py", "branch_allowed: bool = False,", "False", "(True)"): (
        "which of two programs runs; `test_asking_changes_no_bit` shows that they are one in every bit"
    ),
    ("jchop/_core/scaled_float32/codebooks.py", "_MARGIN = 16", "16", "(17)"): "a wider margin costs time alone",
    ("jchop/_core/scaled/zero_points.py", "_MOST = 20", "20", "(21)"): "both are beyond all integers with zero points",
    ("jchop/_core/scaled/zero_points.py", "far = jnp.full_like(rounded, 1 << _MOST)", "1", "(2)"): (
        "both are beyond all integers with zero points"
    ),
    ("jchop/_core/arithmetic/matmul.py", "_UNROLL = 2", "2", "(1)"): "steps in one compiled body: a matter of speed",
}

# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One expression of a file, `before`, replaced by `after`; the bytes from `start` to `end`."""

    path: str
    line: int
    text: str  # the line that it begins in
    before: str
    after: str
    start: int
    end: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.path, self.text, self.before, self.after

    def source(self, root: Path) -> bytes:
        whole = (root / self.path).read_bytes()
        return whole[: self.start] + self.after.encode() + whole[self.end :]


_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult,
}
#: Operators whose second operand may be left out.
_TERMS = (ast.Add, ast.Sub, ast.BitOr, ast.BitAnd, ast.BitXor)
_FUNCTIONS = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "argmin": "argmax"}
_FUNCTIONS |= {other: name for name, other in _FUNCTIONS.items()}
#: What has no value: messages, checks for the type checker, imports.
_SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


def variants(node: ast.AST) -> Iterator[ast.expr]:
    """What an expression may be changed to."""
    match node:
        case ast.Compare(left, [op, *ops], values):
            for other in _COMPARISONS[type(op)]:
                yield ast.Compare(left, [other(), *ops], values)
        case ast.BinOp(left, op, right):
            if type(op) in _OPERATORS:
                yield ast.BinOp(left, _OPERATORS[type(op)](), right)
            if isinstance(op, _TERMS):
                yield left
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
            yield ast.BinOp(ast.Constant(value), ast.Sub(), ast.Constant(1)) if value < 1 else ast.Constant(value - 1)
        case ast.Constant(float() as value):
            yield ast.Constant(value * 2 if value else 1.0)
        case ast.Call(function, arguments, keywords):
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _FUNCTIONS:
                changed = ast.parse(ast.unparse(function), mode="eval").body
                if isinstance(changed, ast.Attribute):
                    changed.attr = _FUNCTIONS[name]
                else:
                    changed = ast.Name(_FUNCTIONS[name])
                yield ast.Call(changed, arguments, keywords)
            elif name == "where" and len(arguments) == 3:
                yield ast.Call(function, [arguments[0], arguments[2], arguments[1]], keywords)
            elif name in ("abs", "floor", "ceil", "rint") and len(arguments) == 1:
                yield arguments[0]


def _has_no_value(node: ast.AST) -> bool:
    """Whether a statement names types, a call asks for them, or an argument changes no value."""
    match node:
        case ast.Assign():
            return _is_of_types(node.value)
        case ast.Call(ast.Name(name)):
            return name in ("isinstance", "issubclass")
        case ast.keyword("strict" | "inline"):  # of zip: a check as `assert` is one; of jit: no matter of values
            return True
        case ast.If(ast.Name(name)):
            return name == "TYPE_CHECKING"
    return False


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a module that make values; no annotations, decorators, messages or aliases of types."""
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if _has_no_value(node):
        return
    yield node
    parts: Iterator[Any] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef):
        parts = iter([*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body])
    elif isinstance(node, ast.ClassDef):
        parts = iter(node.body)
    elif isinstance(node, ast.AnnAssign):
        parts = iter([node.value] if node.value else [])
    for part in parts:
        yield from expressions(part)


def _is_of_types(value: ast.expr) -> bool:
    """Whether a value is a union of types, or a name for one."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_of_types(value.left) and _is_of_types(value.right)
    named = value.value if isinstance(value, ast.Subscript) else value
    name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
    return name[:1].isupper() or name in ("int", "str", "float", "tuple", "dict") or ast.unparse(value) == "None"


def mutants(path: str, root: Path = ROOT) -> list[Mutant]:
    """All mutants of a file."""
    whole = (root / path).read_bytes()
    lines = whole.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in expressions(ast.parse(whole)):
        if not isinstance(node, ast.expr):
            continue
        start, end = (starts[n - 1] + c for n, c in ((node.lineno, node.col_offset), _end(node)))
        before = whole[start:end].decode()
        for other in variants(node):
            after = f"({ast.unparse(ast.fix_missing_locations(other))})"
            text = lines[node.lineno - 1].decode().strip()
            found.append(Mutant(path, node.lineno, text, before, after, start, end))
    return found


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def drawn(path: str, count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of a file, of as many lines."""
    chance = random.Random(f"{seed} {path}")
    by_line: dict[int, list[Mutant]] = {}
    for mutant in mutants(path):
        by_line.setdefault(mutant.line, []).append(mutant)
    picked = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in sorted(picked)]


# -- runs --------------------------------------------------------------------------------------------------------------


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads a file of the copy with one expression changed."""

    source: bytes = b""

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Puts a mutant in the place of its module."""

    def __init__(self, mutant: Mutant, root: Path) -> None:
        name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.name, self.file, self.source = name, str(root / mutant.path), mutant.source(root)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        loader = _Changed(fullname, self.file)
        loader.source = self.source
        return importlib.util.spec_from_file_location(fullname, self.file, loader=loader)


class _Order:
    """A plugin of pytest: tests that have killed before come first, and after some seconds of work it is enough."""

    def __init__(self, killers: list[str], most: float) -> None:
        self.killers, self.most = killers, most
        self.failed = ""
        self.ended = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        first = {name: i for i, name in enumerate(self.killers)}
        items.sort(key=lambda item: first.get(item.nodeid, len(first)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.ended = time.process_time() > self.most

    def pytest_runtest_setup(self) -> None:
        if self.ended:
            import pytest

            pytest.skip("enough")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


@dataclass
class Runner:
    """Runs tests on the copy, in forked processes.

    Args:
        copy: of the clone.
        work: a folder for compiled programs and the log of the last run.
        most: seconds of work that a mutant gets.
        limit: seconds after which a mutant is one that does not end.
        killers: tests that have failed, the last first, by file of the package.
    """

    copy: Path
    work: Path
    most: float
    limit: float
    killers: dict[str, list[str]] = field(default_factory=dict)

    def run(self, tests: Iterable[str], mutant: Mutant | None, which: str = "not slow") -> tuple[str, str, float]:
        """Tells ``"survived"``, ``"killed"`` or ``"timeout"``, the test that failed, and the seconds it took.

        Args:
            tests: the tests.
            mutant: the change; None for the original.
            which: which of them, as pytest's ``-m`` says it.
        """
        begun, said = time.monotonic(), self.work / "said.txt"
        said.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            self._child(tests, mutant, said, which)
        limit = self.limit if mutant else math.inf
        status = None
        while status is None:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = code
            elif time.monotonic() - begun > limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout", "", time.monotonic() - begun
            else:
                time.sleep(0.05)
        failed = said.read_text() if said.exists() else ""
        if mutant and failed:
            known = self.killers.setdefault(mutant.path, [])
            known[:] = [failed, *(name for name in known if name != failed)]
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code == 5:  # no test was selected
            exit_code = 0
        if exit_code > 2:  # of pytest itself; 2 is an error of collection, and a signal is below 0
            raise SystemExit(f"pytest ended with {exit_code}; its log is {self.work / 'log.txt'}")
        return "killed" if exit_code else "survived", failed, time.monotonic() - begun

    def _child(self, tests: Iterable[str], mutant: Mutant | None, said: Path, which: str) -> None:
        import pytest

        log = os.open(self.work / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.copy)
        sys.path[:0] = [str(self.copy), str(self.copy / "tests")]
        sys.dont_write_bytecode = mutant is not None
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant, self.copy))
        order = _Order(self.killers.get(mutant.path, []), self.most) if mutant else _Order([], math.inf)
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=17", "-m", which]
        arguments += [f"tests/{test}" for test in tests]
        code = _BROKEN
        try:
            code = int(pytest.main(arguments, plugins=[order]))
            said.write_text(order.failed)
        finally:
            os._exit(code)


def prepare(work: Path, most: float = math.inf, limit: float = math.inf) -> Runner:
    """The copy, and this process as one to fork: JAX is imported, and no device of it is started."""
    work.mkdir(parents=True, exist_ok=True)
    copy = work / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", "_build", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=left_out)
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    for name in ("jax", "numpy", "ml_dtypes", "pytest"):
        importlib.import_module(name)
    return Runner(copy, work, most, limit)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants of this run."""
    if options.again is None:
        return [m for path in options.paths or TESTS for m in drawn(path, options.each, options.seed)]
    earlier: dict[tuple[str, str, str, str], str] = {}
    for line in options.again.read_text().splitlines():
        record = json.loads(line)
        earlier[record["path"], record["text"], record["before"], record["after"]] = record["result"]
    paths = dict.fromkeys(key[0] for key in earlier)
    every = {mutant.key: mutant for path in paths for mutant in mutants(path)}
    return [every[key] for key, result in earlier.items() if result == "survived" and key in every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files of the package; default: all of TESTS")
    parser.add_argument("--each", type=int, default=5, help="mutants of each file; default 5")
    parser.add_argument("--seed", type=int, default=17, help="which mutants; default 17")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="the results; default mutants.jsonl")
    parser.add_argument("--again", type=Path, help="the results of a run, of which the survivors are tried again")
    parser.add_argument("--slow", action="store_true", help="the slow tests alone; default: after the default tests")
    parser.add_argument("--most", type=float, default=math.inf, help="seconds of work for a mutant; default any")
    parser.add_argument("--limit", type=float, default=900, help="after so many seconds it is caught; default 900")
    parser.add_argument("--work", type=Path, default=Path("/tmp/jchop-mutants"), help="a folder for what is kept")
    options = parser.parse_args()
    unknown = [path for path in options.paths if path not in TESTS]
    if unknown:
        parser.error(f"no tests are named for {', '.join(unknown)}; see TESTS")

    picked = chosen(options)
    tried = [mutant for mutant in picked if mutant.key not in EQUIVALENT]
    runner = prepare(options.work, options.most, options.limit)
    alive: list[Mutant] = []
    for number, mutant in enumerate(tried, 1):
        for which in ("slow",) if options.slow else ("not slow", "slow"):
            result, failed, seconds = runner.run(TESTS[mutant.path], mutant, which)
            if result != "survived":
                break
        record = {**asdict(mutant), "result": result, "test": failed, "seconds": round(seconds, 1)}
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(f"{number:4d}/{len(tried)}  {result:8s} {seconds:6.1f} s  {described(mutant)}", flush=True)
        if result == "survived":
            alive.append(mutant)
    judges = dict.fromkeys(name.removeprefix("tests/") for names in runner.killers.values() for name in names)
    if judges and runner.run(judges, None, "slow or not slow")[0] != "survived":
        raise SystemExit(f"a test that has killed mutants fails on the original; the log is {runner.work / 'log.txt'}")
    for mutant in picked:
        if mutant.key in EQUIVALENT:
            print(f"equivalent  {described(mutant)}: {EQUIVALENT[mutant.key]}")
    for mutant in alive:
        print(f"survived  {described(mutant)}\n          {mutant.text}")
    dead = len(tried) - len(alive)
    print(f"{dead} of {len(tried)} caught, {len(picked) - len(tried)} equivalent")
    return int(dead < ENOUGH * len(tried))


def described(mutant: Mutant) -> str:
    """Where, and what is changed to what."""
    return f"{mutant.path}:{mutant.line}  {' '.join(mutant.before.split())}  ->  {mutant.after}"


if __name__ == "__main__":
    sys.exit(main())
