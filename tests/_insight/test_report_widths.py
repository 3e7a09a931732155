"""Every report fits 100 columns, with the names of a program that has long ones, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from each_case import each
from flax import nnx

import jchop as jc
from jchop._common.text import cut_middle, table_lines

LONG = "an_attention_block_of_the_decoder_with_a_name_that_says_everything"
SPEC = "float8_e4m3fn(group=32,scale=bfloat16)"
X, W = jax.random.normal(jax.random.key(0), (4, 64)), jax.random.normal(jax.random.key(1), (64, 64))
PARAMS = {LONG: {"feed_forward_projection_of_the_hidden_state": W}}


def program(x: Any) -> Any:
    with jax.named_scope(LONG), jax.named_scope("the_inner_product_of_queries_and_keys"):
        y = jnp.sum(jnp.exp(x * 9.0) * x)
    return y - jnp.log(y)


def product(params: Any, x: Any) -> Any:
    with jax.named_scope(LONG):
        return x @ params[LONG]["feed_forward_projection_of_the_hidden_state"]


class Network(nnx.Module):
    def __init__(self) -> None:
        setattr(self, LONG, nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.LayerNorm(64, rngs=nnx.Rngs(1))))

    def __call__(self, x: Any) -> Any:
        return getattr(self, LONG)(x)


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(model(x)))


def study() -> Any:
    rows = [
        jc.study._run.StudyRow(f"{SPEC}{name}", mode, SPEC, 8.5, 3, 0.5, 0.125, 0.7, 0.25)
        for name in ("", LONG)
        for mode in ("nearest_even", "stochastic")
    ]
    return jc.study.StudyResult(tuple(rows), {}, 0.5, 0.7, (), 9, 3, 2, 0.1, {})


low = jc.emulate(program, "bfloat16:toward_zero:saturate:flush")
REPORTS: dict[str, Callable[[], Any]] = {
    "report": lambda: low.report(X),
    "report of values": lambda: low.report(X, trace_values=True),
    "blame": lambda: low.blame(X),
    "digits": lambda: jc.significant_digits(program, X, key=jax.random.key(0)),
    "tune": lambda: jc.tune(program, ["e8m7", "e8m20"], [X], 0.1, by="equation"),
    "compare": lambda: jc.compare(X, [SPEC, "e4m3fn", "codebook(-1,-0.6,-0.3,-0.2,-0.1,0,0.1,0.2,0.3,0.6,1)"]),
    "compare lines": lambda: jc.compare(low, jc.emulate(program, "e4m3"), X),
    "ranges": lambda: low.ranges([X, 2 * X]),
    "study of a function": lambda: jc.study.run_function(program, X, formats=["e4m3fn"], modes=["stochastic"]),
    "study": study,
    "quantize_fn": lambda: jc.quantize_fn(product, SPEC).report(PARAMS, X, platform="a100"),
    "nn.report": lambda: jc.nn.report(Network(), SPEC),
    "nn.report of batches": lambda: jc.nn.report(Network(), jc.Rule(weight=SPEC), batches=[X], platform="a100"),
    "nn.report of a program": lambda: jc.nn.report(Network(), SPEC, inputs=(X,)),
    "sensitivity": lambda: jc.nn.sensitivity(Network(), ["int8", "int4", SPEC, "mxfp4", "nvfp4"], [X]),
    "allocate_bits": lambda: jc.nn.allocate_bits(Network(), [SPEC, "int4(group=32)"], [X], loss=loss, bits=8.6),
}


@each("name", REPORTS)
def test_it_fits_and_has_the_rest(name: str) -> None:
    report = REPORTS[name]()
    text, whole = str(report), report.table(width=None)
    assert max(map(len, text.splitlines())) <= 100, text
    assert "…" not in whole and "more columns" not in whole
    if max(map(len, whole.splitlines())) > 100:
        assert text != whole and report.table(width=1000) == whole
    narrow = report.table(width=70).splitlines()
    assert max(map(len, narrow)) <= 100


def test_columns_are_left_out_in_their_order_and_named() -> None:
    rows = [("path", "shape", "bits"), ("a" * 30, "3×4", "8")]
    everything = [f"{'path':30}  shape  bits", f"{'a' * 30}  3×4       8"]
    assert table_lines(rows, "<<>", 43, ("shape",)) == everything == table_lines(rows, "<<>")
    cut = [f"{'path':20}  shape  bits", f"{'a' * 10}…{'a' * 9}  3×4       8"]
    assert table_lines(rows, "<<>", 33, ("shape",)) == cut
    fewer = [
        f"{'path':26}  bits",
        f"{'a' * 13}…{'a' * 12}     8",
        "more columns: shape;",
        "  .table(width=None) has all",
    ]
    assert table_lines(rows, "<<>", 32, ("shape",)) == fewer
    empty = [(*row, cell) for row, cell in zip(rows, ("note", "-"), strict=True)]
    lines = table_lines(empty, "<<><", 38, ("shape", "note"), "--json")
    assert lines[0].split() == ["path", "shape", "bits"] and lines[2] == "more columns: note; --json has all"


def test_a_text_is_cut_in_its_middle() -> None:
    assert [cut_middle("abcdefgh", n) for n in (8, 7, 4)] == ["abcdefgh", "abc…fgh", "ab…h"]
