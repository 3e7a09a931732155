"""`EmulatedFunction.native`: an emulated program in the dtypes of the device, and the casts that make it."""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from jchop._common.text import TableOrLine, Tables
from jchop._emulate.emulate import EmulatedFunction, round_on_entry
from jchop._emulate.paired import SILENT_KINDS, walk_sources
from jchop._emulate.rules.interpret import EmulationRunner, round_operands
from jchop._emulate.rules.rules import holds_constant, is_carrier_float, is_complex_value, is_exact_under, spec_of_fact
from jchop._emulate.rules.run_task import EmulatedStep, round_value
from jchop._emulate.rules.trace import trace_program
from jchop._insight.reports.report import emulated_call
from jchop._program.bind import bind
from jchop._program.control import with_weak_types
from jchop._program.repeats import with_turns
from jchop._program.run import interpret
from jchop._program.seeds import Seeds
from jchop._program.step import ProgramPlan, user_line
from jchop._spec.spec import Spec, as_spec
from jchop.formats.rounding import Rounding

#: The dtypes in which a device computes, then those in which it multiplies matrices alone.
_DTYPES = {
    as_spec(name).format: jnp.dtype(dtype) for name, dtype in (("bfloat16", "bfloat16"), ("binary16", "float16"))
}
_BINARY16 = as_spec("binary16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
_MATMUL_DTYPES = {as_spec(name).format: jnp.dtype(name) for name in _FLOAT8} | _DTYPES
#: The kinds of equations whose results in the carrier are rounded once.
_ROUNDED_ONCE = ("elementary", "made", "carried", "converted", "accumulating")


def _dtype_of(spec: Spec | None, dtypes: dict[Any, Any]) -> Any:
    """The dtype whose conversion rounds as a spec does, or whose numbers are those of its format; None for none."""
    if spec is None or spec.flush or spec.format not in dtypes:
        return None
    nearest = spec.rounding is Rounding.NEAREST_EVEN and spec.overflow is as_spec("bfloat16").overflow
    return dtypes[spec.format] if nearest or dtypes is _MATMUL_DTYPES else None


def _keep(x: Array) -> Array:
    """Numbers of a dtype that XLA must not compute with more digits."""
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


class _NativeRunner(EmulationRunner):
    """Emulated arithmetic, with roundings by conversions to dtypes where these give the same numbers.

    A value is rounded and kept in the carrier, in which devices compute operations of 16 bits, too.
    """

    def parts(self, plan: ProgramPlan) -> Iterable[Any]:
        """The steps, repeated ones as loops."""
        return with_turns(plan)

    def prepare_operands(self, step: EmulatedStep, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The operands of a step, with those rounded that the plan marks."""
        dtype = _dtype_of(step.choice.spec, _DTYPES)
        if dtype is None:
            return round_operands(step, seeds, args)
        return [_through_dtype(x, dtype) if rounds else x for x, rounds in zip(args, step.rounds, strict=True)]

    def run(self, part: Any, seeds: Seeds | None, args: list[Any]) -> list[Any]:
        """The results of one equation."""
        if not isinstance(part, EmulatedStep) or not _is_native(part):
            return super().run(part, seeds, args)
        args, spec = self.prepare_operands(part, seeds, args), part.choice.spec
        primitive, params, dtype = part.eqn.primitive, part.eqn.params, _dtype_of(spec, _DTYPES)
        if part.kind in SILENT_KINDS or spec is None:
            return bind(primitive, params, *args)
        own = _dtype_of(spec, _MATMUL_DTYPES)
        if part.name == "dot_general" and own is not None and _all_hold(part, spec):
            params = params | {"preferred_element_type": part.eqn.outvars[0].aval.dtype}
            results = bind(primitive, params, *(x.astype(own) for x in args))
        else:
            results = bind(primitive, params, *args)
        to_format = partial(round_value, spec=spec) if dtype is None else partial(_through_dtype, dtype=dtype)
        own_types = zip(results, part.eqn.outvars, strict=True)
        return [to_format(x) if is_carrier_float(v.aval) else x for x, v in own_types]


def _through_dtype(x: Any, dtype: Any) -> Array:
    """A value rounded to a dtype, in its own dtype.

    To float16 by its bits: XLA's CPU backend would compute products and sums between such conversions as one.
    """
    x = jnp.asarray(x)
    if dtype == jnp.float16:
        return round_value(x, spec=_BINARY16)
    return _keep(x.astype(dtype)).astype(x.dtype)


def _all_hold(step: EmulatedStep, spec: Spec) -> bool:
    """Whether the numbers of all operands are in the format."""
    return all(
        (spec_of_fact(fact) and is_exact_under(fact, spec)) or (isinstance(v, Literal) and holds_constant(spec, v.val))
        for fact, v in zip(step.known, step.eqn.invars, strict=True)
    )


def _is_native(step: EmulatedStep) -> bool:
    """Whether a step is computed by the device's own operation."""
    spec = step.choice.spec
    if step.kind in SILENT_KINDS or spec is None:
        moves = spec is None or not any(step.rounds) or _dtype_of(spec, _DTYPES) is not None
        return moves and step.kind not in ("control", "own")
    values = (*step.eqn.invars, *step.eqn.outvars)
    if step.choice.function is not None or step.draw is not None or any(is_complex_value(v.aval) for v in values):
        return False
    dtype, product = _dtype_of(spec, _DTYPES), step.name == "dot_general" and _dtype_of(spec, _MATMUL_DTYPES)
    if step.kind == "exact":
        return dtype is not None and _all_hold(step, spec)
    return step.kind in _ROUNDED_ONCE and step.choice.accumulate is None and bool(dtype or product)


@dataclass(frozen=True)
class Native(Tables):
    """The result of `EmulatedFunction.native`: a function of dtypes; its ``str`` is the patch and the notes.

    Args:
        low: the emulated function.
        patch: the casts as a unified diff of the files of the function, for ``patch -p1`` or ``git apply``; empty if no
            line has a format of a dtype.
        casts: file, line and dtype of each statement that the patch changes.
        notes: sentences about operations that stay emulated, and lines that the patch leaves.

    Example:
        >>> import jax, jax.numpy as jnp, jchop as jc
        >>> low = jc.emulate(lambda x: jnp.sqrt(x) / 3, "bfloat16")
        >>> fast, x = jax.jit(low.native(jnp.ones(3))), jnp.array([2.0, 3.0, 5.0])
        >>> bool((fast(x) == low(x)).all())
        True
    """

    low: EmulatedFunction
    patch: str
    casts: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, with the dtypes of those of the emulated function; put `jax.jit` around it."""
        program, spec = trace_program(self.low.fun, self.low.settings, args, kwargs), self.low.settings.spec
        dtype, plan = _dtype_of(spec, _DTYPES), program.plan
        values, constants, _ = round_on_entry(program, None if dtype else spec, None)
        if dtype is not None:
            pairs = zip((*values, *constants), program.rounds, strict=True)
            every = [_through_dtype(x, dtype) if rounds else x for x, rounds in pairs]
            values, constants = every[: len(values)], every[len(values) :]
        results = interpret(_NativeRunner(), plan, None, values, constants)
        return jax.tree.unflatten(program.tree, with_weak_types(results, program.source.outvars))

    def _parts(self) -> Iterator[TableOrLine]:
        yield from self.patch.splitlines()
        yield from self.notes


def native(low: Any, /, *args: Any, **kwargs: Any) -> Native:
    """Writes an emulated function in the dtypes of the device: bfloat16, float16, and float8 for matrix products.

    An operation in a format of a dtype is the device's own. Others stay emulated, and notes name them. Sums, products,
    quotients and square roots of two numbers have the bits of the emulation. XLA computes with more digits between
    operations unless told otherwise, so each result has a `jax.lax.reduce_precision`, and is rounded to float16 by its
    bits. The patch has neither. In bfloat16
    it has these bits under ``XLA_FLAGS=--xla_allow_excess_precision=false``; in float16 XLA contracts products and sums
    on a CPU. Elementary functions and sums of many terms may differ in the last bit, and a device may read subnormal
    numbers as zero.

    Args:
        low: a function from `jchop.emulate`, with rules of `jchop.tune` or others. Nothing may draw.
        *args: example arguments, which decide the lines of the patch.
        **kwargs: keyword arguments of the function.

    Returns:
        A `Native`: a function of the same arguments, with the patch.

    Raises:
        TypeError: for a function that `emulate` did not make.
        ValueError: for a stochastic rounding.
    """
    low, args = emulated_call("low", low, args, kwargs)
    if low.settings.stochastic:
        raise ValueError("low rounds stochastically, and conversions of dtypes do not: emulate to nearest_even first")
    program, call = trace_program(low.fun, low.settings, args, kwargs), user_line()
    dtypes: dict[str, set[str]] = {}
    emulated: dict[str, set[str]] = {}
    carriers: set[str] = set()
    for step, _, source in walk_sources(program.plan, call):
        spec = step.choice.spec
        if spec is None or step.kind in SILENT_KINDS:
            continue
        if not _is_native(step):
            emulated.setdefault(str(spec), set()).add(step.name)
        carriers |= {v.aval.dtype.name for v in step.eqn.outvars if is_carrier_float(v.aval)}
        dtypes.setdefault(source, set()).add(str(_dtype_of(spec, _DTYPES) or spec))
    notes = [f"emulated in {spec}: {', '.join(sorted(names))}" for spec, names in emulated.items()]
    by_file: dict[str, dict[int, set[str]]] = {}
    for source, names in dtypes.items():
        file, _, line = source.rpartition(":")
        if os.path.exists(file):
            by_file.setdefault(file, {})[int(line)] = names
    skipped = {**inspect.getclosurevars(inspect.unwrap(low.fun)).globals} if inspect.isfunction(low.fun) else {}
    patch, casts = "", list[tuple[str, int, str]]()
    for file, lines in by_file.items():
        old = linecache.getlines(file)
        new, own, left = _with_casts(old, lines, max(carriers), skipped)
        casts += [(file, line, dtype) for line, dtype in own]
        notes += [f"no cast at {os.path.basename(file)}:{line}: {why}" for line, why in left]
        name = os.path.relpath(file)
        patch += "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")) if own else ""
    return Native(low, patch, tuple(casts), tuple(notes))


_CAST = """

def _to(x, dtype):  # the floating-point arrays of a tree in a dtype
    real = lambda y: hasattr(y, "dtype") and jax.numpy.issubdtype(y.dtype, jax.numpy.floating)
    return jax.tree.map(lambda y: y.astype(dtype) if real(y) else y, x)
"""


def _with_casts(
    old: Sequence[str], lines: dict[int, set[str]], carrier: str, known: dict[str, Any]
) -> tuple[list[str], list[tuple[int, str]], list[tuple[int, str]]]:
    """The lines with casts, the casts, and the lines that have none with the reason."""
    tree = ast.parse("".join(old))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return)]
    chosen: dict[ast.stmt, set[str]] = {}
    casts, left = list[tuple[int, str]](), list[tuple[int, str]]()
    for line, names in sorted(lines.items()):
        around = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0) and node.value]
        if around:
            chosen.setdefault(max(around, key=lambda node: node.lineno), set()).update(names)
        else:
            left.append((line, "no assignment and no return"))
    inserted: list[tuple[int, int, str]] = []
    for node, names in chosen.items():
        value: Any = node.value  # type: ignore[attr-defined]
        (name, *others) = sorted(names)
        if others or name not in map(str, _DTYPES.values()):
            left.append((node.lineno, f"it computes in {', '.join(sorted(names))}"))
            continue
        spans = [(value, carrier), *((one, name) for one in _operands(value, known))]
        for one, dtype in spans:
            inserted.append((one.lineno, one.col_offset, "_to("))
            inserted.append((one.end_lineno, one.end_col_offset, f', "{dtype}")'))
        casts.append((node.lineno, name))
    new = [line.encode() for line in old]
    for line, column, text in sorted(inserted, key=lambda one: (one[0], one[1], one[2] == "_to("), reverse=True):
        new[line - 1] = new[line - 1][:column] + text.encode() + new[line - 1][column:]
    out = [line.decode() for line in new]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    at = (imports[-1].end_lineno or 0) if imports else 0
    has_jax = any(
        a.name == "jax" and not a.asname for node in imports if isinstance(node, ast.Import) for a in node.names
    )
    head = ("" if has_jax else "import jax\n") + _CAST + ("" if at else "\n\n")
    return [*out[:at], *head.splitlines(True), *out[at:]], casts, left


def _operands(node: ast.AST, known: dict[str, Any]) -> Iterator[Any]:
    """The expressions of data in an expression: names, and parts of them, but functions and modules."""
    root = node
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if isinstance(root, ast.Name) and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        if root.id not in known and isinstance(node.ctx, ast.Load):
            yield node
        return
    for name, field in ast.iter_fields(node):
        if isinstance(node, ast.Call) and name == "func":
            inner = field.value if isinstance(field, ast.Attribute) else None
            yield from _operands(inner, known) if inner is not None else ()
        elif not isinstance(node, ast.Lambda) or name == "body":
            for one in field if isinstance(field, list) else [field]:
                yield from _operands(one, known) if isinstance(one, ast.AST) else ()
