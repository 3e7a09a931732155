"""The cases of products of codes: which units they reach.

    PYTHONPATH=tests python tests/_kernels/compile_codes.py --table docs/kernels.md

writes the table of that page: of each product and chip the types that are multiplied, as the compilers say it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from _kernels.compiling import CPU, LARGE_TILE, TARGETS, TOLD, Case, Result, has_mosaic, is_tpu, run
from jax import lax

import jchop as jc

#: Weight, activation, gradient.
RULES = {
    "int8": ("int8(group=all)", "int8(group=all)", None),
    "int4 weights of 128": ("int4(group=128)", "int8(group=all)", None),
    "uint8 with zero points": ("int8(group=all)", "uint8(group=all,zero_point=integer)", None),
    "int8 backward": ("int8(group=all)", "int8(group=all)", "int8(group=all)"),
    "fp8": ("e4m3fn(group=all)", "e4m3fn(group=all)", None),
    "e5m2": ("e5m2(group=all)", "e5m2(group=all)", None),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3", None),
    "mxfp6": ("mxfp6_e2m3", "mxfp6_e2m3", None),
    "mxfp4": ("mxfp4", "mxfp4", None),
    "nvfp4": ("nvfp4", "nvfp4", None),
    "nf4 weights": ("nf4(group=64)", "int8(group=all)", None),
    "int8 weights alone": ("int8(group=all)", None, None),
}
ROWS, INPUTS, OUTPUTS = 256, 512, 256


#: Rows of the table, and their cases.
ROWS_OF_TABLE = {
    "int8 × int8": "int8",
    "int4 in groups of 128 × int8": "int4 weights of 128",
    "int8 × uint8 with zero points": "uint8 with zero points",
    "int8 × int8 and both backward products": "int8 backward",
    "e4m3fn × e4m3fn": "fp8",
    "e5m2 × e5m2": "e5m2",
    "mxfp8 × mxfp8": "mxfp8",
    "mxfp6 × mxfp6": "mxfp6",
    "mxfp4 × mxfp4": "mxfp4",
    "nvfp4 × nvfp4": "nvfp4",
    "nf4 × int8": "nf4 weights",
    "convolution int8 × int8": "convolution int8",
    "convolution e4m3fn × e4m3fn": "convolution fp8",
    "experts int8 × int8": "experts int8",
    "int4 in groups of 128 alone, 1 row of bfloat16": "int4 weights alone, 1 rows",
    "int4 in groups of 128 alone, 64 rows": "int4 weights alone, 64 rows",
    "int8 alone, 256 rows of float32": "int8 weights alone",
}


def cases(target: str) -> Iterator[Case]:
    """Each with its checks; those of the table also tell what they multiply."""
    for case in _cases(target):
        checks = () if target == CPU else case.checks
        told = case.name in ROWS_OF_TABLE.values()
        if told or target != CPU:
            tile = None if target == "a100" else case.tile  # too large for its memory
            yield replace(case, checks=(*checks, "told") if told else checks, tile=tile)


def _cases(target: str) -> Iterator[Case]:
    """Layers with packed weights; backward also with their own."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, INPUTS), (INPUTS, OUTPUTS)))
    for name, (weight, activation, gradient) in RULES.items():
        rule = jc.Rule(weight=weight, activation=activation, gradient=gradient, product="codes")
        low = jc.quantize_fn(lambda w, x: x @ w, rule)
        checks: tuple[str, ...] = ()
        if activation and "int8" in activation and not weight.startswith("nf4"):
            checks = ("integer units",) if is_tpu(target) else ("integer units", "integer machine code")
        elif activation and not weight.startswith("nf4") and target != "a100":  # which has no units for float8
            checks = ("float8 units",) if is_tpu(target) else ("float8 units", "float8 machine code")
            if target == "h200" and name in ("mxfp6", "mxfp4"):  # by the kernel of mxfp8, which is compiled once
                checks = ("float8 units",)
        # Also with several scales along the sum, of which Hopper and TPUs have kernels, Hopper from blocks of 32 on.
        loops = target in ("a100", "b200") or (target, name) == ("h200", "nvfp4")
        checks += ("no loop",) if checks and not loops else ()
        if gradient is None:
            yield Case(name, low, (low.pack(w, x), x), checks=checks, tile=LARGE_TILE)
        else:
            back = jax.grad(lambda w, x, low=low: (low(w, x) ** 2).sum(), (0, 1))
            yield Case(name, back, (w, x), checks=checks, tile=LARGE_TILE)
    yield from convolutions(target)
    yield from experts(target)
    yield from weights_alone(target)
    pair = tuple(jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32) for _ in range(2))
    yield Case("double from int8", jc.math.matmul_double, (pair, pair), checks=("integer units",))
    yield from one_token(target)
    yield from large_layers(target)


