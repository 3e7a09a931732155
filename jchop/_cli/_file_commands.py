"""``jchop quantize``, ``inspect``, ``convert`` and ``compare``: files of arrays."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jchop._checkpoints.checkpoint import LAYOUT_NAMES, OWN_LAYOUT, Checkpoint, open_checkpoint
from jchop._checkpoints.findings import Finding, checkpoint_findings
from jchop._checkpoints.table import fields_beside_weights
from jchop._checkpoints.writer import SHARD_BYTES, convert_checkpoint
from jchop._cli import _command as cli
from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, first_names, place_in_errors
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._insight.compare import COMPARISON_SCALES, Comparison, compare, default_formats
from jchop._spec.spec import as_spec
from jchop._storage import QArray, dequantize, quantize
from jchop._storage._chunks import TensorReport, TensorRule, choose_rules, fates_of, quantize_file, tensor_rule_error
from jchop._storage._files.npy import NpyFile


def _run_quantize(options: argparse.Namespace) -> None:
    rules = [parse_rule(text) for text in options.rule]
    if not options.target.is_dir():
        cli.check_new_file("OUT", options.target, options.force)
    if options.source.is_dir():
        _quantize_folder(options.source, options.target, rules, options.seed, options.json)
        return
    cli.key_of_seed_option(options.seed, [rule.spec for rule in rules])
    cli.check_suffix("OUT", options.target, ".safetensors")
    progress = cli.PercentProgress("quantize")
    reports = quantize_file(options.source, options.target, rules, seed=options.seed, progress=progress)
    cli.print_rows(_quantization_rows(reports), "<<<<>>>><", options.json)
    if not options.json:
        print()
        cli.print_written(options.target)


def _run_inspect(options: argparse.Namespace) -> int:
    with open_checkpoint(options.file, options.layout) as source:
        if not options.check:
            print(_checkpoint_contents(source, options.json))
            return 0
        findings = list(checkpoint_findings(source))
    if findings or options.json:
        cli.print_rows([Finding._fields, *findings], "<<", options.json)
    else:
        print("no faults")
    return 1 if findings else 0


# -- rules -------------------------------------------------------------------------------------------------------------


def parse_rule(text: str) -> TensorRule:
    """``PATTERN=SPEC``, split at the first equals sign before a valid spec, since a name may contain some."""
    reason = ValueError("there is no equals sign")
    for position in (i for i, letter in enumerate(text) if letter == "="):
        try:
            spec = as_spec(text[position + 1 :], scaled=True)
        except (ValueError, TypeError) as error:
            reason = reason if position > text.index("=") else error
            continue
        return TensorRule(check_path_pattern(f"--rule {text!r}: pattern", text[:position], "'mlp.kernel'"), spec)
    raise ValueError(f"--rule {text!r} must be PATTERN=SPEC, as 'kernel=int4(group=128)': {reason}")


# -- tables ------------------------------------------------------------------------------------------------------------


def _quantization_rows(reports: Sequence[TensorReport]) -> list[tuple[str, ...]]:
    head = ("tensor", "shape", "from", "to", "bytes before", "bytes after", "SNR dB", "max error", "note")
    rows: list[tuple[str, ...]] = [head]
    for report in reports:
        has_errors = not (report.copied or math.isnan(report.sqnr))
        errors = (_decibels_text(report.sqnr), f"{report.largest:.3g}") if has_errors else ("-", "-")
        facts, sizes = (report.name, _shape_text(report.shape), report.dtype, report.to), (report.before, report.after)
        rows.append((*facts, *(f"{size:,}" for size in sizes), *errors, _fates_text(report.fates)))
    before, after = (sum(getattr(report, name) for report in reports) for name in ("before", "after"))
    percent = f"{100 * after / before:.1f} %" if before else ""
    rows.append(("all", "", "", "", f"{before:,}", f"{after:,}", "", "", percent))
    return rows


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _decibels_text(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "exact" if value > 0 else "-inf"


QUANTIZE = cli.Command(
    "quantize",
    _run_quantize,
    "quantize the tensors of a safetensors file or folder",
    (
        cli.argument("source", "IN", "a safetensors file, or a folder of a model", type=Path),
        cli.argument("target", "OUT", "a safetensors file, or a new folder", type=Path),
        cli.argument("--rule", help="parts of names, as 'mlp.*.kernel' or '!norm', and their format or spec; may be "
                 "repeated"),
        cli.argument("--seed"),
        cli.argument("--force"),
        cli.argument("--json"),
    ),
    "Quantizes tensors by name and writes a new file, in one step when all is done. The first\n"
    "rule whose pattern matches parts of a name applies; tensors without a rule are copied.",
    "example:\n  jchop quantize in.safetensors out.safetensors \\\n"
    "      --rule 'kernel=int4(group=128,scale=bfloat16)' --rule '*=bfloat16'",
)  # fmt: skip
_SOURCE_LAYOUTS = ("auto", *LAYOUT_NAMES)
INSPECT = cli.Command(
    "inspect",
    _run_inspect,
    "list the contents of a checkpoint: a file or a folder",
    (
        cli.argument("file", "FILE", "a safetensors or GGUF file, or a folder of a model", type=Path),
        cli.argument("--layout", help="its layout; default auto", default="auto", choices=_SOURCE_LAYOUTS),
        cli.flag("--check", "list faults, one in a row; exit status 1 if there are any"),
        cli.argument("--json"),
    ),
    "Lists the arrays of a checkpoint. With --check it reads every array, and lists damaged arrays, NaN,\n"
    "scales of zero, shapes that contradict config.json, missing layers and heads, and NVFP4 scales that\n"
    "look inverted.",
    "examples:\n  jchop inspect model-awq\n  jchop inspect model-awq --check --json",
)


# -- convert, and inspect and quantize for folders and files of other programs -----------------------------------------


def _run_convert(options: argparse.Namespace) -> None:
    one_file = options.target.suffix.lower() in (".safetensors", ".gguf")
    if options.shard is not None and one_file:
        raise ValueError(f"--shard {options.shard >> 20} belongs to a folder; OUT {options.target} is one file")
    if one_file and not options.target.is_dir():
        cli.check_new_file("OUT", options.target, options.force)
    how = {"read_as": options.source_layout, "exact": not options.inexact, "shard_bytes": options.shard or SHARD_BYTES}
    progress = cli.PercentProgress("convert")
    is_continuation = convert_checkpoint(options.source, options.target, options.layout, progress=progress, **how)
    places = (options.source, options.source_layout), (options.target, options.layout)
    fields = []
    for place, layout in places:
        with open_checkpoint(place, layout) as checkpoint:
            fields.append(fields_beside_weights(checkpoint.config))
    missing = [name for name in fields[0] if name not in fields[1]]
    facts = ", ".join(missing)
    notes = [f"note: the new configuration is without {facts}"] if missing else []
    _print_checkpoint(options.target, options.layout, is_continuation, notes, options.json)


def _print_checkpoint(target: Path, layout: str, is_continuation: bool, notes: Sequence[str], as_json: bool) -> None:
    """Prints the facts of a written file, after notes."""
    for note in (*["an unfinished run was continued: its files were kept"] * is_continuation, *notes):
        cli.print_note(cli.printable(note))
    with open_checkpoint(target, layout) as checkpoint:
        print(_checkpoint_contents(checkpoint, as_json))
    if not as_json:
        print()
        cli.print_written(target)


def _quantize_folder(source: Path, target: Path, rules: Sequence[TensorRule], seed: int | None, as_json: bool) -> None:
    """Quantizes the arrays of a folder by rules into a folder of jchop's own layout, array by array."""
    for rule in rules:
        if rule.spec.rounding.stochastic:
            raise ValueError(f"spec={str(rule.spec)!r} rounds stochastically, which folders do not have")
    check(seed is None, "--seed has no effect on a folder, whose rules round without draws")
    with open_checkpoint(source, "auto") as source_checkpoint:
        packed = [name for name, item in source_checkpoint.items.items() if item.quantized]
        dtypes = {name: item.format for name, item in source_checkpoint.items.items() if not item.quantized}
        rules_by_name = choose_rules(rules, dtypes, packed, packed)
    notes: list[str] = []

    def change(name: str, value: QArray | np.ndarray) -> QArray | np.ndarray:
        rule = rules_by_name.get(name)
        if rule is None or isinstance(value, QArray):
            return value
        try:
            with jax.enable_x64(True):
                qarray = quantize(value, rule.spec)
                fates = fates_of(value, np.asarray(dequantize(qarray)))
        except (ValueError, TypeError) as error:
            raise tensor_rule_error(rule, name, value.shape, error) from None
        if fates:
            notes.append(f"note: {name}: {_fates_text(fates)}")
        return qarray

    texts = repr([(rule.pattern, str(rule.spec)) for rule in rules])
    progress = cli.PercentProgress("quantize")
    is_continuation = convert_checkpoint(source, target, OWN_LAYOUT, change=change, options=texts, progress=progress)
    _print_checkpoint(target, OWN_LAYOUT, is_continuation, notes, as_json)


