"""A mutation run: would the default tests notice a small fault?

Run it in a clone, by hand; pytest does not collect it. It needs coverage.py (`pip install coverage`)::

    python tests/mutate.py reach                          # first: which default test runs which line
    python tests/mutate.py run                            # the sown faults, then a sample of every package
    python tests/mutate.py run jchop/optim --each 40      # more of a folder or a file
    python tests/mutate.py run --again                    # those that survived, after tests were added
    python tests/mutate.py table > tests/mutants.md

A mutant is one file with one fault: a comparison, a sign, an axis, a key used twice, a state that is not updated ...
(`faults`). It runs in a process of its own, forked from one that has imported JAX, in a copy of the clone, against the
default tests that reach its line: those that have killed before, then of each file one case of each test, then all
others, until one fails or the seconds of work are used up. Compiled programs of the original are kept (`--work`); those
of mutants are not. The draw depends on the text of the lines alone: a change elsewhere moves few mutants.

Every result is a line of `--out` at once, and a run goes on where it was stopped. At the end every test that has killed
a mutant has to pass on the original. The exit status is 1 where fewer than 95 % of the mutants die. Mutants that change
no result stand in `EQUIVALENT`, with the reason; they are listed and not run.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: The share of mutants that has to die.
ENOUGH = 0.95
#: The exit code of a run that was none.
_BROKEN = 99
#: So many files of tests, those with the most words of the mutant's path, are in the first part of its tests.
_NEAR = 6
#: What is imported before the first fork.
_IMPORTED = "jax numpy scipy.stats pytest hypothesis flax.nnx flax.linen optax equinox haiku torch matplotlib.pyplot"
#: Of the plugins some are imported by then.
_PYTEST = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=17", "-W", "ignore::pytest.PytestAssertRewriteWarning")

# -- the sample --------------------------------------------------------------------------------------------------------

_CORE = tuple(
    f"jchop/{name}"
    for name in (*("_core/", "_spec/", "formats/", "_round/", "_common/bit_ops.py", "_common/gradients.py"),)
)
#: Files that only make words.
_WORDS = ("jchop/_common/text.py", "jchop/_common/html.py", "jchop/_cli/_command.py", "jchop/_cli/_completion.py")
#: The mutants of the core, of all other packages together, and the least of one package.
_OF_CORE, _OF_OTHERS, _LEAST = 80, 340, 12


def package(path: str) -> str:
    """What a file is counted to: ``"core"``, the folder in `jchop`, or ``"root"``."""
    if path.startswith(_CORE):
        return "core"
    return path.split("/")[1] if path.count("/") > 1 else "root"


def files(within: Iterable[str] = ("jchop",), root: Path = ROOT) -> list[str]:
    """The files whose faults are more than words."""
    found = (file for name in within for file in sorted((root / name).rglob("*.py")) or [root / name])
    return [name for file in found if not (name := file.relative_to(root).as_posix()).startswith(_WORDS)]


def shares(lines: dict[str, int]) -> dict[str, int]:
    """How many mutants each package gets, from the numbers of its lines."""
    others = sum(lines.values()) - lines["core"]
    counts = {name: max(_LEAST, round(_OF_OTHERS * count / others)) for name, count in lines.items()}
    return counts | {"core": _OF_CORE}


def sample(seed: int = 17) -> list[Mutant]:
    """The mutants of a run: so many of the core, and of each other package in proportion to its lines."""
    found: dict[str, list[Mutant]] = {}
    for path in files():
        found.setdefault(package(path), []).extend(mutants(path))
    counts = shares({name: len({(mutant.path, mutant.line) for mutant in of_it}) for name, of_it in found.items()})
    return [mutant for name in sorted(found) for mutant in drawn(found[name], counts[name], seed)]


def drawn(found: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """At most `count` of these mutants, of as many lines: the kinds take turns, and hashes order those of a kind."""
    kinds = collections.defaultdict(list)
    for mutant in found:
        kinds[mutant.kind].append((zlib.crc32(f"{seed} {mutant.key}".encode()), mutant))
    queues = {kind: iter(sorted(of_it, key=lambda pair: pair[0])) for kind, of_it in kinds.items()}
    turns = sorted(queues, key=lambda kind: zlib.crc32(f"{seed} {len(kinds[kind])} {kind}".encode()))
    picked: dict[tuple[str, int], Mutant] = {}
    while turns and len(picked) < count:
        kind = turns.pop(0)
        mutant = next((mutant for _, mutant in queues[kind] if (mutant.path, mutant.line) not in picked), None)
        if mutant is not None:
            picked[mutant.path, mutant.line] = mutant
            turns.append(kind)
    return sorted(picked.values(), key=lambda mutant: (mutant.path, mutant.line))


#: Faults put by hand: what they are, the file, what stands in it, and what the fault puts there.
SOWN: dict[str, tuple[str, str, str]] = {
    "GPTQ: the errors of a block never leave it": (
        "jchop/ptq/_steps/round.py",
        "matrix = matrix - jnp.matmul(upper_rows.T, errors, precision=_ROUND_PRECISION)",
        "pass",
    ),
    "`low_precision`: accumulator and weight draw the same bits": (
        "jchop/optim/_chain.py",
        "return master, base.rounded_sum(second, jnp.zeros_like(p), master, to_weight)",
        "return master, base.rounded_sum(first, jnp.zeros_like(p), master, to_weight)",
    ),
    '`DelayedScaling(take="last")` takes the maximum': (
        "jchop/_quantized/products/scales.py",
        'past_magnitude = history[0] if source.take == "last" else history.max()',
        "past_magnitude = history.max()",
    ),
    "`MovingAverage` has its two weights swapped": (
        "jchop/_quantized/products/scales.py",
        "source.decay * state + (1 - source.decay) * own_range",
        "(1 - source.decay) * state + source.decay * own_range",
    ),
    "`average_params` divides by all steps, not by those that it averages": (
        "jchop/optim/_chain.py",
        "/ count.astype(average.dtype)",
        "/ steps.astype(average.dtype)",
    ),
    "`compensate` forgets the earlier error": (
        "jchop/optim/_chain.py",
        "change = u.astype(wide) + error.astype(wide)",
        "change = u.astype(wide)",
    ),
    "`psum_with_feedback`: the error of a sum is never reset": (
        "jchop/distributed/_training.py",
        "new_sum_error = piece_sum - messages.decode_messages(q, piece_sum.dtype)",
        "new_sum_error = piece_sum",
    ),
    "the ring of `psum` draws the same bits in every turn": (
        "jchop/distributed/_messages.py",
        "sum_key = fold_in_numbers(key, Phase.SUM, step, axes.rank)",
        "sum_key = fold_in_numbers(key, Phase.SUM, 0, axes.rank)",
    ),
    "SmoothQuant: inverted factors": (
        "jchop/ptq/_equalize/mapping.py",
        "bounds[0] ** step.alpha / bounds[1] ** (1 - step.alpha)",
        "bounds[1] ** (1 - step.alpha) / bounds[0] ** step.alpha",
    ),
    "AWQ: losses are of weights whose factors are not divided out": (
        "jchop/ptq/_equalize/mapping.py",
        ".astype(gram.dtype) / s[:, :, None]",
        ".astype(gram.dtype)",
    ),
    "LoRA: the factor of an adapter beside its layer is ignored": (
        "jchop/nn/_shared/lora_rule.py",
        "(projection @ b * rule.factor)",
        "(projection @ b)",
    ),
    "NNX: a quantized program leaves the state as it was": (
        "jchop/nn/_nnx/programs.py",
        "nnx.update(model, self.state)",
        "pass",
    ),
    "the packed cache of NNX writes every token at the first place": (
        "jchop/nn/_shared/cache.py",
        "layer.cache_index[...] = index + 1",
        "layer.cache_index[...] = index",
    ),
    "a paged `KVCache` writes at the position, not at the place in its page": (
        "jchop/_serving/kv_cache.py",
        "slot, fits = position % slots, fits & (row != NO_PAGE)",
        "slot, fits = position, fits & (row != NO_PAGE)",
    ),
    "GPTQ checkpoints: scales are read without being transposed": (
        "jchop/_checkpoints/layouts.py",
        "scale = np.ascontiguousarray(row.as_scales(scales, scales.shape).T)\n    if index is not None",
        "scale = row.as_scales(scales, scales.shape).reshape(codes.shape[0], -1)\n    if index is not None",
    ),
    "`jchop.torch.OptimLP` draws the same bits in every step": (
        "jchop/torch/_optim.py",
        "numbers = self.seed, self.steps, leaf.index,",
        "numbers = self.seed, 0, leaf.index,",
    ),
    "`blame`: the derivative of the output is that at the emulated result alone": (
        "jchop/_insight/reports/blame.py",
        "mean = (x + y) / 2",
        "mean = x",
    ),
}

#: Mutants with the results of the original: (file, the line, what stands in it, what the mutant has) and why.
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (row["path"], row["line"], row["before"], row["after"]): row["why"]
    for row in json.loads((ROOT / "tests/data/equivalent_mutants.json").read_text("utf-8"))
}

# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One place of a file, `before`, replaced by `after`; the bytes from `start` to `end`."""

    path: str
    line: int
    text: str  # the line that it begins in
    kind: str
    before: str
    after: str
    start: int
    end: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.path, self.text, self.before, self.after

    def source(self, root: Path = ROOT) -> bytes:
        whole = (root / self.path).read_bytes()
        return whole[: self.start] + self.after.encode() + whole[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"{self.path}:{self.line}  {before}  ->  {after or '(left out)'}"


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
#: The kind of an operator, what it is changed to, and whether its second operand may be left out.
_OPERATORS: dict[type[ast.operator], tuple[str, type[ast.operator], bool]] = {
    ast.Add: ("sign", ast.Sub, True),
    ast.Sub: ("sign", ast.Add, True),
    ast.Mult: ("factor", ast.Div, True),
    ast.Div: ("factor", ast.Mult, True),
    ast.FloorDiv: ("arithmetic", ast.Mult, False),
    ast.Mod: ("arithmetic", ast.FloorDiv, False),
    ast.LShift: ("bits", ast.RShift, False),
    ast.RShift: ("bits", ast.LShift, False),
    ast.BitAnd: ("bits", ast.BitOr, True),
    ast.BitOr: ("bits", ast.BitAnd, True),
    ast.BitXor: ("bits", ast.BitOr, True),
    ast.Pow: ("arithmetic", ast.Mult, False),
}
_FUNCTIONS = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "argmin": "argmax", "sum": "mean"}
_FUNCTIONS |= {other: name for name, other in _FUNCTIONS.items()}
_AXES = {"axis", "axes", "dimension", "axis1", "axis2", "dim", "batch_axis", "in_axes", "out_axes"}
#: Functions whose second argument is an axis.
_BY_AXIS = re.compile("sum|mean|max|min|any|all|argmin|argmax|cumsum|concatenate|stack|expand_dims|squeeze|take|sort")
_TURNS = {"transpose", "swapaxes", "moveaxis", "flip", "roll", "rev"}
_COUNTS = re.compile("(group|block|count|size|length|steps|rank|width|bits|number|chunk|many)")
_SPLITS = {"split", "split_key", "random.split", "jax.random.split"}
_EFFECTS = re.compile("append|extend|add|update|setdefault|pop|insert|clear|sort|remove|discard|reverse")
#: What has no value: messages, checks for the type checker, imports, patterns.
_SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.pattern)
_SKIPPED_CALLS = {"isinstance", "issubclass", "add_argument", "add_parser", "warn", "print", "cast", "TypeVar"}
_SKIPPED_KEYWORDS = {"strict", "inline", "stacklevel", "help", "name", "category"}
_SKIPPED_FUNCTIONS = re.compile("__(repr|str|dir|format)__|_repr_.*")
_BEGINNINGS = {"__init__", "__new__", "__post_init__", "setup"}


