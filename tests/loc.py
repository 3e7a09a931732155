"""Code lines of Python files: `python tests/loc.py [PATH ...]`. Docstrings, comments and blank lines do not count."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last), *_] if last:
                    docs.update(range(first, last + 1))
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docs)


def main(roots: list[str]) -> None:
    totals: dict[str, int] = {}
    for root in map(Path, roots):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            place = path.relative_to(root).parts[0] if root.is_dir() else path.name
            totals[place] = totals.get(place, 0) + code_lines(path)
    for place, count in totals.items():
        print(f"{count:7,} {place}")
    print(f"{sum(totals.values()):7,} in all")


if __name__ == "__main__":
    main(sys.argv[1:] or [str(Path(__file__).resolve().parents[1] / "jchop")])
