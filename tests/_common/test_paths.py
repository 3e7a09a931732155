"""Patterns of paths."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from each_case import each

from jchop._common.paths import check_path_pattern, matches_path, names_last_part, nearest_paths_hint, path_pattern
from jchop._common.regular_expressions import pattern_of_regex


@pytest.mark.smoke
@each(
    ("pattern", "yes", "no"),
    [
        ("*", ["", "a", "a/b"], []),
        ("head", ["head", "head/query", "blocks.0.head"], ["heads", "a/ahead", ""]),
        ("blocks/*/mlp", ["blocks/10/mlp/up", "net.blocks.1.mlp"], ["blocks/mlp", "blocks/0/a/mlp"]),
        ("blocks/**/mlp", ["blocks/mlp", "blocks/0/a/mlp"], ["mlp/blocks"]),
        ("*norm*", ["blocks/0/norm_1"], ["blocks/0"]),
        ("b[01]", ["b1"], ["b2", "b[01]"]),
        ("b[!0-4]", ["b5"], ["b2", "b/5"]),
        ("b?", ["b1"], ["b", "b12"]),
        ("{query,key}/w*", ["key/w1"], ["value/w", "key"]),
        ("{a,b{c,d}}e", ["ae", "bde"], ["be", "a,e"]),
        ("block/", ["net/block"], ["net/block/dense"]),
        ("/block", ["block/dense"], ["net/block"]),
        ("/block/", ["block"], ["block/dense", "net/block"]),
        ("/", [""], ["a"]),
        ("!head", ["", "mlp"], ["head", "head/query"]),
        ("query key !blocks/0 !*norm", ["blocks/1/key", "query"], ["blocks/0/key", "key/norm", "value"]),
        ("...d,df->...f", ["scores/...d,df->...f"], ["scores/d,fd->f"]),
        ("a+(b)", ["a+(b)"], ["aab"]),
    ],
)
def test_a_pattern_matches_parts(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in (*yes, *no) if matches_path(pattern, path)] == yes


def test_what_has_several_paths() -> None:
    assert matches_path("block/", "block/w", "block") and not matches_path("!w", "block/w", "block")


def test_the_last_part() -> None:
    assert names_last_part("mlp/kern*", "blocks/mlp/kernel") and names_last_part("a kernel", "mlp.kernel")
    assert not names_last_part("mlp", "mlp/kernel") and not names_last_part("mlp/*", "mlp/kernel")
    assert not names_last_part("!kernel", "mlp/kernel") and not names_last_part("/", "kernel")


@each(
    ("pattern", "error", "words"),
    [
        ("", TypeError, "'' must be"), (" ", TypeError, "must be"), (3, TypeError, "=3 must be"),
        ("a[", ValueError, "not closed"), ("!{a,b/c}", ValueError, "not closed before the next slash or dot"),
        ("[z-a]", ValueError, "wrong bracket"),
        (r"a\.b", ValueError, "regular expression"), ("!", ValueError, "excludes nothing"),
        (".", ValueError, "no part"),
        (re.compile("(a)+"), ValueError, "is a regular expression.*or terms with a space between"),
    ],
)  # fmt: skip
def test_what_is_no_pattern(pattern: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_path_pattern("path", pattern)


@each(
    ("regex", "pattern"),
    [
        (".*", "*"), (".*mlp.*", "*mlp*"), (".*_proj$", "*_proj/"), ("^decoder", "/decoder"), ("layers/.+", "layers/*"),
        (r"layers\.\d+\.mlp", "layers/[0-9]*/mlp"), ("layers.[0-9]+.q", "layers/[0-9]*/q"),
        ("(q|k)_proj", "{q,k}_proj"), (".*q_proj|.*kv_proj", "*q_proj *kv_proj"), ("[^q]x", "[!q]x"),
        ("(?:self_)?attn|mlp", "{self_,}attn mlp"), ("a !b|c", "a !b !c"), ("(?!.*head).*", "!*head*"),
        (re.compile("mlp"), "mlp"), (r"blocks/\w+/q.?", "blocks/*/q"),
    ],
)  # fmt: skip
def test_a_regular_expression_is_answered_with_its_pattern(regex: Any, pattern: str) -> None:
    words = f"path={regex!r} is a regular expression; jchop's pattern is {pattern!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        check_path_pattern("path", regex)
    assert check_path_pattern("path", pattern) == pattern


@each("regex", [
    "decoder/.*layers.*", "layers.*.mlp", ".*mlp", "decoder/.*(attn/(q|k)|mlp/(w|q))", "a.*b", "a.+", ".+/.*q",
    "mlp?/q", "decoder/((a|b)/)?layers.*/.*(attn/(q|k)|mlp/.*w)", r"layers/\d+/mlp", "", ".*/attn/.*", "layers/[^/]*/q",
    "a.mlp",
])  # fmt: skip
def test_the_pattern_of_a_whole_path_matches_what_its_regular_expression_does(regex: str) -> None:
    names = ["decoder", "layers", "0", "12", "mlp", "attn", "q", "w", "a", "b", "xmlp", "amlp", "layers_b", "ab"]
    paths = ["", *names, *("/".join(parts) for count in (2, 3) for parts in itertools.product(names, repeat=count))]
    paths += [f"decoder/{path}" for path in paths[1:]]
    pattern = pattern_of_regex(regex, dotted=False, whole=True)
    assert pattern is not None and check_path_pattern("path", pattern) == pattern
    assert [path for path in paths if matches_path(pattern, path) != bool(re.fullmatch(regex, path))] == []


def test_the_nearest_paths_come_first() -> None:
    paths = ["head", "blocks/0/attention/query", "blocks/0/attention/key"]
    assert nearest_paths_hint(["atention/qery"], paths) == (
        "; the nearest paths are 'blocks/0/attention/query', 'blocks/0/attention/key'"
    )
    assert nearest_paths_hint(["zzz"], paths) == f"; the nearest paths are {', '.join(map(repr, paths))}"
    assert nearest_paths_hint(["a"], [""]) == ""
    assert nearest_paths_hint(["5.weight"], ["0", "1", "5"]) == "; the nearest paths are '5'"
    assert nearest_paths_hint(["a.0.mpl"], ["a", "a.1.mlp"]) == "; the nearest paths are 'a.1.mlp', 'a'"
    assert nearest_paths_hint(["head"], ["head", "head/kernel"]) == "; the nearest paths are 'head/kernel'"


@each("path", ["", "w", "a/b", "a b", "!c", "{d}/e", "f*?", "[g]", "h\\i", "j,k"])
def test_the_pattern_of_a_path_matches_it_and_not_others(path: str) -> None:
    pattern = check_path_pattern("path", path_pattern(path))
    assert matches_path(pattern, path) and not matches_path(pattern, "other")