def _name(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _number(node: ast.AST) -> int | None:
    """The value of an integer that is written out."""
    value = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    if isinstance(value, ast.Constant) and type(value.value) is int:
        return value.value if value is node else -value.value
    return None


def faults(node: ast.AST, function: str = "") -> Iterator[tuple[str, Any, str]]:
    """The faults of one node in a function: their kind, the node that is replaced, and by what."""
    yield from _of_statement(node, function)
    for kind, place, after in _of_expression(node):
        yield kind, place, after and f"({after})"


def _of_statement(node: ast.AST, function: str) -> Iterator[tuple[str, Any, str]]:
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Call(called, [key, *rest]) as value) if (
            ast.unparse(called) in _SPLITS
        ):
            same, count = f"({ast.unparse(key)},)", ast.unparse(rest[0]) if rest else ""
            nested = f"({same[1:-2]}, {same} * ({count}))"  # the next key, and a tuple of others
            yield "key", value, nested if _name(called) == "split_key" else f"{same} * {len(targets)}"
        case ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.AnnAssign(ast.Attribute()):
            if function not in _BEGINNINGS:
                yield "state", node, "pass"
        case ast.AugAssign():
            yield "statement", node, "pass"
        case ast.Expr(ast.Call(ast.Attribute(_, name))) if _EFFECTS.fullmatch(name):
            yield "statement", node, "pass"
        case ast.For(_, ast.Call(ast.Name("range"), [*_, last])):
            yield "loop", last, f"{ast.unparse(last)} - 1"
        case ast.For(_, many):
            yield "loop", many, f"list({ast.unparse(many)})[:-1]"
        case ast.While(test):
            yield "loop", test, "False"
        case ast.If(test, [ast.Raise()]):
            yield "check", test, "False"
        case ast.If(test):
            yield "branch", test, "False"


