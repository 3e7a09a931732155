"""``jchop convert``, and ``jchop inspect`` and ``jchop quantize`` for folders and files of other programs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jchop._checkpoints.checkpoint import LAYOUT_NAMES, OWN_LAYOUT, PLAIN_LAYOUT, Checkpoint, open_checkpoint
from jchop._checkpoints.folder import SHARD_BYTES
from jchop._checkpoints.load_save import convert_checkpoint
from jchop._checkpoints.table import fields_beside_weights
from jchop._cli._command import Command, argument, flag, print_written
from jchop._cli._text import PercentProgress, check_new_file, printable, rows_as_dicts, text_table
from jchop._common.bit_ops import CARRIERS
from jchop._common.paths import matches_path
from jchop.storage import QArray, dequantize, quantize
from jchop.storage._quantize_file import TensorRule, fates_of, refuse_idle_rules, tensor_rule_error


def is_checkpoint(path: Path, layout: str) -> bool:
    """Whether a path is a folder, or a file that is no safetensors file of jchop's own or of plain tensors."""
    if path.is_dir():
        return True
    with open_checkpoint(path, layout) as source:
        return source.layout not in (OWN_LAYOUT, PLAIN_LAYOUT)


def _run_convert(options: argparse.Namespace) -> None:
    one_file = options.target.suffix.lower() in (".safetensors", ".gguf")
    if options.shard is not None and one_file:
        raise ValueError(f"--shard {options.shard >> 20} belongs to a folder; OUT {options.target} is one file")
    if one_file and not options.target.is_dir():
        check_new_file("OUT", options.target, options.force)
    is_continuation = convert_checkpoint(
        options.source,
        options.target,
        options.layout,
        read_as=options.source_layout,
        exact=not options.inexact,
        shard_bytes=options.shard or SHARD_BYTES,
        progress=PercentProgress("convert"),
    )
    _note_continuation(is_continuation)
    _note_missing_facts(options.source, options.source_layout)
    with open_checkpoint(options.target, options.layout) as checkpoint:
        _print_checkpoint(checkpoint, options.target, options.json)


def _print_checkpoint(checkpoint: Checkpoint, target: Path, as_json: bool) -> None:
    print(checkpoint_contents(checkpoint, as_json))
    if not as_json:
        print()
        print_written(target)


def quantize_folder(source: Path, target: Path, rules: Sequence[TensorRule], seed: int | None, as_json: bool) -> None:
    """Quantizes the arrays of a folder by rules into a folder of jchop's own layout, array by array."""
    for rule in rules:
        if rule.spec.rounding.stochastic:
            raise ValueError(f"spec={str(rule.spec)!r} rounds stochastically, which folders do not have")
    if seed is not None:
        raise ValueError("--seed has no effect on a folder, whose rules round without draws")
    with open_checkpoint(source, "auto") as source_checkpoint:
        rules_by_name = _rules_of_arrays(source_checkpoint, rules)
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
            notes.append(f"note: {name}: {fates_text(fates)}")
        return qarray

    texts = repr([(rule.pattern, str(rule.spec)) for rule in rules])
    _note_continuation(
        convert_checkpoint(
            source, target, OWN_LAYOUT, change=change, options=texts, progress=PercentProgress("quantize")
        )
    )
    for note in notes if sys.stderr is not None else ():
        print(printable(note), file=sys.stderr)
    with open_checkpoint(target, OWN_LAYOUT) as target_checkpoint:
        _print_checkpoint(target_checkpoint, target, as_json)


def _rules_of_arrays(checkpoint: Checkpoint, rules: Sequence[TensorRule]) -> dict[str, TensorRule]:
    """The rule of each array that is quantized."""
    rules_by_name: dict[str, TensorRule] = {}
    for name, item in checkpoint.items.items():
        rule = next((rule for rule in rules if matches_path(rule.pattern, name)), None)
        if rule is not None and not item.quantized and item.format in CARRIERS:
            rules_by_name[name] = rule
    unused_rules = [rule for rule in rules if rule not in rules_by_name.values()]
    packed_names = [name for name, item in checkpoint.items.items() if item.quantized]
    refuse_idle_rules(unused_rules, [name for name in checkpoint.items if name not in rules_by_name], packed_names)
    return rules_by_name


def checkpoint_contents(source: Checkpoint, as_json: bool) -> str:
    """The arrays of a checkpoint: shape, format, bytes and bits of each, and sums by format; or all as JSON."""
    rows: list[tuple[str, ...]] = [("array", "shape", "format", "bytes", "bits")]
    totals: Counter[str] = Counter()
    for name, item in source.items.items():
        shape = " x ".join(map(str, item.shape)) or "scalar"
        rows.append((name, shape, item.format, f"{item.nbytes:,}", element_bits_text(item.nbytes, item.shape)))
        totals[item.format] += item.nbytes
    if as_json:
        report = {"layout": source.layout, "arrays": rows_as_dicts(rows, "<<<>>"), "bytes": dict(totals.most_common())}
        return json.dumps(report, indent=1)
    lines = [f"layout: {source.layout}", text_table(rows, "<<<>>"), ""]
    lines += [f"{count:,} bytes  {format}" for format, count in totals.most_common()]
    return "\n".join(printable(line) if "\n" not in line else line for line in lines)


def element_bits_text(nbytes: int, shape: Sequence[int]) -> str:
    """The bits of an element in a table; an array without elements has none."""
    return f"{8 * nbytes / math.prod(shape):.4g}" if math.prod(shape) else "-"


def fates_text(fates: Counter[str]) -> str:
    """The counts of `fates_of` in a note."""
    return ", ".join(f"{count} {fate}" for fate, count in fates.items())


def _note_continuation(is_continuation: bool) -> None:
    if is_continuation and sys.stderr is not None:
        print("an unfinished run was continued: its files were kept", file=sys.stderr)


def _note_missing_facts(source: Path, layout: str) -> None:
    """Says which facts of a configuration are not in the new one."""
    with open_checkpoint(source, layout) as checkpoint:
        missing = fields_beside_weights(checkpoint.config)
    if missing and sys.stderr is not None:
        print(f"note: the new configuration describes weights alone, without {', '.join(missing)}", file=sys.stderr)


def _shard_bytes(text: str) -> int:
    """A number of mebibytes above zero, in bytes."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer above 0")
    return int(text) << 20


CONVERT = Command(
    "convert",
    _run_convert,
    "write a checkpoint in the layout of another program",
    (
        argument("source", "IN", type=Path),
        argument("target", "OUT", "a new folder, or a .safetensors or .gguf file", type=Path),
        argument("--force", help="replace OUT if it is a file that exists"),
        argument("--json"),
        argument("--layout", help="the layout of OUT", required=True, choices=LAYOUT_NAMES),
        argument("--from", help="that of IN", dest="source_layout", default="auto", choices=("auto", *LAYOUT_NAMES)),
        flag("--inexact", "let numbers of NVFP4 differ in their last bit"),
        argument("--shard", "MIB", "MiB of arrays in a file of a folder; default 256", type=_shard_bytes),
    ),
    "Reads a folder of safetensors files, one such file or a GGUF file; writes a new folder or file.\n"
    "Codes, scales and zero points stay the same; an array that the layout cannot hold is an error. A killed\n"
    "conversion to a folder goes on if the command is repeated. A GGUF file gets the tensors alone.",
    "examples:\n  jchop convert model-gptq model-ct --layout compressed-tensors\n"
    "  jchop convert model.gguf model --layout plain",
)
