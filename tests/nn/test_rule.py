"""Rules: what they hold, what they match, and what they refuse."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from layer_references import each

import jchop as jc
from jchop._quantized.products.rule import as_rule_tuple


@each(
    ("pattern", "path", "matches"),
    [
        ("*", "", True),
        ("*", "a/b", True),
        ("head", "head", True),
        ("head", "head/query", True),
        ("head", "blocks/0/head", True),
        ("head", "heads", False),
        ("blocks/*/mlp", "blocks/10/mlp/up", True),
        ("blocks/*/mlp", "blocks/10/attention", False),
        ("*norm*", "blocks/0/norm_1", True),
        ("blocks/[01]", "model/blocks/1/mlp", True),
        ("blocks/[01]", "model/blocks/2/mlp", False),
        ("/", "", True),  # a slash at the end is for one module
        ("/", "a", False),
        ("block/", "a/block", True),
        ("block/", "block/dense", False),
        ("blocks/*/", "blocks/3", True),
        ("blocks/*/", "blocks/3/dense", False),
        ("a/block/", "block", False),
    ],
)
def test_a_pattern_is_for_a_piece_of_the_path(pattern: str, path: str, matches: bool) -> None:
    assert jc.Rule(pattern).matches(path) == matches


def test_rules_select_by_class_and_operation() -> None:
    rule = jc.Rule("!head", layer="Linear*", operation="{dot_general,conv}", weight="int8")
    assert rule.matches("up", layer="LinearGeneral", operation="conv")
    assert not rule.matches("head", layer="Linear", operation="conv")
    assert not rule.matches("up", layer="Embed", operation="dot_general")
    assert not rule.matches("up", layer="Linear", operation="embedding") and not rule.matches("up")
    assert str(rule) == "Rule('!head', layer=Linear*, operation={dot_general,conv}, weight=int8)"


def test_rules_are_values() -> None:
    rule = jc.Rule(
        "head", weight=jc.formats.int4(group=32), activation="int8(group=all)", matmul=jc.MatmulSpec(accumulate="e5m10")
    )
    same = jc.Rule(
        "head",
        weight="int4(group=32)",
        activation=jc.formats.int8(group="all"),
        matmul=jc.MatmulSpec(accumulate="e5m10"),
    )
    assert rule == same and hash(rule) == hash(same)
    assert str(rule) == (
        "Rule('head', weight=int4(group=32), activation=int8(group=all), matmul=(accumulate=e5m10, order=sequential))"
    )
    assert not rule.stochastic
    assert jc.Rule(gradient="e5m2:stochastic").stochastic
    assert jc.Rule(weight="e5m2:gradient=[e5m2:stochastic]").stochastic
    assert jc.Rule(matmul=jc.MatmulSpec(accumulate="e5m2:stochastic")).stochastic


@each(
    ("fields", "error", "words"),
    [
        ({"path": ""}, TypeError, "path=''"),
        ({"path": r"a\.b"}, ValueError, "is a regular expression"),
        ({"layer": "{A"}, ValueError, "layer='{A' is no pattern.*not closed"),
        ({"operation": "exp"}, ValueError, "operation='exp' must match one of dot_general, conv"),
        ({"weight": 8}, TypeError, "weight=8"),
        ({"path": ".*q_proj|.*kv_proj"}, ValueError, "is a regular expression"),
        ({"weight": float}, TypeError, "weight=<class 'float'> must be a Spec, a format, a dtype, or text"),
        ({"weight_qtype": "int8"}, TypeError, r"Rule has no weight_qtype=; write Rule.from_qwix\(rule\)"),
        ({"bits": 4}, TypeError, r"Rule has no bits=; write weight='int4\(group=32\)'"),
        ({"weight": "int8(rule=minmax)"}, ValueError, "add zero_point=integer, or leave rule out"),
        ({"weight": "e4m3(group=4,rule=minmax)"}, ValueError, "zero points go with rule='minmax'; leave rule out"),
        ({"weight": "int4(zero_point=float,rule=absmax)"}, ValueError, "write rule=minmax, or leave rule out"),
        ({"weight": "int99x"}, ValueError, "int99x"),
        ({"matmul": "e5m2"}, TypeError, "matmul='e5m2'"),
        ({"matmul": jc.MatmulSpec("e5m2")}, ValueError, "activation= and weight="),
        ({"gradient": "e5m2:gradient=clipped"}, ValueError, "no gradient of its own"),
        ({"stochastic_stream": ""}, TypeError, "stochastic_stream=''"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jc.Rule(**fields)


class QuantizationRule:
    """Fields of the rule of qwix."""

    module_path, weight_qtype, act_qtype, tile_size = ".*", jnp.int4, "int8", 32


@each("given", [QuantizationRule(), [QuantizationRule()]])
def test_a_rule_of_qwix_is_answered_with_the_call_that_reads_it(given: Any) -> None:
    with pytest.raises(TypeError, match=r"jc\.Rule\.from_qwix\(rules\) reads rules of qwix"):
        jc.quantize_fn(lambda p, x: x @ p, given)


@each(
    ("given", "rules"),
    [
        ("int4", (jc.Rule(weight="int4"),)),
        (jnp.int8, (jc.Rule(weight="int8"),)),
        (jc.Rule("a", weight="int4"), (jc.Rule("a", weight="int4"),)),
        ({"a": "int4", "*": None}, (jc.Rule("a", weight="int4"), jc.Rule())),
        ({"a": {"activation": "int8"}}, (jc.Rule("a", activation="int8"),)),
        ({"a": jc.Rule(weight="int4"), "b": jc.Rule("b", weight="int8")}, ({"a": "int4", "b": "int8"})),
    ],
)
def test_rules_are_a_spec_a_mapping_or_several(given: Any, rules: Any) -> None:
    assert as_rule_tuple(given) == (as_rule_tuple(rules) if isinstance(rules, dict) else rules)


@each(
    ("rules", "message"),
    [
        (3, "rules=3 must be a jchop.Rule, several, or a mapping such as {.*: 'int4'}"),
        ({"a": jc.Rule("b", weight="int4")}, "has another path"),
        ({"a": 3}, "weight=3 must be a Spec"),
        ([], "must be a jchop.Rule"),
        ({}, "must be a jchop.Rule"),
    ],
)
def test_what_is_no_rule_is_answered_with_one(rules: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        jc.quantize_fn(lambda p, x: x @ p, rules)
