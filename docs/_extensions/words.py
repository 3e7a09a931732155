"""Words by which users look for a page: `words.toml` has them, and the search of the site finds the page by them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "words.toml"


def table() -> dict[str, list[str]]:
    """page -> words."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def with_words(text: str, words: list[str]) -> str:
    """A page with its words as entries of the index, below its title."""
    entries = "\n".join(f"   ! single: {word}" for word in words)
    title, _, rest = text.partition("\n")
    return f"{title}\n\n```{{eval-rst}}\n.. index::\n{entries}\n```\n{rest}" if words else text


def add(app: Any, page: str, source: list[str]) -> None:
    app.env.note_dependency(str(TABLE))
    source[0] = with_words(source[0], table().get(page, []))


def check(app: Any, env: Any) -> None:
    from sphinx.util import logging

    for page in sorted(table().keys() - env.found_docs):
        logging.getLogger(__name__).warning("words.toml has words of %s, which is no page", page)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", add)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
