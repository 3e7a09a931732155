"""``jchop compare``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jchop._checkpoints.checkpoint import open_checkpoint
from jchop._cli._command import Command, argument, check_pictures, print_json, write_pictures
from jchop._cli._function_commands import split_items
from jchop._cli._text import key_of_seed_option, print_note, printable, terminal_progress_bar
from jchop._common.bit_ops import CARRIERS
from jchop._common.checks import check, first_names
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._insight.compare import COMPARISON_SCALES, Comparison, compare, default_formats
from jchop._spec.spec import as_spec
from jchop.storage import QArray, dequantize
from jchop.storage._files.npy import NpyFile


def _run_compare(options: argparse.Namespace) -> None:
    check_pictures(options)
    comparisons: dict[str, Comparison] = {}
    formats = [as_spec(f, "--formats", scaled=True) for f in split_items(options.formats)] if options.formats else None
    if formats == []:
        raise ValueError(f"--formats {' '.join(options.formats)!r} must name at least one format")
    key = key_of_seed_option(options.seed, formats or ())
    for name, array in _real_tensors(options.file, options.tensor):
        try:
            comparisons[name] = _compare_formats(
                name, array, formats or default_formats(max(array.ndim, 1)), key, options.scale
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
    if options.plot and len(comparisons) > 1:
        raise ValueError(f"--plot draws one array, and there are {len(comparisons)}; choose one by --tensor")
    if options.json:
        print_json({name: comparison.as_dict() for name, comparison in comparisons.items()})
    else:
        print("\n\n".join(f"{printable(name)}: {comparison}" for name, comparison in comparisons.items()))
    write_pictures(options, lambda: next(iter(comparisons.values())).plot())


def _compare_formats(name: str, array: np.ndarray, formats: Sequence[Any], key: Any, scale: Any) -> Comparison:
    """The array in each format, with progress on a terminal: a first rounding in a format takes seconds to compile."""
    show_progress = terminal_progress_bar() or (lambda *step: None)
    comparisons = []
    for count, fmt in enumerate(formats, start=1):
        comparisons.append(compare(array, [fmt], key, scale=scale))
        show_progress("compare", count, len(formats), printable(f"{name} {fmt}"))
    return replace(comparisons[0], rows=tuple(row for part in comparisons for row in part.rows))


def _real_tensors(path: Path, pattern: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """The array of a .npy file, or those of a safetensors file that match and are numbers, packed ones unpacked."""
    if path.suffix.lower() == ".npy":
        if pattern is not None:
            raise ValueError(f"--tensor {pattern!r} belongs to a .safetensors file; {path} has one array")
        with NpyFile(path, str(path)) as file:
            yield path.name, file.read([0] * len(file.shape), file.shape)
        return
    check(path.suffix.lower() == ".safetensors", f"FILE {path} must end in .npy or .safetensors")
    pattern = check_path_pattern("--tensor", "*" if pattern is None else pattern)
    with open_checkpoint(path, "auto") as file:
        numbers = [
            name
            for name, item in file.items.items()
            if (item.quantized or item.format in CARRIERS or item.format.startswith(("int", "uint", "bool")))
            and 0 not in item.shape
        ]
        matches = [name for name in numbers if matches_path(pattern, name)]
        if not matches:
            hint = nearest_paths_hint([pattern], numbers)
            raise ValueError(f"--tensor {pattern!r} matches no tensor of real numbers in {path}{hint}")
        others = [name for name in file.items if name not in numbers and matches_path(pattern, name)]
        if others:
            empty = printable(first_names(others))
            print_note(f"note: without a table, since empty or of a type that has none: {empty}")
        for name in matches:
            value = file.read(name)
            yield name, np.asarray(dequantize(value)) if isinstance(value, QArray) else value


COMPARE = Command(
    "compare",
    _run_compare,
    "compare formats on your own numbers: errors, overflow, bits",
    (
        argument("file", "FILE", "a .npy or .safetensors file", type=Path),
        argument("--formats", "SPEC", "default: 8 to 14 formats in use", nargs="+"),
        argument("--tensor", "PATTERN", "the tensors of a safetensors file; default all"),
        argument("--scale", choices=COMPARISON_SCALES, default="none", help="fit: numbers are multiplied by a power of "
                 "two that fills the range of a plain format; default none"),
        argument("--seed"),
        argument("--json"),
        argument("--plot", help="draw bits against ratio (needs matplotlib)"),
    ),
    "Rounds an array to several formats, and shows signal-to-noise ratio, worst errors, overflow,\n"
    "numbers that were clipped or became zero, and bits; a table for each tensor of real numbers.\n"
    "A quantized tensor is unpacked.",
    "examples:\n  jchop compare weights.npy\n"
    "  jchop compare model.safetensors --tensor 'mlp/*' --formats nvfp4 'int4(group=32)' --json",
)  # fmt: skip
