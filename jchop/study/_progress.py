"""Progress on a text stream: one line that is overwritten on a terminal, a few plain lines otherwise."""

from __future__ import annotations

from typing import TextIO

_BAR_WIDTH = 24


class ProgressBar:
    """A `progress` function for `jchop.study.run`."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._live = stream.isatty()

    def __call__(self, stage: str, count: int, total: int, note: str) -> None:
        """Shows that `count` of `total` steps of `stage` are complete."""
        quarter = count == total or count * 4 // total != (count - 1) * 4 // total
        if not (self._live or quarter):
            return
        length = _BAR_WIDTH * count // total
        line = f"{stage:9} [{'#' * length}{'.' * (_BAR_WIDTH - length)}] {count:>{len(str(total))}}/{total}  {note}"
        start, end = ("\r\x1b[K", "\n" if count == total else "") if self._live else ("", "\n")
        print(start + line, end=end, file=self._stream, flush=True)