def _checkpoint_contents(source: Checkpoint, as_json: bool) -> str:
    """The arrays of a checkpoint: shape, format, bytes and bits of each, and sums by format; or all as JSON."""
    rows: list[tuple[str, ...]] = [("array", "shape", "format", "bytes", "bits")]
    totals: Counter[str] = Counter()
    for name, item in source.items.items():
        bits = f"{8 * item.nbytes / math.prod(item.shape):.4g}" if math.prod(item.shape) else "-"
        rows.append((name, _shape_text(item.shape), item.format, f"{item.nbytes:,}", bits))
        totals[item.format] += item.nbytes
    if as_json:
        arrays, sizes = cli.rows_as_dicts(rows, "<<<>>"), dict(totals.most_common())
        return json.dumps({"layout": source.layout, "arrays": arrays, "bytes": sizes}, indent=1)
    lines = [f"layout: {source.layout}", cli.text_table(rows, "<<<>>"), ""]
    lines += [f"{count:,} bytes  {format}" for format, count in totals.most_common()]
    lines += [f"unread: {why}" for why in source.unread.values()]
    return "\n".join(cli.printable(line) if "\n" not in line else line for line in lines)


def _fates_text(fates: Counter[str]) -> str:
    """The counts of `fates_of` in a note."""
    return ", ".join(f"{count} {fate}" for fate, count in fates.items())


