"""``jchop formats`` and ``jchop info``."""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jchop._cli._command import Command, argument, check_pictures, flag, print_json, write_pictures
from jchop._cli._text import (
    binary_code,
    fact_text,
    hexadecimal_code,
    integer_digits,
    json_value,
    short_decimal,
    text_table,
    yes_or_no,
)
from jchop._common.checks import check
from jchop._common.on_demand import load_name
from jchop.formats import (
    ALIASES,
    CATALOGUE,
    SCALED_CATALOGUE,
    ElementFormat,
    FloatFormat,
    ScaledFormat,
    TaperedFormat,
    UniformFormat,
    parse_format,
)


def _run_formats(options: argparse.Namespace) -> None:
    widths, facts, specials = "bits exp frac bias p", ("max", "min normal", "min subn.", "roundoff"), "inf nan -0"
    head = ("name", *widths.split(), *facts, *specials.split(), "also")
    rows = [
        (
            name,
            *(fmt.bits, fmt.exp_bits, fmt.frac_bits, fmt.bias, fmt.precision),
            *(fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.unit_roundoff),
            *(fmt.has_inf, fmt.has_nan, fmt.has_negative_zero),
            " ".join(other for other, main in ALIASES.items() if main == name),
        )
        for name, fmt in CATALOGUE.items()
    ]
    if options.json:
        print_json([dict(zip(head, map(json_value, row), strict=True)) for row in rows])
        return
    print(
        text_table(
            [head, *(tuple(_cell_text(value, short_decimal) for value in row) for row in rows)], "<" + ">" * 12 + "<"
        )
    )
    print(
        "\nPatterns: e5m10 e5m3fn e5m3fnuz ue5m3 fixed4.4 ufixed4.4 integer8 uinteger4 binary8p3se posit16 "
        "takum_linear16 codebook(-1,0,0.5)"
    )
    print(f"Scaled: {' '.join(SCALED_CATALOGUE)} bfp8(group=16) int8 int4(group=128) e4m3fn(channel=0)")


def _run_info(options: argparse.Namespace) -> None:
    parsed_format = parse_format(options.format)
    fmt = parsed_format.element if isinstance(parsed_format, ScaledFormat) else parsed_format
    check_pictures(options)
    try:
        picture = None if options.plot is None else load_name("jchop.plot", "value_grid")(fmt)
    except ValueError as error:
        raise ValueError(f"--plot: {error}") from None
    if options.csv:
        check(picture is None and not options.json, "--csv prints codes alone, without --plot and --json")
        print(_codes_as_csv(parsed_format, options.all), end="")
        return
    _print_info(parsed_format, fmt, options.json, options.all)
    if picture is not None and not options.json:
        print()
    write_pictures(options, lambda: picture)


def _print_info(
    parsed_format: ElementFormat | ScaledFormat, fmt: ElementFormat, as_json: bool, every_code: bool
) -> None:
    head, codes = _CODE_COLUMNS, _rows_of_codes(fmt, every_code)
    scales = _scale_rows(parsed_format, True) if every_code else []
    if as_json:
        report: dict[str, Any] = {"format": str(parsed_format), "element": str(fmt)}
        report |= {name: json_value(value) for name, value in _element_facts(fmt).items()}
        report |= _scaling_facts(parsed_format) if isinstance(parsed_format, ScaledFormat) else {}
        for name, rows in ({"codes": codes} | ({"scale codes": scales} if scales else {})).items():
            report[name] = [dict(zip(head, map(json_value, row), strict=True)) for row in rows]
        print_json(report)
        return
    if isinstance(parsed_format, ScaledFormat):
        facts = _scaling_facts(parsed_format)
        facts["bits per element"] = f"{facts['bits per element']:g}" + " in a large array" * (
            parsed_format.bits == facts["bits per element"]
        )
        print(f"{parsed_format}\n\n{_facts_table(facts)}\n\nElements:")
    text = getattr(fmt, "text", str(fmt))
    print(f"{fmt}" + (f"  ({text})" if text != str(fmt) else ""))
    print(_code_layout(fmt))
    print(_facts_table(_element_facts(fmt)))
    for rows in (codes, scales):
        if rows:
            print("\nScales:" if rows is scales else "")
            print(text_table([head, *((*row[:2], _value_text(row[2]), row[3]) for row in rows)], "<<><"))


def _code_layout(fmt: ElementFormat) -> str:
    """The fields of a code, highest bit first."""
    if isinstance(fmt, FloatFormat):
        fields = [("sign", int(fmt.signed)), ("exponent", fmt.exp_bits), ("fraction", fmt.frac_bits)]
    elif isinstance(fmt, TaperedFormat):
        fields = [(fmt.parts, fmt.bits)]
    else:
        uniform = isinstance(fmt, UniformFormat)
        fields = [(("two's complement" if fmt.signed else "unsigned") if uniform else "index", fmt.bits)]
    boxes, bits_left = [], fmt.bits
    for name, width in fields:
        if width:
            bit_range = f"bit {bits_left - 1}" if width == 1 else f"bits {bits_left - 1}..{bits_left - width}"
            box_width = max(len(name), len(bit_range))
            boxes.append((name.center(box_width), bit_range.center(box_width), "-" * (box_width + 2)))
            bits_left -= width
    edge = "  +" + "+".join(box[2] for box in boxes) + "+"
    return "\n".join(["", edge, *("  | " + " | ".join(box[line] for box in boxes) + " |" for line in (0, 1)), edge, ""])