def convolutions(target: str) -> Iterator[Case]:
    """Of images; a GPU multiplies matrices of their windows."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 16, 16, 128), (3, 3, 128, 128)))

    def conv(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    for name in ("int8", "uint8 with zero points", "int8 backward", "fp8"):
        weight, activation, gradient = RULES[name]
        low = jc.quantize_fn(conv, jc.Rule(weight=weight, activation=activation, gradient=gradient, product="codes"))
        kind = "float8" if name == "fp8" else "integer"
        checks = (f"{kind} units",) if is_tpu(target) else (f"{kind} units", f"{kind} machine code")
        if name == "fp8" and target == "a100":
            checks = ()
        if gradient is None:
            yield Case(f"convolution {name}", low, (low.pack(w, x), x), checks=checks, tile=LARGE_TILE)
        else:
            back = jax.grad(lambda w, x, low=low: (low(w, x) ** 2).sum(), (0, 1))
            yield Case(f"convolution {name}", back, (w, x), checks=checks, tile=LARGE_TILE)


def experts(target: str) -> Iterator[Case]:
    """Rows of four experts. A TPU has one operation for all of it, in which no product is seen."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, INPUTS), (4, INPUTS, OUTPUTS)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    rule = jc.Rule(weight="int8(group=all)", activation="int8(group=all)", product="codes")
    low = jc.quantize_fn(lambda w, x, sizes: lax.ragged_dot(x, w, sizes), rule)
    checks = () if is_tpu(target) else ("integer units",)
    yield Case("experts int8", low, (low.pack(w, x, sizes), x, sizes), checks=checks)


def weights_alone(target: str) -> Iterator[Case]:
    """Four bits under scales of 128, one row and many: by the kernel, whose checks are those of its own cases."""
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight="int4(group=128)", product="codes"))
    for rows in (1, 64):
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
        kernel = rows == 1 and has_mosaic(target)
        checks = ("vmem",) if is_tpu(target) else ("spills",) if kernel else ()
        yield Case(f"int4 weights alone, {rows} rows", low, (low.pack(w, x), x), checks=checks)


def one_token(target: str) -> Iterator[Case]:
    """A step of decoding."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (1, 4096)))
    for weight in ("int4(group=128)", "int4(group=128,scale=bfloat16)", "nf4(group=128)"):
        low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=weight, product="codes"))
        checks = ("vmem", "moved") if is_tpu(target) else ("spills", "moved") if has_mosaic(target) else ("body",)
        yield Case(f"{weight} weights alone, one row of 4096", low, (low.pack(w, x), x), checks=checks)


def large_layers(target: str) -> Iterator[Case]:
    """Few pieces: the scales of activations are no kernels of their own, one for each step."""
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    check = "layer of a TPU" if is_tpu(target) else f"layer of {'an old' if target == 'a100' else 'a'} GPU"
    for spec in ("int8(group=all)", "e4m3fn(group=all)"):
        low = jc.quantize_fn(lambda w, x: x @ w, jc.Rule(weight=spec, activation=spec, product="codes"))
        yield Case(f"{spec} layer of 4096", low, (jax.eval_shape(low.pack, square, square), square), checks=(check,))


# -- the table ---------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- table of products, JAX {} -->", "<!-- end of the table of products -->"


def told(results: Sequence[Result]) -> dict[str, str]:
    """The column of a target: what each row multiplies."""
    found = {
        result.name: finding.removeprefix(TOLD)
        for result in results
        for finding in result.findings
        if finding.startswith(TOLD)
    }
    return {row: found[case] for row, case in ROWS_OF_TABLE.items()}


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """The table of columns by target; targets that are alike have one column, and products one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for target, column in columns.items():
        alike.setdefault(tuple(column[row] for row in ROWS_OF_TABLE), []).append(target)
    rows: dict[tuple[str, ...], list[str]] = {}
    for row, *cells in zip(ROWS_OF_TABLE, *alike, strict=True):
        rows.setdefault(tuple(cells), []).append(row)
    lines = [("weight × activation", *map("; ".join, alike.values())), ["---"] * (1 + len(alike))]
    lines += [("; ".join(names), *cells) for cells, names in rows.items()]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{_BEGIN.format(jax.__version__)}\n\n{text}\n\n{_END}"


def committed(page: str) -> tuple[str, dict[str, dict[str, str]]]:
    """The version of JAX and the columns by target of a page's table."""
    version, text = _in(page).groups()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines())
    columns = {target: i for i, names in enumerate(head) for target in names.split("; ") if i}
    cells = {name: row for row in rows for name in row[0].split("; ")}
    return version, {target: {name: cells[name][i] for name in ROWS_OF_TABLE} for target, i in columns.items()}


def _in(page: str) -> re.Match[str]:
    found = re.search(_BEGIN.format("(.*?)") + "(.*?)" + _END, page, re.DOTALL)
    assert found, "the page has no place for the table"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="write what the compilers of all chips make of products of codes")
    parser.add_argument("--table", type=Path, required=True, help="a page with the place of the table")
    page = parser.parse_args().table
    text = page.read_text()
    place = _in(text)
    columns = {target: told(run(target, Path(__file__))) for target in (*TARGETS, CPU)}
    page.write_text(text[: place.start()] + table(columns) + text[place.end() :])


if __name__ == "__main__":
    main()
