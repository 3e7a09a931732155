"""Regular expressions over paths: their recognition, and the patterns of `jchop._common.paths` that say the same."""

from __future__ import annotations

import re

#: Syntax that regular expressions have, and patterns and names of layers do not.
_REGEX_SYNTAX = re.compile(r"[\\|]|^\^|\$$|\[\^|[.\])][+]|\)[*?]$|(^|/)\.[*?]|\.\*/|\(\?")
#: Tokens: the mark between parts, any characters with such marks, the beginning and the end of the path.
_MARK, _SPAN, _START, _END = "/", "**", "^", "$"
#: The most terms of a pattern that is written for one expression.
_MOST_TERMS = 16

_Tokens = tuple[str, ...]


def is_regular_expression(text: str) -> bool:
    """Whether a term has syntax that regular expressions have, and patterns do not.

    Example:
        >>> [is_regular_expression(text) for text in (".*mlp.*", "(q|k)_proj", "*mlp*", "0.{mu,nu}.**.kernel")]
        [True, True, False, False]
    """
    return _REGEX_SYNTAX.search(text) is not None


def pattern_of_regex(regex: str, *, dotted: bool = True, whole: bool = False, prefix: bool = False) -> str | None:
    r"""The pattern that matches the same paths as a regular expression; None if there is none.

    Args:
        regex: the expression.
        dotted: whether a single dot separates parts of a path. Otherwise it is any character.
        whole: whether the expression is for the whole path, as under `re.fullmatch`. Otherwise it is for whole parts.
        prefix: whether the last part may go on, as under `re.match`.

    Example:
        >>> pattern_of_regex(".*mlp.*"), pattern_of_regex("(q|k)_proj"), pattern_of_regex(r"layers\.\d+\.mlp")
        ('*mlp*', '{q,k}_proj', 'layers/[0-9]*/mlp')
        >>> pattern_of_regex("decoder/.*/attn/(q|k)_proj", dotted=False, whole=True)
        '/decoder/*/**/attn/{q,k}_proj/'
        >>> pattern_of_regex("(?!.*head).*"), pattern_of_regex("(a|b)+")
        ('!*head*', None)
    """
    if without := re.fullmatch(r"\^?\(\?!(.*)\)\.\*\$?", regex):
        pattern = pattern_of_regex(f"(?:{without[1]}).*", dotted=dotted, whole=whole)
        return pattern and " ".join(f"!{term}" for term in pattern.split())
    try:
        options, end = _alternatives(regex, 0, dotted)
        if end < len(regex):
            return None
        longer = [(*tokens, *[_SPAN] * (prefix and tokens[-1:] != (_END,))) for tokens in options]
        terms = [term for tokens in longer for term in _terms(tokens, whole)]
    except (_NoPatternError, IndexError):
        return None
    return " ".join(dict.fromkeys(terms)) if 0 < len(terms) <= _MOST_TERMS else None


class _NoPatternError(ValueError):
    """For syntax without an equal in patterns."""


# -- reading: each alternative of an expression as tokens --------------------------------------------------------------


def _alternatives(text: str, i: int, dotted: bool) -> tuple[list[_Tokens], int]:
    """The alternatives from a place on, up to the end of the text or of the group, and that end."""
    done: list[_Tokens] = []
    current: list[_Tokens] = [()]
    while i < len(text) and text[i] != ")":
        if text[i] == "|":
            done, current, i = done + current, [()], i + 1
            continue
        options, i = _quantified_atom(text, i, dotted)
        current = [first + second for first in current for second in options]
        if len(current) > _MOST_TERMS:
            raise _NoPatternError
    return done + current, i


def _quantified_atom(text: str, i: int, dotted: bool) -> tuple[list[_Tokens], int]:
    options, end = _atom(text, i, dotted)
    is_dot, mark = text[i] == ".", text[end : end + 1]
    if not mark or mark not in "*+?{":
        return options, end
    lazy = text[end + 1 : end + 2] == "?"
    end += 1 + lazy
    if mark == "?":
        return _as_one_token([*options, ()]), end
    if is_dot:
        some: list[_Tokens] = [("?", _SPAN)] if dotted else [("?", _SPAN), (_MARK, _SPAN)]
        return ([(_SPAN,)] if mark == "*" else some), end
    if options == [("?",)]:
        return [("*",) if mark == "*" else ("?", "*")], end
    if options == [("[0-9]",)] and mark == "+":  # a number: no name begins with a digit
        return [("[0-9]", "*")], end
    raise _NoPatternError