def _of_expression(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    match node:
        case ast.Compare(left, [op, *ops], values):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", node, ast.unparse(ast.Compare(left, [other(), *ops], values))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            kind, other, is_term = _OPERATORS[type(op)]
            if not isinstance(left, ast.List | ast.Tuple | ast.Constant | ast.Dict) or _number(left) is not None:
                yield kind, node, ast.unparse(ast.BinOp(left, other(), right))
            if is_term:
                yield kind, node, ast.unparse(left)
            if isinstance(op, ast.FloorDiv):
                yield "count", node, f"{ast.unparse(node)} + 1"
        case ast.IfExp(ast.Compare(_, [ast.Is() | ast.IsNot() as op], [ast.Constant(None)]), body, other):
            yield "default", node, ast.unparse(body if isinstance(op, ast.Is) else other)
        case ast.IfExp(test, body, other):
            yield "branch", node, ast.unparse(ast.IfExp(test, other, body))
            yield "branch", node, ast.unparse(other)
        case ast.BoolOp(op, values):
            if isinstance(op, ast.Or):
                yield "default", node, ast.unparse(values[-1])
            yield (
                "comparison",
                node,
                ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)),
            )
            yield "comparison", node, ast.unparse(ast.BoolOp(op, values[:-1]) if len(values) > 2 else values[0])
        case ast.UnaryOp(op, operand):
            yield "sign" if isinstance(op, ast.USub) else "comparison", node, ast.unparse(operand)
        case ast.Constant(bool() as value):
            yield "constant", node, repr(not value)
        case ast.Constant(int() as value):
            yield "constant", node, repr(value + 1)
            yield "constant", node, repr(value - 1) if value else "0 - 1"
        case ast.Constant(float() as value):
            yield "constant", node, repr(value * 2 if value else 1.0)
        case ast.Attribute(value, "T" | "mT"):
            yield "axis", node, ast.unparse(value)
        case ast.Subscript(value, place, ast.Load()) if _number(place) == -1:
            yield "last", node, f"{ast.unparse(value)}[0]"
            shape = isinstance(value, ast.Attribute) and value.attr == "shape"
            yield "last", node, f"{'' if shape else 'jnp.'}max({ast.unparse(value)})"
        case ast.Subscript(ast.Attribute(_, "shape"), place, ast.Load()) if not isinstance(place, ast.Slice):
            yield "count", node, f"{ast.unparse(node)} - 1"
        case ast.Call():
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, Any, str]]:
    function, arguments, name = node.func, node.args, _name(node.func)
    receiver = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    is_method = receiver not in ("", "jnp", "np", "jax", "lax", "jax.lax", "dataclasses", "math", "torch", "jax.numpy")
    whose = receiver if is_method else ast.unparse(arguments[0]) if arguments else ""
    if name in _FUNCTIONS and whose:
        renamed = ast.unparse(function).removesuffix(name) + _FUNCTIONS[name]
        yield "function", function, renamed
        few = len(arguments) + len(node.keywords) + is_method == 1
        if name == "max" and few and not whose.startswith(("*", "(")):
            yield "last", node, f"{whose}[-1]"
    elif name == "where" and len(arguments) == 3:
        yield "function", node, ast.unparse(ast.Call(function, [arguments[i] for i in (0, 2, 1)], node.keywords))
    elif name in ("abs", "floor", "ceil", "rint", "round") and len(arguments) == 1:
        yield "function", node, whose
    elif name == "fold_in":
        yield "key", node, ast.unparse(arguments[0])
    elif name in _TURNS and whose:
        yield "axis", node, whose
    elif name == "_replace" or (name == "replace" and len(arguments) == 1):
        yield "state", node, whose
    elif name in ("set", "add", "max", "mul", "multiply") and receiver and ".at[" in receiver:
        yield "state", node, receiver[: receiver.index(".at[")]
    elif name == "len":
        yield "count", node, f"{ast.unparse(node)} - 1"
    elif name == "fori_loop" and len(arguments) == 4:
        yield "loop", arguments[1], f"{ast.unparse(arguments[1])} - 1"
    axes = [word.value for word in node.keywords if word.arg in _AXES]
    for axis in axes + (
        [arguments[1 - is_method]] if _BY_AXIS.fullmatch(name) and len(arguments) > 1 - is_method else []
    ):
        if (number := _number(axis)) is not None:
            yield "axis", axis, str({0: -1, -1: 0}.get(number, number - 1))
    for word in node.keywords:
        if word.arg and word.arg not in _SKIPPED_KEYWORDS:
            yield "argument", word, ""
            if _COUNTS.search(word.arg) and not isinstance(word.value, ast.Constant):
                yield "count", word.value, f"{ast.unparse(word.value)} + 1"


