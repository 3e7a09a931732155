"""``jchop study``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jchop._checks import split_outside
from jchop._cli._text import check_folder, printable
from jchop._files import require_extra


def run_study(options: argparse.Namespace) -> None:
    require_extra("jchop study", "study", ("flax", "optax", "sklearn", "matplotlib"))
    check_folder("--out", options.out)
    from jchop import study
    from jchop.study._progress import ProgressBar

    result = study.run(
        options.dataset,
        formats=items(options.formats),
        modes=items(options.modes),
        seeds=options.seeds,
        epochs=options.epochs,
        activations=options.activations,
        seed=options.seed,
        progress=ProgressBar(sys.stderr) if sys.stderr is not None else None,
    )
    paths = study.save(result, options.out)
    print(study.table(result))
    print(f"\nFiles: {printable(', '.join(map(str, paths)))} ({result.seconds:.0f} s)")


def items(words: Sequence[str]) -> list[str]:
    """Texts between commas and spaces outside of parentheses and brackets."""
    return [item for item in split_outside(" ".join(words), ", \t\n\r") if item]