def _atom(text: str, i: int, dotted: bool) -> tuple[list[_Tokens], int]:
    """The alternatives of a character, a class of characters or a group, and the place behind it."""
    char = text[i]
    if char == "(":
        i += 3 if text.startswith("(?:", i) else 1
        options, end = _alternatives(text, i, dotted)
        if text[end] != ")":
            raise _NoPatternError
        return _as_one_token(options), end + 1
    if char == "[":
        end = text.index("]", i + 2) if "]" in text[i + 2 :] else len(text)
        inside = text[i + 1 : end].replace(r"\d", "0-9").replace(r"\.", ".")
        if inside in ("^/", "^.", "^./", "^/."):
            return [("?",)], end + 1
        if end == len(text) or re.search(r"[\\./\[]", inside):
            raise _NoPatternError
        return [(f"[{'!' if inside.startswith('^') else ''}{inside.removeprefix('^')}]",)], end + 1
    if char == "\\":
        known = {"d": "[0-9]", "w": "?", ".": _MARK}
        escaped = text[i + 1]
        if escaped.isalnum() and escaped not in known:
            raise _NoPatternError
        return [(known.get(escaped) or _literal(escaped),)], i + 2
    if char == ".":
        return [(_MARK,)] if dotted else [("?",), (_MARK,)], i + 1
    if char in "*+?{":
        raise _NoPatternError
    return [(char if char in (_MARK, _START, _END) else _literal(char),)], i + 1


def _literal(char: str) -> str:
    return char if char == _MARK else "?" if char.isspace() or char in "!\\" else re.sub(r"[*?\[{}]", r"[\g<0>]", char)


def _as_one_token(options: list[_Tokens]) -> list[_Tokens]:
    """Alternatives within a part as one token in braces."""
    texts = ["".join(tokens) for tokens in options]
    is_short = all(token not in (_MARK, _SPAN, _START, _END, ",") for tokens in options for token in tokens)
    return [("{" + ",".join(texts) + "}",)] if is_short and len(texts) > 1 else options


# -- writing: tokens as terms of a pattern -----------------------------------------------------------------------------


def _terms(tokens: _Tokens, whole: bool) -> list[str]:
    """The terms that match the same texts as one alternative."""
    begins, ends = whole or tokens[:1] == (_START,), whole or tokens[-1:] == (_END,)
    tokens = tokens[tokens[:1] == (_START,) : len(tokens) - (tokens[-1:] == (_END,))]
    if _START in tokens or _END in tokens:
        raise _NoPatternError
    tokens = tuple(token for n, token in enumerate(tokens) if token != _SPAN or tokens[n - 1 : n] != (_SPAN,))
    if tokens == (_SPAN,):
        return ["*"]
    if tokens[:1] == (_SPAN,):
        tokens, begins = ("*", *tokens[1:]), False
    if tokens[-1:] == (_SPAN,):
        tokens, ends = (*tokens[:-1], "*"), False
    if not whole:  # a mark at an end says nothing
        tokens = tokens[tokens[:1] == (_MARK,) : len(tokens) - (tokens[-1:] == (_MARK,))]
    bodies = (_body(choice) for choice in _without_spans(tokens))
    return [f"{'/' * begins}{body}{'/' * (ends and bool(body))}" for body in bodies if body is not None]


def _without_spans(tokens: _Tokens) -> list[_Tokens]:
    """Tokens whose spans, between two others, are parts and pieces of parts."""
    if _SPAN not in tokens:
        return [tokens]
    n = tokens.index(_SPAN)
    before, after = tokens[n - 1] == _MARK, tokens[n + 1] == _MARK
    across = (*["*", _MARK] * (after or not before), "**", *[_MARK, "*"] * (not after))
    pieces = [across] if before or after else [("*",), across]
    return [(*tokens[:n], *piece, *rest) for piece in pieces for rest in _without_spans(tokens[n + 1 :])]


def _body(tokens: _Tokens) -> str | None:
    """The text of tokens; None if a part would be empty."""
    parts = "".join(tokens).split(_MARK)
    if tokens and "" in parts:
        return None
    text = _MARK.join("*" if part == "?*" else part for part in parts)
    return re.sub(r"(\*\*/)+", "**/", text)
