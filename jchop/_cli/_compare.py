"""``jchop compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jchop._checkpoints.checkpoint import open_checkpoint
from jchop._cli._study import split_items
from jchop._cli._text import check_suffix, key_of_seed_option, parse_seed, printable, terminal_progress_bar
from jchop._common.bit_ops import CARRIERS
from jchop._common.files import require_extra, write_atomically
from jchop._common.paths import check_path_pattern, matches_path, nearest_paths_hint
from jchop._insight.compare import COMPARISON_SCALES, Comparison, compare, default_formats
from jchop._spec.spec import as_spec
from jchop.storage import QArray, dequantize
from jchop.storage._files.npy import NpyFile


def run_compare(options: argparse.Namespace) -> None:
    if options.plot:
        check_suffix("--plot", options.plot, ".png")
        require_extra("--plot", "plot", ("matplotlib",))
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
        print(
            json.dumps(
                {name: comparison.as_dict() for name, comparison in comparisons.items()}, indent=1, allow_nan=False
            )
        )
    else:
        print("\n\n".join(f"{printable(name)}: {comparison}" for name, comparison in comparisons.items()))
    if options.plot:
        picture = next(iter(comparisons.values())).plot()
        write_atomically(options.plot, lambda file: picture.savefig(file, format="png"))
        if not options.json:
            print(f"wrote {printable(str(options.plot))}")


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
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"FILE {path} must end in .npy or .safetensors")
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
        if others and sys.stderr is not None:
            rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
            listing = printable(", ".join(map(repr, others[:3])))
            print(f"note: without a table, since empty or of a type that has none: {listing}{rest}", file=sys.stderr)
        for name in matches:
            value = file.read(name)
            yield name, np.asarray(dequantize(value)) if isinstance(value, QArray) else value


def add_compare(commands: argparse._SubParsersAction) -> None:
    """The command, with its options."""
    command = commands.add_parser(
        "compare",
        help="compare formats on your own numbers: errors, overflow, bits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Rounds an array to several formats, and shows signal-to-noise ratio, worst errors, overflow,\n"
        "numbers that were clipped or became zero, and bits; a table for each tensor of real numbers.\n"
        "A quantized tensor is unpacked.",
        epilog="examples:\n  jchop compare weights.npy\n"
        "  jchop compare model.safetensors --tensor 'mlp/*' --formats nvfp4 'int4(group=32)' --json",
    )
    command.add_argument("file", metavar="FILE", type=Path, help="a .npy or .safetensors file")
    command.add_argument("--formats", nargs="+", metavar="SPEC", help="default: 8 to 14 formats in use")
    command.add_argument("--tensor", metavar="PATTERN", help="the tensors of a safetensors file; default all")
    command.add_argument(
        "--scale",
        choices=COMPARISON_SCALES,
        default="none",
        help="fit: numbers are multiplied by a power of two that fills the range of a plain format; default none",
    )
    command.add_argument("--seed", metavar="N", type=parse_seed, help="seed of random bits; stochastic modes need it")
    command.add_argument("--json", action="store_true", help="print JSON in place of tables")
    command.add_argument("--plot", metavar="FILE.png", type=Path, help="draw bits against ratio (needs matplotlib)")
    command.set_defaults(run=run_compare)
