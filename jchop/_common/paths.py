"""Patterns for paths in trees of modules, arrays, scopes and names: one language for every face.

A path is a sequence of parts, between slashes or dots: ``blocks/0/mlp``, ``blocks.0.mlp``. A pattern is one or more
*terms* with spaces between them. A term matches consecutive whole parts of a path, wherever they are. Within a part
``*`` stands for any characters, ``?`` for one, ``[ab]`` and ``[!ab]`` for one of these and for another one.
``{query,key}`` stands for one of these texts. ``**`` as a part stands for any number of parts. With ``/`` in front the
path begins there, with ``/`` at the end it ends there, and ``/`` alone is the path without parts. A term with ``!``
in front excludes its matches.

A path matches a pattern if one of its terms does, or if all terms exclude, and no excluding one does. ``*`` alone
matches every path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, NamedTuple

from jchop._common.checks import check, place_in_errors, short_repr
from jchop._common.regular_expressions import is_regular_expression, pattern_of_regex


def check_path_pattern(argument: str, pattern: Any, example: str = "'blocks/*/mlp'") -> str:
    """A pattern, checked.

    Args:
        argument: of the caller, for errors.
        pattern: anything.
        example: of a pattern, for errors.

    Raises:
        TypeError: for another type, or an empty text.
        ValueError: for a bracket that is not closed, a term without parts, or a regular expression.
    """
    if isinstance(pattern, re.Pattern):
        raise ValueError(_regex_error(argument, pattern, [pattern.pattern]))
    if not isinstance(pattern, str) or not pattern.strip():
        raise TypeError(f"{argument}={pattern!r} must be a pattern of paths such as {example}; '*' is every path")
    if any(is_regular_expression(term.removeprefix("!")) for term in pattern.split()):
        raise ValueError(_regex_error(argument, pattern, pattern.split()))
    with place_in_errors(f"{argument}={pattern!r} is no pattern of paths such as {example}"):
        _parse_terms(pattern)
    return pattern


def check_pattern_mapping(argument: str, rules: Any, example: str) -> tuple[tuple[str, Any], ...]:
    """The entries of a mapping of patterns to values, with the patterns checked.

    Args:
        argument: of the caller, for errors.
        rules: anything.
        example: of a mapping, for errors.

    Raises:
        TypeError, ValueError: for no mapping, an empty one, or a key that is no pattern.
    """
    if not isinstance(rules, Mapping) or not rules:
        text = short_repr(rules)
        why = "; a Rule is for jc.nn, jc.torch and jc.quantize_fn" if "Rule(" in text else ""
        raise TypeError(f"{argument}={text} must map patterns of paths to values, as {example}{why}")
    return tuple((check_path_pattern(f"{argument}: pattern", pattern), value) for pattern, value in rules.items())


def first_matches(
    argument: str, patterns: Iterable[str], paths: Iterable[str], may_be_idle: bool = False
) -> list[int | None]:
    """For each path the index of the first pattern that it matches; None if there is none.

    Raises:
        ValueError: for a pattern that is the first of no path, unless `may_be_idle`.
    """
    patterns, paths = list(patterns), list(paths)
    firsts = [next((n for n, pattern in enumerate(patterns) if matches_path(pattern, path)), None) for path in paths]
    idle = [] if may_be_idle else [pattern for n, pattern in enumerate(patterns) if n not in firsts]
    if idle:
        raise ValueError(
            f"{argument}: {', '.join(map(repr, idle))} matches no array, or only such as an earlier pattern matches"
            f"{nearest_paths_hint(idle, paths)}"
        )
    return firsts


def _regex_error(argument: str, pattern: Any, terms: list[Any]) -> str:
    """The error for a regular expression, with the pattern to write."""
    patterns: list[str | None] = []
    for text in map(str, terms):
        excludes, term = text.startswith("!"), text.removeprefix("!")
        same = pattern_of_regex(term) if len(terms) == 1 or is_regular_expression(term) else term
        patterns.append(same if same is None or not excludes else " ".join(f"!{each}" for each in same.split()))
    if None in patterns:
        advice = "a dot stands for itself, and alternatives are {mu,nu}, or terms with a space between them"
        return f"{argument}={pattern!r} is a regular expression; in jchop's patterns {advice}"
    words = " ".join(each for each in patterns if each)
    return f"{argument}={pattern!r} is a regular expression; jchop's pattern is {words!r}"


def matches_path(pattern: str, *paths: str) -> bool:
    """Whether a pattern matches a path; of several paths, a term needs to match only one.

    Example:
        >>> matches_path("blocks/*/mlp", "encoder.blocks.0.mlp.dense"), matches_path("mlp", "mlp2")
        (True, False)
        >>> matches_path("{query,key} !blocks/0", "blocks/1/query"), matches_path("!blocks/0", "blocks/0/query")
        (True, False)
    """
    if pattern == "*":
        return True
    texts = ["".join(f"{part}/" for part in _path_parts(path)) for path in paths]
    results = [(term.excludes, any(map(term.expression.fullmatch, texts))) for term in _parse_terms(pattern)]
    inclusions = [hit for excludes, hit in results if not excludes]
    return (any(inclusions) or not inclusions) and (True, True) not in results


def names_last_part(pattern: str, path: str) -> bool:
    """Whether a term of a pattern names the last part of a path, and not only parts above it."""
    last = (_path_parts(path) or [""])[-1]
    return any(
        not term.excludes and term.last.strip("*") and re.fullmatch(_part_regex(term.last), last) is not None
        for term in _parse_terms(pattern)
    )


def path_pattern(path: str) -> str:
    """A pattern that a path matches, for the advice of an error.

    Example:
        >>> path_pattern(""), path_pattern("mlp/kernel"), path_pattern("a b/{c}")
        ('/', 'mlp/kernel', 'a?b/[{]c[}]')
    """
    return re.sub(r"^[!^]|[\s\\|]|\$$|(?<=[\])])[+]|(?<=\))[*?]$", "?", re.sub(r"[*?\[{}]", r"[\g<0>]", path)) or "/"


def common_path_pattern(paths: Iterable[str], others: Iterable[str] = ()) -> str:
    """A pattern that paths match, and others do not: a star stands for the numbers of layers, if it may.

    Example:
        >>> common_path_pattern(["0/mlp", "1/mlp", "head"]), common_path_pattern(["0/mlp", "1/mlp"], ["2/mlp"])
        ('*/mlp head', '0/mlp 1/mlp')
    """
    terms, others = {}, list(others)
    for pattern in map(path_pattern, paths):
        star_pattern = re.sub(r"\d+", "*", pattern)
        terms[pattern if any(matches_path(star_pattern, other) for other in others) else star_pattern] = None
    return " ".join(terms)


def nearest_paths_hint(patterns: Iterable[str], paths: Iterable[str]) -> str:
    """The part of an error that names the paths nearest to patterns which match none; the first ones if none is near.

    A path that is one of the patterns is left out: it is no correction.

    Example:
        >>> nearest_paths_hint(["blocks/*/mpl"], ["blocks/0/mlp", "head"])
        "; the nearest paths are 'blocks/0/mlp'"
        >>> nearest_paths_hint(["5.weight"], ["0", "1", "5"])
        "; the nearest paths are '5'"
    """
    patterns = list(patterns)
    candidates = [path for path in dict.fromkeys(paths) if path and path not in patterns]
    terms = [term.removeprefix("!") for pattern in patterns for term in pattern.split()]
    part_lists = [[part for part in _path_parts(term) if part.strip("*")] for term in terms]
    scores = [
        (max((_path_similarity(parts, path) for parts in part_lists if parts), default=0.0), path)
        for path in candidates[:_MAX_COMPARISONS]
    ]
    near = [path for like, path in sorted(scores, key=lambda pair: -pair[0]) if like >= _NEAR_SIMILARITY]
    nearest = (near or candidates)[:3]
    return f"; the nearest paths are {', '.join(map(repr, nearest))}" if nearest else ""


def _path_similarity(parts: list[str], path: str) -> float:
    """How like some parts are to the most similar stretch of a path, from 0 to 1."""
    path_parts, target = _path_parts(path), "/".join(parts)
    starts = range(max(len(path_parts) - len(parts), 0) + 1)
    # A path may end above the parameter of a layer, where layers have paths.
    is_layer = path_parts and path_parts == parts[: len(path_parts)]
    stretches = ("/".join(path_parts[i : i + len(parts)]) for i in starts)
    least = _NEAR_SIMILARITY if is_layer else 0.0
    return max(least, *(SequenceMatcher(None, target, each).ratio() for each in stretches))


#: Paths that are compared, and from which likeness on they are near.
_MAX_COMPARISONS, _NEAR_SIMILARITY = 4096, 0.5


# -- terms -------------------------------------------------------------------------------------------------------------


class _PatternTerm(NamedTuple):
    """A term.

    Args:
        excludes: whether a path that it matches is excluded.
        expression: of a path whose parts have a slash behind each.
        last: its last part; empty if there is none.
    """

    excludes: bool
    expression: re.Pattern[str]
    last: str


@lru_cache(maxsize=1024)
def _parse_terms(pattern: str) -> tuple[_PatternTerm, ...]:
    return tuple(map(_parse_term, pattern.split()))


def _parse_term(text: str) -> _PatternTerm:
    excludes, glob = text.startswith("!"), text.removeprefix("!")
    check(glob, "'!' excludes nothing; write it in front of a term, as '!head'")
    from_start, to_end, parts = glob.startswith("/"), glob.endswith("/"), _path_parts(glob)
    check(parts or from_start, "it has no part")
    body = "".join(_ANY_PARTS if part == "**" else f"{_part_regex(part)}/" for part in parts)
    with place_in_errors(f"{glob!r} has a wrong bracket", re.error):
        expression = re.compile(f"{'' if from_start else _ANY_PARTS}{body}{'' if to_end else _ANY_PARTS}", re.DOTALL)
    return _PatternTerm(excludes, expression, parts[-1] if parts else "")


_ANY_PARTS = "(?:[^/]+/)*"


def _path_parts(text: str) -> list[str]:
    """The parts between slashes and dots."""
    return [part for part in re.split(r"[/.]", text) if part]


@lru_cache(maxsize=4096)
def _part_regex(glob: str) -> str:
    """The regular expression of one part."""
    regex, i, depth = "", 0, 0
    while i < len(glob):
        char, i = glob[i], i + 1
        if char == "*":
            regex += "[^/]*"
        elif char == "?":
            regex += "[^/]"
        elif char == "[":
            end = glob.find("]", i + 1 + glob.startswith("!", i))
            check(end >= 0, "'[' is not closed before the next slash or dot")
            inside = _CHARACTER_CLASS_SYNTAX.sub(r"\\\g<0>", glob[i:end].removeprefix("!"))
            regex, i = f"{regex}[{'^/' if glob.startswith('!', i) else ''}{inside}]", end + 1
        elif char == "{":
            regex, depth = f"{regex}(?:", depth + 1
        elif char == "}" and depth:
            regex, depth = f"{regex})", depth - 1
        elif char == "," and depth:
            regex += "|"
        else:
            regex += re.escape(char)
    check(not depth, "'{' is not closed before the next slash or dot")
    return regex


#: Characters with a meaning of their own in a class of characters; a hyphen between two makes a range there, too.
_CHARACTER_CLASS_SYNTAX = re.compile(r"[\\\]\[^&~|]")
