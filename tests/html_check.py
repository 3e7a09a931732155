"""A check of HTML by the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"img", "meta", "br", "link"}
KNOWN = {"html", "head", "title", "body", "h1", "h2", "div", "p", "table", "thead", "tbody", "tr", "th", "td", "svg",
         "rect", "text", "a", "span"}  # fmt: skip


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN | VOID, f"<{tag}> is no known tag: a text is not escaped"
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_html(text: str) -> str:
    """The text between the tags of HTML that is well formed, and loads nothing from elsewhere."""
    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open, f"never closed: {checker.open}"
    assert checker.tags
    assert all(link.startswith("data:") for link in checker.links)
    return "\n".join(checker.texts)