def _element_facts(fmt: ElementFormat) -> dict[str, Any]:
    numbers = ("max", "min", "smallest_normal", "smallest_subnormal", "smallest", "eps", "unit_roundoff")
    facts: dict[str, Any] = {"bits": fmt.bits, "precision": fmt.precision}
    if isinstance(fmt, FloatFormat):
        facts |= {"bias": fmt.bias, "smallest exponent": fmt.emin, "largest exponent": fmt.emax}
    facts |= {name.replace("_", " "): getattr(fmt, name) for name in numbers}
    return facts | {"infinities": fmt.has_inf, "NaN": fmt.has_nan, "-0": fmt.has_negative_zero}


def _facts_table(facts: dict[str, Any]) -> str:
    return text_table([(f"  {name}", _cell_text(value, fact_text)) for name, value in facts.items()], "<<", rule=False)


def _cell_text(value: Any, format_number: Callable[[Any], str]) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return yes_or_no(value)
    return str(value) if isinstance(value, str | int) else format_number(value)


def _scaling_facts(fmt: ScaledFormat) -> dict[str, Any]:
    """The grouping of a scaled format, and the choice and format of its scales."""
    group = f"{fmt.group} along axis {fmt.axis}" if fmt.group is not None else "the whole tensor"
    return {
        "group": group if fmt.channel is None else f"each index of axis {fmt.channel}",
        "scale": str(fmt.scale),
        "rule": f"{fmt.rule}: {fmt.scale_rule.formula}",
        "zero point": None if fmt.zero_point is None else str(fmt.zero_point),
        **({"sparse": "{} of every {} along axis {}".format(*fmt.sparse, fmt.axis_of_sparse)} if fmt.sparse else {}),
        "bits per element": fmt.bits_per_element(),
    }


def _value_text(value: float | Fraction | None) -> str:
    return short_decimal(value) if value is None else integer_digits(value) or short_decimal(value)


#: The columns of a table of codes.
_CODE_COLUMNS = ("code", "binary", "value", "which")
_MAX_LISTED_BITS = 16


def _codes_as_csv(fmt: ElementFormat | ScaledFormat, every: bool) -> str:
    """A line for each code, with its exact value; of a scaled format for each code of elements, then of scales."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if isinstance(fmt, ElementFormat):
        writer.writerows([_CODE_COLUMNS, *(map(json_value, row) for row in _rows_of_codes(fmt, every))])
        return text.getvalue()
    writer.writerow(("part", *_CODE_COLUMNS))
    for part, rows in {"element": _rows_of_codes(fmt.element, every), "scale": _scale_rows(fmt, every)}.items():
        writer.writerows((part, *map(json_value, row)) for row in rows)
    return text.getvalue()


def _scale_rows(fmt: ElementFormat | ScaledFormat, every: bool) -> list[tuple[str, str, Any, str]]:
    """The codes of scales that are stored as codes."""
    has_codes = isinstance(fmt, ScaledFormat) and fmt.scale_format.bits <= _MAX_LISTED_BITS
    return _rows_of_codes(fmt.scale_format, every) if has_codes else []  # type: ignore[union-attr]


def _rows_of_codes(fmt: ElementFormat, every: bool = False) -> list[tuple[str, str, Any, str]]:
    """Codes with their values: every one, or the notable ones that the format has."""
    candidates = {
        "zero": 0.0,
        "minus zero": -0.0 if fmt.has_negative_zero else None,
        "smallest positive": fmt.smallest,
        "smallest normal": fmt.smallest_normal,
        "one": 1.0,
        "largest": fmt.max,
        "lowest": fmt.min,
        "infinity": math.inf if fmt.has_inf else None,
        "NaN": math.nan if fmt.has_nan else None,
    }
    names: dict[int, list[str]] = {}
    for name, value in candidates.items():
        code = None if value is None else fmt.code_of(value)
        if code is not None:
            names.setdefault(code, []).append(name)
    if every:
        check(fmt.bits <= _MAX_LISTED_BITS, f"--all lists codes of up to {_MAX_LISTED_BITS} bits; {fmt} has {fmt.bits}")
        names = {code: names.get(code, []) for code in range(1 << fmt.bits)}
    return [
        (hexadecimal_code(fmt, code), binary_code(fmt, code), fmt.value_of(code), ", ".join(descriptions))
        for code, descriptions in names.items()
    ]


FORMAT_LIST = Command("formats", _run_formats, "list the named formats", [argument("--json")])
INFO = Command(
    "info",
    _run_info,
    "show the properties of one format, its bit layout, its values",
    (
        argument("format", "FORMAT", "a name or pattern: e4m3fn, bfloat16, e6m9, fixed4.4, ..."),
        argument("--plot", help="draw its values (needs matplotlib)"),
        argument("--json", help="print JSON in place of the tables"),
        flag("--all", "list every code, and the codes of scales"),
        flag("--csv", "print the codes alone, as CSV"),
    ),
)