def _has_no_value(node: ast.AST) -> bool:
    """Whether a node names types, asks for them, makes words, or changes no value."""
    match node:
        case ast.Assign():
            return _is_of_types(node.value)
        case ast.Call():
            return _name(node.func) in _SKIPPED_CALLS
        case ast.keyword(name):
            return name in _SKIPPED_KEYWORDS
        case ast.FunctionDef(name):
            return _SKIPPED_FUNCTIONS.fullmatch(name) is not None
        case ast.If(ast.Name(name)):
            return name == "TYPE_CHECKING"
        case ast.Expr(ast.Constant()):
            return True
    return isinstance(node, _SKIPPED)


def _is_of_types(value: ast.expr) -> bool:
    """Whether a value is a union of types, or a name for one."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_of_types(value.left) and _is_of_types(value.right)
    named = value.value if isinstance(value, ast.Subscript) else value
    name = _name(named)
    return name[:1].isupper() or name in ("int", "str", "float", "tuple", "dict") or ast.unparse(value) == "None"


def places(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The nodes that make values, with the name of their function; no annotations, decorators, messages or types."""
    if _has_no_value(node):
        return
    yield node, function
    parts: Iterable[Any] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef):
        parts = [*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body]
        function = node.name
    elif isinstance(node, ast.ClassDef):
        parts = node.body
    elif isinstance(node, ast.AnnAssign):
        parts = [node.value] if node.value else []
    for part in parts:
        yield from places(part, function)