def _shard_bytes(text: str) -> int:
    """A number of mebibytes above zero, in bytes."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer above 0")
    return int(text) << 20


CONVERT = cli.Command(
    "convert",
    _run_convert,
    "write a checkpoint in the layout of another program",
    (
        cli.argument("source", "IN", type=Path),
        cli.argument("target", "OUT", "a new folder, or a .safetensors or .gguf file", type=Path),
        cli.argument("--force", help="replace OUT if it is a file that exists"),
        cli.argument("--json"),
        cli.argument("--layout", help="the layout of OUT", required=True, choices=LAYOUT_NAMES),
        cli.argument("--from", help="that of IN", dest="source_layout", default="auto", choices=_SOURCE_LAYOUTS),
        cli.flag("--inexact", "let numbers of NVFP4 differ in their last bit"),
        cli.argument("--shard", "MIB", "MiB of arrays in a file of a folder; default 256", type=_shard_bytes),
    ),
    "Reads a folder of safetensors files, one such file or a GGUF file; writes a new folder or file.\n"
    "Codes, scales and zero points stay the same; an array that the layout cannot hold is an error. A killed\n"
    "conversion to a folder goes on if the command is repeated. A GGUF file gets the tensors alone.",
    "examples:\n  jchop convert model-gptq model-ct --layout compressed-tensors\n"
    "  jchop convert model.gguf model --layout plain",
)


# -- compare -----------------------------------------------------------------------------------------------------------


def _run_compare(options: argparse.Namespace) -> None:
    cli.check_pictures(options)
    comparisons: dict[str, Comparison] = {}
    formats = [as_spec(text, "--formats", scaled=True) for text in cli.split_items(options.formats or ())]
    if options.formats and not formats:
        raise ValueError(f"--formats {' '.join(options.formats)!r} must name at least one format")
    key = cli.key_of_seed_option(options.seed, formats)
    for name, array in _real_tensors(options.file, options.tensor):
        with place_in_errors(f"{name}", (ValueError, TypeError)):
            array_formats = formats or default_formats(max(array.ndim, 1))
            comparisons[name] = _compare_formats(name, array, array_formats, key, options.scale)
    if options.plot and len(comparisons) > 1:
        raise ValueError(f"--plot draws one array, and there are {len(comparisons)}; choose one by --tensor")
    if options.json:
        cli.print_json({name: comparison.as_dict() for name, comparison in comparisons.items()})
    else:
        print("\n\n".join(f"{cli.printable(name)}: {comparison}" for name, comparison in comparisons.items()))
    cli.write_pictures(options, lambda: next(iter(comparisons.values())).plot())


def _compare_formats(name: str, array: np.ndarray, formats: Sequence[Any], key: Any, scale: Any) -> Comparison:
    """The array in each format, with progress on a terminal: a first rounding in a format takes seconds to compile."""
    show_progress = cli.terminal_progress_bar() or (lambda *step: None)
    comparisons = []
    for count, fmt in enumerate(formats, start=1):
        comparisons.append(compare(array, [fmt], key=key, scale=scale))
        show_progress("compare", count, len(formats), cli.printable(f"{name} {fmt}"))
    return replace(comparisons[0], rows=tuple(row for part in comparisons for row in part.rows))


def _real_tensors(path: Path, pattern: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """The array of a .npy file, or the matching arrays of numbers of a safetensors file, packed ones unpacked."""
    if path.suffix.lower() == ".npy":
        check(pattern is None, f"--tensor {pattern!r} belongs to a .safetensors file; {path} has one array")
        with NpyFile(path, str(path)) as file:
            yield path.name, file.read([0] * len(file.shape), file.shape)
        return
    check(path.suffix.lower() == ".safetensors", f"FILE {path} must end in .npy or .safetensors")
    pattern = check_path_pattern("--tensor", "*" if pattern is None else pattern)
    with open_checkpoint(path, "auto") as file:
        kinds = (*CARRIERS, "int", "uint", "bool")
        filled = {name: item for name, item in file.items.items() if 0 not in item.shape}
        numbers = [name for name, item in filled.items() if item.quantized or item.format.startswith(kinds)]
        matches = [name for name in numbers if matches_path(pattern, name)]
        if not matches:
            hint = nearest_paths_hint([pattern], numbers)
            raise ValueError(f"--tensor {pattern!r} matches no tensor of real numbers in {path}{hint}")
        others = [name for name in file.items if name not in numbers and matches_path(pattern, name)]
        if others:
            empty = cli.printable(first_names(others))
            cli.print_note(f"note: without a table, since empty or of a type that has none: {empty}")
        for name in matches:
            value = file.read(name)
            yield name, np.asarray(dequantize(value)) if isinstance(value, QArray) else value


COMPARE = cli.Command(
    "compare",
    _run_compare,
    "compare formats on your own numbers: errors, overflow, bits",
    (
        cli.argument("file", "FILE", "a .npy or .safetensors file", type=Path),
        cli.argument("--formats", "SPEC", "default: 8 to 14 formats in use", nargs="+"),
        cli.argument("--tensor", "PATTERN", "the tensors of a safetensors file; default all"),
        cli.argument("--scale", choices=COMPARISON_SCALES, default="none", help="fit: numbers are multiplied by a "
                 "power of two that fills the range of a plain format; default none"),
        cli.argument("--seed"),
        cli.argument("--json"),
        cli.argument("--plot", help="draw bits against ratio (needs matplotlib)"),
    ),
    "Rounds an array to several formats, and shows signal-to-noise ratio, worst errors, overflow,\n"
    "numbers that were clipped or became zero, and bits; a table for each tensor of real numbers.\n"
    "A quantized tensor is unpacked.",
    "examples:\n  jchop compare weights.npy\n"
    "  jchop compare model.safetensors --tensor 'mlp/*' --formats nvfp4 'int4(group=32)' --json",
)  # fmt: skip
