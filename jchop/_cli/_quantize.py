"""``jchop quantize`` and ``jchop inspect``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from jchop._checkpoints.checkpoint import LAYOUT_NAMES, open_checkpoint
from jchop._cli._checkpoint import checkpoint_contents, element_bits_text, fates_text, is_checkpoint, quantize_folder
from jchop._cli._command import Command, argument, print_written
from jchop._cli._text import PercentProgress, check_new_file, check_suffix, key_of_seed_option, print_rows
from jchop._common.paths import check_path_pattern
from jchop._spec.spec import as_spec
from jchop.storage._files.safetensors import TensorFile
from jchop.storage._quantize_file import TensorReport, TensorRule, quantize_file
from jchop.storage._save import qarray_tensor_names, qarrays_in

_SAFETENSORS_SUFFIX = ".safetensors"


def _run_quantize(options: argparse.Namespace) -> None:
    rules = [parse_rule(text) for text in options.rule]
    if not options.source.is_dir():  # whose rules round without draws
        key_of_seed_option(options.seed, [rule.spec for rule in rules])
    if not options.target.is_dir():
        check_new_file("OUT", options.target, options.force)
    if options.source.is_dir():
        quantize_folder(options.source, options.target, rules, options.seed, options.json)
        return
    check_suffix("OUT", options.target, _SAFETENSORS_SUFFIX)
    reports = quantize_file(
        options.source, options.target, rules, seed=options.seed, progress=PercentProgress("quantize")
    )
    print_rows(_quantization_rows(reports), "<<<<>>>><", options.json)
    if not options.json:
        print()
        print_written(options.target)


def _run_inspect(options: argparse.Namespace) -> None:
    if is_checkpoint(options.file, options.layout):
        with open_checkpoint(options.file, options.layout) as source:
            print(checkpoint_contents(source, options.json))
        return
    with TensorFile(options.file) as file:
        print_rows(_contents_rows(file), "<<<>><", options.json)


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
    rows: list[tuple[str, ...]] = [
        ("tensor", "shape", "from", "to", "bytes before", "bytes after", "SNR dB", "max error", "note")
    ]
    for report in reports:
        has_errors = not (report.copied or math.isnan(report.sqnr))
        errors = (_decibels_text(report.sqnr), f"{report.largest:.3g}") if has_errors else ("-", "-")
        sizes = (f"{report.before:,}", f"{report.after:,}")
        rows.append(
            (report.name, _shape_text(report.shape), report.dtype, report.to, *sizes, *errors, fates_text(report.fates))
        )
    before, after = (sum(getattr(report, name) for report in reports) for name in ("before", "after"))
    rows.append(("all", "", "", "", f"{before:,}", f"{after:,}", "", "", _percent_text(after, before)))
    return rows


def _contents_rows(file: TensorFile) -> list[tuple[str, ...]]:
    fields_by_name = qarrays_in(file)
    owners = {part: name for name, fields in fields_by_name.items() for part in qarray_tensor_names(name, fields)}
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "bytes", "bits", "stored as")]
    row_owners: set[str] = set()
    for name, entry in file.entries.items():
        owner = owners.get(name)
        if owner is None:
            bits = element_bits_text(entry.nbytes, entry.shape)
            rows.append((name, _shape_text(entry.shape), entry.dtype.name, f"{entry.nbytes:,}", bits, "-"))
        elif owner not in row_owners:
            row_owners.add(owner)
            fields = fields_by_name[owner]
            parts = [file.entries[part] for part in qarray_tensor_names(owner, fields)]
            shape = parts[0].shape[:-1] + (() if fields["size"] is None else (fields["size"],))
            size = sum(part.nbytes for part in parts)
            rows.append(
                (
                    owner,
                    _shape_text(shape),
                    fields["dtype"],
                    f"{size:,}",
                    element_bits_text(size, shape),
                    fields["spec"],
                )
            )
    total = sum(entry.nbytes for entry in file.entries.values())
    rows.append(("all", "", "", f"{total:,}", "", f"{len(rows) - 1} arrays in {len(file.entries)} tensors"))
    return rows


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _decibels_text(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "exact" if value > 0 else "-inf"


def _percent_text(after: int, before: int) -> str:
    return f"{100 * after / before:.1f} %" if before else ""


QUANTIZE = Command(
    "quantize",
    _run_quantize,
    "quantize the tensors of a safetensors file or folder",
    (
        argument("source", "IN", "a safetensors file, or a folder of a model", type=Path),
        argument("target", "OUT", "a safetensors file, or a new folder", type=Path),
        argument("--rule", help="parts of names, as 'mlp.*.kernel' or '!norm', and their format or spec; may be "
                 "repeated"),
        argument("--seed"),
        argument("--force"),
        argument("--json"),
    ),
    "Quantizes tensors by name and writes a new file, in one step when all is done. The first\n"
    "rule whose pattern matches parts of a name applies; tensors without a rule are copied.",
    "example:\n  jchop quantize in.safetensors out.safetensors \\\n"
    "      --rule 'kernel=int4(group=128,scale=bfloat16)' --rule '*=bfloat16'",
)  # fmt: skip
INSPECT = Command(
    "inspect",
    _run_inspect,
    "list the contents of a checkpoint: a file or a folder",
    (
        argument("file", "FILE", "a safetensors or GGUF file, or a folder of a model", type=Path),
        argument("--layout", help="its layout; default auto", default="auto", choices=("auto", *LAYOUT_NAMES)),
        argument("--json"),
    ),
)