def mutants(path: str, root: Path = ROOT) -> list[Mutant]:
    """All mutants of a file."""
    whole = (root / path).read_bytes()
    lines = whole.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]
    found = []
    for node, function in places(ast.parse(whole)):
        for kind, place, after in faults(node, function):
            start, end = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            if not after:  # an argument goes with its comma
                end += len(re.match(rb"\s*,?", whole[end:])[0])  # type: ignore[index]
            text, before = lines[place.lineno - 1].decode().strip(), whole[start:end].decode()
            found.append(Mutant(path, place.lineno, text, kind, before, after, start, end))
    return found


def sown(root: Path = ROOT) -> dict[str, Mutant]:
    """The faults of `SOWN`, by what they are."""
    found = {}
    for what, (path, before, after) in SOWN.items():
        whole = (root / path).read_bytes()
        start, end = whole.index(before.encode()), whole.index(before.encode()) + len(before.encode())
        line = whole[:start].count(b"\n") + 1
        found[what] = Mutant(
            path, line, whole.splitlines()[line - 1].decode().strip(), "sown", before, after, start, end
        )
    return found


# -- the tests of a line -----------------------------------------------------------------------------------------------


class _Tracer:
    """A plugin of pytest: writes for each file of tests their seconds and the lines of the package that they run."""

    def __init__(self, folder: Path, root: Path) -> None:
        coverage: Any = importlib.import_module("coverage")
        self.folder, self.root = folder, root
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{root}/jchop/*"])
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.seconds: dict[str, float] = {}
        self.unfit: set[str] = set()  # tests that fail or are skipped

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.unfit.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Generator[None, Any, Any]:
        if not self.seconds:
            self.coverage.start()
        self.coverage.switch_context(item.nodeid)
        before = sum(os.times()[:4])
        result = yield
        self.seconds[item.nodeid] = sum(os.times()[:4]) - before
        file = item.nodeid.split("::")[0]
        if nextitem is None or nextitem.nodeid.split("::")[0] != file:
            self.coverage.stop()
            (self.folder / (file.replace("/", "+") + ".json")).write_text(json.dumps(self._seen()))
            self.coverage.erase()
            self.seconds.clear()
        return result

    def _seen(self) -> dict[str, Any]:
        data, seconds = self.coverage.get_data(), {t: s for t, s in self.seconds.items() if t not in self.unfit}
        number = {test: i for i, test in enumerate(seconds)}
        lines = {}
        for path in data.measured_files():
            by_tests = collections.defaultdict(list)
            for line, tests in data.contexts_by_lineno(path).items():
                by_tests[tuple(sorted(number[test] for test in tests if test in number))].append(line)
            lines[Path(path).relative_to(self.root).as_posix()] = list(by_tests.items())
        return {"seconds": seconds, "lines": lines}


@dataclass
class Reach:
    """Which default tests run which lines.

    Args:
        seconds: of work, by test.
        lines: for each file of the package, sets of tests with the lines that all of them run.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[tuple[list[str], set[int]]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Reach:
        found = cls()
        for file in sorted(folder.glob("*.json")):
            if not (ROOT / file.stem.replace("+", "/")).exists():
                continue
            seen = json.loads(file.read_text())
            names = list(seen["seconds"])
            found.seconds |= seen["seconds"]
            for path, groups in seen["lines"].items():
                known = found.lines.setdefault(path, [])
                known += [([names[i] for i in tests], set(lines)) for tests, lines in groups if tests]
        return found

    def of(self, path: str, lines: Iterable[int] | None) -> set[str]:
        """The tests that run one of the lines; None: any of the file."""
        groups = self.lines.get(path, [])
        wanted = None if lines is None else set(lines)
        return {test for tests, known in groups if wanted is None or known & wanted for test in tests}

    def of_mutant(self, mutant: Mutant, root: Path = ROOT) -> set[str]:
        """The tests that run the statement of a mutant; of what runs at import, those that run any of the file."""
        return self.of(mutant.path, statement_lines((root / mutant.path).read_text(), mutant.line))

    def chosen(
        self, mutant: Mutant, killers: Iterable[str] = (), most: float = 120, root: Path = ROOT
    ) -> list[list[str]]:
        """The tests of a mutant, in the order in which they run, in two parts: the second follows if none fails.

        What a test has compiled or kept serves the next one of its file, which then runs fewer lines: after those that
        reach the line come the others of the nearest files. Of a line that none reaches the first part is tried: it may
        run when tests are collected, or in a process that they start.
        """
        reached = self.of_mutant(mutant, root)
        direct = reached or self.of(mutant.path, None)
        by_file: dict[str, list[str]] = {}
        for test in sorted(direct, key=lambda test: (self.seconds[test], test)):
            by_file.setdefault(test.split("::")[0], []).append(test)
        named = _words(mutant.path)
        files = sorted(by_file, key=lambda file: (-len(named & _words(file)), self.seconds[by_file[file][0]], file))
        first, second = [test for test in killers if test in direct], list[str]()
        for place, file in enumerate(files):
            one_each = {test.split("[")[0]: test for test in reversed(by_file[file])}.values()
            (first if place < _NEAR else second).extend(sorted(one_each, key=self.seconds.__getitem__))
        second += [test for file in files for test in by_file[file]]
        near = set(files[:_NEAR])
        second += [test for test in self.seconds if test.split("::")[0] in near and test not in direct]
        used, parts, done = 0.0, [], set[str]()
        for part in (first, second if reached else []):
            parts.append([])
            for test in part:
                if test not in done and used < most:
                    used += self.seconds[test]
                    done.add(test)
                    parts[-1].append(test)
        return [part for part in parts if part]


def _words(path: str) -> set[str]:
    """What a path is about; `core` and the like are in many."""
    return set(re.split(r"[/_.]+", path.removesuffix(".py"))) - {"", "jchop", "tests", "test", "core"}


def statement_lines(source: str, line: int) -> range | None:
    """The lines of the statement of a line, of a compound one those of its head; None for what runs at import."""
    found, inside = None, False
    node: ast.AST = ast.parse(source)
    while True:
        parts = [part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node]
        around = [part for part in parts if part.lineno <= line <= (part.end_lineno or 0)]
        if not around:
            return found if inside else None
        node = around[0]  # the outermost: `walk` goes level by level
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno
        found = range(node.lineno, max(last or 0, node.lineno) + 1)
        if isinstance(node, ast.FunctionDef) and body and line >= body[0].lineno:
            inside = True


# -- runs --------------------------------------------------------------------------------------------------------------


class _Judge:
    """A plugin of pytest: runs the chosen tests in their order, and writes down which one runs or has failed.

    A test that takes many times its seconds is ended by a signal, with the process.
    """

    def __init__(self, tests: list[str], seconds: dict[str, float], most: float, said: Path) -> None:
        self.tests, self.seconds, self.most, self.said = tests, seconds, most, said
        self.failed: list[str] = []
        self.loaded = False

    def pytest_collection(self) -> None:
        self.loaded = True  # and conftest.py with it

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        known = {item.nodeid: item for item in items}
        items[:] = [known[test] for test in self.tests if test in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        self.said.write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, 60 + 20 * self.seconds.get(item.nodeid, 0.0))
        result = yield
        if sum(os.times()[:4]) > self.most:
            item.session.shouldstop = "enough"
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


@dataclass
class _Try:
    """A mutant that is run: its parts of tests that are left, the copy that it has, and the seconds so far."""

    mutant: Mutant | None
    parts: list[list[str]] | None = None
    place: int = 0
    begun: float = 0.0
    seconds: float = 0.0
    original: bytes = b""
    changed: tuple[int, int] = (0, 0)


@dataclass
class Runner:
    """Runs tests on copies of the clone, in forked processes.

    Args:
        work: a folder for the copies, compiled programs and the logs.
        reach: which tests run which lines.
        most: seconds of work that a mutant gets.
        jobs: so many at once.
        killers: tests that have failed, the last first, by file of the package.
    """

    work: Path
    reach: Reach
    most: float = 120
    jobs: int = 1
    killers: dict[str, list[str]] = field(default_factory=dict)

    def run(
        self, tried: Iterable[Mutant | None], tests: list[str] | None = None
    ) -> Iterator[tuple[Any, str, str, float]]:
        """Gives for each mutant ``"survived"``, ``"killed"`` or ``"timeout"``, the test that failed, and the seconds.

        Args:
            tried: the mutants; None is the original.
            tests: the tests; None: those that reach the mutant.
        """
        waiting = collections.deque(_Try(mutant, [tests] if tests else None) for mutant in tried)
        running, free = dict[int, _Try](), list(range(self.jobs))
        while waiting or running:
            while free and waiting:
                one = waiting.popleft()
                if one.parts is None and one.mutant is not None:
                    one.parts = self.reach.chosen(one.mutant, self.killers.get(one.mutant.path, []), self.most)
                if not one.parts:
                    yield one.mutant, "survived", "", one.seconds
                    continue
                one.place, one.begun = free.pop(), time.monotonic()
                running[self._start(one)] = one
            for child, one in running.items():
                if time.monotonic() - one.begun > 600 + 10 * self.most:
                    os.killpg(child, signal.SIGKILL)
            if not running:
                return
            child, status, usage = os.wait4(-1, os.WNOHANG)
            if not child:
                time.sleep(0.02)
                continue
            one = running.pop(child)
            free.append(one.place)
            one.seconds += usage.ru_utime + usage.ru_stime
            exit_code, failed = os.waitstatus_to_exitcode(status), self._said(one.place).read_text()
            self._put(one, back=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what its tests have started
            if exit_code == _BROKEN:
                raise SystemExit(f"pytest cannot run these tests; see {self.work / f'log{one.place}.txt'}")
            if not exit_code and one.parts and one.seconds < self.most:
                waiting.appendleft(one)
                continue
            result = {0: "survived", -signal.SIGPROF: "timeout", -signal.SIGKILL: "timeout"}.get(exit_code, "killed")
            if one.mutant and "::" in failed:
                known = self.killers.setdefault(one.mutant.path, [])
                known[:] = [failed, *(name for name in known if name != failed)]
            yield one.mutant, result, failed, one.seconds

    def _said(self, place: int) -> Path:
        return self.work / f"said{place}.txt"

    def _put(self, one: _Try, back: bool = False) -> None:
        """The mutant's file into the copy, or the original with its time, by which compiled Python is found."""
        if one.mutant is None:
            return
        copy = self.work / f"copy{one.place}"
        file = copy / one.mutant.path
        if back:
            file.write_bytes(one.original)
            os.utime(file, ns=one.changed)
        else:
            one.original, one.changed = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
            file.write_bytes(one.mutant.source(copy))

    def _start(self, one: _Try) -> int:
        tests = (one.parts or [[]]).pop(0)
        self._said(one.place).write_text("")
        self._put(one)
        child = os.fork()
        if child:
            return child
        os.setsid()
        log = os.open(self.work / f"log{one.place}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            limit = self.most - one.seconds if one.mutant else 1e9
            signal.setitimer(signal.ITIMER_PROF, 120 if one.mutant else 0)  # a loop without an end, at import
            judge = _Judge(tests, self.reach.seconds, limit, self._said(one.place))
            within = dict.fromkeys(test.split("::")[0] for test in tests)
            arguments = ["-x"] if one.mutant else []
            code = run_pytest(self.work / f"copy{one.place}", [*arguments, *within], judge)
            failed = judge.failed
            if code == 4 and not judge.loaded:
                failed = ["tests/conftest.py"]
            elif code == 4 or (code == 3 and one.mutant is None):
                os._exit(_BROKEN)
            elif code in (0, 5) or not failed:
                code, failed = int(code == 3), []
            self._said(one.place).write_text("\n".join(failed))
        finally:
            os._exit(code)


def run_pytest(copy: Path, arguments: list[str], plugin: Any) -> int:
    """Pytest in this process, on the copy; only the reaching run writes compiled Python there."""
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    sys.dont_write_bytecode = isinstance(plugin, _Judge)
    return int(pytest.main([*_PYTEST, *arguments], plugins=[plugin]))


def prepare(options: argparse.Namespace, copies: int, keeps: bool) -> None:
    """The copies, and this process as one to fork: JAX is imported, and no device of it is started."""
    work = options.work
    (work / "reach").mkdir(parents=True, exist_ok=True)
    if options.cache and not (work / "compiled").exists():
        shutil.copytree(options.cache, work / "compiled", copy_function=os.link)
    for place in range(copies):
        shutil.rmtree(work / f"copy{place}", ignore_errors=True)
        left_out = shutil.ignore_patterns(".git", ".venv", ".cache", "_build", "*.egg-info")
        shutil.copytree(ROOT, work / f"copy{place}", ignore=left_out)
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0" if keeps else "1000"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    for name in _IMPORTED.split():
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(error, file=sys.stderr)


def reach(options: argparse.Namespace) -> int:
    """Runs the default tests once, those of changed files if no paths are given."""
    prepare(options, 1, keeps=True)
    folder, copy = options.work / "reach", options.work / "copy0"
    compiled = ["-m", "compileall", "-q", "jchop"]
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *compiled])
    tests = options.paths or [
        path.relative_to(copy).as_posix()
        for path in sorted((copy / "tests").rglob("test_*.py"))
        if not (seen := folder / (path.relative_to(copy).as_posix().replace("/", "+") + ".json")).exists()
        or seen.stat().st_mtime < path.stat().st_mtime
    ]
    return run_pytest(copy, tests, _Tracer(folder, copy)) if tests else 0


def results(out: Path) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """The last record of each mutant whose line is still there."""
    records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    found = {(record["path"], record["text"], record["before"], record["after"]): record for record in records}
    there = by_key(path for path, *_ in found)
    return {key: record for key, record in found.items() if key in there}


def by_key(paths: Iterable[str]) -> dict[tuple[str, str, str, str], Mutant]:
    """The mutants of some files, of which some may be gone, and the sown faults."""
    there = (path for path in dict.fromkeys(paths) if (ROOT / path).exists())
    found = {mutant.key: mutant for path in there for mutant in mutants(path)}
    return found | {mutant.key: mutant for mutant in sown().values()}


def run(options: argparse.Namespace) -> int:
    """Runs the mutants that have no result yet, or (`--again`) those that survived."""
    seen = results(options.out)
    if options.again:
        every = by_key(path for path, *_ in seen)
        picked = [every[key] for key, record in seen.items() if record["result"] == "survived"]
    elif options.paths:
        picked = [
            mutant
            for path in options.paths
            for mutant in drawn((m for file in files([path]) for m in mutants(file)), options.each, options.seed)
        ]
    else:
        picked = [*sown().values(), *sample(options.seed)]
    tried = [m for m in picked if (options.again or m.key not in seen) and m.key not in EQUIVALENT][
        : options.most_mutants
    ]
    prepare(options, options.jobs, keeps=False)
    known = Reach.read(options.work / "reach")
    runner = Runner(options.work, known, options.limit, options.jobs)
    cheapest = sorted(known.seconds, key=known.seconds.__getitem__)[:1]
    if not cheapest or next(runner.run([None], cheapest))[1] != "survived":
        raise SystemExit(f"run `reach` first; or the cheapest test fails on the original: {options.work / 'log0.txt'}")
    for record in seen.values():
        if record["test"]:
            runner.killers.setdefault(record["path"], []).insert(0, record["test"])
    with options.out.open("a") as out:
        for mutant in picked:
            if mutant.key in EQUIVALENT and mutant.key not in seen:
                out.write(json.dumps({**asdict(mutant), "result": "equivalent", "test": "", "seconds": 0.0}) + "\n")
        for number, (mutant, result, failed, seconds) in enumerate(runner.run(tried), 1):
            record = {**asdict(mutant), "result": result, "test": failed, "seconds": round(seconds, 1)}
            record["reached"] = bool(known.of_mutant(mutant))
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"{number:4d}/{len(tried)}  {result:8s} {seconds:6.1f} s  {mutant}  {failed}", flush=True)
    seen = results(options.out)
    judges = list(dict.fromkeys(record["test"] for record in seen.values() if record["test"]))
    for _, result, failed, _ in runner.run([None] if judges else [], judges):
        if result != "survived":
            raise SystemExit(f"these have killed mutants and fail on the original:\n{failed}")
    dead = sum(record["result"] in ("killed", "timeout") for record in seen.values())
    alive = sum(record["result"] == "survived" and key not in EQUIVALENT for key, record in seen.items())
    print(f"{dead} of {dead + alive} caught")
    return int(dead < ENOUGH * (dead + alive))


# -- the table ---------------------------------------------------------------------------------------------------------


def table(options: argparse.Namespace) -> int:
    """Writes what a run has found, as Markdown."""
    seen = results(options.out)
    sown_keys = {mutant.key: what for what, mutant in sown().items()}
    of_package = collections.defaultdict(list)
    for key, record in seen.items():
        if record["kind"] != "sown":
            of_package[package(record["path"])].append((key, record))
    lines = ["# Mutants", "", "Written by `python tests/mutate.py table`; what a mutant is stands there.", ""]
    lines += ["| package | mutants | caught | equivalent | survived | share |", "|---|--:|--:|--:|--:|--:|"]
    total = [0, 0, 0]
    for name, found in [*sorted(of_package.items()), ("all", [])]:
        equal = sum(key in EQUIVALENT for key, _ in found)
        caught = sum(record["result"] in ("killed", "timeout") for _, record in found)
        counts = [len(found), caught, equal] if found else total
        total = [a + b for a, b in zip(total, counts, strict=True)]
        left = counts[0] - counts[2]
        share = f"{100 * counts[1] / left:.0f} %" if left else ""
        lines.append(f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} | {left - counts[1]} | {share} |")
    every = [pair for _, found in sorted(of_package.items()) for pair in found]
    alive = [(key, record) for key, record in every if record["result"] in ("survived", "equivalent")]
    lines += ["", "## Survivors", ""]
    for key, record in alive:
        if key not in EQUIVALENT:
            lines.append(f"- {_described(record)}: {'no test' if record.get('reached', True) else 'no test runs it'}")
    lines += ["", "## Equivalent", ""]
    lines += [f"- {_described(record)}: {EQUIVALENT[key]}" for key, record in alive if key in EQUIVALENT]
    lines += ["", "## Sown faults", "", "| fault | place | caught by |", "|---|---|---|"]
    for key, what in sown_keys.items():
        record = seen.get(key)
        by = "not run" if record is None else f"`{record['test']}`" if record["test"] else "**no test**"
        lines.append(f"| {what} | {key[0]} | {by} |")
    print("\n".join(lines))
    return 0


def _described(record: dict[str, Any]) -> str:
    before, after = (" ".join(record[part].split()) for part in ("before", "after"))
    return f"`{record['path']}:{record['line']}` {record['kind']}: `{before}` → {f'`{after}`' if after else 'left out'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reach", "run", "table"))
    parser.add_argument("paths", nargs="*", help="reach: files of tests; run: files or folders of the package")
    parser.add_argument("--each", type=int, default=5, help="mutants of each path; default 5")
    parser.add_argument("--first", dest="most_mutants", type=int, help="no more than so many mutants")
    parser.add_argument("--seed", type=int, default=17, help="which mutants; default 17")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="the results; default mutants.jsonl")
    parser.add_argument("--again", action="store_true", help="those that survived")
    parser.add_argument("--limit", type=float, default=120, help="seconds of work for a mutant; default 120")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once; default 1")
    parser.add_argument("--work", type=Path, default=Path("/tmp/jchop-mutants"), help="a folder for what is kept")
    parser.add_argument("--cache", type=Path, help="compiled programs to begin with")
    options = parser.parse_args()
    options.out, options.work = options.out.resolve(), options.work.resolve()
    return {"reach": reach, "run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
