"""The language of the pages in numbers: `python docs/count.py`; `--sample SEED N` prints sentences drawn at random.

Prose is the text of README.md and of all pages, measurements too, without blocks of code, tables and the reference.
Words stand between spaces, also in a piece of code; headings count, and are no sentences. A sentence is long if it has
more than 25 words. `what` counts "what", "that of" and "those of" in 1,000 words. A term is undefined on a page if its
first use there has no link, and the page does not define it (terms.toml).
"""

from __future__ import annotations

import argparse
import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LONG = 25
LEFT_OUT = {"api.md"}

FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1[`:]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^][]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Counts:
    """The numbers of one page, or of all."""

    page: str
    sentences: list[str]
    headings: list[str]
    undefined: list[str]

    @property
    def words(self) -> int:
        return sum(map(words, [*self.sentences, *self.headings]))

    @property
    def mean(self) -> float:
        return sum(map(words, self.sentences)) / max(1, len(self.sentences))

    @property
    def long(self) -> float:
        """The share of long sentences, in percent."""
        return 100 * sum(words(each) > LONG for each in self.sentences) / max(1, len(self.sentences))

    @property
    def what(self) -> float:
        pattern = re.compile(r"\b(?:what|(?:that|those) of)\b", re.IGNORECASE)
        found = sum(len(pattern.findall(each)) for each in [*self.sentences, *self.headings])
        return 1000 * found / max(1, self.words)


def words(sentence: str) -> int:
    """The words of a sentence: all that stands between spaces and has a letter or a digit."""
    return sum(bool(re.search(r"\w", each)) for each in sentence.split())


def prose(text: str) -> list[str]:
    """The paragraphs and items of lists of a page, with their Markdown."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.DOTALL)
    lines = ["" if re.match(r"\s*(\||#|    \S)", line) else line for line in text.splitlines()]
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.) )", "\n".join(lines))
    parts = [re.sub(r"^\s*(?:[*+-]|\d+\.) ", "", " ".join(part.split())) for part in parts]
    return [part for part in parts if re.search(r"\w", part)]


def headings(text: str) -> list[str]:
    """The headings of a page."""
    return re.findall(r"^#+ +(.*\S)", FENCE.sub("\n", text), re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of a page, without its links."""
    plain = [LINK.sub(r"\1", part) for part in prose(text)]
    return [each for part in plain for each in re.split(r"(?<=[.!?])\s+(?=[\"'(*`]*[A-Z`])", part) if words(each) > 1]


def terms() -> dict[str, dict[str, object]]:
    return tomllib.loads((DOCS / "terms.toml").read_text(encoding="utf-8"))


def undefined(page: str, text: str) -> list[str]:
    """The terms that a page uses first without a link and without a definition (*term*)."""
    found, parts = [], re.sub(r"`[^`]*`", " ", "\n".join(prose(text)))
    linked = [match.span() for match in LINK.finditer(parts)]
    for term, row in terms().items():
        forms = "|".join(map(re.escape, [term, *row["forms"]]))  # pyright: ignore[reportGeneralTypeIssues]
        first = re.search(rf"(?<![\w-])(?:{forms})(?![\w-])", parts, re.IGNORECASE)
        if first is None or str(row["place"]).split("#")[0] == page:
            continue
        if parts[first.start() - 1] != "*" and not any(a <= first.start() < b for a, b in linked):
            found.append(term)
    return found


#: Folders that the build of the pages writes.
GENERATED = ("gallery", "reference")


def count() -> list[Counts]:
    """The numbers of each page."""
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("*/*.md"))]
    pages = [page for page in pages if page.parent.name not in GENERATED]
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.name not in LEFT_OUT}
    names = {page: page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix() for page in texts}
    return [
        Counts(names[page], sentences(text), headings(text), undefined(names[page], text))
        for page, text in texts.items()
    ]


def total(pages: list[Counts]) -> Counts:
    every = (
        [each for page in pages for each in getattr(page, field)] for field in ("sentences", "headings", "undefined")
    )
    return Counts("all", *every)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", nargs=2, type=int, metavar=("SEED", "N"), help="prints N sentences of all pages")
    given = parser.parse_args()
    pages = count()
    if given.sample:
        seed, number = given.sample
        every = [f"{page.page}: {each}" for page in pages for each in page.sentences]
        print("\n".join(random.Random(seed).sample(every, number)))
        return
    print(f"{'page':28}{'words':>7}{'sentences':>11}{'mean':>7}{'long %':>8}{'what':>6}  undefined terms")
    for each in [*pages, total(pages)]:
        numbers = f"{each.words:7}{len(each.sentences):11}{each.mean:7.1f}{each.long:8.1f}{each.what:6.1f}"
        print(f"{each.page:28}{numbers}  {len(each.undefined) if each.page == 'all' else ', '.join(each.undefined)}")


if __name__ == "__main__":
    main()
