"""Raises the number in .ci/turn by one, once for each submission: CI then runs the next part of the slow tests.

python .ci/next_turn.py           raises it
python .ci/next_turn.py --check   prints it; on standard error it says if the commits at hand have not raised it
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent / "turn"
#: Commits of one submission are at most so far apart. CI has the commits alone and does not know what landed before.
HOURS = 4


def read(file: Path = FILE) -> int:
    """The number; without one, an error that says what to write."""
    text = file.read_text("utf-8").strip() if file.is_file() else None
    if text is None or not (text.isascii() and text.isdigit()):
        found = "is missing" if text is None else f"holds {text[:40]!r}, which is no integer"
        raise SystemExit(f"{file} {found}: write one integer from 0 on into it, such as 0")
    return int(text)


def seconds_of_commit(*arguments: str) -> int | None:
    """The time of the last commit, of all or of those that change a path; None without a repository."""
    command = ["git", "-C", str(FILE.parent), "log", "-1", "--format=%ct", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    return int(run.stdout) if run.returncode == 0 and run.stdout.strip() else None


def was_raised() -> bool:
    """Whether a commit of this submission has written the file."""
    last, raised = seconds_of_commit(), seconds_of_commit("--", str(FILE))
    return last is None or raised is None or last - raised < HOURS * 3600


def main(arguments: list[str]) -> int:
    """Raises the number, or checks it."""
    turn = read()
    if arguments == ["--check"]:
        print(turn)
        if not was_raised():
            print(
                f".ci/turn is {turn} as before: CI runs the same part of the slow tests again. "
                "Raise it with `python .ci/next_turn.py`.",
                file=sys.stderr,
            )
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    FILE.write_text(f"{turn + 1}\n", "utf-8")
    print(f"{FILE}: {turn + 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
